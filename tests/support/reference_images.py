"""Small models of images and text, whose classes in transformers hold a decoder of text alone."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.models.llama4 import modeling_llama4

import parallel_ext as px

# Llama 4's class of images in transformers 5.24 asks the output of its text model for it.
if hasattr(modeling_llama4, "MoeCausalLMOutputWithPast"):
    modeling_llama4.MoeCausalLMOutputWithPast.image_outputs = None

IMAGE = 100
"""The token in whose places the features of an image come."""

_TEXT = {
    "vocab_size": IMAGE + 1,
    "hidden_size": 64,
    "intermediate_size": 97,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
_VISION = {
    **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "image_size": 8, "patch_size": 4},
}
_LAYERS = ["linear_attention", "full_attention"]
_QWEN_MIXTURES = ("qwen3_5_moe", "glm4v_moe", "qwen3_vl_moe")
MIXTURES = (*_QWEN_MIXTURES, "llama4")
_QWENS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", *_QWEN_MIXTURES)
_ONE_PLACE = ("internvl", "smolvlm", "idefics3", "llama4", *_QWENS)  # of an image; others have 4

DECODERS = {
    "llava": "LlamaModel",
    "tied llava": "Qwen2Model",
    "vipllava": "LlamaModel",
    "paligemma": "GemmaModel",
    "gemma3": "Gemma3TextModel",
    "gemma4": "Gemma4TextModel",
    "gemma4 e2b": "Gemma4TextModel",
    "mistral3": "MistralModel",
    "internvl": "Qwen2Model",
    "smolvlm": "LlamaModel",
    "idefics3": "LlamaModel",
    "qwen2_vl": "Qwen2VLTextModel",
    "qwen2_5_vl": "Qwen2_5_VLTextModel",
    "qwen3_vl": "Qwen3VLTextModel",
    "qwen3_5": "Qwen3_5TextModel",
    "qwen3_5_moe": "Qwen3_5MoeTextModel",
    "glm4v_moe": "Glm4vMoeTextModel",
    "qwen3_vl_moe": "Qwen3VLMoeTextModel",
    "llama4": "Llama4TextModel",
}
"""Class of the decoder of each kind. Those of Gemma, Mistral, InternVL have tied heads."""

EAGER = {"experts_implementation": "eager"}
"""With which transformers computes experts in fp64."""


def _config(kind: str) -> Any:
    t, clip = transformers, transformers.CLIPVisionConfig(**_VISION, projection_dim=16)
    llama, token = t.LlamaConfig(**_TEXT), {"image_token_index": IMAGE, "image_token_id": IMAGE}
    llava = {"vision_config": clip, **token, "image_seq_length": 4}
    if kind == "llava":
        return t.LlavaConfig(text_config=llama, vision_feature_layer=-1, **llava)
    if kind == "tied llava":
        text = t.Qwen2Config(**_TEXT, tie_word_embeddings=True)
        options = {"text_config": text, "tie_word_embeddings": True, "vision_feature_layer": -1}
        return t.LlavaConfig(**options, **llava)
    if kind == "vipllava":
        return t.VipLlavaConfig(text_config=llama, vision_feature_layers=[-1, -2], **llava)
    siglip, gemma = t.SiglipVisionConfig(**_VISION), {**_TEXT, "head_dim": 16}
    if kind == "paligemma":
        text, sizes = t.GemmaConfig(**gemma), {"projection_dim": 64}
        return t.PaliGemmaConfig(vision_config=siglip, text_config=text, **sizes, **token)
    if kind == "gemma3":
        text, sizes = t.Gemma3TextConfig(**gemma, sliding_window=8), {"mm_tokens_per_image": 4}
        return t.Gemma3Config(vision_config=siglip, text_config=text, **sizes, **token)
    if kind.startswith("gemma4"):
        vision = {**_VISION, "num_key_value_heads": 2, "head_dim": 8, "patch_size": 2}
        vision |= {"pooling_kernel_size": 2, "position_embedding_size": 4}
        text = {**gemma, "global_head_dim": 32, "sliding_window": 8}
        text["layer_types"] = ["sliding_attention", "full_attention"]
        if kind == "gemma4":
            vision["standardize"] = True
            text |= {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
            text |= {"use_bidirectional_attention": "vision", "hidden_size_per_layer_input": 0}
        else:
            text |= {"num_hidden_layers": 4, "num_kv_shared_layers": 2}
            text |= {"layer_types": 2 * text["layer_types"], "hidden_size_per_layer_input": 6}
            text["vocab_size_per_layer_input"] = IMAGE + 1
        return t.Gemma4Config(vision_config=vision, text_config=text, **token)
    if kind == "mistral3":
        vision, text = t.PixtralVisionConfig(**_VISION, head_dim=8), t.MistralConfig(**_TEXT)
        sizes = {"spatial_merge_size": 1, "vision_feature_layer": -1}
        return t.Mistral3Config(vision_config=vision, text_config=text, **sizes, **token)
    if kind == "internvl":
        sides = {"image_size": [8, 8], "patch_size": [4, 4]}
        vision, text = t.InternVLVisionConfig(**{**_VISION, **sides}), t.Qwen2Config(**_TEXT)
        sizes = {"image_seq_length": 1, "vision_feature_layer": -1}
        return t.InternVLConfig(vision_config=vision, text_config=text, **sizes, **token)
    if kind == "llama4":
        vision = {**_VISION, "intermediate_size": 64, "vision_output_dim": 24}
        vision |= {"projector_input_dim": 24, "projector_output_dim": 24}
        text = {**_TEXT, "head_dim": 16, "intermediate_size": 10, "intermediate_size_mlp": 97}
        text |= {"num_local_experts": 5, "num_experts_per_tok": 2, "moe_layers": [1]}
        text |= {"no_rope_layers": [1, 0], "attention_chunk_size": 8}
        return t.Llama4Config(vision_config=vision, text_config=text, **token)
    if kind in _QWENS:
        vision = {
            **{"depth": 2, "hidden_size": 16, "embed_dim": 16, "intermediate_size": 24},
            **{"num_heads": 2, "patch_size": 8, "spatial_merge_size": 1, "temporal_patch_size": 1},
            **{"out_hidden_size": 64, "window_size": 8, "fullatt_block_indexes": [1]},
            **{"deepstack_visual_indexes": [0], "num_position_embeddings": 4},
        }
        if kind == "qwen2_vl":
            vision["hidden_size"] = 64
        rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
        if kind == "glm4v_moe":
            rope |= {"mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}
        text = {**_TEXT, "head_dim": 16, "rope_parameters": rope}
        if kind in _QWEN_MIXTURES:
            text |= {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 10}
            text |= {"n_routed_experts": 6, "n_group": 2, "topk_group": 1, "n_shared_experts": 2}
            text |= {"shared_expert_intermediate_size": 12, "routed_scaling_factor": 0.7}
        if kind.startswith("qwen3_5"):
            text |= {"linear_num_key_heads": 3, "linear_num_value_heads": 6, "layer_types": _LAYERS}
            text |= {"linear_key_head_dim": 8, "linear_value_head_dim": 12}
        return t.CONFIG_MAPPING[kind](vision_config=vision, text_config=text, **token)
    of = {"smolvlm": t.SmolVLMConfig, "idefics3": t.Idefics3Config}[kind]
    return of(vision_config=_VISION, text_config=llama, scale_factor=2, pad_token_id=0, **token)


def tiny_model(kind: str) -> PreTrainedModel:
    """The single-process model in fp64, the same on every rank."""
    config = _config(kind)
    torch.manual_seed(4)
    model = transformers.AutoModelForImageTextToText.from_config(config, **EAGER)
    for name, buffer in model.named_buffers():
        if name.endswith(("e_score_correction_bias", "std_bias", "std_scale")):
            buffer.normal_(std=0.1)
    for parameter in model.parameters():
        if not parameter.any():  # hides errors; of Gemma 3's projection, whatever an image does
            nn.init.normal_(parameter, std=0.1)
    return model.double().train()


def decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """Its decoder of text."""
    if hasattr(model, "language_model"):  # Llama 4's, which has the head too
        return model.language_model.model
    return getattr(model.model, "language_model", None) or model.model.text_model


def image_batch(
    rows: int, kind: str = "llava", seed: int = 5, answers: bool = False
) -> dict[str, torch.Tensor]:
    """Images with texts; with ``answers`` another number of labels counts in each row."""
    generator = torch.Generator().manual_seed(seed)
    places = 1 if kind in _ONE_PLACE else 4
    ids = torch.randint(3, IMAGE, (rows, 5 + places), generator=generator)
    ids[:, 1 : 1 + places] = IMAGE
    pixels = torch.randn(rows, 3, 8, 8, generator=generator).double()
    labels = ids.masked_fill(ids == IMAGE, -100)
    if answers:
        for row in range(rows):
            labels[row, : 5 + row % 3] = -100
    batch = {"input_ids": ids, "pixel_values": pixels, "labels": labels}
    if kind in ("smolvlm", "idefics3"):
        batch["pixel_values"] = pixels[:, None]  # of each image in a row
    if kind.startswith("gemma4"):  # 4 x 4 patches, of which 2 x 2 make one place
        batch["mm_token_type_ids"] = (ids == IMAGE).int()
        batch["pixel_values"] = pixels.view(rows, 16, 12)
        sides = torch.arange(4)
        batch["image_position_ids"] = torch.cartesian_prod(sides, sides).expand(rows, 16, 2)
    if kind == "mistral3":
        batch["image_sizes"] = torch.full((rows, 2), 8)
    if kind == "gemma3":
        batch["token_type_ids"] = (ids == IMAGE).long()
    if kind in _QWENS:  # an image is one patch
        batch["pixel_values"] = pixels.flatten(1)
        batch["image_grid_thw"] = torch.ones(rows, 3, dtype=torch.long)
        batch["mm_token_type_ids"] = (ids == IMAGE).int()
    if kind == "paligemma":  # what is answered
        batch["token_type_ids"] = (torch.arange(5 + places) > 5).long().repeat(rows, 1)
    return batch


def exact_loss(logits: Any, labels: Any, vocab_size: int, **options: Any) -> torch.Tensor:
    """transformers' loss of a causal model, which goes by fp32, in fp64."""
    shifted = nn.functional.pad(labels, (0, 1), value=-100)[..., 1:]
    return nn.functional.cross_entropy(logits.reshape(-1, vocab_size), shifted.reshape(-1))


def parallel_pair(kind: str, mesh: px.Mesh, **options: Any) -> tuple[Any, Any]:
    """The model of one process, and the same with a parallel decoder."""
    reference = tiny_model(kind)
    ours = copy.deepcopy(reference)
    reference.loss_function = exact_loss
    assert type(decoder_of(ours)).__name__ == DECODERS[kind]
    assert px.parallelize(ours, mesh) is ours
    px.data_parallel(ours, mesh, **options)
    return reference, ours


def losses_of(kind: str, models: tuple[Any, Any], mesh: px.Mesh, step: int) -> list[torch.Tensor]:
    """Losses of one process, and of this dp rank's rows."""
    batch = image_batch(4, kind, step)
    own = slice(*(4 * rank // mesh.dp_size for rank in (mesh.dp_rank, mesh.dp_rank + 1)))
    rows = zip(models, (slice(None), own), strict=True)
    return [model(**{n: each[of] for n, each in batch.items()}).loss for model, of in rows]
