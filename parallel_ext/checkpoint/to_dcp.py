"""Write a training checkpoint as one of ``torch.distributed.checkpoint`` (DCP)."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from parallel_ext.checkpoint.manifest import (
    COMMIT_NAME,
    MANIFEST_NAME,
    Manifest,
    holds_tensors,
    is_beside_model,
    read_manifest,
)
from parallel_ext.checkpoint.saved_optimizer import OF_THE_RUN, read_options
from parallel_ext.checkpoint.verify import read_small_files
from parallel_ext.io import disk
from parallel_ext.io.progress import Progress, nothing
from parallel_ext.io.publish import Publication
from parallel_ext.io.rewrite import check_new
from parallel_ext.io.safetensors_reader import DTYPES, SafetensorsFile
from parallel_ext.io.schema import MAX_OWN_JSON_BYTES, read_content
from parallel_ext.sharding._torch_private import dcp_place

FILES = "parallel_ext"
"""Key, in the DCP, of the bytes of all that is no tensor of model or optimizer, by file."""

_CHUNK_BYTES = 64 << 20  # of a tensor, that are in memory at once


def dcp_path(tensor: str, file: str) -> tuple[str, ...]:
    """Return the path in the state dict of a tensor of a file, as ``get_state_dict`` makes it."""
    if is_beside_model(file):
        key, _, parameter = tensor.partition("/")
        return _path_of_state(parameter, key)
    return "model", tensor


def _path_of_state(parameter: str, key: str) -> tuple[str, ...]:
    return "optimizer", "state", parameter, key


def dcp_name(path: Iterable[str | int]) -> str:
    """Return the name in the DCP of what lies at a path, as torch flattens state dicts."""
    return ".".join(map(str, path))


@dataclass(frozen=True)
class _Value:
    """A tensor to write.

    Attributes:
        path: of it in the state dict.
        dtype, shape: of it.
        read: returns some of its rows, given their range; all of a tensor of one number.
    """

    path: tuple[str | int, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[int, int], torch.Tensor]

    @property
    def name(self) -> str:
        """Return its name in the DCP."""
        return dcp_name(self.path)


def to_dcp(path: Path, out: Path, progress: Progress = nothing) -> int:
    """Write a training checkpoint as a DCP from which torch's functions load.

    It holds ``{"model": ..., "optimizer": ...}``, as ``get_state_dict`` makes them, under the names
    of the HuggingFace files, and beside them the bytes of the other files, so that
    :func:`parallel_ext.checkpoint.from_dcp.restore_checkpoint` gives the checkpoint back. What is
    read is compared with its hashes; at most 64 MiB of a tensor are in memory.

    Returns:
        How many tensors of model and optimizer it holds.

    Raises:
        CheckpointError: the checkpoint is damaged; nothing is written.
    """
    check_new(out, path)
    manifest = read_manifest(path)
    optimizer = read_small_files(path, manifest)["optimizer"] or {"numbers": {}, "groups": []}
    with ExitStack() as files:
        opened = {
            name: files.enter_context(manifest.open(path, name))
            for name in manifest.files
            if name.endswith(".safetensors")
        }
        values = [*_tensors(manifest, opened), *_numbers(optimizer)]
        values += [_of_bytes(name, raw) for name, raw in _others(path, manifest, opened)]
        with Publication(out) as temporary, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as is meant
            dcp.save(
                {},
                storage_writer=_Writer(temporary),
                planner=_Planner(values, dict(_options(optimizer)), progress),
                no_dist=True,
            )
    return len(manifest.tensors)


def _tensors(manifest: Manifest, opened: dict[str, SafetensorsFile]) -> Iterator[_Value]:
    for name, (file, spec) in manifest.tensors.items():
        read = partial(opened[file].read_rows, name)
        yield _Value(dcp_path(name, file), spec.dtype, spec.shape, read)


def _numbers(described: dict[str, Any]) -> Iterator[_Value]:
    """Yield what the optimizer keeps as one number for a parameter, such as ``step``."""
    for key, numbers in described["numbers"].items():
        for group in described["groups"]:
            for parameter in group["parameters"]:
                number = numbers["others"].get(parameter, numbers["most"])
                if number is not None:
                    value = torch.tensor(number, dtype=DTYPES[numbers["dtype"]])
                    path = _path_of_state(parameter, key)
                    yield _Value(path, value.dtype, (), lambda *_, value=value: value)


def _options(described: dict[str, Any]) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Yield the options of the optimizer's groups, each after its path in the state dict."""
    for number, group in enumerate(described["groups"]):
        options = {**OF_THE_RUN, **read_options(group["options"]), "params": group["parameters"]}
        for key, value in options.items():
            yield ("optimizer", "param_groups", number, key), value


def _others(
    path: Path, manifest: Manifest, opened: dict[str, SafetensorsFile]
) -> Iterator[tuple[str, bytes]]:
    """Yield the bytes of the files without tensors of model and optimizer, and headers of these."""
    for name in (MANIFEST_NAME, COMMIT_NAME):
        yield name, read_content(path / name, MAX_OWN_JSON_BYTES, links=False)
    for name, record in manifest.files.items():
        if holds_tensors(name):
            tensors = opened[name].tensors.values()
            start = min((entry.start for entry in tensors), default=record.size)
            with (path / name).open("rb") as file:
                yield name, file.read(start)
        else:
            yield name, manifest.read(path, name)


def _of_bytes(name: str, raw: bytes) -> _Value:
    value = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    return _Value(
        (FILES, name),
        value.dtype,
        tuple(value.shape),
        lambda start, stop: value[start:stop],
    )


class _Planner(dcp.DefaultSavePlanner):
    """A plan of tensors that are read only when they are written, in pieces of their rows."""

    def __init__(
        self,
        values: list[_Value],
        options: dict[tuple[str | int, ...], Any],
        progress: Progress,
    ) -> None:
        super().__init__()
        self._values = {value.name: value for value in values}
        self._options = {dcp_name(path): value for path, value in options.items()}
        self._paths = {value.name: value.path for value in values}
        self._paths |= {".".join(map(str, path)): path for path in options}
        self._progress = progress

    def create_local_plan(self) -> SavePlan:
        items = [item for value in self._values.values() for item in _items(value)]
        items += [
            WriteItem(
                MetadataIndex(name),
                WriteItemType.BYTE_IO,
                bytes_io_data=BytesIOWriteData(_saved(value).getbuffer().nbytes),
            )
            for name, value in self._options.items()
        ]
        self.plan = SavePlan(items, planner_data=self._paths)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        name = write_item.index.fqn
        if name in self._options:
            return _saved(self._options[name])
        chunk = write_item.tensor_data.chunk
        (start, *_), (count, *_) = (*chunk.offsets, 0), (*chunk.sizes, 1)
        rows = self._values[name].read(start, start + count)
        self._progress(rows.nbytes)
        return rows


class _Writer(dcp.FileSystemWriter):
    """A writer of one file that lets go of each piece; that of torch 2.13 keeps all of a file."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        name, results = "__0_0.distcp", []
        with open(self.path / name, "xb") as file:
            for item in plan.items:
                start, piece = file.tell(), planner.resolve_data(item)
                if isinstance(piece, torch.Tensor):
                    torch.save(piece, file)
                else:
                    file.write(piece.getbuffer())
                length = file.tell() - start
                place = dcp_place()(name, start, length)
                results.append(WriteResult(item.index, length, place))
            file.flush()
            disk.sync(file)
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


def _saved(value: Any) -> io.BytesIO:
    content = io.BytesIO()
    torch.save(value, content)
    return content


def _items(value: _Value) -> Iterator[WriteItem]:
    """Yield the pieces of a tensor."""
    num_rows, *rest = value.shape or (1,)
    row_bytes = value.dtype.itemsize * math.prod(rest)
    at_once = max(1, _CHUNK_BYTES // max(1, row_bytes))
    for start in range(0, max(1, num_rows), at_once):
        count = min(at_once, num_rows - start)
        offsets = torch.Size((start, *(0 for _ in rest)) if value.shape else ())
        sizes = torch.Size((count, *rest) if value.shape else ())
        yield WriteItem(
            MetadataIndex(value.name, offsets),
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                ChunkStorageMetadata(offsets, sizes),
                TensorProperties(dtype=value.dtype),
                torch.Size(value.shape),
            ),
        )
