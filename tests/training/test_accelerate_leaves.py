"""A loop around accelerate under ``px.Invariant``: the bits of one process on any layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest import mock

import accelerate
import peft
import pytest
import torch
import torch.distributed as dist
from interplay_accelerate import processes
from ranks import pool
from reference import Tiny, mesh_of, parallel, uneven_rows
from reference_leaves import Layout, as_a_chain, sweep
from reference_mixtral import TinyMixtral
from torch.utils.data import DataLoader, IterableDataset

import parallel_ext as px
from parallel_ext.nn import leaf_sums

TINY = Tiny(dtype=torch.float32)
MIXTURE = TinyMixtral(num_experts=5, top_k=3, dtype=torch.bfloat16, balance=True)
LEAVES, ROWS = 6, 2
STEPS = 2  # of an epoch
LAYOUTS = [(2, 1, 2), (3, 1, 3), (3, 3, 0), (4, 2, 2)]

Found = tuple[list[str], str]
"""Losses of leaves, norms and learning rates as they come, and ``px.digest``."""


class _Job:
    """A model and all else that a script prepares."""

    def __init__(self, tp: int, zero: int, options: dict[str, Any]) -> None:
        tiny = options.get("tiny", TINY)
        over = tp if tp > 1 else dist.get_world_size()  # experts over tp ranks, or over dp ranks
        mesh = mesh_of(tp=tp, ep=over if isinstance(tiny, TinyMixtral) else 1)
        self.accelerator = accelerate.Accelerator(
            cpu=True,
            gradient_accumulation_steps=options.get("accumulation", LEAVES // mesh.dp_size),
            mixed_precision=options.get("mixed_precision"),
        )
        model = tiny.model()
        if not options.get("plain"):
            model = parallel(model, mesh, invariant=px.Invariant(8, leaves=LEAVES))
        if options.get("lora"):
            torch.manual_seed(0)
            lora = px.LoraConfig(r=3, lora_dropout=0.2, target_modules="all-linear")
            model = peft.get_peft_model(model, lora).train()
        if options.get("mixed_precision"):
            model.gradient_checkpointing_enable()
        if zero:
            px.data_parallel(model, mesh, zero)
        self.rows = uneven_rows(tiny.vocab_size, options.get("rows", ROWS * LEAVES * STEPS), 1)
        self.loader = DataLoader(
            options.get("dataset", self.rows),
            ROWS,
            shuffle="dataset" not in options,
            generator=torch.Generator().manual_seed(5),
        )
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.7**step)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(
            model, optimizer, scheduler
        )
        self.log: list[str] = []

    def epoch(self, evaluates: bool = False, bare: bool = False) -> None:
        accelerator, model = self.accelerator, self.model
        for batch in self.loader:
            if evaluates:
                self._evaluate(batch)
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                if bare:
                    loss.backward()
                else:
                    accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            self.log += [each.hex() for each in accelerator.gather(loss.detach()[None]).tolist()]
            if accelerator.sync_gradients:
                self.log += [norm.item().hex(), self.scheduler.get_last_lr()[0].hex()]

    def _evaluate(self, batch: dict[str, torch.Tensor]) -> None:
        """Between two leaves, of which nothing may stay: the loss is that of all dp ranks."""
        self.model.eval()
        with torch.no_grad():
            output, labels = self.model(**batch), batch["labels"][:, 1:].flatten()
        self.model.train()
        logits = output.logits[:, :-1].flatten(0, 1)
        own = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
        total, count = self.accelerator.reduce(torch.stack([own, (labels != -100).sum()]))
        loss = self.accelerator.reduce(output.loss, "mean")
        torch.testing.assert_close(loss, total / count)


def _train(tp: int, zero: int, options: dict[str, Any], root: Path | None = None) -> Found:
    """Train two epochs; of ``root`` the second one, or the first one if it is not there."""
    with processes():
        job = _Job(tp, zero, options)
        job.loader = job.accelerator.prepare(job.loader)
        saved = root is not None and (root / "state").exists()
        if saved:
            job.accelerator.load_state(root / "state")
            for _ in job.loader:  # the generator of the first epoch's order
                pass
        for _ in range(1 if root is not None else 2):
            job.epoch(options.get("evaluates", False))
        if root is not None and not saved:
            job.accelerator.save_state(root / "state")
        return job.log, px.digest(job.model)


@lru_cache
def _of_one_process() -> Found:
    (whole,) = pool(1).run(_train, 1, 0, {})
    return whole


@sweep([{"lora": True}, {"mixed_precision": "bf16"}, {"tiny": MIXTURE}], LAYOUTS, often=[(4, 2, 2)])
def test_any_layout_has_the_bits_of_one_process(
    case: dict[str, Any], layouts: Sequence[Layout]
) -> None:
    (whole,) = pool(1).run(_train, 1, 0, case)
    for ranks, tp, zero in layouts:
        for found in pool(ranks).run(_train, tp, zero, case):
            assert found == whole


def test_evaluations_between_leaves_change_nothing() -> None:
    for found in pool(2).run(_train, 1, 2, {"evaluates": True}):
        assert found == _of_one_process()


def test_a_loop_resumes_on_other_layouts_with_the_same_bits(tmp_path: Path) -> None:
    log, digest = _of_one_process()
    for saving, loading in (((4, 2, 2), (3, 1, 3)), ((3, 1, 2), (1, 1, 0))):
        folder = tmp_path / f"{saving} to {loading}"
        for ranks, tp, zero in (saving, loading):
            found = pool(ranks).run(_train, tp, zero, {}, folder)
        assert found == [(log[len(log) // 2 :], digest)] * loading[0]


@pytest.mark.parametrize("tiny", [Tiny(), replace(MIXTURE, dtype=torch.float64)], ids=["llama", ""])
def test_the_loop_is_that_of_accelerate_in_one_process(tiny: Tiny) -> None:
    """Which accumulates as many batches, with losses and balance losses of their own."""
    ((plain, _),) = pool(1).run(_plain, {"tiny": tiny, "plain": True})
    for log, _ in pool(2).run(_train, 1, 2, {"tiny": tiny}):
        ours, theirs = (torch.tensor([float.fromhex(x) for x in each]) for each in (log, plain))
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=1e-9, atol=1e-9)


def _plain(options: dict[str, Any]) -> Found:
    with mock.patch.object(px, "digest", return_value=""):
        return _train(1, 0, options)


def _by_train_leaves(tp: int, zero: int) -> Found:
    """With all but the loader prepared, which gives every rank the whole batch."""
    with processes():
        job = _Job(tp, zero, {})
        for batch in DataLoader(job.rows, ROWS * LEAVES):
            loss = px.train_leaves(job.model, batch)
            norm = job.accelerator.clip_grad_norm_(job.model.parameters(), 0.5)
            job.optimizer.step()
            job.scheduler.step()
            job.optimizer.zero_grad()
            rate = job.scheduler.get_last_lr()[0]
            job.log += [each.hex() for each in (loss.item(), norm.item(), rate)]
        return job.log, px.digest(job.model)


def test_leaves_of_a_whole_batch_train_a_prepared_model_too() -> None:
    (whole,) = pool(1).run(_by_train_leaves, 1, 0)
    for found in pool(4).run(_by_train_leaves, 2, 2):
        assert found == whole


def _as_a_chain(*args: Any) -> Found:
    with mock.patch.object(leaf_sums, "push", as_a_chain):
        return _train(*args)


def test_the_tests_above_notice_sums_in_another_order() -> None:
    for found in pool(2).run(_as_a_chain, 1, 2, {}):
        assert found != _of_one_process()


class _Endless(IterableDataset):
    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        yield from uneven_rows(TINY.vocab_size, 24, 1)


def _misused(options: dict[str, Any]) -> None:
    with processes():
        job = _Job(1, options.get("zero", 2), options)
        if not options.get("whole batches"):
            job.loader = job.accelerator.prepare(job.loader)
        elif dist.get_rank() == 1:
            job.loader = DataLoader(job.rows, ROWS + 1)
        if options.get("early"):
            job.accelerator.backward(job.model(**next(iter(job.loader))).loss)
            job.optimizer.step()
        job.epoch(bare=options.get("bare", False))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"accumulation": 2}, "gradient_accumulation_steps=2 times dp=2 is another number"),
        ({"rows": ROWS * LEAVES + 1}, "the last one of this epoch has not its 2 on each dp rank"),
        ({"rows": ROWS * (LEAVES + 2)}, "but this epoch ends within one"),
        ({"early": True}, "AdamW.step before all leaves of a step"),
        ({"bare": True}, "every batch has an accelerator.backward(loss), which ends its leaf"),
        ({"dataset": _Endless()}, "an IterableDataset has no length"),
        ({"whole batches": True}, "the batch's rows"),
        ({"zero": 0}, "needs px.data_parallel"),
    ],
    ids=lambda each: each if isinstance(each, str) else ", ".join(each),
)
def test_what_is_not_served_is_refused(options: dict[str, Any], words: str) -> None:
    pool(2).assert_raises(_misused, options, words=words)
