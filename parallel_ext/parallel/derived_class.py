"""A class that a user derives from one of transformers, whose forward may add to the loss."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from transformers.loss.loss_utils import ForCausalLMLoss

_OF_LIBRARIES = ("transformers.", "parallel_ext.")
_OWN_LOSS = "_loss_function"  # where transformers keeps what ``loss_function`` is set to


@lru_cache
def is_derived(cls: type) -> bool:
    """Return whether a class of others has a forward of its own over that of a library's class.

    It may choose labels, add to the loss and use the logits, so it is given both. A class that
    derives from none with a loss hands its labels to ``loss_function`` as it is.
    """
    forwards = [each for each in cls.__mro__ if "forward" in vars(each)]
    if forwards[0].__module__.startswith(_OF_LIBRARIES):
        return False
    return any(
        each.__module__.startswith(_OF_LIBRARIES)
        and "labels" in inspect.signature(each.forward).parameters
        for each in forwards
    )


def has_other_loss(model: nn.Module) -> bool:
    """Return whether a causal model's ``loss_function`` is not the one of transformers."""
    loss = getattr(model, "loss_function", ForCausalLMLoss)
    return loss is not ForCausalLMLoss and not isinstance(loss, LossInside)


class LossInside:
    """The ``loss_function`` of a model while the forward of a derived class runs.

    Args:
        compute: the loss of logits and labels that are on every rank.

    Attributes:
        was_asked: whether the class has taken a loss from it.
    """

    def __init__(self, compute: Callable[..., torch.Tensor]) -> None:
        self._compute, self.was_asked = compute, False

    def __call__(
        self, logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **options: Any
    ) -> torch.Tensor:
        self.was_asked = True
        return self._compute(logits, labels, **options)

    @contextmanager
    def inside(self, model: nn.Module) -> Iterator[None]:
        """Be the loss function of ``model`` in the context."""
        outer = vars(model).get(_OWN_LOSS)  # of a forward that calls the model again
        model.loss_function = self
        try:
            yield
        finally:
            del vars(model)[_OWN_LOSS]
            if outer is not None:
                model.loss_function = outer
