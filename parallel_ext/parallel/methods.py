"""Methods of a parallel model at run time, bound to instances in place of its class's own.

Everything here is attached to one model as bound methods, so that ``deepcopy`` rebinds it to the
copy and no HuggingFace class changes.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from itertools import chain
from types import MethodType
from typing import Any

import torch
from torch import nn

from parallel_ext.distributed.mesh import Mesh
from parallel_ext.io.hf_reader import CONFIG_NAME
from parallel_ext.io.hf_writer import with_old_rope_names, write_directory
from parallel_ext.io.publish import Publication
from parallel_ext.io.safe_open import shown
from parallel_ext.nn.vocab import VocabParallelEmbedding
from parallel_ext.parallel.arguments import arguments_of
from parallel_ext.parallel.compare import check_replicas
from parallel_ext.parallel.joining import arrive, call_together
from parallel_ext.parallel.state import ParallelState, own_state, state_of
from parallel_ext.sharding.named_shards import named_shards, to_shards
from parallel_ext.sharding.slices import local_part
from parallel_ext.version import VERSION


def bound(function: Callable[..., Any], model: nn.Module) -> MethodType:
    """Return a function as a method with the signature of its namesake in the model's class."""
    of_class = getattr(type(model), function.__name__)

    @wraps(of_class)
    def method(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return function(model, *args, **kwargs)

    docs = inspect.getdoc(function), inspect.getdoc(of_class)
    method.__doc__ = "{}\n\nIn one process:\n\n{}".format(*docs)
    return MethodType(method, model)


def generate(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run the class's own ``generate`` with rank 0's random numbers on every tp rank.

    Rank 0's generator advances as it would in a single process, and so does that of every rank
    that was in the same state; the others stay as they were. Where dp ranks take part in each
    other's forwards, all of them generate at the same time, each on its own prompts, and
    ``synced_gpus`` is on even if a trainer asks for False: who is done runs the others' forwards.
    """
    return generate_by(type(model).generate, model, *args, **kwargs)


def generate_by(plain: Callable[..., Any], model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run ``plain(model, ...)`` as :func:`generate` does, of a parallel model or one around it."""
    state = state_of(model)
    if state.forwards_together:
        kwargs["synced_gpus"] = True
    state.generates = True
    try:
        return _generate(plain, model, state, *args, **kwargs)
    finally:
        state.generates = False
        to_shards(model)


def _generate(
    plain: Callable[..., Any], model: nn.Module, state: ParallelState, *args: Any, **kwargs: Any
) -> Any:
    mesh = state.mesh
    if mesh.tp_size == 1:
        return plain(model, *args, **kwargs)
    if mesh.dp_size == 1 or state.forwards_together:
        arrive(f"{type(model).__name__}.generate")
    arguments = arguments_of(model, "generate", args, kwargs)
    arguments["model.generation_config"] = model.generation_config
    configs = (arguments.get("generation_config"), model.generation_config)
    if _one_row(arguments, configs):
        arguments.pop("streamer", None)  # which any of the ranks may have
    if own_state(model) is None and "input_ids" in arguments:  # whose ids of images may be others
        arguments["ids of the model around it"] = arguments.pop("input_ids")
    if state.agreement is not None:
        state.agreement.check(f"{type(model).__name__}.generate", arguments, "")
    asked = arguments.get("max_time") is not None
    if asked or any(getattr(config, "max_time", None) for config in configs):
        raise NotImplementedError(
            "max_time under tp is not supported: the ranks' clocks would stop them at different "
            "lengths; use max_new_tokens"
        )
    of_gpu = nullcontext()
    if mesh.device.type == "cuda":
        of_gpu = _random_numbers_of_first_rank(mesh, torch.cuda)
    with _random_numbers_of_first_rank(mesh, torch), of_gpu:
        return plain(model, *args, **kwargs)


def _one_row(arguments: Mapping[str, Any], configs: Iterable[Any]) -> bool:
    """Return whether ``generate`` makes one row, so that no streamer of HuggingFace's refuses it.

    A rank that streams would raise alone: at beams, or once a streamer is given two rows.
    """
    for name in ("num_beams", "num_return_sequences"):
        asked = (arguments.get(name), *(getattr(config, name, None) for config in configs))
        if any(number is not None and number > 1 for number in asked):
            return False
    prompts = (arguments.get(name) for name in ("inputs", "input_ids", "inputs_embeds"))
    return all(len(each) == 1 for each in prompts if isinstance(each, torch.Tensor))


def prepare_inputs_for_generation(
    model: nn.Module, input_ids: torch.Tensor, *args: Any, **kwargs: Any
) -> dict[str, Any]:
    """Prepare the next forward of ``generate`` as the class does, from inputs of one length.

    A rank that has finished runs the forwards that other dp ranks need. Its ids stay as they are,
    but the masks and positions beside them grow, and without a cache they would meet.
    """
    without = ("cache", "past_key_values", "inputs_embeds")
    if state_of(model).forwards_together and all(kwargs.get(name) is None for name in without):
        for name in ("attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids"):
            if isinstance(kwargs.get(name), torch.Tensor):
                kwargs[name] = kwargs[name][..., : input_ids.size(1)]
    return type(model).prepare_inputs_for_generation(model, input_ids, *args, **kwargs)


@contextmanager
def _random_numbers_of_first_rank(mesh: Mesh, generator: Any) -> Iterator[None]:
    """Run the block with the first tp rank's random state on every tp rank.

    ``generator`` is ``torch`` or ``torch.cuda``. A rank in another state gets its own back.
    """
    own = generator.get_rng_state()
    shared = own.clone()
    mesh.broadcast(shared, mesh.tp_control)
    generator.set_rng_state(shared)
    try:
        yield
    finally:
        if not torch.equal(own, shared):
            generator.set_rng_state(own)


# Options of HuggingFace's method: those without a meaning here, and those with one by default.
_UNUSED = ("is_main_process", "save_function", "token", "save_peft_format")
_DEFAULTS = {
    "push_to_hub": (False, None),
    "safe_serialization": (True, None),
    "variant": (None,),
    "save_original_format": (True,),
    "distributed_checkpoint": (False, None),
}


def save_pretrained(
    model: nn.Module,
    save_directory: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    state_dict: Mapping[str, torch.Tensor] | None = None,
    **kwargs: Any,
) -> None:
    """Write the whole model as a plain HuggingFace directory; every rank calls it.

    Each tensor is written once, by one rank. Options of HuggingFace's method that change nothing
    here, such as ``is_main_process`` and ``safe_serialization=True``, are accepted.

    Args:
        save_directory: where to; the same place for all ranks.
        max_shard_size: bytes of tensors a file, or text such as ``"5GB"``.
        state_dict: full tensors, as ``accelerator.get_state_dict(model)`` and
            ``px.full_state_dict(model)`` gather them on rank 0, to be written in place of the
            model's own; the main process (rank 0) writes them, and no other rank need call.

    Raises:
        TypeError: another option of HuggingFace's method.
        ValueError: ``state_dict`` on the main process does not hold the full tensors.
        DisagreementError: ranks that must hold the same hold different values.
        CheckpointError, OSError: the directory cannot be written; the previous one is then whole.
    """
    refused = [
        f"{name}={shown(value)}" if isinstance(value, (bool, int, str)) else f"{name}="
        for name, value in sorted(kwargs.items())
        if name not in _UNUSED and (name not in _DEFAULTS or value not in _DEFAULTS[name])
    ]
    if refused:
        raise TypeError(
            f"save_pretrained of a parallel model does not take {', '.join(refused)}; leave it "
            "out: it gathers the tensors itself and writes safetensors files, which "
            "huggingface_hub.upload_folder uploads"
        )
    if state_dict is not None:
        if kwargs.get("is_main_process", state_of(model).mesh.rank == 0):
            _write_given(model, save_directory, max_shard_size, state_dict)
        return
    write = partial(_write, model, save_directory, max_shard_size)
    options = {"max_shard_size": max_shard_size}
    call_together(model, "save_pretrained", (save_directory,), options, write)


def _write(
    model: nn.Module, save_directory: str | os.PathLike[str], max_shard_size: int | str
) -> None:
    state = state_of(model)
    check_replicas(model)
    write_directory(
        model,
        save_directory,
        state.mesh,
        state.layout,
        config=model.config,
        generation_config=model.generation_config if model.can_generate() else None,
        max_shard_size=max_shard_size,
        note={
            "version": VERSION,
            "vocab_size": model.config.vocab_size,
            "tp": state.mesh.tp_size,
            "ep": state.mesh.ep_size,
            "dp": state.mesh.dp_size,
        },
    )


def _write_given(
    model: nn.Module,
    save_directory: str | os.PathLike[str],
    max_shard_size: int | str,
    state_dict: Mapping[str, torch.Tensor],
) -> None:
    """Write full tensors by HuggingFace's own method, on this rank alone."""
    layout = state_of(model).layout
    for name in layout.tensors:
        shape = tuple(state_dict[name].shape) if name in state_dict else "missing"
        if shape != layout[name].shape:
            raise ValueError(
                f"save_pretrained: {name} of state_dict is {shape}, but the full tensor is "
                f"{layout[name].shape}; leave state_dict out, or gather it on all ranks by "
                "px.full_state_dict(model)"
            )
    known = layout.tensors.keys() | layout.tied.keys()
    full = {name: tensor for name, tensor in state_dict.items() if name in known}
    with Publication(save_directory) as temporary:
        type(model).save_pretrained(
            model, temporary, state_dict=full, max_shard_size=max_shard_size
        )
        config = temporary / CONFIG_NAME
        config.write_bytes(with_old_rope_names(config.read_bytes()))


def num_parameters(
    model: nn.Module, only_trainable: bool = False, exclude_embeddings: bool = False
) -> int:
    """Count the parameters of the full model, with HuggingFace's options."""
    kinds = (nn.Embedding, VocabParallelEmbedding) if exclude_embeddings else ()
    modules = model.named_modules()
    left_out = {f"{path}.weight" for path, each in modules if isinstance(each, kinds)}
    return sum(
        layout.numel
        for name, parameter, layout in named_shards(model)
        if name not in left_out and (parameter.requires_grad or not only_trainable)
    )


def get_memory_footprint(model: nn.Module, return_buffers: bool = True) -> int:
    """Count the bytes of this rank's shards, not of the full model; with buffers if asked."""
    tensors = chain(model.parameters(), model.buffers() if return_buffers else ())
    return sum(local_part(tensor).nbytes for tensor in tensors)
