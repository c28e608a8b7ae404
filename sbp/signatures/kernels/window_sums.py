"""Convolutions whose window is split over devices in uneven shards, as in the gradient of a
convolution by its kernel.

The last devices have fewer window elements than the others; the rest of their shard is padding.
Zeros in its place are not enough: zero times an infinity of the image is NaN, in results that do
not read that element. So each product of an image element and padding must be left out, or have
zeros on both sides. The kernel adds two convolutions. The first reads the image as far as no window
element but padding would be next, and the shard with zeros. The second reads the few elements after
that, which only the last results read: it has a copy of them for each result, each with zeros where
the result does not read.

A zero in the image may meet a non-finite element of the window: every result reads every element of
the window, so that all results are non-finite.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from sbp.signatures.kernels.halo import Windows
from sbp.signatures.kernels.shards import sum_dtype


def rereads(windows: Windows, chunk: int) -> int:
    """The number of the last elements of a shard of the window whose reads lie partly behind the
    first read of the element after the shard.

    Arguments:
      windows: the windows of the convolution.
      chunk: elements of the window in a shard.
    """
    return min(windows.stride * (windows.out - 1) // windows.dilation, chunk)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnevenWindow:
    """A spatial dim whose window is split in uneven shards.

    Arguments:
      number: the number of the spatial dim.
      lhs: its position in the image, which holds what this device's shard of the window reads.
      rhs: its position in the kernel.
      out: its position in the result.
      windows: the windows of the whole convolution.
      real: how many elements of this device's shard of the kernel are not padding; a traced int32.
    """

    number: int
    lhs: int
    rhs: int
    out: int
    windows: Windows
    real: Any

    def first(self, term: Term) -> Term:
        """The products of the shard with the image elements before the first that padding reads."""
        place = lax.broadcasted_iota(jnp.int32, term.lhs.shape, self.lhs)
        kept = place < self.windows.dilation * self.real
        return Term(jnp.where(kept, term.lhs, np.zeros((), term.lhs.dtype)), term.rhs, term.folded)

    def second(self, term: Term, batch: int) -> Term:
        """The other products. Each result has a copy of the image elements that it reads; the
        copies lie along the batch dim.

        Arguments:
          term: the image and the shard.
          batch: position of the batch dim in the image.
        """
        w, d, chunk = self.windows, self.lhs, term.rhs.shape[self.rhs]
        count = rereads(w, chunk)
        after = lax.dynamic_slice_in_dim(
            term.lhs, w.dilation * self.real, w.stride * (w.out - 1) - w.dilation + 1, d
        )
        element = np.arange(count) - count  # counted from the end of the real elements
        read = w.stride * np.arange(w.out)[:, None] + w.dilation * element
        copies = jnp.take(after, np.maximum(read, 0).ravel(), axis=d)
        copies = copies.reshape(*copies.shape[:d], w.out, count, *copies.shape[d + 1 :])
        kept = (read >= 0) & (element + self.real >= 0)
        kept = lax.broadcast_in_dim(kept, copies.shape, (d, d + 1))
        copies = jnp.where(kept, copies, np.zeros((), copies.dtype))
        at = batch + (batch > d)
        copies = jnp.moveaxis(copies, d, at + 1 if at < d else at)
        before = [(count, 0, 0) if e == self.rhs else (0, 0, 0) for e in range(term.rhs.ndim)]
        return Term(
            copies.reshape(*copies.shape[:batch], -1, *copies.shape[batch + 2 :]),
            lax.dynamic_slice_in_dim(
                lax.pad(term.rhs, np.zeros((), term.rhs.dtype), before), self.real, count, self.rhs
            ),
            (*term.folded, self),
        )

    def unfolded(self, result: Any, batch: int) -> Any:
        """A result of copies, with the dim in its place again.

        Arguments:
          result: the convolution of the copies.
          batch: position of the batch dim in the result.
        """
        shape, count = result.shape, self.windows.out
        apart = result.reshape(*shape[:batch], -1, count, *shape[batch + 1 :])
        swapped = jnp.swapaxes(apart, batch + 1, self.out + (self.out > batch))
        return jnp.squeeze(swapped, batch + 1)


@dataclass(frozen=True, slots=True)
class Term:
    """One convolution of a sum.

    Arguments:
      lhs: its image.
      rhs: its kernel.
      folded: the dims whose results lie along the batch dim.
    """

    lhs: Any
    rhs: Any
    folded: tuple[UnevenWindow, ...] = ()


_ALONE = {"window_strides": 1, "rhs_dilation": 1, "padding": (0, 0), "lhs_dilation": 1}
"""The parameters of a convolution along a dim with one result."""


def summed(
    lhs: Any,
    rhs: Any,
    uneven: Sequence[UnevenWindow],
    params: Mapping[str, Any],
    convolve: Callable[..., Any],
) -> Any:
    """The convolution of an image with a shard of a kernel, whose padding is zero.

    Arguments:
      lhs: what the shard reads of the image.
      rhs: the shard.
      uneven: the dims whose window is split in uneven shards.
      params: parameters of the convolution of `lhs` and `rhs`.
      convolve: convolves two arrays; takes changed parameters as keywords.
    """
    numbers = params["dimension_numbers"]
    terms = [Term(lhs, rhs)]
    for dim in uneven:
        several = rereads(dim.windows, rhs.shape[dim.rhs]) > 0
        seconds = [dim.second(t, numbers.lhs_spec[0]) for t in terms] if several else []
        terms = [*(dim.first(t) for t in terms), *seconds]
    if len(terms) == 1:
        return convolve(terms[0].lhs, terms[0].rhs)
    out = params["preferred_element_type"] or jnp.result_type(lhs, rhs)
    results = []
    for term in terms:
        changed = {name: list(params[name]) for name in _ALONE}
        for dim in term.folded:
            for name, value in _ALONE.items():
                changed[name][dim.number] = value
        found = convolve(
            term.lhs,
            term.rhs,
            preferred_element_type=sum_dtype(np.dtype(out)),
            **{name: tuple(value) for name, value in changed.items()},
        )
        for dim in reversed(term.folded):
            found = dim.unfolded(found, numbers.out_spec[0])
        results.append(found)
    return lax.convert_element_type(functools.reduce(jnp.add, results), out)
