"""What several tests of signatures share."""

import pytest

import sbp


@pytest.fixture(scope="module")
def mesh():
    """Two axes of eight devices."""
    return sbp.make_mesh((2, 4), ("x", "y"))
