"""Seconds of a small collective on 8 simulated CPU devices, the `latency_seconds` of `cpu`.

    python -m benchmarks.cpu_latency
    python -m benchmarks.cpu_latency --rounds 2000

Two programs differ in the number of collectives, of 8 numbers each, one after another; their
difference in time over that number is the latency. Each round runs both. A busy machine makes
single runs longer and none shorter, so the figure is the least time of each program over all
rounds; the lower quartiles show how quiet the machine was. A simulated collective is a rendezvous
of threads, so the figure depends on the number of cores.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

DEVICES = 8
_FLAG = "--xla_force_host_platform_device_count"
# Both are read when JAX makes its devices.
os.environ["JAX_PLATFORMS"] = "cpu"
if _FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}={DEVICES}"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax.sharding import PartitionSpec  # noqa: E402

FEW, MANY = 2, 10


def _all_gather(x: jax.Array) -> jax.Array:
    return jax.lax.all_gather(x, "d", tiled=True)[: len(x)] + x


def _all_reduce(x: jax.Array) -> jax.Array:
    return jax.lax.psum(x, "d") + x


def _reduce_scatter(x: jax.Array) -> jax.Array:
    return jnp.tile(jax.lax.psum_scatter(x, "d", tiled=True), DEVICES) + x


def _all_to_all(x: jax.Array) -> jax.Array:
    return jax.lax.all_to_all(x, "d", 0, 0, tiled=True) + x


COLLECTIVES = {
    "all-gather": _all_gather,
    "all-reduce": _all_reduce,
    "reduce-scatter": _reduce_scatter,
    "all-to-all": _all_to_all,
}


def _program(collective: Callable[[jax.Array], jax.Array], count: int) -> Callable[[], None]:
    """A compiled program with `count` collectives, each of which reads the last one's result."""
    mesh = jax.make_mesh((DEVICES,), ("d",))

    def body(x: jax.Array) -> jax.Array:
        for _ in range(count):
            x = collective(x) * 0.5
        return x

    spec = PartitionSpec("d")
    step = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    x = jax.device_put(
        jnp.ones(DEVICES * DEVICES, jnp.float32), jax.sharding.NamedSharding(mesh, spec)
    )

    def run() -> None:
        jax.block_until_ready(step(x))

    run()
    return run


def seconds(collective: str, rounds: int) -> tuple[float, float]:
    """Seconds of one collective: from the least times, and from the lower quartiles."""
    programs = [_program(COLLECTIVES[collective], count) for count in (FEW, MANY)]
    times: list[list[float]] = [[], []]
    for _ in range(rounds):
        for taken, run in zip(times, programs, strict=True):
            start = time.perf_counter()
            run()
            taken.append(time.perf_counter() - start)
    least = [min(t) for t in times]
    quartile = [statistics.quantiles(t, n=4)[0] for t in times]
    return (least[1] - least[0]) / (MANY - FEW), (quartile[1] - quartile[0]) / (MANY - FEW)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=500)
    arguments = parser.parse_args()
    print(f"{DEVICES} simulated devices on {os.cpu_count()} cores, jax {jax.__version__}")
    for name in COLLECTIVES:
        least, quartile = seconds(name, arguments.rounds)
        print(f"{name:14} least {1e6 * least:6.1f} us, lower quartile {1e6 * quartile:6.1f} us")


if __name__ == "__main__":
    main()
