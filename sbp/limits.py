"""What a user forbids: conversions, by a policy for a region of the program, and collectives, by a budget.

>>> budget = forbid("all_gather", above=2**20, where="forward")
>>> str(budget)
'no all_gather above 1.0 MiB in the forward pass'
"""

from __future__ import annotations

import contextlib
import numbers
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import jax

from sbp.errors import SbpError, bytes_text, nearest

Policy = Literal["auto", "reduce", "explicit"]
"""What may be converted: anything; from P alone; nothing that moves data."""

POLICIES: tuple[Policy, ...] = get_args(Policy)

Collective = Literal["all_gather", "all_reduce", "reduce_scatter", "all_to_all", "permute"]
Where = Literal["anywhere", "forward", "backward", "loop"]

MOST_BYTES = 2**60
"""What no device sends in one collective."""

_PLACES: dict[Where, str] = {
    "anywhere": "",
    "forward": " in the forward pass",
    "backward": " in the backward pass",
    "loop": " inside a loop",
}

_MARK = re.compile(r"sbp_policy\.(\w+?)\.of\.([0-9a-f]*)")
"""A region's policy in JAX's name stack, which gradients keep; the axis in hexadecimal, since it may have any letters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Collectives that a plan may not have.

    Arguments:
      collective: which; None for all.
      axis: those over this mesh axis; None for any.
      above: bytes that one device may send each time one of them runs.
      where: where they may not run: `backward` is where gradients are made, used or converted, the update included, `forward` is all else;
        `loop` is a body of scan or while.
    """

    collective: Collective | None = None
    axis: str | None = None
    above: float = 0.0
    where: Where = "anywhere"

    def __post_init__(self) -> None:
        if self.collective is not None and self.collective not in get_args(Collective):
            raise SbpError(f"no collective {self.collective!r}{nearest(str(self.collective), get_args(Collective))}", code="unknown-option")
        if self.where not in _PLACES:
            raise SbpError(f"a budget holds nowhere called {self.where!r}{nearest(str(self.where), _PLACES)}", code="unknown-option")
        if not (isinstance(self.axis, str) or self.axis is None):
            raise SbpError(f"the axis of a budget is the name of a mesh axis; got {self.axis!r}")
        size = self.above
        if isinstance(size, bool) or not isinstance(size, numbers.Real) or not 0 <= size <= MOST_BYTES:
            raise SbpError(f"above is bytes per device, from 0 to {MOST_BYTES}; got {size!r}")
        object.__setattr__(self, "above", float(size))

    def __str__(self) -> str:
        what = self.collective or "collective"
        over = f" over {self.axis}" if self.axis else ""
        size = f" above {bytes_text(self.above)}" if self.above else ""
        return f"no {what}{over}{size}{_PLACES[self.where]}"

    def covers(self, *, backward: bool, in_loop: bool) -> bool:
        """Whether it holds at a place of the program."""
        return {"anywhere": True, "forward": not backward, "backward": backward, "loop": in_loop}[self.where]


def forbid(collective: Collective | None = None, *, axis: str | None = None, above: float = 0.0, where: Where = "anywhere") -> Budget:
    """A budget for `sbp.jit(.., budgets=[..])`: a plan with such a collective is not made, and a program that needs one is a type error.

    Arguments:
      collective: "all_gather", "all_reduce", "reduce_scatter", "all_to_all" or "permute"; None for all of them.
      axis: the mesh axis; None for any.
      above: bytes one device may send each time a collective runs.
      where: "anywhere", "forward", "backward" or "loop" (inside scan and while).

    Raises:
      SbpError: `unknown-option` for another name, `bad-argument` for a negative size.

    >>> str(forbid(axis="dcn", where="loop"))
    'no collective over dcn inside a loop'
    """
    return Budget(collective=collective, axis=axis, above=above, where=where)


@contextlib.contextmanager
def policy(boxing: Policy, *axes: str) -> Iterator[None]:
    """Operations traced inside take their operands under this boxing policy, and so do their gradients.

    What a loop, a branch or `jax.checkpoint` takes from outside is converted at its border, under the policy that holds there: put the
    policy around the loop to hold for that, too.

    Arguments:
      boxing: "auto", "reduce" or "explicit".
      axes: the mesh axes that it holds on; none for all of them.

    Raises:
      SbpError: `unknown-option` for another policy.

    >>> import jax.numpy as jnp
    >>> with policy("explicit", "dcn"):
    ...     y = jnp.ones(2) + 1
    """
    if boxing not in POLICIES:
        raise SbpError(f"no boxing policy {boxing!r}{nearest(str(boxing), POLICIES)}", code="unknown-option")
    with contextlib.ExitStack() as stack:
        for axis in axes or ("",):
            stack.enter_context(jax.named_scope(f"sbp_policy.{boxing}.of.{str(axis).encode().hex()}"))
        yield


def policies_in(scope: str) -> list[tuple[Policy, str]]:
    """The policies that a name stack sets, outer first, each with its mesh axis ("" for all).

    >>> policies_in("transpose(jvp(layer/sbp_policy.reduce.of.64636e))/dot")
    [('reduce', 'dcn')]
    """
    return [(name, bytes.fromhex(axis).decode()) for name, axis in _MARK.findall(scope) if name in POLICIES]
