"""Profiles of some steps, read back."""

import gzip
import json

import jax
import jax.numpy as jnp
import pytest

from examples.gshard.options import parse_args
from examples.gshard.profiler import FOLDER, Profiler, Window
from sbp.errors import SbpError


def profiled(folder):
    """The numbers of the steps that are in the profiles of a run."""
    found = set()
    for file in (folder / FOLDER).rglob("*.trace.json.gz"):
        for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]:
            if event.get("name") == "train" and "step_num" in event.get("args", {}):
                found.add(int(event["args"]["step_num"]))
    return found


def train(folder, window, steps, done=0):
    with Profiler(window, folder, done) as profiler:
        for number in range(done + 1, steps + 1):
            with profiler.step(number):
                jax.block_until_ready(jnp.sum(jnp.ones(8)))


@pytest.mark.parametrize(
    ("window", "steps", "done", "want"),
    [
        (Window(2, 3), 5, 0, {2, 3}),
        (Window(4, 9), 5, 1, {4, 5}),  # a run that was stopped
        (None, 3, 0, set()),
    ],
)
def test_the_steps_of_the_window_are_profiled(tmp_path, window, steps, done, want):
    train(tmp_path, window, steps, done)
    assert profiled(tmp_path) == want


def test_a_window_that_is_over_is_refused(tmp_path):
    with pytest.raises(SbpError, match="begins with a step that is done"):
        Profiler(Window(3, 5), tmp_path, done=3)


@pytest.mark.parametrize("text", ["", "10", "5:4", "0:3", "a:b", "-1:3", "1:2:3"])
def test_a_window_of_another_form_is_refused(text):
    with pytest.raises(SbpError, match="not of the form 10:15"):
        Window.parse(text, 100)


def test_a_window_behind_the_end_is_refused():
    with pytest.raises(SbpError, match="ends behind the last step, 9"):
        parse_args(["--preset", "tiny-test", "--steps", "9", "--profile", "8:10"])
    run = parse_args(["--preset", "tiny-test", "--steps", "9", "--profile", "8:9"])
    assert run.profile == Window(8, 9)
