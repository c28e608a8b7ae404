"""Files of plans (`plan.source()`) of whole training steps.

    python -m benchmarks.plan_sources [STEP ...]

For each step of `benchmarks.steps` and for GShard's step, it prints the operations that the plan
runs, the lines of the file, the seconds that it took to write, and the operations that only one of
the file and the plan has. JAX traces both. Calls of functions count as the operations in them. No
device is needed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
from jax.sharding import AbstractMesh

from benchmarks import gshard_ref, planning_speed
from benchmarks.steps.suite import SUITE
from benchmarks.steps.unseen import UNSEEN
from sbp.trace.equations import bodies_of


def operations(jaxpr: Any, platform: str) -> Iterator[str]:
    """The operations of a jaxpr and of all its bodies, with the types of their results. Where there
    are branches for several platforms, it has that of the plan's."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        inner = bodies_of(eqn, platform)
        for body in inner.jaxprs:
            yield from operations(body, platform)
        is_choice = inner.form == "choice" and len(inner.jaxprs) == 1
        if inner.form not in ("function", "platform") and not is_choice:
            types = " ".join(v.aval.str_short() for v in eqn.outvars)
            yield f"{eqn.primitive.name.replace('add_any', 'add')} {types}"


def plans(wanted: list[str]) -> Iterator[tuple[str, Any]]:
    """The plans, by the names of the steps."""
    for name, make in (SUITE | UNSEEN).items():
        if not wanted or name in wanted:
            step = make()
            mesh = AbstractMesh(tuple(n for _, n in step.mesh), tuple(a for a, _ in step.mesh))
            yield name, step.planned(mesh, hardware=f"tpu-{step.chip}")
    if not wanted or "gshard" in wanted:
        case = planning_speed.CASES["one-axis"]
        arguments = gshard_ref.abstract_arguments(case.config)
        yield "gshard", planning_speed.step(case).plan(*arguments)


def main() -> None:
    parser = argparse.ArgumentParser(description="Files of plans of whole training steps.")
    parser.add_argument("step", nargs="*")
    print(f"{'step':<24} operations  lines  seconds  only one has")
    for name, plan in plans(parser.parse_args().step):
        start = time.perf_counter()
        try:
            text = plan.source()
        except Exception as error:  # a step whose plan has no file is a line of the table
            print(f"{name:<24} {error}", flush=True)
            continue
        seconds = time.perf_counter() - start
        names: dict[str, Any] = {"__file__": sys.argv[0]}
        with mock.patch.object(jax, "make_mesh", AbstractMesh):
            exec(compile(text, name, "exec"), names)
        shapes = plan._executable.shapes
        platform = plan.program.mesh.hardware.platform
        mine, theirs = (
            Counter(operations(jax.make_jaxpr(run)(*shapes), platform))
            for run in (names["run"], plan._executable.jitted)
        )
        other = [*(mine - theirs).items(), *(theirs - mine).items()]
        said = ", ".join(f"{count} {text.split()[0]}" for text, count in other) or "-"
        print(
            f"{name:<24} {mine.total():>10,} {len(text.splitlines()):>6,} {seconds:>8.1f}  {said}",
            flush=True,
        )


if __name__ == "__main__":
    main()
