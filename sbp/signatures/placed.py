"""An equation with the row of all mesh axes, for kernels that depend on each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sbp.types import Atom, Split


@dataclass(frozen=True, slots=True, eq=False)
class PlacedOp:
    """An equation with its row on all mesh axes.

    Arguments:
      params: the primitive's parameters, for global shapes.
      ins: avals of the whole operands.
      atoms: for each operand its atom on each mesh axis.
      kernels: the kernel on each mesh axis.
      sizes: sizes of the mesh axes.
    """

    params: dict[str, Any]
    ins: tuple[Any, ...]
    atoms: tuple[tuple[Atom, ...], ...]
    kernels: tuple[str, ...]
    sizes: tuple[int, ...]

    def shard(self, operand: int, dim: int) -> tuple[int, bool]:
        """The length of a shard of an operand along one dim, and whether no shard has padding."""
        size, even = self.ins[operand].shape[dim], True
        for atom, n in zip(self.atoms[operand], self.sizes, strict=True):
            if atom == Split(dim):
                size, even = -(-size // n), even and size % n == 0
        return size, even
