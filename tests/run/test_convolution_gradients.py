"""Gradients of convolutions whose image is split in space: by halo exchange, as the forward pass,
on every mesh and for every kind of window. The results have sizes that no mesh axis divides."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import sbp
from tests.hardware import SENDS_FREELY
from tests.run.test_collectives import assert_within_plan

CASES: dict[str, tuple[tuple[int, ...], tuple[int, int], dict[str, Any]]] = {
    "VALID": ((8,), (32, 9), {"padding": "VALID"}),
    "stride 3": ((4,), (32, 9), {"padding": "VALID", "window_strides": (3, 2)}),
    "padding (1, 1)": ((2,), (18, 8), {"padding": [(1, 1)] * 2, "window_strides": (2, 2)}),
    "lhs_dilation": ((2, 4), (12, 16), {"padding": [(1, 1)] * 2, "lhs_dilation": (2, 2)}),
    "rhs_dilation": ((2, 4), (18, 28), {"padding": "VALID", "rhs_dilation": (2, 3)}),
}


MOVES = [
    *(sbp.forbid(kind) for kind in ("all_to_all", "all_gather", "reduce_scatter")),
    sbp.forbid("all_reduce", above=756),  # the gradient of the kernel on eight devices
]


def normal(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("case", CASES)
def test_gradients_in_space(case):
    """Forward pass and both gradients have a plan in which only halos and sums are sent."""
    sizes, space, options = CASES[case]
    names = ("x", "y")[: len(sizes)]
    conv = functools.partial(lax.conv_general_dilated, window_strides=(1, 1))
    split = " ".join(f"{name}:S({d})" for name, d in zip(names, (2, 3), strict=False))

    def loss(kernel: Any, image: Any) -> Any:
        out: Any = conv(image, kernel, **options)
        return jnp.mean(jnp.tanh(sbp.annotate(out, split, cotangent=split)) ** 2)

    step = jax.value_and_grad(loss, argnums=(0, 1))
    kernel, image = normal(4, 3, 3, 3, seed=0), normal(2, 3, *space, seed=1)
    f = sbp.jit(
        step,
        sbp.make_mesh(sizes, names),
        in_types=("B", split),
        out_types=("B", ("B", split)),
        hardware=SENDS_FREELY,
        budgets=MOVES,
    )
    plan = f.plan(kernel, image)
    convolutions = [o.row for o, _ in plan.program.kernels() if o.node.op == "conv_general_dilated"]
    assert len(convolutions) == 3
    assert all(set(row.kernels) == {"halo"} for row in convolutions), plan
    assert_within_plan(plan, sizes)
    for got, want in zip(
        jax.tree.leaves(f(kernel, image)),
        jax.tree.leaves(jax.jit(step)(kernel, image)),
        strict=True,
    ):
        np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=1e-4, atol=1e-5)
