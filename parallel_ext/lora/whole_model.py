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
from parallel_ext.lora.config import refuse_unsupported
from parallel_ext.lora.factors import seeded_by
from parallel_ext.lora.layers import LAYERS
from parallel_ext.lora.merging import Mergeable
from parallel_ext.mesh import DisagreementError
from parallel_ext.sharded import named_shards
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
    state, config = _state(model), self.peft_config[adapter_name]
    if state is None:
        plain(self, model, adapter_name, *args, **kwargs)
        return
    what = f"adding adapter {adapter_name!r}"
    state.mesh.meet(what)
    state.mesh.together(what, lambda: refuse_unsupported(config, what))
    seed = _agree_on(config, what, state)
    config._register_custom_module(LAYERS)
    if str(config.target_modules).lower() == "all-linear":
        config.target_modules = {
            path.removesuffix(".base_layer")
            for path, module in model.named_modules()
            if isinstance(module, (ColumnParallelLinear, RowParallelLinear))
        }
    with seeded_by(seed):
        plain(self, model, adapter_name, *args, **kwargs)
    state.adapted = True
    _refuse_both_ends(model, adapter_name)


def _agree_on(config: peft.LoraConfig, what: str, state: ParallelState) -> int:
    """Raise where the ranks' configurations differ; else rank 0's seed, for all of them."""
    own = {
        name: repr(sorted(value) if isinstance(value, set) else value)
        for name, value in config.to_dict().items()
        if name not in ("base_model_name_or_path", "revision")  # may differ from host to host
    }
    everyone = state.mesh.gather_objects((own, torch.initial_seed()))
    configs, seeds = zip(*everyone, strict=True)
    for rank, other in enumerate(configs):
        for name in own:
            if other[name] != configs[0][name]:
                raise DisagreementError(
                    f"{what}: {name} is {configs[0][name]} on rank 0 and {other[name]} on rank "
                    f"{rank}; all ranks must be given the same configuration"
                )
    return seeds[0]


def _refuse_both_ends(model: nn.Module, adapter: str) -> None:
    ends = [
        module
        for module in model.modules()
        if isinstance(module, Mergeable)
        and getattr(module.get_base_layer(), "tied", False)
        and module.scaling
    ]
    if len(ends) < 2:
        return
    for module in ends:
        if adapter in module.scaling:
            module.delete_adapter(adapter)
    names = " and ".join(module.get_base_layer().layouts["weight"].name for module in ends)
    raise ValueError(
        f"adding adapter {adapter!r}: embedding and head ({names}) share one weight, and adapters "
        "on both ends cannot share it; target one of the two, or untie them"
    )


def _start_model(
    plain: Callable[..., None],
    self: peft.PeftModel,
    model: nn.Module,
    peft_config: peft.PeftConfig,
    *args: Any,
    **kwargs: Any,
) -> None:
    """What is not LoRA is refused before PEFT changes a parallel model."""
    if _state(model) is not None:
        refuse_unsupported(peft_config, "get_peft_model")
    plain(self, model, peft_config, *args, **kwargs)


def _adapter_state_dict(
    plain: Callable[..., dict[str, torch.Tensor]],
    model: nn.Module,
    state_dict: dict[str, torch.Tensor] | None = None,
    *args: Any,
    **kwargs: Any,
) -> dict[str, torch.Tensor]:
    """Shards under the names of whole tensors are not given out."""
    if state_dict is None and _state(model) is not None:
        raise NotImplementedError(
            "get_peft_model_state_dict of a parallel model would hold this rank's shards only; "
            "save_pretrained gathers them, on all ranks"
        )
    return plain(model, state_dict, *args, **kwargs)


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
        for refused in ("state_dict", "path_initial_model_for_weight_conversion"):
            if kwargs.get(refused) is not None:
                raise NotImplementedError(f"{what}: {refused} is not supported here")
        adapters = kwargs.get("selected_adapters") or list(self.peft_config)
        unknown = set(adapters) - self.peft_config.keys()
        if unknown:
            raise ValueError(f"{what}: there is no adapter {', '.join(sorted(unknown))}")
        wanted = {n for a in adapters for n in _saved_tensors(self, a, **options).values()}
        return {name: at for name, at in _layouts(self).items() if name in wanted}

    chosen = mesh.together(what, choose)
    if len({tuple(names) for names in mesh.gather_objects(list(chosen))}) > 1:
        raise DisagreementError(f"{what}: the ranks want to save different tensors")
    full = gather_in_step(chosen, mesh, what)

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

    digest = xxhash.xxh3_128()
    for name in sorted(state_dict):
        digest.update(name.encode())
        digest.update(_bytes_of(state_dict[name]))
    found = state.mesh.gather_objects(digest.digest())
    if len(set(found)) > 1:
        other = next(rank for rank, each in enumerate(found) if each != found[0])
        raise DisagreementError(
            f"{what}: ranks 0 and {other} read different tensors; give all ranks the same files"
        )

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


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())


def _check_replicas(model: nn.Module, state: ParallelState, what: str) -> None:
    """What several ranks hold of the adapters must be the same bits on all of them."""
    mesh = state.mesh
    trained = {
        name: (parameter, layout)
        for name, parameter, layout in named_shards(model)
        if set(name.split(".")) & {*LoraLayer.adapter_layer_names, "modules_to_save"}
    }
    own = [xxhash.xxh3_128_digest(_bytes_of(parameter)) for parameter, _ in trained.values()]
    everyone = mesh.gather_objects(own)
    for index, (name, (_, layout)) in enumerate(trained.items()):
        for rank, theirs in enumerate(everyone):
            first = 0 if layout.dim is None else layout.holders(rank % mesh.tp_size)[0]
            if theirs[index] != everyone[first][index]:
                raise DisagreementError(
                    f"{what}: {name} differs between ranks {first} and {rank}, which must hold "
                    "the same; load the adapter anew, and change it on all ranks alike"
                )


def _merging(
    plain: Callable[..., Any],
    self: peft.LoraModel,
    *args: Any,
    safe_merge: bool = False,
    adapter_names: list[str] | None = None,
    **kwargs: Any,
) -> Any:
    """Whatever speaks against a merge is found on all ranks before anything is changed."""
    state, what = _state(self.model), "merging adapters"
    if state is not None:
        state.mesh.meet(what)

        def check() -> None:
            for path, module in self.model.named_modules():
                if isinstance(module, Mergeable):
                    module.check_merge(safe_merge, adapter_names)
                elif isinstance(module, ModulesToSaveWrapper):
                    _refuse_kept_end(path, module)

        state.mesh.together(what, check)
        _check_replicas(self.model, state, what)
    return plain(self, *args, safe_merge=safe_merge, adapter_names=adapter_names, **kwargs)


def _refuse_kept_end(path: str, module: ModulesToSaveWrapper) -> None:
    if getattr(module.original_module, "tied", False):
        raise NotImplementedError(
            f"merging adapters: {path} was trained whole (modules_to_save), while embedding and "
            "head shared one weight when the model was cut; save the adapter and merge it with "
            "PEFT in one process"
        )


def _merge_adapter(
    plain: Callable[..., Any],
    self: peft.LoraModel,
    adapter_names: list[str] | None = None,
    safe_merge: bool = False,
) -> Any:
    return _merging(plain, self, safe_merge=safe_merge, adapter_names=adapter_names)


def _merge_and_unload(
    plain: Callable[..., Any],
    self: peft.LoraModel,
    progressbar: bool = False,
    safe_merge: bool = False,
    adapter_names: list[str] | None = None,
) -> Any:
    return _merging(plain, self, progressbar, safe_merge=safe_merge, adapter_names=adapter_names)


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
    _extend(peft.PeftModel, "__init__", _start_model)
    _extend(peft.LoraModel, "inject_adapter", _inject_adapter)
    _extend(peft.PeftModel, "get_nb_trainable_parameters", _count_parameters)
    _extend(peft.PeftModel, "save_pretrained", _save_pretrained)
    _extend(peft.PeftModel, "load_adapter", _load_adapter)
    _extend(peft.utils.save_and_load, "has_valid_embedding_base_layer", _is_embedding)
    for owner in (peft, peft.peft_model):
        _extend(owner, "set_peft_model_state_dict", _set_state_dict)
        _extend(owner, "get_peft_model_state_dict", _adapter_state_dict)
    _extend(peft.LoraModel, "merge_adapter", _merge_adapter)
    _extend(peft.LoraModel, "merge_and_unload", _merge_and_unload)
    _extend(peft.LoraModel, "add_weighted_adapter", _add_weighted_adapter)
