"""Signatures of functions of JAX: the primitives that a function traces to with their rows, and
what each type of its inputs costs."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.image
import jax.numpy as jnp
import jax.scipy.special
from jax.sharding import AbstractMesh

from sbp.api.jit import jit
from sbp.errors import SbpError
from sbp.plan.text import shape_text
from sbp.report.facts import outputs
from sbp.report.signatures import AXIS_SIZE, op_of, suggestion
from sbp.signatures import Row, known_primitives, rule_for
from sbp.trace.build import trace
from sbp.trace.graph import Graph
from sbp.types import B, P, S

_MODULES = {
    "jnp": jnp,
    "jax.nn": jax.nn,
    "jax.lax": jax.lax,
    "jnp.linalg": jnp.linalg,
    "jnp.fft": jnp.fft,
    "jax.random": jax.random,
    "jax.scipy.special": jax.scipy.special,
    "jax.image": jax.image,
}
"""Where functions are looked for, in this order, by the name that is shown."""

_SPELLINGS = {"jax.numpy": "jnp", "np": "jnp", "nn": "jax.nn", "lax": "jax.lax"}
"""Other names of the same modules."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedPrimitive:
    """A primitive of a traced function.

    Arguments:
      name: the primitive.
      inputs, outputs: dtypes and shapes.
      rows: its rows on one mesh axis, without the row of all B.
      known: whether it has a rule.
      count: how often it stands in the function with these shapes.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    rows: tuple[Row, ...]
    known: bool
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TypedCall:
    """The cheapest plan of a function for some types of its inputs, on one mesh axis.

    Arguments:
      inputs, outputs: the types.
      bytes_per_device: bytes that one device sends.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    bytes_per_device: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionSignature:
    """What `sbp signatures` says about a function.

    Arguments:
      name: where it is found, such as `jax.nn.softmax`.
      inputs: dtypes and shapes of the arguments it was traced with.
      primitives: its primitives in program order.
      calls: what types of the inputs cost; empty for functions of more than two arrays.
      others: functions of the same name in other modules.
    """

    name: str
    inputs: tuple[str, ...]
    primitives: tuple[TracedPrimitive, ...]
    calls: tuple[TypedCall, ...]
    others: tuple[str, ...] = ()


_Given = tuple[tuple[Any, ...], dict[str, Any]]


def function_signature(name: str, given: _Given | None = None) -> FunctionSignature | None:
    """The signature of a function of JAX.

    Arguments:
      name: `softmax`, `jax.nn.softmax`, `jnp.linalg.norm`.
      given: positional and keyword arguments; None tries usual ones.

    Returns:
      The signature; None where JAX has no function of this name.

    Raises:
      SbpError: `unknown-option` where the function does not take the arguments.
    """
    found = list(_functions(name))
    if not found:
        return None
    shown, function = found[0]
    graph, call, shapes = _traced(shown, function, given)
    return FunctionSignature(
        name=shown,
        inputs=tuple(map(shape_text, shapes)),
        primitives=tuple(_primitives(graph)),
        calls=tuple(_calls(call, shapes)) if 1 <= len(shapes) <= 2 else (),
        others=tuple(other for other, same in found[1:] if same is not function),
    )


def near_names(name: str) -> str:
    """The nearest primitive or function, in words."""
    last = name.rpartition(".")[2]
    return suggestion(last, {*known_primitives(), *_all_names()})


def _all_names() -> Iterator[str]:
    for module in _MODULES.values():
        yield from (n for n in dir(module) if n[0] != "_" and _is_function(getattr(module, n)))


def _is_function(value: Any) -> bool:
    return callable(value) and not isinstance(value, type)


def _functions(name: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The functions that a name may mean, with the names that they are shown under."""
    folder, _, last = name.rpartition(".")
    for spelling, module in _SPELLINGS.items():
        if folder == spelling or folder.startswith(f"{spelling}."):
            folder = module + folder[len(spelling) :]
    for shown, module in _MODULES.items():
        function: Any = getattr(module, last, None)
        if folder in ("", shown) and last[:1] != "_" and _is_function(function):
            yield f"{shown}.{last}", function


# ---- tracing ------------------------------------------------------------------------------------


def _shape(*sizes: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


_X, _W, _SQUARE = _shape(512, 1024), _shape(1024, 2048), _shape(512, 64, 64)
_N, _LABELS, _Q = (
    _shape(512, 1024, dtype="int32"),
    _shape(512, dtype="int32"),
    _shape(512, 1024, dtype="bool"),
)
_IMAGE, _FILTER = _shape(32, 64, 16, 16), _shape(128, 64, 3, 3)


def _usual() -> list[tuple[Any, ...]]:
    """Arguments that are tried in this order."""
    key = jax.eval_shape(jax.random.key, 0)
    return [
        (_X,),
        (_SQUARE,),
        (_N,),
        (_Q,),
        (_shape(512, 1024, dtype="complex64"),),
        ([_X, _X],),
        (key,),
        (_X, _W),
        (_X, _X),
        (_X, 1),
        (_X, (128,)),
        (_SQUARE, _shape(512, 64, 4)),
        (_N, _N),
        (_X, _LABELS),
        (_LABELS, 16),
        ([_X, _X], 1),
        (key, (512, 1024)),
        (key, _X),
        (_X, _X, _X),
        (_Q, _X, _X),
        (_X, 0, 1),
        (_X, 0.0, 1.0),
        (_X, _shape(512, 1, dtype="int32"), 1),
        (key, _X, (512, 1024)),
        (_shape(8, 512, 16, 64),) * 3,
        ("ij,jk->ik", _X, _W),
        (_IMAGE, _FILTER, (1, 1), "SAME"),
    ]


def _needed(function: Callable[..., Any]) -> int | None:
    """The number of arguments without a default; None where it is not known."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    fixed = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters):
        return None
    return sum(p.kind in fixed and p.default is inspect.Parameter.empty for p in parameters)


def _traced(
    name: str, function: Callable[..., Any], given: _Given | None
) -> tuple[Graph, Callable[..., Any], list[Any]]:
    """The graph of a function, and the function of its arrays alone with their shapes.

    Raises:
      SbpError: `unknown-option` where it does not take the arguments.
    """
    if given is not None:
        call, shapes = _of_arrays(function, given)
        try:
            return trace(call, shapes)[0], call, shapes
        except Exception as error:  # JAX raises many kinds for arguments that do not fit
            raise SbpError(
                f"{name} does not take these --args: {error}", code="unknown-option"
            ) from error
    needed = _needed(function)
    usual = _usual()
    for args in sorted(usual, key=lambda args: needed is not None and len(args) != needed):
        call, shapes = _of_arrays(function, (args, {}))
        try:
            graph, _ = trace(call, shapes)
        except Exception:  # JAX raises many kinds for arguments that do not fit; the next may fit
            continue
        if graph.nodes:
            return graph, call, shapes
    raise SbpError(
        f'{name} takes none of the arguments that sbp tries; give some, such as --args "f32[8,16]"',
        code="unknown-option",
    )


def _of_arrays(function: Callable[..., Any], given: _Given) -> tuple[Callable[..., Any], list[Any]]:
    """A function of the arrays among the arguments, with their shapes; the other arguments are
    constants of it."""
    leaves, tree = jax.tree.flatten(given, is_leaf=lambda x: x is None)
    arrays = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.ShapeDtypeStruct)]

    def call(*values: Any) -> Any:
        filled = list(leaves)
        for i, value in zip(arrays, values, strict=True):
            filled[i] = value
        args, kwargs = jax.tree.unflatten(tree, filled)
        return function(*args, **kwargs)

    return call, [leaves[i] for i in arrays]


def _primitives(graph: Graph) -> Iterator[TracedPrimitive]:
    """The primitives of a graph, each once for the same shapes and parameters."""
    counts: dict[tuple[Any, ...], int] = {}
    kept: dict[tuple[Any, ...], TracedPrimitive] = {}
    for node in graph.walk():
        if node.regions:
            continue
        rule = rule_for(node.op)
        rows = () if rule is None else rule.rows(op_of(graph, node))
        split = tuple(row for row in rows if {*row.ins, *row.outs} != {B})
        ins = tuple(shape_text(graph.aval(v)) for v in node.inputs)
        outs = tuple(shape_text(graph.avals[v]) for v in node.outputs)
        key = node.name, ins, outs, split
        counts[key] = counts.get(key, 0) + 1
        kept[key] = TracedPrimitive(
            name=node.name,
            inputs=ins,
            outputs=outs,
            rows=split,
            known=rule is not None,
            count=counts[key],
        )
    yield from kept.values()


def _calls(call: Callable[..., Any], shapes: Sequence[Any]) -> Iterator[TypedCall]:
    """What each type of the inputs costs on a mesh axis of `AXIS_SIZE` devices."""
    mesh = AbstractMesh((AXIS_SIZE,), ("axis",))
    choices = [
        [B, *(S(d) for d in range(len(s.shape))), *([P] if _adds(s) else [])] for s in shapes
    ]
    for atoms in itertools.product(*choices):
        typed = jit(call, mesh, in_types=tuple(f"axis:{atom!r}" for atom in atoms))
        program = typed.check(*shapes).program
        if program is not None:
            yield TypedCall(
                inputs=tuple(map(repr, atoms)),
                outputs=tuple(repr(t.type.get("axis", B)) for t in outputs(program, ())),
                bytes_per_device=program.cost.bytes_per_device,
            )


def _adds(shape: Any) -> bool:
    """Whether an array may be P: sums of it are meant, so it holds numbers."""
    return jnp.issubdtype(shape.dtype, jnp.inexact)
