"""`sbp signatures NAME` for functions of JAX."""

import json

import pytest

from sbp.cli import main
from sbp.signatures import known_primitives


def answer(words, capsys):
    assert main(["signatures", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", ["softmax", "jax.nn.softmax", "nn.softmax"])
def test_softmax_has_the_rows_of_its_primitives(name, capsys):
    data = answer([name], capsys)
    assert data["function"] == "jax.nn.softmax"
    rows = {p["primitive"]: p["rows"] for p in data["primitives"]}
    assert {"inputs": ["S(1)"], "outputs": ["P(max)"], "kernel": "local"} in rows["reduce_max"]
    assert {"inputs": ["S(1)"], "outputs": ["P(sum)"], "kernel": "local"} in rows["reduce_sum"]
    sent = {c["inputs"][0]: c["bytes_per_device"] for c in data["calls"]}
    assert sent["S(0)"] == 0 < sent["S(1)"] < sent["P(sum)"]


def test_bytes_of_a_product_are_those_of_its_collective(capsys):
    words = ["jnp.matmul", "--args", "f32[512,1024], f32[1024,2048]"]
    sent = {tuple(c["inputs"]): c for c in answer(words, capsys)["calls"]}
    assert sent["S(0)", "B"]["bytes_per_device"] == 0
    assert sent["S(0)", "B"]["outputs"] == ["S(0)"]
    # Four devices: a reduce-scatter of the product, 512 x 2048 float32, sends 3/4 of it.
    assert sent["S(1)", "S(0)"]["bytes_per_device"] == 3 / 4 * 512 * 2048 * 4


def test_arguments_are_those_that_are_given(capsys):
    data = answer(["einsum", "--args", "'bij,bjk->bik', f32[4,8,16], f32[4,16,32]"], capsys)
    assert data["inputs"] == ["f32[4,8,16]", "f32[4,16,32]"]
    assert [p["primitive"] for p in data["primitives"]] == ["dot_general"]


def test_a_primitive_goes_before_a_function_of_its_name(capsys):
    data = answer(["dot_general"], capsys)
    assert data["primitive"] == "dot_general" and data["rows"]
    assert answer([], capsys)["primitives"] == sorted(known_primitives())


def test_text(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["signatures", "jnp.linalg.norm"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("`jnp.linalg.norm` traced on f32[512,1024]")
    assert "reduce_sum" in out and max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["softmx"], 'did you mean "softmax"?'),
        (["jnp.matmul", "--args", "f32[8,16], f32[8,16]"], "does not take these --args"),
        (["jnp.interp"], "takes none of the arguments that sbp tries"),
    ],
)
def test_what_has_no_answer(words, said, capsys):
    assert main(["signatures", *words]) == 2
    assert said in capsys.readouterr().err
