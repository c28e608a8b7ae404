"""A typing is claimed to hold for the sizes for which the oracle finds that it does."""

import itertools

import jax
import jax.numpy as jnp
import pytest

import sbp
from sbp.sizes.scope import Scope
from tests.sizes.oracle import MESH, TP, W, agree, check, dims, f32, mlp, sized


def training_step(w, x, y):
    value, grads = jax.value_and_grad(lambda w: jnp.mean((mlp(w, x) - y) ** 2))(w)
    return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads), value


def microbatches(w, x, y):
    def body(grads, batch):
        new, value = training_step(w, *batch)
        return jax.tree.map(jnp.add, grads, new), value

    return jax.lax.scan(
        body, jax.tree.map(jnp.zeros_like, w), (x.reshape(4, -1, 16), y.reshape(4, -1, 4))
    )


def split_in_columns(x):
    return jnp.tanh(x.reshape(-1, 3, 16)).sum(1)


def joined(x, y):
    return sbp.split(jnp.concatenate([x, y]), 0, "data") * 2


def halves(x):
    n = x.shape[0] // 2
    return jax.lax.slice_in_dim(x, 0, n) + jax.lax.slice_in_dim(x, n, 2 * n)


def tokens_merged(x, w):
    b, s, _ = x.shape
    return (x.reshape(b * s, 16) @ w).reshape(b, s, 8)


def attention(x, w):
    q = sbp.split((x @ w).reshape(*x.shape[:2], 4, 4), 2, "model")
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, q)), q)


def carried(x):
    return jax.lax.scan(
        lambda c, _: (jnp.sin(sbp.split(c, 0, "model")), c.sum()), x, None, length=3
    )


def case(name, fn, shapes, *constraints, status="every", **options):
    return pytest.param(fn, shapes, constraints, status, options, id=name)


ONE = [
    case(
        "mlp",
        mlp,
        lambda b: (W, f32(b, 16)),
        in_types=(TP, "data:S(0)"),
        out_types="data:S(0)",
        status="some",
    ),
    case("mlp-free", mlp, lambda b: (W, f32(b, 16)), status="some"),
    case("mlp-eights", mlp, lambda b: (W, f32(8 * b, 16))),
    case("mlp-constraint", mlp, lambda b: (W, f32(b, 16)), "mod(b, 8) == 0", "b >= 16"),
    case(
        "mlp-both-axes",
        mlp,
        lambda b: (W, f32(b, 16)),
        "mod(b, 4) == 0",
        in_types=(None, "data:S(0) model:S(0)"),
        status="some",
    ),
    case("mlp-odd", mlp, lambda b: (W, f32(2 * b + 1, 16)), in_types=(TP, "data:S(0)")),
    case(
        "step",
        training_step,
        lambda b: (W, f32(b, 16), f32(b, 4)),
        in_types=(TP, "data:S(0)", "data:S(0)"),
        status="some",
    ),
    case(
        "step-free",
        training_step,
        lambda b: (W, f32(8 * b, 16), f32(8 * b, 4)),
        donate_argnums=(0,),
    ),
    case(
        "microbatches",
        microbatches,
        lambda b: (W, f32(4 * b, 16), f32(4 * b, 4)),
        in_types=(TP, None, None),
    ),
    case(
        "rows",
        lambda x: jnp.tanh(x.reshape(6, -1, 16)) * 2,
        lambda b: (f32(6 * b, 16),),
        in_types=("data:S(0)",),
    ),
    case(
        "columns",
        split_in_columns,
        lambda b: (f32(3 * b, 16),),
        in_types=("data:S(0)",),
        out_types="data:S(0)",
        status="some",
    ),
    case(
        "columns-explicit",
        split_in_columns,
        lambda b: (f32(3 * b, 16),),
        in_types=("data:S(0)",),
        boxing="explicit",
        status="some",
    ),
    case(
        "merged",
        lambda x: sbp.split(jnp.tanh(x.reshape(-1, 16)), 0, "data") + 1,
        lambda b: (f32(b, 3, 16),),
        in_types=("data:S(0)",),
        status="some",
    ),
    case(
        "joined",
        joined,
        lambda b: (f32(b, 8), f32(b + 3, 8)),
        in_types=("data:S(0)", None),
        status="some",
    ),
    case(
        "halves",
        halves,
        lambda b: (f32(2 * b, 8),),
        in_types=("data:S(0)",),
        status="every",
    ),
    case(
        "inner-split",
        lambda x: sbp.split(jnp.exp(x), 0, "data", "model").sum(0),
        lambda b: (f32(b, 8),),
        in_types=("B",),
        out_types="B",
        status="some",
    ),
    case(
        "shifted",
        lambda x: jax.lax.slice_in_dim(sbp.split(x, 0, "data"), 1, x.shape[0]) * 2,
        lambda b: (f32(b + 1, 8),),
        in_types=("B",),
        out_types="B",
        status="some",
    ),
    case(
        "rolled",
        lambda x: jnp.cumsum(sbp.split(x, 0, "model"), axis=0),
        lambda b: (f32(b, 8),),
        in_types=("model:S(0)",),
        out_types="B",
        status="some",
    ),
    case(
        "reversed",
        lambda x: sbp.split(jax.lax.rev(sbp.split(x, 0, "model"), (0,)), 0, "model"),
        lambda b: (f32(b, 8),),
        in_types=("B",),
        out_types="B",
        status="some",
    ),
    case(
        "looked-up",
        lambda table, tokens: table[tokens] @ jnp.ones((16, 8)),
        lambda b: (f32(32, 16), jax.ShapeDtypeStruct((b,), jnp.int32)),
        in_types=("model:S(0)", "data:S(0)"),
        status="some",
    ),
    case("carried", carried, lambda b: (f32(b, 8),), in_types=("B",), out_types="B", status="some"),
]


@pytest.mark.parametrize("fn,shapes,constraints,status,options", ONE)
def test_what_is_claimed_is_what_happens(fn, shapes, constraints, status, options):
    jitted, report = check(fn, shapes, constraints, options)
    scope = Scope(("b",), constraints)
    agree(jitted, report, shapes, [{"b": b} for b in range(1, 65) if scope.allows({"b": b})])
    found = report.sizes
    assert found.status == status and report.ok == (status == "every")
    if status == "every":
        assert found.counterexample is None
    else:
        (diagnostic,) = [d for d in report.diagnostics if d.code == "size-condition"]
        assert diagnostic.severity == "error" and found.limits[0].text in diagnostic.notes[0]
        assert found.counterexample is not None and found.holds_at(**found.counterexample) is False


TWO = [
    case(
        "merged-and-back",
        tokens_merged,
        lambda b, s: (f32(b, s, 16), f32(16, 8)),
        in_types=("data:S(0)", "model:S(1)"),
        status="some",
    ),
    case(
        "both-split",
        tokens_merged,
        lambda b, s: (f32(b, s, 16), f32(16, 8)),
        in_types=("data:S(0) model:S(1)", "B"),
        status="some",
    ),
    case(
        "attention",
        attention,
        lambda b, s: (f32(b, s, 16), f32(16, 16)),
        in_types=("data:S(0)", None),
        status="some",
    ),
    case(
        "attention-fours",
        attention,
        lambda b, s: (f32(4 * b, s, 16), f32(16, 16)),
        in_types=("data:S(0)", None),
    ),
    case(
        "joined",
        joined,
        lambda b, s: (f32(b, 8), f32(s, 8)),
        "b >= s",
        in_types=("data:S(0)", None),
        status="some",
    ),
    case(
        "product",
        lambda x: jnp.tanh(x) * 2,
        lambda b, s: (f32(b * s, 16),),
        "mod(s, 8) == 0",
        in_types=("data:S(0) model:S(0)",),
    ),
]


@pytest.mark.parametrize("fn,shapes,constraints,status,options", TWO)
def test_of_two_symbols(fn, shapes, constraints, status, options):
    jitted, report = check(fn, shapes, constraints, options, "b, s")
    scope = Scope(("b", "s"), constraints)
    assert report.sizes.status == status
    points = (
        {"b": b, "s": s}
        for b, s in itertools.product((1, 2, 3, 4, 6, 8, 9, 16), (1, 2, 4, 5, 8, 12, 16))
    )
    agree(jitted, report, shapes, [p for p in points if scope.allows(p)])


def test_microbatches_of_any_number_and_size():
    m, k = dims("m, k", "mod(k, 8) == 0")

    def step(w, x):
        body = lambda total, part: (total + (sbp.split(part, 0, "data") @ w).sum(), None)
        return jax.lax.scan(body, 0.0, x.reshape(m, k, 16))[0]

    jitted = sbp.jit(step, MESH, in_types=("model:S(1)", "data:S(0)"))
    report = sized(jitted, f32(16, 32), f32(m * k, 16))
    # one microbatch: the scan's leading dim has size 1
    assert report.sizes.status == "some"
    assert [report.sizes.holds_at(m=m, k=8) for m in (1, 2, 3)] == [False, True, True]
    with pytest.raises(
        sbp.SbpError,
        match="symbolic-sizes: the function uses the symbolic sizes k and m from outside",
    ):
        jitted.plan(f32(16, 32), f32(16, 16))  # it closes over m and k


@pytest.mark.parametrize(
    "boxing,of_three",
    [("auto", True), ({"data": "explicit"}, False), ({"model": "explicit"}, True)],
    ids=str,
)
def test_policies_of_axes_are_kept(boxing, of_three):
    """A reshape whose rows do not divide moves elements, where the policy of the axis lets it."""
    shapes = lambda b: (f32(3 * b, 16),)
    moved_rows = lambda x: sbp.split(sbp.split(x, 0, "data").reshape(-1, 3, 16) * 2, 0, "data")
    jitted, report = check(
        moved_rows, shapes, (), {"in_types": ("B",), "out_types": "B", "boxing": boxing}
    )
    assert (report.sizes.status, report.sizes.holds_at(b=3)) == ("some", of_three)
    agree(jitted, report, shapes, [{"b": b} for b in range(1, 33)])
