"""Primitives without a rule, each with the reason.

Where such a primitive occurs, its operands and results are B, with the warning `missing-rule`.
There are two exceptions: the trace takes some primitives apart or drops them, and `infer` types
control flow, annotations and hand-written regions.
"""

from sbp.signatures.rule import Traits, rule_for

_TYPED_BY_SBP = {
    "taken apart by the trace: its body's equations are typed in its place": """
        call checkpoint closed_call composite core_call custom_jvp_call custom_jvp_call_jaxpr
        custom_lin custom_linear_solve custom_vjp_call custom_vjp_call_jaxpr custom_vmap_call
        eval_jaxpr jit linear_call pjit remat remat2 remat_opt xla_metadata_call
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
    found = rule_for(name)
    return (found is not None and found.name == name) or name in FALLBACK or name in REFUSED


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
