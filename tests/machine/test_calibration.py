"""`sbp calibrate`, and plans that are priced with what it measured."""

import re

import jax
import jax.numpy as jnp
import pytest

import sbp
from sbp.cli import main
from sbp.commands import calibrate
from sbp.machine.mesh import HARDWARE, mesh_spec
from tests.same import refused

AXES = {"data": 2, "model": 4}


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """The file of a short run on 8 devices."""
    path = tmp_path_factory.mktemp("calibration") / "cpu.toml"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"SIZES": (1024, 65536), "SPAN": 1e-4, "ROWS": 256}.items():
            patch.setattr(calibrate, name, value)
        assert main(["calibrate", "--mesh", "data=2,model=4", "-o", str(path)]) == 0
    return path


mesh = lambda: sbp.make_mesh(tuple(AXES.values()), tuple(AXES))


def test_every_collective_on_every_set_of_axes_is_measured(file):
    spec = mesh_spec(mesh(), str(file))
    assert spec.calibration is not None
    kinds = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all"}
    sets = [("data",), ("model",), ("data", "model")]
    wanted = {(kind, names) for kind in kinds for names in sets}
    assert {*spec.calibration.links} == wanted | {("permute", names) for names in sets[:2]}
    for (kind, names), (start, per_byte) in spec.calibration.links.items():
        link = spec.collective(kind, tuple(map(spec.names.index, names)))
        assert (link.seconds, link.seconds_per_byte) == (start, per_byte)
    assert spec.hardware.flops_per_second != HARDWARE["cpu"].flops_per_second
    assert spec.hardware.host_bytes_per_second == HARDWARE["cpu"].host_bytes_per_second


def test_a_plan_is_priced_with_it(file, tmp_path):
    """An all-reduce over an axis that takes 1 ms to start takes as long in the plan."""
    head, *parts = file.read_text().split("[[collective]]")
    slow = [p.replace("seconds = ", "seconds = 1e-3 #", 1) if '"data"' in p else p for p in parts]
    (tmp_path / "slow.toml").write_text("[[collective]]".join([head, *slow]))
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    seconds = {}
    for name in (file, tmp_path / "slow.toml"):
        plan = sbp.jit(
            jnp.sum, mesh(), in_types=("data:S(0)",), out_types="B", hardware=str(name)
        ).plan(x)
        seconds[name] = plan.program.cost.seconds
        assert "hardware cpu, measured on 20" in plan.report().text()
    assert 1e-3 < seconds[tmp_path / "slow.toml"] - seconds[file] + 1e-4 < 1.2e-3


def test_steps_send_what_their_prices_count():
    """By the shapes that the collectives give: each device sends all but its own part."""
    n, size = 4, 4096
    for kind, factor in {
        "all_reduce": 2 * 3 / 4,
        "all_gather": 3,
        "reduce_scatter": 3 / 4,
        "all_to_all": 3 / 4,
        "permute": 1,
    }.items():
        _, length, sent = calibrate._step(kind, ("model",), n, size)
        assert (length, sent) == (1024, factor * size)


def test_a_fit_of_measured_times():
    exact = [(1e3, 5e-5 + 1e3 / 2e9), (1e5, 5e-5 + 1e5 / 2e9), (1e8, 5e-5 + 1e8 / 2e9)]
    assert calibrate.fitted(exact) == pytest.approx((5e-5, 1 / 2e9))
    assert calibrate.fitted([(1e3, 1e-5), (1e6, 1e-5)])[1] > 0  # a time that does not grow


def test_a_calibration_of_another_mesh_is_refused(file):
    other = jax.sharding.AbstractMesh((4, 2), ("data", "model"))
    refused(
        "measured on data=2 model=4, but the mesh has data=4",
        lambda: sbp.jit(jnp.sin, other, hardware=str(file)).plan(jnp.ones(8)),
    )
    assert (
        mesh_spec(jax.sharding.AbstractMesh((2, 4), ("data", "model")), str(file)).calibration
        is not None
    )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            'device_kind = "cpu"',
            'device_kind = "TPU v4"',
            "measured on TPU v4, but the mesh has cpu",
        ),
        (f'jax = "{jax.__version__}"', 'jax = "0.1.0"', "measured with JAX 0.1.0, and this is JAX"),
        (
            "hbm_bytes_per_second = ",
            "hbm_bytes_per_second = 0 # ",
            "must be a number from",
        ),
        ("bytes_per_second = ", "gone = ", "it lacks"),
        (r"\[mesh\]", "[", "is damaged"),
        ('hardware = "cpu"', 'hardware = "abacus"', "there is no hardware 'abacus'"),
        (r'\["data"\]', "3", "is damaged"),
        ('kind = "all_gather"', 'kind = "gathering"', "it has no all_gather over data"),
        (
            r"(\[\[collective\]\].*?)bytes_per_second = ",
            r"\1bytes_per_second = 0 #",
            "got 0.0",
        ),
    ],
)
def test_a_damaged_file_is_one_sentence(file, tmp_path, old, new, message):
    text, count = re.subn(old, new, file.read_text(), count=1, flags=re.DOTALL)
    (tmp_path / "changed.toml").write_text(text)
    error = refused(message, mesh_spec, mesh(), str(tmp_path / "changed.toml"))
    assert count == len(error.message.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-o", "cpu.txt"], "must end in .toml"),
        (["-o", "{file}"], "pass --force to replace it"),
        (["-o", "new.toml", "--mesh", "data"], "is not of the form data=2,model=4"),
        (["-o", "new.toml", "--mesh", "data=64"], "JAX has only 8"),
    ],
)
def test_wrong_options_end_before_the_measurement(file, command, words, message):
    assert message in command("calibrate", *(w.format(file=file) for w in words), status=2).err


def test_a_file_that_does_not_exist():
    refused(r"cannot read the calibration none.toml: No such file", mesh_spec, mesh(), "none.toml")
