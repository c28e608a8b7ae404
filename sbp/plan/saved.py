"""A plan as a file, and back: the types of its values, what it was made for, and its text.

sbp does not trust a file. The file must have the shape that `dumps` writes. The certificate and the
verifier check its types, as they check those of the chooser. Saving the result again must give the
same types and the same text.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import sys
from dataclasses import dataclass
from typing import Any

import jax

from sbp.errors import SbpError, SbpInternalError
from sbp.infer.certificate import certify
from sbp.infer.flow import Decision
from sbp.infer.request import Demand, Request
from sbp.infer.rows import Choice, NdRow
from sbp.infer.typing import Typing, typed
from sbp.kinds import shown
from sbp.plan.fingerprint import digests
from sbp.plan.program import Cost, Program, resolve
from sbp.plan.saving import Repeat, repeats, save
from sbp.plan.text import node_place
from sbp.plan.verify import over_budget
from sbp.version import VERSION

FORMAT = 2
"""The version of the file's own form."""

_CODES = [int]
_SHAPE = {
    "sbp plan": int,
    "made_for": {str: str},
    "program": str,
    "types": {
        "values": {str: _CODES},
        "rows": {str: ([_CODES], [_CODES], [str])},
        "regions": {str: [_CODES]},
        "outputs": [_CODES],
        "seconds": float,
        "lower_bound": float,
        "bounds_reuse": bool,
        "memory_prices": int,
        "faster": {None: {field.name: float for field in dataclasses.fields(Cost)}},
    },
    "removed": [(int, int, _CODES, {None: int}, {None: int})],
    "seal": str,
    "plan": [str],
}
"""The shape of a file. `[shape]` is a list of any length, a tuple is a list of fixed length,
`{str: shape}` is an object with any names, and `{None: shape}` is null or the shape."""


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
        types, removed = _types(program), _removed(program)
        return cls(
            made_for=_made_for(program.request),
            program=digests(program.request.graph),
            types=types,
            removed=removed,
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
        except (ValueError, RecursionError) as error:
            raise _refused(f"it is no file of plan.save: {error}") from error
        form = read.get("sbp plan", FORMAT) if isinstance(read, dict) else FORMAT
        if form != FORMAT:
            raise _refused(f"it has format {shown(form)}, and this version reads {FORMAT}")
        if not _has_shape(read, _SHAPE):
            raise _refused("it does not have the shape of a file of plan.save")
        return cls(
            made_for=read["made_for"],
            program=tuple(read["program"].split()),
            types=read["types"],
            removed=tuple(
                (value, first, tuple(codes), *loops)
                for value, first, codes, *loops in read["removed"]
            ),
            lines=tuple(read["plan"]),
            seal=read["seal"],
        )

    def program_for(self, request: Request) -> Program:
        """The plan for a request, without choosing types.

        Arguments:
          request: the traced program with everything that its plan is chosen by.

        Raises:
          SbpError: `saved-plan` where the plan was made for another program, mesh, version or
            option, or does not hold.
        """
        self._check_purpose(request)
        program = self._found_without_budgets(request) or self._checked(request)
        if self.seal != _seal(self.types, self.removed):
            raise _refused("its figures were changed: the seconds, the bound, or how it was found")
        limit = request.memory_limit
        if limit is not None and program.cost.peak_memory_bytes > limit:
            raise _refused("it takes more memory than memory_limit")
        return program

    def _checked(self, request: Request) -> Program:
        """The program with the types of the file, which has the text of the file."""
        try:
            program = self._resolved(request)
        except SbpInternalError as error:
            raise _refused(f"its types do not hold in this program: {error}") from error
        self._compare(program)
        return program

    def _found_without_budgets(self, request: Request) -> Program | None:
        """The program where planning without the budgets gives it and it keeps to them, as in
        `sbp.plan.fit`; None for another one."""
        if not request.budgets:
            return None
        try:
            program = self._checked(dataclasses.replace(request, budgets=()))
        except SbpError:
            return None
        if next(over_budget(program.block, request), None) is not None:
            return None
        typing = dataclasses.replace(program.typing, request=request)
        return dataclasses.replace(program, typing=typing)

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
        typing = self._typing(request)
        certify(typing)
        program = first = resolve(typing)
        known = {_key(r): r for r in repeats(typing, first.block)}
        if len({*self.removed} & known.keys()) != len(self.removed):
            raise _refused("its repeated conversions are not those of this program")
        removed = tuple(known[key] for key in self.removed)
        if removed:
            typing = save(typing, removed)
            certify(typing)
            program = dataclasses.replace(
                resolve(typing), first_typing=first.typing, removed=removed
            )
        faster = self.types["faster"]
        return dataclasses.replace(
            program,
            declined=tuple(r for r in known.values() if r not in removed),
            memory_prices=self.types["memory_prices"],
            faster=faster and Cost(**faster),
        )

    def _typing(self, request: Request) -> Typing:
        """The typing with the decisions of the file. Its other types follow from these."""
        flow, read = request.flow, self.types
        try:
            fields = typed(flow, [self._choice(decision) for decision in flow.decisions])
        except (KeyError, IndexError) as error:
            raise _refused("it has no types for some of the program's values") from error
        every = [*fields["values"].values(), *fields["outputs"]]
        every += [t for row in fields["rows"].values() for t in (*row.ins, *row.outs)]
        if any(len(codes) != len(request.mesh.sizes) for codes in every):
            raise _refused("its types are for another number of mesh axes")
        return Typing(
            request=request,
            graph=request.graph,
            **fields,
            seconds=float(read["seconds"]),
            lower_bound=float(read["lower_bound"]),
            bounds_reuse=read["bounds_reuse"],
            sums=request.sums,
        )

    def _choice(self, decision: Decision) -> Choice:
        """The row or type that the file has for a decision."""
        rows, (kind, key) = self.types["rows"], decision.place
        match kind:
            case "row":
                ins, outs, kernels = rows[str(key)]
                return NdRow(tuple(map(tuple, ins)), tuple(map(tuple, outs)), tuple(kernels))
            case "value":
                codes = self.types["values"][str(key)]
            case "read":
                node, operand = key
                codes = rows[str(node)][0][operand]
            case "returned":
                node, region, output = key
                codes = self.types["regions"][f"{node}.{region}"][output]
            case "output":
                codes = self.types["outputs"][key]
        return tuple(codes)

    def _compare(self, program: Program) -> None:
        """Compares the types and the text of the file with those of its program. The source lines
        of the text may differ."""
        lines = itertools.zip_longest(self.lines, str(program).splitlines(), fillvalue="")
        pairs = [tuple(line.partition("  # ")[0] for line in pair) for pair in lines]
        wrong = [number for number, (own, made) in enumerate(pairs) if own != made]
        if wrong:
            number = next(filter(None, wrong), 0)  # the head has only the sum of the other lines
            own, made = (line.strip() or "no line" for line in pairs[number])
            raise _refused(f"line {number + 1} of the plan is `{own}`, and its types give `{made}`")
        if (self.types, self.removed) != (_types(program), _removed(program)):
            raise _refused("its types do not agree with each other")


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


def _types(program: Program) -> dict[str, Any]:
    """The types and figures of a plan as the file has them."""
    first, last = program.first_typing or program.typing, program.typing
    types = {
        "values": {str(v): first.values[v] for v in sorted(first.values)},
        "rows": {str(n): (row.ins, row.outs, row.kernels) for n, row in sorted(first.rows.items())},
        "regions": {f"{n}.{i}": codes for (n, i), codes in sorted(first.region_outputs.items())},
        "outputs": first.outputs,
        "seconds": first.seconds,
        "lower_bound": last.lower_bound,
        "bounds_reuse": last.bounds_reuse,
        "memory_prices": program.memory_prices,
        "faster": program.faster and dataclasses.asdict(program.faster),
    }
    return json.loads(json.dumps(types))


def _removed(program: Program) -> tuple[Any, ...]:
    return tuple(map(_key, program.removed))


def _key(repeat: Repeat) -> tuple[Any, ...]:
    return repeat.value, repeat.first, repeat.codes, repeat.loop, repeat.first_loop


def _seal(types: dict[str, Any], removed: tuple[Any, ...]) -> str:
    """A digest of what a file says of its types, its figures included."""
    return hashlib.sha256(json.dumps([types, removed]).encode()).hexdigest()[:16]


def _has_shape(x: Any, shape: Any) -> bool:
    """Whether a part of a file has a shape of `_SHAPE`. `true` is no number, and each number has to
    be finite as a float."""
    match shape:
        case list():
            return type(x) is list and all(_has_shape(item, shape[0]) for item in x)
        case tuple():
            return type(x) is list and len(x) == len(shape) and all(map(_has_shape, x, shape))
        case dict() if None in shape:
            return x is None or _has_shape(x, shape[None])
        case dict() if str in shape:
            return type(x) is dict and all(_has_shape(item, shape[str]) for item in x.values())
        case dict():
            return (
                type(x) is dict
                and x.keys() == shape.keys()
                and all(_has_shape(x[key], inner) for key, inner in shape.items())
            )
        case _ if shape in (int, float):
            return type(x) in (int, shape) and abs(x) <= sys.float_info.max
        case _:
            return type(x) is shape


def _refused(title: str, *details: str) -> SbpError:
    return SbpError(title, code="saved-plan", details=details, subject="the saved plan")
