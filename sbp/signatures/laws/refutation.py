"""A registered signature, and its refutation on numbers: each row is tried on adversarial parts of
small operands, and a row that fails is shown with its counterexample."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sbp import _jax
from sbp.errors import SbpError, Span
from sbp.signatures.factors import admissible
from sbp.signatures.laws.oracle import Oracle
from sbp.signatures.laws.parts import parts
from sbp.signatures.rule import Op, Row, all_b
from sbp.types import Atom, B, Split, Unreduced, parse

RowLike = Row | str
Rows = Sequence[RowLike] | Callable[[Op], Sequence[RowLike]]
Sample = tuple[Callable[..., Any], tuple[Any, ...]]

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

    def error(self, text: str, code: str = "bad-argument", details: Sequence[str] = ()) -> SbpError:
        """An error about this signature."""
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
                    f"row `{row}` does not hold on {n} devices", "wrong-signature", found
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


def _counterexample(row: Row, n: int, seed: int, args: Sequence[Any], wrong: str) -> list[str]:
    """What each device held, and what came of it. The oracle draws the parts of the operands first,
    in order."""
    rng = np.random.default_rng(seed)
    lines = []
    for k, (x, atom) in enumerate(zip(args, row.ins, strict=True)):
        words = np.asarray(jax.random.key_data(x) if _jax.is_extended(x.dtype) else x)
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
