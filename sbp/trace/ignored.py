"""What the trace leaves out of a program: shardings, devices and kinds of memory that the user asks
for. `sbp.jit` chooses types itself, so each of these gets a warning with its line.

What JAX adds by itself is not the user's: the constraint on a cotangent has the line of the
constraint, and one line gets one warning; a `reshard` that no line of the user calls gets none.
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
"""Primitives that compute nothing and say where or how a value lies."""

_CALLS = {
    "sharding_constraint": "with_sharding_constraint",
    "jit": "in_shardings or out_shardings of jax.jit",
    "pjit": "in_shardings or out_shardings of jax.jit",
}
"""What the user writes for a primitive, where that is not its name."""


class IgnoredPlaces:
    """The places that a program asks for, in the order of its equations, one for each line."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, Span | None], str] = {}

    def note(self, eqn: Any, span: Span | None) -> None:
        """Looks at an equation.

        Arguments:
          eqn: an equation that the trace leaves out, or the call of a jit.
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
