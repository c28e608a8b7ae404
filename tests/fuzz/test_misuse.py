"""Wrong uses of the public API are refused by an error of sbp that says what to change. They are
right uses of every public function with one change."""

import contextlib
import io
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import sbp
from sbp import _jax, cli, signatures
from sbp.errors import bytes_text
from tests.fuzz.misuse import Use, judge, misuses
from tests.slices import sliced

MESH = jax.sharding.AbstractMesh((2, 4), ("data", "model"))
X = jnp.ones((8, 4))
SHAPE = jax.ShapeDtypeStruct((8, 4), jnp.float32)
TYPE = sbp.NdSbp({"data": sbp.S(0), "model": sbp.B})
LAYOUT = sbp.Layout(batch="data", d_ff="model")


def users_body(x: Any) -> Any:
    """A program of the user's."""
    return jnp.tanh(x) * 2


def users_two(x: Any, n: Any) -> Any:
    return x * n


PLAIN = sbp.jit(users_body, MESH)
PLAN = PLAIN.plan(SHAPE)
REPORT = PLAN.report()
RUNS = sbp.jit(users_body, sbp.make_mesh((2,), ("data",)))
RUNNING = RUNS.plan(SHAPE)

FOLDER = Path(tempfile.mkdtemp())
SAVED, UNCHANGED = str(FOLDER / "plan.json"), str(FOLDER / "plan.txt")
PLAN.save(SAVED)
sbp.assert_plan_unchanged(PLAN, UNCHANGED, update=True)
(FOLDER / "users_program.py").write_text(
    "import jax.numpy as jnp\n\n\ndef ffn(x):\n    return jnp.tanh(x)\n"
)

HARDWARE: dict[str, Any] = {
    "name": "mine",
    "flops_per_second": 1e12,
    "hbm_bytes_per_second": 1e9,
    "hbm_bytes": 1e9,
    "link_bytes_per_second": 1e9,
    "f32_flops_per_second": 1e11,
    "highest_flops_per_second": 1e10,
    "vector_flops_per_second": 1e9,
    "product_rows": 64,
    "fast_memory_bytes": 2**20,
    "topology": "torus",
    "torus_dims": 2,
    "ring_chips": 1,
    "devices_per_chip": 1,
    "latency_seconds": 1e-6,
    "hop_seconds": 0.0,
    "joined_devices": 4,
    "beyond": None,
    "slow_axes": (),
    "whole_scatter_devices": 8,
    "overlaps": True,
    "platform": "tpu",
}

JIT_OPTIONS: tuple[dict[str, Any], ...] = (
    {"in_types": ("data:S(0)",)},
    {"in_types": (TYPE,), "out_types": TYPE},
    {"out_types": jax.P("data")},
    {"in_types": {"x*/": "data:S(0)"}},
    {"in_types": (lambda path, leaf: "data:S(0)",), "out_types": sbp.fully_sharded("data")},
    {"boxing": "reduce"},
    {"boxing": {"data": "reduce"}},
    {"memory_limit": 1e9},
    {"hardware": "tpu-v4"},
    {"budgets": [sbp.forbid("all_gather")]},
    {"reduce_dtype": jnp.float32},
)


_jitted = lambda *args, **options: sbp.jit(*args, **options).plan(SHAPE)


def _pinned(function: Any) -> Any:
    """A call of an annotation inside of `sbp.jit`."""

    return lambda *args, **kwargs: sbp.jit(lambda x: function(x, *args, **kwargs), MESH).plan(SHAPE)


def _policy(*args: Any, **kwargs: Any) -> None:
    with sbp.policy(*args, **kwargs):
        pass


OWN = _jax.Primitive("misused")
OWN.def_impl(lambda x: x)
OWN.def_abstract_eval(lambda x: x)
_jax.mlir.register_lowering(OWN, lambda ctx, x: [x])


def users_own(x: Any) -> Any:
    """A call of a primitive of the user's."""
    return OWN.bind(x)


def _register(primitive: Any = None, *args: Any, **kwargs: Any) -> None:
    own = OWN
    signatures.register(own if primitive is None else primitive, *args, **kwargs)
    try:
        sbp.jit(lambda x: own.bind(x), MESH).plan(SHAPE)
    finally:
        signatures.unregister(own if primitive is None else primitive)


def _unregister(*args: Any, **kwargs: Any) -> None:
    with signatures.registered(OWN):
        signatures.unregister(*args, **kwargs)
        signatures.register(OWN)


def _registered(*args: Any, **kwargs: Any) -> None:
    with signatures.registered(OWN, *args, **kwargs):
        pass


def _main(*args: Any, **kwargs: Any) -> None:
    quiet = io.StringIO()
    with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
        cli.main(*args, **kwargs)


CHECKED = jax.sharding.AbstractMesh(
    (2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2
)


def users_sharded(x: Any) -> Any:
    """A program of the user's with a `shard_map`."""
    whole, split = jax.P(), jax.P("data")
    return jax.shard_map(
        lambda x: jax.lax.psum(x, "data"), mesh=CHECKED, in_specs=split, out_specs=whole
    )(x)


def _manual_inside(*args: Any, **kwargs: Any) -> Any:
    return sbp.jit(lambda x: sbp.manual(*args, **kwargs)(x), MESH).plan(SHAPE)


def _partial(*args: Any, **kwargs: Any) -> Any:
    made = sbp.Partial(*args, **kwargs)
    return made.reduce(), made.monoid, repr(made)


def _padded(*args: Any, **kwargs: Any) -> Any:
    rows = sbp.padded(*args, **kwargs)
    return sbp.jit(users_body, MESH, in_types=rows, out_types=rows).plan(SHAPE)


def _jax_static(*args: Any, **options: Any) -> Any:
    """A call that may take its arguments by donation."""
    own = (jnp.copy(x) if isinstance(x, jax.Array) else x for x in args)
    return jax.jit(users_two, **options)(*own)


_sbp_static = lambda *args, **options: sbp.jit(users_two, MESH, **options).plan(*args)


_body = lambda x: x


def uses() -> tuple[Use, ...]:
    """All of them."""
    own = sbp.Hardware(**HARDWARE)
    rates = {"bytes_per_second": 1e9, "latency_seconds": 1e-6}
    numbered = {"static_argnums": 1, "donate_argnums": 0}
    names = {"static_argnames": ("n",), "donate_argnames": ("x",)}
    return (
        # annotations
        Use("annotate(type)", sbp.annotate, (X, "data:S(0)")),
        Use("annotate(spec)", sbp.annotate, (X, jax.P("data"))),
        Use("annotate(atoms)", sbp.annotate, (X,), {"data": sbp.S(0), "model": sbp.B}),
        Use(
            "annotate(options)",
            sbp.annotate,
            (X, "B"),
            {"cotangent": "data:S(0)", "reduce_dtype": jnp.float32},
        ),
        Use("split", sbp.split, (X, 0, "data", "model")),
        Use("replicate", sbp.replicate, (X, "data")),
        Use("partial", sbp.partial, (X, "model"), {"op": "max"}),
        Use("shard", sbp.shard, (X, [[0], [1]])),
        Use("annotate in jit", _pinned(sbp.annotate), ("data:S(0)",)),
        Use("annotate atoms in jit", _pinned(sbp.annotate), (), {"data": sbp.S(0)}),
        Use("split in jit", _pinned(sbp.split), (0, "data", "model")),
        Use("replicate in jit", _pinned(sbp.replicate), ("data",)),
        Use("partial in jit", _pinned(sbp.partial), ("model",), {"op": "max"}),
        Use("shard in jit", _pinned(sbp.shard), ([[0], [1], [2], [3], [4], [5], [6], [7]],)),
        Use("policy", _policy, ("explicit", "data")),
        Use("policy in jit", _pinned(lambda x, *a, **k: _policy(*a, **k)), ("explicit", "data")),
        Use("forbid", sbp.forbid, ("all_gather",), {"axis": "data", "above": 4, "where": "loop"}),
        Use("Budget", sbp.Budget, (), {"collective": "permute", "axis": "data", "above": 4.0}),
        # types
        Use("S", sbp.S, (0,)),
        Use("P", sbp.P, ("max",)),
        Use("NdSbp", sbp.NdSbp, ({"data": sbp.S(0)},), {"free": ("model",)}),
        Use("NdSbp.get", TYPE.get, ("data",)),
        Use("NdSbp.over", TYPE.over, (("data", "model"),)),
        Use("parse", sbp.parse, ("data:S(0)",), {"mesh_axes": ("data", "model")}),
        Use("Layout", sbp.Layout, ({"batch": ("data", "model")},)),
        Use("Layout(names)", sbp.Layout, (), {"batch": "data", "d_ff": ("model",)}),
        Use("fully_sharded", sbp.fully_sharded, ("data", "model")),
        Use("Layout call", LAYOUT, (X, "batch", "d_ff")),
        Use("Layout call in jit", _pinned(LAYOUT), ("batch", "d_ff")),
        Use("Layout.type", LAYOUT.type, ("batch", None), {"free": ["pod"]}),
        Use("Layout.types", LAYOUT.types, ({"w": ("batch", "d_ff")},), {"free": ["pod"]}),
        Use("Padded", sbp.Padded, (jnp.ones((8, 3)), (7, 3), "data:S(0)", MESH)),
        Use("Padded.of", sbp.Padded.of, (X, "data:S(0)", RUNS.mesh), {"shape": (8, 4)}),
        Use("padded", sbp.padded, ("data:S(0)",)),
        Use("padded in jit", _padded, ("data:S(0)",)),
        Use("Partial", _partial, (jnp.ones((2, 3)), sbp.NdSbp({"data": sbp.P}))),
        # machines
        Use("Hardware", sbp.Hardware, (), HARDWARE),
        Use("Hardware.with_axis", own.with_axis, ("data",), rates),
        Use("Hardware.product", own.product_flops_per_second, (4, "highest")),
        Use("make_mesh", sbp.make_mesh, ((2, 4), ("data", "model")), peer=jax.make_mesh),
        # extensions
        Use(
            "register",
            _register,
            (None, ["S(0) -> S(0)", "P(sum) -> P(sum)"]),
            {
                "local": lambda ctx, x: x,
                "samples": [(users_own, (SHAPE,))],
                "even": False,
                "replace": True,
            },
        ),
        Use("registered", _registered, (["S(0) -> S(0)"],), {"even": True}),
        Use("unregister", _unregister, (OWN,)),
        Use(
            "manual",
            lambda *args, **kwargs: sbp.manual(*args, **kwargs)(X),
            (_body, "data:S(0)", "data:S(0)"),
            {"padded": True},
        ),
        Use("manual in jit", _manual_inside, (_body, ("data:S(0)",), TYPE), {"padded": False}),
        Use("manual call", sbp.manual(_body, "data:S(0)", "data:S(0)"), (X,)),
        Use("check_shard_map", sbp.check_shard_map, (users_sharded, X), {"mesh": CHECKED}),
        Use("command line", _main, (["explain", "no-signature"],)),
        Use("command line signatures", _main, (["signatures", "add"],)),
        # programs
        Use("jit", _jitted, (users_body, MESH)),
        *(
            Use(f"jit({k}: {', '.join(o)})", _jitted, (users_body, MESH), o)
            for k, o in enumerate(JIT_OPTIONS)
        ),
        Use("jit(argnums)", _sbp_static, (X, 2), numbered, peer=_jax_static),
        Use("jit(argnames)", _sbp_static, (X, 2), names, peer=_jax_static),
        Use("plan of a call", PLAIN.plan, (X,), peer=jax.jit(users_body)),
        Use(
            "plan of a typed call",
            sbp.jit(users_body, MESH, in_types=("data:S(0)",), out_types="data:S(0)").plan,
            ({"a": [X]}["a"][0],),
        ),
        Use("check of a call", PLAIN.check, (X,)),
        Use("trace of a call", PLAIN.trace, (X,)),
        Use(
            "plan with a static",
            sbp.jit(users_two, MESH, static_argnums=1).plan,
            (X, 3),
            peer=jax.jit(users_two, static_argnums=1),
        ),
        Use("Plan call", RUNNING, (X,)),
        Use("Jitted call", RUNS, (X,), peer=jax.jit(users_body)),
        Use("Plan.why", PLAN.why, ("x",)),
        Use("Plan.diff", PLAN.diff, (PLAN,)),
        Use("Plan.place", RUNNING.place, (X,)),
        Use("Plan.report", PLAN.report, (), {"refine": True}),
        Use("Plan.save", PLAN.save, (SAVED,)),
        Use("jit(plan)", _jitted, (users_body, MESH), {"plan": [SAVED, FOLDER]}),
        Use(
            "jit(shardings)",
            _jitted,
            (users_body, MESH),
            {
                "in_shardings": (jax.NamedSharding(MESH, jax.P("data")),),
                "out_shardings": jax.P("data"),
            },
        ),
        Use(
            "jit(compiler)",
            _jitted,
            (users_body, MESH),
            {"compiler_options": {"xla_embed_ir_in_executable": True}, "keep_unused": True},
        ),
        Use("eval_shape", PLAIN.eval_shape, (X,), peer=jax.jit(users_body).eval_shape),
        Use("lower", PLAIN.lower, (X,), peer=jax.jit(users_body).lower),
        Use(
            "assert_plan_unchanged", sbp.assert_plan_unchanged, (PLAN, UNCHANGED), {"update": True}
        ),
        Use("Report.text", REPORT.text, (100,)),
        Use("Report.html", REPORT.html, (), {"standalone": True}),
        Use("Report.picture", REPORT.picture, ("data",), {"by": "function"}),
        Use("Report.where", REPORT.where, ("x",)),
        Use("Report.bytes", REPORT.bytes, (REPORT,)),
        Use("Report.source", REPORT.source),
        Use("Report.roofline", REPORT.roofline),
        Use("Report.timeline", REPORT.timeline),
        Use("Report.memory", REPORT.memory),
        Use("Report.to_json", REPORT.to_json),
        Use("page.lines", REPORT.memory().lines, (80,)),
        Use("page.png", REPORT.memory().png, (1.5,)),
        Use(
            "Padded.full",
            lambda *args, **kwargs: sbp.Padded.of(X, *args, **kwargs).full(),
            ("data:S(0)", RUNS.mesh),
        ),
        Use(
            "command line check",
            _main,
            (
                [
                    "check",
                    f"{FOLDER}/users_program.py:ffn",
                    "--args",
                    "f32[8,4]",
                    "--mesh",
                    "data=2,model=4",
                    "--json",
                ],
            ),
        ),
        Use("command line hardware", _main, (["hardware"],)),
    )


# ---- wrong uses ---------------------------------------------------------------------------------

pytestmark = pytest.mark.laws

EVERY = [m for use in uses() for m in misuses(use)]


@pytest.fixture(autouse=True)
def _own_folder_and_whole_tracebacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Files with wrong names are not left in the checkout. JAX leaves its own frames out of
    tracebacks, and the frames show who raised."""
    monkeypatch.chdir(tmp_path)
    before = jax.config.jax_traceback_filtering  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_traceback_filtering", "off")
    yield
    jax.config.update("jax_traceback_filtering", before)


@pytest.mark.parametrize("use", uses(), ids=lambda use: use.name)
def test_wrong_uses_are_refused(use: Use):
    judged = [(misuse, judge(misuse)) for misuse in sliced(misuses(use), 1 / 6)]
    wrong = [f"{m}: {found.verdict}\n{found.detail}" for m, found in judged if found.failed]
    assert not wrong, f"{len(wrong)} of {use.name}\n" + "\n".join(wrong[:3])


@pytest.mark.parametrize("use", uses(), ids=lambda use: use.name)
def test_the_right_use_is_right(use: Use):
    use.call(*use.args, **use.kwargs)


def test_there_are_thousands():
    assert len(EVERY) > 10_000 and len({str(m) for m in EVERY}) == len(EVERY)


def users_function(x: int) -> int:
    return x + 1


def test_who_raises_is_read_from_the_traceback():
    theirs = Counter(judge(m).verdict for m in misuses(Use("theirs", users_function, (1,))))
    assert theirs["user"] and theirs["raw"] == 7  # a wrong number of arguments is not the body's
    ours = Counter(judge(m).verdict for m in misuses(Use("unchecked", bytes_text, (1,))))
    assert ours["raw"] > 20
