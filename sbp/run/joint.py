"""Arguments of a plan where there are several processes: what each one puts on its devices, and
the comparison between processes before the first run."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from sbp import _jax
from sbp.errors import SbpError, refused
from sbp.plan.ir import Apply, Block, Box, ConstantRegister, Loop
from sbp.plan.program import Program
from sbp.plan.saved import digests
from sbp.run.execute import Executable
from sbp.run.specs import place_array
from sbp.trace.graph import Constant, Graph
from sbp.types import NdSbp, Split

# ---- agreement of processes ---------------------------------------------------------------------
# Several processes that run one plan: before the first run they compare what they run.
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
    """What a process is about to run, by the names of its parts. The first part that differs is
    the one to name: a mesh of another shape has another plan, too."""
    ids = [int(d.id) for d in mesh.devices.flat]
    kinds = sorted({d.platform for d in mesh.devices.flat})
    inputs = zip(
        program.graph.input_names,
        (program.graph.aval(v) for v in program.graph.inputs),
        program.input_types,
        strict=True,
    )
    arguments = ", ".join(f"{n}: {a.dtype}{list(a.shape)} {t!r}" for n, a, t in inputs)
    return {
        "mesh": _described(f"{program.mesh} on {' '.join(kinds)} devices {ids}"),
        "list of arguments": _described(arguments),
        "program": (_hash(digests(program.graph)), ""),
        "set of constants": (_hash(_constants(program.graph)), ""),
        "choice of types": (_hash(_choices(program.block)), ""),
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
    store = _Store(client, f"sbp/{_hash(map(str, group))}", time.monotonic() + WAIT_SECONDS)
    store.write(f"{number}/{jax.process_index()}", {"name": _described(name), **parts})
    if jax.process_index() == group[0]:
        found = _verdict(store, number, group)
        store.write(f"{number}/verdict", found)
        if number > 1 and not found:  # all have read the verdict before this one
            store.delete(f"{number - 1}/")
    else:
        # The first process waits for the others, and writes its verdict after that.
        store.end += WAIT_SECONDS / 10
        found = store.read(f"{number}/verdict")
        if found is None:
            store.write(f"{number}/{jax.process_index()}", None)  # for the first, when it comes
            found = _absent([group[0]])
    if found:
        title = "has to be called in all processes, with the same mesh, options and arguments"
        raise SbpError(f"{name} {title}; {found}", code="processes-differ")


class _Store:
    """A folder of the key-value store.

    Arguments:
      client: the client of `jax.distributed`.
      folder: the folder.
      end: the time after which nothing is waited for.
    """

    def __init__(self, client: Any, folder: str, end: float) -> None:
        self.client, self.folder, self.end = client, folder, end

    def write(self, key: str, value: Any) -> None:
        """Writes a value, over one that is there."""
        self.client.key_value_set(f"{self.folder}/{key}", json.dumps(value), allow_overwrite=True)

    def read(self, key: str) -> Any:
        """The value of a key, or None where it is not written in time."""
        left = max(1, round(1000 * (self.end - time.monotonic())))
        try:
            return json.loads(self.client.blocking_key_value_get(f"{self.folder}/{key}", left))
        except jax.errors.JaxRuntimeError:  # in time: the deadline was exceeded
            return None

    def delete(self, key: str) -> None:
        """Deletes a key, or a folder whose name ends with a slash."""
        self.client.key_value_delete(f"{self.folder}/{key}")


def _verdict(store: _Store, number: int, group: Sequence[int]) -> str:
    """What differs, in words; empty for nothing."""
    written = {p: store.read(f"{number}/{p}") for p in group}
    absent = [p for p in group if written[p] is None]
    return _absent(absent) if absent else difference(written)


def difference(written: Mapping[int, Mapping[str, Sequence[str]]]) -> str:
    """The first part that differs between processes, in words; empty for none.

    Arguments:
      written: for each process, the digest and the text of each part by its name.

    >>> difference({0: {"mesh": ["a", "data=2"]}, 1: {"mesh": ["b", "data=4"]}})
    'its mesh differs: data=2 in process 0, data=4 in process 1'
    """
    first, *_ = written.values()
    for part in [*first, *(p for other in written.values() for p in other if p not in first)]:
        groups: dict[str, list[int]] = {}
        texts: dict[str, str] = {}
        for process, parts in written.items():
            digest, text = parts.get(part, ("", "absent"))
            groups.setdefault(digest, []).append(process)
            texts[digest] = text
        if len(groups) == 1:
            continue
        if all(texts.values()):
            each = [f"{texts[d]} in {_names_of(processes)}" for d, processes in groups.items()]
            return f"its {part} differs: {', '.join(each)}"
        return f"its {part} differs between {' and '.join(map(_names_of, groups.values()))}"
    return ""


def _absent(processes: Sequence[int]) -> str:
    return f"{_names_of(processes)} did not come within {WAIT_SECONDS} seconds"


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
    for operand in (*(o for node in graph.walk() for o in node.inputs), *graph.outputs):
        if isinstance(operand, Constant):
            x = operand.value
            is_global = isinstance(x, jax.Array) and not x.is_fully_addressable
            yield "global" if is_global else values_digest(_jax.words(x))


def _choices(block: Block) -> Iterator[str]:
    """The types and kernels of a plan, and its conversions in their order."""
    yield str(block.inputs)
    for instruction in block.instructions:
        match instruction:
            case Apply():
                yield f"{instruction.node.op} {instruction.row.kernels} {instruction.outs}"
            case Box():
                steps = [(s.kind, s.mesh_axes, s.target, s.wide) for s in instruction.steps]
                yield f"{instruction.source} {instruction.target} {steps}"
            case Loop():
                yield f"{instruction.node.op} {instruction.outs}"
                for inner in instruction.blocks:
                    yield from _choices(inner)
        ins = [s for s in instruction.ins if not isinstance(s, ConstantRegister)]
        yield str(ins)


# ---- joint calls --------------------------------------------------------------------------------


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
        shardings = self._executable.in_shardings
        if len(self._processes) > 1:
            each = zip(flat, self._names, self._wanted, strict=True)
            for position, (x, name, want) in enumerate(each):
                if position not in whole and not isinstance(x, jax.Array | jax.ShapeDtypeStruct):
                    _refuse_split(x, name, want, self._mesh)
        if not self._agreed:
            agree(self._executable.compiling.name, self._describe(flat), self._processes)
            self._agreed = True
        return [
            place_array(x, s)
            if isinstance(x, np.ndarray) and not s.is_fully_replicated and x.size
            else x
            for x, s in zip(flat, shardings, strict=True)
        ]

    def _describe(self, flat: Sequence[Any]) -> dict[str, Described]:
        parts = description(self._executable.program, self._mesh)
        options = self._executable.compiling
        parts["set of options"] = _described(
            f"donated arguments {options.donated}, keep_unused={options.keep_unused},"
            f" compiler_options={options.compiler_options}"
        )
        for x, name in zip(flat, self._names, strict=True):
            here = x.is_fully_addressable if isinstance(x, jax.Array) else True
            if here and not isinstance(x, jax.ShapeDtypeStruct):
                parts[f"argument {name}"] = values_digest(_jax.words(x)), ""
        return parts


def _refuse_split(x: Any, name: str, want: NdSbp | None, mesh: Mesh) -> None:
    """Refuses what is no JAX array where the user pinned it split: it could be the whole or this
    process's part.

    Raises:
      SbpError: `bad-argument`, a ValueError too.
    """
    if want is None or not np.ndim(x):
        return
    if want.is_partial or any(isinstance(want[a], Split) and mesh.shape[a] > 1 for a in want):
        raise refused(
            f"argument {name} is pinned {want!r} and is a NumPy array; with several processes that"
            " may be the whole or this process's part: pass what plan.place(..) makes of either, or"
            " jax.make_array_from_process_local_data(sharding, part), with its sharding from"
            " plan.in_shardings",
            ValueError,
        )
