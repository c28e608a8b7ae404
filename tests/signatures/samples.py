"""Sample equations for every rule: small calls whose trace has the primitive.

Sizes are odd on purpose: 5 over 2, 7 over 4 and 3 over 4 devices leave shards with padding, or
empty ones.
"""

import samples_compute
import samples_move
from calls import (
    CLIP,
    FILL,
    PROMISE,
    SAMPLES,
    Equation,
    b,
    bf,
    bind,
    c,
    equation,
    equations,
    f,
    i,
    keys,
    on,
    primitives,
    rows,
    rule_of,
    skip_where_jax_lacks,
    u,
)

__all__ = [
    "CLIP",
    "FILL",
    "PROMISE",
    "SAMPLES",
    "Equation",
    "b",
    "bf",
    "bind",
    "c",
    "equation",
    "equations",
    "f",
    "i",
    "keys",
    "on",
    "primitives",
    "rows",
    "rule_of",
    "samples_compute",
    "samples_move",
    "skip_where_jax_lacks",
    "u",
]
