"""The test makes only the edits of each help. The edited source computes what the plain function
computes, and the checker reports nothing about it."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from sbp.errors import OptionEdit
from sbp.handwritten.arguments import trace_program
from sbp.handwritten.check import Helper, diagnostic
from sbp.handwritten.faults import find_faults
from sbp.handwritten.one_device import compared_runs
from sbp.handwritten.repairs import GraphEdit, edit_program
from sbp.machine.mesh import mesh_spec
from sbp.trace.build import trace
from tests.edits import edited_text, run_source, split_edits
from tests.shardmap.programs.collection import FAULTY, PAIRED
from tests.shardmap.programs.kinds import is_right, mesh, shapes
from tests.shardmap.programs.wrong import products, subtle


def respecified(specs, options: list[OptionEdit]):
    """The out_specs of a program after edits of them; one spec stands for all results."""
    for edit in options:
        assert (edit.option, edit.function) == ("out_specs", "jax.shard_map")
        if type(specs) is tuple:
            specs = tuple(edit.value if i == edit.position else s for i, s in enumerate(specs))
        else:
            assert edit.position == 0
            specs = edit.value
    return specs


def errors(built, args):
    """What sbp says of a program, but for what it cannot analyse."""
    found = sbp.check_shard_map(built, *shapes(args), mesh=mesh()).diagnostics
    return [d for d in found if d.code != "not-analysed"]


reference = lambda program: jax.tree.map(np.asarray, jax.jit(program.reference)(*program.args))


def check_helps(where, name, check_vma):
    """Makes the edits of each help of a program, and checks that no fault is left. Returns the
    number of helps."""
    table = "PAIRS" if hasattr(where, "PAIRS") else "PROGRAMS"
    wrong = getattr(where, table)[name]
    try:
        found = errors(wrong.program(check_vma), wrong.args)
    except ValueError:  # replication that JAX cannot infer
        pytest.skip("JAX refuses the program with check_vma")
    helps = [h for d in found for h in d.helps]
    for k, help_ in enumerate(helps):
        edits, options = split_edits(help_.edits)
        source = edited_text(inspect.getsource(where), edits)
        made = run_source(source, f"<followed {k}>", {"__name__": where.__name__})
        program = made[table][name]
        field = "outs" if getattr(program, "wrong_outs", None) is None else "wrong_outs"
        outs = respecified(getattr(program, field), options)
        built = dataclasses.replace(program, **{field: outs}).program(check_vma)
        assert not errors(built, program.args), help_.text
        assert is_right(built, program.args, reference(wrong)), help_.text
    return len(helps)


CASES = [
    (where, name, vma)
    for where in FAULTY
    for name, program in where.PROGRAMS.items()
    for vma in program.vma
]


@pytest.mark.parametrize(("where", "name", "check_vma"), CASES)
def test_the_helps_of_a_fault(where, name, check_vma):
    program = where.PROGRAMS[name]
    assert not is_right(program.program(check_vma), program.args, reference(program))
    assert bool(check_helps(where, name, check_vma)) == program.helped


@pytest.mark.parametrize(
    ("where", "name"),
    [(where, name) for where in (*PAIRED, subtle) for name in where.PAIRS],
)
def test_the_helps_of_the_wrong_programs(where, name):
    pair = where.PAIRS[name]
    for check_vma in (True, False) if pair.vma is None else (pair.vma,):
        try:
            jax.make_jaxpr(pair.program(check_vma))(*pair.args)
        except (ValueError, TypeError):
            continue
        check_helps(where, name, check_vma)


@pytest.mark.parametrize("name", ["bias_before", "tanh_before", "partial_as_split"])
def test_repairs_that_are_not_tried_are_said(name):
    pair, spec = products.PAIRS[name], mesh_spec(mesh())
    args, fn = shapes(pair.args), pair.program(False)
    again = lambda f: trace_program(f, args, mesh())
    compared = compared_runs(again(fn), fn, again, args, spec).compare_all()
    (finding,), _ = find_faults(compared)
    for tried, said in ((1, True), (24, False)):
        notes = diagnostic(finding, spec, Helper(compared, tried=tried).helps(finding)).notes
        assert ("sbp did not try every repair" in notes) == said, (tried, notes)


def test_operations_of_an_edited_program_have_ids_of_their_own():
    """The next edit names operations by their ids."""
    graph, _ = trace(lambda x: jnp.sin(x) + jnp.cos(x), [jax.ShapeDtypeStruct((4,), jnp.float32)])
    halves = GraphEdit("", divide={node.id: 2 for node in graph.nodes})
    ids = [node.id for node in edit_program(graph, halves, mesh_spec(mesh())).nodes]
    assert len(set(ids)) == len(ids) == 6
