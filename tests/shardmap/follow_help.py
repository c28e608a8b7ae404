"""Follows a help of the checker by its fields: its edits are made, and nothing else is done."""

import importlib.util
import sys
from typing import Any

from sbp.errors import Help, OptionEdit
from tests.edits import edited_text, split_edits


def followed(help_: Help, source: str) -> tuple[str, list[OptionEdit]]:
    """The edited source, and the arguments of `jax.shard_map` that change."""
    edits, options = split_edits(help_.edits)
    assert edits or options, help_.text
    return edited_text(source, edits), options


def respecified(specs: Any, options: list[OptionEdit]) -> Any:
    """The out_specs of a program after edits of them; one spec stands for all results."""
    for edit in options:
        assert (edit.option, edit.function) == ("out_specs", "jax.shard_map")
        if type(specs) is tuple:
            specs = tuple(edit.value if i == edit.position else s for i, s in enumerate(specs))
        else:
            assert edit.position == 0
            specs = edit.value
    return specs


def module(source, path):
    """A source text as a module; written to a file, since the checker reads it."""
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = made  # where dataclasses look for annotations
    try:
        spec.loader.exec_module(made)
    finally:
        del sys.modules[path.stem]
    return made
