"""Nodes with regions: how often their bodies run."""

from __future__ import annotations

from sbp.trace.graph import Node

WHILE_TRIPS = 8
"""Trips assumed of a `while` loop, whose count is unknown before it runs."""


def trips_of(node: Node) -> int:
    """How often a region's body runs."""
    match node.op:
        case "scan":
            return int(node.params["length"])
        case "while":
            return WHILE_TRIPS
        case _:
            return 1
