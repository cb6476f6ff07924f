"""The modules of a process that hold a model, or share its weights, without being part of it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

from torch import nn

from parallel_ext.nn.vocab import TiedHead
from parallel_ext.sharding._torch_private import own_modules


def children_in_process() -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Yield each module of this process that another one holds: the holder, its name, and itself.

    A module need not know of what holds it.
    """
    for each in gc.get_objects():
        # By the class, since asking an object may run code of its own.
        if issubclass(type(each), nn.Module) and "_modules" in vars(each):
            for name, child in own_modules(each).items():
                if child is not None:
                    yield each, name, child


def modules_around(module: nn.Module) -> list[nn.Module]:
    """Return the modules of this process that hold a module, in others or not."""
    holders: dict[int, list[nn.Module]] = {}
    for holder, _, child in children_in_process():
        holders.setdefault(id(child), []).append(holder)
    around = [module]
    for each in around:  # which grows in the loop, by each once
        around += holders.pop(id(each), [])
    return around[1:]


def heads_tied_to(model: nn.Module, embedding: str) -> list[tuple[nn.Module, str]]:
    """Return the plain output layers outside of a decoder that have its embedding's weight.

    Args:
        model: without a head, and not parallel yet.
        embedding: its path.

    Returns:
        What holds each of them, and under which name.
    """
    weight = model.get_submodule(embedding).weight
    return [
        (holder, name)
        for holder, name, child in children_in_process()
        if type(child) is nn.Linear and child.weight is weight
    ]


def tie_again(heads: list[tuple[nn.Module, str]], model: nn.Module, embedding: str) -> None:
    """Put heads that know the sharded weight in the place of :func:`heads_tied_to`."""
    for holder, name in heads:
        plain = getattr(holder, name)
        head = TiedHead(model.get_submodule(embedding), plain.bias)
        setattr(holder, name, head.train(plain.training))
