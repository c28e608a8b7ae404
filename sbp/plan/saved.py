"""A plan as a file, and back: the types of its values, what it was made for, and its text.

A plan that is read is trusted in nothing. Its types go through the certificate and the verifier as
those of the chooser do, and its text has to be the text of what they give.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from dataclasses import dataclass
from typing import Any

import jax

from sbp.errors import SbpError, SbpInternalError
from sbp.infer.certificate import certify
from sbp.infer.request import Demand, Request
from sbp.infer.rows import NdRow
from sbp.infer.typing import Typing
from sbp.plan.fingerprint import digests
from sbp.plan.listed import wrong_conversions
from sbp.plan.parse import parse_listing
from sbp.plan.program import Cost, Program, resolve
from sbp.plan.saving import Repeat, repeats, save
from sbp.plan.text import ListedBody, ListedRegion, Listing, listing, node_place
from sbp.trace.graph import Graph
from sbp.version import VERSION

FORMAT = 2
"""The version of the file's own form."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedPlan:
    """A plan as it stands in a file.

    Arguments:
      made_for: the versions, mesh, hardware and options that it was made for, as texts.
      program: the digests of the program's operations (`sbp.plan.fingerprint`).
      types: the fields of its `Typing` before repeated conversions were removed, in codes.
      removed: the repeated conversions that were removed: for each the value, the value that is
        read in its place, and the type.
      lines: the text of the plan.
      seal: a digest of `types` and `removed`. Nothing else shows a change of the bound on how good
        the plan is.
    """

    made_for: dict[str, str]
    program: tuple[str, ...]
    types: dict[str, Any]
    removed: tuple[Any, ...]
    lines: tuple[str, ...]
    seal: str

    @classmethod
    def of(cls, program: Program) -> SavedPlan:
        """A plan as a file has it."""
        first, last = program.first_typing or program.typing, program.typing
        types = {
            "values": {str(v): first.values[v] for v in sorted(first.values)},
            "rows": {
                str(n): (row.ins, row.outs, row.kernels) for n, row in sorted(first.rows.items())
            },
            "regions": {
                f"{n}.{i}": codes for (n, i), codes in sorted(first.region_outputs.items())
            },
            "outputs": first.outputs,
            "seconds": first.seconds,
            "lower_bound": last.lower_bound,
            "bounds_reuse": last.bounds_reuse,
            "memory_prices": program.memory_prices,
            "faster": program.faster and dataclasses.asdict(program.faster),
        }
        return cls(
            made_for=_made_for(program.request),
            program=digests(program.request.graph),
            types=types,
            removed=(removed := tuple(map(_key, program.removed))),
            lines=tuple(str(program).splitlines()),
            seal=_seal(types, removed),
        )

    def dumps(self) -> str:
        """The text of the file: JSON, with each line of the plan on a line."""
        parts = {
            "made_for": json.dumps(self.made_for, indent=1),
            "program": json.dumps(" ".join(self.program)),
            "types": json.dumps(self.types),
            "removed": json.dumps(self.removed),
            "seal": json.dumps(self.seal),
            "plan": json.dumps(self.lines, indent=1, ensure_ascii=False),
        }
        lines = [f'"sbp plan": {FORMAT}', *(f'"{name}": {text}' for name, text in parts.items())]
        return "{" + ",\n".join(lines) + "}\n"

    @classmethod
    def loads(cls, text: str) -> SavedPlan:
        """Reads what `dumps` writes.

        Raises:
          SbpError: `saved-plan` for another text.
        """
        try:
            read = json.loads(text)
            if read["sbp plan"] != FORMAT:
                raise _refused(f"it has format {read['sbp plan']}, and this version reads {FORMAT}")
            return cls(
                made_for={str(k): str(v) for k, v in read["made_for"].items()},
                program=tuple(read["program"].split()),
                types=dict(read["types"]),
                removed=tuple(_tuples(r) for r in read["removed"]),
                lines=tuple(map(str, read["plan"])),
                seal=str(read["seal"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise _refused(f"it is no file of plan.save: {error}") from error

    def check_text(self) -> Listing:
        """The lines of the plan, checked by themselves.

        Raises:
          SbpError: `saved-plan`, with the first line that does not parse or does not hold.
        """
        try:
            read = parse_listing("\n".join(self.lines))
        except SbpError as error:
            raise _refused(error.title, *error.details) from error
        for wrong in wrong_conversions(read):
            raise _refused(
                f"line {wrong.number} of the plan does not hold: {wrong.problem}",
                self.lines[wrong.number - 1].strip(),
            )
        return read

    def program_for(self, request: Request) -> Program:
        """The plan for a request, without choosing types.

        Arguments:
          request: the traced program with everything that its plan is chosen by.

        Raises:
          SbpError: `saved-plan` where the plan was made for another program, mesh, version or
            option, or does not hold.
        """
        read = self.check_text()
        self._check_purpose(request)
        try:
            program = self._resolved(request)
        except SbpInternalError as error:
            raise _refused(f"its types do not hold in this program: {error}") from error
        except (KeyError, ValueError, TypeError, IndexError, AttributeError) as error:
            raise _refused(f"its types are not those of this program: {error!r}") from error
        self._compare(read, program)
        if self.seal != _seal(self.types, self.removed):
            raise _refused("its figures were changed: the seconds, the bound, or how it was found")
        limit = request.memory_limit
        if limit is not None and program.cost.peak_memory_bytes > limit:
            raise _refused("it takes more memory than memory_limit")
        return program

    def _check_purpose(self, request: Request) -> None:
        now = _made_for(request)
        for name, value in now.items():
            if self.made_for.get(name) != value:
                raise _refused(
                    f"it was made for {name} {self.made_for.get(name, '(not said)')}, and this is"
                    f" {value}"
                )
        graph = request.graph
        nodes = list(graph.walk())
        found = digests(graph)
        for number, (mine, own) in enumerate(itertools.zip_longest(self.program, found)):
            if mine != own:
                where = "its arguments differ" if number == 0 else "its results differ"
                if 0 < number <= len(nodes):
                    node = nodes[number - 1]
                    where = f"the first difference is {node.op} {node_place(node)}"
                raise _refused(f"it was made for another program: {where}")

    def _resolved(self, request: Request) -> Program:
        """The program with the types of the file, certified and verified."""
        read, graph = self.types, request.graph
        rows = {int(n): NdRow(*map(_tuples, row)) for n, row in read["rows"].items()}
        regions = {
            (int(n), int(i)): _tuples(codes)
            for key, codes in read["regions"].items()
            for n, i in [key.split(".")]
        }
        typing = Typing(
            request=request,
            graph=graph,
            values={int(v): _tuples(codes) for v, codes in read["values"].items()},
            rows=rows,
            region_outputs=regions,
            outputs=_tuples(read["outputs"]),
            seconds=float(read["seconds"]),
            lower_bound=float(read["lower_bound"]),
            bounds_reuse=bool(read["bounds_reuse"]),
            sums=request.sums,
        )
        _check_complete(typing)
        certify(typing)
        program = first = resolve(typing)
        known = {_key(r): r for r in repeats(typing, first.block)}
        removed = tuple(known[key] for key in self.removed)
        if removed:
            typing = save(typing, removed)
            certify(typing)
            program = dataclasses.replace(
                resolve(typing), first_typing=first.typing, removed=removed
            )
        return dataclasses.replace(
            program,
            declined=tuple(r for r in known.values() if r not in removed),
            memory_prices=int(read["memory_prices"]),
            faster=read["faster"] and Cost(**read["faster"]),
        )

    def _compare(self, read: Listing, program: Program) -> None:
        """Compares the text of the file with that of the program, source lines aside."""
        own, made = _without_comments(read), _without_comments(listing(program))
        if own == made:
            return
        lines = itertools.zip_longest(str(own).splitlines(), str(made).splitlines())
        for number, (mine, other) in enumerate(lines, 1):
            if mine != other:
                raise _refused(
                    f"line {number} of the plan is not what its types give",
                    f"the file has: {(mine or '(nothing)').strip()}",
                    f"its types give: {(other or '(nothing)').strip()}",
                )


def _made_for(request: Request) -> dict[str, str]:
    """What a plan depends on besides its program, as texts."""
    return {
        "version of sbp": VERSION,
        "version of JAX": jax.__version__,
        "mesh": str(request.mesh),
        "hardware": request.mesh.hardware.name,
        "boxing": " ".join((request.boxing, *map(str, request.axis_policies))),
        "budgets": "; ".join(map(str, request.budgets)),
        "reduce_dtype": str(request.reduce_dtype),
        "memory_limit": str(request.memory_limit),
        "values held padded": _padded(request.demand),
    }


def _padded(demand: Demand) -> str:
    """Which arguments and results are held padded."""
    inputs, outputs = sorted(demand.padded_inputs), sorted(demand.padded_outputs)
    return ", ".join([*(f"input {i}" for i in inputs), *(f"output {o}" for o in outputs)]) or "none"


def _check_complete(typing: Typing) -> None:
    """Checks that each value and node has its types, and nothing else has.

    Raises:
      SbpInternalError: where that is not so.
    """
    values: set[int] = set()
    rows: set[int] = set()
    regions: set[tuple[int, int]] = set()
    given = typing.values

    def walk(graph: Graph) -> None:
        values.update(graph.inputs)
        for node in graph.nodes:
            values.update(node.outputs)
            rows.add(node.id)
            if typing.rows[node.id].outs != tuple(given[v] for v in node.outputs):
                raise SbpInternalError(f"{node.op} {node_place(node)} gives other types")
            for number, region in enumerate(node.regions):
                regions.add((node.id, number))
                walk(region)

    walk(typing.graph)
    axes = len(typing.mesh.sizes)
    every = (*given.values(), *typing.outputs)
    if (
        given.keys() != values
        or typing.rows.keys() != rows
        or typing.region_outputs.keys() != regions
        or any(len(codes) != axes for codes in every)
    ):
        raise SbpInternalError("the types are not those of the program's values")


def _seal(types: dict[str, Any], removed: tuple[Any, ...]) -> str:
    """A digest of what a file says of its types, read back or not."""
    text = json.dumps([json.loads(json.dumps(types)), json.loads(json.dumps(removed))])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _key(repeat: Repeat) -> tuple[Any, ...]:
    return repeat.value, repeat.first, repeat.codes, repeat.loop, repeat.first_loop


def _tuples(x: Any) -> Any:
    """Lists of JSON as tuples."""
    return tuple(map(_tuples, x)) if isinstance(x, list) else x


def _without_comments(whole: Listing) -> Listing:
    return dataclasses.replace(whole, body=_plain(whole.body))


def _plain(body: ListedBody) -> ListedBody:
    lines = [
        dataclasses.replace(
            line,
            comment="",
            **(
                {"bodies": tuple(map(_plain, line.bodies))}
                if isinstance(line, ListedRegion)
                else {}
            ),
        )
        for line in body.lines
    ]
    inputs = tuple(dataclasses.replace(given, argument="") for given in body.inputs)
    return ListedBody(inputs=inputs, lines=tuple(lines), returned=body.returned)


def _refused(title: str, *details: str) -> SbpError:
    return SbpError(title, code="saved-plan", details=details, subject="the saved plan")
