"""The loss on held-out text, planned on the training mesh, against one device."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import sbp
from examples.gshard.corpus import Pair, generate
from examples.gshard.options import parse_args
from examples.gshard.presets import preset
from examples.gshard.tokenizer import Tokenizer
from examples.gshard.train import plan_loss, sample
from sbp.moe.config import PAD
from sbp.moe.model import init_params, loss_fn
from sbp.moe.sharding import sharding_of

RUN = parse_args(["--preset", "tiny-test", "--set", "source_length=24", "--set", "dropout=0.3"])


@pytest.fixture(scope="module")
def batches():
    corpus = generate(dataclasses.replace(preset("tiny-test").train, heldout_per_language=2))
    words = [[getattr(pair, side) for pair in corpus.train] for side in ("source", "target")]
    source, target = (Tokenizer.train(texts, 300) for texts in words)
    found = sample(corpus.heldout_pairs, source, target, RUN.model, seed=0)
    again = sample(corpus.heldout_pairs, source, target, RUN.model, seed=0)
    jax.tree.map(np.testing.assert_array_equal, found, again)
    return found


def test_loss_per_token_of_all_batches_equals_one_device(batches):
    assert len(batches) == 1
    # A second batch of other size: its tokens count as much as those of the first.
    fewer = jax.tree.map(
        lambda ids: np.where(np.arange(8)[:, None, None] < 2, ids, PAD), batches[0]
    )
    both = [batches[0], fewer]
    mesh = sbp.make_mesh([2, 4], ["data", "expert"])
    params = init_params(jax.random.key(0), RUN.model)
    shardings = jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), params)
    loss = plan_loss(RUN.model, sharding_of(RUN.mesh), jax.eval_shape(lambda: params), shardings)
    got = loss(jax.device_put(params, shardings), both)
    alone = [loss_fn(params, batch, RUN.model)[1].nll for batch in both]
    tokens = [np.sum(batch.target_out != PAD) for batch in both]
    assert tokens[0] > tokens[1] > 0
    np.testing.assert_allclose(got, np.average(alone, weights=tokens), rtol=1e-5)


def test_without_a_pair_that_fits_there_is_no_sample(batches):
    long = [Pair(source="wort " * 200, target="word", language="de")]
    words = Tokenizer.train(["wort word"] * 20, 20)
    assert sample(long, words, words, RUN.model, seed=0) == []
