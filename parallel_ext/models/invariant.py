"""The layouts of a model's parameters in blocks that no layout changes, for ``px.Invariant``."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from parallel_ext.models._transformers_private import attention_of
from parallel_ext.models.mixture_names import MixtureNames
from parallel_ext.models.spec import HeadSizes, ModelSizes, ModelSpec, with_replicated
from parallel_ext.models.sublayers import AttentionNames, Layouts, RegionNames, Shapes
from parallel_ext.sharding.blocks import AttentionBlocks, shard_in_blocks, split_in_blocks
from parallel_ext.sharding.layout import ModelLayout, Part, Range, scaled

# All else in such models has been looked at, too.
_SERVED_WITH_REGIONS = ("cogagent", "granitemoeshared")


def check_attention(config: Any, device: torch.device) -> None:
    """Raise a ValueError unless the attention of ``config`` has the same bits on any layout.

    The gradients of torch's softmax in fp32, which is that of ``"eager"``, depend on the number of
    threads (torch 2.13, a CPU with AVX2).
    """
    attention = attention_of(config)
    by_one_thread = attention == "eager" and device.type == "cpu" and torch.get_num_threads() == 1
    if attention != "sdpa" and not by_one_thread:
        raise ValueError(
            "px.Invariant serves attention 'sdpa', and 'eager' on a CPU with one thread a rank; "
            f"the model has {attention!r}, whose bits may depend on threads and ranks: pass "
            'attn_implementation="sdpa"'
        )


def check_can_be_invariant(spec: ModelSpec, names: Collection[str]) -> None:
    """Raise a ValueError unless all that a spec describes can be computed in blocks.

    ``names`` are those of the model's parameters.
    """
    attention, mlp = spec.attention, spec.mlp
    chooses = bool(spec.mixtures(names))
    low_ranks = any(each.in_parts for each in spec.regions)
    missing = {
        "no output head": spec.head is None,
        "sublayers beside the decoder layers": bool(spec.regions)
        and not low_ranks
        and spec.model_type not in _SERVED_WITH_REGIONS,
        "published code": any(each.forward for each in spec.regions),
        "an MLP of another kind than gate, up and down": mlp is not None and not _is_plain(mlp),
        "an attention of another kind": attention is None and not spec.regions,
        "a gated delta rule": spec.delta_net is not None,
        "sinks or gates of heads": attention is not None
        and bool(attention.of_heads or attention.gated),
        "experts chosen by a softmax of the chosen alone": (
            chooses and not spec.mixture.fixed_bits
        ),
        "a further embedding": spec.layer_embedding_in(names) is not None,
        "norms over all heads that round before their weight": attention is not None
        and attention.norm_rounds_first,
        "a bias of the output head": f"{spec.head}.bias" in names,
    }
    if found := [what for what, is_there in missing.items() if is_there]:
        raise ValueError(
            f"px.Invariant does not serve {spec.model_type!r} models with {', '.join(found)} yet"
        )


def attention_blocks(names: AttentionNames, sizes: HeadSizes, blocks: int) -> AttentionBlocks:
    """Return the blocks of an attention; those of joined projections are whole groups of heads."""
    most = sizes.key_value if names.is_joined else blocks
    return AttentionBlocks.of(sizes.query, sizes.key_value, min(blocks, most))


def _is_plain(mlp: RegionNames) -> bool:
    further = (mlp.heads, mlp.forward, mlp.entry, mlp.merges)
    return 1 <= sum(mlp.inputs.values()) <= 3 and further == (None, None, None, False)


def plan_in_blocks(
    spec: ModelSpec,
    shapes: Shapes,
    tied: Mapping[str, str],
    sizes: ModelSizes,
    tp_size: int,
    ep_size: int,
    blocks: int,
    vocab_multiple_of: int = 1,
) -> ModelLayout:
    """Compute the layout of every parameter of a model, each rank holding whole blocks.

    A pure function of its arguments, so that every rank computes the same.

    Args:
        spec, shapes, tied, sizes, tp_size, ep_size, vocab_multiple_of: as of
            :func:`parallel_ext.models.spec.plan`.
        blocks: of each sharded dimension, fewer where it has not so many units.

    Raises:
        ValueError: there are more ranks than blocks, or the model has what is not served in blocks.
    """
    check_can_be_invariant(spec, shapes)
    found: Layouts = {}
    parts: dict[str, tuple[Part, ...]] = {}

    def shard(name: str, dim: int, ranges: Sequence[Range], parts: tuple[int, ...] = (1,)) -> None:
        found[name] = shard_in_blocks(name, shapes[name], dim, ranges, tp_size, parts)

    def shard_rows(path: str, ranges: Sequence[Range], parts: tuple[int, ...] = (1,)) -> None:
        for name in (f"{path}.weight", f"{path}.bias"):
            if name in shapes:
                shard(name, 0, ranges, parts)

    vocabulary = split_in_blocks(sizes.vocab_size, blocks, vocab_multiple_of)
    for path in spec.ends:
        if f"{path}.weight" in shapes:
            shard(f"{path}.weight", 0, vocabulary)
    for path, sublayer in spec.sublayers(shapes).items():
        if isinstance(sublayer, AttentionNames):
            of_all = sizes.attentions[path]
            heads = attention_blocks(sublayer, of_all, blocks)
            query, key_value = scaled(heads.query, of_all.dim), scaled(heads.key_value, of_all.dim)
            sublayer.layouts(path, shapes, heads.heads(tp_size), of_all.dim)  # raises
            if sublayer.is_joined:
                shard_rows(f"{path}.{sublayer.query}", query, (heads.repeats, 1, 1))
            else:
                shard_rows(f"{path}.{sublayer.query}", query)
                for name in sublayer.keys_and_values:
                    shard_rows(f"{path}.{name}", key_value)
            shard(f"{path}.{sublayer.output}.weight", 1, query)
            for norm, ranges in ((sublayer.query_norm, query), (sublayer.key_norm, key_value)):
                if norm is not None:
                    shard(f"{path}.{norm}.weight", 0, ranges)
        elif isinstance(sublayer, MixtureNames):
            parts |= sublayer.parts(path, shapes)
            for name, layout in sublayer.layouts(path, shapes, ep_size).items():
                each = tuple((expert, expert + 1) for expert in range(layout.shape[0]))
                found[name] = replace(layout, blocks=each)
        else:
            num_heads = sizes.heads_of.get(path)
            for name, joined in sublayer.inputs.items():
                inner = shapes[f"{path}.{name}.weight"][0] // joined
                ranges = split_in_blocks(inner, blocks, inner // (num_heads or inner))
                shard_rows(f"{path}.{name}", ranges, (1,) * joined)
            for name in sublayer.outputs:
                weight = f"{path}.{name}.weight"
                inner = shapes[weight][1]
                shard(weight, 1, split_in_blocks(inner, blocks, inner // (num_heads or inner)))
    return with_replicated(found, shapes, tied, parts)
