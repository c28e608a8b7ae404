"""Tensor -> shards: the elements of a tensor on each device of the mesh, and which summand of them
the device has where the tensor is partial."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass

from sbp.errors import SbpError
from sbp.explain.subjects import Subject, Subjects
from sbp.plan.ir import Register, Source
from sbp.plan.program import Program
from sbp.report.facts import Tensor, annotated, tensor
from sbp.types import NdSbp, Split, Unreduced

Extent = tuple[int, int]
"""The first index of a shard along a dim, and the first one behind it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFact:
    """What some devices have alike.

    Arguments:
      extents: the indices of the tensor's elements, for each dim.
      summand: which summand of these elements it is, from 0; 0 where the tensor is not partial.
      devices: the devices that have it, in order. Device k is `mesh.devices.flat[k]`.
    """

    extents: tuple[Extent, ...]
    summand: int
    devices: tuple[int, ...]

    @property
    def is_empty(self) -> bool:
        """Whether it has no element."""
        return any(start == stop for start, stop in self.extents)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorShards:
    """Where a tensor lives.

    Arguments:
      name: the user's name.
      text: dtype and shape, such as `f32[8,16]`.
      shape: the global shape.
      type: its type.
      mesh: names and sizes of the mesh axes, outer first.
      shards: the shards, by their first device.
      times: how many values of the program have the name: one in each unrolled layer.
      types: their other types.
    """

    name: str
    text: str
    shape: tuple[int, ...]
    type: NdSbp
    mesh: tuple[tuple[str, int], ...]
    shards: tuple[ShardFact, ...]
    times: int = 1
    types: tuple[NdSbp, ...] = ()

    @property
    def summands(self) -> int:
        """The number of summands of each element; 1 where the tensor is not partial."""
        return 1 + max(s.summand for s in self.shards)

    @property
    def copies(self) -> int:
        """The number of devices that have the same shard."""
        return len(self.shards[0].devices)

    def axes_of(self, dim: int) -> tuple[str, ...]:
        """The mesh axes with several devices that split a dim, outer first."""
        return tuple(a for a, n in self.mesh if n > 1 and self.type.get(a) == Split(dim))

    @property
    def partial_axes(self) -> tuple[str, ...]:
        """The mesh axes with several devices that it is partial on."""
        return tuple(a for a, n in self.mesh if n > 1 and isinstance(self.type.get(a), Unreduced))

    @property
    def copied_axes(self) -> tuple[str, ...]:
        """The mesh axes with several devices along which all devices have the same."""
        return tuple(
            a for a, n in self.mesh if n > 1 and not isinstance(self.type.get(a), Split | Unreduced)
        )


def tensor_shards(
    name: str, text: str, shape: tuple[int, ...], type_: NdSbp, mesh: tuple[tuple[str, int], ...]
) -> TensorShards:
    """The shards of a tensor. A dim of length L that an axis of n devices splits is in blocks of
    ceil(L / n) elements; an inner axis splits each block so again.

    Arguments:
      name: the user's name.
      text: dtype and shape.
      shape: the global shape.
      type_: its type.
      mesh: names and sizes of the mesh axes, outer first.

    >>> found = tensor_shards("x", "f32[5]", (5,), NdSbp({"d": Split(0)}), (("d", 4),))
    >>> [(s.extents, s.devices) for s in found.shards]
    [(((0, 2),), (0,)), (((2, 4),), (1,)), (((4, 5),), (2,)), (((5, 5),), (3,))]
    """
    devices: dict[tuple[tuple[Extent, ...], tuple[int, ...], int], list[int]] = defaultdict(list)
    for device, place in enumerate(itertools.product(*(range(n) for _, n in mesh))):
        starts, blocks, stops, summand = [0] * len(shape), list(shape), list(shape), 0
        at: list[int] = []
        for (axis, n), i in zip(mesh, place, strict=True):
            atom = type_.get(axis)
            if isinstance(atom, Split):
                dim = atom.dim
                blocks[dim] = -(-blocks[dim] // n)
                starts[dim] = min(starts[dim] + i * blocks[dim], stops[dim])
                stops[dim] = min(starts[dim] + blocks[dim], stops[dim])
                at.append(i)
            elif isinstance(atom, Unreduced):
                summand = summand * n + i
        # Empty shards of several places are told apart: each is a block of its own.
        extents = tuple(zip(starts, stops, strict=True))
        devices[extents, tuple(at), summand].append(device)
    return TensorShards(
        name=name,
        text=text,
        shape=shape,
        type=type_,
        mesh=mesh,
        shards=tuple(
            ShardFact(extents=extents, summand=summand, devices=tuple(found))
            for (extents, _, summand), found in devices.items()
        ),
    )


def telling_tensor(program: Program) -> TensorShards | None:
    """The annotated tensor that the most mesh axes split or are partial on, the first of several;
    without annotations the input, the largest of several. None where all are whole."""
    found = [(a.tensor, a.global_shape) for a in annotated(program)]
    if not found:
        names = program.graph.input_names
        found = [
            (tensor(program, r, n), _shape(program, r))
            for n, r in zip(names, program.block.inputs, strict=False)
        ]
        found.sort(key=lambda f: -f[0].bytes_per_device)
    axes = program.mesh.axes

    def told(fact: Tensor) -> int:
        kinds = [fact.type.get(axis) for axis, n in axes if n > 1]
        return sum(isinstance(kind, Split | Unreduced) for kind in kinds)

    best = max(found, key=lambda f: told(f[0]), default=None)
    if best is None or not told(best[0]):
        return None
    return tensor_shards(best[0].name, best[0].shape, best[1], best[0].type, axes)


def shards_of(program: Program, name: str | int, output_names: tuple[str, ...]) -> TensorShards:
    """The shards of an input, an output or a value.

    Arguments:
      program: the plan.
      name: as `plan.why` takes it.
      output_names: names of the results.

    Raises:
      SbpError: `bad-argument` when nothing has that name, with the nearest names.
    """
    subject = Subjects.of(program.graph, output_names).find(name).subject
    sources = _sources(program, subject)
    if not sources:
        raise SbpError(f"the plan does not make `{subject.label}`: its uses need no value of it")
    facts = [tensor(program, s, subject.label) for s in sources]
    shape = _shape(program, sources[0])
    found = tensor_shards(subject.label, facts[0].shape, shape, facts[0].type, program.mesh.axes)
    others = tuple(t for t in dict.fromkeys(f.type for f in facts) if t != found.type)
    return TensorShards(
        name=found.name,
        text=found.text,
        shape=found.shape,
        type=found.type,
        mesh=found.mesh,
        shards=found.shards,
        times=len(sources),
        types=others,
    )


def _shape(program: Program, source: Source) -> tuple[int, ...]:
    aval = (
        program.graph.avals[source.value] if isinstance(source, Register) else source.constant.aval
    )
    return tuple(aval.shape)


def _sources(program: Program, subject: Subject) -> list[Source]:
    if subject.kind == "input":
        return [program.block.inputs[subject.position]]
    if subject.kind == "output":
        return [program.block.outputs[subject.position]]
    values = program.typing.values
    return [Register(v, values[v]) for v in subject.values if v in values]
