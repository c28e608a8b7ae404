"""Operations element by element: unary and binary functions, integers and bits, comparisons, casts,
complex numbers."""

from collections.abc import Callable

from tests.fuzz.draw import (
    Draw,
    Law,
    Op,
    Slot,
    Want,
    largest,
    like,
    moves,
    products,
    smooth,
    sums,
    whole,
)

SMOOTH = {
    "tanh": ("jnp.tanh({a})", 1),
    "sin": ("jnp.sin({a})", 1),
    "cos": ("jnp.cos({a})", 1),
    "tan": ("jnp.tan(jnp.tanh({a}))", 1.6),
    "exp": ("jnp.exp({a} * 0.25)", 4),
    "logistic": ("jax.nn.sigmoid({a})", 1),
    "log": ("jnp.log(jnp.square({a}) + 0.5)", 3),
    "log1p": ("jnp.log1p(jnp.square({a}))", 3),
    "expm1": ("jnp.expm1({a} * 0.25)", 4),
    "sqrt": ("jnp.sqrt(jnp.square({a}) + 0.25)", 3),
    "rsqrt": ("lax.rsqrt(jnp.square({a}) + 0.25)", 2),
    "cube": ("jnp.tanh({a}) ** 3", 1),
    "softplus": ("jax.nn.softplus({a})", 4),
    "gelu": ("jax.nn.gelu({a})", 3),
    "silu": ("jax.nn.silu({a})", 3),
}
SPECIAL = {
    "exp2": ("jnp.exp2({a} * 0.25)", 4),
    "log2": ("jnp.log2(jnp.square({a}) + 0.5)", 3),
    "cbrt": ("jnp.cbrt(jnp.square({a}) + 0.5)", 2),
    "erf": ("lax.erf({a})", 1),
    "erfc": ("lax.erfc({a})", 2),
    "erf_inv": ("lax.erf_inv(jnp.tanh({a}) * 0.75)", 1),
    "asin": ("jnp.arcsin(jnp.tanh({a}) * 0.75)", 1),
    "acos": ("jnp.arccos(jnp.tanh({a}) * 0.75)", 3),
    "atan": ("jnp.arctan({a})", 1.5),
    "sinh": ("jnp.sinh({a} * 0.25)", 3),
    "cosh": ("jnp.cosh({a} * 0.25)", 3),
    "asinh": ("jnp.arcsinh({a})", 3),
    "acosh": ("jnp.arccosh(jnp.square({a}) + 1.5)", 3),
    "atanh": ("jnp.arctanh(jnp.tanh({a}) * 0.75)", 1),
    "lgamma": ("lax.lgamma(jnp.square({a}) + 1.0)", 6),
    "digamma": ("lax.digamma(jnp.square({a}) + 1.0)", 3),
    "bessel_i0e": ("lax.bessel_i0e({a})", 1),
    "bessel_i1e": ("lax.bessel_i1e({a})", 1),
}
INTEGER = {  # text, values it suits
    "not": ("~{a}", "ui"),
    "mod": ("{a} % 5", "i"),
    "floordiv": ("{a} // 3", "i"),
    "rem": ("lax.rem({a}, lax.full_like({a}, 7))", "ui"),
    "shift_left": ("{a} << 2", "ui"),
    "shift_right": ("{a} >> 1", "ui"),
    "shift_logical": ("lax.shift_right_logical({a}, lax.full_like({a}, 3))", "ui"),
    "population_count": ("lax.population_count({a})", "ui"),
    "clz": ("lax.clz({a})", "ui"),
    "int_square": ("{a} * {a}", "ui"),
    "int_power": ("{a} ** 3", "i"),
}
DECISIONS = {  # of exact floats: text, law
    "floor": ("jnp.floor({a})", sums(lambda d: 2)),
    "ceil": ("jnp.ceil({a})", sums(lambda d: 2)),
    "round": ("jnp.round({a})", sums(lambda d: 2)),
    "sign": ("jnp.sign({a})", whole(1)),
    "is_finite": ("jnp.isfinite({a})", whole(1)),
    "reduce_precision": ("lax.reduce_precision({a}, 6, 3)", sums(lambda d: 2)),
    "nextafter": ("lax.nextafter({a}, lax.full_like({a}, 9))", like()),
    "float_rem": ("lax.rem({a}, lax.full_like({a}, 2))", moves),
    "to_int": ("{a}.astype(jnp.int32)", moves),
}
KINKS = {
    "abs": "jnp.abs({a})",
    "relu": "jax.nn.relu({a})",
    "clip": "jnp.clip({a}, -1, 1)",
    "clamp": "lax.clamp(lax.full_like({a}, -1), {a}, lax.full_like({a}, 1))",
    "leaky": "jnp.where({a} > 0, {a}, {a} * 0.25)",
}
ARITHMETIC: dict[str, tuple[str, Law]] = {
    "add": ("{a} + {b}", sums(lambda d: 2)),
    "sub": ("{a} - {b}", sums(lambda d: 2)),
    "mul": ("{a} * {b}", products()),
    "div": ("{a} / (jnp.square({b}) + 1)", like()),
    "pow": ("(jnp.square({a}) * 0.25 + 0.5) ** jnp.tanh({b})", smooth(4)),
    "atan2": ("jnp.arctan2({a}, jnp.square({b}) + 0.5)", smooth(1.5)),
    "logaddexp": ("jnp.logaddexp({a}, {b})", like(1.5)),
    "hypot": ("jnp.sqrt({a} * {a} + {b} * {b} + 0.25)", like(1.5)),
}
INTEGER_PAIRS = {
    "int_add": "{a} + {b}",
    "int_mul": "{a} * {b}",
    "int_sub": "{a} - {b}",
    "and": "{a} & {b}",
    "or": "{a} | {b}",
    "xor": "{a} ^ {b}",
    "int_max": "jnp.maximum({a}, {b})",
    "int_min": "jnp.minimum({a}, {b})",
}
# kinds of the operand, text, law; a cast that rounds loses exactness when its grid does not fit
CASTS = {
    "to_bfloat16": ("f", "{a}.astype(jnp.bfloat16)", moves),
    "to_float16": ("f", "{a}.astype(jnp.float16)", moves),
    "to_float32": ("f", "{a}.astype(jnp.float32)", moves),
    "bool_to_float": ("b", "{a}.astype(jnp.float32)", whole(1)),
    "bool_to_int": ("b", "{a}.astype(jnp.int32)", whole(1)),
    "to_int8": ("i", "{a}.astype(jnp.int8)", whole(127)),
    "to_uint32": ("u", "{a}.astype(jnp.uint32)", whole(largest("uint32"))),
    "to_int32": ("u", "{a}.astype(jnp.int32)", whole(largest("int32"))),
}


def same(slot: str = "a") -> Callable[[Draw], str]:
    """The dtype of an earlier value."""
    return lambda d: d[slot].dtype


def beside(d: Draw) -> tuple[int, ...]:
    """A shape that broadcasts against `a`: its own, a suffix, or with ones."""
    shape = d["a"].shape
    match d.int(0, 4):
        case 0 if shape:
            return shape[d.int(0, len(shape)) :]
        case 1:
            return tuple(n if d.chance() else 1 for n in shape)
        case _:
            return shape


def _pair(kinds: str, empty: bool = True) -> dict[str, Slot]:
    return {
        "a": Want(kinds, empty=empty),
        "b": Want(kinds, shape=beside, dtype=same(), empty=empty),
    }


_one = lambda kinds: {"a": Want(kinds, empty=True)}


_bounded = lambda limit: lambda info: getattr(info, "bound") <= limit  # noqa: B009  # an Info


_UNKNOWN = whole(largest("uint32"))  # wraps: nothing is known of the result

OPS: tuple[Op, ...] = (
    *(Op(n, t, _one("f"), smooth(b)) for n, (t, b) in SMOOTH.items()),
    *(Op(n, t, _one("s"), smooth(b), weight=0.3) for n, (t, b) in SPECIAL.items()),
    *(Op(n, t, _one(k), _UNKNOWN, weight=0.5) for n, (t, k) in INTEGER.items()),
    *(
        Op(n, t, _one("e"), law, weight=0.5, stops=n in ("nextafter", "reduce_precision"))
        for n, (t, law) in DECISIONS.items()
    ),
    *(Op(n, t, _one("k"), moves) for n, t in KINKS.items()),
    *(
        Op(n, t, _pair("f"), law, weight=2 if n in ("add", "sub", "mul") else 0.6)
        for n, (t, law) in ARITHMETIC.items()
    ),
    *(Op(n, t, _pair("ui"), _UNKNOWN, weight=0.5) for n, t in INTEGER_PAIRS.items()),
    *(
        Op(n, t, {"a": Want(k, empty=True, fits=_bounded(100))}, law)
        for n, (k, t, law) in CASTS.items()
    ),
    Op(
        "int_to_float",
        "{a}.astype(jnp.{to})",
        {"a": Want("u", fits=_bounded(1000)), "to": lambda d: d.choice(("float32", "bfloat16"))},
        moves,
    ),
    Op("small_int", "{a} % 4 - 1", {"a": Want("i", empty=True)}, whole(4), weight=2),
    Op("neg", "-{a}", _one("fi"), moves),
    Op("square", "jnp.square({a})", _one("f"), products(lambda d: max(1.0, d["a"].bound))),
    Op(
        "halve",
        "{a} * 0.5 + 0.25",
        _one("f"),
        lambda d, outs: [(d["a"].exact, d["a"].bound + 1, max(2, d["a"].grid + 1))],
    ),
    Op("maximum", "jnp.maximum({a}, {b})", _pair("k"), moves),
    Op("minimum", "jnp.minimum({a}, {b})", _pair("k"), moves),
    Op(
        "mixed_add",
        "{a} + {b}",
        {"a": Want("f"), "b": Want("fib", shape=beside, fits=_bounded(100))},
        sums(lambda d: 2),
    ),
    Op(
        "mixed_mul",
        "{a} * {b}",
        {"a": Want("f"), "b": Want("fib", shape=beside, fits=_bounded(100))},
        lambda d, outs: [_mixed(d)],
    ),
    Op(
        "compare",
        "{a} {op} {b}",
        {**_pair("e"), "op": lambda d: d.choice(("<", "<=", ">", ">=", "==", "!="))},
        whole(1),
    ),
    Op(
        "compare_int",
        "{a} {op} {b}",
        {**_pair("ui"), "op": lambda d: d.choice(("<", "<=", ">", ">=", "==", "!="))},
        whole(1),
    ),
    Op("logical", "{a} {op} {b}", {**_pair("b"), "op": lambda d: d.choice("&|^")}, whole(1)),
    Op("logical_not", "~{a}", _one("b"), whole(1)),
    Op(
        "where",
        "jnp.where({c}, {a}, {b})",
        {**_pair("fiubc"), "c": Want("b", shape=beside, empty=True)},
        moves,
        weight=2,
    ),
    Op(
        "select_n",
        "lax.select_n({c} % 3, {a}, {b}, -{a})",
        {
            "a": Want("fi"),
            "b": Want("fi", shape=lambda d: d["a"].shape, dtype=same()),
            "c": Want("i", shape=lambda d: d["a"].shape, dtype=lambda d: "int32"),
        },
        moves,
    ),
    # lax.mulhi is left out: XLA for CPU compiles it neither in a fusion nor inside of shard_map.
    Op(
        "igamma",
        "lax.igamma(jnp.square({a}) + 1.0, jnp.square({a}) + 0.5)",
        _one("s"),
        smooth(1),
        weight=0.1,
        stops=True,
    ),
    Op(
        "igammac",
        "lax.igammac(jnp.square({a}) + 1.0, jnp.square({a}) + 0.5)",
        _one("s"),
        smooth(1),
        weight=0.05,
        stops=True,
    ),
    Op(
        "betainc",
        "lax.betainc(lax.full_like({a}, 2), lax.full_like({a}, 3), jax.nn.sigmoid({a}))",
        _one("s"),
        smooth(1),
        weight=0.1,
        stops=True,
    ),
    Op(
        "zeta",
        "lax.zeta(jnp.square({a}) + 2.0, lax.full_like({a}, 2))",
        _one("s"),
        smooth(1),
        weight=0.1,
        stops=True,
    ),
    Op(
        "polygamma",
        "lax.polygamma(lax.full_like({a}, 1), jnp.square({a}) + 1.0)",
        _one("s"),
        smooth(2),
        weight=0.1,
        stops=True,
    ),
    Op(
        "bits_of_float",
        "lax.bitcast_convert_type(jnp.abs({a}), jnp.{to})",
        {
            "a": Want("e", dtype=lambda d: "float32", empty=True),
            "to": lambda d: d.choice(("int32", "uint32", "uint8")),
        },
        _UNKNOWN,
        weight=0.7,
    ),
    Op(
        "bytes",
        "lax.bitcast_convert_type({a}, jnp.uint8)",
        {"a": Want("u", high=3)},
        whole(255),
        weight=0.7,
    ),
    Op(
        "from_bytes",
        "lax.bitcast_convert_type({a}, jnp.int32)",
        {
            "a": Want(
                "u",
                1,
                dtype=lambda d: "uint8",
                shape=lambda d: (*(d.size() for _ in range(d.int(0, 2))), 4),
            ),
        },
        _UNKNOWN,
        weight=0.7,
    ),
    Op("stop_gradient", "lax.stop_gradient({a})", _one("f"), moves, weight=0.7),
    Op(
        "barrier",
        "lax.optimization_barrier(({a}, {b}))",
        {"a": Want("fib", empty=True), "b": Want("fib", empty=True)},
        lambda d, outs: [(i.exact, i.bound, i.grid) for i in (d["a"], d["b"])],
    ),
    Op(
        "spoil",
        "jnp.where(jnp.arange({a}.size).reshape({a}.shape) % 7 == {n}, jnp.{what},"
        " {a}).astype({a}.dtype)",
        {
            "a": Want("f", fits=lambda i: not i.exact),
            "n": lambda d: d.int(0, 6),
            "what": lambda d: d.choice(("inf", "nan")),
            "forward": lambda d: d.choice([True] if not d.scope.gradient else []),
        },
        like(),
        weight=0.15,
    ),
    # ---- complex numbers ------------------------------------------------------------------------
    Op(
        "complex",
        "lax.complex({a}, {b})",
        {"a": Want("s", empty=True), "b": Want("s", shape=lambda d: d["a"].shape, empty=True)},
        like(1.5),
    ),
    Op("real", "jnp.real({a})", _one("c"), like()),
    Op("imag", "jnp.imag({a})", _one("c"), like()),
    Op("conj", "jnp.conj({a})", _one("c"), like()),
    Op("complex_abs", "jnp.sqrt(jnp.real({a} * jnp.conj({a})) + 0.25)", _one("c"), like()),
    Op("complex_mul", "{a} * {b} * 0.5", _pair("c"), like(2)),
    Op("complex_exp", "jnp.exp(1j * {a} * 0.25)", _one("s"), smooth(3)),
)


def _mixed(d: Draw) -> tuple[bool, float, int]:
    a, b = d["a"], d["b"]
    return a.exact and b.exact, max(1.0, a.bound) * max(1.0, b.bound), a.grid + b.grid
