"""Programs that say where values lie in JAX's own words run as under `jax.jit`: with the same
values, and with the shardings that they ask for."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P, reshard

import sbp
from sbp.errors import SourceEdit
from sbp.source.reader import exact_text
from tests.same import assert_same_results, refused

AUTO, EXPLICIT = (
    {
        sizes: jax.make_mesh(sizes, names, axis_types=(kind,) * len(sizes))
        for sizes, names in (((8,), ("x",)), ((2, 4), ("x", "y")), ((2, 2, 2), ("x", "y", "z")))
    }
    for kind in (AxisType.Auto, AxisType.Explicit)
)
X = np.arange(128, dtype=np.float32).reshape(8, 16) / 100
W = np.cos(np.arange(256, dtype=np.float32)).reshape(16, 16)
constrain = lax.with_sharding_constraint


def same(fn, mesh, *args, shardings=True):
    """Runs a function under `jax.jit` and `sbp.jit`, and compares."""
    with jax.set_mesh(mesh):
        found, expected = sbp.jit(fn, mesh)(*args), jax.jit(fn)(*args)
    assert_same_results(expected, found)
    if shardings:
        assert found.sharding.is_equivalent_to(expected.sharding, found.ndim), (
            found.sharding,
            expected.sharding,
        )


@pytest.mark.parametrize("sizes", AUTO, ids=str)
@pytest.mark.parametrize("spec", [P("x"), P(None, "x"), P()], ids=str)
def test_a_constrained_result_has_the_sharding(sizes, spec):
    same(lambda x: constrain(x * 2, spec), AUTO[sizes], X)
    same(lambda x: reshard(x * 2, spec), EXPLICIT[sizes], X)
    # jax.jit gives the result of device_put a sharding of its own choice.
    own = NamedSharding(AUTO[sizes], spec)
    y = sbp.jit(lambda x: jax.device_put(x * 2, own), AUTO[sizes])(X)
    assert y.sharding.is_equivalent_to(own, 2)
    np.testing.assert_array_equal(y, X * 2)


def mlp(x, w):
    h = constrain(jnp.tanh(x @ w), P("x", "y"))
    return constrain(h @ w.T, P("x")).sum()


def explicit_mlp(x, w):
    x, w = reshard(x, P("x")), reshard(w, P(None, "y"))
    h = jnp.tanh(jnp.dot(x, w, out_sharding=P("x", "y")))
    return jnp.einsum("bf,df->bd", h, w, out_sharding=P("x", None)).sum()


def scanned(x):
    return lax.scan(lambda c, _: (constrain(jnp.tanh(c), P("x")), c.sum()), x, None, length=3)


def explicit_scan(x):
    body = lambda c, _: (reshard(jnp.tanh(c), P("x")), None)
    return lax.scan(body, reshard(x, P("x")), None, length=3)[0]


@pytest.mark.parametrize(
    ("meshes", "fn", "args"),
    [
        *(
            (AUTO, *row)
            for row in [
                (mlp, (X, W)),
                (jax.grad(mlp, (0, 1)), (X, W)),
                (scanned, (X,)),
                (jax.grad(lambda x: scanned(x)[0].sum()), (X,)),
                (jax.vmap(lambda r: constrain(r * 2, P("y"))), (X,)),
                (lambda x: constrain(x[:5] * 2, P("x", "y")), (X,)),
                (
                    lambda x: jax.shard_map(
                        lambda a: lax.psum(a, "x"), in_specs=P("x"), out_specs=P()
                    )(x),
                    (X,),
                ),
                (
                    jax.checkpoint(
                        lambda x: jnp.sin(constrain(jnp.sin(x), P("x", P.UNCONSTRAINED)))
                    ),
                    (X,),
                ),
                (lambda x: lax.cond(x.sum() > 0, lambda x: constrain(x, P("x")), jnp.sin, x), (X,)),
            ]
        ),
        *(
            (EXPLICIT, *row)
            for row in [
                (explicit_mlp, (X, W)),
                (jax.grad(explicit_mlp, (0, 1)), (X, W)),
                (explicit_scan, (X,)),
                (
                    lambda x: (
                        jax.random.normal(jax.random.key(0), (8, 16), out_sharding=P("x")) + x
                    ),
                    (X,),
                ),
                (
                    lambda x: (
                        jnp.zeros((8, 16), out_sharding=P("x"))
                        + jnp.arange(16.0, out_sharding=P("y"))
                    ),
                    (X,),
                ),
                (lambda x: x.at[jnp.array([0, 2])].add(1.0, out_sharding=P("x")), (X,)),
                (lambda x: jnp.reshape(x, (16, 8), out_sharding=P("x")) * 2, (X,)),
                (lambda x: reshard(reshard(x * 2, P(unreduced=frozenset({"x"}))), P("x")), (X,)),
                (lambda x: jax.sharding.auto_axes(jnp.sin, out_sharding=P("x"))(x), (X,)),
            ]
        ),
    ],
)
def test_programs_with_constraints_have_the_same_values(meshes, fn, args):
    same(fn, meshes[2, 4], *args, shardings=False)


def test_on_explicit_axes_the_program_reads_the_shardings_of_its_arguments():
    mesh = EXPLICIT[2, 4]
    x = jax.device_put(X, NamedSharding(mesh, P("x")))
    spec_of = lambda x: jax.typeof(x).sharding.spec
    same(lambda x: x * 2 if "x" in spec_of(x) else x, mesh, x, shardings=False)
    mapped = jax.shard_map(lambda a: lax.psum(a, "x"), in_specs=P("x"), out_specs=P())
    same(lambda x: mapped(x), mesh, x, shardings=False)


@pytest.mark.parametrize("mesh", [AUTO[2, 4], EXPLICIT[2, 4]], ids=["auto", "explicit"])
def test_a_manual_region_under_a_set_mesh(mesh):
    region = sbp.manual(lambda a: lax.psum(a.sum(), "x"), in_types="x:S(0)", out_types="B")
    with jax.set_mesh(mesh):
        np.testing.assert_allclose(sbp.jit(lambda x: region(x), mesh)(X), X.sum(), rtol=1e-5)


def test_a_context_of_other_axes_is_not_the_programs():
    with jax.set_mesh(AUTO[8,]):
        np.testing.assert_array_equal(sbp.jit(lambda x: x * 2, AUTO[2, 4])(X), X * 2)


@pytest.mark.parametrize("sizes", AUTO, ids=str)
def test_random_bits_and_integers_are_equal(sizes):
    def fn(x):
        bits = constrain(jax.random.bits(jax.random.key(3), (8, 16)), P(None, "x"))
        return bits, constrain(jnp.cumsum((x * 100).astype(int), 0), P("x"))

    same(fn, AUTO[sizes], X, shardings=False)


class TestReports:
    """A constraint is shown, priced and edited as an annotation is."""

    ROWS, COLUMNS = (NamedSharding(AUTO[2, 4], s) for s in (P("y"), P(None, "y")))

    def test_a_conflict_names_both_lines_and_its_helps_apply(self):
        def fn(x, w):
            h = lax.with_sharding_constraint(x @ w, self.COLUMNS)
            k = jax.device_put(w, self.ROWS)
            return h[:4, :4] * k[:4, :4]

        (found,) = sbp.jit(fn, AUTO[2, 4], boxing="explicit").check(X[:, :16], W).diagnostics
        first = fn.__code__.co_firstlineno
        assert (found.code, {label.span.line - first for label in found.labels}) == (
            "no-signature",
            {1, 2, 3},
        )
        edits = {e.replacement for h in found.helps for e in h.edits if isinstance(e, SourceEdit)}
        assert any("with_sharding_constraint" not in e and "x @ w" in e for e in edits)

    def test_a_sharding_of_a_jit_inside_has_no_edit(self):
        def fn(x, w):
            h = jax.jit(jnp.sin, out_shardings=self.COLUMNS)(w)
            return h * jnp.asarray(w * 2, device=self.ROWS)

        (found,) = sbp.jit(fn, AUTO[2, 4], boxing="explicit").check(X, W).diagnostics
        assert found.helps
        edits = [e for h in found.helps for e in h.edits if isinstance(e, SourceEdit)]
        assert not [e for e in edits if re.search(r"\b(jit|asarray)\b", exact_text(e.span))]

    def test_a_costly_constraint_is_said(self):
        def fn(x, w):
            return lax.with_sharding_constraint(x @ w, self.ROWS).sum()

        big = jax.ShapeDtypeStruct((512, 512), jnp.float32)
        (found,) = (
            sbp.jit(fn, AUTO[2, 4], in_types=("y:S(1)", "y:S(0)")).check(big, big).diagnostics
        )
        said = "costly-annotation", fn.__code__.co_firstlineno + 1
        assert found.primary and (found.code, found.primary.span.line) == said


# ---- JAX's ways to look into a program -----------------------------------------------------------
# JAX's own ways to look into a program: they see types and shards, and change no plan.


MESH = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
XS = np.arange(64, dtype=np.float32).reshape(8, 8)


@pytest.mark.parametrize(
    ("types", "spec"),
    [
        (("x:S(0)", "y:S(1)"), P("x", "y")),
        (("x:S(1)", "x:S(0) y:S(1)"), P(None, "y", unreduced=frozenset({"x"}))),
        (("x:S(0) y:S(1)", "y:S(0)"), P("x", None, unreduced=frozenset({"y"}))),
    ],
)
def test_inspection_gives_the_type_and_leaves_the_plan(types, spec):
    found = []
    product = lambda x, w: sbp.annotate(x @ w, "x:S(0)")

    def inspected(x, w):
        y = x @ w
        jax.debug.inspect_array_sharding(y, callback=found.append)
        return sbp.annotate(y, "x:S(0)")

    plan, plain = (sbp.jit(f, MESH, in_types=types).plan(XS, XS) for f in (inspected, product))
    assert (plan.cost, found) == (plain.cost, [])
    np.testing.assert_allclose(plan(XS, XS), XS @ XS)
    assert [(s.spec, s.mesh.devices.tolist()) for s in found] == [(spec, MESH.devices.tolist())]
    assert len(str(plan).splitlines()) == len(str(plain).splitlines())


def test_inspection_of_a_tree_in_a_scan_and_of_a_constant():
    found = []

    def fn(x):
        def body(c, row):
            jax.debug.inspect_array_sharding({"c": c, "row": row}, callback=found.append)
            return c + row, None

        jax.debug.inspect_array_sharding(jnp.ones(3), callback=found.append)
        return jax.lax.scan(body, jnp.zeros(8), x)[0]

    np.testing.assert_allclose(sbp.jit(fn, MESH, in_types="y:S(1)")(XS), XS.sum(0))
    w = jnp.ones((8, 8))

    def product(c, _):
        jax.debug.inspect_array_sharding(w, callback=found.append)
        return c @ w.astype(jnp.bfloat16), None  # this cast stands ahead of the loop

    sbp.jit(lambda c: jax.lax.scan(product, c, length=2)[0], MESH)(XS.astype(jnp.bfloat16))
    assert len(found) == 4 and all(len(s.spec) <= 2 for s in found)


@pytest.mark.parametrize(
    ("fn", "types", "said"),
    [
        (lambda x, w: x, ("x:S(0)", None), "CPU 0,1,2,3"),
        (lambda x, w: x @ w, ("x:S(1) y:S(0)", "x:S(0)"), "CPU 0,4"),
    ],
    ids=["an argument", "the parts of a sum"],
)
def test_visualize(fn, types, said, capsys):
    def shown(x, w):
        y = fn(x, w)
        jax.debug.visualize_array_sharding(y)
        return y

    np.testing.assert_allclose(sbp.jit(shown, MESH, in_types=types)(XS, XS), fn(XS, XS))
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("size", "shape"), [(8, (4, 2)), (7, (7, 2))], ids=["even", "an uneven dim is whole"]
)
def test_a_partitioned_callback_sees_the_shard(size, shape):
    seen = []

    def fn(x):
        y = sbp.annotate(x[:size] * 2, "x:S(0) y:S(1)")
        jax.debug.callback(lambda a: seen.append(np.array(a)), y, partitioned=True)
        return y

    jax.block_until_ready(sbp.jit(fn, MESH)(XS))
    jax.effects_barrier()
    assert [a.shape for a in seen] == [shape] * 8
    whole = XS[:size] * 2
    rows = range(0, 8, shape[0]) if size == 8 else [0]
    expected = {
        tuple(whole[i : i + shape[0], j : j + 2].ravel()) for i in rows for j in range(0, 8, 2)
    }
    assert {tuple(a.ravel()) for a in seen} == expected


@pytest.mark.parametrize(
    "show",
    [
        lambda x: jax.debug.print("{}", x, ordered=True),
        lambda x: jax.debug.callback(lambda a: None, x, ordered=True),
    ],
)
def test_an_ordered_debug_effect_is_refused_in_check_as_in_the_call(show):
    f = sbp.jit(lambda x: (show(x.sum()), x * 2)[1], MESH)
    (found,) = f.check(XS).diagnostics
    assert found.primary and (found.code, found.primary.span.file) == (
        "unsupported-effect",
        __file__,
    )
    refused(r"unsupported-effect.* with ordered=True", f, XS)


def test_an_ordered_debug_effect_runs_on_one_device(capsys):
    mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
    jax.block_until_ready(
        sbp.jit(lambda x: (jax.debug.print("{}", x.sum(), ordered=True), x)[1], mesh)(XS)
    )
    jax.effects_barrier()
    assert capsys.readouterr().out == "2016.0\n"
