"""Check that the files of a training checkpoint are all that were written, and fit each other."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from parallel_ext.checkpoint import rng
from parallel_ext.checkpoint.manifest import (
    LOOP_NAME,
    RNG_NAME,
    Manifest,
    is_beside_model,
    read_manifest,
)
from parallel_ext.checkpoint.training_state import parse_loop
from parallel_ext.distributed.errors import CheckpointError
from parallel_ext.io.hf_reader import INDEX_NAME
from parallel_ext.io.progress import Progress, nothing
from parallel_ext.io.schema import parse_json


def read_small_files(path: Path, manifest: Manifest) -> dict[str, Any]:
    """Read and check all files of the step at ``path`` but those of tensors, and parse the loop.

    Raises:
        CheckpointError: one is damaged or not as it must be, or there are others.
    """
    manifest.check_names(path)
    loop: dict[str, Any] = {}
    for name in manifest.files:
        if name.endswith(".safetensors"):
            continue
        content = manifest.read(path, name)
        if name == LOOP_NAME:
            loop = parse_loop(content, path / name, manifest.step)
        elif name == INDEX_NAME:
            _check_index(parse_json(content, path / name), path / name, manifest)
        elif name.endswith(".json"):
            parse_json(content, path / name)
    return loop


def _check_index(index: dict[str, Any], path: Path, manifest: Manifest) -> None:
    listed = {
        name: file for name, (file, _) in manifest.tensors.items() if not is_beside_model(file)
    }
    if index.get("weight_map") != listed:
        raise CheckpointError(f"{path}: weight_map is not that of the manifest")


def verify_checkpoint(path: str | os.PathLike[str], progress: Progress = nothing) -> int:
    """Read every byte of a training checkpoint and compare it with what was written.

    Needs neither a model nor other ranks.

    Args:
        path: the directory of a step.
        progress: called with the number of bytes of tensors that were read since its last call.

    Returns:
        The step.

    Raises:
        CheckpointError: a file is missing, truncated, damaged or of another save; names the file,
            the bytes and the tensors in them, and the hashes.

    Example:
        >>> verify_checkpoint(latest_checkpoint("ckpts"))  # doctest: +SKIP
        1200
    """
    path = Path(path)
    manifest = read_manifest(path)
    read_small_files(path, manifest)
    for name in manifest.files:
        if name.endswith(".safetensors"):
            with manifest.open(path, name) as file:
                if name == RNG_NAME:
                    rng.check_kinds(file)
                file.check_all(progress)
    return manifest.step


verify = verify_checkpoint  # an alias
