"""Sizes of a mesh axis that a function has from outside: found, and replaced in a copy."""

import enum
import functools
import types
from dataclasses import dataclass

import jax
import numpy as np

from sbp.handwritten.written_sizes import DEPTH, AxisInCode, WrittenSizes
from tests.shardmap.programs import kinds, rings

STAGES, LAST, BLOCK, OTHER = 8, 7, 6, 5
PAIRS = [(i, (i + 1) % 8) for i in range(8)]
SHIFT = [(i, i + 1) for i in range(7)]
AXIS = AxisInCode("model", 8, frozenset({6}), permutations=[PAIRS, SHIFT])
MESH = jax.sharding.AbstractMesh((2, 8), ("data", "model"))


def written(fn, axis=AXIS) -> WrittenSizes:
    found = WrittenSizes(axis)
    found.copied(fn)
    return found


def alone(fn, *names, axis=AXIS):
    return WrittenSizes(axis).copied(fn, names)


def globals_of_a_module():
    return STAGES, LAST, BLOCK, OTHER, PAIRS, SHIFT, MESH.shape["model"]


def test_globals_are_found_and_replaced():
    assert written(globals_of_a_module).numbers == {"STAGES": 8, "LAST": 7, "BLOCK": 6}
    assert alone(globals_of_a_module, "STAGES", "LAST", "BLOCK")() == (1, 0, 48, 5, [(0, 0)], [], 1)
    assert alone(globals_of_a_module)()[:3] == (8, 7, 6) and globals_of_a_module()[0] == 8


def test_pairs_that_no_ppermute_takes_stay():
    widths, specs = ((0, 0), (1, 1)), ({"w": 1}, {"w": 2})
    assert alone(lambda: (widths, specs))() == (widths, specs)


def test_closures_defaults_and_partial_arguments():
    size = 8

    outer = functools.partial(lambda a, b=8, *, c=7: (a, b, c, size), 8)
    assert (written(outer).numbers, alone(outer, "0", "b", "c", "size")()) == (
        {"0": 8, "b": 8, "c": 7, "size": 8},
        (1, 1, 0, 1),
    )


def test_numbers_in_the_source():
    def body(x):
        return x % 8, [i for i in range(7)], (8, 2)

    assert (written(body).numbers, alone(body, "8")(8)) == (
        {"8": 8, "7": 7},
        (0, list(range(7)), (1, 2)),
    )


def test_a_function_that_calls_itself():
    def down(k):
        return STAGES if k == 0 else down(k - 1)

    assert alone(down, "STAGES")(3) == 1


@dataclass(frozen=True)
class Devices:
    count: int = 8
    other: int = 5


def test_settings_are_copied():
    settings, shared = Devices(), {"devices": 8, "rows": 5}

    class Model:
        size = 8

        def __init__(self):
            self.last = 7

        def __call__(self, s):
            return self.last, s.count, s.other

    call = functools.partial(Model().__call__, settings)
    for fn, name, want, *called in (
        (lambda: (settings.count, settings.other), "count", (1, 5)),
        (functools.partial(lambda s: s.count, settings), "count", 1),
        (lambda: (shared["devices"], shared["rows"]), "devices", (1, 5)),
        (lambda: (Model.size, Model().size), "size", (1, 1)),
        # What the object reads when it is called counts, too.
        (functools.partial(lambda m: m.size, Model()), "size", 1, ("last", 7)),
    ):
        found = written(fn)
        assert found.numbers == {name: 8, **dict(called)} and not found.fixed
        assert alone(fn, name)() == want
    assert written(call).numbers == {"last": 7, "count": 8} and alone(call, "last")() == (0, 8, 5)
    assert alone(call, "last", "count")() == (0, 1, 5)
    assert settings == Devices() and shared["devices"] == Model.size == 8


class Sizes(enum.Enum):
    EIGHT = "a"

    def __init__(self, _):
        self.count = 8


class Config(dict[str, int]):
    @property
    def devices(self):
        return self["count"]


def test_an_object_without_a_copy_keeps_its_settings():
    member, config = Sizes.EIGHT, Config(count=8)
    found = WrittenSizes(AXIS)
    assert found.copied(lambda: member.count, ("count",))() == 8 == member.count
    assert found.fixed == {"`count`, which is 8"}
    assert alone(lambda: config.devices, "count")() == 1 and config.devices == 8


def test_what_is_not_replaced_is_said():
    class Settings:
        @property
        def devices(self):
            return 8

    settings, order = Settings(), np.arange(4)
    body = functools.partial(lambda s, x: (s.devices * len(jax.devices()), x[order]), settings)
    assert written(body).numbers == {"devices": 8}
    found = WrittenSizes(AXIS)
    found.copied(body, ["devices"])
    assert found.fixed == {"`devices`, which is 8", "the integers `order`"}
    assert "`devices`" in written(lambda: jax.devices()).fixed


def test_modules_of_the_user_and_the_device_count():
    def body(x):
        return x * kinds.N_MODEL, rings.ring_sum.__globals__["N_MODEL"]

    small = AxisInCode("model", kinds.N_MODEL)
    assert written(body, small).numbers["N_MODEL"] == kinds.N_MODEL
    assert (alone(body, "N_MODEL", axis=small)(1), body(1)) == (
        (1, 1),
        (kinds.N_MODEL, kinds.N_MODEL),
    )
    counted = lambda: jax.device_count()
    every = AxisInCode("model", jax.device_count())
    assert written(counted, every).numbers == {"device_count": jax.device_count()}
    assert alone(counted, "device_count", axis=every)() == 1
    assert "`device_count`" in written(counted, AxisInCode("model", 3)).fixed


def test_a_module_that_names_itself():
    """As a package that imports itself."""
    module = types.ModuleType("mine")
    vars(module).update(mine=module, STAGES=8)
    assert alone(lambda: module.mine.STAGES, "STAGES")() == 1


def test_a_function_in_a_wrapper_is_copied_without_it():
    for fn in (jax.jit(globals_of_a_module), functools.lru_cache(globals_of_a_module)):
        assert written(fn).numbers == {"STAGES": 8, "LAST": 7, "BLOCK": 6}
        assert alone(fn, "STAGES")()[0] == 1


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
