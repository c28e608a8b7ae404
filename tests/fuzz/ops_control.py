"""Operations that call functions: loops, branches, maps, checkpoints, custom rules, derivatives
inside the program."""

from dataclasses import replace

from tests.fuzz.draw import Body, Draw, Op, Want, branches, returned, smooth, whole
from tests.fuzz.ops_elementwise import same
from tests.fuzz.program import Info


def _row(info: Info) -> Info:
    """One slice of a value along its first dim."""
    return replace(info, shape=info.shape[1:])


def _rounded(info: Info) -> Info:
    """A carried value: of any iteration, so floats round and integers may be anything."""
    return replace(
        info,
        exact=info.kind != "f",
        bound=1.0 if info.kind in "fb" else 2.0**31,
        grid=0,
        weak=False,
    )


_carries = lambda d: [_rounded(d.infos[s]) for s in ("c", "e") if s in d.infos]


def _carry_and_row(d: Draw) -> list[Info]:
    """Parameters of a scan's body: the carries, then a row of each sequence."""
    return [*_carries(d), *(_row(d.infos[s]) for s in ("a", "b") if s in d.infos)]


_tuple = lambda start, count: "(" + "".join(f"{{{i}}}, " for i in range(start, start + count)) + ")"


def _scan_body(outputs: int = 1) -> Body:
    """A body of a scan over `a` (and `b`) with carries `c` (and `e`) that stacks `outputs` results
    of its own."""

    def results(d: Draw) -> list[Info]:
        return [
            *_carries(d),
            *(
                [
                    _rounded(_row(d["a"])),
                    Info((), "float32", False),
                    Info((2,), "int32", True, 2.0**31),
                ][:outputs]
            ),
        ]

    return Body(
        _carry_and_row,
        results,
        takes=lambda d: "carry, xs",
        unpack=lambda d: (
            f"{_tuple(0, len(_carries(d)))},"
            f" {_tuple(len(_carries(d)), len(_carry_and_row(d)) - len(_carries(d)))} = carry, xs"
        ),
        returns=lambda d: f"{_tuple(0, len(_carries(d)))}, {_tuple(len(_carries(d)), outputs)}",
    )


def _loop_body(index: bool = True) -> Body:
    """A body of fori_loop (with a counter) over carries."""
    counter = Info((), "int32", True, 16.0)
    return Body(
        lambda d: [*([counter] if index else []), *_carries(d)],
        _carries,
        takes=lambda d: "{0}, carry" if index else "carry",
        unpack=lambda d: f"{_tuple(int(index), len(_carries(d)))} = carry",
        returns=lambda d: _tuple(0, len(_carries(d))),
    )


_ab = lambda d: [d.infos[s] for s in ("a", "b") if s in d.infos]


def _branch() -> Body:
    """A branch; the first decides the shapes of all."""
    results = lambda d: [_rounded(d["a"]), replace(_rounded(d["b"]), shape=d["b"].shape[1:])]
    return Body(_ab, results, returns=lambda d: "{0}, {1}")


def _mapped(d: Draw) -> list[Info]:
    """Parameters of a vmapped function: `a` without its dim `axis`, and `b` whole or without its
    first."""
    a = d["a"]
    shape = a.shape[: d["axis"]] + a.shape[d["axis"] + 1 :]
    b = d["b"]
    return [replace(a, shape=shape), b if d["other"] is None else replace(b, shape=b.shape[1:])]


def _mapped_b(d: Draw) -> tuple[int, ...]:
    rest = tuple(d.size() for _ in range(d.int(0, 2)))
    return rest if d["other"] is None else (d["a"].shape[d["axis"]], *rest)


_float_result = lambda d: [Info(d["a"].shape, d["a"].dtype, False)]


def _derivative_body() -> Body:
    """A smooth function of `a` to the shape of `a`."""
    return Body(lambda d: [d["a"]], _float_result, returns=lambda d: "{0}", gradient=True)


def _per_row() -> Body:
    return Body(
        lambda d: [_row(d["a"])],
        lambda d: [Info(d["a"].shape[1:], d["a"].dtype, False)],
        returns=lambda d: "{0}",
        gradient=True,
    )


_CARRY = Want("fi", 0, 3, fits=lambda i: not i.weak)
_ROWS = Want("fuib", 1, 3, fits=lambda i: 0 < i.shape[0] <= 8)
_FLAG = Want("b", 0, 0)
_VJP = """\
@jax.custom_vjp
def g{me}(x): return jnp.sin(x) * x
g{me}.defvjp(
    lambda x: (jnp.sin(x) * x, (x, jnp.cos(x))),
    lambda r, t: (t * (jnp.sin(r[0]) + r[0] * r[1]),),
)
g{me}({a})"""
_JVP = """\
@jax.custom_jvp
def g{me}(x, y): return jnp.tanh(x) * y
@g{me}.defjvp
def jvp{me}(p, t):
    y = jnp.tanh(p[0])
    return y * p[1], t[0] * (1 - y**2) * p[1] + y * t[1]
g{me}({a}, {b})"""

OPS: tuple[Op, ...] = (
    Op(
        "scan",
        "jax.tree.leaves(lax.scan({body}, ({c},), ({a},), reverse={rev}))",
        {"c": _CARRY, "a": _ROWS, "rev": lambda d: d.chance(0.4), "body": _scan_body(1)},
        returned(),
        weight=3,
    ),
    Op(
        "scan_pairs",
        "jax.tree.leaves(lax.scan({body}, ({c}, {e}), ({a}, {b}), reverse={rev}, unroll={unroll}))",
        {
            "c": _CARRY,
            "e": _CARRY,
            "a": _ROWS,
            "b": Want(
                "fib",
                1,
                3,
                shape=lambda d: (d["a"].shape[0], *(d.size() for _ in range(d.int(0, 2)))),
            ),
            "rev": lambda d: d.chance(0.4),
            "unroll": lambda d: d.choice((1, 1, 2)),
            "body": _scan_body(3),
        },
        returned(),
        weight=2,
    ),
    Op(
        "scan_carry",
        "lax.scan({body}, ({c},), ({a},))[0][0]",
        {"c": _CARRY, "a": _ROWS, "body": _scan_body(0)},
        returned(),
    ),
    Op(
        "scan_remat",
        "jax.tree.leaves(lax.scan(jax.checkpoint({body}), ({c},), ({a},)))",
        {"c": _CARRY, "a": _ROWS, "body": _scan_body(1)},
        returned(),
    ),
    Op(
        "map",
        "lax.map(lambda x: {body}(x), {a})",
        {"a": Want("f", 2, 3, fits=lambda i: i.shape[0] <= 8), "body": _per_row()},
        returned(),
    ),
    Op(
        "fori",
        "jax.tree.leaves(lax.fori_loop(0, {n}, {body}, ({c}, {e})))",
        {"c": _CARRY, "e": _CARRY, "n": lambda d: d.int(0, 4), "body": _loop_body()},
        returned(),
    ),
    Op(
        "fori_dynamic",
        "jax.tree.leaves(lax.fori_loop(0, jnp.abs({i} % 4), {body}, ({c},)))",
        {"c": _CARRY, "i": Want("i", 0, 0, dtype=lambda d: "int32"), "body": _loop_body()},
        returned(),
        stops=True,
    ),
    Op(
        "while",
        "jax.tree.leaves(lax.while_loop(lambda s: (s[0] < {n}) & (jnp.sum({b}) != 3), lambda s:"
        " (s[0] + 1, *{body}(s[1:])), (0, {c}, {e})))[1:]",
        {
            "c": _CARRY,
            "e": _CARRY,
            "b": Want("i", 0, 2),
            "n": lambda d: d.int(0, 4),
            "body": _loop_body(False),
        },
        returned(),
        weight=2,
        stops=True,
    ),
    Op(
        "while_data",
        "jax.tree.leaves(lax.while_loop(lambda s: jnp.sum(s[0]) < {n}, lambda s: (s[0] + {step},"
        " *{body}(s[1:])), (jnp.abs({i} % 4), {c})))[1:]",
        {
            "c": _CARRY,
            "i": Want("i", 0, 1, dtype=lambda d: "int32"),
            "n": lambda d: d.int(3, 20),
            "step": lambda d: d.int(1, 3),
            "body": _loop_body(False),
        },
        returned(),
        weight=1.5,
        stops=True,
    ),
    Op(
        "cond",
        "lax.cond({p}, {yes}, {no}, {a}, {b})",
        {
            "p": _FLAG,
            "a": Want("fi", 0, 3, fits=lambda i: not i.weak),
            "b": Want("fib", 1, 3, fits=lambda i: not i.weak),
            "yes": _branch(),
            "no": _branch(),
        },
        branches("yes", "no"),
        weight=2,
    ),
    Op(
        "cond_of_data",
        "lax.cond(jnp.sum({i}) > {n}, {yes}, {no}, {a}, {b})",
        {
            "i": Want("i", 0, 2),
            "n": lambda d: d.int(-5, 5),
            "a": Want("fi", 0, 3, fits=lambda i: not i.weak),
            "b": Want("fib", 1, 3, fits=lambda i: not i.weak),
            "yes": _branch(),
            "no": _branch(),
        },
        branches("yes", "no"),
        weight=2,
    ),
    Op(
        "switch",
        "lax.switch({i}, [{one}, {two}, {three}], {a}, {b})",
        {
            "i": Want("i", 0, 0, dtype=lambda d: "int32"),
            "a": Want("fi", 0, 3, fits=lambda i: not i.weak),
            "b": Want("fib", 1, 3, fits=lambda i: not i.weak),
            "one": _branch(),
            "two": _branch(),
            "three": _branch(),
        },
        branches("one", "two", "three"),
    ),
    Op(
        "checkpoint",
        "jax.checkpoint({body})({a}, {b})",
        {"a": Want("f"), "b": Want("fib"), "body": Body(_ab)},
        returned(),
        weight=2,
    ),
    Op(
        "checkpoint_policy",
        "jax.checkpoint({body}, policy=jax.checkpoint_policies.dots_saveable)({a}, {b})",
        {"a": Want("f"), "b": Want("f"), "body": Body(_ab)},
        returned(),
    ),
    Op(
        "jit",
        "jax.jit({body})({a}, {b})",
        {"a": Want("fui"), "b": Want("fib"), "body": Body(_ab)},
        returned(),
        weight=1.5,
    ),
    Op(
        "vmap",
        "jax.vmap({body}, in_axes=({axis}, {other}))({a}, {b})",
        {
            "a": Want("fui", 1, 3),
            "axis": lambda d: d.dim("a"),
            "other": lambda d: d.choice((None, 0)),
            "b": Want("fui", 0, 3, shape=_mapped_b),
            "body": Body(_mapped),
        },
        returned(),
        weight=3,
    ),
    Op(
        "vmap_out",
        "jax.vmap({body}, in_axes=({axis}, {other}), out_axes=-1)({a}, {b})",
        {
            "a": Want("fui", 1, 3),
            "axis": lambda d: d.dim("a"),
            "other": lambda d: d.choice((None, 0)),
            "b": Want("fui", 0, 3, shape=_mapped_b),
            "body": Body(_mapped),
        },
        returned(),
    ),
    Op("custom_vjp", _VJP, {"a": Want("f")}, smooth(3)),
    Op(
        "custom_jvp",
        _JVP,
        {"a": Want("f"), "b": Want("f", shape=lambda d: d["a"].shape, dtype=same())},
        smooth(3),
    ),
    Op(
        "inner_gradient",
        "jax.grad(lambda x: jnp.sum({body}(x)).astype(jnp.float32))({a})",
        {"a": Want("f", 0, 3), "body": _derivative_body()},
        smooth(4),
        weight=2,
    ),
    Op(
        "per_row_gradient",
        "jax.vmap(jax.grad(lambda x: jnp.sum({body}(x)).astype(jnp.float32)))({a})",
        {"a": Want("f", 1, 3), "body": _per_row()},
        smooth(4),
    ),
    Op(
        "tangent",
        "jax.jvp({body}, ({a},), (jnp.cos({a}),))",
        {"a": Want("f", 0, 3), "body": _derivative_body()},
        smooth(4),
    ),
    Op(
        "hessian_product",
        "jax.jvp(jax.grad(lambda x: jnp.sum(jnp.sin({body}(x))).astype(jnp.float32)), ({a},),"
        " (jnp.cos({a}),))[1]",
        {"a": Want("s", 0, 2), "body": _derivative_body()},
        smooth(8),
        weight=0.7,
    ),
    Op(
        "linearize",
        "jax.linearize({body}, {a})[1](jnp.sin({a}))",
        {"a": Want("f", 0, 3), "body": _derivative_body()},
        smooth(4),
        weight=0.7,
    ),
    Op(
        "associative_sum",
        "lax.associative_scan(jnp.add, {a}, axis={axis}, reverse={rev}) * 0.25",
        {"a": Want("s", 1, 3), "axis": lambda d: d.dim("a"), "rev": lambda d: d.chance(0.3)},
        smooth(3),
    ),
    Op(
        "associative_max",
        "lax.associative_scan(jnp.maximum, {a}, axis={axis}, reverse={rev})",
        {"a": Want("i", 1, 3), "axis": lambda d: d.dim("a"), "rev": lambda d: d.chance(0.3)},
        whole(2.0**31),
    ),
    Op(
        "associative_pairs",
        "lax.associative_scan(lambda x, y: (x[0] * y[0], x[1] * y[0] + y[1]), (jnp.tanh({a}), {b}),"
        " axis=0)",
        {"a": Want("f", 1, 2), "b": Want("f", shape=lambda d: d["a"].shape, dtype=same())},
        smooth(4),
    ),
)
