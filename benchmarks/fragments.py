"""Our price of pieces of training programs beside the TPU compiler's estimate, on one device.

    python -m benchmarks.fragments                 # all fragments, and errors by class
    python -m benchmarks.fragments --half tuned    # those that the model was tuned on; or `unseen`
    python -m benchmarks.fragments --held-out      # 24 others, on which no price was tuned
    python -m benchmarks.fragments --only softmax  # classes, one line for each fragment
    python -m benchmarks.fragments --model fused   # by `benchmarks.fused_seconds`, not by prices

`--estimates benchmarks/fragments_v5e.json` takes the compiler's estimates from a file (of libtpu
0.0.52) instead of compiling for half an hour.

Each fragment is compiled ahead of time for one v5e chip as a program of its own. The judge is the
sum of its `estimated_cycles` (`benchmarks.hlo.schedule`). A seed splits the fragments of each class
into a half on which prices may be tuned, and an unseen half. Classes whose prices are off by more
than `MOST_OFF`, in the geometric mean, are named at the end.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

import sbp
from benchmarks.fragment_classes import CLASSES, Fragment, fragments
from benchmarks.fragments_held_out import HELD_OUT, held_out
from benchmarks.fused_seconds import estimated_seconds
from benchmarks.gshard_bytes import MIB  # sets the ahead-of-time environment before JAX is used
from benchmarks.hlo.schedule import CHIPS, step_time

MOST_OFF = 0.3
"""How far the price of a class of fragments may be off."""


def estimated(fragment: Fragment, chip: Any, kept: Path | None = None) -> float:
    """The compiler's seconds of a fragment on one device.

    Raises:
        ValueError: where the compiler has no estimate of a part.
    """
    place = NamedSharding(Mesh(np.array([chip]), ("d",)), PartitionSpec())
    args = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), fragment.avals
    )
    text = jax.jit(fragment.fn).lower(*args).compile().as_text()
    assert text is not None
    if kept:
        (kept / f"{fragment}.hlo".replace(" ", "_")).write_text(text, encoding="utf-8")
    found = step_time(text, 1)
    if any("custom call" not in u for u in found.unknown):
        raise ValueError(f"{fragment}: {', '.join(found.unknown)}")
    return found.cycles / CHIPS["v5e"].hertz


def priced(fragment: Fragment, model: str) -> float:
    """Our seconds of a fragment on one device, by a model of `--model`."""
    mesh = AbstractMesh((1,), ("d",))
    plan = sbp.jit(fragment.fn, mesh, hardware="tpu-v5e").plan(*fragment.avals)
    return plan.cost.seconds if model == "prices" else estimated_seconds(plan.program.typing)


def _megabytes(fragment: Fragment) -> float:
    """MiB of a fragment's arguments."""
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(fragment.avals)) / MIB


def _errors(ratios: list[float]) -> str:
    """The median error of prices over estimates, and the ratio of their geometric means."""
    errors = sorted(abs(r - 1) for r in ratios)
    mean = math.exp(sum(math.log(r) for r in ratios) / len(ratios))
    return (
        f"median error {errors[len(errors) // 2]:6.1%}, geometric mean {mean:6.2f} of the estimate"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--half", choices=("tuned", "unseen"))
    parser.add_argument("--only", nargs="*", help=f"of: {', '.join(CLASSES)}")
    parser.add_argument(
        "--held-out",
        action="store_true",
        help=f"others than these: {', '.join(make.__name__ for make in HELD_OUT)}",
    )
    parser.add_argument(
        "--model",
        choices=("prices", "fused"),
        default="prices",
        help="prices: by which types are chosen (default); fused: a model on trial",
    )
    parser.add_argument("--estimates", type=Path, help="a file of estimates, read and completed")
    parser.add_argument("--save", type=Path, help="a folder for the texts of the programs")
    args = parser.parse_args()
    known: dict[str, float] = {}
    if args.estimates and args.estimates.exists():
        known = json.loads(args.estimates.read_text(encoding="utf-8"))
    if args.save:
        args.save.mkdir(parents=True, exist_ok=True)
    chip = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices[0]
    ratios: dict[str, list[float]] = defaultdict(list)
    halves: dict[bool, list[float]] = {True: [], False: []}
    for f in held_out() if args.held_out else fragments():
        if (args.only and f.kind not in args.only) or (
            args.half and (args.half == "unseen") != f.unseen
        ):
            continue
        if str(f) not in known:
            try:
                known[str(f)] = estimated(f, chip, args.save)
            except ValueError as error:
                print(f"left out: {error}", flush=True)
                known[str(f)] = 0.0
            if args.estimates:
                args.estimates.write_text(json.dumps(known, indent=1), encoding="utf-8")
        if not known[str(f)]:
            continue
        price = priced(f, args.model)
        ratios[f.kind].append(price / known[str(f)])
        halves[f.unseen].append(price / known[str(f)])
        if args.only:
            half = "unseen" if f.unseen else "tuned"
            print(
                f"{f!s:44s}{half:8s}{_megabytes(f):7.0f} MiB in, estimate"
                f" {known[str(f)] * 1e6:9.1f} us, price"
                f" {price * 1e6:9.1f} us, {price / known[str(f)]:5.2f}"
            )
    for kind, found in sorted(ratios.items(), key=lambda i: sum(map(math.log, i[1])) / len(i[1])):
        print(f"{kind:20s}{len(found):3d} fragments: {_errors(found)}")
    for unseen, found in halves.items():
        if found:
            print(
                f"{'unseen' if unseen else 'tuned':20s}{len(found):3d} fragments: {_errors(found)}"
            )
    if all(halves.values()):
        print(f"all: {_errors([*halves[False], *halves[True]])}")
    means = {k: math.exp(sum(map(math.log, r)) / len(r)) for k, r in ratios.items()}
    off = [k for k, mean in means.items() if abs(mean - 1) > MOST_OFF]
    print(f"off by more than {MOST_OFF:.0%}: {', '.join(off) or 'none'}")


if __name__ == "__main__":
    main()
