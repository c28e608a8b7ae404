"""What public functions take. Arguments are checked here, once, before a function sees them: how
many there are, their names, and of what kind each is.

>>> @takes("double", n=WHOLE_NUMBER)
... def double(n: int) -> int:
...     return 2 * n
>>> double(4)
8
>>> double("4")
Traceback (most recent call last):
sbp.errors.ArgumentError: bad-argument: double: `n` must be a whole number, got '4'
"""

import contextlib
import functools
import inspect
import numbers
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set as AbstractSet
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np

from sbp.errors import (
    CODES,
    ArgumentError,
    ArgumentTypeError,
    Diagnostic,
    Help,
    Label,
    RuleRow,
    SbpError,
    correcting,
    counted,
    nearest,
    refused,
)
from sbp.frames import around_users_function, is_users, users_traceback

Params = ParamSpec("Params")
Result = TypeVar("Result")
Made = TypeVar("Made")

SHOWN_CHARACTERS = 200
"""Characters of a wrong value that an error shows."""


def show(value: Any) -> str:
    """A wrong value as an error shows it: on one line, its end left out where it is long. A value
    that cannot show itself is named by its class.

    >>> show("data"), len(show("x" * 10_000)) < 300
    ("'data'", True)
    """
    try:
        text = " ".join(repr(value).split()).encode("utf-8", "backslashreplace").decode("utf-8")
    except Exception:  # a `repr` of the user's may raise anything, and is not what is wrong
        return f"an object of class {type(value).__name__}"
    left_out = len(text) - SHOWN_CHARACTERS
    return text if left_out <= 0 else f"{text[:SHOWN_CHARACTERS]}.. ({left_out} more characters)"


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of argument.

    Arguments:
      what: the end of the sentence "the argument must be ..".
      accepts: whether a value is of the kind.
      code: the code of the error for another value.
    """

    what: str
    accepts: Callable[[Any], bool]
    code: str = "bad-argument"

    def refusal(self, function: str, name: str, value: Any) -> ArgumentError:
        """The error for a value of another kind, for the caller to raise."""
        return ArgumentError(
            f"{function}: `{name}` must be {self.what}, got {show(value)}", code=self.code
        )


def one_of(options: Sequence[str]) -> Kind:
    """The kind of a string that is one of a few.

    >>> one_of(("a", "b")).accepts("a")
    True
    """
    words = ", ".join(f'"{o}"' for o in options)
    return Kind(
        f"one of {words}",
        lambda x: isinstance(x, str) and x in options,
        code="unknown-option",
    )


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number, of Python or NumPy; `True` is none."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


FUNCTION = Kind("a function", callable)
WHOLE_NUMBER = Kind("a whole number", is_whole)
NUMBER = Kind(
    "a number",
    lambda x: (
        isinstance(x, numbers.Real)
        and not isinstance(x, bool)
        and (not isinstance(x, int) or abs(x) < 2**1000)  # which a float holds
    ),
)
FLAG = Kind("True or False", lambda x: isinstance(x, bool))
TEXT = Kind("a string", lambda x: isinstance(x, str))
AXIS = Kind(
    'the name of a mesh axis, such as "data"', lambda x: isinstance(x, str) and bool(x.strip())
)
NO_AXIS_NAME = ":,;=%#\"'<>()[]{}"
"""Characters, besides blanks, that texts of types and plans cannot have in the name of a mesh
axis."""

AXIS_NAMES = "the name of a mesh axis has no blanks, quotes or brackets, and none of : , ; = % #"


def can_name(mesh_axis: str) -> bool:
    """Whether texts of types and plans can name a mesh axis.

    >>> can_name("data"), can_name("a b")
    (True, False)
    """
    return bool(mesh_axis) and not any(c.isspace() or c in NO_AXIS_NAME for c in mesh_axis)


AXES = Kind(  # a collection can be read more than once
    'a collection of names of mesh axes, such as ("data", "model")',
    lambda x: (
        isinstance(x, Sequence | AbstractSet | Mapping)
        and not isinstance(x, str)
        and all(isinstance(v, str) for v in x)
    ),
)

ORDERED_AXES = Kind(
    'a sequence of names of mesh axes, such as ("data", "model")',
    lambda x: not isinstance(x, AbstractSet) and AXES.accepts(x),
)


def or_none(kind: Kind) -> Kind:
    """The kind, or None."""
    return Kind(f"{kind.what}, or None", lambda x: x is None or kind.accepts(x), kind.code)


MESH = Kind(
    "a jax.sharding.Mesh or an AbstractMesh, of at most 2**24 devices and of no axis with size 0",
    lambda x: (
        isinstance(x, jax.sharding.Mesh | jax.sharding.AbstractMesh)
        and x.size <= 2**24
        and 0 not in x.axis_sizes
    ),
)


EACH_AXIS = Kind(
    'the name of a mesh axis, and each name is an argument of its own, such as "data", "model"',
    AXIS.accepts,
)
"""The kind of each of several names of mesh axes."""

BY_POSITION: Mapping[str, str] = dict.fromkeys(
    ("axis", "axes", "mesh_axis", "mesh_axes", "axis_name"),
    'give names of mesh axes by position, each an argument of its own, such as "data", "model"',
)
"""Hints of `takes` for functions that take names of mesh axes."""


def _shown(signature: inspect.Signature) -> str:
    """Parameters as a call writes them. An object as a default would show its address."""
    defaults = {
        p: p.empty if type(p.default) is object else p.default
        for p in signature.parameters.values()
    }
    return str(
        inspect.Signature([p.replace(annotation=p.empty, default=d) for p, d in defaults.items()])
    )


def _arguments(
    name: str, signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """The arguments of a call by parameter; each value of `*args` and `**kwargs` is one.

    Raises:
      ArgumentTypeError: for arguments that are missing, too many or misnamed.
    """
    parameters = signature.parameters
    try:
        bound = signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        strange = next((k for k in kwargs if k not in parameters), None)
        near = ("" if strange is None else nearest(strange, parameters)) + "".join(
            f"; pass {p.name}={p.name}"
            for p in parameters.values()
            if p.kind is p.KEYWORD_ONLY and str(error).endswith(f": '{p.name}'")
        )
        raise ArgumentTypeError(f"{name}: {error}{near}; it takes {_shown(signature)}") from None
    for parameter, value in bound.items():
        match parameters[parameter].kind:
            case inspect.Parameter.VAR_POSITIONAL:
                yield from ((parameter, one) for one in value)
            case inspect.Parameter.VAR_KEYWORD:
                yield from ((parameter, one) for one in value.values())
            case _:
                yield parameter, value


def public(function: Callable[Params, Result]) -> Callable[Params, Result]:
    """A decorator of functions that users call: an error of sbp that leaves one has a traceback of
    the user's frames, and no cause inside of sbp or JAX. The traceback of an error that the user's
    function raises has no frames of sbp."""

    @functools.wraps(function)
    def called(*args: Params.args, **kwargs: Params.kwargs) -> Result:
        try:
            return function(*args, **kwargs)
        except SbpError as error:
            cause, notes = error.__cause__, getattr(error, "__notes__", ())
            error.__notes__ = [note for note in notes if "JAX has removed its" not in note]
            frames = users_traceback(cause) if cause else None
            told = cause.with_traceback(frames) if cause and frames else None
            raise error.with_traceback(users_traceback(error)) from told
        except Exception as error:  # of the user's function, which may raise anything
            # It is the same error and keeps its context, so it is raised from no other.
            raise error.with_traceback(around_users_function(error))  # noqa: B904

    return called


def takes(
    name: str, hints: Mapping[str, str] = MappingProxyType({}), /, *, skip: int = 0, **kinds: Kind
) -> Callable[[Callable[Params, Result]], Callable[Params, Result]]:
    """A decorator of public functions that checks their arguments.

    Arguments:
      name: the function, as users call it.
      hints: for names that are no parameters, what to do instead.
      skip: how many parameters come first that a call does not write: 1 for methods.
      **kinds: by parameter, what it takes; `*args` and `**kwargs` by their names, for each of
          their values. A default value is not checked.

    The decorated function raises an `ArgumentError`; an `ArgumentTypeError` for arguments that are
    missing, too many or misnamed; and the errors of its own.
    """

    def decorated(function: Callable[Params, Result]) -> Callable[Params, Result]:
        signature = inspect.Signature([*inspect.signature(function).parameters.values()][skip:])

        @public
        @functools.wraps(function)
        def checked(*args: Params.args, **kwargs: Params.kwargs) -> Result:
            for hinted in hints.keys() & kwargs.keys():
                raise ArgumentTypeError(f"{name} takes no {hinted}=: {hints[hinted]}")
            positional, named = _corrected(args, kwargs, skip)
            for parameter, value in _arguments(name, signature, positional[skip:], named):
                if parameter in kinds and not kinds[parameter].accepts(value):
                    raise kinds[parameter].refusal(name, parameter, value)
            corrected: Any = function  # its arguments may be others than the caller's
            return corrected(*positional, **named)

        return checked

    return decorated


def _corrected(args: Any, kwargs: Any, skip: int) -> tuple[Any, Any]:
    """The arguments of a call of the user, corrected where it is the call with a slip. The first
    `skip` arguments stay."""
    correction = correcting.value
    if correction is None:
        return args, kwargs
    frames = traceback.walk_stack(inspect.currentframe())
    frame = next((frame for frame, _ in frames if is_users(frame)), None)
    if frame is None or not correction.holds_at(frame.f_code.co_filename, frame.f_lineno):
        return args, kwargs
    renames = isinstance(correction.right, str)
    named = {correction.of(k) if renames else k: correction.of(v) for k, v in kwargs.items()}
    return (*args[:skip], *map(correction.of, args[skip:])), named


_SEARCH = ("sbp.infer.", "sbp.signatures.")


def made_of(name: str, /, **kinds: Kind) -> Callable[[type[Made]], type[Made]]:
    """A decorator of classes that checks the arguments of their constructor, like `takes`. It does
    not check calls in `_SEARCH`, which makes hundreds of thousands of rows."""

    def decorated(cls: type[Made]) -> type[Made]:
        unchecked = cls.__init__
        checked = takes(name, skip=1, **kinds)(unchecked)

        @functools.wraps(unchecked)
        def made(self: Made, *args: Any, **kwargs: Any) -> None:
            frame = inspect.currentframe()
            caller = frame.f_back.f_globals.get("__name__", "") if frame and frame.f_back else ""
            (unchecked if caller.startswith(_SEARCH) else checked)(self, *args, **kwargs)

        cls.__init__ = made
        return cls

    return decorated


made_of(
    "Diagnostic",
    code=Kind(
        "a code that `sbp explain` lists",
        lambda x: isinstance(x, str) and x in CODES,
        code="unknown-option",
    ),
    severity=one_of(("error", "warning", "note")),
    **dict.fromkeys(("title", "rule", "scope"), TEXT),
    **{
        name: Kind(
            f"a tuple of {cls.__name__}",
            lambda x, c=cls: isinstance(x, tuple) and all(isinstance(v, c) for v in x),
        )
        for name, cls in (("labels", Label), ("rows", RuleRow), ("notes", str), ("helps", Help))
    },
)(Diagnostic)


class Reusable(contextlib.ContextDecorator):
    """A context that may be entered several times, also inside of itself.

    Arguments:
      make: makes a context that may be entered once.
    """

    def __init__(self, make: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
        self._make, self._entered = make, list[contextlib.AbstractContextManager[Any]]()

    def __enter__(self) -> None:
        self._entered.append(self._make())
        self._entered[-1].__enter__()

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)


def instance_of(cls: type, made_by: str) -> Kind:
    """The kind of what sbp makes itself.

    Arguments:
      cls: its class.
      made_by: the public call that makes it.
    """
    return Kind(f"a {cls.__name__}, which {made_by} makes", lambda x: isinstance(x, cls))


REDUCE_DTYPES = ("float32", "bfloat16", "float16")
"""The dtypes of `reduce_dtype`. Integers add exactly in any order, and wider floats have no
collectives on most devices."""


def reduce_dtype_name(reduce_dtype: Any) -> str | None:
    """The `reduce_dtype` of `sbp.jit` and `annotate` by its name.

    Raises:
      SbpError: `unknown-option` for anything but None and `REDUCE_DTYPES`.

    >>> reduce_dtype_name("float32")
    'float32'
    """
    if reduce_dtype is None:
        return None
    try:
        name = "" if isinstance(reduce_dtype, jax.Array) else np.dtype(reduce_dtype).name
    except (TypeError, ValueError):  # NumPy raises either for what is no dtype
        name = ""
    if name not in REDUCE_DTYPES:
        raise ArgumentError(
            "reduce_dtype must be jnp.float32, jnp.bfloat16 or jnp.float16, or None for the"
            f" platform's own sums, got {show(reduce_dtype)}",
            code="unknown-option",
        )
    return name


def check_alive(x: Any, what: str) -> None:
    """Raises an error for an array whose memory is gone; a traced array has none."""
    with contextlib.suppress(jax.errors.ConcretizationTypeError):
        if isinstance(x, jax.Array) and x.is_deleted():
            raise refused(
                f"{what} is deleted: an earlier call took it by donation, or its delete() was"
                " called; pass the result of that call, or a copy made before it",
                RuntimeError,
            )


def takes_no_such_call(error: TypeError) -> bool:
    """Whether a call failed before a line of the user ran, because the callee, or the function that
    JAX wraps in it, takes other arguments. The frame that makes the call has to ask this."""
    if error.__traceback__ is None or error.__traceback__.tb_next is None:
        return error.__traceback__ is not None
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__.tb_next)]
    about_arguments = any(words in str(error) for words in (") takes ", ") missing ", ") got "))
    return about_arguments and not any(map(is_users, frames))


def fits(function: Callable[..., Any], args: Sequence[Any]) -> None:
    """Checks that a function of the user can be called with so many arguments.

    Raises:
      ArgumentTypeError: as Python says it.
    """
    try:
        # A wrapper need not take the arguments of what it wraps.
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):  # a function of C has none
        return
    try:
        signature.bind(*args)
    except TypeError as error:
        raise ArgumentTypeError(
            f"{getattr(function, '__name__', 'the function')} is called with"
            f" {counted(len(args), 'argument')}: {error}; its parameters are {signature}"
        ) from error


def refuse_unless(kind: Kind, function: str, name: str, values: Iterable[Any]) -> None:
    """Checks values that stand inside of an argument.

    Raises:
      ArgumentError: for the first value of another kind.
    """
    for value in values:
        if not kind.accepts(value):
            raise kind.refusal(function, name, value)


# ---- pytrees ------------------------------------------------------------------------------------
# Pytrees of the user: their leaves, and errors about values that are no pytree.


IsLeaf = Callable[[Any], bool] | None


def leaves_of(tree: Any, what: str, is_leaf: IsLeaf = None) -> tuple[list[Any], Any]:
    """The leaves of a pytree, and its structure.

    Arguments:
      tree: the pytree.
      what: what it is, for the error.
      is_leaf: as in `jax.tree.flatten`.

    Raises:
      SbpError: `bad-argument` for what JAX cannot flatten, such as a dict with keys that do not
        compare.
    """
    return _flattened(jax.tree.flatten, tree, what, is_leaf)


def paths_of(tree: Any, what: str, is_leaf: IsLeaf = None) -> tuple[list[tuple[Any, Any]], Any]:
    """The leaves of a pytree, each behind its path, and its structure; like `leaves_of`."""
    return _flattened(jax.tree_util.tree_flatten_with_path, tree, what, is_leaf)


def _flattened(flatten: Callable[..., Any], tree: Any, what: str, is_leaf: IsLeaf) -> Any:
    """The result of a function of JAX for a pytree. Calls of plans flatten their arguments without
    `is_leaf`. Then sbp can catch the error of JAX for a tree without an end."""
    try:
        if is_leaf is not None or flatten is not jax.tree.flatten:
            _refuse_endless(tree)
        flat = flatten(tree, is_leaf)
        if flatten is not jax.tree.flatten and any(
            isinstance(x, jax.Array | np.ndarray) for x in _metadata(flat[1])
        ):
            raise TypeError("static metadata of a node has an array; make the array a data field")
        return flat
    except (RecursionError, SystemError) as error:  # JAX raises either for a tree without an end
        raise ArgumentError(
            f"{what} cannot be read as a pytree: a node contains itself, or is nested too deep;"
            " pass a tree that ends"
        ) from error
    except (TypeError, ValueError) as error:
        raise refused(
            f"{what} cannot be read as a pytree; change what JAX names:"
            f" {' '.join(str(error).split())}",
            error,
        ) from error


def _metadata(tree: Any) -> list[Any]:
    """What the nodes of a tree have besides their children. JAX compares it with `==`."""
    return jax.tree.leaves(tree.node_data() or ()) + [
        x for child in tree.children() for x in _metadata(child)
    ]


_DEEPEST = 500
"""Levels of lists, tuples and dicts in a pytree. JAX fails from about 1,000 levels on."""


def _refuse_endless(tree: Any, depth: int = 0) -> None:
    """Refuses a tree that contains itself before JAX sees it: where JAX fails to flatten one, no
    Python function can be called any more.

    Raises:
      RecursionError: for lists, tuples and dicts in more than `_DEEPEST` levels.
    """
    if depth > _DEEPEST:
        raise RecursionError
    if isinstance(tree, dict | list | tuple):
        for child in tree.values() if isinstance(tree, dict) else tree:
            _refuse_endless(child, depth + 1)


def returning_arrays(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function of the user, which is refused where a leaf of its results is no array.

    The function raises the error of `returned_array`, which names the leaf by its path.
    """

    @functools.wraps(function, updated=())
    def checked(*args: Any, **kwargs: Any) -> Any:
        results = function(*args, **kwargs)
        for path, leaf in paths_of(results, "what the function returns")[0]:
            returned_array(leaf, path, "the function")
        return results

    return checked


def returned_array(x: Any, path: Any, name: str) -> Any:
    """What a function of the user returns at a path.

    Arguments:
      x: the value.
      path: its path, as JAX has it.
      name: the function.

    Raises:
      SbpError: `bad-argument` where it is no array.
    """
    try:
        if isinstance(x, jax.ShapeDtypeStruct):
            raise TypeError("a shape has no elements")
        jax.typeof(x)
    except (TypeError, AttributeError, OverflowError) as error:
        where = f" at result{jax.tree_util.keystr(path)}" if path else ""
        raise refused(
            f"{name} returns a value of type {type(x).__name__}{where}, which is not an array;"
            " return a pytree of arrays",
            error if isinstance(error, OverflowError) else TypeError,
        ) from error
    return x
