"""Call -> request: the traced program, the types asked for its inputs and outputs, and everything
else that its types are chosen by."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from sbp import _jax
from sbp.annotations import bind_pin
from sbp.api.boundary import (
    Leaf,
    Leaves,
    about_option,
    broadcast_types,
    codes_of,
    even_boundary,
    result_kind,
)
from sbp.api.call import CallReader, CallSignature
from sbp.api.trees import KeyPath, arguments_of, layer_paths, results_of
from sbp.errors import SbpError, refused
from sbp.handwritten.region import tracing_for
from sbp.infer.pins import check_axes, device_ids, resolve_pins
from sbp.infer.request import Demand, Request
from sbp.kinds import paths_of, returned_array
from sbp.limits import policies_in
from sbp.machine.mesh import MeshSpec, known_axes, other_mesh, users_mesh
from sbp.run.arrays import spec_of
from sbp.signatures.alignment import with_alignment
from sbp.signatures.custom import check_registered, check_rules
from sbp.signatures.rewrites import with_hoisted_casts
from sbp.signatures.rule import is_known
from sbp.sizes.claims import check_symbols, deciding_sizes
from sbp.sizes.scope import refuse_symbolic
from sbp.trace.build import trace
from sbp.trace.graph import Constant, Graph
from sbp.trace.places import HOST, returned_in
from sbp.types import NdSbp

# ---- results ------------------------------------------------------------------------------------


def with_result_types(reader: CallReader, results: Leaves) -> Leaves:
    """What a function returns, with what is asked of each result at the boundary.

    Arguments:
      reader: the function with its mesh and options.
      results: the results, of which nothing is asked yet.
    """
    spec, options = reader.spec, reader.options
    names = options.out_option, "result"
    with about_option(names[0]):
        typed = broadcast_types(
            options.out_types, results.tree, results.leaves, names, spec, skip=0
        )
    return replace(
        results,
        leaves=tuple(even_boundary(x, x.aval.shape, spec, f"output {x.name}") for x in typed),
    )


def tied_outputs(signature: CallSignature, results: Leaves) -> tuple[tuple[int, int], ...]:
    """Pairs (flat output, flat input) that have one type: each donated argument is paired with the
    first result of equal structure, shapes and dtypes, and so is each argument that is a container.
    So a training step returns the types that it takes. Results of which anything is asked are left
    out.

    Arguments:
      signature: the call.
      results: what it returns.
    """
    left, pairs = results_of(results.tree), list[tuple[int, int]]()
    outs, ins = (
        [(leaf.aval.shape, leaf.aval.dtype) for leaf in part.leaves]
        for part in (results, signature)
    )

    def is_donated(argument: tuple[Any, range]) -> bool:
        return any(signature.leaves[i].donated for i in argument[1])

    for tree, taken in sorted(arguments_of(signature.tree), key=is_donated, reverse=True):
        if jax.tree_util.treedef_is_leaf(tree) and not is_donated((tree, taken)):
            continue
        for result, returned in left:
            each = list(zip(returned, taken, strict=False))
            if result == tree and all(outs[o] == ins[i] for o, i in each):
                left.remove((result, returned))
                pairs += [
                    (o, i)
                    for o, i in each
                    # A result is not partial unless that is asked of it.
                    if results.leaves[o].is_free and signature.leaves[i].partial is None
                ]
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
      results: the arrays that the function returns, with the types and the memory that are asked
        for them.
      staged: makes what `jax.jit` of the function traces; None where a function is planned.
    """

    request: Request
    results: Leaves
    staged: Callable[[], Any] | None = None

    def __getattr__(self, name: str) -> Any:
        """What a `jax.stages.Traced` has, such as `lower` and `jaxpr`: `jax.export.export` reads
        these."""
        if self.staged is None or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.staged(), name)


Tracer = Callable[[Callable[..., Any], Sequence[Any], Sequence[str]], tuple[Graph, Any]]
"""Function, shapes and names of arguments -> graph and shapes of results: `sbp.trace.build.trace`,
or `SizedCall.trace` for symbolic sizes."""


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
    arguments = [
        even_boundary(leaf, leaf.aval.shape, spec, f"input {leaf.name}")
        for leaf in signature.leaves
    ]
    call, results_of_call = _flat_results(signature, reader, arguments)
    make_graph = tracer or functools.partial(
        trace, platform=_platform(reader.mesh, spec), is_known=is_known
    )

    def traced(explicit: AbstractMesh | None) -> tuple[Graph, Any]:
        return make_graph(
            call, tuple(_laid_out(leaf, explicit) for leaf in arguments), signature.names
        )

    try:
        with deciding_sizes(
            "its arguments have numbers, so these sizes come from outside of it; take them from"
            " the shapes of its arguments"
        ):
            graph, flat_shapes = _under_users_mesh(traced, spec)
    except NameError as error:
        if _jax.unbound_axis(error):  # JAX's advice is to call it under `jax.shard_map`
            error.add_note(
                "sbp: sbp.jit chooses the collectives of a program itself. Leave this one"
                " out, or put the code that calls it into a function for sbp.manual."
            )
        raise
    check_symbols(graph, (), ())
    if tracer is None:  # which elements move depends on sizes
        graph = with_alignment(with_hoisted_casts(graph))
    _refuse_traced(graph, reader.name)
    graph = _check(graph, spec, reader.mesh)
    results = with_result_types(reader, results_of_call(flat_shapes))
    tied = tied_outputs(signature, results)
    returned = tuple(
        replace(leaf, memory=result_kind(leaf, _jax.in_host(graph.aval(o)), spec, reader.mesh))
        for leaf, o in zip(results.leaves, graph.outputs, strict=True)
    )
    request = Request(
        graph=returned_in(graph, tuple(leaf.memory == HOST for leaf in returned)),
        mesh=spec,
        demand=Demand(
            inputs=tuple(codes_of(leaf.type, spec) for leaf in arguments),
            outputs=tuple(codes_of(leaf.type, spec) for leaf in results.leaves),
            tied=tied,
            sources=tuple(leaf.source for leaf in signature.leaves),
            padded_inputs=signature.padded,
            padded_outputs=frozenset(
                results.padded | {o for o, i in tied if i in signature.padded}
            ),
            layers=(layer_paths(signature.leaves, 2), layer_paths(results.leaves, 1)),
        ),
        boxing=options.boxing,
        axis_policies=tuple(options.axis_policies.get(name) for name in spec.names)
        if options.axis_policies
        else (),
        budgets=options.budgets,
        reduce_dtype=options.reduce_dtype,
        memory_limit=options.memory_limit,
        remat=options.remat,
        donated=signature.donated,
    )
    return Traced(request=request, results=replace(results, leaves=returned))


def _platform(mesh: Mesh | AbstractMesh, spec: MeshSpec) -> str | None:
    """JAX's name of the platform that a program on the mesh is lowered for; None for "gpu", which
    is "cuda" or "rocm"."""
    if isinstance(mesh, AbstractMesh):
        return spec.hardware.platform
    platform = mesh.devices.flat[0].platform
    return platform if platform in ("cpu", "tpu") else None


def _laid_out(leaf: Leaf, explicit: AbstractMesh | None) -> jax.ShapeDtypeStruct:
    """The shape of an argument with the memory that the array lies in, and with the sharding that
    it has on Explicit axes: both are parts of JAX's types, which the function may read and assert.

    Arguments:
      leaf: the argument, with its type at the boundary.
      explicit: the mesh that the user set, where its axes are Explicit; None for another one.
    """
    aval, t, kind = leaf.aval, leaf.type, HOST if leaf.memory == HOST else None
    if (
        explicit
        and t is not None
        and leaf.source != "in_types"
        and not (leaf.padded or t.is_partial)
    ):
        return aval.update(
            sharding=NamedSharding(explicit, spec_of(t, explicit, aval.ndim), memory_kind=kind)
        )
    nowhere = NamedSharding(AbstractMesh((), ()), PartitionSpec(), memory_kind=kind)
    return aval if kind is None else aval.update(sharding=nowhere)


def _under_users_mesh(traced: Callable[[AbstractMesh | None], Found], spec: MeshSpec) -> Found:
    """Traces a function under the mesh that the user set. One with other axes is hidden, unless the
    function cannot be traced then: a PartitionSpec in it means that mesh.

    Arguments:
      traced: traces the function; its argument is the mesh that the user set, where its axes are
        Explicit.
      spec: the mesh of `sbp.jit`.

    Raises:
      SbpError: `bad-placement` at the line of a PartitionSpec that `jax.jit` refuses there, too.
      Whatever the function raises, unchanged.
    """

    def under(*, other: bool) -> Found:
        with users_mesh(spec.names, spec.sizes, other=other) as explicit, tracing_for(spec):
            return traced(explicit)

    try:
        return under(other=False)
    except (RuntimeError, ValueError) as error:
        mesh = other_mesh(spec.names, spec.sizes)
        if mesh is None or isinstance(error, SbpError):
            raise
        try:
            return under(other=True)
        except (RuntimeError, ValueError) as again:
            if (type(again), again.args) == (type(error), error.args):
                raise error from None  # the mesh has no part in it
            axes = ", ".join(f"{n}={size}" for n, size in mesh.shape.items())
            raise refused(
                f"{str(again).rstrip('.')}; jax.set_mesh has the mesh ({axes}), but sbp.jit uses"
                f" ({spec}): use one mesh for both",
                again,
                code="bad-placement",
                span=_jax.raising_span(again),
            ) from again


def traced_results(reader: CallReader, signature: CallSignature) -> tuple[Leaves, bool]:
    """What a call returns, with the types that are asked, and whether the function closes over no
    value of a transformation."""
    call, results_of_call = _flat_results(signature, reader, signature.leaves)
    laid_out = [_laid_out(leaf, None) for leaf in signature.leaves]
    closed, shapes = _under_users_mesh(
        lambda _: jax.make_jaxpr(call, return_shape=True)(*laid_out), reader.spec
    )
    return (
        with_result_types(reader, results_of_call(shapes)),
        not any(isinstance(c, _jax.Tracer) for c in closed.consts),
    )


def _flat_results(
    signature: CallSignature, reader: CallReader, arguments: Sequence[Leaf]
) -> tuple[Callable[..., list[Any]], Callable[[Sequence[Any]], Leaves]]:
    """A function of flat arguments that returns its results as a list, and a function from the
    shapes of these to the results of the last call with their structure.

    An array that JAX makes for the call is put into the memory that is asked for it, and the
    function gets it in device memory.

    Arguments:
      signature: the call, with the function of flat arguments.
      reader: the user's function.
      arguments: the flat arguments, with their pins inside of the program.
    """
    last = list[tuple[Any, list[KeyPath]]]()

    def call(*flat: Any) -> list[Any]:
        on_device = [
            jax.device_put(x, jax.memory.Space.Device)
            if leaf.memory == HOST and not leaf.in_host
            else x
            for x, leaf in zip(flat, arguments, strict=True)
        ]
        pinned = [
            bind_pin(x, replace(leaf.pin, input=n)) if leaf.pin else x
            for n, (x, leaf) in enumerate(zip(on_device, arguments, strict=True))
        ]
        with _jax.rules_at_own_lines(), known_axes(reader.spec, AssertionError, NameError):
            results = signature.call(*pinned)
        with_path, tree = paths_of(results, "what the function returns")
        last[:] = [(tree, [path for path, _ in with_path])]
        return [returned_array(leaf, path, reader.name) for path, leaf in with_path]

    def returned(shapes: Sequence[Any]) -> Leaves:
        [(tree, paths)] = last
        return Leaves(
            tree=tree,
            leaves=tuple(
                Leaf(path=path, name=jax.tree_util.keystr(path) or "result", aval=aval)
                for path, aval in zip(paths, shapes, strict=True)
            ),
        )

    return _jax.traced_as(call, reader.fn, signature.names), returned


def _refuse_traced(graph: Graph, name: str) -> None:
    """Refuses a program that closes over a value of another transformation.

    Raises:
      SbpError: `bad-argument`.
    """
    for operand in (*(o for node in graph.walk() for o in node.inputs), *graph.outputs):
        if isinstance(operand, Constant) and isinstance(operand.value, _jax.Tracer):
            raise refused(
                f"{name} closes over a value that another transformation (jit, grad or vmap)"
                " traces; pass it as an argument",
                TypeError,
            )
        if isinstance(operand, Constant) and isinstance(operand.value, jax.Ref):
            raise SbpError(
                f"{name} closes over a Ref, which devices cannot share; pass its value as an"
                " argument, and return the new one",
                code="unsupported-effect",
            )


def _check(graph: Graph, spec: MeshSpec, mesh: Mesh | AbstractMesh) -> Graph:
    """The graph with its pins resolved on the mesh, its primitives and policies checked."""
    graph = resolve_pins(graph, spec, None if isinstance(mesh, AbstractMesh) else device_ids(mesh))
    check_rules(graph, spec)
    check_registered(graph, spec)
    for scope, span in {node.scope: node.span for node in graph.walk()}.items():
        for _, axis in policies_in(scope):
            if axis:
                check_axes(NdSbp(free=[axis]), spec, "sbp.policy", span)
    return graph
