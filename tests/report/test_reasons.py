"""The words of a conversion's reason."""

import jax
import jax.numpy as jnp
import pytest

import sbp
from sbp.explain.origins import ConversionNeed, PartnerRows
from sbp.explain.subjects import AtomChange, ValueName
from sbp.report.wording import full_need_text


@pytest.mark.parametrize(("count", "said"), [(3, ""), (5, " or 2 more")])
def test_rows_of_partners_past_the_third_are_counted(count, said):
    mesh = jax.sharding.AbstractMesh((2,), ("d",))
    traced = sbp.jit(jnp.tanh, mesh).trace(jax.ShapeDtypeStruct((8,), "float32"))
    (node,) = traced.request.graph.nodes
    partners = PartnerRows(
        names=(ValueName("y"),), atoms=(0,), rows=tuple((c,) for c in range(1, count + 1))
    )
    need = ConversionNeed(
        kind="partners", change=AtomChange(0, -1, 0), node=node, partners=partners
    )
    assert f"`y` S(0) or `y` S(1) or `y` S(2){said}, and `y` is B" in full_need_text(need, ())
