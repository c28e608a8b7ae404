"""The types of the values of a program: a type space for each shape, dtype, memory and way of
summing."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from sbp import _jax
from sbp.infer.policy import Rules
from sbp.infer.space import Codes, Step, TypeSpace
from sbp.machine.mesh import MeshSpec


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
        wide: str | None,
    ) -> TypeSpace:
        shape, itemsize, host = like
        kind = HostSpace if host else TypeSpace
        return kind(shape, itemsize, self.mesh, monoids, forced, wide)

    def of(
        self,
        aval: Any,
        monoids: frozenset[str],
        forced: frozenset[tuple[int, int]] = frozenset(),
        wide: str | None = None,
    ) -> TypeSpace:
        """The space of one value.

        Arguments:
          aval: its shape, dtype and memory.
          monoids, forced: as `TypeSpace` takes them.
          wide: the dtype of its partial sums, where that is a wider one.
        """
        like = tuple(aval.shape), _jax.itemsize(aval.dtype), _jax.in_host(aval)
        return self._get(like, monoids, forced, wide)
