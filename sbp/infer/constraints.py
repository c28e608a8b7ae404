"""A program as constraints, one system per mesh axis, each constraint with its `because`.

A variable is one decision on one axis: the row of a node, or the atom of a value that no row makes.
A conversion links the end where a value is made to an end where it is read, and allows the
conversions that the boxing policy allows there. A pin fixes a state. The systems are projections of
the chooser's problem: each typing that the chooser finds satisfies all of them. They leave out how
axes depend on each other (a nested split that is too small, two monoids in one type), so a program
may satisfy every system and still have no typing.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from sbp import _jax
from sbp.annotations import Pin, annotate_p
from sbp.errors import Span
from sbp.infer.cost import allowed_rows
from sbp.infer.flow import Decision, Edge, End
from sbp.infer.pins import pinned_codes
from sbp.infer.request import Request
from sbp.infer.space import Code, TypeSpace, all_needs_of, decode, stack
from sbp.limits import POLICY_KINDS, Ban, Policy, Rules
from sbp.machine.mesh import MeshSpec
from sbp.trace.graph import Constant, Node, group_by
from sbp.types import MONOIDS

# ---- reasons -------------------------------------------------------------------------------------
# The reasons of constraints, each with a text and the user's line.


@dataclass(frozen=True, slots=True)
class DemandBecause:
    """A pin, the boxing policy or a budget: what the user demands.

    Arguments:
      text: the reason in words.
      span: the annotation's line; None for others.
    """

    text: str
    span: Span | None = None


Because = DemandBecause | Edge
"""The reason of a constraint, a demand or a read, with the user's line (`span`) and a text."""


# ---- names --------------------------------------------------------------------------------------
# The names of Z3 literals: one for each constraint, and one for each state of a variable. A
# constraint stores its name; nothing parses a name.


POLICY_LITERAL = "policy"
"""The literal of the boxing policy."""


def budget_literal(number: int) -> str:
    """The literal of a budget of the program, by its number."""
    return f"b{number}"


def state_literal(variable: int, state: int) -> str:
    """The literal of a variable that is in one of its states."""
    return f"s{variable}_{state}"


# ---- conversions --------------------------------------------------------------------------------
# Which conversions a policy and budgets allow on one mesh axis, in any number of steps.


def is_convertible(source: Code, target: Code, policy: Policy) -> bool:
    """Whether a policy converts one atom to another on one mesh axis, in any number of steps.

    >>> [is_convertible(1, 0, p) for p in ("auto", "reduce", "explicit")]
    [True, False, False]
    >>> is_convertible(0, 1, "explicit")
    True
    """
    kind = "all_gather" if source > 0 else "all_reduce"
    return source == target or source == 0 or kind in POLICY_KINDS[policy]


class Conversions:
    """Which conversions rules allow on one mesh axis, in any number of steps.

    The bytes of a conversion depend on how the other mesh axes split the value. Here all of them
    split it, which gives the fewest bytes. So with several mesh axes, a conversion that a budget
    forbids may be allowed here; a conversion that is forbidden here is always forbidden.

    Arguments:
      mesh: the mesh.
      position: of the mesh axis.
    """

    def __init__(self, mesh: MeshSpec, position: int) -> None:
        self.mesh, self.position = mesh, position
        self._others = mesh.num_devices // mesh.sizes[position]
        self._alone = MeshSpec(axes=(mesh.axes[position],), hardware=mesh.hardware)
        self._space = functools.cache(self._make)

    def allows(self, source: Code, target: Code, aval: Any, rules: Rules) -> bool:
        """Whether a value that is made as one code can be read as another one.

        Arguments:
          source: the code it is made in.
          target: the code it is read in.
          aval: its global shape and its dtype.
          rules: the conversions that are allowed.
        """
        if not rules.bans or source == target:
            return is_convertible(source, target, rules.policies[self.position])
        space, seconds = self._space(aval.shape, aval.dtype, frozenset((source, target)), rules)
        return bool(np.isfinite(seconds[space.index[(source,)], space.index[(target,)]]))

    def _make(
        self, shape: tuple[int, ...], dtype: Any, codes: frozenset[Code], rules: Rules
    ) -> tuple[TypeSpace, np.ndarray]:
        forced, monoids = all_needs_of([(c,) for c in codes])
        space = TypeSpace(tuple(shape), _jax.itemsize(dtype), self._alone, monoids, forced)
        bans = tuple(
            Ban(b.kind, frozenset((0,)), b.above * self._others)
            for b in rules.bans
            if self.position in b.mesh_axes
        )
        return space, space.seconds(Rules((rules.policies[self.position],), bans))


# ---- constraints --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PinSite:
    """A pin as the user wrote it: one annotation, or one input or output with a type.

    Arguments:
      name: the name of its constraint, the same on every mesh axis.
      source, span: what it pins; the annotation's line, None for inputs and outputs.
      codes: the pinned code on each mesh axis; None where the axis is not pinned.
      nodes: the nodes of an annotation: one line may be traced many times (unrolled layers,
          rematerialisation). For an input with an uneven split, the node that pins it.
      position: of the input or output; -1 for an annotation.
    """

    name: str
    source: Literal["annotation", "input", "output"]
    span: Span | None
    codes: tuple[int | None, ...]
    nodes: tuple[Node, ...] = ()
    position: int = -1

    def text(self, code: Code) -> str:
        """What it asks on a mesh axis, in words."""
        where = f"{self.source} {self.position}" if self.position >= 0 else self.source
        return f"{where} is pinned {decode(code)!r}"

    @property
    def is_input(self) -> bool:
        """Whether the type of an input asks for it: that of the input itself, or of the node that
        pins an uneven split behind it."""
        return self.source == "input" or (self.source == "annotation" and self.position >= 0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Constraint:
    """One fact that every typing meets, with its reason. The boxing policy, which limits every
    conversion, is one; its other kinds are the classes below.

    Arguments:
      name: unique in its system.
      because: the reason, with the user's line.
    """

    name: str
    because: Because


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PinConstraint(Constraint):
    """A pin on one mesh axis.

    Arguments:
      site: the pin.
      code: what it asks on the axis.
      fixed: the ends that have this code.
    """

    site: PinSite
    code: Code
    fixed: tuple[End, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BudgetConstraint(Constraint):
    """A budget of the program, by its number. It limits every conversion."""

    budget: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReadConstraint(Constraint):
    """A read of a value: it is made at `source` and read at the end of `because`, converted as the
    rules allow.

    Arguments:
      because: the read.
      value: the value.
      source: the end at which it is made.
      rules: the conversions that are allowed.
      unless: names of pins. While one of them is asserted, the reader is an annotation, where the
        policy forbids nothing and budgets still forbid.
    """

    because: Edge
    value: int
    source: End
    rules: Rules
    unless: tuple[str, ...] = ()

    @property
    def node(self) -> Node | None:
        """The node whose operand is read; None for an output of the program."""
        return self.because.node


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class System:
    """The constraints of a program on one mesh axis.

    Arguments:
      mesh_axis: the axis.
      position: its position in the mesh.
      request: the program with its mesh, demand, policies and limits.
      conversions: the conversions that rules allow on this axis.
      states: for each decision, its variable, the states that it may have on this axis: the codes
        of its columns.
      constraints: pins, policy and budgets first, then the program's order.
    """

    mesh_axis: str
    position: int
    request: Request = field(repr=False)
    conversions: Conversions = field(repr=False)
    states: tuple[tuple[tuple[Code, ...], ...], ...] = field(repr=False)
    constraints: tuple[Constraint, ...] = field(repr=False)

    def literals_of(self, end: End, code: Code) -> tuple[str, ...]:
        """The literals of the states in which an end has a code."""
        return tuple(
            state_literal(end.variable, number)
            for number, state in enumerate(self.states[end.variable])
            if state[end.column] == code
        )


def pin_sites(request: Request) -> tuple[PinSite, ...]:
    """All pins of a program in program order: inputs, annotations, outputs. Nodes that were traced
    from one annotation are one pin."""
    graph, mesh, demand = request.graph, request.mesh, request.demand

    def at_boundary(source: Literal["input", "output"], types: Sequence[Any]) -> list[PinSite]:
        return [
            PinSite(
                name=f"{source[0]}{position}",
                source=source,
                span=None,
                codes=tuple(codes),
                position=position,
            )
            for position, codes in enumerate(types)
            if codes is not None and any(c is not None for c in codes)
        ]

    annotated = (n for n in graph.walk() if n.op == annotate_p.name and n.params["pin"] is not None)
    groups = group_by(
        annotated, lambda node: (node.span or node.id, pinned_codes(node.params["pin"], mesh))
    )
    pinned = [(c, nodes) for (_, c), nodes in groups.items() if any(x is not None for x in c)]
    annotations = (
        PinSite(
            name=f"a{number}",
            source="annotation",
            span=nodes[0].span if nodes[0].params["pin"].input < 0 else None,
            codes=codes,
            nodes=tuple(nodes),
            position=nodes[0].params["pin"].input,
        )
        for number, (codes, nodes) in enumerate(pinned)
    )
    return (
        *at_boundary("input", demand.inputs),
        *annotations,
        *at_boundary("output", demand.outputs),
    )


def constraints_of(request: Request) -> tuple[System, ...]:
    """The systems of a program, one per mesh axis of more than one device, outer axis first."""
    sites = pin_sites(request)
    return tuple(_SystemBuilder(request, sites, k).system() for k in request.axes)


class _SystemBuilder:
    """Writes down the system of a program on one mesh axis: a variable for each decision, a
    conversion for each edge."""

    def __init__(self, request: Request, sites: tuple[PinSite, ...], position: int) -> None:
        self.request, self.graph, self.mesh = request, request.graph, request.mesh
        self.flow, self.native = request.flow, request.native
        self.position, self.n = position, self.mesh.sizes[position]
        self.sites = [s for s in sites if s.codes[position] is not None]
        self.site_at = {(s.source, s.position): s for s in self.sites if not s.nodes} | {
            ("annotation", node.id): s for s in self.sites for node in s.nodes
        }
        self.projections: dict[Any, tuple[tuple[Code, ...], ...]] = {}

    def system(self) -> System:
        return System(
            mesh_axis=self.mesh.names[self.position],
            position=self.position,
            request=self.request,
            conversions=Conversions(self.mesh, self.position),
            states=tuple(map(self.states, self.flow.decisions)),
            constraints=(*self.pins(), *self.conversions()),
        )

    def pins(self) -> list[Constraint]:
        """The pins, then the policy, then the budgets."""
        sites = [self.site(decision) for decision in self.flow.decisions]
        fixed = group_by(range(len(sites)), lambda number: sites[number])
        found = [
            PinConstraint(
                name=site.name,
                because=DemandBecause(site.text(code), site.span),
                site=site,
                code=code,
                fixed=tuple(map(End, fixed.get(site, ()))),
            )
            for site in self.sites
            if (code := site.codes[self.position]) is not None
        ]
        policy = DemandBecause(f'boxing is "{self.request.boxing}"')
        budgets = (
            BudgetConstraint(name=budget_literal(n), because=DemandBecause(str(b)), budget=n)
            for n, b in enumerate(self.request.budgets)
        )
        return [*found, Constraint(name=POLICY_LITERAL, because=policy), *budgets]

    def conversions(self) -> list[ReadConstraint]:
        """The reads, each with a conversion of its own: other readers cannot use the conversion
        that an annotation makes."""
        found: list[ReadConstraint] = []
        for edge in self.flow.edges:
            if isinstance(edge.operand, Constant):
                continue
            # While the pin of an annotation is asserted, its operand may have any type. Without the
            # pin, the annotation is the identity.
            site = self.site_at.get(("annotation", edge.node.id)) if edge.node else None
            found.append(
                ReadConstraint(
                    name=f"e{len(found)}",
                    because=edge,
                    value=edge.operand,
                    source=self.flow.makers[edge.operand],
                    rules=self.request.rules(
                        edge.node,
                        value=edge.operand,
                        in_loop=edge.in_loop,
                        free=edge.free and site is None,
                    ),
                    unless=(site.name,) if site else (),
                )
            )
        return found

    # ---- states ---------------------------------------------------------------------------------

    def site(self, decision: Decision) -> PinSite | None:
        """The pin that fixes a decision."""
        number = decision.node.id if decision.node is not None else decision.position
        return self.site_at.get((decision.kind, number))

    def states(self, decision: Decision) -> tuple[tuple[Code, ...], ...]:
        """The states of a decision on this axis."""
        match decision:
            case Decision(kind="row", node=Node() as node):
                return self.projection(node, decision.in_loop)
            case Decision(kind="predicate"):
                return ((0,),)
            case _:
                site = self.site(decision)
        pinned = (site.codes[self.position] if site else None) or 0
        codes = self.atoms(decision.aval, decision.monoids(self.native), pinned)
        if decision.kind == "annotation" and decision.node is not None and site is None:
            pin: Pin | None = decision.node.params["pin"]
            codes = tuple(c for c in codes if pin is None or c - 1 not in pin.whole)
        if decision.at_boundary and not self.request.demand.is_padded(
            decision.kind, decision.position
        ):
            codes = tuple(c for c in codes if c <= 0 or decision.aval.shape[c - 1] % self.n == 0)
        return tuple((c, *stack((c,))) if decision.sliced else (c,) for c in codes)

    def atoms(self, aval: Any, monoids: frozenset[str], pinned: Code) -> tuple[Code, ...]:
        """The codes that a value may have on this axis: splits of dims that have as many elements
        as the axis has devices, partials, and the pinned code.

        Arguments:
          aval: shape and dtype of the value.
          monoids: the monoids under which it may be partial.
          pinned: the pinned code; 0 for none.
        """
        codes = (
            0,
            *(1 + d for d, size in enumerate(aval.shape) if size >= self.n or pinned == 1 + d),
            *(-1 - MONOIDS.index(m) for m in sorted(monoids)),
            min(pinned, 0),
        )
        return tuple(dict.fromkeys(codes))

    def projection(self, node: Node, in_loop: bool) -> tuple[tuple[Code, ...], ...]:
        """The rows of a node on this axis, each as the codes of its operands and results."""
        rows = self.request.rows_along(node, self.position)
        rules = self.request.rules(node, in_loop=in_loop)
        key = id(rows), rules  # the table keeps its rows alive
        if key not in self.projections:
            allowed = allowed_rows(self.graph, node, rows, rules, self.mesh)
            self.projections[key] = tuple(
                dict.fromkeys(tuple(t[self.position] for t in (*r.ins, *r.outs)) for r in allowed)
            )
        return self.projections[key]
