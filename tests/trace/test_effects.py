"""Values that are no arrays, and calls of newer releases of JAX."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import sbp
from tests.signatures.calls import primitives

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


def test_an_equation_that_evaluates_a_jaxpr_is_a_call():
    """Releases of JAX name its parameter differently."""
    closed = jax.make_jaxpr(lambda x: [jnp.sin(x) * 2])(X)

    def fn(x: Any) -> Any:
        evaluating = primitives()["eval_jaxpr"]
        try:
            return evaluating.bind(x, jaxpr=closed)[0]
        except TypeError:  # a newer release
            return evaluating.bind(x, call_jaxpr=closed)[0]

    np.testing.assert_allclose(sbp.jit(fn, MESH)(X), 2 * np.sin(X), rtol=1e-6)
