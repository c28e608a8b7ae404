"""What comes in and goes out, code by hand, and where the source text is."""

import linecache

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback, pallas as pl

import sbp
from tests.gallery.broken import MESH_2D, broken, f32

N, D = 64, 256


@broken(
    np.zeros((N, D), np.float32),
    in_types=("model:P(sum)",),
    cause="an input that is pinned partial comes as a plain array",
    unlabelled=("not-partial", "input x is pinned"),
    no_help="only the caller knows whether the array holds one part or the whole",
)
def plain_array_for_a_partial(x):
    return x * 2.0


@broken(
    f32(N, D),
    f32(D, D),
    in_types=("B",),
    cause="one type for two arguments",
    unlabelled=("bad-argument", "in_types has 1 entry for 2 non-static positional arguments"),
    no_help="which argument was meant is not known",
)
def types_of_another_function(x, w):
    return x @ w


@broken(f32(N, D), cause="a callback whose result the program uses", no_help="another callback has to be written")
def result_of_a_callback(x):
    rate = io_callback(lambda: jnp.float32(0.1), jax.ShapeDtypeStruct((), jnp.float32))  # error: unsupported-effect: io_callback with resu
    return x * rate


@broken(f32(N, D), f32(D, D), cause="K21: a region by hand that claims B and forgets the psum")
def region_without_its_sum(x, w):
    product = sbp.manual(lambda x, w: x @ w, in_types=("model:S(1)", "model:S(0)"), out_types="B")  # error: manual-types: `x @ w` is left partial on mesh axis `model`
    return product(x, w)  # and: out_types say that result 0 is whole


@broken(
    f32(N, D),
    f32(D, D),
    mesh=MESH_2D,
    cause="a region by hand that reduces over the wrong mesh axis",
)
def region_over_another_axis(x, w):
    product = sbp.manual(lambda x, w: jax.lax.psum(x @ w, "data"), in_types=("model:S(1)", "model:S(0)"), out_types="B")  # error: manual-types: `x @ w` is left partial on mesh axis `model`
    return product(x, w)  # and: out_types say that result 0 is whole


@broken(
    f32(10, D),
    boxing="auto",
    in_types=("model:S(0)",),
    cause="ten rows on eight devices: JAX does not take such an array",
    unlabelled=("uneven-boundary", "input x of shape (10, 256) does not divide evenly under model:S(0)"),
    no_help="the caller has to pad or to pass another size",
)
def ten_rows_on_eight_devices(x):
    return x * 2.0


@broken(f32(N, D), boxing="auto", cause="a kernel that sbp has no signature for", no_help="the signature of a kernel is not known")
def kernel_without_a_signature(x):
    def kernel(x_ref, y_ref):
        y_ref[...] = x_ref[...] * 2.0

    x = sbp.split(x, 0, "model")
    return pl.pallas_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True, name="twice")(x)  # warning: missing-rule: primit


CELL = """
def in_a_cell(x, w):
    h = sbp.split(x, 1, "model") @ w  # and: x is S(1) on `model`
    return jax.nn.softmax(h)  # error: no-signature: `jax.nn.softmax(h)` has no SBP signature
"""
linecache.cache["/ipykernel_7/1234567890.py"] = (len(CELL), None, str(CELL).splitlines(keepends=True), "/ipykernel_7/1234567890.py")
exec(compile(CELL, "/ipykernel_7/1234567890.py", "exec"), globals())
broken(f32(N, D), f32(D, D), cause="a fault in a cell of a notebook, whose source only linecache knows")(globals()["in_a_cell"])


def head(h, w_out):
    """A helper that pins for its caller."""
    return h @ sbp.split(w_out, 1, "model")  # error: no-signature: `h @ sbp.split(w_out, 1  # and: w_out is S(1) on `model`, not contracte


@broken(f32(N, D), f32(D, D), f32(D, D), also=(head,), cause="the pins stand in two functions, the fault shows in one of them")
def pins_of_a_helper(x, w, w_out):
    h = jnp.tanh(x @ sbp.split(w, 1, "model"))  # and: w is S(1) on `model`: dim 1 of 256x256
    return head(h, w_out)
