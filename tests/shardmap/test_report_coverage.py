"""A report says what was checked: each collective with its bytes, which are sums by hand, of the
ring optimum."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as PS

import sbp
from tests.shardmap.programs.kinds import mesh

ROWS, COLUMNS, WHOLE = PS("model", None), PS(None, "model"), PS()
X = jax.ShapeDtypeStruct((16, 32), jnp.float32)


def covered(body: Any, ins: Any = ROWS, outs: Any = WHOLE, args: Any = (X,)):
    region = jax.shard_map(body, mesh=mesh(), in_specs=ins, out_specs=outs, check_vma=False)
    report = sbp.check_shard_map(region, *args, mesh=mesh())
    assert report.coverage is not None
    return report, report.coverage


def all_kinds(x):
    y = lax.psum_scatter(x @ x.T, "model", scatter_dimension=0, tiled=True)
    y = lax.all_gather(y, "model", axis=0, tiled=True)
    return lax.psum(y.sum() / 8, ("data", "model"))


def test_collectives_with_their_bytes():
    """x @ x.T has 16 x 16 floats; the scalar goes round 8 devices."""
    _, coverage = covered(all_kinds, COLUMNS)
    found = [(c.op, c.mesh_axes, c.runs, c.bytes_per_device) for c in coverage.collectives]
    part = 3 / 4 * 16 * 16 * 4
    assert found == [
        ("reduce_scatter", ("model",), 1, part),
        ("all_gather", ("model",), 1, part),
        ("psum", ("data", "model"), 1, 2 * 7 / 8 * 4),
    ]


def looped(x):
    step = lambda c, _: (jnp.tanh(lax.psum(c @ c.T, "model") @ c), None)
    return lax.scan(step, x, None, length=5)[0]


def test_the_trips_of_loops_count():
    _, coverage = covered(looped, COLUMNS, COLUMNS)
    (one,) = coverage.collectives
    assert (one.runs, one.bytes_per_device) == (5, 5 * 2 * 3 / 4 * 16 * 16 * 4)
    assert one.text == 'lax.psum(c @ c.T, "model")' and one.span is not None


def test_errors_come_without_the_list_but_with_the_data():
    report, coverage = covered(lambda x: lax.pmean(x.sum(), "model"))
    assert not report.ok and "checked:" not in report.text()
    assert coverage.collectives[0].op == "psum"


def test_the_report_in_html_has_the_same():
    report, _ = covered(all_kinds, COLUMNS)
    for line in ("checked: 1 region", "psum_scatter"):
        assert line in report.text() and line in report.html()
