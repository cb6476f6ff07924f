"""The steps of a ``Trainer`` under ``px.Invariant``: each batch of a dp rank is a leaf."""

from __future__ import annotations

from collections.abc import Callable, Sized
from contextlib import AbstractContextManager
from typing import Any

import torch
import transformers
from torch import nn
from torch.utils.data import IterableDataset

from parallel_ext.parallel.state import model_of, state_of
from parallel_ext.training.leaf_balance import sharing_balance_loss
from parallel_ext.training.leaf_rounds import LeafRounds, check_batches_of_step
from parallel_ext.training.trainer_checks import class_of_trl


def check_leaves(trainer: transformers.Trainer) -> None:
    """Raise a ValueError unless the batches of each step can be leaves of the ``px.Invariant``."""
    args, state, name = trainer.args, state_of(trainer.model), type(trainer).__name__
    leaves = state.invariant.leaves
    check_batches_of_step(name, state, args.gradient_accumulation_steps)
    rows, data = args.train_batch_size * leaves, trainer.train_dataset
    if isinstance(data, IterableDataset) or not isinstance(data, Sized) or len(data) % rows:
        found = f"{len(data)} rows" if isinstance(data, Sized) else "no length"
        raise ValueError(
            f"{name}: under px.Invariant(leaves={leaves}) each step has {rows} rows, so that an "
            f"epoch must be a multiple of them, but train_dataset has {found}; leave the rest out"
        )
    refused = {
        "label_smoothing_factor": args.label_smoothing_factor,
        "compute_loss_func": trainer.compute_loss_func,
        "accelerator_config.split_batches": args.accelerator_config.split_batches,
        "a trainer of TRL": class_of_trl(trainer),
    }
    if found := [what for what, value in refused.items() if value]:
        raise ValueError(
            f"{name}: {', '.join(found)} is not served under px.Invariant(leaves={leaves})"
        )


def run_leaves(
    model: nn.Module,
    batches: list[dict[str, Any]],
    rows: int,
    train: Callable[[dict[str, Any]], torch.Tensor],
    context: Callable[[], AbstractContextManager[Any]],
) -> torch.Tensor:
    """Run the batches of a step that this dp rank has.

    Args:
        batches: this rank's, one in each round of leaves.
        train: runs forward and backward of a batch, and returns its share of the step's loss.
        context: in which a trainer runs a forward.

    Returns:
        The loss of the step, the same on every rank.
    """
    state = state_of(model)
    rounds = LeafRounds(model_of(model), state, rows * state.invariant.leaves)
    model.train()  # perhaps after an evaluation
    with (
        rounds.running(),
        sharing_balance_loss(model, rounds, batches[0], lambda number, _: batches[number], context),
    ):
        for _, batch in zip(rounds, batches, strict=True):
            rounds.ran_backward(train(batch))
    return rounds.loss
