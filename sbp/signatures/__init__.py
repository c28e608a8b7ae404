"""Signatures: which types of a primitive's operands give which types of its results.

A signature is a set of rows. A row gives one atom (S, B or P) for each operand and each result, on
one mesh axis. `families` has the rules of JAX's primitives. `kernels` has the programs that rows
run on shards where the primitive itself is not enough. `laws` defines S, B and P, and checks and
proves rows.
"""

from sbp.signatures import families as families
from sbp.signatures.custom import register as register
from sbp.signatures.custom import registered as registered
from sbp.signatures.custom import unregister as unregister
from sbp.signatures.fallback import REFUSED as REFUSED
from sbp.signatures.fallback import traits_of as traits_of
from sbp.signatures.rule import ROUNDED_PARTS as ROUNDED_PARTS
from sbp.signatures.rule import Kernel as Kernel
from sbp.signatures.rule import LocalContext as LocalContext
from sbp.signatures.rule import Op as Op
from sbp.signatures.rule import Row as Row
from sbp.signatures.rule import Rule as Rule
from sbp.signatures.rule import Sent as Sent
from sbp.signatures.rule import Traits as Traits
from sbp.signatures.rule import add_rule as add_rule
from sbp.signatures.rule import all_b as all_b
from sbp.signatures.rule import kernel_named as kernel_named
from sbp.signatures.rule import known_kernels as known_kernels
from sbp.signatures.rule import known_primitives as known_primitives
from sbp.signatures.rule import rule_for as rule_for
