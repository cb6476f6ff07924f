"""PEFT's own classes and functions, extended to parallel models."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import peft

from parallel_ext.lora import adding, files, merging


def _extend(owner: Any, name: str, extension: Callable[..., Any]) -> None:
    plain = getattr(owner, name)

    @wraps(plain)  # a function and no partial, so that it becomes a method where it is in a class
    def extended(*args: Any, **kwargs: Any) -> Any:
        return extension(plain, *args, **kwargs)

    setattr(owner, name, extended)


def extend_peft() -> None:
    """Let PEFT's classes serve parallel models too; what they do to others stays as it is."""
    _extend(peft.PeftModel, "__init__", adding.start_model)
    _extend(peft.LoraModel, "inject_adapter", adding.inject_adapter)
    _extend(peft.PeftModel, "get_nb_trainable_parameters", adding.count_parameters)
    _extend(peft.PeftModel, "save_pretrained", files.save_pretrained)
    _extend(peft.PeftModel, "load_adapter", files.load_adapter)
    _extend(peft.utils.save_and_load, "has_valid_embedding_base_layer", files.is_embedding)
    for owner in (peft, peft.peft_model):
        _extend(owner, "set_peft_model_state_dict", files.set_state_dict)
        _extend(owner, "get_peft_model_state_dict", files.adapter_state_dict)
    _extend(peft.LoraModel, "merge_adapter", merging.merge_adapter)
    _extend(peft.LoraModel, "merge_and_unload", merging.merge_and_unload)
    _extend(peft.LoraModel, "add_weighted_adapter", adding.add_weighted_adapter)
