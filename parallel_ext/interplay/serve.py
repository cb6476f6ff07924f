"""The list of all functions of torch, transformers and accelerate that are extended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import utils
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle
from transformers import GenerationMixin, PreTrainedModel

from parallel_ext.distributed.mesh import Mesh
from parallel_ext.interplay import ddp, gradients, optimizers, own_modules
from parallel_ext.interplay.accelerate import extend_accelerator
from parallel_ext.interplay.dcp import extend_dcp
from parallel_ext.interplay.flops import register_flops
from parallel_ext.interplay.refusals import REFUSALS, register
from parallel_ext.interplay.trl import extend_trl
from parallel_ext.nn.extended import extend, extend_by_name, restore_all
from parallel_ext.nn.stale_parameters import refuse_stale
from parallel_ext.parallel import joining
from parallel_ext.sharding._torch_private import unscale_grads

_hooks: list[RemovableHandle] = []


def serve() -> None:
    """Let functions of other packages know parallel models; further calls change nothing."""
    extend(dist.destroy_process_group, _end_job)
    extend_by_name(
        utils,
        *(gradients.clip_grad_norm_, gradients.clip_grad_value_, gradients.get_total_norm),
        gradients.clip_grads_with_norm_,
    )
    extend_by_name(torch.autograd, gradients.backward, gradients.grad)
    extend(DistributedDataParallel.__init__, ddp.start_ddp)
    extend_by_name(
        PreTrainedModel,
        *(own_modules.save_pretrained, own_modules.resize_token_embeddings),
        *(own_modules.tie_weights, own_modules.num_parameters),
    )
    extend_by_name(GenerationMixin, own_modules.generate)
    extend(unscale_grads, gradients.unscale_grads_)
    extend_by_name(Optimizer, optimizers.state_dict, optimizers.load_state_dict)
    register(REFUSALS)
    extend_accelerator()
    extend_dcp()
    extend_trl()
    register_flops()
    if not _hooks:
        for hook in (
            optimizers.refuse_without_gradients,
            refuse_stale,
            optimizers.refuse_on_shards,
        ):
            _hooks.append(register_optimizer_step_pre_hook(hook))


def _end_job(plain: Callable[..., None], group: Any = None) -> None:
    """Extend ``destroy_process_group``, which accelerate calls too: ranks end what they still do.

    Under ``px.patch`` they join the saves of others; asynchronous saves are written.
    """
    if group in (None, dist.group.WORLD):
        joining.end()
        for mesh in list(Mesh.live):
            mesh.background.join()
    plain(group)


def withdraw() -> None:
    """Undo :func:`serve` and what was extended of PEFT; the next ``px.parallelize`` does it again.

    Parallel models that there are may be wrong with functions of others from then on.
    """
    restore_all()
    while _hooks:
        _hooks.pop().remove()
