"""The claims that a typing makes about sizes: that the rule of each node gives the chosen row, and
that each split leaves every device an element.

`sbp.infer.certificate.certify` checks the same conditions at one choice of sizes. A claim is a
predicate on sizes, so that it can be decided for all of them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from sbp.errors import Span
from sbp.infer.flow import Decision
from sbp.infer.pins import pinned_codes
from sbp.infer.rows import NdRow, nests
from sbp.infer.space import Code, Codes, encode, is_even, to_type
from sbp.infer.typing import Typing
from sbp.limits import Policy
from sbp.machine.mesh import MeshSpec
from sbp.signatures import ROUNDED_PARTS, Op, all_b, kernel_named, rule_for
from sbp.signatures.region import REGION_OPS, region_rows
from sbp.sizes.exploration import Lift
from sbp.sizes.expressions import is_symbolic, map_sizes, shape_text
from sbp.trace.graph import DIM_AS_VALUE, Graph, Node


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One condition on sizes that a typing needs.

    Arguments:
      text: the condition in words, for the report.
      key: equal for claims of the same condition.
      holds: whether the condition holds, computed with the sizes that its argument gives for
          symbolic ones.
      span: the user's line.
    """

    text: str
    key: Any = field(repr=False)
    holds: Callable[[Lift], bool] = field(repr=False)
    span: Span | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Aval:
    """Shape and dtype for a rule. Sizes are integers, or `Size`s of `sizes.exploration`."""

    shape: tuple[Any, ...]
    dtype: Any

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> Any:
        return math.prod(self.shape)


def claims_of(graph: Graph, typing: Typing) -> tuple[Claim, ...]:
    """The claims that a typing makes about the sizes of its program, those on inputs and outputs
    first. Claims with equal keys are one.

    Arguments:
      graph: the program with symbolic sizes.
      typing: its typing at one choice of sizes.
    """
    found: dict[Any, Claim] = {}
    for claim in (*_boundary(graph, typing), *_inside(graph, typing)):
        found.setdefault(claim.key, claim)
    return tuple(found.values())


# ---- boundary -----------------------------------------------------------------------------------


def _boundary(graph: Graph, typing: Typing) -> Iterator[Claim]:
    names = graph.input_names or tuple(f"input {i}" for i in range(len(graph.inputs)))
    demand = typing.request.demand
    for position, (name, value) in enumerate(zip(names, graph.inputs, strict=True)):
        padded = demand.is_padded("input", position)
        aval, codes = graph.avals[value], typing.values[value]
        yield from _held(f"input {name}", aval, codes, typing.mesh, padded=padded)
    for number, (operand, codes) in enumerate(zip(graph.outputs, typing.outputs, strict=True)):
        padded = demand.is_padded("output", number)
        yield from _held(f"output {number}", graph.aval(operand), codes, typing.mesh, padded=padded)


def _held(what: str, aval: Any, codes: Codes, mesh: MeshSpec, *, padded: bool) -> Iterator[Claim]:
    """The claim that an input or output can be held in its type."""
    if not (is_symbolic([aval]) and any(c > 0 for c in codes)):
        return
    shape = tuple(aval.shape)
    if padded:
        yield Claim(
            text=f"{what} of shape {shape_text(shape)} has elements to split",
            key=("elements", str(shape)),
            holds=lambda lift: all(lift(d) != 0 for d in shape),
        )
        return
    yield Claim(
        text=f"{what} of shape {shape_text(shape)} divides evenly under {to_type(codes, mesh)!r}",
        key=("even", str(shape), codes),
        holds=lambda lift: is_even([lift(d) for d in shape], codes, mesh.sizes),
    )


# ---- nodes --------------------------------------------------------------------------------------


def _inside(program: Graph, typing: Typing) -> Iterator[Claim]:
    """The claims of the decisions of each node, in program order."""
    mesh, decided = typing.mesh, defaultdict[int, list[Decision]](list)
    for decision in typing.request.flow.decisions:
        if decision.node is not None:
            decided[decision.node.id].append(decision)
    for node in program.walk():
        for decision in decided[node.id]:
            match decision.kind:
                case "row" if node.op != DIM_AS_VALUE:
                    yield from _row(node, program, typing)
                case "annotation":
                    pin = node.params["pin"]
                    codes = (None,) * len(mesh.sizes) if pin is None else pinned_codes(pin, mesh)
                    pinned = tuple(c or 0 for c in codes)
                    yield from _large(node, program, decision, typing, pinned)
                case "value":
                    yield from _large(node, program, decision, typing, ())
                case _:
                    pass


def _large(
    node: Node, program: Graph, decision: Decision, typing: Typing, pinned: Codes
) -> Iterator[Claim]:
    """The claim that a split that is not pinned leaves each device an element (`TypeSpace`)."""
    mesh, codes = typing.mesh, typing.decided(decision)
    kind, key = decision.place
    if kind == "value":
        shape = tuple(program.avals[key].shape)
    else:  # one slice of a stacked result
        shape = tuple(program.avals[decision.makes[0]].shape[1:])
    if any(c > 0 and is_symbolic([(shape[c - 1],)]) for c in codes):
        yield Claim(
            text=(
                f"a value of {node.op} of shape {shape_text(shape)} is large enough for"
                f" {to_type(codes, mesh)!r}"
            ),
            key=("large", str(shape), codes, pinned),
            holds=lambda lift: _large_enough([lift(d) for d in shape], codes, pinned, mesh.sizes),
            span=node.span,
        )


def _large_enough(shape: Sequence[Any], codes: Codes, pinned: Codes, sizes: Sequence[int]) -> bool:
    forced = [k for k, c in enumerate(pinned) if c > 0 and shape[c - 1] < _parts(c, pinned, sizes)]
    free = tuple(0 if k in forced else c for k, c in enumerate(codes))
    return all(shape[c - 1] >= _parts(c, free, sizes) for c in sorted(set(free)) if c > 0)


def _parts(code: Code, codes: Codes, sizes: Sequence[int]) -> int:
    return math.prod(n for c, n in zip(codes, sizes, strict=True) if c == code)


def _row(node: Node, program: Graph, typing: Typing) -> Iterator[Claim]:
    """The claim that the rule of a node gives the chosen row on each mesh axis; on an inner axis,
    for the shapes that the outer axes leave (`RowTable`)."""
    mesh, row = typing.mesh, typing.rows[node.id]
    policies = typing.graph_request.rules(node).policies
    avals = [program.aval(o) for o in node.inputs], [program.avals[v] for v in node.outputs]

    def lifted(lift: Lift) -> dict[str, Any]:
        return {
            k: v if isinstance(v, Graph) else map_sizes(v, lift) for k, v in node.params.items()
        }

    same = all(v is node.params[k] for k, v in lifted(lambda size: None).items())
    if same and not is_symbolic([*avals[0], *avals[1]]):
        return
    if not any(c for t in (*row.ins, *row.outs) for c in t):
        return  # all B is always a row

    def holds(lift: Lift) -> bool:
        ins, outs = (
            tuple(Aval(tuple(map(lift, a.shape)), a.dtype) for a in side) for side in avals
        )
        return _offered(_AskedRow(node.op, lifted(lift), row, mesh, policies), ins, outs, ())

    shown = (
        ", ".join(repr(to_type(c, mesh)) for c in row.ins),
        ", ".join(repr(to_type(c, mesh)) for c in row.outs),
    )
    shapes = " ".join(shape_text(a.shape) for a in avals[0])
    yield Claim(
        text=f"{node.op} on {shapes} takes {shown[0]} to {shown[1]}",
        key=(
            node.op,
            _text(node.params),
            *(tuple((str(a.shape), a.dtype) for a in side) for side in avals),
            row.ins,
            row.outs,
            policies,
        ),
        holds=holds,
        span=node.span,
    )


def _text(params: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple((k, id(v) if isinstance(v, Graph) else str(v)) for k, v in sorted(params.items()))


@dataclass(frozen=True, slots=True, eq=False)
class _AskedRow:
    """A row of an operator, to be found among the rows of its rule.

    Arguments:
      op, params: the operator, with its parameters at the given sizes.
      row: the row on all mesh axes.
      mesh: the mesh.
      policies: the boxing policy on each mesh axis.
    """

    op: str
    params: dict[str, Any]
    row: NdRow
    mesh: MeshSpec
    policies: tuple[Policy, ...]


def _offered(
    asked: _AskedRow, ins: tuple[Aval, ...], outs: tuple[Aval, ...], kernels: tuple[str, ...]
) -> bool:
    """Whether the rule gives the row on all mesh axes from position `len(kernels)` on.

    Arguments:
      asked: the row.
      ins, outs: the operands and results with the shapes that the outer axes leave.
      kernels: the kernels on the outer axes.
    """
    row, mesh, position = asked.row, asked.mesh, len(kernels)
    if position == len(mesh.sizes):
        return nests(NdRow(row.ins, row.outs, kernels))
    name, n = mesh.axes[position]
    codes_in, codes_out = tuple(t[position] for t in row.ins), tuple(t[position] for t in row.outs)
    if n == 1:
        return _offered(asked, ins, outs, (*kernels, "local"))
    rounds = ROUNDED_PARTS.name in row.kernels
    op = Op(asked.op, asked.params, ins, outs, n, rounds)
    found = rule_for(op.name)
    rows = (
        region_rows(op, name)
        if op.name in REGION_OPS
        else (all_b(op),)
        if found is None
        else found.rows(op)
    )
    for r in rows:
        kernel = kernel_named(r.kernel)
        if (tuple(map(encode, r.ins)), tuple(map(encode, r.outs))) != (codes_in, codes_out):
            continue
        if kernel.communicates and not (
            asked.policies[position] == "auto" and (mesh.hardware.overlaps or not kernel.overlaps)
        ):
            continue
        if kernel.gathers is not None and r.kernel in kernels:
            continue
        if not all(
            c <= 0 or a.shape[c - 1] >= n
            for a, c in zip((*ins, *outs), (*codes_in, *codes_out), strict=True)
        ):
            continue
        inner = tuple(
            a if k == kernel.gathers else _localised(a, c, n)
            for k, (a, c) in enumerate(zip(ins, codes_in, strict=True))
        )
        inner_outs = tuple(_localised(a, c, n) for a, c in zip(outs, codes_out, strict=True))
        if _offered(asked, inner, inner_outs, (*kernels, r.kernel)):
            return True
    return False


def _localised(aval: Aval, code: Code, n: int) -> Aval:
    """The shard on a mesh axis of size n, blocks rounded up."""
    if code <= 0:
        return aval
    shape = list(aval.shape)
    shape[code - 1] = -(-shape[code - 1] // n)
    return Aval(tuple(shape), aval.dtype)
