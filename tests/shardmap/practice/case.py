"""A program with `shard_map` as it is written in practice, its oracle, and its usual mistakes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One version of a case: the region with its specs, and what surrounds it."""

    region: Callable[..., Any]
    in_specs: Any
    out_specs: Any
    around: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
    check_vma: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A right program and its wrong versions, which differ by one mistake each."""

    name: str
    mesh: dict[str, int]
    write: Callable[[str | None], Program]
    oracle: Callable[..., Any]
    args: Callable[[], tuple[Any, ...]]
    mistakes: Sequence[str]


CASES: dict[str, Case] = {}


def case(
    mesh: dict[str, int],
    oracle: Callable[..., Any],
    args: Callable[[], Any],
    *mistakes: str,
    ins: Any = None,
    outs: Any = None,
    check_vma: bool = False,
):
    """Enter the decorated function as a case.

    With `ins`, it is the region with these specs, and its first argument is a mistake or None.
    Without, it makes a `Program` of a mistake or None.
    """

    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        def of_region(mistake: str | None) -> Program:
            region = partial(function, mistake)
            return Program(region=region, in_specs=ins, out_specs=outs, check_vma=check_vma)

        name = function.__name__
        assert name not in CASES
        write = function if ins is None else of_region
        CASES[name] = Case(
            name=name, mesh=mesh, write=write, oracle=oracle, args=args, mistakes=mistakes
        )
        return function

    return enter


def mapped(program: Program, mesh: Any) -> Callable[..., Any]:
    """The program with its region in `jax.shard_map`."""
    region = jax.shard_map(
        program.region,
        mesh=mesh,
        in_specs=program.in_specs,
        out_specs=program.out_specs,
        check_vma=program.check_vma,
    )
    return program.around(region) if program.around else region


def devices(axes: dict[str, int]) -> Mesh:
    """A mesh of simulated devices with axes of type Auto."""
    count = int(np.prod(list(axes.values())))
    return Mesh(np.array(jax.devices()[:count]).reshape(tuple(axes.values())), tuple(axes))


def floats(*shapes: tuple[int, ...], seed: int = 0) -> tuple[np.ndarray, ...]:
    """Normal values of these shapes, in float32."""
    draw = np.random.default_rng(seed)
    return tuple(draw.normal(size=shape).astype(np.float32) for shape in shapes)


def integers(low: int, high: int, *shape: int, seed: int = 1) -> np.ndarray:
    """Integers of `[low, high)` in int32."""
    return np.random.default_rng(seed).integers(low, high, shape).astype(np.int32)
