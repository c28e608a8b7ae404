"""Decides by Z3 whether a program has a typing, and which pins and equations are to blame when it
has none.

Each mesh axis is decided in a Z3 context of its own. Each state of a variable is a Bool, of which
exactly one is true. Each pin, the policy, each budget and each operand of each node has a literal,
and a core is a set of literals. The terms of an axis are built once; the checks of it differ only
in the literals that they assume.
"""

import bisect
import functools
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import z3

from sbp.infer.constraints import (
    POLICY_LITERAL,
    BudgetConstraint,
    Constraint,
    PinConstraint,
    ReadConstraint,
    System,
    budget_literal,
    constraints_of,
    state_literal,
)
from sbp.infer.flow import End
from sbp.infer.request import Request
from sbp.infer.space import Code
from sbp.limits import Rules
from sbp.trace.graph import collecting_less, group_by

RLIMIT = 500_000_000
"""Z3's resource count of one question. The GShard step of 1,800 equations takes under a million."""

Status = Literal["sat", "unsat", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CheckResult:
    """Whether a program has a typing, and the constraints that are to blame when it has none.

    Arguments:
      status: `unknown` when Z3 reached its resource limit on some axis and no other axis is
          unsatisfiable.
      mesh_axis: the axis that is unsatisfiable or unknown; empty when there is none.
      core: when unsatisfiable, constraints that no typing meets together: pins, policy and budgets
        first, then the program's order. A typing meets any proper subset of them.
      sink: the conversions at which the flow of types through the core ends, operands of one node.
      made: for each conversion of the sink, the codes in which its value can be made under the rest
          of the core.
      wanted: for each conversion of the sink, the codes in which its value can be read under the
          rest of the core.
      minimal: False where Z3 reached its resource limit while the core was minimised. Then fewer
          constraints may be to blame, and `made` and `wanted` may lack codes.
    """

    status: Status
    mesh_axis: str = ""
    core: tuple[Constraint, ...] = ()
    sink: tuple[ReadConstraint, ...] = ()
    made: tuple[tuple[Code, ...], ...] = ()
    wanted: tuple[tuple[Code, ...], ...] = ()
    minimal: bool = True

    @property
    def pins(self) -> tuple[PinConstraint, ...]:
        """The pins of the core."""
        return tuple(c for c in self.core if isinstance(c, PinConstraint))

    @property
    def policy(self) -> bool:
        """Whether the boxing policy is in the core."""
        return any(c.name == POLICY_LITERAL for c in self.core)

    @property
    def budgets(self) -> tuple[int, ...]:
        """The numbers of the program's budgets in the core."""
        return tuple(c.budget for c in self.core if isinstance(c, BudgetConstraint))

    @property
    def equations(self) -> tuple[ReadConstraint, ...]:
        """The operands of nodes in the core."""
        return tuple(c for c in self.core if isinstance(c, ReadConstraint))


class Checker:
    """The constraints of a program in Z3, to be checked with all pins or without some of them.

    Arguments:
      request: the program with its mesh, demand, policies and budgets.
      rlimit: Z3's resource count of one question.

    Attributes:
      systems: the constraints, by mesh axis.
      axis: gives the solver of one of them.
    """

    @collecting_less()
    def __init__(self, request: Request, *, rlimit: int = RLIMIT) -> None:
        self.systems = constraints_of(request)
        self.axis = functools.cache(lambda system: _Axis(system, rlimit))

    @collecting_less()
    def check(self, without: Collection[tuple[str, str]] = ()) -> CheckResult:
        """Decides whether each mesh axis has a typing.

        Arguments:
          without: (mesh axis, constraint name) of constraints to leave out.

        Returns:
          `unsat` for the first axis without a typing, with its core; else `unknown` where the
          resource limit was reached; else `sat`.
        """
        limit: CheckResult | None = None
        for system in self.systems:
            axis = self.axis(system)
            names = [
                c.name for c in system.constraints if (system.mesh_axis, c.name) not in without
            ]
            status, core = axis.check(names)
            if status == "unknown":
                limit = limit or CheckResult(status="unknown", mesh_axis=system.mesh_axis)
            elif status == "unsat":
                return axis.blame(names, core)
        return limit or CheckResult(status="sat")


def check(request: Request, *, rlimit: int = RLIMIT) -> CheckResult:
    """Decides whether a program has a typing, and finds a minimal core when it has none.

    Arguments:
      request: the program with its mesh, demand, policies and budgets.
      rlimit: Z3's resource count of one question.
    """
    return Checker(request, rlimit=rlimit).check()


class _Axis:
    """The constraints of one mesh axis in Z3, and the number of questions without an answer."""

    def __init__(self, system: System, rlimit: int) -> None:
        self.system, self.unanswered = system, 0
        self.by_name = {c.name: c for c in system.constraints}
        self.pins = {c.name for c in system.constraints if isinstance(c, PinConstraint)}
        context = self._context = z3.Context()
        self._literal = functools.cache(functools.partial(_literal, z3.BoolSort(context), context))
        self._solver = z3.SolverFor("QF_FD", ctx=self._context)
        self._solver.from_string("\n".join(_text(system, system.constraints)))
        self._solver.set("rlimit", rlimit)

    def check(self, names: Iterable[str]) -> tuple[Status, frozenset[str]]:
        """The status under the named literals, and the names of a core where it is `unsat`."""
        # `Solver.check` reads the sort of each literal, which takes ten times as long as the
        # answer.
        literals = [self._literal(n).as_ast() for n in names]
        assumed = (z3.Ast * len(literals))(*literals)
        found = z3.CheckSatResult(
            z3.Z3_solver_check_assumptions(
                self._context.ref(), self._solver.solver, len(literals), assumed
            )
        )
        if found == z3.unsat:
            return "unsat", frozenset(str(c) for c in self._solver.unsat_core())
        if found == z3.sat:
            return "sat", frozenset()
        self.unanswered += 1
        return "unknown", frozenset()

    def blame(self, names: list[str], core: frozenset[str]) -> CheckResult:
        """A smallest core: policy and budgets are left out first, then pins, then equations.

        Policy and budgets are tried with all pins, so that they are in the core only where the pins
        need them. Then the program is cut behind the first equation that the pins do not allow. Two
        pins meet there first: at `q @ k.T`, not at the softmax that one of them reaches alone. In
        what is left, later pins are tried first. What has no answer stays in the core.

        Arguments:
          names: the constraints.
          core: some of them that no typing meets together.
        """
        unanswered = self.unanswered
        equations = [n for n in names if isinstance(self.by_name[n], ReadConstraint)]
        asked = [n for n in names if not isinstance(self.by_name[n], ReadConstraint)]
        for name in [n for n in asked if n in core and n not in self.pins]:
            if self.check([*(n for n in asked if n != name), *equations])[0] == "unsat":
                asked.remove(name)
        found = self._result_of(*self._fewer(asked, self._beginning(asked, equations), core))
        if _ends_in_region(found):  # no line of a loop is the first one: another core may have one
            other = self._result_of(*self._fewer(asked, equations, core))
            found = found if _ends_in_region(other) else other
        return replace(found, minimal=self.unanswered == unanswered)

    def _result_of(self, asked: list[str], between: list[str]) -> CheckResult:
        """The result for a core, its equations minimised by deletion, later equations first.

        Arguments:
          asked: pins, policy and budgets of the core.
          between: equations. No typing meets them together with `asked`.
        """
        for name in list(reversed(between)):
            if name in between:
                trial = [n for n in between if n != name]
                status, smaller = self.check([*asked, *trial])
                if status == "unsat":
                    between = [n for n in trial if n in smaller]
        found = tuple(c for c in self.system.constraints if c.name in {*asked, *between})
        sink = _sink([c for c in found if isinstance(c, ReadConstraint)])
        rest = [c.name for c in found if c not in sink]
        return CheckResult(
            status="unsat",
            mesh_axis=self.system.mesh_axis,
            core=found,
            sink=sink,
            made=tuple(self.codes(rest, c.source) for c in sink),
            wanted=tuple(self.codes(rest, c.because.end) for c in sink),
        )

    def _fewer(
        self, asked: list[str], equations: list[str], core: frozenset[str]
    ) -> tuple[list[str], list[str]]:
        """The `asked` and the `equations` of a core with no pin that it does not need.

        Arguments:
          asked: pins, policy and budgets.
          equations: equations. No typing meets them together with `asked`.
          core: taken where Z3 does not find one again.
        """
        core = self.check([*asked, *equations])[1] or core
        asked = [n for n in asked if n in core]
        for name in [n for n in reversed(asked) if n in self.pins]:
            trial = [n for n in asked if n != name]
            status, smaller = self.check([*trial, *equations])
            if status == "unsat":
                asked, core = [n for n in trial if n in smaller], smaller
        return asked, [n for n in equations if n in core]

    def _beginning(self, asked: list[str], equations: list[str]) -> list[str]:
        """The shortest beginning of the program that has no typing: it ends at the first equation
        at fault.

        Arguments:
          asked: pins, policy and budgets.
          equations: all equations, in program order. No typing meets them together with `asked`.
        """
        shortest = bisect.bisect_left(
            range(len(equations)),
            True,
            key=lambda count: self.check([*asked, *equations[:count]])[0] == "unsat",
        )
        return equations[:shortest]

    def codes(self, names: list[str], end: End) -> tuple[Code, ...]:
        """The codes that an end can have under the named literals. A code whose question has no
        answer is left out."""
        found: list[Code] = []
        for number, state in enumerate(self.system.states[end.variable]):
            literals = [*names, state_literal(end.variable, number)]
            if state[end.column] not in found and self.check(literals)[0] == "sat":
                found.append(state[end.column])
        return tuple(found)


def _literal(sort: Any, context: Any, name: str) -> Any:
    """A Bool of Z3. `z3.Bool` would make the sort anew for each name."""
    constant = z3.Z3_mk_const(context.ref(), z3.to_symbol(name, context), sort.ast)
    return z3.BoolRef(constant, context)


def _ends_in_region(found: CheckResult) -> bool:
    return any(c.because.at_region for c in found.sink)


def _sink(equations: list[ReadConstraint]) -> tuple[ReadConstraint, ...]:
    """Where the flow of types through a core ends: the conversions into the last variable from
    which no other conversion of the core starts.

    The flow around a loop has no end. There it is the return of the loop's carry.
    """
    read = {c.source.variable for c in equations}
    ends = (
        [c for c in equations if c.because.end.variable not in read]
        or [c for c in equations if c.because.returned_carry]
        or equations
    )
    return tuple(c for c in ends if c.because.end.variable == ends[-1].because.end.variable)


def refutation(request: Request) -> str:
    """The core of a program without a typing in SMT-LIB 2, where each constraint of the core is a
    named assertion. The others say that each decision has exactly one of its states. Empty where
    the constraints of no mesh axis alone exclude each other.

    Arguments:
      request: the program with its mesh, demand, policies and budgets.
    """
    found = (checker := Checker(request)).check()
    if found.status != "unsat":
        return ""
    system = next(s for s in checker.systems if s.mesh_axis == found.mesh_axis)
    used = {end.variable for pin in found.pins for end in pin.fixed}
    used |= {end.variable for c in found.equations for end in (c.source, c.because.end)}
    # Literals of pins, policy and budgets outside of the core stay free.
    free = [c for c in system.constraints if not isinstance(c, ReadConstraint)]
    names = [f"(declare-const {c.name} Bool)" for c in free if c not in found.core]
    lines = [
        f"; No types on mesh axis `{found.mesh_axis}` satisfy all named assertions.",
        "(set-option :produce-unsat-cores true)",
        "(set-logic QF_UF)",
        *names,
        *_text(system, found.core, used),
    ]
    for c in found.core:
        where = f" at {c.because.span}" if c.because.span else ""
        lines += [f"; {c.because.text}{where}", f"(assert (! {c.name} :named core-{c.name}))"]
    return "\n".join([*lines, "(check-sat)", "(get-unsat-core)", ""])


def _text(
    system: System, constraints: tuple[Constraint, ...], variables: Collection[int] | None = None
) -> Iterable[str]:
    """Constraints of a system in SMT-LIB. To parse it in one piece is ten times as fast as to build
    its terms.

    Arguments:
      system: the system.
      constraints: some of its constraints.
      variables: the variables that they are about; None for all.
    """
    for v in range(len(system.states)) if variables is None else sorted(variables):
        names = [state_literal(v, k) for k in range(len(system.states[v]))]
        yield "".join(f"(declare-const {n} Bool)" for n in names)
        yield f"(assert (or {' '.join(names)}))" if names else "(assert false)"
        yield "".join(
            f"(assert (or (not {a}) (not {b})))" for i, a in enumerate(names) for b in names[:i]
        )
    yield "".join(f"(declare-const {c.name} Bool)" for c in constraints)
    for constraint in constraints:
        if isinstance(constraint, PinConstraint):
            pinned = (system.literals_of(end, constraint.code) for end in constraint.fixed)
            yield from (f"(assert (or (not {constraint.name}) {' '.join(p)}))" for p in pinned)
        elif isinstance(constraint, ReadConstraint):
            yield from _conversion(system, constraint)


def _conversion(system: System, read: ReadConstraint) -> Iterable[str]:
    """The clauses of a conversion, one for each state of the maker and each reason: while the
    literals of the reason hold, the reader is in one of the states that the reason allows."""
    at, end = read.source, read.because.end
    source, target = (system.states[e.variable] for e in (at, end))
    aval = system.request.graph.avals[read.value]
    readable = group_by(range(len(target)), lambda k: target[k][end.column])
    reasons = _reasons(system, read)
    for k, state in enumerate(source):
        blocked: set[Code] = set()
        for literals, unless, rules in reasons:
            refused = {
                other
                for other in readable
                if not system.conversions.allows(state[at.column], other, aval, rules)
            }
            if not refused <= blocked:
                clause = [
                    f"(not {read.name})",
                    *(f"(not {x})" for x in literals),
                    f"(not {state_literal(at.variable, k)})",
                    *unless,
                    *(
                        state_literal(end.variable, j)
                        for other, states in readable.items()
                        if other not in refused
                        for j in states
                    ),
                ]
                yield f"(assert (or {' '.join(clause)}))"
            if not read.unless:
                blocked |= refused


def _reasons(
    system: System, read: ReadConstraint
) -> list[tuple[tuple[str, ...], tuple[str, ...], Rules]]:
    """The reasons why conversions are forbidden: the policy, each budget, the budgets together,
    then all of them.

    Returns:
      For each reason the literals of its constraints, the literals of the pins under which it
      forbids nothing, and the rules that it leaves.
    """
    policies, bans = read.rules.policies, read.rules.bans
    free = ("auto",) * len(policies)
    names = {
        system.request.ban(b): budget_literal(i)
        for i, b in reversed(list(enumerate(system.request.budgets)))
    }
    every, limited = tuple(names[b] for b in bans), policies != free
    found = (
        (limited, (POLICY_LITERAL,), read.unless, Rules(policies)),
        *((True, (names[b],), (), Rules(free, (b,))) for b in bans),
        (len(bans) > 1, every, (), Rules(free, bans)),
        (bool(bans) and limited, (POLICY_LITERAL, *every), read.unless, read.rules),
    )
    return [(literals, unless, rules) for holds, literals, unless, rules in found if holds]
