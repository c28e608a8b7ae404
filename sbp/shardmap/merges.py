"""What a device makes of its own part alone and a later step puts right: checks that all is finite,
log-sum-exps, means with their counts.

A check of each part becomes "all" or "any" of the checks. A log-sum-exp of one shard, shifted by
the shard's own maximum, is a weight
once it is exponentiated: `log(psum(exp(lse)))`, and `psum(exp(lse) * out) / psum(exp(lse))` for
what was normalised by it (flash decoding, https://arxiv.org/abs/2205.14135, section 3.1). The mean
of a shard times its count is the shard's sum again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from sbp.shardmap.distribution import UNKNOWN, Doubt, Distribution, LocalValue, unsure
from sbp.shardmap.state import State
from sbp.signatures import traits_of
from sbp.trace.graph import Constant, Node
from sbp.types import B, P, Unreduced

AND, OR, MAX, MIN = (Unreduced(m) for m in ("and", "or", "max", "min"))

_OF_PARTS = ("nonlinear", "product", "ratio", "mixed", "added", "scales")
"""Faults of what a device computed from its own part: it may well ask whether that is finite."""


def put_right(
    state: State, node: Node, ins: Sequence[LocalValue], held: Sequence[Distribution], axis: int
) -> Distribution | None:
    """The result of an operation that checks a part, or makes good what was done to it; None for
    any other one.

    Arguments:
      state: the region.
      node: the operation.
      ins: its operands.
      held: how they are held on the mesh axis.
      axis: the mesh axis.
    """
    if any(h.stack for h in held):
        return _of_stack(state, node, held, axis)
    if not any(h.partial or h.fault for h in held):
        return None
    return _check(state, node, ins, held) or _log_sum_exp(node, held) or _weighted(node, held)


# ---- is all of it finite? -----------------------------------------------------------------------


def _check(
    state: State, node: Node, ins: Sequence[LocalValue], held: Sequence[Distribution]
) -> Distribution | None:
    """A check of each part, or a choice by one."""
    first = held[0]
    if node.op == "is_finite" and first.fault and first.fault.kind in _OF_PARTS:
        return Distribution(frozenset({AND}), made=first.fault.made, tag="finite")
    if not first.partial and node.op not in ("eq", "ne"):
        return None
    match node.op:
        case "is_finite":
            return Distribution(frozenset({AND}), made=first.made, tag="finite")
        case "eq" | "ne" if _is_check(node, ins, held):
            made = next(h.made for h in held if h.partial)
            finds_it = (node.op == "ne") == (node.inputs[0] == node.inputs[1])
            return Distribution(frozenset({OR if finds_it else AND}), made=made, tag="finite")
        case "convert_element_type" if (
            first.partial in (AND, OR) and state.graph.avals[node.outputs[0]].dtype != np.bool_
        ):
            return replace(
                first,
                atoms=frozenset({MIN if first.partial == AND else MAX}),
                tag=first.tag or "test",
            )
        case "and" | "or" | "not" | "reduce_and" | "reduce_or" | "reduce_min" | "reduce_max" if (
            first.tag in ("finite", "test")
        ):
            return _kept(state, node, held)
        case "select_n" if first.tag == "finite" and len(held) == 3:
            chosen = held[2 if first.partial == AND else 1]
            if chosen.partial not in (P, MAX, MIN):
                return None
            doubt = Doubt(node, "replaced", lasting=True)
            return (
                chosen
                if chosen.partial in (MAX, MIN)
                else replace(chosen, doubt=chosen.doubt or doubt)
            )
        case _:
            return None


def _is_check(node: Node, ins: Sequence[LocalValue], held: Sequence[Distribution]) -> bool:
    """Whether a comparison asks of a partial value if it is NaN, or infinite."""
    if not any(h.partial for h in held):
        return False
    if node.inputs[0] == node.inputs[1] and not isinstance(node.inputs[0], Constant):
        return True
    return any(isinstance(v.const, float) and math.isinf(v.const) for v in ins)


def _kept(state: State, node: Node, held: Sequence[Distribution]) -> Distribution | None:
    """Checks joined: of the same kind, or with what every device has."""
    for row in (
        state.reader.rows(node, tuple(h.partial or B for h in held), 2)
        if all(h.partial or B in h.atoms for h in held)
        else ()
    ):
        return Distribution(
            frozenset({row.outs[0]}),
            made=held[0].made,
            tag="finite" if all(h.tag != "test" for h in held) else "test",
        )
    return None


# ---- log-sum-exp --------------------------------------------------------------------------------


def _log_sum_exp(node: Node, held: Sequence[Distribution]) -> Distribution | None:
    """The log of a sum of exponentials that were shifted by the shard's own maximum, and what is
    made of it."""
    first = held[0]
    if node.op == "log" and first.fault and first.fault.kind == "mixed":
        return replace(first, tag="log")
    if (
        len(held) == 1
        and first.tag in ("log", "lse", "weight")
        and traits_of(node.op).carries in ("arranged", "copied")
    ):
        return first if first.fault else None
    if node.op == "exp" and first.tag == "lse" and first.fault:
        return Distribution(frozenset({P}), made=first.fault.made, tag="weight")
    if node.op in ("add", "sub") and len(held) == 2:
        for one, other in (held, held[::-1]) if node.op == "add" else (held,):
            if (
                one.tag == "log"
                and node.op == "add"
                and one.fault
                and other.partial == MAX
                and _same(other.made, one.fault.made)
            ):
                return replace(one, tag="lse")
            if one.tag == "lse" and B in other.atoms:
                return one
    return None


# ---- weights ------------------------------------------------------------------------------------


def _weighted(node: Node, held: Sequence[Distribution]) -> Distribution | None:
    """What a device found of its own shard, times the weight of the shard."""
    if node.op in ("add", "add_any") and len(held) == 2:
        return _spread(node, held)
    if not traits_of(node.op).multiplies or len(held) != 2:
        return None
    for i, (one, other) in enumerate((held, held[::-1])):
        fault = one.fault
        if fault is None or other.partial != P or other.fault:
            continue
        if fault.kind == "ratio" and _same(other.made, fault.made):
            direct = node.inputs[i] in fault.node.outputs
            return Distribution(
                frozenset({P}), made=other.made, doubt=None if direct else _of_shards(node)
            )
        if fault.kind == "mixed" and other.tag == "weight":
            return replace(
                UNKNOWN,
                made=other.made,
                doubt=None if _same(other.made, fault.made) else _of_shards(node),
            )
    return None


def _spread(node: Node, held: Sequence[Distribution]) -> Distribution | None:
    """The spread within a shard and that of the shards' means: the two parts of a variance."""
    one, other = (h.fault for h in held)
    if (
        one is None
        or other is None
        or {one.kind, other.kind} != {"mixed", "nonlinear"}
        or not _same(one.made, other.made)
    ):
        return None
    return (
        replace(UNKNOWN, doubt=_of_shards(node))
        if one.made is not None and one.made.op == "reduce_sum"
        else None
    )


def _same(one: Node | None, other: Node | None) -> bool:
    """Whether two operations compute the same of the same."""
    if one is None or other is None or one is other:
        return one is other
    values = all(isinstance(i, int) for i in (*one.inputs, *other.inputs))
    return values and (one.op, one.inputs, one.params) == (other.op, other.inputs, other.params)


def _of_shards(node: Node) -> Doubt:
    return Doubt(node, "weighs", lasting=True)


# ---- parts side by side -------------------------------------------------------------------------


def _of_stack(
    state: State, node: Node, held: Sequence[Distribution], axis: int
) -> Distribution | None:
    """Parts that a gather put side by side: along that dim they are reduced as a psum does; of
    anything else nothing is followed."""
    stack = held[0].stack
    if stack is None or len(held) != 1:
        return None
    dim, part = stack
    if traits_of(node.op).carries in ("copied", "rounded", "negated"):
        return held[0]
    if node.op != "reduce_sum":
        return None
    if dim not in node.params["axes"]:
        return replace(held[0], stack=(dim - sum(d < dim for d in node.params["axes"]), part))
    if part.fault:
        doubt = Doubt(node, "added-shards", lasting=True, axis=state.names[axis])
        return Distribution(frozenset({B}), None, reduced=node, doubt=doubt)
    if part.partial == P:
        cause = replace(part.cause, made=node) if part.cause and part.excess else None
        return Distribution(
            frozenset({B}), part.excess, made=part.made, reduced=node, cause=cause, doubt=part.doubt
        )
    return None


# ---- what is not known --------------------------------------------------------------------------


def unknown(node: Node, held: Sequence[Distribution]) -> Distribution:
    """The result of an operation that has an operand of which nothing is known."""
    result = unsure(held)
    routed = any(h.unknown and h.tag == "routed" for h in held)
    if not routed or result.fault:
        return result
    partial = any(h.partial == P and h.made for h in held)
    if traits_of(node.op).multiplies and partial and not node.backward and not result.doubt:
        return replace(result, doubt=Doubt(node, "routed", lasting=True))
    return replace(result, tag="routed")


def off_and_unknown(node: Node, held: Sequence[Distribution]) -> Doubt | None:
    """Of a product: that one operand is too large or too small, and of the other it is not known
    whether it makes that good."""
    if (
        node.backward
        or not (traits_of(node.op).multiplies or node.op == "div")
        or not any(h.excess is None for h in held)
    ):
        return None
    off = next((h for h in held if h.excess and h.cause and B in h.atoms), None)
    if off is None:
        return None
    return Doubt(node, "counted", lasting=True)
