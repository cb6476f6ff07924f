"""``px.Trainer`` beside transformers' Trainer in one process: logs, predictions, files."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import peft
import pytest
import torch
import torch.distributed as dist
import transformers
from interplay_accelerate import processes
from ranks import pool
from reference import Tiny, parallel, quietly, uneven_rows
from reference_lora import config
from reference_mixtral import Layout, TinyMixtral
from safetensors.torch import load_file
from torch.nn import functional
from torch.utils._pytree import tree_leaves
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler
from versions import needs_trainer

import parallel_ext as px
from parallel_ext.distributed.errors import CheckpointError
from parallel_ext.interplay.data_loaders import drawn_together, seed_workers_of_dp_ranks
from parallel_ext.training import trainer as px_trainer

pytestmark = needs_trainer

LLAMA, MIXTRAL = Tiny(layers=1), TinyMixtral(num_experts=5, layers=1, balance=True)
ONE = Layout(1, 1, 1)
FP32_ERROR = 1e-6  # PEFT's factors are of fp32, and sums of transformers' label smoothing
ROWS_AT_ONCE = 4
STEPS = {"logging_steps": 1, "save_steps": 1, "eval_steps": 2, "eval_strategy": "steps"}
BEST = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}


@dataclass(frozen=True)
class Job:
    """A training, of a parallel model or, without a layout, of the plain one."""

    layout: Layout | None = None
    tiny: Any = LLAMA
    zero: int | None = None
    lora: bool = False
    own_loss: bool = False
    data: type = list  # or Stream, or SizedStream
    dispatched: bool = False  # rank 0 reads a stream for all
    shifted: bool = False  # rows have shift_labels, too
    rows: tuple[int, int] = (24, 7)  # for training and evaluation
    ignored: tuple[str, ...] = ()  # outputs that are not predicted
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def error(self) -> float:
        return FP32_ERROR if self.lora or "label_smoothing_factor" in self.options else 1e-9

    def rows_for(self, what: int, seed: int) -> Any:
        """The rows for training (0), or evaluation (1)."""
        rows = uneven_rows(self.tiny.vocab_size, self.rows[what], seed)
        for row in rows if self.shifted else ():
            row["shift_labels"] = functional.pad(row["labels"], (0, 1), value=-100)[1:]
        return self.data(rows)

    @property
    def plain(self) -> Job:
        return replace(self, layout=None, zero=None)


class Stream(torch.utils.data.IterableDataset):
    """Rows of which nobody knows how many there are."""

    def __init__(self, rows: list[dict[str, torch.Tensor]]) -> None:
        self._rows = rows

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return iter(self._rows)


class SizedStream(Stream):
    """Rows that come one after the other, of a known number."""

    def __len__(self) -> int:
        return len(self._rows)


DP, BOTH = Layout(2, 1, 1), Layout(2, 2, 1)
GROUPED = {"train_sampling_strategy": "group_by_length"}
UNCOUNTED = {"include_num_input_tokens_seen": "no"}
OF_ROUTERS = ("past_key_values", "router_logits", "aux_loss")
JOBS = {
    "one rank": Job(ONE),
    "tp 2": Job(Layout(1, 2, 1)),
    "dp 2": Job(DP, zero=2),
    "dp 2, tp 2": Job(BOTH, zero=3),
    "dp 2, counts of each rank": Job(DP, zero=2, options={"average_tokens_across_devices": False}),
    "tp 2, lora": Job(Layout(1, 2, 1), lora=True),
    "dp 2, lora": Job(DP, zero=2, lora=True),
    "ep 2": Job(Layout(1, 2, 2), MIXTRAL),
    "dp 2, ep 2": Job(Layout(2, 1, 2), MIXTRAL, zero=2, ignored=OF_ROUTERS),
    "dp 2, ep 2, a shorter last batch": Job(
        Layout(2, 1, 2),
        MIXTRAL,
        zero=2,
        rows=(22, 7),
        ignored=OF_ROUTERS,
        options={"include_num_input_tokens_seen": "no"},
    ),
    "tp 2, label smoothing": Job(Layout(1, 2, 1), options={"label_smoothing_factor": 0.1}),
    "dp 2, label smoothing": Job(DP, zero=2, options={"label_smoothing_factor": 0.1}),
    "dp 2, label smoothing, counts of each rank": Job(
        DP,
        zero=2,
        options={"label_smoothing_factor": 0.1, "average_tokens_across_devices": False},
    ),
    "dp 2, own loss": Job(DP, zero=2, own_loss=True),
    "dp 2, a shorter last batch": Job(
        DP, zero=2, rows=(22, 7), options={"include_num_input_tokens_seen": "no"}
    ),
    "dp 2, without the last batch": Job(
        DP,
        zero=2,
        rows=(23, 7),
        options={"dataloader_drop_last": True, "include_num_input_tokens_seen": "no"},
    ),
    **{
        f"{name}, rows of unknown number": Job(
            layout,
            zero=zero,
            data=Stream,
            rows=(22, 7),
            options={"max_steps": 5, **UNCOUNTED},
        )
        for name, layout, zero in (
            ("tp 2", Layout(1, 2, 1), None),
            ("dp 2, tp 2", BOTH, 2),
        )
    },
    "dp 2, a stream of known length": Job(
        DP, zero=2, data=SizedStream, rows=(22, 7), options=UNCOUNTED
    ),
    "dp 2, a stream that rank 0 reads": Job(
        DP, zero=2, data=SizedStream, dispatched=True, rows=(22, 6), options=UNCOUNTED
    ),
    "dp 2, shifted labels": Job(
        DP,
        zero=2,
        shifted=True,
        rows=(22, 7),
        options={"remove_unused_columns": False, **UNCOUNTED},
    ),
    "dp 2, no clipping and no logs": Job(
        DP, zero=2, options={"max_grad_norm": 0.0, "logging_steps": 500}
    ),
    "tp 2, rows by length": Job(Layout(1, 2, 1), options=GROUPED),
    "dp 2, rows by length": Job(DP, zero=2, options=GROUPED),
    "tp 2, SGD without a state": Job(Layout(1, 2, 1), options={"optim": "sgd"}),
    "tp 2, checkpointing, weights alone": Job(
        Layout(1, 2, 1), options={"gradient_checkpointing": True, "save_only_model": True}
    ),
}


def fp64_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    vocab_size: int,
    num_items_in_batch: Any = None,
    **_: Any,
) -> torch.Tensor:
    """The loss of transformers' causal models, which goes by fp32."""
    how = "mean" if num_items_in_batch is None else "sum"
    logits, targets = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    loss = functional.cross_entropy(logits, targets, reduction=how)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def own_loss(output: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """Twice the cross entropy, by the count that the trainer gives."""
    logits, targets = output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    total = functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
    return 2 * total / num_items_in_batch


def logits_of(predictions: Any) -> Any:
    """The logits [N, S, V], beside which a mixture returns those of its routers."""
    parts = predictions if isinstance(predictions, tuple) else (predictions,)
    return next(part for part in parts if getattr(part, "ndim", 0) == 3)


def accuracy(prediction: Any) -> dict[str, float]:
    chosen = logits_of(prediction.predictions).argmax(-1)
    right = chosen[:, :-1] == prediction.label_ids[:, 1:]
    return {"accuracy": float(right.mean()), "rows": len(chosen)}


class Logs(transformers.TrainerCallback):
    """Keeps what is logged, without times."""

    def __init__(self) -> None:
        self.entries: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        timed = ("runtime", "per_second", "preparation")
        self.entries.append({k: v for k, v in logs.items() if not any(t in k for t in timed)})


@contextmanager
def world() -> Iterator[None]:
    """Let accelerate see the ranks of the pool."""
    with processes(), quietly():
        yield


def made(job: Job, folder: Path, seed: int = 1, cls: type | None = None) -> tuple[Any, Logs]:
    """The trainer of a job, and its logs."""
    model, dp = job.tiny.model(1 if job.lora else seed), 1  # its adapter alone is saved
    if job.layout is None:
        model.loss_function = fp64_loss
    else:
        mesh = job.layout.mesh() if dist.is_initialized() else px.init_mesh()
        model, dp = parallel(model, mesh), mesh.dp_size
    if job.lora:
        how = config(lora_dropout=0.0)
        base = job.tiny.model()
        base.loss_function = fp64_loss
        plain = peft.get_peft_model(base, peft.LoraConfig(**_plain(how)))
        factors = {n: v for n, v in plain.state_dict().items() if "lora_" in n}
        model = peft.get_peft_model(model, how) if job.layout else plain
        torch.manual_seed(seed)
        drawn = {name: torch.randn_like(value) for name, value in factors.items()}
        model.load_state_dict(drawn, strict=False)
    if job.zero:
        px.data_parallel(model, mesh, job.zero)
    stream = job.data is not list and not job.dispatched
    each_reads = {"accelerator_config": {"dispatch_batches": False}}  # not rank 0 for all
    args = transformers.TrainingArguments(
        str(folder),
        use_cpu=True,
        per_device_train_batch_size=ROWS_AT_ONCE // dp,
        per_device_eval_batch_size=ROWS_AT_ONCE // dp,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        num_train_epochs=1,
        report_to=[],
        disable_tqdm=True,
        **(each_reads if stream and job.layout else {}),
        **{"max_grad_norm": 0.3, "include_num_input_tokens_seen": "all", **STEPS, **job.options},
    )
    logs = Logs()
    cls = cls or (transformers.Trainer if job.layout is None else px.Trainer)
    trainer = cls(
        model,
        args,
        train_dataset=job.rows_for(0, 1),
        eval_dataset=job.rows_for(1, 2),
        compute_metrics=accuracy,
        compute_loss_func=own_loss if job.own_loss else None,
        callbacks=[logs],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer, logs


def _plain(how: Any) -> dict[str, Any]:
    names = ("r", "lora_alpha", "target_modules", "init_lora_weights", "lora_dropout")
    return {name: getattr(how, name) for name in names}


def run(
    job: Job, folder: Path, resume: Any = None, seed: int = 1, average: bool = True
) -> tuple[Any, ...]:
    """Train, evaluate and predict."""
    unscaled = mock.patch.object(
        px_trainer.TrainerMixin, "compute_loss", transformers.Trainer.compute_loss
    )
    with world():
        if not average:
            unscaled.start()
        try:
            trainer, logs = made(job, folder, seed)
            ignored = list(job.ignored) or None
            trainer.train(resume_from_checkpoint=resume, ignore_keys_for_eval=ignored)
            found = trainer.predict(job.rows_for(1, 3), ignore_keys=ignored)
            logits = torch.tensor(logits_of(found.predictions))
            return logs.entries, logits, found.metrics["test_loss"]
        finally:
            if not average:
                unscaled.stop()


class OwnBatches:
    """Makes batches by a sampler of its own, which leaves out a last one that is not full."""

    def get_train_dataloader(self) -> Any:
        rows = self.train_dataset
        batches = BatchSampler(SequentialSampler(rows), self.args.train_batch_size, drop_last=True)
        loader = DataLoader(rows, batch_sampler=batches, collate_fn=self.data_collator)
        return self.accelerator.prepare(loader)


_expected: dict[str, Any] = {}


def expected(name: str, folder: Path) -> Any:
    """What transformers' Trainer does with the plain model in one process."""
    job = JOBS[name].plain
    key = str(job)
    if key not in _expected:
        _expected[key] = pool(1).run(run, job, folder / "plain")[0]
    return _expected[key]


def check_same(ours: Any, theirs: Any, error: float = 1e-9) -> None:
    (entries, logits, loss), (of_one, plain_logits, plain_loss) = ours, theirs
    assert len(entries) == len(of_one)
    for entry, of_plain in zip(entries, of_one, strict=True):
        assert entry.keys() == of_plain.keys()
        for key, value in entry.items():  # a trainer adds losses up in fp32
            if key == "total_flos" and "num_input_tokens_seen" not in entry:
                continue  # of rows that fill up a batch too
            rel = 3e-7 if key in ("loss", "train_loss") else error
            assert value == pytest.approx(of_plain[key], rel=rel, abs=1e-9), key
    assert torch.allclose(logits, plain_logits, rtol=error, atol=10 * error)
    assert loss == pytest.approx(plain_loss, rel=error)


@pytest.mark.parametrize("name", JOBS)
def test_a_training_is_that_of_one_process(name: str, tmp_path: Path) -> None:
    job, theirs = JOBS[name], expected(name, tmp_path)
    for ours in pool(job.layout.world).run(run, job, tmp_path / "ours"):
        check_same(ours, theirs, job.error)


def _by_own_batches(job: Job, folder: Path) -> list[Any]:
    with world():
        base = transformers.Trainer if job.layout is None else px.Trainer
        trainer, logs = made(job, folder, cls=type("Own", (OwnBatches, base), {}))
        trainer.train()
        return [entry["loss"] for entry in logs.entries if "loss" in entry]


def test_all_rows_of_own_batches_count_where_a_short_one_is_left_out(tmp_path: Path) -> None:
    job = replace(JOBS["dp 2, without the last batch"], rows=(14, 7))
    (theirs,) = pool(1).run(_by_own_batches, job.plain, tmp_path / "plain")
    for ours in pool(2).run(_by_own_batches, job, tmp_path / "ours"):
        assert ours == pytest.approx(theirs, rel=3e-7)


def test_the_comparison_notices_a_loss_that_is_scaled_twice(tmp_path: Path) -> None:
    theirs = expected("dp 2", tmp_path)
    for ours in pool(2).run(run, JOBS["dp 2"], tmp_path / "ours", None, 1, False):
        with pytest.raises(AssertionError):
            check_same(ours, theirs)


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ("tp 2", "dp 2"),
        ("dp 2, tp 2", "one rank"),
        ("dp 2, lora", "tp 2, lora"),
        ("dp 2, ep 2", "ep 2"),
        ("tp 2, rows by length", "tp 2, rows by length"),
        ("tp 2, rows by length", "dp 2, rows by length"),
        ("tp 2, SGD without a state", "tp 2, SGD without a state"),
        *[(2 * (f"dp 2, {how}",)) for how in ("a shorter last batch", "without the last batch")],
    ],
)
def test_a_training_resumes_on_any_layout(saved: str, loaded: str, tmp_path: Path) -> None:
    """From the last checkpoint that is complete; other weights are there before."""
    folder = tmp_path / "ours"
    pool(JOBS[saved].layout.world).run(run, JOBS[saved], folder)
    shutil.copytree(folder / "checkpoint-3", folder / "checkpoint-kept-99")  # by a user
    (folder / "checkpoint-3" / "trainer_state.json").write_text('{"epoch":')  # killed while written
    shutil.rmtree(folder / "checkpoint-2" / "parallel_ext")  # killed before
    entries, *predicted = expected(loaded, tmp_path)
    rest = entries[1:]  # after the first step
    for ours in pool(JOBS[loaded].layout.world).run(run, JOBS[loaded], folder, True, 7):
        ours[0][-1].pop("train_loss"), (last := dict(rest[-1])).pop("train_loss")
        check_same(ours, ([*rest[:-1], last], *predicted), JOBS[loaded].error)


def _killed_while_it_makes_room(job: Job, folder: Path) -> str:
    """What a job resumes from that was killed when it had deleted the weights of its last step."""
    with world():
        trainer, _ = made(job, folder)
        trainer.train()
        trainer.state.global_step = 3

        def weights_alone(path: Path) -> None:
            for file in Path(path).rglob("*.safetensors"):
                file.unlink()
            raise OSError("killed")

        with (
            mock.patch("parallel_ext.training.trainer_files.shutil.rmtree", weights_alone),
            pytest.raises(OSError, match="killed"),
        ):
            trainer.save_model(str(folder / "checkpoint-3"), _internal_call=True)
        found = Path(trainer._last_checkpoint()).name
        trainer.save_model(str(folder / "checkpoint-3"), _internal_call=True)
        return found


def test_a_job_that_is_killed_while_it_replaces_a_step_resumes_from_the_one_before(
    tmp_path: Path,
) -> None:
    assert pool(2).run(_killed_while_it_makes_room, JOBS["tp 2"], tmp_path) == ["checkpoint-2"] * 2
    found = {path.name for path in tmp_path.iterdir()}
    assert found == {"checkpoint-1", "checkpoint-2", "checkpoint-3"}


def _last_where_a_rank_reads_nothing(job: Job, folder: Path) -> str:
    with world():
        trainer, _ = made(job, folder)
        trainer.train()
        patched = "parallel_ext.training.trainer_files._is_complete"
        with mock.patch(patched, side_effect=ValueError) if dist.get_rank() else nullcontext():
            return Path(trainer._last_checkpoint()).name


def test_only_rank_0_looks_for_the_last_checkpoint(tmp_path: Path) -> None:
    job = JOBS["tp 2"]
    assert pool(2).run(_last_where_a_rank_reads_nothing, job, tmp_path) == ["checkpoint-3"] * 2


def _predicted(job: Job, folder: Path) -> Any:
    with world():
        trainer, _ = made(job, folder)
        return trainer.predict(job.rows_for(1, 3)).predictions


def test_all_predictions_of_a_mixture_are_those_of_one_process(tmp_path: Path) -> None:
    """Those of its routers have a row for each token, and the balance loss is one number."""
    job = JOBS["ep 2"]
    (theirs,) = pool(1).run(_predicted, job.plain, tmp_path)
    for ours in pool(2).run(_predicted, job, tmp_path):
        assert len(ours) == len(theirs) == 3
        for own, of_plain in zip(tree_leaves(ours), tree_leaves(theirs), strict=True):
            assert own == pytest.approx(of_plain, rel=1e-9)


def test_router_logits_of_dp_ranks_are_refused(tmp_path: Path) -> None:
    job, words = JOBS["dp 2, ep 2"], "router_logits and aux_loss have no row for each sample"
    pool(2).assert_raises(_predicted, job, tmp_path, words=words)


def _files(job: Job, folder: Path) -> None:
    with world():
        trainer, _ = made(job, folder)
        trainer.train()
        trainer.save_model(str(folder / "final"))


def test_files_are_huggingfaces_and_lie_on_the_disk_once(tmp_path: Path) -> None:
    job = replace(JOBS["tp 2"], tiny=Tiny(layers=1, dtype=torch.float32))
    pool(2).run(_files, replace(job, options={"save_total_limit": 1}), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-3", "final"}
    final = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "final").state_dict()
    kept = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-3")
    assert all(torch.equal(value, final[name]) for name, value in kept.state_dict().items())
    for file in (tmp_path / "checkpoint-3").glob("*.safetensors"):
        assert file.stat().st_nlink == 2
        assert set(load_file(file)) <= set(final)
    state = json.loads((tmp_path / "checkpoint-3" / "trainer_state.json").read_text())
    assert state["global_step"] == 3


def _pushed(job: Job, folder: Path) -> set[str]:
    """What lies where a model goes to the hub from, after a training."""
    with world():
        trainer, _ = made(job, folder / "job")
        trainer.train()
        trainer.init_hf_repo = mock.Mock()
        trainer.hub_model_id = "user/model"
        with (
            mock.patch("transformers.trainer.hf_api") as hub,
            mock.patch.object(px.Trainer, "create_model_card"),
        ):
            trainer.push_to_hub(blocking=True)
        assert hub().upload_folder.call_count == (dist.get_rank() == 0)
        return {path.name for path in (folder / "job").iterdir()}


def test_what_goes_to_the_hub_is_the_model_beside_its_checkpoints(tmp_path: Path) -> None:
    for found in pool(2).run(_pushed, JOBS["tp 2"], tmp_path):
        assert {"config.json", "model.safetensors.index.json", "checkpoint-3"} <= found
        assert not found & {"parallel_ext", "trainer_state.json"}


def _best(job: Job, folder: Path) -> tuple[float, float]:
    with world():
        trainer, logs = made(job, folder)
        trainer.train()
        losses = [entry["eval_loss"] for entry in logs.entries if "eval_loss" in entry]
        return max(losses), trainer.evaluate()["eval_loss"]


@pytest.mark.parametrize("weights_alone", [False, True])
def test_the_best_model_is_loaded_at_the_end(weights_alone: bool, tmp_path: Path) -> None:
    options = {**BEST, "eval_steps": 1, "save_only_model": weights_alone}
    for best, last in pool(2).run(_best, replace(JOBS["dp 2"], options=options), tmp_path):
        assert last == pytest.approx(best, rel=1e-9)


def _made(job: Job, folder: Path, cls: type | None = None) -> None:
    with world():
        made(job, folder, cls=cls)[0].train()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"auto_find_batch_size": True}, "auto_find_batch_size=True is not served"),
        ({"save_on_each_node": True}, "to a directory that they share"),
        ({"train_sampling_strategy": "batch_rebalance"}, "use 'group_by_length'"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha draws noise"),
    ],
)
def test_what_is_not_served_is_refused(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    job = replace(JOBS["tp 2"], options=options)
    pool(2).assert_raises(_made, job, tmp_path, words=words)


class _Counting(torch.optim.SGD):
    """Keeps a number for all of its parameters together, which no checkpoint can hold."""

    def step(self, closure: Any = None) -> Any:
        self.state["all"]["steps"] = self.state["all"].get("steps", 0) + 1
        return super().step(closure)


def _counted(job: Job, folder: Path) -> tuple[int, str]:
    with world():
        trainer, _ = made(job, folder)
        trainer.optimizer = _Counting(trainer.model.parameters(), lr=0.1)
        try:
            trainer.train()
        except CheckpointError as error:
            return trainer.state.global_step, str(error)
        return trainer.state.global_step, ""


@pytest.mark.parametrize("weights_alone", [False, True])
def test_an_optimizer_that_no_checkpoint_holds_is_refused_early(
    weights_alone: bool, tmp_path: Path
) -> None:
    """Not at the first checkpoint, which may be hours away."""
    job = replace(JOBS["tp 2"], options={"save_steps": 2, "save_only_model": weights_alone})
    for steps, error in pool(2).run(_counted, job, tmp_path):
        assert (steps > 1) == weights_alone
        assert ("'all', which is of no parameter" in error) != weights_alone
        assert ("pass save_only_model=True" in error) != weights_alone


class LabelsItself:
    """Gives rows their labels once those of a step would have been counted."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        labelled = {**inputs, "labels": inputs["input_ids"]}
        return super().compute_loss(model, labelled, *args, **kwargs)

    def get_batch_samples(self, batches: Any, *args: Any, **kwargs: Any) -> Any:
        unlabelled = ({"input_ids": each["input_ids"]} for each in batches)
        return super().get_batch_samples(unlabelled, *args, **kwargs)


class WithoutLabels(LabelsItself, px.Trainer):
    """A trainer whose rows have no labels of their own."""


def _labelled_late(job: Job, folder: Path) -> list[float]:
    with world():
        base = transformers.Trainer if job.layout is None else px.Trainer
        trainer, logs = made(job, folder, cls=type("Late", (LabelsItself, base), {}))
        trainer.train()
        trained = [entry for entry in logs.entries if "grad_norm" in entry]
        return [entry[key] for entry in trained for key in ("loss", "grad_norm")]


def test_batches_whose_labels_nobody_counted_are_accumulated_as_means(tmp_path: Path) -> None:
    job = JOBS["dp 2, label smoothing"]
    (theirs,) = pool(1).run(_labelled_late, job.plain, tmp_path / "plain")
    for ours in pool(2).run(_labelled_late, job, tmp_path / "ours"):
        assert ours == pytest.approx(theirs, rel=1e-6)


def test_rows_without_labels_that_would_count_twice_are_refused(tmp_path: Path) -> None:
    job, words = JOBS["dp 2, a shorter last batch"], "the training would count rows twice"
    pool(2).assert_raises(_made, job, tmp_path, WithoutLabels, words=words)


class Permuted(torch.utils.data.Sampler):
    """A sampler of a user's own; draws when it is asked for an iterator."""

    def __len__(self) -> int:
        return 24

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(24).tolist())


def _order(apart: bool, together: bool = True) -> tuple[list[list[int]], list[float]]:
    """Two orders of one sampler, and a number that is drawn after them."""
    loader = torch.utils.data.DataLoader(range(24), 3, sampler=Permuted())
    if together:
        loader = drawn_together(loader, px.init_mesh(), seedable=True)
    torch.manual_seed(7 + apart * dist.get_rank())
    orders = [torch.cat(list(loader)).tolist() for _ in range(2)]
    return orders, torch.rand(1).tolist()


def test_a_sampler_draws_one_order_on_all_ranks() -> None:
    assert pool(2).run(_order, False) == pool(2).run(_order, False, False)
    (first, of_first), (second, of_second) = pool(2).run(_order, True)
    assert first == second
    assert first[0] != first[1]
    assert of_first != of_second  # the noise of ranks stays their own


def _rows_that_are_grouped(job: Job, folder: Path) -> tuple[int, int]:
    """Of a step, and of a batch of an evaluation."""
    with world():
        trainer, _ = made(job, folder)
        evaluated = trainer._get_eval_sampler(trainer.eval_dataset)
        return trainer._get_train_sampler().batch_size, evaluated.batch_size


def test_rows_are_grouped_by_length_in_steps_and_batches_of_the_job(tmp_path: Path) -> None:
    job = JOBS["dp 2, rows by length"]
    plain = pool(1).run(_rows_that_are_grouped, job.plain, tmp_path)
    assert pool(2).run(_rows_that_are_grouped, job, tmp_path) == 2 * plain


def test_worker_processes_of_tp_ranks_have_one_seed() -> None:
    mesh = mock.Mock(dp_rank=3)
    seeded = partial(transformers.trainer_utils.seed_worker, num_workers=2, rank=7)
    loader = torch.utils.data.DataLoader([], worker_init_fn=seeded)
    seed_workers_of_dp_ranks(loader, mesh)
    assert loader.worker_init_fn.keywords == {"num_workers": 2, "rank": 3}


def test_a_plain_model_is_refused(tmp_path: Path) -> None:
    with world(), pytest.raises(TypeError, match=r"px\.parallelize or px\.from_pretrained"):
        made(JOBS["tp 2"].plain, tmp_path, cls=px.Trainer)


def test_a_function_that_makes_the_model_is_refused(tmp_path: Path) -> None:
    args = transformers.TrainingArguments(str(tmp_path))
    with world(), pytest.raises(NotImplementedError, match="model_init= is not supported"):
        px.Trainer(None, args, None, None, None, None, LLAMA.model)


def _other_batch(job: Job, folder: Path) -> None:
    with world():
        trainer, _ = made(job, folder)
        trainer.args.gradient_accumulation_steps = 1
        before = [p.detach().clone() for p in trainer.model.parameters()]
        try:
            trainer.train(str(folder / "checkpoint-1"))
        finally:
            for parameter, value in zip(trainer.model.parameters(), before, strict=True):
                assert torch.equal(parameter, value)


def test_a_resume_from_no_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    empty = tmp_path / "checkpoint-9"
    empty.mkdir()
    for path in (empty, tmp_path / "none"):
        words = f"{path} is no complete checkpoint of px.Trainer"
        pool(2).assert_raises(run, JOBS["tp 2"], tmp_path, str(path), words=words)


def test_another_number_of_rows_a_step_is_refused(tmp_path: Path) -> None:
    pool(2).run(run, JOBS["tp 2"], tmp_path)
    words = "was made with 8 rows a step, but this run has 4"
    pool(2).assert_raises(_other_batch, JOBS["tp 2"], tmp_path, words=words)


class OwnLoss(px.Trainer):
    """A trainer with a loss of its own."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(model, inputs, *args, **kwargs)


def _warnings_of(name: str, cls: type, folder: Path, workers: int) -> list[str]:
    job = replace(
        JOBS[name],
        data=Stream if workers else list,
        options={"dataloader_num_workers": workers, "max_steps": 1},
    )
    with world(), warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        trainer, _ = made(job, folder, cls=cls)
        trainer.get_eval_dataloader()
    return [str(each.message) for each in found if each.category is UserWarning]


def test_a_loss_that_is_averaged_as_it_is_is_a_warning(tmp_path: Path) -> None:
    (found,), *_ = pool(2).run(_warnings_of, "dp 2", OwnLoss, tmp_path, 0)
    assert "compute_loss of OwnLoss returns is averaged over the dp ranks" in found
    for name, cls in (("tp 2", OwnLoss), ("dp 2", px.Trainer)):
        assert pool(2).run(_warnings_of, name, cls, tmp_path, 0) == [[], []]


def test_rows_that_nobody_counts_are_a_warning(tmp_path: Path) -> None:
    for found in pool(2).run(_warnings_of, "tp 2", px.Trainer, tmp_path, 1):
        assert [words for words in found if "worker processes read an IterableDataset" in words]
