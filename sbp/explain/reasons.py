"""Why a conversion of a plan stands where it does: the maker of the value and the readers that need
it converted.

`Reasons.of` is the one answer to that question. Reports and `plan.why` put it into words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from sbp.annotations import annotate_p
from sbp.explain.origins import Origins
from sbp.explain.subjects import AtomChange, AxisRow, ValueName
from sbp.infer.accumulation import allowing
from sbp.infer.space import Code, decode, encode
from sbp.plan.program import PlannedBox, Program
from sbp.signatures import Op, Row, rule_for, traits_of
from sbp.trace.graph import Node
from sbp.trace.regions import interface_of
from sbp.types import P, Split

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

FORCED: frozenset[NeedKind] = frozenset(
    {"predicate", "no signature", "rounding", "not linear", "donated output", "conversion"}
)
"""Needs that no plan of the same program can do without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartnerRows:
    """The operands beside a partial value, in the rows of a node that take the partial value.

    Arguments:
      names: the other operands.
      atoms: the code of each in the plan.
      rows: for each row, the code that it takes of each.
    """

    names: tuple[ValueName, ...]
    atoms: tuple[Code, ...]
    rows: tuple[tuple[Code, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionNeed:
    """A need of a converted value.

    Arguments:
      kind: "pin": an annotation; "predicate": of a cond or while; "carry": a loop carries it so;
        "body": a body takes or returns it so; "row": the row of the reader. Readers of a partial
        value: "no signature": the reader has none; "rounding": a cast would round each part; "not
        linear": no row takes the partial value; "partners": rows take it beside operands of other
        types; "choice": a row takes it, and the plan is cheaper so. Results of the program:
        "pinned output", "donated output": it takes the type of a donated input, "whole output": a
        result is not partial unless its type says so, "free output". "conversion": only another
        conversion reads it.
      change: the change that the conversion makes on one mesh axis.
      node: the reader, or the region whose body returns the value; None at the program's end.
      number: of the operand, of the body's result or of the program's result.
      is_read: whether a node reads the value; False where a body or the program returns it.
      region: number of the body that returns the value.
      row: the chosen row of the reader.
      partners: of the kind "partners".
      result: the code of the reader's result from the partial value; None where no row takes it.
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
    row: AxisRow | None = None
    partners: PartnerRows | None = None
    result: Code | None = None
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
        return self.kind in FORCED


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
    row: AxisRow | None
    needs: tuple[ConversionNeed, ...]

    @property
    def need(self) -> ConversionNeed:
        """The need that decides: the first that is forced, else the first."""
        return next((n for n in self.needs if n.is_forced), self.needs[0])


@dataclass(frozen=True, slots=True)
class Reasons:
    """The reasons of a plan's conversions.

    Arguments:
      program: the plan.
      origins: of the program.
      rows: rows of nodes that have been looked up, by node and position of the mesh axis.
    """

    program: Program
    origins: Origins
    rows: dict[tuple[int, int], Sequence[Row] | None] = field(default_factory=dict)

    def of(self, planned: PlannedBox, change: AtomChange) -> ConversionReason:
        """Why a conversion stands where it does.

        Arguments:
          planned: the conversion.
          change: the change that it, or one of its steps, makes on one mesh axis.
        """
        maker, value, names = planned.box.maker, planned.box.source.value, self.origins.names
        label = self.origins.label(value)
        if value in names.inputs:
            label = ValueName(f"input {label.name}", is_source=False)
        needs = [self._reader(node, number, change) for node, number in planned.readers()]
        needs += [self._return(planned, number, change) for number in planned.returned()]
        return ConversionReason(
            value=label,
            maker=maker,
            row=None if maker is None else self.chosen_row(maker, change.axis),
            # Only another conversion may read the value.
            needs=tuple(needs or [ConversionNeed(kind="conversion", change=change, is_read=False)]),
        )

    def chosen_row(self, node: Node, axis: int) -> AxisRow | None:
        """The chosen row of an operation; None for regions and operations without operands."""
        row = self.program.typing.rows.get(node.id)
        if row is None or node.regions or not row.ins:
            return None
        return AxisRow.of(row.ins, row.outs, axis)

    def takes(self, node: Node, number: int, change: AtomChange) -> list[Row]:
        """The rows of a node that take an operand without a change.

        Arguments:
          node: the node.
          number: of the operand.
          change: on one mesh axis.
        """
        # The rows of a barrier are about each of its operands.
        at, atom = 0 if node.is_barrier else number, decode(change.before)
        return [row for row in self._rows(node, change.axis) or () if row.ins[at] == atom]

    def _rows(self, node: Node, axis: int) -> Sequence[Row] | None:
        """The rows of a node on a mesh axis; None for a node without a signature."""
        key = node.id, axis
        if key not in self.rows:
            rule, graph = rule_for(node.op), self.program.graph
            ins = tuple(graph.aval(o) for o in node.inputs)
            outs = tuple(graph.avals[v] for v in node.outputs)
            size = self.program.mesh.sizes[axis]
            rounds = node.id in self.program.typing.graph_request.rounding
            op = Op(node.op, node.params, ins, outs, size, rounds)
            self.rows[key] = None if rule is None else rule.rows(op)
        return self.rows[key]

    # ---- readers --------------------------------------------------------------------------------

    def _reader(self, reader: Node, number: int, change: AtomChange) -> ConversionNeed:
        """Why a node needs an operand converted.

        Arguments:
          reader: the node.
          number: of the operand.
          change: the change on one mesh axis.
        """
        kind: NeedKind = "row"
        if reader.op == annotate_p.name:
            kind = "pin"
        elif reader.regions:
            entry = interface_of(reader).entries[number]
            kind = entry.kind if entry.kind in ("predicate", "carry") else "body"
        elif change.before < 0:
            return self._partial_reader(reader, number, change)
        row = self.chosen_row(reader, change.axis)
        return ConversionNeed(kind=kind, change=change, node=reader, number=number, row=row)

    def _partial_reader(self, reader: Node, number: int, change: AtomChange) -> ConversionNeed:
        """Why a reader needs a partial operand reduced.

        Arguments:
          reader: the node.
          number: of the operand.
          change: the change on one mesh axis.
        """

        def need(
            kind: NeedKind, row: Row | None = None, beside: PartnerRows | None = None
        ) -> ConversionNeed:
            rounds = kind == "rounding" and decode(change.before) == P
            return ConversionNeed(
                kind=kind,
                change=change,
                node=reader,
                number=number,
                row=self.chosen_row(reader, change.axis),
                partners=beside,
                result=encode(row.outs[0]) if row is not None and row.outs else None,
                allowing=allowing(self.program.graph, reader) if rounds else None,
            )

        if self._rows(reader, change.axis) is None:
            return need("no signature")
        rows, traits = self.takes(reader, number, change), traits_of(reader.op)
        if not rows:
            is_cast = traits.carries == "rounded" and traits.adapts
            return need("rounding" if is_cast else "not linear")
        values = self.program.typing.values
        made = {
            i: values[o][change.axis]
            for i, o in enumerate(reader.inputs)
            if i != number and isinstance(o, int) and not reader.is_barrier
        }
        for row in rows:
            # An operand that is made B, or partial itself, fits a row that takes it partial.
            if all(
                row.ins[i] == decode(code) or (code == 0 and not isinstance(row.ins[i], Split))
                for i, code in made.items()
            ):
                return need("choice", row)
        beside = PartnerRows(
            names=tuple(self.origins.operand(reader, i) for i in made),
            atoms=tuple(made.values()),
            rows=tuple(tuple(encode(row.ins[i]) for i in made) for row in rows),
        )
        return need("partners", rows[0], beside)

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
        blocker: Node | None = None
        if left.kind == "carry" and change.before < 0:
            carry = node.regions[region].inputs[left.entered(region)]
            blocker = self._blocker(carry, change)
        return ConversionNeed(
            kind=left.kind if left.kind in ("predicate", "carry") else "body",
            change=change,
            node=node,
            number=number,
            is_read=False,
            region=region,
            blocker=blocker,
        )

    def _blocker(self, value: int, change: AtomChange) -> Node | None:
        """The first node that reads a value and has no row for it partial."""
        for node in self.program.graph.walk():
            numbers = [i for i, o in enumerate(node.inputs) if o == value and rule_for(node.op)]
            if numbers and not any(self.takes(node, i, change) for i in numbers):
                return node
        return None

    def _output(self, number: int, change: AtomChange) -> ConversionNeed:
        demand = self.program.request.demand
        asked, tied = demand.outputs[number], dict(demand.tied).get(number)
        kind: NeedKind = "whole output" if change.before < 0 else "free output"
        donor: ValueName | None = None
        if asked is not None and asked[change.axis] is not None:
            kind = "pinned output"
        elif tied is not None:
            kind = "donated output"
            donor = self.origins.label(self.program.graph.inputs[tied])
        return ConversionNeed(kind=kind, change=change, number=number, is_read=False, donor=donor)
