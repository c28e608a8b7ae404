"""Codes of named dims and of symbolic sizes."""

from __future__ import annotations

from sbp.report.codes.page import CodePage

DIMS = (
    CodePage(
        "layout-conflict",
        """
        A layout maps dim names to mesh axes for the whole program, and each tensor is split by the
        names of its dims. A mesh axis splits one dim of a tensor, so a layout that maps two dims of
        one tensor to the same axis has no meaning for that tensor (Mesh-TensorFlow, section 3).

        Map one of the two to another axis. Where the tensor has the same dim twice, as in attention
        from positions to positions, give the second one a name of its own, which the layout does
        not map.
        """,
        """
layout = sbp.Layout(batch="model", d_ff="model")

sbp.jit(lambda x, w: layout(x @ w, "batch", "d_ff"), mesh).plan(x, w)
""",
        """
layout = sbp.Layout(batch="data", d_ff="model")

sbp.jit(lambda x, w: layout(x @ w, "batch", "d_ff"), mesh).plan(x, w)
""",
    ),
    CodePage(
        "layout-names",
        """
        A layout is called with a tensor and a name for each of its dims, in order; the names of one
        tensor differ. None stands for a dim without a name, which is never split. Under jax.vmap a
        tensor has the dims that the function sees: the batch dim has no name.
        """,
        """
layout = sbp.Layout(batch="data", d_ff="model")

sbp.jit(lambda x, w: layout(x @ w, "batch"), mesh).plan(x, w)
""",
        """
layout = sbp.Layout(batch="data", d_ff="model")

sbp.jit(lambda x, w: layout(x @ w, "batch", None), mesh).plan(x, w)
""",
    ),
    CodePage(
        "size-condition",
        """
        A program was checked with symbolic sizes. It was typed at one choice of them, and that
        typing is not the typing of all: at the sizes that the message names, a dim that is split at
        the boundary does not divide, a split leaves devices without elements, an operator has no
        signature for these types, or a reshape does not keep the number of elements, which JAX does
        not check for symbolic sizes. The condition is exact: for sizes that meet it the typing
        holds, for the others it does not, and calls with those get another one, which may send
        more.

        Put the condition into the scope of the sizes, when it is what you meant, or annotate what
        is to be split otherwise.
        """,
        """
(b,) = jax.export.symbolic_shape("b")
batch = jax.ShapeDtypeStruct((b, 16), jnp.float32)
report = sbp.jit(lambda x, w: x @ w, mesh, in_types=("data:S(0)", None)).check(batch, w)
""",
        """
(b,) = jax.export.symbolic_shape("b", constraints=["mod(b, 2) == 0"])
batch = jax.ShapeDtypeStruct((b, 16), jnp.float32)
report = sbp.jit(lambda x, w: x @ w, mesh, in_types=("data:S(0)", None)).check(batch, w)
""",
    ),
    CodePage(
        "sizes-unproved",
        """
        A program was checked with symbolic sizes, and it could not be decided for all of them
        whether the typing holds. Z3 gave up on a product or quotient of symbols, or a rule wants to
        know a size itself and not how it compares: the message says for which lines, and at how
        many small sizes the rest was tried instead. Or JAX traces the program into other operations
        when its sizes have no numbers, as x[1:] into a gather: what is shown is shown of that
        program, and a call with numbers has another one.

        Fewer symbols help, and so do constraints: with mod(m, 8) == 0 the product m*k is known to
        be divisible by 8. Instead of indexing, jax.lax.slice_in_dim is a slice for all sizes.
        """,
        """
(b,) = jax.export.symbolic_shape("8*b + 1")
f = sbp.jit(lambda x: x[1:] * 2, mesh, in_types=("B",))
report = f.check(jax.ShapeDtypeStruct((b, 16), jnp.float32))
""",
        """
(b,) = jax.export.symbolic_shape("8*b + 1")
rest = lambda x: jax.lax.slice_in_dim(x, 1, x.shape[0]) * 2
report = sbp.jit(rest, mesh, in_types=("B",)).check(jax.ShapeDtypeStruct((b, 16), jnp.float32))
""",
    ),
    CodePage(
        "symbolic-sizes",
        """
        A plan is made for numbers: its collectives have lengths, and its price is in bytes. f.check
        takes symbolic sizes and says for which the typing holds; f.plan and calls want the sizes
        themselves, and type the program for these.

        The same code is given when shapes come from different symbolic scopes, when no size meets
        the constraints, when the function uses a symbolic size that no argument has, when a reshape
        keeps the number of elements at no size, and when the program's Python code asks something
        of a size that the scope does not say, such as whether b is above 5; the message names a
        constraint that says it, if there is one.
        """,
        """
(b,) = jax.export.symbolic_shape("8*b")
sbp.jit(lambda x: x * 2, mesh).plan(jax.ShapeDtypeStruct((b, 16), jnp.float32))
""",
        """
sbp.jit(lambda x: x * 2, mesh).plan(jax.ShapeDtypeStruct((8, 16), jnp.float32))
""",
    ),
)
