"""Arguments of a plan where there are several processes: what each one puts on its devices, and
the comparison between processes before the first run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from sbp import _jax
from sbp.errors import refused
from sbp.run.agreement import Described, agree, description, processes_of, values_digest
from sbp.run.execute import Executable
from sbp.run.specs import placed
from sbp.types import NdSbp, Split


class JointRun:
    """The runs of one plan where there are several processes.

    Arguments:
      executable: the plan, on a mesh with devices.
      name: the function's name.
      names: the user's name of each flat argument.
      wanted: the type asked for each flat argument; None for a free one.
    """

    def __init__(
        self,
        executable: Executable,
        name: str,
        names: Sequence[str],
        wanted: Sequence[NdSbp | None],
    ) -> None:
        self._executable, self._name = executable, name
        self._names, self._wanted = names, wanted
        assert isinstance(executable.mesh, Mesh)
        self._mesh = executable.mesh
        self._processes = processes_of(self._mesh)
        here = jax.process_index() in self._processes
        self._agreed = len(self._processes) == 1 or not here

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
            agree(self._name, self._described(flat), self._processes)
            self._agreed = True
        return [
            placed(x, s)
            if isinstance(x, np.ndarray) and not s.is_fully_replicated and x.size
            else x
            for x, s in zip(flat, shardings, strict=True)
        ]

    def _described(self, flat: Sequence[Any]) -> dict[str, Described]:
        parts = description(self._executable.program, self._mesh)
        options = self._executable.compiling
        parts["set of options"] = Described.of(
            f"donated arguments {options.donated}, keep_unused={options.keep_unused},"
            f" compiler_options={options.compiler_options}"
        )
        for x, name in zip(flat, self._names, strict=True):
            here = x.is_fully_addressable if isinstance(x, jax.Array) else True
            if here and not isinstance(x, jax.ShapeDtypeStruct):
                parts[f"argument {name}"] = Described(values_digest(_jax.words(x)))
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
