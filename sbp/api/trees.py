"""Structures of arguments and results, and types of their leaves by patterns of paths."""

import difflib
import fnmatch
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax

from sbp.errors import NEAR, ArgumentError, SbpError, nearest, refused
from sbp.kinds import show
from sbp.report.wording import without_number

# ---- structures ---------------------------------------------------------------------------------
# Structures of arguments and results. Nodes of the user's own classes are built with arrays only:
# their constructors may check their leaves.


KeyPath = tuple[Any, ...]


def no_prefix(prefix: Any, tree: Any, here: KeyPath, names: tuple[str, str]) -> SbpError:
    """The error about a structure that is no prefix of another one. If one key differs, the error
    has the likely key as a slip.

    Arguments:
      prefix, tree: the two structures; their outermost nodes differ.
      here: the path of both below their names.
      names: the user's names of the whole prefix and of the whole tree.
    """
    name, slip = f"{names[1]}{jax.tree_util.keystr(here)}", ()
    mine, other = prefix.node_data(), tree.node_data()
    if other is None or not mine[0] is other[0] is dict:
        why = f"{name} is {_kind(tree)}, but the entry for it is {_kind(prefix)}"
    elif strange := [key for key in mine[1] if key not in other[1]]:
        missing = [key for key in other[1] if key not in mine[1]]
        slip = (strange[0], *missing) if len(strange) == 1 == len(missing) else ()
        why = f"{name} has no key {strange[0]!r}{nearest(strange[0], map(str, other[1]))}"
    else:
        missing = next(key for key in other[1] if key not in mine[1])
        why = f"it has no entry for {name}[{missing!r}]; give it a type, or None to leave it free"
    error = refused(f"{names[0]} does not fit {names[1]}: {why}", ValueError)
    return error.with_slip(*slip) if slip else error


def _kind(tree: Any) -> str:
    """A structure in words."""
    data, count = tree.node_data(), len(tree.children())
    if data is None:
        return "one array"
    entries = f"a {data[0].__name__} of {count} entr{'y' if count == 1 else 'ies'}"
    return "None" if data[0] is type(None) else entries


def structure_difference(
    own: Any, other: Any, paths: Sequence[KeyPath], here: KeyPath = ()
) -> tuple[KeyPath, str] | None:
    """The first place where a structure is not the one that a plan takes: its path, and the end of
    the sentence about it; None where both are equal.

    Arguments:
      own: the structure that the plan takes.
      other: the structure of a call.
      paths: the paths of the leaves of `own`.
      here: the path of both structures.
    """
    mine, theirs = (t.node_data() or (None, ()) for t in (own, other))
    children, others = own.children(), other.children()
    if mine != theirs or len(children) != len(others):
        return here, _difference(own, other)
    for number, ((child, at), second) in enumerate(zip(leaf_ranges(children), others, strict=True)):
        below = paths[at.start : at.stop]
        # No path leads to a child without leaves.
        name = mine[1][number] if mine[0] is dict else number
        key = below[0][len(here)] if below else jax.tree_util.DictKey(name)
        if (found := structure_difference(child, second, below, (*here, key))) is not None:
            return found
    return None


def _difference(own: Any, other: Any) -> str:
    """How the outermost node of a structure differs from that of the one that a plan takes."""
    (mine, data), (theirs, others) = (t.node_data() or (None, ()) for t in (own, other))
    if mine is theirs is dict:
        key = next(key for key in (*data, *others) if (key in data) != (key in others))
        if key in data:
            return f"has no key {key!r}, which the plan takes"
        return f"has the key {key!r}, which the plan does not take"
    kinds = _kind(other), _kind(own)
    if kinds[0] == kinds[1]:
        return f"has the static fields {show(others)}, but the plan takes {show(data)}"
    return f"is {kinds[0]}, but the plan takes {kinds[1]}"


def fill(tree: Any, leaves: Sequence[Any], paths: Sequence[KeyPath], depth: int = 0) -> Any:
    """A structure with other leaves than arrays, such as types or shardings.

    A node of the user's own class whose constructor refuses them is a dict instead, from the names
    of its children to these.

    Arguments:
      tree: the structure.
      leaves: its leaves.
      paths: the path of each leaf.
      depth: how many keys of each path lead to `tree`.
    """
    try:
        return jax.tree.unflatten(tree, leaves)
    except Exception:
        # The constructor is the user's, and may raise anything. An error of a leaf is none of its.
        if tree.node_data() is None:
            raise
    children = {
        jax.tree_util.keystr(key, simple=True) if key else str(number): fill(
            child, [leaves[i] for i in here], [paths[i] for i in here], depth + 1
        )
        for number, (child, here) in enumerate(leaf_ranges(tree.children()))
        for key in [paths[here.start][depth : depth + 1] if here else ()]
    }
    kind, data = tree.node_data()
    if kind is dict:
        return dict(zip(data, children.values(), strict=True))
    return kind(children.values()) if kind in (tuple, list) else children


def layer_paths(leaves: Iterable[Any], named: int) -> tuple[KeyPath, ...]:
    """The paths of leaves, with a star for the number of a layer: a position in a list, or the end
    of a key. So a leaf has the same path in all layers.

    Arguments:
      leaves: the leaves.
      named: the number of the first keys of their paths that stay.
    """
    return tuple(
        (*x.path[:named], *map(without_number, path_names(x.path[named:]))) for x in leaves
    )


def leaf_ranges(trees: Iterable[Any]) -> Iterator[tuple[Any, range]]:
    """Structures that follow each other, each with the positions of its leaves."""
    start = 0
    for tree in trees:
        yield tree, range(start, start + tree.num_leaves)
        start += tree.num_leaves


def arguments_of(tree: Any) -> list[tuple[Any, range]]:
    """The arguments of a call with structure (args, kwargs): of each the structure and the
    positions of its leaves."""
    return list(leaf_ranges(argument for part in tree.children() for argument in part.children()))


def results_of(tree: Any) -> list[tuple[Any, range]]:
    """The results of a function, as `arguments_of`: the items of a tuple or list, or its one
    result."""
    kind, _ = tree.node_data() or (None, None)
    return list(leaf_ranges(tree.children() if kind in (tuple, list) else [tree]))


# ---- patterns -----------------------------------------------------------------------------------
# Types of the leaves of a pytree by patterns of their paths. A path is written with `/` between
# its keys: the leaf `params["blocks"][0]["qkv"]` of an argument `params` is `blocks/0/qkv`. In a
# pattern `*` stands for any characters of one key, `**` for any number of keys. A pattern names
# leaves, and subtrees with all of their leaves.


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


def is_by_name(in_types: Any, only: Any, names: Sequence[str]) -> bool:
    """Whether `in_types` is one dict of patterns for all arguments. A dict for a single argument
    that is a dict may be its prefix: patterns have the argument's name, a `/` or a `*`.

    Arguments:
      in_types: the dict.
      only: the structure of the single argument; None for several.
      names: the names of the arguments.
    """
    if not isinstance(in_types, dict) or not all(isinstance(key, str) for key in in_types):
        return False
    is_named = is_patterns(in_types) or (in_types and in_types.keys() <= set(names))
    return only is None or bool(is_named and not has_keys(only, in_types))


def has_keys(tree: Any, entry: dict[str, Any]) -> bool:
    """Whether a structure is a dict with the keys of another one, which is then a prefix of it."""
    kind, keys = tree.node_data() or (None, ())
    return kind is dict and set(keys) == entry.keys()


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
    return (
        0 < keys <= len(parts)
        and fnmatch.fnmatchcase(names[0], "/".join(parts[:keys]))
        and _match(parts[keys:], names[1:])
    )


def _near_patterns(pattern: str, known: Sequence[str]) -> list[str]:
    """Patterns that name some of the known paths, the nearest first: of each path the keys stand in
    the place of those that do not match them."""
    parts = pattern.strip("/").split("/")
    pairs = (zip(parts, path.split("/"), strict=False) for path in known)
    others = {
        "/".join(p if fnmatch.fnmatchcase(n, p) or p == "**" else n for p, n in both)
        for both in pairs
    }
    return difflib.get_close_matches(pattern, sorted(others - {pattern}), n=3, cutoff=NEAR)


def types_by_pattern(
    patterns: dict[str, Any], paths: Sequence[Sequence[tuple[str, ...]]], where: str
) -> list[Any]:
    """The entry of each leaf: the entry of the first pattern that names the leaf, or None.

    Arguments:
      patterns: entries by pattern.
      paths: for each leaf the paths that it goes by.
      where: where the patterns stand, for the error.

    Raises:
      ArgumentError: for a pattern that names no leaf.
    """
    found: dict[int, Any] = {}
    for pattern, entry in patterns.items():
        named = [k for k, ways in enumerate(paths) if any(matches(pattern, w) for w in ways)]
        if not named:
            known = ["/".join(way) for ways in paths for way in ways]
            best = max(
                known,
                key=lambda path: difflib.SequenceMatcher(None, path, pattern, False).ratio(),
                default=None,
            )
            said = "there are no leaves" if best is None else f"the nearest is {best!r}"
            raise ArgumentError(f"{where}: no leaf has the path {show(pattern)}; {said}").with_slip(
                pattern, *_near_patterns(pattern, known)
            )
        for k in named:
            found.setdefault(k, entry)
    return [found.get(k) for k in range(len(paths))]
