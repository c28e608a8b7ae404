"""Why each conversion of a value is where it is: what forces it there, and what the program would
cost with it elsewhere."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from sbp.explain.origins import Origins, atoms
from sbp.explain.pinning import Types, Wanted, pin_subject, unpin_subject
from sbp.explain.subjects import Subject, in_gradient
from sbp.infer.check import check
from sbp.infer.constraints import pin_sites
from sbp.infer.held import Hold, choose_held
from sbp.infer.request import Request
from sbp.infer.space import Code, Codes, Step, decode, encode
from sbp.limits import boxing_text
from sbp.machine.mesh import MeshSpec
from sbp.plan.fit import best_program, cheapest
from sbp.plan.ir import Apply, Block, Box, Loop, Source
from sbp.plan.program import Cost, Program
from sbp.plan.text import node_place
from sbp.signatures import Op, rule_for
from sbp.source.reader import source_text
from sbp.trace.graph import Node
from sbp.trace.regions import bodies_of, interface_of
from sbp.types import B, NdSbp, Split


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """The program planned anew with one thing changed.

    Arguments:
      change: what was changed, in words.
      wanted: the atoms that were pinned, by mesh axis.
      type: the value's whole type in that plan; None when there is no plan.
      cost: what a call of that plan costs; None when there is no plan.
      reason: why there is none.
    """

    change: str
    wanted: tuple[tuple[str, str], ...] = ()
    type: NdSbp | None = None
    cost: Cost | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """A conversion of the value, with what forces it there.

    Arguments:
      steps: its collectives and local steps.
      mesh: the mesh, for names.
      runs: how often a call runs it.
      bytes_per_device: what one device sends for it per call.
      made: what makes the value, in words.
      forced: who needs it converted, and why it cannot go on as it is.
      instead: the plan without it at this place; None when a rule forbids that.
      others: further readers of the converted value.
      onward: whether it is not the value itself that is converted, but what is made of it: it goes
          on partial, and is reduced there.
    """

    steps: tuple[Step, ...]
    mesh: MeshSpec = field(repr=False)
    runs: int
    bytes_per_device: float
    made: str
    forced: str
    instead: Alternative | None
    others: int = 0
    onward: bool = False


@dataclass(frozen=True, slots=True)
class _Placed:
    """A box with what is around it: how often it runs, and the regions with the number of the body,
    outermost first."""

    box: Box
    runs: int
    holders: tuple[tuple[Node, int], ...]
    block: Block

    def readers(self) -> list[tuple[Node, int]]:
        """The nodes that take the converted value, each with the number of the operand."""
        target: Source = self.box.target
        taking = (i for i in self.block.instructions if isinstance(i, Apply | Loop))
        return [(i.node, n) for i in taking for n, source in enumerate(i.ins) if source == target]

    def returned(self) -> list[int]:
        """Where the block returns it."""
        return [n for n, source in enumerate(self.block.outputs) if source == self.box.target]


def _placed(block: Block, runs: int, holders: tuple[tuple[Node, int], ...]) -> Iterator[_Placed]:
    for instruction in block.instructions:
        if isinstance(instruction, Box):
            yield _Placed(instruction, runs, holders, block)
        elif isinstance(instruction, Loop):
            for number, inner in enumerate(instruction.blocks):
                yield from _placed(
                    inner, runs * instruction.trips, (*holders, (instruction.node, number))
                )


@dataclass(frozen=True, slots=True)
class _Reason:
    """Why a reader has a value converted, and how that would be done otherwise; nothing where a
    rule forbids it."""

    text: str
    change: str = ""
    plan: Callable[[], tuple[Program | None, str]] | None = None


@dataclass(frozen=True)
class Moves:
    """The conversions of one subject of a program.

    Arguments:
      program: the plan.
      subject: the value.
      origins: of the program.
      output_names: names of the results.
    """

    program: Program
    subject: Subject
    origins: Origins
    output_names: tuple[str, ...]

    @property
    def request(self) -> Request:
        """What the plan was chosen for."""
        return self.program.request

    @property
    def mesh(self) -> MeshSpec:
        """The mesh."""
        return self.program.mesh

    def found(self) -> list[list[_Placed]]:
        """The conversions of the value, alike ones together, most bytes first; then those of what
        it goes on into as a partial."""
        mine, onward = self.aliases, self.onward
        groups: dict[object, list[_Placed]] = {}
        for placed in _placed(self.program.block, 1, ()):
            box = placed.box
            into = (
                self.subject.kind == "annotation"
                and box.reader is not None
                and not mine.isdisjoint(box.reader.outputs)
            )
            later = box.source.value in onward and any(c < 0 for c in box.source.codes)
            if box.source.value in mine or into or later:
                reader, holder = box.reader, placed.holders[-1][0] if placed.holders else None
                by = (
                    (reader.op, reader.span or reader.id, reader.backward)
                    if reader
                    else (holder and (holder.span or holder.id),)
                )
                steps = tuple((s.kind, s.mesh_axes, s.source, s.target) for s in box.steps)
                groups.setdefault((steps, by), []).append(placed)
        return sorted(
            groups.values(),
            key=lambda g: (self.is_onward(g), -sum(p.box.bytes_sent * p.runs for p in g)),
        )

    def is_onward(self, group: list[_Placed]) -> bool:
        """Whether a conversion is of what is made of the value."""
        return group[0].box.source.value in self.onward

    @functools.cached_property
    def aliases(self) -> frozenset[int]:
        """The subject's values, what the last steps of its expression make them from, and what
        bodies call them they are passed into."""
        mine = set(self.subject.values)
        nodes = list(self.program.graph.walk())
        # A transposed product is one expression of the user, and its gradient too; an annotation is
        # of what it annotates.
        for node in reversed(nodes):
            if not mine.isdisjoint(node.outputs) and len(node.inputs) == 1 and not node.regions:
                maker = (
                    self.origins.names.makers.get(node.inputs[0])
                    if isinstance(node.inputs[0], int)
                    else None
                )
                inner = maker is not None and (maker.span, in_gradient(maker)) == (
                    node.span,
                    in_gradient(node),
                )
                if inner or (maker is not None and node.op == "sbp_annotate"):
                    mine.update(o for o in node.inputs if isinstance(o, int))
        for node in nodes:
            for number, operand in enumerate(node.inputs):
                if isinstance(operand, int) and operand in mine:
                    mine.update(body.inputs[i] for body, i in bodies_of(node, number))
        return frozenset(mine)

    @functools.cached_property
    def onward(self) -> frozenset[int]:
        """What is made of the value and is still partial where the value is."""
        typing, mine = self.program.typing, self.aliases
        axes = [
            k
            for k in range(len(self.mesh.sizes))
            if any(typing.values[v][k] < 0 for v in mine if v in typing.values)
        ]
        reached = set(mine)

        def spread(node: Node) -> set[int]:
            made = set[int]()
            for number, operand in enumerate(node.inputs):
                if operand in reached and any(
                    typing.rows[node.id].ins[number][k] < 0 for k in axes
                ):
                    made |= {body.inputs[i] for body, i in bodies_of(node, number)} | set(
                        () if node.regions else node.outputs
                    )
            made |= {
                node.outputs[e.result]
                for e in interface_of(node).exits
                if e.result >= 0 and node.regions[e.region].outputs[e.output] in reached
            }
            return {v for v in made if any(typing.values[v][k] < 0 for k in axes)}

        before = 0
        while axes and len(reached) > before:
            before = len(reached)
            for node in self.program.graph.walk():
                reached |= spread(node)
        return frozenset(reached - mine)

    def conversion(self, group: list[_Placed], *, tried: bool) -> Conversion:
        """A conversion with its reason; `tried`: whether the program is planned without it here."""
        first = group[0]
        reason = self.reason(group)
        instead: Alternative | None = None
        if reason.plan is not None and tried:
            program, said = reason.plan()
            if program is None:
                instead = Alternative(change=reason.change, reason=said)
            else:
                types = Types.of(program, self.request.graph)
                instead = Alternative(
                    change=reason.change, type=types.type_of(self.subject), cost=program.cost
                )
        maker = first.box.maker
        return Conversion(
            steps=first.box.steps,
            mesh=self.mesh,
            runs=sum(p.runs for p in group),
            bytes_per_device=sum(p.box.bytes_sent * p.runs for p in group),
            made=self.made_text(first.box, maker),
            forced=reason.text,
            instead=instead,
            others=max(0, len(first.readers()) + len(first.returned()) - 1),
            onward=self.is_onward(group),
        )

    def made_text(self, box: Box, maker: Node | None) -> str:
        if maker is None:
            return self.origins.label(box.source.value)
        if maker.op == "sbp_annotate":
            return f"the annotation {_quote(maker)}{node_place(maker)}"
        return (
            f"{maker.op} {_quote(maker)}{node_place(maker)}{self.row_text(maker, _changed(box)[0])}"
        )

    def row_text(self, node: Node, position: int) -> str:
        """The chosen row of a node on a mesh axis."""
        row = self.program.typing.rows.get(node.id)
        if row is None or node.regions or not row.ins:
            return ""
        return (
            f" ({atoms([t[position] for t in row.ins])} ->"
            f" {atoms([t[position] for t in row.outs])})"
        )

    def reason(self, group: list[_Placed]) -> _Reason:
        """What forces a conversion: of its readers the first that cannot do without; else that the
        chooser finds it cheaper so."""
        placed = group[0]
        reasons = [self.at_reader(group, node, number) for node, number in placed.readers()]
        reasons += [self.at_return(group, number) for number in placed.returned()]
        if not reasons:  # another conversion starts from it
            return _Reason("on the way to another type that is read")
        return next((r for r in reasons if r.plan is None), reasons[0])

    def at_reader(self, group: list[_Placed], reader: Node, number: int) -> _Reason:
        box = group[0].box
        changed = _changed(box)
        k = changed[0]
        before, after = decode(box.source.codes[k]), decode(box.target.codes[k])
        if reader.op == "sbp_annotate":
            text = f"pinned as {after!r} by `{source_text(reader.span)}` {node_place(reader)}"
            return _Reason(text, "without that pin", lambda: self.without_pin(reader, changed))
        what = f"{reader.op} {_quote(reader)}{node_place(reader)}"
        if reader.regions and interface_of(reader).entries[number].kind == "predicate":
            return _Reason(f"it is the predicate of {what}, which every device has to know")
        if reader.regions:
            bodies = bodies_of(reader, number)
            is_carry = any(body.inputs[i] in self.origins.carries for body, i in bodies)
            kept = "carried as" if is_carry else "taken into the body as"
            values = [body.inputs[i] for body, i in bodies]
            text = f"{kept} {after!r} by {what}"
            back = inner_codes(reader, number, box.source.codes, changed)
            holds = [Hold(end="made", at=(v,), codes=back) for v in values[:1]]
            return _Reason(text, f"{kept} {before!r}", lambda: self.held(holds))
        if box.source.codes[k] >= 0:
            text = f"needed by {what}, whose row takes {after!r}{self.row_text(reader, k)}"
            codes = asked(box.target.codes, changed)
            holds = [
                Hold(end="operand", at=at, codes=codes, differs=True)
                for at in like(group, reader, number)
            ]
            return _Reason(
                text, "the next best, where it takes another type", lambda: self.held(holds)
            )
        return self.partial_reader(group, reader, number, k, what)

    def partial_reader(
        self, group: list[_Placed], reader: Node, number: int, k: int, what: str
    ) -> _Reason:
        """Why a reader has a partial reduced before it."""
        box = group[0].box
        code = box.source.codes[k]
        before = decode(code)
        rule = rule_for(reader.op)
        if rule is None:
            return _Reason(f"needed by {what}, which has no signature and takes all operands B")
        graph = self.program.graph
        ins, outs = (
            tuple(graph.aval(o) for o in reader.inputs),
            tuple(graph.avals[v] for v in reader.outputs),
        )
        rows = [
            r
            for r in rule.rows(Op(reader.op, reader.params, ins, outs, self.mesh.sizes[k]))
            if r.ins[number] == before
        ]
        if not rows and reader.op == "convert_element_type":
            return _Reason(
                f"needed by {what}: a cast to {outs[0].dtype} would round each part, so the sum"
                " comes first"
            )
        if not rows:
            return _Reason(
                f"needed by {what}, which has no row for {before!r}: it is not linear in this"
                " operand"
            )
        typing = self.program.typing
        beside = [
            i
            for i in range(len(reader.inputs))
            if i != number and isinstance(reader.inputs[i], int)
        ]
        # What is made B is P at no cost; so is what is made P.
        made = {
            i: decode(typing.values[o][k]) for i in beside if isinstance(o := reader.inputs[i], int)
        }
        fits = [
            r
            for r in rows
            if all(
                r.ins[i] == made[i] or (made[i] == B and not isinstance(r.ins[i], Split))
                for i in beside
            )
        ]
        if not fits:
            asked = sorted(
                {", ".join(f"{self.operand(reader, i)} {r.ins[i]!r}" for i in beside) for r in rows}
            )
            have = ", ".join(f"{self.operand(reader, i)} is {made[i]!r}" for i in beside)
            text = (
                f"needed by {what}, which takes {before!r} only beside {' or '.join(asked[:3])},"
                f" and {have}"
            )
        else:
            text = f"needed by {what}, which takes {before!r} as well"
        result = (fits or rows)[0].outs
        change = (
            f"reduced one consumer later, after {reader.op} {_quote(reader)}{node_place(reader)}"
        )
        return _Reason(text, change, lambda: self.later(group, reader, {k: encode(result[0])}))

    def operand(self, node: Node, number: int) -> str:
        return self.origins.names.operand(node, number) or self.origins.label(node.inputs[number])

    def at_return(self, group: list[_Placed], number: int) -> _Reason:
        placed = group[0]
        box, changed = placed.box, _changed(placed.box)
        k = changed[0]
        before, after = decode(box.source.codes[k]), decode(box.target.codes[k])
        if not placed.holders:
            return self.at_output(number, box, changed)
        holder, region = placed.holders[-1]
        what = f"{holder.op} {_quote(holder)}{node_place(holder)}"
        left = interface_of(holder).leaving(region)[number]
        if left.kind == "predicate":
            return _Reason(f"it is the predicate of {what}, which every device has to know")
        is_carry = left.kind == "carry"
        kept = "carried as" if is_carry else "returned as"
        holds = [
            Hold(
                end="returned",
                at=(holder.id, region, number),
                codes=asked(box.source.codes, changed),
            )
        ]
        text = (
            f"{kept} {after!r} over all trips of {what}"
            if is_carry
            else f"{kept} {after!r} by the body of {what}"
        )
        if is_carry and box.source.codes[k] < 0:
            carry = holder.regions[region].inputs[left.entered(region)]
            blocker = self.blocker(carry, k, box.source.codes[k])
            if blocker is not None:
                text += (
                    f": each trip reads it in {blocker.op} {_quote(blocker)}{node_place(blocker)},"
                    f" which has no row for {before!r}"
                )
        return _Reason(text, f"{kept} {before!r}", lambda: self.held(holds))

    def blocker(self, value: int, position: int, code: Code) -> Node | None:
        """The first node that reads a value and has no row for it with an atom."""
        graph = self.program.graph
        for node in graph.walk():
            rule = rule_for(node.op)
            if value not in node.inputs or rule is None:
                continue
            ins, outs = (
                tuple(graph.aval(o) for o in node.inputs),
                tuple(graph.avals[v] for v in node.outputs),
            )
            rows = rule.rows(Op(node.op, node.params, ins, outs, self.mesh.sizes[position]))
            if not any(
                r.ins[i] == decode(code)
                for r in rows
                for i, o in enumerate(node.inputs)
                if o == value
            ):
                return node
        return None

    def at_output(self, number: int, box: Box, changed: list[int]) -> _Reason:
        k = changed[0]
        before, after = decode(box.source.codes[k]), decode(box.target.codes[k])
        name = self.output_names[number] if number < len(self.output_names) else f"result[{number}]"
        output = Subject(label=name, kind="output", values=(box.source.value,), position=number)
        asked = self.request.demand.outputs[number]
        tied = dict(self.request.demand.tied).get(number)
        wanted = {i: box.source.codes[i] for i in changed}
        if asked is not None and asked[k] is not None:
            text = f"returned as `{name}`, which is pinned as {after!r}"
        elif tied is not None:
            held = self.origins.label(self.program.graph.inputs[tied])
            return _Reason(
                f"returned as `{name}`, which takes the buffer and so the type of the donated input"
                f" {held}"
            )
        elif box.source.codes[k] < 0:
            text = (
                f"returned as `{name}`: what a program returns is not partial unless its type"
                " says so"
            )
        else:
            text = f"returned as `{name}`, whose type is left free"
        return _Reason(
            text,
            f"`{name}` returned as {before!r}",
            lambda: self.edited(pin_subject(self.request, output, wanted)),
        )

    # ---- plans instead --------------------------------------------------------------------------

    def edited(self, request: Request) -> tuple[Program | None, str]:
        program = best_program(request)
        return program, "" if program is not None else no_typing(request)

    def held(self, holds: Sequence[Hold]) -> tuple[Program | None, str]:
        request = self.request
        if not {h.at[0] for h in holds if h.end != "made"} <= {n.id for n in request.graph.walk()}:
            return None, "it was not in the program before conversions were taken together"
        program = cheapest(functools.partial(choose_held, request, holds), request)
        if program is None:
            return None, "no row takes it so"
        limit = request.memory_limit
        if limit is not None and program.cost.peak_memory_bytes > limit:
            return None, "it does not fit the memory limit"
        return program, ""

    def later(
        self, group: list[_Placed], reader: Node, wanted: Wanted
    ) -> tuple[Program | None, str]:
        """With the results of a reader pinned, wherever its line was traced: what they are made of
        is then reduced after them."""
        nodes = {n.id for p in group for n, _ in p.readers() if _alike(n, reader)}
        outputs = tuple(v for n in self.request.graph.walk() if n.id in nodes for v in n.outputs)
        return self.edited(
            pin_subject(self.request, Subject(label="", kind="made", values=outputs), wanted)
        )

    def without_pin(self, reader: Node, changed: list[int]) -> tuple[Program | None, str]:
        nodes = [
            n
            for s in pin_sites(self.request)
            if any(n.id == reader.id for n in s.nodes)
            for n in s.nodes
        ]
        subject = Subject(label="", kind="annotation", values=tuple(n.outputs[0] for n in nodes))
        request = self.request
        for k in changed:
            request = unpin_subject(request, subject, k)
        return self.edited(request)


def no_typing(request: Request) -> str:
    """In a line, why a program has no plan."""
    fault = check(request)
    if fault.status != "unsat":
        return (
            "no types of all mesh axes together"
            if request.memory_limit is None
            else "nothing that fits the memory limit"
        )
    where = f"on `{fault.mesh_axis}`" + (
        f" under {boxing_text(request.boxing, request.axis_policies, request.mesh.names)}"
        if fault.policy
        else ""
    )
    if not fault.sink:
        return f"no row reaches it {where}"
    end = fault.sink[0]
    arrives = " or ".join(dict.fromkeys(repr(decode(c)) for c in fault.made[0])) or "nothing"
    if end.node is None:
        return f"the program would have to return {arrives} {where}"
    return f"{end.node.op} {_quote(end.node)}{node_place(end.node)} does not take {arrives} {where}"


def asked(codes: Codes, changed: list[int]) -> tuple[Code | None, ...]:
    """Codes on the mesh axes that a conversion changes, None on the others."""
    return tuple(c if k in changed else None for k, c in enumerate(codes))


def inner_codes(
    node: Node, number: int, codes: Codes, changed: list[int]
) -> tuple[Code | None, ...]:
    """Codes of a region's operand as its body has them: of a stacked operand, those of one
    slice."""
    stacked = interface_of(node).entries[number].kind == "slice"
    return asked(tuple(c - 1 if stacked and c > 0 else c for c in codes), changed)


def like(group: list[_Placed], reader: Node, number: int) -> list[tuple[int, int]]:
    """The reader's operand in every copy of the value."""
    return list(
        dict.fromkeys(
            (n.id, i) for p in group for n, i in p.readers() if i == number and _alike(n, reader)
        )
    )


def _alike(node: Node, other: Node) -> bool:
    return (node.op, node.span, node.backward) == (other.op, other.span, other.backward)


def _changed(box: Box) -> list[int]:
    """Positions of the mesh axes on which a conversion changes the atom."""
    return [
        k for k, (a, b) in enumerate(zip(box.source.codes, box.target.codes, strict=True)) if a != b
    ]


def _quote(node: Node) -> str:
    """The user's expression with a blank behind it."""
    text = source_text(node.span, 44).replace("`", "'")
    return f"`{text}` " if text else ""
