"""A model of a user's own, derived from transformers' class, that holds parallel models."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from parallel_ext.parallel.from_pretrained import full_state_dict
from parallel_ext.parallel.joining import call_together
from parallel_ext.parallel.state import is_parallel, state_of
from parallel_ext.sharding.shards import holds_shards


def save_pretrained(
    plain: Callable[..., Any],
    self: PreTrainedModel,
    save_directory: str | os.PathLike[str],
    is_main_process: bool = True,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    *args: Any,
    **options: Any,
) -> None:
    """Extend ``PreTrainedModel.save_pretrained``: all ranks call it, and rank 0 writes all of it.

    Rank 0 needs memory for the full tensors of the parallel models in it. Their own method is
    another one.

    Raises:
        ValueError: ``state_dict`` is what one rank holds.
    """
    if holds_shards(state_dict):
        raise ValueError(
            "save_pretrained: state_dict holds this rank's shards; leave it out, or pass what "
            "px.full_state_dict(model) gathers"
        )
    if state_dict is not None or not is_parallel(self):
        plain(self, save_directory, is_main_process, state_dict, *args, **options)
        return
    mesh = state_of(self).mesh

    def gather_and_write() -> None:
        full = full_state_dict(self)

        def write() -> None:
            if mesh.rank == 0:
                plain(self, save_directory, True, full, *args, **options)

        mesh.control.run_on_all(f"{type(self).__name__}.save_pretrained", write, patient=True)

    call_together(self, "save_pretrained", (save_directory,), options, gather_and_write)
