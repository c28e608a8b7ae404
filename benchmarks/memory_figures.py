"""The planned peak of small programs beside the memory that the TPU compiler gives them.

    python -m benchmarks.memory_figures             # all programs
    python -m benchmarks.memory_figures mlp fft     # some
    python -m benchmarks.memory_figures --limit 0.7 # with a limit of 0.7 of the fastest plan's peak

Each program is compiled ahead of time for four v5e chips. `held` are its arguments, results and
temporaries, a donated buffer once. The rules of `sbp/plan/memory.py` were found on the steps of
`benchmarks.steps` (which prints planned over held for each), those for joined arrays, random bits,
sorts, transforms and softmaxes on five of these programs, which are marked as tuned. A program has
to hold much more than the 128 MiB of a chip's vector memory, where the compiler puts some values.
No TPU is needed, only `libtpu`.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.experimental import topologies
from jax.sharding import Mesh

import sbp

# The next one sets the ahead-of-time environment before JAX is used.
from benchmarks.gshard_bytes import MIB, held_bytes

TOPOLOGY = "v5e:2x2"
TUNED = ("attention", "diffusion", "dropout", "fft", "order")
"""Programs on which rules were found."""

MADE: dict[str, Callable[[], Program]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program with its arguments.

    Arguments:
        fn: the program.
        avals: its arguments.
        in_types: their types.
        donate: positions of donated arguments.
    """

    fn: Callable[..., Any]
    avals: tuple[Any, ...]
    in_types: tuple[Any, ...]
    donate: tuple[int, ...] = ()


def program(make: Callable[[], Program]) -> Callable[[], Program]:
    """Enters a program under the name of its maker."""
    MADE[make.__name__] = make
    return make


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    """A shape of float32."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def bf16(*shape: int) -> jax.ShapeDtypeStruct:
    """A shape of bfloat16."""
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def i32(*shape: int) -> jax.ShapeDtypeStruct:
    """A shape of int32."""
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def descent(loss: Callable[..., jax.Array]) -> Callable[..., Any]:
    """A step of gradient descent."""

    def step(params: Any, *batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, *batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    return step


@program
def mlp() -> Program:
    """Four layers with tanh, data parallel."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    weights = [f32(2048, 2048)] * 4
    return Program(
        fn=descent(loss),
        avals=(weights, f32(65536, 2048)),
        in_types=("B", "d:S(0)"),
        donate=(0,),
    )


@program
def residual() -> Program:
    """Eight residual layers of two products with GELU."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for w_in, w_out in params:
            x = x + jax.nn.gelu(x @ w_in) @ w_out
        return jnp.mean(x**2)

    weights = [(f32(1024, 4096), f32(4096, 1024))] * 8
    return Program(
        fn=descent(loss), avals=(weights, f32(32768, 1024)), in_types=("B", "d:S(0)"), donate=(0,)
    )


@program
def convolutions() -> Program:
    """Three strided convolutions with GELU and a mean."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for w in params:
            dims = ("NHWC", "HWIO", "NHWC")
            x = lax.conv_general_dilated(x, w, (2, 2), "SAME", dimension_numbers=dims)
            x = jax.nn.gelu(x)
        return jnp.mean(jnp.mean(x, (1, 2)) ** 2)

    weights = [f32(3, 3, 64, 128), f32(3, 3, 128, 256), f32(3, 3, 256, 256)]
    return Program(
        fn=descent(loss),
        avals=(weights, f32(256, 128, 128, 64)),
        in_types=("B", "d:S(0)"),
        donate=(0,),
    )


@program
def recurrence() -> Program:
    """A recurrent net over 64 steps, with the gradient through time."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        def turn(h: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
            gate = jax.nn.sigmoid(x @ params["gate"])
            return gate * h + (1 - gate) * jnp.tanh(h @ params["state"] + x), None

        return jnp.mean(lax.scan(turn, jnp.zeros_like(x[0]), x)[0] ** 2)

    weights = {"gate": f32(1024, 1024), "state": f32(1024, 1024)}
    return Program(
        fn=descent(loss),
        avals=(weights, f32(64, 8192, 1024)),
        in_types=("B", "d:S(1)"),
        donate=(0,),
    )


@program
def attention() -> Program:
    """Three recomputed layers of attention in bfloat16."""

    def block(w: jax.Array, x: jax.Array) -> jax.Array:
        q, k, v = jnp.einsum("bsm,nmhk->nbhsk", x, w)
        scores = jnp.einsum("bhsk,bhtk->bhst", q, k).astype(jnp.float32)
        weights = jax.nn.softmax(scores).astype(x.dtype)
        return x + jnp.einsum("bhst,bhtk->bshk", weights, v).reshape(x.shape)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for w in params:
            x = jax.checkpoint(block)(w, x)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    return Program(
        fn=descent(loss),
        avals=([bf16(3, 1024, 8, 128)] * 3, bf16(128, 1024, 1024)),
        in_types=("B", "d:S(0)"),
        donate=(0,),
    )


@program
def words() -> Program:
    """A lookup, a layer, and the cross-entropy by `log_softmax`."""

    def loss(params: Any, tokens: jax.Array, labels: jax.Array) -> jax.Array:
        x = jax.nn.relu(params["table"][tokens] @ params["layer"])
        logs = jax.nn.log_softmax(x @ params["table"].T)
        return -jnp.mean(jnp.sum(jax.nn.one_hot(labels, logs.shape[-1]) * logs, -1))

    weights = {"table": f32(32768, 512), "layer": f32(512, 512)}
    return Program(
        fn=descent(loss),
        avals=(weights, i32(32768), i32(32768)),
        in_types=("B", "d:S(0)", "d:S(0)"),
        donate=(0,),
    )


@program
def experts() -> Program:
    """Eight experts, each token weighted over all of them, split by expert."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        gates = jax.nn.softmax(x @ params["router"])
        hidden = jax.nn.gelu(jnp.einsum("tm,emh->eth", x, params["up"]))
        y = jnp.einsum("eth,ehm->etm", hidden, params["down"])
        return jnp.mean(jnp.einsum("te,etm->tm", gates, y) ** 2)

    weights = {"router": f32(512, 8), "up": f32(8, 512, 2048), "down": f32(8, 2048, 512)}
    return Program(
        fn=descent(loss),
        avals=(weights, f32(65536, 512)),
        in_types=({"router": "B", "up": "d:S(0)", "down": "d:S(0)"}, "B"),
        donate=(0,),
    )


@program
def optimiser() -> Program:
    """AdamW with clipped gradients; nothing else."""
    opt = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    weights = {f"w{i}": f32(4096, 4096) for i in range(6)}
    state = jax.eval_shape(opt.init, weights)

    def update(params: Any, state: Any, gradients: Any) -> Any:
        updates, state = opt.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    types = jax.tree.map(lambda x: "d:S(0)" if x.ndim else "B", (weights, state, weights))
    return Program(fn=update, avals=(weights, state, weights), in_types=types, donate=(0, 1))


@program
def fft() -> Program:
    """A Fourier filter: there, damped, and back."""

    def filtered(x: jax.Array) -> jax.Array:
        spectrum = jnp.fft.rfft(x)
        damped = spectrum * jnp.exp(-jnp.arange(spectrum.shape[-1]) / 100.0)
        return jnp.fft.irfft(damped, n=x.shape[-1])

    return Program(fn=filtered, avals=(f32(65536, 4096),), in_types=("d:S(0)",))


@program
def order() -> Program:
    """Lines sorted, summed up and compared with their mean."""

    def ranked(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        inorder = jnp.sort(x, -1)
        total = jnp.cumsum(inorder, -1)
        return total, jnp.sum(inorder > x.mean(-1, keepdims=True), -1)

    return Program(fn=ranked, avals=(f32(65536, 2048),), in_types=("d:S(0)",))


@program
def diffusion() -> Program:
    """A stencil in space over 100 steps."""

    def flow(x: jax.Array) -> jax.Array:
        def turn(_: Any, x: jax.Array) -> jax.Array:
            near = [jnp.roll(x, s, dim) for dim in (1, 2) for s in (1, -1)]
            return x + 0.1 * (sum(near) - 4 * x)

        return lax.fori_loop(0, 100, turn, x)

    return Program(fn=flow, avals=(f32(256, 1024, 1024),), in_types=("d:S(0)",), donate=(0,))


@program
def inference() -> Program:
    """Six layers of norm and GELU, forward only, the hidden units split."""

    def forward(params: Any, x: jax.Array) -> jax.Array:
        for up, down in params:
            h = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)
            x = x + jax.nn.gelu(h @ up) @ down
        return x

    weights = [(bf16(2048, 8192), bf16(8192, 2048))] * 6
    return Program(
        fn=forward,
        avals=(weights, bf16(32768, 2048)),
        in_types=([("d:S(1)", "d:S(0)")] * 6, "B"),
    )


@program
def dropout() -> Program:
    """Two layers with random masks, the gradient by the weights."""

    def loss(params: Any, x: jax.Array, key: jax.Array) -> jax.Array:
        for w, k in zip(params, jax.random.split(key), strict=True):
            x = jax.nn.relu(x @ w)
            x = jnp.where(jax.random.bernoulli(k, 0.9, x.shape), x / 0.9, 0)
        return jnp.mean(x**2)

    key = jax.eval_shape(lambda: jax.random.key(0))
    return Program(
        fn=descent(loss),
        avals=([f32(2048, 2048)] * 2, f32(262144, 2048), key),
        in_types=("B", "d:S(0)", "B"),
        donate=(0,),
    )


def planned(name: str, limit: float | None = None) -> sbp.Plan:
    """The plan of a program with a memory limit."""
    chips = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGY).devices
    p = MADE[name]()
    f = sbp.jit(
        p.fn,
        Mesh(np.array(chips), ("d",)),
        in_types=p.in_types,
        donate_argnums=p.donate,
        memory_limit=limit,
    )
    return f.plan(*p.avals)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("programs", nargs="*", help=f"of: {', '.join(MADE)}")
    parser.add_argument("--limit", type=float, help="share of the fastest plan's peak")
    options, ratios = parser.parse_args(), list[float]()
    for name in options.programs or MADE:
        plan = planned(name)
        if options.limit:
            try:
                plan = planned(name, options.limit * plan.cost.peak_memory_bytes)
            except sbp.SbpTypeError as error:
                print(f"{name:13s}{error.diagnostics[0].title}", flush=True)
                continue
        peak, held = plan.cost.peak_memory_bytes, held_bytes(plan.lower().compile())
        again = "recomputes" if plan.program.request.recomputed else ""
        ratios.append(peak / held)
        print(
            f"{name:13s}{peak / MIB:9.1f} MiB planned, {held / MIB:9.1f} held, {ratios[-1]:.2f}"
            f" {again}",
            flush=True,
        )
    errors = [abs(r - 1) for r in ratios]
    if not errors:
        return
    print(
        f"median error {statistics.median(errors):.2f}, worst {max(errors):.2f}; planned over held"
        f" {min(ratios):.2f} to {max(ratios):.2f}"
    )


if __name__ == "__main__":
    main()
