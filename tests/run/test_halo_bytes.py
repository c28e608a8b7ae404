"""Halos along two dims over two mesh axes: the second exchange carries what the first one has
brought, and the plan counts it."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import sbp
from sbp import S
from tests.hardware import SENDS_FREELY
from tests.run.test_collectives import assert_within_plan, compiled_bytes, planned_bytes


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def conv(window, strides=(1, 1), padding: Any = "SAME", **options):
    return lambda x: lax.conv_general_dilated(
        x, jnp.asarray(normal(4, 4, *window, seed=1)), strides, padding, **options
    )


CASES = {
    "convolution": (conv((3, 3)), (2, 4, 16, 16)),
    "transposed dims": (
        lambda x: jnp.swapaxes(conv((5, 3))(jnp.swapaxes(x, 2, 3)), 2, 3),
        (2, 4, 16, 16),
    ),
    "strided": (conv((5, 5), (2, 2)), (2, 4, 32, 32)),
    "dilated": (
        conv((3, 3), (3, 2), [(2, 2), (1, 3)], lhs_dilation=(3, 2), rhs_dilation=(1, 2)),
        (1, 4, 16, 16),
    ),
    "pooling": (
        lambda x: lax.reduce_window(x, -np.inf, lax.max, (1, 1, 3, 3), (1, 1, 2, 2), "SAME"),
        (2, 4, 32, 32),
    ),
    "padding": (
        lambda x: lax.pad(x, np.float32(0), [(0, 0, 0), (0, 0, 0), (3, 5, 0), (2, 6, 1)]),
        (2, 4, 16, 16),
    ),
    "reversal": (lambda x: lax.rev(x, (2, 3)), (2, 4, 16, 16)),
}


@pytest.mark.parametrize("dims", [(2, 3), (3, 2)], ids=["rows, columns", "columns, rows"])
@pytest.mark.parametrize("case", CASES)
def test_the_plan_counts_what_two_halos_send(case, dims):
    fn, shape = CASES[case]
    mesh = sbp.make_mesh((2, 4), ("x", "y"))

    def split(v):
        return sbp.annotate(v, x=S(dims[0]), y=S(dims[1]))

    f = sbp.jit(lambda x: split(fn(split(x))), mesh, hardware=SENDS_FREELY)
    x = normal(*shape)
    plan = f.plan(x)
    assert any("halo" in o.row.kernels for o, _ in plan.program.kernels())
    assert_within_plan(plan, (2, 4))
    assert sum(compiled_bytes(plan, (2, 4)).values()) >= 0.9 * sum(planned_bytes(plan).values())
    np.testing.assert_allclose(np.asarray(f(x)), np.asarray(fn(x)), rtol=1e-4, atol=1e-4)
