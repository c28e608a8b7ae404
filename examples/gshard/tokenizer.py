"""SentencePiece vocabularies, trained on the corpus of the run."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import sentencepiece as spm

from sbp.errors import SbpError
from sbp.moe.config import BOS, EOS, PAD, UNK


class Tokenizer:
    """One vocabulary: text to rows of ids and back.

    Attributes:
      model: the SentencePiece model, as a file has it.
    """

    def __init__(self, model: bytes) -> None:
        self.model = model
        self._pieces = spm.SentencePieceProcessor(model_proto=model)

    @classmethod
    def train(
        cls,
        texts: Iterable[str],
        vocab_size: int,
        *,
        byte_fallback: bool = False,
        coverage: float = 1.0,
        normalization: str = "nmt_nfkc",
        threads: int = 1,
    ) -> Tokenizer:
        """Train a unigram vocabulary; the same texts give the same model.

        Digits are pieces of their own, so that any number can be spelled.

        Arguments:
          texts: the training text.
          vocab_size: the most pieces.
          byte_fallback: characters without a piece are spelled by their UTF-8 bytes, which are 256
            pieces; else they are lost.
          coverage: share of the text's characters that have pieces, 0.98 to 1.
          normalization: SentencePiece's rule for characters: "nmt_nfkc" writes variants of a
            character as one, "identity" keeps the text.
          threads: of the training.

        Raises:
          SbpError: `bad-corpus` where the text has too few pieces, or the vocabulary too little
            room.
        """
        out = io.BytesIO()
        try:
            spm.SentencePieceTrainer.train(
                sentence_iterator=iter(texts),
                model_writer=out,
                vocab_size=vocab_size,
                max_sentence_length=2**30,  # it leaves out longer texts without a word
                hard_vocab_limit=False,
                model_type="unigram",
                character_coverage=coverage,
                byte_fallback=byte_fallback,
                split_digits=True,
                normalization_rule_name=normalization,
                pad_id=PAD,
                bos_id=BOS,
                eos_id=EOS,
                unk_id=UNK,
                num_threads=threads,
                minloglevel=2,
            )
        except RuntimeError as error:
            raise SbpError(
                f"no vocabulary of {vocab_size} pieces can be trained on this text ({error}); give"
                " more text or another vocabulary size",
                code="bad-corpus",
            ) from None
        return cls(out.getvalue())

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Read the file of a `model`.

        Raises:
          SbpError: `bad-checkpoint` for a file that is damaged or cannot be read.
        """
        try:
            found = cls(path.read_bytes())
            found.encode([""])  # of an empty file the library says only now that it is no model
            return found
        except OSError as error:
            raise SbpError(
                f"cannot read {path}: {error.strerror}; choose another --workdir",
                code="bad-checkpoint",
            ) from None
        except RuntimeError:
            raise SbpError(
                f"{path} is damaged; delete it, and the same vocabulary is trained anew",
                code="bad-checkpoint",
            ) from None

    @property
    def digest(self) -> str:
        """Tells this vocabulary from others."""
        return hashlib.blake2b(self.model, digest_size=8).hexdigest()

    def __len__(self) -> int:
        return self._pieces.vocab_size()

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, EOS last."""
        return [[*ids, EOS] for ids in self._pieces.encode(list(texts))]

    def decode(self, rows: Iterable[Sequence[int]]) -> list[str]:
        """Text of each row of ids, up to its first EOS."""
        cut = []
        for row in rows:
            ids = [int(i) for i in row]
            ids = ids[: ids.index(EOS)] if EOS in ids else ids
            cut.append([i for i in ids if i not in (PAD, BOS) and i < len(self)])
        return self._pieces.decode(cut)

    def changed(self, texts: Sequence[str]) -> int:
        """How many of the texts the vocabulary cannot spell as they are."""
        return sum(a != b for a, b in zip(texts, self.decode(self.encode(texts)), strict=True))


def pad_rows(rows: Sequence[Sequence[int]], length: int) -> np.ndarray:
    """Rows of ids as int32 [N, length], padded with PAD; every row must fit."""
    out = np.full((len(rows), length), PAD, np.int32)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return out
