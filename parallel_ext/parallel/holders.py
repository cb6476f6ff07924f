"""The modules of a process that hold a model, or share its weights, without being part of it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

from torch import nn

from parallel_ext.nn.vocab import TiedHead, VocabParallelHead
from parallel_ext.sharding._torch_private import own_modules


def modules_in_process(kind: type[nn.Module] = nn.Module) -> list[nn.Module]:
    """Return all modules of a kind that this process holds."""
    gc.collect()  # what nobody holds any more
    # By the class, since asking an object may run code of its own.
    return [each for each in gc.get_objects() if issubclass(type(each), kind)]


def _children_in_process() -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Yield the modules that others in this process hold: the holder, its name, and itself."""
    for each in modules_in_process():
        if "_modules" in vars(each):
            for name, child in own_modules(each).items():
                if child is not None:
                    yield each, name, child


class Holders:
    """Which modules of this process hold which, when it was made.

    Garbage is collected first: it is found on all ranks or on none.
    """

    def __init__(self) -> None:
        self._of: dict[int, list[nn.Module]] = {}
        for holder, _, child in _children_in_process():
            self._of.setdefault(id(child), []).append(holder)

    def around(self, module: nn.Module) -> list[nn.Module]:
        """Return the modules that hold a module, in others or not, in no certain order."""
        around: dict[int, nn.Module] = {}
        for each in (queue := [module]):  # which grows in the loop
            for holder in self._of.get(id(each), ()):
                if id(holder) not in around:
                    around[id(holder)] = holder
                    queue.append(holder)
        return list(around.values())


def heads_tied_to(model: nn.Module, embedding: str) -> list[tuple[nn.Module, str]]:
    """Return the output layers outside of a decoder that have the weight of its ``embedding``.

    That is, what holds each of them, and under which name.
    """
    weight = model.get_submodule(embedding).weight
    return [
        (holder, name)
        for holder, name, child in _children_in_process()
        if type(child) in (nn.Linear, VocabParallelHead) and child.weight is weight
    ]


def tie_again(heads: list[tuple[nn.Module, str]], model: nn.Module, embedding: str) -> None:
    """Put heads that know the sharded weight in the place of :func:`heads_tied_to`."""
    for holder, name in heads:
        plain = getattr(holder, name)
        head = TiedHead(model.get_submodule(embedding), plain.bias)
        setattr(holder, name, head.train(plain.training))
