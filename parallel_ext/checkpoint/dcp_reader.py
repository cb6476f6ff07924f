"""Read tensors of a directory of ``torch.distributed.checkpoint`` (DCP), running no code of it."""

from __future__ import annotations

import enum
import io
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata

from parallel_ext.distributed.errors import CheckpointError
from parallel_ext.io.safe_open import open_file, shown
from parallel_ext.sharding._torch_private import dcp_place

METADATA_NAME = ".metadata"

_KNOWN = {
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "TensorStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING"),
        *("ChunkStorageMetadata", "BytesStorageMetadata", "MetadataIndex", "StorageMeta"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "collections": {"OrderedDict"},
}


def _member(kind: Any, name: str) -> Any:
    """Return a member of an enumeration, which some releases of Python 3.11 pickle by getattr."""
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum)):
        raise pickle.UnpicklingError(f"an attribute of {kind!r} is not of a DCP's metadata")
    return kind[name]


class _Unpickler(pickle.Unpickler):
    """An unpickler of the metadata of a DCP, and of nothing that could run."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        known = name in _KNOWN.get(module, ())
        if module == "torch" and name != "Size":
            known = isinstance(getattr(torch, name, None), torch.dtype)
        if not (known or (module, name) == ("torch", "Size")):
            raise pickle.UnpicklingError(f"{module}.{name} is not of a DCP's metadata")
        return super().find_class(module, name)


class DcpDirectory:
    """A directory that ``dcp.save`` wrote.

    Attributes:
        tensors: dtype and shape of each tensor, by its name in the DCP.
        paths: the keys that lead to each value in the state dict that was saved, by its name.

    Raises:
        CheckpointError: there is no DCP, or its metadata is damaged or holds anything else.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open_file(path / METADATA_NAME) as file:
                found = _Unpickler(io.BytesIO(file.read())).load()
        except CheckpointError:
            raise
        except Exception as error:  # a damaged pickle raises whatever it stumbles over
            raise CheckpointError(f"{path / METADATA_NAME}: {error!r:.300}") from error
        if not isinstance(found, metadata.Metadata) or not isinstance(found.storage_data, dict):
            raise CheckpointError(f"{path / METADATA_NAME} is not the metadata of a DCP of files")
        self._places: dict[metadata.MetadataIndex, Any] = found.storage_data
        self._chunks: dict[str, list[metadata.ChunkStorageMetadata]] = {}
        self.tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        for name, value in found.state_dict_metadata.items():
            if isinstance(value, metadata.TensorStorageMetadata):
                self.tensors[name] = value.properties.dtype, tuple(value.size)
                self._chunks[name] = value.chunks
        paths = found.planner_data if isinstance(found.planner_data, dict) else {}
        self.paths = {name: tuple(paths.get(name, (name,))) for name in found.state_dict_metadata}

    def rows(self, name: str) -> Iterator[torch.Tensor]:
        """Yield consecutive rows of a tensor, as many at a time as a saved piece of it has.

        Raises:
            CheckpointError: there is no such tensor, or a piece is missing, damaged, or not of it.
        """
        if name not in self.tensors:
            raise CheckpointError(f"{self.path}: there is no tensor {name}")
        dtype, shape = self.tensors[name]
        if not shape:
            yield self._piece(name, self._chunks[name][0])
            return
        chunks = sorted(self._chunks[name], key=lambda chunk: tuple(chunk.offsets))
        ends = {chunk.offsets[0] + chunk.sizes[0] for chunk in chunks if chunk.sizes.numel()}
        bounds = sorted({0, *ends, *(chunk.offsets[0] for chunk in chunks if chunk.sizes.numel())})
        held: dict[int, torch.Tensor] = {}
        for start, stop in zip(bounds, bounds[1:], strict=False):
            rows, filled = torch.empty((stop - start, *shape[1:]), dtype=dtype), 0
            for number, chunk in enumerate(chunks):
                first, last = chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0]
                if last <= start or first >= stop or not chunk.sizes.numel():
                    held.pop(number, None)
                    continue
                if number not in held:
                    held[number] = self._piece(name, chunk)
                piece = held[number][start - first : stop - first]
                sides = zip(chunk.offsets[1:], chunk.sizes[1:], strict=True)
                rows[(slice(None), *(slice(at, at + size) for at, size in sides))] = piece
                filled += piece.numel()
            if filled != rows.numel():
                raise CheckpointError(
                    f"{self.path}: {name}: the rows [{start}, {stop}) have {rows.numel()} "
                    f"elements, but pieces hold {filled} of them"
                )
            yield rows
        if bounds[-1] != shape[0]:
            raise CheckpointError(
                f"{self.path}: {name} has {shape[0]} rows, but pieces end at {bounds[-1]}"
            )

    def read(self, name: str) -> torch.Tensor:
        """Read a small tensor as a whole."""
        rows = list(self.rows(name))
        dtype, shape = self.tensors[name]
        return torch.cat([torch.empty((0, *shape[1:]), dtype=dtype), *rows])

    def _piece(self, name: str, chunk: metadata.ChunkStorageMetadata) -> torch.Tensor:
        where = f"{self.path}: {name} at {tuple(chunk.offsets)}"
        place = self._places.get(metadata.MetadataIndex(name, chunk.offsets))
        if place is None:  # before there were pieces, tensors had no offset
            place = self._places.get(metadata.MetadataIndex(name))
        if not isinstance(place, dcp_place()) or place.transform_descriptors:
            raise CheckpointError(f"{where} is in no plain file: {shown(place)}")
        if Path(place.relative_path).name != place.relative_path:
            raise CheckpointError(f"{where} is in {shown(place.relative_path)}, no plain name")
        try:
            with open_file(self.path / place.relative_path) as file:
                file.seek(place.offset)
                content = io.BytesIO(file.read(place.length))
            value = torch.load(content, "cpu", weights_only=True)
        except CheckpointError:
            raise
        except Exception as error:  # a damaged file raises whatever torch stumbles over in it
            raise CheckpointError(f"{where} is damaged: {error!r:.200}") from error
        fits = isinstance(value, torch.Tensor) and value.shape == chunk.sizes
        if not fits or value.dtype != self.tensors[name][0]:
            raise CheckpointError(
                f"{where} is {shown(value)}, but a piece of shape {tuple(chunk.sizes)} was saved"
            )
        return value.detach()
