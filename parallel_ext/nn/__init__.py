"""Modules whose parameters are sharded, and the sums of their gradients; torch alone.

``VocabParallelEmbedding.from_plain(plain, group)`` and the like shard a plain module over the ranks
of a process group, in a model of your own; ``from_sizes`` builds shards without a plain module.
"""

from parallel_ext.nn.linear import ColumnParallelLinear, RowParallelLinear
from parallel_ext.nn.lora import LoraLinear
from parallel_ext.nn.moe import ExpertParallelExperts
from parallel_ext.nn.recomputation import Recomputable
from parallel_ext.nn.vocab import VocabParallelEmbedding, VocabParallelHead

__all__ = [
    "ColumnParallelLinear",
    "ExpertParallelExperts",
    "LoraLinear",
    "Recomputable",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "VocabParallelHead",
]
