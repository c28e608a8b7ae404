"""The command `sbp signatures [NAME]`: all primitives that have signatures, the rows of one
primitive, and functions of JAX."""

import argparse
import functools
import itertools
import json
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.image
import jax.numpy as jnp
import jax.scipy.special
from rich.console import Console

from sbp.commands.command_line import arguments, required_parameters
from sbp.errors import SbpError, bytes_text, counted, listed, nearest
from sbp.plan.program import shape_text
from sbp.report.parts import Page, Part, Section, Table, table
from sbp.report.report import Shown
from sbp.signatures import Op, Row, Rule, kernel_named, known_primitives, rule_for
from sbp.signatures.examples import sample
from sbp.signatures.laws.proofs import row_status
from sbp.trace.build import trace
from sbp.trace.graph import Graph, Node, group_by
from sbp.types import B

# ---- primitives ---------------------------------------------------------------------------------


AXIS_SIZE = 4
"""Size of the mesh axis of the shown rows. It divides every dim of the samples."""

KNOWN = {
    "proved": "Z3 proves the scalar law behind it",
    "enumerated": "it holds on small tensors that are cut into adversarial parts",
    "assumed": "it holds on small tensors, and Z3 has not decided its scalar law",
}
"""How a row is known to hold."""


def signatures_page() -> Page:
    """All primitives with signatures, by family; of each whose only row is all B, the reason."""
    rules = [rule for rule in map(rule_for, known_primitives()) if rule is not None]
    sections = list[Section]()
    for name, members in sorted(group_by(rules, family).items()):
        split = ", ".join(r.name for r in members if not r.reason)
        whole = table(("all B", "because"), ((r.name, r.reason) for r in members if r.reason))
        sections.append(
            Section(
                title=f"{name}: {counted(len(members), 'primitive')}",
                parts=(*([split] if split else []), *([whole] if whole.rows else [])),
            )
        )
    return Page(
        title=f"signatures of {counted(len(rules), 'primitive')} in {len(sections)} families",
        parts=tuple(sections),
    )


def family(rule: Rule) -> str:
    """The name of the module with a rule: elementwise, linalg, reduction, .."""
    rows: Any = rule.rows
    while isinstance(rows, functools.partial):
        rows = rows.args[0] if rows.args and callable(rows.args[0]) else rows.func
    return str(getattr(rows, "__module__", "")).rsplit(".", 1)[-1]


def signature_page(primitive: str) -> Page:
    """The rows of one primitive on its sample."""
    rule, found = rule_for(primitive), sample(primitive)
    assert rule is not None
    texts = {
        f"held B on every mesh axis: {rule.reason}": rule.reason,
        "there is no sample to show its rows on": found is None,
    }
    parts: list[Part] = [text for text, is_true in texts.items() if is_true]
    if found is not None:
        op = op_of(*found)
        rows = rule.rows(op)
        head = f"{counted(len(rows), 'row')} on one mesh axis of size {AXIS_SIZE}, on a sample"
        parts += [Section(title=head, parts=(_rows_table(op, rows),)), *_legend(op, rows)]
    return Page(title=f"{primitive}: {family(rule)}", parts=tuple(parts))


def op_of(graph: Graph, node: Node) -> Op:
    """A node of a graph as rules see it, on a mesh axis of `AXIS_SIZE` devices."""
    ins, outs = tuple(map(graph.aval, node.inputs)), tuple(graph.avals[o] for o in node.outputs)
    return Op(node.op, node.params, ins, outs, AXIS_SIZE)


def _rows_table(op: Op, rows: Sequence[Row]) -> Table:
    """A table of rows: atoms, the kernel, the bytes that it sends, and how the row is known. Empty
    columns are left out."""
    cells = [
        (*map(repr, r.ins), "->", *map(repr, r.outs), *_kernel_cells(op, r), row_status(op, r))
        for r in rows
    ]
    shapes = [*map(shape_text, op.ins), "", *map(shape_text, op.outs)]
    headings = [*shapes, "kernel", ">sends", "known"]
    shown = [k for k in range(len(headings)) if k < len(shapes) or any(row[k] for row in cells)]
    return table((headings[k] for k in shown), ([row[k] for k in shown] for row in cells))


def _kernel_cells(op: Op, row: Row) -> tuple[str, str]:
    kernel = kernel_named(row.kernel)
    sent = bytes_text(sum(s.bytes for s in kernel.sends(op, row)) if kernel.sends else 0.0)
    return "" if row.kernel == "local" else row.kernel, sent if kernel.communicates else ""


def _legend(op: Op, rows: Sequence[Row]) -> tuple[Table, ...]:
    """The meaning of the names of kernels and proofs in a table of rows."""
    kernels, statuses = {r.kernel for r in rows}, {row_status(op, r) for r in rows}
    runs = [(name, kernel_named(name).summary) for name in sorted(kernels - {"local"})]
    known = [(name, because) for name, because in KNOWN.items() if name in statuses]
    return tuple(
        table(headings, pairs)
        for headings, pairs in (
            (("kernel", "what runs on the shards"), runs),
            (("known", "because"), known),
        )
        if pairs
    )


# ---- functions ----------------------------------------------------------------------------------
# Signatures of functions of JAX: the primitives that a function traces to, with their rows.


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


_Given = tuple[tuple[Any, ...], dict[str, Any]]


def _function_answer(name: str, given: _Given | None) -> tuple[Page, Any]:
    """The page and the data of a function of JAX.

    Arguments:
      name: `softmax`, `jax.nn.softmax`, `jnp.linalg.norm`.
      given: positional and keyword arguments; None tries usual ones.

    Raises:
      SbpError: `unknown-option` where JAX has no function of this name, or where it does not take
        the arguments.
    """
    if not (found := list(_functions(name))):
        if name in known_primitives():
            raise SbpError(
                f"{name} is a primitive: leave --args out, or name a function of JAX that uses it",
                code="unknown-option",
            )
        functions = {
            n
            for m in _MODULES.values()
            for n in dir(m)
            if n[0] != "_" and _is_function(getattr(m, n))
        }
        hint = nearest(
            name.rpartition(".")[2],
            functions.union(known_primitives()),
            otherwise="; `sbp signatures` lists the primitives that have one",
        )
        raise SbpError(
            f"no primitive and no function of JAX is called {name!r}{hint}", code="unknown-option"
        )
    shown, function = found[0]
    others = [other for other, same in found[1:] if same is not function]
    graph, shapes = _trace(shown, function, given)
    inputs, primitives = tuple(map(shape_text, shapes)), Counter(_primitives(graph))
    rows = table(
        ("primitive", "on", "rows besides all B"),
        (
            (
                primitive if count == 1 else f"{primitive} ({count} times)",
                f"{', '.join(ins)} -> {', '.join(outs)}",
                "; ".join(map(row_text, rows)) or ("none" if known else "no rule: held B"),
            )
            for (primitive, ins, outs, rows, known), count in primitives.items()
        ),
    )
    page = Page(
        title=f"`{shown}` traced on {', '.join(inputs) or 'no arrays'}",
        parts=(
            *([f"the same name is also {listed(others)}"] if others else []),
            Section(
                title=f"{counted(len(primitives), 'primitive')}, each with its rows on one"
                " mesh axis",
                parts=(rows,),
            ),
        ),
    )
    data = {
        "function": shown,
        "inputs": inputs,
        "others": others,
        "primitives": [
            {
                "primitive": primitive,
                "inputs": ins,
                "outputs": outs,
                "count": count,
                "known": known,
                "rows": [*map(_row_data, rows)],
            }
            for (primitive, ins, outs, rows, known), count in primitives.items()
        ],
    }
    return page, data


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


_USUAL = (
    "f32[512,1024]",
    "f32[512,64,64]",
    "i32[512,1024]",
    "bool[512,1024]",
    "c64[512,1024]",
    "[f32[512,1024], f32[512,1024]]",
    "key",
    "f32[512,1024], f32[1024,2048]",
    "f32[512,1024], f32[512,1024]",
    "f32[512,1024], 1",
    "f32[512,1024], (128,)",
    "f32[512,64,64], f32[512,64,4]",
    "i32[512,1024], i32[512,1024]",
    "f32[512,1024], i32[512]",
    "i32[512], 16",
    "[f32[512,1024], f32[512,1024]], 1",
    "key, (512, 1024)",
    "key, f32[512,1024]",
    "f32[512,1024], f32[512,1024], f32[512,1024]",
    "bool[512,1024], f32[512,1024], f32[512,1024]",
    "f32[512,1024], 0, 1",
    "f32[512,1024], 0.0, 1.0",
    "f32[512,1024], i32[512,1], 1",
    "key, f32[512,1024], (512, 1024)",
    "f32[8,512,16,64], f32[8,512,16,64], f32[8,512,16,64]",
    "'ij,jk->ik', f32[512,1024], f32[1024,2048]",
    "f32[32,64,16,16], f32[128,64,3,3], (1, 1), 'SAME'",
)
"""Arguments that are tried in this order."""


def _trace(
    name: str, function: Callable[..., Any], given: _Given | None
) -> tuple[Graph, list[Any]]:
    """The graph of a function, and the shapes of its arrays.

    Raises:
      SbpError: `unknown-option` where it does not take the arguments.
    """
    refusal = 'takes none of the arguments that sbp tries; give some, such as --args "f32[8,16]"'
    needed = len(required_parameters(function))
    usual = sorted(
        ((text, arguments(text)) for text in _USUAL),
        key=lambda call: len(call[1][0]) != needed,
    )
    for text, tried in usual if given is None else [("", given), *usual]:
        try:
            call, shapes = _of_arrays(function, tried)
            graph, _ = trace(call, shapes)
        except Exception as error:  # JAX raises many kinds for arguments that do not fit
            if tried is given:
                refusal = f"does not take these --args: {str(error).rstrip('.')}"
            continue  # the next may fit
        if tried is given or (given is None and graph.nodes):
            return graph, shapes
        if given is not None:
            refusal += f'; give arguments such as --args "{text}"'
            break
    raise SbpError(f"{name} {refusal}", code="unknown-option")


def _of_arrays(function: Callable[..., Any], given: _Given) -> tuple[Callable[..., Any], list[Any]]:
    """A function of the arrays among the arguments, with their shapes; the other arguments are
    constants of it."""
    leaves, tree = jax.tree.flatten(given, is_leaf=lambda x: x is None)
    is_array = [isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves]

    def call(*values: Any) -> Any:
        left = iter(values)
        filled = [next(left) if a else leaf for a, leaf in zip(is_array, leaves, strict=True)]
        args, kwargs = jax.tree.unflatten(tree, filled)
        return function(*args, **kwargs)

    return call, list(itertools.compress(leaves, is_array))


_Primitive = tuple[str, tuple[str, ...], tuple[str, ...], tuple[Row, ...], bool]
"""A primitive of a traced function: its name, the dtypes and shapes of its operands and results,
its rows on one mesh axis without the row of all B, and whether it has a rule."""


def _primitives(graph: Graph) -> Iterator[_Primitive]:
    """The primitives of a graph in program order."""
    for node in graph.walk():
        if not node.regions:
            rule, op = rule_for(node.op), op_of(graph, node)
            rows = () if rule is None else rule.rows(op)
            split = tuple(row for row in rows if {*row.ins, *row.outs} != {B})
            ins, outs = (tuple(map(shape_text, avals)) for avals in (op.ins, op.outs))
            yield node.name, ins, outs, split, rule is not None


# ---- answers ------------------------------------------------------------------------------------


def show_signatures(given: argparse.Namespace) -> None:
    """`sbp signatures [NAME]`.

    Arguments:
      given: the options of the command.

    Raises:
      SbpError: `unknown-option` where nothing has the name, with the nearest one.
    """
    page, data = _answer(given.name, given.args)
    if given.json:
        print(json.dumps(data, indent=2))
    else:
        Console(highlight=False).print(Shown(page=page), soft_wrap=True)


def _answer(name: str | None, args: str | None) -> tuple[Page, Any]:
    """The page and the data of a primitive or function, or of all primitives."""
    if name is None:
        return signatures_page(), {"primitives": sorted(known_primitives())}
    if name in known_primitives() and args is None:
        rule, found = rule_for(name), sample(name)
        rows = rule.rows(op_of(*found)) if rule and found else ()
        return signature_page(name), {"primitive": name, "rows": [*map(_row_data, rows)]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of shapes that the user did not choose
        return _function_answer(name, None if args is None else arguments(args))


def row_text(row: Row) -> str:
    """A row on one line.

    >>> from sbp.types import P, S
    >>> row_text(Row((S(1), S(0)), (P,)))
    'S(1) S(0) -> P(sum)'
    """
    kernel = "" if row.kernel == "local" else f" by {row.kernel}"
    return f"{' '.join(map(repr, row.ins))} -> {' '.join(map(repr, row.outs))}{kernel}"


def _row_data(row: Row) -> dict[str, Any]:
    return {
        "inputs": [*map(repr, row.ins)],
        "outputs": [*map(repr, row.outs)],
        "kernel": row.kernel,
    }
