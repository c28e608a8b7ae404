"""Codes of types, meshes, named dims and symbolic sizes, and of programs that have no typing, or a
dear one."""

from __future__ import annotations

from sbp.report.codes.page import CodePage

TYPES = (
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
        A manual region is your own code with named-axis collectives. Its results do not have the
        types that out_types claim: a reduction is missing, occurs twice, comes too late, or runs
        over the wrong mesh axis. Or the body takes whole arrays, but not the shards that in_types
        give it.

        sbp runs the region on random values, on the mesh and with one device on each mesh axis, as
        sbp.check_shard_map does. It is an error if sbp finds the operation at fault. It is a
        warning if the results differ and no operation explains it, or if the region cannot be run.
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
    CodePage(
        "type-syntax",
        """
        A type text is a list of AXIS:ATOM separated by blanks, where ATOM is S(dim), B, P,
        P(monoid) or ?, and axes that are not named are B. B alone is broadcast on every axis. The
        message points at the column where the text stops being that. A plan's text that does not
        parse back has this code too, with the line.
        """,
        """
sbp.parse("data:S(0 model:B")
""",
        """
sbp.parse("data:S(0) model:B")
""",
    ),
    CodePage(
        "unknown-axis",
        """
        A type, an annotation or a specification names a mesh axis that the mesh does not have. The
        nearest name is suggested.
        """,
        """
sbp.jit(lambda x: sbp.split(x, 0, "modle"), mesh).plan(x)
""",
        """
sbp.jit(lambda x: sbp.split(x, 0, "model"), mesh).plan(x)
""",
    ),
    CodePage(
        "dim-out-of-range",
        """
        S(d) splits dim d of the tensor, counted from the front and from 0, and the tensor has no
        such dim. sbp.split also takes negative dims, which count from the back; S(d) does not.
        """,
        """
sbp.annotate(jnp.zeros((8, 4)), data=S(2))
""",
        """
sbp.annotate(jnp.zeros((8, 4)), data=S(1))
""",
    ),
    CodePage(
        "mixed-monoids",
        """
        A tensor cannot be partial under two different monoids at once: the maximum over one axis of
        sums over another is not the sum over the one of maxima over the other. Reduce one of them
        first.
        """,
        """
sbp.parse("data:P(sum) model:P(max)")
""",
        """
sbp.parse("data:P(sum) model:B")
""",
    ),
    CodePage(
        "bad-placement",
        """
        sbp.shard takes GShard's device assignment: an array of device ids, one for each slice. It
        is accepted when some split of this mesh places the slices just so. Otherwise build the mesh
        with its devices in the order that you want, or use sbp.split.
        """,
        """
import numpy as np

sbp.jit(lambda x: sbp.shard(x, np.array([[0], [7], [2], [5], [4], [3], [6], [1]])), mesh).plan(x)
""",
        """
import numpy as np

sbp.jit(lambda x: sbp.shard(x, np.arange(8).reshape(8, 1)), mesh).plan(x)
""",
    ),
    CodePage(
        "mesh-devices",
        """
        The mesh has more devices than there are. Take a smaller mesh, simulate devices on the host
        with XLA_FLAGS=--xla_force_host_platform_device_count=N (before JAX is first used), or plan
        on a jax.sharding.AbstractMesh, which needs no devices at all.
        """,
        """
sbp.make_mesh((64, 64), ("data", "model"))
""",
        """
jax.sharding.AbstractMesh((64, 64), ("data", "model"))
""",
    ),
    CodePage(
        "abstract-mesh",
        """
        A plan for an AbstractMesh can be read, priced and lowered, but there are no devices to run
        it on. Make a mesh over devices with sbp.make_mesh or jax.make_mesh.
        """,
        """
sbp.jit(jnp.tanh, mesh)(jnp.zeros((8, 16)))
""",
        """
sbp.jit(jnp.tanh, sbp.make_mesh((1,), ("data",)))(jnp.zeros((8, 16)))
""",
    ),
    CodePage(
        "not-partial",
        """
        An input that is pinned P must come as an sbp.Partial, which holds one unreduced part for
        each device along the axis, as an output pinned P does; a plain array has only one value.
        Pin the input S or B instead, or pass the Partial that another sbp.jit function returned.
        """,
        """
sbp.jit(lambda x: x * 2.0, mesh, in_types=("model:P(sum)",)).plan(jnp.zeros((8, 16)))
""",
        """
sbp.jit(lambda x: x * 2.0, mesh, in_types=("B",)).plan(jnp.zeros((8, 16)))
""",
    ),
    CodePage(
        "bad-argument",
        """
        An argument of an sbp function does not fit; the message says what is taken and what was
        given. Typical: in_types with another number of entries than the function has positional
        arguments, a type where a tensor is wanted, an argument that is no array and not static.
        """,
        """
sbp.jit(lambda x, w: x @ w, mesh, in_types=("B",)).plan(x, w)
""",
        """
sbp.jit(lambda x, w: x @ w, mesh, in_types=("B", "B")).plan(x, w)
""",
    ),
    CodePage(
        "unknown-option",
        """
        An option, a policy, a preset, a hardware name or a monoid that does not exist. The nearest
        one is suggested.
        """,
        """
sbp.jit(jnp.tanh, mesh, boxing="explicitly")
""",
        """
sbp.jit(jnp.tanh, mesh, boxing="explicit")
""",
    ),
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
