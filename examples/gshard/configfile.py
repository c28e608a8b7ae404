"""A training run as a TOML file: `--config FILE` reads one, `--print-config` writes one."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from examples.gshard.config import TranslationConfig
from sbp.errors import SbpError, nearest
from sbp.moe.config import ModelConfig

_TABLES: Mapping[str, type] = {"model": ModelConfig, "train": TranslationConfig}
"""The tables of a file, and whose fields they hold."""

_KEYS: Mapping[str, type] = {
    "preset": str,
    "mesh": str,
    "workdir": str,
    "tensorboard": bool,
    "evaluate": bool,
}
"""The keys before the tables."""

_KINDS: Mapping[type, str] = {
    str: "text in quotes",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
}


class ConfigFile(NamedTuple):
    """What a file says; nothing of it is required.

    Attributes:
      keys: values of `_KEYS`.
      options: fields of the model and of the training run, as text.
    """

    keys: Mapping[str, Any]
    options: Mapping[str, str]


def read_config(path: str) -> ConfigFile:
    """Read a file.

    Arguments:
      path: of a TOML file with the keys preset, mesh, workdir, tensorboard and evaluate, and the
        tables [model] and [train].

    Raises:
      SbpError: `unknown-option` for a file that cannot be read, is not TOML, or has another key or
        a value of another type, with the nearest name.
    """
    try:
        text = Path(path).read_text("utf-8")
        found = tomllib.loads(text)
    except OSError as error:
        raise _wrong(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise _wrong(f"{path} is not TOML: {error}") from None
    keys: dict[str, Any] = {}
    options: dict[str, str] = {}
    for name, value in found.items():
        place = partial(_place, path, text, name)
        if name in _TABLES:
            if not isinstance(value, dict):
                raise _wrong(f"{place()}: {name} is a table; write [{name}] above its options")
            options |= {k: _text(partial(place, k), name, k, v) for k, v in value.items()}
        elif name in _KEYS:
            if type(value) is not _KEYS[name]:
                raise _wrong(f"{place()}: {name} is {value!r}; it must be {_KINDS[_KEYS[name]]}")
            keys[name] = value
        else:
            raise _unknown(place(), name, "", [*_KEYS, *_TABLES, *_home_of()])
    return ConfigFile(keys, options)


def _place(path: str, text: str, *names: str) -> str:
    """The file and line where a key ends: the first lines that are TOML and hold it."""
    lines = text.splitlines()
    for number in range(1, len(lines) + 1):
        try:
            found: Any = tomllib.loads("\n".join(lines[:number]))
            for name in names:
                found = found[name]
        except (tomllib.TOMLDecodeError, KeyError):
            continue
        return f"{path}:{number}"
    return path


def config_text(
    keys: Mapping[str, str | bool], model: ModelConfig, train: TranslationConfig
) -> str:
    """All options of a run as TOML.

    >>> from examples.gshard.presets import preset
    >>> tiny = preset("tiny-mt")
    >>> print(config_text({"mesh": "data=8"}, tiny.model, tiny.train)[:24])
    mesh = "data=8"
    <BLANKLINE>
    [model]
    """
    lines = [f"{name} = {_toml(value)}" for name, value in keys.items()]
    for table, config in (("model", model), ("train", train)):
        lines += ["", f"[{table}]"]
        lines += [f"{k} = {_toml(v)}" for k, v in dataclasses.asdict(config).items()]
    return "\n".join(lines) + "\n"


def _toml(value: str | bool | float) -> str:
    """A value in TOML, whose strings and booleans are those of JSON."""
    return repr(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


def _text(place: Callable[[], str], table: str, name: str, value: Any) -> str:
    """The value of an option as `--set` takes it."""
    fields = _fields(_TABLES[table])
    if name not in fields:
        raise _unknown(place(), name, f" under [{table}]", fields)
    kind = fields[name]
    if type(value) is not kind and not (kind is float and type(value) is int):
        raise _wrong(f"{place()}: {name} is {value!r} under [{table}]; it must be {_KINDS[kind]}")
    return str(value).lower() if kind is bool else str(value)


def _fields(config: type) -> dict[str, type]:
    """The fields of a configuration, and their types."""
    return get_type_hints(config)


def _home_of() -> dict[str, str]:
    """The table of each field."""
    return {name: table for table, config in _TABLES.items() for name in _fields(config)}


def _unknown(place: str, name: str, under: str, known: Iterable[str]) -> SbpError:
    home = _home_of().get(name)
    hint = f"; it belongs under [{home}]" if home else nearest(name, known)
    return _wrong(f"{place}: no option {name!r}{under}{hint}")


def _wrong(message: str) -> SbpError:
    return SbpError(message, code="unknown-option")
