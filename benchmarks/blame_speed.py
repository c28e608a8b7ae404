"""Seconds until a type error in the full GShard step is reported (GShard, Lepikhin et al., 2020: 36
layers, 2048 experts on 2048 cores).

    python -m benchmarks.blame_speed

Each line is one wrong program: its boxing policy, the dim on which the dispatched tokens are split,
and the processor seconds of `f.check` after tracing, with the goal. Nothing is compiled and no
device is needed.
"""

import time
from dataclasses import dataclass
from typing import Literal

import sbp
from benchmarks.gshard_ref import Config, abstract_arguments
from benchmarks.planning_speed import Case, step

CORES = 2048
GOAL_SECONDS = 5.0
EXPERTS_OUT = 'jnp.einsum("egch,ehm->egcm", hidden, p["ewo"])'
EXPERTS_IN = 'jnp.einsum("egcm,emh->egch", dispatched, p["ewi"])'


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongStep:
    """A step without a typing.

    Arguments:
      boxing: the policy.
      dispatched: the dim on which the dispatched tokens are split; 0 is the experts, 1 the groups.
      line: the user's expression that the error names.
    """

    boxing: Literal["explicit", "reduce"]
    dispatched: int
    line: str


WRONG_STEPS = (
    # The gradient needs an all-to-all that no annotation asks for:
    WrongStep(boxing="explicit", dispatched=0, line=EXPERTS_OUT),
    WrongStep(boxing="reduce", dispatched=0, line=EXPERTS_OUT),
    # The tokens are split by groups where the experts' weights are split:
    WrongStep(boxing="reduce", dispatched=1, line=EXPERTS_IN),
)


def case_of(wrong: WrongStep) -> Case:
    """The full step with this policy and these annotations."""
    return Case(
        axes=(("d", CORES),),
        config=Config(layers=36, experts=CORES, groups=CORES),
        limit=GOAL_SECONDS,
        boxing=wrong.boxing,
        dispatched=wrong.dispatched,
    )


def check(wrong: WrongStep) -> tuple[sbp.Report, float]:
    """The report on a wrong step, and the processor seconds of the check without tracing."""
    case = case_of(wrong)
    f, args = step(case), abstract_arguments(case.config)
    start = time.process_time()
    f.trace(*args)
    traced = time.process_time()
    report = f.check(*args)
    # `check` traces once more.
    return report, (time.process_time() - traced) - (traced - start)


def main() -> None:
    print(f"{'boxing':10} {'dispatched':>10} {'seconds':>8} {'goal':>6}")
    for wrong in WRONG_STEPS:
        report, seconds = check(wrong)
        assert any(f"`{wrong.line}`" in d.title for d in report.diagnostics), report.text()
        print(f"{wrong.boxing:10} {wrong.dispatched:10} {seconds:8.1f} {GOAL_SECONDS:5.0f}s")


if __name__ == "__main__":
    main()
