"""Signals that end a program, at a moment when no Python runs in its main thread."""

import os
import signal
import subprocess
import sys

import pytest

from examples.gshard.train import StopSignal

ENDLESS = """
import sys, jax
from examples.gshard.train import StopSignal
say = lambda line: print(line, flush=True)
asked = (lambda: say("asked")) if sys.argv[1] == "asks" else None
endless = jax.jit(lambda x: jax.lax.while_loop(lambda x: x >= 0, lambda x: x * 0, x))
with StopSignal(lambda: "step 4 is kept", asked):
    say("in XLA")
    jax.block_until_ready(endless(1.0))
"""


@pytest.mark.parametrize("number, asks", [(signal.SIGINT, True), (signal.SIGTERM, False)])
def test_a_process_ends_at_once_while_xla_is_busy_for_ever(number, asks):
    """The second signal does it, or the first where none is noted."""
    command = [sys.executable, "-c", ENDLESS, "asks" if asks else "ends"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "in XLA\n"
        process.send_signal(number)
        if asks:
            assert process.stdout.readline() == "asked\n"
            process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (128 + number, "")
    assert err == "\ninterrupted at once: step 4 is kept\n"


def test_the_first_signal_is_noted_and_handlers_come_back():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    said = []
    with StopSignal(lambda: "", lambda: said.append("asked")) as stop:
        assert stop.signal == 0
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.signal == signal.SIGTERM
    assert said == ["asked"]  # the thread has ended
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    assert signal.set_wakeup_fd(-1) == -1
