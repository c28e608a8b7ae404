"""Meshes of TPU slices that are not there, for the TPU compiler."""

import jax
import numpy as np
from jax.experimental import topologies

import sbp


def mesh_of(topology: str, **axes: int) -> jax.sharding.Mesh:
    """A mesh over all devices of a slice, such as `mesh_of("v5e:2x4", x=2, y=4)`."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    return jax.sharding.Mesh(np.array(devices).reshape(*axes.values()), tuple(axes))


def kinds_of(plan: sbp.Plan) -> list[str]:
    """The kinds of the plan's conversions, step by step."""
    return [step.kind for planned in plan.program.boxes() for step in planned.box.steps]
