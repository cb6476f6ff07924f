"""Qwen3.5 and Qwen3-Next: gated delta rules in most layers, gated attentions in the others.

Qwen3-VL has the mixture of Qwen3.5 in the layers of Qwen3.
"""

from dataclasses import replace

from parallel_ext.models.llama import QWEN3
from parallel_ext.models.qwen_moe import QWEN2_MOE, QWEN3_MOE, of_classes, route_with_sum_1
from parallel_ext.models.sublayers import DeltaNetNames

QWEN3_5_TEXT = replace(
    QWEN3,
    model_type="qwen3_5_text",
    attention=replace(QWEN3.attention, gated=True),
    delta_net=DeltaNetNames(
        name="linear_attn",
        joined="in_proj_qkv",
        inputs=("in_proj_z", "in_proj_b", "in_proj_a"),
        output="out_proj",
        convolution="conv1d",
        norm="norm",
        of_heads=("A_log", "dt_bias"),
        heads="num_k_heads",
        widths=("num_v_heads", "key_dim", "value_dim"),
    ),
    in_image_files={"model.language_model.": "model."},
)
QWEN3_5_MOE_TEXT = replace(
    QWEN3_5_TEXT,
    model_type="qwen3_5_moe_text",
    mixture=replace(of_classes(QWEN2_MOE.mixture, "Qwen3_5Moe"), route=route_with_sum_1),
)
QWEN3_VL_MOE_TEXT = replace(
    QWEN3_MOE,
    model_type="qwen3_vl_moe_text",
    mixture=replace(
        of_classes(QWEN3_MOE.mixture, "Qwen3VLMoeText"),
        route=route_with_sum_1,
        gate_up_in_files=None,
        down_in_files=None,
        transposed_in_files=True,
    ),
)
QWEN3_NEXT = replace(
    QWEN3_5_TEXT,
    model_type="qwen3_next",
    in_image_files={},
    delta_net=replace(QWEN3_5_TEXT.delta_net, joined=None, inputs=("in_proj_qkvz", "in_proj_ba")),
    mixture=of_classes(QWEN2_MOE.mixture, "Qwen3Next"),
)
NEWEST_QWEN = (QWEN3_NEXT, QWEN3_5_TEXT, QWEN3_5_MOE_TEXT, QWEN3_VL_MOE_TEXT)
