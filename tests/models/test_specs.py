"""Every architecture that is a mere spec trains, saves and generates as the single process."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MethodType
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from ranks import pool
from reference import (
    assert_within,
    batch,
    difference,
    exact,
    mesh_of,
    parallel,
)
from reference_life import differences_in_life
from reference_mixtral import Layout, batches, differences_of_adapter, differences_of_steps, parity
from torch import nn
from transformers.models.flex_olmo import modeling_flex_olmo
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.granite_swa import modeling_granite_swa
from transformers.models.minimax_m2 import modeling_minimax_m2
from transformers.models.olmo2 import modeling_olmo2
from transformers.models.olmo3 import modeling_olmo3
from transformers.models.olmoe import modeling_olmoe
from transformers.models.phi3 import modeling_phi3
from transformers.models.vaultgemma import modeling_vaultgemma

import parallel_ext as px
from parallel_ext.models import SPECS
from parallel_ext.models.spec import ModelSpec
from parallel_ext.parallel.validate import is_too_old_for, spec_for

_EXPERTS = {
    **{"num_experts_per_tok": 2, "moe_intermediate_size": 16, "experts_implementation": "eager"},
}
_GROUPS = {
    **_EXPERTS,
    **{"n_routed_experts": 6, "n_group": 3, "topk_group": 2, "n_shared_experts": 2},
    **{"first_k_dense_replace": 1, "routed_scaling_factor": 1.7, "norm_topk_prob": True},
}
_LOW_RANK = {
    **{"num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 4, "kv_lora_rank": 16},
    **{"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 10},
}
_DELTA_NET = {
    **{"linear_num_key_heads": 3, "linear_num_value_heads": 6, "linear_key_head_dim": 8},
    **{"linear_value_head_dim": 12, "layer_types": ["linear_attention", "full_attention"]},
}


def _model_type(kind: str) -> str:
    return kind.partition(" ")[0]


_TWO_HEAD_SIZES = {
    **{"global_head_dim": 16, "sliding_window": 4, "final_logit_softcapping": 0.5},
    **{"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 101},
    "layer_types": ["sliding_attention", "full_attention"],
}
_OF_GRANITE = {
    **{"num_local_experts": 5, "num_experts_per_tok": 2, "experts_implementation": "eager"},
    **{"logits_scaling": 3.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.7},
    **{"attention_multiplier": 0.3, "intermediate_size": 16},
}
_KEYS_ARE_VALUES = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
KINDS = {  # a model_type, which words may follow
    "mistral": {"sliding_window": 3},
    "qwen2": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "qwen3": {"attention_bias": True},
    "smollm3": {"no_rope_layer_interval": 2},
    "granite": {
        **{"logits_scaling": 3.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.7},
        "attention_multiplier": 0.3,
    },
    "gemma": {},
    "gemma2": {
        **{"sliding_window": 4, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 0.4},
        "query_pre_attn_scalar": 5,
    },
    "qwen2_moe": {
        **{"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        **{"shared_expert_intermediate_size": 17, "mlp_only_layers": [0]},
        "experts_implementation": "eager",
    },
    "olmo2": {},
    "olmo3": {"sliding_window": 4},
    "phi3": {"partial_rotary_factor": 0.5},
    "gemma3_text": {"sliding_window": 4, "final_logit_softcapping": 0.5},
    "ministral": {"sliding_window": 3},
    "ministral3": {
        "rope_parameters": {
            **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0},
            **{"original_max_position_embeddings": 4, "llama_4_scaling_beta": 0.3},
        }
    },
    "seed_oss": {"residual_dropout": 0.0},
    "olmo": {"clip_qkv": 0.3},
    "helium": {},
    "exaone4": {"sliding_window": 4, "sliding_window_pattern": 2},
    "hunyuan_v1_dense": {"attention_bias": True},
    "glm": {},
    "glm4": {},
    "cohere": {"logit_scale": 0.3, "use_qk_norm": True},
    "cohere2": {"sliding_window": 4, "logit_scale": 0.3},
    "nemotron": {"mlp_bias": True},
    "arcee": {},
    "starcoder2": {"sliding_window": 4, "residual_dropout": 0.0, "embedding_dropout": 0.0},
    "olmoe": {
        **{"num_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 16, "clip_qkv": 0.3},
        "experts_implementation": "eager",
    },
    "ernie4_5": {"use_bias": True},
    "ernie4_5_moe": {
        **_EXPERTS,
        **{"moe_num_experts": 5, "moe_k": 2, "moe_num_shared_experts": 2, "use_bias": True},
        "moe_layer_start_index": 1,
    },
    "minimax_m2": {**_EXPERTS, "num_local_experts": 5, "intermediate_size": 16},
    "glm4_moe": {**_GROUPS, "use_qk_norm": True},
    "dots1": _GROUPS,
    "deepseek_v2": {
        **_GROUPS,
        **_LOW_RANK,
        **{"q_lora_rank": 20, "topk_method": "group_limited_greedy", "topk_group": 1},
    },
    "deepseek_v3": {**_GROUPS, **_LOW_RANK, "q_lora_rank": 20},
    "qwen3_5_text": _DELTA_NET,
    "qwen3_5_moe_text": {
        **_DELTA_NET,
        **_EXPERTS,
        **{"num_experts": 5, "shared_expert_intermediate_size": 17},
    },
    "qwen3_next": {
        **_DELTA_NET,
        **_EXPERTS,
        **{"num_experts": 5, "shared_expert_intermediate_size": 17, "norm_topk_prob": True},
    },
    "llama4_text": {
        **{"num_local_experts": 5, "num_experts_per_tok": 2, "moe_layers": [1]},
        **{"intermediate_size": 16, "intermediate_size_mlp": 37, "attention_chunk_size": 5},
        **{"no_rope_layers": [1, 0], "floor_scale": 4, "num_hidden_layers": 2},
    },
    "gpt_oss": {**_EXPERTS, "num_local_experts": 5, "intermediate_size": 16, "sliding_window": 4},
    "glm4_moe_lite": {**_GROUPS, **_LOW_RANK, "q_lora_rank": None, "norm_topk_prob": False},
    "internlm3": {"bias": True, "qkv_bias": True},
    "iquestcoder": {},
    "cwm": {"sliding_window": 4},
    "jais2": {},
    "granite_swa": {
        **{"logits_scaling": 3.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.7},
        **{"attention_multiplier": 0.3, "sliding_window": 4},
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "hyperclovax": {"logits_scaling": 0.3, "embedding_multiplier": 2.0},
    "nanochat": {"final_logit_softcapping": 0.4},
    "vaultgemma": {
        **{"sliding_window": 4, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 0.4},
    },
    "minicpm3": {**_LOW_RANK, "q_lora_rank": 20, "scale_emb": 3, "dim_model_base": 24},
    "youtu": {**_LOW_RANK, "q_lora_rank": 20},
    "flex_olmo": {
        **{"num_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 16},
        "experts_implementation": "eager",
    },
    "mellum": {
        **_EXPERTS,
        **{"num_experts": 5, "mlp_layer_types": ["dense", "sparse"], "sliding_window": 4},
    },
    "solar_open": {**_GROUPS, "n_shared_experts": 1},
    "exaone_moe": {**_GROUPS, "num_experts": 6, "num_shared_experts": 2, "sliding_window": 4},
    "gemma4_text": {**_TWO_HEAD_SIZES, **_KEYS_ARE_VALUES},
    "gemma4_unified_text": {**_TWO_HEAD_SIZES, "num_global_key_value_heads": 1},
    "gemma4_text that shares keys": {
        **_TWO_HEAD_SIZES,
        **{"hidden_size_per_layer_input": 5, "num_kv_shared_layers": 2, "num_hidden_layers": 4},
        **{"layer_types": 2 * _TWO_HEAD_SIZES["layer_types"], "use_double_wide_mlp": True},
    },
    "gemma4_text with experts": {
        **_TWO_HEAD_SIZES,
        **_KEYS_ARE_VALUES,
        **{"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2},
        **{"moe_intermediate_size": 16, "experts_implementation": "eager"},
    },
    "hy_v3": {
        **_EXPERTS,
        **{"num_experts": 5, "num_shared_experts": 2, "mlp_layer_types": ["dense", "sparse"]},
    },
    "granitemoe": _OF_GRANITE,
    "granitemoeshared": {**_OF_GRANITE, "shared_intermediate_size": 17},
    "hunyuan_v1_moe": {**_EXPERTS, "num_experts": 5, "moe_topk": 2, "intermediate_size": 16},
    "afmoe": {
        **_EXPERTS,
        **{"num_experts": 5, "num_shared_experts": 2, "num_dense_layers": 1, "route_scale": 1.7},
        **{"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4},
    },
}

KINDS = {  # not all are in 5.15, or are there as they are now
    kind: KINDS[kind]
    for kind in KINDS
    if _model_type(kind) in transformers.CONFIG_MAPPING
    if not is_too_old_for(SPECS[_model_type(kind)])
}
# Classes of Llama, DeepSeek, OLMoE or Qwen by other names: one test of each in every run.
_ALIKE = (
    *("internlm3", "iquestcoder", "cwm", "jais2", "youtu"),
    *("flex_olmo", "mellum", "solar_open", "gemma4_unified_text"),
)
_EAGER = ("gemma2", "gpt_oss", "granite_swa", "vaultgemma")  # which the classes ask for


@dataclass(frozen=True)
class OfSpec:
    """A small model of some architecture; the sizes divide nothing."""

    kind: str
    tied: bool = False
    heads: int = 9
    key_value_heads: int = 3
    vocab_size: int = 101
    dtype: torch.dtype = torch.float64

    def config(self) -> transformers.PreTrainedConfig:
        sizes = {
            "vocab_size": self.vocab_size,
            "hidden_size": 8 * self.heads,
            "intermediate_size": 37,
            "num_hidden_layers": 2,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_value_heads,
            "head_dim": 8,
            "tie_word_embeddings": self.tied,
            "max_position_embeddings": 64,
            "attn_implementation": "eager" if self.kind in _EAGER else "sdpa",
            "attention_dropout": 0.0,
            **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
        }
        return transformers.CONFIG_MAPPING[_model_type(self.kind)](**sizes | KINDS[self.kind])

    @property
    def spec(self) -> ModelSpec:
        return SPECS[_model_type(self.kind)]

    @property
    def has_experts(self) -> bool:
        mixture = self.spec.mixture
        return mixture is not None and getattr(self.config(), mixture.num_experts) is not None

    def model(self, seed: int = 1) -> transformers.PreTrainedModel:
        """The single-process model, the same on every rank."""
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(self.config()).to(self.dtype).train()
        # Initial biases and routers of 0 and norms of 1 hide errors.
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 or name.endswith("bias") or not parameter.any():
                nn.init.normal_(parameter, mean=1.0, std=0.3)
        for name, tensor in model.state_dict().items():
            if name.endswith(("correction_bias", "layer_scalar")):
                nn.init.normal_(tensor, mean=float(name.endswith("scalar")), std=0.1)
        return model if self.dtype != torch.float64 else _exact(model)


def with_dropout() -> transformers.PreTrainedModel:
    """A model whose class drops by a function, which no module tells."""
    config = OfSpec("starcoder2").config()
    config.residual_dropout = 0.1
    torch.manual_seed(1)
    return transformers.AutoModelForCausalLM.from_config(config)


def _gemma_norm(self: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    return nn.functional.rms_norm(hidden, hidden.shape[-1:], 1 + self.weight, self.eps)


def _gemma4_norm(self: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    weight = self.weight if getattr(self, "with_scale", True) else None
    return nn.functional.rms_norm(hidden, hidden.shape[-1:], weight, self.eps)


def _norm_without_weight(self: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    return nn.functional.rms_norm(hidden, hidden.shape[-1:], eps=self.eps)


def _layer_norm(self: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    return nn.functional.layer_norm(hidden, hidden.shape[-1:]) * getattr(self, "weight", 1.0)


def _norm_of_shards(cls: type) -> Callable[[nn.Module, torch.Tensor], torch.Tensor]:
    def forward(self: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(hidden, hidden.shape[-1:], self.weight, self.variance_epsilon)

    forward.__module__ = cls.__module__  # parallelize refuses one from elsewhere
    return forward


_NORMS_OF_SHARDS = (
    modeling_flex_olmo.FlexOlmoRMSNorm,
    modeling_minimax_m2.MiniMaxM2RMSNorm,
    modeling_olmo2.Olmo2RMSNorm,
    modeling_olmo3.Olmo3RMSNorm,
    modeling_olmoe.OlmoeRMSNorm,
)


def _eager_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float,
    softcap: float,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Gemma 2's and VaultGemma's, without its softmax in fp32."""
    key, value = (x.repeat_interleave(module.num_key_value_groups, 1) for x in (key, value))
    scores = torch.tanh(query @ key.mT * scaling / softcap) * softcap
    return ((scores + attention_mask).softmax(-1) @ value).transpose(1, 2), None


def _attention_with_sinks(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Granite's, whose fp32 cannot hold the mask of fp64."""
    key, value = (x.repeat_interleave(module.num_key_value_groups, 1) for x in (key, value))
    scores = query @ key.mT * scaling + attention_mask
    sinks = module.sinks.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    return (weights @ value).transpose(1, 2), None


def _exact(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    model = exact(model)
    for name, module in model.named_modules():
        if name.endswith(("q_norm", "k_norm")) and isinstance(module, _NORMS_OF_SHARDS):
            del module.forward  # which the parallel one has itself; see in_fp64
    for module in model.modules():
        if re.fullmatch("(Gemma4|Gemma4Unified|Llama4Text)RMSNorm", type(module).__name__):
            module.forward = MethodType(_gemma4_norm, module)
        elif re.fullmatch("(Gemma|VaultGemma|Qwen3_5|Qwen3Next).*RMSNorm", type(module).__name__):
            module.forward = MethodType(_gemma_norm, module)
        if type(module).__name__ in ("NanoChatRMSNorm", "Llama4TextL2Norm"):
            module.forward = MethodType(_norm_without_weight, module)
        if type(module).__name__.endswith("LayerNorm") and type(module) is not nn.LayerNorm:
            module.forward = MethodType(_layer_norm, module)
    return model


@contextmanager
def in_fp64() -> Iterator[None]:
    """Let what no instance can have of its own compute in fp64 inside the context."""
    patch = mock.patch.object
    with ExitStack() as patches:
        for capped in (modeling_gemma2, modeling_vaultgemma):
            patches.enter_context(patch(capped, "eager_attention_forward", _eager_attention))
        patches.enter_context(
            patch(modeling_granite_swa, "eager_attention_forward", _attention_with_sinks)
        )
        for norm in _NORMS_OF_SHARDS:
            patches.enter_context(patch(norm, "forward", _norm_of_shards(norm)))
        yield


_IN_FP32 = (
    *("ernie4_5_moe", "minimax_m2", "glm4_moe", "dots1"),
    *("deepseek_v2", "deepseek_v3", "glm4_moe_lite"),
    *("solar_open", "exaone_moe", "hy_v3", "gemma4_text with experts"),
    *("hunyuan_v1_moe", "afmoe", "llama4_text"),
)


def _tolerance(kind: str) -> float:
    """Of a fp64 model: some routers and delta rules are computed in fp32."""
    if kind.startswith("granitemoe"):  # of small weights AdamW makes more of a gradient's rounding
        return 2e-3
    in_fp32 = kind in _IN_FP32 or OfSpec(kind).spec.delta_net is not None
    return 3e-5 if in_fp32 else 1e-10


@in_fp64()
def _in_life(tiny: OfSpec, layout: Layout, folder: str, sizes: tuple[int, ...]) -> dict[str, float]:
    return differences_in_life(tiny, layout, folder, sizes=sizes)


SIZES = {"granite": (104, 99), "gemma3_text": (104,)}  # to which some are resized
CASES = {
    **{
        kind: (OfSpec(kind, tied=number % 2 == 1), 2, SIZES.get(kind, ()))
        for number, kind in enumerate(KINDS)
    },
    "qwen2, one key-value head": (OfSpec("qwen2", key_value_heads=1), 2, ()),
    "qwen3, one key-value head": (OfSpec("qwen3", key_value_heads=1), 3, ()),
    "olmo2, one key-value head": (OfSpec("olmo2", key_value_heads=1), 3, ()),
}


@pytest.mark.parametrize("case", CASES)
def test_a_model_is_that_of_one_process_from_its_first_save_to_its_last(
    case: str, tmp_path: Path
) -> None:
    tiny, tp, sizes = CASES[case]
    layout = Layout(1, tp, tp if tiny.has_experts else 1)
    found = pool(tp).run(_in_life, tiny, layout, str(tmp_path), sizes)
    assert_within(found, _tolerance(tiny.kind))


@pytest.mark.parametrize("kind", KINDS)
def test_a_decoder_alone_has_the_same_sublayers(kind: str) -> None:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(OfSpec(kind).config())
    whole = spec_for(model)
    decoder = model.get_submodule(whole.decoder)
    expected = whole.sublayers(dict(model.named_parameters()))
    found = spec_for(decoder).sublayers(dict(decoder.named_parameters()))
    assert found.keys() == {path.removeprefix(whole.in_decoder) for path in expected} != set()


def _dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    return {name: each.dtype for name, each in model.named_parameters()}


def _loaded(source: str) -> dict[str, Any]:
    """What a model from files computes, beside what transformers' own computes."""
    plain = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    model = px.from_pretrained(source, mesh_of(), dtype=torch.float32)
    one, prompt = batch(101), torch.tensor([[5, 6, 7, 8, 9, 10]])
    evaluated, expected = model(**one), plain.eval()(**one)
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with torch.no_grad():
        tokens = plain.generate(prompt, **options)
        ours = (model.generate(prompt, **options), px.generate(model, prompt, **options))
    model.train()
    found = {
        "logits": difference(evaluated.logits, expected.logits),
        "loss": difference(evaluated.loss, expected.loss),
        "loss in training": difference(model(**one).loss, expected.loss),
        "tokens": max(float(not torch.equal(each, tokens)) for each in ours),
    }
    plain = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    model = px.from_pretrained(source, mesh_of(), dtype=torch.bfloat16)
    found["dtypes"] = float(_dtypes(model) != _dtypes(plain))  # some routers stay fp32
    if SPECS[model.config.model_type].mixture is None:  # transformers' experts take no fp64
        exact = px.from_pretrained(source, mesh_of(), dtype="float64").train()
        found["gradients"] = px.check_gradients(exact, batch(101, left=False)).worst[1]
    return found


def _unlike(kinds: Iterable[str]) -> list[Any]:
    """Cases of a test, of which those of classes like others are slow."""
    return [pytest.param(kind, marks=[pytest.mark.slow] * (kind in _ALIKE)) for kind in kinds]


@pytest.mark.parametrize("kind", _unlike(KINDS))
def test_a_model_of_files_evaluates_and_generates_as_that_of_transformers(
    kind: str, tmp_path: Path
) -> None:
    """Also where the files and their configuration are bf16, and the model is not."""
    replace(OfSpec(kind, tied=True), dtype=torch.bfloat16).model().save_pretrained(tmp_path)
    assert_within(pool(2).run(_loaded, str(tmp_path)), 1e-5)


@in_fp64()
def _parity(*args: Any) -> dict[str, float]:
    return parity(*args)


_NOT_BY_TOKENS = {
    "olmo": "needs one norm with weights behind the decoder layers",
    "nanochat": "needs one norm with weights behind the decoder layers",
    "gemma4_text that shares keys": "to which they would add all that model.embed_tokens_per_layer",
    "gemma4_text with experts": "does not serve experts beside the MLP",
}


@pytest.mark.parametrize("kind", _unlike(sorted({*KINDS} - {*_NOT_BY_TOKENS})))
def test_sequence_parallel_training_equals_the_single_process(kind: str) -> None:
    tiny, tp = OfSpec(kind), 2
    attention = tiny.spec.attention
    normed = attention and (attention.head_norms or attention.key_norm)
    if normed and kind != "cohere":  # which rotates in fp32, so that a last bit may grow
        tiny, tp = replace(tiny, key_value_heads=1), 3  # the norms of replicated keys
    options = {"sequence_parallel": True}
    found = pool(tp).run(_parity, tiny, Layout(1, tp, 1), None, options)
    assert_within(found, _tolerance(kind))


def _in_sequence(kind: str) -> None:
    px.parallelize(OfSpec(kind, dtype=torch.float32).model(), mesh_of(), sequence_parallel=True)


@pytest.mark.parametrize("kind", _NOT_BY_TOKENS)
def test_what_cannot_divide_its_tokens_is_refused(kind: str) -> None:
    pool(2).assert_raises(_in_sequence, kind, error="ValueError", words=_NOT_BY_TOKENS[kind])


def _dropped(seed_of_rank: int) -> float:
    """The loss beside that of one process, from a random state that may be this rank's own."""
    one, losses = batch(101), []
    plain = with_dropout()
    for model in (plain, parallel(plain, mesh_of())):
        torch.manual_seed(seed_of_rank * mesh_of().rank)
        losses.append(model.train()(**one).loss)
    return difference(losses[1], losses[0])


def test_dropout_by_a_function_has_the_masks_of_one_process() -> None:
    assert max(pool(2).run(_dropped, 0)) < 1e-5


def test_dropout_by_a_function_of_other_random_numbers_is_refused() -> None:
    pool(2).assert_raises(_dropped, 1, error="DisagreementError", words="random state")


_LLAMAS = tuple(f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down"))


_OTHER_LINEARS = {
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    "glm4": (*_LLAMAS[:4], "gate_up_proj", "down_proj"),
    "starcoder2": (*_LLAMAS[:4], "c_fc", "c_proj"),
    "deepseek_v3": ("q_b_proj", "kv_b_proj", *_LLAMAS[3:]),
    "gpt_oss": _LLAMAS[:4],
    "qwen3_5_text": (*_LLAMAS, "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"),
}


@pytest.mark.parametrize(
    "kind",
    ["qwen2_moe", "qwen3", "granite", "gemma3_text", "olmo2", "cohere", "olmoe", *_OTHER_LINEARS],
)
def test_adapters_have_the_gradients_of_peft(kind: str) -> None:
    projections = _OTHER_LINEARS.get(kind, _LLAMAS)
    options = {"r": 3, "target_modules": [*projections, "embed_tokens", "lm_head"]}
    assert_within(pool(2).run(_adapted, kind, options), _tolerance(kind))


@in_fp64()
def _adapted(kind: str, options: dict[str, Any]) -> dict[str, float]:
    tiny, layout = OfSpec(kind), Layout(1, 2, 1)
    return differences_of_adapter(tiny.model, layout, batches(tiny, layout.dp), **options)


@pytest.mark.parametrize(
    ("kind", "field"),
    [("granite", "logits_divisor"), ("gemma2", "logits_softcap")],
)
def test_a_loss_that_does_not_know_what_the_class_does_to_the_logits_is_refused(
    kind: str, field: str
) -> None:
    pool(2).assert_raises(_without, kind, field, words="changes what the output head returns")


def _without(kind: str, field: str) -> None:
    px.register(replace(SPECS[kind], **{field: None}), replace=True)
    try:
        model = parallel(OfSpec(kind).model(), mesh_of())
        model(**batch(101)).loss.backward()
    finally:
        px.register(replace(SPECS[kind], **{field: _FIELDS[field]}), replace=True)


def test_ranks_with_other_specs_raise_on_every_rank() -> None:
    pool(2).assert_raises(_other_specs, error="DisagreementError", words="ModelSpec(")


def _other_specs() -> None:
    own = replace(SPECS["llama"], towers=("model.layers",) * mesh_of().rank)
    px.register(own, replace=True)
    try:
        px.parallelize(transformers.LlamaForCausalLM(_llama()), mesh_of())
    finally:
        px.register(replace(own, towers=()), replace=True)


def _llama() -> transformers.LlamaConfig:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "vocab_size": 11}
    return transformers.LlamaConfig(**sizes, num_hidden_layers=1)


LLAMA = SPECS["llama"]


@pytest.mark.parametrize(
    ("spec", "error", "words"),
    [
        ("llama", TypeError, "expected a px.models.ModelSpec, got str"),
        (replace(LLAMA, model_type="new", head=""), ValueError, "head is empty"),
        (replace(LLAMA, model_type="new", mlp="mlp"), TypeError, "mlp is 'mlp', a str"),
        (
            replace(LLAMA, model_type="new", attention=None, mlp=None),
            ValueError,
            "nothing would be sharded but the vocabulary",
        ),
        (replace(LLAMA, model_type="cogagent"), ValueError, "'cogagent' is a model of this"),
        (replace(LLAMA, head="model.head"), ValueError, "pass replace=True"),
    ],
)
def test_register_refuses(spec: Any, error: type[Exception], words: str) -> None:
    before = dict(SPECS)
    with pytest.raises(error, match=words):
        px.register(spec)
    assert before == SPECS


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("qwen3_vl", "it holds a decoder, 'qwen3_vl_text': load the model with transformers"),
        ("gpt2", "px.register takes a spec of your own"),
    ],
)
def test_a_model_without_a_spec_is_refused_with_what_is_missing(kind: str, words: str) -> None:
    model = nn.Module()
    model.config = transformers.CONFIG_MAPPING[kind]()
    with pytest.raises(ValueError, match=words):
        px.parallelize(model, px.init_mesh())


def test_a_parameter_of_an_attention_that_no_spec_names_is_refused() -> None:
    model = transformers.LlamaForCausalLM(_llama())
    model.model.layers[0].self_attn.sinks = nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match="layers.0.self_attn.sinks: the spec does not say"):
        px.parallelize(model, px.init_mesh())


def test_a_parameter_of_an_mlp_that_no_spec_names_is_refused() -> None:
    model = transformers.LlamaForCausalLM(_llama())
    model.model.layers[0].mlp.norm = nn.RMSNorm(8)  # between gate and down each rank has a part
    with pytest.raises(ValueError, match="layers.0.mlp.norm.weight: the spec does not say"):
        px.parallelize(model, px.init_mesh())


def _a_gate_for_each_head(attention: nn.Module) -> None:
    attention.gate_proj = nn.Linear(attention.gate_proj.in_features, 6, bias=False)


def _a_wider_output(attention: nn.Module) -> None:
    wide = attention.o_proj.in_features + 2
    attention.o_proj = nn.Linear(wide, attention.o_proj.out_features, bias=False)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_a_gate_for_each_head, "self_attn.gate_proj has 6 output features, but by config.num_att"),
        (_a_wider_output, r"self_attn.o_proj has \d+ input features, but by config.num_attention"),
    ],
)
def test_projections_of_an_attention_must_have_the_features_of_its_heads(
    change: Callable[[nn.Module], None], words: str
) -> None:
    model = OfSpec("afmoe", dtype=torch.float32).model()
    change(model.model.layers[0].self_attn)
    with pytest.raises(ValueError, match=words):
        px.parallelize(model, px.init_mesh())


class _NormedAttention(modeling_phi3.Phi3Attention):
    """With one linear for query, key and value, and norms of single heads."""

    def __init__(self, config: transformers.PreTrainedConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.q_norm, self.k_norm = (modeling_phi3.Phi3RMSNorm(self.head_dim) for _ in range(2))

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: Any, *_: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        heads, of_keys = self.config.num_attention_heads, self.num_key_value_heads
        joined = self.qkv_proj(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        query, key, value = joined.split([heads, of_keys, of_keys], 1)
        query, key = self.q_norm(query), self.k_norm(key)
        mixed = nn.functional.scaled_dot_product_attention(
            *(query, key, value), is_causal=True, enable_gqa=True
        )
        return self.o_proj(mixed.transpose(1, 2).flatten(2)), None


@contextmanager
def _phi3(dtype: torch.dtype, **names: Any) -> Iterator[transformers.PreTrainedModel]:
    """A Phi-3 of this attention inside the context, and a spec with these names of norms."""
    known = SPECS["phi3"]
    with mock.patch.object(modeling_phi3, "Phi3Attention", _NormedAttention):
        model = OfSpec("phi3", dtype=dtype).model()
    px.register(replace(known, attention=replace(known.attention, **names)), replace=True)
    try:
        yield model
    finally:
        px.register(known, replace=True)


def _normed(sequence_parallel: bool) -> dict[str, float]:
    with _phi3(torch.float64, head_norms=("q_norm", "k_norm")) as reference:
        model = parallel(reference, mesh_of(), sequence_parallel=sequence_parallel)
        one = batches(OfSpec("phi3"), 1)
        return differences_of_steps(reference, model, mesh_of(), [one])


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_norms_of_heads_of_a_joined_attention_have_the_gradients_of_one_process(
    sequence_parallel: bool,
) -> None:
    assert_within(pool(3).run(_normed, sequence_parallel))


@pytest.mark.parametrize(
    ("names", "what"),
    [
        ({"query_norm": "q_norm", "key_norm": "k_norm"}, "self_attn.q_norm.weight.*"),
        ({"gated": True, "head_norms": ("q_norm", "k_norm")}, "self_attn"),
    ],
    ids=["norms over all heads", "gates"],
)
def test_what_a_joined_attention_cannot_have_is_refused(names: dict[str, Any], what: str) -> None:
    words = f"{what}: norms over all heads, gates and parameters of heads are not served where one"
    names = {"norm_class": "Phi3RMSNorm", **names}
    with _phi3(torch.float32, **names) as model, pytest.raises(ValueError, match=words):
        px.parallelize(model, px.init_mesh())


_FIELDS = {"logits_divisor": "logits_scaling", "logits_softcap": "final_logit_softcapping"}


@pytest.mark.parametrize(
    ("kind", "zero"), [("mistral", 2), ("gemma3_text", 3), ("phi3", 3), ("olmo2", 2)]
)
def test_dp_ranks_train_as_one_process(kind: str, zero: int) -> None:
    assert_within(pool(4).run(_parity, OfSpec(kind), Layout(2, 2, 1), zero))


@pytest.mark.parametrize("zero", [2, 3])
def test_dp_ranks_train_a_norm_of_key_heads_that_several_ranks_hold(zero: int) -> None:
    tiny = OfSpec("olmo2", key_value_heads=1)
    assert_within(pool(4).run(_parity, tiny, Layout(2, 2, 1), zero))


def _with_an_older_transformers() -> None:
    model = OfSpec("granitemoe").model()
    with mock.patch.object(transformers, "__version__", "5.20.1"):
        px.parallelize(model, mesh_of())


@pytest.mark.skipif("granitemoe" not in KINDS, reason="this transformers is too old for it")
def test_classes_that_were_others_in_an_older_transformers_are_refused() -> None:
    words = "'granitemoe' needs transformers 5.21 or newer; this is 5.20.1"
    pool(2).assert_raises(_with_an_older_transformers, error="ValueError", words=words)
