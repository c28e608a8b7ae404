"""`sbp.jit`: the public function that goes the whole way, trace -> infer -> plan -> run."""

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
from sbp.errors import SbpError, SbpTypeError, SbpWarning, nearest, noting
from sbp.explain.costly import memory_diagnostic
from sbp.explain.faults import explain
from sbp.limits import POLICIES, Budget, Policy
from sbp.machine.mesh import Hardware, mesh_spec
from sbp.plan.fit import fit
from sbp.report.finding import diagnostics_of
from sbp.report.report import Report
from sbp.sizes.expressions import is_symbolic


class Jitted:
    """What `sbp.jit` returns: call it, or ask it for `check`, `plan`."""

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
        """The caller's mesh."""
        return self._reader.mesh

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Infers on the first call of a signature, then runs the plan.

        Raises:
          SbpTypeError: when there is no typing under the policy.
        """
        flat, tree = jax.tree.flatten((args, kwargs))
        if any(isinstance(leaf, _jax.Tracer) for leaf in flat):
            name = getattr(self._fn, "__name__", "the function")
            warnings.warn(
                f"nested-jit: {name} was called with tracers (inside jit, grad, vmap or another"
                " sbp.jit) and runs as the plain function",
                SbpWarning,
                stacklevel=2,
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
        """The first stage alone: the program as a graph, with what is asked of it."""
        return traced_call(self._reader, self._reader.read(args, kwargs)[0])

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The resolved plan for arguments or `jax.ShapeDtypeStruct`s.

        Raises:
          SbpTypeError: when there is no typing; its diagnostics say why.
        """
        return self._plan_of(self._reader.read(args, kwargs)[0])

    def check(self, *args: Any, **kwargs: Any) -> Report:
        """A report that never raises for a type error or an annotation that is written wrongly:
        `report.ok`, `report.diagnostics`.

        Shapes may have symbolic sizes (`jax.export.symbolic_shape`). The program is then typed at
        one choice of them, and the report
        says for which sizes that typing holds: `report.sizes`, a `sbp.sizes.conditions.Decided`.
        """
        try:
            signature = self._reader.read(args, kwargs)[0]
            if is_symbolic(signature.avals):
                return self._check_sizes(SizedCall.of(signature, self._spec.num_devices))
            plan = self._plan_of(signature)
        except SbpError as error:
            return Report(program=None, diagnostics=diagnostics_of(error), title=self.name)
        return plan.report()

    # ---- the way --------------------------------------------------------------------------------

    def _plan_of(self, signature: CallSignature) -> Plan:
        if signature.key not in self._plans:
            with noting() as noted:
                plan = self._make(signature)
            plan.noted = tuple(noted)
            self._plans[signature.key] = plan
        return self._plans[signature.key]

    def _check_sizes(self, call: SizedCall) -> Report:
        """A report on symbolic sizes: the plan of one choice of them, its typing decided for
        all."""
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
        request.caches.clear()  # a plan may be kept for long
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
        "explicit" none that moves data except at annotations and at the boundary. A mapping from
        mesh axes to policies leaves the others "auto"; `sbp.policy` sets one for a region of the
        program.
      memory_limit: bytes per device; None for no limit.
      hardware: what costs are counted on; None takes the mesh's device kind.
      static_argnums, static_argnames, donate_argnums, donate_argnames: as in `jax.jit`.
      budgets: collectives that the plan may not have, from `sbp.forbid`.
      reduce_dtype: `jnp.float32` accumulates sums of 16-bit parts over devices in float32, for the
        same bytes: an all-to-all along a tensor dim, a local sum, and an all-gather. None leaves
        them to the platform, as in `jax.jit`.

    Returns:
      A function with `check` and `plan`.

    Raises:
      SbpError: for an unknown policy, axis, hardware or argument.

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
    """The policies of `boxing` by mesh axis; none when it is one policy.

    Raises:
      SbpError: for an unknown policy, or a key that is no name of an axis.
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
    """Refuses limits that are none.

    Raises:
      SbpError: for a memory limit that is no positive number, or budgets not from `sbp.forbid`.
    """
    if not isinstance(budgets, Sequence) or not all(isinstance(b, Budget) for b in budgets):
        raise SbpError(f"budgets is a sequence of what sbp.forbid returns; got {budgets!r}")
    if memory_limit is not None and not (
        isinstance(memory_limit, numbers.Real) and memory_limit is not True and memory_limit > 0
    ):
        raise SbpError(f"memory_limit is bytes per device, above 0; got {memory_limit!r}")
