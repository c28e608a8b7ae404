"""The training loop on batches that are not text, and checkpoints that are damaged, incomplete,
exchanged, or impossible to write."""

import dataclasses
import random
import re
import shutil
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from examples.gshard.machine import make_mesh
from examples.gshard.tests.runs import MODEL, PLACES, SHAPES, TRAIN, files_of_at_most, restored
from sbp.moe.checkpoint import Checkpoints, describe, fingerprints
from sbp.moe.config import BOS, ModelConfig, TrainConfig
from sbp.moe.model import Batch
from sbp.moe.step import TrainState, init_state, plan_train_step
from sbp.moe.trainer import Trainer, read_metrics
from tests.same import refused
from tests.slices import EXHAUSTIVE

SIZES: dict[str, Any] = dict.fromkeys(
    ("model_dim", "ffn_dim", "expert_dim", "source_vocab", "target_vocab"), 16
)
LAYERS: dict[str, Any] = {
    "experts": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "heads": 2,
    "head_dim": 8,
}
ROWS: dict[str, Any] = {
    "source_length": 4,
    "target_length": 4,
    "groups": 2,
    "sequences_per_group": 2,
}
SMALL = ModelConfig(**SIZES, **LAYERS, **ROWS)
SHORT = TrainConfig(steps=4, optimizer="adamw", learning_rate=0.01, checkpoint_every=2)


class Copies:
    """Targets that copy their sources."""

    def __init__(self):
        self.place = 0

    def __next__(self):
        self.place += 1
        rows = np.random.default_rng(self.place).integers(4, 16, (2, 2, 4), np.int32)
        shifted = np.pad(rows[..., :-1], ((0, 0), (0, 0), (1, 0)), constant_values=BOS)
        return Batch(source=rows, target_in=shifted, target_out=rows)

    def get_state(self):
        return {"place": self.place}

    def set_state(self, state):
        self.place = state["place"]


@pytest.fixture(scope="module")
def plan():
    return plan_train_step(SMALL, SHORT, make_mesh((("expert", 2),)))


def train(plan, folder, stop=lambda: 0, **options):
    """The state at the end, the signal, the steps that a callback saw, and what was said."""
    seen, said = [], []
    options = dataclasses.replace(SHORT, **options)
    with Checkpoints(folder, describe(SMALL, options, "copies")) as checkpoints:
        trainer = Trainer(
            model=SMALL,
            train=options,
            plan=plan,
            batches=Copies(),
            checkpoints=checkpoints,
            heldout=lambda state: 1.0,
            say=said.append,
        )
        state, signal = trainer.fit(
            trainer.begin(), [lambda step, values: seen.append((step, values))], stop=stop
        )
    return jax.device_get(state), signal, seen, said


def test_a_stopped_run_resumes_as_if_it_had_not_stopped(plan, tmp_path):
    whole, signal, seen, said = train(plan, tmp_path / "whole")
    assert (signal, said, [step for step, _ in seen]) == (0, [], [1, 2, 3, 4])
    assert ["heldout_nll" in values for _, values in seen] == [False, True, False, True]
    _, signal, seen, _ = train(plan, tmp_path / "parts", stop=lambda: 15)
    assert (signal, len(seen)) == (15, 1)
    state, _, seen, said = train(plan, tmp_path / "parts")
    assert said == ["resumed at step 1"] and [step for step, _ in seen] == [2, 3, 4]
    jax.tree.map(np.testing.assert_array_equal, state, whole)
    losses = [[line["loss"] for line in read_metrics(tmp_path / f)] for f in ("whole", "parts")]
    assert losses[0] == losses[1] and len(losses[0]) == 4


def test_steps_that_are_not_finite_end_the_run(plan, tmp_path):
    refused(
        r"steps 1 to 2 were skipped.*no checkpoint is there yet",
        train,
        Infinite(plan),
        tmp_path,
        max_skipped=2,
        checkpoint_every=9,
    )
    assert [line["skipped_step"] for line in read_metrics(tmp_path)] == [1.0, 1.0]


class Infinite:
    """A plan with infinite weights in every step."""

    def __init__(self, plan):
        self.in_shardings, self.plan = plan.in_shardings, plan

    def __call__(self, state, batch):
        return self.plan(state._replace(params=jax.tree.map(lambda w: w / 0, state.params)), batch)


RUN = {"model": {"experts": 8}, "train": {"seed": 0}, "corpus": {"digest": "a"}}


STATES = {
    step: jax.device_get(
        init_state(MODEL, dataclasses.replace(TRAIN, seed=step))._replace(step=np.int32(step))
    )
    for step in (2, 4)
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with the checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("saved")
    with Checkpoints(folder, RUN) as checkpoints:
        for step, state in STATES.items():
            checkpoints.save(state, {"next_index": step})
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "run")


def assert_same(state, want):
    jax.tree.map(np.testing.assert_array_equal, state, want)


def test_an_undamaged_checkpoint_is_read_in_silence(folder):
    state, data, said = restored(folder, RUN)
    assert_same(state, STATES[4])
    assert (data, said) == ({"next_index": 4}, [])


@pytest.mark.laws
def test_a_flipped_bit_is_never_read(folder, tmp_path):
    """A bit at a random place of the newest checkpoint, or a bit in each 256 bytes of its arrays:
    the state is the one that was saved, or the one before it, and that is said."""
    rng, fell_back = random.Random(0), 0
    found = sorted((folder / "checkpoints" / "4").rglob("*"))
    files = [p.relative_to(folder) for p in found if p.is_file() and p.stat().st_size]
    largest = max(files, key=lambda p: (folder / p).stat().st_size)
    trials = 24 if EXHAUSTIVE else 8
    for trial in range(trials):
        copy = shutil.copytree(folder, tmp_path / f"{trial}")
        path = copy / (largest if trial % 2 else rng.choice(files))
        content = bytearray(path.read_bytes())
        places = range(rng.randrange(64), len(content), 256)
        for place in places if trial % 2 else [rng.randrange(len(content))]:
            content[place] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
        state, data, said = restored(copy, RUN)
        step = int(state.step)
        assert_same(state, STATES[step])
        assert data == {"next_index": step}
        if step == 2:
            fell_back += 1
            assert re.search(
                "(?s)the checkpoint of step 4 is damaged.*sbp uses the checkpoint of step 2",
                said[0],
            )
            assert (copy / "damaged-4").is_dir()
    assert fell_back >= trials // 2


def test_training_goes_on_after_a_damaged_checkpoint(folder, capfd):
    said = []
    shutil.rmtree(folder / "checkpoints" / "4" / "state")
    with Checkpoints(folder, RUN) as checkpoints:
        state, _ = checkpoints.restore(SHAPES, PLACES, said.append)
        assert int(state.step) == 2 and checkpoints.latest == 2
        checkpoints.save(STATES[4], {"next_index": 4})
    assert_same(restored(folder, RUN)[0], STATES[4])
    assert said == [
        "the checkpoint of step 4 is damaged: a file of it is missing or cannot be read;"
        " sbp uses the checkpoint of step 2"
    ]
    assert "Traceback" not in capfd.readouterr().err  # of the libraries


def test_folders_that_no_run_has_named_are_no_checkpoints(folder):
    checkpoints = folder / "checkpoints"
    for name in ("\N{ARABIC-INDIC DIGIT NINE}", "09", "9.bak"):
        shutil.copytree(checkpoints / "2", checkpoints / name)
    state, _, said = restored(folder, RUN)
    assert int(state.step) == 4 and said == []
    shutil.copytree(checkpoints / "2", checkpoints / "9")
    state, _, (copied,) = restored(folder, RUN)
    assert int(state.step) == 4
    assert "step 9 is damaged: it is a copy of the checkpoint of step 2" in copied


def test_where_all_are_damaged_they_are_named_and_stay(folder):
    for step in (2, 4):
        (folder / "checkpoints" / str(step) / "run" / "metadata").write_text("{}")
    refused(r"(?s)no checkpoint in .* can be read.*step 4.*step 2", restored, folder, RUN)
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["2", "4"]


def test_a_checkpoint_knows_its_run(folder):
    refused(
        r"(?s)another configuration.*model\.experts: checkpoint 8, now 4",
        Checkpoints,
        folder,
        {**RUN, "model": {"experts": 4}},
    )
    Checkpoints(folder, RUN).close()


def noise(step):
    """A state of 4 MB that cannot be compressed."""
    weights = np.random.default_rng(step).standard_normal((1000, 1000), np.float32)
    return TrainState(np.int32(step), {"w": jnp.asarray(weights)}, None)


def test_a_state_may_be_donated_while_its_checkpoint_is_written(tmp_path):
    turn = jax.jit(lambda params: {"w": jnp.sort(-params["w"], axis=0)}, donate_argnums=0)
    with Checkpoints(tmp_path, RUN) as checkpoints:
        for step in range(1, 5):
            state = noise(step)
            want = np.array(state.params["w"], copy=True)
            checkpoints.save(state, {})
            for _ in range(3):
                state = state._replace(params=turn(state.params))
            checkpoints.wait()
            shapes = jax.eval_shape(lambda state: state, state)
            places = jax.tree.map(lambda x: x.sharding, state._replace(step=state.params["w"]))
            found, _ = checkpoints.restore(shapes, places)
            assert int(found.step) == step
            np.testing.assert_array_equal(found.params["w"], want)


def test_a_disk_that_is_full_is_said_and_keeps_what_is_there(tmp_path):
    """Files may have no more than 1 MiB; tensorstore fails as on a full disk, in its own
    threads."""
    checkpoints = Checkpoints(tmp_path, RUN)
    checkpoints.save(noise(1), {})
    checkpoints.wait()
    with files_of_at_most(2**20):
        checkpoints.save(noise(2), {})
        said = "(?s)^bad-checkpoint: .*File too large; the checkpoint of step 1 is kept"
        with pytest.raises(sbp.SbpError, match=said):
            for _ in range(6000):  # as between the steps of a run
                checkpoints.check()
                time.sleep(0.01)
        assert checkpoints.latest == 1
        checkpoints.save(noise(3), {})
        refused("File too large", checkpoints.close)
    with Checkpoints(tmp_path, RUN) as checkpoints:  # the lock is released
        assert checkpoints.latest == 1
        checkpoints.save(noise(2), {})
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["1", "2"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8", "float64"])
def test_checksums_show_any_change_of_one_element(dtype):
    with jax.enable_x64(True):
        x = np.asarray(jnp.asarray(np.random.default_rng(0).integers(0, 100, (5, 7)), dtype))
        before = fingerprints({"x": x})
        for place in np.ndindex(*x.shape):
            y = x.copy()
            y[place] += np.asarray(1, y.dtype)
            assert fingerprints({"x": y}) != before


def test_checksums_are_those_of_a_formula_and_the_same_on_every_mesh():
    """The test computes them in Python integers, by the published finaliser of MurmurHash3."""
    x = np.random.default_rng(1).standard_normal((8, 6)).astype(np.float32)

    def odd(place, seed):
        h = (place + 0x9E3779B9 * seed) % 2**32
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
            h = (h ^ (h >> shift)) * factor % 2**32
        return h | 1

    words = [int(w) for w in x.ravel().view(np.uint32)]
    sums = [sum(w * odd(i, seed) for i, w in enumerate(words)) % 2**32 for seed in (1, 2)]
    want = {"['x']": "".join(f"{s:08x}" for s in sums)}
    assert fingerprints({"x": x}) == want
    for sizes in ((8,), (2, 4)):
        mesh = sbp.make_mesh(sizes, ("a", "b")[: len(sizes)])
        for spec in (("a",), (None, "a") if sizes == (2, 4) else ("a",)):
            place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
            assert fingerprints({"x": jax.device_put(x, place)}) == want
