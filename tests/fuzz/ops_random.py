"""Random numbers: keys old and new, made from constants, from data and from each other; bits are
equal to the last one."""

from tests.fuzz.draw import Op, Slot, Want
from tests.fuzz.laws import smooth, whole

_shape = lambda d: tuple(d.size() for _ in range(d.int(0, 3)))


_KEY = Want("r", 0, 0)
_SHAPED: dict[str, Slot] = {"k": _KEY, "shape": _shape}
_N = whole(2.0**32)

OPS: tuple[Op, ...] = (
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
