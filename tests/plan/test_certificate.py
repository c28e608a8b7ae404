"""Certificates of plans hold, and forged ones do not; the checker shares no code with sbp."""

import ast
import contextlib
import copy
import functools
import json
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import sbp
from sbp.plan.certificate import _packed, certificate
from tests.cases import GRID, descent, shape as f32
from tests.plan.test_saving import plan as rematerialized

CHECKER = Path(__file__).parents[2] / "tools" / "certify.py"
NAMES = ("data", "model", "pod")
MESHES = [(8,), (2, 4), (2, 2, 2)]
certify: Any = SimpleNamespace(**runpy.run_path(str(CHECKER)))
"""The checker, which is no part of a package."""


# ---- programs -----------------------------------------------------------------------------------


def mlp(params, x, y):
    h = jnp.tanh(sbp.split(x, 0, "data") @ params["a"] + params["b"])
    return ((h @ params["c"] - y) ** 2).mean()


def megatron(params, x, y):
    h = jax.nn.relu(x @ sbp.split(params["a"], 1, "data")) @ sbp.split(params["c"], 0, "data")
    return ((h - y) ** 2).mean()


def layers(params, x):
    def layer(x, w):
        up, down = w
        return x + jnp.tanh(x @ up) @ down, x.mean()

    x, means = lax.scan(jax.checkpoint(layer), sbp.split(x, 0, "data"), params)
    return (x**2).sum() + means.sum()


def attention(params, x):
    q, k, v = (jnp.einsum("btm,mhd->bhtd", x, params[name]) for name in "qkv")
    scores = jnp.einsum("bhtd,bhud->bhtu", q, k) / 4
    scores = jnp.where(jnp.tri(x.shape[1], dtype=bool), scores, -1e9)
    mixed = jnp.einsum("bhtu,bhud->bhtd", jax.nn.softmax(scores), v)
    return jnp.einsum("bhtd,hdm->btm", mixed, params["o"]).sum()


def experts(params, x):
    x = sbp.split(x, 0, "data")
    gates = jax.nn.softmax(jnp.einsum("gsm,me->gse", x, params["gate"]))
    sent = jnp.einsum("gse,gsm->egsm", gates, x)
    h = jax.nn.relu(jnp.einsum("egsm,emh->egsh", sent, sbp.split(params["wi"], 0, "data")))
    return jnp.einsum("egsh,ehm,gse->gsm", h, params["wo"], gates).sum()


DENSE = {"a": f32(64, 256), "b": f32(256), "c": f32(256, 64)}
LABELS = jax.ShapeDtypeStruct((64,), "int32")
PROGRAMS: dict[str, tuple[Any, tuple[Any, ...], Any]] = {
    "data parallel": (descent(mlp), (DENSE, f32(512, 64), f32(512, 64)), None),
    "megatron": (jax.value_and_grad(megatron), (DENSE, f32(64, 64), f32(64, 64)), None),
    "fsdp": (
        descent(mlp),
        (DENSE, f32(512, 64), f32(512, 64)),
        (sbp.fully_sharded("data"), "data:S(0)", "data:S(0)"),
    ),
    "scan": (
        jax.grad(layers),
        ((f32(4, 64, 256), f32(4, 256, 64)), f32(512, 64)),
        (sbp.fully_sharded("data"), "data:S(0)"),
    ),
    "attention": (
        jax.grad(attention),
        (
            {"q": f32(64, 8, 16), "k": f32(64, 8, 16), "v": f32(64, 8, 16), "o": f32(8, 16, 64)},
            f32(16, 32, 64),
        ),
        (None, "data:S(0)"),
    ),
    "experts": (
        jax.grad(experts),
        ({"gate": f32(64, 8), "wi": f32(8, 64, 128), "wo": f32(8, 128, 64)}, f32(8, 32, 64)),
        None,
    ),
    "uneven": (
        descent(mlp),
        ({"a": f32(61, 250), "b": f32(250), "c": f32(250, 67)}, f32(4099, 61), f32(4099, 67)),
        None,
    ),
    "softmax loss": (
        descent(
            lambda params, x, labels: (
                -jnp.take_along_axis(
                    jax.nn.log_softmax(x @ params["a"]), labels[:, None], -1
                ).mean()
            )
        ),
        ({"a": f32(32, 1024)}, f32(64, 32), LABELS),
        ("data:S(1)", None, None),
    ),
}


def planned(name, sizes, **options):
    function, shapes, types = PROGRAMS[name]
    mesh = jax.sharding.AbstractMesh(sizes, NAMES[: len(sizes)])
    return sbp.jit(function, mesh, in_types=types, hardware="tpu-v5e", **options).plan(*shapes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("certificates")


@pytest.fixture(scope="module")
def certificates_on(folder):
    """The certificates on a mesh, by program and mesh."""

    @functools.cache
    def found(sizes):
        texts: dict[tuple[str, tuple[int, ...]], str] = {}
        for name in PROGRAMS:
            planned(name, sizes).certificate(folder / "one.json")
            texts[name, sizes] = (folder / "one.json").read_text()
        return texts

    return found


@pytest.fixture(scope="module")
def certificates(certificates_on):
    found = {k: text for sizes in MESHES[:2] for k, text in certificates_on(sizes).items()}
    return found | {
        ("rematerialized", (2, 4)): certificate(rematerialized("scanned").program, ["x"] * 3)
    }


@pytest.mark.parametrize("sizes", MESHES)
def test_certificates_hold(certificates_on, sizes):
    outside, padded, gaps = 0, 0, []
    for (name, _), text in certificates_on(sizes).items():
        program, plan, costs = certify.certify(json.loads(text))
        certify.compare(
            program, certify.certify(json.loads(certificates_on(MESHES[0])[name, MESHES[0]]))[0]
        )
        assert len(plan.rows) > 5, name
        outside += sum(plan.unchecked.values())
        padded += plan.padded
        gaps.append(1 - costs.bound / costs.seconds)
        assert -1e-9 <= gaps[-1] < 0.15, (name, sizes)
    assert outside == 0 and padded > 0 and np.median(gaps) < 1e-6


def test_budgets_that_hold_since_readers_share_a_gather(folder):
    """No typing keeps this budget by itself: the backward pass reads a whole weight."""
    norm = lambda w, x: ((jnp.tanh(x @ w[0]) @ w[1]) ** 2).sum()
    w = [jax.ShapeDtypeStruct((64, 64), np.float32)] * 2
    budgets = [sbp.forbid("all_gather", where="backward")]
    gradient = sbp.jit(
        jax.grad(norm), sbp.make_mesh((2, 4), NAMES[:2]), "data:S(0)", budgets=budgets
    )
    gradient.plan(w, jax.ShapeDtypeStruct((4096, 64), np.float32)).certificate(folder / "two.json")
    costs = certify.certify(json.loads((folder / "two.json").read_text()))[2]
    assert costs.bound <= costs.seconds * (1 + 1e-9)


# ---- forgeries ----------------------------------------------------------------------------------
# Each changes one thing of a certificate. `--program` compares with the true one, so that a
# certificate of another program counts as forged.


class NothingToForge(Exception):
    """The certificate has nothing that a forgery changes."""


def places(block):
    """Each list of instructions or operations, in loops too, with each index in it."""
    for k, each in enumerate(block["do"]):
        yield block["do"], k
        for body in each.get("bodies", ()):
            yield from places(body)


def instructions(c, kind):
    """The instructions of a kind. Each comes with the list that contains it."""
    return [(block, k) for block, k in places(c["plan"]) if kind in block[k]]


def operations(c):
    return [block[k] for block, k in places(c["program"])]


def pick(rng, items) -> Any:
    """One of some items."""
    items = [*items]
    if not items:
        raise NothingToForge
    return items[int(rng.integers(len(items)))]


def other_atom(rng, atom, rank):
    return pick(rng, [a for a in ("B", "sum", "max", *range(rank)) if a != atom])


def other_type(rng, c, source):
    """Another type in a register."""
    value, atoms = source
    shapes = [*c["program"]["values"], *c["plan"]["values"]]
    k = int(rng.integers(len(atoms)))
    atoms[k] = other_atom(rng, atoms[k], 1 if value is None else len(shapes[value][1]))


def changed(found, change):
    """A forgery that changes one of what a function finds in a certificate."""

    def forge(rng, c):
        change(rng, c, pick(rng, found(c)))

    return forge


made = lambda kind: lambda c: [block[k] for block, k in instructions(c, kind)]
anywhere = lambda c: instructions(c, "run") + 3 * instructions(c, "convert")


def typed(side):
    ends = lambda c: [run[side] for run in made("run")(c) if run[side]]
    return changed(ends, lambda rng, c, sources: other_type(rng, c, pick(rng, sources)))


def other_axis(rng, c, box):
    step = pick(rng, box["steps"] if len(c["mesh"]) > 1 else [])
    step["axes"] = [(k + 1) % len(c["mesh"]) for k in step["axes"]]


def other_value(rng, c, box):
    values = len(c["program"]["values"])
    box["convert"] = (box["convert"] + int(rng.integers(1, values))) % values


def other_target(rng, c, box):
    step = pick(rng, box["steps"])
    k = pick(rng, step["axes"])
    step["to"][k] = other_atom(rng, step["to"][k], 1)


def other_kind(rng, c, box):
    step = pick(rng, box["steps"])
    kinds = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "slice", "mask", "none"]
    step["kind"] = pick(rng, [kind for kind in kinds if kind != step["kind"]])


def other_bytes(rng, c, box):
    pick(rng, [s for s in box["steps"] if "bytes" in s])["bytes"] *= float(rng.uniform(0.5, 0.99))


def swapped(rng, c):
    """An instruction after one that reads its result."""
    pairs = []
    for block, k in instructions(c, "run"):
        made = [v for v, _ in block[k]["out"]]
        readers = [
            j for j in range(k + 1, len(block)) for v, _ in block[j].get("in", ()) if v in made
        ]
        pairs += [(block, k, j) for j in readers[:1]]
    block, k, j = pick(rng, pairs)
    block[k], block[j] = block[j], block[k]


def other_operand(rng, c, operands):
    source = pick(rng, [s for s in operands if s[0] is not None])
    source[0] = (source[0] + int(rng.integers(1, 4))) % len(c["program"]["values"])


def other_claim(rng, c):
    claim = pick(rng, c[pick(rng, ["arguments", "results"])])
    claim[1] = pick(
        rng, [t for t in ("B", "data:S(0)", "data:P(sum)", "data:S(1)") if t != claim[1]]
    )


def other_mesh(rng, c):
    """An axis over which something is sent; over another one, the plan may hold as well."""
    boxes = [block[k] for block, k in instructions(c, "convert")]
    step = pick(rng, [s for box in boxes for s in box["steps"] if s.get("bytes")])
    c["mesh"][pick(rng, step["axes"])][1] *= 2


def other_primitive(rng, c):
    same = [("add", "sub"), ("exp", "tanh"), ("mul", "add"), ("tanh", "exp"), ("max", "min")]
    found = [(o, b) for o in operations(c) for a, b in same if o["op"] == a]
    found += [(o, "reduce_max") for o in operations(c) if o["op"] == "reduce_sum"]
    operation, name = pick(rng, found)
    operation["op"] = name


def other_parameter(rng, c, product):
    contract = product["params"]["dimension_numbers"][0]
    contract[0] = [d + 1 for d in contract[0]] or [0]


def other_result(rng, c):
    out = c["plan"]["out"]
    if len(out) < 2 or out[0] == out[1]:
        raise NothingToForge
    out[0], out[1] = out[1], out[0]


def other_shape(rng, c, shape):
    shape[int(rng.integers(len(shape)))] *= 2


def figure(name, factor):
    return lambda rng, c: c["cost"].update({name: c["cost"][name] * factor})


def other_message(rng, c):
    """A message of a state that the plan has; the bound stays."""
    moved = certify.unpacked(c["cost"]["messages"], "<f8").copy()
    moved[int(rng.integers(len(moved)))] += 1.0
    c["cost"]["messages"] = _packed(moved)


def other_state(rng, c):
    rows = [v for v in c["cost"]["variables"] if "row" in v]
    variable = pick(rng, [v for v in rows if len(c["cost"]["states"][v["states"]]) > 1])
    count = len(c["cost"]["states"][variable["states"]])
    variable["chosen"] = (variable["chosen"] + int(rng.integers(1, count))) % count


def other_price(rng, c):
    """The price of a state that the plan has."""
    cost = c["cost"]
    variable = pick(rng, cost["variables"])
    shape, table = cost["tables"][variable["seconds"]]
    number = int(certify.unpacked(table, "<i4").reshape(shape)[variable["chosen"]])
    cost["numbers"][number] = (cost["numbers"][number] or 1e-3) * 1.1


def without_key(rng, c):
    parts = [c, c["program"], c["plan"], c["cost"], *operations(c), *c["cost"]["variables"]]
    parts += [block[k] for kind in ("run", "convert") for block, k in instructions(c, kind)]
    part = pick(rng, parts)
    keys = part.keys() - {"kernels", "trips", "row", "values", "result", "wide"}
    del part[pick(rng, sorted(keys))]


FORGERIES: dict[str, Any] = {
    "the type of an operand": typed("in"),
    "the type of a result": typed("out"),
    "a step on another axis": changed(made("convert"), other_axis),
    "a conversion of another value": changed(made("convert"), other_value),
    "a step to another type": changed(made("convert"), other_target),
    "another collective": changed(made("convert"), other_kind),
    "fewer bytes in a step": changed(made("convert"), other_bytes),
    "another total of bytes": lambda rng, c: c.update(
        bytes_per_device=c["bytes_per_device"] * 0.9 - 1
    ),
    "an instruction dropped": changed(anywhere, lambda rng, c, place: place[0].pop(place[1])),
    "an instruction doubled": changed(
        anywhere, lambda rng, c, place: place[0].insert(place[1], copy.deepcopy(place[0][place[1]]))
    ),
    "an instruction after its reader": swapped,
    "another operand": changed(
        lambda c: [run["in"] for run in made("run")(c) if run["in"]], other_operand
    ),
    "another operation": changed(
        made("run"), lambda rng, c, run: run.update(run=run["run"] + int(rng.integers(1, 4)))
    ),
    "another claim at the boundary": other_claim,
    "a larger mesh": other_mesh,
    "another primitive": other_primitive,
    "another parameter": changed(
        lambda c: [o for o in operations(c) if o["op"] == "dot_general"], other_parameter
    ),
    "operands of the program reversed": changed(
        lambda c: [o["in"] for o in operations(c) if len({*map(str, o["in"])}) > 1],
        lambda rng, c, operands: operands.reverse(),
    ),
    "results exchanged": other_result,
    "another type in a loop": changed(
        made("loop"),
        lambda rng, c, loop: other_type(
            rng, c, pick(rng, loop["bodies"][0][pick(rng, ["in", "out"])])
        ),
    ),
    "another number of trips": changed(
        lambda c: [o for o in operations(c) if "trips" in o],
        lambda rng, c, loop: loop.update(trips=loop["trips"] + int(rng.integers(1, 5))),
    ),
    "another shape": changed(lambda c: [s for _, s in c["program"]["values"] if s], other_shape),
    "a higher bound": figure("bound", 1.01),
    "fewer seconds": figure("seconds", 0.9),
    "a cheaper choice": figure("chosen", 0.9),
    "a bound of sbp above the cost": figure("bound of sbp", 1.5),
    "another message": other_message,
    "another state": other_state,
    "a variable dropped": changed(
        lambda c: range(len(c["cost"]["variables"])),
        lambda rng, c, number: c["cost"]["variables"].pop(number),
    ),
    "another price": other_price,
    "a missing key": without_key,
    "not a number": changed(
        lambda c: instructions(c, "convert") or instructions(c, "run"),
        lambda rng, c, place: place[0].append(float("nan")),
    ),
    "a truncated file": lambda rng, c: json.dumps(c)[: int(rng.integers(len(json.dumps(c))))],
}
OF_COSTS = {
    *("a higher bound", "fewer seconds", "a cheaper choice", "a bound of sbp above the cost"),
    *("another message", "another state", "a variable dropped", "another price", "a missing key"),
}
COUNT = 300


def verdict(text, true_one):
    """What the checker says of a text; empty if it accepts it as a certificate of the program."""
    try:
        program, *_ = certify.certify(json.loads(text, parse_constant=int))
        certify.compare(program, true_one)
    except (certify.Wrong, ValueError) as error:
        return str(error)
    return ""


def forged(certificates):
    """The forgeries: each with its kind, the true certificate and the text."""
    cases = [*certificates]
    for seed in range(-(-COUNT // len(FORGERIES))):
        for number, (kind, forge) in enumerate(FORGERIES.items()):
            rng = np.random.default_rng([seed, number])
            for k in rng.permutation(len(cases)):
                c = json.loads(certificates[cases[k]])
                if seed % 2 and kind not in OF_COSTS:  # the plan has to hold without a cost graph
                    c["cost"] = None
                with contextlib.suppress(NothingToForge):
                    yield kind, cases[k], forge(rng, c) or json.dumps(c)
                    break


def test_forgeries_are_rejected(certificates):
    true_ones = {k: certify.certify(json.loads(text))[0] for k, text in certificates.items()}
    assert not any(verdict(text, true_ones[case]) for case, text in certificates.items())
    found = [(k, case, verdict(text, true_ones[case])) for k, case, text in forged(certificates)]
    assert len(found) >= COUNT
    assert not [(kind, case) for kind, case, said in found if not said]


# ---- the checker --------------------------------------------------------------------------------


def run(*arguments):
    found = subprocess.run(
        [sys.executable, "-I", CHECKER, *map(str, arguments)], capture_output=True, text=True
    )
    assert not found.stderr
    return found.returncode, found.stdout


def test_the_checker_shares_no_code():
    tree = ast.parse(CHECKER.read_text())
    found = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    found |= {name.name for n in ast.walk(tree) if isinstance(n, ast.Import) for name in n.names}
    assert found - sys.stdlib_module_names == {"numpy"}
    assert len(CHECKER.read_text().splitlines()) <= 1000


def test_the_command(folder, certificates):
    good, other, cut = (folder / name for name in ("good.json", "other.json", "cut.json"))
    text = certificates["megatron", (2, 4)]
    good.write_text(text)
    other.write_text(certificates["fsdp", (2, 4)])
    cut.write_text(text[:-100])
    code, said = run(good, "--list", "--program", good)
    assert code == 0 and said.endswith("accepted\n")
    assert "rows: 22 of 22 operations are right" in said and " = dot_general(" in said
    for arguments, message in (
        ([good, "--program", other], "another program: operation 0"),
        ([cut], "is not complete JSON"),
        ([folder / "none.json"], "cannot be read"),
    ):
        code, said = run(*arguments)
        assert code == 1 and said.startswith("rejected: ") and message in said
        assert said.count("\n") == 1


def test_operations_outside_the_tables_are_counted(folder):
    mesh = jax.sharding.AbstractMesh((4,), ("data",))
    f = sbp.jit(jnp.cumsum, mesh, in_types="data:S(0)", out_types="data:S(0)")
    f.plan(f32(4096)).certificate(folder / "cumsum.json")
    code, said = run(folder / "cumsum.json")
    assert code == 3 and "outside this checker's tables: cumsum <prefix> (1)" in said
    assert run(folder / "cumsum.json", "--allow-unchecked")[0] == 0


OTHERS: dict[str, tuple[Any, tuple[Any, ...], Any]] = {
    "identity": (lambda x: x, (f32(8),), None),
    "twice": (lambda x: (x * x, x * x, x, 1.0), (f32(8, 8),), "data:S(0)"),
    "dropout": (
        lambda k, x: x * jax.random.bernoulli(k, 0.5, x.shape),
        (jax.eval_shape(lambda: jax.random.key(0)), f32(64, 64)),
        (None, "data:S(0) model:S(1)"),
    ),
    "padded": (lambda x: x * 2, (f32(13, 7),), sbp.padded("model:S(0)")),
    "print": (lambda x: (jax.debug.print("{}", x.sum()), x * 2)[1], (f32(64),), "data:S(0)"),
    "while": (
        lambda x: lax.while_loop(lambda c: c.sum() < 5, lambda c: c @ c, x),
        (f32(64, 64),),
        "data:S(0)",
    ),
    "branches": (
        lambda i, x: lax.switch(i, [lambda x: x, lambda x: x * 2, jnp.transpose], x),
        (jax.ShapeDtypeStruct((), "int32"), f32(64, 64)),
        (None, "data:S(0)"),
    ),
    "nested": (
        lambda x: lax.scan(
            lambda c, _: (lax.scan(lambda d, _: (d @ d, d.sum()), c, None, length=3)[0], c.max()),
            x,
            None,
            length=4,
        ),
        (f32(32, 32),),
        "data:S(0)",
    ),
    "one dim twice": (lambda x: x.reshape(4, 16).sum(1), (f32(64),), "data:S(0) model:S(0)"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_certificates_of_other_programs_hold(name: str):
    function, shapes, types = OTHERS[name]
    program = sbp.jit(function, GRID, in_types=types).plan(*shapes).program
    text = certificate(program, ["x"] * len(program.graph.outputs))
    parts = certify.certify(json.loads(text))
    assert [*certify.report(*parts, json.loads(text))]
    assert len([*certify.listed(parts[0])]) == len(parts[0].operations)
    assert parts[1].unchecked == ({"random_bits": 1} if name == "dropout" else {})


def test_a_sum_in_a_wider_dtype():
    x = jax.ShapeDtypeStruct((64, 4096), "bfloat16")
    f = sbp.jit(
        lambda x: x @ x.T,
        jax.sharding.AbstractMesh((8,), ("data",)),
        in_types="data:S(1)",
        reduce_dtype=jnp.float32,
    )
    text = certificate(f.plan(x).program, ["x"])
    assert '"wide"' in text and certify.certify(json.loads(text))


def test_a_memory_limit_and_many_axes():
    """Types that are chosen for less memory, and a mesh whose cost graph is not made as a whole."""
    fits = planned("fsdp", (8,)).cost.peak_memory_bytes * 0.9
    plan = planned("fsdp", (8,), memory_limit=int(fits))
    assert certify.certify(json.loads(certificate(plan.program, ["x"] * 3)))[2] is not None
    mesh = jax.sharding.AbstractMesh((2, 2, 2, 2), ("a", "b", "c", "d"))
    plan = sbp.jit(lambda x: x @ x, mesh, in_types="a:S(0) b:S(1)").plan(f32(64, 64))
    program, _, costs = certify.certify(json.loads(certificate(plan.program, ["x"])))
    assert len(program.operations) == 1 and costs is None


def certified(function, x, types, **options):
    mesh = jax.sharding.AbstractMesh((4,), ("data",))
    program = sbp.jit(function, mesh, in_types=types, **options).plan(x).program
    c = json.loads(certificate(program, ["x"] * len(program.graph.outputs)))
    c["cost"] = None
    assert certify.certify(c)
    return c


def test_only_a_reduction_is_in_a_wider_dtype():
    c = certified(jnp.sin, f32(16, 8), "data:S(0)", out_types="B")
    (block, k), *_ = instructions(c, "steps")
    block[k]["steps"][0] |= {"wide": {"dim": 0}, "bytes": 96.0}
    c["bytes_per_device"] = 96.0
    with pytest.raises(certify.Wrong, match="bytes"):
        certify.certify(c)


@pytest.mark.parametrize(
    ("source", "target", "rises"),
    [
        ("int8", "uint32", False),
        ("int8", "int32", True),
        ("uint8", "int32", True),
        ("int32", "int8", False),
    ],
)
def test_casts_that_keep_the_order(source, target, rises):
    """-1 becomes the largest number of an unsigned dtype."""
    assert ("max->max" in certify.cast_rows(source, target)) == rises


@pytest.mark.parametrize(
    ("source", "target"), [("int4", "int8"), ("uint2", "uint8"), ("float16", "int32")]
)
def test_casts_that_do_not_keep_sums(source, target):
    """Parts 7 + 7 are -2 in int4 and 14 in int8; parts 0.5 + 0.5 become 0 + 0."""
    assert "sum->sum" not in certify.cast_rows(source, target)


def fault(op, params, ins, outs, *avals):
    """What the checker says of a row of one operation with one result, on an axis of 2 devices."""
    operation = SimpleNamespace(op=op, params=params, ins=range(len(ins)), outs=[len(ins)])
    program = SimpleNamespace(aval=lambda v: avals[v])
    call = certify.Call(operation, program, [[]] * len(avals), [], 2)
    return certify.row_fault(call, ins, outs)


@pytest.mark.parametrize("op", ["dot_general", "conv_general_dilated"])
@pytest.mark.parametrize("dtypes", [("int8", "int8", "int32"), ("float32", "int8", "float32")])
def test_products_of_narrow_integers_are_outside(op, dtypes):
    with pytest.raises(certify.Outside):
        fault(op, {}, ["sum", "B"], ["sum"], *((d, [4, 4, 4]) for d in dtypes))


@pytest.mark.parametrize(
    "other", [{}, {"window_strides": [2]}, {"padding": [[0, 3]]}, {"base_dilation": [2]}]
)
def test_windows_of_one_element(other):
    same = {"window_dimensions": [1], "window_strides": [1], "padding": [[0, 0]]}
    said = fault("reduce_window_sum", same | other, [0], [0], *[("float32", [4])] * 2)
    assert bool(said) == bool(other)


def test_constants_are_exact():
    programs = [certified(lambda x, k=k: x * k, f32(4), "B") for k in (1.2345671e-3, 1.2345679e-3)]
    with np.printoptions(precision=3):
        programs.append(certified(lambda x: x * 1.2345671e-3, f32(4), "B"))
    one, other, again = (certify.Program(c).digest for c in programs)
    assert one == again != other


def test_operations_with_effects_run():
    def printed(x):
        return lax.fori_loop(0, 3, lambda k, c: (jax.debug.print("{}", k), c + 1)[1], x)

    c = certified(lambda x: (printed(x), x * 2)[1], f32(4), "B")
    c["plan"]["do"] = [i for i in c["plan"]["do"] if "loop" not in i]
    with pytest.raises(certify.Wrong, match="does not run"):
        certify.certify(c)


def test_kernels_are_outside_the_tables():
    c = certified(jnp.sin, f32(16), "B")
    made("run")(c)[0]["kernels"] = ["other"]
    assert certify.certify(c)[1].unchecked == {"sin <other>": 1}


def test_top_k_along_a_dim():
    certified(lambda x: lax.top_k(x, 4, axis=1), f32(16, 16), "data:S(0)")
    c = certified(lambda x: lax.top_k(x, 4, axis=0), f32(16, 16), "data:S(1)")
    wrong = json.loads(json.dumps(c).replace("[1]", "[0]"))  # its types: split along dim 0
    with pytest.raises(certify.Wrong, match="splits a dim that has to be whole"):
        certify.certify(wrong)


def test_callbacks_and_custom_reductions_are_not_equal_values():
    def called(x):
        return [
            jax.pure_callback(lambda x, f=f: f(x), x, x, vmap_method="sequential")
            for f in (np.sin, np.cos)
        ]

    def reduced(factor):
        return lambda x: lax.reduce(x, 0.0, lambda a, b: a + factor * b, (0,))

    c = certified(called, f32(16), "B")
    c["plan"]["out"][1] = c["plan"]["out"][0]
    with pytest.raises(certify.Wrong):
        certify.certify(c)
    two, three = (certify.Program(certified(reduced(k), f32(16, 4), "B")) for k in (2.0, 3.0))
    assert two.digest != three.digest
