"""The decoder of CogAgent: a layer of self attention, cross attention and feed-forward experts.

``self_attn``, ``cross_attn`` and ``mlp`` each take one tensor that they read through linear layers
only, and return one tensor that is linear in their last layers, which have no bias. Where these
layers are sharded over ranks, the outputs of both experts are summed over the ranks once, merged.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.cache_utils import EncoderDecoderCache
from transformers.modeling_layers import GradientCheckpointingLayer

from parallel_ext.models.cogagent.configuration import CogAgentConfig
from parallel_ext.models.cogagent.tokens import TokenRoute

ROTARY_BASE = 10000.0


class CogAgentRMSNorm(nn.Module):
    """Root mean square norm; unlike Llama's, it applies the weight before it casts."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (self.weight * wide).to(hidden.dtype)


def rotary_frequencies(head_dim: int) -> Tensor:
    """Return the angle of each pair of a head at position 1: fp32 [head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return 1.0 / ROTARY_BASE**exponents


class CogAgentRotaryEmbedding(nn.Module):
    """The rotary embedding of CogAgent's decoder: cosine and sine of the positions.

    The frequencies are those of ``inv_freq``, as in the published code: a file of half precision
    holds them rounded. The angles are taken in fp32; the published code takes them in the type of
    the model, where positions beyond 256 fall together in bfloat16.
    """

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.register_buffer("inv_freq", rotary_frequencies(head_dim))

    def forward(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosine and sine for positions [B, L], fp32 [B, 1, L, head_dim] each."""
        angles = position_ids[:, None, :, None].float() * self.inv_freq.float()
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos(), angles.sin()


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (i, i + head_dim / 2) of ``heads``, [B, heads, L, head_dim]."""
    first, second = heads.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return (heads * cos + turned * sin).to(heads.dtype)


def expert_query_key_value(
    attention: nn.Module, hidden: Tensor, route: TokenRoute
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute every token's query, key and value by its expert, [B, heads, L, head_dim] each."""
    vision, language = route.split(hidden)
    fused = route.merge(
        attention.vision_expert_query_key_value(vision),
        attention.language_expert_query_key_value(language),
    )
    # Query, key and value, one after the other, each of whole heads.
    fused = fused.view(*route.shape, 3, attention.num_heads, attention.head_dim)
    query, key, value = fused.permute(2, 0, 3, 1, 4)
    return query, key, value


def expert_output(attention: nn.Module, context: Tensor, route: TokenRoute) -> Tensor:
    """Project the context of every token, [B, heads, L, head_dim], by its expert: [B, L, H]."""
    vision, language = route.split(context.transpose(1, 2).flatten(2))
    return route.merge(
        attention.vision_expert_dense(vision), attention.language_expert_dense(language)
    )


class VisionExpertAttention(nn.Module):
    """Causal self attention whose projections are chosen by the type of a token."""

    def __init__(self, config: CogAgentConfig, layer_index: int) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.layer_index = layer_index
        self.num_heads = config.num_attention_heads
        self.head_dim = hidden // config.num_attention_heads
        self.rotary_emb = CogAgentRotaryEmbedding(self.head_dim)
        self.vision_expert_query_key_value = nn.Linear(hidden, 3 * hidden, bias=False)
        self.vision_expert_dense = nn.Linear(hidden, hidden, bias=False)
        self.language_expert_query_key_value = nn.Linear(hidden, 3 * hidden, bias=False)
        self.language_expert_dense = nn.Linear(hidden, hidden, bias=False)

    def forward(
        self,
        hidden: Tensor,
        route: TokenRoute,
        rotary: tuple[Tensor, Tensor],
        mask: Tensor | None,
        cache: EncoderDecoderCache | None,
    ) -> Tensor:
        query, key, value = expert_query_key_value(self, hidden, route)
        query, key = rotate(query, *rotary), rotate(key, *rotary)
        if cache is not None:
            key, value = cache.self_attention_cache.update(key, value, self.layer_index)
        context = F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=mask is None and query.shape[2] > 1
        )
        return expert_output(self, context, route)


class CrossAttention(nn.Module):
    """Attention of each token to the whole high-resolution image of its row, without rotary.

    It is not causal.
    """

    def __init__(self, config: CogAgentConfig, layer_index: int) -> None:
        super().__init__()
        compute = config.cross_compute_hidden_size
        self.layer_index = layer_index
        self.num_heads = config.num_attention_heads
        self.cross_head_dim = compute // config.num_attention_heads
        self.query = nn.Linear(config.hidden_size, compute, bias=False)
        self.key_value = nn.Linear(config.cross_hidden_size, 2 * compute, bias=False)
        self.dense = nn.Linear(compute, config.hidden_size, bias=False)

    def forward(
        self, hidden: Tensor, encoded: Tensor | None, cache: EncoderDecoderCache | None
    ) -> Tensor:
        """Attend from ``hidden`` to ``encoded``, [B, S, cross_hidden_size].

        ``encoded`` is None where ``cache`` holds its keys and values.
        """
        query = self.query(hidden).unflatten(-1, (self.num_heads, self.cross_head_dim))
        key, value = self._key_value(encoded, cache)
        context = F.scaled_dot_product_attention(query.transpose(1, 2), key, value)
        return self.dense(context.transpose(1, 2).flatten(2))

    def _key_value(
        self, encoded: Tensor | None, cache: EncoderDecoderCache | None
    ) -> tuple[Tensor, Tensor]:
        if encoded is None:
            layer = cache.cross_attention_cache.layers[self.layer_index]
            return layer.keys, layer.values
        # Key and value, one after the other, each of whole heads.
        fused = self.key_value(encoded)
        fused = fused.view(*fused.shape[:2], 2, self.num_heads, self.cross_head_dim)
        key, value = fused.permute(2, 0, 3, 1, 4)
        if cache is not None:
            key, value = cache.cross_attention_cache.update(key, value, self.layer_index)
            cache.is_updated[self.layer_index] = True
        return key, value


class CogAgentMLP(nn.Module):
    """The gated feed-forward layer of one expert."""

    def __init__(self, config: CogAgentConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, rows: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(rows)) * self.up_proj(rows))


class VisionExpertMLP(nn.Module):
    """Two feed-forward layers, chosen by the type of a token."""

    def __init__(self, config: CogAgentConfig) -> None:
        super().__init__()
        self.language_mlp = CogAgentMLP(config)
        self.vision_mlp = CogAgentMLP(config)

    def forward(self, hidden: Tensor, route: TokenRoute) -> Tensor:
        vision, language = route.split(hidden)
        return route.merge(self.vision_mlp(vision), self.language_mlp(language))


class CogAgentDecoderLayer(GradientCheckpointingLayer):
    """Self attention, cross attention, feed-forward: each normalises first and adds to the rest."""

    def __init__(self, config: CogAgentConfig, layer_index: int) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = VisionExpertAttention(config, layer_index)
        self.cross_attn = CrossAttention(config, layer_index)
        self.mlp = VisionExpertMLP(config)
        self.input_layernorm = CogAgentRMSNorm(hidden, eps)
        self.post_attention_layernorm = CogAgentRMSNorm(hidden, eps)
        self.post_cross_attention_layernorm = CogAgentRMSNorm(hidden, eps)

    def forward(
        self,
        hidden: Tensor,
        encoded: Tensor | None,
        route: TokenRoute,
        mask: Tensor | None,
        position_embeddings: tuple[Tensor, Tensor],
        cache: EncoderDecoderCache | None = None,
    ) -> Tensor:
        normed = self.input_layernorm(hidden)
        hidden = hidden + self.self_attn(normed, route, position_embeddings, mask, cache)
        seen = cache is not None and cache.is_updated.get(self.cross_attn.layer_index, False)
        # A batch of text only has nothing to look at; it skips the cross attention.
        if encoded is not None or seen:
            normed = self.post_cross_attention_layernorm(hidden)
            hidden = hidden + self.cross_attn(normed, encoded, cache)
        return hidden + self.mlp(self.post_attention_layernorm(hidden), route)
