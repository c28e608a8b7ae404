"""The plan of GShard's step of 12 layers: the bytes it sends, the same work whatever the number of
devices, and the same text every time. `benchmarks/planning_speed.py` measures the seconds."""

from functools import cache

import pytest

import sbp
from benchmarks.gshard_ref import Config, abstract_arguments
from benchmarks.planning_speed import Case, step
from sbp.signatures import rule_for


def planned(cores: int) -> sbp.Plan:
    """The plan for as many experts as cores, from the paper's three annotations."""
    config = Config(layers=12, experts=cores, groups=cores)
    case = Case(axes=(("d", cores),), config=config, limit=0.0)
    return step(case).plan(*abstract_arguments(config))


@cache
def counted(cores: int) -> tuple[sbp.Plan, int]:
    """The plan, and how many times a rule was asked for its rows."""
    asked: list[str] = []

    def ask(name: str):
        asked.append(name)
        return rule_for(name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sbp.infer.rows.rule_for", ask)
        return planned(cores), len(asked)


def test_bytes_and_gap():
    """DESIGN's figure for an expert's program on 128 cores is 3,189 MiB."""
    plan, _ = counted(128)
    assert plan.program.typing.gap < 1e-3
    assert plan.cost.bytes_per_device / 2**20 == pytest.approx(2930.2, abs=0.5)


def test_the_work_does_not_grow_with_the_device_count():
    (small, few), (large, many) = counted(128), counted(1024)
    assert 0 < many <= few
    assert str(large).count("\n") <= 1.01 * str(small).count("\n")


def test_the_plan_is_the_same_bytes_every_time():
    assert str(planned(128)) == str(counted(128)[0])
