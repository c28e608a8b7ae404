"""Why a program has no typing, in the user's own lines, with helps that were tried.

What is wrong comes from `infer.check`, what an edit costs from `plan.helps`; here it is put in words.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sbp import _jax
from sbp.errors import Diagnostic, Help, Label, RuleRow, Span
from sbp.infer.check import Checker, CheckResult
from sbp.infer.choose import choose
from sbp.infer.constraints import Constraint, allowed
from sbp.infer.problem import Demand
from sbp.infer.space import Code, decode, encode
from sbp.limits import Policy
from sbp.mesh import MeshSpec
from sbp.plan.edits import Case
from sbp.plan.helps import LARGE, MAX_HELPS, Repair, Trials, axis_rows
from sbp.plan.program import Program
from sbp.plan.source import Names, pinned_text, scope_of, source_text
from sbp.plan.text import place
from sbp.trace.graph import Graph, Node

MAX_FAULTS, MAX_FAULTS_LARGE, MAX_ROWS = 5, 3, 4


def explain(graph: Graph, mesh: MeshSpec, demand: Demand, boxing: Policy) -> tuple[Diagnostic, ...]:
    """Says why a program has no typing: each independent fault once, in source order.

    Returns:
      At least one diagnostic, with code `no-signature`, `annotation-conflict`, `no-typing` or `solver-limit`.
    """
    case = Case(graph, mesh, demand, boxing)
    checker = Checker(graph, mesh, demand, boxing)
    most = MAX_FAULTS_LARGE if sum(1 for _ in graph.walk()) > LARGE else MAX_FAULTS
    same: dict[Any, list[CheckResult]] = {}  # what ends in one place is one fault, whatever the pins and the axis
    without: set[tuple[str, str]] = set()
    found = checker.check()
    while found.status == "unsat" and len(same) < 3 * most:  # those that are not told have to be out of the way, too
        without |= {(found.mesh_axis, c.name) for c in found.pins} or {(found.mesh_axis, "policy")}
        same.setdefault(_key(found), []).append(found)
        found = checker.check(without)
    faults = [first for first, *_ in same.values()]
    names, trials = Names.of(graph), Trials(case, checker, faults, [rest for _, *rest in same.values()])
    shown = min(len(faults), most)
    diagnostics = [_Fault(trials, fault, names, shown).diagnostic() for fault in faults[:shown]]
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

    trials: Trials
    found: CheckResult
    names: Names
    shown: int

    @property
    def case(self) -> Case:
        return self.trials.case

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
        helps = Repair(self.trials, self.found, node, self.names, self.shown).helps()
        return Diagnostic(
            code="annotation-conflict" if conflict else "no-signature",
            severity="error",
            title=self.title(node, conflict),
            labels=tuple(labels),
            rule="" if region else self.rule(node),
            rows=() if region else self.rows(node),
            notes=tuple(self.notes(node, helps)),
            helps=helps,
            scope=scope_of(node),
        )

    # ---- words -----------------------------------------------------------------------------------------------------------------

    def subject(self, node: Node) -> str:
        text = f"`{source_text(node.span) or node.op}`"
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
            shape = self.case.graph.aval(self.case.value(pin.site)).shape
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
        for number, row in enumerate(axis_rows(self.case, node, self.position)):
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

    def notes(self, node: Node, helps: Sequence[Help]) -> Iterator[str]:
        for c in self.found.pins:
            if c.site and c.site.source == "input":
                where = f"{decode(c.code)!r} on `{self.axis}` by in_types or by the sharding it arrives with"
                yield f"input {self.names.site(c.site)} is pinned {where}"
            elif c.site and c.site.span and c.site.span == node.span:
                yield f"line {c.site.span.line} also pins {self.pin_text(c, node)}"
        through = [c for c in self.found.equations if c not in self.found.sink and c.because.span and c.node is not node]
        if through:
            yield f"the pinned types flow here through {_lines([c.because.span for c in through if c.because.span], node.span)}"
        if self.found.policy:
            what = "no operand may be resharded here" if self.case.boxing == "explicit" else "only partial values may be converted here"
            yield f'boxing is "{self.case.boxing}", so {what}'
        others = len(self.trials.faults) - 1
        if others and any(not h.text.startswith("boxing=") for h in helps):
            yield f"helps are priced with the other {others} error{'s' * (others > 1)} out of the way"
        untold = 1 + others - self.shown
        if untold > 0:
            yield f"{untold} more error{'s are' if untold > 1 else ' is'} told when these are gone"

    # ---- a pin that nothing satisfies ---------------------------------------------------------------------------------------------

    def impossible(self) -> Diagnostic:
        """A pin that its own tensor cannot have."""
        pin = self.found.pins[0]
        assert pin.site is not None
        site, graph, n = pin.site, self.case.graph, self.case.mesh.sizes[self.position]
        aval = graph.aval(self.case.value(site))
        if _jax.is_extended(aval.dtype):
            why = "PRNG keys are whole on every device; split what is drawn from them"
        elif pin.code > 0 and aval.shape[pin.code - 1] % n:
            why = (
                f"{n} devices do not divide dim {pin.code - 1} of size {aval.shape[pin.code - 1]}; at the boundary JAX holds even dims only"
            )
        else:
            why = f"it has shape {tuple(aval.shape)} and dtype {aval.dtype}"
        labels = (Label(span=site.span, text=f"pinned {decode(pin.code)!r} on `{self.axis}`", primary=True),) if site.span else ()
        program = self.case.drop(site, self.position).plan() if len(self.trials.faults) == 1 else None
        helps = (_help(f"leave it free on `{self.axis}`", program),) if program else ()
        title = f"{self.names.site(site)} cannot be {decode(pin.code)!r} on mesh axis `{self.axis}`"
        return Diagnostic(code="no-typing", severity="error", title=title, labels=labels, notes=(why,), helps=helps)


def _lines(spans: Sequence[Span], here: Span | None) -> str:
    """Lines by number, those of another file with its name."""
    near = sorted({s.line for s in spans if here is None or s.file == here.file})
    far = sorted({place(s) for s in spans if here is not None and s.file != here.file})
    texts = [f"line{'s' * (len(near) > 1)} {', '.join(map(str, near))}"] if near else []
    texts += [", ".join(far[:4]) + (" .." if len(far) > 4 else "")] if far else []
    return " and ".join(texts)


def _help(text: str, program: Program) -> Help:
    return Help(text=text, bytes_per_device=program.cost.bytes_per_device)


def _atoms(codes: Sequence[Code]) -> str:
    return " or ".join(repr(decode(c)) for c in codes) or "of no type"


def _no_typing(case: Case) -> Diagnostic:
    """Each mesh axis alone has a typing, all together have none: pins are dropped in turn until what is left is minimal."""
    sites = case.sites()
    names, needed, size = Names.of(case.graph), list(sites), sum(1 for _ in case.graph.walk())
    if len(sites) * size <= 4000:
        for site in reversed(sites):
            trial = functools.reduce(Case.drop, [s for s in sites if s not in needed or s is site], case)
            if choose(trial.graph, trial.mesh, trial.demand, boxing=case.boxing) is None:
                needed.remove(site)
    labels, notes, helps = [], [], []
    for site in needed[:6]:
        text = f"{names.site(site)} is pinned {pinned_text(site, case.mesh)}"
        readers = (n.span for n in case.graph.walk() if n.span and case.value(site) in n.inputs)
        span = site.span or next(readers, None)
        if span:
            labels.append(Label(span=span, text=text, primary=not labels))
        else:
            notes.append(text)
        program = case.drop(site).plan() if len(helps) < MAX_HELPS or size <= LARGE else None
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
