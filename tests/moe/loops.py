"""Routers as loops over tokens in NumPy and float64, each written from its paper's text, for one
group [S, E]."""

from __future__ import annotations

import math

import numpy as np


def softmax(v):
    """Of one row; an entry of -inf gets 0."""
    e = np.exp(v - v.max())
    return e / e.sum()


def ordered(row):
    """Experts by their value, largest first; equal ones by index."""
    return sorted(range(len(row)), key=lambda e: (-row[e], e))


def queued(chosen, weights, mask, capacity):
    """Slots in the order of rank, then token.

    Arguments:
      chosen: [S][k] experts of each token, best first.
      weights: [S][E] weight of an expert in a token's output.
      mask: [S] real tokens.
      capacity: slots.

    Returns:
      combine and dispatch [S, E, C]; the choices that found none.
    """
    size, experts = weights.shape
    combine, dispatch = np.zeros((2, size, experts, capacity))
    count, dropped = [0] * experts, 0
    for rank in range(len(chosen[0])):
        for s in range(size):
            if not mask[s]:
                continue
            e = chosen[s][rank]
            if count[e] < capacity:
                combine[s, e, count[e]] = weights[s, e]
                dispatch[s, e, count[e]] = 1
                count[e] += 1
            else:
                dropped += 1
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


def top_k(logits, mask, capacity, k, normalise="before"):
    """Softmax, the k largest; weights divided by their sum, or not."""
    gates = np.stack([softmax(row) for row in logits])
    chosen = [ordered(row)[:k] for row in logits]
    weights = gates.copy()
    if normalise == "before":
        for s, own in enumerate(chosen):
            weights[s] /= gates[s, own].sum()
    combine, dispatch, dropped = queued(chosen, weights, mask, capacity)
    if normalise == "after":
        for s in range(len(mask)):
            if combine[s].sum() > 0:
                combine[s] /= combine[s].sum()
    return combine, dispatch, shares_loss(gates, chosen, mask), dropped


def switch(logits, mask, capacity):
    """The best expert, weighted by its probability among all (Fedus et al. 2021, section 2.1)."""
    return top_k(logits, mask, capacity, 1, "none")


def mixtral(logits, mask, capacity, k):
    """Softmax of the k largest logits alone."""
    gates = np.stack([softmax(row) for row in logits])
    chosen = [ordered(row)[:k] for row in logits]
    weights = np.zeros_like(gates)
    for s, own in enumerate(chosen):
        weights[s, own] = softmax(logits[s, own])
    combine, dispatch, dropped = queued(chosen, weights, mask, capacity)
    return combine, dispatch, shares_loss(gates, chosen, mask), dropped


def noisy_top_k(logits, mask, capacity, k, noise, normal):
    """H = xW + normal * softplus(xW_noise); softmax of its k largest. The loss is the variation of
    the importance, and when training that of the load: the probability that H_e is above the k-th
    largest of the others when e's noise is drawn again."""
    experts = logits.shape[1]
    scale = np.log1p(np.exp(noise))
    h = logits if normal is None else logits + normal * scale
    chosen = [ordered(row)[:k] for row in h]
    weights = np.zeros_like(h)
    load = np.zeros(experts)
    for s, own in enumerate(chosen):
        weights[s, own] = softmax(h[s, own])
        for e in range(experts):
            if mask[s] and normal is not None:
                kth = sorted((h[s, o] for o in range(experts) if o != e), reverse=True)[k - 1]
                z = (logits[s, e] - kth) / scale[s, e]
                load[e] += 0.5 * (1 + math.erf(z / math.sqrt(2)))
    combine, dispatch, dropped = queued(chosen, weights, mask, capacity)
    loss = variation(weights[mask].sum(0))
    return combine, dispatch, loss + (variation(load) if normal is not None else 0), dropped


def sigmoid(logits, mask, capacity, k, bias):
    """Sigmoid scores; the k largest of score + bias; weights are shares of the scores."""
    scores = 1 / (1 + np.exp(-logits))
    chosen = [ordered(row)[:k] for row in scores + bias]
    weights = np.zeros_like(scores)
    for s, own in enumerate(chosen):
        weights[s, own] = scores[s, own] / scores[s, own].sum()
    combine, dispatch, dropped = queued(chosen, weights, mask, capacity)
    shares = scores / scores.sum(1, keepdims=True)
    return combine, dispatch, shares_loss(shares, chosen, mask), dropped


def expert_choice(logits, mask, capacity):
    """Each expert takes the real tokens that score it highest, the best in its first slot."""
    size, experts = logits.shape
    gates = np.stack([softmax(row) for row in logits])
    combine, dispatch = np.zeros((2, size, experts, capacity))
    for e in range(experts):
        tokens = [s for s in ordered(gates[:, e]) if mask[s]][:capacity]
        for c, s in enumerate(tokens):
            combine[s, e, c], dispatch[s, e, c] = gates[s, e], 1
    alone = sum(bool(mask[s]) and not dispatch[s].any() for s in range(size))
    return combine, dispatch, 0.0, alone
