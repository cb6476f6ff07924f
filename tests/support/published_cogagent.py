"""A class with the habits of the published CogAgent code that a cut must respect.

Its weights, names and answers are those of ours. But it reads whole widths in its forwards, keeps
keys and values in tuples, hides keys by the most negative number, reads projections past their
modules, registers one rotary module many times, and computes its loss itself.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from reference_cogagent import tiny_model
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from parallel_ext.models import cogagent
from parallel_ext.models.cogagent import CogAgentConfig, build_position_ids, vision_expert_mask
from parallel_ext.models.cogagent.decoder import rotate


class PublishedConfig(CogAgentConfig):
    model_type = ""


def _heads(fused: Tensor, num_heads: int, head_dim: int) -> Tensor:
    return fused.view(*fused.shape[:2], num_heads, head_dim).transpose(1, 2)


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5 + mask
    return scores.softmax(-1) @ value


class _Rotary(nn.Module):
    def __init__(self, inv_freq: Tensor) -> None:
        super().__init__()
        self.register_buffer("inv_freq", inv_freq)

    def forward(self, value: Tensor, seq_len: int) -> tuple[Tensor, Tensor]:
        angles = torch.arange(int(seq_len))[:, None] * self.inv_freq
        angles = torch.cat([angles, angles], dim=-1)[:, None]
        return angles.cos().to(value.dtype), angles.sin().to(value.dtype)


class _ExpertAttention(nn.Module):
    def __init__(self, ours: nn.Module, hidden_size: int) -> None:
        super().__init__()
        self.hidden_size, self.num_heads, self.head_dim = hidden_size, ours.num_heads, ours.head_dim
        self.rotary_emb = _Rotary(ours.rotary_emb.inv_freq)
        for name, linear in ours.named_children():
            if isinstance(linear, nn.Linear):
                setattr(self, name, linear)

    def forward(
        self,
        hidden_states: Tensor,
        token_type_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor,
        past_key_value: tuple[Tensor, Tensor] | None,
        output_attentions: bool,
        use_cache: bool,
    ) -> tuple[Tensor, None, tuple[Tensor, Tensor] | None]:
        vision = vision_expert_mask(token_type_ids)
        rows, length, width = hidden_states.shape
        mixed = hidden_states.new_empty(rows, length, 3 * width)
        mixed[vision] = self.vision_expert_query_key_value(hidden_states[vision])
        mixed[~vision] = self.language_expert_query_key_value(hidden_states[~vision])
        query, key, value = (
            _heads(part, self.num_heads, self.head_dim)
            for part in mixed.split(self.hidden_size, dim=-1)
        )
        tables = self.rotary_emb(value, seq_len=position_ids.max() + 1)
        turns = [table.squeeze(1)[position_ids][:, None] for table in tables]
        query, key = rotate(query, *turns), rotate(key, *turns)
        if past_key_value is not None:
            key = torch.cat([past_key_value[0], key], dim=2)
            value = torch.cat([past_key_value[1], value], dim=2)
        context = _attend(query, key, value, attention_mask).transpose(1, 2)
        context = context.reshape(rows, length, self.hidden_size)
        output = torch.empty_like(context)
        output[vision] = self.vision_expert_dense(context[vision])
        output[~vision] = self.language_expert_dense(context[~vision])
        return output, None, (key, value) if use_cache else None


class _CrossAttention(nn.Module):
    def __init__(self, ours: nn.Module, config: CogAgentConfig) -> None:
        super().__init__()
        self.num_heads, self.cross_head_dim = ours.num_heads, ours.cross_head_dim
        self.cross_hidden_size = config.cross_hidden_size
        self.cross_compute_hidden_size = config.cross_compute_hidden_size
        self.query, self.key_value, self.dense = ours.query, ours.key_value, ours.dense

    def forward(
        self,
        hidden_states: Tensor,
        encoder_outputs: Tensor,
        past_key_value: tuple[Tensor, Tensor] | None,
        use_cache: bool,
    ) -> tuple[Tensor, None, tuple[Tensor, Tensor] | None]:
        sizes = self.num_heads, self.cross_head_dim
        if past_key_value is None:
            parts = self.key_value(encoder_outputs).split(self.cross_compute_hidden_size, dim=-1)
            past_key_value = tuple(_heads(part, *sizes) for part in parts)
        query, mask = _heads(self.query(hidden_states), *sizes), hidden_states.new_zeros(1)
        context = _attend(query, *past_key_value, mask).transpose(1, 2)
        context = context.reshape(*hidden_states.shape[:2], self.cross_hidden_size)
        return self.dense(context), None, past_key_value if use_cache else None


class _ExpertMLP(nn.Module):
    def __init__(self, ours: nn.Module) -> None:
        super().__init__()
        self.language_mlp, self.vision_mlp = ours.language_mlp, ours.vision_mlp

    def forward(self, hidden_states: Tensor, token_type_ids: Tensor) -> Tensor:
        vision = vision_expert_mask(token_type_ids)
        output = torch.empty_like(hidden_states)
        output[vision] = self.vision_mlp(hidden_states[vision])
        output[~vision] = self.language_mlp(hidden_states[~vision])
        return output


class _Layer(nn.Module):
    def __init__(self, ours: nn.Module, config: CogAgentConfig) -> None:
        super().__init__()
        self.self_attn = _ExpertAttention(ours.self_attn, config.hidden_size)
        self.cross_attn = _CrossAttention(ours.cross_attn, config)
        self.mlp = _ExpertMLP(ours.mlp)
        self.input_layernorm = ours.input_layernorm
        self.post_attention_layernorm = ours.post_attention_layernorm
        self.post_cross_attention_layernorm = ours.post_cross_attention_layernorm

    def forward(
        self,
        hidden: Tensor,
        encoded: Tensor | None,
        types: Tensor,
        positions: Tensor,
        mask: Tensor,
        past: tuple[Tensor, ...] | None,
        use_cache: bool,
    ) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        attended, _, present = self.self_attn(
            hidden_states=self.input_layernorm(hidden),
            token_type_ids=types,
            position_ids=positions,
            attention_mask=mask,
            past_key_value=None if past is None else past[:2],
            output_attentions=False,
            use_cache=use_cache,
        )
        hidden = hidden + attended
        looked, _, present_cross = self.cross_attn(
            hidden_states=self.post_cross_attention_layernorm(hidden),
            encoder_outputs=encoded,
            past_key_value=None if past is None else past[-2:],
            use_cache=use_cache,
        )
        hidden = hidden + looked
        hidden = hidden + self.mlp(self.post_attention_layernorm(hidden), token_type_ids=types)
        return hidden, present + present_cross if use_cache else None


class CogAgentForCausalLM(cogagent.CogAgentForCausalLM):
    config_class = PublishedConfig

    def __init__(self, config: CogAgentConfig) -> None:
        super().__init__(config)
        self.model.layers = nn.ModuleList(_Layer(each, config) for each in self.model.layers)
        tower = self.model.cross_vision.vit.model
        for block in tower.blocks:
            block.attn.rope = tower.rope
            block.attn.forward = MethodType(_past_the_modules, block.attn)

    def forward(
        self,
        input_ids: Tensor,
        images: Any = None,
        cross_images: Any = None,
        token_type_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: tuple | None = None,
        use_cache: bool = False,
        return_dict: bool = True,
        labels: Tensor | None = None,
    ) -> CausalLMOutputWithPast:
        hidden, encoded = self.model.embed_tokens(input_ids), None
        if past_key_values is None:
            hidden, encoded = self.model._with_images(hidden, token_type_ids, images, cross_images)
        if position_ids is None:
            position_ids = build_position_ids(token_type_ids, attention_mask)
        length, seen = input_ids.shape[1], attention_mask.shape[1]
        visible = torch.ones(length, seen, dtype=torch.bool).tril(seen - length)
        least = torch.finfo(hidden.dtype).min
        mask = torch.zeros(visible.shape, dtype=hidden.dtype).masked_fill(~visible, least)
        mask = mask + (1.0 - attention_mask[:, None, None].to(hidden.dtype)) * least
        presents = []
        for number, layer in enumerate(self.model.layers):
            past = None if past_key_values is None else past_key_values[number]
            hidden, present = layer(
                hidden, encoded, token_type_ids, position_ids, mask, past, use_cache
            )
            presents.append(present)
        logits, loss = self.lm_head(self.model.norm(hidden)), None
        if labels is not None:
            shifted = logits[:, :-1].reshape(-1, self.config.vocab_size)
            loss = F.cross_entropy(shifted, labels[:, 1:].reshape(-1))
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=tuple(presents) if use_cache else None
        )


def _past_the_modules(
    self: nn.Module, x: Tensor, rel_pos_bias: None = None, attn_mask: None = None
) -> Tensor:
    """Projections by their weights: no hook and no adapter on their modules takes part."""

    def heads(projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def turned(each: Tensor) -> Tensor:
        token, patches = each[:, :, :1], each[:, :, 1:]
        across = torch.stack([-patches[..., 1::2], patches[..., ::2]], dim=-1).flatten(-2)
        placed = patches * self.rope.freqs_cos + across * self.rope.freqs_sin
        return torch.cat([token, placed], dim=2).to(x.dtype)

    query = turned(heads(F.linear(x, self.q_proj.weight, self.q_bias)))
    key = turned(heads(F.linear(x, self.k_proj.weight)))
    value = heads(F.linear(x, self.v_proj.weight, self.v_bias))
    context = F.scaled_dot_product_attention(query, key, value)
    return self.proj(self.inner_attn_ln(context.transpose(1, 2).flatten(2)))


def published_model() -> CogAgentForCausalLM:
    """The tiny model as this class, fp64."""
    ours = tiny_model()
    config = PublishedConfig(**{**ours.config.to_dict(), "model_type": ""})
    model = CogAgentForCausalLM(config).double()
    model.load_state_dict(ours.state_dict())
    return model
