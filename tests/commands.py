"""A fixture that runs the command line."""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Runs the command line of sbp, checks its exit status, and returns what it prints."""
    from sbp.cli import main  # imports JAX, which reads the environment that conftest sets

    def run(*argv: str, status: int = 0) -> Any:
        assert main(argv) == status, capsys.readouterr().err
        return capsys.readouterr()

    return run
