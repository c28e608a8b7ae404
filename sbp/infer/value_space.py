"""The types of the values of a program: a type space for each shape, dtype, memory and way of
summing."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from sbp import _jax
from sbp.infer.accumulation import NATIVE, Reduction
from sbp.infer.policy import Ban, Rules
from sbp.infer.space import Codes, Step, TypeSpace
from sbp.machine.mesh import MeshSpec
from sbp.types import MONOIDS

Needs = tuple[frozenset[tuple[int, int]], frozenset[str]]
"""What a type space has for some types: (mesh axis, tensor dim) of splits into more parts than the
dim has elements, and the monoids of partials."""


def needs_of(shape: Sequence[int], types: Sequence[Codes], sizes: Sequence[int]) -> Needs:
    """What a type space needs to have some types of a value.

    Arguments:
      shape: the shape of the value.
      types: its types.
      sizes: the sizes of the mesh axes.
    """

    def parts(t: Codes, code: int) -> int:
        return math.prod(n for c, n in zip(t, sizes, strict=True) if c == code)

    forced = {
        (position, c - 1)
        for t in types
        for position, c in enumerate(t)
        if c > 0 and shape[c - 1] < parts(t, c)
    }
    return frozenset(forced), frozenset(MONOIDS[-1 - c] for t in types for c in t if c < 0)


class HostSpace(TypeSpace):
    """The types of a value in host memory. Collectives run in device memory, so a conversion copies
    the value there, converts it and copies the result back."""

    def seconds(self, rules: Rules | None = None) -> np.ndarray:
        """Seconds of the cheapest conversion between every two types, with both copies; see
        `TypeSpace.seconds`."""
        rate = self.mesh.hardware.host_bytes_per_second
        copies = (self.local_bytes[:, None] + self.local_bytes[None, :]) / rate
        np.fill_diagonal(copies, 0.0)
        return super().seconds(rules) + copies

    def path(self, source: Codes, target: Codes, rules: Rules | None = None) -> tuple[Step, ...]:
        """The cheapest steps from one type to another, between the two copies; see
        `TypeSpace.path`."""
        steps = super().path(source, target, rules)
        if not steps:
            return ()
        first, last = self._copy("to_device", source), self._copy("to_host", target)
        return (first, *steps, last)

    def _copy(self, kind: Any, codes: Codes) -> Step:
        rate = self.mesh.hardware.host_bytes_per_second
        seconds = float(self.local_bytes[self.index[codes]]) / rate
        return Step(kind, (), codes, codes, 0.0, seconds)


class FusedSpace(TypeSpace):
    """The types of a value that is fused with its readers. A conversion that sends something makes
    it reach memory: it is written before, and read after. Local steps are fused as well."""

    @functools.cached_property
    def _known(self) -> dict[Rules, np.ndarray]:
        return {}

    def seconds(self, rules: Rules | None = None) -> np.ndarray:
        """Seconds of the cheapest conversion between every two types, with what it writes and
        reads; see `TypeSpace.seconds`."""
        rules = rules or self.unlimited
        if rules not in self._known:
            local, sent = self._local(rules), self._sent(rules)
            for k in range(len(self.types)):  # local steps, then others, then local steps
                sent = np.minimum(sent, local[:, k, None] + sent[None, k, :])
            for k in range(len(self.types)):
                sent = np.minimum(sent, sent[:, k, None] + local[None, k, :])
            self._known[rules] = np.minimum(local, sent)
        return self._known[rules]

    def path(self, source: Codes, target: Codes, rules: Rules | None = None) -> tuple[Step, ...]:
        """The cheapest steps from one type to another; the first that sends something is charged
        what the conversion writes and reads. See `TypeSpace.path`."""
        rules = rules or self.unlimited
        i, j = self.index[source], self.index[target]
        local, sent = self._local(rules), self._sent(rules)
        through = local[i, :, None] + sent + local[None, :, j]
        if local[i, j] <= through.min():
            return super().path(source, target, self._on_device(rules))
        begin, end = np.unravel_index(through.argmin(), through.shape)
        here, there = self.types[int(begin)], self.types[int(end)]
        steps = list(super().path(here, there, rules))
        at = next((k for k, step in enumerate(steps) if step.bytes_sent), 0)
        more = float(self._in_memory()[begin, end])
        steps[at] = replace(steps[at], seconds=steps[at].seconds + more)
        alone = self._on_device(rules)
        before, after = super().path(source, here, alone), super().path(there, target, alone)
        return (*before, *steps, *after)

    def _local(self, rules: Rules) -> np.ndarray:
        return super().seconds(self._on_device(rules))

    def _sent(self, rules: Rules) -> np.ndarray:
        return super().seconds(rules) + self._in_memory()

    def _in_memory(self) -> np.ndarray:
        rate = self.mesh.hardware.hbm_bytes_per_second
        return (self.local_bytes[:, None] + self.local_bytes[None, :]) / rate

    def _on_device(self, rules: Rules) -> Rules:
        """The rules without steps that send something."""
        ban = Ban(kind=None, mesh_axes=frozenset(range(len(self.sizes))), above=0.0)
        return replace(rules, bans=(*rules.bans, ban))


class Spaces:
    """The type spaces of the values of a program on a mesh."""

    def __init__(self, mesh: MeshSpec) -> None:
        self.mesh = mesh
        self._get = functools.cache(self._make)

    def _make(
        self,
        like: tuple[tuple[int, ...], int, bool],
        monoids: frozenset[str],
        forced: frozenset[tuple[int, int]],
        reduction: Reduction,
    ) -> TypeSpace:
        shape, itemsize, host = like
        kind = HostSpace if host else FusedSpace if reduction.fused else TypeSpace
        return kind(shape, itemsize, self.mesh, monoids, forced, reduction)

    def of(
        self,
        aval: Any,
        monoids: frozenset[str],
        forced: frozenset[tuple[int, int]] = frozenset(),
        reduction: Reduction = NATIVE,
    ) -> TypeSpace:
        """The space of one value.

        Arguments:
          aval: its shape, dtype and memory.
          monoids, forced: as `TypeSpace` takes them.
          reduction: how partial sums are added up, and what else conversions cost.
        """
        like = tuple(aval.shape), _jax.itemsize(aval.dtype), _jax.in_host(aval)
        return self._get(like, monoids, forced, reduction)
