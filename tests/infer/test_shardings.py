"""The type of a pin in JAX's own words, against the slices that JAX itself gives each device; and
the errors of a sharding that the mesh cannot have."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec as P

import sbp
from sbp.errors import SbpError

MESH = sbp.make_mesh((2, 4), ("x", "y"))
FLAT = Mesh(np.array(jax.devices()), ("all",))
CUBE = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("a", "b", "c"))
BACK = Mesh(np.array(jax.devices())[::-1].reshape(2, 4), ("x", "y"))
HALF = Mesh(np.array(jax.devices()[4:]), ("y",))
LAID = Mesh(np.array(jax.devices()).reshape(4, 2), ("y", "x"))
TURNED = Mesh(np.array(jax.devices()).reshape(2, 4).T.copy(), ("y", "x"))
ACROSS = Mesh(np.array(jax.devices()).reshape(2, 4).T, ("p", "q"))
IDS = np.vectorize(lambda d: d.id)(MESH.devices)
X = jax.ShapeDtypeStruct((8, 16), jnp.float32)


def constrained(sharding, **options):
    """A value with a sharding, times 2: the plan's type of the pinned value."""
    fn = lambda x: lax.with_sharding_constraint(x + 1, sharding) * 2
    plan = sbp.jit(fn, MESH, **options).plan(X)
    (node,) = [n for n in plan.program.graph.walk() if n.op == "sbp_annotate"]
    return plan, plan.program.typing.type_of(node.outputs[0])


def of_type(t, shape):
    """The slice on each device under a type on `MESH`: written out here, not taken from sbp."""
    found = {}
    for at in np.ndindex(2, 4):
        bounds = [[0, n] for n in shape]
        for axis, size, index in zip(("x", "y"), (2, 4), at, strict=True):
            atom = t.get(axis)
            if isinstance(atom, sbp.S):
                low, high = bounds[atom.dim]
                width = (high - low) // size
                bounds[atom.dim] = [low + index * width, low + (index + 1) * width]
        found[int(IDS[at])] = tuple(map(tuple, bounds))
    return found


SPECS = [
    (a, b)
    for a, b in itertools.product([None, "x", "y", ("x", "y")], repeat=2)
    if not set(np.ravel(a or ())) & set(np.ravel(b or ()))
]


@pytest.mark.parametrize(
    "sharding",
    [
        *(NamedSharding(MESH, P(*spec)) for spec in SPECS),
        NamedSharding(FLAT, P("all")),
        NamedSharding(FLAT, P(None, "all")),
        NamedSharding(CUBE, P("a", ("b", "c"))),
        NamedSharding(CUBE, P(None, ("b", "c"))),
        NamedSharding(ACROSS, P("q", "p")),
        NamedSharding(ACROSS, P(("q", "p"))),
        NamedSharding(TURNED, P("y", "x")),
        NamedSharding(BACK, P()),
    ],
    ids=lambda s: f"{dict(s.mesh.shape)}{s.spec}",
)
def test_the_type_has_the_slices_of_the_sharding(sharding):
    _, t = constrained(sharding)
    assert of_type(t, X.shape) == {
        device.id: tuple(s.indices(n)[:2] for s, n in zip(index, X.shape, strict=True))
        for device, index in sharding.devices_indices_map(X.shape).items()
    }


def test_unreduced_is_partial():
    explicit = AbstractMesh((2, 4), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    parts, rows = P(None, None, unreduced=frozenset({"x"})), P("x", None)

    def fn(x):
        x = jax.sharding.reshard(x, NamedSharding(explicit, parts))
        return jax.sharding.reshard(x, NamedSharding(explicit, rows))

    plan = sbp.jit(fn, MESH).plan(X)
    nodes = [n for n in plan.program.graph.walk() if n.op == "sbp_annotate"]
    types = [plan.program.typing.type_of(n.outputs[0]) for n in nodes]
    assert types == [sbp.parse("x:P(sum)"), sbp.parse("x:S(0)")]


def test_an_open_dim_may_be_split():
    """A dim that is left open may be split further, a dim of None may not."""
    pinned = lambda spec: constrained(NamedSharding(MESH, spec))[1]
    assert pinned(P("x", P.UNCONSTRAINED)) == sbp.parse("x:S(0) y:S(1)")
    assert pinned(P("x", None)) == sbp.parse("x:S(0)")


@pytest.mark.parametrize("boxing", ["auto", "explicit"])
def test_a_dim_of_none_is_whole(boxing):
    # Splits of dim 0 are free here, and those of dim 1 cost an all-to-all or are not allowed.
    sharding = NamedSharding(MESH, P(P.UNCONSTRAINED, None))
    _, t = constrained(sharding, in_types=("x:S(0) y:?",), boxing=boxing)
    assert sbp.S(1) not in (t.get("x"), t.get("y"))


def test_the_report_says_which_dim_is_whole():
    plan, _ = constrained(NamedSharding(MESH, P(P.UNCONSTRAINED, "y")))
    assert "y:S(1), no other split of dim 1" in str(plan.report())


@pytest.mark.parametrize(
    ("sharding", "code", "says"),
    [
        (NamedSharding(MESH, P(("y", "x"))), "bad-placement", "in the order of the mesh"),
        (NamedSharding(BACK, P("x")), "bad-placement", "no type on the mesh"),
        (NamedSharding(LAID, P("y")), "bad-placement", "no type on the mesh"),
        (NamedSharding(HALF, P("y")), "bad-placement", "no type on the mesh"),
        (NamedSharding(HALF, P()), "bad-placement", "no type on the mesh"),
        (NamedSharding(FLAT, P(P.UNCONSTRAINED, "all")), "bad-placement", "no type on the mesh"),
        (NamedSharding(CUBE, P(("c", "b", "a"))), "bad-placement", "no type on the mesh"),
        (
            NamedSharding(AbstractMesh((4, 2), ("x", "y")), P("x")),
            "bad-placement",
            "has 4 devices in the mesh of this sharding, and 2",
        ),
        (
            NamedSharding(AbstractMesh((2, 4), ("x", "z")), P("z")),
            "unknown-axis",
            "no axis 'z'",
        ),
    ],
)
def test_a_sharding_that_the_mesh_cannot_have_is_an_error_at_its_line(sharding, code, says):
    auto = (AxisType.Auto,) * len(sharding.mesh.axis_names)
    mesh = sharding.mesh
    if isinstance(mesh, AbstractMesh):
        mesh = AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=auto)
        sharding = NamedSharding(mesh, sharding.spec)
    report = sbp.jit(lambda x: lax.with_sharding_constraint(x, sharding), MESH).check(X)
    (found,) = report.diagnostics
    assert found.code == code and says in found.title
    assert found.primary is not None and found.primary.span.file == __file__
    with pytest.raises(SbpError, match=code):
        constrained(sharding)
