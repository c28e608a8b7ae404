"""What a function returns: its structure, and what the user asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from sbp import _jax
from sbp.api.boundary import about_option, broadcast_types, even_boundary
from sbp.api.call import CallReader, CallSignature
from sbp.api.memories import FREE, Asked, result_kind
from sbp.api.trees import KeyPath, arguments_of, filled, results_of
from sbp.infer.pins import check_monoids
from sbp.trace.graph import Graph
from sbp.trace.transfers import HOST, returned_in
from sbp.types import NdSbp


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """What a function returns.

    Arguments:
      tree: its structure.
      paths: the path of each flat result.
      shapes: shape and dtype of each flat result.
    """

    tree: Any
    paths: tuple[KeyPath, ...]
    shapes: tuple[Any, ...]

    def like(self, leaves: Sequence[Any]) -> Any:
        """The structure with types or shardings as its leaves."""
        return filled(self.tree, leaves, self.paths)


def asked_outputs(reader: CallReader, results: Results) -> tuple[list[Asked], tuple[str, ...]]:
    """What is asked of each output at the boundary, and a name for each.

    Arguments:
      reader: the function with its mesh and options.
      results: what the function returns.
    """
    spec, out_types = reader.spec, reader.options.out_types
    names = tuple(jax.tree_util.keystr(path) or "result" for path in results.paths)
    if out_types is None:
        return [FREE] * len(names), names
    found: list[Asked] = []
    with_path = list(zip(results.paths, results.shapes, strict=True))
    option = reader.options.out_option
    with about_option(option):
        types = broadcast_types(out_types, results.tree, with_path, (option, "result"), spec)
    for asked, leaf, name in zip(types, results.shapes, names, strict=True):
        check_monoids(asked.type or NdSbp(), leaf.dtype, f"output {name}")
        outer, _ = even_boundary(asked, leaf.shape, spec, f"output {name}")
        found.append(asked.typed(outer))
    return found, names


def placed_results(
    graph: Graph, asked: Sequence[Asked], names: Sequence[str], reader: CallReader
) -> tuple[Graph, tuple[str | None, ...]]:
    """The program with its results in the memory that is asked for them, and the kind of memory of
    each; None for the device's own.

    Arguments:
      graph: the program.
      asked: what is asked of each result.
      names: the names of the results.
      reader: the function with its mesh and options.

    Raises:
      SbpError: `memory-kind` for a kind that the platform cannot return.
    """
    kinds = tuple(
        result_kind(a, _jax.in_host(graph.aval(o)), name, reader.spec, reader.mesh)
        for a, o, name in zip(asked, graph.outputs, names, strict=True)
    )
    return returned_in(graph, tuple(kind == HOST for kind in kinds)), kinds


def tied_outputs(
    signature: CallSignature,
    graph: Graph,
    out_tree: Any,
    out_asked: Sequence[Asked],
) -> tuple[tuple[int, int], ...]:
    """Pairs (flat output, flat input) that have one type: each donated argument is paired with the
    first result of equal structure, shapes and dtypes. So a training step returns the types that it
    takes.

    Arguments:
      signature: the call.
      graph: its program.
      out_tree: the structure of what the function returns.
      out_asked: what is asked of each output. Outputs of which anything is asked are left out.
    """
    arguments = {tuple(at): tree for tree, at in arguments_of(signature.tree)}
    pairs: list[tuple[int, int]] = []
    used: set[int] = set()
    for group in signature.donated_args:
        for number, (result, at) in enumerate(results_of(out_tree)):
            if number in used or result != arguments[group]:
                continue
            same = all(
                graph.aval(graph.outputs[o]).shape == signature.avals[i].shape
                and graph.aval(graph.outputs[o]).dtype == signature.avals[i].dtype
                for o, i in zip(at, group, strict=True)
            )
            if same:
                used.add(number)
                pairs += [(o, i) for o, i in zip(at, group, strict=True) if out_asked[o] == FREE]
                break
    return tuple(pairs)
