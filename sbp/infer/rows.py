"""ND rows of a node: a row for each mesh axis. The rows of an inner axis are computed on the shapes
that the rows of the outer axes leave on a device."""

import functools
import itertools
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sbp import _jax
from sbp.infer.space import Code, Codes, decode, encode
from sbp.machine.mesh import MeshSpec
from sbp.signatures import Kernel, Op, Row, all_b, kernel_named, rule_for
from sbp.signatures.region import REGION_OPS, check_mesh, region_rows
from sbp.trace.collectives import SHARD_MAP
from sbp.trace.graph import Graph, Node
from sbp.trace.places import computes_in_host
from sbp.types import MONOIDS, Unreduced

# ---- shards -------------------------------------------------------------------------------------
# The shards that rows work on.


def localise(aval: Any, code: Code, n: int) -> Any:
    """The shape, dtype and memory of one of the `n` shards of a value under a code."""
    return (
        aval
        if code <= 0
        else _split_aval(tuple(aval.shape), aval.dtype, _jax.in_host(aval), code - 1, n)
    )


@functools.lru_cache(maxsize=65536)
def _split_aval(shape: tuple[int, ...], dtype: Any, host: bool, dim: int, n: int) -> Any:
    return _jax.empty_aval((*shape[:dim], -(-shape[dim] // n), *shape[dim + 1 :]), dtype, host=host)


# ---- rows ---------------------------------------------------------------------------------------


EMPTY: frozenset[str] = frozenset()


AxisRow = tuple[tuple[Code, ...], tuple[Code, ...], str]
"""A row on one mesh axis: the codes of operands, the codes of results, and the kernel."""


@dataclass(frozen=True, slots=True)
class NdRow:
    """One signature over all mesh axes, in codes: a type for each operand and each result."""

    ins: tuple[Codes, ...]
    outs: tuple[Codes, ...]
    kernels: tuple[str, ...] = ()

    @staticmethod
    def whole(ins: int, outs: int, axes: int) -> "NdRow":
        """The row that computes on whole operands, by the numbers of operands, results and mesh
        axes."""
        return NdRow(((0,) * axes,) * ins, ((0,) * axes,) * outs, ("local",) * axes)

    def by_axis(self, free: Container[int] = ()) -> tuple[AxisRow | None, ...]:
        """The row on each mesh axis; None on the axes at the positions in `free`."""
        return tuple(
            None
            if k in free
            else (tuple(t[k] for t in self.ins), tuple(t[k] for t in self.outs), kernel)
            for k, kernel in enumerate(self.kernels)
        )

    def on(self, position: int) -> Row:
        """The row on one mesh axis, by its position."""
        ins, outs = (tuple(decode(t[position]) for t in types) for types in (self.ins, self.outs))
        return Row(ins, outs, *self.kernels[position : position + 1])

    def at(self, column: int) -> Codes:
        """The type of an operand by its number, or of a result: results are counted after
        operands."""
        count = len(self.ins)
        return self.ins[column] if column < count else self.outs[column - count]


Choice = NdRow | Codes
"""What a typing has for a decision: the row of a node, or the type of a value that no row makes."""


Avals = tuple[tuple[Any, ...], tuple[Any, ...]]
"""Avals of operands and of results."""


PartialRow = tuple[tuple[Code, ...], tuple[tuple[int, frozenset[str]], ...]]
"""A row on one mesh axis with a partial result: the codes of its operands; and for each partial
result, its number and monoid."""


def _once(method: Callable[..., Iterable[Any]]) -> Callable[..., tuple[Any, ...]]:
    """Decorator: a method of a `RowTable` runs once for equal operations on equal avals. Its first
    arguments are the node, whether it rounds, and the avals of operands and of results."""

    @functools.wraps(method)
    def found(
        table: "RowTable",
        node: Node,
        rounds: bool,
        ins: Sequence[Any],
        outs: Sequence[Any],
        *more: Hashable,
    ) -> tuple[Any, ...]:
        key = method, table.operation(node, rounds), _aval_key(ins), _aval_key(outs), more
        if key not in table.known:
            table.known[key] = tuple(dict.fromkeys(method(table, node, rounds, ins, outs, *more)))
        return table.known[key]

    return found


class RowTable:
    """The rows of nodes on one mesh, cached.

    Arguments:
      mesh: the mesh.
      communicates: whether it has rows whose kernels have collectives. A policy that forbids
          conversions forbids these, too.
    """

    def __init__(self, mesh: MeshSpec, *, communicates: bool = True) -> None:
        self.mesh, self.communicates = mesh, communicates
        self.known: dict[Any, tuple[Any, ...]] = {}
        self._operations: dict[Any, int] = {}
        self._numbers: dict[tuple[str, int, bool], int] = {}
        self._all_local = ("local",) * len(mesh.sizes)
        self._keep: list[Any] = []

    def _is_offered(self, kernel: Kernel) -> bool:
        """Whether rows with a kernel are in the table. Kernels that compute while they send are
        left out on hardware that cannot: it gathers first, for the same bytes."""
        return not kernel.communicates or (
            self.communicates and (self.mesh.hardware.overlaps or not kernel.overlaps)
        )

    def rows_on(
        self, node: Node, rounds: bool, ins: Sequence[Any], outs: Sequence[Any], position: int
    ) -> tuple[Row, ...]:
        """The rows of a node on the mesh axis at a position.

        Arguments:
          node: the node, which may be a hand-written region.
          rounds: whether it is a cast that may round the parts of a sum.
          ins: avals of its operands.
          outs: avals of its results.
          position: of the mesh axis.
        """
        name, n = self.mesh.axes[position]
        if node.op == SHARD_MAP:
            where = f" at {node.span}" if node.span else ""
            check_mesh(node.params, self.mesh.names, self.mesh.sizes, where)
        return (
            region_rows(Op(node.op, node.params, tuple(ins), tuple(outs), n), name)
            if node.op in REGION_OPS
            else self._rows_of(node, rounds, ins, outs, n)
        )

    @_once
    def _rows_of(
        self, node: Node, rounds: bool, ins: Sequence[Any], outs: Sequence[Any], n: int
    ) -> Iterable[Row]:
        """The rows of a node that is no region on a mesh axis of `n` devices."""
        rule, op = rule_for(node.op), Op(node.op, node.params, tuple(ins), tuple(outs), n, rounds)
        # The primitive itself computes in host memory, on shards without padding. Kernels of sbp
        # mix their operands with indices and masks, which lie in device memory.
        in_host = computes_in_host(node, (*ins, *outs))
        return (
            r
            for r in ((all_b(op),) if rule is None else rule.rows(op))
            if self._is_offered(kernel_named(r.kernel))
            and (not in_host or (r.kernel == "local" and op.has_even_shards(r)))
        )

    @_once
    def partial_rows(
        self, node: Node, rounds: bool, ins: Sequence[Any], outs: Sequence[Any], position: int
    ) -> Iterable[PartialRow]:
        """The rows of a node on one mesh axis that have a partial result; arguments as
        `rows_on`."""
        for row in self.rows_on(node, rounds, ins, outs, position):
            yields = tuple(
                (i, frozenset((a.monoid,)))
                for i, a in enumerate(row.outs)
                if isinstance(a, Unreduced)
            )
            if yields:
                yield tuple(map(encode, row.ins)), yields

    def rows_in(
        self,
        graph: Graph,
        node: Node,
        native: Mapping[int, frozenset[str]],
        rounding: Container[int] = (),
        wanted: tuple[AxisRow | None, ...] = (),
    ) -> tuple[NdRow, ...]:
        """The ND rows of a node of a program.

        Arguments:
          graph: the program.
          node: the node.
          native: for each value of the program, the monoids under which it can be partial without a
            conversion.
          rounding: the ids of casts that may round the parts of a sum.
          wanted: as for `rows`.
        """
        return self.rows(
            node,
            node.id in rounding,
            [graph.aval(o) for o in node.inputs],
            [graph.avals[o] for o in node.outputs],
            tuple(native.get(o, EMPTY) if isinstance(o, int) else EMPTY for o in node.inputs),
            wanted,
        )

    @_once
    def rows(
        self,
        node: Node,
        rounds: bool,
        ins: Sequence[Any],
        outs: Sequence[Any],
        native: tuple[frozenset[str], ...],
        wanted: tuple[AxisRow | None, ...] = (),
    ) -> Iterable[NdRow]:
        """The ND rows of a node.

        Arguments:
          node, rounds, ins, outs: as for `rows_on`.
          native: for each operand, the monoids under which it can be partial without a conversion.
            Rows that `worth_having` refuses are left out.
          wanted: for each mesh axis, the only row there if the node has it, None for all rows;
            empty for all rows on all axes.
        """
        found = self._extend(node, rounds, native, wanted, (tuple(ins), tuple(outs)))
        rule = rule_for(node.op)
        return (
            found
            if rule is None or (fits := rule.fits) is None
            else (r for r in found if fits(node.params, self.mesh.axes, (*r.ins, *r.outs)))
        )

    def operation(self, node: Node, rounds: bool) -> int:
        """The number of a node's operator and parameters; equal ones have one number. Nodes that
        share their parameters, as the copies of an edited program do, are compared once."""
        key = node.op, id(node.params), rounds
        if key not in self._numbers:
            self._keep.append(node.params)  # since its id is in the key
            same = node.op, node.params_key(self._keep), rounds
            self._numbers[key] = self._operations.setdefault(same, len(self._operations))
        return self._numbers[key]

    def _extend(
        self,
        node: Node,
        rounds: bool,
        native: tuple[frozenset[str], ...],
        wanted: tuple[AxisRow | None, ...],
        avals: Avals,
        outer: tuple[AxisRow, ...] = (),
    ) -> Iterator[NdRow]:
        """The ND rows of a node that begin with rows on the outer mesh axes.

        Arguments:
          node, rounds, native, wanted: as for `rows`.
          avals: of operands and of results, as the outer axes leave them.
          outer: the row on each outer axis.
        """
        (ins, outs), kernels = avals, tuple(kernel for *_, kernel in outer)
        if len(kernels) == len(self._all_local):
            row = NdRow(
                tuple(tuple(codes[i] for codes, *_ in outer) for i in range(len(ins))),
                tuple(tuple(codes[o] for _, codes, _ in outer) for o in range(len(outs))),
                kernels,
            )
            # Reductions under different monoids on different axes do not commute.
            one_monoid = all(
                min(t, default=0) >= 0 or len({c for c in t if c < 0}) == 1
                for t in (*row.ins, *row.outs)
            )
            if one_monoid and (kernels == self._all_local or nests(row)):
                yield row
            return
        branches = self._branches(node, rounds, ins, outs, len(kernels))
        here = wanted[len(kernels)] if wanted else None
        for row, inner in [b for b in branches if here in (None, b[0])] or branches:
            codes, _, kernel = row
            goes_round = kernel in kernels and kernel_named(kernel).gathers is not None
            # The shards of an operand go round one axis at most.
            if worth_having(codes, native) and not goes_round:
                yield from self._extend(node, rounds, native, wanted, inner, (*outer, row))

    @_once
    def _branches(
        self,
        node: Node,
        rounds: bool,
        ins: tuple[Any, ...],
        outs: tuple[Any, ...],
        position: int,
    ) -> Iterable[tuple[AxisRow, Avals]]:
        """The rows of a node on one mesh axis, with the shapes that they leave for inner axes.

        Arguments:
          node, rounds: as for `rows_on`.
          ins, outs: avals of operands and results, as the outer axes leave them.
          position: of the mesh axis.
        """
        n = self.mesh.sizes[position]
        for row in self.rows_on(node, rounds, ins, outs, position):
            codes_in, codes_out = tuple(map(encode, row.ins)), tuple(map(encode, row.outs))
            has_shards = _large(ins, codes_in, n) and _large(outs, codes_out, n)
            if has_shards and (n > 1 or not any((*codes_in, *codes_out))):
                gathered = kernel_named(row.kernel).gathers
                inner = (
                    a if i == gathered else localise(a, c, n)
                    for i, (a, c) in enumerate(zip(ins, codes_in, strict=True))
                )
                inner_outs = (localise(a, c, n) for a, c in zip(outs, codes_out, strict=True))
                yield (codes_in, codes_out, row.kernel), (tuple(inner), tuple(inner_outs))


def worth_having(codes: tuple[Code, ...], native: tuple[frozenset[str], ...]) -> bool:
    """Whether a row on one mesh axis may be in a cheapest typing.

    A row that takes P and B, but no split operand, is only of use if some operand can be P without
    a conversion. Otherwise an operand would be converted from B to P, only to be reduced later.

    Arguments:
      codes: the codes of the operands.
      native: for each operand, the monoids under which it can be partial without a conversion.
    """
    partial = (MONOIDS[-1 - c] in m for c, m in zip(codes, native, strict=True) if c < 0)
    return min(codes, default=0) >= 0 or max(codes) > 0 or any(partial)


def nests(row: NdRow) -> bool:
    """Whether all kernels of a row can run. Some kernels need that no other mesh axis splits the
    dim that their axis splits."""
    for position, kernel in enumerate(map(kernel_named, row.kernels)):
        if not kernel.nests:
            concerned = (
                (*row.ins, *row.outs) if kernel.gathers is None else (row.ins[kernel.gathers],)
            )
            if any(t[position] > 0 and t.count(t[position]) > 1 for t in concerned):
                return False
    return True


def seen_codes(row: NdRow) -> tuple[Codes, ...]:
    """The types of the operands as the local computation sees them: B on a mesh axis whose kernel
    gathers the operand."""
    gathered = [kernel_named(name).gathers for name in row.kernels]  # by mesh axis
    return tuple(
        tuple(0 if operand == i else c for c, operand in itertools.zip_longest(codes, gathered))
        for i, codes in enumerate(row.ins)
    )


def _large(avals: tuple[Any, ...], codes: tuple[Code, ...], n: int) -> bool:
    """Whether each split dim has at least one element for each device. Other splits leave devices
    empty, and occur only where an annotation asks for them."""
    return all(c <= 0 or a.shape[c - 1] >= n for a, c in zip(avals, codes, strict=True))


def _aval_key(avals: Sequence[Any]) -> tuple[Any, ...]:
    return tuple((a.shape, a.dtype, _jax.in_host(a)) for a in avals)
