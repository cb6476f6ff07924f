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
from parallel_ext.checkpoint.hf_directory import CONFIG_NAME, GENERATION_CONFIG_NAME
from parallel_ext.checkpoint.open_file import shown
from parallel_ext.checkpoint.strict_json import read_json
from parallel_ext.mesh import Mesh
from parallel_ext.models import learn
from parallel_ext.patch.checks import table_for
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
    vocab_size: int | None = None,
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
        vocab_size: the true size of a vocabulary that another system has padded in the files. Rows
            behind it are left out if all are zero, and ``config.vocab_size`` becomes this.
        options: of :func:`parallelize`.

    Returns:
        The model in eval mode, with its generation config.

    Raises:
        CheckpointError: a file is missing, damaged or of other names or shapes than the
            configuration asks for, or a row behind ``vocab_size`` is not zero; on all ranks.
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
        config, generation_config = mesh.together(what, lambda: _configs(directory, vocab_size))
        model = mesh.together(what, lambda: _on_meta(config, attn_implementation))
        parallelize(model, mesh, **options)

        mesh.together(what, lambda: _check(directory, model, vocab_size))
        layout = state_of(model).layout
        dtype = dtype or _dtype_of(model, directory)
        directory.load_into(model, mesh, layout, what, dtype, device)
        mesh.together(what, lambda: _check_complete(model))
    model.to(device)  # the buffers
    model.config.dtype = model.dtype
    model.config.name_or_path = model.name_or_path = str(source)
    if generation_config is not None:
        model.generation_config = generation_config
    return model.eval()


def _local(source: str | os.PathLike[str]) -> Path:
    """The directory itself, or the hub's snapshot, downloaded once a machine.

    The other processes of a machine wait in the download's file lock.
    """
    path = Path(source)
    if path.exists():
        return path
    return Path(snapshot_download(str(source), allow_patterns=_HUB_PATTERNS))


def _configs(
    directory: checkpoint.HFDirectory, vocab_size: int | None
) -> tuple[transformers.PreTrainedConfig, transformers.GenerationConfig | None]:
    """The configurations of a directory, with the true size of the vocabulary if it is given."""
    if vocab_size is not None and (type(vocab_size) is not int or vocab_size < 1):
        raise ValueError(f"vocab_size must be an integer of at least 1, got {vocab_size!r}")
    name, generation = CONFIG_NAME, None
    try:
        if (own := learn(read_json(directory.path / CONFIG_NAME))) is not None:
            config = transformers.CONFIG_MAPPING[own].from_pretrained(directory.path)
        else:  # code that comes with the files is not run, nor is the user asked for it
            config = transformers.AutoConfig.from_pretrained(
                directory.path, trust_remote_code=False
            )
        if directory.has_generation_config:
            name = GENERATION_CONFIG_NAME
            generation = transformers.GenerationConfig.from_pretrained(directory.path)
    except Exception as error:
        raise checkpoint.CheckpointError(
            f"{directory.path / name}: transformers refuses it: {type(error).__name__}: {error}"
        ) from error
    if vocab_size is not None:
        config.vocab_size = vocab_size
    _check_config(config, directory)
    return config, generation


def _check_config(config: transformers.PreTrainedConfig, directory: checkpoint.HFDirectory) -> None:
    """Refuse values with which no model can be built, or none in reasonable time."""
    rows, layers, pad, dtype = (
        getattr(config, name, None)
        for name in ("vocab_size", "num_hidden_layers", "pad_token_id", "dtype")
    )
    problem = ""
    if isinstance(rows, int) and not 0 < rows < 2**31:
        problem = f"vocab_size is {rows}, which no vocabulary has"
    elif isinstance(layers, int) and layers > len(directory.shapes):
        problem = f"num_hidden_layers is {layers}, but there are {len(directory.shapes)} tensors"
    elif isinstance(rows, int) and isinstance(pad, int) and not -rows <= pad < rows:
        problem = f"pad_token_id is {pad}, outside of the vocabulary of {rows}"
    elif dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        problem = f"dtype is {shown(dtype)}, but parameters are floating-point"
    if problem:
        raise checkpoint.CheckpointError(f"{directory.path / CONFIG_NAME}: {problem}")


def _on_meta(
    config: transformers.PreTrainedConfig, attn_implementation: str | None
) -> transformers.PreTrainedModel:
    """The unfilled model: parameters on meta, buffers real, weights tied as configured."""
    kwargs = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    with torch.device("cpu"), init_empty_weights(include_buffers=False):
        model = transformers.AutoModelForCausalLM.from_config(config, **kwargs)
    model.tie_weights()
    return model


def _check(
    directory: checkpoint.HFDirectory,
    model: transformers.PreTrainedModel,
    vocab_size: int | None,
) -> None:
    """See that the files hold the model, behind whose vocabulary they may hold zeros."""
    table = table_for(model)
    vocabulary = [
        f"{path}.{n}" for path in (table.embedding, table.head) for n in ("weight", "bias")
    ]
    if vocab_size is not None:
        directory.cut_vocabulary(vocabulary, vocab_size)
    directory.check(state_of(model).layout.in_files(), vocabulary)


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
