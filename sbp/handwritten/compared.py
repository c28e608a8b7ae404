"""Comparisons in words, and where a program stops computing the values of a plain function."""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from sbp.errors import Diagnostic, Label, Span, listed
from sbp.handwritten.arguments import result_text
from sbp.handwritten.emulation import (
    TOLERANCE,
    Ran,
    are_equal,
    bodies,
    differ,
    factor_of,
    regions_of,
)
from sbp.handwritten.measured import made_up
from sbp.handwritten.one_device import ComparedRun
from sbp.machine.mesh import MeshSpec
from sbp.source.reader import users_span
from sbp.trace.collectives import AXIS_INDEX, KINDS, SENDING, names_of
from sbp.trace.graph import LOOPS, Node
from sbp.types import B, P, Split

DIFFERS = "differs-on-one-device"


_UP_TO = f", to within {TOLERANCE:g} of the largest element"


def run_text(run: ComparedRun) -> str:
    """What a comparison came to, as a sentence."""
    where = f"with one device on mesh axis `{run.mesh_axis}`"
    if run.plain:
        if run.apart:
            return f"sbp ran the program and `{run.plain}` on {run.values}"
        same = f"the program computes the results of `{run.plain}`{_UP_TO}"
        return f"{same}; sbp ran both on {run.values}{_zeros(run)}"
    if run.untried:
        return f"sbp did not compare the program with a run {where}, because {run.untried}"
    if run.lost or not run.apart:
        counts = f" if {listed(f'`{n}`' for n in run.counts)} counts devices" * bool(run.counts)
        lost = f", but {_lost(run)}" if run.lost else ""
        same = f"the program computes the same results{counts}{_UP_TO}"
        return f"{where}, {same}: {_how(run)}{lost}{_zeros(run)}"
    text = f"{where}, the program computes other values for {_results(run, run.apart)}: {_how(run)}"
    return "; ".join([text, *run.because])


def _how(run: ComparedRun) -> str:
    ways = "its {} stages one after the other" if run.stages else "it with {} devices and with one"
    return f"sbp ran {ways.format(run.size)}, on {run.values}"


def _zeros(run: ComparedRun) -> str:
    return f"; {_results(run, run.zero)}: zero in both runs, which hides faults" * bool(run.zero)


def _results(run: ComparedRun, numbers: tuple[int, ...]) -> str:
    paths = dict(enumerate(run.names))  # of sbp.manual, there are none
    named = ", ".join(result_text(i, paths.get(i, "")) for i in numbers)
    return f"result{'s' if len(numbers) > 1 else ''} {named}"


def _lost(run: ComparedRun) -> str:
    """That a part of some results is made of constants."""
    return f"a slice along dim 0 of {_results(run, run.lost)} is the same for all arguments"


def plain_diagnostic(
    run: ComparedRun, left_at: Sequence[tuple[Node, float]], ends: Sequence[Node]
) -> Diagnostic:
    """A comparison with a plain function that shows a fault, in words.

    Arguments:
      run: the comparison.
      left_at: where the program leaves the plain function, each with the factor of its value.
      ends: operations at which types end. They are marked if no value has a factor.
    """
    whole = f"a value of `{run.plain}`"
    left = f"its operands make up values of `{run.plain}`, its result does not"
    labels = labels_of(
        (n, left if k == 1 else f"{k:g} times {whole}" if k > 1 else f"1/{1 / k:g} of {whole}")
        for n, k in left_at
    )
    return Diagnostic(
        code=DIFFERS,
        severity="error",
        title=f"{_results(run, run.apart)} {'are' if len(run.apart) > 1 else 'is'} not as in"
        f" `{run.plain}`",
        labels=labels if any(k != 1 for _, k in left_at) else _end_labels(ends) or labels,
        notes=(run_text(run),),
    )


def run_diagnostic(run: ComparedRun, ends: Sequence[Node]) -> Diagnostic | None:
    """A comparison that shows a fault, or did not take place, in words; None for any other.

    Arguments:
      run: the comparison.
      ends: operations at which types end.
    """
    axis = f"mesh axis `{run.mesh_axis}`"
    if run.untried:
        return Diagnostic(
            code="not-analysed",
            severity="note" if run.refused else "warning",
            title=f"sbp did not check the program on {axis}: {run.untried}",
        )
    if not run.apart:
        return None
    title = (
        f"{_results(run, run.apart)} {'change' if len(run.apart) > 1 else 'changes'} when {axis}"
        " has one device"
    )
    if run.because:
        return Diagnostic(
            code=DIFFERS,
            severity="note",
            title=f"{title}; you may intend this: {'; '.join(run.because)}",
            notes=("to check it, pass a plain function as `against`",),
        )
    labels = _end_labels(ends)
    untyped = f"the marked values have no type on {axis}; " if labels else ""
    return Diagnostic(
        code=DIFFERS,
        severity="warning",
        title=_lost(run) if run.lost else title,
        labels=labels,
        notes=(
            run_text(run),
            f"{untyped}look for a wrong neighbor, owner, offset, factor or number of steps, or for"
            " an operation that only some devices are meant to run",
        ),
    )


def numbers_note(numbers: Iterable[str]) -> str:
    """That some numbers may count devices."""
    return (
        f"the program may be right: if {' or '.join(f'`{n}`' for n in numbers)} means the number of"
        " devices, write lax.axis_size instead, so that sbp knows"
    )


def _end_labels(ends: Sequence[Node]) -> tuple[Label, ...]:
    """Labels on operations at which types end. Values from other devices tell most."""
    sent = [(n, "from another device") for n in ends if KINDS.get(n.op) in SENDING]
    texts = {AXIS_INDEX: "depends on the device"}
    others = [
        (n, texts.get(n.op, "from other devices" if n.op in KINDS else "not as with one device"))
        for n in ends
        if KINDS.get(n.op) not in SENDING
    ]
    return labels_of([*sent, *others])


def labels_of(texts: Iterable[tuple[Node, str]]) -> tuple[Label, ...]:
    """Labels on the user's lines of some operations, the first one as the primary one."""
    found = dict[Span, str]()
    for node, text in texts:
        if (span := users_span(node)) is not None:
            found.setdefault(span, text)
    return tuple(
        Label(span=span, text=text, primary=i == 0) for i, (span, text) in enumerate(found.items())
    )


# ---- places ------------------------------------------------------------------------------------


def joining(node: Node, mesh_axis: str) -> list[Node]:
    """The collectives over a mesh axis in the branches of a `cond`; empty for other operations."""
    inner = (n for g in node.regions for n in g.walk() if n.op in KINDS)
    branches = node.op not in LOOPS
    return [n for n in inner if branches and mesh_axis in names_of(n)]


def diverging(ran: Ran, mesh: MeshSpec) -> Iterator[Diagnostic]:
    """Collectives in branches that only some of the devices take.

    Arguments:
      ran: a run of the program that kept every value.
      mesh: its mesh.
    """
    for node, (k, name) in itertools.product(bodies(ran.graph), enumerate(mesh.names)):
        found, choice = joining(node, name), node.inputs[:1]
        taken = [ran.values[v] for v in choice if isinstance(v, int) and v in ran.values]
        if found and not all(are_equal(np.moveaxis(x, k, 0)) for x in taken):
            waiting = ((n, "it waits for all devices") for n in found)
            yield Diagnostic(
                code="wrong-placement",
                severity="error",
                title=(
                    f"only some devices along mesh axis `{name}` run a collective, so the program"
                    " may not end"
                ),
                labels=labels_of([*waiting, (node, "the devices take different branches")]),
                notes=("run it on all devices, before the branches or after them",),
            )


def first_unknown(ran: Ran, want: Ran, sizes: Sequence[int]) -> list[tuple[Node, float]]:
    """Where a program leaves the plain function: the operations on the way to wrong results that
    make up a multiple of a value of the plain function, each with the factor. If there are none,
    the last operations whose operands make up values of the plain function, though their own value
    does not; these have the factor 1.0.

    Arguments:
      ran: a run of the program that kept every value.
      want: such a run of the plain function.
      sizes: the sizes of the mesh axes.
    """
    by_shape = defaultdict[tuple[int, ...], list[np.ndarray]](list)
    for x in itertools.chain(want.values.values(), want.results):
        by_shape[x.shape].append(x)
    # Other factors, such as a learning rate, do not come from the number of devices.
    counts = {math.prod(p) for p in itertools.product(*([1, n, n * n] for n in sizes))}
    found = ((v, _factor(parts, len(sizes), by_shape)) for v, parts in ran.values.items())
    factors = {v: k if k and round(max(k, 1 / k)) in counts else None for v, k in found}
    ends = dict[int, tuple[Node, float]]()
    for region in regions_of(ran.graph):
        body = region.params["body"]
        constants = set[int]()
        for node in body.nodes:
            if all(o in constants for o in node.inputs if isinstance(o, int)):
                constants |= {*node.outputs}
        known = {*body.inputs} | constants | {v for v, factor in factors.items() if factor}
        wrong = {v for v in body.outputs if factors.get(v) != 1.0}
        for node in reversed(body.nodes):
            operands = {v for v in node.inputs if isinstance(v, int)}
            if made := wrong & {*node.outputs}:
                scaled = {v for v in operands if factors.get(v) not in (None, 1.0)}
                wrong |= scaled | (set() if made <= known else operands - known)
                if made <= known or (operands <= known and not scaled):
                    ends[node.id] = node, max(factors.get(v) or 1.0 for v in made)
    scaled = [end for end in ends.values() if end[1] != 1.0]
    return (scaled or [*ends.values()])[::-1]


def _factor(
    parts: np.ndarray, axes: int, values: Mapping[tuple[int, ...], Sequence[np.ndarray]]
) -> float | None:
    """The factor by which a value is a multiple of one of several values: 1.0 if there is one, or
    else the whole number or inverse that is nearest to 1. None if it is no such multiple."""
    pairs = [(x, y) for x in _wholes(parts, axes) for y in values.get(x.shape, ())]
    if any(not differ(x, y) for x, y in pairs):
        return 1.0
    # Of equal numbers, each is a multiple of the other.
    if not jnp.issubdtype(parts.dtype, jnp.inexact) or len(np.unique(abs(parts))) < 2:
        return None
    factors = filter(None, itertools.starmap(factor_of, pairs))
    sizes = ((max(k, 1 / k), k) for k in map(abs, factors))
    whole = ((size, k) for size, k in sizes if abs(size - round(size)) < TOLERANCE)
    return min(whole, key=lambda pair: pair[0], default=(1.0, None))[1]


def _wholes(parts: np.ndarray, axes: int) -> Iterator[np.ndarray]:
    """What parts make up, as copies, summands or shards, if their first dims are mesh axes."""
    if not axes:
        yield parts
    for atom, x in made_up(np.moveaxis(parts, axes - 1, 0), axes - 1) if axes else ():
        if atom in (B, P) or isinstance(atom, Split):
            yield from _wholes(np.asarray(x, parts.dtype), axes - 1)
        if atom == B:
            return
