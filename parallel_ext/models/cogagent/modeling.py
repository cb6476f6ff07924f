"""CogAgent for transformers 5, written from the names and semantics of the published model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from parallel_ext.models._transformers_private import attention_of
from parallel_ext.models.cogagent.configuration import CogAgentConfig
from parallel_ext.models.cogagent.cross_visual import (
    CrossVisionAttention,
    CrossVisionModel,
    EVAVisionTransformer,
    GridRotaryEmbedding,
    grid_rotation,
)
from parallel_ext.models.cogagent.decoder import (
    CogAgentDecoderLayer,
    CogAgentRMSNorm,
    CogAgentRotaryEmbedding,
    rotary_frequencies,
)
from parallel_ext.models.cogagent.inputs import (
    CACHE,
    Images,
    as_cache,
    attention_mask_of,
    check_counts,
    check_mask,
    check_positions,
    check_token_types,
    stacked_images,
    the_cache,
)
from parallel_ext.models.cogagent.tokens import LANGUAGE, VISION, TokenRoute, build_position_ids
from parallel_ext.models.cogagent.visual import EVA2CLIPModel, PatchEmbedding


class CogAgentPreTrainedModel(PreTrainedModel):
    """The base class of the CogAgent models."""

    config_class = CogAgentConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _no_split_modules = ["CogAgentDecoderLayer", "VisionLayer", "CrossVisionBlock"]
    _skip_keys_device_placement = ["past_key_values", "cache"]
    # Files that lack these buffers get them from `_init_weights`.
    _keys_to_ignore_on_load_missing = [r"rotary_emb\.inv_freq$", r"rope\.freqs_(cos|sin)$"]

    def __init__(self, config: CogAgentConfig, *inputs: Any, **kwargs: Any) -> None:
        super().__init__(config, *inputs, **kwargs)
        if attention_of(config) != "sdpa":
            raise ValueError(
                f"CogAgent: attn_implementation is {attention_of(config)!r}; this model has "
                "'sdpa' only"
            )

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        std = self.config.initializer_range
        if isinstance(module, CogAgentRMSNorm):
            init.ones_(module.weight)
        elif isinstance(module, CogAgentRotaryEmbedding):
            init.copy_(module.inv_freq, rotary_frequencies(module.head_dim))
        elif isinstance(module, GridRotaryEmbedding):
            cos, sin = grid_rotation(*module.sizes)
            init.copy_(module.freqs_cos, cos)
            init.copy_(module.freqs_sin, sin)
        elif isinstance(module, CrossVisionAttention):
            init.zeros_(module.q_bias)
            init.zeros_(module.v_bias)
        elif isinstance(module, PatchEmbedding):
            init.normal_(module.cls_embedding, std=std)
        elif isinstance(module, EVA2CLIPModel):
            for parameter in (module.boi, module.eoi, module.pos_embed):
                init.normal_(parameter, std=std)
        elif isinstance(module, EVAVisionTransformer):
            init.normal_(module.cls_token, std=std)
            init.normal_(module.pos_embed, std=std)
        elif isinstance(module, CrossVisionModel):
            init.normal_(module.pos_embed, std=std)
        else:
            super()._init_weights(module)


class CogAgentModel(CogAgentPreTrainedModel):
    """The decoder with its two image towers, without a head."""

    def __init__(self, config: CogAgentConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(
            CogAgentDecoderLayer(config, index) for index in range(config.num_hidden_layers)
        )
        self.norm = CogAgentRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.vision = EVA2CLIPModel(config)
        self.cross_vision = CrossVisionModel(config)
        self.looked_at = nn.Identity()  # what all layers look at passes here, and nothing else
        self.gradient_checkpointing = False
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        images: Images | None = None,
        cross_images: Images | None = None,
        token_type_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Compute the hidden states; the arguments are those of :class:`CogAgentForCausalLM`."""
        _refuse_recordings(kwargs, self.config)
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("CogAgent: give one of input_ids and inputs_embeds, not both")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        rows, length = inputs_embeds.shape[:2]
        use_cache = self.config.use_cache if use_cache is None else use_cache
        recomputed = self.gradient_checkpointing and self.training
        use_cache = use_cache and not recomputed
        cache = as_cache(the_cache(cache, past_key_values), use_cache)
        past = cache.get_seq_length() if cache is not None else 0
        if recomputed:
            if past:  # a recomputed layer would append its tokens again
                raise ValueError(
                    f"CogAgent: a cache of {past} tokens cannot be read in training with gradient "
                    "checkpointing; call model.eval() or model.gradient_checkpointing_disable()"
                )
            cache = None
        if token_type_ids is None:
            token_type_ids = inputs_embeds.new_full((rows, length), LANGUAGE, dtype=torch.long)
        check_token_types(token_type_ids, inputs_embeds.shape[:2])
        check_mask(attention_mask, rows, past + length)
        if past and position_ids is None:
            raise ValueError(
                "CogAgent: position_ids are needed with a filled cache, since the tokens of an "
                "image share a position; take the last one of build_position_ids and count on"
            )
        if position_ids is None:
            position_ids = build_position_ids(token_type_ids, attention_mask)
        check_positions(position_ids, rows, length)
        if past and (images is not None or cross_images is not None):
            raise ValueError(
                f"CogAgent: images came with a cache of {past} tokens; give them in the first call"
            )
        inputs_embeds, encoded = self._with_images(
            inputs_embeds, token_type_ids, images, cross_images
        )
        if past:  # other dp ranks may be at images, but these rows have theirs in the cache
            encoded = None
        rotary = self.layers[0].self_attn.rotary_emb(position_ids)
        rotary = tuple(part.to(inputs_embeds.dtype) for part in rotary)
        route = TokenRoute.of(token_type_ids)
        mask = attention_mask_of(attention_mask, length, past + length, inputs_embeds.device)
        hidden = inputs_embeds
        for layer in self.layers:
            hidden = layer(hidden, encoded, route, mask, position_embeddings=rotary, cache=cache)
        kept = {CACHE: cache if use_cache else None}
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden), **kept)

    def towers_run(self, low: bool, high: bool) -> tuple[bool, bool]:
        """Return for each tower, low and high, whether this forward runs it: if it has images.

        Data parallelism puts another answer in its place: yes where any rank has them, so that all
        ranks have gradients of the same parameters.
        """
        return low, high

    def _with_images(
        self,
        inputs_embeds: Tensor,
        token_type_ids: Tensor,
        images: Images | None,
        cross_images: Images | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the embeddings with the images put in, and the encoded high-resolution images."""
        config, rows = self.config, len(inputs_embeds)
        sizes = config.vision_config["image_size"], config.cross_image_size
        low, counts = stacked_images("images", images, rows, sizes[0])
        high, cross_counts = stacked_images("cross_images", cross_images, rows, sizes[1])
        check_counts(token_type_ids, counts, cross_counts, config.image_tokens)
        run = self.towers_run(low is not None, high is not None)
        # No image at all can go through a tower as well, which has zeros for gradients then.
        low, high = (
            inputs_embeds.new_empty(0, 3, size, size) if given is None and runs else given
            for given, size, runs in zip((low, high), sizes, run, strict=True)
        )
        if low is not None:
            features = self.vision(low.to(inputs_embeds))
            places = (token_type_ids == VISION)[..., None]
            inputs_embeds = inputs_embeds.masked_scatter(places, features.to(inputs_embeds.dtype))
        if high is None:
            return inputs_embeds, None
        encoded = self.looked_at(self.cross_vision(high.to(inputs_embeds)))
        if len(encoded) == rows:
            return inputs_embeds, encoded
        # A row of text looks at zeros. Keys and values have no bias: it takes exactly nothing
        # from them, as a batch of text does that skips the cross attention. (An adapter with
        # lora_bias=True on the cross attention brings one, which a batch of text does not get.)
        seen = torch.tensor(cross_counts, device=encoded.device).nonzero().flatten()
        empty = encoded.new_zeros(rows, *encoded.shape[1:])
        return inputs_embeds, empty.index_copy(0, seen, encoded)


class CogAgentForCausalLM(CogAgentPreTrainedModel, GenerationMixin):
    """CogAgent-18B: a decoder with vision experts, and cross attention to a screenshot.

    Names, shapes and buffers are those of cogagent-chat-hf and cogagent-vqa-hf, whose files load
    as they are.

    >>> from parallel_ext.models.cogagent import CogAgentConfig, CogAgentForCausalLM
    >>> with torch.device("meta"):
    ...     model = CogAgentForCausalLM(CogAgentConfig())
    >>> sum(parameter.numel() for parameter in model.parameters())
    18291033280
    """

    def __init__(self, config: CogAgentConfig) -> None:
        super().__init__(config)
        self.model = CogAgentModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        images: Images | None = None,
        cross_images: Images | None = None,
        token_type_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Compute the logits of the tokens, and their loss where there are labels.

        Args:
            input_ids: int64 [B, L]; what stands at the tokens of an image is not read.
            images: low-resolution images, [B, 3, 224, 224] or for each row a list of
                [3, 224, 224]. Those of a row fill its image tokens in order.
            cross_images: the same pictures at high resolution, [B, 3, 1120, 1120] or for each row
                a list of at most one. A row without one skips the cross attention.
            token_type_ids: int64 [B, L], 1 for each of the 258 tokens of an image, 0 for text; None
                for text only.
            attention_mask: [B, L], cached tokens included, 0 where a token is padding, left or
                right.
            position_ids: int64 [B, L]; by default those of :func:`build_position_ids`. Needed with
                a filled cache.
            past_key_values: what an earlier call returned; images belong to the first call.
            inputs_embeds: [B, L, hidden_size] in place of ``input_ids``.
            labels: int64 [B, L], not shifted; -100 is ignored.
            logits_to_keep: of the last tokens only, or of these positions; 0 for all.
            cache: ``past_key_values`` by the name that transformers 5.24 gives it.
            kwargs: ``num_items_in_batch`` for the loss.

        Returns:
            ``loss``, ``logits`` [B, L, vocab_size], and the cache, from transformers 5.24 on as
            ``cache``, before as ``past_key_values``.

        Raises:
            ValueError: inputs that do not fit each other; the text names the row.
        """
        outputs = self.model(
            input_ids=input_ids,
            images=images,
            cross_images=cross_images,
            token_type_ids=token_type_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            cache=cache,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs
            )
        return CausalLMOutputWithPast(loss=loss, logits=logits, **{CACHE: outputs.get(CACHE)})

    def with_an_image_each(self, rows: int, tokens: int) -> dict[str, Tensor]:
        """Return what a batch with an image in each row has beside ids and labels.

        Images and positions are on the device of the model, token types on the CPU, where their
        values can be read though the model is on meta.

        Raises:
            ValueError: a row has no room for an image between two tokens of text.
        """
        config = self.config
        room, device = config.image_tokens + 2, self.device
        if tokens < room:
            raise ValueError(
                f"CogAgent: a row of {tokens} tokens has no room for an image between two tokens "
                f"of text; give at least {room}"
            )
        types = torch.full((rows, tokens), LANGUAGE)
        types[:, 1 : 1 + config.image_tokens] = VISION
        sizes = config.vision_config["image_size"], config.cross_image_size
        low, high = (torch.zeros(rows, 3, size, size, device=device) for size in sizes)
        return {
            **{"images": low, "cross_images": high, "token_type_ids": types},
            "position_ids": build_position_ids(types).to(device),
        }

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """Return False: the model makes its own cache, with the keys of the cross attention."""
        return False

    def _prepare_attention_mask_for_generation(
        self, inputs_tensor: Tensor, generation_config: Any, model_kwargs: dict[str, Any]
    ) -> Tensor:
        """Infer a mask from the padding id, but never mask image tokens, which may hold that id."""
        mask = super()._prepare_attention_mask_for_generation(
            inputs_tensor, generation_config, model_kwargs
        )
        types = model_kwargs.get("token_type_ids")
        if types is None:
            return mask
        check_token_types(types, mask.shape)
        return mask.masked_fill(types == VISION, 1)

    def _prepare_position_ids_for_generation(
        self, inputs_tensor: Tensor, model_kwargs: dict[str, Any]
    ) -> Tensor:
        """Return positions; the tokens of an image share one, and generated ones count on."""
        types, mask = model_kwargs.get("token_type_ids"), model_kwargs.get("attention_mask")
        cache = model_kwargs.get(CACHE)
        past = cache.get_seq_length() if cache is not None else 0
        length = inputs_tensor.shape[1] if mask is None else mask.shape[1]
        if past and (types is None or types.shape[1] <= past or types.shape[1] != length):
            raise ValueError(
                f"CogAgent: generate() continues from a cache of {past} tokens; give input_ids, "
                "token_type_ids and attention_mask of the whole sequence, cached tokens included"
            )
        if types is None:
            types = inputs_tensor.new_full(inputs_tensor.shape[:2], LANGUAGE, dtype=torch.long)
        return build_position_ids(types, mask)

    def _update_model_kwargs_for_generation(
        self, outputs: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """Update the arguments after a step; generated tokens are text, also behind an image."""
        types = model_kwargs.get("token_type_ids")
        model_kwargs = super()._update_model_kwargs_for_generation(
            outputs, model_kwargs, *args, **kwargs
        )
        if types is not None:
            model_kwargs["token_type_ids"][:, types.shape[1] :] = LANGUAGE
        return model_kwargs

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        past_key_values: Cache | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Prepare the inputs of one step; images are passed only until a cache has read them."""
        cache = the_cache(cache, past_key_values)
        cached = cache is not None and cache.get_seq_length() > 0
        inputs = super().prepare_inputs_for_generation(input_ids, **{CACHE: cache}, **kwargs)
        if cached:
            inputs = {**inputs, "images": None, "cross_images": None}
        return inputs

    def _expand_inputs_for_generation(
        self, expand_size: int = 1, **kwargs: Any
    ) -> tuple[Tensor, dict[str, Any]]:
        """Repeat the inputs for beams, lists of images as well as tensors."""
        for name in ("images", "cross_images"):
            if isinstance(kwargs.get(name), (list, tuple)):
                kwargs[name] = [row for row in kwargs[name] for _ in range(expand_size)]
        return super()._expand_inputs_for_generation(expand_size=expand_size, **kwargs)


def _refuse_recordings(kwargs: dict[str, Any], config: CogAgentConfig) -> None:
    for name in ("output_attentions", "output_hidden_states"):
        if kwargs.pop(name, None) or getattr(config, name):
            raise ValueError(f"CogAgent: {name}=True is not supported; use hooks on the layers")
