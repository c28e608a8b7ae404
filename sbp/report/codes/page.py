"""What `sbp explain` says of a code."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

PRELUDE = """
import jax
import jax.numpy as jnp
import sbp
from sbp import B, P, S

auto = (jax.sharding.AxisType.Auto,) * 2
mesh = jax.sharding.AbstractMesh((2, 4), ("data", "model"), axis_types=auto)
x, w = jax.ShapeDtypeStruct((8, 16), jnp.float32), jax.ShapeDtypeStruct((16, 32), jnp.float32)
"""
"""What every example starts from."""


@dataclass(frozen=True, slots=True)
class CodePage:
    """One code.

    Arguments:
      code: the diagnostic code.
      text: why it is said, and what one usually does; paragraphs are separated by empty lines.
      wrong: a program that gets it, after `PRELUDE`.
      right: the same, repaired.
      runs: whether the tests may run the two (they need no file of the user's).
    """

    code: str
    text: str
    wrong: str
    right: str
    runs: bool = True

    def paragraphs(self) -> tuple[str, ...]:
        """The text, one string for each paragraph."""
        return tuple(" ".join(p.split()) for p in textwrap.dedent(self.text).strip().split("\n\n"))
