"""Figures of compiled steps: how they compare, the file that keeps them, and the tables of
docs/benchmarks.md.

python -m benchmarks.steps --write      # measures, and keeps the figures
python -m benchmarks.steps.figures      # prints the tables of the figures that were kept
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gshard_bytes import MIB  # sets the ahead-of-time environment before JAX is used
from benchmarks.hlo.schedule import CHIPS, StepTime

KEPT = Path(__file__).with_name("figures.csv")
ASKED = {"bytes": 1.0, "step": 1.02, "memory": 1.05}
"""What is asked of us at most, over the better expert. Figures above it are bold."""

EXPERTS = {"expert": "`jit`", "shard_map": "by hand"}
"""The sides that we are compared with, and their names in docs/benchmarks.md."""

Ratios = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a compiled step takes on one device.

    Arguments:
        seconds: of the whole step.
        exposed: of collectives beside which nothing is computed.
        products: seconds of the operations that hold a matrix product or a convolution.
        sent: bytes.
        held: bytes of device memory.
        uncounted: kinds of work that have no estimate.
    """

    seconds: float
    exposed: float
    products: float
    sent: float
    held: float
    uncounted: tuple[str, ...] = ()

    @classmethod
    def of(cls, step: StepTime, held: float, chip: str) -> Figures:
        kinds = {re.sub(r"[.\d]+$", "", name) for name in step.unknown}  # no compiler's numbers
        return cls(
            seconds=step.seconds,
            exposed=step.exposed,
            products=step.products / CHIPS[chip].hertz,
            sent=step.bytes_per_device,
            held=held,
            uncounted=tuple(sorted(kinds)),
        )

    def __str__(self) -> str:
        unknown = f"; not counted: {', '.join(self.uncounted)}" if self.uncounted else ""
        return (
            f"{self.seconds * 1e3:9.3f} ms ({self.products * 1e3:.3f} in products, exposed"
            f" {self.exposed * 1e3:.3f}), {self.sent / MIB:8.1f} MiB sent,"
            f" {self.held / MIB:8.1f} MiB held{unknown}"
        )


def compared(ours: Figures, *experts: Figures) -> Ratios:
    """sbp's figures divided by the better expert's. The time is left out where the compiler can
    estimate only one of the two programs."""
    ratios = {
        "bytes": ours.sent / max(1.0, min(e.sent for e in experts)),
        "memory": ours.held / min(e.held for e in experts),
    }
    comparable = [e.seconds for e in experts if e.uncounted == ours.uncounted]
    if comparable:
        ratios["step"] = ours.seconds / min(comparable)
    return ratios


def floor(sides: Iterable[Figures]) -> float:
    """Seconds of products in the program that spends the least on them."""
    return min(side.products for side in sides)


def geometric_means(rows: Iterable[Ratios]) -> dict[str, tuple[float, int]]:
    """The mean of each figure, and of how many rows."""
    found: dict[str, list[float]] = {what: [] for what in ASKED}
    for row in rows:
        for what, value in row.items():
            found[what].append(value)
    return {
        what: (math.exp(sum(map(math.log, r)) / len(r)), len(r)) for what, r in found.items() if r
    }


def read(path: Path = KEPT) -> dict[str, dict[str, Figures]]:
    """The kept figures by step and side."""
    found: dict[str, dict[str, Figures]] = {}
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for row in csv.DictReader(line for line in lines if not line.startswith("#")):
        found.setdefault(row["step"], {})[row["side"]] = Figures(
            seconds=float(row["seconds"]),
            exposed=float(row["exposed"]),
            products=float(row["products"]),
            sent=float(row["sent"]),
            held=float(row["held"]),
            uncounted=tuple(filter(None, row["uncounted"].split(";"))),
        )
    return found


def write(figures: Mapping[str, Mapping[str, Figures]], libtpu: str, path: Path = KEPT) -> None:
    """Keeps figures, each in the place of what the file had for its step and side.

    Arguments:
        figures: by step and side.
        libtpu: the version of the compiler.
        path: the file.
    """
    kept = read(path)
    for name, sides in figures.items():
        kept.setdefault(name, {}).update(sides)
    with path.open("w", encoding="utf-8", newline="") as file:
        file.write(f"# libtpu {libtpu}; seconds and bytes of one device\n")
        out = csv.writer(file, lineterminator="\n")
        out.writerow(
            ["step", "side", "seconds", "exposed", "products", "sent", "held", "uncounted"]
        )
        for name, sides in sorted(kept.items()):
            for side, f in sorted(sides.items()):
                seconds = (f"{s:.6f}" for s in (f.seconds, f.exposed, f.products))
                sizes = (round(f.sent), round(f.held))
                out.writerow([name, side, *seconds, *sizes, ";".join(f.uncounted)])


def _cell(what: str, ratios: Ratios) -> str:
    if what not in ratios:
        return "void"
    text = f"{ratios[what]:.2f}"
    return f"**{text}**" if float(text) > ASKED[what] else text


def table(figures: Mapping[str, Mapping[str, Figures]], titles: Mapping[str, str]) -> str:
    """The table of the steps in `titles`: worst first, that is by the figure that is furthest
    above what is asked."""
    rows, ratios = [], []
    for name, title in titles.items():
        sides = figures.get(name, {})
        experts = {side: sides[side] for side in EXPERTS if side in sides}
        if "sbp" not in sides or not experts:
            continue
        ratio = compared(sides["sbp"], *experts.values())
        ratios.append(ratio)
        cells = [
            title,
            ", ".join(EXPERTS[side] for side in experts),
            *(_cell(what, ratio) for what in ASKED),
            f"{floor(sides.values()) / sides['sbp'].seconds:.2f}",
        ]
        worst = max(value / ASKED[what] for what, value in ratio.items())
        rows.append((-worst, "| " + " | ".join(cells) + " |"))
    means = geometric_means(ratios)
    last = [f"{m:.2f}" + (f" of {n}" if n < len(rows) else "") for m, n in means.values()]
    return "\n".join(
        [
            "| step | experts | bytes sent | time | memory | floor |",
            "|---|---|---|---|---|---|",
            *(row for _, row in sorted(rows)),
            f"| geometric mean | | {' | '.join(last)} | |",
        ]
    )


def free_table(figures: Mapping[str, Mapping[str, Figures]], titles: Mapping[str, str]) -> str:
    """The table of the steps in `titles` that were compiled without types: over `sbp` with
    types, in the order of `titles`."""
    rows = []
    for name, title in titles.items():
        sides = figures.get(name, {})
        if "free" in sides:
            ratio = compared(sides["free"], sides["sbp"])
            rows.append("| " + " | ".join([title, *(_cell(what, ratio) for what in ASKED)]) + " |")
    return "\n".join(["| step | bytes sent | time | memory |", "|---|---|---|---|", *rows])


def titles(steps: Mapping[str, Callable[[], object]]) -> dict[str, str]:
    """The name of each step in docs/benchmarks.md: the first sentence of its docstring."""
    return {name: (step.__doc__ or name).split(".")[0] for name, step in steps.items()}


def tables() -> list[str]:
    """The three tables: the suite, the steps that no price was corrected on, and the steps that
    were compiled without types."""
    from benchmarks.steps.suite import SUITE  # here: what reads figures needs no step
    from benchmarks.steps.unseen import UNSEEN

    kept = read()
    return [
        *(table(kept, titles(steps)) for steps in (SUITE, UNSEEN)),
        free_table(kept, titles(SUITE)),
    ]


if __name__ == "__main__":
    print("\n\n".join(tables()))
