"""Value numbering: two values have one number if the same operations make them from equal values.

Gradients repeat computations of the forward pass: in scans under `jax.checkpoint`, and where JAX
traces the operations of one block twice. A slice of a stacked value has the number of the value in
the loop that stacked it.
"""

from collections import defaultdict
from collections.abc import Hashable
from typing import Any

import numpy as np

from sbp import _jax
from sbp.trace.graph import Constant, Graph, Node, Operand, interface_of

SAME = frozenset({"sbp_annotate", "optimization_barrier"})
"""Operations whose results equal their operands, one by one."""


class Numbering:
    """A number for each value. Values with one number are equal; inside loops they are equal at the
    same index of the loops' stacked operands."""

    def __init__(self) -> None:
        self._known: dict[Any, int] = {}
        self._of: dict[int, int] = {}
        self._keys: dict[int, tuple[Any, ...]] = {}
        self._keep: list[Any] = []
        self._inside: Any = None

    def of(self, operand: Operand) -> Hashable:
        """The number of a value, or a key for a constant."""
        if not isinstance(operand, Constant):
            return self._of[operand]
        if np.ndim(operand.value) == 0 and not _jax.is_extended(operand.aval.dtype):
            return ("constant", str(operand.aval.dtype), np.asarray(operand.value).tobytes())
        return ("array", id(operand.value))

    def _number(self, key: Any) -> int:
        number = self._known.setdefault(key, len(self._known))
        self._keys[number] = key
        return number

    def _same(self, operand: Operand) -> int:
        """The number of a value that equals an operand."""
        if isinstance(operand, Constant):
            return self._number(("same", self.of(operand)))
        return self._of[operand]

    def _new(self, value: int) -> None:
        self._of[value] = self._number(("value", value))

    def enter(self, graph: Graph) -> None:
        """Numbers the values of a graph; inputs without a number get new ones."""
        for value in graph.inputs:
            if value not in self._of:
                self._new(value)
        for node in graph.nodes:
            if node.op in SAME:
                for operand, value in zip(node.inputs, node.outputs, strict=True):
                    self._of[value] = self._same(operand)
            elif node.op == "scan":
                self._scan(node)
            elif node.regions:
                for region in node.regions:
                    self.enter(region)
                for value in node.outputs:
                    self._new(value)
            else:
                key = (node.op, node.params_key(self._keep), tuple(self.of(o) for o in node.inputs))
                for position, value in enumerate(node.outputs):
                    self._of[value] = self._number((*key, position))

    def _scan(self, node: Node) -> None:
        (body,) = node.regions
        interface = interface_of(node)
        # The index that values depend on: one for all loops of a length side by side, another for
        # each depth.
        index = (self._inside, int(node.params["length"]))
        for entry, value in zip(interface.fed[0], body.inputs, strict=True):
            operand = node.inputs[entry.operand]
            if entry.kind == "constant":
                self._of[value] = self._same(operand)
            elif entry.kind == "slice":
                whole: tuple[Any, ...] = (
                    self._keys.get(self._of[operand], ()) if isinstance(operand, int) else ()
                )
                self._of[value] = (
                    whole[2]
                    if whole[:2] == ("stack", index)
                    else self._number(("at", index, self.of(operand)))
                )
        outside, self._inside = self._inside, index
        self.enter(body)
        self._inside = outside
        for left in interface.exits:
            value = node.outputs[left.result]
            if left.kind == "carry":
                self._new(value)
            else:
                self._of[value] = self._number(("stack", index, self.of(body.outputs[left.output])))


def repeated_values(graph: Graph) -> tuple[frozenset[int], dict[int, int]]:
    """Finds the values that a program computes more than once: in one block, or in scans of equal
    length. Operands of a scan count where an earlier scan takes equal ones.

    Returns:
      The repeated values: those equal to an earlier one, and the values that gradients compute them
      from; and for each value with an equal one, the first included, the number of equal values.
    """
    numbers = Numbering()
    numbers.enter(graph)
    alike: dict[tuple[Hashable, int], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    late = {o for node in graph.nodes if node.backward for o in node.inputs}
    for node in graph.nodes:
        for value in node.outputs:
            turns = alike[numbers.of(value), 0]
            if value in late or not turns:
                turns[value].append(value)
        if node.op == "scan":
            (body,) = node.regions
            for value in (*body.inputs, *(v for inner in body.nodes for v in inner.outputs)):
                alike[numbers.of(value), int(node.params["length"])][node.id].append(value)
    several = [list(turns.values()) for turns in alike.values() if len(turns) > 1]
    again = {value for turns in several for values in turns[1:] for value in values}
    for node in reversed(graph.nodes):
        if node.backward and not again.isdisjoint(node.outputs):
            again.update(o for o in node.inputs if isinstance(o, int))
    times = {v: len(turns) for turns in several for values in turns for v in values}
    return frozenset(again), times
