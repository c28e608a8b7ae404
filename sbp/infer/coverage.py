"""Checks that the primitives of a program have signatures."""

from __future__ import annotations

from sbp import _jax
from sbp.annotations import annotate_p
from sbp.errors import SbpError, warn
from sbp.machine.mesh import MeshSpec
from sbp.signatures import REFUSED, rule_for
from sbp.signatures.region import REGION_OPS
from sbp.trace.graph import Graph
from sbp.trace.regions import CONTROL_FLOW

TYPED_ELSEWHERE = CONTROL_FLOW | {annotate_p.name} | REGION_OPS
"""Nodes whose types follow from their regions, their pins or their specs."""


def check_rules(graph: Graph, mesh: MeshSpec) -> None:
    """Warns once of each primitive without a signature, which is computed on whole operands, and
    refuses primitives for which no type is right.

    Raises:
      SbpError: `unsupported-effect` for a primitive in `REFUSED`, and for ordered debug effects on
        several devices, which JAX refuses as well.
    """
    said: set[str] = set()
    for node in graph.walk():
        where = f" at {node.span}" if node.span else ""
        if node.op in REFUSED:
            raise SbpError(
                f"primitive {node.op!r}{where} {REFUSED[node.op]}; use jax.random",
                code="unsupported-effect",
                span=node.span,
            )
        if mesh.num_devices > 1 and _jax.is_ordered_debug(node.params):
            raise SbpError(
                f"{node.op} with ordered=True runs on one device, and the mesh ({mesh}) has"
                f" {mesh.num_devices}; leave out ordered=True, or use"
                " jax.experimental.io_callback(.., ordered=True)",
                code="unsupported-effect",
                span=node.span,
            )
        if node.op in said or node.op in TYPED_ELSEWHERE:
            continue
        rule, because = rule_for(node.op), ""
        if rule is not None:
            because = rule.unread(node.params) if rule.unread else ""
            if not because:
                continue
        said.add(node.op)
        warn(
            "missing-rule",
            f"primitive {node.op!r}",
            "has no signature; its operands and results are held B"
            + (f": {because}" if because else ""),
            span=node.span,
        )
