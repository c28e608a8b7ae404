"""The command `sbp signatures [NAME]`: primitives, and functions of JAX."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import itertools
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.image
import jax.numpy as jnp
import jax.scipy.special
from jax.sharding import AbstractMesh
from rich.console import Console

from sbp.api.jit import jit
from sbp.commands.shapes import arguments
from sbp.errors import SbpError
from sbp.plan.text import shape_text
from sbp.report.facts import outputs
from sbp.report.parts import Page, Paragraph, Part, Section, table
from sbp.report.report import Shown
from sbp.report.signatures import AXIS_SIZE, op_of, signature_page, signatures_page, suggestion
from sbp.report.wording import bytes_text, counted, listed
from sbp.signatures import Row, known_primitives, rule_for
from sbp.signatures.examples import sample
from sbp.trace.build import trace
from sbp.trace.graph import Graph
from sbp.types import B, P, S

# ---- functions ----------------------------------------------------------------------------------
# Signatures of functions of JAX: the primitives that a function traces to with their rows, and
# what each type of its inputs costs.


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
        calls=tuple(_calls_of_functions(call, shapes)) if 1 <= len(shapes) <= 2 else (),
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


def _calls_of_functions(call: Callable[..., Any], shapes: Sequence[Any]) -> Iterator[TypedCall]:
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


# ---- primitives ---------------------------------------------------------------------------------


def add_signature_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `sbp signatures`."""
    parser.add_argument(
        "name",
        metavar="NAME",
        nargs="?",
        help="a primitive such as dot_general, or a function of JAX such as softmax or"
        " jnp.linalg.norm, which is traced; all primitives when left out",
    )
    parser.add_argument(
        "--args",
        metavar="SHAPES",
        help="the arguments that a function is traced with, such as \"'ij,jk->ik', f32[8,16],"
        ' f32[16,32]"',
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def show_signatures(words: Sequence[str]) -> int:
    """`sbp signatures [NAME]`.

    Arguments:
      words: the words after `sbp signatures`.

    Returns:
      The exit status, 0.

    Raises:
      SbpError: `unknown-option` where nothing has the name, with the nearest one.
    """
    parser = argparse.ArgumentParser(
        prog="sbp signatures",
        description="Show which types of operands give which types of results, on one mesh axis.",
    )
    add_signature_options(parser)
    given = parser.parse_args(words)
    page, data = _answer(given.name, given.args)
    if given.json:
        print(json.dumps(data, indent=2))
    else:
        Console(highlight=False).print(Shown(page=page), soft_wrap=True)
    return 0


def _answer(name: str | None, args: str | None) -> tuple[Page, Any]:
    """The page and the data of a primitive or function, or of all primitives."""
    if name is None:
        return signatures_page(), {"primitives": sorted(known_primitives())}
    if name in known_primitives() and args is None:
        return signature_page(name), {"primitive": name, "rows": _sample_rows(name)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of shapes that the user did not choose
        found = function_signature(name, None if args is None else arguments(args))
    if found is None:
        raise SbpError(
            f"no primitive and no function of JAX is called {name!r}{near_names(name)}",
            code="unknown-option",
        )
    return function_page(found), _data(found)


def function_page(found: FunctionSignature) -> Page:
    """The signature of a function as a page."""
    parts: list[Part] = []
    if found.others:
        parts.append(Paragraph(text=f"the same name is also {listed(found.others)}"))
    rows = [
        (
            p.name if p.count == 1 else f"{p.name} ({p.count} times)",
            f"{', '.join(p.inputs)} -> {', '.join(p.outputs)}",
            "; ".join(map(row_text, p.rows)) or ("none" if p.known else "no rule: held B"),
        )
        for p in found.primitives
    ]
    title = counted(len(rows), "primitive") + ", each with its rows on one mesh axis"
    made = table(("primitive", "on", "rows besides all B"), rows)
    parts.append(Section(title=title, parts=(made,)))
    if found.calls:
        parts.append(_calls(found))
    shapes = ", ".join(found.inputs)
    return Page(title=f"`{found.name}` traced on {shapes or 'no arrays'}", parts=tuple(parts))


def row_text(row: Row) -> str:
    """A row on one line.

    >>> from sbp.types import P, S
    >>> row_text(Row((S(1), S(0)), (P,)))
    'S(1) S(0) -> P(sum)'
    """
    kernel = "" if row.kernel == "local" else f" by {row.kernel}"
    return f"{' '.join(map(repr, row.ins))} -> {' '.join(map(repr, row.outs))}{kernel}"


def _calls(found: FunctionSignature) -> Section:
    rows = (
        (*c.inputs, "->", " ".join(c.outputs), bytes_text(c.bytes_per_device)) for c in found.calls
    )
    title = f"the function as a whole, on one mesh axis of {AXIS_SIZE} devices: its cheapest plans"
    made = table((*found.inputs, "", "result", ">sends"), rows)
    return Section(title=title, parts=(made,))


def _data(found: FunctionSignature) -> dict[str, Any]:
    """The signature as data that JSON can hold."""
    return {
        "function": found.name,
        "inputs": found.inputs,
        "others": found.others,
        "primitives": [
            {
                "primitive": p.name,
                "inputs": p.inputs,
                "outputs": p.outputs,
                "count": p.count,
                "known": p.known,
                "rows": [*map(_row_data, p.rows)],
            }
            for p in found.primitives
        ],
        "calls": [dataclasses.asdict(c) for c in found.calls],
    }


def _row_data(row: Row) -> dict[str, Any]:
    return {
        "inputs": [*map(repr, row.ins)],
        "outputs": [*map(repr, row.outs)],
        "kernel": row.kernel,
    }


def _sample_rows(primitive: str) -> list[dict[str, Any]]:
    """The rows of a primitive on its sample; none where it has no sample."""
    rule, found = rule_for(primitive), sample(primitive)
    return [] if rule is None or found is None else [*map(_row_data, rule.rows(op_of(*found)))]
