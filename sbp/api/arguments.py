"""Static and donated arguments of a function, read and checked as `jax.jit` does; donated arrays of
a call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from sbp import _jax_call
from sbp.errors import refused

Numbers = int | Sequence[int] | None
Names = str | Iterable[str] | None

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True, slots=True)
class ArgumentChoice:
    """Arguments of a function, chosen by number or by name.

    Arguments:
      numbers: positions. Negative ones count from the last argument of a call.
      names: names of arguments that are passed by name.
    """

    numbers: tuple[int, ...] = ()
    names: tuple[str, ...] = ()

    def positions(self, count: int, option: str) -> frozenset[int]:
        """The positions in a call.

        Arguments:
          count: the number of positional arguments of the call.
          option: where the numbers come from, for errors.

        Raises:
          SbpError: `bad-argument` for a negative number below `-count`.
        """
        for number in self.numbers:
            if number < -count:
                raise refused(
                    f"{option} has {number}, but the call has {count} positional arguments",
                    ValueError,
                )
        return frozenset(n % count if n < 0 else n for n in self.numbers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """What is known of a function's arguments before it is called.

    Arguments:
      names: names of its positional parameters; empty where Python has no signature of it.
      static: its static arguments.
      donated: its donated arguments.
    """

    names: tuple[str, ...]
    static: ArgumentChoice
    donated: ArgumentChoice

    @classmethod
    def of(
        cls, fn: Callable[..., Any], static: tuple[Numbers, Names], donated: tuple[Numbers, Names]
    ) -> Parameters:
        """Reads the options of `sbp.jit` as `jax.jit` does: of a number follows the name, and of a
        name the number, where only one of the two is given.

        Arguments:
          fn: the function.
          static: `static_argnums` and `static_argnames`.
          donated: `donate_argnums` and `donate_argnames`.

        Raises:
          SbpError: `bad-argument`, which is also a TypeError or ValueError, where `jax.jit` raises
            one: for numbers and names that the function does not have, of another kind, or that are
            static and donated.
        """
        try:
            signature = inspect.signature(fn)
        except (TypeError, ValueError):
            signature = None
        parameters = signature.parameters.values() if signature else ()
        names = tuple(p.name for p in parameters if p.kind in _POSITIONAL)
        open_ended = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters)
        try:
            read = _jax_call.argument_numbers(fn, signature, static, donated)
            if signature is not None and not open_ended:
                # A negative number then has a name, as in JAX 0.12.
                static = _counted(static, read[0][0], len(names))
                donated = _counted(donated, read[1][0], len(names))
                read = _jax_call.argument_numbers(fn, signature, static, donated)
        except (TypeError, ValueError) as error:
            raise refused(_sentence(error), error) from error
        return cls(names=names, static=ArgumentChoice(*read[0]), donated=ArgumentChoice(*read[1]))


def _counted(
    given: tuple[Numbers, Names], numbers: tuple[int, ...], count: int
) -> tuple[Numbers, Names]:
    return given if given[0] is None else (tuple(n % count for n in numbers), given[1])


def _sentence(error: Exception) -> str:
    """JAX's message on one line, without its full stop."""
    return " ".join(str(error).split()).removesuffix(".")


def refuse_taken(flat: Sequence[Any], names: Sequence[str], donated: Sequence[int]) -> None:
    """Refuses arrays of which JAX ends the process where they have several devices: one that is
    deleted, and a donated one that is another argument, too.

    Arguments:
      flat: the arguments.
      names: their names.
      donated: positions of the donated ones.

    Raises:
      SbpError: `bad-argument`.
    """
    first: dict[int, int] = {}
    taken = frozenset(donated)
    for i, x in enumerate(flat):
        if not isinstance(x, jax.Array):
            continue
        if x.is_deleted():
            raise refused(
                f"input {names[i]} is deleted: an earlier call took it by donation, or its delete()"
                " was called; pass the result of that call, or a copy made before it",
                RuntimeError,
            )
        same = first.setdefault(id(x), i) if taken else i
        if same != i and not taken.isdisjoint((same, i)):
            twice, other = (i, same) if i in taken else (same, i)
            raise refused(
                f"input {names[twice]} is donated, and is the same array as input {names[other]};"
                " pass a copy of it, or donate neither",
                ValueError,
            )
