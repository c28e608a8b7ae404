"""Arguments in several processes: NumPy arrays as in `jax.jit`, parts of each process by
`plan.place` and `sbp.Padded.of(.., shape=)`, uneven splits included, and arrays that are moved.
If the processes are about to run different programs, all of them raise one error and none hangs.
Programs in several processes compute the values of one device, and every process has the same plan;
`sbp.Partial`, effects and regions written by hand."""

import pickle
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import multihost_utils

import sbp
from sbp import _jax
from sbp.moe.hosts import from_first, is_first
from sbp.run import execute
from tests.multiprocess.programs import (
    MESHES,
    NAMES,
    assert_shards,
    cases,
    in_all,
    mesh_of,
    numbers,
    put,
)
from tests.same import refused

pytestmark = pytest.mark.multiprocess

X = numbers(16, 8)


def times_two(x):
    return x * 2


def test_numpy_arrays_that_are_free_are_one_global_value():
    f = sbp.jit(lambda x, y, n: (x @ y.T + n, y.sum()), mesh_of("2x4"))
    got = f(X, X.astype(np.float64), 3.0)
    # Each process took its part.
    assert not f.plan(X, X, 3.0).in_shardings[0].is_fully_replicated
    assert_shards(got, (X @ X.T + 3, X.sum()))


def test_numbers_and_arrays_without_elements():
    fn = lambda x, a, b, empty: (x.sum() + a, b * 2, empty)
    args = X, 3, True, np.zeros((0, 8), np.float32)
    assert_shards(sbp.jit(fn, mesh_of("2x4"))(*args), jax.jit(fn)(*args))


def test_numpy_arrays_are_refused_and_taken_as_in_jax_jit():
    """What is pinned split could be the whole or a part. What is B, is the whole."""
    mesh = mesh_of("2x4")
    for spec in (
        jax.sharding.PartitionSpec("data"),
        jax.sharding.PartitionSpec(None, ("data", "model")),
    ):
        for jit in (jax.jit, lambda fn, **options: sbp.jit(fn, mesh, **options)):
            with pytest.raises(ValueError, match="make_array_from_process_local_data"):
                jit(times_two, in_shardings=jax.sharding.NamedSharding(mesh, spec))(X)
    parts = sbp.Partial(np.ones((2, 8), np.float32), sbp.NdSbp({"data": sbp.P}))
    refused(
        r"input x is pinned data:P\(sum\)", sbp.jit(times_two, mesh, in_types="data:P(sum)"), parts
    )
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    assert_shards(jax.jit(times_two, in_shardings=whole)(X), X * 2)
    assert_shards(sbp.jit(times_two, mesh, in_shardings=whole)(X), X * 2)


def test_a_shape_in_place_of_an_array():
    for types in (None, "data:S(0)"):
        f = sbp.jit(times_two, mesh_of("2x4"), in_types=types)
        refused("input x is a ShapeDtypeStruct", f, jax.ShapeDtypeStruct((16, 8), np.float32))


@pytest.mark.parametrize("name", ["8", "2x2x2"])
def test_each_process_gives_its_part(name: str):
    f = sbp.jit(lambda x: (x.sum(0), x[::-1]), mesh_of(name), in_types="data:S(0)")
    sharding = f.plan(jax.ShapeDtypeStruct(X.shape, X.dtype)).in_shardings[0]
    rows = sorted(
        {
            (i[0].start or 0, i[0].stop or 16)
            for i in sharding.addressable_devices_indices_map(X.shape).values()
        }
    )
    x = jax.make_array_from_process_local_data(sharding, X[rows[0][0] : rows[-1][1]], X.shape)
    assert_shards(f(x), (X.sum(0), X[::-1]))


@pytest.mark.parametrize(
    "make",
    [
        lambda mesh: [jax.device_put(X, jax.local_devices()[k]) for k in (-1, 0)],
        lambda mesh: [put(X, mesh, *spec) for spec in (("data",), (None, "model"), ("data",))],
    ],
    ids=["of_this_process", "of_all_processes"],
)
def test_arrays_in_another_sharding_are_moved_with_one_warning(make):
    mesh = mesh_of("2x4")
    f = sbp.jit(times_two, mesh, in_types="model:S(0)")
    assert_shards(f(jnp.asarray(X)), X * 2)
    with pytest.warns(sbp.SbpWarning, match="input-moved") as given:
        for x in make(mesh):
            assert_shards(f(x), X * 2)
    assert len(given) == 1


def test_keys():
    keys = jax.random.split(jax.random.key(3), 8)
    draw = jax.vmap(lambda key: jax.random.bits(key, (4,)))
    want = draw(keys)
    f = sbp.jit(draw, mesh_of("2x4"), in_types="data:S(0)")
    assert_shards(f(keys), want, exact=True)
    with pytest.warns(sbp.SbpWarning, match="input-moved"):
        assert_shards(f(jax.device_put(keys, jax.local_devices()[-1])), want, exact=True)


def test_a_warning_is_given_once_in_each_process():
    mesh = mesh_of("8")
    f = sbp.jit(times_two, mesh, in_types="data:S(0)")
    x = put(X[:13], mesh)
    with pytest.warns(sbp.SbpWarning, match="uneven-boundary: input x") as given:
        assert_shards(f(x), X[:13] * 2)
        assert_shards(f(x), X[:13] * 2)
    assert len(given) == 1


def test_results_live_on_the_users_mesh():
    mesh = jax.make_mesh((2, 4), ("data", "model"))  # with Explicit axes
    got = sbp.jit(times_two, mesh, in_types="data:S(0)")(put(X, mesh, "data"))
    assert got.sharding.mesh is mesh or got.sharding.mesh == mesh
    assert_shards(got, X * 2)


def test_a_mesh_of_one_process():
    """It waits for no other process, and may run another program there."""
    here = jax.local_devices()
    mesh = jax.sharding.Mesh(np.array(here), ("data",))
    factor = jax.process_index() + 2
    got = sbp.jit(lambda x: (x * factor).sum(0), mesh, in_types="data:S(0)")(X)
    assert got.sharding.device_set == set(here)
    np.testing.assert_allclose(got, (X * factor).sum(0), rtol=2e-5, atol=2e-5)


W, ROWS = numbers(13, 7), numbers(16, 13, seed=1)
LAYOUTS = [
    ("8", "data:S(0)"),
    ("8", "data:S(1)"),
    ("2x4", "data:S(0)"),
    ("2x4", "data:S(0) model:S(0)"),
    ("2x4", "data:S(1) model:S(0)"),
    ("2x2x2", "data:S(0) model:S(1) expert:S(0)"),
]


def owner(k: int, size: int, counts: list[int]) -> list[int]:
    """On which index of each mesh axis an element of a dim lives."""
    where = []
    for n in counts:
        size = -(-size // n)
        where.append(k // size)
        k %= size
    return where


def own_part(x: np.ndarray, t: str, mesh) -> np.ndarray:
    """The elements that devices of this process hold, found element by element."""
    atoms, names = sbp.parse(t), list(mesh.axis_names)
    here = [
        dict(zip(names, at, strict=True))
        for at in np.ndindex(mesh.devices.shape)
        if mesh.devices[at].process_index == jax.process_index()
    ]
    for dim in range(x.ndim):
        axes = [a for a in names if atoms.get(a) == sbp.S(dim)]
        counts = [mesh.shape[a] for a in axes]
        held = [[device[a] for a in axes] for device in here]
        size = x.shape[dim]
        x = np.take(x, [k for k in range(size) if owner(k, size, counts) in held], dim)
    return x


@pytest.mark.parametrize(("mesh_name", "t"), LAYOUTS)
def test_a_padded_array_of_parts(mesh_name: str, t: str):
    mesh = mesh_of(mesh_name)
    of_part = sbp.Padded.of(own_part(W, t, mesh), t, mesh, shape=W.shape)
    whole = sbp.Padded.of(W, t, mesh)
    for held in (of_part, whole):
        assert held.type == sbp.parse(t) and not held.parts.is_fully_addressable
        assert_shards(held.full(), W, exact=True)
    for a, b in zip(of_part.parts.addressable_shards, whole.parts.addressable_shards, strict=True):
        np.testing.assert_array_equal(a.data, b.data)


@pytest.mark.parametrize(("mesh_name", "t"), [LAYOUTS[0], LAYOUTS[3], LAYOUTS[5]])
def test_training_on_parts(mesh_name: str, t: str):
    """Weights are the whole in every process, or its part; rows of the batch are its own."""
    mesh = mesh_of(mesh_name)

    def step(w, x):
        loss, g = jax.value_and_grad(lambda w: (jnp.tanh(x @ w) ** 2).mean())(w)
        return w - 0.1 * g, loss

    held = sbp.padded(t)
    plan = sbp.jit(step, mesh, (held, "data:S(0)"), (held, None), donate_argnums=0).plan(
        jax.ShapeDtypeStruct(W.shape, W.dtype), jax.ShapeDtypeStruct(ROWS.shape, ROWS.dtype)
    )
    rows = own_part(ROWS, "data:S(0)", mesh)
    for start in (W, own_part(W, t, mesh)):
        w, want = start, W
        for _ in range(2):
            w, x = plan.place(w, rows)
            w, loss = plan(w, x)
            want, wanted = jax.jit(step)(want, ROWS)
            assert_shards(loss, wanted)
        assert isinstance(w, sbp.Padded)
        assert_shards(w.full(), want)


def test_parts_of_even_arrays_and_statics():
    mesh = mesh_of("2x4")
    t = "data:S(0) model:S(1)"
    f = sbp.jit(lambda x, n, y: (x * n).sum(0) + y, mesh, (t, None), static_argnums=1)
    x = numbers(16, 8)
    plan = f.plan(jax.ShapeDtypeStruct(x.shape, x.dtype), 3, 1.0)
    for given in (x, own_part(x, t, mesh)):
        placed = plan.place(given, 3, 1.0)
        assert placed[1:] == (3, 1.0) and placed[0].sharding == plan.in_shardings[0]
        assert_shards(f(*placed), (x * 3).sum(0) + 1.0)


def test_what_is_refused():
    mesh = mesh_of("8")
    f = sbp.jit(lambda w: w * 2, mesh, sbp.padded("data:S(0)"))
    with pytest.raises(ValueError, match=r"input w is pinned data:S\(0\) .*plan\.place"):
        f(W)
    plan = f.plan(jax.ShapeDtypeStruct(W.shape, W.dtype))
    part = own_part(W, "data:S(0)", mesh)
    said = (
        "input w: the array has shape \\(12, 7\\); pass the whole array, of shape \\(13, 7\\), or"
    )
    for args, why in (
        ((W[:12],), f"{said} .* process .*, of shape \\({len(part)}, 7\\)"),
        ((W.astype(np.int32),), "input w is int32, but the plan takes float32"),
        ((W, W), r"takes the arguments \(w\); this call has \(w, args"),
    ):
        refused(why, plan.place, *args)
    (w,) = plan.place(part)
    with pytest.raises(ValueError, match="parts on devices of other processes; call"):
        np.asarray(w)


def test_a_padded_array_of_the_host_is_one_global_value():
    """A saved one says its true shape, so it cannot be taken for a part."""
    alone = jax.sharding.Mesh(np.array(jax.local_devices()), ("data",))  # of this process
    saved = pickle.dumps(jax.tree.map(np.asarray, sbp.Padded.of(W, "data:S(0)", alone)))
    f = sbp.jit(lambda w: w * 2, mesh_of("8"))
    assert_shards(f(pickle.loads(saved)), W * 2)
    with pytest.warns(sbp.SbpWarning, match="input-moved"):
        assert_shards(f(sbp.Padded.of(W, "data:S(0)", alone)), W * 2)


LAST = jax.process_count() - 1


def i_differ() -> bool:
    return jax.process_index() == LAST


def square(x):
    return x @ x.T


def on_rows(fn, **options):
    return sbp.jit(fn, mesh_of("2x4"), in_types="data:S(0)", **options)


CALLS = [
    (
        lambda d: sbp.jit(square, sbp.make_mesh((4, 2) if d else (2, 4), ("data", "model"))),
        lambda d: X,
        "the mesh differs: data=2 model=4 on cpu devices",
    ),
    (
        lambda d: sbp.jit(
            square, jax.sharding.Mesh(np.roll(np.array(jax.devices()), int(d)), ("data",))
        ),
        lambda d: X,
        "the mesh differs: data=8 on cpu devices",
    ),
    (
        lambda d: on_rows((lambda x: jnp.sin(x)) if d else jnp.sin),
        None,
        "the name differs: sin in ",
    ),
    (
        lambda d: on_rows(lambda x: jnp.sin(x) if d else jnp.cos(x)),
        None,
        "the program differs between",
    ),
    (lambda d: on_rows(lambda x: jnp.flip(x, int(d))), None, "the program differs between"),
    (
        lambda d: on_rows(lambda x: x * (X[:1] + d)),
        None,
        "the set of constants differs between",
    ),
    (
        lambda d: on_rows(
            lambda x: sbp.annotate(x * 2, model=sbp.S(1) if d else sbp.B) * 2, out_types="data:S(0)"
        ),
        None,
        "the program differs between",
    ),
    (
        lambda d: on_rows(square, out_types="data:S(0)" if d else "data:S(1)"),
        None,
        "the choice of types differs between",
    ),
    (
        lambda d: on_rows(lambda x: x * 2, out_types="data:S(0)", donate_argnums=(0,) if d else ()),
        None,
        "the set of options differs: donated arguments (), keep",
    ),
    (
        lambda d: sbp.jit(lambda x: x.sum(), mesh_of("2x4")),
        lambda d: X[: 8 if d else 16],
        "the list of arguments differs: x: float32[16, 8]",
    ),
    (
        lambda d: sbp.jit(square, mesh_of("2x4")),
        lambda d: X + d,
        "the argument x differs between",
    ),
]
"""A function and its argument, each by whether this process differs; without an argument, rows of a
global array. And what the error says."""


@pytest.mark.parametrize(("call", "argument", "said"), CALLS)
def test_what_differs_is_named_in_every_process(call, argument, said: str):
    x = argument(i_differ()) if argument else put(X, mesh_of("2x4"), "data")
    error = str(refused(f"(?s)^processes-differ: .*{re.escape(said)}", call(i_differ()), x))
    assert f"process {LAST}" in error
    assert len(set(in_all(error.partition(" with the same ")[2]))) == 1


def test_plans_alike_are_compared_once_and_leave_nothing_behind():
    mesh = mesh_of("2x4")
    group = execute.processes_of(mesh)
    x = put(X, mesh, "data")
    before = execute._RUNS.get(group, 0)
    for k in range(3):
        f = sbp.jit(lambda x, k=k: x * k, mesh)
        for _ in range(3):
            assert_shards(f(x), X * k)
    assert execute._RUNS[group] == before + 3
    multihost_utils.sync_global_devices("compared")
    folder = f"sbp/{execute._hash(map(str, group))}/{before + 1}/"
    assert not _jax.distributed_client().key_value_dir_get(folder)


def test_a_process_that_does_not_come(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(execute, "WAIT_SECONDS", 0)
    f = sbp.jit(lambda x: x + 1, mesh_of("2x4"))
    for early in (True, False):  # the last process comes when the others have given up
        if early != i_differ():
            refused(r"^processes-differ: .*did not make this call within 0 seconds", f, X)
        multihost_utils.sync_global_devices(f"early {early}")
    monkeypatch.undo()
    assert_shards(f(X), X + 1)


def test_the_comparison_can_be_turned_off(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SBP_CHECK_PROCESSES", "0")
    before = dict(execute._RUNS)
    assert_shards(sbp.jit(lambda x: x + 1, mesh_of("8"))(X), X + 1)
    assert before == execute._RUNS


# ---- values and plans ----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:uneven-boundary:sbp.SbpWarning")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mesh_name", MESHES)
def test_values_and_plans(mesh_name: str, name: str):
    mesh = mesh_of(mesh_name)
    case = cases(mesh.axis_names)[name]
    want = jax.jit(case.fn)(*case.args)
    f = sbp.jit(case.fn, mesh, in_types=case.types, donate_argnums=case.donate)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), case.args)
    plan = f.plan(*shapes)
    assert len(set(in_all(str(plan)))) == 1
    assert case.sends <= {
        step.kind for planned in plan.program.boxes() for step in planned.box.steps
    }

    args = jax.tree.map(
        lambda x, sharding: jax.make_array_from_callback(x.shape, sharding, lambda at: x[at]),
        case.args,
        plan.in_shardings,
    )
    got = f(*args)
    assert_shards(got, want, exact=case.exact)
    for number in case.donate:
        assert all(x.is_deleted() for x in jax.tree.leaves(args[number]))
    if case.donate:  # a second step, on what the first returned
        again = f(*got[: len(case.donate)], *args[len(case.donate) :])
        want = jax.jit(case.fn)(*want[: len(case.donate)], *case.args[len(case.donate) :])
        assert_shards(again, want, exact=case.exact)


def test_all_processes_run_a_plan_that_one_wrote(tmp_path_factory: pytest.TempPathFactory):
    mesh = mesh_of("2x4")
    case = cases(mesh.axis_names)["loop"]
    folder = tmp_path_factory.mktemp("plans")
    path = Path(from_first(lambda: str(folder / "loop.json")))
    if is_first():
        sbp.jit(case.fn, mesh).plan(*case.args).save(path)
    multihost_utils.sync_global_devices("written")
    assert_shards(sbp.jit(case.fn, mesh, plan=path)(*case.args), jax.jit(case.fn)(*case.args))


def test_the_recipe(capsys: pytest.CaptureFixture[str]):
    page = Path(__file__).parents[2] / "docs" / "recipes" / "several-processes.md"
    code, shown = re.findall(
        r"^```(?:python|text)\n(.*?)^```$", page.read_text("utf-8"), re.S | re.M
    )
    exec(compile(code, page.name, "exec"), {})
    assert capsys.readouterr().out == (shown if jax.process_index() == 0 else "")


@pytest.mark.parametrize("name", ["8", "2x4"])
@pytest.mark.parametrize("op", ["sum", "max"])
def test_partial_results_come_back_reduced_and_go_in(name: str, op: str):
    mesh = mesh_of(name)
    t = " ".join(f"{axis}:P({op})" for axis in mesh.axis_names)
    spec = tuple(mesh.axis_names)
    fn = (lambda x: x.sum(0)) if op == "sum" else (lambda x: x.max(0))
    y = sbp.jit(fn, mesh, in_types=sbp.NdSbp({a: sbp.S(0) for a in spec}), out_types=t)(
        put(X, mesh, spec)
    )
    assert isinstance(y, sbp.Partial) and y.parts.shape == (*mesh.devices.shape, 8)
    assert_shards(y.reduce(), fn(X))
    assert_shards(sbp.jit(lambda y: y * 2 + 1, mesh, in_types=t)(y), fn(X) * 2 + 1)


def test_callbacks_run_once_over_all_processes(capfd: pytest.CaptureFixture[str]):
    mesh = mesh_of("2x4")
    seen: list[np.ndarray] = []

    def fn(x):
        jax.debug.print("the sum is {}", x.astype(int).sum())
        jax.debug.callback(lambda value: seen.append(np.asarray(value)), x[0])

        def step(total, row):
            jax.debug.callback(lambda value: seen.append(np.asarray(value)), row.sum())
            return total + row.sum(), None

        return jax.lax.scan(step, jnp.float32(0), x)[0]

    x = np.round(X * 4)
    got = sbp.jit(fn, mesh, in_types="data:S(0) model:S(1)")(put(x, mesh, "data", "model"))
    assert_shards(got, x.sum())
    jax.effects_barrier()
    printed = capfd.readouterr().out.count(f"the sum is {int(x.sum())}\n")
    if jax.process_index() == 0:
        assert printed == 1
        assert sorted(v.shape for v in seen) == [()] * 16 + [(8,)]
        np.testing.assert_array_equal(next(v for v in seen if v.shape), x[0])
    else:
        assert not printed and not seen


def test_a_partitioned_callback_sees_the_shards_of_its_process():
    mesh = mesh_of("2x4")
    seen: list[np.ndarray] = []

    def fn(x):
        jax.debug.callback(lambda part: seen.append(np.asarray(part)), x, partitioned=True)
        return x + 1

    x = put(X, mesh, "data", "model")
    sbp.jit(fn, mesh, in_types="data:S(0) model:S(1)")(x)
    jax.effects_barrier()
    want = [np.asarray(s.data) for s in x.addressable_shards]
    assert sorted(v.tobytes() for v in seen) == sorted(v.tobytes() for v in want)


def test_a_pure_callback():
    mesh = mesh_of("8")

    fn = lambda x: jax.pure_callback(lambda v: np.asarray(v) * 2, jax.typeof(x), x).sum(0)

    assert_shards(sbp.jit(fn, mesh, in_types="data:S(0)")(put(X, mesh, "data")), X.sum(0) * 2)


def test_a_region_written_by_hand():
    """One process may plan and check by itself, which tries the claims of the region."""
    x, w = X, numbers(8, 4, seed=3)
    region = sbp.manual(
        lambda x, w: jax.lax.psum(x @ w, "model"),
        in_types=("data:S(0) model:S(1)", "model:S(0)"),
        out_types="data:S(0)",
    )
    f = sbp.jit(lambda x, w: region(x, w) * 2, mesh_of("2x4"))
    if jax.process_index() == 0:
        assert f.check(x, w).ok and f.plan(x, w).cost.bytes_per_device > 0
    assert_shards(f(x, w), x @ w * 2)
