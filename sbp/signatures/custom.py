"""Signatures that users register, for their own primitives, Pallas kernels and functions with
`custom_partitioning`; and the checks of a program's signatures before they type it.

Primitives without a signature are named. Registered signatures are checked on numbers: each row is
tried on parts of the operands of a program's equations, or of the signature's samples."""

import contextlib
import gc
import itertools
import math
import re
import zlib
from collections.abc import Callable, Iterator, Sequence, Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sbp import _jax
from sbp.annotations import annotate_p, as_array
from sbp.errors import Diagnostic, SbpError, Span, bytes_text, counted, nearest, note, warn
from sbp.kinds import (
    FLAG,
    Kind,
    fits,
    leaves_of,
    refuse_unless,
    returning_arrays,
    show,
    takes,
)
from sbp.machine.mesh import MeshSpec
from sbp.signatures.factors import admissible
from sbp.signatures.laws.oracle import Oracle, parts, words_of
from sbp.signatures.region import REGION_OPS
from sbp.signatures.rule import (
    FALLBACK,
    REFUSED,
    TYPED_BY_SBP,
    LocalContext,
    Op,
    Row,
    Rule,
    Traits,
    add_rule,
    all_b,
    known_primitives,
    remove_rule,
    rule_for,
)
from sbp.trace.build import trace
from sbp.trace.collectives import evaluate
from sbp.trace.graph import CONTROL_FLOW, Graph, Node
from sbp.types import Atom, B, Split, Unreduced, parse

# ---- the check on numbers -----------------------------------------------------------------------
# Registered signatures, and their check on numbers. Each row is tried on adversarial parts of small
# operands; an error shows the counterexample of a row that fails.


Rows = Sequence[Row | str] | Callable[[Op], Sequence[Row | str]]
"""The rows of an operation, each as a `Row` or a text, or a function from an equation to them."""
Sample = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function and its arguments; a call has an equation of the operation."""

DRAWS = 3
"""How many times each row is tried, on each axis size, with other parts."""


@dataclass(slots=True, eq=False, kw_only=True)
class Custom:
    """A registered signature.

    Arguments:
      name: the operation's name.
      rows: the rows besides all-B, or a function from an `Op` to them.
      even: whether rows hold only where the axis size divides the dims that they split.
      samples: small calls of the operation, for the check.
      place: where it was registered.
      checked: keys of the equations and samples that the signature has passed.
    """

    name: str
    rows: tuple[Row, ...] | Callable[[Op], Any]
    even: bool
    samples: tuple[Sample, ...]
    place: Span | None
    checked: set[Any] = field(default_factory=set)

    def rows_of(self, op: Op) -> tuple[Row, ...]:
        """The rows of an equation, all-B first. With `even`, rows that split a dim unevenly are
        left out.

        Raises:
          SbpError: as `fitting`; `type-syntax` for a row whose text does not parse.
        """
        given = _parsed(self.rows(op)) if callable(self.rows) else self.rows
        rows = [self.fitting(row, op) for row in given]
        return tuple(
            dict.fromkeys((all_b(op), *(r for r in rows if not self.even or op.has_even_shards(r))))
        )

    def fitting(self, row: Row, op: Op) -> Row:
        """Returns the row, if its atoms fit the operands and results.

        Raises:
          SbpError: `bad-argument` for a wrong number of atoms, a dim out of range, a monoid that
              the dtype does not have, or a row that names a kernel.
        """
        for what, atoms, avals in (("operand", row.ins, op.ins), ("result", row.outs, op.outs)):
            if len(atoms) != len(avals):
                raise self.error(
                    f"row `{row}` has {counted(len(atoms), what)}, the equation {len(avals)}"
                )
            for k, (atom, aval) in enumerate(zip(atoms, avals, strict=True)):
                if isinstance(atom, Split) and atom.dim >= len(aval.shape):
                    raise self.error(
                        f"row `{row}` splits dim {atom.dim} of {what} {k}, which is {_text(aval)}"
                    )
                if isinstance(atom, Unreduced) and atom.monoid not in admissible(aval.dtype):
                    raise self.error(
                        f"row `{row}` has {atom!r} for {what} {k}, but {_text(aval)} cannot be"
                        f" {atom!r}"
                    )
        if row.kernel != "local":
            raise self.error(
                f"row `{row}` names kernel {row.kernel!r}; give what runs on the shards as `local`"
            )
        return row

    def error(self, text: str, code: str = "bad-argument", details: Sequence[str] = ()) -> SbpError:
        """An error about this signature, to be raised by the caller.

        Arguments:
          text: what is wrong.
          code: the code of the error.
          details: lines that follow the text.
        """
        return SbpError(
            f"the signature of {self.name!r}{f' registered at {self.place}' if self.place else ''}:"
            f" {text}",
            code=code,
            details=details,
        )

    def refute(
        self,
        primitive: Any,
        params: dict[str, Any],
        args: Sequence[Any],
        outs: Sequence[Any],
        sizes: Sequence[int],
    ) -> None:
        """Checks all rows of one equation on numbers, on mesh axes of the given sizes.

        Arguments:
          primitive: the JAX primitive.
          params: its parameters.
          args: values of its operands.
          outs: avals of its results.
          sizes: sizes of the mesh axes.

        Raises:
          SbpError: `wrong-signature` with the row, the parts and the values of a counterexample.
        """
        ins = tuple(_jax.empty_aval(np.shape(x), x.dtype) for x in args)
        whole = Op(self.name, params, ins, tuple(outs), 1)
        # A second trial has NaN among the operands, which a maximum of parts may lose.
        has_floats = any(jnp.issubdtype(x.dtype, np.floating) for x in args)
        tried = [tuple(args), *([tuple(map(_with_nan, args))] if has_floats else [])]
        oracles = [Oracle(whole, primitive, operands) for operands in tried]
        for n in sizes:
            for row in self.rows_of(Op(self.name, params, ins, tuple(outs), n)):
                for oracle, seed in itertools.product(oracles, range(DRAWS)):
                    self._refute_row(oracle, row, n, seed)

    def _refute_row(self, oracle: Oracle, row: Row, n: int, seed: int) -> None:
        """Checks a row on one draw of parts.

        Raises:
          SbpError: `wrong-signature` with the counterexample, or with what `local` raised.
        """
        with np.printoptions(threshold=24, edgeitems=2, precision=6, suppress=True):
            try:
                wrong = oracle.refute_row(row, n, np.random.default_rng(seed))
            except SbpError:
                raise
            except Exception as error:  # `local` is code of the user and may raise anything
                raise self.error(
                    f"row `{row}` on {n} devices: `local` raised {type(error).__name__}: {error}",
                    "wrong-signature",
                ) from error
            if wrong:
                raise self.error(
                    f"row `{row}` does not hold on {n} devices",
                    "wrong-signature",
                    _counterexample(row, n, seed, oracle.args, wrong),
                )


def _with_nan(x: Any) -> Any:
    """The operand with NaN for every third element; unchanged if it has no real floats."""
    return (
        np.where(
            np.arange(np.size(x)).reshape(np.shape(x)) % 3 == 1, np.asarray(np.nan, x.dtype), x
        )
        if jnp.issubdtype(x.dtype, np.floating)
        else x
    )


def parse_row(text: Any) -> Row:
    """The row that a text such as `S(1), S(0) -> P` states.

    Raises:
      SbpError: `type-syntax` for a text that is no row, `bad-argument` for what is no text.

    >>> parse_row("S(1), S(0) -> P")
    S(1), S(0) -> P(sum)
    """
    if not isinstance(text, str):
        raise SbpError(
            f"a row must be a `Row` or a text such as 'S(0), B -> S(0)', got {show(text)}"
        )
    before, arrow, after = text.partition("->")
    if not arrow:
        raise SbpError(
            f"a row must be `operand atoms -> result atoms`, got {show(text)}", code="type-syntax"
        )
    ins, outs = (
        tuple(_atom(a, text) for a in side.split(",")) if side.strip() else ()
        for side in (before, after)
    )
    return Row(ins, outs)


def _atom(text: str, row: str) -> Atom:
    """The atom that a text states.

    Raises:
      SbpError: `type-syntax` with the row, if there is none.
    """
    with contextlib.suppress(SbpError):
        found = parse(f"axis:{text.strip()}")
        if len(found) == 1:
            return found["axis"]
    raise SbpError(
        f"{show(text.strip())} in row {show(row)} is not an atom: S(dim), B or P(monoid)",
        code="type-syntax",
    )


def _text(aval: Any) -> str:
    return f"{aval.dtype}[{','.join(map(str, aval.shape))}]"


def _counterexample(row: Row, n: int, seed: int, args: Sequence[Any], wrong: str) -> list[str]:
    """The lines of an error: the operands, each device's part of them, and what is wrong.

    Arguments:
      row: the row.
      n: number of devices.
      seed: seed of the draw. The oracle draws the parts of the operands first, in their order, so
          drawing them from the same seed gives the same parts.
      args: the whole operands.
      wrong: what the oracle found.
    """
    rng = np.random.default_rng(seed)
    lines = []
    for k, (x, atom) in enumerate(zip(args, row.ins, strict=True)):
        words = words_of(x)
        lines.append(f"operand {k} is {_line(words)}")
        lines += [
            f"  device {i} holds {_line(p)}"
            for i, p in enumerate(parts(words, atom, n, rng))
            if atom != B
        ]
    for atom in row.outs:
        wrong = wrong.replace(f"as {(atom,)}", f"as {atom!r}")
    return [*lines, " ".join(wrong.split())]


def _line(x: Any) -> str:
    return " ".join(str(x).split())


# ---- registration -------------------------------------------------------------------------------
# Signatures that users register: for their own primitives, Pallas kernels and functions with
# `custom_partitioning`.
#
# sbp checks a registered signature on numbers before it types a program with it
# (`check_registered`).


NAMED = ("pallas_call", "custom_partitioning")
"""Primitives that call a function. A signature is for the function, by the name
`pallas_call:NAME`."""

CUSTOM: dict[str, Custom] = {}
"""Registered signatures, by the name of the operation."""


_SAMPLE = Kind(
    "a pair of a function and a tuple of its arguments",
    lambda x: isinstance(x, tuple) and len(x) == 2 and callable(x[0]) and isinstance(x[1], tuple),
)


@takes(
    "signatures.register",
    local=Kind(
        "a function of a LocalContext and a device's parts, or None",
        lambda x: x is None or callable(x),
    ),
    samples=Kind(
        "a list of samples, such as [(f, (x,))]",
        lambda x: isinstance(x, Sequence) and not isinstance(x, str),
    ),
    even=FLAG,
    replace=FLAG,
)
def register(
    primitive: Any,
    rows: Rows = (),
    *,
    local: Callable[..., Any] | None = None,
    samples: Sequence[Sample] = (),
    even: bool = False,
    replace: bool = False,
) -> None:
    """Gives an operation a signature.

    When a program with the operation is typed for the first time, sbp checks the rows on numbers:
    for the shapes of the equation and of the samples, on mesh axes of size 2, of size 3 and of the
    program's sizes up to 64. For each row, sbp cuts the operands into adversarial parts (sums that
    cancel, padding of NaN), runs `local` on the parts of each device, and compares the value that
    the parts of the results stand for with the result of the operation on whole operands.

    Arguments:
      primitive: a JAX primitive or its name; for the call of a function, `pallas_call:NAME` or
          `custom_partitioning:NAME`.
      rows: the rows on one mesh axis besides all-B, each as a `Row` or as text; or a function from
          an `Op` to them.
      local: computes one device's parts of the results from its parts of the operands, as
          `local(ctx, *parts)` with a `LocalContext` first. None runs the primitive itself with the
          same parameters. A Pallas kernel has shapes among its parameters, so it always needs
          `local`.
      samples: `(function, arguments)` pairs; each function calls a small instance of the operation.
          Samples are needed where the operands and results of a program have more than 4,096
          elements together. Arguments may be `jax.ShapeDtypeStruct`s.
      even: whether the rows hold only where the axis size divides the dims that they split.
      replace: whether to replace a signature that was registered before. Signatures of sbp itself
          cannot be replaced.

    Raises:
      SbpError: `unknown-option` for a name that no primitive has; `bad-argument` for an operation
          that has a signature already or can have none; `type-syntax` for a row whose text does not
          parse. At the first use, `wrong-signature` with a counterexample.

    >>> import jax.extend
    >>> twice_p = jax.extend.core.Primitive("twice")
    >>> register(twice_p, ["S(0) -> S(0)", "P(sum) -> P(sum)"])
    >>> unregister(twice_p)
    """
    name = _name(primitive)
    rows = rows if callable(rows) else _parsed(rows)
    refuse_unless(_SAMPLE, "signatures.register", "each sample", samples)
    _make_way(name, replace)
    custom = Custom(
        name=name, rows=rows, even=even, samples=tuple(samples), place=_jax.caller_span()
    )
    add_rule(
        Rule(
            name=name,
            rows=custom.rows_of,
            traits=Traits(),
            local=None if local is None else _on_parts(local),
        )
    )
    CUSTOM[name] = custom


def _parsed(rows: Any) -> tuple[Row, ...]:
    """The rows that a user gave, text parsed.

    Raises:
      SbpError: for anything else.
    """
    if isinstance(rows, str) or not isinstance(rows, Sequence | AbstractSet):
        raise SbpError(
            'rows= must be a list of rows, such as ["S(0) -> S(0)"], or a function from an Op to'
            f" one, got {show(rows)}"
        )
    parsed = (r if isinstance(r, Row) else parse_row(r) for r in rows)
    # The order of a set differs between processes.
    return tuple(sorted(parsed, key=str) if isinstance(rows, AbstractSet) else parsed)


def _make_way(name: str, replace: bool) -> None:
    """Removes the registered signature that a new one replaces.

    Raises:
      SbpError: if the operation has a signature that stays.
    """
    known = CUSTOM.get(name)
    if name in known_primitives() and (known is None or not replace):
        where = (
            "which sbp gives it"
            if known is None
            else f"registered at {known.place}; replace=True replaces it"
        )
        raise SbpError(f"{name!r} has a signature already, {where}")
    if known is not None:
        remove_rule(name)


@takes("signatures.unregister")
def unregister(primitive: Any) -> None:
    """Removes a registered signature. Programs that were compiled with it keep it.

    Raises:
      SbpError: `bad-argument` for an operation without a registered signature.
    """
    name = _name(primitive, known=CUSTOM)
    if name not in CUSTOM:
        raise SbpError(f"no signature was registered for {show(name)}{nearest(name, CUSTOM)}")
    remove_rule(name)
    del CUSTOM[name]


def _name(primitive: Any, known: Any = ()) -> str:
    """The name under which a signature is registered.

    Arguments:
      primitive: a JAX primitive or a name.
      known: names that need no primitive to exist.

    Raises:
      SbpError: for an argument that names no operation, or one that can have no signature.
    """
    name = primitive.name if isinstance(primitive, _jax.Primitive) else primitive
    if not isinstance(name, str):
        raise SbpError(f"a signature is for a JAX primitive or its name, got {show(primitive)}")
    if name in NAMED:
        raise SbpError(
            f"{name!r} calls a function, and signatures are for functions: register '{name}:NAME'"
        )
    if name in REFUSED:
        raise SbpError(f"you cannot register a signature for {name!r}: it {REFUSED[name]}")
    if name in TYPED_BY_SBP:
        raise SbpError(f"you cannot register a signature for {name!r}: {FALLBACK[name]}")
    if (
        isinstance(primitive, str)
        and name not in known
        and not re.fullmatch(rf"({'|'.join(NAMED)}):[\w.-]+", name)
    ):
        primitives = {p.name for p in gc.get_objects() if isinstance(p, _jax.Primitive)}
        if name not in primitives:
            close = nearest(name, primitives)
            hint = close if "did you mean" in close else "; import first what defines it"
            raise SbpError(f"no primitive is named {show(name)}{hint}", code="unknown-option")
    return name


def _on_parts(local: Callable[..., Any]) -> Callable[[LocalContext, Sequence[Any]], list[Any]]:
    """A user's `local` as the `local` of a `Rule`: takes the parts as a list, and returns a
    list."""

    def run(ctx: LocalContext, args: Sequence[Any]) -> list[Any]:
        out = local(ctx, *args)
        return list(out) if isinstance(out, tuple | list) else [out]

    return run


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
        held = sum(
            math.prod(a.shape) * _jax.itemsize(a.dtype)
            for a in map(graph.aval, (*node.inputs, *node.outputs))
        )
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
    for op in dict.fromkeys(n.op for n in graph.walk() if n.op in CUSTOM) if large else ():
        note(
            Diagnostic(
                code="wrong-signature",
                severity="note",
                title=f"the registered signature of `{op}` is checked on mesh axes of at most"
                f" {MAX_DEVICES} devices, not on {' and '.join(large)}",
            )
        )
    for node in graph.walk():
        custom = CUSTOM.get(node.op)
        if custom is None:
            continue
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
