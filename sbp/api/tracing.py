"""Call -> request: the traced program, the types asked for its inputs and outputs, and everything
else that its types are chosen by."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from sbp import _jax, _jax_call
from sbp.annotations import Pin, bind_pin
from sbp.api.boundary import (
    FREE,
    Asked,
    about_option,
    broadcast_types,
    codes_of,
    even_boundary,
    result_kind,
)
from sbp.api.call import CallReader, CallSignature
from sbp.api.trees import KeyPath, arguments_of, filled, layer_paths, results_of
from sbp.errors import SbpError, refused
from sbp.handwritten.region import tracing_for
from sbp.infer.coverage import check_rules
from sbp.infer.pins import check_monoids, resolve_pins
from sbp.infer.registered import check_registered
from sbp.infer.request import Demand, Request
from sbp.infer.space import from_type
from sbp.limits import policies_in
from sbp.machine.context import other_mesh, users_mesh
from sbp.machine.mesh import MeshSpec
from sbp.pytrees import paths_of
from sbp.run.execute import Boundary
from sbp.run.specs import partition_spec
from sbp.signatures.alignment import with_alignment
from sbp.signatures.casts import with_hoisted_casts
from sbp.signatures.reversal import with_mirrors
from sbp.sizes.claims import check_symbols
from sbp.sizes.expressions import deciding_sizes, refuse_symbolic
from sbp.trace.build import trace
from sbp.trace.graph import Constant, Graph
from sbp.trace.transfers import HOST, returned_in
from sbp.types import NdSbp

# ---- results ------------------------------------------------------------------------------------
# What a function returns: its structure, and what the user asks for it.


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


# ---- tracing ------------------------------------------------------------------------------------


Found = TypeVar("Found")


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """A traced program as a request, with the structure of what it returns.

    Arguments:
      request: the program with annotations that fit the mesh, and everything that its types are
        chosen by.
      results: what the function returns.
      out_names: a name for each output.
      out_asked: what is asked of each output.
      boundary: how arguments and results lie, besides their types.
    """

    request: Request
    results: Results
    out_names: tuple[str, ...]
    out_asked: tuple[Asked, ...]
    boundary: Boundary


Tracer = Callable[[Callable[..., Any], Sequence[Any], Sequence[str]], tuple[Graph, Any]]
"""Function, shapes and names of arguments -> graph and shapes of results: `sbp.trace.build.trace`,
or `SizedCall.trace` for symbolic sizes."""

_CLOSED_OVER = (
    "its arguments have numbers, so these sizes come from outside of it; take them from the shapes"
    " of its arguments"
)
"""What to change in a function that uses symbolic sizes, but has arguments with numbers."""


def traced_call(
    reader: CallReader, signature: CallSignature, tracer: Tracer | None = None
) -> Traced:
    """Traces a call and checks its annotations, primitives and policies against the mesh.

    Arguments:
      reader: the function with its mesh and options.
      signature: the call.
      tracer: makes the graph; None for `sbp.trace.build.trace`.

    Raises:
      SbpError: for an annotation, primitive or policy that does not fit the mesh or the dtype, and
        `symbolic-sizes` for symbolic sizes where numbers are needed.
    """
    spec, options = reader.spec, reader.options
    refuse_symbolic(signature.avals, reader.name)
    boundary, inner = _boundary(signature, spec)

    call = _FlatResults(signature, reader, tuple(inner))
    is_symbolic = tracer is not None
    if tracer is None:
        tracer = functools.partial(trace, platform=_platform(reader.mesh, spec))

    def traced(other: bool) -> tuple[Graph, Any]:
        with users_mesh(spec.names, spec.sizes, other=other) as explicit, tracing_for(spec):
            return tracer(call, _placed(signature, boundary, explicit, spec), signature.names)

    with deciding_sizes(_CLOSED_OVER):
        graph, flat_shapes = _under_users_mesh(traced, spec)
    check_symbols(graph, (), ())
    if not is_symbolic:  # which elements move depends on sizes
        graph = with_mirrors(with_alignment(with_hoisted_casts(graph)))
    _refuse_traced(graph, reader.name)
    graph = _checked(graph, spec, reader.mesh)
    results = call.results(flat_shapes)
    out_asked, out_names = asked_outputs(reader, results)
    graph, kinds = placed_results(graph, out_asked, out_names, reader)
    tied = tied_outputs(signature, graph, results.tree, out_asked)
    by_axis, in_kinds = options.axis_policies, tuple(a.memory for a in signature.asked)
    request = Request(
        graph=graph,
        mesh=spec,
        demand=_demand(signature, boundary, results, out_asked, tied, spec),
        boxing=options.boxing,
        axis_policies=tuple(by_axis.get(name) for name in spec.names) if by_axis else (),
        budgets=options.budgets,
        reduce_dtype=options.reduce_dtype,
        memory_limit=options.memory_limit,
        donated=signature.donated,
    )
    specs = tuple(asked.spec for asked in out_asked)
    return Traced(
        request=request,
        results=results,
        out_names=out_names,
        out_asked=tuple(out_asked),
        boundary=Boundary(in_kinds=in_kinds, out_kinds=kinds, out_specs=specs),
    )


def _demand(
    signature: CallSignature,
    boundary: Sequence[NdSbp | None],
    results: Results,
    out_asked: Sequence[Asked],
    tied: tuple[tuple[int, int], ...],
    spec: MeshSpec,
) -> Demand:
    """What is asked of the types of inputs and outputs.

    Arguments:
      signature: the call.
      boundary: the type of each flat argument at the boundary.
      results: what the function returns.
      out_asked: what is asked of each flat result.
      tied: pairs of an output and an input of one type.
      spec: the mesh.
    """
    padded = {o for o, asked in enumerate(out_asked) if asked.padded}
    return Demand(
        inputs=tuple(codes_of(t, spec) for t in boundary),
        outputs=tuple(codes_of(asked.type, spec) for asked in out_asked),
        tied=tied,
        sources=signature.sources,
        padded_inputs=signature.padded,
        padded_outputs=frozenset(padded | {o for o, i in tied if i in signature.padded}),
        layers=(layer_paths(signature.paths, 2), layer_paths(results.paths, 1)),
    )


def _platform(mesh: Mesh | AbstractMesh, spec: MeshSpec) -> str | None:
    """JAX's name of the platform that a program on the mesh is lowered for; None for "gpu", which
    is "cuda" or "rocm"."""
    if isinstance(mesh, AbstractMesh):
        return spec.hardware.platform
    platform = mesh.devices.flat[0].platform
    return platform if platform in ("cpu", "tpu") else None


def _boundary(
    signature: CallSignature, spec: MeshSpec
) -> tuple[list[NdSbp | None], list[Pin | None]]:
    """The type of each flat argument at the boundary, and its pin in the program where that is
    another type."""
    boundary: list[NdSbp | None] = []
    inner: list[Pin | None] = []
    each = zip(signature.asked, signature.avals, signature.names, strict=True)
    for position, (asked, aval, name) in enumerate(each):
        check_monoids(asked.type or NdSbp(), aval.dtype, f"input {name}")
        outer, pin = even_boundary(asked, aval.shape, spec, f"input {name}")
        boundary.append(outer)
        inner.append(replace(pin, input=position) if pin else None)
    return boundary, inner


def _placed(
    signature: CallSignature,
    types: Sequence[NdSbp | None],
    explicit: AbstractMesh | None,
    spec: MeshSpec,
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The shapes of a call with the memory that arrays lie in, and with the shardings that they
    have on Explicit axes: both are parts of JAX's types, which the function may read and assert.

    Arguments:
      signature: the call.
      types: the type of each flat argument at the boundary.
      explicit: the mesh that the user set, where its axes are Explicit; None for another one.
      spec: its axes.
    """
    found: list[jax.ShapeDtypeStruct] = []
    each = zip(signature.avals, types, signature.sources, signature.asked, strict=True)
    for aval, t, source, asked in each:
        kind = HOST if asked.memory == HOST else None
        pinned = t is not None and source != "in_types" and not t.is_partial and not asked.padded
        if explicit and t is not None and pinned:
            sharding = NamedSharding(
                explicit,
                partition_spec(from_type(t, spec), spec, aval.ndim),
                memory_kind=kind,
            )
            aval = aval.update(sharding=sharding)
        elif kind:
            nowhere = AbstractMesh((), ())
            aval = aval.update(sharding=NamedSharding(nowhere, PartitionSpec(), memory_kind=kind))
        found.append(aval)
    return tuple(found)


def _under_users_mesh(traced: Callable[[bool], Found], spec: MeshSpec) -> Found:
    """Traces a function under the mesh that the user set. One with other axes is hidden, unless the
    function cannot be traced then: a PartitionSpec in it means that mesh.

    Arguments:
      traced: traces the function; its argument says whether a PartitionSpec in it means the mesh
        that the user set, where that has other axes than the mesh of `sbp.jit`.
      spec: the mesh of `sbp.jit`.

    Raises:
      SbpError: `bad-placement` at the line of a PartitionSpec that `jax.jit` refuses there, too.
      Whatever the function raises, unchanged.
    """
    try:
        return traced(False)
    except (RuntimeError, ValueError) as error:
        mesh = other_mesh(spec.names, spec.sizes)
        if mesh is None or isinstance(error, SbpError):
            raise
        try:
            return traced(True)
        except (RuntimeError, ValueError) as again:
            if (type(again), again.args) == (type(error), error.args):
                raise error from None  # the mesh has no part in it
            axes = ", ".join(f"{n}={size}" for n, size in mesh.shape.items())
            raise refused(
                f"{str(again).rstrip('.')}; jax.set_mesh has the mesh ({axes}), and sbp.jit runs on"
                f" ({spec})",
                again,
                code="bad-placement",
                span=_jax.raising_span(again),
            ) from again


def shapes_of(reader: CallReader, signature: CallSignature) -> Any:
    """What a call returns, as `jax.ShapeDtypeStruct`s."""
    call = _FlatResults(signature, reader)
    spec = reader.spec
    free = (None,) * len(signature.avals)

    def traced(other: bool) -> Any:
        with users_mesh(spec.names, spec.sizes, other=other), tracing_for(spec):
            return jax.eval_shape(call, *_placed(signature, free, None, spec))

    shapes = _under_users_mesh(traced, spec)
    return call.results(shapes).like(shapes)


class _FlatResults:
    """A function that returns its results as a list, and remembers their structure.

    An array that JAX makes for the call is put into the memory that is asked for it, and the
    function gets it in device memory.

    Arguments:
      signature: the call, with the function of flat arguments.
      reader: the user's function.
      pins: the pin of each argument, None for none; empty for none at all.
    """

    def __init__(
        self, signature: CallSignature, reader: CallReader, pins: tuple[Pin | None, ...] = ()
    ) -> None:
        self._fn, self._name = signature.call, reader.name
        self._pins = pins or (None,) * len(signature.avals)
        self._copied = tuple(a.memory == HOST and not a.in_host for a in signature.asked)
        self._returned: tuple[Any, tuple[KeyPath, ...]] | None = None
        _jax_call.traced_as(self, reader.fn, signature.names)

    def __call__(self, *flat: Any) -> list[Any]:
        if any(self._copied):
            flat = tuple(
                jax.device_put(x, jax.memory.Space.Device) if copied else x
                for x, copied in zip(flat, self._copied, strict=True)
            )
        pinned = [
            x if pin is None else bind_pin(x, pin) for x, pin in zip(flat, self._pins, strict=True)
        ]
        with_path, tree = paths_of(self._fn(*pinned), "what the function returns")
        self._returned = tree, tuple(path for path, _ in with_path)
        return [_returned_array(leaf, path, self._name) for path, leaf in with_path]

    def results(self, shapes: Sequence[Any]) -> Results:
        """The results of the last call, which has these shapes."""
        assert self._returned is not None
        tree, paths = self._returned
        return Results(tree=tree, paths=paths, shapes=tuple(shapes))


def _returned_array(x: Any, path: KeyPath, name: str) -> Any:
    """What a function returns at a path.

    Raises:
      SbpError: `bad-argument` where it is no array.
    """
    if isinstance(x, _jax.Tracer | jax.Array):
        return x
    try:
        if isinstance(x, jax.ShapeDtypeStruct):
            raise TypeError("a shape has no elements")
        jax.typeof(x)
    except (TypeError, AttributeError, OverflowError) as error:
        where = jax.tree_util.keystr(path)
        raise refused(
            f"{name} returns {where if where else 'its result'} of type"
            f" {type(x).__name__}, which is no array; return arrays",
            error if isinstance(error, OverflowError) else TypeError,
        ) from error
    return x


def _refuse_traced(graph: Graph, name: str) -> None:
    """Refuses a program that closes over a value of another transformation.

    Raises:
      SbpError: `bad-argument`.
    """
    read = [o for node in graph.walk() for o in node.inputs]
    for operand in (*read, *graph.outputs):
        if isinstance(operand, Constant) and isinstance(operand.value, _jax.Tracer):
            raise refused(
                f"{name} closes over a value that another transformation (jit, grad or vmap)"
                " traces; pass it as an argument",
                TypeError,
            )
        if isinstance(operand, Constant) and _jax.is_reference(operand.value):
            raise SbpError(
                f"{name} closes over a Ref, which devices cannot share; pass its value as an"
                " argument, and return the new one",
                code="unsupported-effect",
            )


def _checked(graph: Graph, spec: MeshSpec, mesh: Mesh | AbstractMesh) -> Graph:
    """The graph with its pins resolved on the mesh, its primitives and policies checked."""
    ids = (
        None
        if isinstance(mesh, AbstractMesh)
        else np.vectorize(lambda d: d.id, otypes=[int])(mesh.devices)
    )
    graph = resolve_pins(graph, spec, ids)
    check_rules(graph, spec)
    check_registered(graph, spec)
    for scope in sorted({node.scope for node in graph.walk()}):
        for _, axis in policies_in(scope):
            if axis:
                spec.size(axis)
    return graph
