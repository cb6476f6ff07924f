"""``px.LoraConfig``: a ``peft.LoraConfig`` that brings the layers of a parallel model."""

from __future__ import annotations

import dataclasses
from typing import Any

import peft

from parallel_ext.linear import ColumnParallelLinear, RowParallelLinear
from parallel_ext.lora.layers import (
    LoraColumnLinear,
    LoraRowLinear,
    LoraVocabEmbedding,
    LoraVocabHead,
)
from parallel_ext.vocab import VocabParallelEmbedding, VocabParallelHead

LAYERS = {
    ColumnParallelLinear: LoraColumnLinear,
    RowParallelLinear: LoraRowLinear,
    VocabParallelHead: LoraVocabHead,
    VocabParallelEmbedding: LoraVocabEmbedding,
}
"""Module of a parallel model -> what PEFT puts around it."""


class LoraConfig(peft.LoraConfig):
    """``peft.LoraConfig`` whose adapters also fit a parallel model.

    Everything is as in PEFT; on a parallel model each rank holds its part of the factors, and what
    is not supported there is refused by name. A plain ``peft.LoraConfig`` serves as well once
    ``px.parallelize`` or ``px.from_pretrained`` has run.

    Example:
        >>> config = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "o_proj"])
        >>> config.r
        8
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._register_custom_module(LAYERS)

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> LoraConfig:
        """As PEFT's, returning this class."""
        config = peft.LoraConfig.from_pretrained(*args, **kwargs)
        fields = (field.name for field in dataclasses.fields(peft.LoraConfig) if field.init)
        return cls(**{name: getattr(config, name) for name in fields})
