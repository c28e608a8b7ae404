"""The floating-point operations that `report.roofline()` counts, over those that XLA counts in the
same step before it is compiled (`jax.stages.Lowered.cost_analysis`).

    python -m benchmarks.counted_flops

`sbp` counts products and convolutions only, XLA elementwise operations too: the ratio is at most 1,
and close to it where products are most of the work. XLA counts the body of a loop once, so only
steps without loops are compared, on which nothing of the model was corrected. Needs no device.
"""

import jax
from jax.sharding import AbstractMesh

from benchmarks.steps.program import Mark
from benchmarks.steps.unseen import adapters, bert, recommender
from sbp.report.timeline import limits


def main() -> None:
    """Prints a line for each step."""
    print(f"{'step':<12} {'sbp':>10} {'XLA':>10} {'ratio':>7}")
    for make in (bert, recommender, adapters):
        step = make()
        mesh = AbstractMesh(tuple(n for _, n in step.mesh), tuple(a for a, _ in step.mesh))
        found = limits(step.planned(mesh, hardware=f"tpu-{step.chip}").program)
        ours = found.flops + found.repeated
        counted = jax.jit(step.make(Mark())).lower(*step.avals).cost_analysis()
        assert counted is not None
        theirs = counted["flops"]
        print(f"{make.__name__:<12} {ours:10.4g} {theirs:10.4g} {ours / theirs:7.4f}")


if __name__ == "__main__":
    main()
