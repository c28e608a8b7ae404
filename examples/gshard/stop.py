"""The signals that end a program: those that are noted, and the next one, which ends it at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SHOW_CURSOR = "\x1b[?25h"


class StopSignal:
    """While active, SIGINT and SIGTERM end the process at once, with a line that says what is kept;
    or they are first noted, so that the step can be saved.

    Python runs its handlers between two of its own instructions, so not while XLA compiles or
    computes. A thread reads the signals from a pipe, to which the system's handler writes them, and
    that handler runs at any time.

    Attributes:
      signal: the signal that was noted last, 0 for none.
    """

    def __init__(self, kept: Callable[[], str], asked: Callable[[], None] | None = None) -> None:
        """Signals in one place of a program; those of a place within it come first.

        Arguments:
          kept: gives what to say when the process ends at once.
          asked: is called in the thread when the first signal comes, which is then noted; None
            where the first one ends the process.
        """
        self.signal = 0
        self._kept, self._asked = kept, asked

    def __enter__(self) -> StopSignal:
        read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._thread = threading.Thread(target=self._watch, args=(read,), daemon=True)
        self._thread.start()
        self._old_fd = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._old = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_fd)
        os.close(self._write)
        self._thread.join()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = number

    def _watch(self, read: int) -> None:
        asked = self._asked
        while byte := os.read(read, 1):
            if byte[0] not in _SIGNALS:
                continue
            if asked is None:
                self._end(byte[0])
            else:
                asked()
                asked = None
        os.close(read)

    def _end(self, number: int) -> None:
        """End the process without a word to the other threads, which may be in XLA or hold locks of
        the console. Nothing that a run writes is lost or left in part by that."""
        if sys.stdout.isatty():
            os.write(1, _SHOW_CURSOR.encode())
        os.write(2, f"\ninterrupted at once: {self._kept()}\n".encode())
        os._exit(128 + number)
