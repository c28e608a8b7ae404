"""Z3's verdict against the chooser's on seeded programs, minimal cores, and the second look at chosen typings."""

from __future__ import annotations

import dataclasses
import random

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh

import sbp
from sbp.errors import SbpInternalError
from sbp.infer.check import Checker, certify, check
from sbp.infer.choose import choose
from sbp.infer.constraints import allowed
from sbp.infer.problem import Demand
from sbp.infer.rows import NdRow
from sbp.infer.space import Policy, from_type
from sbp.mesh import MeshSpec, mesh_spec
from sbp.trace.build import trace
from sbp.trace.graph import Graph
from sbp.types import parse

F32 = jnp.float32
MESHES = {"8": AbstractMesh((8,), ("x",)), "2x4": AbstractMesh((2, 4), ("x", "y"))}
POLICIES: tuple[Policy, ...] = ("auto", "reduce", "explicit")


def shape(*dims, dtype=F32):
    return jax.ShapeDtypeStruct(dims, dtype)


def traced(fn, args, mesh, in_types=None, out_types=None) -> tuple[Graph, MeshSpec, Demand]:
    """A program with the demands of type texts; None is free."""
    spec = mesh_spec(mesh)
    graph, _ = trace(fn, args, [f"arg{i}" for i in range(len(args))])

    def codes(texts, count):
        return tuple(None if t is None else from_type(parse(t), spec) for t in texts or (None,) * count)

    return graph, spec, Demand(inputs=codes(in_types, len(graph.inputs)), outputs=codes(out_types, len(graph.outputs)))


# ---- the verdicts agree ----------------------------------------------------------------------------------------------------------------


def pinned(rng: random.Random, x, axes):
    """`x` under a random annotation that its shape allows."""
    axis = rng.choice(axes)
    match rng.choice(["split", "split", "split", "replicate", "partial"]):
        case "split" if x.ndim:
            return sbp.split(x, rng.randrange(x.ndim), axis)
        case "partial":
            return sbp.partial(x, axis)
        case _:
            return sbp.replicate(x, axis)


def grow(rng: random.Random, x, y, axes):
    """A random program on two matrices: the operators that keep, contract, reduce and refuse."""
    values = [x, y]
    for _ in range(rng.randrange(2, 6)):
        a, b = rng.choice(values), rng.choice(values)
        match rng.choice(["dot", "dot", "add", "mul", "tanh", "transpose", "sum", "pin", "reshape", "scan", "cond", "while"]):
            case "dot" if a.ndim == b.ndim == 2 and a.shape[1] == b.shape[0]:
                values.append(a @ b)
            case "add" if a.shape == b.shape:
                values.append(a + b)
            case "mul" if a.shape == b.shape:
                values.append(a * b)
            case "tanh":
                values.append(jnp.tanh(a))
            case "transpose":
                values.append(a.T)
            case "sum" if a.ndim:
                values.append(a.sum(rng.randrange(a.ndim)))
            case "reshape" if a.ndim == 2:
                values.append(a.reshape(2, a.shape[0] // 2, a.shape[1]))
            case "scan" if a.ndim == 2:
                twist = rng.random() < 0.5
                c = values[-1].sum()

                def body(carry, row, twist=twist, inner=rng.random() < 0.5):
                    row = sbp.split(row, 0, axes[-1]) if inner else row
                    return (carry + (row.sum() if twist else 1.0)), jnp.sin(row)

                carry, rows = jax.lax.scan(body, c, a)
                values += [carry, rows]
            case "cond":
                values.append(jax.lax.cond(b.sum() > 0, lambda v: v + v, lambda v: v * 2, a))
            case "while" if a.ndim == 2 and a.shape[0] == a.shape[1]:
                values.append(jax.lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] @ s[1].T), (0, a))[1])
            case _:
                values.append(pinned(rng, a, axes))
    return tuple(values[2:])


@pytest.mark.parametrize("mesh", sorted(MESHES))
@pytest.mark.parametrize("policy", POLICIES)
def test_verdict_is_the_choosers(policy, mesh):
    outcomes = {"sat": 0, "unsat": 0}
    axes = MESHES[mesh].axis_names
    for seed in range(60):
        rng = random.Random(f"{seed} {mesh}")
        size = rng.choice([8, 16])
        atoms = ["B", "S(0)", "S(1)"]
        types = [rng.choice([None, " ".join(f"{a}:{rng.choice(atoms)}" for a in axes)]) for _ in range(2)]
        graph, spec, demand = traced(lambda x, y, rng=rng: grow(rng, x, y, axes), [shape(size, size)] * 2, MESHES[mesh], types)
        found = check(graph, spec, demand, policy)
        typing = choose(graph, spec, demand, boxing=policy)
        assert (found.status == "sat") == (typing is not None), (seed, found)
        outcomes[found.status] += 1
        if typing is not None:
            certify(typing, demand)
    assert outcomes["sat"] >= 10
    assert (outcomes["unsat"] >= 5) == (policy != "auto")
