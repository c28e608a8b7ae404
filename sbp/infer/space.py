"""The types that a value may have on a mesh, the costs of conversions between them (boxing), and
the rules on single steps of conversions.

A type is a tuple of small integers, its codes, one for each mesh axis: 0 is B, 1 + d is S(d), and
-1 - m is P with monoid number m.
"""

import functools
import heapq
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from scipy.sparse.csgraph import csgraph_from_dense, dijkstra

from sbp import _jax
from sbp.errors import SbpInternalError
from sbp.limits import Ban, Rules
from sbp.machine.hardware import TILE, copies_for_lanes
from sbp.machine.mesh import MeshSpec
from sbp.types import MONOIDS, Atom, B, NdSbp, Split, Unreduced

Code = int
Codes = tuple[int, ...]
StepKind = Literal[
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "all_to_all",
    "slice",
    "mask",
    "zero_pad",
    "to_device",
    "to_host",
]

INFINITE = math.inf

COLLECTIVE_PASS, LOCAL_PASS = 0.25, 0.01
"""Shares of a pass over a device's buffer in memory that a collective and a local step are
charged."""

RELAYOUT_PASSES = 7.0
"""Passes over its result that a gather of partly filled lanes is charged: the TPU compiler lays the
gathered dim out as the outermost one, and copies an array that meets the result into this layout
and what comes of both back (`tests/tpu/test_compiled_memory.py`)."""

JOINED_BYTES = 96 * 2**20
"""Bytes that the TPU compiler reduces in one all-reduce, of values that do not wait for each other:
a smaller one is charged its share of a start (`infer.cost`)."""

LOCAL_SECONDS = 1e-9
"""Seconds that a local step is charged besides, so that no path takes one without need."""


def encode(atom: Atom) -> Code:
    """The code of an atom."""
    return (
        1 + atom.dim
        if isinstance(atom, Split)
        else -1 - MONOIDS.index(atom.monoid)
        if isinstance(atom, Unreduced)
        else 0
    )


@functools.cache
def decode(code: Code) -> Atom:
    """The atom of a code.

    >>> [decode(c) for c in (0, 1, -1)]
    [B, S(0), P(sum)]
    """
    return B if code == 0 else Split(code - 1) if code > 0 else Unreduced(MONOIDS[-1 - code])


def to_type(codes: Codes, mesh: MeshSpec) -> NdSbp:
    """The ND type of codes on a mesh."""
    return NdSbp({axis: decode(c) for axis, c in zip(mesh.names, codes, strict=True)})


def from_type(t: NdSbp, mesh: MeshSpec) -> Codes:
    """The codes of an ND type. Axes that it does not name are B, and so are axes of size 1, on
    which S, B and P are the same."""
    return tuple(encode(t.get(axis)) if n > 1 else 0 for axis, n in mesh.axes)


def local_shape(shape: Sequence[int], codes: Codes, sizes: Sequence[int]) -> tuple[int, ...]:
    """The buffer of one device: each split rounds up, outer axes first (nested and uneven splits).

    >>> local_shape((15, 4), (1, 1), (2, 4))
    (2, 4)
    """
    local = list(shape)
    for code, n in zip(codes, sizes, strict=True):
        if code > 0:
            local[code - 1] = -(-local[code - 1] // n)
    return tuple(local)


def local_bytes(aval: Any, codes: Codes, sizes: Sequence[int]) -> int:
    """Bytes of the buffer of one device."""
    return math.prod(local_shape(aval.shape, codes, sizes)) * _jax.itemsize(aval.dtype)


def stack(codes: Codes) -> Codes:
    """The type of a stacked value (a scan's xs or ys) from that of one slice.

    >>> stack((1, 0))  # S(0), B
    (2, 0)
    """
    return tuple(c + 1 if c > 0 else c for c in codes)


def parts_of(
    codes: Codes, sizes: Sequence[int], forced: Collection[tuple[int, int]] = ()
) -> dict[int, int]:
    """In how many parts a type cuts each dim that it splits. Splits in `forced`, (mesh axis
    position, dim), do not count.

    >>> parts_of((2, 0, 2), (2, 4, 8))
    {1: 16}
    """
    parts: dict[int, int] = {}
    for position, (c, n) in enumerate(zip(codes, sizes, strict=True)):
        if c > 0 and (position, c - 1) not in forced:
            parts[c - 1] = parts.get(c - 1, 1) * n
    return parts


def is_even(shape: Sequence[int], codes: Codes, sizes: Sequence[int]) -> bool:
    """Whether JAX can hold a type: splits divide, and none is of an array without elements."""
    parts = parts_of(codes, sizes)
    divides = all(size % parts.get(dim, 1) == 0 for dim, size in enumerate(shape))
    return divides and (max(parts.values(), default=1) == 1 or all(size != 0 for size in shape))


def has_elements(
    shape: Sequence[Any], codes: Codes, sizes: Sequence[int], forced: frozenset[tuple[int, int]]
) -> bool:
    """Whether splits of one dim on several axes leave an element for each device. Those in
    `forced`, (mesh axis position, dim), do not count."""
    return all(shape[dim] >= n for dim, n in parts_of(codes, sizes, forced).items())


# ---- sums ---------------------------------------------------------------------------------------
# How partial sums of a value are added up, and what else its conversions cost.


@dataclass(frozen=True, slots=True)
class WideSum:
    """A sum of parts in a wider dtype than theirs, which the user chose (`reduce_dtype`).

    Arguments:
      dtype: the name of the wider dtype.
      dim: the tensor dim that is cut into one block for each device. An all-to-all exchanges the
        blocks, each device adds its blocks in `dtype`, and for an all-reduce an all-gather joins
        the sums. None where no dim has as many elements as there are devices: then the platform
        sums natively.
    """

    dtype: str
    dim: int | None


Kept = tuple[frozenset[int] | None, ...]
"""For each mesh axis the codes of the types that conversions may go through, None for all; empty
for all codes on all axes."""


@dataclass(frozen=True, slots=True)
class Reduction:
    """How partial sums of a value are added up, what else its conversions cost, and which types
    they may go through.

    Arguments:
      wide: the wider dtype in which they are accumulated (`WideSum`); None for their own.
      together: the number of values whose all-reduces start together, this one included
        (`infer.cost`).
      fused: whether the value reaches memory only where a collective converts it
        (`infer.cost`).
      kept: the codes of the types that conversions may go through.
    """

    wide: str | None = None
    together: int = 1
    fused: bool = False
    kept: Kept = ()


NATIVE = Reduction()
"""The platform's own."""


def block_dim(part: Sequence[int], n: int) -> int | None:
    """The dim along which a sum of parts is cut into blocks, one for each device.

    Arguments:
      part: the shape of one device's part.
      n: the number of devices.

    Returns:
      The dim with the least padding; of equals one whose blocks are whole tiles; of equals one that
      is not the last; of equals the first. None when no dim has `n` elements.

    >>> block_dim((2048, 8192), 16), block_dim((16, 8192), 16), block_dim((3,), 16)
    (0, 1, None)
    """
    tiles = (*(1 for _ in part[2:]), *TILE[2 - min(2, len(part)) :])

    def order(dim: int) -> tuple[float, bool, bool]:
        block = -(-part[dim] // n)
        return block * n / part[dim], block % tiles[dim] != 0, dim == len(part) - 1

    return min((d for d, size in enumerate(part) if size >= n), key=order, default=None)


# ---- steps and spaces ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Step:
    """One boxing step: one collective or local operation changes the atoms of some mesh axes.

    Arguments:
      kind: the collective, or the local operation.
      mesh_axes: positions of the mesh axes it runs over.
      source: codes before.
      target: codes after.
      bytes_sent: bytes that one device sends (ring optimum, padding included).
      seconds: alpha-beta time.
      wide: how the step sums where the user chose a wider dtype; None for the platform's own sum.
    """

    kind: StepKind
    mesh_axes: tuple[int, ...]
    source: Codes
    target: Codes
    bytes_sent: float
    seconds: float
    wide: WideSum | None = None


LOCAL: frozenset[str] = frozenset({"slice", "mask", "zero_pad", "to_device", "to_host"})
"""Steps that send nothing to other devices."""

_CHANGES: dict[tuple[str, str], StepKind] = {
    ("P", "B"): "all_reduce",
    ("P", "S"): "reduce_scatter",
    ("S", "B"): "all_gather",
    ("S", "S"): "all_to_all",
    ("B", "S"): "slice",
    ("B", "P"): "mask",
    ("S", "P"): "zero_pad",
}

_SUM = encode(Unreduced("sum"))


def _kind(code: Code) -> str:
    return "B" if code == 0 else "S" if code > 0 else "P"


LARGE = 700
"""Types of a space above which Dijkstra's algorithm finds the cheapest conversions. On more than
three mesh axes, the conversions of such a space go through some of its types only."""


def kept_codes(types: Iterable[Codes]) -> tuple[frozenset[Code], ...]:
    """For each mesh axis the codes of some types, with others that conversions may go through.

    B is added where the types differ, and where another axis splits the same dim. The splits of the
    other axes are added where the types differ and one is partial: a sum may be scattered first.

    Arguments:
      types: the types.

    >>> [sorted(codes) for codes in kept_codes([(1, 3, 0), (2, 3, 0)])]
    [[0, 1, 2], [3], [0]]
    """
    columns = [frozenset(column) for column in zip(*types, strict=True)]
    splits = frozenset(c for column in columns for c in column if c > 0)

    def kept(k: int) -> frozenset[Code]:
        here, others = columns[k], frozenset[Code]().union(*columns[:k], *columns[k + 1 :])
        if len(here) == 1:
            return here | {0} if here & others & splits else here
        return here.union((0,), splits if min(here) < 0 else ())

    return tuple(map(kept, range(len(columns))))


class TypeSpace:
    """The types of one shape on a mesh with the step graph between them.

    Arguments:
      shape: the global shape.
      itemsize: bytes of one element.
      mesh: the mesh.
      monoids: monoids that may occur.
      forced: (mesh axis position, dim) of splits that a pin asks for, although the dim has fewer
          elements than the axis has devices.
      reduction: how the value is converted.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        itemsize: int,
        mesh: MeshSpec,
        monoids: frozenset[str],
        forced: frozenset[tuple[int, int]] = frozenset(),
        reduction: Reduction = NATIVE,
    ) -> None:
        self.shape, self.itemsize, self.mesh, self.sizes = shape, itemsize, mesh, mesh.sizes
        self.reduction = reduction
        partials = [-1 - MONOIDS.index(m) for m in sorted(monoids)]
        choices = [
            [
                0,
                *(1 + d for d, size in enumerate(shape) if size >= n or (position, d) in forced),
                *partials,
            ]
            if n > 1
            else [0]
            for position, n in enumerate(self.sizes)
        ]
        for k, some in enumerate(reduction.kept):
            choices[k] = [c for c in choices[k] if some is None or c in some]
        self.types: list[Codes] = [
            t
            for t in itertools.product(*choices)
            if len({c for c in t if c < 0}) <= 1 and has_elements(shape, t, self.sizes, forced)
        ]
        self.index: dict[Codes, int] = {t: i for i, t in enumerate(self.types)}
        self.local_bytes = np.array(
            [math.prod(local_shape(shape, t, self.sizes)) * itemsize for t in self.types],
            dtype=float,
        )
        self._codes = [{t[position] for t in self.types} for position in range(len(self.sizes))]
        self._seconds = functools.cache(self._cheapest)
        self._collective = functools.cache(mesh.collective)
        self.unlimited = Rules(("auto",) * len(self.sizes))

    def steps_from(self, source: Codes) -> list[Step]:
        """The single steps out of a type. A step may split or join a dim on one axis only while no
        inner axis splits the same dim."""
        steps: list[Step] = []
        here = float(self.local_bytes[self.index[source]])
        for position, n in enumerate(self.sizes):
            old, inner = source[position], source[position + 1 :]
            if n == 1 or (old > 0 and old in inner):
                continue
            for new in self._codes[position]:
                kind = _CHANGES.get((_kind(old), _kind(new)))
                target = (*source[:position], new, *inner)
                if kind and new != old and target in self.index and not (new > 0 and new in inner):
                    steps.append(self._step(kind, (position,), source, target, n, here))
        joint: dict[StepKind, tuple[int, ...]] = {
            "all_reduce": tuple(i for i, c in enumerate(source) if c < 0),
            "all_gather": tuple(i for i, c in enumerate(source) if c > 0),
        }
        for kind, several in joint.items():
            for count in range(2, len(several) + 1):
                for axes in itertools.combinations(several, count):
                    if kind == "all_reduce" or not any(
                        c == source[i] and k not in axes
                        for i in axes
                        for k, c in enumerate(source)
                        if k > i
                    ):
                        target = tuple(0 if i in axes else c for i, c in enumerate(source))
                        n = math.prod(self.sizes[i] for i in axes)
                        if target in self.index:
                            steps.append(self._step(kind, axes, source, target, n, here))
        return steps

    def _step(
        self,
        kind: StepKind,
        axes: tuple[int, ...],
        source: Codes,
        target: Codes,
        n: int,
        here: float,
    ) -> Step:
        there = float(self.local_bytes[self.index[target]])
        share, how, wide = (n - 1) / n, None, self.reduction.wide
        part, result = (local_shape(self.shape, t, self.sizes) for t in (source, target))
        if wide is not None and source[axes[0]] == _SUM:
            scattered = target[axes[0]]
            how = WideSum(wide, scattered - 1 if scattered else block_dim(part, n))
            if how.dim is not None:
                return self._wide_step(kind, axes, source, target, n, how)
        run: str = kind
        match kind:
            case "all_reduce":
                sent = 2 * share * here
            case "reduce_scatter":
                run = "staged_reduce_scatter" if self.mesh.stages(n) else kind
                sent = share * max(here, there * n)
            case "all_gather":
                sent = (n - 1) * here
            case "all_to_all":
                sent = share * self._exchanged_bytes(source, target[axes[0]] - 1, n)
            case _:
                sent = 0.0
        seconds, hardware = (
            self._step_seconds(run, axes, sent, max(here, there)),
            self.mesh.hardware,
        )
        if kind == "all_gather" and hardware.platform == "tpu" and copies_for_lanes(part, result):
            seconds += RELAYOUT_PASSES * there / hardware.hbm_bytes_per_second
        return Step(kind, axes, source, target, sent, seconds, how)

    def _wide_step(
        self,
        kind: StepKind,
        axes: tuple[int, ...],
        source: Codes,
        target: Codes,
        n: int,
        how: WideSum,
    ) -> Step:
        """A sum in a wider dtype: an all-to-all, a pass over memory that reads n blocks and writes
        one, and for an all-reduce an all-gather."""
        assert how.dim is not None
        padded = float(self._exchanged_bytes(source, how.dim, n))
        sent = (n - 1) / n * padded
        seconds = self._step_seconds("all_to_all", axes, sent, padded)
        seconds += (1 + 1 / n) * padded / self.mesh.hardware.hbm_bytes_per_second
        if kind == "all_reduce":
            there = float(self.local_bytes[self.index[target]])
            seconds += self._step_seconds("all_gather", axes, sent, max(padded / n, there))
            sent *= 2
        return Step(kind, axes, source, target, sent, seconds, how)

    def _step_seconds(
        self, kind: str, axes: tuple[int, ...], sent: float, buffer_bytes: float
    ) -> float:
        """Seconds of one step: its collective, and a share of a pass over the buffer in memory.

        Arguments:
          kind: the collective that runs, or a local step.
          axes: positions of the mesh axes it runs over.
          sent: bytes that a device sends.
          buffer_bytes: bytes of the larger of its operand and its result on a device.
        """
        one_pass = buffer_bytes / self.mesh.hardware.hbm_bytes_per_second
        together = self.reduction.together
        if kind in LOCAL:
            # Padded parts are no sum of the program: their all-reduce pays its own start.
            padded = together > 1 and kind in ("zero_pad", "mask")
            started = self._collective("all_reduce", axes).seconds if padded else 0.0
            return LOCAL_SECONDS + LOCAL_PASS * one_pass + started
        joined = min(1.0, max(1 / together, buffer_bytes / JOINED_BYTES))
        starts = joined if kind == "all_reduce" else 1.0
        return self._collective(kind, axes).of(sent, starts) + COLLECTIVE_PASS * one_pass

    def _exchanged_bytes(self, source: Codes, dim: int, n: int) -> int:
        """Bytes of one device's part, padded so that `dim` has n equal blocks."""
        part = list(local_shape(self.shape, source, self.sizes))
        part[dim] = -(-part[dim] // n) * n
        return math.prod(part) * self.itemsize

    def seconds(self, rules: Rules | None = None) -> np.ndarray:
        """Seconds of the cheapest steps between every two types, an array [from, to]. It is
        infinite where the rules allow none. None allows all steps."""
        return self._seconds(rules or self.unlimited)

    def _cheapest(self, rules: Rules) -> np.ndarray:
        """What `seconds` gives: single steps, then any number of them."""
        cost = np.where(np.eye(len(self.types)), 0.0, INFINITE)
        for i, t in enumerate(self.types):
            for step in self.steps_from(t):
                if rules.allows(step.kind, step.mesh_axes, step.bytes_sent):
                    j = self.index[step.target]
                    cost[i, j] = min(cost[i, j], step.seconds)
        if len(cost) > LARGE:
            return dijkstra(csgraph_from_dense(cost, null_value=INFINITE))
        for k in range(len(cost)):
            np.minimum(cost, cost[:, k, None] + cost[None, k, :], out=cost)
        return cost

    def _of_both(self, bytes_per_second: float) -> np.ndarray:
        """Seconds of the bytes of every two types together, an array [from, to]."""
        return (self.local_bytes[:, None] + self.local_bytes[None, :]) / bytes_per_second

    def path(self, source: Codes, target: Codes, rules: Rules | None = None) -> tuple[Step, ...]:
        """The cheapest steps from one type to another. Of equal paths the first one found is taken,
        in a fixed order.

        Raises:
          SbpInternalError: if the rules allow no path.
        """
        if source == target:
            return ()
        rules = rules or self.unlimited
        best: dict[Codes, float] = {source: 0.0}
        queue: list[tuple[float, int, Codes, tuple[Step, ...]]] = [(0.0, 0, source, ())]
        counter = itertools.count(1)
        while queue:
            cost, _, here, steps = heapq.heappop(queue)
            if here == target:
                return steps
            if cost > best[here]:
                continue
            for step in self.steps_from(here):
                total = cost + step.seconds
                is_better = total < best.get(step.target, INFINITE)
                if is_better and rules.allows(step.kind, step.mesh_axes, step.bytes_sent):
                    best[step.target] = total
                    heapq.heappush(queue, (total, next(counter), step.target, (*steps, step)))
        raise SbpInternalError(f"no boxing from {source} to {target} on shape {self.shape}")


# ---- values of a program -------------------------------------------------------------------------
# A type space for each shape, dtype, memory and way of summing.


Needs = tuple[frozenset[tuple[int, int]], frozenset[str]]
"""What a type space has for some types: (mesh axis, tensor dim) of splits into more parts than the
dim has elements, and the monoids of partials."""


def needs_of(shape: Sequence[int], types: Collection[Codes], sizes: Sequence[int]) -> Needs:
    """What a type space needs to have some types of a value.

    Arguments:
      shape: the shape of the value.
      types: its types.
      sizes: the sizes of the mesh axes.
    """
    forced = {
        (position, c - 1)
        for t in types
        for position, c in enumerate(t)
        if c > 0 and shape[c - 1] < parts_of(t, sizes)[c - 1]
    }
    return frozenset(forced), all_needs_of(types)[1]


def all_needs_of(types: Collection[Codes]) -> Needs:
    """What a type space needs to have some types, whatever the shape: all their splits and
    monoids.

    >>> splits, monoids = all_needs_of([(1, -1), (0, 2)])
    >>> sorted(splits), sorted(monoids)
    ([(0, 0), (1, 1)], ['sum'])
    """
    splits = frozenset((k, c - 1) for t in types for k, c in enumerate(t) if c > 0)
    return splits, frozenset(MONOIDS[-1 - c] for t in types for c in t if c < 0)


class HostSpace(TypeSpace):
    """The types of a value in host memory. Collectives run in device memory, so a conversion copies
    the value there, converts it and copies the result back."""

    def seconds(self, rules: Rules | None = None) -> np.ndarray:
        """Seconds of the cheapest conversion between every two types, with both copies; see
        `TypeSpace.seconds`."""
        copies = self._of_both(self.mesh.hardware.host_bytes_per_second)
        np.fill_diagonal(copies, 0.0)
        return super().seconds(rules) + copies

    def path(self, source: Codes, target: Codes, rules: Rules | None = None) -> tuple[Step, ...]:
        """The cheapest steps from one type to another, between the two copies; see
        `TypeSpace.path`."""
        steps = super().path(source, target, rules)
        ends: tuple[tuple[StepKind, Codes], ...] = (("to_device", source), ("to_host", target))
        rate = self.mesh.hardware.host_bytes_per_second
        first, last = (
            Step(kind, (), t, t, 0.0, float(self.local_bytes[self.index[t]]) / rate)
            for kind, t in ends
        )
        return (first, *steps, last) if steps else ()


class FusedSpace(TypeSpace):
    """The types of a value that is fused with its readers. A conversion that sends something makes
    it reach memory: it is written before, and read after. Local steps are fused as well."""

    @functools.cached_property
    def _unfused(self) -> Callable[[Rules], np.ndarray]:
        """What `seconds` would give if the value were not fused."""
        return functools.cache(super()._cheapest)

    def _cheapest(self, rules: Rules) -> np.ndarray:
        """What `seconds` gives: local steps, then others with what they write and read, then local
        steps."""
        ends, sent = self._local(rules), self._sent(rules)
        for k in range(len(self.types)):
            sent = np.minimum(sent, ends[:, k, None] + sent[None, k, :])
        for k in range(len(self.types)):
            sent = np.minimum(sent, sent[:, k, None] + ends[None, k, :])
        return np.minimum(ends, sent)

    def path(self, source: Codes, target: Codes, rules: Rules | None = None) -> tuple[Step, ...]:
        """The cheapest steps; the first that sends something pays what it writes and reads."""
        rules = rules or self.unlimited
        i, j = self.index[source], self.index[target]
        local, sent = self._local(rules), self._sent(rules)
        through = local[i, :, None] + sent + local[None, :, j]
        if local[i, j] <= through.min():
            return super().path(source, target, self._on_device(rules))
        begin, end = np.unravel_index(through.argmin(), through.shape)
        here, there = self.types[int(begin)], self.types[int(end)]
        steps = list(super().path(here, there, rules))
        at = next((k for k, step in enumerate(steps) if step.bytes_sent), 0)
        more = float(self._of_both(self.mesh.hardware.hbm_bytes_per_second)[begin, end])
        steps[at] = replace(steps[at], seconds=steps[at].seconds + more)
        alone = self._on_device(rules)
        before, after = super().path(source, here, alone), super().path(there, target, alone)
        return (*before, *steps, *after)

    def _local(self, rules: Rules) -> np.ndarray:
        return self._unfused(self._on_device(rules))

    def _sent(self, rules: Rules) -> np.ndarray:
        return self._unfused(rules) + self._of_both(self.mesh.hardware.hbm_bytes_per_second)

    def _on_device(self, rules: Rules) -> Rules:
        """The rules without steps that send something."""
        ban = Ban(kind=None, mesh_axes=frozenset(range(len(self.sizes))), above=0.0)
        return replace(rules, bans=(*rules.bans, ban))


class Spaces:
    """The type spaces of the values of a program on a mesh."""

    def __init__(self, mesh: MeshSpec) -> None:
        self.mesh = mesh
        self._get = functools.cache(self._make)

    def _make(
        self,
        shape: tuple[int, ...],
        itemsize: int,
        in_host: bool,
        monoids: frozenset[str],
        forced: frozenset[tuple[int, int]],
        reduction: Reduction,
    ) -> TypeSpace:
        kind = HostSpace if in_host else FusedSpace if reduction.fused else TypeSpace
        return kind(shape, itemsize, self.mesh, monoids, forced, reduction)

    def of(
        self,
        aval: Any,
        monoids: frozenset[str],
        forced: frozenset[tuple[int, int]] = frozenset(),
        reduction: Reduction = NATIVE,
        kept: Kept = (),
    ) -> TypeSpace:
        """The space of one value.

        Arguments:
          aval: its shape, dtype and memory.
          monoids, forced: as `TypeSpace` takes them.
          reduction: how partial sums are added up, and what else conversions cost.
          kept: the codes on each mesh axis if the space is large; empty for all.
        """
        shape, itemsize = tuple(aval.shape), _jax.itemsize(aval.dtype)
        codes = (1 + len(monoids) + sum(size >= n for size in shape) for _, n in self.mesh.axes)
        if kept and math.prod(codes) > LARGE:
            reduction = replace(reduction, kept=kept)
        return self._get(shape, itemsize, _jax.in_host(aval), monoids, forced, reduction)
