"""Golden files: exact texts. A missing file fails; `SBP_UPDATE_GOLDEN=1` writes it anew."""

import os
from pathlib import Path

FOLDER = Path(__file__).parent / "golden"


def assert_golden(name, text, folder=None):
    path = (folder or FOLDER) / name
    if os.environ.get("SBP_UPDATE_GOLDEN") == "1":
        path.write_text(text, encoding="utf-8")
    assert path.exists(), (
        f"{path.name} is missing; run the test with SBP_UPDATE_GOLDEN=1 and look at what it writes"
    )
    assert text == path.read_text(encoding="utf-8")
