"""`plan.diff`: exact texts, what is matched and how, figures against the plans themselves."""

from pathlib import Path

import jax
import pytest

import sbp
from sbp.errors import SbpError
from tests.report import why_programs
from tests.report.golden import assert_golden
from tests.report.test_report import WIDE, _facts, html_facts
from tests.report.test_why import masked, planned, shape

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _in_the_project(monkeypatch):
    """Files are named relative to the working folder."""
    monkeypatch.chdir(ROOT)


def data_parallel(name="megatron_step"):
    """The same program with its weights on every device."""
    fn, mesh, args, in_types, _ = why_programs.PROGRAMS[name]
    return sbp.jit(fn, mesh, in_types=(*in_types[:2], "B"), hardware="tpu-v3").plan(*args)


# ---- exact texts


def test_golden():
    found = why_programs.plan("megatron_step").diff(data_parallel())
    assert_golden("diff_megatron_step.txt", masked(found.text(110) + "\n"))
    assert_golden("diff_megatron_step.html", masked(found.html(standalone=True)))
    assert html_facts(found.html()) == _facts(found.text(WIDE))
    assert len(str(found).splitlines()) <= 60


def test_it_shows_itself():
    found = why_programs.plan("accumulated_step").diff(why_programs.plan("accumulated_step"))
    assert str(found) == repr(found) == found.text()
    assert found.text().endswith("nothing differs")
    assert found._repr_html_() == found.html()


# ---- figures


def test_figures_are_those_of_the_plans():
    this, other = why_programs.plan("megatron_step"), data_parallel()
    found = this.diff(other).difference
    assert found.costs == (this.cost, other.cost)
    assert sum(d.bytes_more for d in found.sent) == other.cost.bytes_per_device - this.cost.bytes_per_device
    assert [abs(d.bytes_more) for d in found.sent] == sorted((abs(d.bytes_more) for d in found.sent), reverse=True)
    inputs = {d.name: (repr(d.this.type), repr(d.other.type)) for d in found.inputs}
    assert inputs == {"`params['w_in']`": ("model:S(1)", "B"), "`params['w_out']`": ("model:S(0)", "B")}
    assert {d.name: d.this.bytes_per_device for d in found.inputs}["`params['w_in']`"] == 1024 * 4096 * 4 / 4


def test_it_is_antisymmetric():
    this, other = why_programs.plan("megatron_step"), data_parallel()
    there, back = this.diff(other).difference, other.diff(this).difference
    assert there.costs == back.costs[::-1]
    assert {(d.name, d.this, d.other) for d in there.values} == {(d.name, d.other, d.this) for d in back.values}
    assert {(d.place, d.this, d.other) for d in there.sent} == {(d.place, d.other, d.this) for d in back.sent}


# ---- matching

BEFORE = "def f(x, w, v):\n    h = jnp.tanh(x @ w)\n    return h @ v\n"
AFTER = (
    "def f(x, w, v):\n"
    "    # a comment moves all lines\n"
    "    x = sbp.annotate(x, data=S(0))\n"
    "    h = sbp.annotate(jnp.tanh(x @ w), model=S(1))\n"
    "    return h @ v\n"
)
ARGS = (shape(64, 256), shape(256, 256), shape(256, 64))


def test_values_are_matched_by_name_not_by_line():
    found = planned(BEFORE, ARGS, in_types=("B", "B", "B")).diff(planned(AFTER, ARGS, in_types=("B", "B", "B"))).difference
    assert found.titles == ("f", "f")
    values = {d.name: (repr(d.this.type), repr(d.other.type)) for d in found.values}
    assert values["`h`"][1] == "data:S(0) model:S(1)"
    assert values["`h`"][0] != values["`h`"][1]
    assert [s[:1] for s in found.settings] == [("`x`",), ("`h`",)]
    assert found.settings[1] == ("`h`", "not pinned", "model:S(1)")


def test_other_meshes_policies_and_hardware():
    small = jax.sharding.AbstractMesh((2, 2), ("data", "model"))
    in_types = ("data:S(0)", "model:S(1)", "model:S(0)")
    this = planned(BEFORE, ARGS, in_types=in_types)
    other = planned(BEFORE, ARGS, mesh=small, boxing="reduce", in_types=in_types)
    found = this.diff(other).difference
    assert found.settings == (("mesh", "data=2 model=4", "data=2 model=2"), ("boxing", "auto", "reduce"))
    assert found.costs[0].peak_memory_bytes != found.costs[1].peak_memory_bytes


def test_other_batch_sizes_are_matched():
    this, other = (planned(BEFORE, (shape(n, 256), *ARGS[1:]), in_types=("data:S(0)", "B", "B")) for n in (64, 128))
    found = this.diff(other).difference
    assert found.unmatched == (0, 0)
    assert not found.settings
    assert found.costs[0].seconds < found.costs[1].seconds


def test_different_functions_are_said():
    found = why_programs.plan("megatron_step").diff(why_programs.plan("gshard_layer"))
    assert "these are plans of different functions" in found.text()
    assert found.difference.titles == ("megatron_step", "gshard_layer")
    assert html_facts(found.html()) == _facts(found.text(WIDE))


def test_unrolled_turns_of_a_loop_are_told_apart():
    source = "def f(x, ws):\n    for w in ws:\n        h = {h}\n        x = jnp.tanh(h)\n    return x\n"
    args = (shape(64, 64), [shape(64, 64)] * 3)
    this = planned(source.replace("{h}", "x @ w"), args, in_types=("data:S(0)", "B"))
    other = planned(source.replace("{h}", "sbp.annotate(x @ w, model=S(1))"), args, in_types=("data:S(0)", "B"))
    (h,) = [d for d in this.diff(other).difference.values if d.name == "`h`"]
    assert repr(h.other.type) == "data:S(0) model:S(1)"


def test_only_plans_are_compared():
    with pytest.raises(SbpError, match=r"plan\.diff takes another plan, got 3"):
        why_programs.plan("accumulated_step").diff(3)  # type: ignore[arg-type]  # what is tested
