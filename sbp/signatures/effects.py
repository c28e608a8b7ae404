"""Callbacks: their operands are B; what only prints runs once, on the first device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax import lax

from sbp.signatures.rule import LocalContext, Rule, add_rule, all_b, bind_with, replicated


def _once(ctx: LocalContext, args: Sequence[Any]) -> list[Any]:
    def run(*operands: Any) -> tuple[Any, ...]:
        bind_with(ctx, operands)
        return ()

    lax.cond(ctx.is_first_device(), run, lambda *operands: (), *args)
    return []


EFFECTS = ("debug_callback", "debug_print", "io_callback")
"""Operations that are there for what they do."""

for _name in EFFECTS:
    add_rule(
        Rule(
            name=_name,
            rows=lambda op: (all_b(op),),
            local=_once,
            reason="an effect happens once and sees whole values",
        )
    )

replicated("pure_callback", reason="the host function sees whole values")
