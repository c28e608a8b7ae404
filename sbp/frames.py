"""Frames of the Python stack: which are the user's, and tracebacks without the others."""

import contextlib
import functools
import inspect
import os
import traceback
from collections.abc import Iterable, Iterator
from types import FrameType, TracebackType

import jax

_FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")
_OTHERS = os.path.join(os.path.dirname(jax.__file__), ""), contextlib.__file__, functools.__file__


def is_users(frame: FrameType) -> bool:
    """Whether a frame is outside of sbp and JAX. `sbp.moe` is a user of sbp."""
    file = os.path.abspath(frame.f_code.co_filename)
    return not (
        _is_own(frame)
        or file.startswith(_OTHERS)
        # The constructor of a dataclass has no file.
        or frame.f_code.co_qualname.startswith("__create_fn__")
    )


def _is_own(frame: FrameType) -> bool:
    file = os.path.abspath(frame.f_code.co_filename)
    return file.startswith(_FOLDER) and not file.startswith(os.path.join(_FOLDER, "moe", ""))


def users_stacklevel() -> int:
    """The `stacklevel` with which `warnings.warn`, called by the same function, points at the
    user's innermost line."""
    frames = enumerate(traceback.walk_stack(inspect.currentframe()))
    return next((level for level, (frame, _) in frames if is_users(frame)), 1)


def tracebacks(error: BaseException) -> Iterator[TracebackType]:
    """The traceback of an error, frame by frame, the outermost first."""
    at = error.__traceback__
    while at is not None:
        yield at
        at = at.tb_next


def users_traceback(error: BaseException) -> TracebackType | None:
    """The traceback of an error without the frames of sbp and of JAX; the whole one where JAX shows
    its own (`jax_traceback_filtering` is "off")."""
    if _shows_all_frames():
        return error.__traceback__
    return _traceback(one for one in tracebacks(error) if is_users(one.tb_frame))


def around_users_function(error: BaseException) -> TracebackType | None:
    """The traceback of an error that the user's function raised, without the frames of sbp that
    called the function; the whole one for another error."""
    frames = [*tracebacks(error)]
    own = [n for n, t in enumerate(frames) if _is_own(t.tb_frame)]
    if _shows_all_frames() or not any(is_users(t.tb_frame) for t in frames[own[-1] + 1 :]):
        return error.__traceback__
    return _traceback(
        t for n, t in enumerate(frames) if not own[0] <= n <= own[-1] or is_users(t.tb_frame)
    )


def _shows_all_frames() -> bool:
    return getattr(jax.config, "jax_traceback_filtering", "") == "off"


def _traceback(frames: Iterable[TracebackType]) -> TracebackType | None:
    return functools.reduce(
        lambda rest, one: TracebackType(rest, one.tb_frame, one.tb_lasti, one.tb_lineno),
        reversed([*frames]),
        None,
    )
