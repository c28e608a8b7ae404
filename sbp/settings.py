"""Settings of JAX that a function makes for a part of itself, as `with
jax.threefry_partitionable(False)` does. JAX keeps them on the equations of that part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental.xla_metadata import set_xla_metadata

SETTINGS = "settings"
"""The name of an equation's settings among the parameters of its node."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of an equation.

    Arguments:
      threefry_partitionable: the counters that random bits are drawn with.
      xla_metadata: names and values for the operations of the compiled program.
    """

    threefry_partitionable: bool
    xla_metadata: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def current(cls) -> Settings:
        """Those that hold where sbp is called, without metadata: the equations have that."""
        return cls(bool(getattr(jax.config, "jax_threefry_partitionable", True)))

    @classmethod
    def of(cls, eqn: Any, around: tuple[tuple[str, Any], ...] = ()) -> Settings:
        """Those of an equation, with the metadata of the calls around it."""
        metadata = {**dict(around), **(eqn.ctx.xla_metadata or {})}
        return cls(bool(eqn.ctx.threefry_partitionable), tuple(sorted(metadata.items())))

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Under these settings, for what is bound inside."""
        with (
            jax.threefry_partitionable(self.threefry_partitionable),
            set_xla_metadata(**dict(self.xla_metadata)),
        ):
            yield


def compute_type_of(eqn: Any) -> str | None:
    """Where `compute_on` asks for an equation to run, such as `device_host`; None for nowhere
    else. Newer releases of JAX have a primitive for it."""
    return getattr(eqn.ctx, "compute_type", None)


def settings_of(params: dict[str, Any]) -> Settings:
    """The settings among a node's parameters; the current ones where it has none."""
    return params.get(SETTINGS) or Settings.current()


@contextmanager
def holding(params: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Under the settings among a node's parameters; gives the parameters without them."""
    if SETTINGS not in params:
        yield params
        return
    with params[SETTINGS].hold():
        yield {name: value for name, value in params.items() if name != SETTINGS}
