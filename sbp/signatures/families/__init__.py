"""The rules of JAX's primitives, one module for each family. Importing this package fills the
registry."""

from sbp.signatures.families import calls as calls
from sbp.signatures.families import elementwise as elementwise
from sbp.signatures.families import indexing as indexing
from sbp.signatures.families import linalg as linalg
from sbp.signatures.families import random as random
from sbp.signatures.families import reduction as reduction
from sbp.signatures.families import structural as structural
from sbp.signatures.families import windows as windows
