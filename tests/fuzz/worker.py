"""The process that runs programs for `tests.fuzz.run`: one line of JSON when it begins a program,
one when it has judged it."""

import gc
import json
import pickle
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax

from tests.fuzz.generate import generate
from tests.fuzz.minimise import Fails, minimise
from tests.fuzz.oracle import Outcome, judge
from tests.fuzz.program import Program, file_source

CLEAR_EVERY = (
    20  # programs, after which JAX's caches are dropped: compiled programs are not used again
)


def in_the_same_way(outcome: Outcome) -> Fails:
    """Whether a program goes wrong as this one did: the same verdict, and of crashes the same
    place."""

    def fails(program: Program) -> bool:
        found = judge(program)
        return found.failed and (found.verdict, found.where) == (outcome.verdict, outcome.where)

    return fails


def fatal(program: Program) -> bool:
    """Whether a program ends the process that runs it."""
    with tempfile.NamedTemporaryFile(suffix=".pickle") as file:
        Path(file.name).write_bytes(pickle.dumps(program))
        try:
            done = subprocess.run(
                [sys.executable, "-m", "tests.fuzz.worker", json.dumps({"pickle": file.name})],
                capture_output=True,
                timeout=120,
            )
        except subprocess.TimeoutExpired:
            return True
    return done.returncode != 0


def _say(**message: Any) -> None:
    print(json.dumps(message), flush=True)


DEFAULTS = {"policy": None, "mesh": None, "minimise": 0, "memory": 4.0, "fatal": False} | {
    "pickle": None,
    "seeds": [],
}


def main() -> int:
    """The command line, used by `tests.fuzz.run` alone: an object of JSON with options."""
    options: Any = SimpleNamespace(**DEFAULTS | json.loads(sys.argv[1]))
    if options.pickle:
        judge(pickle.loads(Path(options.pickle).read_bytes()))
        return 0
    mesh = tuple(int(n) for n in options.mesh.split("x")) if options.mesh else None
    for number, seed in enumerate(options.seeds):
        program = generate(seed, options.policy, mesh)
        if options.fatal:
            print(
                file_source(
                    minimise(program, fatal, options.minimise) if options.minimise else program
                )
            )
            continue
        _say(begin=seed)
        outcome = judge(program)
        source, detail = "", outcome.detail
        if outcome.failed:
            _say(found=seed)  # and minimising takes its time
            small = (
                minimise(program, in_the_same_way(outcome), options.minimise)
                if options.minimise
                else program
            )
            detail = (
                judge(small).detail or detail
            )  # a reference that has random ties may differ from run to run
            source = file_source(small)
        _say(
            seed=seed,
            verdict=outcome.verdict,
            detail=detail,
            source=source,
            mesh="x".join(map(str, program.mesh)),
            policy=program.boxing,
            gradients=program.gradients,
        )
        if number % CLEAR_EVERY == CLEAR_EVERY - 1:
            jax.clear_caches()
            gc.collect()
        if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20 > options.memory:
            _say(again=True)
            return 0
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
