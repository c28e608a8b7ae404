"""Operations as Python source: for an equation of JAX, the expressions of `jax.lax` and `jax.numpy`
that trace to it, and its parameters and numbers as they are written."""

import contextlib
import enum
import inspect
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec

from sbp import _jax
from sbp.errors import SbpError, refused
from sbp.kinds import show
from sbp.trace.equations import bodies_of, is_literal

LITERAL_ELEMENTS = 16
"""The largest array that is written as numbers."""

MODULES: Mapping[str, Any] = MappingProxyType(
    {
        "jax": jax,
        "jnp": jnp,
        "np": np,
        "lax": lax,
        "P": PartitionSpec,
        "Layout": Layout,
        "with_layout_constraint": with_layout_constraint,
    }
)
"""The names that expressions use."""

_INFIX = {
    **{"add": "+", "add_any": "+", "sub": "-", "mul": "*", "div": "/", "and": "&", "or": "|"},
    **{"gt": ">", "lt": "<", "ge": ">=", "le": "<=", "eq": "==", "ne": "!=", "dot_general": "@"},
}

_CALLS = {
    **{f"reduce_{name}": f"{{0}}.{name}({{dims}})" for name in ("max", "min")},
    "all_gather": "lax.all_gather({0}, {axis_name}, axis={all_gather_dimension}, tiled={tiled})",
    "all_to_all": "lax.all_to_all({0}, {axis_name}, {split_axis}, {concat_axis}, tiled={tiled})",
    **{name: f"lax.{name}({{0}}, {{dims}}, {{index_dtype}})" for name in ("argmax", "argmin")},
    "broadcast_in_dim": "lax.broadcast_in_dim({0}, {shape}, {broadcast_dimensions})",
    "concatenate": "lax.concatenate([{all}], {dimension})",
    "convert_element_type": "{0}.astype({new_dtype})",
    "copy": "jnp.copy({0})",
    "dynamic_slice": "lax.dynamic_slice({0}, {from_1}, {slice_sizes},"
    " allow_negative_indices=False)",
    "dynamic_update_slice": "lax.dynamic_update_slice({0}, {1}, {from_2},"
    " allow_negative_indices=False)",
    "empty2": "lax.empty((), {dtype})",
    "integer_pow": "{0} ** {y}",
    "iota": "lax.broadcasted_iota({dtype}, {shape}, {dimension})",
    "layout_constraint": "with_layout_constraint({0}, {layout})",
    "pmax": "lax.pmax({0}, {axes})",
    "pmin": "lax.pmin({0}, {axes})",
    "ppermute": "lax.ppermute({0}, {axis_name}, {perm})",
    "psum": "lax.psum({0}, {axes})",
    "random_bits": "jax.random.bits({0}, {shape}, jnp.uint{bit_width})",
    "random_fold_in": "jax.random.fold_in({0}, {1})",
    "random_seed": "jax.random.key({0}, impl={impl})",
    "random_split": "jax.random.split({0}, {shape})",
    "random_unwrap": "jax.random.key_data({0})",
    "random_wrap": "jax.random.wrap_key_data({0}, impl={impl})",
    "reduce_scatter": "lax.psum_scatter({0}, {axis_name}, scatter_dimension={scatter_dimension},"
    " tiled={tiled})",
    "reduce_window": "lax.reduce_window({0}, {1}, {jaxpr}, {window_dimensions}, {window_strides},"
    " {padding}, {base_dilation}, {window_dilation})",
    "reshape": "{0}.reshape({new_sizes})",
    "select_n": "lax.select({0}, {2}, {1})",
    "stack": "lax.stack([{all}], {axis})",
    "slice": "lax.slice({0}, {start_indices}, {limit_indices}, {strides})",
    "threefry2x32": "jax.extend.random.threefry2x32_p.bind({all})",
    "top_k": "lax.top_k({0}, {k})",
    "transpose": "{0}.transpose({permutation})",
}
"""How an operation is called, by the name of its primitive. Other operations have a function of
`jax.lax` of their name, with the parameters as its keyword arguments."""

_HOMES = (("lax", lax), ("jax.lax.linalg", lax.linalg))

_SAME = {"add_any": "add", "empty2": "empty"}
"""Primitives that compute the same as another one."""


def no_source(what: str) -> SbpError:
    """The error for what has no such expression."""
    return refused(
        f"plan.source: {what} has no source that imports jax alone; run the plan itself, or export"
        " it with plan.export(path)",
        NotImplementedError,
    )


def tuple_text(parts: Sequence[str]) -> str:
    """Expressions as a tuple.

    >>> tuple_text(["x"]), tuple_text(["x", "y"])
    ('(x,)', '(x, y)')
    """
    return f"({', '.join(parts)}{',' * (len(parts) == 1)})"


def text_of(value: Any) -> str:
    """A parameter of an operation, as it is written.

    Raises:
      SbpError: `bad-argument` for one that has no source, such as a function.

    >>> text_of(((1, 2.5), jnp.float32, None))
    '((1, 2.5), jnp.float32, None)'
    """
    match value:
        case enum.Enum():
            return f"lax.{type(value).__name__}.{value.name}"
        case str() if value.isprintable() and not {*value} & {*'"\\'}:
            return f'"{value}"'
        case None | bool() | int() | str():
            return repr(value)
        case complex():
            return f"complex({text_of(value.real)}, {text_of(value.imag)})"
        case float():
            return repr(value) if np.isfinite(value) else f"float({str(value)!r})"
        case PartitionSpec():
            split = max((n for n, part in enumerate(value, 1) if part is not None), default=0)
            return f"P({', '.join(map(text_of, value[:split]))})"
        case Layout():
            return f"Layout(major_to_minor={text_of(value.major_to_minor)})"
        case _jax.Primitive():
            return f"lax.{value.name}_p"
        case _jax.Jaxpr(eqns=[eqn]) | _jax.ClosedJaxpr(eqns=[eqn]) if len(eqn.invars) == 2:
            return f"lax.{eqn.primitive.name}"
        case _ if type(value).__name__ == "PRNGImpl":
            return repr(value.name)
        case _ if hasattr(value, "_fields") or is_dataclass(value):
            keys = getattr(value, "_fields", None) or [f.name for f in fields(value)]
            named = (f"{k}={text_of(getattr(value, k))}" for k in keys)
            return f"lax.{type(value).__name__}({', '.join(named)})"
        case tuple():
            return tuple_text([*map(text_of, value)])
        case list():
            return f"[{', '.join(map(text_of, value))}]"
        case np.dtype() | type():
            name = jnp.dtype(value).name
            return "bool" if name == "bool" else f"jnp.{name}"
        case np.generic() | np.ndarray() if np.ndim(value) == 0:
            return text_of(value.item())
        case np.ndarray() if (
            value.size <= LITERAL_ELEMENTS
            and value.dtype.kind in "biufc"
            and np.isfinite(value).all()
        ):
            return f"np.array({value.tolist()}, {text_of(value.dtype)})"
        case _:
            raise no_source(show(value))


def scalar_text(value: Any, aval: Any, *, plain: bool) -> str:
    """A number of an operation, as it is written.

    Arguments:
      value: the number.
      aval: its dtype.
      plain: whether to leave the dtype out.

    >>> scalar_text(2, jax.ShapeDtypeStruct((), "float32"), plain=False)
    'np.float32(2.0)'
    """
    number = np.asarray(value, aval.dtype)
    finite = number.dtype.kind == "f" and np.isfinite(number)
    text = str(number) if finite else text_of(number.item())  # the shortest digits
    if plain or getattr(aval, "weak_type", False) or number.dtype == bool:
        return text
    dtype = number.dtype.name
    return f"np.{dtype}({text})" if hasattr(np, dtype) else f"np.asarray({text}, jnp.{dtype})"


def expressions(eqn: Any, ins: Sequence[str]) -> Iterator[str]:
    """Expressions that may trace to an equation, the most readable first.

    Arguments:
      eqn: the equation.
      ins: its operands as expressions.
    """
    name, params = eqn.primitive.name.replace("-", "_"), eqn.params
    texts: dict[str, str] = {}
    for key, value in params.items():
        with contextlib.suppress(SbpError):
            texts[key] = text_of(value)
    if name.startswith(("reduce_", "arg")) and "axes" in params:
        dims = params["axes"]
        texts["dims"] = text_of(dims[0] if len(dims) == 1 else dims)
        # Those of integers take the widest dtype of the process.
        if name in ("reduce_sum", "reduce_prod") and eqn.outvars[0].aval.dtype.kind not in "iu":
            yield f"{ins[0]}.{name.removeprefix('reduce_')}({texts['dims']})"
    if name == "broadcast_in_dim":
        dims, rank = params["broadcast_dimensions"], len(params["shape"])
        yield f"lax.expand_dims({ins[0]}, {tuple(d for d in range(rank) if d not in dims)})"
    if name in _INFIX and len(ins) == 2:
        yield f"{ins[0]} {_INFIX[name]} {ins[1]}"
    ranks = [len(v.aval.shape) for v in eqn.invars]
    if name == "dot_general" and sum(ranks) <= len(string.ascii_letters):
        precision = texts["precision"]
        given = f", precision={precision}" if precision != "None" else ""
        yield f'jnp.einsum("{_subscripts(eqn)}", {", ".join(ins)}{given})'
    if name in _CALLS:
        lists = {f"from_{n}": tuple_text(ins[n:]) for n in (1, 2)} | {"all": ", ".join(ins)}
        with contextlib.suppress(KeyError, IndexError):  # a parameter that has no source
            if name.startswith("random_") and any(ranks):  # of an array of keys
                mapped = f"lambda *x: {_CALLS[name].format('x[0]', 'x[1]', **texts)}"
                for _ in range(max(ranks)):
                    mapped = f"jax.vmap({mapped}, {[0 if rank else None for rank in ranks]})"
                yield f"{mapped}({', '.join(ins)})"
            called = _CALLS[name].format(*ins, **lists, **texts)
            groups = texts.get("axis_index_groups", "None")
            yield called if groups == "None" else f"{called[:-1]}, axis_index_groups={groups})"
    for home, module in _HOMES:
        function = getattr(module, name, None)
        with contextlib.suppress(TypeError, ValueError):  # it has no signature, or is none
            takes: Any = inspect.signature(function).parameters if function else {}
            given = (
                f"{k}={v}"
                for k, v in texts.items()
                if k in takes and params[k] is not None and params[k] is not takes[k].default
            )
            if function:
                yield f"{home}.{name}({', '.join([*ins, *given])})"
    for home, module in _HOMES:
        if hasattr(module, f"{name}_p"):
            every = [*ins, *(f"{k}={v}" for k, v in texts.items())]
            yield f"{home}.{name}_p.bind({', '.join(every)})"


def _subscripts(eqn: Any) -> str:
    """The subscripts of `jnp.einsum` for a product."""
    (contracted, batch), letters = eqn.params["dimension_numbers"], string.ascii_letters
    rank, other = (len(v.aval.shape) for v in eqn.invars)
    left, right = [*letters[:rank]], [*letters[rank : rank + other]]
    pairs = [pair for sides in (batch, contracted) for pair in zip(*sides, strict=True)]
    for a, b in pairs:
        right[b] = left[a]
    shared = [left[a] for a in batch[0]]
    free = [x for x in left if x not in right] + [x for x in right if x not in left]
    return f"{''.join(left)},{''.join(right)}->{''.join([*shared, *free])}"


def traces_to(
    text: str, operands: Sequence[Any], avals: Sequence[Any], eqn: Any, axes: Sequence[Any]
) -> bool | None:
    """Whether the value of an expression is an array and not a tuple of arrays; None where JAX does
    not trace the expression to the equation.

    Arguments:
      text: the expression.
      operands: of the equation: the name of each variable in the expression, or a literal.
      avals: shapes and dtypes of the variables.
      eqn: the equation.
      axes: names and sizes of the mesh axes.
    """
    names = [o for o in operands if not is_literal(o)]
    try:
        function = eval(f"lambda {', '.join(names)}: {text}", dict(MODULES))
        traced = jax.make_jaxpr(function, axis_env=[*axes], return_shape=True)
        closed, made = traced(*avals)
        if [bodies_of(e, "").form for e in closed.eqns] == ["function"]:  # as `jnp.einsum` is
            with jax.disable_jit():
                closed, made = traced(*avals)
    except (LookupError, ArithmeticError, AttributeError, TypeError, ValueError, SyntaxError):
        return None
    found, _ = _jax.open_jaxpr(closed)
    if len(found.eqns) != 1 or not _is_same(found.eqns[0], eqn):
        return None
    (one,), variables = found.eqns, iter(found.invars)
    wanted = [o if is_literal(o) else next(variables) for o in operands]
    equal = (
        len(one.invars) == len(wanted)
        and [*found.outvars] == [*one.outvars]
        and all(map(_same_operand, one.invars, wanted))
    )
    return not isinstance(made, tuple | list) if equal else None


def _same_operand(found: Any, wanted: Any) -> bool:
    return (
        found is wanted
        if not is_literal(wanted) or not is_literal(found)
        else _equal(*(np.asarray(x.val, x.aval.dtype) for x in (found, wanted)))
    )


def _is_same(found: Any, eqn: Any) -> bool:
    """Whether two equations are one operation, whatever their operands."""
    names = [_SAME.get(e.primitive.name, e.primitive.name) for e in (found, eqn)]
    made = [
        [(v.aval.shape, v.aval.dtype, getattr(v.aval, "weak_type", False)) for v in e.outvars]
        for e in (found, eqn)
    ]
    if names[0] != names[1] or made[0] != made[1]:
        return False
    # Shardings do not change what one device computes.
    keys = (found.params.keys() | eqn.params.keys()) - {"sharding", "out_sharding"}
    is_known = eqn.primitive.name in _SAME  # operands and result determine it
    return is_known or all(_equal(found.params.get(k), eqn.params.get(k)) for k in keys)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, _jax.Jaxpr | _jax.ClosedJaxpr):
        return str(a) == str(b)
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return np.array_equal(np.asarray(a).astype(object), np.asarray(b).astype(object)) or (
            str(a) == str(b)
        )
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    return bool(a == b) or (a is None and b is False) or str(a) == str(b) == "nan"
