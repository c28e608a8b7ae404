"""Translation of texts on a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import sbp
from examples.gshard.tokenizer import Tokenizer, pad_rows
from sbp.moe.config import PAD, ModelConfig
from sbp.moe.decode import BeamSearch
from sbp.moe.hosts import whole

Tree = Any


def plan_search(search: BeamSearch, mesh: Any, shapes: Tree, types: Tree) -> sbp.Plan:
    """Type and price the translation of a batch, from shapes alone.

    Arguments:
      search: what is done with a batch.
      mesh: a mesh with axes of `sharding.AXES`.
      shapes: of the parameters.
      types: of the parameters: an entry of `in_types`.

    Raises:
      SbpError: where the search has no typing on the mesh.
    """
    cfg = search.cfg
    batch = (cfg.groups, cfg.sequences_per_group, cfg.source_length)
    planned = sbp.jit(search, mesh, in_types=(types, None))
    return planned.plan(shapes, jax.ShapeDtypeStruct(batch, jnp.int32))


@dataclass(frozen=True, slots=True, kw_only=True)
class Translator:
    """A trained model, ready to translate.

    Attributes:
      plan: from `plan_search`.
      params: parameters, where the plan has them.
      source, target: the vocabularies.
      cfg: the model.
    """

    plan: sbp.Plan
    params: Tree
    source: Tokenizer
    target: Tokenizer
    cfg: ModelConfig

    def __call__(self, texts: Sequence[str]) -> list[str | None]:
        """The best translation of each text; None for a text of more than `cfg.source_length`
        pieces. Shorter and longer texts are not in one batch, where that can be."""
        cfg, ids = self.cfg, self.source.encode(texts)
        fits = [i for i, row in enumerate(ids) if len(row) <= cfg.source_length]
        # A batch ends when its longest translation does.
        fits.sort(key=lambda i: len(ids[i]))
        found: list[str | None] = [None] * len(texts)
        lead = (cfg.groups, cfg.sequences_per_group, cfg.source_length)
        for start in range(0, len(fits), cfg.sequences):
            rows = fits[start : start + cfg.sequences]
            batch = pad_rows([ids[i] for i in rows], cfg.source_length)
            batch = np.pad(batch, ((0, cfg.sequences - len(rows)), (0, 0)), constant_values=PAD)
            said = whole(self.plan(self.params, jnp.asarray(batch.reshape(lead))).tokens)
            best = said[:, :, 0].reshape(cfg.sequences, -1)
            for i, text in zip(rows, self.target.decode(best[: len(rows)]), strict=True):
                found[i] = text
        return found
