"""Runs a graph on values: the body of a hand-written region on the shards of one device, inside the
`shard_map` that binds the mesh axes."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sbp import _jax
from sbp.errors import SbpError
from sbp.trace.graph import Constant, Graph, Node, Operand, interface_of

Special = Mapping[str, Callable[[Node, Sequence[Any]], list[Any]]]
"""Functions that replace primitives, by the name of the primitive."""

_WITHOUT_MESH = ("sharding", "out_sharding")
"""Parameters that name the mesh of the trace. They are set to None, because shards have no mesh."""

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
      special: functions that replace primitives.

    Raises:
      SbpError: for collectives of JAX's explicit mode, which have no meaning on plain shards.
    """
    return environment(graph, args, lambda node, ins: run_node(node, ins, special or {}))


def environment(
    graph: Graph, args: Sequence[Any], act: Callable[[Node, list[Any]], list[Any]]
) -> list[Any]:
    """The results of a graph of which a function runs each equation.

    Arguments:
      graph: the graph.
      args: values of its inputs.
      act: takes an equation and the values of its operands, and gives those of its results.
    """
    env: dict[int, Any] = dict(zip(graph.inputs, args, strict=True))

    def read(operand: Operand) -> Any:
        if not isinstance(operand, Constant):
            return env[operand]
        if _jax.is_extended(operand.aval.dtype):
            return operand.value
        value = jnp.asarray(operand.value, operand.aval.dtype)
        return jax.device_put(value, _jax.space_of(True)) if _jax.in_host(operand.aval) else value

    for node in graph.nodes:
        with _jax.source_context(node.source_info):
            results = act(node, [read(o) for o in node.inputs])
        env.update(zip(node.outputs, results, strict=True))
    return [read(o) for o in graph.outputs]


def run_regions(
    node: Node,
    args: Sequence[Any],
    run: Callable[[int, Sequence[Any]], list[Any]],
    scan: Callable[..., Any] = lax.scan,
) -> list[Any]:
    """Runs a scan, while or cond with JAX's own control flow.

    Arguments:
      node: the node.
      args: values of its operands.
      run: runs a region, by number, on the values of its inputs.
      scan: runs a scan; takes the arguments of `lax.scan`.

    Returns:
      The values of the node's results.
    """
    interface = interface_of(node)
    initial = tuple(interface.operands("carry", args))
    match node.op:
        case "scan":

            def step(carry: Any, x: Any) -> Any:
                out = run(0, interface.inputs(0, args, carries=carry, slices=x))
                return tuple(out[: len(initial)]), tuple(out[len(initial) :])

            options = {name: node.params[name] for name in ("length", "reverse", "unroll")}
            carry, ys = scan(step, initial, tuple(interface.operands("slice", args)), **options)
            return [*carry, *ys]
        case "while":
            return list(
                lax.while_loop(
                    lambda carry: run(0, interface.inputs(0, args, carries=carry))[0],
                    lambda carry: tuple(run(1, interface.inputs(1, args, carries=carry))),
                    initial,
                )
            )
        case _:
            branches = [
                lambda *values, n=n: tuple(run(n, values)) for n in range(len(node.regions))
            ]
            (index,) = interface.operands("predicate", args)
            return list(lax.switch(index, branches, *interface.operands("constant", args)))


def run_node(node: Node, args: list[Any], special: Special) -> list[Any]:
    """The results of one equation."""
    if node.op in special:
        return special[node.op](node, args)
    params = node.params
    if node.regions:
        return run_regions(node, args, lambda n, values: evaluate(node.regions[n], values, special))
    match node.op:
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
