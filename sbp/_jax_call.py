"""What `jax.jit` does around a call: its configuration, its mesh, its arguments and its names. Like
`_jax`, this file touches JAX's internal modules."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax._src import ad_checkpoint as _ad_checkpoint
from jax._src import api_util as _api_util
from jax._src import config as _config
from jax._src import core as _core
from jax._src import named_sharding as _named_sharding
from jax._src import pjit as _pjit
from jax.sharding import AbstractMesh, AxisType, Mesh

_WITHOUT_MESH = next(
    (part for part in _config.trace_context() if isinstance(part, AbstractMesh)), None
)
"""What stands in the key where the context has no mesh: None, or an empty mesh."""


def trace_key() -> Any:
    """Everything in JAX's configuration that changes what a function traces to: the key of its own
    caches. A mesh of the context without Explicit axes changes nothing, and is left out."""
    key = _config.trace_context()
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or AxisType.Explicit in mesh.axis_types:
        return key
    return tuple(_WITHOUT_MESH if isinstance(part, AbstractMesh) else part for part in key)


def transforming() -> bool:
    """Whether JAX is inside a transformation: jit, grad, vmap or another one."""
    return not _core.trace_state_clean()


def forwarded(value: Any) -> Any:
    """The value that calls of `jax.jit` and `jax.checkpoint` return unchanged; the value itself for
    another one."""
    call = getattr(value, "parent", None)
    if call is None or call.primitive not in _CALLS:
        return value
    source = _returned_operand(call, call.outvars.index(value.val))
    return value if source is None else forwarded(call.in_tracers[source])


_CALLS = {_pjit.jit_p, _ad_checkpoint.remat_p}


def _returned_operand(call: Any, result: int) -> int | None:
    """The position of the operand that a call returns as this result; None for none."""
    inner = getattr(call.params["jaxpr"], "jaxpr", call.params["jaxpr"])
    var = inner.outvars[result]
    for eqn in reversed(inner.eqns):
        position = _position(var, eqn.outvars)
        if position is None:
            continue
        source = _returned_operand(eqn, position) if eqn.primitive in _CALLS else None
        if source is None:
            return None
        var = eqn.invars[source]
    return _position(var, inner.invars)


def _position(var: Any, among: Sequence[Any]) -> int | None:
    return next((i for i, other in enumerate(among) if other is var), None)


def is_unspecified(x: Any) -> bool:
    """Whether a value is what `jax.jit` takes as "no sharding is asked for"."""
    return isinstance(x, _named_sharding.UnspecifiedValue)


def context_mesh() -> Mesh | AbstractMesh | None:
    """The mesh of `jax.set_mesh`, or of `jax.sharding.use_abstract_mesh`; None for none."""
    mesh = jax.sharding.get_abstract_mesh() if transforming() else jax.sharding.get_mesh()
    if mesh.empty:
        mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty else mesh


@contextlib.contextmanager
def without_context_mesh() -> Iterator[None]:
    """Hides the mesh of `jax.set_mesh`, its devices included: a call on arrays runs where these
    are."""
    empty = AbstractMesh((), ())
    with jax.sharding.use_abstract_mesh(empty) if transforming() else jax.set_mesh(None):
        yield


def jit_is_disabled() -> bool:
    """Whether `jax.disable_jit` holds."""
    return bool(_config.disable_jit.value)


def needs_jit() -> bool:
    """Whether JAX's configuration asks for work that calls of `jax.jit` do, and calls of what is
    compiled ahead do not: finding the operation that made a NaN or an infinity, and compiling again
    with a profile."""
    asked = (_config.debug_nans, _config.debug_infs, _config.enable_pgle)
    return any(option.value for option in asked)


def check_callable(fn: Any) -> None:
    """JAX's own check of a function that it shall trace.

    Raises:
      TypeError: as `jax.jit` does.
    """
    _api_util.check_callable(fn)


def argument_numbers(
    fn: Any, signature: inspect.Signature | None, static: Sequence[Any], donated: Sequence[Any]
) -> tuple[tuple[tuple[int, ...], tuple[str, ...]], tuple[tuple[int, ...], tuple[str, ...]]]:
    """JAX's own reading of static and donated arguments.

    Arguments:
      fn: the function.
      signature: its signature; None where Python has none.
      static: `static_argnums` and `static_argnames`.
      donated: `donate_argnums` and `donate_argnames`.

    Returns:
      Numbers and names of the static arguments, and of the donated ones.

    Raises:
      TypeError, ValueError: as `jax.jit` does.
    """
    donate_numbers, donate_names, static_numbers, static_names = _api_util.resolve_argnums(
        fn, signature, *donated, *static
    )
    return (static_numbers, static_names), (donate_numbers, donate_names)


def traced_as(
    fn: Callable[..., Any], users: Callable[..., Any], arguments: Sequence[str]
) -> Callable[..., Any]:
    """A function of flat arguments that the errors of JAX's tracing call by the user's function and
    arguments, as under `jax.jit`.

    Arguments:
      fn: the function that is traced.
      users: the function of the user that it runs.
      arguments: the user's names of the flat arguments.
    """
    info = _api_util.debug_info(jax.jit.__name__, users, (), {})
    _api_util.save_wrapped_fun_debug_info(fn, info._replace(arg_names=tuple(arguments)))
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
    info = _api_util.debug_info("sbp.jit", fn, (), {})
    _api_util.save_wrapped_fun_debug_info(fn, info._replace(arg_names=tuple(arguments)))
    return fn
