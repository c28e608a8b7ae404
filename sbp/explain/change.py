"""Changes that a user may make to a program, the plans after them, and the program without a typing
that they are tried on."""

import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, Literal

from sbp.errors import SHOWN, Edit, Help, Label, Span, counted
from sbp.explain.names import BATCHED, Names, asked_text, behind_vmap, pinned_value
from sbp.infer.check import RLIMIT, Checker, CheckResult
from sbp.infer.constraints import PinConstraint, System
from sbp.infer.request import Request
from sbp.plan.fit import best_program
from sbp.plan.program import Program
from sbp.signatures import traits_of
from sbp.source.reader import source_text, users_span
from sbp.trace.graph import Node, group_by

HelpKind = Literal["pin", "conversion", "other pin", "drop", "policy", "pair"]
"""What a help changes: the dim that a pin splits, an annotation before the line, the kind of a
pin's atom, a pin that is dropped or left free on a mesh axis, a policy or budget, two pins of which
one no longer splits a dim. Two pins that both split another dim are "pin"."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Change:
    """A change that may give a program a plan.

    Arguments:
      text: the change in words.
      edits: what the user would edit.
      make: returns the changed program, for `tried`; None when the program cannot have the change.
      without: (mesh axis, name) of the constraints that the change takes away.
      assumed: for each decision that the change takes, literals of states on the fault's mesh axis.
          The program is in one of them after the change.
      kind: what it changes.
      instead: a smaller change; when it is accepted, this one is not tried.
      pinned: the values of the pins that ask another code.
      labels: the places that it changes.
    """

    text: str
    edits: tuple[Edit, ...]
    make: Callable[[], Any]
    without: frozenset[tuple[str, str]] = frozenset()
    assumed: tuple[tuple[str, ...], ...] = ()
    kind: HelpKind = "drop"
    instead: "Change | None" = None
    pinned: tuple[int, ...] = ()
    labels: tuple[Label, ...] = ()

    def help(self, program: Program, *, more: str = "", clears_all_errors: bool = True) -> Help:
        """The change as a help, with the price of the plan after it; `more` ends its text."""
        return help_with_price(
            self.text + more, self.edits, program, clears_all_errors=clears_all_errors
        )


Accepted = tuple[Change, Program]
"""A change with the plan after it."""


@dataclass(frozen=True, slots=True)
class Tried:
    """What became of some changes.

    Arguments:
      accepted: those that give a plan.
      untried: how many changes a limit left out.
    """

    accepted: tuple[Accepted, ...] = ()
    untried: int = 0


def tried(
    changes: Iterable[Change],
    *,
    plans: int,
    enough: int | None = None,
    helps: int | None = None,
    screen: Callable[[Change], bool] = lambda one: True,
    plan: Callable[[Any], Program | None] | None = None,
) -> Tried:
    """Plans each change that has edits. Of several changes with one text it plans the first.

    Arguments:
      changes: the changes, the likeliest first.
      plans: the largest number of plans while no change is accepted.
      enough: the largest number of plans after the first accepted change; None for `plans`.
      helps: the number of accepted changes that ends the search; None for no limit.
      screen: says whether a change is worth a plan.
      plan: plans what a change makes; None for the cheapest plan of a request.
    """
    accepted: list[Accepted] = []
    seen, untried, made = set[str](), set[str](), 0
    for one in changes:
        # An accepted change makes a larger one needless. Of two pins or more, it also makes another
        # change of the same pins needless.
        if (
            not one.edits
            or one.text in seen
            or any(
                one.instead is a or (len(one.pinned) > 1 and one.pinned == a.pinned)
                for a, _ in accepted
            )
        ):
            continue
        most = enough if accepted and enough is not None else plans
        if made >= most or len(accepted) == helps:
            untried.add(one.text)
            continue
        seen.add(one.text)
        changed = one.make() if screen(one) else None
        made += changed is not None
        program = None if changed is None else (plan or best_program)(changed)
        if program is not None:
            accepted.append((one, program))
    return Tried(tuple(accepted), len(untried))


def help_with_price(
    text: str, edits: tuple[Edit, ...], program: Program, *, clears_all_errors: bool = True
) -> Help:
    """A help with the price of the plan after it.

    Arguments:
      text: the change in words.
      edits: what the user would edit.
      program: the plan that was made after the change.
      clears_all_errors: whether the plan is that of the whole program, and not of the program
          without the pins of its other errors.
    """
    return Help(
        text=text,
        edits=edits,
        bytes_per_device=program.cost.bytes_per_device,
        peak_memory_bytes=program.cost.peak_memory_bytes,
        clears_all_errors=clears_all_errors,
    )


def labels_at(spans: Iterable[Span | None], text: str) -> tuple[Label, ...]:
    """A label at each of some places, the first of them the primary one; none at no place."""
    return tuple(
        Label(span=span, text=text, primary=n == 0)
        for n, span in enumerate(dict.fromkeys(s for s in spans if s is not None))
    )


def boxing_option(request: Request) -> str | dict[str, str]:
    """The policies of a program as the value of `boxing`: one for all mesh axes, or a dict where
    axes have their own."""
    return (
        {
            name: policy or request.boxing
            for name, policy in zip(request.mesh.names, request.axis_policies, strict=False)
            if policy or request.boxing != "auto"
        }
        if any(request.axis_policies)
        else request.boxing
    )


def boxing_text(request: Request) -> str:
    """The policies of a program as `sbp.jit` takes them, such as `boxing="reduce"`."""
    return f"boxing={json.dumps(boxing_option(request), ensure_ascii=False)}"


# ---- limits --------------------------------------------------------------------------------------
# No limit is silent: a diagnosis has a note about what a limit left out.
# `python -m benchmarks.blame_speed` measures the seconds of a diagnosis under these limits.


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnosisLimits:
    """Limits on the search for the reasons why a program has no typing.

    Arguments:
      solver_resources: Z3's resource count for one check.
      faults: diagnostics of one program.
      shown: helps that one diagnostic shows.
      rows: rows of a rule that one diagnostic shows.
      pins: pins that the diagnostic of all mesh axes together shows.
      plans: plans made for one diagnostic.
      work: operations that these plans have together. Large programs, which have more in `plans`
        plans, have fewer plans, at least `SHOWN`, and helps are priced there without the reuse of
        forward conversions in the backward pass. If `work` is less than one plan for each pin,
        pins that are not part of a conflict of all mesh axes are not sorted out.
    """

    solver_resources: int = RLIMIT
    faults: int = 5
    shown: int = SHOWN
    rows: int = 4
    pins: int = 6
    plans: int = 12
    work: int = 6000

    def is_large(self, size: int) -> bool:
        """Whether a program of `size` operations has fewer plans."""
        return size * self.plans > self.work

    def plans_of(self, size: int, shown: int) -> tuple[int, int]:
        """How many plans are made for the helps of one fault: once one of them gave a typing, and
        while none did.

        Arguments:
          size: the number of the program's operations.
          shown: the number of faults that are shown.
        """
        return (
            (max(1, self.work // (size * shown)), max(SHOWN, self.work // size))
            if self.is_large(size)
            else (self.plans, self.plans)
        )


def applicable(notes: Mapping[str, object]) -> tuple[str, ...]:
    """The notes whose condition holds.

    >>> applicable({"a budget is small": 1 > 0, "a pin is odd": ()})
    ('a budget is small',)
    """
    return tuple(note for note, condition in notes.items() if condition)


def left_out(unshown: int, untried: int) -> tuple[str, ...]:
    """Notes about changes that fix the error and are not shown, and about changes not tried.

    >>> left_out(1, 0), left_out(0, 2)
    (('not shown: 1 more change that fixes this error',), ('not tried: 2 more changes',))
    """
    return applicable(
        {
            f"not shown: {counted(unshown, 'more change')} that"
            f" {'fixes' if unshown == 1 else 'fix'} this error": unshown > 0,
            f"not tried: {counted(untried, 'more change')}": untried > 0,
        }
    )


# ---- faults -------------------------------------------------------------------------------------
# A program without a typing, with its faults and the edits that were tried on it.


@dataclass(slots=True, kw_only=True)
class Diagnosis:
    """A program without a typing, with its independent faults.

    A plan of a large program takes seconds. So every edit is first checked against the constraints
    at hand: its constraints are left out and its states are assumed, which builds nothing. That
    check may accept an edit wrongly, so a plan is then made, which also gives the price.

    Arguments:
      request: the program, and what its types are chosen by.
      checker: its constraints.
      limits: on the search.
      groups: for each fault its findings, the finding of the checker that came first at the front.
        The others end in the same place: with other pins, or on another mesh axis.
      last: the last answer of the checker.
    """

    request: Request
    checker: Checker
    limits: DiagnosisLimits
    groups: tuple[tuple[CheckResult, ...], ...]
    last: CheckResult
    under_policies: dict[str, Program | None] = field(default_factory=dict)
    answers: dict[Any, bool] = field(default_factory=dict)

    def may_hold(
        self, mesh_axis: str, without: Set[tuple[str, str]], assumed: Iterable[tuple[str, ...]]
    ) -> bool:
        """Whether the constraints of every mesh axis can hold after an edit.

        Arguments:
          mesh_axis: the axis of the fault.
          without: (mesh axis, name) of the constraints that the edit takes away.
          assumed: for each decision that the edit takes, literals of states on `mesh_axis`. The
            program is in one of them after the edit.
        """
        each = tuple(itertools.product(*assumed))
        return all(
            any(
                self._axis_may_hold(
                    system, frozenset(n for axis, n in without if axis == system.mesh_axis), states
                )
                for states in (each if system.mesh_axis == mesh_axis else [()])
            )
            for system in self.checker.systems
        )

    def _axis_may_hold(
        self, system: System, without: frozenset[str], states: tuple[str, ...]
    ) -> bool:
        key = system.mesh_axis, without, states
        if key not in self.answers:
            names = [c.name for c in system.constraints if c.name not in without]
            self.answers[key] = self.checker.axis(system).check([*names, *states])[0] != "unsat"
        return self.answers[key]

    def under_policy(self, text: str, change: Callable[[Request], Request]) -> Program | None:
        """The plan of the whole program under another policy, made once for all faults."""
        if text not in self.under_policies:
            self.under_policies[text] = best_program(change(self.request))
        return self.under_policies[text]


class BlamedFault:
    """A fault of a program.

    Arguments:
      diagnosis: the program and its faults.
      findings: the findings of the checker about the fault; the first one decides.
      names: the names of the program's values.

    Attributes:
      found: the finding that came first.
      request: the program, and what its types are chosen by.
      axis: the mesh axis.
      position: the position of the mesh axis.
      system: the constraints of the mesh axis.
      arriving: the finding with those about other operands of its node.
      made: for each operand of the node the codes in which it can arrive.
      pins: the pins that what arrives is due to.
    """

    def __init__(
        self, diagnosis: Diagnosis, findings: tuple[CheckResult, ...], names: Names
    ) -> None:
        self.diagnosis, self.findings, self.names = diagnosis, findings, names
        self.found, self.request = found, request = findings[0], diagnosis.request
        self.axis = found.mesh_axis
        self.position = request.mesh.names.index(self.axis)
        self.system = next(s for s in diagnosis.checker.systems if s.mesh_axis == self.axis)
        beside = (
            f
            for f in findings[1:]
            if f.mesh_axis == self.axis
            and len(found.sink) == len(f.sink) == 1
            and f.sink[0].node is found.sink[0].node
            and f.sink[0].because.number != found.sink[0].because.number
        )
        self.arriving = (
            found,
            *(same[0] for same in group_by(beside, lambda f: f.sink[0].because.number).values()),
        )
        self.made = {
            c.because.number: codes
            for f in self.arriving
            for c, codes in zip(f.sink, f.made, strict=True)
        }
        self.pins = list({c.name: c for f in self.arriving for c in f.pins}.values())

    def subject(self, node: Node) -> str:
        """A node as a title names it: by the user's expression."""
        text = f"`{source_text(users_span(node)) or node.name}`"
        return f"the gradient of {text}" if node.in_gradient else text

    def asked(self, pin: PinConstraint) -> str:
        """A pinned value as the atom that the pin asks."""
        return f"{self.names.site(pin.site)} as {asked_text(pin.site, pin.code)}"

    def direct(self, node: Node, pin: PinConstraint, operand: int | None = None) -> bool:
        """Whether a pin is on a value that the node itself reads.

        Arguments:
          node: the node.
          pin: the pin.
          operand: the operand that is asked about; None for any operand at which the fault ends.
        """
        pinned = (
            {self.request.graph.inputs[pin.site.position]}
            if pin.site.source == "input"
            else {n.outputs[0] for n in pin.site.nodes}
        )
        return not node.regions and any(
            node.inputs[c.because.number] in pinned
            for c in self.found.sink
            if operand is None or c.because.number == operand
        )

    def pin_text(self, pin: PinConstraint, node: Node) -> str:
        """The atom that a pin asks, and the role of a split dim in the node."""
        text = f"{self.names.site(pin.site)} is {asked_text(pin.site, pin.code)} on `{self.axis}`"
        if pin.code > 0:
            graph, behind = self.request.graph, behind_vmap(pin.site, pin.code)
            dims = graph.aval(pinned_value(graph, pin.site)).shape[behind or 0 :]
            dim = f": dim {pin.code - 1 - (behind or 0)} of {'x'.join(map(str, dims))}"
            text += (" under vmap" if behind != 0 else "") + (
                self.role(pin, node) or dim + (f" {BATCHED}" if behind is None else "")
            )
        return text

    def role(self, pin: PinConstraint, node: Node) -> str:
        """The role of a pinned dim in the contraction that reads it; empty for other nodes."""
        numbers, dim = node.params.get("dimension_numbers", ()), pin.code - 1
        operands = [
            c.because.number for c in self.found.sink if self.direct(node, pin, c.because.number)
        ]
        if not traits_of(node.op).contracts or len(numbers) != 2 or not operands:
            return ""
        contract, batch = (dims[operands[0]] for dims in numbers)
        free = ", a batch dim" if dim in batch else ", not contracted"
        return ", the contracted dim" if dim in contract else free
