"""The graph of a function: which equations become nodes, which effects are refused, and calls of
newer releases of JAX."""

import gc
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import sbp
from sbp.trace.build import trace
from sbp.trace.collector import YOUNG, collecting_less
from tests.signatures.calls import primitives

SHAPE = jax.ShapeDtypeStruct((8,), jnp.float32)


def by_platform(x):
    return jax.lax.platform_dependent(x, cpu=jnp.sin, tpu=jnp.cos, default=jnp.tan)


@pytest.mark.parametrize(
    ("platform", "ops"),
    [("cpu", ["sin"]), ("tpu", ["cos"]), ("cuda", ["tan"]), (None, ["platform_index", "cond"])],
)
def test_only_the_branch_of_the_platform_is_traced(platform: str | None, ops: list[str]):
    graph, _ = trace(by_platform, [SHAPE], platform=platform)
    assert [n.op for n in graph.nodes if n.op not in ("clamp", "convert_element_type")] == ops


def test_the_platform_is_that_of_the_mesh():
    """`hardware=` says what is modelled; a mesh of devices runs on its own platform. The gradient
    and the mapped function have the branch too."""
    mesh = jax.make_mesh((8,), ("x",))
    x = jnp.arange(8.0)
    for fn, want in (
        (by_platform, jnp.sin(x)),
        (jax.grad(lambda x: by_platform(x).sum()), jnp.cos(x)),
        (jax.vmap(by_platform), jnp.sin(x)),
    ):
        np.testing.assert_allclose(sbp.jit(fn, mesh, hardware="tpu-v5e")(x), want, rtol=1e-6)
    abstract = jax.sharding.AbstractMesh((8,), ("x",))
    nodes = sbp.jit(by_platform, abstract, hardware="tpu-v5e").plan(SHAPE).program.graph.nodes
    assert [n.op for n in nodes] == ["cos"]


# ---- effects -------------------------------------------------------------------------------------


MESH = sbp.make_mesh((2,), ("x",))
VALUES = np.arange(8, dtype=np.float32)


def test_a_ref_from_outside_is_refused():
    ref = jax.new_ref(jnp.zeros(8))
    with pytest.raises(sbp.SbpError, match=r"^unsupported-effect: .*closes over a Ref"):
        sbp.jit(lambda x: x + ref[...], MESH)(VALUES)
    with pytest.raises(sbp.SbpError, match="input ref is a Ref") as refused:
        sbp.jit(lambda ref: ref[...], MESH)(ref)
    assert isinstance(refused.value, TypeError)


@pytest.mark.filterwarnings("ignore:missing-rule")
def test_a_ref_of_the_program_is_kept():
    def fn(x: Any) -> Any:
        ref = jax.new_ref(x)
        ref[...] = ref[...] * 2
        return ref[...]

    np.testing.assert_array_equal(sbp.jit(fn, MESH)(VALUES), 2 * VALUES)


def test_tokens_are_refused():
    with pytest.raises(sbp.SbpError, match=r"create_token at .* makes a token") as refused:
        sbp.jit(lambda x: lax.after_all(lax.create_token()), MESH)(VALUES)
    assert refused.value.code == "unsupported-effect" and refused.value.span is not None


def test_an_equation_that_evaluates_a_jaxpr_is_a_call():
    """Releases of JAX name its parameter differently."""
    closed = jax.make_jaxpr(lambda x: [jnp.sin(x) * 2])(VALUES)

    def fn(x: Any) -> Any:
        evaluating = primitives()["eval_jaxpr"]
        try:
            return evaluating.bind(x, jaxpr=closed)[0]
        except TypeError:  # a newer release
            return evaluating.bind(x, call_jaxpr=closed)[0]

    np.testing.assert_allclose(sbp.jit(fn, MESH)(VALUES), 2 * np.sin(VALUES), rtol=1e-6)


# ---- collector -----------------------------------------------------------------------------------
# The collector's thresholds are as they were once nobody plans any more.


@pytest.fixture
def thresholds():
    before = gc.get_threshold()
    gc.set_threshold(700, 11, 12)
    yield (700, 11, 12)
    gc.set_threshold(*before)


def test_what_was_comes_back_after_an_error_inside(thresholds):
    with pytest.raises(ZeroDivisionError), collecting_less(), collecting_less():
        assert gc.get_threshold() == (YOUNG, 11, 12)
        _ = 1 / 0
    assert gc.get_threshold() == thresholds


def test_the_last_thread_that_leaves_puts_it_back(thresholds):
    entered, leave = threading.Event(), threading.Event()

    @collecting_less()
    def plan():
        entered.set()
        leave.wait(10)

    with collecting_less():
        other = threading.Thread(target=plan)
        other.start()
        assert entered.wait(10)
    assert gc.get_threshold() == (YOUNG, 11, 12)  # the other is still inside
    leave.set()
    other.join()
    assert gc.get_threshold() == thresholds


@pytest.mark.parametrize("own", [(0, 10, 10), (200_000, 10, 10)])
def test_a_collector_that_is_off_or_comes_less_often_stays_as_it_is(own, thresholds):
    gc.set_threshold(*own)
    with collecting_less():
        assert gc.get_threshold() == own
    assert gc.get_threshold() == own
