"""What a training checkpoint of a model with an adapter holds: the adapter, as PEFT writes it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import torch
from peft.utils import ModulesToSaveWrapper
from torch import nn

from parallel_ext.checkpoint.manifest import Manifest
from parallel_ext.checkpoint.source import ADAPTER_NAME
from parallel_ext.distributed.errors import CheckpointError, first_few
from parallel_ext.io.hf_reader import ADAPTER_CONFIG_NAME
from parallel_ext.io.hf_writer import files_that
from parallel_ext.io.safetensors_reader import SafetensorsFile
from parallel_ext.io.safetensors_writer import TensorSpec
from parallel_ext.io.schema import parse_json
from parallel_ext.io.state_dict import check_shapes
from parallel_ext.io.stream import PlannedFile, plan_files
from parallel_ext.lora.files import layouts_of, misfits, saved_tensors
from parallel_ext.lora.layers import Adapted
from parallel_ext.parallel.state import model_of, state_of
from parallel_ext.sharding.layout import ModelLayout, Part, TensorLayout
from parallel_ext.sharding.named_shards import to_shards
from parallel_ext.sharding.slices import local_part

# Fields of a configuration that decide the function of the factors, beside names and shapes.
_FUNCTION = (
    *("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"),
    *("use_dora", "trainable_token_indices"),
)


class AdapterContents:
    """The one adapter of a model, with the modules that are trained whole beside it.

    The base is not saved, but for what PEFT saves of it: embeddings that have an adapter, and those
    whose vocabulary is not that of the base's own files.

    Raises:
        CheckpointError: something is trained that an adapter does not hold, or there are several
            adapters.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = _peft_model_in(model)
        adapters = list(self.model.peft_config)
        if len(adapters) > 1:  # such as a frozen one that TRL compares with
            adapters = [each for each in adapters if self._is_trained(each)]
        if len(adapters) != 1:
            raise CheckpointError(
                f"the model trains {len(adapters)} adapters{''.join(f', {a}' for a in adapters)}, "
                "but a training checkpoint holds one; freeze the others, or keep them by "
                "save_pretrained"
            )
        self._adapter = adapters[0]
        to_shards(self.model)
        chosen = saved_tensors(self.model, self._adapter)
        files_of: dict[str, list[str]] = {}
        for file, name in chosen.items():
            files_of.setdefault(name, []).append(file)
        self._tensors: dict[str, torch.Tensor] = {}
        layouts: dict[str, TensorLayout] = {}
        parts: dict[str, tuple[Part, ...]] = {}
        first_name: dict[int, str] = {}  # of what is tied
        for name, (tensor, at) in layouts_of(self.model).items():
            if name in files_of:
                first = first_name.setdefault(id(tensor), name)
                self._tensors[first], layouts[first] = tensor, replace(at, name=first)
                own = (Part(file, first, at.whole, index=False) for file in files_of[name])
                parts[first] = (*parts.get(first, ()), *own)
        self.layout = ModelLayout(layouts, {}, parts)
        self._refuse_what_would_be_lost()

    def _is_trained(self, adapter: str) -> bool:
        named = self.model.named_parameters()
        return any(each.requires_grad and f".{adapter}." in f".{name}." for name, each in named)

    def _refuse_what_would_be_lost(self) -> None:
        saved = {id(tensor) for tensor in self._tensors.values()}
        lost = [
            name
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad and id(parameter) not in saved
        ]
        if lost:
            raise CheckpointError(
                f"{first_few(lost)} would be trained, but a checkpoint of an adapter "
                "holds the adapter and its modules_to_save only; freeze the others by "
                "requires_grad_(False), or name their modules in modules_to_save"
            )

    def values(self, rank: int) -> dict[str, torch.Tensor]:
        values = {name: local_part(t.detach()) for name, t in self._tensors.items()}
        check_shapes(values, self.layout, rank)
        return values

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, tensor in self._tensors.items():
            if isinstance(tensor, nn.Parameter):
                yield name, tensor

    def plan(self, tensors: Sequence[TensorSpec], writers: int) -> list[PlannedFile]:
        """Plan one file for all tensors, written by rank 0, since PEFT reads no more."""
        num_bytes = sum(spec.num_bytes for spec in tensors)
        return plan_files(tensors, 1, num_bytes, ADAPTER_NAME)

    def json_files(self, files: Sequence[PlannedFile]) -> dict[str, bytes]:
        """Return the adapter's configuration, as PEFT's ``save_pretrained`` writes it."""
        base = self.model.get_base_model()
        config = copy.copy(self.model.peft_config[self._adapter])
        config.inference_mode = True
        if config.base_model_name_or_path is None:
            config.base_model_name_or_path = vars(base).get("name_or_path") or None
        found_by = None
        if config.task_type is None:
            own = type(base)
            found_by = {"base_model_class": own.__name__, "parent_library": own.__module__}
        return files_that(lambda folder: config.save_pretrained(folder, auto_mapping_dict=found_by))

    def open(
        self, directory: Path, manifest: Manifest, cleanup: ExitStack
    ) -> dict[str, SafetensorsFile]:
        if ADAPTER_NAME not in manifest.files:
            raise CheckpointError(
                f"{directory} holds a whole model, but this one has the adapter {self._adapter!r}; "
                "load it before adapters are added"
            )
        config = manifest.read(directory, ADAPTER_CONFIG_NAME)
        saved = parse_json(config, directory / ADAPTER_CONFIG_NAME)
        file = cleanup.enter_context(manifest.open(directory, ADAPTER_NAME))
        self._check_function(saved, directory)
        found = {name: entry.shape for name, entry in file.tensors.items()}
        known = {name: at.shape for name, at in self.layout.in_files().tensors.items()}
        if problems := misfits(found, known, state_of(self.model).mesh.tp_size):
            raise CheckpointError(
                f"{directory}: the adapter there is not the model's {self._adapter!r}: {problems}"
            )
        merged = [p for p, module in self._adapted() if self._adapter in module.merged_adapters]
        if merged:
            raise CheckpointError(
                f"the adapter {self._adapter!r} is merged into {merged[0]}; unmerge_adapter() "
                "before another is loaded"
            )
        return dict.fromkeys(file.tensors, file)

    def _check_function(self, saved: Mapping[str, Any], directory: Path) -> None:
        own = self.model.peft_config[self._adapter]
        differing = [n for n in _FUNCTION if (saved.get(n) or None) != (getattr(own, n) or None)]
        if differing:
            theirs = ", ".join(f"{name}={saved.get(name)!r}" for name in differing)
            ours = ", ".join(f"{name}={getattr(own, name)!r}" for name in differing)
            raise CheckpointError(
                f"{directory} holds an adapter of {theirs}, but that of the model, "
                f"{self._adapter!r}, has {ours}"
            )

    def _adapted(self) -> Iterator[tuple[str, Adapted]]:
        for path, module in self.model.named_modules():
            if isinstance(module, Adapted):
                yield path, module

    def dropout_masks(self) -> dict[str, Any]:
        return {
            path: module.dropout_masks(self._adapter)
            for path, module in self._adapted()
            if self._adapter in module.lora_dropout
            and isinstance(module.lora_dropout[self._adapter], nn.Dropout)
        }

    def restore_dropout_masks(self, saved: dict[str, Any]) -> None:
        """Let the next forwards draw the masks that follow ``saved``.

        Modules without dropout at the time of the save begin with masks of their own.
        """
        for path, module in self._adapted():
            if path in saved:
                module.restore_dropout_masks(self._adapter, **saved[path])


def adapter_contents(model: nn.Module) -> AdapterContents | None:
    """Return what a checkpoint holds of a model with an adapter; None for a model without one.

    A source for :func:`parallel_ext.checkpoint.source.register_source`.
    """
    if not state_of(model).adapted:  # or they may have been merged into it for good
        return None
    adapted = (isinstance(m, (Adapted, ModulesToSaveWrapper)) for m in model_of(model).modules())
    return AdapterContents(model) if any(adapted) else None


def _peft_model_in(model: nn.Module) -> peft.PeftModel:
    for module in model.modules():
        if isinstance(module, peft.PeftModel):
            return module
    raise CheckpointError(
        f"{type(model).__name__} has adapters, but is no PeftModel; pass what peft.get_peft_model "
        "returned"
    )
