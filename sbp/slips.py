"""Slips: a value in a call that is almost right, such as the misspelt name of a mesh axis. sbp
tries the call with the likely value before it suggests it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import jax

from sbp.spans import Label, Span


@dataclass(frozen=True, slots=True)
class Slip:
    """A wrong value, and what was probably meant.

    Arguments:
      wrong: the value.
      likely: values in its place, the likeliest first.
    """

    wrong: Any
    likely: tuple[Any, ...]


class MaybeSlip:
    """The part of an error that says how it may be mended.

    Attributes:
      slip: the value that is almost right; None where it is not known.
      option: the argument of `sbp.jit` in question; empty for none.
      call: the user's call of which an argument is wrong, where it is not the call that raises.
      related: other places that are part of the cause.
    """

    slip: Slip | None = None
    option: str = ""
    call: Span | None = None
    related: tuple[Label, ...] = ()

    def with_slip(self, wrong: Any, *likely: Any) -> Self:
        """The same error, with a wrong value and what was meant, the likeliest first."""
        self.slip = Slip(wrong, likely)
        return self

    def __reduce__(self) -> Any:
        # What is raised in another process comes back with its code and its diagnostics.
        state = {name: value for name, value in self.__dict__.items() if name != "slip"}
        return _restore, (type(self), getattr(self, "args", ()), state)


def _restore(cls: type[Any], args: tuple[Any, ...], state: dict[str, Any]) -> Any:
    """An error that was copied or pickled."""
    found: Any = cls.__new__(cls, *args)
    found.args = args
    found.__dict__.update(state)
    return found


@dataclass(frozen=True, slots=True)
class Correction:
    """Another value for a wrong one in a call.

    Arguments:
      at: the call.
      wrong: the value that the call has.
      right: the value in its place.
    """

    at: Span
    wrong: Any
    right: Any

    def of(self, value: Any) -> Any:
        """An argument of the call after the correction. The name of a mesh axis may stand in the
        text of a type."""
        if all(isinstance(v, str) for v in (value, self.wrong, self.right)):
            return self.right if value == self.wrong else rename_axis(value, self.wrong, self.right)
        same = type(value) is type(self.wrong) and value == self.wrong
        return self.right if same else value

    def holds_at(self, file: str, line: int) -> bool:
        """Whether a line is part of the call."""
        return file == self.at.file and self.at.line <= line <= max(self.at.line, self.at.end_line)


def rename_axis(text: str, name: str, other: str) -> str:
    """The text of a type with another name for a mesh axis.

    >>> rename_axis("data:S(0) a:S(1)", "a", "b")
    'data:S(0) b:S(1)'
    """
    return f" {text}".replace(f" {name}:", f" {other}:")[1:]


correcting = jax.make_user_context(None)
"""The context in which a `Correction` holds. It is part of the key of JAX's caches, so that what is
traced with a correction is not found without it."""
