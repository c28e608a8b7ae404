"""Signatures: which types of a primitive's operands give which types of its results.

A signature is a set of rows. A row gives one atom (S, B or P) for each operand and each result, on
one mesh axis. `families` has the rules of JAX's primitives. `kernels` has the programs that rows
run on shards where the primitive itself is not enough. `laws` defines S, B and P, and checks and
proves rows.
"""

from sbp.signatures import families as families
from sbp.signatures.custom import (
    register as register,
    unregister as unregister,
)
from sbp.signatures.rule import (
    REFUSED as REFUSED,
    ROUNDED_PARTS as ROUNDED_PARTS,
    Kernel as Kernel,
    LocalContext as LocalContext,
    Op as Op,
    Row as Row,
    Rule as Rule,
    Sent as Sent,
    Shape as Shape,
    Traits as Traits,
    add_rule as add_rule,
    all_b as all_b,
    kernel_named as kernel_named,
    known_kernels as known_kernels,
    known_primitives as known_primitives,
    rule_for as rule_for,
    traits_of as traits_of,
)
