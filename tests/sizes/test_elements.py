"""The number of elements that a reshape keeps is a condition on symbolic sizes."""

import itertools
import math

import pytest

import sbp
from tests.sizes.oracle import MESH, dims, f32, sized

RESHAPES = {
    "a number": (lambda x, b, s: x.reshape(8, s), (lambda b, s: (b, s)), "b == 8"),
    "a quotient": (lambda x, b, s: x.reshape(b, 8, s // 8), (lambda b, s: (b, s)), "mod(s, 8)"),
    "a product": (lambda x, b, s: x.reshape(24), (lambda b, s: (b, s)), "b*s == 24"),
    "a sum": (lambda x, b, s: x.reshape(8, 4), (lambda b, s: (b + s, 4)), "s == - b + 8"),
    "two": (lambda x, b, s: x.reshape(4, s).reshape(b, 6), (lambda b, s: (b, s)), "b == 4"),
}


@pytest.mark.parametrize("name", RESHAPES)
def test_sizes_of_other_numbers_of_elements_are_left_out(name):
    program, shape, condition = RESHAPES[name]
    b, s = dims("b, s")
    jitted = sbp.jit(lambda x: program(x, b, s) * 2, MESH, in_types="B", out_types="B")
    report = sized(jitted, f32(*shape(b, s)))
    found = report.sizes
    assert found.status == "some" and condition in found.holds
    assert "keeps the number of elements" in report.text(400)
    assert program(_Shaped(shape(**found.point)), **found.point) is not None
    for point in itertools.product(range(1, 13), repeat=2):
        claimed, here = found.holds_at(b=point[0], s=point[1]), shape(*point)
        try:
            program(_Shaped(here), *point)
            assert claimed is not False, point
        except TypeError:
            assert claimed is False, point


class _Shaped:
    """A shape that reshapes as NumPy does: to shapes of as many elements."""

    def __init__(self, shape):
        self.shape = shape

    def reshape(self, *shape):
        if math.prod(self.shape) != math.prod(shape):
            raise TypeError(shape)
        return _Shaped(shape)


def test_the_help_is_accepted():
    b, s = dims("b, s")
    report = sized(sbp.jit(lambda x: x.reshape(8, s) * 2, MESH, in_types="B"), f32(b, s))
    (error,) = [d for d in report.diagnostics if d.severity == "error"]
    assert error.primary is not None and "x.reshape(8, s)" in report.text(400)
    (help_,) = error.helps
    assert "b == 8" in help_.text
    b, s = dims("b, s", *report.sizes.terms)
    assert sized(sbp.jit(lambda x: x.reshape(8, s) * 2, MESH, in_types="B"), f32(b, s)).ok
