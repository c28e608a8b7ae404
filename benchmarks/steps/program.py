"""What a compared step is, and the ways to run it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax
from jax.experimental import topologies
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

import sbp


@dataclass(frozen=True, slots=True)
class Mark:
    """Where an expert says how a program is to be split; without a mesh, nothing is said.

    `mark(x, *dims)` says it of an activation, as in a `PartitionSpec`.
    """

    mesh: Mesh | AbstractMesh | None = None

    def __call__(self, x: jax.Array, *dims: Any) -> jax.Array:
        if self.mesh is None:
            return x
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, PartitionSpec(*dims)))

    def locally(self, f: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """`f` on the shards of its operands, where `jax.jit` cannot split what `f` calls."""
        if self.mesh is None:
            return f
        return jax.shard_map(
            f, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step of training or decoding, with what an expert says of it.

    Arguments:
        make: the step, from the mark for its activations.
        avals: its arguments.
        in_specs: how the expert shards them: a `PartitionSpec` for each leaf.
        out_specs: how the results are sharded, alike.
        mesh: size of each mesh axis.
        topology: the TPU topology, of which the mesh takes all chips.
        donate: positions of donated arguments.
        by_hand: the step on the shards of one device, with its collectives; None where nobody has
            written it.
        region: the step as `sbp` gets it where its user writes a region by hand; None where it gets
            `make` without marks.
        stages: names and sizes of the two axes of `by_hand` that the only axis of the mesh is cut
            into; empty where `by_hand` has the axes of the mesh.
        checked: whether `jax.shard_map` checks `by_hand`; it cannot where Pallas is called.
    """

    make: Callable[[Mark], Callable[..., Any]]
    avals: tuple[Any, ...]
    in_specs: tuple[Any, ...]
    out_specs: Any
    mesh: tuple[tuple[str, int], ...]
    topology: str = "v5e:4x4"
    donate: tuple[int, ...] = ()
    by_hand: Callable[..., Any] | None = None
    region: Callable[..., Any] | None = None
    stages: tuple[tuple[str, int], ...] = ()
    checked: bool = True

    @property
    def chip(self) -> str:
        """The kind of TPU."""
        return self.topology.split(":")[0]

    def devices(self) -> Mesh:
        """The mesh over the chips of the topology."""
        chips = topologies.get_topology_desc(platform="tpu", topology_name=self.topology).devices
        shape = [n for _, n in self.mesh]
        return Mesh(np.array(chips).reshape(shape), tuple(a for a, _ in self.mesh))

    def typed(self, mesh: Any, *, pinned: bool = True, **options: Any) -> Any:
        """The step under `sbp.jit` with the expert's types of arguments and results, and nothing
        else; unless `pinned`, without these too."""
        return sbp.jit(
            self.region or self.make(Mark()),
            mesh,
            in_types=self.in_specs if pinned else None,
            out_types=self.out_specs if pinned else None,
            donate_argnums=self.donate,
            **options,
        )

    def planned(self, mesh: Any, *, pinned: bool = True, **options: Any) -> Any:
        """The plan of `typed`."""
        return self.typed(mesh, pinned=pinned, **options).plan(*self.avals)

    def constrained(self, mesh: Mesh, *, with_marks: bool = True) -> Any:
        """The same step under `jax.jit`, with the expert's marks or without."""
        return jax.jit(
            self.make(Mark(mesh if with_marks else None)),
            in_shardings=shardings(mesh, self.in_specs),
            out_shardings=shardings(mesh, self.out_specs),
            donate_argnums=self.donate,
        )

    def expert(self, mesh: Mesh, *, with_marks: bool = True) -> Any:
        """`constrained`, compiled."""
        return self.constrained(mesh, with_marks=with_marks).lower(*self.avals).compile()

    def mapped(self, mesh: Mesh, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """`by_hand` under `jax.shard_map`."""
        assert self.by_hand is not None
        return jax.shard_map(
            self.by_hand,
            mesh=mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=self.checked,
        )

    def hand_written(self, mesh: Mesh) -> Any:
        """The step compiled from `by_hand`, under `jax.shard_map`."""
        in_specs, out_specs = self.in_specs, self.out_specs
        if self.stages:
            names = tuple(axis for axis, _ in self.stages)
            devices = mesh.devices.reshape([size for _, size in self.stages])
            (whole,) = mesh.axis_names
            mesh = Mesh(devices, names)
            in_specs, out_specs = (
                jax.tree.map(
                    lambda spec: PartitionSpec(*(names if d == whole else d for d in spec)),
                    specs,
                    is_leaf=is_spec,
                )
                for specs in (in_specs, out_specs)
            )
        f = jax.jit(
            self.mapped(mesh, in_specs, out_specs),
            in_shardings=shardings(mesh, in_specs),
            out_shardings=shardings(mesh, out_specs),
            donate_argnums=self.donate,
        )
        return f.lower(*self.avals).compile()


def is_spec(x: Any) -> bool:
    """Whether a leaf of a tree is a `PartitionSpec`, which is a tuple in some releases of JAX."""
    return isinstance(x, PartitionSpec)


def shardings(mesh: Mesh, specs: Any) -> Any:
    """The shardings of a tree of `PartitionSpec`s."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=is_spec)


def aval(*shape: int, dtype: Any = "float32") -> jax.ShapeDtypeStruct:
    """A shape of float32, unless `dtype` says otherwise."""
    return jax.ShapeDtypeStruct(shape, np.dtype(jax.numpy.dtype(dtype)))


ADAMW = optax.adamw(3e-4, weight_decay=0.1)
"""The optimiser of all training steps."""


def training_step(loss: Callable[..., jax.Array]) -> Callable[..., Any]:
    """A step of AdamW: `(params, state, *batch) -> (params, state, loss)`."""

    def step(params: Any, state: Any, *batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, *batch)
        updates, state = ADAMW.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def marked(mark: Mark, tree: Any, specs: Any) -> Any:
    """A tree of arrays, each with the mark of its `PartitionSpec`."""
    return jax.tree.map(lambda spec, x: mark(x, *spec), specs, tree, is_leaf=is_spec)


def accumulating_step(
    loss: Callable[..., jax.Array], mark_gradients: Callable[[Any], Any]
) -> Callable[..., Any]:
    """As `training_step`, with the gradients of a scan over microbatches added up."""

    def step(params: Any, state: Any, *batch: Any) -> Any:
        def add(total: Any, microbatch: Any) -> Any:
            found = jax.value_and_grad(loss)(params, *microbatch)
            value, gradients = jax.tree.map(jax.numpy.add, total, found)
            return (value, mark_gradients(gradients)), None

        zeros = jax.tree.map(jax.numpy.zeros_like, params)
        total, _ = jax.lax.scan(add, (jax.numpy.zeros(()), mark_gradients(zeros)), batch)
        count = jax.tree.leaves(batch)[0].shape[0]
        value, gradients = jax.tree.map(lambda x: x / count, total)
        updates, state = ADAMW.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def training(
    *,
    loss: Callable[[Mark], Callable[..., jax.Array]],
    params: Any,
    specs: Any,
    batch: tuple[Any, ...],
    batch_specs: tuple[Any, ...],
    mesh: tuple[tuple[str, int], ...],
    topology: str = "v5e:4x4",
    microbatches: bool = False,
) -> Step:
    """A training step whose moments are sharded as their weights.

    Arguments:
        loss: `loss(mark)(params, *batch)`.
        params: shapes of the weights.
        specs: a `PartitionSpec` for each weight.
        batch, batch_specs: the other arguments.
        mesh, topology: as in `Step`.
        microbatches: the first dim of the batch counts microbatches, whose gradients are added up.
    """
    state = jax.eval_shape(ADAMW.init, params)
    state_specs = optax.tree_utils.tree_map_params(
        ADAMW, lambda _, spec: spec, state, specs, transform_non_params=lambda _: PartitionSpec()
    )
    return Step(
        make=lambda mark: (
            accumulating_step(loss(mark), lambda tree: marked(mark, tree, specs))
            if microbatches
            else training_step(loss(mark))
        ),
        avals=(params, state, *batch),
        in_specs=(specs, state_specs, *batch_specs),
        out_specs=(specs, state_specs, PartitionSpec()),
        mesh=mesh,
        topology=topology,
        donate=(0, 1),
    )
