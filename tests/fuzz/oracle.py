"""The judgement of a program: `sbp.jit` on its mesh against `jax.jit` of the same function on one
device.

Exact values must be equal to the last bit. Other values must agree within a tolerance relative to
the largest element. If they do not, the reference runs again with a change of about one rounding
error in every rounded value. If this moves the result by as much as the difference, rounding caused
the difference, and not the plan.
"""

import signal
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

import sbp
from sbp.types import Unreduced
from tests.fuzz.program import Info, Program, arguments, function_source, load

Verdict = Literal["same", "rounding", "refused", "mismatch", "no-typing", "crash", "time-out"]
FAILURES: tuple[Verdict, ...] = ("mismatch", "no-typing", "crash", "time-out")
TIME_OUT_SECONDS = 120
TOLERANCE = {"float32": 1e-4, "complex64": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}
ROUNDING = {"float32": 2.0**-23, "complex64": 2.0**-23, "bfloat16": 2.0**-8, "float16": 2.0**-10}
TRIALS = 3
# times what the trials move: they sample the error, and a sum in another order may exceed the
# sample
MARGIN = 30.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a program.

    Arguments:
      verdict: see `judge`.
      detail: the first difference, or the exception.
      where: what minimising must preserve: the exception's type and place.
    """

    verdict: Verdict
    detail: str = ""
    where: str = ""

    @property
    def failed(self) -> bool:
        """Whether this is a fault."""
        return self.verdict in FAILURES


NO_TANGENT = (
    "can't apply forward-mode autodiff",
    "Differentiation rule for 'custom_lin' not implemented",
)
"""How JAX refuses the tangent of a `custom_vjp` function: called there, or in a linearised one."""


class TimeOut(BaseException):
    """The program took too long; no Exception, so that nothing on the way catches it."""


def judge(program: Program) -> Outcome:
    """Runs a program both ways.

    Returns:
      `same`, or `rounding` where a difference is the reference's own; `refused` for an SbpTypeError
      under a policy other than "auto", or where JAX has no such program;
      else a failure: `mismatch`, `no-typing` (an SbpTypeError under "auto"), `crash`, `time-out`.
    """
    # Thousands of programs; only results are judged here.
    with warnings.catch_warnings(action="ignore"), _alarm():
        source = function_source(program)
        try:
            fn = load(source, f"fuzz-{program.seed}")["program"]
            want = jax.block_until_ready(jax.jit(fn)(*arguments(program)))
        except Exception as error:  # whatever JAX raises is in the outcome: refused, or a crash
            if any(words in str(error) for words in NO_TANGENT):
                return Outcome(
                    "refused", "JAX has no tangent of a custom_vjp function", "reference"
                )
            return Outcome(
                "crash",
                f"the reference: {type(error).__name__}: {error}",
                f"reference {type(error).__name__}",
            )
        try:
            f, args = jitted(program, fn)
            got = jax.block_until_ready(f(*args))
        except sbp.SbpTypeError as error:
            return Outcome(
                "no-typing" if program.boxing == "auto" else "refused",
                str(error)[:2000],
                error.code,
            )
        except TimeOut:
            return Outcome("time-out", f"over {TIME_OUT_SECONDS} s", "time-out")
        except Exception as error:  # whatever sbp raises is its fault: the outcome is a crash
            return Outcome(
                "crash",
                "".join(traceback.format_exception(error)[-6:])[-3000:],
                f"{type(error).__name__} {_place(error)}",
            )
        bad = _differences(got, want, _infos(program))
        if not bad:
            return Outcome("same")
        if all(not exact for _, exact, _ in bad):
            slack = _slack(program, want)
            bad = [b for b in bad if not b[2] <= MARGIN * slack[b[0]]]
        if not bad:
            return Outcome("rounding")
        number, _, _ = bad[0]
        a, b = jax.tree.leaves(_whole(got))[number], jax.tree.leaves(want)[number]
        return Outcome("mismatch", f"leaf {number}: {describe_difference(a, b)}", "mismatch")


def jitted(program: Program, fn: Any = None) -> tuple[Any, list[Any]]:
    """The program under `sbp.jit` on its mesh, and its arguments."""
    fn = fn or load(function_source(program), f"fuzz-{program.seed}")["program"]
    mesh = sbp.make_mesh(program.mesh, program.axes)
    make = {"parts_of": parts_of, "padded_of": padded_of}
    args = [jax.tree.map(jnp.asarray, x) for x in arguments(program)]
    for i, (how, type) in program.arrivals().items():
        args[i] = make[how](args[i], type, mesh)
    return sbp.jit(fn, mesh, **program.sbp_options()), args


def parts_of(x: Any, type: str, mesh: Any) -> sbp.Partial:
    """A value in parts, as an argument that is pinned partial: all at the first index, neutral
    elements or copies elsewhere."""
    t = sbp.parse(type, mesh_axes=mesh.axis_names)
    monoid = next(a.monoid for a in t.values() if isinstance(a, Unreduced))
    sizes = [
        int(mesh.shape[a])
        for a in mesh.axis_names
        if not isinstance(t.get(a), sbp.S) and t.get(a) != sbp.B
    ]
    x = np.asarray(x)
    parts = np.broadcast_to(x, (*sizes, *x.shape)).copy()
    if monoid in ("sum", "or") and x.dtype != np.bool_:
        parts[...] = np.zeros((), x.dtype)
        parts[(0,) * len(sizes)] = x
    return sbp.Partial(jnp.asarray(parts), t)


def padded_of(x: Any, type: str, mesh: Any) -> sbp.Padded:
    """A value as `sbp.Padded`, with NaN or ones in its padding."""
    held = sbp.Padded.of(x, type, mesh)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return held
    real = sbp.Padded.of(np.ones(held.shape, bool), type, mesh).parts
    filler = jnp.nan if jnp.issubdtype(x.dtype, jnp.inexact) else 1
    parts = jnp.where(real, held.parts, jnp.full(real.shape, filler, x.dtype))
    return sbp.Padded(parts, held.shape, type, mesh)


def _whole(tree: Any) -> Any:
    whole = lambda y: y.reduce() if isinstance(y, sbp.Partial) else y.full()

    held = sbp.Partial | sbp.Padded
    return jax.tree.map(
        lambda y: whole(y) if isinstance(y, held) else y,
        tree,
        is_leaf=lambda y: isinstance(y, held),
    )


def _infos(program: Program) -> list[Info]:
    gradients = [program.inputs[i].info for i in program.differentiated]
    return [o.info for o in program.outputs] + [Info(i.shape, i.dtype, False) for i in gradients]


def _differences(got: Any, want: Any, infos: list[Info]) -> list[tuple[int, bool, float]]:
    """Leaves that differ by more than the tolerance: position, whether exactness was due, and by
    how much."""
    bad: list[tuple[int, bool, float]] = []
    for number, (a, b, info) in enumerate(
        zip(jax.tree.leaves(_whole(got)), jax.tree.leaves(want), infos, strict=True)
    ):
        if a.shape != b.shape or a.dtype != b.dtype:
            bad.append((number, True, np.inf))
            continue
        distance, scale = _distance(a, b)
        if distance > (0.0 if info.exact else TOLERANCE[info.dtype] * scale):
            bad.append((number, info.exact, distance))
    return bad


def _numbers(x: Any) -> np.ndarray:
    x = np.asarray(x)
    return x.astype(np.complex128 if x.dtype.kind == "c" else np.float64)


def _distance(a: Any, b: Any) -> tuple[float, float]:
    """The largest difference of two arrays, infinite where only one is finite, and the largest
    finite element of the second."""
    x, y = _numbers(a), _numbers(b)
    finite = np.isfinite(y)
    # NaN, infinity and minus infinity are not told apart: 0 * inf and inf - inf depend on the order
    # of a sum.
    if not np.array_equal(np.isfinite(x), finite):
        return np.inf, 0.0
    return float(np.abs(x[finite] - y[finite]).max(initial=0)), float(
        np.abs(y[finite]).max(initial=0)
    )


def describe_difference(a: Any, b: Any) -> str:
    """A difference in words."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{a.dtype}{a.shape} instead of {b.dtype}{b.shape}"
    distance, scale = _distance(a, b)
    x, y = _numbers(a), _numbers(b)
    wrong = ~(np.isclose(x, y, rtol=1e-4, atol=1e-4 * scale, equal_nan=True))
    where = tuple(int(i) for i in np.argwhere(wrong)[0]) if wrong.any() else ()
    values = f", at {where} {x[where]} instead of {y[where]}" if wrong.any() else ""
    count = f"in {int(wrong.sum())} of {wrong.size} elements"
    return (
        f"{b.dtype}{b.shape} differs by {distance:.3g} where the largest is {scale:.3g},"
        f" {count}{values}"
    )


def _slack(program: Program, want: Any) -> list[float]:
    """How far each leaf of the reference moves when every rounded value is disturbed."""

    def suffix(target: str, info: Info) -> str | None:
        return (
            f"{target} = disturb({target}, {target[1:]})"
            if info.kind in "fc" and not info.exact
            else None
        )

    source = function_source(program, suffix)
    moved = [0.0] * len(jax.tree.leaves(want))
    for trial in range(TRIALS):

        def disturb(x: Any, number: int, trial: int = trial) -> Any:
            noise = jnp.sin(
                jnp.arange(x.size, dtype=jnp.float32) * 12.9898 + number * 78.233 + trial * 37.719
            ).reshape(x.shape)
            return x * (1 + noise * ROUNDING[str(x.dtype)]).astype(x.dtype)

        fn = load(source, f"fuzz-{program.seed}-disturbed", {"disturb": disturb})["program"]
        other = jax.jit(fn)(*arguments(program))
        for i, (a, b) in enumerate(zip(jax.tree.leaves(other), jax.tree.leaves(want), strict=True)):
            moved[i] = max(moved[i], _distance(a, b)[0])
    return moved


def _place(error: BaseException) -> str:
    """The innermost frame of this project: where a crash happens, for telling crashes apart."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/sbp/" in f.filename]
    return f"{frames[-1].filename.rsplit('/sbp/', 1)[1]}:{frames[-1].name}" if frames else "outside"


@contextmanager
def _alarm() -> Iterator[None]:
    """Raises TimeOut in the middle of planning; a compiler at work is ended by the runner
    instead."""

    def ring(*_: Any) -> None:
        raise TimeOut

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(TIME_OUT_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
