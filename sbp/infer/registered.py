"""Signatures that users registered are held against numbers before they type a program."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sbp import _jax
from sbp.signatures.custom import custom_for
from sbp.signatures.laws.refutation import Custom, Sample
from sbp.trace.build import trace
from sbp.trace.evaluate import evaluate
from sbp.trace.graph import Graph, Node

MAX_ELEMENTS = 4096
"""Elements of operands and results up to which an equation is checked as it stands; larger ones are
checked on samples."""

MAX_DEVICES = 64
"""Largest mesh axis that a signature is checked on."""


def check_registered(graph: Graph, sizes: Sequence[int]) -> None:
    """Checks the registered signatures of a program's operations, each once for its parameters,
    shapes and axis sizes.

    Arguments:
      graph: the program.
      sizes: sizes of the mesh axes.

    Raises:
      SbpError: `wrong-signature` with a counterexample; `bad-argument` for rows that do not fit the
        equation, and for operands that are too large to check, without samples.
    """
    axes = sorted({2, 3, *(n for n in sizes if 1 < n <= MAX_DEVICES)})
    for node in graph.walk():
        custom = custom_for(node.op)
        if custom is None:
            continue
        ins, outs = [graph.aval(o) for o in node.inputs], [graph.avals[o] for o in node.outputs]
        key = (*((tuple(a.shape), a.dtype) for a in (*ins, *outs)), _hashable(node.params), *axes)
        if key in custom.checked:
            continue
        if sum(math.prod(a.shape) for a in (*ins, *outs)) <= MAX_ELEMENTS:
            custom.refute(
                node.primitive, node.params, [drawn(a, k) for k, a in enumerate(ins)], outs, axes
            )
        elif not custom.samples:
            shapes = ", ".join(f"{a.dtype}{list(a.shape)}" for a in ins)
            raise custom.error(
                f"operands {shapes} are too large to check it on; give samples=[(function, small"
                " arguments)]"
            )
        for primitive, params, args, results in _instances(custom, axes):
            custom.refute(primitive, params, args, results, axes)
        custom.checked.add(key)


def drawn(aval: Any, seed: int) -> Any:
    """Values of an operand: quarters of both signs, small integers, booleans, keys."""
    rng = np.random.default_rng([seed, zlib.crc32(str(aval.dtype).encode()), *aval.shape])
    if _jax.is_extended(aval.dtype):
        words = rng.integers(0, 2**32, (*aval.shape, *_jax.key_shape(aval.dtype)), dtype=np.uint32)
        return _jax.wrap_key(jnp.asarray(words), aval.dtype)
    if aval.dtype == np.bool_:
        return rng.random(aval.shape) < 0.5
    if jnp.issubdtype(aval.dtype, np.integer):
        low = 0 if jnp.issubdtype(aval.dtype, np.unsignedinteger) else -9
        return rng.integers(low, 9, aval.shape).astype(aval.dtype)
    return np.asarray(rng.integers(-16, 16, aval.shape) / 4).astype(aval.dtype)


Instance = tuple[Any, dict[str, Any], Sequence[Any], Sequence[Any]]


def _instances(custom: Custom, axes: Sequence[int]) -> Iterator[Instance]:
    """The operation's equations in the samples, with the values of their operands."""
    for k, sample in enumerate(custom.samples):
        key = "sample", k, *axes
        if key not in custom.checked:
            found = list(_in_sample(custom.name, sample))
            if not found:
                raise custom.error(f"sample {k} does not call it")
            yield from found
            custom.checked.add(key)


def _in_sample(name: str, sample: Sample) -> Iterator[Instance]:
    fn, args = sample
    leaves, tree = jax.tree.flatten(args)
    values = [
        drawn(x, k) if isinstance(x, jax.ShapeDtypeStruct) else jnp.asarray(x)
        for k, x in enumerate(leaves)
    ]

    def call(*flat: Any) -> Any:
        return fn(*jax.tree.unflatten(tree, flat))

    graph, _ = trace(call, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in values])
    found: list[Instance] = []

    def seen(node: Node, operands: Sequence[Any]) -> list[Any]:
        outs = [graph.avals[o] for o in node.outputs]
        found.append((node.primitive, node.params, [_value(x) for x in operands], outs))
        return jax.jit(lambda *xs: _jax.bind(node.primitive, xs, node.params))(*operands)

    evaluate(graph, values, {name: seen})
    yield from found


def _value(x: Any) -> Any:
    return x if _jax.is_extended(x.dtype) else np.asarray(x)


def _hashable(params: dict[str, Any]) -> tuple[Any, ...]:
    """Parameters as a key. Jaxprs, which every trace makes anew, count as the text they show."""
    return tuple(
        (name, v.tobytes() if isinstance(v := params[name], np.ndarray) else repr(v))
        for name in sorted(params)
    )
