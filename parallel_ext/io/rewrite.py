"""Write a saved model again, tensor by tensor, with what lies beside its tensors."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from parallel_ext.distributed.errors import CheckpointError
from parallel_ext.io import disk
from parallel_ext.io.hf_reader import INDEX_NAME, HFDirectory
from parallel_ext.io.progress import Progress, nothing
from parallel_ext.io.safetensors_reader import SafetensorsFile
from parallel_ext.io.safetensors_writer import SafetensorsWriter, TensorSpec
from parallel_ext.io.stream import PlannedFile
from parallel_ext.sharding.reshard import row_ranges

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")

_TEMPLATES = "additional_chat_templates"


def check_new(out: Path, source: Path) -> None:
    """Raise a CheckpointError if ``out`` is ``source`` or in it, or holds something."""
    target = Path(os.path.realpath(out))
    if target.is_relative_to(os.path.realpath(source)):
        raise CheckpointError(f"{out} is {source} itself, or in it; choose another folder")
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise CheckpointError(f"{out} is there already; choose a new folder")


def write_again(
    model: HFDirectory,
    out: Path,
    rows: Callable[[TensorSpec, SafetensorsFile], Iterator[torch.Tensor]],
    progress: Progress = nothing,
) -> list[PlannedFile]:
    """Write the files of a model into a directory, under their names; return what was written.

    Args:
        model: whose shapes and dtypes the tensors have.
        out: a directory without files.
        rows: returns the consecutive rows of a tensor, given the file that held it.
    """
    written = []
    for file in dict.fromkeys(model.file_of.values()):
        ordered = sorted(file.tensors, key=lambda name: -model.dtypes[name].itemsize)
        specs = [TensorSpec(name, model.dtypes[name], model.shapes[name]) for name in ordered]
        path = out / file.path.name
        write_rows(path, specs, lambda spec, file=file: rows(spec, file), progress, file.metadata)
        written.append(PlannedFile(0, specs, file.path.name))
    return written


def write_rows(
    path: Path,
    specs: Sequence[TensorSpec],
    rows: Callable[[TensorSpec], Iterator[torch.Tensor]],
    progress: Progress = nothing,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write one new file from rows.

    Args:
        specs: its tensors, those of wider dtypes first.
        rows: returns the consecutive rows of a tensor.
    """
    with SafetensorsWriter(path, specs, metadata) as writer:
        for spec in specs:
            for piece in rows(spec):
                writer.append(spec.name, piece)
                progress(piece.nbytes)


def copy_beside(
    source: Path,
    out: Path,
    contents: Mapping[str, bytes] | None = None,
    without: Collection[str] = (),
) -> None:
    """Copy what lies beside the weights of a model, such as its tokenizer.

    Of subdirectories only that of further chat templates.

    Args:
        contents: of files that are others than those of the model, by name.
        without: names of files that are left out.
    """
    contents = contents or {}
    for name, content in contents.items():
        disk.write_file(out / name, content)
    for path in source.iterdir():
        is_index = path.name.endswith(".index.json") and path.name != INDEX_NAME
        left_out = path.name in contents or path.name in without or is_index
        if path.is_file() and not path.name.endswith(_WEIGHTS) and not left_out:
            disk.write_file(out / path.name, path.read_bytes())
    for path in (source / _TEMPLATES).glob("*.jinja"):
        disk.make_directory(out / _TEMPLATES, exist_ok=True)
        disk.write_file(out / _TEMPLATES / path.name, path.read_bytes())


def rows_of(file: SafetensorsFile, name: str, shape: tuple[int, ...]) -> Iterator[torch.Tensor]:
    """Yield the first rows of a tensor in a file, up to a shape of fewer or equally many."""
    row_bytes = file.tensors[name].dtype.itemsize * math.prod(shape[1:])
    for start, stop in row_ranges(shape, row_bytes):
        yield file.read_rows(name, start, stop)


def copy_tensors(file: SafetensorsFile, out: Path, progress: Progress = nothing) -> None:
    """Write the tensors of a file into a new one, in their order, with hashes in its header."""
    ordered = sorted(file.tensors, key=lambda name: file.tensors[name].start)
    specs = [TensorSpec(name, *file.tensors[name][:2]) for name in ordered]
    write_rows(
        out, specs, lambda spec: rows_of(file, spec.name, spec.shape), progress, file.metadata
    )
