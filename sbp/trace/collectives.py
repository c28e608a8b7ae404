"""Hand-written regions: the primitives that name mesh axes, the functions of `jax.lax` that bind
them, and the bytes that they send; and how a graph runs on values."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from sbp import _jax
from sbp.errors import SbpError
from sbp.trace.graph import (
    Constant,
    Graph,
    Node,
    Operand,
    amount,
    interface_of,
    nodes_with_runs,
)

SHARD_MAP = "shard_map"
"""The primitive of `jax.shard_map`."""

AXIS_INDEX = "axis_index"
"""The primitive that gives the index of a device along a mesh axis."""

Collective = Literal[
    "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "permute", "broadcast"
]

KINDS: dict[str, Collective] = {
    "psum": "all_reduce",
    "psum_invariant": "all_reduce",
    "pmax": "all_reduce",
    "pmin": "all_reduce",
    "reduce_scatter": "reduce_scatter",
    "all_gather": "all_gather",
    "all_gather_invariant": "all_gather",
    "all_to_all": "all_to_all",
    "ppermute": "permute",
    "pbroadcast": "broadcast",
}
"""The collectives that `check_shard_map` and `manual` know, each with its kind by its name in
plans."""

SENDING = frozenset({"permute", "all_to_all"})
"""The kinds of collectives whose result comes from other devices."""

REDUCTIONS = {"psum": "sum", "psum_invariant": "sum", "pmax": "max", "pmin": "min"}
"""Collectives that reduce to B, with their monoids."""

SUMS = frozenset(op for op, monoid in REDUCTIONS.items() if monoid == "sum")
"""All-reduces by the sum."""

CALLED = {
    "sum": "psum",
    "max": "pmax",
    "min": "pmin",
    "mean": "pmean",
    "scattered": "psum_scatter",
    "gathered": "all_gather",
}
"""The functions of `jax.lax` that call collectives, by what they do."""

REDUCING_CALLS = frozenset(CALLED[name] for name in ("sum", "max", "min", "mean"))
"""The functions of `CALLED` whose result is B."""


def names_of(node: Node) -> tuple[str, ...]:
    """The mesh axes that a collective names; dims of its operand left out."""
    names = node.params.get("axes", node.params.get("axis_name"))
    return tuple(
        a for a in (names if isinstance(names, tuple | list) else (names,)) if isinstance(a, str)
    )


def mesh_sizes(region: Node) -> dict[str, int]:
    """The sizes of the mesh axes of a `shard_map` node."""
    return {str(name): int(n) for name, n in region.params["mesh"].shape.items()}


# ---- what collectives send ----------------------------------------------------------------------
# The bytes that the collectives of a hand-written region send, counted as those of a plan: by the
# ring optimum, with loop trips.


def handwritten_bytes(graph: Graph, sizes: Mapping[str, int]) -> float:
    """Bytes that one device sends in the collectives of a graph and of the regions in it, times the
    trips of loops.

    Arguments:
      graph: a program, or the body of a region.
      sizes: the sizes of the mesh axes around it; empty for a program.
    """
    return sum(
        handwritten_bytes(node.params["body"], mesh_sizes(node))
        if node.op == SHARD_MAP
        else amount(node, [handwritten_bytes(region, sizes) for region in node.regions])
        + _of_collective(graph, node, sizes)
        for node in graph.nodes
    )


def collective_runs(region: Node) -> Iterator[tuple[Node, int, float]]:
    """The collectives of a `shard_map` node, in program order, with those in loops and branches.

    Yields:
      The collective; how often it runs when the region runs once, or in a branch, when that branch
      is taken; the bytes that one device sends in all these runs.
    """
    body, sizes = region.params["body"], mesh_sizes(region)
    return (
        (node, runs, runs * _of_collective(body, node, sizes))
        for node, runs in nodes_with_runs(body)
        if node.op in KINDS
    )


def _of_collective(graph: Graph, node: Node, sizes: Mapping[str, int]) -> float:
    if node.op not in KINDS:
        return 0.0
    operands = sum(
        math.prod(a.shape) * _jax.itemsize(a.dtype) for a in map(graph.aval, node.inputs)
    )
    groups = node.params.get("axis_index_groups")
    n = len(groups[0]) if groups else math.prod(sizes[a] for a in names_of(node))
    match KINDS[node.op]:
        case "all_reduce":
            return 2 * (n - 1) / n * operands
        case "all_gather":
            return (n - 1) * operands
        case "reduce_scatter" | "all_to_all":
            return (n - 1) / n * operands
        case "permute" | "broadcast":
            return operands if n > 1 else 0.0


# ---- evaluation ---------------------------------------------------------------------------------
# Runs a graph on values: the body of a hand-written region on the shards of one device, inside the
# `shard_map` that binds the mesh axes.


Special = Mapping[str, Callable[[Node, Sequence[Any]], list[Any]]]
"""Functions that replace primitives, by the name of the primitive."""

_WITHOUT_MESH = ("sharding", "out_sharding")
"""Parameters that name the mesh of the trace. They are set to None, because shards have no mesh."""


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
            env.update(zip(node.outputs, act(node, [read(o) for o in node.inputs]), strict=True))
    return [read(o) for o in graph.outputs]


def run_regions(
    node: Node,
    args: Sequence[Any],
    run: Callable[[int, Sequence[Any]], list[Any]],
    scan: Callable[..., Any] = lax.scan,
    while_loop: Callable[..., Any] = lax.while_loop,
) -> list[Any]:
    """Runs a scan, while or cond with JAX's own control flow.

    Arguments:
      node: the node.
      args: values of its operands.
      run: runs a region, by number, on the values of its inputs.
      scan: runs a scan; takes the arguments of `lax.scan`.
      while_loop: runs a while loop; takes the arguments of `lax.while_loop`.

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
                while_loop(
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
            return lax.optimization_barrier(args)
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
        case op if op.startswith(
            (
                "unreduced_",
                "all_gather_reduced",
                "preduced",
                "reduced_vary_cast",
                "vary_unreduced_cast",
            )
        ):
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
