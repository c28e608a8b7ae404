"""Kill processes that train, and compare what is left; limits of this process, in place of a disk
without room."""

import os
import random
import resource
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from sbp.moe.checkpoint import Checkpoints, bound
from sbp.moe.step import init_state
from sbp.moe.trainer import read_metrics
from tests.gshard.runs import MODEL, TRAIN

NEVER = 10**6  # steps; a run is killed before
TIMES = {"seconds", "tokens_per_second", "flops_per_second", "mfu"}


@dataclass(frozen=True)
class Moment:
    """When a process is killed: some seconds after it was started, after it began to write a
    checkpoint ("begun"), or after one was whole ("written")."""

    event: str
    seconds: float


def moments(count: int, seed: int) -> list[Moment]:
    """As many of each kind; what a process does in the time that is given takes about as long."""
    rng, longest = random.Random(seed), {"started": 20.0, "begun": 0.2, "written": 0.4}
    events = [event for event in longest for _ in range(-(-count // len(longest)))][-count:]
    rng.shuffle(events)
    return [Moment(event, rng.uniform(0, longest[event])) for event in events]


def folders(workdir: Path, *, whole: bool) -> set[tuple[str, int]]:
    """Checkpoints that are whole, or those that are being written."""
    found = workdir / "checkpoints"
    if not found.exists():
        return set()
    with os.scandir(found) as entries:
        return {(e.name, e.inode()) for e in entries if e.name.isdecimal() == whole}


def kill(command: Sequence[str], env: Mapping[str, str], workdir: Path, moment: Moment) -> None:
    """Start the program, and kill it at a moment."""
    whole = moment.event == "written"
    before = folders(workdir, whole=whole)
    with open(workdir.with_suffix(".out"), "w") as out:
        process = subprocess.Popen(command, env={**os.environ, **env}, stdout=out, stderr=out)
    while moment.event != "started" and not folders(workdir, whole=whole) - before:
        assert process.poll() is None, workdir.with_suffix(".out").read_text()
        time.sleep(0.002)
    time.sleep(moment.seconds)
    process.kill()
    assert process.wait() == -signal.SIGKILL, workdir.with_suffix(".out").read_text()


def newest(workdir: Path) -> tuple[Any, Any]:
    """What the newest checkpoint of a run has, as arrays of this process, and its place in the
    data."""
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes = jax.eval_shape(lambda: init_state(MODEL, TRAIN))
    places = jax.tree.map(lambda _: place, shapes)
    said: list[str] = []
    with Checkpoints(workdir, bound(workdir)) as checkpoints:
        state, data = checkpoints.restore(shapes, places, said.append)
    assert not said
    return jax.device_get(state), data


def bits(x: Any) -> tuple[Any, ...]:
    """An array with the sign of each zero."""
    x = np.asarray(x)
    return x.dtype, x.shape, x.tobytes()


def assert_same_runs(a: Path, b: Path) -> None:
    """The same bits in all arrays, the same place in the data, the same numbers of each step."""
    (state, data), (want, place) = newest(a), newest(b)
    assert jax.tree.map(bits, state) == jax.tree.map(bits, want)
    assert data == place
    lines, wanted = (
        [{k: v for k, v in line.items() if k not in TIMES} for line in read_metrics(workdir)]
        for workdir in (a, b)
    )
    assert lines == wanted
    assert [line["step"] for line in lines] == list(range(1, int(want.step) + 1))
    assert sorted(p.name for p in a.iterdir()) == sorted(p.name for p in b.iterdir())
    assert folders(a, whole=False) == set()


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Writing fails behind the first `size` bytes of any file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
