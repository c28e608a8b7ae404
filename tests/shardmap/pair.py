"""A wrong `shard_map` program with its corrected twin and the plain function that both are meant to
be."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from sbp import make_mesh

N_DATA, N_MODEL = 2, 4


def mesh():
    return make_mesh((N_DATA, N_MODEL), ("data", "model"))


@dataclass(frozen=True)
class Pair:
    """A wrong program and its twin.

    Arguments:
      code: the diagnostic that the wrong one gets.
      axes: on which mesh axes.
      at: a piece of the source line that the diagnostic points at.
      wrong: body of the wrong program.
      right: body of the twin.
      reference: the plain function.
      args: its arguments.
      ins: in_specs.
      outs: out_specs.
      wrong_ins: in_specs of the wrong program, where they differ.
      wrong_outs: out_specs of the wrong program, where they differ.
      vma: the one setting of check_vma that the program is about; None for both.
      repaired: whether a help is expected.
      notes: codes of notes that go with it.
      severity: `warning` where a division in it has two readings, and one of them is right.
    """

    code: str
    axes: tuple[str, ...]
    at: str
    wrong: Callable[..., Any]
    right: Callable[..., Any]
    reference: Callable[..., Any]
    args: tuple[Any, ...]
    ins: Any
    outs: Any
    wrong_ins: Any = None
    wrong_outs: Any = None
    vma: bool | None = None
    repaired: bool = True
    notes: tuple[str, ...] = ()
    severity: str = "error"

    def program(self, which, check_vma):
        body = getattr(self, which)
        ins, outs = self.ins, self.outs
        if which == "wrong":
            ins, outs = self.wrong_ins or ins, self.wrong_outs or outs
        return jax.shard_map(body, mesh=mesh(), in_specs=ins, out_specs=outs, check_vma=check_vma)


def draw(*shape, seed=0):
    return np.asarray(np.random.default_rng(seed).standard_normal(shape), np.float32)
