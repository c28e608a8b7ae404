"""Traces a function on ShapeDtypeStructs and makes a `Graph` of its jaxpr: calls are inlined, loops
and branches become nodes with regions, and every node keeps the user's source line."""

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.custom_partitioning import SdyShardingRule

from sbp import _jax
from sbp.annotations import Pin, annotate_p
from sbp.errors import SbpError, Span, refused
from sbp.limits import policies_in
from sbp.trace.graph import (
    BARRIER,
    Constant,
    Graph,
    Inspection,
    Node,
    Operand,
    collecting_less,
    rewriting,
)
from sbp.trace.places import PLACING, Pins, Places, transfer_fields
from sbp.trace.scopes import REMATTED
from sbp.trace.slices import is_zero, with_joins, with_slices, without_unread

# ---- equations that only vmap makes -------------------------------------------------------------
# Equations that only `jax.vmap` makes, as ordinary ones.
#
# A loop whose predicate depends on the mapped values becomes a `while` whose predicate is an
# array. Such an equation cannot be written with `jax.lax.while_loop`. JAX lowers it to a loop that
# goes on while any element does, and keeps the values of the elements that have ended. The trace
# has the latter form: its types and its plan are those of an ordinary loop.
#
# A collective over the mapped axis, such as the `lax.pmean` of a batch norm, becomes a collective
# over a dim of its operand. That is a reduction, and the trace has the reduction.


_OVER_DIMS = {"psum": lax.reduce_sum, "pmax": lax.reduce_max, "pmin": lax.reduce_min}
"""For each collective that may be over dims, the reduction that it then is."""


def of_batch(eqn: Any) -> Any:
    """The closed jaxpr that does the same as an equation that only `jax.vmap` makes; None for other
    equations.

    Arguments:
      eqn: the equation; the jaxpr takes its operands and gives its results.
    """
    name, params = eqn.primitive.name, eqn.params
    if name == "while" and params["cond_jaxpr"].out_avals[0].shape:
        replacement = _with_one_predicate(eqn)
    elif name in _OVER_DIMS and all(isinstance(axis, int) for axis in params["axes"]):
        reduction, dims = _OVER_DIMS[name], params["axes"]

        def replacement(*operands: Any) -> list[Any]:
            # A gradient has such a collective over no dim.
            return [reduction(x, dims) if dims else x for x in operands]
    else:
        return None
    return _replace(eqn, replacement)


def _replace(eqn: Any, replacement: Callable[..., Any]) -> Any:
    """The closed jaxpr of a function of an equation's operands, at the equation's line."""
    shapes = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type)
        for a in (v.aval for v in eqn.invars)
    ]
    with _jax.source_context(eqn.source_info, scope=""):
        return _jax.make_jaxpr(replacement, shapes)[0]


def _with_one_predicate(eqn: Any) -> Callable[..., list[Any]]:
    """A loop that does the same as a `while` with a batched predicate."""
    cond, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    of_cond = eqn.params["cond_nconsts"]
    consts = of_cond + eqn.params["body_nconsts"]

    def loop(*operands: Any) -> list[Any]:
        def predicate(carry: list[Any]) -> jax.Array:
            return _jax.eval_jaxpr(cond, (*operands[:of_cond], *carry))[0]

        def step(carry: list[Any]) -> list[Any]:
            goes_on = predicate(carry)
            stepped = _jax.eval_jaxpr(body, (*operands[of_cond:consts], *carry))
            # The elements of the batch are the first dims.
            return [
                lax.select(lax.broadcast_in_dim(goes_on, new.shape, range(goes_on.ndim)), new, old)
                for new, old in zip(stepped, carry, strict=True)
            ]

        def any_goes_on(carry: list[Any]) -> jax.Array:
            goes_on = predicate(carry)
            return lax.reduce_or(goes_on, range(goes_on.ndim))

        return lax.while_loop(any_goes_on, step, list(operands[consts:]))

    return loop


def _cast_number(eqn: Any, operands: tuple[Operand, ...]) -> Constant | None:
    """The result of a cast of a literal, such as the fill of `jnp.pad` and, in JAX 0.12, the
    divisor of `lax.pmean`; None for other equations."""
    if eqn.primitive.name != "convert_element_type":
        return None
    (x,), aval = operands, eqn.outvars[0].aval
    if not isinstance(x, Constant) or isinstance(x.value, _jax.Tracer) or x.aval.shape:
        return None
    # XLA clips floats that an integer cannot hold, and NumPy does not.
    if jnp.issubdtype(x.aval.dtype, np.inexact) and not jnp.issubdtype(aval.dtype, np.inexact):
        return None
    return Constant(np.asarray(x.value).astype(aval.dtype), _jax.plain_aval(aval))


# ---- primitives that call a jaxpr ---------------------------------------------------------------
# The primitives that only call a jaxpr, and their parameters.


_LOWERED = ("custom_partitioning", "sbp_pushed")
"""Known primitives that are traced as the functions that they are lowered to."""

INLINED = {
    "jit": "jaxpr",
    "closed_call": "call_jaxpr",
    "call": "call_jaxpr",
    "eval_jaxpr": "jaxpr call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_lin": "jaxpr",
    "remat2": "jaxpr",
    "composite": "jaxpr call_jaxpr",
    "custom_vmap_call": "call",
    "linear_call": "callee",
    "xla_metadata_call": "jaxpr",
}
"""Primitives that only call a jaxpr, with the name of the parameter that is the jaxpr. Releases of
JAX differ; where a parameter has several names, blanks separate them."""


# ---- sums of arrays before padding --------------------------------------------------------------
# JAX makes the gradient of an array that is sliced twice, as `logits[:, :-1]` in a loss that reads
# it for its normaliser and for its targets, of one zero pad for each slice, and adds the padded
# arrays. XLA stores both arrays, and each product that reads the gradient adds them again. Added
# before they are padded, they are one array, which the TPU compiler rounds to the dtype of the
# products: of the logits of a large vocabulary, gigabytes less
# (`tests/tpu/test_compiled_memory.py`).


@rewriting
def _sum_before_pads(graph: Graph, asked: Set[int], ids: Iterator[int]) -> Graph:
    """A graph in which gradients that are padded alike are added before they are padded."""
    reads = Counter[Operand](o for node in graph.nodes for o in node.inputs)
    reads.update(graph.outputs)
    pads: dict[Operand, Node] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        is_sum = node.op == "add_any" and asked.isdisjoint(node.inputs)
        first, second = map(pads.get, node.inputs) if is_sum else (None, None)
        if first and second and _padding(graph, first) == _padding(graph, second):
            value, zero = graph.new_value(graph.aval(first.inputs[0])), second.inputs[1]
            summands = first.inputs[0], second.inputs[0]
            nodes.append(replace(node, inputs=summands, outputs=(value,)))
            node = replace(second, id=next(ids), inputs=(value, zero), outputs=node.outputs)
        nodes.append(node)
        if _adds_zeros(node) and reads[node.outputs[0]] == 1:
            pads[node.outputs[0]] = node
    return replace(graph, nodes=tuple(without_unread(nodes, asked)))


def _adds_zeros(node: Node) -> bool:
    """Whether a node adds zeros to an array, and takes no element from it."""
    return (
        node.op == "pad"
        and isinstance(node.inputs[0], int)
        and is_zero(node.inputs[1])
        and all(
            isinstance(size, int | np.integer) and size >= 0
            for edges in node.params["padding_config"]
            for size in edges
        )
    )


def _padding(graph: Graph, pad: Node) -> tuple[Any, ...]:
    """What pads have in common that lengthen arrays of one shape in one way, in one part of the
    program: in another part, other policies may hold."""
    aval = graph.aval(pad.inputs[0])
    return aval.shape, aval.dtype, pad.params, pad.scope


# ---- windows of padded arrays -------------------------------------------------------------------
# Convolutions and sums over windows of padded arrays, with the padding as their own parameter.
#
# Programs pad images before a `VALID` convolution. JAX pads the gradient of an average pool, and
# cuts the edges off the gradient of a convolution of padded images. If rows are split, the longer
# array has shards of another size, and all elements move to other devices and back. With the
# padding as a parameter, each device only gets the rows beside its own.


@rewriting
def _fold_edges(graph: Graph, asked: Set[int], _: Iterator[int]) -> Graph:
    """A graph in which windows on arrays that are padded with zeros read the arrays themselves, and
    windows do not compute the edges that a slice cuts off."""
    read = without_unread(graph.nodes, asked)
    reads = Counter[Operand](o for node in read for o in node.inputs)
    makers: dict[Operand, Node] = {}
    nodes: dict[int, Node] = {}
    for node in read:
        before = makers.get(node.inputs[0]) if node.inputs else None
        if before is not None and _conditions(before) == _conditions(node):
            if _adds_zeros(before):
                node = _with_padding(node, before)
            elif reads[before.outputs[0]] == 1 and before.outputs[0] not in asked:
                node = _without_edges(before, node, graph)
        nodes[node.id] = node
        makers.update((value, node) for value in node.outputs[:1])
    return replace(graph, nodes=tuple(without_unread([*nodes.values()], asked)))


def _conditions(node: Node) -> tuple[Any, ...]:
    """The policies and the settings of JAX under which a node runs."""
    return policies_in(node.scope), node.params.get(_jax.SETTINGS)


def _window_dims(node: Node) -> tuple[tuple[int, ...], tuple[int, ...], str]:
    """The window dims of a node's operand and result, and the name of its dilation parameter; no
    dims for a node without windows."""
    match node.op:
        case "conv_general_dilated":
            numbers = node.params["dimension_numbers"]
            return numbers.lhs_spec[2:], numbers.out_spec[2:], "lhs_dilation"
        case "reduce_window_sum":
            dims = tuple(range(len(node.params["padding"])))
            return dims, dims, "base_dilation"
        case _:
            return (), (), ""


def _with_padding(node: Node, pad: Node) -> Node:
    """A node on windows of a padded array, on the array; another node as it is."""
    config = pad.params["padding_config"]
    dims, _, dilation = _window_dims(node)
    beside = (edges for d, edges in enumerate(config) if d not in dims)
    if not dims or set(node.params[dilation]) != {1} or any(map(any, beside)):
        return node
    sides = zip((config[d] for d in dims), node.params["padding"], strict=True)
    return replace(
        node,
        inputs=(pad.inputs[0], *node.inputs[1:]),
        params={
            **node.params,
            "padding": tuple((low + a, high + b) for (low, high, _), (a, b) in sides),
            dilation: tuple(config[d][2] + 1 for d in dims),
        },
    )


def _without_edges(window: Node, cut: Node, graph: Graph) -> Node:
    """A window with less padding, so that it computes what a slice keeps; the slice itself if it
    cuts off more than padding gives."""
    _, dims, _ = _window_dims(window)
    if not dims or cut.op != "slice" or any(s != 1 for s in cut.params["strides"] or ()):
        return cut
    shape, limits = graph.aval(cut.inputs[0]).shape, cut.params["limit_indices"]
    ends = (size - limit for size, limit in zip(shape, limits, strict=True))
    edges = [*zip(cut.params["start_indices"], ends, strict=True)]
    beside = (pair for d, pair in enumerate(edges) if d not in dims)
    sizes = itertools.chain(*edges, *window.params["padding"])
    if any(map(any, beside)) or not all(isinstance(x, int | np.integer) for x in sizes):
        return cut
    padding = tuple(
        (low - edges[d][0] * stride, high - edges[d][1] * stride)
        for d, stride, (low, high) in zip(
            dims, window.params["window_strides"], window.params["padding"], strict=True
        )
    )
    return (
        cut
        if any(size < 0 for pair in padding for size in pair)
        else replace(window, outputs=cut.outputs, params={**window.params, "padding": padding})
    )


# ---- graphs -------------------------------------------------------------------------------------


@collecting_less()
def trace(
    fn: Callable[..., Any],
    args: Sequence[Any],
    input_names: Sequence[str] = (),
    platform: str | None = None,
    is_known: Callable[[str], bool] = bool,
) -> tuple[Graph, Any]:
    """Traces a function of flat arguments.

    Arguments:
      fn: takes the flat arguments, returns any pytree.
      args: `jax.ShapeDtypeStruct`s without sharding.
      input_names: names of the arguments for reports.
      platform: JAX's name of the platform that the program is lowered for; the branches of
        `jax.lax.platform_dependent` for other platforms are left out. None keeps all.
      is_known: whether a primitive becomes a node. For another one stand the equations of the
        function of JAX that it is lowered to, where it is lowered to one.

    Returns:
      The graph, and the pytree of output ShapeDtypeStructs.

    Raises:
      SbpError: `unsupported-effect` for an `io_callback` with results, and for tokens.
      Whatever `fn` raises, unchanged.

    >>> import jax, jax.numpy as jnp
    >>> graph, out = trace(lambda x: jnp.tanh(x).sum(), [jax.ShapeDtypeStruct((4,), jnp.float32)])
    >>> [node.op for node in graph.nodes]
    ['tanh', 'reduce_sum']
    """
    closed, out_shape = _jax.make_jaxpr(fn, args)
    builder = _Builder(platform, is_known)
    graph = builder.graph(closed, tuple(input_names))
    builder.places.warn()
    graph = with_slices(replace(graph, inspections=tuple(builder.inspections)))
    return with_joins(_fold_edges(_sum_before_pads(graph))), out_shape


def body_graph(jaxpr: Any) -> Graph:
    """The graph of a jaxpr, such as the body of a hand-written region."""
    return _Builder().graph(jaxpr, within=_Within(manual=True))


@dataclass(frozen=True, slots=True)
class _Within:
    """The place in the program of a jaxpr's equations.

    Arguments:
      frames: the user's frames of the call or loop around them, innermost first; an equation
        without frames of its own takes these.
      scope: JAX's name stack of the call or loop.
      manual: whether the place is in the body of a hand-written region.
      metadata: names and values that the calls around them give to their operations.
      nodes: the nodes so far of the graph around them.
    """

    frames: tuple[Span, ...] = ()
    scope: str = ""
    manual: bool = False
    metadata: tuple[tuple[str, Any], ...] = ()
    nodes: list[Node] = field(default_factory=list)

    @property
    def span(self) -> Span | None:
        """The user's innermost line."""
        return self.frames[0] if self.frames else None


class _Builder:
    def __init__(self, platform: str | None = None, is_known: Callable[[str], bool] = bool) -> None:
        self.platform, self.is_known = platform, is_known
        self.node_ids = itertools.count()
        self.avals: dict[int, Any] = {}
        self.user_frames = functools.cache(_jax.frames_of)
        self.library_of = functools.cache(_jax.library_of)
        self.places = Places()
        self.inspections: list[Inspection] = []

    def new_value(self, aval: Any) -> int:
        value = len(self.avals)
        self.avals[value] = _jax.plain_aval(aval)
        return value

    def graph(
        self, jaxpr: Any, input_names: tuple[str, ...] = (), within: _Within | None = None
    ) -> Graph:
        opened, _ = _jax.open_jaxpr(jaxpr)
        inputs = tuple(self.new_value(var.aval) for var in opened.invars)
        at = replace(within or _Within(), nodes=[])
        outputs = self.append_jaxpr(jaxpr, inputs, at)
        return Graph(
            inputs=inputs,
            outputs=outputs,
            nodes=tuple(at.nodes),
            avals=self.avals,
            input_names=input_names,
        )

    def read(self, env: dict[Any, Operand], atom: Any) -> Operand:
        return (
            Constant(atom.val, _jax.plain_aval(atom.aval))
            if isinstance(atom, _jax.Literal)
            else env[atom]
        )

    def append_jaxpr(
        self, called: Any, operands: tuple[Operand, ...], within: _Within
    ) -> tuple[Operand, ...]:
        """The results of a jaxpr on these operands, after its nodes have been appended."""
        body, consts = _jax.open_jaxpr(called)
        env: dict[Any, Operand] = dict(zip(body.invars, operands, strict=True))
        env |= {
            var: Constant(value, _jax.plain_aval(var.aval))
            for var, value in zip(body.constvars, consts, strict=True)
        }
        for eqn in body.eqns:
            name = eqn.primitive.name
            at = replace(
                within,
                frames=self.frames_of(eqn) or within.frames,
                # The name stack of an equation is such as `transpose(jvp(mlp))`.
                scope="/".join(filter(None, (within.scope, str(eqn.source_info.name_stack)))),
            )
            operands = tuple(self.read(env, v) for v in eqn.invars)
            before, after = self.places.pins(eqn, at.span, at.scope, manual=at.manual)
            operands = self.pin_operands(eqn, operands, before, at)
            if name in INLINED or name == "custom_linear_solve":
                results = self.inline(eqn, operands, at)
            elif (chosen := self.chosen_branch(eqn)) is not None and name == "platform_index":
                results = (Constant(np.int32(chosen), _jax.plain_aval(eqn.outvars[0].aval)),)
            elif chosen is not None:
                results = self.append_jaxpr(eqn.params["branches"][chosen], operands[1:], at)
            elif (ordinary := of_batch(eqn) or self.lowering_of(eqn, at)) is not None:
                results = self.append_jaxpr(ordinary, operands, at)
            elif (number := _cast_number(eqn, operands)) is not None:
                results = (number,)
            elif name in PLACING:
                results = self.place_results(eqn, operands, after, at)
            elif name == "inspect_sharding" and not at.manual:
                self.inspections.append(Inspection(operands[0], eqn.params["callback"]))
                results = ()
            else:
                results = self.node(eqn, operands, at)
            if name not in PLACING:
                results = self.pin_operands(eqn, results, after, at)
            env.update(zip(eqn.outvars, results, strict=True))
        return tuple(self.read(env, out) for out in body.outvars)

    def pin_operands(
        self, eqn: Any, operands: tuple[Operand, ...], pins: Pins, at: _Within
    ) -> tuple[Operand, ...]:
        """The operands with an annotation of each that has a pin."""
        return tuple(
            operand
            if pin is None or _has(pin, operand, at.nodes)
            else self.emit(
                eqn,
                at,
                (operand,),
                [self.aval(operand)],
                op=annotate_p.name,
                primitive=annotate_p,
                params={"pin": pin, "cotangent": None},
            )[0]
            for operand, pin in zip(operands, pins, strict=True)
        )

    def place_results(
        self, eqn: Any, operands: tuple[Operand, ...], pins: Pins, at: _Within
    ) -> tuple[Operand, ...]:
        """The results of an equation that puts its operands elsewhere: in another memory, then in
        the type of a pin."""
        moved = tuple(
            operand
            if host == _jax.in_host(self.aval(operand))
            else self.emit(eqn, at, (operand,), [var.aval], **transfer_fields(host, eqn, position))[
                0
            ]
            for position, (operand, var) in enumerate(zip(operands, eqn.outvars, strict=True))
            for host in [_jax.in_host(var.aval)]
        )
        return self.pin_operands(eqn, moved, pins, at)

    def aval(self, operand: Operand) -> Any:
        """Shape, dtype and memory of an operand."""
        return self.avals[operand] if isinstance(operand, int) else operand.aval

    def emit(
        self,
        eqn: Any,
        at: _Within,
        inputs: tuple[Operand, ...],
        avals: Iterable[Any],
        **fields: Any,
    ) -> tuple[int, ...]:
        """The results of a new node at the user's line of an equation.

        Arguments:
          eqn: the equation.
          at: its place.
          inputs: the operands of the node.
          avals: those of its results.
          fields: its other fields.
        """
        outputs = tuple(map(self.new_value, avals))
        at.nodes.append(
            Node(
                id=next(self.node_ids),
                inputs=inputs,
                outputs=outputs,
                span=at.span,
                stack=at.frames,
                scope=at.scope,
                source_info=eqn.source_info,
                **fields,
            )
        )
        return outputs

    def inline(self, eqn: Any, operands: tuple[Operand, ...], at: _Within) -> tuple[Operand, ...]:
        """The results of an equation that only calls a jaxpr; the jaxpr's nodes replace it."""
        name = eqn.primitive.name
        recomputed = name == "remat2" and eqn.params.get("differentiated")
        if name == "custom_linear_solve":
            # The solve reads its constants and the right-hand sides. Derivatives read the others.
            called, lengths = eqn.params["jaxprs"].solve, eqn.params["const_lengths"]
            before = lengths.matvec + lengths.vecmat
            operands = operands[before : before + lengths.solve] + operands[sum(lengths) :]
        else:
            called = next((eqn.params[k] for k in INLINED[name].split() if k in eqn.params), None)
            if called is None:  # as JAX says it, where it traces the derivative
                raise refused("jax.custom_vjp functions have no forward-mode derivative", TypeError)
        if recomputed and eqn.params.get("prevent_cse"):
            operands = self.barrier(eqn, operands, at)
        within = replace(
            at,
            scope=f"{at.scope}/{REMATTED}" if recomputed else at.scope,
            metadata=(*at.metadata, *eqn.params.get("xla_metadata", ())),
        )
        return self.append_jaxpr(called, operands, within)

    def lowering_of(self, eqn: Any, at: _Within) -> Any:
        """The closed jaxpr that stands for an equation: the function that a primitive of another
        library is lowered to, or that `custom_partitioning` partitions. None for others."""
        name = _jax.op_name(eqn)
        if at.manual or (self.is_known(name) and name not in _LOWERED):
            return None
        if eqn.primitive.name == "custom_partitioning":
            body = eqn.params["call"]
            states = isinstance(eqn.params["sharding_rule"], SdyShardingRule) and not body.effects
            return None if states and any(map(self.is_opaque, body.eqns)) else body
        function = _jax.lowering_function(eqn.primitive, self.platform)
        return function and _replace(eqn, functools.partial(function, **eqn.params))

    def is_opaque(self, eqn: Any) -> bool:
        """Whether an equation calls code that sbp does not see, itself or in the bodies that run on
        the platform."""
        name, bodies, branch = eqn.primitive.name, [*_jax.jaxprs_in(eqn)], self.chosen_branch(eqn)
        if name in ("ffi_call", "pallas_call") or not (
            self.is_known(name) or bodies or _jax.lowering_function(eqn.primitive, self.platform)
        ):
            return True
        run = bodies if branch is None else bodies[branch : branch + 1]
        return any(self.is_opaque(inner) for j in run for inner in _jax.open_jaxpr(j)[0].eqns)

    def chosen_branch(self, eqn: Any) -> int | None:
        """The position of the branch for the platform, of an equation that is part of a
        `jax.lax.platform_dependent`. Only this branch may have a lowering for the platform."""
        key = "platforms" if eqn.primitive.name == "platform_index" else "branches_platforms"
        fitting = (
            position
            for position, names in enumerate(eqn.params.get(key) or ())
            if self.platform and (names is None or self.platform in names)
        )
        return next(fitting, None)

    def node(self, eqn: Any, operands: tuple[Operand, ...], at: _Within) -> tuple[Operand, ...]:
        """The results of an equation that becomes a node."""
        params = dict(eqn.params)
        if eqn.primitive is annotate_p:
            del params["at"]  # the node has the frames
        regions = self.regions(eqn.primitive.name, params, at)
        if (settings := _jax.Settings.of(eqn, at.metadata)) != _jax.Settings.current():
            params[_jax.SETTINGS] = settings
        _check_effects(eqn, at.span)
        return self.emit(
            eqn,
            at,
            operands,
            [v.aval for v in eqn.outvars],
            op=_jax.op_name(eqn),
            title=_jax.title_of(eqn),
            primitive=eqn.primitive,
            params=params,
            regions=regions,
            library=self.library_of(eqn.source_info.traceback),
        )

    def barrier(self, eqn: Any, operands: tuple[Operand, ...], at: _Within) -> tuple[Operand, ...]:
        """Puts an `optimization_barrier` on the operands of a rematerialised computation: without
        it XLA merges that computation with the forward one."""
        prevent = eqn.params["prevent_cse"]
        flags = (prevent,) * len(operands) if isinstance(prevent, bool) else prevent
        held = [isinstance(o, int) and p for o, p in zip(operands, flags, strict=True)]
        through = tuple(o for o, h in zip(operands, held, strict=True) if h)
        if not through:
            return operands
        fields = {"op": BARRIER, "primitive": None, "params": {}}
        fresh = iter(self.emit(eqn, at, through, map(self.aval, through), **fields))
        return tuple(next(fresh) if h else o for o, h in zip(operands, held, strict=True))

    def regions(self, name: str, params: dict[str, Any], at: _Within) -> tuple[Graph, ...]:
        match name:
            case "scan":
                params["num_consts"], params["num_carry"] = _jax.scan_counts(params)
                bodies = [params.pop("jaxpr")]
            case "while":
                bodies = [params.pop("cond_jaxpr"), params.pop("body_jaxpr")]
            case "cond":
                bodies = params.pop("branches")
            case "shard_map":
                params["body"] = self.graph(params.pop("jaxpr"), within=replace(at, manual=True))
                return ()
            case _:
                return ()
        return tuple(self.graph(body, within=at) for body in bodies)

    def frames_of(self, eqn: Any) -> tuple[Span, ...]:
        return (
            eqn.params["at"]
            if eqn.primitive is annotate_p
            else self.user_frames(eqn.source_info.traceback)
        )


def _check_effects(eqn: Any, span: Span | None) -> None:
    """Refuses an equation that makes a token, and an `io_callback` with results."""
    name = eqn.primitive.name
    if not all(hasattr(v.aval, "shape") for v in eqn.outvars):
        why = (
            "makes a token, which has no type; remove the token, and order the effects through"
            " values that the operations read"
        )
    elif name == "io_callback" and eqn.outvars:
        name = "io_callback with results"
        why = "cannot run once for all devices; use jax.pure_callback, or return nothing"
    else:
        return
    raise SbpError(
        f"{name}{f' at {span}' if span else ''} {why}", code="unsupported-effect", span=span
    )


def _has(pin: Pin, operand: Operand, nodes: list[Node]) -> bool:
    """Whether the last node gave an operand the pin: JAX asks for `device=` of a function in two
    equations."""
    return any(
        node.op == annotate_p.name
        and node.outputs == (operand,)
        and node.params["pin"].sharding == pin.sharding
        for node in nodes[-1:]
    )
