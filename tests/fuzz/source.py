"""A program as Python source: each step a line, so that what runs is what is printed."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from tests.edits import run_source
from tests.fuzz.program import Block, Info, Program, Step

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
    names: dict[str, Any] = {}
    exec(PRELUDE, names)
    names.update(extra or {})
    return names


def load(source: str, name: str, extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Executes source whose lines tracebacks and diagnostics can quote; returns its names."""
    return run_source(source, f"<{name}>", namespace(extra))


def arguments(program: Program) -> list[Any]:
    """The arguments' data."""
    names = namespace()
    return [eval(v.data, names) for v in program.inputs]
