"""What of a model a training checkpoint holds, and in which files: here all of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from parallel_ext.checkpoint.manifest import Manifest
from parallel_ext.distributed.errors import CheckpointError
from parallel_ext.io.hf_reader import HFDirectory
from parallel_ext.io.hf_writer import json_files
from parallel_ext.io.safetensors_reader import SafetensorsFile
from parallel_ext.io.safetensors_writer import TensorSpec
from parallel_ext.io.state_dict import local_values
from parallel_ext.io.stream import PlannedFile, plan_files
from parallel_ext.parallel.beside import (
    beginnings_inside,
    layout_around,
    parallel_parts,
    parameters_beside,
    tensors_beside,
)
from parallel_ext.parallel.configuration import names_in_model, names_when_saved
from parallel_ext.parallel.state import model_of, state_of
from parallel_ext.sharding.layout import ModelLayout
from parallel_ext.sharding.named_shards import named_shards

ADAPTER_NAME = "adapter_model.safetensors"
"""The file that an adapter is in; a directory with it holds no whole model."""


class Contents(Protocol):
    """The contents of a model to save or load; equal on every rank but for the values.

    Attributes:
        model: whose parameters an optimizer may have.
        layout: where every tensor that is saved lives, by its name in the model, and under which
            names the files hold it.
    """

    model: nn.Module
    layout: ModelLayout

    def values(self, rank: int) -> dict[str, torch.Tensor]:
        """Return this rank's shard of every tensor of ``layout``, in its order, without a copy."""

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters among the saved tensors, with their names in ``layout``."""

    def plan(self, tensors: Sequence[TensorSpec], writers: int) -> list[PlannedFile]:
        """Plan the files of these tensors, spread over the first ``writers`` ranks."""

    def json_files(self, files: Sequence[PlannedFile]) -> dict[str, bytes]:
        """Return the JSON files that a reader of the directory needs too, as name -> content."""

    def open(
        self, directory: Path, manifest: Manifest, cleanup: ExitStack
    ) -> dict[str, SafetensorsFile]:
        """Open the files of a checkpoint, and check that they are of this model.

        Returns:
            Name of a tensor in the files -> the file.

        Raises:
            CheckpointError: they are of another model, or damaged.
        """

    def dropout_masks(self) -> dict[str, Any]:
        """Return what further dropout masks depend on, as JSON."""

    def restore_dropout_masks(self, saved: dict[str, Any]) -> None:
        """Let the next forwards draw the masks that follow ``saved``, of ``dropout_masks()``."""


_sources: list[Callable[[nn.Module], Contents | None]] = []


def register_source(source: Callable[[nn.Module], Contents | None]) -> None:
    """Register what returns the contents of a parallel model, wrapped or not, or None.

    It returns None for models that it does not know, such as those without adapters.
    """
    if source not in _sources:
        _sources.append(source)


def contents_of(model: nn.Module) -> Contents:
    """Return what a checkpoint holds of a model: all of it unless a source knows better.

    Raises:
        CheckpointError: parameters are beside several parallel models, or beside an adapter.
    """
    beside = parameters_beside(model)
    if beside and len(parts := parallel_parts(model)) > 1:
        raise CheckpointError(
            f"{next(iter(beside))} is beside several parallel models, {', '.join(parts)}; save "
            "each of them, with an optimizer of its own"
        )
    for source in _sources:
        if (contents := source(model)) is None:
            continue
        inside = {id(parameter) for parameter in contents.model.parameters()}
        if outside := [name for name, (each, _) in beside.items() if id(each) not in inside]:
            raise CheckpointError(
                f"a checkpoint of an adapter holds nothing else, and {outside[0]} is beside PEFT's "
                "model; give that, with an optimizer of its parameters alone, and write the rest "
                "by a torch.save of your own"
            )
        return contents
    own, state = model_of(model), state_of(model)
    whole = WholeModel(own, state.layout, state.spec.vocabulary)
    return OwnModule(model, whole) if beside else whole


class WholeModel:
    """All parameters and buffers of a model, in a directory that HuggingFace reads.

    Args:
        vocabulary: names of those with a row for each id.
    """

    def __init__(self, model: nn.Module, layout: ModelLayout, vocabulary: Collection[str]) -> None:
        self.model, self.layout, self.vocabulary = model, layout, vocabulary

    def values(self, rank: int) -> dict[str, torch.Tensor]:
        return local_values(self.model, self.layout, rank)

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for _, parameter, at in named_shards(self.model):
            yield self.layout.tied.get(at.name, at.name), parameter

    def plan(self, tensors: Sequence[TensorSpec], writers: int) -> list[PlannedFile]:
        return plan_files(tensors, writers)

    def json_files(self, files: Sequence[PlannedFile]) -> dict[str, bytes]:
        model = self.model
        generation_config = model.generation_config if model.can_generate() else None
        return json_files(model, files, model.config, generation_config)

    def open(
        self, directory: Path, manifest: Manifest, cleanup: ExitStack
    ) -> dict[str, SafetensorsFile]:
        if ADAPTER_NAME in manifest.files:
            raise CheckpointError(
                f"{directory} holds an adapter, but the model has none; add one of the same "
                "configuration by peft.get_peft_model, and then load it"
            )
        opened = cleanup.enter_context(HFDirectory(directory, partial(manifest.open, directory)))
        self.check(opened)
        return opened.file_of

    def check(self, opened: HFDirectory) -> None:
        """Raise a CheckpointError unless a directory holds the tensors of this model."""
        opened.check(self.layout.in_files(), self.vocabulary)

    def dropout_masks(self) -> dict[str, Any]:
        return {}

    def restore_dropout_masks(self, saved: dict[str, Any]) -> None:
        pass


class OwnModule(WholeModel):
    """A module of a user's own: the parallel model in it, and what is beside that.

    Names in files are those of its ``state_dict()`` in one process; of a class of transformers
    those that its ``save_pretrained`` writes, and ``from_pretrained`` and checkpoints read both.

    Args:
        module: it holds one parallel model, without adapters.
        inner: what a checkpoint holds of that.
    """

    def __init__(self, module: nn.Module, inner: WholeModel) -> None:
        self._inner, (self._prefix,) = inner, beginnings_inside(module)
        layout = layout_around(module, inner.layout)
        self._beside = {
            name: tensor.detach()
            for name, tensor in tensors_beside(module)
            if name in layout.tensors
        }
        vocabulary = [f"{self._prefix}{name}" for name in inner.vocabulary]
        super().__init__(module, layout, vocabulary)
        self._names, self._plain_layout = {}, layout
        if self._of_transformers:
            shapes = {name: each.shape for name, each in layout.tensors.items()}
            self._name_files(names_when_saved(module, shapes))

    @property
    def _of_transformers(self) -> bool:
        return hasattr(self.model, "can_generate")  # so that it has a configuration

    def _name_files(self, names: Mapping[str, str]) -> None:
        """Let files hold tensors under the names that ``names`` has for those in the module."""
        self._names, self.layout = names, self._plain_layout.with_names_in_files(names)

    def values(self, rank: int) -> dict[str, torch.Tensor]:
        inner = self._inner.values(rank)
        return {f"{self._prefix}{name}": value for name, value in inner.items()} | self._beside

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in self._inner.parameters():
            yield f"{self._prefix}{name}", parameter
        for name, (parameter, _) in parameters_beside(self.model).items():
            yield name, parameter

    def check(self, opened: HFDirectory) -> None:
        if self._of_transformers:  # saved, perhaps, by a model that was loaded from other files
            others = [name for name in opened.shapes if name not in self._plain_layout]
            in_model = names_in_model(self.model, others)
            self._name_files({name: in_file for in_file, name in in_model.items()})
        vocabulary = [self._names.get(name, name) for name in self.vocabulary]
        opened.check(self.layout.in_files(), vocabulary)

    def json_files(self, files: Sequence[PlannedFile]) -> dict[str, bytes]:
        return (super() if self._of_transformers else self._inner).json_files(files)
