"""torch's functions on gradients: the norm is that of the full tensors, whoever calls it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import GeneratorType
from typing import Any

import torch
from torch import nn

from parallel_ext.distributed.mesh import Mesh
from parallel_ext.distributed.require_equal import require_equal
from parallel_ext.nn.stale_parameters import newest
from parallel_ext.parallel.joining import arrive
from parallel_ext.parallel.owners import Owned, owners_in, owners_of
from parallel_ext.parallel.state import parallel_models, state_of
from parallel_ext.sharding._torch_private import unscale_all
from parallel_ext.sharding.slices import from_each_rank, local_part
from parallel_ext.training.gradients import LaidOut, scale_to_norm, total_norm

Tensors = torch.Tensor | Iterable[torch.Tensor]


def _listed(tensors: Tensors) -> list[torch.Tensor]:
    listed = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    return [newest(each) for each in listed]  # of a list that is older than the parallel model


def _norm(
    tensors: list[torch.Tensor],
    owners: dict[int, Owned],
    norm_type: float,
    error_if_nonfinite: bool,
    op_name: str,
) -> torch.Tensor:
    laid_out: dict[Mesh, list[LaidOut]] = {owned.mesh: [] for owned in owners.values()}
    beside = []
    for tensor in tensors:
        if (owned := owners.get(id(tensor))) is not None:
            laid_out[owned.mesh].append((local_part(tensor.detach()), owned.layout))
        else:
            beside.append(tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor)
    return total_norm(laid_out, beside, norm_type, error_if_nonfinite, op_name)


def get_total_norm(
    plain: Callable[..., torch.Tensor],
    tensors: Tensors,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Extend ``torch.nn.utils.get_total_norm`` to return the norm of the full gradients.

    Every rank calls it with the same gradients.
    """
    tensors = _listed(tensors)
    if owners := owners_of(tensors):
        return _norm(tensors, owners, norm_type, error_if_nonfinite, "get_total_norm")
    return plain(tensors, norm_type, error_if_nonfinite, foreach)


def _gradients(parameters: list[torch.Tensor], owners: dict[int, Owned]) -> list[torch.Tensor]:
    """Return the gradients that exist; for a parameter that FSDP has gathered, its shard's."""
    shards = (getattr(owners.get(id(each)), "parameter", each) for each in parameters)
    return [shard.grad for shard in shards if shard.grad is not None]


def clip_grad_norm_(
    plain: Callable[..., torch.Tensor],
    parameters: Tensors,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Extend ``torch.nn.utils.clip_grad_norm_`` to clip by the norm of the full gradients.

    Every rank calls it with the same parameters.
    """
    listed = _listed(parameters)
    if not (owners := owners_of(listed)):
        generator = isinstance(parameters, GeneratorType)  # of which torch warns where it is empty
        parameters = (each for each in listed) if generator else listed
        return plain(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
    arrive("clip_grad_norm_")
    gradients = _gradients(listed, owners)
    owners |= owners_of(gradients)  # beside the parameters: of these some mesh may have no gradient
    norm = _norm(gradients, owners, norm_type, error_if_nonfinite, "clip_grad_norm_")
    scale_to_norm(map(local_part, gradients), max_norm, norm)
    return norm


def clip_grads_with_norm_(
    plain: Callable[..., None],
    parameters: Tensors,
    max_norm: float,
    total_norm: torch.Tensor,
    foreach: bool | None = None,
) -> None:
    """Extend ``torch.nn.utils.clip_grads_with_norm_`` to scale shards of any FSDP meshes."""
    listed = _listed(parameters)
    if not (owners := owners_of(listed)):
        plain(listed, max_norm, total_norm, foreach)
        return
    norm = total_norm.full_tensor() if hasattr(total_norm, "full_tensor") else total_norm
    scale_to_norm(map(local_part, _gradients(listed, owners)), max_norm, norm)


def clip_grad_value_(
    plain: Callable[..., None], parameters: Tensors, clip_value: float, foreach: bool | None = None
) -> None:
    """Extend ``torch.nn.utils.clip_grad_value_`` to clamp this rank's shards of the gradients."""
    listed = _listed(parameters)
    if not (owners := owners_of(listed)):
        plain(listed, clip_value, foreach)
        return
    for gradient in map(local_part, _gradients(listed, owners)):
        gradient.clamp_(-float(clip_value), float(clip_value))


def unscale_grads_(
    plain: Callable[..., Any],
    self: torch.amp.GradScaler,
    optimizer: torch.optim.Optimizer,
    inv_scale: torch.Tensor,
    found_inf: torch.Tensor,
    allow_fp16: bool,
) -> dict[torch.device, torch.Tensor]:
    """Extend ``torch.amp.GradScaler`` so that an overflow on one rank counts on all ranks.

    All of torch's methods call it, also for optimizers that unscale in their own kernel. Every rank
    calls it.

    Returns:
        The device -> 1 if a gradient of any rank is not finite, else 0.

    Raises:
        NotImplementedError: the optimizer trains models on several meshes.
        ValueError: gradients are in fp16.
        DisagreementError: the ranks' scales differ; on all ranks.
    """
    meshes = {owned.mesh for owned in owners_in(optimizer).values()}
    if not meshes:
        return plain(self, optimizer, inv_scale, found_inf, allow_fp16)
    if len(meshes) > 1:
        raise NotImplementedError(
            "GradScaler: an optimizer of models on several meshes is not supported; build one "
            "optimizer for each"
        )
    mesh = meshes.pop()
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
    require_equal(mesh.control, "GradScaler", {"the scale": self.get_scale()}, advice=advice)
    for group in (mesh.tp, mesh.dp):
        found_inf = from_each_rank(found_inf, group).amax(0)
    return {found_inf.device: found_inf}


def backward(
    plain: Callable[..., None],
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> None:
    """Extend ``torch.autograd.backward`` to refuse to leave out what is summed at its end."""
    if inputs is not None:
        inputs = _without_what_comes_late("torch.autograd.backward(inputs=)", inputs)
    plain(tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)


def grad(plain: Callable[..., Any], outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """Extend ``torch.autograd.grad`` to refuse gradients that only a backward's end has."""
    inputs = _without_what_comes_late("torch.autograd.grad", inputs)
    return plain(outputs, inputs, *args, **kwargs)


def _without_what_comes_late(function: str, inputs: Any) -> Any:
    """Return the inputs of a call, or raise for a gradient that only a backward's end has."""
    if isinstance(inputs, Iterator):
        inputs = tuple(inputs)
    listed = inputs.values() if isinstance(inputs, dict) else inputs
    listed = [inputs] if isinstance(inputs, torch.Tensor) else listed
    parameters = [each for each in listed if isinstance(each, nn.Parameter)]
    if not parameters:
        return inputs
    of_fsdp = [state_of(model).fsdp_gradients for model in parallel_models()]
    if any(gradients and gradients.are_of_gathered(parameters) for gradients in of_fsdp):
        raise _comes_late(function, "what px.data_parallel gathers")
    for owned in owners_of(parameters).values():
        state, layout = state_of(owned.model), owned.layout
        partials = state.partials
        late = partials is not None and partials.late & {owned.name, layout.name}
        late = late or owned.name in state.fsdp_sharded
        # Of some ranks nobody else has the key-value heads, but every rank raises or none.
        if late or any(len(layout.replicas(rank)) > 1 for rank in range(layout.copy_size)):
            raise _comes_late(function, owned.name)
    return inputs


def _comes_late(function: str, name: str) -> NotImplementedError:
    return NotImplementedError(
        f"{function} is not supported on a parallel model for {name}, whose gradient is summed "
        "over ranks at the end of a whole backward; call loss.backward() and read .grad, and "
        "freeze others before by requires_grad_(False)"
    )
