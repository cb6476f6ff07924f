"""Loss scaling for fp16: all ranks skip a step, or none does."""

from __future__ import annotations

import torch

from parallel_ext.distributed.mesh import Mesh
from parallel_ext.distributed.require_equal import require_equal
from parallel_ext.sharding._torch_private import unscale_all
from parallel_ext.sharding.slices import from_each_rank, local_part


def unscale_on_all_ranks(
    scaler: torch.amp.GradScaler,
    mesh: Mesh,
    optimizer: torch.optim.Optimizer,
    inv_scale: torch.Tensor,
    found_inf: torch.Tensor,
    allow_fp16: bool,
) -> dict[torch.device, torch.Tensor]:
    """Unscale an optimizer's gradients, and find out whether those of any rank overflow.

    It stands for ``torch.amp.GradScaler._unscale_grads_``, which all of torch's methods call, also
    for optimizers that unscale in their own kernel, and has its arguments. Every rank calls it.

    Returns:
        The device -> 1 if a gradient of any rank is not finite, else 0.

    Raises:
        ValueError: gradients are in fp16.
        DisagreementError: the ranks' scales differ; on all ranks.
        CollectiveTimeout: not all ranks called it.
    """
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                gradient = local_part(parameter.grad)
                by_dtype.setdefault(gradient.dtype, []).append(gradient)
    if torch.float16 in by_dtype and not allow_fp16:
        raise ValueError(
            "GradScaler: gradients in fp16 cannot be unscaled without loss; keep the "
            "parameters in fp32 and compute in fp16 by torch.autocast"
        )
    for gradients in by_dtype.values():
        unscale_all(gradients, found_inf, inv_scale)
    mesh.control.barrier("GradScaler.unscale_")
    advice = "make the scaler equal on all ranks, and load the same state"
    require_equal(mesh.control, "GradScaler", {"the scale": scaler.get_scale()}, advice=advice)
    for group in (mesh.tp, mesh.dp):
        found_inf = from_each_rank(found_inf, group).amax(0)
    return {found_inf.device: found_inf}
