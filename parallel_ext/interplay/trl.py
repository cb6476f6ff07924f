"""TRL's fused output head on a parallel model: the same fields, by the op for sharded rows."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial, wraps
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import nn

from parallel_ext import ops
from parallel_ext.nn.extended import extend
from parallel_ext.nn.fused_loss import LossCall, running, why_not_fused
from parallel_ext.ops.group import Range
from parallel_ext.parallel.forward import with_balance
from parallel_ext.parallel.forward_around import (
    changes_logits_around,
    hidden_states_around,
    holds_rows_around,
    mark_as_ours,
)
from parallel_ext.parallel.loss_call import who_sees
from parallel_ext.parallel.state import own_state, state_of

_MODULE = "trl.trainer.utils"


def extend_trl() -> None:
    """Extend TRL where it is imported, so that its fused output head knows parallel models."""
    own = getattr(sys.modules.get(_MODULE), "add_fused_lm_head", None)
    if own is not None:  # an older TRL has none
        extend(own, add_fused_lm_head)


class _Head(NamedTuple):
    """The rows of the output head that this rank multiplies by the hidden states."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    vocab_size: int
    vocab_range: Range
    group: ops.Group


_AtHead = tuple[
    torch.Tensor, tuple[torch.Tensor, torch.Tensor | None] | None, Callable[[Any], dict[str, Any]]
]
"""Hidden states, the head's weight and bias, if it makes no logits, and fields by the loss."""


def add_fused_lm_head(
    plain: Callable[..., None], model: nn.Module, *args: Any, **kwargs: Any
) -> None:
    """Extend TRL's ``add_fused_lm_head`` to multiply each rank's rows of the output head.

    That is the head of a parallel model, or one that is sharded with the decoder in a model.
    """
    state = own_state(model)
    if state is None and not holds_rows_around(model):
        plain(model, *args, **kwargs)
        return
    asked = inspect.signature(plain).bind(model, *args, **kwargs)
    asked.apply_defaults()
    if asked.arguments["cast_lm_head_to_fp32"] and model.dtype != torch.float32:
        raise NotImplementedError(
            "add_fused_lm_head(cast_lm_head_to_fp32=True) is not supported on a parallel model of "
            f"{model.dtype}; load it with dtype=torch.float32"
        )
    if state is None:
        changes = changes_logits_around(model)
    else:
        changes = state.spec.changes_logits or state.spec.of_logits
    if changes:
        raise NotImplementedError(
            f"add_fused_lm_head: {type(model).__name__} changes its logits, which is not supported "
            "on a parallel model"
        )
    own = model.forward
    scale, wanted = 1 / asked.arguments["temperature"], asked.arguments["outputs"]
    output_class = plain.__globals__["FusedCausalLMOutput"]
    run_to_head = _run_around if state is None else partial(_run_own, own)

    @wraps(type(model).forward)
    def forward(self: nn.Module, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        if not fused_lm_head:
            return own(*args, **kwargs)
        return output_class(**_fields(self, run_to_head, scale, wanted, args, kwargs))

    if state is None:
        mark_as_ours(forward)
    else:
        state.own_forward = forward
    model.forward = MethodType(forward, model)


def _fields(
    model: nn.Module,
    run_to_head: Callable[..., _AtHead],
    scale: float,
    wanted: tuple[str, ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> dict[str, torch.Tensor | None]:
    """Run a model up to its head, and return the fields of TRL's output."""
    labels, shifted = kwargs.pop("labels", None), kwargs.pop("shift_labels", None)
    count = kwargs.pop("num_items_in_batch", None)
    compared = labels if shifted is None else shifted
    hidden, weights, of_loss = run_to_head(model, compared, args, kwargs)
    if weights is None:
        raise NotImplementedError(
            "TRL's fused output head on a parallel model: an adapter on the head makes logits"
        )
    state = state_of(model)
    head = _Head(*weights, sum(state.vocab_sizes), state.vocab_range, state.mesh.tp)
    fields, loss = _fields_of(head, hidden, labels, shifted, count, scale, wanted)
    return fields | of_loss(loss)


def _run_around(
    model: nn.Module, labels: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> _AtHead:
    """Run what a model holds below its sharded head."""
    configured = getattr(model.config.get_text_config(), "output_router_logits", False)
    if kwargs.get("output_router_logits", configured):
        raise NotImplementedError(
            f"TRL's fused output head on {type(model).__name__} around a parallel decoder: a load "
            "balancing loss is not supported; pass output_router_logits=False"
        )
    _refuse(why_not_fused(model.get_output_embeddings()))
    hidden, weights = hidden_states_around(model, labels, args, {**kwargs, "use_cache": False})
    return hidden, weights, lambda loss: {"loss": loss}


def _run_own(
    own: Callable[..., Any],
    model: nn.Module,
    _: torch.Tensor,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> _AtHead:
    """Run the parallel model, whose ``own`` forward calls the head, up to that."""
    state = state_of(model)
    _refuse(why_not_fused(model.get_submodule(state.spec.head)) or who_sees(model))
    call = LossCall(fused=True, shared=True)
    with running(call):
        output = own(*args, **{**kwargs, "use_cache": False, "return_dict": True})
    return output.logits, call.weights, partial(with_balance, model, state, output, kwargs)


def _refuse(why_not: str | None) -> None:
    if why_not is not None:
        raise NotImplementedError(f"TRL's fused output head on a parallel model: {why_not}")


def _fields_of(
    head: _Head,
    hidden: torch.Tensor,
    labels: torch.Tensor | None,
    shifted: torch.Tensor | None,
    count: torch.Tensor | float | None,
    scale: float,
    wanted: tuple[str, ...],
) -> tuple[dict[str, torch.Tensor | None], torch.Tensor]:
    """Return the fields of TRL's output but for losses, and the loss."""
    if shifted is None:  # as TRL does, the last position of each row has no label
        hidden, shifted = hidden[:, :-1], labels[:, 1:]
    mask = shifted != -100
    targets, how = shifted.reshape(-1), ops.LossOptions(reduction="none", logit_scale=scale)
    statistics_by = partial(
        ops.linear_vocab_cross_entropy_statistics,
        hidden.flatten(0, -2),
        head.weight,
        targets,
        head.vocab_size,
        head.vocab_range,
        bias=head.bias,
        group=head.group,
    )
    squared = "log_sum_sq_probs" in wanted
    statistics = statistics_by(
        how, entropy="entropy" in wanted, argmax="is_top1" in wanted, log_sum_exp=squared
    )
    log_probs = -statistics.loss.view(mask.shape)
    loss = -log_probs.sum() / (mask.sum().clamp(min=1) if count is None else count)
    fields: dict[str, torch.Tensor | None] = {"log_probs": log_probs, "label_mask": mask}
    if "entropy" in wanted:
        fields["entropy"] = statistics.entropy.view(mask.shape).masked_fill(~mask, 0)
    if "is_top1" in wanted:
        fields["is_top1"] = (statistics.argmax.view(mask.shape) == shifted) & mask
    with torch.no_grad():
        if "mean_logits" in wanted:
            fields["mean_logits"] = _mean_logits(head, hidden, scale).masked_fill(~mask, 0)
        if squared:
            of_squares = statistics_by(replace(how, logit_scale=2 * scale), log_sum_exp=True)
            squares = of_squares.log_sum_exp - 2 * statistics.log_sum_exp
            fields["log_sum_sq_probs"] = squares.view(mask.shape).masked_fill(~mask, 0)
    return fields, loss


def _mean_logits(head: _Head, hidden: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the mean of the logits over the vocabulary: one product with the mean of the rows."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    rows = head.weight.sum(0, dtype=wide)
    bias = rows.new_zeros(1) if head.bias is None else head.bias.sum(dtype=wide).view(1)
    total = ops.reduce_from_region(torch.cat([rows, bias]), head.group)
    return (hidden.to(wide) @ total[:-1] + total[-1]) * (scale / head.vocab_size)
