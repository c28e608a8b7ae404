"""A program as constraints, one system per mesh axis, each constraint with its `because`.

A variable is what has to be decided on one axis: the row of a node, or the atom of a value that no
row makes. A conversion links the end where a value is made to an end where it is read and allows
what the boxing policy allows there. A pin fixes a state. The systems are projections of the
chooser's problem: what it finds satisfies all of them. What they leave out is interaction between
axes (a nested split that is too small, two monoids in one type), so a program may pass here and
still have no typing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from sbp import _jax
from sbp.annotations import Pin
from sbp.errors import Span
from sbp.infer.because import (
    Because,
    BudgetBecause,
    PinBecause,
    PinSource,
    PolicyBecause,
    ReadBecause,
)
from sbp.infer.literals import POLICY_LITERAL, budget_literal, edge_literal, pin_literal
from sbp.infer.policy import POLICY_KINDS, Ban, Rules, detour
from sbp.infer.problem import pinned_codes
from sbp.infer.request import Request
from sbp.infer.rows import EMPTY, row_sends
from sbp.infer.space import Code, TypeSpace
from sbp.limits import Policy
from sbp.machine.mesh import MeshSpec
from sbp.trace.graph import Constant, Graph, Node, Operand
from sbp.trace.regions import Entry, Exit, interface_of
from sbp.types import MONOIDS


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PinSite:
    """A pin as the user wrote it: one annotation, or one input or output with a type.

    Arguments:
      name: the name of its constraint, the same on every mesh axis.
      source, span: what it stands on; the annotation's line, None for inputs and outputs.
      codes: what it asks on each mesh axis; None where it asks nothing.
      nodes: the annotation's nodes: one line may be traced many times (unrolled layers,
          rematerialisation).
      position: of the input or output.
    """

    name: str
    source: PinSource
    span: Span | None
    codes: tuple[int | None, ...]
    nodes: tuple[Node, ...] = ()
    position: int = -1


@dataclass(frozen=True, slots=True)
class Variable:
    """What is decided: one of `states`, each a tuple of codes; `where` says where a typing holds
    the decision."""

    where: tuple[Literal["row", "value", "read", "returned", "output"], Any]
    states: tuple[tuple[Code, ...], ...]


@dataclass(frozen=True, slots=True)
class End:
    """One code of a variable's state."""

    variable: int
    column: int = 0


@dataclass(frozen=True, slots=True)
class Convert:
    """What is made at `source` is read at `target`, converted as the rules allow.

    While one of the pins named in `unless` holds, this is an annotation, where the budgets alone
    forbid.
    """

    value: int
    source: End
    target: End
    rules: Rules
    unless: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Constraint:
    """One fact that a typing meets, with the reason for it.

    Arguments:
      name: unique in its system.
      kind: `pin`, `policy`, `budget` (what these forbid, they forbid in every conversion),
          `equation` or `region` (an operand).
      because: the user's line and the reason.
      node: the node whose operand is read; None for pins, the policy and program outputs.
      operand: which operand of the node.
      convert: the conversion of an equation or region.
      fixed, code, site: the ends that a pin fixes, to what, and the pin.
      budget: which of the program's budgets.
    """

    name: str
    kind: Literal["pin", "policy", "budget", "equation", "region"]
    because: Because
    node: Node | None = None
    operand: int = -1
    convert: Convert | None = None
    fixed: tuple[End, ...] = ()
    code: Code = 0
    site: PinSite | None = None
    budget: int = -1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class System:
    """The constraints of a program on one mesh axis.

    Arguments:
      mesh_axis: the axis.
      position: its position in the mesh.
      request: the program, and what its types are chosen by.
      avals: shape and dtype of every value.
      conversions: what can be converted on this axis.
      variables, constraints: pins, policy and budgets come first, then the program's order.
      makers: the end where each value is made.
      native: for each value, the monoids it can be partial under.
    """

    mesh_axis: str
    position: int
    request: Request = field(repr=False)
    avals: dict[int, Any] = field(repr=False)
    conversions: Conversions = field(repr=False)
    variables: tuple[Variable, ...] = field(repr=False)
    constraints: tuple[Constraint, ...] = field(repr=False)
    makers: dict[int, End] = field(repr=False)
    native: Mapping[int, frozenset[str]] = field(repr=False)


def allowed(source: Code, target: Code, policy: Policy) -> bool:
    """Whether a policy converts one atom to another on one mesh axis, in any number of steps.

    >>> [allowed(1, 0, p) for p in ("auto", "reduce", "explicit")], allowed(0, 1, "explicit")
    ([True, False, False], True)
    """
    if source == target or source == 0:
        return True
    kinds = POLICY_KINDS[policy]
    if source > 0:
        return "all_gather" in kinds
    return "all_reduce" in kinds


class Conversions:
    """What rules allow to convert on one mesh axis, in any number of steps.

    Bytes depend on how the other axes split a value; here they are what is left when all of them
    do, which is the least. So a budget may be impossible though this finds it possible, never the
    other way round; with one mesh axis both agree.
    """

    def __init__(self, mesh: MeshSpec, position: int) -> None:
        self.mesh, self.position = mesh, position
        self._others = math.prod(n for i, n in enumerate(mesh.sizes) if i != position)
        # Alone the axis would look like a whole mesh, which some compilers scatter over by an
        # all-reduce.
        hardware = (
            mesh.hardware
            if self._others == 1
            else dataclasses.replace(mesh.hardware, scatters_whole_mesh=True)
        )
        self._alone = MeshSpec(axes=(mesh.axes[position],), hardware=hardware)
        self._found: dict[Any, tuple[TypeSpace, np.ndarray]] = {}

    def allows(self, source: Code, target: Code, aval: Any, rules: Rules) -> bool:
        """Whether a value made as `source` can be read as `target`."""
        if not rules.bans or source == target:
            return allowed(source, target, rules.policies[self.position])
        space, seconds = self._space(
            aval,
            frozenset(c for c in (source, target) if c < 0),
            frozenset((source, target)),
            rules,
        )
        return bool(np.isfinite(seconds[space.index[(source,)], space.index[(target,)]]))

    def _space(
        self, aval: Any, partial: frozenset[Code], codes: frozenset[Code], rules: Rules
    ) -> tuple[TypeSpace, np.ndarray]:
        key = (aval.shape, aval.dtype, partial, codes, rules)
        if key not in self._found:
            monoids = detour(aval.dtype, frozenset(MONOIDS[-1 - c] for c in partial))
            forced = frozenset((0, c - 1) for c in codes if c > 0)
            space = TypeSpace(
                tuple(aval.shape), _jax.itemsize(aval.dtype), self._alone, monoids, forced
            )
            bans = tuple(
                Ban(b.kind, frozenset((0,)), b.above * self._others)
                for b in rules.bans
                if self.position in b.mesh_axes
            )
            self._found[key] = space, space.seconds(Rules((rules.policies[self.position],), bans))
        return self._found[key]


def pin_sites(request: Request) -> tuple[PinSite, ...]:
    """All pins of a program in program order, inputs first; nodes traced from one annotation are
    one pin."""
    graph, mesh, demand = request.graph, request.mesh, request.demand
    sites: list[PinSite] = []
    for position, codes in enumerate(demand.inputs):
        if codes is not None and any(c is not None for c in codes):
            sites.append(
                PinSite(
                    name=pin_literal("input", position),
                    source="input",
                    span=None,
                    codes=tuple(codes),
                    position=position,
                )
            )
    groups: dict[Any, list[Node]] = {}
    for node in graph.walk():
        if node.op == "sbp_annotate" and node.params["pin"] is not None:
            pin: Pin = node.params["pin"]
            groups.setdefault((node.span or node.id, pinned_codes(pin, mesh)), []).append(node)
    for number, ((_, codes), nodes) in enumerate(groups.items()):
        sites.append(
            PinSite(
                name=pin_literal("annotation", number),
                source="annotation",
                span=nodes[0].span,
                codes=codes,
                nodes=tuple(nodes),
            )
        )
    for position, codes in enumerate(demand.outputs):
        if codes is not None and any(c is not None for c in codes):
            sites.append(
                PinSite(
                    name=pin_literal("output", position),
                    source="output",
                    span=None,
                    codes=tuple(codes),
                    position=position,
                )
            )
    return tuple(sites)


def constraints_of(request: Request) -> tuple[System, ...]:
    """The systems of a program, one per mesh axis of more than one device, outer axis first."""
    sites = pin_sites(request)
    return tuple(
        _Builder(request, sites, k).system() for k, n in enumerate(request.mesh.sizes) if n > 1
    )


class _Builder:
    """Walks a program and writes down its system on one mesh axis."""

    def __init__(self, request: Request, sites: tuple[PinSite, ...], position: int) -> None:
        self.request, self.graph, self.mesh = request, request.graph, request.mesh
        self.demand, self.native = request.demand, request.native
        self.position, self.n = position, self.mesh.sizes[position]
        self.loops = 0
        self.variables: list[Variable] = []
        self.makers: dict[int, End] = {}
        self.reads: list[tuple[Constraint, Operand, End, Rules, tuple[str, ...]]] = []
        self.fixed: dict[str, list[End]] = {}
        self.sites = [s for s in sites if s.codes[position] is not None]
        self.site_of = {node.id: s for s in self.sites for node in s.nodes}
        self.projections: dict[Any, tuple[tuple[Code, ...], ...]] = {}

    def system(self) -> System:
        tied = dict(self.demand.tied)
        inputs = {s.position: s for s in self.sites if s.source == "input"}
        outputs = {s.position: s for s in self.sites if s.source == "output"}
        for i, value in enumerate(self.graph.inputs):
            end = self.variable(
                ("value", value), self.boundary(self.graph.avals[value], inputs.get(i))
            )
            self.makers[value] = end
            if i in inputs:
                self.fixed.setdefault(inputs[i].name, []).append(end)
        self.visit(self.graph)
        for i, operand in enumerate(self.graph.outputs):
            if i in tied and self.demand.outputs[i] is None:
                end = self.makers[self.graph.inputs[tied[i]]]
            else:
                end = self.variable(
                    ("output", i), self.boundary(self.graph.aval(operand), outputs.get(i))
                )
                if i in outputs:
                    self.fixed.setdefault(outputs[i].name, []).append(end)
            self.read(operand, end, None, i, free=True)
        return System(
            mesh_axis=self.mesh.names[self.position],
            position=self.position,
            request=self.request,
            avals=self.graph.avals,
            conversions=Conversions(self.mesh, self.position),
            variables=tuple(self.variables),
            constraints=(*self.pins(), *self.conversions()),
            makers=self.makers,
            native=self.native,
        )

    def pins(self) -> list[Constraint]:
        """The pins, then the policy, then the budgets."""
        found: list[Constraint] = []
        for site in self.sites:
            code = site.codes[self.position]
            assert code is not None
            because = PinBecause(site.source, site.span, site.position, code)
            ends = tuple(self.fixed.get(site.name, ()))
            found.append(
                Constraint(
                    name=site.name, kind="pin", because=because, fixed=ends, code=code, site=site
                )
            )
        found.append(
            Constraint(
                name=POLICY_LITERAL,
                kind="policy",
                because=PolicyBecause(self.request.boxing),
            )
        )
        for number, budget in enumerate(self.request.budgets):
            found.append(
                Constraint(
                    name=budget_literal(number),
                    kind="budget",
                    because=BudgetBecause(budget),
                    budget=number,
                )
            )
        return found

    def conversions(self) -> list[Constraint]:
        """The reads, each with its own freedom: what an annotation converts for itself is not there
        for the other readers."""
        found: list[Constraint] = []
        for draft, operand, end, rules, unless in self.reads:
            if isinstance(operand, Constant):
                continue
            convert = Convert(operand, self.makers[operand], end, rules, unless)
            found.append(
                Constraint(
                    name=edge_literal(len(found)),
                    kind=draft.kind,
                    because=draft.because,
                    node=draft.node,
                    operand=draft.operand,
                    convert=convert,
                )
            )
        return found

    # ---- parts ----------------------------------------------------------------------------------

    def variable(
        self, where: tuple[Any, Any], codes: tuple[Code, ...] | tuple[tuple[Code, ...], ...]
    ) -> End:
        states = tuple(c if isinstance(c, tuple) else (c,) for c in codes)
        self.variables.append(Variable(where, states))
        return End(len(self.variables) - 1)

    def atoms(
        self, aval: Any, monoids: frozenset[str] = EMPTY, pinned: Code = 0
    ) -> tuple[Code, ...]:
        """The codes a value may have on this axis: dims that are large enough, or pinned."""
        codes = [
            0,
            *(1 + d for d, size in enumerate(aval.shape) if size >= self.n or pinned == 1 + d),
        ]
        codes += [-1 - MONOIDS.index(m) for m in sorted(monoids)]
        return (*codes, pinned) if pinned < 0 and pinned not in codes else tuple(codes)

    def boundary(self, aval: Any, site: PinSite | None) -> tuple[Code, ...]:
        """Inputs and outputs: splits that divide, partial only where asked for."""
        pinned = (site.codes[self.position] if site else None) or 0
        return tuple(
            c for c in self.atoms(aval, EMPTY, pinned) if c <= 0 or aval.shape[c - 1] % self.n == 0
        )

    def of(self, operand: Operand) -> frozenset[str]:
        return self.native.get(operand, EMPTY) if isinstance(operand, int) else EMPTY

    def read(
        self,
        operand: Operand,
        end: End,
        node: Node | None,
        number: int,
        *,
        entry: Entry | None = None,
        left_by: Exit | None = None,
        free: bool = False,
        unless: tuple[str, ...] = (),
    ) -> None:
        region = node is not None and bool(node.regions)
        because = ReadBecause(node, number, entry, left_by)
        draft = Constraint(
            name="",
            kind="region" if region else "equation",
            because=because,
            node=node,
            operand=number,
        )
        rules = self.request.rules(node, in_loop=self.loops > 0, free=free, value=operand)
        self.reads.append((draft, operand, end, rules, unless))

    def visit(self, graph: Graph) -> None:
        for node in graph.nodes:
            match node.op:
                case "scan":
                    self.scan(node)
                case "while":
                    self.loop(node)
                case "cond":
                    self.cond(node)
                case "sbp_annotate":
                    self.annotation(graph, node)
                case "optimization_barrier":
                    for i, (operand, value) in enumerate(
                        zip(node.inputs, node.outputs, strict=True)
                    ):
                        self.makers[value] = self.held(value)
                        self.read(
                            operand,
                            self.makers[value],
                            node,
                            i,
                        )
                case _:
                    self.equation(graph, node)

    def held(self, value: int, monoids: frozenset[str] | None = None) -> End:
        """The variable of a value that no row makes."""
        return self.variable(
            ("value", value),
            self.atoms(self.graph.avals[value], self.of(value) if monoids is None else monoids),
        )

    def equation(self, graph: Graph, node: Node) -> None:
        rows = self.request.table.rows(
            node,
            [graph.aval(o) for o in node.inputs],
            [graph.avals[o] for o in node.outputs],
            tuple(self.of(o) for o in node.inputs),
        )
        rules = self.request.rules(node, in_loop=self.loops > 0)
        key = id(rows), rules  # the table keeps its rows alive
        if key not in self.projections:
            k = self.position
            if not rules.unlimited:
                rows = tuple(
                    r
                    for r in rows
                    if rules.allows_kernel(r.kernels)
                    and rules.allows_sent(row_sends(graph, node, r, self.mesh))
                )
            self.projections[key] = tuple(
                dict.fromkeys((*(t[k] for t in r.ins), *(t[k] for t in r.outs)) for r in rows)
            )
        row = self.variable(("row", node.id), self.projections[key])
        for i, operand in enumerate(node.inputs):
            self.read(operand, End(row.variable, i), node, i)
        for i, value in enumerate(node.outputs):
            self.makers[value] = End(row.variable, len(node.inputs) + i)

    def annotation(self, graph: Graph, node: Node) -> None:
        """A conversion point: while its pin holds, the operand may have any type; without the pin
        it is the identity."""
        site = self.site_of.get(node.id)
        (value,) = node.outputs
        pinned = (site.codes[self.position] if site else None) or 0
        end = self.variable(
            ("value", value), self.atoms(graph.avals[value], self.of(value), pinned)
        )
        self.makers[value] = end
        if site:
            self.fixed.setdefault(site.name, []).append(end)
        self.read(
            node.inputs[0],
            end,
            node,
            0,
            free=site is None,
            unless=(site.name,) if site else (),
        )

    # ---- regions --------------------------------------------------------------------------------

    def scan(self, node: Node) -> None:
        (body,) = node.regions
        consts, carry = node.params["num_consts"], node.params["num_carry"]
        edges = interface_of(node)
        for i, (operand, value) in enumerate(zip(node.inputs, body.inputs, strict=True)):
            if i < consts + carry:
                self.makers[value] = self.held(value)
                self.read(
                    operand,
                    self.makers[value],
                    node,
                    i,
                    entry=edges.entries[i],
                )
            else:
                end = self.variable(
                    ("value", value), _stacked(self.atoms(self.graph.avals[value], self.of(value)))
                )
                self.makers[value] = end
                self.read(operand, End(end.variable, 1), node, i, entry=edges.entries[i])
            if consts <= i < consts + carry:
                self.makers[node.outputs[i - consts]] = self.makers[value]
        self.loops += 1
        self.visit(body)
        for i, operand in enumerate(body.outputs):
            if i < carry:
                self.read(
                    operand, self.makers[body.inputs[consts + i]], node, i, left_by=edges.exits[i]
                )
            else:
                states = _stacked(self.atoms(body.aval(operand), self.of(operand)))
                end = self.variable(("returned", (node.id, 0, i)), states)
                self.makers[node.outputs[i]] = End(end.variable, 1)
                self.read(operand, end, node, i, left_by=edges.exits[i])
        self.loops -= 1

    def loop(self, node: Node) -> None:
        cond, body = node.regions
        c, b = node.params["cond_nconsts"], node.params["body_nconsts"]
        edges = interface_of(node)
        for i, (operand, value) in enumerate(
            zip(node.inputs[: c + b], (*cond.inputs[:c], *body.inputs[:b]), strict=True)
        ):
            self.makers[value] = self.held(value, EMPTY if i < c else None)
            self.read(operand, self.makers[value], node, i, entry=edges.entries[i])
        carried = zip(
            node.inputs[c + b :], body.inputs[b:], cond.inputs[c:], node.outputs, strict=True
        )
        for i, (operand, value, seen, result) in enumerate(carried):
            end = self.held(value)
            self.makers.update({value: end, seen: end, result: end})
            self.read(operand, end, node, c + b + i, entry=edges.entries[c + b + i])
        self.loops += 1
        self.visit(cond)
        self.visit(body)
        predicate = self.variable(("returned", (node.id, 0, 0)), (0,))
        self.read(cond.outputs[0], predicate, node, 0, left_by=edges.exits[0])
        for i, operand in enumerate(body.outputs):
            self.read(
                operand, self.makers[body.inputs[b + i]], node, i, left_by=edges.leaving(1)[i]
            )
        self.loops -= 1

    def cond(self, node: Node) -> None:
        index, *operands = node.inputs
        edges = interface_of(node)
        self.read(
            index, self.variable(("read", (node.id, 0)), (0,)), node, 0, entry=edges.entries[0]
        )
        for i, operand in enumerate(operands):
            value = node.regions[0].inputs[i]
            end = self.held(value, EMPTY.union(*(self.of(r.inputs[i]) for r in node.regions)))
            self.makers.update({r.inputs[i]: end for r in node.regions})
            self.read(operand, end, node, i + 1, entry=edges.entries[i + 1])
        ends = [self.held(value) for value in node.outputs]
        self.makers.update(zip(node.outputs, ends, strict=True))
        for number, region in enumerate(node.regions):
            self.visit(region)
            for i, (operand, end) in enumerate(zip(region.outputs, ends, strict=True)):
                self.read(operand, end, node, i, left_by=edges.leaving(number)[i])


def _stacked(codes: tuple[Code, ...]) -> tuple[tuple[Code, Code], ...]:
    """States of a scanned or stacked value: the code of one slice, and of the whole."""
    return tuple((c, c + 1 if c > 0 else c) for c in codes)
