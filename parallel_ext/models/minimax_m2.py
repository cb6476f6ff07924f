"""MiniMax-M2: experts chosen by sigmoids, and norms over all heads."""

from dataclasses import replace

import torch
from torch import nn

from parallel_ext.models.llama import OLMO2
from parallel_ext.models.mixtral import MIXTRAL
from parallel_ext.nn.routing import Choose, Product

_CORRECTION = "e_score_correction_bias"


def _route(
    router: nn.Module,
    hidden_states: torch.Tensor,
    choose: Choose,
    product: Product,
    correction: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Do what ``MiniMaxM2TopKRouter`` does: the weights are sigmoids with the sum 1, in fp32.

    A correction [E], which is not trained by gradients, is added where experts are chosen.
    """
    hidden = hidden_states.reshape(-1, router.hidden_dim)
    logits = product(hidden.to(router.weight.dtype), router.weight)
    scores = choose.sigmoid(logits.float())
    expert_ids = choose.best(scores + correction, router.top_k)
    weights = scores.gather(1, expert_ids)
    return logits, weights / weights.sum(dim=-1, keepdim=True), expert_ids


MINIMAX_M2 = replace(
    MIXTRAL,
    model_type="minimax_m2",
    attention=replace(OLMO2.attention, norm_class="MiniMaxM2RMSNorm", norm_rounds_first=True),
    mixture=replace(
        MIXTRAL.mixture,
        router_class="MiniMaxM2TopKRouter",
        route=_route,
        experts_class="MiniMaxM2Experts",
        others_in_files={_CORRECTION: _CORRECTION},
    ),
)
