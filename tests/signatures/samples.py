"""Sample equations for every rule: small calls whose trace holds the primitive, with values that are exact in few bits.

Sizes are odd on purpose: 5 over 2, 7 over 4, 3 over 4 leave shards with padding, or empty.
"""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback

from sbp import _jax
from sbp.signatures import Op
from sbp.signatures.rule import names

CLIP, FILL, PROMISE = lax.GatherScatterMode.CLIP, lax.GatherScatterMode.FILL_OR_DROP, lax.GatherScatterMode.PROMISE_IN_BOUNDS


@dataclass(frozen=True, slots=True)
class Equation:
    """One equation with the values of its operands."""

    op: Op
    primitive: Any
    args: tuple[Any, ...]


@functools.cache
def primitives() -> dict[str, Any]:
    """The primitives that JAX has loaded, by name."""
    return {p.name: p for p in gc.get_objects() if isinstance(p, _jax.Primitive)}


def equation(name: str, fn: Callable[..., Any], args: tuple[Any, ...]) -> Equation:
    """The first equation of a primitive in the trace of a call."""
    jaxpr, consts = _jax.open_jaxpr(jax.make_jaxpr(fn)(*args))
    found = next(_find(name, jaxpr, consts, args), None)
    assert found is not None, f"{name} is not in\n{jaxpr}"
    return found


def _literal(literal: Any) -> np.ndarray:
    return np.asarray(literal.val, literal.aval.dtype)


def _find(name: str, jaxpr: Any, consts: Any, args: Any) -> Iterator[Equation]:
    env: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
    for eqn in jaxpr.eqns:
        values: list[Any] = [_literal(v) if isinstance(v, _jax.Literal) else env[v] for v in eqn.invars]
        if eqn.primitive.name == name:
            plain = tuple(_jax.empty_aval(v.aval.shape, v.aval.dtype) for v in eqn.invars)
            results = tuple(_jax.empty_aval(v.aval.shape, v.aval.dtype) for v in eqn.outvars)
            yield Equation(Op(name, dict(eqn.params), plain, results, 1), eqn.primitive, tuple(values))
        for inner in ("jaxpr", "call_jaxpr"):
            if eqn.primitive.name in ("jit", "pjit", "custom_jvp_call") and inner in eqn.params:
                yield from _find(name, *_jax.open_jaxpr(eqn.params[inner]), values)
        env.update(zip(eqn.outvars, _jax.bind(eqn.primitive, values, eqn.params), strict=True))


# ---- values --------------------------------------------------------------------------------------------------------------------


def f(*shape: int, seed: int = 0, low: int = -16, high: int = 16, dtype: Any = np.float32) -> np.ndarray:
    """Quarters in [-4, 4)."""
    return (np.random.default_rng([seed, *shape]).integers(low, high, shape) / 4).astype(dtype)


def i(*shape: int, seed: int = 0, low: int = -9, high: int = 9, dtype: Any = np.int32) -> np.ndarray:
    """Small integers."""
    return np.random.default_rng([seed, *shape]).integers(low, high, shape).astype(dtype)


def u(*shape: int, seed: int = 0) -> np.ndarray:
    """32 random bits."""
    return np.random.default_rng([seed, *shape]).integers(0, 2**32, shape, dtype=np.uint32)


def b(*shape: int, seed: int = 0) -> np.ndarray:
    """Booleans."""
    return np.random.default_rng([seed, *shape]).integers(0, 2, shape).astype(np.bool_)


def c(*shape: int, seed: int = 0) -> np.ndarray:
    """Complex quarters."""
    return (f(*shape, seed=seed) + 1j * f(*shape, seed=seed + 1)).astype(np.complex64)


def bf(*shape: int, seed: int = 0) -> Any:
    """Quarters in bfloat16."""
    return f(*shape, seed=seed).astype(jnp.bfloat16)


def keys(*shape: int) -> Any:
    """PRNG keys."""
    return jax.random.split(jax.random.key(7), shape) if shape else jax.random.key(7)


def bind(name: str, **params: Any) -> Callable[..., Any]:
    """A call of a primitive that has no public function."""
    return lambda *args: primitives()[name].bind(*args, **params)


# ---- samples --------------------------------------------------------------------------------------------------------------------

Sample = tuple[Callable[..., Any], tuple[Any, ...]]

_UNARY_FLOAT = names("""
    acos acosh asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil cos cosh digamma erf erf_inv erfc exp exp2 expm1 floor lgamma log
    log1p logistic round rsqrt sin sinh sqrt tan tanh is_finite
""")
_ITERATED = names("igamma igammac zeta polygamma")
_BINARY_FLOAT = names("atan2 div nextafter pow rem eq ne lt le gt ge add sub mul max min")
_BINARY_INT = names("add sub mul div rem max min and or xor shift_left shift_right_arithmetic shift_right_logical")

SPECIAL = np.array([-2.25, np.nan, -0.75, 3.5, np.inf], np.float32)

SAMPLES: dict[str, list[Sample]] = {
    **{name: [(getattr(lax, name), (SPECIAL,))] for name in _UNARY_FLOAT},
    **{name: [(getattr(lax, name), (SPECIAL, f(5, seed=3)))] for name in _BINARY_FLOAT},
    **{name: [(getattr(lax, name), (f(2, low=1), f(2, seed=3, low=4)))] for name in _ITERATED},  # two elements: they compile for seconds
}


def more(name: str, *samples: Sample) -> None:
    """Adds samples of a primitive."""
    SAMPLES.setdefault(name, []).extend(samples)


for _name in _BINARY_INT:
    _fn = getattr(lax, {"and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor"}.get(_name, _name))
    more(_name, (_fn, (i(5, low=0), i(5, seed=1, low=1))))
for _name in ("and", "or", "xor"):
    more(_name, (getattr(lax, f"bitwise_{_name}"), (b(5), b(5, seed=1))))
more("add", (lax.add, (c(5), c(5, seed=1))), (lax.add, (bf(5), bf(5, seed=1))), (lambda x: x + 1.5, (f(5, 3),)))
more("sub", (lambda x: 1.5 - x, (f(5),)), (lax.sub, (c(5), c(5, seed=1))))
more("mul", (lax.mul, (c(5), c(5, seed=1))), (lambda x: x * 0.5, (f(5, 3),)))
more("div", (lax.div, (c(5), c(5, seed=9) + 5)), (lambda x: x / 4, (f(5),)))
if "out_dtype" in inspect.signature(lax.mul).parameters:  # JAX 0.12
    more("mul", (bind("mul", out_dtype=np.dtype(np.int32)), (i(5, dtype=np.int8, low=-99, high=99), i(5, dtype=np.int8, seed=1))))
more("add_any", (bind("add_any"), (f(5), f(5, seed=1))))
more("abs", (lax.abs, (f(5),)), (lax.abs, (i(5),)), (lax.abs, (c(5),)))
more("sign", (lax.sign, (SPECIAL,)), (lax.sign, (i(5),)), (lax.sign, (c(5),)))
more("neg", (lax.neg, (SPECIAL,)), (lax.neg, (i(5),)), (lax.neg, (c(5),)))
more("square", (lax.square, (f(5),)))
more("exp", (lax.exp, (c(5),)))
more("tanh", (lax.tanh, (bf(5),)))
more("not", (lax.bitwise_not, (i(5),)), (lax.bitwise_not, (b(5),)), (lax.bitwise_not, (u(5),)))
more("clz", (lax.clz, (u(5),)))
more("population_count", (lax.population_count, (u(5),)))
more("mulhi", (bind("mulhi"), (u(5), u(5, seed=1))))
more("clamp", (lambda x: lax.clamp(np.float32(-1), x, np.float32(2)), (SPECIAL,)), (lax.clamp, (f(5, high=0), f(5), f(5, low=1))))
more("clamp", (lax.clamp, (i(5, high=0), i(5), i(5, low=1))))
more("integer_pow", *((functools.partial(lambda y, x: lax.integer_pow(x, y), y), (f(5, low=1),)) for y in (-1, 2, 3)))
more("integer_pow", (lambda x: lax.integer_pow(x, 3), (SPECIAL,)), (lambda x: lax.integer_pow(x, 3), (i(5),)))
more("select_n", (lax.select_n, (b(5), f(5), f(5, seed=1))), (lax.select_n, (np.bool_(True), f(5, 3), f(5, 3, seed=1))))
more(
    "select_n", (lax.select_n, (i(5, low=0, high=3), f(5), f(5, seed=1), f(5, seed=2))), (lax.select_n, (b(5), b(5, seed=1), b(5, seed=2)))
)
more("select_n", (lax.select_n, (b(5), c(5), c(5, seed=1))))
more("select_n", (lax.select_n, (b(3), keys(3), keys(3))))
for _from, _to in [
    (f(5), jnp.bfloat16), (bf(5), np.float32), (f(5), np.int32), (f(5), np.bool_), (f(5), np.complex64), (bf(5), jnp.float16),
    (i(5), np.float32), (i(5), np.int8), (i(5), np.uint32), (i(5, dtype=np.int8), np.int32), (u(5), np.int32), (i(5), np.bool_),
    (i(5, low=0, dtype=np.uint8), np.int16), (b(5), np.float32), (b(5), np.int32), (f(5), jnp.float8_e4m3fn), (f(5), jnp.float8_e5m2),
]:  # fmt: skip
    more(
        "convert_element_type",
        (
            functools.partial(
                lambda to, x: lax.convert_element_type_p.bind(x, new_dtype=np.dtype(to), weak_type=False, sharding=None), _to
            ),
            (_from,),
        ),
    )
more("reduce_precision", (lambda x: lax.reduce_precision(x, 5, 4), (f(5, seed=4) * np.float32(1.1),)))
more("real", (lax.real, (c(5),)))
more("imag", (lax.imag, (c(5),)))
more("conj", (lax.conj, (c(5),)))
more("complex", (lax.complex, (f(5), f(5, seed=1))))
more("copy", (bind("copy"), (f(5, 3),)), (bind("copy"), (b(5),)), (bind("copy"), (i(5),)))
more("name", (lambda x: checkpoint_name(x, "h"), (f(5, 3),)))
more("stop_gradient", (bind("stop_gradient"), (f(5),)))
more("tie", (bind("tie"), (f(5), f(5, seed=1))))
more("device_put", (jax.device_put, (f(5, 3),)), (lambda x, y: jax.device_put((x, y)), (f(5, 3), f(4))))
for _name in ("eq_to", "le_to", "lt_to"):
    more(_name, (bind(_name), (SPECIAL, f(5, seed=1))))
more("igamma_grad_a", (bind("igamma_grad_a"), (f(2, low=1), f(2, seed=1, low=1))))
more("regularized_incomplete_beta", (lax.betainc, (f(2, low=1), f(2, seed=1, low=1), f(2, low=0, high=4))))
for _name, _count in (("philox2x32", 3), ("philox4x32", 6), ("threefry4x32", 8)):
    more(_name, (bind(_name), tuple(u(3, seed=k) for k in range(_count))))
more("threefry2x32", (bind("threefry2x32"), (u(5), u(5, seed=1), u(5, seed=2), u(5, seed=3))))
more("log2", (jnp.log2, (f(5, low=1),)))
more("one_minus_square", (bind("one_minus_square"), (f(5),)))
more("polynomial", (bind("polynomial"), (f(5), np.float32(1), np.float32(2), np.float32(-1))))
more(
    "optimization_barrier", (lax.optimization_barrier, (f(5, 3),)), (lax.optimization_barrier, (b(5),)), (lax.optimization_barrier, (i(5),))
)

# contractions
more("dot_general", (lambda x, y: x @ y, (f(5, 7), f(7, 3))), (lambda x, y: x @ y, (i(2, 6), i(6, 2))))
more("dot_general", (lambda x, y: jnp.einsum("bij,bkj->bik", x, y), (f(3, 2, 5), f(3, 2, 5))))
more("dot_general", (lambda x, y: jnp.einsum("ijk,jkl->il", x, y), (c(2, 1, 5), c(1, 5, 2))))
more("dot_general", (lambda x, y: lax.dot(x, y, preferred_element_type=np.int32), (i(2, 5, dtype=np.int8), i(5, 2, dtype=np.int8))))
more("dot_general", (lambda x, y: lax.dot(x, y, preferred_element_type=np.float32), (bf(2, 5), bf(5, 2))))
more("dot_general", (lambda x, y: lax.dot(x, y, preferred_element_type=jnp.bfloat16), (f(2, 5), f(5, 3))))
more("dot_general", (lax.dot, (b(2, 5), b(5, 2))))
for _sizes in ([2, 4, 1], [0, 5, 0], [3, 0, 4]):
    more("ragged_dot_general", (lax.ragged_dot, (f(7, 5), f(3, 5, 4), np.array(_sizes, np.int32))))


def _ragged(contract: Any, batch: Any, ragged: int, groups: list[int]) -> Callable[..., Any]:
    numbers = lax.RaggedDotDimensionNumbers(((contract), (batch)), [ragged], groups)
    return lambda x, y, g: lax.ragged_dot_general(x, y, g, numbers)


# The ragged dim contracts, as in the gradient of the matrices; is a batch dim; lies behind another dim; groups differ by batch.
more("ragged_dot_general", (_ragged(([0], [0]), ([], []), 0, []), (f(7, 2), f(7, 3), np.array([2, 0, 3], np.int32))))
more("ragged_dot_general", (_ragged(([2], [1]), ([0], [0]), 0, []), (f(5, 2, 3), f(5, 3, 2), np.array([2, 0, 3], np.int32))))
more("ragged_dot_general", (_ragged(([2], [1]), ([], []), 1, [0]), (f(2, 5, 3), f(3, 3, 2), np.array([[2, 3, 0], [1, 0, 3]], np.int32))))
more(
    "ragged_dot_general",
    (_ragged(([2], [2]), ([0], [1]), 1, [0]), (f(3, 5, 2), f(3, 3, 2, 2), np.array([[2, 3, 0], [1, 0, 3], [0, 5, 0]], np.int32))),
)
_scaled = bind("scaled_dot", dimension_numbers=(((2,), (2,)), ((0,), (0,))), preferred_element_type=np.dtype(np.float32))
for _blocks, _rows_of in ((4, 3), (2, 5)):
    _ones = np.ones((2, 1, 1), jnp.float8_e8m0fnu)
    _scale = (2.0 ** i(2, _rows_of, _blocks, low=-2, high=2)).astype(jnp.float8_e8m0fnu)
    more("scaled_dot", (_scaled, (bf(2, _rows_of, 8), bf(2, 3, 8), _scale, np.ones((2, 3, 1), jnp.float8_e8m0fnu))))
_conv = functools.partial(lax.conv_general_dilated, window_strides=(1,), padding=[(1, 1)])
more("conv_general_dilated", (_conv, (f(3, 5, 4), f(2, 5, 3))), (functools.partial(_conv, feature_group_count=2), (f(2, 4, 6), f(6, 2, 3))))
more("conv_general_dilated", (functools.partial(_conv, batch_group_count=2), (f(4, 3, 6), f(6, 3, 3))))
more("conv_general_dilated", (functools.partial(_conv, dimension_numbers=("NWC", "WIO", "NWC")), (f(3, 6, 2), f(3, 2, 4))))

# reductions
for _name in ("sum", "max", "min", "prod"):
    _reduce = {"sum": jnp.sum, "max": jnp.max, "min": jnp.min, "prod": jnp.prod}[_name]
    more(f"reduce_{_name}", (lambda x, r=_reduce: r(x, 0), (f(5, 3),)), (_reduce, (i(7),)))
more("reduce_sum", (lambda x: jnp.sum(x, (0, 2)), (f(3, 2, 2),)))
more("reduce_sum", (lambda x: jnp.sum(x, 1), (c(3, 5),)), (lambda x: lax.reduce_sum_p.bind(x, axes=(0,), out_sharding=None), (bf(6),)))
more("reduce_prod", (lambda x: jnp.prod(x, 1), (c(3, 5),)))
for _name in ("and", "or", "xor"):
    _fn = getattr(lax, f"reduce_{_name}")
    for _x in (b(5, 3), i(7, 2)):
        more(f"reduce_{_name}", (lambda x, r=_fn: r(x, (0,)), (_x,)))
for _name in ("argmax", "argmin"):
    _fn = getattr(lax, _name)
    more(_name, (lambda x, r=_fn: r(x, 1, np.int32), (i(5, 7, low=0, high=3),)))
more(
    "reduce",
    (lambda x, y: lax.reduce((x, y), (np.float32(0), np.float32(1)), lambda p, q: (p[0] + q[0], p[1] * q[1]), (0,)), (f(3, 5), f(3, 5))),
)
for _name in ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"):
    _fn = getattr(lax, _name)
    more(_name, (lambda x, r=_fn: r(x, 0), (f(5, 3),)), (lambda x, r=_fn: r(x, 1, reverse=True), (f(3, 5),)))
more("cumsum", (lambda x: lax.cumsum(x, 1), (i(3, 5),)))
more("sort", (lambda x: lax.sort(x, dimension=0), (f(5, 3),)), (lambda x, y: lax.sort((x, y), dimension=1, num_keys=1), (i(3, 5), f(3, 5))))
more("top_k", (lambda x: lax.top_k(x, 2), (f(3, 5),)))
more("approx_top_k", (lambda x: lax.approx_max_k(x, 2), (f(3, 5),)))
for _name, _fn, _init in (("sum", lax.add, 0.0), ("max", lax.max, -np.inf), ("min", lax.min, np.inf)):
    more(f"reduce_window_{_name}", (lambda x, g=_fn, z=_init: lax.reduce_window(x, np.float32(z), g, (1, 2), (1, 2), "SAME"), (f(5, 6),)))
    more(f"reduce_window_{_name}", (lambda x, g=_fn, z=_init: lax.reduce_window(x, np.float32(z), g, (1, 1), (2, 1), "VALID"), (f(6, 3),)))
more("reduce_window", (lambda x: lax.reduce_window(x, np.float32(0), lambda p, q: p + 2 * q, (1, 2), (1, 2), "VALID"), (f(5, 6),)))
_pool = functools.partial(
    lax.reduce_window, init_value=-np.inf, computation=lax.max, window_dimensions=(1, 2), window_strides=(1, 2), padding="VALID"
)
more("select_and_scatter_add", (lambda x, g: jax.vjp(_pool, x)[1](g), (f(5, 6, seed=2), f(5, 3))))
more(
    "select_and_scatter",
    (
        lambda x, g: primitives()["select_and_scatter"].bind(
            x,
            g,
            np.float32(0),
            select_jaxpr=jax.make_jaxpr(lax.ge)(np.float32(0), np.float32(0)).jaxpr,
            select_consts=(),
            scatter_jaxpr=jax.make_jaxpr(lambda p, q: p + 2 * q)(np.float32(0), np.float32(0)).jaxpr,
            scatter_consts=(),
            window_dimensions=(1, 2),
            window_strides=(1, 2),
            padding=((0, 0), (0, 0)),
        ),
        (f(5, 6, seed=2), f(5, 3)),
    ),
)
more("select_and_gather_add", (lambda x, t: jax.jvp(_pool, (x,), (t,)), (f(5, 6, seed=2), f(5, 6))))

# movement
more("transpose", (lambda x: lax.transpose(x, (2, 0, 1)), (f(2, 3, 5),)), (lambda x: x.T, (b(5, 3),)), (lambda x: x.T, (i(5, 3),)))
more(
    "broadcast_in_dim",
    (lambda x: jnp.broadcast_to(x, (4, 5, 3)), (f(5, 3),)),
    (lambda x: lax.broadcast_in_dim(x, (5, 3), (0, 1)), (f(5, 1),)),
)
more("broadcast_in_dim", (lambda x: jnp.broadcast_to(x, (5,)), (np.float32(2),)), (lambda x: jnp.broadcast_to(x, (2, 5)), (b(5),)))
more("squeeze", (lambda x: lax.squeeze(x, (1,)), (f(5, 1, 3),)))
for _from, _to in [
    ((5, 4), (5, 2, 2)), ((8,), (4, 2)), ((4, 2), (8,)), ((12,), (4, 3)), ((6, 5), (30,)), ((2, 6), (4, 3)), ((1, 5), (5,)), ((5,), (5, 1)),
    ((3, 4, 5), (12, 5)), ((6, 4), (4, 6)), ((2, 2, 3), (4, 3)), ((8, 1, 3), (2, 4, 3)), ((1,), ()), ((4, 6), (4, 1, 6)), ((0, 4), (4, 0)),
]:  # fmt: skip
    more("reshape", (lambda x, to=_to: lax.reshape(x, to), (f(*_from),)))
more(
    "concatenate",
    (lambda x, y: lax.concatenate((x, y), 0), (f(2, 3), f(3, 3))),
    (lambda x, y: lax.concatenate((x, y), 1), (i(3, 2), i(3, 1))),
)
more(
    "pad",
    (lambda x: lax.pad(x, np.float32(1.5), [(1, 2, 0), (0, 0, 0)]), (f(5, 3),)),
    (lambda x: lax.pad(x, np.float32(0), [(0, 0, 0), (-1, 1, 1)]), (f(5, 3),)),
)
more("rev", (lambda x: lax.rev(x, (0,)), (f(5, 3),)))
more("slice", (lambda x: x[1:4], (f(5, 3),)), (lambda x: lax.slice(x, (0, 0), (5, 7), (1, 2)), (f(5, 7),)))
more("split", (lambda x: lax.split(x, (2, 3), 0), (f(5, 3),)))
more("stack", (bind("stack", axis=1), (f(5, 3), f(5, 3, seed=1))), (bind("stack", axis=0), (b(5), b(5, seed=1))))
more("unstack", (bind("unstack", axis=1), (f(5, 3),)))
more("tile", (bind("tile", reps=(2, 1)), (f(5, 3),)))
more(
    "bitcast_convert_type",
    (lambda x: lax.bitcast_convert_type(x, np.int32), (f(5, 3),)),
    (lambda x: lax.bitcast_convert_type(x, np.uint8), (f(5, 3),)),
)
more("bitcast_convert_type", (lambda x: lax.bitcast_convert_type(x, np.uint32), (i(5, 4, low=0, dtype=np.uint8),)))
more(
    "dynamic_slice",
    (lambda x: lax.dynamic_slice(x, (np.int32(2), np.int32(1)), (2, 5)), (f(5, 5),)),
    (lambda x: lax.dynamic_slice(x, (9,), (2,)), (b(5),)),
    (lambda x, k: lax.dynamic_slice(x, (k, k), (2, 1)), (f(7, 3), np.int32(-1))),
    (lambda x, k: lax.dynamic_slice(x, (k,), (6,)), (i(7), np.int32(1))),
    (lambda x, k: lax.dynamic_slice(x, (k,), (2,)), (f(300), np.uint8(250))),
    (lambda x, k: lax.dynamic_slice(x, (k,), (2,)), (keys(5), np.int32(1))),
)
more("dynamic_update_slice", (lambda x, y: lax.dynamic_update_slice(x, y, (np.int32(3), np.int32(2))), (f(5, 3), f(2, 3))))
more("dynamic_update_slice", (lambda x, y, k: lax.dynamic_update_slice(x, y, (k, k)), (f(7, 5), f(4, 2), np.int32(1))))
more("dynamic_update_slice", (lambda x, y, k: lax.dynamic_update_slice(x, y, (k,)), (f(300), f(3), np.int16(149))))
for _start in (-3, 1, 9):
    more("dynamic_update_slice", (lambda x, y, k: lax.dynamic_update_slice(x, y, (k,)), (b(5), b(4, seed=1), np.int32(_start))))
more("dynamic_update_slice", (lambda x, y: lax.dynamic_update_slice(x, y, (2,)), (keys(5), keys(2))))
more("iota", (lambda: lax.broadcasted_iota(np.int32, (5, 3), 0), ()), (lambda: lax.broadcasted_iota(jnp.bfloat16, (3, 1030), 1), ()))
more("iota", (lambda: lax.broadcasted_iota(np.uint8, (7, 2), 0), ()), (lambda: lax.iota(np.complex64, 5), ()))
more("empty", (bind("empty", shape=(5, 3), dtype=np.dtype(np.float32), out_sharding=None), ()))

# linear algebra
_spd = np.stack([np.eye(2, dtype=np.float32) * (k + 1) + 0.25 for k in range(5)])
_general = f(5, 3, 3) + 4 * np.eye(3, dtype=np.float32)
more("cholesky", (lax.linalg.cholesky, (_spd,)))
more("eigh", (lax.linalg.eigh, (_spd,)))
more("eig", (lax.linalg.eig, (_spd * np.array([1, 2], np.float32),)))
more("lu", (lax.linalg.lu, (_general,)))
more("lu_pivots_to_permutation", (lambda p: lax.linalg.lu_pivots_to_permutation(p, 3), (np.array([[2, 1, 2]] * 5, np.int32),)))
more("qr", (lambda x: lax.linalg.qr(x, full_matrices=False), (_general,)))
more("geqrf", (bind("geqrf"), (_general,)))
more("householder_product", (lax.linalg.householder_product, (_general / 8, f(5, 3) / 8)))
more("ormqr", (bind("ormqr", left=True, transpose=False), (_general / 8, f(5, 3) / 8, f(5, 3, 2))))
more("hessenberg", (lax.linalg.hessenberg, (_general,)))
more("schur", (lax.linalg.schur, (_spd,)))
more("svd", (lambda x: lax.linalg.svd(x, full_matrices=False), (_spd,)))
more("tridiagonal", (lambda x: lax.linalg.tridiagonal(x), (_general + _general.transpose(0, 2, 1),)))
more("triangular_solve", (lambda a, y: lax.linalg.triangular_solve(a, y, left_side=True, lower=True), (_general, f(5, 3, 2))))
more("tridiagonal_solve", (lax.linalg.tridiagonal_solve, (f(5, 3) / 8, f(5, 3) + 9, f(5, 3) / 8, f(5, 3, 2))))
for _side, _shape in ((True, (5, 3, 4)), (False, (5, 4, 3))):
    more("triangular_solve", (functools.partial(lax.linalg.triangular_solve, left_side=_side, lower=True), (_general, f(*_shape))))
    more("ormqr", (bind("ormqr", left=_side, transpose=True), (_general / 8, f(5, 3) / 8, f(*_shape))))
more("cholesky_update", (jax.jit(bind("cholesky_update")), (_spd[0], f(2))))
more("geqp3", (bind("geqp3", use_magma=None), (_general, np.zeros((5, 3), np.int32))))
more("symmetric_product", (bind("symmetric_product", alpha=2.0, beta=0.5), (f(3, 2, 5), f(3, 2, 2))))
more("fft", (lambda x: jnp.fft.fft(x), (c(5, 4),)), (lambda x: jnp.fft.rfft2(x), (f(5, 4, 6),)), (lambda x: jnp.fft.irfft(x), (c(3, 4),)))

# indexing: duplicates, negative and large indices, each mode
_rows = np.array([0, 4, -1, 3, 100], np.int32)
for _mode in (CLIP, FILL, PROMISE):
    more("gather", (lambda x, k, m=_mode: x.at[k].get(mode=m, wrap_negative_indices=False), (f(5, 3), _rows)))
more("gather", (lambda x, k: x.at[k].get(mode=FILL, fill_value=2.5, wrap_negative_indices=False), (f(5), np.stack([_rows, -_rows], 1))))
more(
    "gather",
    (lambda x, k: x.at[k].get(mode=FILL, wrap_negative_indices=False), (i(5), _rows)),
    (lambda x, k: x.at[k].get(mode=FILL), (b(5), _rows)),
)
more(
    "gather",
    (lambda x, k: x[k], (f(300), np.array([1, 4, 255, 0, 2], np.uint8))),
    (lambda x, j, k: x[j, k], (f(5, 3), np.array([1, 4, 0]), np.array([2, 0, 1]))),
)
more(
    "gather",
    (
        lambda x, j, k: x.at[j, :, k].get(mode=FILL, wrap_negative_indices=False),
        (f(5, 2, 3), np.array([1, 9, 0, -1]), np.array([2, 0, 3, 1])),
    ),
)
# windows across shards: each mode, beside a looked-up dim, along two dims, of booleans
_windows = lax.GatherDimensionNumbers(offset_dims=(1, 2), collapsed_slice_dims=(), start_index_map=(0, 1))
_picked = lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(1,), start_index_map=(1, 0))
_corners = np.array([[0, 0], [2, 1], [4, -1], [-9, 2], [3, 0]], np.int32)
for _mode in (CLIP, FILL, PROMISE):
    more("gather", (lambda x, k, m=_mode: lax.gather(x, k, _windows, (2, 2), mode=m), (f(5, 3), _corners)))
    more("gather", (lambda x, k, m=_mode: lax.gather(x, k, _picked, (3, 1), mode=m), (i(7, 5), np.array([[1, 0], [4, 5], [9, 2], [0, 3]]))))
more("gather", (lambda x, k: lax.gather(x, k, _windows, (4, 1), mode=FILL), (b(5, 3), _corners)))
more("gather", (lambda x, k: jnp.take_along_axis(x, k, 1), (f(3, 5), i(3, 4, low=0, high=5))))
more("gather", (lambda x, k: jax.vmap(lambda r, s: lax.dynamic_slice(r, (s,), (2,)))(x, k), (f(3, 5), i(3, low=0, high=5))))
more("gather", (lambda x, k: jax.vmap(lambda s: lax.dynamic_slice(x, (s, 0), (2, 3)))(k), (f(5, 3), i(4, low=-3, high=7))))


def _into(how: str, mode: Any, **options: Any) -> Callable[..., Any]:
    return lambda x, k, y: getattr(x.at[k], how)(y, mode=mode, wrap_negative_indices=False, **options)


for _how, _name in (
    ("add", "scatter-add"),
    ("subtract", "scatter-sub"),
    ("mul", "scatter-mul"),
    ("min", "scatter-min"),
    ("max", "scatter-max"),
    ("set", "scatter"),
):
    more(_name, (_into(_how, FILL), (f(5, 3), _rows, f(5, 3))))
    more(_name, (_into(_how, PROMISE), (i(5), np.array([1, 3, 1, 2, 0], np.int32), i(5))))
for _how, _name in (("add", "scatter-add"), ("set", "scatter")):
    more(_name, (_into(_how, CLIP), (f(5), np.stack([_rows, -_rows], 1), f(5, 2))))
    more(
        _name,
        (
            lambda x, j, k, y, how=_how: getattr(x.at[j, k], how)(y, mode=CLIP),
            (f(5, 3), np.array([1, 9, 1]), np.array([2, 0, 2]), f(3, seed=5)),
        ),
    )
more(
    "scatter",
    (_into("set", FILL, unique_indices=True), (f(5, 3), _rows, f(5, 3))),
    (lambda x, k, y: x.at[k].set(y), (b(5), np.int32(2), np.bool_(True))),
)
more("scatter-add", (lambda x, k, y: jax.vmap(lambda r, s, t: r.at[s].add(t))(x, k, y), (f(3, 5), i(3, 4, low=0, high=5), f(3, 4))))
_into_windows = lax.ScatterDimensionNumbers(update_window_dims=(1, 2), inserted_window_dims=(), scatter_dims_to_operand_dims=(0, 1))
for _mode in (CLIP, FILL, PROMISE):
    for _name, _scatter in (("scatter-add", lax.scatter_add), ("scatter-max", lax.scatter_max), ("scatter", lax.scatter)):
        for _window in ((2, 2), (4, 1), (5, 2)):
            more(
                _name,
                (
                    lambda x, k, y, m=_mode, g=_scatter: g(x, k, y, _into_windows, mode=m),
                    (f(5, 3), _corners[:3] if _mode == PROMISE else _corners[1:4], f(3, *_window)),
                ),
            )
more("scatter-add", (_into("add", FILL), (f(7), np.array([3, 250], np.uint8), f(2))))

# random numbers
more("random_seed", (lambda s: jax.random.key(s), (np.int32(3),)))
more("random_wrap", (lambda d: jax.random.wrap_key_data(d), (u(2),)))
more("random_unwrap", (jax.random.key_data, (keys(),)))
more("random_split", (lambda k: jax.random.split(k, 3), (keys(),)))
more("random_fold_in", (lambda k: jax.random.fold_in(k, 5), (keys(),)))
more("random_clone", (jax.random.clone, (keys(),)))
more("random_gamma", (lambda k: jax.random.gamma(k, np.float32(2), (3,)), (keys(),)))
more("random_gamma", (bind("random_gamma", log_space=False), (keys(3), f(3, low=4))))
more("random_wrap", (lambda d: jax.random.wrap_key_data(d), (u(5, 2, 2),)))
more("random_unwrap", (jax.random.key_data, (keys(5, 2),)))
more("random_clone", (jax.random.clone, (keys(5),)))
for _impl in ("threefry2x32", "rbg", "unsafe_rbg", "philox2x32"):
    _batch = jax.vmap(functools.partial(jax.random.key, impl=_impl))(np.arange(5))
    more("random_seed", (jax.vmap(functools.partial(jax.random.key, impl=_impl)), (np.arange(5, dtype=np.int32),)))
    more("random_split", (jax.vmap(lambda k: jax.random.split(k, 3)), (_batch,)))
    more("random_fold_in", (jax.vmap(jax.random.fold_in), (_batch, np.arange(5, dtype=np.uint32))))
    more("random_fold_in", (jax.vmap(jax.random.fold_in, (None, 0)), (_batch[0], np.arange(5, dtype=np.uint32))))
    more("random_bits", (jax.vmap(lambda k: jax.random.bits(k, (3, 2))), (_batch,)))
more("random_bits", (lambda k: jax.random.bits(k, (5,)), (jax.random.key(3, impl="threefry4x32"),)))
more("iota_2x32_shape", (bind("iota_2x32_shape", shape=(5, 3)), ()))
for _width, _shape in ((np.uint8, (5,)), (np.uint32, (5, 2))):
    more("random_bits", (lambda k, w=_width, s=_shape: jax.random.bits(k, s, w), (keys(),)))
more("random_bits", (lambda k: jax.random.bits(k, (5,)), (jax.random.key(3, impl="rbg"),)))
more("rng_bit_generator", (lambda k: lax.rng_bit_generator(k, (5,)), (u(4),)))

# callbacks
more("pure_callback", (lambda x: jax.pure_callback(lambda a: a + 1, jax.ShapeDtypeStruct((5,), np.float32), x), (f(5),)))
more("debug_callback", (lambda x: jax.debug.callback(lambda a: None, x), (f(5),)))
more("io_callback", (lambda x: io_callback(lambda a: None, None, x), (f(5),)))
more("debug_print", (lambda x: jax.debug.print("{}", x), (f(5),)))
