"""Questions of a trace that its symbolic sizes do not decide, and constraints that decide them.

>>> import jax
>>> (b,) = jax.export.symbolic_shape("b")
>>> try:
...     b > 5
... except jax.errors.InconclusiveDimensionOperation as error:
...     print(deciding_constraints(error, ()))
('b >= 6', 'b <= 5')
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import jax

from sbp import _jax
from sbp.errors import SbpError
from sbp.sizes.expressions import COMPARISONS

# JAX removes the frames that hold the sizes from the traceback of its errors. Only its messages
# have them.
_REST = re.compile(r"remainder (.+) should be 0")
_COMPARISON = re.compile(r"comparison '(.+?)' (>=|<=|>|<) '(.+?)' is inconclusive")
_OPPOSITE = {"<": ">=", ">=": "<", ">": "<=", "<=": ">"}


@contextlib.contextmanager
def deciding_sizes(advice: str, given: tuple[str, ...] | None = None) -> Iterator[None]:
    """Traces the user's function inside.

    Arguments:
      advice: what to change where the function asks something that symbolic sizes do not decide.
      given: the constraints on the sizes of the arguments; None where the arguments have numbers.

    Raises:
      SbpError: `symbolic-sizes`, at the user's line that asks it.
    """
    try:
        yield
    except jax.errors.InconclusiveDimensionOperation as error:
        first = " ".join(str(error).split("\n")[0].split()).removesuffix(".")
        found = () if given is None else deciding_constraints(error, given)
        if found:
            either = " or ".join(f'"{c}"' for c in found)
            advice = f"add {either} to the constraints of jax.export.symbolic_shape, or {advice}"
        raise SbpError(
            f"the program asks what its symbolic sizes do not say: {first}; {advice}",
            code="symbolic-sizes",
            span=_jax.raising_span(error),
        ) from error


def deciding_constraints(error: BaseException, given: tuple[str, ...]) -> tuple[str, ...]:
    """The constraints of which each answers the question behind an error, as JAX finds when it has
    them; empty where there are none, or the question is not known.

    Arguments:
      error: JAX's error about symbolic sizes.
      given: the constraints that there are.
    """
    rest, comparison = _REST.search(str(error)), _COMPARISON.search(str(error))
    if rest is not None:
        size, texts = rest[1], [f"{rest[1]} == 0"]
        asked = [(size, "==", "0")] * 2
    elif comparison is not None:
        left, how, right = comparison.groups()
        asked = [(left, how, right), (left, _OPPOSITE[how], right)]
        texts = [f"{a} {c} {b}" for a, c, b in map(_closed, asked)]
    else:
        return ()
    return tuple(t for t, a in zip(texts, asked, strict=False) if _answered((*given, t), *a))


def _closed(asked: tuple[str, str, str]) -> tuple[str, str, str]:
    """A comparison as JAX takes it in a constraint: with `>=` or `<=`."""
    left, how, right = asked
    if how in (">=", "<="):
        return asked
    step = 1 if how == ">" else -1
    by = int(right) + step if right.lstrip("-").isdigit() else f"{right} {step:+d}"
    return left, f"{how}=", str(by)


def _answered(constraints: tuple[str, ...], left: str, how: str, right: str) -> bool:
    """Whether JAX answers a comparison with yes under some constraints."""
    try:
        scope = jax.export.SymbolicScope(constraints)
        sizes = jax.export.symbolic_shape(f"{left}, {right}", scope=scope)
        return bool(COMPARISONS[how](*sizes))
    except (ValueError, jax.errors.InconclusiveDimensionOperation):
        return False
