"""Forwards of torch's layers that every rank holds whole, with the same bits wherever they run.

Torch's have other bits where a tensor lies elsewhere in memory, or with other numbers of threads.
"""

from __future__ import annotations

from types import MethodType

import torch
from torch import nn

from parallel_ext import ops
from parallel_ext.nn.blocks import replicated_linear
from parallel_ext.ops import Blocks


def _linear(layer: nn.Linear, input: torch.Tensor) -> torch.Tensor:
    return replicated_linear(input, layer.weight, layer.bias)


def _layer_norm(layer: nn.LayerNorm, input: torch.Tensor) -> torch.Tensor:
    """Normalise in fp32 or wider, scale and shift there, and round once."""
    (features,) = layer.normalized_shape
    with torch.autocast(input.device.type, enabled=False):
        wide = input.to(torch.promote_types(input.dtype, torch.float32))
        normalized = nn.functional.layer_norm(wide, (features,), eps=layer.eps)
        weight, bias = layer.weight.to(wide.dtype), layer.bias.to(wide.dtype)
        one_head = ops.block_scale(normalized.unsqueeze(-2), weight, Blocks(((0, 1),), 1))
        shifted = ops.block_bias(one_head.squeeze(-2), bias, Blocks(((0, features),), 1))
        return shifted.to(input.dtype)


def _patches(layer: nn.Conv2d, images: torch.Tensor) -> torch.Tensor:
    """Compute a convolution whose stride is its kernel, as a product of patches."""
    high, wide = layer.kernel_size
    rows, columns = images.shape[2] // high, images.shape[3] // wide
    patches = images.unfold(2, high, high).unfold(3, wide, wide).permute(0, 2, 3, 1, 4, 5)
    weight = layer.weight.flatten(1)
    flat = patches.reshape(len(images), rows * columns, weight.size(1))
    return replicated_linear(flat, weight, layer.bias).mT.unflatten(2, (rows, columns))


_FORWARDS = {nn.Linear: _linear, nn.LayerNorm: _layer_norm, nn.Conv2d: _patches}


def check_replicated(model: nn.Module) -> None:
    """Raise a ValueError if a layer of these kinds does more than :func:`fix_replicated` serves."""
    for name, layer in model.named_modules():
        is_conv = type(layer) is nn.Conv2d
        if is_conv and (layer.stride != layer.kernel_size or layer.padding != (0, 0)):
            raise ValueError(
                f"px.Invariant serves convolutions of patches, but {name} has the kernel "
                f"{layer.kernel_size}, stride {layer.stride} and padding {layer.padding}"
            )
        known = type(layer) is nn.LayerNorm and layer.bias is not None
        if isinstance(layer, nn.LayerNorm) and not known:
            raise ValueError(
                f"px.Invariant serves nn.LayerNorm with weight and bias, but {name} is {layer}"
            )


def fix_replicated(model: nn.Module) -> None:
    """Give a model's linears, layer norms and embeddings of patches forwards with fixed bits."""
    for layer in model.modules():
        if type(layer) in _FORWARDS and "forward" not in vars(layer):
            layer.forward = MethodType(_FORWARDS[type(layer)], layer)
