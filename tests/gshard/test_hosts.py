"""What a run in several processes says of wrong options, and of processes that do not come."""

import socket
import subprocess
import sys

import pytest

from examples.gshard.hosts import Hosts, between_processes
from examples.gshard.options import parse_args
from sbp.errors import SbpError

AT = ["--coordinator", "host0:1234"]


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (["--processes", "2"], "unknown-option", "need --coordinator, the HOST:PORT of process 0"),
        (["--coordinator", "host0"], "unknown-option", "is 'host0'; write HOST:PORT"),
        (["--coordinator", "host0:99999"], "unknown-option", "write HOST:PORT"),
        ([*AT, "--processes", "0"], "unknown-option", "--processes is 0; it must be at least 1"),
        ([*AT, "--processes", "2", "--process", "2"], "unknown-option", "from 0 to 1"),
        ([*AT, "--distributed"], "unknown-option", "finds the other processes by itself"),
        (["--wait", "0"], "unknown-option", "at least 1 second"),
        ([*AT, "--processes", "3"], "mesh-devices", "the mesh has 8 devices, and 3 processes"),
        (["--proceses", "2"], "unknown-option", 'did you mean "--processes"'),
    ],
)
def test_wrong_options_of_processes_are_named(argv, code, said):
    with pytest.raises(SbpError) as caught:
        parse_args(argv)
    assert caught.value.code == code and said in caught.value.message


def test_options_name_the_processes():
    run = parse_args([*AT, "--processes", "4", "--process", "3", "--wait", "9"])
    assert run.hosts == Hosts(coordinator="host0:1234", processes=4, process=3, wait=9)
    assert parse_args([]).hosts == Hosts()


def test_a_coordinator_that_does_not_answer_is_named():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    options = f"--preset tiny-test --coordinator {address} --processes 2 --process 1 --wait 1"
    ended = subprocess.run(
        [sys.executable, "-m", "examples.gshard.train", *options.split()],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 2
    assert ended.stderr.startswith(
        f"error[processes-differ]: process 1 of 2 waited 1 seconds for the others at {address}"
    )


def test_options_that_differ_between_processes_are_named():
    first = {"train": {"seed": 1, "steps": 5, "data": "/a/text.tsv"}, "run": {"evaluate": True}}
    other = {"train": {"seed": 1, "steps": 6, "data": "/b/text.tsv"}, "run": {"evaluate": False}}
    assert between_processes(first, first) == []
    assert between_processes(first, other) == [
        "train.steps: 5 in process 0, 6 in this one",
        "run.evaluate: True in process 0, False in this one",
    ]
