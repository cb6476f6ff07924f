"""Which step of training a layer's call belongs to, in its forward and when it is recomputed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary


class Clock:
    """Counts the forwards of one model in which something random was drawn.

    Dropout asks for :attr:`step`. A checkpointed layer is called once more during backward, perhaps
    after further forwards, and must draw for its own step again: it is known by a tensor that its
    model's forward made and that checkpoints keep (:class:`EnterLayer` shows it).

    Attributes:
        replica: the model's dp rank; its tokens come after those of the lower ones.
    """

    def __init__(self, replica: int) -> None:
        self.replica = replica
        self._begun = False
        self._count = self._step = 0
        self._mark: torch.Tensor | None = None
        self._step_of = WeakIdKeyDictionary()

    def __deepcopy__(self, memo: dict[int, Any]) -> Clock:
        copy = Clock(self.replica)
        copy._count = copy._step = self._count
        return copy

    def begin(self) -> None:
        """A forward of the model begins."""
        self._begun, self._mark = True, None

    def enter(self, mark: torch.Tensor) -> None:
        """A layer is called with ``mark``, a tensor that its model's forward made."""
        if mark in self._step_of:
            self._step, self._begun = self._step_of[mark], False
        self._mark = mark

    @property
    def step(self) -> int:
        """The number of the forward that the current call belongs to, from 1 on."""
        if self._begun:
            self._count += 1
            self._step, self._begun = self._count, False
        if self._mark is not None:
            self._step_of[self._mark] = self._step
        return self._step


class EnterLayer:
    """A forward pre-hook of attentions: shows the clock the tensor that they all are given.

    Without it in the call, the step is that of the model's last forward.
    """

    def __init__(self, clock: Clock, argument: str) -> None:
        self.clock, self.argument = clock, argument

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        mark = kwargs.get(self.argument)
        if mark is not None:
            self.clock.enter(mark if isinstance(mark, torch.Tensor) else mark[0])
