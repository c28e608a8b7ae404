"""`sbp.check_shard_map`: a type checker for programs that already use `jax.shard_map`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from sbp.handwritten.check import check_mesh, coverage, diagnostics_of, trace_program
from sbp.handwritten.one_device import compared_runs
from sbp.kinds import FUNCTION, fits, leaves_of, takes
from sbp.machine.mesh import mesh_spec
from sbp.report.report import Report


@takes("sbp.check_shard_map", fn=FUNCTION)
def check_shard_map(fn: Callable[..., Any], *args: Any, mesh: Mesh | AbstractMesh) -> Report:
    """Checks a program that uses `jax.shard_map`: missing, doubled and misplaced reductions, and
    results whose type is not the one that out_specs claim.

    For each mesh axis, the program is traced again with one device on the axis. Both programs run
    without devices, on the arguments that are arrays and on random values elsewhere. A random draw
    gives a constant, and floats of less than 32 bits become float32. Callbacks run too. A result
    that differs is wrong.

    sbp measures the type of each value on the axis: which of B, S(d) and P makes up the value of
    one device, times a power of the axis size. The error is at the operation after which a value
    has no type, though all its operands have one, or at the operation that gave a result another
    type than out_specs claim. A difference that no operation explains is the warning
    `differs-on-one-device`. It is a note if you may mean the difference, as where each device ranks
    its own elements.

    A number in the program may stand for the number of devices or for something else. sbp tries
    both. If such a number may explain a fault of a count, the finding is a warning that names the
    number; write `lax.axis_size` for the number of devices. A program that is too large, or that
    cannot be run without devices, gets the warning `not-analysed`.

    Arguments:
      fn: any traceable function with `shard_map` in it, in jit, loops or gradients too.
      *args: its arguments: arrays, `jax.ShapeDtypeStruct`s, or pytrees of them; for a mesh of
          Explicit axes with their shardings.
      mesh: the mesh of its regions.

    Returns:
      A report: `ok`; `diagnostics` with the codes `missing-reduction`, `doubled-reduction`,
      `misplaced-reduction`, `wrong-reduction`, `wrong-placement`, `local-result`,
      `differs-on-one-device` and `not-analysed`; and `coverage`: the collectives with their bytes,
      and the comparison with one device of each mesh axis. A help is an edit with which fewer
      results differ from one device, with the bytes that the edited regions send.

    Raises:
      SbpError: `bad-argument` for another kind of mesh, one that is not the program's, and a
      program without a `shard_map`. Whatever `fn` raises while it is traced, unchanged.

    >>> import jax, jax.numpy as jnp
    >>> from jax.sharding import AxisType, PartitionSpec
    >>> mesh = AbstractMesh((4,), ("model",), axis_types=(AxisType.Auto,))
    >>> total = lambda x: jax.lax.pmean(x.sum(), "model")
    >>> specs = {"in_specs": PartitionSpec("model"), "out_specs": PartitionSpec()}
    >>> total = jax.shard_map(total, mesh=mesh, **specs)
    >>> report = check_shard_map(total, jax.ShapeDtypeStruct((8,), jnp.float32), mesh=mesh)
    >>> report.diagnostics[0].title
    '`jax.lax.pmean(x.sum(), "model")` averages the parts of a sum on mesh axis `model`'
    """
    spec = mesh_spec(mesh)
    fits(fn, args)
    check_mesh(graph := trace_program(fn, args, mesh), spec)
    leaves, _ = leaves_of(args, "sbp.check_shard_map")
    compared = compared_runs(graph, fn, lambda f: trace_program(f, args, mesh), leaves, spec)
    said, title = diagnostics_of(compared), getattr(fn, "__name__", "")
    return Report(program=None, diagnostics=said, title=title, coverage=coverage(compared))
