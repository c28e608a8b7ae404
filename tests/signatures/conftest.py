"""What several tests of signatures share."""

from typing import Any

import jax
import pytest


@pytest.fixture(scope="module")
def mesh() -> Any:
    """Two axes of eight devices."""
    return jax.make_mesh((2, 4), ("x", "y"))
