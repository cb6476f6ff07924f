"""Llama 4: experts that are given a token times its weight, in all or some layers.

Served is the decoder of text, which in files lies beside an image tower.
"""

from dataclasses import replace

import torch
from torch import nn

from parallel_ext.models.llama import LLAMA, MLP
from parallel_ext.models.mixtral import MIXTRAL
from parallel_ext.nn.routing import Choose, Product


def _route(
    router: nn.Module, hidden_states: torch.Tensor, choose: Choose, product: Product
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Do what ``Llama4Router`` does: the weights, sigmoids of the chosen logits, come first."""
    logits = product(hidden_states, router.weight)
    expert_ids = choose.best(logits, router.top_k)
    weights = choose.sigmoid(logits.gather(1, expert_ids).float()).to(logits.dtype)
    return weights, logits, expert_ids


def _forward(block: nn.Module, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Do what ``Llama4TextMoe`` does, which multiplies every expert by all tokens."""
    tokens = hidden_states.reshape(-1, block.hidden_dim)
    weights, logits, expert_ids = block.router(tokens)
    shared, own = block.shared_expert(tokens), block.experts(tokens, expert_ids, weights)
    return shared + own.to(shared.dtype), logits


_MLP = replace(MLP, name="feed_forward")
LLAMA4_TEXT = replace(
    LLAMA,
    model_type="llama4_text",
    mlp=_MLP,
    mixture=replace(
        MIXTRAL.mixture,
        name="feed_forward",
        router="router",
        router_class="Llama4Router",
        route=_route,
        block_class="Llama4TextMoe",
        forward=_forward,
        experts_class="Llama4TextExperts",
        weighs_inputs=True,
        in_files="feed_forward",
        gate_up_in_files=None,
        down_in_files=None,
        jitter=None,
        block_jitter=None,
        balances=False,
        shared=replace(_MLP, name="shared_expert"),
    ),
    in_image_files={"language_model.": ""},
    beside_text=(r"^vision_model\.", r"^multi_modal_projector\."),
)
