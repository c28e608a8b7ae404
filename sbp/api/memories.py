"""In which memory arguments and results lie: what the user asks for, and what JAX traces."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from sbp.errors import SbpError, refused
from sbp.machine.mesh import MeshSpec
from sbp.run.padded import Padded
from sbp.run.partial import Partial
from sbp.trace.transfers import HOST
from sbp.types import NdSbp


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked of an argument or a result.

    Arguments:
      type: its type; None leaves it free.
      padded: whether it is held as `sbp.Padded`, so that its splits need not divide.
      memory: the kind of memory; None where it is not said.
      spec: the `PartitionSpec` that the user wrote for the type; None for another form.
    """

    type: NdSbp | None
    padded: bool = False
    memory: str | None = None
    spec: PartitionSpec | None = None

    @classmethod
    def of(cls, t: NdSbp, entry: Any, padded: bool) -> Asked:
        """What an entry asks that has a type.

        Arguments:
          t: the type.
          entry: the entry, which may be a `NamedSharding` or a `PartitionSpec`.
          padded: as for `Asked`.
        """
        match entry:
            case NamedSharding():
                return cls(t, padded, entry.memory_kind, entry.spec)
            case PartitionSpec():
                return cls(t, padded, spec=entry)
            case _:
                return cls(t, padded)

    def typed(self, t: NdSbp | None) -> Asked:
        """The same with a type. A spec stays where the type is the one that it says."""
        same = t == self.type and (t is None or not t.is_partial)
        return replace(self, type=t, spec=self.spec if same and not self.padded else None)


FREE = Asked(None)


@dataclass(frozen=True, slots=True)
class ArgumentMemory:
    """The memory in which an argument arrives.

    Arguments:
      kind: JAX's name of it; None for the device's own.
      in_host: whether the function gets a value in host memory. It gets one in device memory where
        the argument is no JAX array yet, as with `jax.jit`.
    """

    kind: str | None = None
    in_host: bool = False


DEVICE = ArgumentMemory()


def own_kind(kind: str | None, mesh: Mesh | AbstractMesh) -> str | None:
    """A kind of memory; None for the device's own."""
    default = (
        mesh.devices.flat[0].default_memory().kind if isinstance(mesh, Mesh) and kind else "device"
    )
    return None if kind in (None, default, "device") else kind


def memory_of(leaf: Any, asked: Asked, name: str, mesh: Mesh | AbstractMesh) -> ArgumentMemory:
    """The memory of an argument.

    Arguments:
      leaf: the argument.
      asked: what the user asks for it.
      name: the user's name of it.
      mesh: the user's mesh.

    Raises:
      SbpError: `memory-kind` where it lies in another memory than is asked, as `jax.jit` refuses
        it.
    """
    array = leaf.parts if isinstance(leaf, Partial | Padded) else leaf
    sharding = getattr(array, "sharding", None)
    has = own_kind(getattr(sharding, "memory_kind", None), mesh)
    wants = own_kind(asked.memory, mesh)
    placed = isinstance(sharding, jax.sharding.Sharding)
    if placed and asked.memory is not None and has != wants:
        raise refused(
            f"input {name} lies in {has or 'device'} memory, and its sharding asks for"
            f" {wants or 'device'} memory; put it there with jax.device_put, or ask for"
            f" memory_kind={has or 'device'!r}",
            ValueError,
            code="memory-kind",
        )
    kind = has if placed else wants
    is_array = placed or isinstance(array, jax.ShapeDtypeStruct)
    return ArgumentMemory(kind, is_array and kind == HOST) if kind else DEVICE


def result_kind(
    asked: Asked, in_host: bool, name: str, mesh: MeshSpec, users_mesh: Mesh | AbstractMesh
) -> str | None:
    """The kind of memory in which a result is returned; None for the device's own.

    Arguments:
      asked: what the user asks for it.
      in_host: whether the function returns it in host memory.
      name: the name of the result.
      mesh, users_mesh: the mesh, with its hardware and as the user has it.

    Raises:
      SbpError: `memory-kind` for a kind that the platform cannot return.
    """
    if asked.memory is None:
        return HOST if in_host else None
    platform = (
        users_mesh.devices.flat[0].platform
        if isinstance(users_mesh, Mesh)
        else mesh.hardware.platform
    )
    if asked.memory == "unpinned_host" and platform != "cpu":
        raise SbpError(
            f"output {name} is asked in unpinned_host memory, where XLA for {platform} returns"
            f" nothing; ask for {HOST}",
            code="memory-kind",
        )
    return own_kind(asked.memory, users_mesh)
