"""Diagnostics, told by programs that carry their expectations as comments on the line."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp

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
        "not shown: 5 more changes that fix this error",
    )
    texts = [re.sub(r"line \d+", "line N", h.text) for h in d.helps]
    assert texts[0] == 'sbp.replicate(x, "tensor") before line N; h becomes S(1)'
    assert texts[1] == "replicate x on `tensor` at line N; h becomes S(1)"






def test_megatron_has_a_typing():
    def ffn(x, w1, w2):
        return jax.nn.gelu(x @ sbp.split(w1, 1, "tensor")) @ sbp.split(w2, 0, "tensor")

    assert diagnose(ffn, SQUARE, SQUARE, SQUARE) == ()










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










def test_pinned_inputs_have_no_line_but_a_note_and_a_help():
    def program(x, w):
        return x @ w  # error: no-signature: `x @ w` has no SBP signature

    (d,) = diagnose(program, SQUARE, SQUARE, in_types=("tensor:S(0)", "tensor:S(1)"))
    assert [n.split(" is ")[0] for n in d.notes[:2]] == ["input x", "input w"]
    assert any(h.text.startswith("replicate x on `tensor` in in_types") for h in d.helps)






def test_an_input_that_cannot_be_held_so():
    spec = mesh_spec(MESH)
    graph, _ = trace(lambda x: x + 1, [shape(6, 4)], ["x"])
    (d,) = explain(Request(graph=graph, mesh=spec, demand=Demand(inputs=((1,),), outputs=(None,)), boxing="explicit"))
    assert (d.code, d.title) == ("no-typing", "x cannot be S(0) on mesh axis `tensor`")
    assert d.notes == (
        "8 devices do not divide dim 0 of size 6; JAX needs equal shards of inputs and outputs, so pad"
        " the dim",
    )


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




def test_diagnostics_repeat():
    def program(x, y):
        return sbp.split(x, 0, "tensor") + sbp.split(y, 1, "tensor")

    first, second = (sbp.jit(program, MESH, boxing="explicit").check(SQUARE, SQUARE).diagnostics for _ in range(2))
    assert first == second
