"""The public function: what it takes, what it refuses, what it says."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import sbp
from tests.same import printed_under_all_hash_seeds, refused
from tests.shardmap.programs.kinds import mesh, report_of
from tests.shardmap.programs.wrong.products import MATMUL, ROWS, U, V

MESH = AbstractMesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
X, W = jax.ShapeDtypeStruct((16, 32), jnp.float32), jax.ShapeDtypeStruct((32, 24), jnp.float32)


def region(body, ins: Any = MATMUL, outs: Any = ROWS, over: Any = MESH, **options: Any):
    return jax.shard_map(body, mesh=over, in_specs=ins, out_specs=outs, check_vma=False, **options)


def twice(x, w):
    y = lax.psum(x @ w, "model")
    return lax.psum(y, "model")


codes = lambda report: [d.code for d in report.diagnostics]


def explicit():
    """A region over a mesh with axes of type Explicit, and operands that are split over it."""
    over = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    shardings = tuple(NamedSharding(over, spec) for spec in MATMUL)
    return region(twice, over=over), jax.tree.map(jax.device_put, (U, V), shardings), over


def called_twice():
    layer = lambda x, w: lax.psum(lax.psum(x @ w, "model"), "model")
    return region(lambda x, w: layer(x, w) + layer(2.0 * x, w))


TENSOR = {"ins": (PartitionSpec(None, "model"), PartitionSpec("model")), "outs": PartitionSpec()}
DOUBLED = {
    "shapes": lambda: (region(twice), (X, W), MESH),
    "arrays": lambda: (region(twice), (U, V), MESH),
    "an array and a shape": lambda: (region(twice), (jnp.asarray(U), W), MESH),
    "pytrees": lambda: (lambda p: region(twice)(p["x"], *p["w"]), ({"x": X, "w": [W]},), MESH),
    "devices": lambda: (region(twice, over=mesh()), (X, W), mesh()),
    "devices for a region, an abstract mesh": lambda: (region(twice, over=mesh()), (X, W), MESH),
    "explicit axes": explicit,
    "a region without a mesh": lambda: (region(twice, over=None), (X, W), MESH),
    "axes left to the compiler": lambda: (
        region(twice, axis_names={"model"}, **TENSOR),
        (X, W),
        MESH,
    ),
    "a helper called twice": lambda: (called_twice(), (X, W), MESH),
}


def local_routing(x):
    chosen = jax.nn.one_hot(jnp.argmax(x, -1), x.shape[-1])
    return x * (jnp.cumsum(chosen, 0) * chosen <= 2.0)


def halves(x, w):
    y = x @ w
    cut = lax.dynamic_slice_in_dim(y, 4, 8, 1)
    return lax.psum(cut, "model") + lax.psum(y[:, :8], "model")


def divided_by_one_of_two_sizes(w, x):
    g = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    return lax.psum(g, ("data", "model")) / lax.axis_size("model")


BATCH, WHOLE = PartitionSpec("data"), PartitionSpec()
ONE = AbstractMesh((2, 1), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
CODES = {name: (make, ["doubled-reduction"]) for name, make in DOUBLED.items()} | {
    # Without `jax_enable_x64`, JAX takes them as 32 bits without a warning. JAX 0.12 warns of a
    # `ShapeDtypeStruct` of them; the gate runs this case there too.
    "64_bits": (
        lambda: (
            region(lambda x, i: lax.psum(x[0, i].sum(), "model"), (WHOLE,) * 2, WHOLE),
            (jnp.ones((16, 8)), np.arange(16, dtype=np.int64) % 8),
            MESH,
        ),
        ["doubled-reduction"],
    ),
    "a float in the source": (
        lambda: (
            region(lambda x: lax.psum(jnp.mean((0.5 * x + 0.5) * 2.0), "data"), (BATCH,), WHOLE),
            (X,),
            MESH,
        ),
        ["wrong-reduction"],
    ),
    "a bias of zeros": (
        lambda: (
            region(lambda x, w, b: lax.psum(x @ w + b, "model"), (*MATMUL, WHOLE)),
            (np.ones((16, 32)), np.ones((32, 24)), np.zeros(24)),
            MESH,
        ),
        ["misplaced-reduction"],
    ),
    "a root of equal elements": (
        lambda: (
            region(lambda x, w, a: lax.psum(x @ w, "model") * jnp.sqrt(1 - a), (*MATMUL, WHOLE)),
            (np.ones((16, 32)), np.ones((32, 24)), np.full(24, 0.9)),
            MESH,
        ),
        [],
    ),
    # A number that is the size of another axis may not be that of this one.
    "the size of another axis": (
        lambda: (
            region(
                divided_by_one_of_two_sizes,
                (WHOLE, PartitionSpec(("data", "model"))),
                WHOLE,
            ),
            (W, X),
            MESH,
        ),
        ["wrong-reduction"],
    ),
    "an axis of one device": (lambda: (region(twice, over=ONE), (X, W), ONE), []),
    "routing within a group": (lambda: (region(local_routing, BATCH, BATCH), (X,), MESH), []),
    "a slice before the reduction": (lambda: (region(halves), (X, W), MESH), []),
}


def test_arguments_may_be_traced():
    def checked(x, w):
        assert codes(sbp.check_shard_map(region(twice), x, w, mesh=MESH)) == ["doubled-reduction"]
        return x

    jax.eval_shape(checked, X, W)


@pytest.mark.parametrize("args", [(X,), (X, W, W)])
def test_a_call_with_another_number_of_arguments(args):
    refused(
        r"program was called wrongly: .*positional argument",
        sbp.check_shard_map,
        region(lambda x, w: x @ w, PartitionSpec(), PartitionSpec()),
        *args,
        mesh=MESH,
    )
    refused(
        r"`against` was called wrongly: .*positional argument",
        sbp.check_shard_map,
        region(lambda *args: args[0], PartitionSpec(), PartitionSpec()),
        *args,
        mesh=MESH,
        against=lambda x, w: x,
    )


@pytest.mark.parametrize("name", list(CODES))
def test_what_a_program_gets(name):
    make, want = CODES[name]
    fn, args, over = make()
    report = sbp.check_shard_map(fn, *args, mesh=over)
    assert (codes(report), report.ok) == (want, not want)


@pytest.mark.parametrize(
    ("body", "inside"),
    [
        (lambda x: jax.nn.softmax(x, 0), True),
        (lambda x: x.var(0), True),
        (lambda x: x / jnp.linalg.norm(x, axis=0, keepdims=True), True),
        (lambda x: x - x.max(0), False),
        (lambda x: x / x.sum(0), False),
    ],
)
def test_a_partial_value_inside_of_a_call_is_said(body, inside):
    (found,) = sbp.check_shard_map(region(body, BATCH, BATCH), X, mesh=MESH).diagnostics
    assert any("inside of this call" in note for note in found.notes) == inside


def test_the_divisor_of_a_mean_may_be_a_cast():
    """JAX 0.12 writes the divisor of `lax.pmean` as a cast of an integer under `check_vma`. The
    gate runs this test with the newest JAX too, where a cast that is not read makes it fail."""
    count = lambda: lax.pcast(4, "data", to="varying").astype(jnp.float32)
    checked = lambda body: sbp.check_shard_map(
        jax.shard_map(body, mesh=MESH, in_specs=MATMUL, out_specs=ROWS), X, W, mesh=MESH
    )
    (found,) = checked(lambda x, w: lax.pmean(x @ w, "model")).diagnostics
    assert "averages the parts of a sum" in found.title
    assert not checked(lambda x, w: lax.psum(x @ w, "model") / count()).diagnostics


def test_a_region_under_the_mesh_that_is_set():
    with jax.set_mesh(mesh()):
        f = region(twice, over=None)
        assert codes(sbp.check_shard_map(f, X, W, mesh=mesh())) == ["doubled-reduction"]


@pytest.mark.parametrize(
    ("fn", "args", "over", "message"),
    [
        (lambda x: x * 2.0, (X,), MESH, "does not call jax.shard_map"),
        (
            region(twice),
            (X, W),
            AbstractMesh((8,), ("model",), axis_types=(AxisType.Auto,)),
            "uses the mesh data=2 model=4, but mesh= has model=8",
        ),
        (region(twice), (X, W), "model", "got 'model'"),
        (region(twice), (X, "w"), MESH, "input 1 is not an array: str"),
        (lambda x: (x, "text"), (X,), MESH, r"returns a value of type str at result\[1\]"),
        (3, (X,), MESH, "must be a function"),
    ],
)
def test_what_it_refuses(fn, args, over, message):
    refused(f"^bad-argument: .*{message}", sbp.check_shard_map, fn, *args, mesh=over)


def test_errors_of_the_function_pass():
    def wrong(x, w):
        raise KeyError("my own")

    with pytest.raises(KeyError, match="my own"):
        sbp.check_shard_map(region(wrong), X, W, mesh=MESH)


def several(x, w, b):
    y = lax.pmean(x @ w, "model")
    z = lax.psum(x @ w + b, "model")
    h = lax.psum(lax.psum(x @ w, "model"), "model")
    return y, z, h, jnp.tanh(x @ w)


def test_several_faults_in_source_order():
    args = (X, W, jax.ShapeDtypeStruct((24,), jnp.float32))
    report = report_of(several, (*MATMUL, WHOLE), (ROWS,) * 4, *args, over=MESH)
    assert codes(report) == [
        "wrong-reduction",
        "misplaced-reduction",
        "doubled-reduction",
        "missing-reduction",
    ]
    start = inspect.getsourcelines(several)[1]
    assert [d.primary.span.line - start for d in report.diagnostics if d.primary] == [1, 2, 3, 4]
    assert all(d.helps for d in report.diagnostics)


def test_a_collective_with_keywords_loses_one_of_its_axes():
    body = lambda x, w: lax.psum(x=lax.psum(x @ w, "model"), axis_name=("data", "model"))
    ins = PartitionSpec(None, MESH.axis_names), PartitionSpec(MESH.axis_names)
    report = report_of(body, ins, WHOLE, X, W, over=MESH)
    assert [repr(h.edits).count("replacement='\"data\"'") for h in report.diagnostics[0].helps] == [
        1
    ]


def test_regions_in_loops_and_several_regions():
    good = region(lambda x, w: lax.psum(x @ w, "model"))

    def program(x, w):
        y = jax.jit(good)(x, w)
        return lax.scan(lambda total, _: (total + region(twice)(x, w), None), y, None, length=3)[0]

    report = sbp.check_shard_map(program, X, W, mesh=MESH)
    assert codes(report) == ["doubled-reduction"]
    # Dropping the second sum leaves one in the loop, three times, and the one before it: 2 (n - 1)
    # / n of 8 x 24 floats each.
    assert report.diagnostics[0].helps[0].bytes_per_device == 4 * 2 * 3 / 4 * 8 * 24 * 4


def test_what_is_not_analysed_is_said():
    groups = lambda x: lax.psum(x.sum(), "model", axis_index_groups=[[0, 1], [2, 3]])
    report = report_of(groups, PartitionSpec(None, "model"), WHOLE, X, over=MESH)
    assert report.ok
    assert [(d.code, d.severity) for d in report.diagnostics] == [
        ("not-analysed", "warning"),
        ("not-analysed", "warning"),
    ]
    assert "groups of an axis" in report.diagnostics[0].title

    inner = lambda x: jax.pure_callback(lambda v: v, X, lax.axis_index("model") * x)
    assert report_of(inner, WHOLE, PartitionSpec("model"), X, over=MESH).ok


def test_the_report_shows_itself():
    report = sbp.check_shard_map(region(twice), X, W, mesh=MESH)
    text = report.text(120)
    assert text.startswith(
        'error[doubled-reduction]: `lax.psum(y, "model")` reduces a value that is already whole'
        " on mesh axis `model`\n"
    )
    assert 'y = lax.psum(x @ w, "model")' in text and "reduced here first" in text
    assert "counted 4 times" in text and 'drop `lax.psum(y, "model")` at line' in text
    assert text.endswith("1 error in `twice`")
    assert "reduced here first" in report.html()


def test_the_same_text_whatever_the_hash_seed():
    program = "import tests.shardmap.test_region_check as t; print(t.sbp.check_shard_map(t.region(t.several, (*t.MATMUL, t.PartitionSpec()), (t.ROWS,) * 4), t.X, t.W, t.jax.ShapeDtypeStruct((24,), 'float32'), mesh=t.MESH))"  # noqa: E501
    assert "4 errors" in printed_under_all_hash_seeds(program)


# ---- what was checked: collectives with their bytes, sums by hand of the ring optimum ------------


SPLIT = PartitionSpec("model")


def covered(body: Any, ins: Any = SPLIT, outs: Any = WHOLE):
    report = report_of(body, ins, outs, X)
    assert report.coverage is not None
    return report, report.coverage


def all_kinds(x):
    y = lax.psum_scatter(x @ x.T, "model", scatter_dimension=0, tiled=True)
    y = lax.all_gather(y, "model", axis=0, tiled=True)
    return lax.psum(y.sum() / 8, ("data", "model"))


def test_collectives_with_their_bytes():
    """x @ x.T has 16 x 16 floats; the scalar goes round 8 devices."""
    _, coverage = covered(all_kinds, PartitionSpec(None, "model"))
    found = [(c.op, c.mesh_axes, c.runs, c.bytes_per_device) for c in coverage.collectives]
    part = 3 / 4 * 16 * 16 * 4
    assert found == [
        ("reduce_scatter", ("model",), 1, part),
        ("all_gather", ("model",), 1, part),
        ("psum", ("data", "model"), 1, 2 * 7 / 8 * 4),
    ]


def looped(x):
    step = lambda c, _: (jnp.tanh(lax.psum(c @ c.T, "model") @ c), None)
    return lax.scan(step, x, None, length=5)[0]


def test_the_trips_of_loops_count():
    _, coverage = covered(looped, PartitionSpec(None, "model"), PartitionSpec(None, "model"))
    (one,) = coverage.collectives
    assert (one.runs, one.bytes_per_device) == (5, 5 * 2 * 3 / 4 * 16 * 16 * 4)
    assert one.text == 'lax.psum(c @ c.T, "model")' and one.span is not None


def test_errors_come_without_the_list_but_with_the_data():
    report, coverage = covered(lambda x: lax.pmean(x.sum(), "model"))
    assert not report.ok and "checked:" not in report.text()
    assert coverage.collectives[0].op == "psum"


def test_the_report_in_html_has_the_same():
    report, _ = covered(all_kinds, PartitionSpec(None, "model"))
    for line in ("checked: 1 region", "psum_scatter"):
        assert line in report.text() and line in report.html()


def test_a_sum_over_the_wrong_axis_before_a_bias_has_one_finding():
    wrong = lambda x, w, b: lax.psum(x @ w, "data") + b
    (found,) = report_of(wrong, (*MATMUL, WHOLE), BATCH, X, W, jnp.ones(24), over=MESH).diagnostics
    assert (found.code, found.helps[0].clears_all_errors) == ("missing-reduction", True)
    assert found.helps[0].text.startswith('write "model" in place of "data"')


def test_the_gradient_of_a_gather_is_not_called_a_reduction_of_the_user():
    def step(w, x):
        loss = lambda w: jnp.mean((x @ lax.all_gather(w, "data", axis=0, tiled=True)) ** 2)
        return w - 0.1 * jax.grad(loss)(w)

    (found,) = report_of(step, (BATCH, BATCH), BATCH, W, jnp.ones((16, 32)), over=MESH).diagnostics
    assert found.primary is not None
    assert 'divide the loss, or the gradient, by lax.axis_size("data")' in found.primary.text

    def clipped(w, x):
        g = w - step(w, x)
        return w - g / (1.0 + lax.psum((g**2).sum(), "data"))

    args = W, jnp.ones((16, 32))
    (again,) = report_of(clipped, (BATCH, BATCH), BATCH, *args, over=MESH).diagnostics
    assert again.primary is not None and again.primary.span == found.primary.span


def test_a_result_has_its_path():
    body = lambda x, w: {"kept": jnp.tanh(x), "sum": lax.psum(x @ w, "model")}
    step = region(body, ins=TENSOR["ins"], outs=PartitionSpec())
    report = sbp.check_shard_map(lambda x, w: (step(x, w), x), U, V, mesh=MESH)
    assert [d.title.partition(" is ")[0] for d in report.diagnostics] == [
        "result 0 (`result[0]['kept']`) of `step(x, w)`"
    ]


def test_one_slip_that_reaches_every_leaf_is_one_error():
    def step(p, x):
        loss = lambda p: jnp.mean(jnp.tanh(x @ p["w"] + p["b"]) ** 2)
        return jax.tree.map(lambda g: lax.psum(g, "data"), jax.grad(loss)(p))

    args = {"w": jnp.asarray(V) / 9, "b": jnp.ones(24)}, jnp.asarray(U)
    # With check_vma=True, JAX has summed the gradients before.
    (found,) = report_of(step, (WHOLE, BATCH), WHOLE, *args, over=MESH, vma=True).diagnostics
    assert any(note.startswith("the help also mends this: the gradient") for note in found.notes)
    assert found.helps[0].clears_all_errors
