"""`sbp.manual`: a region written by hand with named-axis collectives. Its claimed types are checked
when it is traced, as `check.py` checks a program with `jax.shard_map`.

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

import collections
import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from sbp import _jax
from sbp.annotations import as_array, as_type
from sbp.errors import (
    ArgumentError,
    Diagnostic,
    Label,
    SbpError,
    SbpInternalError,
    SbpTypeError,
    Span,
    correcting,
    counted,
    note,
    noting,
    refused,
    warn,
)
from sbp.handwritten.check import diagnostics_of
from sbp.handwritten.compared import DIFFERS
from sbp.handwritten.emulation import axes_by_dim
from sbp.handwritten.one_device import compared_runs
from sbp.kinds import FLAG, FUNCTION, fits, leaves_of, returning_arrays, takes
from sbp.machine.mesh import MeshSpec, call_without_mesh
from sbp.signatures.factors import admissible, monoid_refusal
from sbp.signatures.kernels.shards import padded_blocks, reduce_dims
from sbp.signatures.laws.oracle import Types, localise
from sbp.signatures.region import parts_p, pick_p
from sbp.trace.build import body_graph
from sbp.trace.collectives import SHARD_MAP
from sbp.trace.graph import Constant, Graph, Node
from sbp.types import B, Broadcast, NdSbp, Split, Unreduced, parse

# ---- entries ------------------------------------------------------------------------------------
# Entries of the `in_types` of a hand-written region that were probably meant to be others: those
# of another argument, or splits of another dim. `check` tries the call with each of them.


def _move_splits(entry: Any, rank: int) -> list[str]:
    """The text of a type with each of its splits on each other dim."""
    own = parse(entry) if isinstance(entry, str) else entry
    return [
        repr(NdSbp({**own, name: Split(dim)}, own.free))
        for name, atom in (own.items() if isinstance(own, NdSbp) else ())
        if isinstance(atom, Split)
        for dim in range(rank)
        if dim != atom.dim
    ]


def _with_entries(
    error: SbpError,
    in_types: tuple[Any, ...],
    wrong: Sequence[int],
    made: Span | None,
    ranks: Sequence[int] = (),
) -> None:
    """Makes an error a slip: the entries at some positions may be what other entries are, or split
    another dim. `made` is the user's line that made the region. `ranks` has the number of dims of
    each argument, and is empty where the arguments are trees."""
    counts = collections.Counter(map(repr, in_types))
    others = {repr(t): t for t in in_types if t is not None}
    likely = [
        (*in_types[:i], others[text], *in_types[i + 1 :])
        for text in sorted(others, key=lambda text: -counts[text])
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
                    'a type is left open; a manual region needs complete types, such as "B"',
                    code="type-syntax",
                )
            own = as_type(t, np.ndim(leaves[i]), mesh.names if mesh else None)
            if own.free:
                raise SbpError(
                    f"{own!r} leaves an axis open; a manual region needs complete types",
                    code="type-syntax",
                )
            for name, atom in own.items():
                if mesh is not None:
                    mesh.size(name)
                if isinstance(atom, Unreduced) and atom.monoid not in admissible(leaves[i].dtype):
                    raise SbpError(monoid_refusal(leaves[i].dtype, atom, name))
            found[i] = own

    kinds = NdSbp | str | PartitionSpec | NamedSharding | Split | Unreduced | Broadcast | None
    try:
        jax.tree.map(
            assign,
            types,
            jax.tree.unflatten(structure, range(len(leaves))),
            is_leaf=lambda x: isinstance(x, kinds),
        )
    except SbpError as error:
        raise error.about(where) from None
    except ValueError as error:
        raise SbpError(
            f"{where} does not fit the pytree that it types: {str(error).splitlines()[0]}; give it"
            " the same structure, or one type for a whole branch"
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
    return [
        t
        for entry, arg in zip(types, args, strict=True)
        for t in leaf_types(entry, arg, "in_types", mesh)
    ]


@dataclass(frozen=True, slots=True)
class _ClaimedArray:
    """One operand or result of a region.

    Arguments:
      type: its claimed type.
      atoms: its claimed atom on each mesh axis.
      aval: its global shape and its dtype.
    """

    type: NdSbp
    atoms: Types
    aval: Any

    def local(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """The shape of one device's part."""
        return localise(self.aval.shape, self.atoms, sizes)


@dataclass(frozen=True, slots=True, eq=False)
class _Body:
    """The body of a region on the shards of one device.

    Arguments:
      params: the parameters of its equation; the body and the mesh are among them.
      ins: its operands; the arrays that it closes over come first.
      outs: its results.
      tree: the tree of its results.
      closed_over: the arrays that it closes over.
    """

    params: dict[str, Any]
    ins: Sequence[_ClaimedArray]
    outs: Sequence[_ClaimedArray]
    tree: Any
    closed_over: Sequence[Any]

    @property
    def key(self) -> str:
        """Two bodies with equal keys have the same claims about the same body."""
        return (
            f"{self.params['jaxpr']}\n{[h.type for h in self.ins]}\n{[h.type for h in self.outs]}"
        )

    def program(self, span: Span | None) -> Graph:
        """The region as a program of its own, in which its operands and results have types."""
        body = body_graph(self.params["jaxpr"])
        operands = tuple(
            body.new_value(h.aval)
            if x is None or isinstance(x, _jax.Tracer)
            else Constant(x, h.aval)
            for x, h in itertools.zip_longest(self.closed_over, self.ins)
        )
        region = Node(
            id=max((n.id for n in body.walk()), default=0) + 1,
            op=SHARD_MAP,
            primitive=None,
            params=self.params
            | {
                "body": body,
                "in_specs": tuple(h.type for h in self.ins),
                "out_specs": tuple(h.type for h in self.outs),
            },
            inputs=operands,
            outputs=tuple(body.new_value(h.aval) for h in self.outs),
            span=span,
            stack=(span,) if span else (),
        )
        return Graph(
            inputs=tuple(v for v in operands if isinstance(v, int)),
            outputs=region.outputs,
            nodes=(region,),
            avals=body.avals,
        )


# ---- regions ------------------------------------------------------------------------------------

CODE = "manual-types"

_SCOPE: ContextVar[tuple[MeshSpec, set[str]] | None] = ContextVar("sbp_manual_scope", default=None)
"""The mesh of the `sbp.jit` that is tracing, and the regions checked in this trace."""


def is_tracing() -> bool:
    """Whether an `sbp.jit` is tracing a function."""
    return _SCOPE.get() is not None


@contextlib.contextmanager
def tracing_for(mesh: MeshSpec) -> Iterator[None]:
    """A context in which `sbp.jit` traces a function: `manual` regions are made for its mesh, and
    JAX's caches give no traces that were made for another mesh."""
    token = _SCOPE.set((mesh, set()))
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
        args = jax.tree.unflatten(
            tree,
            [as_array(x, "a manual region takes pytrees of arrays; each leaf is") for x in leaves],
        )
        tried, types = correcting.value, in_types
        if tried is not None and tried.at == made and tried.wrong is in_types:
            types = tried.right
        try:
            fits(fn, args)
            scope = _SCOPE.get()
            if scope is None:
                return _run_on_one_device(fn, types, out_types, args)
            run = functools.partial(_Region(fn, scope, padded, made).run, types, out_types)
            return call_without_mesh(run, *args)
        except SbpError as error:
            if _jax.raising_span(error) is not None or isinstance(error, SbpTypeError):
                raise  # the body raised it, or it has the places
            error.related += tuple(
                Label(span=called, text="the region is called here")
                for called in _jax.caller_frames()[:1]
                if called != made
            )
            raise error.at(error.span or made) from error.__cause__

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
        try:
            outs = inner(*jax.tree.map(lambda x: x[(None,) * len(names)], args))
        except NameError as error:
            missing = _jax.unbound_axis(error)
            if missing is None or missing in names:
                raise
            names.append(missing)
        else:
            result = jax.tree.map(lambda y: jnp.asarray(y)[(0,) * len(names)], outs)
            leaf_types(out_types, result, "out_types", None)
            return result


# ---- inside sbp.jit -----------------------------------------------------------------------------


class _Region:
    """One call of a manual region on the mesh of the `sbp.jit` that is tracing.

    Arguments:
      fn: the body.
      scope: the mesh of the `sbp.jit` that is tracing, and the regions checked in this trace.
      padded: whether split dims that do not divide are padded.
      made: the user's line that calls `sbp.manual`.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        scope: tuple[MeshSpec, set[str]],
        padded: bool,
        made: Span | None,
    ) -> None:
        self.fn, self.padded, self.made = fn, padded, made
        self.mesh, self.checked = scope
        self.abstract = self.abstract_of(self.mesh.sizes)
        self.name = getattr(fn, "__name__", "the function")
        self.span: Span | None = _jax.caller_span() or made

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

        body = self.body_on_shards(in_types, given, tree, out_types)
        if body.key not in self.checked:
            self.checked.add(body.key)
            self.check(body, lambda f: self.body(f, given, tree, out_types, self.abstract))
        encoded = [
            self.encode(x, h) for x, h in zip((*body.closed_over, *flat), body.ins, strict=True)
        ]

        def shards(*given: Any) -> tuple[Any, ...]:
            """Runs the body on shards with the leading dims of `spec`; the body itself takes and
            gives shards without them."""
            own = [
                x.reshape(h.local(self.mesh.sizes)) for x, h in zip(given, body.ins, strict=True)
            ]
            results = map(jnp.asarray, _jax.eval_jaxpr(body.params["jaxpr"], own))  # or numbers
            return tuple(
                y.reshape((1,) * sum(not isinstance(a, Split) for a in h.atoms) + y.shape)
                for y, h in zip(results, body.outs, strict=True)
            )

        shards.__name__ = _jax.CHECKED_REGION
        mapped = jax.shard_map(
            shards,
            mesh=self.abstract,
            in_specs=tuple(map(self.spec, body.ins)),
            out_specs=tuple(map(self.spec, body.outs)),
            check_vma=False,
        )
        return jax.tree.unflatten(
            body.tree,
            [self.decode(y, h) for y, h in zip(mapped(*encoded), body.outs, strict=True)],
        )

    def check(self, body: _Body, again: Callable[[Any], _Body]) -> None:
        """Checks the types that the region claims, as `sbp.check_shard_map` checks out_specs: on
        random values, on the mesh and with one device on each mesh axis.

        Arguments:
          body: its body on the mesh.
          again: the body of another function in the place of `fn`.

        Raises:
          SbpTypeError: `manual-types`, with all claims that do not hold.
        """
        graph = body.program(self.span)
        # Its operands are not taken apart stage by stage.
        staged = any(
            isinstance(a, Split) and h.local(self.mesh.sizes)[a.dim] == 1
            for h in body.ins
            for a in h.atoms
        )
        meant = ["the region may have one stage for each device"] if staged else []
        compared = compared_runs(
            graph,
            self.fn,
            traced=lambda f: again(f).program(self.span),
            leaves=[graph.avals[v] for v in graph.inputs],
            mesh=self.mesh,
        ).compare_all(meant)
        partial = {
            name for h in body.ins for name, atom in h.type.items() if isinstance(atom, Unreduced)
        }
        # Whether a result depends on how a P operand is parted.
        depends = any(c.run.wrong and c.run.mesh_axis in partial for c in compared.compared)
        said = [
            replace(d, severity="error") if depends and d.code == DIFFERS else d
            for d in diagnostics_of(compared)
        ]
        wrong = [d for d in said if d.severity == "error"]
        if wrong:
            raise SbpTypeError([self.about_claims(d) for d in wrong])
        for d in said:
            if d.severity != "note":
                at = d.primary.span if d.primary else self.span
                with noting():  # a report has the finding itself, with its labels and notes
                    warn(CODE, f"in manual region {self.name!r}", d.title, span=at)
            note(self.about_claims(d))

    def about_claims(self, found: Diagnostic) -> Diagnostic:
        """A finding about the body as one about its claims, which the line `made` states."""
        labels, made = found.labels, self.made
        shown = {(label.span.file, label.span.line) for label in labels}
        if made is not None and (made.file, made.line) not in shown:
            labels += (Label(span=made, text="sbp.manual declares the types of the region here"),)
        return replace(
            found,
            code=CODE,
            labels=labels,
            notes=(*found.notes, f"more on this kind of fault: sbp explain {found.code}"),
        )

    # ---- operands and results -------------------------------------------------------------------

    def types_of(self, in_types: Any, args: Sequence[Any]) -> list[NdSbp]:
        """The types of the operands. An error about types that are left open has which types they
        may be."""
        try:
            return types_of_arguments(in_types, args, self.mesh)
        except SbpError as error:
            left_open = [
                i
                for i, entry in enumerate(in_types if isinstance(in_types, tuple) else ())
                if entry is None
            ]
            if left_open and error.slip is None:
                _with_entries(error, in_types, left_open, self.made)
            raise

    def claim(self, x: Any, t: NdSbp) -> _ClaimedArray:
        """An array with its claimed type. The shards of a dim without elements are whole."""
        t = NdSbp(
            {k: B if isinstance(a, Split) and not x.shape[a.dim] else a for k, a in t.items()}
        )
        return _ClaimedArray(t, t.over(self.mesh.names), _jax.empty_aval(x.shape, x.dtype))

    def whole(self, local: Any, t: NdSbp) -> _ClaimedArray:
        """A result with its global shape: a split dim is as long as all of its blocks."""
        dims = zip(local.shape, axes_by_dim(t, len(local.shape), self.mesh.names), strict=True)
        shape = tuple(size * math.prod(map(self.mesh.size, axes)) for size, axes in dims)
        return self.claim(jax.ShapeDtypeStruct(shape, local.dtype), t)

    def even(self, x: Any, t: NdSbp, number: int) -> Any:
        """An operand of type `t` whose split dims divide. If they do not, the operand is padded
        block by block. `number` is its position, for the error.

        Raises:
          SbpError: `bad-argument` for a dim that does not divide, without `padded`.
        """
        for dim, (size, axes) in enumerate(
            zip(x.shape, axes_by_dim(t, x.ndim, self.mesh.names), strict=True)
        ):
            counts = [*map(self.mesh.size, axes)]
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

    def spec(self, claimed: _ClaimedArray) -> PartitionSpec:
        """The spec of an array: a leading dim for each mesh axis that splits no dim, in the order
        of the mesh, then the dims of the array."""
        return PartitionSpec(
            *(
                name
                for name, atom in zip(self.mesh.names, claimed.atoms, strict=True)
                if not isinstance(atom, Split)
            ),
            *self.dims(claimed),
        )

    def dims(self, claimed: _ClaimedArray) -> list[tuple[str, ...] | None]:
        """The mesh axes that split each dim of an array."""
        return [
            axes or None
            for axes in axes_by_dim(claimed.type, len(claimed.aval.shape), self.mesh.names)
        ]

    def encode(self, x: Any, claimed: _ClaimedArray) -> Any:
        for name, n, atom in reversed(
            list(zip(self.mesh.names, self.mesh.sizes, claimed.atoms, strict=True))
        ):
            if isinstance(atom, Unreduced):
                x = parts_p.bind(x, mesh_axis=name, n=n, monoid=atom.monoid)
            elif not isinstance(atom, Split):
                x = jnp.broadcast_to(x, (n, *x.shape))
        return x

    def decode(self, y: Any, claimed: _ClaimedArray) -> Any:
        for name, atom in zip(self.mesh.names, claimed.atoms, strict=True):
            if isinstance(atom, Unreduced):
                y = reduce_dims(y, atom.monoid, 0)
            elif not isinstance(atom, Split):
                y = pick_p.bind(y, mesh_axis=name)
        return y

    # ---- the body -------------------------------------------------------------------------------

    def abstract_of(self, sizes: Sequence[int]) -> AbstractMesh:
        """A mesh with the axes of this one, of other sizes."""
        return AbstractMesh(tuple(sizes), self.mesh.names, axis_types=(AxisType.Auto,) * len(sizes))

    def body_on_shards(
        self, in_types: Any, given: Sequence[_ClaimedArray], tree: Any, out_types: Any
    ) -> _Body:
        """The body on the mesh. A body that takes its whole operands and not the
        shards has other `in_types` than it was written for.

        Raises:
          SbpError: `manual-types`, also of the kind that the body raises.
        """
        try:
            return self.body(self.fn, given, tree, out_types, self.abstract)
        except (SbpError, SbpInternalError):
            raise
        except (TypeError, ValueError) as error:
            try:
                self.body(
                    self.fn, given, tree, out_types, self.abstract_of((1,) * len(self.mesh.names))
                )
            except Exception:  # the user's function, which raises on whole operands, too
                raise error from None
            shards = [c.local(self.mesh.sizes) for c in given]
            said = refused(
                f"region {self.name!r} does not take the shards that its in_types give it, of the"
                f" shapes {', '.join(map(str, shards))}: {' '.join(str(error).split())}",
                error,
                code=CODE,
            )
            if isinstance(in_types, tuple):
                ranks = [len(s) for s in shards] if len(shards) == len(in_types) else []
                _with_entries(said, in_types, range(len(in_types)), self.made, ranks)
            raise said from error

    def body(
        self,
        fn: Callable[..., Any],
        ins: Sequence[_ClaimedArray],
        tree: Any,
        out_types: Any,
        mesh: AbstractMesh,
    ) -> _Body:
        """The body from the shards of one device to its shards of the results. `fn` is the region's
        function, or one in its place; its collectives name axes of `mesh`."""

        def local(*shards: Any) -> Any:
            results = returning_arrays(fn)(*jax.tree.unflatten(tree, shards))
            return jax.tree.map(jnp.asarray, results)

        mapped = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=tuple(PartitionSpec(*self.dims(h)) for h in ins),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
        closed, out = jax.make_jaxpr(mapped, return_shape=True)(
            *(jax.ShapeDtypeStruct(h.aval.shape, h.aval.dtype) for h in ins)
        )
        outer, consts = _jax.open_jaxpr(closed)
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
        outs, out_tree = jax.tree.flatten(out)
        arrays = [jnp.asarray(c) for c in closed_over]
        return _Body(
            params=eqn.params,
            ins=[*(self.claim(c, NdSbp()) for c in arrays), *ins],
            outs=[
                self.whole(o, t)
                for o, t in zip(
                    outs, leaf_types(out_types, out, "out_types", self.mesh), strict=True
                )
            ],
            tree=out_tree,
            closed_over=arrays,
        )
