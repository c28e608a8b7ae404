"""Callbacks. Their operands are B. A callback that is called for its effect runs once, on the first
device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax import lax

from sbp.signatures.rule import LocalContext, Rule, add_rule, all_b, bind_with, replicated
from sbp.signatures.traits import Traits


def _on_first_device(ctx: LocalContext, args: Sequence[Any]) -> list[Any]:
    """Runs the callback on the first device of the mesh only."""

    def run(*operands: Any) -> tuple[Any, ...]:
        bind_with(ctx, operands)
        return ()

    lax.cond(ctx.is_first_device(), run, lambda *operands: (), *args)
    return []


for _name in ("debug_callback", "debug_print", "io_callback"):
    add_rule(
        Rule(
            name=_name,
            rows=lambda op: (all_b(op),),
            traits=Traits(effect=True, opaque=_name == "io_callback"),
            local=_on_first_device,
            reason="an effect happens once and sees whole values",
        )
    )

replicated(
    "pure_callback",
    reason="the host function sees whole values",
    traits=Traits(opaque=True),
)
