"""Routers choose as HuggingFace's do, but of equal scores the lower id."""

from __future__ import annotations

import pytest
import torch
from reference_ops import ALL_DTYPES
from torch import nn
from transformers import CONFIG_MAPPING, MixtralConfig, Qwen2MoeConfig, Qwen3MoeConfig
from transformers.models.afmoe.modeling_afmoe import AfmoeTokenChoiceRouter
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.dots1.modeling_dots1 import Dots1TopkRouter
from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeTopKRouter
from transformers.models.exaone_moe.modeling_exaone_moe import ExaoneMoeTopkRouter
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.glm4_moe_lite.modeling_glm4_moe_lite import Glm4MoeLiteTopkRouter
from transformers.models.granitemoe.modeling_granitemoe import GraniteMoeTopKRouter
from transformers.models.hunyuan_v1_moe.modeling_hunyuan_v1_moe import HunYuanMoEV1Gate
from transformers.models.hy_v3.modeling_hy_v3 import HYV3TopKRouter
from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2TopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter
from transformers.models.solar_open.modeling_solar_open import SolarOpenTopkRouter

from parallel_ext.models import SPECS
from parallel_ext.nn.routing import Routing
from parallel_ext.parallel.validate import is_too_old_for

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
    MixtralTopKRouter: SPECS["mixtral"].mixture.route,
    Qwen3MoeTopKRouter: SPECS["qwen3_moe"].mixture.route,
    Qwen2MoeTopKRouter: SPECS["qwen2_moe"].mixture.route,
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


_GROUPS = {
    **{"hidden_size": 24, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4},
    **{"topk_group": 2, "routed_scaling_factor": 1.7, "num_attention_heads": 4},
}
_BEST = {
    "deepseek_v3": (DeepseekV3TopkRouter, {**_GROUPS, "norm_topk_prob": True}),
    "deepseek_v3, scores as they are": (DeepseekV3TopkRouter, {**_GROUPS, "norm_topk_prob": False}),
    "glm4_moe": (Glm4MoeTopkRouter, _GROUPS),
    "glm4_moe_lite": (Glm4MoeLiteTopkRouter, _GROUPS),
    "dots1": (Dots1TopkRouter, _GROUPS),
    "exaone_moe": (ExaoneMoeTopkRouter, {**_GROUPS, "num_experts": 8}),
    "solar_open": (SolarOpenTopkRouter, _GROUPS),
    "hy_v3": (
        HYV3TopKRouter,
        {"hidden_size": 24, "num_experts": 8, "num_experts_per_tok": 3},
    ),
    "deepseek_v2": (DeepseekV2TopkRouter, {**_GROUPS, "topk_method": "greedy"}),
    "deepseek_v2, groups": (
        DeepseekV2TopkRouter,
        {**_GROUPS, "topk_method": "group_limited_greedy", "topk_group": 1, "n_group": 2},
    ),
    "ernie4_5_moe": (
        Ernie4_5_MoeTopKRouter,
        {"hidden_size": 24, "moe_num_experts": 8, "moe_k": 3},
    ),
    "minimax_m2": (
        MiniMaxM2TopKRouter,
        {"hidden_size": 24, "num_local_experts": 8, "num_experts_per_tok": 3},
    ),
    "granitemoe": (
        GraniteMoeTopKRouter,
        {"hidden_size": 24, "num_local_experts": 8, "num_experts_per_tok": 3},
    ),
    "hunyuan_v1_moe": (HunYuanMoEV1Gate, {"hidden_size": 24, "num_experts": 8, "moe_topk": 3}),
    "afmoe": (
        AfmoeTokenChoiceRouter,
        {"hidden_size": 24, "num_experts": 8, "num_experts_per_tok": 3, "route_scale": 1.7},
    ),
}

_BEST = {  # of which not all are in 5.15 as they are now
    kind: _BEST[kind] for kind in _BEST if not is_too_old_for(SPECS[kind.partition(",")[0]])
}
# Their blocks hold the corrections.
_GIVEN_CORRECTIONS = (MiniMaxM2TopKRouter, HYV3TopKRouter, AfmoeTokenChoiceRouter)


def _corrected(kind: str, dtype: torch.dtype) -> tuple[nn.Module, list[torch.Tensor]]:
    """A router, and what its class is given beside the hidden states."""
    cls, options = _BEST[kind]
    router = cls(CONFIG_MAPPING[kind.partition(",")[0]](**options))
    torch.manual_seed(3)
    for tensor in router.state_dict().values():  # weights, and corrections of the scores
        nn.init.normal_(tensor)
    return router.to(dtype), [torch.randn(8)] if cls in _GIVEN_CORRECTIONS else []


def _hidden(kind: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    shape = (2, 9, 24) if kind == "afmoe" else (18, 24)  # the former's class takes no other
    return torch.randn(shape, dtype=dtype, requires_grad=True)


@ALL_DTYPES
@pytest.mark.parametrize("kind", _BEST)
def test_corrected_scores_choose_as_the_class_does(kind: str, dtype: torch.dtype) -> None:
    results = []
    for ours in (False, True):
        router, others = _corrected(kind, dtype)
        hidden = _hidden(kind, dtype)
        route = SPECS[kind.partition(",")[0]].mixture.route
        forward = Routing(route).forward if ours else type(router).forward
        logits, weights, ids = forward(router, hidden, *others)
        (logits.float().square().sum() + weights.float().pow(3).sum()).backward()
        dense = torch.zeros(18, 8, dtype=weights.dtype).scatter(1, ids, weights)
        results.append([logits, dense, next(router.parameters()).grad, hidden.grad])
    for theirs, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", _BEST)
def test_corrected_scores_have_the_dtypes_of_the_class_under_autocast(kind: str) -> None:
    router, others = _corrected(kind, torch.float32)
    hidden = _hidden(kind)
    with torch.autocast("cpu", torch.bfloat16):
        ours = Routing(SPECS[kind.partition(",")[0]].mixture.route).forward(router, hidden, *others)
        theirs = type(router).forward(router, hidden, *others)
    assert [each.dtype for each in ours] == [each.dtype for each in theirs]
    torch.testing.assert_close(ours[0], theirs[0])


@pytest.mark.parametrize("kind", _BEST)
def test_of_equal_corrected_scores_the_lower_ids_are_chosen(kind: str) -> None:
    router, others = _corrected(kind, torch.float32)
    for tensor in router.state_dict().values():
        tensor[:] = 0.0
    route = SPECS[kind.partition(",")[0]].mixture.route
    others = [torch.zeros_like(each) for each in others]
    ids = Routing(route).forward(router, torch.randn(5, 24), *others)[2]
    assert ids.tolist() == [[0, 1, 2]] * 5
