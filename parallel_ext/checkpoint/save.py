"""Writing a model as a HuggingFace directory: each tensor is gathered and written by one rank."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from parallel_ext.checkpoint.full_state import gather_tensor, local_values
from parallel_ext.checkpoint.hf_directory import INDEX_NAME, SINGLE_FILE_NAME
from parallel_ext.checkpoint.publish import Publication
from parallel_ext.checkpoint.safetensors_writer import SafetensorsWriter, TensorSpec
from parallel_ext.layout import ModelLayout
from parallel_ext.mesh import Mesh

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


@dataclass
class PlannedFile:
    """One file of a save: its name, the tp rank that writes it, and its tensors in file order."""

    owner: int
    tensors: list[TensorSpec] = field(default_factory=list)
    name: str = SINGLE_FILE_NAME

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors."""
        return sum(spec.num_bytes for spec in self.tensors)


def parse_size(size: int | str) -> int:
    """A number of bytes, given as one or as HuggingFace writes it: ``5GB`` is 5 * 10^9.

    Raises:
        ValueError: it is neither, or less than 1.

    Example:
        >>> parse_size("5GB")
        5000000000
    """
    match = re.fullmatch(r"(\d+)\s*([a-z]*)", str(size).strip(), re.IGNORECASE)
    unit = _UNITS.get(match[2].upper()) if match else None
    if unit is None or int(match[1]) < 1:
        raise ValueError(f"max_shard_size must be bytes, or text like '5GB', got {size!r}")
    return int(match[1]) * unit


def plan_files(
    tensors: Sequence[TensorSpec], owners: int, max_shard_size: int
) -> list[PlannedFile]:
    """Deal tensors to the ranks that write them, and to files.

    A pure function of its arguments, so that every rank computes the same.

    Args:
        tensors: all tensors of the model.
        owners: number of ranks that write; each tensor goes to the one with the fewest bytes, the
            largest tensor first.
        max_shard_size: bytes that the tensors of a file may take; a larger tensor is alone in its.

    Returns:
        The files, ordered by owner. Within an owner's files the tensors are in the given order,
        those of wider dtypes first, so that all are aligned.
    """
    load = [0] * owners
    owner_of: dict[str, int] = {}
    for spec in sorted(tensors, key=lambda spec: -spec.num_bytes):
        owner = min(range(owners), key=lambda rank: load[rank])
        owner_of[spec.name] = owner
        load[owner] += spec.num_bytes
    files: list[PlannedFile] = []
    room = 0
    for spec in sorted(tensors, key=lambda spec: (owner_of[spec.name], -spec.dtype.itemsize)):
        if not files or files[-1].owner != owner_of[spec.name] or spec.num_bytes > room:
            files.append(PlannedFile(owner_of[spec.name]))
            room = max_shard_size
        files[-1].tensors.append(spec)
        room -= spec.num_bytes
    if len(files) > 1:
        for number, file in enumerate(files, start=1):
            file.name = f"model-{number:05}-of-{len(files):05}.safetensors"
    return files


def save_directory(
    model: PreTrainedModel,
    directory: str | os.PathLike[str],
    mesh: Mesh,
    layout: ModelLayout,
    *,
    config: PreTrainedConfig,
    generation_config: GenerationConfig | None = None,
    max_shard_size: int | str = "5GB",
) -> None:
    """Write a parallel model as a directory that plain ``from_pretrained`` reads.

    Every rank must call it. The tp ranks of ``dp_rank`` 0 share the tensors out; each gathers one
    full tensor at a time, writes it and frees it, so that no rank holds more than one beyond its
    shard. Everything is written beside ``directory`` and takes its place at the end. What a
    previous save left there vanishes; other files and subdirectories stay.

    Args:
        model: the parallel model.
        directory: where to; rank 0's path counts, and must be the same place for all ranks.
        mesh: the ranks of the model.
        layout: where its tensors live; tied aliases are not written.
        config: written as ``config.json``, with the dtype and the class of ``model``.
        generation_config: written too, if given.
        max_shard_size: bytes of tensors a file, or text such as ``"5GB"``; one larger tensor is
            alone in its file.

    Raises:
        CollectiveTimeout: not all ranks called it.
        CheckpointError, ValueError, OSError: it cannot be saved. All ranks raise, those that did
            not fail a RuntimeError that quotes the error; the previous directory stays whole.
    """
    what = f"save_pretrained to {os.fspath(directory)}"
    mesh.meet(what)

    def plan() -> tuple[dict[str, torch.Tensor], list[PlannedFile]]:
        values = local_values(model, layout, mesh.tp_rank)
        specs = [TensorSpec(name, v.dtype, layout[name].shape) for name, v in values.items()]
        return values, plan_files(specs, mesh.tp_size, parse_size(max_shard_size))

    def finish() -> None:
        if publication is not None:
            _write_index(publication.temporary, files)
            _write_configuration(publication.temporary, model, config, generation_config)
            publication.publish()

    values, files = mesh.together(what, plan)
    digest = hashlib.sha256(repr(files).encode()).hexdigest()[:8]
    mesh.meet(f"{what} as {len(files)} files, plan {digest}")
    publication = mesh.together(what, lambda: Publication(directory) if mesh.rank == 0 else None)
    try:
        temporary = mesh.gather_objects(publication and publication.temporary)[0]
        _write_tensors(values, layout, mesh, files, temporary, what)
        mesh.together(what, finish)
    finally:
        if publication is not None:
            publication.discard()


def _write_tensors(
    values: Mapping[str, torch.Tensor],
    layout: ModelLayout,
    mesh: Mesh,
    files: Sequence[PlannedFile],
    directory: Path,
    what: str,
) -> None:
    """Gather and write all tensors, in turns in which each owner gets its next one.

    After each turn the ranks exchange whether it worked, so that none waits for one that failed,
    and those of another ``dp_rank``, which write nothing, wait no longer than one turn at a time.
    """
    queues = [
        [(file, spec) for file in files if file.owner == owner for spec in file.tensors]
        for owner in range(mesh.tp_size)
    ]
    stream = _TensorStream(values, layout, mesh, directory)
    try:
        for turn in zip_longest(*queues):
            mesh.together(what, partial(stream.take, turn))
    finally:
        stream.close()


class _TensorStream:
    """Takes full tensors from the ranks to the file that this rank is writing."""

    def __init__(
        self,
        values: Mapping[str, torch.Tensor],
        layout: ModelLayout,
        mesh: Mesh,
        directory: Path,
    ) -> None:
        self._values, self._layout, self._mesh = values, layout, mesh
        self._directory = directory
        self._writer: SafetensorsWriter | None = None

    def take(self, turn: Sequence[tuple[PlannedFile, TensorSpec] | None]) -> None:
        """Gather one tensor for every owner, then let all of them write at the same time."""
        if self._mesh.dp_rank != 0:
            return
        own = None
        for owner, planned in enumerate(turn):
            if planned is None:  # this owner has written all of its tensors
                continue
            name = planned[1].name
            full = gather_tensor(self._values[name], self._layout[name], self._mesh, owner)
            if full is not None:
                own = (*planned, full)
        if own is not None:
            self._write(*own)

    def _write(self, file: PlannedFile, spec: TensorSpec, full: torch.Tensor) -> None:
        if self._writer is None:
            self._writer = SafetensorsWriter(self._directory / file.name, file.tensors)
        self._writer.append(spec.name, full)
        if spec is file.tensors[-1]:
            self._writer.close()
            self._writer = None

    def close(self) -> None:
        """Let go of a file that was not finished."""
        if self._writer is not None:
            self._writer.abandon()


def _write_index(directory: Path, files: Sequence[PlannedFile]) -> None:
    if len(files) == 1:
        return
    specs = [spec for file in files for spec in file.tensors]
    index = {
        "metadata": {
            "total_parameters": sum(math.prod(spec.shape) for spec in specs),
            "total_size": sum(file.num_bytes for file in files),
        },
        "weight_map": {spec.name: file.name for file in files for spec in file.tensors},
    }
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    (directory / INDEX_NAME).write_text(text, encoding="utf-8")


def _write_configuration(
    directory: Path,
    model: PreTrainedModel,
    config: PreTrainedConfig,
    generation_config: GenerationConfig | None,
) -> None:
    """Write the JSON files that HuggingFace's ``save_pretrained`` would write."""
    config = copy.deepcopy(config)
    config.dtype = str(model.dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__.removeprefix("FSDP")]  # fully_shard's prefix
    config.save_pretrained(directory)
    if generation_config is not None:
        generation_config.save_pretrained(directory)
