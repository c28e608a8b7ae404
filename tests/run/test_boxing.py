"""Every conversion between two types gives the same value to the bit, there and back, and takes the
cheapest steps there are."""

import itertools
import math
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.hlo.traffic import collectives
from sbp.infer.space import RELAYOUT_PASSES, TypeSpace, decode
from sbp.machine.hardware import Hardware
from sbp.machine.lanes import copies_for_lanes, joins_lanes
from sbp.machine.table import HARDWARE
from sbp.run import boxing
from sbp.run.boxing import Boxing
from sbp.signatures.factors import admissible
from sbp.types import Unreduced
from tests.run.conversions import BYTES_ONLY, Conversions, Shape, atoms_of, mesh_of, space_of
from tests.run.ways import cheapest, steps, types_of
from tests.slices import sliced

pytestmark = pytest.mark.laws

EVEN, PRIME, SMALL, EMPTY = (8, 8, 8), (5, 7, 3), (3, 2, 1), (0, 5, 2)
SHAPES = [EVEN, PRIME, SMALL, EMPTY]
FLOAT, HALF, INT, BOOL = (
    np.dtype(np.float32),
    np.dtype(jnp.bfloat16),
    np.dtype(np.int32),
    np.dtype(np.bool_),
)


def monoids_of(dtype: np.dtype[Any]) -> tuple[str, ...]:
    return ("and", "or") if dtype == BOOL else ("sum", "max")


def conversions(
    sizes: Shape,
    shape: Shape,
    dtype: np.dtype[Any],
    monoids: tuple[str, ...],
    share: float = 1.0,
    laws: float = 1.0,
    hardware: Hardware = BYTES_ONLY,
) -> Conversions:
    """Between these shares of all types (see `sliced`), along the planner's paths."""
    space = space_of(shape, sizes, monoids, hardware)
    assert len(space.types) == len(types_of(len(shape), len(sizes), monoids))
    types = sliced(space.types, share, laws=laws, seed=sum(shape))
    return Conversions(
        sizes,
        shape,
        dtype,
        {(s, t): space.path(s, t) for s, t in itertools.product(types, repeat=2)},
        hardware,
    )


def assert_right(found: Conversions, turns: int, laws: int) -> None:
    """All conversions are right, and so many round trips from each type (`laws` in `make laws`);
    the compiled program sends what the steps say."""
    rng = np.random.default_rng(sum(found.shape))
    count = len(found.sources)
    chosen = sliced(range(count), turns / count, laws=laws / count, seed=sum(found.shape))
    wrong = list(found.wrong(rng, chosen))
    assert not wrong, f"{len(wrong)} wrong, the first: {wrong[0]}"
    if found.dtype == HALF:
        return  # CPU's collectives widen it
    sent = sum(
        c.bytes_per_device for c in collectives(found.program.as_text(), math.prod(found.sizes))
    )
    planned = sum(step.bytes_sent for step in found.steps) * found.room * found.dtype.itemsize / 4
    blocks = (
        sum(step.kind == "all_reduce" for step in found.steps)
        * 2
        * math.prod(found.sizes)
        * found.dtype.itemsize
    )
    assert (
        sent <= planned * (1 + 1e-9) + blocks
    )  # some all-reduces pad the whole array to a block for each device


ONE_AXIS = [*itertools.product((FLOAT, INT), SHAPES), (HALF, PRIME), (BOOL, PRIME), (BOOL, EMPTY)]


@pytest.mark.parametrize(
    ("n", "dtype", "shape"),
    sliced([(n, *case) for n in (2, 4, 8) for case in ONE_AXIS], 1 / 2),
    ids=str,
)
def test_one_axis(n: int, dtype: np.dtype[Any], shape: Shape):
    """Under every monoid of the dtype."""
    assert_right(conversions((n,), shape, dtype, admissible(dtype)), turns=99, laws=99)


STAGED = replace(BYTES_ONLY, name="staged", scatters_whole_mesh=False)


@pytest.mark.parametrize("shape", [EVEN, PRIME], ids=str)
@pytest.mark.parametrize(("sizes", "stages"), [((4,), 2), ((8,), 2), ((2,), 1)], ids=str)
def test_a_sum_over_the_whole_mesh_in_stages(sizes: Shape, stages: int, shape: Shape):
    """It sends as many bytes as in one stage, in a collective for each stage."""
    found = conversions(sizes, shape, FLOAT, ("sum",), hardware=STAGED)
    assert_right(found, turns=99, laws=99)
    kinds = [c.kind for c in collectives(found.program.as_text(), math.prod(sizes))]
    scatters = sum(step.kind == "reduce_scatter" for step in found.steps)
    assert scatters and kinds.count("reduce-scatter") == stages * scatters


LANES = (16, 130)


def test_exchanges_that_join_lanes_of_a_tpu():
    """Their results have a layout of their own. A gather of such lanes is charged copies of its
    result, and on other platforms none."""
    on_tpu = replace(HARDWARE["tpu-v5e"], ring_chips=1)
    found = conversions((2,), LANES, FLOAT, (), hardware=on_tpu)
    assert joins_lanes((16, 65), LANES) and copies_for_lanes((16, 65), LANES)
    assert_right(found, turns=99, laws=99)
    here, there = ((2,), (0,))
    prices = [
        next(s.seconds for s in space.steps_from(here) if s.target == there)
        for space in (
            space_of(LANES, (2,), (), h) for h in (on_tpu, replace(on_tpu, platform="cuda"))
        )
    ]
    copied = RELAYOUT_PASSES * 4 * math.prod(LANES) / on_tpu.hbm_bytes_per_second
    assert prices[0] - prices[1] == pytest.approx(copied)


TWO_AXES = list(itertools.product([(2, 4), (4, 2)], [FLOAT, INT, BOOL], SHAPES))


@pytest.mark.parametrize(("sizes", "dtype", "shape"), sliced(TWO_AXES, 1 / 6, seed=5), ids=str)
def test_two_axes(sizes: Shape, dtype: np.dtype[Any], shape: Shape):
    """Every conversion; of the 34 round trips from each type 4, and 8 in `make laws`."""
    assert_right(conversions(sizes, shape, dtype, monoids_of(dtype)), turns=4, laws=8)


@pytest.mark.parametrize(
    ("dtype", "shape"), [(FLOAT, PRIME), (FLOAT, EMPTY), (INT, SMALL)], ids=str
)
def test_three_axes(dtype: np.dtype[Any], shape: Shape):
    """Between 8 of the 186 types with 4 round trips from each, and in `make laws` between 32 with
    8."""
    monoids = monoids_of(dtype)
    found = conversions((2, 2, 2), shape, dtype, monoids, share=8 / 186, laws=32 / 186)
    assert_right(found, turns=4, laws=8)


# ---- the steps ----------------------------------------------------------------------------------

PRICES = [(1.0, 0.0), (0.0, 1.0), (1.0, 50.0), (1.0, 1000.0)]
"""Of a byte, and of a collective."""


@pytest.mark.parametrize(("per_byte", "per_collective"), PRICES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("sizes", [(2,), (4,), (8,), (2, 4), (4, 2), (2, 2, 2)], ids=str)
def test_paths_are_cheapest(sizes: Shape, shape: Shape, per_byte: float, per_collective: float):
    """Every price of the planner's; the paths of 100 pairs of types, of 300 in `make laws`."""
    monoids = ("sum", "max")
    types = types_of(len(shape), len(sizes), monoids)
    best = cheapest(shape, sizes, types, per_byte, per_collective)
    hardware = replace(
        BYTES_ONLY,
        link_bytes_per_second=1 / per_byte if per_byte else math.inf,
        latency_seconds=per_collective,
    )
    space = space_of(shape, sizes, monoids, hardware)
    row = [space.index[codes] for t in types for codes in space.types if atoms_of(codes) == t]
    np.testing.assert_allclose(space.seconds()[np.ix_(row, row)], best, rtol=1e-12, atol=1e-7)
    pairs = list(itertools.product(range(len(types)), repeat=2))
    for i, j in sliced(pairs, min(1, 100 / len(pairs)), laws=min(1, 300 / len(pairs))):
        taken = space.path(space.types[row[i]], space.types[row[j]])
        price = sum(
            s.bytes_sent * per_byte + (s.kind not in ("slice", "mask", "zero_pad")) * per_collective
            for s in taken
        )
        assert price == pytest.approx(best[i, j], rel=1e-12, abs=1e-9), (
            f"{types[i]} to {types[j]} by {taken}"
        )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("sizes", [(8,), (2, 4)], ids=str)
def test_a_plan_finds_a_way_with_the_types_at_hand(sizes: Shape, shape: Shape):
    """A plan's spaces hold, besides the two types, only splits that leave no device empty, and only
    the monoids of the two."""
    types = types_of(len(shape), len(sizes), ("sum", "max"))
    codes_of = {atoms_of(codes): codes for codes in space_of(shape, sizes, ("sum", "max")).types}
    spaces: dict[Any, TypeSpace] = {}
    best: dict[Any, Any] = {}
    for source, target in itertools.product(types, repeat=2):
        monoids = tuple(sorted({a.monoid for a in (*source, *target) if isinstance(a, Unreduced)}))
        if monoids not in best:
            through = types_of(len(shape), len(sizes), monoids)
            best[monoids] = dict(
                zip(
                    itertools.product(through, repeat=2),
                    cheapest(shape, sizes, through, 1.0, 0.0).ravel(),
                    strict=True,
                )
            )
        pair = codes_of[source], codes_of[target]
        forced = frozenset((axis, c - 1) for t in pair for axis, c in enumerate(t) if c > 0)
        if (monoids, forced) not in spaces:
            spaces[monoids, forced] = TypeSpace(
                shape, 4, mesh_of(sizes), frozenset(monoids), forced
            )
        sent = sum(step.bytes_sent for step in spaces[monoids, forced].path(*pair))
        least = best[monoids][source, target]
        assert sent == pytest.approx(least) if shape == EVEN else sent >= least - 1e-9


def test_formulae():
    """By hand: 96 bytes on 4 devices, 24 on each where they are split."""
    shape, n = (4, 6), 4
    types = types_of(2, 1, ("sum",))

    def priced(source: int) -> dict[str, float]:
        return {repr(t[0]): sent for t, sent, _ in steps(shape, types[source], (n,), types)}

    b, s0, s1, p = range(4)
    assert priced(p) == {
        "B": 2 * 3 / 4 * 96,
        "S(0)": 3 / 4 * 96,
        "S(1)": 3 / 4 * 128,
    }  # six columns in blocks of two
    assert priced(s0) == {"B": 3 / 4 * 96, "S(1)": 3 / 4 * 32, "P(sum)": 0}
    assert priced(s1) == {"B": 3 / 4 * 128, "S(0)": 3 / 4 * 32, "P(sum)": 0}
    assert priced(b) == {"S(0)": 0, "S(1)": 0, "P(sum)": 0}


# ---- the tests can say no -----------------------------------------------------------------------


def small_conversions() -> Conversions:
    return conversions((4,), (5, 7), FLOAT, ("sum", "max"))


def test_a_reduction_left_out_is_seen(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Boxing, "all_reduce", lambda self, x, monoid, names, n: x)
    wrong = list(small_conversions().wrong(np.random.default_rng(0)))
    assert any("P(sum)" in w and "all_reduce" in w for w in wrong) and all(
        "all_reduce" in w for w in wrong
    )


def test_padding_left_in_is_seen(monkeypatch: pytest.MonkeyPatch):
    """Where the padding lies shows in values, even if the shape is right."""
    monkeypatch.setattr(
        boxing,
        "_first",
        lambda x, dim, size: x[
            tuple(slice(-size, None) if d == dim else slice(None) for d in range(x.ndim))
        ],
    )
    assert any("all_gather" in w for w in small_conversions().wrong(np.random.default_rng(0)))


def test_a_device_that_disagrees_is_seen():
    found = small_conversions()
    whole = next(t for t in found.types if decode(t[0]) == decode(0))
    parts = np.zeros((4, 5, 7), np.float32)
    want = np.zeros((5, 7), np.float32)
    assert not list(found.differences((whole, whole), parts, whole, want))
    parts[3, 1, 1] = 2.0**-149
    assert "device (3,) reads" in next(iter(found.differences((whole, whole), parts, whole, want)))
