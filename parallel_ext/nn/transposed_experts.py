"""Experts whose matrices lie transposed: those of GPT-OSS, with biases, and of Llama 4."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from parallel_ext.nn.moe import ExpertParallelExperts
from parallel_ext.ops import Group
from parallel_ext.sharding.layout import TensorLayout


class ClampedGate(nn.Module):
    """The gated activation of GPT-OSS, whose gate and up features take turns.

    ``(clamp(up) + 1) * gate * sigmoid(alpha * gate)``, the gate clamped from above.

    Args:
        alpha: of the sigmoid.
        limit: of both clamps.

    Example:
        >>> ClampedGate(1.702, 7.0)(torch.tensor([[0.0, 5.0, 100.0, 100.0]]))
        tensor([[ 0.0000, 55.9996]])
    """

    def __init__(self, alpha: float, limit: float) -> None:
        super().__init__()
        self.alpha, self.limit = alpha, limit

    def forward(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.unflatten(-1, (-1, 2)).unbind(-1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + 1) * gate * torch.sigmoid(gate * self.alpha)


class TransposedExperts(ExpertParallelExperts):
    """Experts with ``gate_up_proj`` [e, H, 2 I] and ``down_proj`` [e, I, H], which lie transposed.

    Else they are as :class:`ExpertParallelExperts`. Adapters are not served.
    """

    def _matrices(self, attribute: str) -> torch.Tensor:
        return super()._matrices(attribute).transpose(1, 2)


class ExpertsOfWeighedTokens(TransposedExperts):
    """The experts of Llama 4, which are given a token times its weight; each rank holds some."""

    def _of_experts(
        self, rows: torch.Tensor, weights: torch.Tensor, product: Callable[..., torch.Tensor]
    ) -> torch.Tensor:
        rows = rows * weights.unsqueeze(-1).to(rows.dtype)
        gate, up = product(rows, "gate_up_proj").chunk(2, dim=-1)
        return product(up * self.act_fn(gate), "down_proj")


class BiasedExperts(TransposedExperts):
    """The experts of GPT-OSS, which have biases; each rank holds some.

    As :class:`TransposedExperts`, but for the biases.

    Args:
        gate_up_proj_bias: [e, 2 I], of this rank's e experts.
        down_proj_bias: [e, H].
        act_fn: of the products with gate and up features.
    """

    def __init__(
        self,
        gate_up_proj: nn.Parameter,
        down_proj: nn.Parameter,
        gate_up_proj_bias: nn.Parameter,
        down_proj_bias: nn.Parameter,
        layouts: dict[str, TensorLayout],
        act_fn: Callable[[torch.Tensor], torch.Tensor],
        group: Group,
        **options: Any,
    ) -> None:
        super().__init__(gate_up_proj, down_proj, layouts, act_fn, group, **options)
        self.gate_up_proj_bias, self.down_proj_bias = gate_up_proj_bias, down_proj_bias

    def _matrices(self, attribute: str) -> torch.Tensor:
        if attribute.endswith("_bias"):
            return _column(ExpertParallelExperts._matrices(self, attribute))
        return super()._matrices(attribute)

    def _of_experts(
        self, rows: torch.Tensor, weights: torch.Tensor, product: Callable[..., torch.Tensor]
    ) -> torch.Tensor:
        of_biases = product(_column(rows.new_ones(rows.size(0))), "gate_up_proj_bias")
        gate_up = product(rows, "gate_up_proj") + of_biases
        gated = (self.act_fn(gate_up) * weights.unsqueeze(-1)).to(gate_up.dtype)
        of_biases = product(_column(weights.to(gate_up.dtype)), "down_proj_bias")
        return product(gated, "down_proj") + of_biases


def _column(values: torch.Tensor) -> torch.Tensor:
    """Return values [...] as a column of a matrix [..., 8], by which biases are products.

    A product sums in fp32, and grouped ones on a GPU want rows of 16 bytes.
    """
    return nn.functional.pad(values.unsqueeze(-1), (0, 7))
