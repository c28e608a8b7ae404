"""A program with `shard_map` as it is written in practice, its oracle, and its usual mistakes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

import sbp


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A right program and its wrong versions, which differ by one mistake each. `write` makes the
    region of a version, its in_specs and its out_specs."""

    mesh: dict[str, int]
    write: Callable[[str | None], tuple[Callable[..., Any], Any, Any]]
    oracle: Callable[..., Any]
    args: Callable[[], tuple[Any, ...]]
    mistakes: Sequence[str]
    check_vma: bool


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
    Without, it makes the region of a mistake or None, with its specs.
    """

    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        of_region = lambda mistake: (partial(function, mistake), ins, outs)
        assert function.__name__ not in CASES
        CASES[function.__name__] = Case(
            mesh=mesh,
            write=function if ins is None else of_region,
            oracle=oracle,
            args=args,
            mistakes=mistakes,
            check_vma=check_vma,
        )
        return function

    return enter


def mapped(case: Case, mistake: str | None, mesh: Any) -> Callable[..., Any]:
    """A version of a case in `jax.shard_map`."""
    region, ins, outs = case.write(mistake)
    return jax.shard_map(region, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=case.check_vma)


def devices(axes: dict[str, int]) -> jax.sharding.Mesh:
    """A mesh of simulated devices with axes of type Auto."""
    return sbp.make_mesh(tuple(axes.values()), tuple(axes))


def floats(*shapes: tuple[int, ...], seed: int = 0) -> tuple[np.ndarray, ...]:
    """Normal values of these shapes, in float32."""
    draw = np.random.default_rng(seed)
    return tuple(draw.normal(size=shape).astype(np.float32) for shape in shapes)


def integers(low: int, high: int, *shape: int, seed: int = 1) -> np.ndarray:
    """Integers of `[low, high)` in int32."""
    return np.random.default_rng(seed).integers(low, high, shape).astype(np.int32)
