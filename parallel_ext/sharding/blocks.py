"""Blocks of sharded dimensions: ranges whose borders no layout changes, for ``px.Invariant``.

A rank holds whole blocks, so that a sum of one product a block can have the same bits on any number
of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from parallel_ext.ops.blocks import Blocks
from parallel_ext.ops.group import Range
from parallel_ext.sharding.layout import AttentionHeads, TensorLayout, scaled, shard_parts, split


def split_in_blocks(n: int, blocks: int, multiple_of: int = 1) -> tuple[Range, ...]:
    """Split ``[0, n)`` into at most ``blocks`` blocks, none of them empty.

    Args:
        n: what is split, at least 1.
        blocks: how many blocks there are where ``n`` has that many units.
        multiple_of: size of a unit; borders between blocks are multiples of it.

    Example:
        >>> split_in_blocks(5, 2), split_in_blocks(3, 8)
        (((0, 3), (3, 5)), ((0, 1), (1, 2), (2, 3)))
    """
    return split(n, min(blocks, -(-n // multiple_of)), multiple_of)


def share_blocks(blocks: Sequence[Range], tp_size: int, what: str) -> tuple[Range, ...]:
    """Return the range of each tp rank, which holds whole blocks.

    Args:
        blocks: in order; consecutive ones may be equal.

    Raises:
        ValueError: there are more ranks than blocks.
    """
    if tp_size > len(blocks):
        raise ValueError(
            f"tp={tp_size} is more than the {len(blocks)} blocks of {what}; px.Invariant(blocks=) "
            "must be at least tp, and a model has no more blocks of attention than its heads allow"
        )
    return tuple(
        (blocks[first][0], blocks[last - 1][1]) for first, last in split(len(blocks), tp_size)
    )


@dataclass(frozen=True)
class AttentionBlocks:
    """The blocks of an attention: ranges of heads.

    Attributes:
        query: one range a block, covering all query heads in order.
        key_value: of each block the key-value heads that its query heads read; equal for
            ``copies`` consecutive blocks.
        copies: blocks that read the same key-value head.
    """

    query: tuple[Range, ...]
    key_value: tuple[Range, ...]
    copies: int

    @classmethod
    def of(cls, num_heads: int, num_key_value_heads: int, blocks: int) -> AttentionBlocks:
        """Split heads into at most ``blocks`` blocks of whole groups, or of equal parts of groups.

        A group is the query heads of one key-value head. It is halved while there are fewer blocks
        than asked for and it has an even number of query heads.

        Example:
            >>> AttentionBlocks.of(8, 2, 8).key_value
            ((0, 1), (0, 1), (0, 1), (0, 1), (1, 2), (1, 2), (1, 2), (1, 2))
        """
        group, copies = num_heads // num_key_value_heads, 1
        while num_key_value_heads * copies < blocks and group % (2 * copies) == 0:
            copies *= 2
        if copies == 1:
            whole = split_in_blocks(num_key_value_heads, blocks)
            return cls(scaled(whole, group), whole, 1)
        part = group // copies
        count = num_key_value_heads * copies
        return cls(
            scaled(((i, i + 1) for i in range(count)), part),
            tuple((i // copies, i // copies + 1) for i in range(count)),
            copies,
        )

    @property
    def repeats(self) -> int:
        """Return how many query heads of a block read one of its key-value heads."""
        (q0, q1), (k0, k1) = self.query[0], self.key_value[0]
        return (q1 - q0) // (k1 - k0)

    def heads(self, tp_size: int) -> AttentionHeads:
        """Return the heads of each tp rank."""
        what = "the attention"
        return AttentionHeads(
            share_blocks(self.query, tp_size, what), share_blocks(self.key_value, tp_size, what)
        )


def shard_in_blocks(
    name: str,
    shape: tuple[int, ...],
    dim: int,
    blocks: Sequence[Range],
    tp_size: int,
    parts: tuple[int, ...] = (1,),
) -> TensorLayout:
    """Return the layout of a tensor of which each rank holds whole blocks along ``dim``.

    Args:
        blocks: of the first of its parts, in order; consecutive ones may be equal.
        parts: as of :class:`TensorLayout`.

    Example:
        >>> shard_in_blocks("qkv", (8, 5), 0, ((0, 2), (2, 4)), 2, (2, 1, 1)).ranges(1)
        ((2, 4), (5, 6), (7, 8))
    """
    held = share_blocks(blocks, tp_size, name)
    of_parts = [[(a * size // parts[0], b * size // parts[0]) for a, b in held] for size in parts]
    layout = shard_parts(name, shape, dim, of_parts)
    return replace(layout, blocks=tuple(blocks), parts=parts)


def own_blocks(layout: TensorLayout, rank: int) -> Blocks:
    """Return the blocks in the shard of a rank of the job, or in the first part that it joins.

    ``layout`` has blocks; those of equal rows are each for itself.
    """
    first, last = split(len(layout.blocks), layout.copy_size)[rank % layout.copy_size]
    own = layout.blocks[first:last]
    start = own[0][0]
    return Blocks(tuple((a - start, b - start) for a, b in own), len(layout.blocks))


def counted_blocks(layout: TensorLayout, rank: int) -> tuple[Range, ...]:
    """Return the ranges, as :func:`own_blocks`, of the blocks that no lower rank of the job holds.

    Over all ranks these are each block of the tensor once. One without blocks is one block.
    """
    if rank >= layout.copy_size:
        return ()
    if not layout.blocks:
        return ((0, layout.shape[0]),) if rank == 0 else ()
    shares = split(len(layout.blocks), layout.copy_size)
    first, last = shares[rank]
    start = layout.blocks[first][0]
    new = dict.fromkeys(layout.blocks[first:last])  # equal ones once, in order
    if first > 0:
        new.pop(layout.blocks[first - 1], None)
    return tuple((a - start, b - start) for a, b in new)
