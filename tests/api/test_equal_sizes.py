"""Two symbolic sizes that a program takes for one: the help makes them equal."""

import jax
import jax.numpy as jnp
import pytest
from jax.export import symbolic_shape

import sbp
from sbp.errors import OptionEdit, SbpError, SourceEdit
from tests.cases import shape as f32

MESH = jax.sharding.AbstractMesh((2, 4), ("data", "model"))


def added(x, y):
    return jnp.tanh(x) + y


def multiplied(x, w):
    return jnp.exp(x) @ w


@pytest.mark.parametrize(
    "program,shapes,term",
    [
        (added, lambda b, s, t: ((b, s, 8), (b, t, 8)), "t == s"),
        (multiplied, lambda b, s, t: ((b, s), (t, 16)), "t == s"),
        (added, lambda b, s, t: ((b, 2 * s), (t, 2 * s)), "t == b"),
    ],
)
def test_sizes_that_have_to_be_equal_are_named(program, shapes, term):
    b, s, t = symbolic_shape("b, s, t", constraints=["mod(b, 8) == 0"])
    made = (f32(*shape) for shape in shapes(b, s, t))
    jitted = sbp.jit(program, MESH, in_types="data:B", out_types="data:B")
    (found,) = jitted.check(*made).diagnostics
    assert found.code == "symbolic-sizes" and found.notes == (f"JAX accepts the program if {term}",)
    assert found.primary is not None and found.primary.span.file == __file__
    (help_,) = found.helps
    (edit,) = help_.edits
    constraints = edit.value if isinstance(edit, OptionEdit) else edit.replacement
    assert term in constraints and "mod(b, 8) == 0" in constraints
    assert isinstance(edit, OptionEdit | SourceEdit)
    b, s, t = symbolic_shape("b, s, t", constraints=["mod(b, 8) == 0", term])
    again = jitted.check(*(f32(*shape) for shape in shapes(b, s, t)))
    assert again.ok and again.program is not None, again.text()
    assert round(again.program.cost.bytes_per_device) == round(help_.bytes_per_device)


def test_other_errors_of_the_program_are_raised_as_they_are():
    b, s = symbolic_shape("b, s")
    for shapes in (((b, s, 3), (b, s, 4)), ((b, 2 * b), (s + 1, 7))):
        with pytest.raises(TypeError) as error:
            sbp.jit(added, MESH).check(*(f32(*shape) for shape in shapes))
        assert not isinstance(error.value, SbpError)
