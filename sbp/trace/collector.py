"""Python's garbage collector while a program is traced and planned."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

YOUNG = 50_000
"""Objects that are made before the collector looks; Python's own figure is 700 (2,000 from 3.12
on)."""

_lock = threading.Lock()
_inside = 0
_before: tuple[int, int, int] = (0, 0, 0)


@contextlib.contextmanager
def collecting_less() -> Iterator[None]:
    """The collector comes less often inside, also as a decorator.

    Graphs, rows and costs are millions of small objects that live on and hold no cycles; to look
    through them again and again takes a third of the time of planning. Threads may be inside at
    once; the last that leaves puts back what was.

    >>> with collecting_less():
    ...     gc.get_threshold()[0] >= YOUNG
    True
    """
    global _inside, _before
    with _lock:
        if _inside == 0:
            _before = gc.get_threshold()
            if 0 < _before[0] < YOUNG:  # 0: it is off
                gc.set_threshold(YOUNG, *_before[1:])
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                gc.set_threshold(*_before)
