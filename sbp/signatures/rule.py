"""Rows, traits, rules and kernels, the registry that finds a rule by the name of its primitive, and
the primitives without a rule.

Importing `sbp.signatures.families` fills the registry."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp
from jax import lax

from sbp import _jax
from sbp.errors import SbpError, SbpInternalError, nearest
from sbp.kinds import FLAG, TEXT, WHOLE_NUMBER, Kind, made_of, show, takes
from sbp.types import Atom, B, Split

# ---- traits --------------------------------------------------------------------------------------
# What an operator is, beside its rows. Costs, memory, reports and checks ask for traits. They are
# part of a primitive's rule, so a new primitive is described in one place. The default of each
# trait is the answer for an unknown operator.


Shape = Sequence[int]
"""The sizes of the dims of an array."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What an operator is.

    Arguments:
      moves: every element of a result is an element of an operand; which one depends on the
          parameters and on operands that are B.
      carries: what an operator does to the elements of its only operand. The result has all of
          them. `arranged`: the same elements in another shape or order. `copied`: each element
          unchanged, in its place. `rounded`: each element in its place, perhaps with fewer bits.
          `negated`: each element in its place, with the opposite sign.
      regroups: the result has each element of the operand once, in an order and a shape that the
          parameters give. JAX does not compare symbolic numbers of elements.
      elementwise: the operator reads operands of the result's shape element by element, and the
          primitive itself runs on shards.
      pointwise: by the primitive's definition, each index of a dim that a row splits is computed in
          the same way and without the others. Elementwise operators are pointwise.
      monotone: one letter for each operand: `+` where the function rises in the operand on its
          whole domain, `-` where it falls, `.` where it does neither; empty for other functions.
      linear_map: the operator is linear in one operand; the other operands give the coefficients.
      contracts: the operator sums products of its first two operands over a dim.
      reduces: the monoid by which the operator joins elements of its operand, such as `sum`.
      scatters: the monoid by which the operator joins updates to its first operand.
      scales: how the results of the function f change when operands are multiplied by a constant c.
          `together`: f(c x, c y) = c f(x, y), for c > 0 and operands that are no indices. `each`:
          f(c x, y) = f(x, c y) = c f(x, y), for the first two operands. `ratio`: f(c x, y) =
          c f(x, y) and f(x, c y) = f(x, y) / c. `power`: f(c x) = c**y f(x), where y is the
          parameter `y`, or 2 without one. `root`: f(c**2 x) = c f(x). `compared`: f(c x, c y) =
          f(x, y) for c > 0. `never`: f(c x) = f(x) for c > 0.
      indices: positions of the operands that are indices or select among other operands.
      multiplies: computes products of its first two operands, or sums of such products, where a
          user writes a product.
      orderless: the result does not depend on the order of the elements along the dim that the
          operator reduces, searches or sorts.
      generates: whether the result's elements depend on their own index. `counter`: each is
          computed from its index; a shard starts at its offset. `draws`: each is drawn from a
          stream of random numbers.
      effect: the program runs the operator for its effect on the outside, not for its results.
      fusion: how XLA compiles an operator that is not a product, for the cost model. `partly`: XLA
          fuses it with its neighbors, and a fraction of its traffic reaches memory. `free`: XLA
          nearly always fuses it into its consumers, and nearly none of its traffic reaches memory.
          `inlined`: as `free`, and each consumer computes the result, which is never stored.
      costly: of an elementwise operator: XLA computes the result once and stores it, rather than
          again in each product or reduction that reads it, where it is computed from the result of
          another such operator.
      flops: gives the number of floating-point operations of an equation, from its parameters and
          the local shapes of its operands and results; None where only memory traffic is priced.
      sides: gives the rows and columns of a product of matrices (the elements of the free dims of
          each operand), from its parameters and the local shapes of its operands; None elsewhere.
      whole: the operator takes whole matrices or lines; only the dims before theirs split.
      unnamed: reports call the result by the name of the operand.
      adapts: JAX inserts the operator to fit an operand to its reader; what the user wrote is the
          operator's operand.
      numpy: the same function in NumPy, for constants.
    """

    moves: bool = False
    carries: Literal["", "arranged", "copied", "rounded", "negated"] = ""
    regroups: bool = False
    elementwise: bool = False
    pointwise: bool = False
    monotone: str = ""
    linear_map: bool = False
    contracts: bool = False
    reduces: str = ""
    scatters: str = ""
    scales: Literal["", "together", "each", "ratio", "power", "root", "compared", "never"] = ""
    indices: range = range(0)
    multiplies: bool = False
    orderless: bool = False
    generates: Literal["", "counter", "draws"] = ""
    effect: bool = False
    fusion: Literal["partly", "free", "inlined"] = "partly"
    costly: bool = False
    flops: Callable[[dict[str, Any], Sequence[Shape], Sequence[Shape]], float] | None = None
    sides: Callable[[dict[str, Any], Sequence[Shape]], tuple[int, int]] | None = None
    whole: bool = False
    unnamed: bool = False
    adapts: bool = False
    numpy: Callable[..., Any] | None = None


RANKS = {
    "argmax": "finds an index within each shard alone",
    "argmin": "finds an index within each shard alone",
    "cumlogsumexp": "runs over each shard alone",
    "cummax": "runs over each shard alone",
    "cummin": "runs over each shard alone",
    "cumprod": "runs over each shard alone",
    "cumsum": "runs over each shard alone",
    "sort": "sorts each shard alone",
    "top_k": "picks from each shard alone",
}
"""Operations that rank or add up the elements along a dim, and what they do to a split one."""

KEEPS_INDICES = {"add", "broadcast_in_dim", "convert_element_type", "lt", "reshape", "select_n"}
"""Operations through which the index of a device is still an index; JAX adds the length of the dim
to a negative one."""

REDUCE_PRECISION, RAGGED_PRODUCT = "reduce_precision", "ragged_dot_general"
"""The operators that round an array to fewer bits, and that multiply ragged groups of rows by a
matrix each."""


# ---- rows and kernels ----------------------------------------------------------------------------


_ATOMS = Kind(
    "a tuple of atoms, such as (sbp.S(0), sbp.B)",
    lambda x: isinstance(x, tuple) and all(isinstance(a, Atom) for a in x),
)


@made_of("Row", ins=_ATOMS, outs=_ATOMS, kernel=TEXT)
@dataclass(frozen=True, slots=True)
class Row:
    """One signature of an operator on one mesh axis: atoms of the operands give atoms of the
    results.

    Arguments:
      ins: one atom for each operand.
      outs: one atom for each result.
      kernel: the name of the `Kernel` that runs on the shards; `local` is the primitive itself.
    """

    ins: tuple[Atom, ...]
    outs: tuple[Atom, ...]
    kernel: str = "local"

    def __repr__(self) -> str:
        return f"{', '.join(map(repr, self.ins))} -> {', '.join(map(repr, self.outs))}"


_AVALS = Kind("a tuple of avals", lambda x: isinstance(x, tuple))


@made_of("Op", name=TEXT, ins=_AVALS, outs=_AVALS, axis_size=WHOLE_NUMBER, rounds_parts=FLAG)
@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """One equation, as a rule sees it when it makes rows for one mesh axis.

    A dim that an outer mesh axis splits has the size that is left there. The parameters are those
    of the whole equation. So a rule reads dims from the parameters and sizes from the avals.

    Arguments:
      name: the primitive's name.
      params: the primitive's parameters, for global shapes.
      ins: avals of the operands.
      outs: avals of the results.
      axis_size: number of devices along the mesh axis that the rows are for.
      rounds_parts: whether the user allows (`reduce_dtype`) that a cast rounds the parts of a sum.
    """

    name: str
    params: dict[str, Any]
    ins: tuple[Any, ...]
    outs: tuple[Any, ...]
    axis_size: int
    rounds_parts: bool = False

    def divides(self, size: int) -> bool:
        """Whether the mesh axis splits a dim of this size into shards of equal size."""
        return size % self.axis_size == 0

    def has_even_shards(self, row: Row) -> bool:
        """Whether all shards of all dims that a row splits have equal size."""
        sides = zip((*row.ins, *row.outs), (*self.ins, *self.outs), strict=True)
        return all(self.divides(aval.shape[a.dim]) for a, aval in sides if isinstance(a, Split))


SplitAxes = tuple[tuple[tuple[tuple[str, int], ...], ...], ...]
"""For each value and dim, the names and sizes of the mesh axes that split it, outer axes first."""


@dataclass(eq=False)
class LocalContext:
    """What a local kernel may ask: the equation on global shapes, and this device's shards.

    Arguments:
      params: the primitive's parameters, for global shapes.
      global_ins: avals of the whole operands.
      global_outs: avals of the whole results.
      local_ins: shapes of this device's shards of the operands, padding included.
      local_outs: shapes of this device's shards of the results, padding included.
      primitive: the JAX primitive.
      in_splits: the mesh axes that split the operands.
      out_splits: the mesh axes that split the results.
      mesh_axes: the names of the mesh axes.
    """

    params: dict[str, Any]
    global_ins: tuple[Any, ...]
    global_outs: tuple[Any, ...]
    local_ins: tuple[tuple[int, ...], ...]
    local_outs: tuple[tuple[int, ...], ...]
    primitive: Any
    in_splits: SplitAxes
    out_splits: SplitAxes
    mesh_axes: tuple[str, ...]

    def axis_index(self, axis: str) -> Any:
        """This device's index along a mesh axis."""
        return lax.axis_index(axis)

    def permute(self, x: Any, axis: str, pairs: Sequence[tuple[int, int]]) -> Any:
        """Sends `x` along a mesh axis, as `jax.lax.ppermute` does.

        Arguments:
          x: what this device sends.
          axis: the mesh axis.
          pairs: (source, destination) devices; each device is in at most one pair as source and in
              at most one as destination.

        Returns:
          The `x` of the device that sends to this one; zeros where no device does.
        """
        return lax.ppermute(x, axis, pairs)

    def is_first_device(self) -> Any:
        """True on the device whose index is 0 on every mesh axis."""
        return lax.axis_index(self.mesh_axes) == 0

    def in_axes(self, operand: int, dim: int) -> tuple[tuple[str, int], ...]:
        """Names and sizes of the mesh axes that split a dim of an operand, outer axes first.

        A kernel's collectives run over these axes.
        """
        return self.in_splits[operand][dim]

    def out_axes(self, result: int, dim: int) -> tuple[tuple[str, int], ...]:
        """Names and sizes of the mesh axes that split a dim of a result, outer axes first."""
        return self.out_splits[result][dim]

    def in_offset(self, operand: int, dim: int) -> Any:
        """The global index of element 0 of this device's shard of an operand, along one dim.

        A traced int32, or 0 where the dim is not split.
        """
        return self._offset(self.global_ins[operand].shape[dim], self.in_axes(operand, dim))

    def out_offset(self, result: int, dim: int) -> Any:
        """The global index of element 0 of this device's shard of a result, along one dim.

        A traced int32, or 0 where the dim is not split.
        """
        return self._offset(self.global_outs[result].shape[dim], self.out_axes(result, dim))

    def in_extent(self, operand: int, dim: int) -> Any:
        """How many elements of this device's shard of an operand are not padding, along one dim.

        A Python int, the size of the shard, where every split of the dim is even; otherwise a
        traced int32.
        """
        return shard_extent(
            self.global_ins[operand].shape[dim], self.in_axes(operand, dim), self.axis_index
        )

    def _offset(self, size: int, axes: Sequence[tuple[str, int]]) -> Any:
        start: Any = 0
        for axis, n in axes:
            size = -(-size // n)
            start = start + self.axis_index(axis) * size
        return start


def shard_extent(
    size: int, axes: Sequence[tuple[str, int]], axis_index: Callable[[str], Any]
) -> Any:
    """How many elements of this device's shard of a dim are no padding: an int where all splits
    divide, else a traced int32.

    Arguments:
      size: length of the dim in the whole tensor.
      axes: names and sizes of the mesh axes that split it, outer axes first.
      axis_index: gives this device's index along a mesh axis.
    """
    real: Any = size
    even = True
    for axis, n in axes:
        even = even and size % n == 0
        size = -(-size // n)
        real = size if even else jnp.clip(real - axis_index(axis) * size, 0, size)
    return real


@dataclass(frozen=True, slots=True)
class Sent:
    """What a kernel sends over one mesh axis each time it runs.

    Arguments:
      kind: the collective, by its name in plans, such as `permute` or `all_gather`.
      bytes: bytes that one device sends in all rounds together.
      rounds: number of collectives; each one costs its start-up time.
    """

    kind: str
    bytes: float
    rounds: int = 1


@made_of("Kernel", name=TEXT, summary=TEXT, nests=FLAG, overlaps=FLAG)
@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A program that a row runs on the shards, with what it sends.

    Arguments:
      name: the name that rows give.
      summary: what the kernel does, in one line.
      sends: for an op and a row, what the kernel sends over its mesh axis, where the op has the
          shapes that all other mesh axes leave. None for a kernel without collectives.
      widens: for an op and a row, triples (operand, dim, size): the exchange along `dim` leaves a
          shard with `size` elements. Exchanges run in the order of dims, so an exchange along a
          later dim sends the longer shard.
      nests: whether other mesh axes may split a dim that this kernel's axis splits.
      gathers: the position of the operand whose shards visit every device; the local computation
          sees that operand whole along this mesh axis. None for other kernels.
      overlaps: whether the device computes while it sends.
      traffic: for an op and a row, bytes that the device moves to or from memory beside one pass
          over operands and results, where the op has the shapes that all other mesh axes leave.
          None for none.
      work: how much longer a product takes in the parts that the kernel makes of it.
      times: in how many parts the collectives of a kernel send their bytes because of kernels on
          other mesh axes. None for one.
    """

    name: str
    summary: str
    sends: Callable[[Op, Row], tuple[Sent, ...]] | None = None
    widens: Callable[[Op, Row], tuple[tuple[int, int, int], ...]] | None = None
    nests: bool = True
    gathers: int | None = None
    overlaps: bool = False
    traffic: Callable[[Op, Row], float] | None = None
    work: float = 1.0
    times: Callable[[Op, Sequence[tuple[Row, int]]], int] | None = None

    @property
    def communicates(self) -> bool:
        """Whether the kernel has collectives of its own."""
        return self.sends is not None


Axes = Sequence[tuple[str, int]]
"""Names and sizes of mesh axes, outer first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The signature of one primitive.

    Arguments:
      name: the primitive's name.
      rows: gives the rows of an op; the row with B for every operand and result is among them.
      traits: what the operator is, beside its rows.
      local: computes shards of the results from shards of the operands; None runs the primitive
          itself with the same parameters.
      reason: why no other row is right, for a rule that has only the all-B row.
      fits: from the parameters, the names and sizes of the mesh axes, and the codes of operands and
          results, whether rows on all mesh axes can run together. None where they always can.
      unread: from the parameters of an equation and the mesh axes, why the rule finds no row
          besides all-B in it; empty where it does. None for a rule that reads all its equations.
      exchanges: for an op and a row with the kernel `halo`, what that kernel exchanges: each an
          `Exchange` of `kernels.halo`.
    """

    name: str
    rows: Callable[[Op], Sequence[Row]]
    traits: Traits
    local: Callable[[LocalContext, Sequence[Any]], list[Any]] | None = None
    reason: str = ""
    fits: Callable[[dict[str, Any], Axes, Sequence[Sequence[int]]], bool] | None = None
    unread: Callable[[dict[str, Any], Axes], str] | None = None
    exchanges: Callable[[Op, Row], Sequence[Any]] | None = None


_RULES: dict[str, Rule] = {}
"""The registry: rules by the name of their primitive."""
_KERNELS: dict[str, Kernel] = {}
"""Kernels by their name."""


def names(text: str) -> tuple[str, ...]:
    """The names in a text, which are separated by blanks; a long table of primitives reads better
    without quotes."""
    return tuple(text.split())


def add_rule(rule: Rule) -> None:
    """Adds a rule to the registry.

    Raises:
      SbpInternalError: if the primitive has a rule already.
    """
    if rule.name in _RULES:
        raise SbpInternalError(f"two rules for primitive {rule.name!r}")
    _RULES[rule.name] = rule


def remove_rule(name: str) -> None:
    """Removes a rule from the registry: one that a user registered."""
    del _RULES[name]


def add_kernel(kernel: Kernel) -> Kernel:
    """Adds a kernel to the registry and returns it.

    Raises:
      SbpInternalError: if a kernel has this name already.
    """
    if kernel.name in _KERNELS:
        raise SbpInternalError(f"two kernels named {kernel.name!r}")
    _KERNELS[kernel.name] = kernel
    return kernel


def kernel_named(name: str) -> Kernel:
    """The kernel of this name.

    Raises:
      SbpError: `unknown-option` if no kernel has this name.
    """
    if not isinstance(name, str) or name not in _KERNELS:
        raise SbpError(
            f"no kernel is named {show(name)}{nearest(show(name), _KERNELS)}", code="unknown-option"
        )
    return _KERNELS[name]


def known_kernels() -> tuple[Kernel, ...]:
    """All kernels, sorted by name."""
    return tuple(_KERNELS[name] for name in sorted(_KERNELS))


add_kernel(Kernel(name="local", summary="the primitive itself"))

ROUNDED_PARTS = add_kernel(
    Kernel(
        name="rounded_parts",
        summary="the cast itself, which rounds each part before the sum (`reduce_dtype`)",
    )
)
"""The kernel of casts that round the parts of a sum."""


def rule_for(name: str) -> Rule | None:
    """The rule of a primitive, or of the function that it calls where that has one of its own
    (`pallas_call:NAME`); None for a primitive without one."""
    if not isinstance(name, str):
        raise TEXT.refusal("signatures", "name", name)
    return _RULES.get(name) or _RULES.get(name.partition(":")[0])


def known_primitives() -> tuple[str, ...]:
    """Names of all primitives that have a rule, sorted."""
    return tuple(sorted(_RULES))


def rule(
    *names: str,
    traits: Traits | Callable[[str], Traits],
    kernels: Sequence[Kernel] = (),
    **fields: Any,
) -> Callable[[Callable[[Op], Sequence[Row]]], Any]:
    """Decorator that adds a rule: `@rule("rev", traits=Traits(moves=True))`.

    The decorated function gives the rows of an op, the all-B row excepted, which is added first.

    Arguments:
      names: the primitives that the rule is for.
      traits: what these primitives are, beside their rows: the traits that all of them share, or a
        function from the name of a primitive to its traits.
      kernels: the kernels that only these rows name.
      fields: other fields of the `Rule`, such as `local`, which runs on the shards.

    Raises:
      SbpInternalError: for a primitive that has a rule already, and a kernel whose name another one
        has.
    """

    def enter(rows: Callable[[Op], Sequence[Row]]) -> Callable[[Op], Sequence[Row]]:
        for kernel in kernels:
            add_kernel(kernel)
        for name in names:
            known = traits if isinstance(traits, Traits) else traits(name)
            all_rows = functools.partial(_with_all_b, rows)
            add_rule(Rule(name=name, rows=all_rows, traits=known, **fields))
        return rows

    return enter


def _with_all_b(rows: Callable[[Op], Sequence[Row]], op: Op) -> tuple[Row, ...]:
    return tuple(dict.fromkeys((all_b(op), *rows(op))))


@takes("signatures.all_b", op=Kind("an Op", lambda x: isinstance(x, Op)))
def all_b(op: Op) -> Row:
    """The row that is right for every operator: each device has all operands and computes all
    results."""
    return Row((B,) * len(op.ins), (B,) * len(op.outs))


def bind_with(ctx: LocalContext, args: Sequence[Any], **changes: Any) -> list[Any]:
    """Runs a kernel's primitive on shards; a `local` for a `Rule`.

    Shardings among the parameters become None: they are for whole arrays.

    Arguments:
      ctx: the kernel's place.
      args: shards of the operands.
      changes: parameters to replace, by name.
    """
    params = {k: None if k in ("sharding", "out_sharding") else v for k, v in ctx.params.items()}
    return _jax.bind(ctx.primitive, args, params | changes)


# ---- primitives without a rule ------------------------------------------------------------------
# Each with the reason. Where such a primitive occurs, its operands and results are B, with the
# warning `missing-rule`. There are two exceptions: the trace takes some primitives apart or drops
# them, and `infer` types control flow, annotations and hand-written regions.


_TYPED_BY_SBP = {
    "taken apart by the trace: its body's equations are typed in its place": """
        call checkpoint closed_call composite core_call custom_jvp_call custom_jvp_call_jaxpr
        custom_lin custom_linear_solve custom_vjp_call custom_vjp_call_jaxpr custom_vmap_call
        eval_jaxpr jit linear_call pjit remat remat2 remat_opt sbp_pushed xla_metadata_call
    """,
    "says where a value lies: the trace reads it as an annotation": (
        "mesh_cast pvary reshard sharding_constraint with_memory_space_constraint"
    ),
    "asks which type a value has: the plan answers, and has no step for it": "inspect_sharding",
    "a region: typed by infer, which types its bodies": "cond scan while",
    "an annotation: typed by infer": "sbp_annotate",
    "where a hand-written region begins and ends: typed by infer, by the name of the mesh axis": (
        "sbp_parts sbp_pick"
    ),
    "a collective, or something about named axes: inside hand-written regions alone": """
        all_gather all_gather_done all_gather_invariant all_gather_reduced
        all_gather_reduced_start all_gather_start all_to_all all_to_all_done all_to_all_start
        axis_index pbroadcast pbroadcast_done pbroadcast_dynamic pbroadcast_start pmax pmin
        ppermute ppermute_done ppermute_start precv preduced psend psum psum_done psum_invariant
        psum_invariant_start psum_start ragged_all_to_all reduce_scatter reduce_scatter_done
        reduce_scatter_start reduced_vary_cast reduced_vary_cast_p unreduced_pmax unreduced_pmin
        unreduced_psum unreduced_psum_start unreduced_reduce_scatter
        unreduced_reduce_scatter_start vary_unreduced_cast vary_unreduced_cast_p
    """,
}
"""Reasons why primitives have no rule, each with the primitives, where sbp types their equations
without one."""

_UNTYPED = {
    "asks for a layout in memory of the whole array: its shards would need another": (
        "layout_constraint relayout"
    ),
    "a hand-written region over named axes, where types are claimed and checked as a whole": (
        "shard_map core_map"
    ),
    (
        "a mutable reference or another object with an identity: its state would need a type "
        "over time"
    ): """
        accum_grad_in_ref addupdate box_get box_set broadcast_to create_linear empty_ref
        free_ref freeze get log_extend log_read new_box new_log new_ref pin run_state swap unpin
    """,
    "orders effects and carries no numbers: refused by the trace": "after_all create_token",
    "a compiled program, or a call of a library, without a body to type: held whole": (
        "call_exported call_hi_primitive call_hi_primitive_linearized ffi_call"
    ),
    "a fused kernel of one GPU library, whose splits that library does not state": """
        cudnn_fusion dot_product_attention_bwd dot_product_attention_bwd_wrapper
        dot_product_attention_fp8_bwd dot_product_attention_fp8_bwd_wrapper
        dot_product_attention_fp8_fwd dot_product_attention_fp8_fwd_wrapper
        dot_product_attention_fwd dot_product_attention_fwd_wrapper scaled_matmul
        scaled_matmul_wrapper
    """,
    "a choice of the platform, or a check, made once for the whole program": (
        "check platform_index shape_assertion unreachable"
    ),
    "a size that is known when the program is traced": "dim_as_value dimension_size",
    "between numbers and an extended dtype that allows it, which none of JAX's own does": (
        "from_edtype to_edtype"
    ),
    "never in a traced program: evaluated, erased or turned into another primitive while tracing": (
        "dce_sink random_gamma_grad stage zeros_like"
    ),
}
"""The other reasons, with their primitives."""

FALLBACK: dict[str, str] = {
    name: because
    for because, primitives in (_TYPED_BY_SBP | _UNTYPED).items()
    for name in primitives.split()
}
"""For each primitive without a rule, the reason."""

TYPED_BY_SBP = frozenset(" ".join(_TYPED_BY_SBP.values()).split())
"""Primitives without a rule for which users cannot register a signature: sbp types their equations
in another way."""

REFUSED: dict[str, str] = {
    "rng_uniform": (
        "draws from a random state of the device, so the devices get different numbers and no type"
        " is correct"
    ),
}
"""Primitives for which no type is right, with the reason."""


def is_known(name: str) -> bool:
    """Whether an operation has a rule by its own name, or is known to have none."""
    return name in _RULES or name in FALLBACK or name in REFUSED


_TRAITS: dict[str, Traits] = {
    "rng_uniform": Traits(generates="draws"),
    "sbp_annotate": Traits(fusion="inlined"),
}
"""Traits of primitives that have no rule."""


def traits_of(name: str) -> Traits:
    """The traits of a primitive; the defaults for a primitive without a rule.

    >>> import sbp.signatures
    >>> traits_of("transpose").moves, traits_of("mul").scales, traits_of("unheard_of").moves
    (True, 'each', False)
    """
    found = rule_for(name)
    return found.traits if found is not None else _TRAITS.get(name, Traits())
