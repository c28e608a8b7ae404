"""`plan.why`: each price is that of the program annotated so in its source."""

import dataclasses
from typing import Any

import jax
import pytest

from sbp.plan import fit
from sbp.report.answers import explanation
from sbp.report.wording import deferred_text
from sbp.trace.numbering import Twins
from tests.explain.answers import planned, shape

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


@pytest.mark.parametrize("name", list(PRICED))
def test_prices_are_those_of_the_annotated_source(name):
    source, h, args, in_types = PRICED[name]
    told = planned(source.replace("{h}", h), args, in_types=in_types).why("h").why
    priced = [a for a in told.alternatives if a.cost is not None]
    assert {len(a.wanted) for a in priced} == {1, 2}
    assert len(priced) >= 5
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
    told = planned(source.replace("{x}", "sbp.annotate(x, data=S(1), model=B)"), args).why("x").why
    assert [story.pinned for story in told.axes] == [True, True]
    kept = {"data": "S(1)", "model": "B"}
    for alternative in told.alternatives:
        asked = kept | dict(alternative.wanted)
        text = annotated("x", [(a, t) for a, t in asked.items() if t != "?"])
        assert alternative.cost == planned(source.replace("{x}", text), args).cost, (
            alternative.change
        )
    assert sum("?" in dict(a.wanted).values() for a in told.alternatives) == 2


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
    assert one.instead is not None
    assert one.reason.need.kind == "partners"
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
@pytest.mark.parametrize("name", list(AGAIN))
def test_what_is_computed_again_is_priced_and_proved_as_in_the_report(name, rows):
    """Types are chosen in several ways there, with what gradients keep from the forward pass in
    mind."""
    source, weights, held = AGAIN[name]
    plan = planned(
        source.replace("{h}", "jnp.tanh(x @ w)"),
        (shape(rows, 512), weights(512)),
        in_types=("data:S(0)", held),
    )
    told = plan.why("h")
    assert told.why.cost == plan.cost
    assert told.why.cost.seconds == plan.program.typing.seconds - plan.program.typing.saved_seconds
    assert (
        told.why.proved
        == plan.program.typing.optimal
        == ("proved cheapest" in plan.report().text())
    )
    cheaper = [
        a
        for a in told.why.alternatives
        if a.cost is not None and a.cost.seconds < plan.cost.seconds * (1 - 1e-6)
    ]
    assert not (told.why.proved and cheaper)
    assert ("does not always find the cheapest" in told.text()) == bool(cheaper)


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
    monkeypatch.setattr(fit, "repeated_values", lambda graph: Twins(again=frozenset(), times={}))
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


@pytest.mark.parametrize("name", list(RESTRICTED))
def test_a_pin_may_convert_what_the_policy_forbids(name):
    source, boxing = RESTRICTED[name]
    args, in_types = (shape(64, 64), shape(64, 64)), ("data:S(1)", "B")
    plan = planned(
        source,
        args,
        jax.sharding.AbstractMesh((4,), ("data",)),
        boxing,
        in_types=in_types,
        out_types="data:?",
    )
    told = plan.why("h")
    (story,) = told.why.axes
    assert story.next_best is not None and story.next_best.cost is not None
    assert story.next_best.cost.seconds < plan.cost.seconds
    assert told.why.proved and told.why.evades
    assert "the types are proved cheapest" in plan.report().text()
    said = (
        "on `data` S(1): the cheapest type that the boxing policy allows; with an annotation, which"
        " may convert anyway, S(0) is -"
    )
    assert said in told.text(200)
    unproved = explanation(dataclasses.replace(told.why, proved=False), plan.program.mesh).text(200)
    assert (
        "found by sbp's search, which does not always find the cheapest type; an annotation may"
        " convert where the policy does not" in unproved
    )
    plain = explanation(
        dataclasses.replace(told.why, proved=False, evades=False), plan.program.mesh
    ).text()
    assert (
        "on `data` S(1): found by sbp's search, which does not always find the cheapest type;"
        " S(0) is -" in plain
    )


def test_no_pin_converts_more_than_a_policy_that_allows_everything():
    plan = planned(CONVERTED, (shape(64, 64), shape(64, 64)), in_types=("data:S(1)", "B"))
    assert not plan.why("h").why.evades
    assert (
        not planned(CONVERTED, (shape(64, 64), shape(64, 64)), boxing="reduce").why("w").why.evades
    )  # an input is no annotation
