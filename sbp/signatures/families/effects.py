"""Callbacks. A callback that is called for its effect sees whole values and runs
once, on the first device; with `partitioned=True` it runs on every device and sees the shard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax import lax

from sbp.signatures.rule import LocalContext, Op, Row, Rule, add_rule, all_b, bind_with, replicated
from sbp.signatures.traits import Traits
from sbp.types import Split


def _callback_rows(op: Op) -> tuple[Row, ...]:
    """Whole operands. A partitioned callback with one operand also takes even shards: padding is
    never observable, and neither are parts of a sum."""
    if not op.params.get("partitioned") or len(op.ins) != 1:
        return (all_b(op),)
    dims = [d for d, size in enumerate(op.ins[0].shape) if size and op.divides(size)]
    return (all_b(op), *(Row((Split(d),), ()) for d in dims))


def _call(ctx: LocalContext, args: Sequence[Any]) -> list[Any]:
    """Runs the callback: a partitioned one on every device, another one on the first."""

    def run(*operands: Any) -> tuple[Any, ...]:
        bind_with(ctx, operands)
        return ()

    if ctx.params.get("partitioned"):
        run(*args)
    else:
        lax.cond(ctx.is_first_device(), run, lambda *operands: (), *args)
    return []


for _name in ("debug_callback", "debug_print", "io_callback"):
    add_rule(
        Rule(
            name=_name,
            rows=_callback_rows,
            traits=Traits(effect=True, opaque=_name == "io_callback"),
            local=_call,
            reason="an effect happens once and sees whole values",
        )
    )


replicated(
    "pure_callback",
    reason="the host function sees whole values",
    traits=Traits(opaque=True),
)
