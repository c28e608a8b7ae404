"""Profiles of some steps of a run, for TensorBoard's profiler, xprof or Perfetto."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NamedTuple

import jax

from sbp.errors import SbpError

FOLDER = "profile"


class Window(NamedTuple):
    """The steps that are profiled.

    Attributes:
      first, last: both included.
    """

    first: int
    last: int

    @classmethod
    def parse(cls, text: str, steps: int) -> Window:
        """Read `10:15`.

        Arguments:
          text: the first and the last step.
          steps: of the run.

        Raises:
          SbpError: `unknown-option` for a text of another form, and for steps that the run does not
              have.

        >>> Window.parse("10:15", 700)
        Window(first=10, last=15)
        """
        first, _, last = text.partition(":")
        if not (first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last)):
            raise SbpError(
                f"--profile {text!r} is not of the form 10:15, the first and the last step",
                code="unknown-option",
            )
        if int(last) > steps:
            raise SbpError(
                f"--profile {text} ends behind the last step, {steps}; name earlier steps",
                code="unknown-option",
            )
        return cls(int(first), int(last))


class Profiler(AbstractContextManager["Profiler"]):
    """Profiles the steps of a window, as a context around the loop; `jax.profiler` writes into
    `<workdir>/profile`.

    Arguments:
      window: the steps; None for none.
      workdir: the folder of the run.
      done: the steps that the run has done before.

    Raises:
      SbpError: `unknown-option` where the window begins with a step that is done.
    """

    def __init__(self, window: Window | None, workdir: Path, done: int) -> None:
        if window is not None and window.first <= done:
            raise SbpError(
                f"--profile {window.first}:{window.last} begins with a step that is done; the run"
                f" goes on with step {done + 1}",
                code="unknown-option",
            )
        self._window, self._folder, self._runs = window, workdir / FOLDER, False

    def __exit__(self, *_: object) -> None:
        self._stop()

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """One step of the run, which is profiled where it is in the window."""
        window = self._window
        if window is None or not window.first <= number <= window.last:
            yield
            return
        if not self._runs:
            jax.profiler.start_trace(self._folder)
            self._runs = True
        with jax.profiler.StepTraceAnnotation("train", step_num=number):
            yield
        if number == window.last:
            self._stop()

    def _stop(self) -> None:
        if self._runs:
            self._runs = False
            jax.profiler.stop_trace()
