"""A CogAgent spread over ranks generates what the single process does, whatever others are at."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from ranks import pool
from reference import parallel
from reference_cogagent import (
    TEXT,
    TWO_IMAGES,
    Row,
    batch_of,
    batches_of,
    picture,
    text,
    tiny_model,
)
from reference_mixtral import Layout

import parallel_ext as px
from parallel_ext.models.cogagent.inputs import CACHE

ROWS = {
    "an image next to text": [picture(4), text(9)],
    "two images in a row": [Row(TWO_IMAGES, 2, cross=True), text(5)],
    "text only": [text(5), text(9)],
}
GREEDY = {"do_sample": False, "eos_token_id": None}


def _generated(rows: list[Row], options: dict[str, Any]) -> tuple[list, list]:
    reference = tiny_model()
    model = parallel(reference, Layout(1, 2, 1).mesh())
    inputs = batch_of(rows, "left")
    del inputs["labels"]
    wanted = {**GREEDY, "max_new_tokens": 6, **options}
    expected, found = (m.generate(**inputs, **wanted).tolist() for m in (reference, model))
    return expected, found


@pytest.mark.parametrize("options", [{}, {"use_cache": False}, {"num_beams": 2}], ids=str)
@pytest.mark.parametrize("rows", ROWS)
def test_generation_equals_the_single_process(rows: str, options: dict[str, Any]) -> None:
    for expected, found in pool(2).run(_generated, ROWS[rows], options):
        assert found == expected


# Each dp rank its own prompts.


def _of_ranks(answer: Any) -> tuple[list, list]:
    """The answers to a text on rank 0 and a picture on rank 1: of one process, and of the ranks."""
    reference, mesh = tiny_model(), Layout(2, 1, 1).mesh()
    model = px.data_parallel(parallel(reference, mesh), mesh, 3).eval()
    _, own = batches_of([[text(8)], [picture(5)]])
    inputs = {name: value for name, value in own[mesh.dp_rank].items() if name != "labels"}
    return tuple(answer(each, inputs, mesh.dp_rank).tolist() for each in (reference, model))


def _of_other_lengths(model: Any, inputs: dict[str, Any], rank: int, use_cache: bool) -> Any:
    """Rank 1 has its tokens early, and takes part in the forwards of rank 0."""
    return model.generate(**inputs, **GREEDY, max_new_tokens=5 - 3 * rank, use_cache=use_cache)


def _lengths(use_cache: bool) -> tuple[list, list]:
    return _of_ranks(lambda *args: _of_other_lengths(*args, use_cache))


@pytest.mark.parametrize("use_cache", [True, False])
def test_a_rank_without_an_image_or_with_fewer_tokens_holds_nobody_up(use_cache: bool) -> None:
    for expected, found in pool(2).run(_lengths, use_cache):
        assert found == expected


def _goes_on(model: Any, inputs: dict[str, Any], rank: int) -> torch.Tensor:
    """Rank 0 goes on with its conversation, while rank 1 begins another with an image."""
    again = dict(inputs)
    if rank == 0:
        before = model.generate(**inputs, **GREEDY, max_new_tokens=4, return_dict_in_generate=True)
        more = F.pad(before.sequences, (0, 3), value=7)
        added = more.shape[1] - inputs["input_ids"].shape[1]
        again[CACHE] = before[CACHE]
        again["input_ids"] = more
        again["token_type_ids"] = F.pad(inputs["token_type_ids"], (0, added), value=TEXT)
        again["attention_mask"] = F.pad(inputs["attention_mask"], (0, added), value=1)
    else:
        model.generate(**inputs, **GREEDY, max_new_tokens=4)
    return model.generate(**again, **GREEDY, max_new_tokens=4)


def _conversations() -> tuple[list, list]:
    return _of_ranks(_goes_on)


def test_a_rank_goes_on_from_its_cache_while_another_reads_an_image() -> None:
    for expected, found in pool(2).run(_conversations):
        assert found == expected
