"""What arrives at the line of a fault, in words."""

from __future__ import annotations

from collections.abc import Mapping

from sbp.explain.blame import BlamedFault
from sbp.explain.frames import Frames
from sbp.explain.names import BATCHED
from sbp.explain.regions import atoms_text, left
from sbp.infer.space import Code
from sbp.trace.graph import Node


def arrives(fault: BlamedFault, node: Node, made: Mapping[int, tuple[Code, ...]]) -> str:
    """The primary label: what arrives at the operands, and what to reduce.

    Arguments:
      fault: the fault.
      node: the node at which it shows.
      made: for each operand the codes in which it can arrive.
    """
    shown = fault.names.shown(node)
    frames = Frames(fault.names, node)
    users = {i: frames.operands(i, codes) for i, codes in made.items()}
    behind = {
        i: f" {BATCHED}" if max(codes, default=0) > 0 and fault.names.is_behind(node, i) else ""
        for i, codes in users.items()
    }
    told = list(
        dict.fromkeys(f"{shown[i]} is {atoms_text(codes)}{behind[i]}" for i, codes in users.items())
    )
    partial = list(dict.fromkeys(shown[i] for i, codes in made.items() if left(codes) == "partial"))
    n = fault.request.mesh.sizes[fault.position]
    for i, codes in made.items():
        dim = codes[0] - 1 if len(codes) == 1 else -1
        size = fault.request.graph.aval(node.inputs[i]).shape[dim] if dim >= 0 else n
        if size < n:
            return (
                f"{shown[i]} is {atoms_text(users[i])}{behind[i]}, but its dim {users[i][0] - 1} of"
                f" size {size} is shorter than {n} devices"
            )
    if len(fault.found.sink) == 1:
        hint = (
            ""
            if len(partial) < len(told)
            else "; reduce it first"
            if len(told) == 1
            else "; reduce them first"
        )
        return f"{', '.join(told)} here, which {node.name} does not take{hint}"
    direct = all(
        any(fault.direct(node, c, k.operand) for c in fault.found.pins) for k in fault.found.sink
    )
    if len(told) == 1:
        return (
            f"{told[0]} on both sides; reduce it first" if partial else f"{told[0]} on both sides"
        )
    meet = (
        "these two cannot meet here"
        if direct and len(told) == 2
        else f"{', '.join(told)}: they cannot meet here"
    )
    return meet + (
        f"; reduce {'one of them' if len(partial) == len(told) else partial[0]} first"
        if partial
        else ""
    )
