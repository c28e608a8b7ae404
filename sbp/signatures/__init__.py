"""Signatures: for each primitive, which operand types give which result types on one mesh axis."""

from sbp.signatures import contraction, effects, elementwise, indexing, linalg, random, reduction, structural  # noqa: F401  # fill the registry
from sbp.signatures.factors import FactorMap as FactorMap
from sbp.signatures.rule import LocalContext as LocalContext
from sbp.signatures.rule import Op as Op
from sbp.signatures.rule import Row as Row
from sbp.signatures.rule import Rule as Rule
from sbp.signatures.rule import add_rule as add_rule
from sbp.signatures.rule import all_b as all_b
from sbp.signatures.rule import known_primitives as known_primitives
from sbp.signatures.rule import rule_for as rule_for
