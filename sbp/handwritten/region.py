"""`sbp.manual`: a region written by hand with named-axis collectives. Its claimed types are checked
when it is traced (`check.py`).

The region becomes one `jax.shard_map` in which every operand and result mentions every mesh axis:
for an axis that splits no dim, an array has a leading dim over the axis. A B operand is broadcast
along this dim and a P result reduced over it, by operations of the program outside of the region.
So the gradient of a B operand is P and is reduced where that is cheapest, and JAX's rules need no
reduction inside the region.

    >>> import jax.numpy as jnp
    >>> from jax import lax
    >>> matmul = manual(lambda x, w: lax.psum(x @ w, "model"),
    ...     in_types=("model:S(1)", "model:S(0)"), out_types="B")
    >>> matmul(jnp.ones((2, 4)), jnp.ones((4, 3))).shape  # outside sbp.jit: axes of size 1
    (2, 3)
"""

from __future__ import annotations

import collections
import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from sbp import _jax
from sbp.annotations import as_array, as_type
from sbp.errors import (
    ArgumentError,
    SbpError,
    SbpInternalError,
    Span,
    correcting,
    counted,
    refused,
)
from sbp.handwritten.check import ClaimedArray, RegionBody, check_claims
from sbp.handwritten.emulation import axes_by_dim
from sbp.kinds import FLAG, FUNCTION, fits, leaves_of, returning_arrays, takes
from sbp.machine.mesh import MeshSpec, call_without_mesh
from sbp.signatures.factors import admissible
from sbp.signatures.kernels.shards import padded_blocks, reduce_dims
from sbp.signatures.region import parts_p, pick_p
from sbp.types import Broadcast, NdSbp, Split, Unreduced, parse

# ---- entries ------------------------------------------------------------------------------------
# Entries of the `in_types` of a hand-written region that were probably meant to be others: those
# of another argument, or splits of another dim. `check` tries the call with each of them.


def _move_splits(entry: Any, rank: int) -> Iterator[str]:
    """The text of a type with each of its splits on each other dim."""
    own = parse(entry) if isinstance(entry, str) else entry
    for name, atom in own.items() if isinstance(own, NdSbp) else ():
        if isinstance(atom, Split):
            for dim in range(rank):
                if dim != atom.dim:
                    yield repr(NdSbp({**own, name: Split(dim)}, own.free))


def _with_entries(
    error: SbpError,
    in_types: tuple[Any, ...],
    wrong: Sequence[int],
    made: Span | None,
    ranks: Sequence[int] = (),
) -> None:
    """Makes an error a slip: each of some entries may be what another one is, or split another dim.

    Arguments:
      error: the error.
      in_types: the entries.
      wrong: positions of the entries that may be wrong.
      made: the user's line that made the region.
      ranks: the number of dims of each argument; empty where the arguments are trees.
    """
    counts = collections.Counter(map(repr, in_types))
    others = {repr(t): t for t in in_types if t is not None}
    ranked = sorted(others, key=lambda text: -counts[text])
    likely = [
        (*in_types[:i], others[text], *in_types[i + 1 :])
        for text in ranked
        for i in wrong
        if repr(in_types[i]) != text
    ]
    likely += [
        (*in_types[:i], moved, *in_types[i + 1 :])
        for i in wrong[: len(ranks)]
        for moved in _move_splits(in_types[i], ranks[i])
    ]
    error.with_slip(in_types, *likely).call = made


# ---- claimed types ------------------------------------------------------------------------------
# Reads the types that a hand-written region claims, one for each of its arrays.


def leaf_types(types: Any, tree: Any, where: str, mesh: MeshSpec | None) -> list[NdSbp]:
    """The type of each leaf of a pytree of arrays, from a prefix of types.

    Arguments:
      types: a pytree prefix of complete types.
      tree: the pytree of arrays.
      where: `in_types` or `out_types`, for errors.
      mesh: the mesh; None for a region outside `sbp.jit`.

    Raises:
      SbpError: `type-syntax` for a type that leaves an axis open, `unknown-axis`,
          `dim-out-of-range`; `bad-argument` for types that are no prefix, or a monoid that the
          dtype does not have.
    """
    leaves, structure = jax.tree.flatten(tree)
    found: list[NdSbp] = [NdSbp()] * len(leaves)

    def assign(t: Any, subtree: Any) -> None:
        for i in jax.tree.leaves(subtree):
            if t is None:
                raise SbpError(
                    f"{where} leaves a type open; a manual region needs complete types, such"
                    ' as "B"',
                    code="type-syntax",
                )
            own = as_type(t, np.ndim(leaves[i]), mesh.names if mesh else None)
            if own.free:
                raise SbpError(
                    f"{where}: {own!r} leaves an axis open; a manual region needs complete types",
                    code="type-syntax",
                )
            for name, atom in own.items():
                if mesh is not None:
                    mesh.size(name)
                if isinstance(atom, Unreduced) and atom.monoid not in admissible(leaves[i].dtype):
                    raise SbpError(f"{where}: an array of {leaves[i].dtype} cannot be {atom!r}")
            found[i] = own

    kinds = NdSbp | str | PartitionSpec | NamedSharding | Split | Unreduced | Broadcast | None
    try:
        jax.tree.map(
            assign,
            types,
            jax.tree.unflatten(structure, range(len(leaves))),
            is_leaf=lambda x: isinstance(x, kinds),
        )
    except ValueError as error:
        raise SbpError(
            f"{where} does not fit the pytree that it types: {str(error).splitlines()[0]}"
        ) from error
    return found


def types_of_arguments(
    in_types: Any, args: Sequence[Any], mesh: MeshSpec | None = None
) -> list[NdSbp]:
    """The type of each leaf of the arguments of a manual region.

    Raises:
      SbpError: `bad-argument` when `in_types` has more or fewer entries than there are arguments.
    """
    types = in_types if isinstance(in_types, tuple) else (in_types,)
    if len(types) != len(args):
        raise SbpError(
            "in_types of the manual region has"
            f" {len(types)} {'entry' if len(types) == 1 else 'entries'} for"
            f" {counted(len(args), 'argument')}; give one entry for each argument"
        )
    pairs = zip(types, args, strict=True)
    return [t for entry, arg in pairs for t in leaf_types(entry, arg, "in_types", mesh)]


# ---- regions ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Scope:
    """The mesh of the `sbp.jit` that is tracing, and the regions checked in this trace."""

    mesh: MeshSpec
    checked: set[str] = field(default_factory=set)


_SCOPE: ContextVar[_Scope | None] = ContextVar("sbp_manual_scope", default=None)


@contextlib.contextmanager
def tracing_for(mesh: MeshSpec) -> Iterator[None]:
    """A context in which `sbp.jit` traces a function: `manual` regions are made for its mesh, and
    JAX's caches give no traces that were made for another mesh."""
    token = _SCOPE.set(_Scope(mesh))
    try:
        with _jax.own_traces(f"sbp.jit {mesh}"):
            yield
    finally:
        _SCOPE.reset(token)


# ---- the public function ------------------------------------------------------------------------


@takes("sbp.manual", fn=FUNCTION, padded=FLAG)
def manual(
    fn: Callable[..., Any], in_types: Any, out_types: Any, *, padded: bool = False
) -> Callable[..., Any]:
    """A region written by hand: `fn` takes the shards of one device, and may use collectives over
    the names of the mesh axes.

    Arguments:
      fn: takes positional arrays or pytrees of them, and returns a pytree of arrays.
      in_types: for each argument a pytree prefix of complete types, in which `fn` takes it. B: each
        device has the whole; P: each has a part, and `fn` must depend only on the reduction of the
        parts.
      out_types: a pytree prefix of types for what `fn` returns. B: it is equal on all devices, and
          the value that one device would compute; P: it is still to be reduced.
      padded: a split dim that does not divide comes in blocks rounded up, with padding of
        unspecified content; split results keep their padded length. Without it such a dim is an
        error.

    Returns:
      A function of global arrays. Inside `sbp.jit` it runs on the mesh, with gradients; elsewhere
      on axes of size 1.

    Raises (when it is called):
      SbpTypeError: `manual-types` when `fn` does not keep the types it claims. `fn` runs on random
          values, on the mesh and with one device on each mesh axis, as in `sbp.check_shard_map`. A
          difference that no operation of `fn` explains is a warning.
      SbpError: `unknown-axis`, `dim-out-of-range`, `type-syntax`, `bad-argument` for a dim that
          does not divide.

    >>> from jax import lax
    >>> total = manual(lambda x: lax.psum(x.sum(), "data"), in_types="data:S(0)", out_types="B")
    >>> float(total(jnp.arange(4.0)))
    6.0
    """
    made = _jax.caller_span()

    @functools.wraps(fn)
    def region(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            raise ArgumentError(
                f"a manual region takes arguments by position, got {sorted(kwargs)}"
            )
        leaves, tree = leaves_of(args, "a manual region")
        word = "a manual region takes pytrees of arrays; each leaf is"
        args = jax.tree.unflatten(tree, [as_array(x, word) for x in leaves])
        fits(fn, args)
        scope = _SCOPE.get()
        if scope is None:
            return _run_on_one_device(fn, in_types, out_types, args)
        tried, types = correcting.value, in_types
        if tried is not None and tried.at == made and tried.wrong is in_types:
            types = tried.right
        run = functools.partial(_Region(fn, scope, padded, made).run, types, out_types)
        return call_without_mesh(run, *args)

    return region


def _run_on_one_device(
    fn: Callable[..., Any], in_types: Any, out_types: Any, args: Sequence[Any]
) -> Any:
    """Runs a region outside of `sbp.jit`, on axes of size 1: the axes that its types name, and the
    axes that its collectives turn out to use."""
    names = list(dict.fromkeys(name for t in types_of_arguments(in_types, args) for name in t))
    while True:
        inner = returning_arrays(fn)
        for name in names:
            inner = jax.vmap(inner, axis_size=1, axis_name=name)
        lifted = jax.tree.map(lambda x: x[(None,) * len(names)], args)
        try:
            outs = inner(*lifted)
        except NameError as error:
            missing = _jax.unbound_axis(error)
            if missing is None or missing in names:
                raise
            names.append(missing)
            continue
        result = jax.tree.map(lambda y: y[(0,) * len(names)], outs)
        leaf_types(out_types, result, "out_types", None)
        return result


# ---- inside sbp.jit -----------------------------------------------------------------------------


class _Region:
    """One call of a manual region on the mesh of the `sbp.jit` that is tracing.

    Arguments:
      fn: the body.
      scope: the `sbp.jit` that is tracing.
      padded: whether split dims that do not divide are padded.
      made: the user's line that calls `sbp.manual`.
    """

    def __init__(
        self, fn: Callable[..., Any], scope: _Scope, padded: bool, made: Span | None
    ) -> None:
        self.fn, self.scope, self.mesh, self.padded, self.made = fn, scope, scope.mesh, padded, made
        self.abstract = self.abstract_of(self.mesh.sizes)
        self.name = getattr(fn, "__name__", "the function")
        self.span: Span | None = _jax.caller_span()

    def run(self, in_types: Any, out_types: Any, *args: Any) -> Any:
        """Traces the body on local shapes, checks its claims, and calls it between the conversions
        of its operands and results.

        Arguments:
          in_types, out_types: as `manual` takes them.
          args: the global arrays.
        """
        if not self.mesh.names:
            raise SbpError("sbp.manual needs a mesh axis, and the mesh of sbp.jit has none")
        flat, tree = jax.tree.flatten(args)
        types = self.types_of(in_types, args)
        flat = [self.even(x, t, i) for i, (x, t) in enumerate(zip(flat, types, strict=True))]
        given = [self.claim(x, t) for x, t in zip(flat, types, strict=True)]

        def again(fn: Callable[..., Any]) -> RegionBody:
            """The body of another function."""
            return self.body(fn, given, tree, out_types, self.abstract)[0]

        body, out_tree = self.body_on_shards(in_types, given, tree, out_types)
        if body.key not in self.scope.checked:
            self.scope.checked.add(body.key)
            check_claims(body, self.fn, again, self.mesh, span=self.span, made=self.made)
        operands = zip((*body.closed_over, *flat), body.ins, strict=True)
        encoded = [self.encode(x, h) for x, h in operands]
        mapped = jax.shard_map(
            lambda *shards: self.shards(body, shards),
            mesh=self.abstract,
            in_specs=tuple(map(self.spec, body.ins)),
            out_specs=tuple(map(self.spec, body.outs)),
            check_vma=False,
        )
        results = zip(mapped(*encoded), body.outs, strict=True)
        return jax.tree.unflatten(out_tree, [self.decode(y, h) for y, h in results])

    # ---- operands and results -------------------------------------------------------------------

    def types_of(self, in_types: Any, args: Sequence[Any]) -> list[NdSbp]:
        """The types of the operands. An error about types that are left open has which types they
        may be."""
        try:
            return types_of_arguments(in_types, args, self.mesh)
        except SbpError as error:
            entries = in_types if isinstance(in_types, tuple) else ()
            left_open = [i for i, entry in enumerate(entries) if entry is None]
            if left_open and error.slip is None:
                _with_entries(error, in_types, left_open, self.made)
            raise

    def claim(self, x: Any, t: NdSbp) -> ClaimedArray:
        return ClaimedArray(t, t.over(self.mesh.names), tuple(x.shape), x.dtype)

    def whole(self, local: Any, t: NdSbp) -> ClaimedArray:
        """A result with its global shape: a split dim is as long as all of its blocks."""
        dims = axes_by_dim(t, len(local.shape), self.mesh.names)
        counts = (math.prod(map(self.mesh.size, axes)) for axes in dims)
        shape = tuple(size * n for size, n in zip(local.shape, counts, strict=True))
        return ClaimedArray(t, t.over(self.mesh.names), shape, local.dtype)

    def even(self, x: Any, t: NdSbp, number: int) -> Any:
        """An operand whose split dims divide: where they do not, it is padded block by block.

        Arguments:
          x: the operand.
          t: its claimed type.
          number: its position, for the error.

        Raises:
          SbpError: `bad-argument` for a dim that does not divide, without `padded`.
        """
        for dim, size in enumerate(x.shape):
            counts = [
                n
                for atom, n in zip(t.over(self.mesh.names), self.mesh.sizes, strict=True)
                if atom == Split(dim)
            ]
            if size % math.prod(counts) == 0:
                continue
            if not self.padded:
                raise SbpError(
                    f"operand {number} of manual region {self.name!r} has {size} elements on dim"
                    f" {dim}, which {math.prod(counts)} devices do not share evenly under {t!r};"
                    " pad it, or pass padded=True to get blocks that are rounded up"
                )
            x = padded_blocks(x, dim, counts)
        return x

    def spec(self, claimed: ClaimedArray) -> PartitionSpec:
        """The spec of an array: a leading dim for each mesh axis that splits no dim, in the order
        of the mesh, then the dims of the array."""
        leading = [
            name
            for name, atom in zip(self.mesh.names, claimed.atoms, strict=True)
            if not isinstance(atom, Split)
        ]
        return PartitionSpec(*leading, *self.dims(claimed))

    def dims(self, claimed: ClaimedArray) -> list[tuple[str, ...] | None]:
        """The mesh axes that split each dim of an array."""
        every = axes_by_dim(claimed.type, len(claimed.shape), self.mesh.names)
        return [axes or None for axes in every]

    def encode(self, x: Any, claimed: ClaimedArray) -> Any:
        for name, n, atom in reversed(
            list(zip(self.mesh.names, self.mesh.sizes, claimed.atoms, strict=True))
        ):
            if isinstance(atom, Unreduced):
                x = parts_p.bind(x, mesh_axis=name, n=n, monoid=atom.monoid)
            elif not isinstance(atom, Split):
                x = jnp.broadcast_to(x, (n, *x.shape))
        return x

    def decode(self, y: Any, claimed: ClaimedArray) -> Any:
        for name, atom in zip(self.mesh.names, claimed.atoms, strict=True):
            if isinstance(atom, Unreduced):
                y = reduce_dims(y, atom.monoid, 0)
            elif not isinstance(atom, Split):
                y = pick_p.bind(y, mesh_axis=name)
        return y

    # ---- the body -------------------------------------------------------------------------------

    def abstract_of(self, sizes: Sequence[int]) -> AbstractMesh:
        """A mesh with the axes of this one, of other sizes."""
        names = self.mesh.names
        return AbstractMesh(tuple(sizes), names, axis_types=(AxisType.Auto,) * len(names))

    def body_on_shards(
        self, in_types: Any, given: Sequence[ClaimedArray], tree: Any, out_types: Any
    ) -> tuple[RegionBody, Any]:
        """The body, and the tree of its results. A body that takes its whole operands and not the
        shards has other `in_types` than it was written for.

        Raises:
          SbpError: `manual-types`, also of the kind that the body raises.
        """
        try:
            return self.body(self.fn, given, tree, out_types, self.abstract)
        except (SbpError, SbpInternalError):
            raise
        except (TypeError, ValueError) as error:
            one = self.abstract_of((1,) * len(self.mesh.names))
            try:
                self.body(self.fn, given, tree, out_types, one)
            except Exception:  # the user's function, which raises on whole operands, too
                raise error from None
            shards = [c.local(self.mesh.sizes) for c in given]
            said = refused(
                f"region {self.name!r} does not take the shards that its in_types give it, of the"
                f" shapes {', '.join(map(str, shards))}: {' '.join(str(error).split())}",
                error,
                code="manual-types",
            )
            if isinstance(in_types, tuple):
                ranks = [len(s) for s in shards] if len(shards) == len(in_types) else []
                _with_entries(said, in_types, range(len(in_types)), self.made, ranks)
            raise said from error

    def body(
        self,
        fn: Callable[..., Any],
        ins: Sequence[ClaimedArray],
        tree: Any,
        out_types: Any,
        mesh: AbstractMesh,
    ) -> tuple[RegionBody, Any]:
        """The body from the shards of one device to its shards of the results.

        Arguments:
          fn: the region's function, or one in its place.
          ins: its operands.
          tree: their tree.
          out_types: the types of its results, as `manual` takes them.
          mesh: the mesh that its collectives name.

        Returns:
          The body, and the tree of the results.
        """
        seen: list[Any] = []

        def local(*shards: Any) -> Any:
            out = returning_arrays(fn)(*jax.tree.unflatten(tree, shards))
            leaves, out_tree = jax.tree.flatten(jax.tree.map(jnp.asarray, out))
            seen.append((out_tree, [jax.ShapeDtypeStruct(y.shape, y.dtype) for y in leaves]))
            return tuple(leaves)

        mapped = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=tuple(PartitionSpec(*self.dims(h)) for h in ins),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
        shapes = [jax.ShapeDtypeStruct(h.shape, h.dtype) for h in ins]
        outer, consts = _jax.open_jaxpr(jax.make_jaxpr(mapped)(*shapes))
        out_tree, outs = seen[-1]
        if len(outer.eqns) != 1:
            raise SbpInternalError(f"a manual region traces to one equation, got\n{outer}")
        (eqn,) = outer.eqns
        values = dict(zip(outer.constvars, consts, strict=True))
        closed_over = [
            v.val if isinstance(v, _jax.Literal) else values[v]
            for v in eqn.invars[: len(eqn.invars) - len(ins)]
        ]
        if list(eqn.invars[len(closed_over) :]) != list(outer.invars):
            raise SbpInternalError(
                f"the operands of a manual region are not where they are expected:\n{outer}"
            )
        claims = leaf_types(out_types, jax.tree.unflatten(out_tree, outs), "out_types", self.mesh)
        arrays = [jnp.asarray(c) for c in closed_over]
        body = RegionBody(
            jaxpr=eqn.params["jaxpr"],
            mesh=eqn.params["mesh"],
            ins=[*(self.claim(c, NdSbp()) for c in arrays), *ins],
            outs=[self.whole(o, t) for o, t in zip(outs, claims, strict=True)],
            closed_over=arrays,
        )
        return body, out_tree

    def shards(self, body: RegionBody, shards: Sequence[Any]) -> tuple[Any, ...]:
        """Runs the body on shards with the leading dims of `spec`; the body itself takes and gives
        shards without them."""
        pairs = zip(shards, body.ins, strict=True)
        own = [x.reshape(h.local(self.mesh.sizes)) for x, h in pairs]
        results = map(jnp.asarray, _jax.eval_jaxpr(body.jaxpr, own))  # a constant may be a number
        leading = [sum(not isinstance(a, Split) for a in h.atoms) for h in body.outs]
        return tuple(y.reshape((1,) * k + y.shape) for y, k in zip(results, leading, strict=True))
