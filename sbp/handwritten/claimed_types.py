"""Reads the types that a hand-written region claims, one for each of its arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from sbp.annotations import as_type
from sbp.errors import SbpError
from sbp.machine.mesh import MeshSpec
from sbp.signatures.factors import admissible
from sbp.types import Broadcast, NdSbp, Split, Unreduced


def _is_type(x: Any) -> bool:
    return x is None or isinstance(
        x, NdSbp | str | PartitionSpec | NamedSharding | Split | Unreduced | Broadcast
    )


def leaf_types(types: Any, tree: Any, where: str, mesh: MeshSpec | None) -> list[NdSbp]:
    """The type of each leaf of a pytree of arrays, from a prefix of types.

    Arguments:
      types: a pytree prefix of complete types.
      tree: the pytree of arrays.
      where: `in_types` or `out_types`, for errors.
      mesh: the mesh; None for a region outside `sbp.jit`.

    Raises:
      SbpError: `type-syntax` for a type that leaves an axis open, `unknown-axis`,
          `dim-out-of-range`; `bad-argument` for types that are no prefix, or a monoid that the
          dtype does not have.
    """
    leaves, structure = jax.tree.flatten(tree)
    found: list[NdSbp] = [NdSbp()] * len(leaves)

    def assign(t: Any, subtree: Any) -> None:
        for i in jax.tree.leaves(subtree):
            if t is None:
                raise SbpError(
                    f"{where} leaves a type open; a manual region needs complete types, such"
                    ' as "B"',
                    code="type-syntax",
                )
            own = as_type(t, np.ndim(leaves[i]), mesh.names if mesh else None)
            if own.free:
                raise SbpError(
                    f"{where}: {own!r} leaves an axis open; a manual region needs complete types",
                    code="type-syntax",
                )
            for name, atom in own.items():
                if mesh is not None:
                    mesh.size(name)
                if isinstance(atom, Unreduced) and atom.monoid not in admissible(leaves[i].dtype):
                    raise SbpError(f"{where}: an array of {leaves[i].dtype} cannot be {atom!r}")
            found[i] = own

    try:
        jax.tree.map(
            assign, types, jax.tree.unflatten(structure, range(len(leaves))), is_leaf=_is_type
        )
    except ValueError as error:
        raise SbpError(
            f"{where} is no prefix of what it types: {str(error).splitlines()[0]}"
        ) from error
    return found


def types_by_argument(in_types: Any, args: Sequence[Any]) -> tuple[Any, ...]:
    """One prefix of types for each argument of a manual region.

    Raises:
      SbpError: `bad-argument` when `in_types` has more or fewer entries than there are arguments.
    """
    types = in_types if isinstance(in_types, tuple) else (in_types,)
    if len(types) != len(args):
        raise SbpError(
            f"in_types of the manual region has {len(types)} entries for {len(args)} arguments;"
            " give one each"
        )
    return types
