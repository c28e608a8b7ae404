"""Calls with symbolic sizes: errors, scopes of several inputs, and the report."""

import dataclasses
import re

import jax.numpy as jnp
import pytest
from jax.export import SymbolicScope, symbolic_shape

import sbp
from sbp.api.symbolic import SizedCall
from sbp.errors import SbpError
from tests.same import refused
from tests.sizes.oracle import MESH, TP, W, dims, f32, mlp, sized


def test_a_type_error_says_at_which_sizes():
    (b,) = dims("8*b")
    report = sbp.jit(
        lambda x: jnp.tanh(sbp.partial(x, "data")), MESH, in_types=("data:S(0)",), boxing="explicit"
    ).check(f32(b, 8))
    assert not report.ok and report.program is None
    assert all(
        d.notes[-1] == "symbolic sizes: sbp found this error for b = 40; it did not try other sizes"
        for d in report.diagnostics
    )


def test_plans_and_calls_want_numbers():
    (b,) = dims("8*b")
    f = sbp.jit(lambda x: x * 2, MESH)
    for use in (f.plan, f, f.trace):
        refused(
            r"^symbolic-sizes: .* needs concrete sizes, got the shape \(8\*b, 4\); give numbers",
            use,
            f32(b, 4),
        )
    assert f.check(f32(b, 4)).ok and f.plan(f32(24, 4)).cost.bytes_per_device == 0


def of_sizes(make, text="b, s", *constraints):
    """A program and its argument, made with symbolic sizes."""
    return lambda: make(*dims(text, *constraints))


REFUSED = {
    "several scopes": (
        lambda: (lambda x: (x[0] * 2, x[1]), [f32(*dims("b, 4")), f32(*dims("b, 4"))]),
        "different scopes",
    ),
    "no sizes": (
        of_sizes(lambda b: (lambda x: x, f32(b, 4)), "b", "b >= 5", "b <= 4"),
        "no sizes meet the constraints",
    ),
    "a question of Python": (
        of_sizes(lambda b: (lambda x: x * 2 if x.shape[0] > 5 else x, f32(b, 4)), "b"),
        "'b' > '5' is inconclusive.*add a constraint that decides it to constraints= of jax.export",
    ),
    "a shape of no argument": (
        of_sizes(lambda b, s: (lambda x: x.reshape(s, 2) * 2, f32(b, 8))),
        "uses the symbolic size s from",
    ),
    "a size of no argument": (
        of_sizes(lambda b, s: (lambda x: x * s, f32(b, 8))),
        "uses the symbolic size s from",
    ),
    "a word of Python": (
        lambda: (lambda x: x * 2, f32(*dims("b, in"))),
        "rename the size `in`, which is a word of Python",
    ),
    "a size of another scope": (
        lambda: (lambda x: x.reshape(8, *dims("s")), f32(*dims("b"), 8)),
        "uses the symbolic size s from",
    ),
    **{
        f"no elements, {n}": (
            of_sizes(lambda b, s, f=f: (lambda x: f(x, b, s), f32(b, s)), "b, s", "mod(b, 2) == 0"),
            "keeps the number of elements at no sizes that are asked for",
        )
        for n, f in enumerate(
            (
                lambda x, b, s: x.reshape(b, s, 2),
                lambda x, b, s: x.reshape(3, s),
                lambda x, b, s: x.reshape(4, s).reshape(6, s),
            )
        )
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_program_that_no_sizes_fit(name):
    make, said = REFUSED[name]
    try:
        program, args = make()
    except ValueError:
        return  # this JAX sees itself that the scope is empty
    (found,) = sbp.jit(program, MESH).check(args).diagnostics
    assert found.code == "symbolic-sizes" and re.search(said, found.title), found.title
    if name not in ("several scopes", "no sizes", "a word of Python"):  # these have no line
        assert found.primary is not None and found.primary.span.file == __file__


def test_a_constraint_answers_a_question_of_python():
    (b,) = dims("b", "b >= 6")
    assert sbp.jit(lambda x: x * 2 if x.shape[0] > 5 else x, MESH).check(f32(8 * b, 4)).ok


def test_python_that_asks_a_size_from_outside_of_its_arguments():
    """With numbers for its arguments the program does not trace, which a check says and no more."""
    b, s = dims("b, s", "mod(b, 2) == 0")
    f = sbp.jit(lambda x: x.reshape(-1, s) * 2, MESH, in_types="B", out_types="B")
    span = refused(
        r"^symbolic-sizes: .*take them from the shapes of its arg", f.plan, f32(2, 3, 4)
    ).span
    assert span is not None and span.file == __file__
    report = f.check(f32(b, s, 4))
    (said,) = report.diagnostics
    assert report.ok and (said.code, said.severity) == ("sizes-unproved", "note")
    assert said.primary is not None and said.primary.span == span
    assert "cannot trace it with numbers" in said.notes[0]


def test_symbolic_sizes_among_numbers():
    """A function whose arguments have numbers, and one that has a size of no argument."""
    b, s = dims("b, s")
    f = sbp.jit(lambda x: x.reshape(b, s, 2) * 2, MESH)
    for use in (f, f.plan):
        span = refused(
            r"^symbolic-sizes: .*uses the symbolic sizes b and s from outside", use, f32(8, 4)
        ).span
        assert span is not None and span.file == __file__


def test_one_scope_for_several_inputs():
    scope = SymbolicScope(["b >= 2", "mod(b, 8) == 0"])
    (x,), (y,) = symbolic_shape("b", scope=scope), symbolic_shape("2*b", scope=scope)
    f = sbp.jit(
        lambda x, y: (x.sum(), jnp.tanh(y)), MESH, in_types=("data:S(0)", "data:S(0) model:S(0)")
    )
    report = sized(f, f32(x), f32(y))
    assert report.sizes.status == "every" and report.sizes.asked == "b >= 2 and mod(b, 8) == 0"
    assert report.sizes.holds_at(b=8) is True and report.sizes.holds_at(b=4) is None


def test_the_report_shows_the_sizes():
    (b,) = dims("b")
    f = sbp.jit(mlp, MESH, in_types=(TP, "data:S(0)"), out_types="data:S(0)", memory_limit=1e9)
    report = sized(f, W, f32(b, 16))
    assert str(report) == report.text()
    text, at = report.text(400), report.sizes.counterexample
    assert at is not None
    for line in (
        "  asked for         every b >= 1; other sizes are not covered",
        "  typing holds for  sizes where input x of shape (b, 16) divides evenly under data:S(0)",
        "  planned at        b = 40; bytes, memory and time are for these sizes",
        "  memory limit      met for b = 40; sbp did not check other sizes",
        (
            "  error[size-condition]: the typing does not hold for every b >= 1; it holds where"
            " input x of shape (b, 16) divides evenly under data:S(0)"
        ),
        (
            f"    = note: this does not hold for b = {at['b']}: input x of shape (b, 16) divides"
            " evenly under data:S(0)"
        ),
    ):
        assert line in text.split("\n"), text
    assert "divides evenly" in report.html() and "typing holds for" in str(report.short())
    (b,) = dims("b", "mod(b, 2) == 0")
    assert sized(f, W, f32(b, 16)).sizes.status == "every"


def test_a_copy_of_a_sized_call_is_traced_anew():
    """What one call traces is not what another one, at other sizes, decides."""
    (b,) = dims("8*b")
    reader = sbp.jit(mlp, MESH)._on(MESH)
    signature, _ = reader.read((W, f32(b, 16)), {})
    call = SizedCall.of(reader, signature)
    copy = dataclasses.replace(call, point={"b": 3})
    call.trace(signature.call, signature.avals, signature.names)
    with pytest.raises(AttributeError, match="program"):
        copy.program
    again, _ = copy.trace(signature.call, signature.avals, signature.names)
    assert again.aval(again.outputs[0]).shape == (24, 4) and copy.program is not call.program


def test_other_errors_of_the_program_are_raised_as_they_are():
    b, s = symbolic_shape("b, s")
    with pytest.raises(TypeError) as error:
        sbp.jit(lambda x, y: jnp.tanh(x) + y, MESH).check(f32(b, s, 3), f32(b, s, 4))
    assert not isinstance(error.value, SbpError)
