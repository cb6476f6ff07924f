"""The weights of a model as a directory, whatever module holds it."""

from __future__ import annotations

import os
from typing import Any

from safetensors.torch import save_file
from torch import nn

from parallel_ext.io.hf_reader import SINGLE_FILE_NAME
from parallel_ext.io.replace_files import replaced_files
from parallel_ext.parallel.from_pretrained import full_state_dict
from parallel_ext.parallel.state import state_of


def write_weights(model: nn.Module, directory: str | os.PathLike[str], **options: Any) -> None:
    """Write a parallel model by its ``save_pretrained``, with its options; every rank calls it.

    A module of the user's own may have no such method: rank 0 then writes its full ``state_dict``
    to ``model.safetensors``, as transformers' ``Trainer`` and accelerate do.
    """
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(directory, **options)
        return
    mesh = state_of(model).mesh
    full = full_state_dict(model)

    def write() -> None:
        if mesh.rank == 0:
            first = {id(tensor): name for name, tensor in reversed(full.items())}  # of tied ones
            kept = {name: full[name].contiguous() for name in first.values()}
            with replaced_files(directory) as temporary:
                save_file(kept, temporary / SINGLE_FILE_NAME, metadata={"format": "pt"})

    mesh.control.run_on_all("saving the weights", write, patient=True)
