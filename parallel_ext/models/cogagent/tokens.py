"""The expert and the position of each token, as its type decides them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LANGUAGE = 0
VISION = 1
"""Values of ``token_type_ids``: text, and the tokens of an image from its begin to its end."""


def vision_expert_mask(token_type_ids: Tensor) -> Tensor:
    """Return a mask of the vision expert's tokens: image tokens that another one follows.

    The last token of a run of image tokens, and the last token of a row, go to the language expert.

    Args:
        token_type_ids: int64 [B, L], :data:`LANGUAGE` or :data:`VISION`.

    Returns:
        bool [B, L].

    >>> vision_expert_mask(torch.tensor([[0, 1, 1, 1, 0]])).long()
    tensor([[0, 1, 1, 0, 0]])
    """
    is_vision = token_type_ids == VISION
    mask = torch.zeros_like(is_vision)
    mask[:, :-1] = is_vision[:, :-1] & is_vision[:, 1:]
    return mask


def build_position_ids(token_type_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
    """Return rotary positions, one for all that lies between begin and end of an image.

    Padding moves no position on; to the left of the text it lies at position 0.

    Args:
        token_type_ids: int64 [B, L], :data:`LANGUAGE` or :data:`VISION`.
        attention_mask: int64 or bool [B, L], zero where a token is padding; None for no padding.

    Returns:
        int64 [B, L].

    >>> build_position_ids(torch.tensor([[0, 1, 1, 1, 1, 0]]))
    tensor([[0, 1, 2, 2, 3, 4]])
    """
    is_real = torch.ones_like(token_type_ids, dtype=torch.bool)
    if attention_mask is not None:
        is_real = attention_mask.bool()
    is_vision = (token_type_ids == VISION) & is_real
    outside = torch.zeros_like(is_vision[:, :1])
    before = torch.cat([outside, is_vision[:, :-1]], dim=1)
    after = torch.cat([is_vision[:, 1:], outside], dim=1)
    inside = is_vision & before & after
    inside_before = torch.cat([outside, inside[:, :-1]], dim=1)
    # The second token inside an image, and each after it, stays where the first one is.
    steps = is_real & ~(inside & inside_before)
    return (steps.long().cumsum(dim=1) - 1).clamp(min=0)


@dataclass(frozen=True)
class TokenRoute:
    """The tokens of a batch in the order of their experts, vision first.

    Attributes:
        order: int64 [B * L], the tokens in the order of their experts.
        places: int64 [B * L], the way back.
        num_vision: how many of them go to the vision expert.
        shape: (B, L).

    >>> route = TokenRoute.of(torch.tensor([[0, 1, 1, 0]]))
    >>> vision, language = route.split(torch.tensor([[[1.0], [2.0], [3.0], [4.0]]]))
    >>> vision.tolist(), language.tolist()
    ([[2.0]], [[1.0], [3.0], [4.0]])
    >>> route.merge(vision, language).flatten().tolist()
    [1.0, 2.0, 3.0, 4.0]
    """

    order: Tensor
    places: Tensor
    num_vision: int
    shape: tuple[int, int]

    @classmethod
    def of(cls, token_type_ids: Tensor) -> TokenRoute:
        """Compute the route of the tokens with ``token_type_ids``, int64 [B, L]."""
        is_language = ~vision_expert_mask(token_type_ids).flatten()
        order = is_language.long().argsort(stable=True)
        num_vision = is_language.numel() - int(is_language.sum())
        return cls(order, order.argsort(), num_vision, tuple(token_type_ids.shape))

    def split(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Split [B, L, H] into the rows of the vision expert and those of the language expert.

        Either may have no rows: its expert runs all the same, and its gradient is zero, not None.
        """
        rows = hidden.reshape(-1, hidden.shape[-1]).index_select(0, self.order)
        return rows[: self.num_vision], rows[self.num_vision :]

    def merge(self, vision: Tensor, language: Tensor) -> Tensor:
        """Merge both experts' rows in the order of the tokens: [B, L, N]."""
        merged = torch.cat([vision, language]).index_select(0, self.places)
        return merged.view(*self.shape, -1)
