"""Make a training checkpoint, or a HuggingFace model, of a DCP of ``torch.distributed``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from parallel_ext.checkpoint.dcp_reader import DcpDirectory
from parallel_ext.checkpoint.manifest import (
    COMMIT_NAME,
    FILE_NAME,
    MANIFEST_NAME,
    STATE_FOLDER,
    Manifest,
    commit_of,
    holds_tensors,
    is_beside_model,
)
from parallel_ext.checkpoint.source import ADAPTER_NAME
from parallel_ext.checkpoint.steps import name_of_step, publish_step
from parallel_ext.checkpoint.to_dcp import FILES, dcp_name, dcp_path
from parallel_ext.distributed.errors import CheckpointError, first_few
from parallel_ext.io import disk
from parallel_ext.io.hashing import ChunkHasher
from parallel_ext.io.hf_reader import CONFIG_NAME, INDEX_NAME, HFDirectory
from parallel_ext.io.hf_writer import index_of
from parallel_ext.io.progress import Progress, nothing
from parallel_ext.io.publish import Publication
from parallel_ext.io.rewrite import check_new, copy_beside, write_rows
from parallel_ext.io.safe_open import shown
from parallel_ext.io.safetensors_reader import LENGTH_BYTES, METADATA
from parallel_ext.io.safetensors_writer import TensorSpec
from parallel_ext.io.schema import parse_json, read_json
from parallel_ext.io.stream import plan_files
from parallel_ext.sharding.reshard import bytes_of


def restore_checkpoint(path: Path, out: Path, progress: Progress = nothing) -> Path:
    """Write the training checkpoint that a DCP was made of, the same bytes in every file.

    Args:
        path: directory of a DCP that ``to_dcp`` made.
        out: folder for checkpoints, which is made; the step is in it afterwards.

    Returns:
        The directory of the step.

    Raises:
        CheckpointError: the DCP is of something else, or is damaged: a file would not have the
            hashes that the first save wrote. Nothing is written.
    """
    check_new(out, path)
    saved = DcpDirectory(path)
    if f"{FILES}.{MANIFEST_NAME}" not in saved.tensors:
        raise CheckpointError(
            f"{path} holds no training checkpoint of parallel_ext, only tensors; --to hf makes a "
            "model of them"
        )
    content = _content(saved, MANIFEST_NAME)
    manifest = Manifest.from_bytes(content, path / MANIFEST_NAME)
    if commit_of(content, manifest) != _content(saved, COMMIT_NAME):
        raise CheckpointError(f"{path}: the manifest in it is damaged, by the commit in it")
    with Publication(out) as root:
        temporary = root / f".{manifest.save_id}"
        for folder in (temporary, temporary / STATE_FOLDER):
            disk.make_directory(folder)
        for name in manifest.files:
            _restore(saved, name, temporary / name, manifest, progress)
        if manifest.to_bytes() != content:
            raise CheckpointError(f"{path}: the manifest in it is of another form")
        publish_step(temporary, root, manifest)
    return out / name_of_step(manifest.step)


def _content(saved: DcpDirectory, name: str) -> bytes:
    key = f"{FILES}.{name}"
    if key not in saved.tensors or saved.tensors[key][0] != torch.uint8:
        raise CheckpointError(f"{saved.path}: {key}, the bytes of a file, is missing")
    return bytes(bytes_of(saved.read(key)))


def _restore(
    saved: DcpDirectory, name: str, path: Path, manifest: Manifest, progress: Progress
) -> None:
    """Write a file of a training checkpoint; raise unless it is the one that was written first."""
    record, content, offset = manifest.files[name], _content(saved, name), 0
    hasher = ChunkHasher(record.chunk_bytes)
    with disk.create(path) as file:

        def write(memory: memoryview) -> None:
            nonlocal offset
            disk.write(file, memory, offset)
            hasher.update(memory)
            offset += len(memory)

        write(memoryview(content))
        if holds_tensors(name):
            for tensor in _in_order(content, path):
                for rows in saved.rows(dcp_name(dcp_path(tensor, name))):
                    write(bytes_of(rows.contiguous()))
                    progress(rows.nbytes)
        disk.sync(file)
    if hasher.record() != record:
        raise CheckpointError(
            f"{saved.path}: what it holds of {name} is not what was saved in it first: the hashes "
            "are others. If it was trained on, --to hf makes a model of it"
        )


def _in_order(header: bytes, path: Path) -> list[str]:
    """Return the names of the tensors of a safetensors file, in its order, given its header."""
    described = parse_json(header[LENGTH_BYTES:], path)
    described.pop(METADATA, None)
    return sorted(described, key=lambda name: described[name]["data_offsets"])


def model_of_dcp(
    path: Path,
    out: Path,
    config: Path | None,
    check: Callable[[HFDirectory], object],
    names: Callable[[Path, dict[str, Any], dict[str, tuple[int, ...]]], Mapping[str, str]],
    progress: Progress = nothing,
) -> int:
    """Write the model of a DCP as a HuggingFace directory.

    Its tensors are those below the key ``model``, or those at the top where there is none, under
    the names of the model's HuggingFace files, or those in a model of images.

    Args:
        path: directory of a DCP, of this package or another program.
        config: folder with ``config.json`` and what else is to lie beside the tensors; None for
            what a training checkpoint has brought along.
        check: called with the opened directory before it is published; raises if it is no model.
        names: given the folder and content of a ``config.json``, and the shapes of the tensors,
            returns by their names those that files have where these are others.

    Returns:
        How many tensors the model has.

    Raises:
        CheckpointError: there are no such tensors, or not those of the model; nothing is written.
    """
    check_new(out, path)
    saved = DcpDirectory(path)
    key_of = _model_in(saved)
    if not key_of:
        raise CheckpointError(
            f"{path}: there is no tensor of a model: {shown(sorted(saved.paths))}"
        )
    own = _json_of_checkpoint(saved)
    if config is None and CONFIG_NAME not in own:
        raise CheckpointError(
            f"{path} holds no {CONFIG_NAME}; pass --config FOLDER of the model that was trained"
        )
    if config is None:
        content = parse_json(own[CONFIG_NAME], path / CONFIG_NAME)
    else:
        content = read_json(config / CONFIG_NAME)
    shapes = {name: saved.tensors[key][1] for name, key in key_of.items()}
    in_files = names(config or path, content, shapes)
    number = Counter(in_files.get(name, name) for name in shapes)
    twice = [name for name in shapes if number[in_files.get(name, name)] > 1]
    if twice:
        raise CheckpointError(
            f"{path}: tensors are there under two names each, as {first_few(twice)}; save one of "
            "the two"
        )
    key_of = {in_files.get(name, name): key for name, key in key_of.items()}
    specs = [TensorSpec(name, *saved.tensors[key]) for name, key in key_of.items()]
    files = plan_files(specs, 1)
    with Publication(out) as temporary:
        for file in files:
            path = temporary / file.name
            write_rows(path, file.tensors, lambda spec: saved.rows(key_of[spec.name]), progress)
        index = {INDEX_NAME: index_of(files)} if len(files) > 1 else {}
        if config is None:
            own.pop(INDEX_NAME, None)
            for name, content in (own | index).items():
                disk.write_file(temporary / name, content)
        else:
            copy_beside(config, temporary, index, without={INDEX_NAME})
        with HFDirectory(temporary) as directory:
            check(directory)
    return len(specs)


def _model_in(saved: DcpDirectory) -> dict[str, str]:
    """Return the key of each tensor of the model in a DCP, by its name in the model."""
    # An extra state is what a module keeps beside tensors, of ours a marker of shards.
    keys = [key for key in saved.tensors if not key.endswith("_extra_state")]
    path_of = saved.paths
    below = {
        ".".join(map(str, path_of[key][1:])): key
        for key in keys
        if len(path_of[key]) > 1 and path_of[key][0] == "model"
    }
    at_top = {str(path_of[key][0]): key for key in keys if len(path_of[key]) == 1}
    return below or at_top


def _json_of_checkpoint(saved: DcpDirectory) -> dict[str, bytes]:
    """Return the JSON files of a model that a training checkpoint has brought along, by name."""
    names = [key.removeprefix(f"{FILES}.") for key in saved.tensors if key.startswith(f"{FILES}.")]
    if ADAPTER_NAME in names:
        raise CheckpointError(
            f"{saved.path} holds an adapter; make a checkpoint of it, and of that an adapter"
        )
    return {
        name: _content(saved, name)
        for name in names
        if name.endswith(".json") and not is_beside_model(name) and FILE_NAME.fullmatch(name)
    }
