"""Programs as they are written in practice. The modules enter their cases."""

from tests.shardmap.practice import data as data, sequence as sequence, training as training
