"""Checks the types that a hand-written region claims: its body is run on random values, for all
devices of the mesh in one call.

Nested `vmap`s bind the named axes, so that no devices are needed. A result that claims B must be
equal on all devices. The results must be the same for all parts of a P operand with the same
reduction. S results and P results claim nothing more: any parts are the parts of some value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sbp import _jax
from sbp.errors import SbpInternalError
from sbp.machine.mesh import MeshSpec
from sbp.shardmap.emulation import (
    ONE_AXIS_AT_A_TIME,
    differ,
    executed,
    not_emulated,
    on_every_device,
    plain,
    too_large,
)
from sbp.signatures.laws.parts import Types, assemble, localised, place
from sbp.trace.evaluate import evaluate
from sbp.trace.graph import Graph
from sbp.types import Atom, B, NdSbp, Unreduced

Placed = dict[tuple[int, ...], np.ndarray]
"""The part of each device, by its index on each mesh axis."""


@dataclass(frozen=True, slots=True)
class ClaimedArray:
    """One operand or result of a region.

    Arguments:
      type: its claimed type.
      atoms: its claimed atom on each mesh axis.
      shape: its global shape.
      dtype: its dtype.
    """

    type: NdSbp
    atoms: Types
    shape: tuple[int, ...]
    dtype: Any

    def local(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """The shape of one device's part."""
        return localised(self.shape, self.atoms, sizes)


def without_leads(ins: Sequence[ClaimedArray], mesh: MeshSpec, shards: Sequence[Any]) -> list[Any]:
    """Shards in the shapes that a body takes, without leading dims of size 1 for mesh axes.

    Arguments:
      ins: the operands of the body.
      mesh: the mesh.
      shards: one device's part of each operand.
    """
    return [x.reshape(h.local(mesh.sizes)) for x, h in zip(shards, ins, strict=True)]


def false_claims(
    graph: Graph,
    ins: Sequence[ClaimedArray],
    outs: Sequence[ClaimedArray],
    captured: int,
    mesh: MeshSpec,
) -> tuple[list[str], str]:
    """The claims of a region that do not hold.

    Arguments:
      graph: the body, from shards to shards.
      ins: its operands.
      outs: its results.
      captured: how many of the first operands are arrays that it closes over.
      mesh: the mesh.

    Returns:
      A text for each claim that does not hold; and the reason why the region could not be run,
      empty where it was.
    """
    broadcast = [i for i, h in enumerate(outs) if _has(h, mesh, lambda atom: atom == B)]
    partial = [
        i for i, h in enumerate(ins) if _has(h, mesh, lambda atom: isinstance(atom, Unreduced))
    ]
    if not broadcast and not partial:
        return [], ""
    if reason := too_large(graph, mesh.num_devices):
        return [], reason
    try:
        first = outcome(graph, ins, mesh, 0)
        second = outcome(graph, ins, mesh, 1) if partial else first
    except SbpInternalError:
        raise
    # `vmap` has no rule for some collectives, and says so by one of these; the reason is in the
    # warning.
    except (NotImplementedError, AssertionError) as error:
        return [], not_emulated(error)
    found = [text for i in broadcast for text in _unequal(first[i], outs[i], i, mesh)]
    which = ", ".join(f"operand {k - captured} ({ins[k].type!r})" for k in partial)
    reader = (0,) * len(mesh.sizes)
    for i, h in enumerate(outs if partial else ()):
        seen = (
            assemble(parts[i], h.atoms, mesh.sizes, h.shape, reader) for parts in (first, second)
        )
        if differ(*seen):
            found.append(f"result {i} depends on how {which} is parted, not on its reduction alone")
    return found, ""


def _has(claimed: ClaimedArray, mesh: MeshSpec, kind: Callable[[Atom], bool]) -> bool:
    """Whether an array has an atom of a kind on a mesh axis of more than one device."""
    return any(kind(a) and n > 1 for a, n in zip(claimed.atoms, mesh.sizes, strict=True))


def _unequal(values: Placed, claimed: ClaimedArray, number: int, mesh: MeshSpec) -> Iterator[str]:
    """A text for each mesh axis on which a result claims B and its values differ."""
    zeros = (0,) * len(mesh.sizes)
    want = assemble(values, claimed.atoms, mesh.sizes, claimed.shape, zeros)
    for k, ((name, n), atom) in enumerate(zip(mesh.axes, claimed.atoms, strict=True)):
        for i in range(1, n if atom == B else 0):
            if differ(
                assemble(
                    values,
                    claimed.atoms,
                    mesh.sizes,
                    claimed.shape,
                    (*zeros[:k], i, *zeros[k + 1 :]),
                ),
                want,
            ):
                yield (
                    f"result {number} claims B on mesh axis `{name}`, but index {i} holds another"
                    " value than index 0"
                )
                break


def outcome(graph: Graph, ins: Sequence[ClaimedArray], mesh: MeshSpec, way: int) -> list[Placed]:
    """The results of all devices on random operands.

    Arguments:
      graph: the body.
      ins: its operands.
      mesh: the mesh.
      way: seed of the parts of P operands. The values of the operands do not depend on it.
    """

    def one(*shards: Any) -> list[Any]:
        return evaluate(graph, without_leads(ins, mesh, shards), ONE_AXIS_AT_A_TIME)

    emulated = on_every_device(one, mesh.names)
    with jax.ensure_compile_time_eval():
        spread = [
            _spread(h, mesh.sizes, np.random.default_rng([7, i]), np.random.default_rng([way, i]))
            for i, h in enumerate(ins)
        ]
    compiled = jax.jit(lambda *x: [plain(y) for y in emulated(*x)]).lower(*spread).compile()
    results = executed(compiled, spread)
    return [{index: np.asarray(y[index]) for index in np.ndindex(*mesh.sizes)} for y in results]


def _spread(
    claimed: ClaimedArray,
    sizes: Sequence[int],
    values: np.random.Generator,
    ways: np.random.Generator,
) -> Any:
    """The parts of an operand with random values on all devices: an array with one leading dim for
    each mesh axis.

    Arguments:
      claimed: the operand.
      sizes: the sizes of the mesh axes.
      values: makes its values.
      ways: makes the parts of a P operand from its values.
    """
    key = _jax.is_extended(claimed.dtype)
    dtype = np.dtype(np.uint32) if key else np.dtype(claimed.dtype)
    shape = (*claimed.shape, *_jax.key_shape(claimed.dtype)) if key else claimed.shape
    if dtype == np.bool_:
        x = values.integers(0, 2, shape).astype(np.bool_)
    elif jnp.issubdtype(dtype, np.integer):
        x = np.asarray(values.integers(0, 8, shape)).astype(dtype)
    else:
        x = np.asarray(values.standard_normal(shape)).astype(dtype)
    placed = place(np.asarray(x), claimed.atoms, sizes, ways)
    out = np.stack([placed[index] for index in np.ndindex(*sizes)])
    out = out.reshape(*sizes, *out.shape[1:])
    return _jax.wrap_key(out, claimed.dtype) if key else out
