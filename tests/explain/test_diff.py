"""`plan.diff`: exact texts, what is matched and how, figures against the plans themselves."""

import sbp
from sbp.trace.graph import Graph
from tests.explain.answers import masked, planned, shape
from tests.report import why_programs
from tests.report.golden import assert_golden
from tests.report.test_report import WIDE, facts_of, html_facts


def data_parallel(name="megatron_step"):
    """The same program with its weights on every device."""
    fn, mesh, args, in_types, _ = why_programs.PROGRAMS[name]
    return sbp.jit(fn, mesh, in_types=(*in_types[:2], "B"), hardware="tpu-v3").plan(*args)


# ---- exact texts --------------------------------------------------------------------------------


def test_golden():
    found = why_programs.plan("megatron_step").diff(data_parallel())
    assert_golden("diff_megatron_step.txt", masked(found.text(110) + "\n"))
    assert_golden("diff_megatron_step.html", masked(found.html(standalone=True)))
    assert html_facts(found.html()) == facts_of(found.text(WIDE))
    assert len(str(found).splitlines()) <= 64


# ---- figures ------------------------------------------------------------------------------------


def test_figures_are_those_of_the_plans():
    this, other = why_programs.plan("megatron_step"), data_parallel()
    there, back = this.diff(other).difference, other.diff(this).difference
    assert there.costs == (this.cost, other.cost)
    assert (
        sum(d.bytes_more for d in there.sent)
        == other.cost.bytes_per_device - this.cost.bytes_per_device
    )
    assert [abs(d.bytes_more) for d in there.sent] == sorted(
        (abs(d.bytes_more) for d in there.sent), reverse=True
    )
    assert {d.name: (repr(d.this.type), repr(d.other.type)) for d in there.inputs} == {
        "params['w_in']": ("model:S(1)", "B"),
        "params['w_out']": ("model:S(0)", "B"),
    }
    assert {d.name: d.this.bytes_per_device for d in there.inputs}[
        "params['w_in']"
    ] == 1024 * 4096 * 4 / 4
    # It is antisymmetric.
    assert (there.costs, {(d.name, d.this, d.other) for d in there.values}) == (
        back.costs[::-1],
        {(d.name, d.other, d.this) for d in back.values},
    )
    sent = [(d.made, d.read, d.runs[::-1], d.bytes_per_device[::-1]) for d in there.sent]
    assert set(sent) == {(d.made, d.read, d.runs, d.bytes_per_device) for d in back.sent}


# ---- matching -----------------------------------------------------------------------------------

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
    found = (
        planned(BEFORE, ARGS, in_types=("B", "B", "B"))
        .diff(planned(AFTER, ARGS, in_types=("B", "B", "B")))
        .difference
    )
    assert found.titles == ("f", "f")
    values = {d.name: (repr(d.this.type), repr(d.other.type)) for d in found.values}
    assert values["h"][1] == "data:S(0) model:S(1)" and values["h"][0] != values["h"][1]


def test_programs_are_walked_as_often_however_many_values_they_have(monkeypatch):
    walk, walks = Graph.walk, []
    monkeypatch.setattr(Graph, "walk", lambda graph: walks.append(graph) or walk(graph))
    counts = set()
    for layers in (3, 12):
        source = (
            "def f(x, w):\n"
            + "".join(f"    x = h{i} = jnp.tanh(x @ w)\n    y{i} = x * 2\n" for i in range(layers))
            + "    return x\n"
        )
        this, other = (
            planned(source, (shape(64, 64), shape(64, 64)), in_types=(t, "B"))
            for t in ("data:S(0)", "model:S(0)")
        )
        walks.clear()
        assert len(this.diff(other).difference.values) >= layers
        counts.add(len(walks))
    assert len(counts) == 1


def test_other_batch_sizes_are_matched():
    this, other = (
        planned(BEFORE, (shape(n, 256), *ARGS[1:]), in_types=("data:S(0)", "B", "B"))
        for n in (64, 128)
    )
    found = this.diff(other).difference
    assert found.unmatched == (0, 0)
    assert found.costs[0].seconds < found.costs[1].seconds
    assert this.diff(this).text().endswith("nothing differs")


def test_different_functions_are_said():
    found = why_programs.plan("megatron_step").diff(why_programs.plan("gshard_layer"))
    assert "these are plans of different functions" in found.text()
    assert found.difference.titles == ("megatron_step", "gshard_layer")
    assert html_facts(found.html()) == facts_of(found.text(WIDE))


def test_unrolled_turns_of_a_loop_are_told_apart():
    source = (
        "def f(x, ws):\n    for w in ws:\n        h = {h}\n        x = jnp.tanh(h)\n    return x\n"
    )
    args = (shape(64, 64), [shape(64, 64)] * 3)
    this = planned(source.replace("{h}", "x @ w"), args, in_types=("data:S(0)", "B"))
    other = planned(
        source.replace("{h}", "sbp.annotate(x @ w, model=S(1))"), args, in_types=("data:S(0)", "B")
    )
    (h,) = [d for d in this.diff(other).difference.values if d.name == "h"]
    assert repr(h.other.type) == "data:S(0) model:S(1)"
