"""Private names of transformers for which it has no public ones; tried with 5.15 and 5.24.

They stand here and nowhere else in the package; ``docs/internals.md`` says what each is needed for.
Of a subclass, such as CogAgent's model, what transformers asks subclasses for stands there.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import nn

# --- Configurations ---


def attention_of(config: Any) -> str | None:
    """Return which attention a model of ``config`` computes, for example ``"sdpa"``."""
    return config._attn_implementation


def forget_attention(config: Any) -> None:
    """Let transformers choose the attention of ``config`` again."""
    config._attn_implementation = None


def is_sharded_by_transformers(model: nn.Module) -> bool:
    """Return whether transformers' own tensor parallelism has sharded ``model``."""
    return getattr(model, "_device_mesh", None) is not None


def is_input_hook(hook: Any) -> bool:
    """Return whether ``model.enable_input_require_grads()`` has made a hook, for checkpointing."""
    return getattr(hook, "__qualname__", "").endswith(".make_inputs_require_grads")


def take_for_unchanged(generation_config: Any) -> None:
    """Let ``generation_config`` be saved as it is, even if it is not valid.

    As transformers does when it reads a file: what is published and has not been changed since can
    be saved again, as Llama 2's is not valid.
    """
    generation_config._original_object_hash = hash(generation_config)


def padding_of(generation_config: Any) -> torch.Tensor:
    """Return the id that finished sequences are padded with, inside ``generate``."""
    return generation_config._pad_token_tensor


# --- Loading ---


def kept_in_fp32(model: Any, dtype: torch.dtype | None) -> tuple[str, ...]:
    """Return parts of the names of tensors that stay fp32 in a model that is loaded as ``dtype``.

    As the router of DeepSeek-V3.
    """
    return tuple(model._get_dtype_plan(dtype))


def ignored_in_files(model: Any) -> tuple[str, ...]:
    """Return patterns of the names that files may hold beside the tensors of ``model``.

    As the layer of DeepSeek-V3 that predicts one token more, which transformers does not have.
    """
    return tuple(sorted(model._keys_to_ignore_on_load_unexpected or ()))


# --- Steps of ``generate`` ---


def let_keys_size_static_caches(model: nn.Module) -> None:
    """Let the first keys say how many heads a static cache holds, where the configuration would.

    A rank has fewer.
    """
    model._get_static_cache_init_shape = MethodType(_unknown_sizes, model)


def _unknown_sizes(model: nn.Module) -> None:
    return None


def prefill(
    model: Any, input_ids: torch.Tensor, generation_config: Any, model_kwargs: dict[str, Any]
) -> Any:
    """Return the outputs for the whole prompts, in which generation begins."""
    return model._prefill(input_ids, generation_config, model_kwargs)


def next_model_kwargs(model: Any, outputs: Any, model_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return what the next forward gets beside the ids, such as the cache."""
    return model._update_model_kwargs_for_generation(outputs, model_kwargs)


def has_unfinished(model: Any, finished: bool, together: bool, device: torch.device) -> bool:
    """Return whether a rank has an unfinished sequence: this one or, if ``together``, any."""
    return model._has_unfinished_sequences(finished, together, device=device)


# --- Resizing ---


def resized_embedding(
    model: Any, embedding: nn.Embedding, rows: int, mean_resizing: bool
) -> nn.Embedding:
    """Return an embedding with ``rows`` rows, new ones as transformers draws them."""
    return model._get_resized_embeddings(embedding, rows, None, mean_resizing)


def resized_head(model: Any, head: nn.Linear, rows: int, mean_resizing: bool) -> nn.Linear:
    """Return an output head with ``rows`` rows, new ones as transformers draws them."""
    return model._get_resized_lm_head(head, rows, mean_resizing=mean_resizing)
