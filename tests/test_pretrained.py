"""From a HuggingFace directory to a parallel model that trains exactly, and back to a directory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from ranks import pool
from reference import (
    FLOOR,
    Tiny,
    batch,
    difference,
    exact,
    exact_norms,
    gradients_of,
    mesh_of,
    shard_differences,
    worst,
)

import parallel_ext as px


def _plain(folder: str) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)


def _there_and_back(source: str, target: str) -> dict[str, float]:
    """Load, train one step, save; differences from one process that does the same."""
    model = exact_norms(px.from_pretrained(source, mesh_of())).train()
    reference = exact(_plain(source)).train()
    one = batch(model.config.vocab_size)
    losses = []
    for each in (reference, model):
        optimizer = torch.optim.AdamW(each.parameters(), lr=1e-2)
        losses.append(each(**one).loss)
        losses[-1].backward()
        optimizer.step()
    model.save_pretrained(target)
    reloaded, trained = _plain(target), dict(reference.named_parameters())
    return {
        "loss": difference(losses[1], losses[0]),
        **shard_differences(model, gradients_of(reference), gradients=True),
        **{f"saved {n}": difference(p, trained[n]) for n, p in reloaded.named_parameters()},
        "saved rows": float(reloaded.lm_head.weight.shape[0] != model.config.vocab_size),
        "saved tie": float(
            reloaded.config.tie_word_embeddings is not model.config.tie_word_embeddings
        ),
    }


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("tp", [1, 2, 3, 4])
@pytest.mark.parametrize("vocab_size", [5, 101, 32000, 49153, 65535])
def test_a_directory_trains_and_saves_as_in_one_process(
    vocab_size: int, tp: int, tied: bool, tmp_path: Path
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    tiny = Tiny(vocab_size=vocab_size, tied=tied)
    tiny.model().save_pretrained(source)
    for differences in pool(tp).run(_there_and_back, str(source), str(target), timeout_s=240):
        error, name = worst(differences)
        assert error <= FLOOR[tiny.dtype], name


def _load(folder: str) -> None:
    px.from_pretrained(folder, mesh_of())


def test_a_missing_directory_is_named_on_all_ranks(tmp_path: Path) -> None:
    for raised in pool(2).run_raising(_load, str(tmp_path / "nothing")):
        assert "nothing" in repr(raised)


def test_another_number_of_rows_is_refused_with_both_shapes(tmp_path: Path) -> None:
    tiny = Tiny(dtype=torch.float32)
    tiny.model().save_pretrained(tmp_path)
    config = transformers.LlamaConfig.from_pretrained(tmp_path)
    config.vocab_size = 103
    config.save_pretrained(tmp_path)
    for raised in pool(2).run_raising(_load, str(tmp_path)):
        assert "model.embed_tokens.weight" in repr(raised)
        assert "(101, 72)" in repr(raised)
        assert "(103, 72)" in repr(raised)
