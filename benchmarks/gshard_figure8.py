"""GShard's figure 8 from a model: what one layer pair costs on 128 to 2048 TPU v3 cores
(`benchmarks.gshard.layerpair`), and how the step of the whole model grows with depth, from plans.

    python -m benchmarks.gshard_figure8
"""

import jax
from jax.sharding import AbstractMesh, PartitionSpec

import sbp
from benchmarks.gshard.layerpair import FIGURE8_BANDS, figure8, figure8_ratios
from benchmarks.gshard_ref import Config, abstract_arguments, sgd_step
from sbp.plan.program import Cost

DEPTH_BAND = (2.9, 3.3)
"""Step time with 36 layers to that with 12; the paper's table 3 has 2.99 to 3.22.

It rematerialised at 36 layers alone, where memory demands it. Plans are therefore compared in two
ways: everything rematerialised at both depths, and at each depth the fewest layer pairs with which
a step fits the memory of a core.
"""

MARKS = {"tokens": 0, "dispatched": 0, "outputs": 1}
"""The paper's annotations: the dim of each that is split."""


def step_cost(layers: int, devices: int, remat: int | None = None) -> Cost:
    """What a training step of the whole model costs at the peak rates of the table; `remat` as in
    `benchmarks.gshard_ref.Config`."""
    cfg = Config(layers=layers, experts=devices, groups=devices, remat=remat)
    params, batch = abstract_arguments(cfg)
    experts = jax.tree_util.tree_map_with_path(
        lambda path, _: (
            PartitionSpec(None, "d") if path[-1].key in ("ewi", "ewo") else PartitionSpec()
        ),
        params,
    )

    def mark(x: jax.Array, name: str) -> jax.Array:
        return sbp.split(x, MARKS[name], "d") if name in MARKS else x

    f = sbp.jit(
        lambda params, batch: sgd_step(params, batch, cfg, mark),
        AbstractMesh((devices,), ("d",)),
        in_types=(experts, PartitionSpec("d")),
        donate_argnums=(0,),
    )
    return f.plan(params, batch).cost


def least_remat(layers: int, devices: int) -> tuple[int, Cost]:
    """The fewest layer pairs of each stack that are rematerialised in a step that fits a core of
    TPU v3, and its cost."""
    low, high = 0, layers // 4
    found = high, step_cost(layers, devices, high)
    while low < high:
        middle = (low + high) // 2
        cost = step_cost(layers, devices, middle)
        if cost.peak_memory_bytes <= sbp.HARDWARE["tpu-v3"].hbm_bytes:
            high, found = middle, (middle, cost)
        else:
            low = middle + 1
    return found


def main() -> None:
    pairs = figure8()
    columns = ("dense", "attention", "gate", "all_to_all", "linear", "seconds")
    print("cores  " + "  ".join(f"{c:>12}" for c in (*columns[:-1], "total ms")))
    for p in pairs:
        print(f"{p.devices:5}  " + "  ".join(f"{1e3 * getattr(p, c):12.2f}" for c in columns))
    found = {name: (value, FIGURE8_BANDS[name]) for name, value in figure8_ratios(pairs).items()}
    for p in pairs:
        depth = step_cost(36, p.devices).seconds / step_cost(12, p.devices).seconds
        found[f"plans, 36 layers to 12, {p.devices} cores, all rematerialised"] = depth, DEPTH_BAND
        (large, deep), (small, shallow) = least_remat(36, p.devices), least_remat(12, p.devices)
        name = f"plans, 36 layers to 12, {p.devices} cores, {large} of 9 pairs and {small} of 3"
        found[name] = deep.seconds / shallow.seconds, DEPTH_BAND
    for name, (value, (low, high)) in found.items():
        print(
            f"{name:62} {value:5.2f}   asked {low} to"
            f" {high}{'' if low <= value <= high else '   NOT MET'}"
        )


if __name__ == "__main__":
    main()
