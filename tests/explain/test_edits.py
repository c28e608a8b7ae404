"""An edit of a pin changes that pin alone: what else it asks stays, and so do other pins."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import sbp
from sbp.errors import OptionEdit, SourceEdit
from sbp.explain.pin_changes import carried_inputs, edits_of, set_pins
from sbp.infer.constraints import pin_sites
from tests.edits import check_helps
from tests.explain.expected import MESH, MESH_2D, SQUARE


def pins(request):
    """The pins of the annotations of a program."""
    return [n.params["pin"] for n in request.graph.walk() if n.op == "sbp_annotate"]


@pytest.mark.parametrize(
    ("wanted", "left"),
    [
        ({0: None}, "tensor:S(1)"),
        ({0: 2}, "data:S(1) tensor:S(1)"),
    ],
)
def test_a_changed_pin_keeps_the_dtype_of_its_sums(wanted, left):
    def program(x):
        return sbp.annotate(x, data=sbp.S(0), tensor=sbp.S(1), reduce_dtype=jnp.float32) * 2

    request = sbp.jit(program, MESH_2D).trace(SQUARE).request
    (site,) = pin_sites(request)
    (pin,) = pins(set_pins(request, [(site, wanted)]))
    assert (repr(pin.type), pin.reduce_dtype) == (left, "float32")


def test_the_source_keeps_the_dtype_of_its_sums():
    def program(x):
        return sbp.annotate(x, data=sbp.S(0), tensor=sbp.S(1), reduce_dtype=jnp.float32) * 2

    request = sbp.jit(program, MESH_2D).trace(SQUARE).request
    (site,) = pin_sites(request)
    (edit,) = edits_of(request, site, {0: None})
    assert isinstance(edit, SourceEdit)
    assert edit.replacement == 'sbp.annotate(x, tensor=sbp.S(1), reduce_dtype="float32")'


def arriving(*spec, mesh=MESH):
    """An argument that arrives with a sharding."""
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    return jax.ShapeDtypeStruct(SQUARE.shape, SQUARE.dtype, sharding=sharding)


def product(x, w):
    return x @ w


def test_in_types_that_free_one_argument_name_the_types_of_the_others():
    """Without `in_types`, the sharding of each argument asks its type; with them, none does."""
    args = (arriving("tensor"), arriving(None, "tensor"))
    found = sbp.jit(product, MESH, boxing="explicit").check(*args).diagnostics
    check_helps(product, MESH, {"boxing": "explicit"}, args, found)
    helps = [h for d in found for h in d.helps if "in_types" in h.text]
    assert helps
    for help_ in helps:
        assert "and write the types of the other inputs there, too" in help_.text
        assert [e.position for e in help_.edits if isinstance(e, OptionEdit)] == [0, 1]


def test_in_types_do_not_reach_keyword_arguments():
    f = sbp.jit(product, MESH, boxing="explicit")
    traced = f.trace(arriving("tensor"), w=arriving(None, "tensor")).request
    first, second = pin_sites(traced)
    assert traced.demand.sources == ("argument", "keyword argument")
    assert edits_of(traced, first, {0: None}) and carried_inputs(traced, first) == {}
    assert edits_of(traced, second, {0: None}) == ()
