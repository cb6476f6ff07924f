"""EVA2-CLIP-L, the tower of the high-resolution image, which the cross attention looks at."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from parallel_ext.models.cogagent.configuration import CogAgentConfig
from parallel_ext.nn.own_positions import OwnPositions

NORM_EPS = 1e-6
ROTARY_BASE = 10000.0


def grid_rotation(head_width: int, grid: int, pretrained_grid: int) -> tuple[Tensor, Tensor]:
    """Return cosine and sine for the patches of a grid.

    Half of a head turns by row, half by column. Positions are scaled to the grid of pretraining.

    Returns:
        fp32 [grid * grid, head_width], twice.
    """
    half = head_width // 2
    frequencies = 1.0 / ROTARY_BASE ** (torch.arange(0, half, 2).float() / half)
    places = torch.arange(grid).float() / grid * pretrained_grid
    angles = (places[:, None] * frequencies).repeat_interleave(2, dim=-1)
    rows = angles[:, None].expand(grid, grid, half)
    columns = angles[None].expand(grid, grid, half)
    angles = torch.cat([rows, columns], dim=-1).reshape(grid * grid, head_width)
    return angles.cos(), angles.sin()


class GridRotaryEmbedding(nn.Module):
    """The rotary embedding that turns the patches of an image by their place in it.

    The tower and each of its blocks have one, all equal, since the published files name each.
    """

    def __init__(self, head_width: int, grid: int, pretrained_grid: int) -> None:
        super().__init__()
        self.sizes = (head_width, grid, pretrained_grid)
        cos, sin = grid_rotation(*self.sizes)
        self.register_buffer("freqs_cos", cos)
        self.register_buffer("freqs_sin", sin)


def turned(heads: Tensor, rope: nn.Module, first: int = 0) -> Tensor:
    """Turn each pair (2 i, 2 i + 1) of the heads of patches.

    Args:
        heads: [N, positions, heads, head_width].
        rope: has the buffers ``freqs_cos`` and ``freqs_sin``, a row for each patch.
        first: which position of an image is the first one here. Position 0 is the class token,
            which has no place, and is not turned.
    """
    token = heads[:, : 1 if first == 0 else 0]
    patches = heads[:, token.size(1) :]
    start = first + token.size(1) - 1
    cos, sin = (
        table[start : start + patches.size(1), None].to(heads.dtype)
        for table in (rope.freqs_cos, rope.freqs_sin)
    )
    pairs = patches.unflatten(-1, (-1, 2))
    across = torch.stack([-pairs[..., 1], pairs[..., 0]], dim=-1).flatten(-2)
    return torch.cat([token, patches * cos + across * sin], dim=1)


class CrossVisionAttention(nn.Module):
    """Attention with a norm between its heads and its projection; the keys have no bias.

    Attributes:
        positions: how ranks divide those of an image; None where each computes all.
    """

    positions: OwnPositions | None = None

    def __init__(self, width: int, head_width: int, rope: GridRotaryEmbedding) -> None:
        super().__init__()
        self.num_heads = width // head_width
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width, bias=False)
        self.q_bias = nn.Parameter(torch.zeros(width))
        self.v_bias = nn.Parameter(torch.zeros(width))
        self.rope = rope
        self.inner_attn_ln = nn.LayerNorm(width, eps=NORM_EPS)
        self.proj = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        return attend_to_image(self, hidden)


def attend_to_image(self: nn.Module, hidden: Tensor) -> Tensor:
    """Run the forward of :class:`CrossVisionAttention`, or of a class with its names.

    Args:
        self: the module.
        hidden: [N, positions, width], of all positions or of this rank's.
    """
    first = 0 if self.positions is None else self.positions.first
    # The projections are called as modules, so that hooks and adapters on them take part.
    query, key, value = (
        projected.unflatten(-1, (self.num_heads, -1))
        for projected in (
            self.q_proj(hidden) + self.q_bias,
            self.k_proj(hidden),
            self.v_proj(hidden) + self.v_bias,
        )
    )
    query, key = (turned(each, self.rope, first) for each in (query, key))
    if self.positions is not None:
        both = torch.cat([key, value], dim=2)
        seen = self.positions.gather_seen(both.flatten(2)).unflatten(-1, both.shape[2:])
        key, value = seen.chunk(2, dim=2)
    query, key, value = (each.transpose(1, 2) for each in (query, key, value))
    context = F.scaled_dot_product_attention(query, key, value)
    return self.proj(self.inner_attn_ln(context.transpose(1, 2).flatten(2)))


class CrossVisionSwiGLU(nn.Module):
    """A gated feed-forward layer with a norm before its last projection."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, inner)
        self.w2 = nn.Linear(width, inner)
        self.act_fn = nn.SiLU()
        self.ffn_ln = nn.LayerNorm(inner, eps=NORM_EPS)
        self.w3 = nn.Linear(inner, width)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.w3(self.ffn_ln(self.act_fn(self.w1(hidden)) * self.w2(hidden)))


class CrossVisionBlock(nn.Module):
    """Attention and feed-forward, each normalised before it and added to the rest."""

    def __init__(self, tower: dict[str, Any], rope: GridRotaryEmbedding) -> None:
        super().__init__()
        width = tower["width"]
        self.norm1 = nn.LayerNorm(width, eps=NORM_EPS)
        self.attn = CrossVisionAttention(width, tower["head_width"], rope)
        self.norm2 = nn.LayerNorm(width, eps=NORM_EPS)
        self.mlp = CrossVisionSwiGLU(width, int(width * tower["mlp_ratio"]))

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attn(self.norm1(hidden))
        return hidden + self.mlp(self.norm2(hidden))


class CrossPatchEmbedding(nn.Module):
    """The embedding of the patches of an image."""

    def __init__(self, tower: dict[str, Any]) -> None:
        super().__init__()
        patch = tower["patch_size"]
        self.proj = nn.Conv2d(3, tower["width"], kernel_size=patch, stride=patch)

    def forward(self, images: Tensor) -> Tensor:
        return self.proj(images).flatten(2).transpose(1, 2)


class EVAVisionTransformer(nn.Module):
    """The tower, EVA2-CLIP-L; its last block, norm and head are in the files but never run."""

    def __init__(self, config: CogAgentConfig) -> None:
        super().__init__()
        tower = config.cross_vision_config
        width = tower["width"]
        grid = config.cross_image_size // tower["patch_size"]
        sizes = (tower["head_width"], grid, tower["pretrained_grid"])
        self.patch_embed = CrossPatchEmbedding(tower)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.zeros(1, grid * grid + 1, width))
        self.rope = GridRotaryEmbedding(*sizes)
        self.blocks = nn.ModuleList(
            CrossVisionBlock(tower, GridRotaryEmbedding(*sizes)) for _ in range(tower["layers"])
        )
        self.norm = nn.LayerNorm(width, eps=NORM_EPS)
        self.head = nn.Linear(width, tower["embed_dim"])

    def forward(self, images: Tensor) -> Tensor:
        """Compute the features of images [N, 3, H, W], class token first: [N, 1 + S, width]."""
        patches = self.patch_embed(images)
        hidden = torch.cat([self.cls_token.expand(len(patches), -1, -1), patches], dim=1)
        hidden = hidden + self.pos_embed
        for block in self.blocks[:-1]:
            hidden = block(hidden)
        return hidden


class Eva2LargeEncoder(nn.Module):
    """The tower, under the name that it has in the published files."""

    def __init__(self, config: CogAgentConfig) -> None:
        super().__init__()
        self.model = EVAVisionTransformer(config)

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images)[:, 1:]


class CrossVisionModel(nn.Module):
    """The encoder of high-resolution images whose patches the cross attention looks at."""

    def __init__(self, config: CogAgentConfig) -> None:
        super().__init__()
        self.vit = Eva2LargeEncoder(config)
        patches = (config.cross_image_size // config.cross_vision_config["patch_size"]) ** 2
        self.pos_embed = nn.Parameter(torch.zeros(patches, config.cross_hidden_size))

    def forward(self, images: Tensor) -> Tensor:
        """Encode images [N, 3, H, W] as [N, S, cross_hidden_size], positions added."""
        return self.vit(images) + self.pos_embed
