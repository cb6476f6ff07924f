"""The forward of a model of images around a parallel decoder: output head and loss in one op."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
from torch import nn

from parallel_ext.io.safe_open import shown
from parallel_ext.nn.fused_loss import (
    LossCall,
    current_loss_call,
    running,
    why_not_fused,
    without_logits,
)
from parallel_ext.nn.loss import LOSS_OPTIONS
from parallel_ext.nn.vocab import TiedHead, VocabParallelHead
from parallel_ext.parallel.arguments import arguments_of
from parallel_ext.parallel.derived_class import LossInside, has_other_loss
from parallel_ext.parallel.head_beside import known_around
from parallel_ext.parallel.loss_call import OF_HUGGINGFACE, wants_logits
from parallel_ext.parallel.methods import bound
from parallel_ext.parallel.state import ParallelState, state_of
from parallel_ext.sharding._torch_private import disable_compiler

_HANDS_LOGITS_ON = (
    *("llava", "vipllava", "paligemma", "gemma3", "mistral3", "internvl", "smolvlm", "idefics3"),
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "glm4v_moe"),
    *("gemma4", "llama4", "llama4_text"),
)
"""Types whose class gives ``loss_function`` what the head returns, and changes nothing of it."""

_OURS = "parallel_ext_stands_for_class"


def stand_for_class(model: nn.Module) -> None:
    """Let a model around a parallel decoder run :func:`forward`, which runs its class's own."""
    model.forward = bound(forward, model)
    mark_as_ours(model.forward.__func__)  # functools.wraps hands it on


def mark_as_ours(function: Any) -> None:
    """Let a forward stand in a model around a parallel decoder, whose rows of the head it knows."""
    setattr(function, _OURS, True)


def forward(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run the class's own forward; in training with labels no rank ever holds the logits.

    ``logits`` is None then, as of a parallel causal model. The loss is the class's: the mean over
    this dp rank's labels, or their sum over ``num_items_in_batch``. Of a class that is not known to
    give its loss what the head returns, loss and logits are its own.
    """
    call = _begin(model, arguments_of(model, "forward", args, kwargs))
    # None too, lest the head hands over for the call of another model.
    with running(_call_around(model) if call is None else call):
        if call is None:
            return type(model).forward(model, *args, **kwargs)
        loss = LossInside(partial(_loss, model, call))
        with loss.inside(model):
            output = type(model).forward(model, *args, **kwargs)
    if not loss.was_asked:
        raise RuntimeError(
            f"the forward of {type(model).__name__} computes a loss of its own, from hidden states "
            "that it takes for logits; parallelize(..., fused_loss=False) gives it logits"
        )
    fields = dict(output.items())
    del fields["logits"]
    return without_logits(output, fields)


def _call_around(model: nn.Module) -> LossCall | None:
    """Return the call of another model around the same decoder, which runs this one; else None.

    Such as Llama 4's of images, which takes its logits from a causal model of text.
    """
    call = current_loss_call()
    runs = call is not None and call.model not in (None, model)
    return call if runs and state_of(call.model) is state_of(model) else None


@disable_compiler
def _begin(model: nn.Module, arguments: dict[str, Any]) -> LossCall | None:
    """Check a forward that begins, and return how its loss is computed, as :func:`_loss_call`."""
    if not _is_of_class(type(model).forward) and _holds_rows(model):
        raise _replaced(model, type(model).forward)
    if options := [name for name in LOSS_OPTIONS if name in arguments]:
        raise ValueError(
            f"{', '.join(options)}: no option of {type(model).__name__}, whose loss is that of its "
            "class; compute your own from the logits of a call without labels"
        )
    state = state_of(model)
    _let_compare(state, arguments.get("input_ids"), arguments.get("labels"))
    return _loss_call(model, state, arguments)


def _let_compare(state: ParallelState, ids: Any, labels: Any) -> None:
    """Let a decoder's forward compare what the model around it was given."""
    state.forward_around_ran = True
    told = ids is not None or labels is not None  # else another model around it has told them
    if told and state.agreement is not None and not state.generates:  # which compares its ids once
        state.around |= {"input_ids of the model around it": ids}
        state.around |= {"labels of the model around it": labels}


def hidden_states_around(
    model: nn.Module, labels: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor | None] | None]:
    """Run a model around a parallel decoder up to its sharded head, for a loss of the caller's.

    Args:
        model: whose head each rank has rows of, as :func:`holds_rows_around` says.
        labels: that tp ranks compare.
        args, kwargs: of the model's forward, without labels.

    Returns:
        Hidden states [..., H], replicated, and the head's weight and bias, this rank's rows; None
        where an adapter on the head makes logits.
    """
    arguments = arguments_of(model, "forward", args, kwargs)
    _let_compare(state_of(model), arguments.get("input_ids"), labels)
    hidden, call = model.base_model(*args, **kwargs).last_hidden_state, LossCall(fused=True)
    with running(call):
        model.get_output_embeddings()(hidden)
    return hidden, call.weights


def changes_logits_around(model: nn.Module) -> bool:
    """Return whether a model around a decoder may compute its loss of other than its head's."""
    text = model.config.get_text_config()
    return not _hands_logits_on(model) or getattr(text, "final_logit_softcapping", None) is not None


def _hands_logits_on(model: nn.Module) -> bool:
    """Return whether the class of a model gives ``loss_function`` what its head returns."""
    known = model.config.model_type in _HANDS_LOGITS_ON and _is_of_class(type(model).forward)
    # That of Llama 4 has a cross entropy of its own in transformers 5.15.
    return known and "loss_function" in inspect.unwrap(type(model).forward).__code__.co_names


def refuse_replaced_around(decoder: nn.Module, state: ParallelState) -> None:
    """Raise if a decoder is run by a forward in the place of one that :func:`stand_for_class` gave.

    Such as Liger's or TRL's, which take this rank's rows of the output head for all of it. One that
    wraps ours, and says so by ``functools.wraps`` or has called it, may stand there.
    """
    ran, state.forward_around_ran = state.forward_around_ran, False
    for model in () if ran else known_around(decoder):
        found = inspect.unwrap(model.forward, stop=lambda each: hasattr(each, _OURS))
        if not hasattr(found, _OURS) and _holds_rows(model):
            raise _replaced(model, model.forward)


def refuse_tied_to_replaced(heads: list[tuple[nn.Module, str]]) -> None:
    """Raise where a forward that is not transformers' may read the rows of a tied output head.

    ``heads`` are those of :func:`heads_tied_to`.
    """
    for model, _ in heads:
        if type(model).__module__.startswith("transformers.") and not _is_of_class(model.forward):
            raise ValueError(
                f"parallelize: the forward of {type(model).__name__} was replaced by "
                f"{shown(model.forward)}, which may take a rank's rows of the tied output head for "
                "all of it; undo that (pass Liger fused_linear_cross_entropy=False), or derive a "
                "class of your own that calls the head"
            )


def holds_rows_around(model: nn.Module) -> bool:
    """Return whether a rank holds only its rows of the head of a model around a decoder."""
    forward = inspect.unwrap(getattr(model, "forward", model), stop=lambda f: hasattr(f, _OURS))
    return hasattr(forward, _OURS) and _holds_rows(model)


def _holds_rows(model: nn.Module) -> bool:
    """Return whether a rank holds only its rows of the output head."""
    heads = model.get_output_embeddings().modules()
    sharded = any(isinstance(each, VocabParallelHead | TiedHead) for each in heads)
    return sharded and state_of(model).mesh.tp_size > 1


def _is_of_class(function: Any) -> bool:
    """Return whether a forward is that of a class of transformers, perhaps in wrappers."""
    module = getattr(inspect.unwrap(function), "__module__", None) or ""
    return module.startswith(("transformers.", "parallel_ext."))


def _replaced(model: nn.Module, by: Any) -> RuntimeError:
    return RuntimeError(
        f"forward of this {type(model).__name__} was replaced by {shown(by)} after px.parallelize, "
        "and takes a rank's rows of the output head for all of it, as TRL's and Liger's fused "
        "losses do; undo that"
    )


@disable_compiler
def _loss(
    model: nn.Module, call: LossCall, logits: torch.Tensor, labels: torch.Tensor, **given: Any
) -> torch.Tensor:
    state, options = state_of(model), {n: v for n, v in given.items() if n in OF_HUGGINGFACE}
    vocabulary = sum(state.vocab_sizes), state.vocab_range
    return call.loss(logits, labels, *vocabulary, state.mesh, sums_over_dp=True, **options)


def _loss_call(
    model: nn.Module, state: ParallelState, arguments: dict[str, Any]
) -> LossCall | None:
    """Return how a forward that begins computes its loss; None where the class does, of logits."""
    if arguments.get("labels") is None or wants_logits(model, state):
        return None
    head, wants_dict = model.get_output_embeddings(), arguments.get("return_dict")
    why_not = "fused_loss is False"
    if state.fused_loss is not False:
        why_not = why_not_fused(head)
    if why_not is None and not _hands_logits_on(model):
        why_not = f"{type(model).__name__} is not known to take its loss from what the head returns"
    if why_not is None and isinstance(head, TiedHead) and head.bias is not None:
        why_not = "the output head has a bias, and its weight from the embedding"
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
    return LossCall(fused=True, model=model) if why_not is None else None
