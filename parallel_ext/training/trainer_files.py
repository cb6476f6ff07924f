"""The files of a parallel model's trainer: HuggingFace's, with what resumes on any layout."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from parallel_ext.checkpoint import rng
from parallel_ext.checkpoint.load import load_checkpoint
from parallel_ext.checkpoint.manifest import COMMIT_NAME, read_manifest
from parallel_ext.checkpoint.optimizer_state import refuse_state_elsewhere
from parallel_ext.checkpoint.save import save_checkpoint
from parallel_ext.checkpoint.steps import latest_checkpoint
from parallel_ext.checkpoint.verify import read_small_files
from parallel_ext.distributed.errors import CheckpointError
from parallel_ext.distributed.mesh import Mesh
from parallel_ext.parallel.joining import call_together
from parallel_ext.parallel.state import state_of
from parallel_ext.parallel.weights import write_weights
from parallel_ext.training.accelerate import unwrapped

_FOLDER = "parallel_ext"  # of a trainer's checkpoint, where px.save_checkpoint writes
_STATE = "trainer_state.json"  # transformers' name; written last
_ARGUMENTS = "training_args.bin"  # transformers' name


class TrainerFiles:
    """What a ``transformers.Trainer`` writes and reads, for a parallel model; a mixin."""

    model: nn.Module
    args: transformers.TrainingArguments
    _random_states: Mapping[str, torch.Tensor] | None = None  # of the checkpoint that was loaded
    _has_stepped = False

    @property
    def _mesh(self) -> Mesh:
        return state_of(self.model).mesh

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        """Write the model's HuggingFace or PEFT directory; every rank calls it."""
        output_dir = self.args.output_dir if output_dir is None else output_dir
        call_together(
            self, "write_directory", (output_dir,), {}, lambda: self.write_directory(output_dir)
        )

    def write_directory(self, output_dir: str | os.PathLike[str]) -> None:
        """Write the model, the tokenizer and the arguments to a directory; every rank calls it."""
        write_weights(self.model, output_dir)
        self._mesh.control.run_on_all("save_model", lambda: self._save_beside(output_dir))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model, in a checkpoint with all that training needs to resume."""
        if _internal_call and output_dir is not None:  # without one it is what goes to the hub
            self._save_step(Path(output_dir))
            return
        self._save(output_dir)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_beside(self, output_dir: str | os.PathLike[str]) -> None:
        """Write tokenizer and arguments, on the rank that writes."""
        if not self.args.should_save:
            return
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if tokenizer is not None:
            tokenizer.save_pretrained(output_dir)
        torch.save(self.args, os.path.join(output_dir, _ARGUMENTS))

    def _save_step(self, checkpoint: Path) -> None:
        control, step = self._mesh.control, self.state.global_step
        root = checkpoint / _FOLDER

        def make_room() -> None:  # for one of the same step, of a run that was given up
            if self.args.should_save:
                _remove(checkpoint)

        control.run_on_all("save_model", make_room, patient=True)
        optimizer, scheduler = self.optimizer, self.lr_scheduler
        if self.args.save_only_model:
            optimizer = scheduler = None
        rows = self.get_total_train_batch_size(self.args)
        data_state = {"rows_of_a_step": rows}
        path = save_checkpoint(root, step, self.model, unwrapped(optimizer), scheduler, data_state)

        def link() -> None:
            if self.args.should_save:
                _link_files(path, checkpoint)
            self._save_beside(checkpoint)

        control.run_on_all("save_model", link)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Write nothing: they are in what ``save_model`` has written."""

    def _save_rng_state(self, output_dir: str) -> None:
        """Write nothing: those of all ranks are in what ``save_model`` has written."""

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any):
        """Train, perhaps from a checkpoint of any layout; with True from the last complete one."""
        if resume_from_checkpoint is True:
            # With True the trainer then says that there is none.
            resume_from_checkpoint = self._last_checkpoint() or True
        self._has_stepped = False
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Log, save and evaluate; after a first step raise if no checkpoint could hold its state.

        Else a training would end at its first checkpoint, which may be hours away.
        """
        saves_state = self.args.save_strategy != "no" and not self.args.save_only_model
        if saves_state and not self._has_stepped:
            self._mesh.control.run_on_all("train", self._check_state)
        self._has_stepped = True
        return super()._maybe_log_save_evaluate(*args, **kwargs)

    def _check_state(self) -> None:
        try:
            refuse_state_elsewhere(unwrapped(self.optimizer))
        except CheckpointError as error:
            raise CheckpointError(
                f"{type(self).__name__}: {error}; pass save_only_model=True or save_strategy='no'"
            ) from error

    def _last_checkpoint(self) -> str | None:
        """Return the newest checkpoint that was not interrupted, as rank 0 sees it."""

        def find() -> str | None:
            if self._mesh.rank != 0:
                return None
            folders = Path(self.args.output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*")
            matches = {p: re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)", p.name) for p in folders}
            numbers = {path: int(match[1]) for path, match in matches.items() if match}
            newest_first = sorted(numbers, key=numbers.__getitem__, reverse=True)
            return next((str(path) for path in newest_first if _is_complete(path)), None)

        found = self._mesh.control.run_on_all("train", find)
        return self._mesh.control.all_gather_object(found)[0]

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Check that there is one; its weights come with the optimizer, once that is there."""
        checkpoint = Path(resume_from_checkpoint)
        self._mesh.control.run_on_all("train", lambda: _step_in(checkpoint))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        path = self._mesh.control.run_on_all("train", lambda: _step_in(Path(checkpoint)))
        loop = self._mesh.control.run_on_all("train", lambda: self._loop_in(path))
        optimizer, scheduler = unwrapped(self.optimizer), self.lr_scheduler
        if loop["optimizer"] is None:  # of save_only_model
            optimizer = scheduler = None
        before = rng.capture(self._mesh)  # by which samplers draw the rows that are skipped
        load_checkpoint(Path(checkpoint) / _FOLDER, self.model, optimizer, scheduler)
        self._random_states = rng.capture(self._mesh)
        rng.restore(before, self._mesh)

    def _loop_in(self, path: Path) -> dict[str, Any]:
        """Return what a checkpoint says of its training, before it is loaded.

        With another number of rows in a step, others would be left out than were trained on.
        """
        loop = read_small_files(path, read_manifest(path))
        then = loop["data_state"]["rows_of_a_step"]
        now = self.get_total_train_batch_size(self.args)
        if then != now and not self.args.ignore_data_skip:
            raise ValueError(
                f"train: the checkpoint was made with {then} rows a step, but this run has {now}: "
                f"per_device_train_batch_size={self.args.per_device_train_batch_size} times "
                f"gradient_accumulation_steps={self.args.gradient_accumulation_steps} times "
                f"dp={self._mesh.dp_size}; choose them so that the product is {then}, or pass "
                "ignore_data_skip=True, which begins with the first row again"
            )
        return loop

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Set the random numbers to those of the checkpoint, after the skipped rows drew some."""
        if self._random_states is not None:
            rng.restore(self._random_states, self._mesh)

    def _load_best_model(self) -> None:
        states = rng.capture(self._mesh)
        load_checkpoint(Path(self.state.best_model_checkpoint) / _FOLDER, self.model)
        rng.restore(states, self._mesh)


def _remove(checkpoint: Path) -> None:
    """Remove a checkpoint, which first loses its name: a part of it is never taken for it."""
    trash = checkpoint.with_name(f"_{checkpoint.name}")  # which does not go to the hub either
    if trash.exists():  # of a job that was killed meanwhile
        shutil.rmtree(trash)
    if checkpoint.exists():
        checkpoint.rename(trash)
        shutil.rmtree(trash)


def _link_files(source: Path, target: Path) -> None:
    """Put the files of a directory, without its folders, into another: one copy on the disk."""
    for file in source.iterdir():
        if file.is_file() and file.name != COMMIT_NAME:
            try:
                os.link(file, target / file.name)
            except OSError:  # of a file system without hard links
                os.symlink(file.relative_to(target), target / file.name)


def _step_in(checkpoint: Path) -> Path:
    """Return what ``px.save_checkpoint`` has written in a trainer's checkpoint, if all is there."""
    path = latest_checkpoint(checkpoint / _FOLDER)
    if path is None or not (checkpoint / _STATE).exists():
        raise CheckpointError(
            f"{checkpoint} is no complete checkpoint of px.Trainer; px.from_pretrained reads the "
            "weights of a HuggingFace directory"
        )
    return path


def _is_complete(checkpoint: Path) -> bool:
    """Return whether a checkpoint has all its parts, the last of which is the trainer's state."""
    try:
        TrainerState.load_from_json(str(checkpoint / _STATE))
        return latest_checkpoint(checkpoint / _FOLDER) is not None
    except (OSError, json.JSONDecodeError, CheckpointError):
        return False
