"""Theorems about indices: all are proved, each claim is refuted without its premises, and each
kernel names its theorem."""

from __future__ import annotations

import itertools

import pytest
import z3
from samples import SAMPLES, equation, primitives

from sbp.signatures import Op, known_kernels
from sbp.signatures.laws.proofs import (
    INDEX_THEOREMS,
    OF_KERNEL,
    index_theorem,
    neutral_padding,
    one_holder,
    one_reader,
    own_update,
    ragged_shard,
    row_status,
    status,
    window_products,
)
from sbp.signatures.laws.theorems import Theorem, decide
from sbp.types import MONOIDS

STATED = [(name, n) for name, (_, sizes) in sorted(INDEX_THEOREMS.items()) for n in sizes]


@pytest.mark.parametrize(("name", "n"), STATED, ids=lambda x: str(x))
def test_theorems_hold(name: str, n: int):
    state, _ = INDEX_THEOREMS[name]
    assert decide(state(n)) == "proved"


@pytest.mark.parametrize("monoid", sorted(MONOIDS))
def test_neutral_padding(monoid: str):
    found = neutral_padding(monoid)
    assert decide(found) == "proved"
    assert decide(Theorem((), found.claim)) == "refuted", (
        "the padding's value is what the theorem rests on"
    )


@pytest.mark.parametrize(
    "state",
    [one_holder, one_reader, own_update, ragged_shard, window_products],
    ids=lambda f: f.__name__,
)
def test_no_premise_is_idle_as_a_whole(state):
    """Without its premises each claim is refuted: it says something, and says it of blocks
    alone."""
    assert decide(Theorem((), state(2).claim)) == "refuted"


def test_blocks_too_small_for_the_dim_are_refuted():
    length, chunk = z3.Ints("length chunk")
    found = one_holder(3)
    assert (
        decide(
            Theorem(
                (length >= 1, chunk >= 1, 3 * chunk < length, *found.premises[-2:]), found.claim
            )
        )
        == "refuted"
    )


def test_local_kernels_name_their_theorem():
    """A kernel without collectives is the primitive itself, or rests on a theorem."""
    themselves = {"local", "rounded_parts"}
    assert {k.name for k in known_kernels() if not k.communicates} - themselves <= set(OF_KERNEL)
    assert set(OF_KERNEL) <= {k.name for k in known_kernels()} and set(OF_KERNEL.values()) <= set(
        INDEX_THEOREMS
    )


def on_two(name: str, sample: int) -> Op:
    op = equation(name, *SAMPLES[name][sample]).op
    return Op(op.name, op.params, op.ins, op.outs, 2)


def test_every_row_of_these_is_proved():
    """Elementwise, reducing and contracting: of real dtypes, nothing is left to enumeration
    alone."""
    for name in (
        "add",
        "mul",
        "max",
        "neg",
        "and",
        "not",
        "shift_left",
        "lt",
        "select_n",
        "tanh",
        "reduce_sum",
        "reduce_max",
        "iota",
    ):
        known = status(on_two(name, 0))
        assert set(known.values()) == {"proved"}, {
            row: s for row, s in known.items() if s != "proved"
        }


def test_nothing_is_assumed():
    for name in sorted(set(SAMPLES) & set(primitives())):
        for k in range(min(2, len(SAMPLES[name]))):
            op = on_two(name, k)
            assert "assumed" not in status(op).values(), (name, status(op))


def test_the_theorem_of_a_row_is_that_of_its_kernel():
    (masked,) = (row for row in status(on_two("gather", 0)) if row.kernel == "masked_gather")
    assert (
        index_theorem(on_two("gather", 0), masked) == "one_reader"
        and row_status(on_two("gather", 0), masked) == "proved"
    )
    halo = [row for row in status(on_two("rev", 0)) if row.kernel == "halo"]
    assert halo and all(index_theorem(on_two("rev", 0), row) is None for row in halo)


@pytest.mark.parametrize(("length", "n"), [(7, 3), (5, 4), (1, 2), (8, 2)])
def test_blocks_are_those_of_the_laws(length: int, n: int):
    """The theorem's blocks, counted out: of ceil(length / n), with the last ones padded."""
    chunk = -(-length // n)
    covered = [
        k for d, j in itertools.product(range(n), range(chunk)) if (k := d * chunk + j) < length
    ]
    assert covered == list(range(length))
