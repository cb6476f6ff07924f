"""HuggingFace's ``Trainer`` around a parallel model: the training of the single process.

What a trainer asks of accelerate (loaders, gathering, accumulation, clipping) is served by
:mod:`parallel_ext.interplay.accelerate`; here are what it counts by itself, and its checkpoints.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
import transformers
from torch import nn
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from parallel_ext.checkpoint import rng
from parallel_ext.checkpoint.api import load_checkpoint, save_checkpoint
from parallel_ext.checkpoint.manifest import COMMIT_NAME, STATE_FOLDER, read_manifest
from parallel_ext.checkpoint.steps import latest_checkpoint
from parallel_ext.checkpoint.verify import read_small_files
from parallel_ext.distributed.errors import CheckpointError
from parallel_ext.distributed.mesh import Mesh
from parallel_ext.parallel.extending import run_extensions
from parallel_ext.parallel.forward import wants_balance
from parallel_ext.parallel.joining import call_together, remember
from parallel_ext.parallel.state import model_of, state_of
from parallel_ext.training.accelerate import unwrapped
from parallel_ext.training.trainer_checks import (
    check_class,
    check_given,
    check_served,
    class_of_trl,
    refuse_model_init,
)
from parallel_ext.training.trainer_leaves import check_leaves, run_leaves

_FOLDER = "parallel_ext"  # of a trainer's checkpoint, where px.save_checkpoint writes
_STATE = "trainer_state.json"  # transformers' name; written last
_ARGUMENTS = "training_args.bin"  # transformers' name


class TrainerMixin:
    """Let a subclass of ``transformers.Trainer`` train a parallel model as one process would.

    It stands before the trainer: ``class MySFTTrainer(px.TrainerMixin, trl.SFTTrainer)``. Every
    rank makes the trainer and calls its methods. ``per_device_train_batch_size`` is that of a dp
    rank, whose tp ranks get the same rows: the batch of the job is that times ``dp``. Losses,
    norms, metrics, predictions and files are those of the single process with this batch.

    A checkpoint is a HuggingFace directory, or PEFT's, with the state of the training in
    ``parallel_ext``. Weights lie on the disk once: the files beside it are links to those in it.
    Training resumes from it on any layout.

    Raises:
        TypeError: the model is not parallel.
        ValueError: an argument is not served, or the trainer sees other ranks than the mesh.
        RuntimeError: transformers is older than 5.23.
        NotImplementedError: TRL's trainer is neither ``SFTTrainer`` nor ``DPOTrainer``, or
            ``model_init`` was given.
    """

    model: nn.Module
    args: transformers.TrainingArguments
    _random_states: Mapping[str, torch.Tensor] | None = None  # of the checkpoint that was loaded

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        check_class(self)
        check_given(self, args, kwargs)
        run_extensions()  # of what was imported after the model was loaded
        super().__init__(*args, **kwargs)
        remember(self)
        check_served(self)

    def call_model_init(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse a function that makes the model; see :func:`refuse_model_init`."""
        refuse_model_init(self)

    @property
    def _mesh(self) -> Mesh:
        return state_of(self.model).mesh

    # --- What the single process would count ---

    def get_tp_size(self) -> int:
        """Return the number of processes that get the same rows."""
        return self._mesh.tp_size

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """Compute the loss, times dp where it is of a rank's logits; the model's is the job's."""
        of_rank = self._mesh.dp_size > 1 and self._computes_losses
        if of_rank and num_items_in_batch is None:
            # In an evaluation it would be divided by the labels of this rank, and not of the batch.
            num_items_in_batch = self._get_num_items_in_batch([inputs], self.args.device)
            self.current_gradient_accumulation_steps = 1
        asked = self.args.average_tokens_across_devices
        self.args.average_tokens_across_devices = of_rank
        try:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        finally:
            self.args.average_tokens_across_devices = asked

    @property
    def _computes_losses(self) -> bool:
        """Return whether losses are computed from the logits of a rank, and not by the model."""
        own = self.compute_loss_func is not None or self.label_smoother is not None
        return own or class_of_trl(self) == "SFTTrainer"

    def training_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        """Run forward and backward; under ``px.Invariant`` those of a step's batches together."""
        step = super().training_step
        if not state_of(model).trains_by_leaves:
            return step(model, inputs, num_items_in_batch)
        self._tr_loss = self._tr_loss.double()  # whose mean over ranks is exact
        self._batches.append(inputs)
        if not self.accelerator.sync_gradients:
            return self._tr_loss.new_zeros(())
        batches, self._batches = self._batches, []
        return run_leaves(
            model,
            batches,
            self.args.train_batch_size,
            lambda batch: step(model, batch, num_items_in_batch),
            self.compute_loss_context_manager,
        )

    def _get_num_items_in_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Count the labels of all dp ranks, of whom each tp rank is asked once."""
        items = super()._get_num_items_in_batch(*args, **kwargs)
        if not torch.is_tensor(items):
            return items
        # The trainer divides by the number of tp ranks, as if it had asked each of them.
        items = (items * self.get_tp_size()).round()
        if not self.args.average_tokens_across_devices and self._mesh.dp_size > 1:
            items = self.accelerator.gather(items).sum()
        return items

    def get_batch_samples(
        self, epoch_iterator: Iterator[dict[str, Any]], *args: Any, **kwargs: Any
    ) -> Any:
        """Take the batches of a step, without the labels of rows that fill up the last one."""
        size = self.args.train_batch_size
        batches = (self._without_filling(each, "training", size) for each in epoch_iterator)
        return super().get_batch_samples(batches, *args, **kwargs)

    def floating_point_ops(self, inputs: dict[str, Any]) -> float:
        """Return this rank's share of the operations, which the trainer adds up over all ranks."""
        return super().floating_point_ops(inputs) / self.get_tp_size()

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """Make the optimizer, with the groups of parameters of any layout.

        The trainer has one group more for each mesh of parameters, with which training could not
        resume on a layout of other meshes. torch's optimizers know parameters of all meshes.
        """
        given, trained = self.optimizer, [p for p in self.model.parameters() if p.requires_grad]
        optimizer = super().create_optimizer(*args, **kwargs)
        if given is None and len({getattr(p, "device_mesh", None) for p in trained}) > 1:
            names = set(self.get_decay_parameter_names(self.model))
            decayed = {p for name, p in self.model.named_parameters() if name in names}
            _join_groups(optimizer, decayed, self.args.weight_decay)
        return optimizer

    def _has_mixed_mesh_grads(self, model: nn.Module) -> bool:
        return False  # torch.nn.utils.clip_grad_norm_ knows parameters of all meshes

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave the model where its mesh has put it."""

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> Any:
        """Evaluate one batch, without the rows that fill up the last one, on all dp ranks.

        Raises:
            ValueError: at dp > 1 the logits of a mixture's routers are to be predicted.
        """
        if not prediction_loss_only:
            self._refuse_router_logits(inputs, ignore_keys or [])
        inputs = self._without_filling(inputs, "evaluation", self.args.eval_batch_size)
        loss, logits, labels = super().prediction_step(
            model, inputs, prediction_loss_only, ignore_keys
        )
        if loss is not None and self._mesh.dp_size > 1:
            loss = self.accelerator.reduce(loss, "mean")
        return loss, logits, labels

    def _refuse_router_logits(self, inputs: dict[str, Any], ignore_keys: list[str]) -> None:
        """Raise if dp ranks would put together what has a row for each token, and not for each row.

        Raises:
            ValueError: they would.
        """
        state, left_out = state_of(self.model), ["router_logits", "aux_loss"]
        if self._mesh.dp_size == 1 or set(left_out) <= set(ignore_keys):
            return
        if wants_balance(model_of(self.model), state, inputs):
            raise ValueError(
                f"{type(self).__name__}: router_logits and aux_loss have no row for each sample, "
                f"so dp={self._mesh.dp_size} ranks cannot put them together; pass ignore_keys="
                f"{['past_key_values', *left_out]} to evaluate and predict, and as "
                "ignore_keys_for_eval to train"
            )

    def _without_filling(self, inputs: dict[str, Any], what: str, size: int) -> dict[str, Any]:
        """Return a batch without the labels of rows that are there a second time.

        accelerate repeats rows so that the last batches of all dp ranks have the same size, and
        drops them from what is gathered. The loss of the job must not see them either.

        Args:
            inputs: the batch.
            what: that it is for, in the error.
            size: the rows of its loader's batches.

        Raises:
            ValueError: there are such rows, whose labels cannot say so.
        """
        state, labels = self.accelerator.gradient_state, inputs.get("labels")
        filled = state.end_of_dataloader and state.remainder > 0 and self.accelerator.even_batches
        if self._mesh.dp_size == 1 or not filled:
            return inputs
        rows = size // self._mesh.dp_size if self.accelerator.split_batches else size
        of_dpo = class_of_trl(self) == "DPOTrainer"
        if not of_dpo and not torch.is_tensor(labels):
            return inputs
        # Numbers that a regression is to meet cannot say that they do not count, and of rows in one
        # sequence nobody sees which are there a second time.
        if of_dpo or labels.is_floating_point() or len(labels) != rows:
            at_once = rows * self._mesh.dp_size
            raise ValueError(
                f"{type(self).__name__}: the {what} would count rows twice, which fill up the last "
                f"batch of the dp={self._mesh.dp_size} ranks; choose a dataset of a multiple of "
                f"{at_once} rows, or dataloader_drop_last=True"
            )
        own = max(0, state.remainder - self._mesh.dp_rank * rows)
        labels = labels.clone()
        labels[own:] = -100
        return {**inputs, "labels": labels}

    # --- Files ---

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        """Write the model's HuggingFace or PEFT directory; every rank calls it."""
        output_dir = self.args.output_dir if output_dir is None else output_dir
        call_together(
            self, "write_directory", (output_dir,), {}, lambda: self.write_directory(output_dir)
        )

    def write_directory(self, output_dir: str | os.PathLike[str]) -> None:
        """Write the model, the tokenizer and the arguments to a directory; every rank calls it."""
        self.model.save_pretrained(output_dir)
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
            if self.args.should_save and checkpoint.exists():
                shutil.rmtree(checkpoint)

        control.run_on_all("save_model", make_room)
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

    # --- Resuming ---

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any):
        """Train, perhaps from a checkpoint of any layout; with True from the last complete one."""
        if resume_from_checkpoint is True:
            # With True the trainer then says that there is none.
            resume_from_checkpoint = self._last_checkpoint() or True
        if state_of(self.model).trains_by_leaves:
            self._mesh.control.run_on_all("train", lambda: check_leaves(self))
        self._batches = []
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _last_checkpoint(self) -> str | None:
        """Return the newest checkpoint that was not interrupted, as rank 0 sees it."""

        def find() -> str | None:
            folders = Path(self.args.output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*")
            matches = {p: re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)", p.name) for p in folders}
            numbers = {path: int(match[1]) for path, match in matches.items() if match}
            newest_first = sorted(numbers, key=numbers.__getitem__, reverse=True)
            return next((str(path) for path in newest_first if _is_complete(path)), None)

        found = self._mesh.control.run_on_all("train", find)
        return self._mesh.control.all_gather_object(found)[0]

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load nothing yet: the weights come with the optimizer, once that is there."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        root = Path(checkpoint) / _FOLDER
        path = self._mesh.control.run_on_all("train", lambda: _step_in(root))
        optimizer, scheduler = unwrapped(self.optimizer), self.lr_scheduler
        if not any((path / STATE_FOLDER).glob("optim-*")):  # of save_only_model
            optimizer = scheduler = None
        self._mesh.control.run_on_all("train", lambda: self._check_rows(path))
        load_checkpoint(root, self.model, optimizer, scheduler)
        self._random_states = rng.capture(self._mesh)

    def _check_rows(self, path: Path) -> None:
        """Raise if the steps of a checkpoint had another number of rows, before it is loaded.

        Raises:
            ValueError: they had, so that other rows would be left out than were trained on.
        """
        data_state = read_small_files(path, read_manifest(path))["data_state"]
        then, now = data_state["rows_of_a_step"], self.get_total_train_batch_size(self.args)
        if then != now and not self.args.ignore_data_skip:
            raise ValueError(
                f"train: the checkpoint was made with {then} rows a step, but this run has {now}: "
                f"per_device_train_batch_size={self.args.per_device_train_batch_size} times "
                f"gradient_accumulation_steps={self.args.gradient_accumulation_steps} times "
                f"dp={self._mesh.dp_size}; choose them so that the product is {then}, or pass "
                "ignore_data_skip=True, which begins with the first row again"
            )

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Set the random numbers to those of the checkpoint, after the skipped rows drew some."""
        if self._random_states is not None:
            rng.restore(self._random_states, self._mesh)

    def _load_best_model(self) -> None:
        states = rng.capture(self._mesh)
        load_checkpoint(Path(self.state.best_model_checkpoint) / _FOLDER, self.model)
        rng.restore(states, self._mesh)

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse to search.

        Raises:
            NotImplementedError: always: each trial needs a new model on all ranks.
        """
        raise NotImplementedError(
            f"{type(self).__name__}.hyperparameter_search is not supported: start a job for each "
            "trial"
        )


class Trainer(TrainerMixin, transformers.Trainer):
    """HuggingFace's ``Trainer`` for a parallel model; see :class:`TrainerMixin`.

    Example:
        >>> trainer = Trainer(model, args, train_dataset=rows)  # doctest: +SKIP
        >>> trainer.train(resume_from_checkpoint=True)  # doctest: +SKIP
    """


def _join_groups(
    optimizer: torch.optim.Optimizer, decayed: set[nn.Parameter], weight_decay: float
) -> None:
    """Leave an optimizer two groups, of parameters whose weights decay and of others."""
    groups, options = optimizer.param_groups, optimizer.param_groups[0]
    with_decay = {**options, "params": [], "weight_decay": weight_decay}
    without = {**options, "params": [], "weight_decay": 0.0}
    for group in groups:
        for parameter in group["params"]:
            (with_decay if parameter in decayed else without)["params"].append(parameter)
    groups[:] = [with_decay, without]


def _link_files(source: Path, target: Path) -> None:
    """Put the files of a directory, without its folders, into another: one copy on the disk."""
    for file in source.iterdir():
        if file.is_file() and file.name != COMMIT_NAME:
            try:
                os.link(file, target / file.name)
            except OSError:  # of a file system without hard links
                os.symlink(file.relative_to(target), target / file.name)


def _step_in(root: Path) -> Path:
    """Return the directory that ``px.save_checkpoint`` has written below a root.

    Raises:
        CheckpointError: there is none.
    """
    path = latest_checkpoint(root)
    if path is None:
        raise CheckpointError(
            f"{root.parent} is no complete checkpoint of px.Trainer; px.from_pretrained reads the "
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
