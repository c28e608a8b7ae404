"""A `while` with a predicate for each element of a batch as a loop with one predicate.

`jax.vmap` of a loop whose predicate depends on the mapped values gives an equation whose predicate
is an array. Such an equation cannot be written with `jax.lax.while_loop`. JAX lowers it to a loop
that goes on while any element does, and keeps the values of the elements that have ended. The trace
has the latter form: its types and its plan are those of an ordinary loop.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import lax

from sbp import _jax


def has_batched_predicate(eqn: Any) -> bool:
    """Whether an equation is a `while` whose predicate is an array."""
    return eqn.primitive.name == "while" and bool(eqn.params["cond_jaxpr"].out_avals[0].shape)


def with_one_predicate(eqn: Any) -> Any:
    """The closed jaxpr of a `while` that does the same as one with a batched predicate.

    Arguments:
      eqn: the equation; the jaxpr takes its operands and gives its results.
    """
    cond, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    of_cond = eqn.params["cond_nconsts"]
    consts = of_cond + eqn.params["body_nconsts"]

    def loop(*operands: Any) -> list[Any]:
        def predicate(carry: list[Any]) -> jax.Array:
            (goes_on,) = _jax.eval_jaxpr(cond, (*operands[:of_cond], *carry))
            return goes_on

        def step(carry: list[Any]) -> list[Any]:
            goes_on = predicate(carry)
            stepped = _jax.eval_jaxpr(body, (*operands[of_cond:consts], *carry))
            return [_chosen(goes_on, new, old) for new, old in zip(stepped, carry, strict=True)]

        def any_goes_on(carry: list[Any]) -> jax.Array:
            goes_on = predicate(carry)
            return lax.reduce_or(goes_on, range(goes_on.ndim))

        return lax.while_loop(any_goes_on, step, list(operands[consts:]))

    avals = [v.aval for v in eqn.invars]
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in avals]
    with _jax.source_context(eqn.source_info, scope=""):
        closed, _ = _jax.make_jaxpr(loop, shapes)
    return closed


def _chosen(goes_on: jax.Array, new: Any, old: Any) -> Any:
    """`new` where the elements of the batch, the first dims, go on; else `old`."""
    return lax.select(lax.broadcast_in_dim(goes_on, new.shape, range(goes_on.ndim)), new, old)
