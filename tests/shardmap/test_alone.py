"""sbp runs a program on one device if it cannot type one of its values. A right program computes
the same, a wrong program does not, and a difference that may be intended is no warning."""

import types
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as PS

import sbp
from sbp.handwritten import emulation
from sbp.handwritten.compared import DIFFERS
from tests.shardmap.programs.collection import RIGHT, programs
from tests.shardmap.programs.kinds import N_MODEL, mapped, mesh, report_of

ROWS = PS("model")
X = np.asarray(np.random.default_rng(0).standard_normal((16, 8)), np.float32)
SHAPE = jax.ShapeDtypeStruct((16, 8), jnp.float32)


def checked(fn: Any, *args: Any):
    report = sbp.check_shard_map(fn, *args, mesh=mesh())
    assert report.coverage is not None
    return report.coverage.runs[-1], report


def run_of(body: Any, *args: Any, ins: Any = ROWS, outs: Any = ROWS, around: Any = lambda f: f):
    run, report = checked(around(mapped(body, ins, outs)(False)), *(args or (X,)))
    assert run.mesh_axis == "model"
    assert {d.code for d in report.diagnostics if d.severity != "note"} == (
        {DIFFERS} if run.wrong else {"not-analysed"} if run.untried and not run.refused else set()
    )
    return run, report


def ring_sums(steps: Any, size: Any) -> Any:
    """Each row with the columns' means over all rows."""

    def body(x):
        n = size()
        pairs = [(i, (i + 1) % n) for i in range(n)]
        total, part = jnp.sin(x).sum(0), x
        for _ in range(steps(n)):
            part = lax.ppermute(part, "model", pairs)
            total = total + jnp.sin(part).sum(0)
        return x + total

    return body


axis_size = lambda: lax.axis_size("model")


@pytest.mark.parametrize("name", ["ring_attention", "ring_product", "pipeline"])
def test_a_right_program_computes_the_same(name):
    """The programs read the number of devices from one global, and the pairs from another."""
    program = programs(RIGHT)[name]
    run, report = checked(program.make(program.vma[0]), *program.args)
    assert (run.mesh_axis, run.size, run.values) == ("model", N_MODEL, "its arguments")
    assert not run.untried and (run.apart, run.stages) == ((), name == "pipeline")
    assert "the program computes the same" in report.text(200)


in_a_closure = (lambda n: lambda: n)(4)


def from_all_distances(x, n):
    every = [lax.ppermute(x, "model", [(i, (i + k) % n) for i in range(n)]) for k in range(n)]
    return jnp.tanh(sum(part.sum(0) for part in every))


whole_ring = partial(ring_sums, lambda n: n - 1)


@pytest.mark.parametrize(
    ("body", "options"),
    [
        (whole_ring(axis_size), {}),
        (whole_ring(lambda: 4), {}),
        (whole_ring(lambda: N_MODEL), {}),
        (whole_ring(in_a_closure), {}),
        (whole_ring(lambda: mesh().shape["model"]), {}),
        (partial(from_all_distances, n=N_MODEL), {"outs": PS()}),
        (
            whole_ring(axis_size),
            {"around": lambda f: jax.grad(lambda x: jnp.sin(f(x)).sum())},
        ),
    ],
    ids=["axis_size", "number", "global", "closure", "mesh", "partial argument", "gradient"],
)
def test_a_ring_with_the_size_from_anywhere(body, options):
    right, _ = run_of(body, **options)
    assert right.apart == () and not right.untried


@pytest.mark.parametrize("size", [axis_size, in_a_closure])
def test_a_ring_that_is_one_step_short(size):
    wrong, report = run_of(ring_sums(lambda n: n - 2, size))
    assert wrong.apart == (0,) and wrong.wrong
    (found,) = [d for d in report.diagnostics if d.code == DIFFERS]
    assert report.ok and (found.severity, found.title) == (
        "warning",
        "result 0 changes when mesh axis `model` has one device",
    )
    assert found.primary is not None and found.primary.text == "from another device"


def test_a_short_ring_is_no_missing_sum():
    def body(x):
        total, sums, pairs = x, x.sum(0), [(i, (i + 1) % 4) for i in range(4)]
        for _ in range(2):
            x = lax.ppermute(x, "model", pairs)
            total = total + x
        return total.sum(0), sums

    _, report = run_of(lambda x: body(x)[0], outs=PS())
    assert [d.code for d in report.diagnostics] == [DIFFERS]
    _, report = checked(mapped(body, ROWS, (PS(), PS()))(False), X)
    assert [d.title for d in report.diagnostics] == [
        "`x.sum(0)` is left partial on mesh axis `model`"
    ]


@pytest.mark.parametrize("empty", [np.zeros((0, 8), np.float32), jnp.zeros((0, 8))])
def test_an_empty_array_is_compared(empty):
    run, report = run_of(whole_ring(axis_size), empty)
    assert report.ok and not run.wrong and not run.untried


def from_the_left(x):
    n = lax.axis_size("model")
    return lax.ppermute(x, "model", [(i, (i + 1) % n) for i in range(n)])


def said_on_several_devices(x):
    if lax.axis_size("model") > 1:
        jax.debug.print("{}", lax.psum(x.sum(), "model"))
    return x


@pytest.mark.parametrize(
    ("body", "args", "ins", "outs", "is_wrong"),
    [
        (
            lambda x, key: whole_ring(axis_size)(x) + jax.random.normal(key, x.shape) * 0,
            (X, jax.random.key(0)),
            (ROWS, PS()),
            ROWS,
            False,
        ),
        (said_on_several_devices, (X,), ROWS, ROWS, False),
        (lambda x: lax.psum(1j * x.mean(0), "model"), (X,), ROWS, PS(), True),
        (lambda x: (from_the_left(x), x[:, :0].sum(1)[:0]), (X,), ROWS, (ROWS, PS()), True),
    ],
    ids=["a typed key", "a callback", "a complex factor", "an empty result"],
)
def test_values_without_a_counterpart_or_an_order(body, args, ins, outs, is_wrong):
    """The check of each of these programs has raised an error of JAX or NumPy."""
    report = sbp.check_shard_map(mapped(body, ins, outs)(False), *args, mesh=mesh())
    assert any(d.severity != "note" for d in report.diagnostics) == is_wrong, report.text()


def test_a_ragged_product_on_two_mesh_axes():
    """JAX cannot lower a ragged product under two `vmap`s."""

    def body(x):
        return lax.ragged_dot(x, scales[:, None, None] * jnp.eye(8), jnp.array([1, len(x) - 1]))

    for scales in (jnp.ones(2), jnp.array([1.0, 2.0])):  # the first row of each shard is another
        run, _ = run_of(body)
        assert not run.untried and bool(run.apart) == (scales[1] != 1)


@pytest.mark.parametrize(
    "body",
    [
        lambda x: jnp.zeros_like(x).at[jnp.arange(len(x))].add(x),
        lambda x: lax.reduce(x, jnp.bfloat16(0), lambda a, b: a + 2 * b, (1,)),
        lambda x: lax.reduce_window(x, jnp.bfloat16(0), jnp.add, (1, 2), (1, 1), "SAME"),
    ],
)
def test_functions_of_low_precision_run_on_wider_floats(body):
    x = jnp.asarray(X, jnp.bfloat16)
    run, _ = run_of(body, x)
    assert not run.untried and not run.wrong
    _, report = checked(mapped(lambda x: body(x) * jnp.sum(x), ROWS, ROWS)(False), x)
    assert [d.code for d in report.diagnostics] == ["missing-reduction"]


def test_a_region_under_jit_and_with_shapes():
    """JAX caches the trace of the inner jit. The run on one device must not reuse that trace."""
    for steps, wrong in ((1, False), (2, True)):
        body = ring_sums(lambda n, steps=steps: n - steps, axis_size)
        run, _ = run_of(body, SHAPE, around=jax.jit)
        assert run.wrong == wrong and run.values == "random values"


def striped(n):
    """Rows i, i + n, .. of the whole to device i, and the rows before each."""

    def region(x):
        me, count = lax.axis_index("model"), x.shape[0]
        at = me + n * jnp.arange(count)
        total, part, source = jnp.zeros_like(x), x, me
        for _ in range(n):
            other = source + n * jnp.arange(count)
            total = total + (at[:, None] >= other[None]).astype(x.dtype) @ part
            part = lax.ppermute(part, "model", [(i, (i + 1) % n) for i in range(n)])
            source = (source - 1) % n
        return total

    return region


@pytest.mark.parametrize("around", [lambda f: f, jax.jit])
def test_a_layout_that_the_program_makes_around_its_region(around):
    """The function around the region also uses the number of devices."""
    n, m = N_MODEL, mesh()
    region = jax.shard_map(striped(n), mesh=m, in_specs=ROWS, out_specs=ROWS, check_vma=False)

    def program(x):
        y = region(x.reshape(-1, n, x.shape[1]).swapaxes(0, 1).reshape(x.shape))
        return y.reshape(n, -1, x.shape[1]).swapaxes(0, 1).reshape(x.shape)

    def inside(x):
        k = m.shape["model"]
        built = jax.shard_map(striped(k), mesh=m, in_specs=ROWS, out_specs=ROWS, check_vma=False)
        y = built(x.reshape(-1, k, x.shape[1]).swapaxes(0, 1).reshape(x.shape))
        return y.reshape(k, -1, x.shape[1]).swapaxes(0, 1).reshape(x.shape)

    order = np.arange(16).reshape(-1, n).T.reshape(-1)

    listed = lambda x: region(x[order])

    for fn in (program, inside, listed):
        run, report = checked(around(fn), X)
        assert all(d.severity == "note" for d in report.diagnostics), report.text()
        if fn is listed:
            assert any("the integers `order`" in reason for reason in run.because)
        else:
            assert run.apart == () and not run.untried
            np.testing.assert_allclose(fn(X), np.cumsum(X, 0), rtol=1e-3, atol=1e-4)


def by_rank(x):
    """Rows of a shard beyond the second are dropped."""
    place = jnp.cumsum((x[:, 0] > 0).astype(jnp.int32))
    kept = jnp.where((place <= 2)[:, None], x, 0.0)
    return lax.ppermute(kept, "model", [(i, i) for i in range(N_MODEL)])


def test_random_numbers_are_no_difference():
    """Each device draws its own numbers. sbp still finds a missing sum."""

    def drawn(x):
        key = jax.random.fold_in(jax.random.key(0), lax.axis_index("model"))
        return x * jax.random.normal(key, x.shape)

    run, _ = run_of(drawn)
    assert run.apart == () and not run.untried
    _, report = checked(mapped(lambda x: drawn(x).sum(0), ROWS, PS())(False), X)
    (found,) = report.diagnostics
    assert (found.code, found.severity) == ("missing-reduction", "error")


of_each_device = lambda x: lax.ppermute(
    x, "model", [(i, (i + 1) % N_MODEL) for i in range(N_MODEL)]
).sum(0)[None]
by_many_numbers = lambda x, a=4, b=4, c=4, d=4: (
    x * (1.0 + lax.axis_index("model") % 2 * (a + b + c + d))
)


@pytest.mark.parametrize(
    ("body", "because"),
    [
        (by_rank, "each device ranks its own elements"),
        (of_each_device, "one element for each device"),
        (by_many_numbers, "many numbers in the program"),
    ],
)
def test_what_shows_that_a_difference_may_be_meant(body, because):
    run, report = run_of(body)
    assert run.apart == (0,) and not run.wrong
    assert any(because in reason for reason in run.because)
    assert because in report.text(400)


def test_integers_that_are_not_given_may_be_out_of_their_range():
    body = lambda x, i: x[i] + lax.ppermute(x, "model", [(k, (k + 2) % 4) for k in range(4)])[:2]
    run, _ = run_of(body, X, jax.ShapeDtypeStruct((2,), jnp.int32), ins=(ROWS, PS()), outs=ROWS)
    assert not run.wrong


def test_the_report_says_which_numbers_count_devices():
    body = lambda x: lax.psum(x.mean() / 4, "model")
    report = report_of(body, PS("model"), PS(), jnp.arange(16, dtype=jnp.float32))
    assert report.ok and "if `4` counts devices" in report.text(300)


SQUARES = jnp.arange(16, dtype=jnp.float32)


@pytest.mark.parametrize(
    ("body", "is_right"),
    [
        (lambda w, x: lax.psum(jax.grad(lambda w: ((x * w) ** 2).mean())(w), "data") / 2, True),
        (lambda w, x: lax.psum(jax.grad(lambda w: ((x * w) ** 2).mean() / 2)(w), "data"), True),
        (lambda w, x: lax.psum(jax.grad(lambda w: ((x * w) ** 2).mean())(w), "data"), False),
        (lambda w, x: lax.psum(jax.grad(lambda w: ((x * w) ** 4).mean() / 3)(w), "data"), False),
    ],
)
def test_an_exponent_counts_no_devices(body, is_right):
    """The number of devices may be written down beside the same number as an exponent."""
    found = report_of(body, (PS(), PS("data")), PS(), jnp.float32(3), SQUARES)
    assert found.ok is is_right
    assert not is_right or not found.diagnostics


def test_results_of_zeros_are_said_to_hide_faults():
    hits = lambda x, labels: (x.argmax(-1) == labels).mean()
    report = report_of(hits, (PS("data"),) * 2, PS(), jnp.ones((16, 4)), jnp.full(16, -1))
    assert "result 0: zero in both runs, which hides faults" in report.text(300)


def test_a_result_of_zeros_with_a_number_as_an_argument():
    body = lambda x, count: (x * 0).sum() * count
    shapes = jax.ShapeDtypeStruct((16,), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)
    assert not report_of(body, (PS(), PS()), PS(), *shapes).diagnostics


def test_masks_that_keep_little_are_not_empty():
    def body(w, x, key):
        kept = jnp.where(jax.random.bernoulli(key, 0.15, x.shape), x, 0)
        return w - 1e-3 * jax.grad(lambda w: ((kept @ w) ** 2).mean())(w)

    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((4, 2), (16, 4))]
    report = report_of(body, (PS(), PS("data"), PS()), PS(), *shapes, jax.random.key(0))
    assert [d.code for d in report.diagnostics] == ["missing-reduction"]


def test_a_program_that_is_too_large_is_not_run(monkeypatch):
    body = ring_sums(lambda n: n - 2, axis_size)
    monkeypatch.setattr(emulation, "CHECKED_WORK", 100)
    run, _ = run_of(body)
    assert "operations compute" in run.untried and not run.wrong
    monkeypatch.setattr(emulation, "CHECKED_ELEMENTS", 100)
    run, report = run_of(body)
    assert "elements over all devices" in run.untried
    assert "sbp did not compare" in report.text(200)


class OnlyOnFour(Exception):
    pass


def test_a_function_that_refuses_one_device():
    def body(x):
        if x.shape[0] > 10:
            raise OnlyOnFour("four devices, please")
        return lax.ppermute(x, "model", [(i, (i + 1) % 4) for i in range(4)])

    run, _ = run_of(body)
    said = (
        "it raises an error with one device: four devices, please, at tests/shardmap/test_alone.py:"
    )
    assert run.untried.rstrip("0123456789").endswith(said)
    assert jax.make_jaxpr(jax.shard_map(body, mesh=mesh(), in_specs=ROWS, out_specs=ROWS))(X)


# ---- arguments that hide a fault -----------------------------------------------------------------

ONE_EACH = np.arange(16) % 4 == 0  # one row of four on each device
HIDING = {
    "equal counts": ONE_EACH.astype(np.float32),
    "tests": ONE_EACH,
    "integers": ONE_EACH.astype(np.int32),
    "all true": np.ones(16, bool),
}


@pytest.mark.parametrize("mask", HIDING.values(), ids=list(HIDING))
def test_a_fault_that_shows_on_reordered_arguments_is_a_warning(mask):
    mean = lambda x, mask: lax.pmean((x.sum(1) * mask).sum() / mask.sum(), "model")
    _, report = checked(mapped(mean, (ROWS, ROWS), PS())(False), X, mask)
    (found,) = report.diagnostics
    assert report.ok and (found.code, found.severity) == ("misplaced-reduction", "warning")
    assert "the same on your arguments" in found.notes[0]
    assert "the elements of each array in another order" in str(report)
    right = lambda x, mask: (
        lax.psum((x.sum(1) * mask).sum(), "model") / lax.psum(mask.sum(), "model")
    )
    assert not checked(mapped(right, (ROWS, ROWS), PS())(False), X, mask)[1].diagnostics


def test_sorted_arguments_stay_sorted():
    keys = np.sort(X[:, 0])
    right = lambda keys, x: lax.psum(jnp.searchsorted(keys, x), "model")
    assert not checked(mapped(right, (ROWS, PS()), PS())(False), keys, X[:4, 1])[1].diagnostics


# ---- loops ---------------------------------------------------------------------------------------


def descent(reduced):
    def body(x, w):
        def step(i, w):
            g = jax.grad(lambda w: ((x @ w) ** 2).mean())(w)
            return w - 0.1 * reduced(g)

        return lax.fori_loop(0, 3, step, w)

    return mapped(body, (ROWS, PS()), PS())(False)


def test_a_loop_that_makes_its_carry_partial():
    w = np.linspace(-1, 1, 8, dtype=np.float32)
    _, report = checked(descent(lambda g: g), X, w)
    (found,) = report.diagnostics
    assert found.code == "missing-reduction" and "the mean of one shard" in found.labels[0].text
    assert [h.text for h in found.helps if h.clears_all_errors] == [
        f'reduce `g`, which line {found.labels[0].span.line} sets, with lax.pmean(.., "model")'
    ]
    assert not checked(descent(lambda g: lax.pmean(g, "model")), X, w)[1].diagnostics


WHOLE = PS()


def check_on_four(body, *args, out=WHOLE, **options):
    """The report on a region over four devices whose first array is split."""
    four = jax.sharding.AbstractMesh((4,), ("data",))
    ins = (PS("data"), *(PS() for _ in args))
    region = jax.shard_map(body, mesh=four, in_specs=ins, out_specs=out, check_vma=False)
    return sbp.check_shard_map(region, ROW, *args, mesh=four, **options)


ROW = np.linspace(-0.4, 0.7, 8, dtype=np.float32)


def test_a_loop_that_does_not_end():
    """All random numbers are one number, with which the loop goes on."""

    def body(x, key):
        goes_on = lambda state: state[1] < 0
        again = lambda state: (jax.random.split(state[0])[0], jax.random.normal(state[0]))
        return x.sum() + lax.while_loop(goes_on, again, (key, jnp.float32(-1)))[1]

    report = check_on_four(body, jax.random.key(0))
    assert [d.code for d in report.diagnostics] == ["not-analysed"], report.text()


class Ring:
    def __init__(self, size):
        self.settings = types.SimpleNamespace(mesh={"data": size}, dims=(size, 16))

    def __call__(self, x):
        n, _ = self.settings.dims
        pairs = [(i, (i + 1) % n) for i in range(n)]
        total = block = x
        for _ in range(self.settings.mesh["data"] - 1):
            block = lax.ppermute(block, "data", pairs)
            total = total + block
        return total.sum() / (x.shape[0] * n)


def test_sizes_in_objects_and_tuples():
    assert not check_on_four(Ring(4)).diagnostics


@pytest.mark.parametrize("sign", [jnp.copysign, lambda x, y: jnp.where(jnp.signbit(y), -x, x)])
def test_bits_of_floats(sign):
    assert not check_on_four(lambda x: lax.psum(sign(x, -x).sum(), "data")).diagnostics


def test_a_permutation_with_one_receiver_twice():
    report = check_on_four(
        lambda x: lax.ppermute(x, "data", [(0, 1), (1, 1), (2, 3), (3, 0)]), out=PS("data")
    )
    assert "sends two values to index 1" in report.text()


def test_the_square_of_the_number_of_devices():
    report = check_on_four(lambda x: lax.psum(x.sum(), "data") / x.shape[0] ** 2)
    assert "16 times too large" in report.text()


def test_a_plain_function_that_cannot_run():
    groups = lambda x: lax.psum(x.sum(), "data", axis_index_groups=[[0, 1], [2, 3]])
    four = jax.sharding.AbstractMesh((4,), ("data",))
    plain = jax.shard_map(groups, mesh=four, in_specs=PS("data"), out_specs=PS(), check_vma=False)
    report = check_on_four(lambda x: lax.psum(x.sum(), "data"), against=plain)
    assert "cannot run the plain function" in report.text()


def test_the_order_of_mesh_axes_is_that_of_the_region():
    own = jax.sharding.AbstractMesh((4, 2), ("data", "model"))
    other = jax.sharding.AbstractMesh((2, 4), ("model", "data"))
    double = jax.shard_map(lambda x: x * 2, mesh=own, in_specs=PS("data"), out_specs=PS("data"))
    with pytest.raises(sbp.SbpError, match="pass the mesh of the shard_map"):
        sbp.check_shard_map(double, ROW, mesh=other)


def test_a_collective_that_only_some_devices_run():
    def only_first(x):
        first = lax.axis_index("data") == 0
        total = lax.cond(first, lambda v: lax.psum(v, "data"), lambda v: v, x.sum())
        return lax.psum(jnp.where(first, total, 0.0), "data")

    def all_or_none(x):
        total = lax.psum(x.sum(), "data")
        return lax.cond(total > 0, lambda v: lax.psum(v, "data"), lambda v: 0 * total, x.sum())

    (found,) = check_on_four(only_first).diagnostics
    assert "only some devices along mesh axis `data`" in found.title
    assert not check_on_four(all_or_none).diagnostics


def test_numbers_of_arguments_count_no_devices():
    """Axis `data` has two devices, and `argnums` ends with 2."""

    def step(w, b, x):
        loss = lambda w, b, x: lax.pmean(((x @ w + b) ** 2).mean(), "data")
        return lax.psum(jax.grad(loss, argnums=(0, 1, 2))(w, b, x)[0], "data")

    report = report_of(step, (PS(), PS(), PS("data")), PS(), X[:8, :4], X[0, :4], X, vma=True)
    assert [d.severity for d in report.diagnostics] == ["error"], report.text()
