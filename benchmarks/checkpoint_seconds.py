"""Seconds that a training run loses with each checkpoint.

    python -m benchmarks.checkpoint_seconds
    python -m benchmarks.checkpoint_seconds --preset tiny-test --rounds 20

Each round runs the step of a preset on one device four times without and four times with a
checkpoint, which begins before the first of them and is waited for after the last. The medians over
the rounds are shown: of the call that begins the checkpoint, of the time until it is written, and
of what the four steps with it take longer. The last is what the run loses.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import jax

from sbp.moe.checkpoint import Checkpoints
from sbp.moe.presets import preset
from sbp.moe.step import batch_shapes, init_state, make_train_step

STEPS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--preset", default="tiny-mt")
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    run = preset(args.preset)
    step = jax.jit(make_train_step(run.model, run.train), donate_argnums=0)
    state = init_state(run.model, run.train)
    batch = jax.tree.map(lambda s: jax.numpy.ones(s.shape, s.dtype), batch_shapes(run.model))
    size = sum(x.nbytes for x in jax.tree.leaves(state))
    plain, call, saved = [], [], []
    with (
        tempfile.TemporaryDirectory() as folder,
        Checkpoints(Path(folder), {"model": {}, "train": {}, "corpus": {}}) as checkpoints,
    ):
        for _ in range(args.rounds + 1):
            times = []
            for save in (False, True):
                started = time.monotonic()
                if save:
                    checkpoints.save(state, {})
                    call.append(time.monotonic() - started)
                for _ in range(STEPS):
                    state, _ = jax.block_until_ready(step(state, batch))
                if save:
                    checkpoints.wait()
                times.append(time.monotonic() - started)
            plain.append(times[0])
            saved.append(times[1])
    plain, call, saved = plain[1:], call[1:], saved[1:]  # the first round compiles
    lost = [b - a for a, b in zip(plain, saved, strict=True)]
    print(f"{args.preset}: a state of {size / 2**20:.1f} MiB on {jax.devices()[0].device_kind}")
    print(f"step             {statistics.median(plain) / STEPS:.3f} s")
    print(f"call of save     {statistics.median(call):.3f} s")
    print(f"lost with each   {statistics.median(lost):.3f} s")


if __name__ == "__main__":
    main()
