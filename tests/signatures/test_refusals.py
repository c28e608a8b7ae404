"""The checks of the registry fail where they should: for a rule entered twice, one without samples,
a row that does not hold, a law without proof."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import test_laws
import test_proofs
from doubts import unused_kernels, without_rows, without_samples
from jax import lax
from samples import SAMPLES, f, primitives

from sbp.errors import SbpInternalError
from sbp.signatures import (
    Kernel,
    Op,
    Row,
    Rule,
    Traits,
    add_rule,
    all_b,
    known_kernels,
    known_primitives,
    rule_for,
    traits_of,
)
from sbp.signatures.rule import _KERNELS, _RULES, add_kernel, rule
from sbp.types import B, P, S

PMAX = P("max")


def test_every_rule_has_a_sample_with_a_row():
    """A sample that shows all-B alone tries nothing: where a rule has no more, it says why."""
    assert not without_samples(known_primitives(), SAMPLES)
    assert not without_rows(SAMPLES)


def test_every_kernel_is_tried():
    assert not unused_kernels(SAMPLES)


# ---- each refusal fires -------------------------------------------------------------------------


def entered(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    rows: Callable[[Op], Sequence[Row]],
    reason: str = "",
) -> None:
    """Puts a rule in the place of another for one test."""
    monkeypatch.setitem(
        _RULES,
        name,
        Rule(
            name=name,
            rows=lambda op: (all_b(op), *rows(op)),
            traits=traits_of(name),
            reason=reason,
        ),
    )


def test_a_rule_entered_twice_is_refused_at_import():
    before = rule_for("neg")
    assert before is not None
    with pytest.raises(SbpInternalError, match="two rules for primitive 'neg'"):
        add_rule(before)
    with pytest.raises(SbpInternalError, match="two rules for primitive 'neg'"):
        rule("neg", traits=Traits())(lambda op: [])
    assert rule_for("neg") is before


def test_a_kernel_entered_twice_is_refused_at_import():
    before = known_kernels()
    with pytest.raises(SbpInternalError, match="two kernels named 'local'"):
        add_kernel(Kernel(name="local", summary="another"))
    assert known_kernels() == before


def test_a_rule_without_samples_is_refused(monkeypatch: pytest.MonkeyPatch):
    entered(monkeypatch, "unheard_of", lambda op: [])
    assert without_samples(known_primitives(), SAMPLES) == ["unheard_of"]
    with pytest.raises(AssertionError, match="unheard_of"):
        test_laws.test_every_rule_has_samples_and_every_sample_a_rule()


def test_a_rule_whose_samples_show_no_row_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(SAMPLES, "neg", [(lax.neg, (np.float32(1),))])
    entered(monkeypatch, "neg", lambda op: [Row((S(0),), (S(0),))] if op.ins[0].shape else [])
    assert without_rows(SAMPLES) == ["neg"]
    entered(monkeypatch, "neg", lambda op: [], reason="for this test")
    assert without_rows(SAMPLES) == []


def test_a_kernel_that_no_sample_runs_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(_KERNELS, "idle", Kernel(name="idle", summary="does nothing"))
    assert unused_kernels(SAMPLES) == ["idle"]


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("neg", Row((PMAX,), (PMAX,)), r"P\(max\) -> P\(max\) on . devices: result 0 .*instead of"),
        ("neg", Row((B,), (P,)), r"B -> P\(sum\) on . devices: result 0 .*instead of"),
        ("transpose", Row((S(0),), (S(0),)), r"S\(0\) -> S\(0\) on . devices: .*the types say"),
        (
            "mul",
            Row((P, P), (P,)),
            r"P\(sum\), P\(sum\) -> P\(sum\) on . devices: result 0 .*instead of",
        ),
    ],
)
def test_a_row_that_does_not_hold_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, row: Row, message: str
):
    entered(monkeypatch, name, lambda op: [row])
    with pytest.raises(AssertionError, match=rf"(?s){name} .*{message}"):
        test_laws.test_rows_hold(name)


def test_a_rule_without_the_row_that_always_holds_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(
        _RULES, "neg", Rule(name="neg", rows=lambda op: (Row((S(0),), (S(0),)),), traits=Traits())
    )
    with pytest.raises(AssertionError):
        test_laws.test_rows_hold("neg")


@pytest.mark.parametrize(
    ("name", "row", "values"),
    [
        ("neg", Row((PMAX,), (PMAX,)), r"p0 = .*, q0 = "),
        ("mul", Row((P, P), (P,)), r"p0 = .*, p1 = .*, q0 = .*, q1 = "),
        ("add", Row((P, B), (P,)), r"b1 = .*p0 = .*q0 = |b1 = "),
        ("floor", Row((P,), (P,)), r"p0 = .*, q0 = "),
    ],
)
def test_a_row_whose_proof_fails_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, row: Row, values: str
):
    entered(monkeypatch, name, lambda op: [row])
    with pytest.raises(
        AssertionError,
        match=rf"{name}: {row}".replace("(", r"\(").replace(")", r"\)")
        + f" is not proved: {values}",
    ):
        test_proofs.test_no_theorem_of_a_row_is_refuted(name)


def test_a_sample_of_another_primitive_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(SAMPLES, "neg", [(lax.sin, (f(5),))])
    assert "neg" in primitives()
    with pytest.raises(AssertionError, match="neg is not in"):
        test_laws.test_rows_hold("neg")
