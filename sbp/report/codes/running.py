"""Codes of what happens while a program is traced, bounded, called or trained, and of
`sbp.check_shard_map`: programs that were written with `jax.shard_map`."""

from sbp.report.codes.types import TYPES, CodePage


def _example(body: str, ins: str, outs: str, args: str = "x, w") -> str:
    """A region with its check."""
    region = (
        f"f = jax.shard_map(body, mesh=mesh, in_specs={ins}, out_specs={outs}, check_vma=False)"
    )
    return (
        f"from jax.sharding import PartitionSpec\n\ndef body{body.strip()}\n\n{region}\n"
        f"report = sbp.check_shard_map(f, {args}, mesh=mesh)\n"
    )


_MATMUL = '(PartitionSpec("data", "model"), PartitionSpec("model", None))'
_KERNEL = """
from jax.experimental import pallas as pl

def squares(x):
    def kernel(x_ref, y_ref):
        y_ref[...] = x_ref[...] ** 2
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(kernel, out, interpret=True, name="squares")(x)
""".strip()
_ROWS = 'PartitionSpec("data", None)'

RUNNING = (
    CodePage(
        "unsupported-effect",
        """
        The program has a side effect that a distributed program cannot keep: an io_callback whose
        result the program uses, a Ref from outside of the program, a token. Printing and callbacks
        without results get the whole, reduced values and run once, on the first device. For a
        result use jax.pure_callback.
        """,
        """
from jax.experimental import io_callback

def f(x):
    return x + io_callback(lambda: jnp.float32(1.0), jax.ShapeDtypeStruct((), jnp.float32))

sbp.jit(f, mesh).plan(x)
""",
        """
def f(x):
    jax.debug.callback(print, x.sum())
    return x + 1.0

sbp.jit(f, mesh).plan(x)
""",
    ),
    CodePage(
        "missing-rule",
        """
        sbp has no signature for this primitive. The program is still right: sbp gathers the
        operands, and every device computes the whole result. This costs memory, time and bytes.
        `sbp signatures` lists the primitives that have one.

        Register rows for the primitive with sbp.signatures.register, under the name in the warning.
        sbp tests each row on numbers before it uses the row. Or use other primitives or a manual
        region.
        """,
        f"""
{_KERNEL}
sbp.jit(squares, mesh, in_types="data:S(0)").plan(x)
""",
        f"""
{_KERNEL}
rows = ["S(0) -> S(0)", "S(1) -> S(1)"]
sbp.signatures.register("pallas_call:squares", rows, local=lambda ctx, x: squares(x))
sbp.jit(squares, mesh, in_types="data:S(0)").plan(x)
""",
    ),
    CodePage(
        "ignored-constraint",
        """
        The program puts a value on a device, or asks for its layout in memory: device_put with a
        device, jax.experimental.layout, compute_on. sbp places values by their types, so the line
        has no effect. A NamedSharding has the effect of sbp.annotate.

        Pin the value with a NamedSharding or with sbp.annotate, or delete the line.
        """,
        """
def f(x, w):
    return jnp.tanh(jax.device_put(x @ w, jax.devices()[0]))

sbp.jit(f, mesh).plan(x, w)
""",
        """
from jax.sharding import NamedSharding, PartitionSpec

def f(x, w):
    rows = NamedSharding(mesh, PartitionSpec("data"))
    return jnp.tanh(jax.device_put(x @ w, rows))

sbp.jit(f, mesh).plan(x, w)
""",
    ),
    CodePage(
        "ignored-memory",
        """
        The program asks for a memory kind in a place where JAX ignores it, under jax.jit too: a
        memory kind of with_sharding_constraint, of in_shardings or out_shardings of a jax.jit
        inside, or a device_put to unpinned_host. The value stays in device memory.

        Copy the value with jax.device_put(x, jax.memory.Space.Host), or to a sharding whose
        memory_kind is pinned_host.
        """,
        """
from jax.sharding import NamedSharding, PartitionSpec

def f(x, w):
    rows = NamedSharding(mesh, PartitionSpec("data"), memory_kind="pinned_host")
    return jax.lax.with_sharding_constraint(jnp.tanh(x @ w), rows)

sbp.jit(f, mesh).plan(x, w)
""",
        """
def f(x, w):
    y = jax.device_put(jnp.tanh(x @ w), jax.memory.Space.Host)
    return jax.device_put(y, jax.memory.Space.Device) * 2.0

sbp.jit(f, mesh).plan(x, w)
""",
    ),
    CodePage(
        "memory-kind",
        """
        An argument is in another memory than its sharding in in_shardings or in_types says, or the
        platform cannot return a result in the memory that its sharding says. A sharding without a
        memory kind asks for device memory.

        Move the argument with jax.device_put, or change the memory kind of the sharding.
        """,
        """
from jax.sharding import NamedSharding, PartitionSpec

host = NamedSharding(mesh, PartitionSpec(), memory_kind="pinned_host")
device = NamedSharding(mesh, PartitionSpec())
on_device = jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=device)
sbp.jit(jnp.sin, mesh, in_shardings=host).plan(on_device)
""",
        """
from jax.sharding import NamedSharding, PartitionSpec

host = NamedSharding(mesh, PartitionSpec(), memory_kind="pinned_host")
on_host = jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=host)
sbp.jit(jnp.sin, mesh, in_shardings=host).plan(on_host)
""",
    ),
    CodePage(
        "lost-state",
        """
        The function changes an argument in place, such as a Flax NNX module with a batch norm or
        with the counters of dropout, and does not return the changed state. A traced function gets
        a copy of its arguments, under jax.jit and under sbp.jit: the caller's object keeps its old
        state. The warning names the leaves.

        Return the new state and put it back, or split the object into arrays and the rest before
        the call, as docs/recipes/flax-nnx.md does. sbp does not watch dicts and lists: functions
        use them as variables of their own.
        """,
        """
from dataclasses import dataclass

@jax.tree_util.register_dataclass
@dataclass
class Model:
    w: jax.Array
    steps: jax.Array

def f(model, x):
    model.steps = model.steps + 1
    return x @ model.w

sbp.jit(f, mesh).plan(Model(w, jnp.int32(0)), x)
""",
        """
from dataclasses import dataclass

@jax.tree_util.register_dataclass
@dataclass
class Model:
    w: jax.Array
    steps: jax.Array

def f(model, x):
    model.steps = model.steps + 1
    return x @ model.w, model

sbp.jit(f, mesh).plan(Model(w, jnp.int32(0)), x)
""",
    ),
    CodePage(
        "wrong-signature",
        """
        A signature from sbp.signatures.register has a row that does not hold. The message shows the
        row, the parts on each device, and the wrong and the right result.

        Delete the row, or correct `local`, which computes a device's part of the result. The usual
        causes are padding of an uneven split in a reduction (`even=True` excludes such splits), and
        P(sum) for an operation that is not linear.

        A note with this code names mesh axes of more than 64 devices, on which sbp does not check a
        signature.
        """,
        """
from jax.experimental import pallas as pl

def cube(x):
    def kernel(x_ref, y_ref):
        y_ref[...] = x_ref[...] * x_ref[...] * x_ref[...]
    result = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(kernel, result, interpret=True, name="cube")(x)

rows = ["S(0) -> S(0)", "P(sum) -> P(sum)"]
sbp.signatures.register("pallas_call:cube", rows, local=lambda ctx, x: cube(x))
try:
    sbp.jit(cube, mesh).plan(x)
finally:
    sbp.signatures.unregister("pallas_call:cube")
""",
        """
from jax.experimental import pallas as pl

def cube(x):
    def kernel(x_ref, y_ref):
        y_ref[...] = x_ref[...] * x_ref[...] * x_ref[...]
    result = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(kernel, result, interpret=True, name="cube")(x)

sbp.signatures.register("pallas_call:cube", ["S(0) -> S(0)"], local=lambda ctx, x: cube(x))
try:
    sbp.jit(cube, mesh).plan(x)
finally:
    sbp.signatures.unregister("pallas_call:cube")
""",
    ),
    CodePage(
        "uneven-boundary",
        """
        A JAX array cannot be split along a dim that does not divide evenly. Such an input or output
        is whole (B) on that mesh axis at the boundary, and the program slices or gathers it; the
        report shows the price. Inside the program, uneven splits work.

        Make the dim a multiple of the axis size, for instance by padding the batch, or leave the
        input free. To keep a weight or optimiser state split between calls, give it the type
        sbp.padded("model:S(0)"): it is then an sbp.Padded, with its true shape.
        """,
        """
x = jax.ShapeDtypeStruct((10, 16), jnp.float32)
sbp.jit(lambda x: x * 2.0, mesh, in_types=("model:S(0)",)).plan(x)
""",
        """
x = jax.ShapeDtypeStruct((12, 16), jnp.float32)
sbp.jit(lambda x: x * 2.0, mesh, in_types=("model:S(0)",)).plan(x)
""",
    ),
    CodePage(
        "input-moved",
        """
        An argument arrived on other devices or in another layout than the plan takes, so sbp moved
        it before the call. The result is right, but each call costs a copy. Put long-lived arrays
        in plan.in_shardings once, and make batches in these shardings.
        """,
        """
mesh = sbp.make_mesh((2,), ("data",))
f = sbp.jit(lambda x: x * 2.0, mesh, in_types=("data:S(0)",))
f(jax.device_put(jnp.zeros((8, 4)), jax.devices()[0]))
""",
        """
mesh = sbp.make_mesh((2,), ("data",))
f = sbp.jit(lambda x: x * 2.0, mesh, in_types=("data:S(0)",))
plan = f.plan(jnp.zeros((8, 4)))
f(jax.device_put(jnp.zeros((8, 4)), plan.in_shardings[0]))
""",
    ),
    CodePage(
        "nested-jit",
        """
        You called an sbp.jit function inside jax.vmap, jax.shard_map or another sbp.jit; or, inside
        jit or grad, it closes over a value that JAX traces, or takes or returns sbp.Partial or
        sbp.Padded. sbp then runs the plain function without a plan of its own. Inside another
        sbp.jit, the outer plan covers it, annotations included.

        Put sbp.jit around the transformation. Inside another sbp.jit, leave out the inner one. Pass
        values that JAX traces as arguments.
        """,
        """
f = sbp.jit(lambda x: (x * x).sum(), mesh)
jax.vmap(f)(jnp.zeros((8, 4)))
""",
        """
f = sbp.jit(jax.vmap(lambda x: (x * x).sum()), mesh)
f.plan(jnp.zeros((8, 4)))
""",
    ),
    CodePage(
        "many-plans",
        """
        An sbp.jit function keeps the plans of its last 256 call signatures: shapes, dtypes, static
        arguments, shardings and settings of JAX. Beyond that, it drops the least recently used
        plan. A call with that signature plans and compiles again.

        Pad shapes to a few sizes, or pass what changes as an array in place of a static argument.
        """,
        """
f = sbp.jit(lambda x, n: x * n, mesh, static_argnums=1)
for n in range(1000):
    f(x, n)
""",
        """
f = sbp.jit(lambda x, n: x * n, mesh)
for n in range(1000):
    f(x, n)
""",
        runs=False,
    ),
    CodePage(
        "saved-plan",
        """
        sbp.jit(.., plan=path) runs a plan that plan.save wrote, and plans nothing. The plan in this
        file is for another program, mesh, hardware, option or version of sbp or JAX, or someone
        changed its text or types and they do not hold. The message says which, with the line of the
        plan or of the program.

        Leave plan= out to plan again, and save the new plan.
        """,
        """
sbp.jit(lambda x: x * 2.0, mesh).plan(jnp.zeros(8)).save("doubled.json")
sbp.jit(lambda x: x * 3.0, mesh, plan="doubled.json").plan(jnp.zeros(8))
""",
        """
f = lambda x: x * 2.0
sbp.jit(f, mesh).plan(jnp.zeros(8)).save("doubled.json")
sbp.jit(f, mesh, plan="doubled.json").plan(jnp.zeros(8))
""",
    ),
    CodePage(
        "device-order",
        """
        The devices of a TPU are on a torus, and a collective along a mesh axis takes longer the
        farther the devices along this axis are apart. Here the order of the devices in the mesh
        keeps them farther apart than the order of jax.make_mesh does. sbp prices the order that
        you give, and the warning shows both prices. If the devices do not fill a box of the torus,
        sbp prices them as if they did, and the warning says so.

        Make the mesh with sbp.make_mesh or jax.make_mesh, which ask the devices for their places.
        """,
        """
devices = np.random.default_rng(0).permutation(jax.devices()).reshape(4, 4)
mesh = jax.sharding.Mesh(devices, ("data", "model"))
sbp.jit(lambda x: x * 2.0, mesh)(x)
""",
        """
mesh = sbp.make_mesh((4, 4), ("data", "model"))
sbp.jit(lambda x: x * 2.0, mesh)(x)
""",
        runs=False,
    ),
    CodePage(
        "processes-differ",
        """
        Several processes share the mesh, and do not run the same call: they differ in the mesh,
        program, options, or the value of an argument that each process has as a whole (a NumPy
        array, a number, an array on its own devices). Or a process did not run the plan at all.
        Without this error they would wait for each other forever, or compute wrong values.

        Make the same calls in the same order in all processes. Pass data that differ with
        jax.make_array_from_process_local_data.

        sbp compares once for each plan, before its first run, through the key-value store of
        jax.distributed. The environment variable SBP_CHECK_PROCESSES=0 turns it off.
        """,
        """
devices = sorted(jax.devices(), key=lambda d: d.process_index != jax.process_index())
mesh = jax.sharding.Mesh(devices, ("data",))  # another order in each process
sbp.jit(lambda x: x * 2.0, mesh)(x)
""",
        """
mesh = jax.sharding.Mesh(jax.devices(), ("data",))
sbp.jit(lambda x: x * 2.0, mesh)(x)
""",
        runs=False,
    ),
    CodePage(
        "bad-corpus",
        """
        A file of parallel text cannot be read: it is missing, empty or not UTF-8, or a line does
        not have the three columns source, target, language, separated by tabs. The message names
        the line. The run wrote nothing.
        """,
        """
sbp train --data corpus.tsv    # with a line of two columns
""",
        """
sbp train --data corpus.tsv    # source<TAB>target<TAB>language on every line
""",
        runs=False,
    ),
    CodePage(
        "bad-checkpoint",
        """
        The folder has the checkpoint of another configuration, or a checkpoint that sbp cannot
        read. The message lists the differences. The run wrote nothing: choose another --workdir, or
        use the configuration that made the checkpoint.
        """,
        """
# runs/a was begun with another number of experts
sbp train --workdir runs/a --set experts=8
""",
        """
sbp train --workdir runs/b --set experts=8
""",
        runs=False,
    ),
    CodePage(
        "not-finite",
        """
        The loss, the gradients or the updates were infinite or NaN for `max_skipped` steps in a
        row. All devices skip such a step: it changes neither the parameters nor the state of the
        optimiser. The checkpoints are kept. A run with another learning rate or other text needs
        another folder.
        """,
        """
sbp train --workdir runs/a --set learning_rate=1e30
""",
        """
sbp train --workdir runs/b --set ramp_steps=100 --set clip_norm=1
""",
        runs=False,
    ),
    CodePage(
        "missing-reduction",
        """
        In a shard_map each device has a part of a value, such as a partial sum or the maximum of
        its own shard, and the program returns or uses the part as if it were the whole value. A
        product whose contracted dim is split gives such parts. So does a sum, a maximum or a mean
        along a split dim.

        Reduce the value with lax.psum (lax.pmax for a maximum, lax.pmean for the mean of a shard),
        or return it split with lax.psum_scatter. The label shows where it becomes partial. With
        check_vma=True, JAX itself refuses some of these programs.
        """,
        _example("(x, w):\n    return x @ w", _MATMUL, _ROWS),
        _example('(x, w):\n    return jax.lax.psum(x @ w, "model")', _MATMUL, _ROWS),
    ),
    CodePage(
        "doubled-reduction",
        """
        A reduction takes a value that every device has. The sum over n devices is n times too
        large. The label shows the first reduction. With check_vma=True, JAX itself reduces the
        gradient of a whole value, and a second sum counts it n times.

        Drop the second reduction, or divide by the number of devices (lax.pmean does both). The
        finding is a warning if a number in the program may be this divisor: write
        lax.axis_size for the number of devices.
        """,
        _example(
            '(x, w):\n    y = jax.lax.psum(x @ w, "model")\n    return jax.lax.psum(y, "model")',
            _MATMUL,
            _ROWS,
        ),
        _example('(x, w):\n    return jax.lax.psum(x @ w, "model")', _MATMUL, _ROWS),
    ),
    CodePage(
        "misplaced-reduction",
        """
        A reduction comes after an operation that does not commute with it. The sum of a nonlinear
        function of the parts is not the function of the sum. A bias that is added to each part
        counts once for each device. The products of the parts of two values do not add up to the
        product of the values, and neither do the ratios. If each device subtracts the maximum of
        its own shard, it subtracts another number than the others.

        Reduce before this operation.
        """,
        _example('(x, w):\n    return jax.lax.psum(jnp.tanh(x @ w), "model")', _MATMUL, _ROWS),
        _example('(x, w):\n    return jnp.tanh(jax.lax.psum(x @ w, "model"))', _MATMUL, _ROWS),
    ),
    CodePage(
        "wrong-reduction",
        """
        A reduction does not fit the parts that it takes. Over n devices, lax.pmean of the parts of
        a sum is n times too small, and lax.psum of the means of shards is n times too large. The
        largest of some partial sums has no meaning on one device.

        A division by hand is checked like lax.pmean: lax.psum(x.sum(), axis) / lax.axis_size(axis)
        is n times too small. If a number in the program may explain the difference, the finding is
        a warning that names the number. Write lax.axis_size for the number of devices: sbp then
        knows what you mean.

        Use lax.psum for a sum along a split dim, lax.pmean for a mean (all shards have the same
        length), and lax.pmax for a maximum.
        """,
        _example(
            '(x):\n    return jax.lax.psum(x.mean(), "data")',
            '(PartitionSpec("data"),)',
            "PartitionSpec()",
            "x",
        ),
        _example(
            '(x):\n    return jax.lax.pmean(x.mean(), "data")',
            '(PartitionSpec("data"),)',
            "PartitionSpec()",
            "x",
        ),
    ),
    CodePage(
        "wrong-placement",
        """
        A collective or out_specs assume another placement than the value has. out_specs may split a
        value that every device has, so that the result holds several copies; or they may split a
        partial value, call a split value whole, or name another dim or another order of mesh axes.
        A gather may run along another dim than the value is split on. A gather or an all-to-all may
        send copies of a value that every device has. lax.psum may add the shards of a split value
        to one another. Positions may count from zero in each shard. A collective may be in a branch
        that only some of the devices take; then they wait for the others forever.

        Name in out_specs the dim that the value is split on, and gather along this dim. Split in
        in_specs the arrays of which each device is to have a part. A device's shard begins at
        lax.axis_index(axis) times its length.
        """,
        _example("(x, w):\n    return x @ w", _MATMUL, 'PartitionSpec(("data", "model"), None)'),
        _example(
            '(x, w):\n    return jax.lax.psum_scatter(x @ w, "model", scatter_dimension=1,'
            " tiled=True)",
            _MATMUL,
            'PartitionSpec("data", "model")',
        ),
    ),
    CodePage(
        "local-result",
        """
        An operation that needs a whole dim runs on each shard of a split dim alone, and the program
        uses its result as the result for the whole dim. Such operations are a cumulative sum, a
        sort, an argmax, a top-k, a roll and a lookup.

        Gather the operand first, or combine the results of the shards: the best values and their
        indices for an argmax, the totals of the earlier shards for a cumulative sum. If you mean a
        result for each group, give the groups a dim of their own and split this dim.
        """,
        _example(
            "(x):\n    return jnp.argmax(x, -1)",
            '(PartitionSpec("data", "model"),)',
            'PartitionSpec("data")',
            "x",
        ),
        _example(
            '(x):\n    return jnp.argmax(jax.lax.all_gather(x, "model", axis=1, tiled=True), -1)',
            '(PartitionSpec("data", "model"),)',
            'PartitionSpec("data")',
            "x",
        ),
    ),
    CodePage(
        "differs-on-one-device",
        """
        sbp traced the program again with one device on a mesh axis and ran both programs on the
        same values. A result differs, and sbp does not find the operation at fault. The labels mark
        values that come from another device or depend on the index of a device. The usual causes
        are a ring that is one step short, a block of the wrong owner, a wrong mask or offset, a sum
        that is not rescaled, and a halo from the wrong neighbor. sbp compares a pipeline with its
        stages, one after the other.

        Nothing is wrong if you mean the result to depend on the number of devices. If the program
        shows that you may mean it, the finding is a note with the reason: each device ranks its own
        elements, or a region returns one element for each device. Take the number of devices from
        lax.axis_size. For a number in the source, sbp tries both meanings, the number of devices
        and another number.

        With against=, sbp compares the program with your plain function instead, and a difference
        is an error. The labels then mark operations whose operands make up values of the plain
        function, while their results do not.
        """,
        _example(
            '(x):\n    n = jax.lax.axis_size("model")\n'
            "    pairs = [(i + 1, i) for i in range(n - 1)]\n"
            '    before = jax.lax.ppermute(x[:, -1:], "model", pairs)\n'
            "    return x - jnp.concatenate([before, x[:, :-1]], 1)",
            '(PartitionSpec("data", "model"),)',
            'PartitionSpec("data", "model")',
            "x",
        ),
        _example(
            '(x):\n    n = jax.lax.axis_size("model")\n'
            "    pairs = [(i, i + 1) for i in range(n - 1)]\n"
            '    before = jax.lax.ppermute(x[:, -1:], "model", pairs)\n'
            "    return x - jnp.concatenate([before, x[:, :-1]], 1)",
            '(PartitionSpec("data", "model"),)',
            'PartitionSpec("data", "model")',
            "x",
        ),
    ),
    CodePage(
        "not-analysed",
        """
        sbp.check_shard_map did not check the program on this mesh axis, because it could not run
        the program. A warning says so if the program is too large to run without devices, or if it
        has an operation that cannot run so: a collective in groups of an axis, a shard_map inside a
        shard_map, or a callback without a vmap_method. A note says so if the function raises an
        error on one device.

        The program may be right. Call sbp.check_shard_map with smaller arguments, or check the part
        of the program without such operations.

        The report of an sbp.jit function has this code as a note if the function calls
        jax.shard_map. sbp.jit runs such a region as it is written and does not check it.
        """,
        _example(
            '(x):\n    return jax.lax.psum(x.sum(), "model", axis_index_groups=[[0, 1], [2, 3]])',
            '(PartitionSpec(None, "model"),)',
            "PartitionSpec()",
            "x",
        ),
        _example(
            '(x):\n    return jax.lax.psum(x.sum(), "model")',
            '(PartitionSpec(None, "model"),)',
            "PartitionSpec()",
            "x",
        ),
    ),
)

PAGES: dict[str, CodePage] = {page.code: page for page in (*TYPES, *RUNNING)}
"""A page for each code of `sbp.errors.CODES`."""
