"""`sbp.check_shard_map`: a type checker for programs that already use `jax.shard_map`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from sbp.kinds import FUNCTION, fits, takes
from sbp.machine.mesh import mesh_spec
from sbp.report.report import Report
from sbp.shardmap.check import diagnostics_of, traced
from sbp.shardmap.regions import analyse


@takes("sbp.check_shard_map", fn=FUNCTION)
def check_shard_map(fn: Callable[..., Any], *args: Any, mesh: Mesh | AbstractMesh) -> Report:
    """Checks a program that uses `jax.shard_map`: missing, doubled and misplaced reductions, and
    results whose type is not the one that out_specs claim.

    Every value of every region gets a type on each mesh axis, starting from in_specs: whole, split
    or partial, with the divisor that a mean still needs. A psum with a division by hand is read as
    a mean. A program that is wrong under every reading gets an error. A local operation on a split
    dim that no rule covers (a slice, a roll, a random draw, a reshape that mixes shards) gets a
    note, and so does a result that may be intended for each shard; `ok` does not cover these. It
    gets a warning where the program shows the reason: positions that count from zero in each shard,
    the same block of a whole value on every device, blocks along different dims.

    The verdict depends on the traced equations, and on the functions of JAX that made them. A
    division by `lax.axis_size` and one by an equal number are the same equation: where the program
    is wrong if the number counts devices, and right if it is another number, the finding is a
    warning that names both readings.

    The index of a device is followed as long as it is linear: `axis_index(axis) * n + arange(n)` is
    split, and so are masks that compare it and slices that begin at `axis_index(axis) * n`.

    Values that are meant to differ by device have no reading and get no verdict: values that depend
    on `axis_index` in another way, went round a ring, or came from an all-to-all that exchanges no
    dims. `coverage` lists where readings end. A sum in place of a mean is not found if it only
    shows in gradients that stay split. Nothing runs.

    Arguments:
      fn: any traceable function with `shard_map` in it, in jit, loops or gradients too.
      *args: its arguments: arrays, `jax.ShapeDtypeStruct`s, or pytrees of them; for a mesh of
          Explicit axes with their shardings.
      mesh: the mesh of its regions.

    Returns:
      A report: `ok`; `diagnostics` with the codes `missing-reduction`, `doubled-reduction`,
      `misplaced-reduction`, `wrong-reduction`, `wrong-placement`, `local-result` and
      `not-analysed`, whose helps are checked edits with the bytes that the edited regions send; and
      `coverage`: the collectives with their bytes, and the values without a reading.

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
    graph = traced(fn, args, mesh)
    found = analyse(graph, spec)
    said, title = diagnostics_of(graph, spec, found), getattr(fn, "__name__", "")
    return Report(program=None, diagnostics=said, title=title, coverage=found.coverage)
