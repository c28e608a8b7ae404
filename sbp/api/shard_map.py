"""`sbp.check_shard_map`: a type checker for programs that already use `jax.shard_map`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from sbp.kinds import FUNCTION, fits, takes
from sbp.machine.mesh import mesh_spec
from sbp.pytrees import leaves_of
from sbp.report.report import Report
from sbp.shardmap.check import analysed, check_mesh, diagnostics_of, traced
from sbp.shardmap.one_device import compared_runs


@takes("sbp.check_shard_map", fn=FUNCTION)
def check_shard_map(fn: Callable[..., Any], *args: Any, mesh: Mesh | AbstractMesh) -> Report:
    """Checks a program that uses `jax.shard_map`: missing, doubled and misplaced reductions, and
    results whose type is not the one that out_specs claim.

    Every value of every region gets a type on each mesh axis, starting from in_specs: whole, split
    or partial, with the divisor that a mean still needs. A program that is wrong under every
    reading gets an error. A local operation on a split dim that no rule covers gets a note, and a
    warning where the program shows the reason; so does a result that may be intended for each
    shard.

    The verdict depends on the traced equations, and on the functions of JAX that made them. Where
    the program is wrong if a number counts devices, and right if it is another number, the finding
    is a warning that names both readings.

    Values that are meant to differ by device have no reading: values that went round a ring, came
    from an all-to-all that exchanges no dims, or depend on `axis_index` in a way that is not
    linear. `coverage` lists where readings end. Where they do, and there is no error and no
    warning, the program is traced again with one device on that mesh axis, and both run without
    devices, on the arguments that are arrays and on random values elsewhere. A result that differs
    is the warning `differs-on-one-device`, unless something shows that this may be meant, which
    `coverage.runs` has. A sum for a mean is not found if it only shows in gradients that stay
    split.

    Arguments:
      fn: any traceable function with `shard_map` in it, in jit, loops or gradients too.
      *args: its arguments: arrays, `jax.ShapeDtypeStruct`s, or pytrees of them; for a mesh of
          Explicit axes with their shardings.
      mesh: the mesh of its regions.

    Returns:
      A report: `ok`; `diagnostics` with the codes `missing-reduction`, `doubled-reduction`,
      `misplaced-reduction`, `wrong-reduction`, `wrong-placement`, `local-result`,
      `differs-on-one-device` and `not-analysed`, whose helps are checked edits with the bytes that
      the edited regions send; and `coverage`: the collectives with their bytes, the values without
      a reading, and what a run on one device came to.

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
    check_mesh(graph := traced(fn, args, mesh), spec)
    leaves, _ = leaves_of(args, "sbp.check_shard_map")
    compared = compared_runs(graph, fn, lambda f: traced(f, args, mesh), leaves, spec)
    found, title = analysed(compared, spec), getattr(fn, "__name__", "")
    said = diagnostics_of(found, spec)
    return Report(program=None, diagnostics=said, title=title, coverage=found.coverage)
