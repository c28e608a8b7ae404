"""The types of tensors on a mesh: the atoms S(d), B and P(monoid), and `NdSbp`, which has one atom
for each named mesh axis.

>>> NdSbp({"data": S(0), "model": P})
data:S(0) model:P(sum)
>>> parse("data:S(0) model:P(sum)") == NdSbp({"data": S(0), "model": P})
True
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar, overload

import numpy as np

from sbp.errors import ArgumentKeyError, SbpError, nearest
from sbp.kinds import (
    AXES,
    AXIS,
    NO_AXIS_NAME,
    ORDERED_AXES,
    SHOWN_CHARACTERS,
    TEXT,
    Kind,
    made_of,
    or_none,
    show,
    takes,
)

Default = TypeVar("Default")

MONOIDS = ("sum", "max", "min", "prod", "and", "or")
"""The commutative monoids a partial tensor may be reduced with."""


@made_of("S")
@dataclass(frozen=True, slots=True, repr=False)
class Split:
    """The tensor is the concatenation of its parts along `dim`; `S(dim)` for short."""

    dim: int

    def __post_init__(self) -> None:
        if isinstance(
            self.dim, np.integer
        ):  # a vmapped equation may have NumPy's integers for dims
            object.__setattr__(self, "dim", int(self.dim))
        if isinstance(self.dim, bool) or not isinstance(self.dim, int) or self.dim < 0:
            rank = max(2, -self.dim) if isinstance(self.dim, int) and self.dim < 0 else 0
            example = f": dim {self.dim} of {rank} dims is S({rank + self.dim})" if rank else ""
            raise SbpError(
                f"S(dim) takes a whole number >= 0, got {show(self.dim)}; count dims from the"
                f" front{example}",
                code="dim-out-of-range",
            )

    def __repr__(self) -> str:
        return f"S({self.dim})"


@dataclass(frozen=True, slots=True, repr=False)
class Broadcast:
    """Every part equals the tensor; the constant `B` for short."""

    def __repr__(self) -> str:
        return "B"


@dataclass(frozen=True, slots=True, repr=False)
class Unreduced:
    """The tensor is the reduction of its parts by `monoid`: `P` by the sum, `P("max")` by the
    maximum."""

    monoid: str = "sum"

    def __post_init__(self) -> None:
        if not isinstance(self.monoid, str) or self.monoid not in MONOIDS:
            given = show(self.monoid)
            raise SbpError(
                f"P({given}) is not a monoid{nearest(given, MONOIDS)}",
                code="unknown-option",
            )

    @takes("P", skip=1)
    def __call__(self, monoid: str) -> "Unreduced":
        return Unreduced(monoid)

    def __repr__(self) -> str:
        return f"P({self.monoid})"


Atom = Split | Broadcast | Unreduced

S = Split
B = Broadcast()
P = Unreduced()


@made_of(
    "NdSbp",
    atoms=Kind(
        'a dict from names of mesh axes to atoms, such as {"data": S(0)}',
        lambda x: x is None or isinstance(x, Mapping),
    ),
    free=AXES,
)
class NdSbp(Mapping[str, Atom]):
    """A type on several mesh axes: an atom for each axis that it names; the others are B.

    Immutable and hashable. `NdSbp({})` equals `NdSbp({"data": B})`, because an axis that is not
    named is B.

    Arguments:
      atoms: atoms by mesh axis name, outer axis first.
      free: mesh axes that the type leaves to inference (`model:?` in text).

    Raises:
      SbpError: `mixed-monoids` when two axes are partial under different monoids (they do not
          commute).
    """

    __slots__ = ("_atoms", "free")

    def __init__(
        self, atoms: Mapping[str, Atom] | None = None, /, free: Iterable[str] = ()
    ) -> None:
        self._atoms: dict[str, Atom] = dict(atoms or {})
        self.free: frozenset[str] = frozenset(free)
        for axis, atom in self._atoms.items():
            if not AXIS.accepts(axis):
                raise AXIS.refusal("NdSbp", "each key", axis)
            if not isinstance(atom, Split | Broadcast | Unreduced):
                raise SbpError(
                    f"the atom of mesh axis {show(axis)} must be sbp.S(dim), sbp.B or sbp.P, got"
                    f" {show(atom)}",
                    code="type-syntax",
                )
        both = self.free & self._atoms.keys()
        if both:
            raise SbpError(
                f"one type both sets mesh axis {min(both)!r} and leaves it free; drop one of the"
                " two",
                code="type-syntax",
            )
        monoids = sorted({a.monoid for a in self._atoms.values() if isinstance(a, Unreduced)})
        if len(monoids) > 1:
            raise SbpError(
                f"one type cannot have both P({monoids[0]}) and P({monoids[1]}); reduce one of"
                " them first",
                code="mixed-monoids",
            )

    def __getitem__(self, mesh_axis: str) -> Atom:
        try:
            return self._atoms[mesh_axis]
        except (KeyError, TypeError) as error:
            raise ArgumentKeyError(
                f"the type {self!r} names no mesh axis {show(mesh_axis)}; .get(axis) is B there",
                code="unknown-axis",
            ) from error

    @overload
    def get(self, mesh_axis: str, /) -> Atom: ...

    @overload
    def get(self, mesh_axis: str, /, default: Atom) -> Atom: ...

    @overload
    def get(self, mesh_axis: str, /, default: Default) -> Atom | Default: ...

    @takes("NdSbp.get", skip=1, mesh_axis=AXIS)
    def get(self, mesh_axis: str, /, default: object = B) -> object:
        """The atom on a mesh axis; B when the type does not name it."""
        return self._atoms.get(mesh_axis, default)

    def __contains__(self, mesh_axis: object) -> bool:
        return mesh_axis in self._atoms

    def __iter__(self) -> Iterator[str]:
        return iter(self._atoms)

    def __len__(self) -> int:
        return len(self._atoms)

    def _key(self) -> tuple[frozenset[tuple[str, Atom]], frozenset[str]]:
        return frozenset((a, t) for a, t in self._atoms.items() if t != B), self.free

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NdSbp) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        parts = [f"{axis}:{atom!r}" for axis, atom in self._atoms.items() if atom != B]
        parts += [f"{axis}:?" for axis in sorted(self.free)]
        return " ".join(parts) or "B"

    @takes("NdSbp.over", skip=1, mesh_axes=ORDERED_AXES)
    def over(self, mesh_axes: Iterable[str]) -> tuple[Atom, ...]:
        """The atoms in the order of `mesh_axes`."""
        return tuple(self.get(axis) for axis in mesh_axes)

    @property
    def is_partial(self) -> bool:
        """Whether any mesh axis is partial."""
        return any(isinstance(a, Unreduced) for a in self._atoms.values())


_ATOM = re.compile(r"S\((-?\d{1,9})\)|B|P(?:\((\w+)\))?|\?")
_NAME = re.compile(rf"[^\s{re.escape(NO_AXIS_NAME)}]+")
"""The names of mesh axes that a type text can hold."""


@takes("sbp.parse", text=TEXT, mesh_axes=or_none(AXES))
def parse(text: str, *, mesh_axes: Iterable[str] | None = None) -> NdSbp:
    """Reads a type text: atoms `axis:S(0)`, `axis:B`, `axis:P(sum)`, `axis:?`, separated by blanks;
    the text `B` is the type that is B on every axis.

    Arguments:
      text: the type text.
      mesh_axes: the axis names that may occur; None for any.

    Returns:
      The type; `parse(repr(t)) == t`.

    Raises:
      SbpError: `type-syntax` with the column, `unknown-axis` with the nearest name, or
          `dim-out-of-range` for a negative dim.

    >>> parse("data:S(0) model:P(max)")
    data:S(0) model:P(max)
    """
    if text.strip() == "B":
        return NdSbp()
    known = None if mesh_axes is None else tuple(mesh_axes)
    atoms: dict[str, Atom] = {}
    free: set[str] = set()
    for word in re.finditer(r"\S+", text):
        name = _NAME.match(text, word.start())
        if name is None:
            raise _misread(text, word.start(), "a mesh axis name")
        axis, colon = name.group(), name.end()
        if known is not None and axis not in known:
            raise SbpError(
                f"the mesh has no axis {show(axis)}{nearest(axis, known)}", code="unknown-axis"
            )
        if text[colon : colon + 1] != ":":
            raise _misread(text, colon, '":" after the name of a mesh axis, as in "data:S(0)"')
        atom = _ATOM.match(text, colon + 1)
        if atom is None:
            raise _misread(text, colon + 1, "S(dim), B, P(monoid) or ?")
        if atom.end() < word.end():
            raise _misread(text, atom.end(), "a blank before the next mesh axis")
        if axis in atoms or axis in free:
            raise _misread(text, word.start(), f"mesh axis {show(axis)} once only")
        match atom.group()[0]:
            case "S":
                atoms[axis] = Split(int(atom.group(1)))
            case "B":
                atoms[axis] = B
            case "?":
                free.add(axis)
            case _:
                if atom.group(2) is not None and atom.group(2) not in MONOIDS:
                    raise _misread(text, colon + 3, f"a monoid, one of {', '.join(MONOIDS)}")
                atoms[axis] = Unreduced(atom.group(2) or "sum")
    if not atoms and not free:
        raise _misread(text, 0, "a type")
    return NdSbp(atoms, free)


def _misread(text: str, column: int, expected: str) -> SbpError:
    start, end = max(0, column - SHOWN_CHARACTERS), column + SHOWN_CHARACTERS
    shown = "".join(c if c.isprintable() else "?" for c in text[start:end])
    rest = shown[column - start :].split()
    place = f"before {rest[0]!r}" if rest else "at its end"
    return SbpError(
        f"type text does not parse at column {column + 1}, {place}: expected {expected}",
        code="type-syntax",
        details=(shown,),
        column=column - start,
    )
