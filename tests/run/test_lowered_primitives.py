"""Primitives of other libraries that are lowered by a function of JAX: that function is typed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl, sparse
from jax.experimental.custom_partitioning import custom_partitioning

import sbp
from sbp import _jax
from sbp.api.symbolic import SizedReport
from tests.same import assert_close, refused, registered

LINE = jax.sharding.AbstractMesh((8,), ("data",))


def primitive(name, function, multiple=False):
    """A primitive as libraries make them: an implementation, and a lowering by it."""
    found = _jax.Primitive(name)
    found.multiple_results = multiple
    found.def_impl(function)

    def abstract(*avals, **params):
        shapes = jax.eval_shape(lambda *x: function(*x, **params), *avals)
        return jax.tree.map(lambda s: _jax.ShapedArray(s.shape, s.dtype), shapes)

    found.def_abstract_eval(abstract)
    _jax.mlir.register_lowering(found, _jax.mlir.lower_fun(function, multiple_results=multiple))
    _jax.batching.defvectorized(found)
    return found


shifted = primitive("shifted_tanh", lambda x: jnp.tanh(x) + 1)


def both(x, *, like):
    if jax.eval_shape(lambda: x) != like:  # as Lineax does
        raise ValueError("the structure changed")
    return [x.sum(0), jnp.cumsum(x, 1)]


pair = primitive("sum_and_cumsum", both, multiple=True)


def test_their_functions_are_split():
    f = sbp.jit(lambda x, w: shifted.bind(x @ w) @ w.T, LINE, in_types=("data:S(0)", "B"))
    plan = f.plan(jnp.ones((64, 16)), jnp.ones((16, 32)))
    assert plan.cost.bytes_per_device == 0 and "tanh" in str(plan)
    assert "test_lowered_primitives.py" in str(plan).split("tanh")[1]


@pytest.mark.parametrize("shape", [(16, 8), (5, 3)])
def test_they_compute_what_one_device_does(shape):
    f = lambda x: (shifted.bind(x), *pair.bind(x, like=jax.eval_shape(lambda: x)))

    x = jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)
    assert_close(sbp.jit(f, sbp.make_mesh((2, 4), ("x", "y")))(x), f(x), rtol=1e-5, atol=1e-5)


def test_a_signature_of_the_user_comes_first():
    with registered("shifted_tanh", ["S(0) -> S(0)"]):
        plan = sbp.jit(shifted.bind, LINE, in_types="data:S(0)").plan(jnp.ones((64, 16)))
    assert "shifted_tanh" in str(plan) and plan.cost.bytes_per_device == 0


def test_sparse_products():
    matrix = sparse.BCOO.fromdense(jnp.diag(jnp.arange(1.0, 9.0)))
    loss = lambda data, v: (sparse.BCOO((data, matrix.indices), shape=matrix.shape) @ v).sum()
    v = jnp.arange(128.0).reshape(8, 16)
    got = sbp.jit(jax.grad(loss), sbp.make_mesh((8,), ("x",)))(matrix.data, v)
    np.testing.assert_allclose(got, jax.grad(loss)(matrix.data, v), rtol=1e-6)


def partitioned(function, rule, *whole, **options):
    """A function with a partitioning of its own; its factors `whole` need replication."""
    found = custom_partitioning(function)
    found.def_partition(sharding_rule=rule, need_replication_factors=whole, **options)
    return found


projected = lambda x, w: jnp.tanh(x / jnp.linalg.norm(x, axis=1, keepdims=True)) @ w


@pytest.mark.parametrize("function", [projected, lambda x, w: x @ w])
def test_partitioned_functions_are_split(function):
    """A plan does not call their own partitioning."""
    x, w = jnp.arange(64.0).reshape(16, 4), jnp.ones((4, 3))
    nothing = dict.fromkeys(("infer_sharding_from_operands", "partition"), lambda *a: None)
    own = partitioned(function, "i j, j k -> i k", "j", **nothing)
    f = sbp.jit(own, sbp.make_mesh((8,), ("data",)), in_types=("data:S(0)", "B"))
    assert f.plan(x, w).cost.bytes_per_device == 0
    np.testing.assert_allclose(f(x, w), function(x, w), rtol=1e-6)


# ---- sharding rules ------------------------------------------------------------------------------


line = lambda: sbp.make_mesh((8,), ("data",))


def opaque(function):
    """A function as one kernel that sbp does not see."""

    def kernel(*refs):
        refs[-1][...] = function(*(ref[...] for ref in refs[:-1]))

    return lambda *args: pl.pallas_call(kernel, jax.eval_shape(function, *args), interpret=True)(
        *args
    )


def runs(function):
    """A partition that runs a function on shards and keeps their shardings."""
    return lambda mesh, ins, out: (mesh, function, out.sharding, tuple(x.sharding for x in ins))


def stated(function, rule, *whole, partition=None):
    """A kernel with a sharding rule; its factors `whole` need replication."""
    kernel = opaque(function)
    return partitioned(kernel, rule, *whole, partition=partition or runs(kernel))


def split_of(plan):
    """The types on which the kernel of a plan runs."""
    (node,) = (n for n in plan.program.graph.nodes if n.op.startswith("custom_partitioning"))
    row = plan.program.typing.rows[node.id]
    return *row.ins, *row.outs


@pytest.mark.parametrize(
    ("types", "want"),
    [
        (("a:S(0)", "b:S(1)"), ((1, 0), (0, 2), (1, 2))),
        (("b:S(0) a:S(0)", "B"), ((1, 1), (0, 0), (1, 1))),
        (("B", "a:S(1)"), ((0, 1), (2, 0), (2, 1))),
    ],
)
def test_sharding_rules_split_kernels(types, want):
    x, w = jnp.arange(64.0).reshape(16, 4), jnp.ones((4, 16))
    mesh = sbp.make_mesh((2, 4), ("a", "b"))
    f = sbp.jit(stated(projected, "i j, j k -> i k", "j"), mesh, in_types=types)
    assert split_of(f.plan(x, w)) == want
    np.testing.assert_allclose(f(x, w), projected(x, w), rtol=1e-6)


def replicates(mesh, ins, out):
    whole = jax.NamedSharding(mesh, jax.P())
    return mesh, opaque(jnp.multiply), out.sharding, (ins[0].sharding, whole)


WHOLE = {
    "one factor of two sizes": (jnp.multiply, "i, i -> i", ((1,), (8,)), None),
    "a factor in a compound": (
        lambda x, y: x * y.reshape(8, 8),
        "i j, (i j) -> i j",
        ((8, 8), (64,)),
        None,
    ),
    "a factor on two dims": (lambda x, y: x @ y, "i i, i i -> i i", ((8, 8), (8, 8)), None),
    "partition replicates": (jnp.multiply, "i, i -> i", ((8,), (8,)), replicates),
    "partition fails": (jnp.multiply, "i, i -> i", ((8,), (8,)), lambda *a: 1 / 0),
    "partition returns a spec": (
        jnp.multiply,
        "i, i -> i",
        ((8,), (8,)),
        lambda mesh, ins, out: (mesh, None, None, None),
    ),
    "a factor that the result lacks": (
        lambda x, y: (x * y).sum(keepdims=True),
        "i, i -> j",
        ((8,), (8,)),
        None,
    ),
}


@pytest.mark.parametrize(("function", "rule", "shapes", "partition"), WHOLE.values(), ids=WHOLE)
def test_dims_stay_whole_where_a_sharding_rule_does_not_split_them(
    function, rule, shapes, partition
):
    args = [jnp.arange(np.prod(s), dtype="f4").reshape(s) for s in shapes]
    f = sbp.jit(stated(function, rule, partition=partition), line(), in_types=(None, "data:S(0)"))
    why = "no factor of its sharding_rule|its partition function (raised|asks)"
    with pytest.warns(sbp.SbpWarning, match=f"missing-rule: .*: ({why})"):
        plan = f.plan(*args)
    assert not any(map(any, split_of(plan)))
    np.testing.assert_allclose(f(*args), function(*args), rtol=1e-6)


def test_ellipses_count_dims_from_the_last():
    x, y = jnp.arange(8.0), jnp.arange(24.0).reshape(3, 8)
    f = sbp.jit(stated(jnp.multiply, "..., ... -> ..."), line(), in_types=("data:S(0)", None))
    assert split_of(f.plan(x, y)) == ((1,), (2,), (2,))
    np.testing.assert_allclose(f(x, y), x * y)


@pytest.mark.parametrize("types", ["a:S(0) b:S(0)", "a:S(0) b:S(1)", "b:S(0)"])
@pytest.mark.parametrize(
    ("axes", "split"),
    [
        (lambda mesh: "a", (1, 0)),
        (lambda mesh: mesh.axis_names, (1, 1)),
        (lambda mesh: "c", (0, 0)),
    ],
    ids=["one axis", "all axes", "another axis"],
)
@pytest.mark.filterwarnings("ignore:missing-rule")
def test_rows_are_those_that_partition_keeps_on_the_mesh(axes, split, types):
    """The partition splits rows over some mesh axes, whatever it is asked for."""

    def partition(mesh, ins, out):
        rows = jax.NamedSharding(mesh, jax.P(axes(mesh)))
        return mesh, opaque(jnp.sin), rows, (rows,)

    x = jnp.arange(384.0).reshape(16, 24)
    f = stated(jnp.sin, "i j -> i j", partition=partition)
    f = sbp.jit(f, sbp.make_mesh((2, 4), ("a", "b")), in_types=types)
    assert split_of(f.plan(x))[0] in (split, (0, 0))
    np.testing.assert_allclose(f(x), jnp.sin(x), rtol=1e-6)


def test_a_partition_whose_function_returns_another_dtype_is_refused():
    narrow = runs(lambda x: opaque(jnp.sin)(x).astype("f2"))
    f = sbp.jit(stated(jnp.sin, "i -> i", partition=narrow), line(), in_types="data:S(0)")
    refused(r"must return float32\[1\] on each device", f, jnp.ones(8))


def test_a_sharding_rule_of_other_ranks_is_refused():
    rule = stated(jnp.multiply, "i j, i j -> i j")
    said = r"_primitives.py:.* of ranks \[2, 2, 2\], but .* have ranks \[1, 1, 1\]"
    refused(said, sbp.jit(lambda x, y: rule(x, y), line()).plan, jnp.ones(8), jnp.ones(8))


def test_a_mesh_without_axes_needs_no_rule():
    f = sbp.jit(stated(jnp.sin, "i -> i"), jax.sharding.Mesh(np.array(jax.devices()[0]), ()))
    np.testing.assert_allclose(f(jnp.arange(8.0)), jnp.sin(jnp.arange(8.0)), rtol=1e-6)


def test_partitions_see_the_whole_mesh():
    seen = []

    def partition(mesh, ins, out):
        seen.append(tuple(mesh.shape.items()))
        return mesh, opaque(jnp.sin), out.sharding, (ins[0].sharding,)

    mesh = sbp.make_mesh((2, 4), ("a", "b"))
    f = sbp.jit(stated(jnp.sin, "i -> i", partition=partition), mesh, in_types="b:S(0)")
    np.testing.assert_allclose(f(jnp.arange(8.0)), jnp.sin(jnp.arange(8.0)), rtol=1e-6)
    assert seen[-1] == (("a", 2), ("b", 4))


@pytest.mark.parametrize(
    ("function", "kept"),
    [
        (lambda x: jax.lax.cond(jnp.bool_(True), opaque(jnp.sin), opaque(jnp.cos), x), True),
        (lambda x: jax.lax.platform_dependent(x, tpu=opaque(jnp.cos), default=jnp.sin), False),
    ],
    ids=["branches", "platforms"],
)
def test_kernels_in_branches(function, kept):
    """A function is opaque if a branch that may run is."""
    found, x = partitioned(function, "i j -> i j", "i", partition=runs(function)), jnp.ones((4, 8))
    f = sbp.jit(found, line(), in_types="data:S(1)")
    assert ("custom_partitioning" in str(f.plan(x))) == kept
    np.testing.assert_allclose(f(x), function(x), rtol=1e-6)


def test_effects_in_a_kernel_with_a_sharding_rule(capfd):
    def printing(x):
        jax.debug.print("once")
        return opaque(jnp.sin)(x)

    found = partitioned(printing, "i -> i", partition=runs(printing))
    with pytest.warns(sbp.SbpWarning, match="missing-rule: primitive 'pallas_call"):
        sbp.jit(found, line(), in_types="data:S(0)")(jnp.ones(8)).block_until_ready()
    jax.effects_barrier()
    assert capfd.readouterr().out.count("once") == 1


def test_at_all_sizes():
    (b,) = jax.export.symbolic_shape("b", constraints=["mod(b, 8) == 0"])
    x = jax.ShapeDtypeStruct((b, 4), jnp.float32)
    report = sbp.jit(shifted.bind, LINE, in_types="data:S(0)").check(x)
    assert isinstance(report, SizedReport)
    assert report.diagnostics == () and report.sizes.status == "every"
