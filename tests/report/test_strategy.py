"""The strategy that reports name is the one that a program was built to have."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

import sbp
from sbp.plan.traffic import Phases
from sbp.report.strategy import strategy

LINE = AbstractMesh((8,), ("x",))
GRID = AbstractMesh((4, 2), ("x", "y"))
ADAMW = optax.adamw(1e-3)


shape = lambda *dims, dtype=jnp.float32: jax.ShapeDtypeStruct(dims, dtype)


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
    plan = sbp.jit(step, mesh, in_types=types, **options).plan(*args)
    return list(strategy(plan.program).values())


def state_of(weights):
    """Types of AdamW's state: moments as `weights` says, counts on all devices."""
    leaves, tree = jax.tree.flatten(STATE)
    names = [str(path) for path, _ in jax.tree_util.tree_leaves_with_path(STATE)]
    kinds = [
        "B" if not leaf.ndim else weights["w_in" if "w_in" in name else "w_out"]
        for name, leaf in zip(names, leaves, strict=True)
    ]
    return jax.tree.unflatten(tree, kinds)


def of_mlp(mesh, weights, moments, batch, rows=4096):
    types = (weights, state_of(moments), batch, batch)
    x = shape(rows, 256)
    return used(mlp_step, mesh, types, PARAMS, STATE, x, x)


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
    assert of_mlp(LINE, weights, moments, batch, rows)[0].startswith(said)


def test_an_axis_that_splits_nothing_is_unused():
    weights = {"w_in": "y:S(1)", "w_out": "y:S(0)"}
    found = used(mlp, GRID, (weights, "B"), PARAMS, shape(64, 256), out_types="B", boxing="reduce")
    assert found == ["unused: its devices all do the same", "tensor parallel"]


def test_an_axis_that_no_product_uses_is_not_called_unused():
    x, w = shape(64, 256), shape(256, 128)
    whole = "the same on all its devices in forward products"

    later = lambda x, w: jnp.sort(sbp.annotate(x @ w, "x:B"), 1)

    assert used(later, LINE, ("x:B", "x:B"), x, w, out_types="x:S(0)") == [whole]

    def by_hand(x, w):
        summed = jax.shard_map(
            lambda x: jax.lax.psum(x * jax.lax.axis_index("x"), "x"),
            mesh=LINE,
            in_specs=PartitionSpec(),
            out_specs=PartitionSpec(),
            check_vma=False,
        )(x)
        return summed @ w

    assert used(by_hand, LINE, "B", x, w, out_types="B", boxing="explicit") == [whole]
    (found,) = used(lambda x, w: x @ w, LINE, ("x:B", "x:S(0)"), x, w, out_types="x:B")
    assert found.startswith(f"{whole}, weights gathered on use")


def test_two_axes_are_told_apart():
    types = ({"w_in": "y:S(1)", "w_out": "y:S(0)"}, "x:S(0)")
    found = used(mlp, GRID, types, PARAMS, shape(512, 256), out_types="x:S(0)")
    assert found == ["data parallel", "tensor parallel"]


def test_weights_that_are_numbered_make_an_axis_expert_parallel():
    weights = {"w_in": shape(8, 256, 512), "w_out": shape(8, 512, 256)}

    def experts(params, x):
        h = jax.nn.relu(jnp.einsum("ecm,emh->ech", x, params["w_in"]))
        return jnp.einsum("ech,ehm->ecm", h, params["w_out"])

    tokens = shape(8, 4096, 256)
    assert used(experts, LINE, (both("x:S(0)"), "x:S(0)"), weights, tokens) == ["expert parallel"]


def test_the_same_weights_in_turns_of_a_loop_are_stages():
    def stages(weights, parts):
        def turn(buffer, part):
            moved = jnp.roll(buffer, 1, 0).at[0].set(part)
            done = jax.nn.gelu(jnp.einsum("gbm,gmn->gbn", moved, weights))
            return done, done[-1]

        return jax.lax.scan(turn, jnp.zeros((8, *parts.shape[1:])), parts)[1]

    found = used(stages, LINE, ("x:S(0)", "B"), shape(8, 1024, 1024), shape(16, 64, 1024))
    assert found == ["pipeline of stages"]


def attention(weights, x):
    q, k, v = jnp.moveaxis((x @ weights).reshape(*x.shape, 3), -1, 0)
    scores = jax.nn.softmax(jnp.einsum("btm,bsm->bts", q, k) / 16)
    return jnp.einsum("bts,bsm->btm", scores, v)


def test_tokens_that_meet_others_make_an_axis_sequence_parallel():
    x = shape(2, 16384, 64)
    assert used(attention, LINE, ("B", "x:S(1)"), shape(64, 192), x) == ["sequence parallel"]
    assert used(attention, LINE, ("B", "x:S(0)"), shape(64, 192), shape(8, 512, 64)) == [
        "data parallel"
    ]


def test_images_whose_borders_are_exchanged_are_split_in_space():
    def convolve(kernel, x):
        names = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=names)

    found = used(convolve, LINE, ("B", "x:S(1)"), shape(3, 3, 64, 64), shape(2, 512, 512, 64))
    assert found == ["images split in space"]


def test_rows_of_a_table_that_are_split_are_named():
    look_up = lambda table, weights, ids: table[ids] @ weights

    types = ("x:S(0)", "x:S(1)", "B")
    args = shape(262144, 256), shape(256, 1024), shape(64, dtype=jnp.int32)
    assert used(look_up, LINE, types, *args) == ["tensor parallel, vocabulary split"]


def test_a_program_without_products_has_no_strategy():
    assert used(lambda x: x + 1, LINE, ("x:S(0)",), shape(8, 8)) == []


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
