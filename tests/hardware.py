"""Hardware for tests: small programs on it are planned as large ones are on real devices."""

from sbp.machine.mesh import Hardware

SENDS_FREELY = Hardware(
    name="sends freely",
    flops_per_second=1e6,
    hbm_bytes_per_second=1e8,
    hbm_bytes=2**34,
    link_bytes_per_second=1e12,
    latency_seconds=1e-9,
)
"""Hardware on which every bit of work is worth sharing, so that small programs take the kernels of
large ones."""
