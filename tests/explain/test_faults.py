"""Diagnostics, told by programs that carry their expectations as comments on the line."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest

import sbp
from sbp.explain.change import DiagnosisLimits
from sbp.explain.faults import explain
from sbp.infer.request import Demand, Request
from sbp.machine.mesh import mesh_spec
from sbp.trace.build import trace
from tests.explain.expected import MESH, MESH_2D, SQUARE, diagnose, rows, shape


def test_two_pinned_operands_that_do_not_meet():
    def expert_mlp(x, w_in):
        w_in = sbp.split(w_in, 1, "tensor")  # and: w_in is S(1) on `tensor`, not contracted
        x = sbp.split(x, 1, "tensor")  # and: x is S(1) on `tensor`, the contracted dim
        h = x @ w_in  # error: no-signature: `x @ w_in` has no SBP signature on mesh axis `tensor`
        return h

    (d,) = diagnose(expert_mlp, shape(8192, 1024), SQUARE)
    assert d.primary is not None
    assert d.primary.text == "x is S(1), w_in is S(1): they cannot meet here"
    assert d.primary.span.end_column - d.primary.span.column == len("x @ w_in")
    assert d.scope == "expert_mlp, forward"
    assert d.rule == "dot_general on one mesh axis (x, w_in -> h)"
    assert set(rows(d)) == {"B S(1) -> S(1): w_in fits, x does not", "S(1) S(0) -> P(sum): x fits, w_in does not"}
    assert d.notes == (
        'boxing is "explicit", so no operand may be resharded here',
        "not shown: 5 more changes that give a typing",
    )
    texts = [re.sub(r"line \d+", "line N", h.text) for h in d.helps]
    assert texts[0] == 'sbp.replicate(x, "tensor") before line N; h becomes S(1)'
    assert texts[1] == "replicate x on `tensor` at line N; h becomes S(1)"


def test_the_quoted_price_is_that_of_the_repaired_program():
    def broken(x, w):
        x = sbp.split(x, 1, "tensor")  # and: x is S(1)
        w = sbp.split(w, 1, "tensor")  # and: w is S(1)
        return x @ w  # error: no-signature: `x @ w` has no SBP signature

    def repaired(x, w):
        x = sbp.split(x, 1, "tensor")
        w = sbp.split(w, 1, "tensor")
        x = sbp.replicate(x, "tensor")
        return x @ w

    types = ("tensor:S(1)", "tensor:S(1)")
    (d,) = diagnose(broken, shape(256, 1024), SQUARE, in_types=types)
    (help_,) = [h for h in d.helps if h.text.startswith('sbp.replicate(x, "tensor") before line')]
    plan = sbp.jit(repaired, MESH, in_types=types, boxing="explicit").plan(shape(256, 1024), SQUARE)
    assert help_.bytes_per_device == plan.cost.bytes_per_device == 7 / 8 * 256 * 1024 * 4
    assert help_.text.endswith("becomes S(1)")


def test_tensor_parallel_with_the_second_weight_split_the_wrong_way():
    def ffn(x, w1, w2):
        w1 = sbp.split(w1, 1, "tensor")  # and: w1 is S(1)
        w2 = sbp.split(w2, 1, "tensor")  # and: w2 is S(1) on `tensor`, not contracted
        h = jax.nn.gelu(x @ w1)
        return h @ w2  # error: no-signature: `h @ w2` has no SBP signature on mesh axis `tensor`

    (d,) = diagnose(ffn, SQUARE, SQUARE, SQUARE)
    assert d.primary is not None
    assert d.primary.text == "h is S(1), w2 is S(1): they cannot meet here"
    assert any(n.startswith("the pinned types flow here through line") for n in d.notes)


def test_megatron_has_a_typing():
    def ffn(x, w1, w2):
        return jax.nn.gelu(x @ sbp.split(w1, 1, "tensor")) @ sbp.split(w2, 0, "tensor")

    assert diagnose(ffn, SQUARE, SQUARE, SQUARE) == ()


def test_partial_into_a_nonlinear_operator():
    def program(x):
        x = sbp.partial(x, "tensor")  # and: x is P(sum) on `tensor`
        y = x * 2.0
        return jnp.tanh(y)  # error: no-signature: `jnp.tanh(y)` has no SBP signature on mesh axis `tensor`

    (d,) = diagnose(program, SQUARE)
    assert d.primary is not None
    assert d.primary.text == "y is P(sum) here, which tanh does not take; reduce it first"
    assert any('sbp.replicate(y, "tensor") before line' in h.text for h in d.helps)


def test_pins_that_conflict_through_a_chain_under_reduce():
    def program(x, z):
        u = jnp.tanh(sbp.split(x, 0, "tensor"))  # and: x is S(0) on `tensor`: dim 0 of 1024x1024
        v = jnp.exp(sbp.split(z, 1, "tensor"))  # and: z is S(1) on `tensor`: dim 1 of 1024x1024
        return u + v  # error: annotation-conflict: x as S(0) and z as S(1) cannot meet in `u + v` on mesh axis `tensor`

    (d,) = diagnose(program, SQUARE, SQUARE, boxing="reduce")
    assert 'boxing is "reduce", so only partial values may be converted here' in d.notes
    assert diagnose_ok(program, SQUARE, SQUARE, boxing="auto")


def diagnose_ok(fn, *args, **options) -> bool:
    return all(d.severity != "error" for d in sbp.jit(fn, MESH, **options).check(*args).diagnostics)


def test_two_independent_faults_are_both_told():
    def program(x, y, w):
        x = sbp.split(x, 0, "tensor")  # and: x is S(0)
        y = sbp.split(y, 1, "tensor")  # and: y is S(1)
        a = x + y  # error: no-signature: `x + y` has no SBP signature
        w = sbp.partial(w, "tensor")  # and: w is P(sum)
        return a, jnp.sin(w)  # error: no-signature: `jnp.sin(w)` has no SBP signature

    first, second = diagnose(program, SQUARE, SQUARE, SQUARE)
    assert first.primary is not None and second.primary is not None
    assert first.primary.span.line < second.primary.span.line
    assert "the prices of helps assume that all other errors are mended" in first.notes


def test_two_causes_on_two_axes_are_two_faults():
    def program(x, w):
        x = sbp.split(x, 1, "tensor")  # and: x is S(1) on `tensor`
        w = sbp.split(w, 0, "data")  # and: w is S(0) on `data`
        return jnp.tanh(x @ w)  # error: no-signature: has no SBP signature on mesh axis `data`

    found = sbp.jit(program, MESH_2D, boxing="explicit").check(SQUARE, SQUARE).diagnostics
    texts = [[h.text.split(" at ")[0] for h in d.helps] for d in found]
    assert texts[0][0].endswith("split w on dim 1") and texts[1][0].endswith("split x on dim 0")


def test_one_cause_on_two_axes_is_one_fault():
    def program(x, y):
        x = sbp.split(x, 0, "data", "tensor")  # and: x is S(0) on `data`
        y = sbp.split(y, 1, "data", "tensor")  # and: y is S(1) on `data`
        return x + y  # error: no-signature: `x + y` has no SBP signature on mesh axis `data`

    (d,) = sbp.jit(program, MESH_2D, boxing="explicit").check(SQUARE, SQUARE).diagnostics
    assert [re.sub(r"line \d+.*", "line N", h.text) for h in d.helps][:2] == [
        'drop `sbp.split(x, 0, "data", "tensor")` at line N',
        'drop `sbp.split(y, 1, "data", "tensor")` at line N',
    ]


def test_fault_inside_a_scan_body():
    def program(x, ws):
        def body(c, w):
            w = sbp.split(w, 0, "tensor")  # and: w is S(0)
            return c + w, None  # error: no-signature: `c + w` has no SBP signature

        return jax.lax.scan(body, sbp.split(x, 1, "tensor"), ws)[0]  # and: x is S(1)

    (d,) = diagnose(program, SQUARE, shape(3, 1024, 1024))
    assert d.scope == "body, forward"
    assert d.primary is not None
    assert d.primary.text == "c is S(1), w is S(0): they cannot meet here"


def test_carry_that_cannot_keep_its_type():
    def program(x, ws):
        def body(c, w):
            return (c @ w).T, None

        x = sbp.split(x, 0, "tensor")  # and: x is S(0)
        return jax.lax.scan(body, x, ws)[0]  # error: no-signature: carry 0 of `jax.lax.scan(body, x, ws)` cannot keep one type

    (d,) = diagnose(program, SQUARE, shape(3, 1024, 1024))
    assert d.primary is not None
    assert d.primary.text == "carry 0 is S(1), but S(0) is kept here"


def test_predicate_from_split_values():
    def program(x):
        x = sbp.split(x, 0, "tensor")  # and: x is S(0)
        return jax.lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x)  # error: no-signature: `x.sum() > 0` has no SBP signature

    (d,) = diagnose(program, SQUARE)
    assert any(h.text.startswith('boxing="reduce"') for h in d.helps)


def test_fault_in_a_gradient_names_the_forward_line():
    def program(x, w):
        def loss(w):
            h = sbp.annotate(
                x @ w,  # error: no-signature: the gradient of `x @ w` has no SBP signature on mesh axis `tensor`
                cotangent="tensor:P(sum)",
            )
            return (h * h).sum()

        return jax.grad(loss)(w)

    found = sbp.jit(program, MESH, in_types=("tensor:S(0)", "tensor:B"), boxing="explicit").check(SQUARE, SQUARE).diagnostics
    (d,) = found
    assert d.primary is not None
    line = program.__code__.co_firstlineno + 3
    assert (d.primary.span.line, d.scope) == (line, f"the gradient of line {line}")
    assert d.title == "the gradient of `x @ w` has no SBP signature on mesh axis `tensor`"
    (pin,) = [label for label in d.labels if not label.primary]
    assert pin.text == "the cotangent of h is P(sum) on `tensor`"
    assert d.notes[0].startswith("input x is pinned S(0) on `tensor` by in_types")


def test_pinned_inputs_have_no_line_but_a_note_and_a_help():
    def program(x, w):
        return x @ w  # error: no-signature: `x @ w` has no SBP signature

    (d,) = diagnose(program, SQUARE, SQUARE, in_types=("tensor:S(0)", "tensor:S(1)"))
    assert [n.split(" is ")[0] for n in d.notes[:2]] == ["input x", "input w"]
    assert any(h.text.startswith("replicate x on `tensor` in in_types") for h in d.helps)


def test_one_line_in_unrolled_layers_is_one_fault():
    def program(x, w):
        for _ in range(3):
            y = sbp.split(x, 1, "tensor") @ w  # and: x is S(1)
            x = jnp.tanh(y)  # error: no-signature: `jnp.tanh(y)` has no SBP signature
        return x

    diagnose(program, SQUARE, SQUARE)


def test_axes_that_only_together_have_no_typing():
    def program(x, y):
        return x + y  # error: no-typing: the program has no typing on the mesh axes `data`, `tensor` together # and: y is pinned

    types = ("data:S(1) tensor:S(1)", "data:B tensor:S(1)")
    (d,) = diagnose(program, shape(8, 8), shape(8, 8), in_types=types, mesh=MESH_2D)
    assert [label.text for label in d.labels] == ["x is pinned data:S(1) tensor:S(1)", "y is pinned data:B tensor:S(1)"]


def test_an_input_that_cannot_be_held_so():
    spec = mesh_spec(MESH)
    graph, _ = trace(lambda x: x + 1, [shape(6, 4)], ["x"])
    (d,) = explain(Request(graph=graph, mesh=spec, demand=Demand(inputs=((1,),), outputs=(None,)), boxing="explicit"))
    assert (d.code, d.title) == ("no-typing", "x cannot be S(0) on mesh axis `tensor`")
    assert d.notes == ("8 devices do not divide dim 0 of size 6; at the boundary JAX holds even dims only",)


def test_a_limit_of_the_checker_is_its_own_code():
    graph, _ = trace(lambda x: jnp.tanh(sbp.partial(x, "tensor")), [SQUARE], ["x"])
    request = Request(graph=graph, mesh=mesh_spec(MESH), demand=Demand(inputs=(None,), outputs=(None,)), boxing="explicit")
    (d,) = explain(request, limits=DiagnosisLimits(solver_resources=1))
    assert d.code == "solver-limit"


def test_two_pins_on_one_line_have_helps_that_can_be_told_apart():
    def program(x):
        return sbp.split(x, 0, "tensor") + sbp.split(x, 1, "tensor")

    def alike(x):
        return jnp.sin(sbp.split(x, 0, "tensor")) @ jnp.cos(sbp.split(x, 0, "tensor").T).T.T

    for fn in (program, alike):
        (d,) = sbp.jit(fn, MESH, boxing="explicit").check(SQUARE).diagnostics
        assert d.helps
        assert len({h.text for h in d.helps}) == len(d.helps), d.text()
    (d,) = sbp.jit(program, MESH, boxing="explicit").check(SQUARE).diagnostics
    assert d.helps[0].text.startswith('split x on dim 1 at line')


@pytest.mark.parametrize(("size", "unit", "scale"), [(8, "B", 1), (256, "KiB", 2**10), (4096, "MiB", 2**20)])
def test_bytes_are_told_in_the_unit_that_fits(size, unit, scale):
    def program(x, w):
        x = sbp.split(x, 1, "tensor")
        return jnp.tanh(x) @ sbp.split(w, 1, "tensor")

    (d,) = sbp.jit(program, MESH, boxing="reduce", in_types=("tensor:S(1)", None)).check(shape(size, size), shape(size, size)).diagnostics
    dear = d.helps[-1].bytes_per_device
    assert dear > 0
    assert d.text().endswith(f"({dear / scale:.1f} {unit} per device)")


def test_diagnostics_repeat():
    def program(x, y):
        return sbp.split(x, 0, "tensor") + sbp.split(y, 1, "tensor")

    first, second = (sbp.jit(program, MESH, boxing="explicit").check(SQUARE, SQUARE).diagnostics for _ in range(2))
    assert first == second
