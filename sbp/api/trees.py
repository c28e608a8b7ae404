"""Structures of arguments and results. Nodes of the user's own classes are built with arrays only:
their constructors may check their leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from sbp.kinds import paths_of

KeyPath = tuple[Any, ...]


class NoPrefix(ValueError):
    """A tree that is no prefix of another one; the text says where."""


def prefix_leaves(
    prefix: Any, tree: Any, is_leaf: Callable[[Any], bool]
) -> Iterator[tuple[Any, range]]:
    """The leaves of a prefix, each with the positions of the leaves below it.

    Arguments:
      prefix: a pytree whose leaves stand for whole subtrees.
      tree: the structure that it is a prefix of.
      is_leaf: whether an entry of `prefix` is a leaf.

    Raises:
      NoPrefix: where the structures differ.

    >>> tree = jax.tree.structure({"a": (1, 2), "b": 3})
    >>> list(prefix_leaves({"a": "S(0)", "b": "B"}, tree, lambda x: isinstance(x, str)))
    [('S(0)', range(0, 2)), ('B', range(2, 3))]
    """
    with_path, structure = paths_of(prefix, "a pytree of types", is_leaf)
    counts = list(_counts(structure, tree, iter([path for path, _ in with_path])))
    start = 0
    for (_, leaf), count in zip(with_path, counts, strict=True):
        yield leaf, range(start, start + count)
        start += count


def _counts(prefix: Any, tree: Any, paths: Iterator[KeyPath]) -> Iterator[int]:
    if prefix.node_data() is None:
        next(paths)
        yield tree.num_leaves
        return
    mine, other = prefix.children(), tree.children()
    if tree.node_data() != prefix.node_data() or len(mine) != len(other):
        path = next(paths, ())
        depth = f" before {jax.tree_util.keystr(path)}" if path else ""
        raise NoPrefix(f"{prefix} stands for {tree}{depth}")
    for a, b in zip(mine, other, strict=True):
        yield from _counts(a, b, paths)


def filled(tree: Any, leaves: Sequence[Any], paths: Sequence[KeyPath], depth: int = 0) -> Any:
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
    children: dict[str, Any] = {}
    start = 0
    for number, child in enumerate(tree.children()):
        here = range(start, start + child.num_leaves)
        start = here.stop
        key = paths[here.start][depth : depth + 1] if here else ()
        name = jax.tree_util.keystr(key, simple=True) if key else str(number)
        own = [leaves[i] for i in here], [paths[i] for i in here]
        children[name] = filled(child, *own, depth + 1)
    kind, data = tree.node_data()
    if kind is dict:
        return dict(zip(data, children.values(), strict=True))
    return kind(children.values()) if kind in (tuple, list) else children


def arguments_of(tree: Any) -> list[tuple[Any, range]]:
    """The arguments of a call with structure (args, kwargs): of each the structure and the
    positions of its leaves."""
    found, start = [], 0
    for part in tree.children():
        for argument in part.children():
            found.append((argument, range(start, start + argument.num_leaves)))
            start += argument.num_leaves
    return found


def results_of(tree: Any) -> list[tuple[Any, range]]:
    """The results of a function, as `arguments_of`: the items of a tuple or list, or its one
    result."""
    data = tree.node_data()
    if data is None or data[0] not in (tuple, list):
        return [(tree, range(tree.num_leaves))]
    found, start = [], 0
    for child in tree.children():
        found.append((child, range(start, start + child.num_leaves)))
        start += child.num_leaves
    return found
