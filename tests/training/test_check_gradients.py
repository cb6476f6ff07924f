"""``check_gradients`` finds errors, reports none where there are none, and leaves no trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from ranks import pool
from reference import Tiny, batch, mesh_of, parallel

import parallel_ext as px
from parallel_ext import ops

TINY = Tiny(dtype=torch.float32, heads=8, key_value_heads=2, tied=True)


def _report(layers: int | None, broken: bool, tp: int) -> tuple[Any, list[str]]:
    mesh = mesh_of(tp)
    model = px.no_data_parallel(parallel(TINY.model(), mesh))
    if broken:
        model.model.layers[0].mlp.down_proj.summed_over = ops.ALONE
    own = batch(TINY.vocab_size, rows=4)
    own = {name: value.chunk(mesh.dp_size)[mesh.dp_rank] for name, value in own.items()}
    model(**own).loss.backward()
    before = {name: p.grad.clone() for name, p in model.named_parameters()}
    report = px.check_gradients(model, own, layers=layers)
    changed = [n for n, p in model.named_parameters() if not torch.equal(p.grad, before[n])]
    if len(model.model.layers) != TINY.layers or model.config.num_hidden_layers != TINY.layers:
        changed.append("layers")
    return report, changed


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("layers", [None, 1])
def test_a_sound_model_differs_by_rounding_only(layers: int | None, tp: int) -> None:
    reports = pool(4).run(_report, layers, False, tp)
    for report, changed in reports:
        assert changed == []
        assert report == reports[0][0]  # the same on every rank
        assert report.worst[1] < 1e-5
        assert len(report.differences) == 9 * (layers or TINY.layers) + 2
        assert abs(report.loss / report.single_process_loss - 1) < 1e-6


def test_a_missing_sum_is_found() -> None:
    for report, _ in pool(2).run(_report, None, True, 2):
        assert report.worst[1] > 1e-2
        assert report.worst[0] in str(report)


def _grown() -> float:
    config = TINY.config()
    config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    config.max_position_embeddings = 4
    torch.manual_seed(1)
    model = parallel(transformers.LlamaForCausalLM(config), mesh_of())
    with torch.no_grad():
        model(**batch(TINY.vocab_size, tokens=30))
    return px.check_gradients(model, batch(TINY.vocab_size)).worst[1]


def test_rotary_frequencies_of_longer_sequences_before_are_no_error() -> None:
    assert max(pool(2).run(_grown)) < 1e-5


def _frozen() -> set[str]:
    model = parallel(TINY.model(), mesh_of())
    model.model.layers.requires_grad_(False)
    return set(px.check_gradients(model, batch(TINY.vocab_size)).differences)


def test_frozen_parameters_are_left_out() -> None:
    names = {"model.embed_tokens.weight", "model.norm.weight"}
    assert pool(2).run(_frozen) == [names, names]


def _layers(of_rank_0: int, of_rank_1: int) -> None:
    layers = (of_rank_0, of_rank_1)[dist.get_rank()]
    px.check_gradients(parallel(TINY.model(), mesh_of()), batch(TINY.vocab_size), layers=layers)


@pytest.mark.parametrize(
    ("layers", "words"), [((2, 3), "layers=3 is not in 1 to 2"), ((1, 2), "layers must be equal")]
)
def test_layers_of_one_rank_are_refused_on_all(layers: tuple[int, int], words: str) -> None:
    pool(2).assert_raises(_layers, *layers, words=words)


def _other_lengths() -> None:
    model = parallel(TINY.model(), mesh_of(tp=1))
    px.check_gradients(model, batch(TINY.vocab_size, tokens=8 + dist.get_rank()))


def test_dp_ranks_with_other_lengths_are_refused_on_all_ranks() -> None:
    first, second = pool(2).run_raising(_other_lengths)
    assert "Sizes of tensors must match" in repr(first)
    assert "check_gradients failed on rank 0" in repr(second)
