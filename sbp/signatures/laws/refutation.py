"""Registered signatures, and their check on numbers. Each row is tried on adversarial parts of
small operands; an error shows the counterexample of a row that fails."""

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
from sbp.kinds import shown
from sbp.signatures.factors import admissible
from sbp.signatures.laws.oracle import Oracle, words_of
from sbp.signatures.laws.parts import parts
from sbp.signatures.rule import Op, Row, all_b
from sbp.types import Atom, B, Split, Unreduced, parse

RowLike = Row | str
"""A row, or the text of one."""
Rows = Sequence[RowLike] | Callable[[Op], Sequence[RowLike]]
"""The rows of an operation, or a function from an equation to them."""
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
    rows: Rows
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
        given = self.rows(op) if callable(self.rows) else self.rows
        if not isinstance(given, Sequence) or not all(isinstance(r, Row | str) for r in given):
            raise self.error(f"rows= returned {shown(given)}, which is no list of rows")
        rows = [self.fitting(row if isinstance(row, Row) else parse_row(row), op) for row in given]
        return tuple(
            dict.fromkeys((all_b(op), *(r for r in rows if not self.even or _divides(r, op))))
        )

    def fitting(self, row: Row, op: Op) -> Row:
        """Returns the row, if its atoms fit the operands and results.

        Raises:
          SbpError: `bad-argument` for a wrong number of atoms, a dim out of range, a monoid that
              the dtype does not have, or a row that names a kernel.
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
        tried = [tuple(args), *([tuple(map(_with_nan, args))] if _has_floats(args) else [])]
        oracles = [Oracle(whole, _Compiled(primitive), operands) for operands in tried]
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
                found = _counterexample(row, n, seed, oracle.args, wrong)
                raise self.error(
                    f"row `{row}` does not hold on {n} devices", "wrong-signature", found
                )


def _has_floats(args: Sequence[Any]) -> bool:
    return any(jnp.issubdtype(x.dtype, np.floating) for x in args)


def _with_nan(x: Any) -> Any:
    """The operand with NaN for every third element; unchanged if it has no real floats."""
    if not jnp.issubdtype(x.dtype, np.floating):
        return x
    return np.where(
        np.arange(np.size(x)).reshape(np.shape(x)) % 3 == 1, np.asarray(np.nan, x.dtype), x
    )


def parse_row(text: str) -> Row:
    """The row that a text such as `S(1), S(0) -> P` states.

    Raises:
      SbpError: `type-syntax` for a text that is no row.

    >>> parse_row("S(1), S(0) -> P")
    S(1), S(0) -> P(sum)
    """
    before, arrow, after = text.partition("->")
    if not arrow:
        raise SbpError(
            f"a row is `operand atoms -> result atoms`, got {shown(text)}", code="type-syntax"
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
    try:
        found = parse(f"axis:{text.strip()}")
    except SbpError:
        found = None
    if found is None or len(found) != 1:
        raise SbpError(
            f"{shown(text.strip())} in row {shown(row)} is no atom: S(dim), B or P(monoid)",
            code="type-syntax",
        )
    return found["axis"]


@dataclass(frozen=True, slots=True, eq=False)
class _Compiled:
    """A primitive that is compiled when it runs: a user's primitive may have a lowering and no
    evaluation rule."""

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
