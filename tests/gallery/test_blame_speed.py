"""A type error in the full GShard step is told in seconds (GShard, Lepikhin et al. 2020: 36 layers,
2048 experts on 2048 cores)."""

import time

import jax
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

import sbp
from benchmarks.gshard_ref import Config, abstract_arguments, sgd_step

CORES = 2048
STEP = Config(layers=36, experts=CORES, groups=CORES)
PAPER = {"tokens": 0, "dispatched": 0, "outputs": 1}
SECONDS = 5.0


@pytest.mark.parametrize(
    ("boxing", "marks", "line"),
    [
        (
            "explicit",
            PAPER,
            'jnp.einsum("egch,ehm->egcm", hidden, p["ewo"])',
        ),  # the gradient needs an all-to-all that nobody asks for
        ("reduce", PAPER, 'jnp.einsum("egch,ehm->egcm", hidden, p["ewo"])'),
        (
            "reduce",
            PAPER | {"dispatched": 1},
            'jnp.einsum("egcm,emh->egch", dispatched, p["ewi"])',
        ),  # by groups, where experts are split
    ],
)
def test_a_type_error_of_the_whole_step_takes_seconds(boxing, marks, line):
    params, batch = abstract_arguments(STEP)

    def spec(path, _):
        return PartitionSpec(None, "d") if path[-1].key in ("ewi", "ewo") else PartitionSpec()

    def mark(x, name):
        return sbp.split(x, marks[name], "d") if name in marks else x

    f = sbp.jit(
        lambda params, batch: sgd_step(params, batch, STEP, mark),
        AbstractMesh((CORES,), ("d",)),
        in_types=(jax.tree_util.tree_map_with_path(spec, params), PartitionSpec("d")),
        donate_argnums=(0,),
        boxing=boxing,
    )
    start = time.process_time()  # one process, one thread: other tests keep the cores busy
    f.trace(params, batch)
    traced = time.process_time() - start
    report = f.check(params, batch)
    assert time.process_time() - start - 2 * traced < SECONDS
    assert any(f"`{line}`" in d.title for d in report.diagnostics), report.text()
    assert all(d.helps for d in report.diagnostics)
