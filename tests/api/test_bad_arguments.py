"""Wrong uses of the public API are refused by an error of sbp that says what to change.

A wrong use is a right use of a public name with one change: an argument, or a part of one, is
another value, or is missing, added or misspelt. A wrong use may be accepted if the value happens to
fit. Else it raises an `SbpError` with a code and a short message, or the error that the user's own
code raised. If JAX raises a `TypeError` or a `ValueError` for the same call, the `SbpError` is one,
too.
"""

import contextlib
import functools
import inspect
import io
import itertools
import json
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from sbp import _jax, cli, signatures
from sbp.api.tracing import traced_call
from sbp.commands import calibrate
from sbp.errors import CODES, bytes_text
from sbp.machine.calibration import KINDS, RATES
from sbp.plan.saved import SavedPlan
from tests.slices import sliced

SG: Any = signatures
AXES = ("data", "model")
MESH = jax.sharding.AbstractMesh((2, 4), AXES)
AUTO = jax.sharding.AbstractMesh((2, 4), AXES, axis_types=(jax.sharding.AxisType.Auto,) * 2)
TWO = sbp.make_mesh((2,), ("data",))
X = jnp.ones((8, 4))
SHAPE = jax.ShapeDtypeStruct((8, 4), jnp.float32)
TYPE = sbp.NdSbp({"data": sbp.S(0), "model": sbp.B})
LAYOUT = sbp.Layout(batch="data", d_ff="model")


# ---- programs of the user -----------------------------------------------------------------------


class UsersError(Exception):
    """What the user's own code raises; sbp lets it pass."""


class Words(str):
    """A string of a class of the user's."""


def users_raising(*args: Any, **kwargs: Any) -> Any:
    raise UsersError("raised by the user's function")


def users_body(x: Any) -> Any:
    return jnp.tanh(x) * 2


def users_two(x: Any, n: Any) -> Any:
    return x * n


def users_sharded(x: Any) -> Any:
    body = lambda x: jax.lax.psum(x, "data")
    return jax.shard_map(body, mesh=AUTO, in_specs=jax.P("data"), out_specs=jax.P())(x)


OWN = _jax.Primitive("misused")
OWN.def_impl(lambda x: x)
OWN.def_abstract_eval(lambda x: x)
_jax.mlir.register_lowering(OWN, lambda ctx, x: [x])


def users_own(x: Any) -> Any:
    """A call of a primitive of the user's."""
    return OWN.bind(x)


PLAIN = sbp.jit(users_body, MESH)
PLAN = PLAIN.plan(SHAPE)
REPORT = PLAN.report()
RUNS = sbp.jit(users_body, TWO)
RUNNING = RUNS.plan(SHAPE)
DIAGNOSTIC = sbp.Diagnostic(code="no-typing", severity="error", title="a program")
PARTIAL = sbp.Partial(jnp.ones((2, 3)), sbp.NdSbp({"data": sbp.P}))


# ---- right uses ---------------------------------------------------------------------------------


plainly = lambda function, args, kwargs: function(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class Use:
    """A right use of a public function.

    Arguments:
      name: the public name, and behind a blank what tells this use from others of it.
      function: the function.
      args, kwargs: its arguments. A wrong use also gives each other optional argument.
      run: calls the function, and uses the result.
      peer: the function of JAX that takes the same arguments; None for none.
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    run: Callable[..., Any] = plainly
    peer: Callable[..., Any] | None = None


def inside(function: Any, args: Any, kwargs: Any) -> Any:
    """Calls a function of one array, the first argument, inside of `sbp.jit`."""
    body = lambda x: function(*(x if a is X else a for a in args), **kwargs)
    return sbp.jit(body, MESH).plan(SHAPE)


def entered(function: Any, args: Any, kwargs: Any) -> None:
    context = function(*args, **kwargs)
    for _ in range(2):
        with context:
            pass


def refusing(function: Any, args: Any, kwargs: Any) -> None:
    """Calls what raises an error of sbp for all arguments."""
    with contextlib.suppress(sbp.SbpError):
        function(*args, **kwargs)


def registering(function: Any, args: Any, kwargs: Any) -> None:
    """Registers or removes the signature of the user's primitive, and plans with it."""
    with contextlib.suppress(sbp.SbpError):
        signatures.register(OWN) if function is signatures.unregister else None
    try:
        function(*args, **kwargs)
        sbp.jit(users_own, MESH).plan(SHAPE)
    finally:
        with contextlib.suppress(sbp.SbpError):
            signatures.unregister(OWN)


def on_command_line(function: Any, args: Any, kwargs: Any) -> None:
    """Runs the command line, which says nothing long of an error and does not show sbp's lines."""
    printed, said = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(said):
        status = function(*args, **kwargs)
    text = said.getvalue()
    assert status == 0 or printed.getvalue() or text
    assert len(text) < LONGEST and "Traceback" not in text and "sbp/" not in text, text[:LONGEST]
    assert "its code raised" not in text or "users_" in text, text


def toml(value: Any) -> str:
    text = json.dumps(value, default=str, separators=(",", "="))
    return text.replace("NaN", "nan").replace("Infinity", "inf")


NUMBERS = itertools.count()


def calibrated(**tables: Any) -> Any:
    """A plan with the prices of a calibration."""
    file = Path(f"{next(NUMBERS)}.toml")
    file.write_text("".join(f"{k} = {toml(v)}\n" for k, v in tables.items()))
    f = sbp.jit(lambda x: x.sum(0), MESH, "data:S(0)", "B", hardware=str(file))
    return f.plan(SHAPE).report().text()


def restored(saved: Any) -> Any:
    """The plan of a file."""
    Path("changed.json").write_text(json.dumps(saved, default=str))
    return sbp.jit(users_body, MESH, plan="changed.json").plan(SHAPE)


HARDWARE: dict[str, Any] = {
    "name": "mine",
    "flops_per_second": 1e12,
    "hbm_bytes_per_second": 1e9,
    "hbm_bytes": 1e9,
    "link_bytes_per_second": 1e9,
    "torus_dims": 2,
    "topology": "torus",
}
MINE = sbp.Hardware(**HARDWARE)
CALIBRATION: dict[str, Any] = {
    "made": {"date": "2026", "jax": jax.__version__, "hardware": "cpu", "device_kind": "cpu"},
    "rates": dict.fromkeys(RATES, 1e9),
    "mesh": {"data": 2, "model": 4},
    "collective": [
        {"kind": kind, "mesh_axes": [axis], "seconds": 1e-6, "bytes_per_second": 1e9}
        for kind in KINDS
        for axis in AXES
    ],
}

after = SimpleNamespace(
    planned=lambda function, args, kwargs: function(*args, **kwargs).plan(SHAPE),
    lowered=lambda function, args, kwargs: sbp.jit(function(*args, **kwargs), MESH).plan(SHAPE),
    called=lambda function, args, kwargs: function(*args, **kwargs)(X),
    static=lambda function, args, kwargs: function(users_two, MESH, **kwargs).plan(*args),
    reduced=lambda function, args, kwargs: repr(function(*args, **kwargs).reduce()),
    typed=lambda function, args, kwargs: sbp.jit(
        users_body, MESH, in_types=(t := function(*args, **kwargs)), out_types=t
    ).plan(SHAPE),
    budgeted=lambda function, args, kwargs: sbp.jit(
        users_body, MESH, budgets=[function(*args, **kwargs)]
    ).plan(SHAPE),
    priced=lambda function, args, kwargs: sbp.jit(
        users_body, MESH, hardware=function(*args, **kwargs)
    ).plan(SHAPE),
)
"""Calls, with a use of what they return."""


def jax_static(*args: Any, **options: Any) -> Any:
    """A call that may take its arguments by donation."""
    own = (jnp.copy(x) if isinstance(x, jax.Array) else x for x in args)
    return jax.jit(users_two, **options)(*own)


FILES: dict[str, bytes] = {
    "program.py": b"""
import jax, jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec as Spec
mesh = jax.sharding.AbstractMesh((2,), ("data",), axis_types=(AxisType.Auto,))

def ffn(x):
    return jnp.tanh(x)

def mapped(x):
    return jax.shard_map(jnp.tanh, mesh=mesh, in_specs=Spec("data"), out_specs=Spec("data"))(x)

def users_crash(x):
    return undefined_name
""",
    "other.py": b"ffn = abs",
    "binary": bytes(range(256)),
    "deep.toml": b"a = " + b"[" * 5000,
    "deep.json": b"[" * 100_000,
    "cal.toml": b"".join(f"{k} = {toml(v)}\n".encode() for k, v in CALIBRATION.items()),
}
COMMANDS = """
check program.py:ffn --args f32[8,4] --mesh data=2,model=4 --json
check program.py:ffn --args f32[8,4] --mesh data=2,model=4 --hardware cal.toml --devices 8
check program.py:mapped --args f32[8] --mesh data=2 --shard-map
report program.py:ffn --args f32[8,4] --mesh data=2 --html out.html
report program.py:ffn --args f32[8,4] --mesh data=2 --source
emit program.py:ffn --args f32[8,4] --mesh data=2 -o out.py --force
signatures softmax --args f32[8,4]
explain no-signature
completion bash
calibrate --mesh data=2 -o out.toml
hardware
"""
SHARDINGS = {
    "in_shardings": (jax.NamedSharding(MESH, jax.P("data")),),
    "out_shardings": jax.P("data"),
}
MAPPINGS: dict[str, Any] = {
    "boxing": {"data": "reduce"},
    "compiler_options": {"xla_embed_ir_in_executable": True},
    "budgets": [sbp.forbid("all_gather")],
    "reduce_dtype": jnp.float32,
}
OPTIONS = {"local": lambda ctx, x: x, "samples": [(users_own, (SHAPE,))], "replace": True}


def every_use() -> Iterator[tuple[Any, ...]]:
    """The arguments of each `Use`."""
    for name, function, args, kwargs in (
        ("annotate", sbp.annotate, (X, "data:S(0)"), {}),
        ("annotate spec", sbp.annotate, (X, jax.P("data")), {}),
        ("annotate atoms", sbp.annotate, (X,), {"data": sbp.S(0), "model": sbp.B}),
        ("split", sbp.split, (X, 0, "data", "model"), {}),
        ("replicate", sbp.replicate, (X, "data"), {}),
        ("partial", sbp.partial, (X, "model"), {"op": "max"}),
        ("shard", sbp.shard, (X, [[0], [1], [2], [3], [4], [5], [6], [7]]), {}),
        ("Layout.__call__", LAYOUT, (X, "batch", "d_ff"), {}),
    ):
        yield name, function, args, kwargs
        yield f"{name} in jit", function, args, kwargs, inside
    yield from (
        (f"Report.{name}", getattr(REPORT, name))
        for name in ("full", "short", "source", "roofline", "timeline", "memory", "to_json")
    )
    yield from (
        # annotations, types and layouts
        ("policy", sbp.policy, ("explicit", "data"), {}, entered),
        ("forbid", sbp.forbid, ("all_gather",), {}, after.budgeted),
        ("Budget", sbp.Budget, (), {"collective": "permute"}, after.budgeted),
        ("S", sbp.S, (0,)),
        ("P", sbp.P, ("max",)),
        ("NdSbp", sbp.NdSbp, ({"data": sbp.S(0)},), {"free": ("model",)}, after.typed),
        ("NdSbp.__getitem__", TYPE.__getitem__, ("data",)),
        ("NdSbp.get", TYPE.get, ("data",)),
        ("NdSbp.over", TYPE.over, (AXES,)),
        ("parse", sbp.parse, ("data:S(0)",), {}, after.typed),
        ("Layout", sbp.Layout, ({"batch": AXES},)),
        ("Layout names", sbp.Layout, (), {"batch": "data", "d_ff": ("model",)}),
        ("Layout.__getitem__", LAYOUT.__getitem__, ("batch",)),
        ("Layout.type", LAYOUT.type, ("batch", None), {}, after.typed),
        ("Layout.types", LAYOUT.types, ({"w": ("batch", "d_ff")},)),
        ("fully_sharded", sbp.fully_sharded, AXES, {}, after.typed),
        ("padded", sbp.padded, ("data:S(0)",), {}, after.typed),
        ("Padded", sbp.Padded, (jnp.ones((8, 3)), (7, 3), "data:S(0)", MESH)),
        ("Padded.of", sbp.Padded.of, (X, "data:S(0)", TWO), {"shape": (8, 4)}),
        ("Padded.full", sbp.Padded.of(X, "data:S(0)", TWO).full),
        ("Padded.__getitem__", sbp.Padded.of(X, "data:S(0)", TWO).__getitem__, (0,), {}, refusing),
        ("Partial", sbp.Partial, (jnp.ones((2, 3)), PARTIAL.type), {}, after.reduced),
        ("Partial.reduce", PARTIAL.reduce),
        ("Partial.__getitem__", PARTIAL.__getitem__, (0,), {}, refusing),
        # machines
        ("make_mesh", sbp.make_mesh, ((2, 4), AXES), {}, plainly, jax.make_mesh),
        ("Hardware", sbp.Hardware, (), HARDWARE, after.priced),
        ("Hardware.with_axis", MINE.with_axis, ("data",), {"bytes_per_second": 1e9}, after.priced),
        ("Hardware.product_flops_per_second", MINE.product_flops_per_second, (4, "highest")),
        ("jit calibration", calibrated, (), CALIBRATION),
        # regions
        ("manual", sbp.manual, (users_body, "data:S(0)", "data:S(0)"), {}, after.called),
        ("manual in jit", sbp.manual, (users_body, ("data:S(0)",), TYPE), {}, after.lowered),
        ("manual call", sbp.manual(users_body, "data:S(0)", "data:S(0)"), (X,)),
        ("check_shard_map", sbp.check_shard_map, (users_sharded, X), {"mesh": AUTO}),
        # programs
        ("jit", sbp.jit, (users_body, MESH), {}, after.planned),
        ("jit types", sbp.jit, (users_body, MESH, (TYPE,), "data:S(0)"), {}, after.planned),
        ("jit patterns", sbp.jit, (users_body, MESH, {"x*/": "data:S(0)"}), {}, after.planned),
        ("jit shardings", sbp.jit, (users_body, MESH), SHARDINGS, after.planned),
        ("jit mappings", sbp.jit, (users_body, MESH), MAPPINGS, after.planned),
        (
            "jit argnums",
            sbp.jit,
            (X, 2),
            {"static_argnums": 1, "donate_argnums": 0},
            after.static,
            jax_static,
        ),
        (
            "jit argnames",
            sbp.jit,
            (X, 2),
            {"static_argnames": ("n",), "donate_argnames": ("x",)},
            after.static,
            jax_static,
        ),
        ("jit saved", restored, (json.loads(SavedPlan.of(PLAN.program).dumps()),)),
        ("Jitted.__call__", RUNS, (X,), {}, plainly, jax.jit(users_body)),
        ("Jitted.plan", PLAIN.plan, (X,), {}, plainly, jax.jit(users_body)),
        (
            "Jitted.plan static",
            sbp.jit(users_two, MESH, static_argnums=1).plan,
            (X, 3),
            {},
            plainly,
            jax.jit(users_two, static_argnums=1),
        ),
        ("Jitted.check", PLAIN.check, (X,)),
        ("Jitted.trace", PLAIN.trace, (X,)),
        ("Jitted.eval_shape", PLAIN.eval_shape, (X,), {}, plainly, jax.jit(users_body).eval_shape),
        ("Jitted.lower", PLAIN.lower, (X,), {}, plainly, jax.jit(users_body).lower),
        ("Jitted.clear_cache", sbp.jit(users_body, MESH).clear_cache),
        # plans and reports
        ("Plan.__call__", RUNNING, (X,)),
        ("Plan.why", PLAN.why, ("x",)),
        ("Plan.diff", PLAN.diff, (PLAN,)),
        ("Plan.place", RUNNING.place, (X,)),
        ("Plan.report", PLAN.report),
        ("Plan.save", PLAN.save, ("saved.json",)),
        ("Plan.source", RUNNING.source, ("source.py",)),
        ("Plan.certificate", PLAN.certificate, ("claims.json",)),
        ("Plan.export", RUNNING.export, ("exported",)),
        ("Plan.lower", PLAN.lower),
        ("assert_plan_unchanged", sbp.assert_plan_unchanged, (PLAN, "plan.txt"), {"update": True}),
        (
            "Plan",
            sbp.Plan,
            (
                PLAN._reader,
                PLAN._signature,
                PLAN.program,
                traced_call(PLAN._reader, PLAN._signature),
            ),
        ),
        ("Jitted", sbp.Jitted, (users_body, MESH, PLAIN.options), {}, after.planned),
        ("Report", sbp.Report, (), {"program": PLAN.program}),
        ("Report.text", REPORT.text, (100,)),
        ("Report.html", REPORT.html),
        ("Report.picture", REPORT.picture, ("data", "function")),
        ("Report.where", REPORT.where, ("x",)),
        ("Report.bytes", REPORT.bytes, (REPORT,)),
        ("Report.trace", REPORT.trace, ("trace.json",)),
        ("Report.memory lines", REPORT.memory().lines, (80,)),
        ("Report.memory png", REPORT.memory().png, (1.5,)),
        (
            "Diagnostic",
            sbp.Diagnostic,
            (),
            {"code": "no-typing", "severity": "error", "title": "t"},
        ),
        ("Diagnostic.text", DIAGNOSTIC.text),
        ("SbpTypeError", sbp.SbpTypeError, ([DIAGNOSTIC],)),
        ("SbpTypeError.smt2", sbp.SbpTypeError([DIAGNOSTIC]).smt2, (), {}, refusing),
        # signatures
        ("signatures.register", SG.register, (OWN, ["S(0) -> S(0)"]), OPTIONS, registering),
        ("signatures.unregister", SG.unregister, (OWN,), {}, registering),
        ("signatures.Op", SG.Op, ("add", {}, (SHAPE, SHAPE), (SHAPE,), 2)),
        ("signatures.Row", SG.Row, ((sbp.S(0), sbp.S(0)), (sbp.S(0),))),
        ("signatures.Kernel", SG.Kernel, (), {"name": "own", "summary": "a kernel"}),
        ("signatures.all_b", SG.all_b, (SG.Op("add", {}, (SHAPE, SHAPE), (SHAPE,), 2),)),
        ("signatures.kernel_named", SG.kernel_named, ("halo",)),
        ("signatures.known_kernels", SG.known_kernels),
        ("signatures.known_primitives", SG.known_primitives),
        ("signatures.rule_for", SG.rule_for, ("add",)),
        ("signatures.traits_of", SG.traits_of, ("add",)),
    )
    for words in map(str.split, COMMANDS.strip().splitlines()):
        yield f"cli {' '.join(words)}", cli.main, (words,), {}, on_command_line


USES = [Use(*row) for row in every_use()]


# ---- wrong uses ---------------------------------------------------------------------------------

VALUES: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "True": lambda: True,
    "0": lambda: 0,
    "1": lambda: 1,
    "-1": lambda: -1,
    "huge int": lambda: 10**40,
    "1.5": lambda: 1.5,
    "nan": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "1j": lambda: 1j,
    "empty text": lambda: "",
    "blank": lambda: "  ",
    "data": lambda: "data",
    "misspelt": lambda: "dta",
    "unicode": lambda: "données ☃",
    "NUL": lambda: "\0",
    "surrogate": lambda: "\ud800",
    "long text": lambda: "x" * 100_000,
    "bytes": lambda: b"data",
    "own string": lambda: Words("model"),
    "[]": list,
    "()": tuple,
    "{}": dict,
    "set": lambda: {"data"},
    "[1]": lambda: [1],
    "[None]": lambda: [None],
    "['data']": lambda: ["data"],
    "twice": lambda: ("data", "data"),
    "against the mesh": lambda: ("model", "data"),
    "{'data': 1}": lambda: {"data": 1},
    "{1: 2}": lambda: {1: 2},
    "{'a': [..]}": lambda: {"a": [{"b": ("data", None)}]},
    "mixed keys": lambda: {1: "data", "b": "data"},
    "deep": lambda: [[[[[[[["data"]]]]]]]],
    "object": object,
    "class": lambda: UsersError,
    "function": lambda: lambda *a, **k: None,
    "raising": lambda: users_raising,
    "iterator": lambda: iter(["data"]),
    "unhashable": type("Unhashable", (), {"__hash__": None}),
    "unprintable": type("Unprintable", (), {"__repr__": users_raising}),
    "np.int64": lambda: np.int64(1),
    "np.float32": lambda: np.float32(1.5),
    "np.array": lambda: np.arange(3),
    "np.array of text": lambda: np.array(["data", "model"]),
    "np.array of objects": lambda: np.array([None, "data"], dtype=object),
    "np.empty": lambda: np.zeros((0, 4)),
    "jnp.array": lambda: jnp.ones((8, 4)),
    "key": lambda: jax.random.key(0),
    "shape": lambda: jax.ShapeDtypeStruct((8, 4), jnp.float32),
    "dtype": lambda: np.dtype("float32"),
    "spec": lambda: jax.sharding.PartitionSpec("data"),
    "spec of an unknown axis": lambda: jax.sharding.PartitionSpec("nope"),
    "spec twice": lambda: jax.sharding.PartitionSpec("data", ("model", "data")),
    "S(7)": lambda: sbp.S(7),
    "P": lambda: sbp.P,
    "B": lambda: sbp.B,
    "NdSbp": lambda: sbp.NdSbp({"nope": sbp.S(0)}),
    "mesh": lambda: jax.sharding.AbstractMesh((2, 4), ("data", "model")),
    "exception": lambda: UsersError("x"),
    "module": lambda: np,
    "Ellipsis": lambda: ...,
    "slice": lambda: slice(1),
    "file": lambda: "other.py",
    "long file": lambda: f"{'x' * 100_000}.py:f",
    "long calibration": lambda: f"{'x' * 100_000}.toml",
    "deep calibration": lambda: "deep.toml",
    "deep plan": lambda: "deep.json",
    "folder": lambda: "folder",
    "binary": lambda: "binary",
    "path": lambda: Path("folder"),
    "missing": lambda: Path("no/such.py"),
    "program": lambda: "program.py:nope",
    "crash": lambda: "program.py:users_crash",
    "binary program": lambda: "binary:ffn",
    "folder program": lambda: "folder:ffn",
    "mesh text": lambda: "data=0,model=x",
    "long mesh text": lambda: f"{'d' * 100_000}=2",
    "huge mesh text": lambda: f"data={10**30}",
    "shapes": lambda: "f32[2,-1], {'a': q8[]}",
    "huge float": lambda: 1e300,
    "tiny float": lambda: 1e-300,
    "complex array": lambda: np.ones((3, 5), "complex64"),
    "huge mesh": lambda: jax.sharding.AbstractMesh((10**30,), ("data",)),
    "other mesh": lambda: jax.sharding.AbstractMesh((3,), ("x",)),
    "very deep": lambda: functools.reduce(lambda tree, _: [tree], range(600), 1.0),
}
"""Values that do not belong where they are put, each made anew for each use."""

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def misuses(use: Use) -> Iterator[tuple[str, Callable[[], Arguments]]]:
    """All wrong uses that differ from a right one in one place: the change, and what makes the
    arguments."""
    args, kwargs = use.args, use.kwargs
    for place, put in places(use):
        for name, value in VALUES.items():
            yield f"{place} = {name}", lambda put=put, value=value: put(value())
    without = lambda name: {k: v for k, v in kwargs.items() if k != name}
    changes = {
        **{f"without {k}": ((*args[:k], *args[k + 1 :]), kwargs) for k in range(len(args))},
        **{f"{extra!r} too many": ((*args, extra), kwargs) for extra in ("data", None, 3)},
        **{f"without {k}": (args, without(k)) for k in kwargs},
        **{f"{k} misspelt": (args, without(k) | {k[:-1]: v}) for k, v in kwargs.items()},
        **{f"{k}= too many": (args, kwargs | {k: "data"}) for k in ("axis", "mesh_axis", "été")},
    }
    yield from ((change, lambda given=given: given) for change, given in changes.items())


def unused(use: Use) -> dict[str, Any]:
    """The optional arguments that a use does not give, with their defaults."""
    signature = inspect.signature(use.function)
    given = signature.bind_partial(*use.args, **use.kwargs).arguments
    return {
        name: p.default
        for name, p in signature.parameters.items()
        if use.peer is None
        and name not in given
        and p.default is not p.empty
        and p.kind is not p.POSITIONAL_ONLY
    }


def places(use: Use) -> Iterator[tuple[str, Callable[[Any], Arguments]]]:
    """The places where a value can be put, each with a function that puts it there."""
    for where, put in inside_of(use.args):
        if where:
            yield where, lambda v, put=put: (put(v), use.kwargs)
    for key, given in (unused(use) | use.kwargs).items():
        for where, put in inside_of(given):
            yield key + where, lambda v, key=key, put=put: (use.args, {**use.kwargs, key: put(v)})


def inside_of(value: Any) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """The places in a value, each with a function that makes the value with another part there."""
    yield "", lambda v: v
    parts = value.items() if type(value) is dict else ()
    for key, item in enumerate(value) if type(value) in (list, tuple) else parts:
        for where, put in inside_of(item):
            yield f"[{key!r}]{where}", lambda v, key=key, put=put: replaced(value, key, put(v))


def replaced(value: Any, key: Any, part: Any) -> Any:
    if isinstance(value, dict):
        return {**value, key: part}
    return type(value)((*value[:key], part, *value[key + 1 :]))


LONGEST = 4000
"""Characters of an error or a warning."""


def verdict(use: Use, build: Callable[[], Arguments]) -> str:
    """The fault of a wrong use; empty if it is accepted, or refused well."""
    with warnings.catch_warnings(record=True, action="always") as found:
        error = error_of(functools.partial(use.run, use.function), build)
    long = [text for text in map(str, (*found, error)) if len(text) > LONGEST]
    if long or error is None or isinstance(error, UsersError):
        return f"long: {long[0][:300]}" if long else ""
    if not isinstance(error, sbp.SbpError):
        codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
        # Of sbp or of this module.
        raising = [
            c for c in codes if c.co_filename.startswith((str(Path(sbp.__file__).parent), __file__))
        ][-1]
        mismatch = isinstance(error, TypeError) or raising.co_name.startswith("users_")
        theirs = raising.co_filename == __file__ and mismatch
        return "" if theirs else "raw: " + "".join(traceback.format_exception(error)[-8:])
    if error.code not in CODES or len(str(error).split()) < 5:
        return f"mute: {error}"
    theirs = error_of(lambda a, k: (use.peer or str)(*a, **k), build) if use.peer else None
    for kind in (TypeError, ValueError):
        if isinstance(theirs, kind) and not isinstance(error, kind):
            return f"kind: {error}\nJAX raises {theirs!r}"
    return ""


def error_of(call: Callable[..., Any], build: Callable[[], Arguments]) -> Exception | None:
    try:
        call(*build())
    except Exception as error:  # whatever the wrong use raises is what is judged
        return error


# ---- tests --------------------------------------------------------------------------------------

pytestmark = pytest.mark.laws


@pytest.fixture(autouse=True)
def _own_folder_and_whole_tracebacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Files with wrong names are not left in the checkout. JAX leaves its own frames out of
    tracebacks, and the frames show who raised. Calibrations are short."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for name, data in FILES.items():
        (tmp_path / name).write_bytes(data)
    for name, value in {"SIZES": (1024,), "SPAN": 1e-4, "ROWS": 64}.items():
        monkeypatch.setattr(calibrate, name, value)
    options: Any = jax.config  # JAX adds its options at run time
    before = options.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")
    yield
    jax.config.update("jax_traceback_filtering", before)


@pytest.mark.parametrize("use", USES, ids=lambda use: use.name)
def test_wrong_uses_are_refused(use: Use):
    with warnings.catch_warnings(action="ignore"):
        use.run(use.function, use.args, use.kwargs)  # the right use
    every = [*misuses(use)]
    taken = sliced(every, min(1.0, 100 / len(every)))
    wrong = [f"{change}: {fault}" for change, build in taken if (fault := verdict(use, build))]
    assert not wrong, "\n".join([f"{len(wrong)} of {use.name}", *wrong[:3]])


def public_names() -> Iterator[str]:
    """The functions of `sbp` and `sbp.signatures`, and the classes with their methods."""
    for prefix, module in (("", sbp), ("signatures.", signatures)):
        for name, thing in vars(module).items():
            if name[0] != "_" and callable(thing) and thing.__module__.startswith("sbp."):
                yield prefix + name
                yield from (
                    f"{prefix}{name}.{method}"
                    for method in (vars(thing) if inspect.isclass(thing) else ())
                    if (method[0] != "_" or method == "__call__")
                    and callable(getattr(thing, method))
                )


NOT_TRIED = (
    *("Padded.tree_", "Partial.tree_"),  # JAX calls them
    *("SbpError", "SbpTypeError.refutation", "SbpInternalError", "SbpWarning"),  # sbp raises them
    *("Budget.covers", "signatures.LocalContext", "signatures.Op.", "signatures.Rule"),  # for rules
    *("signatures.Sent", "signatures.Traits", "signatures.add_rule"),  # the same
)


def test_all_public_names_are_tried():
    tried = {use.name.split(" ")[0] for use in USES}
    assert not [n for n in public_names() if n not in tried and not n.startswith(NOT_TRIED)]


def users_function(x: int) -> int:
    return x + 1


def test_who_raises_is_read_from_the_traceback():
    theirs, ours = (
        [verdict(use, build) for _, build in misuses(use)]
        for use in (Use("theirs", users_function, (1,)), Use("unchecked", bytes_text, (1,)))
    )
    assert not any(theirs) and sum(map(bool, ours)) > 20
