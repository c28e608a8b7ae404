"""The committed page docs/signatures.md is the one that the rules give."""

from __future__ import annotations

import os
import re
from pathlib import Path

import jax
import pytest
from page import page

from sbp.signatures import known_primitives

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "signatures.md"
LOWEST = re.search(r'"jax>=([\d.]+)', (ROOT / "pyproject.toml").read_text("utf-8"))


def test_the_page_is_what_the_rules_yield():
    """Written on the lowest supported JAX, as newer ones have more primitives."""
    assert LOWEST is not None
    if jax.__version__ != LOWEST[1]:
        pytest.skip(f"the page is written with JAX {LOWEST[1]}")
    text = page()
    if os.environ.get("SBP_UPDATE_GOLDEN") == "1":
        PAGE.write_text(text, encoding="utf-8")
    assert PAGE.exists(), (
        f"{PAGE.name} is missing; run this test with SBP_UPDATE_GOLDEN=1 and look at what it writes"
    )
    committed = PAGE.read_text("utf-8").splitlines()
    assert text.splitlines() == committed, (
        "run this test with SBP_UPDATE_GOLDEN=1 after a change of rules or samples"
    )


def test_the_page_names_every_primitive():
    text = PAGE.read_text("utf-8")
    assert not [name for name in known_primitives() if f"| `{name}` |" not in text]
