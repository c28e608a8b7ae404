"""Costly annotations and a memory limit, told by programs that carry their expectations as comments
on the line."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest

import sbp
from sbp.machine.mesh import HARDWARE
from tests.explain.expected import MESH, SQUARE, diagnose, shape


def test_a_costly_annotation_is_named_with_its_price():
    def program(x, w1, w2):
        h = x @ w1
        h = sbp.replicate(h, "tensor")  # warning: costly-annotation: pinning h to tensor:B makes the plan
        return (jnp.tanh(h) @ w2).sum()

    big = shape(4096, 4096)
    (d,) = diagnose(program, big, big, big, boxing="auto", in_types=("tensor:S(0)", None, None))
    assert d.severity == "warning"
    assert d.primary is not None
    assert "per device with it" in d.primary.text
    free = sbp.jit(lambda x, w1, w2: (jnp.tanh(x @ w1) @ w2).sum(), MESH, in_types=("tensor:S(0)", None, None)).plan(big, big, big)
    assert d.helps[0].bytes_per_device == free.cost.bytes_per_device


def test_annotations_that_cost_nothing_are_not_named():
    def program(x, w1, w2):
        h = sbp.split(x @ w1, 0, "tensor")
        return (jnp.tanh(sbp.split(h, 0, "tensor")) @ w2).sum()

    big = shape(4096, 4096)
    assert diagnose(program, big, big, big, boxing="auto", in_types=("tensor:S(0)", None, None)) == ()


def test_only_the_dear_one_of_several_annotations_is_named():
    def program(x, w1, w2):
        x = sbp.split(x, 0, "tensor")
        w1 = sbp.replicate(w1, "tensor")
        h = sbp.split(x @ w1, 1, "tensor")  # warning: costly-annotation: pinning h to tensor:S(1) makes the plan
        return (jnp.tanh(sbp.split(h, 0, "tensor")) @ w2).sum()

    deep, wide, square = shape(4096, 32768), shape(32768, 4096), shape(4096, 4096)
    diagnose(program, deep, wide, square, boxing="auto", in_types=("tensor:S(0)", None, None))


def test_annotations_that_cost_next_to_nothing_are_not_named():
    """Below 10 microseconds a warning is noise, unless the plan moves a MiB and a tenth of it for the annotation."""

    def program(x, w1, w2):
        return (jnp.tanh(sbp.replicate(x @ w1, "tensor")) @ w2).sum()

    def warned(size, hardware):
        f = sbp.jit(program, MESH, in_types=("tensor:S(0)", None, None), hardware=hardware)
        return bool(f.check(*[shape(size, size)] * 3).diagnostics)

    slow = dataclasses.replace(HARDWARE["tpu-v3"], latency_seconds=0.0)
    fast = dataclasses.replace(slow, link_bytes_per_second=slow.link_bytes_per_second * 100)
    assert [warned(size, slow) for size in (64, 1024)] == [False, True]
    assert [warned(size, fast) for size in (64, 1024)] == [False, True]


def test_memory_limit_names_what_is_large():
    def program(x, w1, w2):
        h = jax.nn.relu(x @ w1)
        return h @ w2

    with pytest.raises(sbp.SbpTypeError) as raised:
        sbp.jit(program, MESH, memory_limit=1e4).plan(SQUARE, SQUARE, SQUARE)
    (d,) = raised.value.diagnostics
    assert d.code == "memory-limit"
    assert re.fullmatch(r"no typing was found that fits 9\.8 KiB per device; the least is [\d.]+ MiB per device", d.title)
    assert any(re.match(r"(x|w1|w2|h) of shape \(1024, 1024\) as .* takes [\d.]+ [KM]iB per device", n) for n in d.notes)
