"""Parallel models from HuggingFace directories and hub ids, and the whole state of one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from huggingface_hub import snapshot_download
from torch import nn

from parallel_ext import checkpoint
from parallel_ext.mesh import Mesh
from parallel_ext.patch.parallelize import parallelize
from parallel_ext.state import state_of

_HUB_PATTERNS = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


def from_pretrained(
    source: str | os.PathLike[str],
    mesh: Mesh,
    *,
    dtype: torch.dtype | None = None,
    attn_implementation: str | None = None,
    device: torch.device | str | None = None,
    **options: Any,
) -> transformers.PreTrainedModel:
    """Build a parallel model of which each rank reads only its own slices from disk.

    Every rank calls it. The model is made on the meta device, cut by :func:`parallelize`, checked
    name by name and shape by shape against the files, and only then filled.

    Args:
        source: a HuggingFace directory with safetensors files, or a hub id.
        mesh: from :func:`init_mesh`.
        dtype: of the parameters; when None that of the configuration, else that of the first
            tensor, as in HuggingFace. Buffers keep HuggingFace's.
        attn_implementation: as in HuggingFace, for example ``"sdpa"`` or ``"eager"``.
        device: of the parameters and buffers; when None ``mesh.device``: this rank's GPU under
            NCCL, else the CPU.
        options: of :func:`parallelize`.

    Returns:
        The model in eval mode, with its generation config.

    Raises:
        CheckpointError: a file is missing, damaged or of other names or shapes than the
            configuration asks for; on all ranks.
        CollectiveTimeout: not all ranks called it, or one was killed or stopped meanwhile.
        ValueError, DisagreementError: as :func:`parallelize`.

    Example:
        >>> model = from_pretrained("path/to/llama", init_mesh(tp=2))  # doctest: +SKIP
    """
    mesh.meet("from_pretrained")
    what = f"from_pretrained({str(source)!r})"
    local = mesh.together(what, lambda: _local(source), patient=True)  # the hub may be slow
    device = mesh.device if device is None else torch.device(device)
    with mesh.together(what, lambda: checkpoint.HFDirectory(local)) as directory:
        model = mesh.together(what, lambda: _on_meta(directory.path, attn_implementation))
        parallelize(model, mesh, **options)

        mesh.together(what, lambda: directory.check(state_of(model).layout))
        directory.load_into(model, mesh, what, dtype or _dtype_of(model, directory), device)
        mesh.together(what, lambda: _check_complete(model))
    model.to(device)  # the buffers
    model.config.dtype = model.dtype
    model.config.name_or_path = model.name_or_path = str(source)
    if (directory.path / "generation_config.json").exists():
        model.generation_config = transformers.GenerationConfig.from_pretrained(directory.path)
    return model.eval()


def _local(source: str | os.PathLike[str]) -> Path:
    """The directory itself, or the hub's snapshot, downloaded once a machine.

    The other processes of a machine wait in the download's file lock.
    """
    path = Path(source)
    if path.exists():
        return path
    return Path(snapshot_download(str(source), allow_patterns=_HUB_PATTERNS))


def _on_meta(path: Path, attn_implementation: str | None) -> transformers.PreTrainedModel:
    """The unfilled model: parameters on meta, buffers real, weights tied as configured."""
    config = transformers.AutoConfig.from_pretrained(path)
    kwargs = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    with init_empty_weights(include_buffers=False):
        model = transformers.AutoModelForCausalLM.from_config(config, **kwargs)
    model.tie_weights()
    return model


def _dtype_of(
    model: transformers.PreTrainedModel, directory: checkpoint.HFDirectory
) -> torch.dtype | None:
    in_files = (dtype for dtype in directory.dtypes.values() if dtype.is_floating_point)
    return model.config.dtype or next(in_files, None)


def _check_complete(model: nn.Module) -> None:
    tensors = (*model.named_parameters(), *model.named_buffers())
    empty = [name for name, tensor in tensors if tensor.is_meta]
    if empty:
        raise checkpoint.CheckpointError(f"no file filled {', '.join(empty)}")


def full_state_dict(model: nn.Module, writer_only: bool = True) -> dict[str, torch.Tensor]:
    """The state dict of the whole, unsharded model; the one gathering call.

    Every rank calls it; plain ``model.state_dict()`` holds local shards and communicates nothing.

    Args:
        model: a parallel model.
        writer_only: give it to rank 0 only, which needs memory for all of it; else to every rank.

    Returns:
        HuggingFace name -> full tensor on the CPU, tied names included; empty on ranks that do not
        receive it.

    Raises:
        CollectiveTimeout: not all ranks called it.
    """
    state = state_of(model)
    return checkpoint.full_state_dict(model, state.mesh, state.layout, writer_only)
