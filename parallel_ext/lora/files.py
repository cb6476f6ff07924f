"""Write and read PEFT's adapter files, and compare adapters between ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import peft
import torch
from peft.tuners.lora.layer import LoraLayer
from peft.tuners.trainable_tokens import TrainableTokensLayer
from peft.utils.transformers_weight_conversion import (
    convert_peft_adapter_state_dict_for_transformers,
)
from torch import nn

from parallel_ext.checkpoint.source import ADAPTER_NAME
from parallel_ext.distributed.errors import CheckpointError, first_few
from parallel_ext.distributed.require_equal import require_equal
from parallel_ext.io import disk
from parallel_ext.io.hf_reader import ADAPTER_CONFIG_NAME, ADAPTER_PICKLE_NAME
from parallel_ext.io.replace_files import replaced_files
from parallel_ext.io.rewrite import copy_tensors
from parallel_ext.io.safetensors_reader import SafetensorsFile
from parallel_ext.io.same_directory import check_same_directory
from parallel_ext.io.state_dict import gather_in_step
from parallel_ext.lora.config import refuse_unsupported
from parallel_ext.nn.replicas import compare
from parallel_ext.nn.vocab import VocabParallelEmbedding, VocabParallelHead
from parallel_ext.parallel.arguments import arguments_of
from parallel_ext.parallel.joining import arrive, call_together
from parallel_ext.parallel.state import ParallelState, state_of
from parallel_ext.sharding.digests import content_digest
from parallel_ext.sharding.layout import TensorLayout
from parallel_ext.sharding.named_shards import named_shards, persistent_buffers
from parallel_ext.sharding.slices import take


def parallel_state(model: nn.Module) -> ParallelState | None:
    """Return how a model is spread over ranks; None for one that was not parallelized."""
    try:
        return state_of(model)
    except TypeError:
        return None


_ADAPTERS = {
    *LoraLayer.adapter_layer_names,
    *TrainableTokensLayer.adapter_layer_names,
    *("lora_magnitude_vector", "modules_to_save"),
}


def check_adapters(model: nn.Module, state: ParallelState, op_name: str) -> None:
    """Raise unless replicated parts of an adapter are equal bit for bit; all ranks call it."""
    trained = {
        name: (parameter, layout)
        for name, parameter, layout in named_shards(model)
        if set(name.split(".")) & _ADAPTERS
    }
    compare(trained, state.mesh, op_name)


def saved_tensors(model: nn.Module, adapter: str, **options: Any) -> dict[str, str]:
    """Map each name in an adapter's file, as PEFT chooses them, to its name in the model."""
    names: dict[int, str] = {}
    logical: dict[str, torch.Tensor] = {}
    for name, (tensor, layout) in layouts_of(model).items():
        logical[name] = torch.empty(layout.shape, dtype=tensor.dtype, device="meta")
        names[id(logical[name])] = name
    chosen = peft.get_peft_model_state_dict(
        model, state_dict=logical, adapter_name=adapter, **options
    )
    return {saved: names[id(tensor)] for saved, tensor in chosen.items()}


def layouts_of(model: nn.Module) -> dict[str, tuple[torch.Tensor, TensorLayout]]:
    """Map every name of every parameter and persistent buffer to the tensor and its layout."""
    layouts = {id(parameter): layout for _, parameter, layout in named_shards(model)}
    parameters = {
        name: (parameter, layouts[id(parameter)])
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    buffers = {  # modules that PEFT trains whole may have some
        name: (buffer, TensorLayout(name, tuple(buffer.shape)))
        for name, buffer in persistent_buffers(model)
    }
    return parameters | buffers


def is_embedding(plain: Callable[[nn.Module], bool], layer: nn.Module) -> bool:
    """Return whether ``layer`` is one of which PEFT saves the base beside the adapter."""
    base = getattr(layer, "base_layer", None)
    return isinstance(base, (VocabParallelEmbedding, VocabParallelHead)) or plain(layer)


def adapter_state_dict(
    plain: Callable[..., dict[str, torch.Tensor]],
    model: nn.Module,
    state_dict: dict[str, torch.Tensor] | None = None,
    *args: Any,
    **kwargs: Any,
) -> dict[str, torch.Tensor]:
    """Extend ``peft.get_peft_model_state_dict``: refuse to name shards as if they were whole.

    Raises:
        NotImplementedError: the model is parallel, and no ``state_dict`` was given.
    """
    if state_dict is None and parallel_state(model) is not None:
        raise NotImplementedError(
            "get_peft_model_state_dict of a parallel model would hold this rank's shards only; "
            "save_pretrained gathers them, on all ranks"
        )
    return plain(model, state_dict, *args, **kwargs)


def save_pretrained(
    plain: Callable[..., None], self: peft.PeftModel, save_directory: str, *args: Any, **kwargs: Any
) -> None:
    """Extend ``PeftModel.save_pretrained``: gather a parallel model's adapters for rank 0 to write.

    On a parallel model all ranks call it.
    """
    state = parallel_state(self)
    if state is None:
        plain(self, save_directory, *args, **kwargs)
        return
    options = arguments_of(self, "save_pretrained", (save_directory, *args), kwargs)
    # As the ranks name it that join the save of another.
    save_directory = os.path.abspath(options.pop("save_directory"))
    call_together(
        self,
        "save_pretrained",
        (save_directory,),
        options,
        lambda: _save(plain, self, state, save_directory, options),
    )


def _save(
    plain: Callable[..., None],
    self: peft.PeftModel,
    state: ParallelState,
    save_directory: str,
    options: dict[str, Any],
) -> None:
    mesh, op_name = state.mesh, f"save_pretrained of an adapter to {save_directory}"
    mesh.control.barrier(op_name)
    options = {name: value for name, value in options.items() if name != "is_main_process"}
    whole = {k: options[k] for k in ("save_embedding_layers",) if k in options}

    adapters = options.get("selected_adapters") or list(self.peft_config)

    def choose() -> dict[str, tuple[torch.Tensor, TensorLayout]]:
        for refused in ("state_dict", "path_initial_model_for_weight_conversion"):
            if options.get(refused) is not None:
                raise NotImplementedError(f"{op_name}: {refused} is not supported here")
        unknown = set(adapters) - self.peft_config.keys()
        if unknown:
            raise ValueError(f"{op_name}: there is no adapter {', '.join(sorted(unknown))}")
        wanted = {n for a in adapters for n in saved_tensors(self, a, **whole).values()}
        return {name: at for name, at in layouts_of(self).items() if name in wanted}

    chosen = mesh.control.run_on_all(op_name, choose)
    check_same_directory(Path(save_directory), mesh.control, op_name)
    check_adapters(self, state, op_name)
    require_equal(mesh.control, op_name, dict.fromkeys(chosen, "to be saved"))
    full = gather_in_step(chosen, mesh, op_name)

    def write() -> None:
        if mesh.rank != 0:
            return
        with replaced_files(save_directory, last=ADAPTER_CONFIG_NAME) as temporary:
            card = Path(save_directory, "README.md")
            if card.exists():  # PEFT adds to what it says
                disk.write_file(temporary / card.name, card.read_bytes())
            plain(self, os.fspath(temporary), **{**options, "state_dict": full})
            if options.get("safe_serialization", True):
                for adapter in adapters:
                    folder = temporary / ("" if adapter == "default" else adapter)
                    _keep_hashes(folder / ADAPTER_NAME)

    mesh.control.run_on_all(op_name, write, patient=True)


def _keep_hashes(path: Path) -> None:
    """Write a file of PEFT's again, with a hash of each tensor in its header."""
    again = path.with_suffix(".again")
    again.unlink(missing_ok=True)
    with SafetensorsFile(path) as file:
        copy_tensors(file, again)
    again.replace(path)


def load_adapter(
    plain: Callable[..., Any], self: peft.PeftModel, model_id: Any, *args: Any, **kwargs: Any
) -> Any:
    """Extend ``PeftModel.load_adapter``: on a parallel model a damaged file raises on every rank.

    On a parallel model all ranks call it.
    """
    state = parallel_state(self)
    if state is None:
        return plain(self, model_id, *args, **kwargs)
    arrive("load_adapter")
    op_name = f"load_adapter of {model_id}"
    if kwargs.get("ignore_mismatched_sizes"):
        raise NotImplementedError(
            f"{op_name}: ignore_mismatched_sizes on a parallel model would ignore every factor "
            "that is sharded; load an adapter of the right sizes"
        )
    state.mesh.control.barrier(op_name)

    def look() -> None:
        folder = Path(model_id, kwargs.get("subfolder") or "")
        if (folder / ADAPTER_NAME).exists():
            SafetensorsFile(folder / ADAPTER_NAME).close()
        elif folder.is_dir() and not (folder / ADAPTER_PICKLE_NAME).exists():
            # of what is no folder PEFT looks on the hub
            raise CheckpointError(f"{folder} holds no {ADAPTER_NAME}")

    state.mesh.control.run_on_all(op_name, look)
    return plain(self, model_id, *args, **kwargs)


def set_state_dict(
    plain: Callable[..., Any],
    model: nn.Module,
    peft_model_state_dict: dict[str, torch.Tensor],
    adapter_name: str = "default",
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Extend ``peft.set_peft_model_state_dict``: take exactly the tensors of the adapter.

    PEFT loads adapters by it. On a parallel model all ranks call it, with the same tensors.
    """
    state = parallel_state(model)
    if state is None:
        return plain(model, peft_model_state_dict, adapter_name, *args, **kwargs)
    op_name = f"loading adapter {adapter_name!r}"
    _check_read(peft_model_state_dict, state, op_name)

    def load() -> Any:
        # Experts as transformers 4 named them become those of the model; PEFT does it later, too.
        tensors = convert_peft_adapter_state_dict_for_transformers(
            model, model.peft_config[adapter_name], peft_model_state_dict, adapter_name
        )
        layouts = layouts_of(model)
        saved = partial(saved_tensors, model, adapter_name)
        all_names = saved(save_embedding_layers=True)
        found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        known = {name: layouts[own][1].shape for name, own in all_names.items()}
        optional = known.keys() - saved(save_embedding_layers=False).keys()
        if problems := misfits(found, known, state.mesh.tp_size, optional):
            raise ValueError(f"adapter {adapter_name!r} does not fit the model: {problems}")
        return plain(model, tensors, adapter_name, *args, **kwargs)

    result = state.mesh.control.run_on_all(op_name, load)
    check_adapters(model, state, op_name)
    return result


def _check_read(state_dict: Mapping[str, torch.Tensor], state: ParallelState, op_name: str) -> None:
    """Raise on every rank unless all have read the same tensors."""
    digests = {name: f"of digest {content_digest(each)}" for name, each in state_dict.items()}
    require_equal(state.mesh.control, op_name, digests, advice="give all ranks the same files")


def swap_state_dict(
    plain: Callable[..., None],
    model: nn.Module,
    state_dict: dict[str, torch.Tensor],
    adapter_name: str,
    config: peft.LoraConfig,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Extend PEFT's ``hotswap_adapter``: each rank takes its shards of the full factors.

    Every rank calls it. The new adapter has the ranks of the old one.
    """
    state = parallel_state(model)
    if state is None:
        plain(model, state_dict, adapter_name, config, *args, **kwargs)
        return
    op_name = f"hotswap_adapter of {adapter_name!r}"
    state.mesh.control.barrier(op_name)
    _check_read(state_dict, state, op_name)

    def shards() -> dict[str, torch.Tensor]:
        refuse_unsupported(config, op_name)
        layouts = {name: layout for name, (_, layout) in layouts_of(model).items()}
        found = {name: tuple(tensor.shape) for name, tensor in state_dict.items()}
        known = {name: layouts[name].shape for name in found if name in layouts}
        if problems := misfits(found, known, state.mesh.tp_size):
            raise ValueError(f"{op_name}: {problems}; load it as another adapter by load_adapter")
        rank = state.mesh.rank
        return {name: take(tensor, layouts[name], rank) for name, tensor in state_dict.items()}

    plain(
        model, state.mesh.control.run_on_all(op_name, shards), adapter_name, config, *args, **kwargs
    )
    check_adapters(model, state, op_name)


def misfits(
    found: Mapping[str, tuple[int, ...]],
    known: Mapping[str, tuple[int, ...]],
    tp_size: int,
    optional: Container[str] = (),
) -> str:
    """Say in words why tensors cannot be those of an adapter; empty where they can.

    ``found`` and ``known`` are the shapes in an adapter's file, and those that the model's adapter
    has there. The file may lack names that are ``optional``.
    """
    lacked = (name for name in known.keys() - found.keys() if name not in optional)
    problems = [f"it lacks {name}" for name in sorted(lacked)]
    problems += [f"it holds {name}, unknown here" for name in sorted(found.keys() - known.keys())]
    problems += [
        f"{name} has the shape {found[name]}, but that of the model, sharded over tp={tp_size}, "
        f"has the full shape {known[name]}"
        for name in sorted(known.keys() & found.keys())
        if found[name] != known[name]
    ]
    return first_few(problems, between="; ")
