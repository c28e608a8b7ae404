"""Policies that allow more in place of the one to blame."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from sbp.errors import Edit, OptionEdit, SourceEdit
from sbp.infer.accumulation import allowing
from sbp.infer.check import CheckResult
from sbp.infer.request import Request
from sbp.limits import (
    POLICIES,
    Policy,
    boxing_option,
    boxing_text,
    policies_in,
    policy_mark,
    with_policy,
)
from sbp.source.editing import Region, loosened_policies, under_policy
from sbp.source.reader import users_span
from sbp.source.text import contains
from sbp.trace.graph import Graph, Node


@dataclass(frozen=True, slots=True)
class Blamed:
    """The policy that a fault is due to.

    Arguments:
      node: the node that reads under the policy: where the fault shows, if the policy applies
          there.
      policy: which.
      origin: whether it is the program's, that of the mesh axis, or that of a region around the
          node.
    """

    node: Node | None
    policy: Policy
    origin: Literal["program", "axis", "region"]


def blamed(request: Request, fault: CheckResult) -> Blamed | None:
    """The policy that is to blame for a fault: the one where the fault shows, else the one at the
    last place before it. None when no policy is to blame."""
    if not fault.policy:
        return None
    position = request.mesh.names.index(fault.mesh_axis)
    for c in (*fault.sink, *reversed(fault.equations)):
        policy = (
            c.convert.rules.policies[position] if c.convert and not c.convert.unless else "auto"
        )
        if policy != "auto":
            return Blamed(c.node, policy, request.origin(c.node, position))
    return None


@dataclass(frozen=True, slots=True)
class Looser:
    """A policy that allows more.

    Arguments:
      key: which policy, and where.
      text: the change in words.
      edits: the change itself.
      make: a program under it.
      wide: whether it changes more than the line of the fault, so that it is for when nothing less
          gives a typing.
    """

    key: tuple[Any, ...]
    text: str
    edits: tuple[Edit, ...]
    make: Callable[[Request], Request]
    wide: bool = False


def loosened(request: Request, found: Blamed, position: int) -> Iterator[Looser]:
    """The policies that allow more than the one that is to blame, and before them the
    `reduce_dtype` with which a cast needs no conversion. The policy of the program changes on all
    mesh axes without a policy of their own, another policy on one axis.

    Regions have no names, so two regions with one policy look alike in the program. A region's
    policy therefore changes only for the line, or in all regions that set it.

    Arguments:
      request: the program.
      found: the policy that is to blame.
      position: the position of the mesh axis.
    """
    dtype = found.node and allowing(request.graph, found.node)
    if dtype and request.reduce_dtype is None:
        yield Looser(
            ("reduce_dtype", dtype),
            f"reduce_dtype=jnp.{dtype}, so that P(sum) passes the cast and is summed in {dtype}",
            (OptionEdit(option="reduce_dtype", value=dtype),),
            functools.partial(_summed_in, dtype),
        )
    names = request.mesh.names
    per_axis: tuple[Policy | None, ...] = request.axis_policies or (None,) * len(names)
    looser, axis = POLICIES[: POLICIES.index(found.policy)][::-1], names[position]
    line = users_span(found.node) if found.node else None
    if found.origin == "program":
        for policy in looser:
            yield Looser(
                (policy,),
                boxing_text(policy, request.axis_policies, names),
                (boxing_edit(policy, request.axis_policies, names),),
                functools.partial(_based, policy),
            )
        return
    if found.origin == "axis":
        for policy in looser:
            other: tuple[Policy | None, ...] = tuple(
                policy if k == position else p for k, p in enumerate(per_axis)
            )
            yield Looser(
                (axis, policy),
                boxing_text(request.boxing, other, names),
                (boxing_edit(request.boxing, other, names),),
                functools.partial(_on_axes, other),
            )
        return
    if line:
        for policy in looser:
            region = under_policy(line, policy, axis)
            if region is None:
                break
            here = functools.partial(_under, region, policy_mark(policy, axis))
            text = f'put line {line.line} under sbp.policy("{policy}", "{axis}")'
            yield Looser((axis, policy, line), text, region.edits, here)
    for policy in looser:
        text = f'"{policy}" instead of "{found.policy}" on `{axis}` in every sbp.policy'
        edits = _policy_edits(request.graph, found.policy, policy, axis)
        if edits:
            everywhere = functools.partial(_everywhere, found.policy, policy, axis)
            yield Looser((axis, policy, found.policy), text, edits, everywhere, wide=True)


def _policy_edits(graph: Graph, old: Policy, new: Policy, axis: str) -> tuple[SourceEdit, ...]:
    """Edits of all regions that set a policy on a mesh axis; none where the source does not show
    all of them.

    Arguments:
      graph: the program.
      old: the policy of these regions.
      new: the policy in its place.
      axis: the mesh axis.
    """
    concerned = [
        node
        for node in graph.walk()
        if node.stack and any(p == old and a in ("", axis) for p, a in policies_in(node.scope))
    ]
    files = dict.fromkeys(span.file for node in concerned for span in node.stack)
    found = [one for file in files for one in loosened_policies(file, old, new, axis)]
    shown = all(
        any(contains(body, span) for body, _ in found for span in node.stack) for node in concerned
    )
    return tuple(edit for _, edit in found) if shown else ()


def boxing_edit(
    base: Policy, per_axis: Sequence[Policy | None], names: Sequence[str]
) -> OptionEdit:
    """The edit that gives `sbp.jit` these policies.

    Arguments:
      base: the policy of mesh axes without one of their own.
      per_axis: the policy of each mesh axis, or None.
      names: the mesh axes.
    """
    return OptionEdit(option="boxing", value=boxing_option(base, per_axis, names))


def _summed_in(dtype: str, request: Request) -> Request:
    return replace(request, reduce_dtype=dtype)


def _based(policy: Policy, request: Request) -> Request:
    return replace(request, boxing=policy)


def _on_axes(policies: tuple[Policy | None, ...], request: Request) -> Request:
    return replace(request, axis_policies=policies)


def _under(region: Region, mark: str, request: Request) -> Request:
    """The program with a statement, and everything called from it, in a region of its own.

    Arguments:
      region: the statement.
      mark: the mark of the region's policy in a scope.
      request: the program.
    """

    def visit(graph: Graph, inside: bool) -> Graph:
        """The program or a body, which `inside` says is in the region."""
        nodes: list[Node] = []
        for node in graph.nodes:
            here = inside or region.runs(node.stack)
            regions = tuple(visit(r, here) for r in node.regions)
            nodes.append(
                replace(node, scope=f"{node.scope}/{mark}" if here else node.scope, regions=regions)
            )
        return replace(graph, nodes=tuple(nodes))

    return replace(request, graph=visit(request.graph, False))


def _everywhere(old: Policy, new: Policy, axis: str, request: Request) -> Request:
    """The program with another policy in all regions that set one on a mesh axis.

    Arguments:
      old: the policy of these regions.
      new: the policy in its place.
      axis: the mesh axis.
      request: the program.
    """

    def visit(graph: Graph) -> Graph:
        """The program or a body with the new policy."""
        nodes = (
            replace(
                n, scope=with_policy(n.scope, old, new, axis), regions=tuple(map(visit, n.regions))
            )
            for n in graph.nodes
        )
        return replace(graph, nodes=tuple(nodes))

    return replace(request, graph=visit(request.graph))
