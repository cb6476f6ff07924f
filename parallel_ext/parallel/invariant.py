"""The modules of a model under ``px.Invariant``: blocks in the place of plain layers."""

from __future__ import annotations

import transformers.activations
from torch import nn

from parallel_ext.distributed.mesh import Mesh
from parallel_ext.models.blocks import AttentionNames
from parallel_ext.models.spec import ModelSpec
from parallel_ext.nn.blocks import BlockColumnLinear, BlockRowLinear, ComputedTogether, FixedSilu
from parallel_ext.parallel.plan import Plan
from parallel_ext.parallel.replace import Replacer
from parallel_ext.sharding.blocks import AttentionBlocks, own_blocks

_SILU = (nn.SiLU, transformers.activations.SiLUActivation)


def check_invariant(model: nn.Module, spec: ModelSpec, mesh: Mesh) -> None:
    """Raise unless a model can be trained with the same bits on any layout.

    Raises:
        ValueError: names what cannot.
    """
    if mesh.dp_size > 1:
        raise ValueError(
            f"px.Invariant serves tensor parallelism only yet, but the mesh has dp={mesh.dp_size}"
        )
    if getattr(model.config, "attention_dropout", 0.0):
        raise ValueError(
            "px.Invariant does not serve attention_dropout, whose masks depend on the layout; set "
            "it to 0"
        )
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    for path, block in spec.blocks(names).items():
        if isinstance(block, AttentionNames):
            continue
        for name, child in model.get_submodule(path).named_children():
            if name not in block.modules() and not isinstance(child, _SILU):
                raise ValueError(
                    f"px.Invariant serves the activation SiLU, but {path}.{name} is a "
                    f"{type(child).__name__}, whose bits may depend on the place of an element"
                )


def replace_in_blocks(model: nn.Module, plan: Plan) -> None:
    """Replace all modules that the plan's spec names by those of blocks."""
    spec, config, tp = plan.spec, model.config, plan.mesh.tp
    put = Replacer(model, plan.layout, plan.mesh, None)
    put.embedding(spec.embedding, spec.scaled_embedding is not None)
    for path, block in spec.blocks(plan.layout).items():
        module = model.get_submodule(path)
        if isinstance(block, AttentionNames):
            inputs, outputs = (block.query, block.key, block.value), (block.output,)
            numbers = config.num_attention_heads, config.num_key_value_heads
            heads = AttentionBlocks.of(*numbers, plan.options.invariant.blocks)
            copies, repeats = heads.copies, (1, heads.repeats, heads.repeats)
            head_dim = module.head_dim
            module.num_key_value_groups = 1  # each query head gets a key-value head of its own
        else:
            inputs, outputs, copies, head_dim = tuple(block.inputs), block.outputs, 1, 1
            repeats = (1,) * len(inputs)
            for name, child in list(module.named_children()):
                if isinstance(child, _SILU):
                    setattr(module, name, FixedSilu())
        for name, each in zip(inputs, repeats, strict=True):
            weight, _, layouts = put.shards(f"{path}.{name}")
            put.put(f"{path}.{name}", BlockColumnLinear(weight, layouts, tp, head_dim, each))
        for name in outputs:
            put.put(f"{path}.{name}", BlockRowLinear(*put.shards(f"{path}.{name}"), tp))
        module.register_forward_pre_hook(ComputedTogether(inputs, copies), with_kwargs=True)
    put.head(spec.head)
    head = model.get_submodule(spec.head)
    head.blocks = own_blocks(head.layouts["weight"], tp.rank)
