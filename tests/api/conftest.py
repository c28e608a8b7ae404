"""What several tests of the public functions share."""

import pytest

import sbp


@pytest.fixture(scope="module")
def mesh():
    """Two axes of eight devices."""
    return sbp.make_mesh((2, 4), ("x", "y"))
