"""Values that are no arrays, and calls of newer releases of JAX."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import sbp

MESH = sbp.make_mesh((2,), ("x",))
X = np.arange(8, dtype=np.float32)


def test_a_ref_from_outside_is_refused():
    ref = jax.new_ref(jnp.zeros(8))
    with pytest.raises(sbp.SbpError, match="closes over a Ref") as refused:
        sbp.jit(lambda x: x + ref[...], MESH)(X)
    assert refused.value.code == "unsupported-effect"
    with pytest.raises(sbp.SbpError, match="input ref is a Ref") as refused:
        sbp.jit(lambda ref: ref[...], MESH)(ref)
    assert isinstance(refused.value, TypeError)


@pytest.mark.filterwarnings("ignore:missing-rule")
def test_a_ref_of_the_program_is_kept():
    def fn(x: Any) -> Any:
        ref = jax.new_ref(x)
        ref[...] = ref[...] * 2
        return ref[...]

    np.testing.assert_array_equal(sbp.jit(fn, MESH)(X), 2 * X)


def test_tokens_are_refused():
    with pytest.raises(sbp.SbpError, match=r"create_token at .* makes a token") as refused:
        sbp.jit(lambda x: lax.after_all(lax.create_token()), MESH)(X)
    assert refused.value.code == "unsupported-effect" and refused.value.span is not None


def test_the_linear_part_of_remat_in_a_scan():
    """Newer releases of JAX evaluate a jaxpr in one equation there."""
    step = jax.checkpoint(lambda c, _: (jnp.sin(c), None))
    _, linear = jax.linearize(lambda x: lax.scan(step, x, None, length=3)[0], X)
    np.testing.assert_allclose(sbp.jit(linear, MESH)(X), linear(X), rtol=1e-5)
