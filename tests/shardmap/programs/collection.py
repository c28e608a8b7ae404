"""All programs of the folder, grouped by the verdict that the checker must give."""

from tests.shardmap.programs import everyday, faulty, right
from tests.shardmap.programs.placed import accepted, idioms, positions, untuned
from tests.shardmap.programs.wrong import (
    counts,
    experts,
    layers,
    products,
    subtle,
    training,
    vocabulary,
)

FIRST, SECOND = (products,), (layers, training, vocabulary, experts)
PAIRED = FIRST + SECOND
"""Modules of wrong programs, the measured ones first."""

RIGHT, EVERYDAY = (right,), (everyday,)
FAULTY = (faulty,)

PLACED, PLACED_RIGHT = (positions, untuned, idioms), (accepted,)
"""Modules of programs whose devices compute their place: pairs, and right ones. The checker was
written with those of `positions` in view; those of `untuned` were written afterwards."""

MODULES = (*PAIRED, counts, *FAULTY, *RIGHT, *EVERYDAY, subtle, *PLACED, *PLACED_RIGHT)
"""Every module of programs."""


def pairs(modules):
    """The pairs of some modules, by their names."""
    return _union([module.PAIRS for module in modules])


def programs(modules):
    """The programs of some modules, by their names."""
    return _union([module.PROGRAMS for module in modules])


def _union(tables):
    found = {name: program for table in tables for name, program in table.items()}
    assert len(found) == sum(map(len, tables)), "two programs of one name"
    return found
