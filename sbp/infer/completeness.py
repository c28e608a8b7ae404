"""Whether the walk over a program's decisions has all of the program in it: each operand, each
result of a region and each output is read, and each value is made."""

from __future__ import annotations

from collections import Counter

from sbp.errors import SbpInternalError
from sbp.infer.flow import Flow


def check_complete(flow: Flow) -> None:
    """Compares a walk with the program, from which alone it is known what there is to read.

    Arguments:
      flow: the walk.

    Raises:
      SbpInternalError: when an operand or output is not read, or a value is not made.
    """
    inside = [e for e in flow.edges if e.node is not None and e.kind != "exit"]
    read = {(e.node.id, e.number) for e in inside if e.node is not None}
    returned = {key: Counter(e.number for e in edges) for key, edges in flow.returned().items()}
    returned_by_program = {e.number for e in flow.edges if e.kind == "output"}
    values = set(flow.graph.inputs)
    for node in flow.graph.walk():
        for number in range(len(node.inputs)):
            if (node.id, number) not in read:
                raise SbpInternalError(f"the walk lacks operand {number} of {node.op} {node.id}")
        for k, region in enumerate(node.regions):
            values.update(region.inputs)
            for number in range(len(region.outputs)):
                if number not in returned[node.id, k]:
                    raise SbpInternalError(
                        f"the walk lacks result {number} of region {k} of {node.op} {node.id}"
                    )
        values.update(node.outputs)
    for number in range(len(flow.graph.outputs)):
        if number not in returned_by_program:
            raise SbpInternalError(f"the walk lacks output {number}")
    for value in sorted(values):
        end = flow.makers.get(value)
        made = flow.decisions[end.variable : end.variable + 1] if end is not None else ()
        if not made or value not in made[0].makes:
            raise SbpInternalError(f"the walk does not make the value {value}")
