"""Why a program has no typing, in the user's own lines, with helps that were tried.

What is wrong comes from `infer.check`, what an edit costs from `plan.helps`; here it is put in
words.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sbp import _jax
from sbp.errors import Diagnostic, Edit, Help, Label, RuleRow, Span
from sbp.explain.budgets import budget_help, impossible_budgets
from sbp.explain.edits import drop_pin, pinned_value, priced
from sbp.explain.helps import LARGE, MAX_HELPS, Arriving, Repair, Trials
from sbp.explain.insertions import axis_rows, blamed
from sbp.explain.names import Names, behind_vmap, pinned_text, scope_of
from sbp.explain.regions import atoms_text, carry_of, left, region_words
from sbp.explain.repins import edits_of
from sbp.infer.check import Checker, CheckResult
from sbp.infer.choose import choose
from sbp.infer.constraints import Constraint, pin_sites
from sbp.infer.literals import POLICY_LITERAL, budget_literal
from sbp.infer.request import Request
from sbp.infer.space import Code, decode, encode
from sbp.limits import boxing_text
from sbp.plan.fit import best_program
from sbp.plan.program import Program
from sbp.plan.text import place
from sbp.source.reader import source_text, users_span
from sbp.trace.collector import collecting_less
from sbp.trace.graph import Node
from sbp.trace.regions import interface_of

MAX_FAULTS, MAX_FAULTS_LARGE, MAX_ROWS = 5, 3, 4

KEEPING = 500
"""Nodes of a program up to which helps are priced with what gradients keep from the forward
pass."""


@collecting_less()
def explain(request: Request) -> tuple[Diagnostic, ...]:
    """Says why a program has no typing: each independent fault once, in source order.

    Returns:
      At least one diagnostic, with code `no-signature`, `annotation-conflict`, `budget`,
      `no-typing` or `solver-limit`.
    """
    nodes, mesh = request.size, request.mesh
    request = dataclasses.replace(request, memory_limit=None, aliased=(), reuse=nodes <= KEEPING)
    checker = Checker(request)
    most = MAX_FAULTS_LARGE if nodes > LARGE else MAX_FAULTS
    same: dict[
        Any, list[CheckResult]
    ] = {}  # what ends in one place is one fault, whatever the pins and the axis
    without: set[tuple[str, str]] = set()
    found = checker.check()
    while (
        found.status == "unsat" and len(same) < 3 * most
    ):  # those that are not told have to be out of the way, too
        limits = {(axis, budget_literal(number)) for axis in mesh.names for number in found.budgets}
        more = (
            limits
            or {(found.mesh_axis, c.name) for c in found.pins}
            or {(found.mesh_axis, POLICY_LITERAL)}
        )
        same.setdefault(_key(found), []).append(found)
        if (
            more <= without
        ):  # what is left has no pin, policy or budget to blame: it would be found again and again
            break
        without |= more
        found = checker.check(without)
    faults = [first for first, *_ in same.values()]
    names, trials = (
        Names.of(request.graph),
        Trials(request, checker, faults, [rest for _, *rest in same.values()]),
    )
    shown = min(len(faults), most)
    diagnostics = [_Fault(trials, fault, names, shown).diagnostic() for fault in faults[:shown]]
    if found.status == "unknown":
        diagnostics.append(
            Diagnostic(
                code="solver-limit",
                severity="error",
                title=(
                    f"the checker reached its resource limit on mesh axis `{found.mesh_axis}`"
                    " before it could say why there is no typing"
                ),
                notes=(
                    (
                        "the program has no typing under"
                        f" {boxing_text(request.boxing, request.axis_policies, mesh.names)};"
                        " check a part of it alone"
                    ),
                ),
            )
        )
    if not diagnostics:
        diagnostics.append(impossible_budgets(request) or _no_typing(request))
    return tuple(
        sorted(
            diagnostics, key=lambda d: (d.primary is None, d.primary.span if d.primary else None)
        )
    )


def _key(fault: CheckResult) -> tuple[Any, ...]:
    """What makes two faults one: the same line, however often it was traced, and the same operands
    when they do not fit each other."""
    found = [
        (c.node.span or c.node.id, c.node.op, c.node.backward, c.operand)
        for c in fault.sink
        if c.node
    ]
    alone = len(found) == 1 and fault.sink[0].kind == "equation"
    return tuple(f[:3] for f in found) if alone else tuple(found) or fault.pins


@dataclass(frozen=True, slots=True)
class _Fault:
    """One fault, about to be put in words."""

    trials: Trials
    found: CheckResult
    names: Names
    shown: int

    @property
    def request(self) -> Request:
        return self.trials.request

    @property
    def axis(self) -> str:
        return self.found.mesh_axis

    @property
    def position(self) -> int:
        return self.request.mesh.names.index(self.axis)

    def diagnostic(self) -> Diagnostic:
        if not self.found.sink:
            return self.impossible() if self.found.pins else self.unpinned()
        node = self.found.sink[0].node
        if node is None:
            return self.returned()
        at, region = users_span(node), self.found.sink[0].kind == "region"
        arriving = self.trials.arriving(self.found)
        pins = [c for part in arriving.parts for c in part.pins]
        pins = list({c.name: c for c in pins}.values())
        split = all(
            c >= 0 for codes in arriving.made.values() for c in codes
        )  # where a part is, a reduction is missing: no conflict
        conflict = len(self.found.pins) > 1 and (
            region or (split and not any(self.direct(node, c) for c in self.found.pins))
        )
        if region:
            what, text = region_words(node, self.found, self.names, self.subject(node))
        else:
            what, text = self.title(node, conflict), self.arrives(node, arriving.made)
        labels = [Label(span=at, text=text, primary=True)] if at else []
        labels += [
            Label(span=c.site.span, text=self.pin_text(c, node))
            for c in pins
            if c.site and c.site.span and c.site.span != at
        ]
        if not labels:
            spans = [c.because.span for c in reversed(self.found.equations) if c.because.span]
            labels = [
                Label(span=s, text="the types of its operands end here", primary=True)
                for s in spans[:1]
            ]
        if self.found.budgets:
            code, title = "budget", f"{self.subject(node)} needs what a budget forbids"
            helps = tuple(
                h for number in self.found.budgets[:1] if (h := budget_help(self.request, number))
            )
        else:
            code, title = "annotation-conflict" if conflict else "no-signature", what
            helps = Repair(self.trials, self.found, node, self.names, self.shown).helps()
        return Diagnostic(
            code=code,
            severity="error",
            title=f"{title} on mesh axis `{self.axis}`",
            labels=tuple(labels),
            rule="" if region else self.rule(node),
            rows=() if region else self.rows(node, arriving),
            notes=tuple(self.notes(node, pins, helps)),
            helps=helps,
            scope=scope_of(node),
        )

    # ---- words ----------------------------------------------------------------------------------

    def subject(self, node: Node) -> str:
        text = f"`{source_text(users_span(node)) or node.op}`"
        return f"the gradient of {text}" if node.backward else text

    def title(self, node: Node, conflict: bool) -> str:
        if conflict:
            pinned = [
                f"{self.names.site(c.site)} as {decode(c.code)!r}"
                for c in self.found.pins
                if c.site
            ]
            return f"{' and '.join(pinned)} cannot meet in {self.subject(node)}"
        return f"{self.subject(node)} has no SBP signature"

    def arrives(self, node: Node, made: Mapping[int, tuple[Code, ...]]) -> str:
        """What comes to the operands, and what would help."""
        shown = self.names.shown(node)
        told = list(
            dict.fromkeys(f"{shown[i]} is {atoms_text(codes)}" for i, codes in made.items())
        )
        partial = list(
            dict.fromkeys(shown[i] for i, codes in made.items() if left(codes) == "partial")
        )
        n = self.request.mesh.sizes[self.position]
        for i, codes in made.items():
            dim = codes[0] - 1 if len(codes) == 1 else -1
            size = self.request.graph.aval(node.inputs[i]).shape[dim] if dim >= 0 else n
            if size < n:
                return (
                    f"{shown[i]} is {atoms_text(codes)}, but its dim {dim} of size {size} is"
                    f" shorter than {n} devices"
                )
        if len(self.found.sink) == 1:
            hint = (
                ""
                if len(partial) < len(told)
                else "; reduce it first"
                if len(told) == 1
                else "; reduce them first"
            )
            return f"{', '.join(told)} here, which {node.op} does not take{hint}"
        direct = all(
            any(self.direct(node, c, k.operand) for c in self.found.pins) for k in self.found.sink
        )
        if len(told) == 1:
            return (
                f"{told[0]} on both sides; reduce it first"
                if partial
                else f"{told[0]} on both sides"
            )
        meet = (
            "these two cannot meet here"
            if direct and len(told) == 2
            else f"{', '.join(told)}: they cannot meet here"
        )
        return meet + (
            f"; reduce {'one of them' if len(partial) == len(told) else partial[0]} first"
            if partial
            else ""
        )

    def direct(self, node: Node, pin: Constraint, operand: int | None = None) -> bool:
        """Whether a pin stands on an operand of the node itself (one of the sink's, or the given
        one)."""
        if pin.site is None or node.regions:
            return False
        pinned = {n.outputs[0] for n in pin.site.nodes}
        if pin.site.source == "input":
            pinned = {self.request.graph.inputs[pin.site.position]}
        return any(
            node.inputs[c.operand] in pinned
            for c in self.found.sink
            if operand is None or c.operand == operand
        )

    def pin_text(self, pin: Constraint, node: Node) -> str:
        assert pin.site is not None
        text = f"{self.names.site(pin.site)} is {decode(pin.code)!r} on `{self.axis}`"
        if pin.code > 0:
            shape = self.request.graph.aval(pinned_value(self.request.graph, pin.site)).shape
            role = self.role(pin, node)
            text += " under vmap" if behind_vmap(pin.site, pin.code) != 0 else ""
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
        outs = [self.names.value(v) or "result" for v in node.outputs]
        return (
            f"{node.op} on one mesh axis ({', '.join(self.names.shown(node))} -> {', '.join(outs)})"
        )

    def rows(self, node: Node, arriving: Arriving) -> tuple[RuleRow, ...]:
        """The rows nearest to what arrives: those that most operands of the sink fit, then those
        that a conversion brings about."""
        shown, n, made = (
            self.names.shown(node),
            self.request.mesh.sizes[self.position],
            arriving.made,
        )
        conversions = self.trials.system(self.axis).conversions
        ends = {c.operand: c.convert for c in arriving.sink if c.convert}

        def fit(operand: int, wanted: Code) -> bool:
            """Whether an operand can be brought to what a row wants, under the policies and within
            the budgets of its reader."""
            end, aval = ends[operand], self.request.graph.aval(node.inputs[operand])
            return any(conversions.allows(code, wanted, aval, end.rules) for code in made[operand])

        ranked: list[tuple[int, int, RuleRow]] = []
        for number, row in enumerate(axis_rows(self.request, node, self.position)):
            codes = {i: encode(row.ins[i]) for i in made}
            fits = [i for i in made if fit(i, codes[i])]
            rest = [i for i in made if i not in fits]
            if not rest:
                # none here: its dims are shorter than the axis is long, or a budget forbids what
                # its kernel sends
                continue
            remark, near = "", 0
            if fits:
                near = 2 * len(fits)
                remark = (
                    f"{_sides(shown, fits)} {'fits' if len(fits) == 1 else 'fit'},"
                    f" {_sides(shown, rest, fits)} "
                )
                remark += f"{'does' if len(rest) == 1 else 'do'} not"
            elif any(
                c > 0 and self.request.graph.aval(node.inputs[i]).shape[c - 1] < n
                for i, c in codes.items()
            ):
                continue  # shorter than the axis
            elif all(encode(a) >= 0 for a in (*row.ins, *row.outs)):
                near, first = 1, rest[0]
                remark = f"after {_conversion(made[first][0], codes[first])}" if made[first] else ""
            row = RuleRow(
                inputs=tuple(map(repr, row.ins)), outputs=tuple(map(repr, row.outs)), remark=remark
            )
            ranked.append((-near, number, row))
        ranked.sort(key=lambda r: r[:2])
        near = [r for r in ranked if r[0] == ranked[0][0]]
        return tuple(r for _, _, r in near[:MAX_ROWS])

    def notes(self, node: Node, pins: Sequence[Constraint], helps: Sequence[Help]) -> Iterator[str]:
        here = users_span(node)
        if here != node.span and node.span is not None:
            yield (
                f"inside the call it is `{source_text(node.span) or node.op}` at {place(node.span)}"
            )
        for c in pins:
            if c.site and c.site.source == "input":
                where = (
                    f"{decode(c.code)!r} on `{self.axis}` by in_types or by the sharding it arrives"
                    " with"
                )
                yield f"input {self.names.site(c.site)} is pinned {where}"
            elif c.site and c.site.span and c.site.span == here:
                yield f"line {c.site.span.line} also pins {self.pin_text(c, node)}"
        through = [
            users_span(c.node)
            for c in self.found.equations
            if c not in self.found.sink and c.node and c.node is not node
        ]
        alone = self.alone(pins)
        if alone:
            yield f"{alone}{' each' if ' and ' in alone else ''} alone would end here, too"
        lines = [
            s for s in through if s and (here is None or (s.file, s.line) != (here.file, here.line))
        ]
        if lines:
            yield f"the pinned types flow here through {_lines(lines, here)}"
        yield from self.carried(node)
        for number in self.found.budgets:
            yield f"the budget: {self.request.budgets[number]}"
        policy = blamed(self.request, self.found)
        if policy:
            what = (
                "no operand may be resharded"
                if policy.policy == "explicit"
                else "only partial values may be converted"
            )
            at = users_span(policy.node) if policy.node else None
            where = (
                "here"
                if policy.node is node or at is None or at == here
                else f"at {_lines([at], here)}"
            )
            scope = "" if policy.origin == "program" else f" on `{self.axis}` {where}"
            yield f'boxing is "{policy.policy}"{scope}, so {what} {where}'
        others = len(self.trials.faults) - 1
        if others and any(not h.clears_all_errors for h in helps):
            yield (
                f"helps are priced with the other {others} error{'s' * (others > 1)} out of the way"
            )
        untold = 1 + others - self.shown
        if untold > 0:
            yield f"{untold} more error{'s are' if untold > 1 else ' is'} told when these are gone"

    def carried(self, node: Node) -> Iterator[str]:
        """What in the loop asks a type of a carry that cannot keep it."""
        number = carry_of(self.found.sink[0])
        if number is None:
            return
        region, position = interface_of(node).entering("carry")[number].inputs[0]
        value = node.regions[region].inputs[position]
        for c in self.found.equations:
            span = (
                users_span(c.node)
                if c.node and not c.node.regions and c.convert and c.convert.value == value
                else None
            )
            if span:
                yield (
                    f"in the loop carry {number} is read by `{source_text(span)}` at"
                    f" {_lines([span], users_span(node))}"
                )
                return

    def alone(self, pins: Sequence[Constraint]) -> str:
        """Other pins, each of which leads to the same line when those that are told are gone."""
        whole = next(
            same
            for f, same in zip(self.trials.faults, self.trials.same, strict=True)
            if f is self.found
        )
        others = {
            c.name: c
            for r in whole
            if r.mesh_axis == self.axis and len(r.pins) == 1
            for c in r.pins
        }
        texts = []
        for c in others.values():
            if c.site and c.name not in {p.name for p in pins}:
                where = f" at line {c.site.span.line}" if c.site.span else ""
                texts.append(f"{self.names.site(c.site)} as {decode(c.code)!r}{where}")
        return " and ".join(texts[:3])

    # ---- a result that a budget keeps from being whole ------------------------------------------

    def returned(self) -> Diagnostic:
        """A result of the program in a type that it cannot be handed over in: policies do not hold
        there, budgets do."""
        end, atoms = self.found.sink[0], atoms_text(self.found.made[0])
        operand = self.request.graph.outputs[end.operand]
        maker = self.names.makers.get(operand) if isinstance(operand, int) else None
        subject = self.subject(maker) if maker else f"`{self.names.value(operand) or 'a result'}`"
        at = users_span(maker) if maker else None
        labels = [Label(span=at, text=f"{atoms} here, and returned", primary=True)] if at else []
        placed = [
            (c, c.site.span)
            for c in self.found.pins
            if c.site and c.site.span and c.site.span != at
        ]
        labels += [
            Label(span=s, text=f"{self.names.site(c.site)} is {decode(c.code)!r}")
            for c, s in placed
            if c.site
        ]
        pins = [
            f"input {self.names.site(c.site)} is pinned {decode(c.code)!r}"
            for c in self.found.pins
            if c.site and not c.site.span
        ]
        return Diagnostic(
            code="budget",
            severity="error",
            title=(
                f"{subject}, which is returned, needs what a budget forbids on mesh axis"
                f" `{self.axis}`"
            ),
            labels=tuple(labels),
            notes=(
                *pins,
                *(f"the budget: {self.request.budgets[number]}" for number in self.found.budgets),
            ),
            helps=tuple(
                h for number in self.found.budgets[:1] if (h := budget_help(self.request, number))
            ),
            scope=scope_of(maker) if maker else "",
        )

    # ---- a pin that nothing satisfies -----------------------------------------------------------

    def unpinned(self) -> Diagnostic:
        """What has no types of itself: no pin, policy or budget is to blame."""
        spans = list(dict.fromkeys(c.because.span for c in self.found.equations if c.because.span))
        labels = tuple(
            Label(span=s, text="this has to fit", primary=n == 0) for n, s in enumerate(spans[:4])
        )
        return Diagnostic(
            code="no-typing",
            severity="error",
            title=f"no types fit on mesh axis `{self.axis}`, whatever is pinned",
            labels=labels,
            notes=tuple(c.because.text for c in self.found.equations[:4]),
        )

    def impossible(self) -> Diagnostic:
        """A pin that its own tensor cannot have."""
        pin = self.found.pins[0]
        assert pin.site is not None
        site, graph, n = pin.site, self.request.graph, self.request.mesh.sizes[self.position]
        aval = graph.aval(pinned_value(graph, site))
        if _jax.is_extended(aval.dtype) and pin.code < 0:
            why = "PRNG keys have no sum; reduce what is drawn from them"
        elif pin.code > 0 and aval.shape[pin.code - 1] % n:
            why = (
                f"{n} devices do not divide dim {pin.code - 1} of size {aval.shape[pin.code - 1]};"
                " at the boundary JAX holds even dims only"
            )
        else:
            why = f"it has shape {tuple(aval.shape)} and dtype {aval.dtype}"
        labels = (
            (
                Label(
                    span=site.span,
                    text=f"pinned {decode(pin.code)!r} on `{self.axis}`",
                    primary=True,
                ),
            )
            if site.span
            else ()
        )
        program = (
            best_program(drop_pin(self.request, site, self.position))
            if len(self.trials.faults) == 1
            else None
        )
        edits = edits_of(self.request, site, self.position)
        text = f"leave it free on `{self.axis}`"
        helps = (_help(text, edits, program),) if program and edits else ()
        title = f"{self.names.site(site)} cannot be {decode(pin.code)!r} on mesh axis `{self.axis}`"
        return Diagnostic(
            code="no-typing",
            severity="error",
            title=title,
            labels=labels,
            notes=(why,),
            helps=helps,
        )


def _lines(spans: Sequence[Span], here: Span | None) -> str:
    """Lines by number, those of another file with its name."""
    near = sorted({s.line for s in spans if here is None or s.file == here.file})
    far = sorted({place(s) for s in spans if here is not None and s.file != here.file})
    texts = [f"line{'s' * (len(near) > 1)} {', '.join(map(str, near))}"] if near else []
    texts += [", ".join(far[:4]) + (" .." if len(far) > 4 else "")] if far else []
    return " and ".join(texts)


def _help(text: str, edits: tuple[Edit, ...], program: Program) -> Help:
    return priced(text, edits, program, clears_all_errors=True)


def _sides(shown: Sequence[str], operands: Sequence[int], beside: Sequence[int] = ()) -> str:
    """Operands by name; one value that stands on both sides by its side."""
    both = {shown[i] for i in operands} & {shown[i] for i in beside}
    if beside and both:
        return "the other side"
    return ", ".join(dict.fromkeys(shown[i] for i in operands))


def _conversion(source: Code, target: Code) -> str:
    """The collective that turns one atom into another."""
    if source < 0:
        return "an all-reduce" if target == 0 else "a reduce-scatter"
    return "an all-gather" if target == 0 else "an all-to-all"


def _no_typing(request: Request) -> Diagnostic:
    """Each mesh axis alone has a typing, all together have none: pins are dropped in turn until
    what is left is minimal."""
    sites = pin_sites(request)
    names, needed, size = Names.of(request.graph), list(sites), request.size
    if len(sites) * size <= 4000:
        for site in reversed(sites):
            trial = functools.reduce(
                drop_pin, [s for s in sites if s not in needed or s is site], request
            )
            if choose(trial) is None:
                needed.remove(site)
    labels, notes, helps = [], [], []
    for site in needed[:6]:
        text = f"{names.site(site)} is pinned {pinned_text(site, request.mesh)}"
        readers = (
            n.span
            for n in request.graph.walk()
            if n.span and pinned_value(request.graph, site) in n.inputs
        )
        span = site.span or next(readers, None)
        if span:
            labels.append(Label(span=span, text=text, primary=not labels))
        else:
            notes.append(text)
        edits = edits_of(request, site)
        few = len(helps) < MAX_HELPS or size <= LARGE
        program = best_program(drop_pin(request, site)) if edits and few else None
        if program is not None:
            where = (
                f"leave {names.site(site)} free in"
                f" {'in' if site.source == 'input' else 'out'}_types"
            )
            helps.append(
                _help(
                    (
                        f"drop `{source_text(site.span)}` at line {site.span.line}"
                        if site.span
                        else where
                    ),
                    edits,
                    program,
                )
            )
    axes = ", ".join(f"`{a}`" for a in request.mesh.names)
    if (
        sum(n > 1 for n in request.mesh.sizes) < 2
    ):  # one axis: the checker has decided the whole program, and says that there is a typing
        title = (
            "no typing was found, though no two constraints are in conflict; this is a limit of the"
            " chooser, please report it"
        )
        return Diagnostic(
            code="no-typing",
            severity="error",
            title=title,
            labels=tuple(labels),
            notes=tuple(notes),
        )
    policies = boxing_text(request.boxing, request.axis_policies, request.mesh.names)
    why = (
        f"each axis alone has one under {policies}; an outer axis cannot split a dim that an inner"
        " one already splits"
    )
    return Diagnostic(
        code="no-typing",
        severity="error",
        title=f"the program has no typing on the mesh axes {axes} together",
        labels=tuple(labels),
        notes=(*notes, why),
        helps=tuple(sorted(helps, key=lambda h: h.bytes_per_device)[:MAX_HELPS]),
    )
