"""One way of calling a function: flat arguments, statics, donations, and the types asked of inputs
and outputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from sbp import _jax
from sbp.annotations import Pin, as_type
from sbp.errors import SbpError, warn
from sbp.infer.pins import check_axes
from sbp.infer.space import from_type, is_even
from sbp.limits import Budget, Policy
from sbp.machine.mesh import Hardware, MeshSpec
from sbp.run.partial import Partial
from sbp.trace.graph import Graph
from sbp.types import Atom, B, NdSbp, Split, Unreduced


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Options:
    """The arguments of `sbp.jit` besides the function and the mesh."""

    in_types: Any
    out_types: Any
    boxing: Policy
    axis_policies: Mapping[str, Policy]
    budgets: tuple[Budget, ...]
    memory_limit: float | None
    hardware: Hardware | str | None
    static_argnums: int | Sequence[int]
    static_argnames: str | Sequence[str]
    donate_argnums: int | Sequence[int]
    donate_argnames: str | Sequence[str]
    reduce_dtype: str | None


def is_type_leaf(x: Any) -> bool:
    return (
        x is None
        or isinstance(x, NdSbp | str | PartitionSpec | NamedSharding | Split | Unreduced | type(B))
        or (callable(x) and not isinstance(x, type))
    )


@dataclass(frozen=True, slots=True, eq=False)
class Signature:
    """One way of calling the function.

    Arguments:
      key: equal for calls that may share a plan.
      tree: the structure of (args, kwargs) without statics.
      avals: shape and dtype of each flat argument.
      names: the user's name of each.
      call: the function of flat arguments.
      wanted: the type asked of each input; None leaves it free.
      partial: the type of each input that is pinned partial.
      donated: flat positions of donated arguments.
      donated_args: the same, by argument.
    """

    key: Any
    tree: Any
    avals: tuple[jax.ShapeDtypeStruct, ...]
    names: tuple[str, ...]
    call: Callable[..., Any]
    wanted: tuple[NdSbp | None, ...]
    partial: tuple[NdSbp | None, ...]
    donated: tuple[int, ...]
    donated_args: tuple[tuple[int, ...], ...]


def config_key() -> tuple[Any, ...]:
    """The settings of JAX that change what a function traces to."""
    config: Any = jax.config
    return (
        config.jax_enable_x64,
        config.jax_default_matmul_precision,
        config.jax_numpy_dtype_promotion,
    )


def quick_key(leaves: Sequence[Any], tree: Any) -> tuple[Any, ...] | None:
    """A key for calls whose flat arguments are all JAX arrays, cheap enough for every step; None
    for other calls."""
    if not all(isinstance(x, jax.Array) for x in leaves):
        return None
    return tree, tuple([x.aval for x in leaves]), tuple([x.sharding for x in leaves]), config_key()


class CallReader:
    """Reads calls of one function on one mesh.

    Arguments:
      fn: the function.
      mesh: the caller's mesh.
      spec: its axes and hardware.
      options: the options of `sbp.jit`.
    """

    def __init__(
        self, fn: Callable[..., Any], mesh: Mesh | AbstractMesh, spec: MeshSpec, options: Options
    ) -> None:
        self._fn = fn
        self._mesh = mesh
        self._spec = spec
        self._options = options
        self._parameters = _parameter_names(fn)

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Signature, list[Any]]:
        """The signature of a call, and its flat arguments.

        Raises:
          SbpError: for arguments that fit neither the function nor `in_types`.
        """
        options = self._options
        static_numbers, static_names = _resolve_names(
            options.static_argnums, options.static_argnames, self._parameters, len(args)
        )
        donate_numbers, donate_names = _resolve_names(
            options.donate_argnums, options.donate_argnames, self._parameters, len(args)
        )
        statics = {i: args[i] for i in static_numbers if i < len(args)}
        static_kwargs = {k: v for k, v in kwargs.items() if k in static_names}
        for what in (*statics.values(), *static_kwargs.values()):
            try:
                hash(what)
            except TypeError:
                raise SbpError(
                    f"static argument {what!r} is not hashable; make it hashable or not static"
                ) from None
        dynamic = tuple(a for i, a in enumerate(args) if i not in statics)
        dynamic_kwargs = {k: v for k, v in kwargs.items() if k not in static_kwargs}
        with_path, tree = jax.tree_util.tree_flatten_with_path(
            (dynamic, dynamic_kwargs), is_leaf=lambda x: isinstance(x, Partial)
        )
        leaves = [leaf for _, leaf in with_path]
        names = tuple(
            self._leaf_name(path, [i for i in range(len(args)) if i not in statics])
            for path, _ in with_path
        )
        wanted = self._wanted_inputs(dynamic, with_path)
        avals, partial = [], []
        for leaf, want, name in zip(leaves, wanted, names, strict=True):
            is_partial = want is not None and want.is_partial
            if is_partial != isinstance(leaf, Partial) and not (
                is_partial and isinstance(leaf, jax.ShapeDtypeStruct)
            ):
                raise SbpError(
                    (
                        f"input {name} is pinned {want!r} but is no sbp.Partial; pass a Partial, or"
                        " pin it S or B"
                        if is_partial
                        else (
                            f"input {name} is an sbp.Partial but not pinned partial; pin it in"
                            " in_types or call .reduce() first"
                        )
                    ),
                    code="not-partial",
                )
            array = leaf
            if isinstance(leaf, Partial):
                if leaf.type != want:
                    raise SbpError(
                        f"input {name} is pinned {want!r} but is a Partial of {leaf.type!r}",
                        code="not-partial",
                    )
                array = leaf.parts
            aval = _shape_of(array, name)
            if isinstance(leaf, Partial):
                aval = jax.ShapeDtypeStruct(aval.shape[leaf.rank :], aval.dtype)
            avals.append(aval)
            partial.append(want if is_partial else None)
        argument_of = _argument_positions(dynamic, dynamic_kwargs)
        positions = [i for i in range(len(args)) if i not in statics]
        groups: dict[Any, list[int]] = {}
        for flat, owner in enumerate(argument_of):
            if (
                isinstance(owner, int) and positions[owner] in donate_numbers
            ) or owner in donate_names:
                groups.setdefault(owner, []).append(flat)
        fn = self._fn
        count = len(args)

        def call(*flat: Any) -> Any:
            inner, inner_kwargs = jax.tree.unflatten(tree, flat)
            rest = iter(inner)
            full = [statics[i] if i in statics else next(rest) for i in range(count)]
            return fn(*full, **inner_kwargs, **static_kwargs)

        key = (
            tree,
            tuple((a.shape, a.dtype, bool(getattr(a, "weak_type", False))) for a in avals),
            tuple(
                (i, type(v), v) for i, v in sorted(statics.items())
            ),  # 1, 1.0 and True are equal, and trace differently
            tuple((k, type(v), v) for k, v in sorted(static_kwargs.items())),
            tuple(wanted),
            config_key(),
        )
        signature = Signature(
            key,
            tree,
            tuple(avals),
            names,
            call,
            tuple(wanted),
            tuple(partial),
            tuple(i for g in groups.values() for i in g),
            tuple(tuple(g) for g in groups.values()),
        )
        return signature, leaves

    def _leaf_name(self, path: tuple[Any, ...], positions: list[int]) -> str:
        where, index, *rest = path
        if where.idx == 0:
            position = positions[index.idx]
            head = (
                self._parameters[position]
                if position < len(self._parameters)
                else f"args[{position}]"
            )
        else:
            head = str(index.key)
        return head + jax.tree_util.keystr(tuple(rest))

    def _wanted_inputs(self, dynamic: tuple[Any, ...], with_path: list[Any]) -> list[NdSbp | None]:
        in_types = self._options.in_types
        wanted: list[NdSbp | None] = []
        if in_types is None:
            for _, leaf in with_path:
                wanted.append(_carried_type(leaf, self._mesh))
            return wanted
        if not isinstance(in_types, tuple):
            in_types = (in_types,) * (len(dynamic) if is_type_leaf(in_types) else 1)
        if len(in_types) != len(dynamic):
            raise SbpError(
                f"in_types has {len(in_types)} entries for {len(dynamic)} non-static positional"
                " arguments; give one each"
            )
        for number, (entry, arg) in enumerate(zip(in_types, dynamic, strict=True)):
            wanted += broadcast_types(entry, arg, f"in_types[{number}]", self._spec)
        for _, leaf in with_path[len(wanted) :]:
            wanted.append(_carried_type(leaf, self._mesh))
        return wanted


def check_types(types: Any, mesh: MeshSpec) -> None:
    for leaf in jax.tree.leaves(types, is_leaf=is_type_leaf):
        if leaf is not None and is_type_leaf(leaf) and not callable(leaf):
            check_axes(as_type(leaf, mesh_axes=mesh.names), mesh, "in_types and out_types")


def _parameter_names(fn: Callable[..., Any]) -> tuple[str, ...]:
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return ()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in parameters if p.kind in kinds)


def _resolve_names(
    numbers: Any, names: Any, parameters: tuple[str, ...], count: int
) -> tuple[frozenset[int], frozenset[str]]:
    """Argument numbers and names as `jax.jit` resolves them: each names the other where the
    signature tells."""
    given = (numbers,) if isinstance(numbers, int) else tuple(numbers)
    called = (names,) if isinstance(names, str) else tuple(names)
    by_number = {n % count if n < 0 and count else n for n in given}
    by_number |= {parameters.index(n) for n in called if n in parameters}
    by_name = set(called) | {parameters[n] for n in by_number if n < len(parameters)}
    return frozenset(by_number), frozenset(by_name)


def _shape_of(x: Any, name: str) -> jax.ShapeDtypeStruct:
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(
            x.shape, x.dtype, weak_type=bool(getattr(x, "weak_type", False))
        )
    try:
        aval = jax.typeof(x)
        return jax.ShapeDtypeStruct(
            aval.shape, aval.dtype, weak_type=bool(getattr(aval, "weak_type", False))
        )  # pyright: ignore[reportAttributeAccessIssue]
    except (TypeError, AttributeError) as error:
        raise SbpError(
            f"input {name} is no array: {type(x).__name__}; mark it static or pass an array"
        ) from error


def _argument_positions(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    owners: list[Any] = []
    for number, arg in enumerate(args):
        owners += [number] * len(jax.tree.leaves(arg, is_leaf=lambda x: isinstance(x, Partial)))
    for name in sorted(kwargs):
        owners += [name] * len(
            jax.tree.leaves(kwargs[name], is_leaf=lambda x: isinstance(x, Partial))
        )
    return owners


def _carried_type(leaf: Any, mesh: Mesh | AbstractMesh) -> NdSbp | None:
    """The type that an argument's own NamedSharding on this mesh's devices pins."""
    sharding = getattr(leaf, "sharding", None)
    if isinstance(leaf, Partial):
        return leaf.type
    if not isinstance(sharding, NamedSharding) or isinstance(leaf, _jax.Tracer):
        return None
    if sharding.mesh.axis_names != mesh.axis_names or tuple(sharding.mesh.axis_sizes) != tuple(
        mesh.axis_sizes
    ):
        return None
    if (
        isinstance(mesh, Mesh)
        and isinstance(sharding.mesh, Mesh)
        and not np.array_equal(sharding.mesh.devices, mesh.devices)
    ):
        return None
    try:
        return as_type(sharding, len(leaf.shape))
    except SbpError:
        # a split order against the mesh is no type: the array is moved, as from any other layout
        return None


def broadcast_types(entry: Any, tree: Any, where: str, mesh: MeshSpec) -> list[NdSbp | None]:
    """The type of each leaf of `tree` from a pytree prefix of types."""
    with_path, structure = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda x: isinstance(x, Partial)
    )
    numbers = jax.tree.unflatten(structure, list(range(len(with_path))))
    found: list[NdSbp | None] = [None] * len(with_path)

    def assign(t: Any, subtree: Any) -> None:
        for number in jax.tree.leaves(subtree):
            path, leaf = with_path[number]
            rank = leaf.parts.ndim - leaf.rank if isinstance(leaf, Partial) else len(np.shape(leaf))
            own = t
            if callable(t) and not isinstance(
                t, Unreduced | str | NdSbp | PartitionSpec | NamedSharding
            ):
                own = t(
                    path, leaf if isinstance(leaf, jax.ShapeDtypeStruct) else _shape_of(leaf, where)
                )
            if own is None:
                continue
            checked = as_type(own, rank, mesh.names)
            check_axes(checked, mesh, f"{where}{jax.tree_util.keystr(path)}")
            found[number] = checked

    try:
        jax.tree.map(assign, entry, numbers, is_leaf=is_type_leaf)
    except ValueError as error:
        raise SbpError(
            f"{where} is no prefix of the argument it types: {' '.join(str(error).split())[:200]}"
        ) from error
    return found


def codes_of(t: NdSbp | None, mesh: MeshSpec) -> tuple[int | None, ...] | None:
    if t is None:
        return None
    return tuple(
        None if axis in t.free else c
        for axis, c in zip(mesh.names, from_type(t, mesh), strict=True)
    )


def even_boundary(
    t: NdSbp | None, shape: tuple[int, ...], mesh: MeshSpec, where: str
) -> tuple[NdSbp | None, Pin | None]:
    """What JAX can hold at the boundary: dims that do not divide are B there, and are split or
    gathered inside."""
    if t is None or is_even(shape, from_type(t, mesh), mesh.sizes):
        return t, None
    atoms: dict[str, Atom] = {}
    for axis in mesh.names:
        if axis not in t.free:
            trial = NdSbp({**atoms, axis: t.get(axis)})
            atoms[axis] = t.get(axis) if is_even(shape, from_type(trial, mesh), mesh.sizes) else B
    held = NdSbp(atoms, t.free)
    text = (
        f"{where} of shape {shape} does not divide under {t!r}; it is held {held!r} there and"
        " sliced or gathered inside"
    )
    warn("uneven-boundary", text, stacklevel=5)
    return held, Pin(t, complete=True)


def tied_outputs(
    signature: Signature,
    graph: Graph,
    out_tree: Any,
    out_wanted: list[NdSbp | None],
    boundary: list[NdSbp | None],
) -> tuple[tuple[int, int], ...]:
    """Each donated argument with the first output of equal structure and avals: they have one type
    (steady state)."""
    inner, inner_kwargs = jax.tree.unflatten(signature.tree, list(range(len(signature.avals))))
    outputs = jax.tree.unflatten(out_tree, list(range(len(graph.outputs))))
    candidates = outputs if isinstance(outputs, tuple | list) else (outputs,)
    arguments = [*inner, *inner_kwargs.values()]
    pairs: list[tuple[int, int]] = []
    used: set[int] = set()
    for group in signature.donated_args:
        argument = next((a for a in arguments if tuple(jax.tree.leaves(a)) == group), None)
        if argument is None:
            continue
        for number, candidate in enumerate(candidates):
            flat = jax.tree.leaves(candidate)
            if (
                number in used
                or jax.tree.structure(candidate) != jax.tree.structure(argument)
                or len(flat) != len(group)
            ):
                continue
            same = all(
                graph.aval(graph.outputs[o]).shape == signature.avals[i].shape
                and graph.aval(graph.outputs[o]).dtype == signature.avals[i].dtype
                for o, i in zip(flat, group, strict=True)
            )
            if same:
                used.add(number)
                pairs += [(o, i) for o, i in zip(flat, group, strict=True) if out_wanted[o] is None]
                break
    return tuple(pairs)


def partial_axes(t: NdSbp, mesh: MeshSpec) -> tuple[str, ...]:
    return tuple(a for a in mesh.names if isinstance(t.get(a), Unreduced))
