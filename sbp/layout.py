"""Named dims, as in Mesh-TensorFlow: a `Layout` maps dim names to mesh axes once, and each tensor
gives the names of its dims.

>>> import jax.numpy as jnp
>>> layout = Layout(batch="data", d_ff="model", vocab="model")
>>> layout.type("batch", "length", "d_ff")
data:S(0) model:S(2)
>>> layout(jnp.zeros((8, 4, 16)), "batch", "length", "d_ff").shape
(8, 4, 16)
"""

import difflib
import keyword
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from sbp import _jax
from sbp.annotations import Pin, as_array, as_type, bind_pin
from sbp.errors import NEAR, ArgumentError, ArgumentKeyError, Label, SbpError, nearest
from sbp.kinds import (
    AXES,
    AXIS,
    BY_POSITION,
    EACH_AXIS,
    FLAG,
    Kind,
    is_whole,
    leaves_of,
    made_of,
    refuse_unless,
    show,
    takes,
)
from sbp.types import Atom, B, NdSbp, Split

_FREE = Kind('a collection of mesh axes, such as ["pod"]', AXES.accepts)
_LEAF = Kind(
    'a tuple of dim names, such as ("batch", None), or None',
    lambda x: x is None or (type(x) is tuple and all(n is None or isinstance(n, str) for n in x)),
)

DimName = str | None
"""The name of a dim; None for a dim without a name, which no layout splits."""


@made_of(
    "Layout",
    axes=Kind(
        'a dict from names of dims to mesh axes, such as {"batch": "data"}',
        lambda x: x is None or isinstance(x, Mapping),
    ),
)
class Layout(Mapping[str, tuple[str, ...]]):
    """A map from dim names to mesh axes (Shazeer et al. 2018, Mesh-TensorFlow, section 3).

    A dim whose name the layout maps is split over the axes of that name; other dims are whole. A
    tensor is B on an axis that the layout uses, but for none of this tensor's dims. On axes that
    the layout does not mention, the tensor's type is inferred.

    Arguments:
      axes: a dict from dim name to mesh axes, for names that are not Python identifiers. `()` names
          a dim that stays whole; only a name that is like another one needs that.
      **named: dim names as keywords, each with one mesh axis, or a tuple of axes, outer first, in
          the order of the mesh.

    Raises:
      SbpError: `layout-names` for a name given twice or an axis twice for one name, `bad-argument`
          for an axis that is not a string.

    >>> layout = Layout(batch=("pod", "data"), heads="model")
    >>> layout
    Layout(batch=('pod', 'data'), heads='model')
    >>> layout.type("batch", None, "heads")
    pod:S(0) data:S(0) model:S(2)
    """

    __slots__ = ("_axes", "_made_at")

    def __init__(
        self, axes: Mapping[str, str | Iterable[str]] | None = None, /, **named: str | Iterable[str]
    ) -> None:
        if twice := [name for name in named if name in (axes or {})]:
            raise SbpError(
                f"the layout maps dim {show(twice[0])} twice; map it once",
                code="layout-names",
            )
        self._axes = {
            name: _axes_of(name, value) for name, value in {**(axes or {}), **named}.items()
        }
        self._made_at = _jax.caller_span()

    def __getitem__(self, name: str) -> tuple[str, ...]:
        try:
            return self._axes[name]
        except (KeyError, TypeError) as error:
            raise ArgumentKeyError(
                f"{self!r} has no dim {show(name)}{nearest(str(name), self._axes)}",
                code="layout-names",
            ) from error

    def __iter__(self) -> Iterator[str]:
        return iter(self._axes)

    def __len__(self) -> int:
        return len(self._axes)

    def __hash__(self) -> int:
        return hash(frozenset(self._axes.items()))

    def __repr__(self) -> str:
        shown = {name: axes[0] if len(axes) == 1 else axes for name, axes in self._axes.items()}
        if all(name.isidentifier() and not keyword.iskeyword(name) for name in shown):
            return f"Layout({', '.join(f'{name}={axes!r}' for name, axes in shown.items())})"
        return f"Layout({shown!r})"

    @takes("a layout", skip=1)
    def __call__(self, x: Any, /, *names: DimName) -> Any:
        """Pins a tensor by the names of its dims; outside `sbp.jit` this is the identity.

        Arguments:
          x: an array.
          *names: a name for each dim, None for a dim without one.

        Returns:
          `x`, unchanged in value and shape.

        Raises:
          SbpError: `layout-conflict` when two dims would be split over one mesh axis,
            `layout-names` when a name occurs twice, is a slip for one that the layout has, or
            there are not as many names as dims,
            `bad-argument` for a pytree in place of an array.
        """
        if not hasattr(x, "aval") and (
            isinstance(x, str | bytes) or not jax.tree_util.all_leaves([x])
        ):
            raise SbpError(
                f"a layout names the dims of one array, got {type(x).__name__}; map it over the"
                " leaves"
            )
        x = as_array(x, "a layout names the dims of")
        if len(names) != np.ndim(x):
            raise _names_error(
                f"{len(names)} dim names for a tensor of shape {tuple(x.shape)}, {_text(names)};"
                " give one for each dim"
            )
        return bind_pin(x, Pin(self.type(*names), ordered=True))

    @takes("Layout.type", skip=1, free=_FREE)
    def type(self, *names: DimName, free: Iterable[str] = ()) -> NdSbp:
        """The type of a tensor whose dims have these names, for `in_types` and `out_types`.

        Arguments:
          *names: a name for each dim, None for a dim without one.
          free: mesh axes to leave to inference, of those that the layout does not use. In
              `in_types`, axes that a type neither names nor leaves free are B.

        Raises:
          SbpError: `layout-conflict` when two dims would be split over one mesh axis,
              `layout-names` when a name occurs twice, `bad-argument` where `free` is no collection
              of names.

        >>> Layout(batch="data", d_ff="model").type("d_model", "d_ff", free=["pod"])
        model:S(1) pod:?
        """
        for number, name in enumerate(names):
            if not (name is None or isinstance(name, str)):
                raise _names_error(
                    f"a dim's name must be a string or None, got {show(name)} in {_text(names)};"
                    " name the dims in order"
                )
            near = difflib.get_close_matches(name or "", self._axes, n=1, cutoff=NEAR)
            if name is not None and name not in self._axes and near:
                raise _names_error(
                    f"the layout has no dim {show(name)}; did you mean {near[0]!r}? If it is"
                    f" another dim, which stays whole, add it to the layout as {{{name!r}: ()}}"
                ).with_slip(name, near[0])
            if name is not None and name in names[:number]:
                raise _names_error(
                    f"dim {name!r} occurs twice in {_text(names)}; the names of one tensor differ:"
                    " rename one of them, or give it None"
                )
        atoms: dict[str, Atom] = {axis: B for axes in self._axes.values() for axis in axes}
        owner: dict[str, str] = {}
        for dim, name in enumerate(names):
            for axis in self._axes.get(name, ()) if name is not None else ():
                if axis in owner:
                    here = _jax.caller_span()
                    at = f" at line {here.line}" if here else ""
                    error = SbpError(
                        f"dims {owner[axis]!r} and {name!r} of the tensor {_text(names)} are both"
                        f" split over mesh axis {axis!r}{at}; a mesh axis splits one dim of a"
                        " tensor: map one of the two to another axis, or use another name"
                        " for one of them here",
                        code="layout-conflict",
                        span=here,
                    ).with_slip(name, None)
                    if self._made_at is not None:
                        text = f"{owner[axis]!r} and {name!r} are mapped to {axis!r} here"
                        error.related = (Label(span=self._made_at, text=text),)
                    raise error
                atoms.pop(axis)  # the axes of one dim stand in the order that the layout gives
                owner[axis], atoms[axis] = str(name), Split(dim)
        return NdSbp(atoms, free)

    @takes("Layout.types", skip=1, free=_FREE)
    def types(self, names: Any, *, free: Iterable[str] = ()) -> Any:
        """The types of a pytree of tensors, from a pytree whose leaves are tuples of dim names.

        Arguments:
          names: at each leaf a tuple of names, `()` for a scalar; None stays None, which leaves
              all mesh axes to inference.
          free: mesh axes to leave to inference.

        >>> Layout(d_ff="model").types({"w": ("d_model", "d_ff"), "b": ("d_ff",), "scale": ()})
        {'b': model:S(0), 'scale': B, 'w': model:S(1)}
        """
        leaves, tree = leaves_of(names, "Layout.types: `names`", _LEAF.accepts)
        refuse_unless(_LEAF, "Layout.types", "leaf of names", leaves)
        return jax.tree.unflatten(
            tree, [None if leaf is None else self.type(*leaf, free=free) for leaf in leaves]
        )


@dataclass(frozen=True, slots=True, repr=False)
class PaddedType:
    """A type of arguments or results that are held as `sbp.Padded`; see `padded`.

    Arguments:
      type: the type, in one of the forms that `in_types` takes; None leaves it to inference.
    """

    type: Any

    def __repr__(self) -> str:
        shown = str(self.type) if isinstance(self.type, NdSbp) else self.type
        return f"sbp.padded({'' if shown is None else repr(shown)})"


@takes("sbp.padded")
def padded(type: Any = None) -> PaddedType:
    """An entry of `in_types` and `out_types` whose splits need not divide: between calls the array
    stays split as `sbp.Padded`, one padded array with its true shape. Without it, a dim that does
    not divide is whole on every device at the boundary of a program.

    Arguments:
      type: a type without P, as `in_types` takes it: an `NdSbp`, a type text, a `PartitionSpec` or
        a `NamedSharding`. None leaves the type to inference.

    Returns:
      An entry for what stands for one type. An argument of it may be an `sbp.Padded` or any array;
      a result of it is always an `sbp.Padded`.

    Raises:
      SbpError: `type-syntax` for what is no type, `bad-argument` for a type with P.

    >>> import jax
    >>> import sbp
    >>> mesh = sbp.make_mesh((1,), ("data",))
    >>> rows = padded("data:S(0)")
    >>> f = sbp.jit(lambda w: 2 * w, mesh, in_types=rows, out_types=rows)
    >>> f(jax.numpy.ones((13, 7))).shape
    (13, 7)
    """
    if type is not None and as_type(type).is_partial:
        raise ArgumentError(
            f"sbp.padded takes a type without P, got {show(type)}; a result that is pinned P comes"
            " back as an sbp.Partial"
        )
    return PaddedType(type)


@dataclass(frozen=True, slots=True)
class FullySharded:
    """The types of leaves that are split where they fit; see `fully_sharded`.

    Arguments:
      mesh_axes: the mesh axes to split over.
      padded: whether a leaf that fits nowhere is split along its longest dim, as `sbp.Padded`.
    """

    mesh_axes: tuple[str, ...]
    padded: bool = False

    @takes(
        "FullySharded.type_of",
        skip=1,
        shape=Kind("a shape", lambda x: isinstance(x, tuple | list) and all(map(is_whole, x))),
        axes=Kind(
            "pairs of a mesh axis and its size",
            lambda x: (
                isinstance(x, tuple | list)
                and all(isinstance(a, tuple) and len(a) == 2 and is_whole(a[1]) for a in x)
            ),
        ),
    )
    def type_of(self, shape: Sequence[int], axes: Sequence[tuple[str, int]]) -> NdSbp | PaddedType:
        """The type of a leaf.

        Arguments:
          shape: its shape.
          axes: (name, size) pairs of the mesh.

        Raises:
          SbpError: `unknown-axis` for an axis that the mesh does not have.
        """
        sizes = dict(axes)
        for name in self.mesh_axes:
            if name not in sizes:
                raise SbpError(
                    f"fully_sharded: the mesh has no axis {show(name)}{nearest(name, sizes)}",
                    code="unknown-axis",
                )
        parts = math.prod(sizes[name] for name in self.mesh_axes)
        fitting = [dim for dim, size in enumerate(shape) if size % parts == 0]
        is_padded = self.padded and not fitting and max(shape, default=0) > 1
        dims = range(len(shape)) if is_padded else fitting
        if not dims or 0 in shape:
            return NdSbp()
        largest = max(dims, key=lambda dim: (shape[dim], -dim))
        split = NdSbp({n: Split(largest) for n, _ in axes if n in self.mesh_axes})
        return PaddedType(split) if is_padded else split


@takes(
    "sbp.fully_sharded",
    BY_POSITION,
    mesh_axes=EACH_AXIS,
    padded=FLAG,
)
def fully_sharded(*mesh_axes: str, padded: bool = False) -> FullySharded:
    """An entry of `in_types` and `out_types` that splits each leaf where it fits: along its largest
    dim that divides evenly over the mesh axes, the first of equal ones; a leaf without such a dim
    is B. It stands for whole subtrees, such as the state of an optimiser, whose leaves need not be
    shaped like parameters (ZeRO, Rajbhandari et al. 2020; FSDP).

    Arguments:
      *mesh_axes: the mesh axes to split over.
      padded: True splits a leaf without such a dim along its longest dim, and holds it as
        `sbp.Padded`. A leaf with at most one element along each dim is B in any case.

    Raises:
      SbpError: `bad-argument` for no axis; `unknown-axis` where it is used.

    >>> fully_sharded("data").type_of((3, 8, 16), (("data", 4), ("model", 2)))
    data:S(2)
    >>> fully_sharded("data", padded=True).type_of((13, 7), (("data", 4),))
    sbp.padded('data:S(0)')
    """
    if not mesh_axes:
        raise SbpError('fully_sharded needs a mesh axis: fully_sharded("data")')
    if len(set(mesh_axes)) != len(mesh_axes):
        raise SbpError(f"fully_sharded: {show(mesh_axes)} names a mesh axis twice; name each once")
    return FullySharded(mesh_axes, padded)


def _axes_of(name: Any, value: Any) -> tuple[str, ...]:
    # The order of a set of several axes is chance.
    is_many = isinstance(value, Sequence) or (isinstance(value, AbstractSet) and len(value) < 2)
    axes = tuple[str, ...](value if is_many and not isinstance(value, str) else (value,))
    if not isinstance(name, str) or not all(map(AXIS.accepts, axes)):
        raise SbpError(
            "a layout maps a dim name to a mesh axis or a tuple of mesh axes, got"
            f" {show(name)}: {show(value)}; leave out the dims that you do not split"
        )
    if len(set(axes)) != len(axes):
        raise SbpError(
            f"the layout maps dim {show(name)} to one mesh axis twice: {show(axes)}; name each mesh"
            " axis once",
            code="layout-names",
        )
    return axes


def _text(names: tuple[Any, ...]) -> str:
    words = ["_" if n is None else n if isinstance(n, str) else show(n) for n in names]
    return f"[{', '.join(words)}]"


def _names_error(message: str) -> SbpError:
    return SbpError(message, code="layout-names", span=_jax.caller_span())
