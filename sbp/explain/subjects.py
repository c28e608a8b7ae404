"""The values that a user's name stands for: a variable, an input, an output or a source line; how
answers quote them; and the differences between two plans: costs, types of values, and conversions.

The programs of two plans need not be the same. Values are matched by the user's names and by the
text of their line, not by its number.
"""

import ast
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from sbp.annotations import annotate_p
from sbp.errors import SbpError, Span, file_name, nearest, position_text
from sbp.explain.names import Names
from sbp.infer.space import Code, Codes, from_type, local_bytes
from sbp.plan.program import Cost, Program, Send, sends
from sbp.source.reader import (
    Targets,
    expression_at,
    name_called,
    names_at,
    source_text,
    users_span,
)
from sbp.trace.graph import SCAN, Dataflow, Graph, Node, Operand, group_by, interface_of
from sbp.types import NdSbp

# ---- quotes -------------------------------------------------------------------------------------
# Source places, names of values, rows and changes of atoms, as answers quote them.


@dataclass(frozen=True, slots=True)
class SourcePlace:
    """A place in the user's source.

    Arguments:
      span: the expression; None in code that no line of the user stands for.
      gradient: whether the backward pass of that expression is meant.
      recomputed: whether it is meant where the backward pass repeats it.
    """

    span: Span | None
    gradient: bool = False
    recomputed: bool = False

    @classmethod
    def of(cls, node: Node) -> "SourcePlace":
        """The place of a node; for the work of a library, the user's line that calls it."""
        return cls(users_span(node), node.in_gradient, node.is_recomputed)


@dataclass(frozen=True, slots=True)
class ValueName:
    """The name of a value.

    Arguments:
      name: the user's name or expression, or a description.
      is_source: whether it is the user's own: a name or an expression.
    """

    name: str
    is_source: bool = True

    @property
    def is_variable(self) -> bool:
        """Whether the value is called by the name of a variable."""
        return self.is_source and self.name.isidentifier()

    def __str__(self) -> str:
        return f"`{self.name}`" if self.is_source else self.name


@dataclass(frozen=True, slots=True)
class AtomChange:
    """The change that a conversion makes on one mesh axis.

    Arguments:
      axis: position of the mesh axis.
      before, after: the codes.
    """

    axis: int
    before: Code
    after: Code


def changed_axes(source: Codes, target: Codes) -> list[int]:
    """Positions of the mesh axes on which two types differ."""
    return [
        k for k, (before, after) in enumerate(zip(source, target, strict=True)) if before != after
    ]


# ---- subjects -----------------------------------------------------------------------------------
# The values that a user's name stands for: a variable, an input, an output or a source line.


_LINE = re.compile(r"(?P<gradient>gradient of )?(?:line |(?P<file>.+?)(?::|, line ))?(?P<line>\d+)")


def kind_of(node: Node, graph: Graph) -> tuple[Any, ...]:
    """Equal for nodes that are traced from one place: from a line that runs in each turn of a
    Python loop, or that rematerialisation repeats.

    The operations inside a library's function are one line of the user; JAX's own traceback
    distinguishes them.
    """
    return (
        node.op,
        node.span,
        getattr(node.source_info, "traceback", None),
        node.in_gradient,
        len(node.inputs),
        tuple((tuple(graph.avals[v].shape), str(graph.avals[v].dtype)) for v in node.outputs),
    )


SubjectKind = Literal["input", "output", "annotation", "made"]
"""How a type can be asked of a value: at an input, an output, an annotation, or after the operation
that makes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Values that the program makes at one place and that have one meaning: one line of unrolled
    layers is one subject.

    Arguments:
      label: the user's name; the source text where it has no name.
      kind: how a type can be asked of it.
      values: value ids: first the forward pass in program order, then repeated values.
      frame: the user's expression; readers inside of it belong to the operation itself.
      position: of the input or output.
      gradient: whether it is a cotangent.
    """

    label: str
    kind: SubjectKind
    values: tuple[int, ...]
    frame: Span | None = None
    position: int = -1
    gradient: bool = False

    @property
    def place(self) -> SourcePlace | None:
        """Its place in the source; None for inputs and outputs."""
        return None if self.frame is None else SourcePlace(self.frame, self.gradient)


class Subjects:
    """The subjects of a program.

    Arguments:
      graph: the program.
      output_names: names of the results.

    Attributes:
      readers: for each value, the nodes that read it; the region's node for a result of its body,
          None for a program output.
      places: for each expression of the user, the nodes that are traced from it.
    """

    def __init__(self, graph: Graph, output_names: Sequence[str] = ()) -> None:
        self.graph, self.output_names = graph, tuple(output_names)
        self.readers, self.places = Dataflow(graph).readers, defaultdict[Span, list[Node]](list)
        for node in graph.walk():
            for span in dict.fromkeys(node.stack or (node.span,) if node.span else ()):
                self.places[span].append(node)

    # ---- look-up --------------------------------------------------------------------------------

    def find(self, name: str | int) -> list[Subject]:
        """The subjects of a name; the last one is meant.

        Arguments:
          name: a variable, an input's path, an output's path, a line number, "line 12",
            "file.py:12", "Cell In[3], line 2" or "gradient of line 12"; "input x" and "output x"
            where a variable has the same name.

        Raises:
          SbpError: when nothing has that name; the message has the nearest names.
        """
        text = str(name).strip()
        line = _LINE.fullmatch(text)
        boundary = (
            s
            for s in self.boundary()
            if text in (s.label, f"{s.kind} {s.label}", "result" * (s.kind == "output") + s.label)
        )
        found = self._on_line(line) if line else [*boundary, *self.variables(text)]
        if not found:
            raise SbpError(f"no value of the program is called {text!r}{self._nearest(text, line)}")
        return found

    def variables(self, name: str) -> list[Subject]:
        """The values assigned to a variable, by the order of the assignments."""
        spans = [s for s in self.places if any(name in g for g in names_at(s))]
        return sorted(
            distinct(s for s in self.innermost(spans) if s.label == name), key=lambda s: s.values[0]
        )

    def innermost(self, spans: Iterable[Span]) -> Iterator[Subject]:
        """The subjects of some expressions, those of inner ones first."""
        for span in sorted(spans, key=lambda s: len(self.places[s])):
            yield from self.subjects_of(span)

    def boundary(self) -> list[Subject]:
        """The inputs and the outputs of the program that have names."""
        sides: tuple[tuple[SubjectKind, Sequence[Operand], Sequence[str]], ...] = (
            ("input", self.graph.inputs, self.graph.input_names),
            ("output", self.graph.outputs, self.output_names),
        )
        return [
            Subject(label=name, kind=kind, values=(value,), position=number)
            for kind, values, names in sides
            for number, (value, name) in enumerate(zip(values, names, strict=False))
            if isinstance(value, int)
        ]

    def _on_line(self, asked: re.Match[str]) -> list[Subject]:
        """The subjects of a line. The last one is the subject that the line's number stands for:
        the forward result of its outermost expression."""
        number, file, gradient = int(asked["line"]), asked["file"], bool(asked["gradient"])
        at = [
            s
            for s in self.places
            if s.line <= number <= max(s.line, s.end_line)
            and any(f"/{p}".endswith(f"/{file or p}") for p in (s.file, file_name(s.file)))
        ]
        # An expression of several lines is meant by its later lines only where nothing begins
        # there.
        at = [s for s in at if s.line == number] or at
        files = sorted({file_name(s.file) for s in at})
        if len(files) > 1:
            raise SbpError(
                f"line {number} is in {' and in '.join(files)}; name one of them, such as"
                f' "{min(position_text(s.file, number) for s in at)}"'
            )
        return sorted(
            distinct(s for s in self.innermost(at) if s.gradient or not gradient),
            key=lambda s: (s.gradient == gradient, s.values[0]),
        )

    def _nearest(self, text: str, line: re.Match[str] | None) -> str:
        if line is None:
            named = self.innermost(s for s in self.places if names_at(s))
            variables = (s.label for s in named if s.label.isidentifier())
            known = {*self.graph.input_names, *self.output_names, *variables}
            return nearest(text, known, limit=12)
        numbers = sorted({s.line for s in self.places}, key=lambda n: abs(n - int(line["line"])))
        near = ", ".join(map(str, sorted(numbers[:3])))
        return f"; lines near it with values: {near}" if near else ""

    # ---- subjects of an expression --------------------------------------------------------------

    def subjects_of(self, at: Span) -> list[Subject]:
        """The values that leave an expression, in the order in which they are first made. Alike
        values are one subject."""
        nodes = self.places[at]
        inside = {n.id for n in nodes}
        made: dict[Any, list[int]] = defaultdict(list)
        repeated: dict[Any, list[int]] = defaultdict(list)
        makers: dict[Any, Node] = {}
        repeaters: dict[Any, Node] = {}
        for node in nodes:
            for number, value in enumerate(node.outputs):
                key = (*kind_of(node, self.graph), number)
                leaves = not node.is_barrier and any(
                    r is None or r.id not in inside for r in self.readers.get(value, ())
                )
                # In a Python loop only the last turn's value leaves the line: the next turn reads
                # the others there.
                if leaves or node.is_recomputed or not node.in_gradient:
                    (repeated if node.is_recomputed else made)[key].append(value)
                if leaves:
                    (repeaters if node.is_recomputed else makers).setdefault(key, node)
        # A gradient without the function's value needs no forward pass of a rematerialised block.
        for key in repeaters.keys() - makers.keys():
            made[key], makers[key] = repeated.pop(key), repeaters[key]
        kinds = {key: made[key] for key in sorted(makers, key=lambda k: min(made[k]))}
        labels = _labels(at, {key: makers[key] for key in kinds})
        return [
            Subject(
                label=labels[key],
                kind=(
                    "annotation"
                    if makers[key].op == annotate_p.name and makers[key].params["pin"] is not None
                    else "made"
                ),
                values=(*values, *repeated[key]),
                frame=at,
                gradient=makers[key].in_gradient,
            )
            for key, values in kinds.items()
        ]


def _labels(at: Span, makers: dict[Any, Node]) -> dict[Any, str]:
    """The variable that each value is assigned to; the source text for values without a
    variable. Results of `grad(f)(..)` and `value_and_grad(f)(..)` are gradients."""
    text, targets, expression = source_text(at, 44), names_at(at), expression_at(at)[0]
    labels = {key: text or node.name for key, node in makers.items()}
    forward = [k for k in makers if not makers[k].in_gradient]
    backward = [k for k in makers if makers[k].in_gradient]
    match name_called(expression.func) if isinstance(expression, ast.Call) else "":
        case "grad":
            groups = [backward]
        case "value_and_grad":
            groups = [forward[-1:], backward]
        case _:
            is_one = [len(t) for t in targets] == [1]
            groups = [forward[-1:]] if is_one else _results(forward, makers, targets)
    for names, group in zip(targets, groups, strict=False):
        for number, key in enumerate(group if names else ()):
            labels[key] = names[number] if len(names) == len(group) else names[0]
    return labels


def _results(kinds: list[Any], makers: dict[Any, Node], targets: Targets) -> list[list[Any]]:
    """The results that each target of an assignment takes, where one node makes all of them.

    Arguments:
      kinds: the keys of the results.
      makers: the node of each key.
      targets: the targets.
    """
    if not kinds or len({makers[k].id for k in kinds}) > 1:
        return []
    node = makers[kinds[0]]
    ends = [0, *itertools.accumulate(map(len, targets))]
    if node.op == SCAN and len(targets) == 2:
        ends = [0, len(interface_of(node).entering("carry")), len(node.outputs)]
    elif len(node.outputs) != ends[-1]:
        return []
    return [[k for k in kinds if start <= k[-1] < stop] for start, stop in itertools.pairwise(ends)]


def distinct(found: Iterable[Subject]) -> list[Subject]:
    """Each value once."""
    return [same[0] for same in group_by(found, lambda s: s.values).values()]


class Types:
    """The types of subjects of the program `asked` in a plan of it, or of an edit in which one of
    them is pinned.

    Arguments:
      program: the plan.
      asked: the program.
    """

    def __init__(self, program: Program, asked: Graph) -> None:
        self.program, self.asked = program, asked
        new = [
            n
            for n in program.graph.walk()
            if n.op == annotate_p.name and n.outputs[0] not in asked.avals
        ]
        # For each value that was pinned by the edit, the annotation's result.
        self.pinned = {n.inputs[0]: n.outputs[0] for n in reversed(new)}

    def type_of(self, subject: Subject) -> NdSbp:
        """The type of a subject. Values may be missing in the plan: a conversion that is not
        repeated takes with it the operations that only fed it."""
        if subject.kind == "output":
            return self.program.output_types[subject.position]
        typing, values = self.program.typing, set(subject.values)
        pinned = [self.pinned[v] for v in subject.values if v in self.pinned]
        if subject.kind == "made" and pinned:
            return typing.type_of(pinned[0])
        # Where the annotation was taken out, its operand is taken.
        present = [v for v in subject.values if v in typing.values] or [
            o
            for n in self.asked.walk()
            if not values.isdisjoint(n.outputs)
            for o in n.inputs
            if isinstance(o, int) and o in typing.values
        ]
        return typing.type_of(present[0])


# ---- differences --------------------------------------------------------------------------------


class ComparedValue(NamedTuple):
    """A value in one plan: its type, the bytes of one device's shard, and its line; None for inputs
    and outputs."""

    type: NdSbp
    bytes_per_device: float
    place: SourcePlace | None


class ValueDifference(NamedTuple):
    """A value whose type is not the same in both plans, as each plan has it."""

    name: str
    is_gradient: bool
    this: ComparedValue
    other: ComparedValue


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficDifference:
    """Collectives that the plans do not have alike.

    Arguments:
      send: the first of them.
      made: the operation that makes the value or that sends, with the user's expression; or the
        name of an argument.
      read: the operation that reads the value; empty where an operation sends itself.
      runs: executions per call, in each plan.
      bytes_per_device: bytes that one device sends per call, in each plan.
    """

    send: Send
    made: str
    read: str
    runs: tuple[int, int]
    bytes_per_device: tuple[float, float]

    @property
    def bytes_more(self) -> float:
        """Bytes that the other plan sends beyond this one."""
        return self.bytes_per_device[1] - self.bytes_per_device[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """All that differs between two plans; each list has most bytes first.

    Arguments:
      titles: the functions.
      costs: of a call of each.
      inputs, outputs, values: types that differ, by name.
      sent: collectives that differ.
      matched: number of values that both have, inputs and outputs included.
      unmatched: number of values that only one has, for each.
    """

    titles: tuple[str, str]
    costs: tuple[Cost, Cost]
    inputs: tuple[ValueDifference, ...]
    outputs: tuple[ValueDifference, ...]
    values: tuple[ValueDifference, ...]
    sent: tuple[TrafficDifference, ...]
    matched: int
    unmatched: tuple[int, int]

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return (
            not (self.inputs or self.outputs or self.values or self.sent)
            and not any(self.unmatched)
            and self.costs[0] == self.costs[1]
        )


def compare(
    titles: tuple[str, str],
    programs: tuple[Program, Program],
    output_names: tuple[tuple[str, ...], tuple[str, ...]],
) -> Difference:
    """The differences of another plan from this one.

    Arguments:
      titles: the functions' names.
      programs: this plan and the other.
      output_names: names of the results of each.
    """
    ours, theirs = map(_values, programs, output_names)
    return Difference(
        titles=titles,
        costs=(programs[0].cost, programs[1].cost),
        inputs=_differing("input", ours, theirs),
        outputs=_differing("output", ours, theirs),
        values=_differing("value", ours, theirs),
        sent=_traffic(*programs),
        matched=len(ours.keys() & theirs.keys()),
        unmatched=(len(ours.keys() - theirs.keys()), len(theirs.keys() - ours.keys())),
    )


ValueKey = tuple[str, str, bool, str, int]
"""The key by which values of two programs are matched: "input", "output" or "value", the user's
name or expression, whether it is the gradient of that, the function it stands in, and which of the
values with that label."""


def _values(program: Program, output_names: tuple[str, ...]) -> dict[ValueKey, ComparedValue]:
    """The inputs, the outputs, and the values that the expressions of a program make. Each value
    belongs to its innermost expression; values with one label are numbered in order."""
    graph, mesh, planned = program.request.graph, program.mesh, program.typing.values
    subjects, types = Subjects(graph, output_names), Types(program, graph)
    every = subjects.innermost(subjects.places)
    inner = distinct(s for s in every if not planned.keys().isdisjoint(s.values))
    found: dict[ValueKey, ComparedValue] = {}
    count: Counter[tuple[Any, ...]] = Counter()
    for s in (*subjects.boundary(), *sorted(inner, key=lambda s: s.values[0])):
        kind = s.kind if s.kind in ("input", "output") else "value"
        alike = kind, s.label, s.gradient, s.frame.function if s.frame else ""
        t, aval = types.type_of(s), graph.avals[s.values[0]]
        size = float(local_bytes(aval, from_type(t, mesh), mesh.sizes))
        found[*alike, count[alike]] = ComparedValue(t, size, s.place)
        count[alike] += 1
    return found


def _differing(
    kind: str, ours: Mapping[ValueKey, ComparedValue], theirs: Mapping[ValueKey, ComparedValue]
) -> tuple[ValueDifference, ...]:
    """Values of both plans whose types differ, most bytes first."""
    return tuple(
        sorted(
            (
                ValueDifference(*key[1:3], value, theirs[key])
                for key, value in ours.items()
                if key[0] == kind and key in theirs and theirs[key].type != value.type
            ),
            key=lambda d: -max(d.this.bytes_per_device, d.other.bytes_per_device),
        )
    )


# ---- traffic ------------------------------------------------------------------------------------


def _traffic(this: Program, other: Program) -> tuple[TrafficDifference, ...]:
    ours, theirs = _sends(this), _sends(other)
    found = [
        TrafficDifference(
            send=(ours.get(key) or theirs[key])[0],
            made=key[3],
            read=key[4],
            runs=(sum(s.runs for s in ours[key]), sum(s.runs for s in theirs[key])),
            bytes_per_device=(sum(s.bytes for s in ours[key]), sum(s.bytes for s in theirs[key])),
        )
        for key in dict.fromkeys((*ours, *theirs))
    ]
    differing = (d for d in found if len({*d.runs}) > 1 or d.bytes_more)
    return tuple(sorted(differing, key=lambda d: -abs(d.bytes_more)))


def _sends(program: Program) -> defaultdict[tuple[Any, ...], list[Send]]:
    """The collectives of a plan by what they may have in common with another plan's: kind, mesh
    axes, change, maker, reader, the passes of these two, and kernel."""
    names, found = Names(program.graph), defaultdict[tuple[Any, ...], list[Send]](list)
    for s in sends(program):
        value = names.value(s.planned.box.source.value) if s.planned else ""
        made = _end(s.maker) or (f"`{value}`" if value else "an argument of a body")
        read = (_end(s.reader) or "the end") if s.planned else ""
        passes = [n.backward if n else None for n in (s.maker, s.reader)]
        found[s.kind, s.mesh_axes, s.change, made, read, *passes, s.kernel].append(s)
    return found


def _end(node: Node | None) -> str:
    """An operation that makes or reads a value; empty for none."""
    text = source_text(node.span, 44).replace("`", "'") if node else ""
    return "" if node is None else f"{node.name} `{text}`" if text else node.name
