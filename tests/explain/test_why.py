"""`plan.why`: exact texts, where types come from, and answers that do not depend on the hash
seed."""

import os
import subprocess
import sys

import pytest

import sbp
from sbp.explain.names import Names
from sbp.report.answers import link_text
from sbp.report.wording import refusal_text
from sbp.trace.graph import Graph
from tests.explain.answers import MESH, masked, planned, shape
from tests.explain.conftest import ROOT
from tests.explain.test_why_prices import PRICED
from tests.report import why_programs
from tests.report.golden import assert_golden
from tests.report.test_report import WIDE, facts_of, html_facts

ASKED = {
    "megatron_step": ("h", "y", "grads"),
    "gshard_layer": ("dispatched", "why_programs.py:44"),
    "accumulated_step": ("total",),
    "parallel_block": ("attended",),
}


# ---- exact texts --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(ASKED))
def test_golden_text(name):
    plan = why_programs.plan(name)
    told = [plan.why(asked) for asked in ASKED[name]]
    text = "\n\n".join(w.text(110) for w in told) + "\n"
    assert_golden(f"why_{name}.txt", masked(text) if name.endswith("_step") else text)
    for w in told:
        assert len(str(w).splitlines()) <= 60
        assert html_facts(w.html()) == facts_of(w.text(WIDE))


def test_golden_html():
    assert_golden(
        "why_accumulated_step.html",
        masked(why_programs.plan("accumulated_step").why("total").html(standalone=True)),
    )


def test_it_shows_itself():
    told = why_programs.plan("accumulated_step").why("total")
    assert str(told) == repr(told) == told.text()
    assert told._repr_mimebundle_() == {"text/plain": told.text(), "text/html": told._repr_html_()}


# ---- forced and free ----------------------------------------------------------------------------


def test_no_typing_is_said_with_its_reason():
    source = "def f(x, b):\n    h = jnp.tanh(x)\n    return h + b\n"
    args, in_types = (shape(64, 64), shape(64, 64)), ("model:S(0)", "model:S(0)")
    told = planned(source, args, boxing="explicit", in_types=in_types).why("h").why
    impossible = {
        dict(a.wanted).get("model"): refusal_text(a.refusal)
        for a in told.alternatives
        if a.refusal is not None
    }
    assert impossible["S(1)"].startswith("add `h + b` at ")
    assert impossible["S(1)"].endswith('does not take S(1) on `model` under boxing="explicit"')
    assert "B" not in impossible  # what is whole is sliced for nothing


def test_chains_end_at_pins_and_free_inputs():
    plan = planned(
        "def f(x, w):\n    h = jnp.exp(x @ w)\n    return h * 2\n",
        (shape(64, 64), shape(64, 64)),
        in_types=("data:S(0)", None),
    )
    data, model = plan.why("h").why.axes
    end = data.links[-1]
    assert (end.kind, str(end.subject), data.atom) == ("input", "`x`", "S(0)")
    assert model.links[-1].kind in ("input", "free input")
    assert data.next_best is not None and not data.pinned


def test_long_chains_end_where_they_come_from():
    """Each layer is read twice, so there are as many ways back as there are subsets of the
    layers: a search that follows all of them does not end."""
    source = (
        "def f(x):\n    h = x\n    for _ in range(210):\n        a = jnp.sin(h)\n        h = h +"
        " a\n    y = h * 2.0\n    return y\n"
    )
    plan = planned(source, (shape(64, 64),), in_types=("data:S(0)",))
    data, model = plan.why("y").why.axes
    assert (data.links[-1].kind, str(data.links[-1].subject)) == ("input", "`x`")
    assert link_text(data.links[1]) == "add: S(0), S(0) -> S(0); `a` is S(0), from `x`"
    assert str(model.links[-1].subject) == "`x`"


def test_names_of_many_inputs():
    many = 20_000
    names = Names(
        Graph(
            inputs=tuple(range(many)),
            outputs=(),
            nodes=(),
            avals={},
            input_names=tuple(f"w{i}" for i in range(many)),
        )
    )
    assert [names.value(v) for v in range(many)] == [f"w{i}" for i in range(many)]


def test_outputs_that_take_a_donated_buffer_say_so():
    plan = sbp.jit(lambda w, g: w - g, MESH, in_types=("data:S(0)", "B"), donate_argnums=(0,)).plan(
        shape(64, 64), shape(64, 64)
    )
    told = plan.why("result")
    assert (
        link_text(told.why.axes[0].links[0])
        == "it takes the buffer, and so the type, of the donated input `w`"
    )
    assert "on `data` S(0): the type of the donated input; " in told.text()


def test_a_memory_limit_holds_for_every_price():
    source, args = (
        "def f(x, w):\n    h = jnp.tanh(x @ w)\n    return (h * h).sum(1)\n",
        (
            shape(4096, 64),
            shape(64, 4096),
        ),
    )
    in_types, out_types = ("data:S(0)", "model:S(1)"), "data:S(0)"
    limit = planned(source, args, in_types=in_types, out_types=out_types).cost.peak_memory_bytes
    told = (
        planned(source, args, in_types=in_types, out_types=out_types, memory_limit=limit)
        .why("h")
        .why
    )
    assert all(a.cost.peak_memory_bytes <= limit for a in told.alternatives if a.cost is not None)
    whole = [a for a in told.alternatives if dict(a.wanted) == {"data": "B"}]
    assert [a.refusal and refusal_text(a.refusal) for a in whole] == [
        "no plan fits in memory_limit"
    ]


def test_types_of_a_checkpointed_scan():
    """Values that only rematerialisation makes, and those that it does not repeat, are told as
    well."""
    source, h, args, in_types = PRICED["a scan"]
    told = planned(source.replace("{h}", h), args, in_types=in_types)
    assert "more than once" not in told.why("h").text() or len(told.why("h").why.types) > 1
    frame = told.why("z").why.subject.frame
    assert frame is not None and frame.line == 9


# ---- determinism --------------------------------------------------------------------------------

_PRINT_ALL = """
from tests.explain.test_why import ASKED
from tests.report.why_programs import plan
for name in ("accumulated_step", "parallel_block"):
    made, asked = plan(name), ASKED[name]
    answers = (made.why(a).html() + made.why(a).text() for a in asked)
    print(*answers, made.diff(plan("accumulated_step")), sep="\\n")
"""


def test_answers_do_not_depend_on_the_hash_seed():
    printed = set()
    for seed in ("0", "4242"):
        env = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        made = subprocess.run(
            [sys.executable, "-c", _PRINT_ALL], env=env, cwd=ROOT, capture_output=True, check=True
        )
        printed.add(made.stdout)
    assert len(printed) == 1
    assert len(printed.pop()) > 5_000
