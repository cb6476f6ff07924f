"""Parallel models from HuggingFace directories and hub ids, and the whole state of one."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import nn

from parallel_ext.distributed.errors import CheckpointError, check_positive, first_few, warn_user
from parallel_ext.distributed.mesh import Mesh, given_or_last
from parallel_ext.distributed.require_equal import require_equal
from parallel_ext.io.hf_reader import HFDirectory
from parallel_ext.io.state_dict import gather_in_step, gather_state_dict
from parallel_ext.models import SPECS
from parallel_ext.models._transformers_private import ignored_in_files, kept_in_fp32
from parallel_ext.parallel.beside import (
    beginnings_inside,
    check_equal_beside,
    layout_around,
    parallel_parts,
    parameters_beside,
    tensors_beside,
    tied_beside,
    whole_and_shards,
)
from parallel_ext.parallel.configuration import build_on_meta, configurations, names_in_model
from parallel_ext.parallel.joining import arrive
from parallel_ext.parallel.options import check_options, check_text, dtype_of, local_directory
from parallel_ext.parallel.parallelize import parallelize
from parallel_ext.parallel.state import state_of
from parallel_ext.parallel.validate import decoder_in
from parallel_ext.sharding._torch_private import without_wrappers
from parallel_ext.sharding.digests import content_digest
from parallel_ext.sharding.layout import ModelLayout
from parallel_ext.sharding.named_shards import named_shards
from parallel_ext.sharding.slices import local_part

_SAME = "give all ranks the same files and options"
_SMALL = 1 << 16  # elements of a tensor whose values are compared


def from_pretrained(
    source: str | os.PathLike[str],
    mesh: Mesh | None = None,
    *,
    dtype: torch.dtype | str | None = None,
    torch_dtype: torch.dtype | str | None = None,
    attn_implementation: str | None = None,
    device: torch.device | str | None = None,
    vocab_size: int | None = None,
    subfolder: str | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
    force_download: bool = False,
    trust_remote_code: bool | None = None,
    config: transformers.PreTrainedConfig | None = None,
    **options: Any,
) -> transformers.PreTrainedModel:
    """Build a parallel model of which each rank reads only its own slices from disk.

    Every rank calls it. The model is made on the meta device, sharded by :func:`parallelize`,
    checked name by name and shape by shape against the files, and only then filled. Of a model of
    images, as LLaVA, the decoder of text is sharded; all else is whole on every rank.

    Args:
        source: a HuggingFace directory with safetensors files, or a hub id.
        mesh: from :func:`init_mesh`; the one made last when None.
        dtype: of the parameters, also by name, such as ``"bfloat16"``; when None or ``"auto"`` that
            of the configuration, else that of the first tensor, as in HuggingFace. Buffers keep
            HuggingFace's.
        torch_dtype: the same by its older name.
        attn_implementation: as in HuggingFace, for example ``"sdpa"`` or ``"eager"``. What the
            files ask for does not count.
        device: of the parameters and buffers; when None ``mesh.device``.
        vocab_size: the true size of a vocabulary that another system has padded in the files. Rows
            behind it are left out if all are zero, and ``config.vocab_size`` becomes this.
        subfolder: where in the source the model is.
        revision, token, cache_dir, local_files_only, force_download: of the hub, as in
            HuggingFace; a directory needs none of them.
        trust_remote_code: permission to run code beside the files, which is never done: True is
            refused where they ask for other code than transformers' or this package's.
        config: that of the files with other options, such as ``attention_dropout``; the sizes stay
            those of the files, but for fewer layers: the first ones are loaded, with a warning.
            None for that of the files. Of Qwen3.5's, which hold a tower of images, the
            ``text_config`` alone asks for the model of text alone.
        options: of :func:`parallelize`.

    Returns:
        The model in eval mode, with its generation config.

    Raises:
        CheckpointError: a directory or file is missing, damaged or of other names or shapes than
            the configuration asks for, the configuration makes no model that is served, or a row
            behind ``vocab_size`` is not zero; on all ranks.
        CollectiveTimeout: not all ranks called it, or one was killed or stopped meanwhile.
        TypeError: there is no such option, or no mesh.
        ValueError, DisagreementError: as :func:`parallelize`; also where the ranks' options,
            configurations or files differ. Of the files what all ranks read is compared, such as
            norms, but for large tensors.

    Example:
        >>> model = from_pretrained("path/to/llama", init_mesh(tp=2))  # doctest: +SKIP
    """
    mesh = given_or_last("from_pretrained", mesh)
    mesh.control.barrier("from_pretrained")
    op_name, given = f"from_pretrained({str(source)!r})", config

    def check() -> tuple[dict[str, Any], torch.dtype | None]:
        check_text("attn_implementation", attn_implementation)
        check_text("subfolder", subfolder or None)  # in HuggingFace "" is none
        check_text("revision", revision)
        if vocab_size is not None:
            check_positive("vocab_size", vocab_size)
        if config is not None and not isinstance(config, transformers.PreTrainedConfig):
            raise TypeError(f"config must be a configuration of transformers, got {config!r}")
        return check_options(from_pretrained, parallelize, options), dtype_of(dtype, torch_dtype)

    options, dtype = mesh.control.run_on_all(op_name, check)
    hub = {
        "revision": revision,
        "token": token,
        "cache_dir": cache_dir,
        "local_files_only": local_files_only,
        "force_download": force_download,
    }
    local = mesh.control.run_on_all(  # the hub may be slow
        op_name, lambda: local_directory(source, subfolder, **hub), patient=True
    )
    device = mesh.device if device is None else torch.device(device)
    with mesh.control.run_on_all(op_name, lambda: HFDirectory(local)) as directory:
        config, generation_config = mesh.control.run_on_all(
            op_name, lambda: configurations(directory, vocab_size, bool(trust_remote_code), given)
        )
        if dtype is None:
            in_files = (each for each in directory.dtypes.values() if each.is_floating_point)
            dtype = dtype_of(config.dtype, None) or next(in_files, None)
        model = mesh.control.run_on_all(
            op_name, lambda: build_on_meta(directory, config, attn_implementation, dtype)
        )
        _check_equal(model, dtype, mesh, op_name)
        inner = mesh.control.run_on_all(op_name, lambda: _decoder_in(model))
        names = {} if inner is model else names_in_model(model, directory.shapes)
        parallelize(model, mesh, **options)
        spec, inside = state_of(model).spec, state_of(model).layout
        directory.rename(lambda name: names.get(name) or spec.from_image_files(name))
        # As transformers saves it with save_original_format=False, experts are whole in the files.
        layout = layout_around(model, inside).for_files(directory.shapes)
        mesh.control.run_on_all(
            op_name, lambda: _check(directory, model, layout, vocab_size, given is not None)
        )
        (prefix,) = beginnings_inside(model)
        directory.rename(lambda name: name.removeprefix(prefix))
        loads = op_name, dtype, device, _in_fp32(model, inner, dtype)
        directory.load_into(inner, mesh, inside.for_files(directory.shapes), *loads)
        if inner is not model:  # what is around it is on meta still
            directory.load_into(model, mesh, layout, *loads)
        mesh.control.run_on_all(op_name, lambda: _check_complete(model))
        _check_same_files(model, mesh, op_name)
    model.to(device)  # the buffers
    inner_configs = (getattr(model.config, name) for name in model.config.sub_configs)
    for each in (model.config, *filter(None, inner_configs)):
        each.dtype = model.dtype
    model.config.name_or_path = model.name_or_path = str(source)
    if model.can_generate():
        model.generation_config = generation_config
    return model.eval()


def _decoder_in(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    """Return what becomes parallel: a model of text, or the decoder in one of images."""
    if model.config.get_text_config() is model.config:
        return model
    if (decoder := decoder_in(model)) is None:
        text = model.config.get_text_config().model_type
        alone = (
            "; config=transformers.AutoConfig.from_pretrained(source).text_config reads that alone"
        )
        raise CheckpointError(
            f"{type(model).__name__} holds a {text!r}, which is not served inside of another model"
            + (alone if SPECS[text].in_image_files else "")
        )
    return decoder


def _in_fp32(
    model: transformers.PreTrainedModel, inner: nn.Module, dtype: torch.dtype | None
) -> tuple[str, ...]:
    """Return parts of the names of what stays fp32 in a model on meta, and in the decoder in it.

    By the attributes of the class, or since a module asks for it, as the router of Hunyuan-A13B.
    """
    kept = kept_in_fp32(model, dtype)
    if dtype in (None, torch.float32):
        return kept
    parameters = (*model.named_parameters(), *inner.named_parameters())
    return (*kept, *(name for name, each in parameters if each.dtype == torch.float32))


def _check(
    directory: HFDirectory,
    model: transformers.PreTrainedModel,
    layout: ModelLayout,
    vocab_size: int | None,
    may_have_fewer_layers: bool,
) -> None:
    """Raise unless the files hold the model; behind its vocabulary they may hold zeros."""
    state, (prefix,) = state_of(model), beginnings_inside(model)
    if prefix and vocab_size is not None:
        raise CheckpointError(f"{directory.path}: vocab_size= is served for models of text alone")
    if may_have_fewer_layers:
        layers = f"{prefix}{state.spec.layers}"
        number = len(model.get_submodule(layers))
        there = directory.drop_layers(layers, number)
        if number < there and state.mesh.rank == 0:
            warn_user(f"{directory.path}: the first {number} of {there} layers are loaded")
    if vocab_size is not None:
        directory.drop_padding_rows(state.spec.vocabulary, vocab_size)
    of_model = state.spec.mixtures(state.layout).items()
    mixtures = {f"{prefix}{path}": names for path, names in of_model}
    directory.transpose(
        (
            f"{at}.{mixture.experts}.{name}"
            for at, mixture in mixtures.items()
            if mixture.transposed_in_files
            for name in mixture.parameters
        ),
        layout,
    )
    in_files = replace(layout, tied={**layout.tied, **tied_beside(model)}).in_files()
    ignored = (*ignored_in_files(model), *state.spec.beside_text)
    unused = directory.drop_unused(ignored, in_files.tensors)
    if unused and state.mesh.rank == 0:
        warn_user(
            f"{directory.path}: {first_few(unused)} are left out, as by transformers, whose "
            f"{type(model).__name__} has no such layers"
        )
    # Files must hold the buffers by which experts are chosen.
    of_mixtures = tuple(f"{at}." for at in mixtures)
    found = (name for name in layout.buffers if name.startswith(of_mixtures))
    made_by_model = in_files.buffers - {
        part.name for name in found for part in layout.parts_of(name)
    }
    directory.check(replace(in_files, buffers=made_by_model), state.spec.vocabulary)


def _check_equal(
    model: transformers.PreTrainedModel, dtype: torch.dtype | None, mesh: Mesh, op_name: str
) -> None:
    """Raise unless the ranks, each of which may have a copy of the files, are to load one model."""
    options = {
        f"config.{name}": repr(value)
        for name, value in model.config.to_dict().items()
        if name not in ("_name_or_path", "transformers_version")
    }
    require_equal(mesh.control, op_name, {"dtype": str(dtype), **options}, advice=_SAME)


def _check_same_files(model: transformers.PreTrainedModel, mesh: Mesh, op_name: str) -> None:
    """Raise where small tensors that all ranks have read, such as norms, differ."""
    own = {
        name: content_digest(local_part(parameter))
        for name, parameter, layout in named_shards(model)
        if layout.is_replicated and layout.numel <= _SMALL
    }
    require_equal(mesh.control, op_name, own, noun="the values in the files of ", advice=_SAME)


def _check_complete(model: nn.Module) -> None:
    tensors = (*model.named_parameters(), *model.named_buffers())
    empty = [name for name, tensor in tensors if tensor.is_meta]
    if empty:
        raise CheckpointError(f"no file filled {', '.join(empty)}")


def full_state_dict(model: nn.Module, writer_only: bool = True) -> dict[str, torch.Tensor]:
    """Gather the state dict of the full, unsharded model.

    Every rank calls it; plain ``model.state_dict()`` holds local shards and communicates nothing.

    Args:
        model: a parallel model, or a module that holds some.
        writer_only: give it to rank 0 only, which needs memory for all of it; else to every rank.

    Returns:
        Name -> full tensor on the CPU, tied names included, as ``model.state_dict()`` of one
        process; empty on ranks that do not receive it.

    Raises:
        CollectiveTimeout: not all ranks called it.
        DisagreementError: ranks hold other parameters beside a parallel model.
        ValueError: the embedding to which a head beside it is tied was replaced.
    """
    arrive("full_state_dict")
    mesh, tied, full = state_of(model).mesh, tied_beside(model), {}
    whole, shards = whole_and_shards(parameters_beside(model))
    if whole:
        check_equal_beside(whole, mesh, "full_state_dict")
    first_name = {id(shard): name for name, (shard, _) in shards.items()}
    for path, each in parallel_parts(model).items():
        gathered = gather_state_dict(each, mesh, state_of(each).layout, writer_only)
        names = {name: without_wrappers(f"{path}.{name}" if path else name) for name in gathered}
        full |= {name: gathered[own] for own, name in names.items()}
        # Which a module that holds the model may have by another name too.
        first_name |= {id(p): names[n] for n, p in each.named_parameters() if n in names}
    if shards:
        full |= gather_in_step(shards, mesh, "full_state_dict", writer_only)
    if mesh.rank == 0 or not writer_only:
        for name, tensor in tensors_beside(model):
            first = first_name.get(id(tensor))
            full[name] = tensor.detach().cpu().clone() if first is None else full[first]
        full |= {name: full[first] for name, first in tied.items()}
    return full
