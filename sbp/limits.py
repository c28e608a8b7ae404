"""The limits that a user sets: boxing policies, which forbid conversions in a part of the program,
and budgets, which forbid collectives.

>>> budget = forbid("all_gather", above=2**20, where="forward")
>>> str(budget)
'no all_gather above 1.0 MiB in the forward pass'
"""

import functools
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

import jax

from sbp.errors import bytes_text
from sbp.kinds import AXIS, EACH_AXIS, NUMBER, Kind, Reusable, made_of, one_of, or_none, takes

Policy = Literal["auto", "reduce", "explicit"]
"""Which conversions sbp may insert: `auto` any, `reduce` only those from P, `explicit` none that
moves data, except at annotations and where arrays enter and leave the plan."""

Remat = Literal["auto", "never"]
"""Whether the backward pass may recompute values of the forward pass to fit a memory limit."""

POLICIES: tuple[Policy, ...] = get_args(Policy)

Collective = Literal["all_gather", "all_reduce", "reduce_scatter", "all_to_all", "permute"]
Where = Literal["anywhere", "forward", "backward", "loop"]

MOST_BYTES = 2**60
"""The largest size of a budget: more bytes than any device sends in one collective."""

_PLACES: dict[Where, str] = {
    "anywhere": "",
    "forward": " in the forward pass",
    "backward": " in the backward pass",
    "loop": " inside a loop",
}

BOXING = one_of(POLICIES)
"""The kind of a boxing policy."""

_MARK = re.compile(r"sbp_policy\.(\w+?)\.of\.([0-9a-f]*)")
"""A policy as a name in JAX's name stack. Equations of a gradient have the name stack of their
forward part. The mesh axis is written in hexadecimal, because it may have any letters."""


_KINDS: Any = {
    "collective": or_none(one_of(get_args(Collective))),
    "axis": or_none(AXIS),
    "above": Kind(
        f"bytes per device, from 0 to {MOST_BYTES}",
        lambda x: NUMBER.accepts(x) and 0 <= x <= MOST_BYTES,
    ),
    "where": one_of(get_args(Where)),
}
"""What a budget takes."""


@made_of("Budget", **_KINDS)
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Budget:
    """Collectives that a plan may not have. Its `repr` is the call that makes it.

    Arguments:
      collective: its kind; None for all kinds.
      axis: the mesh axis that it runs over; None for any.
      above: bytes that one device may send each time the collective runs.
      where: the part of the program: `backward` makes, uses or converts gradients, and includes the
        update; `forward` is the rest; `loop` is the body of a scan or while.
    """

    collective: Collective | None = None
    axis: str | None = None
    above: float = 0.0
    where: Where = "anywhere"

    def __post_init__(self) -> None:
        object.__setattr__(self, "above", float(self.above))

    def __repr__(self) -> str:
        given = {f.name: v for f in fields(self) if (v := getattr(self, f.name)) != f.default}
        texts = {
            name: json.dumps(
                int(value) if isinstance(value, float) and value.is_integer() else value,
                ensure_ascii=False,
            )
            for name, value in given.items()
        }
        words = (text if n == "collective" else f"{n}={text}" for n, text in texts.items())
        return f"sbp.forbid({', '.join(words)})"

    def __str__(self) -> str:
        what = self.collective or "collective"
        over = f" over {self.axis}" if self.axis else ""
        size = f" above {bytes_text(self.above)}" if self.above else ""
        return f"no {what}{over}{size}{_PLACES[self.where]}"

    def covers(self, *, backward: bool, in_loop: bool) -> bool:
        """Whether the budget limits a collective at this place of the program."""
        return {"anywhere": True, "forward": not backward, "backward": backward, "loop": in_loop}[
            self.where
        ]


@takes("sbp.forbid", **_KINDS)
def forbid(
    collective: Collective | None = None,
    *,
    axis: str | None = None,
    above: float = 0.0,
    where: Where = "anywhere",
) -> Budget:
    """A budget for `sbp.jit(.., budgets=[..])`: no plan has such a collective. A program that needs
    one is a type error.

    Arguments:
      collective: "all_gather", "all_reduce", "reduce_scatter", "all_to_all" or "permute", as the
          text of the plan names it; None for all of them. A reduce-scatter that the TPU compiler
          would turn into an all-reduce runs as an all-to-all and a local sum, and counts as a
          reduce-scatter. If you name a collective, no shard on the axis is padded with zeros
          either: a sum of padded shards is a gather.
      axis: the mesh axis; None for any.
      above: bytes one device may send each time a collective runs.
      where: "anywhere", "forward", "backward" or "loop" (inside scan and while).

    Raises:
      SbpError: `unknown-option` for another name, `bad-argument` for a negative size.

    >>> str(forbid(axis="dcn", where="loop"))
    'no collective over dcn inside a loop'
    """
    return Budget(collective=collective, axis=axis, above=above, where=where)


@takes(
    "sbp.policy",
    boxing=BOXING,
    axes=EACH_AXIS,
)
def policy(boxing: Policy, *axes: str) -> Reusable:
    """Sets the boxing policy for conversions of the operands of operations that are traced inside,
    and of their gradients.

    Operands of a loop, a branch or a `jax.checkpoint` are converted where the loop stands, under
    the policy there. Put `policy` around the whole loop to cover them as well.

    Arguments:
      boxing: "auto", "reduce" or "explicit".
      axes: names of mesh axes; none means all axes.

    Raises:
      SbpError: `unknown-option` for another policy, `bad-argument` for an axis that is not a
          non-empty string.

    >>> import jax.numpy as jnp
    >>> with policy("explicit", "dcn"):
    ...     y = jnp.ones(2) + 1
    """
    return Reusable(
        functools.partial(
            jax.named_scope, "/".join(policy_mark(boxing, axis) for axis in axes or ("",))
        )
    )


def policy_mark(boxing: Policy, axis: str = "") -> str:
    """The name that a policy puts into JAX's name stack, for one mesh axis or ("") for all.

    >>> policies_in(policy_mark("reduce", "dcn"))
    [('reduce', 'dcn')]
    """
    return f"sbp_policy.{boxing}.of.{axis.encode('utf-8', 'surrogatepass').hex()}"


def policies_in(scope: str) -> list[tuple[Policy, str]]:
    """The policies that a name stack sets, outer first, each with its mesh axis ("" for all).

    >>> policies_in("transpose(jvp(layer/sbp_policy.reduce.of.64636e))/dot")
    [('reduce', 'dcn')]
    """
    return [
        (name, bytes.fromhex(axis).decode("utf-8", "surrogatepass"))
        for name, axis in _MARK.findall(scope)
        if name in POLICIES
    ]


# ---- rules --------------------------------------------------------------------------------------
# Rules on single steps: the boxing policy of each mesh axis at one place of the program, and the
# budgets there.


POLICY_KINDS: dict[Policy, frozenset[str]] = {
    "auto": frozenset(
        {"all_reduce", "reduce_scatter", "all_gather", "all_to_all", "slice", "mask", "zero_pad"}
    ),
    "reduce": frozenset({"all_reduce", "reduce_scatter", "slice", "mask"}),
    "explicit": frozenset({"slice", "mask"}),
}
"""The steps that each boxing policy allows. It limits neither annotations nor outputs."""


@dataclass(frozen=True, slots=True)
class Ban:
    """What a budget forbids on a mesh.

    Arguments:
      kind: the collective; None for all.
      mesh_axes: positions of mesh axes. Collectives over one of them are forbidden.
      above: bytes. Collectives in which a device sends more are forbidden.
    """

    kind: str | None
    mesh_axes: frozenset[int]
    above: float

    def forbids(self, kind: str, mesh_axes: Iterable[int], bytes_sent: float) -> bool:
        """Whether it forbids a step.

        Arguments:
          kind: of the step.
          mesh_axes: positions of the mesh axes it runs over.
          bytes_sent: bytes that a device sends.
        """
        # Shards that are padded with zeros and added up later are another gather.
        forbidden = (
            self.kind is not None
            if kind == "zero_pad"
            else bytes_sent > self.above and self.kind in (None, kind)
        )
        return forbidden and not self.mesh_axes.isdisjoint(mesh_axes)


@dataclass(frozen=True, slots=True)
class Rules:
    """The conversions that are allowed at one place of a program.

    Arguments:
      policies: the boxing policy of each mesh axis.
      bans: what budgets forbid.
    """

    policies: tuple[Policy, ...]
    bans: tuple[Ban, ...] = ()

    def allows(self, kind: str, mesh_axes: Iterable[int], bytes_sent: float) -> bool:
        """Whether a step is allowed.

        Arguments:
          kind: of the step.
          mesh_axes: positions of the mesh axes it runs over.
          bytes_sent: bytes that a device sends.

        >>> Rules(("auto", "reduce")).allows("all_gather", (1,), 8.0)
        False
        """
        axes = tuple(mesh_axes)
        return all(kind in POLICY_KINDS[self.policies[a]] for a in axes) and not any(
            b.forbids(kind, axes, bytes_sent) for b in self.bans
        )

    def within(self, other: "Rules") -> bool:
        """Whether the other rules allow everything that these rules allow."""
        return set(self.bans) >= set(other.bans) and all(
            POLICIES.index(a) >= POLICIES.index(b)
            for a, b in zip(self.policies, other.policies, strict=True)
        )

    @property
    def strictness(self) -> int:
        """A number to sort rules by: it is less for rules that allow more."""
        return sum(POLICIES.index(p) for p in self.policies) + len(self.bans)

    @property
    def unlimited(self) -> bool:
        """Whether they allow every conversion."""
        return not self.bans and all(p == "auto" for p in self.policies)
