"""Python's garbage collector while a program is traced and planned."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

YOUNG = 50_000
"""Number of new objects after which the collector runs; Python's default is 700 (2,000 from 3.12
on)."""

_lock = threading.Lock()
_inside = 0
_before: tuple[int, int, int] = (0, 0, 0)


@contextlib.contextmanager
def collecting_less() -> Iterator[None]:
    """Makes the garbage collector run less often inside; also a decorator.

    Graphs, rows and costs are millions of small objects without cycles that stay alive, and
    repeated collections would take a third of the planning time. Several threads may be inside; the
    last one to leave restores the threshold.

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
