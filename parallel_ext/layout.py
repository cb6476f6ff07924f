"""Where the elements of the logical tensors live: integers and names, no tensors.

A *logical tensor* is a parameter of the unsharded HuggingFace model: its name and its full,
unpadded shape. A *range* is half-open, ``(start, stop)``; a *box* is one range per dimension. A
rank holds the boxes that :class:`TensorLayout` lists for it, joined along the cut dimension, and
nothing else says where a tensor is: no shape of a shard is ever interpreted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from parallel_ext import _C

Range = tuple[int, int]
Box = tuple[Range, ...]


def split(n: int, parts: int, multiple_of: int = 1) -> tuple[Range, ...]:
    """Cut ``[0, n)`` into ``parts`` contiguous ranges, in order and balanced.

    The ranges are balanced over ``ceil(n / multiple_of)`` units, of which only the last may be
    short; the first ranges hold one unit more, and one is empty only when there are fewer units
    than parts.

    Args:
        n: what is cut, for example vocabulary rows; at least 0.
        parts: number of ranges, at least 1.
        multiple_of: every boundary but the last is a multiple of this, at least 1.

    Returns:
        ``parts`` ranges; the same on every rank, since nothing but the arguments enters.

    Raises:
        ValueError: an argument is out of range.

    Example:
        >>> split(65535, 2)
        ((0, 32768), (32768, 65535))
        >>> split(5, 4)
        ((0, 2), (2, 3), (3, 4), (4, 5))
        >>> split(100, 3, multiple_of=32)
        ((0, 64), (64, 96), (96, 100))
    """
    boundaries = _C.split(n, parts, multiple_of)
    return tuple(zip(boundaries[:-1], boundaries[1:], strict=True))


def box_shape(box: Box) -> tuple[int, ...]:
    """The number of elements of a box along each dimension."""
    return tuple(stop - start for start, stop in box)


@dataclass(frozen=True)
class TensorLayout:
    """Where one logical tensor lives on the ranks of a tensor-parallel group.

    Attributes:
        name: the HuggingFace name, for example ``model.embed_tokens.weight``.
        shape: the logical shape, never padded.
        dim: the dimension that is cut; None when every rank holds all of it.
        held: for each tp rank its ranges along ``dim``, in the order in which they lie in its
            shard; empty when ``dim`` is None. Ranges of several ranks may coincide (replicated
            key-value heads), but never overlap in part.
    """

    name: str
    shape: tuple[int, ...]
    dim: int | None = None
    held: tuple[tuple[Range, ...], ...] = ()

    def boxes(self, tp_rank: int) -> tuple[Box, ...]:
        """The boxes that ``tp_rank`` holds, in the order in which they lie in its shard."""
        whole = tuple((0, size) for size in self.shape)
        if self.dim is None:
            return (whole,)
        return tuple(
            (*whole[: self.dim], piece, *whole[self.dim + 1 :]) for piece in self.held[tp_rank]
        )

    def local_shape(self, tp_rank: int) -> tuple[int, ...]:
        """The shape of ``tp_rank``'s shard: its boxes joined along ``dim``."""
        if self.dim is None:
            return self.shape
        rows = sum(stop - start for start, stop in self.held[tp_rank])
        return (*self.shape[: self.dim], rows, *self.shape[self.dim + 1 :])

    def owner(self, box: Box) -> int:
        """The lowest tp rank that holds ``box``: it alone counts and sends its elements."""
        if self.dim is None:
            return 0
        piece = box[self.dim]
        return next(rank for rank, pieces in enumerate(self.held) if piece in pieces)

    def owned(self, tp_rank: int) -> tuple[Box, ...]:
        """The boxes of ``tp_rank`` that no lower rank holds; over all ranks each element once."""
        return tuple(box for box in self.boxes(tp_rank) if self.owner(box) == tp_rank)

    def holders(self, tp_rank: int) -> tuple[int, ...]:
        """The ranks whose shard equals that of ``tp_rank``, itself included."""
        if self.dim is None:
            raise ValueError(f"{self.name} is not cut; all ranks hold it")
        own = self.held[tp_rank]
        return tuple(rank for rank, pieces in enumerate(self.held) if pieces == own)

    @property
    def numel(self) -> int:
        """The number of elements of the logical tensor."""
        return math.prod(self.shape)

    def describe(self, tp_rank: int) -> str:
        """The shard in words, for messages: ``rows [32768, 65535) of (65535, 1024)``."""
        if self.dim is None:
            return f"all of {self.shape}"
        pieces = ", ".join(f"[{start}, {stop})" for start, stop in self.held[tp_rank])
        return f"dimension {self.dim} {pieces} of {self.shape}"


def cut(name: str, shape: tuple[int, ...], dim: int, ranges: tuple[Range, ...]) -> TensorLayout:
    """The layout of a tensor of which each tp rank holds one range along ``dim``."""
    return TensorLayout(name, shape, dim, tuple((piece,) for piece in ranges))


def cut_blocks(
    name: str,
    shape: tuple[int, ...],
    dim: int,
    blocks: Sequence[int],
    tp: int,
    multiple_of: int = 1,
) -> TensorLayout:
    """The layout of a tensor that joins several along ``dim``: each rank holds a range of each.

    Args:
        name: of the tensor, for example a fused query, key and value.
        shape: of the tensor.
        dim: along which it was joined.
        blocks: sizes of the joined tensors; they may differ, as with fewer key-value heads.
        tp: number of ranks.
        multiple_of: boundaries inside a block are multiples of this, for example of the head size.

    Raises:
        ValueError: the blocks do not add up to the tensor.

    Example:
        >>> cut_blocks("qkv", (12, 5), 0, (8, 2, 2), 2).held
        (((0, 4), (8, 9), (10, 11)), ((4, 8), (9, 10), (11, 12)))
    """
    if sum(blocks) != shape[dim]:
        raise ValueError(
            f"{name}: blocks {tuple(blocks)} add up to {sum(blocks)}, but dimension {dim} of "
            f"{shape} is {shape[dim]}"
        )
    starts = accumulate(blocks, initial=0)
    ranges = [
        tuple((start + a, start + b) for a, b in split(size, tp, multiple_of))
        for start, size in zip(starts, blocks, strict=False)
    ]
    return TensorLayout(name, shape, dim, tuple(zip(*ranges, strict=True)))


@dataclass(frozen=True)
class ModelLayout(Mapping[str, TensorLayout]):
    """The layouts of all parameters of a model by HuggingFace name, tied aliases left out.

    Attributes:
        tensors: the layout of every logical tensor that a file holds.
        tied: name of an alias -> name of the tensor that it shares, for example
            ``lm_head.weight`` -> ``model.embed_tokens.weight``.
        tp_size: number of tensor-parallel ranks.
    """

    tensors: Mapping[str, TensorLayout]
    tied: Mapping[str, str]
    tp_size: int

    def __getitem__(self, name: str) -> TensorLayout:
        return self.tensors[self.tied.get(name, name)]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


@dataclass(frozen=True)
class AttentionHeads:
    """How the heads of an attention block are cut: ranges of heads for each tp rank.

    Attributes:
        query: contiguous ranges that cover all query heads.
        key_value: the key-value heads that those query heads read; ranks whose query heads read
            the same one hold equal ranges.
    """

    query: tuple[Range, ...]
    key_value: tuple[Range, ...]


def split_heads(num_heads: int, num_key_value_heads: int, tp_size: int) -> AttentionHeads:
    """Cut attention heads so that every rank's query heads find their key-value heads locally.

    Up to one rank per key-value head, whole groups stay together (9 query and 3 key-value heads on
    2 ranks: 6 and 3). Beyond that the ranks are dealt to the key-value heads, which are replicated
    on them, and each group's query heads are cut over its ranks.

    Args:
        num_heads: query heads of the model, a multiple of ``num_key_value_heads``.
        num_key_value_heads: key-value heads of the model.
        tp_size: number of ranks; at most ``num_heads``.

    Raises:
        ValueError: a rank would hold no query head, or the heads do not group.
    """
    group, rest = divmod(num_heads, num_key_value_heads)
    if rest:
        raise ValueError(
            f"{num_heads} query heads are not a multiple of {num_key_value_heads} key-value heads"
        )
    if tp_size <= num_key_value_heads:
        key_value = split(num_key_value_heads, tp_size)
        return AttentionHeads(tuple((a * group, b * group) for a, b in key_value), key_value)
    query: list[Range] = []
    key_value_of: list[Range] = []
    for head, (first_rank, last_rank) in enumerate(split(tp_size, num_key_value_heads)):
        ranks = last_rank - first_rank
        if ranks > group:
            raise ValueError(
                f"tp={tp_size} is more than {num_heads} query heads on {num_key_value_heads} "
                f"key-value heads can serve: key-value head {head} would be spread over {ranks} "
                f"ranks, but only {group} query heads read it"
            )
        for start, stop in split(group, ranks):
            query.append((head * group + start, head * group + stop))
            key_value_of.append((head, head + 1))
    return AttentionHeads(tuple(query), tuple(key_value_of))
