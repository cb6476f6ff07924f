"""Functions of other packages that need full tensors: refused where a parallel model has shards."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, ValuesView
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from parallel_ext.nn.extended import extend
from parallel_ext.parallel.extending import is_called_by_this_package
from parallel_ext.parallel.owners import owner_of_memory, owners_of
from parallel_ext.sharding.layout import TensorLayout
from parallel_ext.sharding.shards import LocalShard

_FILL = "model.load_state_dict takes full tensors, of which each rank keeps its shard"
_FULL = "px.full_state_dict(model) gathers full tensors"
_LOAD = "px.from_pretrained reads a directory, model.load_state_dict takes full tensors"
_LOSS = (
    "model(input_ids, labels=labels) and px.ops.linear_vocab_cross_entropy compute the loss of all "
    "rows"
)
_NORM = "call it before px.parallelize, while the tensors are whole"
_PLAIN = "do it to a plain model, of what model.save_pretrained writes"
_PEFT = "use peft: peft.get_peft_model, peft.PeftModel.from_pretrained"
_PLACED = "px.parallelize and px.from_pretrained have placed it"
_REPLICAS = "px.data_parallel(model, mesh) trains the dp ranks together"
_SAVE = "model.save_pretrained writes a HuggingFace directory, called by all ranks"


class Where(Enum):
    """The parallel models on which a function is refused."""

    SHARDED = "some rank holds only a part of a tensor"
    RANKS = "there are several ranks"
    ALWAYS = "always"


class Refusal(NamedTuple):
    """A function that is refused."""

    function: str  # module:name
    instead: str  # what to call; the end of the error
    where: Where = Where.SHARDED

    @property
    def name(self) -> str:
        """Return the function in words, such as ``torch's async_save``."""
        module, _, name = self.function.partition(":")
        return f"{module.split('.')[0]}'s {name.removesuffix('.__init__')}"


def _each(module: str, names: str, instead: str, where: Where = Where.SHARDED) -> list[Refusal]:
    return [Refusal(f"{module}:{name}", instead, where) for name in names.split()]


_FILLS = """uniform_ normal_ trunc_normal_ eye_ dirac_ orthogonal_ sparse_
    xavier_uniform_ xavier_normal_ kaiming_uniform_ kaiming_normal_"""
_PRUNES = "l1_unstructured global_unstructured ln_structured identity custom_from_mask"
_DCP, _MODELS = "torch.distributed.checkpoint", "transformers.modeling_utils"
_ADAPTERS = """PeftAdapterMixin.load_adapter PeftAdapterMixin.add_adapter
    PeftAdapterMixin.get_adapter_state_dict"""

REFUSALS = [
    *_each("torch.nn.init", _FILLS, _FILL),
    *_each("torch.nn.functional", "linear_cross_entropy", _LOSS),
    *_each("torch.nn.utils.convert_parameters", "parameters_to_vector", _FULL),
    *_each("torch.nn.utils.convert_parameters", "vector_to_parameters", _FILL),
    *_each("torch.nn.utils.parametrize", "register_parametrization", _NORM),
    *_each("torch.nn.utils.parametrize", "transfer_parametrizations_and_params", _NORM),
    *_each("torch.nn.utils.parametrizations", "orthogonal spectral_norm weight_norm", _NORM),
    *_each("torch.nn.utils.spectral_norm", "spectral_norm", _NORM),
    *_each("torch.nn.utils.weight_norm", "weight_norm", _NORM),
    *_each("torch.nn.utils.prune", _PRUNES, _NORM),
    *_each("torch.nn.utils.prune", "random_unstructured random_structured", _NORM, Where.RANKS),
    *_each("torch.ao.quantization", "quantize_dynamic", _PLAIN, Where.ALWAYS),
    *_each("torch.nn.utils.fusion", "fuse_linear_bn_eval fuse_conv_bn_eval", _NORM),
    *_each(
        "torch.optim",
        "swap_in_optimizer_params_and_state",
        "step the optimizer itself, which holds this rank's shards",
    ),
    *_each("torch.nn.parallel", "DataParallel.__init__", _REPLICAS, Where.RANKS),
    *_each("torch.distributed.fsdp", "fully_shard", _REPLICAS, Where.RANKS),
    *_each("torch.distributed.fsdp", "FullyShardedDataParallel.__init__", _REPLICAS, Where.RANKS),
    *_each("torch.distributed.tensor.parallel", "parallelize_module", _PLACED, Where.RANKS),
    *_each("torch.distributed.algorithms.model_averaging.utils", "average_parameters", _REPLICAS),
    *_each(_DCP, "async_save", "px.save_checkpoint(..., asynchronous=True) writes behind training"),
    *_each(
        _DCP,
        "load_sharded_optimizer_state_dict",
        "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict knows shards",
    ),
    *_each("transformers.integrations.peft", _ADAPTERS, _PEFT, Where.ALWAYS),
    *_each(
        _MODELS,
        "EmbeddingAccessMixin.set_input_embeddings EmbeddingAccessMixin.set_output_embeddings",
        "model.resize_token_embeddings changes their size, model.load_state_dict their values",
    ),
    *_each(
        _MODELS,
        "PreTrainedModel.set_decoder PreTrainedModel.set_encoder PreTrainedModel.set_use_kernels",
        "change the model before px.parallelize",
    ),
    *_each(
        _MODELS,
        "PreTrainedModel.save_distributed_checkpoint",
        f"{_SAVE}; px.save_checkpoint saves a training",
        Where.RANKS,
    ),
    *_each(_MODELS, "PreTrainedModel.init_weights PreTrainedModel.initialize_weights", _FILL),
    *_each(
        _MODELS, "PreTrainedModel.push_to_hub", f"{_SAVE}; upload it from one of them", Where.RANKS
    ),
    *_each(
        "transformers.generation.continuous_batching.continuous_api",
        "ContinuousMixin.generate_batch ContinuousMixin.init_continuous_batching",
        "model.generate and px.generate serve parallel models",
    ),
    *_each(
        "accelerate",
        """cpu_offload disk_offload dispatch_model cpu_offload_with_hook prepare_pippy
            infer_auto_device_map""",
        _PLACED,
        Where.RANKS,
    ),
    *_each("accelerate.local_sgd", "LocalSGD.__init__", _REPLICAS, Where.RANKS),
    *_each("accelerate", "load_checkpoint_in_model load_checkpoint_and_dispatch", _LOAD),
    *_each(
        "accelerate",
        "Accelerator.save Accelerator.register_for_checkpointing",
        "it would write what rank 0 holds; px.save_checkpoint writes all of it",
    ),
]


def register(refusals: list[Refusal]) -> None:
    """Extend functions so that they refuse parallel models."""
    for refusal in refusals:
        module, _, name = refusal.function.partition(":")
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is not None:  # other versions have other functions
            extend(found, partial(_refuse, refusal))


def _refuse(refusal: Refusal, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    once = (Iterator, ValuesView)  # which are gone through once, or are no list
    args = tuple(list(each) if isinstance(each, once) else each for each in args)
    kwargs = {k: list(v) if isinstance(v, once) else v for k, v in kwargs.items()}
    if not is_called_by_this_package():
        made = refusal.function.endswith(".__init__")  # the object itself is not there yet
        refuse(refusal, args[1:] if made else args, kwargs)
    return plain(*args, **kwargs)


def refuse(refusal: Refusal, *values: Any) -> None:
    """Raise a NotImplementedError if there is a parallel model, or a part of one, among values.

    Args:
        values: models, optimizers, parameters, and lists and dicts of them.
    """
    tensors = list(tensors_in(values))
    for tensor in tensors:
        if isinstance(tensor, LocalShard):
            raise _refused(refusal, tensor.place)
    owners = owners_of(tensors)
    for tensor in tensors:
        # A new parameter shares no memory, and many are made.
        of_memory = type(tensor) is torch.Tensor and id(tensor) not in owners
        if of_memory and (owned := owner_of_memory(tensor)) is not None:
            owners[id(tensor)] = owned
    for owned in owners.values():
        several = refusal.where is Where.RANKS and owned.mesh.world_size > 1
        if owned.is_sharded or several or refusal.where is Where.ALWAYS:
            raise _refused(refusal, owned.layout)


def _refused(refusal: Refusal, layout: TensorLayout) -> NotImplementedError:
    return NotImplementedError(
        f"{refusal.name} is not supported on a parallel model, of whose {layout.name} rank 0 holds "
        f"{layout.describe(0)}; {refusal.instead}"
    )


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Iterate over the tensors in models, optimizers, lists and dicts of them."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, nn.Module):
        yield from value.parameters()
    elif isinstance(value, torch.optim.Optimizer):
        yield from tensors_in(value.param_groups)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, (list, tuple, set)):
        for inner in value:
            yield from tensors_in(inner)
