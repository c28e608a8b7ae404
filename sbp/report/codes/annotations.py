"""Codes of types, meshes and options that are written wrongly."""

from __future__ import annotations

from sbp.report.codes.page import CodePage

ANNOTATIONS = (
    CodePage(
        "type-syntax",
        """
        A type text is a list of AXIS:ATOM separated by blanks, where ATOM is S(dim), B, P,
        P(monoid) or ?, and axes that are not named are B. B alone is broadcast on every axis. The
        message points at the column where the text stops being that. A plan's text that does not
        parse back has this code too, with the line.
        """,
        """
sbp.parse("data:S(0 model:B")
""",
        """
sbp.parse("data:S(0) model:B")
""",
    ),
    CodePage(
        "unknown-axis",
        """
        A type, an annotation or a specification names a mesh axis that the mesh does not have. The
        nearest name is suggested.
        """,
        """
sbp.jit(lambda x: sbp.split(x, 0, "modle"), mesh).plan(x)
""",
        """
sbp.jit(lambda x: sbp.split(x, 0, "model"), mesh).plan(x)
""",
    ),
    CodePage(
        "dim-out-of-range",
        """
        S(d) splits dim d of the tensor, counted from the front and from 0, and the tensor has no
        such dim. sbp.split also takes negative dims, which count from the back; S(d) does not.
        """,
        """
sbp.annotate(jnp.zeros((8, 4)), data=S(2))
""",
        """
sbp.annotate(jnp.zeros((8, 4)), data=S(1))
""",
    ),
    CodePage(
        "mixed-monoids",
        """
        A tensor cannot be partial under two different monoids at once: the maximum over one axis of
        sums over another is not the sum over the one of maxima over the other. Reduce one of them
        first.
        """,
        """
sbp.parse("data:P(sum) model:P(max)")
""",
        """
sbp.parse("data:P(sum) model:B")
""",
    ),
    CodePage(
        "bad-placement",
        """
        sbp.shard takes GShard's device assignment: an array of device ids, one for each slice. It
        is accepted when some split of this mesh places the slices just so. Otherwise build the mesh
        with its devices in the order that you want, or use sbp.split.
        """,
        """
import numpy as np

sbp.jit(lambda x: sbp.shard(x, np.array([[0], [7], [2], [5], [4], [3], [6], [1]])), mesh).plan(x)
""",
        """
import numpy as np

sbp.jit(lambda x: sbp.shard(x, np.arange(8).reshape(8, 1)), mesh).plan(x)
""",
    ),
    CodePage(
        "mesh-devices",
        """
        The mesh has more devices than there are. Take a smaller mesh, simulate devices on the host
        with XLA_FLAGS=--xla_force_host_platform_device_count=N (before JAX is first used), or plan
        on a jax.sharding.AbstractMesh, which needs no devices at all.
        """,
        """
sbp.make_mesh((64, 64), ("data", "model"))
""",
        """
jax.sharding.AbstractMesh((64, 64), ("data", "model"))
""",
    ),
    CodePage(
        "abstract-mesh",
        """
        A plan for an AbstractMesh can be read, priced and lowered, but there are no devices to run
        it on. Make a mesh over devices with sbp.make_mesh or jax.make_mesh.
        """,
        """
sbp.jit(jnp.tanh, mesh)(jnp.zeros((8, 16)))
""",
        """
sbp.jit(jnp.tanh, sbp.make_mesh((1,), ("data",)))(jnp.zeros((8, 16)))
""",
    ),
    CodePage(
        "not-partial",
        """
        An input that is pinned P must come as an sbp.Partial, which holds one unreduced part for
        each device along the axis, as an output pinned P does; a plain array has only one value.
        Pin the input S or B instead, or pass the Partial that another sbp.jit function returned.
        """,
        """
sbp.jit(lambda x: x * 2.0, mesh, in_types=("model:P(sum)",)).plan(jnp.zeros((8, 16)))
""",
        """
sbp.jit(lambda x: x * 2.0, mesh, in_types=("B",)).plan(jnp.zeros((8, 16)))
""",
    ),
    CodePage(
        "bad-argument",
        """
        An argument of an sbp function does not fit; the message says what is taken and what was
        given. Typical: in_types with another number of entries than the function has positional
        arguments, a type where a tensor is wanted, an argument that is no array and not static.
        """,
        """
sbp.jit(lambda x, w: x @ w, mesh, in_types=("B",)).plan(x, w)
""",
        """
sbp.jit(lambda x, w: x @ w, mesh, in_types=("B", "B")).plan(x, w)
""",
    ),
    CodePage(
        "unknown-option",
        """
        An option, a policy, a preset, a hardware name or a monoid that does not exist. The nearest
        one is suggested.
        """,
        """
sbp.jit(jnp.tanh, mesh, boxing="explicitly")
""",
        """
sbp.jit(jnp.tanh, mesh, boxing="explicit")
""",
    ),
)
