"""A seeded slice of the fuzzer, and its own tests: determinism, coverage, printing, and that it
finds and minimises a fault."""

import math
from dataclasses import replace

import jax
import numpy as np
import pytest

from sbp.signatures import rule as rules
from sbp.signatures.rule import Row, names
from sbp.types import Split
from tests.fuzz.generate import ALL, NAMES, generate, generated
from tests.fuzz.minimise import minimise
from tests.fuzz.oracle import judge
from tests.fuzz.program import Program, all_steps, arguments, file_source, function_source, load
from tests.fuzz.worker import in_the_same_way
from tests.slices import sliced

pytestmark = pytest.mark.laws

COVERAGE = 250
MESHES = ((2,), (8,), (2, 4), (4, 2), (2, 2, 2))

PRIMITIVES = names("""
    abs add and argmax argmin bitcast_convert_type broadcast_in_dim ceil cholesky clamp concatenate
    cond conv_general_dilated convert_element_type cos cumlogsumexp cummax cummin cumprod cumsum
    custom_jvp_call custom_vjp_call div dot_general dynamic_slice dynamic_update_slice eq erf exp
    fft floor gather ge gt imag integer_pow iota is_finite le log log1p logistic lt max min mul ne
    neg not optimization_barrier or pad pow ragged_dot_general random_bits random_fold_in
    random_split random_unwrap random_wrap real reduce reduce_and reduce_max reduce_min reduce_or
    reduce_precision reduce_prod reduce_sum reduce_window reduce_window_max reduce_window_sum
    reduce_xor rem reshape rev round rsqrt sbp_annotate scan scatter scatter-add scatter-max
    scatter-min scatter-mul select_n shift_left shift_right_logical sign sin slice sort split sqrt
    square squeeze sub tan tanh top_k transpose triangular_solve while xor
""")


@pytest.mark.parametrize("seed", sliced(range(1000, 1024), 1 / 3))
def test_equals_one_device(seed: int):
    program = generate(seed, mesh=MESHES[seed % len(MESHES)])
    outcome = judge(program)
    assert not outcome.failed, f"{outcome.verdict}: {outcome.detail}\n{file_source(program)}"


Many = list[tuple[Program, frozenset[str]]]


@pytest.fixture(scope="module")
def many() -> Many:
    return [generated(seed) for seed in range(COVERAGE)]


def test_every_operation_is_used(many: Many):
    used = {step.op for program, _ in many for step in all_steps(program.steps)}
    rare = {op.name for op in ALL if op.weight < 0.5}
    unused = ({op.name for op in ALL} | set(NAMES)) - used - rare
    assert not unused, sorted(unused)


def test_primitives_appear(many: Many):
    missing = set(PRIMITIVES) - set().union(*(primitives for _, primitives in many))
    assert not missing, sorted(missing)


def test_settings_vary(many: Many):
    programs = [program for program, _ in many]
    assert {p.boxing for p in programs} == {"auto", "reduce", "explicit"}
    assert {len(p.mesh) for p in programs} == {1, 2, 3}
    for what in (
        lambda p: p.gradients,
        lambda p: p.donate,
        lambda p: "padded_of" in str(p.arrivals()),
        lambda p: any(":?" in (v.type or "") for v in p.inputs),
        lambda p: any(":P" in (o.type or "") for o in p.outputs),
        lambda p: any(0 in v.info.shape for v in p.inputs),
    ):
        assert any(what(p) for p in programs)


def test_a_seed_is_a_program():
    for seed in (0, 1, 2):
        assert generate(seed) == generate(seed)
        assert file_source(generate(seed)) == file_source(generate(seed))


def test_what_is_printed_runs():
    """A printed file stands alone: arguments, function and comparison."""
    for seed in (3, 4, 5):
        program = generate(seed, policy="auto", mesh=(2,))
        program = replace(program, inputs=tuple(replace(v, type=None) for v in program.inputs))
        assert judge(program).verdict == "same"
        printed = load(
            file_source(program).replace(
                "sbp.jit(program, mesh", "(lambda f, *_, **__: jax.jit(f))(program, mesh"
            ),
            "printed",
        )
        want = jax.jit(load(function_source(program), "function")["program"])(*arguments(program))
        for a, b in zip(jax.tree.leaves(printed["want"]), jax.tree.leaves(want), strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_a_wrong_rule_is_found_and_minimised(monkeypatch: pytest.MonkeyPatch):
    """A cumulative sum that is said to need nothing of other devices: its rule splits every dim."""
    everywhere = lambda op: [Row((Split(d),), (Split(d),)) for d in range(len(op.ins[0].shape))]
    wrong = replace(rules._RULES["cumsum"], rows=everywhere, local=None)
    monkeypatch.setitem(rules._RULES, "cumsum", wrong)
    for seed in range(400):
        program = generate(seed, policy="auto", mesh=(2,))
        if (
            "cumsum" in function_source(program)
            and (outcome := judge(program)).verdict == "mismatch"
        ):
            break
    else:
        raise AssertionError("no program shows it")
    small = minimise(program, in_the_same_way(outcome), seconds=math.inf)
    source = function_source(small)
    assert "cumsum" in source and len(source.splitlines()) <= 6, source
    assert judge(small).verdict == "mismatch" and f"# seed {small.seed}" in file_source(small)
