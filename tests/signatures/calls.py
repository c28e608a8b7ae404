"""Equations of small calls, and values for them that few bits represent exactly."""

import functools
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sbp import _jax
from sbp.signatures import Op, Row, Rule, rule_for

CLIP, FILL, PROMISE = (
    jax.lax.GatherScatterMode.CLIP,
    jax.lax.GatherScatterMode.FILL_OR_DROP,
    jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS,
)


@dataclass(frozen=True, slots=True)
class Equation:
    """One equation with the values of its operands."""

    op: Op
    primitive: Any
    args: tuple[Any, ...]


@functools.cache
def primitives() -> dict[str, Any]:
    """The primitives that JAX has loaded, by name."""
    return {p.name: p for p in gc.get_objects() if isinstance(p, _jax.Primitive)}


NEWER = frozenset({"log2", "one_minus_square", "polynomial"})
"""Primitives that the oldest supported JAX lacks."""


def skip_where_jax_lacks(name: str) -> None:
    """Skips a test of a primitive that only newer JAX has; fails for another primitive that is
    absent."""
    if name not in primitives():
        assert name in NEWER, f"JAX {jax.__version__} has no primitive {name!r}"
        pytest.skip("this JAX has no such primitive")


def equation(name: str, fn: Callable[..., Any], args: tuple[Any, ...]) -> Equation:
    """The first equation of a primitive in the trace of a call."""
    jaxpr, consts = _jax.open_jaxpr(jax.make_jaxpr(fn)(*args))
    found = next(_find(name, jaxpr, consts, args), None)
    assert found is not None, f"{name} is not in\n{jaxpr}"
    return found


def _literal(literal: Any) -> np.ndarray:
    return np.asarray(literal.val, literal.aval.dtype)


def _find(name: str, jaxpr: Any, consts: Any, args: Any) -> Iterator[Equation]:
    env: dict[Any, Any] = dict(
        zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True)
    )
    for eqn in jaxpr.eqns:
        values: list[Any] = [
            _literal(v) if isinstance(v, _jax.Literal) else env[v] for v in eqn.invars
        ]
        if eqn.primitive.name == name:
            plain = tuple(_jax.empty_aval(v.aval.shape, v.aval.dtype) for v in eqn.invars)
            results = tuple(_jax.empty_aval(v.aval.shape, v.aval.dtype) for v in eqn.outvars)
            yield Equation(
                Op(name, dict(eqn.params), plain, results, 1), eqn.primitive, tuple(values)
            )
        for inner in ("jaxpr", "call_jaxpr"):
            if eqn.primitive.name in ("jit", "custom_jvp_call") and inner in eqn.params:
                yield from _find(name, *_jax.open_jaxpr(eqn.params[inner]), values)
        env.update(zip(eqn.outvars, _jax.bind(eqn.primitive, values, eqn.params), strict=True))


def on(eqn: Equation, n: int) -> Op:
    """The operation of an equation on a mesh axis of n devices."""
    return Op(eqn.op.name, eqn.op.params, eqn.op.ins, eqn.op.outs, n)


def rows(eqn: Equation, n: int) -> tuple[Row, ...]:
    """The rows of an equation on a mesh axis of n devices."""
    return tuple(rule_of(eqn.op.name).rows(on(eqn, n)))


def rule_of(name: str) -> Rule:
    """The rule of a primitive that has one."""
    found = rule_for(name)
    assert found is not None
    return found


# ---- values -------------------------------------------------------------------------------------


def f(
    *shape: int, seed: int = 0, low: int = -16, high: int = 16, dtype: Any = np.float32
) -> np.ndarray:
    """Quarters in [-4, 4)."""
    return (np.random.default_rng([seed, *shape]).integers(low, high, shape) / 4).astype(dtype)


def i(
    *shape: int, seed: int = 0, low: int = -9, high: int = 9, dtype: Any = np.int32
) -> np.ndarray:
    """Small integers."""
    return np.random.default_rng([seed, *shape]).integers(low, high, shape).astype(dtype)


def u(*shape: int, seed: int = 0) -> np.ndarray:
    """32 random bits."""
    return np.random.default_rng([seed, *shape]).integers(0, 2**32, shape, dtype=np.uint32)


def b(*shape: int, seed: int = 0) -> np.ndarray:
    """Booleans."""
    return np.random.default_rng([seed, *shape]).integers(0, 2, shape).astype(np.bool_)


def c(*shape: int, seed: int = 0) -> np.ndarray:
    """Complex quarters."""
    return (f(*shape, seed=seed) + 1j * f(*shape, seed=seed + 1)).astype(np.complex64)


def bf(*shape: int, seed: int = 0) -> Any:
    """Quarters in bfloat16."""
    return f(*shape, seed=seed).astype(jnp.bfloat16)


def keys(*shape: int) -> Any:
    """PRNG keys."""
    return jax.random.split(jax.random.key(7), shape) if shape else jax.random.key(7)


def bind(name: str, **params: Any) -> Callable[..., Any]:
    """A call of a primitive that has no public function."""
    return lambda *args: primitives()[name].bind(*args, **params)


# ---- samples ------------------------------------------------------------------------------------

Sample = tuple[Callable[..., Any], tuple[Any, ...]]

SAMPLES: dict[str, list[Sample]] = {}
"""Sample calls of each primitive."""


def more(*tables: dict[str, list[Sample]]) -> None:
    """Adds samples of primitives, by their names."""
    for table in tables:
        for name, samples in table.items():
            SAMPLES.setdefault(name, []).extend(samples)


_EQUATIONS: dict[int, tuple[list[Sample], list[Equation]]] = {}


def equations(name: str, samples: list[Sample]) -> list[Equation]:
    """The equations of a list of samples; each list is traced and evaluated once per process.

    Arguments:
      name: the primitive of the equations.
      samples: calls that have an equation of it each; the list is kept, and must not change.
    """
    kept = _EQUATIONS.get(id(samples))
    if kept is None or len(kept[1]) != len(samples):
        kept = samples, [equation(name, fn, args) for fn, args in samples]
        _EQUATIONS[id(samples)] = kept
    return kept[1]
