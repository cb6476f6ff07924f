"""Compare the bits of a model: of its replicas on their ranks, and of its weights on layouts."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from parallel_ext.distributed.errors import DisagreementError
from parallel_ext.nn.replicas import compare
from parallel_ext.parallel.state import model_of, state_of
from parallel_ext.sharding.blocks import own_blocks
from parallel_ext.sharding.named_shards import named_shards, persistent_buffers, to_shards
from parallel_ext.sharding.slices import gather_rows, local_part, take_block


@torch.no_grad()
def digest(model: nn.Module, per_parameter: bool = False) -> str | dict[str, str]:
    """Return a digest of all parameters of a model, equal wherever their bits are equal.

    Every rank calls it. It says whether two runs on different layouts are one training. A second
    run of a step whose digest differs, or a rank that holds other bits of what several ranks hold,
    is one that computed wrongly.

    Args:
        model: parallel, with ``px.Invariant``.
        per_parameter: return one digest for each parameter by its HuggingFace name.

    Returns:
        SHA-256 in hexadecimal digits; the same on every rank.

    Raises:
        ValueError: the model has no blocks, so that its shards depend on the layout.
        DisagreementError: ranks hold different bits of one block; names the ranks.
        CollectiveTimeout: not all ranks called it.

    Example:
        >>> digest(model)  # doctest: +SKIP
        '3e2a...'
    """
    model, state = model_of(model), state_of(model)
    if state.invariant is None:
        raise ValueError("px.digest is of models that px.parallelize(..., invariant=) has made")
    control = state.mesh.control
    control.barrier("digest")
    to_shards(model)
    own: dict[tuple[str, int], str] = {}
    for name, parameter, layout in named_shards(model):
        shard, whole = gather_rows(local_part(parameter), layout, state.mesh)
        first, ranges = 0, ((0, whole.shape[0]),)
        if whole.blocks:
            ranges = own_blocks(whole, state.mesh.rank).own
            first = whole.ranges(state.mesh.rank)[0][0]
        for start, stop in dict.fromkeys(ranges):  # of equal ones, one
            block = take_block(shard, whole, (start, stop)).cpu()
            data = block.flatten().view(torch.uint8).numpy()
            own[layout.name or name, first + start] = hashlib.sha256(data).hexdigest()
    blocks: dict[tuple[str, int], tuple[int, str]] = {}
    for rank, of_rank in enumerate(control.all_gather_object(own)):
        for key, value in of_rank.items():
            lowest, expected = blocks.setdefault(key, (rank, value))
            if value != expected:
                raise DisagreementError(
                    f"digest: ranks {lowest} and {rank} hold different bits of {key[0]} (from "
                    f"{key[1]} on), which must be equal"
                )
    lines: dict[str, list[str]] = {}
    for (name, start), (_, value) in sorted(blocks.items()):
        lines.setdefault(name, []).append(f"{start} {value}")
    found = {
        name: hashlib.sha256("\n".join(of_name).encode()).hexdigest()
        for name, of_name in lines.items()
    }
    if per_parameter:
        return found
    together = "\n".join(f"{name} {value}" for name, value in found.items())
    return hashlib.sha256(together.encode()).hexdigest()


def check_replicas(model: nn.Module) -> None:
    """Raise unless all replicas of a model's tensors have the same bits on their ranks.

    Every rank calls it. Each rank hashes what others hold too: norms, routers and corrections of
    their scores, factors of adapters, key-value heads that several ranks share, and what dp ranks
    hold replicated. One exchange of a few bytes follows. ``save_pretrained`` and
    ``save_checkpoint`` do the same before they write, and each training forward does it with one
    parameter in turn.

    Args:
        model: a parallel model, wrapped or not.

    Raises:
        TypeError: the model was not parallelized.
        DisagreementError: ranks hold different values; on every rank, with the parameter's name.
        CollectiveTimeout: not all ranks called it.

    Example:
        >>> check_replicas(model)  # doctest: +SKIP
    """
    mesh, whole = state_of(model).mesh, state_of(model).layout
    mesh.control.barrier("check_replicas")
    to_shards(model)
    shards = {name: (local_part(p), layout) for name, p, layout in named_shards(model)}
    buffers = dict(persistent_buffers(model))
    shards |= {name: (buffers[name], whole[name]) for name in buffers if name in whole.buffers}
    compare(shards, mesh, "check_replicas")
