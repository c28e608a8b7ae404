"""Programs that every mesh must run to the single-device result, with their annotations written for
any number of mesh axes."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import sbp

MESHES: tuple[tuple[int, ...], ...] = ((1,), (2,), (4,), (8,), (2, 4), (4, 2), (2, 2, 2))
NAMES = ("x", "y", "z")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A program, which takes the mesh's axis names, outer first, and then its arguments; their
    shapes; and the arguments that gradients are of."""

    name: str
    program: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    gradients: tuple[int, ...] = ()


def arguments(case: Case, seed: int = 0) -> list[jax.Array]:
    """Normal float32 arguments, scaled so that results stay of order one."""
    rng = np.random.default_rng(seed)
    return [
        jnp.asarray(rng.normal(size=s) / np.sqrt(max(1, s[0])), jnp.float32) for s in case.shapes
    ]


def _data_parallel(axes: Sequence[str], x: Any, y: Any, w1: Any, w2: Any) -> Any:
    x, y = sbp.split(x, 0, *axes), sbp.split(y, 0, *axes)
    loss = lambda w: jnp.mean((jnp.tanh(x @ w[0]) @ w[1] - y) ** 2)
    value, grads = jax.value_and_grad(loss)((w1, w2))
    return value, jax.tree.map(lambda w, g: w - 0.1 * g, (w1, w2), grads)


def _tensor_parallel(axes: Sequence[str], x: Any, y: Any, w1: Any, w2: Any) -> Any:
    """Two layers, hidden units split: what the post computes wrongly by leaving out the sum of the
    partial results."""

    w1, w2 = sbp.split(w1, 1, axes[-1]), sbp.split(w2, 0, axes[-1])
    return jax.value_and_grad(lambda w: jnp.mean((jax.nn.relu(x @ w[0]) @ w[1] - y) ** 2))((w1, w2))


def _hybrid(axes: Sequence[str], x: Any, y: Any, w1: Any, w2: Any) -> Any:
    x = sbp.split(x, 0, axes[0])
    if len(axes) > 1:
        w1, w2 = sbp.split(w1, 1, axes[-1]), sbp.split(w2, 0, axes[-1])
    return jax.value_and_grad(lambda w: jnp.mean((jax.nn.relu(x @ w[0]) @ w[1] - y) ** 2))((w1, w2))


def _accumulation(axes: Sequence[str], x: Any, w: Any) -> Any:
    """Gradients of four microbatches summed in a scan."""

    def body(total: Any, x: Any) -> Any:
        x = sbp.split(x, 0, axes[0])
        return total + jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(w) / 4, None

    return jax.lax.scan(body, jnp.zeros_like(w), x.reshape(4, -1, x.shape[-1]))[0]


def _attention(axes: Sequence[str], x: Any, wq: Any, wk: Any, wv: Any, wo: Any) -> Any:
    x = sbp.split(x, 0, axes[0])
    q, k, v = (
        jnp.einsum("btm,mhd->bhtd", x, sbp.split(w, 1, axes[-1]) if len(axes) > 1 else w)
        for w in (wq, wk, wv)
    )
    weights = jax.nn.softmax(jnp.einsum("bhtd,bhud->bhtu", q, k) + jnp.tril(jnp.ones((8, 8))), -1)
    return x + jnp.einsum("bhtu,bhud,hdm->btm", weights, v, wo)


def _moe(axes: Sequence[str], x: Any, wg: Any, wi: Any, wo: Any) -> Any:
    """A top-2 MoE layer with capacity: groups split over all axes, experts over the last."""

    x = sbp.split(x, 0, *axes)
    wi, wo = sbp.split(wi, 0, axes[-1]), sbp.split(wo, 0, axes[-1])
    gates = jax.nn.softmax(jnp.einsum("gsm,me->gse", x, wg), -1)
    _, top = jax.lax.top_k(gates, 2)
    one_hot = jax.nn.one_hot(top, gates.shape[-1])
    place = jnp.cumsum(one_hot.sum(2), 1) - one_hot.sum(2)
    slot = jax.nn.one_hot(place.astype(jnp.int32), 3)
    dispatch = one_hot.sum(2)[..., None] * slot
    combine = dispatch * gates[..., None]
    h = sbp.split(jnp.einsum("gsec,gsm->egcm", dispatch, x), 0, axes[-1])
    h = jnp.einsum("egch,ehm->egcm", jax.nn.relu(jnp.einsum("egcm,emh->egch", h, wi)), wo)
    return x + jnp.einsum("gsec,egcm->gsm", combine, sbp.split(h, 1, *axes))


def _control_flow(axes: Sequence[str], x: Any, w: Any) -> Any:
    """scan over layers with remat, a cond on a reduced value, a while loop and a loop-carried
    norm."""

    x = sbp.split(x, 0, axes[0])
    y, norms = jax.lax.scan(jax.checkpoint(lambda c, w: (jnp.tanh(c @ w), jnp.sum(c * c))), x, w)
    y = jax.lax.cond(norms.sum() > 0, lambda a: a * 2, lambda a: a - 1, y)
    _, y = jax.lax.while_loop(
        lambda c: (c[0] < 3) & (jnp.max(c[1]) < 1e3), lambda c: (c[0] + 1, c[1] * 1.5), (0, y)
    )
    return y, norms


def _uneven(axes: Sequence[str], x: Any, w: Any) -> Any:
    """Sizes that no mesh divides: 13 rows, 7 columns."""

    x = sbp.split(x, 0, axes[0])
    h = jnp.tanh(x @ sbp.split(w, 1, axes[-1]) if len(axes) > 1 else x @ w)
    return (
        jax.nn.softmax(h, -1),
        h.sum(),
        h.max(),
        jnp.cumsum(h, 0),
        h.mean(0),
        jnp.argmax(h, 0),
    )


CASES: tuple[Case, ...] = (
    Case(
        name="chain",
        program=lambda axes, u, v, w: (sbp.split(u, 1, axes[-1]) @ sbp.split(v, 0, axes[-1])) @ w,
        shapes=((16, 32), (32, 64), (64, 24)),
        gradients=(0, 1, 2),
    ),
    # The feed-forward layer of the post on parallel strategies, its batch split over the outer
    # axis.
    Case(
        name="ffn",
        program=lambda axes, x, w1, b1, w2, b2: (
            jax.nn.relu(sbp.split(x, 0, axes[0]) @ w1 + b1) @ w2 + b2
        ),
        shapes=((16, 32), (32, 64), (64,), (64, 32), (32,)),
        gradients=(0, 1, 2, 3, 4),
    ),
    Case(
        name="megatron",
        program=lambda axes, x, w1, w2: (
            x + jax.nn.gelu(x @ sbp.split(w1, 1, axes[-1])) @ sbp.split(w2, 0, axes[-1])
        ),
        shapes=((16, 32), (32, 64), (64, 32)),
        gradients=(0, 1, 2),
    ),
    Case(
        name="data-parallel", program=_data_parallel, shapes=((32, 16), (32, 8), (16, 32), (32, 8))
    ),
    Case(
        name="tensor-parallel",
        program=_tensor_parallel,
        shapes=((32, 16), (32, 8), (16, 32), (32, 8)),
    ),
    Case(name="hybrid", program=_hybrid, shapes=((32, 16), (32, 8), (16, 32), (32, 8))),
    Case(name="accumulation", program=_accumulation, shapes=((64, 16), (16, 32))),
    Case(
        name="attention",
        program=_attention,
        shapes=((16, 8, 32), (32, 8, 4), (32, 8, 4), (32, 8, 4), (8, 4, 32)),
        gradients=(0, 1, 4),
    ),
    Case(
        name="moe",
        program=_moe,
        shapes=((16, 8, 16), (16, 8), (8, 16, 32), (8, 32, 16)),
        gradients=(0, 1, 2, 3),
    ),
    Case(name="control-flow", program=_control_flow, shapes=((16, 16), (3, 16, 16))),
    Case(name="uneven", program=_uneven, shapes=((13, 16), (16, 7))),
)


def function_of(case: Case, axes: Sequence[str]) -> Callable[..., Any]:
    """The program, with its gradients where the case asks for them."""
    fn = functools.partial(case.program, axes)
    if not case.gradients:
        return fn
    weights = jnp.cos(jnp.arange(4096.0))

    def both(*args: Any) -> Any:
        def scalar(*inner: Any) -> Any:
            out = fn(*inner)
            return jnp.sum(out * weights[: out.size].reshape(out.shape)), out

        (_, out), grads = jax.value_and_grad(scalar, case.gradients, has_aux=True)(*args)
        return out, grads

    return both
