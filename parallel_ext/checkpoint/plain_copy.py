"""Copy the model or adapter out of a training checkpoint, every byte compared with its hash."""

from __future__ import annotations

from pathlib import Path

from parallel_ext.checkpoint.manifest import (
    COMMIT_NAME,
    is_beside_model,
    read_manifest,
)
from parallel_ext.checkpoint.verify import read_small_files
from parallel_ext.io import disk
from parallel_ext.io.progress import Progress, nothing
from parallel_ext.io.publish import Publication
from parallel_ext.io.rewrite import check_new, copy_beside, copy_tensors


def copy_model(path: Path, out: Path, progress: Progress = nothing) -> int:
    """Write what a training checkpoint holds beside the state of its job as a plain directory.

    HuggingFace's ``from_pretrained`` reads it, or PEFT's where an adapter was trained.

    Returns:
        How many tensors the directory holds.

    Raises:
        CheckpointError: the checkpoint is damaged; nothing is written.
    """
    check_new(out, path)
    manifest = read_manifest(path)
    read_small_files(path, manifest)
    own = [name for name in manifest.files if not is_beside_model(name)]
    with Publication(out) as temporary:
        for name in own:
            if name.endswith(".safetensors"):
                with manifest.open(path, name) as file:
                    copy_tensors(file, temporary / name, progress)
            else:
                disk.write_file(temporary / name, manifest.read(path, name))
        copy_beside(path, temporary, without={*own, COMMIT_NAME})
    return sum(1 for file, _ in manifest.tensors.values() if file in own)
