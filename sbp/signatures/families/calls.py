"""Calls of code that sbp does not see: callbacks, Pallas kernels, and functions with a partitioning
of their own."""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax import lax
from jax.experimental.custom_partitioning import BATCHING
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from sbp import _jax
from sbp.errors import ArgumentValueError, SbpError
from sbp.signatures.factors import FactorMap, split_rows
from sbp.signatures.families.linalg import dot_flops
from sbp.signatures.rule import Axes, LocalContext, Op, Row, Traits, bind_with, rule
from sbp.types import B, Split

# ---- callbacks ----------------------------------------------------------------------------------
# Callbacks. A callback that is called for its effect sees whole values and runs once, on the first
# device; with `partitioned=True` it runs on every device and sees the shard.


def _callback_rows(op: Op) -> Sequence[Row]:
    """Whole operands. A partitioned callback with one operand also takes even shards: padding is
    never observable, and neither are parts of a sum."""
    if not op.params.get("partitioned") or len(op.ins) != 1:
        return ()
    dims = [d for d, size in enumerate(op.ins[0].shape) if size and op.divides(size)]
    return [Row((Split(d),), ()) for d in dims]


def _call(ctx: LocalContext, args: Sequence[Any]) -> list[Any]:
    """Runs the callback: a partitioned one on every device, another one on the first."""

    def run(*operands: Any) -> tuple[Any, ...]:
        bind_with(ctx, operands)
        return ()

    if ctx.params.get("partitioned"):
        run(*args)
    else:
        lax.cond(ctx.is_first_device(), run, lambda *operands: (), *args)
    return []


rule(
    *("debug_callback", "debug_print", "io_callback"),
    traits=Traits(effect=True),
    local=_call,
    reason="an effect happens once and sees whole values",
)(_callback_rows)
rule("pure_callback", traits=Traits(), reason="the host function sees whole values")(lambda op: ())


# ---- pallas_call --------------------------------------------------------------------------------
# `pallas_call`: a kernel runs once for each point of a grid, on blocks of its operands.
#
# A grid dim is *independent* where its points share nothing: the kernel does not ask for its place
# on it, every result has a block for each of its points, and nothing that the kernel writes for one
# point is read for the next one. The dims of operands and results that such a grid dim counts the
# blocks of split together: each device runs the same kernel on a smaller grid.


_KEEPS_STATE = ("axis_index", "prng_", "semaphore_", "get_barrier_semaphore")
"""How the names of operations begin that depend on the device, or on what ran before."""


GridDim = tuple[int, tuple["tuple[int, int] | None", ...], tuple[tuple[int, int], ...]]
"""The position of an independent grid dim; for each operand, the dim and the size of the blocks
that it counts, None for an operand that every point reads alike; and for each result, alike."""


def _equations(jaxpr: Any) -> Iterator[Any]:
    """All equations of a jaxpr, those of inner jaxprs too."""
    for eqn in _jax.open_jaxpr(jaxpr)[0].eqns:
        yield eqn
        for inner in _jax.jaxprs_in(eqn):
            yield from _equations(inner)


def independent_dims(params: dict[str, Any]) -> tuple[tuple[GridDim, ...], str]:
    """The independent grid dims of a `pallas_call`; and why there are none, empty where there is
    one.

    Arguments:
      params: its parameters.
    """
    grid_mapping, equations = params["grid_mapping"], [*_equations(params["jaxpr"])]
    if grid_mapping.num_dynamic_grid_bounds or params.get("mesh") is not None:
        return (), "the size of the kernel's grid is not known, or the grid is a mesh of cores"
    effects = getattr(params.get("compiler_params"), "has_side_effects", False)
    if getattr(effects, "name", effects) not in (False, "PURE") or any(
        eqn.primitive.name.startswith(_KEEPS_STATE) for eqn in equations
    ):
        return (), "the kernel has side effects, or depends on the device that runs it"
    # The number of points on a grid dim is a constant in the body.
    asked = {eqn.params["axis"] for eqn in equations if eqn.primitive.name == "program_id"}
    whole = (None,) * grid_mapping.num_index_operands
    found: list[GridDim] = []
    kernels_own = 0
    for position in range(len(grid_mapping.grid)):
        if position not in grid_mapping.vmapped_dims:  # the kernel does not see the others
            kernels_own += 1
            if kernels_own - 1 in asked or not _forgets(params, kernels_own - 1):
                continue
        mappings = grid_mapping.block_mappings
        blocks = [_counted_dim(m, position) for m in mappings]
        points = (
            -(-m.array_aval.shape[at[0]] // at[1])
            for m, at in zip(mappings, blocks, strict=True)
            if at
        )
        if any(count != grid_mapping.grid[position] for count in points):
            continue  # the blocks do not cover the array
        count = grid_mapping.num_inputs
        ins, outs = (*whole, *blocks[:count]), tuple(blocks[count:])
        # A result that takes the place of an operand is written where other points may read.
        if (
            False not in blocks
            and None not in outs
            and all(ins[i] == outs[o] for i, o in params["input_output_aliases"])
        ):
            found.append((position, ins, outs))
    why = (
        "sbp cannot split any dim of the kernel's grid. It splits a dim if its blocks cover the"
        " arrays, every result has its own block at each index of the dim, the kernel does not"
        " read `program_id` of the dim, and, for a kernel with scratch memory,"
        ' `dimension_semantics` says "parallel" for the dim'
    )
    return tuple(found), "" if found else why


def _forgets(params: dict[str, Any], grid_dim: int) -> bool:
    """Whether points of a grid dim share no scratch memory: there is none, or the kernel says that
    they run in any order."""
    if not params["grid_mapping"].num_scratch_operands:
        return True
    semantics = getattr(params.get("compiler_params"), "dimension_semantics", None)
    # Pallas checks how many there are only for TPU.
    said = semantics[grid_dim] if semantics and grid_dim < len(semantics) else ""
    return getattr(said, "name", said).lower() == "parallel"


def _counted_dim(mapping: Any, position: int) -> Any:
    """The dim whose blocks a grid dim counts, with the size of a block; None where the block is
    the same for all points, False where it depends on them in another way.

    Arguments:
      mapping: from points of the grid to blocks.
      position: of the grid dim.
    """
    jaxpr, _ = _jax.open_jaxpr(mapping.index_map_jaxpr)
    point = jaxpr.invars[position]
    if any(v is point for eqn in jaxpr.eqns for v in eqn.invars):
        return False
    at = [dim for dim, v in enumerate(jaxpr.outvars) if v is point]
    if not at:
        return None
    block = _block_size(mapping.block_shape[at[0]]) if len(at) == 1 else None
    return (at[0], block) if block else False


def _block_size(block: Any) -> int | None:
    """How many elements of a dim one block has; None where blocks overlap or are chosen by
    index."""
    from jax.experimental import pallas  # loaded already where there is a kernel, slow elsewhere

    return (
        1
        if isinstance(block, pallas.Squeezed)
        else block.block_size
        if isinstance(block, pallas.Blocked)
        else None
    )


def _flops(params: dict[str, Any], ins: Sequence[Any], outs: Sequence[Any]) -> float:
    """Floating-point operations on shards: what the kernel's author estimates, or those of the
    products in its body at every point of the grid.

    Arguments:
      params: parameters of the `pallas_call`.
      ins: local shapes of the operands.
      outs: local shapes of the results.
    """
    share = math.prod(outs[0]) / max(1, math.prod(params["out_avals"][0].shape))
    if params.get("cost_estimate") is not None:
        return share * params["cost_estimate"].flops
    body = sum(
        dot_flops(e.params, [v.aval.shape for v in e.invars], [v.aval.shape for v in e.outvars])
        for e in _equations(params["jaxpr"])
        if e.primitive.name == "dot_general"
    )
    return share * body * math.prod(params["grid_mapping"].grid)


def _rows(op: Op) -> Sequence[Row]:
    rows = []
    for _, ins, outs in independent_dims(op.params)[0]:
        counted = zip((*ins, *outs), (*op.ins, *op.outs), strict=True)
        shards = [
            (-(-aval.shape[at[0]] // op.axis_size), at[1]) for at, aval in counted if at is not None
        ]
        if all(shard % block == 0 for shard, block in shards):
            rows.append(
                Row(
                    tuple(B if at is None else Split(at[0]) for at in ins),
                    tuple(Split(dim) for dim, _ in outs),
                )
            )
    return rows


def _local(ctx: LocalContext, args: Sequence[Any]) -> list[Any]:
    """The kernel on the smaller grid of this device's shards."""
    grid_mapping = ctx.params["grid_mapping"]
    grid = list(grid_mapping.grid)
    for position, _, ((dim, block), *_) in independent_dims(ctx.params)[0]:
        grid[position] = -(-ctx.local_outs[0][dim] // block)
    shapes = (*ctx.local_ins[grid_mapping.num_index_operands :], *ctx.local_outs)
    mappings = tuple(
        replace(m, array_aval=m.array_aval.update(shape=shape))
        for m, shape in zip(grid_mapping.block_mappings, shapes, strict=True)
    )
    return bind_with(
        ctx,
        args,
        grid_mapping=replace(grid_mapping, grid=tuple(grid), block_mappings=mappings),
        out_avals=tuple(
            a.update(shape=shape)
            for a, shape in zip(ctx.params["out_avals"], ctx.local_outs, strict=True)
        ),
        cost_estimate=None if grid != list(grid_mapping.grid) else ctx.params["cost_estimate"],
    )


rule(
    "pallas_call",
    traits=Traits(flops=_flops),
    local=_local,
    unread=lambda params, _: independent_dims(params)[1],
)(_rows)


# ---- custom_partitioning ------------------------------------------------------------------------
# A function under `custom_partitioning` that calls code that sbp does not see; for other functions,
# the trace has their operations. A dim splits if its factor passes through in the `sharding_rule`,
# and if `partition` keeps the split. Each device runs the function that `partition` gives.


def _passed_factors(params: dict[str, Any]) -> FactorMap:
    """The factors of a `sharding_rule` that the function computes each by itself: a factor is the
    whole of one dim, of one size in all arrays that have it, and all results have it.

    Raises:
      SbpError: `bad-argument` for a rule of other ranks than the arrays.
    """
    stated, call = params["sharding_rule"], params["call"]
    avals = (*call.in_avals, *call.out_avals)
    mappings = (*stated.operand_mappings, *stated.result_mappings)
    arrays = [_dims(m, len(a.shape)) for m, a in zip(mappings, avals, strict=False)]
    ranks = [len(a.shape) for a in avals]
    if len(mappings) != len(avals) or [*map(len, arrays)] != ranks:
        raise ArgumentValueError(
            f"the sharding_rule is for arrays of ranks {[*map(len, mappings)]}, but the operands"
            f" and results have ranks {ranks}"
        )
    sizes = defaultdict[str, set[int]](set)
    whole = {*stated.reduction_factors, *stated.need_replication_factors}
    whole |= set(stated.permutation_factors)
    for dims, aval in zip(arrays, avals, strict=True):
        for dim, size in zip(dims, aval.shape, strict=True):
            if isinstance(dim, str):
                sizes[dim].add(size)
            else:
                whole |= set(dim)
        whole |= {dim for dim in dims if dims.count(dim) > 1}
    count = len(call.in_avals)
    passed = {
        factor
        for factor in sizes.keys() - whole
        if len(sizes[factor]) == 1
        and any(factor in dims for dims in arrays[:count])
        and all(factor in dims for dims in arrays[count:])
    }
    named = [tuple(d if d in passed else None for d in dims) for dims in arrays]
    return FactorMap(ins=tuple(named[:count]), outs=tuple(named[count:]))


def _dims(mapping: Sequence[Any], rank: int) -> list[Any]:
    """The factor or factors of each dim; leading dims under an ellipsis are counted from the
    last."""
    return (
        [*mapping]
        if not mapping or not str(mapping[0]).startswith(BATCHING)
        else [*(f"{mapping[0]}{d}" for d in range(len(mapping) - 1 - rank, 0)), *mapping[1:]]
    )


def _function_on_shards(
    params: dict[str, Any], axes: Axes, specs: Sequence[PartitionSpec]
) -> Callable[..., Any] | str:
    """The function that `partition` gives; why it gives none where it fails, or asks for other
    splits.

    Arguments:
      params: parameters of the `custom_partitioning`.
      axes: names and sizes of the mesh axes.
      specs: how its operands and results are split.
    """
    call, trees = params["call"], (params["in_tree"], params["out_tree"])
    avals, count = (*call.in_avals, *call.out_avals), len(call.in_avals)
    names, sizes = zip(*axes, strict=True)
    mesh = AbstractMesh(sizes, names)
    given = [NamedSharding(mesh, spec) for spec in specs]
    shapes = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s)
        for a, s in zip(avals, given, strict=True)
    ]
    ins, outs = map(jax.tree.unflatten, trees, (shapes[:count], shapes[count:]))
    try:  # code of the user, which may raise anything
        _, function, of_outs, of_ins = params["partition"](*params["static_args"], mesh, ins, outs)
        wanted = [*trees[0].flatten_up_to(of_ins), *trees[1].flatten_up_to(of_outs)]
        kept = all(
            NamedSharding(mesh, w.spec).is_equivalent_to(s, len(a.shape))
            for w, s, a in zip(wanted, given, avals, strict=True)
        )
    except Exception as error:
        return f"its partition function raised {type(error).__name__}: {error}"
    return function if kept else "its partition function asks for other shardings"


def _partitioned_rows(op: Op) -> Sequence[Row]:
    """A row for each factor, where the mesh axis splits it evenly."""
    return list(filter(op.has_even_shards, split_rows(op, _passed_factors(op.params))))


def _function_for_types(
    params: dict[str, Any], axes: Axes, types: Sequence[Sequence[int]]
) -> Callable[..., Any] | str:
    """What `_function_on_shards` returns, for the codes of operands and results."""
    call = params["call"]
    specs = [
        PartitionSpec(
            *(
                [name for (name, _), code in zip(axes, codes, strict=True) if code == d]
                for d in range(1, 1 + len(a.shape))
            )
        )
        for codes, a in zip(types, (*call.in_avals, *call.out_avals), strict=True)
    ]
    return _function_on_shards(params, axes, specs)


def _why_not_partitioned(params: dict[str, Any], axes: Axes) -> str:
    """Why no dim of a `custom_partitioning` is split; empty where one can be, and on a mesh without
    axes."""
    call, count = params["call"], len(axes)
    op = Op("custom_partitioning", params, tuple(call.in_avals), tuple(call.out_avals), 1)
    why = "no factor of its sharding_rule is a whole dim that passes through to all results"
    for row, k in itertools.product(_partitioned_rows(op), range(count)):
        codes = (1 + a.dim if isinstance(a, Split) else 0 for a in (*row.ins, *row.outs))
        types = [(*[0] * k, c, *[0] * (count - k - 1)) for c in codes]
        found = _function_for_types(params, axes, types)
        if callable(found):
            return ""
        why = found
    return why if axes else ""


def _partitioned_local(ctx: LocalContext, args: Sequence[Any]) -> list[Any]:
    """The function that `partition` gives for the types of the operands and results.

    Raises:
      SbpError: `bad-argument` where it gives none, or one with other results.
    """
    split = (*ctx.in_splits, *ctx.out_splits)
    axes = {name: n for dims in split for pairs in dims for name, n in pairs}
    if not axes:
        return bind_with(ctx, args)
    axes = dict(jax.sharding.get_abstract_mesh().shape) or axes  # the first inside `shard_map`
    specs = [PartitionSpec(*([name for name, _ in pairs] for pairs in dims)) for dims in split]
    function = _function_on_shards(ctx.params, [*axes.items()], specs)
    operands = jax.tree.unflatten(ctx.params["in_tree"], args)
    found = jax.tree.leaves(function(*operands)) if callable(function) else []
    wanted = [(shape, a.dtype) for shape, a in zip(ctx.local_outs, ctx.global_outs, strict=True)]
    if [(x.shape, x.dtype) for x in found] != wanted:
        shapes = ", ".join(f"{dtype.name}{[*shape]}" for shape, dtype in wanted)
        raise SbpError(
            "the function that the partition function of a custom_partitioning returns must return"
            f" {shapes} on each device; change it, or register a signature with"
            " sbp.signatures.register"
        )
    return found


rule(
    "custom_partitioning",
    traits=Traits(),
    local=_partitioned_local,
    # Whether `partition` keeps the splits of operands and results.
    fits=lambda params, axes, types: (
        not any(map(any, types)) or callable(_function_for_types(params, axes, types))
    ),
    unread=_why_not_partitioned,
)(_partitioned_rows)
