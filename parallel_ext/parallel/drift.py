"""Compare the replicas of a parallel model: drift is an error before anything is saved."""

from __future__ import annotations

from torch import nn

from parallel_ext.nn.replicas import compare
from parallel_ext.parallel.state import state_of
from parallel_ext.sharding.named_shards import named_shards, persistent_buffers, to_shards
from parallel_ext.sharding.slices import local_part


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
