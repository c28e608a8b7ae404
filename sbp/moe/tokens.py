"""Token ids that mean the same in every vocabulary."""

PAD, BOS, EOS, UNK = 0, 1, 2, 3
