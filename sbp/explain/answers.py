"""The answer to `plan.why(name)` as data."""

from __future__ import annotations

from dataclasses import dataclass

from sbp.explain.alternatives import Outcome
from sbp.explain.conversions import ExplainedConversion
from sbp.explain.origins import Link
from sbp.explain.subjects import Subject
from sbp.plan.program import Cost
from sbp.types import NdSbp


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """The program planned with another type of the value.

    Arguments:
      wanted: the pinned atoms as (mesh axis, atom); empty where a pin was dropped.
      freed: the mesh axis on which the value's pin was dropped; empty where there was none.
      outcome: the plan's figures, or why there is no plan.
    """

    wanted: tuple[tuple[str, str], ...] = ()
    freed: str = ""
    outcome: Outcome

    @property
    def change(self) -> str:
        """The change in the notation of types: `model:S(1)`; `model:?` for a dropped pin."""
        return " ".join(f"{axis}:{atom}" for axis, atom in self.wanted) or f"{self.freed}:?"

    @property
    def type(self) -> NdSbp | None:
        """The value's type in that plan; None when there is no plan."""
        return self.outcome.type

    @property
    def cost(self) -> Cost | None:
        """The cost of a call of that plan; None when there is no plan."""
        return self.outcome.cost


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisStory:
    """Where the atom of a value on one mesh axis comes from.

    Arguments:
      mesh_axis: the axis.
      atom: the chosen atom.
      links: the chain of origins, the value's own link first.
      pinned: whether the user pins this value on this axis.
      next_best: the cheapest plan in which the value has another atom here. For a pinned value: the
        plan without the pin. None when there is no such plan, or none was tried.
      tried: how many other atoms were tried.
    """

    mesh_axis: str
    atom: str
    links: tuple[Link, ...]
    pinned: bool
    next_best: Alternative | None
    tried: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Why:
    """The answer to `plan.why(name)`.

    Arguments:
      subject: the value.
      others: other values of that name or line, with their types.
      type: the chosen type; of an output, the type it is returned in.
      types: the types of its copies, each with the number of copies; one entry unless copies
        differ.
      shape, dtype: of the whole value.
      local_shape: of one device's shard.
      bytes_per_device: bytes of one device's shard.
      cost: of the plan.
      axes: one story for each mesh axis of more than one device.
      alternatives: other types, each with its plan, cheapest first; types without a plan last.
      untried: number of types with another atom on one mesh axis that were not tried, to save time.
      untried_pairs: number of types with other atoms on two mesh axes that were not tried, to save
        time. Both atoms were tried one by one.
      conversions: of this value, most bytes first.
      output_names: names of the program's results.
      nodes: number of the program's equations.
      proved: whether the bound shows that no plan under the same policies and limits is cheaper.
      evades: whether the annotation of an alternative may convert what the boxing policy forbids
        elsewhere.
    """

    subject: Subject
    others: tuple[tuple[Subject, NdSbp], ...]
    type: NdSbp
    types: tuple[tuple[NdSbp, int], ...]
    shape: tuple[int, ...]
    dtype: str
    local_shape: tuple[int, ...]
    bytes_per_device: float
    cost: Cost
    axes: tuple[AxisStory, ...]
    alternatives: tuple[Alternative, ...]
    untried: int
    untried_pairs: int
    conversions: tuple[ExplainedConversion, ...]
    output_names: tuple[str, ...]
    nodes: int
    proved: bool
    evades: bool
