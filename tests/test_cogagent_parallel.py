"""A CogAgent spread over ranks trains, generates and is cut as the single process has it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from ranks import pool
from reference import FLOOR, difference, gradients_of, parallel, shard_differences, worst
from reference_cogagent import (
    IMAGE,
    IMAGE_TOKENS,
    TEXT,
    Row,
    batches_of,
    exact,
    picture,
    text,
    tiny_model,
)
from reference_mixtral import Layout, assert_refused, differences_of_steps
from torch import nn

import parallel_ext as px
from parallel_ext.models.cogagent import CogAgentConfig, CogAgentForCausalLM

EIGHT_HEADS = {
    "num_attention_heads": 8,
    "vision_config": {
        **CogAgentConfig().vision_config,
        **{"hidden_size": 48, "image_size": 42, "intermediate_size": 72, "num_positions": 10},
        **{"num_heads": 8, "num_hidden_layers": 2},
    },
}
TWO_IMAGES = [TEXT, *[IMAGE] * IMAGE_TOKENS, TEXT, *[IMAGE] * IMAGE_TOKENS, TEXT, TEXT]
# Rows of each dp rank.
ROWS = {
    "language tokens that look at an image": [[text(7, cross=True)]],
    "one image": [[picture(6)]],
    "two images in a batch, padded": [[picture(6), picture(3)]],
    "an image next to text": [[picture(4), text(9)]],
    "two images in a row": [[Row(TWO_IMAGES, 2, cross=True), text(5)]],
    "text only": [[text(5), text(9)]],
}
OF_RANKS = {
    "images on both": [[picture(6)], [picture(3)]],
    "one without an image": [[picture(6), text(4)], [text(9), text(3)]],
    "one without an image of low resolution": [[picture(4)], [text(6, cross=True)]],
    "text only": [[text(5)], [text(9)]],
}


def _parity(ranks: list[list[Row]], layout: Layout, zero: int, options: dict) -> dict[str, float]:
    reference = exact(tiny_model(**options).train())
    mesh = layout.mesh()
    model = px.data_parallel(parallel(reference, mesh), mesh, zero)
    return differences_of_steps(reference, model, mesh, [batches_of(ranks)] * 3)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("rows", ROWS)
def test_training_equals_the_single_process(rows: str, tp: int) -> None:
    for differences in pool(tp).run(_parity, ROWS[rows], Layout(1, tp, 1), 2, {}):
        error, name = worst(differences)
        assert error <= 1e-10, name


def test_training_equals_the_single_process_on_eight_ranks() -> None:
    rows = ROWS["an image next to text"]
    for differences in pool(8).run(_parity, rows, Layout(1, 8, 1), 2, EIGHT_HEADS):
        assert worst(differences)[0] <= 1e-10


@pytest.mark.parametrize("layout", [Layout(2, 1, 1), Layout(2, 2, 1)], ids=str)
@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("ranks", OF_RANKS)
def test_data_parallel_training_equals_the_single_process(
    ranks: str, zero: int, layout: Layout
) -> None:
    for differences in pool(layout.world).run(_parity, OF_RANKS[ranks], layout, zero, {}):
        error, name = worst(differences)
        assert error <= 1e-10, name
