"""A report says what was checked: each collective with its bytes, and the values at which readings
end. Bytes are sums by hand, of the ring optimum."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as PS

import sbp
from tests.shardmap.programs.kinds import mesh

ROWS, COLUMNS, WHOLE = PS("model", None), PS(None, "model"), PS()
X = jax.ShapeDtypeStruct((16, 32), jnp.float32)
RING = [(i, (i + 1) % 4) for i in range(4)]


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
    found = [(c.op, c.mesh_axes, c.runs, c.bytes_per_device, c.read) for c in coverage.collectives]
    part = 3 / 4 * 16 * 16 * 4
    assert found == [
        ("reduce_scatter", ("model",), 1, part, True),
        ("all_gather", ("model",), 1, part, True),
        ("psum", ("data", "model"), 1, 2 * 7 / 8 * 4, True),
    ]
    assert not coverage.unread and not coverage.unshown and not coverage.dependent


def looped(x):
    step = lambda c, _: (jnp.tanh(lax.psum(c @ c.T, "model") @ c), None)
    return lax.scan(step, x, None, length=5)[0]


def test_the_trips_of_loops_count():
    _, coverage = covered(looped, COLUMNS, COLUMNS)
    (one,) = coverage.collectives
    assert (one.runs, one.bytes_per_device) == (5, 5 * 2 * 3 / 4 * 16 * 16 * 4)
    assert one.text == 'lax.psum(c @ c.T, "model")' and one.span is not None


def passed_on(x):
    """Adds what comes from the left, three times."""
    for _ in range(3):
        x = x + lax.ppermute(x, "model", RING)
    return x


def exchanged(x):
    return jnp.sin(lax.all_to_all(x.reshape(4, -1, 32), "model", 0, 0))


def by_index(x):
    return jnp.where(lax.axis_index("model") % 2 == 0, x, -x)


def sliced(x):
    return x[1:] + 1.0


def branched(x, whole, flag):
    return lax.cond(flag > 0, lambda: x, lambda: whole)


def along_a_split_dim(x, whole, flag):
    return lax.scan(lambda c, row: (c, row + c), flag, x)[1]


@pytest.mark.parametrize(
    ("body", "why", "text", "dependent"),
    [
        (passed_on, "permute", 'lax.ppermute(x, "model", RING)', 5),
        (exchanged, "exchange", 'lax.all_to_all(x.reshape(4, -1, 32), "model", 0, 0)', 1),
        (by_index, "index", 'lax.axis_index("model") % 2', None),
        (sliced, "row", "x[1:]", 1),
    ],
)
def test_where_readings_end(body, why, text, dependent):
    report, coverage = covered(body, ROWS, ROWS)
    first = coverage.unread[0]
    assert (first.why, first.text, first.mesh_axes) == (why, text, ("model",))
    assert first.span is not None and first.span.file == __file__
    assert coverage.unshown == ((coverage.unshown[0][0], 0, "model"),)
    assert dependent is None or coverage.dependent == dependent
    shown = report.text(160)
    assert "not checked: values without a reading" in shown and text in shown
    assert "result 0" in shown.splitlines()[-1]


def test_the_types_of_the_operands_are_said():
    _, coverage = covered(sliced, ROWS, ROWS)
    assert coverage.unread[0].types == ("S(0)",)


@pytest.mark.parametrize(("body", "why"), [(branched, "branch"), (along_a_split_dim, "loop")])
def test_branches_and_loops_at_which_readings_end(body, why):
    whole, flag = jax.ShapeDtypeStruct((4, 32), jnp.float32), jax.ShapeDtypeStruct((), jnp.float32)
    _, coverage = covered(body, (ROWS, PS(), PS()), ROWS, (X, whole, flag))
    assert [u.why for u in coverage.unread] == [why]


def test_a_value_of_a_loop_is_listed_where_it_is_made():
    """The carry depends on the permute only from the second trip on."""

    def body(x):
        return lax.scan(lambda c, _: (lax.ppermute(c, "model", RING), None), x, None, length=4)[0]

    _, coverage = covered(body, ROWS, ROWS)
    assert [u.why for u in coverage.unread] == ["permute"]
    (permute,) = coverage.collectives
    assert not permute.read and permute.runs == 4


def test_errors_come_without_the_list_but_with_the_data():
    report, coverage = covered(lambda x: lax.pmean(x.sum(), "model"))
    assert not report.ok and "checked:" not in report.text()
    assert coverage.collectives[0].op == "psum"


def test_the_report_in_html_has_the_same():
    report, _ = covered(all_kinds, COLUMNS)
    for line in ("checked: 1 region", "psum_scatter"):
        assert line in report.text() and line in report.html()


def test_a_manual_region_notes_what_it_did_not_read():
    region = sbp.manual(lambda x: lax.psum(passed_on(x).sum(), "model"), "model:S(0)", "B")
    plan = sbp.jit(region, mesh()).plan(X)
    (note,) = [d for d in plan.report().diagnostics if "no reading" in d.title]
    assert (note.code, note.severity) == ("not-analysed", "note")
    assert note.primary is not None and note.primary.text == "from another device"
    np.testing.assert_allclose(
        sbp.jit(region, mesh())(np.ones(X.shape, np.float32)), 8 * np.prod(X.shape)
    )
