"""``px.Trainer`` around models that classify, and batches whose repeated rows cannot be marked."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from interplay_accelerate import processes
from ranks import pool
from reference import Tiny, mesh_of, quietly
from versions import needs_trainer

import parallel_ext as px

pytestmark = needs_trainer

ROWS_AT_ONCE, EVALUATED_AT_ONCE = 4, 2
KINDS = {
    "sequence": (transformers.AutoModelForSequenceClassification, {}),
    "regression": (transformers.AutoModelForSequenceClassification, {"num_labels": 1}),
    "several labels": (
        transformers.AutoModelForSequenceClassification,
        {"problem_type": "multi_label_classification"},
    ),
    "token": (transformers.AutoModelForTokenClassification, {}),
}


def rows_of(kind: str, number: int) -> list[dict[str, torch.Tensor]]:
    """Rows with the labels of their kind; of tokens equally many, since batches are means."""
    generator = torch.Generator().manual_seed(3)
    shapes = {"sequence": (), "regression": (), "several labels": (5,), "token": (7,)}
    rows = []
    for _ in range(number):
        ids = torch.randint(3, 101, (7,), generator=generator)
        labels = torch.randint(0, 5, shapes[kind], generator=generator)
        if kind == "several labels":
            labels = (labels > 2).float()
        if kind == "regression":
            labels = labels - 2.5  # no ids of tokens
        rows.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
    return rows


def one_sequence(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """All rows of a batch behind each other, as collators without padding make them."""
    ids = torch.cat([row["input_ids"] for row in rows])[None]
    return {"input_ids": ids, "labels": ids.clone()}


def trained(kind: str, number: int, tp: int, folder: Path) -> list[dict[str, float]]:
    """The logs of a training and its evaluation; of the plain model in one process."""
    parallel, dp = dist.is_initialized(), 1
    with processes(), quietly():
        torch.manual_seed(1)
        config = Tiny(layers=1).config()
        cls, options = KINDS.get(kind, (transformers.AutoModelForCausalLM, {}))
        for name, value in {"num_labels": 5, "classifier_dropout": 0.0, **options}.items():
            setattr(config, name, value)
        model = cls.from_config(config)
        if parallel:
            mesh = mesh_of(tp=tp)
            model, dp = px.parallelize(model, mesh), mesh.dp_size
            px.data_parallel(model, mesh)
        rows = rows_of(kind if kind in KINDS else "sequence", number)
        trainer = (px.Trainer if parallel else transformers.Trainer)(
            model,
            transformers.TrainingArguments(
                str(folder),
                use_cpu=True,
                per_device_train_batch_size=ROWS_AT_ONCE // dp,
                per_device_eval_batch_size=EVALUATED_AT_ONCE // dp,
                logging_steps=1,
                learning_rate=1e-2,
                num_train_epochs=2,
                eval_strategy="steps",  # so that the model is in eval mode when a batch is taken
                eval_steps=1,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
            ),
            train_dataset=rows,
            eval_dataset=rows,
            data_collator=one_sequence if kind == "one sequence" else None,
        )
        trainer.train()
        kept = ("loss", "grad_norm", "eval_loss")
        return [{k: v for k, v in e.items() if k in kept} for e in trainer.state.log_history]


@pytest.mark.parametrize(
    ("kind", "number", "tp"),
    [
        *((kind, 8, tp) for kind in KINDS for tp in (1, 2)),
        *(("sequence", 5, 1), ("sequence", 7, 1)),  # a shorter last batch of one dp rank, or both
    ],
)
def test_a_classifier_trains_as_in_one_process(
    kind: str, number: int, tp: int, tmp_path: Path
) -> None:
    (theirs,) = pool(1).run(trained, kind, number, 1, tmp_path / "plain")
    for ours in pool(2).run(trained, kind, number, tp, tmp_path / "ours"):
        assert len(ours) == len(theirs) > 4
        for entry, of_plain in zip(ours, theirs, strict=True):
            assert entry == pytest.approx(of_plain, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("kind", ["regression", "several labels", "one sequence"])
def test_repeated_rows_that_would_count_are_refused(kind: str, tmp_path: Path) -> None:
    words = "training would count rows twice, which fill up the last batch of the dp=2 ranks"
    pool(2).assert_raises(trained, kind, 6, 1, tmp_path, words=words)
