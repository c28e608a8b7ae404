"""Halo exchange and exchange of pieces: the elements that devices need and what the rounds deliver,
compared with brute force, and the kernels on windows of every kind."""

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from samples import Equation, equation, f, i, rows

import sbp
from sbp.signatures import Row
from sbp.signatures.families.windows import rereads
from sbp.signatures.kernels.halo import Need, Windows, fetch, line_of, ranges, rounds, sent
from sbp.signatures.laws.oracle import OpTypes, Oracle
from sbp.trace.slices import join_slices_p
from sbp.types import B, P, S, Split


def drawn_windows(rng: np.random.Generator) -> Windows | None:
    """Windows with every parameter drawn; None where no window fits."""
    size, window, stride, dilation, base = (
        int(rng.integers(a, b)) for a, b in ((1, 20), (1, 5), (1, 4), (1, 4), (1, 4))
    )
    low, high = (int(x) for x in rng.integers(-2, 5, 2))
    padded = (size - 1) * base + 1 + low + high
    reach = (window - 1) * dilation + 1
    if padded < reach:
        return None
    out = (padded - reach) // stride + 1
    return Windows(
        size=size, out=out, stride=stride, low=low, window=window, dilation=dilation, base=base
    )


def read_by(windows: Windows, out: int) -> set[int]:
    """The operand's elements that one result element reads, straight from the definition."""
    positions = (windows.first(out) + windows.dilation * k for k in range(windows.window))
    return {
        p // windows.base
        for p in positions
        if p % windows.base == 0 and 0 <= p // windows.base < windows.size
    }


def test_needs_hold_what_windows_read():
    rng = np.random.default_rng(0)
    for windows in filter(None, (drawn_windows(rng) for _ in range(3000))):
        for n in (2, 3, 5):
            chunk = -(-windows.out // n)
            need = windows.need(n)
            for device, (_, start, count) in enumerate(need.parts):
                results = range(chunk * device, min(chunk * (device + 1), windows.out))
                wanted = set().union(*(read_by(windows, o) for o in results))
                assert wanted <= set(range(start, start + count)), (windows, n, device)


def halos(windows: Windows, n: int) -> list[tuple[int, int]]:
    """For each device, how many elements it needs from its left and from its right (negative: how
    many of its own it does not)."""
    chunk, shard = -(-windows.out // n), -(-windows.size // n)
    ends = [
        (windows.first(chunk * k) + windows.positions_read(chunk) - 1) // windows.base + 1
        for k in range(n)
    ]
    starts = windows.need(n).starts
    return [
        (shard * k - s, e - shard * (k + 1))
        for k, (s, e) in enumerate(zip(starts, ends, strict=True))
    ]


def test_limits_are_the_corrected_formula():
    """Appendix A.4 of the GSPMD paper with the term that its print lacks, and its Figure 11."""
    rng = np.random.default_rng(1)
    for windows in filter(None, (drawn_windows(rng) for _ in range(1000))):
        n = 4
        chunk, shard = -(-windows.out // n), -(-windows.size // n)
        reach = windows.dilation * (windows.window - 1) + 1
        for device, (left, right) in enumerate(halos(windows, n)):
            a = windows.stride * chunk
            start = (a * device - windows.low + windows.base - 1) // windows.base
            limit = (
                a * device + windows.stride * (chunk - 1) + reach - windows.low + windows.base - 1
            ) // windows.base
            assert (left, right) == (shard * device - start, limit - shard * (device + 1))
    figure = halos(Windows(size=12, out=8, stride=2, low=1, window=3), 4)
    assert [right for _, right in figure] == [1, 2, 3, 4] and [left for left, _ in figure] == [
        1,
        0,
        -1,
        -2,
    ]


def fetched(need: Need) -> np.ndarray:
    """What each device fetches of the elements 1, 2, 3 and so on; padding of shards is 99."""
    x = np.concatenate([np.arange(need.size) + 1, [99] * (need.n * need.chunk - need.size)])
    place: Any = SimpleNamespace(permute=lax.ppermute)
    fn = jax.shard_map(
        lambda x: fetch(place, x, 0, "a", need),
        mesh=sbp.make_mesh((need.n,), ("a",)),
        in_specs=jax.sharding.PartitionSpec("a"),
        out_specs=jax.sharding.PartitionSpec("a"),
        check_vma=False,
    )
    return np.asarray(jax.jit(fn)(x)).reshape(need.n, need.width)


@pytest.mark.parametrize("seed", range(4))
def test_devices_fetch_what_they_need(seed):
    """Ranges near the own shard, and any others, far, reversed and outside of the dim. Each element
    arrives in its place, and zeros around the dim if `adds_zeros` says so."""
    rng, kinds = np.random.default_rng(seed), Counter[str]()
    for draw in range(40):
        n, chunk, width = (int(rng.integers(1, high)) for high in (4, 8, 12))
        n, size = 2**n, 2**n * chunk - (int(rng.integers(0, 2**n)) if draw % 3 else 0)
        starts = (
            np.arange(n) * chunk + rng.integers(-3, 3) + rng.integers(0, 2, n).cumsum()
            if draw % 2
            else rng.integers(-9, size + 9, n)
        )
        need = ranges(size, chunk, tuple(map(int, starts)), width)
        for r in rounds(need):
            assert len({s for s, _ in r.pairs}) == len(r.pairs) == len({t for _, t in r.pairs})
            assert all(0 <= r.first[s] <= need.chunk - r.width for s, _ in r.pairs)
        got, index = fetched(need), starts[:, None] + np.arange(width)
        want = np.where((index >= 0) & (index < size), index + 1, 0 if need.adds_zeros else got)
        np.testing.assert_array_equal(got, want, err_msg=str(need))
        kinds.update({"line": line_of(need) is not None, "zeros": need.adds_zeros, "all": 1})
    assert 1 < kinds["zeros"] < kinds["line"] < kinds["all"] - 3, kinds


SENT = {
    # Elements and rounds: a window of three elements takes one from each neighbor; a reversal sends
    # the shard once; what stays is not sent.
    "a window of three": (Windows(size=64, out=64, low=1, window=3).need(8), (2, 2)),
    "windows side by side": (Windows(size=64, out=32, stride=2, window=2).need(8), (0, 0)),
    # Of shards of 3, 3 and 2 elements, two messages of 3 go right, one of 3 and one of 2 left.
    "a window of seven": (Windows(size=8, out=6, low=2, window=7).need(3), (6, 2)),
    "a reversal": (ranges(64, 8, tuple(64 - 8 * (k + 1) for k in range(8)), 8), (8, 1)),
    "all but the first": (Windows(size=64, out=63, low=-1).need(8), (1, 1)),
    # Of shards of 8 elements, a roll by at most 8 sends `shift` elements in one round.
    **{
        f"a roll by {shift} on {n} devices": (
            Need(8, 8, n, ((0, 8 * n - shift, shift), (shift, 0, 8 * n - shift))),
            (shift, 1),
        )
        for n in (2, 4, 8)
        for shift in (1, 3, 8)
    },
    # Of the first of two arrays with shards of 4 elements, two shards go to each device of the
    # first half, so there are two rounds; device 0 of two devices has one of its two already.
    **{
        f"the first of two arrays on {n} devices": (
            Need(4, 8, n, ((0, 0, 4 * n),)),
            (4 * min(2, n - 1), min(2, n - 1)),
        )
        for n in (2, 4, 8)
    },
}


@pytest.mark.parametrize(("need", "want"), SENT.values(), ids=list(SENT))
def test_what_is_sent(need: Need, want: tuple[int, int]):
    assert sent(need) == want


def test_a_halo_without_padding_adds_no_zeros():
    line = line_of(Windows(size=64, out=64, low=1, window=3).need(8))
    assert line is not None
    assert line[1] == (0, 0)


# ---- halo kernels --------------------------------------------------------------------------------


def holds(
    name: str, fn: Callable[..., Any], args: tuple[Any, ...], row: Row, n: int, seed: int = 0
) -> str:
    eqn = equation(name, fn, args)
    (own,) = [r for r in rows(eqn, n) if (r.ins, r.outs) == (row.ins, row.outs)]
    assert own.kernel in ("halo", "aligned")
    return Oracle(eqn.op, eqn.primitive, eqn.args).refute_row(own, n, np.random.default_rng(seed))


def drawn(count: int, seed: int) -> Iterator[tuple[Windows, int, int]]:
    """Windows large enough to be split on both sides, with the padding behind, and a number of
    devices. No padding is negative: there XLA for CPU itself reads beyond the image."""
    rng = np.random.default_rng(seed)
    while count:
        windows = drawn_windows(rng)
        n = int(rng.integers(2, 5))
        if windows is None or windows.is_identity or min(windows.size, windows.out) < n:
            continue
        reach = (windows.window - 1) * windows.dilation + 1
        high = (
            (windows.out - 1) * windows.stride
            + reach
            - ((windows.size - 1) * windows.base + 1)
            - windows.low
        )
        if windows.low >= 0 and high >= 0:
            count -= 1
            yield windows, high, n


def wrong_convolution(w: Windows, high: int, row: Row, n: int) -> str:
    """What is wrong with a row of a convolution with these windows."""
    conv = functools.partial(
        lax.conv_general_dilated,
        window_strides=(w.stride,),
        padding=[(w.low, high)],
        lhs_dilation=(w.base,),
        rhs_dilation=(w.dilation,),
    )
    return holds("conv_general_dilated", conv, (f(1, 2, w.size), f(2, 2, w.window, seed=1)), row, n)


@pytest.mark.parametrize("seed", range(3))
def test_convolutions(seed):
    """Stride, padding, base dilation and window dilation, image split: every halo the paper treats
    and the rest."""
    for w, high, n in drawn(7, seed):
        assert not wrong_convolution(w, high, Row((S(2), B), (S(2),)), n), (w, n)


def test_convolutions_with_the_kernel_split():
    """The gradient of a kernel is a convolution whose window is as long as the image: both split,
    the parts add up."""
    checked = 0
    for w, high, n in drawn(59, 7):
        uneven = w.window % n and w.out * rereads(w, -(-w.window // n)) > w.size
        if w.window < n or uneven:
            continue
        assert not wrong_convolution(w, high, Row((S(2), S(2)), (P,)), n), (w, n)
        checked += 1
    assert checked >= 6

    def gradient(x, dy):
        return jax.linear_transpose(
            lambda k: lax.conv_general_dilated(x, k, (1,), "SAME"), jnp.zeros((2, 2, 3))
        )(dy)[0]

    for size in (8, 12):
        eqn = equation("conv_general_dilated", gradient, (f(3, 2, size), f(3, 2, size, seed=1)))
        row = next(r for r in rows(eqn, 4) if r.outs == (P,) and r.kernel == "halo")
        rng = np.random.default_rng(0)
        assert not Oracle(eqn.op, eqn.primitive, eqn.args).refute_row(row, 4, rng)


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
            assert not Oracle(eqn.op, eqn.primitive, eqn.args).refute_row(want, n, rng), (eqn.op, n)
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
            assert not Oracle(eqn.op, eqn.primitive, eqn.args).refute(types, rng), eqn.op
            checked += 1


WINDOWED: dict[str, tuple[Callable[..., Any], float]] = {
    "reduce_window_sum": (lax.add, 0.0),
    "reduce_window_max": (lax.max, -np.inf),
    "reduce_window_min": (lax.min, np.inf),
}


@pytest.mark.parametrize("name", WINDOWED)
def test_window_reductions(name):
    computation, start = WINDOWED[name]
    for w, high, n in drawn(6, 11):

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

        assert not holds(name, windows, (f(w.size, 2),), Row((S(0),), (S(0),)), n), (w, n)


@pytest.mark.parametrize(
    "options",
    [
        {"padding": "VALID"},
        {"padding": "VALID", "window_dilation": (1, 3)},
        {"padding": "SAME"},
        {"padding": [(0, 0), (2, 3)]},
        {"padding": "VALID", "base_dilation": (2, 3)},
        {"padding": [(1, 0), (0, 2)], "base_dilation": (1, 2)},
    ],
    ids=str,
)
def test_windows_by_a_function_without_a_neutral_element(options):
    """XLA leaves padding and the holes of a base dilation out, so they do not split."""
    mesh = jax.make_mesh((2, 4), ("x", "y"))
    x = np.arange(12 * 16, dtype=np.float32).reshape(12, 16)

    def windows(x):
        return lax.reduce_window(
            x, np.float32(1), lambda p, q: p + 2 * q, (1, 2), (1, 1), **options
        )

    expected = jax.jit(windows)(x)
    for in_type in ("y:S(1)", "x:S(0) y:S(1)", "x:S(1) y:S(1)"):
        np.testing.assert_array_equal(sbp.jit(windows, mesh, in_types=(in_type,))(x), expected)


def test_gradients_of_pooling():
    """Overlapping windows, gaps between them, padding: each device keeps what its own elements
    get."""
    checked = 0
    for w, high, n in drawn(290, 5):
        if w.base > 1 or w.dilation > 1 or max(w.low, high) >= w.window:
            continue

        def pool(x, w=w, high=high):
            return lax.reduce_window(x, -np.inf, lax.max, (w.window,), (w.stride,), [(w.low, high)])

        gradient = lambda x, dy, pool=pool: jax.vjp(pool, x)[1](dy)[0]
        tangent = lambda x, dx, pool=pool: jax.jvp(pool, (x,), (dx,))[1]
        x = np.random.default_rng(w.size).permutation(w.size).astype(np.float32)
        for name, fn, args in (
            ("select_and_scatter_add", gradient, (x, f(w.out, seed=1))),
            ("select_and_gather_add", tangent, (x, f(w.size, seed=1))),
        ):
            assert not holds(name, fn, args, Row((S(0), S(0)), (S(0),)), n), (name, w, n)
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
        assert not holds(name, fn, args, row, n), (name, args[0].shape)


# ---- pieces --------------------------------------------------------------------------------------


def drawn_pieces(rng: np.random.Generator) -> Need:
    """Pieces of an array in drawn_pieces places of a result; places between them are of others."""
    size, at, parts = int(rng.integers(1, 30)), 0, []
    for _ in range(int(rng.integers(1, 5))):
        at += int(rng.integers(0, 3))
        start = int(rng.integers(0, size))
        count = int(rng.integers(1, size - start + 1))
        parts.append((at, start, count))
        at += count
    out, n = at + int(rng.integers(0, 3)), int(rng.integers(2, 9))
    return Need(-(-size // n), -(-out // n), n, tuple(parts))


@pytest.mark.parametrize("seed", range(3))
def test_rounds_deliver_the_pieces(seed: int):
    rng = np.random.default_rng(seed)
    for _ in range(200):
        need = drawn_pieces(rng)
        x, want = np.arange(need.n * need.chunk), np.full(need.n * need.width, -1)
        for at, start, count in need.parts:
            want[at : at + count] = x[start : start + count]
        got = np.full((need.n, need.width), -1)
        for r in rounds(need):
            assert len({s for s, _ in r.pairs}) == len({t for _, t in r.pairs}) == len(r.pairs)
            assert all((s == t) == r.is_own for s, t in r.pairs)
            for source, target in r.pairs:
                kept = np.arange(r.low[target], r.high[target])
                got[target, kept] = x[
                    source * need.chunk + r.first[source] + kept - r.place[target]
                ]
        np.testing.assert_array_equal(got.ravel(), want)


def test_joins_of_drawn_pieces():
    """Two arrays and a scalar, of which each array may be too short to be split."""
    rng, communicating = np.random.default_rng(0), 0
    for _ in range(12):
        sizes = [int(k) for k in rng.integers(1, 14, 2)]
        pieces = []
        for _ in range(int(rng.integers(2, 6))):
            k = int(rng.integers(0, 3))
            start = int(rng.integers(0, sizes[k])) if k < 2 else 0
            pieces.append((k, start, int(rng.integers(1, sizes[k] - start + 1)) if k < 2 else 2))
        fn = functools.partial(join_slices_p.bind, dimension=0, pieces=tuple(pieces))
        eqn = equation("join_slices", fn, (f(sizes[0], 2), f(sizes[1], 2, seed=1), np.float32(0.5)))
        for n in (2, 3, 5):
            for row in rows(eqn, n):
                if row.outs == (S(0),):
                    communicating += 1
                    assert not Oracle(eqn.op, eqn.primitive, eqn.args).refute_row(row, n, rng), (
                        pieces,
                        sizes,
                        n,
                        row,
                    )
    assert communicating > 20
