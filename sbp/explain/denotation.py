"""Whether a variable of the user's source is a value of the program, where a line reads it."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass

import jax

from sbp.errors import Span
from sbp.source.bindings import VariableBinding, binding_of
from sbp.source.reader import expression_at
from sbp.source.text import Position, position_at, span_of
from sbp.trace.graph import Node

SourcePosition = tuple[str, Position]
"""A file and a place in it."""


def source_position(span: Span) -> SourcePosition:
    """Where a span stands, whichever function it belongs to."""
    return span.file, position_at(span)


_SAME_ARGUMENTS = frozenset(
    f.__name__ for f in (jax.checkpoint, jax.grad, jax.jit, jax.value_and_grad)
)
"""Transforms of a function whose result takes the arguments of the function."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Denoted:
    """A value that a variable may stand for.

    Arguments:
      maker: the node that makes it; None for an input of the program or of a body.
      input_name: of an input of the program, its name; None for other values.
      made: the places of all expressions of the user from which the program has operations.
    """

    maker: Node | None
    input_name: str | None
    made: frozenset[SourcePosition]


def denotes(name: str, at: Span, frames: Sequence[Span], value: Denoted) -> bool | None:
    """Whether a variable is a value where a line reads it; None where the source does not decide.

    Arguments:
      name: the variable.
      at: the expression that reads it.
      frames: the user's frames from `at` outwards, `at` or an expression around it first.
      value: the value.
    """
    binding = binding_of(name, at)
    if binding is None:
        return None
    if binding.span is not None:
        if binding.name:
            return denotes(binding.name, binding.span, frames, value)
        return _is_made_by(binding, value)
    if len(frames) < 2:
        return _is_argument(name, value)
    passed = _argument(name, binding, frames[1])
    if passed is None:
        return None
    inside = span_of(passed, frames[1].file)
    if isinstance(passed, ast.Name):
        return denotes(passed.id, inside, frames[1:], value)
    return _is_made_by(VariableBinding(span=inside), value)


def _is_made_by(binding: VariableBinding, value: Denoted) -> bool | None:
    """Whether an expression makes a value. An expression without operations hands on what it is
    given, and an element of a result may be any of its parts."""
    assert binding.span is not None
    position = source_position(binding.span)
    if value.maker is not None and position in map(source_position, value.maker.stack):
        return True
    return False if position in value.made else None


def _is_argument(name: str, value: Denoted) -> bool | None:
    """Whether an argument of the program is a value."""
    if value.maker is not None:
        # sbp itself pins an argument that does not divide, at no line of the user.
        return False if value.maker.span is not None else None
    if value.input_name is None:
        return None
    root = value.input_name.split("[")[0].split(".")[0]
    return value.input_name == name if root == value.input_name or root != name else None


def _argument(name: str, binding: VariableBinding, caller: Span) -> ast.expr | None:
    """The argument that a call gives a parameter; None where the call does not show it.

    Arguments:
      name: the parameter.
      binding: the parameter as its function has it.
      caller: the call.
    """
    call = expression_at(caller)[0]
    if not isinstance(call, ast.Call) or any(isinstance(a, ast.Starred) for a in call.args):
        return None
    called = call.func
    if isinstance(called, ast.Call) and called.args:  # `jax.grad(f)(x)`
        transform = called.func
        known = isinstance(transform, ast.Attribute) and transform.attr in _SAME_ARGUMENTS
        called = called.args[0] if known else transform
    if not isinstance(called, ast.Name) or called.id != binding.function:
        return None
    if 0 <= binding.position < len(call.args):
        return call.args[binding.position]
    return next((k.value for k in call.keywords if k.arg == name), None)
