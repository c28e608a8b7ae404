"""`sbp.manual`: a region written by hand with named-axis collectives, whose claimed types are checked when it is traced.

The region becomes one `jax.shard_map` in which every mesh axis is mentioned in every operand and result: what is not split has a
leading dim over the axis. A B operand is broadcast to it and a P result reduced over it, in plain sight: the gradient of a B operand
is then P, to be reduced where that is cheapest, and JAX's own rules need no reduction inside the region.

    >>> import jax.numpy as jnp
    >>> from jax import lax
    >>> matmul = manual(lambda x, w: lax.psum(x @ w, "model"), in_types=("model:S(1)", "model:S(0)"), out_types="B")
    >>> matmul(jnp.ones((2, 4)), jnp.ones((4, 3))).shape  # outside sbp.jit: axes of size 1
    (2, 3)
"""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from sbp import _jax
from sbp.annotate import as_type
from sbp.errors import Diagnostic, Label, SbpError, SbpInternalError, SbpTypeError, SbpWarning, Span, nearest
from sbp.mesh import MeshSpec
from sbp.signatures.factors import admissible
from sbp.signatures.laws import Types, assemble, localised, place
from sbp.signatures.shards import neutral
from sbp.trace.build import body_graph
from sbp.trace.evaluate import evaluate
from sbp.trace.graph import Graph, Node
from sbp.types import B, NdSbp, Split, Unreduced

CHECKED_ELEMENTS = 2**22
"""Claims are checked on values of the region's real shapes up to this many elements over all devices."""


@dataclass(frozen=True, slots=True, eq=False)
class _Scope:
    """The `sbp.jit` that is tracing, and the regions that it has checked."""

    mesh: MeshSpec
    checked: set[str] = field(default_factory=set)


_SCOPE: ContextVar[_Scope | None] = ContextVar("sbp_manual_scope", default=None)


@contextlib.contextmanager
def tracing_for(mesh: MeshSpec) -> Iterator[None]:
    """While `sbp.jit` traces a function for a mesh: `manual` regions are made for it, and no trace made for another is taken."""
    token = _SCOPE.set(_Scope(mesh))
    try:
        with _jax.own_traces(f"sbp.jit {mesh}"):
            yield
    finally:
        _SCOPE.reset(token)


# ---- two primitives: a value as the parts of a mesh axis, and back ----------------------------------------------------------------

parts_p = _jax.Primitive("sbp_parts")
"""x -> [n, *x.shape]: parts whose reduction over the leading dim is x (x itself and neutral elements)."""

pick_p = _jax.Primitive("sbp_pick")
"""[n, ..] -> [..]: one of parts that are all equal (the first)."""


def _parts(x: Any, *, mesh_axis: str, n: int, monoid: str) -> Any:
    del mesh_axis
    rest = jnp.broadcast_to(jnp.asarray(neutral(monoid, x.dtype), x.dtype), (n - 1, *x.shape))
    return jnp.concatenate([x[None], rest])


def _pick(x: Any, *, mesh_axis: str) -> Any:
    del mesh_axis
    return x[0]


def _parts_jvp(primals: Any, tangents: Any, *, mesh_axis: str, n: int, monoid: str) -> Any:
    (x,), (t,) = primals, tangents
    out = parts_p.bind(x, mesh_axis=mesh_axis, n=n, monoid=monoid)
    if type(t) is _jax.ad.Zero:
        return out, _jax.ad.Zero.from_primal_value(out)
    if monoid == "sum":
        return out, parts_p.bind(t, mesh_axis=mesh_axis, n=n, monoid=monoid)
    if monoid in ("max", "min"):  # only the part that holds the extremum matters, whichever it is
        return out, jnp.broadcast_to(t[None], (n, *t.shape))
    raise SbpError(f"a manual region has no gradient for an operand that is P({monoid}); reduce it before the region")


def _parts_batch(args: Any, dims: Any, **params: Any) -> Any:
    return parts_p.bind(*args, **params), dims[0] + 1


def _pick_batch(args: Any, dims: Any, **params: Any) -> Any:
    (x,), (d,) = args, dims
    return pick_p.bind(jnp.moveaxis(x, 0, 1) if d == 0 else x, **params), max(d - 1, 0)


def _pick_transpose(ct: Any, x: Any, *, mesh_axis: str) -> Any:
    if type(ct) is _jax.ad.Zero:
        return [_jax.ad.Zero(x.aval)]
    return [parts_p.bind(ct, mesh_axis=mesh_axis, n=x.aval.shape[0], monoid="sum")]


def _parts_transpose(ct: Any, x: Any, *, mesh_axis: str, n: int, monoid: str) -> Any:
    del n, monoid  # linear in sums alone
    return [_jax.ad.Zero(x.aval) if type(ct) is _jax.ad.Zero else pick_p.bind(ct, mesh_axis=mesh_axis)]


def _pick_jvp(primals: Any, tangents: Any, *, mesh_axis: str) -> Any:
    (x,), (t,) = primals, tangents
    out = pick_p.bind(x, mesh_axis=mesh_axis)
    zero = type(t) is _jax.ad.Zero
    return out, _jax.ad.Zero.from_primal_value(out) if zero else pick_p.bind(t, mesh_axis=mesh_axis)


parts_p.def_impl(_parts)
parts_p.def_abstract_eval(lambda x, *, mesh_axis, n, monoid: _jax.empty_aval((n, *x.shape), x.dtype))
pick_p.def_impl(_pick)
pick_p.def_abstract_eval(lambda x, *, mesh_axis: _jax.empty_aval(x.shape[1:], x.dtype))
_jax.mlir.register_lowering(parts_p, _jax.mlir.lower_fun(_parts, multiple_results=False))
_jax.mlir.register_lowering(pick_p, _jax.mlir.lower_fun(_pick, multiple_results=False))
_jax.ad.primitive_jvps[parts_p] = _parts_jvp
_jax.ad.primitive_jvps[pick_p] = _pick_jvp
_jax.ad.primitive_transposes[parts_p] = _parts_transpose
_jax.ad.primitive_transposes[pick_p] = _pick_transpose
_jax.batching.primitive_batchers[parts_p] = _parts_batch
_jax.batching.primitive_batchers[pick_p] = _pick_batch


# ---- the public function ----------------------------------------------------------------------------------------------------------


def manual(fn: Callable[..., Any], in_types: Any, out_types: Any, *, padded: bool = False) -> Callable[..., Any]:
    """A region written by hand: `fn` sees the shards of one device and may use collectives over the names of the mesh axes.

    Arguments:
      fn: takes positional arrays or pytrees of them, returns a pytree of arrays.
      in_types: for each argument a pytree prefix of complete types: how `fn` takes it. B: each device has the whole; P: each has a
        part, and `fn` must depend on the reduction of the parts alone.
      out_types: a pytree prefix of types for what `fn` returns. B: it is equal on all devices; P: it is still to be reduced.
      padded: a split dim that does not divide comes in blocks rounded up, with padding of unspecified content; split results keep
        their padded length. Without it such a dim is an error.

    Returns:
      A function of global arrays. Inside `sbp.jit` it runs on the mesh, with gradients; elsewhere on axes of size 1.

    Raises (when it is called):
      SbpTypeError: `manual-types` when `fn` does not keep the types it claims.
      SbpError: `unknown-axis`, `dim-out-of-range`, `type-syntax`, `bad-argument` for a dim that does not divide.

    >>> total = manual(lambda x: lax.psum(x.sum(), "data"), in_types="data:S(0)", out_types="B")
    >>> float(total(jnp.arange(4.0)))
    6.0
    """
    if not callable(fn):
        raise SbpError(f"sbp.manual takes a function, got {fn!r}")

    @functools.wraps(fn)
    def region(*args: Any) -> Any:
        scope = _SCOPE.get()
        if scope is None:
            return _alone(fn, in_types, out_types, args)
        return _Region(fn, scope, padded).run(in_types, out_types, args)

    return region


def _is_type(x: Any) -> bool:
    return x is None or isinstance(x, NdSbp | str | PartitionSpec | NamedSharding | Split | Unreduced | type(B))


def _leaf_types(types: Any, tree: Any, where: str, mesh: MeshSpec | None) -> list[NdSbp]:
    """The type of each leaf of a pytree of arrays, from a prefix of types."""
    leaves, structure = jax.tree.flatten(tree)
    found: list[NdSbp] = [NdSbp()] * len(leaves)

    def assign(t: Any, subtree: Any) -> None:
        for i in jax.tree.leaves(subtree):
            if t is None:
                raise SbpError(f'{where} leaves a type open; a manual region needs complete types, such as "B"', code="type-syntax")
            own = as_type(t, np.ndim(leaves[i]), mesh.names if mesh else None)
            if own.free:
                raise SbpError(f"{where}: {own!r} leaves an axis open; a manual region needs complete types", code="type-syntax")
            for name, atom in own.items():
                if mesh is not None:
                    mesh.size(name)
                if isinstance(atom, Unreduced) and atom.monoid not in admissible(leaves[i].dtype):
                    raise SbpError(f"{where}: an array of {leaves[i].dtype} cannot be {atom!r}")
            found[i] = own

    try:
        jax.tree.map(assign, types, jax.tree.unflatten(structure, range(len(leaves))), is_leaf=_is_type)
    except ValueError as error:
        raise SbpError(f"{where} is no prefix of what it types: {str(error).splitlines()[0]}") from error
    return found


def _per_argument(in_types: Any, args: Sequence[Any]) -> tuple[Any, ...]:
    types = in_types if isinstance(in_types, tuple) else (in_types,)
    if len(types) != len(args):
        raise SbpError(f"in_types of the manual region has {len(types)} entries for {len(args)} arguments; give one each")
    return types


def _alone(fn: Callable[..., Any], in_types: Any, out_types: Any, args: Sequence[Any]) -> Any:
    """The region on axes of size 1: those its types name, and those its collectives ask for."""
    args = tuple(jax.tree.map(jnp.asarray, a) for a in args)
    types = [t for e, a in zip(_per_argument(in_types, args), args, strict=True) for t in _leaf_types(e, a, "in_types", None)]
    names = list(dict.fromkeys(name for t in types for name in t))
    while True:
        inner = fn
        for name in names:
            inner = jax.vmap(inner, axis_size=1, axis_name=name)
        lifted = jax.tree.map(lambda x: x[(None,) * len(names)], args)  # noqa: B023  # called at once
        try:
            outs = inner(*lifted)
        except NameError as error:
            missing = _jax.unbound_axis(error)
            if missing is None or missing in names:
                raise
            names.append(missing)
            continue
        result = jax.tree.map(lambda y: y[(0,) * len(names)], outs)  # noqa: B023
        _leaf_types(out_types, result, "out_types", None)
        return result


# ---- inside sbp.jit ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Held:
    """One operand or result of a region: its type, and its shape as the whole program sees it."""

    type: NdSbp
    atoms: Types
    shape: tuple[int, ...]
    dtype: Any

    def local(self, sizes: Sequence[int]) -> tuple[int, ...]:
        return localised(self.shape, self.atoms, sizes)


class _Region:
    """One call of a manual region on the mesh of the `sbp.jit` that is tracing."""

    def __init__(self, fn: Callable[..., Any], scope: _Scope, padded: bool) -> None:
        self.fn, self.scope, self.mesh, self.padded = fn, scope, scope.mesh, padded
        names, sizes = self.mesh.names, self.mesh.sizes
        self.abstract = AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))
        self.ones = (1,) * len(sizes)
        self.name = getattr(fn, "__name__", "the function")
        self.span: Span | None = _jax.caller_span()

    def run(self, in_types: Any, out_types: Any, args: Sequence[Any]) -> Any:
        """Traces the body on local shapes, checks its claims, and binds it between the conversions of its operands and results."""
        args = tuple(jax.tree.map(jnp.asarray, a) for a in args)
        flat, tree = jax.tree.flatten(args)
        types = [t for e, a in zip(_per_argument(in_types, args), args, strict=True) for t in _leaf_types(e, a, "in_types", self.mesh)]
        flat = [self.even(x, t, i) for i, (x, t) in enumerate(zip(flat, types, strict=True))]
        ins = [self.held(x, t) for x, t in zip(flat, types, strict=True)]
        body, closed_over, out_tree, local_outs = self.body(ins, tree)
        ins = [*(self.held(c, NdSbp()) for c in closed_over), *ins]
        out_claims = _leaf_types(out_types, jax.tree.unflatten(out_tree, local_outs), "out_types", self.mesh)
        outs = [self.whole(o, t) for o, t in zip(local_outs, out_claims, strict=True)]
        captured = len(closed_over)
        self.check(body, ins, outs, captured)
        encoded = [self.encode(x, h) for x, h in zip((*closed_over, *flat), ins, strict=True)]
        mapped = jax.shard_map(
            lambda *shards: self.shards(body, ins, outs, captured, shards),
            mesh=self.abstract,
            in_specs=tuple(self.spec(h) for h in ins),
            out_specs=tuple(self.spec(h) for h in outs),
            check_vma=False,
        )
        results = mapped(*encoded)
        return jax.tree.unflatten(out_tree, [self.decode(y, h) for y, h in zip(results, outs, strict=True)])

    # ---- operands and results ------------------------------------------------------------------------------------------------

    def held(self, x: Any, t: NdSbp) -> _Held:
        aval = jax.typeof(x)
        return _Held(t, t.over(self.mesh.names), tuple(aval.shape), aval.dtype)

    def whole(self, local: Any, t: NdSbp) -> _Held:
        """A result as the whole program sees it: split dims are as long as their blocks together."""
        shape = list(local.shape)
        for atom, n in zip(t.over(self.mesh.names), self.mesh.sizes, strict=True):
            if isinstance(atom, Split):
                shape[atom.dim] *= n
        return _Held(t, t.over(self.mesh.names), tuple(shape), local.dtype)

    def even(self, x: Any, t: NdSbp, number: int) -> Any:
        """An operand whose split dims divide: padded block by block where that is asked for."""
        for dim, size in enumerate(x.shape):
            counts = [n for atom, n in zip(t.over(self.mesh.names), self.mesh.sizes, strict=True) if atom == Split(dim)]
            if size % math.prod(counts) == 0:
                continue
            if not self.padded:
                raise SbpError(
                    f"operand {number} of manual region {self.name!r} has {size} elements on dim {dim}, which {math.prod(counts)} devices do "
                    f"not share evenly under {t!r}; pad it, or pass padded=True to get blocks that are rounded up"
                )
            x = _padded(x, dim, counts)
        return x

    def spec(self, held: _Held) -> PartitionSpec:
        """Leading dims for the axes that split no dim, in the order of the mesh, then the tensor's own."""
        leading = [name for name, atom in zip(self.mesh.names, held.atoms, strict=True) if not isinstance(atom, Split)]
        dims: list[tuple[str, ...]] = [()] * len(held.shape)
        for name, atom in zip(self.mesh.names, held.atoms, strict=True):
            if isinstance(atom, Split):
                dims[atom.dim] = (*dims[atom.dim], name)
        return PartitionSpec(*leading, *(d or None for d in dims))

    def encode(self, x: Any, held: _Held) -> Any:
        for name, n, atom in reversed(list(zip(self.mesh.names, self.mesh.sizes, held.atoms, strict=True))):
            if isinstance(atom, Unreduced):
                x = parts_p.bind(x, mesh_axis=name, n=n, monoid=atom.monoid)
            elif not isinstance(atom, Split):
                x = jnp.broadcast_to(x, (n, *x.shape))
        return x

    def decode(self, y: Any, held: _Held) -> Any:
        for name, atom in zip(self.mesh.names, held.atoms, strict=True):
            if isinstance(atom, Unreduced):
                y = _reduced(y, atom.monoid)
            elif not isinstance(atom, Split):
                y = pick_p.bind(y, mesh_axis=name)
        return y

    # ---- the body ------------------------------------------------------------------------------------------------------------

    def body(self, ins: Sequence[_Held], tree: Any) -> tuple[Any, list[Any], Any, list[Any]]:
        """The body as a jaxpr from shards to shards, each with one leading dim of size 1 per mesh axis.

        Returns:
          The jaxpr; the arrays that `fn` closes over, which are its first operands; the tree and the local shapes of the results.
        """
        seen: list[Any] = []

        def local(*shards: Any) -> Any:
            out = self.fn(*jax.tree.unflatten(tree, [x.reshape(x.shape[len(self.ones) :]) for x in shards]))
            leaves, out_tree = jax.tree.flatten(jax.tree.map(jnp.asarray, out))
            seen.append((out_tree, [jax.ShapeDtypeStruct(y.shape, y.dtype) for y in leaves]))
            return tuple(y.reshape(*self.ones, *y.shape) for y in leaves)

        spec = PartitionSpec(*self.mesh.names)
        mapped = jax.shard_map(local, mesh=self.abstract, in_specs=(spec,) * len(ins), out_specs=spec, check_vma=False)
        shapes = [jax.ShapeDtypeStruct((*self.mesh.sizes, *h.local(self.mesh.sizes)), h.dtype) for h in ins]
        outer, consts = _jax.open_jaxpr(jax.make_jaxpr(mapped)(*shapes))
        out_tree, outs = seen[-1]
        if len(outer.eqns) != 1:
            raise SbpInternalError(f"a manual region traces to one equation, got\n{outer}")
        (eqn,) = outer.eqns
        values = dict(zip(outer.constvars, consts, strict=True))
        closed_over = [v.val if isinstance(v, _jax.Literal) else values[v] for v in eqn.invars[: len(eqn.invars) - len(ins)]]
        if list(eqn.invars[len(closed_over) :]) != list(outer.invars):
            raise SbpInternalError(f"the operands of a manual region are not where they are expected:\n{outer}")
        return eqn.params["jaxpr"], [jnp.asarray(c) for c in closed_over], out_tree, outs

    def shards(self, body: Any, ins: Sequence[_Held], outs: Sequence[_Held], captured: int, shards: Sequence[Any]) -> tuple[Any, ...]:
        """The body on shards with the leading dims of their specs, instead of one for each mesh axis."""
        results = _jax.eval_jaxpr(body, self.stacked(ins, captured, shards))
        leading = [sum(not isinstance(a, Split) for a in h.atoms) for h in outs]
        return tuple(y.reshape((1,) * k + y.shape[len(self.ones) :]) for y, k in zip(results, leading, strict=True))

    def stacked(self, ins: Sequence[_Held], captured: int, shards: Sequence[Any]) -> list[Any]:
        """Shards as the body takes them: what it closes over plainly, the others with one leading dim for each mesh axis."""
        shapes = [h.local(self.mesh.sizes) if i < captured else self.ones + h.local(self.mesh.sizes) for i, h in enumerate(ins)]
        return [x.reshape(s) for x, s in zip(shards, shapes, strict=True)]

    # ---- the claims ----------------------------------------------------------------------------------------------------------

    def check(self, body: Any, ins: Sequence[_Held], outs: Sequence[_Held], captured: int) -> None:
        """Whether the claimed types hold: on random values, B results are equal on all devices, and what a P operand's parts are
        does not matter as long as their reduction is the same.

        Raises:
          SbpTypeError: `manual-types` naming every claim that does not hold.
        """
        claims_b = [i for i, h in enumerate(outs) if any(a == B and n > 1 for a, n in zip(h.atoms, self.mesh.sizes, strict=True))]
        claims_p = [i for i, h in enumerate(ins) if any(isinstance(a, Unreduced) and n > 1 for a, n in zip(h.atoms, self.mesh.sizes, strict=True))]
        key = f"{body}\n{[h.type for h in ins]}\n{[h.type for h in outs]}"
        if not (claims_b or claims_p) or key in self.scope.checked:
            return
        self.scope.checked.add(key)
        graph = body_graph(body)
        size = sum(math.prod(h.local(self.mesh.sizes)) for h in (*ins, *outs)) * self.mesh.num_devices
        size = max(size, self.mesh.num_devices * max((math.prod(a.shape) for a in graph.avals.values()), default=0))
        if size > CHECKED_ELEMENTS:
            self.unchecked(f"it holds {size:,} elements over all devices, more than the {CHECKED_ELEMENTS:,} that are tried")
            return
        first = self.outcome(graph, ins, outs, captured, 0)
        if first is None:
            return
        found = [text for i in claims_b for text in self.unequal(first[i], outs[i], i)]
        if claims_p and not found:
            second = self.outcome(graph, ins, outs, captured, 1)
            assert second is not None
            for i, h in enumerate(outs):
                one, other = (assemble(v[i], h.atoms, self.mesh.sizes, h.shape, self.zeros) for v in (first, second))
                if _differ(one, other):
                    which = ", ".join(f"operand {k} ({ins[k].type!r})" for k in claims_p)
                    found.append(f"result {i} depends on how {which} is parted, not on its reduction alone")
        if found:
            labels = () if self.span is None else (Label(span=self.span, text=found[0], primary=True),)
            notes = (*found[not labels or 1 :], "the region was run on random values, device by device")
            title = f"manual region `{self.name}` does not keep the types it claims"
            raise SbpTypeError([Diagnostic(code="manual-types", severity="error", title=title, labels=labels, notes=notes)])

    @property
    def zeros(self) -> tuple[int, ...]:
        return (0,) * len(self.ones)

    def unequal(self, values: _Placed, held: _Held, number: int) -> Iterator[str]:
        """Mesh axes on which a result claims B though its readers see different values."""
        want = assemble(values, held.atoms, self.mesh.sizes, held.shape, self.zeros)
        for k, (name, n, atom) in enumerate(zip(self.mesh.names, self.mesh.sizes, held.atoms, strict=True)):
            for i in range(1, n if atom == B else 0):
                reader = (*self.zeros[:k], i, *self.zeros[k + 1 :])
                if _differ(assemble(values, held.atoms, self.mesh.sizes, held.shape, reader), want):
                    yield f"result {number} claims B on mesh axis `{name}`, but index {i} holds another value than index 0"
                    break

    def outcome(self, graph: Graph, ins: Sequence[_Held], outs: Sequence[_Held], captured: int, way: int) -> list[_Placed] | None:
        """The results of all devices on random operands; None where the collectives cannot be run on one device.

        Arguments:
          way: values are the same for all ways, the parts of P operands are not.
        """
        sizes = self.mesh.sizes
        spread = [_spread(h, sizes, np.random.default_rng([7, i]), np.random.default_rng([way, i])) for i, h in enumerate(ins)]

        def one(*shards: Any) -> list[Any]:
            return [y.reshape(y.shape[len(self.ones) :]) for y in evaluate(graph, self.stacked(ins, captured, shards), _ONE_AXIS_AT_A_TIME)]

        emulated: Callable[..., Any] = one
        for name in reversed(self.mesh.names):
            emulated = jax.vmap(emulated, axis_name=name)
        try:
            with jax.ensure_compile_time_eval():
                results = jax.device_get([_plain(y) for y in jax.jit(emulated)(*spread)])
        except (NotImplementedError, AssertionError, ValueError) as error:
            self.unchecked(f"one device alone cannot run it: {(str(error).splitlines() or ['?'])[0]}")
            return None
        return [{index: np.asarray(y[index]) for index in np.ndindex(*sizes)} for y in results]

    def unchecked(self, why: str) -> None:
        where = f" at {self.span}" if self.span else ""
        warnings.warn(f"manual-types: the types that manual region {self.name!r}{where} claims are not checked; {why}", SbpWarning, stacklevel=2)


_Placed = dict[tuple[int, ...], np.ndarray]
"""The part of each device, by its index on each mesh axis."""

_CHECK_TOLERANCE = {8: 1e-8, 4: 1e-3, 2: 1e-1, 1: 5e-1}
"""Relative tolerance of the check by bytes of one real number: parts that cancel lose digits, a claim that does not hold loses all."""


def _differ(got: np.ndarray, want: np.ndarray) -> bool:
    if not jnp.issubdtype(want.dtype, np.inexact):
        return not np.array_equal(got, want)
    itemsize = want.dtype.itemsize // (2 if jnp.issubdtype(want.dtype, np.complexfloating) else 1)
    wide = np.complex128 if jnp.issubdtype(want.dtype, np.complexfloating) else np.float64
    got, want = got.astype(wide), want.astype(wide)
    finite = np.isfinite(want) & np.isfinite(got)
    scale = max(1e-6, float(np.max(np.abs(want), where=finite, initial=0.0)))
    with np.errstate(invalid="ignore"):
        near = np.abs(got - want) <= _CHECK_TOLERANCE[itemsize] * scale
    return not bool(np.where(finite, near, ~np.isfinite(want) & ~np.isfinite(got)).all())


def _spread(held: _Held, sizes: Sequence[int], values: np.random.Generator, ways: np.random.Generator) -> Any:
    """Random values of an operand, parted among the devices by its type: an array with one leading dim for each mesh axis."""
    key = _jax.is_extended(held.dtype)
    dtype = np.dtype(np.uint32) if key else np.dtype(held.dtype)
    shape = (*held.shape, *_jax.key_shape(held.dtype)) if key else held.shape
    if dtype == np.bool_:
        x = values.integers(0, 2, shape).astype(np.bool_)
    elif jnp.issubdtype(dtype, np.integer):
        x = values.integers(0, 8, shape).astype(dtype)
    else:
        x = values.standard_normal(shape).astype(dtype)
    placed = place(x, held.atoms, sizes, ways)
    out = np.stack([placed[index] for index in np.ndindex(*sizes)])
    out = out.reshape(*sizes, *out.shape[1:])
    return _jax.wrap_key(out, held.dtype) if key else out


def _plain(y: Any) -> Any:
    return jax.random.key_data(y) if _jax.is_extended(y.dtype) else y


def _gather(node: Node, args: Sequence[Any]) -> list[Any]:
    """An all-gather axis by axis, the inner one first; `vmap` has none over several axes."""
    p = node.params
    names = p["axis_name"] if isinstance(p["axis_name"], tuple) else (p["axis_name"],)
    if len(names) == 1 or p.get("axis_index_groups") is not None or not p["tiled"]:
        return _jax.bind(node.primitive, args, p)
    (x,) = args
    for name in reversed(names):
        x = lax.all_gather(x, name, axis=p["all_gather_dimension"], tiled=True)
    return [x]


def _scatter(node: Node, args: Sequence[Any]) -> list[Any]:
    """A reduce-scatter axis by axis, the outer one first."""
    p = node.params
    names = p["axis_name"] if isinstance(p["axis_name"], tuple) else (p["axis_name"],)
    if len(names) == 1 or p.get("axis_index_groups") is not None or not p["tiled"]:
        return _jax.bind(node.primitive, args, p)
    (x,) = args
    for name in names:
        x = lax.psum_scatter(x, name, scatter_dimension=p["scatter_dimension"], tiled=True)
    return [x]


_ONE_AXIS_AT_A_TIME = {"all_gather": _gather, "reduce_scatter": _scatter}


def _reduced(y: Any, monoid: Literal["sum", "max", "min", "prod", "and", "or"] | str) -> Any:
    """The reduction of the leading dim."""
    match monoid:
        case "sum":
            return jnp.sum(y, 0, dtype=y.dtype)
        case "max":
            return jnp.max(y, 0)
        case "min":
            return jnp.min(y, 0)
        case "prod":
            return jnp.prod(y, 0, dtype=y.dtype)
        case _:
            return lax.reduce(y, neutral(monoid, y.dtype), lax.bitwise_and if monoid == "and" else lax.bitwise_or, (0,))


def _padded(x: Any, dim: int, counts: Sequence[int]) -> Any:
    """`x` with each block of a nested split rounded up, outer axis first; zeros stand for the unspecified content."""
    shape = x.shape
    x = jnp.moveaxis(x, dim, -1)
    for n in counts:
        size = -(-x.shape[-1] // n)
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, n * size - x.shape[-1])])
        x = x.reshape(*x.shape[:-1], n, size)
    x = x.reshape(*(s for i, s in enumerate(shape) if i != dim), -1)
    return jnp.moveaxis(x, -1, dim)
