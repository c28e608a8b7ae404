"""Every conversion between two types gives the same value to the bit, there and back, and takes the
cheapest steps there are."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from benchmarks.hlo.traffic import collectives
from sbp.infer.space import RELAYOUT_PASSES, Step, TypeSpace, decode
from sbp.machine.hardware import copies_for_lanes, joins_lanes
from sbp.machine.mesh import Hardware, MeshSpec
from sbp.run import boxing
from sbp.signatures.factors import admissible
from sbp.signatures.laws.oracle import Types, assemble, localise, place
from sbp.types import Atom, B, Broadcast, Split, Unreduced
from tests.slices import sliced

pytestmark = pytest.mark.laws

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

    def __init__(
        self,
        sizes: Shape,
        shape: Shape,
        dtype: Any,
        paths: dict[Pair, tuple[Step, ...]],
        hardware: Hardware = BYTES_ONLY,
    ) -> None:
        self.sizes, self.shape, self.dtype = sizes, shape, dtype
        self.paths, self.hardware = paths, hardware
        self.steps = tuple(dict.fromkeys(step for path in paths.values() for step in path))
        self.sources = tuple(dict.fromkeys(source for source, _ in paths))
        self.types = tuple(
            dict.fromkeys(
                (*self.sources, *(t for step in self.steps for t in (step.source, step.target)))
            )
        )
        self.room = min(len(self.sources), 64)
        """How many values a slot has room for, which bounds the memory of a run."""
        self.devices = list(itertools.product(*map(range, sizes)))
        """The devices, by their index on each mesh axis."""
        self.program = self._compiled()

    def local(self, codes: Codes) -> Shape:
        """The slot of a type on one device."""
        return (*localise(self.shape, atoms_of(codes), self.sizes), self.room)

    def _compiled(self) -> Any:
        """From the slots of all types to the results of all steps, each side one vector for a
        device."""
        spec_mesh = mesh_of(self.sizes, self.hardware)
        starts = np.cumsum([0, *(math.prod(self.local(t)) for t in self.types)])
        slots = {t: (starts[k], starts[k + 1]) for k, t in enumerate(self.types)}

        def run(flat: Any) -> Any:
            flat = flat.reshape(-1)
            out = [flat[:0]]
            held = {t: flat[a:b].reshape(self.local(t)) for t, (a, b) in slots.items()}
            for step in self.steps:
                part = boxing.run_step(held[step.source], (*self.shape, self.room), step, spec_mesh)
                assert part.shape == self.local(step.target), f"{step} gives {part.shape}"
                out.append(part.ravel())
            return jnp.concatenate(out).reshape((1,) * len(self.sizes) + (-1,))

        names = tuple("xyz"[: len(self.sizes)])
        spec = jax.sharding.PartitionSpec(*names, None)
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


# ---- ways ----------------------------------------------------------------------------------------

Type = tuple[Atom, ...]


def types_of(ndim: int, mesh_axes: int, monoids: Sequence[str]) -> list[Type]:
    """All types of a tensor: each axis splits a dim, broadcasts or is partial, under one monoid at
    most."""
    atoms = [B, *map(Split, range(ndim)), *map(Unreduced, monoids)]
    return [
        t
        for t in itertools.product(atoms, repeat=mesh_axes)
        if len({a for a in t if isinstance(a, Unreduced)}) <= 1
    ]


def buffer(shape: Shape, t: Type, sizes: Shape) -> list[int]:
    """The dims of one device's buffer: an axis of size n cuts a dim of size c into blocks of ceil(c
    / n), outer axes first."""
    dims = list(shape)
    for atom, n in zip(t, sizes, strict=True):
        if isinstance(atom, Split):
            dims[atom.dim] = (dims[atom.dim] + n - 1) // n
    return dims


def steps(
    shape: Shape, t: Type, sizes: Shape, types: Sequence[Type], itemsize: int = 4
) -> Iterator[tuple[Type, float, int]]:
    """Each type that is one step away, with the bytes that a device sends, and 1 if it takes a
    collective.

    A ring all-reduce of x bytes over n devices sends 2 (n-1)/n x. An all-gather and a
    reduce-scatter send (n-1)/n of what is whole, an all-to-all (n-1)/n of what is exchanged: each
    with the padding that makes its dim n blocks. To slice, mask or pad sends nothing.
    """
    dims = buffer(shape, t, sizes)
    here = itemsize * math.prod(dims)
    partial = [axis for axis, a in enumerate(t) if isinstance(a, Unreduced)]
    for count in range(1, len(partial) + 1):
        for axes in itertools.combinations(partial, count):
            n = math.prod(sizes[axis] for axis in axes)
            yield (
                tuple(B if axis in axes else a for axis, a in enumerate(t)),
                2 * (n - 1) / n * here,
                1,
            )
    split = [axis for axis, a in enumerate(t) if isinstance(a, Split)]
    for count in range(2, len(split) + 1):
        for axes in itertools.combinations(split, count):
            if any(
                t[outer] == t[inner]
                for outer in axes
                for inner in split
                if inner > outer and inner not in axes
            ):
                continue
            n = math.prod(sizes[axis] for axis in axes)
            yield tuple(B if axis in axes else a for axis, a in enumerate(t)), (n - 1) * here, 1
    for axis, new in itertools.product(range(len(t)), {a for u in types for a in u}):
        old, n, inside = t[axis], sizes[axis], t[axis + 1 :]
        target = (*t[:axis], new, *inside)
        if (
            old == new
            or target not in types
            or any(isinstance(a, Split) and a in inside for a in (old, new))
        ):
            continue
        if isinstance(new, Split):
            padded = (
                here
                if dims[new.dim] == 0
                else here // dims[new.dim] * n * math.ceil(dims[new.dim] / n)
            )
            yield (
                target,
                0.0 if isinstance(old, Broadcast) else (n - 1) / n * padded,
                int(not isinstance(old, Broadcast)),
            )
        elif isinstance(new, Broadcast) and isinstance(old, Split):
            yield target, (n - 1) / n * (n * here), 1
        elif isinstance(new, Unreduced) and not isinstance(old, Unreduced):
            yield target, 0.0, 0


def cheapest(
    shape: Shape, sizes: Shape, types: Sequence[Type], per_byte: float, per_collective: float
) -> np.ndarray:
    """The price of the cheapest way between every two types, from a row's to a column's.

    Arguments:
      shape: the global shape.
      sizes: sizes of the mesh axes.
      types: the types, which ways lead through, too.
      per_byte: price of a byte that a device sends.
      per_collective: price of a collective, whatever it sends.
    """
    price = np.full((len(types), len(types)), np.inf)
    np.fill_diagonal(price, 0.0)
    known = set(types)
    index = {t: k for k, t in enumerate(types)}
    for t in types:
        for target, sent, collective in steps(shape, t, sizes, tuple(known)):
            price[index[t], index[target]] = min(
                price[index[t], index[target]], sent * per_byte + collective * per_collective
            )
    while True:  # ways of twice as many steps, until that helps no more
        longer = np.stack([(price[i, :, None] + price).min(0) for i in range(len(types))])
        if np.array_equal(longer, price):
            return price
        price = longer


# ---- conversions ---------------------------------------------------------------------------------

EVEN, PRIME, SMALL, EMPTY = (8, 8, 8), (5, 7, 3), (3, 2, 1), (0, 5, 2)
SHAPES = [EVEN, PRIME, SMALL, EMPTY]
FLOAT, HALF, INT, BOOL = (
    np.dtype(np.float32),
    np.dtype(jnp.bfloat16),
    np.dtype(np.int32),
    np.dtype(np.bool_),
)


monoids_of = lambda dtype: ("and", "or") if dtype == BOOL else ("sum", "max")


def conversions(
    sizes: Shape,
    shape: Shape,
    dtype: np.dtype[Any],
    monoids: tuple[str, ...],
    share: float = 1.0,
    laws: float = 1.0,
    hardware: Hardware = BYTES_ONLY,
) -> Conversions:
    """Between these shares of all types (see `sliced`), along the planner's paths."""
    space = space_of(shape, sizes, monoids, hardware)
    assert len(space.types) == len(types_of(len(shape), len(sizes), monoids))
    types = sliced(space.types, share, laws=laws, seed=sum(shape))
    return Conversions(
        sizes,
        shape,
        dtype,
        {(s, t): space.path(s, t) for s, t in itertools.product(types, repeat=2)},
        hardware,
    )


def assert_right(found: Conversions, turns: int, laws: int) -> None:
    """All conversions are right, and so many round trips from each type (`laws` in `make laws`);
    the compiled program sends what the steps say."""
    count = len(found.sources)
    chosen = sliced(range(count), turns / count, laws=laws / count, seed=sum(found.shape))
    wrong = list(found.wrong(np.random.default_rng(sum(found.shape)), chosen))
    assert not wrong, f"{len(wrong)} wrong, the first: {wrong[0]}"
    if found.dtype == HALF:
        return  # CPU's collectives widen it
    sent = sum(
        c.bytes_per_device for c in collectives(found.program.as_text(), math.prod(found.sizes))
    )
    planned = sum(step.bytes_sent for step in found.steps) * found.room * found.dtype.itemsize / 4
    blocks = (
        sum(step.kind == "all_reduce" for step in found.steps)
        * 2
        * math.prod(found.sizes)
        * found.dtype.itemsize
    )
    assert (
        sent <= planned * (1 + 1e-9) + blocks
    )  # some all-reduces pad the whole array to a block for each device


ONE_AXIS = [*itertools.product((FLOAT, INT), SHAPES), (HALF, PRIME), (BOOL, PRIME), (BOOL, EMPTY)]


@pytest.mark.parametrize(
    ("n", "dtype", "shape"),
    sliced([(n, *case) for n in (2, 4, 8) for case in ONE_AXIS], 1 / 2),
    ids=str,
)
def test_one_axis(n: int, dtype: np.dtype[Any], shape: Shape):
    """Under every monoid of the dtype."""
    assert_right(conversions((n,), shape, dtype, admissible(dtype)), turns=99, laws=99)


@pytest.mark.parametrize("shape", [EVEN, PRIME], ids=str)
@pytest.mark.parametrize(("sizes", "stages"), [((4,), 2), ((8,), 2), ((2,), 1)], ids=str)
def test_a_sum_over_the_whole_mesh_in_stages(sizes: Shape, stages: int, shape: Shape):
    """It sends as many bytes as in one stage, in a collective for each stage."""
    found = conversions(
        sizes,
        shape,
        FLOAT,
        ("sum",),
        hardware=replace(BYTES_ONLY, name="staged", whole_scatter_devices=0),
    )
    assert_right(found, turns=99, laws=99)
    kinds = [c.kind for c in collectives(found.program.as_text(), math.prod(sizes))]
    scatters = sum(step.kind == "reduce_scatter" for step in found.steps)
    assert scatters and kinds.count("reduce-scatter") == stages * scatters


LANES = (16, 130)


def test_exchanges_that_join_lanes_of_a_tpu():
    """Their results have a layout of their own. A gather of such lanes is charged copies of its
    result, and on other platforms none."""
    on_tpu = replace(sbp.HARDWARE["tpu-v5e"], ring_chips=1)
    assert joins_lanes((16, 65), LANES) and copies_for_lanes((16, 65), LANES)
    assert_right(conversions((2,), LANES, FLOAT, (), hardware=on_tpu), turns=99, laws=99)
    here, there = ((2,), (0,))
    prices = [
        next(s.seconds for s in space.steps_from(here) if s.target == there)
        for space in (
            space_of(LANES, (2,), (), h) for h in (on_tpu, replace(on_tpu, platform="cuda"))
        )
    ]
    copied = RELAYOUT_PASSES * 4 * math.prod(LANES) / on_tpu.hbm_bytes_per_second
    assert prices[0] - prices[1] == pytest.approx(copied)


@pytest.mark.parametrize(
    ("sizes", "dtype", "shape"),
    sliced(list(itertools.product([(2, 4), (4, 2)], [FLOAT, INT, BOOL], SHAPES)), 1 / 6, seed=5),
    ids=str,
)
def test_two_axes(sizes: Shape, dtype: np.dtype[Any], shape: Shape):
    """Every conversion; of the 34 round trips from each type 4, and 8 in `make laws`."""
    assert_right(conversions(sizes, shape, dtype, monoids_of(dtype)), turns=4, laws=8)


@pytest.mark.parametrize(
    ("dtype", "shape"), [(FLOAT, PRIME), (FLOAT, EMPTY), (INT, SMALL)], ids=str
)
def test_three_axes(dtype: np.dtype[Any], shape: Shape):
    """Between 8 of the 186 types with 4 round trips from each, and in `make laws` between 32 with
    8."""
    found = conversions((2, 2, 2), shape, dtype, monoids_of(dtype), share=8 / 186, laws=32 / 186)
    assert_right(found, turns=4, laws=8)


# ---- the steps ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("per_byte", "per_collective"), [(1.0, 0.0), (0.0, 1.0), (1.0, 50.0), (1.0, 1000.0)]
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("sizes", [(2,), (4,), (8,), (2, 4), (4, 2), (2, 2, 2)], ids=str)
def test_paths_are_cheapest(sizes: Shape, shape: Shape, per_byte: float, per_collective: float):
    """Every price of the planner's; the paths of 100 pairs of types, of 300 in `make laws`."""
    monoids = ("sum", "max")
    types = types_of(len(shape), len(sizes), monoids)
    best = cheapest(shape, sizes, types, per_byte, per_collective)
    hardware = replace(
        BYTES_ONLY,
        link_bytes_per_second=1 / per_byte if per_byte else math.inf,
        latency_seconds=per_collective,
    )
    space = space_of(shape, sizes, monoids, hardware)
    row = [space.index[codes] for t in types for codes in space.types if atoms_of(codes) == t]
    np.testing.assert_allclose(space.seconds()[np.ix_(row, row)], best, rtol=1e-12, atol=1e-7)
    pairs = list(itertools.product(range(len(types)), repeat=2))
    for i, j in sliced(pairs, min(1, 100 / len(pairs)), laws=min(1, 300 / len(pairs))):
        taken = space.path(space.types[row[i]], space.types[row[j]])
        price = sum(
            s.bytes_sent * per_byte + (s.kind not in ("slice", "mask", "zero_pad")) * per_collective
            for s in taken
        )
        assert price == pytest.approx(best[i, j], rel=1e-12, abs=1e-9), (
            f"{types[i]} to {types[j]} by {taken}"
        )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("sizes", [(8,), (2, 4)], ids=str)
def test_a_plan_finds_a_way_with_the_types_at_hand(sizes: Shape, shape: Shape):
    """A plan's spaces hold, besides the two types, only splits that leave no device empty, and only
    the monoids of the two."""
    types = types_of(len(shape), len(sizes), ("sum", "max"))
    codes_of = {atoms_of(codes): codes for codes in space_of(shape, sizes, ("sum", "max")).types}
    spaces: dict[Any, TypeSpace] = {}
    best: dict[Any, Any] = {}
    for source, target in itertools.product(types, repeat=2):
        monoids = tuple(sorted({a.monoid for a in (*source, *target) if isinstance(a, Unreduced)}))
        if monoids not in best:
            through = types_of(len(shape), len(sizes), monoids)
            best[monoids] = dict(
                zip(
                    itertools.product(through, repeat=2),
                    cheapest(shape, sizes, through, 1.0, 0.0).ravel(),
                    strict=True,
                )
            )
        pair = codes_of[source], codes_of[target]
        forced = frozenset((axis, c - 1) for t in pair for axis, c in enumerate(t) if c > 0)
        if (monoids, forced) not in spaces:
            spaces[monoids, forced] = TypeSpace(
                shape, 4, mesh_of(sizes), frozenset(monoids), forced
            )
        sent = sum(step.bytes_sent for step in spaces[monoids, forced].path(*pair))
        least = best[monoids][source, target]
        assert sent == pytest.approx(least) if shape == EVEN else sent >= least - 1e-9


def test_a_sum_that_is_read_whole_and_split_is_reduced_once():
    """The all-reduce sends 3/4 of the bytes twice; the slice of its result sends nothing."""

    def fn(x, y):
        z = x @ y
        return sbp.replicate(z, "d"), sbp.split(z, 0, "d")

    f = sbp.jit(fn, jax.sharding.AbstractMesh((4,), ("d",)), in_types=("d:S(1)", "d:S(0)"))
    x, y = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((64, 4096), (4096, 64)))
    assert f.plan(x, y).cost.bytes_per_device == 2 * 3 / 4 * 64 * 64 * 4


def test_formulae():
    """By hand: 96 bytes on 4 devices, 24 on each where they are split."""
    shape, n = (4, 6), 4
    types = types_of(2, 1, ("sum",))
    priced = lambda source: {repr(t[0]): sent for t, sent, _ in steps(shape, source, (n,), types)}
    assert {repr(source[0]): priced(source) for source in types} == {
        "B": {"S(0)": 0, "S(1)": 0, "P(sum)": 0},
        "S(0)": {"B": 3 / 4 * 96, "S(1)": 3 / 4 * 32, "P(sum)": 0},
        "S(1)": {"B": 3 / 4 * 128, "S(0)": 3 / 4 * 32, "P(sum)": 0},
        # Six columns in blocks of two.
        "P(sum)": {"B": 2 * 3 / 4 * 96, "S(0)": 3 / 4 * 96, "S(1)": 3 / 4 * 128},
    }


# ---- the tests can say no -----------------------------------------------------------------------


small_conversions = lambda: conversions((4,), (5, 7), FLOAT, ("sum", "max"))


def test_a_reduction_left_out_is_seen(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(boxing, "all_reduce", lambda x, monoid, names, n: x)
    wrong = list(small_conversions().wrong(np.random.default_rng(0)))
    assert any("P(sum)" in w and "all_reduce" in w for w in wrong) and all(
        "all_reduce" in w for w in wrong
    )


def test_padding_left_in_is_seen(monkeypatch: pytest.MonkeyPatch):
    """Where the padding lies shows in values, even if the shape is right."""
    monkeypatch.setattr(
        boxing,
        "_first",
        lambda x, dim, size: x[
            tuple(slice(-size, None) if d == dim else slice(None) for d in range(x.ndim))
        ],
    )
    assert any("all_gather" in w for w in small_conversions().wrong(np.random.default_rng(0)))


def test_a_device_that_disagrees_is_seen():
    found = small_conversions()
    whole = next(t for t in found.types if decode(t[0]) == decode(0))
    parts = np.zeros((4, 5, 7), np.float32)
    want = np.zeros((5, 7), np.float32)
    assert not list(found.differences((whole, whole), parts, whole, want))
    parts[3, 1, 1] = 2.0**-149
    assert "device (3,) reads" in next(iter(found.differences((whole, whole), parts, whole, want)))
