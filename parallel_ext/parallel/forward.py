"""The forward of a parallel model, bound to the instance in place of its class's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from parallel_ext import ops
from parallel_ext.models.invariant import check_attention
from parallel_ext.nn.fused_loss import LossCall, running, without_logits
from parallel_ext.nn.loss import LOSS_OPTIONS, balance_loss, share_of_loss, with_a_label
from parallel_ext.nn.trained_parts import TrainedParts
from parallel_ext.parallel.arguments import arguments_of
from parallel_ext.parallel.derived_class import LossInside
from parallel_ext.parallel.forward_around import refuse_replaced_around
from parallel_ext.parallel.joining import arrive
from parallel_ext.parallel.loss_call import (
    OF_HUGGINGFACE,
    is_own,
    loss_call,
    undeclared,
    wants_balance,
    wants_logits,
)
from parallel_ext.parallel.refused_calls import refuse_call
from parallel_ext.parallel.state import STATE_NAME, ParallelState
from parallel_ext.parallel.validate import is_decoder
from parallel_ext.parallel.watch_forward import (
    is_trained_apart,
    refuse_backward_apart,
    refuse_other_ends,
    refuse_other_ties,
    refuse_training_apart,
)
from parallel_ext.sharding._torch_private import disable_compiler


@dataclass(frozen=True)
class _Begun:
    """What a forward knows before the class's own runs."""

    inputs: dict[str, Any]  # what the class's own is called with
    arguments: dict[str, Any]  # all of the call, options of the loss among them
    options: dict[str, Any]  # those of the loss
    labels: torch.Tensor | None  # None where the class computes the loss, or nobody does
    call: LossCall | None  # how the loss is computed, with labels
    shared: torch.Tensor | None  # labels of a class that classifies; dp ranks have shares of a loss
    apart: bool  # whether a backward from it is to be refused
    returns_dict: bool
    is_own: bool  # whether a user derived the class, with a forward of its own


def forward(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run the class's own forward after the inputs were compared, then compute the loss.

    The class is not given the labels, since its loss would take shards for full logits. With labels
    the loss is computed from hidden states and head, and ``logits`` is None in training
    (``nn/fused_loss.py``). In evaluation, or where ``training_logits`` was asked for, it is
    computed from sharded logits, and these are gathered, replicated, over the true V. A class that
    a user derived gets labels, all logits and a ``loss_function`` of ours instead. Loss and load
    balancing loss are then this dp rank's shares of those of all batches; without labels the latter
    is that of the rank's own tokens, as in HuggingFace. ``balance_mask`` [B, S] stands for the
    attention mask there. A class that classifies has no sharded logits and keeps its labels.
    """
    state: ParallelState = getattr(model, STATE_NAME)
    begun = _begin(model, state, args, kwargs)
    with running(begun.call), _counted_if_trained(model, state):
        if begun.is_own:
            return _run_own(model, state, begun)
        output = type(model).forward(model, **begun.inputs, return_dict=True)
    if state.in_leaf and not state.leaf_is_batch and wants_balance(model, state, begun.arguments):
        output.aux_loss = _share_of_balance(state, output, begun.arguments)
    if begun.call is not None:
        output = _with_loss(model, state, begun, output)
    elif begun.shared is not None:
        trained = _trained_over_dp(model, state)
        output.loss = share_of_loss(output.loss, begun.shared, state.mesh, trained)
    if begun.apart:  # an evaluation, unless somebody goes backward from it
        refuse_backward_apart(state, output)
    return output if begun.returns_dict else _as_tuple(output)


@disable_compiler
def _begin(
    model: nn.Module, state: ParallelState, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> _Begun:
    """Check the call of a forward, on all ranks where they must agree."""
    if torch.jit.is_tracing() and state.mesh.world_size > 1:
        raise NotImplementedError(
            "torch.jit.trace is not supported on a parallel model, whose ranks send each other "
            "what it cannot record; torch.export.export, and torch.compile, do"
        )
    inputs, arguments, options = _sorted_arguments(model, state, args, kwargs)
    given, classifies = arguments.get("labels"), state.spec.head is None
    labels = None if classifies else given
    state.forward_ran = True
    refuse_replaced_around(model, state)
    refuse_other_ties(model)
    counts = given is not None and options.get("num_items_in_batch") is None
    if state.in_leaf and not state.leaf_is_batch and counts and not classifies:
        raise ValueError(
            "a leaf with labels needs num_items_in_batch=, the labels that count in the whole batch"
        )
    compares = given is not None and _compares_over_dp(model, state)
    meets_over_dp = state.forwards_together or counts or compares
    if state.mesh.dp_size == 1 or (state.zero is None and meets_over_dp):
        arrive(f"{type(model).__name__}.forward")  # where FSDP gathers, before that
    refuse_other_ends(model)
    if state.invariant is not None:  # set_attn_implementation may have changed it
        check_attention(model.config, state.mesh.device)
    call = None if labels is None else loss_call(model, state, options, arguments)
    if state.agreement is not None:
        _compare_inputs(model, state, arguments, call)
    apart = torch.is_grad_enabled() and is_trained_apart(model)
    refuse_call(model, state, arguments, call)
    if apart and model.training:
        refuse_training_apart(state)
    shared = given if classifies and state.mesh.dp_size > 1 else None
    if shared is not None:
        inputs["labels"] = with_a_label(shared)
    wants_dict = arguments.get("return_dict")
    if wants_dict is None:
        wants_dict = model.config.return_dict
    return _Begun(
        inputs, arguments, options, labels, call, shared, apart, wants_dict, is_own(model)
    )


def _sorted_arguments(
    model: nn.Module, state: ParallelState, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return inputs of the class's own forward, all arguments, and options of the loss, by name.

    Options of the loss are kept from the class, whose attention may know one by their name. A class
    of the user's own gets those of HuggingFace, and what it declares itself.
    """
    known = OF_HUGGINGFACE + undeclared(model, LOSS_OPTIONS)
    options = {name: kwargs.pop(name) for name in known if name in kwargs}
    if state.counts_share and options.get("num_items_in_batch") is not None:
        options["num_items_in_batch"] = options["num_items_in_batch"] * state.mesh.dp_size
    balance_mask = kwargs.pop("balance_mask", None)
    inputs = arguments_of(model, "forward", args, kwargs)
    if state.spec.head is None and is_decoder(model):
        inputs.pop("labels", None)  # of the class around a decoder, as Gemma 4's passes them on
    arguments = inputs | options | {"balance_mask": balance_mask}
    if is_own(model):
        inputs |= {name: options.pop(name) for name in OF_HUGGINGFACE if name in options}
    else:
        inputs.pop("return_dict", None)
        if state.spec.head is not None:
            inputs.pop("labels", None)
    return inputs, arguments, options


def _run_own(model: nn.Module, state: ParallelState, begun: _Begun) -> Any:
    """Run the forward of a class that a user derived, and return what it does.

    Its base, or itself, asks ``loss_function`` for the loss, which it may add to.
    """
    if begun.call is None:
        output = type(model).forward(model, **begun.inputs)
    else:
        loss = LossInside(partial(_loss_inside, model, state, begun))
        with loss.inside(model):
            output = type(model).forward(model, **begun.inputs)
        if state.mesh.dp_size > 1 and not loss.was_asked:
            raise NotImplementedError(
                f"{type(model).__name__}.forward computes a loss of its own, of which dp="
                f"{state.mesh.dp_size} ranks would not have shares; let it ask self.loss_function, "
                "or call it without labels, and compute the loss from its logits"
            )
    if begun.apart:
        refuse_backward_apart(state, output)
    return output


@disable_compiler
def _loss_inside(
    model: nn.Module,
    state: ParallelState,
    begun: _Begun,
    logits: torch.Tensor,
    labels: torch.Tensor,
    **given: Any,
) -> torch.Tensor:
    """Return what ``loss_function`` is to return inside of the forward of a derived class."""
    options = {n: v for n, v in given.items() if n in (*OF_HUGGINGFACE, *LOSS_OPTIONS)}
    return _loss(model, state, begun.call, logits, labels, options | begun.options)


def _as_tuple(output: Any) -> tuple[Any, ...]:
    """Return an output as a tuple, with what says so in the place of logits that there are not."""
    fields = {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}
    return tuple(v for v in fields.values() if v is not None)


@disable_compiler
def _with_loss(model: nn.Module, state: ParallelState, begun: _Begun, output: Any) -> Any:
    """Return the output of a forward with its loss, and with full logits or none."""
    call, fields = begun.call, dict(output.items())
    logits = fields.pop("logits")
    if call.fused and state.fused_loss is True and call.weights is None:
        raise ValueError("fused_loss=True, but an adapter on the output head makes logits")
    loss = _loss(model, state, call, logits, begun.labels, begun.options)
    fields |= with_balance(model, state, output, begun.arguments, loss)
    if wants_logits(model, state):
        fields["logits"] = logits
        if call.seen_by is None:
            fields["logits"] = ops.gather_from_region(logits, state.vocab_sizes, state.mesh.tp)
        return type(output)(**fields)
    return without_logits(output, fields)


def _loss(
    model: nn.Module,
    state: ParallelState,
    call: LossCall,
    logits: torch.Tensor,
    labels: torch.Tensor,
    options: dict[str, Any],
) -> torch.Tensor:
    """Return this dp rank's share of the loss, and let the dp ranks compare with it."""
    compared = None
    if _compares_over_dp(model, state):
        compared = state.replicas_over_dp.now(model)
    loss = call.loss(
        logits,
        labels,
        model.config.vocab_size,
        state.vocab_range,
        state.mesh,
        compared=compared,
        trained=_trained_over_dp(model, state),
        sums_over_dp=state.in_leaf,
        **options,
    )
    if compared is not None:
        state.replicas_over_dp.done()
    return loss


def with_balance(
    model: nn.Module,
    state: ParallelState,
    output: Any,
    arguments: Mapping[str, Any],
    loss: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """Return a loss by the name of its field, with that of load balancing if it is asked for.

    The latter, ``aux_loss``, is of all dp ranks' tokens; the output's is of this rank's.
    """
    if not wants_balance(model, state, arguments):
        return {"loss": loss}
    balance = output.aux_loss
    if state.mesh.dp_size > 1 and not state.in_leaf:
        mask = arguments.get("balance_mask")
        mask = arguments.get("attention_mask") if mask is None else mask
        top_k = model.num_experts_per_tok
        balance = balance_loss(output.router_logits, top_k, mask, state.mesh)
    return {"loss": loss + model.router_aux_loss_coef * balance, "aux_loss": balance}


def _share_of_balance(
    state: ParallelState, output: Any, arguments: Mapping[str, Any]
) -> torch.Tensor:
    """Return the share of the leaf that is running in the load balancing loss of its batch."""
    if state.balance is None:
        raise ValueError(
            "the load balancing loss of a leaf needs the choices of the whole batch: enter "
            "px.leaves(model, rows, batch), with output_router_logits in the batch or in the "
            "configuration, or set output_router_logits=False"
        )
    return state.balance.share(output.router_logits, arguments.get("attention_mask"))


def _compare_inputs(
    model: nn.Module, state: ParallelState, arguments: dict[str, Any], call: LossCall | None
) -> None:
    """Raise on all tp ranks unless they are about to run the same forward."""
    compared, grad = dict(arguments), torch.is_grad_enabled()
    if state.spec.head is None and "labels" in compared:  # they are no ids of tokens
        compared["labels of classes"] = compared.pop("labels")
    compared |= {name: value for name, value in state.around.items() if value is not None}
    state.around.clear()
    if call is not None and (why := call.why_not or call.seen_by) is not None:
        compared["loss of logits, since"] = why
    mode = f"{'train' if model.training else 'eval'}, {'grad' if grad else 'no grad'}"
    if grad:  # it decides which sums a backward has
        compared["requires_grad"] = [p.requires_grad for p in model.parameters()]
    if state.adapted:
        compared["adapters"] = [
            module.for_agreement() for module in model.modules() if hasattr(module, "for_agreement")
        ]
    if _draws_noise(model, state):  # the tp ranks must draw the same; a GPU is not waited for
        draws = torch.cuda if state.mesh.device.type == "cuda" else torch
        compared["random state"] = draws.get_rng_state()
    trained = model if model.training and grad else None
    state.agreement.check(f"{type(model).__name__}.forward", compared, mode, trained)


def _counted_if_trained(model: nn.Module, state: ParallelState) -> AbstractContextManager[None]:
    """Let routing inside the context count in the metrics only if it is for training."""
    counter, trains = state.routing_counter, model.training and torch.is_grad_enabled()
    return nullcontext() if counter is None or trains else counter.aside()


def _draws_noise(model: nn.Module, state: ParallelState) -> bool:
    noise = state.spec.mixture.jitter_of(model.config) if state.routings else 0.0
    return model.training and (noise > 0 or state.drops)


def _compares_over_dp(model: nn.Module, state: ParallelState) -> bool:
    """Return whether the dp ranks compare a piece of a parameter with a loss."""
    if state.mesh.dp_size == 1 or state.mesh.device.type != "cpu":  # a GPU would be waited for
        return False
    # The dp ranks may have unequally many leaves.
    return model.training and torch.is_grad_enabled() and not state.in_leaf


def _trained_over_dp(model: nn.Module, state: ParallelState) -> TrainedParts | None:
    """Return what the dp ranks compare of what they train, None where nobody would wait for it."""
    gradients, on_cpu = state.fsdp_gradients, state.mesh.device.type == "cpu"
    if gradients is None or state.in_leaf or not (on_cpu and torch.is_grad_enabled()):
        return None
    return TrainedParts(model, gradients.collectives)
