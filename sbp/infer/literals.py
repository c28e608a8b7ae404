"""The names of Z3 literals: one for each constraint, and one for each state of a variable.

A constraint stores its name; nothing parses a name.
"""

from __future__ import annotations

from sbp.infer.because import PinSource

POLICY_LITERAL = "policy"
"""The literal of the boxing policy."""


def pin_literal(source: PinSource, number: int) -> str:
    """The literal of a pin: an input, an output or an annotation by its number."""
    return f"{source[0]}{number}"


def budget_literal(number: int) -> str:
    """The literal of a budget of the program, by its number."""
    return f"b{number}"


def edge_literal(number: int) -> str:
    """The literal of a conversion, by its number in its system."""
    return f"e{number}"


def state_literal(variable: int, state: int) -> str:
    """The literal of a variable that is in one of its states."""
    return f"s{variable}_{state}"
