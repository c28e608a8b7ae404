"""Sizes of a mesh axis that a region's function has from outside: in a number of a closure or a
global, in a list of pairs for `ppermute`, in a mesh.

`lax.axis_size` gives another number on another mesh, and a number that was computed before the
region was called does not. So a function that shall run on a mesh axis of size 1 is copied, with
these values replaced. A number that equals the axis size may be another thing, such as a number of
heads; the caller tries both.
"""

from __future__ import annotations

import copy
import dis
import functools
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from sbp._jax_regions import of_user

DEPTH = 6
"""How far functions that a region's function uses are followed, call by call."""

_LIBRARIES = frozenset({"functools", "itertools", "jax", "math", "numpy"})
"""Modules that do not know the number of devices, except by `_COUNTS`."""

_COUNTS = frozenset({"device_count", "local_device_count", "process_count", "devices"})
"""Functions and attributes of JAX that give the number of devices."""


@dataclass(frozen=True, slots=True)
class AxisInCode:
    """A mesh axis as a function may know it.

    Arguments:
      name: its name.
      size: its size.
      lengths: the lengths that operands of the region have on one device along dims that it splits.
      devices: the number of devices of the mesh.
    """

    name: str
    size: int
    lengths: frozenset[int] = frozenset()
    devices: int = 0

    def alone(self, value: float) -> float | None:
        """What a number becomes on an axis of size 1, if it may depend on the size: the size, the
        last index, the length of a shard, a mean's factor; None for other numbers."""
        n = self.size
        if isinstance(value, float):
            return 1.0 if value in (float(n), 1.0 / n) else None
        if value in (n, self.devices or n):
            return value // n
        if value == n - 1 and n > 2:
            return 0
        return value * n if value in self.lengths and value > 1 else None

    def written(self, value: int) -> int | None:
        """What a number in the source becomes: the size, or the last index. Shorter numbers than 3
        are too frequent to be the last index."""
        n = self.size
        if value in (n, self.devices or n):
            return value // n
        return 0 if value == n - 1 and n > 3 else None

    def in_mesh(self, mesh: Any) -> bool:
        """Whether a mesh has this axis."""
        return dict(mesh.shape).get(self.name, 1) == self.size > 1

    def mesh_alone(self, mesh: Any) -> AbstractMesh:
        """A mesh in which this axis has size 1."""
        shape = {a: 1 if a == self.name else n for a, n in mesh.shape.items()}
        return AbstractMesh(tuple(shape.values()), tuple(shape), axis_types=mesh.axis_types)

    def pairs_alone(self, value: Any) -> list[tuple[int, int]] | None:
        """A list of pairs for `ppermute` on an axis of size 1: each device sends to itself where
        every device received, and none does where one got nothing. None for other values."""
        if not isinstance(value, list | tuple) or len(value) < 2:
            return None
        pairs = [p for p in value if isinstance(p, tuple | list) and len(p) == 2]
        indices = {i for p in pairs for i in p}
        if len(pairs) != len(value) or not all(type(i) is int for i in indices):
            return None
        if not indices <= set(range(self.size)):
            return None
        return [(0, 0)] if len({p[1] for p in pairs}) == self.size else []


@dataclass(slots=True, eq=False)
class WrittenSizes:
    """What a function has from outside that may depend on the size of a mesh axis.

    Arguments:
      axis: the mesh axis.
      numbers: names of variables with such numbers, with their values.
      others: whether it has lists of pairs, or meshes.
      fixed: what may be such a number and is not replaced, in words.
    """

    axis: AxisInCode
    numbers: dict[str, float] = field(default_factory=dict)
    others: bool = False
    fixed: set[str] = field(default_factory=set)

    def read(self, fn: Any) -> None:
        """Adds what a function and the functions that it uses have from outside."""
        self._follow(fn, DEPTH, set())
        self.fixed -= {f"`{name}`" for name in self.numbers}  # a setting with the name of a call

    def _follow(self, value: Any, depth: int, seen: set[int]) -> None:
        if id(value) in seen:
            return
        if depth == 0 and isinstance(value, types.FunctionType | functools.partial):
            self.fixed.add("functions that are called deep inside")
            return
        seen.add(id(value))
        if isinstance(value, functools.partial):
            named = {**dict(enumerate(value.args)), **value.keywords}
            used = _names(getattr(value.func, "__code__", None))
            for name, x in (("", value.func), *named.items()):
                self._see(str(name), x, depth, seen)
                self._attributes(x, used, depth, seen)
        elif isinstance(value, types.MethodType):
            self._attributes(value.__self__, _names(value.__func__.__code__), depth, seen)
            self._follow(value.__func__, depth, seen)
        elif isinstance(value, _JIT):
            self._follow(value.__wrapped__, depth, seen)
        elif isinstance(value, jax.custom_vjp | jax.custom_jvp):
            self._follow(value.fun, depth, seen)
        elif isinstance(value, types.FunctionType) and not _makes_region(value):
            if of_user(value.__code__):
                self._constants(value.__code__)
            for name, x in _taken(value):
                self._see(name, x, depth, seen)
                self._attributes(x, _names(value.__code__), depth, seen)
        elif isinstance(value, types.FunctionType):
            return
        elif (inner := getattr(value, "__wrapped__", None)) is not None:
            self._keep("", inner, depth, seen)  # a wrapper of JAX, which is not copied

    def _see(self, name: str, value: Any, depth: int, seen: set[int]) -> None:
        if isinstance(value, Mesh | AbstractMesh):
            self.others |= self.axis.in_mesh(value)
        elif type(value) in (int, float):
            if self.axis.alone(value) is not None:
                self.numbers[name] = value
        elif self.axis.pairs_alone(value) is not None:
            self.others = True
        elif isinstance(value, np.ndarray | jax.Array):
            if jnp.issubdtype(value.dtype, jnp.integer) and value.size > 1:
                self.fixed.add(f"the integers `{name}`")
        elif isinstance(value, types.FunctionType) or not _plain(value):
            self._follow(value, depth - 1, seen)

    def _constants(self, code: types.CodeType) -> None:
        """Numbers that are written in a function."""
        for c in code.co_consts:
            if isinstance(c, types.CodeType):
                self._constants(c)
        inside = {x for c in code.co_consts if isinstance(c, tuple) for x in c}
        loaded = {
            i.argval
            for i in dis.get_instructions(code)
            if (i.opcode in dis.hasconst or i.opname == "LOAD_SMALL_INT") and type(i.argval) is int
        }
        for c in loaded | inside:
            if type(c) is int and self.axis.written(c) is not None:
                self.numbers[str(c)] = c
        self.fixed |= {f"`{name}`" for name in _COUNTS & set(code.co_names)}

    def _keep(self, name: str, value: Any, depth: int, seen: set[int]) -> None:
        """Adds what is found in a value that is not copied."""
        found = WrittenSizes(self.axis)
        found._see(name, value, depth, seen)
        self.fixed |= found.fixed | {_said(k, v) for k, v in found.numbers.items()}
        if found.others:
            self.fixed.add("a mesh or a list of pairs of another module or function")

    def _attributes(self, value: Any, names: set[str], depth: int, seen: set[int]) -> None:
        """Adds the attributes of a value that a function uses: settings, a model, a module."""
        if isinstance(value, types.ModuleType):
            known = value.__name__.split(".")[0] in _LIBRARIES
            installed = "site-packages" in str(getattr(value, "__file__", ""))
            for name in sorted(names) if depth and not (known or installed) else ():
                self._keep(name, getattr(value, name, None), depth - 1, set(seen))
            return
        if _plain(value) or isinstance(value, _FOLLOWED) or hasattr(value, "dtype"):
            return
        items = value.items() if isinstance(value, dict) else ()
        inside = {k: x for k, x in items if isinstance(k, str)}
        found: dict[str, Any] = inside or {n: getattr(value, n, None) for n in sorted(names)}
        for name, x in found.items():
            if type(x) in (int, float) and self.axis.alone(x) is not None:
                if name in _own(value):
                    self.numbers[name] = x
                else:
                    self.fixed.add(_said(name, x))

    def replaced(self, names: Sequence[str]) -> Callable[[Any], Any]:
        """A function that copies a function, with these numbers, all meshes and all lists of pairs
        as they are on an axis of size 1."""
        return _Copier(self.axis, frozenset(names)).of


def _said(name: str, value: float) -> str:
    return f"`{name}`, which is {value:g}"


def _plain(value: Any) -> bool:
    """Whether a value has nothing to follow."""
    return value is None or isinstance(value, str | bytes | bool | int | float | types.ModuleType)


_JIT: Any = type(jax.jit(lambda x: x))


def _makes_region(fn: types.FunctionType) -> bool:
    """Whether `jax.shard_map` returned a function, whose region is copied where it is bound."""
    return {"in_specs", "out_specs"} <= set(fn.__code__.co_freevars)


_FOLLOWED = (types.FunctionType, types.MethodType, functools.partial, Mesh, AbstractMesh)


def _own(value: Any) -> set[str]:
    """The attributes that an object has and its class does not."""
    fields = getattr(type(value), "__dataclass_fields__", {})
    return set() if isinstance(value, type) else {*getattr(value, "__dict__", {}), *fields}


def _names(code: types.CodeType | None) -> set[str]:
    if code is None:
        return set()
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return set(code.co_names).union(*(_names(c) for c in inner))


def _taken(fn: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """The variables of a function that it has from outside. Of the functions of libraries, what
    they close over, for these may be wrappers of the user's."""
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # a variable that is assigned later
            continue
    if not of_user(fn.__code__):
        return
    names = _names(fn.__code__)
    yield from ((k, v) for k, v in fn.__globals__.items() if k in names)
    arguments = fn.__code__.co_varnames[: fn.__code__.co_argcount]
    defaults = fn.__defaults__ or ()
    yield from zip(arguments[len(arguments) - len(defaults) :], defaults, strict=True)
    yield from (fn.__kwdefaults__ or {}).items()


@dataclass(slots=True, eq=False)
class _Copier:
    """Copies functions with other values for what they have from outside.

    Arguments:
      axis: the mesh axis whose size is 1 in the copies.
      names: the variables whose numbers are replaced.
      made: copies by the id of the function, with the function, which keeps its id.
    """

    axis: AxisInCode
    names: frozenset[str]
    made: dict[int, tuple[Any, Any]] = field(default_factory=dict)

    def of(self, fn: Any) -> Any:
        return self._value("", fn, DEPTH)

    def _value(self, name: str, value: Any, depth: int) -> Any:
        if isinstance(value, Mesh | AbstractMesh):
            return self.axis.mesh_alone(value) if self.axis.in_mesh(value) else value
        if type(value) in (int, float):
            other = self.axis.alone(value) if name in self.names else None
            return value if other is None else other
        if (pairs := self.axis.pairs_alone(value)) is not None:
            return pairs
        if depth == 0:
            return value
        if isinstance(value, functools.partial):
            args = [self._value(str(i), x, depth - 1) for i, x in enumerate(value.args)]
            named = {k: self._value(k, x, depth - 1) for k, x in value.keywords.items()}
            return functools.partial(self._value("", value.func, depth - 1), *args, **named)
        if isinstance(value, types.MethodType):
            own = self._value("", value.__func__, depth - 1), self._object(value.__self__)
            return types.MethodType(*own)
        if isinstance(value, _JIT):  # what it calls is traced in its place
            return self._value("", value.__wrapped__, depth)
        if isinstance(value, jax.custom_vjp | jax.custom_jvp):
            made: Any = type(value)(value.fun)
            made.__dict__.update(value.__dict__)
            for rule in ("fun", "fwd", "bwd", "jvp"):
                if getattr(value, rule, None) is not None:
                    setattr(made, rule, self._value("", getattr(value, rule), depth))
            return made
        if isinstance(value, types.FunctionType):
            return value if _makes_region(value) else self._function(value, depth)
        return value if _plain(value) or hasattr(value, "dtype") else self._object(value)

    def _object(self, value: Any) -> Any:
        """A copy of an object with other numbers for its own attributes."""
        other: dict[str, float] = {}
        for name in self.names & _own(value):
            x: Any = getattr(value, name)
            alone = self.axis.alone(x) if type(x) in (int, float) else None
            other |= {} if alone is None else {name: alone}
        if not other:
            return value
        made = copy.copy(value)
        for name, x in other.items():
            object.__setattr__(made, name, x)
        return made

    def _function(self, fn: types.FunctionType, depth: int) -> Any:
        if id(fn) in self.made:
            return self.made[id(fn)][1]
        cells = tuple(types.CellType() for _ in fn.__closure__ or ())
        own = dict(fn.__globals__) if of_user(fn.__code__) else fn.__globals__
        code = self._code(fn.__code__) if own is not fn.__globals__ else fn.__code__
        made = types.FunctionType(code, own, fn.__name__, fn.__defaults__, cells or None)
        made.__kwdefaults__ = fn.__kwdefaults__
        made.__dict__.update(fn.__dict__)
        self.made[id(fn)] = fn, made  # before its variables, one of which may be the function
        names = fn.__code__.co_freevars
        for name, old, new in zip(names, fn.__closure__ or (), cells, strict=True):
            try:
                new.cell_contents = self._value(name, old.cell_contents, depth - 1)
            except ValueError:  # a variable that is assigned later
                continue
        if own is fn.__globals__:
            return made
        used = _names(fn.__code__)
        own.update({k: self._value(k, v, depth - 1) for k, v in own.items() if k in used})
        arguments = fn.__code__.co_varnames[: fn.__code__.co_argcount]
        given = fn.__defaults__ or ()
        named = zip(arguments[len(arguments) - len(given) :], given, strict=True)
        made.__defaults__ = tuple(self._value(k, v, depth - 1) for k, v in named) or None
        made.__kwdefaults__ = {
            k: self._value(k, v, depth - 1) for k, v in (fn.__kwdefaults__ or {}).items()
        } or None
        return made

    def _code(self, code: types.CodeType) -> types.CodeType:
        """The code of a function with other numbers in it."""
        return code.replace(co_consts=tuple(self._constant(c) for c in code.co_consts))

    def _constant(self, value: Any) -> Any:
        if isinstance(value, types.CodeType):
            return self._code(value)
        if isinstance(value, tuple):
            return tuple(self._constant(x) for x in value)
        other = self.axis.written(value) if type(value) is int else None
        return value if other is None or str(value) not in self.names else other
