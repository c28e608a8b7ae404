"""Parameter counts of the paper's models, from shapes alone."""

import dataclasses
import math

import jax
import pytest

from examples.gshard.presets import ALIASES, PRESETS, preset
from sbp.moe.model import init_params

# T4: layers, experts, heads, width of a head, and the weights that the paper says (GShard, tables 1
# and 3; its "B" is 2**30).
PAPER = {
    "gshard-12l-128e": (12, 128, 16, 128, 12.5 * 2**30),
    "gshard-36l-128e": (36, 128, 16, 128, 37 * 2**30),
    "gshard-12l-512e": (12, 512, 16, 128, 50 * 2**30),
    "gshard-36l-512e": (36, 512, 16, 128, 150 * 2**30),
    "gshard-12l-2048e": (12, 2048, 16, 128, 200 * 2**30),
    "gshard-36l-2048e": (36, 2048, 16, 128, 600 * 2**30),
    "gshard-60l-2048e": (60, 2048, 16, 128, 1e12),
    "gshard-96l-dense": (96, 0, 16, 64, 2.3e9),
}


def counted(layers, experts, heads, width):
    """Weights of a model of width 1024, with hidden layers of 8192 and vocabularies of 64,000 and
    32,000."""
    wide = 2 * 1024 * 8192
    attention = 4 * 1024 * heads * width
    moe, dense = (layers // 2, layers // 2) if experts else (0, layers)
    return (
        (layers + layers // 2) * attention  # a decoder's layers have two
        + dense * wide
        + moe * experts * (wide + 1024)  # and a column of the router
        + (64_000 + 2 * 32_000) * 1024
        + (layers // 2 * (2 + 3) + 2) * 1024  # norms, of an encoder's layers and a decoder's
    )


@pytest.mark.parametrize("name", PAPER)
def test_models_have_as_many_weights_as_the_papers(name):
    *shape, said = PAPER[name]
    params = jax.eval_shape(lambda: init_params(jax.random.key(0), PRESETS[name].model))
    held = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
    assert held == counted(*shape)
    assert held == pytest.approx(said, rel=0.04)


def test_every_model_of_the_paper_is_listed():
    assert set(PAPER) == {name for name in PRESETS if name.startswith("gshard-")}


def test_the_papers_names_stand_for_its_models():
    """By weights, as in "gshard-600b", and by shape, as in "MoE(2048E, 36L)"."""
    weights = {"b": 1e9, "t": 1e12}
    for alias, name in ALIASES.items():
        assert preset(alias) is preset(alias.lower()) is PRESETS[name]
        if alias.startswith("gshard-"):
            said = float(alias[len("gshard-") : -1]) * weights[alias[-1]]
            assert PAPER[name][-1] == pytest.approx(said, rel=0.08)  # 2**30, or 10**9
        else:
            layers, experts = PAPER[name][:2]
            assert alias == (f"MoE({experts}E, {layers}L)" if experts else f"T({layers}L)")


def weights_of(model):
    """Of the parameters by name of their top entry."""
    params = jax.eval_shape(lambda: init_params(jax.random.key(0), model))
    return {
        name: sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))
        for name, tree in params.items()
    }


def test_mixtral_has_the_weights_that_its_authors_publish():
    """46.7B in all and 12.9B for a token, embedding and logits included (Jiang et al., 2024): the
    attention, six of eight experts less, and the rest."""
    model = PRESETS["mixtral-8x7b"].model
    found = sum(weights_of(model).values())
    expert = 32 * 3 * 4096 * 14336
    attention = 32 * 2 * 4096 * 128 * (32 + 8)
    assert found == 8 * expert + attention + 32 * 4096 * (8 + 2) + 4096 + 2 * 32_000 * 4096
    assert f"{found / 1e9:.1f}, {(found - 6 * expert) / 1e9:.1f}" == "46.7, 12.9"


@pytest.mark.parametrize(
    ("experts", "said"),
    [(0, "0.223"), (16, "1.1"), (32, "2.0"), (64, "3.8"), (128, "7.4"), (256, "14.7")],
)
def test_switch_base_has_the_published_weights(experts, said):
    """Fedus et al., 2021, tables 7 and 9, and T5-Base without experts. T5 has one table for
    source, target and logits: two of three do not count."""
    model = dataclasses.replace(PRESETS["switch-base"].model, experts=experts)
    if not experts:
        model = dataclasses.replace(model, expert_dim=model.ffn_dim // 2)
    found = weights_of(model)
    counted = sum(found.values()) - found["source_embedding"] - found["logits"]
    assert f"{counted / 1e9:.{len(said.split('.')[1])}f}" == said


MESH_TENSORFLOW = {
    "lm": {4: "0.14", 8: "0.22", 16: "0.37", 32: "0.67", 64: "1.28", 128: "2.48", 256: "4.90"},
    "mt": {4: "0.15", 8: "0.24", 16: "0.42", 32: "0.77", 64: "1.48", 128: "2.89"},
}
"""Billions of weights by heads, tables 2 and 3 of Shazeer et al., 2018."""


@pytest.mark.parametrize("table", MESH_TENSORFLOW)
def test_mesh_tensorflows_tables(table):
    """Two tables count: of the tokens, shared by both sides, and of the logits."""
    for heads, said in MESH_TENSORFLOW[table].items():
        found = weights_of(PRESETS[f"mesh-tf-{table}-{heads}h"].model)
        counted = sum(found.values()) - found.get("source_embedding", 0)
        assert f"{counted / 1e9:.2f}" == said
