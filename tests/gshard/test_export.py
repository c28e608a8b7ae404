"""`sbp export`: what a file has is what the checkpoint has, or it is refused."""

import json
import struct

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from examples.gshard.export import export_run, open_run, read_export
from examples.gshard.options import parse_args
from sbp.cli import main
from sbp.errors import SbpError
from tests.gshard.runs import begin


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def run(request, tmp_path_factory):
    """The folder of a run, its parameters, and the file of `sbp export`."""
    folder = tmp_path_factory.mktemp("export") / "run"
    return (folder, *exported(folder, f"param_dtype={request.param}"))


def exported(folder, option):
    """The parameters of a run that is made in a folder, and the file of `sbp export`."""
    made = begin(folder, parse_args(["--preset", "tiny-test", "--set", option]))
    file = folder / "model.safetensors"
    assert main(["export", "--workdir", str(folder), str(file)]) == 0
    return made.params, file


def test_float64_without_x64_is_no_damage(tmp_path):
    with jax.enable_x64(True):
        _, file = exported(tmp_path, "dtype=float64")
        assert read_export(file).model == open_run(tmp_path).model
    for read, where in ((read_export, file), (open_run, tmp_path)):
        with pytest.raises(SbpError, match="set JAX_ENABLE_X64=1"):
            read(where)


def test_a_file_reads_back_as_the_run(run):
    folder, params, file = run
    saved, found = open_run(folder), read_export(file)
    assert (found.model, found.train, found.corpus) == (saved.model, saved.train, saved.corpus)
    assert found.source.model == saved.source.model and found.target.model == saved.target.model
    again = found.params(jax.tree.map(lambda x: x.sharding, params), print)
    assert jax.tree.structure(again) == jax.tree.structure(params)
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(params), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_other_programs_read_the_arrays(run):
    """Through the format as it is specified: a length, a JSON header, and the bytes."""
    _, params, file = run
    raw = file.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + size])
    start, end = header["params/source_embedding"]["data_offsets"]
    assert raw[8 + size :][start:end] == np.asarray(params["source_embedding"]).tobytes()
    assert json.loads(header["__metadata__"]["sbp"])["run"]["model"]["experts"] > 1


def test_every_part_of_a_file_is_verified(run, tmp_path):
    """One bit of every array, and of what the file says of itself."""
    raw = run[2].read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + size])
    places = [8 + size + v["data_offsets"][0] for k, v in header.items() if k != "__metadata__"]
    inside = raw.index(b"model_dim")
    bad = tmp_path / "bad.safetensors"
    for place in (*places, inside, 3, 9, len(raw)):
        damaged = bytearray(raw)
        if place == len(raw):
            damaged = damaged[:-1]
        else:
            damaged[place] ^= 1
        bad.write_bytes(damaged)
        with pytest.raises(SbpError, match=r"^bad-checkpoint: .*bad\.safetensors"):
            read_export(bad)


def test_files_that_are_none(run, tmp_path, capsys):
    with pytest.raises(SbpError, match="cannot read"):
        read_export(tmp_path / "absent")
    with pytest.raises(SbpError, match=r"cannot read|is damaged"):
        read_export(tmp_path)
    save_file({"x": np.zeros(3)}, tmp_path / "other")
    assert load_file(tmp_path / "other").keys() == {"x"}
    with pytest.raises(SbpError, match="was not written by sbp export"):
        read_export(tmp_path / "other")
    for argv, message in (
        (["translate", "--from", str(tmp_path / "absent")], "cannot read"),
        (["translate", "--from", "a", "--workdir", "b"], "not allowed with"),
        (["translate"], "one of the arguments --workdir --from is required"),
        (["export", "--workdir", str(tmp_path), "x"], "no checkpoint in"),
        (["export", "--workdir", str(run[0]), str(tmp_path)], "cannot write to"),
    ):
        assert main(argv) == 2
        assert message in " ".join(capsys.readouterr().err.split())


def test_an_older_file_is_replaced_whole(run, tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"old")
    export_run(open_run(run[0]), file, print)
    assert file.read_bytes() == run[2].read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
