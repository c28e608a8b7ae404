"""Named dims: the types that layouts give, and the layouts that are refused."""

import inspect
import re
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from sbp import B, Layout, NdSbp, S
from sbp.infer.rows import seen_codes
from sbp.infer.space import local_shape
from tests.cases import GRID as MESH, shape as f32
from tests.same import refused

# ---- what a layout says -------------------------------------------------------------------------


BATCHES = Layout(batch="data", d_ff="model", vocab="model")


@pytest.mark.parametrize(
    ("layout", "names", "atoms"),
    [
        (BATCHES, ("batch", None, "d_ff"), {"data": S(0), "model": S(2)}),
        (BATCHES, ("length", "d_model"), {}),
        (Layout(batch=("pod", "data")), ("length", "batch"), {"pod": S(1), "data": S(1)}),
        (
            Layout({"d-ff": "model"}, batch="data"),
            ("d-ff", "batch"),
            {"model": S(0), "data": S(1)},
        ),
    ],
    ids=str,
)
def test_types_from_names(layout, names, atoms):
    assert layout.type(*names) == NdSbp(atoms)


def test_axes_that_a_tensor_does_not_use_are_whole_or_free():
    # `data` is used, and this tensor has no dim for it.
    assert dict(BATCHES.type("vocab", "d_model")) == {"data": B, "model": S(0)}
    assert BATCHES.type("batch", free=["pod"]).free == {"pod"}


def test_types_of_pytrees():
    names = {
        "ffn": (("d_model", "d_ff"), ("d_ff", "d_model")),
        "scale": (),
        "free": None,
        "heads": [(None, "d_ff")],
    }
    assert Layout(d_ff="model").types(names) == {
        "ffn": (NdSbp({"model": S(1)}), NdSbp({"model": S(0)})),
        "scale": NdSbp(),
        "free": None,
        "heads": [NdSbp({"model": S(1)})],
    }


def test_layouts_are_values():
    a, b = Layout(batch="data", d_ff="model"), Layout({"d_ff": ("model",)}, batch="data")
    assert a == b and hash(a) == hash(b) and a != Layout(batch="data")
    assert repr(a) == "Layout(batch='data', d_ff='model')" and eval(repr(a)) == a
    assert eval(repr(Layout({"d-ff": "model"}))) == Layout({"d-ff": "model"})
    assert dict(a) == {"batch": ("data",), "d_ff": ("model",)}


def test_pins_leave_unmentioned_axes_to_inference():
    layout = Layout(batch="data")
    plan = sbp.jit(
        lambda x: layout(x * 2, "batch", None),
        MESH,
        in_types=("model:S(1)",),
        out_types="data:? model:?",
    ).plan(f32(8, 8))
    (pinned,) = [n for n in plan.program.typing.graph.nodes if n.op == "sbp_annotate"]
    assert dict(pinned.params["pin"].type) == {"data": S(0)} and not pinned.params["pin"].complete
    assert plan.out_types == NdSbp({"data": S(0), "model": S(1)})


def test_outside_of_jit_it_is_the_identity():
    layout = Layout(batch="data")
    x = np.arange(8.0, dtype=np.float32)
    np.testing.assert_array_equal(layout(x, "batch"), x)
    np.testing.assert_array_equal(layout(2.0), 2.0)


# ---- what is not a layout -----------------------------------------------------------------------


def line_of(fn, text):
    lines, start = inspect.getsourcelines(fn)
    return start + next(k for k, line in enumerate(lines) if text in line)


def test_two_dims_on_one_mesh_axis():
    layout = Layout(batch="data", hidden="data")
    f = lambda x, w: layout(x @ w, "batch", "hidden")
    error = refused(None, sbp.jit(f, MESH).plan, f32(8, 16), f32(16, 32))
    line = line_of(f, "layout(")
    assert (
        str(error)
        == "layout-conflict: dims 'batch' and 'hidden' of the tensor [batch, hidden] are both"
        f" split over mesh axis 'data' at line {line}; a mesh axis splits one dim of a tensor:"
        " map one of the two to another axis, or use another name for one of them here"
    )
    (said,) = sbp.jit(f, MESH).check(f32(8, 16), f32(16, 32)).diagnostics
    assert said.code == "layout-conflict" and said.primary is not None
    assert (said.primary.span.file, said.primary.span.line) == (__file__, line)


@pytest.mark.parametrize(
    "use,code,message",
    [
        (
            lambda: Layout(b="x").type("b", "c", "b"),
            "layout-names",
            "dim 'b' occurs twice in [b, c, b]; the names of one tensor",
        ),
        (lambda: Layout(b="x").type("d", "d"), "layout-names", "dim 'd' occurs twice in [d, d]"),
        (
            lambda: Layout(b="x")(np.zeros((2, 3)), "b"),
            "layout-names",
            "1 dim names for a tensor of shape (2, 3), [b]; give one",
        ),
        (
            lambda: Layout(b="x")(np.zeros(3), "b", None),
            "layout-names",
            "2 dim names for a tensor of shape (3,), [b, _]",
        ),
        (
            lambda: Layout(b="x").type(cast(Any, 0), "b"),
            "layout-names",
            "a dim's name must be a string or None, got 0",
        ),
        (
            lambda: Layout(b=("x", "x")),
            "layout-names",
            "the layout maps dim 'b' to one mesh axis twice: ('x', 'x')",
        ),
        (lambda: Layout({"b": "x"}, b="y"), "layout-names", "the layout maps dim 'b' twice"),
        (
            lambda: Layout(a=("x", "y"), b="y").type("a", "b"),
            "layout-conflict",
            "dims 'a' and 'b' of the tensor [a, b] are both split",
        ),
        (
            lambda: Layout(b=cast(Any, 0)),
            "bad-argument",
            "a layout maps a dim name to a mesh axis or a tuple of mesh axes, got 'b': 0",
        ),
        (
            lambda: Layout(b="x")({"w": np.zeros(3)}, "b"),
            "bad-argument",
            "the dims of one array, got dict; map it over the leaves",
        ),
        (lambda: Layout(b="x")([1.0, 2.0], "b"), "bad-argument", "the dims of one array, got list"),
        (
            lambda: Layout(b="x")((np.zeros(3),), "b"),
            "bad-argument",
            "the dims of one array, got tuple",
        ),
        (lambda: Layout(b="x")(None, "b"), "bad-argument", "the dims of one array, got NoneType"),
        (lambda: Layout(b="x")("weights", "b"), "bad-argument", "the dims of one array, got str"),
        (
            lambda: Layout(b="x").type("b", free="pod"),
            "bad-argument",
            "`free` must be a collection of mesh axes, such as [\"pod\"], got 'pod'",
        ),
        (
            lambda: Layout(b="x").types({"w": ("b",)}, free="pod"),
            "bad-argument",
            "must be a collection of mesh axes",
        ),
        (
            lambda: Layout(b="x").type("b", free=cast(Any, [1])),
            "bad-argument",
            "must be a collection of mesh axes",
        ),
        (
            lambda: Layout(b="x").type("b", free=cast(Any, None)),
            "bad-argument",
            "must be a collection of mesh axes",
        ),
        *(
            (use, "unknown-axis", "has no axis 'dta'; did you mean \"data\"?")
            for use in (
                lambda: sbp.jit(lambda x: Layout(b="dta")(x, "b"), MESH).plan(f32(8)),
                lambda: sbp.jit(lambda x: x, MESH, in_types=(Layout(b="dta").type("b"),)),
            )
        ),
    ],
)
def test_refused(use, code, message):
    refused(f"(?s)^{code}: .*{re.escape(message)}", use)


# ---- transformations ----------------------------------------------------------------------------


pins = lambda graph: [n.params["pin"].type for n in graph.walk() if n.op == "sbp_annotate"]


def test_under_vmap_the_batch_dim_has_no_name():
    layout = Layout(rows="data", cols="model")
    one = lambda x: jnp.sin(layout(x, "rows", "cols"))

    along = lambda dim: sbp.jit(jax.vmap(one, in_axes=dim), MESH).trace(f32(8, 8, 8)).request.graph
    assert [pins(along(dim)) for dim in range(3)] == [
        [NdSbp({"data": S(rows), "model": S(cols)})] for rows, cols in ((1, 2), (0, 2), (0, 1))
    ]


ORDER = (
    "bad-placement.*dim 0 is split over model, data, but the mesh has .* in the order data, model"
)


@pytest.mark.parametrize(
    ("pin", "message"),
    [
        (lambda x: sbp.split(x, 0, "model", "data"), ORDER),
        (lambda x: sbp.annotate(x, jax.sharding.PartitionSpec(("model", "data"))), ORDER),
        (lambda x: sbp.Layout(b=("model", "data"))(x, "b", None), ORDER),
        (lambda x: sbp.split(x, 0, "data", "data"), "bad-placement: split names mesh axis 'data'"),
        (
            lambda x: sbp.annotate(x, jax.sharding.PartitionSpec("data", ("model", "data"))),
            "bad-placement.* names mesh axis 'data' twice",
        ),
    ],
)
def test_axes_are_named_once_in_the_order_of_the_mesh(pin, message):
    refused(message, sbp.jit(pin, MESH).plan, jnp.zeros((8, 8)))


def test_axes_of_a_layout_keep_their_order():
    layout = sbp.Layout(a="model", b=("data", "model"))
    plan = sbp.jit(lambda x: layout(x, "b", None), MESH).plan(jnp.zeros((8, 8)))
    assert plan.out_types == sbp.parse("data:S(0) model:S(0)")


# ---- layout transformer --------------------------------------------------------------------------
# The Transformer layout of Mesh-TensorFlow, section 9: vocab, d_ff and heads over one axis, the
# batch over the other.


SMALL = {
    "vocab": 64,
    "d_model": 16,
    "d_ff": 64,
    "heads": 8,
    "d_kv": 4,
    "layer": 2,
    "batch": 8,
    "length": 6,
}
PAPER = {
    "vocab": 32768,
    "d_model": 1024,
    "d_ff": 4096,
    "heads": 8,
    "d_kv": 128,
    "layer": 6,
    "batch": 64,
    "length": 256,
}
NAMES = {
    "embed": ("vocab", "d_model"),
    "q": ("layer", "d_model", "heads", "d_kv"),
    "k": ("layer", "d_model", "heads", "d_kv"),
    "v": ("layer", "d_model", "heads", "d_kv"),
    "o": ("layer", "heads", "d_kv", "d_model"),
    "w_in": ("layer", "d_model", "d_ff"),
    "w_out": ("layer", "d_ff", "d_model"),
}
TRANSFORMER = Layout(batch="rows", vocab="cols", d_ff="cols", heads="cols")


def transformer(layout):
    """The loss of a decoder, all tensors with names."""

    def loss(params, tokens):
        params = {k: layout(p, *NAMES[k]) for k, p in params.items()}
        x = layout(params["embed"][tokens], "batch", "length", "d_model")

        def layer(x, p):
            h = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)
            q, k, v = (
                layout(jnp.einsum("bld,dhk->blhk", h, p[n]), "batch", "length", "heads", "d_kv")
                for n in "qkv"
            )
            scores = layout(
                jnp.einsum("blhk,bmhk->bhlm", q, k), "batch", "heads", "length", "memory"
            )
            scores = jnp.where(jnp.tril(jnp.ones(scores.shape[2:], bool)), scores, -1e9)
            seen = jnp.einsum("bhlm,bmhk->blhk", jax.nn.softmax(scores), v)
            x = layout(x + jnp.einsum("blhk,hkd->bld", seen, p["o"]), "batch", "length", "d_model")
            h = layout(jax.nn.relu(x @ p["w_in"]), "batch", "length", "d_ff")
            return layout(x + h @ p["w_out"], "batch", "length", "d_model"), None

        x, _ = jax.lax.scan(layer, x, {k: v for k, v in params.items() if k != "embed"})
        logits = layout(x @ params["embed"].T, "batch", "length", "vocab")
        picked = jax.nn.one_hot(jnp.roll(tokens, -1, axis=1), logits.shape[-1])
        return (jax.nn.logsumexp(logits, -1) - (logits * picked).sum(-1)).mean()

    return loss


def shapes(sizes):
    params = {k: f32(*(sizes[n] for n in names)) for k, names in NAMES.items()}
    return params, jax.ShapeDtypeStruct((sizes["batch"], sizes["length"]), jnp.int32)


def arguments():
    rng = np.random.default_rng(0)
    params, tokens = shapes(SMALL)
    values = {k: (rng.normal(size=p.shape) / 4).astype(np.float32) for k, p in params.items()}
    return values, rng.integers(0, SMALL["vocab"], tokens.shape).astype(np.int32)


def products(typing):
    """For each product of the program, the share of its multiplications that one device does."""
    found = []
    for node in typing.graph.walk():
        if node.op == "dot_general":
            (contracted, _), _ = node.params["dimension_numbers"]
            out = typing.graph.avals[node.outputs[0]].shape
            mine = local_shape(out, typing.rows[node.id].outs[0], typing.mesh.sizes)
            whole = typing.graph.aval(node.inputs[0]).shape
            part = local_shape(whole, seen_codes(typing.rows[node.id])[0], typing.mesh.sizes)
            found.append(
                float(
                    np.prod(mine) / np.prod(out) * np.prod([part[d] / whole[d] for d in contracted])
                )
            )
    return found


@pytest.mark.parametrize("shape", [(2, 4), (4, 2)], ids=str)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "gradients"])
def test_transformer_layout(shape, backward):
    mesh = sbp.make_mesh(shape, ("rows", "cols"))
    layout, plain = transformer(TRANSFORMER), transformer(lambda x, *names: x)
    fn, expected = (jax.value_and_grad(f) if backward else f for f in (layout, plain))
    types = (TRANSFORMER.types(NAMES), TRANSFORMER.type("batch", "length"))
    options: dict[str, Any] = {
        "in_types": types,
        "out_types": (NdSbp(), types[0]) if backward else NdSbp(),
    }
    count = 27 if backward else 9
    # At the paper's sizes no product is worth doing twice; at small ones it is cheaper than to
    # send, which "reduce" forbids.
    shares = products(
        sbp.jit(fn, mesh, **options, hardware="tpu-v3").plan(*shapes(PAPER)).program.typing
    )
    assert len(shares) == count and set(shares) == {1 / 8}, shares
    f = sbp.jit(fn, mesh, **options, boxing="reduce")
    params, tokens = arguments()
    shares = products(f.plan(params, tokens).program.typing)
    assert len(shares) == count and set(shares) == {1 / 8}, shares
    found, wanted = f(params, tokens), jax.jit(expected)(params, tokens)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=3e-4, atol=2e-6), found, wanted)
    if backward:
        assert found[1]["w_in"].sharding.spec == jax.sharding.PartitionSpec(None, None, "cols")
