"""Predicates on symbolic sizes are decided exactly, and Z3 counts as Python does."""

import itertools
import math

from sbp.sizes.scope import Scope, explore, numbers, value_of
from tests.sizes.oracle import dims


def test_z3_counts_as_python_does():
    texts = (
        "- floordiv(- b, 2)",
        "mod(b - 9, 4)",
        "floordiv(b - 9, s)",
        "mod(7 - b, s)",
        "max(b, 2*s) - min(b, s)",
        "b^2*s - 3",
        "floordiv(3, b)",
    )
    scope = Scope(("b", "s"), ())
    for text, b, s in itertools.product(texts, range(1, 12), range(1, 6)):
        value = str(value_of(text, {"b": b, "s": s})).replace("-", "- ")
        there = scope.narrow([f"b == {b}", f"s == {s}"])
        assert there.always((f"{text} == {value}",)), (text, b, s)
        assert not there.always((f"{text} != {value}",))


def test_exploration_is_exact():
    b, s = dims("b, s")
    cases = [
        lambda lift: lift(b) % 3 == 1 or lift(s) * 2 > lift(b),
        lambda lift: math.prod([lift(b), 4]) % 16 == 0 and max(lift(b), lift(s)) > 5,
        lambda lift: -(-lift(b) // 4) >= 2 and bool(lift(s) - 1),
        lambda lift: [6, 7][lift(b) % 2] < lift(s),
        lambda lift: lift(b) in (3, 5, 8),
        lambda lift: abs(lift(b) - 9) < lift(s) and lift(s) / 2 <= 10,
    ]
    for predicate in cases:
        found = explore(predicate, Scope(("b", "s"), ("s <= 30",)), {"b": 16, "s": 5})
        assert not found.open
        for b_, s_ in itertools.product(range(1, 40), range(1, 30)):
            point = {"b": b_, "s": s_}
            assert found.holds_at(point) == bool(predicate(numbers(point)))


def test_what_wants_numbers_is_not_explored():
    (b,) = dims("b")
    found = explore(lambda lift: hash(lift(b)) % 8 == 0, Scope(("b",), ()), {"b": 16})
    assert (
        "more than 128 cases" in found.open
        and found.holds_at({"b": 16}) is True
        and found.holds_at({"b": 10**6}) is None
    )
    found = explore(lambda lift: isinstance(lift(b), int), Scope(("b",), ()), {"b": 16})
    assert found.open == "it decides otherwise for numbers" and found.holds_at({"b": 16}) is True


def test_small_points_of_many_symbols_are_few():
    found = list(Scope(tuple("abc"), ("a == 1",)).points(1000))
    assert len(found) == len({tuple(p.values()) for p in found}) == 100
    assert found == sorted(found, key=lambda p: (max(p.values()), tuple(p.values())))
    for count in (18, 24):
        names = tuple(f"s{k}" for k in range(count))
        assert list(Scope(names, ()).points()) == [dict.fromkeys(names, 1)]
