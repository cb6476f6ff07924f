"""The configuration of CogAgent, field by field as the published ``config.json`` has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal  # noqa: F401  Literal is in annotations of the inherited __init__

from transformers import GenerationConfig, PreTrainedConfig

from parallel_ext.models.cogagent.templates import TEMPLATES

VISION: dict[str, Any] = {
    "dropout_prob": 0.0,
    "hidden_act": "gelu",
    "hidden_size": 1792,
    "image_size": 224,
    "in_channels": 3,
    "intermediate_size": 15360,
    "layer_norm_eps": 1e-6,
    "num_heads": 16,
    "num_hidden_layers": 63,
    "num_positions": 257,
    "patch_size": 14,
}
"""EVA2-CLIP-E, as published."""

CROSS_VISION: dict[str, Any] = {
    "layers": 24,
    "width": 1024,
    "head_width": 64,
    "mlp_ratio": 2.6667,
    "patch_size": 14,
    "pretrained_grid": 16,
    "embed_dim": 768,
}
"""EVA2-CLIP-L, which the published code holds in itself and not in ``config.json``."""

# What other versions of transformers wrote into every config.json; none of it changes this model.
_HARMLESS = {
    *("auto_map", "torch_dtype", "name_or_path", "num_labels", "output_attentions"),
    *("attn_implementation", "experts_implementation", "tokenizer_class", "torchscript"),
    *("use_bfloat16", "pruned_heads", "is_decoder", "add_cross_attention", "tie_encoder_decoder"),
    *("cross_attention_hidden_size", "finetuning_task", "task_specific_params", "model_type"),
    *("prefix", "sep_token_id", "decoder_start_token_id", "tf_legacy_loss"),
}


class CogAgentConfig(PreTrainedConfig):
    """The sizes of a CogAgent; the defaults are those of cogagent-chat-hf.

    Args:
        vocab_size, hidden_size, intermediate_size, num_hidden_layers, num_attention_heads: of the
            decoder.
        cross_hidden_size: width of what the high-resolution tower gives.
        cross_compute_hidden_size: width of the queries, keys and values of the cross attention.
        cross_image_size: pixels along each side of a high-resolution image.
        vision_config: fields of EVA2-CLIP-E; those that are left out are the published ones.
        cross_vision_config: fields of EVA2-CLIP-L, for towers that are smaller than the published
            one; those that are left out are the published ones.
        template_version: a key of :data:`~.templates.TEMPLATES`, how a question is written for this
            checkpoint.

    Raises:
        ValueError: sizes that do not fit each other, and fields that this model does not know.

    >>> CogAgentConfig(num_hidden_layers=2).image_tokens
    258
    """

    model_type = "cogagent"
    keys_to_ignore_at_inference = ["past_key_values"]

    vocab_size: int = 32000
    hidden_size: int = 4096
    cross_hidden_size: int = 1024
    cross_compute_hidden_size: int = 1024
    cross_image_size: int = 1120
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    template_version: str = "chat"
    use_cache: bool = True
    pad_token_id: int | None = 0
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    tie_word_embeddings: bool = False
    vision_config: dict[str, Any] | None = None
    cross_vision_config: dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        known = _HARMLESS | vars(GenerationConfig()).keys()
        unknown = sorted(name for name in kwargs if name not in known and not name.startswith("_"))
        if unknown:
            raise ValueError(
                f"CogAgentConfig: unknown fields {unknown}; this model would leave them out of its "
                "computation. Remove them if the checkpoint does not need them"
            )
        # Two configurations would write into one dict, if they shared it.
        self.vision_config = _filled("vision_config", self.vision_config, VISION)
        self.cross_vision_config = _filled(
            "cross_vision_config", self.cross_vision_config, CROSS_VISION
        )
        self._check_sizes()
        super().__post_init__(**kwargs)

    @property
    def image_tokens(self) -> int:
        """Return the number of tokens of one image: its patches, a begin and an end."""
        return _patches("vision_config.image_size", self.vision_config, "image_size") + 2

    def _check_sizes(self) -> None:
        eva, cross = self.vision_config, self.cross_vision_config
        heads = self.num_attention_heads
        for config, part, whole in (
            ("", "num_attention_heads", "hidden_size"),
            ("", "num_attention_heads", "cross_compute_hidden_size"),
            ("vision_config", "num_heads", "hidden_size"),
            ("cross_vision_config", "head_width", "width"),
        ):
            _divides(config, getattr(self, config) if config else vars(self), part, whole)
        if self.hidden_size // heads % 2 or cross["head_width"] % 4:
            raise ValueError(
                "CogAgentConfig: rotary positions turn pairs: a head of the decoder has "
                f"{self.hidden_size // heads} numbers and must have a multiple of 2; "
                f"cross_vision_config.head_width is {cross['head_width']} and must be a multiple "
                "of 4"
            )
        if self.cross_hidden_size != cross["width"]:
            raise ValueError(
                f"CogAgentConfig: cross_hidden_size is {self.cross_hidden_size}, but the tower "
                f"gives cross_vision_config.width = {cross['width']}; they must be equal"
            )
        if (found := self.image_tokens - 1) != eva["num_positions"]:
            raise ValueError(
                f"CogAgentConfig: vision_config.num_positions is {eva['num_positions']}, but an "
                f"image of {eva['image_size']} pixels has {found} patches and class tokens"
            )
        _patches("cross_image_size", {**cross, "size": self.cross_image_size}, "size")
        _chosen("vision_config.dropout_prob", eva["dropout_prob"], (0.0,))
        _chosen("tie_word_embeddings", self.tie_word_embeddings, (False,))
        _chosen("template_version", self.template_version, tuple(TEMPLATES))


def _filled(name: str, given: Mapping[str, Any] | None, published: dict[str, Any]) -> dict:
    given = dict(given or {})
    if unknown := sorted(given.keys() - published.keys()):
        raise ValueError(
            f"CogAgentConfig: unknown fields {unknown} in {name}; known are {sorted(published)}"
        )
    return {**published, **given}


def _patches(name: str, config: Mapping[str, Any], field: str) -> int:
    size, patch = config[field], config["patch_size"]
    if size < patch or size % patch:
        raise ValueError(
            f"CogAgentConfig: {name} is {size} and must be a multiple of the patch size {patch}"
        )
    return (size // patch) ** 2


def _divides(path: str, config: Mapping[str, Any], part: str, whole: str) -> None:
    names = [f"{path}.{name}" if path else name for name in (part, whole)]
    a, b = config[part], config[whole]
    if a < 1 or b < 1 or b % a:
        raise ValueError(f"CogAgentConfig: {names[0]} = {a} must divide {names[1]} = {b}")


def _chosen(name: str, value: object, choices: tuple[object, ...]) -> None:
    if value not in choices:
        raise ValueError(f"CogAgentConfig: {name} is {value!r} and must be one of {choices}")
