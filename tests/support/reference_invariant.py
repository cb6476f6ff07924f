"""The bits of a training under ``px.Invariant``, block by block, and their comparison."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from parallel_ext.parallel.state import state_of
from parallel_ext.sharding.blocks import counted_blocks
from parallel_ext.sharding.named_shards import named_shards
from parallel_ext.sharding.slices import take_block

BITS = tuple[list[tuple[str, str]], dict[str, str], str | None]
"""Losses and norms of steps; digests of blocks; and ``px.digest``."""


def digests(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Of every block of trained weights, gradients and second moments that this rank counts."""
    rank, found = state_of(model).mesh.rank, {}
    for name, parameter, layout in named_shards(model):
        if not parameter.requires_grad:
            continue
        first = layout.ranges(rank)[0][0] if layout.dim is not None else 0
        for start, stop in counted_blocks(layout, rank):
            for kind, tensor in (
                ("weight", parameter),
                ("gradient", parameter.grad),
                ("moment", optimizer.state[parameter]["exp_avg_sq"]),
            ):
                block = take_block(tensor.detach(), layout, (start, stop))
                data = block.flatten().cpu().view(torch.uint8).numpy()
                found[f"{kind} of {name} at {first + start}"] = hashlib.sha256(data).hexdigest()
    return found


def assert_bits(results: list[BITS], whole: BITS) -> None:
    """Raise unless the ranks of a layout together have the bits of another one, of one rank."""
    log, blocks, digest = whole
    found: dict[str, str] = {}
    for own_log, own_blocks, own_digest in results:
        assert own_log == log
        assert own_digest == digest
        assert not found.keys() & own_blocks.keys()
        found |= own_blocks
    assert {name for name in blocks if found.get(name) != blocks[name]} == set()
    assert found.keys() == blocks.keys()
