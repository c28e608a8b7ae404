"""Operations that move elements: reshaping, slicing, padding, joining; and the sources of values
that read none."""

import math
from typing import Any

from jax import lax

from tests.fuzz.draw import Draw, Op, Want
from tests.fuzz.laws import moves, smooth, whole
from tests.fuzz.ops_elementwise import same

_ANY = "fuibc"
_NUMBERS = "fui"


def _reshaped(d: Draw) -> tuple[int, ...]:
    """Two dims merged, one split, all merged, or a factorisation."""
    shape = d["a"].shape
    match d.int(0, 3):
        case 0 if len(shape) > 1:
            i = d.int(0, len(shape) - 2)
            return (*shape[:i], shape[i] * shape[i + 1], *shape[i + 2 :])
        case 1 if shape:
            i = d.int(0, len(shape) - 1)
            q = d.choice([q for q in range(1, shape[i] + 1) if shape[i] % q == 0] or [1])
            return (*shape[:i], q, shape[i] // q, *shape[i + 1 :])
        case 2:
            return (-1,)
        case _:
            n = math.prod(shape)
            q = d.choice([q for q in range(1, n + 1) if n % q == 0])
            return (q, n // q)


def _permutation(d: Draw) -> tuple[int, ...]:
    dims = list(range(d["a"].ndim))
    d.rng.shuffle(dims)
    return tuple(dims)


def _slices(d: Draw) -> str:
    """Starts, limits and strides."""
    shape = d["a"].shape
    start = [d.int(0, max(0, n - 1)) if d.chance(0.6) else 0 for n in shape]
    limit = [
        d.int(min(n, s + 1), n) if d.chance(0.6) else n for s, n in zip(start, shape, strict=True)
    ]
    strides = None if d.chance() else tuple(d.choice((1, 2, 3)) for _ in shape)
    return f"{tuple(start)}, {tuple(limit)}, {strides}"


def _padding(d: Draw) -> Any:
    return [
        (d.int(-1, 3), d.int(-1, 3), d.choice((0, 0, 1, 2))) if d.chance(0.7) else (0, 0, 0)
        for _ in d["a"].shape
    ]


def _pieces(d: Draw) -> tuple[int, ...]:
    n = d["a"].shape[d["axis"]]
    cut = d.int(0, n)
    return (cut, n - cut)


def _beside(d: Draw) -> tuple[int, ...]:
    """The shape of `a` but for the joined dim."""
    shape = list(d["a"].shape)
    shape[d["axis"]] = d.size()
    return tuple(shape)


_axis = lambda d: d.dim("a")


def _wider(d: Draw) -> tuple[int, ...]:
    grown = tuple(d.size() if n == 1 and d.chance(0.7) else n for n in d["a"].shape)
    return (d.size(), *grown) if d.chance() else grown


_any = lambda low=1, kinds=_ANY, high=4: Want(kinds, low, high, empty=True)


OPS: tuple[Op, ...] = (
    Op("reshape", "{a}.reshape({shape})", {"a": _any(0), "shape": _reshaped}, moves, weight=4),
    Op(
        "transpose",
        "jnp.transpose({a}, {axes})",
        {"a": _any(2), "axes": _permutation},
        moves,
        weight=2,
    ),
    Op(
        "broadcast_to",
        "jnp.broadcast_to({a}, {shape})",
        {"a": _any(0, high=3), "shape": _wider},
        moves,
        weight=2,
    ),
    Op(
        "broadcast_in_dim",
        "lax.broadcast_in_dim({a}, {shape}, ({dim},))",
        {
            "a": _any(1, high=1),
            "other": lambda d: d.size(),
            "dim": lambda d: d.int(0, 1),
            "shape": lambda d: (
                (d["a"].shape[0], d["other"]) if d["dim"] == 0 else (d["other"], d["a"].shape[0])
            ),
        },
        moves,
    ),
    Op(
        "expand_dims",
        "jnp.expand_dims({a}, {at})",
        {"a": _any(0, high=3), "at": lambda d: d.int(0, d["a"].ndim)},
        moves,
    ),
    Op("squeeze", "jnp.squeeze({a})", {"a": Want(_ANY, 1, fits=lambda i: 1 in i.shape)}, moves),
    Op("rev", "lax.rev({a}, {axes})", {"a": _any(), "axes": lambda d: d.dims("a")}, moves),
    Op(
        "roll",
        "jnp.roll({a}, {n}, {axis})",
        {"a": Want(_ANY, 1), "n": lambda d: d.int(-5, 5), "axis": _axis},
        moves,
    ),
    Op("slice", "lax.slice({a}, {slices})", {"a": _any(), "slices": _slices}, moves, weight=2),
    Op("drop_first", "{a}[1:]", {"a": Want(_ANY, 1, fits=lambda i: i.shape[0] > 1)}, moves),
    Op(
        "pick_row",
        "{a}[{n}]",
        {"a": Want(_ANY, 1), "n": lambda d: d.int(-1, d["a"].shape[0] - 1)},
        moves,
    ),
    Op(
        "pad",
        "lax.pad({a}, np.asarray({value}, {a}.dtype), {padding})",
        {"a": _any(kinds=_NUMBERS), "value": lambda d: d.choice((0, 0, 1)), "padding": _padding},
        moves,
        weight=2,
    ),
    Op(
        "pad_edge",
        "jnp.pad({a}, {n}, mode={how})",
        {
            "a": Want(_NUMBERS, 1, 2),
            "n": lambda d: d.int(1, 2),
            "how": lambda d: repr(d.choice(("edge", "wrap"))),
        },
        moves,
    ),
    Op(
        "concatenate",
        "jnp.concatenate([{a}, {b}], {axis})",
        {"a": _any(), "axis": _axis, "b": Want(_ANY, 1, shape=_beside, dtype=same())},
        moves,
        weight=2,
    ),
    Op(
        "concatenate_self",
        "jnp.concatenate([{a}, {a}, {a}], {axis})",
        {"a": _any(), "axis": _axis},
        moves,
    ),
    Op(
        "stack",
        "jnp.stack([{a}, {b}], {at})",
        {
            "a": _any(0, high=3),
            "at": lambda d: d.int(0, d["a"].ndim),
            "b": Want(_ANY, shape=lambda d: d["a"].shape, dtype=same(), empty=True),
        },
        moves,
    ),
    Op(
        "split",
        "lax.split({a}, {sizes}, {axis})",
        {"a": Want(_ANY, 1), "axis": _axis, "sizes": _pieces},
        moves,
        guard=hasattr(lax, "split"),
    ),
    Op(
        "tile",
        "jnp.tile({a}, {reps})",
        {"a": _any(1, high=3), "reps": lambda d: tuple(d.int(1, 3) for _ in d["a"].shape)},
        moves,
    ),
    Op(
        "repeat",
        "jnp.repeat({a}, {n}, {axis})",
        {"a": Want(_ANY, 1, 3), "n": lambda d: d.int(1, 3), "axis": _axis},
        moves,
    ),
    Op("flip_transpose", "jnp.flip(jnp.swapaxes({a}, 0, -1), 0)", {"a": Want(_ANY, 2)}, moves),
    Op("tril", "jnp.tril({a}, {k})", {"a": Want(_NUMBERS, 2), "k": lambda d: d.int(-2, 2)}, moves),
    Op("triu", "jnp.triu({a}, {k})", {"a": Want(_NUMBERS, 2), "k": lambda d: d.int(-2, 2)}, moves),
    Op("diagonal", "jnp.diagonal({a})", {"a": Want(_NUMBERS, 2, 2)}, moves),
    Op("diag", "jnp.diag({a})", {"a": Want(_NUMBERS, 1, 1)}, moves),
    Op(
        "meshgrid",
        "jnp.meshgrid({a}, {b})",
        {"a": Want(_NUMBERS, 1, 1), "b": Want(_NUMBERS, 1, 1)},
        lambda d, outs: [(i.exact, i.bound, i.grid) for i in (d["a"], d["b"])],
    ),
    Op(
        "iota",
        "lax.broadcasted_iota(jnp.{dtype}, {shape}, {dim})",
        {
            "shape": lambda d: tuple(d.size() for _ in range(d.int(1, 3))),
            "dim": lambda d: d.int(0, len(d["shape"]) - 1),
            "dtype": lambda d: d.choice(("int32", "float32", "bfloat16", "int8")),
        },
        whole(16),
        weight=0.5,
    ),
    Op(
        "eye",
        "jnp.eye({n}, {m}, dtype=jnp.float32)",
        {"n": lambda d: d.size(), "m": lambda d: d.size()},
        whole(1),
        weight=0.5,
    ),
    Op(
        "linspace", "jnp.linspace(-1.0, 1.0, {n})", {"n": lambda d: d.size()}, smooth(1), weight=0.5
    ),
    Op(
        "zeros",
        "jnp.zeros({shape}, jnp.{dtype})",
        {
            "shape": lambda d: tuple(d.size() for _ in range(d.int(0, 3))),
            "dtype": lambda d: d.choice(("float32", "int32", "bfloat16")),
        },
        whole(1),
        weight=0.5,
    ),
    Op("ones_like", "jnp.ones_like({a})", {"a": _any(0)}, whole(1), weight=0.5),
    Op("copy", "jnp.copy({a})", {"a": _any(0)}, moves, weight=0.5),
    Op(
        "array_constant",
        "jnp.asarray(np.arange({n}, dtype=np.{dtype}) % 5 - 2)",
        {"n": lambda d: d.size(), "dtype": lambda d: d.choice(("float32", "int32"))},
        whole(3),
        weight=0.5,
    ),
)
