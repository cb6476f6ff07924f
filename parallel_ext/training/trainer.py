"""HuggingFace's ``Trainer`` around a parallel model: the training of the single process.

What a trainer asks of accelerate (loaders, gathering, accumulation, clipping) is served by
:mod:`parallel_ext.interplay.accelerate`; here is what it counts by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import torch
import transformers
from accelerate.data_loader import DataLoaderDispatcher
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from parallel_ext.nn.temporarily import temporarily
from parallel_ext.parallel.beside import is_around
from parallel_ext.parallel.extending import run_extensions
from parallel_ext.parallel.joining import arrive, remember
from parallel_ext.parallel.loss_call import wants_balance
from parallel_ext.parallel.state import model_of, state_of
from parallel_ext.training.trainer_checks import (
    WITHOUT_LABELS,
    check_class,
    check_given,
    check_served,
    class_of_trl,
    refuse_model_init,
)
from parallel_ext.training.trainer_files import TrainerFiles
from parallel_ext.training.trainer_leaves import check_leaves, run_leaves


class TrainerMixin(TrainerFiles):
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
        NotImplementedError: TRL's trainer is not served, or ``model_init`` was given.
    """

    current_gradient_accumulation_steps = 1  # of an evaluation, until a training sets its own

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
        """Compute the loss, times dp where it is of a rank's logits; the model's is the job's.

        A module around the model may divide by ``num_items_in_batch``, or take a mean. For the mean
        of the dp ranks' losses to be that of one process it is given that number over dp.
        """
        of_rank = times_dp = self._mesh.dp_size > 1 and self._computes_losses
        steps = self.current_gradient_accumulation_steps
        if of_rank and num_items_in_batch is None:
            # It would be divided by the labels of this rank, and not of the batch.
            num_items_in_batch, steps = self._get_num_items_in_batch([inputs], self.args.device), 1
            if num_items_in_batch is None:
                num_items_in_batch, times_dp = self._count_labels(inputs)
        around = not of_rank and is_around(self.model)
        if around and num_items_in_batch is not None:
            num_items_in_batch = num_items_in_batch / self._mesh.dp_size
        with (
            temporarily(self, current_gradient_accumulation_steps=steps),
            temporarily(self.args, average_tokens_across_devices=times_dp),
            temporarily(state_of(model), counts_share=around),
        ):
            share = self._share_of_labels(inputs)
            computed = super().compute_loss(
                model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
            )
        if share is None:
            return computed
        loss, outputs = computed if return_outputs else (computed, None)
        loss = torch.where(share > 0, loss, 0.0) * share  # the mean of no label is not a number
        return (loss, outputs) if return_outputs else loss

    def _share_of_labels(self, inputs: dict[str, Any]) -> torch.Tensor | None:
        """Return what makes a dp rank's mean over its labels its share of the job's, or None.

        Some of transformers' models of images, such as Qwen3-VL, take that mean of the logits of a
        parallel decoder, whatever number of labels they are given.
        """
        labels = inputs.get("labels")
        if self._mesh.dp_size == 1 or self.model_accepts_loss_kwargs or self._computes_losses:
            return None
        if not torch.is_tensor(labels) or labels.dim() < 2:
            return None
        model = self.accelerator.unwrap_model(self.model)
        model = model.get_base_model() if hasattr(model, "get_base_model") else model
        of_decoder = is_around(self.model) and state_of(model).spec.head is None
        if not (of_decoder and type(model).__module__.startswith("transformers.")):
            return None
        own = (labels[..., 1:] != -100).sum().float()  # as the class counts them
        return own / self.accelerator.reduce(own.clone(), "mean")

    def _count_labels(self, inputs: dict[str, Any]) -> tuple[torch.Tensor | None, bool]:
        """Count the labels of a class of which a trainer does not, as its forward takes no number.

        Returns:
            The number by which each dp rank divides its sum, and whether that is times dp then, as
            in TRL; transformers multiplies the losses only of classes that take a number.
        """
        labels = inputs.get("labels")
        if self.compute_loss_func is not None or not torch.is_tensor(labels):
            return None, True
        model = self.accelerator.unwrap_model(self.model)
        model = model.get_base_model() if hasattr(model, "get_base_model") else model
        of_trl, causal = class_of_trl(self), MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        if of_trl is not None or type(model).__name__ in causal:  # which shift the labels
            labels = labels[..., 1:]
        count = self.accelerator.reduce((labels != -100).sum().float(), "sum")
        return (count, True) if of_trl is not None else (count / self._mesh.dp_size, False)

    @property
    def _computes_losses(self) -> bool:
        """Return whether losses are computed from the logits of a rank, and not by the model."""
        own = self.compute_loss_func is not None or self.label_smoother is not None
        return own or class_of_trl(self) == "SFTTrainer"

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any):
        """Train; under ``px.Invariant`` after a check that batches can be its leaves."""
        if state_of(self.model).trains_by_leaves:
            self._mesh.control.run_on_all("train", lambda: check_leaves(self))
        self._batches: list[dict[str, Any]] = []
        return super().train(resume_from_checkpoint, *args, **kwargs)

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

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        """Return the sampler of the job, which groups the rows of all dp ranks' steps by length."""
        of_job = self.args.gradient_accumulation_steps * self._mesh.dp_size
        with temporarily(self.args, gradient_accumulation_steps=of_job):
            return super()._get_train_sampler(*args, **kwargs)

    def _get_eval_sampler(self, *args: Any, **kwargs: Any) -> Any:
        """Return the sampler of an evaluation, which groups the rows of all dp ranks' batches."""
        of_job = self.args.per_device_eval_batch_size * self._mesh.dp_size
        with temporarily(self.args, per_device_eval_batch_size=of_job):
            return super()._get_eval_sampler(*args, **kwargs)

    def floating_point_ops(self, inputs: dict[str, Any]) -> float:
        """Return this rank's share of the operations, which the trainer adds up over all ranks."""
        return super().floating_point_ops(inputs) / self.get_tp_size()

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """End a training with the loss of all dp ranks, of whom each has added up its own."""
        if self._mesh.dp_size > 1:
            self._tr_loss = self.accelerator.reduce(self._tr_loss, "mean")
        return super()._finalize_training(*args, **kwargs)

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

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Log, save and evaluate, once a save that a callback has begun on one rank is joined."""
        arrive("the end of a step")
        return super()._maybe_log_save_evaluate(*args, **kwargs)

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
        """Evaluate one batch, without the rows that fill up the last one, on all dp ranks."""
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
        """Raise a ValueError if dp ranks would put together what has a row for each token."""
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
        """Return a batch in whose loss rows do not count that are there a second time.

        accelerate repeats rows so that the last batches of all dp ranks have the same size, and
        drops them from what is gathered. The loss of the job must not see them either.

        Args:
            what: that it is for, in the error.
            size: the rows of its loader's batches.

        Raises:
            ValueError: there are such rows, whose labels cannot say so.
        """
        state = self.accelerator.gradient_state
        filled = state.end_of_dataloader and state.remainder > 0 and self.accelerator.even_batches
        if self._mesh.dp_size == 1 or not filled:
            return inputs
        names = {"labels", "shift_labels", *self.label_names}
        labels = {name: each for name, each in inputs.items() if name in names}
        labels = {name: each for name, each in labels.items() if torch.is_tensor(each)}
        counts_all = class_of_trl(self) in WITHOUT_LABELS
        if not (labels or counts_all) and what == "evaluation":
            return inputs  # perhaps a prediction without a loss
        rows = size // self._mesh.dp_size if self.accelerator.split_batches else size
        if isinstance(state.active_dataloader, DataLoaderDispatcher):  # a short batch is cut, too
            rows = min([rows, *map(len, labels.values())])
        # Numbers that a regression is to meet cannot say that they do not count, and of rows in one
        # sequence nobody sees which are there a second time.
        countable = [not each.is_floating_point() and len(each) == rows for each in labels.values()]
        if counts_all or not labels or not all(countable):
            at_once = rows * self._mesh.dp_size
            raise ValueError(
                f"{type(self).__name__}: the {what} would count rows twice, which fill up the last "
                f"batch of the dp={self._mesh.dp_size} ranks; choose a dataset of a multiple of "
                f"{at_once} rows, or dataloader_drop_last=True"
            )
        own = max(0, state.remainder - self._mesh.dp_rank * rows)
        counted = {name: each.clone() for name, each in labels.items()}
        for each in counted.values():
            each[own:] = -100
        if wants_balance(model_of(self.model), state_of(self.model), inputs):
            mask, ids = inputs.get("attention_mask"), next(iter(labels.values()))
            counted["balance_mask"] = torch.ones_like(ids) if mask is None else mask.clone()
            counted["balance_mask"][own:] = 0
        return {**inputs, **counted}

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse to search: each trial needs a new model on all ranks."""
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
