"""Windows for the tests of halo exchange."""

from __future__ import annotations

import numpy as np

from sbp.signatures.kernels.halo import Windows


def drawn_windows(rng: np.random.Generator) -> Windows | None:
    """Windows with every parameter drawn; None where no window fits."""
    size, window, stride, dilation, base = (
        int(rng.integers(a, b)) for a, b in ((1, 20), (1, 5), (1, 4), (1, 4), (1, 4))
    )
    low, high = (int(x) for x in rng.integers(-2, 5, 2))
    padded = (size - 1) * base + 1 + low + high
    reach = (window - 1) * dilation + 1
    if padded < reach:
        return None
    out = (padded - reach) // stride + 1
    return Windows(
        size=size, out=out, stride=stride, low=low, window=window, dilation=dilation, base=base
    )
