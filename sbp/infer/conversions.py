"""What a policy and budgets allow to convert on one mesh axis, in any number of steps."""

from __future__ import annotations

import dataclasses
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
    """What rules allow to convert on one mesh axis, in any number of steps.

    Bytes depend on how the other axes split a value; here they are what is left when all of them
    do, which is the least. So a budget may be impossible though this finds it possible, never the
    other way round; with one mesh axis both agree.
    """

    def __init__(self, mesh: MeshSpec, position: int) -> None:
        self.mesh, self.position = mesh, position
        self._others = math.prod(n for i, n in enumerate(mesh.sizes) if i != position)
        # Alone the axis would look like a whole mesh, which some compilers scatter over by an
        # all-reduce.
        hardware = (
            mesh.hardware
            if self._others == 1
            else dataclasses.replace(mesh.hardware, scatters_whole_mesh=True)
        )
        self._alone = MeshSpec(axes=(mesh.axes[position],), hardware=hardware)
        self._found: dict[Any, tuple[TypeSpace, np.ndarray]] = {}

    def allows(self, source: Code, target: Code, aval: Any, rules: Rules) -> bool:
        """Whether a value made as `source` can be read as `target`."""
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
