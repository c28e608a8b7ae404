"""In which dtype the parts of a sum over devices are added: `reduce_dtype` of `sbp.jit` and
`sbp.annotate`.

Without `reduce_dtype`, a sum is the platform's own collective in the dtype of its value, as in
`jax.jit` (a TPU adds bfloat16 in bfloat16). With it, parts that are narrower are added in the wider
dtype, and a cast that the user wrote from a wider dtype may round the parts before the sum.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from sbp.annotations import Pin, annotate_p
from sbp.infer.flow import Flow
from sbp.kinds import REDUCE_DTYPES
from sbp.machine.hardware import TILE
from sbp.signatures import traits_of
from sbp.trace.graph import Graph, Node, reached

Carried = Callable[[Node], Iterator[int]]
"""For a node with rows, the positions of operands that some row takes as parts of a sum."""

Sums = Mapping[int, str]
"""For each value whose `reduce_dtype` the user chose, the name of that dtype."""


@dataclass(frozen=True, slots=True)
class WideSum:
    """A sum of parts in a wider dtype than theirs, which the user chose (`reduce_dtype`).

    Arguments:
      dtype: the name of the wider dtype.
      dim: the tensor dim that is cut into one block for each device. An all-to-all exchanges the
        blocks, each device adds its blocks in `dtype`, and for an all-reduce an all-gather joins
        the sums. None where no dim has as many elements as there are devices: then the platform
        sums natively.
    """

    dtype: str
    dim: int | None


Kept = tuple[frozenset[int] | None, ...]
"""For each mesh axis the codes of the types that conversions may go through, None for all; empty
for all codes on all axes."""


@dataclass(frozen=True, slots=True)
class Reduction:
    """How partial sums of a value are added up, what else its conversions cost, and which types
    they may go through.

    Arguments:
      wide: the wider dtype in which they are accumulated (`WideSum`); None for their own.
      together: the number of values whose all-reduces start together, this one included
        (`infer.cost`).
      fused: whether the value reaches memory only where a collective converts it
        (`infer.cost`).
      kept: the codes of the types that conversions may go through.
    """

    wide: str | None = None
    together: int = 1
    fused: bool = False
    kept: Kept = ()


NATIVE = Reduction()
"""The platform's own."""


def block_dim(part: Sequence[int], n: int) -> int | None:
    """The dim along which a sum of parts is cut into blocks, one for each device.

    Arguments:
      part: the shape of one device's part.
      n: the number of devices.

    Returns:
      The dim with the least padding; of equals one whose blocks are whole tiles; of equals one that
      is not the last; of equals the first. None when no dim has `n` elements.

    >>> block_dim((2048, 8192), 16), block_dim((16, 8192), 16), block_dim((3,), 16)
    (0, 1, None)
    """
    tiles = (*(1 for _ in part[2:]), *TILE[2 - min(2, len(part)) :])

    def order(dim: int) -> tuple[float, bool, bool]:
        block = -(-part[dim] // n)
        return block * n / part[dim], block % tiles[dim] != 0, dim == len(part) - 1

    return min((d for d, size in enumerate(part) if size >= n), key=order, default=None)


def is_real(dtype: Any) -> bool:
    """Whether a dtype is a real float."""
    return bool(jnp.issubdtype(dtype, jnp.floating))


def holds(dtype: Any, other: Any) -> bool:
    """Whether each value of one real float dtype is a value of another one.

    Arguments:
      dtype: the dtype that may hold the values.
      other: the dtype of the values.

    >>> holds(jnp.float32, jnp.bfloat16), holds(jnp.float16, jnp.bfloat16)
    (True, False)
    """
    ours, theirs = jnp.finfo(dtype), jnp.finfo(other)
    return bool(
        ours.nmant >= theirs.nmant
        and ours.maxexp >= theirs.maxexp
        and ours.minexp - ours.nmant <= theirs.minexp - theirs.nmant
    )


def wide(dtype: Any, chosen: str | None) -> str | None:
    """The dtype in which parts are added instead of their own.

    Arguments:
      dtype: the dtype of the parts.
      chosen: the `reduce_dtype` of their value; None for none.

    Returns:
      `chosen` where it is wider; None for the platform's own sum.

    >>> wide(jnp.bfloat16, "float32"), wide(jnp.float32, "bfloat16")
    ('float32', None)
    """
    is_chosen = chosen is not None and is_real(dtype)
    return chosen if is_chosen and holds(chosen, dtype) and not holds(dtype, chosen) else None


def is_rounding_cast(graph: Graph, node: Node) -> bool:
    """Whether a node casts a real float to one that does not hold all its values."""
    traits = traits_of(node.op)
    if not (traits.carries == "rounded" and traits.adapts):
        return False
    source, target = graph.aval(node.inputs[0]).dtype, graph.avals[node.outputs[0]].dtype
    return is_real(source) and is_real(target) and not holds(target, source)


def allowing(graph: Graph, node: Node) -> str | None:
    """The `reduce_dtype` with which a cast may round the parts of a sum; None for other nodes, and
    for casts to a dtype that is no `reduce_dtype`."""
    if not is_rounding_cast(graph, node):
        return None
    name = str(graph.avals[node.outputs[0]].dtype)
    return name if name in REDUCE_DTYPES else None


def rounding_casts(graph: Graph, sums: Sums) -> frozenset[int]:
    """The casts that may round parts before they are summed: casts to a dtype that holds every
    value of the `reduce_dtype` of their result.

    Arguments:
      graph: the program.
      sums: the values with a `reduce_dtype`.

    Returns:
      Node ids.
    """
    return frozenset(
        node.id
        for node in graph.walk()
        if is_rounding_cast(graph, node)
        and (chosen := sums.get(node.outputs[0])) is not None
        and holds(graph.avals[node.outputs[0]].dtype, chosen)
    )


def chosen_sums(flow: Flow, reduce_dtype: str | None, carried: Carried) -> Sums:
    """The values whose `reduce_dtype` the user chose.

    Arguments:
      flow: the decisions and edges of the program.
      reduce_dtype: the name of a dtype for every value of the program; None for the values whose
        parts may reach an annotation with a `reduce_dtype`.
      carried: says which operands of a node may be parts of a sum whose results are parts, too.

    Returns:
      The dtype of each value. Where an annotation chooses, these are its operand and all values
      whose parts may reach it: a sum that the plan makes earlier, such as before a transpose or
      before a loop, is in that dtype as well. It overrides `reduce_dtype`. Of several annotations
      that a value reaches, the dtype that holds the values of all counts.
    """
    graph = flow.graph
    reals = [v for v, aval in graph.avals.items() if is_real(aval.dtype)]
    found = dict.fromkeys(reals, reduce_dtype) if reduce_dtype is not None else {}
    choices: dict[str, list[int]] = defaultdict(list)
    for node in graph.walk():
        if (choice := _choice(node)) is not None:
            # What a pin leaves partial is summed later: by a reader, or by `Partial.reduce`.
            choices[choice] += [o for o in node.inputs if isinstance(o, int)]
            choices[choice] += node.outputs if node.params["pin"].type.is_partial else ()
    sources = _sources(flow, carried) if choices else {}
    own: dict[int, str] = {}
    for choice in sorted(choices):
        for value in _reaching(graph, choices[choice], sources):
            own[value] = widest(own.get(value, choice), choice)
    return {**found, **own}


def widest(one: str, other: str) -> str:
    """A dtype that holds the values of two.

    >>> widest("bfloat16", "float16")
    'float32'
    """
    return one if holds(one, other) else other if holds(other, one) else "float32"


def _reaching(graph: Graph, starts: Sequence[int], sources: Mapping[int, list[int]]) -> set[int]:
    """The values whose parts may reach some values, these included."""

    def real(values: Sequence[int]) -> list[int]:
        return [v for v in values if is_real(graph.avals[v].dtype)]

    return set(reached(real(starts), lambda v: real(sources.get(v, []))))


def _choice(node: Node) -> str | None:
    """The `reduce_dtype` of an annotation; None for other nodes."""
    pin: Pin | None = node.params["pin"] if node.op == annotate_p.name else None
    return None if pin is None else pin.reduce_dtype


def _sources(flow: Flow, carried: Carried) -> dict[int, list[int]]:
    """For each value, the values whose parts may become its own."""
    found: dict[int, list[int]] = defaultdict(list)
    for decision, edges in zip(flow.decisions, flow.into(), strict=True):
        if decision.kind == "row" and decision.node is not None:
            numbers = frozenset(carried(decision.node))
            edges = [e for e in edges if e.number in numbers]
        reads = [e.operand for e in edges if isinstance(e.operand, int) and e.kind != "output"]
        for value in decision.makes:
            found[value] += reads
    return found
