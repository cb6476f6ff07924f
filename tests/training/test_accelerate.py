"""A whole loop of accelerate over a parallel model: losses, norms, metrics and resuming."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration
from interplay_accelerate import processes
from ranks import Raised, pool
from reference import Tiny, parallel, uneven_rows
from torch.utils.data import DataLoader

import parallel_ext as px
from parallel_ext.interplay import accelerate

TINY = Tiny(layers=1)


@dataclass(frozen=True)
class Layout:
    """The ranks of a job, and whether its model is the plain one."""

    tp: int = 1
    dp: int = 1
    zero: int | None = None
    plain: bool = False

    @property
    def world(self) -> int:
        return self.tp * self.dp


ONE = Layout(plain=True)
LAYOUTS = [  # of parallel models
    Layout(),
    Layout(tp=2),
    Layout(dp=2, zero=2),
    Layout(tp=2, dp=2, zero=3),
]


def samples(number: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Rows with uneven numbers of labels, and their own numbers."""
    rows = enumerate(uneven_rows(TINY.vocab_size, number, seed))
    return [{**row, "row": torch.tensor(index)} for index, row in rows]


class Job:
    """A model and all else that a script prepares."""

    def __init__(self, layout: Layout, folder: Path, seed: int = 1, **options: Any) -> None:
        self.accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_steps=2,
            project_config=ProjectConfiguration(
                str(folder), automatic_checkpoint_naming=True, total_limit=2
            ),
            **options,
        )
        model = TINY.model(seed)
        if not layout.plain:
            mesh = px.init_mesh(tp=layout.tp, dp=layout.dp, timeout=60.0)
            model = parallel(model, mesh)
            if layout.zero:
                px.data_parallel(model, mesh, layout.zero)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        split = self.accelerator.split_batches
        rows, at_once = (4, 1) if split else (4 // layout.dp, layout.dp)
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer,
            lambda step: 0.9 ** (step / at_once),  # accelerate's count
        )
        shuffled = DataLoader(
            samples(12, 1), rows, shuffle=True, generator=torch.Generator().manual_seed(5)
        )
        evaluated = DataLoader(samples(7, 2), rows)
        self.seen = torch.nn.BatchNorm1d(1)  # an object with a state, saved beside the model
        self.accelerator.register_for_checkpointing(self.seen)
        prepare = self.accelerator.prepare
        self.loader, self.model, self.optimizer, self.scheduler, self.evaluated = prepare(
            shuffled, model, optimizer, scheduler, evaluated
        )
        self.log: list[float] = []

    def epoch(self) -> None:
        accelerator = self.accelerator
        self.model.train()
        for batch in self.loader:
            batch.pop("row")
            with accelerator.accumulate(self.model):
                loss = self.model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
                    self.log += [norm.item(), self.scheduler.get_last_lr()[0]]
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            self.log.append(accelerator.reduce(loss.detach(), "mean").item())
            self.seen.num_batches_tracked += 1

    def metrics(self) -> dict[str, Any]:
        """What is gathered of all samples, and from how many ranks."""
        accelerator = self.accelerator
        self.model.eval()
        rows, names, choices = [], [], []
        for batch in self.evaluated:
            row = batch.pop("row")
            with torch.no_grad():
                chosen = self.model(**batch).logits.argmax(-1)
            gathered = accelerator.gather_for_metrics((row, chosen))
            rows += gathered[0].tolist()
            choices += gathered[1].tolist()
            names += accelerator.gather_for_metrics([f"row {number}" for number in row.tolist()])
        counts = accelerator.gather(torch.tensor([len(rows)])).tolist()
        assert accelerator.reduce(torch.tensor(1)).item() == len(counts)
        return {"rows": rows, "names": names, "choices": choices, "counts": counts}


def run(layout: Layout, folder: Path, split_batches: bool, count_tp_ranks: bool = False) -> Any:
    """Two epochs and the metrics, with a checkpoint after each."""
    config = DataLoaderConfiguration(split_batches=split_batches)
    unserved = mock.patch.object(accelerate, "_served", return_value=None)
    with processes(), unserved if count_tp_ranks else nullcontext():
        job = Job(layout, folder, dataloader_config=config)
        for _ in range(2):
            job.epoch()
            job.accelerator.save_state()
        return job.log, job.metrics()


def resume(layout: Layout, folder: Path) -> Any:
    """The second epoch, of a job that begins with other weights, and the names of checkpoints."""
    with processes():
        config = DataLoaderConfiguration(split_batches=True)
        job = Job(layout, folder, seed=7, dataloader_config=config)
        job.accelerator.load_state(folder / "checkpoints" / "checkpoint_0")
        assert job.seen.num_batches_tracked == 3
        for _ in job.loader:  # the generator of the first epoch's order
            pass
        job.epoch()
        job.accelerator.project_configuration.iteration = 2
        job.accelerator.save_state()
        job.accelerator.wait_for_everyone()
        names = sorted(each.name for each in (folder / "checkpoints").iterdir())
        job.accelerator.load_state()  # the last
        return job.log, job.metrics(), names


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What one process does with the plain model."""
    return pool(1).run(run, ONE, tmp_path_factory.mktemp("one"), False)[0]


def same(ours: list[float], theirs: list[float]) -> bool:
    of_both = torch.tensor(ours, dtype=torch.float64), torch.tensor(theirs, dtype=torch.float64)
    return len(ours) == len(theirs) and torch.allclose(*of_both, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("split_batches", [False, True], ids=["batches", "split"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_loop_is_that_of_one_process(
    layout: Layout, split_batches: bool, expected: Any, tmp_path: Path
) -> None:
    log, metrics = expected
    for ours, of_ours in pool(layout.world).run(run, layout, tmp_path, split_batches):
        assert same(ours, log)
        assert of_ours == metrics | {"counts": [7] * layout.dp}


@pytest.mark.parametrize(
    ("saved", "loaded"), [(LAYOUTS[1], LAYOUTS[3]), (LAYOUTS[3], LAYOUTS[0]), (LAYOUTS[2],) * 2]
)
def test_a_loop_resumes_on_any_layout(
    saved: Layout, loaded: Layout, expected: Any, tmp_path: Path
) -> None:
    pool(saved.world).run(run, saved, tmp_path, True)  # by which schedulers do not count dp ranks
    log, metrics = expected
    for ours, of_ours, names in pool(loaded.world).run(resume, loaded, tmp_path):
        assert same(ours, log[len(log) // 2 :])
        assert of_ours == metrics | {"counts": [7] * loaded.dp}
        assert names == ["checkpoint_1", "checkpoint_2"]


def test_the_comparison_notices_tp_ranks_that_count_as_processes(tmp_path: Path) -> None:
    for raised in pool(2).run_raising(run, Layout(tp=2), tmp_path, False, True):
        assert isinstance(raised, Raised), "tp ranks had different batches"


def _warned(layout: Layout, folder: Path, rows: int) -> list[str]:
    with processes(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        job = Job(layout, folder)
        job.loader = job.accelerator.prepare(DataLoader(samples(rows, 1), 2))
        job.epoch()
    return [str(each.message) for each in caught if each.filename == __file__]


def test_a_step_on_repeated_rows_is_warned_of(tmp_path: Path) -> None:
    dp, tp = Layout(dp=2, zero=2), Layout(tp=2)
    for layout, rows, expected in ((dp, 7, 1), (dp, 8, 0), (tp, 7, 0)):
        first, second = pool(2).run(_warned, layout, tmp_path, rows)
        assert second == []
        assert len(first) == expected
        assert all("has 3 rows for dp=2 ranks" in text for text in first)


def _unread(folder: Path, rank: int) -> None:
    """Save where one rank cannot read a directory."""
    steps = mock.patch("parallel_ext.training.accelerate.complete_steps")
    with processes(), steps as complete_steps:
        job = Job(Layout(tp=2), folder)
        complete_steps.side_effect = OSError("unread") if dist.get_rank() == rank else [{}]
        job.accelerator.save_state()


def test_only_rank_0_looks_which_steps_there_are(tmp_path: Path) -> None:
    pool(2).run(_unread, tmp_path / "read", 1)
    pool(2).assert_raises(_unread, tmp_path, 0, error="OSError", words="unread", timeout_s=50.0)


def _loaded_from(folder: Path, *names: str | None) -> None:
    with processes():
        job = Job(Layout(tp=2), folder)
        name = names[dist.get_rank()]
        job.accelerator.load_state(name and folder / name)


def test_a_rank_that_does_not_see_the_directory_raises_on_all(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    words = {"words": "but folder does not exist", "timeout_s": 50.0, "error": "ValueError"}
    pool(2).assert_raises(_loaded_from, tmp_path, "there", "elsewhere", **words)
    pool(2).assert_raises(_loaded_from, tmp_path, None, None, **words)
