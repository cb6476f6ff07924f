"""Parallel modules in the place of plain ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn

from parallel_ext import ops
from parallel_ext.models.mixture_names import MixtureNames
from parallel_ext.models.spec import DividedTower, HeadSizes
from parallel_ext.models.sublayers import AttentionNames, DeltaNetNames, RegionNames
from parallel_ext.nn.grad_sync import PartialGradients
from parallel_ext.nn.linear import ColumnParallelLinear, RowParallelLinear
from parallel_ext.nn.moe import ExpertParallelExperts
from parallel_ext.nn.norm import RMSNormOfShards
from parallel_ext.nn.own_positions import OwnPositions
from parallel_ext.nn.region import ChangeOutput
from parallel_ext.nn.routing import TORCHS, Numerics, Routing
from parallel_ext.nn.stale_parameters import mark_replaced, watch_replaced
from parallel_ext.nn.transposed_experts import (
    BiasedExperts,
    ClampedGate,
    ExpertsOfWeighedTokens,
)
from parallel_ext.nn.used_in_parts import UsedInParts
from parallel_ext.nn.vocab import VocabParallelEmbedding, VocabParallelHead
from parallel_ext.ops import Group
from parallel_ext.parallel.plan import Plan
from parallel_ext.parallel.watch_forward import WantSharded, refuse_unsummed
from parallel_ext.sharding.layout import Range, TensorLayout, split, split_heads
from parallel_ext.sharding.slices import take


class ConfigOfRank:
    """A configuration some of whose values are this rank's; all else is read from the model's."""

    def __init__(self, config: Any, **own: Any) -> None:
        self._config = config
        vars(self).update(own)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_config":  # copies ask before there is one
            raise AttributeError(name)
        return getattr(self._config, name)


def shard_of(old: nn.Parameter, layout: TensorLayout, rank: int) -> nn.Parameter:
    """Return the parameter that stands for a whole one on a rank, with its part of the gradient."""
    if layout.local_shape(rank) == layout.shape:
        return old
    new = nn.Parameter(take(old.data, layout, rank), requires_grad=old.requires_grad)
    if old.grad is not None:
        new.grad = take(old.grad, layout, rank)
    mark_replaced(old, new, layout.name, "px.parallelize")
    return new


class Replacer:
    """The replacement of plain modules by parallel ones, in one model.

    Attributes:
        partials: sums partial gradients; None where none are kept to a backward's end.
        routings: of the layers with a mixture of experts.
    """

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        keeps = plan.mesh.world_size > 1 and plan.options.invariant is None
        self.model, self.partials = model, PartialGradients() if keeps else None
        self.spec, self.layout = plan.spec, plan.layout
        self.mesh, self.options, self._sharers = plan.mesh, plan.options, plan.sharers
        # Row-parallel layers that leave their sum to others, by the beginnings of their paths.
        self._unsummed = (f"{plan.spec.layers}.",) if plan.sequence_parallel else ()
        self._new: dict[nn.Parameter, nn.Parameter] = {}  # tied parameters stay one object
        self.routings: list[Routing] = []

    def shards(
        self, path: str, attributes: tuple[str, ...] = ("weight", "bias")
    ) -> tuple[Any, ...]:
        """Return this rank's shards of the module at ``path``, and their layouts."""
        module = self.model.get_submodule(path)
        layouts: dict[str, TensorLayout] = {}
        shards: list[nn.Parameter | None] = []
        for attribute in attributes:
            old = getattr(module, attribute, None)
            if old is not None:
                layouts[attribute] = self.layout[f"{path}.{attribute}"]
                if old not in self._new:
                    self._new[old] = shard_of(old, layouts[attribute], self.mesh.rank)
                old = self._new[old]
            shards.append(old)
        return *shards, layouts

    def replace_all(self) -> None:
        """Replace all modules that the spec names, each old weight freed before the next."""
        for path in self.spec.embeddings(self.layout):
            self.embedding(path)
        for path, sublayer in self.spec.sublayers(self.layout).items():
            if isinstance(sublayer, AttentionNames) and sublayer.is_joined:
                self.joined_attention(path, sublayer)
            elif isinstance(sublayer, AttentionNames):
                self.attention(path, sublayer)
            elif isinstance(sublayer, RegionNames):
                self.region(path, sublayer)
            elif isinstance(sublayer, DeltaNetNames):
                self.delta_net(path, sublayer)
            else:
                self.mixture(path, sublayer)
        if self.spec.divided_tower is not None and self.options.invariant is None:
            self.divided_tower(self.spec.divided_tower)
        if self.spec.head is not None:
            self.head()

    def _tied(self, path: str) -> bool:
        tied = self.layout.tied
        return f"{path}.weight" in {*tied, *tied.values()}

    def put(self, path: str, module: nn.Module) -> None:
        """Put a module in the place of the one at ``path``."""
        old = self.model.get_submodule(path)
        module.train(old.training)
        self.model.set_submodule(path, module)
        watch_replaced(old)

    def embedding(self, path: str) -> None:
        scaled = self.spec.scaled_embedding is not None
        weight, _, layouts = self.shards(path)
        old, tied = self.model.get_submodule(path), self._tied(path)
        scale = old.embed_scale if scaled else None
        if scaled and weight.is_meta:
            # The buffer was rounded to the dtype of the configuration, which weights need not have.
            scale = torch.tensor(old.scalar_embed_scale, dtype=torch.float64)
        self.put(
            path,
            VocabParallelEmbedding(
                weight, layouts["weight"], old.padding_idx, self.mesh.tp, self.partials, tied, scale
            ),
        )

    def head(self) -> None:
        shards, tied = self.shards(path := self.spec.head), self._tied(path)
        self.put(path, VocabParallelHead(*shards, self.mesh.tp, self.partials, tied))

    def _column(self, path: str, replicas: Group = ops.ALONE) -> None:
        shards = self.shards(path)
        self.put(path, ColumnParallelLinear(*shards, self.mesh.tp, replicas, self.partials))

    def _row(self, path: str, sums: bool = True) -> None:
        shards = self.shards(path)
        sums = sums and not path.startswith(self._unsummed)
        self.put(path, RowParallelLinear(*shards, self.mesh.tp, self.partials, sums))

    def watch(self, path: str, *layers: str) -> None:
        """Let the module at ``path`` refuse to run without these layers of it, once replaced."""
        module = self.model.get_submodule(path)
        named = {name: module.get_submodule(name) for name in layers}
        marks = {name: layer.mark for name, layer in named.items() if layer.communicates}
        if marks:
            WantSharded(path, layers, marks).attach(module)

    def _norm_of_shards(self, path: str, replicas: Group, rounds_first: bool) -> None:
        weight, _, layouts = self.shards(path)
        eps = self.model.get_submodule(path).variance_epsilon
        shared = (self.mesh.tp, replicas, self.partials)
        self.put(path, RMSNormOfShards(weight, layouts, eps, *shared, rounds_first))

    def _used_in_parts(self, *paths: str, rows: Sequence[Range] = ()) -> None:
        """Let modules have partial gradients; where each head has a row, these are its own."""
        for path in paths if self.mesh.tp_size > 1 else ():  # a user's module may wrap the model's
            for name, module in self.model.get_submodule(path).named_modules(prefix=path):
                of_each = any(each.dim() > 1 for each in module.parameters(recurse=False))
                used = UsedInParts(name, self.mesh.tp, places=rows if of_each else ())
                used.attach(module, self.partials)

    def joined_attention(self, path: str, names: AttentionNames) -> None:
        """Replace the projections of an attention of which one joins query, key and value."""
        module = self.model.get_submodule(path)
        self._column(f"{path}.{names.query}")
        self._row(f"{path}.{names.output}")
        self._used_in_parts(*(f"{path}.{name}" for name in names.head_norms))
        self.watch(path, names.query, names.output)
        joined = self.layout[f"{path}.{names.query}.weight"]
        (first, last), (kv_first, kv_last), _ = joined.ranges(self.mesh.tp_rank)
        heads = (last - first) // module.head_dim
        module.num_key_value_heads = (kv_last - kv_first) // module.head_dim
        module.config = ConfigOfRank(module.config, num_attention_heads=heads)

    def attention(self, path: str, names: AttentionNames) -> None:
        module, tp = self.model.get_submodule(path), self.mesh.tp
        sizes = HeadSizes.of(module, self.model.config.num_attention_heads)
        heads = split_heads(sizes.query, sizes.key_value, tp.size)
        (first, last), (kv_first, kv_last) = (
            each[tp.rank] for each in (heads.query, heads.key_value)
        )
        replicas = self._sharers[path]
        for name in filter(None, (names.query, names.gate)):
            self._column(f"{path}.{name}")
        for name in names.keys_and_values:
            self._column(f"{path}.{name}", replicas)
        self._row(f"{path}.{names.output}")
        self.watch(path, *names.inputs, names.output)
        for name, sharers in ((names.query_norm, ops.ALONE), (names.key_norm, replicas)):
            if name is not None and tp.size > 1:
                self._norm_of_shards(f"{path}.{name}", sharers, names.norm_rounds_first)
        for number, name in enumerate(names.head_norms):
            own = (kv_first, kv_last) if number else (first, last)
            self._used_in_parts(f"{path}.{name}", rows=[own])
        if names.of_heads and tp.size > 1:
            UsedInParts(path, tp, places=[(first, last)]).attach(module, self.partials)
        module.num_key_value_groups = (last - first) // (kv_last - kv_first)

    def delta_net(self, path: str, names: DeltaNetNames) -> None:
        """Replace the linears of a gated delta rule, and let it use the rest for own heads."""
        module = self.model.get_submodule(path)
        for name in names.linears:
            self._column(f"{path}.{name}")
        self._row(f"{path}.{names.output}")
        self.watch(path, *names.linears, names.output)
        if self.mesh.tp_size == 1:
            return
        heads, convolution = getattr(module, names.heads), module.get_submodule(names.convolution)
        first, last = split(heads, self.mesh.tp_size)[self.mesh.tp_rank]

        def own(features: int, before: int = 0) -> Range:
            return before + first * features // heads, before + last * features // heads

        values = self.layout[f"{path}.{names.output}.weight"].shape[1]
        keys = (len(convolution.weight) - values) // 2
        channels = [own(keys), own(keys, keys), own(values, 2 * keys)]
        of_heads = [own(len(getattr(module, names.of_heads[0])))]
        self._used_in_parts(f"{path}.{names.norm}")
        for name, each, places in (
            (f"{path}.{names.convolution}", convolution, channels),
            (path, module, of_heads),
        ):
            used = UsedInParts(name, self.mesh.tp, places=places)
            used.attach(each, self.partials, module)
        for name in (names.heads, *names.widths):
            setattr(module, name, getattr(module, name) // heads * (last - first))

    def region(self, path: str, names: RegionNames) -> None:
        for name in names.inputs:
            self._column(f"{path}.{name}")
        for name in names.outputs:
            self._row(f"{path}.{name}", sums=not names.merges)
        self.watch(path, *names.inputs, *names.outputs)
        self._used_in_parts(*(f"{path}.{name}" for name in names.in_parts))
        module = self.model.get_submodule(path)
        for name in names.attributes():
            setattr(module, name, getattr(module, name) // self.mesh.tp_size)
        if names.forward is not None:
            module.forward = MethodType(names.forward, module)

    def divided_tower(self, names: DividedTower) -> None:
        """Let each rank compute its own positions of images in a tower."""
        if self.mesh.tp_size == 1:
            return
        tower = self.model.get_submodule(names.path)
        own = OwnPositions(getattr(tower, names.learned).size(1), self.mesh.tp)
        blocks = tower.get_submodule(names.blocks)
        blocks[0].register_forward_pre_hook(own.take, prepend=True)
        for block in blocks:
            attention = block.get_submodule(names.attention)
            attention.positions = own
            if names.forward is not None:
                attention.forward = MethodType(names.forward, attention)
        tower.register_forward_pre_hook(partial(refuse_unsummed, names.path, names.blocks))
        # In front of what others have put there, which sees all positions.
        tower.register_forward_hook(ChangeOutput(own.gather), prepend=True)
        self._used_in_parts(f"{names.path}.{names.blocks}")

    def routing(self, path: str, names: MixtureNames, numerics: Numerics = TORCHS) -> Routing:
        """Let the router of the mixture at ``path`` choose as the routing that is returned."""
        routing = Routing(names.route, numerics)
        router = self.model.get_submodule(f"{path}.{names.router}")
        router.forward = partial(routing.forward, router)  # which deepcopy rebinds
        self.routings.append(routing)
        return routing

    def mixture(self, path: str, names: MixtureNames) -> None:
        mesh, routing = self.mesh, self.routing(path, names)
        experts = f"{path}.{names.experts}"
        # With one batch the sum over the replicas is the gradient. With several it is their mean,
        # which FSDP takes: a loss is that of the job times dp, and edp / dp = tp / ep.
        one_batch = mesh.dp_size == 1
        old = self.model.get_submodule(experts)
        self.put(
            experts,
            _class_of_experts(names)(
                *self.shards(experts, names.parameters),
                ClampedGate(old.alpha, old.limit) if names.biases else old.act_fn,
                mesh.ep,
                tp=mesh.tp,
                grad_scale=1.0 if one_batch else mesh.tp_size / mesh.ep_size,
                replicas=mesh.edp if one_batch else ops.ALONE,
                partials=self.partials,
                routing=routing,
            ),
        )
        self.block_of_experts(path, names)

    def block_of_experts(self, path: str, names: MixtureNames) -> None:
        """Watch a mixture whose experts were replaced, and replace its forward if need be."""
        self.watch(path, names.experts)
        if names.forward is not None:
            block = self.model.get_submodule(path)
            block.forward = MethodType(names.forward, block)


def _class_of_experts(names: MixtureNames) -> type[ExpertParallelExperts]:
    if names.weighs_inputs:
        return ExpertsOfWeighedTokens
    return BiasedExperts if names.biases else ExpertParallelExperts


def names_of_parts(model: nn.Module) -> Iterator[str]:
    """Yield the names of the model's own parameters whose gradients are sums over tp ranks."""
    for module in model.modules():
        shared = isinstance(module, ColumnParallelLinear | RMSNormOfShards)
        if shared and module.replicas.size > 1:
            yield from (layout.name for layout in module.layouts.values())
        elif "used_in_parts" in vars(module):
            yield from module.used_in_parts.names(module)
