"""Small programs whose plan the TPU compiler judges, each under the choices that a user has.

    python -m benchmarks.repro              # all cases
    python -m benchmarks.repro sum ring     # some of them

Each line is one program: seconds and bytes as `sbp` models them, then collectives and cycles as
read from the program that the TPU compiler made ahead of time. `jax` lines are `jax.jit` with the
same shardings at the boundary. No TPU is needed, only the `libtpu` package.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

import sbp
from benchmarks.gshard_bytes import MIB  # sets the ahead-of-time environment before JAX is used
from benchmarks.hlo.schedule import StepTime, step_time
from benchmarks.hlo.traffic import bytes_by_kind, collectives

CHIP = "v5e"
"""Of which all topologies here are."""

NO_GATHERS = (sbp.forbid("all_gather"),)
"""With products that multiply while shards go round a ring, where no operand may be gathered."""

PRECISIONS: dict[str, Any] = {"native": None, "float32": jnp.float32}
"""The ways of summing 16-bit parts: values of `reduce_dtype`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One program on one mesh, with the options of `sbp.jit` to compare.

    Arguments:
        fn: the program.
        avals: its arguments.
        topology: a TPU topology, of which the mesh takes all chips.
        mesh: size of each mesh axis.
        in_types, out_types: of the boundary, for `sbp.jit` and `jax.jit` both.
        choices: options of `sbp.jit`, by the name of the line.
        donate: positions of donated arguments.
    """

    fn: Callable[..., Any]
    avals: tuple[Any, ...]
    topology: str = f"{CHIP}:4x4"
    mesh: tuple[tuple[str, int], ...] = (("d", 16),)
    in_types: Any
    out_types: Any
    choices: dict[str, dict[str, Any]] = field(default_factory=lambda: {"sbp": {}})
    donate: tuple[int, ...] = ()

    def devices(self) -> Mesh:
        """The mesh over the chips of the topology."""
        chips = topologies.get_topology_desc(platform="tpu", topology_name=self.topology).devices
        return Mesh(
            np.array(chips).reshape([n for _, n in self.mesh]), tuple(a for a, _ in self.mesh)
        )

    def plan(self, mesh: Any, options: dict[str, Any]) -> Any:
        """The plan under some options; `mesh` may be abstract, which plans but does not compile."""
        f = sbp.jit(
            self.fn, mesh, self.in_types, self.out_types, donate_argnums=self.donate, **options
        )
        return f.plan(*self.avals)

    def jax(self, mesh: Mesh) -> Any:
        """The same program compiled by `jax.jit` with the plan's own boundary shardings."""
        plan = self.plan(mesh, next(iter(self.choices.values())))
        avals = jax.tree.map(
            lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s),
            self.avals,
            tuple(plan.in_shardings),
        )
        f = jax.jit(self.fn, out_shardings=plan.out_shardings, donate_argnums=self.donate)
        return f.lower(*avals).compile()


def _of(shape: tuple[int, ...], dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _product(x: Any, w: Any) -> Any:
    return x @ w


def _weight_gradient(x: Any, dy: Any) -> Any:
    return x.T @ dy


def _cast_gradient(x: Any, dy: Any) -> Any:
    """A gradient that is made in float32 and cast for the optimiser."""
    return jnp.dot(x.T, dy, preferred_element_type=jnp.float32).astype(jnp.bfloat16)


def _vocabulary(h: Any, table: Any) -> Any:
    """Logits of a table that is kept in float32."""
    return h @ table.astype(jnp.bfloat16).T


def _adam_step(w: Any, mean: Any, square: Any, x: Any) -> Any:
    """One step of Adam on a product in bfloat16, by hand: no library is needed here."""
    g = jax.grad(lambda w: jnp.sum((x @ w.astype(jnp.bfloat16)).astype(jnp.float32) ** 2))(w)
    mean, square = 0.9 * mean + 0.1 * g, 0.99 * square + 0.01 * g * g
    return w - 3e-4 * mean / (jnp.sqrt(square) + 1e-8), mean, square


def _cast_in_loop(w: Any, xs: Any) -> Any:
    """A float32 weight that each trip casts."""

    def body(total: Any, x: Any) -> tuple[Any, None]:
        y = jnp.tanh(x @ w.astype(jnp.bfloat16))
        return total + jnp.sum(y.astype(jnp.float32)), None

    return jax.lax.scan(body, jnp.float32(0), xs)[0]


TOKENS = 32 * 2048
_SUMS = {f"sbp {name}": {"reduce_dtype": dtype} for name, dtype in PRECISIONS.items()}
_RINGS: dict[str, dict[str, Any]] = {"sbp": {}, "sbp rings": {"budgets": NO_GATHERS}}
_WEIGHT = _of((8192, 8192), jnp.float32)

CASES: dict[str, Case] = {
    **{
        f"sum to {out}": Case(
            fn=_weight_gradient,
            avals=(_of((TOKENS, 2048)), _of((TOKENS, 8192))),
            in_types=("d:S(0)", "d:S(0)"),
            out_types=f"d:{out}",
            choices=_SUMS,
        )
        for out in ("B", "S(0)", "S(1)")
    },
    "step": Case(
        fn=_adam_step,
        avals=(_WEIGHT, _WEIGHT, _WEIGHT, _of((131072, 8192))),
        in_types=("d:B", "d:B", "d:B", "d:S(0)"),
        out_types="d:B",
        choices=_SUMS,
        donate=(0, 1, 2),
    ),
    **{
        f"ring of {name}": Case(
            fn=_product,
            avals=(_of((TOKENS, 4096)), _of((4096, 11264))),
            in_types=("d:S(0)", types),
            out_types="d:S(0)",
            choices=_RINGS,
        )
        for name, types in (("rows", "d:S(0)"), ("columns", "d:S(1)"))
    },
    "cast sum": Case(
        fn=_cast_gradient,
        avals=(_of((TOKENS, 2048)), _of((TOKENS, 8192))),
        mesh=(("d", 4), ("e", 4)),  # over the whole mesh, this compiler scatters by an all-reduce
        in_types=("d:S(0)", "d:S(0)"),
        out_types="d:B",
        choices={"sbp": {}, "sbp bfloat16": {"reduce_dtype": jnp.bfloat16}},
    ),
    "vocabulary": Case(
        fn=_vocabulary,
        avals=(_of((8 * 2048, 2048)), _of((262144, 2048), jnp.float32)),
        topology=f"{CHIP}:2x4",
        mesh=(("d", 2), ("t", 4)),
        in_types=("d:S(0)", "t:S(0)"),
        out_types="d:S(0) t:S(1)",
    ),
    "loop": Case(
        fn=_cast_in_loop,
        avals=(_WEIGHT, _of((8, 16 * 2048, 8192))),
        in_types=("d:S(0)", "d:S(1)"),
        out_types="d:B",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledCase:
    """What the TPU compiler makes of a program; sizes are per device.

    Arguments:
        bytes_by_kind: bytes sent, by kind of collective.
        step: the step's time on the compiler's schedule.
    """

    bytes_by_kind: dict[str, float]
    step: StepTime

    def __str__(self) -> str:
        sent = ", ".join(
            f"{kind} {size / MIB:.1f} MiB" for kind, size in self.bytes_by_kind.items()
        )
        step = self.step
        unknown = f", not counted: {', '.join(step.unknown)}" if step.unknown else ""
        return (
            f"{sent or 'nothing sent'}; {step.cycles / 1e6:.2f} Mcycles, step"
            f" {step.seconds * 1e3:.3f} ms{unknown}"
        )


def judge(compiled: Any, num_devices: int) -> CompiledCase:
    """Reads a compiled program."""
    text = compiled.as_text()
    return CompiledCase(
        bytes_by_kind=bytes_by_kind(collectives(text, num_devices)),
        step=step_time(text, num_devices, CHIP),
    )


def lines(name: str, case: Case) -> Iterator[str]:
    """What to print of a case, one line for each program."""
    mesh = case.devices()
    for label, options in case.choices.items():
        plan = case.plan(mesh, options)
        found = judge(plan.lower().compile(), mesh.size)
        modelled = f"{plan.cost.seconds * 1e3:.3f} ms, {plan.cost.bytes_per_device / MIB:.1f} MiB"
        yield f"{name}: {label}: modelled {modelled}; compiled {found}"
    yield f"{name}: jax: compiled {judge(case.jax(mesh), mesh.size)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("case", nargs="*", help=f"first words of: {', '.join(CASES)}")
    wanted = parser.parse_args().case
    for name, case in CASES.items():
        if not wanted or any(name.startswith(w) for w in wanted):
            for line in lines(name, case):
                print(line, flush=True)


if __name__ == "__main__":
    main()
