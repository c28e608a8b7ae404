"""The part of a global batch that each process makes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from sbp.moe.model import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPart:
    """The groups of a global batch of which some devices hold a part.

    Attributes:
      groups: their numbers, ascending.
      count: groups of the global batch.
      shardings: of the global batch.
    """

    groups: np.ndarray
    count: int
    shardings: Batch

    @classmethod
    def of(cls, shardings: Batch, shapes: Batch, devices: Iterable[Any] | None = None) -> BatchPart:
        """The part of this process.

        Arguments:
          shardings: of the global batch.
          shapes: of the global batch, whose first dim is the groups.
          devices: devices of this process; those that JAX has here when left out.
        """
        mine = set(jax.local_devices() if devices is None else devices)
        count = jax.tree.leaves(shapes)[0].shape[0]
        held = np.zeros(count, bool)
        for shape, sharding in zip(
            jax.tree.leaves(shapes), jax.tree.leaves(shardings), strict=True
        ):
            for device, index in sharding.devices_indices_map(shape.shape).items():
                if device in mine:
                    held[index[0]] = True
        return cls(groups=np.flatnonzero(held), count=count, shardings=shardings)

    def place(self, made: Batch) -> Batch:
        """The global batch of the groups that each process has made.

        Arguments:
          made: NumPy arrays [len(groups), ...], of this process.
        """
        row = np.full(self.count, -1)  # of a group in `made`
        row[self.groups] = np.arange(len(self.groups))

        def placed(rows: np.ndarray, sharding: Any) -> jax.Array:
            def piece(index: Any) -> np.ndarray:
                return rows[row[index[0]]][:, *index[1:]]

            shape = (self.count, *rows.shape[1:])
            return jax.make_array_from_callback(shape, sharding, piece)

        return jax.tree.map(placed, made, self.shardings)
