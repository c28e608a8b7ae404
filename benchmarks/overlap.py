"""Which collectives of a loop over layers with split weights the TPU compiler runs beside the
layers' work, in four ways to write the loop.

    python -m benchmarks.overlap                  # a minute of CPU for each form
    python -m benchmarks.overlap scan ahead
    python -m benchmarks.overlap scan --option xla_tpu_scoped_vmem_limit_kib=65536

The loop is that of `benchmarks.steps llama_fsdp` with four layers, forward and backward, by hand in
`jax.shard_map`; a layer's weights are gathered where they are used, and their gradients scattered.

    scan       the gathers of a layer stand in its turn of the loop
    ahead      the first weight of a layer is gathered in the turn before, and carried
    all ahead  all weights of a layer are gathered in the turn before
    halving    as `scan`; a gradient is scattered by exchanges of its halves, of their halves, and
               so on, which are asynchronous

Seconds are of the compiler's schedule (`benchmarks.hlo.schedule`). No TPU is needed, only `libtpu`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

# The first one sets the ahead-of-time environment before JAX is used.
from benchmarks.gshard_bytes import MIB, held_bytes
from benchmarks.hlo.schedule import step_time
from benchmarks.steps.by_hand import block, gathered
from benchmarks.steps.program import aval, shardings
from benchmarks.steps.suite import llama_fsdp
from benchmarks.steps.transformer import BF16, Axes, Shape, specs_of, weights_of

SHAPE = Shape(
    layers=4,
    width=2048,
    heads=16,
    hidden=5632,
    vocabulary=32000,
    batch=32,
    length=2048,
    gated=True,
    scanned=True,
)
AXIS, DEVICES = "d", 16
SPLIT = {"qkv": 0, "out": 2, "up": 0, "gate": 0, "down": 1}
"""The dim of a layer's weight that is split."""

Scatter = Callable[[jax.Array, int], jax.Array]


def in_two_stages(gradient: jax.Array, dim: int) -> jax.Array:
    """Summed over devices and split: over the columns of a square torus, then over its rows. The
    compiler makes an all-reduce of a reduce-scatter over all."""
    side = math.isqrt(lax.axis_size(AXIS))
    rows = [[side * i + j for j in range(side)] for i in range(side)]
    for groups in ([list(column) for column in zip(*rows, strict=True)], rows):
        gradient = lax.psum_scatter(
            gradient, AXIS, scatter_dimension=dim, tiled=True, axis_index_groups=groups
        )
    return gradient.astype(jnp.float32)


def by_halves(gradient: jax.Array, dim: int) -> jax.Array:
    """Summed over devices and split, by recursive halving."""
    devices = distance = lax.axis_size(AXIS)
    while distance := distance // 2:
        half = gradient.shape[dim] // 2
        upper = lax.axis_index(AXIS) // distance % 2
        kept, sent = (
            lax.dynamic_slice_in_dim(gradient, part * half, half, dim)
            for part in (upper, 1 - upper)
        )
        pairs = [(device, device ^ distance) for device in range(devices)]
        gradient = kept + lax.ppermute(sent, AXIS, pairs)
    return gradient.astype(jnp.float32)


def layers(
    s: Shape, ahead: tuple[str, ...], scattered: Scatter
) -> Callable[[Any, jax.Array], jax.Array]:
    """The layers as a loop, recomputed backward.

    Arguments:
        s: their sizes.
        ahead: the weights that are gathered in the turn before.
        scattered: sums a gradient and splits a dim of it.
    """
    here = [name for name in SPLIT if name not in ahead]

    def whole(p: Any, names: Any) -> Any:
        return {name: gathered(p[name], AXIS, SPLIT[name]) for name in names}

    def complete(p: Any, before: Any) -> Any:
        return {**p, **before, **whole(p, here)}

    def one(weights: Any, x: jax.Array) -> jax.Array:
        return block(weights, x, s, Axes())

    def forward(params: Any, x: jax.Array) -> Any:
        def body(carry: Any, given: Any) -> Any:
            (x, before), (p, following) = carry, given
            return (one(complete(p, before), x), whole(following, ahead)), x

        following = {name: jnp.roll(params[name], -1, 0) for name in ahead}
        first = whole({name: params[name][0] for name in ahead}, ahead)
        (y, _), inputs = lax.scan(body, (x, first), (params, following))
        return y, (params, inputs)

    def backward(kept: Any, cotangent: jax.Array) -> Any:
        params, inputs = kept

        def body(carry: Any, given: Any) -> Any:
            (cotangent, before), (p, following, x) = carry, given
            then = whole(following, ahead)
            gradients, cotangent = jax.vjp(one, complete(p, before), x)[1](cotangent)
            summed = {
                name: scattered(g, SPLIT[name]) if name in SPLIT else lax.psum(g, AXIS)
                for name, g in gradients.items()
            }
            return (cotangent, then), summed

        following = {name: jnp.roll(params[name], 1, 0) for name in ahead}
        last = whole({name: params[name][-1] for name in ahead}, ahead)
        (cotangent, _), gradients = lax.scan(
            body, (cotangent, last), (params, following, inputs), reverse=True
        )
        return gradients, cotangent

    run = jax.custom_vjp(lambda params, x: forward(params, x)[0])
    run.defvjp(forward, backward)
    return run


FORMS: dict[str, Callable[[Shape], Callable[[Any, jax.Array], jax.Array]]] = {
    "scan": partial(layers, ahead=(), scattered=in_two_stages),
    "ahead": partial(layers, ahead=("qkv",), scattered=in_two_stages),
    "all ahead": partial(layers, ahead=tuple(SPLIT), scattered=in_two_stages),
    "halving": partial(layers, ahead=(), scattered=by_halves),
}


def gradients(form: str, s: Shape, params: Any, x: jax.Array) -> Any:
    """The gradients of the mean square of the last layer's result, on the shards of one device."""

    def loss(params: Any) -> jax.Array:
        y = FORMS[form](s)(params, x).astype(jnp.float32)
        return jnp.mean(y**2) / lax.axis_size(AXIS)

    return jax.grad(loss)(params)


def compiled(form: str, options: dict[str, str | bool]) -> jax.stages.Compiled:
    """The gradients of a form, compiled for 16 chips of TPU v5e."""
    mesh, tokens = llama_fsdp().devices(), P(AXIS, None, None)
    specs = specs_of(SHAPE, Axes(batch=AXIS, weights=AXIS))["blocks"]
    mapped = jax.shard_map(
        partial(gradients, form, SHAPE),
        mesh=mesh,
        in_specs=(specs, tokens),
        out_specs=specs,
        check_vma=False,
    )
    x = aval(SHAPE.batch, SHAPE.length, SHAPE.width, dtype=BF16)
    f = jax.jit(mapped, in_shardings=shardings(mesh, (specs, tokens)))
    return f.lower(weights_of(SHAPE)["blocks"], x).compile(compiler_options=options or None)


def described(form: str, program: jax.stages.Compiled) -> str:
    """The figures of a compiled form, with what is exposed of each kind of collective."""
    text = program.as_text()
    assert text is not None
    step = step_time(text, DEVICES)
    kinds = [
        f"    {1e3 * seconds:7.3f} ms exposed  {kind}"
        for kind, seconds in sorted(step.exposed_by_kind.items())
    ]
    figures = (
        f"{form:10s}{1e3 * step.seconds:9.3f} ms, {1e3 * step.compute:9.3f} computing,"
        f" {1e3 * step.exposed:7.3f} exposed, {step.bytes_per_device / MIB:8.1f} MiB sent,"
        f" {held_bytes(program) / MIB:8.1f} held"
    )
    return "\n".join([figures, *kinds])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("forms", nargs="*", help=f"of: {', '.join(FORMS)}")
    parser.add_argument("--option", action="append", default=[], help="NAME=VALUE of the compiler")
    args = parser.parse_args()
    options: dict[str, str | bool] = dict(option.split("=", 1) for option in args.option)
    for form in args.forms or FORMS:
        print(described(form, compiled(form, options)), flush=True)


if __name__ == "__main__":
    main()
