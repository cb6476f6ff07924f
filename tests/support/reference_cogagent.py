"""CogAgent's decoder, token by token and row by row: slow, without padding, batches or caches.

The towers are taken from the model; what the published code answered is the judge of those.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from parallel_ext.models.cogagent import CogAgentConfig, CogAgentForCausalLM

DATA = Path(__file__).parents[1] / "data" / "cogagent"
IMAGE_TOKENS = 11
TEXT, IMAGE = 0, 1
TWO_IMAGES = [TEXT, *[IMAGE] * IMAGE_TOKENS, TEXT, *[IMAGE] * IMAGE_TOKENS, TEXT, TEXT]


def tiny_config(**options: Any) -> CogAgentConfig:
    config = CogAgentConfig.from_pretrained(DATA).to_dict()
    return CogAgentConfig(**{**config, **options})


def tiny_model(**options: Any) -> CogAgentForCausalLM:
    """Weights large enough that every part of the model is seen in its answers."""
    torch.manual_seed(3)
    model = CogAgentForCausalLM(tiny_config(**options)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.08)
    return model.eval()


def frozen(model: Any) -> Any:
    """A model in which what it holds and never runs is frozen, as leaves ask for."""
    tower = model.model.cross_vision.vit.model
    for part in (tower.blocks[-1], tower.norm, tower.head):
        part.requires_grad_(False)
    return model


@dataclass
class Row:
    """One row of a batch.

    Attributes:
        types: of each token; the tokens themselves are drawn.
        images: how many low-resolution images fill its image tokens.
        cross: whether it has a high-resolution image.
    """

    types: list[int]
    images: int = 0
    cross: bool = False
    ids: list[int] = field(init=False)
    low: Tensor = field(init=False)
    high: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        draw = torch.Generator().manual_seed(len(self.types) + 7 * self.images)
        self.ids = torch.randint(3, 97, (len(self.types),), generator=draw).tolist()
        self.low = torch.randn(self.images, 3, 42, 42, generator=draw, dtype=torch.double)
        high = torch.randn(3, 56, 56, generator=draw, dtype=torch.double)
        self.high = [high] if self.cross else []


def text(length: int, cross: bool = False) -> Row:
    return Row([TEXT] * length, cross=cross)


def picture(length: int) -> Row:
    """A first token, an image, text."""
    return Row([TEXT] + [IMAGE] * IMAGE_TOKENS + [TEXT] * length, images=1, cross=True)


def batch_of(rows: list[Row], side: str = "right") -> dict[str, Any]:
    """The inputs of the model, padded on ``side``, with labels for every real token."""
    length = max(len(row.ids) for row in rows)

    def padded(values: list[int], fill: int) -> list[int]:
        padding = [fill] * (length - len(values))
        return padding + values if side == "left" else values + padding

    return {
        "input_ids": torch.tensor([padded(row.ids, 0) for row in rows]),
        "token_type_ids": torch.tensor([padded(row.types, 0) for row in rows]),
        "attention_mask": torch.tensor([padded([1] * len(row.ids), 0) for row in rows]),
        "labels": torch.tensor([padded(row.ids, -100) for row in rows]),
        "images": [list(row.low) for row in rows],
        "cross_images": [row.high for row in rows],
    }


def positions_and_experts(types: list[int]) -> tuple[list[int], list[bool]]:
    """Rotary position of each token, and whether it goes to the vision expert."""
    positions: list[int] = []
    vision: list[bool] = []
    following = 0
    for kind, run in itertools.groupby(types):
        size = len(list(run))
        if kind == IMAGE and size > 2:
            positions += [following, *[following + 1] * (size - 2), following + 2]
            following += 3
        else:
            positions += range(following, following + size)
            following += size
        vision += [True] * (size - 1) + [False] if kind == IMAGE else [False] * size
    return positions, vision


def reference_logits(model: CogAgentForCausalLM, row: Row) -> Tensor:
    """Logits of one row, fp64 [L, V]."""
    parameters = dict(model.named_parameters())
    config = model.config
    positions, vision = positions_and_experts(row.types)
    hidden = list(parameters["model.embed_tokens.weight"][torch.tensor(row.ids)])
    if row.images:
        features = iter(model.model.vision(row.low).flatten(0, 1))
        hidden = [
            next(features) if kind == IMAGE else own
            for kind, own in zip(row.types, hidden, strict=True)
        ]
    encoded = model.model.cross_vision(row.high[0][None])[0] if row.cross else None

    def norm(x: Tensor, name: str) -> Tensor:
        scale = (x.square().mean() + config.rms_norm_eps).sqrt()
        return parameters[name + ".weight"] * x / scale

    heads = config.num_attention_heads
    half = config.hidden_size // heads // 2
    # In fp32 and rounded as the model rounds them, so that fp64 answers can be compared.
    frequencies = model.model.layers[0].self_attn.rotary_emb.inv_freq.float()
    angles = [position * frequencies for position in positions]
    turns = [torch.complex(angle.cos().double(), angle.sin().double()) for angle in angles]

    def turned(x: Tensor, turn: Tensor) -> Tensor:
        first, second = x.view(heads, 2, half).unbind(1)
        both = torch.complex(first, second) * turn
        return torch.cat([both.real, both.imag], dim=-1)

    def attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Query [heads, D], keys and values [S, heads, D]."""
        scores = torch.einsum("hd,shd->hs", query, keys) / query.shape[-1] ** 0.5
        return torch.einsum("hs,shd->hd", scores.softmax(-1), values).flatten()

    for layer in range(config.num_hidden_layers):
        at = f"model.layers.{layer}."

        def linear(x: Tensor, name: str, at: str = at) -> Tensor:
            return parameters[f"{at}{name}.weight"] @ x

        expert = ["vision" if of_vision else "language" for of_vision in vision]
        keys, values, context = [], [], []
        for token, x in enumerate(hidden):
            x = norm(x, at + "input_layernorm")
            fused = linear(x, f"self_attn.{expert[token]}_expert_query_key_value")
            query, key, value = fused.chunk(3)
            keys.append(turned(key, turns[token]))
            values.append(value.view(heads, -1))
            query = turned(query, turns[token])
            context.append(attend(query, torch.stack(keys), torch.stack(values)))
        for token, x in enumerate(context):
            name = f"self_attn.{expert[token]}_expert_dense"
            hidden[token] = hidden[token] + linear(x, name)
        if encoded is not None:
            fused = encoded @ parameters[at + "cross_attn.key_value.weight"].T
            key, value = (part.view(len(encoded), heads, -1) for part in fused.chunk(2, dim=-1))
            for token, x in enumerate(hidden):
                x = norm(x, at + "post_cross_attention_layernorm")
                query = linear(x, "cross_attn.query").view(heads, -1)
                context = attend(query, key, value)
                hidden[token] = hidden[token] + linear(context, "cross_attn.dense")
        for token, x in enumerate(hidden):
            name = f"mlp.{expert[token]}_mlp."
            x = norm(x, at + "post_attention_layernorm")
            inner = F.silu(linear(x, name + "gate_proj")) * linear(x, name + "up_proj")
            hidden[token] = hidden[token] + linear(inner, name + "down_proj")
    head = parameters["lm_head.weight"]
    return torch.stack([head @ norm(x, "model.norm") for x in hidden])


def reference_loss(model: CogAgentForCausalLM, rows: list[Row]) -> Tensor:
    """The mean over the labels of all rows, as of one batch."""
    losses = [
        F.cross_entropy(
            reference_logits(model, row)[:-1], torch.tensor(row.ids[1:]), reduction="none"
        )
        for row in rows
    ]
    return torch.cat(losses).mean()


def exact(model: CogAgentForCausalLM) -> CogAgentForCausalLM:
    """Let a plain model take its loss in the dtype of its logits; transformers does so in fp32."""

    def loss(
        self: Any, logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch: Any = None
    ) -> Tensor:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    model.loss_function = MethodType(loss, model)
    return model


def batches_of(ranks: list[list[Row]]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The batch of the rows of all dp ranks, and each rank's; one without images brings none."""
    whole = batch_of([row for rows in ranks for row in rows], "left")
    own, first = [], 0
    for rows in ranks:
        batch = {name: value[first : first + len(rows)] for name, value in whole.items()}
        without = [name for name in ("images", "cross_images") if not any(batch[name])]
        own.append({name: value for name, value in batch.items() if name not in without})
        first += len(rows)
    return whole, own
