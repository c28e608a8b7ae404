"""Communication between the processes of a run, one for each host."""

import os
import pickle
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from sbp.errors import SbpError
from sbp.moe.model import Batch

T = TypeVar("T")


def is_first() -> bool:
    """Whether this process is the one that writes, prints and locks the folder of the run."""
    return jax.process_index() == 0


def gather(number: int) -> list[int]:
    """The numbers of all processes. Each process gives one, and all get the list."""
    return (
        [number]
        if jax.process_count() == 1
        else [int(n) for n in multihost_utils.process_allgather(np.int32(number))]
    )


def from_first(make: Callable[[], T]) -> T:
    """A value that the first process makes and all processes get. The others wait for it.

    Raises:
      SbpError: in all processes, if the first process raises it.
    """
    if jax.process_count() == 1:
        return make()
    content = b""
    if is_first():
        try:
            content = pickle.dumps((make(), None))
        except SbpError as error:
            content = pickle.dumps((None, error))
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(content))))
    sent = np.frombuffer(content.ljust(size, b"\0"), np.uint8)
    got: tuple[T, Any] = pickle.loads(multihost_utils.broadcast_one_to_all(sent).tobytes())
    if got[1] is not None:
        raise got[1]
    return got[0]


def agree(what: str, mine: T, differences: Callable[[T, T], list[str]]) -> None:
    """Compares a description with the description of the first process.

    Arguments:
      what: the word for the description in the error.
      mine: the description of this process.
      differences: gives a line for each difference between the first process's and another's.

    Raises:
      SbpError: `processes-differ` in all processes, if one differs.
    """
    lines = differences(from_first(lambda: mine), mine)
    if wrong := [i for i, n in enumerate(gather(len(lines))) if n]:
        raise SbpError(
            f"process {wrong[0]} has other {what} than process 0; start all processes with the same"
            " options and files" + (":" if lines else ""),
            code="processes-differ",
            details=lines,
        )


def share_folder(folder: Path) -> None:
    """Refuses a folder that the processes do not share.

    Raises:
      SbpError: `bad-checkpoint`, in all processes.
    """
    if jax.process_count() == 1:
        return
    sign = from_first(lambda: f".process-0-{os.getpid()}-{os.urandom(4).hex()}")
    from_first((folder / sign).touch)
    blind = [i for i, sees in enumerate(gather(int((folder / sign).exists()))) if not sees]
    from_first((folder / sign).unlink)
    if blind:
        raise SbpError(
            f"process {blind[0]} does not see what process 0 writes to {folder}; choose a --workdir"
            " on a file system that all hosts share",
            code="bad-checkpoint",
        )


def whole(tree: Any) -> Any:
    """The values of global arrays, as NumPy arrays in every process.

    >>> int(whole({"loss": jax.numpy.ones(3)})["loss"].sum())
    3
    """
    if any(isinstance(x, jax.Array) and not x.is_fully_addressable for x in jax.tree.leaves(tree)):
        mesh = next(x.sharding.mesh for x in jax.tree.leaves(tree))
        tree = jax.jit(_same, out_shardings=NamedSharding(mesh, PartitionSpec()))(tree)
    return jax.device_get(tree)


def _same(tree: Any) -> Any:
    return tree


# ---- the part of a batch ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPart:
    """The groups of a global batch that some devices hold, at least in part.

    Attributes:
      groups: their numbers, ascending.
      count: groups of the global batch.
      shardings: of the global batch.
    """

    groups: np.ndarray
    count: int
    shardings: Batch

    @classmethod
    def of(
        cls, shardings: Batch, shapes: Batch, devices: Iterable[Any] | None = None
    ) -> "BatchPart":
        """The part of this process.

        Arguments:
          shardings: of the global batch.
          shapes: of the global batch, whose first dim is the groups.
          devices: devices of this process; None for JAX's local devices.
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
        """The global batch, made from the groups of each process.

        Arguments:
          made: the groups of this process, as NumPy arrays [len(groups), ...].
        """
        row = np.full(self.count, -1)  # of a group in `made`
        row[self.groups] = np.arange(len(self.groups))

        def placed(rows: np.ndarray, sharding: Any) -> jax.Array:
            def piece(index: Any) -> np.ndarray:
                return rows[row[index[0]]][:, *index[1:]]

            shape = (self.count, *rows.shape[1:])
            return jax.make_array_from_callback(shape, sharding, piece)

        return jax.tree.map(placed, made, self.shardings)
