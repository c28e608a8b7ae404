"""Helps: edits after which a program without a typing has one.

Each edit is planned before it is offered; the plan gives its price.
"""

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from sbp.annotations import annotate_p
from sbp.errors import SHOWN, Edit, Help, OptionEdit, SourceEdit, Span
from sbp.explain.change import (
    Accepted,
    BlamedFault,
    Change,
    Diagnosis,
    HelpKind,
    Tried,
    boxing_option,
    boxing_text,
    tried,
)
from sbp.explain.names import result_code
from sbp.explain.pin_changes import PinChanges, Placed, insert_pins, set_pins, site_in
from sbp.explain.relaxations import DEARER
from sbp.infer.constraints import ReadConstraint
from sbp.infer.flow import allowing
from sbp.infer.request import Request
from sbp.infer.space import Code, decode
from sbp.limits import POLICIES, Policy
from sbp.plan.fit import best_program
from sbp.plan.program import Program
from sbp.signatures import traits_of
from sbp.source.editing import convert_value, reads, statement_span
from sbp.source.reader import (
    SourceRead,
    first_argument,
    source_text,
    start_of,
    users_span,
)
from sbp.trace.graph import Dataflow, Graph, Node, Operand

# ---- places of new annotations ------------------------------------------------------------------
# Where an annotation that a help adds to the source stands in the traced program.


class Placement:
    """Finds the places of an annotation, one for each time that its line is traced: in unrolled
    layers, in rematerialisation.

    A statement before the line annotates all that the line reads, also in the functions that it
    calls. Any other edit annotates the expression that it replaces.

    Arguments:
      graph: the program.
      dataflow: its values, for the nodes that make them.
      line: the expression that reads the value.
      edit: the first edit of the annotation.

    Attributes:
      inserts: whether the edit is a statement before the line.
    """

    def __init__(self, graph: Graph, dataflow: Dataflow, line: Span, edit: SourceEdit) -> None:
        self.graph, self.dataflow, self.line, self.edit = graph, dataflow, line, edit
        self.inserts = edit.span == start_of(edit.span)

    def of(self, values: Iterable[Operand]) -> Placed:
        """The places of an annotation of some values that the line reads."""
        placed: Placed = defaultdict(dict), set()
        nodes = [n for n in self.graph.walk() if not n.in_gradient and self.frames(n)]
        for value in values:
            reading = [n for n in nodes if value in n.inputs]
            # Other expressions of a comprehension may read the value, too.
            first = next((n for n in reading if self.line in n.stack), reading[0])
            number, frames = first.inputs.index(value), self.frames(first)
            inner = len(first.stack) - len(frames) + 1
            readers = {first.id} | {
                n.id
                for n in nodes
                if (n.op, len(n.inputs), n.stack[:inner])
                == (first.op, len(first.inputs), first.stack[:inner])
                and frames[0] not in self.stack(n.inputs[number])
            }
            for graph in self.graph.graphs():
                for k, node in enumerate(graph.nodes):
                    if node.id in readers:
                        self.place(placed, graph.nodes, k, node.inputs[number])
        return placed

    def place(
        self, placed: Placed, siblings: tuple[Node, ...], reader: int, operand: Operand
    ) -> None:
        """Adds the place for one read of a value.

        Arguments:
          placed: where the annotations stand.
          siblings: the nodes of one region, in order.
          reader: the position of the node that reads the value.
          operand: the value.
        """
        maker, (before, after) = self.dataflow.maker(operand), placed
        if self.inserts:
            before[self.start(siblings, reader, maker).id][operand] = None
        elif maker is not None and self.frames(maker) and isinstance(operand, int):
            after.add(operand)
        else:
            before[siblings[reader].id][operand] = None

    def stack(self, operand: Operand) -> tuple[Span, ...]:
        """The frames of the node that makes an operand."""
        maker = self.dataflow.maker(operand)
        return maker.stack if maker is not None else ()

    def frames(self, node: Node) -> tuple[Span, ...]:
        """The frames of a node from the one that reads the annotated value outwards; empty if none
        reads it."""
        start = self.edit.span if self.inserts else self.line
        reading = (
            k
            for k, s in enumerate(node.stack)
            if (s.file, s.function) == (self.line.file, self.line.function)
            and (s.line, s.column) >= (start.line, start.column)
        )
        return node.stack[next(reading, len(node.stack)) :]

    def start(self, siblings: tuple[Node, ...], reader: int, maker: Node | None) -> Node:
        """The first node of the statement that a node belongs to, after what makes the value.

        Arguments:
          siblings: the nodes of one region, in order.
          reader: the position of the node that reads the value.
          maker: what makes the value.
        """
        statement, frames = statement_span(self.line), self.frames(siblings[reader])

        def is_inside(node: Node) -> bool:
            own = self.frames(node)
            return (
                statement is not None
                # By its id: edits of the program, such as dropping another pin, copy nodes.
                and (maker is None or node.id != maker.id)
                and own != ()
                and own[1:] == frames[1:]
                and (own[0].line, own[0].column) < (statement.end_line, statement.end_column)
            )

        earlier = itertools.takewhile(is_inside, reversed(siblings[:reader]))
        return [siblings[reader], *earlier][-1]


# ---- insertions ---------------------------------------------------------------------------------
# Annotations of what the line of a fault reads.


Annotation = tuple[
    str, tuple[Edit, ...], frozenset[tuple[str, str]], tuple[str, ...], tuple[Placed, Code]
]
"""A new annotation of a value: its calls, its edits, (mesh axis, name) of the constraints that it
takes away, literals of the states that it assumes, and its places with the code that it asks."""


class Insertions(PinChanges):
    """Beside changes of pins, annotations before the line of a fault."""

    def every(self) -> Iterator[Change]:
        """The edits to try: other atoms for a pin, an annotation before the line, a pin dropped.
        Budgets hold for annotations, too."""
        yield from self.moved()
        found, node = self.fault.found, self.node
        if not found.budgets and users_span(node) and not node.in_gradient:
            yield from self.at_region() if found.sink[0].because.at_region else self.inserted()
        yield from self.drops()

    def inserted(self) -> Iterator[Change]:
        """Annotations before the line: first on operands that do not fit a row which the other
        operands fit, then on values that enter the line."""
        node, names = self.node, self.fault.names
        if node.span == users_span(node):
            for wrong in self.nearest():
                yield from self.insertion(
                    {node.inputs[i]: (names.read(node, i), c) for i, c in wrong.items()}
                )
        for value in self.entering():
            name = names.entering(value, node, alone=True)
            if name and reads(users_span(node), name):
                for code in self.codes(value):
                    yield from self.insertion({value: (SourceRead(name), code)})

    def at_region(self) -> Iterator[Change]:
        """Annotations of the values that enter a loop or a branch."""
        for c, wanted in zip(self.fault.found.sink, self.fault.found.wanted, strict=True):
            value: Operand = c.value
            if value not in self.node.inputs:
                continue
            maker, name = self.fault.names.maker(value), self.fault.names.value(value)
            read = SourceRead(name) if name else None
            if c.because.entry is not None and c.because.entry.kind == "predicate":
                read = first_argument(self.node)
                while maker and traits_of(maker.op).adapts and maker.span == self.node.span:
                    value = maker.inputs[0]
                    maker = self.fault.names.maker(value)
            if isinstance(value, int):
                for code in (c for c in self.codes(value) if c in wanted):
                    yield from self.insertion({value: (read, code)})

    def entering(self) -> list[int]:
        """The values that bring the pinned types into the line, last ones first."""
        here, equations = users_span(self.node), reversed(self.fault.found.equations)
        makers = {
            c.value: self.fault.names.maker(c.value)
            for c in equations
            if c.node and users_span(c.node) == here
        }
        return [v for v, maker in makers.items() if maker is None or users_span(maker) != here]

    def codes(self, value: int) -> list[Code]:
        """The codes that a value may be annotated with: B, and splits of a dim that divides. Under
        `jax.vmap` there are no splits, since the user does not see all dims."""
        n, shape = self.base.mesh.sizes[self.fault.position], self.base.graph.avals[value].shape
        dims = () if self.node.is_batched else enumerate(shape)
        return [0, *(1 + d for d, size in dims if size % n == 0)]

    def insertion(
        self, values: Mapping[Operand, tuple[SourceRead | None, Code]]
    ) -> Iterator[Change]:
        """Annotations of values before the line that reads them; none when the source does not
        show one of them.

        Arguments:
          values: for each value, how the line reads it and the code to annotate it with.
        """
        line = users_span(self.node)
        found = [
            self.annotated(value, read, code, line) if read and line else None
            for value, (read, code) in values.items()
        ]
        shown = [one for one in found if one is not None]
        if line is None or not shown or len(shown) < len(found):
            return
        calls, every, without, assumed, places = zip(*shown, strict=True)
        edits = tuple(itertools.chain(*every))
        # Statements before the line annotate local variables. The parameter of a lambda, and a
        # variable of an outer function, have their annotation where they are read.
        before = all(e.replacement.rstrip(" \t").endswith("\n") for e in edits)
        yield Change(
            text=f"{' and '.join(calls)} {'before' if before else 'at'} line {line.line}",
            edits=edits,
            make=functools.partial(insert_pins, self.base, places, self.fault.position),
            without=frozenset().union(*without),
            assumed=tuple(filter(None, assumed))[:1],
            kind="conversion",
        )

    def annotated(
        self, value: Operand, read: SourceRead, code: Code, line: Span
    ) -> Annotation | None:
        """An annotation of a value; None when the source does not show it, or when it is annotated
        in the line already.

        Arguments:
          value: the value.
          read: how the line reads it.
          code: the code to annotate it with.
          line: the line.
        """
        names, axis, system = self.fault.names, self.fault.axis, self.fault.system
        readers = [
            n
            for n in self.base.graph.walk()
            if users_span(n) == line and not n.in_gradient and n.op != annotate_p.name
        ]
        reader, maker = next((n for n in readers if value in n.inputs), None), names.maker(value)
        pinned = maker is not None and maker.op == annotate_p.name and maker.span
        if (
            reader is None
            or (pinned and pinned.line == line.line)
            or (code > 0 and self.node.is_batched)  # dims that the user does not see
            or (read.variable and names.is_other(read.code, reader, value, line))
        ):
            return None
        number = reader.inputs.index(value)
        values = {n.inputs[number]: n for n in readers if _line_key(n) == _line_key(reader)}
        # A library may do the same to each leaf of a tree in one line: each leaf is annotated.
        others = {o: n for o, n in values.items() if o != value and read.variable}
        named = ((names.value(o), o, node) for o, node in others.items())
        variables = (
            SourceRead(name)
            for name, o, node in named
            if name.isidentifier() and not names.is_other(name, node, o, line)
        )
        every = tuple(dict.fromkeys((read, *variables)))
        edits = [convert_value(line, each, {axis: decode(code)}) for each in every]
        end = next((c.because.end for c in self.fault.found.sink if c.value == value), None)
        assumed = system.literals_of(end, code) if end else ()
        if not all(edits) or (end and not assumed):
            return None
        call = f'replicate({{}}, "{axis}")' if code == 0 else f'split({{}}, {code - 1}, "{axis}")'
        return (
            " and ".join(f"sbp.{call.format(each.code)}" for each in every),
            tuple(itertools.chain(*edits)),
            frozenset(
                (axis, c.name)
                for c in system.constraints
                if isinstance(c, ReadConstraint) and c.value in values
            ),
            assumed,
            (Placement(self.base.graph, names, line, edits[0][0]).of((value, *others)), code),
        )


def _line_key(node: Node) -> tuple[Any, ...]:
    """Equal for nodes of one line of the user that is traced more than once: in unrolled layers, in
    rematerialisation."""
    return node.op, node.span or node.id, node.in_gradient, len(node.inputs)


# ---- policies -----------------------------------------------------------------------------------
# Policies that allow more in place of the one to blame.


Blamed = tuple[Node | None, Policy, Literal["program", "axis", "region"]]
"""The node that reads under a policy to which a fault is due, the policy, and whether it is the
program's, that of the mesh axis, or that of a region around the node."""


def policy_to_blame(fault: BlamedFault) -> Blamed | None:
    """The policy that is to blame for a fault: the one where the fault shows, else the one at the
    last place before it. None when no policy is to blame."""
    found = fault.found
    for c in (*found.sink, *reversed(found.equations)) if found.policy else ():
        policy = c.rules.policies[fault.position]
        if not c.unless and policy != "auto":
            return c.node, policy, fault.request.origin(c.node, fault.position)
    return None


Looser = tuple[str, tuple[Edit, ...], Callable[[Request], Request]]
"""A policy that allows more: in words, as edits, and as a change of a program."""


def looser_policies(request: Request, found: Blamed, position: int) -> Iterator[Looser]:
    """The policies that allow more than the one that is to blame, and before them the
    `reduce_dtype` with which a cast needs no conversion. The policy of the program changes on all
    mesh axes without a policy of their own, another policy on one axis; that of a region stays.

    Arguments:
      request: the program.
      found: the policy that is to blame.
      position: the position of the mesh axis.
    """
    node, blamed, origin = found
    dtype = node and allowing(request.graph, node)
    if dtype and request.reduce_dtype is None:
        yield (
            f"reduce_dtype=jnp.{dtype}, so that sbp casts each part and sums them in {dtype}",
            (OptionEdit(option="reduce_dtype", value=dtype),),
            functools.partial(replace, reduce_dtype=dtype),
        )
    names, own = request.mesh.names, request.axis_policies
    lower = POLICIES[: POLICIES.index(blamed)] if origin != "region" else ()
    for policy in lower[::-1]:  # the nearest first
        each, is_whole = own or (None,) * len(names), origin == "program"
        base = policy if is_whole else request.boxing
        per_axis = own if is_whole else (*each[:position], policy, *each[position + 1 :])
        changed = replace(request, boxing=base, axis_policies=per_axis)
        yield (
            boxing_text(changed),
            (OptionEdit(option="boxing", value=boxing_option(changed)),),
            functools.partial(replace, boxing=base, axis_policies=per_axis),
        )


# ---- order --------------------------------------------------------------------------------------
# The order of helps: what was probably meant comes first.


class RankedHelp(NamedTuple):
    """An accepted help with what it changes, and the modelled seconds of the plan after it."""

    help: Help
    kind: HelpKind
    seconds: float


_MEANT = (*("pin", "conversion", "other pin", "drop", "dear pin", "policy", "pair"),)
"""Kinds of helps, the likeliest first. "dear pin": an atom for which the plan takes much longer
than without the pin, such as a weight that is B where it may be split."""

_PLACES = {"pin": "pin", "conversion": "line", "policy": "policy"}
"""What a kind of help changes; the others give up a pin or its kind of atom. The first help of each
place is shown before the second of any."""


def choose(found: Sequence[RankedHelp], most: int) -> list[RankedHelp]:
    """The helps that are shown, the likeliest first: a split of another dim for an odd pin, a
    conversion before the line, another atom for a pin, a pin dropped, another policy. Helps of one
    kind are sorted by their bytes. The first help of each of `_PLACES` is shown before the second
    help of any. A change of two pins in which one pin gives up its split comes last. It is
    shown if there is room.

    A pin is odd if another split gives a plan that sends no more than the plan with a conversion:
    the rest of the program agrees with that split. A pin that loses its split is odd if the plan
    sends as much as with a conversion and is no slower, because that conversion undoes the pin.

    Arguments:
      found: the accepted helps, in the order in which they were tried.
      most: how many are shown.
    """
    conversions = [f for f in found if f.kind == "conversion"]
    conversion = min((f.help.bytes_per_device for f in conversions), default=math.inf)
    converted = min((f.seconds for f in conversions), default=math.inf)
    dropped = min((f.seconds for f in found if f.kind == "drop"), default=math.inf)

    def kind(f: RankedHelp) -> str:
        if f.kind == "pin":
            return "pin" if f.help.bytes_per_device <= conversion else "other pin"
        if f.kind == "other pin" and f.help.bytes_per_device == conversion:
            return "pin" if f.seconds <= converted else "other pin"
        dear = f.kind == "other pin" and dropped <= DEARER * f.seconds
        return "dear pin" if dear else f.kind

    ranked = sorted(found, key=lambda f: (_MEANT.index(kind(f)), f.help.bytes_per_device))
    single = (f for f in reversed(ranked) if kind(f) != "pair")
    first = {_PLACES.get(kind(f), "given up"): f for f in single}.values()
    shown = sorted(ranked, key=lambda f: f not in first)[:most]
    return sorted(shown, key=ranked.index)


# ---- helps --------------------------------------------------------------------------------------


def helps_of(fault: BlamedFault, node: Node) -> tuple[tuple[Help, ...], int, int]:
    """Edits that give the program a typing, for a fault that shows at a node. The pins that are to
    blame for its other faults are left out of the program. A large program has few plans: a policy
    and a change of the annotations are not both tried where the first of them gives a typing.

    Returns:
      The helps that are shown, in the order of `choose`; the number of accepted changes that are
      not shown; and the number of changes that were not tried.
    """
    diagnosis = fault.diagnosis
    size, limits = diagnosis.request.size, diagnosis.limits
    enough, most = limits.plans_of(size, min(len(diagnosis.groups), limits.faults))
    base, gone = _base(fault)
    pins = Insertions(fault, base, node)

    def attempt(changes: Iterable[Change], plans: int) -> Tried:
        return tried(
            changes,
            plans=plans,
            enough=enough,
            screen=lambda one: diagnosis.may_hold(fault.axis, gone | one.without, one.assumed),
        )

    # In a huge program the splits of other dims come first, then a policy: its one plan serves all
    # faults.
    large, changes = limits.is_large(size), [*pins.every()]
    huge = large and most <= SHOWN
    splits = [one for one in changes if huge and one.kind == "pin"]
    tries = [attempt(splits, most), *([_by_policy(fault, base, most)] if huge else [])]
    tries.append(
        attempt(
            (one for one in changes if one not in splits),
            0 if any(t.accepted for t in tries) else most,
        )
    )
    if not huge:
        tries.append(_by_policy(fault, base, 0 if large and tries[-1].accepted else most))
    accepted = (one.kind for t in tries for one, _ in t.accepted)
    if {"pin", "other pin", "drop"}.isdisjoint(accepted):
        tries.append(attempt(pins.pairs(), 0 if large else most))
    found = [_rank(fault, node, one) for t in tries for one in t.accepted]
    shown = choose(found, limits.shown)
    return (
        tuple(f.help for f in shown),
        len(found) - len(shown),
        sum(t.untried for t in tries),
    )


def _base(fault: BlamedFault) -> tuple[Request, set[tuple[str, str]]]:
    """The program without the pins that are to blame for its other faults, and (mesh axis, name) of
    the constraints of those pins."""
    base, gone = fault.request, set[tuple[str, str]]()
    mine = {(r.mesh_axis, c.name) for r in fault.findings for c in r.pins}
    others = (r for group in fault.diagnosis.groups if group != fault.findings for r in group)
    for axis, c in ((r.mesh_axis, c) for r in others for c in r.pins):
        if (axis, c.name) not in mine | gone:
            site, position = site_in(base, c.site), base.mesh.names.index(axis)
            base = set_pins(base, [(site, {position: None})] if site else []) or base
            gone.add((axis, c.name))
    return base, gone


def _by_policy(fault: BlamedFault, base: Request, plans: int) -> Tried:
    """Policies that allow more, first with all faults in the program, then without the others; in a
    large program the first that gives a typing.

    Arguments:
      fault: the fault.
      base: the program without the pins of its other faults.
      plans: the most plans.
    """
    diagnosis, found = fault.diagnosis, policy_to_blame(fault)
    changes = (
        change
        for looser in (looser_policies(fault.request, found, fault.position) if found else ())
        for change in _policy_changes(diagnosis, base, looser)
    )
    helps = 1 if diagnosis.limits.is_large(diagnosis.request.size) else None
    return tried(changes, plans=plans, helps=helps, plan=lambda program: program)


def _policy_changes(diagnosis: Diagnosis, base: Request, looser: Looser) -> Iterator[Change]:
    """A policy of the whole program, then of the program without its other faults."""
    text, edits, change = looser
    several = len(diagnosis.groups) > 1
    whole = Change(
        text=f"{text}, which clears every error" if several else text,
        edits=edits,
        make=functools.partial(diagnosis.under_policy, text, change),
        kind="policy",
    )
    yield whole
    if several:
        yield replace(whole, text=text, make=lambda: best_program(change(base)), instead=whole)


def _rank(fault: BlamedFault, node: Node, accepted: Accepted) -> RankedHelp:
    """An accepted change as a help."""
    one, program = accepted
    kind, several, is_policy = one.kind, len(fault.diagnosis.groups) > 1, one.kind == "policy"
    if kind == "pin" and _splits_twice(one, program):
        kind = "pair" if len(one.pinned) > 1 else "other pin"
    return RankedHelp(
        one.help(
            program,
            more="" if is_policy else _became(fault, node, program),
            clears_all_errors=one.instead is None if is_policy else not several,
        ),
        kind,
        program.cost.seconds,
    )


def _became(fault: BlamedFault, node: Node, program: Program) -> str:
    """The type of the node's result after the edit, as the end of a help's text. Empty for many
    results, and for dims that the user does not see."""
    code = program.typing.values.get(node.outputs[0]) if node.outputs else None
    if code is None or node.regions or node.is_batched:
        return ""
    atom = decode(result_code(fault.names, node, 0, code[fault.position]))
    written = source_text(users_span(node), 24)
    name = fault.names.value(node.outputs[0]) or (f"`{written}`" if written else "the result")
    return f"; {name} becomes {atom!r}"


def _splits_twice(one: Change, program: Program) -> bool:
    """Whether a pin splits a dim that another mesh axis splits, too, which is seldom meant."""
    each = ([c for c in program.typing.values.get(v, ()) if c > 0] for v in one.pinned)
    return any(len(set(splits)) < len(splits) for splits in each)
