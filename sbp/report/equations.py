"""Small programs that hold one equation of a primitive each: what `sbp signatures` shows rows on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sbp.trace.build import trace
from sbp.trace.graph import Graph, Node

X = jax.ShapeDtypeStruct((8, 16), jnp.float32)
W = jax.ShapeDtypeStruct((16, 32), jnp.float32)
Q = jax.ShapeDtypeStruct((8, 16), jnp.bool_)

_UNARY = [
    "abs",
    "ceil",
    "cos",
    "cosh",
    "erf",
    "exp",
    "exp2",
    "expm1",
    "floor",
    "log",
    "log1p",
    "logistic",
    "neg",
    "round",
    "rsqrt",
    "sign",
    "sin",
    "sinh",
    "sqrt",
    "square",
    "tan",
    "tanh",
]
_BINARY = ["add", "atan2", "div", "eq", "ge", "gt", "le", "lt", "max", "min", "mul", "ne", "nextafter", "pow", "rem", "sub"]
_REDUCTIONS: dict[str, Callable[[Any], Any]] = {
    "reduce_sum": lambda x: x.sum(1),
    "reduce_max": lambda x: x.max(1),
    "reduce_min": lambda x: x.min(1),
    "reduce_prod": lambda x: x.prod(1),
    "argmax": lambda x: jnp.argmax(x, 1),
    "argmin": lambda x: jnp.argmin(x, 1),
    "cumsum": lambda x: lax.cumsum(x, 1),
    "cumprod": lambda x: lax.cumprod(x, 1),
    "cummax": lambda x: lax.cummax(x, 1),
    "cummin": lambda x: lax.cummin(x, 1),
}
SAMPLES: dict[str, tuple[Callable[..., Any], tuple[jax.ShapeDtypeStruct, ...]]] = {
    **{name: (getattr(lax, name), (X,)) for name in _UNARY},
    **{name: (getattr(lax, name), (X, X)) for name in _BINARY},
    **{name: (fn, (X,)) for name, fn in _REDUCTIONS.items()},
    "and": (lax.bitwise_and, (Q, Q)),
    "or": (lax.bitwise_or, (Q, Q)),
    "not": (lax.bitwise_not, (Q,)),
    "reduce_and": (lambda q: q.all(1), (Q,)),
    "reduce_or": (lambda q: q.any(1), (Q,)),
    "broadcast_in_dim": (lambda x: jnp.broadcast_to(x, (4, 8, 16)), (X,)),
    "concatenate": (lambda x, y: lax.concatenate([x, y], 1), (X, X)),
    "convert_element_type": (lambda x: x.astype(jnp.bfloat16), (X,)),
    "dot_general": (lambda x, w: x @ w, (X, W)),
    "dynamic_slice": (lambda x, i: lax.dynamic_slice(x, (i, 0), (1, 16)), (X, jax.ShapeDtypeStruct((), jnp.int32))),
    "gather": (lambda x, i: x[i], (X, jax.ShapeDtypeStruct((4,), jnp.int32))),
    "integer_pow": (lambda x: x**3, (X,)),
    "iota": (lambda: lax.iota(jnp.int32, 16), ()),
    "pad": (lambda x: jnp.pad(x, ((0, 0), (0, 4))), (X,)),
    "reshape": (lambda x: x.reshape(8, 4, 4), (X,)),
    "rev": (lambda x: lax.rev(x, (1,)), (X,)),
    "scatter-add": (lambda x, i: x.at[i].add(1.0), (X, jax.ShapeDtypeStruct((4,), jnp.int32))),
    "select_n": (lambda q, x, y: jnp.where(q, x, y), (Q, X, X)),
    "slice": (lambda x: x[:, :8], (X,)),
    "sort": (lambda x: lax.sort(x, dimension=1), (X,)),
    "split": (lambda x: lax.split(x, (8, 8), 1), (X,)),
    "squeeze": (lambda x: x.squeeze(1), (jax.ShapeDtypeStruct((8, 1), jnp.float32),)),
    "stop_gradient": (lax.stop_gradient, (X,)),
    "top_k": (lambda x: lax.top_k(x, 2), (X,)),
    "transpose": (lambda x: x.T, (X,)),
}
"""Programs that hold one equation of the primitive, by its name."""


def sample(primitive: str) -> tuple[Graph, Node] | None:
    """A node of the primitive in a traced sample."""
    if primitive not in SAMPLES:
        return None
    fn, args = SAMPLES[primitive]
    graph, _ = trace(fn, args)
    return next(((graph, node) for node in graph.walk() if node.op == primitive), None)
