"""``px.patch``: HuggingFace scripts as they are, whose models become parallel when they are loaded.

What is extended here belongs to scripts: how they load a model, shard their data, and build an
optimizer. What other packages do with a parallel model (:mod:`parallel_ext.interplay.serve`) holds
with and without it.
"""

from __future__ import annotations

import atexit
import inspect
import os
import sys
from collections.abc import Callable, Collection, Iterable
from functools import cache
from typing import Any, NoReturn

import safetensors.torch
import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator
from accelerate.commands.launch import launch_command
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DistributedSampler
from transformers import PreTrainedModel

from parallel_ext.distributed.errors import CheckpointError, warn_user
from parallel_ext.distributed.mesh import Mesh, init_mesh
from parallel_ext.interplay import trained_together
from parallel_ext.nn.extended import extend, restore
from parallel_ext.nn.grad_sync import PartialGradients
from parallel_ext.parallel import adopting, joining
from parallel_ext.parallel.adopting import Patch, patches
from parallel_ext.parallel.configuration import is_of_images, served, type_of_text
from parallel_ext.parallel.extending import run_extensions
from parallel_ext.parallel.from_pretrained import from_pretrained
from parallel_ext.parallel.options import check_options, dtype_of
from parallel_ext.parallel.parallelize import parallelize
from parallel_ext.parallel.state import is_parallel
from parallel_ext.sharding.shards import holds_shards
from parallel_ext.training.trainer import TrainerMixin
from parallel_ext.training.trainer_checks import (
    check_class,
    check_given,
    check_served,
    refuse_model_init,
)

# Options of from_pretrained that the mesh replaces, and options that change nothing here.
_PLACED = {
    *("device_map", "max_memory", "offload_folder", "offload_state_dict"),
    *("tp_plan", "tp_size", "device_mesh", "distributed_config"),
}
_UNUSED = {"_from_auto", "_commit_hash", "adapter_kwargs", "proxies", "trust_remote_code"}

DDP_TIMEOUT_S = 1800.0  # of TrainingArguments(ddp_timeout=)

# Without it accelerate sees one process on CPUs, however many there are.
_USE_CPU = "ACCELERATE_USE_CPU"

# Whose code knows that accelerate's processes are ranks.
_PACKAGES = ("accelerate", "parallel_ext", "peft", "transformers", "trl")


def patch(
    tp: int = 1,
    ep: int = 1,
    zero: int = 2,
    plain: Iterable[str] = (),
    timeout: float = DDP_TIMEOUT_S,
) -> Mesh:
    """Let HuggingFace scripts load parallel models from here on, and train them as one process.

    Every rank calls it, before it loads a model; ``torchrun -m parallel_ext.run`` does so before a
    script begins. From then on ``from_pretrained`` of causal language models, and of models of
    images and text, returns parallel models. Causal models from scratch, and classifiers, become
    parallel when they are given to an optimizer, a ``Trainer`` or ``get_peft_model``. An optimizer
    of a parallel model calls :func:`parallel_ext.data_parallel` where there are several dp ranks, a
    ``Trainer`` of one is a :class:`parallel_ext.Trainer`, and a ``DistributedSampler`` shards data
    over the dp ranks. Where only some ranks save, as under ``if rank == 0:``, the others join them.
    Calling it again with the same arguments changes nothing.

    Args:
        tp: ranks that share one model.
        ep: ranks over which the experts of a mixture are sharded.
        zero: stage of :func:`parallel_ext.data_parallel`, 2 or 3.
        plain: names of classes, such as ``"GPT2LMHeadModel"``, of models that stay whole on each
            rank: causal models that only help.
        timeout: seconds, as of :func:`parallel_ext.init_mesh`; by default half an hour, as long as
            HuggingFace lets ranks wait for one that prepares data.

    Returns:
        The mesh, for scripts that want ``mesh.dp_rank``; :func:`parallel_ext.init_mesh` has made
        it.

    Raises:
        ValueError: it is in force with other arguments, or they do not fit the number of ranks.
        CollectiveTimeout: not all ranks called it.

    Example:
        >>> mesh = patch()
        >>> unpatch()
    """
    if zero not in (2, 3):
        raise ValueError(f"patch: zero must be 2 or 3, got {zero!r}")
    options = {"tp": tp, "ep": ep, "zero": zero, "plain": sorted(plain), "timeout": timeout}
    if patches:
        if patches[0].options != options:
            raise ValueError(
                f"patch: it is in force with {patches[0].options}, and was called with {options}; "
                "call px.unpatch() first"
            )
        return patches[0].mesh
    run_extensions()
    mesh = init_mesh(tp=tp, ep=ep, timeout=timeout)
    uses_cpu = mesh.device.type == "cpu" and _USE_CPU not in os.environ
    if uses_cpu:
        os.environ[_USE_CPU] = "true"
    joining.start(mesh)
    patches.append(Patch(mesh, options, PartialGradients(), uses_cpu))
    _end_at_exit()
    for function, extension in _EXTENDED.items():
        extend(function, extension)
    return mesh


def unpatch() -> None:
    """Undo :func:`patch`: what is loaded from here on is plain.

    Models that are parallel stay so, and so does the mesh. Without a patch it does nothing.

    Example:
        >>> unpatch()
    """
    for function in _EXTENDED:
        restore(function)
    joining.stop()
    for patched in patches:
        if patched.uses_cpu:
            os.environ.pop(_USE_CPU, None)
    patches.clear()


@cache
def _end_at_exit() -> None:
    atexit.register(joining.end)  # runs before the groups are destroyed: exits come last first


def _load(plain: Callable[..., Any], cls: type, source: Any, *args: Any, **kwargs: Any) -> Any:
    """Extend ``PreTrainedModel.from_pretrained`` to return parallel models.

    Of causal classes; and of those of images, where their files can be read by slices.
    """
    patched = patches[0]
    if cls.__name__ in patched.options["plain"]:
        return plain(cls, source, *args, **kwargs)
    if not adopting.is_causal(cls):
        return _load_with_images(plain, cls, source, *args, **kwargs)
    if (adapter := _adapter_of(kwargs)) is not None:
        raise NotImplementedError(
            f"px.patch: {adapter} holds an adapter of {source}; load that, then "
            "peft.PeftModel.from_pretrained(model, directory)"
        )
    joining.arrive(f"{cls.__name__}.from_pretrained")
    # Such a class knows itself what it reads.
    if not _is_built_by_us(cls):
        return parallelize(plain(cls, source, *args, **kwargs), patched.mesh)
    if cls.config_class.model_type not in served():
        raise NotImplementedError(
            f"px.patch: {cls.__name__} is not served; served are {', '.join(served())}. "
            f"plain=[{cls.__name__!r}] loads it whole on each rank, for a model that only helps"
        )
    if args:
        raise TypeError(f"px.patch: {cls.__name__}.from_pretrained takes options by name")
    config, kwargs = _configuration(cls, source, kwargs)
    return from_pretrained(source, patched.mesh, config=config, **kwargs)


def _load_with_images(
    plain: Callable[..., Any], cls: type, source: Any, *args: Any, **kwargs: Any
) -> Any:
    """Load by slices what is a model of images around a served decoder; all else as it is."""
    model_type = getattr(cls.config_class, "model_type", None)
    of_images = is_of_images({"model_type": model_type, "architectures": [cls.__name__]})
    if args or not (of_images and _is_built_by_us(cls)) or _adapter_of(kwargs) is not None:
        return plain(cls, source, *args, **kwargs)
    config, options = _configuration(cls, source, kwargs)
    if type_of_text(config) not in served() or config.architectures != [cls.__name__]:
        return plain(cls, source, **kwargs)
    own = inspect.signature(from_pretrained).parameters
    try:
        others = {name: value for name, value in options.items() if name not in own}
        check_options(from_pretrained, parallelize, others)
        dtype_of(options.get("dtype"), options.get("torch_dtype"))  # for parts, in transformers
    except (TypeError, ValueError) as error:
        why: Exception = error
    else:
        joining.arrive(f"{cls.__name__}.from_pretrained")
        try:
            return from_pretrained(source, patches[0].mesh, config=config, **options)
        except CheckpointError as error:
            why = error
    warn_user(f"px.patch: each rank loads {cls.__name__} whole: {why}")
    return plain(cls, source, **kwargs)


def _adapter_of(kwargs: dict[str, Any]) -> Any:
    """Return the directory that holds an adapter, which transformers has found, and no model."""
    return (kwargs.get("adapter_kwargs") or {}).get("_adapter_model_path")


_OF_THE_HUB = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")


def _configuration(
    cls: type, source: Any, kwargs: dict[str, Any]
) -> tuple[transformers.PreTrainedConfig, dict[str, Any]]:
    """Return the configuration with the changes that are among the options, and other options."""
    kwargs = {name: value for name, value in kwargs.items() if name not in _PLACED | _UNUSED}
    config = kwargs.pop("config", None)
    if isinstance(config, transformers.PreTrainedConfig):
        return config, kwargs
    source = source if config is None else config
    hub = {name: kwargs[name] for name in _OF_THE_HUB if name in kwargs}
    own = {name: kwargs[name] for name in ("dtype", "torch_dtype") if name in kwargs}
    rest = {name: value for name, value in kwargs.items() if name not in {*hub, *own}}
    config, unused = cls.config_class.from_pretrained(
        source, return_unused_kwargs=True, **hub, **rest
    )
    return config, {**unused, **hub, **own}


def _is_built_by_us(cls: type) -> bool:
    """Return whether ``px.from_pretrained`` builds just this class."""
    return cls.__module__.startswith(("transformers.", "parallel_ext."))


def _start_sampler(
    plain: Callable[..., None],
    self: DistributedSampler,
    dataset: Any,
    num_replicas: int | None = None,
    rank: int | None = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Extend ``DistributedSampler`` to shard over the dp ranks; tp ranks get the same samples."""
    mesh = patches[0].mesh
    if num_replicas in (None, mesh.world_size) and rank in (None, mesh.rank):
        num_replicas, rank = mesh.dp_size, mesh.dp_rank
    plain(self, dataset, num_replicas, rank, *args, **kwargs)


def _start_job(plain: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Extend ``init_process_group`` to accept that :func:`patch` has called it before a script."""
    if not dist.is_initialized():
        plain(*args, **kwargs)


def _wait(plain: Callable[..., Any], group: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Extend ``barrier`` to let ranks that wait in it join the saves of the others."""
    if group in (None, dist.group.WORLD):
        joining.arrive("barrier")
    return plain(group, *args, **kwargs)


@cache
def _parallel(cls: type) -> type:
    """Return a class of trainers that trains parallel models."""
    return type(cls.__name__, (TrainerMixin, cls), {"__module__": cls.__module__})


def _start_trainer(
    plain: Callable[..., None],
    self: transformers.Trainer,
    model: Any = None,
    args: Any = None,
    *rest: Any,
    **kwargs: Any,
) -> None:
    """Extend ``Trainer`` to be ``px.Trainer`` where its model is parallel."""
    if isinstance(self, TrainerMixin):
        plain(self, model, args, *rest, **kwargs)
        return
    adopting.adopt_trained(model, type(self).__name__)
    if not (isinstance(model, nn.Module) and is_parallel(model)):
        plain(self, model, args, *rest, **kwargs)
        return
    self.__class__ = _parallel(type(self))
    check_class(self)
    check_given(self, (args, *rest), kwargs)
    trained_together.train_together(model)
    run_extensions()  # of what was imported after the model was loaded
    plain(self, model, args, *rest, **kwargs)
    joining.remember(self)
    check_served(self)


def _launch(plain: Callable[..., Any], args: Any) -> NoReturn:
    """Extend accelerate's launcher to refuse: its processes would know nothing of px.patch."""
    raise NotImplementedError(
        f"px.patch: accelerate launch would start {args.training_script} in new processes, whose "
        f"models stay whole; run it by torchrun -m parallel_ext.run {args.training_script}"
    )


def _is_called_by(packages: Collection[str]) -> bool:
    """Return whether what has called the function that is extended here is of some packages."""
    module = sys._getframe(4).f_globals.get("__name__", "")
    return module.partition(".")[0] in packages


def _write(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Extend ``torch.save`` and safetensors' to refuse the ``state_dict()`` of a parallel model."""
    by_packages = _is_called_by(("parallel_ext", "torch"))  # such as torch's own checkpoints
    if not by_packages and holds_shards([args, kwargs]):
        raise NotImplementedError(
            "px.patch: the file would hold this rank's shards of the model, not all of it; on all "
            "ranks call model.save_pretrained or px.save_checkpoint, or write what "
            "px.full_state_dict(model) returns"
        )
    return plain(*args, **kwargs)


def _count_processes(plain: Callable[..., int], self: Accelerator) -> int:
    """Extend ``Accelerator.num_processes`` to count dp ranks where a script asks.

    Scripts multiply schedules, and divide data, by it. Packages count all ranks, as served.
    """
    mesh, count = patches[0].mesh, plain(self)
    scripts = count == mesh.world_size and not _is_called_by(_PACKAGES)
    return mesh.dp_size if scripts else count


def _number_process(plain: Callable[..., int], self: Accelerator) -> int:
    """Extend ``Accelerator.process_index`` to be the dp rank where a script asks."""
    mesh, index = patches[0].mesh, plain(self)
    scripts = index == mesh.rank and not _is_called_by(_PACKAGES)
    return mesh.dp_rank if scripts else index


def _make_model(
    plain: Callable[..., Any], self: transformers.Trainer, *args: Any, **kwargs: Any
) -> Any:
    """Extend ``Trainer.call_model_init`` to refuse functions that make parallel models."""
    model = plain(self, *args, **kwargs)
    if is_parallel(model) or adopting.may_adopt(model):
        refuse_model_init(self)
    return model


_EXTENDED: dict[Callable[..., Any], Callable[..., Any]] = {
    launch_command: _launch,
    torch.save: _write,
    safetensors.torch.save_file: _write,
    Accelerator.num_processes.fget: _count_processes,
    Accelerator.process_index.fget: _number_process,
    PreTrainedModel.from_pretrained.__func__: _load,
    DistributedSampler.__init__: _start_sampler,
    dist.init_process_group: _start_job,
    dist.barrier: _wait,
    Optimizer.__init__: trained_together.start_optimizer,
    Optimizer.add_param_group: trained_together.add_group,
    transformers.Trainer.__init__: _start_trainer,
    transformers.Trainer.call_model_init: _make_model,
}
