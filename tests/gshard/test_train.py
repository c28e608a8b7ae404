"""The command line and the checkpoints."""

import dataclasses
import json
import os
import shutil
import signal
import sys
import time
from contextlib import ExitStack

import jax
import numpy as np
import pytest

from examples.gshard.config import TranslationConfig
from examples.gshard.corpus import generate
from examples.gshard.tokenizer import Tokenizer
from examples.gshard.train import main
from sbp.errors import SbpError
from sbp.moe.checkpoint import Checkpoints, describe, differences, saved_steps
from sbp.moe.step import init_state
from tests.gshard.killing import NEVER, Moment, assert_same_runs, kill
from tests.gshard.limits import files_of_at_most
from tests.gshard.runs import MODEL, TRAIN, Training


def test_user_errors_exit_without_a_traceback(tmp_path, capsys):
    workdir = tmp_path / "run"
    assert main(["--data", str(tmp_path / "missing.tsv"), "--workdir", str(workdir)]) == 2
    assert capsys.readouterr().err.startswith("error[bad-corpus]: cannot read")
    assert not workdir.exists()


def test_checkpoint_round_trip_and_refusal_of_another_configuration(tmp_path):
    corpus = generate(dataclasses.replace(TRAIN, train_pairs=50))
    description = describe(MODEL, TRAIN, corpus.digest)
    state = init_state(MODEL, TRAIN)._replace(step=np.int32(3))
    first = Checkpoints(tmp_path, description)
    assert first.latest is None
    first.save(state, {"next_index": 5})
    first.close()

    again = Checkpoints(
        tmp_path,
        json.loads(
            json.dumps(describe(MODEL, dataclasses.replace(TRAIN, steps=99), corpus.digest))
        ),
    )
    assert again.latest == 3
    shapes = jax.eval_shape(lambda: state)
    shardings = jax.tree.map(lambda _: jax.sharding.SingleDeviceSharding(jax.devices()[0]), shapes)
    restored, where = again.restore(shapes, shardings)
    jax.tree.map(np.testing.assert_array_equal, state, restored)
    assert where == {"next_index": 5}
    again.close()

    with pytest.raises(SbpError, match="another run is training in"):
        held = Checkpoints(tmp_path, description)
        try:
            Checkpoints(tmp_path, description)
        finally:
            held.close()

    before = sorted((p, p.stat().st_mtime_ns) for p in tmp_path.rglob("*"))
    other = describe(
        dataclasses.replace(MODEL, experts=4), dataclasses.replace(TRAIN, seed=1), corpus.digest
    )
    with pytest.raises(SbpError) as caught:
        Checkpoints(tmp_path, other)
    assert caught.value.code == "bad-checkpoint"
    assert "model.experts: checkpoint 8, now 4" in str(
        caught.value
    ) and "train.seed: checkpoint 0, now 1" in str(caught.value)
    assert sorted((p, p.stat().st_mtime_ns) for p in tmp_path.rglob("*")) == before


def test_a_run_without_a_checkpoint_does_not_bind_its_folder(tmp_path):
    """A first run that was refused, or killed before its first checkpoint, leaves the folder to
    others; a damaged or an older configuration of one with checkpoints is told or read."""
    corpus = generate(dataclasses.replace(TRAIN, train_pairs=50))
    with Checkpoints(tmp_path, describe(MODEL, TRAIN, corpus.digest)):
        pass
    other = describe(dataclasses.replace(MODEL, experts=4), TRAIN, corpus.digest)
    with Checkpoints(tmp_path, other) as second:
        second.save(init_state(MODEL, TRAIN)._replace(step=np.int32(1)), {})
    with pytest.raises(SbpError, match="another configuration"):
        Checkpoints(tmp_path, describe(MODEL, TRAIN, corpus.digest))
    # Checkpoints of older versions did not know their run by themselves.
    shutil.rmtree(tmp_path / "checkpoints" / "1" / "run")
    older = json.loads((tmp_path / "config.json").read_text())
    del older["train"]["corpus"]
    (tmp_path / "config.json").write_text(json.dumps(older))
    Checkpoints(tmp_path, other, TranslationConfig).close()
    for damaged in ("[]", '{"model": null}', '{"model'):
        (tmp_path / "config.json").write_text(damaged)
        with pytest.raises(SbpError, match=r"config\.json is not the configuration of a run"):
            Checkpoints(tmp_path, other)


def test_a_damaged_vocabulary_is_named(tmp_path):
    path = tmp_path / "source.model"
    for content in (b"", b"no model"):
        path.write_bytes(content)
        with pytest.raises(SbpError, match=r"source\.model is damaged; delete it"):
            Tokenizer.load(path)


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(SbpError, match=r"cannot write to .*file: .*another place") as caught:
        Checkpoints(tmp_path / "file", {})
    assert caught.value.code == "bad-checkpoint"
    assert (tmp_path / "file").read_text() == "mine"


@pytest.fixture(scope="module")
def train():
    return Training()


def test_an_interrupted_run_resumes_as_if_it_had_never_stopped(train, tmp_path):
    def end(number):
        if number == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    whole = train(tmp_path / "whole", 5)
    assert (whole.stopped, whole.latest, len(whole.losses)) == (0, 5, 5)
    first = train(tmp_path / "parts", 5, end)
    assert (first.stopped, first.latest, len(first.losses)) == (signal.SIGTERM, 3, 3)
    rest = train(tmp_path / "parts", 5)
    assert (rest.stopped, rest.latest) == (0, 5)
    assert "resumed at step 3" in rest.shown
    assert first.losses + rest.losses == whole.losses
    jax.tree.map(np.testing.assert_array_equal, whole.state, rest.state)
    nothing = train(tmp_path / "parts", 5)
    assert (nothing.latest, nothing.losses) == (5, [])
    assert "nothing to train: step 5 is done, and steps is 5" in nothing.shown


def test_a_disk_that_gets_full_ends_the_run_and_loses_nothing(train, tmp_path):
    """Between the checkpoints of steps 2 and 4."""
    whole, folder = train(tmp_path / "room", 5), tmp_path / "full"
    with ExitStack() as full:

        def fill(number):
            while number == 3 and not (folder / "checkpoints" / "2").exists():
                time.sleep(0.01)  # it is still being written
            if number == 4:
                full.enter_context(files_of_at_most(2**14))

        with pytest.raises(SbpError, match=r"File too large; the checkpoint of step 2 is kept"):
            train(folder, 5, fill)
    # Threads of this process may still write to the checkpoint that failed.
    leave = shutil.ignore_patterns("*.orbax-checkpoint-tmp")
    shutil.copytree(folder, tmp_path / "copy", ignore=leave)
    rest = train(tmp_path / "copy", 5)
    assert (rest.stopped, rest.latest, len(rest.losses)) == (0, 5, 3)
    assert "resumed at step 2" in rest.shown
    jax.tree.map(np.testing.assert_array_equal, whole.state, rest.state)


def test_a_run_that_is_killed_as_it_saves_goes_on_as_if_it_were_not(train, tmp_path):
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    command = [sys.executable, "-m", "tests.gshard.runs", str(killed), str(NEVER)]
    train(whole, 4)  # fills the cache of compiled programs, which a kill must not damage
    kill(command, {}, killed, Moment("begun", 0.02))
    steps = max([0, *saved_steps(killed / "checkpoints")]) + 5
    train(killed, steps)
    train(whole, steps)
    assert_same_runs(killed, whole)


def test_a_rate_that_destroys_the_model_ends_the_run(tmp_path, capsys):
    """No update is finite. Through the command line."""
    argv = ["--preset", "tiny-test", "--steps", "9", "--no-eval", "--workdir", str(tmp_path)]
    rate = ["--set", "learning_rate=1e38", "--set", "warmup_steps=1", "--set", "max_skipped=3"]
    assert main([*argv, *rate, "--set", "checkpoint_every=1"]) == 2
    shown = capsys.readouterr()
    assert "error[not-finite]: steps 1 to 3 were skipped" in shown.err
    assert "the checkpoint of step 2 is kept" in shown.err
    assert shown.out.count("skipped: loss") == 3
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["1", "2"]


def test_differences_name_other_text(tmp_path):
    a, b = (
        describe(MODEL, TRAIN, generate(dataclasses.replace(TRAIN, train_pairs=n)).digest)
        for n in (50, 51)
    )
    assert [line.split(":")[0] for line in differences(a, b)] == ["corpus.digest"]
