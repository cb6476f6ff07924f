"""TRL's fused output head on a parallel model: the same fields, by the op for sharded rows."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial, wraps
from types import MethodType
from typing import Any

import torch
from torch import nn

from parallel_ext import ops
from parallel_ext.nn.extended import extend
from parallel_ext.nn.fused_loss import LossCall, running, why_not_fused
from parallel_ext.nn.vocab import VocabParallelHead
from parallel_ext.parallel.forward import with_balance
from parallel_ext.parallel.loss_call import who_sees
from parallel_ext.parallel.state import own_state, state_of

_MODULE = "trl.trainer.utils"


def extend_trl() -> None:
    """Extend TRL where it is imported, so that its fused output head knows parallel models."""
    own = getattr(sys.modules.get(_MODULE), "add_fused_lm_head", None)
    if own is not None:  # an older TRL has none
        extend(own, add_fused_lm_head)


def add_fused_lm_head(
    plain: Callable[..., None], model: nn.Module, *args: Any, **kwargs: Any
) -> None:
    """Extend TRL's ``add_fused_lm_head`` to multiply each rank's rows of the output head."""
    if (state := own_state(model)) is None:
        plain(model, *args, **kwargs)
        return
    asked = inspect.signature(plain).bind(model, *args, **kwargs)
    asked.apply_defaults()
    if asked.arguments["cast_lm_head_to_fp32"] and model.dtype != torch.float32:
        raise NotImplementedError(
            "add_fused_lm_head(cast_lm_head_to_fp32=True) is not supported on a parallel model of "
            f"{model.dtype}; load it with dtype=torch.float32"
        )
    spec = state.spec
    if spec.changes_logits or spec.of_logits:
        raise NotImplementedError(
            f"add_fused_lm_head: {type(model).__name__} changes its logits, which is not supported "
            "on a parallel model"
        )
    own = model.forward
    scale, wanted = 1 / asked.arguments["temperature"], asked.arguments["outputs"]
    output_class = plain.__globals__["FusedCausalLMOutput"]

    @wraps(type(model).forward)
    def forward(self: nn.Module, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        if not fused_lm_head:
            return own(*args, **kwargs)
        return output_class(**_fields(self, own, scale, wanted, args, kwargs))

    model.forward = MethodType(forward, model)
    state.own_forward = forward


def _fields(
    model: nn.Module,
    own: Callable[..., Any],
    scale: float,
    wanted: tuple[str, ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> dict[str, torch.Tensor | None]:
    """Run the parallel model up to its head, and return the fields of TRL's output."""
    labels, shifted = kwargs.pop("labels", None), kwargs.pop("shift_labels", None)
    count = kwargs.pop("num_items_in_batch", None)
    state = state_of(model)
    head = model.get_submodule(state.spec.head)
    if (why_not := why_not_fused(head) or who_sees(model)) is not None:
        raise NotImplementedError(f"TRL's fused output head on a parallel model: {why_not}")
    call = LossCall(fused=True, shared=True)
    with running(call):
        output = own(*args, **{**kwargs, "use_cache": False, "return_dict": True})
    if not call.handed_over:
        raise NotImplementedError(
            "TRL's fused output head on a parallel model: an adapter on the head makes logits"
        )
    hidden = output.logits
    if shifted is None:  # as TRL does, the last position of each row has no label
        hidden, shifted = hidden[:, :-1], labels[:, 1:]
    mask = shifted != -100
    targets, how = shifted.reshape(-1), ops.LossOptions(reduction="none", logit_scale=scale)
    statistics_by = partial(
        ops.linear_vocab_cross_entropy_statistics,
        hidden.flatten(0, -2),
        head.weight,
        targets,
        head.out_features,
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
    return fields | with_balance(model, state, output, kwargs, loss)


def _mean_logits(head: VocabParallelHead, hidden: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the mean of the logits over the vocabulary: one product with the mean of the rows."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    rows = head.weight.sum(0, dtype=wide)
    bias = rows.new_zeros(1) if head.bias is None else head.bias.sum(dtype=wide).view(1)
    total = ops.reduce_from_region(torch.cat([rows, bias]), head.group)
    return (hidden.to(wide) @ total[:-1] + total[-1]) * (scale / head.out_features)
