"""Contractions: dot_general with batch dims, einsums, ragged_dot, convolutions, linear algebra,
FFTs."""

import math
from typing import Any

from tests.fuzz.draw import Draw, Op, Want, like, products, smooth
from tests.fuzz.ops_elementwise import same

EINSUMS = (  # two operands; the sizes of letters come from the first, new ones from the pool
    "ij,jk->ik",
    "ij,kj->ki",
    "ij,ij->i",
    "ij,ij->",
    "bij,bjk->bik",
    "bij,bkj->kbi",
    "bi,bj->bij",
    "ij,k->kij",
    "bthd,bshd->bhts",
    "gsm,me->gse",
    "gsec,gsm->egcm",
    "abc,cb->a",
    "ab,ab->ba",
    "i,i->",
    "i,j->ij",
    "ijk,ik->ji",
    "bij,j->ib",
)


def _dims(d: Draw) -> Any:
    """Contracted and batch dims of `a`, with where each stands in `b` and the shape of `b`."""
    a = d["a"].shape
    order = list(range(len(a)))
    d.rng.shuffle(order)
    contract = order[: d.int(0 if len(a) > 1 else 1, min(2, len(a)))]
    rest = order[len(contract) :]
    batch = sorted(rest[: d.int(0, len(rest))])
    kinds = (
        [("c", i) for i in contract]
        + [("b", i) for i in batch]
        + [("f", d.size()) for _ in range(d.int(0, 2))]
    )
    d.rng.shuffle(kinds)
    shape = tuple(n if k == "f" else a[n] for k, n in kinds)
    where = {(k, n): p for p, (k, n) in enumerate(kinds)}
    d.params["other"] = shape
    d.params["count"] = math.prod(a[i] for i in contract)
    dims = (
        (tuple(contract), tuple(where["c", i] for i in contract)),
        (
            tuple(batch),
            tuple(where["b", i] for i in batch),
        ),
    )
    return dims


def _preferred(d: Draw) -> str:
    match d["a"].dtype:
        case "bfloat16" | "float16":
            return d.choice(("None", "jnp.float32"))
        case "int8" | "int16" | "uint8":
            return d.choice(("None", "jnp.int32"))
        case _:
            return "None"


def _equation(d: Draw) -> str:
    equation = d.choice([e for e in EINSUMS if len(e.split(",")[0]) == d["a"].ndim])
    sizes = dict(zip(equation.split(",")[0], d["a"].shape, strict=True))
    second = equation.split(",")[1].split("->")[0]
    for letter in second:
        sizes.setdefault(letter, d.size())
    d.params["other"] = tuple(sizes[x] for x in second)
    d.params["count"] = math.prod(n for x, n in sizes.items() if x not in equation.split("->")[1])
    return equation


_counted = lambda d: float(d["count"])


_other = lambda d: d["other"]


def _groups(d: Draw) -> list[int]:
    """Sizes of three groups of rows, which need not cover all."""
    m = d["a"].shape[0]
    first = d.int(0, m)
    second = d.int(0, m - first)
    return [first, second, m - first - second if d.chance(0.7) else 0]


def _convolution(rank: int) -> Any:
    """Parameters of a convolution over `rank` dims; the shape of its kernel goes to `other`."""

    def draw(d: Draw) -> str:
        shape = d["a"].shape
        window = tuple(d.int(1, 3) for _ in range(rank))
        groups = d.choice([g for g in (1, 1, 2, shape[1]) if shape[1] % g == 0])
        batches = d.choice([g for g in (1, 1, 1, 2) if shape[0] % g == 0 and groups == 1])
        d.params["other"] = (d.choice((1, 2, 3, 8)) * groups * batches, shape[1] // groups, *window)
        d.params["count"] = math.prod(window) * shape[1] // groups
        strides = tuple(d.choice((1, 1, 2)) for _ in window)
        padding: Any = (
            d.choice(("SAME", "VALID"))
            if d.chance(0.4)
            else tuple((d.int(-1, 2), d.int(0, 2)) for _ in window)
        )
        lhs = tuple(d.choice((1, 1, 2)) for _ in window) if not isinstance(padding, str) else None
        rhs = tuple(d.choice((1, 1, 2)) for _ in window)
        return (
            f"{strides}, {padding!r}, {lhs}, {rhs}, feature_group_count={groups},"
            f" batch_group_count={batches}"
        )

    return draw


_CONV = "lax.conv_general_dilated({a}, {b}, {how}) * 0.25"


def _square(kinds: str = "s", high: int = 3) -> Want:
    return Want(
        kinds,
        2,
        high,
        fits=lambda i: i.shape[-1] == i.shape[-2] and i.shape[-1] <= 8,
        shape=_batch_of_squares,
    )


def _batch_of_squares(d: Draw) -> tuple[int, ...]:
    n = d.int(1, 8)
    return (*(d.size() for _ in range(d.int(0, 1))), n, n)


_NEAR_ONE = "(jnp.eye({a}.shape[-1]) + jnp.tanh({a}) * (0.5 / {a}.shape[-1]))"
_POSITIVE = f"({_NEAR_ONE} @ jnp.swapaxes({_NEAR_ONE}, -1, -2))"
_SYMMETRIC = (
    "(jnp.diag(jnp.arange({a}.shape[-1]) * 2.0) + (jnp.tanh({a}) + jnp.swapaxes(jnp.tanh({a}), -1,"
    " -2)) * (0.25 / {a}.shape[-1]))"
)

OPS: tuple[Op, ...] = (
    Op(
        "dot_general",
        "lax.dot_general({a}, {b}, {dims}, preferred_element_type={to}) * {scale}",
        {
            "a": Want("fi", 1, 3),
            "dims": _dims,
            "b": Want("fi", shape=_other, dtype=same()),
            "to": _preferred,
            "scale": lambda d: "1" if d["a"].kind == "i" else d.choice(("1", "0.25")),
        },
        lambda d, outs: [_dot(d)],
        weight=4,
    ),
    Op(
        "einsum",
        "jnp.einsum('{equation}', {a}, {b})",
        {"a": Want("fi", 1, 4), "equation": _equation, "b": Want("fi", shape=_other, dtype=same())},
        products(_counted),
        weight=4,
    ),
    Op(
        "matmul_weights",
        "{a} @ {b}",
        {
            "a": Want("f", 1, 3),
            "b": Want("f", shape=lambda d: (d["a"].shape[-1], d.size()), dtype=same()),
        },
        products(lambda d: d["a"].shape[-1]),
        weight=3,
    ),
    Op(
        "gram", "jnp.einsum('...ij,...kj->...ik', {a}, {a}) * 0.25", {"a": Want("f", 2, 3)}, like(2)
    ),
    Op(
        "mixed_dot",
        "jnp.dot({a}, {b}.astype(jnp.float32), precision='highest')",
        {"a": Want("s", 1, 2), "b": Want("f", shape=lambda d: (d["a"].shape[-1], d.size()))},
        products(lambda d: d["a"].shape[-1]),
    ),
    Op(
        "attention",
        "jnp.einsum('...ts,...sd->...td', jax.nn.softmax(jnp.einsum('...td,...sd->...ts', {a}, {b})"
        " * 0.5), {b})",
        {"a": Want("f", 2, 4), "b": Want("f", shape=lambda d: d["a"].shape, dtype=same())},
        like(),
        weight=1.5,
    ),
    Op(
        "mlp",
        "jax.nn.gelu({a} @ {b}) @ {c} * 0.25",
        {
            "a": Want("f", 2, 3),
            "n": lambda d: d.size(),
            "b": Want("f", shape=lambda d: (d["a"].shape[-1], d["n"]), dtype=same()),
            "c": Want("f", shape=lambda d: (d["n"], d.size()), dtype=same()),
        },
        like(4),
        weight=1.5,
    ),
    Op(
        "ragged_dot",
        "lax.ragged_dot({a}, {b}, jnp.array({groups}, jnp.int32)) * 0.25",
        {
            "a": Want("s", 2, 2),
            "groups": _groups,
            "b": Want("s", shape=lambda d: (3, d["a"].shape[1], d.size())),
        },
        like(4),
        weight=1.5,
    ),
    Op(
        "ragged_dot_dynamic",
        "lax.ragged_dot({a}, {b}, jnp.sort({i}) % 3) * 0.25",
        {
            "a": Want("s", 2, 2),
            "i": Want("i", shape=lambda d: (3,), dtype=lambda d: "int32"),
            "b": Want("s", shape=lambda d: (3, d["a"].shape[1], d.size())),
            "room": lambda d: d.choice([True] if d["a"].shape[0] >= 6 else []),
        },
        like(4),
    ),
    Op(
        "conv1d",
        _CONV,
        {"a": Want("f", 3, 3), "how": _convolution(1), "b": Want("f", shape=_other, dtype=same())},
        like(4),
    ),
    Op(
        "conv2d",
        _CONV,
        {
            "a": Want(
                "s", shape=lambda d: (d.int(1, 4), d.choice((1, 2, 4)), d.int(3, 8), d.int(3, 8))
            ),
            "how": _convolution(2),
            "b": Want("s", shape=_other),
        },
        like(4),
        weight=1.5,
    ),
    Op(
        "conv_channels_last",
        "lax.conv_general_dilated({a}, {b}, (1,), 'SAME', dimension_numbers=('NWC', 'WIO', 'NWC'))"
        " * 0.25",
        {
            "a": Want("s", 3, 3),
            "b": Want("s", shape=lambda d: (d.int(1, 3), d["a"].shape[2], d.size())),
        },
        like(4),
    ),
    Op(
        "convolve",
        "jnp.convolve({a}, {b}, mode={mode}) * 0.25",
        {
            "a": Want("s", 1, 1),
            "b": Want("s", shape=lambda d: (d.int(1, 4),)),
            "mode": lambda d: repr(d.choice(("same", "full", "valid"))),
        },
        like(2),
    ),
    # ---- linear algebra, near the identity: well conditioned and without pivoting ---------------
    Op("cholesky", f"jnp.linalg.cholesky({_POSITIVE})", {"a": _square()}, smooth(2)),
    Op("qr", f"jnp.linalg.qr({_NEAR_ONE})", {"a": _square()}, smooth(2)),
    Op(
        "triangular_solve",
        f"lax.linalg.triangular_solve({_NEAR_ONE}, {{b}}, left_side={{left}}, lower={{low}},"
        " transpose_a={turn}, unit_diagonal={unit})",
        {
            "a": _square(),
            "left": lambda d: d.chance(),
            "low": lambda d: d.chance(),
            "turn": lambda d: d.chance(),
            "unit": lambda d: d.chance(0.3),
            "b": Want(
                "s",
                shape=lambda d: (
                    *d["a"].shape[:-2],
                    *(
                        (d["a"].shape[-1], d.int(1, 8))
                        if d["left"]
                        else (d.int(1, 8), d["a"].shape[-1])
                    ),
                ),
            ),
        },
        like(2),
    ),
    Op(
        "solve",
        f"jnp.linalg.solve({_NEAR_ONE}, {{b}})",
        {"a": _square(), "b": Want("s", shape=lambda d: (*d["a"].shape[:-1], d.int(1, 4)))},
        like(2),
    ),
    Op("inverse", f"jnp.linalg.inv({_NEAR_ONE})", {"a": _square()}, smooth(2), weight=0.5),
    Op("determinant", f"jnp.linalg.det({_NEAR_ONE})", {"a": _square()}, smooth(2), weight=0.5),
    Op(
        "eigenvalues",
        f"jnp.linalg.eigvalsh({_SYMMETRIC})",
        {"a": _square()},
        smooth(16),
        weight=0.5,
        stops=True,
    ),
    Op(
        "singular_values",
        f"jnp.linalg.svd({_SYMMETRIC} + 3 * jnp.eye({{a}}.shape[-1]), compute_uv=False)",
        {"a": _square()},
        smooth(16),
        weight=0.5,
        stops=True,
    ),
    Op(
        "tridiagonal_solve",
        "lax.linalg.tridiagonal_solve(jnp.tanh({a}) * 0.25, jnp.ones_like({a}) * 2, jnp.tanh({a}) *"
        " 0.25, {b})",
        {"a": Want("s", 1, 2), "b": Want("s", shape=lambda d: (*d["a"].shape, d.int(1, 4)))},
        like(),
        weight=0.4,
        stops=True,
    ),
    # ---- FFTs -----------------------------------------------------------------------------------
    Op(
        "fft",
        "jnp.fft.{how}({a}, axis={axis}) * 0.25",
        {
            "a": Want("cs", 1, 3),
            "axis": lambda d: d.dim("a"),
            "how": lambda d: d.choice(("fft", "ifft")),
        },
        like(2),
    ),
    Op(
        "rfft",
        "jnp.fft.rfft({a}, axis={axis}) * 0.25",
        {"a": Want("s", 1, 3), "axis": lambda d: d.dim("a")},
        like(2),
    ),
    Op(
        "irfft",
        "jnp.fft.irfft({a}, axis={axis})",
        {
            "a": Want("c", 1, 3),
            "axis": lambda d: d.choice([i for i, n in enumerate(d["a"].shape) if n > 1]),
        },
        like(2),
    ),
    Op("fft2", "jnp.fft.fft2({a}) * 0.125", {"a": Want("cs", 2, 3)}, like(2)),
    Op(
        "complex_dot",
        "jnp.einsum('...i,...i->...', {a}, {b}) * 0.25",
        {"a": Want("c", 1, 3), "b": Want("c", shape=lambda d: d["a"].shape)},
        like(2),
    ),
)


def _dot(d: Draw) -> tuple[bool, float, int]:
    (known,) = products(_counted)(d, [d["a"]])
    return known[0], known[1], known[2] + (2 if d["scale"] != "1" else 0)
