"""EVA2-CLIP-E, the tower of the low-resolution image, and the adapter to the decoder."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from transformers.activations import ACT2FN

from parallel_ext.models.cogagent.configuration import CogAgentConfig


class PatchEmbedding(nn.Module):
    """The patches of an image behind a class token, with learned positions."""

    def __init__(self, vision: dict[str, Any]) -> None:
        super().__init__()
        width, patch = vision["hidden_size"], vision["patch_size"]
        self.proj = nn.Conv2d(vision["in_channels"], width, kernel_size=patch, stride=patch)
        self.cls_embedding = nn.Parameter(torch.zeros(1, width))
        self.position_embedding = nn.Embedding(vision["num_positions"], width)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.proj(images).flatten(2).transpose(1, 2)
        first = self.cls_embedding.expand(len(patches), 1, -1)
        return torch.cat([first, patches], dim=1) + self.position_embedding.weight


class VisionAttention(nn.Module):
    """Full self attention over the patches of an image."""

    def __init__(self, vision: dict[str, Any]) -> None:
        super().__init__()
        width = vision["hidden_size"]
        self.num_heads = vision["num_heads"]
        self.head_dim = width // vision["num_heads"]
        self.query_key_value = nn.Linear(width, 3 * width)
        self.dense = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        fused = self.query_key_value(hidden)
        fused = fused.view(*hidden.shape[:2], 3, self.num_heads, self.head_dim)
        context = F.scaled_dot_product_attention(*fused.permute(2, 0, 3, 1, 4))
        return self.dense(context.transpose(1, 2).flatten(2))


class VisionMLP(nn.Module):
    """The feed-forward layer of the tower."""

    def __init__(self, vision: dict[str, Any]) -> None:
        super().__init__()
        self.fc1 = nn.Linear(vision["hidden_size"], vision["intermediate_size"])
        self.fc2 = nn.Linear(vision["intermediate_size"], vision["hidden_size"])
        self.activation_fn = ACT2FN[vision["hidden_act"]]

    def forward(self, hidden: Tensor) -> Tensor:
        return self.fc2(self.activation_fn(self.fc1(hidden)))


class VisionLayer(nn.Module):
    """Attention and feed-forward, each normalised after it (post-norm) and added to the rest."""

    def __init__(self, vision: dict[str, Any]) -> None:
        super().__init__()
        width, eps = vision["hidden_size"], vision["layer_norm_eps"]
        self.input_layernorm = nn.LayerNorm(width, eps=eps)
        self.attention = VisionAttention(vision)
        self.mlp = VisionMLP(vision)
        self.post_attention_layernorm = nn.LayerNorm(width, eps=eps)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.input_layernorm(self.attention(hidden))
        return hidden + self.post_attention_layernorm(self.mlp(hidden))


class VisionTransformer(nn.Module):
    """The layers of the tower."""

    def __init__(self, vision: dict[str, Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(VisionLayer(vision) for _ in range(vision["num_hidden_layers"]))

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


class GLU(nn.Module):
    """The adapter from the width of the tower to that of the decoder."""

    def __init__(self, config: CogAgentConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.linear_proj = nn.Linear(config.vision_config["hidden_size"], hidden, bias=False)
        self.norm1 = nn.LayerNorm(hidden)
        self.act1 = nn.GELU()
        self.dense_h_to_4h = nn.Linear(hidden, inner, bias=False)
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.dense_4h_to_h = nn.Linear(inner, hidden, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, features: Tensor) -> Tensor:
        features = self.act1(self.norm1(self.linear_proj(features)))
        gate = self.act_fn(self.gate_proj(features))
        return self.dense_4h_to_h(gate * self.dense_h_to_4h(features))


class EVA2CLIPModel(nn.Module):
    """The encoder of low-resolution images as tokens: a begin, the patches, an end."""

    def __init__(self, config: CogAgentConfig) -> None:
        super().__init__()
        vision = config.vision_config
        self.patch_embedding = PatchEmbedding(vision)
        self.transformer = VisionTransformer(vision)
        self.linear_proj = GLU(config)
        self.boi = nn.Parameter(torch.zeros(1, 1, config.hidden_size))
        self.eoi = nn.Parameter(torch.zeros(1, 1, config.hidden_size))
        self.pos_embed = nn.Parameter(
            torch.zeros(vision["num_positions"] - 1, vision["hidden_size"])
        )

    def forward(self, images: Tensor) -> Tensor:
        """Encode images [N, 3, H, W] as [N, config.image_tokens, hidden_size]."""
        features = self.transformer(self.patch_embedding(images))[:, 1:]
        features = self.linear_proj(features + self.pos_embed)
        begin, end = (edge.expand(len(images), -1, -1) for edge in (self.boi, self.eoi))
        return torch.cat([begin, features, end], dim=1)
