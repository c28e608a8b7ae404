"""The source of a plan: a Python file that imports `jax` and nothing of sbp."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from sbp.api.holding import Holding
from sbp.api.source_writer import SourceWriter, free_name
from sbp.errors import bytes_text
from sbp.signatures.expressions import (
    no_source,
    text_of,
    tuple_text,
)
from sbp.trace.places import HOST
from sbp.version import VERSION

_HEAD = '''"""`{name}`, as sbp {version} planned it for the mesh {mesh} of {platform} devices.

The file needs JAX and no sbp. It was written for JAX {jax}.

A comment has the type of a value on each mesh axis, and the line of your program: S(d) is split
along dim d, P(sum) is a sum that is not added up yet, and on the axes that it does not name, each
device has the whole value (B if it names none). For a collective, it has the bytes that one device
sends each time the collective runs. In one call, one device sends {sent}.{donation}
"""

{imports}

{arrays}mesh = jax.make_mesh({sizes}, {names}, axis_types=(AxisType.Auto,) * {count})
ARGUMENTS = {arguments}


def shardings(specs):
    return tuple(NamedSharding(mesh, spec) for spec in specs)'''


_DONATION = """

The file donates what your function donates: JAX deletes the arrays that you pass there."""


_IMPORTS = (
    ("functools.", "import functools"),
    ("Path", "from pathlib import Path"),
    ("", ""),
    ("jax.", "import jax"),
    ("jax.extend.", "import jax.extend.random"),
    ("jnp.", "import jax.numpy as jnp"),
    ("np.", "import numpy as np"),
    ("lax.", "from jax import lax"),
    ("with_layout_", "from jax.experimental.layout import Layout, with_layout_constraint"),
    ("", "from jax.sharding import AxisType, NamedSharding, PartitionSpec as P"),
)
"""The imports of a file, each with what needs it."""


_ARRAYS = """with np.load(Path(__file__).with_suffix(".npz")) as file:
    ARRAYS = dict(file)
"""


def emit(holding: Holding) -> tuple[str, dict[str, Any]]:
    """The source of a plan, and the arrays that it reads from the `.npz` file of the same name.

    Arguments:
      holding: the plan, with its arguments and results.

    Raises:
      SbpError: `bad-argument` for an operation that has no source.
    """
    executable, ins, outs = holding.executable, holding.signature.tree, holding.returned.tree
    program, keys = executable.program, (ins.children()[1].node_data() or (dict, ()))[1]
    writer, mesh = SourceWriter(program), program.mesh
    heads, reserved = list[str](), writer.module | {*keys}
    for name in holding.signature.heads:
        heads.append(free_name(name, reserved | {*heads}))
    plain = all(k.isidentifier() and free_name(k, writer.module) == k for k in keys)
    positional = tuple(heads)
    own = free_name(executable.name, writer.module)
    writer.module.add(own)
    config: Any = jax.config
    is_wide, closed = program.graph.has_64_bits(), executable.traced(writer)
    with jax.default_matmul_precision(None), jax.enable_x64(is_wide or config.jax_enable_x64):
        flat = writer.function(closed, f"{own}_of_arrays", names=program.graph.input_names)
    donated = tuple(executable.options["donate_argnums"])
    options = {
        "in_shardings": f"shardings({_specs(executable.in_shardings)})",
        "out_shardings": f"shardings({_specs(executable.out_shardings)})",
        **({"donate_argnums": str(donated)} if donated else {}),
        **{k: repr(x) for k in ("keep_unused", "compiler_options") if (x := executable.options[k])},
    }
    run = ["run = jax.jit(", f"    {flat},", *(f"    {k}={v}," for k, v in options.items()), ")"]
    named = f"{{{', '.join(f'{k!r}: {k}' for k in keys)}}}" if plain else "named"
    keywords = keys if plain else [f"named[{k!r}]" for k in keys]
    heads += ["**named"] if not plain else ["*", *keys] if keys else []
    given = f"({tuple_text(positional)}, {named})" if keys else tuple_text(positional)
    arguments = (tree for part in ins.children() for tree in part.children())
    like = dict(reversed([*zip(arguments, [*positional, *keywords], strict=True)]))  # the first
    main = [
        f"def {own}({', '.join(heads)}):",
        f"    arrays = jax.tree.leaves({given})",
        '    given = tuple(f"{jnp.result_type(x)}{[*jnp.shape(x)]}" for x in arrays)',
        "    if given != ARGUMENTS:",
        "        pairs = zip(ARGUMENTS, given)",
        '        wrong = [f"{a} and not {b}" for a, b in pairs if a != b]',
        '        count = f"{len(ARGUMENTS)} arrays, got {len(given)}"',
        """        raise ValueError(f"the plan takes {', '.join(wrong) or count}")""",
        "    outs = run(*arrays)",
        f"    return {_result(outs, iter(range(outs.num_leaves)), like)}",
    ]
    settings = "".join(
        f'jax.config.update("{name}", {value})\n'
        for name, value, is_needed in (
            ("jax_enable_x64", True, is_wide),
            ("jax_threefry_partitionable", False, not config.jax_threefry_partitionable),
        )
        if is_needed
    )
    arrays = _ARRAYS if writer.arrays else ""
    body = "\n\n\n".join([*writer.texts, "\n".join(run), "\n".join(main)])
    words = {*"".join(c if c.isalnum() or c in "_." else " " for c in arrays + body).split()}
    used = [line for needs, line in _IMPORTS if any(w.startswith(needs) for w in words)]
    head = _HEAD.format(
        name=own,
        arguments=text_of(tuple(f"{s.dtype}{[*map(int, s.shape)]}" for s in executable.shapes)),
        version=VERSION,
        mesh=str(mesh).replace("\\", "\\\\"),
        platform=mesh.hardware.platform,
        jax=jax.__version__,
        sent=bytes_text(program.cost.bytes_per_device),
        donation=_DONATION if donated else "",
        imports="\n".join(used).strip("\n"),
        arrays=settings + arrays,
        sizes=text_of(tuple(mesh.sizes)),
        names=text_of(tuple(mesh.names)),
        count=len(mesh.sizes),
    )
    return f"{head}\n\n\n{body}\n", writer.arrays


def _specs(shardings: Sequence[Any]) -> str:
    if any(s.memory_kind == HOST for s in shardings):
        raise no_source("an argument or a result in host memory")
    return f"[{', '.join(text_of(s.spec) for s in shardings)}]"


def _result(tree: Any, numbers: Iterator[int], nodes: Mapping[Any, str]) -> str:
    """An expression of a pytree of the results. One with nodes of other classes than Python's has
    the structure of an argument; if none has it, the leaves of such a node are a tuple."""
    if (tree.num_nodes, tree.num_leaves) == (1, 1):
        return f"outs[{next(numbers)}]"
    kind, keys = tree.node_data() or (type(None), ())
    like = nodes.get(tree) if not _is_plain(tree) else None
    if like or not _is_written(tree):
        leaves = tuple_text([f"outs[{next(numbers)}]" for _ in range(tree.num_leaves)])
        return f"jax.tree.unflatten(jax.tree.structure({like}), {leaves})" if like else leaves
    parts = [_result(child, numbers, nodes) for child in tree.children()]
    if kind is dict:
        return f"{{{', '.join(f'{k!r}: {p}' for k, p in zip(keys, parts, strict=True))}}}"
    if kind is list:
        return f"[{', '.join(parts)}]"
    return tuple_text(parts) if kind is tuple else "None"


def _is_plain(tree: Any) -> bool:
    """Whether all nodes of a pytree are of Python's classes."""
    return _is_written(tree) and all(map(_is_plain, tree.children()))


def _is_written(tree: Any) -> bool:
    """Whether the outermost node of a pytree can be written: it is of a class of Python's, and of a
    dict all keys can be written."""
    kind, keys = tree.node_data() or (type(None), ())
    return kind in (tuple, list, dict, type(None)) and (
        kind is not dict or all(type(key) in (str, int, bool) for key in keys)
    )
