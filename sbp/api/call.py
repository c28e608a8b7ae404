"""Reads a call of a function: flat arguments, static and donated arguments, and the types asked for
inputs."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from sbp.api.boundary import broadcast_types, carried_type, is_type_leaf, shape_of
from sbp.errors import SbpError
from sbp.infer.request import TypeSource
from sbp.limits import Budget, Policy
from sbp.machine.mesh import Hardware, MeshSpec
from sbp.run.partial import Partial
from sbp.trace.graph import Graph
from sbp.types import NdSbp


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JitOptions:
    """The arguments of `sbp.jit` besides the function and the mesh.

    Arguments:
      in_types, out_types, hardware: as the user gave them.
      boxing: the policy of mesh axes that `axis_policies` does not name.
      axis_policies: the policies of single mesh axes.
      budgets: collectives that no plan may have.
      memory_limit: bytes per device; None for no limit.
      static_argnums, static_argnames, donate_argnums, donate_argnames: as in `jax.jit`.
      reduce_dtype: "float32" or None.
    """

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


@dataclass(frozen=True, slots=True, eq=False)
class CallSignature:
    """Everything about a call that its plan depends on.

    Arguments:
      key: equal for calls that may share a plan.
      tree: the structure of (args, kwargs) without static arguments.
      avals: global shape and dtype of each flat argument.
      names: the user's name of each flat argument, such as `params['w']`.
      call: the function of flat arguments.
      wanted: the type asked for each flat argument; None leaves it free.
      sources: for each flat argument, what asks for its type.
      donated_args: for each donated argument the flat positions of its leaves.
    """

    key: Any
    tree: Any
    avals: tuple[jax.ShapeDtypeStruct, ...]
    names: tuple[str, ...]
    call: Callable[..., Any]
    wanted: tuple[NdSbp | None, ...]
    sources: tuple[TypeSource, ...]
    donated_args: tuple[tuple[int, ...], ...]

    @property
    def partial(self) -> tuple[NdSbp | None, ...]:
        """For each flat argument its type where that is partial, else None."""
        return tuple(t if t is not None and t.is_partial else None for t in self.wanted)

    @property
    def donated(self) -> tuple[int, ...]:
        """Flat positions of donated arguments."""
        return tuple(i for positions in self.donated_args for i in positions)


def config_key() -> tuple[Any, ...]:
    """The settings of JAX that change what a function traces to."""
    config: Any = jax.config
    return (
        config.jax_enable_x64,
        config.jax_default_matmul_precision,
        config.jax_numpy_dtype_promotion,
    )


def quick_key(leaves: Sequence[Any], tree: Any) -> tuple[Any, ...] | None:
    """A key that is cheap to compute, for calls whose flat arguments are all JAX arrays; None for
    other calls. Calls with equal keys have one plan."""
    if not all(isinstance(x, jax.Array) for x in leaves):
        return None
    return tree, tuple([x.aval for x in leaves]), tuple([x.sharding for x in leaves]), config_key()


class CallReader:
    """Reads calls of one function on one mesh.

    Arguments:
      fn: the function.
      mesh: the user's mesh.
      spec: its axes and hardware.
      options: the options of `sbp.jit`.
    """

    def __init__(
        self, fn: Callable[..., Any], mesh: Mesh | AbstractMesh, spec: MeshSpec, options: JitOptions
    ) -> None:
        self._fn = fn
        self.mesh = mesh
        self.spec = spec
        self.options = options
        self._parameters = _parameter_names(fn)

    @property
    def name(self) -> str:
        """The function's name, for reports."""
        fn = self._fn
        while isinstance(fn, functools.partial) and not hasattr(fn, "__name__"):
            fn = fn.func
        return getattr(fn, "__name__", "function")

    def read(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[CallSignature, list[Any]]:
        """The signature of a call, and its flat arguments.

        Raises:
          SbpError: `bad-argument` for an argument that is no array, a static argument that is not
            hashable, or `in_types` of another structure; `not-partial` where a `Partial` and a pin
            do not agree; and the errors of a type that does not fit.
        """
        statics, static_kwargs = self._statics(args, kwargs)
        positions = [i for i in range(len(args)) if i not in statics]
        dynamic = tuple(args[i] for i in positions)
        dynamic_kwargs = {k: v for k, v in kwargs.items() if k not in static_kwargs}
        with_path, tree = jax.tree_util.tree_flatten_with_path(
            (dynamic, dynamic_kwargs), is_leaf=lambda x: isinstance(x, Partial)
        )
        leaves = [leaf for _, leaf in with_path]
        names = tuple(self._leaf_name(path, positions) for path, _ in with_path)
        wanted, sources = self._wanted_inputs(dynamic, with_path)
        avals = tuple(map(_aval_of, leaves, wanted, names))
        fn, count = self._fn, len(args)

        def call(*flat: Any) -> Any:
            inner, inner_kwargs = jax.tree.unflatten(tree, flat)
            rest = iter(inner)
            full = [statics[i] if i in statics else next(rest) for i in range(count)]
            return fn(*full, **inner_kwargs, **static_kwargs)

        key = (
            tree,
            tuple((a.shape, a.dtype, bool(getattr(a, "weak_type", False))) for a in avals),
            # The key has their types, too: 1, 1.0 and True are equal and trace differently.
            tuple((i, type(v), v) for i, v in sorted(statics.items())),
            tuple((k, type(v), v) for k, v in sorted(static_kwargs.items())),
            wanted,
            config_key(),
        )
        owners = _argument_positions(dynamic, dynamic_kwargs)
        donated = self._donated(owners, positions, len(args))
        return CallSignature(key, tree, avals, names, call, wanted, sources, donated), leaves

    def _statics(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[dict[int, Any], dict[str, Any]]:
        """The static arguments, by position and by name."""
        numbers, called = _resolve_names(
            self.options.static_argnums,
            self.options.static_argnames,
            self._parameters,
            len(args),
        )
        statics = {i: args[i] for i in numbers if i < len(args)}
        static_kwargs = {k: v for k, v in kwargs.items() if k in called}
        for what in (*statics.values(), *static_kwargs.values()):
            try:
                hash(what)
            except TypeError:
                raise SbpError(
                    f"static argument {what!r} is not hashable; make it hashable or not static"
                ) from None
        return statics, static_kwargs

    def _donated(
        self, owners: list[Any], positions: list[int], count: int
    ) -> tuple[tuple[int, ...], ...]:
        """For each donated argument, the flat positions of its leaves.

        Arguments:
          owners: for each flat argument, the argument that it is a leaf of: a number in
            `positions`, or a name.
          positions: the positions of the positional arguments that are not static.
          count: the number of positional arguments.
        """
        numbers, names = _resolve_names(
            self.options.donate_argnums, self.options.donate_argnames, self._parameters, count
        )
        groups: dict[Any, list[int]] = {}
        for flat, owner in enumerate(owners):
            if (isinstance(owner, int) and positions[owner] in numbers) or owner in names:
                groups.setdefault(owner, []).append(flat)
        return tuple(tuple(g) for g in groups.values())

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

    def _wanted_inputs(
        self, dynamic: tuple[Any, ...], with_path: list[Any]
    ) -> tuple[tuple[NdSbp | None, ...], tuple[TypeSource, ...]]:
        """The type asked of each input, and what asks it.

        Arguments:
          dynamic: the positional arguments that are not static.
          with_path: (path, leaf) of all arguments that are not static, flat.
        """
        in_types = self.options.in_types
        wanted: list[NdSbp | None] = []
        carried = [carried_type(leaf, self.mesh) for _, leaf in with_path]
        positional = len(jax.tree.leaves(dynamic, is_leaf=lambda x: isinstance(x, Partial)))
        named: tuple[TypeSource, ...] = ("keyword argument",) * (len(carried) - positional)
        if in_types is None:
            own: tuple[TypeSource, ...] = ("argument",) * positional
            return tuple(carried), own + named
        if not isinstance(in_types, tuple):
            in_types = (in_types,) * (len(dynamic) if is_type_leaf(in_types) else 1)
        if len(in_types) != len(dynamic):
            raise SbpError(
                f"in_types has {len(in_types)} entries for {len(dynamic)} non-static positional"
                " arguments; give one each"
            )
        for number, (entry, arg) in enumerate(zip(in_types, dynamic, strict=True)):
            wanted += broadcast_types(entry, arg, f"in_types[{number}]", self.spec)
        given: tuple[TypeSource, ...] = ("in_types",) * positional
        return (*wanted, *carried[positional:]), given + named


def _aval_of(leaf: Any, want: NdSbp | None, name: str) -> jax.ShapeDtypeStruct:
    """Global shape and dtype of a flat argument.

    Arguments:
      leaf: the argument.
      want: the type asked for it.
      name: the user's name of it.

    Raises:
      SbpError: `not-partial` for a `Partial` that is not pinned to its type, or an array that is
        pinned partial.
    """
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
    if not isinstance(leaf, Partial):
        return shape_of(leaf, name)
    if leaf.type != want:
        raise SbpError(
            f"input {name} is pinned {want!r} but is a Partial of {leaf.type!r}",
            code="not-partial",
        )
    aval = shape_of(leaf.parts, name)
    return jax.ShapeDtypeStruct(aval.shape[leaf.rank :], aval.dtype)


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
    """Positions and names of arguments as `jax.jit` resolves them: a position gives the name and a
    name the position, where the function's signature has both.

    Arguments:
      numbers: `static_argnums` or `donate_argnums`.
      names: `static_argnames` or `donate_argnames`.
      parameters: names of the function's positional parameters.
      count: the number of positional arguments of the call; negative positions count from it.
    """
    given = (numbers,) if isinstance(numbers, int) else tuple(numbers)
    called = (names,) if isinstance(names, str) else tuple(names)
    by_number = {n % count if n < 0 and count else n for n in given}
    by_number |= {parameters.index(n) for n in called if n in parameters}
    by_name = set(called) | {parameters[n] for n in by_number if n < len(parameters)}
    return frozenset(by_number), frozenset(by_name)


def _argument_positions(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    owners: list[Any] = []
    for number, arg in enumerate(args):
        owners += [number] * len(jax.tree.leaves(arg, is_leaf=lambda x: isinstance(x, Partial)))
    for name in sorted(kwargs):
        owners += [name] * len(
            jax.tree.leaves(kwargs[name], is_leaf=lambda x: isinstance(x, Partial))
        )
    return owners


def tied_outputs(
    signature: CallSignature,
    graph: Graph,
    out_tree: Any,
    out_wanted: Sequence[NdSbp | None],
) -> tuple[tuple[int, int], ...]:
    """Pairs (flat output, flat input) that have one type: each donated argument is paired with the
    first result of equal structure, shapes and dtypes. So a training step returns the types that it
    takes.

    Arguments:
      signature: the call.
      graph: its program.
      out_tree: the structure of what the function returns.
      out_wanted: the type asked for each output. Outputs with a type are left out.
    """
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
