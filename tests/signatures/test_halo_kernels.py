"""Halo exchange: the kernels on windows of every kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from samples import Equation, equation, f, i, rows
from windows import drawn_windows

import sbp
from sbp.signatures import Op, Row, rule_for
from sbp.signatures.families.windows import rereads
from sbp.signatures.kernels.halo import Windows
from sbp.signatures.laws.oracle import OpTypes, Oracle
from sbp.types import B, P, S, Split


def holds(
    name: str, fn: Callable[..., Any], args: tuple[Any, ...], row: Row, n: int, seed: int = 0
) -> str:
    eqn = equation(name, fn, args)
    found = rule_for(name)
    assert found is not None
    (own,) = [
        r
        for r in found.rows(Op(name, eqn.op.params, eqn.op.ins, eqn.op.outs, n))
        if (r.ins, r.outs) == (row.ins, row.outs)
    ]
    assert own.kernel in ("halo", "aligned")
    return Oracle(eqn.op, eqn.primitive, eqn.args).refute_row(own, n, np.random.default_rng(seed))


def drawn(count: int, seed: int) -> Iterator[tuple[Windows, int, int]]:
    """Windows large enough to be split on both sides, with the padding behind, and a number of
    devices."""
    rng = np.random.default_rng(seed)
    while count:
        windows = drawn_windows(rng)
        n = int(rng.integers(2, 5))
        if windows is None or windows.is_identity or min(windows.size, windows.out) < n:
            continue
        count -= 1
        reach = (windows.window - 1) * windows.dilation + 1
        high = (
            (windows.out - 1) * windows.stride
            + reach
            - ((windows.size - 1) * windows.base + 1)
            - windows.low
        )
        yield windows, high, n


@pytest.mark.parametrize("seed", range(3))
def test_convolutions(seed):
    """Stride, padding, base dilation and window dilation, image split: every halo the paper treats
    and the rest."""
    for w, high, n in drawn(14, seed):
        if w.low < 0 or high < 0:
            continue  # XLA for CPU itself reads beyond the image where padding is negative

        def conv(x, y, w=w, high=high):
            return lax.conv_general_dilated(
                x,
                y,
                (w.stride,),
                [(w.low, high)],
                lhs_dilation=(w.base,),
                rhs_dilation=(w.dilation,),
            )

        wrong = holds(
            "conv_general_dilated",
            conv,
            (f(1, 2, w.size), f(2, 2, w.window, seed=1)),
            Row((S(2), B), (S(2),)),
            n,
        )
        assert not wrong, (w, n, wrong)


def test_convolutions_with_the_kernel_split():
    """The gradient of a kernel is a convolution whose window is as long as the image: both split,
    the parts add up."""
    checked = 0
    for w, high, n in drawn(120, 7):
        if w.window < n or w.low < 0 or high < 0:
            continue  # XLA for CPU itself reads beyond the image where padding is negative
        if w.window % n and w.out * rereads(w, -(-w.window // n)) > w.size:
            continue

        def conv(x, y, w=w, high=high):
            return lax.conv_general_dilated(
                x,
                y,
                (w.stride,),
                [(w.low, high)],
                lhs_dilation=(w.base,),
                rhs_dilation=(w.dilation,),
            )

        wrong = holds(
            "conv_general_dilated",
            conv,
            (f(1, 2, w.size), f(2, 2, w.window, seed=1)),
            Row((S(2), S(2)), (P,)),
            n,
        )
        assert not wrong, (w, n, wrong)
        checked += 1
    assert checked >= 6
    for size in (8, 12):

        def gradient(x, dy):
            return jax.linear_transpose(
                lambda k: lax.conv_general_dilated(x, k, (1,), "SAME"), jnp.zeros((2, 2, 3))
            )(dy)

        x, dy = f(3, 2, size), f(3, 2, size, seed=1)
        eqn = equation("conv_general_dilated", lambda x, dy: gradient(x, dy)[0], (x, dy))
        found = rule_for("conv_general_dilated")
        assert found is not None
        rows = [
            r
            for r in found.rows(Op(eqn.op.name, eqn.op.params, eqn.op.ins, eqn.op.outs, 4))
            if r.outs == (P,) and r.kernel == "halo"
        ]
        assert rows and not Oracle(eqn.op, eqn.primitive, eqn.args).refute_row(
            rows[0], 4, np.random.default_rng(0)
        )


def kernel_gradient(rng: np.random.Generator, space: tuple[int, ...]) -> Equation:
    """The convolution that is the gradient of another one by its kernel, with padding, strides and
    dilations drawn. The image has an infinite element, which the first result does not read; a
    window that were longer by one element would read it.

    Arguments:
      rng: draws the parameters.
      space: sizes of the image's spatial dims.
    """
    rank = len(space)
    groups = int(rng.integers(1, 3))
    strides, inner, outer = (tuple(map(int, rng.integers(1, k, rank))) for k in (4, 3, 3))
    padding = [(int(rng.integers(0, 2)), int(rng.integers(0, 2))) for _ in space]
    kernel = f(3, 2, *rng.integers(2, 4, rank))

    def conv(k, x):
        return lax.conv_general_dilated(
            x,
            k if groups == 1 else jnp.concatenate([k] * groups),
            strides,
            padding,
            lhs_dilation=inner,
            rhs_dilation=outer,
            feature_group_count=groups,
        )

    image = f(2, 2 * groups, *space, seed=1)
    out = jax.eval_shape(conv, kernel, image)
    behind = (
        min(-(-(s * count - low) // base), size - 1)
        for s, count, (low, _), base, size in zip(
            strides, out.shape[2:], padding, inner, space, strict=True
        )
    )
    image[(0, 0, *behind)] = np.inf
    return equation(
        "conv_general_dilated",
        lambda x, dy: jax.linear_transpose(lambda k: conv(k, x), kernel)(dy)[0],
        (image, f(*out.shape, seed=2)),
    )


@pytest.mark.parametrize("seed", range(2))
def test_gradients_of_kernels(seed):
    """Image and cotangent split in uneven shards. An infinity of the image reaches only the results
    that read it."""
    rng = np.random.default_rng(seed)
    checked = uneven = 0
    while checked < 10:
        eqn, n = kernel_gradient(rng, (int(rng.integers(9, 24)),)), int(rng.integers(2, 6))
        numbers = eqn.op.params["dimension_numbers"]
        want = Row((Split(numbers.lhs_spec[2]), Split(numbers.rhs_spec[2])), (P,), kernel="halo")
        padding = eqn.op.params["padding"]
        if want in rows(eqn, n) and min(padding[0]) >= 0:
            wrong = Oracle(eqn.op, eqn.primitive, eqn.args).refute_row(want, n, rng)
            assert not wrong, (eqn.op, n, wrong)
            checked += 1
            uneven += eqn.op.ins[1].shape[numbers.rhs_spec[2]] % n > 0
    assert uneven >= 5


def test_gradients_of_kernels_along_two_dims():
    """Two dims split over two mesh axes: four convolutions, of which three have copies."""
    rng, sizes, checked = np.random.default_rng(5), (2, 3), 0
    while checked < 4:
        eqn = kernel_gradient(rng, tuple(map(int, rng.integers(9, 15, 2))))
        numbers, padding = eqn.op.params["dimension_numbers"], eqn.op.params["padding"]
        ins = tuple(tuple(map(Split, spec[2:])) for spec in (numbers.lhs_spec, numbers.rhs_spec))
        windows = [eqn.op.ins[1].shape[d] for d in numbers.rhs_spec[2:]]
        if np.min(padding) < 0 or not all(w % n for w, n in zip(windows, sizes, strict=True)):
            continue
        if all(
            Row((a, b), (P,), kernel="halo") in rows(eqn, n)
            for a, b, n in zip(*ins, sizes, strict=True)
        ):
            types = OpTypes(ins, ((P, P),), sizes, communicates=True)
            wrong = Oracle(eqn.op, eqn.primitive, eqn.args).refute(types, rng)
            assert not wrong, (eqn.op, wrong)
            checked += 1


@pytest.mark.parametrize("name", ["reduce_window_sum", "reduce_window_max", "reduce_window_min"])
def test_window_reductions(name):
    computation: Any = {
        "reduce_window_sum": lax.add,
        "reduce_window_max": lax.max,
        "reduce_window_min": lax.min,
    }[name]
    start = {"reduce_window_sum": 0.0, "reduce_window_max": -np.inf, "reduce_window_min": np.inf}[
        name
    ]
    for w, high, n in drawn(10, 11):

        def windows(x, w=w, high=high):
            return lax.reduce_window(
                x,
                np.float32(start),
                computation,
                (w.window, 1),
                (w.stride, 1),
                [(w.low, high), (0, 0)],
                (w.base, 1),
                (w.dilation, 1),
            )

        if w.low < 0 or high < 0:
            continue
        wrong = holds(name, windows, (f(w.size, 2),), Row((S(0),), (S(0),)), n)
        assert not wrong, (w, n, wrong)


PADDED: list[dict[str, Any]] = [
    {"padding": "VALID"},
    {"padding": "VALID", "window_dilation": (1, 3)},
    {"padding": "SAME"},
    {"padding": [(0, 0), (2, 3)]},
    {"padding": "VALID", "base_dilation": (2, 3)},
    {"padding": [(1, 0), (0, 2)], "base_dilation": (1, 2)},
]


@pytest.mark.parametrize("options", PADDED, ids=str)
def test_windows_by_a_function_without_a_neutral_element(options):
    """XLA leaves padding and the holes of a base dilation out, so they do not split."""
    mesh = jax.make_mesh((2, 4), ("x", "y"))
    x = np.arange(12 * 16, dtype=np.float32).reshape(12, 16)

    def windows(x):
        one, weighted = np.float32(1), lambda p, q: p + 2 * q
        return lax.reduce_window(x, one, weighted, (1, 2), (1, 1), **options)

    expected = jax.jit(windows)(x)
    for in_type in ("y:S(1)", "x:S(0) y:S(1)", "x:S(1) y:S(1)"):
        np.testing.assert_array_equal(sbp.jit(windows, mesh, in_types=(in_type,))(x), expected)


def test_gradients_of_pooling():
    """Overlapping windows, gaps between them, padding: each device keeps what its own elements
    get."""
    checked = 0
    for w, high, n in drawn(600, 5):
        if (
            w.base > 1
            or w.dilation > 1
            or w.low < 0
            or high < 0
            or w.low >= w.window
            or high >= w.window
        ):
            continue

        def pool(x, w=w, high=high):
            return lax.reduce_window(x, -np.inf, lax.max, (w.window,), (w.stride,), [(w.low, high)])

        def gradient(x, dy, pool=pool):
            return jax.vjp(pool, x)[1](dy)[0]

        def tangent(x, dx, pool=pool):
            return jax.jvp(pool, (x,), (dx,))[1]

        row = Row((S(0), S(0)), (S(0),))
        x = np.random.default_rng(w.size).permutation(w.size).astype(np.float32)
        for name, fn, args in (
            ("select_and_scatter_add", gradient, (x, f(w.out, seed=1))),
            ("select_and_gather_add", tangent, (x, f(w.size, seed=1))),
        ):
            wrong = holds(name, fn, args, row, n)
            assert not wrong, (name, w, n, wrong)
        checked += 1
    assert checked >= 4


@pytest.mark.parametrize("n", [2, 3, 4])
def test_moves_along_a_split_dim(n):
    """slice, pad, rev, concatenate, reshape of odd sizes."""
    x = i(11, 3)
    cases = [
        ("slice", lambda x: x[1:9:2], (x,), Row((S(0),), (S(0),))),
        ("slice", lambda x: x[3:], (x,), Row((S(0),), (S(0),))),
        (
            "pad",
            lambda x: lax.pad(x, np.int32(7), [(2, 3, 1), (0, 0, 0)]),
            (x,),
            Row((S(0), B), (S(0),)),
        ),
        (
            "pad",
            lambda x: lax.pad(x, np.int32(7), [(-2, 1, 2), (0, 0, 0)]),
            (x,),
            Row((S(0), B), (S(0),)),
        ),
        (
            "pad",
            lambda x: lax.pad(x, np.int32(7), [(9, -3, 0), (0, 0, 0)]),
            (x,),
            Row((S(0), B), (S(0),)),
        ),
        ("rev", lambda x: lax.rev(x, (0,)), (x,), Row((S(0),), (S(0),))),
        (
            "concatenate",
            lambda x, y: jnp.concatenate([x, y, x]),
            (x, i(5, 3)),
            Row((S(0), S(0), S(0)), (S(0),)),
        ),
        (
            "concatenate",
            lambda x, y: jnp.concatenate([y, x]),
            (x, i(1, 3)),
            Row((B, S(0)), (S(0),)),
        ),
        ("reshape", lambda x: x.reshape(33), (x,), Row((S(0),), (S(0),))),
        ("reshape", lambda x: x.reshape(5, 3, 7), (i(15, 7),), Row((S(0),), (S(0),))),
        ("reshape", lambda x: x.reshape(2, 21), (i(2, 7, 3),), Row((S(1),), (S(1),))),
    ]
    for name, fn, args, row in cases:
        if (name == "reshape" and n == 3) or (n == 4 and args[0].shape[0] == 15):
            continue  # these divide: the local kernel's
        wrong = holds(name, fn, args, row, n)
        assert not wrong, (name, args[0].shape, wrong)
