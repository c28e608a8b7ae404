"""The kinds of `shard_map` programs: wrong programs with or without a corrected version, and right
programs. Each has the plain function that it should compute."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

import sbp

N_DATA, N_MODEL = 2, 4


mesh = lambda: sbp.make_mesh((N_DATA, N_MODEL), ("data", "model"))


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
      notes: codes of the notes that the report also has.
      severity: `warning` if the result differs on one device and no type shows why; `note` if the
          program gives a reason for the difference.
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

    def program(self, check_vma, which="wrong"):
        ins, outs = self.ins, self.outs
        if which == "wrong":
            ins, outs = self.wrong_ins or ins, self.wrong_outs or outs
        return mapped(getattr(self, which), ins, outs)(check_vma)


def draw(*shape, seed=0):
    return np.asarray(np.random.default_rng(seed).standard_normal(shape), np.float32)


shapes = lambda args: jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), args)


@dataclass(frozen=True)
class Faulty:
    """A wrong program.

    Arguments:
      wrong: body of the region.
      reference: the plain function.
      args: what both take.
      ins: in_specs.
      outs: out_specs.
      helped: whether a help is expected.
      vma: the settings of check_vma that the program is about.
      outside: makes the program from the region, such as the region's gradient.
    """

    wrong: Callable[..., Any]
    reference: Callable[..., Any]
    args: tuple[Any, ...]
    ins: Any
    outs: Any
    helped: bool = True
    vma: tuple[bool, ...] = (False,)
    outside: Callable[..., Any] = lambda region: region

    def program(self, check_vma):
        return self.outside(mapped(self.wrong, self.ins, self.outs)(check_vma))


@dataclass(frozen=True)
class Program:
    """A right program.

    Arguments:
      make: from check_vma, the whole function, shard_map and transformations included.
      reference: the plain function.
      args: its arguments.
      vma: settings of check_vma under which it is right.
      notes: codes of the notes and warnings that the checker gives.
    """

    make: Callable[[bool], Callable[..., Any]]
    reference: Callable[..., Any]
    args: tuple[Any, ...]
    vma: tuple[bool, ...] = (True, False)
    notes: tuple[str, ...] = ()


def mapped(body, ins, outs):
    return lambda vma: jax.shard_map(body, mesh=mesh(), in_specs=ins, out_specs=outs, check_vma=vma)


def report_of(body, ins, outs, *args, over=None, vma=False, **options):
    """What sbp says of a region with these specs and arguments, on `mesh()` or another mesh."""
    over = mesh() if over is None else over
    region = jax.shard_map(body, mesh=over, in_specs=ins, out_specs=outs, check_vma=vma, **options)
    return sbp.check_shard_map(region, *args, mesh=over)


def outer_grad(body, ins, outs, argnums):
    """The gradient of a scalar loss whose forward pass is the region."""
    return lambda vma: jax.value_and_grad(mapped(body, ins, outs)(vma), argnums)


def averaged(x):
    """The mean over the devices of `data`."""
    return jax.lax.pmean(x, "data")


def valued_step(loss, of_value=lambda value: value, of_gradient=lambda gradient: gradient):
    """A function that returns the loss, and the weights after a step of gradient descent.
    `of_value` changes the loss, and `of_gradient` the gradient."""

    def step(weights, *samples):
        value, gradients = jax.value_and_grad(loss)(weights, *samples)
        return of_value(value), jax.tree.map(
            lambda w, g: w - 0.1 * g, weights, of_gradient(gradients)
        )

    return step


def is_right(fn, args, want, rtol=2e-3, atol=2e-4):
    """Whether each device holds the right part of each result."""

    def near(shard, whole):
        part = np.asarray(whole, float)[shard.index]
        return np.allclose(np.asarray(shard.data, float), part, rtol=rtol, atol=atol)

    return all(
        g.shape == np.shape(w) and all(near(shard, w) for shard in g.addressable_shards)
        for g, w in zip(jax.tree.leaves(jax.jit(fn)(*args)), jax.tree.leaves(want), strict=True)
    )
