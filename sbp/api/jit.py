"""`sbp.jit`: the public function that goes the whole way, trace -> infer -> plan -> run."""

from __future__ import annotations

import functools
import numbers
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from sbp import _jax
from sbp.annotations import Pin, annotate_p, reduce_dtype_name
from sbp.api.call import (
    CallReader,
    Options,
    Signature,
    broadcast_types,
    check_types,
    codes_of,
    even_boundary,
    partial_axes,
    quick_key,
    tied_outputs,
)
from sbp.api.symbolic import SizedCall, sized_report
from sbp.errors import Diagnostic, SbpError, SbpTypeError, SbpWarning, nearest, noting
from sbp.explain.costly import costly_annotations, memory_diagnostic
from sbp.explain.faults import explain
from sbp.explain.settings import Side
from sbp.explain.why import why
from sbp.handwritten.region import tracing_for
from sbp.infer.pins import check_monoids, resolve_pins
from sbp.infer.registered import check_registered
from sbp.infer.request import Demand, Request
from sbp.infer.rows import check_rules
from sbp.limits import POLICIES, Budget, Policy, policies_in
from sbp.machine.mesh import Hardware, mesh_spec
from sbp.plan.fit import fit
from sbp.plan.program import Cost, Program
from sbp.report.compare import Comparison, comparison
from sbp.report.finding import diagnostics_of
from sbp.report.report import Report
from sbp.report.why import Explanation, explanation
from sbp.run.execute import Executable
from sbp.run.partial import Partial
from sbp.sizes.expressions import is_symbolic, refuse_symbolic
from sbp.trace.build import trace
from sbp.trace.graph import Graph
from sbp.types import NdSbp, Unreduced


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """A traced program as a request, with the structure of what it returns.

    Arguments:
      request: the program, its annotations checked against the mesh, and what its types are chosen
        by.
      out_tree: structure of what the function returns.
      out_names: a name for each output.
      out_wanted: the type asked for each output.
    """

    request: Request
    out_tree: Any
    out_names: tuple[str, ...]
    out_wanted: tuple[NdSbp | None, ...]


Tracer = Callable[[Callable[..., Any], Sequence[Any], Sequence[str]], tuple[Graph, Any]]
"""What makes a graph of a function: `sbp.trace.build.trace`, or the same for symbolic sizes."""


class Jitted:
    """What `sbp.jit` returns: call it, or ask it for `check`, `plan`."""

    def __init__(self, fn: Callable[..., Any], mesh: Mesh | AbstractMesh, options: Options) -> None:
        functools.update_wrapper(self, fn)
        self._fn = fn
        self._mesh = mesh
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
        return getattr(self._fn, "__name__", "function")

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Signature, list[Any]]:
        """The signature of a call, and its flat arguments."""
        return self._reader.read(args, kwargs)

    @property
    def mesh(self) -> Mesh | AbstractMesh:
        """The caller's mesh."""
        return self._mesh

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
        return self._trace(self._reader.read(args, kwargs)[0])

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

    def _plan_of(self, signature: Signature) -> Plan:
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
            lambda shapes: self._wanted_outputs(shapes, jax.tree.leaves(shapes))[0],
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
            lambda at: self._trace(at).request.graph,
            limits=limits,
        )

    def _make(self, signature: Signature, tracer: Tracer | None = None) -> Plan:
        traced = self._trace(signature, tracer)
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
        return Plan(self, signature, program, traced)

    def _trace(self, signature: Signature, tracer: Tracer | None = None) -> Traced:
        spec = self._spec
        refuse_symbolic(signature.avals, self.name)
        boundary: list[NdSbp | None] = []
        inner: list[Pin | None] = []
        for want, aval, name in zip(
            signature.wanted, signature.avals, signature.names, strict=True
        ):
            check_monoids(want or NdSbp(), aval.dtype, f"input {name}")
            held, pin = even_boundary(want, aval.shape, spec, f"input {name}")
            boundary.append(held)
            inner.append(pin)

        def call(*flat: Any) -> Any:
            pinned = [
                x if p is None else annotate_p.bind(x, pin=p, cotangent=None)
                for x, p in zip(flat, inner, strict=True)
            ]
            return signature.call(*pinned)

        with tracing_for(spec):
            graph, out_shape = (tracer or trace)(call, signature.avals, signature.names)
        refuse_symbolic(graph.avals.values(), self.name)  # what fn closes over
        ids = (
            None
            if isinstance(self._mesh, AbstractMesh)
            else np.vectorize(lambda d: d.id, otypes=[int])(self._mesh.devices)
        )
        graph = resolve_pins(graph, spec, ids)
        check_rules(graph)
        check_registered(graph, spec.sizes)
        for scope in sorted({node.scope for node in graph.walk()}):
            for _, axis in policies_in(scope):
                if axis:
                    spec.size(axis)
        out_leaves, out_tree = jax.tree.flatten(out_shape)
        out_wanted, out_names = self._wanted_outputs(out_shape, out_leaves)
        tied = tied_outputs(signature, graph, out_tree, out_wanted, boundary)
        options = self.options
        request = Request(
            graph=graph,
            mesh=spec,
            demand=Demand(
                inputs=tuple(codes_of(t, spec) for t in boundary),
                outputs=tuple(codes_of(t, spec) for t in out_wanted),
                tied=tied,
            ),
            boxing=options.boxing,
            axis_policies=(
                tuple(options.axis_policies.get(name) for name in spec.names)
                if options.axis_policies
                else ()
            ),
            budgets=options.budgets,
            reduce_dtype=options.reduce_dtype,
            memory_limit=options.memory_limit,
            aliased=tuple(i for _, i in tied),
        )
        return Traced(
            request=request,
            out_tree=out_tree,
            out_names=tuple(out_names),
            out_wanted=tuple(out_wanted),
        )

    def _wanted_outputs(
        self, out_shape: Any, out_leaves: list[Any]
    ) -> tuple[list[NdSbp | None], list[str]]:
        out_types = self.options.out_types
        names = [
            jax.tree_util.keystr(path) or "result"
            for path, _ in jax.tree_util.tree_flatten_with_path(out_shape)[0]
        ]
        if out_types is None:
            return [None] * len(out_leaves), names
        wanted: list[NdSbp | None] = []
        for t, leaf, name in zip(
            broadcast_types(out_types, out_shape, "out_types", self._spec),
            out_leaves,
            names,
            strict=True,
        ):
            check_monoids(t or NdSbp(), leaf.dtype, f"output {name}")
            wanted.append(even_boundary(t, leaf.shape, self._spec, f"output {name}")[0])
        return wanted, names


class Plan:
    """A resolved plan: run it, lower it, price it, print it.

    Attributes:
      cost: `bytes_per_device`, `seconds`, `peak_memory_bytes` of one call.
      program: the instructions.
    """

    def __init__(
        self, jitted: Jitted, signature: Signature, program: Program, traced: Traced
    ) -> None:
        self._jitted = jitted
        self._signature = signature
        self.program = program
        self._traced = traced
        self._diagnostics: tuple[Diagnostic, ...] | None = None
        self.noted: tuple[Diagnostic, ...] = ()
        self._moved = False
        self._quick: tuple[Any, ...] | None = None

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
        return jax.tree.unflatten(self._traced.out_tree, self.program.output_types)

    @property
    def in_shardings(self) -> Any:
        """`NamedSharding`s of the positional arguments on the caller's mesh, to initialise and
        feed."""
        mesh = self._jitted.mesh
        flat = [NamedSharding(mesh, s.spec) for s in self._executable.in_shardings]
        return jax.tree.unflatten(self._signature.tree, flat)[0]

    @property
    def out_shardings(self) -> Any:
        """`NamedSharding`s of what the function returns, on the caller's mesh."""
        return jax.tree.unflatten(self._traced.out_tree, self._executable.out_shardings)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the plan on arguments of the signature that it was made for."""
        flat, tree = jax.tree.flatten((args, kwargs))
        quick = quick_key(flat, tree)
        if quick is not None and quick == self._quick:
            return self.run(flat)
        signature, leaves = self._jitted.read(args, kwargs)
        if signature.key[:4] != self._signature.key[:4]:
            raise SbpError(
                "the plan was made for other shapes, dtypes or static arguments; call the sbp.jit"
                " function instead"
            )
        if not any(signature.partial):
            self._quick = quick
        return self.run(leaves)

    def lower(self) -> Any:
        """The `jax.stages.Lowered` of the plan's program, for `.compile()` and its HLO; of an
        abstract mesh, for `.as_text()` alone."""
        shapes = []
        for aval, want, sharding in zip(
            self._signature.avals,
            self._signature.partial,
            self._executable.in_shardings,
            strict=True,
        ):
            leading = (
                ()
                if want is None
                else tuple(
                    n
                    for a in partial_axes(want, self.program.mesh)
                    if (n := self.program.mesh.size(a)) > 1
                )
            )
            shapes.append(
                jax.ShapeDtypeStruct((*leading, *aval.shape), aval.dtype, sharding=sharding)
            )
        return self._executable.lower(shapes)

    def report(self) -> Report:
        """The type report of the plan."""
        if self._diagnostics is None:
            boxing = self.program.request.boxing
            self._diagnostics = costly_annotations(self.program) if boxing == "auto" else ()
            self.program.request.caches.clear()
        return Report(
            program=self.program,
            diagnostics=(*self.noted, *self._diagnostics),
            title=self._jitted.name,
            output_names=self._traced.out_names,
        )

    def why(self, name: str | int) -> Explanation:
        """Why a value has its type: where that comes from, what every other type would cost, why
        its conversions are where they are.

        Each price is that of the plan of the program with the value annotated so.

        Arguments:
          name: a variable, an input such as "params['w']", an output, a line ("ffn.py:12", 12), or
              "gradient of line 12".

        Returns:
          What shows itself in the terminal and in notebooks; its `why` holds the figures.

        Raises:
          SbpError: when nothing has that name; it tells the nearest names.

        >>> mesh = jax.sharding.AbstractMesh((2,), ("data",))
        >>> f = jit(lambda x: (x * x).sum(), mesh, in_types=("data:S(0)",))
        >>> told = f.plan(jax.ShapeDtypeStruct((8,), "float32")).why("result").why
        >>> told.type, [(c.steps[0].kind, c.bytes_per_device) for c in told.conversions]
        (B, [('all_reduce', 4.0)])
        """
        found = why(self.program, name, self._traced.out_names)
        self.program.request.caches.clear()
        return explanation(found, self.program.mesh)

    def diff(self, other: Plan) -> Comparison:
        """What differs in another plan of this or a similar program: cost, types of inputs, outputs
        and values, conversions.

        Arguments:
          other: a plan under another policy, mesh, hardware or other annotations. Values are
            matched by name and by the text of their line.

        Returns:
          What shows itself in the terminal and in notebooks; its `difference` holds the figures.

        >>> mesh = jax.sharding.AbstractMesh((2,), ("data",))
        >>> x = jax.ShapeDtypeStruct((8, 8), "float32")
        >>> this, other = (jit(lambda x: x @ x, mesh, in_types=(t,)).plan(x)
        ...     for t in ("data:S(0)", "data:S(1)"))
        >>> this.diff(other).difference.settings
        (('input `x`', 'data:S(0)', 'data:S(1)'),)
        """
        if not isinstance(other, Plan):
            raise SbpError(f"plan.diff takes another plan, got {other!r}")
        return comparison(self._side, other._side)

    @property
    def _side(self) -> Side:
        return Side(
            title=self._jitted.name,
            program=self.program,
            output_names=self._traced.out_names,
            donated=tuple(self._signature.names[i] for i in self._signature.donated),
        )

    def __str__(self) -> str:
        return str(self.program)

    def __repr__(self) -> str:
        return str(self.program)

    def run(self, leaves: Sequence[Any]) -> Any:
        """Runs on flat arguments."""
        mesh = self._jitted.mesh
        if isinstance(mesh, AbstractMesh):
            raise SbpError(
                "a plan on an AbstractMesh can be lowered, not run; make a jax.sharding.Mesh over"
                " devices",
                code="abstract-mesh",
            )
        flat = [_parts(leaf, mesh) if isinstance(leaf, Partial) else leaf for leaf in leaves]
        try:
            outs = self._executable(flat)
        except ValueError as error:
            if not _is_placement_complaint(error):
                raise
            outs = self._executable(self._move(flat))
        results = []
        for out, t in zip(outs, self._traced.out_wanted, strict=True):
            results.append(
                out if t is None or not t.is_partial else Partial(_with_part_dims(out, t, mesh), t)
            )
        return jax.tree.unflatten(self._traced.out_tree, results)

    def _move(self, flat: list[Any]) -> list[Any]:
        moved, names = [], []
        for x, sharding, name in zip(
            flat, self._executable.in_shardings, self._signature.names, strict=True
        ):
            if isinstance(x, jax.Array) and not x.sharding.is_equivalent_to(sharding, x.ndim):
                if x.committed:
                    names.append(name)
                x = jax.device_put(x, sharding)
            moved.append(x)
        if names and not self._moved:
            self._moved = True
            shown = ", ".join(names[:3]) + (" .." if len(names) > 3 else "")
            warnings.warn(
                f"input-moved: {len(names)} inputs ({shown}) arrived on other devices or in another"
                " layout and were moved; put them at plan.in_shardings once",
                SbpWarning,
                stacklevel=4,
            )
        return moved


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
    if not isinstance(budgets, Sequence) or not all(isinstance(b, Budget) for b in budgets):
        raise SbpError(f"budgets is a sequence of what sbp.forbid returns; got {budgets!r}")
    if memory_limit is not None and not (
        isinstance(memory_limit, numbers.Real) and memory_limit is not True and memory_limit > 0
    ):
        raise SbpError(f"memory_limit is bytes per device, above 0; got {memory_limit!r}")
    options = Options(
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


def _part_sizes(t: NdSbp, mesh: Mesh) -> list[int]:
    return [int(mesh.shape[a]) for a in mesh.axis_names if isinstance(t.get(str(a)), Unreduced)]


def _parts(leaf: Partial, mesh: Mesh) -> Any:
    """The array the plan takes for a Partial: axes of size 1 hold one part, which is the value
    there."""
    sizes = _part_sizes(leaf.type, mesh)
    return (
        leaf.parts
        if 1 not in sizes
        else leaf.parts.reshape(*(n for n in sizes if n > 1), *leaf.parts.shape[leaf.rank :])
    )


def _with_part_dims(out: Any, t: NdSbp, mesh: Mesh) -> Any:
    sizes = _part_sizes(t, mesh)
    return out if 1 not in sizes else out.reshape(*sizes, *out.shape[sum(n > 1 for n in sizes) :])


def _is_placement_complaint(error: ValueError) -> bool:
    text = str(error)
    return "incompatible devices" in text or "sharding" in text.lower() or "committed" in text
