"""What a user sees of an error outside of a notebook: her own frames, and one line.
Every warning points at a line of the user.
Errors that JAX raises while it traces call the function and its arguments by the user's names,
word for word as under `jax.jit`. Options that `jax.jit` has removed or never had are refused."""

import copy
import dataclasses
import inspect
import pickle
import textwrap
import traceback
import warnings
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from benchmarks.fault_suite import checked
from sbp import _jax, signatures
from tests.edits import edited_text, split_edits
from tests.same import outcome, refused

MESH = jax.sharding.AbstractMesh((2, 4), ("data", "model"))
X = jnp.ones((8, 8))


def split_in_vain(x):
    return sbp.split(x, 7, "model")


def no_typing(x, w):
    return sbp.split(x, 1, "model") @ sbp.split(w, 1, "model")


@pytest.mark.parametrize(
    ("call", "functions"),
    [
        (lambda: sbp.jit(lambda x: split_in_vain(x), MESH)(X), ["<lambda>", "split_in_vain"]),
        (lambda: sbp.jit(no_typing, MESH, boxing="explicit").plan(X, X), []),
        (lambda: sbp.jit(no_typing, MESH, in_types=("modl:S(0)", None)), []),
        (lambda: sbp.jit(no_typing, MESH, in_types=({"a": "B"}, None)).plan(X, X), []),
        (lambda: sbp.check_shard_map(REGIONS["dta"], X, mesh=GRID), []),
    ],
)
def test_a_traceback_has_the_frames_of_the_user(call, functions):
    with pytest.raises(sbp.SbpError) as caught:
        call()
    frames = traceback.extract_tb(caught.value.__traceback__)
    own = [f.name for f in frames if f.filename == __file__]
    assert own == ["test_a_traceback_has_the_frames_of_the_user", "<lambda>", *functions]
    assert len(frames) <= len(own) + 2  # a function of sbp that was called, and one that raised
    assert caught.value.__suppress_context__  # and JAX does not say that it removed frames
    assert not (caught.value.__cause__ or caught.value.__notes__)


@pytest.mark.parametrize("method", ["__call__", "plan", "check"])
def test_an_error_of_the_users_function_has_no_frames_around_it(method):
    def loss(x, w):
        return jnp.mean(x @ w)

    def step(x, w):
        return jax.grad(loss)(x, w)

    with pytest.raises(TypeError, match="dot_general") as caught:
        getattr(sbp.jit(step, MESH), method)(X, jnp.ones((3, 8)))
    frames = traceback.extract_tb(caught.value.__traceback__)
    own = [f.name for f in frames if "/sbp/" in f.filename]
    assert own == ["called"] and [f.name for f in frames if f.filename == __file__] == [
        "test_an_error_of_the_users_function_has_no_frames_around_it",
        "step",
        "loss",
    ]


def test_an_error_of_sbp_itself_keeps_its_frames(monkeypatch):
    monkeypatch.setattr("sbp.api.plan.traced_call", None)
    with pytest.raises(TypeError, match="NoneType") as caught:
        sbp.jit(jnp.sin, MESH).plan(X)
    assert any("api/plan.py" in f.filename for f in traceback.extract_tb(caught.tb))


def test_jax_shows_all_frames_where_it_shows_its_own(request):
    request.addfinalizer(lambda: jax.config.update("jax_traceback_filtering", "auto"))
    jax.config.update("jax_traceback_filtering", "off")
    error = refused(None, sbp.jit(no_typing, MESH, boxing="explicit").plan, X, X)
    assert len(traceback.extract_tb(error.__traceback__)) > 4


def test_a_region_may_return_a_number():
    pair = sbp.manual(lambda x: (x, 3), in_types=("data:S(0)",), out_types=("data:S(0)", "B"))
    doubled, three = sbp.jit(pair, sbp.make_mesh((2,), ("data",)))(X)
    assert three == 3 and (doubled == X).all()


# ---- warnings ------------------------------------------------------------------------------------

ODD = jax.ShapeDtypeStruct((9, 4), jnp.float32)


mesh = lambda: sbp.make_mesh([8], ["d"])


def no_rule():
    unknown_p = _jax.Primitive("warned_test")
    unknown_p.def_abstract_eval(lambda x: x)
    sbp.jit(unknown_p.bind, mesh()).plan(ODD)


def unchecked_region():
    groups = lambda x: jax.lax.psum(x, "d", axis_index_groups=[list(range(8))])
    region = sbp.manual(groups, in_types="d:S(0)", out_types="B")
    sbp.jit(lambda x: region(x), mesh()).plan(jax.ShapeDtypeStruct((16, 2), jnp.float32))


def moved():
    whole = jax.sharding.NamedSharding(mesh(), jax.sharding.PartitionSpec(None, None))
    sbp.jit(jnp.sin, mesh(), in_types=("d:S(0)",))(jax.device_put(jnp.ones((16, 4)), whole))


def moved_keys():
    keys = jax.random.split(jax.random.key(3), 8)
    f = sbp.jit(jax.vmap(jax.random.bits), mesh(), in_types=("d:S(0)",))
    f(keys)
    f(jax.device_put(keys, jax.devices()[-1]))


@pytest.mark.parametrize(
    ("act", "code"),
    [
        (lambda: sbp.jit(jnp.sin, mesh(), ("d:S(0)",)).plan(ODD), "uneven-boundary"),
        (lambda: sbp.jit(jnp.sin, mesh(), ("d:S(0)",))(jnp.ones((9, 4))), "uneven-boundary"),
        (lambda: sbp.jit(jnp.sin, mesh(), out_types="d:S(0)").check(ODD), "uneven-boundary"),
        (no_rule, "missing-rule"),
        (
            lambda: sbp.jit(lambda x: jax.device_put(x, jax.devices()[0]), mesh()).plan(ODD),
            "ignored-constraint",
        ),
        (unchecked_region, "manual-types"),
        (moved, "input-moved"),
        (moved_keys, "input-moved"),
        (lambda: jax.vmap(sbp.jit(jnp.sin, mesh()))(jnp.ones(8)), "nested-jit"),
    ],
    ids=lambda x: x.__name__ if callable(x) else x,
)
def test_a_warning_has_the_users_line(act, code):
    with warnings.catch_warnings(record=True, action="always", category=sbp.SbpWarning) as found:
        act()
    (said,) = [w for w in found if issubclass(w.category, sbp.SbpWarning)]
    lines, first = inspect.getsourcelines(act)
    assert str(said.message).startswith(f"{code}: ")
    assert (said.filename, said.lineno) == (__file__, first + len(lines) - 1)


# ---- errors of JAX -------------------------------------------------------------------------------

EIGHT = sbp.make_mesh((8,), ("data",))
JIT: Any = sbp.jit  # wrong calls are meant here


def branches(x: Any, params: Any) -> Any:
    return params["w"] if x > 0 else x


def reads_a_leaf(x: Any, params: Any) -> Any:
    return x * float(params["w"])


def to_numpy(x: Any, params: Any) -> Any:
    return np.asarray(params["w"]) + x


def indexes(x: Any, params: Any) -> Any:
    return [params["w"], x][params["i"]]


def derived(x: Any, params: Any) -> Any:
    return x if (x + params["w"]).sum() else -x


def by_keyword(x: Any, *, params: Any) -> Any:
    return x if params["w"] else -x


class Model:
    def method(self, x: Any, params: Any) -> Any:
        return x if params["w"] else -x


def message(jit, fn: Any, kwargs: dict[str, Any]) -> tuple[type, str]:
    params = {"w": jnp.float32(2), "i": jnp.int32(1)}
    args = (jnp.float32(1),) if kwargs else (jnp.float32(1), params)
    with pytest.raises(Exception) as caught:
        jit(fn)(*args, **{name: params for name in kwargs})
    return caught.type, str(caught.value)


@pytest.mark.parametrize(
    "fn",
    [branches, reads_a_leaf, to_numpy, indexes, derived, by_keyword, Model().method],
    ids=lambda fn: fn.__name__,
)
def test_errors_of_tracing_are_those_of_jit(fn: Any):
    kwargs = {"params": None} if fn is by_keyword else {}
    kind, text = message(lambda fn: sbp.jit(fn, EIGHT), fn, kwargs)
    assert (kind, text) == message(jax.jit, fn, kwargs)
    assert f"{fn.__name__} at " in text and "flat" not in text


def test_static_arguments_are_left_out_of_the_names():
    f = sbp.jit(lambda flag, x, y: x if y > 0 and flag else y, EIGHT, static_argnums=0)
    for call in (f, f.eval_shape):
        with pytest.raises(jax.errors.TracerBoolConversionError, match="value of the argument y"):
            call(True, 1.0, 2.0)


def test_a_leaked_value_names_the_function():
    leaked: list[Any] = []

    def leaking(x: Any) -> Any:
        leaked.append(x * 2)
        return x

    sbp.jit(leaking, EIGHT)(1.0)
    with pytest.raises(jax.errors.UnexpectedTracerError, match=r"leaking at .* traced for jit"):
        _ = leaked[0] + 1


@pytest.mark.parametrize(
    ("x", "says"),
    [
        (
            np.zeros(3, np.dtype(np.float32).newbyteorder("S")),
            r"has dtype .f4, the other byte order than this machine's; pass x\.astype\('float32'\)",
        ),
        (np.array([None, 1], object), "has dtype .O, which JAX does not take"),
        (np.array(["a"]), "has dtype <U1, which JAX does not take"),
        (np.zeros(3, "M8[s]"), "has dtype <M8"),
        (np.datetime64("2020-01-01"), "has dtype <M8"),
        ("text", "is not an array: str; mark it static or pass an array"),
    ],
    ids=["order", "object", "text array", "times", "time", "text"],
)
def test_arrays_of_dtypes_that_jax_lacks(x: Any, says: str):
    assert outcome(lambda: jax.jit(lambda batch: batch["x"])({"x": x})) == "TypeError"
    f = sbp.jit(lambda batch: batch["x"], EIGHT)
    refused(rf"^bad-argument: .*input batch\['x'\] {says}", f, {"x": x}, kind=TypeError)
    if isinstance(x, np.ndarray):
        refused(
            rf"input batch\['x'\] {says}",
            f.plan,
            {"x": jax.ShapeDtypeStruct(x.shape, x.dtype)},
            kind=TypeError,
        )


@pytest.mark.parametrize("wrap", [jax.jit, jax.grad, jax.vmap, jax.checkpoint, lambda f: f])
def test_a_call_with_too_few_arguments(wrap: Any):
    refused(
        r"was called wrongly: .* missing 1 required",
        sbp.jit(wrap(lambda x, y: x + y), EIGHT),
        np.ones(8, "float32"),
        kind=TypeError,
    )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"abstracted_axes": ({0: "n"},)}, r"jax\.export\.symbolic_shape"),
        ({"nonsense": 1}, r"it takes \(fn, mesh=None"),
    ],
)
def test_options_that_jit_lacks(options: dict[str, Any], says: str):
    assert "0x" not in str(refused(says, JIT, branches, EIGHT, kind=TypeError, **options))


def test_a_shape_among_the_results_is_no_array():
    program = lambda x: {"x": x, "shape": jax.ShapeDtypeStruct((3,), jnp.float32)}
    assert outcome(lambda: jax.jit(program)(1.0)) == "TypeError"
    said = r"type ShapeDtypeStruct at result\['shape'\]"
    refused(said, sbp.jit(program, EIGHT), 1.0, kind=TypeError)
    assert not sbp.jit(program, EIGHT).check(1.0).ok


def test_errors_come_back_from_another_process():
    """As `pickle` brings them: with their text, code and diagnostics."""
    small = sbp.jit(lambda x: x + 1, EIGHT, memory_limit=1)
    for call in (lambda: sbp.parse("x("), lambda: small.plan(jnp.ones(8)), lambda: JIT(3)):
        error = refused(None, call)
        assert all(
            (type(same), str(same), same.code) == (type(error), str(error), error.code)
            for same in (pickle.loads(pickle.dumps(error)), copy.deepcopy(error))
        )


# ---- what to write instead -----------------------------------------------------------------------

GRID = sbp.make_mesh((2, 4), ("data", "model"))
PART: Any = sbp.jit(lambda x: x.sum(0), GRID, "data:S(0)", "data:P(sum)")(X)
ODD_ROWS = sbp.Padded.of(np.ones((7, 3), "float32"), "data:S(0)", GRID)
SG: Any = signatures
SPLIT: Any = sbp.split
REPORT = sbp.jit(jnp.sin, GRID, "data:S(0)").check(X)


@dataclasses.dataclass
class Meta:
    x: Any
    meta: Any


jax.tree_util.register_dataclass(Meta, data_fields=["x"], meta_fields=["meta"])


LINE = inspect.stack()[0].lineno + 2
REGIONS = {
    name: jax.shard_map(lambda x: x, mesh=mesh, in_specs=jax.P(axis), out_specs=jax.P(axis))
    for name, mesh, axis in (
        ("dta", GRID, "dta"),
        ("explicit", jax.make_mesh((2, 4), ("data", "model")), "data"),
    )
}


def users_region(x: Any) -> Any:
    return jax.shard_map(
        lambda x: jax.lax.psum(x.sum(), "data"),
        mesh=GRID,
        in_specs=jax.sharding.PartitionSpec("data"),
        out_specs=jax.sharding.PartitionSpec(),
    )(x)


_annotated = lambda annotation: sbp.jit(annotation, GRID).plan(X)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: jax.vmap(lambda p: p.reduce())(PART), r"call \.reduce\(\) before jax\.vmap"),
        (lambda: jax.lax.scan(lambda c, p: (c, p.full()), 0, ODD_ROWS), r"call \.full\(\) before"),
        (
            lambda: sbp.jit(lambda p: p, GRID).plan(jax.tree.map(lambda x: x[0], PART)),
            r"has parts of shape \(8,\), which",
        ),
        (lambda: sbp.jit(lambda p: p.reduce(), GRID)(PART), r"leave out \.reduce\(\)"),
        (lambda: sbp.jit(lambda p: p.full(), GRID)(ODD_ROWS), r"leave out \.full\(\)"),
        (lambda: pickle.dumps(REPORT), r"save the plan with plan\.save\(path\), and a report as"),
        (lambda: pickle.dumps(sbp.jit(jnp.sin, GRID).plan(X)), r"plan\.save\(path\)"),
        (lambda: SG.Row(sbp.S(0), sbp.S(0)), "Row: `ins` must be a tuple of atoms"),
        (lambda: SG.Row(("S(0)",), (sbp.B,)), "Row: `ins` must be a tuple of atoms"),
        (lambda: SG.Row((sbp.B,)), "Row: missing a required argument: 'outs'"),
        (lambda: SG.Op("add", {}, X, (X,), 2), "Op: `ins` must be a tuple of avals"),
        (lambda: SG.Op("add", {}, (X,), (X,), "2"), "Op: `axis_size` must be a whole number"),
        (lambda: SG.Kernel(name=3, summary=""), "Kernel: `name` must be a string"),
        (lambda: SG.kernel_named("halos"), "no kernel is named 'halos'; did you mean \"halo\""),
        (lambda: SG.kernel_named(["halo"]), "no kernel is named"),
        (lambda: sbp.parse("data:S(-1)"), "whole number >= 0, got -1; .* dim -1 of 2 dims is S.1."),
        (lambda: JIT(GRID, jnp.sin), r"a function, with the mesh after it, as in sbp\.jit\(f, m"),
        (lambda: sbp.S(-3), "got -3; .* dim -3 of 3 dims is S.0."),
        (lambda: sbp.S(False), "got False; count dims from the front$"),
        (lambda: SG.all_b("add"), "signatures.all_b: `op` must be an Op"),
        (lambda: SG.traits_of(jax.lax.add_p), "`name` must be a string, got add"),
        (lambda: JIT(jnp.sin, GRID, static_argnums=["0"]), "donate_argnames take names; got .*'0'"),
        (lambda: JIT(jnp.sin, GRID, static_argnums=0.0), "take numbers of arguments"),
        (lambda: JIT(jnp.sin, GRID, static_argnames=[0]), "donate_argnames take names; got"),
        (lambda: JIT(jnp.sin, GRID, donate_argnames=b"x"), "donate_argnames take names; got"),
        (
            lambda: _annotated(lambda x: SPLIT(x, 0, ("data", "model"))),
            "each name is an argument of its own",
        ),
        (lambda: _annotated(lambda x: SPLIT(x, 0, axis="data")), "takes no axis=: give names"),
        (lambda: sbp.policy("explicit", cast(Any, ("data",))), "an argument of its own"),
        (
            lambda: cast(Any, sbp.check_shard_map)(users_region, X, GRID),
            "missing a required argument: 'mesh'; pass mesh=mesh",
        ),
        (
            lambda: sbp.jit(lambda m: m.x, GRID).plan(Meta(X, np.ones(3))),
            "the arguments cannot be read .* metadata of a node has an array",
        ),
        (lambda: sbp.jit(lambda x: Meta(x, x), GRID).plan(X), "what the function returns cannot"),
        (lambda: sbp.check_shard_map(users_region, X, mesh=cast(Any, None)), "mesh must be a jax"),
        (
            lambda: sbp.check_shard_map(REGIONS["dta"], X, mesh=GRID),
            rf"_texts\.py:{LINE}:\d+: in_specs: the mesh has no axis 'dta'; did you mean \"data\"",
        ),
        (
            lambda: sbp.check_shard_map(REGIONS["explicit"], X, mesh=GRID),
            rf"_texts\.py:{LINE}:\d+: on Explicit axes, .* does not match .*; use jax\.device_put",
        ),
        (
            lambda: sbp.check_shard_map(lambda x: jax.lax.psum(x, "data"), X, mesh=GRID),
            r"_texts\.py:\d+:\d+: a collective over mesh axis 'data' is outside of jax\.shard_map",
        ),
        (lambda: JIT(jnp.sin, MESH, static_argnums="0"), "donate_argnames take names; got"),
        (lambda: sbp.jit(jnp.sin, jax.make_mesh((2,), cast(Any, (0,)))), "axes must be strings"),
        (
            lambda: sbp.jit(jnp.sum, MESH, "data:S(0)", "data:P(sum)").plan(X).export("x"),
            r"does not know sbp\.Partial; return whole arrays, or write the plan",
        ),
        *(
            (
                lambda shape=shape: JIT(jnp.sin, EIGHT).plan(jax.ShapeDtypeStruct(shape, "f4")),
                r"input x is .*; give each dim's size as",
            )
            for shape in ((None, 4), (-1, 4), (jnp.int32(8), 4))
        ),
    ],
)
def test_what_to_write_instead(call, said):
    refused(said, call)


def test_what_may_be_done_again():
    assert copy.deepcopy(REPORT) == copy.copy(REPORT) and pickle.dumps(sbp.Report(program=None))
    assert (jax.vmap(lambda p: p.reduce())(jax.tree.map(lambda x: x[None], PART)) == 8).all()
    policy = sbp.policy("explicit", "data")

    def program(x: Any) -> Any:
        with policy, policy:
            return sbp.split(x, 0, "data") @ sbp.split(x, 0, "data")

    for _ in range(2):
        assert not sbp.jit(program, GRID).check(X)
        assert sbp.jit(lambda x: x @ x, GRID).check(X)


BODIES: dict[str, Any] = {
    "summed": lambda x: jax.lax.psum(x, "dta"),
    "varying": lambda x: jax.lax.pcast(x, "dta", to="varying"),
    "over_both": lambda x: jax.lax.psum(x, ("data", "dta")),
}


def _mapped(body: Any, **options: Any) -> Any:
    whole = jax.sharding.PartitionSpec("data")
    options = {"mesh": GRID, "in_specs": whole, "out_specs": whole} | options
    return lambda x: jax.shard_map(body, **options)(x)


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
@pytest.mark.parametrize(
    "checked_by",
    [
        lambda body: sbp.check_shard_map(_mapped(body), X, mesh=GRID),
        lambda body: sbp.check_shard_map(jax.jit(_mapped(body, check_vma=False)), X, mesh=GRID),
        lambda body: sbp.jit(sbp.manual(body, "data:S(0)", "B"), GRID).plan(X),
        lambda body: sbp.jit(_mapped(body, check_vma=False), GRID).plan(X),
    ],
    ids=["check_shard_map", "unchecked", "manual", "jit"],
)
def test_a_misspelt_axis_of_a_collective(body, checked_by):
    line = body.__code__.co_firstlineno
    said = rf"unknown-axis: .*test_error_texts\.py:{line}:\d+: the mesh has no axis 'dta'; did you"
    span = refused(said, checked_by, body).span
    assert span is not None and span.line == line


@pytest.mark.parametrize(
    ("in_types", "out_types", "args"),
    [
        (("B", "B"), "B", (X,)),
        ("dta:S(0)", "B", (X,)),
        ("B", "data:S(7)", (X,)),
        ("data:?", "B", (X,)),
        ("data:S(0)", "data:S(0)", (jnp.ones((7, 3)),)),
        ("B", "B", (X, X)),
    ],
)
def test_an_error_about_a_region_has_the_line_that_makes_it(in_types, out_types, args):
    region = sbp.manual(lambda x: x, in_types, out_types)
    line = inspect.stack()[0].lineno - 1
    (direct,) = sbp.jit(region, GRID).check(*args).diagnostics
    (inside,) = sbp.jit(lambda *xs: region(*xs), GRID).check(*args).diagnostics
    lines = [[label.span.line for label in d.labels] for d in (direct, inside)]
    assert (direct.title, lines) == (inside.title, [[line], [line, line + 3]])
    refused(rf"test_error_texts\.py:{line}:", sbp.jit(region, GRID).plan, *args)


def test_specs_of_an_axis_that_the_mesh_lacks():
    refused(
        r"unknown-axis: .*no axis 'dta'",
        sbp.check_shard_map,
        _mapped(lambda x: x, in_specs=jax.sharding.PartitionSpec("dta")),
        X,
        kind=ValueError,
        mesh=GRID,
    )


# ---- slips ---------------------------------------------------------------------------------------
# Slips before a program is typed have helps, which are edits that were tried.


HEAD = textwrap.dedent(
    """
    import jax, jax.numpy as jnp, sbp
    mesh = jax.sharding.AbstractMesh((2, 4), ("data", "model"))
    layout = sbp.Layout(batch="data", heads="model")
    x, w = jax.ShapeDtypeStruct((8, 16), jnp.float32), jax.ShapeDtypeStruct((16, 16), jnp.float32)
    args = (x, {"blocks": [{"up": w}, {"up": w}]})
    def program(x, params):
        {line}
        for p in params["blocks"]:
            x = x @ p["up"]
        return (x * x).mean(), x
    f = sbp.jit(program, mesh{options})
    report = f.check(*args)
    """
)


def mended(line: str = "pass", options: str = "") -> tuple[Any, str]:
    """The diagnostic of a program, and its source after its first help."""
    text = HEAD.replace("{line}", line).replace("{options}", options)
    (diagnostic,) = checked("slip", text).found
    edits, others = split_edits(diagnostic.helps[0].edits)
    assert not others
    after = edited_text(text, edits)
    assert not [d for d in checked("mended", after).found if d.severity == "error"]
    return diagnostic, after


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ('x = sbp.split(x, 0, "dta")', 'x = sbp.split(x, 0, "data")'),
        ('x = sbp.split(x, 2, "data")', 'x = sbp.split(x, 1, "data")'),
        ("x = sbp.annotate(x, modle=sbp.S(1))", "x = sbp.annotate(x, model=sbp.S(1))"),
        ("x = sbp.annotate(x, model=sbp.S(2))", "x = sbp.annotate(x, model=sbp.S(1))"),
        ('x = sbp.annotate(x, "dat:S(0)")', 'x = sbp.annotate(x, "data:S(0)")'),
        ('x = layout(x, "batch", "haeds")', 'x = layout(x, "batch", "heads")'),
    ],
)
def test_a_slip_in_an_annotation(line, meant):
    diagnostic, after = mended(line)
    assert meant in after
    assert diagnostic.primary.span.line == HEAD.splitlines().index("    {line}") + 1


@pytest.mark.parametrize(
    ("options", "meant"),
    [
        (', in_types=("data:S(2)", "B")', '("data:S(1)", "B")'),
        (', out_types=("data:S(1)", "B")', '("B", "data:S(1)")'),
        (', in_types=({"blocks": "B"}, "data:S(0)")', '("data:S(0)", {"blocks": "B"})'),
        (', in_types=("B", {"block": "B"})', '("B", {"blocks": "B"})'),
        (
            ', in_shardings=({"blocks": None}, jax.sharding.PartitionSpec("data"))',
            '(jax.sharding.PartitionSpec("data"), {"blocks": None})',
        ),
        (
            ', out_shardings=(jax.sharding.PartitionSpec("data"), None)',
            '(None, jax.sharding.PartitionSpec("data"))',
        ),
    ],
)
def test_a_slip_in_an_option(options, meant):
    diagnostic, after = mended(options=options)
    assert meant in after
    line = next(n for n, t in enumerate(HEAD.splitlines(), 1) if t.startswith("f ="))
    assert {label.span.line for label in diagnostic.labels} == {line}


@pytest.mark.parametrize("option", ["in_types", "out_types"])
@pytest.mark.parametrize("entry", ['"dta:S(0)"', 'jax.sharding.PartitionSpec("dta")'])
def test_a_misspelt_axis_in_an_option_is_refused_at_its_place(option, entry):
    """`sbp.jit` refuses it; where the mesh is that of the context, `check` has helps."""
    options = f", {option}=" + (f"({entry}, None)" if option == "in_types" else f"(None, {entry})")
    text = HEAD.replace("{line}", "pass").replace("{options}", options)
    (found,) = checked("slip", text).found
    assert found.code == "unknown-axis" and found.title.endswith('did you mean "data"?')
    assert found.title.startswith(option) and found.primary is not None
    line = text.splitlines()[found.primary.span.line - 1].encode()
    marked = line[found.primary.span.column - 1 : found.primary.span.end_column - 1].decode()
    assert marked in ('"dta:S(0)"', '"dta"'), marked
    later = text.replace(f"mesh{options})", options.replace(", ", "", 1) + ")").replace(
        "report =", "with jax.sharding.use_abstract_mesh(mesh):\n    report ="
    )
    (found,) = checked("slip", later).found
    assert next(h.text for h in found.helps) == f"write 'data' for 'dta' in {option}"
    assert not checked("slip", edited_text(later, split_edits(found.helps[0].edits)[0])).found


def test_a_misspelt_key_of_a_pattern():
    diagnostic, after = mended(options=', in_types={"blocks/*/upp": "model:S(1)"}')
    assert '{"blocks/*/up": "model:S(1)"}' in after and len(diagnostic.helps) == 1


def test_an_option_in_variables_that_were_swapped():
    swapped = 'one, other = ("B", "B"), ("data:S(2)", "B"); kept = one; one = other; other = kept\n'
    text = HEAD.replace("{line}", "pass").replace("{options}", ", in_types=one")
    (diagnostic,) = checked("swapped", text.replace("f = sbp", f"{swapped}f = sbp")).found
    assert diagnostic.code == "dim-out-of-range" and diagnostic.helps


@pytest.mark.parametrize(
    ("line", "options", "texts"),
    [
        (
            "pass",
            ', out_types=("data:S(1)", "B")',
            ["entries 0 and 1 of out_types look swapped", "the other one"],
        ),
        (
            'twice = sbp.Layout(a="data", b="data"); x = twice(x, "a", "b")',
            "",
            ["'a' and 'b' are mapped to 'data' here"],
        ),
    ],
)
def test_labels_of_a_slip(line, options, texts):
    diagnostic, _ = mended(line, options)
    assert [label.text for label in diagnostic.labels if label.text in texts] == texts


def test_a_correction_stays_where_it_was_tried():
    """What an inner `jax.jit` traced under a correction is not found without it."""
    inner = jax.jit(lambda x: sbp.split(x, 2, "data") * 2)
    f = sbp.jit(lambda x: inner(x), MESH)
    for _ in range(2):
        assert [(d.code, bool(d.helps)) for d in f.check(X).diagnostics] == [
            ("dim-out-of-range", True)
        ]


@pytest.mark.parametrize(
    ("shape", "types", "helps", "left"),
    [
        (
            (8, 8),
            ["x:S(2)", *(f"y:S({n % 2}) x:?" for n in range(6))],
            2,
            15 + 2 - 12,
        ),  # swaps and renames
        ((8,) * 5, "x:S(5)", 3, 2),
        ((8,) * 4, "x:S(4)", 3, 1),
        ((8,) * 3, "x:S(3)", 3, 0),
    ],
)
def test_changes_that_were_not_tried_are_counted(shape, types, helps, left):
    """A wrong value is tried also where there are many entries to swap: here 15, beside 2 dims."""
    several = tuple(types) if isinstance(types, list) else (types,)
    mesh = jax.sharding.AbstractMesh((2, 2), ("x", "y"))
    f = sbp.jit(lambda *args: sum(x.sum() for x in args), mesh, in_types=several)
    (found,) = f.check(*[jax.ShapeDtypeStruct(shape, jnp.float32)] * len(several)).diagnostics
    assert len(found.helps) == helps
    said = {0: (), 1: ("sbp did not try 1 more change",)}
    assert found.notes == said.get(left, (f"sbp did not try {left} more changes",))


@pytest.mark.parametrize(
    ("fn", "mesh", "types", "shape", "helps"),
    [
        # The sizes divide on no mesh axis. The plans that sbp tries for a help give no warnings.
        (
            lambda x: x * 2,
            jax.sharding.AbstractMesh((2,), ("data",)),
            "data:S(2)",
            (13, 9),
            ["write 1 for 2 in in_types", "write 0 for 2 in in_types"],
        ),
        # The end of another axis name stays.
        (
            lambda x: sbp.annotate(x, "xmodel:S(0) model:S(1)"),
            jax.sharding.AbstractMesh((2, 2), ("xmodel", "model_b")),
            None,
            (8, 8),
            ["write 'model_b' for 'model'"],
        ),
        # Nothing is suggested that does not work.
        (lambda x: sbp.split(sbp.split(x, 3, "data"), 4, "data"), MESH, None, (8, 8), []),
    ],
)
def test_helps_that_are_tried(fn, mesh, types, shape, helps):
    (found,) = sbp.jit(fn, mesh, types).check(jax.ShapeDtypeStruct(shape, "float32")).diagnostics
    assert [h.text.split(" at line ")[0] for h in found.helps] == helps
