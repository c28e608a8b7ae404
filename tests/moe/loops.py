"""Routers as loops over tokens in NumPy and float64, each written from its paper's text, for one
group [S, E]."""

import itertools
import math
from typing import Any, NamedTuple

import numpy as np


class Looped(NamedTuple):
    """What a loop decides.

    Arguments:
      combine: [S, E, C] weights.
      dispatch: [S, E, C] slots that are taken.
      loss: the auxiliary loss.
      dropped: of each rank, the choices that found no slot; of expert choice, the tokens.
      skipped: choices that random routing leaves out.
    """

    combine: np.ndarray
    dispatch: np.ndarray
    loss: float
    dropped: list[int]
    skipped: int = 0


def softmax(v):
    """The softmax of one row; it is 0 for an entry of -inf."""
    e = np.exp(v - v.max())
    return e / e.sum()


def ordered(row):
    """Experts by their value, largest first; equal ones by index."""
    return sorted(range(len(row)), key=lambda e: (-row[e], e))


def queued(chosen, weights, mask, capacity, wanted=None, counter="lingvo"):
    """Slots in the order of rank, then token.

    Arguments:
      chosen: [S][k] experts of each token, best first.
      weights: [S][E] weight of an expert in a token's output.
      mask: [S] real tokens.
      capacity: slots.
      wanted: [S][k] choices that random routing keeps; None for all.
      counter: "paper" where the others take a place too.

    Returns:
      combine and dispatch [S, E, C]; of each rank, the choices that found no slot.
    """
    size, experts = weights.shape
    combine, dispatch = np.zeros((2, size, experts, capacity))
    count, dropped = [0] * experts, [0] * len(chosen[0])
    for rank in range(len(chosen[0])):
        for s in mask.nonzero()[0]:
            e, kept = chosen[s][rank], wanted is None or wanted[s][rank]
            if kept and count[e] < capacity:
                combine[s, e, count[e]] = weights[s, e]
                dispatch[s, e, count[e]] = 1
            elif kept:
                dropped[rank] += 1
            if kept or counter == "paper":
                count[e] += 1
    return combine, dispatch, dropped


def shares_loss(gates, chosen, mask):
    """E * sum of (share of an expert in all choices) * (its mean gate), over real tokens."""
    experts, k, real = gates.shape[1], len(chosen[0]), int(mask.sum())
    total = 0.0
    for e in range(experts):
        share = sum(list(chosen[s]).count(e) for s in range(len(mask)) if mask[s]) / (k * real)
        total += share * sum(gates[s, e] for s in range(len(mask)) if mask[s]) / real
    return experts * total


def variation(amounts):
    """Squared coefficient of variation."""
    mean = sum(amounts) / len(amounts)
    return sum((a - mean) ** 2 for a in amounts) / len(amounts) / mean**2


def best(values, k):
    """The k experts with the largest values of each token."""
    return [ordered(row)[:k] for row in values]


def over_chosen(values, chosen, share):
    """Weights [S, E]: of each token, a function of the values of its own experts."""
    weights = np.zeros_like(values)
    for s, own in enumerate(chosen):
        weights[s, own] = share(values[s, own])
    return weights


divided = lambda v: v / v.sum()


softmaxes = lambda rows: np.stack([softmax(row) for row in rows])


def top2(logits, mask, capacity, rnd=None, counter="lingvo", normalise="before"):
    """GShard's Algorithm 1: the second choice is wanted where 2 * g2 > rnd, and the loss, times
    E * E, counts first choices alone."""
    gates, chosen = softmaxes(logits), best(logits, 2)
    weights = over_chosen(gates, chosen, divided)
    wanted = [
        (True, rnd is None or 2 * weights[s, second] > rnd[s])
        for s, (_, second) in enumerate(chosen)
    ]
    combine, dispatch, dropped = queued(chosen, weights, mask, capacity, wanted, counter)
    if normalise == "after":
        divide_by_sums(combine)
    loss = shares_loss(gates, [own[:1] for own in chosen], mask)
    skipped = sum(not kept for (_, kept), real in zip(wanted, mask, strict=True) if real)
    return Looped(combine, dispatch, loss, dropped, skipped)


def divide_by_sums(combine):
    """Weights of the choices of a token that are left are divided by their sum."""
    for row in combine:
        if row.sum() > 0:
            row /= row.sum()


def top_k(logits, mask, capacity, k, normalise="before"):
    """Softmax, the k largest; weights divided by their sum, or not."""
    gates, chosen = softmaxes(logits), best(logits, k)
    weights = over_chosen(gates, chosen, divided) if normalise == "before" else gates
    combine, dispatch, dropped = queued(chosen, weights, mask, capacity)
    if normalise == "after":
        divide_by_sums(combine)
    return Looped(combine, dispatch, shares_loss(gates, chosen, mask), dropped)


def mixtral(logits, mask, capacity, k):
    """Softmax of the k largest logits alone."""
    chosen = best(logits, k)
    slots = queued(chosen, over_chosen(logits, chosen, softmax), mask, capacity)
    return Looped(*slots[:2], shares_loss(softmaxes(logits), chosen, mask), slots[2])


def noisy_top_k(logits, mask, capacity, k, noise, normal):
    """H = xW + normal * softplus(xW_noise); softmax of its k largest. The loss is the variation of
    the importance, and when training that of the load: the probability that H_e is above the k-th
    largest of the others when e's noise is drawn again."""
    experts = logits.shape[1]
    scale = np.log1p(np.exp(noise))
    h = logits if normal is None else logits + normal * scale
    chosen = best(h, k)
    weights = over_chosen(h, chosen, softmax)
    combine, dispatch, dropped = queued(chosen, weights, mask, capacity)
    loss = variation(weights[mask].sum(0))
    if normal is not None:
        load = np.zeros(experts)
        for s, e in itertools.product(mask.nonzero()[0], range(experts)):
            kth = sorted((h[s, o] for o in range(experts) if o != e), reverse=True)[k - 1]
            load[e] += 0.5 * (1 + math.erf((logits[s, e] - kth) / scale[s, e] / math.sqrt(2)))
        loss += variation(load)
    return Looped(combine, dispatch, loss, dropped)


def sigmoid(logits, mask, capacity, k, bias):
    """Sigmoid scores; the k largest of score + bias; weights are shares of the scores."""
    scores = 1 / (1 + np.exp(-logits))
    chosen = best(scores + bias, k)
    slots = queued(chosen, over_chosen(scores, chosen, divided), mask, capacity)
    shares = scores / scores.sum(1, keepdims=True)
    return Looped(*slots[:2], shares_loss(shares, chosen, mask), slots[2])


def expert_choice(logits, mask, capacity):
    """Each expert takes the real tokens that score it highest, the best in its first slot."""
    size, experts = logits.shape
    gates = softmaxes(logits)
    combine, dispatch = np.zeros((2, size, experts, capacity))
    for e in range(experts):
        tokens = [s for s in ordered(gates[:, e]) if mask[s]][:capacity]
        for c, s in enumerate(tokens):
            combine[s, e, c], dispatch[s, e, c] = gates[s, e], 1
    alone = sum(bool(mask[s]) and not dispatch[s].any() for s in range(size))
    return Looped(combine, dispatch, 0.0, [alone])


def looped(
    router, logits, mask, capacity, k=2, *, rnd=None, noise=None, bias=None, **options: Any
) -> Looped:
    """The loop of a router by its name; options are `counter` and `normalise`."""
    given = logits, mask, capacity
    loops = {
        "top2": lambda: top2(*given, rnd, **options),
        # Weighted by the probability among all (Fedus et al. 2021, section 2.1).
        "switch": lambda: top_k(*given, 1, "none"),
        "mixtral": lambda: mixtral(*given, k),
        "noisy_top_k": lambda: noisy_top_k(*given, k, noise, rnd),
        "sigmoid": lambda: sigmoid(*given, k, bias),
        "expert_choice": lambda: expert_choice(*given),
        "top_k": lambda: top_k(*given, k, **options),
    }
    return loops[router]()
