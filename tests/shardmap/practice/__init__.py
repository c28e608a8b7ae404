"""Programs as they are written in practice. The modules enter their cases."""

from tests.shardmap.practice import data as data
from tests.shardmap.practice import sequence as sequence
from tests.shardmap.practice import training as training
