"""Diagnostics, told by programs that carry their expectations as comments on the line."""


import re

import jax.numpy as jnp
import pytest

import sbp
from benchmarks.fault_suite import faulty_programs, scored
from sbp.explain.faults import explain
from sbp.infer.request import Demand, Request
from sbp.machine.mesh import mesh_spec
from sbp.trace.build import trace
from tests.explain.expected import MESH, MESH_2D, SQUARE, shape


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
















def test_an_input_that_cannot_be_held_so():
    spec = mesh_spec(MESH)
    graph, _ = trace(lambda x: x + 1, [shape(6, 4)], ["x"])
    (d,) = explain(Request(graph=graph, mesh=spec, demand=Demand(inputs=((1,),), outputs=(None,)), boxing="explicit"))
    assert (d.code, d.title, d.notes) == (
        "no-typing",
        "x cannot be S(0) on mesh axis `tensor`",
        ("8 devices do not divide dim 0 of size 6; JAX needs equal shards of inputs and outputs, so pad the dim",),
    )




def test_two_pins_on_one_line_have_helps_that_can_be_told_apart():
    program = lambda x: sbp.split(x, 0, "tensor") + sbp.split(x, 1, "tensor")
    alike = lambda x: jnp.sin(sbp.split(x, 0, "tensor")) @ jnp.cos(sbp.split(x, 0, "tensor").T).T.T

    for fn in (program, alike):
        (d,) = sbp.jit(fn, MESH, boxing="explicit").check(SQUARE).diagnostics
        assert 0 < len({h.text for h in d.helps}) == len(d.helps), d.text()
    (d,) = sbp.jit(program, MESH, boxing="explicit").check(SQUARE).diagnostics
    assert d.helps[0].text.startswith('split x on dim 1 at line')


# ---- fault programs ------------------------------------------------------------------------------
# Some of the faulty programs are explained; `python -m benchmarks.fault_suite` scores all of
# them.


SAMPLE = (
    *("accumulate_budget", "clip_contrast", "custom_vjp_backward", "gpt_mlp", "llama_patterns"),
    *("pattern_key", "scan_stacked", "ssm_cumulative", "take_along", "while_power"),
    *("fsdp_master", "grouped_decode", "manual_gate", "manual_in_types", "residual_layers"),
    *("stage_buffer", "symbolic_heads", "symbolic_names"),
)
EXPECTED = {
    # JAX raises its own error.
    "symbolic_names": (False, False, False, False),
    # The error has no constraint as a help.
    "symbolic_heads": (True, False, False, False),
    # Another pin is dearer, and is judged first.
    "stage_buffer": (True, False, True, False),
    # The first help gives another typing than the one that was meant.
    "take_along": (True, True, True, False),
    # The annotation costs 9 us, below the 10 us from which one is named.
    "while_power": (False, False, False, False),
}
"""Whether a fault is flagged, with the right core, with a first help that works, that restores what
was meant, for programs of which not all is so."""


@pytest.mark.parametrize("name", SAMPLE)
def test_a_fault_is_explained(name):
    (program,) = (p for p in faulty_programs() if p.name == name)
    score = scored(program)
    expected = EXPECTED.get(name, (True, True, True, True))
    assert (score.flagged, score.core, score.works, score.restores) == expected, score
