"""Results by the contents of the arrays that they follow from: repeated layers of a program have
equal tables, and what follows from them is worked out once."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np

DIGEST = 16
"""Bytes of the digest that stands for the contents of arrays."""


class Repeats:
    """The results of functions of arrays.

    >>> repeats = Repeats()
    >>> repeats.of(np.add, np.ones(2), np.ones(2)) is repeats.of(np.add, np.ones(2), np.ones(2))
    True
    """

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], Any] = {}

    def __len__(self) -> int:
        """The number of results."""
        return len(self._known)

    def of(self, function: Callable[..., Any], *arrays: np.ndarray) -> Any:
        """`function(*arrays)`, from an earlier call with equal arrays where there was one. The
        caller may not change the result.

        Arguments:
          function: a function of these arrays and of nothing else.
          arrays: its arguments.
        """
        contents = hashlib.blake2b(digest_size=DIGEST)
        for array in arrays:
            contents.update(array.tobytes())
        key = function, tuple([array.shape for array in arrays]), contents.digest()
        if key not in self._known:
            self._known[key] = function(*arrays)
        return self._known[key]
