"""Helps that annotate what the line of a fault reads."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sbp.annotations import annotate_p
from sbp.errors import SourceEdit, Span
from sbp.explain.change import Change, Fault
from sbp.explain.edits import Placed, Placement, insert_pin
from sbp.infer.because import ReadBecause
from sbp.infer.constraints import System
from sbp.infer.conversions import allowed
from sbp.infer.flow import End
from sbp.infer.literals import state_literal
from sbp.infer.request import Request
from sbp.infer.space import Code, decode, encode
from sbp.signatures import rule_for, traits_of
from sbp.source.editing import converted, reads
from sbp.source.reader import SourceRead, first_argument, users_span
from sbp.trace.graph import Node, Operand


def axis_rows(request: Request, node: Node, position: int) -> Sequence[Any]:
    """The rows of a node on one mesh axis that the policy there allows.

    Arguments:
      request: the program.
      node: the node.
      position: the position of the mesh axis.
    """
    if rule_for(node.op) is None:
        return ()
    ins = [request.graph.aval(o) for o in node.inputs]
    outs = [request.graph.avals[o] for o in node.outputs]
    communicates = request.rules(node).policies[position] == "auto"
    table = request.caches.table(request.mesh, communicates=communicates)
    n = request.mesh.sizes[position]
    return table.axis_rows(node, ins, outs, n, node.id in request.rounding)


@dataclass(frozen=True, slots=True)
class Insertions:
    """Annotations before the line of a fault.

    Arguments:
      fault: the fault.
      base: the program without the pins of its other faults.
      node: the node at which the fault shows.
    """

    fault: Fault
    base: Request
    node: Node

    def changes(self) -> Iterator[Change]:
        """Annotations before the line: first on operands that do not fit a row which the other
        operands fit, then on values that enter the line."""
        node, names = self.node, self.fault.names
        if self.fault.found.sink[0].kind == "region":
            yield from self.at_region()
            return
        if node.span == users_span(node):
            rows = axis_rows(self.base, node, self.fault.position)
            wanted = [wrong for wrong in map(self.misfits, rows) if wrong]
            least = min(map(len, wanted), default=0)  # no more annotations than it takes
            for wrong in wanted:
                if len(wrong) == least:
                    yield from self.insertion(
                        {node.inputs[i]: (names.read(node, i), c) for i, c in wrong.items()}
                    )
        for value in self.entering():
            name = names.entering(value, node, alone=True)
            if name and reads(users_span(node), name):
                for code in self.codes(value):
                    yield from self.insertion({value: (SourceRead(name), code)})

    def misfits(self, row: Any) -> dict[int, Code]:
        """The operands that do not fit a row, with the codes that the row takes of them; empty
        where annotations cannot make it fit: with a partial value, or with two codes of one
        value."""
        policy = self.base.rules(self.node).policies[self.fault.position]
        codes = {i: encode(row.ins[i]) for i in self.fault.made}
        wrong = {
            i: codes[i]
            for i, made in self.fault.made.items()
            if not any(allowed(code, codes[i], policy) for code in made)
        }
        each = {(self.node.inputs[i], c) for i, c in wrong.items()}
        twice = len({value for value, _ in each}) < len(each)
        return {} if twice or min(wrong.values(), default=0) < 0 else wrong

    def at_region(self) -> Iterator[Change]:
        """Annotations of the values that enter a loop or a branch."""
        names = self.fault.names
        for c, wanted in zip(self.fault.found.sink, self.fault.found.wanted, strict=True):
            value: Operand = c.convert.value if c.convert else -1
            if not isinstance(value, int) or value not in self.node.inputs:
                continue
            maker, name = names.maker(value), names.value(value)
            read = SourceRead(name) if name else None
            entry = c.because.entry if isinstance(c.because, ReadBecause) else None
            if entry is not None and entry.kind == "predicate":
                read = first_argument(self.node)
                while maker and traits_of(maker.op).adapts and maker.span == self.node.span:
                    value = maker.inputs[0]
                    maker = names.maker(value)
            if isinstance(value, int):
                for code in (c for c in self.codes(value) if c in wanted):
                    yield from self.insertion({value: (read, code)})

    def entering(self) -> list[int]:
        """The values that bring the pinned types into the line, last ones first."""
        here, found = users_span(self.node), dict[int, None]()
        for c in reversed(self.fault.found.equations):
            if c.convert and c.node and users_span(c.node) == here:
                maker = self.fault.names.maker(c.convert.value)
                if maker is None or users_span(maker) != here:
                    found[c.convert.value] = None
        return list(found)

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
        line, found = users_span(self.node), list[_Annotated]()
        for value, (read, code) in values.items():
            one = self.annotated(value, read, code, line) if read and line else None
            if one is None:
                return
            found.append(one)
        edits = tuple(edit for one in found for edit in one.edits)
        # Statements before the line annotate local variables. The parameter of a lambda, and a
        # variable of an outer function, have their annotation where they are read.
        before = all(e.replacement.rstrip(" \t").endswith("\n") for e in edits)
        calls = [call for one in found for call in one.calls]
        if line:
            yield Change(
                text=f"{' and '.join(calls)} {'before' if before else 'at'} line {line.line}",
                edits=edits,
                make=functools.partial(_inserted, self.base, found, self.fault.position),
                without=frozenset((self.fault.axis, c) for one in found for c in one.reads),
                assumed=tuple(one.assumed for one in found if one.assumed)[:1],
                kind="conversion",
            )

    def annotated(
        self, value: Operand, read: SourceRead, code: Code, line: Span
    ) -> _Annotated | None:
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
        inline = pinned and pinned.line == line.line
        hidden = code > 0 and self.node.is_batched  # dims that the user does not see
        if reader is None or inline or hidden:
            return None
        if read.variable and names.denotes(read.code, reader, value, line) is False:
            return None
        number = reader.inputs.index(value)
        values = {n.inputs[number]: n for n in readers if _traced(n) == _traced(reader)}
        # A library may do the same to each leaf of a tree in one line: each leaf is annotated.
        others = {o: n for o, n in values.items() if o != value and read.variable}
        named = ((names.value(o), o, node) for o, node in others.items())
        variables = (
            SourceRead(name)
            for name, o, node in named
            if name.isidentifier() and names.denotes(name, node, o, line) is not False
        )
        every = tuple(dict.fromkeys((read, *variables)))
        edits = [converted(line, each, {axis: decode(code)}) for each in every]
        converts = [c.convert for c in self.fault.found.sink if c.convert]
        end = next((convert.target for convert in converts if convert.value == value), None)
        assumed = states_of(system, end, code) if end else ()
        if not all(edits) or (end and not assumed):
            return None
        call = f'replicate({{}}, "{axis}")' if code == 0 else f'split({{}}, {code - 1}, "{axis}")'
        placement = Placement(self.base.graph, names.dataflow, line, edits[0][0])
        return _Annotated(
            placed=placement.of((value, *others)),
            code=code,
            calls=tuple(f"sbp.{call.format(each.code)}" for each in every),
            edits=tuple(itertools.chain(*edits)),
            reads=tuple(
                c.name for c in system.constraints if c.convert and c.convert.value in values
            ),
            assumed=assumed,
        )


class _Annotated(NamedTuple):
    """A new annotation of one value: where it stands in the program, also for values that the line
    reads alike; its code; its calls, one for each variable of the line that means the same; its
    edits; the names of the constraints of its reads; the literals of the reader's states after
    it."""

    placed: Placed
    code: Code
    calls: tuple[str, ...]
    edits: tuple[SourceEdit, ...]
    reads: tuple[str, ...]
    assumed: tuple[str, ...]


def _inserted(base: Request, found: Sequence[_Annotated], position: int) -> Request | None:
    """The program with new annotations; None where a value has too few dims for its annotation.

    Arguments:
      base: the program.
      found: the annotations.
      position: the position of their mesh axis.
    """
    edited: Request | None = base
    for one in found:
        edited = edited and insert_pin(edited, one.placed, position, one.code)
    return edited


def states_of(system: System, end: End, code: Code) -> tuple[str, ...]:
    """The literals of the states in which an end has a code.

    Arguments:
      system: the constraints of a mesh axis.
      end: the end of a value.
      code: the code.
    """
    return tuple(
        state_literal(end.variable, i)
        for i, s in enumerate(system.variables[end.variable].states)
        if s[end.column] == code
    )


def _traced(node: Node) -> tuple[Any, ...]:
    """Equal for nodes of one line of the user that is traced more than once: in unrolled layers, in
    rematerialisation."""
    return node.op, node.span or node.id, node.in_gradient, len(node.inputs)
