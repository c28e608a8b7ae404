"""Wrong uses of the public API, drawn from a seed: right calls in which one argument, or a part of
one, is replaced by a value that does not belong there, left out, added or misspelt.

A wrong use may be accepted where the value happens to fit. An error must be an `SbpError` with a
code and a message, or what the user's own code raised. Where the same call of JAX raises a
`TypeError` or a `ValueError`, the error of sbp must be one, too.
"""

import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import sbp
from sbp.errors import CODES

PACKAGE = str(Path(sbp.__file__).parent)


class UsersError(Exception):
    """What the user's own code raises; sbp lets it pass."""


def raising(*args: Any, **kwargs: Any) -> Any:
    """A function of the user that raises."""
    raise UsersError("raised by the user's function")


class Unprintable:
    """An object that cannot be shown."""

    def __repr__(self) -> str:
        raise UsersError("raised by the user's repr")


class Unhashable:
    """An object that is no key."""

    __hash__ = None  # type: ignore[assignment]  # so Python says "unhashable" of a class


class UsersClass:
    """A class that takes any arguments."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...


class Words(str):
    """A string of a class of the user's."""


VALUES: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "True": lambda: True,
    "0": lambda: 0,
    "1": lambda: 1,
    "-1": lambda: -1,
    "huge int": lambda: 10**40,
    "1.5": lambda: 1.5,
    "nan": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "1j": lambda: 1j,
    "empty text": lambda: "",
    "blank": lambda: "  ",
    "data": lambda: "data",
    "misspelt": lambda: "dta",
    "unicode": lambda: "données ☃",
    "NUL": lambda: "\0",
    "surrogate": lambda: "\ud800",
    "long text": lambda: "x" * 100_000,
    "bytes": lambda: b"data",
    "own string": lambda: Words("model"),
    "[]": list,
    "()": tuple,
    "{}": dict,
    "set": lambda: {"data"},
    "[1]": lambda: [1],
    "[None]": lambda: [None],
    "['data']": lambda: ["data"],
    "twice": lambda: ("data", "data"),
    "against the mesh": lambda: ("model", "data"),
    "{'data': 1}": lambda: {"data": 1},
    "{1: 2}": lambda: {1: 2},
    "{'a': [..]}": lambda: {"a": [{"b": ("data", None)}]},
    "mixed keys": lambda: {1: "data", "b": "data"},
    "deep": lambda: [[[[[[[["data"]]]]]]]],
    "object": object,
    "class": lambda: UsersClass,
    "function": lambda: lambda *a, **k: None,
    "raising": lambda: raising,
    "iterator": lambda: iter(["data"]),
    "unhashable": Unhashable,
    "unprintable": Unprintable,
    "np.int64": lambda: np.int64(1),
    "np.float32": lambda: np.float32(1.5),
    "np.array": lambda: np.arange(3),
    "np.array of text": lambda: np.array(["data", "model"]),
    "np.array of objects": lambda: np.array([None, "data"], dtype=object),
    "np.empty": lambda: np.zeros((0, 4)),
    "jnp.array": lambda: jnp.ones((8, 4)),
    "key": lambda: jax.random.key(0),
    "shape": lambda: jax.ShapeDtypeStruct((8, 4), jnp.float32),
    "dtype": lambda: np.dtype("float32"),
    "spec": lambda: jax.sharding.PartitionSpec("data"),
    "spec of an unknown axis": lambda: jax.sharding.PartitionSpec("nope"),
    "spec twice": lambda: jax.sharding.PartitionSpec("data", ("model", "data")),
    "S(7)": lambda: sbp.S(7),
    "P": lambda: sbp.P,
    "B": lambda: sbp.B,
    "NdSbp": lambda: sbp.NdSbp({"nope": sbp.S(0)}),
    "mesh": lambda: jax.sharding.AbstractMesh((2, 4), ("data", "model")),
    "exception": lambda: UsersError("x"),
    "module": lambda: np,
    "Ellipsis": lambda: ...,
    "slice": lambda: slice(1),
}
"""Values that do not belong where they are put, each made anew for each use."""


@dataclass(frozen=True, slots=True)
class Use:
    """A right use of a public function.

    Arguments:
      name: the function, for messages.
      call: runs it.
      args: positional arguments; factories, because a use may consume them.
      kwargs: keyword arguments.
      peer: the function of JAX that takes the same arguments; None for none.
    """

    name: str
    call: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    peer: Callable[..., Any] | None = None


@dataclass(frozen=True, slots=True)
class Misuse:
    """A wrong use.

    Arguments:
      use: the right use.
      change: what is wrong with this one.
      build: makes its arguments.
    """

    use: Use
    change: str
    build: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]

    def __str__(self) -> str:
        return f"{self.use.name}: {self.change}"


def misuses(use: Use) -> Iterator[Misuse]:
    """All wrong uses that differ from a right one in one place."""
    for place, put in _places(use):
        for name, value in VALUES.items():
            yield Misuse(use, f"{place} = {name}", lambda put=put, value=value: put(value()))
    for k in range(len(use.args)):
        fewer = (*use.args[:k], *use.args[k + 1 :])
        yield Misuse(use, f"without argument {k}", lambda fewer=fewer: (fewer, use.kwargs))
    for extra in ("data", None, 3):
        yield Misuse(
            use, f"{extra!r} too many", lambda extra=extra: ((*use.args, extra), use.kwargs)
        )
    for key in use.kwargs:
        renamed = {(f"{k[:-1]}" if k == key else k): v for k, v in use.kwargs.items()}
        yield Misuse(use, f"{key} misspelt", lambda renamed=renamed: (use.args, renamed))
        fewer_named = {k: v for k, v in use.kwargs.items() if k != key}
        yield Misuse(use, f"without {key}", lambda named=fewer_named: (use.args, named))
    for key in ("axis", "mesh_axis", "été"):
        more = use.kwargs | {key: "data"}
        yield Misuse(use, f"{key}= too many", lambda more=more: (use.args, more))


def _places(use: Use) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """The places where a value can be put, each with a function that puts it there."""
    for k, arg in enumerate(use.args):
        for where, put in _inside(arg):
            yield (
                f"argument {k}{where}",
                lambda v, k=k, put=put: (
                    (*use.args[:k], put(v), *use.args[k + 1 :]),
                    use.kwargs,
                ),
            )
    for key, arg in use.kwargs.items():
        for where, put in _inside(arg):
            yield (
                f"{key}{where}",
                lambda v, key=key, put=put: (use.args, use.kwargs | {key: put(v)}),
            )


def _inside(value: Any) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    yield "", lambda v: v
    if type(value) in (tuple, list):
        for k, item in enumerate(value):
            for where, put in _inside(item):
                yield (
                    f"[{k}]{where}",
                    lambda v, k=k, put=put: type(value)((*value[:k], put(v), *value[k + 1 :])),
                )
    if type(value) is dict:
        for key, item in value.items():
            for where, put in _inside(item):
                yield f"[{key!r}]{where}", lambda v, key=key, put=put: value | {key: put(v)}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a wrong use.

    Arguments:
      verdict: `accepted`, `refused` (an `SbpError`), `user` (what the user's code raised), `raw`
        (another exception), `mute` (an `SbpError` without a known code or a message), `kind` (JAX
        raises a `TypeError` or a `ValueError` there, and the error of sbp is none).
      detail: the exception.
    """

    verdict: str
    detail: str = ""

    @property
    def failed(self) -> bool:
        """Whether this must not happen."""
        return self.verdict in ("raw", "mute", "kind")


def judge(misuse: Misuse) -> Outcome:
    """Runs a wrong use."""
    error = _error(misuse.use.call, misuse)
    if error is None:
        return Outcome("accepted")
    if not isinstance(error, sbp.SbpError):
        if isinstance(error, UsersError) or _of_the_user(error):
            return Outcome("user", repr(error)[:200])
        return Outcome("raw", "".join(traceback.format_exception(error)[-8:]))
    text = str(error)
    if error.code not in CODES or len(text.split()) < 5:
        return Outcome("mute", text[:1000])
    if misuse.use.peer is not None:
        theirs = _error(misuse.use.peer, misuse)
        for kind in (TypeError, ValueError):
            if isinstance(theirs, kind) and not isinstance(error, kind):
                return Outcome("kind", f"{text[:300]}\nJAX raises {theirs!r}"[:600])
    return Outcome("refused", text)


def _error(call: Callable[..., Any], misuse: Misuse) -> Exception | None:
    args, kwargs = misuse.build()
    try:
        with warnings.catch_warnings(action="ignore"):
            call(*args, **kwargs)
    except Exception as error:  # whatever the wrong use raises is what is judged
        return error
    return None


def _of_the_user(error: BaseException) -> bool:
    """Whether a function of the user raised: the innermost frame outside of libraries is neither
    one of sbp nor the call itself."""
    for frame in reversed([f for f, _ in traceback.walk_tb(error.__traceback__)]):
        file = frame.f_code.co_filename
        if file.startswith(PACKAGE):
            return False
        if file.startswith(str(Path(__file__).parent)):
            return frame.f_code.co_name.startswith("users_")
    return False
