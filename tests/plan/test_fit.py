"""The search for a plan under a memory limit, and what the report says of it."""

import functools

import jax
import jax.numpy as jnp
import pytest

import sbp
from sbp.plan import fit

SQUARE = jax.ShapeDtypeStruct((8192, 8192), jnp.float32)
WHOLE = 8192 * 8192 * 4


@functools.cache
def product(memory_limit):
    mesh = jax.sharding.AbstractMesh((4, 4), ("x", "y"))
    return sbp.jit(lambda a, b: a @ b, mesh, hardware="tpu-v5p", memory_limit=memory_limit).plan(
        SQUARE, SQUARE
    )


def test_the_prices_that_a_memory_limit_tries_are_said():
    tight = product(WHOLE / 2)
    count = tight.program.memory_prices
    assert tight.cost.peak_memory_bytes <= WHOLE / 2 and count > fit.HALVINGS
    assert f"so sbp tried {count} prices per byte of memory" in tight.report().text(400)


def test_the_constraints_are_written_down_once_for_all_prices(monkeypatch):
    asked = []

    def counted(request):
        asked.append(request)  # a list keeps them alive, so that no two have one id
        return written(request)

    written = fit.constraints_of
    monkeypatch.setattr(fit, "constraints_of", counted)
    program = product.__wrapped__(WHOLE / 2).program
    assert sum(r is program.request for r in asked) == 1 < program.memory_prices


@pytest.mark.parametrize("limit", [None, 1e12])
def test_without_a_limit_that_binds_no_price_is_tried(limit):
    free = product(limit)
    assert free.program.memory_prices == 0 and "per byte of memory" not in free.report().text(400)


def test_the_bound_holds_whatever_the_memory():
    """A bound on seconds and a price of memory together says nothing of plans that take more memory
    and fit the limit, too."""
    free, tight = product(None), product(WHOLE / 2)
    assert tight.program.typing.lower_bound == free.program.typing.lower_bound
    assert not tight.program.typing.optimal
    assert "proved cheapest" in free.report().text(400)
    assert "proved cheapest" not in tight.report().text(400)
