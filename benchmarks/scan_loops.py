"""Loops over layers whose weights are on every device: sbp beside `jax.jit` with the same
shardings, both as the TPU compiler makes them ahead of time.

    python -m benchmarks.scan_loops
    python -m benchmarks.scan_loops decoder

`jax.jit` runs `lax.scan`, which writes zeros into the stacks of results before the loop fills them,
and the compiler casts the stack of weights ahead of the loop. sbp leaves out the zeros, and the
casts stay in the loop (`sbp/run/interpret.py`). The programs are data parallel on
8 chips of v5e: weights and moments on each, the batch split. No TPU is needed, only `libtpu`.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

# The first one sets the ahead-of-time environment before JAX is used.
from benchmarks.gshard_bytes import MIB, held_bytes
from benchmarks.hlo.schedule import step_time
from benchmarks.order_programs import BF16, descent, product, scanned_layers
from benchmarks.steps.program import Step, aval, training
from benchmarks.steps.transformer import Axes, Shape, language_model_loss, specs_of, weights_of

MESH, TOPOLOGY = (("d", 8),), "v5e:2x4"


def _data_parallel(step: Callable[..., Any], params: Any, x: Any, spec: P) -> Step:
    whole = jax.tree.map(lambda _: P(), params)
    return Step(
        make=lambda _: step,
        avals=(params, x),
        in_specs=(whole, spec),
        out_specs=whole,
        mesh=MESH,
        topology=TOPOLOGY,
        donate=(0,),
    )


def layers() -> Step:
    """Feed-forward layers that are computed again backward, by gradient descent."""
    program = scanned_layers()
    params, x = program.avals
    return _data_parallel(program.fn, params, x, P("d"))


def decoder() -> Step:
    """A decoder with AdamW."""
    s = Shape(
        layers=6,
        width=1024,
        heads=8,
        hidden=4096,
        vocabulary=32768,
        batch=32,
        length=1024,
        gated=True,
        scanned=True,
    )
    a = Axes(batch="d")
    return training(
        loss=language_model_loss(s, a),
        params=weights_of(s),
        specs=specs_of(s, a),
        batch=(aval(s.batch, s.length, dtype="int32"),),
        batch_specs=(P("d", None),),
        mesh=MESH,
        topology=TOPOLOGY,
    )


def recurrence() -> Step:
    """A recurrent layer over 64 positions, by gradient descent."""

    def loss(p: Any, x: jax.Array) -> jax.Array:
        def turn(h: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            h = jnp.tanh(product(h, p["h"]) + product(x, p["x"]))
            return h, h

        _, all_states = jax.lax.scan(turn, jnp.zeros(x.shape[1:], BF16), x)
        return jnp.mean(jnp.square(all_states.astype(jnp.float32)))

    params = {"h": aval(2048, 2048), "x": aval(2048, 2048)}
    return _data_parallel(descent(loss), params, aval(64, 1024, 2048), P(None, "d"))


def experts() -> Step:
    """Layers of a mixture of eight experts, each computed for all tokens, by gradient descent."""

    def loss(p: Any, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, w: Any) -> tuple[jax.Array, jax.Array]:
            gates = jax.nn.softmax((x @ w["router"].astype(BF16)).astype(jnp.float32))
            h = jax.nn.gelu(jnp.einsum("td,edh->eth", x, w["up"].astype(BF16)))
            y = jnp.einsum("eth,ehd->etd", h, w["down"].astype(BF16))
            return x + jnp.einsum("etd,te->td", y, gates.astype(BF16)), gates

        x, gates = jax.lax.scan(layer, x.astype(BF16), p)
        return jnp.mean(jnp.square(x.astype(jnp.float32))) + jnp.var(gates.mean(1))

    params = {
        "router": aval(4, 512, 8),
        "up": aval(4, 8, 512, 2048),
        "down": aval(4, 8, 2048, 512),
    }
    return _data_parallel(descent(loss), params, aval(8192, 512), P("d"))


PROGRAMS = {f.__name__: f for f in (layers, decoder, recurrence, experts)}


def figures(compiled: Any, step: Step) -> tuple[float, float, float]:
    """Seconds, bytes sent and bytes held of a compiled program, and prints them."""
    text = compiled.as_text()
    found = step_time(text, step.devices().size, step.chip)
    held = held_bytes(compiled)
    print(
        f"{found.seconds * 1e3:9.3f} ms ({found.compute * 1e3:.3f} computing),"
        f" {found.bytes_per_device / MIB:8.1f} MiB sent, {held / MIB:8.1f} held;"
        f" not counted: {', '.join(found.unknown) or 'nothing'}",
        flush=True,
    )
    return found.seconds, found.bytes_per_device, held


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("programs", nargs="*", help=f"of: {', '.join(PROGRAMS)}")
    found: list[tuple[float, ...]] = []
    for name in parser.parse_args().programs or PROGRAMS:
        step = PROGRAMS[name]()
        mesh = step.devices()
        print(name)
        print("  jax.jit", end="")
        theirs = figures(step.expert(mesh), step)
        print("  sbp    ", end="")
        ours = figures(step.planned(mesh).lower().compile(), step)
        found.append(tuple(a / b for a, b in zip(ours, theirs, strict=True)))
        print("  ratios  time {:.3f}, bytes {:.3f}, memory {:.3f}".format(*found[-1]))
    means = [statistics.geometric_mean(column) for column in zip(*found, strict=True)]
    print("geometric means  time {:.3f}, bytes {:.3f}, memory {:.3f}".format(*means))


if __name__ == "__main__":
    main()
