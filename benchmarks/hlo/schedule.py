"""Seconds of a step on the TPU compiler's own schedule, read from its optimised HLO text.

The compiler writes `estimated_cycles` beside each instruction that it schedules. This walks the
schedule with a clock: work takes its cycles, bodies of loops once per trip; a synchronous
collective takes its latency and its bytes over the bandwidth of a ring; an asynchronous one runs
beside what is scheduled between its start and its done, and only what is left at the done counts.
The figures are the compiler's estimate and a model of the network, no measurement: compare programs
for one topology.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from benchmarks.hlo.traffic import (
    ANY_COLLECTIVE,
    OPERAND,
    WHILE,
    callees,
    computations_of,
    group_members,
    instructions,
    loop_trips,
    result_shape,
    shape_bytes,
)

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_TARGET = re.compile(r'custom_call_target="([^"]+)"')
_PRODUCT = re.compile(r" (?:convolution|dot)\(")
_CALLS = (" call(", " conditional(", " fusion(")
_FREE_TARGETS = (
    "AllocateBuffer",
    "Sharding",
    "SPMD",
    "LayoutConstraint",
    "AssumeGatherIndicesInBound",
    "annotate_device_placement",
    "MoveTo",
    "ConcatBitcast",
    "SliceConcat",
    "PinToDevice",
)
"""Parts of the names of custom calls that do no work."""

_UNKNOWN = 1 << 50
"""Estimates from here on are the compiler's way to say that it has none."""

_MOST_HOPS = 16
"""Hops of which the latency counts: longer rings run on several links."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """What a collective takes on one kind of TPU.

    Arguments:
        hertz: of the core's clock.
        bandwidth: bytes a second of one ring, both directions of one torus dim.
        latency: seconds until the first byte of a collective is one hop on.
    """

    hertz: float
    bandwidth: float
    latency: float = 1e-6


CHIPS = {
    "v3": Chip(hertz=0.94e9, bandwidth=140e9),
    "v4": Chip(hertz=1.05e9, bandwidth=90e9),
    "v5e": Chip(hertz=1.5e9, bandwidth=90e9),
    "v5p": Chip(hertz=1.75e9, bandwidth=180e9),
    "v6e": Chip(hertz=1.9e9, bandwidth=180e9),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """What one call of a program takes on one device.

    Arguments:
        cycles: of all that the device computes.
        compute: the same in seconds.
        products: cycles of the operations that hold a matrix product or a convolution, with what
            the compiler fused into them.
        exposed: seconds of collectives beside which nothing is computed.
        exposed_by_kind: the same for each kind of collective, `synchronous` or `asynchronous`.
        bytes_per_device: what the device sends.
        unknown: instructions without an estimate, and loops without a trip count, which count as
            one turn. Figures with and without such a list do not compare.
    """

    cycles: float
    compute: float
    products: float
    exposed: float
    exposed_by_kind: Mapping[str, float]
    bytes_per_device: float
    unknown: tuple[str, ...]

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return self.compute + self.exposed


@dataclass(slots=True)
class _Passed:
    """What has passed since the start of a computation: cycles, those of products, exposed seconds,
    bytes sent, and the exposed seconds of each kind of collective."""

    cycles: float = 0.0
    products: float = 0.0
    exposed: float = 0.0
    sent: float = 0.0
    by_kind: Counter[str] = field(default_factory=Counter)

    def add(self, other: _Passed, times: int = 1) -> None:
        self.cycles += times * other.cycles
        self.products += times * other.products
        self.exposed += times * other.exposed
        self.sent += times * other.sent
        for kind, seconds in other.by_kind.items():
            self.by_kind[kind] += times * seconds


def step_time(hlo_text: str, num_devices: int, chip: str = "v5e") -> StepTime:
    """The step that the compiler scheduled.

    Arguments:
        hlo_text: `jax.stages.Compiled.as_text()` of a program that was compiled for TPU.
        num_devices: devices of the program, the group of a collective that names none.
        chip: a key of `CHIPS`.
    """
    walk = _Modules(hlo_text, num_devices, CHIPS[chip])
    found = walk.run(walk.entry)
    return StepTime(
        cycles=found.cycles,
        compute=found.cycles / walk.chip.hertz,
        products=found.products,
        exposed=found.exposed,
        exposed_by_kind=dict(found.by_kind),
        bytes_per_device=found.sent,
        unknown=tuple(sorted(walk.unknown)),
    )


class _Modules:
    """Walks the computations of one program in their scheduled order."""

    def __init__(self, hlo_text: str, num_devices: int, chip: Chip) -> None:
        self.computations, self.entry = computations_of(hlo_text)
        self.shapes = {
            name: result_shape(rhs)
            for lines in self.computations.values()
            for name, rhs in instructions(lines)
        }
        self.num_devices, self.chip = num_devices, chip
        self.unknown: set[str] = set()
        self._known: dict[str, _Passed] = {}

    def run(self, computation: str) -> _Passed:
        """One run of a computation."""
        if computation in self._known:
            return self._known[computation]
        self._known[computation] = _Passed()  # no computation calls itself
        schedule = _Schedule(self, computation)
        for name, rhs in instructions(self.computations.get(computation, [])):
            schedule.take(name, rhs)
        self._known[computation] = schedule.passed
        return schedule.passed

    def collective(self, name: str, rhs: str) -> tuple[str, float, float]:
        """The kind, bytes and seconds of a collective; TPU writes a reduce-scatter as a computation
        around an all-reduce, whose name is `name`."""
        found = ANY_COLLECTIVE.search(" " + rhs)
        assert found is not None
        kind, suffix = found.groups()
        result, _, rest = rhs.partition(f"{kind}{suffix or ''}(")
        operands = OPERAND.findall(rest.split(")")[0])
        size = sum(shape_bytes(self.shapes.get(operand, "")) for operand in operands)
        n = len(group_members(rhs, self.num_devices))
        share = (n - 1) / n
        match kind:
            case "all-reduce" if name.startswith("all-reduce-scatter"):
                kind, sent = "reduce-scatter", share * size
            case "all-reduce":
                # A start's result holds its operand, too.
                sent = 2 * share * max(size, 0.0 if suffix else shape_bytes(result))
            case "all-gather":
                sent = (n - 1) * size
            case "reduce-scatter" | "all-to-all" | "ragged-all-to-all":
                sent = share * size
            case _:
                sent = size
        hops = 1 if kind == "collective-permute" else max(1, n - 1)
        latency = self.chip.latency * min(hops, _MOST_HOPS)
        return kind, sent, latency + sent / self.chip.bandwidth

    def multiplies(self, rhs: str) -> bool:
        """Whether an instruction is a product or a convolution, or a fusion with one."""
        if _PRODUCT.search(rhs):
            return True
        return " fusion(" in rhs and any(
            self.multiplies(inner)
            for name in callees(rhs)
            for _, inner in instructions(self.computations.get(name, []))
        )

    def inside(self, names: list[str]) -> tuple[str, float, float] | None:
        """The first collective in computations, or in what they call."""
        for computation in names:
            for _, rhs in instructions(self.computations.get(computation, [])):
                if ANY_COLLECTIVE.search(" " + rhs):
                    return self.collective(computation, rhs)
                if (called := callees(rhs)) and (found := self.inside(called)):
                    return found
        return None

    def trips(self, name: str, rhs: str) -> int:
        """The turns of a loop."""
        trips = loop_trips(rhs, self.computations)
        if trips is None:
            self.unknown.add(f"trips of {name}")
        return trips or 1


class _Schedule:
    """The clock of one computation, and the collectives that are on their way."""

    def __init__(self, walk: _Modules, computation: str) -> None:
        self.walk, self.computation = walk, computation
        self.passed = _Passed()
        self.now = 0.0
        self.ends: dict[str, tuple[str, float]] = {}

    def take(self, name: str, rhs: str) -> None:
        """One instruction."""
        walk, called = self.walk, callees(rhs)
        collective = ANY_COLLECTIVE.search(" " + rhs)
        if loop := WHILE.search(rhs):
            self.call(walk.run(loop.group(2)), walk.trips(name, rhs))
        elif name.startswith("async-collective-start") or " async-start(" in rhs:
            if found := walk.inside(called):
                self.start(name, *found)
            self.work(name, rhs)
        elif name.startswith("async-collective-done") or " async-done(" in rhs:
            self.work(name, rhs)
            self.done(rhs, any_start=name.startswith("async-collective-done"))
        elif collective and collective.group(2) == "-done":
            self.done(rhs)
        elif collective:
            is_scatter = "all-reduce-scatter" in self.computation
            found = walk.collective(self.computation if is_scatter else name, rhs)
            if collective.group(2):
                self.start(name, *found)
            else:
                self.wait(*found)
        elif self.work(name, rhs):
            # TPU wraps a reduce-scatter into a fusion.
            for callee in () if "async_collective_fusion" in rhs else called:
                if callee.startswith("all-reduce-scatter") and (found := walk.inside([callee])):
                    self.wait(*found)
        elif any(call in rhs for call in _CALLS):
            for callee in called:
                self.call(walk.run(callee))
        elif " custom-call(" in rhs and not any(target in rhs for target in _FREE_TARGETS):
            target = _TARGET.search(rhs)
            walk.unknown.add(f"custom call {target.group(1) if target else name}")

    def call(self, inner: _Passed, times: int = 1) -> None:
        self.passed.add(inner, times)
        self.now += times * (inner.cycles / self.walk.chip.hertz + inner.exposed)

    def work(self, name: str, rhs: str) -> bool:
        """Adds the cycles of an instruction. Returns whether the compiler has an estimate."""
        found = _CYCLES.search(rhs)
        if found is None:
            return False
        if int(found.group(1)) >= _UNKNOWN:
            self.walk.unknown.add(f"cycles of {name}")
            return False
        cycles = int(found.group(1))
        self.call(_Passed(cycles=cycles, products=cycles if self.walk.multiplies(rhs) else 0))
        return True

    def wait(self, kind: str, sent: float, seconds: float, *, how: str = "synchronous") -> None:
        """A collective beside which nothing runs."""
        by_kind = Counter({f"{how} {kind}": seconds})
        self.call(_Passed(exposed=seconds, sent=sent, by_kind=by_kind))

    def start(self, name: str, kind: str, sent: float, seconds: float) -> None:
        self.passed.sent += sent
        self.ends[name] = kind, self.now + seconds

    def done(self, rhs: str, *, any_start: bool = False) -> None:
        """Waits for what is left of the collectives among the operands; with `any_start` for the
        oldest if there is none among them."""
        started = [operand for operand in OPERAND.findall(rhs) if operand in self.ends]
        if not started and any_start:
            started = list(self.ends)[:1]
        for name in started:
            if name in self.ends:  # an operand may stand twice
                kind, end = self.ends.pop(name)
                self.wait(kind, 0.0, max(0.0, end - self.now), how="asynchronous")


def hottest(hlo_text: str) -> Mapping[str, int]:
    """Cycles of one turn of each named operation of a program, most first."""
    cycles: dict[str, int] = {}
    for lines in computations_of(hlo_text)[0].values():
        for name, rhs in instructions(lines):
            found, op_name = _CYCLES.search(rhs), re.search(r'op_name="([^"]*)"', rhs)
            if found and int(found.group(1)) < _UNKNOWN:
                key = op_name.group(1) if op_name else name
                cycles[key] = cycles.get(key, 0) + int(found.group(1))
    return dict(sorted(cycles.items(), key=lambda item: -item[1]))
