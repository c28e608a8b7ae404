"""Registered signatures that are wrong are refused with a counterexample, and bad input with an
error."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from registrations import TRIPLE, X, row_sums, row_sums_local, triple, triple_p

import sbp
from sbp.errors import SbpError
from sbp.signatures import Row, register, registered, rule_for, unregister
from sbp.signatures.custom import custom_for, parse_row
from sbp.types import B, P, S


@pytest.fixture(scope="module")
def mesh():
    return sbp.make_mesh((2, 4), ("x", "y"))


# ---- wrong ones ---------------------------------------------------------------------------------


def cube(x):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] ** 3

    return pl.pallas_call(
        kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True, name="cube"
    )(x)


def test_the_counterexample_is_shown(mesh):
    with registered("pallas_call:cube", ["S(0) -> S(0)", "P -> P"], local=lambda ctx, x: cube(x)):
        f = sbp.jit(cube, mesh)
        with pytest.raises(SbpError) as first:
            f.plan(X[0, :5])
        with pytest.raises(SbpError, match=re.escape(first.value.message)):
            f.plan(X[0, :5])
    assert first.value.code == "wrong-signature"
    head, *lines = first.value.message.splitlines()
    assert re.fullmatch(
        r"the signature of 'pallas_call:cube' registered at \S+test_custom_wrong.py:\d+:\d+:"
        r" row .*",
        head,
    )
    assert head.endswith("row `P(sum) -> P(sum)` does not hold on 2 devices")
    numbers = r"\[[-\d. ]+\]"
    patterns = [
        "  operand 0 is #",
        "    device 0 holds #",
        "    device 1 holds #",
        r"  result 0 as P\(sum\): # instead of #",
    ]
    for line, pattern in zip(lines, patterns, strict=True):
        assert re.fullmatch(pattern.replace("#", numbers), line), line
    whole, *parts = (
        np.array(re.findall(r"-?\d+\.?\d*", line.split("[")[1]), float) for line in lines[:3]
    )
    np.testing.assert_allclose(sum(parts), whole)


@pytest.mark.parametrize(
    ("rows", "local", "why"),
    [
        (["S(1) -> S(0)"], None, "gives shapes"),
        (["S(1) -> P"], lambda ctx, x: x.sum(1), "nan"),  # padding enters the sum
        (["S(1) -> B"], row_sums_local, "instead of"),
        (["P(max) -> P(max)"], row_sums_local, "instead of"),
        (["B -> P"], row_sums_local, "instead of"),
        (["S(0) -> S(0)"], lambda ctx, x: x, "instead of"),
        (["S(0) -> S(0)"], lambda ctx, x: x.sum(7), "axis 7 is out of bounds"),
    ],
)
def test_wrong_rows_are_refused(mesh, rows, local, why):
    with registered("custom_partitioning:row_sums", rows, local=local):
        with pytest.raises(SbpError, match=f"does not hold(.|\n)*{why}") as refused:
            sbp.jit(row_sums, mesh).plan(X[:5, :7])
    assert refused.value.code == "wrong-signature"


def test_wrong_under_loops_and_conditions(mesh):
    """Regions are walked too."""
    fn = lambda x: jax.lax.scan(
        lambda c, _: (jax.lax.cond(c.sum() > 0, triple, lambda c: c, c), None), x, None, length=2
    )[0]
    with registered(triple_p, ["B -> P"]), pytest.raises(SbpError, match="does not hold"):
        sbp.jit(fn, mesh).plan(X)


# ---- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("primitive", "options", "code", "message"),
    [
        (
            "trple",
            {},
            "unknown-option",
            r"""no primitive is named 'trple'; did you mean "triple"\?""",
        ),
        ("zzzzzzzzz", {}, "unknown-option", "import first what defines it"),
        (3, {}, "bad-argument", "a signature is for a JAX primitive or its name, got 3"),
        ("pallas_call", {}, "bad-argument", "register 'pallas_call:NAME'"),
        ("custom_partitioning", {}, "bad-argument", "register 'custom_partitioning:NAME'"),
        *[
            (name, {}, "bad-argument", "takes no signature")
            for name in ("scan", "cond", "jit", "remat", "psum", "reshard", "rng_uniform")
        ],
        ("add", {}, "bad-argument", "'add' has a signature already, which sbp gives it"),
        (
            "add",
            {"replace": True},
            "bad-argument",
            "'add' has a signature already, which sbp gives it",
        ),
        ("triple", {"rows": ["S(0)"]}, "type-syntax", "a row is `operand atoms -> result atoms`"),
        ("triple", {"rows": ["S(0) -> Q"]}, "type-syntax", r"'Q' in row 'S\(0\) -> Q' is no atom"),
        ("triple", {"rows": ["? -> B"]}, "type-syntax", "'[?]' in row '[?] -> B' is no atom"),
        ("triple", {"rows": ["S(0) S(1) -> B"]}, "type-syntax", "is no atom"),
        ("triple", {"rows": [("S(0)", "S(0)")]}, "bad-argument", "a row is a `Row` or a text"),
        (
            "triple",
            {"local": 3},
            "bad-argument",
            "takes a function of a LocalContext .* for `local`, got 3",
        ),
        ("triple", {"samples": [triple]}, "bad-argument", "takes a pair of a function and a tuple"),
    ],
)
def test_bad_registrations(primitive, options, code, message):
    with pytest.raises(SbpError, match=message) as refused:
        register(primitive, **options)
    assert refused.value.code == code
    assert custom_for("triple") is None


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("S(0), B -> S(0)", r"row `S\(0\), B -> S\(0\)` has 2 operands, the equation 1"),
        ("S(0) -> S(0), B", "has 2 results, the equation 1"),
        ("S(2) -> S(0)", r"splits dim 2 of operand 0, which is float32\[8,12\]"),
        ("S(0) -> S(2)", "splits dim 2 of result 0"),
        ("P(and) -> B", r"has P\(and\) for operand 0, which is float32\[8,12\]"),
        (Row((B,), (B,), "halo"), "names kernel 'halo'"),
    ],
)
def test_rows_that_do_not_fit_the_equation(mesh, row, message):
    with registered(triple_p, [row]), pytest.raises(SbpError, match=message) as refused:
        sbp.jit(triple, mesh).plan(X)
    assert refused.value.code == "bad-argument"


def test_a_second_registration_is_refused():
    with registered(triple_p, TRIPLE):
        with pytest.raises(
            SbpError,
            match=(
                r"'triple' has a signature already, registered at \S+test_custom_wrong.py:\d+:\d+;"
                r" replace=True"
            ),
        ):
            register("triple", TRIPLE)
        register("triple", [], replace=True)
        custom = custom_for("triple")
        assert custom is not None and custom.rows == ()
    assert rule_for("triple") is None
    with pytest.raises(SbpError, match="no signature was registered for 'triple'"):
        unregister("triple")
    with pytest.raises(SbpError, match="no signature was registered for 'add'"):
        unregister("add")


def test_rows_parse_back():
    for row in (Row((S(1), S(0)), (P,)), Row((), (B,)), Row((P("max"), B), (P("max"), S(3)))):
        assert parse_row(repr(row)) == row


def test_what_only_a_nan_refutes_is_refused():
    """Parts under a maximum lose the place of a NaN that the function would have replaced."""

    def replaced(x):
        def kernel(x_ref, y_ref):
            y_ref[...] = jnp.nan_to_num(x_ref[...])

        return pl.pallas_call(
            kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True, name="replaced"
        )(x)

    with registered("pallas_call:replaced", ["P(max) -> P(max)"], local=lambda ctx, x: replaced(x)):
        with pytest.raises(sbp.SbpError, match="wrong-signature"):
            sbp.jit(
                lambda x: replaced(sbp.split(x, 0, "x").max(0)), sbp.make_mesh((2,), ("x",))
            ).plan(jnp.ones((4, 5)))


def test_a_local_that_raises_is_an_error_of_the_signature():
    def doubled(x):
        def kernel(x_ref, y_ref):
            y_ref[...] = x_ref[...] * 2

        return pl.pallas_call(
            kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True, name="doubled"
        )(x)

    for local, said in (
        (lambda ctx, x: 1 / 0, "ZeroDivisionError"),
        (lambda ctx, x: None, "AttributeError|None|result"),
    ):
        with (
            registered("pallas_call:doubled", ["P -> P"], local=local),
            pytest.raises(sbp.SbpError, match=said),
        ):
            sbp.jit(doubled, sbp.make_mesh((2,), ("x",))).plan(jnp.ones((4, 5)))


@pytest.mark.parametrize("rows", [None, "S(0) -> S(0)", 3])
def test_rows_are_a_list(rows):
    with pytest.raises(sbp.SbpError, match="rows= is a list of rows"):
        register("pallas_call:nothing", rows)
