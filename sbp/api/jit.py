"""`sbp.jit`: the public function that traces, chooses types, plans and runs."""

from __future__ import annotations

import functools
import numbers
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from sbp import _jax, _jax_call
from sbp.api.boundary import is_given, mesh_of, types_of
from sbp.api.call import JitOptions, Names, Numbers
from sbp.api.jitted import MESH
from sbp.api.jitted import Jitted as Jitted
from sbp.api.plan import paths_of_plans
from sbp.errors import ArgumentError, SbpError, nearest, refused
from sbp.kinds import AXIS, FLAG, reduce_dtype_name, refuse_unless, shown, takes
from sbp.limits import BOXING, POLICIES, Budget, Policy
from sbp.machine.mesh import Hardware

_NO_FUNCTION: Any = object()


_GONE = {
    "abstracted_axes": (
        "JAX has no such argument any more. For symbolic sizes, call `check` with shapes of"
        " jax.export.symbolic_shape"
    )
}
"""What became of arguments that a `jax.jit` once took."""


@takes("sbp.jit", _GONE, mesh=MESH, keep_unused=FLAG, inline=FLAG)
def jit(
    fn: Callable[..., Any] = _NO_FUNCTION,
    mesh: Mesh | AbstractMesh | None = None,
    in_types: Any = None,
    out_types: Any = None,
    boxing: Policy | Mapping[str, Policy] = "auto",
    memory_limit: float | None = None,
    hardware: Hardware | str | None = None,
    static_argnums: Numbers = None,
    static_argnames: Names = None,
    donate_argnums: Numbers = None,
    donate_argnames: Names = None,
    budgets: Sequence[Budget] = (),
    reduce_dtype: Any = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    keep_unused: bool = False,
    inline: bool = False,
    device: Any = None,
    backend: Any = None,
    compiler_options: dict[str, Any] | None = None,
    plan: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
) -> Jitted:
    """Gives every tensor of `fn` a distributed type on `mesh` and runs it as one `shard_map` of
    local operations and collectives.

    Arguments:
      fn: any traceable JAX function: a forward pass, `value_and_grad`, a whole training step.
        Without it, `sbp.jit` returns a decorator: `@sbp.jit(mesh=mesh)`.
      mesh: a `jax.sharding.Mesh`, or an `AbstractMesh` to plan without devices. None takes that of
        `in_shardings` or `out_shardings`, else that of `jax.set_mesh` at each call. Results have
        the axis types of the mesh. On the Auto axes of `sbp.make_mesh`, plain JAX code takes them.
        On the Explicit axes of `jax.make_mesh`, JAX refuses operations on them whose sharding is
        ambiguous, such as `x[tokens]`.
      in_types: pytree prefixes of types, one per non-static positional argument; None leaves inputs
        free (arrays that carry a NamedSharding on this mesh keep it). An entry may also be a
        function of a leaf's path and shape, `sbp.fully_sharded(..)`, or a dict of entries by
        patterns of paths: `{"blocks/*/qkv": "model:S(1)"}`. One such dict may stand for all
        arguments.
      out_types: a pytree prefix of types for what `fn` returns; None leaves them free.
      boxing: "auto" allows any conversion at its price, "reduce" only conversions from P,
        "explicit" none that moves data except at annotations and at the boundary. A mapping gives
        policies of mesh axes, and "auto" to the axes that it leaves out; `sbp.policy` sets a policy
        for a region of the program.
      memory_limit: bytes per device. Up to it, the backward pass keeps what the forward pass
        gathered or reduced, where `jax.checkpoint` would send it again. None for no limit; then
        such results are kept where they are worth their memory, and loops hold less where that is
        worth its time. The report says what that costs.
      hardware: the hardware that costs are modelled for; None takes that of the mesh's devices.
      static_argnums, static_argnames, donate_argnums, donate_argnames: as in `jax.jit`. Negative
        numbers count from the last positional parameter, for donated arguments too.
      budgets: collectives that the plan may not have, from `sbp.forbid`.
      reduce_dtype: the dtype of sums over devices. `jnp.float32` accumulates 16-bit parts in
        float32, for the same bytes: an all-to-all along a tensor dim, a local sum, and an
        all-gather. `jnp.bfloat16` (or `jnp.float16`) lets a sum of float32 parts that the function
        casts to bfloat16 come after that cast, at its bytes; it adds no cast. None leaves
        sums to the platform and before casts, as `jax.jit` does.
      in_shardings, out_shardings: as in `jax.jit`, in place of `in_types` and `out_types`:
        `NamedSharding`s on the mesh, `PartitionSpec`s, or None.
      keep_unused, compiler_options: as in `jax.jit`.
      inline: taken and not read. Inside another transformation the function is always inlined.
      device, backend: refused; the mesh names the devices.
      plan: the file of a plan, from `plan.save`; several files, or a folder of `.json` files, for
        calls with several sets of shapes. Calls run the first plan that was made for them and do
        not plan. Shardings that arguments carry are no pins then: they are moved to where the plan
        takes them.

    Returns:
      A function with the methods `check`, `plan`, `trace`, `lower`, `eval_shape` and `clear_cache`.
      It keeps the plans of 256 call signatures.

    Raises:
      SbpError: `unknown-option`, `unknown-axis` or `bad-argument` for an unknown policy, axis,
        hardware or argument. Where `jax.jit` raises TypeError or ValueError, it is one too.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> mesh = jax.sharding.AbstractMesh((2,), ("data",))
    >>> f = jit(lambda x: (x * x).sum(), mesh, in_types=("data:S(0)",))
    >>> f.plan(jax.ShapeDtypeStruct((8,), jnp.float32)).cost.bytes_per_device
    4.0
    """
    if fn is _NO_FUNCTION:
        given: Any = {k: v for k, v in locals().items() if k != "fn"}
        # A decorator with options returns what takes the function.
        return functools.partial(jit, **given)  # pyright: ignore[reportReturnType]
    _check_function(fn, device, backend)
    per_axis = _axis_policies(boxing)
    _check_limits(memory_limit, budgets)
    options = JitOptions(
        in_types=types_of(in_types, in_shardings, "in_shardings"),
        out_types=types_of(out_types, out_shardings, "out_shardings"),
        boxing="auto" if isinstance(boxing, Mapping) else boxing,
        axis_policies=per_axis,
        budgets=tuple(budgets),
        memory_limit=None if memory_limit is None else float(memory_limit),
        hardware=hardware,
        static_argnums=static_argnums,
        static_argnames=static_argnames,
        donate_argnums=donate_argnums,
        donate_argnames=donate_argnames,
        reduce_dtype=reduce_dtype_name(reduce_dtype),
        in_option="in_shardings" if is_given(in_shardings) else "in_types",
        out_option="out_shardings" if is_given(out_shardings) else "out_types",
        keep_unused=keep_unused,
        compiler_options=_compiler_options(compiler_options),
        plan=None if plan is None else paths_of_plans(plan),
        at=_jax.caller_span(),
    )
    return Jitted(fn, mesh_of(in_shardings, out_shardings) if mesh is None else mesh, options)


def _check_function(fn: Any, device: Any, backend: Any) -> None:
    """Checks the function, and that it has no device of its own.

    Raises:
      SbpError: `bad-argument`.
    """
    if isinstance(fn, Mesh | AbstractMesh):
        raise refused("sbp.jit takes a function first; give the mesh as mesh=", TypeError)
    try:
        _jax_call.check_callable(fn)
    except TypeError as error:
        raise refused(f"sbp.jit takes a function, got {shown(fn)}", error) from error
    for option, value in (("device", device), ("backend", backend)):
        if value is not None:
            raise SbpError(
                f"sbp.jit takes no {option}={shown(value)}: the mesh names the devices; give a mesh"
                " of the devices that you want"
            )


def _compiler_options(options: Any) -> dict[str, Any] | None:
    if options is None:
        return None
    if not isinstance(options, Mapping):
        raise refused(
            f"compiler_options is a dict of options of XLA; got {shown(options)}", TypeError
        )
    return dict(options)


def _axis_policies(boxing: Any) -> dict[str, Policy]:
    """The policies of `boxing` by mesh axis; empty where it is one policy.

    Raises:
      SbpError: `unknown-option` for an unknown policy, `bad-argument` for a key that is no string.
    """
    per_axis = dict(boxing) if isinstance(boxing, Mapping) else {}
    for policy in per_axis.values() if isinstance(boxing, Mapping) else (boxing,):
        if not BOXING.accepts(policy):
            given = shown(policy)
            raise ArgumentError(
                f"no boxing policy {given}{nearest(given, POLICIES)}", code="unknown-option"
            )
    refuse_unless(AXIS, "boxing", "each key", per_axis)
    return per_axis


def _check_limits(memory_limit: float | None, budgets: Sequence[Budget]) -> None:
    """Checks `memory_limit` and `budgets`.

    Raises:
      SbpError: `bad-argument` for a memory limit that is no positive number, or budgets that are
        not from `sbp.forbid`.
    """
    if not isinstance(budgets, Sequence) or not all(isinstance(b, Budget) for b in budgets):
        raise ArgumentError(
            f"budgets is a sequence of what sbp.forbid returns; got {shown(budgets)}"
        )
    if memory_limit is not None and not (
        isinstance(memory_limit, numbers.Real)
        and not isinstance(memory_limit, bool)
        and memory_limit > 0
    ):
        given, written = shown(memory_limit), _bytes_in(memory_limit)
        raise ArgumentError(
            f"memory_limit is bytes per device, a number above 0; got {given}"
            + (f"; write {written}" if written else "")
        )


_SIZE = re.compile(r"\s*(\d+\.?\d*)\s*([KMGT])?(i)?B?\s*", re.IGNORECASE)


def _bytes_in(text: Any) -> str:
    """A size with a unit, such as "1 GiB", as the number of its bytes in Python; empty for other
    values.

    >>> _bytes_in("1 GiB"), _bytes_in("1.5 MB"), _bytes_in("much")
    ('1 * 2**30', '1.5 * 10**6', '')
    """
    found = _SIZE.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        return ""
    number, unit, binary = found.groups()
    power = " KMGT".index(unit.upper()) if unit else 0
    factor = f" * 2**{10 * power}" if binary else f" * 10**{3 * power}"
    return f"{number}{factor if power else ''}"
