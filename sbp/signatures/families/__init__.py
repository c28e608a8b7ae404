"""The rules of JAX's primitives, one module for each family. Importing this package fills the
registry."""

from sbp.signatures.families import (
    calls as calls,
    elementwise as elementwise,
    indexing as indexing,
    linalg as linalg,
    random as random,
    reduction as reduction,
    structural as structural,
    windows as windows,
)
