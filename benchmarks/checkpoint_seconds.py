"""Seconds that a training run loses with each checkpoint.

    python -m benchmarks.checkpoint_seconds
    python -m benchmarks.checkpoint_seconds --preset tiny-test --rounds 20

Each round runs the step of a preset on one device four times in three ways: without a checkpoint;
with one that begins before the first step and is waited for there; and with one that is written
beside the steps, and is waited for after the last. The medians over the rounds are shown: how long
the run stands still for a checkpoint, and how much longer the four steps with it take. The two
differ where the steps need the processor that writes.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median

import jax

from examples.gshard.presets import preset
from sbp.moe.checkpoint import Checkpoints
from sbp.moe.step import batch_shapes, init_state, make_train_step

STEPS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description="Seconds that a run loses with each checkpoint.")
    parser.add_argument("--preset", default="tiny-mt")
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    run = preset(args.preset)
    step = jax.jit(make_train_step(run.model, run.train), donate_argnums=0)
    state = init_state(run.model, run.train)
    batch = jax.tree.map(lambda s: jax.numpy.ones(s.shape, s.dtype), batch_shapes(run.model))
    size = sum(x.nbytes for x in jax.tree.leaves(state))
    still: dict[str, list[float]] = {"none": [], "waited for": [], "beside": []}
    whole: dict[str, list[float]] = {"none": [], "waited for": [], "beside": []}
    with (
        tempfile.TemporaryDirectory() as folder,
        Checkpoints(Path(folder), {"model": {}, "train": {}, "corpus": {}}) as checkpoints,
    ):
        for _ in range(args.rounds + 1):
            for kind in still:
                started = time.monotonic()
                if kind != "none":
                    checkpoints.save(state, {})
                if kind == "waited for":
                    checkpoints.wait()
                still[kind].append(time.monotonic() - started)
                for _ in range(STEPS):
                    state, _ = jax.block_until_ready(step(state, batch))
                checkpoints.wait()
                whole[kind].append(time.monotonic() - started)
    print(f"{args.preset}: a state of {size / 2**20:.1f} MiB on {jax.devices()[0].device_kind}")
    print(f"one step: {median(whole['none'][1:]) / STEPS:.3f} s")  # the first round compiles
    for kind in ("waited for", "beside"):
        lost = [b - a for a, b in zip(whole["none"], whole[kind], strict=True)]
        print(
            f"a checkpoint {kind}: the run stands still for {median(still[kind][1:]):.3f} s,"
            f" {STEPS} steps take {median(lost[1:]):.3f} s longer"
        )


if __name__ == "__main__":
    main()
