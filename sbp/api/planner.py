"""From a call to its plan, on one mesh."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from sbp.api.arguments import Parameters
from sbp.api.boundary import about_option, check_types
from sbp.api.call import CallReader, CallSignature, JitOptions
from sbp.api.equal_sizes import equal_sizes
from sbp.api.plan import Plan
from sbp.api.planfile import load_program
from sbp.api.results import asked_outputs
from sbp.api.shardings import check_meshes
from sbp.api.sized_report import sized_report
from sbp.api.symbolic import SizedCall, UnequalElements
from sbp.api.tracing import Tracer, traced_call
from sbp.errors import SbpError, SbpTypeError, noting
from sbp.explain.faults import explain
from sbp.explain.memory import memory_diagnostic
from sbp.machine.mesh import mesh_spec
from sbp.plan.fit import fit
from sbp.plan.program import Program
from sbp.report.report import Report
from sbp.sizes.expressions import is_symbolic


class Planner:
    """Plans calls of one function on one mesh.

    Arguments:
      fn: the user's function.
      parameters: its static and donated arguments.
      mesh: the user's mesh.
      options: the other arguments of `sbp.jit`.

    Raises:
      SbpError: `unknown-axis`, `unknown-option` or `type-syntax` for options that do not fit the
        mesh.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        parameters: Parameters,
        mesh: Mesh | AbstractMesh,
        options: JitOptions,
    ) -> None:
        self.options = options
        self.spec = mesh_spec(mesh, options.hardware)
        self.reader = CallReader(fn, parameters, mesh, self.spec, options)
        for axis in (
            *options.axis_policies,
            *(b.axis for b in options.budgets if b.axis is not None),
        ):
            self.spec.size(axis)
        given = (options.in_option, options.in_types), (options.out_option, options.out_types)
        for option, types in given:
            if option.endswith("shardings"):
                check_meshes(types, mesh, option)
            with about_option(option, options.at):
                check_types(types, self.spec, option)

    def plan(self, signature: CallSignature) -> Plan:
        """The plan for a call, with the warnings that were given on the way.

        Raises:
          SbpTypeError: where the program has no typing; its diagnostics say why.
        """
        with noting() as noted:
            plan = self._make(signature)
        plan.noted = tuple(noted)
        return plan

    def report(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        plan_of: Callable[[CallSignature], Plan],
    ) -> Report:
        """The report on a call.

        Arguments:
          args, kwargs: the arguments, which may have symbolic sizes.
          plan_of: the plan for a signature, from the cache.

        Raises:
          SbpError: where there is no plan.
        """
        signature = self.reader.read(args, kwargs)[0]
        if is_symbolic(signature.avals):
            call = self._sized_call(signature)
            try:
                return self._check_sizes(call)
            except SbpError:
                raise
            except (TypeError, ValueError) as error:
                found = equal_sizes(error, call, self._program_at)
                if found is None:
                    raise
                raise SbpTypeError((found,)) from error
        return plan_of(signature).report()

    def _sized_call(self, signature: CallSignature) -> SizedCall:
        return SizedCall.of(signature, self.spec.num_devices, self.options.at)

    def _program_at(self, signature: CallSignature) -> Program | None:
        """The program of a call with symbolic sizes; None where its report has errors."""
        report = self._check_sizes(self._sized_call(signature))
        return report.program if report.ok else None

    def _check_sizes(self, call: SizedCall) -> Report:
        """The report on a call with symbolic sizes: the plan at one choice of them, with its typing
        decided for all."""
        try:
            plan = self._sized(call)
        except UnequalElements:
            call = call.at_equal_elements(self.spec.num_devices)
            plan = self._sized(call)
        found = call.decide(
            plan.program.typing,
            lambda shapes: asked_outputs(
                self.reader, dataclasses.replace(plan.results, shapes=tuple(shapes))
            )[0],
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
            lambda at: traced_call(self.reader, at).request.graph,
            limits=limits,
        )

    def _sized(self, call: SizedCall) -> Plan:
        """The plan at the chosen sizes of a call, with the warnings that were given on the way."""
        with noting() as noted, call.typed_here():
            plan = self._make(call.signature, call.trace)
        plan.noted = tuple(noted)
        return plan

    def _make(self, signature: CallSignature, tracer: Tracer | None = None) -> Plan:
        traced = traced_call(self.reader, signature, tracer)
        request, limit = traced.request, traced.request.memory_limit
        if self.options.plan is not None:
            program = load_program(self.options.plan, request)
            request.caches.clear()
            return Plan(self.reader, signature, program, traced)
        program, least = fit(request)
        if program is None:
            found = (
                explain(request)
                if least is None or limit is None
                else (memory_diagnostic(least, limit),)
            )
            raise SbpTypeError(found)
        request.caches.clear()  # the plan may live long, and does not need them
        return Plan(self.reader, signature, program, traced)
