"""A model of transformers' class, or of one derived from it, that holds parallel models."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from parallel_ext.io.publish import Publication
from parallel_ext.parallel.beside import parallel_parts, parameters_beside
from parallel_ext.parallel.from_pretrained import full_state_dict
from parallel_ext.parallel.holders import heads_tied_to, tie_again
from parallel_ext.parallel.joining import call_together
from parallel_ext.parallel.methods import bound, generate_by, prepare_inputs_for_generation
from parallel_ext.parallel.resize import resize_token_embeddings as resize
from parallel_ext.parallel.state import is_parallel, own_state, state_of
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
    another one. The previous directory stays whole until the new one is.
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
                # Without an id, what goes to the hub would be named like the temporary directory.
                named = {"repo_id": Path(os.path.abspath(save_directory)).name, **options}
                with Publication(save_directory) as temporary:
                    plain(self, temporary, True, full, *args, **named)

        mesh.control.run_on_all(f"{type(self).__name__}.save_pretrained", write, patient=True)

    call_together(self, "save_pretrained", (save_directory,), options, gather_and_write)


def resize_token_embeddings(
    plain: Callable[..., Any], self: PreTrainedModel, *args: Any, **options: Any
) -> nn.Module:
    """Extend ``PreTrainedModel.resize_token_embeddings`` to models of images around a decoder.

    The method of a parallel model is another one.
    """
    if not is_parallel(self):
        return plain(self, *args, **options)
    parts = parallel_parts(self)
    embeddings = [part.get_input_embeddings() for part in parts.values()]
    with_head = any(part.get_output_embeddings() is not None for part in parts.values())
    if own_state(self) is None and (with_head or embeddings != [self.get_input_embeddings()]):
        raise NotImplementedError(
            f"{type(self).__name__}.resize_token_embeddings is served where the model holds one "
            f"parallel decoder, not {', '.join(parts)}; call that model's own, or resize before "
            "px.parallelize"
        )
    return resize(self, *args, **options)


def generate(plain: Callable[..., Any], self: nn.Module, *args: Any, **options: Any) -> Any:
    """Extend ``GenerationMixin.generate`` to run a model of images as its parallel decoder runs.

    All tp ranks draw the same tokens, and dp ranks may end at other lengths. The method of a
    parallel model is another one.
    """
    if own_state(self) is not None or len(parallel_parts(self)) != 1:
        return plain(self, *args, **options)
    own, name = vars(self), prepare_inputs_for_generation.__name__
    prepares = bound(prepare_inputs_for_generation, self)
    put = own.setdefault(name, prepares) is prepares  # unless the user has put one there
    try:
        return generate_by(plain, self, *args, **options)
    finally:
        if put:
            del own[name]


def tie_weights(
    plain: Callable[..., Any], self: PreTrainedModel, *args: Any, **options: Any
) -> Any:
    """Extend ``PreTrainedModel.tie_weights`` to put heads that know shards where it ties them."""
    tied = plain(self, *args, **options)
    for path, part in parallel_parts(self).items():
        state = own_state(part)
        if path and state.spec.head is None:
            tie_again(heads_tied_to(part, state.spec.embedding), part, state.spec.embedding)
    return tied


def num_parameters(
    plain: Callable[..., int],
    self: PreTrainedModel,
    only_trainable: bool = False,
    exclude_embeddings: bool = False,
) -> int:
    """Extend ``PreTrainedModel.num_parameters`` to count whole parallel models in a model."""
    parts = parallel_parts(self)
    if not parts or "" in parts:
        return plain(self, only_trainable, exclude_embeddings)
    embeddings = (each for each in self.modules() if isinstance(each, nn.Embedding))
    left_out = {id(each.weight) for each in embeddings} if exclude_embeddings else ()
    beside = sum(
        layout.numel
        for parameter, layout in parameters_beside(self).values()
        if id(parameter) not in left_out and (parameter.requires_grad or not only_trainable)
    )
    return beside + sum(
        part.num_parameters(only_trainable, exclude_embeddings) for part in parts.values()
    )
