"""Plans in files: how sbp writes a plan and reads it back.

A file has the program, mesh and options that the plan was made for, the choices of types and rows,
and the text of the plan. sbp does not trust a file. The file must have the shape that `dumps`
writes. The certificate and the verifier check its choices in the same way as new choices. The plan
with these choices must have the text of the file.
"""

import contextlib
import enum
import hashlib
import itertools
import json
import os
from collections.abc import Mapping, Sequence, Set as AbstractSet
from dataclasses import asdict, astuple, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from sbp import _jax
from sbp.errors import SbpError, SbpInternalError, Span, refused
from sbp.infer.request import Recomputation, Request
from sbp.infer.rows import NdRow
from sbp.infer.space import Code, decode, encode
from sbp.infer.typing import Typing, certify, typing_fields
from sbp.kinds import show
from sbp.limits import policies_in
from sbp.plan.fit import with_recomputation
from sbp.plan.program import Cost, Program, node_place, resolve, shape_text
from sbp.plan.saving import Repeat, repeats, save
from sbp.trace.graph import Constant, Graph, Operand
from sbp.types import MONOIDS, Broadcast, Split, Unreduced
from sbp.version import VERSION

FORMAT = 8
"""The version of the file's own form."""

_PARTS = {
    "made_for": (dict, "an object"),
    "program": (str, "a string"),
    "figures": (dict, "an object"),
    "recomputed": (list, "a list"),
    "choices": (list, "a list"),
    "removed": (list, "a list"),
    "seal": (str, "a string"),
    "plan": (list, "a list"),
}
"""The parts of a file besides its format."""

_MALFORMED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""The exceptions of Python that a file with another shape may cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedPlan:
    """A plan as it stands in a file.

    Arguments:
      made_for: the versions, mesh, hardware and options that it was made for, as texts.
      program: the digests of the program's operations (`digests`).
      figures: the seconds that were modelled, the bound on them, and how the plan was found.
      recomputed: the fields of `Recomputation`; empty for a program as it was traced.
      choices: for each decision of the program, the type; of a row, the types of its operands and
        results and its kernels.
      removed: the repeated conversions that the plan does not have: for each the value, the value
        that is read in its place, and the type.
      lines: the text of the plan before these were removed.
      seal: a digest of `figures` and `removed`. Without it, sbp would not notice if someone changed
        the lower bound in a file.
    """

    made_for: dict[str, str]
    program: tuple[str, ...]
    figures: dict[str, Any]
    recomputed: tuple[Any, ...]
    choices: tuple[Any, ...]
    removed: tuple[Any, ...]
    lines: tuple[str, ...]
    seal: str

    @classmethod
    def of(cls, program: Program) -> "SavedPlan":
        """A plan as a file has it."""
        first, last = program.before or program, program.typing
        figures = {
            "seconds": first.typing.seconds,
            "lower_bound": last.lower_bound,
            "bounds_reuse": last.bounds_reuse,
            "faster": program.faster and asdict(program.faster),
        }
        choices = map(first.typing.choice, program.request.flow.decisions)
        removed = tuple(map(_key, program.removed))
        return cls(
            made_for=_made_for(program.request),
            program=digests(program.request.graph),
            figures=figures,
            recomputed=astuple(how) if (how := program.request.recomputed) else (),
            choices=tuple(
                (one.ins, one.outs, one.kernels) if isinstance(one, NdRow) else one
                for one in choices
            ),
            removed=removed,
            lines=tuple(str(first).splitlines()),
            seal=_seal(figures, removed),
        )

    def dumps(self) -> str:
        """The text of the file: JSON, with each line of the plan on a line."""
        parts = {
            "made_for": json.dumps(self.made_for, indent=1),
            "program": json.dumps(" ".join(self.program)),
            "figures": json.dumps(self.figures),
            "recomputed": json.dumps(self.recomputed),
            "choices": json.dumps(self.choices),
            "removed": json.dumps(self.removed),
            "seal": json.dumps(self.seal),
            "plan": json.dumps(self.lines, indent=1, ensure_ascii=False),
        }
        lines = [f'"sbp plan": {FORMAT}', *(f'"{name}": {text}' for name, text in parts.items())]
        return "{" + ",\n".join(lines) + "}\n"

    @classmethod
    def loads(cls, text: str) -> "SavedPlan":
        """Reads what `dumps` writes.

        Raises:
          SbpError: `saved-plan` for another text.
        """
        try:
            read = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise _refusal(f"the file is not JSON that sbp reads: {error}") from error
        form = read.get("sbp plan") if isinstance(read, dict) else None
        if form != FORMAT:
            raise _refusal(f"it has format {show(form)}, and this version of sbp reads {FORMAT}")
        for part, (kind, what) in _PARTS.items():
            if not isinstance(read.get(part), kind):
                before, found, _ = text.partition(f'"{part}":')
                number = before.count("\n") + 1
                where = f"line {number} of the file: " if found else "the file: "
                raise _refusal(f"{where}`{part}` must be {what}")
        return cls(
            made_for=read["made_for"],
            program=tuple(read["program"].split()),
            figures=read["figures"],
            recomputed=_tuples(read["recomputed"]),
            choices=_tuples(read["choices"]),
            removed=_tuples(read["removed"]),
            lines=tuple(map(str, read["plan"])),
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
        if self.recomputed:
            try:
                request = with_recomputation(request, Recomputation(*self.recomputed))
            except _MALFORMED as error:
                raise _refusal("its `recomputed` does not fit the program") from error
        self._check_purpose(request)
        if self.seal != _seal(self.figures, self.removed):
            raise _refusal("its `figures` or `removed` were changed after plan.save wrote them")
        program = None
        if request.budgets:
            # Planning tries without the budgets first, as `sbp.plan.fit` says.
            with contextlib.suppress(SbpError):
                program = self._resolve(replace(request, budgets=())).within(request)
        program = program or self._resolve(request)
        if not program.fits:
            raise _refusal("it takes more memory than memory_limit")
        return program

    def _check_purpose(self, request: Request) -> None:
        for name, value in _made_for(request).items():
            if self.made_for.get(name) != value:
                raise _refusal(
                    f"it was made with {name} {self.made_for.get(name) or '(none)'}, but this call"
                    f" has {name} {value or '(none)'}"
                )
        graph = request.graph
        nodes = list(graph.walk())
        pairs = itertools.zip_longest(self.program, digests(graph))
        for number, (mine, own) in enumerate(pairs):
            if mine != own:
                shapes = (shape_text(graph.avals[v]) for v in graph.inputs)
                inputs = zip(graph.input_names, shapes, self.lines[1:], strict=False)
                others = (
                    f"{name} is {shape}, but the plan has `{line.strip()}`"
                    for name, shape, line in inputs
                    if f": {shape} " not in line
                )
                where = "the results differ" if number else next(others, "the arguments differ")
                if 0 < number <= len(nodes):
                    node = nodes[number - 1]
                    where = f"the first difference is {node.op} {node_place(node)}"
                raise _refusal(f"it was made for another program: {where}")

    def _resolve(self, request: Request) -> Program:
        """The program with the choices of the file, certified and verified, which has its text."""
        figures = self.figures
        try:
            decisions = request.flow.decisions
            if len(decisions) != len(self.choices):
                raise _refusal(
                    f"it has {len(self.choices)} choices, and this call needs {len(decisions)}: its"
                    " in_types or out_types pin other values, or the file was changed"
                )
            pairs = zip(decisions, self.choices, strict=True)
            choices = [NdRow(*one) if d.kind == "row" else one for d, one in pairs]
            typing = Typing(
                request=request,
                graph=request.graph,
                seconds=float(figures["seconds"]),
                lower_bound=float(figures["lower_bound"]),
                bounds_reuse=figures["bounds_reuse"],
                sums=request.sums,
                **typing_fields(request.flow, choices),
            )
            certify(typing)
            program = first = resolve(typing)
            self._compare(first)
            known = {_key(r): r for r in repeats(typing, first.block)}
            if len({*self.removed} & known.keys()) != len(self.removed):
                raise _refusal("its `removed` lists conversions that this program does not repeat")
            removed = tuple(known[key] for key in self.removed)
            if removed:
                typing = save(typing, removed)
                certify(typing)
                program = replace(resolve(typing), before=first, removed=removed)
            faster = figures["faster"]
            return replace(
                program,
                declined=tuple(r for r in known.values() if r not in removed),
                faster=faster and Cost(**faster),
            )
        except (SbpInternalError, *_MALFORMED) as error:
            raise _refusal(
                "its types do not hold in this program:"
                f" {error if isinstance(error, SbpInternalError) else 'see `choices` in the file'}"
            ) from error

    def _compare(self, program: Program) -> None:
        """Compares the text of the file with that of its program. The source lines of the text may
        differ."""
        lines = itertools.zip_longest(self.lines, str(program).splitlines(), fillvalue="")
        pairs = [tuple(line.partition("  # ")[0] for line in pair) for pair in lines]
        wrong = [number for number, (own, made) in enumerate(pairs) if own != made]
        if wrong:
            number = next(filter(None, wrong), 0)  # the head has only the sum of the other lines
            own, made = (line.strip() or "no line" for line in pairs[number])
            raise _refusal(f"line {number + 1} of the plan is `{own}`, but its types give `{made}`")


def _made_for(request: Request) -> dict[str, str]:
    """What a plan depends on besides its program, as texts."""
    demand = request.demand
    padded = [
        *(f"input {i}" for i in sorted(demand.padded_inputs)),
        *(f"output {o}" for o in sorted(demand.padded_outputs)),
    ]
    return {
        "version of sbp": VERSION,
        "version of JAX": jax.__version__,
        "mesh": str(request.mesh),
        "hardware": request.mesh.hardware.name,
        "boxing": " ".join((request.boxing, *map(str, request.axis_policies))),
        "budgets": "; ".join(map(str, request.budgets)),
        "reduce_dtype": str(request.reduce_dtype),
        "memory_limit": str(request.memory_limit),
        "remat": request.remat,
        "values held padded": ", ".join(padded) or "none",
        "donated inputs": ", ".join(request.graph.input_names[i] for i in request.donated),
    }


def _key(repeat: Repeat) -> tuple[Any, ...]:
    return repeat.value, repeat.first, repeat.codes, repeat.loop, repeat.first_loop


def _seal(figures: dict[str, Any], removed: tuple[Any, ...]) -> str:
    """A digest of what the text of a plan does not show."""
    return hashlib.sha256(json.dumps([figures, removed]).encode()).hexdigest()[:16]


def _tuples(x: Any) -> Any:
    """A part of a file with tuples in place of lists."""
    return tuple(map(_tuples, x)) if isinstance(x, list) else x


def _refusal(title: str) -> SbpError:
    return SbpError(title, code="saved-plan", subject="the saved plan")


# ---- files --------------------------------------------------------------------------------------
# Files of plans: `plan.save` writes them, `sbp.jit(.., plan=path)` reads them.


def path_of(path: Any, what: str) -> str:
    """The absolute path of a file; `what` begins the sentence of an error.

    Raises:
      SbpError: `bad-argument` for what is no path.
    """
    try:
        found = os.fsdecode(path)
        if not found or b"\0" in os.fsencode(found):
            raise ValueError("a path has characters, and none is null")
        return os.path.abspath(found)
    except (TypeError, ValueError) as error:  # ValueError for characters that no path has
        raise refused(f"{what} must be the path of a file, got {show(path)}", error) from error


def load_program(path: str, request: Request) -> Program:
    """The plan of a file, verified.

    Arguments:
      path: of the file.
      request: the program with everything that its plan is chosen by.

    Raises:
      SbpError: `saved-plan` where the file cannot be read, was made for another program, mesh,
        version or option, or does not hold.
    """
    text = read_file(path, "write it with plan.save(path)")
    try:
        return SavedPlan.loads(text).program_for(request)
    except SbpError as error:
        if error.code != "saved-plan":
            raise
        raise SbpError(
            f"{error.title}; plan again without plan=, and save the new plan",
            code="saved-plan",
            details=(*error.details, f"file: {path}"),
        ) from error


def read_file(path: str, advice: str) -> str:
    """The text of a file. The error for one that cannot be read ends in advice.

    Raises:
      SbpError: `saved-plan` where it cannot be read.
    """
    try:
        return Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise SbpError(f"cannot read {show(path)}: {why}; {advice}", code="saved-plan") from error


def write_file(path: Any, data: bytes | str) -> None:
    """Writes a file. Readers see the old file or the new one, and nothing between. The name of a
    folder in a text may be no UTF-8; its bytes are then written as escapes.

    Raises:
      SbpError: `bad-argument` where it cannot be written.
    """
    if isinstance(data, str):
        data = data.encode("utf-8", "backslashreplace")
    target = os.path.realpath(path_of(path, "path"))
    if os.path.exists(target) and not os.path.isfile(target):
        raise SbpError(f"{target} is not a file; choose another path")
    partial = f"{target}.{os.getpid()}.partial"
    try:
        Path(partial).write_bytes(data)
        os.replace(partial, target)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.remove(partial)
        raise SbpError(f"cannot write {target}: {error.strerror}; choose another path") from error


# ---- digests of programs ------------------------------------------------------------------------
# A digest of a program leaves out its source lines. Programs with equal digests have the same
# operations on the same values. So they have the same plans.


def digests(graph: Graph) -> tuple[str, ...]:
    """The digest of the program's arguments, that of each operation in the order of `Graph.walk`,
    and that of its results. They are equal in every process and after edits that move lines."""

    def texts(graph: Graph, operands: Sequence[Operand]) -> list[str]:
        return [_operand(graph, operand) for operand in operands]

    parts: list[Any] = [texts(graph, graph.inputs)]
    for node in graph.walk():
        sides = [texts(graph, node.inputs), texts(graph, node.outputs)]
        sides += [texts(r, side) for r in node.regions for side in (r.inputs, r.outputs)]
        policies = repr(list(policies_in(node.scope)))
        phase = [node.backward, node.is_recomputed]
        parts.append([node.op, sides, plain(node.params), policies, phase])
    parts.append(texts(graph, graph.outputs))
    return tuple(hashlib.sha256(json.dumps(p).encode()).hexdigest()[:12] for p in parts)


def _operand(graph: Graph, operand: Operand) -> str:
    aval = graph.aval(operand)
    shape = f"{aval.dtype}{'<host>' if _jax.in_host(aval) else ''}{list(aval.shape)}"
    if not isinstance(operand, Constant):
        return f"%{operand} {shape}"
    # The elements of an array that a program closes over do not change its plan.
    is_plain = not aval.shape and not _jax.is_extended(aval.dtype)
    return f"{plain(np.asarray(operand.value))} {shape}" if is_plain else shape


def atom(code: Code) -> int | str:
    """An atom as JSON has it: the dim of a split, `B`, or the monoid of a partial."""
    return code - 1 if code > 0 else MONOIDS[-1 - code] if code < 0 else repr(decode(code))


def plain(value: Any) -> Any:
    """A parameter of a primitive as JSON has it, without addresses and source lines.

    >>> plain((1, None, np.dtype("float32"), Split(0)))
    [1, None, 'float32', 0]
    """
    match value:
        case enum.Enum():
            return f"{type(value).__name__}.{value.name}"
        case None | bool() | int() | str():
            return value
        case float() | complex() | bytes():
            return repr(value)
        case Split() | Broadcast() | Unreduced():
            return atom(encode(value))
        case Span():
            return "line"
        case jax.sharding.Sharding():
            # JAX notes shardings of arrays on Explicit axes. What the user asks for is a pin.
            return None
        case np.ndarray():
            return f"{value.dtype}{value.shape}{hashlib.sha256(value.tobytes()).hexdigest()}"
        case Graph():
            return digests(value)
        case Mapping():
            return {str(k): plain(value[k]) for k in sorted(value, key=str)}
        case AbstractSet():
            return sorted(map(plain, value), key=str)
        case _ if _jax.is_jaxpr(value):
            opened, _ = _jax.open_jaxpr(value)
            known = {id(v): n for n, v in enumerate([*opened.constvars, *opened.invars])}

            def operand(v: Any) -> Any:
                return plain(v.val) if hasattr(v, "val") else known.setdefault(id(v), len(known))

            # Operands are numbered as they come: of each step its inputs, then its outputs.
            steps = [
                [
                    eqn.primitive.name,
                    plain(eqn.params),
                    *([*map(operand, side)] for side in (eqn.invars, eqn.outvars)),
                ]
                for eqn in opened.eqns
            ]
            avals = [f"{a.dtype}{a.shape}" for a in _jax.avals_in(value)]
            return [steps, [*map(operand, opened.outvars)], avals]
        case _ if is_dataclass(value) and not isinstance(value, type):
            return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
        case tuple() if names := getattr(value, "_fields", ()):
            return dict(zip(names, map(plain, value), strict=True))
        case np.integer():  # a vmapped equation may have NumPy's integers for dims
            return int(value)
        case np.dtype() | np.generic():
            return str(value)
        case Sequence():
            return [plain(item) for item in value]
        case _:
            # A function or another object by its name: its text may have an address.
            named = getattr(value, "__qualname__", None) or getattr(value, "name", None)
            own = value if isinstance(value, type) else type(value)
            return f"{own.__module__}.{own.__qualname__} {named if isinstance(named, str) else ''}"
