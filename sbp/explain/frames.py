"""Dims as the user's line has them. A function of a library may move dims before and after its own
operation: `jnp.fft.fft(x, axis=1)` transforms the last dim of a transposed `x`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jax import lax

from sbp.explain.names import Names
from sbp.infer.space import Code
from sbp.signatures import traits_of
from sbp.trace.graph import Node


@dataclass(frozen=True, slots=True)
class Frames:
    """The dims of the operands and results of a node in the user's line.

    Arguments:
      names: the program with its names.
      node: the node.
    """

    names: Names
    node: Node

    def operand(self, number: int, code: Code) -> Code:
        """A code of an operand, of the value that the user's line reads.

        Arguments:
          number: of the operand.
          code: the code in the dims of the node.
        """
        maker = self.names.makers.get(self._value(self.node.inputs[number]))
        while code > 0 and maker is not None and self._is_step(maker):
            code = _moved(maker, code)
            maker = self.names.makers.get(self._value(maker.inputs[0]))
        return code

    def operands(self, number: int, codes: Sequence[Code]) -> tuple[Code, ...]:
        """Codes of an operand; see `operand`."""
        return tuple(self.operand(number, code) for code in codes)

    def result(self, number: int, code: Code) -> Code:
        """A code of a result, of the value that the user's line makes.

        Arguments:
          number: of the result.
          code: the code in the dims of the node.
        """
        value = self.node.outputs[number]
        while code > 0:
            readers = [n for n in self.names.dataflow.readers[value] if n and value in n.inputs]
            if len(readers) != 1 or not self._is_step(readers[0]):
                return code
            code, value = _moved_on(readers[0], code), readers[0].outputs[0]
        return code

    def _value(self, operand: object) -> int:
        return operand if isinstance(operand, int) else -1

    def _is_step(self, other: Node) -> bool:
        """Whether a node is a step of the library around the node that keeps or moves all dims."""
        if not other.inputs or not other.outputs:
            return False
        ins, outs = (self.names.graph.aval(v).shape for v in (other.inputs[0], other.outputs[0]))
        return (
            other.span == self.node.span
            and traits_of(other.op).unnamed
            and (other.op == lax.transpose_p.name or ins == outs)
        )


def _moved(step: Node, code: Code) -> Code:
    """The code of the operand of a step from that of its result."""
    if step.op == lax.transpose_p.name:
        return 1 + step.params["permutation"][code - 1]
    return code


def _moved_on(step: Node, code: Code) -> Code:
    """The code of the result of a step from that of its operand."""
    if step.op == lax.transpose_p.name:
        return 1 + tuple(step.params["permutation"]).index(code - 1)
    return code
