"""Faults in programs that rank their elements, or send them to other devices and back."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as PS

import sbp
from tests.shardmap.programs.kinds import draw, report_of as report_over

N = 4
MESH = sbp.make_mesh((N,), ("ep",))
EXPERTS, WIDTH = 8, 16


X = draw(32, WIDTH)
PARAMS = {
    "router": draw(WIDTH, EXPERTS, seed=1),
    "experts": draw(EXPERTS, WIDTH, WIDTH, seed=2),
}
SPECS = {"router": PS(), "experts": PS("ep")}, PS("ep")
exchanged = lambda x, a, b: lax.all_to_all(x, "ep", a, b, tiled=True)


def layer(p, x, capacity):
    gates = jax.nn.softmax(x @ p["router"])
    chosen = jax.nn.one_hot(gates.argmax(-1), EXPERTS)
    place = ((jnp.cumsum(chosen, 0) - 1) * chosen).sum(-1).astype(int)
    mask = chosen[:, :, None] * jax.nn.one_hot(place, capacity)[:, None, :]
    sent = exchanged(jnp.einsum("td,tec->ecd", x, mask), 0, 1)
    back = exchanged(jnp.tanh(jnp.einsum("ecd,edf->ecf", sent, p["experts"])), 1, 0)
    return jnp.einsum("ecd,tec->td", back, mask) * gates.max(-1)[:, None]


def sorted_layer(p, x, capacity):
    """The same with sorted tokens: a full expert drops the tokens that come last."""
    gates = jax.nn.softmax(x @ p["router"])
    order = jnp.argsort(gates.argmax(-1))
    expert = gates.argmax(-1)[order]
    place = jnp.arange(len(x)) - jnp.searchsorted(expert, jnp.arange(EXPERTS))[expert]
    buffer = jnp.zeros((EXPERTS, capacity, WIDTH)).at[expert, place].set(x[order], mode="drop")
    hidden = jnp.einsum("ecd,edf->ecf", exchanged(buffer, 0, 1), p["experts"])
    back = exchanged(jnp.tanh(hidden), 1, 0)
    own = back.at[expert, place].get(mode="fill", fill_value=0)
    return jnp.zeros_like(x).at[order].set(own) * gates.max(-1)[:, None]


def trained(reduced):
    gradient = jax.grad(lambda p, x: (layer(p, x, 32) ** 2).mean())
    return (lambda p, x: reduced(gradient(p, x)["router"])), PS()


report_of = lambda body, outs, *args, ins=SPECS: report_over(body, ins, outs, *args, over=MESH)


mean = lambda g: lax.pmean(g, "ep")
rows = lambda wrap: (lambda p, x: wrap(layer(p, x, 32)), PS("ep"))
loss = lambda of, reduced: (lambda p, x: reduced((of(p, x, 32) ** 2).mean()), PS())
doubled = lambda y: lax.psum(mean(y), "ep")


@pytest.mark.parametrize(
    ("program", "codes"),
    [
        (trained(mean), []),
        (rows(lambda y: y), []),
        (trained(lambda g: lax.psum(g, "ep")), ["wrong-reduction"]),
        (trained(lambda g: g), ["missing-reduction"]),
        (rows(lambda y: lax.psum(y, "ep")), ["wrong-placement"]),
        (loss(layer, mean), []),
        (loss(layer, doubled), ["doubled-reduction"]),
        (loss(sorted_layer, mean), []),
        (loss(sorted_layer, doubled), ["doubled-reduction"]),
        ((lambda p, x: layer(p, x, 32).sum(), PS()), ["missing-reduction"]),
    ],
)
def test_a_layer_that_drops_no_token_is_judged_like_any_other(program, codes):
    found = report_of(*program, PARAMS, X)
    assert [d.code for d in found.diagnostics if d.severity == "error"] == codes, found.text()
    assert not codes or found.diagnostics[0].primary is not None


@pytest.mark.parametrize("of", [layer, sorted_layer])
def test_a_layer_that_drops_tokens_may_be_meant_to(of):
    found = report_of(lambda p, x: of(p, x, 2), PS("ep"), PARAMS, X)
    assert found.ok and "may drop those over its capacity" in found.text()


LOGITS = draw(8, 32, seed=3)


def greedy(logits, *, offset=False):
    best = lax.all_gather(logits.max(-1), "ep")
    own = logits.argmax(-1) + offset * lax.axis_index("ep") * logits.shape[1]
    return jnp.take_along_axis(lax.all_gather(own, "ep"), best.argmax(0)[None], 0)[0]


def top_two(logits, *, offset=False):
    values, places = lax.top_k(logits, 2)
    places += offset * lax.axis_index("ep") * logits.shape[1]
    values, places = (lax.all_gather(a, "ep", axis=1, tiled=True) for a in (values, places))
    return jnp.take_along_axis(places, lax.top_k(values, 2)[1], 1)


@pytest.mark.parametrize("search", [greedy, top_two])
def test_an_index_without_the_offset_of_its_shard(search):
    ins = (PS(None, "ep"),)
    right = report_of(lambda x: search(x, offset=True), PS(), LOGITS, ins=ins)
    assert not right.diagnostics, right.text()
    wrong = report_of(search, PS(), LOGITS, ins=ins)
    assert wrong.diagnostics[0].severity in ("warning", "error")
    assert "may drop" not in wrong.text()


def test_only_results_that_change_are_named():
    """The number of rows may count devices; as such, it would change both results."""
    body = lambda x, rows=N: (greedy(x), lax.pmax(x.max(), "ep") * jnp.ones(rows))
    found = report_of(body, PS(), LOGITS, ins=(PS(None, "ep"),))
    assert "result 0 changes" in found.text() and "results 0, 1" not in found.text()


ring = [(i, (i + 1) % N) for i in range(N)]
back = [(b, a) for a, b in ring]


@pytest.mark.parametrize(
    "there_and_back",
    [
        lambda x: exchanged(exchanged(x, 1, 0), 0, 1),
        lambda x: lax.ppermute(lax.ppermute(x, "ep", ring), "ep", back),
    ],
)
def test_a_sum_of_shards_behind_a_way_there_and_back(there_and_back):
    body = lambda x: lax.psum(jnp.tanh(there_and_back(x)), "ep")
    (found,) = report_of(body, PS("ep"), X, ins=PS("ep")).diagnostics
    assert found.code == "wrong-placement" and found.helps[0].clears_all_errors


def test_a_gradient_of_which_each_device_takes_its_own_rows():
    def body(w, x):
        whole = lax.all_gather(w, "ep", tiled=True)
        g = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(whole)
        return lax.dynamic_slice_in_dim(g, lax.axis_index("ep") * w.shape[0], w.shape[0])

    (found,) = report_of(body, PS("ep"), draw(WIDTH, WIDTH, seed=4), X, ins=PS("ep")).diagnostics
    assert found.code == "missing-reduction" and "takes one block" in found.title
    assert 'with lax.pmean(.., "ep")' in found.helps[0].text


def test_a_shard_of_a_gradient_that_is_divided_twice_is_too_small():
    def body(w, x):
        whole = lax.all_gather(w, "ep", tiled=True)
        g = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(whole)
        return lax.psum_scatter(g, "ep", tiled=True) / lax.axis_size("ep") / lax.axis_size("ep")

    (found,) = report_of(body, PS("ep"), draw(WIDTH, WIDTH, seed=4), X, ins=PS("ep")).diagnostics
    assert f"is {N} times too small" in found.title
