"""The primitives that only call a jaxpr, and their parameters."""

from __future__ import annotations

from typing import Any

from sbp.errors import SbpInternalError
from sbp.trace.graph import Operand

INLINED = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "call": "call_jaxpr",
    "eval_jaxpr": "jaxpr call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    "custom_lin": "jaxpr",
    "remat": "jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "composite": "jaxpr call_jaxpr",
    "custom_vmap_call": "call",
    "linear_call": "callee",
    "xla_metadata_call": "jaxpr",
}
"""Primitives that only call a jaxpr, with the name of the parameter that is the jaxpr. Releases of
JAX differ; where a parameter has several names, blanks separate them."""

REMAT = frozenset({"remat", "remat2", "checkpoint"})


def solve_operands(lengths: Any, operands: tuple[Operand, ...]) -> tuple[Operand, ...]:
    """The operands of a custom_linear_solve that its solve reads: the constants of the solve and
    the right-hand sides. Derivatives read the others."""
    before = lengths.matvec + lengths.vecmat
    return operands[before : before + lengths.solve] + operands[sum(lengths) :]


def flags_of(prevent: Any, operands: tuple[Operand, ...]) -> tuple[bool, ...]:
    """For each operand of a rematerialised computation, whether `prevent_cse` keeps XLA from
    merging it with the forward one."""
    if isinstance(prevent, bool):
        return (prevent,) * len(operands)
    if len(prevent) != len(operands):
        raise SbpInternalError(f"prevent_cse has {len(prevent)} flags for {len(operands)} operands")
    return tuple(bool(p) for p in prevent)
