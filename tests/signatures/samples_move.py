"""Sample calls of primitives that move elements, solve, draw or call back."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from calls import CLIP, FILL, PROMISE, b, bind, c, f, i, keys, more, u
from jax import lax
from jax.experimental import io_callback

from sbp.trace.slices import join_slices_p

# linear algebra
_spd = np.stack([np.eye(2, dtype=np.float32) * (k + 1) + 0.25 for k in range(5)])
_general = f(5, 3, 3) + 4 * np.eye(3, dtype=np.float32)
# indexing: duplicates, negative and large indices, each mode
_rows = np.array([0, 4, -1, 3, 100], np.int32)
# windows across shards: each mode, beside a looked-up dim, along two dims, of booleans
_windows = lax.GatherDimensionNumbers(
    offset_dims=(1, 2), collapsed_slice_dims=(), start_index_map=(0, 1)
)
_picked = lax.GatherDimensionNumbers(
    offset_dims=(1,), collapsed_slice_dims=(1,), start_index_map=(1, 0)
)
_corners = np.array([[0, 0], [2, 1], [4, -1], [-9, 2], [3, 0]], np.int32)


def _into(how: str, mode: Any, **options: Any) -> Callable[..., Any]:
    return lambda x, k, y: getattr(x.at[k], how)(
        y, mode=mode, wrap_negative_indices=False, **options
    )


_into_windows = lax.ScatterDimensionNumbers(
    update_window_dims=(1, 2), inserted_window_dims=(), scatter_dims_to_operand_dims=(0, 1)
)


def _five_keys(impl: str) -> Any:
    """Keys of a generator."""
    return jax.vmap(functools.partial(jax.random.key, impl=impl))(np.arange(5))


more(
    # movement
    {
        "transpose": [
            (lambda x: lax.transpose(x, (2, 0, 1)), (f(2, 3, 5),)),
            (lambda x: x.T, (b(5, 3),)),
            (lambda x: x.T, (i(5, 3),)),
        ],
        "broadcast_in_dim": [
            (lambda x: jnp.broadcast_to(x, (4, 5, 3)), (f(5, 3),)),
            (lambda x: lax.broadcast_in_dim(x, (5, 3), (0, 1)), (f(5, 1),)),
            (lambda x: jnp.broadcast_to(x, (5,)), (np.float32(2),)),
            (lambda x: jnp.broadcast_to(x, (2, 5)), (b(5),)),
        ],
        "squeeze": [(lambda x: lax.squeeze(x, (1,)), (f(5, 1, 3),))],
    },
    *(
        {"reshape": [(lambda x, to=to: lax.reshape(x, to), (f(*given),))]}
        for given, to in [
            ((5, 4), (5, 2, 2)),
            ((8,), (4, 2)),
            ((4, 2), (8,)),
            ((12,), (4, 3)),
            ((6, 5), (30,)),
            ((2, 6), (4, 3)),
            ((1, 5), (5,)),
            ((5,), (5, 1)),
            ((3, 4, 5), (12, 5)),
            ((6, 4), (4, 6)),
            ((2, 2, 3), (4, 3)),
            ((8, 1, 3), (2, 4, 3)),
            ((1,), ()),
            ((4, 6), (4, 1, 6)),
            ((0, 4), (4, 0)),
        ]
    ),
    *(
        {
            "reshape": [
                (lambda x, to=to, order=order: lax.reshape(x, to, dimensions=order), (f(*given),))
            ]
        }
        for given, to, order in (
            ((3, 4), (12,), (1, 0)),
            ((4, 3, 2), (6, 4), (2, 1, 0)),
            ((2, 5, 4), (4, 10), (2, 0, 1)),
            ((5, 3), (5, 3), (1, 0)),
        )
    ),
    {
        "concatenate": [
            (lambda x, y: lax.concatenate((x, y), 0), (f(2, 3), f(3, 3))),
            (lambda x, y: lax.concatenate((x, y), 1), (i(3, 2), i(3, 1))),
        ],
        "join_slices": [
            *(
                (functools.partial(join_slices_p.bind, dimension=dim, pieces=pieces), args)
                for dim, pieces, args in (
                    (0, ((0, 4, 3), (0, 0, 4)), (i(7, 3),)),
                    (0, ((0, 0, 1), (1, 0, 6)), (f(1, 3), f(7, 3))),
                    (1, ((1, 0, 2), (0, 1, 4), (1, 0, 1)), (f(2, 5), np.float32(1.5))),
                    (0, ((0, 3, 2), (1, 1, 5), (0, 0, 4)), (b(5), b(6, seed=1))),
                    (
                        0,
                        ((0, 0, 2), (1, 2, 9), (2, 0, 1)),
                        (f(12, 3), f(12, 3, seed=1), np.float32(1.5)),
                    ),
                    (0, ((0, 0, 1), (1, 1, 6)), (i(7), i(7, seed=1))),
                )
            )
        ],
        "pad": [
            (lambda x: lax.pad(x, np.float32(1.5), [(1, 2, 0), (0, 0, 0)]), (f(5, 3),)),
            (lambda x: lax.pad(x, np.float32(0), [(0, 0, 0), (-1, 1, 1)]), (f(5, 3),)),
        ],
        "rev": [(lambda x: lax.rev(x, (0,)), (f(5, 3),))],
        "slice": [
            (lambda x: x[1:4], (f(5, 3),)),
            (lambda x: lax.slice(x, (0, 0), (5, 7), (1, 2)), (f(5, 7),)),
            (lambda x: lax.slice(x, (2, 0), (5, 8), (1, 2)), (f(9, 8),)),
        ],
        "split": [(lambda x: lax.split(x, (2, 3), 0), (f(5, 3),))],
        "stack": [
            (bind("stack", axis=1), (f(5, 3), f(5, 3, seed=1))),
            (bind("stack", axis=0), (b(5), b(5, seed=1))),
        ],
        "unstack": [(bind("unstack", axis=1), (f(5, 3),))],
        "tile": [(bind("tile", reps=(2, 1)), (f(5, 3),))],
        "bitcast_convert_type": [
            (lambda x: lax.bitcast_convert_type(x, np.int32), (f(5, 3),)),
            (lambda x: lax.bitcast_convert_type(x, np.uint8), (f(5, 3),)),
            (lambda x: lax.bitcast_convert_type(x, np.uint32), (i(5, 4, low=0, dtype=np.uint8),)),
        ],
        "dynamic_slice": [
            (lambda x: lax.dynamic_slice(x, (np.int32(2), np.int32(1)), (2, 5)), (f(5, 5),)),
            (lambda x: lax.dynamic_slice(x, (9,), (2,)), (b(5),)),
            (lambda x, k: lax.dynamic_slice(x, (k, k), (2, 1)), (f(7, 3), np.int32(-1))),
            (lambda x, k: lax.dynamic_slice(x, (k,), (6,)), (i(7), np.int32(1))),
            (lambda x, k: lax.dynamic_slice(x, (k,), (2,)), (f(300), np.uint8(250))),
            (lambda x, k: lax.dynamic_slice(x, (k,), (2,)), (keys(5), np.int32(1))),
        ],
        "dynamic_update_slice": [
            (
                lambda x, y: lax.dynamic_update_slice(x, y, (np.int32(3), np.int32(2))),
                (f(5, 3), f(2, 3)),
            ),
            (
                lambda x, y, k: lax.dynamic_update_slice(x, y, (k, k)),
                (f(7, 5), f(4, 2), np.int32(1)),
            ),
            (lambda x, y, k: lax.dynamic_update_slice(x, y, (k,)), (f(300), f(3), np.int16(149))),
        ],
    },
    *(
        {
            "dynamic_update_slice": [
                (
                    lambda x, y, k: lax.dynamic_update_slice(x, y, (k,)),
                    (b(5), b(4, seed=1), np.int32(start)),
                )
            ]
        }
        for start in (-3, 1, 9)
    ),
    {
        "dynamic_update_slice": [
            (lambda x, y: lax.dynamic_update_slice(x, y, (2,)), (keys(5), keys(2))),
            (  # a start that is still negative when JAX has counted it from the end
                lambda x, y, k: lax.dynamic_update_slice(x, y, (k, 1)),
                (f(5, 8), f(3, 6), np.int32(-7)),
            ),
        ],
        "iota": [
            (lambda: lax.broadcasted_iota(np.int32, (5, 3), 0), ()),
            (lambda: lax.broadcasted_iota(jnp.bfloat16, (3, 1030), 1), ()),
            (lambda: lax.broadcasted_iota(np.uint8, (7, 2), 0), ()),
            (lambda: lax.iota(np.complex64, 5), ()),
        ],
        "empty": [(bind("empty", shape=(5, 3), dtype=np.dtype(np.float32), out_sharding=None), ())],
        "empty2": [
            (bind("empty2", dtype=np.dtype(np.float32), memory_space=jax.memory.Space.Device), ())
        ],
    },
    {
        "cholesky": [(lax.linalg.cholesky, (_spd,))],
        "eigh": [(lax.linalg.eigh, (_spd,))],
        "eig": [(lax.linalg.eig, (_spd * np.array([1, 2], np.float32),))],
        "lu": [(lax.linalg.lu, (_general,))],
        "lu_pivots_to_permutation": [
            (
                lambda p: lax.linalg.lu_pivots_to_permutation(p, 3),
                (np.array([[2, 1, 2]] * 5, np.int32),),
            )
        ],
        "qr": [(lambda x: lax.linalg.qr(x, full_matrices=False), (_general,))],
        "geqrf": [(bind("geqrf"), (_general,))],
        "householder_product": [(lax.linalg.householder_product, (_general / 8, f(5, 3) / 8))],
        "ormqr": [
            (bind("ormqr", left=True, transpose=False), (_general / 8, f(5, 3) / 8, f(5, 3, 2)))
        ],
        "hessenberg": [(lax.linalg.hessenberg, (_general,))],
        "schur": [(lax.linalg.schur, (_spd,))],
        "svd": [(lambda x: lax.linalg.svd(x, full_matrices=False), (_spd,))],
        "tridiagonal": [
            (lambda x: lax.linalg.tridiagonal(x), (_general + _general.transpose(0, 2, 1),))
        ],
        "triangular_solve": [
            (
                lambda a, y: lax.linalg.triangular_solve(a, y, left_side=True, lower=True),
                (_general, f(5, 3, 2)),
            )
        ],
        "tridiagonal_solve": [
            (lax.linalg.tridiagonal_solve, (f(5, 3) / 8, f(5, 3) + 9, f(5, 3) / 8, f(5, 3, 2)))
        ],
    },
    *(
        {
            "triangular_solve": [
                (
                    functools.partial(lax.linalg.triangular_solve, left_side=side, lower=True),
                    (_general, f(*shape)),
                )
            ]
        }
        for side, shape in ((True, (5, 3, 4)), (False, (5, 4, 3)))
    ),
    *(
        {
            "ormqr": [
                (bind("ormqr", left=side, transpose=True), (_general / 8, f(5, 3) / 8, f(*shape)))
            ]
        }
        for side, shape in ((True, (5, 3, 4)), (False, (5, 4, 3)))
    ),
    {
        "cholesky_update": [(jax.jit(bind("cholesky_update")), (_spd[0], f(2)))],
        "geqp3": [(bind("geqp3", use_magma=None), (_general, np.zeros((5, 3), np.int32)))],
        "symmetric_product": [
            (bind("symmetric_product", alpha=2.0, beta=0.5), (f(3, 2, 5), f(3, 2, 2)))
        ],
        "fft": [
            (lambda x: jnp.fft.fft(x), (c(5, 4),)),
            (lambda x: jnp.fft.rfft2(x), (f(5, 4, 6),)),
            (lambda x: jnp.fft.irfft(x), (c(3, 4),)),
        ],
    },
    *(
        {
            "gather": [
                (
                    lambda x, k, m=mode: x.at[k].get(mode=m, wrap_negative_indices=False),
                    (f(5, 3), _rows),
                )
            ]
        }
        for mode in (CLIP, FILL, PROMISE)
    ),
    {
        "gather": [
            (
                lambda x, k: x.at[k].get(mode=FILL, fill_value=2.5, wrap_negative_indices=False),
                (f(5), np.stack([_rows, -_rows], 1)),
            ),
            (lambda x, k: x.at[k].get(mode=FILL, wrap_negative_indices=False), (i(5), _rows)),
            (lambda x, k: x.at[k].get(mode=FILL), (b(5), _rows)),
            (lambda x, k: x[k], (f(300), np.array([1, 4, 255, 0, 2], np.uint8))),
            (lambda x, j, k: x[j, k], (f(5, 3), np.array([1, 4, 0]), np.array([2, 0, 1]))),
            (
                lambda x, j, k: x.at[j, :, k].get(mode=FILL, wrap_negative_indices=False),
                (f(5, 2, 3), np.array([1, 9, 0, -1]), np.array([2, 0, 3, 1])),
            ),
        ]
    },
    *(
        {
            "gather": [
                (
                    lambda x, k, m=mode: lax.gather(x, k, _windows, (2, 2), mode=m),
                    (f(5, 3), _corners),
                )
            ]
        }
        for mode in (CLIP, FILL, PROMISE)
    ),
    *(
        {
            "gather": [
                (
                    lambda x, k, m=mode: lax.gather(x, k, _picked, (3, 1), mode=m),
                    (i(7, 5), np.array([[1, 0], [4, 5], [9, 2], [0, 3]])),
                )
            ]
        }
        for mode in (CLIP, FILL, PROMISE)
    ),
    {
        "gather": [
            (lambda x, k: lax.gather(x, k, _windows, (4, 1), mode=FILL), (b(5, 3), _corners)),
            (lambda x, k: jnp.take_along_axis(x, k, 1), (f(3, 5), i(3, 4, low=0, high=5))),
            (
                lambda x, k: jax.vmap(lambda r, s: lax.dynamic_slice(r, (s,), (2,)))(x, k),
                (f(3, 5), i(3, low=0, high=5)),
            ),
            (
                lambda x, k: jax.vmap(lambda s: lax.dynamic_slice(x, (s, 0), (2, 3)))(k),
                (f(5, 3), i(4, low=-3, high=7)),
            ),
        ]
    },
    *(
        {
            name: [
                (_into(how, FILL), (f(5, 3), _rows, f(5, 3))),
                (_into(how, PROMISE), (i(5), np.array([1, 3, 1, 2, 0], np.int32), i(5))),
            ]
        }
        for how, name in (
            ("add", "scatter-add"),
            ("subtract", "scatter-sub"),
            ("mul", "scatter-mul"),
            ("min", "scatter-min"),
            ("max", "scatter-max"),
            ("set", "scatter"),
        )
    ),
    *(
        {name: [(_into(how, CLIP), (f(5), np.stack([_rows, -_rows], 1), f(5, 2)))]}
        for how, name in (("add", "scatter-add"), ("set", "scatter"))
    ),
    *(
        {
            name: [
                (
                    lambda x, j, k, y, how=how: getattr(x.at[j, k], how)(y, mode=CLIP),
                    (f(5, 3), np.array([1, 9, 1]), np.array([2, 0, 2]), f(3, seed=5)),
                )
            ]
        }
        for how, name in (("add", "scatter-add"), ("set", "scatter"))
    ),
    {
        "scatter": [
            (_into("set", FILL, unique_indices=True), (f(5, 3), _rows, f(5, 3))),
            (lambda x, k, y: x.at[k].set(y), (b(5), np.int32(2), np.bool_(True))),
        ],
        "scatter-add": [
            (
                lambda x, k, y: jax.vmap(lambda r, s, t: r.at[s].add(t))(x, k, y),
                (f(3, 5), i(3, 4, low=0, high=5), f(3, 4)),
            )
        ],
    },
    *(
        {
            name: [
                (
                    lambda x, k, y, m=mode, g=scatter: g(x, k, y, _into_windows, mode=m),
                    (
                        f(5, 3),
                        _corners[:3] if mode == PROMISE else _corners[1:4],
                        f(3, *window),
                    ),
                )
            ]
        }
        for mode in (CLIP, FILL, PROMISE)
        for name, scatter in (
            ("scatter-add", lax.scatter_add),
            ("scatter-max", lax.scatter_max),
            ("scatter", lax.scatter),
        )
        for window in ((2, 2), (4, 1), (5, 2))
    ),
    {
        "scatter-add": [(_into("add", FILL), (f(7), np.array([3, 250], np.uint8), f(2)))],
        # random numbers
        "random_seed": [(lambda s: jax.random.key(s), (np.int32(3),))],
        "random_wrap": [
            (lambda d: jax.random.wrap_key_data(d), (u(2),)),
            (lambda d: jax.random.wrap_key_data(d), (u(5, 2, 2),)),
        ],
        "random_unwrap": [(jax.random.key_data, (keys(),)), (jax.random.key_data, (keys(5, 2),))],
        "random_split": [(lambda k: jax.random.split(k, 3), (keys(),))],
        "random_fold_in": [(lambda k: jax.random.fold_in(k, 5), (keys(),))],
        "random_clone": [(jax.random.clone, (keys(),)), (jax.random.clone, (keys(5),))],
        "random_gamma": [
            (lambda k: jax.random.gamma(k, np.float32(2), (3,)), (keys(),)),
            (bind("random_gamma", log_space=False), (keys(3), f(3, low=4))),
        ],
    },
    *(
        {
            "random_seed": [
                (
                    jax.vmap(functools.partial(jax.random.key, impl=impl)),
                    (np.arange(5, dtype=np.int32),),
                )
            ],
            "random_split": [(jax.vmap(lambda k: jax.random.split(k, 3)), (_five_keys(impl),))],
            "random_fold_in": [
                (jax.vmap(jax.random.fold_in), (_five_keys(impl), np.arange(5, dtype=np.uint32))),
                (
                    jax.vmap(jax.random.fold_in, (None, 0)),
                    (_five_keys(impl)[0], np.arange(5, dtype=np.uint32)),
                ),
            ],
            "random_bits": [(jax.vmap(lambda k: jax.random.bits(k, (3, 2))), (_five_keys(impl),))],
        }
        for impl in ("threefry2x32", "rbg", "unsafe_rbg", "philox2x32")
    ),
    {
        "random_bits": [
            (lambda k: jax.random.bits(k, (5,)), (jax.random.key(3, impl="threefry4x32"),))
        ],
        "iota_2x32_shape": [(bind("iota_2x32_shape", shape=(5, 3)), ())],
    },
    *(
        {"random_bits": [(lambda k, w=width, s=shape: jax.random.bits(k, s, w), (keys(),))]}
        for width, shape in ((np.uint8, (5,)), (np.uint32, (5, 2)))
    ),
    {"random_bits": [(lambda k: jax.random.bits(k, (5,)), (jax.random.key(3, impl="rbg"),))]},
    *(
        {
            "random_bits": [
                (
                    jax.vmap(lambda k: jax.random.bits(k, (3, 2), "uint16")),
                    (jax.random.split(jax.random.key(3, impl=impl), 5),),
                )
            ]
        }
        for impl in ("rbg", "unsafe_rbg")
    ),
    {
        # The counter overflows.
        "rng_bit_generator": [
            (lambda k: lax.rng_bit_generator(k, (5,)), (u(4),)),
            (lambda k: lax.rng_bit_generator(k, (1, 7, 3), jnp.uint8), (u(4),)),
            (lambda k: lax.rng_bit_generator(k, (40,)), (~u(4) | u(4),)),
        ],
        # callbacks
        "pure_callback": [
            (
                lambda x: jax.pure_callback(
                    lambda a: a + 1, jax.ShapeDtypeStruct((5,), np.float32), x
                ),
                (f(5),),
            )
        ],
        "debug_callback": [(lambda x: jax.debug.callback(lambda a: None, x), (f(5),))],
        "io_callback": [(lambda x: io_callback(lambda a: None, None, x), (f(5),))],
        "debug_print": [(lambda x: jax.debug.print("{}", x), (f(5),))],
    },
)
