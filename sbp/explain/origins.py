"""Where the atom of a value comes from on one mesh axis: back through the chosen rows to a pin, an
input or what is made anew."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import Literal

from sbp.annotations import Pin
from sbp.explain.names import Names
from sbp.infer.problem import pinned_codes
from sbp.infer.space import Code, decode
from sbp.infer.typing import Typing
from sbp.plan.text import node_place
from sbp.source.reader import expression_at, source_text
from sbp.trace.graph import Graph, Node, Operand
from sbp.trace.regions import Entry, interface_of

MAX_LINKS = 200
"""Rows of a chain that are told; of a longer one the last is told, too."""

LinkKind = Literal[
    "annotation", "input", "free input", "tied", "row", "converted", "carry", "new", "more"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One step of a chain, from the value that is asked about back to its origin.

    Arguments:
      kind: how the atom came about.
      subject: the value, as the user calls it.
      atom: its code on the mesh axis.
      because: the pin, row or conversion, in words.
      passes: whether the row only hands the atom of one operand on.
      where: the line.
    """

    kind: LinkKind
    subject: str
    atom: Code
    because: str
    where: str = ""
    passes: bool = False

    @property
    def ends(self) -> bool:
        """Whether the chain ends here, nothing decides this atom but the user or the cost; or
        whether links are left out."""
        return self.kind in ("annotation", "input", "free input", "new", "more")


@dataclass(frozen=True, slots=True)
class Origins:
    """Follows atoms back through a typed program.

    Arguments:
      typing: the program with its types.
      names: of the program's values.
      holders: for the inputs of bodies: the node, and the entry that feeds the input.
      carries: those of them that a loop carries.
      lasts: the last links of chains that have been followed, by value and position of the mesh
          axis.
    """

    typing: Typing
    names: Names
    holders: dict[int, tuple[Node, Entry]]
    carries: frozenset[int]
    lasts: dict[tuple[int, int], Link] = field(default_factory=dict)

    @classmethod
    def of(cls, typing: Typing) -> Origins:
        """Prepares a program: who holds the regions whose inputs are values."""
        holders: dict[int, tuple[Node, Entry]] = {}
        for node in typing.graph.walk():
            for region, fed in zip(node.regions, interface_of(node).fed, strict=True):
                holders.update({v: (node, e) for v, e in zip(region.inputs, fed, strict=True)})
        carries = frozenset(v for v, (_, entry) in holders.items() if entry.kind == "carry")
        return cls(typing, Names.of(typing.graph), holders, carries)

    @property
    def graph(self) -> Graph:
        """The program."""
        return self.typing.graph

    def chain(self, value: int, position: int) -> tuple[Link, ...]:
        """The links of a value on the mesh axis at a position, its own first."""
        links: list[Link] = []
        at: int | None = value
        while at is not None:
            if len(links) > MAX_LINKS and self._lead(at, position) is not None:
                more = Link(
                    kind="more",
                    subject=self.label(at),
                    atom=self.typing.values[at][position],
                    because="and so on",
                )
                return (*links, more, self.last(at, position))
            links += self._links(at, position)
            at = self._lead(at, position)
        return tuple(links)

    def last(self, value: int, position: int) -> Link:
        """The last link of a value's chain. Rows tell of their other operands where those come
        from: so it is kept."""
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

    def label(self, value: Operand) -> str:
        """What the user calls a value; its expression when it has no name."""
        if not isinstance(value, int):
            return "a constant"
        name = self.names.value(value)
        if name:
            return f"`{name}`"
        maker = self.names.makers.get(value)
        if maker is None:
            return self._argument(value)
        text = source_text(maker.span, 44)
        if maker.op == "sbp_annotate":  # a helper's call of it: what it annotates
            expression, _ = expression_at(maker.span)
            text = (
                ast.unparse(expression.args[0])
                if isinstance(expression, ast.Call) and expression.args
                else text
            )
        text = text.replace("`", "'")
        return f"`{text}`" if text else maker.op

    def _argument(self, value: int) -> str:
        if value not in self.holders:
            return "an input"
        node, entry = self.holders[value]
        if entry.kind == "carry":
            return f"the carry of {node.op}"
        outside = self.label(node.inputs[entry.operand])
        return f"a slice of {outside}" if entry.kind == "slice" else outside

    def _lead(self, value: int, k: int) -> int | None:
        """The value whose atom leads to that of a value; always one that the program makes before
        it."""
        if value in self.names.inputs:
            return None
        if value in self.holders:
            node, entry = self.holders[value]
            return _value(node.inputs[entry.operand])
        node = self.names.makers[value]
        if node.op == "sbp_annotate":
            return None if self._is_pinned(node, k) else _value(node.inputs[0])
        if node.regions:
            left = interface_of(node).exit_to(node.outputs.index(value))
            return _value(node.regions[left.region].outputs[left.output])
        lead = self._lead_of_row(node, self.typing.values[value][k], k)
        return None if lead is None else _value(node.inputs[lead])

    def _links(self, value: int, k: int) -> list[Link]:
        """The links of one value."""
        code = self.typing.values[value][k]
        number = self.names.inputs.get(value)
        if number is not None:
            return [self._input(number, value, code, k)]
        if value in self.holders:
            return self._body_input(value, code, k)
        node = self.names.makers[value]
        if node.op == "sbp_annotate":
            where = node_place(node)
            if self._is_pinned(node, k):
                text = (
                    f"pinned by `{source_text(node.span, 60)}`"
                    if node.span
                    else "pinned by an annotation"
                )
                return [
                    Link(
                        kind="annotation",
                        subject=self.label(value),
                        atom=code,
                        because=text,
                        where=where,
                    )
                ]
            free = Link(
                kind="row",
                subject=self.label(value),
                atom=code,
                because="left free by the annotation",
                where=where,
                passes=True,
            )
            return [free, *self._converted(node, 0, code, k)]
        if node.regions:
            return self._region_output(node, value, code, k)
        return self._row(node, value, code, k)

    def _is_pinned(self, node: Node, k: int) -> bool:
        """Whether an annotation pins a mesh axis."""
        pin: Pin | None = node.params["pin"]
        return pin is not None and pinned_codes(pin, self.typing.mesh)[k] is not None

    def _input(self, number: int, value: int, code: Code, k: int) -> Link:
        wanted = self.typing.request.demand.inputs[number]
        name = self.label(value)
        if wanted is not None and wanted[k] is not None:
            return Link(kind="input", subject=name, atom=code, because="pinned by the input's type")
        return Link(
            kind="free input", subject=name, atom=code, because="an input whose type is left free"
        )

    def _leads(self, node: Node, code: Code, k: int) -> list[int]:
        """The numbers of the operands that a result's atom comes from."""
        ins = [t[k] for t in self.typing.rows[node.id].ins]
        leads = [i for i, c in enumerate(ins) if c and isinstance(node.inputs[i], int)]
        if not leads and not code:
            leads = [i for i, o in enumerate(node.inputs) if isinstance(o, int)]
        return sorted(
            leads, key=lambda i: node.inputs[i] in self.carries
        )  # what a loop adds says more than what it adds to

    def _lead_of_row(self, node: Node, code: Code, k: int) -> int | None:
        """The number of the operand that a chain goes on with."""
        ins, leads = [t[k] for t in self.typing.rows[node.id].ins], self._leads(node, code, k)
        if code or not leads:
            return leads[0] if leads else None
        # A conversion says more than an operand that is whole as it was made.
        return next((i for i in leads if self._is_converted(node, i, ins[i], k)), leads[0])

    def _row(self, node: Node, value: int, code: Code, k: int) -> list[Link]:
        row = self.typing.rows[node.id]
        ins, outs = [t[k] for t in row.ins], [t[k] for t in row.outs]
        leads = self._leads(node, code, k)
        passes = len({ins[i] for i in leads}) == 1 and all(ins[i] == code for i in leads)
        kernel = row.kernels[k] if row.kernels else ""
        by = f" by its kernel {kernel!r}" if kernel not in ("", "local") else ""
        text = (
            f"{node.op}: {atoms(ins)} -> {atoms(outs)}{by}"
            if ins
            else f"{node.op} makes it {atoms(outs)}"
        )
        more = [
            f"{self.label(node.inputs[i])} is {self._end(node, i, k)}"
            for i in (leads[1:3] if code else ())
            if node.inputs[i] != node.inputs[leads[0]]
            and node.inputs[i] not in self.carries
            and not self._is_inner(node, i)
        ]
        if more:
            text += "; " + ", ".join(more)
        link = Link(
            kind="row" if leads else "new",
            subject=self.label(value),
            atom=code,
            because=text,
            where=node_place(node),
            passes=passes and not more,
        )
        lead = self._lead_of_row(node, code, k)
        return [link] if lead is None else [link, *self._converted(node, lead, ins[lead], k)]

    def _is_inner(self, node: Node, number: int) -> bool:
        """Whether an operand is made within the same expression, inside a library's function."""
        operand = node.inputs[number]
        maker = self.names.makers.get(operand) if isinstance(operand, int) else None
        return maker is not None and maker.span == node.span

    def _end(self, node: Node, number: int, k: int) -> str:
        """In short, what an operand beside the first is on the axis, and where that chain ends."""
        operand = node.inputs[number]
        assert isinstance(operand, int)
        here = repr(decode(self.typing.rows[node.id].ins[number][k]))
        end = self.last(operand, k)
        if end.kind == "annotation":
            return f"{here}, pinned {end.where}"
        if end.kind not in ("input", "free input"):
            return here
        return (
            f"{here}, an input"
            if end.subject == self.label(operand)
            else f"{here}, from {end.subject}"
        )

    def _is_converted(self, node: Node, number: int, wanted: Code, k: int) -> bool:
        operand = node.inputs[number]
        return isinstance(operand, int) and self.typing.values[operand][k] != wanted

    def _converted(self, node: Node, number: int, wanted: Code, k: int) -> list[Link]:
        """The conversion of an operand before a node, if there is one on the axis."""
        operand = node.inputs[number]
        if not isinstance(operand, int) or not self._is_converted(node, number, wanted, k):
            return []
        made = self.typing.values[operand][k]
        text = f"made as {decode(made)!r} and converted for {node.op}"
        return [
            Link(
                kind="converted",
                subject=self.label(operand),
                atom=wanted,
                because=text,
                where=node_place(node),
            )
        ]

    def _body_input(self, value: int, code: Code, k: int) -> list[Link]:
        node, entry = self.holders[value]
        outer, kept = entry.operand, entry.kind == "carry"
        text = (
            "one type over all trips, chosen with what the body returns"
            if kept
            else f"as it comes into the body of {node.op}"
        )
        link = Link(
            kind="carry",
            subject=self.label(value),
            atom=code,
            because=text,
            where=node_place(node),
            passes=not kept,
        )
        return [link, *self._converted(node, outer, self.typing.rows[node.id].ins[outer][k], k)]

    def _region_output(self, node: Node, value: int, code: Code, k: int) -> list[Link]:
        left = interface_of(node).exit_to(node.outputs.index(value))
        operand = node.regions[left.region].outputs[left.output]
        returned = self.typing.region_outputs[node.id, left.region][left.output][k]
        does = "carries" if left.kind == "carry" else "returns"
        text = f"what the body of {node.op} {does}"
        links = [
            Link(
                kind="carry",
                subject=self.label(value),
                atom=code,
                because=text,
                where=node_place(node),
                passes=True,
            )
        ]
        if isinstance(operand, int) and self.typing.values[operand][k] != returned:
            text = (
                f"made as {decode(self.typing.values[operand][k])!r} and converted where the body"
                " returns it"
            )
            links.append(
                Link(
                    kind="converted",
                    subject=self.label(operand),
                    atom=returned,
                    because=text,
                    where=node_place(node),
                )
            )
        return links


def atoms(codes: list[Code]) -> str:
    """Codes in notation.

    >>> atoms([0, 2, -1])
    'B, S(1), P(sum)'
    """
    return ", ".join(repr(decode(c)) for c in codes)


def shown(links: tuple[Link, ...]) -> tuple[Link, ...]:
    """A chain without the operations that only hand an unnamed operand's atom on, inner ones of a
    library's function included."""
    kept: list[Link] = []
    for number, link in enumerate(links):
        same = number and link.passes and not link.ends and link.atom == kept[-1].atom
        if same and (not _named(link) or link.subject == kept[-1].subject):
            continue
        kept.append(link)
    return tuple(kept)


def _named(link: Link) -> bool:
    return link.subject.strip("`").isidentifier() and link.subject.startswith("`")


def _value(operand: Operand) -> int | None:
    return operand if isinstance(operand, int) else None
