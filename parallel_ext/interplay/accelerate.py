"""accelerate's ``Accelerator`` around a parallel model, which needs no preparation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from parallel_ext.interplay.refusals import Refusal, Where, refuse
from parallel_ext.io.state_dict import gather_state_dict
from parallel_ext.parallel.extending import extend
from parallel_ext.parallel.owners import owners_of
from parallel_ext.parallel.state import STATE_NAME, model_of, parallel_models, state_of

_INSTEAD = "px.save_checkpoint saves a training, px.load_checkpoint resumes it on any layout"


def extend_accelerator() -> None:
    """Extend ``Accelerator`` so that it knows parallel models."""
    extend(Accelerator.get_state_dict, get_state_dict)
    extend(Accelerator.save_state, _refuse_state("Accelerator.save_state"))
    extend(Accelerator.load_state, _refuse_state("Accelerator.load_state"))
    extend(Accelerator.gather_for_metrics, gather_for_metrics)
    extend(Accelerator.prepare_scheduler, prepare_scheduler)


def get_state_dict(
    plain: Callable[..., Any], self: Accelerator, model: nn.Module, *args: Any, **kwargs: Any
) -> dict[str, torch.Tensor]:
    """Extend ``Accelerator.get_state_dict`` to gather full tensors on rank 0; all ranks call it."""
    if not any(STATE_NAME in module._modules for module in model.modules()):
        return plain(self, model, *args, **kwargs)
    state = state_of(model)
    return gather_state_dict(model_of(model), state.mesh, state.layout)


def _refuse_state(name: str) -> Callable[..., Any]:
    """Return an extension that refuses a function which writes or reads only rank 0's tensors."""
    refusal = Refusal(f"accelerate:{name}", _INSTEAD, Where.RANKS)

    def extension(plain: Callable[..., Any], self: Accelerator, *args: Any, **kwargs: Any) -> Any:
        refuse(refusal, self._models, self._optimizers)
        return plain(self, *args, **kwargs)

    return extension


def gather_for_metrics(
    plain: Callable[..., Any], self: Accelerator, *args: Any, **kwargs: Any
) -> Any:
    """Extend ``Accelerator.gather_for_metrics`` to raise where ranks share their data.

    Raises:
        NotImplementedError: tp ranks share their data, so samples would be returned several times.
    """
    sizes = {state_of(model).mesh.tp_size for model in parallel_models()}
    if self.num_processes > 1 and max(sizes, default=1) > 1:
        raise NotImplementedError(
            f"Accelerator.gather_for_metrics would return every sample {max(sizes)} times, since "
            "tp ranks share their data; gather over the dp ranks: "
            "torch.distributed.all_gather(..., group=mesh.process_group(mesh.dp))"
        )
    return plain(self, *args, **kwargs)


def prepare_scheduler(
    plain: Callable[..., Any], self: Accelerator, scheduler: Any, *args: Any, **kwargs: Any
) -> Any:
    """Extend ``Accelerator.prepare_scheduler`` to raise where tp ranks would count as processes.

    Raises:
        NotImplementedError: the scheduler would step once for each process, tp ranks included.
    """
    optimizer = getattr(scheduler, "optimizer", None)
    groups = getattr(optimizer, "param_groups", [])
    owners = owners_of(parameter for group in groups for parameter in group["params"])
    counts = self.step_scheduler_with_optimizer and not self.split_batches
    if counts and any(owned.mesh.tp_size > 1 for owned in owners.values()):
        raise NotImplementedError(
            "Accelerator.prepare_scheduler would step the scheduler once for each process, tp "
            "ranks included; step the scheduler itself, or pass step_scheduler_with_optimizer=False"
        )
    return plain(self, scheduler, *args, **kwargs)
