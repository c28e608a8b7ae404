"""What `sbp.jit` returns: a function that plans its calls and runs the plans."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from sbp import _jax, _jax_call
from sbp.api.arguments import Parameters
from sbp.api.cache import PlanCache
from sbp.api.call import CallSignature, JitOptions, function_name, quick_key
from sbp.api.holding import plain
from sbp.api.plan import Plan
from sbp.api.planner import Planner
from sbp.api.slips import diagnosed
from sbp.api.tracing import Traced, shapes_of, traced_call
from sbp.errors import SbpError, SbpWarning, users_stacklevel
from sbp.kinds import FUNCTION, Kind, instance_of, made_of
from sbp.machine.mesh import mesh_spec
from sbp.plan.program import Program
from sbp.pytrees import leaves_of
from sbp.report.finding import diagnostics_of
from sbp.report.report import Report

MESH = Kind(
    "a jax.sharding.Mesh, an AbstractMesh or None",
    lambda x: x is None or isinstance(x, Mesh | AbstractMesh),
)


@made_of("Jitted", fn=FUNCTION, mesh=MESH, options=instance_of(JitOptions, "sbp.jit"))
class Jitted:
    """The result of `sbp.jit`: a function with the methods `check`, `plan`, `trace`, `lower`,
    `eval_shape` and `clear_cache`.

    Arguments:
      fn: the user's function.
      mesh: the user's mesh; None for that of the context at each call.
      options: the other arguments of `sbp.jit`.

    Raises:
      SbpError: `unknown-axis`, `unknown-option` or `type-syntax` for options that do not fit the
        mesh; `bad-argument` for static and donated arguments that `jax.jit` refuses.
    """

    def __init__(
        self, fn: Callable[..., Any], mesh: Mesh | AbstractMesh | None, options: JitOptions
    ) -> None:
        functools.update_wrapper(self, fn)
        self._fn = fn
        self.options = options
        self._parameters = Parameters.of(
            fn,
            (options.static_argnums, options.static_argnames),
            (options.donate_argnums, options.donate_argnames),
        )
        self._mesh = mesh
        self._planners: dict[Mesh | AbstractMesh, Planner] = {}
        self._plans = PlanCache(self.name)
        if mesh is not None:
            mesh_spec(mesh, options.hardware)  # refuses what is no mesh, and may have no hash
            self._on(mesh)

    @property
    def name(self) -> str:
        """The function's name, for reports."""
        return function_name(self._fn)

    @property
    def mesh(self) -> Mesh | AbstractMesh:
        """The user's mesh: the argument of `sbp.jit`, or the mesh of the context.

        Raises:
          SbpError: `bad-argument` where there is none.
        """
        mesh = _jax_call.context_mesh() if self._mesh is None else self._mesh
        if mesh is None:
            raise SbpError(
                f"{self.name} has no mesh; pass mesh= to sbp.jit, or call it under"
                " jax.set_mesh(mesh)"
            )
        return mesh

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """As an attribute of an object, the function is a method."""
        return self if instance is None else JittedMethod(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the plan. The first call with new shapes, dtypes or static arguments makes it.

        Raises:
          SbpTypeError: where the program has no typing.
        """
        flat, tree = leaves_of((args, kwargs), "the arguments")
        if _jax_call.transforming() or any(isinstance(leaf, _jax.Tracer) for leaf in flat):
            warnings.warn(
                f"nested-jit: {self.name} was called inside another transformation (jit, grad,"
                " vmap or another sbp.jit) and runs as the plain function",
                SbpWarning,
                stacklevel=users_stacklevel(),
            )
            args, kwargs = plain((args, kwargs))
            return self._fn(*args, **kwargs)
        if _jax_call.jit_is_disabled():
            args, kwargs = plain((args, kwargs))
            return self._fn(*args, **kwargs)
        mesh = self.mesh
        quick = quick_key(flat, tree, mesh)
        if quick is not None:
            plan = self._plans.quick(quick)
            if plan is not None:
                return plan.run(flat)
        planner = self._on(mesh)
        signature, leaves = planner.reader.read(args, kwargs)
        key = self._plans.key_for((mesh, signature.key))
        plan = self._plan_of(planner, signature, key)
        if quick is not None and plan.holding.is_direct(leaves):
            self._plans.add_quick(quick, key)
        return plan.run(leaves)

    def trace(self, *args: Any, **kwargs: Any) -> Traced:
        """The first stage: the program as a graph, and the request that its plan is made from."""
        reader = self._on(self.mesh).reader
        return traced_call(reader, reader.read(args, kwargs)[0])

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for arguments or `jax.ShapeDtypeStruct`s.

        Raises:
          SbpTypeError: where the program has no typing; its diagnostics say why.
        """
        planner = self._on(self.mesh)
        return self._plan_of(planner, planner.reader.read(args, kwargs)[0])

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """The `jax.stages.Lowered` of the plan for arguments or `jax.ShapeDtypeStruct`s.

        Raises:
          SbpTypeError: where the program has no typing; its diagnostics say why.
        """
        return self.plan(*args, **kwargs).lower()

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Shapes, dtypes and weak types of what the function returns, as `jax.ShapeDtypeStruct`s.
        The function is traced and not planned."""
        reader = self._on(self.mesh).reader
        return shapes_of(reader, reader.read(args, kwargs)[0])

    def clear_cache(self) -> None:
        """Drops all plans, with their compiled programs."""
        self._plans.clear()

    def check(self, *args: Any, **kwargs: Any) -> Report:
        """The report on a program. Errors of sbp are in `report.diagnostics` and are not raised.

        Shapes may have symbolic sizes (`jax.export.symbolic_shape`). The program is then typed at
        one choice of sizes, and `report.sizes`, a `sbp.sizes.conditions.Decided`, says for which
        sizes that typing holds. The report on a program without a typing has no `sizes`.
        """
        mesh = None
        try:
            mesh = self.mesh
            planner = self._on(mesh)
            return planner.report(args, kwargs, functools.partial(self._plan_of, planner))
        except SbpError as error:
            if mesh is None:
                found = diagnostics_of(error)
            else:
                attempt = functools.partial(self._attempt, mesh, args, kwargs)
                found = diagnosed(error, self.options, attempt)
            return Report(program=None, diagnostics=found, title=self.name)

    def _attempt(
        self,
        mesh: Mesh | AbstractMesh,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: JitOptions,
    ) -> Program:
        """The plan of a call with other options, which nothing keeps."""
        planner = Planner(self._fn, self._parameters, mesh, options)
        return planner.plan(planner.reader.read(args, kwargs)[0]).program

    def _on(self, mesh: Mesh | AbstractMesh) -> Planner:
        planner = self._planners.get(mesh)
        if planner is None:
            planner = Planner(self._fn, self._parameters, mesh, self.options)
            self._planners[mesh] = planner
        return planner

    def _plan_of(self, planner: Planner, signature: CallSignature, key: Any = None) -> Plan:
        key = key or (planner.reader.mesh, signature.key)
        plan = self._plans.get(key)
        if plan is None:
            plan = planner.plan(signature)
            self._plans.add(key, plan)
        return plan


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

    def trace(self, *args: Any, **kwargs: Any) -> Traced:
        """See `Jitted.trace`."""
        return self.__func__.trace(self.__self__, *args, **kwargs)

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """See `Jitted.plan`."""
        return self.__func__.plan(self.__self__, *args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """See `Jitted.lower`."""
        return self.__func__.lower(self.__self__, *args, **kwargs)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """See `Jitted.eval_shape`."""
        return self.__func__.eval_shape(self.__self__, *args, **kwargs)

    def check(self, *args: Any, **kwargs: Any) -> Report:
        """See `Jitted.check`."""
        return self.__func__.check(self.__self__, *args, **kwargs)

    def clear_cache(self) -> None:
        """See `Jitted.clear_cache`."""
        self.__func__.clear_cache()
