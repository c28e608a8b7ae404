"""`sbp.jit`: the public function that goes the whole way, trace -> infer -> plan -> run."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from sbp import _jax
from sbp.annotate import Pin, annotate_p, as_type
from sbp.errors import Diagnostic, SbpError, SbpTypeError, SbpWarning, nearest
from sbp.infer.pins import check_axes, resolve_pins
from sbp.infer.problem import Demand
from sbp.infer.space import Policy, from_type, is_even
from sbp.mesh import Hardware, MeshSpec, mesh_spec
from sbp.plan.blame import costly_annotations, explain, memory_diagnostic
from sbp.plan.fit import fit
from sbp.plan.program import Cost, Program
from sbp.report.report import Report
from sbp.run.execute import Executable
from sbp.run.partial import Partial
from sbp.trace.build import trace
from sbp.trace.graph import Graph
from sbp.types import Atom, B, NdSbp, Split, Unreduced

_FREE = object()


def _is_type_leaf(x: Any) -> bool:
    return x is None or isinstance(x, NdSbp | str | PartitionSpec | NamedSharding | Split | Unreduced | type(B)) or (callable(x) and not isinstance(x, type))


@dataclass(frozen=True, slots=True, eq=False)
class _Signature:
    """One way of calling the function: shapes, statics, and the types asked of inputs."""

    key: Any
    tree: Any
    avals: tuple[jax.ShapeDtypeStruct, ...]
    names: tuple[str, ...]
    call: Callable[..., Any]
    wanted: tuple[NdSbp | None, ...]
    partial: tuple[NdSbp | None, ...]
    donated: tuple[int, ...]
    donated_args: tuple[tuple[int, ...], ...]


class Jitted:
    """What `sbp.jit` returns: call it, or ask it for `check`, `plan`."""

    def __init__(self, fn: Callable[..., Any], mesh: Mesh | AbstractMesh, options: dict[str, Any]) -> None:
        functools.update_wrapper(self, fn)
        self._fn = fn
        self._mesh = mesh
        self._options = options
        self._spec = mesh_spec(mesh, options["hardware"])
        self._plans: dict[Any, Plan] = {}
        self._parameters = _parameter_names(fn)

    @property
    def mesh(self) -> Mesh | AbstractMesh:
        """The caller's mesh."""
        return self._mesh

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Infers on the first call of a signature, then runs the plan.

        Raises:
          SbpTypeError: when there is no typing under the policy.
        """
        if any(isinstance(leaf, _jax.Tracer) for leaf in jax.tree.leaves((args, kwargs))):
            name = getattr(self._fn, "__name__", "the function")
            warnings.warn(
                f"nested-jit: {name} was called with tracers (inside jit, grad, vmap or another sbp.jit) and runs as the plain function",
                SbpWarning,
                stacklevel=2,
            )
            return self._fn(*args, **kwargs)
        signature, leaves = self._signature(args, kwargs)
        return self._plan_of(signature)._run(leaves)

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The resolved plan for arguments or `jax.ShapeDtypeStruct`s.

        Raises:
          SbpTypeError: when there is no typing; its diagnostics say why.
        """
        return self._plan_of(self._signature(args, kwargs)[0])

    def check(self, *args: Any, **kwargs: Any) -> Report:
        """A report that never raises for a type error: `report.ok`, `report.diagnostics`."""
        try:
            plan = self.plan(*args, **kwargs)
        except SbpTypeError as error:
            return Report(program=None, diagnostics=error.diagnostics, title=getattr(self._fn, "__name__", "function"))
        return plan.report()

    # ---- signature -----------------------------------------------------------------------------------------------------------

    def _signature(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[_Signature, list[Any]]:
        options = self._options
        static_numbers, static_names = _resolve_names(options["static_argnums"], options["static_argnames"], self._parameters, len(args))
        donate_numbers, donate_names = _resolve_names(options["donate_argnums"], options["donate_argnames"], self._parameters, len(args))
        statics = {i: args[i] for i in static_numbers if i < len(args)}
        static_kwargs = {k: v for k, v in kwargs.items() if k in static_names}
        for what in (*statics.values(), *static_kwargs.values()):
            try:
                hash(what)
            except TypeError:
                raise SbpError(f"static argument {what!r} is not hashable; make it hashable or not static") from None
        dynamic = tuple(a for i, a in enumerate(args) if i not in statics)
        dynamic_kwargs = {k: v for k, v in kwargs.items() if k not in static_kwargs}
        with_path, tree = jax.tree_util.tree_flatten_with_path((dynamic, dynamic_kwargs), is_leaf=lambda x: isinstance(x, Partial))
        leaves = [leaf for _, leaf in with_path]
        names = tuple(self._leaf_name(path, [i for i in range(len(args)) if i not in statics]) for path, _ in with_path)
        wanted = self._wanted_inputs(dynamic, with_path)
        avals, partial = [], []
        for leaf, want, name in zip(leaves, wanted, names, strict=True):
            is_partial = want is not None and want.is_partial
            if is_partial != isinstance(leaf, Partial) and not (is_partial and isinstance(leaf, jax.ShapeDtypeStruct)):
                raise SbpError(
                    f"input {name} is pinned {want!r} but is no sbp.Partial; pass a Partial, or pin it S or B"
                    if is_partial
                    else f"input {name} is an sbp.Partial but not pinned partial; pin it in in_types or call .reduce() first",
                    code="not-partial",
                )
            array = leaf
            if isinstance(leaf, Partial):
                if leaf.type != want:
                    raise SbpError(f"input {name} is pinned {want!r} but is a Partial of {leaf.type!r}", code="not-partial")
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
            if (isinstance(owner, int) and positions[owner] in donate_numbers) or owner in donate_names:
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
            tuple(sorted(statics.items())),
            tuple(sorted(static_kwargs.items())),
            tuple(wanted),
            bool(jax.config.jax_enable_x64),  # pyright: ignore[reportAttributeAccessIssue]  # a config flag made at run time
            str(jax.config.jax_default_matmul_precision),  # pyright: ignore[reportAttributeAccessIssue]
            str(jax.config.jax_numpy_dtype_promotion),  # pyright: ignore[reportAttributeAccessIssue]
        )
        signature = _Signature(
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
            head = self._parameters[position] if position < len(self._parameters) else f"args[{position}]"
        else:
            head = str(index.key)
        return head + jax.tree_util.keystr(tuple(rest))

    def _wanted_inputs(self, dynamic: tuple[Any, ...], with_path: list[Any]) -> list[NdSbp | None]:
        in_types = self._options["in_types"]
        wanted: list[NdSbp | None] = []
        if in_types is None:
            for _, leaf in with_path:
                wanted.append(_carried_type(leaf, self._mesh))
            return wanted
        if not isinstance(in_types, tuple):
            in_types = (in_types,)
        if len(in_types) != len(dynamic):
            raise SbpError(f"in_types has {len(in_types)} entries for {len(dynamic)} non-static positional arguments; give one each")
        for number, (entry, arg) in enumerate(zip(in_types, dynamic, strict=True)):
            wanted += _broadcast_types(entry, arg, f"in_types[{number}]", self._spec)
        for _, leaf in with_path[len(wanted) :]:
            wanted.append(_carried_type(leaf, self._mesh))
        return wanted

    # ---- the way -------------------------------------------------------------------------------------------------------------

    def _plan_of(self, signature: _Signature) -> Plan:
        if signature.key not in self._plans:
            self._plans[signature.key] = self._make(signature)
        return self._plans[signature.key]

    def _make(self, signature: _Signature) -> Plan:
        spec, options = self._spec, self._options
        boundary: list[NdSbp | None] = []
        inner: list[Pin | None] = []
        for want, aval, name in zip(signature.wanted, signature.avals, signature.names, strict=True):
            held, pin = _even_boundary(want, aval.shape, spec, f"input {name}")
            boundary.append(held)
            inner.append(pin)

        def call(*flat: Any) -> Any:
            pinned = [x if p is None else annotate_p.bind(x, pin=p, cotangent=None) for x, p in zip(flat, inner, strict=True)]
            return signature.call(*pinned)

        graph, out_shape = trace(call, signature.avals, signature.names)
        ids = None if isinstance(self._mesh, AbstractMesh) else np.vectorize(lambda d: d.id, otypes=[int])(self._mesh.devices)
        graph = resolve_pins(graph, spec, ids)
        out_leaves, out_tree = jax.tree.flatten(out_shape)
        out_wanted, out_names = self._wanted_outputs(out_shape, out_leaves)
        tied = _tied(signature, graph, out_tree, out_wanted, boundary)
        demand = Demand(inputs=tuple(_codes(t, spec) for t in boundary), outputs=tuple(_codes(t, spec) for t in out_wanted), tied=tied)
        aliased = tuple(i for _, i in tied)
        limit = options["memory_limit"]
        program, least = fit(graph, spec, demand, boxing=options["boxing"], memory_limit=limit, aliased=aliased)
        if program is None:
            found = explain(graph, spec, demand, options["boxing"]) if least is None else (memory_diagnostic(least, limit),)
            raise SbpTypeError(found)
        return Plan(self, signature, program, out_tree, tuple(out_names), out_wanted, demand)

    def _wanted_outputs(self, out_shape: Any, out_leaves: list[Any]) -> tuple[list[NdSbp | None], list[str]]:
        out_types = self._options["out_types"]
        names = [jax.tree_util.keystr(path) or "result" for path, _ in jax.tree_util.tree_flatten_with_path(out_shape)[0]]
        if out_types is None:
            return [None] * len(out_leaves), names
        wanted: list[NdSbp | None] = []
        for t, leaf, name in zip(_broadcast_types(out_types, out_shape, "out_types", self._spec), out_leaves, names, strict=True):
            wanted.append(_even_boundary(t, leaf.shape, self._spec, f"output {name}")[0])
        return wanted, names


class Plan:
    """A resolved plan: run it, lower it, price it, print it.

    Attributes:
      cost: `bytes_per_device`, `seconds`, `peak_memory_bytes` of one call.
      program: the instructions.
    """

    def __init__(
        self,
        jitted: Jitted,
        signature: _Signature,
        program: Program,
        out_tree: Any,
        out_names: tuple[str, ...],
        out_wanted: Sequence[NdSbp | None],
        demand: Demand,
    ) -> None:
        self._jitted = jitted
        self._signature = signature
        self.program = program
        self._out_tree = out_tree
        self._out_names = out_names
        self._out_wanted = out_wanted
        self._demand = demand
        self._diagnostics: tuple[Diagnostic, ...] | None = None
        self._moved = False

    @functools.cached_property
    def _executable(self) -> Executable:
        return Executable(self.program, self._jitted.mesh, self._signature.donated)

    @property
    def cost(self) -> Cost:
        """Bytes sent, modelled seconds and peak memory of one call."""
        return self.program.cost

    @property
    def in_types(self) -> Any:
        """The types of the arguments, as (args, kwargs) of the call."""
        return jax.tree.unflatten(self._signature.tree, self.program.input_types)

    @property
    def out_types(self) -> Any:
        """The types of what the function returns."""
        return jax.tree.unflatten(self._out_tree, self.program.output_types)

    @property
    def in_shardings(self) -> Any:
        """`NamedSharding`s of the positional arguments on the caller's mesh, to initialise and feed."""
        mesh = self._jitted.mesh
        flat = [NamedSharding(mesh, s.spec) for s in self._executable.in_shardings]
        return jax.tree.unflatten(self._signature.tree, flat)[0]

    @property
    def out_shardings(self) -> Any:
        """`NamedSharding`s of what the function returns, on the caller's mesh."""
        return jax.tree.unflatten(self._out_tree, self._executable.out_shardings)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the plan on arguments of the signature that it was made for."""
        signature, leaves = self._jitted._signature(args, kwargs)
        if signature.key[:4] != self._signature.key[:4]:
            raise SbpError("the plan was made for other shapes, dtypes or static arguments; call the sbp.jit function instead")
        return self._run(leaves)

    def lower(self) -> Any:
        """The `jax.stages.Lowered` of the plan's program, for `.compile()` and its HLO."""
        shapes = []
        for aval, want, sharding in zip(self._signature.avals, self._signature.partial, self._executable.in_shardings, strict=True):
            leading = () if want is None else tuple(n for a in _partial_axes(want, self.program.mesh) if (n := self.program.mesh.size(a)) > 1)
            shapes.append(jax.ShapeDtypeStruct((*leading, *aval.shape), aval.dtype, sharding=sharding))
        return self._executable.lower(shapes)

    def report(self) -> Report:
        """The type report of the plan."""
        if self._diagnostics is None:
            options = self._jitted._options
            self._diagnostics = (
                costly_annotations(self.program, self._demand, options["boxing"]) if options["boxing"] == "auto" else ()
            )
        return Report(
            program=self.program,
            diagnostics=self._diagnostics,
            title=getattr(self._jitted._fn, "__name__", "function"),
            output_names=self._out_names,
        )

    def __str__(self) -> str:
        return str(self.program)

    def __repr__(self) -> str:
        return str(self.program)

    def _run(self, leaves: Sequence[Any]) -> Any:
        mesh = self._jitted.mesh
        if isinstance(mesh, AbstractMesh):
            raise SbpError("a plan on an AbstractMesh can be lowered, not run; make a jax.sharding.Mesh over devices", code="abstract-mesh")
        flat = [_parts(leaf, mesh) if isinstance(leaf, Partial) else leaf for leaf in leaves]
        try:
            outs = self._executable(flat)
        except ValueError as error:
            if not _is_placement_complaint(error):
                raise
            outs = self._executable(self._move(flat))
        results = []
        for out, t in zip(outs, self._out_wanted, strict=True):
            results.append(out if t is None or not t.is_partial else Partial(_with_part_dims(out, t, mesh), t))
        return jax.tree.unflatten(self._out_tree, results)

    def _move(self, flat: list[Any]) -> list[Any]:
        moved, names = [], []
        for x, sharding, name in zip(flat, self._executable.in_shardings, self._signature.names, strict=True):
            if isinstance(x, jax.Array) and not x.sharding.is_equivalent_to(sharding, x.ndim):
                if x.committed:
                    names.append(name)
                x = jax.device_put(x, sharding)
            moved.append(x)
        if names and not self._moved:
            self._moved = True
            shown = ", ".join(names[:3]) + (" .." if len(names) > 3 else "")
            warnings.warn(
                f"input-moved: {len(names)} inputs ({shown}) arrived on other devices or in another layout and were moved; "
                "put them at plan.in_shardings once",
                SbpWarning,
                stacklevel=4,
            )
        return moved


def jit(
    fn: Callable[..., Any],
    mesh: Mesh | AbstractMesh,
    in_types: Any = None,
    out_types: Any = None,
    boxing: Policy = "auto",
    memory_limit: float | None = None,
    hardware: Hardware | str | None = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    donate_argnums: int | Sequence[int] = (),
    donate_argnames: str | Sequence[str] = (),
) -> Jitted:
    """Gives every tensor of `fn` a distributed type on `mesh` and runs it as one `shard_map` of local operations and collectives.

    Arguments:
      fn: any traceable JAX function: a forward pass, `value_and_grad`, a whole training step.
      mesh: a `jax.sharding.Mesh`, or an `AbstractMesh` to plan without devices.
      in_types: pytree prefixes of types, one per non-static positional argument; None leaves inputs free (arrays that carry a
        NamedSharding on this mesh keep it).
      out_types: a pytree prefix of types for what `fn` returns; None leaves them free.
      boxing: "auto" allows any conversion at its price, "reduce" only conversions from P, "explicit" none that moves data except
        at annotations and at the boundary.
      memory_limit: bytes per device; None for no limit.
      hardware: what costs are counted on; None takes the mesh's device kind.
      static_argnums, static_argnames, donate_argnums, donate_argnames: as in `jax.jit`.

    Returns:
      A function with `check` and `plan`.

    Raises:
      SbpError: for an unknown policy, axis, hardware or argument.

    >>> mesh = jax.sharding.AbstractMesh((2,), ("data",))
    >>> f = jit(lambda x: (x * x).sum(), mesh, in_types=("data:S(0)",))
    >>> f.plan(jax.ShapeDtypeStruct((8,), jnp.float32)).cost.bytes_per_device
    4.0
    """
    if not callable(fn):
        raise SbpError(f"sbp.jit takes a function, got {fn!r}")
    policies = get_args(Policy)
    if boxing not in policies:
        raise SbpError(f"no boxing policy {boxing!r}{nearest(str(boxing), policies)}", code="unknown-option")
    if memory_limit is not None and not memory_limit > 0:
        raise SbpError(f"memory_limit is bytes per device, above 0; got {memory_limit!r}")
    options = dict(
        in_types=in_types,
        out_types=out_types,
        boxing=boxing,
        memory_limit=memory_limit,
        hardware=hardware,
        static_argnums=static_argnums,
        static_argnames=static_argnames,
        donate_argnums=donate_argnums,
        donate_argnames=donate_argnames,
    )
    jitted = Jitted(fn, mesh, options)
    _check_types_early(in_types, jitted._spec)
    _check_types_early(out_types, jitted._spec)
    return jitted


def _check_types_early(types: Any, mesh: MeshSpec) -> None:
    for leaf in jax.tree.leaves(types, is_leaf=_is_type_leaf):
        if leaf is not None and _is_type_leaf(leaf) and not callable(leaf):
            check_axes(as_type(leaf, mesh_axes=mesh.names), mesh, "in_types and out_types")


def _parameter_names(fn: Callable[..., Any]) -> tuple[str, ...]:
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return ()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in parameters if p.kind in kinds)


def _resolve_names(numbers: Any, names: Any, parameters: tuple[str, ...], count: int) -> tuple[frozenset[int], frozenset[str]]:
    """Argument numbers and names as `jax.jit` resolves them: each names the other where the signature tells."""
    given = (numbers,) if isinstance(numbers, int) else tuple(numbers)
    called = (names,) if isinstance(names, str) else tuple(names)
    by_number = {n % count if n < 0 and count else n for n in given}
    by_number |= {parameters.index(n) for n in called if n in parameters}
    by_name = set(called) | {parameters[n] for n in by_number if n < len(parameters)}
    return frozenset(by_number), frozenset(by_name)


def _shape_of(x: Any, name: str) -> jax.ShapeDtypeStruct:
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=bool(getattr(x, "weak_type", False)))
    try:
        aval = jax.typeof(x)
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=bool(getattr(aval, "weak_type", False)))  # pyright: ignore[reportAttributeAccessIssue]
    except (TypeError, AttributeError) as error:
        raise SbpError(f"input {name} is no array: {type(x).__name__}; mark it static or pass an array") from error


def _argument_positions(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    owners: list[Any] = []
    for number, arg in enumerate(args):
        owners += [number] * len(jax.tree.leaves(arg, is_leaf=lambda x: isinstance(x, Partial)))
    for name in sorted(kwargs):
        owners += [name] * len(jax.tree.leaves(kwargs[name], is_leaf=lambda x: isinstance(x, Partial)))
    return owners


def _carried_type(leaf: Any, mesh: Mesh | AbstractMesh) -> NdSbp | None:
    """The type that an argument's own NamedSharding on this mesh's devices pins."""
    sharding = getattr(leaf, "sharding", None)
    if isinstance(leaf, Partial):
        return leaf.type
    if not isinstance(sharding, NamedSharding) or isinstance(leaf, _jax.Tracer):
        return None
    if sharding.mesh.axis_names != mesh.axis_names or tuple(sharding.mesh.axis_sizes) != tuple(mesh.axis_sizes):
        return None
    if isinstance(mesh, Mesh) and isinstance(sharding.mesh, Mesh) and not np.array_equal(sharding.mesh.devices, mesh.devices):
        return None
    return as_type(sharding, len(leaf.shape))


def _broadcast_types(entry: Any, tree: Any, where: str, mesh: MeshSpec) -> list[NdSbp | None]:
    """The type of each leaf of `tree` from a pytree prefix of types."""
    with_path, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: isinstance(x, Partial))
    numbers = jax.tree.unflatten(structure, list(range(len(with_path))))
    found: list[NdSbp | None] = [None] * len(with_path)

    def assign(t: Any, subtree: Any) -> None:
        for number in jax.tree.leaves(subtree):
            path, leaf = with_path[number]
            rank = leaf.parts.ndim - leaf.rank if isinstance(leaf, Partial) else len(np.shape(leaf))
            own = t
            if callable(t) and not isinstance(t, Unreduced | str | NdSbp | PartitionSpec | NamedSharding):
                own = t(path, leaf if isinstance(leaf, jax.ShapeDtypeStruct) else _shape_of(leaf, where))
            if own is None:
                continue
            checked = as_type(own, rank, mesh.names)
            check_axes(checked, mesh, f"{where}{jax.tree_util.keystr(path)}")
            found[number] = checked

    try:
        jax.tree.map(assign, entry, numbers, is_leaf=_is_type_leaf)
    except ValueError as error:
        raise SbpError(f"{where} is no prefix of the argument it types: {' '.join(str(error).split())[:200]}") from error
    return found


def _codes(t: NdSbp | None, mesh: MeshSpec) -> tuple[int | None, ...] | None:
    if t is None:
        return None
    return tuple(None if axis in t.free else c for axis, c in zip(mesh.names, from_type(t, mesh), strict=True))


def _even_boundary(t: NdSbp | None, shape: tuple[int, ...], mesh: MeshSpec, where: str) -> tuple[NdSbp | None, Pin | None]:
    """What JAX can hold at the boundary: dims that do not divide are B there, and are split or gathered inside."""
    if t is None or is_even(shape, from_type(t, mesh), mesh.sizes):
        return t, None
    atoms: dict[str, Atom] = {}
    for axis in mesh.names:
        trial = NdSbp({**atoms, axis: t.get(axis)})
        atoms[axis] = t.get(axis) if is_even(shape, from_type(trial, mesh), mesh.sizes) else B
    held = NdSbp(atoms | {a: B for a in ()}, t.free)
    warnings.warn(
        f"uneven-boundary: {where} of shape {shape} does not divide under {t!r}; it is held {held!r} there and "
        "sliced or gathered inside",
        SbpWarning,
        stacklevel=5,
    )
    return held, Pin(t, complete=True)


def _tied(
    signature: _Signature, graph: Graph, out_tree: Any, out_wanted: list[NdSbp | None], boundary: list[NdSbp | None]
) -> tuple[tuple[int, int], ...]:
    """Each donated argument with the first output of equal structure and avals: they have one type (steady state)."""
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
            if number in used or jax.tree.structure(candidate) != jax.tree.structure(argument) or len(flat) != len(group):
                continue
            same = all(
                graph.aval(graph.outputs[o]).shape == signature.avals[i].shape and graph.aval(graph.outputs[o]).dtype == signature.avals[i].dtype
                for o, i in zip(flat, group, strict=True)
            )
            if same:
                used.add(number)
                pairs += [(o, i) for o, i in zip(flat, group, strict=True) if out_wanted[o] is None]
                break
    return tuple(pairs)


def _partial_axes(t: NdSbp, mesh: MeshSpec) -> tuple[str, ...]:
    return tuple(a for a in mesh.names if isinstance(t.get(a), Unreduced))


def _part_sizes(t: NdSbp, mesh: Mesh) -> list[int]:
    return [int(mesh.shape[a]) for a in mesh.axis_names if isinstance(t.get(str(a)), Unreduced)]


def _parts(leaf: Partial, mesh: Mesh) -> Any:
    """The array the plan takes for a Partial: axes of size 1 hold one part, which is the value there."""
    sizes = _part_sizes(leaf.type, mesh)
    return leaf.parts if 1 not in sizes else leaf.parts.reshape(*(n for n in sizes if n > 1), *leaf.parts.shape[leaf.rank :])


def _with_part_dims(out: Any, t: NdSbp, mesh: Mesh) -> Any:
    sizes = _part_sizes(t, mesh)
    return out if 1 not in sizes else out.reshape(*sizes, *out.shape[sum(n > 1 for n in sizes) :])


def _is_placement_complaint(error: ValueError) -> bool:
    text = str(error)
    return "incompatible devices" in text or "sharding" in text.lower() or "committed" in text
