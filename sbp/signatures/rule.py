"""What a signature is: rows over one mesh axis, looked up by primitive name in the only
registry."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sbp import _jax
from sbp.errors import SbpInternalError
from sbp.signatures.traits import Traits
from sbp.types import Atom, B


@dataclass(frozen=True, slots=True)
class Row:
    """One signature on one mesh axis: atoms of the operands give atoms of the results.

    Arguments:
      ins: one atom for each operand.
      outs: one atom for each result.
      kernel: what runs on the shards; `local` is the primitive itself.
    """

    ins: tuple[Atom, ...]
    outs: tuple[Atom, ...]
    kernel: str = "local"

    def __repr__(self) -> str:
        return f"{', '.join(map(repr, self.ins))} -> {', '.join(map(repr, self.outs))}"


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """An equation as a rule sees it, on shapes already localised by the outer mesh axes.

    Arguments:
      name: the primitive's name.
      params: its parameters (global: a rule reads dims from them, never sizes).
      ins: avals of the operands.
      outs: avals of the results.
      axis_size: size of the mesh axis that rows are asked for.
    """

    name: str
    params: dict[str, Any]
    ins: tuple[Any, ...]
    outs: tuple[Any, ...]
    axis_size: int

    def divides(self, size: int) -> bool:
        """Whether a dim of this size splits evenly over the axis."""
        return size % self.axis_size == 0


class LocalContext(Protocol):
    """What a local kernel may know of its place: the op on global shapes, and this device's
    shards."""

    params: dict[str, Any]
    global_ins: tuple[Any, ...]
    global_outs: tuple[Any, ...]
    local_ins: tuple[tuple[int, ...], ...]
    local_outs: tuple[tuple[int, ...], ...]
    primitive: Any

    def out_offset(self, result: int, dim: int) -> Any:
        """Global index of element 0 of this device's shard of a result, along one dim (a traced
        int32 or 0)."""
        ...

    def in_offset(self, operand: int, dim: int) -> Any:
        """Global index of element 0 of this device's shard of an operand, along one dim (a traced
        int32 or 0)."""
        ...

    def in_extent(self, operand: int, dim: int) -> Any:
        """How many elements of this device's shard of an operand are real along one dim; the others
        are padding.

        A Python int, the shard's own size, where every split of the dim is even; else a traced
        int32.
        """
        ...

    def in_axes(self, operand: int, dim: int) -> tuple[tuple[str, int], ...]:
        """Names and sizes of the mesh axes that split a dim of an operand, outer first: what a
        kernel's collectives run over."""
        ...

    def out_axes(self, result: int, dim: int) -> tuple[tuple[str, int], ...]:
        """Names and sizes of the mesh axes that split a dim of a result, outer first."""
        ...

    def permute(self, x: Any, axis: str, pairs: Sequence[tuple[int, int]]) -> Any:
        """What the source of this device's (source, destination) pair holds; anything where it is
        no destination."""
        ...

    def is_first_device(self) -> Any:
        """True on the device whose index is 0 on every mesh axis."""
        ...


@dataclass(frozen=True, slots=True)
class Sent:
    """What a kernel sends over one mesh axis each time it runs.

    Arguments:
      kind: the collective, in the plan's words.
      bytes: bytes one device sends.
      rounds: how many collectives, each of which pays its start-up time.
    """

    kind: str
    bytes: float
    rounds: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """What a row runs on the shards, by name.

    Arguments:
      name: the name that rows give.
      summary: what it does, in a line.
      sends: for an op on shapes that all other mesh axes have localised, what the kernel sends over
          this one; None when it is local.
      widens: for (operand, dim), how long its shard is once the exchange along that dim, which
          comes before those of later dims, is done.
      nests: whether other mesh axes may split the same dims.
      gathers: the operand whose shards all devices get to see: for the other mesh axes it is whole.
      overlaps: whether the device computes while it sends.
    """

    name: str
    summary: str
    sends: Callable[[Op, Row], tuple[Sent, ...]] | None = None
    widens: Callable[[Op, Row], tuple[tuple[int, int, int], ...]] | None = None
    nests: bool = True
    gathers: int | None = None
    overlaps: bool = False

    @property
    def communicates(self) -> bool:
        """Whether the kernel has collectives of its own."""
        return self.sends is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The signature of a primitive.

    Arguments:
      name: the primitive's name.
      rows: the rows for an op; all operands and results B is always among them.
      traits: what the operator is, beside its rows.
      local: computes shards of the results from shards of the operands; None binds the primitive
          with the same parameters.
      reason: for a rule with the all-B row alone, why that is right.
    """

    name: str
    rows: Callable[[Op], Sequence[Row]]
    traits: Traits
    local: Callable[[LocalContext, Sequence[Any]], list[Any]] | None = None
    reason: str = ""


_RULES: dict[str, Rule] = {}
_KERNELS: dict[str, Kernel] = {}


def names(text: str) -> tuple[str, ...]:
    """Names from a text with blanks between them: tables of primitives read better without
    quotes."""
    return tuple(text.split())


def add_rule(rule: Rule) -> None:
    """Enters a rule; a second one for the same primitive is an error."""
    if rule.name in _RULES:
        raise SbpInternalError(f"two rules for primitive {rule.name!r}")
    _RULES[rule.name] = rule


def remove_rule(name: str) -> None:
    """Takes a rule back; for signatures that users registered."""
    del _RULES[name]


def add_kernel(kernel: Kernel) -> Kernel:
    """Enters a kernel; a second one of the same name is an error."""
    if kernel.name in _KERNELS:
        raise SbpInternalError(f"two kernels named {kernel.name!r}")
    _KERNELS[kernel.name] = kernel
    return kernel


def kernel_named(name: str) -> Kernel:
    """The kernel of a row."""
    if name not in _KERNELS:
        raise SbpInternalError(f"no kernel named {name!r}: a row gives it, nothing enters it")
    return _KERNELS[name]


def known_kernels() -> tuple[Kernel, ...]:
    """All kernels, by name."""
    return tuple(_KERNELS[name] for name in sorted(_KERNELS))


add_kernel(Kernel(name="local", summary="the primitive itself"))


def rule_for(name: str) -> Rule | None:
    """The rule of a primitive, or None."""
    return _RULES.get(name)


def known_primitives() -> tuple[str, ...]:
    """Names of all primitives with a rule, sorted."""
    return tuple(sorted(_RULES))


TraitsOf = Traits | Callable[[str], Traits]
"""The traits of all primitives of one rule, or a function from a primitive's name to its traits."""


def rule(
    *names: str,
    traits: TraitsOf | None = None,
    local: Callable[[LocalContext, Sequence[Any]], list[Any]] | None = None,
) -> Callable[[Callable[[Op], Sequence[Row]]], Any]:
    """Decorator: `@rule("rev", traits=Traits(moves=True))` on a function from an op to its rows
    besides all-B.

    Arguments:
      names: the primitives that the rule is for.
      traits: what they are, beside their rows.
      local: what runs on the shards, as in `Rule`.

    Raises:
      SbpInternalError: for a rule without traits, and for a second rule of a primitive.
    """

    def enter(rows: Callable[[Op], Sequence[Row]]) -> Callable[[Op], Sequence[Row]]:
        file = rows.__code__.co_filename if inspect.isfunction(rows) else "the rule's file"
        for name in names:
            known = _given_traits(name, traits, file)
            all_rows = functools.partial(_with_all_b, rows)
            add_rule(Rule(name=name, rows=all_rows, traits=known, local=local))
        return rows

    return enter


def _given_traits(name: str, traits: TraitsOf | None, file: str) -> Traits:
    if traits is None:
        raise SbpInternalError(
            f"the rule of primitive {name!r} has no traits: give `traits=Traits(..)` in {file}"
        )
    return traits if isinstance(traits, Traits) else traits(name)


def _with_all_b(rows: Callable[[Op], Sequence[Row]], op: Op) -> tuple[Row, ...]:
    found = dict.fromkeys((all_b(op), *rows(op)))
    return tuple(found)


def all_b(op: Op) -> Row:
    """The row that is always right: everything B."""
    return Row((B,) * len(op.ins), (B,) * len(op.outs))


def replicated(*names: str, reason: str, traits: TraitsOf | None = None) -> None:
    """Enters rules that have the all-B row alone.

    Arguments:
      names: the primitives.
      reason: why all-B alone is right.
      traits: what the primitives are, beside their rows.

    Raises:
      SbpInternalError: for a rule without traits, and for a second rule of a primitive.
    """
    file = inspect.stack()[1].filename
    for name in names:
        known = _given_traits(name, traits, file)
        add_rule(Rule(name=name, rows=lambda op: (all_b(op),), traits=known, reason=reason))


def bind_with(ctx: LocalContext, args: Sequence[Any], **changes: Any) -> list[Any]:
    """Binds the primitive on shards with some parameters replaced; shardings in parameters are
    dropped."""
    params = {k: None if k in ("sharding", "out_sharding") else v for k, v in ctx.params.items()}
    return _jax.bind(ctx.primitive, args, params | changes)
