"""Traces a program anew with one mesh axis of its regions at size 1, and compares the two."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from sbp import _jax
from sbp._jax_regions import Bind, of_call, regions_bound_by
from sbp.errors import SbpInternalError
from sbp.machine.mesh import MeshSpec
from sbp.shardmap.comparison import Attempt, ComparedRun, NotOnOneDevice, OneDeviceComparison
from sbp.shardmap.emulation import program_run, reason_of, too_large
from sbp.shardmap.meant import lengths_of, meant, permutes
from sbp.shardmap.regions import Analysis
from sbp.shardmap.written_sizes import AxisInCode, WrittenSizes
from sbp.trace.graph import Graph

_TRACES = itertools.count()
"""Numbers the traces: JAX shall take none that it cached for another mesh."""


def compared_runs(
    graph: Graph,
    fn: Any,
    traced: Callable[[Any], Graph],
    leaves: Sequence[Any],
    mesh: MeshSpec,
    found: Analysis,
) -> Iterator[ComparedRun]:
    """Compares a program with the same program on one device of each mesh axis on which some of its
    values have no reading.

    Arguments:
      graph: the program.
      fn: its function.
      traced: traces a function as the program.
      leaves: its arguments: arrays, numbers, or shapes.
      mesh: its mesh.
      found: its analysis.
    """
    unread = {a for u in found.coverage.unread for a in u.mesh_axes}
    axes = [(name, n) for name, n in mesh.axes if name in unread]
    if not axes:
        return
    if reason := too_large(graph, 1):
        yield from (ComparedRun(mesh_axis=name, size=n, untried=reason) for name, n in axes)
        return
    values, guessed = _values(leaves)
    run = program_run(graph)
    other = [*meant(graph, found.sighted.ranked)]
    if guessed:
        other.append("integers were not given, and random ones were taken")
    given = all(map(_given, leaves))
    for name, n in axes:
        resized = Resized(fn, traced, AxisInCode(name, n, lengths_of(graph, name)))
        comparison = OneDeviceComparison(
            run=run,
            alone=lambda attempt, at=resized: program_run(at.graph(attempt)),
            written=resized.written,
            values=values,
            given=given,
        )
        yield comparison.made(permutes(graph, name), other)


def _given(x: Any) -> bool:
    """Whether an argument is a value that this process has, not a shape."""
    if isinstance(x, jax.Array):
        return not isinstance(x, _jax.Tracer) and x.is_fully_addressable
    return isinstance(x, np.ndarray | np.generic | bool | int | float | complex)


def _values(leaves: Sequence[Any]) -> tuple[list[Any], bool]:
    """Values for all arguments, and whether integers had to be guessed."""
    values: list[Any] = []
    guessed = False
    for i, x in enumerate(leaves):
        if _given(x):
            plain = isinstance(x, jax.Array) and not _jax.is_extended(x.dtype)
            values.append(np.asarray(x) if plain else x)
            continue
        draw = np.random.default_rng([7, i])
        if _jax.is_extended(x.dtype):
            words = draw.integers(0, 2**32, (*x.shape, *_jax.key_shape(x.dtype)), np.uint32)
            values.append(_jax.wrap_key(words, x.dtype))
        elif jnp.issubdtype(x.dtype, jnp.inexact):
            values.append(jnp.asarray(draw.standard_normal(x.shape), x.dtype))
        else:
            guessed = True
            high = 2 if x.dtype == np.bool_ else 8
            values.append(jnp.asarray(draw.integers(0, high, x.shape), x.dtype))
    return values, guessed


@dataclass(slots=True, eq=False)
class Resized:
    """Traces a program with a mesh axis at size 1.

    Arguments:
      fn: its function.
      traced: traces a function as the program.
      axis: the mesh axis.
      written: the sizes that its functions have from outside; complete after the first trace.
    """

    fn: Any
    traced: Callable[[Any], Graph]
    axis: AxisInCode
    written: WrittenSizes = field(init=False)

    def __post_init__(self) -> None:
        self.written = WrittenSizes(self.axis)

    def graph(self, attempt: Attempt) -> Graph:
        """The program on one device of the axis.

        Raises:
          NotOnOneDevice: where the program cannot be read so.
        """

        self.written.read(self.fn)
        copied = self.written.replaced(attempt.names)

        def act(bind: Bind, args: tuple[Any, ...], params: dict[str, Any]) -> Any:
            size = dict(params["mesh"].shape).get(self.axis.name)
            mine = size == self.axis.size or (size == 1 and all(map(of_call, params["subfuns"])))
            if not mine:  # of another mesh, or the gradient of one that is already alone
                return bind(args, params)
            for fn in params["subfuns"]:
                self.written.read(fn)
            alone = params | {
                "mesh": self.axis.mesh_alone(params["mesh"]),
                "subfuns": tuple(copied(fn) for fn in params["subfuns"]),
            }
            if attempt.chained:
                return self.chain(bind, args, alone)
            return bind(args, alone)

        try:
            with _jax.own_traces(f"sbp_alone_{next(_TRACES)}"), regions_bound_by(act):
                return self.traced(copied(self.fn))
        except SbpInternalError:
            raise
        except Exception as error:  # the user's function, which may raise anything on other sizes
            raise NotOnOneDevice(reason_of(error)) from error

    def chain(self, bind: Bind, args: Sequence[Any], params: dict[str, Any]) -> Any:
        """The stages of a pipeline, one after the other: a pipeline of n stages computes what n
        pipelines of one stage do, of which each takes the result of the one before."""
        dims = [self.axis_dim(x.shape, s) for x, s in zip(args, params["in_specs"], strict=True)]
        if all(d is None for d in dims):
            raise NotOnOneDevice("no operand has one element for each device")
        given, out = list(args), None
        for stage in range(self.axis.size):
            shards = [
                x if d is None else lax.slice_in_dim(x, stage, stage + 1, axis=d)
                for x, d in zip(given, dims, strict=True)
            ]
            out = bind(tuple(shards), params)
            results = list(out)
            streams = [
                i
                for i, (x, d) in enumerate(zip(given, dims, strict=True))
                if d is None and [(x.shape, x.dtype)] == [(y.shape, y.dtype) for y in results]
            ]
            if len(streams) != 1:
                raise NotOnOneDevice("no operand alone is of the result's shape")
            given[streams[0]] = results[0]
        return out

    def axis_dim(self, shape: Sequence[int], spec: Any) -> int | None:
        """The dim of which each device of the axis has one element; None if there is none."""
        entries = tuple(spec) if isinstance(spec, PartitionSpec) else ()
        alone = [d for d, e in enumerate(entries) if e in (self.axis.name, (self.axis.name,))]
        return next((d for d in alone if shape[d] == self.axis.size), None)
