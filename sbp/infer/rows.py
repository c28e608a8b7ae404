"""ND rows of a node: one row for each mesh axis, the inner ones found on shapes that the outer ones
have localised."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sbp import _jax
from sbp.infer.policy import Rules
from sbp.infer.space import Code, Codes, decode, encode, local_shape
from sbp.machine.mesh import MeshSpec
from sbp.signatures import Kernel, Op, Row, Sent, all_b, kernel_named, rule_for
from sbp.signatures.region import REGION_OPS, check_mesh, region_rows
from sbp.trace.collectives import SHARD_MAP
from sbp.trace.graph import Graph, Node
from sbp.types import MONOIDS, Unreduced

EMPTY: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class NdRow:
    """One signature over all mesh axes, in codes: a type for each operand and each result."""

    ins: tuple[Codes, ...]
    outs: tuple[Codes, ...]
    kernels: tuple[str, ...] = ()

    def at(self, column: int) -> Codes:
        """The type of an operand, or of a result: those are counted after the operands."""
        count = len(self.ins)
        return self.ins[column] if column < count else self.outs[column - count]


@dataclass(frozen=True, slots=True)
class _Branch:
    """A row on one mesh axis in codes, and the shapes that it leaves for the axes inside of it."""

    ins: tuple[Code, ...]
    outs: tuple[Code, ...]
    kernel: str
    inner_ins: tuple[Any, ...]
    inner_outs: tuple[Any, ...]
    goes_round: bool


@dataclass(frozen=True, slots=True)
class _OuterRow:
    """A row on the outer mesh axes in codes, and the shapes that it leaves for the axes inside."""

    inner_ins: tuple[Any, ...]
    inner_outs: tuple[Any, ...]
    ins: tuple[tuple[Code, ...], ...] = ()
    outs: tuple[tuple[Code, ...], ...] = ()
    kernels: tuple[str, ...] = ()

    def then(self, b: _Branch) -> _OuterRow:
        """The row with one more axis."""
        done = (*self.ins, b.ins), (*self.outs, b.outs), (*self.kernels, b.kernel)
        return _OuterRow(b.inner_ins, b.inner_outs, *done)


@dataclass(frozen=True, slots=True)
class _Partial:
    """A row on one mesh axis that yields something partial: what it takes, and (result, monoid) of
    what it yields."""

    ins: tuple[Code, ...]
    yields: tuple[tuple[int, frozenset[str]], ...]


def _localised(aval: Any, code: Code, n: int) -> Any:
    if code <= 0:
        return aval
    return _split_aval(tuple(aval.shape), aval.dtype, code - 1, n)


@functools.lru_cache(maxsize=65536)
def _split_aval(shape: tuple[int, ...], dtype: Any, dim: int, n: int) -> Any:
    return _jax.empty_aval((*shape[:dim], -(-shape[dim] // n), *shape[dim + 1 :]), dtype)


class RowTable:
    """Finds and caches the rows of nodes on one mesh.

    Arguments:
      mesh: the mesh.
      communicates: whether rows may be had whose kernels have collectives; a policy that forbids
          conversions forbids them too.
    """

    def __init__(self, mesh: MeshSpec, *, communicates: bool = True) -> None:
        self.mesh = mesh
        self.communicates = communicates
        self._cache: dict[Any, tuple[NdRow, ...]] = {}
        self._axis_cache: dict[Any, tuple[Row, ...]] = {}
        self._operations: dict[Any, int] = {}
        self._all_local = ("local",) * len(mesh.sizes)
        self._branch_cache: dict[Any, tuple[_Branch, ...]] = {}
        self._partial_cache: dict[Any, tuple[_Partial, ...]] = {}
        self._keep: list[Any] = []

    def axis_rows(
        self, node: Node, ins: Sequence[Any], outs: Sequence[Any], n: int
    ) -> tuple[Row, ...]:
        """The rows of a node on one mesh axis of size n, on given avals."""
        key = (node.op, node.params_key(self._keep), _aval_key(ins), _aval_key(outs), n)
        if key not in self._axis_cache:
            found = rule_for(node.op)
            op = Op(node.op, node.params, tuple(ins), tuple(outs), n)
            if found is None:
                rows: Sequence[Row] = (all_b(op),)
            else:
                rows = found.rows(op)
            self._axis_cache[key] = tuple(
                r for r in rows if self._is_offered(kernel_named(r.kernel))
            )
        return self._axis_cache[key]

    def _is_offered(self, kernel: Kernel) -> bool:
        """Kernels that compute while they send are of no use to hardware that cannot: it gathers
        first, for the same bytes."""
        return not kernel.communicates or (
            self.communicates and (self.mesh.hardware.overlaps or not kernel.overlaps)
        )

    def rows_on(
        self, node: Node, ins: Sequence[Any], outs: Sequence[Any], position: int
    ) -> tuple[Row, ...]:
        """The rows of a node on the mesh axis at a position, on given avals."""
        name, n = self.mesh.axes[position]
        if node.op not in REGION_OPS:
            return self.axis_rows(node, ins, outs, n)
        if node.op == SHARD_MAP:
            check_mesh(
                node.params,
                self.mesh.names,
                self.mesh.sizes,
                f" at {node.span}" if node.span else "",
            )
        return region_rows(Op(node.op, node.params, tuple(ins), tuple(outs), n), name)

    def partial_rows(
        self, node: Node, ins: Sequence[Any], outs: Sequence[Any], position: int
    ) -> tuple[_Partial, ...]:
        """Of the rows of a node on one mesh axis those that yield something partial."""
        key = (node.op, node.params_key(self._keep), _aval_key(ins), _aval_key(outs), position)
        if key not in self._partial_cache:
            found = []
            for row in self.rows_on(node, ins, outs, position):
                yields = tuple(
                    (i, frozenset((a.monoid,)))
                    for i, a in enumerate(row.outs)
                    if isinstance(a, Unreduced)
                )
                if yields:
                    found.append(_Partial(tuple(map(encode, row.ins)), yields))
            self._partial_cache[key] = tuple(dict.fromkeys(found))
        return self._partial_cache[key]

    def rows(
        self, node: Node, ins: Sequence[Any], outs: Sequence[Any], native: Sequence[frozenset[str]]
    ) -> tuple[NdRow, ...]:
        """All ND rows of a node.

        Arguments:
          node: the node.
          ins: avals of its operands.
          outs: avals of its results.
          native: for each operand, the monoids it can be partial under without a conversion. A row
            that takes P from none of them is left out: what is B becomes P at no cost only to be
            reduced again.
        """
        key = (node.op, node.params_key(self._keep), _aval_key(ins), _aval_key(outs), tuple(native))
        if key not in self._cache:
            operation = self._operations.setdefault(key[:2], len(self._operations))
            found = self._extended(
                operation, node, tuple(native), _OuterRow(tuple(ins), tuple(outs))
            )
            self._cache[key] = tuple(dict.fromkeys(found))
        return self._cache[key]

    def _extended(
        self, operation: int, node: Node, native: tuple[frozenset[str], ...], outer: _OuterRow
    ) -> Iterator[NdRow]:
        """The ND rows of a node that begin with a row on the outer mesh axes."""
        kernels = outer.kernels
        if len(kernels) == len(self._all_local):
            row = NdRow(
                tuple(zip(*outer.ins, strict=True)), tuple(zip(*outer.outs, strict=True)), kernels
            )
            if _one_monoid(row) and (kernels == self._all_local or nests(row)):
                yield row
            return
        for b in self._branches(operation, node, outer.inner_ins, outer.inner_outs, len(kernels)):
            # An operand goes round one axis at most; over others it is gathered before.
            if worth_having(b.ins, native) and not (b.goes_round and b.kernel in kernels):
                yield from self._extended(operation, node, native, outer.then(b))

    def _branches(
        self, operation: int, node: Node, ins: tuple[Any, ...], outs: tuple[Any, ...], position: int
    ) -> tuple[_Branch, ...]:
        """The rows of a node on one mesh axis, with what they leave for the axes inside of it."""
        n = self.mesh.sizes[position]
        key = operation, _aval_key(ins), _aval_key(outs), position
        if key not in self._branch_cache:
            found = []
            for row in self.rows_on(node, ins, outs, position):
                codes_in, codes_out = tuple(map(encode, row.ins)), tuple(map(encode, row.outs))
                if (
                    (n > 1 or not any((*codes_in, *codes_out)))
                    and _large(ins, codes_in, n)
                    and _large(outs, codes_out, n)
                ):
                    gathered = kernel_named(row.kernel).gathers
                    inner = (
                        a if i == gathered else _localised(a, c, n)
                        for i, (a, c) in enumerate(zip(ins, codes_in, strict=True))
                    )
                    inner_outs = tuple(
                        _localised(a, c, n) for a, c in zip(outs, codes_out, strict=True)
                    )
                    found.append(
                        _Branch(
                            codes_in,
                            codes_out,
                            row.kernel,
                            tuple(inner),
                            inner_outs,
                            gathered is not None,
                        )
                    )
            self._branch_cache[key] = tuple(found)
        return self._branch_cache[key]


def worth_having(codes: tuple[Code, ...], native: tuple[frozenset[str], ...]) -> bool:
    """Rows that take only P and B are worth having when an operand can be P by itself; with a split
    operand the parts differ anyhow."""
    partial = [(c, m) for c, m in zip(codes, native, strict=True) if c < 0]
    return not partial or any(c > 0 for c in codes) or any(MONOIDS[-1 - c] in m for c, m in partial)


def _one_monoid(row: NdRow) -> bool:
    """Whether no value is partial under different monoids on different axes, which do not
    commute."""
    return all(
        min(t, default=0) >= 0 or len({c for c in t if c < 0}) == 1 for t in (*row.ins, *row.outs)
    )


def nests(row: NdRow) -> bool:
    """Whether kernels that take a dim for split over one axis alone have it so."""
    for position, name in enumerate(row.kernels):
        kernel = kernel_named(name)
        if not kernel.nests:
            concerned = (
                (*row.ins, *row.outs) if kernel.gathers is None else (row.ins[kernel.gathers],)
            )
            if any(t[position] > 0 and t.count(t[position]) > 1 for t in concerned):
                return False
    return True


def seen_codes(row: NdRow) -> tuple[Codes, ...]:
    """The operands' types as the local computation sees them: whole over axes whose kernels gather
    them."""
    seen = [list(t) for t in row.ins]
    for position, name in enumerate(row.kernels):
        gathered = kernel_named(name).gathers
        if gathered is not None:
            seen[gathered][position] = 0
    return tuple(map(tuple, seen))


def row_sends(graph: Graph, node: Node, row: NdRow, mesh: MeshSpec) -> tuple[tuple[int, Sent], ...]:
    """What the kernels of a row send, with the position of the mesh axis: each on shapes that the
    other axes have localised."""
    placed = _PlacedRow(graph, node, row, mesh)
    found: list[tuple[int, Sent]] = []
    for position, name in enumerate(row.kernels):
        sends = kernel_named(name).sends
        if sends is not None:
            op, on_axis = placed.on_axis(position)
            ins = list(op.ins)
            for other in range(len(row.kernels)):
                ins = placed.widened(ins, other, position) if other != position else ins
            found += [
                (position, sent) for sent in sends(dataclasses.replace(op, ins=tuple(ins)), on_axis)
            ]
    return tuple(found)


def allowed_rows(
    graph: Graph, node: Node, rows: tuple[NdRow, ...], rules: Rules, mesh: MeshSpec
) -> tuple[NdRow, ...]:
    """The rows whose kernels send nothing that rules forbid.

    Arguments:
      graph: the program.
      node: the node.
      rows: its rows.
      rules: the rules at the node.
      mesh: the mesh.
    """
    if rules.unlimited:
        return rows
    return tuple(
        r
        for r in rows
        if rules.allows_kernel(r.kernels) and rules.allows_sent(row_sends(graph, node, r, mesh))
    )


@dataclass(frozen=True, slots=True, eq=False)
class _PlacedRow:
    """A row of a node on a mesh."""

    graph: Graph
    node: Node
    row: NdRow
    mesh: MeshSpec

    def on_axis(self, position: int) -> tuple[Op, Row]:
        """The operation and the row as one mesh axis has them, the others having localised the
        shapes."""
        node, row = self.node, self.row
        ins = tuple(
            _localised_by_others(self.graph.aval(o), c, self.mesh, position)
            for o, c in zip(node.inputs, row.ins, strict=True)
        )
        outs = tuple(
            _localised_by_others(self.graph.avals[v], c, self.mesh, position)
            for v, c in zip(node.outputs, row.outs, strict=True)
        )
        atoms = (tuple(decode(c[position]) for c in types) for types in (row.ins, row.outs))
        return Op(node.op, node.params, ins, outs, self.mesh.sizes[position]), Row(
            *atoms, kernel=row.kernels[position]
        )

    def widened(self, ins: list[Any], other: int, position: int) -> list[Any]:
        """Operands as they are once the kernel on another mesh axis has exchanged a dim before that
        of this axis."""
        widens = kernel_named(self.row.kernels[other]).widens
        if widens is None:
            return ins
        op, on_axis = self.on_axis(other)
        out = list(ins)
        for operand, dim, size in widens(op, on_axis):
            if dim + 1 < self.row.ins[operand][position]:
                shape = list(out[operand].shape)
                shape[dim] = size
                out[operand] = _jax.empty_aval(shape, out[operand].dtype)
        return out


def _localised_by_others(aval: Any, codes: Codes, mesh: MeshSpec, position: int) -> Any:
    kept = tuple(0 if i == position else c for i, c in enumerate(codes))
    return _jax.empty_aval(local_shape(aval.shape, kept, mesh.sizes), aval.dtype)


def _large(avals: tuple[Any, ...], codes: tuple[Code, ...], n: int) -> bool:
    """Splits of dims smaller than the axis leave devices empty; they are only made where an
    annotation asks."""
    return all(c <= 0 or a.shape[c - 1] >= n for a, c in zip(avals, codes, strict=True))


def _aval_key(avals: Sequence[Any]) -> tuple[Any, ...]:
    return tuple((a.shape, a.dtype) for a in avals)
