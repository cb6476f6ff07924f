"""The experts of GPT-OSS compute what the class does, by loops and by grouped products."""

from __future__ import annotations

import pytest
import torch
from on_device import aten_path
from reference_ops import ALL_DTYPES, TOLERANCE
from torch import nn
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from parallel_ext import ops
from parallel_ext.nn.transposed_experts import BiasedExperts, ClampedGate
from parallel_ext.sharding.layout import shard_along

NAMES = ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")


def _pair(dtype: torch.dtype) -> tuple[GptOssExperts, BiasedExperts]:
    torch.manual_seed(1)
    config = GptOssConfig(hidden_size=24, intermediate_size=16, num_local_experts=5)
    config._experts_implementation = "eager"
    theirs = GptOssExperts(config).to(dtype)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.5)
    layouts = {
        name: shard_along(name, tuple(getattr(theirs, name).shape), 0, ((0, 5),)) for name in NAMES
    }
    own = [nn.Parameter(getattr(theirs, name).detach().clone()) for name in NAMES]
    gate = ClampedGate(theirs.alpha, theirs.limit)
    return theirs, BiasedExperts(*own, layouts, gate, ops.ALONE)


@ALL_DTYPES
@pytest.mark.parametrize("aten", [False, True])
def test_outputs_and_gradients_are_those_of_the_class(dtype: torch.dtype, aten: bool) -> None:
    """Of experts with and without tokens, and beyond the limit of the gate."""
    theirs, ours = _pair(dtype)
    hidden, weights = torch.randn(19, 24, dtype=dtype) * 3, torch.rand(19, 2, dtype=dtype)
    ids = torch.rand(19, 4).topk(2).indices  # the last expert has none
    results = []
    for module in (theirs, ours):
        inputs = [each.clone().requires_grad_() for each in (hidden, weights)]
        with aten_path(aten):
            output = module(inputs[0], ids, inputs[1])
            output.backward(torch.linspace(-1, 1, output.numel(), dtype=dtype).view_as(output))
        gradients = [getattr(module, name).grad for name in NAMES]
        results.append([output, *(each.grad for each in inputs), *gradients])
    for theirs, ours in zip(*results, strict=True):
        assert ours.dtype == theirs.dtype
        error = (ours - theirs).abs().max() / theirs.abs().max()
        assert error <= 4 * TOLERANCE[dtype]
    assert (gradients[0][4] == 0).all()
