"""`plan.why`: exact texts, where types come from, prices that are those of the program annotated so
in its source, conversions that are not later, and names of values."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import sbp
from sbp.explain.names import Names
from sbp.plan import fit
from sbp.report.answers import link_text
from sbp.report.wording import deferred_text, full_need_text, refusal_text
from sbp.trace.graph import Graph
from tests.explain.answers import MESH, masked, planned, shape
from tests.report import programs, why_programs
from tests.report.golden import assert_golden
from tests.report.test_report import WIDE, facts_of, html_facts
from tests.same import refused

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
    answer = [plan.why(asked) for asked in ASKED[name]]
    text = "\n\n".join(w.text(110) for w in answer) + "\n"
    assert_golden(f"why_{name}.txt", masked(text) if name.endswith("_step") else text)
    for w in answer:
        assert len(str(w).splitlines()) <= 60 and html_facts(w.html()) == facts_of(w.text(WIDE))


def test_golden_html():
    assert_golden(
        "why_accumulated_step.html",
        masked(why_programs.plan("accumulated_step").why("total").html(standalone=True)),
    )


# ---- forced and free ----------------------------------------------------------------------------


def test_no_typing_is_said_with_its_reason():
    source = "def f(x, b):\n    h = jnp.tanh(x)\n    return h + b\n"
    args, in_types = (shape(64, 64), shape(64, 64)), ("model:S(0)", "model:S(0)")
    answer = planned(source, args, boxing="explicit", in_types=in_types).why("h").why
    impossible = {
        dict(a.wanted).get("model"): refusal_text(a.refusal)
        for a in answer.alternatives
        if a.refusal is not None
    }
    assert impossible["S(1)"].startswith("add `h + b` at ")
    assert impossible["S(1)"].endswith('does not take S(1) on `model` under boxing="explicit"')
    assert "B" not in impossible  # what is whole is sliced for nothing


def test_long_chains_end_where_they_come_from():
    """Each layer is read twice, so there are as many ways back as there are subsets of the
    layers: a search that follows all of them does not end."""
    source = (
        "def f(x):\n    h = x\n    for _ in range(210):\n        a = jnp.sin(h)\n        h = h +"
        " a\n    y = h * 2.0\n    return y\n"
    )
    data, model = planned(source, (shape(64, 64),), in_types=("data:S(0)",)).why("y").why.axes
    assert (data.links[-1].kind, str(data.links[-1].subject)) == ("input", "`x`")
    assert link_text(data.links[1]) == "add: S(0), S(0) -> S(0)"
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


@pytest.mark.filterwarnings("ignore:.*does not divide:sbp.SbpWarning")
def test_an_input_with_an_uneven_split_is_named():
    step = sbp.jit(lambda w, x: x @ w, MESH, in_types=("model:S(1)", "model:S(1)"))
    plan = step.plan(shape(64, 10), shape(4096, 64))
    answer = plan.why("w").text() + plan.report().text() + plan.why("result").text()
    assert "made by input w; needed by dot_general" in answer and "sbp_annotate" not in answer


def test_outputs_that_take_a_donated_buffer_say_so():
    plan = sbp.jit(lambda w, g: w - g, MESH, in_types=("data:S(0)", "B"), donate_argnums=(0,)).plan(
        shape(64, 64), shape(64, 64)
    )
    answer = plan.why("result")
    assert (
        link_text(answer.why.axes[0].links[0])
        == "it replaces the input `w` in the next call, and so has its type"
    )
    assert "on `data` S(0): the type of the input that it replaces; " in answer.text()


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
    answer = (
        planned(source, args, in_types=in_types, out_types=out_types, memory_limit=limit)
        .why("h")
        .why
    )
    assert all(a.cost.peak_memory_bytes <= limit for a in answer.alternatives if a.cost is not None)
    whole = [a for a in answer.alternatives if dict(a.wanted) == {"data": "B"}]
    assert [a.refusal and refusal_text(a.refusal) for a in whole] == [
        "no plan fits in memory_limit"
    ]


def test_types_of_a_checkpointed_scan():
    """Values that only rematerialization makes have answers, and so have values that it does not
    repeat."""
    source, h, args, in_types = PRICED["a scan"]
    answer = planned(source.replace("{h}", h), args, in_types=in_types)
    assert "more than once" not in answer.why("h").text() or len(answer.why("h").why.types) > 1
    frame = answer.why("z").why.subject.frame
    assert frame is not None and frame.line == 9


# ---- prices --------------------------------------------------------------------------------------

LAYERS = """
def layer(x, w):
    h = {h}
    return h

def loss(x, ws):
    for w in ws:
        x = {call}(x, w)
    return (x * x).sum()

f = jax.value_and_grad(loss, argnums=1)
"""
SCANNED = """
def loss(x, ws):
    @jax.checkpoint
    def layer(x, w):
        h = {h}
        z = h * 2.0
        return z + x, None
    x, _ = jax.lax.scan(layer, x, ws)
    return (x * x).sum()

f = jax.grad(loss, argnums=1)
"""
STEP = """
def f(x, w, v):
    def loss(w, v):
        h = {h}
        y = h @ v
        return ((y + x) ** 2).mean()
    value, (gw, gv) = jax.value_and_grad(loss, argnums=(0, 1))(w, v)
    return w - 0.1 * gw, v - 0.1 * gv
"""
SQUARES = (shape(64, 64), [shape(64, 64)] * 3)
PRICED = {
    "plain layers": (
        LAYERS.replace("{call}", "layer"),
        "jnp.tanh(x @ w)",
        SQUARES,
        ("data:S(0)", "model:S(1)"),
    ),
    "layers computed again": (
        LAYERS.replace("{call}", "jax.checkpoint(layer)"),
        "jnp.tanh(x @ w)",
        SQUARES,
        ("data:S(0)", "model:S(1)"),
    ),
    "a product": (LAYERS.replace("{call}", "layer"), "x @ w", SQUARES, ("data:S(0)", "model:S(0)")),
    "a scan": (
        SCANNED,
        "jnp.tanh(x @ w)",
        (shape(64, 64), shape(5, 64, 64)),
        ("data:S(0)", "model:S(2)"),
    ),
    "a step": (
        STEP,
        "jax.nn.gelu(x @ w)",
        (shape(512, 256), shape(256, 1024), shape(1024, 256)),
        ("data:S(0)", "model:S(1)", None),
    ),
}


def annotated(text, wanted):
    return f"sbp.annotate({text}, {', '.join(f'{axis}={atom}' for axis, atom in wanted)})".replace(
        "P(sum)", "P"
    )


@pytest.mark.parametrize(("source", "h", "args", "in_types"), PRICED.values(), ids=PRICED)
def test_prices_are_those_of_the_annotated_source(source, h, args, in_types):
    answer = planned(source.replace("{h}", h), args, in_types=in_types).why("h").why
    priced = [a for a in answer.alternatives if a.cost is not None]
    assert {len(a.wanted) for a in priced} == {1} and len(priced) >= 3
    for alternative in priced:
        there = planned(
            source.replace("{h}", annotated(h, alternative.wanted)), args, in_types=in_types
        )
        assert alternative.cost == there.cost, alternative.change
        pins = [n for n in there.program.graph.walk() if n.op == "sbp_annotate"]
        assert there.program.typing.type_of(pins[0].outputs[0]) == alternative.type, (
            alternative.change
        )


def test_prices_of_a_pin_that_is_changed_or_dropped():
    source, args = (
        "def f(x, w):\n    x = {x}\n    return jnp.tanh(x @ w)\n",
        (
            shape(64, 64),
            shape(64, 64),
        ),
    )
    answer = (
        planned(source.replace("{x}", "sbp.annotate(x, data=S(1), model=B)"), args).why("x").why
    )
    assert [story.pinned for story in answer.axes] == [True, True]
    kept = {"data": "S(1)", "model": "B"}
    for alternative in answer.alternatives:
        asked = kept | dict(alternative.wanted)
        text = annotated("x", [(a, t) for a, t in asked.items() if t != "?"])
        assert alternative.cost == planned(source.replace("{x}", text), args).cost, (
            alternative.change
        )
    assert sum("?" in dict(a.wanted).values() for a in answer.alternatives) == 2


def test_prices_of_inputs_and_outputs():
    source, args = "def f(x, w):\n    return jnp.tanh(x @ w)\n", (shape(64, 64), shape(64, 64))
    plan = planned(source, args, in_types=("data:S(0)", "model:S(0)"), out_types="data:S(0)")
    inputs, outputs = plan.why("w").why, plan.why("result").why
    for alternative in (*inputs.alternatives, *outputs.alternatives):
        w, out = {"model": "S(0)"}, {"data": "S(0)"}
        changed = w if alternative in inputs.alternatives else out
        changed |= dict(alternative.wanted)
        texts = [" ".join(f"{a}:{t}" for a, t in sorted(pins.items())) for pins in (w, out)]
        assert (
            alternative.cost
            == planned(source, args, in_types=("data:S(0)", texts[0]), out_types=texts[1]).cost
        ), alternative.change


def test_a_later_reduction_costs_what_the_annotated_consumer_does():
    source = "def f(x, w, b):\n    y = x @ w\n    z = {z}\n    return jnp.tanh(z)\n"
    args, in_types = (
        (shape(64, 64), shape(64, 64), shape(64, 64)),
        (
            "model:S(1)",
            "model:S(0)",
            "model:S(0)",
        ),
    )
    (one,) = (
        planned(source.replace("{z}", "y - b"), args, in_types=in_types).why("y").why.conversions
    )
    assert one.instead is not None and one.reason.need.kind == "partners"
    assert deferred_text(one.reason.need, ()).startswith("Reduced one operation later, after sub")
    assert (
        one.instead.cost
        == planned(
            source.replace("{z}", "sbp.annotate(y - b, model=P)"), args, in_types=in_types
        ).cost
    )


AGAIN = {
    "layers": (
        LAYERS.replace("{call}", "jax.checkpoint(layer)"),
        lambda n: [shape(n, n)] * 3,
        "data:S(0)",
    ),
    "a scan": (SCANNED, lambda n: shape(5, n, n), "data:S(1)"),
}


@pytest.mark.parametrize("rows", [64, 512, 4096])
@pytest.mark.parametrize(("source", "weights", "held"), AGAIN.values(), ids=AGAIN)
def test_what_is_computed_again_is_priced_and_proved_as_in_the_report(source, weights, held, rows):
    """Types are chosen in several ways there, with what gradients keep from the forward pass in
    mind."""
    plan = planned(
        source.replace("{h}", "jnp.tanh(x @ w)"),
        (shape(rows, 512), weights(512)),
        in_types=("data:S(0)", held),
    )
    answer = plan.why("h")
    assert answer.why.cost == plan.cost
    assert (
        answer.why.cost.seconds == plan.program.typing.seconds - plan.program.typing.saved_seconds
    )
    proved = plan.program.typing.optimal
    assert proved == ("proved cheapest" in plan.report().text())
    cheaper = [
        a
        for a in answer.why.alternatives
        if a.cost is not None and a.cost.seconds < plan.cost.seconds * (1 - 1e-6)
    ]
    assert not (proved and cheaper)
    assert ("either the search missed this type" in answer.text(200)) == bool(cheaper)


def test_a_reader_that_takes_another_type_is_priced_with_what_gradients_keep(monkeypatch):
    layer = "def layer(x, w):\n    v = w * 1.0\n    h = jnp.tanh(x @ v)\n    return h * 2.0 + x\n"
    source = (
        layer + LAYERS.replace("{call}", "jax.checkpoint(layer)").partition("    return h\n")[2]
    )
    plan = planned(
        source, (shape(4096, 512), [shape(512, 512)] * 3), in_types=("data:S(0)", "data:S(0)")
    )

    def prices():
        return [
            c.instead.cost.seconds
            for c in plan.why("x").why.conversions
            if c.instead is not None and c.instead.cost is not None
        ]

    kept = prices()
    monkeypatch.setattr(fit, "repeated_values", lambda graph: (frozenset(), {}))
    assert kept and min(kept) < min(prices())


# ---- policies -----------------------------------------------------------------------------------

CONVERTED = "def f(x, w):\n    h = jnp.tanh(x)\n    y = h @ w\n    return y\n"
REGION = (
    'def f(x, w):\n    with sbp.policy("reduce", "data"):\n        h = jnp.tanh(x)\n        y = h @'
    " w\n    return y\n"
)
RESTRICTED: dict[str, tuple[str, Any]] = {
    "everywhere": (CONVERTED, "reduce"),
    "on an axis": (CONVERTED, {"data": "reduce"}),
    "in a region": (REGION, "auto"),
}


@pytest.mark.parametrize(("source", "boxing"), RESTRICTED.values(), ids=RESTRICTED)
def test_a_pin_may_convert_what_the_policy_forbids(source, boxing):
    args, in_types = (shape(64, 64), shape(64, 64)), ("data:S(1)", "B")
    plan = planned(
        source,
        args,
        jax.sharding.AbstractMesh((4,), ("data",)),
        boxing,
        in_types=in_types,
        out_types="data:?",
    )
    answer = plan.why("h")
    (story,) = answer.why.axes
    assert story.next_best is not None and story.next_best.cost is not None
    assert story.next_best.cost.seconds < plan.cost.seconds
    assert "the types are proved cheapest" in plan.report().text()
    said = "on `data` S(1): found by sbp's search; pinned as S(0) it is -"
    assert said in answer.text(200)


# ---- conversions ---------------------------------------------------------------------------------

SUM = (shape(64, 4096), shape(4096, 64))
FORBIDDEN = {
    "return jnp.tanh(y)": (
        r"needed by tanh `jnp.tanh\(y\)` at .*:6, which has no row for P\(sum\): it is not linear"
        r" in this operand"
    ),
    "return y * y": (
        r"needed by (square|mul) `y \* y` at .*:6, which (has no row for|takes) P\(sum\)"
    ),
    "return y.astype(jnp.bfloat16)": (
        r"needed by convert_element_type .*: a cast to bfloat16 would round each part, so the sum"
        r" comes first"
    ),
    "return sbp.replicate(y)": r"pinned as B by `sbp.replicate\(y\)` at .*:6",
    "return y": (r"returned as `result`: an output is partial only if its type says so"),
}


needed = lambda conversion: full_need_text(conversion.reason.need, ("result",))


@pytest.mark.parametrize("line", list(FORBIDDEN))
def test_why_a_reduction_is_not_later(line):
    source = f"def f(x, w):\n    y = x @ w\n    {line}\n"
    found = planned(source, SUM, in_types=("model:S(1)", "model:S(0)")).why("y").why.conversions
    said = [needed(c) for c in found if c.steps[0].kind in ("all_reduce", "reduce_scatter")]
    assert any(re.search(FORBIDDEN[line], s) for s in said), said


def test_a_carry_that_each_trip_reads_whole():
    source = """
def f(x, w):
    def step(state, part):
        out = jnp.tanh(state)
        new = part @ w
        return new, out
    return jax.lax.scan(step, jnp.zeros((64, 64)), x)
"""
    plan = planned(
        source,
        (shape(4, 64, 4096), shape(4096, 64)),
        in_types=("model:S(2)", "model:S(0)"),
        out_types="B",
    )
    (one,) = plan.why("new").why.conversions
    pattern = (
        r"carried as .* over all trips of scan .*: each trip reads it in tanh `jnp.tanh\(state\)`"
        r" at .*:7, which has no row for P\(sum\)"
    )
    assert re.fullmatch(pattern, needed(one))


# ---- names of values -----------------------------------------------------------------------------


def test_names():
    source = """
def f(x, ws):
    def loss(ws):
        h = jax.nn.silu(x @ ws["a"])
        return (h * h).sum()
    value, grads = jax.value_and_grad(loss)(ws)
    return value, grads
"""
    plan = planned(source, (shape(64, 64), {"a": shape(64, 64)}), in_types=("data:S(0)", None))
    names = ("h", "ws['a']", "[0]", "[1]['a']", "line 7", 7, "gradient of line 7", "value", "grads")
    why = {name: plan.why(name).why for name in names}
    kinds = {name: why[name].subject.kind for name in names}
    assert {name: kind for name, kind in kinds.items() if kind in ("input", "output")} == {
        "ws['a']": "input",
        "[0]": "output",
        "[1]['a']": "output",
    }
    assert why["line 7"] == why[7] and why["line 7"].subject.label == why["h"].subject.label == "h"
    assert [n for n in names if why[n].subject.gradient] == ["gradient of line 7", "grads"]
    assert {s.label for s, _ in why["line 7"].others} >= {'x @ ws["a"]'}
    assert (why["value"].shape, why["grads"].shape) == ((), (64, 64))


def test_files():
    plan = why_programs.plan("accumulated_step")
    assert plan.why("why_programs.py:59").why == plan.why("tests/report/why_programs.py:59").why
    refused(r"no value of the program is called 'other\.py:59'", plan.why, "other.py:59")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("hh", 'did you mean "h"?'),
        ("gradz", '"grads"'),
        ("qqqqqq", "known: "),
        ("line 9999", "lines near it with values: "),
    ],
)
def test_unknown_names(name, said):
    plan = why_programs.plan("megatron_step")
    refused(f"(?s)no value .* is called.*{re.escape(said)}", plan.why, name)


def test_assignments():
    source = """
def f(x, w):
    a, b = jnp.exp(x), jnp.sin(x)
    c: jax.Array = a * b
    c += w
    (d, e), g = jax.lax.top_k(c, 2), 3
    if (k := d.sum()) is not None:
        g = g * k
    return g, e
"""
    plan = planned(source, (shape(64, 64), shape(64, 64)))
    kinds = {
        name: plan.program.graph.avals[plan.why(name).why.subject.values[0]] for name in "abcdegk"
    }
    assert [kinds[n].shape for n in "abcdegk"] == [(64, 64)] * 3 + [(64, 2)] * 2 + [(), ()]
    assert (kinds["e"].dtype, len(plan.why("c").why.others)) == (jnp.int32, 1)


@pytest.mark.parametrize("name", ["layers", "iterate", "choose"])
def test_every_line_can_be_asked_about(name):
    plan = programs.plan(name)
    lines = {node.span for node in plan.program.graph.walk() if node.span and not node.backward}
    for place in sorted({f"{span.file}:{span.line}" for span in lines}):
        answer = plan.why(place)
        frame = answer.why.subject.frame
        assert frame is not None and f"{frame.file}:{frame.line}" == place
        assert len(str(answer).splitlines()) <= 60
