"""The options of ``from_pretrained``, checked before a file is opened or the hub is called."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError

from parallel_ext.distributed.errors import CheckpointError

_HUB_PATTERNS = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
_QUANTIZED = "quantized models are not served; save the model dequantized"
_MESH = "the mesh says which ranks share the model, as in px.init_mesh(tp=2)"
_SHARDS = "each rank holds its shards; use more ranks"
_SAFETENSORS = "weights are read from model.safetensors and its like; convert the model first"
# Options of HuggingFace's from_pretrained that are about how files are read, not what they become.
_WITHOUT_EFFECT = {"low_cpu_mem_usage", "weights_only", "disable_mmap", "resume_download", "mirror"}
# Options that are refused, but for None and False, which ask for what is done here.
_WHY_NOT = {
    "device_map": "the mesh places the parameters; pass device= for another device",
    "max_memory": _SHARDS,
    **dict.fromkeys(("offload_folder", "offload_buffers", "offload_state_dict"), _SHARDS),
    "state_dict": "the weights are those of the files; or load the model and px.parallelize it",
    "quantization_config": _QUANTIZED,
    "load_in_8bit": _QUANTIZED,
    "load_in_4bit": _QUANTIZED,
    "gguf_file": _SAFETENSORS,
    **dict.fromkeys(("use_safetensors", "from_tf", "from_flax", "variant"), _SAFETENSORS),
    "generation_config": "it is the one beside the weights; set model.generation_config",
    "adapter_kwargs": "peft.PeftModel.from_pretrained adds an adapter to the model",
    "key_mapping": "names are those that transformers saves",
    "use_kernels": "the ops are those of this package",
    "experts_implementation": "experts are computed by this package",
    "use_auth_token": "it is token now",
    "proxies": "set HTTPS_PROXY in the environment",
    "ignore_mismatched_sizes": "shapes must be those of the configuration",
    "output_loading_info": "a name that is missing or too many is an error, so there is no list",
    **dict.fromkeys(("tp_plan", "tp_size", "device_mesh", "distributed_config"), _MESH),
}


def check_options(
    own: Callable[..., Any], handed_on: Callable[..., Any], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the options of a call of ``own`` that ``handed_on`` takes, and raise for unknown ones.

    Raises:
        TypeError: there is no such option, or not here, and why.
    """
    names = _options_of(handed_on)
    for name, value in options.items():
        unset = name in _WHY_NOT and (value is None or value is (name == "use_safetensors"))
        if name in names or name in _WITHOUT_EFFECT or unset:
            continue
        if name in _WHY_NOT:
            raise TypeError(f"{own.__name__} does not take {name}: {_WHY_NOT[name]}")
        known = [*_options_of(own), *names]
        hint = "; what a configuration has, set in config=" if "config" in known else ""
        raise TypeError(f"{own.__name__} has no option {name}; it takes {', '.join(known)}{hint}")
    return {name: value for name, value in options.items() if name in names}


def _options_of(function: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(function).parameters.items()
    return [name for name, each in parameters if each.kind is each.KEYWORD_ONLY]


def check_text(name: str, value: Any) -> None:
    """Raise a TypeError unless an option is None or a text of at least one character."""
    if value is not None and not (isinstance(value, str) and value):
        raise TypeError(f"from_pretrained: {name} must be a text or None, got {value!r}")


def dtype_of(dtype: Any, torch_dtype: Any) -> torch.dtype | None:
    """Return the dtype that an option or its older name means; None where the files decide.

    Args:
        dtype, torch_dtype: a dtype, its name such as ``"bfloat16"``, ``"auto"``, or None.

    Raises:
        ValueError: it is nothing of these, no dtype of parameters, or the two differ.
    """
    found = {
        name: _dtype(name, value)
        for name, value in (("dtype", dtype), ("torch_dtype", torch_dtype))
        if value is not None
    }
    if len(set(found.values())) > 1:
        raise ValueError(
            f"from_pretrained: dtype={dtype!r} and torch_dtype={torch_dtype!r} are two names of "
            "one option; pass dtype"
        )
    return next(iter(found.values()), None)


def _dtype(name: str, value: Any) -> torch.dtype | None:
    if isinstance(value, str) and value == "auto":
        return None
    found = getattr(torch, value, None) if isinstance(value, str) else value
    if not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise ValueError(
            f"from_pretrained: {name} must be a floating-point torch.dtype, its name such as "
            f'"bfloat16", or "auto", got {value!r}'
        )
    return found


def local_directory(source: str | os.PathLike[str], subfolder: str | None, **hub: Any) -> Path:
    """Return the directory itself, or the hub's snapshot of it, downloaded once a machine.

    The other processes of a machine wait in the download's file lock.

    Args:
        hub: options of ``huggingface_hub.snapshot_download``, which a directory does not need.

    Raises:
        TypeError, ValueError: the arguments name no place.
        CheckpointError: there is no such directory, nor does the hub give it.
    """
    if not isinstance(source, (str, os.PathLike)) or not os.fspath(source):
        raise TypeError(f"from_pretrained: source must be a directory or hub id, got {source!r}")
    inner = PurePath(subfolder or "")
    if inner.is_absolute() or ".." in inner.parts:
        raise ValueError(f"from_pretrained: subfolder must lie in the source, got {subfolder!r}")
    if os.path.exists(source):
        return Path(source) / inner
    patterns = [str(inner / pattern) for pattern in _HUB_PATTERNS]
    try:
        return Path(snapshot_download(str(source), allow_patterns=patterns, **hub)) / inner
    except HFValidationError:  # not a name of the hub's either
        raise CheckpointError(f"{source}: no such directory") from None
    except Exception as error:
        raise CheckpointError(
            f"{source}: no such directory, and the hub does not give it: "
            f"{type(error).__name__}: {error}"
        ) from error
