"""Conversions between the types of one shape on a mesh, of which one program holds every step, run
on adversarial parts."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

import sbp
from sbp.infer.space import Step, TypeSpace, decode
from sbp.machine.mesh import Hardware, MeshSpec
from sbp.run.boxing import Boxing
from sbp.signatures.laws.parts import Types, assemble, localised, place
from sbp.types import Broadcast

Shape = tuple[int, ...]
Codes = tuple[int, ...]
Pair = tuple[Codes, Codes]

BYTES_ONLY = Hardware(
    name="bytes",
    flops_per_second=1.0,
    hbm_bytes_per_second=math.inf,
    hbm_bytes=math.inf,
    link_bytes_per_second=1.0,
    latency_seconds=0.0,
)
"""Where a second is a byte: the cheapest sequence of steps is the one that sends least."""

AT_ONCE = 64
"""Values under way at a time, which bounds the memory of a run."""

COMPILER: dict[str, Any] = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
"""Programs that run twice are not worth optimising."""


def mesh_of(sizes: Sequence[int], hardware: Hardware = BYTES_ONLY) -> MeshSpec:
    """The mesh of given axis sizes."""
    return MeshSpec(axes=tuple(zip("xyz", sizes, strict=False)), hardware=hardware)


def space_of(
    shape: Shape, sizes: Sequence[int], monoids: Sequence[str], hardware: Hardware = BYTES_ONLY
) -> TypeSpace:
    """All types of a shape, those that leave devices empty too."""
    wanted = frozenset(itertools.product(range(len(sizes)), range(len(shape))))
    return TypeSpace(shape, 4, mesh_of(sizes, hardware), frozenset(monoids), wanted)


def atoms_of(codes: Codes) -> Types:
    """The atoms of codes."""
    return tuple(map(decode, codes))


# ---- running ------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Conversions:
    """Conversions between types of one shape on one mesh, step by step.

    One program holds every single step that some path takes, once, from every type to the next;
    what goes a long way runs it several times. Its operand has a slot for each type, in which there
    is room for values of several sources: where they are on their way.

    Arguments:
      sizes: sizes of the mesh axes.
      shape: the global shape.
      dtype: the dtype.
      paths: the steps of each pair of types.
      hardware: what the mesh is taken to consist of.
    """

    sizes: Shape
    shape: Shape
    dtype: Any
    paths: dict[Pair, tuple[Step, ...]]
    hardware: Hardware = BYTES_ONLY
    sources: tuple[Codes, ...] = field(init=False)
    types: tuple[Codes, ...] = field(init=False)
    steps: tuple[Step, ...] = field(init=False)
    program: Any = field(init=False)

    def __post_init__(self) -> None:
        self.steps = tuple(dict.fromkeys(step for path in self.paths.values() for step in path))
        self.sources = tuple(dict.fromkeys(source for source, _ in self.paths))
        self.types = tuple(
            dict.fromkeys(
                (*self.sources, *(t for step in self.steps for t in (step.source, step.target)))
            )
        )
        self.program = self._compiled()

    @property
    def room(self) -> int:
        """How many values a slot has room for."""
        return min(len(self.sources), AT_ONCE)

    @property
    def devices(self) -> list[Shape]:
        """The devices, by their index on each mesh axis."""
        return list(itertools.product(*map(range, self.sizes)))

    def local(self, codes: Codes) -> Shape:
        """The slot of a type on one device."""
        return (*localised(self.shape, atoms_of(codes), self.sizes), self.room)

    def _compiled(self) -> Any:
        """From the slots of all types to the results of all steps, each side one vector for a
        device."""
        boxing = Boxing(mesh_of(self.sizes, self.hardware))
        starts = np.cumsum([0, *(math.prod(self.local(t)) for t in self.types)])
        slots = {t: (starts[k], starts[k + 1]) for k, t in enumerate(self.types)}

        def run(flat: Any) -> Any:
            flat = flat.reshape(-1)
            out = [flat[:0]]
            held = {t: flat[a:b].reshape(self.local(t)) for t, (a, b) in slots.items()}
            for step in self.steps:
                part = boxing.step(held[step.source], (*self.shape, self.room), step)
                assert part.shape == self.local(step.target), f"{step} gives {part.shape}"
                out.append(part.ravel())
            return jnp.concatenate(out).reshape((1,) * len(self.sizes) + (-1,))

        names = tuple("xyz"[: len(self.sizes)])
        spec = PartitionSpec(*names, None)
        mesh = sbp.make_mesh(self.sizes, names)
        own = jax.sharding.Mesh(mesh.devices, mesh.axis_names)
        mapped = jax.jit(
            jax.shard_map(run, mesh=own, in_specs=spec, out_specs=spec, check_vma=False)
        )
        return mapped.lower(
            jax.ShapeDtypeStruct((*self.sizes, int(starts[-1])), self.dtype)
        ).compile(COMPILER)

    def _stepped(self, slots: dict[Codes, np.ndarray]) -> dict[Step, np.ndarray]:
        """Runs the program. A slot is an array of mesh axes, then of the type's part."""
        lead = len(self.sizes)
        flat = np.concatenate([slots[t].reshape(*self.sizes, -1) for t in self.types], lead)
        got = np.asarray(self.program(flat))
        ends = np.cumsum([math.prod(self.local(s.target)) for s in self.steps])
        return {
            s: p.reshape(*self.sizes, *self.local(s.target))
            for s, p in zip(self.steps, np.split(got, ends[:-1], lead), strict=True)
        }

    def travel(
        self, starts: dict[Codes, np.ndarray], pairs: Iterable[Pair]
    ) -> dict[Pair, np.ndarray]:
        """Takes values along paths; as many at a time as there is room for, in as many runs as the
        longest path has steps.

        Arguments:
          starts: for each source, the parts that its value starts from.
          pairs: sources and targets.

        Returns:
          The parts that each pair arrives with.
        """
        out: dict[Pair, np.ndarray] = {}
        wanted = [pair for pair in pairs if pair[0] in starts]
        for first in range(0, len(starts), self.room):
            chosen = list(starts)[first : first + self.room]
            ways = {pair: self.paths[pair] for pair in wanted if pair[0] in chosen}
            out |= self._together({t: starts[t] for t in chosen}, ways)
        return out

    def _together(
        self, starts: dict[Codes, np.ndarray], ways: dict[Pair, tuple[Step, ...]]
    ) -> dict[Pair, np.ndarray]:
        place_of = {t: k for k, t in enumerate(starts)}
        slots = {t: np.zeros((*self.sizes, *self.local(t)), self.dtype) for t in self.types}
        for source, parts in starts.items():
            slots[source][..., place_of[source]] = parts
        out = {pair: starts[pair[0]] for pair, way in ways.items() if not way}
        for k in range(max(map(len, ways.values()), default=0)):
            got = self._stepped(slots)
            for (source, target), way in ways.items():
                if k < len(way):
                    arrived = got[way[k]][..., place_of[source]]
                    slots[way[k].target][..., place_of[source]] = arrived
                    if k == len(way) - 1:
                        out[source, target] = (
                            arrived.copy()
                        )  # a view would keep all results of the run
        return out

    def wrong(self, rng: np.random.Generator, turns: Iterable[int] | None = None) -> Iterator[str]:
        """What the conversions and the ways back get wrong, from adversarial parts; nothing when
        all is right.

        Arguments:
          rng: draws values and parts.
          turns: the round trips to make: at turn k each type is left for the one k places further,
              and entered again; all if None.
        """
        sources = self.sources
        whole = {t: values(self.shape, self.dtype, rng) for t in sources}
        starts = {}
        for t in sources:
            parts = place(whole[t], atoms_of(t), self.sizes, rng)
            starts[t] = np.stack([parts[d] for d in self.devices]).reshape(
                *self.sizes, *self.local(t)[:-1]
            )
        there = self.travel(starts, self.paths)
        for (source, target), parts in there.items():
            yield from self.differences((source, target), parts, target, whole[source])
        for k in range(len(sources)) if turns is None else turns:
            first = {t: sources[(i + k) % len(sources)] for i, t in enumerate(sources)}
            back = {t: there[s, t] for t, s in first.items() if (s, t) in there and (t, s) in there}
            for (t, s), parts in self.travel(back, [(t, first[t]) for t in back]).items():
                yield from self.differences((s, t, s), parts, s, whole[s])

    def differences(
        self, way: Sequence[Codes], parts: np.ndarray, codes: Codes, want: np.ndarray
    ) -> Iterator[str]:
        """Whether parts stand for a value to the bit, whichever device reads."""
        atoms = atoms_of(codes)
        held = {d: parts[d] for d in self.devices}
        for reader in itertools.product(
            *(
                range(n if isinstance(a, Broadcast) else 1)
                for a, n in zip(atoms, self.sizes, strict=True)
            )
        ):
            with np.errstate(invalid="ignore"):  # NaN of padding
                got = assemble(held, atoms, self.sizes, self.shape, reader)
            if got.shape != want.shape or not np.array_equal(got, want):
                through = [
                    step.kind for a, b in itertools.pairwise(way) for step in self.paths[a, b]
                ]
                yield (
                    f"{self.dtype.name}{self.shape} on {self.sizes}:"
                    f" {' -> '.join(map(str, map(atoms_of, way)))} by {through}: device {reader}"
                    f" reads\n{got}\ninstead of\n{want}"
                )
                return


def values(shape: Shape, dtype: Any, rng: np.random.Generator) -> np.ndarray:
    """Quarters, small integers or booleans: parts of them add up exactly."""
    if dtype == np.bool_:
        return rng.random(shape) < 0.5
    whole = rng.integers(-16, 16, shape)
    return whole.astype(dtype) if np.issubdtype(dtype, np.integer) else (whole / 4).astype(dtype)
