"""Rows over two mesh axes, as `sbp.infer` finds them: the inner axis splits what the outer one
leaves, also along the same dim and unevenly; and products in which both operands go round, each on
a mesh axis of its own."""

import itertools
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from samples import FILL, Equation, equation, f, i, keys, rows

from sbp.infer.rows import RowTable
from sbp.infer.space import decode
from sbp.machine.mesh import mesh_spec
from sbp.signatures import Row, kernel_named
from sbp.signatures.laws.oracle import ListPlace, OpTypes, Oracle
from sbp.trace.graph import Node
from sbp.trace.slices import join_slices_p
from sbp.types import MONOIDS, B, P, S, Split
from tests.slices import sliced

pytestmark = pytest.mark.laws

WINDOWS_OF = lax.GatherDimensionNumbers(
    offset_dims=(1, 2), collapsed_slice_dims=(), start_index_map=(0, 1)
)
WINDOWS_INTO = lax.ScatterDimensionNumbers(
    update_window_dims=(1, 2), inserted_window_dims=(), scatter_dims_to_operand_dims=(0, 1)
)


def in_place(x, y, value):
    """Three elements of one array, those of another one behind them, and a scalar at the end."""
    pieces = ((0, 0, 3), (1, 3, x.shape[0] - 4), (2, 0, 1))
    return join_slices_p.bind(x, y, value, dimension=0, pieces=pieces)


CASES = {
    "reshape": [
        (lambda x: x.reshape(4, 2), (f(8),)),
        (lambda x: x.reshape(8), (f(4, 2),)),
        (lambda x: x.reshape(24), (f(8, 3),)),
        (lambda x: x.reshape(10, 2, 2), (f(10, 4),)),
        (lambda x: x.reshape(2, 2, 6), (f(4, 6),)),
    ],
    "dot_general": [
        (lambda x, y: x @ y, (f(2, 10), f(10, 4))),
        (lambda x, y: x @ y, (f(5, 9), f(9, 7))),
    ],
    "reduce_sum": [(lambda x: jnp.sum(x, 0), (f(10, 4),))],
    "reduce_max": [(lambda x: jnp.max(x, 0), (f(7),))],
    "gather": [
        (
            lambda x, k: x.at[k].get(mode=FILL, wrap_negative_indices=False),
            (f(10), np.array([0, 9, 5, 4, 5, -1, 10, 6], np.int32)),
        ),
        (
            lambda x, k: lax.gather(x, k, WINDOWS_OF, (4, 2), mode=FILL),
            (f(8, 8), np.array([[3, 1], [5, 2], [9, 0]], np.int32)),
        ),
    ],
    "scatter": [
        (
            lambda x, k, y: lax.scatter(x, k, y, WINDOWS_INTO),
            (f(8, 4), np.array([[1, 0], [4, 1]], np.int32), f(2, 4, 2)),
        )
    ],
    "scatter-add": [
        (
            lambda x, k, y: x.at[k].add(y, mode=FILL, wrap_negative_indices=False),
            (f(10), i(5, low=-2, high=12), f(5)),
        )
    ],
    "broadcast_in_dim": [(lambda x: jnp.broadcast_to(x, (6, 4)), (f(4),))],
    "iota": [(lambda: lax.iota(np.int32, 10), ())],
    "random_bits": [(lambda k: jax.random.bits(k, (10,)), (keys(),))],
    "cumsum": [
        (lambda x: jnp.cumsum(x, 1), (f(10, 2),)),
        (lambda x: jnp.cumsum(x, 0), (f(11, 2),)),
    ],
    "cummax": [(lambda x: lax.cummax(x, 0, reverse=True), (f(11, 3),))],
    "argmax": [
        (lambda x: lax.argmax(x, 0, np.int32), (i(11, 4, low=0, high=3),)),
        (lambda x: lax.argmax(x, 0, np.int32), (f(5, 3),)),
    ],
    "top_k": [(lambda x: lax.top_k(x, 3), (i(4, 11, low=0, high=4),))],
    "rev": [(lambda x: lax.rev(x, (0, 1)), (f(7, 5),))],
    "concatenate": [(lambda x, y: jnp.concatenate([x, y]), (f(7, 4), f(5, 4)))],
    "pad": [
        (lambda x: lax.pad(x, np.float32(1), [(1, 2, 1), (-1, 3, 0)]), (f(6, 7),)),
        (lambda x: lax.pad(x, np.float32(1), [(1, 0, 1)]), (f(16),)),
    ],
    "conv_general_dilated": [
        (
            lambda x, y: lax.conv_general_dilated(x, y, (1, 2), "SAME"),
            (f(4, 2, 6, 9), f(4, 2, 3, 3)),
        )
    ],
    "reduce_window_max": [
        (lambda x: lax.reduce_window(x, -np.inf, lax.max, (3, 2), (1, 2), "SAME"), (f(6, 9),))
    ],
    "select_n": [(lambda p, x, y: lax.select_n(p, x, y), (np.arange(10) % 3 == 0, f(10), f(10)))],
    "slice": [
        (lambda x: x[:, 1:3], (f(10, 4),)),
        (lambda x: x[:4], (f(8),)),
        (lambda x: lax.slice(x, (1, 0), (16, 2), (2, 1)), (f(16, 2),)),
    ],
    "join_slices": [
        (in_place, (f(16, 2), f(16, 2, seed=1), np.float32(1.5))),
        (in_place, (f(13, 2), f(13, 2, seed=1), np.float32(1.5))),
    ],
    # Over the outer axis a window becomes as large as what is left of its dim.
    "dynamic_slice": [
        (lambda x, k: lax.dynamic_slice(x, (k, 0), (4, 3)), (f(8, 4), np.int32(3))),
        (lambda x, k: lax.dynamic_slice(x, (k, 0), (1, 5)), (f(4, 10), np.int32(2))),
    ],
    "dynamic_update_slice": [
        (lambda x, y, k: lax.dynamic_update_slice(x, y, (k, 0)), (f(8, 4), f(4, 2), np.int32(3)))
    ],
    "ragged_dot_general": [
        (lax.ragged_dot, (f(10, 4), f(8, 4, 2), np.array([1, 2, 0, 3, 0, 1, 1, 1], np.int32))),
        (
            lambda x, y, g: lax.ragged_dot_general(
                x, y, g, lax.RaggedDotDimensionNumbers((([0], [0]), ([], [])), [0], [])
            ),
            (f(10, 4), f(10, 4), np.array([1, 2, 0, 3, 0, 1, 1, 1], np.int32)),
        ),
    ],
    "triangular_solve": [
        (
            lambda a, y: lax.linalg.triangular_solve(a, y, left_side=True, lower=True),
            (f(3, 3) + 4 * np.eye(3, dtype=np.float32), f(3, 10)),
        )
    ],
}
MESHES = [(4, 2), (2, 4)]
BOTH, TURNED, COLUMNS = (S(0), S(0)), (S(0), S(1)), (S(1), S(1))


def nd_layouts(eqn: Equation, sizes: tuple[int, ...]) -> list[OpTypes]:
    mesh = mesh_spec(jax.sharding.AbstractMesh(sizes, ("outer", "inner")))
    count = len(eqn.op.ins)
    node = Node(
        id=0,
        op=eqn.op.name,
        primitive=eqn.primitive,
        params=eqn.op.params,
        inputs=tuple(range(count)),
        outputs=tuple(range(count, count + len(eqn.op.outs))),
    )
    found = RowTable(mesh).rows(node, False, eqn.op.ins, eqn.op.outs, (frozenset(MONOIDS),) * count)
    return [
        OpTypes(
            tuple(tuple(map(decode, t)) for t in r.ins),
            tuple(tuple(map(decode, t)) for t in r.outs),
            sizes,
            any(kernel_named(k).communicates for k in r.kernels),
        )
        for r in found
    ]


@pytest.mark.parametrize(
    ("name", "sizes"), sliced(itertools.product(sorted(CASES), MESHES), 1 / 6), ids=str
)
def test_rows_over_two_axes_hold(name: str, sizes: tuple[int, ...]):
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    for fn, args in CASES[name]:
        eqn = equation(name, fn, args)
        oracle = Oracle(eqn.op, eqn.primitive, eqn.args)
        layouts = nd_layouts(eqn, sizes)
        assert any(any(a != B for t in layout.outs for a in t) for layout in layouts)
        for layout in layouts:
            assert not oracle.refute(layout, rng), f"{name} {eqn.op.params}\n{layout}"


layouts_of = lambda name, case, sizes: nd_layouts(equation(name, *CASES[name][case]), sizes)


def test_a_reshape_is_typed_axis_by_axis():
    """(8,) to (4, 2) over 4 and 2: S(0) on both axes becomes S(0) outside and S(1) inside; the
    product of global rows is refuted."""
    eqn = equation("reshape", *CASES["reshape"][0])
    outs = [layout.outs for layout in layouts_of("reshape", 0, (4, 2)) if layout.ins == (BOTH,)]
    assert outs == [(TURNED,)]
    assert Oracle(eqn.op, eqn.primitive, eqn.args).refute(
        OpTypes((BOTH,), (BOTH,), (4, 2)), np.random.default_rng(0)
    )


@pytest.mark.parametrize(
    ("name", "case", "ins", "out"),
    [
        # 10 rows over 2 and 4: blocks of 5, then of 2, so that padding lies inside; each index has
        # one owner.
        ("gather", 0, (BOTH,), (P, P)),
        ("scatter-add", 0, (BOTH,), BOTH),
        ("dot_general", 0, (COLUMNS, BOTH), (P, P)),
    ],
)
def test_both_axes_split_a_dim(name: str, case: int, ins, out):
    assert any(
        layout.ins[: len(ins)] == ins and layout.outs[0] == out
        for layout in layouts_of(name, case, (2, 4))
    )


def test_both_operands_over_both_axes():
    """SUMMA: rows and columns of both operands over the two axes, and of the result; neither
    operand is whole anywhere."""
    assert any(
        r.ins == (TURNED, TURNED) and r.outs == (TURNED,) and r.communicates
        for r in layouts_of("dot_general", 1, (2, 4))
    )


@pytest.mark.parametrize(("name", "case"), [("slice", 2), ("pad", 1), ("join_slices", 1)])
def test_shards_that_have_what_results_read(name: str, case: int):
    """Both axes split the dim, and nothing is sent."""
    for sizes in MESHES:
        found = [r for r in layouts_of(name, case, sizes) if r.ins[0] == r.outs[0] == BOTH]
        assert len(found) == 1 and not found[0].communicates


def test_padding_inside_is_seen(monkeypatch: pytest.MonkeyPatch):
    """A lookup that takes a block for as large as its buffer counts row 5 twice; the oracle says
    so."""
    monkeypatch.setattr(
        ListPlace, "in_extent", lambda self, operand, dim: self.local_ins[operand][dim]
    )
    eqn = equation("gather", *CASES["gather"][0])
    assert Oracle(eqn.op, eqn.primitive, eqn.args).refute(
        OpTypes((BOTH, (B, B)), ((P, P),), (2, 4)), np.random.default_rng(0)
    )


# ---- panels --------------------------------------------------------------------------------------


SIZES = (2, 3)


def pairs(eqn: Equation) -> list[tuple[Row, Row]]:
    """Rows of the two mesh axes in which the right operand goes round on the first one and the left
    operand on the second one, and no dim is split twice."""
    outer, inner = (
        [r for r in rows(eqn, n) if r.kernel == kernel]
        for n, kernel in zip(SIZES, ("rotate_rhs", "rotate_lhs"), strict=True)
    )
    return [
        (a, b)
        for a, b in itertools.product(outer, inner)
        if not any(
            x == y and isinstance(x, Split)
            for x, y in zip((*a.ins, *a.outs), (*b.ins, *b.outs), strict=True)
        )
    ]


@pytest.mark.parametrize(
    ("indices", "args"),
    [
        # In panels where the contracted dim has 6 blocks of one size, and otherwise not.
        *(("ij,jk->ik", (f(7, n), f(n, 5, seed=1))) for n in (24, 6, 7)),
        # Integers exactly, with a batch dim that stays whole and two contracted dims.
        ("baij,bijc->bac", (i(2, 5, 2, 12), i(2, 2, 12, 4, seed=1))),
    ],
    ids=["24", "6", "7", "integers"],
)
def test_both_operands_go_round(indices: str, args):
    eqn = equation("dot_general", lambda x, y: jnp.einsum(indices, x, y), args)
    found = pairs(eqn)
    assert found
    for a, b in found:
        ins, outs = (tuple(zip(*side, strict=True)) for side in ((a.ins, b.ins), (a.outs, b.outs)))
        types = OpTypes(ins, outs, SIZES, communicates=True)
        assert not Oracle(eqn.op, eqn.primitive, eqn.args).refute(
            types, np.random.default_rng(0)
        ), (a, b)
