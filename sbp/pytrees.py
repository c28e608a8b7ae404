"""Pytrees of the user: their leaves, and what is said of what is none."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from sbp.errors import ArgumentError, SbpError, refused
from sbp.kinds import show

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
    try:
        if is_leaf is not None:
            _refuse_endless(tree)
        return jax.tree.flatten(tree, is_leaf)
    except _NO_PYTREE as error:
        raise _no_pytree(what, error) from error


def paths_of(tree: Any, what: str, is_leaf: IsLeaf = None) -> tuple[list[tuple[Any, Any]], Any]:
    """The leaves of a pytree, each behind its path, and its structure; like `leaves_of`."""
    try:
        _refuse_endless(tree)
        return jax.tree_util.tree_flatten_with_path(tree, is_leaf)
    except _NO_PYTREE as error:
        raise _no_pytree(what, error) from error


_NO_PYTREE = (TypeError, ValueError, RecursionError, SystemError)
"""What JAX raises for what it cannot flatten; the last two for a tree that contains itself."""


_DEEPEST = 500
"""Levels of lists, tuples and dicts in a pytree. JAX fails from about 1,000 levels on."""


def _refuse_endless(tree: Any) -> None:
    """Refuses a tree that contains itself before JAX sees it: where JAX fails to flatten one, no
    Python function can be called any more.

    Raises:
      RecursionError: for lists, tuples and dicts in more than `_DEEPEST` levels.
    """
    left = [(tree, 0)]
    while left:
        node, depth = left.pop()
        if depth > _DEEPEST:
            raise RecursionError
        inside = node.values() if isinstance(node, dict) else node
        if isinstance(node, dict | list | tuple):
            left += [(child, depth + 1) for child in inside]


def _no_pytree(what: str, error: Exception) -> SbpError:
    if isinstance(error, RecursionError | SystemError):
        return refused(
            f"{what} cannot be read as a pytree: a node contains itself, or is nested too deep;"
            " pass a tree that ends",
            ValueError,
        )
    said = " ".join(str(error).split())
    return refused(f"{what} cannot be read as a pytree; change what JAX names: {said}", error)


def returning_arrays(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function of the user, which is refused where a leaf of its results is no array.

    The function raises an `ArgumentError` that names the leaf by its path.
    """

    @functools.wraps(function, updated=())
    def checked(*args: Any, **kwargs: Any) -> Any:
        results = function(*args, **kwargs)
        for path, leaf in paths_of(results, "what the function returns")[0]:
            try:
                jax.typeof(leaf)
            except TypeError as error:
                raise ArgumentError(
                    f"the function returns {show(leaf)} at result{jax.tree_util.keystr(path)},"
                    " which is no array; return pytrees of arrays"
                ) from error
        return results

    return checked
