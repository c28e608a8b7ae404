"""The oracle refutes wrong rows, and no rule has them. The parts that the oracle tries show wrong
sums, orders and padding."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from samples import SAMPLES, b, c, equation, equations, f, i, rows, skip_where_jax_lacks, u

from sbp.signatures import Row
from sbp.signatures.laws.oracle import Oracle, combine, parts
from sbp.signatures.rule import names
from sbp.types import MONOIDS, Atom, B, P, S

PMAX, PMIN = P("max"), P("min")


def unary(row_in: Atom, row_out: Atom, *functions: str):
    return [
        (name, getattr(lax, name), (f(9, low=1, high=12),), Row((row_in,), (row_out,)))
        for name in functions
    ]


NONLINEAR = names(
    "abs exp square sqrt rsqrt log tanh logistic sin cos floor ceil round sign erf exp2 expm1 log1p"
    " cbrt"
)


_BYTES = (i(2, 5, dtype=np.int8), i(5, 3, dtype=np.int8))


WRONG = [
    # 1: nonlinear functions and orders of a partial sum; one rule of Shardy lets abs through, one
    # of OneFlow isfinite and isnan
    *unary(P, P, *NONLINEAR),
    (
        "is_finite",
        lax.is_finite,
        (np.array([1, np.nan, 2, 3], np.float32),),
        Row((PMAX,), (P("and"),)),
    ),
    ("ne", lambda x: x != x, (f(9),), Row((P, P), (P("or"),))),
    *[
        (name, getattr(lax, name), (f(9), f(9, seed=1)), Row((P, P), (o,)))
        for name in ("lt", "ge", "eq")
        for o in (B, P("or"), P("and"))
    ],
    ("sort", lambda x: lax.sort(x), (f(9),), Row((P,), (P,))),
    ("max", lambda x: jnp.maximum(x, 0), (f(9),), Row((P, B), (P,))),
    ("top_k", lambda x: lax.top_k(x, 2), (f(9),), Row((P,), (P, P))),
    ("argmax", lambda x: lax.argmax(x, 0, np.int32), (f(9),), Row((P,), (P,))),
    ("argmax", lambda x: lax.argmax(x, 0, np.int32), (f(9),), Row((P,), (B,))),
    # 2: a broadcast term is added once for each part; also a literal
    ("add", lax.add, (f(9), f(9, seed=1)), Row((P, B), (P,))),
    ("add", lambda x: x + 1.5, (f(9),), Row((P, B), (P,))),
    ("add", lax.add, (f(9), f(9, seed=1)), Row((B, P), (P,))),
    ("sub", lax.sub, (f(9), f(9, seed=1)), Row((B, P), (P,))),
    ("sub", lambda x: 1.5 - x, (f(9),), Row((B, P), (P,))),
    (
        "scatter-add",
        lambda x, k, y: x.at[k].add(y),
        (f(9), i(3, low=0), f(3, seed=2)),
        Row((B, B, P), (P,)),
    ),
    (
        "scatter-add",
        lambda x, k, y: x.at[k].add(y),
        (f(9), i(3, low=0), f(3, seed=2)),
        Row((B, S(0), S(0)), (P,)),
    ),
    # 3: a product of two partial sums, also of a value with itself
    ("mul", lax.mul, (f(9), f(9, seed=1)), Row((P, P), (P,))),
    ("mul", lambda x: x * x, (f(9),), Row((P, P), (P,))),
    ("dot_general", lambda x, y: x @ y, (f(3, 5), f(5, 3)), Row((P, P), (P,))),
    ("dot_general", lambda x: x @ x, (f(3, 3),), Row((P, P), (P,))),
    ("integer_pow", lambda x: lax.integer_pow(x, 3), (f(9),), Row((P,), (P,))),
    # 4: only numerators, and only of true divisions
    ("div", lax.div, (i(9, low=1, high=99), i(9, low=2, high=5)), Row((P, B), (P,))),
    # A lucky sample is no proof: these integers divide, and so may their parts.
    (
        "div",
        lax.div,
        (np.array([12, 24], np.int32), np.array([6, 6], np.int32)),
        Row((P, B), (P,)),
    ),
    ("div", lax.div, (f(9, low=1), f(9, low=1, seed=1)), Row((B, P), (P,))),
    ("div", lax.div, (f(9, low=1), f(9, low=1, seed=1)), Row((P, P), (P,))),
    ("rem", lax.rem, (i(9, low=1, high=99), i(9, low=2, high=5)), Row((P, B), (P,))),
    ("pow", lax.pow, (f(9, low=1), f(9, low=1, seed=1)), Row((P, B), (P,))),
    ("integer_pow", lambda x: lax.integer_pow(x, -1), (f(9, low=1),), Row((P,), (P,))),
    (
        "shift_right_arithmetic",
        lambda x: lax.shift_right_arithmetic(x, np.int32(1)),
        (i(9),),
        Row((P, B), (P,)),
    ),
    # 5: maxima: signs, sums of maxima, functions that do not rise everywhere, integers that wrap
    ("mul", lax.mul, (f(9), f(9, seed=1)), Row((PMAX, B), (PMAX,))),
    ("mul", lax.mul, (f(9), f(9, seed=1)), Row((PMAX, PMAX), (PMAX,))),
    ("add", lax.add, (f(9), f(9, seed=1)), Row((PMAX, PMAX), (PMAX,))),
    ("add", lax.add, (f(9), f(9, seed=1)), Row((PMAX, P), (PMAX,))),
    (
        "add",
        lax.add,
        (i(9, low=2**31 - 9, high=2**31, dtype=np.int64), i(9, low=1)),
        Row((PMAX, B), (PMAX,)),
    ),
    ("neg", lax.neg, (f(9),), Row((PMAX,), (PMAX,))),
    ("sub", lax.sub, (f(9), f(9, seed=1)), Row((B, PMAX), (PMAX,))),
    *unary(PMAX, PMAX, "abs", "square", "cos", "log", "sqrt", "log1p", "erfc"),
    ("erf_inv", lax.erf_inv, (f(9, low=-3, high=4),), Row((PMAX,), (PMAX,))),
    ("reduce_sum", lambda x: jnp.sum(x, 0), (f(5, 3),), Row((PMAX,), (PMAX,))),
    ("min", lax.min, (f(9), f(9, seed=1)), Row((PMAX, PMAX), (PMAX,))),
    ("gt", lax.gt, (np.array([np.nan] * 6, np.float32), f(6)), Row((PMAX, B), (P("or"),))),
    (
        "convert_element_type",
        lambda x: x.astype(np.int32),
        (np.array([np.nan] * 9, np.float32),),
        Row((PMAX,), (PMAX,)),
    ),
    # 6, 18: an order along the split dim needs its neighbours
    ("reduce_max", lambda x: jnp.max(x, 0), (f(5, 3),), Row((P,), (PMAX,))),
    ("reduce_max", lambda x: jnp.max(x, 0), (f(5, 3),), Row((P,), (P,))),
    ("reduce_max", lambda x: jnp.max(x, 0), (f(6, 3),), Row((S(0),), (P,))),
    ("reduce_sum", lambda x: jnp.sum(x, 0), (f(6, 3),), Row((S(0),), (B,))),
    ("argmax", lambda x: lax.argmax(x, 0, np.int32), (f(6),), Row((S(0),), (P,))),
    ("cummax", lambda x: lax.cummax(x), (f(6),), Row((P,), (P,))),
    # 7: a mean of means; here 5 rows over 2 devices
    ("div", lambda x: x / 5, (f(9),), Row((B, B), (P,))),
    # 9: casts
    ("convert_element_type", lambda x: x.astype(np.int32), (f(9),), Row((P,), (P,))),
    (
        "convert_element_type",
        lambda x: x.astype(np.bool_),
        (np.zeros(9, np.float32),),
        Row((P,), (P("or"),)),
    ),
    ("convert_element_type", lambda x: x.astype(np.float32), (i(9),), Row((P,), (P,))),
    ("convert_element_type", lambda x: x.astype(np.int32), (i(9, dtype=np.int8),), Row((P,), (P,))),
    ("convert_element_type", lambda x: x.astype(jnp.float8_e4m3fn), (f(9),), Row((PMAX,), (PMAX,))),
    (
        "dot_general",
        lambda x, y: lax.dot(x, y, preferred_element_type=np.int32),
        _BYTES,
        Row((P, B), (P,)),
    ),
    ("dot_general", lax.dot, (b(3, 6), b(6, 3)), Row((S(1), S(0)), (P("and"),))),
    # 16: padding enters a reduction, unless the kernel masks it; a pad value is added once for each
    # part
    ("pad", lambda x: lax.pad(x, np.float32(1), [(1, 1, 0)]), (f(5),), Row((P, B), (P,))),
    # 17: the inner dim of a group, an extent that does not divide
    ("reshape", lambda x: x.reshape(4, 3), (f(12),), Row((S(0),), (S(1),))),
    ("reshape", lambda x: x.reshape(12), (f(4, 3),), Row((S(1),), (S(0),))),
    # 19: a lookup in a split table is no local lookup; an index is an observation
    (
        "gather",
        lambda x, k: x.at[k].get(mode="clip"),
        (f(6, 2), i(4, low=0, high=6)),
        Row((S(0), B), (B,)),
    ),
    (
        "gather",
        lambda x, k: x.at[k].get(mode="clip"),
        (f(6, 2), i(4, low=0, high=6)),
        Row((B, P), (P,)),
    ),
    (
        "gather",
        lambda x, k: x.at[k].get(mode="fill", fill_value=1.0, wrap_negative_indices=False),
        (f(6), i(9, low=-3)),
        Row((P, B), (P,)),
    ),
    (
        "dynamic_slice",
        lambda x, k: lax.dynamic_slice(x, (k,), (2,)),
        (f(6), np.int32(2)),
        Row((B, P), (P,)),
    ),
    (
        "scatter",
        lambda x, k, y: x.at[k].set(y),
        (f(6), i(3, low=0, high=6), f(3)),
        Row((B, B, P), (P,)),
    ),
    (
        "scatter-max",
        lambda x, k, y: x.at[k].max(y),
        (f(6), i(3, low=0, high=6), f(3)),
        Row((P, B, P), (P,)),
    ),
    # 22: a predicate is an observation; a branch that is not partial is added once for each part
    (
        "select_n",
        lambda p, x, y: lax.select_n(p, x, y),
        (i(9, low=0, high=2), f(9), f(9, seed=1)),
        Row((P, P, P), (P,)),
    ),
    (
        "select_n",
        lambda p, x, y: lax.select_n(p, x, y),
        (b(9), f(9), f(9, seed=1)),
        Row((P("or"), P, P), (P,)),
    ),
    (
        "select_n",
        lambda p, x, y: lax.select_n(p, x, y),
        (b(9), f(9), f(9, seed=1)),
        Row((B, P, B), (P,)),
    ),
    (
        "select_n",
        lambda p, x, y: lax.select_n(p, x, y),
        (b(9), f(9), f(9, seed=1)),
        Row((B, PMAX, PMIN), (PMAX,)),
    ),
    # 8, 20: products and squares of reductions
    ("square", lax.square, (f(9),), Row((P,), (P,))),
    ("abs", lax.abs, (c(9),), Row((P,), (P,))),
    (
        "bitcast_convert_type",
        lambda x: lax.bitcast_convert_type(x, np.int32),
        (f(9),),
        Row((P,), (P,)),
    ),
    ("xor", lax.bitwise_xor, (i(9), i(9, seed=1)), Row((P("or"), P("or")), (P("or"),))),
    ("not", lax.bitwise_not, (i(9),), Row((P,), (P,))),
    # 15: the same key on every shard draws the same numbers
    ("iota", lambda: lax.iota(np.int32, 6), (), Row((), (P,))),
]


@pytest.mark.parametrize(
    ("name", "fn", "args", "row"), WRONG, ids=[f"{w[0]} {w[3]} {k}" for k, w in enumerate(WRONG)]
)
def test_wrong_rows_are_refuted_and_absent(name, fn, args, row):
    eqn = equation(name, fn, args)
    oracle = Oracle(eqn.op, eqn.primitive, eqn.args)
    # Run as the row with the same operands runs: what it computes is right, what the wrong row says
    # of it is not.
    kernels = {
        n: next((r.kernel for r in rows(eqn, n) if r.ins == row.ins), "local") for n in (2, 3)
    }
    tried = [Row(row.ins, row.outs, kernel) for kernel in kernels.values()]
    assert any(
        oracle.refute_row(r, n, np.random.default_rng(seed))
        for r, n in zip(tried, kernels, strict=True)
        for seed in range(5)
    )
    assert not any((r.ins, r.outs) == (row.ins, row.outs) for n in (2, 3) for r in rows(eqn, n))


@pytest.mark.parametrize(("sample", "n", "splits"), [(0, 4, True), (1, 4, False)])
def test_scaled_products_split_between_blocks(sample: int, n: int, splits: bool):
    """A contracted dim of 8 elements, in four blocks or in two."""
    (eqn,) = equations("scaled_dot", [SAMPLES["scaled_dot"][sample]])
    assert any(S(2) in row.ins for row in rows(eqn, n)) == splits


def test_a_narrowing_cast_of_a_partial_sum_is_absent():
    """Within the tolerance of the narrow dtype it may pass the oracle: it is refused for its
    precision, not for its law."""
    for fn, x in (
        (lambda x: x.astype(jnp.bfloat16), f(9)),
        (lambda x: x.astype(jnp.float16), f(9).astype(jnp.bfloat16)),
    ):
        assert not any(P in r.ins for r in rows(equation("convert_element_type", fn, (x,)), 2))
    assert not any(
        P in r.ins
        for r in rows(
            equation("reduce_precision", lambda x: lax.reduce_precision(x, 5, 4), (f(9),)), 2
        )
    )


TAKE_SUMS = names(
    "add add_any broadcast_in_dim complex concatenate conj conv_general_dilated"
    " convert_element_type copy cumsum device_put div dot_general dynamic_slice"
    " dynamic_update_slice fft"
    " gather imag join_slices mul name neg optimization_barrier ormqr pad ragged_dot_general real"
    " reduce_sum reduce_window_sum reshape rev scatter scatter-add scatter-mul scatter-sub"
    " select_and_gather_add select_and_scatter_add select_n shift_left slice sort split squeeze"
    " stack stop_gradient sub symmetric_product tie tile transpose triangular_solve"
    " tridiagonal_solve unstack xla_metadata_value"
)
"""Primitives with a row that takes partial sums; in `sort` they are values beside the keys."""


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_partial_sums_are_denied_by_default(name: str):
    """A primitive that is not listed takes no partial sum, on any sample."""
    skip_where_jax_lacks(name)
    taking = any(P in row.ins for eqn in equations(name, SAMPLES[name]) for row in rows(eqn, 2))
    assert taking == (name in TAKE_SUMS)


# ---- parts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("atom", [B, S(0), S(1), *(P(m) for m in MONOIDS)], ids=repr)
def test_parts_stand_for_their_value(atom: Atom, n: int):
    rng = np.random.default_rng(n)
    values = (
        [i(5, 3), u(5, 3), b(5, 3)]
        if getattr(atom, "monoid", "") in ("and", "or")
        else [f(5, 3, low=1), i(5, 3), c(5, 3)]
    )
    for x in values:
        if atom in (PMAX, PMIN) and np.iscomplexobj(x):
            continue
        split = parts(x, atom, n, rng)
        assert len(split) == n and all(p.dtype == x.dtype for p in split)
        for reader in range(n):
            np.testing.assert_allclose(combine(split, atom, x.shape, reader), x, atol=1e-4)


def test_parts_are_adversarial():
    """Not halves, not all of one sign, not within the range of the value; padding is not zero."""
    x = f(40, 3)
    split = parts(x, P, 3, np.random.default_rng(0))
    assert (
        any((p == 0).any() for p in split)
        and max(np.abs(p).max() for p in split) > 2 * np.abs(x).max()
    )
    assert (np.sign(split[0]) * np.sign(split[1]) < 0).any()
    assert np.isnan(parts(x, S(0), 7, np.random.default_rng(1))[-1]).any()
    assert np.isneginf(parts(x, PMAX, 2, np.random.default_rng(0))[0]).any()


def test_masking_is_what_makes_uneven_shards_right():
    """The primitive itself on padded shards is refuted: the oracle sees padding."""
    eqn = equation("reduce_sum", lambda x: jnp.sum(x, 0), (f(5, 3),))
    row = Row((S(0),), (P,))
    assert row in rows(eqn, 2) and not Oracle(eqn.op, eqn.primitive, eqn.args).refute_row(
        row, 2, np.random.default_rng(0)
    )
    split = parts(eqn.args[0], S(0), 2, np.random.default_rng(0))
    assert not np.allclose(sum(p.sum(0) for p in split), eqn.args[0].sum(0), equal_nan=False)
