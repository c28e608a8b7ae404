"""The figures of the device kinds that sbp knows, each with its source."""

from __future__ import annotations

import dataclasses

from sbp.machine.hardware import Hardware, Network

GIB = 2**30
MIB = 2**20
_HOP = 1e-6  # "about 1 us per hop": jax-ml.github.io/scaling-book, "How to Think About TPUs"
_DCN_LATENCY = 20e-6  # no vendor figure; tens of microseconds from host to host


def _gbit(per_second: float) -> Network:
    return Network(bytes_per_second=per_second * 1e9 / 8, latency_seconds=_DCN_LATENCY)


_H100 = Hardware(
    name="h100",
    # nvidia.com, H100 and H200 data sheets (SXM), without sparsity: BF16, TF32 (JAX's default for
    # float32), FP32.
    flops_per_second=989e12,
    f32_flops_per_second=495e12,
    highest_flops_per_second=67e12,
    hbm_bytes_per_second=3350e9,
    hbm_bytes=80e9,
    # HGX: 18 NVLinks of 25 GB/s each way through NVSwitch, and one 400 Gbit/s adapter a GPU between
    # nodes of eight.
    link_bytes_per_second=450e9,
    latency_seconds=5e-6,
    hop_seconds=1e-6,
    joined_devices=8,
    beyond=Network(bytes_per_second=50e9, latency_seconds=5e-6),
    host_bytes_per_second=64e9,  # PCIe Gen5 x16: 128 GB/s both ways
    platform="cuda",
)

# cloud.google.com/tpu/docs/{v2,v3,v4,v5e,v5p,v6e,tpu7x}: peak in bf16, memory, "bidirectional ICI
# bandwidth per chip" (half of it is one way, over four or six links), pod size, "data center
# network bandwidth". Products of float32 are one pass of bf16 by default and six at `HIGHEST`. To
# host memory: 15 GB/s a chip over PCIe, of the scaling book (link at `_HOP`). `fast_memory_bytes`:
# VMEM of one core (`jax.experimental.pallas.tpu.get_tpu_info`); of v4 CMEM, Jouppi et al., TPU v4,
# ISCA 2023. `vector_flops_per_second` and `product_rows` are the estimates of libtpu 0.0.51
# (`python -m benchmarks.few_rows`); those of v2 are v3's at its clock. v7x takes a single row as it
# takes more rows, and its `product_rows` are v6e's.
HARDWARE: dict[str, Hardware] = {
    h.name: h
    for h in (
        # Two devices (cores) a chip. Links are 496 (v2) and 656 (v3) Gbit/s: Jouppi et al., A
        # Domain-Specific Supercomputer for Training Deep Neural Networks, CACM 63(7), 2020. Half of
        # that is taken to be one way: it gives the all-to-all times that the GShard paper measured
        # on v3 (figure 8), which twice as much does not (`benchmarks/gshard/figure8.py`).
        Hardware(
            name="tpu-v2",
            flops_per_second=22.5e12,
            highest_flops_per_second=22.5e12 / 6,
            vector_flops_per_second=104e9,
            product_rows=64,
            hbm_bytes_per_second=350e9,
            hbm_bytes=8 * GIB,
            fast_memory_bytes=16 * MIB,
            topology="torus",
            link_bytes_per_second=31e9,
            devices_per_chip=2,
            hop_seconds=_HOP,
        ),
        Hardware(
            name="tpu-v3",
            flops_per_second=61.5e12,
            highest_flops_per_second=61.5e12 / 6,
            vector_flops_per_second=138e9,
            product_rows=64,
            hbm_bytes_per_second=450e9,
            hbm_bytes=16 * GIB,
            fast_memory_bytes=16 * MIB,
            topology="torus",
            link_bytes_per_second=41e9,
            devices_per_chip=2,
            hop_seconds=_HOP,
        ),
        # One device a chip from here on, but for TPU7x. v4: 50 GB/s a link one way (Jouppi et al.,
        # TPU v4, ISCA 2023). Which slices have rings is from the scaling book (link at `_HOP`): v4
        # and v5p those of whole cubes of 4 chips a side, v5e and v6e those of whole sides of a pod,
        # 16. TPU7x is taken to be as v5p. On v2 and v3 every dim is taken for a ring: half the rate
        # on twice the links is what agrees with the paper's figure.
        Hardware(
            name="tpu-v4",
            flops_per_second=275e12,
            highest_flops_per_second=275e12 / 6,
            vector_flops_per_second=154e9,
            product_rows=64,
            hbm_bytes_per_second=1228e9,
            hbm_bytes=32 * GIB,
            fast_memory_bytes=128 * MIB,
            topology="torus",
            torus_dims=3,
            link_bytes_per_second=50e9,
            ring_chips=4,
            hop_seconds=_HOP,
        ),
        Hardware(
            name="tpu-v5e",
            flops_per_second=197e12,
            highest_flops_per_second=197e12 / 6,
            vector_flops_per_second=210e9,
            product_rows=48,
            hbm_bytes_per_second=819e9,
            hbm_bytes=16 * GIB,
            fast_memory_bytes=128 * MIB,
            topology="torus",
            link_bytes_per_second=50e9,
            ring_chips=16,
            hop_seconds=_HOP,
            joined_devices=256,
            beyond=_gbit(25),
        ),
        Hardware(
            name="tpu-v5p",
            flops_per_second=459e12,
            highest_flops_per_second=459e12 / 6,
            vector_flops_per_second=602e9,
            product_rows=64,
            hbm_bytes_per_second=2765e9,
            hbm_bytes=95 * GIB,
            fast_memory_bytes=64 * MIB,
            topology="torus",
            torus_dims=3,
            link_bytes_per_second=100e9,
            ring_chips=4,
            hop_seconds=_HOP,
            joined_devices=6144,  # the largest slice
            beyond=_gbit(50),
        ),
        Hardware(
            name="tpu-v6e",
            flops_per_second=918e12,
            highest_flops_per_second=918e12 / 6,
            vector_flops_per_second=433e9,
            product_rows=192,
            hbm_bytes_per_second=1638e9,
            hbm_bytes=32 * GIB,
            fast_memory_bytes=128 * MIB,
            topology="torus",
            link_bytes_per_second=100e9,
            ring_chips=16,
            hop_seconds=_HOP,
            joined_devices=256,
            beyond=_gbit(100),
        ),
        # Ironwood: a chip is two devices, so half of a chip's compute and memory each.
        Hardware(
            name="tpu-v7x",
            flops_per_second=2307e12 / 2,
            highest_flops_per_second=2307e12 / 12,
            product_rows=192,
            hbm_bytes_per_second=7380e9 / 2,
            hbm_bytes=96 * GIB,
            fast_memory_bytes=64 * MIB,
            topology="torus",
            torus_dims=3,
            link_bytes_per_second=100e9,
            devices_per_chip=2,
            ring_chips=4,
            hop_seconds=_HOP,
            joined_devices=2 * 9216,
            beyond=_gbit(50),
        ),
        _H100,
        dataclasses.replace(_H100, name="h200", hbm_bytes_per_second=4800e9, hbm_bytes=141e9),
        # Simulated host devices share one memory: a collective is a copy and a rendezvous of
        # threads.
        Hardware(
            name="cpu",
            flops_per_second=50e9,
            hbm_bytes_per_second=10e9,
            hbm_bytes=16 * GIB,
            link_bytes_per_second=2e9,
            latency_seconds=20e-6,
            overlaps=False,
            host_bytes_per_second=10e9,
            platform="cpu",
        ),
    )
}
"""Hardware by name; figures are the vendors' published peaks, per JAX device."""

_KINDS = (
    ("tpu v2", "tpu-v2"),
    ("tpu v3", "tpu-v3"),
    ("tpu v4", "tpu-v4"),
    ("tpu v5 lite", "tpu-v5e"),
    ("tpu v5e", "tpu-v5e"),
    ("tpu v5", "tpu-v5p"),
    ("tpu v6", "tpu-v6e"),
    ("tpu7x", "tpu-v7x"),
    ("h200", "h200"),
    ("h100", "h100"),
    ("cpu", "cpu"),
)
"""Parts of `Device.device_kind` in lower case, each with its hardware; the first match counts. The
libtpu 0.0.51 compiler writes `TPU v5 lite` and `TPU7x`."""


def hardware_of_kind(device_kind: str, platform: str) -> Hardware:
    """The hardware of a JAX device; for a kind that is not in the table an entry of its platform.

    Arguments:
      device_kind: `Device.device_kind`.
      platform: `Device.platform`.

    >>> hardware_of_kind("TPU v5 lite", "tpu").name
    'tpu-v5e'
    """
    kind = device_kind.lower()
    found = next((name for part, name in _KINDS if part in kind), None)
    return HARDWARE[found or {"gpu": "h100", "tpu": "tpu-v6e"}.get(platform, "cpu")]
