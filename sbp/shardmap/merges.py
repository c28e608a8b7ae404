"""Nonlinear functions of one device's part that a later step merges correctly: checks that all
elements are finite, log-sum-exps, means with their counts.

A check of each part becomes "all" or "any" of the checks. The exponential of a shard's log-sum-exp
is a weight: `log(psum(exp(lse)))` is the log-sum-exp of all, and `psum(exp(lse) * out) /
psum(exp(lse))` merges outputs that each shard normalised (flash decoding,
https://arxiv.org/abs/2205.14135, section 3.1). The mean of a shard times its count is the sum of
the shard.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from sbp.shardmap.distribution import UNKNOWN, Distribution, Doubt, LocalValue, unsure
from sbp.shardmap.operators import divides, function_of, sums_dims
from sbp.shardmap.state import State
from sbp.signatures import traits_of
from sbp.trace.graph import Constant, Node
from sbp.types import B, P, Unreduced

_EQUALITY = (np.equal, np.not_equal)

AND, OR, MAX, MIN = (Unreduced(m) for m in ("and", "or", "max", "min"))

_OF_PARTS = ("nonlinear", "product", "ratio", "mixed", "added", "scales")
"""Kinds of faults of values that a device computes from its own part; checking whether such a value
is finite is right."""


def put_right(
    state: State, node: Node, ins: Sequence[LocalValue], given: Sequence[Distribution], axis: int
) -> Distribution | None:
    """The result of an operation that checks a part, or compensates an earlier operation on it;
    None for any other operation.

    Arguments:
      state: the region.
      node: the operation.
      ins: its operands.
      given: their distributions on the mesh axis.
      axis: the mesh axis.
    """
    if any(h.stack for h in given):
        return _of_stack(state, node, given, axis)
    if not any(h.partial or h.fault for h in given):
        return None
    return _check(state, node, ins, given) or _log_sum_exp(node, given) or _weighted(node, given)


# ---- is all of it finite? -----------------------------------------------------------------------


def _check(
    state: State, node: Node, ins: Sequence[LocalValue], given: Sequence[Distribution]
) -> Distribution | None:
    """The result of a check of each part, or of a choice by such a check."""
    first = given[0]
    function, traits = function_of(node), traits_of(node.op)
    if function is np.isfinite and first.fault and first.fault.kind in _OF_PARTS:
        return Distribution(frozenset({AND}), made=first.fault.made, tag="finite")
    if not first.partial and function not in _EQUALITY:
        return None
    if function is np.isfinite:
        return Distribution(frozenset({AND}), made=first.made, tag="finite")
    if function in _EQUALITY:
        if not _is_check(node, ins, given):
            return None
        made = next(h.made for h in given if h.partial)
        finds_it = (function is np.not_equal) == (node.inputs[0] == node.inputs[1])
        return Distribution(frozenset({OR if finds_it else AND}), made=made, tag="finite")
    boolean = state.graph.avals[node.outputs[0]].dtype == np.bool_
    if traits.carries == "rounded" and first.partial in (AND, OR) and not boolean:
        atoms = frozenset({MIN if first.partial == AND else MAX})
        return replace(first, atoms=atoms, tag=first.tag or "test")
    if traits.elementwise and traits.indices:
        return _chosen(node, given)
    joins = traits.reduces in ("and", "or", "max", "min") or (traits.elementwise and boolean)
    return _kept(state, node, given) if joins and first.tag in ("finite", "test") else None


def _chosen(node: Node, given: Sequence[Distribution]) -> Distribution | None:
    """A choice between two values by a check of each part."""
    first = given[0]
    if first.tag != "finite" or len(given) != 3:
        return None
    chosen = given[2 if first.partial == AND else 1]
    if chosen.partial not in (P, MAX, MIN):
        return None
    doubt = chosen.doubt or Doubt(node, "replaced", lasting=True)
    return chosen if chosen.partial in (MAX, MIN) else replace(chosen, doubt=doubt)


def _is_check(node: Node, ins: Sequence[LocalValue], given: Sequence[Distribution]) -> bool:
    """Whether a comparison tests a partial value for NaN or infinity."""
    if not any(h.partial for h in given):
        return False
    if node.inputs[0] == node.inputs[1] and not isinstance(node.inputs[0], Constant):
        return True
    return any(isinstance(v.const, float) and math.isinf(v.const) for v in ins)


def _kept(state: State, node: Node, given: Sequence[Distribution]) -> Distribution | None:
    """The conjunction or disjunction of checks, or of a check and a value that is B."""
    for row in (
        state.reader.rows(node, tuple(h.partial or B for h in given), 2)
        if all(h.partial or B in h.atoms for h in given)
        else ()
    ):
        return Distribution(
            frozenset({row.outs[0]}),
            made=given[0].made,
            tag="finite" if all(h.tag != "test" for h in given) else "test",
        )
    return None


# ---- log-sum-exp --------------------------------------------------------------------------------


def _log_sum_exp(node: Node, given: Sequence[Distribution]) -> Distribution | None:
    """The result of a step of a log-sum-exp that a shard computes with its own maximum."""
    first = given[0]
    function = function_of(node)
    if function is np.log and first.fault and first.fault.kind == "mixed":
        return replace(first, tag="shard-log")
    if (
        len(given) == 1
        and first.tag in ("shard-log", "log-sum-exp", "weight")
        and traits_of(node.op).carries in ("arranged", "copied")
    ):
        return first if first.fault else None
    if function is np.exp and first.tag == "log-sum-exp" and first.fault:
        return Distribution(frozenset({P}), made=first.fault.made, tag="weight")
    if function in (np.add, np.subtract) and len(given) == 2:
        for one, other in (given, given[::-1]) if function is np.add else (given,):
            if (
                one.tag == "shard-log"
                and function is np.add
                and one.fault
                and other.partial == MAX
                and _same(other.made, one.fault.made)
            ):
                return replace(one, tag="log-sum-exp")
            if one.tag == "log-sum-exp" and B in other.atoms:
                return one
    return None


# ---- weights ------------------------------------------------------------------------------------


def _weighted(node: Node, given: Sequence[Distribution]) -> Distribution | None:
    """The product of a shard's own result and the weight of the shard, or a sum of such parts."""
    if function_of(node) is np.add and len(given) == 2:
        return _spread(node, given)
    if not traits_of(node.op).multiplies or len(given) != 2:
        return None
    for i, (one, other) in enumerate((given, given[::-1])):
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


def _spread(node: Node, given: Sequence[Distribution]) -> Distribution | None:
    """The sum of the variance within a shard and the variance of the shards' means."""
    one, other = (h.fault for h in given)
    if (
        one is None
        or other is None
        or {one.kind, other.kind} != {"mixed", "nonlinear"}
        or not _same(one.made, other.made)
    ):
        return None
    return (
        replace(UNKNOWN, doubt=_of_shards(node))
        if one.made is not None and sums_dims(one.made)
        else None
    )


def _same(one: Node | None, other: Node | None) -> bool:
    """Whether two operations are equal, with equal operands and parameters."""
    if one is None or other is None or one is other:
        return one is other
    values = all(isinstance(i, int) for i in (*one.inputs, *other.inputs))
    return values and (one.op, one.inputs, one.params) == (other.op, other.inputs, other.params)


def _of_shards(node: Node) -> Doubt:
    return Doubt(node, "weighs", lasting=True)


# ---- parts side by side -------------------------------------------------------------------------


def _of_stack(
    state: State, node: Node, given: Sequence[Distribution], axis: int
) -> Distribution | None:
    """The result of an operation on stacked parts of an all-gather: a sum along the stacked dim is
    a psum; None for operations that are not followed."""
    stack = given[0].stack
    if stack is None or len(given) != 1:
        return None
    dim, part = stack
    if traits_of(node.op).carries in ("copied", "rounded", "negated"):
        return given[0]
    if not sums_dims(node):
        return None
    if dim not in node.params["axes"]:
        return replace(given[0], stack=(dim - sum(d < dim for d in node.params["axes"]), part))
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


def unknown(node: Node, given: Sequence[Distribution]) -> Distribution:
    """The result of an operation that has an unknown operand."""
    result = unsure(given)
    parts = result.fault is not None and result.fault.kind in _OF_PARTS
    if parts and function_of(node) is np.add and any(h.unknown and not h.doubt for h in given):
        return UNKNOWN  # what came from other devices may be the parts that this one lacks
    routed = any(h.unknown and h.tag == "routed" for h in given)
    if not routed or result.fault:
        return result
    partial = any(h.partial == P and h.made for h in given)
    if traits_of(node.op).multiplies and partial and not node.backward and not result.doubt:
        return replace(result, doubt=Doubt(node, "routed", lasting=True))
    return replace(result, tag="routed")


def off_and_unknown(node: Node, given: Sequence[Distribution]) -> Doubt | None:
    """The doubt about a product or quotient of a value with an excess and one of unknown excess,
    which may compensate it."""
    if (
        node.backward
        or not (traits_of(node.op).multiplies or divides(node))
        or not any(h.excess is None for h in given)
    ):
        return None
    off = next((h for h in given if h.excess and h.cause and B in h.atoms), None)
    if off is None:
        return None
    return Doubt(node, "counted", lasting=True)
