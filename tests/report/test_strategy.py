"""The strategy that reports name is the one that a program was built to have."""

import jax
import jax.numpy as jnp
import optax
import pytest

import sbp
from sbp.plan.program import Phases
from sbp.report.facts import strategy
from tests.cases import descent, shape

LINE = jax.sharding.AbstractMesh((8,), ("x",))
GRID = jax.sharding.AbstractMesh((4, 2), ("x", "y"))
ADAMW = optax.adamw(1e-3)


PARAMS = {"w_in": shape(256, 1024), "w_out": shape(1024, 256)}
STATE = jax.eval_shape(ADAMW.init, PARAMS)


def mlp(params, x):
    return x + jax.nn.gelu(x @ params["w_in"]) @ params["w_out"]


def mlp_step(params, state, x, y):
    grads = jax.grad(lambda p: jnp.mean((mlp(p, x) - y) ** 2))(params)
    updates, state = ADAMW.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def used(step, mesh, types, *args, **options):
    """The words for each mesh axis."""
    return list(
        strategy(sbp.jit(step, mesh, in_types=types, **options).plan(*args).program).values()
    )


def state_of(weights):
    """Types of AdamW's state: moments as `weights` says, counts on all devices."""
    leaves, tree = jax.tree.flatten(STATE)
    names = [str(path) for path, _ in jax.tree_util.tree_leaves_with_path(STATE)]
    kinds = [
        "B" if not leaf.ndim else weights["w_in" if "w_in" in name else "w_out"]
        for name, leaf in zip(names, leaves, strict=True)
    ]
    return jax.tree.unflatten(tree, kinds)


both = lambda kind: {"w_in": kind, "w_out": kind}


MEGATRON = {"w_in": "x:S(1)", "w_out": "x:S(0)"}


@pytest.mark.parametrize(
    ("weights", "moments", "batch", "rows", "said"),
    [
        (both("B"), both("B"), "x:S(0)", 65536, "data parallel"),
        (
            both("B"),
            both("x:S(0)"),
            "x:S(0)",
            65536,
            "data parallel, optimiser split (ZeRO-1)",
        ),
        (
            both("x:S(0)"),
            both("x:S(0)"),
            "x:S(0)",
            65536,
            "data parallel, weights gathered on use (FSDP), not tensor parallel",
        ),
        (MEGATRON, MEGATRON, "B", 64, "tensor parallel"),
    ],
    ids=["data", "zero-1", "fsdp", "tensor"],
)
def test_training_a_perceptron(weights, moments, batch, rows, said):
    types, args = (weights, state_of(moments), batch, batch), [shape(rows, 256)] * 2
    (found,) = used(mlp_step, LINE, types, PARAMS, STATE, *args)
    assert found.startswith(said)


def by_hand(x, w):
    summed = jax.shard_map(
        lambda x: jax.lax.psum(x * jax.lax.axis_index("x"), "x"),
        mesh=LINE,
        in_specs=jax.sharding.PartitionSpec(),
        out_specs=jax.sharding.PartitionSpec(),
        check_vma=False,
    )(x)
    return summed @ w


def experts(params, x):
    h = jax.nn.relu(jnp.einsum("ecm,emh->ech", x, params["w_in"]))
    return jnp.einsum("ech,ehm->ecm", h, params["w_out"])


def stages(weights, parts):
    """The same weights in turns of a loop."""

    def turn(buffer, part):
        moved = jnp.roll(buffer, 1, 0).at[0].set(part)
        done = jax.nn.gelu(jnp.einsum("gbm,gmn->gbn", moved, weights))
        return done, done[-1]

    return jax.lax.scan(turn, jnp.zeros((8, *parts.shape[1:])), parts)[1]


def attention(weights, x):
    q, k, v = jnp.moveaxis((x @ weights).reshape(*x.shape, 3), -1, 0)
    scores = jax.nn.softmax(jnp.einsum("btm,bsm->bts", q, k) / 16)
    return jnp.einsum("bts,bsm->btm", scores, v)


def attention_alone(q, k, v):
    """Attention on queries, keys and values, which has no experts."""
    weights = jax.nn.softmax(jnp.einsum("bhqd,bhkd->bhqk", q, k))
    return jnp.einsum("bhqk,bhkd->bhqd", weights, v)


def convolve(kernel, x):
    names = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=names)


def adapter_loss(adapter, frozen, x, y):
    h = jax.nn.gelu(x @ frozen + x @ adapter[0] @ adapter[1])
    return jnp.mean((h - y) ** 2)


def decoded(weights, h):
    """A loop over experts in which no device passes anything to the next one."""
    turn = lambda h, _: (jax.nn.relu(jnp.einsum("ecm,emh->ech", h, weights)), None)
    return jax.lax.scan(turn, h, length=5)[0]


X, W = shape(64, 256), shape(256, 128)
SPLIT = {"w_in": "y:S(1)", "w_out": "y:S(0)"}
WHOLE = "forward products repeated on all its devices"


@pytest.mark.parametrize(
    ("fn", "mesh", "types", "args", "options", "said"),
    [
        (
            mlp,
            GRID,
            (SPLIT, "B"),
            (PARAMS, X),
            {"out_types": "B", "boxing": "reduce"},
            ["unused: its devices all do the same", "tensor parallel"],
        ),
        (
            mlp,
            GRID,
            (SPLIT, "x:S(0)"),
            (PARAMS, shape(512, 256)),
            {"out_types": "x:S(0)"},
            ["data parallel", "tensor parallel"],
        ),
        (
            lambda x, w: jnp.sort(sbp.annotate(x @ w, "x:B"), 1),
            LINE,
            ("x:B", "x:B"),
            (X, W),
            {"out_types": "x:S(0)"},
            [WHOLE],
        ),
        (by_hand, LINE, "B", (X, W), {"out_types": "B", "boxing": "explicit"}, [WHOLE]),
        (
            experts,
            LINE,
            (both("x:S(0)"), "x:S(0)"),
            ({"w_in": shape(8, 256, 512), "w_out": shape(8, 512, 256)}, shape(8, 4096, 256)),
            {},
            ["expert parallel"],
        ),
        (
            stages,
            LINE,
            ("x:S(0)", "B"),
            (shape(8, 1024, 1024), shape(16, 64, 1024)),
            {},
            ["pipeline of stages"],
        ),
        (
            attention,
            LINE,
            ("B", "x:S(1)"),
            (shape(64, 192), shape(2, 16384, 64)),
            {},
            ["sequence parallel"],
        ),
        (
            attention,
            LINE,
            ("B", "x:S(0)"),
            (shape(64, 192), shape(8, 512, 64)),
            {},
            ["data parallel"],
        ),
        (
            convolve,
            LINE,
            ("B", "x:S(1)"),
            (shape(3, 3, 64, 64), shape(2, 512, 512, 64)),
            {},
            ["images split in space"],
        ),
        (
            lambda table, weights, ids: table[ids] @ weights,
            LINE,
            ("x:S(0)", "x:S(1)", "B"),
            (shape(262144, 256), shape(256, 1024), shape(64, dtype=jnp.int32)),
            {},
            ["tensor parallel, vocabulary split"],
        ),
        (
            descent(adapter_loss),
            LINE,
            (None, "B", "x:S(0)", "x:S(0)"),
            ((shape(256, 4), shape(4, 256)), shape(256, 256), X, X),
            {},
            ["data parallel"],
        ),
        (
            decoded,
            LINE,
            ("x:S(0)", "x:S(0)"),
            (shape(8, 256, 256), shape(8, 64, 256)),
            {},
            ["expert parallel"],
        ),
        (lambda x: x + 1, LINE, ("x:S(0)",), (shape(8, 8),), {}, []),
        *(
            (
                attention_alone,
                LINE,
                f"x:S({dim})",
                [shape(8, 8, 64, 32)] * 3,
                {},
                ["products of activations alone"],
            )
            for dim in (0, 1)
        ),
    ],
    ids=[
        "an axis that splits nothing",
        "two axes",
        "an axis that no product uses",
        "a hand-written region",
        "weights that are numbered",
        "the same weights in turns of a loop",
        "tokens that meet others",
        "samples",
        "images whose borders are exchanged",
        "rows of a table",
        "an adapter beside frozen weights",
        "experts in a loop",
        "no products",
        "samples of attention alone",
        "heads of attention alone",
    ],
)
def test_the_strategy_of_a_program(fn, mesh, types, args, options, said):
    assert used(fn, mesh, types, *args, **options) == said


def test_weights_gathered_on_use_are_named():
    (found,) = used(lambda x, w: x @ w, LINE, ("x:B", "x:S(0)"), X, W, out_types="x:B")
    assert found.startswith(f"{WHOLE}, weights gathered on use")


def test_phases_of_a_step():
    x = shape(8, 256)
    graph = sbp.jit(mlp_step, LINE).plan(PARAMS, STATE, x, x).program.graph
    found = Phases(graph).of
    assert set(found) == {node.id for node in graph.walk()}
    lines = {"forward": set(), "backward": set(), "update": set()}
    for node in graph.walk():
        if any(graph.avals[v].ndim for v in node.outputs):  # counts of steps are no update
            lines[found[node.id]].update(s.line for s in node.stack if s.file == __file__)
    first = mlp_step.__code__.co_firstlineno
    assert mlp.__code__.co_firstlineno + 1 in lines["forward"] & lines["backward"]
    assert {first + 2, first + 3} <= lines["update"]
    assert not {first + 2, first + 3} & (lines["forward"] | lines["backward"])
