"""What the fuzzer generates, runs, minimises and prints: a program as data, each of its steps one
line of Python source."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import sbp
from tests.edits import run_source

FLOATS = ("float32", "bfloat16", "float16")
INTEGERS = ("int32", "int8", "uint32", "uint8", "int16")
MANTISSA = {"float32": 24, "bfloat16": 8, "float16": 11}


@dataclass(frozen=True, slots=True)
class Info:
    """Shape and dtype of a value, and what is known of its elements.

    Arguments:
      shape: its shape.
      dtype: NumPy's name of its dtype; "key" for new-style random keys.
      exact: computed without any rounding, so equal on every device and in every order: only such
          values may decide.
      bound: no element of an exact value is larger; of other floats the usual magnitude.
      grid: exact floats are multiples of 2**-grid.
      weak: whether JAX types it weakly.
      spoiled: whether it may hold infinities and NaN.
    """

    shape: tuple[int, ...]
    dtype: str
    exact: bool = True
    bound: float = 1.0
    grid: int = 0
    weak: bool = False
    spoiled: bool = False

    @property
    def size(self) -> int:
        """Its elements."""
        return int(np.prod(self.shape, dtype=int))

    @property
    def ndim(self) -> int:
        """Its rank."""
        return len(self.shape)

    @property
    def kind(self) -> str:
        """f for floats, i for integers, b for booleans, c for complex, r for random keys."""
        if self.dtype in FLOATS:
            return "f"
        return {"bool": "b", "complex64": "c", "key": "r"}.get(self.dtype, "i")


@dataclass(frozen=True, slots=True)
class Block:
    """A function inside the program: the body of a loop, a branch, what is mapped or
    differentiated.

    Arguments:
      takes: its parameter list as source.
      unpack: a line that binds the parameters' names, or "".
      steps: its lines.
      outputs: the names of the values it returns.
      returns: what is returned, as source with {0}, {1} for the outputs.
      params: its parameters, for taking its steps out of it.
    """

    takes: str
    unpack: str
    steps: tuple[Step, ...]
    outputs: tuple[str, ...]
    returns: str
    params: tuple[tuple[str, Info], ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """One operation: `targets = text`, with slots in braces for the values it reads and the
    functions it calls.

    `several` says that the text makes a tuple or list, be it of one value.
    """

    op: str
    targets: tuple[str, ...]
    text: str
    args: tuple[tuple[str, str], ...]
    infos: tuple[Info, ...]
    blocks: tuple[tuple[str, Block], ...] = ()
    several: bool = False


@dataclass(frozen=True, slots=True)
class Input:
    """An argument: its data is an expression of NumPy, so that it prints."""

    name: str
    info: Info
    data: str
    type: str | None = None


@dataclass(frozen=True, slots=True)
class Output:
    """A returned value and the type asked of it."""

    name: str
    info: Info
    type: str | None = None


@dataclass(frozen=True, slots=True)
class Program:
    """A function, its arguments, and how `sbp.jit` is asked to run it."""

    seed: int
    inputs: tuple[Input, ...]
    steps: tuple[Step, ...]
    outputs: tuple[Output, ...]
    mesh: tuple[int, ...]
    boxing: str = "auto"
    gradients: bool = False
    donate: tuple[str, ...] = ()
    hardware: sbp.Hardware | None = None
    padded: bool = False  # whether arguments and results with types are held as `sbp.Padded`

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of the mesh axes."""
        return ("x", "y", "z")[: len(self.mesh)]

    @property
    def differentiated(self) -> tuple[int, ...]:
        """Positions of the arguments that the gradient is taken for."""
        if not self.gradients or not any(o.info.kind == "f" for o in self.outputs):
            return ()
        return tuple(i for i, v in enumerate(self.inputs) if v.info.kind == "f")

    def sbp_options(self) -> dict[str, Any]:
        """The keyword arguments of `sbp.jit`."""
        ins, outs = (
            tuple(self._held(v.type) for v in side) if any(v.type for v in side) else None
            for side in (self.inputs, self.outputs)
        )
        donated = tuple(i for i, v in enumerate(self.inputs) if v.name in self.donate)
        options = {
            "in_types": ins,
            "out_types": (outs, None) if outs is not None and self.differentiated else outs,
            "boxing": None if self.boxing == "auto" else self.boxing,
            "hardware": self.hardware,
            "donate_argnums": donated if self.donate else None,
        }
        return {name: value for name, value in options.items() if value is not None}

    def _held(self, type: str | None) -> Any:
        return sbp.padded(type) if self.padded and type is not None and ":P" not in type else type

    def arrivals(self) -> dict[int, tuple[str, str]]:
        """The arguments that do not arrive as plain arrays: by position the function of
        `tests.fuzz.oracle` that makes them, and their type."""
        found: dict[int, tuple[str, str]] = {}
        for i, v in enumerate(self.inputs):
            if v.type and ":P" in v.type:
                found[i] = "parts_of", v.type
            elif self.padded and v.type and "?" not in v.type:
                found[i] = "padded_of", v.type
        return found


# ---- names --------------------------------------------------------------------------------------


def reads(step: Step) -> set[str]:
    """Names that a step reads from around it."""
    found = {name for _, name in step.args}
    for _, block in step.blocks:
        made: set[str] = set()
        for inner in block.steps:
            found |= reads(inner) - made
            made |= set(inner.targets)
        found |= set(block.outputs) - made
    return found


def all_steps(steps: Iterable[Step]) -> Iterator[Step]:
    """The steps. The steps of a function come before the call of the function."""
    for step in steps:
        for _, block in step.blocks:
            yield from all_steps(block.steps)
        yield step


def without_dead(steps: Iterable[Step], wanted: Iterable[str]) -> tuple[Step, ...]:
    """The steps that `wanted` depends on; the same inside their blocks."""
    need = set(wanted)
    kept: list[Step] = []
    for step in reversed(tuple(steps)):
        if need & set(step.targets):
            blocks = tuple(
                (slot, replace(b, steps=without_dead(b.steps, b.outputs)))
                for slot, b in step.blocks
            )
            kept.append(replace(step, blocks=blocks))
            need |= reads(kept[-1])
    return tuple(reversed(kept))


def pruned(program: Program) -> Program:
    """The program without dead steps and without inputs that nothing reads; one input stays."""
    steps = without_dead(program.steps, [o.name for o in program.outputs])
    used = set().union(*(reads(s) for s in steps), (o.name for o in program.outputs))
    inputs = tuple(v for v in program.inputs if v.name in used) or program.inputs[:1]
    names = {v.name for v in inputs}
    return replace(
        program, steps=steps, inputs=inputs, donate=tuple(d for d in program.donate if d in names)
    )


def renamed(step: Step, names: Mapping[str, str]) -> Step:
    """The step reading other values."""
    args = tuple((slot, names.get(n, n)) for slot, n in step.args)
    blocks = tuple(
        (
            slot,
            replace(
                b,
                steps=tuple(renamed(s, names) for s in b.steps),
                outputs=tuple(names.get(n, n) for n in b.outputs),
            ),
        )
        for slot, b in step.blocks
    )
    return replace(step, args=args, blocks=blocks)


# ---- source --------------------------------------------------------------------------------------
# A program as Python source: each step a line, so that what runs is what is printed.


PRELUDE = """\
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import sbp
from sbp import B, P, S
from sbp.machine.mesh import Hardware
"""

_SLOT = re.compile(r"\{(\w+)\}")


def fill(text: str, values: Mapping[str, str]) -> str:
    """Replaces the slots that `values` names."""
    return _SLOT.sub(lambda m: values.get(m.group(1), m.group()), text)


Suffix = Callable[[str, Info], str | None]


def step_lines(step: Step, suffix: Suffix | None = None) -> list[str]:
    """A step as source: the functions it calls, then its own lines, of which the last is the
    expression."""
    lines: list[str] = []
    values = dict(step.args)
    for number, (slot, block) in enumerate(step.blocks):
        values[slot] = f"f{step.targets[0][1:]}_{number}"
        lines += block_lines(block, values[slot], suffix)
    values["me"] = step.targets[0][1:]
    left = ", ".join(step.targets) + ("," if step.several and len(step.targets) == 1 else "")
    *before, expression = fill(step.text, values).split("\n")
    lines += [*before, f"{left} = {expression}"]
    if suffix is not None:
        lines += [
            line
            for t, i in zip(step.targets, step.infos, strict=True)
            if (line := suffix(t, i)) is not None
        ]
    return lines


def block_lines(block: Block, name: str, suffix: Suffix | None = None) -> list[str]:
    """A block as a function."""
    body = [block.unpack] if block.unpack else []
    for step in block.steps:
        body += step_lines(step, suffix)
    returns = fill(block.returns, {str(i): n for i, n in enumerate(block.outputs)})
    return [
        f"def {name}({block.takes}):",
        *("    " + line for line in [*body, f"return {returns}"]),
    ]


LOSS = """\
def loss(*args):
    outs = forward(*args)
    floats = [o.astype(jnp.float32) for o in outs if jnp.issubdtype(o.dtype, jnp.floating)]
    weights = [jnp.cos(jnp.arange(o.size, dtype=jnp.float32)).reshape(o.shape) for o in floats]
    return sum(jnp.sum(o * w) for o, w in zip(floats, weights)), outs
"""


def function_source(program: Program, suffix: Suffix | None = None) -> str:
    """The source of `program`, the function under test; with gradients it returns (outputs,
    gradients)."""
    parameters = ", ".join(v.name for v in program.inputs)
    numbers = program.differentiated
    outputs = tuple(o.name for o in program.outputs)
    block = Block(
        parameters,
        "",
        program.steps,
        outputs,
        ", ".join(f"{{{i}}}" for i in range(len(outputs))) + ",",
    )
    lines = block_lines(block, "forward" if numbers else "program", suffix)
    if numbers:
        lines += ["", "", *LOSS.splitlines(), "", "", f"def program({parameters}):"]
        lines += [
            (
                f"    (_, outs), grads = jax.value_and_grad(loss, {numbers},"
                f" has_aux=True)({parameters})"
            ),
            "    return outs, grads",
        ]
    return "\n".join(lines) + "\n"


def file_source(program: Program) -> str:
    """A file that runs by itself: the program, its arguments, and the comparison with one
    device."""
    arguments = "".join(f"    {v.data},  # {v.name}\n" for v in program.inputs)
    options = "".join(f", {k}={v!r}" for k, v in program.sbp_options().items())
    made = program.arrivals()
    arrivals = "".join(f"args[{i}] = {f}(args[{i}], {t!r}, mesh)\n" for i, (f, t) in made.items())
    if made:
        arrivals = "from tests.fuzz.oracle import padded_of, parts_of\n\n" + arrivals
    exact = [o.info.exact for o in program.outputs] + [False] * len(program.differentiated)
    return f"""\
# seed {program.seed}; run it on 8 simulated devices:
# XLA_FLAGS=--xla_force_host_platform_device_count=8 JAX_PLATFORMS=cpu python this_file.py
{PRELUDE}
mesh = sbp.make_mesh({program.mesh}, {program.axes})


{function_source(program)}

args = [
{arguments}]
want = jax.jit(program)(*args)
{arrivals}got = sbp.jit(program, mesh{options})(*args)
partial, held = sbp.Partial, lambda y: isinstance(y, sbp.Partial | sbp.Padded)
whole = [y.reduce() if isinstance(y, partial) else y for y in jax.tree.leaves(got, is_leaf=held)]
for y, z, exact in zip(whole, jax.tree.leaves(want), {exact}):
    tolerance = 0 if exact else 1e-4 * np.max(np.abs(np.asarray(z, complex)), initial=0)
    y, z = np.asarray(y, complex), np.asarray(z, complex)
    np.testing.assert_allclose(y, z, rtol=0, atol=tolerance)
"""


def namespace(extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The names a program's source may use."""
    names: dict[str, Any] = dict(extra or {})
    exec(PRELUDE, names)
    return names


def load(source: str, name: str, extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Executes source whose lines tracebacks and diagnostics can quote; returns its names."""
    return run_source(source, f"<{name}>", namespace(extra))


def arguments(program: Program) -> list[Any]:
    """The arguments' data."""
    names = namespace()
    return [eval(v.data, names) for v in program.inputs]
