"""Diagnostics: why a program has no typing, which annotations are dear, what fills the memory, with helps that were tried.

`explain` is the writer of prose; what is wrong comes from `infer.check`, what an edit costs from `plan.fit`.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import itertools
import linecache
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sbp import _jax
from sbp.annotate import Pin, annotate_p
from sbp.errors import Diagnostic, Help, Label, RuleRow, Span
from sbp.infer.check import Checker, CheckResult
from sbp.infer.choose import choose
from sbp.infer.constraints import Constraint, PinSite, allowed, pin_sites
from sbp.infer.problem import Demand
from sbp.infer.space import Code, Codes, Policy, decode, encode, local_shape, to_type
from sbp.mesh import MeshSpec
from sbp.plan.fit import fit
from sbp.plan.ir import Apply, Block, Box, Loop, Register
from sbp.plan.program import Program
from sbp.signatures import Op, rule_for
from sbp.trace.graph import Constant, Graph, Node, Operand
from sbp.types import NdSbp

MAX_FAULTS, MAX_HELPS, MAX_ROWS = 5, 3, 4
TRIALS, TRIALS_LARGE, LARGE = 12, 6, 800
"""Plans tried for the helps: for each fault in programs of fewer nodes than LARGE, for all faults together in larger ones."""

DEARER = 0.9
"""A pin is costly when the plan without it takes at most this share of the time."""


# ---- the user's source ---------------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def _expressions(file: str, text: str) -> dict[tuple[int, int, int, int], tuple[ast.expr, str]]:
    """All expressions of a source text by position, each with the name it is assigned to, if any."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):  # a notebook cell with magics
        return {}
    found: dict[tuple[int, int, int, int], tuple[ast.expr, str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.expr) and not isinstance(node, ast.Name | ast.Constant):
            found.setdefault((node.lineno, node.col_offset, node.end_lineno or 0, node.end_col_offset or 0), (node, ""))
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            value = node.value
            key = (value.lineno, value.col_offset, value.end_lineno or 0, value.end_col_offset or 0)
            if key in found:
                found[key] = (found[key][0], node.targets[0].id)
    return found


def _at(span: Span | None) -> tuple[ast.expr | None, str]:
    """The expression at a span and the name it is assigned to."""
    if span is None:
        return None, ""
    text = "".join(linecache.getlines(span.file))
    key = (span.line, span.column - 1, span.end_line or span.line, span.end_column - 1)
    return _expressions(span.file, text).get(key, (None, ""))


def _source(span: Span | None, limit: int = 60) -> str:
    """The source text at a span on one line; empty when there is none."""
    if span is None:
        return ""
    lines = [line.encode() for line in linecache.getlines(span.file)[span.line - 1 : span.end_line or span.line]]
    if not lines:
        return ""
    if len(lines) == 1:
        lines[0] = lines[0][span.column - 1 : span.end_column - 1]
    else:
        lines[0], lines[-1] = lines[0][span.column - 1 :], lines[-1][: span.end_column - 1]
    text = " ".join(b" ".join(lines).decode(errors="replace").split())
    return text if len(text) <= limit else text[: limit - 3].rstrip() + " .."


def _operand_texts(node: Node) -> list[str]:
    """The source texts of a node's operands, when its line shows one for each."""
    match _at(node.span)[0]:
        case ast.BinOp(left=left, right=right):
            parts: list[ast.expr] = [left, right]
        case ast.Compare(left=left, comparators=[right]):
            parts = [left, right]
        case ast.UnaryOp(operand=operand):
            parts = [operand]
        case ast.Call(func=ast.Attribute(value=base), args=args):
            module = isinstance(base, ast.Name) and base.id in ("jnp", "jax", "lax", "np", "sbp")
            parts = [*args] if module or isinstance(base, ast.Attribute) else [base, *args]
        case ast.Call(args=args):
            parts = [*args]
        case _:
            parts = []
    return [_called(p, node.span.file) for p in parts] if node.span and len(parts) == len(node.inputs) else []


def _called(part: ast.expr, file: str) -> str:
    """The source text of an expression; of an annotation, that of what it annotates."""
    while (
        isinstance(part, ast.Call)
        and part.args
        and re.fullmatch(r"(sbp\.)?(annotate|split|replicate|shard|partial)", ast.unparse(part.func))
    ):
        part = part.args[0]
    column, end = part.col_offset + 1, (part.end_col_offset or 0) + 1
    return _source(Span(file=file, line=part.lineno, column=column, end_column=end, end_line=part.end_lineno or part.lineno))


@dataclass(frozen=True, slots=True)
class _Names:
    """What the user calls the values of a program."""

    graph: Graph
    makers: dict[int, Node]

    @classmethod
    def of(cls, graph: Graph) -> _Names:
        return cls(graph, {v: node for node in graph.walk() for v in node.outputs})

    def value(self, operand: Operand) -> str:
        """The name of a value: of an input, or what its line assigns it to; empty when it has none."""
        if isinstance(operand, Constant):
            return ""
        if operand in self.graph.inputs and self.graph.input_names:
            return self.graph.input_names[self.graph.inputs.index(operand)]
        maker = self.makers.get(operand)
        return "" if maker is None or maker.backward else _at(maker.span)[1]

    def operand(self, node: Node, number: int) -> str:
        """The name of an operand where it is read; empty when the user has none for it."""
        operand = node.inputs[number]
        maker = self.makers.get(operand) if isinstance(operand, int) else None
        if node.backward:
            return "the cotangent" if maker is not None and maker.backward else self.value(operand)
        if maker is not None and maker.span == node.span:  # a value inside a library function
            return ""
        texts = _operand_texts(node)
        return texts[number] if texts and len(texts[number]) <= 40 else self.value(operand)

    def site(self, site: PinSite) -> str:
        """The name of what a pin stands on."""
        match site.source:
            case "input":
                names = self.graph.input_names
                return names[site.position] if names else f"input {site.position}"
            case "output":
                return f"output {site.position}"
            case _:
                expression, name = _at(site.span)
                if not name and expression is not None and site.span:
                    name = _called(expression, site.span.file)
                name = name if name and len(name) <= 40 else "this value"
                asked = isinstance(expression, ast.Call) and any(k.arg == "cotangent" for k in expression.keywords)
                return f"the cotangent of {name}" if asked and all(n.backward for n in site.nodes) else name


def _scope(node: Node) -> str:
    """Where a node stands, such as `in ffn/expert_mlp, forward`."""
    if node.backward and node.span:
        return f"in the gradient of line {node.span.line}"
    parts = re.sub(r"\b(transpose|jvp|vmap|jit)\(|\)", "", node.scope).split("/")
    named = [p for p in parts if p and p not in ("rematted_computation", "checkpoint", "while", "body", "cond", "scan", "closed_call")]
    called = [s.function for s in reversed(node.stack) if s.function and not s.function.startswith("<")]
    return f"in {'/'.join(named or called)}, forward" if named or called else "forward"


# ---- edits ---------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Case:
    """A program with what is asked of it: what an edit changes."""

    graph: Graph
    mesh: MeshSpec
    demand: Demand
    boxing: Policy

    def passes(self) -> bool:
        """Whether the checker finds nothing against it; fast to say no, where a plan takes seconds."""
        return Checker(self.graph, self.mesh, self.demand, self.boxing).check(explain=False).status == "sat"

    def plan(self) -> Program | None:
        """The cheapest plan, or None."""
        return fit(self.graph, self.mesh, self.demand, boxing=self.boxing)[0] if self.passes() else None

    def drop(self, site: PinSite, position: int | None = None) -> _Case:
        """The program without a pin, on one mesh axis or on all."""
        codes = tuple(None if position in (None, k) else c for k, c in enumerate(site.codes))
        return self._with(site, codes)

    def repin(self, site: PinSite, position: int, code: Code) -> _Case:
        """The program with another pin on one mesh axis."""
        return self._with(site, tuple(code if k == position else c for k, c in enumerate(site.codes)))

    def _with(self, site: PinSite, codes: tuple[Code | None, ...]) -> _Case:
        wanted = None if all(c is None for c in codes) else codes
        match site.source:
            case "input":
                inputs = tuple(wanted if i == site.position else t for i, t in enumerate(self.demand.inputs))
                return dataclasses.replace(self, demand=dataclasses.replace(self.demand, inputs=inputs))
            case "output":
                outputs = tuple(wanted if i == site.position else t for i, t in enumerate(self.demand.outputs))
                return dataclasses.replace(self, demand=dataclasses.replace(self.demand, outputs=outputs))
            case _:
                atoms = {axis: decode(c) for axis, c in zip(self.mesh.names, codes, strict=True) if c is not None}
                pin = Pin(NdSbp(atoms)) if atoms else None
                edited = _rewrite(self.graph, pins={n.id: pin for n in site.nodes}, inserts=None)
                return dataclasses.replace(self, graph=edited)

    def insert(self, node: Node, operand: int, position: int, code: Code) -> _Case:
        """The program with an annotation on an operand of a line, before that line."""
        pin = Pin(NdSbp({self.mesh.names[position]: decode(code)}))
        return dataclasses.replace(self, graph=_rewrite(self.graph, pins={}, inserts=(node, operand, pin)))


def _rewrite(graph: Graph, pins: dict[int, Pin | None], inserts: tuple[Node, int, Pin] | None) -> Graph:
    """The program with pins replaced (None removes the annotation) and an annotation inserted wherever a line was traced.

    An inserted annotation stands for `x = annotate(x)` before the line: readers from there on see it, gradients included.
    """
    avals = dict(graph.avals)
    values = itertools.count(max(avals, default=0) + 1)
    ids = itertools.count(max((n.id for n in graph.walk()), default=0) + 1)
    same: dict[int, Operand] = {}

    def of(operand: Operand) -> Operand:
        while isinstance(operand, int) and operand in same:
            operand = same[operand]
        return operand

    def visit(g: Graph) -> Graph:
        nodes: list[Node] = []
        for node in g.nodes:
            if inserts is not None:
                line, number, pin = inserts
                alike = node.op == line.op and node.span == line.span and len(node.inputs) == len(line.inputs)
                operand = of(node.inputs[number]) if alike else None
                if isinstance(operand, int) and (node.id == line.id or (node.span is not None and node.backward == line.backward)):
                    value = next(values)
                    avals[value] = avals[operand]
                    params = {"pin": pin, "cotangent": None}
                    note = dataclasses.replace(node, id=next(ids), op=annotate_p.name, primitive=annotate_p, params=params, regions=())
                    nodes.append(dataclasses.replace(note, inputs=(operand,), outputs=(value,)))
                    same[operand] = value
            if node.id in pins and pins[node.id] is None:
                same[node.outputs[0]] = of(node.inputs[0])
                continue
            params = node.params | {"pin": pins[node.id]} if node.id in pins else node.params
            regions = tuple(visit(r) for r in node.regions)
            nodes.append(dataclasses.replace(node, inputs=tuple(map(of, node.inputs)), params=params, regions=regions))
        return dataclasses.replace(g, nodes=tuple(nodes), outputs=tuple(map(of, g.outputs)), avals=avals)

    return visit(graph)


# ---- no typing -----------------------------------------------------------------------------------------------------------------------


def explain(graph: Graph, mesh: MeshSpec, demand: Demand, boxing: Policy) -> tuple[Diagnostic, ...]:
    """Says why a program has no typing: each independent fault once, in source order.

    Returns:
      At least one diagnostic, with code `no-signature`, `annotation-conflict`, `no-typing` or `solver-limit`.
    """
    case = _Case(graph, mesh, demand, boxing)
    checker = Checker(graph, mesh, demand, boxing)
    faults: list[CheckResult] = []
    without: set[tuple[str, str]] = set()
    found = checker.check()
    while found.status == "unsat" and len(faults) < MAX_FAULTS:
        without |= {(found.mesh_axis, c.name) for c in found.pins} or {(found.mesh_axis, "policy")}
        if _key(found) not in {_key(f) for f in faults}:  # else more pins that end in the same place, or the same on another axis
            faults.append(found)
        found = checker.check(without)
    diagnostics: list[Diagnostic] = []
    names = _Names.of(graph)
    for fault in faults:
        others = [f for f in faults if f is not fault]
        diagnostics.append(_Fault(case, fault, others, names).diagnostic())
    if found.status == "unknown":
        diagnostics.append(
            Diagnostic(
                code="solver-limit",
                severity="error",
                title=f"the checker reached its resource limit on mesh axis `{found.mesh_axis}` before it could say why there is no typing",
                notes=(f'the program has no typing under boxing="{boxing}"; check a part of it alone',),
            )
        )
    if not diagnostics:
        diagnostics.append(_no_typing(case))
    return tuple(sorted(diagnostics, key=lambda d: (d.primary is None, d.primary.span if d.primary else None)))


def _key(fault: CheckResult) -> tuple[Any, ...]:
    """What makes two faults one: operands of the same line, however often it was traced."""
    return tuple((c.node.span or c.node.id, c.node.op, c.node.backward, c.operand) for c in fault.sink if c.node) or fault.pins


@dataclass(frozen=True, slots=True)
class _Fault:
    """One fault, about to be put in words."""

    case: _Case
    found: CheckResult
    others: list[CheckResult]
    names: _Names

    @property
    def axis(self) -> str:
        return self.found.mesh_axis

    @property
    def position(self) -> int:
        return self.case.mesh.names.index(self.axis)

    def diagnostic(self) -> Diagnostic:
        if not self.found.sink:
            return self.impossible()
        node = self.found.sink[0].node
        assert node is not None
        region = self.found.sink[0].kind == "region"
        pins = self.found.pins
        conflict = len(pins) > 1 and (region or not any(self.direct(node, c) for c in pins))
        labels = [Label(span=node.span, text=self.primary(node), primary=True)] if node.span else []
        labels += [
            Label(span=c.site.span, text=self.pin_text(c, node)) for c in pins if c.site and c.site.span and c.site.span != node.span
        ]
        if not labels:
            spans = [c.because.span for c in reversed(self.found.equations) if c.because.span]
            labels = [Label(span=s, text="the types of its operands end here", primary=True) for s in spans[:1]]
        return Diagnostic(
            code="annotation-conflict" if conflict else "no-signature",
            severity="error",
            title=self.title(node, conflict),
            labels=tuple(labels),
            rule="" if region else self.rule(node),
            rows=() if region else self.rows(node),
            notes=tuple(self.notes(node)),
            helps=self.helps(node),
            scope=_scope(node),
        )

    # ---- words -----------------------------------------------------------------------------------------------------------------

    def subject(self, node: Node) -> str:
        text = f"`{_source(node.span) or node.op}`"
        return f"the gradient of {text}" if node.backward else text

    def title(self, node: Node, conflict: bool) -> str:
        where = f"on mesh axis `{self.axis}`"
        if self.found.sink[0].kind == "region":
            what = self.found.sink[0].because.text.rsplit(" of ", 1)[0]
            made = self.found.made[0]
            if what == "predicate":
                return f"the predicate of {self.subject(node)} is left {'partial' if made[:1] < (0,) else 'split'} {where}"
            return f"{what} of {self.subject(node)} cannot keep one type {where}"
        if conflict:
            pinned = [f"{self.names.site(c.site)} as {decode(c.code)!r}" for c in self.found.pins if c.site]
            return f"{' and '.join(pinned)} cannot meet in {self.subject(node)} {where}"
        return f"{self.subject(node)} has no SBP signature {where}"

    def primary(self, node: Node) -> str:
        arrives = [f"{self.name(node, c)} is {_atoms(made)}" for c, made in zip(self.found.sink, self.found.made, strict=True)]
        if self.found.sink[0].kind == "region":
            return f"{arrives[0]}, but {_atoms(self.found.wanted[0])} is kept here"
        if len(arrives) == 1:
            hint = "; reduce it first" if all(c < 0 for c in self.found.made[0]) else ""
            return f"{arrives[0]} here, which {node.op} does not take{hint}"
        direct = all(any(self.direct(node, c, k.operand) for c in self.found.pins) for k in self.found.sink)
        return "these two cannot meet here" if direct and len(arrives) == 2 else f"{', '.join(arrives)}: they cannot meet here"

    def name(self, node: Node, constraint: Constraint) -> str:
        if constraint.kind == "region":
            return constraint.because.text.rsplit(" of ", 1)[0]
        return self.names.operand(node, constraint.operand) or f"operand {constraint.operand}"

    def direct(self, node: Node, pin: Constraint, operand: int | None = None) -> bool:
        """Whether a pin stands on an operand of the node itself (one of the sink's, or the given one)."""
        if pin.site is None or node.regions:
            return False
        pinned = {n.outputs[0] for n in pin.site.nodes}
        if pin.site.source == "input":
            pinned = {self.case.graph.inputs[pin.site.position]}
        return any(node.inputs[c.operand] in pinned for c in self.found.sink if operand is None or c.operand == operand)

    def pin_text(self, pin: Constraint, node: Node) -> str:
        assert pin.site is not None
        text = f"{self.names.site(pin.site)} is {decode(pin.code)!r} on `{self.axis}`"
        if pin.code > 0:
            shape = self.case.graph.aval(_pinned_value(self.case.graph, pin.site)).shape
            role = self.role(pin, node)
            text += role or f": dim {pin.code - 1} of {'x'.join(map(str, shape))}"
        return text

    def role(self, pin: Constraint, node: Node) -> str:
        """What the pinned dim is to a contraction that reads it."""
        if node.op != "dot_general" or pin.site is None:
            return ""
        contract, batch = node.params["dimension_numbers"]
        for c in self.found.sink:
            if self.direct(node, pin, c.operand):
                if pin.code - 1 in contract[c.operand]:
                    return ", the contracted dim"
                return ", a batch dim" if pin.code - 1 in batch[c.operand] else ", not contracted"
        return ""

    def rule(self, node: Node) -> str:
        ins = [self.names.operand(node, i) or f"operand {i}" for i in range(len(node.inputs))]
        outs = [self.names.value(v) or "result" for v in node.outputs]
        return f"{node.op} on one mesh axis ({', '.join(ins)} -> {', '.join(outs)})"

    def rows(self, node: Node) -> tuple[RuleRow, ...]:
        """The rows nearest to what arrives: those that most operands of the sink fit."""
        made = {c.operand: codes for c, codes in zip(self.found.sink, self.found.made, strict=True)}
        ranked: list[tuple[int, int, RuleRow]] = []
        for number, row in enumerate(self.axis_rows(node)):
            fits = {i: any(allowed(c, encode(row.ins[i]), self.case.boxing) for c in codes) for i, codes in made.items()}
            good = [self.names.operand(node, i) or f"operand {i}" for i, ok in fits.items() if ok]
            bad = [self.names.operand(node, i) or f"operand {i}" for i, ok in fits.items() if not ok]
            remark = ""
            if good:
                does = "does" if len(bad) == 1 else "do"
                remark = f"{', '.join(good)} {'fits' if len(good) == 1 else 'fit'}, {', '.join(bad)} {does} not"
            ranked.append(
                (-len(good), number, RuleRow(inputs=tuple(map(repr, row.ins)), outputs=tuple(map(repr, row.outs)), remark=remark))
            )
        ranked.sort(key=lambda r: r[:2])
        near = [r for r in ranked if r[2].remark]
        return tuple(r for _, _, r in (near or ranked)[:MAX_ROWS])

    def axis_rows(self, node: Node) -> Sequence[Any]:
        found = rule_for(node.op)
        ins, outs = [self.case.graph.aval(o) for o in node.inputs], [self.case.graph.avals[o] for o in node.outputs]
        return () if found is None else found.rows(Op(node.op, node.params, tuple(ins), tuple(outs), self.case.mesh.sizes[self.position]))

    def notes(self, node: Node) -> Iterator[str]:
        for c in self.found.pins:
            if c.site and c.site.source == "input":
                where = f"{decode(c.code)!r} on `{self.axis}` by in_types or by the sharding it arrives with"
                yield f"input {self.names.site(c.site)} is pinned {where}"
            elif c.site and c.site.span and c.site.span == node.span:
                yield f"line {c.site.span.line} also pins {self.pin_text(c, node)}"
        through = [c for c in self.found.equations if c not in self.found.sink and c.because.span and c.node is not node]
        lines = sorted({c.because.span.line for c in through if c.because.span})
        if lines:
            yield f"the pinned types flow here through {'line' if len(lines) == 1 else 'lines'} {', '.join(map(str, lines))}"
        if self.found.policy:
            what = "no operand may be resharded here" if self.case.boxing == "explicit" else "only partial values may be converted here"
            yield f'boxing is "{self.case.boxing}", so {what}'
        if self.others:
            yield f"helps are priced with the other {len(self.others)} error{'s' * (len(self.others) > 1)} out of the way"

    # ---- helps -----------------------------------------------------------------------------------------------------------------

    def helps(self, node: Node) -> tuple[Help, ...]:
        """Edits that give the program a typing, priced by solving again, cheapest first."""
        base = self.case
        for other in self.others:
            position = base.mesh.names.index(other.mesh_axis)
            mine = {c.name for c in self.found.pins} if other.mesh_axis == self.axis else set[str]()
            for c in other.pins:
                if c.site is not None and c.name not in mine:
                    site = next((s for s in pin_sites(base.graph, base.mesh, base.demand) if _same_site(s, c.site)), None)
                    base = base.drop(site, position) if site else base
        large = sum(1 for _ in base.graph.walk()) > LARGE
        left = max(1, TRIALS_LARGE // (1 + len(self.others))) if large else TRIALS
        found: list[tuple[float, int, Help]] = []
        for number, (text, edit, watch) in enumerate(self.edits(base, node)):
            trial = edit()
            if left and trial.passes():
                left -= 1
                program = fit(trial.graph, trial.mesh, trial.demand, boxing=trial.boxing)[0]
                if program is not None:
                    became = self.became(node, program) if watch else ""
                    found.append((program.cost.bytes_per_device, number, _help(text + became, program)))
        found.sort(key=lambda f: f[:2])
        return tuple(h for _, _, h in found[:MAX_HELPS])

    def became(self, node: Node, program: Program) -> str:
        name = self.names.value(node.outputs[0]) if node.outputs else ""
        code = program.typing.values.get(node.outputs[0]) if node.outputs else None
        return f"; {name or 'the result'} becomes {decode(code[self.position])!r}" if code is not None else ""

    def edits(self, base: _Case, node: Node) -> Iterator[tuple[str, Callable[[], _Case], bool]]:
        """Candidate edits: one operand of the line brought to a row, a pin dropped, a split moved to another dim, another policy."""
        k = self.position
        if self.found.sink[0].kind == "equation" and node.span and not node.backward:
            yield from self.insertions(base, node)
        sites = pin_sites(base.graph, base.mesh, base.demand)
        for pin in self.found.pins:
            site = next((s for s in sites if pin.site and _same_site(s, pin.site)), None)
            if site is None:
                continue
            name = self.names.site(site)
            where = f"at line {site.span.line}" if site.span else "in in_types" if site.source == "input" else "in out_types"
            shape = base.graph.aval(_pinned_value(base.graph, site)).shape
            for dim, size in enumerate(shape if pin.code > 0 else ()):
                if dim != pin.code - 1 and size % base.mesh.sizes[k] == 0:
                    yield f"split {name} on dim {dim} {where}", functools.partial(base.repin, site, k, 1 + dim), True
            if site.source == "annotation" and sum(c is not None for c in site.codes) == 1:
                text = f"drop `{_source(site.span)}` {where}"
            else:
                text = f"leave {name} free on `{self.axis}` {where}" + (f' ("{self.axis}:?")' if site.source != "annotation" else "")
            yield text, functools.partial(base.drop, site, k), True
        if self.found.policy:
            for policy in ("reduce", "auto") if base.boxing == "explicit" else ("auto",):
                yield f'boxing="{policy}"', functools.partial(dataclasses.replace, base, boxing=policy), False

    def insertions(self, base: _Case, node: Node) -> Iterator[tuple[str, Callable[[], _Case], bool]]:
        assert node.span is not None
        made = {c.operand: codes for c, codes in zip(self.found.sink, self.found.made, strict=True)}
        seen: set[tuple[int, Code]] = set()
        for row in self.axis_rows(node):
            wrong = [i for i, codes in made.items() if not any(allowed(c, encode(row.ins[i]), base.boxing) for c in codes)]
            if len(wrong) != 1 or (wrong[0], encode(row.ins[wrong[0]])) in seen:
                continue
            (number,) = wrong
            code = encode(row.ins[number])
            seen.add((number, code))
            name = self.names.operand(node, number)
            operand = node.inputs[number]
            maker = self.names.makers.get(operand) if isinstance(operand, int) else None
            inline = maker is not None and maker.op == annotate_p.name and maker.span and maker.span.line == node.span.line
            if not name or code < 0 or inline:
                continue
            call = f'sbp.replicate({name}, "{self.axis}")' if code == 0 else f'sbp.split({name}, {code - 1}, "{self.axis}")'
            where = "before" if name.isidentifier() else "at"
            yield f"{call} {where} line {node.span.line}", functools.partial(base.insert, node, number, self.position, code), True

    # ---- a pin that nothing satisfies ---------------------------------------------------------------------------------------------

    def impossible(self) -> Diagnostic:
        """A pin that its own tensor cannot have."""
        pin = self.found.pins[0]
        assert pin.site is not None
        site, graph, n = pin.site, self.case.graph, self.case.mesh.sizes[self.position]
        aval = graph.aval(_pinned_value(graph, site))
        if _jax.is_extended(aval.dtype):
            why = "PRNG keys are whole on every device; split what is drawn from them"
        elif pin.code > 0 and aval.shape[pin.code - 1] % n:
            why = (
                f"{n} devices do not divide dim {pin.code - 1} of size {aval.shape[pin.code - 1]}; at the boundary JAX holds even dims only"
            )
        else:
            why = f"it has shape {tuple(aval.shape)} and dtype {aval.dtype}"
        labels = (Label(span=site.span, text=f"pinned {decode(pin.code)!r} on `{self.axis}`", primary=True),) if site.span else ()
        program = self.case.drop(site, self.position).plan() if not self.others else None
        helps = (_help(f"leave it free on `{self.axis}`", program),) if program else ()
        title = f"{self.names.site(site)} cannot be {decode(pin.code)!r} on mesh axis `{self.axis}`"
        return Diagnostic(code="no-typing", severity="error", title=title, labels=labels, notes=(why,), helps=helps)


def _help(text: str, program: Program) -> Help:
    return Help(text=text, bytes_per_device=program.cost.bytes_per_device)


def _same_site(a: PinSite, b: PinSite) -> bool:
    """Whether two pins are the same one, before and after an edit of the program."""
    nodes = {n.id for n in a.nodes} == {n.id for n in b.nodes}
    return a.source == b.source and a.position == b.position and nodes


def _pinned_value(graph: Graph, site: PinSite) -> Operand:
    if site.source == "annotation":
        return site.nodes[0].outputs[0]
    return (graph.inputs if site.source == "input" else graph.outputs)[site.position]


def _atoms(codes: Sequence[Code]) -> str:
    return " or ".join(repr(decode(c)) for c in codes) or "of no type"


def _no_typing(case: _Case) -> Diagnostic:
    """Each mesh axis alone has a typing, all together have none: pins are dropped in turn until what is left is minimal."""
    sites = pin_sites(case.graph, case.mesh, case.demand)
    names, needed = _Names.of(case.graph), list(sites)
    if len(sites) * sum(1 for _ in case.graph.walk()) <= 4000:
        for site in reversed(sites):
            trial = functools.reduce(_Case.drop, [s for s in sites if s not in needed or s is site], case)
            if choose(trial.graph, trial.mesh, trial.demand, boxing=case.boxing) is None:
                needed.remove(site)
    labels, notes, helps = [], [], []
    for site in needed[:6]:
        text = f"{names.site(site)} is pinned {_pinned(site, case.mesh)}"
        readers = (n.span for n in case.graph.walk() if n.span and _pinned_value(case.graph, site) in n.inputs)
        span = site.span or next(readers, None)
        if span:
            labels.append(Label(span=span, text=text, primary=not labels))
        else:
            notes.append(text)
        program = case.drop(site).plan()
        if program is not None:
            where = f"at line {site.span.line}" if site.span else "at the boundary"
            helps.append(_help(f"leave {names.site(site)} free {where}", program))
    axes = ", ".join(f"`{a}`" for a in case.mesh.names)
    if sum(n > 1 for n in case.mesh.sizes) < 2:  # one axis: the checker has decided the whole program, and says that there is a typing
        title = "no typing was found, though no two constraints are in conflict; this is a limit of the chooser, please report it"
        return Diagnostic(code="no-typing", severity="error", title=title, labels=tuple(labels), notes=tuple(notes))
    why = f'each axis alone has one under boxing="{case.boxing}"; an outer axis cannot split a dim that an inner one already splits'
    return Diagnostic(
        code="no-typing",
        severity="error",
        title=f"the program has no typing on the mesh axes {axes} together",
        labels=tuple(labels),
        notes=(*notes, why),
        helps=tuple(sorted(helps, key=lambda h: h.bytes_per_device)[:MAX_HELPS]),
    )


def _pinned(site: PinSite, mesh: MeshSpec) -> str:
    return " ".join(f"{axis}:{decode(c)!r}" for axis, c in zip(mesh.names, site.codes, strict=True) if c is not None)


# ---- costly annotations --------------------------------------------------------------------------------------------------------------


def costly_annotations(program: Program, demand: Demand, boxing: Policy) -> tuple[Diagnostic, ...]:
    """Names each annotation whose removal makes the plan at least 10 % cheaper, with the price both ways.

    A set of pins without which the plan is not that much cheaper holds no costly pin: so sets are halved, and most programs are
    cleared by one solution without any annotation.
    """
    case = _Case(program.graph, program.mesh, demand, boxing)
    sites = [s for s in pin_sites(case.graph, case.mesh, demand) if s.source == "annotation" and s.span][:20]
    size = sum(1 for _ in case.graph.walk())
    if not sites or (size > 1500 and len(sites) > 4):
        return ()
    budget = itertools.count()
    most = 40 if size <= 300 else max(4, 12_000 // size)

    def seconds(pins: Sequence[PinSite]) -> float | None:
        if next(budget) >= most:
            return None
        trial = functools.reduce(_Case.drop, pins, case)
        typing = choose(trial.graph, trial.mesh, trial.demand, boxing=boxing)
        return None if typing is None else typing.seconds

    def cheaper(pins: Sequence[PinSite], limit: float) -> list[PinSite]:
        found = seconds(pins)
        if found is None or found > limit:
            return []
        if len(pins) == 1:
            return list(pins)
        half = len(pins) // 2
        return [*cheaper(pins[:half], limit), *cheaper(pins[half:], limit)]

    whole = seconds(())  # not program.cost: a memory limit may have been in its price
    if whole is None:
        return ()
    names, found = _Names.of(case.graph), []
    for site in cheaper(sites, DEARER * whole):
        trial = case.drop(site)
        without = fit(trial.graph, trial.mesh, trial.demand, boxing=boxing)[0]
        assert without is not None and site.span is not None
        rise = whole / without.cost.seconds - 1 if without.cost.seconds else math.inf
        price = f"{_bytes(program.cost.bytes_per_device)} and {_seconds(whole)} per device with it, "
        price += f"{_bytes(without.cost.bytes_per_device)} and {_seconds(without.cost.seconds)} without"
        found.append(
            Diagnostic(
                code="costly-annotation",
                severity="warning",
                title=f"pinning {names.site(site)} to {_pinned(site, case.mesh)} makes the plan {100 * rise:.0f} % dearer",
                labels=(Label(span=site.span, text=price, primary=True),),
                helps=(_help(f"drop `{_source(site.span)}` at line {site.span.line}", without),),
                scope=_scope(site.nodes[0]),
            )
        )
    return tuple(sorted(found, key=lambda d: d.labels[0].span))


def _bytes(count: float) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 2**19 else f"{count / 2**10:.1f} KiB"


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"


# ---- memory --------------------------------------------------------------------------------------------------------------------------


def memory_diagnostic(least: Program, limit: float) -> Diagnostic:
    """Says that no plan fits the memory limit, what is largest in the one of least memory, and which split would make it smaller."""
    names, mesh, graph = _Names.of(least.graph), least.mesh, least.graph
    held = sorted({(r.value, r.codes) for r in _registers(least.block)}, key=lambda r: (-_size(graph, mesh, *r), r))
    notes, labels, told = [], [], set[str]()
    for value, codes in held:
        name = names.value(value)
        if not name or name in told or len(notes) == 4:
            continue
        told.add(name)
        size = _size(graph, mesh, value, codes)
        text = f"{name} of shape {tuple(graph.avals[value].shape)} as {to_type(codes, mesh)!r} takes {_bytes(size)} per device"
        ways = [(_size(graph, mesh, value, c), k, c[k]) for k, c in _splits(graph.avals[value].shape, codes, mesh)]
        if ways:
            smaller, k, code = min(ways)
            text += f"; as S({code - 1}) on `{mesh.names[k]}` it would take {_bytes(smaller)}"
        notes.append(text)
        maker = names.makers.get(value)
        if maker is not None and maker.span:
            labels.append(Label(span=maker.span, text=f"{name}: {_bytes(size)} per device", primary=not labels))
    return Diagnostic(
        code="memory-limit",
        severity="error",
        title=f"no typing fits {_bytes(limit)} per device; the least that was found is {_bytes(least.cost.peak_memory_bytes)} per device",
        labels=tuple(labels),
        notes=tuple(notes),
    )


def _size(graph: Graph, mesh: MeshSpec, value: int, codes: Codes) -> float:
    return math.prod(local_shape(graph.avals[value].shape, codes, mesh.sizes)) * _jax.itemsize(graph.avals[value].dtype)


def _splits(shape: tuple[int, ...], codes: Codes, mesh: MeshSpec) -> Iterator[tuple[int, Codes]]:
    """Types with one more split, on a mesh axis where the value is whole and a dim that divides."""
    for k, n in enumerate(mesh.sizes):
        local = local_shape(shape, codes, mesh.sizes)
        for dim, size in enumerate(local):
            if n > 1 and codes[k] == 0 and size % n == 0 and size:
                yield k, tuple(1 + dim if i == k else c for i, c in enumerate(codes))


def _registers(block: Block) -> Iterator[Register]:
    yield from block.inputs
    for instruction in block.instructions:
        match instruction:
            case Box():
                yield instruction.target
            case Apply():
                yield from instruction.outs
            case Loop():
                yield from instruction.outs
                for inner in instruction.blocks:
                    yield from _registers(inner)
