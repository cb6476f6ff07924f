"""Data parallelism of a parallel model, with sharded gradients and parameters."""

from __future__ import annotations

from functools import partial
from types import MethodType
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn

from parallel_ext.distributed.mesh import Mesh, check_mesh
from parallel_ext.nn.grad_sync import PartialGradients
from parallel_ext.nn.stale_parameters import refuse_gradient_hooks
from parallel_ext.parallel.beside import (
    Beside,
    check_equal_beside,
    parameters_beside,
    tell_labels,
    whole_and_shards,
)
from parallel_ext.parallel.extending import called_by_this_package
from parallel_ext.parallel.head_beside import shards_beside
from parallel_ext.parallel.state import ParallelState, model_of, state_of
from parallel_ext.sharding.named_shards import to_shards
from parallel_ext.training.called_alone import CalledAlone
from parallel_ext.training.fsdp_shards import shard_over_dp
from parallel_ext.training.gradients_of_inputs import on_any_rank

M = TypeVar("M", bound=nn.Module)


def data_parallel(model: M, mesh: Mesh, zero: int = 2) -> M:
    """Let the dp ranks of a parallel model train one model together, in place.

    Every rank calls it, after :func:`parallel_ext.parallelize` (and after adapters were added), and
    before the optimizer is built. Every dp rank then trains on its own batches. The gradients that
    ``backward()`` leaves are those of the loss of all of them; each rank holds its rows of them,
    and of the optimizer's state, as DTensors. Dense parameters are sharded over the dp ranks,
    experts over the edp ranks; trainable parameters of adapters stay whole, and their gradients are
    averaged at the end of ``backward()``: in one flat all-reduce, and one more for those of
    experts. So are those of the parameters beside the model, where ``model`` is a module of your
    own that holds it. With ``mesh.dp_size == 1`` nothing changes.

    Under ``px.Invariant`` all dp ranks have one batch, whose leaves :func:`train_leaves` runs.

    Args:
        model: a parallel model, perhaps inside PEFT's, or a module that holds one.
        mesh: the mesh that it was made parallel with.
        zero: 2 keeps the gathered parameters from forward to backward; 3 gathers them again.

    Returns:
        ``model``.

    Raises:
        TypeError: the model was not parallelized before, or no mesh was given.
        ValueError: another mesh, another stage, parameters with gradient hooks, or a model that is
            data parallel already, with nothing beside it; on all ranks.
        DisagreementError: ranks hold other parameters beside the model.
        RuntimeError: with several dp ranks, torch is older than 2.13.
        CollectiveTimeout: not all ranks called it.

    Source: ``torch.distributed.fsdp.fully_shard``; the stages are those of ZeRO (arXiv 1910.02054).

    Example:
        >>> model = data_parallel(model, mesh, zero=3)  # doctest: +SKIP
    """
    check_mesh("data_parallel", mesh)
    mesh.control.barrier("data_parallel")

    def prepare() -> tuple[nn.Module, ParallelState, Beside]:
        if mesh.dp_size > 1:
            _check_torch()
        own, state = model_of(model), state_of(model)
        if state.mesh is not mesh:
            raise ValueError(f"data_parallel: this model was parallelized with {state.mesh!r}")
        if zero not in (2, 3):
            raise ValueError(f"data_parallel: zero must be 2 or 3, got {zero!r}")
        beside = parameters_beside(model)
        again = state.zero == zero and beside  # new ones, perhaps
        if state.zero is not None and not again:
            raise ValueError(f"data_parallel: this model is already, with zero={state.zero}")
        if state.reduced_by_caller:
            raise ValueError("data_parallel: px.no_data_parallel was called on this model")
        if state.invariant is not None and beside:
            raise ValueError(
                f"data_parallel: px.Invariant does not serve {next(iter(beside))} beside the model"
            )
        if mesh.dp_size > 1:
            _check_embeddings(model, own, state)
            for name, parameter in own.named_parameters():
                refuse_gradient_hooks("data_parallel", name, parameter)
        return own, state, beside

    own, state, beside = mesh.control.run_on_all("data_parallel", prepare)
    whole, shards = whole_and_shards(beside)
    average_beside(whole, mesh, state.partials, "data_parallel")  # it raises where they differ
    if mesh.dp_size > 1 and state.partials is not None:
        sharded = (*shards.values(), *shards_beside(own).values())
        state.partials.average_beside(dict.fromkeys(each for each, _ in sharded), mesh.dp)
    if mesh.dp_size > 1 and state.zero is None:
        plain_class = type(own)
        with called_by_this_package():
            shard_over_dp(own, state, zero)
        if state.spec.skips is not None:
            owner, _, method = state.spec.skips.rpartition(".")
            setattr(own.get_submodule(owner), method, partial(on_any_rank, mesh))
        for module in {own, model}:  # perhaps inside PEFT's
            module.zero_grad = MethodType(_zero_grad, module)
        own.set_requires_gradient_sync = _refuse_gradient_sync
        own.__deepcopy__ = _refuse_copy
        _keep_name(type(own), plain_class)
        leaves = state.leaf_sums is not None
        CalledAlone(own, state.spec.ends, state.spec.layers, mesh, leaves)
    state.zero = zero
    tell_labels(model)
    return model


def _check_embeddings(model: nn.Module, own: nn.Module, state: ParallelState) -> None:
    """Raise if a class of transformers around the decoder calls more of it than its embedding."""
    path = state.spec.layer_embedding_in(state.layout)
    if path and model is not own and type(model).__module__.startswith("transformers."):
        raise NotImplementedError(
            f"data_parallel: {type(model).__name__} calls {path} of its decoder itself, "
            "outside of the forward for which dp ranks gather it; use dp=1, or train the decoder "
            "of text alone, as transformers.AutoModelForCausalLM loads it"
        )


def average_beside(
    parameters: dict[str, nn.Parameter], mesh: Mesh, sums: PartialGradients | None, op_name: str
) -> None:
    """Let each backward end with the dp ranks' mean of the gradients of further parameters.

    Every rank calls it; it raises where they hold other values.

    Args:
        parameters: by name, of no parallel model, such as those of a head of the user's own.
        sums: of the parallel model that is trained with them, if there is one.
    """
    if parameters:
        check_equal_beside(parameters, mesh, op_name)
    if parameters and mesh.dp_size > 1:
        sums.average_beside(parameters.values(), mesh.dp)


def no_data_parallel(model: M) -> M:
    """Allow training whose gradients the caller averages over the dp ranks.

    Without :func:`data_parallel` each dp rank would train a model of its own. The loss of a dp rank
    is its share of that of the job times the number of dp ranks, so that the mean of the dp ranks'
    gradients is the gradient of the job: all-reduce every ``.grad`` over ``mesh.dp`` and divide by
    ``mesh.dp_size`` before ``optimizer.step()``. Every rank calls it. With ``mesh.dp_size == 1``
    nothing changes.

    Args:
        model: a parallel model, perhaps inside PEFT's.

    Returns:
        ``model``.

    Raises:
        TypeError: the model was not parallelized.
        ValueError: it is data parallel already, or a mixture whose experts are sharded over ranks
            of several dp ranks, whose gradients only ``data_parallel`` can sum; on every rank.
        CollectiveTimeout: not all ranks called it.

    Example:
        >>> model = no_data_parallel(model)  # doctest: +SKIP
    """
    state = state_of(model)
    mesh, op_name = state.mesh, "no_data_parallel"
    mesh.control.barrier(op_name)
    if state.zero is not None:
        raise ValueError(f"{op_name}: px.data_parallel was called on this model")
    if state.experts_span_dp:
        raise ValueError(
            f"{op_name}: at dp={mesh.dp_size}, tp={mesh.tp_size}, ep={mesh.ep_size} gradients of "
            "experts have parts on several dp ranks; use px.data_parallel(model, mesh)"
        )
    state.reduced_by_caller = True
    return model


def _check_torch() -> None:
    from torch.distributed.fsdp import FSDPModule

    if not hasattr(FSDPModule, "reset_iter_state"):
        raise RuntimeError(
            f"data_parallel needs the fully_shard of torch 2.13 or newer; this is torch "
            f"{torch.__version__}"
        )


def _zero_grad(model: nn.Module, set_to_none: bool = True) -> None:
    """Run the class's own ``zero_grad`` on the shards.

    Between forward and backward it would find the gathered parameters, and leave the gradients of
    the step before.
    """
    to_shards(model)
    type(model).zero_grad(model, set_to_none)


def _refuse_gradient_sync(*args: Any, **options: Any) -> NoReturn:
    raise NotImplementedError(
        "set_requires_gradient_sync is not supported after px.data_parallel; use "
        "with px.no_sync(model): backwards inside it hold their gradients back"
    )


def _keep_name(fsdp_class: type, plain_class: type) -> None:
    """Let FSDP's subclass be named as the class, which libraries decide by and write to files."""
    for name in ("__module__", "__name__", "__qualname__"):
        setattr(fsdp_class, name, getattr(plain_class, name))


def _refuse_copy(memo: dict[int, Any]) -> NoReturn:
    raise NotImplementedError(
        "copy.deepcopy is not supported on a parallel model after px.data_parallel; "
        "px.full_state_dict(model) gathers full tensors, and an average of weights can be kept of "
        "clones of this rank's shards, model.parameters()"
    )
