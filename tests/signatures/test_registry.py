"""The registry: every primitive that JAX has loaded has a rule or a reason, and every rule has
samples and traits. The checks find a rule that was entered twice, a rule without samples, a row
that does not hold, and a law without a proof."""

import re
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_laws
import test_proofs
from samples import SAMPLES, equations, f, primitives, rows, rule_of

import sbp
from sbp import _jax
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
from sbp.signatures.factors import monoid_rows, rows_beside
from sbp.signatures.rule import _RULES, FALLBACK, REFUSED, add_kernel, names, remove_rule, rule
from sbp.sizes.scope import Size, holds_at
from sbp.types import B, P, S

PMAX = P("max")


def test_every_rule_has_a_sample_with_a_row():
    """A sample that shows all-B alone tries nothing: where a rule has no more, it says why."""
    assert not without_rows()


# ---- each refusal fires -------------------------------------------------------------------------


def ruled(name: str, rows: Callable[[Op], Sequence[Row]], reason: str = "") -> Rule:
    """A rule that may stand in the place of that of a primitive."""
    return Rule(
        name=name,
        rows=lambda op: (all_b(op), *rows(op)),
        traits=traits_of(name),
        reason=reason,
    )


@pytest.mark.parametrize(
    ("enter", "said"),
    [
        (lambda: add_rule(rule_of("neg")), "two rules for primitive 'neg'"),
        (lambda: rule("neg", traits=Traits())(lambda op: []), "two rules for primitive 'neg'"),
        (lambda: add_kernel(Kernel(name="local", summary="another")), "two kernels named 'local'"),
    ],
    ids=["a rule twice", "another rule", "a kernel twice"],
)
def test_wrong_entries_are_refused_at_import(enter: Callable[[], object], said: str):
    before = known_primitives(), known_kernels(), rule_for("neg")
    with pytest.raises(sbp.SbpInternalError, match=said):
        enter()
    assert (known_primitives(), known_kernels(), rule_for("neg")) == before


def test_a_rule_whose_samples_show_no_row_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(SAMPLES, "neg", [(jax.lax.neg, (np.float32(1),))])
    unseen = ruled("neg", lambda op: [Row((S(0),), (S(0),))] if op.ins[0].shape else [])
    monkeypatch.setitem(_RULES, "neg", unseen)
    assert without_rows() == ["neg"]
    monkeypatch.setitem(_RULES, "neg", ruled("neg", lambda op: [], reason="for this test"))
    assert without_rows() == []


HOLDS, PROVED = test_laws.test_rows_hold, test_proofs.test_no_theorem_of_a_row_is_refuted
FAULTY: dict[str, tuple[dict[str, Any], str, Any, Callable[[str], object], str | None]] = {
    "no sample": (
        _RULES,
        "unheard_of",
        ruled("unheard_of", lambda op: []),
        lambda _: test_laws.test_every_rule_has_samples_and_every_sample_a_rule(),
        "unheard_of",
    ),
    "without the row that always holds": (
        _RULES,
        "neg",
        Rule(name="neg", rows=lambda op: (Row((S(0),), (S(0),)),), traits=Traits()),
        HOLDS,
        None,
    ),
    "a sample of another primitive": (
        SAMPLES,
        "neg",
        [(jax.lax.sin, (f(5),))],
        HOLDS,
        "neg is not in",
    ),
    **{
        f"{name} {row}, {check.__name__}": (
            _RULES,
            name,
            ruled(name, lambda op, row=row: [row]),
            check,
            rf"(?s){name}\b.*{re.escape(str(row))} {said}",
        )
        for check, name, row, said in (
            (HOLDS, "neg", Row((PMAX,), (PMAX,)), "on . devices: result 0 .*instead of"),
            (HOLDS, "neg", Row((B,), (P,)), "on . devices: result 0 .*instead of"),
            (HOLDS, "transpose", Row((S(0),), (S(0),)), "on . devices: .*the types say"),
            (HOLDS, "mul", Row((P, P), (P,)), "on . devices: result 0 .*instead of"),
            (PROVED, "neg", Row((PMAX,), (PMAX,)), "is not proved: p0 = .*, q0 = "),
            (
                PROVED,
                "mul",
                Row((P, P), (P,)),
                "is not proved: p0 = .*, p1 = .*, q0 = .*, q1 = ",
            ),
            (PROVED, "add", Row((P, B), (P,)), "is not proved: .*b1 = "),
            (PROVED, "floor", Row((P,), (P,)), "is not proved: p0 = .*, q0 = "),
        )
    },
}
"""A table with a faulty entry, the test that finds it, and what that test says."""


@pytest.mark.parametrize(("table", "name", "entry", "check", "said"), FAULTY.values(), ids=FAULTY)
def test_a_faulty_entry_is_found(
    monkeypatch: pytest.MonkeyPatch,
    table: dict[str, Any],
    name: str,
    entry: Any,
    check: Callable[[str], object],
    said: str | None,
):
    monkeypatch.setitem(table, name, entry)
    with pytest.raises(AssertionError, match=said):
        check(name)


# ---- doubts --------------------------------------------------------------------------------------


ONE_MATRIX = frozenset({"cholesky_update"})
"""Primitives of a family that splits batch dims, for which JAX has no batch dims."""


def without_rows() -> list[str]:
    """Primitives for which no sample shows a row other than all-B, though the rule gives no reason
    for that."""
    found: list[str] = []
    for name in sorted((SAMPLES.keys() & primitives().keys()) - ONE_MATRIX):
        rule = rule_of(name)
        every = (r for e in equations(name, SAMPLES[name]) for n in (2, 3, 4) for r in rows(e, n))
        if not rule.reason and all(set((*row.ins, *row.outs)) == {B} for row in every):
            found.append(name)
    return found


# ---- coverage ------------------------------------------------------------------------------------


LISTING = """
import gc
import jax, jax.numpy, jax.nn, jax.random, jax.lax.linalg
import jax.scipy.linalg, jax.scipy.signal, jax.scipy.special, jax.scipy.stats
import jax.ad_checkpoint, jax.custom_derivatives, jax.dtypes, jax.export, jax.flatten_util
import jax.image, jax.ops, jax.sharding, jax.tree_util
import sbp
from sbp import _jax
print(*sorted({p.name for p in gc.get_objects() if isinstance(p, _jax.Primitive)}))
"""


def test_every_primitive_has_a_rule_or_a_reason():
    """A process of its own counts them, since other tests load more primitives here."""
    loaded = set(
        subprocess.run(
            [sys.executable, "-c", LISTING], capture_output=True, text=True, check=True
        ).stdout.split()
    )
    assert len(loaded) > 200
    missing = loaded - set(known_primitives()) - FALLBACK.keys() - REFUSED.keys()
    assert not missing, sorted(missing)


def test_calls_with_a_body_are_typed_inside():
    """Composites, hand-written batching and solves: the trace puts their bodies in their place,
    which compute the same."""
    doubled = jax.custom_batching.custom_vmap(lambda x: x * 2)
    doubled.def_vmap(lambda size, batched, x: (x * 2, True))
    named = jax.lax.composite(lambda x: x + 1, "my.increment")

    def fn(x: jax.Array) -> tuple[jax.Array, ...]:
        x = sbp.split(x, 0, "x")
        solved = jax.lax.custom_linear_solve(
            lambda v: v * 4, x, lambda matvec, y: y / 4, symmetric=True
        )
        linear = jax.custom_derivatives.linear_call(
            lambda scale, v: v * scale, lambda scale, ct: ct * scale, 3.0, x
        )
        return doubled(x), jax.vmap(doubled)(x), named(x), solved, linear

    x = np.arange(12, dtype=np.float32).reshape(6, 2)
    planned = sbp.jit(fn, jax.make_mesh((2,), ("x",), devices=jax.devices()[:2]))
    for got, want in zip(planned(x), (x * 2, x * 2, x + 1, x / 4, x * 3), strict=True):
        np.testing.assert_array_equal(got, want)
        assert got.sharding.spec[0] == "x"


def test_tables_are_disjoint():
    assert not set(known_primitives()) & FALLBACK.keys()
    assert not REFUSED.keys() & (FALLBACK.keys() | set(known_primitives()))


# ---- traits --------------------------------------------------------------------------------------


ANSWERS: dict[str, tuple[str, Callable[[Traits], object]]] = {
    "moves": (
        """broadcast_in_dim concatenate copy device_put dynamic_slice dynamic_update_slice gather
        join_slices name optimization_barrier pad reshape rev scatter select_and_gather_add slice
        sort split squeeze stack stop_gradient tile transpose unstack xla_metadata_value""",
        lambda t: t.moves,
    ),
    "fused into consumers nearly always": (
        """reshape broadcast_in_dim transpose squeeze iota convert_element_type sbp_annotate
        optimization_barrier bitcast_convert_type""",
        lambda t: t.fusion != "partly",
    ),
    "not stored": (
        "broadcast_in_dim iota convert_element_type reshape squeeze sbp_annotate",
        lambda t: t.fusion == "inlined",
    ),
    "costly to compute again": ("div exp exp2 expm1 log log1p pow", lambda t: t.costly),
    "counts floating-point operations": (
        "dot_general conv_general_dilated pallas_call",
        lambda t: t.flops is not None,
    ),
    "unnamed": (
        "broadcast_in_dim convert_element_type device_put reshape squeeze stop_gradient transpose",
        lambda t: t.unnamed,
    ),
    "fits an operand to its reader": (
        "broadcast_in_dim convert_element_type device_put reshape squeeze copy",
        lambda t: t.adapts,
    ),
    "keeps all elements": (
        """broadcast_in_dim convert_element_type copy device_put name neg reshape reduce_precision
        squeeze stop_gradient transpose xla_metadata_value""",
        lambda t: t.carries,
    ),
    "keeps the values of all elements": (
        """broadcast_in_dim copy device_put name reshape squeeze stop_gradient transpose
        xla_metadata_value""",
        lambda t: t.carries in ("arranged", "copied"),
    ),
    "keeps all elements in their place": (
        """convert_element_type copy device_put name neg reduce_precision stop_gradient
        xla_metadata_value""",
        lambda t: t.carries in ("copied", "rounded", "negated"),
    ),
    "gives all elements another shape": ("reshape", lambda t: t.regroups),
    "degree 1 in all operands together": (
        """abs add add_any broadcast_in_dim concatenate conj convert_element_type copy cummax cummin
        cumsum device_put dynamic_slice dynamic_update_slice gather imag join_slices max min name
        neg optimization_barrier pad real reduce_max reduce_min reduce_precision reduce_sum reshape
        rev scatter scatter-add scatter-sub select_n slice sort split squeeze stack stop_gradient
        sub tie tile top_k transpose unstack xla_metadata_value""",
        lambda t: t.scales == "together",
    ),
    "degree 1 in each of two operands": (
        "conv_general_dilated dot_general mul ragged_dot_general",
        lambda t: t.scales == "each",
    ),
    "ratios": ("div", lambda t: t.scales == "ratio"),
    "powers": ("integer_pow square", lambda t: t.scales == "power"),
    "roots": ("sqrt", lambda t: t.scales == "root"),
    "degree 0": ("is_finite sign", lambda t: t.scales == "never"),
    "degree 0 in both operands together": ("eq ge gt le lt ne", lambda t: t.scales == "compared"),
    "products": ("dot_general mul", lambda t: t.multiplies),
    "whatever the order": (
        "argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_sum sort top_k",
        lambda t: t.orderless,
    ),
    "effects": ("debug_callback debug_print io_callback", lambda t: t.effect),
    "generated by place": (
        "iota iota_2x32_shape random_bits rng_bit_generator rng_uniform random_gamma",
        lambda t: t.generates,
    ),
    "counted by place": (
        "iota iota_2x32_shape random_bits",
        lambda t: t.generates == "counter",
    ),
    "folded": (
        "add add_any div eq exp ge gt is_finite le log lt max min mul ne neg sqrt sub square",
        lambda t: t.numpy is not None,
    ),
    "contractions": (
        "dot_general ragged_dot_general conv_general_dilated scaled_dot",
        lambda t: t.contracts,
    ),
    "linear in one operand": (
        "fft ormqr select_and_scatter_add triangular_solve tridiagonal_solve",
        lambda t: t.linear_map,
    ),
    "elementwise": (
        """
        abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil
        clamp clz complex conj convert_element_type copy cos cosh device_put digamma div eq eq_to
        erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac imag integer_pow
        is_finite le le_to lgamma log log1p log2 logistic lt lt_to max min mul name ne neg nextafter
        not one_minus_square or philox2x32 philox4x32 polygamma polynomial population_count pow real
        reduce_precision regularized_incomplete_beta rem round rsqrt select_n shift_left
        shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient sub tan
        tanh threefry2x32 threefry4x32 tie xor zeta xla_metadata_value""",
        lambda t: t.elementwise,
    ),
}
"""Primitives that have a trait, for each question that the package asks: whole lists, so that a
trait which changes an answer shows here."""

MONOTONE = {
    **dict.fromkeys(
        names(
            "asinh atan cbrt ceil erf exp exp2 expm1 floor logistic reduce_precision round sign"
            " sinh tanh"
        ),
        "+",
    ),
    **dict.fromkeys(names("add add_any max min mulhi nextafter"), "++"),
    **dict.fromkeys(names("clz erfc neg not"), "-"),
    **dict.fromkeys(names("shift_right_arithmetic shift_right_logical"), "+."),
    "clamp": "+++",
    "sub": "+-",
}
REDUCES = {
    name: monoid
    for monoid in ("sum", "max", "min", "prod", "and", "or")
    for name in (f"reduce_{monoid}", f"reduce_window_{monoid}", f"cum{monoid}")
    if name in known_primitives()
}
SCATTERS = {
    "scatter-add": "sum",
    "scatter-sub": "sum",
    "scatter-mul": "prod",
    "scatter-min": "min",
    "scatter-max": "max",
}
EVERY = sorted({*known_primitives(), *FALLBACK, *REFUSED})


@pytest.mark.parametrize("question", ANSWERS)
def test_each_trait_is_that_of_these_primitives(question: str):
    of, asked = ANSWERS[question]
    assert [n for n in EVERY if asked(traits_of(n))] == sorted(names(of))


def test_tables_of_traits():
    tables = {"monotone": MONOTONE, "reduces": REDUCES, "scatters": SCATTERS}
    traits = {n: traits_of(n) for n in EVERY}
    assert tables == {t: {n: x for n in EVERY if (x := getattr(traits[n], t))} for t in tables}
    plain = {n for n in EVERY if traits_of(n).elementwise or traits_of(n).contracts}
    pointwise = plain | REDUCES.keys() | {"broadcast_in_dim", "squeeze", "transpose"}
    assert {n for n in EVERY if traits_of(n).pointwise} == pointwise


def test_indices():
    """Operands that say where; of those with a degree, of which alone it is asked."""
    asked = {n: traits_of(n).indices for n in EVERY if traits_of(n).scales == "together"}
    found = {(n, k) for n, positions in asked.items() for k in range(6) if k in positions}
    assert found == {
        *(("dynamic_slice", k) for k in range(1, 6)),
        *(("dynamic_update_slice", k) for k in range(2, 6)),
        ("gather", 1),
        ("scatter", 1),
        ("scatter-add", 1),
        ("scatter-sub", 1),
        ("select_n", 0),
    }


def test_nothing_is_known_of_others():
    assert traits_of("unheard_of") == Traits() and traits_of("scan") == Traits()


# ---- new primitive -------------------------------------------------------------------------------
# A new primitive is described in one place: its rule with its traits. Typing, costs, memory,
# reports and the check of hand-written programs then know it.


doubled_p = _jax.Primitive("test_doubled")
doubled_p.def_abstract_eval(lambda x: _jax.empty_aval(x.shape, x.dtype))
_jax.mlir.register_lowering(doubled_p, _jax.mlir.lower_fun(lambda x: 2 * x, multiple_results=False))

KNOWN = Traits(elementwise=True, pointwise=True, scales="together", fusion="inlined", unnamed=True)
X = (np.random.default_rng(0).integers(-16, 16, (8, 16)) / 4).astype(np.float32)
W = (np.random.default_rng(1).integers(-16, 16, (16, 8)) / 4).astype(np.float32)


doubled = lambda x: doubled_p.bind(x)


@contextmanager
def with_rule(traits: Traits) -> Iterator[None]:
    """With the one registration."""
    rule("test_doubled", traits=traits)(lambda op: [*rows_beside(op), *monoid_rows(op, "sum")])
    try:
        yield
    finally:
        remove_rule("test_doubled")


@pytest.fixture(scope="module")
def mesh() -> jax.sharding.Mesh:
    return sbp.make_mesh((4,), ("m",))


def test_it_is_typed_runs_and_is_explained(mesh: jax.sharding.Mesh):
    """A partial product passes through it."""
    program = lambda x, w: doubled(sbp.split(x, 1, "m") @ sbp.split(w, 0, "m"))

    def squared(x: jax.Array, w: jax.Array) -> jax.Array:
        h = sbp.split(x, 1, "m") @ w
        return jnp.exp(doubled(h))

    with with_rule(KNOWN):
        planned = sbp.jit(program, mesh, boxing="explicit", out_types=sbp.NdSbp({"m": P}))
        np.testing.assert_allclose(planned(X, W).reduce(), 2 * (X @ W), rtol=1e-6)
        (found,) = sbp.jit(squared, mesh, boxing="explicit").check(X, W).diagnostics
    assert found.title == "`jnp.exp(doubled(h))` has no SBP signature on mesh axis `m`"
    assert any(label.text.startswith("doubled(h) is P(sum) here") for label in found.labels)


def test_costs_and_memory_read_its_traits(mesh: jax.sharding.Mesh):
    """A result that is not stored takes no memory, and less time to move."""
    big = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    found = []
    for fusion in ("partly", "free", "inlined"):
        with with_rule(Traits(fusion=fusion)):
            found.append(sbp.jit(lambda x: (doubled(x) @ x).sum(), mesh).plan(big).cost)
    partly, free, inlined = found
    assert inlined.seconds == free.seconds < partly.seconds
    assert inlined.peak_memory_bytes == free.peak_memory_bytes < partly.peak_memory_bytes


def test_hand_written_programs_run_it_by_its_rule_for_vmap(mesh: jax.sharding.Mesh):
    """It has none, so sbp says that the program is not checked."""

    mapped = jax.shard_map(
        lambda x: jax.lax.pmean(doubled(x.mean()), "m"),
        mesh=mesh,
        in_specs=jax.sharding.PartitionSpec("m"),
        out_specs=jax.sharding.PartitionSpec(),
    )
    with with_rule(Traits()):
        (found,) = sbp.check_shard_map(mapped, X, mesh=mesh).diagnostics
    assert (found.code, found.severity) == ("not-analysed", "warning")
    assert "cannot run it without devices" in found.title


# ---- symbolic rows -------------------------------------------------------------------------------
# Rules that are run on symbolic sizes note every fact that they ask for: wherever the same facts
# hold, they give the same rows_of_shapes.


def rows_of_shapes(op, shapes, n):
    avals = tuple(
        jax.ShapeDtypeStruct(tuple(shape), a.dtype)
        for shape, a in zip(shapes, (*op.ins, *op.outs), strict=True)
    )
    ins, outs = avals[: len(op.ins)], avals[len(op.ins) :]
    return tuple(rule_of(op.name).rows(Op(op.name, op.params, ins, outs, n)))


def shaped(op, sizes):
    rest = iter(sizes)
    return [[next(rest) for _ in a.shape] for a in (*op.ins, *op.outs)]


def beyond(values, rng):
    """Sizes near the given ones; equal ones stay equal, as the program that an equation stands in
    makes them."""
    changed = {
        v: max(0, v * int(rng.choice((1, 1, 2, 4))) + int(rng.choice((-1, 0, 0, 1))))
        for v in sorted(set(values))
    }
    return (
        [changed[v] for v in values]
        if rng.random() < 0.7
        else [v if rng.random() < 0.6 else changed[v] for v in values]
    )


def wants_a_number(size):
    raise AssertionError(f"a rule wants to know {size!r} itself, which holds at one size alone")


@pytest.mark.parametrize("name", sorted(set(SAMPLES) & set(primitives())))
def test_facts_decide_rows(name, monkeypatch):
    monkeypatch.setattr(Size, "_number", wants_a_number)
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    for op in (eqn.op for eqn in equations(name, SAMPLES[name])):
        values = [int(s) for a in (*op.ins, *op.outs) for s in a.shape]
        if not values:
            continue
        names = [f"d{k}" for k in range(len(values))]
        symbols = jax.export.symbolic_shape(", ".join(names))
        for n in (2, 4):
            noted = {}
            found = rows_of_shapes(
                op, shaped(op, [Size(s, v, noted) for s, v in zip(symbols, values, strict=True)]), n
            )
            assert found == rows_of_shapes(op, shaped(op, values), n)
            for other in [beyond(values, rng) for _ in range(20)]:
                if holds_at(tuple(noted), dict(zip(names, other, strict=True))):
                    assert found == rows_of_shapes(op, shaped(op, other), n), (values, other, noted)
