"""Broken programs, each with what its own source expects to be told.

`# error: CODE: TEXT` (or `# warning:`) stands on the line of a primary label and is part of the
title, `# and: TEXT` on the line of a secondary label.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

import sbp
from sbp.report.report import Report

MESH = AbstractMesh((8,), ("model",))
MESH_2D = AbstractMesh((2, 4), ("data", "model"))


f32 = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)


i32 = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """A program that has no typing, or a dear or doubtful one.

    Arguments:
      fn: the program.
      args: what it is called with.
      mesh: where it runs.
      options: of `sbp.jit`.
      cause: what is wrong in it, and where it was seen.
      no_help: why there is no edit to suggest; empty when there must be one.
      also: functions that it calls and that hold labels.
      unlabelled: the expected code and title of a finding that has no line.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    mesh: Any
    options: dict[str, Any]
    cause: str
    no_help: str = ""
    also: tuple[Callable[..., Any], ...] = ()
    unlabelled: tuple[str, str] | None = None

    @property
    def name(self) -> str:
        return self.fn.__name__

    def jitted(self) -> Any:
        return sbp.jit(self.fn, self.mesh, **self.options)

    def check(self) -> Report:
        # The report holds the warnings, too.
        with warnings.catch_warnings(action="ignore", category=sbp.SbpWarning):
            return self.jitted().check(*self.args)

    def of(self, fn: Callable[..., Any], **options: Any) -> Broken:
        """The same with another function and other options."""
        return replace(self, fn=fn, options=self.options | options)


GALLERY: dict[str, Broken] = {}


def broken(
    *args: Any,
    cause: str,
    mesh: Any = MESH,
    no_help: str = "",
    also: Any = (),
    unlabelled: Any = None,
    **options: Any,
) -> Any:
    """Puts a program into the gallery; the policy is "explicit" unless another is given. The first
    program of a name stays, so the edited text of a file may run without a change of the gallery.
    """

    def add(fn: Callable[..., Any]) -> Callable[..., Any]:
        entry = Broken(
            fn=fn,
            args=args,
            mesh=mesh,
            options={"boxing": "explicit"} | options,
            cause=cause,
            no_help=no_help,
            also=also,
            unlabelled=unlabelled,
        )
        GALLERY.setdefault(entry.name, entry)
        return fn

    return add


def expectations(entry: Broken) -> tuple[list[tuple[int, str, str]], list[tuple[int, str]]]:
    """What the source of a program says it will be told: (line, code, text) of primary labels,
    (line, text) of secondary ones."""
    primary, secondary = [], []
    for fn in (entry.fn, *entry.also):
        lines, start = inspect.getsourcelines(fn)
        for number, line in enumerate(lines, start):
            for kind, text in re.findall(r"# (error|warning|and): (.*?)(?=  # |$)", line.rstrip()):
                if kind == "and":
                    secondary.append((number, text.strip()))
                else:
                    code, title = text.split(": ", 1)
                    primary.append((number, code, title.strip()))
    return primary, secondary
