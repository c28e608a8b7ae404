"""`jax.jit` as JAX's own tests see it here: `sbp.jit` on a 2x4 mesh where the call is outermost."""

import functools
import hashlib
import random
import types
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import api, core, test_util as jtu

import sbp

SHAPE, AXES = (2, 4), ("x", "y")
HONOURED = {"static_argnums", "static_argnames", "donate_argnums", "donate_argnames"}
"""The keywords that go to `sbp.jit`. A call with others (devices, shardings on meshes of the
test's own) is left to `jax.jit`."""

plain_jit = jax.jit


class Calls:
    """How many calls of this process went through `sbp.jit`."""

    count = 0


def random_types(args: tuple[Any, ...], seed: str) -> tuple[Any, ...]:
    """A type for each argument, drawn from its shape and dtype."""
    shapes = repr(jax.tree.map(lambda x: (np.shape(x), str(getattr(x, "dtype", ""))), args))
    rng = random.Random(hashlib.md5((shapes + seed).encode()).hexdigest())

    def pin(x: Any) -> sbp.NdSbp | None:
        dtype = getattr(x, "dtype", np.dtype(np.float32))
        if not np.ndim(x) or rng.random() < 0.3 or jnp.issubdtype(dtype, jax.dtypes.prng_key):
            return None
        dims = {axis: rng.randrange(-1, np.ndim(x)) for axis in AXES}
        split = {axis: sbp.S(d) for axis, d in dims.items() if d >= 0 and np.shape(x)[d] > 0}
        return sbp.NdSbp(split) if split else None

    return tuple(jax.tree.map(pin, args))


class OutermostJit:
    """`sbp.jit` of a function where it is called outermost with keywords it takes; `jax.jit`
    elsewhere.

    Arguments:
      fn: the function.
      keywords: those of `jax.jit`.
      mesh: the mesh of `sbp.jit`.
      pins: the seed of random types of the arguments; empty for free types.
    """

    def __init__(
        self, fn: Callable[..., Any], keywords: dict[str, Any], mesh: jax.sharding.Mesh, pins: str
    ):
        self.fn, self.inner, self.mesh, self.pins = fn, plain_jit(fn, **keywords), mesh, pins
        self.keywords = {k: v for k, v in keywords.items() if v is not None}
        self.made: dict[str, Any] = {}
        functools.update_wrapper(self, fn, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        traced = any(isinstance(x, core.Tracer) for x in jax.tree.leaves((args, kwargs)))
        if set(self.keywords) - HONOURED or traced or not core.trace_state_clean():
            return self.inner(*args, **kwargs)
        pinned = bool(self.pins) and not kwargs and not self.keywords
        pins = random_types(args, self.pins) if pinned else None
        if repr(pins) not in self.made:
            self.made[repr(pins)] = sbp.jit(self.fn, self.mesh, in_types=pins, **self.keywords)
        Calls.count += 1
        with warnings.catch_warnings(action="ignore", category=sbp.SbpWarning):
            return self.made[repr(pins)](*args, **kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def install(pins: str) -> None:
    """Puts `OutermostJit` in the place of `jax.jit` for the tests and their helper."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(SHAPE), AXES)

    def jit(fn: Callable[..., Any] | None = None, **keywords: Any) -> Any:
        if fn is None:
            return functools.partial(jit, **keywords)
        return OutermostJit(fn, keywords, mesh, pins)

    helper: Any = jtu
    assert helper.api is api, "the tests' helper compiles with jax._src.api.jit"
    # JAX runs single operators through `api.jit`; these stay as they are.
    helpers_api: Any = types.ModuleType("api")
    helpers_api.__dict__.update(vars(api), jit=jit)
    helper.api = helpers_api
    jax.jit = jit
