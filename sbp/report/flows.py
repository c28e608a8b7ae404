"""Program -> flows: the program as a graph of the user's lines, and a picture of it: each line with
the type that it makes, its gradient beside it, and the collectives where they run.

A line is one place however often it runs: the layers of a loop, a scan or a module used many times
fold into it, with their count.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

from sbp.errors import (
    SbpError,
    Span,
    bytes_text,
    counted,
    file_name,
    nearest,
    position_text,
)
from sbp.infer.space import to_type
from sbp.plan.program import PHASES, Phase, Phases, Program, Send, sends
from sbp.report import wording
from sbp.report.parts import (
    CELL,
    COSTLY,
    PARTIAL,
    SPLIT,
    WHOLE,
    Board,
    Ink,
    Picture,
    Table,
    picture,
    sentences,
    table_of,
)
from sbp.source.reader import line_text, shorten, users_span
from sbp.trace.collectives import SHARD_MAP
from sbp.trace.graph import CONTROL_FLOW, Dataflow, Node, group_by, nodes_with_runs
from sbp.trace.scopes import scope_names
from sbp.types import Atom, Broadcast, NdSbp, Split, Unreduced

# ---- flows --------------------------------------------------------------------------------------


Grouping = Literal["line", "function", "scope"]
GROUPINGS: tuple[Grouping, ...] = ("line", "function", "scope")
TEXT_LIMIT = 52
"""Characters of a place's text."""

MOST_PLACES = 90
"""Places above which a picture takes functions or scopes for lines."""

Moment = Phase | Literal["returned"]
MOMENTS: tuple[Moment, ...] = (*PHASES, "returned")
"""The passes of a step; last the conversions of results."""

Key = tuple[str, Phase]


@dataclass(slots=True)
class PlaceName:
    """The name of a line, function or scope of the user.

    Attributes:
      name: its key; no other place has the same.
      text: the text of the source line, or the name of the function or scope.
      where: file and line.
      brief: the same without folders.
    """

    name: str
    text: str
    where: str = ""
    brief: str = ""


@dataclass(slots=True, kw_only=True)
class Stop(PlaceName):
    """A place in the program in one phase.

    Attributes:
      phase: forward, backward or update; `returned` for the results.
      runs: how often it runs per call, by the trips of loops and the turns of Python's loops.
      operations: how many there are, each counted once.
      type: of its largest result that another place reads; None where there is none.
      born: whether a value becomes partial here.
      sends: its collectives (`sbp.plan.program.Phases.place`).
    """

    phase: Moment
    runs: int = 1
    operations: int = 0
    type: NdSbp | None = None
    born: bool = False
    sends: list[Send] = field(default_factory=list[Send])

    @property
    def bytes(self) -> float:
        """Bytes that one device sends here per call."""
        return sum(send.bytes for send in self.sends)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueFlow:
    """Values that one place makes and another one reads.

    Attributes:
      source, target: positions among the stops; -1 for the arguments, and for the results.
      type: of the largest of them as it is made.
      size: bytes of that one, whole.
    """

    source: int
    target: int
    type: NdSbp
    size: float


class ProgramFlows:
    """The program as places and what flows between them.

    Arguments:
      program: the plan.
      grouping: what a place is: a line, a function, or a scope of `jax.named_scope` and modules.

    Attributes:
      stops: in program order.
      flows: between them.
      results: the place of the collectives that convert results.
      called: bytes that one device sends per call. Of a `cond`, the branch that sends most counts;
        the places have all branches.
      bytes: bytes that one device sends at all places.
      places: the stops that send something, by the names of their places.
      costliest: the place that most bytes are sent for; empty where nothing is sent.
    """

    def __init__(self, program: Program, grouping: Grouping = "line") -> None:
        phases, stops, at = Phases(program.graph).of, dict[Key, Stop](), dict[int, Key]()
        sent = group_by(
            sends(program), lambda s: None if s.is_returned or not s.node else s.node.id
        )
        copies = defaultdict[Key, dict[Span | None, Counter[str]]](lambda: defaultdict(Counter))
        for node, runs in nodes_with_runs(program.graph):
            named = place_name(node, grouping)
            for send in sent.get(node.id, ()):
                _stop(stops, named, send.phase).sends.append(send)
            if node.op not in CONTROL_FLOW:
                key = at[node.id] = named.name, phases[node.id]
                copies[key][node.span][node.op] += runs
                _stop(stops, named, key[1]).born |= _begins_partial(program, node)
        # An expression that runs once may have several operations of one name, which a library
        # makes, but as a rule one that is alone. A gradient runs as often as its line.
        for key, counts in copies.items():
            stops[key].operations = sum(map(len, counts.values()))
            stops[key].runs = max(min(count.values()) for count in counts.values())
        for (name, phase), stop in stops.items():
            stop.sends = merge(stop.sends)
            if phase == "backward" and (name, "forward") in stops:
                stop.runs = stops[name, "forward"].runs
        numbers = {key: number for number, key in enumerate(stops)}
        self.flows = _flows(program, {node: numbers[key] for node, key in at.items()})
        self.stops = tuple(stops.values())
        for source, leaving in group_by(self.flows, lambda flow: flow.source).items():
            if source >= 0:
                self.stops[source].type = max(reversed(leaving), key=lambda flow: flow.size).type
        self.results = Stop(
            name="<results>", text="results", phase="returned", sends=merge(sent.get(None, ()))
        )
        self.called, self.grouping = program.cost.bytes_per_device, grouping
        sending = [stop for stop in (*self.stops, self.results) if stop.bytes]
        self.bytes = sum(stop.bytes for stop in sending)
        self.places = group_by(sending, lambda stop: stop.name)
        self.costliest = max(
            self.places.values(), key=lambda stops: sum(s.bytes for s in stops), default=[]
        )

    def sums(self, row: Callable[[Stop], str]) -> dict[tuple[str, str], float]:
        """Bytes by mesh axes and a property of stops."""
        sent = (
            (send.axes, row(stop), send.bytes)
            for stop in (*self.stops, self.results)
            for send in (stop.sends if stop.bytes else ())
        )
        return {
            at: sum(b for *_, b in same) for at, same in group_by(sent, lambda s: s[:2]).items()
        }


def branches_text(shown: float, called: float) -> str:
    """A sentence where places add up to more than a call sends: branches of conditionals do. Empty
    elsewhere.

    Arguments:
      shown: bytes at all places.
      called: bytes of a call.

    >>> branches_text(8.0, 8.0), branches_text(2048.0, 1024.0)
    ('', 'This counts all branches of conditionals; a call runs one of each and sends 1.0 KiB.')
    """
    return (
        "This counts all branches of conditionals; a call runs one of each and sends"
        f" {bytes_text(called)}."
        if shown > called * (1 + 1e-6)
        else ""
    )


def place_name(node: Node, grouping: Grouping = "line") -> PlaceName:
    """The line, function or scope of a node."""
    if grouping == "scope":
        name = "/".join(wording.without_number(n) for n in scope_names(node.scope) if "->" not in n)
        return PlaceName(name, shorten(name, TEXT_LIMIT) or "(no scope)")
    # A `jax.shard_map` that is itself the program has no line of its own.
    inner = node.params["body"].walk() if node.op == SHARD_MAP else ()
    span = next(filter(None, map(users_span, (node, *inner))), None)
    if span is None:
        return PlaceName("", "(no source)")
    if grouping == "function":
        key, text, where = span.function, span.function or "module level", file_name(span.file)
    else:
        key, where = span.line, position_text(span.file, span.line)
        text = shorten((line_text(span.file, key) or "").strip(), TEXT_LIMIT) or "(no source)"
    return PlaceName(f"{span.file}:{key}", text, where, where.rpartition("/")[2])


def merge(found: Iterable[Send]) -> list[Send]:
    """Collectives of one kind, over the same axes and with the same change as one; most bytes
    first."""
    return sorted(
        (
            same[0]._replace(runs=sum(s.runs for s in same), bytes=sum(s.bytes for s in same))
            for same in group_by(found, lambda s: (s.kind, s.axes, s.change)).values()
        ),
        key=lambda send: -send.bytes,
    )


def _stop(stops: dict[Key, Stop], named: PlaceName, phase: Phase) -> Stop:
    return stops.setdefault((named.name, phase), Stop(**asdict(named), phase=phase))


def _begins_partial(program: Program, node: Node) -> bool:
    """Whether an operation makes a value partial on a mesh axis whose operands are not."""
    row = program.typing.rows[node.id]
    return any(
        any(codes[k] < 0 for codes in row.outs) and all(codes[k] >= 0 for codes in row.ins)
        for k in range(len(program.mesh.sizes))
    )


def _flows(program: Program, numbers: Mapping[int, int]) -> tuple[ValueFlow, ...]:
    """The flows between places: the values that operations read and that the program returns.

    Arguments:
      program: the plan.
      numbers: of each operation, by its id, the position of its place.
    """
    graph, dataflow, types = program.graph, Dataflow(program.graph), program.typing.values
    reads = [
        *((v, numbers[n.id]) for n in graph.walk() if n.id in numbers for v in n.inputs),
        *((operand, -1) for operand in graph.outputs),
    ]
    found: dict[tuple[int, int], ValueFlow] = {}
    for value, target in ((v, at) for operand, at in reads for v in dataflow.sources(operand)):
        maker, aval, codes = dataflow.makers.get(value), graph.avals[value], types[value]
        new = ValueFlow(
            source=-1 if maker is None else numbers[maker.id],
            target=target,
            type=to_type(codes, program.mesh),
            size=float(aval.size * aval.dtype.itemsize) if aval.shape else 0.0,
        )
        old = found.get((new.source, target), new)
        if new.source != target and (
            old is new or new.size > old.size or (new.type.is_partial and not old.type.is_partial)
        ):
            found[new.source, target] = new
    return tuple(found.values())


def traffic(program: Program) -> ProgramFlows:
    """The flows of a program by the scopes of `jax.named_scope` and of modules; by functions where
    everything that sends stands in one scope.

    Arguments:
      program: the plan.
    """
    found = ProgramFlows(program, "scope")
    scopes = found.places.keys() - {found.results.name}
    return found if len(scopes) > 1 else ProgramFlows(program, "function")


def fold(program: Program, grouping: Grouping | None = None) -> ProgramFlows:
    """The flows of a program by lines; where there are too many, by functions or scopes.

    Arguments:
      program: the plan.
      grouping: what a place is; None to choose.
    """
    lines = ProgramFlows(program, grouping or "line")
    if grouping is not None or len(lines.stops) <= MOST_PLACES:
        return lines
    coarser = (ProgramFlows(program, g) for g in GROUPINGS[1:])
    # The first that fits and has more than 3 places, else the smallest with more than 3 places. The
    # empty key comes before all others.
    return min(
        (lines, *coarser),
        key=lambda f: () if 3 < len(f.stops) <= MOST_PLACES else (len(f.stops) <= 3, len(f.stops)),
    )


# ---- picture ------------------------------------------------------------------------------------


MOST_ROWS = 160
"""Rows of a picture; those that send least are left out, and it says so."""
_GUTTER, _BOX, _SENT, _GRADIENT = 56.0, 300.0, 196.0, 130.0
_GRADIENT_AT = _GUTTER + _BOX + _SENT + _GUTTER
"""Where the boxes of the backward pass begin, in pixels."""

_WIDTH = _GRADIENT_AT + _GRADIENT + _SENT

_ROW, _LINE = 38.0, 15.0
_TRACKS = 7
_WORD_ROWS = 16


class _Sheet:
    """What is drawn: a row for each place, with its forward pass or update and its gradient.

    Arguments:
      flows: the places.
      axis: the mesh axis whose atoms colour them.
    """

    def __init__(self, flows: ProgramFlows, axis: str) -> None:
        self.flows, self.axis = flows, axis
        found = group_by(flows.stops, lambda stop: (stop.phase == "update", stop.name))
        most = sorted(found, key=lambda at: -sum(s.bytes for s in found[at]))[:MOST_ROWS]
        shown = sorted((at for at in found if at in most), key=lambda at: at[0])
        self.left_out = len(found) - len(shown)
        self.rows = [found[at] for at in shown]
        self.gradient = any(s.phase == "backward" for row in self.rows for s in row)
        self.room = (_SENT if self.gradient else _WIDTH - _GUTTER - _BOX) - 20
        self.update_from = sum(not is_update for is_update, _ in shown)
        self.tops, self.bottom = list[float](), 48.0
        for number, row in enumerate(self.rows):
            if number == self.update_from > 0:
                self.bottom += 22
            self.tops.append(self.bottom)
            self.bottom += _ROW + _LINE * max(0, max(len(s.sends) for s in row) - 2) + 10


def busiest_axis(program: Program, flows: ProgramFlows) -> str:
    """The mesh axis that most bytes are sent over; the first with several devices where none
    are."""
    names = [n for n, size in program.mesh.axes if size > 1] or list(program.mesh.names)
    every = [send for stop in (*flows.stops, flows.results) for send in stop.sends]
    return max(names, key=lambda n: sum(send.bytes for send in every if n in send.mesh_axes))


def program_picture(
    program: Program,
    axis: str | None = None,
    grouping: Grouping | None = None,
    *,
    brief: bool = False,
) -> Picture:
    """The program as a picture.

    Arguments:
      program: the plan.
      axis: the mesh axis whose atoms colour it; None for the one that most bytes are sent over.
      grouping: what a place is; None to choose.
      brief: whether it is for a page that has its words elsewhere: only what costs most is said.

    Raises:
      SbpError: `unknown-axis` for an axis that the mesh has not.
    """
    if not program.mesh.names:
        raise SbpError(
            "the mesh has no axes, and a picture shows the types on one", code="unknown-axis"
        )
    if axis is not None and axis not in program.mesh.names:
        raise SbpError(
            f"the mesh ({program.mesh}) has no axis {axis!r}{nearest(axis, program.mesh.names)}",
            code="unknown-axis",
        )
    flows = fold(program, grouping)
    sheet = _Sheet(flows, axis or busiest_axis(program, flows))
    shown = picture(_costliest(sheet), _drawing(sheet), *(() if brief else (_words(sheet),)))
    return shown if brief else replace(shown, caption=_caption(sheet))


def _caption(sheet: _Sheet) -> str:
    places = {"line": "source line", "function": "function", "scope": "scope"}
    return sentences(
        {
            f"the program by {places[sheet.flows.grouping]}, colored by the type on mesh axis"
            f" `{sheet.axis}`. Beside each box are its collectives: they convert the values that it"
            " reads, or reduce the gradients that it makes. The bytes count what one device sends"
            " per call. An arrow to a box shows the largest value of its own pass that it reads."
            " Each partial value has an arrow, too; other values have none."
            f" {_costliest(sheet)}": True,
            f"Not drawn: {counted(sheet.left_out, 'place')} with the fewest bytes.": sheet.left_out,
        }
    )


def _costliest(sheet: _Sheet) -> str:
    stops = sheet.flows.costliest
    if not stops:
        return "No line sends anything."
    total = sum(stop.bytes for stop in stops)
    most, *others = merge(send for stop in stops for send in stop.sends)
    before = {"backward": "the gradient of", "update": "the update at"} if len(stops) == 1 else {}
    named = f"line {stops[0].where}" if stops[0].where else stops[0].text
    if sheet.flows.grouping == "function":
        named = f"function {stops[0].text} in {stops[0].where}"
    phase = before.get(stops[0].phase)
    place = f"{phase} {named.removeprefix('line ')}" if phase else named
    part = f", {bytes_text(most.bytes)} of them" if others else ""
    return sentences(
        {
            f"The largest share of bytes, {total / sheet.flows.bytes:.0%}, is for"
            f" {place}: {bytes_text(total)} per device{part}"
            f" by {most.kind} over {most.axes}.": True,
            branches_text(sheet.flows.bytes, sheet.flows.called): True,
        }
    )


# ---- drawing ------------------------------------------------------------------------------------


_LEGEND: tuple[tuple[str, Ink, str], ...] = (
    ("S", Ink(color=SPLIT), "split"),
    ("B", Ink(color=WHOLE, opacity=0.18), "whole"),
    ("P", Ink(color=PARTIAL, opacity=0.35, dashed=True, width=2), "partial"),
    ("P", Ink(color=PARTIAL, opacity=0.7), "begins a partial value"),
    ("P→", Ink(width=0, opacity=0), "ends one"),
    ("×8", Ink(width=0, opacity=0), "runs 8 times"),
)


def _drawing(sheet: _Sheet) -> Board:
    results, bottom = sheet.flows.results, sheet.bottom
    board = Board(_WIDTH, bottom + 4 + _LINE * len(results.sends))
    x = _GUTTER
    for sign, ink, meaning in _LEGEND:
        x = board.key((x, 3), ink, meaning, sign=sign)
    board.text((_GUTTER, 38), "forward", Ink(bold=True))
    if sheet.gradient:
        board.text((_GRADIENT_AT, 38), "backward", Ink(bold=True))
    if 0 < sheet.update_from < len(sheet.rows):
        board.text((_GUTTER, sheet.tops[sheet.update_from] - 10), "update", Ink(bold=True))
    for row, top in zip(sheet.rows, sheet.tops, strict=True):
        for stop in row:
            is_gradient = stop.phase == "backward"
            x, width = (_GRADIENT_AT, _GRADIENT) if is_gradient else (_GUTTER, _BOX)
            _box(board, sheet, stop, (x, top), width, brief=is_gradient and len(row) > 1)
            _sent(board, sheet, stop, (x + width + 8, top))
    if results.sends:
        board.text((_GUTTER, bottom + 13), "results", Ink(bold=True))
        _sent(board, sheet, results, (_GUTTER + _BOX + 8, bottom))
    _arrows(board, sheet, of_gradients=False)
    _arrows(board, sheet, of_gradients=True)
    return board


_INKS: dict[type[Atom], tuple[Ink, Ink]] = {
    Unreduced: (
        Ink(color=PARTIAL, opacity=0.35, dashed=True, width=2),
        Ink(color=PARTIAL, width=2.5, dashed=True),
    ),
    Split: (Ink(color=SPLIT), Ink(color=SPLIT, width=1.5)),
    Broadcast: (Ink(color=WHOLE, opacity=0.18), Ink(color=WHOLE, width=1.5)),
}
"""How a box and an arrow look, by the atom of what is made."""


def _inks(type_: NdSbp | None, axis: str) -> tuple[Ink, Ink]:
    return _INKS[Broadcast if type_ is None else type(type_.get(axis))]


def _box(
    board: Board,
    sheet: _Sheet,
    stop: Stop,
    corner: tuple[float, float],
    width: float,
    *,
    brief: bool = False,
) -> None:
    x, y = corner
    board.rect(
        corner,
        (width, _ROW),
        _inks(stop.type, sheet.axis)[0],
        title=f"{stop.where} {stop.text}: {counted(stop.operations, 'operation')}",
    )
    room = int((width - 10) / CELL)
    count = f" ×{stop.runs}" if stop.runs > 1 else ""
    kind = "" if stop.type is None else repr(stop.type)
    if stop.born:
        board.rect((x + width - 16, y + 3), (13, 14), Ink(color=PARTIAL, opacity=0.7))
        board.text((x + width - 9.5, y + 14), "P", Ink(bold=True), anchor="middle")
        room -= 2
    first = f"gradient{count}" if brief else stop.text
    under = kind if brief else f"{stop.brief}{count}  {kind}"
    board.text((x + 6, y + 15), shorten(first, room), title="" if brief else stop.text)
    board.text((x + 6, y + 30), shorten(under, room))


def _sent(board: Board, sheet: _Sheet, stop: Stop, corner: tuple[float, float]) -> None:
    """The collectives of a place, each with a bar of its share."""
    x, y = corner
    is_most = any(stop is one for one in sheet.flows.costliest)
    bar, word = (COSTLY, COSTLY) if is_most else (WHOLE, "currentColor")
    for number, send in enumerate(stop.sends):
        base, share = y + 13 + _LINE * number, send.bytes / (sheet.flows.bytes or 1)
        size = max((_SENT - 20) * share, 2), 13
        board.rect((x, base - 11), size, Ink(color=bar, opacity=0.3, width=0))
        board.text(
            (x + 4, base),
            shorten(_send_text(send), int(sheet.room / CELL)),
            Ink(color=word, bold=is_most),
            title=f"{send.change}, {counted(send.runs, 'run')}, {share:.0%}",
        )


def _send_text(send: Send) -> str:
    return f"{'P→ ' if send.reduces else ''}{bytes_text(send.bytes)} {send.kind} {send.axes}"


def _arrows(board: Board, sheet: _Sheet, *, of_gradients: bool) -> None:
    """The largest flow into each box of a column, and partial ones."""
    place = {
        id(stop): number
        for number, row in enumerate(sheet.rows)
        for stop in row
        if (stop.phase == "backward") == of_gradients
    }
    ends = [id(stop) for stop in sheet.flows.stops]
    flows = [
        (place[ends[f.source]], place[ends[f.target]], f)
        for f in sheet.flows.flows
        if min(f.source, f.target) >= 0 and ends[f.source] in place and ends[f.target] in place
    ]
    largest = {stop: max(f.size for _, s, f in flows if s == stop) for _, stop, _ in flows}
    shown = [(a, b, f) for a, b, f in flows if f.type.is_partial or f.size == largest[b]]
    edge = _GRADIENT_AT if of_gradients else _GUTTER
    taken: list[list[tuple[int, int]]] = [[] for _ in range(_TRACKS)]
    for start, stop, flow in sorted(shown, key=lambda item: abs(item[1] - item[0])):
        ink, text = _inks(flow.type, sheet.axis)[1], f"{flow.type!r}, {bytes_text(flow.size)} whole"
        first, last = sheet.tops[start], sheet.tops[stop]
        if abs(stop - start) == 1:
            x, down = edge + 22, stop > start
            points = [(x, first + (_ROW if down else 0)), (x, last + (0 if down else _ROW))]
        else:
            x = edge - 8 - 7 * _free_track(taken, min(start, stop), max(start, stop))
            y0, y1 = first + _ROW * 0.66, last + _ROW * 0.33
            points = [(edge, y0), (x, y0), (x, y1), (edge, y1)]
        board.line(points, ink, arrow=True, title=text)


def _free_track(taken: list[list[tuple[int, int]]], low: int, high: int) -> int:
    """The innermost track beside the boxes on which nothing runs between two rows; the outermost
    where all are taken."""
    free = (n for n, runs in enumerate(taken) if all(b <= low or a >= high for a, b in runs))
    track = next(free, _TRACKS - 1)
    taken[track].append((low, high))
    return track


# ---- words --------------------------------------------------------------------------------------


def _words(sheet: _Sheet) -> Table | str:
    """The places that send something or where values become partial."""
    flows, by_function = sheet.flows, sheet.flows.grouping == "function"
    places = [s for s in (*flows.stops, flows.results) if s.sends or s.born]
    made = table_of(
        sorted(places, key=lambda s: (s is flows.results, -s.bytes)),
        {
            "place": lambda s: s.text if by_function else s.where or s.text,
            "pass": lambda s: s.phase,
            ">times": lambda s: str(s.runs),
            "makes": lambda s: (
                ("" if s.type is None else repr(s.type)) + (", begins P" if s.born else "")
            ),
            "sends": lambda s: "; ".join(map(_send_text, s.sends)),
            "share": lambda s: s.bytes / (flows.bytes or 1),
        },
        detail=lambda s: s.where if by_function else s.text if s.where else "",
        shown=_WORD_ROWS,
        rest=lambda left: f"and {counted(len(left), 'more place')}",
    )
    return made if places else "no place sends anything, and no value is partial"
