"""Which conversions a policy and budgets allow on one mesh axis, in any number of steps."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from sbp import _jax
from sbp.infer.policy import POLICY_KINDS, Ban, Rules, detour
from sbp.infer.space import Code, TypeSpace
from sbp.limits import Policy
from sbp.machine.mesh import MeshSpec
from sbp.types import MONOIDS


def allowed(source: Code, target: Code, policy: Policy) -> bool:
    """Whether a policy converts one atom to another on one mesh axis, in any number of steps.

    >>> [allowed(1, 0, p) for p in ("auto", "reduce", "explicit")], allowed(0, 1, "explicit")
    ([True, False, False], True)
    """
    if source == target or source == 0:
        return True
    kinds = POLICY_KINDS[policy]
    if source > 0:
        return "all_gather" in kinds
    return "all_reduce" in kinds


class Conversions:
    """Which conversions rules allow on one mesh axis, in any number of steps.

    The bytes of a conversion depend on how the other mesh axes split the value. Here all of them
    split it, which gives the fewest bytes. So with several mesh axes, a conversion that a budget
    forbids may be allowed here; a conversion that is forbidden here is always forbidden.

    Arguments:
      mesh: the mesh.
      position: of the mesh axis.
    """

    def __init__(self, mesh: MeshSpec, position: int) -> None:
        self.mesh, self.position = mesh, position
        self._others = math.prod(n for i, n in enumerate(mesh.sizes) if i != position)
        self._alone = MeshSpec(axes=(mesh.axes[position],), hardware=mesh.hardware)
        self._found: dict[Any, tuple[TypeSpace, np.ndarray]] = {}

    def allows(self, source: Code, target: Code, aval: Any, rules: Rules) -> bool:
        """Whether a value that is made as one code can be read as another one.

        Arguments:
          source: the code it is made in.
          target: the code it is read in.
          aval: its global shape and its dtype.
          rules: the conversions that are allowed.
        """
        if not rules.bans or source == target:
            return allowed(source, target, rules.policies[self.position])
        space, seconds = self._space(
            aval,
            frozenset(c for c in (source, target) if c < 0),
            frozenset((source, target)),
            rules,
        )
        return bool(np.isfinite(seconds[space.index[(source,)], space.index[(target,)]]))

    def _space(
        self, aval: Any, partial: frozenset[Code], codes: frozenset[Code], rules: Rules
    ) -> tuple[TypeSpace, np.ndarray]:
        key = (aval.shape, aval.dtype, partial, codes, rules)
        if key not in self._found:
            monoids = detour(aval.dtype, frozenset(MONOIDS[-1 - c] for c in partial))
            forced = frozenset((0, c - 1) for c in codes if c > 0)
            space = TypeSpace(
                tuple(aval.shape), _jax.itemsize(aval.dtype), self._alone, monoids, forced
            )
            bans = tuple(
                Ban(b.kind, frozenset((0,)), b.above * self._others)
                for b in rules.bans
                if self.position in b.mesh_axes
            )
            self._found[key] = space, space.seconds(Rules((rules.policies[self.position],), bans))
        return self._found[key]
