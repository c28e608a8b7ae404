"""Diagnostics and exceptions: what sbp says when something cannot be typed, planned or run."""

import contextlib
import difflib
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import jax

from sbp.frames import users_stacklevel

# ---- places in the source -----------------------------------------------------------------------
# Pieces of the user's source, and the names that files are shown under.


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Span:
    """A piece of the user's source: one expression, with 1-based line and column."""

    file: str
    line: int
    column: int
    end_column: int
    end_line: int = 0
    function: str = ""

    def __str__(self) -> str:
        return position_text(self.file, self.line, self.column)


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """A span with a remark. Carets mark the span of a primary label, dashes that of others."""

    span: Span
    text: str
    primary: bool = False


def file_name(path: str) -> str:
    """The name that a source file is shown under: relative to the working folder or to the
    installed libraries, else its last two parts.

    A cell of a notebook is shown as IPython shows it, by the number of its run: `Cell In[3]`.
    """
    if cell := _cell_name(path):
        return cell
    installed = re.split(r"[\\/](?:site|dist)-packages[\\/]", path)
    if len(installed) > 1:
        return installed[-1].replace(os.sep, "/")
    if not os.path.isabs(path):
        return path
    with contextlib.suppress(FileNotFoundError):  # the working folder may have been removed
        here = os.path.join(os.getcwd(), "")
        if path.startswith(here):
            return os.path.relpath(path, here).replace(os.sep, "/")
    return "/".join(path.split(os.sep)[-2:])


def position_text(path: str, line: int, column: int | None = None) -> str:
    """A place in a source file as errors and reports show it: `train.py:3:5`, and in a notebook
    `Cell In[3], line 2`, where the marks below the line show the column.

    >>> position_text("train.py", 3, 5), position_text("train.py", 3)
    ('train.py:3:5', 'train.py:3')
    """
    if _cell_name(path):
        return f"{file_name(path)}, line {line}"
    return f"{file_name(path)}:{line}" + ("" if column is None else f":{column}")


def _cell_name(path: str) -> str:
    """The name of a notebook's cell; empty for another file."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    numbers = getattr(getattr(shell, "compile", None), "_filename_map", None)
    if isinstance(numbers, dict) and numbers.get(path) is not None:
        return f"Cell In[{numbers[path]}]"
    # The folder is the one that a Jupyter kernel gives to its cells.
    return "Cell" if os.path.basename(os.path.dirname(path)).startswith("ipykernel_") else ""


# ---- slips --------------------------------------------------------------------------------------
# Slips: a value in a call that is almost right, such as the misspelt name of a mesh axis. sbp
# tries the call with the likely value before it suggests it.


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
        return self.right if type(value) is type(self.wrong) and value == self.wrong else value

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


# ---- words --------------------------------------------------------------------------------------
# Pieces of the sentences of errors and reports.


SHOWN = 3
"""Entries of a list that an error, a warning or a note shows. It counts the others."""

NEAR = 0.8
"""The likeness, of `difflib`, from which a word is taken for a misspelt name or path."""


def bytes_text(count: float) -> str:
    """Bytes with one decimal in the largest unit that leaves at least 1.

    >>> bytes_text(448), bytes_text(6 * 2**20)
    ('448.0 B', '6.0 MiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1023.95:
            return f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def seconds_text(seconds: float) -> str:
    """A modelled time with three significant digits.

    >>> seconds_text(0.00123), seconds_text(0.9997), seconds_text(1234.5)
    ('1.23 ms', '1 s', '1,234 s')
    """
    for unit in ("s", "ms", "us"):
        if seconds >= 0.9995:  # shown as 1
            return f"{seconds:.3g} {unit}" if seconds < 999.5 else f"{seconds:,.0f} {unit}"
        seconds *= 1e3
    return f"{seconds:.3g} ns"


def counted(count: int, noun: str) -> str:
    """A number with its noun.

    >>> counted(1, "input"), counted(3, "input")
    ('1 input', '3 inputs')
    """
    return f"{count} {noun}" + ("" if count == 1 else "s")


def listed(names: Iterable[str], limit: int = SHOWN) -> str:
    """Names with commas; those past the limit are counted.

    >>> listed(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    shown = list(dict.fromkeys(names))
    rest = len(shown) - limit
    return ", ".join(shown[:limit]) + (f" and {rest} more" if rest > 0 else "")


def nearest(
    name: object, known: Iterable[str], limit: int | None = None, otherwise: str = ""
) -> str:
    """A clause naming the nearest of `known`; where none is near, it lists them.

    Arguments:
      name: what the user wrote.
      known: what there is.
      limit: how many are listed at most; the others are counted.
      otherwise: the clause in place of the list.

    >>> nearest("modle", ["data", "model"])
    '; did you mean "model"?'
    >>> nearest("rate", ["learning_rate", "x"])
    '; did you mean "learning_rate"?'
    """
    options = sorted(known)
    close = difflib.get_close_matches(str(name), options, n=1, cutoff=0.5)
    if close := close or [option for option in options if name and str(name) in option]:
        return f'; did you mean "{close[0]}"?'
    return otherwise or (
        "; known: " * bool(options) + listed((o[:80] for o in options), limit or len(options))
    )


# ---- errors -------------------------------------------------------------------------------------


CODES: dict[str, str] = {
    "no-signature": "an operator has no signature for the types its operands are pinned to",
    "annotation-conflict": "two annotations cannot both hold under the boxing policy",
    "no-typing": "the program as a whole has no typing",
    "memory-limit": "sbp found no plan that fits in memory_limit",
    "budget": "no plan keeps within a budget on collectives",
    "solver-limit": "the checker reached its resource limit before it could decide",
    "type-syntax": "a type text does not parse",
    "unknown-axis": "an axis name that the mesh does not have",
    "dim-out-of-range": "a split of a dim that the tensor does not have",
    "mixed-monoids": "two different partial monoids in one type",
    "mesh-devices": "a mesh larger than the devices that are present",
    "abstract-mesh": "a plan for an abstract mesh cannot be run",
    "not-partial": "an input pinned partial whose value is not an sbp.Partial",
    "bad-argument": "an argument of an sbp function that does not fit",
    "unknown-option": "an option or preset that does not exist",
    "bad-placement": "a device assignment that no split on the mesh gives",
    "unsupported-effect": "an effect that cannot be kept in a distributed program",
    "missing-rule": "a primitive without a signature, so every device computes the whole result",
    "wrong-signature": "a registered signature with a row that does not hold",
    "uneven-boundary": (
        "an input or output that does not divide evenly, so sbp holds it as B at the boundary"
    ),
    "input-moved": "an input was on other devices or in another layout, so sbp moved it",
    "gathered-matrix": "a large matrix that a decomposition or transform takes whole",
    "costly-annotation": "an annotation that makes the plan at least 10% slower",
    "ignored-constraint": "a device or layout in the program that sbp ignores",
    "ignored-memory": "a kind of memory that JAX ignores where the program asks for it",
    "lost-state": "an argument that the function changes in place without returning the change",
    "memory-kind": "a sharding with a kind of memory that an argument or result is not in",
    "nested-jit": "an sbp.jit function runs as the plain function inside another transformation",
    "many-plans": "a function that is called with more signatures than sbp keeps plans for",
    "saved-plan": "a saved plan for another program, mesh or version, or one that does not hold",
    "device-order": "the devices along a mesh axis are farther apart than they need to be",
    "processes-differ": "several processes are about to run other plans, or other arguments",
    "bad-corpus": "a corpus file that cannot be read",
    "bad-checkpoint": "a checkpoint that does not fit this configuration",
    "not-finite": "training whose loss or gradients are not finite for several steps in a row",
    "missing-reduction": (
        "in a shard_map, a partial value is used or returned as though it were whole"
    ),
    "doubled-reduction": (
        "in a shard_map, a whole value is reduced again, which multiplies it by the axis size"
    ),
    "misplaced-reduction": (
        "in a shard_map, a reduction comes after an operation that does not commute with it"
    ),
    "wrong-reduction": (
        "in a shard_map, the wrong collective reduces a value: a pmean of parts of a sum, or a psum"
        " of means"
    ),
    "wrong-placement": (
        "in a shard_map, a collective or out_specs assume another type than the value has"
    ),
    "local-result": (
        "in a shard_map, the result of one shard is returned as the result of the whole"
    ),
    "differs-on-one-device": (
        "in a shard_map, a result that changes with one device, or is not that of a plain function"
    ),
    "not-analysed": "in a shard_map, a program that the checker cannot run",
    "layout-conflict": "two dims of one tensor that a layout splits over one mesh axis",
    "layout-names": (
        "dim names that do not fit a tensor: not one for each dim, or one of them twice"
    ),
    "size-condition": "a typing that does not hold for all symbolic sizes that were asked for",
    "sizes-unproved": "a typing that could not be proved for all symbolic sizes",
    "symbolic-sizes": (
        "symbolic sizes where numbers are needed, or symbolic sizes that do not fit together"
    ),
    "manual-types": "a manual region whose claimed types do not hold",
}
"""Every diagnostic code with its one-line meaning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceEdit:
    """A replacement of one piece of a source file.

    Arguments:
      span: the piece, with 1-based lines and columns; columns count UTF-8 bytes, as those of `ast`
          do. A span that ends where it starts is a place for an insertion.
      replacement: the text that stands there after the edit.
      imports: import statements that the file needs and does not have, such as `import sbp`.
    """

    span: Span
    replacement: str
    imports: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionEdit:
    """Another value for an argument of a call, where no source text has to change.

    Arguments:
      option: the argument: `boxing`, `in_types`, `out_types`, `memory_limit`, `reduce_dtype` or
          `budgets` of `sbp.jit`, `out_specs` of `jax.shard_map`, `in_types` and `out_types` of
          `sbp.manual`.
      value: its new value as the call takes it; where `position` is given, that of one part: a
          type text, `sbp.padded` of one, or None for one array, the new `above` (bytes) for one
          budget.
      position: the number of the array among the flat inputs or outputs, or that of the budget;
          None where `value` is the whole argument.
      function: the function that is called.
    """

    option: str
    value: Any
    position: int | None = None
    function: str = "sbp.jit"


Edit = SourceEdit | OptionEdit
"""One change of a program; the edits of a help belong together, and spans are those of the text
before any of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Help:
    """A change that the checker has accepted, with the price of the program after it.

    Arguments:
      text: the change in words; nothing reads it.
      edits: the change itself, in source order. These fields are enough to make it.
      bytes_per_device: bytes that one device sends per call after the change.
      peak_memory_bytes: memory of one device after the change; None where no plan was made.
      clears_all_errors: whether the program has no error left after the change.
    """

    text: str
    edits: tuple[Edit, ...]
    bytes_per_device: float
    peak_memory_bytes: float | None
    clears_all_errors: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleRow:
    """One row of the rule that a diagnostic quotes, with a remark on how near it comes."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    remark: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnostic:
    """One finding: a code, a title, labels on the user's source, the rule, notes and tested
    helps."""

    code: str
    severity: Literal["error", "warning", "note"]
    title: str
    labels: tuple[Label, ...] = ()
    rule: str = ""
    rows: tuple[RuleRow, ...] = ()
    notes: tuple[str, ...] = ()
    helps: tuple[Help, ...] = ()
    scope: str = ""

    @property
    def primary(self) -> Label | None:
        """The primary label, or the first one, or None."""
        return next(
            (label for label in self.labels if label.primary), next(iter(self.labels), None)
        )

    def text(self) -> str:
        """The diagnostic in plain words, one fact per line, without source excerpts."""
        where = f"\n  --> {self.primary.span}" if self.primary else ""
        return "\n".join(
            [
                f"{self.severity}[{self.code}]: {self.title}{where}",
                *(f"  {label.span}: {label.text}" for label in self.labels if label.text),
                *(f"  = note: {note}" for note in self.notes),
                *(
                    f"  = help: {h.text} (sends {bytes_text(h.bytes_per_device)} per device)"
                    for h in self.helps
                ),
            ]
        )


LONGEST_WORD = 4096
"""Characters of a word that an error repeats: no path is longer (`PATH_MAX` of Linux)."""


def short_words(text: str) -> str:
    """A text without the ends of its long words."""
    return " ".join(
        word if len(word) <= LONGEST_WORD else f"{word[:200]}.. ({len(word)} characters)"
        for word in text.split(" ")
    )


class SbpError(Exception):
    """Base of every error that sbp raises for its users.

    Arguments:
      title: what is wrong and what to change, on one line.
      code: one of `CODES`.
      span: the user's line, where it is known and is not the one that raises.
      details: lines below the title, such as the text that does not parse.
      column: of the last line of `details`, the wrong place, counted from 0; None for none.
      subject: an argument, or the line at `span`; left out where that line is shown.

    Attributes:
      message: the title behind its subject, with the details below it.
      slip: the value that is almost right, and the values that were probably meant, the likeliest
        first; None where it is not known.
      option: the argument of `sbp.jit` in question; empty for none.
      call: the user's call with the wrong argument, if another call raises the error.
      related: other places that are part of the cause.
    """

    slip: tuple[Any, tuple[Any, ...]] | None = None
    option: str = ""
    call: Span | None = None
    related: tuple[Label, ...] = ()

    renderer: "ClassVar[Callable[[SbpError], list[str]] | None]" = None
    """What shows the error in a notebook; the report sets it."""

    def __init__(
        self,
        title: str,
        *,
        code: str = "bad-argument",
        span: Span | None = None,
        details: Sequence[str] = (),
        column: int | None = None,
        subject: str = "",
    ) -> None:
        caret = () if column is None else (" " * column + "^",)
        title = short_words(title)
        head = f"{subject}: {title}" if subject else title
        message = "\n".join([head, *(f"  {line}" for line in (*details, *caret))])
        super().__init__(f"{code}: {message}")
        self.code, self.message, self.span = code, message, span
        self.title, self.details = title if span is not None else head, tuple(details)

    def with_slip(self, wrong: Any, *likely: Any) -> Self:
        """The same error, with a wrong value and what was meant, the likeliest first."""
        self.slip = wrong, likely
        return self

    def __reduce__(self) -> Any:
        # What is raised in another process comes back with its code and its diagnostics.
        state = {k: v for k, v in vars(self).items() if k not in ("slip", "refutation")}
        return type(self).__new__, (type(self), *self.args), state

    def about(self, subject: str) -> "SbpError":
        """The same error, with what it is about in front."""
        self.message, self.title = f"{subject}: {self.message}", f"{subject}: {self.title}"
        self.args = (f"{self.code}: {self.message}",)
        return self

    def at(self, span: Span | None) -> Self:
        """The same error at a line of the user that is not the one that raises, if it is known."""
        self.span = span or self.span
        self.args = (f"{self.code}: {f'{span}: ' if span else ''}{self.message}",)
        return self

    def _render_traceback_(self) -> list[str]:
        """IPython shows this in place of a stack trace: what is wrong, in the user's own lines."""
        render = type(self).renderer
        return str(self).splitlines() if render is None else render(self)


class SbpTypeError(SbpError):
    """A program without a typing; `diagnostics` says why, in the user's own lines.

    Arguments:
      diagnostics: one or more.
      refutation: makes the text of `smt2`, which is empty where there is none.
    """

    refutation: Callable[[], str] = str  # of an error from another process

    def __init__(
        self, diagnostics: Sequence[Diagnostic], refutation: Callable[[], str] = str
    ) -> None:
        found = tuple(diagnostics) if isinstance(diagnostics, Sequence) else ()
        if not found or not all(isinstance(d, Diagnostic) for d in found):
            raise ArgumentError("SbpTypeError takes one sbp.Diagnostic or more for `diagnostics`")
        self.diagnostics: tuple[Diagnostic, ...] = found
        self.refutation = refutation
        super().__init__(self.diagnostics[0].title, code=self.diagnostics[0].code)

    def __str__(self) -> str:
        return "\n\n".join(d.text() for d in self.diagnostics)

    def smt2(self) -> str:
        """The reason in SMT-LIB 2, for any SMT solver: constraints that no typing satisfies
        together, and from which none can be left out. The solver answers `unsat`. Each constraint
        is a named assertion, under a comment with the operand or pin and your line.

        Raises:
          SbpError: `no-typing` where the constraints of no mesh axis alone exclude each other, as
            with a memory limit or a type that two axes split too often.

        >>> import jax, sbp
        >>> mesh = jax.sharding.AbstractMesh((2,), ("data",))
        >>> x = jax.ShapeDtypeStruct((8,), "float32")
        >>> f = sbp.jit(jax.numpy.tanh, mesh, in_types="data:P(sum)", boxing="explicit")
        >>> try:
        ...     plan = f.plan(x)
        ... except sbp.SbpTypeError as error:
        ...     print(error.smt2().splitlines()[0])
        ; No types on mesh axis `data` satisfy all named assertions.
        """
        if not (text := self.refutation()):
            raise SbpError(
                "no constraints of one mesh axis alone exclude each other here, so there is no text"
                " for an SMT solver; the error itself says why there is no plan",
                code="no-typing",
            )
        return text


class ArgumentTypeError(SbpError, TypeError):
    """An error of sbp where `jax.jit` raises `TypeError`."""


class ArgumentValueError(SbpError, ValueError):
    """An error of sbp where `jax.jit` raises `ValueError`."""


class ArgumentError(ArgumentTypeError, ArgumentValueError):
    """An argument of another kind than a function takes; JAX raises the one or the other."""


class ArgumentKeyError(SbpError, KeyError):
    """An error of sbp about a key that a mapping does not have."""

    __str__ = Exception.__str__  # that of KeyError shows a `repr`


class ArgumentOverflowError(SbpError, OverflowError):
    """An error of sbp where `jax.jit` raises `OverflowError`."""


def refused(
    title: str,
    kind: type[Exception] | Exception,
    *,
    code: str = "bad-argument",
    span: Span | None = None,
) -> SbpError:
    """An error of sbp that is of the kind that `jax.jit` raises in its place too.

    Arguments:
      title: what is wrong and what to change, on one line.
      kind: the exception of JAX, or its class.
      code: one of `CODES`.
      span: the user's line, where it is not the one that raises.

    >>> isinstance(refused("f is not a function", TypeError), TypeError)
    True
    """
    raised = kind if isinstance(kind, type) else type(kind)
    own = next(
        (
            one
            for one in (ArgumentTypeError, ArgumentOverflowError, ArgumentValueError)
            if issubclass(raised, one.__bases__[1])
        ),
        SbpError,
    )
    return own(title, code=code, span=span)


class SbpInternalError(AssertionError):
    """A broken invariant of sbp itself; please report it with the text."""


class SbpWarning(UserWarning):
    """A warning of sbp; its text starts with the code."""


_NOTED: ContextVar[list[Diagnostic] | None] = ContextVar("noted", default=None)


@contextlib.contextmanager
def noting() -> Iterator[list[Diagnostic]]:
    """Collects the warnings that are given inside, for a report that is made later.

    >>> with noting() as noted, warnings.catch_warnings(action="ignore"):
    ...     warn("uneven-boundary", "input x", "is held whole")
    >>> [d.title for d in noted]
    ['input x is held whole']
    """
    noted: list[Diagnostic] = []
    token = _NOTED.set(noted)
    try:
        yield noted
    finally:
        _NOTED.reset(token)


def note(found: Diagnostic) -> None:
    """Adds a note to the report that is made later."""
    if (noted := _NOTED.get()) is not None:
        noted.append(found)


def warn(code: str, subject: str, text: str, *, span: Span | None = None) -> None:
    """Gives an `SbpWarning` at the user's line: the code, the subject with its place, the text.

    Arguments:
      code: one of `CODES`.
      subject: what the warning is about, the start of its sentence.
      text: the rest of the sentence.
      span: the user's line. A warning names it behind the subject; a report has a label there.
    """
    labels = (Label(span=span, text="", primary=True),) if span else ()
    note(Diagnostic(code=code, severity="warning", title=f"{subject} {text}", labels=labels))
    warnings.warn(
        f"{code}: {subject}{f' at {span}' if span else ''} {text}",
        SbpWarning,
        stacklevel=users_stacklevel(),
    )
