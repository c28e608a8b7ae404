"""Program -> one `jax.jit(jax.shard_map(..))` with shardings at the boundary, and its runs where
there are several processes."""

import hashlib
import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from sbp import _jax
from sbp.errors import SbpError, refused
from sbp.infer.space import Codes, local_shape, parts_of
from sbp.machine.mesh import MeshSpec
from sbp.plan.program import Program
from sbp.plan.saved import digests
from sbp.run.boxing import split_axes, without_padding
from sbp.run.interpret import Interpreter, Tracing
from sbp.trace.collectives import SHARD_MAP
from sbp.trace.graph import Constant, Graph
from sbp.types import NdSbp, Split

# ---- shardings ---------------------------------------------------------------------------------
# Types as JAX writes them, `PartitionSpec` and `NamedSharding`, and arrays in these.


def partition_spec(codes: Codes, mesh: MeshSpec, ndim: int) -> PartitionSpec:
    """The JAX spec of a type. Each mesh axis on which the type is P gives one leading dim, which is
    split over it.

    Arguments:
      codes: the type.
      mesh: the mesh.
      ndim: rank of the tensor, without the leading dims.
    """
    leading = [name for name, c in zip(mesh.names, codes, strict=True) if c < 0]
    return PartitionSpec(*leading, *_dims(codes, mesh, ndim))


def named_sharding(
    codes: Codes, mesh: MeshSpec, users_mesh: Mesh | AbstractMesh, ndim: int
) -> NamedSharding:
    """The JAX sharding of a type, in which mesh axes with P are `unreduced`. JAX has this word only
    for Explicit axes, so such a sharding is on a copy of the mesh with these.

    Arguments:
      codes: the type.
      mesh: the mesh.
      users_mesh: the same mesh as JAX has it.
      ndim: rank of the tensor.
    """
    unreduced = frozenset(name for name, c in zip(mesh.names, codes, strict=True) if c < 0)
    spec = PartitionSpec(*_dims(codes, mesh, ndim), unreduced=unreduced)
    on = own_mesh(users_mesh, AxisType.Explicit) if unreduced else users_mesh
    return NamedSharding(on, spec)


def own_mesh(mesh: Mesh | AbstractMesh, kind: AxisType = AxisType.Auto) -> Mesh | AbstractMesh:
    """A copy of the user's mesh whose axes are all of one kind: Auto to run a plan, since over
    Explicit axes `shard_map` refuses arguments whose own shardings are not its specs."""
    return mesh.update(axis_types=(kind,) * len(mesh.axis_names))


def _dims(codes: Codes, mesh: MeshSpec, ndim: int) -> list[Any]:
    """The entry of each dim in a spec: the mesh axes that split it, outer first."""
    return [tuple(name for name, _ in split_axes(codes, mesh, d)) or None for d in range(ndim)]


def held_shape(shape: Sequence[int], codes: Codes, mesh: MeshSpec) -> tuple[int, ...]:
    """The shape of the array that holds a value: a leading dim for each mesh axis on which the type
    is P, then the dims of the value, in which the blocks of all devices have one length.

    Arguments:
      shape: shape of the value.
      codes: its type.
      mesh: the mesh.

    >>> from sbp.machine.mesh import mesh_spec
    >>> held_shape((15, 4), (1, -1), mesh_spec(AbstractMesh((2, 4), ("data", "model"))))
    (4, 16, 4)
    """
    leading = (n for n, c in zip(mesh.sizes, codes, strict=True) if c < 0)
    blocks, parts = local_shape(shape, codes, mesh.sizes), parts_of(codes, mesh.sizes)
    return (*leading, *(length * parts.get(dim, 1) for dim, length in enumerate(blocks)))


def place_array(x: Any, sharding: NamedSharding) -> jax.Array:
    """An array in a sharding. If each process has the whole array (a NumPy array, or an array on
    its own devices), the array must be equal in all processes. Then each process takes its part,
    and nothing is sent.

    Arguments:
      x: the array.
      sharding: the sharding, which may have devices of other processes.
    """
    is_global = isinstance(x, jax.Array) and not x.is_fully_addressable
    if is_global or sharding.is_fully_addressable:
        return jax.device_put(x, sharding)
    if _jax.is_extended(x.dtype):
        rank = len(_jax.key_shape(x.dtype))
        spec = PartitionSpec(*sharding.spec, *[None] * (x.ndim - len(sharding.spec) + rank))
        return _jax.wrap_key(
            place_array(_jax.words(x), NamedSharding(sharding.mesh, spec)), x.dtype
        )
    host = np.asarray(x)
    host = host.astype(jax.dtypes.canonicalize_dtype(host.dtype), copy=False)
    return jax.make_array_from_callback(
        host.shape, sharding, lambda index: host[index], dtype=host.dtype
    )


# ---- executables --------------------------------------------------------------------------------


class Executable:
    """A plan ready to run. Its program has the settings of JAX that hold where this object is made,
    wherever the program is compiled.

    Arguments:
      program: the plan.
      mesh: the user's mesh; outputs live on it.
      name: the name of the program in HLO and in profiles, behind `jit_`.
      in_kinds: for each argument JAX's name of its memory; None for the device's own.
      returned: for each result the user's words for its sharding, None where there are none, and
        its memory.
      options: of `jax.jit`: `donate_argnums`, by flat positions, `keep_unused` and
        `compiler_options`.

    Attributes:
      shapes: the flat arguments of the compiled program.
    """

    def __init__(
        self,
        program: Program,
        mesh: Mesh | AbstractMesh,
        name: str,
        in_kinds: Sequence[str | None],
        returned: Sequence[tuple[PartitionSpec | None, str | None]],
        **options: Any,
    ) -> None:
        self.program, self.mesh = program, mesh
        self.name, self.options = name, options
        self.inner, self._settings = own_mesh(mesh), _jax.Settings.current()
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
            for s, kind in zip(in_specs, in_kinds, strict=True)
        )
        self.shapes = [
            jax.ShapeDtypeStruct(held_shape(aval.shape, r.codes, spec), aval.dtype, sharding=s)
            for r, s in zip(program.block.inputs, self.in_shardings, strict=True)
            for aval in [graph.avals[r.value]]
        ]
        placed = [
            (s if own is None else own, kind)
            for s, (own, kind) in zip(out_specs, returned, strict=True)
        ]
        self.out_shardings = tuple(NamedSharding(mesh, s, memory_kind=k) for s, k in placed)
        # A host callback is lowered with the mesh of the body, and JAX wants one mesh in a program.
        # So the results move to the user's mesh after the program.
        bodies = [n.params["body"] for n in graph.walk() if n.op == SHARD_MAP]
        self._rehome = any(
            node.op.endswith("_callback") for part in (graph, *bodies) for node in part.walk()
        )
        leaving = (
            tuple(NamedSharding(self.inner, s, memory_kind=k) for s, k in placed)
            if self._rehome
            else self.out_shardings
        )
        whole = self._whole(in_specs, out_specs)
        # Options of XLA belong to the outermost `jax.jit`, which the second one has around it.
        self.jitted, self.inner_jit = (
            jax.jit(whole, in_shardings=self.in_shardings, out_shardings=leaving, **each)
            for each in (options, {})
        )
        self._specs = in_specs, out_specs
        self._compiled: Any = None
        self._keys = [
            i for i, v in enumerate(graph.inputs) if _jax.is_extended(graph.avals[v].dtype)
        ]
        # Simulated CPU devices below JAX 0.12 abort when more than two executions are in flight on
        # few cores.
        self._in_flight: deque[Any] | None = deque() if is_simulated(mesh) else None

    def _whole(
        self,
        in_specs: Sequence[PartitionSpec],
        out_specs: tuple[PartitionSpec, ...],
        tracing: Tracing = Tracing(),  # noqa: B008, it has no state
    ) -> Callable[..., tuple[Any, ...]]:
        """The program as a function of flat global arrays.

        Arguments:
          in_specs, out_specs: as `jax.shard_map` takes them.
          tracing: as `Interpreter` takes it.
        """
        program, graph = self.program, self.program.graph
        interpreter = Interpreter(program.typing, tracing)
        in_codes = [r.codes for r in program.block.inputs]
        out_codes = program.typing.outputs
        # XLA refuses a region whose operands have no elements. Such operands are made inside.
        avals = [graph.avals[v] for v in graph.inputs]
        out_avals = [graph.aval(o) for o in graph.outputs]
        passed = [i for i, aval in enumerate(avals) if 0 not in aval.shape]
        # A function may enable 64 bits for a part of itself. JAX would narrow what runs again.
        wide = graph.has_64_bits()
        settings = {_jax.SETTINGS: self._settings}

        def body(*shards: Any) -> tuple[Any, ...]:
            given = dict(zip(passed, shards, strict=True))
            args = [
                _jax.without_elements(interpreter.local(avals[i].shape, c), avals[i])
                if i not in given
                else given[i].reshape(given[i].shape[_partials(c) :])
                if _partials(c)
                else given[i]
                for i, c in enumerate(in_codes)
            ]
            self._answer_inspections()
            with _jax.holding(settings), nullcontext() if not wide else jax.enable_x64(True):
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

        return _jax.named_function(whole, self.name, graph.input_names)

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

    def traced(self, tracing: Tracing) -> Any:
        """The closed jaxpr of the program; `tracing` as `Interpreter` takes it."""
        with _jax.without_context_mesh():
            return jax.make_jaxpr(self._whole(*self._specs, tracing))(*self.shapes)

    def lower(self) -> Any:
        """The `jax.stages.Lowered` of the program; on an abstract mesh, for the platform of its
        hardware."""
        with _jax.without_context_mesh():
            if isinstance(self.mesh, AbstractMesh):
                platform = self.program.mesh.hardware.platform
                return self.jitted.trace(*self.shapes).lower(lowering_platforms=(platform,))
            return self.jitted.lower(*self.shapes)

    def placed(self, number: int, x: Any) -> Any:
        """An argument with the sharding and the layout in memory that the program takes."""
        sharding = self.in_shardings[number]
        if self._compiled is not None and not _jax.is_extended(x.dtype):
            layout = self._compiled.input_formats[0][number].layout
            if layout is not None and x.format.layout not in (None, layout):
                x = jax.device_put(x, Format(layout, x.sharding))
        return x if x.sharding.is_equivalent_to(sharding, x.ndim) else place_array(x, sharding)

    def __call__(self, flat: Sequence[Any]) -> tuple[Any, ...]:
        """Runs on flat arguments. The program is compiled once, for `in_shardings`: `jax.jit`
        compiles for arrays on no mesh, and again for arrays on the mesh.

        Raises:
          ValueError: for an argument with another sharding or layout.
        """
        self._wait()
        for i in self._keys:  # JAX compares the shardings of arrays, and moves keys in silence
            x, sharding = flat[i], self.in_shardings[i]
            committed = isinstance(x, jax.Array) and x.committed
            if committed and not x.sharding.is_equivalent_to(sharding, x.ndim):
                raise ValueError(f"keys have sharding {x.sharding} in place of {sharding}")
        if _jax.needs_jit():
            run = self.jitted
        else:
            self._compiled = run = self._compiled or self.lower().compile()
        is_free = jax.sharding.get_abstract_mesh().empty
        with nullcontext() if is_free else _jax.without_context_mesh():
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
            # It may take an output on some devices only, because JAX copies a shard if the user has
            # a NumPy view of it. `is_deleted` looks at the first shard only.
            arrays = (x for x in self._in_flight.popleft() if isinstance(x, jax.Array))
            there = (
                x
                for x in arrays
                if not (x.is_deleted() or any(s.data.is_deleted() for s in x.addressable_shards))
            )
            jax.block_until_ready(next(there, None))


def is_simulated(mesh: Mesh | AbstractMesh) -> bool:
    """Whether a mesh has simulated CPU devices that abort when many executions are in flight."""
    return (
        isinstance(mesh, Mesh)
        and mesh.devices.size > 1
        and mesh.devices.flat[0].platform == "cpu"
        and jax.__version_info__ < (0, 12)
    )


def _partials(codes: Codes) -> int:
    """The number of mesh axes on which a type is P."""
    return sum(c < 0 for c in codes)


# ---- agreement of processes ---------------------------------------------------------------------
# If several processes run one plan, they compare it before its first run.
#
# Processes that run different programs wait for each other without end, or compute wrong values.
# So each process writes a description of its plan to the key-value store of `jax.distributed`. The
# first process of the mesh compares them, and all of them read its verdict.


SWITCH = "SBP_CHECK_PROCESSES"
"""The environment variable that turns the comparison off: "0"."""

WAIT_SECONDS = 600
"""Seconds that a process waits for the others before the first run of a plan."""

_RUNS: dict[tuple[int, ...], int] = {}
"""For each group of processes, how many plans they have compared. The runtime of JAX numbers its
collectives in the same way: all processes of a group run the same programs in the same order."""


Described = tuple[str, str]
"""One part of what a process is about to run: a digest, which is equal in all processes that may
run together, and the text that errors show for it. The text is empty where it would be long."""


def _described(text: str) -> Described:
    """A part that is described by a text; a long one is shown without its end."""
    return _hash([text]), text if len(text) <= 200 else text[:200] + " .."


def processes_of(mesh: Mesh) -> tuple[int, ...]:
    """The processes that have devices of a mesh, in ascending order."""
    return tuple(sorted({int(d.process_index) for d in mesh.devices.flat}))


def description(program: Program, mesh: Mesh) -> dict[str, Described]:
    """The parts of a plan that processes compare, by their names. An error names the first part
    that differs, because a difference may cause later ones: a mesh of another shape has another
    plan, too."""
    ids = [int(d.id) for d in mesh.devices.flat]
    kinds = sorted({d.platform for d in mesh.devices.flat})
    inputs = zip(
        program.graph.input_names,
        (program.graph.aval(v) for v in program.graph.inputs),
        program.input_types,
        strict=True,
    )
    arguments = ", ".join(f"{n}: {a.dtype}{list(a.shape)} {t!r}" for n, a, t in inputs)
    # Comments have source lines. The head has the policy, which is no part of what runs.
    lines = [line.partition("  # ")[0] for line in str(program).splitlines()[1:]]
    return {
        "mesh": _described(f"{program.mesh} on {' '.join(kinds)} devices {ids}"),
        "list of arguments": _described(arguments),
        "program": (_hash(digests(program.graph)), ""),
        "set of constants": (_hash(_constants(program.graph)), ""),
        "choice of types": (_hash(lines), ""),
    }


def agree(name: str, parts: Mapping[str, Described], processes: Sequence[int]) -> None:
    """Waits until all processes are about to run the same plan.

    Arguments:
      name: the function, for errors.
      parts: what this process is about to run.
      processes: the processes of the mesh, in ascending order.

    Raises:
      SbpError: `processes-differ` in every process, where a part differs, or where a process does
        not come within `WAIT_SECONDS`.
    """
    client = _jax.distributed_client()
    if client is None or os.environ.get(SWITCH) == "0":
        return
    group = tuple(processes)
    number = _RUNS[group] = _RUNS.get(group, 0) + 1
    folder, end = f"sbp/{_hash(map(str, group))}", time.monotonic() + WAIT_SECONDS
    own, verdict = (f"{folder}/{number}/{key}" for key in (jax.process_index(), "verdict"))

    def write(key: str, value: Any) -> None:
        client.key_value_set(key, json.dumps(value), allow_overwrite=True)

    def read(key: str) -> Any:
        """The value of a key, or None where it is not written in time."""
        left = max(1, round(1000 * (end - time.monotonic())))
        try:
            return json.loads(client.blocking_key_value_get(key, left))
        except jax.errors.JaxRuntimeError:  # in time: the deadline was exceeded
            return None

    write(own, {"name": _described(name), **parts})
    if jax.process_index() == group[0]:
        written = {p: read(f"{folder}/{number}/{p}") for p in group}
        absent = [p for p in group if written[p] is None]
        found = _absent(absent) if absent else difference(written)
        write(verdict, found)
        if number > 1 and not found:  # all have read the verdict before this one
            client.key_value_delete(f"{folder}/{number - 1}/")
    else:
        # The first process waits for the others, and writes its verdict after that.
        end += WAIT_SECONDS / 10
        found = read(verdict)
        if found is None:
            write(own, None)  # for the first, when it comes
            found = _absent([group[0]])
    if found:
        raise SbpError(
            f"all processes must call {name} with the same mesh, options and arguments; {found}",
            code="processes-differ",
        )


def difference(written: Mapping[int, Mapping[str, Sequence[str]]]) -> str:
    """The first part that differs between processes, in words; empty for none.

    Arguments:
      written: for each process, the digest and the text of each part by its name.

    >>> difference({0: {"mesh": ["a", "data=2"]}, 1: {"mesh": ["b", "data=4"]}})
    'the mesh differs: data=2 in process 0, data=4 in process 1'
    """
    first, *_ = written.values()
    for part in [*first, *(p for other in written.values() for p in other if p not in first)]:
        own = [(p, *parts.get(part, ("", "absent"))) for p, parts in written.items()]
        texts = {digest: text for _, digest, text in own}
        groups = {d: [p for p, digest, _ in own if digest == d] for d in texts}
        if len(groups) == 1:
            continue
        if all(texts.values()):
            each = [f"{texts[d]} in {_names_of(processes)}" for d, processes in groups.items()]
            return f"the {part} differs: {', '.join(each)}"
        return f"the {part} differs between {' and '.join(map(_names_of, groups.values()))}"
    return ""


def _absent(processes: Sequence[int]) -> str:
    return f"{_names_of(processes)} did not make this call within {WAIT_SECONDS} seconds"


def _names_of(processes: Sequence[int]) -> str:
    shown = ", ".join(map(str, processes[:8])) + (" .." if len(processes) > 8 else "")
    return f"process {shown}" if len(processes) == 1 else f"processes {shown}"


def _hash(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def values_digest(x: Any) -> str:
    """The digest of the elements of an array on the host."""
    x = np.asarray(x)
    digest = hashlib.sha256(f"{x.dtype}{x.shape}".encode())
    digest.update(np.ascontiguousarray(x).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()[:16]


def _constants(graph: Graph) -> Iterator[str]:
    """The digests of the arrays that a program closes over."""
    operands = (*(o for node in graph.walk() for o in node.inputs), *graph.outputs)
    for x in (operand.value for operand in operands if isinstance(operand, Constant)):
        is_global = isinstance(x, jax.Array) and not x.is_fully_addressable
        yield "global" if is_global else values_digest(_jax.words(x))


# ---- arguments of several processes -------------------------------------------------------------
# The arrays that each process puts on its devices.


class JointRun:
    """The runs of one plan where there are several processes.

    Arguments:
      executable: the plan, on a mesh with devices.
      names: the user's name of each flat argument.
      wanted: the type asked for each flat argument; None for a free one.
    """

    def __init__(
        self, executable: Executable, names: Sequence[str], wanted: Sequence[NdSbp | None]
    ) -> None:
        self._executable, self._names, self._wanted = executable, names, wanted
        assert isinstance(executable.mesh, Mesh)
        self._mesh = executable.mesh
        self._processes = processes_of(self._mesh)
        self._agreed = len(self._processes) == 1 or jax.process_index() not in self._processes

    def arguments(self, flat: Sequence[Any], whole: frozenset[int]) -> list[Any]:
        """The flat arguments with NumPy arrays placed on this process's devices.

        Before the first run, all processes of the mesh compare their plans, and the arguments that
        each of them has as a whole.

        Arguments:
          flat: the arguments.
          whole: positions of NumPy arrays that are one value in all processes, however it is split.

        Raises:
          SbpError: `bad-argument` for a NumPy array with a split type that the user asked for, as
            `jax.jit` refuses one; `processes-differ`.
        """
        if len(self._processes) > 1:
            each = zip(flat, self._names, self._wanted, strict=True)
            for position, (x, name, want) in enumerate(each):
                held = isinstance(x, jax.Array | jax.ShapeDtypeStruct)
                # A NumPy array could be the whole or this process's part.
                if (
                    not (held or position in whole or want is None)
                    and np.ndim(x)
                    and (
                        want.is_partial
                        or any(isinstance(want[a], Split) and self._mesh.shape[a] > 1 for a in want)
                    )
                ):
                    raise refused(
                        f"input {name} is pinned {want!r} and is a NumPy array; with several"
                        " processes, sbp cannot tell whether it is the whole array or this"
                        " process's part. Pass the result of plan.place(..), which takes either, or"
                        " of jax.make_array_from_process_local_data(sharding, part) with the"
                        " sharding from plan.in_shardings",
                        ValueError,
                    )
        if not self._agreed:
            agree(self._executable.name, self._describe(flat), self._processes)
            self._agreed = True
        return [
            place_array(x, s)
            if isinstance(x, np.ndarray) and not s.is_fully_replicated and x.size
            else x
            for x, s in zip(flat, self._executable.in_shardings, strict=True)
        ]

    def _describe(self, flat: Sequence[Any]) -> dict[str, Described]:
        parts = description(self._executable.program, self._mesh)
        options = self._executable.options
        parts["set of options"] = _described(
            f"donated arguments {options['donate_argnums']}, keep_unused={options['keep_unused']},"
            f" compiler_options={options['compiler_options']}"
        )
        for x, name in zip(flat, self._names, strict=True):
            here = x.is_fully_addressable if isinstance(x, jax.Array) else True
            if here and not isinstance(x, jax.ShapeDtypeStruct):
                parts[f"argument {name}"] = values_digest(_jax.words(x)), ""
        return parts
