"""Host memory: values, memory kinds and specs are those of `jax.jit`, the plan names each copy, and
host bytes are counted apart from device bytes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding

import sbp
from sbp.plan.memory import GAPS
from tests.same import assert_same_results, refused

MESHES: Any = {
    "2x4": ((2, 4), ("x", "y")),
    "8": ((8,), ("x",)),
    "2x2x2": ((2, 2, 2), ("x", "y", "z")),
    "4": ((4,), ("x",)),
    "2": ((2,), ("x",)),
}
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
A = np.arange(32.0, dtype=np.float32).reshape(8, 4) / 10


def mesh_of(name="2x4"):
    sizes, names = MESHES[name]
    return Mesh(np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes), names)


MESH = mesh_of()


ROWS = P("x")


on = lambda kind, spec=ROWS, mesh=MESH: NamedSharding(mesh, spec, memory_kind=kind)


def arrays(mesh=MESH):
    """The same array on devices and in host memory."""
    return jax.device_put(A, on("device", mesh=mesh)), jax.device_put(
        A, on("pinned_host", mesh=mesh)
    )


D, H = arrays()

offloads = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=["hidden"],
    offload_src="device",
    offload_dst="pinned_host",
)


def layers(policy):
    layer = lambda x, w: (jnp.sin(checkpoint_name(jnp.tanh(x @ w), "hidden")), None)

    def loss(x):
        ws = jnp.stack([jnp.eye(4) * n for n in (0.5, 1.0, 1.5)])
        return jax.lax.scan(jax.checkpoint(layer, policy=policy), x, ws)[0].sum()

    return lambda d, h: jax.value_and_grad(loss)(d)


def streamed(d, h):
    """Rows come from host memory one by one."""

    def step(total, row):
        row = jax.device_put(row, DEVICE)
        return total + row, jax.device_put(row * 2, HOST)

    return jax.lax.scan(step, jnp.zeros(4), h)


PROGRAMS: Any = {
    "returned there": lambda d, h: jax.device_put(jnp.sin(d), HOST),
    "there and back": lambda d, h: jax.device_put(jax.device_put(jnp.sin(d), HOST), DEVICE) * 2,
    "to a sharding": lambda d, h: jax.device_put(d * 2, on("pinned_host", P(None, "x"))),
    "a tree": lambda d, h: jax.device_put({"a": d * 2, "b": h}, (HOST)),
    "taken from there": lambda d, h: jnp.sin(jax.device_put(h, DEVICE)) + d,
    "computed there": lambda d, h: jnp.cos(h.T * 2) + 1,
    "reduced there": lambda d, h: (h.sum(), h.max(0)),
    "the argument": lambda d, h: h,
    "an update there": lambda d, h: jax.lax.dynamic_update_slice(
        h, jax.device_put(d[:2], HOST), (1, 0)
    ),
    "a slice there": lambda d, h: jax.device_put(jax.lax.dynamic_slice(h, (3, 0), (2, 4)), DEVICE),
    "its gradient": lambda d, h: jax.grad(lambda h: (jax.device_put(h, DEVICE) ** 2).sum())(h),
    "offloaded by name": layers(offloads),
    "offloaded products": layers(
        jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")
    ),
    "streamed": streamed,
    "kept in a loop": lambda d, h: jax.lax.while_loop(
        lambda c: c[0] < 3,
        lambda c: (c[0] + 1, jax.device_put(jax.device_put(c[1], DEVICE) * 2, HOST)),
        (0, jax.device_put(d, HOST)),
    ),
    "in branches": lambda d, h: jax.lax.cond(
        d.sum() > 0,
        lambda d: jax.device_put(d, HOST),
        lambda d: jax.device_put(d * 2, HOST),
        d,
    ),
    "converted on the host": lambda d, h: (
        jax.device_put(sbp.annotate(jax.device_put(sbp.split(d, 0, "x"), HOST), x=sbp.S(1)), DEVICE)
        + 1
    ),
    "of an uneven dim": lambda d, h: (
        jax.device_put(jax.device_put(sbp.annotate(d[:7] * 2, x=sbp.S(0)), HOST), DEVICE) + 1
    ),
    "of a whole number": lambda d, h: jax.device_put(jnp.arange(8), HOST),
}


def compare(got, wanted):
    """Compares values and kinds of memory."""
    assert_same_results(wanted, got, atol=1e-6)
    assert [x.sharding.memory_kind for x in jax.tree.leaves(got)] == [
        x.sharding.memory_kind for x in jax.tree.leaves(wanted)
    ]


@pytest.mark.filterwarnings("ignore::sbp.SbpWarning")
@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_values_and_memories_are_those_of_jax_jit(name, tmp_path):
    fn, args = PROGRAMS[name], arrays()
    jitted = sbp.jit(fn, MESH)
    plan = jitted.plan(*args)
    compare(jitted(*args), jax.jit(fn)(*args))
    assert (plan.cost.host_memory_bytes > 0) == ("<host>" in str(plan))
    plan.save(path := tmp_path / "plan")
    again = sbp.jit(fn, MESH, plan=path).plan(*args)
    assert str(again) == str(plan) and again.cost == plan.cost


@pytest.mark.filterwarnings("ignore::sbp.SbpWarning")
@pytest.mark.parametrize("mesh", ["2", "4", "8", "2x2x2"])
def test_on_other_meshes(mesh):
    mesh = mesh_of(mesh)
    for name in ("offloaded by name", "streamed", "converted on the host", "of an uneven dim"):
        fn, args = PROGRAMS[name], arrays(mesh)
        compare(sbp.jit(fn, mesh)(*args), jax.jit(fn)(*args))


def test_a_conversion_in_host_memory_goes_through_device_memory(tmp_path):
    """A transfer there, the collective, a transfer back: three lines of the plan, and two copies
    of the value in device memory."""
    kinds: Any = {
        "in_shardings": on("pinned_host"),
        "out_shardings": on("pinned_host", P(None, "x")),
    }
    fn = sbp.jit(lambda h: h, MESH, **kinds)
    plan = fn.plan(H)
    assert [line.split("  #")[0].strip() for line in str(plan).splitlines()][1:-1] == [
        "input %0: f32<host>[8,4] x:S(0)",
        "%0': x:S(0) = to_device[](%0)  0 B",
        "%0'': x:S(1) = all_to_all[x](%0')  32 B",
        "%0''': x:S(1) = to_host[](%0'')  0 B",
        "return %0'''",
    ]
    assert plan.cost.peak_memory_bytes == pytest.approx((1 + GAPS) * 2 * 64)
    compare(fn(H), jax.jit(lambda h: h, **kinds)(H))
    plan.save(path := tmp_path / "plan")
    for wrong in ("slice", "to_host"):
        (broken := tmp_path / wrong).write_text(
            path.read_text().replace("to_device[]", f"{wrong}[]")
        )
        refused("line 3 of the plan", sbp.jit(lambda h: h, MESH, plan=broken, **kinds).plan, H)


def test_a_pin_of_a_host_value_is_met_before_the_copy():
    """The value is converted in device memory, since that saves two copies."""
    plan = sbp.jit(PROGRAMS["to a sharding"], MESH).plan(*arrays())
    assert plan.out_shardings == on("pinned_host", P(None, "x"))
    assert not any(s.kind == "to_device" for p in plan.program.boxes() for s in p.box.steps)


BIG = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)


def test_host_bytes_are_counted_apart():
    """Four arrays of 4 MiB, split over 8 devices: two of them live in host memory."""
    rows = NamedSharding(mesh_of("8"), P("x"))
    host = rows.with_memory_kind("pinned_host")

    def update(w, m):
        new = jax.device_put(m, DEVICE) * 0.9 + w
        return w - new, jax.device_put(new, HOST)

    options: Any = {"in_shardings": (rows, host), "out_shardings": (rows, host)}
    each = 1024 * 1024 * 4 / 8
    plan = sbp.jit(update, mesh_of("8"), **options).plan(BIG, BIG)
    assert plan.cost.host_memory_bytes == 2 * each
    types: Any = {"in_types": (rows, host), "donate_argnums": (0, 1)}
    donated = sbp.jit(update, mesh_of("8"), **types).plan(BIG, BIG)
    assert donated.cost.host_memory_bytes == each

    def stays(w, m):
        new = m * 0.9 + w
        return w - new, new

    other = sbp.jit(stays, mesh_of("8"), in_types=rows, donate_argnums=(0, 1)).plan(BIG, BIG)
    assert other.cost.host_memory_bytes == 0
    assert "host memory" in str(donated.report()) and "host memory" not in str(other.report())
    assert "host memory" in str(donated.diff(other))


def test_offloaded_values_leave_the_device_account():
    """What the backward pass of 8 layers keeps is in host memory under the policy that offloads,
    and on the device under the policy that saves."""

    def loss(policy):
        layer = lambda x, _: (jnp.sin(checkpoint_name(jnp.sin(x), "hidden")), None)
        block = jax.checkpoint(layer, policy=policy, prevent_cse=False)
        return jax.grad(lambda x: jax.lax.scan(block, x, None, length=8)[0].sum())

    saves = jax.checkpoint_policies.save_only_these_names("hidden")
    each = 1024 * 1024 * 4 / 8
    kept, offloaded = (
        sbp.jit(loss(policy), mesh_of("8"), in_types="x:S(0)").plan(BIG).cost
        for policy in (saves, offloads)
    )
    assert kept.host_memory_bytes == 0
    assert 8 * each <= offloaded.host_memory_bytes <= 10 * each
    assert kept.peak_memory_bytes - offloaded.peak_memory_bytes >= 7 * each
    limit = offloaded.peak_memory_bytes
    sbp.jit(loss(offloads), mesh_of("8"), in_types="x:S(0)", memory_limit=limit).plan(BIG)
    refused(
        "sbp found no plan that fits in memory_limit",
        sbp.jit(loss(saves), mesh_of("8"), in_types="x:S(0)", memory_limit=limit).plan,
        BIG,
        kind=sbp.SbpTypeError,
    )


def test_arguments_and_results_keep_their_memory():
    twice = sbp.jit(lambda x: x, MESH, out_shardings=on("pinned_host"))
    assert twice(D).sharding == twice(H).sharding == on("pinned_host")
    back = sbp.jit(lambda x: x, MESH, out_shardings=on("device"))
    assert back(D).sharding == back(H).sharding == on("device")
    taken = sbp.jit(lambda x: jax.device_put(x, DEVICE), MESH, in_shardings=on("pinned_host"))
    np.testing.assert_array_equal(taken(H), A)
    assert taken.plan(H).in_shardings == (on("pinned_host", P("x", None)),)
    shapes = jax.ShapeDtypeStruct(A.shape, A.dtype, sharding=on("pinned_host"))
    assert (taken.plan(shapes).in_shardings, taken.eval_shape(H).shape) == (
        taken.plan(H).in_shardings,
        A.shape,
    )


def test_a_state_in_host_memory_comes_back_there():
    """The second call takes what the first one returns, without another plan."""

    def step(w, m):
        m = jax.device_put(jax.device_put(m, DEVICE) + w, HOST)
        return w * 0.5, m

    made = []
    fn = sbp.jit(lambda w, m: (made.append(0), step(w, m))[1], MESH, donate_argnums=(0, 1))
    w, m = arrays()
    w, m = fn(w, m)
    first = len(made)
    w, m = fn(w, m)
    assert len(made) == first and m.sharding.memory_kind == "pinned_host"
    np.testing.assert_allclose(m, A + A + A * 0.5, rtol=1e-6)


def test_numpy_arrays_go_where_they_are_asked():
    """As with `jax.jit`, the function gets them in device memory."""
    fn = sbp.jit(lambda x: x * 2, MESH, in_shardings=on("pinned_host"))
    result = fn(A)
    np.testing.assert_array_equal(result, A * 2)
    assert result.sharding.memory_kind == "device"
    plan = fn.plan(A)
    assert plan.in_shardings[0].memory_kind == "pinned_host"
    np.testing.assert_array_equal(plan(*plan.place(A)), A * 2)


def test_an_array_on_one_device_is_moved_within_host_memory():
    x = jax.device_put(A, SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host"))
    fn = sbp.jit(lambda x: jax.device_put(x, DEVICE) + 1, MESH, in_shardings=on("pinned_host"))
    with pytest.warns(sbp.SbpWarning, match="input-moved"):
        np.testing.assert_array_equal(fn(x), A + 1)


@pytest.mark.parametrize(("has", "asked"), [("device", "pinned_host"), ("pinned_host", "device")])
@pytest.mark.parametrize("option", ["in_shardings", "in_types"])
def test_an_argument_in_another_memory_is_refused(has, asked, option):
    x = jax.device_put(A, on(has))
    with pytest.raises(ValueError, match="Memory kinds"):
        jax.jit(lambda x: x, in_shardings=on(asked))(x)
    options: Any = {option: on(asked)}
    for call in (lambda f: f(x), lambda f: f.plan(x)):
        refused(
            f"^memory-kind: .*input x is in {has} memory",
            call,
            sbp.jit(lambda x: x, MESH, **options),
            kind=ValueError,
        )
    report = sbp.jit(lambda x: x, MESH, in_shardings=on(asked)).check(x)
    assert [d.code for d in report.diagnostics] == ["memory-kind"]


def test_operands_of_two_memories_are_refused_as_jax_refuses_them():
    for jitted in (jax.jit(jnp.add), sbp.jit(jnp.add, MESH)):
        with pytest.raises(ValueError, match="memory_space"):
            jitted(D, H)


def test_a_plan_is_for_one_memory():
    fn = sbp.jit(lambda x: jax.device_put(x, DEVICE) * 2, MESH)
    plan = fn.plan(H)
    np.testing.assert_array_equal(fn(D), fn(H))
    refused(r"but the plan takes .* in pinned_host memory", plan, D)


def test_unpinned_memory_at_the_boundary():
    x = jax.device_put(A, on("unpinned_host"))
    fn, kind = (lambda x: x + 1), on("unpinned_host")
    compare(sbp.jit(fn, MESH)(x), jax.jit(fn)(x))
    wanted = jax.jit(fn, in_shardings=kind, out_shardings=kind)(x)
    compare(sbp.jit(fn, MESH, in_shardings=kind, out_shardings=kind)(x), wanted)
    abstract = jax.sharding.AbstractMesh((2, 4), ("x", "y"))
    kind = NamedSharding(abstract, P("x"), memory_kind="unpinned_host")
    refused(
        r"^memory-kind: .*use memory_kind='pinned_host'",
        lambda: sbp.jit(fn, abstract, hardware="tpu-v5e", out_shardings=kind).plan(BIG),
    )


def test_a_saved_plan_is_for_one_memory(tmp_path):
    fn = lambda x: jax.device_put(x, DEVICE) * 2
    sbp.jit(fn, MESH).plan(H).save(path := tmp_path / "plan")
    refused("another program", sbp.jit(fn, MESH, plan=path).plan, D)


@pytest.mark.filterwarnings("ignore::sbp.SbpWarning")
def test_in_a_region_written_by_hand():
    def body(x, h):
        return jax.device_put(jax.device_put(x * 2, HOST), DEVICE) + jax.device_put(h, DEVICE)

    region = sbp.manual(body, in_types=("x:S(0)", "x:S(0)"), out_types="x:S(0)")
    fn, args = (lambda d, h: region(d, h) + 1), arrays()
    np.testing.assert_allclose(sbp.jit(fn, MESH)(*args), A * 3 + 1, rtol=1e-6)


def test_explicit_axes():
    mesh = jax.make_mesh((2, 4), ("x", "y"))
    d, h = arrays(mesh)

    def fn(d, h):
        assert jax.typeof(h).memory_space is HOST
        return jax.device_put(d + jax.device_put(h, DEVICE), HOST)

    with jax.set_mesh(mesh):
        compare(sbp.jit(fn, mesh)(d, h), jax.jit(fn)(d, h))
