"""Writing a model as a HuggingFace directory: every byte once, streamed to its writer."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
import re
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from parallel_ext.checkpoint.full_state import local_values
from parallel_ext.checkpoint.gather import RowBlock, Swap, part_value, row_blocks
from parallel_ext.checkpoint.hf_directory import CONFIG_NAME, INDEX_NAME, SINGLE_FILE_NAME
from parallel_ext.checkpoint.publish import Publication
from parallel_ext.checkpoint.safetensors_file import STRIPE_BYTES
from parallel_ext.checkpoint.safetensors_writer import SafetensorsWriter, TensorSpec
from parallel_ext.layout import ModelLayout
from parallel_ext.mesh import Mesh

if TYPE_CHECKING:  # they would load most of transformers
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


@dataclass
class PlannedFile:
    """One file of a save: its name, the rank that writes it, and its tensors in file order."""

    owner: int
    tensors: list[TensorSpec] = field(default_factory=list)
    name: str = SINGLE_FILE_NAME

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors."""
        return sum(spec.num_bytes for spec in self.tensors)


@dataclass
class Turn:
    """Rows of one file that its owner gathers and writes at once."""

    file: PlannedFile
    blocks: list[RowBlock] = field(default_factory=list)


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


def plan_turns(
    files: Sequence[PlannedFile], layout: ModelLayout, owners: int
) -> list[tuple[Turn | None, ...]]:
    """What every owner writes in each turn: consecutive rows of its files.

    A pure function of its arguments, so that every rank computes the same.

    Args:
        files: of :func:`plan_files`.
        layout: where their tensors live.
        owners: number of ranks that write.

    Returns:
        The turns, each with one entry an owner: its rows, at most ``STRIPE_BYTES`` of them or one
        row; None once it has nothing left.
    """
    queues: list[list[Turn]] = [[] for _ in range(owners)]
    for file in files:
        queue = queues[file.owner]
        queue.append(Turn(file))
        room = STRIPE_BYTES
        for spec in file.tensors:
            for block in row_blocks(layout[spec.name], spec.dtype.itemsize):
                num_bytes = math.prod(block.shape) * spec.dtype.itemsize
                if num_bytes > room and queue[-1].blocks:
                    queue.append(Turn(file))
                    room = STRIPE_BYTES
                queue[-1].blocks.append(block)
                room -= num_bytes
    return list(zip_longest(*queues))


def save_directory(
    model: PreTrainedModel,
    directory: str | os.PathLike[str],
    mesh: Mesh,
    layout: ModelLayout,
    *,
    config: PreTrainedConfig,
    generation_config: GenerationConfig | None = None,
    max_shard_size: int | str = "5GB",
    note: Mapping[str, Any] | None = None,
) -> None:
    """Write a parallel model as a directory that plain ``from_pretrained`` reads.

    Every rank must call it. The first ranks, as many as hold one copy of the model, share the
    tensors out, balanced by bytes; rows stream to the rank that writes them, so that no rank holds
    more than a few blocks of ``STRIPE_BYTES`` beyond its shard. Everything is written beside
    ``directory`` and takes its place at the end. What a previous save left there vanishes; other
    files and subdirectories stay.
    Values that are NaN or infinite are saved as they are, with a warning on rank 0 that counts
    them.

    Args:
        model: the parallel model.
        directory: where to; rank 0's path counts, and must be the same place for all ranks.
        mesh: the ranks of the model.
        layout: where its tensors live, and under which names files hold them; tied aliases are not
            written.
        config: written as ``config.json``, with the dtype and the class of ``model``.
        generation_config: written too, if given.
        max_shard_size: bytes of tensors a file, or text such as ``"5GB"``; one larger tensor is
            alone in its file.
        note: JSON that is kept in every file under ``__metadata__``, key ``parallel_ext``.

    Raises:
        CollectiveTimeout: not all ranks called it, or one was killed or stopped meanwhile.
        CheckpointError, ValueError, OSError: it cannot be saved. All ranks raise, those that did
            not fail a RuntimeError that quotes the error; the previous directory stays whole.
    """
    what = f"save_pretrained to {os.fspath(directory)}"
    mesh.meet(what)
    in_files = layout.in_files()

    def plan() -> tuple[dict[str, torch.Tensor], list[PlannedFile]]:
        values = {
            part.name: part_value(value, layout[name], part, mesh.rank)
            for name, value in local_values(model, layout, mesh.rank).items()
            for part in layout.parts_of(name)
        }
        specs = [TensorSpec(name, v.dtype, in_files[name].shape) for name, v in values.items()]
        return values, plan_files(specs, in_files.period, parse_size(max_shard_size))

    def finish() -> None:
        if publication is not None:
            _write_index(publication.temporary, files)
            _write_configuration(publication.temporary, model, config, generation_config)
            publication.publish()

    values, files = mesh.together(what, plan)
    digest = hashlib.sha256(repr(files).encode()).hexdigest()[:8]
    mesh.meet(f"{what} as {len(files)} files, plan {digest}")
    with ExitStack() as cleanup:

        def begin() -> Publication | None:
            if mesh.rank != 0:
                return None
            publication = Publication(directory)
            cleanup.callback(publication.discard)
            return publication

        publication = mesh.together(what, begin)
        temporary = mesh.gather_objects(publication and publication.temporary)[0]
        metadata = {"parallel_ext": json.dumps(note)} if note else {}
        stream = _TensorStream(values, mesh)
        cleanup.callback(stream.abandon)
        mesh.together(what, lambda: stream.open(files, metadata, temporary))
        for turn in plan_turns(files, in_files, in_files.period):
            mesh.together(what, partial(stream.prepare, turn))
            mesh.together(what, stream.take)
        mesh.together(what, stream.close, patient=True)  # disks may be slow
        mesh.together(what, finish, patient=True)
    _warn_of_non_finite(mesh.gather_objects(stream.non_finite), what, mesh)


class _TensorStream:
    """Takes rows from the ranks to the files that this rank writes."""

    def __init__(self, values: Mapping[str, torch.Tensor], mesh: Mesh) -> None:
        self._values, self._mesh = values, mesh
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._writers: dict[str, SafetensorsWriter] = {}
        self._own: Turn | None = None  # of the turn that was prepared last
        self._rows: list[torch.Tensor] = []
        self._swap: Swap | None = None
        self.non_finite: Counter[str] = Counter()

    def open(
        self, files: Sequence[PlannedFile], metadata: Mapping[str, str], directory: Path
    ) -> None:
        """Make all files of this rank, so that a full disk is found before any work."""
        for file in files:
            if file.owner == self._mesh.rank:
                path = directory / file.name
                self._writers[file.name] = SafetensorsWriter(path, file.tensors, metadata)

    def prepare(self, turn: Sequence[Turn | None]) -> None:
        """Everything of a turn that may fail on one rank alone."""
        wanted = [[] if part is None else part.blocks for part in turn]
        self._own = turn[self._mesh.rank] if self._mesh.rank < len(turn) else None
        self._rows = self._room_for([] if self._own is None else self._own.blocks)
        self._swap = Swap(self._values, wanted, self._rows, self._mesh)

    def take(self) -> None:
        """Bring every owner its rows, then let all of them write at the same time."""
        if self._swap is None:
            return
        self._swap.run()
        self._swap = None
        if self._own is None:
            return
        writer = self._writers[self._own.file.name]
        for block, values in zip(self._own.blocks, self._rows, strict=True):
            writer.append(block.layout.name, values)
            self._count_non_finite(block.layout.name, values)

    def _room_for(self, blocks: Sequence[RowBlock]) -> list[torch.Tensor]:
        """Tensors for the blocks, in memory that every turn uses again.

        Wide dtypes come first in a file, so each begins where its dtype can.
        """
        dtypes = [self._values[block.layout.name].dtype for block in blocks]
        sizes = [math.prod(b.shape) * d.itemsize for b, d in zip(blocks, dtypes, strict=True)]
        if sum(sizes) > self._buffer.numel():
            self._buffer = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu")
        parts = self._buffer[: sum(sizes)].split(sizes)
        return [
            part.view(dtype).view(block.shape)
            for block, dtype, part in zip(blocks, dtypes, parts, strict=True)
        ]

    def _count_non_finite(self, name: str, values: torch.Tensor) -> None:
        if not values.is_floating_point():
            return
        wide = values if values.dtype == torch.float64 else values.float()
        # One pass for the usual case: a sum that is finite has only finite terms.
        if not wide.sum().isfinite() and (count := int((~wide.isfinite()).sum())):
            self.non_finite[name] += count

    def close(self) -> None:
        """Make all files durable."""
        for writer in self._writers.values():
            writer.close()

    def abandon(self) -> None:
        """Let go of files that were not finished."""
        for writer in self._writers.values():
            writer.abandon()


def _warn_of_non_finite(counts: Sequence[Counter[str]], what: str, mesh: Mesh) -> None:
    found = sum(counts, Counter())
    if mesh.rank == 0 and found:
        shown = ", ".join(f"{name} ({count})" for name, count in found.most_common(8))
        more = f" and {len(found) - 8} more tensors" if len(found) > 8 else ""
        warnings.warn(
            f"{what}: {found.total()} values are NaN or infinite: {shown}{more}", stacklevel=2
        )


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
    _write_old_rope_names(directory / CONFIG_NAME)
    if generation_config is not None:
        generation_config.save_pretrained(directory)


def _write_old_rope_names(path: Path) -> None:
    """Say how positions rotate in transformers 4's words too, which else takes its defaults."""
    config = json.loads(path.read_text(encoding="utf-8"))
    rope = config.get("rope_parameters")
    if not isinstance(rope, dict) or "rope_theta" not in rope or "rope_theta" in config:
        return
    config["rope_theta"] = rope["rope_theta"]
    if rope.get("rope_type", "default") != "default":
        config["rope_scaling"] = {name: rope[name] for name in rope if name != "rope_theta"}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
