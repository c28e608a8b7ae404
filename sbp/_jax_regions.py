"""Traces a program whose `jax.shard_map`s run on another mesh. Like `_jax`, this file touches JAX's
internal modules."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from jax._src import source_info_util as _source_info
from jax._src.shard_map import shard_map_p as _shard_map_p

Bind = Callable[[tuple[Any, ...], dict[str, Any]], Any]
"""Binds a region: takes its operands and its parameters, and gives its results."""


_ONE_AT_A_TIME = threading.RLock()
"""Of two threads that replace the function, the first to end would put back what the second one
replaced."""


@contextlib.contextmanager
def regions_bound_by(act: Callable[[Bind, tuple[Any, ...], dict[str, Any]], Any]) -> Iterator[None]:
    """While it is open, `act` binds each region that this thread traces.

    A trace has no hook for the mesh of a region, and the body as JAX traced it has the sizes of
    that mesh in it. So the function that binds the primitive is replaced for the time of a trace.

    Arguments:
      act: takes JAX's own way to bind a region, its operands, and its parameters.
    """
    with _ONE_AT_A_TIME:
        yield from _bound_by(act)


def _bound_by(act: Callable[[Bind, tuple[Any, ...], dict[str, Any]], Any]) -> Iterator[None]:
    bind, thread = _shard_map_p.bind, threading.get_ident()

    def own(args: tuple[Any, ...], params: dict[str, Any]) -> Any:
        return bind(*args, **params)

    def bound(*args: Any, **params: Any) -> Any:
        if threading.get_ident() != thread:
            return bind(*args, **params)
        return act(own, args, params)

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
    return _source_info.is_user_filename(code.co_filename)
