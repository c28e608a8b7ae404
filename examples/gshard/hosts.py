"""The processes of a training run, one for each host: how they meet and end."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from sbp.errors import SbpError
from sbp.moe.hosts import gather


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """The processes of a run.

    Attributes:
      coordinator: address of the first process, as HOST:PORT; "" for a run in one process, and
        where JAX finds it.
      processes: how many there are.
      process: the number of this one, from 0.
      distributed: JAX finds all of this by itself (TPU pods, Slurm, GKE, Open MPI).
      wait: seconds that a process waits for the others at the start.
    """

    coordinator: str = ""
    processes: int = 1
    process: int = 0
    distributed: bool = False
    wait: int = 300

    @classmethod
    def of(cls, args: argparse.Namespace) -> Hosts:
        """The processes that the options of `add_options` name.

        Raises:
          SbpError: `unknown-option` where they contradict each other.
        """
        return cls(**{field.name: getattr(args, field.name) for field in dataclasses.fields(cls)})

    def __post_init__(self) -> None:
        _, colon, port = self.coordinator.rpartition(":")
        address = colon and port.isdecimal() and 0 < int(port) < 2**16
        named = bool(self.coordinator or self.processes != 1 or self.process)
        checks: list[tuple[str, object]] = [
            (
                "--distributed finds the other processes by itself; leave it out, or leave out"
                " --coordinator, --processes and --process",
                self.distributed and named,
            ),
            (
                f"--coordinator is {self.coordinator!r}; write HOST:PORT, such as host0:1234",
                self.coordinator and not address,
            ),
            (
                "--processes and --process need --coordinator, the HOST:PORT of process 0",
                named and not self.coordinator,
            ),
            (
                f"--processes is {self.processes}; it must be at least 1",
                self.processes < 1,
            ),
            (
                f"--process is {self.process}; it must be the number of this process, from 0 to"
                f" {self.processes - 1}, another one in each",
                not 0 <= self.process < self.processes,
            ),
            (f"--wait is {self.wait}; it must be at least 1 second", self.wait < 1),
        ]
        if faults := [text for text, wrong in checks if wrong]:
            raise SbpError(faults[0], code="unknown-option")

    @contextlib.contextmanager
    def together(self, show: Callable[[SbpError], None]) -> Iterator[None]:
        """Meet the other processes. An error inside ends this process at once: otherwise JAX waits
        at the exit for the others, which may wait for this one. JAX ends them in turn.

        Arguments:
          show: prints an error of the user.

        Raises:
          SbpError: in a run of one process, what is raised inside.
        """
        if not (self.coordinator or self.distributed):
            yield
            return
        try:
            self._meet()
            yield
        except SbpError as error:
            show(error)
            _leave(2)
        except Exception:  # whatever ends this process must end the others
            traceback.print_exc()
            print(
                f"process {self._name} ends because of the error above. Where that is a connection"
                " that was lost, another process ended before; its output says why",
                file=sys.stderr,
            )
            _leave(1)

    @property
    def _name(self) -> str:
        if self.distributed:
            return "of this host"
        return f"{self.process} of {self.processes}"

    def _meet(self) -> None:
        """Connect to the other processes, before any device is used.

        Raises:
          SbpError: `processes-differ` where not all of them come in time, or they disagree on how
            many there are; `unknown-option` where JAX finds no cluster.
        """
        # Otherwise JAX takes SIGTERM, at which a run saves its state.
        jax.config.update("jax_enable_preemption_service", False)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        faults: list[Exception] = []

        def initialize() -> None:
            try:
                jax.distributed.initialize(
                    self.coordinator or None,
                    self.processes if self.coordinator else None,
                    self.process if self.coordinator else None,
                    initialization_timeout=2 * self.wait,
                )
            except Exception as fault:  # of the thread; raised again below as an SbpError
                faults.append(fault)

        # At its own limit JAX aborts the process; the thread lets us say what to do before that.
        thread = threading.Thread(target=initialize, daemon=True)
        thread.start()
        thread.join(self.wait)
        if thread.is_alive():
            raise SbpError(
                f"process {self._name} waited {self.wait} seconds for the others"
                f"{f' at {self.coordinator}' if self.coordinator else ''}, and not all came. Start"
                " all of them with the same --coordinator and --processes, each with a --process of"
                " its own, process 0 on the host of the address; or raise --wait",
                code="processes-differ",
            )
        if faults:
            raise SbpError(
                f"JAX cannot connect the processes ({str(faults[0]).splitlines()[0]}). Name them:"
                " --coordinator HOST:PORT --processes N --process I",
                code="unknown-option" if self.distributed else "processes-differ",
            )

    def check(self) -> None:
        """Compare the number of processes with those that have come.

        Raises:
          SbpError: `processes-differ`, in all processes.
        """
        if not self.coordinator:
            return
        said = gather(self.processes)
        if wrong := [i for i, n in enumerate(said) if n != len(said)]:
            raise SbpError(
                f"{len(said)} processes have come, and process {wrong[0]} was started with"
                f" --processes {said[wrong[0]]}; give all the same number",
                code="processes-differ",
            )


def between_processes(
    first: Mapping[str, Mapping[str, Any]], mine: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """One line per option of which process 0 has another value than this one. The paths of a text
    may differ, its digest may not."""
    return [
        f"{section}.{name}: {first[section].get(name)!r} in process 0, {value!r} in this one"
        for section, options in mine.items()
        for name, value in options.items()
        if name not in ("data", "eval_data") and first[section].get(name) != value
    ]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that name the processes of a run."""
    parser.add_argument(
        "--coordinator",
        default="",
        metavar="HOST:PORT",
        help="run in several processes; the address of process 0, the same in all",
    )
    parser.add_argument("--processes", type=int, default=1, help="how many processes there are")
    parser.add_argument("--process", type=int, default=0, help="number of this process, from 0")
    parser.add_argument(
        "--distributed",
        action="store_true",
        help="run in several processes that JAX finds by itself (TPU pods, Slurm, GKE)",
    )
    parser.add_argument(
        "--wait",
        type=int,
        default=300,
        help="seconds that processes wait for each other at the start (default %(default)s)",
    )


def _leave(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
