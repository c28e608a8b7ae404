"""Sample calls of primitives that compute: elementwise, contracting and reducing ones."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from calls import b, bf, bind, c, f, i, keys, more, primitives, u
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.xla_metadata import set_xla_metadata

from sbp.signatures.rule import names

_UNARY_FLOAT = names("""
    acos acosh asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil cos cosh digamma erf erf_inv
    erfc exp exp2 expm1 floor lgamma log log1p logistic round rsqrt sin sinh sqrt tan tanh is_finite
""")
_ITERATED = names("igamma igammac zeta polygamma")
_BINARY_FLOAT = names("atan2 div nextafter pow rem eq ne lt le gt ge add sub mul max min")
_BINARY_INT = names(
    "add sub mul div rem max min and or xor shift_left shift_right_arithmetic shift_right_logical"
)
SPECIAL = np.array([-2.25, np.nan, -0.75, 3.5, np.inf], np.float32)


def _ragged(contract: Any, batch: Any, ragged: int, groups: list[int]) -> Callable[..., Any]:
    numbers = lax.RaggedDotDimensionNumbers(((contract), (batch)), [ragged], groups)
    return lambda x, y, g: lax.ragged_dot_general(x, y, g, numbers)


_scaled = bind(
    "scaled_dot",
    dimension_numbers=(((2,), (2,)), ((0,), (0,))),
    preferred_element_type=np.dtype(np.float32),
)
_conv = functools.partial(lax.conv_general_dilated, window_strides=(1,), padding=[(1, 1)])


# reductions
def _greater(p: Any, q: Any) -> Any:
    """The pair with the greater value; the first of equal ones."""
    left = (p[0] > q[0]) | ((p[0] == q[0]) & (p[1] < q[1]))
    return jnp.where(left, p[0], q[0]), jnp.where(left, p[1], q[1])


def _log_sum(p: Any, q: Any) -> Any:
    """The maximum and the sum of exponentials below it."""
    top = jnp.maximum(p[0], q[0])
    safe = jnp.where(top == -jnp.inf, 0.0, top)
    return top, p[1] * jnp.exp(p[0] - safe) + q[1] * jnp.exp(q[0] - safe)


_pool = functools.partial(
    lax.reduce_window,
    init_value=-np.inf,
    computation=lax.max,
    window_dimensions=(1, 2),
    window_strides=(1, 2),
    padding="VALID",
)


# ---- kernels that are written for one device ---------------------------------------------------
def _running(x: Any, w: Any, o: Any) -> None:
    """Running sums of the lines of an array times a line."""
    o[...] = jnp.sin(x[...]) + jnp.cumsum(x[...] * w[...], -1)


def _kernel(
    grid: tuple[int, ...], blocks: list[pl.BlockSpec], shape: tuple[int, ...]
) -> Callable[..., Any]:
    """A kernel of two operands that does not split within a block; the last of `blocks` is that of
    the result."""
    out = jax.ShapeDtypeStruct(shape, np.float32)
    return pl.pallas_call(
        _running, out, grid=grid, in_specs=blocks[:-1], out_specs=blocks[-1], interpret=True
    )


def _partitioned(function: Callable[..., Any], rule: str, **factors: Any) -> Callable[..., Any]:
    """A function that states how it splits, and that runs on shards of any size."""
    found = custom_partitioning(function)
    found.def_partition(
        partition=lambda mesh, ins, outs: (
            mesh,
            function,
            jax.tree.map(lambda x: x.sharding, outs),
            jax.tree.map(lambda x: x.sharding, ins),
        ),
        sharding_rule=rule,
        **factors,
    )
    return found


def _opaque(x: Any, w: Any) -> Any:
    """The same in one block."""
    return pl.pallas_call(_running, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x, w)


_line_of = pl.BlockSpec((1, 3), lambda i: (i, 0))
_pairs_of = pl.BlockSpec((2, None, 3), lambda i, j: (j, i, 0))

more(
    {
        **{name: [(getattr(lax, name), (SPECIAL,))] for name in _UNARY_FLOAT},
        **{name: [(getattr(lax, name), (SPECIAL, f(5, seed=3)))] for name in _BINARY_FLOAT},
        **{
            name: [(getattr(lax, name), (f(2, low=1), f(2, seed=3, low=4)))] for name in _ITERATED
        },  # two elements: they compile for seconds
    },
    *(
        {
            name: [
                (
                    getattr(
                        lax,
                        {"and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor"}.get(
                            name, name
                        ),
                    ),
                    (i(5, low=0), i(5, seed=1, low=1)),
                )
            ]
        }
        for name in _BINARY_INT
    ),
    *(
        {name: [(getattr(lax, f"bitwise_{name}"), (b(5), b(5, seed=1)))]}
        for name in ("and", "or", "xor")
    ),
    {
        "add": [
            (lax.add, (c(5), c(5, seed=1))),
            (lax.add, (bf(5), bf(5, seed=1))),
            (lambda x: x + 1.5, (f(5, 3),)),
        ],
        "sub": [(lambda x: 1.5 - x, (f(5),)), (lax.sub, (c(5), c(5, seed=1)))],
        "mul": [(lax.mul, (c(5), c(5, seed=1))), (lambda x: x * 0.5, (f(5, 3),))],
        "div": [(lax.div, (c(5), c(5, seed=9) + 5)), (lambda x: x / 4, (f(5),))],
    },
    {
        "mul": [
            (
                bind("mul", out_dtype=np.dtype(np.int32)),
                (i(5, dtype=np.int8, low=-99, high=99), i(5, dtype=np.int8, seed=1)),
            )
        ]
        if "out_dtype" in inspect.signature(lax.mul).parameters
        else []
    },
    {
        "add_any": [(bind("add_any"), (f(5), f(5, seed=1)))],
        "abs": [(lax.abs, (f(5),)), (lax.abs, (i(5),)), (lax.abs, (c(5),))],
        "sign": [(lax.sign, (SPECIAL,)), (lax.sign, (i(5),)), (lax.sign, (c(5),))],
        "neg": [(lax.neg, (SPECIAL,)), (lax.neg, (i(5),)), (lax.neg, (c(5),))],
        "square": [(lax.square, (f(5),))],
        "exp": [(lax.exp, (c(5),))],
        "tanh": [(lax.tanh, (bf(5),))],
        "not": [(lax.bitwise_not, (i(5),)), (lax.bitwise_not, (b(5),)), (lax.bitwise_not, (u(5),))],
        "clz": [(lax.clz, (u(5),))],
        "population_count": [(lax.population_count, (u(5),))],
        "mulhi": [(bind("mulhi"), (u(5), u(5, seed=1)))],
        "clamp": [
            (lambda x: lax.clamp(np.float32(-1), x, np.float32(2)), (SPECIAL,)),
            (lax.clamp, (f(5, high=0), f(5), f(5, low=1))),
            (lax.clamp, (i(5, high=0), i(5), i(5, low=1))),
        ],
        "integer_pow": [
            *(
                (functools.partial(lambda y, x: lax.integer_pow(x, y), y), (f(5, low=1),))
                for y in (-1, 2, 3)
            ),
            (lambda x: lax.integer_pow(x, 3), (SPECIAL,)),
            (lambda x: lax.integer_pow(x, 3), (i(5),)),
        ],
        "select_n": [
            (lax.select_n, (b(5), f(5), f(5, seed=1))),
            (lax.select_n, (np.bool_(True), f(5, 3), f(5, 3, seed=1))),
            (lax.select_n, (i(5, low=0, high=3), f(5), f(5, seed=1), f(5, seed=2))),
            (lax.select_n, (b(5), b(5, seed=1), b(5, seed=2))),
            (lax.select_n, (b(5), c(5), c(5, seed=1))),
            (lax.select_n, (b(3), keys(3), keys(3))),
        ],
    },
    *(
        {
            "convert_element_type": [
                (
                    functools.partial(
                        lambda to, x: lax.convert_element_type_p.bind(
                            x, new_dtype=np.dtype(to), weak_type=False, sharding=None
                        ),
                        to,
                    ),
                    (given,),
                )
            ]
        }
        for given, to in [
            (f(5), jnp.bfloat16),
            (bf(5), np.float32),
            (f(5), np.int32),
            (f(5), np.bool_),
            (f(5), np.complex64),
            (bf(5), jnp.float16),
            (i(5), np.float32),
            (i(5), np.int8),
            (i(5), np.uint32),
            (i(5, dtype=np.int8), np.int32),
            (u(5), np.int32),
            (i(5), np.bool_),
            (i(5, low=0, dtype=np.uint8), np.int16),
            (b(5), np.float32),
            (b(5), np.int32),
            (f(5), jnp.float8_e4m3fn),
            (f(5), jnp.float8_e5m2),
        ]
    ),
    {
        "reduce_precision": [
            (lambda x: lax.reduce_precision(x, 5, 4), (f(5, seed=4) * np.float32(1.1),))
        ],
        "real": [(lax.real, (c(5),))],
        "imag": [(lax.imag, (c(5),))],
        "conj": [(lax.conj, (c(5),))],
        "complex": [(lax.complex, (f(5), f(5, seed=1)))],
        "copy": [(bind("copy"), (f(5, 3),)), (bind("copy"), (b(5),)), (bind("copy"), (i(5),))],
        "device_put": [
            (lambda x: jax.device_put(x, jax.memory.Space.Host), (f(5, 3),)),
            (lambda x: jax.device_put(x, jax.memory.Space.Host), (i(5),)),
        ],
        "name": [(lambda x: checkpoint_name(x, "h"), (f(5, 3),))],
        "xla_metadata_value": [(lambda x: set_xla_metadata(x, kind="h"), (f(5, 3),))],
        "stop_gradient": [(bind("stop_gradient"), (f(5),))],
        "tie": [(bind("tie"), (f(5), f(5, seed=1)))],
    },
    *({name: [(bind(name), (SPECIAL, f(5, seed=1)))]} for name in ("eq_to", "le_to", "lt_to")),
    {
        "igamma_grad_a": [(bind("igamma_grad_a"), (f(2, low=1), f(2, seed=1, low=1)))],
        "regularized_incomplete_beta": [
            (lax.betainc, (f(2, low=1), f(2, seed=1, low=1), f(2, low=0, high=4)))
        ],
    },
    *(
        {name: [(bind(name), tuple(u(3, seed=k) for k in range(count)))]}
        for name, count in (("philox2x32", 3), ("philox4x32", 6), ("threefry4x32", 8))
    ),
    {
        "threefry2x32": [(bind("threefry2x32"), (u(5), u(5, seed=1), u(5, seed=2), u(5, seed=3)))],
        "log2": [(jnp.log2, (f(5, low=1),))],
        "one_minus_square": [(bind("one_minus_square"), (f(5),))],
        "polynomial": [(bind("polynomial"), (f(5), np.float32(1), np.float32(2), np.float32(-1)))],
        "optimization_barrier": [
            (lax.optimization_barrier, (f(5, 3),)),
            (lax.optimization_barrier, (b(5),)),
            (lax.optimization_barrier, (i(5),)),
        ],
        # contractions
        "dot_general": [
            (lambda x, y: x @ y, (f(5, 7), f(7, 3))),
            (lambda x, y: x @ y, (i(2, 6), i(6, 2))),
            (lambda x, y: jnp.einsum("bij,bkj->bik", x, y), (f(3, 2, 5), f(3, 2, 5))),
            (lambda x, y: jnp.einsum("ijk,jkl->il", x, y), (c(2, 1, 5), c(1, 5, 2))),
            (
                lambda x, y: lax.dot(x, y, preferred_element_type=np.int32),
                (i(2, 5, dtype=np.int8), i(5, 2, dtype=np.int8)),
            ),
            (lambda x, y: lax.dot(x, y, preferred_element_type=np.float32), (bf(2, 5), bf(5, 2))),
            (lambda x, y: lax.dot(x, y, preferred_element_type=jnp.bfloat16), (f(2, 5), f(5, 3))),
            (lax.dot, (b(2, 5), b(5, 2))),
        ],
    },
    *(
        {"ragged_dot_general": [(lax.ragged_dot, (f(7, 5), f(3, 5, 4), np.array(sizes, np.int32)))]}
        for sizes in ([2, 4, 1], [0, 5, 0], [3, 0, 4])
    ),
    # The ragged dim contracts, as in the gradient of the matrices; is a batch dim; lies behind
    # another dim; groups differ by batch.
    {
        "ragged_dot_general": [
            (
                _ragged(([0], [0]), ([], []), 0, []),
                (f(7, 2), f(7, 3), np.array([2, 0, 3], np.int32)),
            ),
            (
                _ragged(([2], [1]), ([0], [0]), 0, []),
                (f(5, 2, 3), f(5, 3, 2), np.array([2, 0, 3], np.int32)),
            ),
            (
                _ragged(([2], [1]), ([], []), 1, [0]),
                (f(2, 5, 3), f(3, 3, 2), np.array([[2, 3, 0], [1, 0, 3]], np.int32)),
            ),
            (
                _ragged(([2], [2]), ([0], [1]), 1, [0]),
                (f(3, 5, 2), f(3, 3, 2, 2), np.array([[2, 3, 0], [1, 0, 3], [0, 5, 0]], np.int32)),
            ),
        ]
    },
    *(
        {
            "scaled_dot": [
                (
                    _scaled,
                    (
                        bf(2, rows, 8),
                        bf(2, 3, 8),
                        (2.0 ** i(2, rows, blocks, low=-2, high=2)).astype(jnp.float8_e8m0fnu),
                        np.ones((2, 3, 1), jnp.float8_e8m0fnu),
                    ),
                )
            ]
        }
        for blocks, rows in ((4, 3), (2, 5))
    ),
    {
        "conv_general_dilated": [
            (_conv, (f(3, 5, 4), f(2, 5, 3))),
            (functools.partial(_conv, feature_group_count=2), (f(2, 4, 6), f(6, 2, 3))),
            (functools.partial(_conv, batch_group_count=2), (f(4, 3, 6), f(6, 3, 3))),
            (
                functools.partial(_conv, dimension_numbers=("NWC", "WIO", "NWC")),
                (f(3, 6, 2), f(3, 2, 4)),
            ),
        ]
    },
    *(
        {f"reduce_{name}": [(lambda x, r=fn: r(x, 0), (f(5, 3),)), (fn, (i(7),))]}
        for name, fn in (("sum", jnp.sum), ("max", jnp.max), ("min", jnp.min), ("prod", jnp.prod))
    ),
    {
        "reduce_sum": [
            (lambda x: jnp.sum(x, (0, 2)), (f(3, 2, 2),)),
            (lambda x: jnp.sum(x, 1), (c(3, 5),)),
            (lambda x: lax.reduce_sum_p.bind(x, axes=(0,), out_sharding=None), (bf(6),)),
        ],
        "reduce_prod": [(lambda x: jnp.prod(x, 1), (c(3, 5),))],
    },
    *(
        {f"reduce_{name}": [(lambda x, r=fn: r(x, (0,)), (x,)) for x in (b(5, 3), i(7, 2))]}
        for name, fn in (("and", lax.reduce_and), ("or", lax.reduce_or), ("xor", lax.reduce_xor))
    ),
    *(
        {
            name: [
                (lambda x, r=fn: r(x, 1, np.int32), (i(5, 7, low=0, high=3),)),
                (lambda x, r=fn: r(x, 0, np.int32), (b(5, 3),)),
                (lambda x, r=fn: r(x, 0, np.int32), (np.stack([SPECIAL, SPECIAL[::-1]], 1),)),
            ]
        }
        for name, fn in (("argmax", lax.argmax), ("argmin", lax.argmin))
    ),
    {
        "reduce": [
            (
                lambda x, y: lax.reduce(
                    (x, y),
                    (np.float32(0), np.float32(1)),
                    lambda p, q: (p[0] + q[0], p[1] * q[1]),
                    (0,),
                ),
                (f(3, 5), f(3, 5)),
            ),
            (
                lambda x, at: lax.reduce(
                    (x, at), (np.float32(-np.inf), np.int32(2**30)), _greater, (0,)
                ),
                (f(8, 3), np.arange(24, dtype=np.int32).reshape(8, 3)),
            ),
            (
                lambda x: lax.reduce(
                    (x, jnp.ones_like(x)), (np.float32(-np.inf), np.float32(0)), _log_sum, (0, 1)
                ),
                (f(5, 3),),
            ),
        ]
    },
    *(
        {
            name: [
                (lambda x, r=fn: r(x, 0), (f(5, 3),)),
                (lambda x, r=fn: r(x, 1, reverse=True), (f(3, 5),)),
            ]
        }
        for name, fn in (
            ("cumsum", lax.cumsum),
            ("cumprod", lax.cumprod),
            ("cummax", lax.cummax),
            ("cummin", lax.cummin),
            ("cumlogsumexp", lax.cumlogsumexp),
        )
    ),
    {
        "cumsum": [(lambda x: lax.cumsum(x, 1), (i(3, 5),))],
        "sort": [
            (lambda x: lax.sort(x, dimension=0), (f(5, 3),)),
            (lambda x, y: lax.sort((x, y), dimension=1, num_keys=1), (i(3, 5), f(3, 5))),
        ],
        "top_k": [(lambda x: lax.top_k(x, 2), (f(3, 5),))],
        "approx_top_k": [(lambda x: lax.approx_max_k(x, 2), (f(3, 5),))],
    },
    *(
        {
            f"reduce_window_{name}": [
                (
                    lambda x, g=fn, z=init: lax.reduce_window(
                        x, np.float32(z), g, (1, 2), (1, 2), "SAME"
                    ),
                    (f(5, 6),),
                ),
                (
                    lambda x, g=fn, z=init: lax.reduce_window(
                        x, np.float32(z), g, (1, 1), (2, 1), "VALID"
                    ),
                    (f(6, 3),),
                ),
            ]
        }
        for name, fn, init in (
            ("sum", lax.add, 0.0),
            ("max", lax.max, -np.inf),
            ("min", lax.min, np.inf),
        )
    ),
    {
        "reduce_window": [
            (
                lambda x: lax.reduce_window(
                    x, np.float32(0), lambda p, q: p + 2 * q, (1, 2), (1, 2), "VALID"
                ),
                (f(5, 6),),
            )
        ]
    },
    {
        "select_and_scatter_add": [
            (lambda x, g: jax.vjp(_pool, x)[1](g), (f(5, 6, seed=2), f(5, 3)))
        ],
        "select_and_scatter": [
            (
                lambda x, g: primitives()["select_and_scatter"].bind(
                    x,
                    g,
                    np.float32(0),
                    select_jaxpr=jax.make_jaxpr(lax.ge)(np.float32(0), np.float32(0)).jaxpr,
                    select_consts=(),
                    scatter_jaxpr=jax.make_jaxpr(lambda p, q: p + 2 * q)(
                        np.float32(0), np.float32(0)
                    ).jaxpr,
                    scatter_consts=(),
                    window_dimensions=(1, 2),
                    window_strides=(1, 2),
                    padding=((0, 0), (0, 0)),
                ),
                (f(5, 6, seed=2), f(5, 3)),
            )
        ],
        "select_and_gather_add": [
            (lambda x, t: jax.jvp(_pool, (x,), (t,)), (f(5, 6, seed=2), f(5, 6)))
        ],
    },
    {
        "pallas_call": [
            (
                _kernel((5,), [_line_of, pl.BlockSpec((3,), lambda i: (0,)), _line_of], (5, 3)),
                (f(5, 3), f(3)),
            ),
            (
                _kernel(
                    (3, 4),
                    [_pairs_of, pl.BlockSpec((2, 3), lambda i, j: (j, 0)), _pairs_of],
                    (8, 3, 3),
                ),
                (f(8, 3, 3), f(8, 3)),
            ),
        ],
        "custom_partitioning": [
            (
                _partitioned(_opaque, "... j, j -> ... j", need_replication_factors=("j",)),
                (f(2, 4, 3), f(3)),
            ),
            (
                _partitioned(
                    lambda x, w: (_opaque(x, w), _opaque(x, w).sum(1)),
                    "i j, j -> i j, i",
                    need_replication_factors=("j",),
                ),
                (f(5, 3), f(3)),
            ),
        ],
    },
)
