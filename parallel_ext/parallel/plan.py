"""The plan of ``parallelize``: all that it decides before anything changes, computed once."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from torch import nn

from parallel_ext.distributed.mesh import Mesh
from parallel_ext.models.invariant import plan_in_blocks
from parallel_ext.models.mixture_names import MixtureNames
from parallel_ext.models.spec import HeadSizes, ModelSizes, ModelSpec, plan
from parallel_ext.models.sublayers import AttentionNames, DeltaNetNames, RegionNames
from parallel_ext.ops.group import Group, Range
from parallel_ext.sharding.layout import ModelLayout, split_heads
from parallel_ext.sharding.named_shards import persistent_buffers


@dataclass(frozen=True)
class Invariant:
    """Ask :func:`parallelize` for a training with the same bits on any number of ranks.

    Losses, gradients, their norm and the weights after any number of steps are then those of one
    process with the same ``Invariant``, bit for bit (``docs/invariant.md``).

    Args:
        blocks: pieces of each sharded dimension, at least ``tp``. Every sum over such a dimension
            is one product a block, added over a tree that depends on their number alone. A model
            trained with other blocks has other bits.
        leaves: parts of each global batch, at least ``dp``, of which :func:`train_leaves` runs one
            forward and backward each. Their losses and gradients are added over the same tree.

    Raises:
        ValueError: ``blocks`` or ``leaves`` is no positive integer.

    Example:
        >>> Invariant(blocks=8)
        Invariant(blocks=8, leaves=1)
    """

    blocks: int = 8
    leaves: int = 1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if type(value) is not int or value < 1:
                raise ValueError(
                    f"Invariant: {name} must be an integer of at least 1, not {value!r}"
                )


@dataclass(frozen=True)
class Options:
    """The options of ``parallelize``, which says what they mean; equal on all ranks."""

    vocab_multiple_of: int = 1
    training_logits: bool = False
    fused_loss: bool | Literal["auto"] = "auto"
    agreement: bool = True
    allow_different_dropout: bool = False
    invariant: Invariant | None = None
    sequence_parallel: bool = False

    def check(self) -> None:
        """Raise if an option is invalid, or contradicts another."""
        if self.fused_loss not in (True, False, "auto"):
            raise ValueError(
                f"parallelize: fused_loss must be 'auto', True or False, got {self.fused_loss!r}"
            )
        if self.fused_loss is True and self.training_logits:
            raise ValueError(
                "parallelize: fused_loss=True makes no logits, but training_logits=True asks for "
                "them"
            )
        if self.sequence_parallel not in (True, False):
            raise ValueError(
                "parallelize: sequence_parallel must be True or False, got "
                f"{self.sequence_parallel!r}"
            )
        if self.invariant is None:
            return
        if not isinstance(self.invariant, Invariant):
            raise TypeError(
                f"parallelize: invariant must be a px.Invariant or None, got {self.invariant!r}"
            )
        if self.sequence_parallel:
            raise ValueError(
                "parallelize: px.Invariant adds over a tree that knows no tokens of single ranks; "
                "leave out sequence_parallel or invariant"
            )
        if self.training_logits or self.fused_loss is False:
            raise ValueError(
                "parallelize: under px.Invariant the loss is computed from hidden states; leave "
                "out training_logits and fused_loss"
            )


@dataclass(frozen=True)
class Plan:
    """How one model is sharded over the ranks of a mesh.

    Attributes:
        layout: where every parameter and persistent buffer lives.
        sharers: path of an attention -> the ranks with the key-value heads of this rank.
    """

    mesh: Mesh
    spec: ModelSpec
    layout: ModelLayout
    options: Options = Options()
    sharers: Mapping[str, Group] = field(default_factory=dict)

    @property
    def sequence_parallel(self) -> bool:
        """Return whether each tp rank keeps its own tokens between the sublayers."""
        return self.options.sequence_parallel and self.mesh.tp_size > 1

    @property
    def vocab_ranges(self) -> tuple[Range, ...]:
        """Return the range of ids of every tp rank."""
        return self.layout[f"{self.spec.embedding}.weight"].first_ranges


def with_groups(plan: Plan, model: nn.Module) -> Plan:
    """Return a plan with the groups of ranks that hold the same key-value heads of a model.

    Every rank of the job calls it with the same plan, since they connect here.
    """
    sharers: dict[str, Group] = {}
    for path, names in plan.spec.sublayers(plan.layout).items():
        # Under px.Invariant each query head gets a key-value head of its own.
        if not isinstance(names, AttentionNames) or names.is_joined or plan.options.invariant:
            continue
        sizes = HeadSizes.of(model.get_submodule(path), model.config.num_attention_heads)
        heads = split_heads(sizes.query, sizes.key_value, plan.mesh.tp_size)
        ranks_of: dict[Range, list[int]] = {}
        for rank, each in enumerate(heads.key_value):
            ranks_of.setdefault(each, []).append(rank)
        sharers[path] = plan.mesh.tp_subgroup([*ranks_of.values()])
    return replace(plan, sharers=sharers)


def layout_of(
    model: nn.Module,
    spec: ModelSpec,
    tp_size: int,
    ep_size: int = 1,
    vocab_multiple_of: int = 1,
    blocks: int = 0,
) -> ModelLayout:
    """Compute the layout of every parameter and persistent buffer of a model, also one on meta.

    Args:
        model: of the architecture that ``spec`` describes; nothing of it changes.
        tp_size, ep_size, vocab_multiple_of: as of :func:`parallel_ext.models.spec.plan`.
        blocks: as of :func:`parallel_ext.models.invariant.plan_in_blocks`; 0 for none.

    Raises:
        ValueError: the model cannot be sharded so.
    """
    names: dict[int, str] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    tied: dict[str, str] = {}
    ends = [f"{path}.weight" for path in spec.ends]
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in names:
            tied[name] = names[id(parameter)]
            if name not in ends or tied[name] not in ends:
                raise ValueError(
                    f"parallelize: {name} is the same parameter as {tied[name]}, which nothing in "
                    "the files would say; only embedding and head may share theirs, so give each "
                    "module a parameter of its own before"
                )
        else:
            names[id(parameter)] = name
            shapes[name] = tuple(parameter.shape)
    _refuse_unnamed(spec, shapes)
    config = model.config
    rows = config.vocab_size
    for name in ends:
        shape = shapes[tied.get(name, name)]
        if shape[0] != rows:
            raise ValueError(
                f"parallelize: {name} has the shape {shape}, but config.vocab_size is {rows}; "
                f"expected ({rows}, {shape[1]})"
            )
    buffers = {name: tuple(buffer.shape) for name, buffer in persistent_buffers(model)}
    sizes = _sizes(model, spec, shapes)
    named = spec, {**shapes, **buffers}, tied, sizes, tp_size
    if blocks:
        layout = plan_in_blocks(*named, ep_size, blocks, vocab_multiple_of)
    else:
        layout = plan(*named, ep_size, vocab_multiple_of)
    return replace(layout, buffers=frozenset(buffers))


def _refuse_unnamed(spec: ModelSpec, names: Collection[str]) -> None:
    """Raise if a sublayer has a parameter in no module that the spec names.

    It may be used for this rank's part of heads or features, and its gradient would be one of them.
    """
    for path, sublayer in spec.sublayers(names).items():
        if isinstance(sublayer, MixtureNames) or getattr(sublayer, "entry", None) is not None:
            continue  # what else is there sees whole tokens
        known = tuple(f"{path}.{name}." for name in sublayer.modules())
        if isinstance(sublayer, AttentionNames | DeltaNetNames):
            known += tuple(f"{path}.{name}" for name in sublayer.of_heads)
        if others := [n for n in names if n.startswith(f"{path}.") and not n.startswith(known)]:
            raise ValueError(f"{', '.join(others)}: the spec does not say how tp ranks shard it")


def _sizes(model: nn.Module, spec: ModelSpec, shapes: Mapping[str, tuple[int, ...]]) -> ModelSizes:
    config, sublayers = model.config, spec.sublayers(shapes)
    heads_of = {
        path: getattr(model.get_submodule(path), sublayer.heads)
        for path, sublayer in sublayers.items()
        if isinstance(sublayer, RegionNames | DeltaNetNames) and sublayer.heads is not None
    }
    attentions = {
        path: _heads(path, model.get_submodule(path), config.num_attention_heads, sublayer, shapes)
        for path, sublayer in sublayers.items()
        if isinstance(sublayer, AttentionNames)
    }
    return ModelSizes(config.vocab_size, attentions, heads_of)


def _heads(
    path: str,
    attention: nn.Module,
    num_heads: int,
    names: AttentionNames,
    shapes: Mapping[str, tuple[int, ...]],
) -> HeadSizes:
    """Return the heads of the attention at ``path``; raise if a projection has other features."""
    groups = attention.num_key_value_groups
    if groups < 1 or num_heads % groups:
        raise ValueError(
            f"{path}.num_key_value_groups is {groups}, which does not divide the {num_heads} query "
            "heads of config.num_attention_heads"
        )
    sizes = HeadSizes.of(attention, num_heads)
    if names.is_joined:
        heads = {names.query: sizes.query + 2 * sizes.key_value}
    else:
        heads = {names.query: sizes.query * names.rows_per_head}
        heads |= dict.fromkeys(names.keys_and_values, sizes.key_value)
        heads |= dict.fromkeys(filter(None, [names.gate]), sizes.query)
    heads[names.output] = sizes.query
    for name, number in heads.items():
        kind, dimension = ("input", 1) if name == names.output else ("output", 0)
        features = shapes[f"{path}.{name}.weight"][dimension]
        if features != number * sizes.dim:
            raise ValueError(
                f"{path}.{name} has {features} {kind} features, but by config.num_attention_heads, "
                f"{num_heads}, and num_key_value_groups, {groups}, and head_dim, {sizes.dim}, of "
                f"its attention it has {number * sizes.dim}"
            )
    return sizes
