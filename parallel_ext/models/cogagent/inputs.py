"""The inputs of CogAgent, checked: an error names the row and what it holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from parallel_ext.models.cogagent.tokens import LANGUAGE, VISION

Images = Tensor | Sequence[Sequence[Tensor]]
"""One image for each row, [B, 3, H, W], or for each row the list of its images, [3, H, W] each."""

_NAMES = {field.name for field in fields(CausalLMOutputWithPast)}
CACHE = "cache" if "cache" in _NAMES else "past_key_values"
"""What this transformers calls the cache in outputs and in ``generate``; since 5.24 ``cache``."""


def stacked_images(
    name: str, images: Images | None, rows: int, size: int
) -> tuple[Tensor | None, list[int]]:
    """Stack all images of a batch into one tensor, and count the images of each row.

    Args:
        name: of the argument, for errors.
        images: see :data:`Images`; None for a batch without any.
        rows: B.
        size: pixels along each side.

    Returns:
        [N, 3, size, size] or None where there is no image, and B counts.

    Raises:
        ValueError: another number of rows, another size, or no list of images for each row.

    >>> stacked_images("images", [[torch.zeros(3, 4, 4)], []], 2, 4)[1]
    [1, 0]
    """
    if images is None:
        return None, [0] * rows
    if isinstance(images, Tensor):
        _check(
            images.dim() == 4,
            f"{name} has shape {list(images.shape)}; give [rows, 3, {size}, {size}], or a list of "
            "images for each row",
        )
        images = [[image] for image in images]
    _check(
        len(images) == rows,
        f"{name} is for {len(images)} rows, but there are {rows}; give an entry for each row, an "
        "empty list where it has no image",
    )
    for row, of_row in enumerate(images):
        _check(
            isinstance(of_row, (list, tuple)),
            f"{name}[{row}] is a {type(of_row).__name__}; give the list of the images of this row",
        )
        for image in of_row:
            _check(
                isinstance(image, Tensor) and list(image.shape) == [3, size, size],
                f"row {row} of {name} holds {list(getattr(image, 'shape', [])) or type(image)}; "
                f"this model reads images of [3, {size}, {size}]",
            )
    counts = [len(of_row) for of_row in images]
    every = [image for of_row in images for image in of_row]
    return torch.stack(every) if every else None, counts


def check_token_types(token_type_ids: Tensor, shape: torch.Size) -> None:
    """Raise where ``token_type_ids`` are not :data:`LANGUAGE` or :data:`VISION` for each token."""
    _check(
        token_type_ids.shape == shape,
        f"token_type_ids have shape {list(token_type_ids.shape)}, the tokens {list(shape)}; give "
        "one type for each token",
    )
    wrong = (token_type_ids != LANGUAGE) & (token_type_ids != VISION)
    if wrong.any():
        row, column = wrong.nonzero()[0].tolist()
        _check(
            False,
            f"token type {int(token_type_ids[row, column])} at row {row}, position {column}; "
            f"types are {LANGUAGE} (text) and {VISION} (image)",
        )


def check_counts(
    token_type_ids: Tensor, images: list[int], cross_images: list[int], image_tokens: int
) -> None:
    """Raise where a row's image tokens, images and high-resolution images do not fit each other.

    Args:
        token_type_ids: int64 [B, L].
        images, cross_images: how many each row has.
        image_tokens: how many tokens one image fills.
    """
    tokens = (token_type_ids == VISION).sum(dim=1).tolist()
    for row, (found, count, cross) in enumerate(zip(tokens, images, cross_images, strict=True)):
        _check(
            found == count * image_tokens,
            f"row {row} has {found} image tokens (token_type_ids == {VISION}), but its images "
            f"({count}) fill {count * image_tokens}: {image_tokens} each",
        )
        _check(
            cross <= 1,
            f"row {row} has {cross} cross_images; the cross attention looks at one image for each "
            "row",
        )
        _check(
            cross == 1 or count == 0,
            f"row {row} has images ({count}), but none in cross_images; give the same picture at "
            "high resolution",
        )


def check_mask(attention_mask: Tensor | None, rows: int, length: int) -> None:
    """Raise where ``attention_mask`` is not [rows, length], the cached tokens included."""
    if attention_mask is None:
        return
    _check(
        list(attention_mask.shape) == [rows, length],
        f"attention_mask has shape {list(attention_mask.shape)}; it must be [{rows}, {length}], "
        "rows and tokens (cached ones included)",
    )


def check_positions(position_ids: Tensor, rows: int, length: int) -> None:
    """Raise where ``position_ids`` are not one position for each token of this call."""
    _check(
        list(position_ids.shape) in ([rows, length], [1, length]),
        f"position_ids have shape {list(position_ids.shape)}, the tokens {[rows, length]}; give "
        "one position for each token",
    )


def the_cache(cache: Cache | None, past_key_values: Cache | None) -> Cache | None:
    """Return the cache, which transformers before 5.24 names ``past_key_values``.

    Raises:
        ValueError: a cache under each of the two names.
    """
    _check(
        cache is None or past_key_values is None,
        "cache and past_key_values are two names for one argument; give one of them",
    )
    return past_key_values if cache is None else cache


def as_cache(cache: Cache | None, use_cache: bool) -> EncoderDecoderCache | None:
    """Return the cache of self and cross attention that this call reads and fills, if any.

    Raises:
        ValueError: a cache that cannot hold, or does not hold, the keys of the cross attention.
    """
    if isinstance(cache, EncoderDecoderCache):
        return cache
    if cache is None:
        return EncoderDecoderCache(DynamicCache(), DynamicCache()) if use_cache else None
    _check(
        isinstance(cache, DynamicCache) and cache.get_seq_length() == 0,
        f"{CACHE} is a {type(cache).__name__} without the keys of the cross attention; pass None "
        f"at first, then the {CACHE} of the output",
    )
    return EncoderDecoderCache(cache, DynamicCache())


def attention_mask_of(
    attention_mask: Tensor | None, query_length: int, key_length: int, device: torch.device
) -> Tensor | None:
    """Return a mask of the keys that each token sees: earlier ones but padding, and itself.

    Returns:
        bool [B or 1, 1, query_length, key_length], or None where the plain causal mask says it all.
    """
    padded = attention_mask is not None and not bool(attention_mask.all())
    if not padded and query_length in (1, key_length):
        return None
    last = torch.arange(key_length - query_length, key_length, device=device)
    keys = torch.arange(key_length, device=device)
    mask = (keys <= last[:, None])[None, None]
    if padded:
        mask = mask & attention_mask[:, None, None, :].bool()
        # Padding to the left sees nothing; a softmax over nothing would be NaN.
        itself = (keys == last[:, None])[None, None]
        mask = mask | (itself & ~mask.any(dim=-1, keepdim=True))
    return mask


def _check(holds: bool, text: str) -> None:
    if not holds:
        raise ValueError(f"CogAgent: {text}")
