"""``parallelize``: walks a model by its table, replaces modules, attaches the run-time methods."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from functools import partial, wraps
from types import MethodType
from typing import Any

import transformers
from torch import nn

from parallel_ext import ops, runtime
from parallel_ext.agreement import Agreement
from parallel_ext.layout import ModelLayout, TensorLayout
from parallel_ext.linear import ColumnParallelLinear, RowParallelLinear
from parallel_ext.mesh import Mesh
from parallel_ext.models.table import MixtureNames, MLPNames, ModelSizes, ModelTable, plan
from parallel_ext.moe import ExpertParallelExperts, Routing
from parallel_ext.ops import Group
from parallel_ext.partial_gradients import PartialGradients, UsedInParts
from parallel_ext.patch.checks import (
    check_equal,
    check_mixture,
    check_names,
    check_plain,
    check_servable,
    table_for,
)
from parallel_ext.sharded import take
from parallel_ext.stale_parameters import remember, replaced_by
from parallel_ext.state import STATE_NAME, ParallelState
from parallel_ext.vocab import VocabParallelEmbedding, VocabParallelHead


class CopyInput:
    """A forward pre-hook: the hidden states enter a tensor-parallel region here."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if args:
            return (ops.copy_to_tp(args[0], self.group), *args[1:]), kwargs
        return args, {
            **kwargs,
            "hidden_states": ops.copy_to_tp(kwargs["hidden_states"], self.group),
        }


def parallelize(
    model: transformers.PreTrainedModel,
    mesh: Mesh,
    *,
    vocab_multiple_of: int = 1,
    training_logits: bool = False,
    agreement: bool = True,
    allow_different_dropout: bool = False,
) -> transformers.PreTrainedModel:
    """Cut a HuggingFace model that every rank holds in memory over the ranks, in place.

    Every rank calls it with the same model. Afterwards each rank holds its heads, its part of each
    MLP or its experts, and its rows of the vocabulary; norms and routers are replicated. Names,
    ``config`` and the results of ``forward``, ``generate`` and ``save_pretrained`` stay those of
    the whole model.

    Args:
        model: a model whose ``config.model_type`` has a table (``llama``, ``mixtral``,
            ``qwen3_moe``), with equal weights on all ranks. Its modules are replaced, so optimizers
            are built afterwards.
        mesh: from :func:`parallel_ext.init_mesh`.
        vocab_multiple_of: boundaries between the ranks' vocabulary rows are multiples of this.
        training_logits: gather ``logits`` in training with labels as well, where they are None
            otherwise.
        agreement: compare the inputs over the tp ranks before each forward (32 bytes a rank). On
            GPUs the values are compared one forward later, without a synchronisation.
        allow_different_dropout: accept ``attention_dropout`` under tp > 1, whose masks are drawn
            per rank and differ from those of a single process. The noise of
            ``router_jitter_noise`` needs tp ranks that were seeded alike; each forward checks it.

    Returns:
        ``model``.

    Raises:
        ValueError: the model cannot be cut so; one error, on all ranks, before anything changes.
        DisagreementError: the ranks' models or options differ.
        CollectiveTimeout: not all ranks called it.

    Example:
        >>> model = parallelize(model, init_mesh(tp=2))  # doctest: +SKIP
    """
    mesh.meet("parallelize")
    if importlib.util.find_spec("peft"):  # whose classes then serve this model
        importlib.import_module("parallel_ext.lora")

    def prepare() -> tuple[ModelTable, ModelLayout]:
        table = table_for(model)
        check_names(model, table)
        check_plain(model, table)
        check_servable(model, mesh, allow_different_dropout)
        check_mixture(model, table, mesh, agreement)
        return table, _plan(model, table, mesh, vocab_multiple_of)

    table, layout = mesh.together("parallelize", prepare)
    check_equal(model, mesh, layout, (vocab_multiple_of, training_logits, agreement))
    partials, routings = _replace_modules(model, table, layout, mesh)
    embedding = layout[f"{table.embedding}.weight"]
    checks = None
    if agreement and mesh.tp_size > 1:
        checks = Agreement(mesh, embedding.shape[0], deferred=mesh.device.type != "cpu")
    vocab_ranges = tuple(embedding.ranges(rank)[0] for rank in range(mesh.tp_size))
    _attach(
        model,
        table,
        ParallelState(
            mesh, table, layout, vocab_ranges, checks, training_logits, partials, routings
        ),
    )
    _warn_of_uneven_vocabulary(embedding, mesh)
    return model


def _plan(model: nn.Module, table: ModelTable, mesh: Mesh, vocab_multiple_of: int) -> ModelLayout:
    names: dict[int, str] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    tied: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in names:
            tied[name] = names[id(parameter)]
        else:
            names[id(parameter)] = name
            shapes[name] = tuple(parameter.shape)
    config, layers = model.config, model.get_submodule(table.layers)
    embedding, rows = f"{table.embedding}.weight", config.vocab_size
    for name in (embedding, f"{table.head}.weight"):
        shape = shapes[tied.get(name, name)]
        if shape[0] != rows:
            raise ValueError(
                f"parallelize: {name} has the shape {shape}, but config.vocab_size is {rows}; "
                f"expected ({rows}, {shape[1]})"
            )
    head_dim = layers[0].get_submodule(table.attention).head_dim if len(layers) else 1
    sizes = ModelSizes(rows, config.num_attention_heads, config.num_key_value_heads, head_dim)
    return plan(
        table, shapes, tied, sizes, len(layers), mesh.tp_size, mesh.ep_size, vocab_multiple_of
    )


def _shard_of(old: nn.Parameter, layout: TensorLayout, rank: int) -> nn.Parameter:
    if layout.local_shape(rank) == layout.shape:
        return old
    new = nn.Parameter(take(old.data, layout, rank), requires_grad=old.requires_grad)
    if old.grad is not None:
        new.grad = take(old.grad, layout, rank)
    remember(old, layout.name, replaced_by("px.parallelize"))
    return new


class _Replacer:
    """Puts parallel modules in the place of plain ones, each old weight freed before the next."""

    def __init__(
        self,
        model: nn.Module,
        layout: ModelLayout,
        mesh: Mesh,
        partials: PartialGradients | None,
    ) -> None:
        self.model, self.layout, self.mesh, self.partials = model, layout, mesh, partials
        self._new: dict[nn.Parameter, nn.Parameter] = {}  # tied parameters stay one object
        self.routings: list[Routing] = []

    def _shards(
        self, path: str, attributes: tuple[str, str] = ("weight", "bias")
    ) -> tuple[nn.Parameter, nn.Parameter | None, dict[str, TensorLayout]]:
        """Parameters and their layouts of the module at ``path``, cut for this rank."""
        module = self.model.get_submodule(path)
        layouts: dict[str, TensorLayout] = {}
        cut: list[nn.Parameter | None] = []
        for attribute in attributes:
            old = getattr(module, attribute, None)
            if old is not None:
                layouts[attribute] = self.layout[f"{path}.{attribute}"]
                if old not in self._new:
                    self._new[old] = _shard_of(old, layouts[attribute], self.mesh.rank)
                old = self._new[old]
            cut.append(old)
        return *cut, layouts

    def _tied(self, path: str) -> bool:
        tied = self.layout.tied
        return f"{path}.weight" in {*tied, *tied.values()}

    def _put(self, path: str, module: nn.Module) -> None:
        module.train(self.model.get_submodule(path).training)
        self.model.set_submodule(path, module)

    def embedding(self, path: str) -> None:
        weight, _, layouts = self._shards(path)
        padding_idx = self.model.get_submodule(path).padding_idx
        tp, tied = self.mesh.tp, self._tied(path)
        self._put(
            path,
            VocabParallelEmbedding(weight, layouts["weight"], padding_idx, tp, self.partials, tied),
        )

    def head(self, path: str) -> None:
        shards, tied = self._shards(path), self._tied(path)
        self._put(path, VocabParallelHead(*shards, self.mesh.tp, self.partials, tied))

    def column(self, path: str, replicas: Group = ops.ALONE) -> None:
        shards = self._shards(path)
        self._put(path, ColumnParallelLinear(*shards, self.mesh.tp, replicas, self.partials))

    def row(self, path: str) -> None:
        self._put(path, RowParallelLinear(*self._shards(path), self.mesh.tp, self.partials))

    def head_norm(self, path: str) -> None:
        if self.mesh.tp_size > 1:
            norm = self.model.get_submodule(path)
            UsedInParts(path, self.mesh.tp).attach(norm, self.partials)

    def mixture(self, path: str, names: MixtureNames) -> None:
        mesh, routing = self.mesh, Routing()
        router = self.model.get_submodule(f"{path}.{names.router}")
        router.forward = partial(routing.forward, router)  # which deepcopy rebinds
        self.routings.append(routing)
        experts = f"{path}.{names.experts}"
        # With one batch the sum over the replicas is the gradient. With several it is their mean,
        # which FSDP takes: a loss is that of the job times dp, and edp / dp = tp / ep.
        one_batch = mesh.dp_size == 1
        self._put(
            experts,
            ExpertParallelExperts(
                *self._shards(experts, (names.gate_up, names.down)),
                self.model.get_submodule(experts).act_fn,
                mesh.ep,
                tp=mesh.tp,
                grad_scale=1.0 if one_batch else mesh.tp_size / mesh.ep_size,
                replicas=mesh.edp if one_batch else ops.ALONE,
                partials=self.partials,
                routing=routing,
            ),
        )


def _replace_modules(
    model: nn.Module, table: ModelTable, layout: ModelLayout, mesh: Mesh
) -> tuple[PartialGradients | None, list[Routing]]:
    """Replace all modules that the table names.

    Returns:
        What sums the partial gradients, if there are several ranks, and the layers' routings.
    """
    num_layers = len(model.get_submodule(table.layers))
    replicas, partials = ops.ALONE, PartialGradients() if mesh.world_size > 1 else None
    if num_layers:
        key = layout[f"{table.layers}.0.{table.attention}.{table.key}.weight"]
        partition = sorted({key.holders(rank) for rank in range(key.period)})
        if len(partition) < mesh.tp_size:
            replicas = mesh.tp_subgroup(partition)
    replace = _Replacer(model, layout, mesh, partials)
    replace.embedding(table.embedding)
    for layer in table.layer_paths(num_layers):
        block = table.block(layer, layout)
        attention, mlp = f"{layer}.{table.attention}", f"{layer}.{block.name}"
        replace.column(f"{attention}.{table.query}")
        replace.column(f"{attention}.{table.key}", replicas)
        replace.column(f"{attention}.{table.value}", replicas)
        replace.row(f"{attention}.{table.attention_output}")
        for name in table.head_norms:
            replace.head_norm(f"{attention}.{name}")
        if isinstance(block, MixtureNames):
            replace.mixture(mlp, block)
        else:
            for name in block.inputs:
                replace.column(f"{mlp}.{name}")
            replace.row(f"{mlp}.{block.output}")
        query = layout[f"{attention}.{table.query}.weight"].local_shape(mesh.rank)
        key = layout[f"{attention}.{table.key}.weight"].local_shape(mesh.rank)
        model.get_submodule(attention).num_key_value_groups = query[0] // key[0]
    replace.head(table.head)
    return partials, replace.routings


def _in_place_of(cls: type, name: str) -> Callable[..., Any]:
    """The run-time function ``name``, with the signature of the method that it stands for."""
    function = getattr(runtime, name)

    @wraps(getattr(cls, name))
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
    mesh = state.mesh
    model.loss_function = MethodType(runtime.loss_function, model)
    for name in ("forward", "generate", "save_pretrained", "resize_token_embeddings"):
        setattr(model, name, MethodType(_in_place_of(type(model), name), model))
    if mesh.tp_size > 1 or mesh.ep_size > 1:
        cut = f"tp={mesh.tp_size}, ep={mesh.ep_size}" if state.routings else f"tp={mesh.tp_size}"
        model._ddp_params_and_buffers_to_ignore = runtime.RefusesDDP(cut)
    if mesh.tp_size > 1:
        for layer in table.layer_paths(len(model.get_submodule(table.layers))):
            entered, block = [table.attention], table.block(layer, state.layout)
            # A mixture takes its slice of the tokens itself; its router sees all on every rank.
            if isinstance(block, MLPNames):
                entered.append(block.name)
            for name in entered:
                module = model.get_submodule(f"{layer}.{name}")
                module.register_forward_pre_hook(CopyInput(mesh.tp), with_kwargs=True)
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
