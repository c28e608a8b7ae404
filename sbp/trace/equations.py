"""What an equation of a jaxpr runs: the bodies of a loop, the branches of a choice, a function; and
blocks of equations that a jaxpr repeats."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from sbp import _jax

Form = Literal["counted loop", "open loop", "choice", "function", "fold", "region", "platform", ""]
"""How an equation runs its bodies: `scan`, `while`, `cond`; a function, also one with derivatives
of its own; `reduce` with a function; `shard_map`; the index of a platform; nothing, as other
operations."""


def is_literal(atom: Any) -> bool:
    """Whether an operand of an equation is a number, and not a variable."""
    return hasattr(atom, "val")


class Bodies(NamedTuple):
    """What an equation runs.

    Attributes:
      form: how it runs its bodies.
      jaxprs: the bodies; of an open loop the condition first.
      counts: how many operands are constants and carries of a counted loop; constants of the
        condition and of the body of an open loop; none for other forms.
    """

    form: Form
    jaxprs: Sequence[Any] = ()
    counts: tuple[int, int] = (0, 0)


_FORMS: dict[str, Form] = {
    "cond": "choice",
    **dict.fromkeys(("jit", "custom_jvp_call", "custom_vjp_call"), "function"),
    "reduce": "fold",
    "shard_map": "region",
    "platform_index": "platform",
}
"""How primitives run the jaxprs that are among their parameters; loops count operands besides."""


def bodies_of(eqn: Any, platform: str) -> Bodies:
    """What an equation runs.

    Arguments:
      eqn: the equation.
      platform: the platform that it runs on. Of branches for several platforms there is one left.
    """
    params = eqn.params
    match eqn.primitive.name:
        case "scan":
            return Bodies("counted loop", [params["jaxpr"]], _jax.scan_counts(params))
        case "while":
            counts = params["cond_nconsts"], params["body_nconsts"]
            return Bodies("open loop", [params["cond_jaxpr"], params["body_jaxpr"]], counts)
        case "cond" if params.get("branches_platforms"):
            pairs = zip(params["branches"], params["branches_platforms"], strict=True)
            ours = (branch for branch, p in pairs if p is None or platform in p)
            return Bodies("choice", [next(ours, params["branches"][-1])])
        case name if name in _FORMS:
            return Bodies(_FORMS[name], [*_jax.jaxprs_in(eqn)])
        case _:
            return Bodies("")


# ---- blocks -------------------------------------------------------------------------------------


LEAST_BLOCK = 8
"""Equations of the smallest block that is found."""


class RepeatedBlock(NamedTuple):
    """Equations, or blocks of equations, that a jaxpr has more than once. A block has the
    attributes of a jaxpr and of an equation.

    Attributes:
      key: equal for blocks that compute the same.
      eqns: the equations.
      invars: the variables from outside that they read.
      outvars: their results that something outside of one of these blocks reads.
    """

    key: Any
    eqns: Sequence[Any]
    invars: Sequence[Any]
    outvars: Sequence[Any]
    constvars: Sequence[Any] = ()

    @property
    def effects(self) -> set[Any]:
        return set().union(*(eqn.effects for eqn in self.eqns))


Placed = Callable[[Any], tuple[str, Sequence[Any]] | None]
"""Gives a text, which is equal for equations of equal blocks, and the calls of the user that an
equation stands in, the outermost first; None for an equation that is in no block."""


def in_blocks(eqns: Sequence[Any], outvars: Sequence[Any], place: Placed) -> list[Any]:
    """The equations of a jaxpr, in which repeated equations are blocks. A block has whole calls of
    the user's functions if that is possible.

    Arguments:
      eqns: the equations.
      outvars: the results of the jaxpr.
      place: places of equations.
    """
    if len(eqns) < 2 * LEAST_BLOCK:
        return [*eqns]
    items, numbers, unused = [*eqns], dict[Any, int](), itertools.count(len(eqns))
    codes = [numbers.setdefault(_token(e, place), len(numbers)) for e in items]
    calls = [found[1] if (found := place(eqn)) else () for eqn in items]
    shared = [*itertools.starmap(_shared, itertools.pairwise([(), *calls, ()]))]
    while (found := _repeat(np.array(codes), shared)) is not None:
        start, length = found
        wiring, places = _wiring(items[start : start + length]), list[int]()
        for at in range(start, len(codes) - length + 1):
            is_free = not places or at >= places[-1] + length
            if is_free and codes[at : at + length] == codes[start : start + length]:
                places += [at] if _wiring(items[at : at + length]) == wiring else []
        number = next(unused)
        if len(places) == 1:
            codes[start] = number  # the equations are equal, but their operands come from elsewhere
            continue
        blocks = _blocks_at(items, outvars, places, length)
        for at, block in reversed([*zip(places, blocks, strict=True)]):
            items[at : at + length], codes[at : at + length] = [block], [number]
            del shared[at + 1 : at + length]
    return items


def _shared(a: Sequence[Any], b: Sequence[Any]) -> int:
    """How many of the first items of two sequences are equal."""
    return next(
        (n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def _variables(atoms: Sequence[Any]) -> list[Any]:
    return [v for v in atoms if not is_literal(v)]


def _operands(items: Sequence[Any]) -> list[Any]:
    return _variables([v for item in items for v in item.invars])


def _blocks_at(
    items: Sequence[Any], outvars: Sequence[Any], places: Sequence[int], length: int
) -> list[RepeatedBlock]:
    """The blocks of some length at some places of a jaxpr."""
    parts = [items[at : at + length] for at in places]
    others = [[*items[:at], *items[at + length :]] for at in places]
    read = [{*_variables(outvars), *_operands(other)} for other in others]
    made = [[v for item in part for v in item.outvars] for part in parts]
    pairs = [[v in some for v in mine] for some, mine in zip(read, made, strict=True)]
    is_read, key = [*map(any, zip(*pairs, strict=True))], object()
    return [
        RepeatedBlock(
            key=key,
            eqns=part,
            invars=[v for v in dict.fromkeys(_operands(part)) if v not in {*results}],
            outvars=[*itertools.compress(results, is_read)],
        )
        for part, results in zip(parts, made, strict=True)
    ]


def _repeat(codes: np.ndarray, shared: Sequence[int]) -> tuple[int, int] | None:
    """The start and the length of the equal parts that save most equations as one block.

    Arguments:
      codes: equal for equal equations.
      shared: how many calls each equation shares with the one before it, and 0 for the end.
    """
    best, found = LEAST_BLOCK - 1, None
    for distance in range(LEAST_BLOCK, len(codes)):
        equal = codes[distance:] == codes[:-distance]
        if np.count_nonzero(equal) <= best:
            continue
        edges = np.flatnonzero(np.diff(np.concatenate([[0], equal, [0]])))
        for start, end in edges.reshape(-1, 2).tolist():
            if end - start <= best:
                continue
            if end - start > distance:  # as equal layers: a block begins at an outermost call
                start += int(np.argmin(shared[start : start + distance]))
                length, saved = distance, (end - start) // distance * distance
            else:
                start, end = _whole_calls(shared, start, end)
                length = saved = end - start
            if saved > best:
                best, found = saved, (start, length)
    return found


def _whole_calls(shared: Sequence[int], start: int, end: int) -> tuple[int, int]:
    """The largest part of a range of equations that begins and ends where whole calls do."""
    while end - start > 1:
        least = min(shared[start + 1 : end])
        inside = [at for at in range(start + 1, end) if shared[at] == least]
        first = start if shared[start] <= least else inside[0]
        last = end if shared[end] <= least else inside[-1]
        if first == last:  # one call ends and another begins here
            first, last = max((start, first), (first, end), key=lambda part: part[1] - part[0])
        if (first, last) == (start, end):
            break
        start, end = first, last
    return start, end


def _token(eqn: Any, place: Placed) -> Any:
    """A value that is equal for equations that compute the same on their operands."""
    if isinstance(eqn, RepeatedBlock):
        return eqn.key
    if (found := place(eqn)) is None:
        return id(eqn)
    inner, params = bodies_of(eqn, ""), eqn.params
    written = [] if inner.form == "function" else sorted(params.items())
    return (
        *(eqn.primitive.name, found[0], *(type(v).__name__ for v in eqn.outvars)),
        *(
            (k, _text(v))
            for k, v in written
            if not inner.jaxprs or ("jaxpr" not in k and k != "branches")
        ),
        *map(_body_token, params.get("branches", inner.jaxprs)),
        *(_text(v.val) for v in eqn.invars if is_literal(v)),
        *(v.aval for v in (*eqn.invars, *eqn.outvars)),
    )


def _text(value: Any) -> Any:
    """A value as text, of an array with all of its elements."""
    is_array = isinstance(value, np.ndarray | jax.Array)
    return np.asarray(value).tobytes() if is_array else repr(value)


def _body_token(closed: Any) -> Any:
    jaxpr, consts = _jax.open_jaxpr(closed)
    return (
        _wiring(jaxpr.eqns, [*jaxpr.constvars, *jaxpr.invars], jaxpr.outvars),
        tuple(map(id, consts)),
        tuple(_token(eqn, lambda _: ("", ())) for eqn in jaxpr.eqns),
    )


def _wiring(eqns: Sequence[Any], ins: Sequence[Any] = (), outs: Sequence[Any] = ()) -> Any:
    """Which operation reads which result: the variables as numbers."""
    atoms = [*ins, *(v for eqn in eqns for v in (*eqn.invars, *eqn.outvars)), *outs]
    numbers: dict[Any, int] = {}
    return tuple(
        _text(v.val) if is_literal(v) else numbers.setdefault(v, len(numbers)) for v in atoms
    )
