"""Delta debugging: the smallest program, in steps, outputs, annotations and options, that still
goes wrong in the same way.

A candidate is the program with something left out: options at their defaults, fewer outputs, an
operation replaced by one of its operands of the same shape and dtype, or cut away, its result made
an argument instead. What nothing reads any more goes with it.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from tests.fuzz.draw import data_of
from tests.fuzz.generate import NAMES
from tests.fuzz.program import Info, Input, Output, Program, Step, all_steps, pruned, renamed

SMALLER_MESHES = ((2,), (4,), (8,), (2, 4))
SECONDS = 180

Fails = Callable[[Program], bool]


def minimise(program: Program, fails: Fails, seconds: float = SECONDS) -> Program:
    """The smallest program found for which `fails` holds.

    Arguments:
      program: one that fails.
      fails: whether a candidate goes wrong in the same way.
      seconds: after which the smallest so far is returned.
    """
    end = time.monotonic() + seconds
    tried: set[Program] = {program}

    def accepted(candidate: Program) -> bool:
        candidate = pruned(candidate)
        if candidate in tried or time.monotonic() > end:
            return False
        tried.add(candidate)
        return fails(candidate)

    best = program
    while time.monotonic() < end:
        before = best
        for candidates in (_options, _outputs, _chunks, _hoists, _steps, _types):
            best = _descend(best, candidates, accepted)
        if best == before:
            break
    return best


def _descend(
    program: Program, candidates: Callable[[Program], Iterator[Program]], accepted: Fails
) -> Program:
    """Takes the first candidate that fails, and starts again from it, until none does."""
    while found := next(filter(accepted, candidates(program)), None):
        program = pruned(found)
    return program


def _options(p: Program) -> Iterator[Program]:
    """Everything plain; then one option after the other."""
    bare = replace(
        p,
        inputs=tuple(replace(v, type=None) for v in p.inputs),
        outputs=tuple(replace(o, type=None) for o in p.outputs),
        donate=(),
    )
    if bare != p:
        yield bare
    plain: dict[str, Any] = {
        "gradients": False,
        "boxing": "auto",
        "padded": False,
        "hardware": None,
        "donate": (),
    }
    for option, value in plain.items():
        if getattr(p, option) != value:
            yield replace(p, **{option: value})
    for mesh in SMALLER_MESHES:
        if (
            len(mesh) <= len(p.mesh)
            and mesh != p.mesh
            and (len(mesh) < len(p.mesh) or mesh < p.mesh)
            and not _names_axes(p, mesh)
        ):
            yield replace(p, mesh=mesh)


def _names_axes(p: Program, mesh: tuple[int, ...]) -> bool:
    """Whether the program names an axis that `mesh` would not have."""
    gone = ("x", "y", "z")[len(mesh) : len(p.mesh)]
    texts = [
        *(v.type or "" for v in p.inputs),
        *(o.type or "" for o in p.outputs),
        *(s.text for s in all_steps(p.steps) if s.op in NAMES),
    ]
    return any(
        f"{axis}:" in t or f"{axis}=" in t or f"'{axis}'" in t for axis in gone for t in texts
    )


def _outputs(p: Program) -> Iterator[Program]:
    """One output alone; then without one."""
    if len(p.outputs) > 1:
        for o in p.outputs:
            yield replace(p, outputs=(o,))
        for i in range(len(p.outputs)):
            yield replace(p, outputs=p.outputs[:i] + p.outputs[i + 1 :])


def _types(p: Program) -> Iterator[Program]:
    """Leaves out one type at the boundary."""
    for side in ("inputs", "outputs"):
        values = getattr(p, side)
        for i, v in enumerate(values):
            if v.type:
                yield replace(p, **{side: (*values[:i], replace(v, type=None), *values[i + 1 :])})


def _chunks(p: Program) -> Iterator[Program]:
    """The first half, quarter, eighth .. of the steps cut away: what they made becomes
    arguments."""
    size = len(p.steps) // 2
    while size >= 2:
        for start in range(0, len(p.steps), size):
            yield _cut(p, p.steps[start : start + size])
        size //= 2


def _steps(p: Program) -> Iterator[Program]:
    """One step, also inside blocks: bypassed or cut away."""
    known = _infos(p)
    for step in reversed(list(all_steps(p.steps))):
        for target, info in zip(step.targets, step.infos, strict=True):
            for _, name in step.args:
                other = known.get(name)
                if other is not None and (other.shape, other.dtype) == (info.shape, info.dtype):
                    yield _renamed(_without(p, (step,)), {target: name})
                    break
        yield _cut(p, (step,))


def _hoists(p: Program) -> Iterator[Program]:
    """The steps of a function in place of what calls it; its parameters become arguments."""
    for number, step in enumerate(p.steps):
        for _, block in step.blocks:
            inner = _cut(p, (step,))
            arguments = tuple(Input(n, i, data_of(i, int(n[1:]))) for n, i in block.params)
            made = [
                (t, i)
                for s in block.steps
                for t, i in zip(s.targets, s.infos, strict=True)
                if i.kind != "r"
            ]
            steps = (*p.steps[:number], *block.steps, *p.steps[number + 1 :])
            outputs = tuple(o for o in p.outputs if o.name not in step.targets) + tuple(
                Output(t, i) for t, i in made
            )
            if outputs:
                yield replace(inner, inputs=inner.inputs + arguments, steps=steps, outputs=outputs)


def _infos(p: Program) -> dict[str, Info]:
    return {v.name: v.info for v in p.inputs} | {
        t: i for s in all_steps(p.steps) for t, i in zip(s.targets, s.infos, strict=True)
    }


def _cut(p: Program, steps: Sequence[Step]) -> Program:
    """The program whose `steps` are gone; their results are arguments, with data of the same
    kind."""
    new = tuple(
        Input(t, info, data_of(info, int(t[1:])))
        for s in steps
        for t, info in zip(s.targets, s.infos, strict=True)
    )
    return replace(_without(p, steps), inputs=p.inputs + new)


def _without(p: Program, steps: Sequence[Step]) -> Program:
    return replace(p, steps=_kept(p.steps, {s.targets for s in steps}))


def _kept(steps: Sequence[Step], gone: set[tuple[str, ...]]) -> tuple[Step, ...]:
    block = lambda b: replace(b, steps=_kept(b.steps, gone))
    return tuple(
        replace(s, blocks=tuple((slot, block(b)) for slot, b in s.blocks))
        for s in steps
        if s.targets not in gone
    )


def _renamed(p: Program, names: dict[str, str]) -> Program:
    """The program reading other values; an output of the same value twice is one."""
    outputs = {
        names.get(o.name, o.name): replace(o, name=names.get(o.name, o.name)) for o in p.outputs
    }
    return replace(
        p, steps=tuple(renamed(s, names) for s in p.steps), outputs=tuple(outputs.values())
    )
