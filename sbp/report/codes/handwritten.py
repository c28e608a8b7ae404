"""Codes of `sbp.check_shard_map`: programs that were written with `jax.shard_map`."""

from __future__ import annotations

from sbp.report.codes.page import CodePage

_LEAD = "from jax.sharding import PartitionSpec\n\n"


def _example(body: str, ins: str, outs: str, args: str = "x, w") -> str:
    """A region with its check."""
    region = (
        f"f = jax.shard_map(body, mesh=mesh, in_specs={ins}, out_specs={outs}, check_vma=False)"
    )
    return (
        f"{_LEAD}def body{body.strip()}\n\n{region}\nreport = sbp.check_shard_map(f, {args},"
        " mesh=mesh)\n"
    )


_MATMUL = '(PartitionSpec("data", "model"), PartitionSpec("model", None))'
_ROWS = 'PartitionSpec("data", None)'

HANDWRITTEN = (
    CodePage(
        "missing-reduction",
        """
        In a shard_map each device has its share of a value, a partial sum or the maximum of its own
        shard, and the value is returned or used as though it were the whole. A product whose
        contracted dim is split is such a value, and so are a sum, a maximum or a mean along a split
        dim.

        Reduce it with lax.psum (lax.pmax for a maximum, lax.pmean for the mean of a shard), or
        return it split with lax.psum_scatter. The label shows where it became partial. With
        check_vma=True, JAX itself refuses some of these.
        """,
        _example("(x, w):\n    return x @ w", _MATMUL, _ROWS),
        _example('(x, w):\n    return jax.lax.psum(x @ w, "model")', _MATMUL, _ROWS),
    ),
    CodePage(
        "doubled-reduction",
        """
        What is reduced is whole already: each device has the same, and their sum is as many times
        too much as there are devices. The label shows the first reduction. With check_vma=True, the
        gradient of something whole is reduced by JAX: one more sum doubles it.

        Drop the second reduction, or divide by the number of devices (lax.pmean does both).
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
        A reduction comes too late: before it stands an operation that does not commute with it. A
        nonlinear function of a sum is not the sum of its values on the parts; a bias added to each
        part is added once for each device; the product and the ratio of two partial values are no
        parts of the product and the ratio; a split value minus the maximum of its own shard is
        shifted by another number on each device.

        Reduce before that operation.
        """,
        _example('(x, w):\n    return jax.lax.psum(jnp.tanh(x @ w), "model")', _MATMUL, _ROWS),
        _example('(x, w):\n    return jnp.tanh(jax.lax.psum(x @ w, "model"))', _MATMUL, _ROWS),
    ),
    CodePage(
        "wrong-reduction",
        """
        A value is reduced otherwise than it is partial: lax.pmean of parts of a sum is too small by
        the number of devices, lax.psum of means of shards is too large by it, and the largest of
        partial sums is nothing that one device would compute.

        A division by hand is read as the mean that it is: lax.psum(x.sum(), axis) /
        lax.axis_size(axis) is that pmean, and divided by the length of one shard the sum is too
        large by the number of devices.

        A sum along a split dim takes lax.psum, a mean along one takes lax.pmean (shards are equally
        long), a maximum lax.pmax.
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
        A collective or out_specs take a value as held otherwise than it is: a partial value or one
        that every device has is returned as split, so that the result holds several copies; a dim
        that is split over two mesh axes is returned, or gathered, as split over them in another
        order; what is split on one dim is gathered along another, or returned as whole; an
        all-to-all or a gather sends copies of what every device has (tokens that in_specs do not
        split over the experts' axis). A value in which each device has rewritten its own block only
        is taken as whole; what an all-to-all brought from other devices is multiplied with what
        stayed, before it was sent back.

        Name in out_specs the dim that the value is split on, gather along that dim, and split in
        in_specs what devices shall share out among themselves.
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
        An operation that needs a dim whole, such as a cumulative sum, a sort, an argmax, a top-k or
        a lookup, ran on each shard of a split dim alone, and what it returned is taken as the
        result for the whole dim.

        Gather the operand first, or combine what the shards returned: for an argmax the best values
        and their indices, for a cumulative sum the totals of the shards before. A group that is
        meant to be local belongs on a dim of its own.
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
        A result depends on values without a type: blocks on their way round a ring, edges that
        neighbours sent, what a pipeline passes on, numbers that depend on the index of a device. So
        sbp traced the program again with one device on that mesh axis, ran both programs on the
        same values, and the result differs. The usual causes are a ring that is one step short, a
        block of the wrong owner, a mask or an offset that counts from zero on every device, a sum
        that is not rescaled, a halo of the wrong neighbour. A pipeline is compared with its stages,
        one after the other.

        Nothing is wrong where a device is meant to compute what one device does not. The lines that
        are marked are where types end. Take the number of devices from lax.axis_size: a number that
        is written down is tried in both readings, as the number of devices and as another one.
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
        Something that sbp.check_shard_map cannot say. A warning stands where the analysis ends: an
        operation without a signature, a collective in groups of an axis. A note stands where a
        claim is taken on trust: a value that went round a ring is whole, as out_specs say, but no
        rule shows it; shards of a split value are added to one another. A note stands, too, where a
        local operation takes a split dim as it lies on one device (a slice, a roll, local
        positions, a mask, the same random numbers on every shard, a reshape that mixes shards), and
        where the literal that a sum over devices is divided by may count one thing as well as
        another.

        Nothing need be wrong with the program for that. What depends on such a value is not
        checked: look at these lines yourself.
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
