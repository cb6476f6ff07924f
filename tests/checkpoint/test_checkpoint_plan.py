"""Saves and loads on random layouts, up to 40 ranks, in one process: every byte once, none changed.

The ranks are simulated; what is run is the code that plans, cuts and sends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from parallel_ext.io.safetensors_writer import TensorSpec
from parallel_ext.io.stream import plan_files, plan_turns
from parallel_ext.lora.experts import expert_factor_layouts
from parallel_ext.sharding import reshard
from parallel_ext.sharding.layout import (
    ModelLayout,
    Part,
    TensorLayout,
    shard_along,
    shard_joined,
    shard_ranges,
    split,
)
from parallel_ext.sharding.reshard import Swap, part_value, part_views
from parallel_ext.sharding.slices import take


@dataclass(frozen=True)
class Sides:
    """Of a mesh, and whether dp ranks deal the rows among them."""

    dp: int = 1
    tp: int = 1
    ep: int = 1
    sharded: bool = False
    multiple_of: int = 1

    @property
    def world(self) -> int:
        return self.dp * self.tp

    def sharded_further(self, layout: TensorLayout, inner: int) -> TensorLayout:
        if not self.sharded or self.world == inner:
            return layout
        columns = [list(range(first, self.world, inner)) for first in range(inner)]
        return layout.shard_rows_further(columns)


@dataclass(frozen=True)
class Sizes:
    """Of a model with one tensor of each kind."""

    vocab: int
    hidden: int
    heads: int
    key_value_heads: int
    experts: int
    inner: int


def _layout(sizes: Sizes, sides: Sides) -> ModelLayout:
    """Tensors sharded by rows, by columns, joined, over heads that may be shared, and others."""
    v, h, tp = sizes.vocab, sizes.hidden, sides.tp
    owners = split(sizes.key_value_heads, min(tp, sizes.key_value_heads))
    heads = [owners[rank * len(owners) // tp] for rank in range(tp)]
    dense = [
        shard_along("embedding", (v, h), 0, split(v, tp, sides.multiple_of)),
        shard_along("down", (h, sizes.inner), 1, split(sizes.inner, tp)),
        shard_joined("fused", (2 * sizes.inner, h), 0, (sizes.inner, sizes.inner), tp),
        shard_ranges("key", (sizes.key_value_heads, h), 0, [(piece,) for piece in heads]),
        TensorLayout("norm", (h,)),
        TensorLayout("scale", ()),
    ]
    shape = (sizes.experts, 2 * sizes.inner, h)
    experts = shard_along("experts", shape, 0, split(sizes.experts, sides.ep))
    halves = ((0, sizes.inner), (sizes.inner, 2 * sizes.inner))
    parts = tuple(
        Part(f"experts.{e}.w{w}", "experts", ((e, e + 1), rows, (0, h)), index=True)
        for e in range(sizes.experts)
        for w, rows in enumerate(halves)
    )
    tensors = {
        layout.name: layout if not layout.shape else sides.sharded_further(layout, tp)
        for layout in dense
    }
    tensors["experts"] = sides.sharded_further(experts, sides.ep)
    _, factor = expert_factor_layouts(experts, "lora_A", "lora_B", 2)  # whole on all dp ranks
    tensors["lora_B"] = factor
    renamed = (Part("lora_B.weight", "lora_B", factor.whole, index=False),)
    return ModelLayout(tensors, {}, {"experts": parts, "lora_B": renamed})


def _values(sizes: Sizes) -> dict[str, torch.Tensor]:
    """The logical tensors; every element is another number."""
    values, start = {}, 1
    for name, layout in _layout(sizes, Sides()).items():
        numbers = torch.arange(start, start + layout.numel, dtype=torch.int32)
        start += layout.numel
        values[name] = numbers.view(layout.shape)
    return values


Shards = list[dict[str, torch.Tensor]]


def _cut(values: Mapping[str, torch.Tensor], sizes: Sizes, sides: Sides) -> Shards:
    layout = _layout(sizes, sides)
    return [{n: take(v, layout[n], rank) for n, v in values.items()} for rank in range(sides.world)]


def _deliver(swaps: list[Swap]) -> int:
    """Bring all messages; each must be expected by its receiver, in order and in its size."""
    moved = 0
    for receiver, swap in enumerate(swaps):
        coming = {
            s: [m for to, m in other._outgoing if to == receiver] for s, other in enumerate(swaps)
        }
        for sender, room in swap._incoming:
            assert coming[sender], "a message is missing"
            message = coming[sender].pop(0)
            assert len(message) == len(room)
            room[:] = message
            moved += len(message)
        assert not any(coming.values()), "nobody waits for these"
        swap._control.all_to_all_bytes = lambda outgoing, incoming: None
        swap.run()
    return moved


def _save(shards: Shards, sizes: Sizes, sides: Sides) -> dict[str, bytes]:
    """What the files hold of each tensor; checked to be written once, by one owner, in order."""
    layout = _layout(sizes, sides)
    in_files = layout.in_files()
    values = [
        {
            part.name: part_value(shard[name], layout[name], part, rank)
            for name in layout
            for part in layout.parts_of(name)
        }
        for rank, shard in enumerate(shards)
    ]
    specs = [TensorSpec(name, torch.int32, at.shape) for name, at in in_files.items()]
    files = plan_files(specs, sides.world, 4000)
    assert sorted(spec.name for file in files for spec in file.tensors) == sorted(in_files)
    written = {spec.name: b"" for spec in specs}
    sent = 0
    for turn in plan_turns(files, in_files, sides.world):
        wanted = [[] if own is None else own.stripes for own in turn]
        rooms = [
            [torch.full(stripe.shape, -1, dtype=torch.int32) for stripe in stripes]
            for stripes in wanted
        ]
        swaps = [
            Swap(values[rank], wanted, rooms[rank], SimpleNamespace(rank=rank))
            for rank in range(sides.world)
        ]
        sent += _deliver(swaps)
        for stripes, room in zip(wanted, rooms, strict=True):
            for stripe, rows in zip(stripes, room, strict=True):
                written[stripe.layout.name] += rows.contiguous().numpy().tobytes()
    total = sum(spec.num_bytes for spec in specs)
    assert sum(map(len, written.values())) == total, "every byte once"
    assert sent <= total, "no byte is sent twice"
    return written


def _load(written: Mapping[str, bytes], sizes: Sizes, sides: Sides) -> Shards:
    """What each rank holds after it has read its boxes."""
    layout, shards = _layout(sizes, sides), []
    for rank in range(sides.world):
        shard = {
            name: torch.full(at.local_shape(rank), -1, dtype=torch.int32)
            for name, at in layout.items()
        }
        for name in layout:
            for part in layout.parts_of(name):
                shape = part.layout(layout[name]).shape
                file = torch.frombuffer(bytearray(written[part.name] or b"1234"), dtype=torch.int32)
                whole = file[: torch.Size(shape).numel()].view(shape)
                for box, place in part_views(shard[name], layout[name], part, rank):
                    place.copy_(whole[tuple(slice(*piece) for piece in box)] if box else whole)
        assert not any((value == -1).any() for value in shard.values()), "a hole"
        shards.append(shard)
    return shards


@st.composite
def _sides(draw: Any) -> Sides:
    if draw(st.integers(0, 19)) == 0:
        return draw(st.sampled_from([Sides(1, 8, 8), Sides(5, 8, 8), Sides(40, 1, 8, True)]))
    dp, tp = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    ep = draw(st.sampled_from([n for n in range(1, dp * tp + 1) if dp * tp % n == 0]))
    return Sides(dp, tp, ep, draw(st.booleans()), draw(st.sampled_from([1, 1, 4, 64])))


_small = st.integers(1, 9)
_sizes = st.builds(Sizes, st.integers(1, 40), _small, _small, st.integers(1, 4), _small, _small)


@given(_sizes, _sides(), _sides())
@example(Sizes(65, 4, 8, 2, 8, 12), Sides(1, 8, 8), Sides(5, 8, 8, True))
@example(Sizes(65, 4, 8, 2, 8, 12), Sides(5, 8, 8, True), Sides(1, 8, 8))
@settings(max_examples=500)
def test_a_save_of_what_was_loaded_elsewhere_is_the_same(
    sizes: Sizes, before: Sides, after: Sides
) -> None:
    values = _values(sizes)
    first = _save(_cut(values, sizes, before), sizes, before)
    for part_of, value in values.items():
        names = [part.name for part in _layout(sizes, before).parts_of(part_of)]
        content = b"".join(first[name] for name in names)
        assert content == value.contiguous().numpy().tobytes(), part_of
    loaded = _load(first, sizes, after)
    expected = _cut(values, sizes, after)
    for rank, shard in enumerate(loaded):
        assert all(torch.equal(value, expected[rank][n]) for n, value in shard.items()), rank
    assert _save(loaded, sizes, after) == first


def test_the_test_above_notices_rows_that_are_sent_by_every_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reshard, "_sent", lambda layout, sender, receiver: layout.boxes(sender))
    sizes, sides = Sizes(7, 3, 4, 1, 3, 5), Sides(1, 2, 1)
    with pytest.raises(AssertionError):
        _save(_cut(_values(sizes), sizes, sides), sizes, sides)


def test_the_test_above_notices_a_box_that_nobody_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    primary = TensorLayout.primary_boxes
    monkeypatch.setattr(
        TensorLayout, "primary_boxes", lambda layout, rank: primary(layout, rank)[1:]
    )
    sizes, sides = Sizes(7, 3, 4, 1, 3, 5), Sides(2, 1, 2, True)
    values = _values(sizes)
    written = _save(_cut(values, sizes, sides), sizes, sides)
    assert written["embedding"] != values["embedding"].numpy().tobytes()
