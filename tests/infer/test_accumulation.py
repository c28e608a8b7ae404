"""Which values are summed in float32 where an annotation asks for it: the values whose parts may
reach the annotation, in barriers, loops and branches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import sbp
from sbp.infer.accumulation import float32_sums
from sbp.infer.flow import flow_of
from sbp.trace.build import trace
from sbp.trace.graph import Node

LINEAR = ("add", "dot_general", "transpose")


def carried(node: Node) -> Iterator[int]:
    """All operands of the linear operators of these programs."""
    yield from range(len(node.inputs) if node.op in LINEAR else 0)


def chosen(program: Callable[..., Any]) -> str:
    """The products of a program that are summed in float32, by number."""
    args = [jax.ShapeDtypeStruct((8, 8), jnp.bfloat16)] * 2
    graph, _ = trace(program, args)
    found = float32_sums(flow_of(graph), None, carried)
    products = [n.outputs[0] for n in graph.walk() if n.op == "dot_general"]
    return "".join(str(k) for k, value in enumerate(products) if value in found)


def wide(x: Any) -> Any:
    return sbp.annotate(x, "B", reduce_dtype=jnp.float32)


def barrier(x: Any, w: Any) -> Any:
    a, b = lax.optimization_barrier((x @ w, w @ x))
    return a, wide(b)


def twice(x: Any, w: Any) -> Any:
    a, b = lax.optimization_barrier((x @ w, w @ x))
    b, a = lax.optimization_barrier((b.T, a))
    return a, wide(b)


def initial_carry(x: Any, w: Any) -> Any:
    carry, _ = lax.scan(lambda c, _: (jnp.tanh(c), None), x @ w, None, length=3)
    return wide(carry), w @ x


def returned_carry(x: Any, w: Any) -> Any:
    carry, stacked = lax.scan(lambda c, r: (c + c @ w, r @ w), x, jnp.stack([x, w]))
    return wide(carry), stacked


def stacked(x: Any, w: Any) -> Any:
    carry, stacked = lax.scan(lambda c, r: (c + c @ w, r @ w), x, jnp.stack([x, w]))
    return carry, wide(stacked)


def loop(x: Any, w: Any) -> Any:
    """A while loop that hands its carries on crosswise."""
    a, b, _ = lax.while_loop(
        lambda s: s[2] < 3, lambda s: (s[1], jnp.tanh(s[0]), s[2] + 1), (x @ w, w @ x, 0)
    )
    return wide(a), b


def branches(x: Any, w: Any) -> Any:
    chosen = lax.cond(x[0, 0] > 0, lambda a: a @ w, lambda a: a.T, x)
    return wide(chosen + x @ x), w @ w


@pytest.mark.parametrize(
    ("program", "want"),
    [
        (barrier, "1"),
        (twice, "1"),
        (initial_carry, "0"),
        (returned_carry, "0"),
        (stacked, "1"),
        (loop, "01"),
        (branches, "01"),
    ],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_products_whose_parts_reach_the_annotation(program: Callable[..., Any], want: str):
    assert chosen(program) == want


def test_a_barrier_leaves_the_sums_of_its_other_operands_native():
    mesh = jax.sharding.AbstractMesh((4,), ("x",))
    args = [jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)] * 2
    plan = sbp.jit(barrier, mesh, ("x:S(1)", "x:S(0)"), hardware="tpu-v5e").plan(*args)
    assert len(plan.program.typing.float32) == 2  # the operand of the annotation, and its product
