"""Types of the leaves of a pytree by patterns of their paths.

A path is written with `/` between its keys: the leaf `params["blocks"][0]["qkv"]` of an argument
`params` is `blocks/0/qkv`. In a pattern `*` stands for any characters of one key, `**` for any
number of keys. A pattern names leaves, and subtrees with all of their leaves.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Sequence
from typing import Any

import jax

from sbp.api.trees import KeyPath
from sbp.errors import ArgumentError
from sbp.kinds import shown


def is_patterns(entry: Any) -> bool:
    """Whether an entry of `in_types` or `out_types` can be a dict of patterns: one of its keys has
    a `/` or a `*`.

    >>> is_patterns({"blocks/*": "B"}), is_patterns({"blocks": "B"})
    (True, False)
    """
    return (
        isinstance(entry, dict)
        and all(isinstance(key, str) for key in entry)
        and any("/" in key or "*" in key for key in entry)
    )


def has_keys(tree: Any, entry: dict[str, Any]) -> bool:
    """Whether a structure is a dict with the keys of another one, which is then a prefix of it."""
    data = tree.node_data()
    return data is not None and data[0] is dict and set(data[1]) == entry.keys()


def path_names(path: KeyPath) -> tuple[str, ...]:
    """The keys of a path as a pattern names them."""
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


def matches(pattern: str, names: Sequence[str]) -> bool:
    """Whether a pattern names a leaf, or a subtree that it stands in.

    >>> matches("blocks/*/qkv", ("blocks", "0", "qkv", "bias")), matches("*/qkv", ("blocks", "qk"))
    (True, False)
    >>> matches("**/bias", ("blocks", "0", "qkv", "bias"))
    True
    """
    return _match(pattern.strip("/").split("/"), list(names))


def _match(parts: list[str], names: list[str]) -> bool:
    if not parts:
        return True
    if parts[0] == "**":
        return any(_match(parts[1:], names[k:]) for k in range(len(names) + 1))
    # A key of the user's may have a slash, too: it then stands for as many parts of the pattern.
    keys = names[0].count("/") + 1 if names else 0
    if not names or len(parts) < keys:
        return False
    head = "/".join(parts[:keys])
    return fnmatch.fnmatchcase(names[0], head) and _match(parts[keys:], names[1:])


def _renamed(pattern: str, path: str) -> str:
    """A pattern with the keys of a path in the place of those that do not match them."""
    parts, names = pattern.strip("/").split("/"), path.split("/")
    pairs = zip(parts, names, strict=False)
    return "/".join(p if fnmatch.fnmatchcase(n, p) or p == "**" else n for p, n in pairs)


NEAR_PATTERN = 0.8
"""How near a pattern is, at most 1, to be suggested for one that names no leaf."""


def _near_patterns(pattern: str, known: Sequence[str]) -> list[str]:
    """Patterns that name some of the known paths, the nearest first."""
    others = sorted({_renamed(pattern, path) for path in known} - {pattern})
    return difflib.get_close_matches(pattern, others, n=3, cutoff=NEAR_PATTERN)


def _ratio(near: difflib.SequenceMatcher[str], path: str) -> float:
    near.set_seq1(path)
    return near.ratio()


def types_by_pattern(
    patterns: dict[str, Any], paths: Sequence[Sequence[tuple[str, ...]]], where: str
) -> list[Any]:
    """The entry of each leaf: that of the first pattern which names it, None for no pattern.

    Arguments:
      patterns: entries by pattern.
      paths: for each leaf the paths that it goes by.
      where: where the patterns stand, for the error.

    Raises:
      ArgumentError: for a pattern that names no leaf.
    """
    found: list[Any] = [None] * len(paths)
    taken: set[int] = set()
    for pattern, entry in patterns.items():
        named = [k for k, ways in enumerate(paths) if any(matches(pattern, w) for w in ways)]
        if not named:
            known = ["/".join(way) for ways in paths for way in ways]
            near = difflib.SequenceMatcher(b=pattern, autojunk=False)
            nearest = "there are no leaves"
            if known:
                nearest = f"the nearest is {max(known, key=lambda k: _ratio(near, k))!r}"
            error = ArgumentError(f"{where}: no leaf has the path {shown(pattern)}; {nearest}")
            raise error.with_slip(pattern, *_near_patterns(pattern, known))
        for k in named:
            if k not in taken:
                found[k] = entry
        taken.update(named)
    return found
