"""Where the elements of the logical tensors live: integers and names, no tensors.

A *logical tensor* is a parameter of the unsharded HuggingFace model: its name and its full,
unpadded shape. A *range* is half-open, ``(start, stop)``; a *box* is one range per dimension. A
rank holds the boxes that :class:`TensorLayout` lists for it, joined along one dimension, and
nothing else says where a tensor is: no shape of a shard is ever interpreted.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import accumulate

from parallel_ext import _C
from parallel_ext.ops.group import Range

Box = tuple[Range, ...]


def split(n: int, parts: int, multiple_of: int = 1) -> tuple[Range, ...]:
    """Split ``[0, n)`` into ``parts`` contiguous ranges, in order and balanced.

    The ranges are balanced over ``ceil(n / multiple_of)`` units, of which only the last may be
    short; the first ranges hold one unit more, and one is empty only when there are fewer units
    than parts.

    Args:
        n: what is split, for example vocabulary rows; at least 0.
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
    """Return the number of elements of a box along each dimension."""
    return tuple(stop - start for start, stop in box)


@dataclass(frozen=True)
class TensorLayout:
    """The layout of one logical tensor: where its elements live on the ranks of a job.

    The ranks that share a copy of a tensor are consecutive (tp and ep are the innermost sides of
    their grids), so what rank r of the job holds is what rank ``r % copy_size`` holds.

    Attributes:
        name: the HuggingFace name, for example ``model.embed_tokens.weight``.
        shape: the logical shape, never padded.
        dim: the dimension along which a rank's boxes are joined; None when every rank holds all.
        held: for each of ``copy_size`` ranks its boxes, in the order in which they lie in its
            shard; empty when ``dim`` is None. Boxes of several ranks may coincide (replicated
            key-value heads), but never overlap in part.
        blocks: ranges along ``dim`` whose borders no layout changes, where ``px.Invariant`` asks
            for them (``sharding/blocks.py``); a rank holds whole ones.
        parts: relative sizes of the parts that a shard joins along ``dim``, as query, key and
            value, or the columns of all experts for each row of an adapter. A block is its range of
            the first part, and the same share of each other one.
        rows_of: where ranks share out the rows of a shard, the layout of the shard; else None.
        sharers: how many ranks share out the rows of one shard.
    """

    name: str
    shape: tuple[int, ...]
    dim: int | None = None
    held: tuple[tuple[Box, ...], ...] = ()
    blocks: tuple[Range, ...] = ()
    parts: tuple[int, ...] = (1,)
    rows_of: TensorLayout | None = None
    sharers: int = 1

    @property
    def copy_size(self) -> int:
        """Return the number of consecutive ranks that hold one copy of the tensor."""
        return max(1, len(self.held))

    @property
    def whole(self) -> Box:
        """Return the box of the whole tensor."""
        return tuple((0, size) for size in self.shape)

    def boxes(self, rank: int) -> tuple[Box, ...]:
        """Return the boxes that ``rank`` holds, in the order in which they lie in its shard."""
        return (self.whole,) if self.dim is None else self.held[rank % self.copy_size]

    def ranges(self, rank: int) -> tuple[Range, ...]:
        """Return the ranges of ``rank``'s boxes along ``dim``; none where ``dim`` is None."""
        return () if self.dim is None else tuple(box[self.dim] for box in self.boxes(rank))

    @property
    def first_ranges(self) -> tuple[Range, ...]:
        """Return the first range along ``dim``, of most tensors the only one, of each rank."""
        return tuple(self.ranges(rank)[0] for rank in range(self.copy_size))

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of ``rank``'s shard: its boxes joined along ``dim``."""
        if self.dim is None:
            return self.shape
        boxes = self.boxes(rank)
        shape = list(box_shape(boxes[0]) if boxes else self.shape)
        shape[self.dim] = sum(stop - start for start, stop in self.ranges(rank))
        return tuple(shape)

    @cached_property
    def nonempty_boxes(self) -> tuple[tuple[int, Box], ...]:
        """Return (rank, box) of every box with elements, for the ranks below ``copy_size``."""
        return tuple(
            (rank, box)
            for rank in range(self.copy_size)
            for box in self.boxes(rank)
            if all(start < stop for start, stop in box)
        )

    @cached_property
    def primary_ranks(self) -> dict[Box, int]:
        """Map each box to the lowest rank that holds it, which alone counts and sends it."""
        primary: dict[Box, int] = {}
        for rank in range(self.copy_size):
            for box in self.boxes(rank):
                primary.setdefault(box, rank)
        return primary

    def primary_boxes(self, rank: int) -> tuple[Box, ...]:
        """Return the boxes that ``rank`` sends: those that no lower rank holds."""
        if rank >= self.copy_size:
            return ()
        if self.dim is None:
            return (self.whole,)
        return tuple(box for box in self.boxes(rank) if self.primary_ranks[box] == rank)

    def replicas(self, rank: int) -> tuple[int, ...]:
        """Return the ranks below ``copy_size`` whose shard equals that of ``rank``."""
        own = self.boxes(rank)
        return tuple(other for other in range(self.copy_size) if self.boxes(other) == own)

    @property
    def is_replicated(self) -> bool:
        """Return whether every rank holds all of the tensor."""
        return all(self.boxes(rank) == (self.whole,) for rank in range(self.copy_size))

    @property
    def numel(self) -> int:
        """Return the number of elements of the logical tensor."""
        return math.prod(self.shape)

    def describe(self, rank: int) -> str:
        """Describe ``rank``'s shard: ``dimension 0 [32768, 65535) of (65535, 1024)``."""
        if self.dim is None:
            return f"all of {self.shape}"
        pieces = ", ".join(f"[{start}, {stop})" for start, stop in self.ranges(rank))
        return f"dimension {self.dim} {pieces or 'nothing'} of {self.shape}"

    def shard_rows_further(self, groups: Sequence[Sequence[int]]) -> TensorLayout:
        """Return the layout in which the ranks that hold a shard replicated share out its rows.

        They do so as ``torch.chunk``, and FSDP by it: rows are indices of the shard's dimension 0,
        and the last ranks may get fewer or none.

        Args:
            groups: ranks of the job that share out one shard, in order; every rank once.
        """
        nameless = replace(self, name="")  # so that equal layouts of layers are computed once
        held = _shard_further(nameless, tuple(map(tuple, groups)))
        return TensorLayout(
            self.name, self.shape, self.dim or 0, held, rows_of=nameless, sharers=len(groups[0])
        )

    def _rows_of(self, rank: int, start: int, stop: int) -> tuple[Box, ...]:
        """Return the boxes of the rows ``[start, stop)`` of ``rank``'s shard."""
        boxes, before = [], 0
        for box in self.boxes(rank):
            first, last = box[0]
            inner = tuple(min(max(first + row - before, first), last) for row in (start, stop))
            if self.dim:  # beside each other: all of them have these rows
                boxes.append((inner, *box[1:]))
                continue
            if inner[0] < inner[1]:
                boxes.append((inner, *box[1:]))
            before += last - first
        return tuple(boxes)


@lru_cache(maxsize=64)
def _shard_further(
    layout: TensorLayout, groups: tuple[tuple[int, ...], ...]
) -> tuple[tuple[Box, ...], ...]:
    """Return the boxes that each rank holds after :meth:`TensorLayout.shard_rows_further`."""
    held: dict[int, tuple[Box, ...]] = {}
    for ranks in groups:
        rows = layout.local_shape(ranks[0])[0]
        at_once = -(-rows // len(ranks))
        for number, rank in enumerate(ranks):
            start, stop = (min(n * at_once, rows) for n in (number, number + 1))
            held[rank] = layout._rows_of(rank, start, stop)
    return tuple(held[rank] for rank in sorted(held))


def shard_ranges(
    name: str, shape: tuple[int, ...], dim: int, ranges: Iterable[Iterable[Range]]
) -> TensorLayout:
    """Return the layout of a tensor of which each rank holds some ranges along ``dim``."""
    whole = tuple((0, size) for size in shape)
    held = tuple(
        tuple((*whole[:dim], piece, *whole[dim + 1 :]) for piece in pieces) for pieces in ranges
    )
    return TensorLayout(name, shape, dim, held)


def shard_along(
    name: str, shape: tuple[int, ...], dim: int, ranges: tuple[Range, ...]
) -> TensorLayout:
    """Return the layout of a tensor of which each rank holds one range along ``dim``."""
    return shard_ranges(name, shape, dim, ((piece,) for piece in ranges))


def shard_like(other: TensorLayout, name: str, shape: tuple[int, ...]) -> TensorLayout:
    """Return the layout of a tensor sharded as ``other``: along its ``dim``, in its blocks."""
    if other.dim is None:
        return TensorLayout(name, shape)
    ranges = (other.ranges(rank) for rank in range(other.copy_size))
    layout = shard_ranges(name, shape, other.dim, ranges)
    return replace(layout, blocks=other.blocks, parts=other.parts)


def scaled(ranges: Iterable[Range], factor: int) -> tuple[Range, ...]:
    """Return ranges of units as ranges of what each unit has so many of, as heads have features."""
    return tuple((start * factor, stop * factor) for start, stop in ranges)


def shard_parts(
    name: str, shape: tuple[int, ...], dim: int, parts: Sequence[Sequence[Range]]
) -> TensorLayout:
    """Return the layout of a tensor joined of several along ``dim``, each with ranges of its own.

    Args:
        parts: of each joined tensor the range of every rank; the last one ends where it does.

    Example:
        >>> shard_parts("query and key", (10, 5), 0, [((0, 4), (4, 8)), ((0, 2), (0, 2))]).ranges(1)
        ((4, 8), (8, 10))
    """
    starts = accumulate((ranges[-1][1] for ranges in parts), initial=0)
    moved = [
        [(start + a, start + b) for a, b in ranges]
        for start, ranges in zip(starts, parts, strict=False)
    ]
    return shard_ranges(name, shape, dim, zip(*moved, strict=True))


def shard_joined(
    name: str,
    shape: tuple[int, ...],
    dim: int,
    sizes: Sequence[int],
    tp: int,
    multiple_of: int = 1,
) -> TensorLayout:
    """Return the layout of a tensor joined of several along ``dim``, each split over all ranks.

    Args:
        sizes: of the joined tensors along ``dim``; they may differ, as with fewer key-value
            heads.
        multiple_of: boundaries inside a joined tensor are multiples of this, for example of the
            head size.

    Raises:
        ValueError: the sizes do not add up to that of the tensor.

    Example:
        >>> shard_joined("qkv", (12, 5), 0, (8, 2, 2), 2).ranges(1)
        ((4, 8), (9, 10), (11, 12))
    """
    if sum(sizes) != shape[dim]:
        raise ValueError(
            f"{name}: sizes {tuple(sizes)} add up to {sum(sizes)}, but dimension {dim} of "
            f"{shape} is {shape[dim]}"
        )
    return shard_parts(name, shape, dim, [split(size, tp, multiple_of) for size in sizes])


@dataclass(frozen=True)
class Part:
    """A tensor of a file that is one index of a logical tensor, or some rows of one.

    Attributes:
        name: in the file, for example ``model.layers.0.block_sparse_moe.experts.3.w1.weight``.
        source: the logical tensor, for example ``model.layers.0.mlp.experts.gate_up_proj``.
        box: where it lies there.
        index: whether the first range of ``box`` is one index, of a dimension that the part lacks.
    """

    name: str
    source: str
    box: Box
    index: bool

    def overlap(self, box: Box) -> Box | None:
        """Return what the part has of a box, in the logical tensor's indices; None if nothing."""
        both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(self.box, box, strict=True))
        return None if any(start >= stop for start, stop in both) else both

    def inside(self, box: Box) -> Box:
        """Convert a box inside the part from the logical tensor's indices to the part's own."""
        moved = tuple((a - c, b - c) for (a, b), (c, _) in zip(box, self.box, strict=True))
        return moved[1:] if self.index else moved

    def layout(self, source: TensorLayout) -> TensorLayout:
        """Return the layout of the part on the ranks, given that of the logical tensor."""
        shape = box_shape(self.box)[self.index :]
        if source.dim is None:
            return TensorLayout(self.name, shape)
        if shape == source.shape:
            return replace(source, name=self.name)
        held: list[tuple[Box, ...]] = [()] * source.copy_size
        for rank, box in source.nonempty_boxes:
            if (overlap := self.overlap(box)) is not None:
                held[rank] += (self.inside(overlap),)
        return TensorLayout(self.name, shape, max(0, source.dim - self.index), tuple(held))


@dataclass(frozen=True)
class ModelLayout(Mapping[str, TensorLayout]):
    """The layouts of all tensors of a model by HuggingFace name, tied aliases left out.

    Attributes:
        tensors: the layout of every logical tensor.
        tied: name of an alias -> name of the tensor that it shares, for example
            ``lm_head.weight`` -> ``model.embed_tokens.weight``.
        parts: name of a tensor -> the tensors of a file that make it up; absent where the file
            holds it as it is.
        buffers: those of the names that are no parameters. Files hold them, but the model makes
            them itself where a file does not.
    """

    tensors: Mapping[str, TensorLayout]
    tied: Mapping[str, str]
    parts: Mapping[str, tuple[Part, ...]] = field(default_factory=dict)
    buffers: frozenset[str] = frozenset()

    def parts_of(self, name: str) -> tuple[Part, ...]:
        """Return the tensors of a file that make up ``name``; itself where there is no other."""
        whole = Part(name, name, self[name].whole, index=False)
        return self.parts.get(name, (whole,))

    def in_files(self) -> ModelLayout:
        """Return the layout of the same model by the tensors of its files."""
        parts = [part for name in self for part in self.parts_of(name)]
        tensors = {part.name: part.layout(self[part.source]) for part in parts}
        buffers = frozenset(part.name for part in parts if part.source in self.buffers)
        return replace(self, tensors=tensors, parts={}, buffers=buffers)

    def with_names_in_files(self, names: Mapping[str, str]) -> ModelLayout:
        """Return the layout of the same model whose files have other names for some tensors."""
        parts = {
            name: tuple(replace(each, name=names.get(each.name, each.name)) for each in of)
            for name, of in ((name, self.parts_of(name)) for name in self)
        }
        return replace(self, parts=parts)

    def for_files(self, names: Collection[str]) -> ModelLayout:
        """Return the layout for files that hold tensors of these ``names``, some perhaps whole."""
        parts = {name: parts for name, parts in self.parts.items() if name not in names}
        return replace(self, parts=parts)

    @property
    def copy_size(self) -> int:
        """Return the number of consecutive ranks that hold one copy of every tensor."""
        return max(layout.copy_size for layout in self.tensors.values())

    def __getitem__(self, name: str) -> TensorLayout:
        return self.tensors[self.tied.get(name, name)]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


@dataclass(frozen=True)
class AttentionHeads:
    """The heads of an attention block on the ranks: ranges of heads for each tp rank.

    Attributes:
        query: contiguous ranges that cover all query heads.
        key_value: the key-value heads that those query heads read; ranks whose query heads read
            the same one hold equal ranges.
    """

    query: tuple[Range, ...]
    key_value: tuple[Range, ...]


def split_heads(num_heads: int, num_key_value_heads: int, tp_size: int) -> AttentionHeads:
    """Split attention heads so that every rank holds the key-value heads of its query heads.

    Up to one rank per key-value head, whole groups stay together (9 query and 3 key-value heads on
    2 ranks: 6 and 3). Beyond that the ranks are spread over the key-value heads, which are
    replicated on them, and each group's query heads are split over its ranks.

    Args:
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
        return AttentionHeads(scaled(key_value, group), key_value)
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
