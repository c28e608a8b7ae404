"""Values and gradients of the reference programs on every mesh equal `jax.jit` on one device."""

import itertools

import jax
import pytest

import sbp
from tests.run.programs import CASES, MESHES, NAMES, Case, arguments, assert_same, function_of
from tests.slices import sliced

pytestmark = pytest.mark.laws

_WANTED = {}


def wanted(case: Case):
    """The single-device result: annotations are the identity outside sbp.jit."""
    if case.name not in _WANTED:
        _WANTED[case.name] = jax.jit(function_of(case, NAMES))(*arguments(case))
    return _WANTED[case.name]


def shown(x: object) -> str:
    return x.name if isinstance(x, Case) else "x".join(map(str, x)) if isinstance(x, tuple) else ""


@pytest.mark.parametrize(
    ("case", "shape"), sliced(itertools.product(CASES, MESHES), 1 / 2), ids=shown
)
def test_equals_one_device(case: Case, shape: tuple[int, ...]):
    names = NAMES[: len(shape)]
    f = sbp.jit(function_of(case, names), sbp.make_mesh(shape, names))
    assert_same(f(*arguments(case)), wanted(case))


@pytest.mark.parametrize("shape", [(8,), (2, 4)], ids=["8", "2x4"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_all_inputs_split(case: Case, shape: tuple[int, ...]):
    """The same from other types: every first dim that divides is split at the boundary, so
    conversions and uneven slices run too."""
    names = NAMES[: len(shape)]
    mesh = sbp.make_mesh(shape, names)

    def split_first(path, leaf):
        total = 1
        atoms = {}
        for name, n in zip(names, shape, strict=True):
            if leaf.shape and leaf.shape[0] % (total * n) == 0:
                atoms[name], total = sbp.S(0), total * n
        return sbp.NdSbp(atoms)

    f = sbp.jit(function_of(case, names), mesh, in_types=(split_first,) * len(case.shapes))
    assert_same(f(*arguments(case)), wanted(case))
