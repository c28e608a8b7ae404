"""Codes of programs that have no typing, or a dear one."""

from __future__ import annotations

from sbp.report.codes.page import CodePage

TYPINGS = (
    CodePage(
        "no-signature",
        """
        Each operator has a table of signatures: which types of its operands give which types of its
        results. Here the types that reach the operator on one mesh axis stand in no row of that
        table, and the boxing policy does not let sbp convert them on the way.

        The diagnostic shows the rows that come nearest. Pin one operand otherwise, convert it by an
        annotation (annotations may convert under every policy), or allow conversions with
        boxing="auto". A partial tensor, P(sum), passes through linear operators only: reduce it
        before tanh, relu, a comparison or a product with another partial tensor.
        """,
        """
def f(x, w):
    h = sbp.annotate(x, model=S(1), data=B) @ sbp.annotate(w, model=S(0), data=B)
    return jnp.tanh(h)  # h is P(sum) on `model`

sbp.jit(f, mesh, boxing="explicit").plan(x, w)
""",
        """
def f(x, w):
    h = sbp.annotate(x, model=S(1), data=B) @ sbp.annotate(w, model=S(0), data=B)
    return jnp.tanh(sbp.replicate(h, "model"))  # all-reduce here

sbp.jit(f, mesh, boxing="explicit").plan(x, w)
""",
    ),
    CodePage(
        "annotation-conflict",
        """
        Two annotations ask different types of what has to keep one type: the carry of a scan or
        while from one iteration to the next, the results of the branches of a cond, or a value on
        its way from one annotation to the other, and the boxing policy allows no conversion in
        between. The labels show both annotations.

        Make them agree, drop one, or put a third where the conversion shall happen: an annotation
        converts its operand under every policy.
        """,
        """
def f(x):
    x = sbp.annotate(x, data=S(1), model=B)

    def body(c, _):
        return sbp.annotate(jnp.tanh(c), data=S(0), model=B), None

    return jax.lax.scan(body, x, None, length=3)[0]

sbp.jit(f, mesh, boxing="explicit").plan(x)
""",
        """
def f(x):
    x = sbp.annotate(x, data=S(0), model=B)

    def body(c, _):
        return sbp.annotate(jnp.tanh(c), data=S(0), model=B), None

    return jax.lax.scan(body, x, None, length=3)[0]

sbp.jit(f, mesh, boxing="explicit").plan(x)
""",
    ),
    CodePage(
        "no-typing",
        """
        A pin asks a type that its tensor cannot have at all (a split of ten rows over eight devices
        where the program ends), or each mesh axis has a typing of its own but the axes have none
        together, since an inner axis cannot keep a split of a dim that an outer axis has to change.
        The labels show the smallest set of pins that cannot all hold.

        Leave one of them free on that axis.
        """,
        """
def f(x):
    a = jnp.tanh(sbp.annotate(x, data=B, model=S(0)))
    b = jnp.tanh(sbp.annotate(x, data=S(0), model=B))
    return a + b  # data would have to be split outside of a split over model that is there already

sbp.jit(f, mesh, boxing="explicit").plan(x)
""",
        """
def f(x):
    a = jnp.tanh(sbp.annotate(x, data=B, model=S(0)))
    b = jnp.tanh(sbp.annotate(x, data=B, model=S(0)))
    return a + b

sbp.jit(f, mesh, boxing="explicit").plan(x)
""",
    ),
    CodePage(
        "memory-limit",
        """
        Every typing that was found holds more than memory_limit bytes on a device at its fullest
        moment: arguments, results that are not donated, and temporaries. The diagnostic names the
        largest tensors of the plan of least memory.

        Raise the limit, split those tensors over another mesh axis, donate arguments that the step
        returns, recompute with jax.checkpoint, or take a larger mesh.
        """,
        """
sbp.jit(lambda x, w: x @ w, mesh, memory_limit=64).plan(x, w)
""",
        """
sbp.jit(lambda x, w: x @ w, mesh, memory_limit=2**20).plan(x, w)
""",
    ),
    CodePage(
        "budget",
        """
        `budgets=[sbp.forbid(..)]` forbids collectives: of a kind, over a mesh axis, above a size,
        in the forward pass, in the backward pass or inside loops. Here types meet that only such a
        collective brings together, so no plan is within the budget.

        The help names the nearest budget that a plan keeps. Otherwise leave a pin out or move it,
        so that the values meet without.
        """,
        """
def f(x, w):
    return jnp.tanh(x @ w)  # the product is partial, and tanh needs it whole

budgets = [sbp.forbid("all_reduce"), sbp.forbid("reduce_scatter")]
sbp.jit(f, mesh, in_types=("model:S(1)", "model:S(0)"), boxing="reduce", budgets=budgets).plan(x, w)
""",
        """
def f(x, w):
    return jnp.tanh(x @ w)

budgets = [sbp.forbid("all_reduce"), sbp.forbid("reduce_scatter", above=64 * 2**20)]
sbp.jit(f, mesh, in_types=("model:S(1)", "model:S(0)"), boxing="reduce", budgets=budgets).plan(x, w)
""",
    ),
    CodePage(
        "solver-limit",
        """
        The checker stops after a fixed number of steps, never after a time, so that its answers do
        not depend on the computer. It stopped here before it could decide, and says so instead of
        guessing.

        Pin a few more tensors (each pin removes choices), use fewer mesh axes at once, or plan the
        program in two parts.
        """,
        """
sbp.jit(enormous_step, mesh_of_many_axes).plan(state, batch)
""",
        """
sbp.jit(enormous_step, mesh_of_many_axes, in_types=(parameter_types, "data:S(0)")).plan(state,
batch)
""",
        runs=False,
    ),
    CodePage(
        "gathered-matrix",
        """
        A decomposition, a solve or a Fourier transform takes whole matrices or lines. This one is
        split along them, is gathered first, and every device computes the same. It is a note: the
        plan is right.

        Split a batch dim, where there is one; the dims before the matrices split without a
        transfer. A transform over several dims can be written as one over each, with the split on
        another dim.
        """,
        """
f = sbp.jit(lambda x: jnp.linalg.cholesky(x), mesh, in_types=("model:S(0)",))
report = f.check(jax.ShapeDtypeStruct((2048, 2048), jnp.float32))
""",
        """
f = sbp.jit(lambda x: jnp.linalg.cholesky(x), mesh, in_types=("model:S(0)",))
report = f.check(jax.ShapeDtypeStruct((16, 512, 512), jnp.float32))  # a batch of matrices
""",
    ),
    CodePage(
        "costly-annotation",
        """
        A pin without which the plan would be at least 10 % cheaper on this hardware. It is a
        warning: the pin holds. The price with and without it stands in the label.

        Keep the pin if it says something that sbp cannot know (a layout that the next program
        wants); drop it otherwise.

        A note with this code says how many annotations were not checked, and why: in large programs
        each check takes seconds.
        """,
        """
def f(x, w):
    w = sbp.split(w, 1, "model")
    h = sbp.replicate(x @ w, "model")  # gathered, and all of the next line computed on every device
    return jnp.tanh(h)

large = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
report = sbp.jit(f, mesh).check(large, large)
""",
        """
def f(x, w):
    w = sbp.split(w, 1, "model")
    return jnp.tanh(x @ w)

large = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
report = sbp.jit(f, mesh).check(large, large)
""",
    ),
    CodePage(
        "manual-types",
        """
        A manual region is code of the user's own with named-axis collectives. The types that it
        claims for its results do not follow from the types that it claims for its arguments: a
        reduction is missing, stands there twice, comes too late, or runs over the wrong mesh axis.
        Or the body does not take the shards that in_types give it, though it takes whole arrays.
        The body is read as sbp.check_shard_map reads a jax.shard_map, and then run on random values
        for all devices of the mesh.
        """,
        """
g = sbp.manual(lambda x, w: x @ w, in_types=("model:S(1)", "model:S(0)"), out_types="B")  # no psum
sbp.jit(g, mesh).plan(x, w)
""",
        """
types = ("model:S(1)", "model:S(0)")
g = sbp.manual(lambda x, w: jax.lax.psum(x @ w, "model"), in_types=types, out_types="B")
sbp.jit(g, mesh).plan(x, w)
""",
    ),
)
