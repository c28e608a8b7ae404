"""Sizes of a mesh axis that a function has from outside: found, and replaced in a copy."""

import functools
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import AbstractMesh

from sbp.shardmap.written_sizes import DEPTH, AxisInCode, WrittenSizes
from tests.shardmap.programs import kinds, rings

AXIS = AxisInCode("model", 8, frozenset({6}))
STAGES, LAST, BLOCK, OTHER = 8, 7, 6, 5
PAIRS = [(i, (i + 1) % 8) for i in range(8)]
SHIFT = [(i, i + 1) for i in range(7)]
MESH = AbstractMesh((2, 8), ("data", "model"))


def written(fn) -> WrittenSizes:
    found = WrittenSizes(AXIS)
    found.read(fn)
    return found


def globals_of_a_module():
    return STAGES, LAST, BLOCK, OTHER, PAIRS, SHIFT, MESH.shape["model"]


def test_globals_are_found_and_replaced():
    found = written(globals_of_a_module)
    assert found.numbers == {"STAGES": 8, "LAST": 7, "BLOCK": 6} and found.others
    copy = found.replaced(["STAGES", "LAST", "BLOCK"])(globals_of_a_module)
    assert copy() == (1, 0, 48, 5, [(0, 0)], [], 1)
    assert found.replaced([])(globals_of_a_module)()[:3] == (8, 7, 6)
    assert globals_of_a_module()[0] == 8


def test_closures_defaults_and_partial_arguments():
    size = 8

    def inner(a, b=8, *, c=7):
        return a, b, c, size

    outer = functools.partial(inner, 8)
    found = written(outer)
    assert found.numbers == {"0": 8, "b": 8, "c": 7, "size": 8}
    assert found.replaced(["0", "b", "c", "size"])(outer)() == (1, 1, 0, 1)


def test_numbers_in_the_source():
    def body(x):
        return x % 8, [i for i in range(7)], (8, 2)

    found = written(body)
    assert found.numbers == {"8": 8, "7": 7}
    assert found.replaced(["8"])(body)(8) == (0, list(range(7)), (1, 2))


def test_a_function_that_calls_itself():
    def down(k):
        return STAGES if k == 0 else down(k - 1)

    found = written(down)
    assert found.replaced(["STAGES"])(down)(3) == 1


@dataclass(frozen=True)
class Devices:
    count: int = 8
    other: int = 5


def test_settings_are_copied():
    settings = Devices()

    class Model:
        def __init__(self):
            self.last = 7

        def __call__(self, s):
            return self.last, s.count, s.other

    call = functools.partial(Model().__call__, settings)
    for fn in (
        lambda: (settings.count, settings.other),
        functools.partial(lambda s: s.count, settings),
    ):
        found = written(fn)
        assert found.numbers == {"count": 8} and not found.fixed
        assert found.replaced(["count"])(fn)() in ((1, 5), 1)
    assert written(call).numbers == {"last": 7, "count": 8}
    assert written(call).replaced(["last"])(call)() == (0, 8, 5)
    assert written(call).replaced(["last", "count"])(call)() == (0, 1, 5)
    assert settings == Devices()


def test_what_is_not_replaced_is_said():
    class Settings:
        devices = 8

    settings = Settings()

    def body(x):
        return x * settings.devices * jax.device_count()

    wrapped = functools.lru_cache(globals_of_a_module)
    order = np.arange(4)
    found = written(lambda x: (body(x), wrapped(), x[order]))
    assert "the integers `order`" in found.fixed
    assert "`devices`, which is 8" in found.fixed and "`device_count`" in found.fixed
    assert "`STAGES`, which is 8" in found.fixed


def test_another_module_is_not_copied():
    found = written(lambda x: kinds.N_MODEL * kinds.N_DATA + kinds.draw(3))
    assert not found.fixed
    small = WrittenSizes(AxisInCode("model", kinds.N_MODEL))
    small.read(lambda x: (kinds.N_MODEL, rings.ring_sum(x)))
    assert "`N_MODEL`, which is 4" in small.fixed
    assert "a mesh or a list of pairs of another module or function" in small.fixed


def test_a_function_under_jit_is_copied_without_it():
    fn = jax.jit(globals_of_a_module)
    assert written(fn).numbers == {"STAGES": 8, "LAST": 7, "BLOCK": 6}
    assert written(fn).replaced(["STAGES"])(fn)()[0] == 1


def test_calls_are_followed_to_a_depth():
    def chain(k):
        if k == 0:
            return lambda: STAGES
        inner = chain(k - 1)
        return lambda: inner()

    assert "STAGES" in written(chain(DEPTH - 2)).numbers
    deep = written(chain(DEPTH + 2))
    assert "STAGES" not in deep.numbers and deep.fixed


def test_means_and_other_numbers():
    assert AXIS.alone(1 / 8) == 1.0 and AXIS.alone(8.0) == 1.0 and AXIS.alone(0.5) is None
    assert AxisInCode("x", 2).alone(1) is None and AxisInCode("x", 2).alone(2) == 1
