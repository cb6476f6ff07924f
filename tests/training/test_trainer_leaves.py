"""``px.Trainer`` under ``px.Invariant``: the bits of one process, logged, trained and saved."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from interplay_accelerate import processes
from ranks import pool
from reference import Tiny, mesh_of, quietly
from reference_cogagent import batch_of, frozen, picture, text, tiny_model
from reference_leaves import Layout, sweep
from reference_mixtral import TinyMixtral
from versions import needs_trainer

import parallel_ext as px
from parallel_ext.training import trainer as px_trainer
from parallel_ext.training import trainer_leaves

pytestmark = needs_trainer

TINY = Tiny(dtype=torch.float32)
BALANCED = TinyMixtral(num_experts=5, top_k=3, dtype=torch.float32, balance=True)
LEAVES, ROWS = 6, 24
LAYOUTS = [(2, 1, 2), (3, 1, 3), (3, 3, 0), (4, 2, 2)]
COGAGENT = "a CogAgent"
FOUND = tuple[list[dict[str, Any]], str]


class Logs(transformers.TrainerCallback):
    """Keeps losses and norms."""

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        names = ("loss", "grad_norm", "learning_rate", "train_loss")
        if found := {name: logs[name].hex() for name in names if name in logs}:
            self.entries.append(found)


def _rows(vocab_size: int, number: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    lengths = [5 + row % 4 for row in range(number)]
    return [{"input_ids": torch.randint(0, vocab_size, (n,), generator=generator)} for n in lengths]


def _padded(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], True, -1)
    mask = ids >= 0
    found = {"input_ids": ids.clamp(min=0), "attention_mask": mask.long()}
    return found | {"labels": ids.masked_fill(~mask, -100)}


def _made(tp: int, zero: int, folder: Path, rows: int = ROWS, **options: Any) -> Any:
    import peft

    tiny = options.pop("tiny", TINY)
    over = tp if tp > 1 else dist.get_world_size()  # experts over tp ranks, or over dp ranks
    mesh = mesh_of(tp=tp, ep=over if tiny == BALANCED else 1)
    invariant = px.Invariant(8, leaves=options.pop("leaves", LEAVES))
    if tiny == COGAGENT:
        reference, collate = frozen(tiny_model().float()), partial(batch_of, side="left")
        data = [[picture(4), text(9), text(7, cross=True)][row % 3] for row in range(rows)]
    else:
        reference, collate, data = tiny.model(), _padded, _rows(tiny.vocab_size, rows)
    model = px.parallelize(reference, mesh, invariant=invariant)
    if options.pop("lora", False):
        torch.manual_seed(0)
        lora = px.LoraConfig(r=3, lora_dropout=0.2, target_modules="all-linear")
        model = peft.get_peft_model(model, lora)
    if zero:
        px.data_parallel(model, mesh, zero)
    optim = options.pop("optim", "adamw_torch")
    how = {"gradient_accumulation_steps": LEAVES // mesh.dp_size, "num_train_epochs": 2} | options
    args = transformers.TrainingArguments(
        str(folder),
        use_cpu=True,
        per_device_train_batch_size=2,
        optim=optim,
        learning_rate=1e-2,
        max_grad_norm=0.3,
        report_to=[],
        disable_tqdm=True,
        logging_steps=2 if "seed" in options else 1,
        save_steps=2,
        remove_unused_columns=False,
        **how,
    )
    logs = Logs()
    trainer = px.Trainer(model, args, collate, data, callbacks=[logs])
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer, logs


def _train(
    tp: int, zero: int, folder: Path, resume: bool = False, options: dict[str, Any] | None = None
) -> FOUND:
    with processes(), quietly():
        trainer, logs = _made(tp, zero, folder, **(options or {}))
        trainer.train(resume_from_checkpoint=resume)
        return logs.entries, px.digest(trainer.model)


HOW = [
    *({"seed": 7}, {"gradient_checkpointing": True, "bf16": True}, {"lora": True}),
    *({"tiny": COGAGENT}, {"tiny": BALANCED, "bf16": True}),
]


@sweep(HOW, LAYOUTS, often=[(4, 2, 2)])
def test_any_layout_has_the_bits_of_one_process(
    case: dict[str, Any], layouts: Sequence[Layout], tmp_path: Path
) -> None:
    (whole,) = pool(1).run(_train, 1, 0, tmp_path / "one", False, case)
    for ranks, tp, zero in layouts:
        folder = tmp_path / f"{ranks} {tp}"
        for found in pool(ranks).run(_train, tp, zero, folder, False, case):
            assert found == whole


def test_the_loss_has_the_balance_loss_of_all_batches_of_a_step(tmp_path: Path) -> None:
    options = {"tiny": BALANCED, "rows": 2 * LEAVES, "num_train_epochs": 1}
    whole = _padded(_rows(BALANCED.vocab_size, 2 * LEAVES))
    expected = BALANCED.model()(**whole).loss.item()
    for entries, _ in pool(2).run(_train, 1, 2, tmp_path, False, options):
        assert abs(float.fromhex(entries[0]["loss"]) / expected - 1) < 1e-4


def test_a_training_resumes_on_other_layouts_with_the_same_bits(tmp_path: Path) -> None:
    first = {"num_train_epochs": 1, "lr_scheduler_type": "constant"}
    both = {"num_train_epochs": 2, "lr_scheduler_type": "constant"}
    ((entries, digest),) = pool(1).run(_train, 1, 0, tmp_path / "both", False, both)
    for (saving, tp, zero), (loading, other, stage) in (
        ((4, 2, 2), (3, 1, 3)),
        ((3, 1, 2), (1, 1, 0)),
    ):
        folder = tmp_path / f"{saving} to {loading}"
        pool(saving).run(_train, tp, zero, folder, False, first)
        for of_rest, own in pool(loading).run(_train, other, stage, folder, True, both):
            assert own == digest
            assert of_rest[:2] == entries[2:4]


def _reversed(*args: Any) -> FOUND:
    """With the batches of each rank from the last to the first."""
    real = trainer_leaves.run_leaves

    def run(model: Any, batches: list[Any], *rest: Any) -> Any:
        return real(model, batches[::-1], *rest)

    with mock.patch.object(px_trainer, "run_leaves", run):
        return _train(*args)


def test_the_tests_above_notice_leaves_in_another_order(tmp_path: Path) -> None:
    (whole,) = pool(1).run(_train, 1, 0, tmp_path / "one")
    for found in pool(3).run(_reversed, 1, 2, tmp_path / "three"):
        assert found != whole


def _begun(tp: int, zero: int, folder: Path, options: dict[str, Any]) -> None:
    with processes(), quietly():
        _made(tp, zero, folder, **options)[0].train()


@pytest.mark.parametrize(
    ("options", "zero", "words"),
    [
        ({"leaves": 4}, 2, "gradient_accumulation_steps=3 times dp=2 is another number"),
        ({"rows": 23}, 2, "train_dataset has 23 rows"),
        ({"label_smoothing_factor": 0.1}, 2, "label_smoothing_factor is not served"),
        ({}, 0, "needs px.data_parallel"),
        ({"optim": "adamw_torch_fused"}, 2, "AdamW with fused=True has other bits"),
    ],
)
def test_what_is_not_served_is_refused(
    options: dict[str, Any], zero: int, words: str, tmp_path: Path
) -> None:
    pool(2).assert_raises(_begun, 1, zero, tmp_path, options, words=words)
