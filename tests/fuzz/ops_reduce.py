"""Reductions, cumulative operations, windows, sorting, and the layers of networks that are made of
them. Random numbers: keys old and new, made from constants, from data and from each other; bits are
equal to the last one."""

from tests.fuzz.draw import Draw, Op, Slot, Want, like, moves, smooth, sums, whole
from tests.fuzz.ops_elementwise import same

_dims = lambda d: d.dims("a") if d.chance(0.8) else None


def _reduced(d: Draw) -> float:
    a, axis = d["a"], d["axis"]
    dims = range(a.ndim) if axis is None else (axis,) if isinstance(axis, int) else axis
    count = 1.0
    for i in dims:
        count *= max(1, a.shape[i])
    return count


def _axis(kinds: str, low: int = 1, empty: bool = False) -> dict[str, Slot]:
    return {"a": Want(kinds, low, empty=empty), "axis": lambda d: d.dim("a")}


def _axes(kinds: str, empty: bool = False) -> dict[str, Slot]:
    return {"a": Want(kinds, 1, empty=empty), "axis": _dims, "keep": lambda d: d.chance(0.3)}


def _windows(d: Draw) -> str:
    """Dimensions, strides, padding, base and window dilation of a window."""
    shape = d["a"].shape
    window = tuple(d.choice((1, 2, 3)) for _ in shape)
    strides = tuple(d.choice((1, 1, 2)) for _ in shape)
    padding = tuple((d.int(0, w - 1), d.int(0, w - 1)) if w > 1 else (0, 0) for w in window)
    return f"{window}, {strides}, {padding if d.chance(0.7) else d.choice(('SAME', 'VALID'))!r}"


_WINDOW = {"a": Want("k", 1, 3, fits=lambda i: i.dtype == "float32"), "window": _windows}
_POOL = "lambda x: lax.reduce_window(x, -jnp.inf, lax.max, {window})"

OPS: tuple[Op, ...] = (
    Op(
        "reduce_sum",
        "jnp.sum({a}, {axis}, keepdims={keep})",
        _axes("fui", True),
        sums(_reduced),
        weight=4,
    ),
    Op("mean", "jnp.mean({a}, {axis}, keepdims={keep})", _axes("f"), like(), weight=2),
    Op("variance", "jnp.var({a}, {axis}, keepdims={keep})", _axes("f"), like(2)),
    Op("reduce_max", "jnp.max({a}, {axis}, keepdims={keep})", _axes("kui"), moves, weight=2),
    Op("reduce_min", "jnp.min({a}, {axis}, keepdims={keep})", _axes("kui"), moves),
    Op(
        "reduce_prod",
        "jnp.prod(jnp.tanh({a}) + 0.5, {axis}, keepdims={keep})",
        _axes("f", True),
        smooth(4),
    ),
    Op("int_prod", "jnp.prod({a}, {axis}, keepdims={keep})", _axes("ui", True), whole(2.0**32)),
    Op("any", "jnp.any({a}, {axis}, keepdims={keep})", _axes("b", True), whole(1)),
    Op("all", "jnp.all({a}, {axis}, keepdims={keep})", _axes("b", True), whole(1)),
    Op(
        "reduce_and",
        "lax.reduce_and({a}, {axes})",
        {"a": Want("bui", 1), "axes": lambda d: d.dims("a")},
        whole(2.0**32),
    ),
    Op(
        "reduce_or",
        "lax.reduce_or({a}, {axes})",
        {"a": Want("bui", 1), "axes": lambda d: d.dims("a")},
        whole(2.0**32),
    ),
    Op(
        "reduce_xor",
        "lax.reduce_xor({a}, {axes})",
        {"a": Want("bui", 1), "axes": lambda d: d.dims("a")},
        whole(2.0**32),
    ),
    Op(
        "count",
        "jnp.sum({a}, {axis}, keepdims={keep}, dtype=jnp.int32)",
        _axes("b", True),
        whole(4096),
    ),
    Op(
        "reduce_by",
        "lax.reduce({a}, np.{dtype}(1), lambda x, y: x * y + x + y, {axes})",
        {"a": Want("i", 1), "dtype": lambda d: d["a"].dtype, "axes": lambda d: d.dims("a")},
        whole(2.0**32),
        weight=0.6,
    ),
    Op(
        "reduce_pair",
        "lax.reduce(({a}, jnp.arange({a}.size, dtype=jnp.int32).reshape({a}.shape)),"
        " (np.{dtype}(-100), np.int32(-1)), lambda x, y: (jnp.maximum(x[0], y[0]), jnp.where((x[0]"
        " > y[0]) | ((x[0] == y[0]) & (x[1] < y[1])), x[1], y[1])), {axes})",
        {"a": Want("i", 1), "dtype": lambda d: d["a"].dtype, "axes": lambda d: d.dims("a")},
        whole(2.0**31),
        weight=0.6,
    ),
    Op(
        "argmax",
        "jnp.argmax({a}, {axis}, keepdims={keep})",
        {**_axis("eui"), "keep": lambda d: d.chance(0.3)},
        whole(64),
    ),
    Op("argmin", "jnp.argmin({a}, {axis})", _axis("eui"), whole(64)),
    # ---- cumulative -----------------------------------------------------------------------------
    Op(
        "cumsum",
        "lax.cumsum({a}, {axis}, reverse={rev})",
        {**_axis("fui", 1, True), "rev": lambda d: d.chance(0.4)},
        sums(_reduced),
        weight=2,
    ),
    Op(
        "cumprod",
        "lax.cumprod(jnp.tanh({a}) + 0.5, {axis}, reverse={rev})",
        {**_axis("f"), "rev": lambda d: d.chance(0.4)},
        smooth(4),
    ),
    Op(
        "int_cumprod",
        "lax.cumprod({a}, {axis}, reverse={rev})",
        {**_axis("ui"), "rev": lambda d: d.chance(0.4)},
        whole(2.0**32),
    ),
    Op(
        "cummax",
        "lax.cummax({a}, {axis}, reverse={rev})",
        {**_axis("kui"), "rev": lambda d: d.chance(0.4)},
        moves,
    ),
    Op(
        "cummin",
        "lax.cummin({a}, {axis}, reverse={rev})",
        {**_axis("kui"), "rev": lambda d: d.chance(0.4)},
        moves,
    ),
    Op(
        "cumlogsumexp",
        "lax.cumlogsumexp({a}, {axis}, reverse={rev})",
        {**_axis("f"), "rev": lambda d: d.chance(0.4)},
        like(1.5),
    ),
    # ---- sorting; floats that tie or nearly do have no well-defined gradient --------------------
    Op("sort", "lax.sort({a}, dimension={axis})", _axis("kui", 1, True), moves, weight=1.5),
    Op(
        "sort_pairs",
        "lax.sort(({a}, {b}), dimension={axis}, num_keys={keys})",
        {
            **_axis("eui"),
            "b": Want("fuib", shape=lambda d: d["a"].shape),
            "keys": lambda d: 2 if d["b"].exact and d.chance(0.3) else 1,
        },
        lambda d, outs: [(i.exact, i.bound, i.grid) for i in (d["a"], d["b"])],
        weight=1.5,
    ),
    Op(
        "argsort",
        "jnp.argsort({a}, axis={axis}, descending={down})",
        {**_axis("eui"), "down": lambda d: d.chance(0.3)},
        whole(64),
    ),
    Op(
        "top_k",
        "lax.top_k({a}, {n})",
        {"a": Want("eui", 1), "n": lambda d: d.int(1, min(4, d["a"].shape[-1]))},
        lambda d, outs: [(True, d["a"].bound, d["a"].grid), (True, 64.0, 0)],
        weight=1.5,
    ),
    Op("sort_descending", "-jnp.sort(-{a}, axis={axis})", _axis("k"), moves),
    Op(
        "median",
        "jnp.median({a}, axis={axis})",
        _axis("e"),
        lambda d, outs: [(d["a"].exact, d["a"].bound, d["a"].grid + 1)],
        weight=0.6,
        stops=True,
    ),
    # ---- windows --------------------------------------------------------------------------------
    Op(
        "window_sum",
        "lax.reduce_window({a}, np.{dtype}(0), lax.add, {window}, {dilated})",
        {
            "a": Want("si", 1, 3),
            "dtype": lambda d: d["a"].dtype,
            "window": _windows,
            "dilated": lambda d: (
                f"base_dilation={tuple(d.choice((1, 1, 2)) for _ in d['a'].shape)},"
                f" window_dilation={tuple(d.choice((1, 1, 2)) for _ in d['a'].shape)}"
            ),
        },
        sums(lambda d: 27),
    ),
    Op("window_max", "lax.reduce_window({a}, -jnp.inf, lax.max, {window})", _WINDOW, moves),
    Op("window_min", "lax.reduce_window({a}, jnp.inf, lax.min, {window})", _WINDOW, moves),
    Op(
        "window_by",
        "lax.reduce_window({a}, np.int32(1), lambda x, y: x * y, {window})",
        {"a": Want("i", 1, 3, dtype=lambda d: "int32"), "window": _windows},
        whole(2.0**31),
        weight=0.6,
    ),
    Op(
        "average_pool",
        "lax.reduce_window({a}, 0.0, lax.add, {window}) * 0.125",
        {"a": Want("s", 1, 3), "window": _windows},
        like(2),
    ),
    Op(
        "max_pool_gradient",
        f"jax.grad(lambda y: jnp.sum(jnp.sin(({_POOL})(y))))({{a}})",
        {
            "a": Want("e", 1, 3, fits=lambda i: i.dtype == "float32"),
            "window": lambda d: _unpadded(d),
        },
        smooth(3),
        stops=True,
    ),
    Op(
        "max_pool_tangent",
        f"jax.jvp({_POOL}, ({{a}},), (jnp.cos({{a}}),))[1]",
        {
            "a": Want("e", 1, 3, fits=lambda i: i.dtype == "float32"),
            "window": lambda d: _unpadded(d),
        },
        smooth(1),
        stops=True,
    ),
    # ---- layers ---------------------------------------------------------------------------------
    Op("softmax", "jax.nn.softmax({a}, {axis})", _axis("f"), smooth(1), weight=2),
    Op("log_softmax", "jax.nn.log_softmax({a}, {axis})", _axis("f"), smooth(4)),
    Op("logsumexp", "jax.nn.logsumexp({a}, {axis}, keepdims={keep})", _axes("f"), like(1.5)),
    Op(
        "layer_norm",
        "({a} - jnp.mean({a}, {axis}, keepdims=True)) * lax.rsqrt(jnp.var({a}, {axis},"
        " keepdims=True) + 0.25)",
        _axis("f"),
        smooth(3),
        weight=1.5,
    ),
    Op(
        "rms_norm",
        "{a} * lax.rsqrt(jnp.mean(jnp.square({a}), {axis}, keepdims=True) + 0.25)",
        _axis("f"),
        smooth(3),
    ),
    Op(
        "cross_entropy",
        "-jnp.take_along_axis(jax.nn.log_softmax({a}), jnp.abs({b} % {n})[..., None],"
        " axis=-1)[..., 0]",
        {
            "a": Want("f", 1, 3),
            "n": lambda d: d["a"].shape[-1],
            "b": Want("i", 0, 3, shape=lambda d: d["a"].shape[:-1], dtype=lambda d: "int32"),
        },
        smooth(4),
        weight=1.5,
    ),
    Op(
        "one_hot",
        "jax.nn.one_hot({a}, {n}, dtype=jnp.{dtype})",
        {
            "a": Want("i", 0, 2),
            "n": lambda d: d.size(),
            "dtype": lambda d: d.choice(("float32", "bfloat16", "int32")),
        },
        whole(1),
        weight=1.5,
    ),
    Op(
        "glu",
        "jax.nn.glu({a}, {axis})",
        {
            "a": Want("f", 1, fits=lambda i: any(n % 2 == 0 for n in i.shape)),
            "axis": lambda d: d.choice([i for i, n in enumerate(d["a"].shape) if n % 2 == 0]),
        },
        like(),
    ),
    Op("standardize", "jax.nn.standardize({a}, {axis}, epsilon=0.25)", _axis("f"), smooth(3)),
    Op(
        "bincount",
        "jnp.bincount(jnp.abs({a} % 6), length={n})",
        {"a": Want("i", 1, 1), "n": lambda d: d.size()},
        whole(64),
    ),
    Op(
        "searchsorted",
        "jnp.searchsorted(jnp.sort({a}), {b}, method={how})",
        {
            "a": Want("e", 1, 1),
            "b": Want("e", 1, 2, dtype=same()),
            "how": lambda d: repr(d.choice(("scan", "sort", "compare_all"))),
        },
        whole(64),
    ),
)


def _unpadded(d: Draw) -> str:
    """A window whose every position covers an element: the gradient of a maximum over padding alone
    is not defined."""
    window = tuple(d.int(1, min(3, n)) for n in d["a"].shape)
    strides = tuple(d.choice((1, 1, 2)) for _ in window)
    return f"{window}, {strides}, 'VALID'"


_shape = lambda d: tuple(d.size() for _ in range(d.int(0, 3)))


_KEY = Want("r", 0, 0)
_SHAPED: dict[str, Slot] = {"k": _KEY, "shape": _shape}
_N = whole(2.0**32)

RANDOM: tuple[Op, ...] = (
    Op("key", "jax.random.key({n})", {"n": lambda d: d.int(0, 99)}, whole(1), weight=0.5),
    Op(
        "key_of_data",
        "jax.random.key({i})",
        {"i": Want("i", 0, 0, dtype=lambda d: "int32")},
        whole(1),
    ),
    Op(
        "fold_in",
        "jax.random.fold_in({k}, {i})",
        {"k": _KEY, "i": Want("i", 0, 0, dtype=lambda d: "int32")},
        whole(1),
    ),
    Op(
        "split_key",
        "jax.random.split({k}, {n})[{at}]",
        {"k": _KEY, "n": lambda d: d.int(1, 5), "at": lambda d: d.int(0, d["n"] - 1)},
        whole(1),
    ),
    Op("key_data", "jax.random.key_data({k})", {"k": _KEY}, _N),
    Op(
        "wrap_key",
        "jax.random.wrap_key_data({a})",
        {"a": Want("u", shape=lambda d: (2,), dtype=lambda d: "uint32")},
        whole(1),
        weight=0.5,
    ),
    Op(
        "old_key_bits",
        "jax.random.bits(jax.random.PRNGKey({n}), {shape})",
        {"n": lambda d: d.int(0, 99), "shape": _shape},
        _N,
        weight=0.5,
    ),
    Op(
        "old_key_split",
        "jax.random.uniform(jax.random.split(jax.random.PRNGKey({n}))[1], {shape})",
        {"n": lambda d: d.int(0, 99), "shape": _shape},
        whole(1, 23),
        weight=0.5,
    ),
    Op(
        "bits",
        "jax.random.bits({k}, {shape}, jnp.{dtype})",
        {**_SHAPED, "dtype": lambda d: d.choice(("uint32", "uint8"))},
        _N,
        weight=1.5,
    ),
    Op("uniform", "jax.random.uniform({k}, {shape})", _SHAPED, whole(1, 23), weight=1.5),
    Op("randint", "jax.random.randint({k}, {shape}, -5, 9)", _SHAPED, whole(9), weight=1.5),
    Op("bernoulli", "jax.random.bernoulli({k}, 0.25, {shape})", _SHAPED, whole(1)),
    Op(
        "normal",
        "jax.random.normal({k}, {shape}, jnp.{dtype})",
        {**_SHAPED, "dtype": lambda d: d.choice(("float32", "float32", "bfloat16"))},
        smooth(3),
        weight=1.5,
    ),
    Op("gumbel", "jax.random.gumbel({k}, {shape}) * 0.25", _SHAPED, smooth(3)),
    Op(
        "permutation",
        "jax.random.permutation({k}, {n})",
        {"k": _KEY, "n": lambda d: d.size()},
        whole(64),
    ),
    Op(
        "shuffle",
        "jax.random.permutation({k}, {a}, axis={axis})",
        {"k": _KEY, "a": Want("fui", 1, 3), "axis": lambda d: d.dim("a")},
        lambda d, outs: [(d["a"].exact, d["a"].bound, d["a"].grid)],
    ),
    Op(
        "dropout",
        "jnp.where(jax.random.bernoulli({k}, 0.75, {a}.shape), {a} * 2, 0)",
        {"k": _KEY, "a": Want("f", 1, 3)},
        lambda d, outs: [(d["a"].exact, d["a"].bound * 2, d["a"].grid)],
        weight=2,
    ),
    Op(
        "vmapped_keys",
        "jax.vmap(lambda k: jax.random.uniform(k, ({n},)))(jax.random.split({k}, {m}))",
        {"k": _KEY, "n": lambda d: d.size(), "m": lambda d: d.size()},
        whole(1, 23),
    ),
    Op(
        "vmapped_fold_in",
        "jax.vmap(lambda i: jax.random.bits(jax.random.fold_in({k}, i)))({i})",
        {"k": _KEY, "i": Want("i", 1, 1, dtype=lambda d: "int32")},
        _N,
    ),
    Op(
        "rng_bit_generator",
        "lax.rng_bit_generator(jnp.arange(4, dtype=jnp.uint32) + {n}, {shape})[1]",
        {"n": lambda d: d.int(0, 99), "shape": _shape},
        _N,
        weight=0.5,
    ),
    Op(
        "random_gamma",
        "jax.random.gamma({k}, 2.0, {shape}) * 0.25",
        _SHAPED,
        smooth(2),
        weight=0.15,
    ),
)
