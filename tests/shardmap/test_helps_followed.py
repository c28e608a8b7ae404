"""Every help is followed to the word: the source that comes of it computes what is meant, and the
checker has nothing against it.

Where a help leaves it open whether a value is a share of a sum or a mean, one of the two has to be
right.
"""

import dataclasses
import inspect
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import sbp
from tests.shardmap import faulty, test_subtle, wrong
from tests.shardmap.follow_help import followed, module
from tests.shardmap.pair import Pair, mesh

SUBTLE = {name: pair for name, pair in test_subtle.PAIRS.items() if name not in wrong.PAIRS}


def shapes(program):
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), program.args)


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
    got = jax.jit(built)(*args)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if g.shape != w.shape or not all(
            np.allclose(s.data, w[s.index], rtol=2e-3, atol=2e-4) for s in g.addressable_shards
        ):
            return False
    return True


def respecified(program, specs):
    """The program with what a help says of its out_specs."""
    field = "wrong_outs" if isinstance(program, Pair) and program.wrong_outs is not None else "outs"
    out = getattr(program, field)
    for result, axis, dim in specs:
        one = out[result] if type(out) is tuple else out
        entries = [
            tuple(
                a for a in ((e,) if isinstance(e, str) else e or ()) if dim is not None or a != axis
            )
            for e in one
        ]
        if dim is not None:
            entries += [()] * (dim + 1 - len(entries))
            entries[dim] += (axis,)
        one = PartitionSpec(*(e or None for e in entries))
        out = (
            tuple(one if i == result else o for i, o in enumerate(out))
            if type(out) is tuple
            else one
        )
    return dataclasses.replace(program, **{field: out})


def check_helps(where, name, check_vma, tmp_path):
    """Follows all helps of a program, each of which sees to all that is wrong with it; the number
    of them."""
    table = "PAIRS" if hasattr(where, "PAIRS") else "PROGRAMS"
    try:
        _, found = errors(getattr(where, table)[name], check_vma)
    except ValueError:  # replication that JAX cannot infer
        pytest.skip("JAX refuses the program with check_vma")
    helps = {h.text: h for d in found for h in d.helps}.values()
    for k, help_ in enumerate(helps):
        outcomes = []
        for j, (source, specs) in enumerate(followed(help_.text, inspect.getsource(where))):
            made = module(source, tmp_path / f"followed_{k}_{j}.py")
            program = respecified(getattr(made, table)[name], specs)
            built, left = errors(program, check_vma)
            outcomes.append((not left, is_right(built, program.args, reference(where, name))))
        assert (True, True) in outcomes if len(outcomes) > 1 else outcomes == [(True, True)], (
            help_.text,
            outcomes,
        )
    return len(helps)


CASES = [(name, vma) for name, program in faulty.PROGRAMS.items() for vma in program.vma]


@pytest.mark.parametrize(("name", "check_vma"), CASES)
def test_the_helps_of_a_fault(name, check_vma, tmp_path):
    assert not is_right(
        faulty.PROGRAMS[name].program(check_vma),
        faulty.PROGRAMS[name].args,
        reference(faulty, name),
    )
    count = check_helps(faulty, name, check_vma, tmp_path)
    assert bool(count) == faulty.PROGRAMS[name].helped


@pytest.mark.parametrize(
    ("where", "name"), [*((wrong, n) for n in wrong.PAIRS), *((test_subtle, n) for n in SUBTLE)]
)
def test_the_helps_of_the_wrong_programs(where, name, tmp_path):
    pair = where.PAIRS[name]
    for check_vma in (True, False) if pair.vma is None else (pair.vma,):
        try:
            jax.make_jaxpr(pair.program("wrong", check_vma))(*pair.args)
        except (ValueError, TypeError):
            continue
        check_helps(where, name, check_vma, tmp_path)
