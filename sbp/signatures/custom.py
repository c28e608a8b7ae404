"""Signatures that users register: for a primitive of their own, a Pallas kernel, a
`custom_partitioning` function.

A registered signature is not believed: `sbp.infer.registered` has it refuted on numbers before it
types anything.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sbp import _jax
from sbp.errors import SbpError, Span, nearest
from sbp.signatures.factors import admissible
from sbp.signatures.fallback import FALLBACK, REFUSED
from sbp.signatures.laws.oracle import Oracle
from sbp.signatures.laws.parts import parts
from sbp.signatures.rule import (
    LocalContext,
    Op,
    Row,
    Rule,
    add_rule,
    all_b,
    remove_rule,
    rule_for,
)
from sbp.signatures.traits import Traits
from sbp.types import Atom, B, Split, Unreduced, parse

RowLike = Row | str
Rows = Sequence[RowLike] | Callable[[Op], Sequence[RowLike]]
Sample = tuple[Callable[..., Any], tuple[Any, ...]]

NAMED = ("pallas_call", "custom_partitioning")
"""Primitives that call a function: signatures are for the function, `pallas_call:NAME`."""

DRAWS = 3
"""Draws of operands and parts that a row is held against on each axis size."""


@dataclass(slots=True, eq=False, kw_only=True)
class Custom:
    """A registered signature, and what it has been checked on.

    Arguments:
      name: the operation's name.
      rows: the rows besides all-B.
      even: whether rows hold only where splits divide.
      samples: small calls to check it on.
      place: where it was registered.
    """

    name: str
    rows: Rows
    even: bool
    samples: tuple[Sample, ...]
    place: Span | None
    checked: set[Any] = field(default_factory=set)

    def rows_of(self, op: Op) -> tuple[Row, ...]:
        """The rows of an equation, all-B first; rows whose splits do not divide are left out where
        they do not hold."""
        given = self.rows(op) if callable(self.rows) else self.rows
        rows = [self.fitting(row if isinstance(row, Row) else parse_row(row), op) for row in given]
        return tuple(
            dict.fromkeys((all_b(op), *(r for r in rows if not self.even or _divides(r, op))))
        )

    def fitting(self, row: Row, op: Op) -> Row:
        """The row, if its atoms are types of the operands and results.

        Raises:
          SbpError: `bad-argument` for another number of atoms, a dim out of range, a monoid that
              the dtype does not have.
        """
        for what, atoms, avals in (("operand", row.ins, op.ins), ("result", row.outs, op.outs)):
            if len(atoms) != len(avals):
                raise self.error(f"row `{row}` has {len(atoms)} {what}s, the equation {len(avals)}")
            for k, (atom, aval) in enumerate(zip(atoms, avals, strict=True)):
                if isinstance(atom, Split) and atom.dim >= len(aval.shape):
                    raise self.error(
                        f"row `{row}` splits dim {atom.dim} of {what} {k}, which is {_shown(aval)}"
                    )
                if isinstance(atom, Unreduced) and atom.monoid not in admissible(aval.dtype):
                    raise self.error(
                        f"row `{row}` has {atom!r} for {what} {k}, which is {_shown(aval)}"
                    )
        if row.kernel != "local":
            raise self.error(
                f"row `{row}` names kernel {row.kernel!r}; give what runs on the shards as `local`"
            )
        return row

    def error(self, text: str, code: str = "bad-argument") -> SbpError:
        """An error about this signature."""
        return SbpError(
            f"the signature of {self.name!r}{f' registered at {self.place}' if self.place else ''}:"
            f" {text}",
            code=code,
        )

    def refute(
        self,
        primitive: Any,
        params: dict[str, Any],
        args: Sequence[Any],
        outs: Sequence[Any],
        sizes: Sequence[int],
    ) -> None:
        """Holds all rows of one equation against what it computes, on mesh axes of some sizes.

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
        # Once more with NaN among the operands, which an order of parts may lose.
        tried = [tuple(args), *([tuple(map(_with_nan, args))] if _has_floats(args) else [])]
        oracles = [Oracle(whole, _Compiled(primitive), operands) for operands in tried]
        for n in sizes:
            for row in self.rows_of(Op(self.name, params, ins, tuple(outs), n)):
                for oracle, seed in itertools.product(oracles, range(DRAWS)):
                    self._refute_row(oracle, row, n, seed)

    def _refute_row(self, oracle: Oracle, row: Row, n: int, seed: int) -> None:
        with np.printoptions(threshold=24, edgeitems=2, precision=6, suppress=True):
            try:
                wrong = oracle.refute_row(row, n, np.random.default_rng(seed))
            except SbpError:
                raise
            except Exception as error:
                # code of the user's: whatever it raises is the signature's fault, and said so
                raise self.error(
                    f"row `{row}` on {n} devices: `local` raised {type(error).__name__}: {error}",
                    "wrong-signature",
                ) from error
            if wrong:
                found = _counterexample(row, n, seed, oracle.args, wrong)
                raise self.error(
                    f"row `{row}` does not hold on {n} devices\n{found}", "wrong-signature"
                )


def _has_floats(args: Sequence[Any]) -> bool:
    return any(jnp.issubdtype(x.dtype, np.floating) for x in args)


def _with_nan(x: Any) -> Any:
    """The operand with NaN for every third element, when it has real floats."""
    if not jnp.issubdtype(x.dtype, np.floating):
        return x
    return np.where(
        np.arange(np.size(x)).reshape(np.shape(x)) % 3 == 1, np.asarray(np.nan, x.dtype), x
    )


_CUSTOM: dict[str, Custom] = {}


def register(
    primitive: Any,
    rows: Rows = (),
    *,
    local: Callable[..., Any] | None = None,
    samples: Sequence[Sample] = (),
    even: bool = False,
    replace: bool = False,
) -> None:
    """Gives an operation a signature. Before the first program that has the operation is typed, the
    rows are checked on numbers.

    Checked are the equation's own shapes and the samples, on mesh axes of size 2, 3 and the actual
    ones: for each row, the operands are cut into adversarial parts (sums that cancel, padding of
    NaN), `local` runs on each, and what the results stand for is compared with what the operation
    gives on whole operands.

    Arguments:
      primitive: a JAX primitive or its name; `pallas_call:NAME` or `custom_partitioning:NAME` for
          the call of a function, by its name.
      rows: the rows on one mesh axis besides all-B, as `Row` or as text; or a function from an `Op`
          to them.
      local: computes a device's parts of the results from those of the operands, `local(ctx,
        *parts)`, where `ctx` is a `LocalContext`; the primitive itself with the same parameters if
        None. A Pallas kernel has its shapes among its parameters, so that it always needs one.
      samples: `(function, arguments)` pairs with a small instance of the operation each. Needed
        where the actual operands have more than a few thousand elements; arguments may be
        `jax.ShapeDtypeStruct`s.
      even: whether rows hold only where the axis size divides the dims that they split.
      replace: whether a signature that was registered before gives way. sbp's own do not.

    Raises:
      SbpError: `unknown-option` for a name that no primitive has, `bad-argument` for an operation
        that has a signature already or that takes none, `type-syntax` for a row's text that does
        not parse; and at the first use, `wrong-signature` with a counterexample.

    >>> import jax.extend
    >>> twice_p = jax.extend.core.Primitive("twice")
    >>> register(twice_p, ["S(0) -> S(0)", "P(sum) -> P(sum)"])
    >>> unregister(twice_p)
    """
    name = _name(primitive)
    if isinstance(rows, str) or not (callable(rows) or isinstance(rows, Iterable)):
        raise SbpError(
            'rows= is a list of rows, such as ["S(0) -> S(0)"], or a function from an Op to one;'
            f" got {rows!r}"
        )
    if not callable(rows):
        rows = tuple(parse_row(r) if isinstance(r, str) else _row(r) for r in rows)
    if local is not None and not callable(local):
        raise SbpError(
            f"local= is a function of a LocalContext and a device's parts, got {local!r}"
        )
    for sample in samples:
        if not (
            isinstance(sample, tuple)
            and len(sample) == 2
            and callable(sample[0])
            and isinstance(sample[1], tuple)
        ):
            raise SbpError(
                f"a sample is a pair of a function and a tuple of arguments, got {sample!r}"
            )
    known = _CUSTOM.get(name)
    if rule_for(name) is not None and (known is None or not replace):
        where = (
            "which sbp gives it"
            if known is None
            else f"registered at {known.place}; replace=True replaces it"
        )
        raise SbpError(f"{name!r} has a signature already, {where}")
    if known is not None:
        remove_rule(name)
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
    _CUSTOM[name] = custom


def unregister(primitive: Any) -> None:
    """Takes a registered signature back; programs that were compiled with it keep it.

    Raises:
      SbpError: `bad-argument` for an operation without a registered signature.
    """
    name = _name(primitive, known=_CUSTOM)
    if name not in _CUSTOM:
        raise SbpError(f"no signature was registered for {name!r}{nearest(name, _CUSTOM)}")
    remove_rule(name)
    del _CUSTOM[name]


@contextlib.contextmanager
def registered(primitive: Any, rows: Rows = (), **options: Any) -> Iterator[None]:
    """A signature for as long as the context lasts; arguments as for `register`."""
    register(primitive, rows, **options)
    try:
        yield
    finally:
        unregister(primitive)


def custom_for(name: str) -> Custom | None:
    """The registered signature of an operation, or None."""
    return _CUSTOM.get(name)


def parse_row(text: str) -> Row:
    """Reads a row.

    Raises:
      SbpError: `type-syntax` for a text that is none.

    >>> parse_row("S(1), S(0) -> P")
    S(1), S(0) -> P(sum)
    """
    before, arrow, after = text.partition("->")
    if not arrow:
        raise SbpError(
            f"a row is `operand atoms -> result atoms`, got {text!r}", code="type-syntax"
        )
    ins, outs = (
        tuple(_atom(a, text) for a in side.split(",")) if side.strip() else ()
        for side in (before, after)
    )
    return Row(ins, outs)


def _atom(text: str, row: str) -> Atom:
    try:
        found = parse(f"axis:{text.strip()}")
    except SbpError:
        found = None
    if found is None or len(found) != 1:
        raise SbpError(
            f"{text.strip()!r} in row {row!r} is no atom: S(dim), B or P(monoid)",
            code="type-syntax",
        )
    return found["axis"]


def _row(row: Any) -> Row:
    if not isinstance(row, Row):
        raise SbpError(f"a row is a `Row` or a text such as 'S(0), B -> S(0)', got {row!r}")
    return row


def _name(primitive: Any, known: Any = ()) -> str:
    """The name that signatures are looked up by."""
    if isinstance(primitive, _jax.Primitive):
        name = primitive.name
    elif isinstance(primitive, str):
        name = primitive
    else:
        raise SbpError(f"a signature is for a JAX primitive or its name, got {primitive!r}")
    if name in NAMED:
        raise SbpError(
            f"{name!r} calls a function, and signatures are for functions: register '{name}:NAME'"
        )
    if name in REFUSED:
        raise SbpError(f"{name!r} takes no signature: it {REFUSED[name]}")
    reason = FALLBACK.get(name, "")
    if reason.startswith(
        (
            "taken apart",
            "dropped by the trace",
            "a region",
            "an annotation",
            "where a hand-written",
            "a collective",
        )
    ):
        raise SbpError(f"{name!r} takes no signature: {reason}")
    if (
        isinstance(primitive, str)
        and name not in known
        and not re.fullmatch(rf"({'|'.join(NAMED)}):[\w.-]+", name)
    ):
        primitives = {p.name for p in gc.get_objects() if isinstance(p, _jax.Primitive)}
        if name not in primitives:
            close = nearest(name, primitives)
            hint = close if "did you mean" in close else "; import first what defines it"
            raise SbpError(f"no primitive is named {name!r}{hint}", code="unknown-option")
    return name


def _on_parts(local: Callable[..., Any]) -> Callable[[LocalContext, Sequence[Any]], list[Any]]:
    def run(ctx: LocalContext, args: Sequence[Any]) -> list[Any]:
        out = local(ctx, *args)
        return list(out) if isinstance(out, tuple | list) else [out]

    return run


@dataclass(frozen=True, slots=True, eq=False)
class _Compiled:
    """A primitive that is compiled when it is bound: those of users need not have an evaluation
    rule."""

    primitive: Any
    multiple_results: bool = True

    def bind(self, *args: Any, **params: Any) -> list[Any]:
        return jax.jit(lambda *xs: _jax.bind(self.primitive, xs, params))(*args)


def _divides(row: Row, op: Op) -> bool:
    sides = (*zip(row.ins, op.ins, strict=True), *zip(row.outs, op.outs, strict=True))
    return all(op.divides(aval.shape[atom.dim]) for atom, aval in sides if isinstance(atom, Split))


def _shown(aval: Any) -> str:
    return f"{aval.dtype}[{','.join(map(str, aval.shape))}]"


def _counterexample(row: Row, n: int, seed: int, args: Sequence[Any], wrong: str) -> str:
    """What each device held, and what came of it. The oracle draws the parts of the operands first,
    in order."""
    rng = np.random.default_rng(seed)
    lines = []
    for k, (x, atom) in enumerate(zip(args, row.ins, strict=True)):
        words = np.asarray(jax.random.key_data(x) if _jax.is_extended(x.dtype) else x)
        lines.append(f"  operand {k} is {_line(words)}")
        lines += [
            f"    device {i} holds {_line(p)}"
            for i, p in enumerate(parts(words, atom, n, rng))
            if atom != B
        ]
    for atom in row.outs:
        wrong = wrong.replace(f"as {(atom,)}", f"as {atom!r}")
    return "\n".join([*lines, f"  {' '.join(wrong.split())}"])


def _line(x: Any) -> str:
    return " ".join(str(x).split())
