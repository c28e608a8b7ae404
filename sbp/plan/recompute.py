"""Recomputation: values of the forward pass that the backward pass makes again, so that no device
holds them in between.

The forward pass is cut into segments. Where the backward pass first reads a value of a segment, it
runs the operations of the segment again, as `jax.checkpoint` does: from the values that enter the
segment, through a barrier that keeps XLA from merging both runs.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from sbp.infer.space import local_bytes
from sbp.infer.typing import Typing
from sbp.signatures import traits_of
from sbp.trace.collectives import SHARD_MAP
from sbp.trace.graph import BARRIER, Graph, Node, Operand
from sbp.trace.scopes import REMATTED

SEGMENTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of segments that are tried."""


@dataclass(frozen=True, slots=True)
class Recomputation:
    """What the backward pass of a program makes again.

    Arguments:
      ends: positions of nodes of the program; a segment ends before each. What follows the last
        one is kept.
      keeps_products: whether the results of products are kept.
    """

    ends: tuple[int, ...]
    keeps_products: bool


def recompute(graph: Graph, how: Recomputation) -> Graph:
    """The program whose backward pass makes values of the forward pass again. New values are
    entered in the table of avals."""
    return _Segments(graph, how).graph_with_copies()


class _Segments:
    """The segments of a program that run again; arguments as those of `recompute`.

    Attributes:
      originals: of each value that is made again, the first one.
    """

    def __init__(self, graph: Graph, how: Recomputation) -> None:
        self.graph, self.how = graph, how
        self.ids = itertools.count(max((n.id for n in graph.walk()), default=0) + 1)
        self.makers = {v: i for i, n in enumerate(graph.nodes) for v in n.outputs}
        self.first_use = dict[Operand, int]()
        for i, node in reversed([*enumerate(graph.nodes)]):
            self.first_use |= dict.fromkeys(node.inputs, i) if node.backward else {}
        self.originals = dict[int, int]()

    def graph_with_copies(self) -> Graph:
        again, nodes, instead = defaultdict(list), list[Node](), dict[Operand, Operand]()
        for start, end in itertools.pairwise((0, *self.how.ends)):
            first, needed, entering = self._segment(start, end)
            again[first].append((needed, entering))
        for i, node in enumerate(self.graph.nodes):
            for needed, entering in again[i]:
                # With a gradient in the barrier, the segment does not run before it is there.
                late = [o for o in node.inputs if o in self.makers and self._maker(o).backward]
                held = dict.fromkeys((*entering, *late))
                barrier = replace(node, op=BARRIER, primitive=None, params={}, regions=(), title="")
                ins = tuple(instead.get(o, o) if o in late else o for o in held)
                there = dict[Operand, Operand](self._append(nodes, barrier, ins, tuple(held)))
                instead |= {o: there[o] for o in late}
                for old in (self.graph.nodes[k] for k in needed):
                    ins = tuple(there.get(o, o) for o in old.inputs)
                    made = self._append(nodes, old, ins, old.outputs)
                    there |= made
                    instead |= made
            if node.backward:
                node = replace(node, inputs=tuple(instead.get(o, o) for o in node.inputs))
            nodes.append(node)
        return replace(self.graph, nodes=tuple(nodes))

    def _maker(self, operand: Operand) -> Node:
        return self.graph.nodes[self.makers[operand]]

    def _segment(self, start: int, end: int) -> tuple[int, list[int], list[Operand]]:
        """Of a segment, the node before which it runs again; the positions of what then runs; and
        the values that enter it. The first is -1 where nothing is made again."""
        made = {
            v
            for node in self.graph.nodes[start:end]
            if not (node.backward or node.regions or node.op == SHARD_MAP)
            and not (self.how.keeps_products and traits_of(node.op).flops)
            for v in node.outputs
        }
        waiting: list[Operand] = [v for v in sorted(made) if v in self.first_use]
        first = min((self.first_use[v] for v in waiting), default=-1)
        needed, entering = set[int](), dict[Operand, None]()
        for v in waiting:
            if v not in made:
                entering |= {v: None} if isinstance(v, int) else {}
            elif self.makers[v] not in needed:
                needed.add(self.makers[v])
                waiting += self._maker(v).inputs
        if not entering or first <= max(needed):  # nothing to hold back, or it is read before
            return -1, [], []
        return first, sorted(needed), [*entering]

    def _append(
        self, nodes: list[Node], like: Node, inputs: tuple[Operand, ...], values: tuple[Operand, ...]
    ) -> dict[int, int]:
        """Appends a node that makes values again; returns the new ones."""
        scope = f"transpose(jvp())/{REMATTED}/{REMATTED}"
        scope += "" if like.backward else f"/{like.scope}"
        new = {v: self.graph.new_value(self.graph.aval(v)) for v in values if isinstance(v, int)}
        self.originals |= {copy: self.originals.get(v, v) for v, copy in new.items()}
        outputs = tuple(new.values())
        nodes.append(replace(like, id=next(self.ids), inputs=inputs, outputs=outputs, scope=scope))
        return new


# ---- choice -------------------------------------------------------------------------------------


def recomputations(typing: Typing, room: float) -> Iterator[Recomputation]:
    """Recomputations with which a program holds less than with a typing, by the sizes of its values
    there. Those that keep products come first, as they cost least.

    Arguments:
      typing: the types of a plan that holds too much.
      room: bytes by which a device must hold less.
    """
    graph, sizes = typing.request.graph, dict[int, float]()
    for v, codes in typing.values.items():
        sizes[v] = local_bytes(graph.avals[v], codes, typing.mesh.sizes)
    before = live_peak(graph, sizes)

    def saved(how: Recomputation) -> float:
        segments = _Segments(replace(graph, avals=dict(graph.avals)), how)
        made = segments.graph_with_copies()
        copies = {copy: sizes[v] for copy, v in segments.originals.items()}
        return before - live_peak(made, sizes | copies)

    for keeps_products in (True, False):
        ways = [Recomputation(ends, keeps_products) for ends in _cuts(graph, sizes)]
        best = max(ways, key=saved, default=None)
        if best is None or saved(best) <= 0:
            continue
        fewer = (replace(best, ends=best.ends[:k]) for k in range(1, len(best.ends)))
        enough = next((how for how in fewer if saved(how) >= room), None)
        yield from (best,) if enough is None else (enough, best)


def _cuts(graph: Graph, sizes: Mapping[int, float]) -> Iterator[tuple[int, ...]]:
    """Ends of segments of the forward pass, for several numbers of segments. What the backward pass
    reads is spread over the segments evenly, and few bytes go from one segment to the next."""
    count = len(graph.nodes)
    saved, crossing, last = np.zeros(count), np.zeros(count + 1), dict[Operand, int]()
    read = {o for node in graph.nodes if node.backward for o in node.inputs}
    for i, node in enumerate(graph.nodes):
        last |= {} if node.backward else dict.fromkeys(node.inputs, i)
    for i, node in enumerate(graph.nodes):
        for v in () if node.backward else node.outputs:
            saved[i] += sizes[v] * (v in read)
            crossing[i + 1] += sizes[v]
            crossing[max(last.get(v, i), i) + 1 :][:1] -= sizes[v]
    made, crossing = np.cumsum(saved), np.cumsum(crossing)[:count]
    for k in SEGMENTS:
        targets = made[-1] * np.arange(1, k + 1) / (k + 1) if count else ()
        ends = []
        for target in targets:
            near = np.abs(made - target) <= made[-1] / (k + 1) / 2
            if near.any():
                ends.append(int(np.argmin(np.where(near, crossing, np.inf))))
        if len({*ends}) == k and ends[0] > 0:
            yield tuple(sorted({*ends}))


def live_peak(graph: Graph, sizes: Mapping[int, float]) -> float:
    """The largest sum of the bytes of values that are live at one node; arguments do not count."""
    root, last = dict[Operand, Operand](), dict[Operand, int]()
    for i, node in enumerate(graph.nodes):
        last |= {root.get(o, o): i for o in node.inputs}
        if node.is_barrier:
            root |= {v: root.get(o, o) for v, o in zip(node.outputs, node.inputs, strict=True)}
    last |= {root.get(o, o): len(graph.nodes) for o in graph.outputs}
    freed, peak, live = defaultdict[int, float](float), 0.0, 0.0
    for i, node in enumerate(graph.nodes):
        for v in () if node.is_barrier else node.outputs:
            live += sizes[v]
            freed[last.get(v, i)] += sizes[v]
        peak = max(peak, live)
        live -= freed[i]
    return peak
