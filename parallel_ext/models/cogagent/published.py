"""The sharding of the class that CogAgent's authors publish, which users may load as remote code.

Its names, shapes and order of computation are those of ours. The self attention counts on whole
widths in its forward, so another one takes its place, as in the tower of the high-resolution image
one that knows of positions on other ranks; the cross attention reads widths that can be set; the
class computes its loss itself.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from parallel_ext.models.cogagent.cross_visual import attend_to_image
from parallel_ext.models.cogagent.decoder import expert_output, expert_query_key_value, rotate
from parallel_ext.models.cogagent.spec import COGAGENT, LAYER
from parallel_ext.models.cogagent.tokens import TokenRoute


def expert_attention(
    self: nn.Module,
    hidden_states: Tensor,
    token_type_ids: Tensor,
    position_ids: Tensor,
    attention_mask: Tensor | None = None,
    past_key_value: tuple[Tensor, Tensor] | None = None,
    output_attentions: bool = False,
    use_cache: bool = False,
) -> tuple[Tensor, None, tuple[Tensor, Tensor] | None]:
    """Run the forward of the published ``VisionExpertAttention``, for any number of heads.

    Args:
        self: the published module; its ``num_heads`` are this rank's.
        hidden_states: [B, L, H].
        token_type_ids, position_ids: int64 [B, L].
        attention_mask: [B, 1, L, S], added to the scores.
        past_key_value: keys and values of earlier tokens, [B, heads, S - L, head_dim].
        output_attentions: refused.
        use_cache: whether to return keys and values.

    Returns:
        [B, L, H], this rank's addend; None; the keys and values, or None.
    """
    if output_attentions:
        raise NotImplementedError("output_attentions under tp is not supported")
    route = TokenRoute.of(token_type_ids)
    query, key, value = expert_query_key_value(self, hidden_states, route)
    tables = self.rotary_emb(value, seq_len=position_ids.max() + 1)  # [positions, 1, head_dim]
    cos, sin = (table[:, 0][position_ids][:, None] for table in tables)
    query, key = rotate(query, cos, sin), rotate(key, cos, sin)
    if past_key_value is not None:
        before = zip(past_key_value, (key, value), strict=True)
        key, value = (torch.cat([old, new], dim=2) for old, new in before)
    context = _attend(query, key, value, attention_mask)
    return expert_output(self, context, route), None, (key, value) if use_cache else None


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Compute attention with masks that hide keys by the most negative finite number.

    A token of padding sees nothing but such keys, all equal. The fused kernels take that for large
    scores, whose softmax they cannot repeat in backward.
    """
    length, seen = query.shape[2], key.shape[2]
    causal = torch.ones(length, seen, dtype=torch.bool, device=query.device).tril(seen - length)
    if mask is None or bool(((mask == 0) == causal).all()):
        return F.scaled_dot_product_attention(query, key, value, causal)
    scores = query / query.shape[-1] ** 0.5 @ key.transpose(-1, -2) + mask
    wide = torch.promote_types(scores.dtype, torch.float32)
    return scores.softmax(dim=-1, dtype=wide).to(value.dtype) @ value


def attend_to_patches(
    self: nn.Module, x: Tensor, rel_pos_bias: None = None, attn_mask: None = None
) -> Tensor:
    """Run the forward of the published tower's ``Attention``, for this rank's positions.

    Args:
        self: the published module.
        x: [N, positions, width].
        rel_pos_bias, attn_mask: refused; the published model has none.
    """
    if rel_pos_bias is not None or attn_mask is not None:
        raise NotImplementedError("a bias or mask of the high-resolution tower is not supported")
    return attend_to_image(self, x)


_DIFFERENT = {
    f"{LAYER}.self_attn": {"forward": expert_attention},
    f"{LAYER}.cross_attn": {"widths": ("cross_hidden_size", "cross_compute_hidden_size")},
}

PUBLISHED_COGAGENT = replace(
    COGAGENT,
    regions=tuple(replace(each, **_DIFFERENT.get(each.name, {})) for each in COGAGENT.regions),
    shared=("model.cross_vision",),
    divided_tower=replace(COGAGENT.divided_tower, forward=attend_to_patches),
    skips=None,  # without an image it fails in any case
    images=None,
    changes_logits=True,
)
