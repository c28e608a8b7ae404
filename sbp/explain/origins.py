"""Because of what: where the atom of a value comes from on one mesh axis, and why a conversion of a
plan stands where it does.

A chain of origins goes back through the chosen rows to a pin, an input or an operation without
operands. A reason names the maker of a converted value and the readers that need it converted.
Reports and `plan.why` put both into words.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from sbp.annotations import Pin, annotate_p
from sbp.explain.names import Names
from sbp.explain.subjects import AtomChange, SourcePlace, ValueName, changed_axes
from sbp.infer.flow import allowing
from sbp.infer.pins import pinned_codes
from sbp.infer.space import Code, Codes, decode, encode
from sbp.plan.program import PlannedBox, Program
from sbp.signatures import Row, rule_for, traits_of
from sbp.source.reader import annotated_text, source_text
from sbp.trace.graph import Exit, Node, Operand, interface_of
from sbp.types import P, Split

# ---- origins ------------------------------------------------------------------------------------


LinkKind = Literal[
    "annotation",
    "free annotation",
    "input",
    "free input",
    "output",
    "free output",
    "donated output",
    "row",
    "new",
    "converted",
    "converted result",
    "carry",
    "body input",
    "body carry",
    "body result",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One step of a chain, from the value of the question back to the origin of its atom.

    Arguments:
      kind: how the value got the atom. "annotation", "input" and "output" are pins; "free .." are
        left to inference; "donated output": it takes the buffer of an input; "row": a chosen row
        makes it from operands, "new": from none; "converted": for the node, "converted result":
        where the body returns it; "carry": a loop's carry as its body reads it, "body input":
        another input of a body; "body carry" and "body result": what a body returns.
      subject: the value.
      atom: its code on the mesh axis.
      node: the annotation, operation or region; None at the boundary.
      row: of an operation, its row on the mesh axis.
      made: of a conversion, the code before it.
      donor: of a donated output, the input.
      passes: whether the row hands on the atom of one operand.
    """

    kind: LinkKind
    subject: ValueName
    atom: Code
    node: Node | None = None
    row: Row | None = None
    made: Code = 0
    donor: ValueName | None = None
    passes: bool = False

    @property
    def place(self) -> SourcePlace | None:
        """The line; None at the boundary."""
        return None if self.node is None else SourcePlace.of(self.node)


# ---- reasons ------------------------------------------------------------------------------------


NeedKind = Literal[
    "pin",
    "predicate",
    "carry",
    "body",
    "row",
    "no signature",
    "rounding",
    "not linear",
    "partners",
    "choice",
    "pinned output",
    "donated output",
    "whole output",
    "free output",
    "conversion",
]


PartnerRows = tuple[tuple[ValueName, ...], tuple[Code, ...], tuple[tuple[Code, ...], ...]]
"""The operands beside a partial value, in the rows of a node that take the partial value: the other
operands, the code of each in the plan, and for each row the code that it takes of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionNeed:
    """A need of a converted value.

    Arguments:
      kind: "pin": an annotation; "predicate": of a cond or while; "carry": a loop carries it so;
        "body": a body takes or returns it so; "row": the row of the reader. Readers of a partial
        value: "no signature": the reader has none; "rounding": a cast would round each part; "not
        linear": no row takes the partial value; "partners": rows take it beside operands of other
        types; "choice": a row takes it, and the plan is cheaper so. Results of the program:
        "pinned output", "donated output": it has the type of the input that it replaces in the next
        call, "whole output": a result is not partial unless its type says so, "free output".
        "conversion": only another conversion reads it.
      change: the change that the conversion makes on one mesh axis.
      node: the reader, or the region whose body returns the value; None at the program's end.
      number: of the operand, of the body's result or of the program's result.
      is_read: whether a node reads the value; False where a body or the program returns it.
      region: number of the body that returns the value.
      row: the chosen row of the reader.
      partners: of the kind "partners".
      blocker: of a carry, the first node that reads it and has no row for the partial value.
      donor: of a donated output, the input.
      allowing: of the kind "rounding", the `reduce_dtype` with which the sum may come after the
        cast; None where none does.
    """

    kind: NeedKind
    change: AtomChange
    node: Node | None = None
    number: int = -1
    is_read: bool = True
    region: int = -1
    row: Row | None = None
    partners: PartnerRows | None = None
    blocker: Node | None = None
    donor: ValueName | None = None
    allowing: str | None = None

    @property
    def is_returned(self) -> bool:
        """Whether the program returns the value."""
        return self.node is None and self.kind != "conversion"

    @property
    def is_forced(self) -> bool:
        """Whether no plan of the same program can do without the conversion here."""
        return self.kind in (
            "predicate",
            "no signature",
            "rounding",
            "not linear",
            "donated output",
            "conversion",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionReason:
    """Why a conversion stands where it does.

    Arguments:
      value: the user's name of the value.
      maker: the node that makes the value; None for an input of the program or of a body.
      row: the chosen row of the maker.
      needs: the needs of the converted value: readers in program order, then bodies and the program
        that return it.
    """

    value: ValueName
    maker: Node | None
    row: Row | None
    needs: tuple[ConversionNeed, ...]

    @property
    def need(self) -> ConversionNeed:
        """The need that decides: the first that is forced, else the first."""
        return next((n for n in self.needs if n.is_forced), self.needs[0])


# ---- a plan -------------------------------------------------------------------------------------


Links = tuple[list[Link], Operand | None]
"""The links of one value, and the operand that its atom comes from."""


class Origins:
    """Follows atoms back through a plan, and says why its conversions stand where they do.

    Arguments:
      program: the plan.

    Attributes:
      names: the names of the program's values.
    """

    def __init__(self, program: Program) -> None:
        self.program, self.names = program, Names(program.typing.graph)
        self._step = functools.cache(self._links)

    def is_carry(self, operand: Operand) -> bool:
        """Whether a value is a loop's carry as its body reads it."""
        fed = self.names.entries.get(operand) if isinstance(operand, int) else None
        return fed is not None and fed[1].kind == "carry"

    def chain(self, value: int, position: int) -> Iterator[Link]:
        """The links of a value, its own first.

        Arguments:
          value: the value.
          position: the position of the mesh axis.
        """
        for v in self._values(value, position):
            yield from self._step(v, position)[0]

    def _values(self, value: int, position: int) -> Iterator[int]:
        """A value and those that its atom comes from; the program makes each before the one in
        front of it."""
        at: Operand | None = value
        while isinstance(at, int):
            yield at
            at = self._step(at, position)[1]

    # ---- names ----------------------------------------------------------------------------------

    def label(self, value: Operand) -> ValueName:
        """The user's name of a value; its expression when it has no name."""
        if not isinstance(value, int):
            return ValueName("a constant", is_source=False)
        name, maker = self.names.value(value), self.names.maker(value)
        if name:
            return ValueName(name)
        if maker is None:
            return self._argument(value)
        # Of an annotation, the annotated expression is quoted.
        annotated = annotated_text(maker.span) if maker.op == annotate_p.name and maker.span else ""
        text = (annotated or source_text(maker.span, 44)).replace("`", "'")
        return ValueName(text) if text else ValueName(maker.name, is_source=False)

    def operand(self, node: Node, number: int) -> ValueName:
        """The name of an operand at the line of its node."""
        text = self.names.operand(node, number)
        return ValueName(text, is_source=False) if text else self.label(node.inputs[number])

    def _argument(self, value: int) -> ValueName:
        """A description of an input of the program or of a body that has no name."""
        if value not in self.names.entries:
            return ValueName("an input", is_source=False)
        node, entry = self.names.entries[value]
        if entry.kind == "carry":
            return ValueName(f"the carry of {node.op}", is_source=False)
        outside = self.label(node.inputs[entry.operand])
        return (
            ValueName(f"a slice of {outside}", is_source=False)
            if entry.kind == "slice"
            else outside
        )

    # ---- links ----------------------------------------------------------------------------------

    def _links(self, value: int, k: int) -> Links:
        """The links of a value on a mesh axis, and the operand that its atom comes from."""
        typing, name, number = self.program.typing, self.label(value), self.names.inputs.get(value)
        code, fed = typing.values[value][k], self.names.entries.get(value)
        if number is not None:
            wanted = typing.request.demand.inputs[number]
            kind = "input" if wanted is not None and wanted[k] is not None else "free input"
            return [Link(kind=kind, subject=name, atom=code)], None
        if fed is not None:
            node, entry = fed
            kind = "carry" if entry.kind == "carry" else "body input"
            link = Link(kind=kind, subject=name, atom=code, node=node, passes=kind != "carry")
            wanted = typing.rows[node.id].ins[entry.operand][k]
            return self._with_conversion(link, node.inputs[entry.operand], wanted, k)
        node = self.names.makers[value]
        if node.op == annotate_p.name:
            pin: Pin | None = node.params["pin"]
            if pin is not None and pinned_codes(pin, typing.mesh)[k] is not None:
                return [Link(kind="annotation", subject=name, atom=code, node=node)], None
            free = Link(kind="free annotation", subject=name, atom=code, node=node, passes=True)
            return self._with_conversion(free, node.inputs[0], code, k)
        if not node.regions:
            return self._row(node, value, code, k)
        left = interface_of(node).exit_to(node.outputs.index(value))
        operand = node.regions[left.region].outputs[left.output]
        kind = "body carry" if left.kind == "carry" else "body result"
        link = Link(kind=kind, subject=name, atom=code, node=node, passes=True)
        returned = typing.region_outputs[node.id, left.region][left.output][k]
        return self._with_conversion(link, operand, returned, k, "converted result")

    def _with_conversion(
        self,
        link: Link,
        operand: Operand,
        wanted: Code,
        k: int,
        kind: Literal["converted", "converted result"] = "converted",
    ) -> Links:
        """A link, with the conversion of the value that its node reads where the axis has one.

        Arguments:
          link: the link.
          operand: the value.
          wanted: the code that the node takes.
          k: position of the mesh axis.
          kind: that of the conversion's link.
        """
        made = self.program.typing.values[operand][k] if isinstance(operand, int) else wanted
        if made == wanted:
            return [link], operand
        more = Link(kind=kind, subject=self.label(operand), atom=wanted, node=link.node, made=made)
        return [link, more], operand

    def _leads(self, node: Node, code: Code, k: int) -> list[int]:
        """The numbers of the operands that a result's atom comes from; the chain goes on with the
        first.

        Arguments:
          node: the node.
          code: the result's code.
          k: position of the mesh axis.
        """
        ins = [t[k] for t in self.program.typing.rows[node.id].ins]
        values = [(i, o) for i, o in enumerate(node.inputs) if isinstance(o, int)]
        leads = [(i, o) for i, o in values if ins[i]] or ([] if code else values)
        # The operand that a loop adds explains more than the carry to which it is added, and a
        # conversion more than an operand that is B as it was made.
        converted = {i for i, o in leads if not code and self.program.typing.values[o][k] != ins[i]}
        rank = {i: (i not in converted, self.is_carry(o)) for i, o in leads}
        return sorted(rank, key=lambda i: rank[i])

    def _row(self, node: Node, value: int, code: Code, k: int) -> Links:
        chosen, leads = self.program.typing.rows[node.id], self._leads(node, code, k)
        operands = [node.inputs[i] for i in leads]
        # A carry, and what the same expression makes, do not count beside the first operand.
        others = (
            o != operands[0] and not self.is_carry(o) and (not made or made.span != node.span)
            for o in (operands[1:] if code else ())
            for made in [self.names.maker(o)]
        )
        link = Link(
            kind="row" if leads else "new",
            subject=self.label(value),
            atom=code,
            node=node,
            row=chosen.on(k),
            passes={chosen.ins[i][k] for i in leads} == {code} and not any(others),
        )
        return (
            self._with_conversion(link, node.inputs[leads[0]], chosen.ins[leads[0]][k], k)
            if leads
            else ([link], None)
        )

    # ---- reasons --------------------------------------------------------------------------------

    def reason(self, planned: PlannedBox, source: Codes, target: Codes) -> ConversionReason:
        """Why a conversion stands where it does: for the first mesh axis on which it changes
        something.

        Arguments:
          planned: the conversion.
          source, target: the types before and after it, or before and after one of its steps.
        """
        axis = changed_axes(source, target)[0]
        change = AtomChange(axis, source[axis], target[axis])
        maker, value, names = planned.box.maker, planned.box.source.value, self.names
        label = self.label(value)
        if value in names.inputs:
            label, maker = ValueName(f"input {label.name}", is_source=False), None
        needs = (
            *(self._reader(node, number, change) for node, number in planned.readers()),
            *(self._return(planned, number, change) for number in planned.result_positions()),
        )
        return ConversionReason(
            value=label,
            maker=maker,
            row=None if maker is None else self.chosen_row(maker, change.axis),
            # Only another conversion may read the value.
            needs=needs or (ConversionNeed(kind="conversion", change=change, is_read=False),),
        )

    def chosen_row(self, node: Node, axis: int) -> Row | None:
        """The chosen row of an operation; None for regions and operations without operands."""
        row = None if node.regions else self.program.typing.rows.get(node.id)
        return row.on(axis) if row is not None and row.ins else None

    def takes(self, node: Node, number: int, change: AtomChange) -> list[Row]:
        """The rows of a node that take an operand without a change.

        Arguments:
          node: the node.
          number: of the operand.
          change: on one mesh axis.
        """
        # The rows of a barrier are about each of its operands.
        at, atom = 0 if node.is_barrier else number, decode(change.before)
        request = self.program.typing.graph_request
        one = slice(number, number + 1) if node.is_barrier else slice(None)
        return [
            row
            for row in request.axis_rows(node, change.axis, communicates=True, operands=one)
            if row.ins[at] == atom
        ]

    # ---- readers --------------------------------------------------------------------------------

    def _reader(self, reader: Node, number: int, change: AtomChange) -> ConversionNeed:
        """Why a node needs an operand converted.

        Arguments:
          reader: the node.
          number: of the operand.
          change: the change on one mesh axis.
        """
        row = self.chosen_row(reader, change.axis)
        need = functools.partial(ConversionNeed, change=change, node=reader, number=number, row=row)
        if reader.op == annotate_p.name:
            return need(kind="pin")
        if reader.regions:
            entry = interface_of(reader).entries[number]
            return need(kind=entry.kind if entry.kind in ("predicate", "carry") else "body")
        if change.before >= 0:
            return need(kind="row")
        if rule_for(reader.op) is None:
            return need(kind="no signature")
        rows, traits = self.takes(reader, number, change), traits_of(reader.op)
        if not rows and traits.carries == "rounded" and traits.adapts:
            dtype = allowing(self.program.graph, reader)
            return need(kind="rounding", allowing=dtype if decode(change.before) == P else None)
        if not rows:
            return need(kind="not linear")
        made = {
            i: self.program.typing.values[o][change.axis]
            for i, o in enumerate(reader.inputs)
            if i != number and isinstance(o, int) and not reader.is_barrier
        }
        # An operand that is made B, or partial itself, fits a row that takes it partial.
        if any(
            all(
                row.ins[i] == decode(code) or (code == 0 and not isinstance(row.ins[i], Split))
                for i, code in made.items()
            )
            for row in rows
        ):
            return need(kind="choice")
        return need(
            kind="partners",
            partners=(
                tuple(self.operand(reader, i) for i in made),
                tuple(made.values()),
                tuple(tuple(encode(row.ins[i]) for i in made) for row in rows),
            ),
        )

    # ---- results --------------------------------------------------------------------------------

    def _return(self, planned: PlannedBox, number: int, change: AtomChange) -> ConversionNeed:
        """Why a body or the program needs a returned value converted.

        Arguments:
          planned: the conversion.
          number: of the result.
          change: the change on one mesh axis.
        """
        if not planned.regions:
            return self._output(number, change)
        node, region = planned.regions[-1]
        left = interface_of(node).leaving(region)[number]
        is_partial_carry = left.kind == "carry" and change.before < 0
        return ConversionNeed(
            kind=left.kind if left.kind in ("predicate", "carry") else "body",
            change=change,
            node=node,
            number=number,
            is_read=False,
            region=region,
            blocker=self._blocker(node, left, change) if is_partial_carry else None,
        )

    def _blocker(self, loop: Node, left: Exit, change: AtomChange) -> Node | None:
        """The first node that reads a carry and has no row for it partial."""
        value = loop.regions[left.region].inputs[left.entry_position(left.region)]
        readers = (
            (node, [i for i, o in enumerate(node.inputs) if o == value and rule_for(node.op)])
            for node in self.program.graph.walk()
        )
        return next(
            (
                node
                for node, numbers in readers
                if numbers and not any(self.takes(node, i, change) for i in numbers)
            ),
            None,
        )

    def donor(self, number: int) -> ValueName | None:
        """The input that a result of the program replaces in the next call; None for none."""
        tied = dict(self.program.request.demand.tied).get(number)
        return None if tied is None else self.label(self.program.graph.inputs[tied])

    def _output(self, number: int, change: AtomChange) -> ConversionNeed:
        asked, donor = self.program.request.demand.outputs[number], self.donor(number)
        kind: NeedKind = "whole output" if change.before < 0 else "free output"
        if asked is not None and asked[change.axis] is not None:
            kind, donor = "pinned output", None
        elif donor is not None:
            kind = "donated output"
        return ConversionNeed(kind=kind, change=change, number=number, is_read=False, donor=donor)


def without_passing(links: tuple[Link, ...]) -> tuple[Link, ...]:
    """A chain without links that only hand on the atom of an operand without a name, such as those
    inside a library's function."""
    kept: list[Link] = []
    for number, link in enumerate(links):
        same = number and link.passes and link.atom == kept[-1].atom
        if not same or (link.subject.is_variable and link.subject != kept[-1].subject):
            kept.append(link)
    return tuple(kept)
