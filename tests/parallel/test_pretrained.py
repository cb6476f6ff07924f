"""From a HuggingFace directory to a parallel model that trains exactly, and back to a directory."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from ranks import pool
from reference import (
    FLOOR,
    Tiny,
    assert_within,
    batch,
    difference,
    exact,
    exact_norms,
    gradients_of,
    mesh_of,
    parallel,
    saved_tensors,
    shard_differences,
)
from safetensors.torch import load_file, save_file

import parallel_ext as px
from parallel_ext.interplay import refusals
from parallel_ext.parallel import owners


def _plain(folder: str) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)


def _copies(model: transformers.PreTrainedModel, source: str, target: str) -> dict[str, float]:
    """1 for each tensor that a save, or transformers' save of that, changed in a single bit."""
    model.save_pretrained(f"{target}-copy")
    if mesh_of().rank == 0:
        _plain(f"{target}-copy").save_pretrained(f"{target}-by-transformers")
    dist.barrier()
    changed = {}
    for way in ("copy", "by-transformers"):
        copy, original = saved_tensors(Path(f"{target}-{way}")), saved_tensors(Path(source))
        changed[f"names of the {way}"] = float(copy.keys() != original.keys())
        for name, value in original.items():
            changed[f"{way}: {name}"] = float(not torch.equal(copy[name], value))
    return changed


def _there_and_back(source: str, target: str) -> dict[str, float]:
    """Load, train one step, save; differences from one process that does the same."""
    model = exact_norms(px.from_pretrained(source, mesh_of())).train()
    copied = _copies(model, source, target)
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
        **copied,
        **shard_differences(model, gradients_of(reference), gradients=True),
        **{f"saved {n}": difference(p, trained[n]) for n, p in reloaded.named_parameters()},
        "saved rows": float(reloaded.lm_head.weight.shape[0] != model.config.vocab_size),
        "saved tie": float(
            reloaded.config.tie_word_embeddings is not model.config.tie_word_embeddings
        ),
    }


@pytest.mark.parametrize(
    ("vocab_size", "tp", "tied"),
    [(5, 4, False), (101, 1, True), (101, 2, True), (101, 3, False)],
)
def test_a_directory_trains_and_saves_as_in_one_process(
    vocab_size: int, tp: int, tied: bool, tmp_path: Path
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    tiny = Tiny(vocab_size=vocab_size, tied=tied)
    tiny.model().save_pretrained(source)
    assert_within(pool(tp).run(_there_and_back, str(source), str(target)), FLOOR[tiny.dtype])


def _save(folder: str) -> None:
    parallel(Tiny(dtype=torch.float32).model(), mesh_of()).save_pretrained(folder)


def test_a_save_removes_the_previous_model_and_nothing_else(tmp_path: Path) -> None:
    stale, kept = "model-00003-of-00003.safetensors", "adapter_model.safetensors"
    for name in (stale, kept, "README.md"):
        (tmp_path / name).write_text("here before")
    pool(2).run(_save, str(tmp_path))
    assert not (tmp_path / stale).exists()
    assert (tmp_path / kept).read_text() == "here before"
    assert (tmp_path / "README.md").read_text() == "here before"


def _dtypes(folder: str) -> tuple[set[torch.dtype], float]:
    model = px.from_pretrained(folder, mesh_of())
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder)
    one = batch(model.config.vocab_size)
    return {p.dtype for p in model.parameters()}, difference(model(**one).loss, plain(**one).loss)


def test_an_old_file_of_mixed_dtypes_loads_as_in_huggingface(tmp_path: Path) -> None:
    model = Tiny(dtype=torch.bfloat16).model()
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    for dtypes, error in pool(2).run(_dtypes, str(tmp_path)):
        assert dtypes == {torch.bfloat16}
        assert error <= FLOOR[torch.bfloat16]


def test_a_model_that_is_built_is_not_searched_for_the_parameters_of_others(tmp_path: Path) -> None:
    """Else each of its modules, as it is made, costs a walk through all models of the process."""
    Tiny().model().save_pretrained(tmp_path)
    mesh = px.init_mesh()
    kept = px.from_pretrained(tmp_path, mesh)  # noqa: F841 (to be looked at)
    with mock.patch.object(refusals, "owners_of", side_effect=AssertionError("searched")):
        px.from_pretrained(tmp_path, mesh)
        with pytest.raises(AssertionError, match="searched"):
            torch.nn.Linear(2, 2)


def test_a_plain_module_beside_a_parallel_model_is_quickly_made() -> None:
    """Each of its initializations asks whose parameter it fills: 18 ms of 723 layouts before."""
    kept = parallel(Tiny().model(), px.init_mesh())
    with mock.patch.object(owners, "named_shards", side_effect=AssertionError("searched")):
        torch.nn.Linear(2, 2)
        with pytest.raises(AssertionError, match="searched"):
            torch.nn.init.normal_(kept.lm_head.weight)
