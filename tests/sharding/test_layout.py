"""The arithmetic of cuts: nothing is lost, nothing is held twice unless it is meant to be."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel_ext.models.llama import LLAMA
from parallel_ext.models.spec import HeadSizes, ModelSizes, plan
from parallel_ext.ops.group import Range
from parallel_ext.sharding.layout import (
    Box,
    ModelLayout,
    Part,
    TensorLayout,
    box_shape,
    shard_along,
    shard_ranges,
    split,
    split_heads,
)
from parallel_ext.sharding.reshard import part_views
from parallel_ext.sharding.slices import take

sizes_to_cut = st.one_of(st.integers(0, 300), st.sampled_from([32000, 49153, 65535, 65536]))
parts_to_cut = st.integers(1, 70)
multiples = st.integers(1, 130)


def _joins(ranges: tuple[Range, ...], n: int) -> bool:
    """Whether the ranges are contiguous, in order, and cover [0, n) exactly once."""
    starts, stops = zip(*ranges, strict=True)
    return (0, *stops) == (*starts, n) and sorted(stops) == list(stops)


def _units(ranges: tuple[Range, ...], multiple_of: int) -> list[int]:
    return [math.ceil((stop - start) / multiple_of) for start, stop in ranges]


@given(sizes_to_cut, parts_to_cut, multiples)
def test_split_covers_everything_once_in_units_that_the_first_ranks_hold_more_of(
    n, parts, multiple_of
):
    ranges = split(n, parts, multiple_of)
    assert len(ranges) == parts
    assert _joins(ranges, n)
    # Only the last unit may be short.
    assert all(stop % multiple_of == 0 or stop == n for _, stop in ranges)
    units = _units(ranges, multiple_of)
    assert max(units) - min(units) <= 1
    assert units == sorted(units, reverse=True)
    assert units.count(0) == max(0, parts - math.ceil(n / multiple_of))


def test_coverage_notices_swapped_overlapping_and_missing_ranges():
    first, second, third = split(10, 3)
    assert not _joins((second, first, third), 10)
    assert not _joins((first, (second[0] - 1, second[1]), third), 10)
    assert not _joins((first, second), 10)


@pytest.mark.parametrize(
    ("n", "parts", "multiple_of"), [(-1, 2, 1), (5, 0, 1), (5, -3, 1), (5, 2, 0), (5, 2, -8)]
)
def test_split_names_the_arguments_that_it_refuses(n, parts, multiple_of):
    got = f"got n={n}, parts={parts}, multiple_of={multiple_of}"
    with pytest.raises(ValueError, match=got):
        split(n, parts, multiple_of)


heads_on_ranks = st.tuples(st.integers(1, 8), st.integers(1, 8), st.integers(1, 70)).map(
    lambda drawn: (drawn[0] * drawn[1], drawn[0], drawn[2])
)


@given(heads_on_ranks)
def test_split_heads_gives_every_rank_the_key_value_heads_that_its_query_heads_read(numbers):
    num_heads, num_key_value_heads, tp_size = numbers
    if tp_size > num_heads:
        with pytest.raises(ValueError, match=f"tp={tp_size} is more than {num_heads} query heads"):
            split_heads(*numbers)
        return
    heads = split_heads(*numbers)
    assert len(heads.query) == len(heads.key_value) == tp_size
    assert _joins(heads.query, num_heads)
    group = num_heads // num_key_value_heads
    for query, key_value in zip(heads.query, heads.key_value, strict=True):
        assert query[0] < query[1]
        assert {head // group for head in range(*query)} == set(range(*key_value))


def test_split_heads_keeps_groups_together_and_replicates_their_key_value_heads_beyond_that():
    heads = split_heads(9, 3, 2)
    assert heads.query == ((0, 6), (6, 9))
    assert heads.key_value == ((0, 2), (2, 3))
    heads = split_heads(9, 3, 4)
    assert heads.query == ((0, 2), (2, 3), (3, 6), (6, 9))
    assert heads.key_value == ((0, 1), (0, 1), (1, 2), (2, 3))


def test_split_heads_refuses_query_heads_that_no_key_value_head_serves():
    with pytest.raises(ValueError, match="9 query heads"):
        split_heads(9, 2, 1)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[TensorLayout, int]:
    """A layout and its number of ranks: cut, replicated in groups, or fused of two cut halves."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    tp_size = draw(st.integers(1, 5))
    dim = draw(st.integers(0, len(shape) - 1))
    kind = draw(st.sampled_from(["whole", "cut", "replicated", "fused"]))
    size = shape[dim]
    if kind == "whole":
        return TensorLayout("weight", shape), tp_size
    if kind == "cut":
        return shard_along("weight", shape, dim, split(size, tp_size)), tp_size
    if kind == "fused":
        half = split(size, tp_size)
        held = tuple(((a, b), (size + a, size + b)) for a, b in half)
        return shard_ranges("weight", _resized(shape, dim, 2 * size), dim, held), tp_size
    pieces = split(size, draw(st.integers(1, tp_size)))
    held = tuple((pieces[rank * len(pieces) // tp_size],) for rank in range(tp_size))
    return shard_ranges("weight", shape, dim, held), tp_size


def _resized(shape: tuple[int, ...], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])


def _ranges(layout: TensorLayout) -> tuple[tuple[Range, ...], ...]:
    return tuple(layout.ranges(rank) for rank in range(layout.copy_size))


def _index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


def _times_covered(
    layout: TensorLayout, tp_size: int, boxes_of: Callable[[int], tuple[Box, ...]]
) -> torch.Tensor:
    """How often each logical element lies in the ranks' boxes."""
    times = torch.zeros(layout.shape, dtype=torch.int64)
    for rank in range(tp_size):
        for box in boxes_of(rank):
            times[_index(box)] += 1
    return times


@given(layouts())
def test_every_element_is_held_and_has_one_owner(drawn):
    layout, tp_size = drawn
    assert (_times_covered(layout, tp_size, layout.boxes) >= 1).all()
    assert (_times_covered(layout, tp_size, layout.primary_boxes) == 1).all()


@given(layouts())
def test_the_local_shape_is_that_of_the_boxes_joined_along_the_cut(drawn):
    layout, tp_size = drawn
    logical = torch.arange(layout.numel).view(layout.shape)
    for rank in range(tp_size):
        pieces = [logical[_index(box)] for box in layout.boxes(rank)]
        assert [tuple(piece.shape) for piece in pieces] == [*map(box_shape, layout.boxes(rank))]
        assert tuple(torch.cat(pieces, layout.dim or 0).shape) == layout.local_shape(rank)


@given(layouts())
def test_holders_are_the_ranks_with_the_same_shard(drawn):
    layout, tp_size = drawn
    if layout.dim is None:
        assert layout.replicas(tp_size) == (0,)
        return
    for rank in range(tp_size):
        same = [peer for peer in range(tp_size) if layout.boxes(peer) == layout.boxes(rank)]
        assert layout.replicas(rank) == tuple(same)


def test_ownership_notices_replicas_that_are_counted_twice():
    pieces = split(6, 2)
    layout = shard_ranges("k_proj.weight", (6, 2), 0, ((pieces[0],), (pieces[0],), (pieces[1],)))
    assert (_times_covered(layout, 3, layout.primary_boxes) == 1).all()
    assert (_times_covered(layout, 3, layout.boxes) == 2).any()
    assert layout.replicas(1) == (0, 1)
    assert layout.primary_boxes(1) == ()


@given(layouts(), st.integers(1, 4))
def test_dealing_the_rows_again_keeps_every_element_once_and_chunks_like_torch(drawn, dp_size):
    layout, tp_size = drawn
    columns = [[row * tp_size + rank for row in range(dp_size)] for rank in range(tp_size)]
    again = layout.shard_rows_further(columns)
    assert again.copy_size == tp_size * dp_size
    assert (_times_covered(again, again.copy_size, again.primary_boxes) == 1).all()
    logical = torch.arange(layout.numel).view(layout.shape)
    for rank in range(again.copy_size):
        chunks, dp_rank = take(logical, layout, rank).chunk(dp_size), rank // tp_size
        rows = take(logical, again, rank)
        assert tuple(rows.shape) == again.local_shape(rank)
        if dp_rank < len(chunks):
            assert torch.equal(rows, chunks[dp_rank])
        else:
            assert rows.shape[0] == 0


@given(layouts(), st.integers(1, 3), st.booleans(), st.data())
def test_parts_lie_where_the_whole_does(drawn, dp_size, index, data):
    layout, tp_size = drawn
    if data.draw(st.booleans()):
        columns = [[row * tp_size + rank for row in range(dp_size)] for rank in range(tp_size)]
        layout = layout.shard_rows_further(columns)
    box = []
    for number, size in enumerate(layout.shape):
        start = data.draw(st.integers(0, size - 1))
        stop = start + 1 if index and number == 0 else data.draw(st.integers(start + 1, size))
        box.append((start, stop))
    part = Part("part", "weight", tuple(box), index)
    assert part.layout(layout).shape == box_shape(part.box)[index:]
    logical = torch.arange(layout.numel).view(layout.shape)
    expected = logical[_index(part.box)]
    expected = expected[0] if index else expected
    times = torch.zeros(expected.shape, dtype=torch.int64)
    for rank in range(part.layout(layout).copy_size):
        shard = take(logical, layout, rank)
        for inside, view in part_views(shard, layout, part, rank):
            assert torch.equal(view, expected[_index(inside)])
        for inside in part.layout(layout).primary_boxes(rank):
            times[_index(inside)] += 1
    assert (times == 1).all()


def test_describe_names_the_dimension_the_range_and_the_full_shape():
    layout = shard_along("lm_head.weight", (65535, 8), 0, split(65535, 2))
    assert layout.describe(1) == "dimension 0 [32768, 65535) of (65535, 8)"
    assert TensorLayout("norm.weight", (8,)).describe(1) == "all of (8,)"


NUM_LAYERS = 2
ATTENTIONS = [f"model.layers.{layer}.self_attn" for layer in range(NUM_LAYERS)]
SIZES = ModelSizes(101, dict.fromkeys(ATTENTIONS, HeadSizes(query=9, key_value=3, dim=4)))
HIDDEN, INNER = 36, 29
LAYER_SHAPES = {
    "self_attn.q_proj.weight": (36, HIDDEN),
    "self_attn.q_proj.bias": (36,),
    "self_attn.k_proj.weight": (12, HIDDEN),
    "self_attn.k_proj.bias": (12,),
    "self_attn.v_proj.weight": (12, HIDDEN),
    "self_attn.o_proj.weight": (HIDDEN, 36),
    "self_attn.o_proj.bias": (HIDDEN,),
    "mlp.gate_proj.weight": (INNER, HIDDEN),
    "mlp.up_proj.weight": (INNER, HIDDEN),
    "mlp.down_proj.weight": (HIDDEN, INNER),
    "input_layernorm.weight": (HIDDEN,),
}
CUT_DIMENSION = {
    "self_attn.q_proj.weight": 0,
    "self_attn.q_proj.bias": 0,
    "self_attn.k_proj.weight": 0,
    "self_attn.k_proj.bias": 0,
    "self_attn.v_proj.weight": 0,
    "self_attn.o_proj.weight": 1,
    "mlp.gate_proj.weight": 0,
    "mlp.up_proj.weight": 0,
    "mlp.down_proj.weight": 1,
}
BY_VOCABULARY = {"model.embed_tokens.weight", "lm_head.weight"}


def _shapes() -> dict[str, tuple[int, ...]]:
    shapes = {name: (SIZES.vocab_size, HIDDEN) for name in sorted(BY_VOCABULARY)}
    for layer in range(NUM_LAYERS):
        for name, shape in LAYER_SHAPES.items():
            shapes[f"model.layers.{layer}.{name}"] = shape
    return {**shapes, "model.norm.weight": (HIDDEN,)}


def _plan(tp_size: int, tied: bool = False, vocab_multiple_of: int = 1) -> ModelLayout:
    aliases = {"lm_head.weight": "model.embed_tokens.weight"} if tied else {}
    return plan(LLAMA, _shapes(), aliases, SIZES, tp_size, 1, vocab_multiple_of)


@pytest.mark.parametrize("tp_size", [1, 2, 3, 4])
def test_plan_cuts_by_vocabulary_by_heads_and_by_features_that_ranks_keep_to_themselves(tp_size):
    layout = _plan(tp_size)
    assert {name: tensor.shape for name, tensor in layout.items()} == _shapes()
    for tensor in layout.values():
        assert (_times_covered(tensor, tp_size, tensor.primary_boxes) == 1).all(), tensor.name
    rows = tuple((piece,) for piece in split(SIZES.vocab_size, tp_size))
    assert {name for name, tensor in layout.items() if _ranges(tensor) == rows} == BY_VOCABULARY
    for layer in range(NUM_LAYERS):
        tensors = {name: layout[f"model.layers.{layer}.{name}"] for name in LAYER_SHAPES}
        cuts = {name: tensor.dim for name, tensor in tensors.items() if tensor.dim is not None}
        assert cuts == CUT_DIMENSION
        held = {name.split(".", 1)[1]: _ranges(tensors[name]) for name in CUT_DIMENSION}
        assert held["q_proj.weight"] == held["q_proj.bias"] == held["o_proj.weight"]
        assert held["k_proj.weight"] == held["k_proj.bias"] == held["v_proj.weight"]
        assert held["gate_proj.weight"] == held["up_proj.weight"] == held["down_proj.weight"]
        for (piece,) in (*held["q_proj.weight"], *held["k_proj.weight"]):
            assert all(boundary % 4 == 0 for boundary in piece)


def test_plan_gives_a_tied_head_the_layout_of_the_embedding_and_no_entry():
    layout = _plan(2, tied=True)
    assert "lm_head.weight" not in list(layout)
    assert layout["lm_head.weight"] is layout["model.embed_tokens.weight"]


def test_plan_aligns_vocabulary_boundaries_on_request():
    layout = _plan(2, vocab_multiple_of=64)
    assert _ranges(layout["lm_head.weight"]) == (((0, 64),), ((64, 101),))


@pytest.mark.parametrize(
    ("vocab_size", "rows"),
    [
        (3, (1, 1, 1, 0)),
        (65, (22, 22, 21)),
        (65535, (32768, 32767)),
        (151669, (37918, 37917, 37917, 37917)),
    ],
)
def test_plan_deals_any_vocabulary_without_a_row_more(vocab_size, rows):
    shapes = {**_shapes(), **dict.fromkeys(BY_VOCABULARY, (vocab_size, HIDDEN))}
    layout = plan(LLAMA, shapes, {}, replace(SIZES, vocab_size=vocab_size), len(rows))
    for name in BY_VOCABULARY:
        assert tuple(layout[name].local_shape(rank)[0] for rank in range(len(rows))) == rows
        assert [box[0] for box in layout[name].primary_ranks] == list(split(vocab_size, len(rows)))
