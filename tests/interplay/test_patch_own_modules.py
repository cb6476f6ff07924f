"""Scripts under ``px.patch`` that train a module of their own around a model of transformers."""

from __future__ import annotations

import errno
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import accelerate
import peft
import pytest
import torch
import transformers
from interplay_accelerate import processes, sgd_arguments
from ranks import pool
from reference import Tiny, refusal
from safetensors.torch import load_file
from torch import nn
from versions import needs_trainer

import parallel_ext as px
from parallel_ext.parallel import adopting, weights

CAUSAL = "head of a causal model"


class Scores(nn.Module):
    """Scores three classes of a text by a decoder and a head."""

    def __init__(self, directory: str, cls: Any = transformers.AutoModel) -> None:
        super().__init__()
        self.decoder = cls.from_pretrained(directory, dtype=torch.float64)
        torch.manual_seed(5)
        self.head = nn.Linear(self.decoder.config.hidden_size, 3, dtype=torch.float64)

    def forward(self, ids: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        hidden = self.decoder(input_ids=ids, output_hidden_states=True).hidden_states[-1][:, -1]
        return nn.functional.cross_entropy(self.head(hidden), classes)


@contextmanager
def _patched(tp: int | None) -> Iterator[tuple[int, int]]:
    """Yield this dp rank and the number of them; without a ``tp`` nothing is patched."""
    with processes():
        mesh = None if tp is None else px.patch(tp=tp)
        try:
            yield (0, 1) if mesh is None else (mesh.dp_rank, mesh.dp_size)
        finally:
            px.unpatch()


def _train(directory: str, tp: int | None, how: str) -> list[float]:
    """Losses and norms of a loop in one of the ways of scripts."""
    with _patched(tp) as (rank, size):
        causal = [transformers.AutoModelForCausalLM] * (how == CAUSAL)
        called = model = Scores(directory, *causal).train()
        if how == "DDP" and tp is not None:
            called = nn.parallel.DistributedDataParallel(model)
        groups = [{"params": each.parameters()} for each in model.children()]
        taken = groups if how == "groups" else called.parameters()
        if how == "frozen":  # for good, and the head for a step
            model.decoder.requires_grad_(False)
            model.head.bias.requires_grad_(False)
        if how.startswith("head"):
            model.decoder.requires_grad_(False)
            taken = model.head.parameters()
        optimizer = torch.optim.AdamW(taken, lr=0.01, foreach=True)
        accelerator = accelerate.Accelerator(cpu=True) if how == "accelerate" else None
        if accelerator is not None:
            called, optimizer = accelerator.prepare(model, optimizer)
        draws, found = torch.Generator().manual_seed(3), []
        for _ in range(3):
            model.head.bias.requires_grad_(how != "frozen" or bool(found))
            ids = torch.randint(1, 101, (4, 7), generator=draws)[rank::size]
            loss = called(ids, torch.randint(3, (4,), generator=draws)[rank::size])
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            found += [loss.item(), float(norm)]
        if accelerator is not None:
            accelerator.save_model(called, f"{directory}/{'plain' if tp is None else 'ours'}")
        return found


@pytest.mark.parametrize(
    ("how", "size", "tp"),
    [
        *(("plain", 4, 2), ("groups", 2, 1), ("DDP", 2, 1), ("DDP", 2, 2), ("accelerate", 4, 2)),
        *(("frozen", 4, 2), ("head", 2, 1), ("head", 4, 2), (CAUSAL, 2, 2)),
    ],
)
def test_a_loop_trains_it_as_in_one_process(tmp_path: Path, size: int, tp: int, how: str) -> None:
    Tiny().model().save_pretrained(tmp_path)
    expected = torch.tensor(pool(1).run(_train, str(tmp_path), None, how)[0])
    found = torch.tensor(pool(size).run(_train, str(tmp_path), tp, how))
    torch.testing.assert_close(found.mean(0), expected, rtol=1e-6, atol=0)  # norms go by fp32
    if how == "accelerate":
        saved = (load_file(tmp_path / each / "model.safetensors") for each in ("ours", "plain"))
        torch.testing.assert_close(*saved, rtol=1e-3, atol=1e-5)


def _fill_the_disk(*args: Any, **options: Any) -> None:
    path = next(Path(each) for each in args if not isinstance(each, dict))
    path.write_bytes(b"half")
    raise OSError(errno.ENOSPC, "No space left on device")


def _save_twice(directory: str, saved_by: str) -> None:
    """A save, and another one over it, whose disk is full."""
    with _patched(2):
        if saved_by == "accelerate":
            model = Scores(directory)
            save = functools.partial(accelerate.Accelerator(cpu=True).save_model, model)
            writer = (weights, "save_file")
        else:
            model = transformers.LlamaForQuestionAnswering.from_pretrained(directory)
            save, writer = model.save_pretrained, (transformers.modeling_utils, "safe_save_file")
        torch.optim.SGD(model.parameters())  # from here on the module around the decoder is known
        save(f"{directory}/out")
        full = mock.patch.object(*writer, _fill_the_disk)
        with full, pytest.raises((OSError, RuntimeError), match="No space"):
            save(f"{directory}/out")


@pytest.mark.parametrize("saved_by", ["accelerate", "transformers"])
def test_a_save_that_fails_leaves_the_one_before_it(tmp_path: Path, saved_by: str) -> None:
    Tiny().model().save_pretrained(tmp_path)
    pool(2).run(_save_twice, str(tmp_path), saved_by)
    assert load_file(tmp_path / "out" / "model.safetensors")
    others = set() if saved_by == "accelerate" else {"config.json"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"model.safetensors"} | others
    assert not list(tmp_path.glob(".*"))


def _looks(directory: str) -> int:
    """How often an optimizer with a group for each parameter looks at what it is given."""
    with _patched(1):
        model = Scores(directory)
        groups = [{"params": parameter} for parameter in model.parameters()]
        looked = mock.Mock(wraps=adopting.adopt_owners)
        with mock.patch.object(adopting, "adopt_owners", looked):
            torch.optim.SGD(groups, lr=0.1)
        return looked.call_count


def test_an_optimizer_of_many_groups_looks_at_them_once(tmp_path: Path) -> None:
    Tiny().model().save_pretrained(tmp_path)
    assert pool(2).run(_looks, str(tmp_path)) == [1, 1]


def _one_head_for_two(directory: str) -> str:
    with _patched(2):
        one, other = Scores(directory), Scores(directory)
        other.head = one.head
        for each in (one, other):
            each.decoder.requires_grad_(False)
        return refusal(lambda: torch.optim.SGD(one.head.parameters(), lr=0.1))


def test_one_head_on_two_decoders_is_refused(tmp_path: Path) -> None:
    """Their order differs from rank to rank."""
    Tiny().model().save_pretrained(tmp_path)
    for found in pool(2).run(_one_head_for_two, str(tmp_path)):
        assert "a parameter of two modules, each around a model, a LlamaModel and another" in found


def _answer(folder: str, tp: int | None, with_trainer: bool, lora: bool) -> list[float]:
    """Norms of a training of a model for answers, whose head every rank holds; it is saved."""
    with _patched(tp) as (rank, size):
        torch.manual_seed(1)
        config = Tiny(dtype=torch.float32).config()
        model = transformers.LlamaForQuestionAnswering(config).train()
        if lora:
            targets = {"target_modules": ["q_proj"], "modules_to_save": ["qa_outputs"]}
            model = peft.get_peft_model(model, peft.LoraConfig(task_type="QUESTION_ANS", **targets))
        draws = torch.Generator().manual_seed(3)
        ids = torch.randint(1, 101, (12, 7), generator=draws)
        ends = torch.randint(7, (12, 2), generator=draws)
        if with_trainer:
            return _by_trainer(model, folder, ids, ends, 4 // size)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        norms = []
        for step in range(3):
            own = slice(4 * step + rank, 4 * step + 4, size)
            starts, stops = ends[own].unbind(1)
            model(input_ids=ids[own], start_positions=starts, end_positions=stops).loss.backward()
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
            optimizer.zero_grad()
        if tp is None or torch.distributed.get_rank() == 0:  # the other ranks join
            model.save_pretrained(f"{folder}/out")
        if tp is not None:
            torch.distributed.barrier()
        return norms


def _by_trainer(
    model: nn.Module, folder: str, ids: torch.Tensor, ends: torch.Tensor, rows: int
) -> list[float]:
    data = [
        {"input_ids": row, "start_positions": start, "end_positions": stop}
        for row, (start, stop) in zip(ids, ends.tolist(), strict=True)
    ]
    trainer = transformers.Trainer(
        model, sgd_arguments(f"{folder}/run", rows, 3), train_dataset=data
    )
    trainer.train()
    trainer.save_model(f"{folder}/out")
    return [each["grad_norm"] for each in trainer.state.log_history if "loss" in each]


def _compare(tmp_path: Path, size: int, tp: int, *how: Any) -> None:
    folders = [tmp_path / "plain", tmp_path / "ours"]
    expected = pool(1).run(_answer, str(folders[0]), None, *how)[0]
    for found in pool(size).run(_answer, str(folders[1]), tp, *how):
        assert found == pytest.approx(expected, rel=1e-3)
    plain, ours = (load_file(next((each / "out").glob("*.safetensors"))) for each in folders)
    assert plain.keys() == ours.keys()
    for name, tensor in plain.items():
        assert ours[name].shape == tensor.shape, name
        if "lora_" not in name:  # which begin with other draws
            torch.testing.assert_close(ours[name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("size", "tp"), [(2, 1), (4, 2)])
def test_a_model_for_answers_trains_and_is_saved_whole(tmp_path: Path, size: int, tp: int) -> None:
    _compare(tmp_path, size, tp, False, False)


@needs_trainer
def test_a_trainer_trains_it(tmp_path: Path) -> None:
    _compare(tmp_path, 4, 2, True, False)


def test_an_adapter_on_it(tmp_path: Path) -> None:
    folder = str(tmp_path)
    two, four = (pool(size).run(_answer, f"{folder}/{size}", 2, False, True)[0] for size in (2, 4))
    assert two == pytest.approx(four, rel=1e-3)
    saved = [load_file(f"{folder}/{size}/out/adapter_model.safetensors") for size in (2, 4)]
    assert saved[0].keys() == saved[1].keys()
    assert any("qa_outputs" in name for name in saved[0])
    for name, tensor in saved[0].items():
        torch.testing.assert_close(saved[1][name], tensor, rtol=1e-4, atol=1e-5)
