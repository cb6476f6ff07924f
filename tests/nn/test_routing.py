"""Routers choose as HuggingFace's do, but of equal scores the lower id."""

from __future__ import annotations

import pytest
import torch
from reference_ops import ALL_DTYPES
from torch import nn
from transformers import MixtralConfig, Qwen2MoeConfig, Qwen3MoeConfig
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from parallel_ext.models.mixtral import MIXTRAL
from parallel_ext.models.qwen2_moe import QWEN2_MOE
from parallel_ext.models.qwen3_moe import QWEN3_MOE
from parallel_ext.nn.routing import Routing

_QWEN = {"hidden_size": 24, "num_experts": 7, "num_experts_per_tok": 3}
ROUTERS = {
    "mixtral": lambda: MixtralTopKRouter(
        MixtralConfig(hidden_size=24, num_local_experts=7, num_experts_per_tok=3)
    ),
    "qwen3_moe": lambda: Qwen3MoeTopKRouter(Qwen3MoeConfig(norm_topk_prob=True, **_QWEN)),
    "qwen3_moe, weights as drawn": lambda: Qwen3MoeTopKRouter(
        Qwen3MoeConfig(norm_topk_prob=False, **_QWEN)
    ),
    "qwen2_moe": lambda: Qwen2MoeTopKRouter(Qwen2MoeConfig(norm_topk_prob=True, **_QWEN)),
}
_ROUTES = {
    MixtralTopKRouter: MIXTRAL.mixture.route,
    Qwen3MoeTopKRouter: QWEN3_MOE.mixture.route,
    Qwen2MoeTopKRouter: QWEN2_MOE.mixture.route,
}
_FORWARDS = {cls: cls.forward for cls in _ROUTES}  # as imported: other tests exchange them


def _router(kind: str, dtype: torch.dtype) -> nn.Module:
    router = ROUTERS[kind]()
    torch.manual_seed(3)
    nn.init.normal_(router.weight)
    return router.to(dtype)


@ALL_DTYPES
@pytest.mark.parametrize("kind", ROUTERS)
def test_outputs_and_gradients_are_those_of_the_class(kind: str, dtype: torch.dtype) -> None:
    results = []
    for ours in (False, True):
        router, hidden = _router(kind, dtype), torch.randn(2, 9, 24, dtype=dtype)
        hidden.requires_grad_()
        if ours:
            output = Routing(_ROUTES[type(router)]).forward(router, hidden)
        else:
            output = _FORWARDS[type(router)](router, hidden)
        logits, weights, _ = output
        (logits.float().square().sum() + weights.float().pow(3).sum()).backward()
        results.append([*output, router.weight.grad, hidden.grad])
    for theirs, ours in zip(*results, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kind", ROUTERS)
def test_of_equal_scores_the_lower_ids_are_chosen(kind: str) -> None:
    router = _router(kind, torch.float32)
    router.weight.data[:] = router.weight.data[0]
    ids = Routing(_ROUTES[type(router)]).forward(router, torch.randn(5, 24))[2]
    assert ids.tolist() == [[0, 1, 2]] * 5
