"""How a forward with labels computes its loss: from hidden states, or from logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from parallel_ext.models import PUBLISHED
from parallel_ext.nn.fused_loss import LossCall, is_of_others, who_sees_logits, why_not_fused
from parallel_ext.parallel.arguments import declared_by, wants_router_logits
from parallel_ext.parallel.derived_class import is_derived
from parallel_ext.parallel.state import STATE_NAME, ParallelState
from parallel_ext.sharding._torch_private import input_hooks

OF_HUGGINGFACE = ("num_items_in_batch", "ignore_index", "shift_labels")
"""Options of transformers' own loss of a causal model, which a call of the model takes."""


def wants_logits(model: nn.Module, state: ParallelState) -> bool:
    """Return whether a forward with labels is to return logits as well."""
    return state.training_logits or not model.training


def wants_balance(model: nn.Module, state: ParallelState, arguments: Mapping[str, Any]) -> bool:
    """Return whether the class's forward adds a load balancing loss."""
    balances = bool(state.routings) and state.spec.mixture.balances
    return balances and wants_router_logits(model, arguments)


def _changes_of_logits(model: nn.Module, state: ParallelState) -> dict[str, float]:
    """Return what the class's forward does to the logits, as options of the loss."""
    spec, changes = state.spec, {}
    if spec.logits_factor is not None:
        changes["logit_scale"] = getattr(model.config, spec.logits_factor)
    if spec.logits_divisor is not None:
        changes["logit_scale"] = 1.0 / getattr(model.config, spec.logits_divisor)
    if spec.logits_softcap is not None:
        cap = getattr(model.config, spec.logits_softcap)
        changes |= {} if cap is None else {"softcap": cap}
    return changes


def is_own(model: nn.Module) -> bool:
    """Return whether a causal model's class is a user's own, which is given labels and logits."""
    spec = getattr(model, STATE_NAME).spec
    published = any(spec is each for each in PUBLISHED.values())
    return spec.head is not None and not published and is_derived(type(model))


def undeclared(model: nn.Module, options: tuple[str, ...]) -> tuple[str, ...]:
    """Return options of the loss, but for those that a user's class declares for itself."""
    declared = declared_by(type(model), "forward") if is_own(model) else ()
    return tuple(name for name in options if name not in declared)


def who_sees(model: nn.Module) -> str | None:
    """Return what of others reads or changes the logits of a causal model; None for nothing."""
    head = model.get_submodule(getattr(model, STATE_NAME).spec.head)
    if (by := who_sees_logits(head)) is not None or not is_own(model):
        return by
    return f"the forward of {type(model).__name__} is its own, which sees logits"


def loss_call(
    model: nn.Module, state: ParallelState, options: dict[str, Any], arguments: dict[str, Any]
) -> LossCall:
    """Return how the forward that begins computes the loss, by all arguments of the call."""
    head, name = model.get_submodule(state.spec.head), type(model).__name__
    seen_by = who_sees(model)
    if wants_logits(model, state):
        return LossCall(fused=False, seen_by=seen_by)
    why_not = "fused_loss is False"
    if state.fused_loss is not False:
        why_not = why_not_fused(head) or seen_by
        if why_not is None and state.spec.changes_logits:
            why_not = f"{name} changes its logits"
    changes = _changes_of_logits(model, state)
    if why_not is None and changes and options.keys() & {"softcap", "logit_scale"}:
        why_not = f"softcap and logit_scale come after what {name} does to logits"
    return LossCall(
        fused=why_not is None,
        why_not=why_not,
        changes=changes,
        seen_by=seen_by,
        takes_own_tokens=state.sequence_parallel
        and _head_takes_own_tokens(model, state, arguments),
    )


def _head_takes_own_tokens(
    model: nn.Module, state: ParallelState, arguments: dict[str, Any]
) -> bool:
    """Return whether nobody chooses tokens for the head, or sees those that it is given."""
    keep = arguments.get("logits_to_keep", 0)
    hooks = input_hooks(model.get_submodule(state.spec.head))
    return isinstance(keep, int) and keep == 0 and not any(map(is_of_others, hooks))
