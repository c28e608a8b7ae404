"""The result of a local operation from the distributions of its operands, on each mesh axis."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from sbp.shardmap.blocks import own_blocks, with_origin
from sbp.shardmap.distribution import (
    UNKNOWN,
    WHOLE,
    Distribution,
    Doubt,
    DoubtKind,
    Fault,
    LocalValue,
    Position,
    Tag,
    faulty,
    neutral,
)
from sbp.shardmap.divisions import divided
from sbp.shardmap.excess import excess_of
from sbp.shardmap.merges import off_and_unknown, put_right, unknown
from sbp.shardmap.operators import (
    counts,
    divides,
    function_of,
    joins,
    looks_up,
    selects,
    slices_at,
    sums_dims,
)
from sbp.shardmap.positions import compared, moved, placed
from sbp.shardmap.readings import Atoms, ways
from sbp.shardmap.state import State
from sbp.signatures import rule_for, traits_of
from sbp.trace.graph import Node
from sbp.types import Atom, B, P, Split, Unreduced

# ---- rows ---------------------------------------------------------------------------------------
# Lookups by position in a device's own shard: `logp[jnp.arange(n), labels]` on a split batch.
#
# The indices of such a lookup are columns, one for each dim. Where the column of a split dim
# counts the rows of the shard, each device looks up in its own rows, so that the result is split
# as the other columns are. The gradient, which adds at the same places, is split as well.


def columns_of(state: State, node: Node, ins: Sequence[LocalValue]) -> tuple[LocalValue, ...]:
    """The columns that an operation joins to the indices of a lookup; empty for any other
    operation."""
    if not joins(node):
        return ()
    aval = state.graph.avals[node.outputs[0]]
    last = len(aval.shape) - 1
    single = all(state.graph.aval(o).shape[last] == 1 for o in node.inputs)
    whole = jnp.issubdtype(aval.dtype, jnp.integer)
    return tuple(ins) if single and whole and node.params["dimension"] == last else ()


def own_rows(
    state: State, node: Node, ins: Sequence[LocalValue], found: Sequence[Distribution]
) -> list[Distribution]:
    """The distributions of a lookup or a write at the rows of each device's own shard.

    Arguments:
      state: the region.
      node: the operation.
      ins: its operands.
      found: the distributions of its result by its rows.
    """
    if not looks_up(node) or "dimension_numbers" not in node.params:
        return list(found)
    return [
        _lookup_on_axis(state, node, ins, k) or h
        if h.unknown or (h.fault and h.fault.kind == "local")
        else h
        for k, h in enumerate(found)
    ]


def _lookup_on_axis(
    state: State, node: Node, ins: Sequence[LocalValue], axis: int
) -> Distribution | None:
    shape, at = state.graph.aval(node.inputs[0]).shape, state.graph.aval(node.inputs[1]).shape
    columns = ins[1].columns or (ins[1],)
    if len(columns) != at[-1]:
        return None
    dims, window = _dims(node)
    writes = len(ins) == 3
    looked = ins[2] if writes else ins[0]
    outer = len(state.graph.aval(node.inputs[2]).shape if writes else _out(state, node))
    places = [d for d in range(outer) if d not in window]
    for c, d in enumerate(dims):
        row = _row(columns[c], shape[d], at)
        if row is None:
            continue
        others = [v for i, v in enumerate(columns) if i != c]
        if any(Split(row) not in v.per_axis[axis].atoms for v in others):
            return _same_columns(state, node, others, looked.per_axis[axis], axis)
        here, there = Split(d), Split(places[row])
        if not writes and looked.per_axis[axis].split == here:
            return replace(looked.per_axis[axis], atoms=frozenset({there}), under=None)
        if writes and there in looked.per_axis[axis].atoms and here in ins[0].per_axis[axis].atoms:
            return replace(looked.per_axis[axis], atoms=frozenset({here}), under=None)
    return None


def _same_columns(
    state: State, node: Node, others: Sequence[LocalValue], h: Distribution, axis: int
) -> Distribution | None:
    """Columns that are the same on every device, beside one that counts the device's own rows."""
    numbered = any(v.numbered and not (v.position and any(v.position.axes)) for v in others)
    if not numbered or not h.split or node.backward:
        return None
    name = state.names[axis]
    return replace(
        UNKNOWN, doubt=Doubt(node, "own-positions", "warning", axis=name, atoms=(h.split,))
    )


def _out(state: State, node: Node) -> tuple[int, ...]:
    return tuple(state.graph.avals[node.outputs[0]].shape)


def _dims(node: Node) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The dim of the first operand that each column indexes; the dims of what is looked up or
    written that belong to the window."""
    numbers = node.params["dimension_numbers"]
    if traits_of(node.op).scatters or hasattr(numbers, "update_window_dims"):
        return numbers.scatter_dims_to_operand_dims, numbers.update_window_dims
    return numbers.start_index_map, numbers.offset_dims


def _row(column: LocalValue, length: int, shape: Sequence[int]) -> int | None:
    """The dim along which a column counts all rows of a shard; None for any other column."""
    p = column.position
    if p is None or any(p.axes) or p.start or p.term is not None:
        return None
    steps = [d for d, step in enumerate(p.dims) if step]
    one = len(steps) == 1 and p.dims[steps[0]] == 1 and shape[steps[0]] == length
    return steps[0] if one else None


# ---- mismatches ---------------------------------------------------------------------------------
# Operations on shards for which no row fits: what the program shows of the reason.
#
# Two operands split along different dims give each device one block of the one and one of the
# other. An operand that every device cuts from the same place, or numbers from zero, does not
# belong to the device's own shard. These are warnings. Where nothing of this is shown, a note says
# that the operation takes the shards each for itself.


def mismatch(
    state: State, node: Node, ins: Sequence[LocalValue], given: Sequence[Distribution], axis: int
) -> Doubt:
    """The doubt about an operation on split operands that no row of its signature takes.

    Arguments:
      state: the region.
      node: the operation.
      ins: its operands.
      given: their distributions on the mesh axis.
      axis: the mesh axis.
    """
    atoms = next((h.split,) for h in given if h.split)
    shown = None if joins(node) or looks_up(node) else _shown(state, node, ins, given, axis)
    if shown is not None:
        return Doubt(node, shown, "warning", axis=state.names[axis], atoms=atoms)
    kind = "with-whole" if any(h.split is None for h in given) else "each-shard"
    return Doubt(node, kind, axis=state.names[axis], atoms=atoms)


def _shown(
    state: State, node: Node, ins: Sequence[LocalValue], given: Sequence[Distribution], axis: int
) -> DoubtKind | None:
    """What the program shows of the reason; None for nothing."""
    whole = [i for i, h in enumerate(given) if B in h.atoms]
    if any(_same_block(state, node, i, state.sizes[axis]) for i in whole):
        return "same-block"
    if any(ins[i].numbered for i in whole):
        return "own-positions"
    split = [h.split for h in given if h.split]
    product = traits_of(node.op).contracts and len(split) > 1  # of rows and columns of others
    return "crossed" if product or len(set(split)) > 1 else None


def _same_block(state: State, node: Node, operand: int, n: int) -> bool:
    """Whether an operand is one of `n` blocks of a whole value, the same block on all devices."""
    at = state.maker(node.inputs[operand])
    while at is not None and (traits_of(at.op).carries or traits_of(at.op).elementwise):
        ranked = [o for o in at.inputs if state.graph.aval(o).shape]
        at = state.maker(ranked[0]) if len(ranked) == 1 else None
    if at is None or not traits_of(at.op).moves:
        return False
    whole, *places = at.inputs
    if places and not slices_at(at):
        return False
    before = state.graph.aval(whole).shape
    after = state.graph.avals[at.outputs[0]].shape
    if len(before) != len(after):
        return False
    cut = [(a, b) for a, b in zip(before, after, strict=True) if a != b]
    return len(cut) == 1 and cut[0][0] == n * cut[0][1]


# ---- lookups ------------------------------------------------------------------------------------
# Lookups of a device in its own shard, at places counted from the beginning of the shard: of those
# that lie elsewhere it takes zero, so that the lookups of all devices add up.
#
# With `here = ids - axis_index(axis) * n` and `mine = (0 <= here) & (here < n)`, the lookup
# `where(mine, table[clip(here, 0, n - 1)], 0)` in a table whose rows are split is P(sum)
# (Megatron-LM, https://arxiv.org/abs/1909.08053, section 3).


def own_lookups(
    node: Node, ins: Sequence[LocalValue], found: Sequence[Distribution]
) -> list[Distribution]:
    """The distributions of an operation on places in a shard, or on what was found there.

    Arguments:
      node: the operation.
      ins: its operands.
      found: the distributions of its result by its rows.
    """
    return [
        _looked_up(node, ins, k) or h if h.unknown and (looks_up(node) or not h.doubt) else h
        for k, h in enumerate(found)
    ]


def _looked_up(node: Node, ins: Sequence[LocalValue], axis: int) -> Distribution | None:
    given, traits = [v.per_axis[axis] for v in ins], traits_of(node.op)
    places = [_is_place(v, axis) for v in ins]
    lookups = [h.tag == "looked-up" for h in given]
    if any(lookups):
        others = [v for v, is_lookup in zip(ins, lookups, strict=True) if not is_lookup]
        masked = (selects(node) and places[0]) or (traits.multiplies and any(places))
        rest = others[1:] if selects(node) else []
        if masked and all(v.zero for v in rest):
            made = next(h.made for h in given if h.tag == "looked-up")
            return replace(WHOLE, atoms=frozenset({P}), made=made, tag="owned")
        moved = traits.moves and lookups[0] and _are_whole(others, axis)
        return given[0] if moved or (traits.carries and lookups[0]) else None
    if not any(places):
        return None
    if traits.moves and traits.indices == range(1, 2) and len(ins) == 2 and given[0].split:
        return replace(UNKNOWN, tag="looked-up", made=node)
    others = [v for v, is_place in zip(ins, places, strict=True) if not is_place]
    follows = traits.elementwise or traits.moves or traits.carries
    return replace(UNKNOWN, tag="place") if follows and _are_whole(others, axis) else None


def _is_place(v: LocalValue, axis: int) -> bool:
    """Whether a value is a place in the device's own shard, or a test of one."""
    h = v.per_axis[axis]
    p = v.position
    indexed = p is not None and bool(p.axes[axis])
    counted = p is not None and p.term is not None  # less the places before the shard
    return (h.unknown and (h.tag == "place" or indexed)) or (indexed and counted)


def _are_whole(values: Sequence[LocalValue], axis: int) -> bool:
    return all(B in v.per_axis[axis].atoms for v in values)


# ---- local operations ---------------------------------------------------------------------------


_EXTREMES = (Unreduced("max"), Unreduced("min"))


_LINEAR = (np.add, np.divide, np.multiply, np.subtract)


def local(state: State, node: Node, ins: Sequence[LocalValue]) -> list[LocalValue]:
    """The results of a local operation."""
    if not node.outputs:
        return []
    axes = range(len(state.sizes))
    found = [_on_axis(state, node, ins, k) for k in axes]
    const, known = _constant(node, ins), all(v.literal for v in ins)
    position = None
    if len(node.outputs) == 1:
        first, sure, position = _by_index(state, node, ins, [found[k][0] for k in axes])
        found, const = [[h] for h in first], const if sure is None else sure
    found = [with_origin(state, node, ins, found[k], k) for k in axes]
    lengths, added = _lengths(state, node, ins)
    columns, numbered = columns_of(state, node, ins), _numbered(node, ins)
    results = []
    for i, output in enumerate(node.outputs):
        value = LocalValue(
            tuple(found[k][i] for k in axes),
            const if i == 0 else None,
            known,
            lengths,
            added,
            position,
            columns,
            numbered,
        )
        results.append(neutral(value, state.graph.avals[output]))
    return [divided(state, node, ins, results[0])] if len(results) == 1 else results


def _by_index(
    state: State, node: Node, ins: Sequence[LocalValue], found: list[Distribution]
) -> tuple[list[Distribution], bool | None, Position | None]:
    """The distributions of an operation that depends on the index of its device: of positions, of
    comparisons of them, and of blocks that they number.

    Arguments:
      state: the region.
      node: the operation, which has one result.
      ins: its operands.
      found: the distributions of its result by its rows.

    Returns:
      The distributions; the result of a comparison, where it is the same everywhere; the result as
      a position.
    """

    def typed(others: Sequence[LocalValue]) -> tuple[Distribution, ...]:
        return tuple(_on_axis(state, node, others, k)[0] for k in range(len(state.sizes)))

    position = moved(state, node, ins, typed)
    if position is not None:
        if any(position.axes) or counts(node):
            shape = state.graph.avals[node.outputs[0]].shape
            found = list(placed(state, position, shape, found))
        return found, None, position
    found, sure = compared(state, node, ins, typed, found)
    found = own_lookups(node, ins, own_blocks(state, node, ins, found))
    found = own_rows(state, node, ins, found)
    return found, sure, None


def _constant(node: Node, ins: Sequence[LocalValue]) -> Any:
    consts = [v.const for v in ins]
    if not consts or any(c is None for c in consts):
        return None
    traits = traits_of(node.op)
    if traits.numpy is not None:
        with np.errstate(all="ignore"):
            return np.asarray(traits.numpy(*consts)).item()
    return consts[0] if traits.carries else None


def _numbered(node: Node, ins: Sequence[LocalValue]) -> Node | None:
    """The operation that counted the elements of an operand from zero, if the result's elements
    depend on that."""
    if counts(node):
        return node
    traits = traits_of(node.op)
    keeps = traits.elementwise or traits.carries or traits.moves
    return next((v.numbered for v in ins if v.numbered), None) if keeps else None


def _lengths(
    state: State, node: Node, ins: Sequence[LocalValue]
) -> tuple[tuple[tuple[int, tuple[int, ...]], ...], Node | None]:
    """The lengths of the dims that the result's elements are sums along, and the operation that
    summed."""
    if sums_dims(node):
        shape = state.graph.aval(node.inputs[0]).shape
        summed = [
            (shape[d], tuple(k for k, h in enumerate(ins[0].per_axis) if h.split == Split(d)))
            for d in node.params["axes"]
        ]
        return (*ins[0].lengths, *summed), node
    return (ins[0].lengths, ins[0].added) if traits_of(node.op).carries else ((), None)


# ---- readings -----------------------------------------------------------------------------------


def _on_axis(state: State, node: Node, ins: Sequence[LocalValue], axis: int) -> list[Distribution]:
    given = [v.per_axis[axis] for v in ins]
    if any(h.unknown for h in given):
        return [unknown(node, given)] * len(node.outputs)
    cured = put_right(state, node, ins, given, axis)
    if cured is not None:
        return [cured] * len(node.outputs)
    sick = next((h.fault for h in given if h.fault), None)
    if sick is not None:
        # A comparison of positions in a shard with a capacity is meant for each group of tokens.
        routed = replace(UNKNOWN, tag="routed")
        compared = traits_of(node.op).scales == "compared"
        return [routed if sick.kind == "local" and compared else faulty(sick)] * len(node.outputs)
    whole = [h.made for h in given if h.reduced and B in h.atoms]
    own = next((h.made for h in given if h.partial in _EXTREMES and h.made in whole), None)
    if own is not None:
        # The difference of a device's own maximum and the maximum of all compensates a shift.
        return [replace(UNKNOWN, made=own)] * len(node.outputs)
    n = state.sizes[axis]
    atoms: list[set[Atom]] = [set() for _ in node.outputs]
    excesses: set[int | None] = set()
    clash: Atoms | None = None
    every = list(ways(node, [h.atoms for h in given], [v.const is not None for v in ins]))
    for way in every:
        rows = state.reader.rows(node, way, n)
        if not rows:
            continue
        e = _excess(node, ins, given, way)
        if e == "clash":
            clash = clash or way
            continue
        excesses.add(e)
        for row in rows:
            for found, atom in zip(atoms, row.outs, strict=True):
                found.add(atom)
    if excesses:
        excess = excesses.pop() if len(excesses) == 1 else None
        swapped = _swapped(node, ins, axis)
        if swapped:
            return [faulty(swapped)] * len(node.outputs)
        results = [_result(node, given, frozenset(found), excess) for found in atoms]
        if (
            not node.backward
            and state.reader.reorders(node, every[0], n)
            and len(every) == 1
            and not results[0].doubt
        ):
            results = [replace(results[0], doubt=Doubt(node, "reordered", axis=state.names[axis]))]
        return results
    if clash is not None:
        return _clashing(state, node, ins, given, clash, axis)
    found_none = _unreadable(state, node, ins, given, every, axis)
    others = found_none
    if (
        found_none.fault and found_none.fault.candidates is not None
    ):  # the second result is where they were in their shard
        others = faulty(replace(found_none.fault, candidates=None))
    return [found_none, *(others for _ in node.outputs[1:])]


def _excess(
    node: Node, ins: Sequence[LocalValue], given: Sequence[Distribution], way: Atoms
) -> Any:
    """The excess of the results, if the operands have the types of `way`."""
    taken = [a == P and P not in h.atoms for a, h in zip(way, given, strict=True)]
    found = [None if h.excess is None else h.excess + t for h, t in zip(given, taken, strict=True)]
    free = [v.zero or (t and h.share) for v, t, h in zip(ins, taken, given, strict=True)]
    return excess_of(node.op, node.params, found, free)


def _result(
    node: Node, given: Sequence[Distribution], atoms: frozenset[Atom], excess: int | None
) -> Distribution:
    made = next((h.made for h in given if h.made), None)
    result = Distribution(atoms, excess, made=made)
    share = traits_of(node.op).carries or function_of(node) in _LINEAR
    doubt = next(
        (
            h.doubt
            for h in given
            if h.doubt and (h.doubt.lasting or not traits_of(node.op).orderless)
        ),
        None,
    )
    return replace(
        result,
        tag=_tag(node, given) if result.partial else "",
        copies=next((h.copies for h in given if h.copies), None),
        share=bool(share) and any(h.share for h in given),
        twice=next((h.twice for h in given if h.twice), None),
        doubt=doubt or (off_and_unknown(node, given) if excess is None else None),
        under=(
            next((h.under for h in given if h.under is not None), None)
            if any(isinstance(a, Split) for a in atoms)
            else None
        ),
        made=made or (node if result.partial else None),
        reduced=next((h.reduced for h in given if h.reduced), None),
        cause=next((h.cause for h in given if h.cause), None) if excess else None,
        blocks=next((h.blocks for h in given if h.blocks), None),
    )


def _tag(node: Node, given: Sequence[Distribution]) -> Tag:
    """The tag of a partial result."""
    if any(h.tag == "owned" for h in given):
        return "owned"
    return given[0].tag if traits_of(node.op).carries else ""


def _clashing(
    state: State,
    node: Node,
    ins: Sequence[LocalValue],
    given: Sequence[Distribution],
    way: Atoms,
    axis: int,
) -> list[Distribution]:
    """Operands that are off by different powers of the axis size."""
    taken = [
        i for i, (a, h) in enumerate(zip(way, given, strict=True)) if a == P and P not in h.atoms
    ]
    partial = next((h for h in given if h.partial), None)
    if partial is not None:
        kind = (
            "added" if taken and partial.excess == 0 and given[taken[0]].excess == 0 else "scales"
        )
        operand = taken[0] if taken else 0
        positions = tuple(i for i, h in enumerate(given) if h.partial)
        return [faulty(Fault(kind, node, partial.made, operand, partial=positions))] * len(
            node.outputs
        )
    causes = [(h.cause, B in h.atoms) for h in given if h.excess and h.cause]
    guilty = next(
        (
            c
            for c, whole in causes
            if whole or (not (c.made or c.node).backward and c.kind in ("doubled", "pending"))
        ),
        None,
    )
    if guilty is not None:
        state.report(guilty, axis, node)
    rows = state.reader.rows(node, way, state.sizes[axis])
    return [
        _result(node, given, frozenset(row.outs[i] for row in rows), None)
        for i in range(len(node.outputs))
    ]


def _unreadable(
    state: State,
    node: Node,
    ins: Sequence[LocalValue],
    given: Sequence[Distribution],
    every: Sequence[Atoms],
    axis: int,
) -> Distribution:
    """The result of an operation that has no row for any reading of its operands."""
    partial = tuple(i for i, h in enumerate(given) if h.partial)
    split = [i for i, h in enumerate(given) if h.split]
    if rule_for(node.op) is None or traits_of(node.op).opaque:
        state.enter(Doubt(node, "no-rule", "warning"))
        return UNKNOWN
    if any(given[i].tag == "owned" for i in partial):
        return UNKNOWN
    if partial:
        first = partial[0]
        made, atoms = given[first].made, tuple(h.partial for h in (given[first],) if h.partial)
        if split:
            return faulty(Fault("mixed", node, made, first, atoms, partial=partial))
        if divides(node) and 1 in partial:
            return faulty(Fault("ratio", node, given[1].made, 1, partial=partial))
        kind = "product" if len(partial) > 1 and traits_of(node.op).multiplies else "nonlinear"
        return faulty(Fault(kind, node, made, first, atoms, partial=partial))
    added_up = next((i for i, h in enumerate(given) if h.blocks), None)
    if added_up is not None and split:
        return faulty(Fault("blocks", node, given[added_up].blocks, added_up))
    for way in every:
        alone = state.reader.whole_dim(node, way, state.sizes[axis])
        if alone and not (
            alone == "masked_gather" and ins[1].literal
        ):  # a place that is written down may be one in each shard
            dim = next(a.dim for a in way if isinstance(a, Split))
            best = dim if alone == "candidates" else None
            own = Fault("local", node, atoms=(Split(dim),), kernel=alone, candidates=best)
            return faulty(own)
    if node.backward or not split or _own_slice(state, node, given[split[0]]):
        return UNKNOWN
    return replace(UNKNOWN, doubt=mismatch(state, node, ins, given, axis))


def _own_slice(state: State, node: Node, h: Distribution) -> bool:
    """Whether a device takes its only element along a split dim, which then numbers devices."""
    shape = state.graph.aval(node.inputs[0]).shape
    one = h.split is not None and h.split.dim < len(shape) and shape[h.split.dim] == 1
    traits = traits_of(node.op)
    return one and traits.moves and set(range(1, len(node.inputs))) <= set(traits.indices)


def _swapped(node: Node, ins: Sequence[LocalValue], axis: int) -> Fault | None:
    """Two operands whose dims are split over the same mesh axes in another order."""
    for i, j in itertools.permutations(range(len(ins)), 2):
        one, other = ins[i].per_axis, ins[j].per_axis
        for k in (one[axis].under or frozenset()) - (other[axis].under or frozenset()):
            if (
                axis in (other[k].under or ())
                and other[k].split == other[axis].split
                and one[k].split == one[axis].split
            ):
                return Fault("order", node, None, i)
    return None
