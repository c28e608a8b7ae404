"""Program -> one `jax.jit(jax.shard_map(..))` with shardings at the boundary."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental.layout import Format
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from sbp import _jax, _jax_call
from sbp.infer.space import Codes
from sbp.plan.program import Program
from sbp.run.boxing import without_padding
from sbp.run.interpret import Interpreter
from sbp.run.specs import named_sharding, partition_spec, place_array


def own_mesh(mesh: Mesh | AbstractMesh) -> Mesh | AbstractMesh:
    """A copy of the user's mesh with Auto axes. Over Explicit axes `shard_map` refuses arguments
    whose own shardings are not its specs."""
    if isinstance(mesh, AbstractMesh):
        return AbstractMesh(
            mesh.axis_sizes, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names)
        )
    return Mesh(mesh.devices, mesh.axis_names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiling:
    """How JAX compiles a plan.

    Arguments:
      name: the name of the program in HLO and in profiles, behind `jit_`.
      donated: flat positions of donated arguments.
      keep_unused: whether arguments that the program does not read are passed to it.
      compiler_options: options of XLA; None for its own.
    """

    name: str
    donated: tuple[int, ...] = ()
    keep_unused: bool = False
    compiler_options: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """How arguments and results lie, besides their types.

    Arguments:
      in_kinds: for each argument JAX's name of its memory; None for the device's own.
      out_kinds: the same for each result.
      out_specs: for each result the user's words for its sharding; None where there are none.
    """

    in_kinds: tuple[str | None, ...]
    out_kinds: tuple[str | None, ...]
    out_specs: tuple[PartitionSpec | None, ...]


class Executable:
    """A plan ready to run.

    Arguments:
      program: the plan.
      mesh: the user's mesh; outputs live on it.
      compiling: how JAX compiles it.
      boundary: how arguments and results lie.
    """

    def __init__(
        self,
        program: Program,
        mesh: Mesh | AbstractMesh,
        compiling: Compiling,
        boundary: Boundary,
    ) -> None:
        self.program = program
        self.mesh = mesh
        self.compiling = compiling
        self.inner = own_mesh(mesh)
        graph, spec = program.graph, program.mesh
        in_specs = tuple(
            partition_spec(r.codes, spec, len(graph.avals[v].shape))
            for r, v in zip(program.block.inputs, graph.inputs, strict=True)
        )
        out_specs = tuple(
            partition_spec(c, spec, len(graph.aval(o).shape))
            for c, o in zip(program.typing.outputs, graph.outputs, strict=True)
        )
        self.in_shardings = tuple(
            NamedSharding(self.inner, s, memory_kind=kind)
            for s, kind in zip(in_specs, boundary.in_kinds, strict=True)
        )
        returned = [
            (s if own is None else own, kind)
            for s, own, kind in zip(out_specs, boundary.out_specs, boundary.out_kinds, strict=True)
        ]
        self.out_shardings = tuple(NamedSharding(mesh, s, memory_kind=k) for s, k in returned)
        # A host callback is lowered with the mesh of the body, and JAX wants one mesh in a program.
        # So the results move to the user's mesh after the program.
        self._rehome = any(node.op.endswith("_callback") for node in graph.walk())
        leaving = (
            tuple(NamedSharding(self.inner, s, memory_kind=k) for s, k in returned)
            if self._rehome
            else self.out_shardings
        )
        self.jitted = jax.jit(
            self._whole(compiling.name, in_specs, out_specs),
            in_shardings=self.in_shardings,
            out_shardings=leaving,
            donate_argnums=compiling.donated,
            keep_unused=compiling.keep_unused,
            compiler_options=compiling.compiler_options,
        )
        self._compiled: Any = None
        dtypes = [graph.avals[v].dtype for v in graph.inputs]
        self._keys = [i for i, dtype in enumerate(dtypes) if _jax.is_extended(dtype)]
        # Simulated CPU devices below JAX 0.12 abort when more than two executions are in flight on
        # few cores.
        self._in_flight: deque[Any] | None = deque() if is_simulated(mesh) else None

    def _whole(
        self, name: str, in_specs: Sequence[PartitionSpec], out_specs: tuple[PartitionSpec, ...]
    ) -> Callable[..., tuple[Any, ...]]:
        """The program as a function of flat global arrays."""
        program, graph = self.program, self.program.graph
        kept = graph.avals.keys() - program.request.graph.avals.keys()
        interpreter = Interpreter(program.typing, frozenset(kept))
        in_codes = [r.codes for r in program.block.inputs]
        out_codes = program.typing.outputs
        # XLA refuses a region whose operands have no elements. Such operands are made inside.
        avals = [graph.avals[v] for v in graph.inputs]
        out_avals = [graph.aval(o) for o in graph.outputs]
        passed = [i for i, aval in enumerate(avals) if 0 not in aval.shape]
        # A function may enable 64 bits for a part of itself. JAX would narrow what runs again.
        wide = graph.has_64_bits()

        def body(*shards: Any) -> tuple[Any, ...]:
            given = dict(zip(passed, shards, strict=True))
            args = [
                _without_elements(avals[i], interpreter.local(avals[i].shape, c))
                if i not in given
                else given[i].reshape(given[i].shape[_partials(c) :])
                if _partials(c)
                else given[i]
                for i, c in enumerate(in_codes)
            ]
            self._answer_inspections()
            with nullcontext() if not wide else jax.enable_x64(True):
                outs = interpreter.program(program.block, args)
            padded = program.request.demand.padded_outputs
            return tuple(
                y.reshape((1,) * _partials(c) + y.shape)
                if _partials(c)
                else without_padding(y, out_avals[o].shape, c, program.mesh)
                if o in padded
                else y
                for o, (y, c) in enumerate(zip(outs, out_codes, strict=True))
            )

        mapped = jax.shard_map(
            body,
            mesh=self.inner,
            in_specs=tuple(in_specs[i] for i in passed),
            out_specs=out_specs,
            check_vma=False,
        )
        weak = [bool(graph.aval(o).weak_type) for o in graph.outputs]

        def whole(*flat: Any) -> tuple[Any, ...]:
            outs = mapped(*(flat[i] for i in passed))
            return tuple(map(_jax.with_weak_type, outs, weak))

        return _jax_call.named_function(whole, name, graph.input_names)

    def _answer_inspections(self) -> None:
        """Gives each `jax.debug.inspect_array_sharding` the sharding of its value while the program
        is compiled, as `jax.jit` does. A value that the plan does not compute anew has none."""
        program, mesh = self.program, self.program.mesh
        values = program.typing.values
        for inspection in program.graph.inspections:
            value, ndim = inspection.value, len(program.graph.aval(inspection.value).shape)
            if not isinstance(value, int) or value in values:
                codes = values[value] if isinstance(value, int) else (0,) * len(mesh.sizes)
                try:
                    inspection.callback(named_sharding(codes, mesh, self.mesh, ndim))
                except NotImplementedError:
                    # JAX does not say which devices hold what of an unreduced array, so a picture
                    # of it cannot be drawn. Each device's part has the shape of a copy.
                    whole = tuple(max(c, 0) for c in codes)
                    inspection.callback(named_sharding(whole, mesh, self.mesh, ndim))

    def lower(self, shapes: Sequence[Any]) -> Any:
        """The `jax.stages.Lowered` of the program for flat `ShapeDtypeStruct`s; on an abstract
        mesh, for the platform of its hardware."""
        with _jax_call.without_context_mesh():
            if isinstance(self.mesh, AbstractMesh):
                platform = self.program.mesh.hardware.platform
                return self.jitted.trace(*shapes).lower(lowering_platforms=(platform,))
            return self.jitted.lower(*shapes)

    def placed(self, number: int, x: Any) -> Any:
        """An argument with the sharding and the layout in memory that the program takes."""
        sharding = self.in_shardings[number]
        if self._compiled is not None and not _jax.is_extended(x.dtype):
            layout = self._compiled.input_formats[0][number].layout
            if x.format.layout not in (None, layout):
                x = jax.device_put(x, Format(layout, x.sharding))
        return x if x.sharding.is_equivalent_to(sharding, x.ndim) else place_array(x, sharding)

    def __call__(self, flat: Sequence[Any], shapes: Sequence[Any]) -> tuple[Any, ...]:
        """Runs on flat arguments. The program is compiled once, for `in_shardings`: `jax.jit`
        compiles for arrays on no mesh, and again for arrays on the mesh.

        Arguments:
          flat: the arguments.
          shapes: their `ShapeDtypeStruct`s.

        Raises:
          ValueError: for an argument with another sharding or layout.
        """
        self._wait()
        for i in self._keys:  # JAX compares the shardings of arrays, and moves keys in silence
            x, sharding = flat[i], self.in_shardings[i]
            committed = isinstance(x, jax.Array) and x.committed
            if committed and not x.sharding.is_equivalent_to(sharding, x.ndim):
                raise ValueError(f"keys have sharding {x.sharding} in place of {sharding}")
        if _jax_call.needs_jit():
            run = self.jitted
        else:
            self._compiled = run = self._compiled or self.lower(shapes).compile()
        is_free = jax.sharding.get_abstract_mesh().empty
        with nullcontext() if is_free else _jax_call.without_context_mesh():
            outs = run(*flat)
        if self._rehome:
            outs = tuple(
                jax.device_put(x, s) for x, s in zip(outs, self.out_shardings, strict=True)
            )
        if self._in_flight is not None and outs:
            self._in_flight.append(outs)
        return outs

    def _wait(self) -> None:
        """Waits until at most one execution is in flight (simulated CPU devices only)."""
        while self._in_flight is not None and len(self._in_flight) >= 2:
            # A later call may have taken an output by donation; that call waits for it.
            arrays = (x for x in self._in_flight.popleft() if isinstance(x, jax.Array))
            jax.block_until_ready(next((x for x in arrays if not _is_taken(x)), None))


def _is_taken(x: jax.Array) -> bool:
    """Whether a donation took an array, on some devices at least: shards of which the user has a
    NumPy view are copied instead, and `is_deleted` looks at the first one only."""
    return x.is_deleted() or any(shard.data.is_deleted() for shard in x.addressable_shards)


def is_simulated(mesh: Mesh | AbstractMesh) -> bool:
    """Whether a mesh has simulated CPU devices that abort when many executions are in flight."""
    return (
        isinstance(mesh, Mesh)
        and mesh.devices.size > 1
        and mesh.devices.flat[0].platform == "cpu"
        and jax.__version_info__ < (0, 12)
    )


def _without_elements(aval: Any, local: Sequence[int]) -> Any:
    """A shard of a value without elements, in the memory of the value."""
    x = _jax.without_elements(local, aval.dtype)
    return jax.device_put(x, _jax.space_of(True)) if _jax.in_host(aval) else x


def _partials(codes: Codes) -> int:
    """The number of mesh axes on which a type is P."""
    return sum(c < 0 for c in codes)
