"""The table of collectives: the primitives that name mesh axes, and the functions of `jax.lax` that
bind them."""

from __future__ import annotations

from typing import Any, Literal

from sbp.trace.graph import Node

SHARD_MAP = "shard_map"
"""The primitive of `jax.shard_map`."""

AXIS_INDEX = "axis_index"
"""The primitive that gives the index of a device along a mesh axis."""

Collective = Literal["reduce", "scattering", "gathering", "exchange", "permute", "broadcast"]

KINDS: dict[str, Collective] = {
    "psum": "reduce",
    "psum_invariant": "reduce",
    "pmax": "reduce",
    "pmin": "reduce",
    "reduce_scatter": "scattering",
    "all_gather": "gathering",
    "all_gather_invariant": "gathering",
    "all_to_all": "exchange",
    "ppermute": "permute",
    "pbroadcast": "broadcast",
}
"""The collectives that `check_shard_map` and `manual` know, each with its kind."""

SENT_AS: dict[Collective, str] = {
    "reduce": "all_reduce",
    "scattering": "reduce_scatter",
    "gathering": "all_gather",
    "exchange": "all_to_all",
    "permute": "permute",
    "broadcast": "broadcast",
}
"""The name that plans have for each kind of collective."""

NAMED = frozenset(
    {
        *KINDS,
        AXIS_INDEX,
        "ragged_all_to_all",
        "pbroadcast_dynamic",
        "all_gather_reduced",
        "preduced",
    }
)
"""The primitives that name mesh axes and that `is_collective` does not know by the start or end of
their name."""

REDUCTIONS = {"psum": "sum", "psum_invariant": "sum", "pmax": "max", "pmin": "min"}
"""Collectives that reduce to B, with their monoids."""

SUMS = frozenset(op for op, monoid in REDUCTIONS.items() if monoid == "sum")
"""All-reduces by the sum."""

CALLED = {
    "sum": "psum",
    "max": "pmax",
    "min": "pmin",
    "mean": "pmean",
    "scattered": "psum_scatter",
    "gathered": "all_gather",
}
"""The functions of `jax.lax` that call collectives, by what they do."""

REDUCING_CALLS = frozenset(CALLED[name] for name in ("sum", "max", "min", "mean"))
"""The functions of `CALLED` whose result is B."""


def names_of(node: Node) -> Any:
    """The mesh axes that a collective names."""
    return node.params.get("axes", node.params.get("axis_name"))


def is_collective(op: str) -> bool:
    """Whether a primitive names mesh axes.

    >>> is_collective("psum"), is_collective("all_gather_start"), is_collective("dot_general")
    (True, True, False)
    """
    asynchronous = op.endswith(("_start", "_done"))
    unreduced = op.startswith(("unreduced_", "reduced_vary", "vary_unreduced", "psend", "precv"))
    return op in NAMED or asynchronous or unreduced
