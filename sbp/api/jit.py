"""`sbp.jit`, and the function that it returns, which plans its calls and runs the plans; and
`sbp.check_shard_map`, a type checker for programs that already use `jax.shard_map`."""

import functools
import inspect
import itertools
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from sbp import _jax
from sbp.api.boundary import is_given, mesh_of, shape_of, types_of
from sbp.api.call import (
    CallReader,
    CallSignature,
    JitOptions,
    Names,
    Numbers,
    Parameters,
    function_name,
    quick_key,
)
from sbp.api.composed import composed
from sbp.api.holding import plain
from sbp.api.plan import Plan, make_plan
from sbp.api.slips import diagnose
from sbp.api.symbolic import sized_report
from sbp.api.tracing import Traced, traced_call, traced_results
from sbp.errors import (
    ArgumentError,
    SbpError,
    SbpWarning,
    nearest,
    refused,
    warn,
)
from sbp.frames import users_stacklevel
from sbp.handwritten.arguments import check_mesh, trace_program
from sbp.handwritten.check import coverage, diagnostics_of
from sbp.handwritten.one_device import compared_runs
from sbp.handwritten.region import is_tracing
from sbp.kinds import (
    AXIS,
    FLAG,
    FUNCTION,
    MESH,
    NUMBER,
    Kind,
    fits,
    instance_of,
    leaves_of,
    made_of,
    one_of,
    or_none,
    public,
    reduce_dtype_name,
    refuse_unless,
    show,
    takes,
)
from sbp.limits import BOXING, POLICIES, Budget, Policy, Remat
from sbp.machine.mesh import Hardware, mesh_spec
from sbp.plan.saved import path_of
from sbp.report.report import Report
from sbp.run.arrays import Padded, Partial
from sbp.run.execute import own_mesh
from sbp.sizes.scope import symbolic_in
from sbp.trace.graph import Graph

# ---- plans that are kept ------------------------------------------------------------------------
# `Jitted` keeps the plans of its function, by call signature.


MOST_PLANS = 256
"""Plans of one function that are kept. Beyond that number the plan that was not used for longest is
dropped, with one `many-plans` warning."""


def _serves(key: Any, plan: Plan, call: Any) -> bool:
    """Whether a call is the one that a plan was made for, except that free arguments are on the
    mesh now: their pinned types are the types that the plan chose."""
    (mesh, mine), (its_mesh, its) = key, call
    return (
        mesh == its_mesh
        and (*mine[:4], *mine[5:]) == (*its[:4], *its[5:])
        and all(
            a == b or (a[0] is None and b == (t, *a[1:]))
            for a, b, t in zip(mine[4], its[4], plan.program.input_types, strict=True)
        )
    )


# ---- jit ----------------------------------------------------------------------------------------


@made_of("Jitted", fn=FUNCTION, mesh=or_none(MESH), options=instance_of(JitOptions, "sbp.jit"))
class Jitted:
    """The result of `sbp.jit`: a function with the methods `check`, `plan`, `trace`, `lower`,
    `eval_shape` and `clear_cache`.

    Arguments:
      fn: the user's function.
      mesh: the user's mesh; None for that of the context at each call.
      options: the other arguments of `sbp.jit`.

    Attributes:
      name: the name of the function, for reports.

    Raises:
      SbpError: `unknown-axis`, `unknown-option` or `type-syntax` for options that do not fit the
        mesh.
    """

    def __init__(
        self, fn: Callable[..., Any], mesh: Mesh | AbstractMesh | None, options: JitOptions
    ) -> None:
        functools.update_wrapper(self, fn, updated=())
        self._fn, self._mesh, self.options, self.name = fn, mesh, options, function_name(fn)
        self._on: Callable[[Mesh | AbstractMesh], CallReader] = functools.cache(
            lambda mesh: CallReader(fn, mesh, options)
        )
        self._plans: dict[Any, Plan] = {}  # by the keys of call signatures
        self._quick: dict[Any, Plan] = {}  # by keys of `quick_key`
        self._composed: dict[Any, Callable[..., Any]] = {}  # by the keys of `_plans`
        self._uses, self._warned = itertools.count(), False
        if mesh is not None:
            mesh_spec(mesh, options.hardware)  # refuses what is no mesh, and may have no hash
            self._on(mesh)

    @property
    def mesh(self) -> Mesh | AbstractMesh:
        """The user's mesh: the argument of `sbp.jit`, or the mesh of the context.

        Raises:
          SbpError: `bad-argument` where there is none.
        """
        mesh = _jax.context_mesh() if self._mesh is None else self._mesh
        if mesh is None:
            raise SbpError(
                f"{self.name} has no mesh; pass mesh= to sbp.jit, or call it under"
                " jax.set_mesh(mesh)"
            )
        return mesh

    def __deepcopy__(self, memo: dict[int, Any]) -> "Jitted":
        return self  # as `jax.jit`'s functions

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """As an attribute of an object, the function is a method."""
        return self if instance is None else JittedMethod(self, instance)

    @public
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the plan. The first call with new shapes, dtypes or static arguments makes it.

        Raises:
          SbpTypeError: where the program has no typing.
        """
        flat, tree = leaves_of((args, kwargs), "the arguments")
        if getattr(jax.config, "jax_disable_jit", False):
            return self._inlined(args, kwargs)
        if _jax.transforming() or any(isinstance(x, _jax.Tracer) for x in flat):
            return self._call_composed(flat, args, kwargs)
        mesh = self.mesh
        quick = quick_key(flat, tree, mesh, self.options)
        if (plan := self._quick.get(quick)) is not None:
            plan.used = next(self._uses)
            return plan._run(flat)  # pyright: ignore[reportPrivateUsage]  # not for users
        reader = self._on(mesh)
        signature, leaves = reader.read(args, kwargs)
        key = mesh, signature.key
        if key not in self._plans:
            key = next((k for k, p in list(self._plans.items()) if _serves(k, p, key)), key)
        plan = self._plan_of(reader, signature, key)
        if (
            quick is not None
            and self._plans.get(key) is plan  # another thread may have dropped it
            and plan.holding.is_direct(leaves)
        ):
            if len(self._quick) >= MOST_PLANS:
                self._quick.clear()  # they come back with the next calls
            self._quick[quick] = plan
        return plan._run(leaves)  # pyright: ignore[reportPrivateUsage]  # not for users

    def _call_composed(
        self, flat: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A call inside a transformation."""
        if is_tracing():
            obstacle = "is called inside another sbp.jit, whose plan has it as a part"
        elif _jax.is_mapped(flat):
            obstacle = "is called inside jax.vmap or jax.shard_map"
        else:
            mesh = around = self.mesh
            context = _jax.context_mesh()
            if AxisType.Explicit in mesh.axis_types:
                mesh = own_mesh(mesh)
            elif (
                context is not None
                and AxisType.Explicit in context.axis_types
                and context.shape_tuple == mesh.shape_tuple
            ):
                around = context  # JAX traces the calls around this one on its axes
            reader = self._on(mesh)
            signature, leaves = reader.read(args, kwargs)
            key = around, signature.key
            if any(isinstance(x, Partial | Padded) for x in leaves):
                found = "takes sbp.Partial or sbp.Padded inside a transformation"
            else:
                found = self._composed.get(key) or composed(
                    Jitted,
                    reader,
                    signature,
                    functools.partial(self._plan_of, reader, signature),
                    around,
                )
            if not isinstance(found, str):
                if len(self._composed) >= MOST_PLANS:
                    self._composed.clear()  # they come back with the next calls
                self._composed[key] = found
                return found(leaves)
            obstacle = found
        warnings.warn(
            f"nested-jit: {self.name} {obstacle}, so it runs as the plain function, without a plan"
            " of its own",
            SbpWarning,
            stacklevel=users_stacklevel(),
        )
        return self._inlined(args, kwargs)

    def _inlined(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = plain((args, kwargs))
        return self._fn(*args, **kwargs)

    @public
    def trace(self, *args: Any, **kwargs: Any) -> Traced:
        """The first stage: the program as a graph, and the request that its plan is made from. It
        has the attributes of a `jax.stages.Traced`, too."""
        (numbers, names), (taken, taken_names) = (
            self.options.parameters.static,
            self.options.parameters.donated,
        )
        jitted = jax.jit(
            self,
            static_argnums=numbers,
            static_argnames=names,
            donate_argnums=taken,
            donate_argnames=taken_names,
            keep_unused=self.options.keep_unused,
            compiler_options=self.options.compiler_options,
        )
        return replace(
            traced_call(*self._read(args, kwargs)),
            staged=functools.partial(jitted.trace, *args, **kwargs),
        )

    @public
    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for arguments or `jax.ShapeDtypeStruct`s.

        Raises:
          SbpTypeError: where the program has no typing; its diagnostics say why.
        """
        return self._plan_of(*self._read(args, kwargs))

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """The `jax.stages.Lowered` of the plan for arguments or `jax.ShapeDtypeStruct`s.

        Raises:
          SbpTypeError: where the program has no typing; its diagnostics say why.
        """
        return self.plan(*args, **kwargs).lower()

    @public
    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Shapes, dtypes and weak types of what the function returns, as `jax.ShapeDtypeStruct`s.
        The function is traced and not planned."""
        results, _ = traced_results(*self._read(args, kwargs))
        return results.like([leaf.aval for leaf in results.leaves])

    def clear_cache(self) -> None:
        """Drops all plans, with their compiled programs."""
        for kept in (self._plans, self._quick, self._composed):
            kept.clear()

    @public
    def check(self, *args: Any, **kwargs: Any) -> Report:
        """The report on a program. Errors of sbp are in `report.diagnostics` and are not raised.

        Shapes may have symbolic sizes (`jax.export.symbolic_shape`). The program is then typed at
        one choice of sizes, and `report.sizes`, a `sbp.sizes.claims.Decided`, says for which
        sizes that typing holds. The report on a program without a typing has no `sizes`.
        """
        try:
            reader, signature = self._read(args, kwargs)
            if symbolic_in(signature.avals):
                return sized_report(reader, signature)
            return self._plan_of(reader, signature).report()
        except SbpError as error:
            found = diagnose(
                error,
                self.options,
                lambda options: Jitted(self._fn, self.mesh, options).plan(*args, **kwargs).program,
            )
            return Report(program=None, diagnostics=found, title=self.name)

    def _read(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[CallReader, CallSignature]:
        reader = self._on(self.mesh)
        return reader, reader.read(args, kwargs)[0]

    def _plan_of(self, reader: CallReader, signature: CallSignature, key: Any = None) -> Plan:
        key = key or (reader.mesh, signature.key)
        if (plan := self._plans.get(key)) is None:
            plan = make_plan(reader, signature)
            while len(self._plans) >= MOST_PLANS:
                self._drop_oldest()
            plan.used = next(self._uses)  # before another thread looks for the oldest
            self._plans[key] = plan
        plan.used = next(self._uses)
        return plan

    def _drop_oldest(self) -> None:
        """Drops the plan that was not used for longest."""
        plans = list(self._plans.items())  # other threads may change it
        oldest, dropped = min(plans, key=lambda item: item[1].used, default=(None, None))
        self._plans.pop(oldest, None)
        self._quick = {k: p for k, p in list(self._quick.items()) if p is not dropped}
        if not self._warned:
            self._warned = True
            warn(
                "many-plans",
                self.name,
                f"was called with more than {MOST_PLANS} signatures, so sbp drops the least"
                " recently used plan; pad shapes to fewer sizes, or pass the changing value as an"
                " array and not as a static argument",
            )


class JittedMethod:
    """An `sbp.jit` function as the method of an object, which is its first argument in calls and in
    all methods.

    Arguments:
      function: the function.
      instance: the object.
    """

    def __init__(self, function: Jitted, instance: Any) -> None:
        functools.update_wrapper(self, function, updated=())
        self.__func__, self.__self__ = function, instance

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the plan; see `Jitted.__call__`."""
        return self.__func__(self.__self__, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """A method of the function, with the object as its first argument."""
        if name.startswith("__"):  # copy and pickle ask for some before there is a function
            raise AttributeError(name)
        found = getattr(self.__func__, name)
        return (
            functools.update_wrapper(functools.partial(found, self.__self__), found)
            if name in ("check", "plan", "trace", "lower", "eval_shape")
            else found
        )

    def __dir__(self) -> Iterable[str]:
        return {*super().__dir__(), *dir(self.__func__)}

    def __eq__(self, other: object) -> bool:
        """Whether both are one function of one object, as for methods of Python."""
        if not isinstance(other, JittedMethod):
            return NotImplemented
        return self.__func__ is other.__func__ and self.__self__ is other.__self__

    def __hash__(self) -> int:
        return hash((self.__func__, id(self.__self__)))


_NO_FUNCTION: Any = object()


@takes(
    "sbp.jit",
    {  # `jax.jit` once took it
        "abstracted_axes": (
            "JAX has no such argument any more. For symbolic sizes, call `check` with shapes of"
            " jax.export.symbolic_shape"
        )
    },
    fn=Kind(
        "a function, with the mesh after it, as in sbp.jit(f, mesh), or by name, as in"
        " @sbp.jit(mesh=mesh)",
        lambda x: not MESH.accepts(x),
    ),
    mesh=or_none(MESH),
    memory_limit=Kind(
        "bytes per device, a number above 0 such as 2**30, or None",
        lambda x: x is None or (NUMBER.accepts(x) and x > 0),
    ),
    remat=one_of(get_args(Remat)),
    budgets=Kind(
        "a list of sbp.forbid(..)",
        lambda x: isinstance(x, Sequence) and all(isinstance(b, Budget) for b in x),
    ),
    keep_unused=FLAG,
    inline=FLAG,
    compiler_options=Kind(
        "a dict from names of XLA options to strings or numbers, or None",
        lambda x: (
            x is None
            or (
                isinstance(x, Mapping)
                and all(
                    isinstance(k, str) and isinstance(v, str | bool | int | float)
                    for k, v in x.items()
                )
            )
        ),
    ),
)
def jit(
    fn: Callable[..., Any] = _NO_FUNCTION,
    mesh: Mesh | AbstractMesh | None = None,
    in_types: Any = None,
    out_types: Any = None,
    boxing: Policy | Mapping[str, Policy] = "auto",
    memory_limit: float | None = None,
    hardware: Hardware | str | None = None,
    static_argnums: Numbers = None,
    static_argnames: Names = None,
    donate_argnums: Numbers = None,
    donate_argnames: Names = None,
    budgets: Sequence[Budget] = (),
    reduce_dtype: Any = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    keep_unused: bool = False,
    inline: bool = False,
    device: Any = None,
    backend: Any = None,
    compiler_options: dict[str, Any] | None = None,
    plan: str | os.PathLike[str] | None = None,
    remat: Remat = "auto",
) -> Jitted:
    """Gives every tensor of `fn` a distributed type on `mesh` and runs it as one `shard_map` of
    local operations and collectives.

    Arguments:
      fn: any traceable JAX function: a forward pass, `value_and_grad`, a whole training step.
        Without it, `sbp.jit` returns a decorator: `@sbp.jit(mesh=mesh)`.
      mesh: a `jax.sharding.Mesh`, or an `AbstractMesh` to plan without devices. None takes that of
        `in_shardings` or `out_shardings`, else that of `jax.set_mesh` at each call. Results have
        the axis types of the mesh. On the Auto axes of `sbp.make_mesh`, plain JAX code takes them.
        On the Explicit axes of `jax.make_mesh`, JAX refuses operations on them whose sharding is
        ambiguous, such as `x[tokens]`.
      in_types: pytree prefixes of types, one per non-static positional argument. An entry None
        leaves inputs free. Without `in_types`, arrays that carry a NamedSharding on this mesh keep
        it, and the others are free. An entry may also be a function of a leaf's path and shape,
        `sbp.fully_sharded(..)`, or a dict of entries by patterns of paths:
        `{"blocks/*/qkv": "model:S(1)"}`. One such dict may stand for all arguments.
      out_types: a pytree prefix of types for what `fn` returns; None leaves them free.
      boxing: "auto" allows any conversion at its price, "reduce" only conversions from P,
        "explicit" none that moves data except at annotations and at the boundary. A mapping gives
        policies of mesh axes, and "auto" to the axes that it leaves out; `sbp.policy` sets a policy
        for a region of the program.
      memory_limit: bytes per device. Up to it, the backward pass keeps what the forward pass
        gathered or reduced, where `jax.checkpoint` would send it again. None for no limit; then
        such results are kept where they are worth their memory, and loops hold less where that is
        worth its time. The report says what that costs.
      hardware: the hardware that costs are modelled for: a `Hardware`, a name of `sbp hardware`, or
        a file of `sbp calibrate`; None takes that of the mesh's devices.
      static_argnums, static_argnames, donate_argnums, donate_argnames: as in `jax.jit`. Negative
        numbers count from the last positional parameter, for donated arguments too.
      budgets: collectives that the plan may not have, from `sbp.forbid`.
      reduce_dtype: the dtype of sums over devices. `jnp.float32` accumulates 16-bit parts in
        float32, for the same bytes: an all-to-all along a tensor dim, a local sum, and an
        all-gather. `jnp.bfloat16` (or `jnp.float16`) lets a sum of float32 parts that the function
        casts to bfloat16 come after that cast, at its bytes; it adds no cast. None leaves
        sums to the platform and before casts, as `jax.jit` does.
      in_shardings, out_shardings: as in `jax.jit`, in place of `in_types` and `out_types`:
        `NamedSharding`s on the mesh, `PartitionSpec`s, or None.
      keep_unused, compiler_options: as in `jax.jit`. Inside another `jax.jit` and in `plan.export`,
        they do not count: give them to the outermost `jax.jit`.
      inline: taken and not read.
      device, backend: refused; the mesh names the devices.
      plan: the file of a plan, from `plan.save`. Calls run that plan, and are refused if it was
        not made for them. Shardings that arguments carry are no pins then: they are moved to where
        the plan takes them.
      remat: "auto" lets the backward pass recompute values of the forward pass, as `jax.checkpoint`
        does, if the fastest plan does not fit `memory_limit`. "never" leaves that to the program.

    Returns:
      A function with the methods `check`, `plan`, `trace`, `lower`, `eval_shape` and `clear_cache`.
      It keeps the plans of 256 call signatures.

    Raises:
      SbpError: `unknown-option`, `unknown-axis` or `bad-argument` for an unknown policy, axis,
        hardware or argument. Where `jax.jit` raises TypeError or ValueError, it is one too.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> mesh = jax.sharding.AbstractMesh((2,), ("data",))
    >>> f = jit(lambda x: (x * x).sum(), mesh, in_types=("data:S(0)",))
    >>> f.plan(jax.ShapeDtypeStruct((8,), jnp.float32)).cost.bytes_per_device
    4.0
    """
    if fn is _NO_FUNCTION:
        given: Any = {k: v for k, v in locals().items() if k != "fn"}
        # A decorator with options returns what takes the function.
        return functools.partial(jit, **given)  # pyright: ignore[reportReturnType]
    _check_function(fn, device, backend)
    options = JitOptions(
        axis_policies=_axis_policies(boxing),
        in_types=types_of(in_types, in_shardings, "in_shardings"),
        out_types=types_of(out_types, out_shardings, "out_shardings"),
        boxing="auto" if isinstance(boxing, Mapping) else boxing,
        budgets=tuple(budgets),
        memory_limit=None if memory_limit is None else float(memory_limit),
        hardware=hardware,
        reduce_dtype=reduce_dtype_name(reduce_dtype),
        remat=remat,
        in_option="in_shardings" if is_given(in_shardings) else "in_types",
        out_option="out_shardings" if is_given(out_shardings) else "out_types",
        keep_unused=keep_unused,
        compiler_options=None if compiler_options is None else dict(compiler_options),
        plan=None if plan is None else path_of(plan, "plan"),
        at=_jax.caller_span(),
        parameters=Parameters.of(
            fn, (static_argnums, static_argnames), (donate_argnums, donate_argnames)
        ),
    )
    return Jitted(fn, mesh_of(in_shardings, out_shardings) if mesh is None else mesh, options)


def _check_function(fn: Any, device: Any, backend: Any) -> None:
    """Checks the function, and that it has no device of its own.

    Raises:
      SbpError: `bad-argument`.
    """
    try:
        _jax.check_callable(fn)
    except TypeError as error:
        kind = "the generator " if inspect.isgeneratorfunction(fn) else ""
        raise refused(f"sbp.jit takes a function, got {kind}{show(fn)}", error) from error
    for option, value in (("device", device), ("backend", backend)):
        if value is not None:
            raise SbpError(
                f"sbp.jit takes no {option}={show(value)}: the mesh names the devices; give a mesh"
                " of the devices that you want"
            )


def _axis_policies(boxing: Any) -> dict[str, Policy]:
    """The policies of `boxing` by mesh axis; empty where it is one policy.

    Raises:
      SbpError: `unknown-option` for an unknown policy, `bad-argument` for a key that is no string.
    """
    per_axis = dict(boxing) if isinstance(boxing, Mapping) else {}
    for policy in per_axis.values() if isinstance(boxing, Mapping) else (boxing,):
        if not BOXING.accepts(policy):
            given = show(policy)
            raise ArgumentError(
                f"no boxing policy {given}{nearest(given, POLICIES)}", code="unknown-option"
            )
    refuse_unless(AXIS, "boxing", "each key", per_axis)
    return per_axis


# ---- programs with shard_map --------------------------------------------------------------------


@takes("sbp.check_shard_map", fn=FUNCTION, against=or_none(FUNCTION))
def check_shard_map(
    fn: Callable[..., Any],
    *args: Any,
    mesh: Mesh | AbstractMesh,
    against: Callable[..., Any] | None = None,
) -> Report:
    """Checks a program that uses `jax.shard_map`: missing, doubled and misplaced reductions, and
    results whose type is not the one that out_specs claim.

    For each mesh axis, the program is traced again with one device on the axis. Both programs run
    without devices, on the arguments that are arrays and on random values elsewhere. A random draw
    gives a constant, and floats become float64. Callbacks run too. A result that differs is wrong.

    sbp measures the type of each value on the axis: which of B, S(d) and P makes up the value of
    one device, times a power of the axis size. The error is at the operation after which a value
    has no type, though all its operands have one, or at the operation that gave a result another
    type than out_specs claim. A difference that no operation explains is the warning
    `differs-on-one-device`. It is a note if you may mean the difference, as where each device ranks
    its own elements.

    A number in the program may stand for the number of devices or for something else. sbp tries
    both. If such a number may explain a fault of a count, the finding is a warning that names the
    number; write `lax.axis_size` for the number of devices. A program that is too large, or that
    cannot be run without devices, gets the warning `not-analysed`.

    With `against`, a function of the same arguments that computes the right results on one device,
    sbp compares the results with the results of this function instead. A difference is an error. If
    all results are equal, sbp does not run the program with one device.

    Arguments:
      fn: any traceable function with `shard_map` in it, in jit, loops or gradients too.
      *args: its arguments: arrays, `jax.ShapeDtypeStruct`s, or pytrees of them; for a mesh of
          Explicit axes with their shardings.
      mesh: the mesh of its regions.
      against: a plain function that computes the same.

    Returns:
      A report: `ok`; `diagnostics` with the codes `missing-reduction`, `doubled-reduction`,
      `misplaced-reduction`, `wrong-reduction`, `wrong-placement`, `local-result`,
      `differs-on-one-device` and `not-analysed`; and `coverage`: the collectives with their bytes,
      and the comparison with one device of each mesh axis. A help is an edit with which fewer
      results differ from one device, with the bytes that the edited regions send.

    Raises:
      SbpError: `bad-argument` for another kind of mesh, one that is not the program's, a program
      without a `shard_map`, and arguments without the shardings that Explicit axes need;
      `unknown-axis` for an axis that the mesh lacks. Other errors that `fn` raises, unchanged.

    >>> import jax, jax.numpy as jnp
    >>> from jax.sharding import AxisType, PartitionSpec
    >>> mesh = AbstractMesh((4,), ("model",), axis_types=(AxisType.Auto,))
    >>> total = lambda x: jax.lax.pmean(x.sum(), "model")
    >>> specs = {"in_specs": PartitionSpec("model"), "out_specs": PartitionSpec()}
    >>> total = jax.shard_map(total, mesh=mesh, **specs)
    >>> report = check_shard_map(total, jax.ShapeDtypeStruct((8,), jnp.float32), mesh=mesh)
    >>> report.diagnostics[0].title
    '`jax.lax.pmean(x.sum(), "model")` averages the parts of a sum on mesh axis `model`'
    """
    spec = mesh_spec(mesh)
    fits(fn, args)
    leaves, _ = leaves_of(args, "sbp.check_shard_map")
    for i, x in enumerate(leaves):
        shape_of(x, str(i))
    check_mesh(graph := trace_program(fn, args, mesh), spec)
    plain = (
        None
        if against is None
        else _plain(against, trace_program(against, args, mesh, "`against`"), graph)
    )
    compared = compared_runs(graph, fn, lambda f: trace_program(f, args, mesh), leaves, spec)
    compared.compare_all(against=plain)
    return Report(
        program=None,
        diagnostics=diagnostics_of(compared),
        title=getattr(fn, "__name__", ""),
        coverage=coverage(compared),
    )


def _plain(fn: Callable[..., Any], graph: Graph, of: Graph) -> tuple[str, Graph]:
    """The name and the program of a plain function that a program is compared with.

    Raises:
      SbpError: `bad-argument` where its results have other shapes or dtypes.
    """
    theirs, ours = (", ".join(str(g.aval(v)) for v in g.outputs) for g in (graph, of))
    if theirs != ours:
        raise ArgumentError(f"`against` returns {theirs}; the program returns {ours}")
    return getattr(fn, "__name__", "against"), graph
