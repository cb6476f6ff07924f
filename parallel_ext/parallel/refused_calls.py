"""Refuse calls of a parallel model's forward which a rank cannot answer as one process does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from parallel_ext.models.sublayers import AttentionNames
from parallel_ext.nn.fused_loss import LossCall
from parallel_ext.nn.loss import LOSS_OPTIONS, OPTIONS_OF_THE_OP
from parallel_ext.parallel.derived_class import has_other_loss
from parallel_ext.parallel.loss_call import is_own, undeclared, wants_balance
from parallel_ext.parallel.masks_of_heads import refuse_masks_of_heads
from parallel_ext.parallel.state import STATE_NAME, ParallelState, parallel_models


def refuse_call(
    model: nn.Module, state: ParallelState, arguments: dict[str, Any], call: LossCall | None
) -> None:
    """Raise for a call of the forward that would be wrong, or fail, on some ranks.

    ``call`` says how the loss is computed; None where there are no labels for it.
    """
    ids = arguments.get("input_ids")
    if ids is not None and ids.numel() == 0:
        raise ValueError(
            f"input_ids of shape {tuple(ids.shape)} hold no token, which transformers' attention "
            "cannot take; pass a row of padding whose labels are all -100 instead"
        )
    trains_over_dp = state.mesh.dp_size > 1 and torch.is_grad_enabled()
    around = state.spec.head is None or is_own(model)
    if trains_over_dp and around and wants_balance(model, state, arguments):
        raise ValueError(
            f"{type(model).__name__}: output_router_logits asks for a load balancing loss, which a "
            f"class around the decoder would compute from the tokens of one of dp="
            f"{state.mesh.dp_size} ranks; set it to False, or use dp=1"
        )
    _refuse_options_of_loss(model, state, arguments, call)
    if call is not None:
        _refuse_in_leaves_of_another(model, state)
    if state.mesh.tp_size > 1 and (
        arguments.get("output_attentions") or model.config.output_attentions
    ):
        raise NotImplementedError(
            "output_attentions under tp is not supported: a rank computes only its own heads"
        )
    if state.mesh.tp_size > 1:
        refuse_masks_of_heads(arguments.get("attention_mask"))
    _refuse_lookup_by_rows(state, arguments)
    if arguments.get("return_shared_kv_states"):
        _refuse_keys_of_own_heads(state)
    if (
        state.sequence_parallel
        and model.training
        and (arguments.get("output_hidden_states") or model.config.output_hidden_states)
    ):
        raise NotImplementedError(
            "output_hidden_states in training with sequence_parallel is not supported: a rank has "
            "only its own tokens between the layers; call model.eval(), or leave that option out"
        )


def _refuse_options_of_loss(
    model: nn.Module, state: ParallelState, arguments: Mapping[str, Any], call: LossCall | None
) -> None:
    """Raise for a loss that is not computed as the call, or the model, asks for."""
    options = [name for name in undeclared(model, LOSS_OPTIONS) if name in arguments]
    if call is None and options:
        raise ValueError(f"{', '.join(options)}: options of the loss, but there are no labels")
    if options := [n for n in undeclared(model, OPTIONS_OF_THE_OP) if n in arguments]:
        raise ValueError(
            f"{', '.join(options)}: not an option of a model's loss; compute your own from the "
            "logits of a call without labels"
        )
    if call is not None and has_other_loss(model):
        raise ValueError(
            "loss_function was replaced on this parallel model, which computes its loss from "
            "hidden states or shards; compute your own from the logits of a call without labels"
        )
    if call is not None and call.why_not is not None and state.fused_loss is True:
        if state.invariant is not None:
            raise ValueError(
                f"px.Invariant computes head and loss in one op, but {call.why_not}; undo that"
            )
        raise ValueError(f"fused_loss=True, but {call.why_not}; undo that, or pass 'auto'")


def _refuse_in_leaves_of_another(model: nn.Module, state: ParallelState) -> None:
    """Raise where dp ranks run leaves of another model, and this one's loss is no part of a sum."""
    if state.mesh.dp_size == 1 or state.in_leaf:
        return
    for other in parallel_models():
        of_other: ParallelState = getattr(other, STATE_NAME)
        if of_other.in_leaf and not of_other.leaf_is_batch:
            raise ValueError(
                f"{type(model).__name__}: labels inside of px.leaves of another model, whose "
                f"losses dp={state.mesh.dp_size} ranks add, while this one's is a share of their "
                "mean; compute it from the logits of a call without labels"
            )


def _refuse_lookup_by_rows(state: ParallelState, arguments: Mapping[str, Any]) -> None:
    """Raise where a class would find ids by comparing rows with the embedding's, as Gemma 4's."""
    over_dp = state.mesh.dp_size > 1 and state.zero is not None
    if arguments.get("inputs_embeds") is None or not (state.mesh.tp_size > 1 or over_dp):
        return
    if state.spec.layer_embedding_in(state.layout) and arguments.get("per_layer_inputs") is None:
        raise NotImplementedError(
            f"inputs_embeds under {'data_parallel' if over_dp else 'tp'} needs per_layer_inputs "
            "beside them, from get_per_layer_inputs(input_ids)"
            + (" before data_parallel" if over_dp else "")
            + ": a rank cannot look for ids in rows of other ranks"
        )


def _refuse_keys_of_own_heads(state: ParallelState) -> None:
    """Raise where ranks have other keys, which an assistant of Gemma 4 would take for those of all.

    With one key-value head all ranks have it.
    """
    for path, names in state.spec.sublayers(state.layout).items():
        if not isinstance(names, AttentionNames) or names.key is None:
            continue
        key = state.layout[f"{path}.{names.key}.weight"]
        if key.local_shape(state.mesh.rank) != key.shape:
            raise NotImplementedError(
                "return_shared_kv_states, as a Gemma 4 assistant needs, is not supported under "
                f"tp={state.mesh.tp_size}: a rank has the keys of its own heads of {path} alone"
            )
