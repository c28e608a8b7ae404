"""Signatures that users register: for their own primitives, Pallas kernels and functions with
`custom_partitioning`.

sbp checks a registered signature on numbers before it types a program with it
(`sbp.infer.registered`).
"""

from __future__ import annotations

import contextlib
import gc
import re
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from sbp import _jax
from sbp.errors import SbpError, nearest
from sbp.kinds import FLAG, Kind, refuse_unless, shown, takes
from sbp.signatures.fallback import FALLBACK, REFUSED, TYPED_BY_SBP
from sbp.signatures.laws.refutation import Custom, Rows, Sample, parse_row
from sbp.signatures.rule import (
    LocalContext,
    Row,
    Rule,
    add_rule,
    known_primitives,
    remove_rule,
)
from sbp.signatures.traits import Traits

NAMED = ("pallas_call", "custom_partitioning")
"""Primitives that call a function. A signature is for the function, by the name
`pallas_call:NAME`."""

_CUSTOM: dict[str, Custom] = {}
"""Registered signatures, by the name of the operation."""


_LOCAL = Kind(
    "a function of a LocalContext and a device's parts, or None", lambda x: x is None or callable(x)
)
_SAMPLE = Kind(
    "a pair of a function and a tuple of its arguments",
    lambda x: isinstance(x, tuple) and len(x) == 2 and callable(x[0]) and isinstance(x[1], tuple),
)
_SAMPLES = Kind(
    "a list of samples, such as [(f, (x,))]",
    lambda x: isinstance(x, Sequence) and not isinstance(x, str),
)


@takes("signatures.register", local=_LOCAL, samples=_SAMPLES, even=FLAG, replace=FLAG)
def register(
    primitive: Any,
    rows: Rows = (),
    *,
    local: Callable[..., Any] | None = None,
    samples: Sequence[Sample] = (),
    even: bool = False,
    replace: bool = False,
) -> None:
    """Gives an operation a signature.

    When a program with the operation is typed for the first time, sbp checks the rows on numbers:
    for the shapes of the equation and of the samples, on mesh axes of size 2, of size 3 and of the
    program's sizes up to 64. For each row, sbp cuts the operands into adversarial parts (sums that
    cancel, padding of NaN), runs `local` on the parts of each device, and compares the value that
    the parts of the results stand for with the result of the operation on whole operands.

    Arguments:
      primitive: a JAX primitive or its name; for the call of a function, `pallas_call:NAME` or
          `custom_partitioning:NAME`.
      rows: the rows on one mesh axis besides all-B, each as a `Row` or as text; or a function from
          an `Op` to them.
      local: computes one device's parts of the results from its parts of the operands, as
          `local(ctx, *parts)` with a `LocalContext` first. None runs the primitive itself with the
          same parameters. A Pallas kernel has shapes among its parameters, so it always needs
          `local`.
      samples: `(function, arguments)` pairs; each function calls a small instance of the operation.
          Samples are needed where the operands and results of a program have more than 4,096
          elements together. Arguments may be `jax.ShapeDtypeStruct`s.
      even: whether the rows hold only where the axis size divides the dims that they split.
      replace: whether to replace a signature that was registered before. Signatures of sbp itself
          cannot be replaced.

    Raises:
      SbpError: `unknown-option` for a name that no primitive has; `bad-argument` for an operation
          that has a signature already or can have none; `type-syntax` for a row whose text does not
          parse. At the first use, `wrong-signature` with a counterexample.

    >>> import jax.extend
    >>> twice_p = jax.extend.core.Primitive("twice")
    >>> register(twice_p, ["S(0) -> S(0)", "P(sum) -> P(sum)"])
    >>> unregister(twice_p)
    """
    name = _name(primitive)
    rows = _given_rows(rows)
    refuse_unless(_SAMPLE, "signatures.register", "each sample", samples)
    _make_way(name, replace)
    custom = Custom(
        name=name, rows=rows, even=even, samples=tuple(samples), place=_jax.caller_span()
    )
    add_rule(
        Rule(
            name=name,
            rows=custom.rows_of,
            traits=Traits(),
            local=None if local is None else _on_parts(local),
        )
    )
    _CUSTOM[name] = custom


def _given_rows(rows: Rows) -> Rows:
    """The rows that a user gave, text parsed; a function unchanged.

    Raises:
      SbpError: for anything else.
    """
    if isinstance(rows, str) or not (callable(rows) or isinstance(rows, Sequence | AbstractSet)):
        raise SbpError(
            'rows= is a list of rows, such as ["S(0) -> S(0)"], or a function from an Op to one;'
            f" got {shown(rows)}"
        )
    if callable(rows):
        return rows
    return tuple(parse_row(r) if isinstance(r, str) else _row(r) for r in rows)


def _make_way(name: str, replace: bool) -> None:
    """Removes the registered signature that a new one replaces.

    Raises:
      SbpError: if the operation has a signature that stays.
    """
    known = _CUSTOM.get(name)
    if name in known_primitives() and (known is None or not replace):
        where = (
            "which sbp gives it"
            if known is None
            else f"registered at {known.place}; replace=True replaces it"
        )
        raise SbpError(f"{name!r} has a signature already, {where}")
    if known is not None:
        remove_rule(name)


@takes("signatures.unregister")
def unregister(primitive: Any) -> None:
    """Removes a registered signature. Programs that were compiled with it keep it.

    Raises:
      SbpError: `bad-argument` for an operation without a registered signature.
    """
    name = _name(primitive, known=_CUSTOM)
    if name not in _CUSTOM:
        raise SbpError(f"no signature was registered for {shown(name)}{nearest(name, _CUSTOM)}")
    remove_rule(name)
    del _CUSTOM[name]


@takes("signatures.registered")
@contextlib.contextmanager
def registered(primitive: Any, rows: Rows = (), **options: Any) -> Iterator[None]:
    """Registers a signature while the context lasts.

    Arguments:
      primitive: the operation, as for `register`.
      rows: its rows, as for `register`.
      options: the other arguments of `register`.

    Raises:
      SbpError: as `register`.
    """
    register(primitive, rows, **options)
    try:
        yield
    finally:
        unregister(primitive)


def custom_for(name: str) -> Custom | None:
    """The registered signature of an operation; None for an operation without one."""
    return _CUSTOM.get(name)


def _row(row: Any) -> Row:
    """Returns the row.

    Raises:
      SbpError: if it is no `Row`.
    """
    if not isinstance(row, Row):
        raise SbpError(f"a row is a `Row` or a text such as 'S(0), B -> S(0)', got {shown(row)}")
    return row


def _name(primitive: Any, known: Any = ()) -> str:
    """The name under which a signature is registered.

    Arguments:
      primitive: a JAX primitive or a name.
      known: names that need no primitive to exist.

    Raises:
      SbpError: for an argument that names no operation, or one that can have no signature.
    """
    if isinstance(primitive, _jax.Primitive):
        name = primitive.name
    elif isinstance(primitive, str):
        name = primitive
    else:
        raise SbpError(f"a signature is for a JAX primitive or its name, got {shown(primitive)}")
    if name in NAMED:
        raise SbpError(
            f"{name!r} calls a function, and signatures are for functions: register '{name}:NAME'"
        )
    if name in REFUSED:
        raise SbpError(f"{name!r} takes no signature: it {REFUSED[name]}")
    if name in TYPED_BY_SBP:
        raise SbpError(f"{name!r} takes no signature: {FALLBACK[name]}")
    if (
        isinstance(primitive, str)
        and name not in known
        and not re.fullmatch(rf"({'|'.join(NAMED)}):[\w.-]+", name)
    ):
        primitives = {p.name for p in gc.get_objects() if isinstance(p, _jax.Primitive)}
        if name not in primitives:
            close = nearest(name, primitives)
            hint = close if "did you mean" in close else "; import first what defines it"
            raise SbpError(f"no primitive is named {shown(name)}{hint}", code="unknown-option")
    return name


def _on_parts(local: Callable[..., Any]) -> Callable[[LocalContext, Sequence[Any]], list[Any]]:
    """A user's `local` as the `local` of a `Rule`: takes the parts as a list, and returns a
    list."""

    def run(ctx: LocalContext, args: Sequence[Any]) -> list[Any]:
        out = local(ctx, *args)
        return list(out) if isinstance(out, tuple | list) else [out]

    return run
