"""How much work a diagnosis and an answer of `plan.why` take, and how much of it they show.

No limit is silent: a diagnosis has a note about what a limit left out, an answer has a count.
`python -m benchmarks.blame_speed` measures the seconds of a diagnosis under these limits.
"""

from __future__ import annotations

from dataclasses import dataclass

from sbp.infer.check import RLIMIT


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnosisLimits:
    """Limits on the search for the reasons why a program has no typing.

    Arguments:
      solver_resources: Z3's resource count for one check.
      large: operations above which a plan takes a second or more, so that few plans are made.
      huge: operations above which a change of the policy, whose one plan serves all faults, is
        tried before any change of an annotation.
      faults, faults_large: diagnostics of one program, of a large one.
      helps: helps that one diagnostic shows.
      rows: rows of a rule that one diagnostic shows.
      pins: pins that the diagnostic of all mesh axes together shows.
      plans: plans made for the helps of one fault.
      pair_plans: plans made for changes of two pins, where no change of one pin gives a typing.
      plans_large, nodes_planned: in a large program, the most plans for one fault and the most
        operations that all these plans have together. One plan for each fault is always made.
      reused: operations up to which helps are priced with the reuse of forward conversions in the
        backward pass.
      pin_trials: the number of pins times the number of operations up to which pins that are not
        part of a conflict of all mesh axes are sorted out.
      budget_plans: plans made to find the least budget.
    """

    solver_resources: int = RLIMIT
    large: int = 1000
    huge: int = 3000
    faults: int = 5
    faults_large: int = 3
    helps: int = 3
    rows: int = 4
    pins: int = 6
    plans: int = 12
    pair_plans: int = 4
    plans_large: int = 3
    nodes_planned: int = 6000
    reused: int = 500
    pin_trials: int = 4000
    budget_plans: int = 10

    def faults_shown(self, size: int) -> int:
        """The most diagnostics of a program with `size` operations."""
        return self.faults_large if size > self.large else self.faults

    def plans_of(self, size: int, shown: int) -> tuple[int, int]:
        """How many plans are made for the helps of one fault: once one of them gave a typing, and
        while none did.

        Arguments:
          size: the number of the program's operations.
          shown: the number of faults that are shown.
        """
        if size <= self.large:
            return self.plans, self.plans
        share = max(1, self.nodes_planned // (size * shown))
        return min(self.plans_large, share), self.plans_large


@dataclass(frozen=True, slots=True, kw_only=True)
class WhyLimits:
    """Limits on the plans made for one question to `plan.why`.

    Arguments:
      plans: the most plans of a refined answer.
      first_operations: operations that the plans of a first answer have together.
      joint: the most alternatives that differ from the plan on two mesh axes.
      deferred: the most conversions of the value for which the program is planned with the
        conversion elsewhere. Conversions that send most bytes come first.
      links: the most links of a chain of origins.
    """

    plans: int = 28
    first_operations: int = 500
    joint: int = 3
    deferred: int = 4
    links: int = 200

    def plans_of(self, size: int, *, refine: bool) -> int:
        """The most plans for a question about a program with `size` operations: for a first answer,
        or for a refined one."""
        return self.plans if refine else min(self.plans, self.first_operations // max(1, size))
