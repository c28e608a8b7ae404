"""Traces of a program with one device on a mesh axis, and the sizes of the axis that a region's
function has from outside: in a number of a closure or a global, in a list of pairs for `ppermute`,
in a mesh.

`lax.axis_size` gives another number on another mesh, and a number that was computed before the
region was called does not. So a function that shall run on a mesh axis of size 1 is copied, with
these values replaced. A number that equals the axis size may be another thing, such as a number of
heads; the caller tries both.
"""

import copy
import dis
import functools
import inspect
import itertools
import sys
import types
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from sbp import _jax
from sbp.errors import SbpInternalError, position_text
from sbp.handwritten.emulation import axes_by_dim, bodies, reason_of, regions_of, with_nodes
from sbp.handwritten.measured import matched
from sbp.machine.mesh import MeshSpec, call_without_mesh
from sbp.signatures import traits_of
from sbp.trace.collectives import KINDS, names_of
from sbp.trace.graph import Constant, Graph, Node, Operand

DEPTH = 12
"""How far functions that a region's function uses are followed, call by call."""


_COUNTS = frozenset({"device_count", "local_device_count", "process_count", "devices"})
"""Functions and attributes of JAX that give the number of devices."""


@dataclass(frozen=True, slots=True)
class AxisInCode:
    """The facts about a mesh axis that the code of a function may contain.

    Arguments:
      name: its name.
      size: its size.
      lengths: the lengths that operands of the region have on one device along dims that it splits.
      devices: the number of devices of the mesh.
      permutations: the pairs of each `ppermute` over it, also with sender and receiver exchanged.
    """

    name: str
    size: int
    lengths: frozenset[int] = frozenset()
    devices: int = 0
    permutations: Sequence[Sequence[tuple[Any, ...]]] = ()

    def alone(self, value: float, *, in_source: bool = False) -> float | None:
        """What a number becomes on an axis of size 1, if it may depend on the size: the size, the
        last index, the length of a shard, a mean's factor; None for other numbers.

        Arguments:
          value: the number.
          in_source: whether it is written in an expression. Such a number is no length of a shard,
              and those below 3 are too frequent to be the last index.
        """
        n = self.size
        if isinstance(value, float):
            return 1.0 if value in (float(n), 1.0 / n) else None
        if value in (n, self.devices or n):
            return value // n
        if value == n - 1 and n > (3 if in_source else 2):
            return 0
        return value * n if value in self.lengths and value > 1 and not in_source else None

    def mesh_alone(self, mesh: Any) -> AbstractMesh:
        """A mesh in which this axis has size 1."""
        shape = {a: 1 if a == self.name else n for a, n in mesh.shape.items()}
        return AbstractMesh(tuple(shape.values()), tuple(shape), axis_types=mesh.axis_types)

    def pairs_alone(self, value: Any) -> list[tuple[int, int]] | None:
        """A list of pairs for `ppermute` on an axis of size 1: each device sends to itself where
        every device received, and none does where one got nothing. None for other values."""
        if not isinstance(value, list | tuple) or not all(
            isinstance(p, tuple | list) for p in value
        ):
            return None
        pairs = [tuple(p) for p in value]
        if any(type(i) is not int for p in pairs for i in p) or pairs not in self.permutations:
            return None
        return [(0, 0)] if len({p[1] for p in pairs}) == self.size else []


@dataclass(slots=True, eq=False)
class WrittenSizes:
    """The values from outside in the functions of a program that may depend on the size of a mesh
    axis.

    Arguments:
      axis: the mesh axis.
      numbers: names of variables with such numbers, with their values.
      fixed: what may be such a number and cannot be replaced, in words.
    """

    axis: AxisInCode
    numbers: dict[str, float] = field(default_factory=dict)
    fixed: set[str] = field(default_factory=set)

    def copied(self, fn: Any, names: Iterable[str] = ()) -> Any:
        """A copy of a function in which some numbers, all meshes and all lists of pairs are as on
        an axis of size 1. It enters what the function has from outside."""
        made = _Copier(self, frozenset(names)).value("", fn, frozenset(), DEPTH)
        self.fixed -= {f"`{name}`" for name in self.numbers}  # a setting with the name of a call
        return made


def _rises(values: Sequence[Any]) -> bool:
    """Whether values are consecutive numbers, which name arguments or dims: `argnums=(0, 1, 2)`."""
    first = values[0] if len(values) > 1 else None
    return type(first) is int and [*values] == [*range(first, first + len(values))]


def _names(code: types.CodeType | None) -> frozenset[str]:
    """The names of variables and attributes that a function reads."""
    return (
        frozenset()
        if code is None
        else frozenset(code.co_names).union(
            *map(_names, (c for c in code.co_consts if isinstance(c, types.CodeType)))
        )
    )


@dataclass(slots=True, eq=False)
class _Copier:
    """Copies what a function has from outside.

    Arguments:
      found: enters what may depend on the size of the axis.
      names: the variables whose numbers are replaced.
      made: copies by the id of the function, with the function, which keeps its id.
    """

    found: WrittenSizes
    names: frozenset[str]
    made: dict[int, tuple[Any, Any]] = field(default_factory=dict)

    def value(self, name: str, value: Any, used: frozenset[str], depth: int) -> Any:
        """A copy of a value.

        Arguments:
          name: its name.
          value: the value.
          used: the names of attributes that the function with the value reads.
          depth: how far functions are still followed.
        """
        axis = self.found.axis
        match value:
            case Mesh() | AbstractMesh():
                has_axis = dict(value.shape).get(axis.name, 1) == axis.size > 1
                return axis.mesh_alone(value) if has_axis else value
            case int() | float() if type(value) in (int, float):
                return self.number(name, value)
            case list() | tuple() if (pairs := axis.pairs_alone(value)) is not None:
                return pairs
            case list() | tuple() if type(value) in (list, tuple) and depth and not _rises(value):
                parts = [self.part(f"{name}[{i}]", x, used, depth) for i, x in enumerate(value)]
                is_same = all(a is b for a, b in zip(parts, value, strict=True))
                return value if is_same else type(value)(parts)
            case np.ndarray() | jax.Array():
                if jnp.issubdtype(value.dtype, jnp.integer) and value.size > 1:
                    self.found.fixed.add(f"the integers `{name}`")
                return value
            case None | str() | bytes() | bool():
                return value
            case types.FunctionType() | functools.partial() if depth == 0:
                code = getattr(getattr(value, "func", value), "__code__", None)
                if code is None or _jax.of_user(code):
                    self.found.fixed.add("functions that are called deep inside")
                return value
            case _ if depth == 0 or hasattr(value, "dtype"):
                return value
            case functools.partial():
                used = _names(getattr(value.func, "__code__", None))
                args = [self.value(str(i), x, used, depth - 1) for i, x in enumerate(value.args)]
                named = {k: self.value(k, x, used, depth - 1) for k, x in value.keywords.items()}
                return functools.partial(
                    self.value("", value.func, used, depth - 1), *args, **named
                )
            case types.MethodType():
                used = _names(getattr(value.__func__, "__code__", None))
                own = self.value("", value.__func__, used, depth - 1)
                return types.MethodType(own, self.settings(value.__self__, used, depth))
            case jax.custom_vjp() | jax.custom_jvp():
                made: Any = type(value)(value.fun)
                made.__dict__.update(value.__dict__)
                for rule in ("fun", "fwd", "bwd", "jvp"):
                    if getattr(value, rule, None) is not None:
                        setattr(made, rule, self.value("", getattr(value, rule), used, depth))
                return made
            case types.FunctionType():
                # The region of a function from `jax.shard_map` is copied where it is bound.
                is_region = {"in_specs", "out_specs"} <= set(value.__code__.co_freevars)
                return value if is_region else self.function(value, depth)
            case types.ModuleType():
                return self.module(value, used, depth)
            case _:
                # Of `jax.jit` and other wrappers the function inside is traced. It is looked up
                # without `__getattr__`, which may be the user's.
                wrapped = inspect.getattr_static(value, "__wrapped__", None)
                if wrapped is not None and not isinstance(value, type):
                    return self.value(name, value.__wrapped__, used, depth)
                call = inspect.getattr_static(type(value), "__call__", None)
                if isinstance(call, types.FunctionType) and _jax.of_user(call.__code__):
                    used |= _names(call.__code__)
                return self.settings(value, used, depth)

    def part(self, name: str, value: Any, used: frozenset[str], depth: int) -> Any:
        """A copy of a part of a value, if it may have numbers or meshes in it."""
        if isinstance(value, Mesh | AbstractMesh | list | tuple) or type(value) in (int, float):
            return self.value(name, value, used, depth - 1)
        is_settings = isinstance(value, dict | types.SimpleNamespace) or is_dataclass(value)
        return self.settings(value, used, depth - 1) if is_settings and depth else value

    def number(self, name: str, value: float, *, in_source: bool = False) -> float:
        """A number, or what it is on an axis of size 1; `in_source` as in `AxisInCode.alone`."""
        if (alone := self.found.axis.alone(value, in_source=in_source)) is None:
            return value
        self.found.numbers[name] = value
        return alone if name in self.names else value

    def module(self, module: types.ModuleType, used: frozenset[str], depth: int) -> Any:
        """What a function reads of a module of the user, copied; JAX with another
        `jax.device_count`."""
        has = vars(module)
        if module is jax and "device_count" in used:
            count = jax.device_count()
            alone = self.number("device_count", count, in_source=True)
            made = {} if alone == count else {"device_count": lambda *_, **__: int(alone)}
        elif (
            # These modules do not know the number of devices, except by `_COUNTS`.
            module.__name__.split(".")[0] in {"jax", "numpy", *sys.stdlib_module_names}
            or "site-packages" in str(getattr(module, "__file__", ""))
        ):
            made = {}
        else:
            made = {k: self.value(k, has[k], used, depth - 1) for k in sorted(used & has.keys())}
        return types.SimpleNamespace(**has | made) if made else module

    def settings(self, value: Any, used: frozenset[str], depth: int) -> Any:
        """An object, a class or a dict with the numbers and meshes that a function reads of it."""
        is_dict = isinstance(value, dict)
        names = sorted(k for k in value if isinstance(k, str)) if is_dict else sorted(used)
        read: dict[str, Any] = {k: value[k] if is_dict else getattr(value, k, None) for k in names}
        alone = {k: self.part(k, x, used, depth) for k, x in read.items()}
        other = {k: x for k, x in alone.items() if x is not read[k]}
        if not other:
            return value
        if is_dict:
            made = copy.copy(value)
            made.update(other)
            return made
        if isinstance(value, type):
            try:
                return type(value)(value.__name__, (value,), other)
            except TypeError:  # a class without subclasses, such as an enumeration
                return self.kept(value, other)
        made = copy.copy(value)
        if made is value:  # an object that is its own copy, such as a member of an enumeration
            return self.kept(value, other)
        for name, x in other.items():
            try:
                object.__setattr__(made, name, x)
            except AttributeError:  # a property, or a field of a tuple
                self.kept(value, (name,))
        return made

    def kept(self, value: Any, names: Iterable[str]) -> Any:
        """An object with settings that cannot be replaced."""
        values = {name: getattr(value, name) for name in names}
        self.found.fixed |= {
            f"`{name}`, which is {x:g}" if isinstance(x, int | float) else f"`{name}`"
            for name, x in values.items()
        }
        return value

    def function(self, fn: types.FunctionType, depth: int) -> Any:
        """A copy of a function. Of one of a library only what it closes over is copied, which may
        be a function of the user's."""
        if id(fn) in self.made:
            return self.made[id(fn)][1]
        cells = tuple(types.CellType() for _ in fn.__closure__ or ())
        mine, used = _jax.of_user(fn.__code__), _names(fn.__code__)
        own = dict(fn.__globals__) if mine else fn.__globals__
        made = types.FunctionType(
            self.code(fn.__code__) if mine else fn.__code__,
            own,
            fn.__name__,
            fn.__defaults__,
            cells or None,
        )
        made.__kwdefaults__ = fn.__kwdefaults__
        made.__dict__.update(fn.__dict__)
        self.made[id(fn)] = fn, made  # before its variables, one of which may be the function

        def copied(name: str, value: Any) -> Any:
            return self.value(name, value, used, depth - 1)

        for name, old, new in zip(
            fn.__code__.co_freevars, fn.__closure__ or (), cells, strict=True
        ):
            try:
                new.cell_contents = copied(name, old.cell_contents)
            except ValueError:  # a variable that is assigned later
                continue
        if mine:
            own.update({k: copied(k, v) for k, v in own.items() if k in used})
            given, count = fn.__defaults__ or (), fn.__code__.co_argcount
            made.__defaults__ = (
                tuple(map(copied, fn.__code__.co_varnames[count - len(given) : count], given))
                or None
            )
            made.__kwdefaults__ = {
                k: copied(k, v) for k, v in (fn.__kwdefaults__ or {}).items()
            } or None
        return made

    def code(self, code: types.CodeType) -> types.CodeType:
        """The code of a function with other numbers in it."""
        self.found.fixed |= {f"`{name}`" for name in _COUNTS & set(code.co_names)}
        loads = [
            (i, after.argrepr in ("**", "**="))
            for i, after in itertools.pairwise(dis.get_instructions(code))
            if (i.opcode in dis.hasconst or i.opname == "LOAD_SMALL_INT") and type(i.argval) is int
        ]
        numbers = {
            c: self.written(c)
            for c in sorted({i.argval for i, is_exponent in loads if not is_exponent})
        }
        consts = [numbers.get(c, c) if type(c) is int else self.written(c) for c in code.co_consts]
        text = bytearray(code.co_code)
        for i, is_exponent in loads:  # an exponent is no count of devices, and keeps its number
            if is_exponent and i.opcode in dis.hasconst and max(i.arg or 0, len(consts)) < 256:
                text[i.offset + 1] = len(consts)
                consts.append(i.argval)
        return code.replace(co_code=bytes(text), co_consts=tuple(consts))

    def written(self, value: Any) -> Any:
        """A constant of the source."""
        match value:
            case types.CodeType():
                return self.code(value)
            case tuple():
                return value if _rises(value) else tuple(map(self.written, value))
            case int() if type(value) is int:
                return self.number(str(value), value, in_source=True)
            case _:
                return value


def sizes_of(graph: Graph, name: str, mesh: MeshSpec) -> WrittenSizes:
    """A mesh axis as the functions of a program may know it: by the lengths of one device's shards
    along dims that it splits, and by the pairs with which regions send values along it."""
    lengths = frozenset(
        shape[d]
        for region in regions_of(graph)
        for value, spec in zip(region.params["body"].inputs, region.params["in_specs"], strict=True)
        for shape in [region.params["body"].aval(value).shape]
        for d, axes in enumerate(axes_by_dim(spec, len(shape), mesh.names))
        if name in axes
    )
    sent = [
        [tuple(map(int, pair)) for pair in n.params["perm"]]
        for n in bodies(graph)
        if KINDS.get(n.op) == "permute" and name in names_of(n)
    ]
    pairs = sent + [[pair[::-1] for pair in pairs] for pairs in sent]
    return WrittenSizes(AxisInCode(name, mesh.size(name), lengths, mesh.num_devices, pairs))


# ---- numbers ------------------------------------------------------------------------------------

_OPERATORS = ("numpy.array_methods.", "numpy.ufunc", "lax.lax.div", "lax.lax.mul")
"""JAX's functions below a product or ratio that the user writes."""


def fixed_numbers(
    graph: Graph, alone: Graph, n: int, lengths: Collection[int]
) -> dict[int, tuple[int, str]]:
    """Numbers that the user's lines multiply or divide by, that are the same with one device, and
    that may count devices or the elements of a shard.

    Arguments:
      graph: the program.
      alone: the program with one device on the mesh axis.
      n: the size of the axis.
      lengths: the lengths of shards along it.

    Returns:
      By the id of an operation, the id of the same one with one device, and the number.
    """

    def may_count(number: float) -> bool:
        times = number if number >= 1 else 1 / number if number > 0 else 0.0
        return times >= 2 and (times % n == 0 or (times > 2 and times in lengths))

    return {
        a.id: (b.id, f"{number:g}")
        for a, b in matched(graph, alone)
        for number in scalars(a) & scalars(b)
        if may_count(number)
    }


def changed_numbers(graph: Graph, alone: Graph) -> dict[int, str]:
    """By the ids of operations whose numbers are others in another trace of a program, these
    numbers."""
    pairs = ((a.id, scalars(a), scalars(b)) for a, b in matched(graph, alone))
    return {
        i: f"{min(own - one):.6g}, and not {min(one - own):.6g}"
        for i, own, one in pairs
        if own - one and one - own
    }


def longer_counts(graph: Graph, alone: Graph) -> frozenset[int]:
    """The ids of operations without operands that count further than in another trace of a program,
    as an index up to `lax.axis_size` does."""
    pairs = [(a, b.outputs[0]) for a, b in matched(graph, alone) if not a.inputs]
    return frozenset(
        a.id for a, one in pairs if graph.aval(a.outputs[0]).size > alone.aval(one).size
    )


def scalars(node: Node) -> set[float]:
    """The numbers in a product or ratio that the user writes; empty for any other operation."""
    is_written = all(f.startswith(_OPERATORS) for f in node.library)
    scales = is_written and traits_of(node.op).numpy in (np.divide, np.multiply)
    return {
        float(np.real(x.value))
        for x in (node.inputs if scales else ())
        if isinstance(x, Constant) and not x.aval.shape
    }


def renumber(graph: Graph, nodes: Collection[int], n: int) -> Graph:
    """A program in which the numbers of some operations count `n` times fewer things."""

    def of(operand: Operand) -> Operand:
        if not isinstance(operand, Constant) or operand.aval.shape:
            return operand
        x = np.asarray(operand.value)
        return Constant(np.asarray(x / n if x >= 1 else x * n, x.dtype), operand.aval)

    return with_nodes(
        graph,
        lambda node: (
            replace(node, inputs=tuple(map(of, node.inputs))) if node.id in nodes else node
        ),
    )


# ---- the program on one device ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Attempt:
    """A way to read a program on one device.

    Arguments:
      names: variables of the user's code whose numbers are read as counts of devices.
      chained: whether a region with one stage for each device becomes regions with one stage, one
          after the other.
    """

    names: tuple[str, ...] = ()
    chained: bool = False


_TRACES = itertools.count()
"""Numbers the traces: JAX shall take none that it cached for another mesh."""


def trace_on_one_device(
    traced: Callable[[Any], Graph], written: WrittenSizes, attempt: Attempt, fn: Any
) -> Graph:
    """A program with a mesh axis at size 1.

    Arguments:
      traced: traces a function as the program.
      written: the mesh axis; gets the sizes that the function has from outside.
      attempt: how the program is read.
      fn: its function.

    Raises:
      ValueError: where the program cannot be read so.
    """
    axis, copied = written.axis, functools.partial(written.copied, names=attempt.names)

    def act(bind: Callable[..., Any], args: tuple[Any, ...], params: dict[str, Any]) -> Any:
        size = dict(params["mesh"].shape).get(axis.name)
        mine = size == axis.size or (size == 1 and all(map(_jax.of_call, params["subfuns"])))
        if not mine:  # of another mesh, or the gradient of one that is already alone
            return bind(*args, **params)
        alone = params | {
            "mesh": axis.mesh_alone(params["mesh"]),
            "subfuns": tuple(copied(fn) for fn in params["subfuns"]),
        }
        return _chain(bind, args, alone, axis) if attempt.chained else bind(*args, **alone)

    try:
        with _jax.own_traces(f"sbp_alone_{next(_TRACES)}"), _jax.regions_bound_by(act):
            return call_without_mesh(traced, copied(fn))
    except SbpInternalError:
        raise
    except Exception as error:  # the user's function, which may raise anything on other sizes
        span = _jax.raising_span(error)
        at = f", at {position_text(span.file, span.line)}" if span else ""
        raise ValueError(f"{reason_of(error).rstrip('.')}{at}") from error


def checking_vma(traced: Callable[[Any], Graph]) -> Callable[[Any], Graph]:
    """Traces a program as `traced` does, but with check_vma=True in all its regions."""

    def act(bind: Callable[..., Any], args: tuple[Any, ...], params: dict[str, Any]) -> Any:
        return bind(*args, **params | {"check_vma": True})

    def checked(fn: Any) -> Graph:
        with _jax.own_traces("sbp_check_vma"), _jax.regions_bound_by(act):
            return traced(fn)

    return checked


def _chain(
    bind: Callable[..., Any], args: Sequence[Any], params: dict[str, Any], axis: AxisInCode
) -> Any:
    """Runs the stages of a pipeline one after the other. A pipeline of n stages computes the same
    as n pipelines of one stage, if each of them takes the result of the previous one."""
    dims = [_axis_dim(x.shape, s, axis) for x, s in zip(args, params["in_specs"], strict=True)]
    if all(d is None for d in dims):
        raise ValueError("no operand has one element for each device")
    given, out = list(args), None
    for stage in range(axis.size):
        shards = (
            x if d is None else jax.lax.slice_in_dim(x, stage, stage + 1, axis=d)
            for x, d in zip(given, dims, strict=True)
        )
        out = bind(*shards, **params)
        results = list(out)
        streams = [
            i
            for i, (x, d) in enumerate(zip(given, dims, strict=True))
            if d is None and [(x.shape, x.dtype)] == [(y.shape, y.dtype) for y in results]
        ]
        if len(streams) != 1:
            raise ValueError("no operand alone is of the result's shape")
        given[streams[0]] = results[0]
    return out


def _axis_dim(shape: Sequence[int], spec: Any, axis: AxisInCode) -> int | None:
    """The dim that an axis splits into one element for each device; None if it splits none so."""
    alone = (
        d
        for d, e in enumerate(spec if isinstance(spec, PartitionSpec) else ())
        if e in (axis.name, (axis.name,))
    )
    return next((d for d in alone if shape[d] == axis.size), None)
