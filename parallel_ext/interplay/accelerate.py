"""accelerate's ``Accelerator`` around parallel models: as with one process for each dp rank."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import accelerate
import torch
from accelerate import Accelerator
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import DistributedType, recursively_apply
from torch import nn
from torch.utils.data import DataLoader

from parallel_ext.distributed.mesh import Mesh
from parallel_ext.interplay.data_loaders import (
    dp_ranks_as_processes,
    drawn_together,
    keep_full_batches,
    keep_length,
    refuse_unequal_numbers,
    seed_workers_of_dp_ranks,
    skip_first_batches,
    warn_of_repeated_rows,
    with_counted_rows,
)
from parallel_ext.interplay.refusals import Refusal, Where, refuse
from parallel_ext.interplay.trained_together import prepare_to_train
from parallel_ext.nn.extended import extend, extend_by_name
from parallel_ext.nn.temporarily import temporarily
from parallel_ext.parallel.from_pretrained import full_state_dict
from parallel_ext.parallel.joining import arrive
from parallel_ext.parallel.owners import owners_in, owners_of
from parallel_ext.parallel.state import is_parallel, parallel_models, state_of
from parallel_ext.parallel.weights import write_weights
from parallel_ext.sharding._torch_private import scheduler_steps
from parallel_ext.training.accelerate import LEFT_OUT, load_state, save_state, saves_apart
from parallel_ext.training.accelerate_leaves import LeafSteps, end_leaves
from parallel_ext.training.gradients import no_sync as px_no_sync

Plain = Callable[..., Any]

_OUR_TRAINER = "parallel_ext.training.trainer"  # not imported, since transformers' takes long
_TRAINER = Refusal("transformers:Trainer", "px.Trainer trains parallel models", Where.RANKS)

_meshes: WeakKeyDictionary[Accelerator, Mesh] = WeakKeyDictionary()
"""The mesh of each ``Accelerator`` that serves a parallel model. Not those of a Trainer."""

_leaf_steps: WeakKeyDictionary[Accelerator, list[LeafSteps]] = WeakKeyDictionary()
"""The steps of the models that an ``Accelerator`` trains by leaves."""

_steps: WeakKeyDictionary[AcceleratedScheduler, int] = WeakKeyDictionary()
"""How often a scheduler steps at once: the number of dp ranks; once where leaves train."""


def extend_accelerator() -> None:
    """Extend ``Accelerator`` so that it knows parallel models."""
    extend_by_name(
        Accelerator,
        *(prepare, prepare_model, prepare_data_loader, prepare_scheduler, unwrap_model),
        *(no_sync, join_uneven_inputs, backward, clip_grad_norm_),
        *(gather, gather_for_metrics, reduce, split_between_processes),
        *(get_state_dict, save_model, save_state, load_state),
    )
    extend(accelerate.skip_first_batches, skip_first_batches)
    extend(AcceleratedScheduler.step, step_scheduler)


def prepare(plain: Plain, self: Accelerator, *args: Any, **kwargs: Any) -> Any:
    """Extend ``Accelerator.prepare`` to check all parallel models before it prepares anything."""
    for each in args:
        if isinstance(each, nn.Module):
            prepare_to_train(each, "Accelerator.prepare")
            if is_parallel(each):
                _check(self, each, evaluation_mode=False)
    return plain(self, *args, **kwargs)


def prepare_model(
    plain: Plain,
    self: Accelerator,
    model: nn.Module,
    device_placement: bool | None = None,
    evaluation_mode: bool = False,
) -> nn.Module:
    """Extend ``Accelerator.prepare_model`` to take a parallel model as it is, without DDP."""
    if not is_parallel(model):
        return plain(self, model, device_placement, evaluation_mode)
    _check(self, model, evaluation_mode)
    prepared = plain(self, model, device_placement=False, evaluation_mode=True)
    state, trainers = state_of(model), _modules_of_calling_trainer()
    if not trainers or _OUR_TRAINER in trainers:
        _meshes[self] = state.mesh
    if state.trains_by_leaves and not trainers and not evaluation_mode:
        for of_another in chain.from_iterable(_leaf_steps.values()):
            of_another.stop_for(model)
        _leaf_steps.setdefault(self, []).append(LeafSteps(model, self))
    return prepared


def _check(accelerator: Accelerator, model: nn.Module, evaluation_mode: bool) -> None:
    """Raise unless an ``Accelerator`` can serve a parallel model."""
    state = state_of(model)
    mesh = state.mesh
    if _is_called_by_another_trainer():
        refuse(_TRAINER, model)
    kind = accelerator.distributed_type
    if kind in (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        raise NotImplementedError(
            f"Accelerator.prepare: accelerate is configured for {kind.value}, which would shard a "
            "parallel model once more; use no plugin, and px.data_parallel(model, mesh, zero=3)"
        )
    _check_ranks(accelerator, mesh)
    if accelerator.device.type != mesh.device.type:
        raise ValueError(
            f"Accelerator.prepare: accelerate puts batches on {accelerator.device}, but the model "
            f"is on {mesh.device}; Accelerator(cpu=True) is for a mesh of CPUs alone"
        )
    if (sizes := accelerator.parallelism_config) is not None:
        dp = sizes.dp_replicate_size * sizes.dp_shard_size
        if (dp, sizes.tp_size) != (mesh.dp_size, mesh.tp_size):
            raise ValueError(
                f"Accelerator.prepare: ParallelismConfig has tp_size={sizes.tp_size} and "
                f"{dp} data parallel ranks, but the model's mesh has tp={mesh.tp_size} and "
                f"dp={mesh.dp_size}"
            )
    trains = not evaluation_mode and any(p.requires_grad for p in model.parameters())
    if state.trains_apart and trains and state.zero is None:
        raise RuntimeError(
            f"Accelerator.prepare: training at dp={mesh.dp_size} needs px.data_parallel(model, "
            "mesh) before, or under px.patch an optimizer; for evaluation alone call "
            "prepare_model(model, evaluation_mode=True)"
        )


def _check_ranks(accelerator: Accelerator, mesh: Mesh) -> None:
    if accelerator.num_processes != mesh.world_size:
        raise ValueError(
            f"Accelerator.prepare: accelerate sees {accelerator.num_processes} processes, but the "
            f"mesh has {mesh.world_size} ranks; start the job with torchrun, and on CPUs make an "
            "Accelerator(cpu=True)"
        )


def _is_called_by_another_trainer() -> bool:
    """Return whether a method of a ``transformers.Trainer`` without px.TrainerMixin has called."""
    modules = _modules_of_calling_trainer()
    return bool(modules) and _OUR_TRAINER not in modules


def _modules_of_calling_trainer() -> set[str]:
    """Return the modules of the classes of the ``transformers.Trainer`` that has called, if any."""
    frame = sys._getframe(1)
    while frame is not None:
        modules = {each.__module__ for each in type(frame.f_locals.get("self")).__mro__}
        if "transformers.trainer" in modules:
            return modules
        frame = frame.f_back
    return set()


def _served(accelerator: Accelerator) -> Mesh | None:
    """Return the mesh whose tp ranks share what accelerate would give to each process."""
    mesh = _meshes.get(accelerator)
    return mesh if mesh is not None and mesh.tp_size > 1 else None


def _find_mesh(accelerator: Accelerator) -> None:
    """Find the mesh of an ``Accelerator`` that has prepared no model: that of all models."""
    own = accelerator in _meshes or accelerator._models
    if own or accelerator.torch_device_mesh is not None or _is_called_by_another_trainer():
        return
    meshes = dict.fromkeys(state_of(model).mesh for model in parallel_models())
    if len(meshes) > 1:
        gc.collect()  # models that nobody holds any more
        meshes = dict.fromkeys(state_of(model).mesh for model in parallel_models())
    if len({(mesh.dp_size, mesh.tp_size) for mesh in meshes}) > 1:
        raise ValueError(
            "Accelerator.prepare: there are parallel models of several meshes; prepare the one "
            "that is to get these batches before the data loader"
        )
    for mesh in meshes:
        _check_ranks(accelerator, mesh)
        _meshes[accelerator] = mesh


def prepare_data_loader(
    plain: Plain, self: Accelerator, data_loader: DataLoader, *args: Any, **kwargs: Any
) -> DataLoader:
    """Extend ``Accelerator.prepare_data_loader`` to give the tp ranks of a dp rank one batch.

    Raises:
        NotImplementedError: ``dispatch_batches=True``, by which rank 0 cuts batches for processes.
        ValueError: dp ranks under ``px.data_parallel`` would get unequal numbers of batches.
    """
    _find_mesh(self)
    if getattr(data_loader, "_is_accelerate_prepared", False):
        return plain(self, data_loader, *args, **kwargs)
    mesh, of_models = _served(self), _meshes.get(self)
    if of_models is None or of_models.world_size == 1:
        return plain(self, data_loader, *args, **kwargs)
    if any(state_of(model).zero is not None for model in parallel_models()):
        refuse_unequal_numbers(self, data_loader, of_models.dp_size)
    dataset, processes = data_loader.dataset, 1 if self.split_batches else of_models.dp_size
    if mesh is not None or self.dispatch_batches is False:
        data_loader = with_counted_rows(data_loader, processes)
    data_loader = drawn_together(data_loader, of_models, self.use_seedable_sampler)
    if mesh is not None and self.dispatch_batches:
        raise NotImplementedError(
            "Accelerator.prepare_data_loader: dispatch_batches=True cuts a batch for each process, "
            "but tp ranks share theirs; pass DataLoaderConfiguration(dispatch_batches=False), by "
            "which every rank reads the data"
        )
    if mesh is not None:
        seed_workers_of_dp_ranks(data_loader, mesh)
    with nullcontext() if mesh is None else dp_ranks_as_processes(self, mesh):
        prepared = plain(self, data_loader, *args, **kwargs)
    keep_length(prepared, dataset, processes)
    keep_full_batches(prepared, data_loader, of_models.dp_size)
    return prepared


def unwrap_model(
    plain: Plain,
    self: Accelerator,
    model: nn.Module,
    keep_fp32_wrapper: bool = True,
    keep_torch_compile: bool = True,
) -> nn.Module:
    """Extend ``Accelerator.unwrap_model`` to leave a parallel model the forward that it had.

    accelerate's own takes off all that wraps a forward, and not only what it has put there.
    """
    if keep_fp32_wrapper or not is_parallel(model):
        return plain(self, model, keep_fp32_wrapper, keep_torch_compile)
    unwrapped = plain(self, model, True, keep_torch_compile)
    if (forward := vars(unwrapped).pop("_original_forward", None)) is not None:
        unwrapped.forward = forward
    return unwrapped


def prepare_scheduler(
    plain: Plain, self: Accelerator, scheduler: Any, *args: Any, **kwargs: Any
) -> Any:
    """Extend ``Accelerator.prepare_scheduler`` to count dp ranks, not tp ranks, as processes.

    Under ``px.Invariant`` a step of the optimizer is one of the scheduler, on any layout.
    """
    prepared = plain(self, scheduler, *args, **kwargs)
    owners = owners_in(getattr(scheduler, "optimizer", None))
    if (owned := next(iter(owners.values()), None)) is not None:
        by_leaves = state_of(owned.model).trains_by_leaves
        _steps[prepared] = 1 if by_leaves else owned.mesh.dp_size
    return prepared


def step_scheduler(plain: Plain, self: AcceleratedScheduler, *args: Any, **kwargs: Any) -> None:
    """Extend ``AcceleratedScheduler.step`` to step as often as :data:`_steps` says."""
    together = not self.step_with_optimizer or self.split_batches
    if self not in _steps or together or not self.gradient_state.sync_gradients:
        plain(self, *args, **kwargs)
        return
    most = getattr(self.scheduler, "total_steps", float("inf"))
    with temporarily(self, split_batches=True):  # one step in each call
        for _ in range(_steps[self]):
            if scheduler_steps(self.scheduler) <= most:
                plain(self, *args, **kwargs)


def no_sync(plain: Plain, self: Accelerator, model: nn.Module) -> AbstractContextManager[None]:
    """Extend ``Accelerator.no_sync`` to be ``px.no_sync`` for a parallel model.

    Leaves need none: their gradients are there after the last one.
    """
    if not is_parallel(model):
        return plain(self, model)
    return nullcontext() if state_of(model).trains_by_leaves else px_no_sync(model)


def join_uneven_inputs(
    plain: Plain, self: Accelerator, joinables: list[Any], even_batches: bool | None = None
) -> AbstractContextManager[None]:
    """Extend ``Accelerator.join_uneven_inputs``, which a parallel model does not need."""
    meshes = [state_of(each).mesh for each in joinables if is_parallel(each)]
    if not meshes:
        return plain(self, joinables, even_batches)
    if even_batches is False and max(mesh.dp_size for mesh in meshes) > 1:
        raise NotImplementedError(
            "Accelerator.join_uneven_inputs(even_batches=False) would give dp ranks unequal "
            "numbers of batches, but they call a parallel model equally often; leave even_batches "
            "out, or pass drop_last=True to the data loader"
        )
    return nullcontext()


def backward(plain: Plain, self: Accelerator, loss: torch.Tensor, **kwargs: Any) -> None:
    """Extend ``Accelerator.backward`` to end the leaf whose loss it is given."""
    running = [steps for steps in _leaf_steps.get(self, []) if steps.leaf_runs]
    if running:
        end_leaves(running, self, loss, **kwargs)
    else:
        # A trainer leaves out what is repeated.
        if self.gradient_state.end_of_dataloader and not _modules_of_calling_trainer():
            warn_of_repeated_rows(self, _meshes.get(self))
        plain(self, loss, **kwargs)


def clip_grad_norm_(
    plain: Plain, self: Accelerator, parameters: Any, max_norm: float, norm_type: float = 2
) -> torch.Tensor:
    """Extend ``Accelerator.clip_grad_norm_`` to take parameters of all FSDP meshes together.

    accelerate's own asks for one norm of each mesh, of which ranks may have different numbers.
    """
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    if not owners_of(parameters):
        return plain(self, parameters, max_norm, norm_type)
    self.unscale_gradients()
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)


def gather(plain: Plain, self: Accelerator, tensor: Any) -> Any:
    """Extend ``Accelerator.gather`` to return what each dp rank has, once."""
    arrive("accelerator.gather")
    if (mesh := _served(self)) is None:
        return plain(self, tensor)

    def of_dp_ranks(own: torch.Tensor) -> torch.Tensor:
        gathered = plain(self, own)
        shape = (mesh.world_size, len(gathered) // mesh.world_size, *gathered.shape[1:])
        of_dp = gathered.view(shape)[:: mesh.tp_size].flatten(0, 1)
        return of_dp.view_as(own) if mesh.dp_size == 1 else of_dp  # one process keeps a scalar

    return recursively_apply(of_dp_ranks, tensor, error_on_other_type=True)


def gather_for_metrics(
    plain: Plain, self: Accelerator, input_data: Any, use_gather_object: bool = False
) -> Any:
    """Extend ``Accelerator.gather_for_metrics`` to return every sample once, or to raise."""
    mesh = _served(self)
    if mesh is None:
        _refuse_repeated_samples(self)
        return plain(self, input_data, use_gather_object)
    try:
        recursively_apply(lambda tensor: tensor, input_data, error_on_other_type=True)
    except TypeError:
        use_gather_object = True
    if use_gather_object and mesh.tp_rank != 0:
        input_data = []
    return plain(self, input_data, use_gather_object)


def _refuse_repeated_samples(accelerator: Accelerator) -> None:
    sizes = {state_of(model).mesh.tp_size for model in parallel_models()}
    if accelerator in _meshes or accelerator.num_processes == 1 or max(sizes, default=1) == 1:
        return
    raise NotImplementedError(
        f"Accelerator.gather_for_metrics would return every sample {max(sizes)} times, since tp "
        "ranks share their data; prepare the model, or the data loader, by this Accelerator"
    )


def reduce(
    plain: Plain, self: Accelerator, tensor: Any, reduction: str = "sum", scale: float = 1.0
) -> Any:
    """Extend ``Accelerator.reduce`` to add up what each dp rank has, once."""
    arrive("accelerator.reduce")
    mesh = _served(self)
    of_dp = reduction not in ("mean", "max")  # which tp ranks do not change
    sums = of_dp and tensor is not self.flag_tensor  # by which any rank, also of tp, stops all
    if mesh is not None and sums and mesh.tp_rank != 0:
        tensor = recursively_apply(torch.zeros_like, tensor)
    return plain(self, tensor, reduction, scale)


def split_between_processes(plain: Plain, self: Accelerator, *args: Any, **kwargs: Any) -> Any:
    """Extend ``Accelerator.split_between_processes`` to refuse tp ranks, which share inputs."""
    if (mesh := _served(self)) is not None:
        raise NotImplementedError(
            f"Accelerator.split_between_processes would give the {mesh.tp_size} tp ranks of a "
            "model different inputs; take inputs[mesh.dp_rank :: mesh.dp_size]"
        )
    return plain(self, *args, **kwargs)


def get_state_dict(
    plain: Plain, self: Accelerator, model: nn.Module, *args: Any, **kwargs: Any
) -> dict[str, torch.Tensor]:
    """Extend ``Accelerator.get_state_dict`` to gather full tensors on rank 0; all ranks call it."""
    if not is_parallel(model):
        return plain(self, model, *args, **kwargs)
    if saves_apart():
        return LEFT_OUT
    return full_state_dict(model)


def save_model(
    plain: Plain,
    self: Accelerator,
    model: nn.Module,
    save_directory: Any,
    max_shard_size: int | str = "10GB",
    safe_serialization: bool = True,
) -> None:
    """Extend ``Accelerator.save_model`` to be ``model.save_pretrained`` of a parallel model."""
    if not is_parallel(model):
        plain(self, model, save_directory, max_shard_size, safe_serialization)
        return
    options = {"max_shard_size": max_shard_size, "safe_serialization": safe_serialization}
    write_weights(self.unwrap_model(model), save_directory, **options)
