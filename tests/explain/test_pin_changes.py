"""Helps that change a pin: to another kind of atom, in all layers, and where it still converts."""

import jax
import jax.numpy as jnp

import sbp
from sbp.errors import OptionEdit
from tests.edits import check_helps

MESH = jax.sharding.AbstractMesh((8,), ("d",))
SQUARE = jax.ShapeDtypeStruct((64, 64), jnp.float32)


def helps(fn, *args, **options):
    found = sbp.jit(fn, MESH, **options).check(*args).diagnostics
    if all(isinstance(a, jax.ShapeDtypeStruct) for a in args):
        check_helps(fn, MESH, options, args, found)
    return [h for d in found for h in d.helps]


def test_a_split_becomes_b():
    def norm(x):
        x = sbp.split(x, 1, "d")
        return jnp.exp(x.mean(1)) @ x

    texts = [h.text.partition(" at line")[0] for h in helps(norm, SQUARE, boxing="explicit")]
    assert "replicate x on `d`" in texts


def test_a_sum_in_a_loop_stays_partial_under_a_budget():
    def accumulate(xs, w):
        def body(total, x):
            part = sbp.split(x, 0, "d").T @ sbp.split(x, 0, "d")
            return sbp.replicate(total + part, "d"), None

        return jax.lax.scan(body, jnp.zeros((64, 64)), xs)[0] @ w

    xs = jax.ShapeDtypeStruct((4, 64, 64), jnp.float32)
    found = helps(accumulate, xs, SQUARE, budgets=[sbp.forbid(where="loop", axis="d")])
    assert "P(sum) on `d`" in found[0].text
    assert found[-1].text.startswith("allow ")


def test_one_leaf_of_all_layers_changes_at_once():
    def mlp(blocks, x):
        for p in blocks:
            x = jax.nn.relu(x @ p["up"]) @ p["down"]
        return x

    blocks = [{"up": SQUARE, "down": SQUARE}] * 3
    types = {"*/up": "d:S(1)", "*/down": "d:S(1)"}
    first = helps(mlp, blocks, SQUARE, in_types=(types, "B"), boxing="reduce")[0]
    assert "and 2 more like it" in first.text
    edits = [e for e in first.edits if isinstance(e, OptionEdit)]
    assert [(e.position, e.value) for e in edits] == [(0, "d:S(0)"), (2, "d:S(0)"), (4, "d:S(0)")]


def test_an_annotation_with_another_split_still_converts():
    """Without the annotation the partial value arrives at the cosine."""

    def program(x, w):
        x = sbp.split(x @ w, 1, "d")
        return jnp.cumsum(jnp.cos(x), axis=1)

    types = ("d:S(1)", "d:S(0)")
    found = helps(program, SQUARE, SQUARE, in_types=types, boxing="explicit")
    assert found[0].text.startswith("split x on dim 0 at line")
