"""`in_shardings` and `out_shardings` as `jax.jit` takes them: types by another name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from sbp import _jax_call
from sbp.api.boundary import same_mesh
from sbp.errors import SbpError, refused
from sbp.kinds import shown
from sbp.pytrees import leaves_of


def is_given(shardings: Any) -> bool:
    """Whether an option asks for shardings at all."""
    return shardings is not None and not _jax_call.is_unspecified(shardings)


def types_of(types: Any, shardings: Any, option: str) -> Any:
    """The types that one of the options `in_shardings` and `out_shardings` asks for.

    Arguments:
      types: `in_types` or `out_types`.
      shardings: the option: a pytree prefix of `NamedSharding`s, `PartitionSpec`s and None.
      option: its name, for errors.

    Returns:
      A pytree prefix of types. `types`, where no sharding is asked for.

    Raises:
      SbpError: `bad-argument` where both are given, and for what is no sharding of a mesh.
    """
    if not is_given(shardings):
        return types
    if types is not None:
        raise SbpError(f"{option} and {other_option(option)} say the same; give one of them")
    if option == "in_shardings" and isinstance(shardings, list):
        shardings = tuple(shardings)  # as jax.jit does
    for leaf in _leaves(shardings):
        _check_sharding(leaf, option)
    return shardings


def other_option(option: str) -> str:
    """The option that takes types where this one takes shardings."""
    return option.replace("shardings", "types")


def mesh_of(*shardings: Any) -> Mesh | AbstractMesh | None:
    """The mesh of the first `NamedSharding`; None where there is none."""
    for option in shardings:
        for leaf in _leaves(option) if is_given(option) else ():
            if isinstance(leaf, NamedSharding):
                return leaf.mesh
    return None


def check_meshes(shardings: Any, mesh: Mesh | AbstractMesh, option: str) -> None:
    """Checks that `NamedSharding`s are on a mesh.

    Raises:
      SbpError: `bad-argument` for one on another mesh.
    """
    for leaf in _leaves(shardings) if is_given(shardings) else ():
        if isinstance(leaf, NamedSharding) and not same_mesh(leaf.mesh, mesh):
            raise refused(
                f"{option} has a NamedSharding on {leaf.mesh}, but the mesh is {mesh}; make it on"
                " the same mesh",
                ValueError,
            )


def _leaves(shardings: Any) -> Iterator[Any]:
    return iter(leaves_of(shardings, "in_shardings and out_shardings", lambda x: x is None)[0])


def _check_sharding(leaf: Any, option: str) -> None:
    if leaf is None or _jax_call.is_unspecified(leaf):
        return
    if isinstance(leaf, NamedSharding | PartitionSpec):
        spec = leaf.spec if isinstance(leaf, NamedSharding) else leaf
        if PartitionSpec.UNCONSTRAINED in spec.partitions:
            raise refused(
                f"{option} has {spec}, with an UNCONSTRAINED dim; {other_option(option)} takes"
                " types with free axes, such as 'data:S(0) model:?'",
                ValueError,
            )
        return
    if isinstance(leaf, jax.sharding.Sharding):
        raise refused(
            f"{option} has a {type(leaf).__name__}; give a NamedSharding on the mesh, or None to"
            " leave it to sbp",
            ValueError,
        )
    if _jax_call.is_layout(leaf):
        raise refused(
            f"{option} has a layout in memory, {leaf!r}; sbp leaves layouts to XLA: give its"
            " sharding",
            ValueError,
        )
    raise refused(
        f"{option} is a pytree of NamedSharding, PartitionSpec or None, not {shown(leaf)}",
        TypeError,
    )
