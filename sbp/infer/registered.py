"""Checks of the signatures of a program's primitives before they type it.

Primitives without a signature are named. Registered signatures are checked on numbers: each row is
tried on parts of the operands of a program's equations, or of the signature's samples."""

import math
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sbp import _jax
from sbp.annotations import annotate_p, as_array
from sbp.errors import Diagnostic, SbpError, bytes_text, note, warn
from sbp.kinds import fits, leaves_of, returning_arrays
from sbp.machine.mesh import MeshSpec
from sbp.signatures import REFUSED, rule_for
from sbp.signatures.custom import Custom, Sample, custom_for
from sbp.signatures.region import REGION_OPS
from sbp.trace.build import trace
from sbp.trace.evaluate import evaluate
from sbp.trace.graph import CONTROL_FLOW, Graph, Node

# ---- coverage -----------------------------------------------------------------------------------


TYPED_ELSEWHERE = CONTROL_FLOW | {annotate_p.name} | REGION_OPS
"""Nodes whose types follow from their regions, their pins or their specs."""


def check_rules(graph: Graph, mesh: MeshSpec) -> None:
    """Warns once of each primitive without a signature, which is computed on whole operands, and
    refuses primitives for which no type is right.

    Raises:
      SbpError: `unsupported-effect` for a primitive in `REFUSED`, and for ordered debug effects on
        several devices, which JAX refuses as well.
    """
    said: set[str] = set()
    for node in graph.walk():
        where = f" at {node.span}" if node.span else ""
        if node.op in REFUSED:
            raise SbpError(
                f"primitive {node.op!r}{where} {REFUSED[node.op]}; use jax.random",
                code="unsupported-effect",
                span=node.span,
            )
        if mesh.num_devices > 1 and _jax.is_ordered_debug(node.params):
            raise SbpError(
                f"{node.op} with ordered=True runs on one device, and the mesh ({mesh}) has"
                f" {mesh.num_devices}; leave out ordered=True, or use"
                " jax.experimental.io_callback(.., ordered=True)",
                code="unsupported-effect",
                span=node.span,
            )
        if node.op in said or node.op in TYPED_ELSEWHERE:
            continue
        rule = rule_for(node.op)
        try:
            because = rule.unread(node.params, mesh.axes) if rule and rule.unread else ""
        except SbpError as error:
            raise error.about(f"{node.op}{where}") from None
        if rule is not None and not because:
            continue
        said.add(node.op)
        avals = [graph.aval(o) for o in (*node.inputs, *node.outputs)]
        held = sum(math.prod(a.shape) * _jax.itemsize(a.dtype) for a in avals)
        warn(
            "missing-rule",
            f"primitive {node.op!r}",
            "has no signature, so every device gets all its operands and computes all its results,"
            f" {bytes_text(held)} per device"
            + (f": {because}" if because else "; register one with sbp.signatures.register"),
            span=node.span,
        )


# ---- registered signatures ----------------------------------------------------------------------


MAX_ELEMENTS = 4096
"""Most elements of operands and results together with which an equation is checked on its own
shapes. Above that its signature is checked on samples only."""

MAX_DEVICES = 64
"""Most devices of a mesh axis on which a signature is checked. A note names larger axes."""


def check_registered(graph: Graph, mesh: MeshSpec) -> None:
    """Checks the registered signatures of a program's operations, each once for its parameters,
    shapes and axis sizes.

    A signature is checked on mesh axes of 2 and 3 devices, and on the axes of the mesh with at most
    `MAX_DEVICES` devices. A note says which axes are larger.

    Arguments:
      graph: the program.
      mesh: the mesh.

    Raises:
      SbpError: `wrong-signature` with a counterexample; `bad-argument` for rows that do not fit the
        equation, and for operands that are too large to check where there are no samples.
    """
    axes = sorted({2, 3, *(n for n in mesh.sizes if 1 < n <= MAX_DEVICES)})
    large = [f"`{name}` with {n:,}" for name, n in mesh.axes if n > MAX_DEVICES]
    noted: set[str] = set()
    for node in graph.walk():
        custom = custom_for(node.op)
        if custom is None:
            continue
        if large and node.op not in noted:
            noted.add(node.op)
            title = (
                f"the registered signature of `{node.op}` is checked on mesh axes of at most"
                f" {MAX_DEVICES} devices, not on {' and '.join(large)}"
            )
            note(Diagnostic(code="wrong-signature", severity="note", title=title))
        ins, outs = [graph.aval(o) for o in node.inputs], [graph.avals[o] for o in node.outputs]
        # A jaxpr is represented by its text, since each trace makes a new object.
        params = tuple(
            (name, value.tobytes() if isinstance(value, np.ndarray) else repr(value))
            for name, value in sorted(node.params.items())
        )
        key = (*((tuple(a.shape), a.dtype) for a in (*ins, *outs)), params, *axes)
        if key in custom.checked:
            continue
        if sum(math.prod(a.shape) for a in (*ins, *outs)) <= MAX_ELEMENTS:
            custom.refute(
                node.primitive, node.params, [draw(a, k) for k, a in enumerate(ins)], outs, axes
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


def draw(aval: Any, seed: int) -> Any:
    """Random values of an operand.

    Arguments:
      aval: its shape and dtype. Floats are quarters from -4 to 3.75, integers are small, keys are
        arbitrary.
      seed: equal seeds give equal values.
    """
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
    """The equations of the operation in its samples, with values of their operands. A sample that
    was checked on these axes before is left out.

    Raises:
      SbpError: `bad-argument` for a sample that does not call the operation.
    """
    for k, sample in enumerate(custom.samples):
        key = "sample", k, *axes
        if key not in custom.checked:
            found = list(_in_sample(custom.name, sample))
            if not found:
                raise custom.error(f"sample {k} does not call it")
            yield from found
            custom.checked.add(key)


def _in_sample(name: str, sample: Sample) -> Iterator[Instance]:
    """Evaluates a sample; yields the equations of the operation with the values of their
    operands."""
    fn, args = sample
    leaves, tree = leaves_of(args, f"a sample of the signature of {name!r}")
    whole = f"a sample of the signature of {name!r} has pytrees of arrays; each leaf is"
    values = [
        draw(x, k) if isinstance(x, jax.ShapeDtypeStruct) else as_array(x, whole)
        for k, x in enumerate(leaves)
    ]
    fits(fn, args)

    def call(*flat: Any) -> Any:
        return returning_arrays(fn)(*jax.tree.unflatten(tree, flat))

    graph, _ = trace(call, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in values])
    found: list[Instance] = []

    def seen(node: Node, operands: Sequence[Any]) -> list[Any]:
        outs = [graph.avals[o] for o in node.outputs]
        args = [x if _jax.is_extended(x.dtype) else np.asarray(x) for x in operands]
        found.append((node.primitive, node.params, args, outs))
        return jax.jit(lambda *xs: _jax.bind(node.primitive, xs, node.params))(*operands)

    evaluate(graph, values, {name: seen})
    yield from found
