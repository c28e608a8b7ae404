"""Warnings of shardings, devices and kinds of memory that a program asks for and the trace leaves
out, because `sbp.jit` chooses types and keeps all values in the devices' own memory.

Each line of the user gets one warning. Constraints that JAX adds get none of their own: the
constraint on a cotangent has the line of the user's constraint, and a `reshard` counts only where
the user calls it.
"""

from __future__ import annotations

from typing import Any

from sbp import _jax
from sbp.errors import Span, warn

LEFT_OUT = frozenset(
    {
        "device_put",
        "sharding_constraint",
        "reshard",
        "with_memory_space_constraint",
        "mesh_cast",
        "pvary",
        "pcast",
    }
)
"""Primitives that return their operands in another sharding or memory."""

_CALLS = {
    "sharding_constraint": "with_sharding_constraint",
    "jit": "in_shardings or out_shardings of jax.jit",
    "pjit": "in_shardings or out_shardings of jax.jit",
}
"""The call that a user writes, for primitives with another name."""


class IgnoredPlaces:
    """The shardings, devices and kinds of memory that a program asks for, one for each line."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, Span | None], str] = {}

    def note(self, eqn: Any, span: Span | None) -> None:
        """Notes the places that an equation asks for.

        Arguments:
          eqn: an equation of a primitive of `LEFT_OUT`, or one that calls a jaxpr.
          span: the user's line.
        """
        if eqn.primitive.name == "reshard" and not _jax.called_by_user(eqn.source_info, "reshard"):
            return
        call = _call_of(eqn)
        for place in _jax.places_of(eqn):
            if _jax.names_devices(place):
                self._found.setdefault(("ignored-constraint", span), call)
            if (memory := _jax.memory_of(place)) is not None:
                self._found.setdefault(("ignored-memory", span), f"{call} to {memory} memory")

    def warn(self) -> None:
        """Gives the warnings."""
        for (code, span), what in self._found.items():
            why = (
                "sbp chooses where values lie; pin this one with sbp.annotate"
                if code == "ignored-constraint"
                else "all values stay in the devices' own memory"
            )
            warn(code, what, f"has no effect: {why}", span=span)


def _call_of(eqn: Any) -> str:
    """What the user wrote to get an equation that names a place."""
    name = eqn.primitive.name
    if name in LEFT_OUT and (creator := _jax.numpy_function(eqn.source_info)):
        return f"device= of {creator}"
    if name == "device_put" and not _jax.called_by_user(eqn.source_info, name):
        return "the offload of a checkpoint policy"
    return _CALLS.get(name, name)
