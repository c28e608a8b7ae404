"""Every help is followed by its edits: the source that comes of it computes what is meant, and the
checker has nothing against it."""

import dataclasses
import inspect
from typing import Any

import jax
import numpy as np
import pytest

import sbp
from tests.shardmap.follow_help import followed, module, respecified
from tests.shardmap.programs.collection import FAULTY, PAIRED
from tests.shardmap.programs.kinds import Pair, mesh
from tests.shardmap.programs.wrong import subtle
from tests.shardmap.test_wrong import shapes


def errors(program, check_vma):
    built = (
        program.program("wrong", check_vma)
        if isinstance(program, Pair)
        else program.program(check_vma)
    )
    return built, [
        d
        for d in sbp.check_shard_map(built, *shapes(program), mesh=mesh()).diagnostics
        if d.code != "not-analysed"
    ]


def reference(where: Any, name: str):
    program = where.PAIRS[name] if hasattr(where, "PAIRS") else where.PROGRAMS[name]
    return jax.tree.map(np.asarray, jax.jit(program.reference)(*program.args))


def is_right(built, args, want):
    """Whether each device has what it should."""
    for g, w in zip(jax.tree.leaves(jax.jit(built)(*args)), jax.tree.leaves(want), strict=True):
        if g.shape != w.shape or not all(
            np.allclose(s.data, w[s.index], rtol=2e-3, atol=2e-4) for s in g.addressable_shards
        ):
            return False
    return True


def specified(program, options):
    """The program with what a help changes about its out_specs."""
    field = "wrong_outs" if isinstance(program, Pair) and program.wrong_outs is not None else "outs"
    return dataclasses.replace(program, **{field: respecified(getattr(program, field), options)})


def check_helps(where, name, check_vma, tmp_path):
    """Follows all helps of a program, each of which sees to all that is wrong with it; the number
    of them."""
    table = "PAIRS" if hasattr(where, "PAIRS") else "PROGRAMS"
    try:
        _, found = errors(getattr(where, table)[name], check_vma)
    except ValueError:  # replication that JAX cannot infer
        pytest.skip("JAX refuses the program with check_vma")
    helps = [h for d in found for h in d.helps]
    for k, help_ in enumerate(helps):
        source, options = followed(help_, inspect.getsource(where))
        made = module(source, tmp_path / f"followed_{k}.py")
        program = specified(getattr(made, table)[name], options)
        built, left = errors(program, check_vma)
        assert not left, help_.text
        assert is_right(built, program.args, reference(where, name)), help_.text
    return len(helps)


CASES = [
    (where, name, vma)
    for where in FAULTY
    for name, program in where.PROGRAMS.items()
    for vma in program.vma
]


@pytest.mark.parametrize(("where", "name", "check_vma"), CASES)
def test_the_helps_of_a_fault(where, name, check_vma, tmp_path):
    program = where.PROGRAMS[name]
    assert not is_right(program.program(check_vma), program.args, reference(where, name))
    assert bool(check_helps(where, name, check_vma, tmp_path)) == program.helped


@pytest.mark.parametrize(
    ("where", "name"),
    [(where, name) for where in (*PAIRED, subtle) for name in where.PAIRS],
)
def test_the_helps_of_the_wrong_programs(where, name, tmp_path):
    pair = where.PAIRS[name]
    for check_vma in (True, False) if pair.vma is None else (pair.vma,):
        try:
            jax.make_jaxpr(pair.program("wrong", check_vma))(*pair.args)
        except (ValueError, TypeError):
            continue
        check_helps(where, name, check_vma, tmp_path)
