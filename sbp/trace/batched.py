"""Equations that only `jax.vmap` makes, as ordinary ones.

A loop whose predicate depends on the mapped values becomes a `while` whose predicate is an array.
Such an equation cannot be written with `jax.lax.while_loop`. JAX lowers it to a loop that goes on
while any element does, and keeps the values of the elements that have ended. The trace has the
latter form: its types and its plan are those of an ordinary loop.

A collective over the mapped axis, such as the `lax.pmean` of a batch norm, becomes a collective
over a dim of its operand. That is a reduction, and the trace has the reduction.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from sbp import _jax

_OVER_DIMS = {"psum": lax.reduce_sum, "pmax": lax.reduce_max, "pmin": lax.reduce_min}
"""For each collective that may be over dims, the reduction that it then is."""


def of_batch(eqn: Any) -> Any:
    """The closed jaxpr that does the same as an equation that only `jax.vmap` makes; None for other
    equations.

    Arguments:
      eqn: the equation; the jaxpr takes its operands and gives its results.
    """
    name, params = eqn.primitive.name, eqn.params
    if name == "while" and params["cond_jaxpr"].out_avals[0].shape:
        replacement = _with_one_predicate(eqn)
    elif name in _OVER_DIMS and all(isinstance(axis, int) for axis in params["axes"]):
        reduction, dims = _OVER_DIMS[name], params["axes"]

        def replacement(*operands: Any) -> list[Any]:
            # A gradient has such a collective over no dim.
            return [reduction(x, dims) if dims else x for x in operands]
    else:
        return None
    avals = [v.aval for v in eqn.invars]
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in avals]
    with _jax.source_context(eqn.source_info, scope=""):
        closed, _ = _jax.make_jaxpr(replacement, shapes)
    return closed


def _with_one_predicate(eqn: Any) -> Callable[..., list[Any]]:
    """A loop that does the same as a `while` with a batched predicate."""
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

    return loop


def _chosen(goes_on: jax.Array, new: Any, old: Any) -> Any:
    """`new` where the elements of the batch, the first dims, go on; else `old`."""
    return lax.select(lax.broadcast_in_dim(goes_on, new.shape, range(goes_on.ndim)), new, old)
