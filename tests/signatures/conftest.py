"""What several tests of signatures share."""

import jax
import pytest


@pytest.fixture(scope="module")
def mesh():
    """Two axes of eight devices."""
    return jax.make_mesh((2, 4), ("x", "y"))
