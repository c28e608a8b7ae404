"""Indexing: gathers and scatters in every mode, dynamic slices, segments; indices leave the bounds
on purpose."""

from tests.fuzz.draw import Draw, Op, Slot, Want
from tests.fuzz.laws import like, moves, sums, whole
from tests.fuzz.ops_elementwise import same

_ANY = "fuibc"


_axis = lambda d: d.dim("a")


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

OPS: tuple[Op, ...] = (
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
        {"a": Want(_ANY, 1, 3), "axis": _axis, "i": Want("i", 1, 3, shape=lambda d: _along(d))},
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


def _along(d: Draw) -> tuple[int, ...]:
    shape = list(d["a"].shape)
    shape[d["axis"]] = d.size()
    return tuple(shape)
