"""The one place that checks the arguments of public functions."""

import functools
import re
from collections.abc import Callable
from typing import Any, cast

import jax
import numpy as np
import pytest

import sbp
from sbp import signatures
from sbp.kinds import SHOWN_CHARACTERS, WHOLE_NUMBER, made_of, show, takes
from tests.same import refused


@takes("f", n=WHOLE_NUMBER, rest=WHOLE_NUMBER, more=WHOLE_NUMBER)
def f(n: int, /, m: int = 2, *rest: int, key: int = 3, **more: int) -> tuple[object, ...]:
    return n, m, rest, key, more


def test_what_fits_passes():
    assert f(1) == (1, 2, (), 3, {}) and f(1, 2, 3, 4, key=5, n=6) == (1, 2, (3, 4), 5, {"n": 6})
    assert f(1, m=None) == (1, None, (), 3, {})  # type: ignore[arg-type]  # `takes` does not name m
    assert Point(3).x == 3


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((), {}, "f: missing a required argument: 'n'; it takes (n, /, m=2, *rest, key=3, **more)"),
        ((1, 2), {"m": 3}, "f: multiple values for argument 'm'; it takes"),
        (("1",), {}, "f: `n` must be a whole number, got '1'"),
        ((1, 2, 3, None), {}, "f: `rest` must be a whole number, got None"),
        ((1,), {"other": True}, "f: `more` must be a whole number, got True"),
    ],
)
def test_what_does_not_fit_is_refused(args, kwargs, message):
    refused(f"^bad-argument: {re.escape(message)}", f, *args, kind=TypeError, **kwargs)


@takes("g")
def g(size: int, *, axis: str = "") -> int:
    return size


@made_of("Point", x=WHOLE_NUMBER)
class Point:
    def __init__(self, x: int) -> None:
        self.x = x


def test_a_long_value_is_cut_and_counted():
    """A value that cannot be shown is named by its class."""
    # The quotes are two characters more.
    assert show("x" * (SHOWN_CHARACTERS + 8)).endswith("x.. (10 more characters)")
    assert show("x" * (SHOWN_CHARACTERS - 2)).endswith("x'")
    odd = type("Odd", (), {"__repr__": None})()
    assert show(odd) == "an object of class Odd" and show("\ud800") == "'\\ud800'"


SBP: Any = sbp  # wrong calls are meant here
ONE = sbp.make_mesh((1,), ("data",))
PLAN: Any = sbp.jit(jax.numpy.sin, ONE).plan(np.ones(8, np.float32))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: cast(Any, g)(1, axes="data"),
            "g: got an unexpected keyword argument 'axes'; did you mean \"axis\"",
        ),
        (lambda: cast(Any, g)(1, 2), "g: too many positional arguments; "),
        (lambda: Point(cast(Any, "a")), "Point: `x` must be a whole number, got 'a'"),
        (
            lambda: SBP.make_mesh("x", ("x",)),
            "sbp.make_mesh: `axis_sizes` must be a sequence of sizes",
        ),
        (lambda: SBP.make_mesh((2, 4), ("x",)), "one size of 1 or more for each axis"),
        (lambda: SBP.make_mesh((2, 4), {"x", "y"}), "`axis_names` must be a sequence of names"),
        (lambda: SBP.NdSbp().over({"x", "y"}), "`mesh_axes` must be a sequence of names"),
        (lambda: sbp.jit(len, jax.sharding.AbstractMesh((0,), ("x",))), "of no axis with size 0"),
        (lambda: SBP.NdSbp(5), "NdSbp: `atoms` must be a dict from names of mesh axes to atoms"),
        (lambda: SBP.parse(None), "sbp.parse: `text` must be a string, got None"),
        (
            lambda: SBP.Partial([1.0], sbp.NdSbp()),
            "Partial: `parts` must be an array with a leading dim",
        ),
        (lambda: SBP.split([1.0], "data"), "sbp.split: `dim` must be a dim number"),
        (lambda: SBP.split(object(), 0, "data"), "an annotation is for one array"),
        (lambda: SBP.S(), "S: missing a required argument: 'dim'; it takes (dim)"),
        (lambda: sbp.NdSbp({"data": sbp.B})[3], "names no mesh axis 3"),  # type: ignore[index]
        (lambda: sbp.Layout(batch="data")["batsh"], "has no dim 'batsh'"),
        (
            lambda: SBP.Jitted(len, None, None),
            "Jitted: `options` must be a JitOptions, which sbp.jit makes",
        ),
        (lambda: SBP.Plan(1, 2, 3, 4), "Plan: `reader` must be a CallReader, which `plan` of"),
        (
            lambda: SBP.Report(program=None).full().text("x"),
            "text: `width` must be a number of columns",
        ),
        (
            lambda: SBP.Report(program=None).full().lines(None),
            "lines: `width` must be a number of columns",
        ),
        (
            lambda: SBP.Report(program=None).full().html(standalone=3),
            "html: `standalone` must be True or False",
        ),
        (
            lambda: SBP.fully_sharded("data").type_of((2,), 3),
            "`axes` must be pairs of a mesh axis and",
        ),
        (
            lambda: SBP.Report(program=3),
            "Report: `program` must be a Program, which sbp.jit makes, or None",
        ),
        (lambda: SBP.Report(program=None, diagnostics=["x"]), "a tuple of sbp.Diagnostic"),
        (
            lambda: SBP.Diagnostic(code=[], severity="error", title=""),
            "Diagnostic: `code` must be a code that `sbp explain` lists, got",
        ),
        (
            lambda: SBP.Diagnostic(code="typo", severity="error", title=""),
            "unknown-option: Diagnostic: `code` must be a code",
        ),
        (
            lambda: SBP.Diagnostic(code="no-typing", severity="error", title="", labels=("x",)),
            "Diagnostic: `labels` must be a tuple of Label, got",
        ),
        (lambda: SBP.SbpTypeError(["x"]), "takes one sbp.Diagnostic or more"),
        (
            lambda: jax.tree.map(
                lambda _: None, sbp.Partial(np.ones((2, 3)), sbp.NdSbp({"data": sbp.P}))
            ).reduce(),
            "this Partial has parts that are not an array, None; call .reduce() before",
        ),
        (
            lambda: signatures.register("add", samples=cast(Any, 3)),
            "`samples` must be a list of samples",
        ),
        (
            lambda: SBP.jit(jax.numpy.sin, ONE, remat="always"),
            '`remat` must be one of "auto", "never"',
        ),
        *(
            (
                lambda dtype=dtype: SBP.jit(jax.numpy.sin, ONE, reduce_dtype=dtype),
                "unknown-option: reduce_dtype must be jnp.float32",
            )
            for dtype in (
                jax.numpy.float64,
                jax.numpy.int32,
                jax.numpy.complex64,
                jax.numpy.float8_e5m2,
                "f32",
                32,
            )
        ),
        (lambda: SBP.Partial(np.ones((2, 4)), sbp.parse("x:P"), np.int32), "unknown-option: "),
        # plans and reports
        (lambda: PLAN.diff(3), "`other` must be another plan, got 3"),
        (lambda: PLAN.source("plan.npz"), "must end in .py"),
        (
            lambda: jax.jit(PLAN.place)(np.ones(8, np.float32)),
            "input x is traced by a transformation",
        ),
        (
            lambda: (
                sbp.jit(jax.numpy.sin, jax.sharding.AbstractMesh((2,), ("x",)), hardware="cpu")
                .plan(np.ones(8))
                .place(np.ones(8))
            ),
            "abstract-mesh",
        ),
        (
            lambda: (
                sbp.jit(lambda params: params["w"] * 2, ONE)
                .plan({"w": 1.0})
                .report()
                .where("params['v']")
            ),
            "did you mean \"params['w']\"",
        ),
        (lambda: PLAN.report().picture(axis="dta"), "has no axis 'dta'; did you mean \"data\""),
        (lambda: PLAN.report().picture(by="lines"), "line"),
        *(
            (lambda x=x: PLAN.report().bytes(x), "`other` must be a Report, or None, got")
            for x in (PLAN, type("Unshown", (), {"__repr__": None})())
        ),
        # policies and budgets
        (lambda: SBP.forbid("all_gathers"), "unknown-option: "),
        (lambda: SBP.forbid(where="forwards"), "unknown-option: "),
        (lambda: SBP.forbid(where=["loop"]), "unknown-option: "),
        (lambda: SBP.forbid(where={"loop": 1}), "unknown-option: "),
        (lambda: SBP.forbid(["all_gather"]), "unknown-option: "),
        (lambda: SBP.forbid(above=-1), "bad-argument: "),
        (lambda: SBP.forbid(axis=""), "bad-argument: "),
        (lambda: SBP.forbid(axis=["dcn"]), "bad-argument: "),
        (lambda: SBP.jit(len, ONE, budgets=[sbp.forbid(axis="dta")]), "unknown-axis: "),
        (lambda: SBP.jit(len, ONE, budgets=sbp.forbid()), "bad-argument: "),
        (lambda: SBP.jit(len, ONE, boxing={"dta": "auto"}), "unknown-axis: "),
        (lambda: SBP.jit(len, ONE, boxing={"data": "some"}), "unknown-option: "),
        (lambda: SBP.policy("some").__enter__(), "unknown-option: "),
        (lambda: SBP.policy(["auto"]).__enter__(), "unknown-option: "),
        (lambda: SBP.policy("explicit", "").__enter__(), "bad-argument: "),
        (lambda: SBP.policy("explicit", "data", None).__enter__(), "bad-argument: "),
        (lambda: SBP.policy("explicit", ("x", "data")).__enter__(), "bad-argument: "),
    ],
)
def test_public_functions_name_the_argument_and_what_they_take(call, message):
    refused(re.escape(message), call)


ENDLESS: Any = []
ENDLESS.append({"a": (ENDLESS,)})
READERS: dict[str, Callable[[Any], Any]] = {
    "in_types": lambda tree: sbp.jit(lambda x: x, ONE, in_types=tree),
    "out_types": lambda tree: sbp.jit(lambda x: x, ONE, out_types=(tree,)),
    "out_shardings": lambda tree: sbp.jit(lambda x: x, ONE, out_shardings=tree),
    "results": lambda tree: sbp.jit(lambda x: tree, ONE).plan(1.0),
    "arguments": lambda tree: sbp.jit(lambda x: x, ONE).plan(tree),
    "names of a layout": lambda tree: sbp.Layout(batch="data").types(tree),
}


@pytest.mark.parametrize(
    "tree",
    [ENDLESS, functools.reduce(lambda tree, _: [tree], range(600), 1.0)],
    ids=["endless", "deep"],
)
@pytest.mark.parametrize("reader", READERS)
def test_a_tree_that_contains_itself_is_refused_before_jax_sees_it(reader, tree):
    """After JAX has failed to flatten one, no Python function can be called any more."""
    refused("contains itself, or is nested too deep", READERS[reader], tree)
