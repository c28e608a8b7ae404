"""Routers by name: small pure functions from logits to the experts that each token chooses.

Dims: G groups, S tokens of a group, E experts. `ROUTERS` has them all, but for expert choice, in
which experts choose tokens; see `expert_choice`.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Scores(NamedTuple):
    """What a router sees of tokens [G, S].

    Attributes:
      logits: [G, S, E], in the router's dtype.
      real: [G, S] 1 for tokens and 0 for padding, in the same dtype.
      draw: the random numbers that the router takes when training, None when not: for `top2`
        uniform [G, S], for `noisy_top_k` normal [G, S, E].
      noise: [G, S, E], of `noisy_top_k`: the logits of the noise's scale.
      bias: [E], of `sigmoid`: added to the scores by which experts are chosen.
    """

    logits: jax.Array
    real: jax.Array
    draw: jax.Array | None = None
    noise: jax.Array | None = None
    bias: jax.Array | None = None


class Choices(NamedTuple):
    """What tokens choose, padding included; capacity and padding are the business of `gating`.

    Attributes:
      ranks: for each rank a one-hot [G, S, E]: first choices, second choices, and so on.
      wanted: `ranks` without the choices that random routing leaves out.
      gates: [G, S, E] weights before they are normalised.
      balance: the auxiliary loss, a scalar: mean over groups.
    """

    ranks: tuple[jax.Array, ...]
    wanted: tuple[jax.Array, ...]
    gates: jax.Array
    balance: jax.Array


def best(logits: jax.Array, k: int) -> tuple[jax.Array, ...]:
    """One-hots [G, S, E] of the k largest logits, the largest first; of equal ones the lowest index
    comes first.

    A choice is the best of the rest by logit. To set the first choice's *gate* to zero and take
    argmax returns expert 0 where the softmax is saturated, even if expert 0 was the first choice.
    """
    found = []
    for _ in range(k):
        found.append(jax.nn.one_hot(jnp.argmax(logits, -1), logits.shape[-1], dtype=logits.dtype))
        logits = jnp.where(found[-1] > 0, -jnp.inf, logits)
    return tuple(found)


def union(ranks: Iterable[jax.Array]) -> jax.Array:
    """The choices of all ranks, [G, S, E]."""
    return functools.reduce(jnp.add, ranks)


def top2(seen: Scores, k: int = 2) -> Choices:
    """GShard's gating (section 2.2, Algorithm 1): the second choice is wanted where 2 * g2 > rnd,
    with g2 normalised over the pair; not training, always.

    The auxiliary loss counts first choices only.
    """
    gates = jax.nn.softmax(seen.logits, axis=-1)
    first, second = best(seen.logits, k)
    balance = balance_loss(gates, first, seen.real)
    wanted = second
    if seen.draw is not None:
        gate1, gate2 = jnp.sum(gates * first, axis=-1), jnp.sum(gates * second, axis=-1)
        # gate1 is at least 1 / E, so the pair's sum needs no epsilon.
        kept = 2.0 * jax.lax.stop_gradient(gate2 / (gate1 + gate2)) > seen.draw
        wanted = second * kept.astype(gates.dtype)[..., None]
    return Choices((first, second), (first, wanted), gates, balance)


def top_k(seen: Scores, k: int) -> Choices:
    """The k largest gates of a softmax over all experts.

    Without normalisation, k = 1 is Switch (Fedus et al. 2021); with it, the one weight is always 1,
    and the router learns from the auxiliary losses alone.
    """
    gates = jax.nn.softmax(seen.logits, axis=-1)
    ranks = best(seen.logits, k)
    return Choices(ranks, ranks, gates, balance_loss(gates, union(ranks) / k, seen.real))


def mixtral(seen: Scores, k: int) -> Choices:
    """Softmax over the k largest logits (Jiang et al. 2024); for k = 2 these are GShard's weights.

    The auxiliary loss is `top_k`'s.
    """
    ranks = best(seen.logits, k)
    gates = jax.nn.softmax(jnp.where(union(ranks) > 0, seen.logits, -jnp.inf), axis=-1)
    dense = jax.nn.softmax(seen.logits, axis=-1)
    return Choices(ranks, ranks, gates, balance_loss(dense, union(ranks) / k, seen.real))


def noisy_top_k(seen: Scores, k: int) -> Choices:
    """Noise on the logits, softmax over the k largest (Shazeer et al. 2017, section 2.1).

    The auxiliary loss is their importance loss, and when training their load loss too (equations 7
    and 11): squared coefficients of variation over the experts.
    """
    assert seen.noise is not None, "the layer gives this router its noise logits"
    scale = jax.nn.softplus(seen.noise)
    noisy = seen.logits if seen.draw is None else seen.logits + seen.draw * scale
    ranks = best(noisy, k)
    gates = jax.nn.softmax(jnp.where(union(ranks) > 0, noisy, -jnp.inf), axis=-1)
    balance = _variation(jnp.sum(gates * seen.real[..., None], axis=1))
    if seen.draw is not None and k < noisy.shape[-1]:
        load = _chosen_with_new_noise(seen.logits, noisy, scale, k) * seen.real[..., None]
        balance = balance + _variation(jnp.sum(load, axis=1))
    return Choices(ranks, ranks, gates, balance)


def _chosen_with_new_noise(
    clean: jax.Array, noisy: jax.Array, scale: jax.Array, k: int
) -> jax.Array:
    """[G, S, E] probability that an expert is among a token's k best if its own noise is drawn
    again and the others' is not (Shazeer et al. 2017, equation 9)."""
    *chosen, following = best(noisy, k + 1)
    last = jnp.sum(noisy * chosen[-1], axis=-1, keepdims=True)
    following = jnp.sum(noisy * following, axis=-1, keepdims=True)
    others = jnp.where(union(chosen) > 0, following, last)
    # A scale of zero would make 0 / 0; a millionth is no noise.
    return jax.scipy.stats.norm.cdf((clean - others) / jnp.maximum(scale, 1e-6))


def _variation(amount: jax.Array) -> jax.Array:
    """Squared coefficient of variation over experts of amounts [G, E], mean over groups."""
    mean = jnp.mean(amount, axis=-1)
    # A group of padding alone has nothing to balance.
    return jnp.mean(jnp.var(amount, axis=-1) / jnp.where(mean > 0, mean, 1.0) ** 2)


def sigmoid(seen: Scores, k: int) -> Choices:
    """Sigmoid scores; the k largest of score + bias are chosen, and weighted by score alone
    (DeepSeek-V3, section 2.1.2). The bias has no gradient: see `balanced_bias`."""
    assert seen.bias is not None, "the layer gives this router its bias"
    scores = jax.nn.sigmoid(seen.logits)
    ranks = best(jax.lax.stop_gradient(scores) + seen.bias, k)
    # Shares of scores that are all near zero: by their logarithms.
    logs = jax.nn.log_sigmoid(seen.logits)
    gates = jax.nn.softmax(jnp.where(union(ranks) > 0, logs, -jnp.inf), axis=-1)
    dense = jax.nn.softmax(logs, axis=-1)
    return Choices(ranks, ranks, gates, balance_loss(dense, union(ranks) / k, seen.real))


def balanced_bias(bias: jax.Array, demand: jax.Array, rate: float) -> jax.Array:
    """The bias of `sigmoid` after a step: `rate` more for experts that fewer tokens than the mean
    chose, `rate` less for those that more chose (Wang et al. 2024, Algorithm 1).

    Arguments:
      bias: [..., E].
      demand: [..., E] choices of the step.
      rate: the change.

    >>> balanced_bias(jnp.zeros(3), jnp.asarray([5.0, 1.0, 3.0]), 0.5).tolist()
    [-0.5, 0.5, 0.0]
    """
    error = jnp.mean(demand, axis=-1, keepdims=True) - demand
    return bias + rate * jnp.sign(error).astype(bias.dtype)


def expert_choice(seen: Scores, capacity: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Each expert takes the `capacity` tokens of a group that score it highest (Zhou et al. 2022).

    Whether it takes a token depends on later tokens, so a decoder must not use it.

    Returns:
      [G, S, E]: 1 where the expert takes the token; its place among the expert's tokens, best
      first; the gates.
    """
    gates = jax.nn.softmax(seen.logits, axis=-1)
    keys = jnp.where(seen.real[..., None] > 0, -jax.lax.stop_gradient(gates), jnp.inf)
    place = jnp.argsort(jnp.argsort(keys, axis=1, stable=True), axis=1)
    taken = (place < capacity).astype(gates.dtype) * seen.real[..., None]
    return taken, place.astype(gates.dtype), gates


def balance_loss(gates: jax.Array, chosen: jax.Array, real: jax.Array) -> jax.Array:
    """Mean over groups of E * sum_e f_e * m_e: the share of the choices that fall on an expert
    times its mean gate, over the group's real tokens; 1 when balanced.

    It is E^2 times the loss of Algorithm 1, line 13, and the loss of Switch. The counts are taken
    before capacity cuts any, and carry no gradient, which flows through m_e alone.

    Arguments:
      gates: [G, S, E], dense.
      chosen: [G, S, E], adding up to 1 over the experts.
      real: [G, S].
    """
    tokens = jnp.maximum(jnp.sum(real, axis=1), 1.0)[:, None]
    fraction = jnp.sum(chosen * real[..., None], axis=1) / tokens
    mean_gate = jnp.sum(gates * real[..., None], axis=1) / tokens
    return jnp.mean(jnp.sum(fraction * mean_gate, axis=-1)) * gates.shape[-1]


def z_loss(logits: jax.Array, real: jax.Array) -> jax.Array:
    """Mean over groups of the mean of logsumexp(logits)^2 over real tokens (ST-MoE, Zoph et al.
    2022, equation 5): it keeps logits [G, S, E] small."""
    tokens = jnp.maximum(jnp.sum(real, axis=1), 1.0)
    squares = jax.nn.logsumexp(logits, axis=-1) ** 2 * real
    return jnp.mean(jnp.sum(squares, axis=1) / tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """A router as the MoE layer uses it.

    Attributes:
      choose: from scores and k to choices; None for expert choice.
      choices: experts of a token where the configuration does not say.
      fixed: whether the router has no other number of choices.
      normalised: whether its weights are divided by their sum over a token's choices.
      rounding: how its capacity is rounded where the configuration does not say.
      weights: parameters besides `gate`: `noise` [M, E], `bias` [E].
      draw: random numbers for training, from a key, a shape [G, S, E] and a dtype; None for none.
    """

    choose: Callable[[Scores, int], Choices] | None
    choices: int = 2
    fixed: bool = False
    normalised: bool = False
    rounding: str = "floor"
    weights: tuple[str, ...] = ()
    draw: Callable[[jax.Array, tuple[int, ...], jnp.dtype], jax.Array] | None = None


ROUTERS: Mapping[str, Router] = {
    "top2": Router(
        choose=top2,
        fixed=True,
        normalised=True,
        draw=lambda key, shape, dtype: jax.random.uniform(key, shape[:2]).astype(dtype),
    ),
    "top_k": Router(choose=top_k, normalised=True),
    "switch": Router(choose=top_k, choices=1, fixed=True, rounding="ceil"),
    "mixtral": Router(choose=mixtral),
    "noisy_top_k": Router(choose=noisy_top_k, weights=("noise",), draw=jax.random.normal),
    "sigmoid": Router(choose=sigmoid, weights=("bias",)),
    "expert_choice": Router(choose=None),
}
"""Routers by the name that `ModelConfig.router` gives."""
