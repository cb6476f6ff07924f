"""Typed Python entry points of the C++ ops.

Shapes: T tokens, H hidden, V the true vocabulary size. *Replicated* means equal on all ranks of the
group, *sharded* that each rank holds its range, *partial* that the sum over the ranks is the value.
Every rank of the group must call an op, with shapes that agree, in the same order.
"""

from parallel_ext.ops.blocks import (
    Blocks,
    block_bias,
    block_experts,
    block_linear_cross_entropy,
    block_linears,
    block_row_linear,
    block_scale,
    fixed_gelu,
    fixed_sigmoid,
    fixed_silu,
    repeat_heads,
    sum_leaves,
)
from parallel_ext.ops.group import ALONE, Group
from parallel_ext.ops.linear import (
    Dropout,
    column_linear,
    column_linears,
    lora_linear,
    row_linear,
    seeded_dropout,
)
from parallel_ext.ops.moe import (
    ExchangePlan,
    RoutePlan,
    moe_combine,
    moe_dispatch,
    moe_gated_silu,
    moe_linear,
    moe_lora_linear,
    moe_route_plan,
    moe_router,
    moe_take_tokens,
)
from parallel_ext.ops.region import (
    copy_to_region,
    gather_from_region,
    gather_tokens,
    reduce_from_region,
    sum_tokens,
    take_tokens,
)
from parallel_ext.ops.vocab import vocab_argmax, vocab_embedding, vocab_sample
from parallel_ext.ops.vocab_loss import (
    LossOptions,
    VocabStatistics,
    linear_vocab_cross_entropy,
    linear_vocab_cross_entropy_statistics,
    vocab_cross_entropy,
    vocab_cross_entropy_statistics,
)

__all__ = [
    "ALONE",
    "Blocks",
    "Dropout",
    "ExchangePlan",
    "Group",
    "LossOptions",
    "RoutePlan",
    "VocabStatistics",
    "block_bias",
    "block_experts",
    "block_linear_cross_entropy",
    "block_linears",
    "block_row_linear",
    "block_scale",
    "column_linear",
    "column_linears",
    "copy_to_region",
    "fixed_gelu",
    "fixed_sigmoid",
    "fixed_silu",
    "gather_from_region",
    "gather_tokens",
    "linear_vocab_cross_entropy",
    "linear_vocab_cross_entropy_statistics",
    "lora_linear",
    "moe_combine",
    "moe_dispatch",
    "moe_gated_silu",
    "moe_linear",
    "moe_lora_linear",
    "moe_route_plan",
    "moe_router",
    "moe_take_tokens",
    "reduce_from_region",
    "repeat_heads",
    "row_linear",
    "seeded_dropout",
    "sum_leaves",
    "sum_tokens",
    "take_tokens",
    "vocab_argmax",
    "vocab_cross_entropy",
    "vocab_cross_entropy_statistics",
    "vocab_embedding",
    "vocab_sample",
]
