"""Recomputation: values of the forward pass that the backward pass makes again, so that no device
holds them in between.

The forward pass is cut into segments. Where the backward pass first reads a value of a segment, it
runs the operations of the segment again, as `jax.checkpoint` does: from the values that enter the
segment, through a barrier that keeps XLA from merging both runs.
"""

import itertools
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from sbp.infer.request import Recomputation, Request
from sbp.infer.space import local_bytes
from sbp.plan.program import Program
from sbp.signatures import traits_of
from sbp.trace.collectives import SHARD_MAP
from sbp.trace.graph import BARRIER, Graph, Node, Operand, reached
from sbp.trace.scopes import REMATTED

SEGMENTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of segments that are tried."""


def with_recomputation(request: Request, how: Recomputation) -> Request:
    """The request for the program whose backward pass makes values of the forward pass again."""
    graph = replace(request.graph, avals=dict(request.graph.avals))
    made = _Segments(graph, how).graph_with_copies()
    return replace(request, graph=made, recomputed=how)


class _Segments:
    """The segments of a program that run again.

    Arguments:
      graph: the program. New values are entered in its table of avals.
      how: what is made again.

    Attributes:
      originals: of each value that is made again, the first one.
      entering: the values from which segments are made again.
    """

    def __init__(self, graph: Graph, how: Recomputation) -> None:
        self.graph, self.how = graph, how
        self.ids = itertools.count(max((n.id for n in graph.walk()), default=0) + 1)
        self.makers = {v: i for i, n in enumerate(graph.nodes) for v in n.outputs}
        self.first_use = dict[Operand, int]()  # in the backward pass
        for i, node in reversed([*enumerate(graph.nodes)]):
            self.first_use |= dict.fromkeys(node.inputs, i) if node.backward else {}
        last, ends = last_forward_reads(graph), (*how.ends, len(graph.nodes) + 1)
        # What goes from one segment to the next is there.
        self.kept = {
            v for v, i in self.makers.items() if ends[bisect_right(ends, i)] <= last.get(v, i)
        }
        self.originals, self.entering = dict[int, int](), set[int]()

    def graph_with_copies(self) -> Graph:
        again = defaultdict[int, list[tuple[list[int], list[int]]]](list)
        nodes, instead = list[Node](), dict[Operand, Operand]()
        for start, end in itertools.pairwise((0, *self.how.ends)):
            first, needed, entering = self._segment(start, end)
            again[first].append((needed, entering))
        for i, node in enumerate(self.graph.nodes):
            for needed, entering in again[i]:
                self.entering |= {*entering}
                # With a gradient in the barrier, the segment does not run before it is there.
                late = [o for o in node.inputs if isinstance(o, int) and self._is_gradient(o)]
                held = dict.fromkeys((*entering, *late))
                barrier = replace(node, op=BARRIER, primitive=None, params={}, regions=(), title="")
                ins = tuple(instead.get(o, o) if o in late else o for o in held)
                there: dict[Any, Operand] = {**self._append(nodes, barrier, ins, [*held])}
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

    def _is_gradient(self, value: int) -> bool:
        return value in self.makers and self.graph.nodes[self.makers[value]].backward

    def _segment(self, start: int, end: int) -> tuple[int, list[int], list[int]]:
        """Of a segment, the node before which it runs again; the positions of what then runs; and
        the values that enter it. The first is -1 where nothing is made again."""
        made = {
            v
            for node in self.graph.nodes[start:end]
            if not (node.backward or node.regions or node.op == SHARD_MAP)
            and "callback" not in node.params
            and not (self.how.keeps_products and traits_of(node.op).flops)
            for v in node.outputs
            if v not in self.kept
        }

        def operands(v: int) -> list[int]:
            read = self.graph.nodes[self.makers[v]].inputs if v in made else ()
            return [o for o in read if isinstance(o, int)]

        used = [v for v in sorted(made) if v in self.first_use]
        first = min((self.first_use[v] for v in used), default=-1)
        every = [*reached(used, operands)]
        entering = [v for v in every if v not in made]
        needed = sorted({self.makers[v] for v in every if v in made})
        if not entering or first <= needed[-1]:  # nothing to hold back, or it is read before
            return -1, [], []
        return first, needed, entering

    def _append(
        self, nodes: list[Node], like: Node, inputs: tuple[Operand, ...], values: Sequence[int]
    ) -> dict[int, int]:
        """Appends a node that makes values again; returns the new ones."""
        scope = f"transpose(jvp())/{REMATTED}/{REMATTED}"
        scope += "" if like.backward else f"/{like.scope}"
        new = {v: self.graph.new_value(self.graph.avals[v]) for v in values}
        self.originals |= {copy: self.originals.get(v, v) for v, copy in new.items()}
        outputs = tuple(new.values())
        nodes.append(replace(like, id=next(self.ids), inputs=inputs, outputs=outputs, scope=scope))
        return new


# ---- choice -------------------------------------------------------------------------------------


def recomputations(program: Program) -> Iterator[Recomputation]:
    """Recomputations with which a program holds less than with a plan, those first that keep
    products or make less again.

    Arguments:
      program: a plan that does not fit its memory limit.
    """
    graph, typing, limit = program.request.graph, program.typing, program.request.memory_limit
    full = {v: local_bytes(graph.avals[v], t, typing.mesh.sizes) for v, t in typing.values.items()}
    # The compiler makes many values where they are read. Those of the fullest moment are held.
    held = {r.value: full[r.value] for r in program.fullest if r.value in full}
    before, room = live_peak(graph, held), program.cost.peak_memory_bytes - (limit or 0.0)

    def saved(how: Recomputation) -> float:
        segments = _Segments(replace(graph, avals=dict(graph.avals)), how)
        made = segments.graph_with_copies()
        sizes = held | {v: full[v] for v in segments.entering if v in segments.makers}
        copies = {copy: sizes[v] for copy, v in segments.originals.items() if v in sizes}
        return before - live_peak(made, sizes | copies)

    for keeps_products in (True, False):
        ways = [Recomputation(ends, keeps_products) for ends in _cuts(graph, held, full)]
        best = max(ways, key=saved, default=None)
        if best is None or saved(best) <= 0:
            continue
        fewer = (replace(best, ends=best.ends[:k]) for k in range(1, len(best.ends)))
        enough = next((how for how in fewer if saved(how) >= room), None)
        yield from (best,) if enough is None else (enough, best)


def _cuts(
    graph: Graph, held: Mapping[int, float], full: Mapping[int, float]
) -> Iterator[tuple[int, ...]]:
    """Ends of segments of the forward pass, for several numbers of segments. What is held for the
    backward pass is spread over the segments evenly, and few bytes go from one to the next.

    Arguments:
      graph: the program.
      held: the bytes of the values that are held.
      full: the bytes of all values.
    """
    count = len(graph.nodes)
    saved, crossing, last = np.zeros(count), np.zeros(count + 1), last_forward_reads(graph)
    read = {o for node in graph.nodes if node.backward for o in node.inputs}
    for i, node in enumerate(graph.nodes):
        for v in () if node.backward else node.outputs:
            saved[i] += held.get(v, 0.0) * (v in read)
            crossing[i + 1] += full[v]
            crossing[max(last.get(v, i), i) + 1] -= full[v]
    # For each node: the bytes that earlier nodes save, and the bytes of earlier values that it or a
    # later node of the forward pass reads.
    made, crossing = np.cumsum(saved) - saved, np.cumsum(crossing)
    whole = saved.sum()
    made = made[: np.searchsorted(made, whole) + 1]
    found = set[tuple[int, ...]]()
    # What follows the last segment is kept; there may be as much of it as in a segment, or none.
    for k, parts in itertools.product(SEGMENTS if whole else (), (0, 1)):
        ends, step = set[int](), whole / (k + parts)
        for target in step * np.arange(1, k + 1):
            away = np.abs(made - target)
            near = np.flatnonzero(away <= step / 2)
            ends |= {int(i) for i in near[np.lexsort((away[near], crossing[near]))][:1]}
        found.add(tuple(sorted(ends - {0})))
    yield from sorted(found - {()}, key=lambda ends: (len(ends), ends))


def last_forward_reads(graph: Graph) -> dict[Operand, int]:
    """The position of the last node of the forward pass that reads a value."""
    last = dict[Operand, int]()
    for i, node in enumerate(graph.nodes):
        last |= {} if node.backward else dict.fromkeys(node.inputs, i)
    return last


def live_peak(graph: Graph, sizes: Mapping[int, float]) -> float:
    """The largest sum of the bytes of values that are live at one node; arguments do not count."""
    root, last = dict[Any, Any](), dict[Any, int]()
    for i, node in enumerate(graph.nodes):
        last |= {root.get(o, o): i for o in node.inputs}
        if node.is_barrier:
            root |= {v: root.get(o, o) for v, o in zip(node.outputs, node.inputs, strict=True)}
    last |= {root.get(o, o): len(graph.nodes) for o in graph.outputs}
    change = np.zeros(len(graph.nodes) + 2)
    for i, node in enumerate(graph.nodes):
        for v in () if node.is_barrier else node.outputs:
            change[i] += sizes.get(v, 0.0)
            change[last.get(v, i) + 1] -= sizes.get(v, 0.0)
    return float(np.cumsum(change).max())
