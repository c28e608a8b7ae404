"""Examples: for each primitive a small program with one equation of it; `sbp signatures PRIMITIVE`
shows the rows of that equation."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sbp.trace.build import trace
from sbp.trace.graph import Graph, Node


def _shape(*sizes: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


X, W, Y = _shape(8, 16), _shape(16, 32), _shape(4, 16)
N, Q, C = (
    _shape(8, 16, dtype=jnp.int32),
    _shape(8, 16, dtype=jnp.bool_),
    _shape(8, 16, dtype=jnp.complex64),
)
ROWS, AT = _shape(4, dtype=jnp.int32), _shape(dtype=jnp.int32)
MATRIX, VECTORS = _shape(8, 4, 4), _shape(8, 4, 2)
KEYS = jax.eval_shape(jax.random.key, 0)

_UNARY = """abs acos acosh asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil cos cosh digamma
erf erf_inv erfc exp exp2 expm1 floor is_finite lgamma log log1p logistic neg round rsqrt sign sin
sinh sqrt square stop_gradient tan tanh"""
"""Functions of `jax.lax` on one array of floats."""
_BINARY = "add atan2 complex div eq ge gt igamma igammac le lt max min mul ne nextafter pow rem sub"
"""Functions of `jax.lax` on two arrays of floats."""
_ON_INTEGERS = "clz population_count shift_left shift_right_arithmetic shift_right_logical"
"""Functions of `jax.lax` on integers."""
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
    "cumlogsumexp": lambda x: lax.cumlogsumexp(x, 1),
    "reduce_window_sum": lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 2), (1, 2), "VALID"),
    "reduce_window_max": lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 3), (1, 1), "SAME"),
    "reduce_window_min": lambda x: lax.reduce_window(x, jnp.inf, lax.min, (1, 3), (1, 1), "SAME"),
    "reduce_precision": lambda x: lax.reduce_precision(x, 8, 7),
}
_SCATTERS: dict[str, Callable[..., Any]] = {
    "scatter": lambda x, i, y: x.at[i].set(y),
    "scatter-add": lambda x, i, y: x.at[i].add(y),
    "scatter-sub": lambda x, i, y: x.at[i].subtract(y),
    "scatter-mul": lambda x, i, y: x.at[i].mul(y),
    "scatter-min": lambda x, i, y: x.at[i].min(y),
    "scatter-max": lambda x, i, y: x.at[i].max(y),
}
_LINALG: dict[str, Callable[[Any], Any]] = {
    "cholesky": lax.linalg.cholesky,
    "eigh": lax.linalg.eigh,
    "lu": lax.linalg.lu,
    "qr": lax.linalg.qr,
    "svd": lax.linalg.svd,
}


Sample = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function and the arguments to trace it with."""
SAMPLES: dict[str, Sample] = {
    **{name: (getattr(lax, name), (X,)) for name in _UNARY.split()},
    **{name: (getattr(lax, name), (X, X)) for name in _BINARY.split()},
    **{
        name: (getattr(lax, name), (N, N) if "shift" in name else (N,))
        for name in _ON_INTEGERS.split()
    },
    **{name: (getattr(lax, name), (C,)) for name in ("conj", "imag", "real")},
    **{name: (fn, (X,)) for name, fn in _REDUCTIONS.items()},
    **{name: (fn, (X, ROWS, Y)) for name, fn in _SCATTERS.items()},
    **{name: (fn, (MATRIX,)) for name, fn in _LINALG.items()},
    "and": (lax.bitwise_and, (Q, Q)),
    "or": (lax.bitwise_or, (Q, Q)),
    "xor": (lax.bitwise_xor, (N, N)),
    "not": (lax.bitwise_not, (Q,)),
    "reduce_and": (lambda q: q.all(1), (Q,)),
    "reduce_or": (lambda q: q.any(1), (Q,)),
    "bitcast_convert_type": (lambda x: lax.bitcast_convert_type(x, jnp.int32), (X,)),
    "broadcast_in_dim": (lambda x: jnp.broadcast_to(x, (4, 8, 16)), (X,)),
    "clamp": (lambda x: lax.clamp(0.0, x, 1.0), (X,)),
    "concatenate": (lambda x, y: lax.concatenate([x, y], 1), (X, X)),
    "conv_general_dilated": (
        lambda x, w: lax.conv(x, w, (1,), "SAME"),
        (_shape(8, 4, 16), _shape(8, 4, 3)),
    ),
    "convert_element_type": (lambda x: x.astype(jnp.bfloat16), (X,)),
    "copy": (jnp.copy, (X,)),
    "device_put": (lambda x: jax.device_put(x, jax.memory.Space.Host), (X,)),
    "dot_general": (lambda x, w: x @ w, (X, W)),
    "dynamic_slice": (lambda x, i: lax.dynamic_slice(x, (i, 0), (1, 16)), (X, AT)),
    "dynamic_update_slice": (lambda x, y, i: lax.dynamic_update_slice(x, y, (i, 0)), (X, Y, AT)),
    "fft": (jnp.fft.fft, (C,)),
    "gather": (lambda x, i: x[i], (X, ROWS)),
    "integer_pow": (lambda x: x**3, (X,)),
    "iota": (lambda: lax.iota(jnp.int32, 16), ()),
    "join_slices": (lambda x: jnp.roll(x, 1, 1), (X,)),
    "pad": (lambda x: jnp.pad(x, ((0, 0), (0, 4))), (X,)),
    "ragged_dot_general": (lax.ragged_dot, (X, _shape(4, 16, 32), ROWS)),
    "random_bits": (lambda k: jax.random.bits(k, (8, 16)), (KEYS,)),
    "random_fold_in": (jax.random.fold_in, (KEYS, _shape(dtype=jnp.uint32))),
    "random_split": (lambda k: jax.random.split(k, 8), (KEYS,)),
    "reshape": (lambda x: x.reshape(8, 4, 4), (X,)),
    "rev": (lambda x: lax.rev(x, (1,)), (X,)),
    "select_n": (lambda q, x, y: jnp.where(q, x, y), (Q, X, X)),
    "slice": (lambda x: x[:, :8], (X,)),
    "sort": (lambda x: lax.sort(x, dimension=1), (X,)),
    "split": (lambda x: lax.split(x, (8, 8), 1), (X,)),
    "squeeze": (lambda x: x.squeeze(1), (_shape(8, 1),)),
    "top_k": (lambda x: lax.top_k(x, 2), (X,)),
    "transpose": (lambda x: x.T, (X,)),
    "triangular_solve": (
        lambda a, y: lax.linalg.triangular_solve(a, y, left_side=True),
        (MATRIX, VECTORS),
    ),
    "tridiagonal_solve": (
        lax.linalg.tridiagonal_solve,
        (_shape(8, 4), _shape(8, 4), _shape(8, 4), VECTORS),
    ),
}
"""For each primitive, by its name, a function and arguments whose program has an equation of it."""


def sample(primitive: str) -> tuple[Graph, Node] | None:
    """An equation of a primitive in a traced example: its graph and node; None without an
    example."""
    if primitive not in SAMPLES:
        return None
    fn, args = SAMPLES[primitive]
    graph, _ = trace(fn, args)
    return next(((graph, node) for node in graph.walk() if node.op == primitive), None)
