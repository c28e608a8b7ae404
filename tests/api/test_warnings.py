"""Every warning points at a line of the user."""

import inspect
import warnings

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import sbp
from sbp import _jax

ODD = jax.ShapeDtypeStruct((9, 4), jnp.float32)


def mesh():
    return sbp.make_mesh([8], ["d"])


def uneven():
    sbp.jit(jnp.sin, mesh(), in_types=("d:S(0)",)).plan(ODD)


def uneven_when_called():
    sbp.jit(jnp.sin, mesh(), in_types=("d:S(0)",))(jnp.ones((9, 4)))


def uneven_when_checked():
    sbp.jit(jnp.sin, mesh(), out_types="d:S(0)").check(ODD)


def no_rule():
    unknown_p = _jax.Primitive("warned_test")
    unknown_p.def_abstract_eval(lambda x: x)
    sbp.jit(unknown_p.bind, mesh()).plan(ODD)


def ignored():
    sbp.jit(lambda x: jax.device_put(x, jax.devices()[0]), mesh()).plan(ODD)


def unchecked_region():
    groups = lambda x: lax.psum(x, "d", axis_index_groups=[list(range(8))])
    region = sbp.manual(groups, in_types="d:S(0)", out_types="B")
    sbp.jit(lambda x: region(x), mesh()).plan(jax.ShapeDtypeStruct((16, 2), jnp.float32))


def moved():
    whole = jax.sharding.NamedSharding(mesh(), jax.sharding.PartitionSpec(None, None))
    sbp.jit(jnp.sin, mesh(), in_types=("d:S(0)",))(jax.device_put(jnp.ones((16, 4)), whole))


def moved_keys():
    keys = jax.random.split(jax.random.key(3), 8)
    f = sbp.jit(jax.vmap(jax.random.bits), mesh(), in_types=("d:S(0)",))
    f(keys)
    f(jax.device_put(keys, jax.devices()[-1]))


def nested():
    jax.jit(sbp.jit(jnp.sin, mesh()))(jnp.ones(8))


@pytest.mark.parametrize(
    ("act", "code"),
    [
        (uneven, "uneven-boundary"),
        (uneven_when_called, "uneven-boundary"),
        (uneven_when_checked, "uneven-boundary"),
        (no_rule, "missing-rule"),
        (ignored, "ignored-constraint"),
        (unchecked_region, "manual-types"),
        (moved, "input-moved"),
        (moved_keys, "input-moved"),
        (nested, "nested-jit"),
    ],
    ids=lambda x: x.__name__ if callable(x) else x,
)
def test_a_warning_has_the_users_line(act, code):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", sbp.SbpWarning)
        act()
    (said,) = [w for w in found if issubclass(w.category, sbp.SbpWarning)]
    lines, first = inspect.getsourcelines(act)
    last = first + len(lines) - 1
    assert str(said.message).startswith(f"{code}: ")
    assert (said.filename, said.lineno) == (__file__, last)
