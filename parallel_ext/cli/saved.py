"""Anything saved, opened without a model: its kind, facts about it, and its tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallel_ext.checkpoint.manifest import (
    COMMIT_NAME,
    STATE_FOLDER,
    holds_tensors,
    read_manifest,
)
from parallel_ext.checkpoint.source import ADAPTER_NAME
from parallel_ext.checkpoint.steps import (
    LATEST_NAME,
    TEMPORARY_NAME,
    complete_steps,
    latest_checkpoint,
)
from parallel_ext.distributed.errors import CheckpointError
from parallel_ext.io.hf_reader import ADAPTER_CONFIG_NAME, CONFIG_NAME, HFDirectory
from parallel_ext.io.safetensors_reader import SafetensorsFile, TensorEntry
from parallel_ext.io.schema import parse_json, read_json

CHECKPOINT, MODEL, ADAPTER, FILE = "training checkpoint", "HuggingFace model", "adapter", "file"
OPTIMIZER = "optimizer: "  # before the names of its tensors
PATHS = "a model's or adapter's directory, a training checkpoint, or a safetensors file"
_OF_MODEL = ("model_type", "architectures", "transformers_version", "vocab_size")
_OF_ADAPTER = ("peft_type", "base_model_name_or_path", "r", "lora_alpha", "target_modules")


class NothingSavedError(CheckpointError):
    """At a path lies nothing of the kinds that are read."""


def newest_step(path: Path) -> Path:
    """Return the newest complete step of a root of training checkpoints; else the path itself.

    Raises:
        CheckpointError: it is a step of a training checkpoint that is not complete.
    """
    if path.is_dir() and complete_steps(path):
        return latest_checkpoint(path)
    if (path / STATE_FOLDER).exists() and not (path / COMMIT_NAME).exists():
        raise CheckpointError(
            f"{path} is a step of a training checkpoint, but not a complete one: it has no file "
            f"{COMMIT_NAME}, which a save writes last; take another step"
        )
    return path


def kind_of(path: Path) -> str:
    """Return what is saved at a path of :func:`newest_step`, one of the kinds of :class:`Saved`.

    Raises:
        NothingSavedError: there is nothing of the kind.
    """
    if (path / COMMIT_NAME).exists():
        return CHECKPOINT
    if (path / ADAPTER_CONFIG_NAME).exists():
        return ADAPTER
    if (path / CONFIG_NAME).exists():
        return MODEL
    if path.is_file():
        return FILE
    of_root = (LATEST_NAME, "step-*", TEMPORARY_NAME.format(name="step-*", save_id="*"))
    if any(any(path.glob(pattern)) for pattern in of_root):
        raise NothingSavedError(
            f"{path} has no complete step of a training checkpoint; take another root"
        )
    raise NothingSavedError(
        f"{path} is no safetensors file, HuggingFace model, adapter or training checkpoint"
    )


@dataclass(frozen=True)
class Saved:
    """Something saved that is open.

    Attributes:
        kind: ``CHECKPOINT``, ``MODEL``, ``ADAPTER`` or ``FILE``.
        path: of the file, or of the directory that holds the files.
        facts: about it, by name, fit for JSON.
        file_of: the open file of each tensor, by its name there.
    """

    kind: str
    path: Path
    facts: dict[str, Any]
    file_of: dict[str, SafetensorsFile]

    @property
    def entries(self) -> dict[str, TensorEntry]:
        """Return dtype, shape and place of every tensor."""
        return {name: file.tensors[name] for name, file in self.file_of.items()}

    def shown(self, name: str) -> str:
        """Return the name of a tensor, which says whether it is the optimizer's."""
        is_state = self.file_of[name].path.parent.name == STATE_FOLDER
        return OPTIMIZER + name if is_state else name


@contextmanager
def open_saved(path: Path) -> Iterator[Saved]:
    """Open what is saved at a path, until the end of the context.

    Args:
        path: of a safetensors file, a HuggingFace model, a PEFT adapter, a step of a training
            checkpoint, or a root of such steps, of which the last is opened.

    Raises:
        NothingSavedError: there is nothing of the kind.
        CheckpointError: it is damaged, or a step that is not complete.
    """
    path = newest_step(path)
    kind = kind_of(path)
    with ExitStack() as files:
        try:
            saved = _opened(path, kind, files)
        except CheckpointError as error:
            names = [each.name for each in path.iterdir()] if path.is_dir() else [path.name]
            if kind == CHECKPOINT or any(".safetensors" in name for name in names):
                raise
            why = f"{path} is no safetensors file; give {PATHS}" if kind == FILE else str(error)
            raise NothingSavedError(why) from error
        yield saved


def _opened(path: Path, kind: str, files: ExitStack) -> Saved:
    if kind == CHECKPOINT:
        return _checkpoint(path, files)
    if kind == ADAPTER:
        file = files.enter_context(SafetensorsFile(path / ADAPTER_NAME))
        facts = _facts(read_json(path / ADAPTER_CONFIG_NAME), _OF_ADAPTER)
        return Saved(kind, path, facts, dict.fromkeys(file.tensors, file))
    if kind == MODEL:
        model = files.enter_context(HFDirectory(path))
        return Saved(kind, path, _facts(model.config, _OF_MODEL), model.file_of)
    file = files.enter_context(SafetensorsFile(path))
    return Saved(kind, path, dict(file.metadata), dict.fromkeys(file.tensors, file))


def _facts(config: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: config[name] for name in names if name in config}


def _checkpoint(path: Path, files: ExitStack) -> Saved:
    manifest = read_manifest(path)
    file_of: dict[str, SafetensorsFile] = {}
    for name in manifest.files:
        if holds_tensors(name):
            file = files.enter_context(manifest.open(path, name))
            file_of |= dict.fromkeys(file.tensors, file)
    facts = {"step": manifest.step, "save": manifest.number, **manifest.saved_by}
    if ADAPTER_CONFIG_NAME in manifest.files:
        content = manifest.read(path, ADAPTER_CONFIG_NAME)
        facts |= _facts(parse_json(content, path / ADAPTER_CONFIG_NAME), _OF_ADAPTER)
    if manifest.non_finite:
        facts["tensors with NaN or infinity"] = sorted(manifest.non_finite)
    return Saved(CHECKPOINT, path, facts, file_of)
