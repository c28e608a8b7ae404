"""Programs that are compared with a plain function. The source of a plan passes, and an edit of its
collectives is found if it changes a result on the devices."""

import ast
import copy
import functools
import runpy
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as Spec

import sbp
from tests.run.programs import CASES, NAMES, arguments, function_of
from tests.same import refused
from tests.slices import sliced

COLLECTIVES = ("psum", "pmax", "psum_scatter", "all_gather", "all_to_all", "ppermute")
MESHES = ((8,), (2, 4), (4, 2))
REFUSED = (TypeError, ValueError, ZeroDivisionError, sbp.SbpError)
"""Errors of a program, and of sbp, if shapes do not fit."""
EDITS = ("dropped", "doubled", "another axis", "another operation", "moved")
MESH = jax.sharding.AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))


@functools.cache
def written(number: int, shape: tuple[int, ...]) -> tuple[Path, str]:
    """The folder of the file of a plan, and its text."""
    case, names = CASES[number], NAMES[: len(shape)]
    folder = Path(tempfile.mkdtemp())
    plan = sbp.jit(function_of(case, names), sbp.make_mesh(shape, names)).plan(*arguments(case))
    return folder, plan.source(folder / "emitted.py")


def edited(text: str, kind: str, rng: np.random.Generator) -> str | None:
    """The text of a file with one edit of a collective; None where it has none of this kind."""
    tree = ast.parse(text)
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in COLLECTIVES
    ]
    if not calls:
        return None
    call: Any = calls[rng.integers(len(calls))]
    before: Any = copy.deepcopy(call)
    axes = {name for name in NAMES for node in ast.walk(call) if getattr(node, "value", 0) == name}
    operand = f"({ast.unparse(before.args[0])})"
    match kind:
        case "dropped":
            new = operand
        case "doubled" if before.func.attr == "psum":
            before.args[0] = copy.deepcopy(call)
            new = ast.unparse(before)
        case "another operation" if before.func.attr == "psum":
            before.func.attr = ("pmean", "pmax")[rng.integers(2)]
            new = ast.unparse(before)
        case "another axis" if len(axes) == 1 and '"y"' in text:
            (name,) = axes
            for node in ast.walk(before):
                if getattr(node, "value", 0) == name:
                    vars(node)["value"] = "y" if name == "x" else "x"
            new = ast.unparse(before)
        case "moved" if before.func.attr == "psum":
            bodies = [b for n in ast.walk(tree) if isinstance(b := getattr(n, "body", None), list)]
            body = next(b for b in bodies if any(call in ast.walk(s) for s in b))
            at = next(i for i, s in enumerate(body) if call in ast.walk(s))
            after = body[at + 1] if at + 1 < len(body) else None
            if not isinstance(after, ast.Assign) or not isinstance(after.targets[0], ast.Name):
                return None
            before.args[0] = after.value
            after.value = before
            new = operand
        case _:
            return None

    class Replace(ast.NodeTransformer):
        def visit_Call(self, node: ast.Call) -> ast.AST:
            return ast.parse(new, mode="eval").body if node is call else self.generic_visit(node)

    return ast.unparse(Replace().visit(tree))


def loaded(folder: Path, text: str, name: str) -> Any:
    """The function of a file."""
    path = folder / "emitted.py"  # beside the arrays that it reads
    path.write_text(text)
    return runpy.run_path(str(path))[name]


def equal(got: Any, want: Any) -> bool:
    """Whether each device holds its part of the right results."""
    near = functools.partial(np.allclose, rtol=1e-3, atol=1e-4)
    pairs = list(zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True))
    if any(x.shape != y.shape for x, y in pairs):
        raise ValueError("other shapes")
    return all(near(s.data, y[s.index]) for x, y in pairs for s in x.addressable_shards)


def drawn(seed: int) -> tuple[int, tuple[int, ...], str]:
    """A program, its mesh, and the text of the file of its plan with an edit."""
    rng = np.random.default_rng(seed)
    while True:
        number, shape = int(rng.integers(len(CASES))), MESHES[rng.integers(len(MESHES))]
        text = edited(written(number, shape)[1], EDITS[rng.integers(len(EDITS))], rng)
        if text is not None:
            return number, shape, text


@pytest.mark.laws
@pytest.mark.parametrize("seed", sliced(range(200), 0.1))
def test_edits_of_a_plans_source_are_found(seed):
    number, shape, text = drawn(seed)
    folder, source = written(number, shape)
    case, names = CASES[number], NAMES[: len(shape)]
    plain, args, mesh = function_of(case, names), arguments(case), sbp.make_mesh(shape, names)
    name = next(n.name for n in reversed(ast.parse(source).body) if isinstance(n, ast.FunctionDef))
    check = functools.partial(sbp.check_shard_map, mesh=mesh, against=plain)
    assert not check(loaded(folder, source, name), *args).diagnostics
    step = loaded(folder, text, name)
    try:
        right = equal(step(*args), jax.jit(plain)(*args))
    except REFUSED:
        with pytest.raises(REFUSED):
            check(step, *args)
        return
    assert check(step, *args).ok == right


loss = lambda w, x: jnp.mean((x @ w) ** 2)


def plain(w, x):
    return w - 0.1 * jax.grad(loss)(w, x)


mapped = lambda body: jax.shard_map(
    body, mesh=MESH, in_specs=(Spec(), Spec("data")), out_specs=Spec(), check_vma=False
)


def accumulated(count):
    """A step that divides the sum over eight microbatches and devices by a number."""

    def body(w, x):
        add = lambda total, rows: (total + jax.grad(loss)(w, rows), None)
        total, _ = jax.lax.scan(add, jnp.zeros_like(w), x.reshape(8, -1, 16))
        return w - 0.1 * jax.lax.psum(total, "data") / count

    return mapped(body)


SHAPES = (jax.ShapeDtypeStruct((16, 4), "float32"), jax.ShapeDtypeStruct((512, 16), "float32"))


def test_a_plain_function_says_what_a_number_counts():
    """Types alone cannot say it: with one device, the sum over eight microbatches is divided by
    one, if the eight counts devices."""
    assert sbp.check_shard_map(accumulated(8), *SHAPES, mesh=MESH).ok
    (found,) = sbp.check_shard_map(accumulated(8), *SHAPES, mesh=MESH, against=plain).diagnostics
    assert (found.code, found.severity, found.title) == (
        "differs-on-one-device",
        "error",
        "result 0 is not as in `plain`",
    )
    texts = [label.text for label in found.labels]
    assert texts[0] == "64 times a value of `plain`" and "8 times a value of `plain`" in texts
    right = sbp.check_shard_map(accumulated(64), *SHAPES, mesh=MESH, against=plain)
    assert not right.diagnostics
    assert "the program computes the results of `plain`" in str(right)


def test_values_without_elements_and_other_factors():
    """An eighth is the inverse of a number of devices, and a third is not; an empty result has no
    factor."""

    body = lambda w, x: (w - 0.1 * jax.grad(loss)(w, x) / 8 / 3 * 3, x[:0].sum(1))
    step = jax.shard_map(
        body, mesh=MESH, in_specs=(Spec(), Spec()), out_specs=(Spec(), Spec()), check_vma=False
    )
    both = lambda w, x: (plain(w, x), x[:0].sum(1))
    (found,) = sbp.check_shard_map(step, *SHAPES, mesh=MESH, against=both).diagnostics
    texts = [label.text for label in found.labels]
    assert "1/8 of a value of `<lambda>`" in texts and not any("1/24" in text for text in texts)


def test_helps_are_tried_against_the_plain_function():
    body = lambda w, x: w - 0.1 * jax.grad(loss)(w, x)
    (found,) = sbp.check_shard_map(mapped(body), *SHAPES, mesh=MESH, against=plain).diagnostics
    assert found.code == "missing-reduction" and any(h.clears_all_errors for h in found.helps)


def test_a_difference_counts_in_a_program_that_tests_for_finite_numbers():
    """sbp runs such a program again on values that are not finite, and both functions skip them."""

    def stepped(w, x, rate):
        new = w - rate * jax.grad(loss)(w, x)
        return jnp.where(jnp.isfinite(new).all(), new, w)

    body = lambda w, x: stepped(w, x, 0.2)
    step = jax.shard_map(body, mesh=MESH, in_specs=Spec(), out_specs=Spec(), check_vma=False)
    right = lambda w, x: stepped(w, x, 0.1)
    (found,) = sbp.check_shard_map(step, *SHAPES, mesh=MESH, against=right).diagnostics
    assert found.title == "result 0 is not as in `<lambda>`"


def test_a_plain_function_of_other_results_is_refused():
    refused(
        "`against` returns float32",
        sbp.check_shard_map,
        accumulated(64),
        *SHAPES,
        mesh=MESH,
        against=loss,
    )
    refused("against", sbp.check_shard_map, accumulated(64), *SHAPES, mesh=MESH, against=3)
