"""The load balancing loss of leaves: forwards that first count what the whole batch chooses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from parallel_ext.nn.loss import BalanceOfLeaves
from parallel_ext.nn.temporarily import temporarily
from parallel_ext.parallel.loss_call import wants_balance
from parallel_ext.parallel.state import model_of, state_of
from parallel_ext.training.leaf_loop import LeafLoop


@contextmanager
def sharing_balance_loss(
    model: nn.Module,
    loop: LeafLoop,
    asked: Mapping[str, Any],
    part: Callable[[int, slice], Mapping[str, Any]],
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Iterator[None]:
    """Give the leaves inside the context their shares of the load balancing loss, if it is asked.

    Before, all leaves run forward once, to count the choices of the whole batch.

    Args:
        model: that is trained, perhaps inside PEFT's.
        asked: arguments of a forward, which may ask for this loss beside the configuration.
        part: the arguments of the forward of a round, by its number and its rows of the batch.
        context: made for each of these forwards.
    """
    module, state = model_of(model), state_of(model)
    if not wants_balance(module, state, asked):
        yield
        return
    balance = BalanceOfLeaves(module.num_experts, module.num_experts_per_tok, state.mesh)
    with temporarily(state, balance=balance):
        for number, (leaf, counts) in enumerate(loop.rounds()):
            inputs = part(number, leaf)
            with torch.no_grad(), context():
                output = model(**{"num_items_in_batch": 1, **inputs})
            if counts:
                balance.count(output.router_logits, inputs.get("attention_mask"))
        balance.sum_over_dp()
        yield
