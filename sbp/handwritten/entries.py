"""Entries of the `in_types` of a hand-written region that were probably meant to be others: those
of another argument, or splits of another dim. `check` tries the call with each of them."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from sbp.errors import SbpError, SbpInternalError, Span, refused
from sbp.slips import correcting
from sbp.types import NdSbp, Split, parse


def corrected(in_types: Any, made: Span | None) -> Any:
    """The `in_types` of a region, others where a correction of them is being tried.

    Arguments:
      in_types: as the region was made with.
      made: the user's line that made the region.
    """
    tried = correcting.value
    if tried is None or made is None or tried.at != made or tried.wrong is not in_types:
        return in_types
    return tried.right


@contextlib.contextmanager
def naming_open(in_types: Any, made: Span | None) -> Iterator[None]:
    """Adds to errors about types that are left open inside which types they may be.

    Arguments:
      in_types: of the region.
      made: the user's line that made the region.
    """
    try:
        yield
    except SbpError as error:
        entries = in_types if isinstance(in_types, tuple) else ()
        left_open = [i for i, entry in enumerate(entries) if entry is None]
        if left_open and error.slip is None:
            _with_entries(error, in_types, left_open, made)
        raise


@contextlib.contextmanager
def naming_shards(
    name: str,
    in_types: Any,
    shards: Sequence[tuple[int, ...]],
    made: Span | None,
    works: Callable[[], Any],
) -> Iterator[None]:
    """Traces the body of a region on shards inside. A body that takes its whole operands and not
    the shards has other `in_types` than it was written for.

    Arguments:
      name: of the region.
      in_types: of the region.
      shards: the shapes of the shards.
      made: the user's line that made the region.
      works: traces the body on its whole operands.

    Raises:
      SbpError: `manual-types`, also of the kind that the body raises.
    """
    try:
        yield
    except (SbpError, SbpInternalError):
        raise
    except (TypeError, ValueError) as error:
        try:
            works()
        except Exception:  # the user's function, which raises on whole operands, too
            raise error from None
        shapes = ", ".join(map(str, shards))
        said = refused(
            f"region {name!r} does not take the shards that its in_types give it, of the shapes"
            f" {shapes}: {' '.join(str(error).split())}",
            error,
            code="manual-types",
        )
        if isinstance(in_types, tuple):
            ranks = [len(s) for s in shards] if len(shards) == len(in_types) else []
            _with_entries(said, in_types, range(len(in_types)), made, ranks)
        raise said from error


def _moved(entry: Any, rank: int) -> Iterator[str]:
    """The text of a type with each of its splits on each other dim."""
    own = parse(entry) if isinstance(entry, str) else entry
    for name, atom in own.items() if isinstance(own, NdSbp) else ():
        if isinstance(atom, Split):
            for dim in range(rank):
                if dim != atom.dim:
                    yield repr(NdSbp({**own, name: Split(dim)}, own.free))


def _with_entries(
    error: SbpError,
    in_types: tuple[Any, ...],
    wrong: Sequence[int],
    made: Span | None,
    ranks: Sequence[int] = (),
) -> None:
    """Makes an error a slip: each of some entries may be what another one is, or split another dim.

    Arguments:
      error: the error.
      in_types: the entries.
      wrong: positions of the entries that may be wrong.
      made: the user's line that made the region.
      ranks: the number of dims of each argument; empty where the arguments are trees.
    """
    counts = collections.Counter(map(repr, in_types))
    others = {repr(t): t for t in in_types if t is not None}
    ranked = sorted(others, key=lambda text: -counts[text])
    likely = [
        (*in_types[:i], others[text], *in_types[i + 1 :])
        for text in ranked
        for i in wrong
        if repr(in_types[i]) != text
    ]
    likely += [
        (*in_types[:i], moved, *in_types[i + 1 :])
        for i in wrong[: len(ranks)]
        for moved in _moved(in_types[i], ranks[i])
    ]
    error.with_slip(in_types, *likely).call = made
