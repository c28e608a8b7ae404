"""Programs with pins dropped, moved to another dim, or put in where the source would have a new
annotation; changes of the pins that are to blame for a fault, and the edits that make them."""

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from sbp.annotations import Pin, annotate_p
from sbp.errors import Edit, OptionEdit, SourceEdit
from sbp.explain.change import BlamedFault, Change
from sbp.explain.names import Names, behind_vmap, pinned_text, pinned_value
from sbp.explain.subjects import Subject, kind_of
from sbp.infer.constraints import (
    PinConstraint,
    PinSite,
    ReadConstraint,
    is_convertible,
    pin_sites,
)
from sbp.infer.pins import pinned_codes
from sbp.infer.request import Request
from sbp.infer.space import Code, decode, encode
from sbp.layout import padded
from sbp.plan.program import place
from sbp.source.editing import Part, repin as repinned_source
from sbp.source.reader import expression_at, keyword_of, position_at, source_text, users_span
from sbp.trace.graph import Dataflow, Graph, Node, Operand, group_by
from sbp.trace.places import CONSTRAINTS
from sbp.types import Atom, NdSbp, P

# ---- pins of a program --------------------------------------------------------------------------
# Programs with pins changed, dropped or inserted.


Placed = tuple[dict[int, dict[Operand, None]], set[int]]
"""Places of new annotations. The dict has, by node id, the values to annotate before the node. The
set has the values to annotate after the node that makes them. All later nodes read the
annotation."""

Wanted = Mapping[int, Code | None]
"""Codes asked on some mesh axes, by the position of the axis; None leaves the axis free."""


def wanted_codes(codes: tuple[Code | None, ...], wanted: Wanted) -> tuple[Code | None, ...]:
    """The codes on all mesh axes, with others on some of them."""
    return tuple(wanted.get(k, c) for k, c in enumerate(codes))


def site_in(request: Request, site: PinSite) -> PinSite | None:
    """The pin that a pin of the program has become in an edited request; None when it was
    dropped."""
    nodes = {n.id for n in site.nodes}
    return next(
        (
            s
            for s in pin_sites(request)
            if (s.source, s.position) == (site.source, site.position)
            and {n.id for n in s.nodes} == nodes
        ),
        None,
    )


def set_pins(request: Request, changes: Iterable[tuple[PinSite, Wanted]]) -> Request | None:
    """The request with pins that ask other codes on some mesh axes; None where a value that is
    pinned by the same line has too few dims for one of them."""
    for site, wanted in changes:
        # An input with an uneven split has two pins: what JAX can shard, and the node behind it
        # with the type that the user asks for.
        behind = (
            n
            for n in request.graph.nodes
            if n.op == annotate_p.name
            and n.params["pin"]
            and n.params["pin"].input == site.position
        )
        nodes = list(behind if site.is_input else site.nodes)
        values = [n.outputs[0] for n in nodes] or [pinned_value(request.graph, site)]
        highest = max((c for c in wanted.values() if c is not None), default=0)
        if any(len(request.graph.aval(v).shape) < highest for v in values):
            return None
        request = pin_nodes(request, nodes, wanted)
        if site.is_input or site.source == "output":
            request = pin_boundary(
                request, "input" if site.is_input else "output", site.position, wanted
            )
    return request


def drop_pins(request: Request, *sites: PinSite) -> Request:
    """The request without some pins."""
    found = set_pins(
        request, [(site, dict.fromkeys(range(len(request.mesh.names)))) for site in sites]
    )
    assert found is not None
    return found


def pin_nodes(request: Request, nodes: Iterable[Node], wanted: Wanted) -> Request:
    """The request with annotations that ask other codes; none where they ask nothing."""
    at = dict[int, Pin | None]()
    for node in nodes:
        pin: Pin = node.params["pin"]
        codes = wanted_codes(pinned_codes(pin, request.mesh), wanted)
        atoms = {
            axis: decode(c)
            for axis, c in zip(request.mesh.names, codes, strict=True)
            if c is not None
        }
        at[node.id] = replace(pin, type=NdSbp(atoms), complete=False) if atoms else None
    return replace(request, graph=rewrite(request.graph, at, {}, {})) if at else request


def pin_boundary(
    request: Request, kind: Literal["input", "output"], position: int, wanted: Wanted
) -> Request:
    """The request with another type asked of one input or output."""
    given = list(request.demand.inputs if kind == "input" else request.demand.outputs)
    codes = wanted_codes(given[position] or (None,) * len(request.mesh.names), wanted)
    given[position] = None if all(c is None for c in codes) else codes
    return replace(request, demand=replace(request.demand, **{f"{kind}s": tuple(given)}))


def insert_pins(
    request: Request, pins: Iterable[tuple[Placed, Code]], position: int
) -> Request | None:
    """The request with new annotations; None where a value has too few dims for them.

    Arguments:
      request: the request.
      pins: where they stand, and what they ask on the mesh axis.
      position: of the mesh axis.
    """
    for (placed_before, placed_after), code in pins:
        pin = Pin(NdSbp({request.mesh.names[position]: decode(code)}))
        values = (*itertools.chain(*placed_before.values()), *placed_after)
        if any(len(request.graph.aval(v).shape) < code for v in values):
            return None
        before = {node: tuple((v, pin) for v in found) for node, found in placed_before.items()}
        request = replace(
            request,
            graph=rewrite(request.graph, {}, before, dict.fromkeys(placed_after, pin)),
        )
    return request


def rewrite(
    graph: Graph,
    at: Mapping[int, Pin | None],
    before: Mapping[int, tuple[tuple[Operand, Pin], ...]],
    after: Mapping[int, Pin],
    *,
    own: frozenset[tuple[int, Operand]] = frozenset(),
) -> Graph:
    """The program with annotations changed, taken out or put in.

    Arguments:
      graph: the program.
      at: by the node id of an annotation, its new pin; None takes the annotation out.
      before: by node id, values and pins: new annotations of the values before the node. The node
          and everything after it read the annotated values.
      after: by value, a pin: a new annotation after the node that makes the value.
      own: reads that do not read an annotated value, as (node id, value).
    """
    graph = replace(graph, avals=dict(graph.avals))
    ids = itertools.count(max((n.id for n in graph.walk()), default=0) + 1)
    same: dict[int, Operand] = {}

    def of(operand: Operand) -> Operand:
        """The operand after the edits."""
        while isinstance(operand, int) and operand in same:
            operand = same[operand]
        return operand

    def note(operand: int, pin: Pin, like: Node) -> Node:
        """A new annotation of an operand, at the line of a node."""
        same[operand] = value = graph.new_value(graph.avals[operand])
        return replace(
            like,
            id=next(ids),
            op=annotate_p.name,
            primitive=annotate_p,
            params={"pin": pin, "cotangent": None},
            regions=(),
            inputs=(operand,),
            outputs=(value,),
        )

    def visit(g: Graph) -> Graph:
        """The program or the body of a region after the edits."""
        nodes: list[Node] = []
        for node in g.nodes:
            annotated = ((of(value), pin) for value, pin in before.get(node.id, ()))
            nodes += [note(o, pin, node) for o, pin in annotated if isinstance(o, int)]
            inputs = tuple(o if (node.id, o) in own else of(o) for o in node.inputs)
            if at.get(node.id, node) is None:
                same[node.outputs[0]] = inputs[0]
                continue
            params = node.params | {"pin": at[node.id]} if node.id in at else node.params
            nodes.append(
                replace(node, inputs=inputs, params=params, regions=tuple(map(visit, node.regions)))
            )
            nodes += [note(v, after[v], node) for v in node.outputs if v in after]
        return replace(g, nodes=tuple(nodes), outputs=tuple(map(of, g.outputs)), avals=graph.avals)

    return visit(graph)


# ---- pins of a subject --------------------------------------------------------------------------
# Programs with a value, an operand, an input or an output pinned to another type, as an annotation
# in the source would pin it.


def pin_subject(request: Request, subject: Subject, wanted: Wanted) -> Request:
    """The request with a subject pinned, or left free, on some mesh axes. The new pin replaces the
    user's pins of the subject on these axes; pins on other axes stay.

    Arguments:
      request: the request.
      subject: the subject. A value that is not pinned cannot be left free.
      wanted: the codes that the new pin asks for.
    """
    graph, names = request.graph, request.mesh.names
    if subject.kind in ("input", "output"):
        return pin_boundary(request, subject.kind, subject.position, wanted)
    if subject.kind == "annotation":
        annotations = (n for n in graph.walk() if n.op == annotate_p.name)
        mine = [n for n in annotations if n.outputs[0] in subject.values]
        return pin_nodes(request, mine, wanted)
    pin = Pin(NdSbp({names[k]: decode(c) for k, c in sorted(wanted.items()) if c is not None}))
    own = _own_reads(graph, subject)
    # A copy that only the operation's own gradient reads is not annotated in the source's program
    # either: JAX drops it as dead.
    read = {o for n in graph.walk() for o in n.inputs if (n.id, o) not in own} | {
        o for g in graph.graphs() for o in g.outputs
    }
    # Readers inside of the expression belong to the operation's own gradient. They read its result
    # without the annotation, as they do when the source annotates the result.
    after = {v: pin for v in subject.values if v in read}
    return replace(request, graph=rewrite(graph, {}, {}, after, own=own))


def _own_reads(graph: Graph, subject: Subject) -> frozenset[tuple[int, Operand]]:
    """Where an expression reads its own results: (node id, value).

    In a Python loop the next turn reads a result too, on the same line. So the nodes of the
    expression are sorted by turns. Of alike nodes the first belong to the first turn; in a backward
    pass the first belong to the last turn.
    """
    frame, makers = subject.frame, Dataflow(graph).makers
    alike = group_by(
        (n for n in graph.walk() if frame is not None and (frame == n.span or frame in n.stack)),
        lambda n: (kind_of(n, graph), n.is_recomputed),
    )
    turns = sum(not makers[v].is_recomputed for v in subject.values if v in makers)
    turn = {
        node.id: turns - 1 - number // each if node.backward else number // each
        for nodes in alike.values()
        for each in [-(-len(nodes) // max(1, turns))]
        for number, node in enumerate(nodes)
    }
    return frozenset(
        (node.id, o)
        for nodes in alike.values()
        for node in nodes
        for o in node.inputs
        if isinstance(o, int) and o in subject.values and turn.get(makers[o].id) == turn[node.id]
    )


# ---- edits --------------------------------------------------------------------------------------
# Edits that change a pin: in the source for an annotation, else in `in_types` or `out_types`.


def edits_of(request: Request, site: PinSite, wanted: Wanted) -> tuple[Edit, ...]:
    """The edits after which a pin asks other codes on some mesh axes.

    Returns:
      The edits; none where the source does not show the pin, where it is an argument of another
      call of JAX, or where the same call pins other types when it is traced with other arguments.
    """
    names, codes = request.mesh.names, wanted_codes(site.codes, wanted)
    free = tuple(axis for axis, c in zip(names, codes, strict=True) if c is None)
    # The dims that `jax.vmap` puts before the dims that the user sees.
    splits, asked = ([c for c in every if c is not None and c > 0] for every in (codes, site.codes))
    hidden = behind_vmap(site, asked[0]) if splits and asked else 0
    if hidden is None or any(c <= hidden for c in splits):
        return ()  # a split of a dim that the user does not see
    atoms: dict[str, Atom] = {
        axis: decode(c - hidden if c > 0 else c)
        for axis, c in zip(names, codes, strict=True)
        if c is not None
    }
    if site.source == "annotation" and not site.is_input:
        pin: Pin = site.nodes[0].params["pin"]
        is_constraint = pin.asked_by in CONSTRAINTS
        return (
            ()
            if _serves_others(request, site) or (pin.asked_by and not is_constraint)
            else repinned_source(
                site.span,
                atoms,
                _part(request, site),
                free=free,
                reduce_dtype=pin.reduce_dtype,
                is_constraint=is_constraint,
            )
        )
    option = "in_types" if site.is_input else "out_types"
    value: Any = repr(NdSbp(atoms, free)) if atoms else None
    is_padded = request.demand.is_padded("input" if site.is_input else "output", site.position)
    edit = OptionEdit(
        option=option, value=padded(value) if is_padded else value, position=site.position
    )
    return (edit,) if site.source == "output" else _input_edits(request, site, edit)


def edits_of_all(request: Request, changes: Sequence[tuple[PinSite, Wanted]]) -> tuple[Edit, ...]:
    """The edits after which several pins ask other codes; none where one of them has none. An input
    whose type comes from its argument is edited together with the types of the other inputs, of
    which those that change have edits of their own."""
    each = [(site, edits_of(request, site, wanted)) for site, wanted in changes]
    inputs = {site.position for site, _ in changes if site.is_input}
    kept = dict.fromkeys(
        edit
        for site, edits in each
        for edit in edits
        if not isinstance(edit, OptionEdit)
        or edit.option != "in_types"
        or edit.position not in inputs - {site.position}
    )
    return tuple(kept) if all(edits for _, edits in each) else ()


def _input_edits(request: Request, site: PinSite, edit: OptionEdit) -> tuple[OptionEdit, ...]:
    """The edits of `in_types` that change the type of one input; none where `in_types` cannot
    change it: of a keyword argument, and of an `sbp.Partial`.

    Arguments:
      request: the program, and what its types are chosen by.
      site: the pin of the input.
      edit: its new type.
    """
    source, partial = request.demand.source(site.position), [c for c in site.codes if c and c < 0]
    if source == "keyword argument" or (source == "argument" and partial):
        return ()
    edits = [
        OptionEdit(option="in_types", value=repr(t), position=i)
        for i, t in carried_inputs(request, site).items()
    ]
    return tuple(sorted((*edits, edit), key=lambda e: e.position or 0))


def carried_inputs(request: Request, site: PinSite) -> dict[int, NdSbp]:
    """The other inputs with a type from the sharding of their argument, which `in_types` has to
    name as soon as it is given.

    Arguments:
      request: the program, and what its types are chosen by.
      site: the pin of the input that is edited.

    Returns:
      The type by position; empty when the edited input has its type from `in_types`.
    """
    demand, names = request.demand, request.mesh.names
    return (
        {}
        if not site.is_input or demand.source(site.position) != "argument"
        else {
            i: NdSbp({a: decode(c) for a, c in zip(names, codes, strict=True) if c is not None})
            for i, codes in enumerate(demand.inputs)
            if i != site.position and codes is not None and demand.source(i) == "argument"
        }
    )


def carried_text(request: Request, *sites: PinSite) -> str:
    """The part of a help about one input that is about the other inputs; empty when they stay.

    Arguments:
      request: the program, and what its types are chosen by.
      sites: the pins that are edited.
    """
    edited = {site.position for site in sites if site.is_input}
    others = any(carried_inputs(request, site).keys() - edited for site in sites)
    return ", and write the types of the other inputs there, too" if others else ""


def _serves_others(request: Request, site: PinSite) -> bool:
    """Whether the call that makes a pin makes another one, too: in a helper or a loop, where its
    arguments differ from call to call."""
    return any(
        s.span == site.span
        and s.codes != site.codes
        and all(n.backward for n in s.nodes) == all(n.backward for n in site.nodes)
        for s in pin_sites(request)
        if s.source == "annotation"
    )


def _part(request: Request, site: PinSite) -> Part:
    """The part of its annotation that a pin is: `annotate` may pin a result and its cotangent."""
    part = "cotangent" if all(n.backward for n in site.nodes) else "result"
    is_alone = sum(s.span == site.span for s in pin_sites(request)) == 1 and part == "result"
    has_both = keyword_of(expression_at(site.span)[0], "cotangent") is not None
    return part if has_both and not is_alone else "whole"


# ---- changes ------------------------------------------------------------------------------------
# Changes of pins: another atom, or no pin.


Move = tuple[PinConstraint, PinSite, Code]
"""A pin to blame, the pin in the program without its other faults, and another code for it."""


@dataclass(frozen=True, slots=True)
class PinChanges:
    """Changes of the pins that are to blame for a fault.

    Arguments:
      fault: the fault, with the program whose source and options are edited.
      base: the program without the pins of its other faults.
      node: the node at which it shows.
    """

    fault: BlamedFault
    base: Request
    node: Node

    def sites_of(self, pins: Iterable[PinConstraint]) -> list[tuple[PinConstraint, PinSite]]:
        """Pins as they are in `base`, without those that it drops."""
        return [(pin, site) for pin in pins if (site := site_in(self.base, pin.site)) is not None]

    def moved(self) -> Iterator[Change]:
        """Pins that ask another atom on the mesh axis, first the atoms that the nearest rows of the
        operator take."""
        graph, names = self.fault.request.graph, self.fault.names
        nearest = {
            source
            for wrong in self.nearest()
            for i, code in wrong.items()
            for source in names.preimages(self.node.inputs[i], code)
        }

        def is_far(move: Move) -> bool:
            pinned = pinned_value(graph, move[1]), *(n.outputs[0] for n in move[1].nodes)
            return nearest.isdisjoint((value, move[2]) for value in pinned)

        moves = (m for each in self.sites_of(self.fault.found.pins) for m in self.moves(*each))
        for move in sorted(moves, key=is_far):
            one, others = self.repinned([move]), self.alike(move[1])
            every = self.repinned([move], others, one) if others else None
            yield from (change for change in (one, every) if change is not None)

    def nearest(self) -> list[dict[int, Code]]:
        """The operands that do not fit the nearest rows of the operator, with the codes that the
        rows take of them: no more operands than it takes."""
        rows = () if self.node.regions else self.base.axis_rows(self.node, self.fault.position)
        wanted = [wrong for wrong in map(self.misfits, rows) if wrong]
        return [w for w in wanted if len(w) == min(map(len, wanted))]

    def misfits(self, row: Any) -> dict[int, Code]:
        """The operands that do not fit a row, with the codes that the row takes of them; empty
        where annotations cannot make it fit: with a partial value, or with two codes of one
        value."""
        policy = self.base.rules(self.node).policies[self.fault.position]
        codes = {i: encode(row.ins[i]) for i in self.fault.made}
        wrong = {
            i: codes[i]
            for i, made in self.fault.made.items()
            if not any(is_convertible(code, codes[i], policy) for code in made)
        }
        twice = any(
            self.node.inputs[i] == self.node.inputs[k] and wrong[i] != wrong[k]
            for i, k in itertools.combinations(wrong, 2)
        )
        return {} if twice or min(wrong.values(), default=0) < 0 else wrong

    def moves(self, pin: PinConstraint, site: PinSite) -> Iterator[Move]:
        """The other codes that a pin may ask: splits of dims that divide, B, and P where the value
        can be partial. Dims of `jax.vmap`, which the user does not see, are left out."""
        behind, value = behind_vmap(site, pin.code), pinned_value(self.base.graph, site)
        if behind is None or not isinstance(value, int):
            return
        n, shape = self.base.mesh.sizes[self.fault.position], self.base.graph.aval(value).shape
        splits = [1 + d for d, size in enumerate(shape) if d >= behind and size % n == 0 and size]
        partial = [encode(P)] if site.source == "annotation" and not site.is_input else []
        yield from ((pin, site, c) for c in (*splits, 0, *partial) if c != pin.code)

    def repinned(
        self, moves: Sequence[Move], others: Sequence[PinSite] = (), instead: Change | None = None
    ) -> Change | None:
        """Pins that ask other codes; None where no state of the program has one of them, or where
        it cannot be written.

        Arguments:
          moves: the pins and the codes.
          others: pins that ask what the first one asks, too.
          instead: the change of the first pin alone.
        """
        fault, system, k = self.fault, self.fault.system, self.fault.position
        changed = *(move[1:] for move in moves), *((site, moves[0][2]) for site in others)
        each = [(site, {k: code}) for site, code in changed]
        states = tuple(
            system.literals_of(pin.fixed[0], code) if pin.fixed else () for pin, _, code in moves
        )
        edits = edits_of_all(fault.request, each) if all(states) else ()
        if not edits:
            return None
        freed = {*(pin.name for pin, _, _ in moves), *(s.name for s in others)}
        # The moved annotation still converts what it annotates.
        reads = {
            c.name
            for c in system.constraints
            if isinstance(c, ReadConstraint) and not freed.isdisjoint(c.unless)
        }
        splits = all(pin.code > 0 and code > 0 for pin, _, code in moves)
        return Change(
            text=" and ".join(self.words(*move) for move in moves)
            + carried_text(fault.request, *(site for _, site, _ in moves))
            + (f", and {len(others)} more like it" if others else ""),
            edits=edits,
            make=functools.partial(set_pins, self.base, each),
            without=frozenset((fault.axis, name) for name in freed | reads),
            assumed=states,
            kind="pin" if splits else "pair" if len(moves) > 1 else "other pin",
            instead=instead,
            pinned=tuple(
                v
                for _, site, _ in moves
                if isinstance(v := pinned_value(self.base.graph, site), int)
            ),
        )

    def words(self, pin: PinConstraint, site: PinSite, code: Code) -> str:
        """A change of a pin in words."""
        subject, axis, where = self.fault.names.site(site), self.fault.axis, self.where(site)
        if code > 0:
            dim = code - 1 - (behind_vmap(site, pin.code) or 0)
            return f"split {subject} on dim {dim} {where}"
        partial = f"pin {subject} as {decode(code)!r} on `{axis}` {where}"
        return partial if code < 0 else f"replicate {subject} on `{axis}` {where}"

    def drops(self) -> Iterator[Change]:
        """Pins dropped, or left free on the fault's mesh axis; without edits where the source does
        not show the pin. The edits are made in the source and the options as they are, not as they
        are in `base`."""
        for pin, site in self.sites_of(self.fault.found.pins):
            several, smaller = sum(c is not None for c in site.codes) > 1, None
            drop = functools.partial(
                without_pins, self.fault.request, site, base=self.base, where=self.where(site)
            )
            if several or not site.span:
                smaller = replace(
                    drop(position=self.fault.position),
                    without=frozenset({(self.fault.axis, pin.name)}),
                )
                yield smaller
            if several or site.span:
                yield replace(
                    drop(),
                    without=frozenset((axis, pin.name) for axis in self.base.mesh.names),
                    instead=smaller,
                )

    def alike(self, site: PinSite) -> list[PinSite]:
        """The other pins of `in_types` or `out_types` that ask the same of the same leaf of another
        layer: only positions in lists differ in their paths."""
        side = "input" if site.is_input else "output"
        alike = self.base.demand.alike(side, site.position) if site.position >= 0 else ()
        return [
            s
            for s in pin_sites(self.base)
            if s.is_input == site.is_input
            and s.position in alike
            and s.position != site.position
            and s.codes == site.codes
        ]

    def where(self, site: PinSite) -> str:
        """The place of a pin: with its file when that is another one, and with its column when the
        line has several of the fault's pins."""
        if site.span is None:
            return place_of(site)
        line, at = users_span(self.node), (site.span.file, site.span.line)
        lines = [(s.file, s.line) for c in self.fault.found.pins if (s := c.site.span)]
        column = f", column {site.span.column}" if lines.count(at) > 1 else ""
        is_near = line is None or line.file == site.span.file
        return (place_of(site) if is_near else f"at {place(site.span)}") + column

    def pairs(self) -> Iterator[Change]:
        """The changes of two pins, for faults that no change of one pin mends: those to two splits
        first, since they keep the least memory. The pins are those of the fault on its mesh axis,
        and those of the findings that end in the same place. They can make up two sides, such as
        the terms of two sums that are multiplied."""
        pins = {
            c.name: c for f in self.fault.findings if f.mesh_axis == self.fault.axis for c in f.pins
        }
        moves = [
            pair
            for a, b in itertools.combinations(self.sites_of(pins.values()), 2)
            for pair in itertools.product(self.moves(*a), self.moves(*b))
        ]
        for pair in sorted(moves, key=lambda pair: sum(code <= 0 for _, _, code in pair)):
            change = self.repinned(pair)
            if change is not None and not _overlap(change.edits):
                yield change


def _overlap(edits: tuple[Edit, ...]) -> bool:
    """Whether two edits change the same piece of the source, as those of nested annotations do."""
    spans = [(e.span.file, position_at(e.span)) for e in edits if isinstance(e, SourceEdit)]
    return any(
        file == other and a[:2] < b[2:] and b[:2] < a[2:]
        for (file, a), (other, b) in itertools.combinations(spans, 2)
    )


def place_of(site: PinSite) -> str:
    """The place of a pin in its program."""
    option = "in in_types" if site.is_input else "in out_types"
    return f"at line {site.span.line}" if site.span else option


def without_pins(
    request: Request,
    *sites: PinSite,
    base: Request | None = None,
    position: int | None = None,
    where: str = "",
) -> Change:
    """Pins dropped; the change has no edits where the source does not show one of them.

    Arguments:
      request: the program whose source and options are edited.
      sites: the pins.
      base: the program that is planned; None for the same.
      position: of the mesh axis on which they are dropped; None for all.
      where: their place; empty for line numbers.
    """
    names, axes = Names(request.graph), request.mesh.names

    def text(site: PinSite) -> str:
        at, kept = where or place_of(site), carried_text(request, site)
        left = f"leave {names.site(site)} free"
        if position is None:
            return f"drop `{source_text(site.span)}` {at}" if site.span else f"{left} {at}{kept}"
        note = "" if site.span else f' ("{axes[position]}:?"){kept}'
        return f"{left} on `{axes[position]}` {at}{note}"

    free = dict.fromkeys(range(len(axes)) if position is None else [position])
    changes = [(site, free) for site in sites]
    return Change(
        text=" and ".join(map(text, sites)),
        edits=edits_of_all(request, changes),
        make=functools.partial(set_pins, base or request, changes),
    )


def repinned(request: Request, site: PinSite, codes: tuple[Code | None, ...]) -> Change:
    """A pin that asks other codes; the change has no edits where none makes it.

    Arguments:
      request: the program.
      site: the pin.
      codes: for each mesh axis what it asks; None leaves the axis free.
    """
    wanted = {k: c for k, c in enumerate(codes) if c != site.codes[k]}
    return Change(
        text=(
            f"pin {Names(request.graph).site(site)} to"
            f" {pinned_text(site, request.mesh.names, codes)} {place_of(site)}"
        ),
        edits=edits_of(request, site, wanted),
        make=functools.partial(set_pins, request, [(site, wanted)]),
    )
