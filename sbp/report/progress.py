"""Progress of work that takes seconds, in a terminal or a notebook."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


@contextlib.contextmanager
def counting_down(what: str) -> Iterator[Callable[[int], None]]:
    """Shows a bar until the work is done. Yields a function that takes how many steps are left,
    before each step.

    Arguments:
      what: the steps, such as "plans".
    """
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, TimeElapsedColumn(), transient=True) as shown:
        task = shown.add_task(what, total=None)

        def left(steps: int) -> None:
            total = shown.tasks[task].total or steps
            shown.update(task, total=total, completed=max(0, total - steps))

        yield left
