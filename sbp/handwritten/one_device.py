"""Compares a program with the same program on one device of a mesh axis, by running both.

A program that is written for any number of devices computes on one what it computes on many. Both
run without devices, on the program's own arguments where these are arrays and on random values
elsewhere.

Some right programs compute another value there: each device ranks its own elements, or has a part
of its own to play. `ComparedRun.because` has what shows that.
"""

import contextlib
import copy
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from sbp.errors import SbpInternalError
from sbp.handwritten import arguments
from sbp.handwritten.emulation import (
    FAILURES,
    TOLERANCE,
    Ran,
    are_equal,
    atom_of,
    bodies,
    claims,
    differ,
    factor_of,
    program_run,
    reason_of,
    regions_of,
    splits_jointly,
    too_large,
    with_folded,
)
from sbp.handwritten.meant import ONE_EACH, why_meant
from sbp.handwritten.measured import (
    Body,
    Types,
    is_good,
    measure_types,
)
from sbp.handwritten.written_sizes import (
    Attempt,
    AxisInCode,
    WrittenSizes,
    changed_numbers,
    checking_vma,
    fixed_numbers,
    longer_counts,
    renumber,
    sizes_of,
    trace_on_one_device,
)
from sbp.machine.mesh import MeshSpec
from sbp.signatures import traits_of
from sbp.trace.graph import Graph
from sbp.types import B

NUMBERS = 3
"""Variables whose numbers are read in both ways, as a count of devices and as another number. Their
combinations are tried; a program with more is not judged."""

DRAWS = 16
"""Draws of the arguments that are tried until no result is zero, as counts of hits often are."""

SLICES = 16
"""Slices of an operand that are changed one by one, to see which slices of a result they reach."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRun:
    """A comparison of a program with the same program on one device of a mesh axis, or with a plain
    function.

    Arguments:
      mesh_axis: the mesh axis; empty for a plain function.
      size: its size; for a plain function, the number of devices.
      apart: positions of the program's results that differ, as leaves.
      untried: why it was not compared; empty where it was.
      refused: whether that is because the function does not run on one device.
      because: what shows that a difference may be meant; empty where nothing does.
      values: the values that the program ran on, in words.
      reordered: whether the results differ only on reordered elements of the arguments.
      stages: whether it was compared with its stages, one after the other.
      lost: positions of equal results with a slice along the first dim that no argument changes,
          if devices send values. If the program ran as stages, such results count as different.
      counts: numbers of the program that are read as numbers of devices.
      stuck: numbers with which the program, if they count devices, does not run on one device.
      zero: positions of results that are zero in both runs.
      plain: the name of the plain function.
      names: the paths of the program's results.
    """

    mesh_axis: str
    size: int
    apart: tuple[int, ...] = ()
    untried: str = ""
    refused: bool = False
    because: tuple[str, ...] = ()
    values: str = ""
    reordered: bool = False
    stages: bool = False
    lost: tuple[int, ...] = ()
    counts: tuple[str, ...] = ()
    stuck: tuple[str, ...] = ()
    zero: tuple[int, ...] = ()
    plain: str = ""
    names: tuple[str, ...] = ()

    @property
    def wrong(self) -> bool:
        """Whether the results differ, and nothing shows that this may be meant."""
        return bool(self.apart) and not self.because


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Compared:
    """A comparison with what it ran.

    Arguments:
      run: what it came to.
      alone: how the program was read on one device.
      types: the types of the values of all regions, where results differ: in all trips of each
          scan, in the first trip, and in the second one.
      powers: by the position of a result, 1 if it is too large by the size of the axis, and -1 if
          it is too small by it.
      uneven: whether a result differs between devices that the program says to be equal.
      meant: whether the program shows that a difference may be meant.
      excused: the results of regions whose difference may be meant.
      one_each: the results of regions that have one element for each device, whatever their number.
      placed: the ids of operations that rank the elements of each device to place them.
      changed: by the id of an operation, a number in it that is another one with one device.
      longer: the ids of operations that count further than with one device, up to its size.
      numbers: by the id of an operation, a number in it that may count devices.
      wants: the runs with one device, each on both sets of values; the second one, where axes split
          a dim jointly, has its elements in the order of shards.
    """

    run: ComparedRun
    alone: Attempt = field(default_factory=Attempt)
    types: tuple[Types, ...] = ({},)
    powers: Mapping[int, int] = field(default_factory=dict)
    uneven: bool = False
    meant: bool = False
    excused: frozenset[int] = frozenset()
    one_each: frozenset[int] = frozenset()
    placed: frozenset[int] = frozenset()
    changed: Mapping[int, str] = field(default_factory=dict)
    longer: frozenset[int] = frozenset()
    numbers: Mapping[int, str] = field(default_factory=dict)
    wants: tuple[Sequence[Ran], ...] = ()

    @property
    def wrong(self) -> bool:
        """Whether the program is wrong on the mesh axis, or may be meant to differ."""
        return self.uneven or bool(self.run.apart)


# ---- attempts -----------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True, eq=False)
class Comparisons:
    """A program with its comparisons on all mesh axes.

    Arguments:
      graph: the program.
      fn: its function.
      traced: traces a function as the program.
      axes: the sizes that its functions have from outside, by the mesh axis.
      mesh: its mesh.
      leaves: its arguments, as they are given.
      spread: whether random numbers are added to some of them.
      reordered: whether the elements of each argument were put in another order.
      values: values of its arguments.
      poisoned: whether these have numbers that are not finite.
      others: other values of its arguments.
      run: runs it.
      got: its run on the mesh.
      uneven: results that out_specs claim to be equal and are not: region's id, position, axis.
      compared: the comparisons.
      against: the plain function that says what is right, if there is one.
      plain: the comparison with this function.
      wanted: right results on both sets of values.
    """

    graph: Graph
    fn: Any
    traced: Callable[[Any], Graph]
    axes: dict[str, WrittenSizes]
    mesh: MeshSpec
    leaves: Sequence[Any]
    spread: bool
    reordered: bool = False
    values: Sequence[Any] = ()
    poisoned: bool = False
    others: Sequence[Any] = ()
    run: Callable[[Sequence[Any]], Ran] = field(init=False)
    got: Ran = field(init=False)
    uneven: frozenset[tuple[Any, ...]] = frozenset()
    compared: list[Compared] = field(default_factory=list)
    against: Graph | None = None
    plain: ComparedRun | None = None
    wanted: list[Ran] | None = None

    def text(self) -> str:
        """The values in words."""
        return (
            "its arguments"
            + ", with random numbers added to equal elements" * self.spread
            + ", with the elements of each array in another order" * self.reordered
            if all(map(arguments.is_value, self.leaves))
            else "random values"
        )

    def without_trial(self, reason: str) -> "Comparisons":
        """The comparisons of the program, all of them left out for a reason."""
        self.compared = [
            Compared(run=ComparedRun(mesh_axis=name, size=written.axis.size, untried=reason))
            for name, written in self.axes.items()
        ]
        return self

    def compare_all(
        self, meant: Iterable[str] | None = None, against: tuple[str, Graph] | None = None
    ) -> "Comparisons":
        """Compares the program on all mesh axes.

        Arguments:
          meant: what shows that a difference may be meant; None for a program whose stages may be
              run one after the other.
          against: a plain function that says what is right: its name, and its program. If the
              results are equal, the program is not compared with one device.
        """
        if reason := too_large(self.graph):
            return self.without_trial(reason)
        values, self.others = (arguments.values_of(self.leaves, seed) for seed in (0, 1))
        poisoned = arguments.poison(self.graph, values)
        self.run, reasons = program_run(self.graph), tuple(meant or ())
        for self.values in (values, poisoned):
            self.poisoned = self.values is not values
            if reason := self.run_first():
                return self.without_trial(reason)
            self.uneven = uneven(self.got, self.mesh)
            try:
                equal = against is not None and not self.compare_with(*against).apart
            except FAILURES as error:  # of the plain function
                return self.without_trial(f"sbp cannot run the plain function ({reason_of(error)})")
            self.compared = [
                self.compare(
                    written,
                    meant is None and bool(written.axis.permutations),
                    [i for _, i, a in self.uneven if a == name],
                    reasons,
                )
                for name, written in (self.axes.items() if self.uneven or not equal else ())
            ]
            if (
                (against is not None and not equal)
                or any(c.wrong for c in self.compared)
                or not any(traits_of(n.op).numpy is np.isfinite for n in bodies(self.graph))
            ):
                break
        return self

    def run_first(self) -> str:
        """Runs the program on the mesh. If its results are zero or not finite, sbp tries other
        values. Returns the reason why it cannot run; empty if it can."""
        is_given = [*map(arguments.is_value, self.leaves)]
        try:
            self.got = self.run(self.values)
            if self.poisoned:
                return ""
            if not self.got.is_finite:  # a root of random values
                exact = [arguments.values_of(self.leaves, k, spread=False) for k in (0, 1)]
                if not all(is_given):
                    exact = [
                        [
                            abs(x) + 0.1 if jnp.issubdtype(x.dtype, jnp.floating) else x
                            for x in values
                        ]
                        for values in exact
                    ]
                self.values, self.others = exact
                self.spread = False
                self.got = self.run(self.values)
            zero = not any(is_given) and not self.got.is_telling
            for seed in range(2, DRAWS) if zero else ():
                other = arguments.values_of(self.leaves, seed)
                if (got := self.run(other)).is_telling:
                    self.values, self.got = other, got
                    break
        except SbpInternalError:
            raise
        except FAILURES as error:  # of `vmap`
            return f"sbp cannot run it without devices ({reason_of(error)})"
        return ""

    def wrong_of(self, graph: Graph) -> frozenset[tuple[Any, ...]] | None:
        """The wrong results of an edited program, then its uneven results. A result is wrong if it
        differs from the same result of this program with one device on each mesh axis on which this
        program is wrong. None where the edited program does not run."""
        sets = self.values, self.others
        try:
            if self.wanted is None:
                trace = self.traced
                for c in self.compared:
                    if c.wrong and not c.run.untried:
                        trace = functools.partial(
                            trace_on_one_device,
                            trace,
                            WrittenSizes(self.axes[c.run.mesh_axis].axis),
                            c.alone,
                        )
                run = program_run(self.against or trace(self.fn))
                self.wanted = [run(values) for values in sets]
            run = self.run if graph is self.graph else program_run(graph)
            every = [run(values) for values in sets]
            wrong = frozenset(
                (i,)
                for got, wanted in zip(every, self.wanted, strict=True)
                for i in _differing(got, wanted)
            )
            return wrong.union(*(uneven(got, self.mesh) for got in every))
        except SbpInternalError:
            raise
        except FAILURES:  # of an edit: shapes that no longer fit
            return None

    def tell_apart(self, other: Callable[[Sequence[Any]], Ran]) -> tuple[Ran, tuple[int, ...]]:
        """Runs another program; returns its run, and the positions of results that differ from the
        results of this program. If none differ, both programs run on the other values. Values may
        hide a fault: the best element of each shard may be the best of all."""
        want = other(self.values)
        differs = _differing(self.got, want)
        if not differs:
            got, again = self.run(self.others), other(self.others)
            if again.is_finite and (differs := _differing(got, again)):
                self.values, self.others = self.others, self.values
                self.got, want = got, again
                self.reordered ^= any(map(arguments.is_value, self.leaves))
        return want, differs

    def compare_with(self, name: str, against: Graph) -> ComparedRun:
        """The comparison with a plain function, which says what is right from now on."""
        self.against = against
        want, differs = self.tell_apart(program_run(against))
        self.plain = ComparedRun(
            mesh_axis="",
            size=self.mesh.num_devices,
            apart=differs,
            values=self.text(),
            reordered=self.reordered,
            zero=_zero(want),
            plain=name,
            names=self.graph.output_names,
        )
        return self.plain

    def compare(
        self, written: WrittenSizes, chained: bool, uneven: Collection[int], meant: Iterable[str]
    ) -> Compared:
        """Compares the program on one mesh axis. The first attempt that computes the same results
        decides. If there is none, `judge` looks at all attempts.

        Arguments:
          written: the mesh axis, and the sizes that the program's functions have from outside;
              complete after the first trace.
          chained: whether the program may be a pipeline, which sends values from device to device.
          uneven: positions of results that differ between devices, where the program says that they
              do not.
          meant: what shows that a difference may be meant.
        """
        failed: dict[Attempt, str] = {}
        apart: dict[Attempt, tuple[tuple[int, ...], Graph, dict[int, int]]] = {}
        because, axis = set(meant), written.axis
        run = ComparedRun(
            mesh_axis=axis.name,
            size=axis.size,
            values=self.text(),
            names=self.graph.output_names,
        )
        for attempt in _attempts(written, chained):
            try:
                alone = trace_on_one_device(self.traced, written, attempt, self.fn)
                want, differs = self.tell_apart(program_run(alone))
            except SbpInternalError:
                raise
            except FAILURES as error:  # of code that is not written for one device; the report says
                failed[attempt] = reason_of(error)
                continue
            if not (self.poisoned or self.got.is_finite or want.is_finite):
                given = all(map(arguments.is_value, self.leaves))
                values = "its arguments" if given else "random values; pass arrays as arguments"
                why = f"its results are infinite or NaN on {values}"
                return Compared(run=replace(run, untried=why), uneven=bool(uneven))
            run = replace(run, values=self.text(), reordered=self.reordered)
            if not differs and not uneven:
                lost = self.find_unreached() if chained else ()
                same = replace(
                    run,
                    apart=lost if attempt.chained else (),
                    stages=attempt.chained,
                    lost=lost,
                    counts=attempt.names,
                    zero=_zero(want),
                )
                return Compared(run=same, alone=attempt)
            factors = {i: factor_of(self.got.results[i], want.results[i]) for i in differs}
            powers = {
                i: power
                for i, k in factors.items()
                for power in (1, -1)
                if k and math.isclose(k, float(axis.size) ** power, rel_tol=TOLERANCE)
            }
            apart[attempt] = differs, alone, powers
            if (
                attempt.chained
                and None in factors.values()
                and all(map(np.array_equal, self.reaches(self.graph), self.reaches(alone)))
            ):
                because.add("the stages of the pipeline may be different functions")
        if not apart:
            why = f"it raises an error with one device: {next(iter(failed.values()))}"
            return Compared(run=replace(run, untried=why, refused=True), uneven=bool(uneven))
        return self.judge(run, written, apart, failed, because, bool(uneven))

    def judge(
        self,
        run: ComparedRun,
        written: WrittenSizes,
        apart: dict[Attempt, tuple[tuple[int, ...], Graph, dict[int, int]]],
        failed: dict[Attempt, str],
        because: set[str],
        uneven: bool,
    ) -> Compared:
        """The comparison if no attempt computes the same results."""
        axis, last = written.axis, [*apart][-1]
        because |= {f"{x} may be the number of devices" for x in written.fixed}
        if len(written.numbers) > NUMBERS:
            because.add("many numbers in the program may be the number of devices")
        counts = {n for n, x in written.numbers.items() if x in (axis.size, axis.devices)}
        stuck = sorted(counts & {n for a in failed if a.chained == last.chained for n in a.names})
        named = ", ".join(f"`{n}`" for n in stuck)
        unsure = (
            {f"{named} may be the number of devices, or computed from it"} if stuck else set[str]()
        )
        if any(map(arguments.is_guessed, self.leaves)):
            unsure.add("sbp used random integers for arguments that are shapes; pass arrays")
        got = self.runs(self.graph)
        typed = [
            (*self.measured(got, alone, axis), attempt)
            for attempt, (_, alone, _) in apart.items()
            if not attempt.chained
        ]
        if not typed:  # of a pipeline that runs on one device only stage by stage
            differs, _, powers = apart[last]
            reasons = tuple(sorted(because | unsure))
            run = replace(run, apart=differs, because=reasons, stuck=tuple(stuck), stages=True)
            return Compared(run=run, alone=last, uneven=uneven, meant=bool(because), powers=powers)
        types, wants, best = max(typed, key=lambda t: sum(map(is_good, t[0].values())))
        want, alone = wants[0][0], wants[0][0].graph
        fixed = self.fixed_in(alone, axis)
        devices = {f"{n:g}" for n in (axis.size, axis.devices)}
        counts = {i for i, number in fixed.values() if number in devices}
        for chosen in () if uneven or not counts else (counts, *({i} for i in counts)):
            if not _differing(
                self.got, program_run(renumber(alone, chosen, axis.size))(self.values)
            ):
                counted = {number for i, number in fixed.values() if i in chosen}
                run = replace(run, counts=(*best.names, *sorted(counted)))
                return Compared(run=run, alone=best)
        staged = last.chained and not any(n.backward for n in bodies(self.graph))
        reasons, placed = why_meant(got[0], want, types, axis, staged=staged)
        reference = last if last.chained else best
        differs, _, powers = apart[reference]
        excused = frozenset().union(*reasons.values())
        meant, flow = bool(because), Body(self.graph, {}, "")
        own = [i for i in differs if excused.isdisjoint(flow.upstream(self.graph.outputs[i]))]
        if not own or meant:
            because |= {reason for reason, results in reasons.items() if results}
        else:
            differs = tuple(own)
        if any(x.shape != y.shape for x, y in zip(self.got.results, want.results, strict=True)):
            unsure.add("the shape of its result depends on the number of devices")
        run = replace(
            run,
            apart=differs,
            because=tuple(sorted(because | unsure)),
            stuck=tuple(stuck),
            stages=last.chained,
        )
        return Compared(
            run=run,
            alone=reference,
            powers=powers,
            types=(types, *(self.types_of(got, wants[:1], axis.name, t) for t in (0, 1))),
            uneven=uneven,
            meant=meant,
            excused=excused,
            one_each=reasons[ONE_EACH],
            placed=placed,
            changed=changed_numbers(self.graph, alone),
            longer=longer_counts(self.graph, alone),
            numbers={i: number for i, (_, number) in fixed.items()},
            wants=wants,
        )

    def fixed_in(self, alone: Graph, axis: AxisInCode) -> dict[int, tuple[int, str]]:
        """The numbers that may count devices of a mesh axis, as `fixed_numbers` gives them; `alone`
        is the program with one device."""
        fixed = fixed_numbers(self.graph, alone, axis.size, axis.lengths)
        for name, other in self.axes.items() if fixed else ():
            if name != axis.name:  # a number may be the size of that axis
                with contextlib.suppress(ValueError):
                    there = trace_on_one_device(
                        self.traced, WrittenSizes(other.axis), Attempt(), self.fn
                    )
                    changed = changed_numbers(self.graph, there)
                    fixed = {i: number for i, number in fixed.items() if i not in changed}
        return fixed

    def runs(self, graph: Graph) -> tuple[Ran, Ran]:
        """The runs of a program on both sets of values."""
        run = program_run(graph, every=True)
        return run(self.values), run(self.others)

    def measured(
        self, got: Sequence[Ran], alone: Graph, axis: AxisInCode
    ) -> tuple[Types, tuple[Sequence[Ran], ...]]:
        """The types of the values of the runs on a mesh axis, and the runs with one device that
        they are measured by; `alone` is the program with one device."""
        jointly = any(splits_jointly(region, axis.name) for region in regions_of(alone))
        graphs = [alone, *([with_folded(alone, axis.name, axis.size)] if jointly else [])]
        wants = tuple(map(self.runs, graphs))
        return self.types_of(got, wants, axis.name), wants

    def types_of(
        self,
        got: Sequence[Ran],
        wants: Sequence[Sequence[Ran]],
        name: str,
        trip: int | None = None,
    ) -> Types:
        """The types that the values have on a mesh axis in both runs: in one of them, the least
        part may be the whole by chance. `wants` are runs with one device. If a value has no meaning
        by the first of them, the next one counts."""
        position, axes = self.mesh.names.index(name), len(self.mesh.names)
        found: Types = {}
        for want in wants:
            types, *others = (
                measure_types(on_mesh, alone, position, axes, trip)
                for i, (on_mesh, alone) in enumerate(zip(got, want, strict=True))
                if i == 0 or (on_mesh.is_finite and alone.is_finite)
            )
            for other in others:
                types = {v: t & other.get(v, t) for v, t in types.items()}
            found = {v: t if is_good(t) or v not in found else found[v] for v, t in types.items()}
        return found

    @property
    def meaning(self) -> int:
        """How many values have a meaning on the mesh axes on which the program is wrong."""
        return sum(map(is_good, itertools.chain(*(c.types[0].values() for c in self.compared))))

    def of_edited(self, graph: Graph) -> "Comparisons | None":
        """The comparisons of an edited program on the mesh axes on which this program is wrong;
        None where it does not run."""
        try:
            got, other = self.runs(graph), copy.copy(self)
        except SbpInternalError:
            raise
        except FAILURES:  # of an edit: shapes that no longer fit
            return None
        other.graph, other.got, other.uneven = graph, got[0], uneven(got[0], self.mesh)
        other.compared = [
            replace(
                c,
                types=tuple(
                    self.types_of(got, wants, c.run.mesh_axis, trip)
                    for wants, trip in ((c.wants, None), (c.wants[:1], 0), (c.wants[:1], 1))
                ),
                uneven=any(name == c.run.mesh_axis for _, _, name in other.uneven),
            )
            for c in self.compared
            if c.wants
        ]
        return other

    def with_checks(self) -> "Comparisons | None":
        """The comparisons of the program with check_vma=True; None where JAX refuses that."""
        traced = checking_vma(self.traced)
        try:
            graph = traced(self.fn)
        except FAILURES:
            return None
        return compared_runs(graph, self.fn, traced, self.leaves, self.mesh).compare_all()

    def reaches(self, graph: Graph) -> list[np.ndarray]:
        """For each result, which of its slices along the first dim change with which slice of which
        argument: a row for each slice of an argument."""
        run = program_run(graph)
        before = run(self.values).results
        found: list[list[Any]] = []
        for i, x in enumerate(self.values):
            for k in range(x.shape[0]) if _has_few_slices(x) else ():
                other = x.copy()
                other[k] = np.random.default_rng([i, k]).standard_normal(x.shape[1:])
                after = run([*self.values[:i], other, *self.values[i + 1 :]]).results
                changed = (np.atleast_1d(a != b) for a, b in zip(before, after, strict=True))
                found.append([c.any(axis=tuple(range(1, c.ndim))) for c in changed])
        return [np.asarray(rows) for rows in zip(*found, strict=True)]

    def find_unreached(self) -> tuple[int, ...]:
        """Results with a slice that depends on no argument; none where some argument cannot be
        changed slice by slice."""
        if not all(map(_has_few_slices, self.values)):
            return ()
        return tuple(
            i for i, x in enumerate(self.reaches(self.graph)) if x.size and not x.any(0).all()
        )


def _attempts(written: WrittenSizes, chained: bool) -> Iterator[Attempt]:
    """Attempts, the simplest first. The numbers that may count devices are known after it."""
    yield Attempt()
    names = sorted(written.numbers)
    counts = range(len(names), 0, -1) if len(names) <= NUMBERS else ()
    chosen = [c for k in counts for c in itertools.combinations(names, k)]
    yield from map(Attempt, chosen)
    if chained:
        yield from (Attempt(c, chained=True) for c in [(), *chosen])


def _has_few_slices(x: Any) -> bool:
    """Whether a value is an array of floats, and not a key, with at most `SLICES` slices."""
    return jnp.issubdtype(x.dtype, jnp.floating) and x.ndim > 0 and x.shape[0] <= SLICES


def _zero(ran: Ran) -> tuple[int, ...]:
    """Positions of results that are zero."""
    return tuple(i for i, x in enumerate(ran.results) if x.size and not x.any())


def _differing(got: Ran, want: Ran) -> tuple[int, ...]:
    """Positions of results that differ between two runs."""
    return tuple(
        i
        for i, (x, y) in enumerate(zip(got.results, want.results, strict=True))
        if x.shape != y.shape or differ(x, y)
    )


def compared_runs(
    graph: Graph,
    fn: Any,
    traced: Callable[[Any], Graph],
    leaves: Sequence[Any],
    mesh: MeshSpec,
) -> Comparisons:
    """A program with its mesh axes, to be compared with the same program on one device of each.

    Arguments:
      graph: the program.
      fn: its function.
      traced: traces a function as the program.
      leaves: its arguments: arrays, numbers, or shapes.
      mesh: its mesh.
    """
    return Comparisons(
        graph=graph,
        fn=fn,
        traced=traced,
        axes={name: sizes_of(graph, name, mesh) for name, n in mesh.axes if n > 1},
        mesh=mesh,
        leaves=leaves,
        spread=any(map(arguments.is_flat, leaves)),
    )


def uneven(ran: Ran, mesh: MeshSpec) -> frozenset[tuple[int, int, str]]:
    """The results of regions that differ between devices and claim to be equal."""
    return frozenset(
        (node.id, i, name)
        for node, results in claims(ran.graph)
        for i in results
        if (parts := ran.values.get(node.params["body"].outputs[i])) is not None
        for axis, name in enumerate(mesh.names)
        if atom_of(node.params["out_specs"][i], name) == B
        and not are_equal(np.moveaxis(parts, axis, 0))
    )
