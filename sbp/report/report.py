"""The report on a program: as text for a terminal, as HTML for a notebook, and as data."""

import json
import os
from dataclasses import dataclass, field
from typing import Any

from rich import get_console
from rich.console import Console, ConsoleOptions, RenderResult

from sbp.errors import Diagnostic, SbpError
from sbp.handwritten.check import Coverage
from sbp.kinds import FLAG, TEXT, Kind, instance_of, is_whole, made_of, one_of, or_none, takes
from sbp.plan.program import PHASES, Program
from sbp.plan.saved import write_file
from sbp.report import device_bytes, facts, flows, pages, shards, timeline
from sbp.report.parts import Page, Picture, Section, png_of
from sbp.report.rendering import MIN_WIDTH, page_html, page_lines

TEXT_WIDTH = 120
"""Columns of plain text by default."""


_WIDTH = Kind("a number of columns, from 20 to 10000", lambda x: is_whole(x) and 20 <= x <= 10_000)


class Shows:
    """Base class of results that show themselves. `print` and files get plain text, rich consoles
    get styled text, and notebooks get HTML."""

    __slots__ = ()

    def _shown(self) -> Page:
        """The page."""
        raise NotImplementedError

    @takes("text", skip=1, width=_WIDTH)
    def text(self, width: int = TEXT_WIDTH) -> str:
        """Plain text of at most `width` columns, the same on every terminal."""
        return "\n".join(line.plain.rstrip() for line in page_lines(self._shown(), width))

    @takes("html", skip=1, standalone=FLAG)
    def html(self, *, standalone: bool = False) -> str:
        """HTML with inline CSS and no script; a whole document when `standalone`."""
        return page_html(self._shown(), standalone=standalone)

    def __repr__(self) -> str:
        console = get_console()
        return self.text(max(MIN_WIDTH, console.width) if console.is_terminal else TEXT_WIDTH)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from page_lines(self._shown(), options.max_width)

    def _repr_html_(self) -> str:
        return self.html()

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return {"text/plain": self.text(), "text/html": self.html()}


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Shown(Shows):
    """A page that shows itself.

    Arguments:
      page: the page.
    """

    page: Page

    def _shown(self) -> Page:
        return self.page

    @takes("lines", skip=1, width=_WIDTH)
    def lines(self, width: int = TEXT_WIDTH) -> list[str]:
        """The lines of the plain text."""
        return [line.plain.rstrip() for line in page_lines(self.page, width)]

    def svg(self) -> tuple[str, ...]:
        """The pictures of the page, each as SVG."""
        sections = [p.parts if isinstance(p, Section) else (p,) for p in self.page.parts]
        return tuple(p.svg for parts in sections for p in parts if isinstance(p, Picture))

    @takes(
        "png",
        skip=1,
        scale=Kind(
            "a number from 0.1 to 10",
            lambda x: isinstance(x, int | float) and not isinstance(x, bool) and 0.1 <= x <= 10,
        ),
    )
    def png(self, scale: float = 2) -> tuple[bytes, ...]:
        """The pictures of the page, each as PNG on white.

        Arguments:
          scale: pixels of the PNG for a pixel of the picture.

        Raises:
          SbpError: `unknown-option` where the extra `png` is not installed.
        """
        return tuple(png_of(svg, scale) for svg in self.svg())


def _tuple_of(cls: type, what: str) -> Kind:
    """The kind of a tuple of instances of a class."""
    return Kind(
        f"a tuple of {what}", lambda x: isinstance(x, tuple) and all(isinstance(v, cls) for v in x)
    )


@made_of(
    "Report",
    program=or_none(instance_of(Program, "sbp.jit")),
    diagnostics=_tuple_of(Diagnostic, "sbp.Diagnostic"),
    title=TEXT,
    output_names=_tuple_of(str, "strings"),
    coverage=or_none(instance_of(Coverage, "sbp.check_shard_map")),
)
@dataclass(frozen=True, kw_only=True, repr=False)
class Report(Shows):
    """The report on a program.

    Arguments:
      program: the plan; None where there is none.
      diagnostics: the findings, in source order.
      title: the function's name.
      output_names: names of the results.
      coverage: what `sbp.check_shard_map` checked; None for other reports.

    >>> report = Report(program=None, title="step")
    >>> report.ok, str(report)
    (True, 'no findings in `step`')
    """

    program: Program | None
    diagnostics: tuple[Diagnostic, ...] = ()
    title: str = ""
    output_names: tuple[str, ...] = field(default=(), repr=False)
    coverage: Coverage | None = field(default=None, repr=False)

    @property
    def ok(self) -> bool:
        """Whether there is no error."""
        return not any(d.severity == "error" for d in self.diagnostics)

    def __bool__(self) -> bool:
        return self.ok

    def full(self) -> Shown:
        """The full report."""
        return Shown(page=self._shown())

    def short(self) -> Shown:
        """The short form: annotated tensors, collectives by source line, bytes and memory per
        device."""
        return Shown(page=self._shown(short=True))

    def _shown(self, *, short: bool = False) -> Page:
        return (
            pages.refusal(self.title, self.diagnostics, self.coverage)
            if self.program is None
            else pages.plan_page(
                self.program, self.title, self.output_names, self.diagnostics, short=short
            )
        )

    @takes("Report.picture", skip=1, axis=or_none(TEXT), by=or_none(one_of(flows.GROUPINGS)))
    def picture(self, axis: str | None = None, by: flows.Grouping | None = None) -> Shown:
        """The program as a graph of the user's lines: the type that each one makes, where values
        become partial and where they are reduced, and the collectives with their bytes. Lines that
        run or stand there several times are drawn once.

        Arguments:
          axis: the mesh axis whose atoms colour it; None for the one that most bytes are sent over.
          by: "line", "function" or "scope" (of `jax.named_scope` and of modules); None for lines,
            or what is coarser where there are very many.

        Raises:
          SbpError: `unknown-axis` for an axis that the mesh has not, `unknown-option` where there
            is no plan to draw.

        >>> import jax, sbp
        >>> mesh = jax.sharding.AbstractMesh((2,), ("model",))
        >>> step = sbp.jit(lambda x, w: x @ w, mesh, in_types=("model:S(1)", "model:S(0)"))
        >>> x = jax.ShapeDtypeStruct((8, 8), "float32")
        >>> print(step.plan(x, x).report().picture().text()[:26])
        the program by source line
        """
        return Shown(page=Page(parts=(flows.program_picture(self._planned("drawn"), axis, by),)))

    @takes("Report.where", skip=1)
    def where(self, name: str | int) -> Shown:
        """Where a tensor lives: its blocks in proportion with the devices that have them, copies,
        summands of a partial tensor, and devices that have nothing of it.

        Arguments:
          name: an input such as "params['w']", an output, a variable or a line, as `plan.why` takes
            it.

        Raises:
          SbpError: `bad-argument` when nothing has that name, with the nearest names;
            `unknown-option` where there is no plan to draw.

        >>> import jax, sbp
        >>> mesh = jax.sharding.AbstractMesh((2,), ("model",))
        >>> step = sbp.jit(lambda x, w: x @ w, mesh, in_types=("model:S(1)", "model:S(0)"))
        >>> x = jax.ShapeDtypeStruct((8, 8), "float32")
        >>> print(step.plan(x, x).report().where("x").text()[:48])
        where `x` f32[8,8], model:S(1), lives on mesh mo
        """
        found = shards.shards_of(self._planned("drawn"), name, self.output_names)
        return Shown(page=Page(parts=(shards.shard_picture(found),)))

    @takes("Report.source", skip=1)
    def source(self) -> Shown:
        """The user's lines, each with the types that it makes and the bytes that a device sends
        there. The line that sends most is marked with `>`.

        Raises:
          SbpError: `unknown-option` where there is no plan.

        >>> import jax, sbp
        >>> mesh = jax.sharding.AbstractMesh((2,), ("model",))
        >>> step = sbp.jit(lambda x, w: x @ w, mesh, in_types=("model:S(1)", "model:S(0)"))
        >>> x = jax.ShapeDtypeStruct((8, 8), "float32")
        >>> "sends" in step.plan(x, x).report().source().text()
        True
        """
        return Shown(page=pages.source_page(self._planned("annotated"), self.title))

    @takes(
        "Report.bytes",
        skip=1,
        other=or_none(Kind("a Report", lambda x: isinstance(x, Report), "unknown-option")),
    )
    def bytes(self, other: "Report | None" = None) -> Shown:
        """The bytes that one device sends per call: of each mesh axis by phase (forward, backward,
        update), and of each scope or function by mesh axis. Collectives over several axes have a
        row of their own.

        Arguments:
          other: the report of another plan. Each cell then has the bytes of both plans.

        Raises:
          SbpError: `unknown-option` where one of them has no plan, or `other` is not a report.

        >>> import jax, sbp
        >>> mesh = jax.sharding.AbstractMesh((2,), ("model",))
        >>> step = sbp.jit(lambda x, w: x @ w, mesh, in_types=("model:S(1)", "model:S(0)"))
        >>> x = jax.ShapeDtypeStruct((8, 8), "float32")
        >>> print(step.plan(x, x).report().bytes().text().split(" in all")[0])
        bytes that one device sends per call, by mesh axis: 128.0 B
        """
        beside = None if other is None else other._planned("shown")
        return Shown(page=Page(parts=device_bytes.traffic_parts(self._planned("shown"), beside)))

    @takes("Report.roofline", skip=1)
    def roofline(self) -> Shown:
        """What limits the step: FLOPs, modelled seconds by module and pass with what they are spent
        on (compute, memory, or the links of a mesh axis), and the utilisation that follows.

        Raises:
          SbpError: `unknown-option` where there is no plan to be modelled.

        >>> import jax, sbp
        >>> mesh = jax.sharding.AbstractMesh((2,), ("model",))
        >>> step = sbp.jit(lambda x, w: x @ w, mesh, in_types=("model:S(1)", "model:S(0)"))
        >>> x = jax.ShapeDtypeStruct((8, 8), "float32")
        >>> print(step.plan(x, x).report().roofline().text().splitlines()[0])
        limits: 1.02 KFLOP per call
        """
        return Shown(page=Page(parts=(timeline.limits_section(self._planned("modelled")),)))

    @takes("Report.timeline", skip=1)
    def timeline(self) -> Shown:
        """The modelled step in time: a lane for the device's own work and one for the links of each
        mesh axis, with the passes, the loops, and what the step waits for longest.

        Raises:
          SbpError: `unknown-option` where there is no plan to be modelled.

        >>> import jax, sbp
        >>> mesh = jax.sharding.AbstractMesh((2,), ("model",))
        >>> step = sbp.jit(lambda x, w: x @ w, mesh, in_types=("model:S(1)", "model:S(0)"))
        >>> x = jax.ShapeDtypeStruct((8, 8), "float32")
        >>> "nothing was measured" in step.plan(x, x).report().timeline().text()
        True
        """
        return Shown(page=Page(parts=(timeline.timeline_picture(self._planned("modelled")),)))

    @takes("Report.trace", skip=1)
    def trace(self, path: str | os.PathLike[str]) -> None:
        """Writes the modelled step as a JSON trace, which https://ui.perfetto.dev and
        chrome://tracing open beside a profile of the real step: a track for the device's own work
        and one for the links of each mesh axis. All runs of an operation in a loop are one event.

        Arguments:
          path: the file; one that exists is replaced.

        Raises:
          SbpError: `unknown-option` where there is no plan to be modelled, `bad-argument` where the
            file cannot be written.

        >>> import jax, sbp
        >>> mesh = jax.sharding.AbstractMesh((2,), ("model",))
        >>> step = sbp.jit(lambda x, w: x @ w, mesh, in_types=("model:S(1)", "model:S(0)"))
        >>> x = jax.ShapeDtypeStruct((8, 8), "float32")
        >>> step.plan(x, x).report().trace("step.json")
        """
        events = timeline.trace_events(timeline.Schedule(self._planned("modelled")))
        write_file(path, json.dumps({"traceEvents": events}))

    @takes("Report.memory", skip=1)
    def memory(self) -> Shown:
        """What a device has in memory over program order: weights, optimiser state, activations and
        other classes, the fullest moment with what is alive then, and the limit.

        Raises:
          SbpError: `unknown-option` where there is no plan to be drawn.

        >>> import jax, sbp
        >>> mesh = jax.sharding.AbstractMesh((2,), ("model",))
        >>> step = sbp.jit(lambda x, w: x @ w, mesh, in_types=("model:S(1)", "model:S(0)"))
        >>> x = jax.ShapeDtypeStruct((8, 8), "float32")
        >>> print(step.plan(x, x).report().memory().text().split(",")[0])
        memory of one device over program order: at most 670.7 B
        """
        return Shown(page=Page(parts=(device_bytes.memory_picture(self._planned("drawn")),)))

    def _planned(self, what: str) -> Program:
        """The plan. Raises an error if the report has none; `what` says what needs it."""
        if self.program is None:
            raise SbpError(
                f"there is no plan to be {what}: fix the errors of this report first",
                code="unknown-option",
            )
        return self.program

    @takes("Report.to_json", skip=1)
    def to_json(self) -> dict[str, Any]:
        """The report as data that `json.dumps` takes: the verdict, the findings, and of a plan its
        cost, strategy, inputs, outputs and collectives, also by module and phase. `format` names
        the form. Bytes are those of one device, seconds are modelled.

        >>> Report(program=None, title="step").to_json()["ok"]
        True
        """
        return {
            "format": FORMAT,
            "function": self.title,
            "ok": self.ok,
            "plan": None if self.program is None else plan_data(self.program, self.output_names),
            "diagnostics": [finding_data(d) for d in self.diagnostics],
        }


# ---- data ---------------------------------------------------------------------------------------


FORMAT = "sbp report 1"
"""The form of the data. The number rises when a key goes or changes its meaning; keys may be
added."""


def plan_data(program: Program, output_names: tuple[str, ...]) -> dict[str, Any]:
    """A plan as data. All bytes are those of one device, and of one call where they are sent.

    Arguments:
      program: the plan.
      output_names: names of the results.
    """
    limited = timeline.limits(program)
    return {
        "mesh": dict(program.mesh.axes),
        "hardware": program.mesh.hardware.name,
        "bytes_sent_per_device": program.cost.bytes_per_device,
        "peak_memory_bytes_per_device": program.cost.peak_memory_bytes,
        "modelled_seconds": program.cost.seconds,
        "seconds_by_lane": timeline.lane_seconds(timeline.Schedule(program)),
        "memory_at_peak": dict(device_bytes.LiveBytes(program).peak.bytes),
        "limits": {
            "flops": limited.flops,
            "repeated_flops": limited.repeated,
            "utilisation": limited.utilisation,
            "seconds_by_bound": limited.seconds,
        },
        "strategy": facts.strategy(program),
        "inputs": [_tensor(t) for t in facts.inputs(program)],
        "outputs": [_tensor(t) for t in facts.outputs(program, output_names)],
        "collectives": [
            {
                "kind": one.kind,
                "mesh_axes": one.mesh_axes,
                "changes": list(one.changes),
                "runs": one.runs,
                "bytes_sent_per_device": one.bytes_per_device,
                "tensors": list(one.tensors),
                "line": one.line,
                "made": list(one.made),
                "needed": list(one.needed),
                "returned": list(one.returned),
            }
            for one in facts.collectives(program, output_names)
        ],
        "modules": modules(program),
    }


def modules(program: Program) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """The collectives of each scope of `jax.named_scope` and of modules, by phase. Numbers in names
    of scopes are `*`, so that layers are one. The empty name has what stands in no scope; results
    have a phase of their own there, `returned`. Of a `cond` all branches are there.

    Arguments:
      program: the plan.
    """
    by_scope = flows.ProgramFlows(program, "scope")
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for stop in (*by_scope.stops, by_scope.results):
        if stop.sends:
            name = "" if stop is by_scope.results else stop.name
            of_scope = found.setdefault(name, {phase: [] for phase in PHASES})
            of_scope.setdefault(stop.phase, []).extend(
                {
                    "kind": send.kind,
                    "mesh_axes": send.axes,
                    "change": send.change,
                    "runs": send.runs,
                    "bytes_sent_per_device": send.bytes,
                }
                for send in stop.sends
            )
    return found


def _tensor(tensor: facts.Tensor) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "shape": tensor.shape,
        "type": repr(tensor.type),
        "on_one_device": tensor.local_shape,
        "bytes_per_device": tensor.bytes_per_device,
        "donated": tensor.donated,
        "padded": tensor.padded,
    }


def finding_data(diagnostic: Diagnostic) -> dict[str, Any]:
    """A finding as data.

    Arguments:
      diagnostic: the finding.
    """
    return {
        "code": diagnostic.code,
        "severity": diagnostic.severity,
        "title": diagnostic.title,
        "scope": diagnostic.scope,
        "labels": [
            {
                "file": label.span.file,
                "line": label.span.line,
                "column": label.span.column,
                "end_line": label.span.end_line or label.span.line,
                "end_column": label.span.end_column,
                "text": label.text,
                "primary": label.primary,
            }
            for label in diagnostic.labels
        ],
        "notes": list(diagnostic.notes),
        "helps": [
            {
                "text": h.text,
                "bytes_sent_per_device": h.bytes_per_device,
                "peak_memory_bytes_per_device": h.peak_memory_bytes,
            }
            for h in diagnostic.helps
        ],
    }


# ---- errors -------------------------------------------------------------------------------------


def render_error(error: SbpError) -> list[str]:
    """The lines that IPython and notebooks show for an sbp error in place of a stack trace
    (`_render_traceback_`)."""
    return Shown(page=Page(parts=tuple(map(pages.finding, pages.diagnostics_of(error))))).lines()


SbpError.renderer = render_error
