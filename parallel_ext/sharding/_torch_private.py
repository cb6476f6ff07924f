"""Private names of torch for which it has no public ones; tried with torch 2.13 to 2.15.

They stand here and nowhere else in the package; ``docs/internals.md`` says what each is needed for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook as has_global_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["TorchDispatchMode", "has_global_hook", "tree_leaves"]

# --- Autograd ---


def running_backward() -> int:
    """Return the number of the backward that this thread runs, -1 outside of one.

    Without it nobody could tell a forward from one that a backward recomputes, nor a backward from
    an earlier one that has raised, after which no callback runs.
    """
    return torch._C._current_graph_task_id()


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Let the backward that runs call ``callback`` once, after all its gradients are there.

    Gradients that are sums over ranks are final when ``backward()`` returns; the public hooks run
    for one tensor or node each, and none after the last one.

    Raises:
        RuntimeError: no backward runs in this thread.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor's memory was written to in place, as far as autograd knows."""
    return tensor._version


def gradient_hooks(parameter: nn.Parameter) -> tuple[list[Any], list[Any]]:
    """Return a parameter's hooks on its gradient, and those that run once ``.grad`` has it."""
    before, after = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    return list((before or {}).values()), list((after or {}).values())


# --- Modules ---


def holds_any(model: nn.Module, ids: set[int]) -> bool:
    """Return whether the modules of a model hold parameters with one of these ``id``, or gradients.

    ``model.parameters()`` says so too, and takes twice as long.
    """
    modules = [model]
    for module in modules:  # which grow in the loop
        for parameter in module._parameters.values():
            if parameter is not None and (id(parameter) in ids or id(parameter.grad) in ids):
                return True
        modules.extend(child for child in module._modules.values() if child is not None)
    return False


def output_hooks(module: nn.Module) -> list[Any]:
    """Return the hooks that see a module's output or the gradient of it."""
    kinds = (module._forward_hooks, module._backward_hooks, module._backward_pre_hooks)
    return [hook for kind in kinds for hook in kind.values()]


def remove_output_hooks(module: nn.Module, which: Callable[[Any], bool]) -> bool:
    """Remove forward hooks of ``module``; return whether there were any."""
    found = [key for key, hook in module._forward_hooks.items() if which(hook)]
    for key in found:
        del module._forward_hooks[key]
    return bool(found)


def input_hooks(module: nn.Module) -> list[Any]:
    """Return the hooks that see a module's input before its forward."""
    return list(module._forward_pre_hooks.values())


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the parameters of ``module`` itself by the names of its attributes."""
    return module._parameters


def own_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the modules of ``module`` itself by the names of its attributes.

    ``module.named_children()`` takes several times as long.
    """
    return module._modules


def is_persistent(module: nn.Module, buffer: str) -> bool:
    """Return whether a buffer of ``module`` stands in its ``state_dict()``."""
    return buffer not in module._non_persistent_buffers_set


def is_compiled(module: nn.Module) -> bool:
    """Return whether ``module`` is what ``torch.compile`` has made of another one."""
    return hasattr(module, "_orig_mod")


def without_wrappers(name: str) -> str:
    """Return a parameter's name without those of ``torch.compile`` and ``checkpoint_wrapper``."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


# --- The compiler ---


def disable_compiler(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let ``torch.compile`` leave a function alone; its public decorator imports the compiler."""
    return torch._disable_dynamo(function)


def schema_of(op: Any) -> Any:
    """Return the schema of an overload of an op, with the names of its arguments."""
    return op._schema


# --- Many tensors in one call ---


def foreach_norm(tensors: list[torch.Tensor], norm_type: float) -> list[torch.Tensor]:
    """Return the norm of each tensor of one dtype, in fp64 and without copies in fp64."""
    return torch._foreach_norm(tensors, norm_type, dtype=torch.float64)


def multiply_all(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply tensors of one dtype by ``factor``, in place."""
    torch._foreach_mul_(tensors, factor)


def unscale_all(
    gradients: list[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor
) -> None:
    """Multiply gradients by ``inv_scale`` in place; set ``found_inf`` to 1 if one is not finite."""
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, inv_scale)


unscale_grads = torch.amp.GradScaler._unscale_grads_
"""What all methods of ``torch.amp.GradScaler`` call to unscale an optimizer's gradients."""

# --- Training ---


def scheduler_steps(scheduler: torch.optim.lr_scheduler.LRScheduler) -> int:
    """Return how often a learning rate scheduler has stepped, the step of its making included."""
    return scheduler._step_count


# --- FSDP ---

Gradients = tuple[torch.Tensor | None, torch.Tensor | None]
"""What FSDP holds back of one parameter, in the dtype of the forward and in that of reductions.

Since torch 2.15 the first is the only one, in either dtype.
"""


def fsdp_parameters(model: nn.Module) -> Iterator[Any]:
    """Yield FSDP's objects of the parameters that it has sharded, each with ``sharded_param``."""
    for _, group in _fsdp_groups(model):
        yield from group.fsdp_params


def _fsdp_groups(model: nn.Module) -> Iterator[tuple[Any, Any]]:
    """Yield each group of parameters that FSDP gathers at once, after the module that has it."""
    for module in model.modules():
        if hasattr(module, "reset_iter_state"):
            yield from ((module, group) for group in module._get_fsdp_state()._fsdp_param_groups)


def gathered_parameter(parameter: Any) -> nn.Parameter | None:
    """Return what forwards use of one of :func:`fsdp_parameters`; None before the first one."""
    return getattr(parameter, "_unsharded_param", None)


def renew_gathered(model: nn.Module) -> None:
    """Let FSDP forget the memory that it gathers into where it could not be written to.

    FSDP makes it in the first forward, and not again after ``model.to(dtype)`` or
    ``torch.inference_mode``.
    """
    for module, group in _fsdp_groups(model):
        if unfit := [p for p in group.fsdp_params if gathers_into_unfit(p)]:
            module.reshard()
            for parameter in unfit:
                del parameter._unsharded_param
                parameter.all_gather_outputs = []
            group._init_mp_dtypes()


def gathers_into_unfit(parameter: Any) -> bool:
    """Return whether :func:`renew_gathered` is to be called, for one of :func:`fsdp_parameters`."""
    gathered = gathered_parameter(parameter)
    if gathered is None:
        return False
    inference = gathered.is_inference() and not torch.is_inference_mode_enabled()
    unfit = inference or gathered.dtype != parameter.sharded_param.dtype
    return unfit and all(gradient is None for gradient in held_gradients(parameter))


def storage_of(tensor: torch.Tensor) -> int:
    """Return a number that changes when ``.data =`` gives a tensor another storage."""
    return tensor.untyped_storage()._cdata


def held_gradients(parameter: Any) -> Gradients:
    """Return the gradients that FSDP holds back for one of :func:`fsdp_parameters`.

    ``reset_iter_state`` leaves them, against its documentation, and ``unshard`` shows them in the
    gathered dtype only.
    """
    gathered = gathered_parameter(parameter)
    wide = vars(parameter).get("unsharded_accumulated_grad")
    return None if gathered is None else gathered.grad, wide


def set_held_gradients(parameter: Any, gradients: Gradients) -> None:
    """Put other gradients in the place of :func:`held_gradients`."""
    if (gathered := gathered_parameter(parameter)) is not None:
        gathered.grad = gradients[0]
    if "unsharded_accumulated_grad" in vars(parameter):
        parameter.unsharded_accumulated_grad = gradients[1]


# --- Distributed checkpoints ---


def dcp_place() -> type:
    """Return the class that says in which file of a DCP a piece lies, and where."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo
