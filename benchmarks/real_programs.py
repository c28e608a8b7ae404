"""Programs of other packages under `sbp.jit`: equal values, and the seconds that planning takes.

    python -m benchmarks.real_programs
    python -m benchmarks.real_programs --only keras_recurrent brax_ants
    python -m benchmarks.real_programs --write docs/real-programs.md

A program of `benchmarks.real_steps` runs for three steps under `jax.jit` on one device. Under
`sbp.jit` it runs on a mesh of 8 simulated CPU devices, with free types and with a split batch. All
results and the last state are compared. `make real` installs the packages (the extra `real`) in an
environment of their own.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import os
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "KERAS_BACKEND": "jax",
    # XLA compiles these programs for longer than they run, so it optimizes little.
    "XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    " --xla_llvm_disable_expensive_passes=true",
}

import jax
import jax.numpy as jnp
import numpy as np

import sbp
from benchmarks.real_steps import PROGRAMS, SPLIT, Program
from tests.hardware import SENDS_FREELY

STEPS = 3

TOLERANCE = 1e-3
"""Largest difference of floats, as a share of the largest magnitude in their array."""

SMALLEST = 1e-3
"""The least magnitude that a difference is a share of: the gradient of a bias before a
normalization is zero, and all that an array has of it is rounding."""

PACKAGES = (
    "sbp-jax jax keras flax penzai brax mctx jax-md jraph e3nn-jax diffrax ott-jax blackjax numpyro"
)

HEAD = f"""# Programs of other packages

`{{command}}` wrote this page on {{date}}.

Each program is a step that is built with another package
([benchmarks/real_steps.py](../benchmarks/real_steps.py)), with random weights and small sizes. It
runs for {STEPS} steps under `jax.jit` on one device, and under `sbp.jit` on the mesh
`data=2 model=4` of 8 simulated CPU devices. sbp plans for the hardware of
[tests/hardware.py](../tests/hardware.py), on which it splits small programs as it splits large ones
on real devices. In one run sbp chooses all types. In the other run the batch, or the state of each
chain or environment, is split over `data`. All results of the steps and the last state are
compared. Integers, booleans and keys have to be equal. Floats may differ by {TOLERANCE:g} of the
largest magnitude in their array, or of {SMALLEST:g} if that is larger. *Largest
difference* is on this scale.

*Operations* is the number of operations in sbp's graph, including the bodies of loops. *Split* is
the share of these operations whose result is split or partial. Seconds are wall time for the first
call: for `jax.jit` until the program is lowered, for `sbp.jit` until it is planned. Both include
tracing; neither includes compilation. *Warnings* has the codes that sbp gives, or why a program did
not run.

Versions: {{versions}}.

"""

COLUMNS = (
    "Program",
    "Operations",
    "`jax.jit`, s",
    "Free types, s",
    "Split",
    "Split batch, s",
    "Split",
    "Largest difference",
    "Warnings",
    "Values",
)


class Row(NamedTuple):
    """A line of the table.

    Arguments:
      outcome: `agree`, `differ`, `raises` or `left out`.
      cells: one for each other column.
    """

    outcome: str
    cells: tuple[str, ...]

    def __str__(self) -> str:
        return f"| {' | '.join((*self.cells, self.outcome))} |"


def run(f: Callable[..., Any], program: Program) -> Any:
    """The results of all steps, and the last state."""
    state, results = program.state, []
    for _ in range(STEPS):
        state, result = f(state, *program.batch)
        results.append(result)
    return results, state


def seconds(act: Callable[..., Any], program: Program) -> tuple[float, Any]:
    """The seconds that `act` takes when JAX has traced nothing before, and its result."""
    jax.clear_caches()
    start = time.perf_counter()
    result = act(program.state, *program.batch)
    return time.perf_counter() - start, result


def difference(got: Any, want: Any) -> float:
    """The largest difference of two arrays, infinite where they may not differ."""
    if (got.shape, got.dtype) != (want.shape, want.dtype):
        return np.inf
    if jnp.issubdtype(want.dtype, jax.dtypes.prng_key):
        got, want = jax.random.key_data(got), jax.random.key_data(want)
    got, want = np.asarray(got), np.asarray(want)
    if np.array_equal(got, want, equal_nan=jnp.issubdtype(want.dtype, jnp.inexact)):
        return 0.0
    if not jnp.issubdtype(want.dtype, jnp.inexact):
        return np.inf
    found = np.abs(got - want).max() / max(np.abs(want).max(), SMALLEST)
    return float(found) if np.isfinite(found) else np.inf


def measured(program: Program, name: str) -> Row:
    """Runs a program in all three ways."""
    mesh = sbp.make_mesh((2, 4), ("data", "model"))
    plain = jax.jit(program.step)
    cells = [f"{seconds(plain.lower, program)[0]:.2f}"]
    want = run(plain, program)
    size, worst, codes = 0, 0.0, set[str]()
    for types in (None, (program.state_types, *(SPLIT for _ in program.batch))):
        f = sbp.jit(program.step, mesh, in_types=types, hardware=SENDS_FREELY)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", sbp.SbpWarning)
            took, plan = seconds(f.plan, program)
            got = run(f, program)
        noted = [str(w.message) for w in caught if issubclass(w.category, sbp.SbpWarning)]
        found = jax.tree_util.tree_leaves_with_path(jax.tree.map(difference, got, want))
        paths = [jax.tree_util.keystr(path) for path, share in found if share > TOLERANCE]
        for text in (*noted, *(f"{path} differs" for path in paths)):
            print(f"{name}, types {types}: {text}", file=sys.stderr)
        rows = plan.program.typing.rows
        size, split = len(rows), sum(any(map(any, row.outs)) for row in rows.values())
        worst = max(worst, *(share for _, share in found))
        codes |= {text.split(":")[0] for text in noted}
        cells += f"{took:.2f}", f"{split / size:.0%}"
    outcome = "differ" if worst > TOLERANCE else "agree"
    return Row(outcome, (name, f"{size:,}", *cells, f"{worst:.0e}", ", ".join(sorted(codes))))


def row(make: Callable[[], Program]) -> Row:
    """The line of a program, of the error that it raises, or of the package that it lacks."""
    name = make.__name__
    try:
        program = make()
    except ModuleNotFoundError as error:
        return Row("left out", (name, *[""] * 7, f"{error.name} is not installed"))
    try:
        return measured(program, name)
    except Exception as error:  # whatever it is, the other programs run
        traceback.print_exc()
        return Row("raises", (name, *[""] * 7, type(error).__name__))


def version(package: str) -> str:
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return f"{package} is not installed"


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.real_programs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    makers = {make.__name__: make for make in PROGRAMS}
    parser.add_argument("--only", nargs="*", choices=makers, default=list(makers), metavar="NAME")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="writes the table to this file")
    arguments = parser.parse_args()
    table = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    print(*table, sep="\n", flush=True)
    rows: list[Row] = []
    for name in arguments.only:
        rows.append(row(makers[name]))
        print(rows[-1], flush=True)
    if arguments.write:
        head = HEAD.format(
            command=" ".join(["python -m benchmarks.real_programs", *sys.argv[1:]]),
            date=f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}",
            versions=", ".join(map(version, PACKAGES.split())),
        )
        arguments.write.write_text(head + "\n".join([*table, *map(str, rows)]) + "\n", "utf-8")
    outcomes = Counter(row.outcome for row in rows)
    print("real:", ", ".join(f"{n} {outcome}" for outcome, n in sorted(outcomes.items())))
    return not outcomes.keys() <= {"agree", "left out"}


if __name__ == "__main__":
    sys.exit(main())
