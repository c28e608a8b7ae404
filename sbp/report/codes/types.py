"""What `sbp explain` says of a code; codes of types, meshes, named dims and symbolic sizes, and of
programs that have no typing, or a dear one."""

import textwrap
from dataclasses import dataclass

PRELUDE = """
import jax
import jax.numpy as jnp
import sbp
from sbp import B, P, S

auto = (jax.sharding.AxisType.Auto,) * 2
mesh = jax.sharding.AbstractMesh((2, 4), ("data", "model"), axis_types=auto)
x, w = jax.ShapeDtypeStruct((8, 16), jnp.float32), jax.ShapeDtypeStruct((16, 32), jnp.float32)
"""
"""What every example starts from."""


@dataclass(frozen=True, slots=True)
class CodePage:
    """One code.

    Arguments:
      code: the diagnostic code.
      text: why it is said, and what one usually does; paragraphs are separated by empty lines.
      wrong: a program that gets it, after `PRELUDE`.
      right: the same, repaired.
      runs: whether the tests may run the two (they need no file of the user's).
    """

    code: str
    text: str
    wrong: str
    right: str
    runs: bool = True

    def paragraphs(self) -> tuple[str, ...]:
        """The text, one string for each paragraph."""
        return tuple(" ".join(p.split()) for p in textwrap.dedent(self.text).strip().split("\n\n"))


TYPES = (
    CodePage(
        "no-signature",
        """
        Each operator has a table of signatures: which types of its operands give which types of its
        results. Here no row has the types that reach the operator on one mesh axis, and the boxing
        policy does not let sbp convert them.

        The diagnostic shows the nearest rows. Pin one operand to another type, convert it by an
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
        Two annotations pin different types where one type has to hold: for the carry of a scan or
        while, for the results of the branches of a cond, or for a value between two annotations, if
        the boxing policy allows no conversion there. The labels show both annotations.

        Make them agree, drop one, or add a third where sbp should convert the value: an annotation
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
        A pin gives a tensor a type that it cannot have (a split of ten rows over eight devices at
        the end of the program), or types fit on each mesh axis but not on all axes together: an
        inner axis cannot keep a split of a dim that an outer axis has to change. The labels show
        the smallest set of pins that cannot all hold.

        Leave one of them free on that axis.
        """,
        """
def f(x):
    a = jnp.tanh(sbp.annotate(x, data=B, model=S(0)))
    b = jnp.tanh(sbp.annotate(x, data=S(0), model=B))
    return a + b  # `data` is the outer axis: it cannot split a dim that `model` already splits

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
        Every plan that sbp found needs more than memory_limit bytes per device at its peak. The
        peak counts arguments, results that do not reuse a donated buffer, and temporaries. The
        diagnostic names the largest tensors of the plan with the least memory.

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
        in the forward pass, in the backward pass or inside loops. Here only such a collective makes
        the types fit, so no plan keeps the budget.

        The help names the nearest budget that a plan keeps. Or drop or move a pin, so that the
        program needs no such collective.
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
        not depend on the computer. Here the checker stopped before it could decide.

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
        A decomposition, a solve or a Fourier transform takes whole matrices or lines. Here the
        operand is split along them, so sbp gathers it first, and every device computes the same
        result. It is a note: the plan is right.

        Split a batch dim instead: the dims before the matrices split without a transfer. You can
        write a transform over several dims as one transform over each, with the split on another
        dim.
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
        Without this pin, the plan would take at least 10% less time on this hardware. This is only
        a warning: sbp keeps the pin. The label shows the price with and without the pin.

        Keep the pin if sbp cannot know its purpose (a layout that the next program needs);
        otherwise drop it.

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
        types in out_types: a reduction is missing, occurs twice, comes too late, or runs over the
        wrong mesh axis. Or the body cannot take the shards that in_types give it.

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
        message points at the first wrong column. A plan's text that does not parse has this code
        too, with the line.
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
        message suggests the nearest name.
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
        A tensor cannot be partial under two different monoids at once, because a maximum of sums is
        not a sum of maxima. Reduce one of them first.
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
        sbp.shard takes GShard's device assignment: an array of device ids, one for each slice. sbp
        accepts it if a split on this mesh places the slices in the same way. Otherwise build the
        mesh with its devices in the order that you want, or use sbp.split.
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
        The mesh has more devices than JAX sees. Take a smaller mesh, simulate devices on the host
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
        An input that you pin to P has to be an sbp.Partial, which holds one part for each device
        along the axis; a plain array has only one value. Pin the input S or B instead, or pass the
        Partial that another sbp.jit function returned.
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
        An argument of an sbp function does not fit; the message names the expected and the given
        value. Typical causes: in_types has more or fewer entries than the function has positional
        arguments, a type in place of a tensor, an argument that is neither an array nor static.
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
        An option, a policy, a preset, a hardware name or a monoid does not exist. The message
        suggests the nearest one.
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

        Map one of the two to another axis. If the tensor has the same dim twice, as in attention
        from positions to positions, give the second one another name, which the layout does not
        map.
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
        tensor differ. None stands for a dim without a name, which the layout never splits. Under
        jax.vmap the batch dim has no name: a tensor has the dims that the function sees.
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
        sbp typed a program with symbolic sizes at one choice of the sizes, and these types do not
        hold for all sizes. At the sizes in the message, a dim that is split at the boundary does
        not divide, a split leaves devices without elements, an operator has no signature for these
        types, or a reshape does not keep the number of elements (JAX does not check this for
        symbolic sizes). The condition is exact: calls with sizes that do not meet it get other
        types, and may send more.

        If you want this condition, put it into the scope of the sizes. Otherwise split another dim.
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
        sbp could not decide for which symbolic sizes the types of a program hold. Z3 gave up on a
        product or quotient of symbols, or a rule needs a size as a number: the message names the
        lines. Or JAX traces other operations for symbolic sizes, such as a gather for x[1:]. Then
        sbp's answer is for these operations, and your call with numbers may run others.

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
        A plan needs sizes as numbers: its collectives have lengths, and its price is in bytes. Only
        f.check takes symbolic sizes, and says for which sizes the types hold. Pass numbers to
        f.plan and to calls.

        You also get this code if shapes come from different symbolic scopes, if no size meets the
        constraints, if the function uses a symbolic size that no argument has, if a reshape keeps
        the number of elements at no size, or if Python code depends on a size in a way that the
        scope does not decide, such as b > 5. The constraint "b >= 6" or "b <= 5" decides it.
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
