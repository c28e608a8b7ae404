"""Runs a graph on values as it stands: the body of a hand-written region on one device's shards,
where named axes are bound."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from sbp import _jax
from sbp.errors import SbpError
from sbp.trace.graph import Constant, Graph, Node, Operand

Special = Mapping[str, Callable[[Node, Sequence[Any]], list[Any]]]
"""Primitives to run in another way, by name."""

_WITHOUT_MESH = ("sharding", "out_sharding")
"""Parameters that name the mesh of the trace; the shards that an equation runs on have none."""

_UNREDUCED = (
    "unreduced_",
    "all_gather_reduced",
    "preduced",
    "reduced_vary_cast",
    "vary_unreduced_cast",
)


def evaluate(graph: Graph, args: Sequence[Any], special: Special | None = None) -> list[Any]:
    """Runs the equations in order, each on the values of its operands.

    Arguments:
      graph: a body without annotations.
      args: values of its inputs.
      special: primitives to run in another way.

    Raises:
      SbpError: for collectives of JAX's explicit mode, which have no meaning on plain shards.
    """
    env: dict[int, Any] = dict(zip(graph.inputs, args, strict=True))

    def read(operand: Operand) -> Any:
        if not isinstance(operand, Constant):
            return env[operand]
        return (
            operand.value
            if _jax.is_extended(operand.aval.dtype)
            else jnp.asarray(operand.value, operand.aval.dtype)
        )

    for node in graph.nodes:
        with _jax.source_context(node.source_info):
            results = _run(node, [read(o) for o in node.inputs], special or {})
        env.update(zip(node.outputs, results, strict=True))
    return [read(o) for o in graph.outputs]


def _run(node: Node, args: list[Any], special: Special) -> list[Any]:
    if node.op in special:
        return special[node.op](node, args)
    params = node.params

    def body(number: int, values: Sequence[Any]) -> list[Any]:
        return evaluate(node.regions[number], values, special)

    match node.op:
        case "scan":
            c, k = params["num_consts"], params["num_carry"]

            def step(carry: Any, x: Any) -> Any:
                out = body(0, [*args[:c], *carry, *x])
                return tuple(out[:k]), tuple(out[k:])

            options = {name: params[name] for name in ("length", "reverse", "unroll")}
            carry, ys = lax.scan(step, tuple(args[c : c + k]), tuple(args[c + k :]), **options)
            return [*carry, *ys]
        case "while":
            c, b = params["cond_nconsts"], params["body_nconsts"]
            go: Callable[[Any], Any] = lambda carry: body(0, [*args[:c], *carry])[0]  # noqa: E731
            turn: Callable[[Any], Any] = lambda carry: tuple(body(1, [*args[c : c + b], *carry]))  # noqa: E731
            return list(lax.while_loop(go, turn, tuple(args[c + b :])))
        case "cond":
            branches = [
                lambda *values, n=n: tuple(body(n, values)) for n in range(len(node.regions))
            ]
            return list(lax.switch(args[0], branches, *args[1:]))
        case "optimization_barrier":
            return _jax.optimization_barrier(args)
        case "sbp_annotate":
            return args
        case "psum_invariant":
            return [lax.psum(x, params["axes"]) for x in args]
        case "all_gather_invariant":
            return [
                lax.all_gather(
                    x,
                    params["axis_name"],
                    axis=params["all_gather_dimension"],
                    tiled=params["tiled"],
                )
                for x in args
            ]
        case op if op.startswith(_UNREDUCED):
            raise SbpError(
                f"{op}, a collective of JAX's explicit mode, inside a hand-written region; use psum"
                " and all_gather there"
            )
        case _:
            return _jax.bind(
                node.primitive,
                args,
                params | {name: None for name in _WITHOUT_MESH if name in params},
            )
