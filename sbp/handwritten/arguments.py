"""The arguments of a checked program: its trace on their shapes, and the values with which it runs:
its own arguments where these are arrays, and random ones elsewhere."""

import ast
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.tree_util import keystr, tree_leaves_with_path

from sbp import _jax
from sbp.errors import SbpError, Span, position_text, refused
from sbp.handwritten.emulation import atom_of, regions_of
from sbp.kinds import check_alive, leaves_of, returning_arrays, takes_no_such_call
from sbp.machine.mesh import MeshSpec, known_axes, mesh_spec
from sbp.source.reader import in_library, name_called, parsed_file, point, span_of
from sbp.trace.build import body_graph
from sbp.trace.collectives import SHARD_MAP, mesh_sizes
from sbp.trace.graph import Graph
from sbp.types import Split

# ---- traces -------------------------------------------------------------------------------------


def trace_program(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    mesh: Mesh | AbstractMesh,
    subject: str = "the program",
) -> Graph:
    """The program on abstract arguments; `subject` is `fn` in errors. Dead code stays, since the
    divisions in the forward part tell which operations of a gradient are divisions."""
    leaves, structure = leaves_of(args, "sbp.check_shard_map")
    shapes, spec, paths = [_abstract(x) for x in leaves], mesh_spec(mesh), list[str]()

    def flat(*values: Any) -> Any:
        try:
            with (
                _jax.rules_at_own_lines(),
                known_axes(spec, AssertionError, NameError, ValueError),
            ):
                results = returning_arrays(fn)(*jax.tree.unflatten(structure, values))
                paths[:] = [keystr(path) for path, _ in tree_leaves_with_path(results)]
                return results
        except (NameError, TypeError, ValueError) as error:
            if not (said := _refusal(error, subject)):
                raise
            raise refused(said, error, code=getattr(error, "code", "bad-argument")).at(
                _jax.raising_span(error) or shard_map_span(fn)
            ) from error

    try:
        graph = body_graph(jax.make_jaxpr(flat)(*shapes))
    except ValueError as error:
        if "context mesh cannot be empty" not in str(error):
            raise
        # A shard_map without a mesh of its own.
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            graph = body_graph(jax.make_jaxpr(flat)(*shapes))
    return replace(graph, output_names=tuple(paths))


def result_text(number: int, path: str) -> str:
    """A result by its number, with its path where that says more."""
    return f"{number}" if path in ("", f"[{number}]") else f"{number} (`result{path}`)"


def _refusal(error: Exception, subject: str) -> str:
    """Why a program cannot be traced, and what to change; empty for errors of the user's own."""
    match error:
        case SbpError(span=None):
            spec = re.search(r"(\w+_specs\S*) refers to", str(error.__cause__))
            return f"{spec[1]}: {error.message}" if spec else ""
        case NameError() if axis := _jax.unbound_axis(error):
            return (
                f"a collective over mesh axis {axis!r} is outside of jax.shard_map; pass"
                " jax.shard_map(f, mesh=mesh, in_specs=.., out_specs=..)"
            )
        case TypeError() if takes_no_such_call(error):
            return f"{subject} was called wrongly: {error}"
        case ValueError() if found := re.search(r"in_specs passed .*?: (.*?)\. ", str(error)):
            return (
                f"on Explicit axes, arguments need the shardings of in_specs, but {found[1]}; use"
                " jax.device_put or ShapeDtypeStruct(.., sharding=..), or a mesh of sbp.make_mesh"
            )
        case _:
            return ""


def _abstract(x: Any) -> jax.ShapeDtypeStruct:
    if not hasattr(x, "dtype"):  # a number of Python
        dtype = jax.dtypes.canonicalize_dtype(np.asarray(x).dtype)
        return jax.ShapeDtypeStruct((), dtype, weak_type=True)
    check_alive(x, "sbp.check_shard_map: an argument")
    sharding = getattr(x, "sharding", None)
    explicit = isinstance(sharding, NamedSharding) and AxisType.Explicit in sharding.mesh.axis_types
    # JAX 0.12 warns of a struct of 64 bits where a call of the function would not.
    dtype = x.dtype if _jax.is_extended(x.dtype) else jax.dtypes.canonicalize_dtype(x.dtype)
    return jax.ShapeDtypeStruct(x.shape, dtype, sharding=sharding if explicit else None)


def check_mesh(graph: Graph, mesh: MeshSpec) -> None:
    """Checks that a program has regions, over a given mesh.

    Raises:
      SbpError: `bad-argument` when there is none, or one over another mesh.
    """
    if not any(regions_of(graph)):
        raise SbpError(
            "the function does not call jax.shard_map, so there is nothing to check; for other"
            " functions, use sbp.jit(f, mesh).check(..)"
        )
    for node in regions_of(graph):
        given = mesh_sizes(node)
        if tuple(given.items()) != tuple(mesh.axes):
            where = f" at {position_text(node.span.file, node.span.line)}" if node.span else ""
            raise SbpError(
                f"the shard_map{where} uses the mesh"
                f" {' '.join(f'{k}={n}' for k, n in given.items())}, but mesh= has {mesh}; pass the"
                " mesh of the shard_map"
            )


def shard_map_span(fn: Callable[..., Any]) -> Span | None:
    """Where the user makes a function that `jax.shard_map` maps: the only call of `shard_map` that
    names it, or else the line of the function; None for a callable without a line."""
    code = getattr(inspect.unwrap(fn), "__code__", None)
    if code is None or in_library(code.co_filename):
        return None
    calls = [
        span_of(part, code.co_filename)
        for part in ast.walk(parsed_file(code.co_filename).tree)
        if isinstance(part, ast.Call) and name_called(part) == SHARD_MAP and part.args
        if ast.unparse(part.args[0]) == code.co_name
    ]
    return calls[0] if len(calls) == 1 else point(code.co_filename, code.co_firstlineno, 1)


# ---- values -------------------------------------------------------------------------------------


def poison(graph: Graph, values: Sequence[Any]) -> list[Any]:
    """Values for programs that test for finite numbers: the last element of each array that a
    region splits is not finite."""
    split = {
        v
        for node in regions_of(graph)
        for v, spec in zip(node.inputs, node.params["in_specs"], strict=True)
        if any(isinstance(atom_of(spec, name), Split) for name in node.params["mesh"].shape)
    }

    def of(value: int, x: Any) -> Any:
        if value not in split or not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        other = np.array(x)
        other[(slice(-1, None),) * other.ndim] = np.nan  # an array may be empty
        return other

    return [of(v, x) for v, x in zip(graph.inputs, values, strict=True)]


def is_value(x: Any) -> bool:
    """Whether an argument is a value that this process has, not a shape."""
    return isinstance(x, np.ndarray | np.generic | bool | int | float | complex) or (
        isinstance(x, jax.Array) and not isinstance(x, _jax.Tracer) and x.is_fully_addressable
    )


def is_flat(x: Any) -> bool:
    """Whether an argument is an array of equal floats, such as a bias of zeros: it hides faults."""
    return bool(
        is_value(x)
        and np.size(x) > 1
        and jnp.issubdtype(x.dtype, jnp.inexact)
        and (np.asarray(x) == np.ravel(x)[0]).all()
    )


def is_sorted(x: np.ndarray) -> bool:
    """Whether numbers rise along a dim, as keys to search in or the ids of segments."""
    is_number = x.dtype != np.bool_ and not jnp.issubdtype(x.dtype, jnp.complexfloating)
    dims = [np.moveaxis(x, d, 0) for d in range(x.ndim) if x.shape[d] > 1]
    return is_number and any((y[1:] >= y[:-1]).all() for y in dims)


def is_guessed(x: Any) -> bool:
    """Whether an argument is the shape of integers or tests, for which no values are typical."""
    return not (is_value(x) or _jax.is_extended(x.dtype) or jnp.issubdtype(x.dtype, jnp.inexact))


@jax.ensure_compile_time_eval()  # the caller may be tracing
def values_of(leaves: Sequence[Any], seed: int, *, spread: bool = True) -> list[Any]:
    """Values for all arguments. Second values of arrays that are given are the first ones in
    another order, sorted arrays excepted, and random ones for tests that are all equal. Floats that
    are all equal get random numbers added, if they are to be spread."""
    draws = (np.random.default_rng([seed, i]) for i in range(len(leaves)))
    return [_value(x, draw, seed, spread) for x, draw in zip(leaves, draws, strict=True)]


def _value(x: Any, draw: np.random.Generator, seed: int, spread: bool) -> Any:
    if is_value(x):
        if isinstance(x, jax.Array) and _jax.is_extended(x.dtype):
            return x
        x = np.array(x)  # NumPy permutes an empty array in place
        if spread and is_flat(x):
            return x + (draw.random(x.shape) / 2).astype(x.dtype)
        if seed and x.dtype == np.bool_ and x.all() == x.any():
            return draw.random(x.shape) < 0.5
        return draw.permutation(x.ravel()).reshape(x.shape) if seed and not is_sorted(x) else x
    if _jax.is_extended(x.dtype):
        return _jax.wrap_key(
            draw.integers(0, 2**32, (*x.shape, *_jax.key_shape(x.dtype)), np.uint32), x.dtype
        )
    if not is_guessed(x):
        return draw.standard_normal(x.shape).astype(x.dtype)
    if x.dtype == np.bool_ or x.shape:
        return draw.integers(0, 2 if x.dtype == np.bool_ else 8, x.shape).astype(x.dtype)
    # A whole number may be a length: one that spreads over several devices.
    return np.asarray((5, 11)[seed % 2], x.dtype)
