"""The forward of a model of images around a parallel decoder: output head and loss in one op."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from parallel_ext.nn.fused_loss import LossCall, NoLogits, running, why_not_fused
from parallel_ext.parallel.arguments import arguments_of
from parallel_ext.parallel.derived_class import LossInside, has_other_loss
from parallel_ext.parallel.loss_call import OF_HUGGINGFACE, wants_logits
from parallel_ext.parallel.methods import bound
from parallel_ext.parallel.state import state_of
from parallel_ext.sharding._torch_private import disable_compiler

_HANDS_LOGITS_ON = (
    *("llava", "vipllava", "paligemma", "gemma3", "mistral3", "internvl", "smolvlm", "idefics3"),
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "glm4v_moe"),
    "gemma4",
)
"""Types whose class gives ``loss_function`` what the head returns, and changes nothing of it."""


def fuse_loss(model: nn.Module) -> None:
    """Let a model around a parallel decoder compute head and loss in one op, if its class can."""
    if model.config.model_type in _HANDS_LOGITS_ON:
        model.forward = bound(forward, model)


def forward(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run the class's own forward; in training with labels no rank ever holds the logits.

    ``logits`` is None then, as of a parallel causal model. The loss is the class's: the mean over
    this dp rank's labels, or their sum over ``num_items_in_batch``.
    """
    call = _loss_call(model, arguments_of(model, "forward", args, kwargs))
    if call is None:
        return type(model).forward(model, *args, **kwargs)
    with running(call), LossInside(partial(_loss, model, call)).inside(model):
        output = type(model).forward(model, *args, **kwargs)
    fields = dict(output.items())
    del fields["logits"]
    trained = type(output)(**fields)
    object.__setattr__(trained, "logits", NoLogits())  # beside the items
    return trained


@disable_compiler
def _loss(
    model: nn.Module, call: LossCall, logits: torch.Tensor, labels: torch.Tensor, **given: Any
) -> torch.Tensor:
    state, options = state_of(model), {n: v for n, v in given.items() if n in OF_HUGGINGFACE}
    vocabulary = sum(state.vocab_sizes), state.vocab_range
    return call.loss(logits, labels, *vocabulary, state.mesh, sums_over_dp=True, **options)


@disable_compiler
def _loss_call(model: nn.Module, arguments: dict[str, Any]) -> LossCall | None:
    """Return how a forward that begins computes its loss; None where the class does, of logits.

    Raises:
        ValueError: ``fused_loss=True``, and something sees or changes the logits.
    """
    state, wants_dict = state_of(model), arguments.get("return_dict")
    if state.agreement is not None and not state.generates:  # whose ids were compared before
        state.around["input_ids of the model around it"] = arguments.get("input_ids")
    if arguments.get("labels") is None or wants_logits(model, state):
        return None
    why_not = "fused_loss is False"
    if state.fused_loss is not False:
        why_not = why_not_fused(model.get_output_embeddings())
    if why_not is None and has_other_loss(model):
        why_not = "the loss_function is another than transformers' for causal models"
    if why_not is None and not (model.config.return_dict if wants_dict is None else wants_dict):
        why_not = "return_dict is False"
    caps = getattr(model.config.get_text_config(), "final_logit_softcapping", None) is not None
    if why_not is None and caps:
        why_not = f"{type(model).__name__} changes its logits"
    if why_not is not None and state.fused_loss is True:
        raise ValueError(f"fused_loss=True, but {why_not}; undo that, or pass 'auto'")
    if state.agreement is not None:
        state.around["loss of logits of the model around it, since"] = why_not
    return LossCall(fused=True) if why_not is None else None
