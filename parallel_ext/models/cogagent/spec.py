"""The sharding of CogAgent over ranks; each output that is summed is summed once.

The decoder's heads and both experts' features are sharded, and those of the tower of the
low-resolution image with its adapter. The tower of the high-resolution image has norms between the
linears that would be sharded, over what would be sharded, 2730 features in the published model: it
is whole on every rank, which computes its own positions of each image.
"""

from parallel_ext.models.spec import DividedTower, ModelSpec
from parallel_ext.models.sublayers import RegionNames

LAYER = "model.layers.*"
LOW_LAYER = "model.vision.transformer.layers.*"

COGAGENT = ModelSpec(
    model_type="cogagent",
    embedding="model.embed_tokens",
    head="lm_head",
    layers="model.layers",
    regions=(
        RegionNames(
            f"{LAYER}.self_attn",
            inputs={"vision_expert_query_key_value": 3, "language_expert_query_key_value": 3},
            outputs=("vision_expert_dense", "language_expert_dense"),
            heads="num_heads",
            merges=True,
        ),
        RegionNames(
            f"{LAYER}.cross_attn",
            inputs={"query": 1, "key_value": 2},
            outputs=("dense",),
            heads="num_heads",
        ),
        RegionNames(
            f"{LAYER}.mlp",
            inputs={
                f"{expert}.{name}": 1
                for expert in ("vision_mlp", "language_mlp")
                for name in ("gate_proj", "up_proj")
            },
            outputs=("vision_mlp.down_proj", "language_mlp.down_proj"),
            merges=True,
        ),
        RegionNames(
            f"{LOW_LAYER}.attention",
            inputs={"query_key_value": 3},
            outputs=("dense",),
            heads="num_heads",
        ),
        RegionNames(f"{LOW_LAYER}.mlp", inputs={"fc1": 1}, outputs=("fc2",)),
        RegionNames(
            "model.vision.linear_proj",
            inputs={"gate_proj": 1, "dense_h_to_4h": 1},
            outputs=("dense_4h_to_h",),
            entry="act1",
        ),
    ),
    shared=("model.looked_at",),
    towers=("model.vision.transformer.layers", "model.cross_vision.vit.model.blocks"),
    divided_tower=DividedTower("model.cross_vision.vit.model", "blocks", "attn", "pos_embed"),
    skips="model.towers_run",
    images="with_an_image_each",
    unadapted={
        "model.cross_vision.vit.model.blocks": (
            "the published code reads the weights of its q, k and v past these modules, where an "
            "adapter is dead, and never runs the last block"
        )
    },
)
