"""What single rows send, hold and take under sbp and under `jax.jit`, on the TPU compiler.

    python -m benchmarks.row_bytes [--topology v5e:2x4] [--only NAME ..]

Each case is a function with the types of its arguments and results; both sides are compiled ahead
of time from the same function and the same shardings. The figures are for one device: bytes that
its collectives send per call, by the ring optimum, bytes of temporaries, and seconds on the
compiler's own schedule (`benchmarks.hlo.schedule`).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import topologies
from jax.sharding import Mesh

import sbp
from benchmarks.gshard_bytes import MIB  # sets the ahead-of-time environment before JAX is used
from benchmarks.hlo.schedule import step_time
from benchmarks.hlo.traffic import bytes_by_kind, collectives


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A program whose types are fixed at its boundary.

    Arguments:
      fn: the function.
      shapes: shapes of its arguments.
      ins: the type of each argument.
      outs: the type of each result.
      axes: sizes of the mesh axes; their names are `x` and `y`.
      dtype: the dtype of its arguments.
    """

    fn: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    ins: tuple[str, ...]
    outs: Any
    axes: tuple[int, ...] = (8,)
    dtype: Any = jnp.float32

    def arguments(self) -> list[jax.ShapeDtypeStruct]:
        """The arguments, as shapes."""
        return [jax.ShapeDtypeStruct(s, self.dtype) for s in self.shapes]


def conv_gradient(padding: Any, strides: tuple[int, int] = (1, 1), **options: Any) -> Any:
    """The gradient of the mean square of a convolution, by kernel and image."""

    def loss(kernel: Any, image: Any) -> Any:
        out = lax.conv_general_dilated(
            image,
            kernel,
            strides,
            padding,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            **options,
        )
        return jnp.mean(out**2)

    return jax.grad(loss, argnums=(0, 1))


def conv_case(rows: int, padding: Any, strides: tuple[int, int] = (1, 1), **options: Any) -> Case:
    """A convolution's gradient, the image split by its rows."""
    return Case(
        fn=conv_gradient(padding, strides, **options),
        shapes=((3, 3, 16, 32), (8, rows, 256, 16)),
        ins=("B", "x:S(1)"),
        outs=("B", "x:S(1)"),
    )


def log_sum(x: Any) -> Any:
    """The maximum and the sum of exponentials below it of each column, as pairs."""

    def joined(p: Any, q: Any) -> Any:
        top = jnp.maximum(p[0], q[0])
        return top, p[1] * jnp.exp(p[0] - top) + q[1] * jnp.exp(q[0] - top)

    return lax.reduce(
        (x, jnp.ones_like(x)), (np.float32(-1e30), np.float32(0)), joined, dimensions=(0,)
    )


def recurrence(p: Any, q: Any) -> Any:
    """Joins two steps of a linear recurrence, `x -> p[0] * x + p[1]`."""
    return p[0] * q[0], q[0] * p[1] + q[1]


def later_largest(p: Any, q: Any) -> Any:
    """Of two (value, index) pairs that with the larger value."""
    is_larger = q[0] > p[0]
    return jnp.where(is_larger, q[0], p[0]), jnp.where(is_larger, q[1], p[1])


def running_argmax(x: Any) -> Any:
    """The maximum so far of each column, and its index."""
    numbers = lax.broadcasted_iota(jnp.int32, x.shape, 0)
    return lax.associative_scan(later_largest, (x, numbers))


def scanned(a: Any, b: Any, **options: Any) -> Any:
    """All steps of a linear recurrence."""
    return lax.associative_scan(recurrence, (a, b), **options)


def pairs_case(fn: Any) -> Case:
    """A function of two arrays of 4096 rows that are split by rows; so are its two results."""
    return Case(fn=fn, shapes=((4096, 512),) * 2, ins=("x:S(0)",) * 2, outs=("x:S(0)",) * 2)


def scan_gradient(a: Any, b: Any) -> Any:
    """The gradient of the sum of squares of a recurrence."""
    return jax.grad(lambda a, b: jnp.sum(scanned(a, b)[1] ** 2), argnums=(0, 1))(a, b)


def stencil(x: Any) -> Any:
    """Four times each element, less its four neighbours; zeros around."""
    p = jnp.pad(x, 1)
    return 4 * x - p[:-2, 1:-1] - p[2:, 1:-1] - p[1:-1, :-2] - p[1:-1, 2:]


CASES: dict[str, Case] = {
    "conv gradient VALID": conv_case(256, "VALID"),
    "conv gradient VALID, two dims": Case(
        fn=conv_gradient("VALID"),
        shapes=((3, 3, 16, 32), (2, 512, 512, 16)),
        ins=("B", "x:S(1) y:S(2)"),
        outs=("B", "x:S(1) y:S(2)"),
        axes=(2, 4),
    ),
    "conv gradient SAME": conv_case(256, "SAME"),
    "conv gradient stride 3": conv_case(256, "VALID", (3, 3)),
    "conv gradient padding (1, 1)": conv_case(256, [(1, 1), (1, 1)], (2, 2)),
    "conv gradient lhs_dilation": conv_case(256, [(1, 2), (1, 2)], lhs_dilation=(2, 2)),
    "conv gradient stride 2, 255 rows": conv_case(512, "VALID", (2, 2)),
    "conv gradient rhs_dilation": conv_case(256, "VALID", rhs_dilation=(2, 2)),
    "roll by 1": Case(
        fn=lambda x: jnp.roll(x, 1, 0), shapes=((1024, 4096),), ins=("x:S(0)",), outs="x:S(0)"
    ),
    "roll by 300": Case(
        fn=lambda x: jnp.roll(x, 300, 0), shapes=((1024, 4096),), ins=("x:S(0)",), outs="x:S(0)"
    ),
    "roll by one stage": Case(
        fn=lambda x: jnp.roll(x, 1, 0), shapes=((8, 512, 1024),), ins=("x:S(0)",), outs="x:S(0)"
    ),
    "concatenate([new, x[:-1]])": Case(
        fn=lambda new, x: jnp.concatenate([new, x[:-1]]),
        shapes=((1, 512, 1024), (8, 512, 1024)),
        ins=("B", "x:S(0)"),
        outs="x:S(0)",
    ),
    "diff, prepend": Case(
        fn=lambda x: jnp.diff(x, axis=0, prepend=x[:1]),
        shapes=((1024, 4096),),
        ins=("x:S(0)",),
        outs="x:S(0)",
    ),
    "stencil": Case(fn=stencil, shapes=((2048, 2048),), ins=("x:S(0)",), outs="x:S(0)"),
    "stencil, gradient": Case(
        fn=jax.grad(lambda x: jnp.sum(stencil(x) ** 2)),
        shapes=((2048, 2048),),
        ins=("x:S(0)",),
        outs="x:S(0)",
    ),
    "matmul in panels": Case(
        fn=lambda x, y: x @ y,
        shapes=((8192, 8192), (8192, 8192)),
        ins=("x:S(0) y:S(1)",) * 2,
        outs="x:S(0) y:S(1)",
        axes=(2, 4),
        dtype=jnp.bfloat16,
    ),
    "reduce of (max, sum-exp)": Case(
        fn=log_sum, shapes=((65536, 512),), ins=("x:S(0)",), outs=("B", "B")
    ),
    "scan of a recurrence": pairs_case(scanned),
    "scan, gradient": Case(
        fn=scan_gradient,
        shapes=((4096, 2048),) * 2,
        ins=("x:S(0)",) * 2,
        outs=("x:S(0)",) * 2,
    ),
    "scan of (max, index)": Case(
        fn=running_argmax, shapes=((4096, 512),), ins=("x:S(0)",), outs=("x:S(0)",) * 2
    ),
    "pad (1, -1)": Case(
        fn=lambda x: lax.pad(x, np.float32(0), [(1, -1, 0), (0, 0, 0), (0, 0, 0)]),
        shapes=((8, 512, 1024),),
        ins=("x:S(0)",),
        outs="x:S(0)",
    ),
    # Not looked at while halo exchanges were made faster:
    "convolution of volumes": Case(
        fn=lambda x, w: lax.conv_general_dilated(
            x, w, (1, 1, 1), "SAME", dimension_numbers=("NDHWC", "DHWIO", "NDHWC")
        ),
        shapes=((2, 64, 64, 64, 16), (3, 3, 3, 16, 32)),
        ins=("x:S(1)", "B"),
        outs="x:S(1)",
    ),
    "causal convolution": Case(
        fn=lambda x, w: lax.conv_general_dilated(
            x, w, (1,), [(3, 0)], dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=512
        ),
        shapes=((4, 8192, 512), (4, 1, 512)),
        ins=("x:S(1)", "B"),
        outs="x:S(1)",
    ),
    "convolution of padded images": Case(
        fn=lambda x, w: lax.conv_general_dilated(
            jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0))),
            w,
            (1, 1),
            "VALID",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        ),
        shapes=((8, 256, 256, 32), (3, 3, 32, 32)),
        ins=("x:S(1)", "B"),
        outs="x:S(1)",
    ),
    # Not looked at while pads were folded into windows:
    "padded images, channels first, stride 2": Case(
        fn=lambda x, w: lax.conv_general_dilated(
            jnp.pad(x, ((0, 0), (0, 0), (3, 3), (3, 3))),
            w,
            (2, 2),
            "VALID",
            dimension_numbers=("NCHW", "OIHW", "NCHW"),
        ),
        shapes=((8, 16, 256, 256), (32, 16, 7, 7)),
        ins=("x:S(2)", "B"),
        outs="x:S(2)",
    ),
    "padded images, depthwise, gradient": Case(
        fn=jax.grad(
            lambda x, w: jnp.sin(
                lax.conv_general_dilated(
                    jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0))),
                    w,
                    (1, 1),
                    "VALID",
                    dimension_numbers=("NHWC", "HWIO", "NHWC"),
                    feature_group_count=32,
                )
            ).sum()
        ),
        shapes=((8, 256, 256, 32), (3, 3, 1, 32)),
        ins=("x:S(1)", "B"),
        outs="x:S(1)",
    ),
    "sums over padded volumes": Case(
        fn=lambda x: lax.reduce_window(
            jnp.pad(x, ((0, 0), (2, 2), (1, 1), (1, 1), (0, 0))),
            0.0,
            lax.add,
            (1, 5, 3, 3, 1),
            (1, 1, 1, 1, 1),
            "VALID",
        ),
        shapes=((2, 64, 64, 64, 16),),
        ins=("x:S(1)",),
        outs="x:S(1)",
    ),
    "average pool, gradient": Case(
        fn=jax.grad(
            lambda x: jnp.sin(
                lax.reduce_window(x, 0.0, lax.add, (1, 3, 3, 1), (1, 1, 1, 1), "SAME")
            ).sum()
        ),
        shapes=((8, 256, 256, 64),),
        ins=("x:S(1)",),
        outs="x:S(1)",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Bytes that one device sends, by kind of collective, bytes of its temporaries, and seconds."""

    sent: dict[str, float]
    temporaries: int
    seconds: float

    @property
    def total(self) -> float:
        """Bytes sent by all kinds."""
        return sum(self.sent.values())

    def __str__(self) -> str:
        kinds = ", ".join(f"{k} {v / MIB:.3f}" for k, v in sorted(self.sent.items())) or "nothing"
        return (
            f"{self.total / MIB:.3f} MiB ({kinds}); temporaries {self.temporaries / MIB:.3f} MiB;"
            f" {1e6 * self.seconds:.1f} us"
        )


def mesh_of(case: Case, topology: str) -> Mesh:
    """A mesh of the case's axes over the devices of a TPU topology."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    return Mesh(np.array(devices).reshape(case.axes), ("x", "y")[: len(case.axes)])


def plan_of(case: Case, mesh: Mesh) -> sbp.Plan:
    """The plan of a case."""
    step = sbp.jit(case.fn, mesh, in_types=case.ins, out_types=case.outs)
    return step.plan(*case.arguments())


def under_jit(case: Case, plan: sbp.Plan, chip: str = "v5e") -> Figures:
    """The figures of `jax.jit` with the shardings of the plan."""
    step = jax.jit(case.fn, in_shardings=plan.in_shardings, out_shardings=plan.out_shardings)
    return figures(step.lower(*case.arguments()).compile(), case, chip)


def figures(compiled: Any, case: Case, chip: str = "v5e") -> Figures:
    """What a compiled program sends, holds and takes."""
    text, devices = compiled.as_text(), int(np.prod(case.axes))
    return Figures(
        sent=dict(bytes_by_kind(collectives(text, devices))),
        temporaries=compiled.memory_analysis().temp_size_in_bytes,
        seconds=step_time(text, devices, chip).seconds,
    )


def ratios(ours: Figures, jit: Figures) -> str:
    """The figures of sbp over those of `jax.jit`."""
    if not jit.total:
        return "jax.jit sends nothing"
    held = (
        f", {ours.temporaries / jit.temporaries:.2f} of the temporaries" if jit.temporaries else ""
    )
    time = f"{ours.seconds / jit.seconds:.2f} of the time"
    return f"{ours.total / jit.total:.3f} of the bytes, {time}{held}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--topology", default="v5e:2x4", help="a TPU topology (default v5e:2x4)")
    parser.add_argument("--only", nargs="*", help="names of cases, or parts of names")
    parser.add_argument("--show", action="store_true", help="print plans")
    args = parser.parse_args()
    for name, case in CASES.items():
        if args.only and not any(part in name for part in args.only):
            continue
        plan = plan_of(case, mesh_of(case, args.topology))
        chip = args.topology.split(":")[0]
        jit, ours = under_jit(case, plan, chip), figures(plan.lower().compile(), case, chip)
        print(f"{name}\n  jax.jit {jit}\n  sbp.jit {ours}")
        print(f"  planned {plan.cost.bytes_per_device / MIB:.3f} MiB; {ratios(ours, jit)}")
        if args.show:
            print(plan)


if __name__ == "__main__":
    main()
