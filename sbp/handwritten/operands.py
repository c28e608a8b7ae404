"""The operands of a hand-written region."""

from __future__ import annotations

from typing import Any

import jax

from sbp.annotations import as_array
from sbp.pytrees import leaves_of


def arrays_of(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a region, each leaf an array.

    Raises:
      SbpError: `bad-argument` for a leaf that is no array.
    """
    leaves, tree = leaves_of(args, "a manual region")
    return jax.tree.unflatten(
        tree, [as_array(x, "a manual region takes pytrees of arrays; each leaf is") for x in leaves]
    )
