"""Arguments as text: `float32[8,16], {"w": f32[16,32]}, training=True`."""

from __future__ import annotations

import ast
import inspect
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.export import SymbolicScope, symbolic_shape

from sbp.errors import SbpError, nearest
from sbp.kinds import AXIS_NAMES, can_name

FORM = "float32[8,16], int32[8]"
"""The form that errors quote."""

_SHORT = {"key": "key", "bool": "bool_", "bf16": "bfloat16"} | {
    f"{letter}{bits}": f"{name}{bits}"
    for letter, name, widths in (
        ("f", "float", (16, 32, 64)),
        ("i", "int", (4, 8, 16, 32, 64)),
        ("u", "uint", (4, 8, 16, 32, 64)),
        ("c", "complex", (64, 128)),
    )
    for bits in widths
}
"""Short names of dtypes, as a jaxpr prints them."""

_NAMES = (*_SHORT, *_SHORT.values(), "bool_", "float8_e4m3fn", "float8_e5m2")


def arguments(text: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, from text in Python's syntax.

    An array is a dtype with its sizes in brackets; a name in place of a size is a symbolic size.
    Tuples, lists and dicts nest. Numbers, strings, True, False and None stand for themselves.

    Arguments:
      text: the arguments, separated by commas.

    Returns:
      Positional arguments and keyword arguments; arrays are `jax.ShapeDtypeStruct`s.

    Raises:
      SbpError: `unknown-option` for a text of another form.

    >>> arguments("f32[8,16], {'w': bf16[]}, training=True")[1]
    {'training': True}
    """
    try:
        call = ast.parse(f"f({_scalars(text)}\n)", mode="eval").body
    except (SyntaxError, ValueError):
        raise _refused(text, "is not of the form") from None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise _refused(text, "is not of the form")
    reader = _ArgumentReader(text)
    named = {k.arg: reader.value(k.value) for k in call.keywords if k.arg is not None}
    if len(named) != len(call.keywords):
        raise _refused(text, "names an argument twice, or unpacks one; it is not of the form")
    return tuple(map(reader.value, call.args)), named


def _scalars(text: str) -> str:
    """The text with `f32[]` written as `f32[()]`, which Python parses."""
    parts = text.split("[]")
    return parts[0] + "".join(
        ("[()]" if before[-1:].isalnum() else "[]") + after
        for before, after in itertools.pairwise(parts)
    )


def _refused(text: str, why: str) -> SbpError:
    return SbpError(f"--args {text!r} {why} {FORM!r}", code="unknown-option")


class _ArgumentReader:
    """Reads the syntax trees of the arguments of one call, whose symbolic sizes are related."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._scope = SymbolicScope()

    def value(self, part: ast.expr) -> Any:
        """What a syntax tree stands for."""
        match part:
            case ast.Constant(value=value):
                return value
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
                return -value
            case ast.Tuple(elts=elements):
                return tuple(map(self.value, elements))
            case ast.List(elts=elements):
                return list(map(self.value, elements))
            case ast.Dict(keys=keys, values=values):
                return {
                    self.value(key): self.value(value)
                    for key, value in zip(keys, values, strict=True)
                    if key is not None
                }
            case ast.Name(id=name):
                return _array(name, ())
            case ast.Subscript(value=ast.Name(id=name), slice=ast.Tuple(elts=sizes)):
                return _array(name, self._shape(sizes))
            case ast.Subscript(value=ast.Name(id=name), slice=size):
                return _array(name, self._shape([size]))
            case _:
                raise _refused(self._text, f"has {ast.unparse(part)!r}; it is not of the form")

    def _shape(self, sizes: list[ast.expr]) -> tuple[Any, ...]:
        given = ", ".join(map(ast.unparse, sizes))
        if not given:
            return ()
        try:
            shape = symbolic_shape(given, scope=self._scope)
        except ValueError:
            raise _refused(self._text, f"has the sizes [{given}]; it is not of the form") from None
        if any(isinstance(size, int) and size < 0 for size in shape):
            raise _refused(self._text, f"has the sizes [{given}]; it is not of the form")
        return tuple(shape)


def _array(name: str, shape: tuple[Any, ...]) -> Any:
    """An array by its dtype and shape; `key` is a random key.

    Raises:
      SbpError: `unknown-option` for another dtype, with the nearest name.
    """
    full = _SHORT.get(name, name)
    if full == "key":
        return jax.ShapeDtypeStruct(shape, jax.eval_shape(jax.random.key, 0).dtype)
    try:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(getattr(jnp, full)))
    except (AttributeError, TypeError):
        raise SbpError(
            f"--args: no dtype {name!r}{nearest(name, _NAMES)}", code="unknown-option"
        ) from None


def mesh_axes(text: str) -> Mapping[str, int]:
    """The axes of a mesh, outer first, from `data=2,model=4`.

    Raises:
      SbpError: `unknown-option` for a text of another form.

    >>> mesh_axes("data=2,model=4")
    {'data': 2, 'model': 4}
    """
    axes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = (word.strip() for word in part.partition("="))
        if not can_name(name) or not size.isdecimal() or int(size) < 1 or name in axes:
            raise SbpError(
                f"--mesh {text!r} is not of the form data=2,model=4; {AXIS_NAMES}",
                code="unknown-option",
            )
        axes[name] = int(size)
    return axes


def required_parameters(function: Callable[..., Any]) -> list[str]:
    """The parameters that have no default."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some built-in functions have none
        return []
    variable = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return [
        p.name
        for p in parameters
        if p.default is inspect.Parameter.empty and p.kind not in variable
    ]
