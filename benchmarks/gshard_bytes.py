"""Bytes that one training step of a GShard MoE moves, three ways, read from programs that the TPU
compiler made ahead of time.

    python -m benchmarks.gshard_bytes       # 12 layers, 128 experts, 128 cores
    python -m benchmarks.gshard_bytes --preset small --programs paper expert
    python -m benchmarks.gshard_bytes --preset 600B --programs expert sbp    # 36 layers, 2048 cores

`paper` is `jax.jit` with the three annotations of the GShard paper (Lepikhin et al., 2020, section
3.2): tokens split on the group dim, dispatched tokens on the expert dim, expert outputs back on the
group dim. `expert` is `jax.jit` with five more, which is what it takes to keep XLA from inserting
needless collectives. `sbp` is `sbp.jit` with the paper's three. No TPU is needed, only the `libtpu`
package.
"""

import argparse
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

AOT_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v4-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "JAX_PLATFORMS": "cpu",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
for _name, _value in AOT_ENVIRONMENT.items():
    os.environ.setdefault(
        _name, _value
    )  # read when jax and libtpu are loaded, hence the imports below

import jax  # noqa: E402
import numpy as np  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

import sbp  # noqa: E402
from benchmarks.gshard_ref import Config, Params, abstract_arguments, sgd_step  # noqa: E402
from benchmarks.hlo.traffic import bytes_by_kind, collectives  # noqa: E402

AXIS = "d"
MIB, GIB = 2**20, 2**30

# The tensor dim that each mark splits over the mesh; a mark that is not listed states nothing.
PAPER = {"tokens": 0, "dispatched": 0, "outputs": 1}
EXPERT = {
    **PAPER,
    "block_input": 0,
    "router_logits": 0,
    "combine_weights": 0,
    "dispatched_before": 1,
    "outputs_before": 0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What the compiler says of one program; sizes are per device and step."""

    program: str
    bytes_by_kind: Mapping[str, float]
    hbm_bytes: int
    compile_seconds: float

    @property
    def bytes_per_device(self) -> float:
        return sum(self.bytes_by_kind.values())


PRESETS: dict[str, tuple[str, Callable[[int], Config]]] = {
    # Seconds per compile; the shares of the kinds are those of the large setting, not its sizes.
    "small": (
        "v3:2x2",
        lambda cores: Config(
            layers=4,
            experts=cores,
            groups=cores,
            d_model=256,
            d_ff=1024,
            heads=4,
            d_head=64,
            source_vocab=2048,
            target_vocab=1024,
            group_size=512,
        ),
    ),
    "12-layers": ("v3:8x8", lambda cores: Config(layers=12, experts=cores, groups=cores)),
    "36-layers": ("v3:16x16", lambda cores: Config(layers=36, experts=cores, groups=cores)),
    "600B": ("v3:32x32", lambda cores: Config(layers=36, experts=cores, groups=cores)),
}


def tpu_mesh(topology: str) -> Mesh:
    """A one-axis mesh over every core of a TPU topology; the cores need not be present."""
    return Mesh(
        np.array(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices),
        (AXIS,),
    )


def param_specs(params: Params) -> Params:
    """Expert weights split on their expert dim, all other parameters replicated."""

    def spec(path: tuple[Any, ...], _: object) -> PartitionSpec:
        return PartitionSpec(None, AXIS) if path[-1].key in ("ewi", "ewo") else PartitionSpec()

    return jax.tree_util.tree_map_with_path(spec, params)


def compile_jit(cfg: Config, mesh: Mesh, marks: Mapping[str, int]) -> jax.stages.Compiled:
    """The step under `jax.jit`, sharding constraints at `marks`, everything else chosen by XLA."""

    def mark(x: jax.Array, name: str) -> jax.Array:
        if name not in marks:
            return x
        spec = PartitionSpec(*[None] * marks[name], AXIS)
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    params, batch = abstract_arguments(cfg)
    param_shardings = jax.tree.map(partial(NamedSharding, mesh), param_specs(params))
    batch_sharding = NamedSharding(mesh, PartitionSpec(AXIS))
    step = jax.jit(
        lambda params, batch: sgd_step(params, batch, cfg, mark),
        in_shardings=(param_shardings, batch_sharding),
        out_shardings=(param_shardings, NamedSharding(mesh, PartitionSpec())),
        donate_argnums=(0,),
    )
    return step.lower(params, batch).compile()


def compile_sbp(cfg: Config, mesh: Mesh, marks: Mapping[str, int]) -> jax.stages.Compiled:
    """The step under `sbp.jit`, splits at `marks`, everything else chosen by sbp."""

    def mark(x: jax.Array, name: str) -> jax.Array:
        return sbp.split(x, marks[name], AXIS) if name in marks else x

    params, batch = abstract_arguments(cfg)
    f = sbp.jit(
        lambda params, batch: sgd_step(params, batch, cfg, mark),
        mesh,
        in_types=(param_specs(params), PartitionSpec(AXIS)),
        donate_argnums=(0,),
    )
    plan = f.plan(params, batch)
    return plan.lower().compile()


PROGRAMS: dict[str, tuple[str, Callable[[Config, Mesh], jax.stages.Compiled]]] = {
    "paper": ("jax.jit, the paper's annotations", partial(compile_jit, marks=PAPER)),
    "expert": ("jax.jit, the expert's annotations", partial(compile_jit, marks=EXPERT)),
    "sbp": ("sbp.jit, the paper's annotations", partial(compile_sbp, marks=PAPER)),
}


def held_bytes(compiled: jax.stages.Compiled) -> int:
    """Bytes of one device that a compiled program holds: arguments, results and temporaries, a
    donated buffer that a result takes once."""
    memory = compiled.memory_analysis()
    if memory is None:
        raise RuntimeError("the compiler gave no memory analysis: install the `tpu` extra")
    return (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes
    )


def measure(program: str, cfg: Config, mesh: Mesh) -> Measurement:
    """Compiles one of `PROGRAMS` for `mesh` and reads its bytes sent and its memory."""
    title, compile_program = PROGRAMS[program]
    start = time.perf_counter()
    compiled = compile_program(cfg, mesh)
    seconds = time.perf_counter() - start
    hlo_text = compiled.as_text()
    if hlo_text is None:
        raise RuntimeError("the compiler gave no HLO text: install the `tpu` extra")
    return Measurement(
        program=title,
        bytes_by_kind=bytes_by_kind(collectives(hlo_text, mesh.size)),
        hbm_bytes=held_bytes(compiled),
        compile_seconds=seconds,
    )


def table(measurements: list[Measurement]) -> str:
    """The measurements as text; bytes and memory are compared with those of `expert`, or of the
    first row where it is missing."""
    base = next((m for m in measurements if m.program == PROGRAMS["expert"][0]), measurements[0])
    kinds = sorted({kind for m in measurements for kind in m.bytes_by_kind})
    header = [
        "program",
        *(f"{kind} MiB" for kind in kinds),
        "total MiB",
        "ratio",
        "HBM GiB",
        "ratio",
        "compile s",
    ]
    rows = [header]
    for m in measurements:
        sizes = [f"{m.bytes_by_kind.get(kind, 0) / MIB:,.1f}" for kind in kinds]
        ratio = f"{m.bytes_per_device / base.bytes_per_device:.3f}"
        rows.append(
            [
                m.program,
                *sizes,
                f"{m.bytes_per_device / MIB:,.1f}",
                ratio,
                f"{m.hbm_bytes / GIB:.3f}",
                f"{m.hbm_bytes / base.hbm_bytes:.3f}",
                f"{m.compile_seconds:.0f}",
            ]
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    lines = [
        "  ".join(
            [
                row[0].ljust(widths[0]),
                *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True)),
            ]
        )
        for row in rows
    ]
    return "\n".join([*lines, f"Sizes are per device and step; ratios are to: {base.program}."])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--preset",
        choices=PRESETS,
        default="12-layers",
        help="model and topology (default 12-layers)",
    )
    parser.add_argument(
        "--topology",
        help=(
            "a TPU topology such as v3:8x8, instead of the preset's; experts and groups follow its"
            " cores"
        ),
    )
    parser.add_argument(
        "--programs",
        nargs="+",
        choices=PROGRAMS,
        default=list(PROGRAMS),
        help="which programs to compile (default: all)",
    )
    args = parser.parse_args()
    topology, make_config = PRESETS[args.preset]
    mesh = tpu_mesh(args.topology or topology)
    cfg = make_config(mesh.size)
    print(
        f"{cfg.layers} layers, {cfg.experts} experts, {mesh.size} cores of"
        f" {args.topology or topology}",
        flush=True,
    )
    measurements = []
    for program in args.programs:
        measurements.append(measure(program, cfg, mesh))
        print(f"compiled {program} in {measurements[-1].compile_seconds:.0f} s", flush=True)
    print(table(measurements))


if __name__ == "__main__":
    main()
