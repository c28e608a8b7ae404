"""Operations that move elements: reshaping, slicing, padding, joining, and the sources of values
that read none. Indexing: gathers and scatters in every mode, dynamic slices, segments; indices
leave the bounds on purpose."""

import math
from typing import Any

from tests.fuzz.draw import Draw, Op, Slot, Want, like, moves, smooth, sums, whole
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
    """The shape of `a` but for the dim `axis`."""
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


_mode = lambda *modes: lambda d: repr(d.choice(modes))


def _row(d: Draw) -> tuple[int, ...]:
    """The shape of updates for rows of `a` at the indices `i`."""
    return (*d["i"].shape, *d["a"].shape[1:])


def _rows(kinds: str, mode: bool = True) -> dict[str, Slot]:
    slots: dict[str, Slot] = {
        "a": Want(kinds, 1, 3),
        "i": Want("i", 0, 2),
        "b": Want("fui", shape=_row, dtype=same()),
    }
    return slots | ({"mode": _mode("drop", "clip", "promise_in_bounds", "fill")} if mode else {})


def _at(d: Draw) -> str:
    """Indices; those promised to lie inside do."""
    n = d["a"].shape[0]
    return f"jnp.abs({{i}} % {n})" if d.params.get("mode") == "'promise_in_bounds'" else "{i}"


_smaller = lambda d: tuple(d.int(1, n) if d.chance(0.6) else n for n in d["a"].shape)


def _starts(d: Draw) -> str:
    """One scalar start for each dim, from the int vector `i`, a constant, or zero."""
    return (
        "("
        + "".join(
            f"{{i}}[{k % 2}], " if d.chance(0.7) else f"{d.int(-2, 5)}, "
            for k in range(d["a"].ndim)
        )
        + ")"
    )


_SCALARS = Want("i", 1, 1, shape=lambda d: (2,), dtype=lambda d: "int32")
_addends = sums(lambda d: 1 + d["i"].size)

INDEXING: tuple[Op, ...] = (
    Op(
        "take",
        "jnp.take({a}, {i}, axis={axis}, mode={mode})",
        {"a": Want(_ANY, 1, 3), "i": Want("i", 0, 2), "axis": _axis, "mode": _mode("clip", "wrap")},
        moves,
        weight=2,
    ),
    Op(
        "take_fill",
        "jnp.take({a}, {i}, axis={axis}, mode='fill', fill_value={value})",
        {
            "a": Want("fi", 1, 3),
            "i": Want("ui", 0, 2),
            "axis": _axis,
            "value": lambda d: d.choice((0, 1)),
        },
        moves,
        weight=2,
    ),
    Op("index_rows", "{a}[{i}]", {"a": Want(_ANY, 1, 3), "i": Want("i", 0, 2)}, moves, weight=2),
    Op(
        "index_fill",
        "{a}.at[{at}].get(mode={mode}, fill_value=1)",
        {
            "a": Want("fi", 1, 3),
            "i": Want("ui", 0, 2),
            "mode": _mode("fill", "clip", "promise_in_bounds"),
            "at": _at,
        },
        moves,
    ),
    Op("index_columns", "{a}[:, {i}]", {"a": Want(_ANY, 2, 3), "i": Want("i", 0, 2)}, moves),
    Op(
        "index_pairs",
        "{a}[{i}, {j}]",
        {"a": Want(_ANY, 2, 3), "i": Want("i", 1, 2), "j": Want("i", shape=lambda d: d["i"].shape)},
        moves,
    ),
    Op(
        "index_apart",
        "{a}[{i}, :, {j}]",
        {"a": Want(_ANY, 3, 3), "i": Want("i", 1, 1), "j": Want("i", shape=lambda d: d["i"].shape)},
        moves,
    ),
    Op(
        "index_window",
        "lax.gather({a}, {i}[:, None] % 3, lax.GatherDimensionNumbers(offset_dims=(1,),"
        " collapsed_slice_dims=(), start_index_map=(0,)), slice_sizes=({n},), mode={mode})",
        {
            "a": Want("fi", 1, 1),
            "i": Want("i", 1, 1),
            "n": lambda d: d.int(1, d["a"].shape[0]),
            "mode": _mode("clip", "fill"),
        },
        lambda d, outs: (
            [(False, d["a"].bound, 0)]
            if d["mode"] == "'fill'" and d["a"].kind == "f" and d["n"] > d["a"].shape[0] - 3
            else [(d["a"].exact, 2.0**31 if d["a"].kind == "i" else d["a"].bound, d["a"].grid)]
        ),
    ),
    Op(
        "take_along",
        "jnp.take_along_axis({a}, {i}, axis={axis}, mode='clip')",
        {"a": Want(_ANY, 1, 3), "axis": _axis, "i": Want("i", 1, 3, shape=_beside)},
        moves,
        weight=2,
    ),
    Op(
        "mask_gather",
        "jnp.where({i} >= 0, {a}[jnp.abs({i})], 0)",
        {"a": Want("fi", 1, 1), "i": Want("i", 1, 2)},
        moves,
    ),
    Op(
        "vmapped_index",
        "jax.vmap(lambda x, i: x[i])({a}, {i})",
        {
            "a": Want(_ANY, 2, 3),
            "i": Want(
                "i", 1, 2, shape=lambda d: (d["a"].shape[0], *((d.size(),) if d.chance() else ()))
            ),
        },
        moves,
        weight=2,
    ),
    Op(
        "vmapped_scatter",
        "jax.vmap(lambda x, i, b: x.at[i].add(b, mode={mode}))({a}, {i}, {b})",
        {
            "a": Want("fi", 2, 3),
            "i": Want("i", 1, 1, shape=lambda d: d["a"].shape[:1]),
            "b": Want("fi", shape=lambda d: (d["a"].shape[0], *d["a"].shape[2:]), dtype=same()),
            "mode": _mode("drop", "clip"),
        },
        sums(lambda d: 2),
        weight=1.5,
    ),
    Op(
        "dynamic_slice",
        "lax.dynamic_slice({a}, {starts}, {sizes})",
        {"a": Want(_ANY, 1, 3), "i": _SCALARS, "starts": _starts, "sizes": _smaller},
        moves,
        weight=2,
    ),
    Op(
        "dynamic_update_slice",
        "lax.dynamic_update_slice({a}, {b}, {starts})",
        {
            "a": Want(_ANY, 1, 3),
            "i": _SCALARS,
            "b": Want(_ANY, shape=_smaller, dtype=same()),
            "starts": _starts,
        },
        moves,
        weight=2,
    ),
    Op(
        "dynamic_index",
        "lax.dynamic_index_in_dim({a}, {i}[0], {axis}, keepdims={keep})",
        {"a": Want(_ANY, 1, 3), "i": _SCALARS, "axis": _axis, "keep": lambda d: d.chance()},
        moves,
    ),
    Op(
        "vmapped_dynamic_slice",
        "jax.vmap(lambda x, i: lax.dynamic_slice_in_dim(x, i, {n}))({a}, {i})",
        {
            "a": Want(_ANY, 2, 3),
            "i": Want("i", 1, 1, shape=lambda d: d["a"].shape[:1]),
            "n": lambda d: d.int(1, d["a"].shape[1]),
        },
        moves,
    ),
    Op(
        "vmapped_update_slice",
        "jax.vmap(lambda x, b, i: lax.dynamic_update_slice_in_dim(x, b, i, 0))({a}, {b}, {i})",
        {
            "a": Want("fi", 2, 3),
            "i": Want("i", 1, 1, shape=lambda d: d["a"].shape[:1]),
            "n": lambda d: d.int(1, d["a"].shape[1]),
            "b": Want(
                "fi", shape=lambda d: (d["a"].shape[0], d["n"], *d["a"].shape[2:]), dtype=same()
            ),
        },
        moves,
    ),
    # ---- scatters -------------------------------------------------------------------------------
    Op(
        "scatter_add",
        "{a}.at[{at}].add({b}, mode={mode})",
        {**_rows("fui"), "at": _at},
        _addends,
        weight=2,
    ),
    Op("scatter_sub", "{a}.at[{i}].subtract({b})", _rows("fi", False), _addends),
    Op(
        "scatter_max",
        "{a}.at[{at}].max({b}, mode={mode})",
        {**_rows("kui"), "b": Want("kui", shape=_row, dtype=same()), "at": _at},
        moves,
        stops=True,
    ),
    Op(
        "scatter_min",
        "{a}.at[{at}].min({b}, mode={mode})",
        {**_rows("kui"), "b": Want("kui", shape=_row, dtype=same()), "at": _at},
        moves,
        stops=True,
    ),
    Op(
        "scatter_mul",
        "{a}.at[{i}].multiply(jnp.tanh({b}))",
        {"a": Want("f", 1, 3), "i": Want("i", 0, 1), "b": Want("f", shape=_row, dtype=same())},
        like(),
        stops=True,
    ),
    Op(
        "scatter_mul_int",
        "{a}.at[{i}].multiply({b}, mode='drop')",
        {"a": Want("ui", 1, 3), "i": Want("i", 0, 1), "b": Want("ui", shape=_row, dtype=same())},
        whole(2.0**32),
    ),
    # an order of arange has no duplicates, of which any might win
    Op(
        "scatter_set",
        "{a}.at[jnp.argsort({i}[:{n}])].set({b})",
        {
            "a": Want(_ANY, 1, 3),
            "n": lambda d: d["a"].shape[0],
            "i": Want("i", 1, 1, fits=lambda i: i.size > 0),
            "b": Want(
                _ANY, shape=lambda d: (min(d["n"], d["i"].size), *d["a"].shape[1:]), dtype=same()
            ),
        },
        moves,
        weight=1.5,
    ),
    Op(
        "scatter_fill",
        "{a}.at[{i}].set({value}, mode={mode})",
        {
            "a": Want("fui", 1, 3),
            "i": Want("i", 0, 2),
            "value": lambda d: d.choice((0, 1)),
            "mode": _mode("drop", "clip"),
        },
        moves,
        weight=1.5,
    ),
    Op(
        "scatter_column",
        "{a}.at[:, {i}[0]].add({b})",
        {
            "a": Want("fi", 2, 3),
            "i": _SCALARS,
            "b": Want("fi", shape=lambda d: (d["a"].shape[0], *d["a"].shape[2:]), dtype=same()),
        },
        sums(lambda d: 2),
    ),
    Op(
        "scatter_pairs",
        "{a}.at[{i}, {j}].add({b}, mode='drop')",
        {
            "a": Want("fi", 2, 2),
            "i": Want("i", 1, 1),
            "j": Want("i", shape=lambda d: d["i"].shape),
            "b": Want("fi", shape=lambda d: d["i"].shape, dtype=same()),
        },
        _addends,
    ),
    Op(
        "scatter_apply",
        "{a}.at[{i}].apply(jnp.square, mode='drop')",
        {"a": Want("i", 1, 2), "i": Want("i", 0, 0)},
        whole(2.0**31),
        weight=0.5,
    ),
    Op(
        "put_along",
        "jnp.put_along_axis({a}, jnp.argsort({i}, axis={axis}), {b}, axis={axis}, inplace=False)",
        {
            "a": Want("fi", 1, 2),
            "axis": _axis,
            "i": Want("i", shape=lambda d: d["a"].shape),
            "b": Want("fi", shape=lambda d: d["a"].shape, dtype=same()),
        },
        moves,
        weight=0.7,
    ),
    Op(
        "segment_sum",
        "jax.ops.segment_sum({a}, {i}, {n})",
        {
            "a": Want("fi", 1, 3),
            "i": Want("i", 1, 1, shape=lambda d: d["a"].shape[:1]),
            "n": lambda d: d.size(),
        },
        _addends,
        weight=1.5,
    ),
    Op(
        "segment_max",
        "jnp.maximum(jax.ops.segment_max({a}, {i}, {n}), -8)",
        {
            "a": Want("kui", 1, 3),
            "i": Want("i", 1, 1, shape=lambda d: d["a"].shape[:1]),
            "n": lambda d: d.size(),
        },
        lambda d, outs: [(d["a"].exact, max(8.0, d["a"].bound), d["a"].grid)],
        stops=True,
    ),
    Op(
        "embedding",
        "jnp.take({a}, {i}, axis=0) * 0.5",
        {"a": Want("f", 2, 2), "i": Want("i", 1, 2, dtype=lambda d: "int32")},
        lambda d, outs: [(False, d["a"].bound, 0)],
        weight=1.5,
    ),
    Op(
        "gather_gradient",
        "jax.grad(lambda x: jnp.sum(jnp.sin(x[{i}])))({a})",
        {"a": Want("f", 1, 3), "i": Want("i", 0, 2)},
        lambda d, outs: [(False, float(d["i"].size) ** 0.5 + 1, 0)],
        weight=1.5,
    ),
    Op(
        "scatter_gradient",
        "jax.vjp(lambda x, b: x.at[{i}].add(b, mode='drop'), {a}, {b})[1](jnp.cos({a}))",
        {"a": Want("f", 1, 3), "i": Want("i", 0, 2), "b": Want("f", shape=_row, dtype=same())},
        lambda d, outs: [(False, 1.0, 0)] * 2,
    ),
)
