"""Rotary embeddings by complex numbers, with the same bits wherever a number lies.

torch's product of complex numbers rounds otherwise at the end of a thread's part than before it, on
a CPU. So these are the products and sums of real ones, each rounded by itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Rotations:
    """Complex numbers that rotate heads: what a class does with such a tensor, and no more.

    Args:
        real, imaginary: [B, T, head_dim / 2].

    Example:
        >>> quarter = Rotations(torch.zeros(1), torch.ones(1))
        >>> torch.tensor([2 + 3j]) * quarter
        tensor([-3.+2.j])
    """

    def __init__(self, real: torch.Tensor, imaginary: torch.Tensor) -> None:
        self.real, self.imaginary = real, imaginary

    def to(self, device: torch.device) -> Rotations:
        return Rotations(self.real.to(device), self.imaginary.to(device))

    def unsqueeze(self, dim: int) -> Rotations:
        return Rotations(self.real.unsqueeze(dim), self.imaginary.unsqueeze(dim))

    def __getitem__(self, index: Any) -> Rotations:
        return Rotations(self.real[index], self.imaginary[index])

    def __rmul__(self, heads: torch.Tensor) -> torch.Tensor:
        a, b = torch.view_as_real(heads).unbind(-1)
        parts = a * self.real - b * self.imaginary, a * self.imaginary + b * self.real
        return torch.view_as_complex(torch.stack(parts, -1))


def _as_rotations(module: nn.Module, args: Any, output: Any) -> Any:
    if isinstance(output, torch.Tensor) and output.is_complex():
        return Rotations(*torch.view_as_real(output).unbind(-1))
    return output


def fix_rotations(model: nn.Module) -> None:
    """Let the rotary embeddings of a model that are complex rotate with fixed bits."""
    for module in model.modules():
        if type(module).__name__.endswith("RotaryEmbedding"):
            module.register_forward_hook(_as_rotations)
