"""A training checkpoint goes on where it was, on any layout; what is damaged is found and named."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
import torch.distributed as dist
import transformers
from ranks import Raised, pool
from reference import Tiny, batch, parallel, shard_differences, worst
from reference_cogagent import batches_of, picture, text, tiny_model
from reference_cogagent import exact as exact_cogagent
from reference_lora import config
from reference_mixtral import Layout, TinyMixtral
from safetensors import safe_open
from torch import nn

import parallel_ext as px
from parallel_ext.checkpoint import disk
from parallel_ext.checkpoint.manifest import read_manifest
from parallel_ext.checkpoint.rng import seed_of
from parallel_ext.checkpoint.safetensors_file import SafetensorsFile
from parallel_ext.sharded import local_part, named_shards, to_shards

LLAMA, MIXTRAL = Tiny(layers=1), TinyMixtral(num_experts=5, layers=1)


@dataclass(frozen=True)
class Job:
    """How a model is spread and trained."""

    tiny: Any = LLAMA
    layout: Layout = Layout(1, 1, 1)
    zero: int | None = None
    optimizer: str = "AdamW"
    vocab_multiple_of: int = 1

    def __str__(self) -> str:
        stage = f"-zero{self.zero}" if self.zero else ""
        return f"{self.layout}{stage}-{self.optimizer}"


@contextmanager
def _quietly() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _optimizer(model: nn.Module, name: str) -> torch.optim.Optimizer:
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    if name == "SGD":
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    if name == "Adafactor":
        return torch.optim.Adafactor(groups, lr=0.1)
    return torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.95), amsgrad=name == "amsgrad")


def _scheduler(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=7)


def _build(job: Job, seed: int = 1) -> tuple[Any, Any, Any, px.Mesh]:
    """A model, its optimizer and scheduler, and the mesh."""
    mesh = job.layout.mesh() if dist.is_initialized() else px.init_mesh()
    with _quietly():  # of rows that do not divide
        model = parallel(job.tiny.model(seed), mesh, vocab_multiple_of=job.vocab_multiple_of)
    if job.zero:
        px.data_parallel(model, mesh, job.zero)
    optimizer = _optimizer(model, job.optimizer)
    return model, optimizer, _scheduler(optimizer), mesh


def _step(model: Any, optimizer: Any, scheduler: Any, data: dict[str, torch.Tensor]) -> None:
    model(**data).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()


def _train(model: Any, optimizer: Any, scheduler: Any, mesh: px.Mesh, steps: range) -> None:
    """Every step has the same four rows, whatever the number of dp ranks."""
    for step in steps:
        whole = batch(model.config.vocab_size, rows=4, tokens=6, seed=step)
        own = {name: value[mesh.dp_rank :: mesh.dp_size] for name, value in whole.items()}
        _step(model, optimizer, scheduler, own)


def _single_process(job: Job, steps: int) -> nn.Module:
    model = job.tiny.model()
    optimizer = _optimizer(model, job.optimizer)
    scheduler = _scheduler(optimizer)
    for step in range(steps):
        whole = batch(model.config.vocab_size, rows=4, tokens=6, seed=step)
        _step(model, optimizer, scheduler, whole)
    return model


# Training goes on.


def _save_after_two_steps(job: Job, root: Path) -> None:
    model, optimizer, scheduler, mesh = _build(job)
    _train(model, optimizer, scheduler, mesh, range(2))
    path = px.save_checkpoint(root, 2, model, optimizer, scheduler, {"samples": 8})
    assert path == root / "step-00000002"


def _go_on(job: Job, root: Path) -> tuple[float, str]:
    """Two more steps, from other weights than the saved ones; how far this is from one process."""
    model, optimizer, scheduler, mesh = _build(job, seed=5)
    with _quietly():  # of other random numbers
        resumed = px.load_checkpoint(root, model, optimizer, scheduler)
    assert (resumed.step, resumed.data_state) == (2, {"samples": 8})
    _train(model, optimizer, scheduler, mesh, range(2, 4))
    reference = _single_process(job, 4)
    return worst(shard_differences(model, dict(reference.named_parameters()), False))


TIED = replace(LLAMA, tied=True)
CHANGES = [
    (Job(layout=Layout(1, 1, 1)), Job(layout=Layout(1, 2, 1))),
    (Job(layout=Layout(1, 2, 1)), Job(layout=Layout(2, 1, 1), zero=3)),
    (Job(layout=Layout(2, 2, 1), zero=3), Job(layout=Layout(1, 3, 1))),
    (Job(TIED, Layout(1, 3, 1)), Job(TIED, Layout(2, 2, 1), zero=2)),
    (Job(TIED, Layout(4, 1, 1), zero=3), Job(TIED, Layout(1, 2, 1))),
    (
        Job(replace(LLAMA, vocab_size=5), Layout(2, 2, 1), 2, vocab_multiple_of=64),
        Job(replace(LLAMA, vocab_size=5), Layout(1, 4, 1)),
    ),
    (Job(layout=Layout(2, 1, 1), zero=2, optimizer="SGD"), Job(layout=Layout(1, 2, 1))),
    (Job(layout=Layout(1, 2, 1), optimizer="amsgrad"), Job(layout=Layout(2, 1, 1), zero=2)),
    (Job(MIXTRAL, Layout(1, 2, 2)), Job(MIXTRAL, Layout(2, 1, 2), zero=3)),
    (Job(MIXTRAL, Layout(2, 2, 4), zero=2), Job(MIXTRAL, Layout(1, 1, 1))),
    (Job(MIXTRAL, Layout(1, 1, 1)), Job(MIXTRAL, Layout(2, 2, 4), zero=3)),
    (Job(MIXTRAL, Layout(1, 3, 3)), Job(MIXTRAL, Layout(2, 1, 1), zero=2)),
]


@pytest.mark.parametrize(("before", "after"), CHANGES, ids=str)
def test_training_goes_on_as_in_one_process(before: Job, after: Job, tmp_path: Path) -> None:
    pool(before.layout.world).run(_save_after_two_steps, before, tmp_path)
    after = replace(after, optimizer=before.optimizer)
    for error, name in pool(after.layout.world).run(_go_on, after, tmp_path):
        assert error <= 1e-9, f"{name} differs by {error:.1e}"


def _cogagent(layout: Layout, zero: int | None) -> tuple[Any, Any, px.Mesh]:
    mesh = layout.mesh()
    model = parallel(tiny_model(), mesh).train()
    if zero:
        px.data_parallel(model, mesh, zero)
    return model, _optimizer(model, "AdamW"), mesh


# The towers see images in the second and the fourth step only, so that their ``step`` is another.
IMAGES = [[[text(9)], [text(7)]], [[picture(6)], [text(9)]]] * 2


def _train_on_images(model: Any, optimizer: Any, dp: int, dp_rank: int, steps: range) -> None:
    for step in steps:
        whole, own = batches_of(IMAGES[step])
        _step(model, optimizer, mock.Mock(), whole if dp == 1 else own[dp_rank])


def _save_on_images(layout: Layout, zero: int | None, root: Path) -> None:
    model, optimizer, mesh = _cogagent(layout, zero)
    _train_on_images(model, optimizer, mesh.dp_size, mesh.dp_rank, range(2))
    px.save_checkpoint(root, 2, model, optimizer)


def _go_on_on_images(layout: Layout, zero: int | None, root: Path) -> tuple[float, str]:
    model, optimizer, mesh = _cogagent(layout, zero)
    with _quietly():
        px.load_checkpoint(root, model, optimizer)
    _train_on_images(model, optimizer, mesh.dp_size, mesh.dp_rank, range(2, 4))
    reference = exact_cogagent(tiny_model()).train()
    _train_on_images(reference, _optimizer(reference, "AdamW"), 1, 0, range(4))
    return worst(shard_differences(model, dict(reference.named_parameters()), False))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((Layout(1, 2, 1), None), (Layout(2, 1, 1), 3)),
        ((Layout(2, 2, 1), 2), (Layout(1, 1, 1), None)),
    ],
    ids=str,
)
def test_a_cogagent_goes_on_as_in_one_process(before: Any, after: Any, tmp_path: Path) -> None:
    pool(before[0].world).run(_save_on_images, *before, tmp_path)
    loop = json.loads((tmp_path / "step-00000002/parallel_state/loop.json").read_text())
    number = loop["optimizer"]["numbers"]["step"]
    assert {number["most"], *number["others"].values()} >= {1.0, 2.0}
    for error, name in pool(after[0].world).run(_go_on_on_images, *after, tmp_path):
        assert error <= 1e-9, f"{name} differs by {error:.1e}"


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Copies of all that this rank trains with."""
    to_shards(model)
    kept = {}
    for name, parameter, _ in named_shards(model):
        kept[name] = local_part(parameter.detach()).clone()
        for key, value in optimizer.state[parameter].items():
            kept[f"{key} of {name}"] = local_part(value).clone()
    return kept


def _draw() -> list[float]:
    return [torch.rand(()).item(), random.gauss(0, 1), numpy.random.standard_normal()]


def _on_the_same_mesh(job: Job, root: Path) -> tuple[list[str], bool, bool]:
    """What differs after two steps from before, and whether the same numbers are drawn."""
    model, optimizer, scheduler, mesh = _build(job)
    _train(model, optimizer, scheduler, mesh, range(2))
    for seed in (torch.manual_seed, random.seed, numpy.random.seed):
        seed(17 + mesh.rank)
    _draw()  # leaves half of a pair of normal numbers in two of the generators
    px.save_checkpoint(root, 2, model, optimizer, scheduler)
    expected = _draw()
    _train(model, optimizer, scheduler, mesh, range(2, 4))
    uninterrupted = _state(model, optimizer)
    rates = scheduler.get_last_lr()

    model, optimizer, scheduler, mesh = _build(job, seed=5)
    resumed = px.load_checkpoint(root, model, optimizer, scheduler)
    drawn = _draw()
    _train(model, optimizer, scheduler, mesh, range(2, 4))
    again = _state(model, optimizer)
    assert again.keys() == uninterrupted.keys()
    differing = [n for n, value in again.items() if not torch.equal(value, uninterrupted[n])]
    differing += [] if rates == scheduler.get_last_lr() else ["learning rates"]
    return differing, drawn == expected, resumed.same_random_numbers


@pytest.mark.parametrize(
    "job",
    [
        Job(),
        Job(layout=Layout(1, 2, 1)),
        Job(TIED, Layout(2, 1, 1), zero=2),
        Job(layout=Layout(2, 2, 1), zero=3),
        Job(MIXTRAL, Layout(2, 1, 2), zero=3),
        Job(MIXTRAL, Layout(2, 1, 2), zero=2, optimizer="SGD"),
        Job(optimizer="Adafactor"),
    ],
    ids=str,
)
def test_on_the_same_mesh_every_bit_is_that_of_the_uninterrupted_run(
    job: Job, tmp_path: Path
) -> None:
    job = replace(job, tiny=replace(job.tiny, dtype=torch.float32))
    for differing, drawn, said in pool(job.layout.world).run(_on_the_same_mesh, job, tmp_path):
        assert differing == []
        assert drawn
        assert said


def test_the_test_above_notices_state_that_is_lost(tmp_path: Path) -> None:
    for differing, _, _ in pool(2).run(_without_second_moment, tmp_path):
        assert any("exp_avg_sq" in name for name in differing)


def _without_second_moment(root: Path) -> tuple[list[str], bool, bool]:
    from parallel_ext.checkpoint import training_load

    original = training_load.read_shards

    def dropping(wanted: Any, *args: Any) -> None:
        original([each for each in wanted if "exp_avg_sq" not in each[0].name], *args)

    with mock.patch.object(training_load, "read_shards", dropping):
        return _on_the_same_mesh(Job(layout=Layout(1, 2, 1)), root)


def _random_numbers_on_another_mesh(root: Path, layout: Layout) -> tuple[list[float], list[str]]:
    model, *_, mesh = _build(Job(layout=layout))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resumed = px.load_checkpoint(root, model)
    assert not resumed.same_random_numbers
    drawn = _draw()
    seed = json.loads((resumed.path / "parallel_state" / "loop.json").read_text())["random"]
    for function, bits in ((torch.manual_seed, 64), (random.seed, 64), (numpy.random.seed, 32)):
        function(seed_of(seed, 2, mesh) % 2**bits)
    assert _draw() == drawn, "the rule says what is drawn"
    return drawn, [str(w.message) for w in caught if "random numbers" in str(w.message)]


def test_another_mesh_draws_by_the_rule_and_says_so(tmp_path: Path) -> None:
    pool(2).run(_save_after_two_steps, Job(layout=Layout(1, 2, 1)), tmp_path)
    results = pool(3).run(_random_numbers_on_another_mesh, tmp_path, Layout(3, 1, 1))
    assert len({tuple(drawn) for drawn, _ in results}) == 3
    (message,), *others = (messages for _, messages in results)
    assert "'tp': 2" in message
    assert "'dp': 3" in message
    assert others == [[], []]
    # Where the ranks of a model drew the same numbers, they go on doing so.
    results = pool(3).run(_random_numbers_on_another_mesh, tmp_path, Layout(1, 3, 1))
    assert len({tuple(drawn) for drawn, _ in results}) == 1


# The directory.


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def _save_small(job: Job, root: Path) -> None:
    model, optimizer, scheduler, mesh = _build(job)
    _train(model, optimizer, scheduler, mesh, range(1))
    px.save_checkpoint(root, 1, model, optimizer, scheduler)
    model.save_pretrained(root / "plain")


def test_transformers_reads_the_directory_and_each_tensor_is_written_once(tmp_path: Path) -> None:
    job = Job(replace(MIXTRAL, dtype=torch.float32), Layout(2, 2, 4), zero=2)
    pool(4).run(_save_small, job, tmp_path)
    step = tmp_path / "step-00000001"
    again = transformers.AutoModelForCausalLM.from_pretrained(step, dtype=torch.float32)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    expected = plain.state_dict()
    assert all(torch.equal(value, expected[n]) for n, value in again.state_dict().items())

    names, shapes = _tensors(tmp_path / "plain"), {}
    for path in (step / "parallel_state").glob("optim-*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                assert name not in shapes, "written twice"
                shapes[name] = file.get_slice(name).get_shape()
    assert shapes == {
        f"{key}/{name}": list(value.shape)
        for key in ("exp_avg", "exp_avg_sq")
        for name, value in names.items()
    }
    loop = json.loads((step / "parallel_state" / "loop.json").read_text())
    assert loop["optimizer"]["numbers"] == {"step": {"dtype": "F32", "most": 1.0, "others": {}}}
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000001", "LATEST", "plain"}


def test_all_files_are_written_by_all_ranks_in_equal_shares(tmp_path: Path) -> None:
    job = Job(replace(LLAMA, vocab_size=301), Layout(2, 2, 1), zero=2)
    pool(4).run(_save_small, job, tmp_path)
    sizes = [path.stat().st_size for path in (tmp_path / "step-00000001").rglob("*-of-00004.*")]
    assert len(sizes) == 8
    assert max(sizes[:4] + sizes[4:]) < 0.6 * sum(sizes)


# Damage.


def _plain_checkpoint(root: Path) -> Path:
    """Of one process, tiny."""
    job = Job(Tiny(vocab_size=11, heads=2, key_value_heads=1, inner=7, layers=1))
    model, optimizer, scheduler, mesh = _build(job)
    _train(model, optimizer, scheduler, mesh, range(1))
    return px.save_checkpoint(root, 1, model, optimizer, scheduler, {"samples": 4})


def _flips(files: list[Path], count: int) -> Iterator[Path]:
    """Flip one random bit at a time; each is in order again afterwards."""
    choose = random.Random(7)
    for number in range(count):
        path = files[number % len(files)]
        content = path.read_bytes()
        place, bit = choose.randrange(len(content)), choose.randrange(8)
        damaged = bytearray(content)
        damaged[place] ^= 1 << bit
        path.write_bytes(damaged)
        try:
            yield path
        finally:
            path.write_bytes(content)


def test_a_flipped_bit_is_found_wherever_it_is(tmp_path: Path) -> None:
    step = _plain_checkpoint(tmp_path)
    files = sorted(path for path in step.rglob("*") if path.is_file())
    assert px.verify(step) == 1
    for path in _flips(files, 200):
        with pytest.raises(px.CheckpointError) as raised:
            px.verify(step)
        assert path.name in str(raised.value), path
        assert "bytes [" in str(raised.value) or path.name == "COMMIT"
    for path in _flips([tmp_path / "LATEST"], 40):
        with pytest.raises(px.CheckpointError) as raised:
            px.latest(tmp_path)
        assert path.name in str(raised.value) or "step-" in str(raised.value)
    assert px.verify(px.latest(tmp_path)) == 1


def test_a_flipped_bit_is_found_while_loading(tmp_path: Path) -> None:
    step = _plain_checkpoint(tmp_path)
    job = Job(Tiny(vocab_size=11, heads=2, key_value_heads=1, inner=7, layers=1))
    model, optimizer, scheduler, _ = _build(job)
    files = sorted(path for path in step.rglob("*") if path.is_file())
    for path in _flips(files, 3 * len(files)):
        with pytest.raises(px.CheckpointError) as raised:
            px.load_checkpoint(tmp_path, model, optimizer, scheduler)
        assert path.name in str(raised.value), path
    px.load_checkpoint(tmp_path, model, optimizer, scheduler)


def test_a_damaged_chunk_is_named_with_its_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("chunk_hashes", "safetensors_file", "manifest"):
        monkeypatch.setattr(f"parallel_ext.checkpoint.{module}.CHUNK_BYTES", 1000)
    step = _plain_checkpoint(tmp_path)
    assert px.verify(step) == 1
    path = step / "parallel_state" / "optim-00001-of-00001.safetensors"
    with SafetensorsFile(path) as file:
        name = "exp_avg_sq/lm_head.weight"
        start = file.tensors[name].start
    content = bytearray(path.read_bytes())
    content[start] ^= 4
    path.write_bytes(content)
    with pytest.raises(px.CheckpointError) as raised:
        px.verify(step)
    chunk = start // 1000 * 1000
    assert re.search(
        rf"{path.name}: the bytes \[{chunk}, {chunk + 1000}\) of .*{name}.* are damaged: "
        r"their hash is [0-9a-f]{32}, but [0-9a-f]{32} was written",
        str(raised.value),
    )


def test_truncated_missing_and_foreign_files_are_named(tmp_path: Path) -> None:
    step, other = _plain_checkpoint(tmp_path / "a"), _plain_checkpoint(tmp_path / "b")
    name = "parallel_state/optim-00001-of-00001.safetensors"
    content = (step / name).read_bytes()
    cases: list[tuple[Callable[[Path], object], str]] = [
        (lambda path: path.write_bytes(content[:-1]), "it is truncated"),
        (lambda path: path.write_bytes(content + b"x"), "something was added"),
        (lambda path: path.unlink(), "no such file"),
        (lambda path: path.write_bytes((other / name).read_bytes()), "damaged"),
    ]
    for change, message in cases:
        change(step / name)
        with pytest.raises(px.CheckpointError, match=message) as raised:
            px.verify(step)
        assert name in str(raised.value)
        (step / name).write_bytes(content)
    (step / "COMMIT").unlink()
    with pytest.raises(px.CheckpointError, match="has no file COMMIT"):
        px.verify(step)


def test_a_file_of_another_save_is_told_by_its_id(tmp_path: Path) -> None:
    step = _plain_checkpoint(tmp_path)
    manifest = read_manifest(step)
    with pytest.raises(px.CheckpointError, match="files of two saves were mixed"):
        replace(manifest, save_id="0" * 32).open(step, "model.safetensors")
    name = "lm_head.weight"
    tensors = {n: at for n, at in manifest.tensors.items() if n != name}
    with pytest.raises(px.CheckpointError, match=f"{name} is .* but missing in the manifest"):
        replace(manifest, tensors=tensors).open(step, "model.safetensors")


def test_the_last_complete_step_is_found(tmp_path: Path) -> None:
    assert px.latest(tmp_path) is None
    step = _plain_checkpoint(tmp_path)
    (tmp_path / "step-00000009").mkdir()  # no checkpoint
    assert px.latest(tmp_path) == step
    (tmp_path / "LATEST").unlink()
    assert px.latest(tmp_path) == step


# Errors.


def _fail_on_one_rank(what: str, name: str, root: Path) -> None:
    """The second rank fails in a save of step 3 or in a load of step 2."""
    model, optimizer, scheduler, mesh = _build(Job(layout=Layout(1, 3, 1)))
    px.save_checkpoint(root, 2, model, optimizer, scheduler)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    owner = {"save": disk, "load": SafetensorsFile}[what]
    guilty = 0 if name in ("make_directory", "rename", "write_file") else 1
    with mock.patch.object(owner, name, full if mesh.rank == guilty else getattr(owner, name)):
        if what == "save":
            px.save_checkpoint(root, 3, model, optimizer, scheduler)
        else:
            px.load_checkpoint(root, model, optimizer, scheduler)


@pytest.mark.parametrize(
    ("what", "name"),
    [
        *(("save", n) for n in ("make_directory", "create", "reserve", "write", "sync")),
        *(("save", n) for n in ("write_file", "rename")),
        ("load", "_read_header"),
        ("load", "read_box"),
    ],
)
def test_all_raise_what_one_rank_raises(what: str, name: str, tmp_path: Path) -> None:
    results = pool(3).run_raising(_fail_on_one_rank, what, name, tmp_path)
    assert all(isinstance(raised, Raised) for raised in results), results
    assert all("No space left on device" in raised.text for raised in results), results
    assert sorted(path.name for path in tmp_path.iterdir()) == ["LATEST", "step-00000002"]
    assert px.verify(px.latest(tmp_path)) == 2


def _lose(root: Path) -> None:
    """The second rank is killed while it writes a file of step 3."""
    mesh = px.init_mesh(tp=3, timeout=4.0)
    model = parallel(LLAMA.model(), mesh)
    px.save_checkpoint(root, 2, model)

    def die(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with mock.patch.object(disk, "write", die if mesh.rank == 1 else disk.write):
        px.save_checkpoint(root, 3, model)


def test_a_killed_rank_is_named_and_the_step_before_stays(tmp_path: Path) -> None:
    for survivor in pool(3).run_losing(1, _lose, tmp_path):
        assert isinstance(survivor, Raised), survivor
        assert survivor.type == "CollectiveTimeout", survivor
        assert "save_checkpoint of step 3" in survivor.text
        assert "rank 1" in survivor.text
    assert px.verify(px.latest(tmp_path)) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["LATEST", "step-00000002"]


class _Counting(dict):
    """A scheduler whose state JSON cannot hold."""

    def state_dict(self) -> dict[str, Any]:
        return {"milestones": {30: 1}}

    load_state_dict = dict.update


def _refused(case: str, root: Path) -> None:
    job = Job(replace(LLAMA, dtype=torch.float32), Layout(1, 2, 1))
    model, optimizer, scheduler, mesh = _build(job)
    _train(model, optimizer, scheduler, mesh, range(1))
    px.save_checkpoint(root, 1, model, optimizer)
    save, load = px.save_checkpoint, px.load_checkpoint
    if case == "twice":
        save(root, 1, model)
    elif case == "step":
        save(root, -1, model)
    elif case == "scheduler":
        save(root, 2, model, optimizer, _Counting())
    elif case == "data":
        save(root, 2, model, optimizer, data_state={"samples": mesh.rank})
    elif case == "infinite":
        save(root, 2, model, optimizer, data_state={"loss": [1.0, float("inf")]})
    elif case == "foreign":
        save(root, 2, model, torch.optim.AdamW(nn.Linear(2, 2).parameters()))
    elif case == "unknown":
        save(root, 2, model, torch.optim.Rprop(model.parameters()))
    elif case == "adapter":
        import peft

        save(root, 2, peft.get_peft_model(model, config()))
    elif case == "Adafactor":
        other = _build(replace(job, optimizer="Adafactor"))
        _train(*other, range(1))
        save(root, 2, *other[:2])
    elif case == "nothing":
        load(root / "elsewhere", model)
    elif case == "no scheduler":
        load(root, model, optimizer, scheduler)
    elif case == "class":
        load(root, model, _build(replace(job, optimizer="SGD"))[1])
    elif case == "groups":
        load(root, model, torch.optim.AdamW(model.parameters()))
    elif case == "group":
        first, *others = model.parameters()
        load(root, model, torch.optim.AdamW([{"params": [first]}, {"params": others}]))
    elif case == "vocabulary":
        load(root, _build(replace(job, tiny=replace(job.tiny, vocab_size=103)))[0])
    elif case == "dtype":
        load(root, _build(replace(job, tiny=replace(job.tiny, dtype=torch.bfloat16)))[0])


REFUSED = {
    "twice": "step-00000001 is there already",
    "step": "step must be a whole number from 0 on, got -1",
    "scheduler": "['milestones'] has the key 30, but in JSON only text is a key",
    "data": "data_state must be the same on all ranks, but rank 1 was given another",
    "infinite": "['data_state']['loss'][1] is inf, which is no number in JSON",
    "foreign": "a parameter of shape (2, 2) in group 0 does not belong to the model",
    "unknown": "Rprop: only the state of torch's Adam, AdamW, SGD and Adafactor is known",
    "adapter": "checkpoints of a model with adapters are not supported yet",
    "Adafactor": "is no part of a state of the whole parameter",
    "nothing": "elsewhere holds no training checkpoint",
    "no scheduler": "was saved without the state of a scheduler",
    "class": "the state of AdamW was saved, but the optimizer is SGD",
    "groups": "2 groups of parameters were saved, but the optimizer has 1",
    "group": "group 0 of the optimizer",
    "vocabulary": "by the configuration it must be (103, 72)",
    "dtype": "was saved as torch.float32, but the model has torch.bfloat16",
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_done_is_refused_on_all_ranks(case: str, tmp_path: Path) -> None:
    for raised in pool(2).run_raising(_refused, case, tmp_path):
        assert isinstance(raised, Raised), case
        assert REFUSED[case] in raised.text
    assert px.verify(px.latest(tmp_path)) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["LATEST", "step-00000001"]


def _non_finite(root: Path) -> list[str]:
    model, optimizer, scheduler, _ = _build(Job(layout=Layout(1, 2, 1)))
    with torch.no_grad():
        model.model.norm.weight[:3] = float("nan")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        px.save_checkpoint(root, 1, model, optimizer, scheduler)
    return [str(each.message) for each in caught if "NaN" in str(each.message)]


def test_values_that_are_not_finite_stand_in_the_manifest(tmp_path: Path) -> None:
    first, second = pool(2).run(_non_finite, tmp_path)
    assert len(first) == 1
    assert second == []
    manifest = read_manifest(tmp_path / "step-00000001")
    assert manifest.non_finite == {"model.norm.weight": 3}
