"""A training step of `sbp.moe` itself, as `sbp train` runs it, compiled by the TPU compiler ahead
of time under `sbp.jit` and under `jax.jit`: bytes sent, bytes held, seconds on the compiler's
schedule.

    python -m benchmarks.moe_step                                    # 12 layers, 128 experts
    python -m benchmarks.moe_step --set dtype=bfloat16               # options of a training run

Both compile one function with the paper's annotations (Lepikhin et al., 2020, section 3.2). Under
`jax.jit` they are sharding constraints, experts lie split between steps, and all other weights and
moments on every device. An expert would write more annotations: what these bring is measured on
another model by `benchmarks.gshard_bytes`. No TPU is needed, only the `libtpu` package.
"""

import argparse
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.gshard_bytes import GIB, MIB, held_bytes  # sets the environment of the compiler

# isort: split
import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.gshard.compiled import slice_mesh
from benchmarks.hlo.schedule import CHIPS, step_time
from benchmarks.hlo.traffic import bytes_by_kind, collectives
from examples.gshard.options import Run, parse_args
from sbp.moe.sharding import Sharding, sharding_of
from sbp.moe.step import batch_shapes, make_train_step, plan_train_step, state_shapes


def constraint(mesh: Mesh, axes: Sequence[str]) -> Any:
    """Stands in for a `sbp.Layout` under `jax.jit`: a sharding constraint on dim 0."""
    sharding = NamedSharding(mesh, PartitionSpec(tuple(axes)))
    return lambda x, *_: jax.lax.with_sharding_constraint(x, sharding)


def compile_sbp(run: Run, mesh: Mesh) -> jax.stages.Compiled:
    """The plan of the step."""
    return plan_train_step(run.model, run.train, mesh).lower().compile()


def compile_jit(run: Run, mesh: Mesh) -> jax.stages.Compiled:
    """The step under `jax.jit`."""
    own = sharding_of(run.mesh)
    groups, experts = (
        [axis for axis, _ in run.mesh if f"{axis}:" in str(layout.type(dim))]
        for layout, dim in ((own.groups, "group"), (own.experts, "expert"))
    )
    constraints = Sharding(constraint(mesh, groups), constraint(mesh, experts))
    state, batch = (
        state_shapes(run.model, run.train),
        batch_shapes(run.model, packed=run.train.pack),
    )

    def placed(path: Any, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        stacked = "['expert_" in jax.tree_util.keystr(path) and len(leaf.shape) > 1
        spec = PartitionSpec(None, tuple(experts)) if stacked else PartitionSpec()
        return NamedSharding(mesh, spec)

    of_state = jax.tree_util.tree_map_with_path(placed, state)
    step = jax.jit(
        make_train_step(run.model, run.train, constraints),
        in_shardings=(of_state, NamedSharding(mesh, PartitionSpec(tuple(groups)))),
        out_shardings=(of_state, NamedSharding(mesh, PartitionSpec())),
        donate_argnums=(0,),
    )
    return step.lower(state, batch).compile()


def row(title: str, compiled: jax.stages.Compiled, mesh: Mesh, chip: str) -> tuple[float, ...]:
    """Bytes sent by a device, bytes that it holds, and seconds of a step."""
    text = compiled.as_text()
    assert text is not None
    timed = step_time(text, mesh.size, chip)
    sent = sum(bytes_by_kind(collectives(text, mesh.size)).values())
    held = held_bytes(compiled)
    print(
        f"{title:9} sends {sent / MIB:10,.1f} MiB  holds {held / GIB:7.3f} GiB"
        f"  step {1e3 * timed.seconds:8.1f} ms",
        flush=True,
    )
    for entry in timed.unknown:
        print(f"{'':9} not counted: {entry}")
    return sent, held, timed.seconds


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--topology", default="v3:8x8", help="a TPU topology (default v3:8x8)")
    parser.add_argument(
        "--chip", choices=CHIPS, default="v3", help="whose clock and links the schedule runs on"
    )
    args, rest = parser.parse_known_args(argv)
    run = parse_args(rest if "--preset" in rest else ["--preset", "gshard-12l-128e", *rest])
    if run.model.experts and run.model.dispatch != "einsum":
        raise SystemExit(f'dispatch "{run.model.dispatch}" is a region by hand of sbp; take einsum')
    mesh = slice_mesh(args.topology, run.mesh)
    found = []
    for title, compile_step in (("jax.jit", compile_jit), ("sbp.jit", compile_sbp)):
        start = time.perf_counter()
        compiled = compile_step(run, mesh)
        print(f"{title:9} compiled in {time.perf_counter() - start:.0f} s", flush=True)
        found.append(row(title, compiled, mesh, args.chip))
    ratios = [ours / theirs for theirs, ours in zip(*found, strict=True)]
    print("ratios: bytes {:.3f}, memory {:.3f}, step {:.3f}".format(*ratios))


if __name__ == "__main__":
    main()
