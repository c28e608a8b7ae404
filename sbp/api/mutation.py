"""Arguments that a function changes in place. A traced function gets a copy of each argument, so
the caller sees only what the function returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax

from sbp.api.trees import KeyPath
from sbp.errors import warn
from sbp.report.wording import listed

_CONTAINERS = (tuple, list, dict, type(None))
"""Pytree nodes of Python itself. Functions often use a dict or list that they get as a variable of
their own, so a change of one is no sign of an error."""


@dataclass(frozen=True, slots=True)
class _Held:
    """A custom pytree node among the arguments, before the function runs.

    Arguments:
      path: its path in the arguments.
      node: the node.
      leaves: its leaves by their paths in the node.
    """

    path: KeyPath
    node: Any
    leaves: dict[KeyPath, Any]


class WatchedArguments:
    """The custom pytree nodes among the arguments of a function that is about to be traced, such as
    Flax modules.

    Arguments:
      arguments: the pytree of arguments.
    """

    def __init__(self, arguments: Any) -> None:
        self._held = list(_custom_nodes(arguments))

    def warn(self, result: Any, function: str, name_of: Callable[[KeyPath], str]) -> None:
        """Warns of each argument that the function has changed, with values that it does not
        return.

        Arguments:
          result: what the function returns.
          function: its name.
          name_of: gives the user's name of a path in the arguments.
        """
        returned = {id(leaf) for leaf in jax.tree.leaves(result)} if self._held else set[int]()
        for held in self._held:
            after = _leaves_of(held.node) or {}
            lost = [
                path
                for path, leaf in after.items()
                if held.leaves.get(path) is not leaf and id(leaf) not in returned
            ]
            if lost:
                what = listed([name_of((*held.path, *path)) for path in lost])
                warn(
                    "lost-state",
                    f"input {name_of(held.path)}",
                    f"is changed inside {function} ({what}), which does not return what it changed:"
                    f" the caller's {type(held.node).__name__} keeps its old state, as under"
                    " jax.jit. Return the new state and put it back",
                )


def _custom_nodes(arguments: Any) -> Iterator[_Held]:
    """The outermost custom nodes, but for those that give other leaves each time that they are
    flattened."""
    found, _ = jax.tree_util.tree_flatten_with_path(arguments, is_leaf=_is_custom)
    for path, node in found:
        if _is_custom(node):
            leaves, again = _leaves_of(node), _leaves_of(node)
            if leaves and again and all(again.get(p) is leaf for p, leaf in leaves.items()):
                yield _Held(path, node, leaves)


def _is_custom(x: Any) -> bool:
    return not isinstance(x, _CONTAINERS) and not jax.tree_util.all_leaves([x])


def _leaves_of(node: Any) -> dict[KeyPath, Any] | None:
    """The leaves of a node by path; None where it has become what does not flatten."""
    try:
        return dict(jax.tree_util.tree_flatten_with_path(node)[0])
    except (TypeError, ValueError, AttributeError):
        return None
