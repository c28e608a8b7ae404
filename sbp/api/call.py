"""Reads a call of a function: flat arguments, static and donated arguments, and the types asked for
inputs."""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from sbp import _jax
from sbp.api.boundary import (
    Leaf,
    Leaves,
    about_option,
    broadcast_types,
    carried_type,
    check_types,
    is_type_leaf,
    read_entry,
    shape_of,
    with_arrival,
)
from sbp.api.trees import (
    KeyPath,
    arguments_of,
    is_by_name,
    path_names,
    structure_difference,
    types_by_pattern,
)
from sbp.errors import SbpError, Span, counted, listed, refused, warn
from sbp.infer.pins import check_axes
from sbp.kinds import check_alive, paths_of, show, takes_no_such_call
from sbp.limits import Budget, Policy, Remat
from sbp.machine.mesh import Hardware, mesh_spec
from sbp.run.arrays import Padded, Partial
from sbp.types import B, NdSbp

# ---- parameters ---------------------------------------------------------------------------------
# Static and donated arguments of a function, read and checked as `jax.jit` does; donated arrays of
# a call.


Numbers = int | Sequence[int] | None
Names = str | Iterable[str] | None


def argument_positions(numbers: Sequence[int], count: int, option: str) -> frozenset[int]:
    """The positions in a call of arguments that are chosen by number.

    Arguments:
      numbers: positions. Negative ones count from the last argument of the call.
      count: the number of positional arguments of the call.
      option: where the numbers come from, for errors.

    Raises:
      SbpError: `bad-argument` for a negative number below `-count`.
    """
    for number in numbers:
        if number < -count:
            raise refused(
                f"{option} has {number}, but the call has {counted(count, 'positional argument')}",
                ValueError,
            )
    return frozenset(n % count if n < 0 else n for n in numbers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """What is known of a function's arguments before it is called.

    Arguments:
      names: names of its positional parameters; empty where Python has no signature of it.
      static: its static arguments, by number and by name. Negative numbers count from the last
        argument of a call.
      donated: its donated arguments, likewise.
    """

    names: tuple[str, ...]
    static: tuple[tuple[int, ...], tuple[str, ...]]
    donated: tuple[tuple[int, ...], tuple[str, ...]]

    @classmethod
    def of(
        cls, fn: Callable[..., Any], static: tuple[Numbers, Names], donated: tuple[Numbers, Names]
    ) -> "Parameters":
        """Reads the options of `sbp.jit` as `jax.jit` does: if you give only numbers, it derives
        the names, and if you give only names, it derives the numbers.

        Arguments:
          fn: the function.
          static: `static_argnums` and `static_argnames`.
          donated: `donate_argnums` and `donate_argnames`.

        Raises:
          SbpError: `bad-argument`, which is also a TypeError or ValueError, where `jax.jit` raises
            one: for numbers and names that the function does not have, of another kind, or that are
            static and donated.
        """
        try:
            signature = inspect.signature(fn)
        except (TypeError, ValueError):
            signature = None
        parameters = signature.parameters.values() if signature else ()
        names = tuple(
            p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        )
        open_ended = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters)
        try:
            read = _jax.argument_numbers(fn, signature, static, donated)
            if signature is not None and not open_ended:
                # A negative number then has a name, as in JAX 0.12.
                static, donated = (
                    given
                    if given[0] is None
                    else (tuple(n % len(names) for n in numbers), given[1])
                    for given, (numbers, _) in zip((static, donated), read, strict=True)
                )
                read = _jax.argument_numbers(fn, signature, static, donated)
        except (TypeError, ValueError) as error:
            kinds = (
                "static_argnums and donate_argnums take numbers of arguments, static_argnames and"
                " donate_argnames take names; got (numbers, names)"
                f" {show({'static': static, 'donate': donated})}"
            )
            raise refused(
                kinds if isinstance(error, TypeError) else sentence(error), error
            ) from error
        return cls(names=names, static=read[0], donated=read[1])


def sentence(error: Exception) -> str:
    """JAX's message on one line, without its full stop."""
    return " ".join(str(error).split()).removesuffix(".")


def refuse_taken(flat: Sequence[Any], names: Sequence[str], donated: Sequence[int]) -> None:
    """Refuses shapes, deleted arrays, and a donated array that the call passes twice. On several
    devices, JAX would end the process for such an array.

    Arguments:
      flat: the arguments.
      names: their names.
      donated: positions of the donated ones.

    Raises:
      SbpError: `bad-argument`.
    """
    first, taken = dict[int, int](), frozenset(donated)
    for i, x in enumerate(flat):
        if isinstance(x, _jax.Tracer):
            raise refused(
                f"input {names[i]} is traced by a transformation of JAX (jit, grad or vmap); pass"
                " arrays, outside of the transformation",
                TypeError,
            )
        if isinstance(x, jax.ShapeDtypeStruct):
            raise refused(
                f"input {names[i]} is a ShapeDtypeStruct; pass an array, or use plan(..), check(..)"
                " or lower(..), which take shapes",
                TypeError,
            )
        check_alive(x, f"input {names[i]}")
        same = first.setdefault(id(x), i) if taken and isinstance(x, jax.Array) else i
        if same != i and not taken.isdisjoint((same, i)):
            twice, other = (i, same) if i in taken else (same, i)
            raise refused(
                f"input {names[twice]} is donated, and is the same array as input {names[other]};"
                " pass a copy of it, or donate neither",
                ValueError,
            )


# ---- arguments that a call changes --------------------------------------------------------------
# Arguments that a function changes in place. A traced function gets a copy of each argument, so
# the caller sees only what the function returns.


_CONTAINERS = (tuple, list, dict, type(None))
"""Pytree nodes of Python itself. Functions often use a dict or list that they get as a variable of
their own, so a change of one is no sign of an error."""


Held = tuple[KeyPath, Any, dict[KeyPath, Any]]
"""A custom pytree node among the arguments before the function runs, such as a Flax module: its
path in the arguments, the node, and its leaves by their paths in the node."""


def custom_nodes(arguments: Any) -> Iterator[Held]:
    """The outermost custom nodes. A node whose leaves change each time that it is flattened is left
    out."""
    return (
        (path, node, leaves)
        for path, node in jax.tree_util.tree_leaves_with_path(arguments, is_leaf=_is_custom)
        if _is_custom(node)
        for leaves, again in [(_leaves_of(node), _leaves_of(node))]
        if leaves and again and all(again.get(p) is leaf for p, leaf in leaves.items())
    )


def warn_of_lost_state(
    held: Sequence[Held], result: Any, function: str, name_of: Callable[[KeyPath], str]
) -> None:
    """Warns of each argument that a function has changed, with values that it does not return.

    Arguments:
      held: the custom nodes among the arguments.
      result: what the function returns.
      function: its name.
      name_of: gives the user's name of a path in the arguments.
    """
    returned = {id(leaf) for leaf in jax.tree.leaves(result)} if held else set[int]()
    for path, node, before in held:
        lost = [
            (*path, *inside)
            for inside, leaf in (_leaves_of(node) or {}).items()
            if id(leaf) not in returned and before.get(inside) is not _jax.forwarded(leaf)
        ]
        if lost:
            warn(
                "lost-state",
                f"input {name_of(path)}",
                f"is changed in {function}, which does not return the new"
                f" {listed([name_of(p) for p in lost])}: your {type(node).__name__} keeps its old"
                " state, as under jax.jit; return the new state and assign it to your object",
            )


def _is_custom(x: Any) -> bool:
    # Of a frozen dataclass only a dict or list inside can change.
    frozen = getattr(getattr(type(x), "__dataclass_params__", None), "frozen", False)
    return not (frozen or isinstance(x, _CONTAINERS) or jax.tree_util.all_leaves([x]))


def _leaves_of(node: Any) -> dict[KeyPath, Any] | None:
    """The leaves of a node by path; None if JAX can no longer flatten the node."""
    try:
        return dict(jax.tree_util.tree_flatten_with_path(node)[0])
    except (TypeError, ValueError, AttributeError):
        return None


# ---- calls --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JitOptions:
    """The arguments of `sbp.jit` besides the function and the mesh.

    Arguments:
      in_types, out_types, hardware: as the user gave them.
      boxing: the policy of mesh axes that `axis_policies` does not name.
      axis_policies: the policies of single mesh axes.
      budgets: collectives that no plan may have.
      memory_limit: bytes per device; None for no limit.
      remat: whether plans may recompute values of the forward pass to fit it.
      parameters: the function's static and donated arguments.
      reduce_dtype: the name of a dtype in `REDUCE_DTYPES`, or None.
      in_option, out_option: the options that the types come from: `in_types` or `in_shardings`,
        `out_types` or `out_shardings`.
      keep_unused: whether the compiled program takes arguments that it does not read.
      compiler_options: options of XLA.
      plan: the file of the plan to run, from `plan.save`; None to plan.
      at: the user's call of `sbp.jit`.
    """

    in_types: Any
    out_types: Any
    boxing: Policy
    axis_policies: Mapping[str, Policy]
    budgets: tuple[Budget, ...]
    memory_limit: float | None
    remat: Remat
    hardware: Hardware | str | None
    parameters: Parameters
    reduce_dtype: str | None
    in_option: str
    out_option: str
    keep_unused: bool
    compiler_options: dict[str, Any] | None
    plan: str | None
    at: Span | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CallSignature(Leaves):
    """Everything about a call that its plan depends on. The structure is that of (args, kwargs)
    without static arguments.

    Arguments:
      key: equal for calls that may share a plan.
      call: the function of flat arguments.
      arguments: the names of all arguments in order. An argument that the call passes by name is
        written `x=..`.
      heads: the names of the positional arguments that are not static.
    """

    key: Any
    call: Callable[..., Any]
    arguments: tuple[str, ...]
    heads: tuple[str, ...]

    @property
    def avals(self) -> tuple[Any, ...]:
        """Global shape and dtype of each flat argument."""
        return tuple(leaf.aval for leaf in self.leaves)

    @property
    def donated(self) -> tuple[int, ...]:
        """Flat positions of donated arguments."""
        return tuple(i for i, leaf in enumerate(self.leaves) if leaf.donated)

    def check_structure(self, given: "CallSignature") -> None:
        """Checks that another call has the static arguments and the structure of this one.

        Raises:
          SbpError: `bad-argument`, with the first argument that differs.
        """
        tree, _, by_position, by_name, *_ = self.key
        static = zip(by_position + by_name, given.key[2] + given.key[3], strict=True)
        for (name, *own), (_, *other) in static:
            if own != other:
                argument = name if isinstance(name, str) else self.arguments[name]
                raise SbpError(
                    f"static argument {argument} is {show(other[1])}, but the plan was made"
                    f" for {show(own[1])}; {_INSTEAD}"
                )
        found = structure_difference(tree, given.tree, [leaf.path for leaf in self.leaves])
        if found is not None:
            raise refused(f"input {_leaf_name(found[0], self.heads)} {found[1]}", TypeError)

    def check(self, given: "CallSignature") -> None:
        """Checks that a plan for this call serves another one.

        Raises:
          SbpError: `bad-argument`, with the first argument that differs.
        """
        if given.key[:4] != self.key[:4]:
            self.check_structure(given)
        pairs = zip(self.leaves, given.leaves, self.key[1], given.key[1], strict=True)
        for own, other, mine, theirs in pairs:
            # Whether the function sees that an argument is in host memory does not matter here.
            if mine[:-1] != theirs[:-1] or own.partial != other.partial:
                raise SbpError(
                    f"input {own.name} is {other.description}, but the plan takes"
                    f" {own.description}; {_INSTEAD}"
                )


_INSTEAD = "call the sbp.jit function instead"


def quick_key(
    leaves: Sequence[Any], tree: Any, mesh: Mesh | AbstractMesh, options: JitOptions
) -> tuple[Any, ...] | None:
    """A key that is cheap to compute, for calls on a mesh whose flat arguments are all JAX arrays;
    None for other calls, and for a function with static arguments. Calls with equal keys have one
    plan."""
    if any(options.parameters.static) or not all(isinstance(x, jax.Array) for x in leaves):
        return None
    avals, shardings = tuple([x.aval for x in leaves]), tuple([x.sharding for x in leaves])
    return tree, avals, shardings, mesh, _jax.trace_key(mesh)


def function_name(fn: Callable[..., Any]) -> str:
    """The name of a function, or of the function inside a `functools.partial`."""
    while isinstance(fn, functools.partial) and not hasattr(fn, "__name__"):
        fn = fn.func
    return getattr(fn, "__name__", "function")


class CallReader:
    """Reads calls of one function on one mesh.

    Arguments:
      fn: the function.
      mesh: the user's mesh.
      options: the options of `sbp.jit`.

    Attributes:
      name: the name of the function, for reports.
      spec: the axes and the hardware of the mesh.

    Raises:
      SbpError: `unknown-axis`, `unknown-option` or `type-syntax` for options that do not fit the
        mesh.
    """

    def __init__(
        self, fn: Callable[..., Any], mesh: Mesh | AbstractMesh, options: JitOptions
    ) -> None:
        self.fn, self.mesh, self.options = fn, mesh, options
        self.name, self.spec = function_name(fn), mesh_spec(mesh, options.hardware)
        budgets = [b.axis for b in options.budgets if b.axis is not None]
        check_axes(NdSbp(dict.fromkeys(options.axis_policies, B)), self.spec, "boxing")
        check_axes(NdSbp(dict.fromkeys(budgets, B)), self.spec, "budgets")
        for option, types in (
            (options.in_option, options.in_types),
            (options.out_option, options.out_types),
        ):
            with about_option(option, options.at):
                check_types(types, self.spec, mesh, option)

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
        dynamic_kwargs = {k: v for k, v in kwargs.items() if k not in static_kwargs}
        with_path, tree = paths_of(
            (tuple(args[i] for i in positions), dynamic_kwargs),
            "the arguments",
            lambda x: isinstance(x, Partial | Padded),
        )
        heads = tuple(map(self._argument_name, positions))
        carried = [self._leaf(path, _leaf_name(path, heads), x) for path, x in with_path]
        with about_option(self.options.in_option):
            typed = self._with_types(heads, tree, carried)
        donated = self._donated(positions, len(args))
        arrays = [x for _, x in with_path]
        leaves = tuple(
            replace(with_arrival(leaf, x, self.mesh), donated=leaf.path[:2] in donated)
            for leaf, x in zip(typed, arrays, strict=True)
        )
        fn, name, count = self.fn, self.name, len(args)

        def call(*flat: Any) -> Any:
            inner, inner_kwargs = jax.tree.unflatten(tree, flat)
            held, rest = list(custom_nodes((inner, inner_kwargs))), iter(inner)
            full = [statics[i] if i in statics else next(rest) for i in range(count)]
            try:
                result = fn(*full, **inner_kwargs, **static_kwargs)
            except TypeError as error:
                if takes_no_such_call(error):
                    raise refused(f"{name} was called wrongly: {error}", error) from error
                raise
            except AttributeError as error:
                if error.name in ("full", "reduce") and isinstance(error.obj, _jax.Tracer):
                    raise SbpError(
                        f"sbp.jit gives the array itself to {name}; leave out .{error.name}()"
                    ).at(_jax.raising_span(error)) from error
                raise
            warn_of_lost_state(held, result, name, lambda p: _leaf_name(p, heads))
            return result

        key = (
            tree,
            tuple(
                (x.aval.shape, x.aval.dtype, x.aval.weak_type, x.memory, x.in_host) for x in leaves
            ),
            # With their types, too: 1, 1.0 and True are equal and trace differently.
            *(
                tuple((k, type(v), v) for k, v in sorted(static.items()))
                for static in (statics, static_kwargs)
            ),
            tuple(leaf.demand for leaf in leaves),
            _jax.trace_key(self.mesh),
        )
        return (
            CallSignature(
                key=key,
                tree=tree,
                leaves=leaves,
                call=call,
                arguments=self.arguments(args, kwargs),
                heads=heads,
            ),
            arrays,
        )

    def arguments(self, args: Sequence[Any], kwargs: Iterable[str]) -> tuple[str, ...]:
        """The names of the arguments of a call, as `CallSignature` has them."""
        return (*map(self._argument_name, range(len(args))), *(f"{k}=.." for k in sorted(kwargs)))

    def _leaf(self, path: KeyPath, name: str, x: Any) -> Leaf:
        """An argument with the type that it already has when it arrives."""
        # The inputs of a saved plan lie where that plan says.
        is_pin = self.options.plan is None or isinstance(x, Partial)
        return Leaf(
            path=path,
            name=name,
            aval=shape_of(x, name),
            type=carried_type(x, self.mesh) if is_pin else None,
            source="keyword argument" if path[0].idx else "argument",
            struct=x if isinstance(x, jax.ShapeDtypeStruct) else None,
        )

    def _statics(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[dict[int, Any], dict[str, Any]]:
        """The static arguments, by position and by name."""
        given, names = self.options.parameters.static
        numbers = argument_positions(given, len(args), "static_argnums")
        statics = {i: args[i] for i in sorted(numbers) if i < len(args)}
        static_kwargs = {k: v for k, v in kwargs.items() if k in names}
        named = {self._argument_name(i): value for i, value in statics.items()} | static_kwargs
        for name, value in named.items():
            try:
                hash(value)
            except TypeError as error:
                raise refused(
                    f"static argument {name} is {show(value)}, which is not hashable ({error});"
                    f" pass a hashable value, or do not make {name} static",
                    ValueError,
                ) from error
        return statics, static_kwargs

    def _donated(self, positions: list[int], count: int) -> set[KeyPath]:
        """The paths of donated arguments in the structure (args, kwargs).

        Arguments:
          positions: the positions of the positional arguments that are not static.
          count: the number of positional arguments.
        """
        (given, names), key = self.options.parameters.donated, jax.tree_util.SequenceKey
        numbers = argument_positions(given, count, "donate_argnums")
        return {(key(0), key(i)) for i, p in enumerate(positions) if p in numbers} | {
            (key(1), jax.tree_util.DictKey(name)) for name in names
        }

    def _argument_name(self, position: int) -> str:
        """The user's name of a positional argument."""
        names = self.options.parameters.names
        return names[position] if position < len(names) else f"args[{position}]"

    def _with_types(
        self, heads: Sequence[str], tree: Any, leaves: Sequence[Leaf]
    ) -> Sequence[Leaf]:
        """The arguments with the types of `in_types`.

        Arguments:
          heads: the names of the positional arguments that are not static.
          tree: the structure of all arguments that are not static.
          leaves: its leaves, with the types that the arrays have already.
        """
        in_types, option = self.options.in_types, self.options.in_option
        arguments = arguments_of(tree)[: len(heads)]
        positional = sum(len(at) for _, at in arguments)
        if option == "in_shardings" and positional < len(leaves):
            raise refused(
                "in_shardings names positional arguments; pass no keyword arguments with it",
                ValueError,
            )
        if in_types is None:
            return leaves
        only, keywords = arguments[0][0] if len(heads) == 1 else None, tree.children()[1]
        if is_by_name(in_types, only, [*heads, *keywords.node_data()[1]]):
            return self._by_pattern(heads, leaves)
        if isinstance(in_types, list) and len(heads) > 1:
            in_types = tuple(in_types)
        if not isinstance(in_types, tuple):
            in_types = (in_types,) * (len(heads) if is_type_leaf(in_types) else 1)
        if len(in_types) != len(heads):
            raise refused(
                f"{option} has {len(in_types)} {'entry' if len(in_types) == 1 else 'entries'} for"
                f" {counted(len(heads), 'non-static positional argument')} ({', '.join(heads)});"
                " give one entry for each argument that the call passes by position, or a dict by"
                " argument name",
                ValueError,
            )
        found = (
            broadcast_types(
                entry,
                argument,
                leaves[at.start : at.stop],
                (f"{option}[{number}]", heads[number]),
                self.spec,
                skip=2,
            )
            for number, (entry, (argument, at)) in enumerate(zip(in_types, arguments, strict=True))
        )
        return [*(leaf for own in found for leaf in own), *leaves[positional:]]

    def _by_pattern(self, heads: Sequence[str], leaves: Sequence[Leaf]) -> list[Leaf]:
        """Arguments where `in_types` is one dict of patterns for all of them. A path goes with and
        without the name of its argument. A keyword argument that no pattern names stays as it
        is."""
        owners = [_owner(leaf.path, heads) for leaf in leaves]
        ways = [
            [(owner, *path_names(leaf.path[2:])), path_names(leaf.path[2:])]
            for owner, leaf in zip(owners, leaves, strict=True)
        ]
        entries = types_by_pattern(self.options.in_types, ways, "in_types")
        return [
            leaf
            if t is None and leaf.path[0].idx
            else read_entry(t, leaf, ("in_types", owner), self.spec, skip=2)
            for t, owner, leaf in zip(entries, owners, leaves, strict=True)
        ]


def _owner(path: KeyPath, heads: Sequence[str]) -> str:
    """The name of the argument that a leaf is in."""
    where, which, *_ = path
    return str(which.key if where.idx else heads[which.idx])


def _leaf_name(path: KeyPath, heads: Sequence[str]) -> str:
    """The user's name of a leaf at a path in the structure (args, kwargs)."""
    return f"{_owner(path, heads)}{jax.tree_util.keystr(path[2:])}"
