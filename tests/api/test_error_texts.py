"""What a user sees of an error outside of a notebook: her own frames, and one line."""

import traceback

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh

import sbp

MESH = AbstractMesh((2, 4), ("data", "model"))
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
    ],
)
def test_a_traceback_has_the_frames_of_the_user(call, functions):
    with pytest.raises(sbp.SbpError) as caught:
        call()
    frames = traceback.extract_tb(caught.value.__traceback__)
    own = [f.name for f in frames if f.filename == __file__]
    assert own == ["test_a_traceback_has_the_frames_of_the_user", "<lambda>", *functions]
    assert len(frames) <= len(own) + 2  # a function of sbp that was called, and one that raised
    assert caught.value.__suppress_context__ and caught.value.__cause__ is None


def test_jax_shows_all_frames_where_it_shows_its_own():
    jax.config.update("jax_traceback_filtering", "off")
    try:
        with pytest.raises(sbp.SbpError) as caught:
            sbp.jit(no_typing, MESH, boxing="explicit").plan(X, X)
    finally:
        jax.config.update("jax_traceback_filtering", "auto")
    assert len(traceback.extract_tb(caught.value.__traceback__)) > 4


@pytest.mark.parametrize(
    "call",
    [
        lambda word: sbp.jit(no_typing, MESH).plan(X, X).why(word),
        lambda word: sbp.Layout(**{word: "data"})(X, f"{word}x", None),
        lambda word: sbp.jit(no_typing, MESH, boxing=word),
    ],
)
def test_a_long_argument_is_not_repeated(call):
    with pytest.raises(sbp.SbpError) as caught:
        call("z" * 100_000)
    assert "zzzz" in str(caught.value) and len(str(caught.value)) < 1000


@pytest.mark.parametrize("name", ["a\0b", "\ud800", 5, None])
def test_names_that_no_file_has(name):
    plan = sbp.jit(jnp.sin, MESH).plan(X)
    with pytest.raises(sbp.SbpError, match="bad-argument"):
        sbp.assert_plan_unchanged(plan, name)


def test_a_region_may_return_a_number():
    pair = sbp.manual(lambda x: (x, 3), in_types=("data:S(0)",), out_types=("data:S(0)", "B"))
    doubled, three = sbp.jit(pair, sbp.make_mesh((2,), ("data",)))(X)
    assert three == 3 and (doubled == X).all()
