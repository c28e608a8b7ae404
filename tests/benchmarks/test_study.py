"""Costs of the paper's models, without devices."""

import io
from functools import cache
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.gshard.costs import parse_topology
from benchmarks.gshard.study import PUBLISHED, core_years, operators, study, table, training_days
from examples.gshard.options import Run
from examples.gshard.presets import preset
from sbp.cli import main
from sbp.errors import SbpError


@cache
def studied(name):
    chosen = preset(name)
    run = Run(
        model=chosen.model,
        train=chosen.train,
        mesh=chosen.mesh,
        workdir=Path("unused"),
        tensorboard=False,
        evaluate=False,
    )
    return study(run, "tpu-v3")


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_papers_days_and_core_years_follow_from_its_steps(name):
    """Table 3 agrees with itself: 10**12 tokens, in batches of 4 or 1 million."""
    said = PUBLISHED[name]
    days = training_days(said.tokens, said.steps_per_second)
    assert days == pytest.approx(said.days, abs=0.06)
    assert core_years(days, said.cores) == pytest.approx(said.core_years, abs=0.16)


def test_weights_are_the_papers():
    for name, said in PUBLISHED.items():
        assert studied(name).parameters / 2**30 == pytest.approx(said.weights, rel=0.04)


def test_the_papers_experts_are_those_of_every_other_layer():
    """Table 1; its 36684 and 12228 are misprints of 36864 and 12288."""
    totals = {name: said.experts * said.layers / 2 for name, said in PUBLISHED.items()}
    assert totals["gshard-36l-2048e"] == 36864 and totals["gshard-12l-2048e"] == 12288
    assert totals["gshard-36l-512e"] == 9216 and totals["gshard-12l-512e"] == 3072
    assert totals["gshard-36l-128e"] == 2304 and totals["gshard-12l-128e"] == 768


def test_classes_of_memory_add_up_to_the_peak():
    found = studied("gshard-12l-128e")
    assert sum(found.memory.values()) == pytest.approx(found.plan.cost.peak_memory_bytes)
    assert all(size >= 0 for size in found.memory.values())
    # At the end of the backward pass the gradients of all layers are there, and some updates: as
    # many bytes as the weights but for embeddings and logits, and no more than twice as many.
    outside = (64_000 + 2 * 32_000) * 1024 * 4
    weights = found.memory["experts"] + found.memory["other weights"] - outside
    assert weights < found.memory["gradients, updates"] < 2 * weights


def test_a_device_holds_as_much_whatever_the_number_of_experts():
    """Figure 7: weights and activations of a device are constant in the experts, with as many
    devices as experts; the router's own weights, M x E, and what it computes for each expert are
    not."""
    few, many = studied("gshard-12l-128e"), studied("gshard-12l-2048e")
    assert many.memory["experts"] == few.memory["experts"] == 6 * 2 * 1024 * 8192 * 4
    assert sum(many.memory.values()) < 1.35 * sum(few.memory.values())


def test_memory_grows_with_depth_as_the_layers_do():
    shallow, deep = studied("gshard-12l-512e"), studied("gshard-36l-512e")
    assert deep.memory["experts"] == 3 * shallow.memory["experts"]
    assert sum(deep.memory.values()) < 3 * sum(shallow.memory.values())


def test_experts_are_never_gathered():
    """All that a device sends in a step is less than the weights of one MoE layer."""
    found = studied("gshard-12l-128e")
    assert 0 < found.plan.cost.bytes_per_device < 128 * 1024 * 8192 * 4


def test_modelled_steps_are_within_a_factor_of_two_of_those_the_paper_measured():
    """Where the batch is the paper's; its models of 128 experts had larger groups than ours."""
    for name in ("gshard-36l-2048e", "gshard-12l-2048e", "gshard-36l-512e", "gshard-12l-512e"):
        found = studied(name)
        assert found.tokens == pytest.approx(PUBLISHED[name].tokens, rel=0.06)
        assert 0.5 < found.seconds * PUBLISHED[name].steps_per_second < 2


def test_three_times_the_depth_takes_three_times_as_long():
    """Table 3: 2.99 and 3.12 times. By floating-point operations, 2.87: embeddings and logits are
    those of one model in both."""
    for experts in (512, 2048):
        deep, shallow = (studied(f"gshard-{layers}l-{experts}e") for layers in (36, 12))
        assert 2.75 < deep.seconds / shallow.seconds < 3.3


def text_of(shown):
    page = io.StringIO()
    Console(width=100, file=page).print(shown)
    return page.getvalue()


def test_the_table_has_both_sides():
    lines = text_of(table(studied("gshard-36l-2048e"))).splitlines()
    rows = {line[:33].strip(): line[33:].split() for line in lines}
    assert rows["devices"] == ["2,048", "2,048", "1.00"]
    assert rows["experts of all layers"] == ["36,864", "36,864", "1.00"]
    assert rows["parameters / 2^30"] == ["576.9", "600.0", "0.96"]
    assert rows["seconds of a step, modelled"][1] == "1.39"
    assert rows["BLEU above bilingual models"] == ["-", "13.5", "-"]
    # Table 2 at the speeds of both: 542 billion tokens at 0.72 steps of 4 million in a second.
    to_loss = rows["days to loss 0.5, 542B tokens"]
    assert float(to_loss[1]) == pytest.approx(542e9 / (0.72 * 4e6) / 86_400, abs=0.005)
    assert float(to_loss[2]) == pytest.approx(float(to_loss[0]) / float(to_loss[1]), abs=0.02)


def test_operators_stand_beside_the_papers_table_4():
    shown = text_of(operators("tpu-v3"))
    row = next(line for line in shown.splitlines() if line.strip().startswith("Einsum"))
    assert row.split()[-5:] == ["all_to_all", "0.49", "0.5", "0.00", "0"]


@pytest.mark.parametrize(
    ("text", "devices"), [("v3:32x32", 2048), ("v3:8x8", 128), ("v5e:4x4", 16), ("v4:2x2x4", 16)]
)
def test_a_topology_says_how_many_devices_there_are(text, devices):
    assert parse_topology(text).devices == devices


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("v33:2x2", 'did you mean "v3"'),
        ("v3", "not of the form"),
        ("v3:2x0", "not of the form"),
        ("v3:2x2x2", "a torus of 2"),
        ("v4:2x2", "a torus of 3"),
    ],
)
def test_what_is_no_topology_is_refused(text, said):
    with pytest.raises(SbpError, match=said):
        parse_topology(text)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--topology", "v3:16x16"), "512 devices, and the mesh expert=2048 has 2,048"),
        (("--topology", "v3:32x32", "--hardware", "tpu-v4"), "leave out --hardware"),
        (("--compile",), "give it, as in --topology v3:32x32"),
        (("--figures", "unused"), "--preset does nothing there"),
        (("--preset", "gshard-600c"), 'did you mean "gshard-600b"'),
    ],
)
def test_options_that_do_not_fit_are_refused(options, said, capsys):
    assert main(["plan", "--preset", "gshard-600b", *options]) == 2
    assert said in capsys.readouterr().err


def test_without_the_tpu_compiler_the_extra_is_named(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["plan", "--preset", "gshard-600b", "--topology", "v3:32x32", "--compile"]) == 2
    assert "pip install 'sbp-jax[tpu]'" in capsys.readouterr().err
