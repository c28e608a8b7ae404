"""Compares a program with the same program on one device of a mesh axis, by running both.

The types of a program say what its values are on each mesh axis. A value without a reading, such as
a block on its way round a ring, has none. What depends on it is compared instead: a program that is
written for any number of devices computes on one what it computes on many. Both run without
devices, on the program's own arguments where these are arrays and on random values elsewhere.

Some right programs compute another value there: each device draws its own numbers, ranks its own
elements, or has a part of its own to play. `ComparedRun.because` has what shows that.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from sbp.errors import SbpInternalError
from sbp.shardmap.emulation import FAILURES, differ, not_emulated, reason_of
from sbp.shardmap.written_sizes import WrittenSizes

NUMBERS = 3
"""Variables whose numbers are read in both ways, as a count of devices and as another number. Their
combinations are tried; a program with more is not judged."""

SLICES = 16
"""Slices of an operand that are changed one by one, to see which slices of a result they reach."""

Run = Callable[[Sequence[Any]], list[np.ndarray]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRun:
    """A comparison of a program with the same program on one device of a mesh axis.

    Arguments:
      mesh_axis: the mesh axis.
      size: its size.
      apart: positions of the program's results that differ, as leaves.
      untried: why it was not compared; empty where it was.
      because: what shows that a difference may be meant; empty where nothing does.
      given: whether all values are the program's own arguments.
      stages: whether it was compared with its stages, one after the other.
      lost: positions of results of which a slice along the first dim depends on no argument, where
          the results are the same and the program sends values from device to device. Of stages,
          such a result counts as one that differs: each takes what the one before returns.
    """

    mesh_axis: str
    size: int
    apart: tuple[int, ...] = ()
    untried: str = ""
    because: tuple[str, ...] = ()
    given: bool = True
    stages: bool = False
    lost: tuple[int, ...] = ()

    @property
    def wrong(self) -> bool:
        """Whether the results differ, and nothing shows that this may be meant."""
        return bool(self.apart) and not self.because


class NotOnOneDevice(ValueError):
    """The program cannot be traced on one device of the axis."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """A way to read a program on one device.

    Arguments:
      names: variables of the user's code whose numbers are read as counts of devices.
      chained: whether a region with one stage for each device becomes regions with one stage, one
          after the other.
    """

    names: tuple[str, ...] = ()
    chained: bool = False


# ---- attempts -----------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class OneDeviceComparison:
    """A comparison in the making.

    Arguments:
      run: runs the program on the mesh.
      alone: makes a function that runs it on one device of the axis.
      written: the sizes that the functions of its regions have from outside; complete after `alone`
          was called once.
      values: the arguments of both functions.
      given: whether these are the program's own arguments.
    """

    run: Run
    alone: Callable[[Attempt], Run]
    written: WrittenSizes
    values: Sequence[Any]
    given: bool

    def result(
        self,
        apart: tuple[int, ...] = (),
        *,
        untried: str = "",
        because: Iterable[str] = (),
        stages: bool = False,
        lost: tuple[int, ...] = (),
    ) -> ComparedRun:
        axis = self.written.axis
        return ComparedRun(
            mesh_axis=axis.name,
            size=axis.size,
            apart=apart,
            untried=untried,
            because=tuple(because),
            given=self.given,
            stages=stages,
            lost=lost,
        )

    def made(self, permutes: bool, meant: Sequence[str]) -> ComparedRun:
        """The result of the first attempt that computes the same; of all attempts, if none does.

        Arguments:
          permutes: whether a region sends values from device to device, as a pipeline does.
          meant: what shows that a difference may be meant.
        """
        try:
            got = self.run(self.values)
        except SbpInternalError:
            raise
        except FAILURES as error:  # of `vmap`; the report says it
            return self.result(untried=not_emulated(error))
        failed: dict[Attempt, str] = {}
        apart: dict[Attempt, tuple[int, ...]] = {}
        because = set(meant)
        for attempt in self.attempts(permutes):
            try:
                alone = self.alone(attempt)
                want = alone(self.values)
            except SbpInternalError:
                raise
            except FAILURES as error:  # of code that is not written for one device; likewise
                failed[attempt] = reason_of(error)
                continue
            pairs = list(zip(got, want, strict=True))
            differs = tuple(i for i, (x, y) in enumerate(pairs) if _apart(x, y))
            if not differs:
                lost = self.unreached() if permutes else ()
                wrong = lost if attempt.chained else ()
                return self.result(wrong, stages=attempt.chained, lost=lost)
            apart[attempt] = differs
            if any(x.shape != y.shape for x, y in pairs):
                because.add("the shape of its result depends on the number of devices")
            elif attempt.chained and not all(_multiple(*pairs[i]) for i in differs):
                reached = zip(self.reaches(self.run), self.reaches(alone), strict=True)
                if all((x == y).all() for x, y in reached):
                    because.add("its stages may differ from one another")
        if not apart:
            first = next(iter(failed.values()))
            return self.result(untried=f"it does not run there: {first}")
        return self.judged(apart, failed, because)

    def attempts(self, permutes: bool) -> Iterator[Attempt]:
        """Attempts, the simplest first. The numbers that may count devices are known after it."""
        yield Attempt()
        names = sorted(self.written.numbers)
        chosen = [
            c
            for k in range(len(names), 0, -1)
            for c in itertools.combinations(names, k)
            if len(names) <= NUMBERS
        ]
        yield from (Attempt(c) for c in chosen)
        if permutes:
            yield Attempt(chained=True)
            yield from (Attempt(c, chained=True) for c in chosen)

    def judged(
        self,
        apart: dict[Attempt, tuple[int, ...]],
        failed: dict[Attempt, str],
        because: set[str],
    ) -> ComparedRun:
        """The result of attempts of which none computes the same."""
        written, chained = self.written, any(a.chained for a in apart)
        because |= {f"{x} may stand for the number of devices" for x in written.fixed}
        if len(written.numbers) > NUMBERS:
            because.add("many of its numbers may stand for the number of devices")
        stuck = {n for a in failed if a.names and a.chained == chained for n in a.names}
        if stuck:
            listed = ", ".join(f"`{n}`" for n in sorted(stuck))
            because.add(f"{listed} may stand for the number of devices, or follow from it")
        last = [a for a in apart if a.chained == chained][-1]
        return self.result(apart[last], because=sorted(because), stages=chained)

    def reaches(self, run: Run) -> list[np.ndarray]:
        """For each result, which of its slices along the first dim change with which slice of which
        argument: a row for each slice of an argument."""
        before = run(self.values)
        found: list[list[np.ndarray]] = [[] for _ in before]
        for i, x in enumerate(map(np.asarray, self.values)):
            if not _sliced(x):
                continue
            for k in range(x.shape[0]):
                other = x.copy()
                other[k] = np.random.default_rng([i, k]).standard_normal(x.shape[1:])
                after = run([*self.values[:i], other, *self.values[i + 1 :]])
                for rows, a, b in zip(found, before, after, strict=True):
                    rows.append(_changed(a, b))
        return [np.asarray(rows) for rows in found]

    def unreached(self) -> tuple[int, ...]:
        """Results with a slice that depends on no argument; none where some argument cannot be
        changed slice by slice."""
        if not all(map(_sliced, map(np.asarray, self.values))):
            return ()
        every = enumerate(self.reaches(self.run))
        return tuple(i for i, x in every if x.size and not x.any(0).all())


def _sliced(x: np.ndarray) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating) and x.ndim > 0 and x.shape[0] <= SLICES


def _changed(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    other = np.atleast_1d(np.asarray(before != after))
    return np.asarray(other.reshape(len(other), -1).any(1))


def _multiple(got: np.ndarray, want: np.ndarray) -> bool:
    """Whether a value is another one times a number."""
    most = int(np.argmax(np.abs(want))) if want.size else 0
    factor = got.flat[most] / want.flat[most] if want.size and want.flat[most] else np.nan
    return bool(np.isfinite(factor)) and not differ(got, np.asarray(want * factor, want.dtype))


def _apart(got: np.ndarray, want: np.ndarray) -> bool:
    return got.shape != want.shape or differ(got, want)
