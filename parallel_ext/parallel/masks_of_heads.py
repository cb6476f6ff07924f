"""Refuse attention masks that differ by head, where a rank has only some of the heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch.nn.attention.flex_attention import BlockMask


class _AskedForHeadError(Exception):
    """A ``mask_mod`` of flex attention has looked at the number of the head."""


class _Head(torch.Tensor):
    """Stand for the number of a head, and raise when anything is done with it."""

    @classmethod
    def __torch_function__(cls, *_: Any) -> NoReturn:
        raise _AskedForHeadError


def refuse_masks_of_heads(mask: Any) -> None:
    """Raise if an attention mask is not the same for all heads.

    A rank numbers its own heads from 0, so that flex attention would take the masks of others.

    Args:
        mask: what a forward was given: a tensor, a ``BlockMask``, or a dict of them by kind of
            layer.
    """
    if isinstance(mask, Mapping):
        for each in mask.values():
            refuse_masks_of_heads(each)
    elif isinstance(mask, (torch.Tensor, BlockMask)):
        shape = tuple(mask.shape)
        if len(shape) == 4 and shape[1] > 1:
            _refuse(f"of shape {shape} has a part for each of {shape[1]} heads")
        if isinstance(mask, BlockMask) and _asks_for_head(mask):
            _refuse("has a mask_mod that looks at the number of the head")


def _asks_for_head(mask: BlockMask) -> bool:
    zero = torch.zeros((), dtype=torch.int32, device=mask.kv_num_blocks.device)
    try:
        mask.mask_mod(zero, zero.as_subclass(_Head), zero, zero)
    except _AskedForHeadError:
        return True
    return False


def _refuse(what: str) -> NoReturn:
    raise NotImplementedError(
        f"an attention mask that {what} is not supported under tp: a rank computes only its own "
        "heads; pass one that is the same for all heads"
    )
