"""The only file that touches JAX's internal and extension modules, and the only one with branches
on its version."""

import contextlib
import contextvars
import functools
import inspect
import itertools
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax._src import (
    ad_checkpoint,
    api_util,
    config,
    core,
    debugging,
    distributed,
    named_sharding,
    pjit,
    source_info_util,
)
from jax._src.core import ShapedArray, Tracer
from jax._src.interpreters import (
    ad as _ad,
    batching as _batching,
    mlir as _mlir,
    partial_eval as _pe,
)
from jax._src.mesh import get_concrete_mesh
from jax._src.shard_map import ShardMapTrace, shard_map_p as _shard_map_p
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Primitive, Var
from jax.extend.random import threefry2x32_p
from jax.interpreters import ad, batching, mlir, partial_eval as pe
from jax.sharding import AbstractMesh, AxisType, Mesh

from sbp.errors import Span
from sbp.frames import tracebacks

__all__ = [
    "ClosedJaxpr",
    "Jaxpr",
    "Literal",
    "Primitive",
    "ShapedArray",
    "Tracer",
    "Var",
    "ad",
    "batching",
    "mlir",
    "threefry2x32_p",
]

ENDS_ON_AXIS_NAMES = jax.__version_info__ < (0, 12)
"""Whether the process ends where a mesh of devices has an axis whose name has characters outside
ASCII, or one of several devices a backslash, seen up to JAX 0.11
(`tests/machine/test_network.py`)."""

MERGES_SLICES = jax.__version_info__ < (0, 12)
"""Whether XLA for CPU drops the bounds of the inner one of two slices, seen up to JAX 0.11."""

# Frames of sbp itself are never the user's: diagnostics point at the line that called it. `sbp.moe`
# is a user of sbp. Frames have the path of the import, as in `notebooks/../sbp/_jax.py`.
_HERE = os.path.dirname(__file__) + os.sep
for _entry in sorted(os.listdir(_HERE)):
    if _entry != "moe":
        source_info_util.register_exclusion(_HERE + _entry)


def open_jaxpr(value: Any) -> tuple[Jaxpr, Sequence[Any]]:
    """The open jaxpr and its constants, for open and closed jaxprs of every supported version."""
    return getattr(value, "jaxpr", value), tuple(getattr(value, "consts", ()))


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """How many of a scan's operands are constants and carries; JAX 0.11 replaced the two numbers by
    a tree of operands."""
    if "num_consts" in params:
        return int(params["num_consts"]), int(params["num_carry"])
    consts, carry, _ = params["ft_in"].unpack()
    return len(list(consts)), len(list(carry))


def own_traces(name: str) -> contextlib.AbstractContextManager[Any]:
    """JAX takes no trace that it cached under another name: a function that it has seen before is
    traced anew."""
    return core.extend_axis_env_nd([(name, 1)])


def unbound_axis(error: NameError) -> str | None:
    """The mesh axis that a collective did not find, by JAX's complaint; None for another error."""
    found = re.search(r"unbound axis name: (\w+)", str(error))
    return found.group(1) if found else None


def make_jaxpr(fn: Callable[..., Any], args: Sequence[Any]) -> tuple[ClosedJaxpr, Any]:
    """Traces `fn` on flat ShapeDtypeStructs; returns the closed jaxpr with all inputs, without
    equations whose results nobody reads, inside scans and branches too, and the output tree."""
    closed, out_shape = jax.make_jaxpr(fn, return_shape=True)(*args)
    jaxpr, consts = open_jaxpr(closed)
    pruned, _ = pe.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
    return ClosedJaxpr(pruned, consts), out_shape


_LOWERED = mlir.lower_fun(lambda x: x).__code__


def lowering_function(primitive: Primitive, platform: str | None) -> Callable[..., Any] | None:
    """The function of JAX arrays that a primitive is lowered to, as a function that gives all its
    results; None for a primitive that is lowered in another way.

    Arguments:
      primitive: the primitive.
      platform: JAX's name of the platform that the program is lowered for.
    """
    own = vars(_mlir)["_platform_specific_lowerings"].get(platform, {})
    entry = own.get(primitive) or vars(_mlir)["_lowerings"].get(primitive)
    rule: Any = getattr(entry, "rule", None)
    if getattr(rule, "__code__", None) is not _LOWERED:
        return None
    inner = inspect.getclosurevars(rule).nonlocals
    function, many = inner["fun"], inner["multiple_results"]
    return function if many else lambda *args, **params: [function(*args, **params)]


class OwnPrimitive(Primitive):
    """A primitive that runs as a function of arrays, with one result or `many`; `abstract` gives
    their avals."""

    def __init__(self, name: str, function: Any, abstract: Any, *, many: bool = False) -> None:
        super().__init__(name)
        self.multiple_results = many
        self.def_impl(function)
        self.def_abstract_eval(abstract)
        mlir.register_lowering(self, mlir.lower_fun(function, multiple_results=many))


def set_rules(
    primitive: Primitive,
    jvp: Callable[..., Any],
    transpose: Callable[..., Any],
    batch: Callable[..., Any],
) -> None:
    """Gives a primitive its rules for derivatives and `jax.vmap`."""
    ad.primitive_jvps[primitive] = jvp
    ad.primitive_transposes[primitive] = transpose
    batching.primitive_batchers[primitive] = batch


def op_name(eqn: Any) -> str:
    """What an equation is called: its primitive's name, after which a Pallas call and
    `custom_partitioning` name their function."""
    name = eqn.primitive.name
    match name:
        case "pallas_call":
            function = (
                eqn.params.get("name") or open_jaxpr(eqn.params["jaxpr"])[0].debug_info.func_name
            )
        case "custom_partitioning":
            function = open_jaxpr(eqn.params["call"])[0].debug_info.func_name
        case _:
            return name
    return f"{name}:{function}" if re.fullmatch(r"[\w.-]+", function) else name


CHECKED_REGION = "sbp.manual"
"""The name of the function in a region that sbp has made and checked."""


def title_of(eqn: Any) -> str:
    """What the user knows an equation as, where that is not its primitive; empty for others."""
    name = eqn.params["jaxpr"].debug_info.func_name if eqn.primitive is _shard_map_p else ""
    return name if name == CHECKED_REGION else ""


def frames_of(traceback: Any) -> tuple[Span, ...]:
    """The user's frames of a traceback, innermost first, with exact columns (1-based)."""
    return tuple(_span_of(frame) for frame in source_info_util.user_frames(traceback))


_LIBRARY = os.path.join(os.path.dirname(os.path.abspath(jax.__file__)), "_src") + os.sep


def library_of(traceback: Any) -> tuple[str, ...]:
    """The functions of JAX that made an equation, below the user's innermost frame, innermost
    first: `lax.parallel.psum` and `lax.parallel.pmean` for the sum in a `lax.pmean`.

    Tracing and autodiff have their own folders in JAX, and are left out.
    """
    paths = (
        (code.co_qualname, *code.co_filename.removeprefix(_LIBRARY).partition(os.sep))
        for code in below_user(traceback)
        if code.co_filename.startswith(_LIBRARY)
    )
    return tuple(
        dict.fromkeys(
            f"{folder}.{module.removesuffix('.py').replace(os.sep, '.')}"
            f".{function.split('.<locals>')[0]}"
            for function, folder, _, module in paths
            if module and folder != "interpreters"
        )
    )


def below_user(traceback: Any) -> list[Any]:
    """The code of JAX's functions below the user's innermost frame, innermost first."""
    codes = traceback.raw_frames()[0] if traceback else ()
    return list(itertools.takewhile(lambda code: not of_user(code), codes))


def in_users_rule(source_info: Any) -> bool:
    """Whether the user's rule of a `custom_vjp` made an equation, which has the rule's own line."""
    traceback = source_info and source_info.traceback
    codes = traceback.raw_frames()[0] if traceback else ()
    return any(code.co_name == _RULE for code in codes)


_RULE = "_transpose_users_rule"
_OWN_LINES = contextvars.ContextVar("own_lines", default=False)
_lin = _ad.custom_lin_p
# JAX 0.11 moved the rule.
_rules = ad.primitive_transposes if _lin in ad.primitive_transposes else _ad.fancy_transposes
_transpose_rule: Callable[..., Any] = _rules[_lin]


def _transpose_users_rule(results: Any, *args: Any, bwd: Any, **params: Any) -> Any:
    """Runs the backward rule of a `custom_vjp`. In a trace of sbp, operations of the user's rule
    have the lines of the rule. JAX gives them the line of the call in the forward pass."""
    names = source_info_util.current_name_stack()
    is_users = source_info_util.is_user_filename(bwd.debug_info.func_filename or "")
    with source_info_util.set_name_stack(names):  # at its end, the context is as before
        if _OWN_LINES.get() and is_users:
            context = vars(source_info_util)["_source_info_context"]
            context.context = source_info_util.SourceInfo(None, names)
        return _transpose_rule(results, *args, bwd=bwd, **params)


_rules[_lin] = _transpose_users_rule


@contextlib.contextmanager
def rules_at_own_lines() -> Iterator[None]:
    """While it is open, traces of this thread have the lines of the user's backward rules."""
    token = _OWN_LINES.set(True)
    try:
        yield
    finally:
        _OWN_LINES.reset(token)


def _span_of(frame: Any) -> Span:
    return Span(
        file=frame.file_name,
        line=frame.start_line,
        column=frame.start_column + 1,
        end_line=frame.end_line,
        end_column=frame.end_column + 1,
        function=frame.function_name.rsplit("<locals>.", 1)[-1],
    )


def caller_frames() -> tuple[Span, ...]:
    """The user's frames that are calling sbp now, innermost first."""
    return frames_of(source_info_util.Traceback.get_traceback())


def caller_span() -> Span | None:
    """The user's line that is calling sbp now."""
    return next(iter(caller_frames()), None)


def raising_span(error: BaseException) -> Span | None:
    """The user's innermost line in the traceback of an error."""
    users = [
        (t.tb_frame.f_code, t.tb_lasti) for t in tracebacks(error) if of_user(t.tb_frame.f_code)
    ]
    return _span_of(source_info_util.raw_frame_to_frame(*users[-1])) if users else None


@contextlib.contextmanager
def source_context(source_info: Any, scope: str | None = None) -> Iterator[None]:
    """Operations bound inside carry the user's traceback and name stack (profiles and HLO metadata
    point home).

    Arguments:
      source_info: JAX's record of an equation; None for none.
      scope: the name stack as a text; None for that of `source_info`.
    """
    if source_info is None:
        yield
        return
    stack = source_info.name_stack if scope is None else source_info_util.new_name_stack(scope)
    with source_info_util.user_context(source_info.traceback, name_stack=stack):
        yield


def bind(primitive: Primitive, args: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    """Binds a first-order primitive under its settings; always returns a list."""
    with holding(params) as own:
        out = primitive.bind(*args, **own)
    return list(out) if primitive.multiple_results else [out]


def eval_jaxpr(jaxpr: Any, args: Sequence[Any]) -> list[Any]:
    """Evaluates an open or closed jaxpr on arguments."""
    opened, consts = open_jaxpr(jaxpr)
    return core.eval_jaxpr(opened, consts, *args)


def empty_aval(
    shape: Sequence[int], dtype: Any, weak_type: bool = False, host: bool = False
) -> ShapedArray:
    """A shaped aval without sharding, of a value in device memory or in host memory."""
    return ShapedArray(tuple(shape), dtype, weak_type=weak_type, memory_space=space_of(host))


def plain_aval(aval: Any) -> ShapedArray:
    """An aval's shape, dtype, weak type and memory, without sharding."""
    weak_type = bool(getattr(aval, "weak_type", False))
    return empty_aval(aval.shape, aval.dtype, weak_type, in_host(aval))


def space_of(host: bool) -> Any:
    """JAX's name of host memory or of device memory."""
    return jax.memory.Space.Host if host else jax.memory.Space.Device


def in_host(aval: Any) -> bool:
    """Whether a value lies in host memory (`pinned_host`), by JAX's type of it."""
    return getattr(aval, "memory_space", None) is jax.memory.Space.Host


@functools.cache
def transfer(host: bool) -> tuple[Primitive, dict[str, Any]]:
    """The primitive, with its parameters, that copies a value to host memory or to device
    memory."""
    (eqn,) = jax.make_jaxpr(lambda x: jax.device_put(x, space_of(host)))(0.0).jaxpr.eqns
    return eqn.primitive, dict(eqn.params)


def with_weak_type(x: Any, weak_type: bool) -> Any:
    """A traced array with another weak type. Keys have none and stay as they are."""
    aval = jax.typeof(x)
    if bool(getattr(aval, "weak_type", False)) == weak_type or is_extended(aval.dtype):
        return x
    return jax.lax.convert_element_type_p.bind(
        x, new_dtype=aval.dtype, weak_type=weak_type, sharding=None
    )


def is_ordered_debug(params: dict[str, Any]) -> bool:
    """Whether an equation has the parameters of an ordered `jax.debug.print` or
    `jax.debug.callback`."""
    return params.get("effect") is debugging.ordered_debug_effect or (
        "fmt" in params and bool(params.get("ordered"))
    )


def is_extended(dtype: Any) -> bool:
    """Whether a dtype is one of JAX's extended dtypes (new-style PRNG keys)."""
    return jnp.issubdtype(dtype, jax.dtypes.extended)


def key_shape(dtype: Any) -> tuple[int, ...]:
    """The words of one key of a PRNG key dtype."""
    return tuple(dtype._impl.key_shape)


def wrap_key(words: Any, dtype: Any) -> Any:
    """Words as keys of a PRNG key dtype."""
    return jax.random.wrap_key_data(words, impl=dtype._impl.name)


def words(x: Any) -> Any:
    """The words of an array of PRNG keys; any other value as it is."""
    return jax.random.key_data(x) if is_extended(getattr(x, "dtype", None)) else x


def distributed_client() -> Any:
    """The client of `jax.distributed`, with its key-value store; None where it was not
    initialised."""
    return distributed.global_state.client


def itemsize(dtype: Any) -> int:
    """Bytes of one element; keys count their words."""
    if is_extended(dtype):
        return 4 * max(1, int(getattr(getattr(dtype, "_impl", None), "key_shape", (2,))[0]))
    return dtype.itemsize


def scope_constraints(scope: Any) -> tuple[str, ...]:
    """The constraints of a `jax.export.SymbolicScope`, as they were written."""
    return tuple(c.debug_str for c in scope._explicit_constraints)


def is_jaxpr(value: Any) -> bool:
    """Whether a parameter of an equation is a jaxpr."""
    return isinstance(value, Jaxpr | ClosedJaxpr)


def jaxprs_in(eqn: Any) -> Iterator[Any]:
    """The jaxprs among the parameters of an equation."""
    for value in eqn.params.values():
        yield from filter(is_jaxpr, value if isinstance(value, tuple | list) else (value,))


def avals_in(jaxpr: Any) -> list[Any]:
    """The avals of all that a jaxpr computes."""
    opened, _ = open_jaxpr(jaxpr)
    return [v.aval for v in opened.invars] + [v.aval for eqn in opened.eqns for v in eqn.outvars]


def without_elements(shape: Sequence[int], aval: Any) -> Any:
    """An array of a shape that has no elements, with the dtype and in the memory of an aval."""
    dtype = aval.dtype
    x = (
        wrap_key(jnp.zeros((*shape, *key_shape(dtype)), jnp.uint32), dtype)
        if is_extended(dtype)
        else jnp.zeros(shape, dtype)
    )
    return jax.device_put(x, space_of(True)) if in_host(aval) else x


# ---- settings -----------------------------------------------------------------------------------
# Settings of JAX that a function makes for a part of itself, as `with
# jax.threefry_partitionable(False)` does. JAX keeps them on the equations of that part.


SETTINGS = "settings"
"""The name of an equation's settings among the parameters of its node."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of an equation.

    Arguments:
      threefry_partitionable: the counters that random bits are drawn with.
      xla_metadata: names and values for the operations of the compiled program.
    """

    threefry_partitionable: bool
    xla_metadata: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def current(cls) -> "Settings":
        """Those that hold where sbp is called, without metadata: the equations have that."""
        return cls(bool(getattr(jax.config, "jax_threefry_partitionable", True)))

    @classmethod
    def of(cls, eqn: Any, around: tuple[tuple[str, Any], ...] = ()) -> "Settings":
        """Those of an equation, with the metadata of the calls around it."""
        metadata = {**dict(around), **(eqn.ctx.xla_metadata or {})}
        return cls(bool(eqn.ctx.threefry_partitionable), tuple(sorted(metadata.items())))


def compute_type_of(eqn: Any) -> str | None:
    """Where `compute_on` asks for an equation to run, such as `device_host`; None for nowhere
    else. Newer releases of JAX have a primitive for it."""
    return getattr(eqn.ctx, "compute_type", None)


def settings_of(params: dict[str, Any]) -> Settings:
    """The settings among a node's parameters; the current ones where it has none."""
    return params.get(SETTINGS) or Settings.current()


@contextlib.contextmanager
def holding(params: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Under the settings among a node's parameters; gives the parameters without them."""
    if SETTINGS not in params:
        yield params
        return
    own = params[SETTINGS]
    with (
        jax.threefry_partitionable(own.threefry_partitionable),
        set_xla_metadata(**dict(own.xla_metadata)),
    ):
        yield {name: value for name, value in params.items() if name != SETTINGS}


# ---- calls --------------------------------------------------------------------------------------
# What `jax.jit` does around a call: its configuration, its mesh, its arguments and its names.


_WITHOUT_MESH = next(
    (part for part in config.trace_context() if isinstance(part, AbstractMesh)), None
)
"""What stands in the key where the context has no mesh: None, or an empty mesh."""


def trace_key(mesh: Mesh | AbstractMesh) -> Any:
    """Everything in JAX's configuration that changes what a function traces to: the key of its own
    caches. A mesh of the context is left out if sbp hides it from the function, that is, if it has
    other axes than the mesh of the plan and no Explicit ones."""
    key, context = config.trace_context(), jax.sharding.get_abstract_mesh()
    if context.shape_tuple in ((), mesh.shape_tuple) or AxisType.Explicit in context.axis_types:
        return key
    return tuple(_WITHOUT_MESH if isinstance(part, AbstractMesh) else part for part in key)


def transforming() -> bool:
    """Whether JAX is inside a transformation: jit, grad, vmap or another one."""
    return not core.trace_state_clean()


def is_staged(values: Sequence[Any]) -> bool:
    """Whether a call with these values is traced, and does not run now."""
    return any(isinstance(x, Tracer) for x in values) or any(
        isinstance(t, _pe.DynamicJaxprTrace) for t in _traces(values)
    )


def is_mapped(values: Sequence[Any]) -> bool:
    """Whether a call with these values is inside `jax.vmap` or `jax.shard_map`, with no `jax.jit`
    between them: that is traced once for all of its calls."""
    mapping = _batching.BatchTrace | ShardMapTrace
    named = bool(core.get_axis_env().axis_sizes)
    return named or any(isinstance(t, mapping) for t in _traces(values))


def _traces(values: Sequence[Any]) -> Iterator[Any]:
    """The transformations around a call, up to the innermost `jax.jit`."""
    tracers: list[Any] = [x for x in values if isinstance(x, Tracer)]
    for trace in (core.trace_ctx.trace, *(x._trace for x in tracers)):
        while trace is not None:
            yield trace
            is_jit = isinstance(trace, _pe.DynamicJaxprTrace)
            trace = None if is_jit else getattr(trace, "parent_trace", None)


def primal_of(value: Any) -> Any:
    """The value that a transformation such as `jax.grad` differentiates at; others as they are."""
    while isinstance(value, Tracer) and hasattr(value, "primal"):
        value = value.primal
    return value


def forwarded(value: Any) -> Any:
    """The value that calls of `jax.jit` and `jax.checkpoint` return unchanged; the value itself for
    another one."""
    call = getattr(value, "parent", None)
    if call is None or call.primitive not in _CALLS:
        return value
    source = _returned_operands(call)[call.outvars.index(value.val)]
    return value if source is None else forwarded(call.in_tracers[source])


_CALLS = {pjit.jit_p, ad_checkpoint.remat_p}


def _returned_operands(call: Any) -> list[int | None]:
    """For each result of a call, the position of the operand that it returns there; None for
    none."""
    inner, _ = open_jaxpr(call.params["jaxpr"])
    known: dict[int, int | None] = {id(v): n for n, v in enumerate(inner.invars)}
    for eqn in (eqn for eqn in inner.eqns if eqn.primitive in _CALLS):
        for result, source in zip(eqn.outvars, _returned_operands(eqn), strict=True):
            if source is not None:
                known[id(result)] = known.get(id(eqn.invars[source]))
    return [known.get(id(v)) for v in inner.outvars]


def is_unspecified(x: Any) -> bool:
    """Whether a value is what `jax.jit` takes as "no sharding is asked for"."""
    return isinstance(x, named_sharding.UnspecifiedValue)


def context_mesh() -> Mesh | AbstractMesh | None:
    """The mesh of `jax.set_mesh`, or of `jax.sharding.use_abstract_mesh`; None for none."""
    abstract, mesh = jax.sharding.get_abstract_mesh(), get_concrete_mesh()
    if mesh.abstract_mesh != abstract:  # transformations set an abstract one
        return None if abstract.empty else abstract
    return None if mesh.empty else mesh


def without_context_mesh() -> contextlib.AbstractContextManager[Any]:
    """Hides the mesh of `jax.set_mesh`, its devices included: a call on arrays runs where these
    are."""
    empty = AbstractMesh((), ())
    return jax.sharding.use_abstract_mesh(empty) if transforming() else jax.set_mesh(None)


def needs_jit() -> bool:
    """Whether JAX's configuration asks for work that calls of `jax.jit` do, and calls of what is
    compiled ahead do not: finding the operation that made a NaN or an infinity, and compiling again
    with a profile."""
    return any(o.value for o in (config.debug_nans, config.debug_infs, config.enable_pgle))


check_callable = api_util.check_callable
"""JAX's own check of a function that it shall trace. It raises TypeError, as `jax.jit` does."""


def argument_numbers(
    fn: Any, signature: inspect.Signature | None, static: Sequence[Any], donated: Sequence[Any]
) -> tuple[tuple[tuple[int, ...], tuple[str, ...]], tuple[tuple[int, ...], tuple[str, ...]]]:
    """Numbers and names of the static arguments (from `static_argnums` and `static_argnames`), and
    of the donated ones, as `jax.jit` reads them. Raises its TypeErrors and ValueErrors."""
    donate_numbers, donate_names, static_numbers, static_names = api_util.resolve_argnums(
        fn, signature, *donated, *static
    )
    return (static_numbers, static_names), (donate_numbers, donate_names)


def traced_as(
    fn: Callable[..., Any],
    users: Callable[..., Any],
    arguments: Sequence[str],
    jit: str = jax.jit.__name__,
) -> Callable[..., Any]:
    """A function of flat arguments that the errors of JAX's tracing call by the user's function and
    arguments, as under `jax.jit`.

    Arguments:
      fn: the function that is traced.
      users: the function of the user that it runs.
      arguments: the user's names of the flat arguments.
      jit: the name of the transformation.
    """
    info = api_util.debug_info(jit, users, (), {})
    api_util.save_wrapped_fun_debug_info(fn, info._replace(arg_names=tuple(arguments)))
    return fn


def with_structures(lowered: Any, arguments: Any, results: Any) -> Any:
    """A `jax.stages.Lowered` of flat arguments and results, for arguments and results in the
    structures of a user's function.

    Arguments:
      lowered: of flat arguments and a flat tuple of results.
      arguments: the structure of (args, kwargs).
      results: the structure of what the function returns.
    """
    info = jax.tree.unflatten(arguments, jax.tree.leaves(lowered.args_info))
    return jax.stages.Lowered(lowered._lowering, info, results)


def named_function(
    fn: Callable[..., Any], name: str, arguments: Sequence[str]
) -> Callable[..., Any]:
    """A function that HLO, profiles and errors call by a user's name, and its flat arguments by
    theirs."""
    fn.__name__ = fn.__qualname__ = name
    return traced_as(fn, fn, arguments, "sbp.jit")


# ---- regions ------------------------------------------------------------------------------------
# Traces a program whose `jax.shard_map`s run on another mesh.


_ONE_AT_A_TIME = threading.RLock()
"""Of two threads that replace the function, the first to end would put back what the second one
replaced."""


@contextlib.contextmanager
def regions_bound_by(
    act: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any],
) -> Iterator[None]:
    """While it is open, `act` binds each region that this thread traces.

    A trace has no hook for the mesh of a region, and the body as JAX traced it has the sizes of
    that mesh in it. So the function that binds the primitive is replaced for the time of a trace.

    Arguments:
      act: takes JAX's own way to bind a region, its operands, and its parameters.
    """
    thread = threading.get_ident()
    with _ONE_AT_A_TIME:
        bind = _shard_map_p.bind

        def bound(*args: Any, **params: Any) -> Any:
            is_here = threading.get_ident() == thread
            return act(bind, args, params) if is_here else bind(*args, **params)

        _shard_map_p.bind = bound
        try:
            yield
        finally:
            _shard_map_p.bind = bind


def of_call(fn: Any) -> bool:
    """Whether a region's function is the one that `jax.shard_map` makes of the user's, and not one
    of a gradient."""
    return {"f", "out_specs"} <= set(fn.__code__.co_freevars)


def of_user(code: Any) -> bool:
    """Whether a code object is the user's, not JAX's or another library's that JAX hides."""
    return source_info_util.is_user_filename(code.co_filename)
