"""What PEFT does to whole models, for parallel ones: add, save, load, merge, combine adapters."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import peft
import torch
import xxhash
from peft.tuners.lora.layer import LoraLayer
from peft.utils import ModulesToSaveWrapper
from torch import nn

from parallel_ext.checkpoint import CheckpointError, SafetensorsFile, gather_in_step
from parallel_ext.layout import TensorLayout
from parallel_ext.linear import ColumnParallelLinear, RowParallelLinear
from parallel_ext.lora.config import LAYERS
from parallel_ext.mesh import DisagreementError
from parallel_ext.sharded import ShardedModule, named_shards
from parallel_ext.state import ParallelState, state_of
from parallel_ext.vocab import VocabParallelEmbedding, VocabParallelHead

_FILE, _PICKLE = "adapter_model.safetensors", "adapter_model.bin"
_COMBINABLE = ("linear", "cat")  # element by element, so a rank can do its own part


def _state(model: nn.Module) -> ParallelState | None:
    try:
        return state_of(model)
    except TypeError:
        return None


def _saved_tensors(model: nn.Module, adapter: str, **options: Any) -> dict[str, str]:
    """Name in an adapter's file -> name of the parameter in the model, by PEFT's own choice."""
    names: dict[int, str] = {}
    logical: dict[str, torch.Tensor] = {}
    for name, (parameter, layout) in _layouts(model).items():
        logical[name] = torch.empty(layout.shape, dtype=parameter.dtype, device="meta")
        names[id(logical[name])] = name
    chosen = peft.get_peft_model_state_dict(
        model, state_dict=logical, adapter_name=adapter, **options
    )
    return {saved: names[id(tensor)] for saved, tensor in chosen.items()}


def _layouts(model: nn.Module) -> dict[str, tuple[nn.Parameter, TensorLayout]]:
    """Every name of every parameter -> the parameter and its layout."""
    layouts = {id(parameter): layout for _, parameter, layout in named_shards(model)}
    return {
        name: (parameter, layouts[id(parameter)])
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def _inject_adapter(
    plain: Callable[..., None],
    self: peft.LoraModel,
    model: nn.Module,
    adapter_name: str,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Any configuration gets the layers of a parallel model; "all-linear" means its linears too."""
    config = self.peft_config[adapter_name]
    if _state(model) is not None:
        config._register_custom_module(LAYERS)
        if str(config.target_modules).lower() == "all-linear":
            config.target_modules = {
                path.removesuffix(".base_layer")
                for path, module in model.named_modules()
                if isinstance(module, (ColumnParallelLinear, RowParallelLinear))
            }
    plain(self, model, adapter_name, *args, **kwargs)


def _count_parameters(
    plain: Callable[..., tuple[int, int]], self: peft.PeftModel
) -> tuple[int, int]:
    """Of a parallel model: the parameters of the whole model, not those of this rank."""
    if _state(self) is None:
        return plain(self)
    sizes = [(p.requires_grad, layout.numel) for _, p, layout in named_shards(self)]
    return sum(size for trained, size in sizes if trained), sum(size for _, size in sizes)


def _is_embedding(plain: Callable[[nn.Module], bool], layer: nn.Module) -> bool:
    """Of which PEFT saves the base beside the adapter."""
    base = getattr(layer, "base_layer", None)
    return isinstance(base, (VocabParallelEmbedding, VocabParallelHead)) or plain(layer)


def _save_pretrained(
    plain: Callable[..., None], self: peft.PeftModel, save_directory: str, *args: Any, **kwargs: Any
) -> None:
    """On a parallel model all ranks call it: what PEFT saves is gathered, and rank 0 writes it."""
    state = _state(self)
    if state is None:
        plain(self, save_directory, *args, **kwargs)
        return
    mesh, what = state.mesh, f"save_pretrained of an adapter to {save_directory}"
    mesh.meet(what)
    kwargs.pop("is_main_process", None)
    options = {k: kwargs[k] for k in ("save_embedding_layers",) if k in kwargs}

    def choose() -> dict[str, tuple[torch.Tensor, TensorLayout]]:
        adapters = kwargs.get("selected_adapters") or list(self.peft_config)
        wanted = {n for a in adapters for n in _saved_tensors(self, a, **options).values()}
        return {name: at for name, at in _layouts(self).items() if name in wanted}

    full = gather_in_step(mesh.together(what, choose), mesh, what)

    def write() -> None:
        if mesh.rank == 0:
            plain(self, save_directory, *args, state_dict=full, **kwargs)

    mesh.together(what, write)


def _load_adapter(
    plain: Callable[..., Any], self: peft.PeftModel, model_id: Any, *args: Any, **kwargs: Any
) -> Any:
    """On a parallel model all ranks call it; a damaged file is one error on all of them."""
    state = _state(self)
    if state is None:
        return plain(self, model_id, *args, **kwargs)
    what = f"load_adapter of {model_id}"
    if kwargs.get("ignore_mismatched_sizes"):
        raise NotImplementedError(
            f"{what}: ignore_mismatched_sizes on a parallel model would ignore every factor that "
            "is cut; load an adapter of the right sizes"
        )
    state.mesh.meet(what)

    def look() -> None:
        folder = Path(model_id, kwargs.get("subfolder") or "")
        if (folder / _FILE).exists():
            SafetensorsFile(folder / _FILE).close()
        elif folder.is_dir() and not (folder / _PICKLE).exists():  # else PEFT looks on the hub
            raise CheckpointError(f"{folder} holds no {_FILE}")

    state.mesh.together(what, look)
    return plain(self, model_id, *args, **kwargs)


def _set_state_dict(
    plain: Callable[..., Any],
    model: nn.Module,
    state_dict: dict[str, torch.Tensor],
    adapter_name: str = "default",
    **kwargs: Any,
) -> Any:
    """What PEFT loads adapters by; a parallel model takes exactly the tensors of its adapter."""
    state = _state(model)
    if state is None:
        return plain(model, state_dict, adapter_name=adapter_name, **kwargs)
    what = f"loading adapter {adapter_name!r}"

    def load() -> Any:
        _check_fits(model, state_dict, adapter_name, state)
        return plain(model, state_dict, adapter_name=adapter_name, **kwargs)

    result = state.mesh.together(what, load)
    _check_replicas(model, state, what)
    return result


def _check_fits(
    model: nn.Module, found: dict[str, torch.Tensor], adapter: str, state: ParallelState
) -> None:
    layouts = _layouts(model)
    needed = _saved_tensors(model, adapter, save_embedding_layers=False)
    known = _saved_tensors(model, adapter, save_embedding_layers=True)
    problems = [f"it lacks {name}" for name in sorted(needed.keys() - found.keys())]
    problems += [f"it holds {name}, unknown here" for name in sorted(found.keys() - known.keys())]
    for name in sorted(known.keys() & found.keys()):
        _, layout = layouts[known[name]]
        if tuple(found[name].shape) != layout.shape:
            problems.append(
                f"{name} has the shape {tuple(found[name].shape)}, but that of the model, cut over "
                f"tp={state.mesh.tp_size}, has the whole shape {layout.shape}"
            )
    if problems:
        shown = "; ".join(problems[:4])
        more = f"; and {len(problems) - 4} more" if len(problems) > 4 else ""
        raise ValueError(f"adapter {adapter!r} does not fit the model: {shown}{more}")


def _check_replicas(model: nn.Module, state: ParallelState, what: str) -> None:
    """What several tp ranks hold of the adapters must be the same bits on all of them."""
    if state.mesh.tp_size == 1:
        return
    names, layouts, own = [], [], []
    for path, module in model.named_modules():
        inside = set(path.split(".")) & set(LoraLayer.adapter_layer_names)
        if not inside or not isinstance(module, ShardedModule):
            continue
        for attribute, layout in sorted(module.layouts.items()):
            names.append(f"{path}.{attribute}")
            layouts.append(layout)
            value = getattr(module, attribute).detach().cpu().contiguous()
            own.append(xxhash.xxh3_128_digest(value.flatten().view(torch.uint8).numpy()))
    digests = state.mesh.gather_objects_on_tp(own)
    for index, (name, layout) in enumerate(zip(names, layouts, strict=True)):
        for rank, theirs in enumerate(digests):
            first = 0 if layout.dim is None else layout.holders(rank)[0]
            if theirs[index] != digests[first][index]:
                raise DisagreementError(
                    f"{what}: {name} differs between tp ranks {first} and {rank}, which must hold "
                    "the same; load the adapter anew, and change it on all ranks alike"
                )


def _check_merge(model: nn.Module) -> None:
    """Before anything is merged into a parallel model, on all ranks."""
    state = _state(model)
    if state is None:
        return
    what = "merging adapters"
    state.mesh.meet(what)
    tied = {name.rpartition(".")[0] for name in {*state.layout.tied, *state.layout.tied.values()}}
    for path, module in model.named_modules():
        kept = isinstance(module, ModulesToSaveWrapper) and getattr(
            module.original_module, "tied", False
        )
        if kept:
            raise NotImplementedError(
                f"{what}: {path} was trained whole (modules_to_save), while embedding and head "
                f"({', '.join(sorted(tied))}) shared one weight when the model was cut; save the "
                "adapter and merge it with PEFT in one process"
            )
    _check_replicas(model, state, what)


def _merging(plain: Callable[..., Any], self: peft.LoraModel, *args: Any, **kwargs: Any) -> Any:
    """Refuses to merge factors of which ranks hold different copies."""
    _check_merge(self.model)
    return plain(self, *args, **kwargs)


def _add_weighted_adapter(
    plain: Callable[..., Any],
    self: peft.LoraModel,
    adapters: list[str],
    weights: list[float],
    adapter_name: str,
    combination_type: str = "svd",
    **kwargs: Any,
) -> Any:
    """On shards only what works element by element."""
    state = _state(self.model)
    if state is not None and state.mesh.tp_size > 1 and combination_type not in _COMBINABLE:
        raise NotImplementedError(
            f"add_weighted_adapter(combination_type={combination_type!r}) at "
            f"tp={state.mesh.tp_size} needs whole factors; use {' or '.join(_COMBINABLE)}"
        )
    return plain(self, adapters, weights, adapter_name, combination_type, **kwargs)


def _extend(owner: Any, name: str, extension: Callable[..., Any]) -> None:
    plain = getattr(owner, name)
    setattr(owner, name, wraps(plain)(_bound(extension, plain)))


def _bound(extension: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    # A function and no partial, so that it becomes a method where it stands in a class.
    def extended(*args: Any, **kwargs: Any) -> Any:
        return extension(plain, *args, **kwargs)

    return extended


def extend_peft() -> None:
    """Let PEFT's classes serve parallel models too; what they do to others stays as it is."""
    _extend(peft.LoraModel, "inject_adapter", _inject_adapter)
    _extend(peft.PeftModel, "get_nb_trainable_parameters", _count_parameters)
    _extend(peft.PeftModel, "save_pretrained", _save_pretrained)
    _extend(peft.PeftModel, "load_adapter", _load_adapter)
    _extend(peft.utils.save_and_load, "has_valid_embedding_base_layer", _is_embedding)
    _extend(peft.peft_model, "set_peft_model_state_dict", _set_state_dict)
    for name in ("merge_adapter", "merge_and_unload"):
        _extend(peft.LoraModel, name, _merging)
    _extend(peft.LoraModel, "add_weighted_adapter", _add_weighted_adapter)
