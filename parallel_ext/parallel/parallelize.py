"""``parallelize``: walks a model by its table, replaces modules, attaches the run-time methods."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import wraps
from types import MethodType
from typing import Any

import transformers
from torch import nn

from parallel_ext.distributed.mesh import Mesh, check_mesh
from parallel_ext.models.blocks import RegionNames
from parallel_ext.models.spec import ModelSizes, ModelTable, plan
from parallel_ext.nn.sharded_module import persistent_buffers
from parallel_ext.parallel import methods
from parallel_ext.parallel.extending import run_extensions
from parallel_ext.parallel.input_agreement import Agreement
from parallel_ext.parallel.replace import enter_and_leave, replace_modules
from parallel_ext.parallel.resize import resize_token_embeddings
from parallel_ext.parallel.state import STATE_NAME, ParallelState, Remembered, check_state_dict
from parallel_ext.parallel.validate import (
    check_equal,
    check_mixture,
    check_names,
    check_plain,
    check_servable,
    check_unsharded,
    table_for,
)
from parallel_ext.sharding.layout import ModelLayout, TensorLayout


def parallelize(
    model: transformers.PreTrainedModel,
    mesh: Mesh,
    *,
    vocab_multiple_of: int = 1,
    training_logits: bool = False,
    agreement: bool = True,
    allow_different_dropout: bool = False,
) -> transformers.PreTrainedModel:
    """Shard a HuggingFace model that every rank holds in memory over the ranks, in place.

    Every rank calls it with the same model. Afterwards each rank holds its heads, its part of each
    MLP or its experts, and its rows of the vocabulary; norms and routers are replicated. Names,
    ``config`` and the results of ``forward``, ``generate`` and ``save_pretrained`` stay those of
    the whole model.

    Args:
        model: a model whose ``config.model_type`` has a table (``llama``, ``mixtral``,
            ``qwen3_moe``, ``cogagent``), with equal weights on all ranks. Its modules are replaced,
            so optimizers are built afterwards.
        mesh: from :func:`parallel_ext.init_mesh`.
        vocab_multiple_of: boundaries between the ranks' vocabulary rows are multiples of this.
        training_logits: gather ``logits`` in training with labels as well, where they are None
            otherwise.
        agreement: compare the inputs over the tp ranks before each forward (32 bytes a rank). On
            GPUs the values are compared one forward later, without a synchronisation.
        allow_different_dropout: accept ``attention_dropout`` under tp > 1, whose masks are drawn
            per rank and differ from those of a single process. The noise of
            ``router_jitter_noise`` needs tp ranks with equal seeds; each forward checks it.

    Returns:
        ``model``.

    Raises:
        ValueError: the model cannot be sharded so; one error, on all ranks, before anything
            changes.
        DisagreementError: the ranks' models or options differ.
        CollectiveTimeout: not all ranks called it.

    Example:
        >>> model = parallelize(model, init_mesh(tp=2))  # doctest: +SKIP
    """
    check_mesh("parallelize", mesh)
    mesh.control.barrier("parallelize")
    run_extensions()

    def prepare() -> tuple[ModelTable, ModelLayout]:
        table = table_for(model)
        check_names(model, table)
        check_unsharded(model)
        check_plain(model, table)
        check_servable(model, mesh, allow_different_dropout)
        check_mixture(model, table, mesh, agreement)
        return table, plan_of(model, table, mesh.tp_size, mesh.ep_size, vocab_multiple_of)

    table, layout = mesh.control.run_on_all("parallelize", prepare)
    check_equal(model, mesh, layout, (vocab_multiple_of, training_logits, agreement))
    partials, routings = replace_modules(model, table, layout, mesh)
    embedding = layout[f"{table.embedding}.weight"]
    checks = None
    if agreement and mesh.tp_size > 1:
        checks = Agreement(mesh, embedding.shape[0], deferred=mesh.device.type != "cpu")
    vocab_ranges = tuple(embedding.ranges(rank)[0] for rank in range(mesh.tp_size))
    _attach(
        model,
        table,
        ParallelState(
            *(mesh, table, layout, vocab_ranges, vocab_multiple_of),
            *(checks, training_logits, partials, routings),
        ),
    )
    _warn_of_uneven_vocabulary(embedding, mesh)
    return model


def plan_of(
    model: nn.Module,
    table: ModelTable,
    tp_size: int,
    ep_size: int = 1,
    vocab_multiple_of: int = 1,
) -> ModelLayout:
    """Plan the layout of every parameter and persistent buffer of a model, also one on meta.

    Args:
        model: of the architecture that ``table`` describes; nothing of it changes.
        table: the architecture.
        tp_size, ep_size, vocab_multiple_of: as of :func:`parallel_ext.models.spec.plan`.

    Raises:
        ValueError: the model cannot be sharded so.
    """
    names: dict[int, str] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    tied: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in names:
            tied[name] = names[id(parameter)]
        else:
            names[id(parameter)] = name
            shapes[name] = tuple(parameter.shape)
    config = model.config
    embedding, rows = f"{table.embedding}.weight", config.vocab_size
    for name in (embedding, f"{table.head}.weight"):
        shape = shapes[tied.get(name, name)]
        if shape[0] != rows:
            raise ValueError(
                f"parallelize: {name} has the shape {shape}, but config.vocab_size is {rows}; "
                f"expected ({rows}, {shape[1]})"
            )
    buffers = {name: tuple(buffer.shape) for name, buffer in persistent_buffers(model)}
    sizes = _sizes(model, table, shapes)
    layout = plan(table, {**shapes, **buffers}, tied, sizes, tp_size, ep_size, vocab_multiple_of)
    return replace(layout, buffers=frozenset(buffers))


def _sizes(
    model: nn.Module, table: ModelTable, shapes: Mapping[str, tuple[int, ...]]
) -> ModelSizes:
    config, blocks = model.config, table.blocks(shapes)
    heads_of = {
        path: getattr(model.get_submodule(path), block.heads)
        for path, block in blocks.items()
        if isinstance(block, RegionNames) and block.heads is not None
    }
    if table.attention is None:
        return ModelSizes(config.vocab_size, heads_of=heads_of)
    attention = next((path for path, block in blocks.items() if block is table.attention), None)
    return ModelSizes(
        config.vocab_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        1 if attention is None else model.get_submodule(attention).head_dim,
        heads_of,
    )


def _in_place_of(cls: type, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a run-time function with the signature of the class's method of the same name."""

    @wraps(getattr(cls, function.__name__))
    def method(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return function(model, *args, **kwargs)

    return method


def _attach(
    model: transformers.PreTrainedModel,
    table: ModelTable,
    state: ParallelState,
) -> None:
    """Bind the run-time methods to this instance; let hidden states enter the parallel parts."""
    setattr(model, STATE_NAME, state)
    model.parallel_ext_remembered = Remembered(model)
    model.register_load_state_dict_pre_hook(check_state_dict)
    mesh = state.mesh
    model.loss_function = MethodType(methods.loss_function, model)
    for function in (
        *(methods.forward, methods.generate, methods.save_pretrained, methods.num_parameters),
        resize_token_embeddings,
    ):
        name = function.__name__
        if hasattr(model, name):  # published code of before transformers 5 does not generate
            setattr(model, name, MethodType(_in_place_of(type(model), function), model))
    state.own_forward = model.forward.__func__
    methods.watch_forward(model)
    if mesh.world_size > 1:
        model._ddp_params_and_buffers_to_ignore = methods.AskedByDDP(state)
    enter_and_leave(model, table, state.layout, mesh)
    if mesh.device.type == "cuda" and not next(model.parameters()).is_meta:
        model.to(mesh.device)


def _warn_of_uneven_vocabulary(embedding: TensorLayout, mesh: Mesh) -> None:
    rows = [embedding.local_shape(rank)[0] for rank in range(mesh.tp_size)]
    if mesh.rank == 0 and len(set(rows)) > 1:
        warnings.warn(
            f"the vocabulary of {embedding.shape[0]} rows is not divisible by tp={mesh.tp_size}: "
            f"the ranks hold {', '.join(map(str, rows))} rows. Results and files are exact",
            stacklevel=3,
        )
