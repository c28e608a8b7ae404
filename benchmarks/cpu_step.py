"""Seconds of a training step on 8 simulated CPU devices, ours over an expert's `jax.jit`.

    python -m benchmarks.cpu_step                   # GPT, CNN and MoE, 40 rounds each
    python -m benchmarks.cpu_step gpt --rounds 10

Both sides run the same function with the same types of arguments and results; the expert's also has
constraints on activations. Each round runs one step of sbp, one of the expert and one of a second
copy of the expert's program, in an order that goes round. `sbp` is the median over the rounds of
our seconds over the expert's, `A/A` that of the copy's seconds over the expert's, each with its
quartiles: a ratio inside the spread of A/A shows no difference. `wall` is the time until the
results are there, calls from Python included; `cpu` is the processor time of all threads, which
other programs on the machine disturb less.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

DEVICES = 8
_FLAG = "--xla_force_host_platform_device_count"
# Both are read when JAX makes its devices.
os.environ["JAX_PLATFORMS"] = "cpu"
if _FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}={DEVICES}"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import Mesh, PartitionSpec  # noqa: E402

from benchmarks.steps.experts import by_capacity, expert_step  # noqa: E402
from benchmarks.steps.images import unet  # noqa: E402
from benchmarks.steps.program import Step, aval, shardings, training  # noqa: E402
from benchmarks.steps.transformer import (  # noqa: E402
    Axes,
    Shape,
    language_model_loss,
    specs_of,
    weights_of,
)

MESH = (("d", DEVICES),)
WARM_ROUNDS = 3


def gpt() -> Step:
    """A GPT, data parallel."""
    s = Shape(layers=2, width=256, heads=4, hidden=1024, vocabulary=4096, batch=16, length=64)
    a = Axes(batch="d")
    return training(
        loss=language_model_loss(s, a),
        params=weights_of(s),
        specs=specs_of(s, a),
        batch=(aval(s.batch, s.length, dtype="int32"),),
        batch_specs=(PartitionSpec("d", None),),
        mesh=MESH,
    )


def cnn() -> Step:
    """A diffusion U-Net, data parallel."""
    return unet(batch=16, side=16, channels=(32, 64))


def moe() -> Step:
    """A decoder with 8 experts of a fixed capacity, split as the batch is."""
    s = Shape(
        layers=2,
        width=128,
        heads=4,
        hidden=512,
        vocabulary=2048,
        batch=16,
        length=64,
        scanned=True,
    )
    return expert_step(s, Axes(batch="d"), by_capacity, DEVICES, ("d", None), MESH)


PROGRAMS: dict[str, Callable[[], Step]] = {f.__name__: f for f in (gpt, cnn, moe)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """What one step took."""

    wall: float
    cpu: float


class RunningStep:
    """A step with the state that it hands from call to call.

    Arguments:
        run: the step.
        held: the arguments that it donates and returns first.
        batch: the other arguments.
    """

    def __init__(self, run: Callable[..., Any], held: tuple[Any, ...], batch: tuple[Any, ...]):
        self.run, self.held, self.batch = run, held, batch
        self.loss = float("nan")

    def turn(self) -> Seconds:
        """Runs one step and waits for its results."""
        wall, cpu = time.perf_counter(), time.process_time()
        out = self.run(*self.held, *self.batch)
        jax.block_until_ready(out)
        took = Seconds(wall=time.perf_counter() - wall, cpu=time.process_time() - cpu)
        self.held, self.loss = out[: len(self.held)], float(out[-1])
        return took


def _arguments(step: Step, mesh: Mesh) -> tuple[Any, ...]:
    """Arguments of a step, where its types have them: the weights drawn at random, moments and
    counts 0, tokens and images drawn at random."""
    rng = np.random.default_rng(0)

    def drawn(x: jax.ShapeDtypeStruct) -> np.ndarray:
        if jnp.issubdtype(x.dtype, jnp.integer):
            return rng.integers(0, 1000, x.shape).astype(x.dtype)
        return (0.02 * rng.standard_normal(x.shape)).astype(x.dtype)

    params, state, *batch = step.avals
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), state)
    arguments = (jax.tree.map(drawn, params), zeros, *jax.tree.map(drawn, batch))
    return jax.device_put(arguments, shardings(mesh, step.in_specs))


def sides_of(step: Step, mesh: Mesh) -> dict[str, RunningStep]:
    """Both sides and the expert's copy, each with its own arguments."""
    runs = {
        "expert": step.constrained(mesh),
        "sbp": step.typed(mesh),
        "A/A": step.constrained(mesh),
    }
    count = len(step.donate)
    return {
        name: RunningStep(run, (given := _arguments(step, mesh))[:count], given[count:])
        for name, run in runs.items()
    }


def measured(sides: dict[str, RunningStep], rounds: int) -> dict[str, list[Seconds]]:
    """The seconds of each side, round by round."""
    names = list(sides)
    found: dict[str, list[Seconds]] = {name: [] for name in names}
    for number in range(WARM_ROUNDS + rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            took = sides[name].turn()
            if number >= WARM_ROUNDS:
                found[name].append(took)
        losses = [side.loss for side in sides.values()]
        # A few bfloat16 digits: the sides add in other orders.
        assert max(losses) - min(losses) <= 0.02 * abs(max(losses)), losses
    return found


def ratio_text(ours: Sequence[float], base: Sequence[float]) -> str:
    """The median of the ratios of two series, with its quartiles."""
    ratios = [a / b for a, b in zip(ours, base, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("programs", nargs="*", help=f"of: {', '.join(PROGRAMS)}")
    parser.add_argument("--rounds", type=int, default=40)
    args = parser.parse_args()
    mesh = Mesh(np.array(jax.devices()[:DEVICES]), ("d",))
    for name in args.programs or PROGRAMS:
        found = measured(sides_of(PROGRAMS[name](), mesh), args.rounds)
        print(f"{name}: {args.rounds} rounds")
        for clock in ("wall", "cpu"):
            series = {side: [getattr(s, clock) for s in took] for side, took in found.items()}
            middle = {side: 1e3 * statistics.median(s) for side, s in series.items()}
            print(
                f"  {clock:5s} expert {middle['expert']:8.1f} ms, sbp {middle['sbp']:8.1f} ms;"
                f" sbp {ratio_text(series['sbp'], series['expert'])},"
                f" A/A {ratio_text(series['A/A'], series['expert'])}",
                flush=True,
            )


if __name__ == "__main__":
    main()
