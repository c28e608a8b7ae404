"""Arguments that a function changes in place without returning the change: `lost-state`, for Flax
NNX modules and any other mutable pytree node."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import sbp

MESH = sbp.make_mesh((8,), ("data",))
X = jnp.ones((8, 4))


@jax.tree_util.register_dataclass
@dataclass
class Counter:
    """A mutable node."""

    weight: Any
    steps: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Frozen:
    """A node that only changes inside, such as the state of an environment."""

    info: dict[str, Any]


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.norm(self.up(x))


def counter() -> Counter:
    return Counter(jnp.ones(4), jnp.int32(0))


def lost(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[str]:
    """The warnings of a call, without their code."""
    with warnings.catch_warnings(record=True, action="always") as caught:
        sbp.jit(fn, MESH)(*args, **kwargs)
    found = [w for w in caught if issubclass(w.category, sbp.SbpWarning)]
    assert all(w.filename == __file__ for w in found)
    texts = [str(w.message) for w in found]
    assert all(text.startswith("lost-state: ") for text in texts)
    return [text.removeprefix("lost-state: ") for text in texts]


def counts(model: Counter, x: Any) -> Any:
    model.steps = model.steps + 1
    return x * model.weight


def changes_nothing(model: Counter, x: Any) -> Any:
    model.steps = model.steps
    return x * model.weight


def gains_a_leaf(model: Counter, x: Any) -> Any:
    model.steps = {"all": model.steps, "mean": x.mean()}
    return x


def writes_into_a_dict(model: dict[str, Any], x: Any) -> Any:
    model["steps"] = model["steps"] + 1
    return x


@pytest.mark.parametrize(
    ("fn", "leaves"),
    [
        (counts, "model.steps"),
        (lambda model, x: (model.steps, counts(model, x)), "model.steps"),  # the old leaf
        (gains_a_leaf, "model.steps['all'], model.steps['mean']"),
        (lambda model, x: (counts(model, x), model), None),
        (lambda model, x: (counts(model, x), {"steps": model.steps}), None),
        (changes_nothing, None),
        (lambda model, x: counts(Counter(model.weight, model.steps), x), None),  # a copy
    ],
    ids=lambda p: getattr(p, "__name__", None),
)
def test_a_change_that_is_not_returned(fn: Callable[..., Any], leaves: str | None):
    model = counter()
    texts = lost(fn, model, X)
    assert len(texts) == (leaves is not None)
    if leaves is not None:
        assert texts[0].startswith(
            f"input model is changed in {fn.__name__}, which does not return the new {leaves}: "
        )
        assert "your Counter keeps its old state, as under jax.jit" in texts[0]
    before = counter()
    jax.jit(fn)(before, X)
    assert model.steps == before.steps == 0  # what the warning says is so under both


def test_a_dict_is_a_variable_of_the_function():
    assert lost(writes_into_a_dict, {"steps": jnp.int32(0)}, X) == []
    assert lost(lambda s, x: writes_into_a_dict(s.info, x), Frozen({"steps": X}), X) == []
    (text,) = lost(lambda s, x: counts(s.info["m"], x), Frozen({"m": counter()}), X)
    assert text.startswith(
        "input s.info['m'] is changed in <lambda>, which does not return the new"
    )


def test_arguments_inside_of_containers_and_by_keyword():
    def program(flag: bool, pair: Any, *, more: Any) -> Any:
        counts(pair[1]["m"], X)
        counts(more, X)
        return pair[0]

    texts = lost(program, True, (X, {"m": counter()}), more=counter())
    assert [text.split(" is changed")[0] for text in texts] == [
        "input pair[1]['m']",
        "input more",
    ]
    assert "pair[1]['m'].steps: " in texts[0] and "more.steps: " in texts[1]


def test_a_node_that_flattens_to_new_leaves_is_not_judged():
    @jax.tree_util.register_pytree_node_class
    class Doubling:
        def __init__(self, x: Any):
            self.x = x

        def tree_flatten(self) -> Any:
            return (jnp.asarray(self.x) * 1,), None

        @classmethod
        def tree_unflatten(cls, aux: None, children: Any) -> Any:
            return cls(children[0])

    assert lost(lambda model: model.x + 1, Doubling(X)) == []


def test_modules_of_flax_nnx():
    """A batch norm in training changes its means; in evaluation, and where the state is returned,
    nothing is lost."""
    net = Net(nnx.Rngs(0))
    (text,) = lost(lambda net, x: net(x), net, X)
    assert text.startswith(
        "input net is changed in <lambda>, which does not return the new net.norm.mean"
    )
    assert "your Net keeps its old state" in text
    assert lost(lambda net, x: (net(x), nnx.state(net)), net, X) == []
    assert lost(lambda net, x: (net(x), net), net, X) == []
    net.eval()
    assert lost(lambda net, x: net(x), net, X) == []
    graph, state = nnx.split(net)
    assert lost(lambda state, x: nnx.merge(graph, state)(x), state, X) == []


def test_a_module_that_a_jitted_function_gets():
    """The function inside returns the leaves to the module, changed or not."""
    net = Net(nnx.Rngs(0))
    inner = nnx.jit(lambda net, x: net(x))
    functions = (inner, nnx.jit(lambda net, x: inner(net, x)), nnx.remat(lambda net, x: net(x)))
    for fn in functions:
        (text,) = lost(lambda net, x, fn=fn: fn(net, x), net, X)
        assert "the new net.norm.mean.value, net.norm.var.value: " in text
    net.eval()
    assert not [
        fn
        for fn in functions
        if lost(lambda net, x, fn=fn: fn(net, x), net, X)
        or lost(lambda net, x, fn=fn: fn(net, fn(net, x)), net, X)
    ]


def test_a_check_shows_it():
    with pytest.warns(sbp.SbpWarning, match="lost-state"):
        report = sbp.jit(counts, MESH).check(counter(), X)
    assert [d.code for d in report.diagnostics] == ["lost-state"] and report.ok
