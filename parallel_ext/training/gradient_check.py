"""Compare the gradients of a parallel model with those of the single-process model."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from parallel_ext import ops
from parallel_ext.distributed.mesh import Mesh
from parallel_ext.distributed.require_equal import require_equal
from parallel_ext.models.sublayers import AttentionNames
from parallel_ext.nn.loss import LOSS_OPTIONS
from parallel_ext.nn.temporarily import first_layers, temporarily
from parallel_ext.parallel.joining import arrive
from parallel_ext.parallel.state import ParallelState, model_of, state_of
from parallel_ext.parallel.validate import is_decoder
from parallel_ext.sharding.named_shards import named_shards, to_shards
from parallel_ext.sharding.reshard import gather_tensor
from parallel_ext.sharding.slices import local_part
from parallel_ext.training.left_as_found import gradients_aside

_log = logging.getLogger("parallel_ext")


@dataclass(frozen=True)
class GradientReport:
    """The differences between a parallel model and the single-process model on one batch.

    Attributes:
        loss, single_process_loss: of the job's whole batch.
        differences: HuggingFace name -> max |ours - theirs| / max |theirs| of the gradient.
    """

    loss: float
    single_process_loss: float
    differences: Mapping[str, float]

    @property
    def worst(self) -> tuple[str, float]:
        """Return the name with the largest difference, and the difference."""
        return max(self.differences.items(), key=lambda item: item[1])

    def __str__(self) -> str:
        name, difference = self.worst
        return (
            f"loss {self.loss:.6f}, single process {self.single_process_loss:.6f}; "
            f"{len(self.differences)} gradients, largest relative difference {difference:.1e} "
            f"({name})"
        )


def check_gradients(
    model: nn.Module, batch: Mapping[str, Any], layers: int | None = None
) -> GradientReport:
    """Compare loss and gradients on ``batch`` with the single-process model.

    Every rank calls it. Rank 0 builds the unsharded model from the gathered weights and runs it on
    the batches of all dp ranks, concatenated; it needs memory for the whole model twice (weights
    and gradients) and says so first. The unsharded model's cross entropy is taken in fp64 (that of
    a classifier as its class does): with 49,153 classes torch's fp32 one is itself 5e-4 off in the
    gradients. The model's own gradients are left as they were.

    Args:
        model: a parallel model.
        batch: ``input_ids``, ``labels`` and what else forward takes, [rows, tokens], of this dp
            rank; the dp ranks' must have equal lengths. Images as CogAgent takes them.
        layers: check only the first so many decoder layers, to save memory and time.

    Returns:
        The report, on every rank. In fp32 a difference below 1e-4 is rounding.

    Raises:
        TypeError: the model was not parallelized.
        NotImplementedError: the model has adapters, is a decoder without a loss of its own, the
            batch holds an option of the loss, or ``layers`` would cut some that share keys.
        RuntimeError: its routing is forced, which the single process' is not.
        CollectiveTimeout: not all ranks called it.
    """
    own, state = model_of(model), state_of(model)
    mesh = state.mesh
    arrive("check_gradients")
    mesh.control.barrier("check_gradients")
    mesh.control.run_on_all("check_gradients", lambda: _check(own, state, batch, layers))
    require_equal(mesh.control, "check_gradients", {"layers": layers})
    to_shards(own)
    by_caller = state.reduced_by_caller or not state.experts_span_dp
    with (
        first_layers(own, state.spec.layers, layers) as first,
        temporarily(own.config, num_hidden_layers=len(first)),
        temporarily(state, reduced_by_caller=by_caller),
        gradients_aside(own, state),
    ):
        loss = own(**batch).loss
        loss.backward()
        to_shards(own)
        ours = _gather(own, state, partial(_gradient_of_job, state=state))
        loss = _mean_over_dp(loss.detach(), mesh).item()
        needed = sum(layout.numel for _, _, layout in named_shards(own))
        if mesh.rank == 0:
            size = 2 * needed * next(own.parameters()).element_size() / 2**30
            _log.warning("check_gradients: rank 0 needs %.1f GiB for the whole model", size)
        weights = _gather(own, state, lambda parameter: local_part(parameter.detach()))
        batches = mesh.control.all_gather_object(dict(batch) if mesh.tp_rank == 0 else None)

        def compare() -> GradientReport | None:
            if mesh.rank != 0:
                return None
            return _compare(own, weights, [one for one in batches if one is not None], ours, loss)

        report = mesh.control.run_on_all("check_gradients", compare, patient=True)
    return mesh.control.all_gather_object(report, GradientReport)[0]


def _compare(
    model: nn.Module,
    weights: Mapping[str, torch.Tensor],
    batches: list[Mapping[str, Any]],
    ours: Mapping[str, torch.Tensor],
    loss: float,
) -> GradientReport:
    """Run the plain class on all batches, and compare its gradients with ``ours``; on rank 0."""
    config = copy.deepcopy(model.config)
    with torch.random.fork_rng(devices=[]):  # its initial weights must not advance rank 0
        reference = type(model)(config).to(next(iter(weights.values())).dtype)
    values = {**dict(model.named_buffers()), **weights}  # aliases of tied weights are left out
    for name, tensor in (*reference.named_parameters(), *reference.named_buffers()):
        if name in values:
            tensor.data = values[name].to(tensor.device, copy=True)
    for name, part in model.named_modules():
        for key, value in vars(part).items():
            if key.endswith("max_seq_len_cached"):  # of dynamic rotary embeddings, which grow
                setattr(reference.get_submodule(name), key, value)
    reference.train(model.training)
    if state_of(model).spec.head is not None:  # else it classifies, by labels that are no ids
        reference.loss_function = _exact_loss
    names = dict.fromkeys(name for one in batches for name in one)
    expected = reference(**{name: _joined(name, batches) for name in names}).loss
    expected.backward()
    differences = {}
    for name, parameter in reference.named_parameters():
        if name in ours:
            theirs = torch.zeros(()) if parameter.grad is None else parameter.grad
            gap = (ours[name].double() - theirs.double()).abs().max()
            differences[name] = (gap / theirs.abs().max().double().clamp_min(1e-30)).item()
    return GradientReport(loss, expected.item(), differences)


_LEFT_OUT = {"attention_mask": 1, "token_type_ids": 0}
"""What each token is taken for where an argument is not given."""


def _joined(name: str, batches: list[Mapping[str, Any]]) -> Any:
    """Join one argument of all batches; images become a list of the images of each row."""
    values = [one.get(name) for one in batches]
    of_tokens = any(isinstance(value, torch.Tensor) and value.dim() == 2 for value in values)
    if of_tokens and any(value is None for value in values):
        if name not in _LEFT_OUT:
            raise ValueError(
                f"check_gradients: {name} is given on some dp ranks only; give it on all or on none"
            )
        values = [
            torch.full_like(one["input_ids"], _LEFT_OUT[name]) if value is None else value
            for value, one in zip(values, batches, strict=True)
        ]
    if all(isinstance(value, torch.Tensor) and value.dim() > 0 for value in values):
        return torch.cat([value.cpu() for value in values])
    if not any(isinstance(value, (list, torch.Tensor)) for value in values):
        return values[0]
    rows: list[list[torch.Tensor]] = []
    for value, one in zip(values, batches, strict=True):
        if value is None:
            rows += [[] for _ in one["input_ids"]]
        else:
            rows += [[row.cpu()] if isinstance(row, torch.Tensor) else row for row in value]
    return rows


def _exact_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    vocab_size: int,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    **_: object,
) -> torch.Tensor:
    """Compute HuggingFace's causal language model loss in fp64."""
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    total = nn.functional.cross_entropy(
        logits.double().flatten(0, -2),
        shift_labels.flatten(),
        ignore_index=ignore_index,
        reduction="mean" if num_items_in_batch is None else "sum",
    )
    return total if num_items_in_batch is None else total / num_items_in_batch


def _mean_over_dp(tensor: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    return ops.reduce_from_region(tensor, mesh.dp) / mesh.dp_size


def _gradient_of_job(parameter: nn.Parameter, state: ParallelState) -> torch.Tensor | None:
    if parameter.grad is None:
        return None
    if state.zero is not None:
        return local_part(parameter.grad)
    return _mean_over_dp(parameter.grad, state.mesh)


def _gather(
    model: nn.Module,
    state: ParallelState,
    value_of: Callable[[nn.Parameter], torch.Tensor | None],
) -> dict[str, torch.Tensor]:
    """Gather full tensors by HuggingFace name on rank 0; other ranks get an empty dict."""
    gathered = {}
    for _, parameter, layout in named_shards(model):
        value = value_of(parameter)
        if value is None:  # the gradient of a frozen parameter
            continue
        full = gather_tensor(value, layout, state.mesh, receivers=(0,))
        if full is not None and state.mesh.rank == 0:
            gathered[state.layout.tied.get(layout.name, layout.name)] = full
    return gathered


def _check(
    model: nn.Module, state: ParallelState, batch: Mapping[str, Any], layers: int | None
) -> None:
    """Raise unless the gradients of this model and batch can be checked."""
    if any(".base_layer." in name for name, _ in model.named_parameters()):
        raise NotImplementedError(
            "check_gradients of a model with adapters is not supported: check the model before "
            "they are added, or after merge_and_unload"
        )
    if is_decoder(model):
        raise NotImplementedError(
            f"check_gradients: {type(model).__name__} is a decoder without a loss of its own: "
            "train a step of it, or of the model around it, and compare px.full_state_dict with "
            "what one process has after that step"
        )
    if any(routing.rule is not None for routing in state.routings):
        raise RuntimeError(
            "check_gradients: the routing is forced, but the single-process model chooses by its "
            "router; call px.force_routing(model, None) first"
        )
    if options := [name for name in LOSS_OPTIONS if name in batch]:
        raise NotImplementedError(
            f"check_gradients does not take {', '.join(options)}: the single-process model's loss "
            "has no such option; leave it out"
        )
    all_layers = len(model.get_submodule(state.spec.layers))
    if layers is not None and not 1 <= layers <= all_layers:
        raise ValueError(f"check_gradients: layers={layers} is not in 1 to {all_layers}")
    if layers in (None, all_layers):
        return
    attentions = state.spec.sublayers(state.layout).values()
    shares_keys = any(isinstance(each, AttentionNames) and each.key is None for each in attentions)
    if shares_keys or state.spec.layer_embedding_in(state.layout):
        raise NotImplementedError(
            f"check_gradients: layers={layers} of a {state.spec.model_type!r} whose layers share "
            "keys, or an embedding with columns for each, would be another model; leave it out"
        )
