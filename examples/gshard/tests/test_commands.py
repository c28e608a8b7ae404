"""`sbp translate` and `sbp evaluate`, through the command line, from a checkpoint."""

import io
import json
import shutil
import struct

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from examples.gshard.config import override
from examples.gshard.export import export_run, open_run, read_export
from examples.gshard.options import parse_args
from examples.gshard.sources import load
from examples.gshard.tests.runs import QUICK, begin
from examples.gshard.tokenizer import pad_rows
from sbp.cli import main
from sbp.moe.checkpoint import Checkpoints, describe
from sbp.moe.config import EOS
from sbp.moe.decode import BeamSearch
from sbp.moe.step import init_state
from tests.same import refused

RUN = parse_args(
    [
        *["--preset", "tiny-test", "--set", "groups=2", "--set", "target_length=6"],
        *["--set", "source_length=24", "--set", "heldout_per_language=2"],
    ]
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run whose model has drawn weights and says much, and what is in it."""
    changed = lambda params: {**params, "logits": (4 * params["logits"]).at[:, EOS].set(0)}
    return begin(tmp_path_factory.mktemp("runs") / "tiny", RUN, changed)


def search_by_hand(run, texts):
    """The best of two hypotheses of each text, on one device, in one batch."""
    search = jax.jit(BeamSearch(cfg=RUN.model, beam=2), compiler_options=QUICK)
    rows = pad_rows(run.source.encode(texts), RUN.model.source_length)
    rows = np.pad(rows, ((0, RUN.model.sequences - len(rows)), (0, 0)))
    found = search(run.params, rows.reshape(RUN.model.groups, -1, RUN.model.source_length))
    best = np.asarray(found.tokens)[:, :, 0].reshape(RUN.model.sequences, -1)
    return run.target.decode(best[: len(texts)])


def test_translate_prints_a_line_for_each_line(run, tmp_path, command):
    """On a mesh, with empty lines and the same text twice; compared with one device."""
    first, second = (pair.source for pair in run.corpus.train[:2])
    file = tmp_path / "text"
    file.write_bytes(f"\ufeff{first}\r\n\n{second}\n{first}\n".encode())
    argv = ["--workdir", str(run.folder), "--beam", "2", "--mesh", "data=2,expert=2", "--to", "en"]
    one, two = search_by_hand(run, [first, second])
    assert command("translate", *argv, str(file)).out.split("\n") == [one, "", two, one, ""]
    assert one and two and one != two


def test_evaluate_scores_the_runs_sets_and_a_file(run, tmp_path, command):
    folder, corpus, *_ = run
    argv = ["evaluate", "--workdir", str(folder)]
    shown = command(*argv).out
    for name in (*corpus.heldout, *corpus.languages, "templates, names", "nc:6"):
        assert name in shown
    file = tmp_path / "test.tsv"
    file.write_text("un deux\tone two\tfr\n3 dias\t3 days\tes\n")
    shown = command(*argv, "--eval-data", str(file)).out
    assert "test set" in shown and "copying" in shown and "templates" not in shown
    assert "all sets by groups of languages" in shown and "all sets by language," in shown
    exported = str(tmp_path / "model.safetensors")
    command("export", "--workdir", str(folder), exported)
    assert command("evaluate", "--from", exported, "--eval-data", str(file)).out == shown


def test_a_run_against_its_copy_is_no_better(run, tmp_path, command, monkeypatch):
    other, file = tmp_path / "other", tmp_path / "test.tsv"
    shutil.copytree(run.folder, other)
    file.write_text("un deux\tone two\tfr\n3 dias\t3 days\tes\n")
    argv = ["evaluate", "--workdir", str(run.folder), "--eval-data", str(file)]
    assert (
        "mean delta +0.00 chrF over 2 languages"
        in command(*argv, "--against", str(other), "--figures", str(tmp_path / "drawn")).out
    )
    assert {p.name for p in (tmp_path / "drawn").iterdir()} == {"figure6.png", "figure6.html"}
    monkeypatch.chdir(tmp_path)
    other.rename("copying")
    assert "write ./copying" in command(*argv, "--against", "copying", status=2).err


def test_comparisons_that_say_nothing_are_refused(run, tmp_path, command):
    argv = ["evaluate", "--workdir", str(run.folder)]
    assert (
        "name the run to compare with (--against)"
        in command(*argv, "--figures", str(tmp_path), status=2).err
    )
    (tmp_path / "own.tsv").write_text("".join(f"{i} mots\t{i} words\tfr\n" for i in range(200)))
    train = override(RUN.train, {"data": str(tmp_path / "own.tsv")})
    corpus = load(train, print)
    with Checkpoints(tmp_path / "own", describe(RUN.model, train, corpus.digest)) as checkpoints:
        shutil.copy(run.folder / "source.model", tmp_path / "own")
        shutil.copy(run.folder / "target.model", tmp_path / "own")
        checkpoints.save(init_state(RUN.model, train), {"next": 0})
    assert (
        "was trained on other text"
        in command(*argv, "--against", str(tmp_path / "own"), status=2).err
    )


def test_evaluate_refuses_other_training_text(run, tmp_path, command):
    file = tmp_path / "other.tsv"
    file.write_text("\n".join(f"{i} mots\t{i} words\tfr" for i in range(200)))
    said = command("evaluate", "--workdir", str(run.folder), "--data", str(file), status=2).err
    assert "error[bad-corpus]" in said and "is another one now" in said


@pytest.mark.parametrize(
    ("argv", "text", "said"),
    [
        (["--to", "eng"], b"", "unknown-option]: this model does not translate to 'eng'; did"),
        (["--beam", "0"], b"", "unknown-option]: --beam is 0; it must be at least 1"),
        (["--alpha", "nan"], b"", "unknown-option]: --alpha is nan"),
        (["--bema", "3"], b"", "no option '--bema'; did you mean \"--beam\"?"),
        (["--mesh", "date=2"], b"", "unknown-axis]: no mesh axis 'date' in this program; did"),
        (["--mesh", "data=64"], b"", "error[mesh-devices]"),
        (["nowhere.txt"], b"", "bad-corpus]: cannot read nowhere.txt: No such file"),
        ([], b"\xff", "bad-corpus]: standard input:2: byte 1 is not UTF-8"),
    ],
)
def test_wrong_options_and_texts_are_named(run, command, monkeypatch, argv, text, said):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"3 dias\n" + text)))
    shown = command("translate", "--workdir", str(run.folder), *argv, status=2)
    assert said in shown.err and not shown.out


def test_a_line_that_is_too_long_is_named_and_the_others_are_translated(run, command, monkeypatch):
    def translated(text, status=0):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text)))
        return command("translate", "--workdir", str(run.folder), status=status)

    first, last = translated(b"3 dias\n\xc3\xa9 tarde\n").out.splitlines()
    long = b"word " * 40
    shown = translated(b"3 dias\n" + long + b"\n\n\xc3\xa9 tarde\n" + long, status=2)
    assert shown.out.splitlines() == [first, "", "", last, ""]
    assert "bad-corpus]: standard input: no translation of line 2, 5, which" in shown.err


def test_a_folder_without_a_whole_run_is_named(run, tmp_path, command):
    def said(workdir):
        return command("translate", "--workdir", str(workdir), "nowhere.txt", status=2).err

    assert f'did you mean "{run.folder}"' in said(run.folder.with_name("tinny"))
    assert "error[bad-checkpoint]: no checkpoint in" in said(tmp_path / "a" / "b")
    for change, expected in (
        (lambda copy: (copy / "source.model").unlink(), "source.model is missing"),
        (
            lambda copy: shutil.copy(copy / "target.model", copy / "source.model"),
            "source.model is not the vocabulary of the checkpoints",
        ),
    ):
        copy = shutil.copytree(run.folder, tmp_path / "copy")
        change(copy)
        assert expected in said(copy)
        shutil.rmtree(copy)


def test_a_damaged_checkpoint_is_passed_over(run, tmp_path, command):
    """The one before is read, and nothing in the folder is changed."""
    copy = shutil.copytree(run.folder, tmp_path / "copy")
    shutil.copytree(copy / "checkpoints" / "0", copy / "checkpoints" / "1")
    shutil.rmtree(copy / "checkpoints" / "1" / "state")
    before = sorted(str(p) for p in copy.rglob("*"))
    lines = []
    found = open_run(copy).params(jax.tree.map(lambda x: x.sharding, run.params), lines.append)
    jax.tree.map(np.testing.assert_array_equal, found, run.params)
    assert len(lines) == 1 and lines[0].startswith("the checkpoint of step 1 is damaged")
    assert before == sorted(str(p) for p in copy.rglob("*"))


# ---- exports -------------------------------------------------------------------------------------
# `sbp export`: what a file has is what the checkpoint has, or it is refused.


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def exported(request, tmp_path_factory):
    """The folder of a run, its parameters, and the file of `sbp export`."""
    folder = tmp_path_factory.mktemp("export") / "run"
    return (folder, *export_of(folder, f"param_dtype={request.param}"))


def export_of(folder, option):
    """The parameters of a run that is made in a folder, and the file of `sbp export`."""
    made = begin(folder, parse_args(["--preset", "tiny-test", "--set", option]))
    file = folder / "model.safetensors"
    assert main(["export", "--workdir", str(folder), str(file)]) == 0
    return made.params, file


def test_float64_without_x64_is_no_damage(tmp_path):
    with jax.enable_x64(True):
        _, file = export_of(tmp_path, "dtype=float64")
        assert read_export(file).model == open_run(tmp_path).model
    for read, where in ((read_export, file), (open_run, tmp_path)):
        refused("set JAX_ENABLE_X64=1", read, where)


def test_a_file_reads_back_as_the_run(exported):
    folder, params, file = exported
    saved, found = open_run(folder), read_export(file)
    assert (found.model, found.train, found.corpus) == (saved.model, saved.train, saved.corpus)
    assert found.source.model == saved.source.model and found.target.model == saved.target.model
    again = found.params(jax.tree.map(lambda x: x.sharding, params), print)
    assert jax.tree.structure(again) == jax.tree.structure(params)
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(params), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_other_programs_read_the_arrays(exported):
    """Through the format as it is specified: a length, a JSON header, and the bytes."""
    _, params, file = exported
    raw = file.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + size])
    start, end = header["params/source_embedding"]["data_offsets"]
    assert raw[8 + size :][start:end] == np.asarray(params["source_embedding"]).tobytes()
    assert json.loads(header["__metadata__"]["sbp"])["run"]["model"]["experts"] > 1


def test_every_part_of_a_file_is_verified(exported, tmp_path):
    """One bit of every array, and of what the file says of itself."""
    raw = exported[2].read_bytes()
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
        refused(r"^bad-checkpoint: .*bad\.safetensors", read_export, bad)


def test_files_that_are_none(exported, tmp_path, command):
    refused("cannot read", read_export, tmp_path / "absent")
    refused(r"cannot read|is damaged", read_export, tmp_path)
    save_file({"x": np.zeros(3)}, tmp_path / "other")
    assert load_file(tmp_path / "other").keys() == {"x"}
    refused("was not written by sbp export", read_export, tmp_path / "other")
    for argv, message in (
        (["translate", "--from", str(tmp_path / "absent")], "cannot read"),
        (["translate", "--from", "a", "--workdir", "b"], "not allowed with"),
        (["translate"], "one of the arguments --workdir --from is required"),
        (["export", "--workdir", str(tmp_path), "x"], "no checkpoint in"),
        (["export", "--workdir", str(exported[0]), str(tmp_path)], "cannot write to"),
    ):
        assert message in " ".join(command(*argv, status=2).err.split())


def test_an_older_file_is_replaced_whole(exported, tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"old")
    export_run(open_run(exported[0]), file, print)
    assert file.read_bytes() == exported[2].read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
