"""Results have the shapes, dtypes, weak types and values that `jax.jit` gives them. Plain JAX code
on the results of a plan, by the axis types of the mesh. Plans in files for tests, and reports as
data."""

import json
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from tests.api.same import assert_same_results


class Pair(NamedTuple):
    first: Any
    second: Any


BF16 = jnp.ones(4, jnp.bfloat16)
ZEROS = jnp.zeros

WEAK = {
    "product": (lambda x: x * 2, 1.0),
    "argument": (lambda x: (x, x), 1.0),
    "constants": (lambda x: (1, 1.0, True, 2j, None, np.float64(3), np.arange(3)), 1.0),
    "nested": (lambda x, y: {"a": [x, y, x + y], "b": Pair(x * 2, y * 3)}, 1, jnp.ones(3)),
    "strong by numpy": (lambda x: np.float32(3) * x, 1.0),
    "cond": (lambda p, x: jax.lax.cond(p, lambda x: x, lambda x: x * 2, x), True, 1.0),
    "sum of a split dim": (lambda x: sbp.split(x, 0, "x").sum(), ZEROS((0, 8))),
    "scan": (lambda x: jax.lax.scan(lambda c, _: (c * 2, c), x, None, length=3), 1.0),
    "while": (lambda x: jax.lax.while_loop(lambda c: c < 10, lambda c: c * 2, x), 1.0),
    "loop": (lambda x: jax.lax.fori_loop(0, 3, lambda i, c: c + i, x), 1),
    "filled": (lambda x: (jnp.full((4,), x), jnp.broadcast_to(x, (8,))), 1.0),
    "gradient": (jax.value_and_grad(lambda x: x * x), 3.0),
    "float0": (jax.grad(lambda x, y: x * y, argnums=(0, 1), allow_int=True), 3.0, 2),
    "weak array": (lambda x: x + 1, jnp.asarray(2)),
    "where": (lambda x: jnp.where(x > 0, 1.0, 0.0), 1),
    "complex": (lambda x: x * 1j, 1.0),
    "bool": (lambda x: (x, x & True, x + 1), True),
    "closed over": (lambda x: (BF16, x * BF16), 1.0),
    "no argument": (lambda: (jnp.arange(4), 1.0),),
    "no result": (lambda x: (None, (), {}), 1.0),
    "callback": (lambda x: (jax.debug.callback(lambda _: None, x), x * 2)[1], 1.0),
    "numpy": (lambda x, y: (x + 1, y, x * y), np.int8(3), np.ones(3)),
    "keys": (lambda k: (k, jax.random.split(k), jax.random.key_data(k)), jax.random.key(0)),
}
EMPTY = {
    "slice": (lambda x: x[:, :0], jnp.ones((8, 4))),
    "constant": (lambda x: ZEROS((8, 0)), 1.0),
    "product": (lambda x: x * 2, ZEROS((0, 8))),
    "contracted": (lambda x, y: x @ y, ZEROS((8, 0)), ZEROS((0, 8))),
    "rows": (lambda x, y: x @ y, ZEROS((0, 8)), ZEROS((8, 8))),
    "with another": (lambda x, y: (jnp.concatenate([x, y]), x), ZEROS((0, 4)), jnp.ones((8, 4))),
    "sums": (lambda x: (x.sum(), x.sum(0), x.sum(1), x.max(0, initial=1.0)), ZEROS((8, 0))),
    "sum of a split dim": (lambda x: sbp.split(x, 0, "x").sum(), ZEROS((0, 8))),
    "scan": (lambda x: jax.lax.scan(lambda c, y: (c + y.sum(), c * y), 0.0, x), ZEROS((0, 8))),
    "gather": (lambda x, i: x[i], jnp.ones((8, 4)), ZEROS((0,), int)),
    "reshape": (lambda x: (x.reshape(0, 4), jnp.sort(x), jnp.cumsum(x, 0)), ZEROS((8, 0))),
    "random": (lambda k: jax.random.normal(k, (8, 0)), jax.random.key(1)),
    "keys": (lambda k: (k, jax.random.key_data(k)), jax.random.split(jax.random.key(1), 8)[:0]),
    "lstsq rows": (jnp.linalg.lstsq, ZEROS((0, 3)), ZEROS((0, 2))),
    "lstsq columns": (jnp.linalg.lstsq, ZEROS((3, 0)), ZEROS((3, 2))),
    "det and inverse": (lambda x: (jnp.linalg.det(x), jnp.linalg.inv(x)), ZEROS((3, 0, 0))),
    "svd and qr": (lambda x: (jnp.linalg.svd(x, False), jnp.linalg.qr(x)), ZEROS((0, 3))),
    "donated": (lambda x: x + 1, ZEROS((0, 8))),
}
CASES = {
    f"{kind}: {name}": c
    for kind, cs in (("weak", WEAK), ("empty", EMPTY))
    for name, c in cs.items()
}


@pytest.fixture(scope="module", params=[(8,), (2, 4)], ids=str)
def mesh(request):
    return sbp.make_mesh(request.param, ("x", "y")[: len(request.param)])


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_results_are_those_of_jax(case, mesh):
    fn, *args = case
    assert_same_results(jax.jit(fn)(*args), sbp.jit(fn, mesh)(*args))


def test_a_weak_result_does_not_promote(mesh):
    assert (sbp.jit(lambda x: x * 2, mesh)(1.0) * BF16).dtype == jnp.bfloat16


def test_arrays_without_elements_are_held_whole():
    """JAX cannot read a split array that has no elements."""
    f = sbp.jit(
        lambda x: x * 2, sbp.make_mesh((8,), ("x",)), in_types=("x:S(0)",), out_types="x:S(0)"
    )
    with pytest.warns(sbp.SbpWarning, match="uneven-boundary: .* has no elements to split"):
        got = f(ZEROS((8, 0)))
    assert_same_results(ZEROS((8, 0)), got)


def test_donated_arguments_without_elements():
    f = sbp.jit(lambda x, y: (x + 1, y * 2), sbp.make_mesh((8,), ("x",)), donate_argnums=(0, 1))
    assert_same_results((ZEROS((0, 8)), 2 * jnp.ones(8)), f(ZEROS((0, 8)), jnp.ones(8)))


# ---- explicit axes -------------------------------------------------------------------------------

TOKENS = jnp.zeros((4, 2), jnp.int32)
TYPES = ("data:S(0) model:S(1)", "model:S(1)")
AMBIGUOUS = {
    "take": lambda e, w: e[TOKENS],
    "matmul": lambda e, w: e @ w.T,
}
OTHERS = {
    "reshape": lambda e, w: e.reshape(4, 4, 8),
    "concatenate": lambda e, w: jnp.concatenate([e, e]),
    "add": lambda e, w: e + jnp.ones_like(e),
}


def results(mesh):
    e, w = jnp.arange(128.0).reshape(16, 8), jnp.ones((8, 8))
    return (e, w), sbp.jit(lambda e, w: (e + 0, w + 0), mesh, TYPES, TYPES)(e, w)


@pytest.mark.parametrize("name", [*AMBIGUOUS, *OTHERS])
def test_plain_jax_takes_results_on_auto_axes(name):
    args, got = results(sbp.make_mesh((2, 4), ("data", "model")))
    after = {**AMBIGUOUS, **OTHERS}[name]
    np.testing.assert_allclose(after(*got), after(*args))


def test_jax_refuses_ambiguous_operations_on_explicit_axes():
    args, got = results(jax.make_mesh((2, 4), ("data", "model")))
    for after in OTHERS.values():
        np.testing.assert_allclose(after(*got), after(*args))
    for after in AMBIGUOUS.values():
        with pytest.raises(Exception, match="ambiguous"):
            after(*got)


# ---- left as it is -------------------------------------------------------------------------------

MESH = jax.sharding.AbstractMesh((2, 4), ("data", "model"))
SHAPES = [jax.ShapeDtypeStruct(s, "float32") for s in ((64, 256), (256, 1024), (1024, 256))]


def ffn(x, w_in, w_out):
    with jax.named_scope("block_7"):
        h = jax.nn.relu(x @ w_in)
        y = h @ w_out
    return y - jnp.mean(y)


def plan_of(rows="data:S(0)"):
    types = (rows, "model:S(1)", "model:S(0)")
    return sbp.jit(ffn, MESH, in_types=types, out_types=rows, boxing="reduce").plan(*SHAPES)


@pytest.fixture(scope="module")
def plan():
    return plan_of()


def test_a_plan_is_compared_with_its_file(plan, tmp_path, monkeypatch):
    file = tmp_path / "plan.txt"
    with pytest.raises(
        AssertionError, match=r"plan\.txt is missing: run the test once with SBP_UPD"
    ):
        sbp.assert_plan_unchanged(plan, file)
    monkeypatch.setenv("SBP_UPDATE_PLANS", "1")
    sbp.assert_plan_unchanged(plan, file)
    monkeypatch.delenv("SBP_UPDATE_PLANS")
    before = file.read_text()
    sbp.assert_plan_unchanged(plan, str(file))
    assert "forward `return y - jnp.mean(y)`: all_reduce on data, P(sum) -> B, 1 runs" in before
    assert "returned: all_reduce on model, P(sum) -> B" in before  # a sum passes what is linear
    with pytest.raises(AssertionError) as caught:
        sbp.assert_plan_unchanged(plan_of("B"), file)
    lines = str(caught.value).splitlines()
    assert "-input x: f32[64,256] data:S(0)" in lines and "+input x: f32[64,256] B" in lines
    assert file.read_text() == before


def test_lines_that_move_change_nothing(plan, tmp_path):
    file, source = tmp_path / "plan.txt", "def f(x):\n    y = x @ x\n    return y / y.sum()\n"
    for number, lead in enumerate(("", "\n# a comment\n\n")):
        script = tmp_path / f"moved{number}.py"
        script.write_text(lead + source)
        space: dict[str, object] = {}
        exec(compile(script.read_text(), str(script), "exec"), space)
        made = sbp.jit(space["f"], MESH, in_types=("data:S(1)",)).plan(  # pyright: ignore
            jax.ShapeDtypeStruct((64, 64), "float32")
        )
        sbp.assert_plan_unchanged(made, file, update=number == 0)


def test_files_that_are_none_are_refused(plan, tmp_path):
    (tmp_path / "other.txt").write_text("mine")
    with pytest.raises(sbp.SbpError, match="is not a file of assert_plan_unchanged"):
        sbp.assert_plan_unchanged(plan, tmp_path / "other.txt")
    with pytest.raises(sbp.SbpError, match="cannot read"):
        sbp.assert_plan_unchanged(plan, tmp_path)
    with pytest.raises(sbp.SbpError, match="cannot write"):
        sbp.assert_plan_unchanged(plan, tmp_path / "none" / "plan.txt", update=True)
    with pytest.raises(sbp.SbpError, match=r"plan"):
        sbp.assert_plan_unchanged(ffn, tmp_path / "plan.txt")  # pyright: ignore
    assert (tmp_path / "other.txt").read_text() == "mine"


def test_the_report_as_data_has_the_figures_of_the_plan(plan):
    data = json.loads(json.dumps(plan.report().to_json()))
    assert (data["format"], data["function"], data["ok"]) == ("sbp report 1", "ffn", True)
    found, cost = data["plan"], plan.program.cost
    assert found["bytes_sent_per_device"] == cost.bytes_per_device
    assert found["strategy"]["model"].startswith("tensor parallel")
    assert [t["type"] for t in found["inputs"]] == ["data:S(0)", "model:S(1)", "model:S(0)"]
    assert [t["on_one_device"] for t in found["inputs"]] == [
        "f32[32,256]",
        "f32[256,256]",
        "f32[256,256]",
    ]
    sent = sum(c["bytes_sent_per_device"] for c in found["collectives"])
    by_module = sum(
        c["bytes_sent_per_device"]
        for phases in found["modules"].values()
        for some in phases.values()
        for c in some
    )
    assert sent == pytest.approx(cost.bytes_per_device) == by_module
    assert set(found["modules"]) <= {"", "block_*"}


def test_a_refusal_as_data_has_its_findings():
    explicit = sbp.jit(
        lambda x, w: x @ w, MESH, in_types=("model:S(1)", "model:S(1)"), boxing="explicit"
    )
    data = explicit.check(SHAPES[0], jax.ShapeDtypeStruct((256, 64), "float32")).to_json()
    assert not data["ok"] and data["plan"] is None
    assert data["diagnostics"][0]["severity"] == "error"
