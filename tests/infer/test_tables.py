"""The cost model gives the published figures: GShard's figure 8 and table 4, Mesh-TensorFlow's
table 1."""

import dataclasses

import pytest

import sbp
from benchmarks.gshard.figure8 import FIGURE8_BANDS, figure8, figure8_ratios
from benchmarks.gshard.table4 import DEVICES, TABLE4, exponent, planned
from benchmarks.mesh_tensorflow_table1 import TABLE1, kept_bytes, local_flops, plan_layout


def test_gshard_figure_8():
    found = figure8_ratios(figure8())
    outside = {
        name: value
        for name, value in found.items()
        if not FIGURE8_BANDS[name][0] <= value <= FIGURE8_BANDS[name][1]
    }
    assert not outside, found


def test_figure_8_tells_link_rates_apart():
    v3 = sbp.HARDWARE["tpu-v3"]
    found = figure8_ratios(
        figure8(dataclasses.replace(v3, link_bytes_per_second=2 * v3.link_bytes_per_second))
    )
    assert any(
        not FIGURE8_BANDS[name][0] <= value <= FIGURE8_BANDS[name][1]
        for name, value in found.items()
    ), found


@pytest.mark.parametrize("row", TABLE4, ids=lambda row: row.title)
def test_gshard_table_4(row):
    found = {d: planned(row, d) for d in DEVICES}
    for d, plan in found.items():
        assert plan.kinds <= row.kinds and bool(plan.kinds) == bool(row.kinds), plan
        assert plan.sent == pytest.approx(row.sent(d), rel=1e-9)
    if row.communication is not None:
        assert exponent(DEVICES, [p.communication for p in found.values()]) == pytest.approx(
            row.communication, abs=0.05
        )
    assert exponent(DEVICES, [p.compute for p in found.values()]) == pytest.approx(
        row.compute, abs=0.05
    )


@pytest.mark.parametrize("name", TABLE1)
def test_mesh_tensorflow_table_1(name):
    layout = TABLE1[name]
    plan = plan_layout(layout)
    assert plan.cost.bytes_per_device == layout.bytes_sent
    assert local_flops(plan) == layout.flops
    assert kept_bytes(plan) == layout.kept_bytes
    # Temporaries are hidden activations and gradients before their reduction, up to three of each:
    # the table's three terms again.
    temporaries = plan.cost.peak_memory_bytes - layout.kept_bytes
    assert layout.hidden_bytes <= temporaries <= 3 * layout.hidden_bytes + 3 / 4 * layout.kept_bytes


@pytest.mark.parametrize("name", [name for name, layout in TABLE1.items() if layout.reduced])
def test_free_to_choose_sbp_sends_no_more(name):
    assert plan_layout(TABLE1[name], pinned=False).cost.seconds <= plan_layout(
        TABLE1[name]
    ).cost.seconds * (1 + 1e-9)
