"""A program planned with one thing changed: its cost, or why it has no plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sbp.explain.pinning import Types
from sbp.explain.subjects import Subject
from sbp.infer.check import check
from sbp.infer.request import Request
from sbp.infer.space import Code
from sbp.limits import Policy
from sbp.plan.fit import best_program
from sbp.plan.program import Cost, Program
from sbp.trace.graph import Node
from sbp.types import NdSbp

RefusalKind = Literal[
    "joint", "memory", "exceeds memory", "rows", "result", "reader", "not there", "no row"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a changed program has no plan.

    Arguments:
      kind: "joint": each mesh axis has types, all together have none; "memory": no plan fits the
        memory limit; "exceeds memory": the cheapest plan does not fit it; "rows": no row reaches
        the type; "result": the program may not return the value so; "reader": a node does not take
        what arrives; "not there": the conversion reads a node that the program has only after
        conversions were taken together; "no row": no row of the reader takes the other type.
      mesh_axis: the mesh axis without types; empty where no single axis is to blame.
      node: the reader.
      arriving: the codes in which the value could arrive at the reader or the result.
      boxing, axis_policies, axes: the policy, the policies of mesh axes and the names of the axes,
        where the policy is to blame; `boxing` is None elsewhere.
    """

    kind: RefusalKind
    mesh_axis: str = ""
    node: Node | None = None
    arriving: tuple[Code, ...] = ()
    boxing: Policy | None = None
    axis_policies: tuple[Policy | None, ...] = ()
    axes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of planning a changed program.

    Arguments:
      type: the type of the value in that plan; None when there is no plan.
      cost: of a call of that plan; None when there is no plan.
      refusal: why there is no plan; None when there is one.
    """

    type: NdSbp | None = None
    cost: Cost | None = None
    refusal: Refusal | None = None

    @classmethod
    def of(cls, found: Program | Refusal, request: Request, subject: Subject) -> Outcome:
        """The outcome for one value.

        Arguments:
          found: the plan of the changed program, or why there is none.
          request: the program before the change.
          subject: the value.
        """
        if isinstance(found, Refusal):
            return cls(refusal=found)
        types = Types.of(found, request.graph)
        return cls(type=types.type_of(subject), cost=found.cost)


def planned(request: Request) -> Program | Refusal:
    """The plan of a changed program, or why it has none."""
    program = best_program(request)
    return refusal(request) if program is None else program


def refusal(request: Request) -> Refusal:
    """Why a program has no plan, as far as one mesh axis shows it."""
    fault = check(request)
    if fault.status != "unsat":
        return Refusal(kind="joint" if request.memory_limit is None else "memory")
    axis = fault.mesh_axis
    boxing = request.boxing if fault.policy else None
    policies, axes = request.axis_policies, request.mesh.names
    if not fault.sink:
        return Refusal(
            kind="rows", mesh_axis=axis, boxing=boxing, axis_policies=policies, axes=axes
        )
    node = fault.sink[0].node
    return Refusal(
        kind="result" if node is None else "reader",
        mesh_axis=axis,
        node=node,
        arriving=tuple(fault.made[0]),
        boxing=boxing,
        axis_policies=policies,
        axes=axes,
    )
