"""Primitives without a rule, each with the reason: so that nothing is missing in silence.

What is listed here is held all B where it occurs (`missing-rule` warns), except for what the trace
takes apart or infer types as a region.
"""

from __future__ import annotations

from sbp.signatures.rule import rule_for
from sbp.signatures.traits import Traits

_TABLE: dict[str, str] = {
    "taken apart by the trace: its body's equations are typed in its place": (
        """
        call checkpoint closed_call composite core_call custom_jvp_call custom_jvp_call_jaxpr
        custom_lin custom_linear_solve custom_vjp_call custom_vjp_call_jaxpr custom_vmap_call
        eval_jaxpr jit linear_call pjit remat remat2 remat_opt"""
    ),
    "dropped by the trace: says where a value lies, which is what types are for": (
        "device_put mesh_cast pvary reshard sharding_constraint with_memory_space_constraint"
    ),
    "asks for a layout in memory of the whole array: its shards would need another": (
        "layout_constraint relayout"
    ),
    "a region: typed by infer, which types its bodies": "cond scan while",
    "an annotation: typed by infer": "sbp_annotate",
    "where a hand-written region begins and ends: typed by infer, by the name of the mesh axis": (
        "sbp_parts sbp_pick"
    ),
    "a hand-written region over named axes, where types are claimed and checked as a whole": (
        "shard_map core_map custom_partitioning"
    ),
    "a collective, or something about named axes: inside hand-written regions alone": (
        """
        all_gather all_gather_done all_gather_invariant all_gather_reduced all_gather_reduced_start
        all_gather_start all_to_all all_to_all_done all_to_all_start axis_index inspect_sharding
        pbroadcast pbroadcast_done pbroadcast_dynamic pbroadcast_start pmax pmin ppermute
        ppermute_done ppermute_start precv preduced psend psum psum_done psum_invariant
        psum_invariant_start psum_start ragged_all_to_all reduce_scatter reduce_scatter_done
        reduce_scatter_start reduced_vary_cast reduced_vary_cast_p unreduced_pmax unreduced_pmin
        unreduced_psum unreduced_psum_start unreduced_reduce_scatter unreduced_reduce_scatter_start
        vary_unreduced_cast vary_unreduced_cast_p"""
    ),
    "a mutable reference or another object with an identity: its state would need a type over"
    " time": (
        """
        accum_grad_in_ref addupdate box_get box_set broadcast_to create_linear empty2 empty_ref
        free_ref freeze get log_extend log_read new_box new_log new_ref pin run_state swap unpin"""
    ),
    "orders effects and carries no numbers": "after_all create_token",
    "a compiled program, or a call of a library, without a body to type: held whole": (
        """
        call_exported call_hi_primitive call_hi_primitive_linearized ffi_call"""
    ),
    "a fused kernel of one GPU library, whose splits that library does not state": (
        """
        cudnn_fusion dot_product_attention_bwd dot_product_attention_bwd_wrapper
        dot_product_attention_fp8_bwd dot_product_attention_fp8_bwd_wrapper
        dot_product_attention_fp8_fwd dot_product_attention_fp8_fwd_wrapper
        dot_product_attention_fwd dot_product_attention_fwd_wrapper scaled_matmul
        scaled_matmul_wrapper"""
    ),
    "a choice of the platform, or a check, made once for the whole program": (
        "check platform_index shape_assertion unreachable"
    ),
    "a size that is known when the program is traced": "dim_as_value dimension_size",
    "between numbers and an extended dtype that allows it, which none of JAX's own does": (
        "from_edtype to_edtype"
    ),
    "never in a traced program: evaluated, erased or turned into another primitive while tracing": (
        """
        dce_sink random_gamma_grad stage zeros_like"""
    ),
}

FALLBACK: dict[str, str] = {
    name: reason for reason, names in _TABLE.items() for name in names.split()
}
"""The reason of each primitive that has no rule."""

REFUSED: dict[str, str] = {
    "rng_uniform": (
        "draws from a state of the device: no two devices see the same numbers, so that not even B"
        " is right"
    ),
}
"""Primitives that no type is right for."""

_TRAITS: dict[str, Traits] = {
    "rng_uniform": Traits(generates="draws"),
    "sbp_annotate": Traits(fusion="inlined"),
}
"""Traits of primitives that have no rule."""


def traits_of(name: str) -> Traits:
    """The traits of a primitive; the defaults for one without a rule.

    >>> import sbp.signatures
    >>> traits_of("transpose").moves, traits_of("mul").scales, traits_of("unheard_of").moves
    (True, 'each', False)
    """
    found = rule_for(name)
    return found.traits if found is not None else _TRAITS.get(name, Traits())
