"""An `sbp.jit` function inside a transformation of JAX: `jax.jit` gets its plan, and `jax.grad` and
its relatives get plans of its derivative."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from sbp import _jax
from sbp.api.boundary import Leaves
from sbp.api.call import CallReader, CallSignature, JitOptions, Parameters
from sbp.api.plan import Plan
from sbp.api.tracing import traced_results
from sbp.errors import SbpError
from sbp.plan.program import Program
from sbp.run.arrays import spec_of
from sbp.types import NdSbp

Planner = Callable[[Callable[..., Any], Any, JitOptions], Any]
"""Function, mesh and options -> the function as `sbp.jit` gives it."""


def composed(
    planner: Planner,
    reader: CallReader,
    signature: CallSignature,
    plan: Callable[[], Plan],
    mesh: Mesh | AbstractMesh,
) -> Callable[[Sequence[Any]], Any] | str:
    """The calls with one signature, inside transformations.

    Arguments:
      planner: makes the planned functions of a derivative.
      reader: the function with its mesh and options.
      signature: the signature.
      plan: makes the plan of the calls.
      mesh: the mesh that arguments and results are on. The mesh of the reader has Auto axes.

    Returns:
      A function from flat arguments, which may be tracers, to the results. Where no plan can serve,
      the reason as words that follow the name of the function.
    """
    results, is_closed = traced_results(reader, signature)
    if not is_closed:
        return "closes over a value of the transformation around it"
    if any(x.partial or x.padded for x in (*signature.leaves, *results.leaves)):
        return "takes or returns sbp.Partial or sbp.Padded inside a transformation"
    derivative = functools.cache(
        functools.partial(_Derivative, planner, reader, signature, results)
    )

    @jax.custom_jvp
    def call(*flat: Any) -> list[Any]:
        return plan()._inlined(flat)  # pyright: ignore[reportPrivateUsage]  # users do not call it

    def push(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        moving = tuple(i for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero))
        return derivative(moving).push(primals, [tangents[i] for i in moving])

    call.defjvp(push, symbolic_zeros=True)

    def run(flat: Sequence[Any]) -> Any:
        flat = list(map(jnp.asarray, flat))
        if AxisType.Explicit not in mesh.axis_types:
            return jax.tree.unflatten(results.tree, call(*flat))
        # As `jax.sharding.auto_axes` does.
        with jax.sharding.use_abstract_mesh(reader.mesh.abstract_mesh):
            flat = [jax.sharding.reshard(x, PartitionSpec(*[None] * x.ndim)) for x in flat]
            outs = call(*flat)
        shardings = _shardings(outs, plan().program.output_types, mesh)
        return jax.tree.unflatten(results.tree, list(map(jax.sharding.reshard, outs, shardings)))

    return run


class _Derivative:
    """The derivative of a function with respect to some of its flat arguments, in planned
    functions: `forward` returns the results and the residuals; `tangents`, and one function for
    each set of results that have cotangents, continue from the residuals. The types of the
    residuals come from a plan of the forward and the backward pass together.

    Arguments:
      moving: the positions of these arguments; for the others see `composed`.
    """

    def __init__(
        self,
        planner: Planner,
        reader: CallReader,
        signature: CallSignature,
        results: Leaves,
        moving: tuple[int, ...],
    ) -> None:
        self._planner, self._reader = planner, reader
        self._call, self._moving = signature.call, moving
        self._traced: list[Any] | None = None
        self._smooth = [
            o for o, x in enumerate(results.leaves) if jnp.issubdtype(x.aval.dtype, jnp.inexact)
        ]
        """The positions of the results that have tangents."""
        self._arguments = [signature.avals[i] for i in moving]
        smooth = [results.leaves[o] for o in self._smooth]
        self._names = [*signature.names, *(f"cotangent of {leaf.name}" for leaf in smooth)]
        every, count = range(len(smooth)), len(signature.leaves)

        def joint(*args: Any) -> tuple[Any, ...]:
            outs, made = self._forward(*args[:count])
            if len(args) == count:
                return outs, made
            return outs, made, *self._transposed(every, *self._residuals(args, made), *args[count:])

        def plan_of(cotangents: Sequence[Any], gradients: int) -> Program:
            ins = [*(leaf.type for leaf in signature.leaves), *[None] * len(cotangents)]
            outs = [leaf.type for leaf in results.leaves], None, *[None] * gradients
            # Donated arguments and their gradients have the same types.
            return (
                self._planned("joint", joint, self._names[: len(ins)], ins, outs, moving)
                .plan(*signature.avals, *cotangents)
                .program
            )

        try:
            program = plan_of([leaf.aval for leaf in smooth], len(moving))
        except (ValueError, NotImplementedError) as error:
            if isinstance(error, SbpError):
                raise
            program = plan_of((), 0)  # such as a `while` loop, which has no backward pass
        self._types = program.input_types[:count]
        self._cotangent_types = program.input_types[count:] or [None] * len(smooth)
        outs, made = len(results.leaves), self._sources.count(None)
        types = program.output_types[: outs + made]
        self._held = self._residuals(self._types, types[outs:])
        asked = list(types[:outs]), list(types[outs:])
        self.forward = self._planned("forward", self._forward, signature.names, self._types, asked)
        self.tangents = self._planned(
            "tangents",
            self._pushed,
            [f"residuals[{i}]" for i in range(len(self._held))]
            + [signature.names[i] for i in moving],
            [*self._held, *(self._types[i] for i in moving)],
            None,
        )
        self._pulls: dict[tuple[int, ...], Any] = {}

    def _planned(
        self,
        name: str,
        fn: Callable[..., Any],
        arguments: Sequence[str],
        in_types: Sequence[Any],
        out_types: Any,
        donated: tuple[int, ...] = (),
    ) -> Any:
        options = replace(
            self._reader.options,
            in_types=tuple(in_types),
            out_types=out_types,
            in_option="in_types",
            out_option="out_types",
            plan=None,
            parameters=Parameters(names=tuple(arguments), static=((), ()), donated=(donated, ())),
        )
        named = _jax.named_function(
            lambda *args: fn(*args), f"{self._reader.name}_{name}", arguments
        )
        return self._planner(named, self._reader.mesh, options)

    def push(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The results, and their tangents."""
        primals = self._placed(primals, self._types)
        outs, made = self.forward(*primals)
        avals = [jax.typeof(x).to_tangent_aval() for x in outs]
        pushed = pushed_p.bind(
            *self._residuals(primals, made),
            *self._placed(tangents, [self._types[i] for i in self._moving]),
            derivative=self,
            avals=tuple(avals[o] for o in self._smooth),
        )
        given = dict(zip(self._smooth, pushed, strict=True))
        return outs, [given.get(o, SymbolicZero(aval)) for o, aval in enumerate(avals)]

    def pull(self, residuals: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        """The cotangents of the arguments, from those of the results, some of which are zeros."""
        given = tuple(k for k, ct in enumerate(cotangents) if type(ct) is not _jax.ad.Zero)
        types = [self._cotangent_types[k] for k in given]
        if given not in self._pulls:
            names = [f"residuals[{i}]" for i in range(len(self._held))]
            self._pulls[given] = self._planned(
                "cotangents",
                functools.partial(self._transposed, given),
                [*names, *(self._names[len(self._types) + k] for k in given)],
                [*self._held, *types],
                [self._types[i] for i in self._moving],
            )
        return self._pulls[given](*residuals, *self._placed([cotangents[k] for k in given], types))

    def _placed(self, arrays: Sequence[Any], types: Sequence[NdSbp | None]) -> list[Any]:
        """Arrays in the places where plans take them. So JAX knows the devices, which it does not
        look up inside the primitive below."""
        if not isinstance(self._reader.mesh, Mesh) or _jax.is_mapped(arrays):
            return list(arrays)
        return list(map(jax.device_put, arrays, _shardings(arrays, types, self._reader.mesh)))

    def split(self, args: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        """The residuals, and the other arguments."""
        count = sum(_is_residual(s) for s in self._sources)
        return args[:count], args[count:]

    def _forward(self, *flat: Any) -> tuple[list[Any], list[Any]]:
        """The results, and the residuals that are neither arguments nor constants."""

        def smooth(*moving: Any) -> tuple[list[Any], list[Any]]:
            given = dict(zip(self._moving, moving, strict=True))
            outs = jax.tree.leaves(self._call(*(given.get(i, x) for i, x in enumerate(flat))))
            return [outs[o] for o in self._smooth], outs

        values, pushforward, outs = jax.linearize(
            smooth, *(flat[i] for i in self._moving), has_aux=True
        )
        for o, value in zip(self._smooth, values, strict=True):
            outs[o] = value
        linear = jax.make_jaxpr(pushforward)(*self._arguments)
        at = {id(x): i for i, x in enumerate(flat)}
        self._linear, consts = linear.jaxpr, linear.consts
        self._sources: list[Any] = [
            at.get(id(c)) if isinstance(c, _jax.Tracer) else c for c in consts
        ]
        """For each residual: the position of an argument, a constant, or None for a value that
        `forward` returns."""
        residuals = [
            (s if _is_residual(s) else "a constant", jnp.shape(c), c.dtype)
            for s, c in zip(self._sources, consts, strict=True)
        ]
        if self._traced not in (None, residuals):
            raise SbpError(
                f"{self._reader.name} computes something else each time that it is traced. Find the"
                " value that changes between two calls, such as a counter, and pass it as an"
                " argument."
            )
        self._traced = residuals
        return outs, [c for c, s in zip(consts, self._sources, strict=True) if s is None]

    def _residuals(self, flat: Sequence[Any], made: Sequence[Any]) -> list[Any]:
        """The residuals that are not constants."""
        rest = iter(made)
        return [next(rest) if s is None else flat[s] for s in self._sources if _is_residual(s)]

    def _pushed(self, *args: Any) -> list[Any]:
        """The tangents of the results, from the residuals and the tangents of the arguments."""
        residuals, tangents = self.split(args)
        rest = iter(residuals)
        consts = [next(rest) if _is_residual(s) else s for s in self._sources]
        return _jax.eval_jaxpr(_jax.ClosedJaxpr(self._linear, consts), tangents)

    def _transposed(self, given: Sequence[int], *args: Any) -> list[Any]:
        """The cotangents of the arguments, from the residuals and the cotangents of the given
        results, by their positions among those that have tangents."""
        residuals, cotangents = self.split(args)

        def pushed(*tangents: Any) -> list[Any]:
            found = self._pushed(*residuals, *tangents)
            return [found[k] for k in given]

        return list(jax.linear_transpose(pushed, *self._arguments)(list(cotangents)))


def _shardings(
    arrays: Sequence[Any], types: Sequence[NdSbp | None], mesh: Mesh | AbstractMesh
) -> list[NamedSharding]:
    return [
        NamedSharding(mesh, spec_of(t or NdSbp(), mesh, jnp.ndim(x)))
        for x, t in zip(arrays, types, strict=True)
    ]


def _is_residual(source: Any) -> bool:
    return source is None or isinstance(source, int)


# ---- the primitive ------------------------------------------------------------------------------
# The tangents of a planned call: a linear function with a planned transpose.


def _planned(*args: Any, derivative: _Derivative, avals: Any) -> list[Any]:
    return derivative.tangents(*args)


def _jvp(primals: Any, tangents: Any, *, derivative: _Derivative, avals: Any) -> Any:
    return jax.jvp(
        derivative.tangents, tuple(primals), tuple(map(_jax.ad.instantiate_zeros, tangents))
    )


def _transpose(cts: Any, *args: Any, derivative: _Derivative, avals: Any) -> list[Any]:
    residuals, _ = derivative.split(args)
    return [*[None] * len(residuals), *derivative.pull(residuals, cts)]


def _batch(args: Any, dims: Any, *, derivative: _Derivative, avals: Any) -> Any:
    outs = jax.vmap(derivative.tangents, in_axes=dims)(*args)
    return outs, [0] * len(outs)


pushed_p = _jax.OwnPrimitive("sbp_pushed", _planned, lambda *_, derivative, avals: avals, many=True)
_jax.set_rules(pushed_p, _jvp, _transpose, _batch)
