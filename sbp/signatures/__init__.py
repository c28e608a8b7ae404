"""Signatures: which operand types of a primitive give which result types on one mesh axis. Importing the families fills the registry."""

from sbp.signatures import contraction as contraction
from sbp.signatures import effects as effects
from sbp.signatures import elementwise as elementwise
from sbp.signatures import indexing as indexing
from sbp.signatures import linalg as linalg
from sbp.signatures import random as random
from sbp.signatures import reduction as reduction
from sbp.signatures import structural as structural
from sbp.signatures.factors import FactorMap as FactorMap
from sbp.signatures.fallback import REFUSED as REFUSED
from sbp.signatures.rule import LocalContext as LocalContext
from sbp.signatures.rule import Op as Op
from sbp.signatures.rule import Row as Row
from sbp.signatures.rule import Rule as Rule
from sbp.signatures.rule import add_rule as add_rule
from sbp.signatures.rule import all_b as all_b
from sbp.signatures.rule import known_primitives as known_primitives
from sbp.signatures.rule import rule_for as rule_for
