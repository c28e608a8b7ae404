"""Where the atom of a value comes from on one mesh axis: back through the chosen rows to a pin, an
input or an operation without operands."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field, replace
from typing import Literal

from sbp.annotations import Pin, annotate_p
from sbp.explain.names import Names
from sbp.explain.subjects import AxisRow, SourcePlace, ValueName
from sbp.infer.pins import pinned_codes
from sbp.infer.space import Code
from sbp.infer.typing import Typing
from sbp.source.reader import expression_at, source_text
from sbp.trace.graph import Graph, Node, Operand
from sbp.trace.regions import Entry, interface_of

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
    "more",
]

ENDS: frozenset[LinkKind] = frozenset(
    {"annotation", "input", "free input", "output", "new", "more"}
)
"""Links behind which nothing decides the atom but the user or the cost, or links are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Partner:
    """Another operand of a row.

    Arguments:
      name: the operand.
      atom: its code on the mesh axis.
      end: the last link of its chain.
    """

    name: ValueName
    atom: Code
    end: Link


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One step of a chain, from the value of the question back to the origin of its atom.

    Arguments:
      kind: how the value got the atom. "annotation", "input" and "output" are pins; "free .." are
        left to inference; "donated output": it takes the buffer of an input; "row": a chosen row
        makes it from operands, "new": from none; "converted": for the node, "converted result":
        where the body returns it; "carry": a loop's carry as its body reads it, "body input":
        another input of a body; "body carry" and "body result": what a body returns; "more": links
        are left out here.
      subject: the value.
      atom: its code on the mesh axis.
      node: the annotation, operation or region; None at the boundary.
      row: of an operation, its row on the mesh axis.
      kernel: the kernel that the row runs; empty for the primitive itself.
      partners: of an operation, other operands that decide the atom.
      made: of a conversion, the code before it.
      donor: of a donated output, the input.
      left_out: of the kind "more", the number of values without links.
      passes: whether the row hands on the atom of one operand.
    """

    kind: LinkKind
    subject: ValueName
    atom: Code
    node: Node | None = None
    row: AxisRow | None = None
    kernel: str = ""
    partners: tuple[Partner, ...] = ()
    made: Code = 0
    donor: ValueName | None = None
    left_out: int = 0
    passes: bool = False

    @property
    def place(self) -> SourcePlace | None:
        """The line; None at the boundary."""
        return None if self.node is None else SourcePlace.of(self.node)


@dataclass(frozen=True, slots=True)
class Origins:
    """Follows atoms back through a typed program.

    Arguments:
      typing: the program with its types.
      names: of the program's values.
      lasts: the last links of chains that have been followed, by value and position of the mesh
          axis.
    """

    typing: Typing
    names: Names
    lasts: dict[tuple[int, int], Link] = field(default_factory=dict)

    @classmethod
    def of(cls, typing: Typing) -> Origins:
        """The origins of a typed program."""
        return cls(typing, Names.of(typing.graph))

    @property
    def fed(self) -> dict[int, tuple[Node, Entry]]:
        """For each input of a body, the region and the entry that feeds the input."""
        return self.names.dataflow.entries

    def is_carry(self, operand: Operand) -> bool:
        """Whether a value is a loop's carry as its body reads it."""
        fed = self.fed.get(operand) if isinstance(operand, int) else None
        return fed is not None and fed[1].kind == "carry"

    @property
    def graph(self) -> Graph:
        """The program."""
        return self.typing.graph

    def chain(self, value: int, position: int, *, most: int) -> tuple[Link, ...]:
        """The links of a value, its own first.

        Arguments:
          value: the value.
          position: the position of the mesh axis.
          most: the most links before a link of kind "more" and the last link end the chain.
        """
        links: list[Link] = []
        at: int | None = value
        while at is not None:
            if len(links) > most and self._lead(at, position) is not None:
                atom = self.typing.values[at][position]
                left_out = self._steps_to_end(at, position)
                more = Link(kind="more", subject=self.label(at), atom=atom, left_out=left_out)
                return (*links, more, self.last(at, position))
            links += self._links(at, position)
            at = self._lead(at, position)
        return tuple(links)

    def _steps_to_end(self, value: int, position: int) -> int:
        """The number of values between a value, which is counted, and the last of its chain."""
        steps, at = 0, value
        while (lead := self._lead(at, position)) is not None:
            steps, at = steps + 1, lead
        return steps

    def last(self, value: int, position: int) -> Link:
        """The last link of a value's chain. Last links are cached, since rows quote the origins of
        their other operands."""
        passed: list[int] = []
        at = value
        while (at, position) not in self.lasts:
            passed.append(at)
            lead = self._lead(at, position)
            if lead is None:
                self.lasts[at, position] = self._links(at, position)[-1]
            else:
                at = lead
        found = self.lasts[at, position]
        self.lasts.update(((v, position), found) for v in passed)
        return found

    # ---- names ----------------------------------------------------------------------------------

    def label(self, value: Operand) -> ValueName:
        """The user's name of a value; its expression when it has no name."""
        if not isinstance(value, int):
            return ValueName("a constant", is_source=False)
        name = self.names.value(value)
        if name:
            return ValueName(name)
        maker = self.names.makers.get(value)
        if maker is None:
            return self._argument(value)
        text = source_text(maker.span, 44)
        if maker.op == annotate_p.name:  # its line is the annotation: the annotated expression
            expression, _ = expression_at(maker.span)
            text = (
                ast.unparse(expression.args[0])
                if isinstance(expression, ast.Call) and expression.args
                else text
            )
        text = text.replace("`", "'")
        return ValueName(text) if text else ValueName(maker.name, is_source=False)

    def operand(self, node: Node, number: int) -> ValueName:
        """The name of an operand at the line of its node."""
        text = self.names.operand(node, number)
        return ValueName(text, is_source=False) if text else self.label(node.inputs[number])

    def _argument(self, value: int) -> ValueName:
        """A description of an input of the program or of a body that has no name."""
        if value not in self.fed:
            return ValueName("an input", is_source=False)
        node, entry = self.fed[value]
        if entry.kind == "carry":
            return ValueName(f"the carry of {node.op}", is_source=False)
        outside = self.label(node.inputs[entry.operand])
        more = entry.kind == "slice"
        return replace(outside, slices=outside.slices + more)

    # ---- links ----------------------------------------------------------------------------------

    def _lead(self, value: int, k: int) -> int | None:
        """The value that a value's atom comes from; the program always makes it before that
        value."""
        if value in self.names.inputs:
            return None
        if value in self.fed:
            node, entry = self.fed[value]
            return _value(node.inputs[entry.operand])
        node = self.names.makers[value]
        if node.op == annotate_p.name:
            return None if self._is_pinned(node, k) else _value(node.inputs[0])
        if node.regions:
            left = interface_of(node).exit_to(node.outputs.index(value))
            return _value(node.regions[left.region].outputs[left.output])
        lead = self._lead_of_row(node, self.typing.values[value][k], k)
        return None if lead is None else _value(node.inputs[lead])

    def _links(self, value: int, k: int) -> list[Link]:
        """The links of one value."""
        code, name = self.typing.values[value][k], self.label(value)
        number = self.names.inputs.get(value)
        if number is not None:
            wanted = self.typing.request.demand.inputs[number]
            pinned = wanted is not None and wanted[k] is not None
            return [Link(kind="input" if pinned else "free input", subject=name, atom=code)]
        if value in self.fed:
            return self._body_input(value, code, k)
        node = self.names.makers[value]
        if node.op == annotate_p.name and self._is_pinned(node, k):
            return [Link(kind="annotation", subject=name, atom=code, node=node)]
        if node.op == annotate_p.name:
            free = Link(kind="free annotation", subject=name, atom=code, node=node, passes=True)
            return [free, *self._converted(node, 0, code, k)]
        if node.regions:
            return self._region_output(node, value, code, k)
        return self._row(node, value, code, k)

    def _is_pinned(self, node: Node, k: int) -> bool:
        """Whether an annotation pins a mesh axis."""
        pin: Pin | None = node.params["pin"]
        return pin is not None and pinned_codes(pin, self.typing.mesh)[k] is not None

    def _leads(self, node: Node, code: Code, k: int) -> list[int]:
        """The numbers of the operands that a result's atom comes from.

        Arguments:
          node: the node.
          code: the result's code.
          k: position of the mesh axis.
        """
        ins = [t[k] for t in self.typing.rows[node.id].ins]
        leads = [i for i, c in enumerate(ins) if c and isinstance(node.inputs[i], int)]
        if not leads and not code:
            leads = [i for i, o in enumerate(node.inputs) if isinstance(o, int)]
        # The operand that a loop adds explains more than the carry to which it is added.
        return sorted(leads, key=lambda i: self.is_carry(node.inputs[i]))

    def _lead_of_row(self, node: Node, code: Code, k: int) -> int | None:
        """The number of the operand with which a chain goes on.

        Arguments:
          node: the node.
          code: the code of its result.
          k: position of the mesh axis.
        """
        ins, leads = [t[k] for t in self.typing.rows[node.id].ins], self._leads(node, code, k)
        if code or not leads:
            return leads[0] if leads else None
        # A conversion explains more than an operand that is B as it was made.
        return next((i for i in leads if self._is_converted(node, i, ins[i], k)), leads[0])

    def _row(self, node: Node, value: int, code: Code, k: int) -> list[Link]:
        chosen = self.typing.rows[node.id]
        row = AxisRow.of(chosen.ins, chosen.outs, k)
        leads = self._leads(node, code, k)
        passes = len({row.ins[i] for i in leads}) == 1 and all(row.ins[i] == code for i in leads)
        partners = tuple(
            self._partner(node, i, row.ins[i], k)
            for i in (leads[1:3] if code else ())
            if node.inputs[i] != node.inputs[leads[0]]
            and not self.is_carry(node.inputs[i])
            and not self._is_inner(node, i)
        )
        kernel = chosen.kernels[k] if chosen.kernels else ""
        link = Link(
            kind="row" if leads else "new",
            subject=self.label(value),
            atom=code,
            node=node,
            row=row,
            kernel="" if kernel == "local" else kernel,
            partners=partners,
            passes=passes and not partners,
        )
        lead = self._lead_of_row(node, code, k)
        return [link] if lead is None else [link, *self._converted(node, lead, row.ins[lead], k)]

    def _partner(self, node: Node, number: int, code: Code, k: int) -> Partner:
        operand = node.inputs[number]
        assert isinstance(operand, int)
        return Partner(name=self.label(operand), atom=code, end=self.last(operand, k))

    def _is_inner(self, node: Node, number: int) -> bool:
        """Whether an operand is made within the same expression, inside a library's function."""
        operand = node.inputs[number]
        maker = self.names.makers.get(operand) if isinstance(operand, int) else None
        return maker is not None and maker.span == node.span

    def _is_converted(self, node: Node, number: int, wanted: Code, k: int) -> bool:
        operand = node.inputs[number]
        return isinstance(operand, int) and self.typing.values[operand][k] != wanted

    def _converted(self, node: Node, number: int, wanted: Code, k: int) -> list[Link]:
        """The conversion of an operand before a node; empty where the axis has none.

        Arguments:
          node: the node.
          number: of the operand.
          wanted: the code that the node takes.
          k: position of the mesh axis.
        """
        operand = node.inputs[number]
        if not isinstance(operand, int) or not self._is_converted(node, number, wanted, k):
            return []
        made, name = self.typing.values[operand][k], self.label(operand)
        return [Link(kind="converted", subject=name, atom=wanted, node=node, made=made)]

    def _body_input(self, value: int, code: Code, k: int) -> list[Link]:
        node, entry = self.fed[value]
        carried = entry.kind == "carry"
        link = Link(
            kind="carry" if carried else "body input",
            subject=self.label(value),
            atom=code,
            node=node,
            passes=not carried,
        )
        wanted = self.typing.rows[node.id].ins[entry.operand][k]
        return [link, *self._converted(node, entry.operand, wanted, k)]

    def _region_output(self, node: Node, value: int, code: Code, k: int) -> list[Link]:
        left = interface_of(node).exit_to(node.outputs.index(value))
        operand = node.regions[left.region].outputs[left.output]
        returned = self.typing.region_outputs[node.id, left.region][left.output][k]
        link = Link(
            kind="body carry" if left.kind == "carry" else "body result",
            subject=self.label(value),
            atom=code,
            node=node,
            passes=True,
        )
        made = self.typing.values[operand][k] if isinstance(operand, int) else returned
        if made == returned:
            return [link]
        name = self.label(operand)
        converted = Link(kind="converted result", subject=name, atom=returned, node=node, made=made)
        return [link, converted]


def without_passing(links: tuple[Link, ...]) -> tuple[Link, ...]:
    """A chain without links that only hand on the atom of an operand without a name, such as those
    inside a library's function."""
    kept: list[Link] = []
    for number, link in enumerate(links):
        same = number and link.passes and link.kind not in ENDS and link.atom == kept[-1].atom
        if same and (not link.subject.is_variable or link.subject == kept[-1].subject):
            continue
        kept.append(link)
    return tuple(kept)


def _value(operand: Operand) -> int | None:
    return operand if isinstance(operand, int) else None
