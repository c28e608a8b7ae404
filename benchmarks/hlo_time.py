"""Cycles of a compiled TPU program's own work, read from its optimised HLO text.

The TPU compiler writes `estimated_cycles` beside each instruction that it schedules. This adds them
up, bodies of loops once per trip. Collectives have none: `benchmarks.hlo_comm` counts their bytes.
The figures are the compiler's estimate, no measurement: compare programs for one topology.

    python -m benchmarks.hlo_time program.hlo.txt
"""

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.hlo_comm import (
    WHILE,
    callees,
    computations_of,
    instructions,
    is_collective,
    loop_trips,
)

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_CALLS = (" call(", " conditional(", " fusion(")
UNKNOWN = 1 << 50
"""Estimates from here on are the compiler's way to say that it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cycles:
    """The estimate of a program.

    Arguments:
        cycles: of all that one device computes in one call.
        unknown: instructions without an estimate, and loops without a trip count, which count as
            one turn. Figures with and without such a list do not compare.
    """

    cycles: int
    unknown: tuple[str, ...]


def compute_cycles(hlo_text: str) -> Cycles:
    """The compiler's estimate for one call of a program.

    Arguments:
        hlo_text: `jax.stages.Compiled.as_text()` of a program that was compiled for TPU.
    """
    computations, entry = computations_of(hlo_text)
    unknown: set[str] = set()
    return Cycles(cycles=_cycles(entry, computations, {}, unknown), unknown=tuple(sorted(unknown)))


def _cycles(
    computation: str,
    computations: Mapping[str, list[str]],
    known: dict[str, int],
    unknown: set[str],
) -> int:
    """The cycles of one run of a computation; `known` caches those of other computations."""
    if computation not in known:
        total = 0
        for name, rhs in instructions(computations.get(computation, [])):
            estimate = _CYCLES.search(rhs)
            if loop := WHILE.search(rhs):
                trips = loop_trips(rhs, computations)
                if trips is None:
                    unknown.add(f"trips of {name}")
                total += (trips or 1) * _cycles(loop.group(2), computations, known, unknown)
            elif is_collective(rhs):
                continue
            elif estimate and int(estimate.group(1)) < UNKNOWN:
                total += int(estimate.group(1))
            elif estimate:
                unknown.add(f"cycles of {name}")
            elif any(call in rhs for call in _CALLS):
                total += sum(_cycles(c, computations, known, unknown) for c in callees(rhs))
        known[computation] = total
    return known[computation]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("hlo", type=Path, help="text of an optimised HLO module for TPU")
    found = compute_cycles(parser.parse_args().hlo.read_text(encoding="utf-8"))
    print(f"{found.cycles / 1e6:.2f} Mcycles; not counted: {', '.join(found.unknown) or 'nothing'}")


if __name__ == "__main__":
    main()
