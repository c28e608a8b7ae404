"""`sbp.jit`: the public function that traces, chooses types, plans and runs."""

from __future__ import annotations

import functools
import numbers
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from sbp import _jax
from sbp.annotations import reduce_dtype_name
from sbp.api.boundary import check_types
from sbp.api.call import CallReader, CallSignature, JitOptions, quick_key
from sbp.api.plan import Plan
from sbp.api.sized_report import sized_report
from sbp.api.symbolic import SizedCall
from sbp.api.tracing import Traced, Tracer, traced_call, wanted_outputs
from sbp.errors import SbpError, SbpTypeError, SbpWarning, nearest, noting, users_stacklevel
from sbp.explain.costly import memory_diagnostic
from sbp.explain.faults import explain
from sbp.limits import POLICIES, Budget, Policy
from sbp.machine.mesh import Hardware, mesh_spec
from sbp.plan.fit import fit
from sbp.report.finding import diagnostics_of
from sbp.report.report import Report
from sbp.sizes.expressions import is_symbolic


class Jitted:
    """The result of `sbp.jit`: a function with the methods `check`, `plan` and `trace`.

    Arguments:
      fn: the user's function.
      mesh: the user's mesh.
      options: the other arguments of `sbp.jit`.

    Raises:
      SbpError: `unknown-axis`, `unknown-option` or `type-syntax` for options that do not fit the
        mesh.
    """

    def __init__(
        self, fn: Callable[..., Any], mesh: Mesh | AbstractMesh, options: JitOptions
    ) -> None:
        functools.update_wrapper(self, fn)
        self._fn = fn
        self.options = options
        self._spec = mesh_spec(mesh, options.hardware)
        self._reader = CallReader(fn, mesh, self._spec, options)
        self._plans: dict[Any, Plan] = {}
        self._quick: dict[Any, Plan] = {}
        for axis in (
            *options.axis_policies,
            *(b.axis for b in options.budgets if b.axis is not None),
        ):
            self._spec.size(axis)
        check_types(options.in_types, self._spec)
        check_types(options.out_types, self._spec)

    @property
    def name(self) -> str:
        """The function's name, for reports."""
        return self._reader.name

    @property
    def mesh(self) -> Mesh | AbstractMesh:
        """The user's mesh."""
        return self._reader.mesh

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the plan. The first call with new shapes, dtypes or static arguments makes it.

        Raises:
          SbpTypeError: where the program has no typing.
        """
        flat, tree = jax.tree.flatten((args, kwargs))
        if any(isinstance(leaf, _jax.Tracer) for leaf in flat):
            name = getattr(self._fn, "__name__", "the function")
            warnings.warn(
                f"nested-jit: {name} was called with tracers (inside jit, grad, vmap or another"
                " sbp.jit) and runs as the plain function",
                SbpWarning,
                stacklevel=users_stacklevel(),
            )
            return self._fn(*args, **kwargs)
        quick = quick_key(flat, tree)
        if quick is not None and quick in self._quick:
            return self._quick[quick].run(flat)
        signature, leaves = self._reader.read(args, kwargs)
        plan = self._plan_of(signature)
        if quick is not None and not any(signature.partial):
            self._quick[quick] = plan
        return plan.run(leaves)

    def trace(self, *args: Any, **kwargs: Any) -> Traced:
        """The first stage: the program as a graph, and the request that its plan is made from."""
        return traced_call(self._reader, self._reader.read(args, kwargs)[0])

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for arguments or `jax.ShapeDtypeStruct`s.

        Raises:
          SbpTypeError: where the program has no typing; its diagnostics say why.
        """
        return self._plan_of(self._reader.read(args, kwargs)[0])

    def check(self, *args: Any, **kwargs: Any) -> Report:
        """The report on a program. Errors of sbp are in `report.diagnostics` and are not raised.

        Shapes may have symbolic sizes (`jax.export.symbolic_shape`). The program is then typed at
        one choice of sizes, and `report.sizes`, a `sbp.sizes.conditions.Decided`, says for which
        sizes that typing holds. The report on a program without a typing has no `sizes`.
        """
        try:
            signature = self._reader.read(args, kwargs)[0]
            if is_symbolic(signature.avals):
                return self._check_sizes(SizedCall.of(signature, self._spec.num_devices))
            plan = self._plan_of(signature)
        except SbpError as error:
            return Report(program=None, diagnostics=diagnostics_of(error), title=self.name)
        return plan.report()

    # ---- from a call to its plan ----------------------------------------------------------------

    def _plan_of(self, signature: CallSignature) -> Plan:
        if signature.key not in self._plans:
            with noting() as noted:
                plan = self._make(signature)
            plan.noted = tuple(noted)
            self._plans[signature.key] = plan
        return self._plans[signature.key]

    def _check_sizes(self, call: SizedCall) -> Report:
        """The report on a call with symbolic sizes: the plan at one choice of them, with its typing
        decided for all."""
        with noting() as noted, call.typed_here():
            plan = self._make(call.signature, call.trace)
        plan.noted = tuple(noted)
        found = call.decide(
            plan.program.typing,
            lambda shapes: wanted_outputs(self._reader, shapes)[0],
        )
        asked = {
            "memory limit": self.options.memory_limit is not None,
            "budgets": bool(self.options.budgets),
        }
        limits = tuple(name for name, given in asked.items() if given)
        return sized_report(
            plan.report(),
            found,
            call,
            self._make,
            lambda at: traced_call(self._reader, at).request.graph,
            limits=limits,
        )

    def _make(self, signature: CallSignature, tracer: Tracer | None = None) -> Plan:
        traced = traced_call(self._reader, signature, tracer)
        request, limit = traced.request, traced.request.memory_limit
        program, least = fit(request)
        if program is None:
            found = (
                explain(request)
                if least is None or limit is None
                else (memory_diagnostic(least, limit),)
            )
            raise SbpTypeError(found)
        request.caches.clear()  # the plan may live long, and does not need them
        return Plan(self._reader, signature, program, traced)


def jit(
    fn: Callable[..., Any],
    mesh: Mesh | AbstractMesh,
    in_types: Any = None,
    out_types: Any = None,
    boxing: Policy | Mapping[str, Policy] = "auto",
    memory_limit: float | None = None,
    hardware: Hardware | str | None = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    donate_argnums: int | Sequence[int] = (),
    donate_argnames: str | Sequence[str] = (),
    budgets: Sequence[Budget] = (),
    reduce_dtype: Any = None,
) -> Jitted:
    """Gives every tensor of `fn` a distributed type on `mesh` and runs it as one `shard_map` of
    local operations and collectives.

    Arguments:
      fn: any traceable JAX function: a forward pass, `value_and_grad`, a whole training step.
      mesh: a `jax.sharding.Mesh`, or an `AbstractMesh` to plan without devices.
      in_types: pytree prefixes of types, one per non-static positional argument; None leaves inputs
        free (arrays that carry a NamedSharding on this mesh keep it).
      out_types: a pytree prefix of types for what `fn` returns; None leaves them free.
      boxing: "auto" allows any conversion at its price, "reduce" only conversions from P,
        "explicit" none that moves data except at annotations and at the boundary. A mapping gives
        policies of mesh axes, and "auto" to the axes that it leaves out; `sbp.policy` sets a policy
        for a region of the program.
      memory_limit: bytes per device; None for no limit.
      hardware: the hardware that costs are modelled for; None takes that of the mesh's devices.
      static_argnums, static_argnames, donate_argnums, donate_argnames: as in `jax.jit`.
      budgets: collectives that the plan may not have, from `sbp.forbid`.
      reduce_dtype: `jnp.float32` accumulates sums of 16-bit parts over devices in float32, for the
        same bytes: an all-to-all along a tensor dim, a local sum, and an all-gather. None leaves
        these sums to the platform, as `jax.jit` does.

    Returns:
      A function with the methods `check` and `plan`.

    Raises:
      SbpError: `unknown-option`, `unknown-axis` or `bad-argument` for an unknown policy, axis,
        hardware or argument.

    >>> import jax.numpy as jnp
    >>> mesh = jax.sharding.AbstractMesh((2,), ("data",))
    >>> f = jit(lambda x: (x * x).sum(), mesh, in_types=("data:S(0)",))
    >>> f.plan(jax.ShapeDtypeStruct((8,), jnp.float32)).cost.bytes_per_device
    4.0
    """
    if not callable(fn):
        raise SbpError(f"sbp.jit takes a function, got {fn!r}")
    per_axis = _axis_policies(boxing)
    _check_limits(memory_limit, budgets)
    options = JitOptions(
        in_types=in_types,
        out_types=out_types,
        boxing="auto" if isinstance(boxing, Mapping) else boxing,
        axis_policies=per_axis,
        budgets=tuple(budgets),
        memory_limit=None if memory_limit is None else float(memory_limit),
        hardware=hardware,
        static_argnums=static_argnums,
        static_argnames=static_argnames,
        donate_argnums=donate_argnums,
        donate_argnames=donate_argnames,
        reduce_dtype=reduce_dtype_name(reduce_dtype),
    )
    return Jitted(fn, mesh, options)


def _axis_policies(boxing: Any) -> dict[str, Policy]:
    """The policies of `boxing` by mesh axis; empty where it is one policy.

    Raises:
      SbpError: `unknown-option` for an unknown policy, `bad-argument` for a key that is no string.
    """
    per_axis = dict(boxing) if isinstance(boxing, Mapping) else {}
    for policy in per_axis.values() if isinstance(boxing, Mapping) else (boxing,):
        if policy not in POLICIES:
            raise SbpError(
                f"no boxing policy {policy!r}{nearest(str(policy), POLICIES)}",
                code="unknown-option",
            )
    for axis in per_axis:
        if not isinstance(axis, str):
            raise SbpError(f"boxing maps names of mesh axes to policies; got {axis!r}")
    return per_axis


def _check_limits(memory_limit: float | None, budgets: Sequence[Budget]) -> None:
    """Checks `memory_limit` and `budgets`.

    Raises:
      SbpError: `bad-argument` for a memory limit that is no positive number, or budgets that are
        not from `sbp.forbid`.
    """
    if not isinstance(budgets, Sequence) or not all(isinstance(b, Budget) for b in budgets):
        raise SbpError(f"budgets is a sequence of what sbp.forbid returns; got {budgets!r}")
    if memory_limit is not None and not (
        isinstance(memory_limit, numbers.Real) and memory_limit is not True and memory_limit > 0
    ):
        raise SbpError(f"memory_limit is bytes per device, above 0; got {memory_limit!r}")
