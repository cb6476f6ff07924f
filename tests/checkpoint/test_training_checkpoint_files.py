"""Directories of training checkpoints: whole or not there; what is damaged is found and named."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from disk_faults import kill
from ranks import Raised, pool
from reference import Tiny, batch, mesh_of, parallel, saved_tensors
from reference_mixtral import Layout
from reference_training import (
    LLAMA,
    MIXTRAL,
    Job,
    build,
    optimizer_of,
    train,
)
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import parallel_ext as px
from parallel_ext.checkpoint.manifest import read_manifest
from parallel_ext.checkpoint.source import WholeModel
from parallel_ext.io import disk, stream
from parallel_ext.io.safetensors_reader import SafetensorsFile
from parallel_ext.sharding.slices import local_part

SMALL = Tiny(vocab_size=11, heads=2, key_value_heads=1, inner=7, layers=1)

# The directory.


def _save_small(job: Job, root: Path) -> None:
    model, optimizer, scheduler, mesh = build(job)
    train(model, optimizer, scheduler, mesh, range(1))
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

    names, shapes = saved_tensors(tmp_path / "plain"), {}
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
    model, optimizer, scheduler, mesh = build(Job(SMALL))
    train(model, optimizer, scheduler, mesh, range(1))
    return px.save_checkpoint(root, 1, model, optimizer, scheduler, {"samples": 4})


def test_a_tensor_that_is_in_no_file_is_named(tmp_path: Path) -> None:
    _plain_checkpoint(tmp_path)
    model, optimizer, _, _ = build(Job(SMALL), seed=2)
    before = [parameter.clone() for parameter in model.parameters()]

    def without_one(self: WholeModel, *args: Any) -> dict[str, SafetensorsFile]:
        return {name: at for name, at in plain(self, *args).items() if name != "model.norm.weight"}

    plain = WholeModel.open
    with (
        mock.patch.object(WholeModel, "open", without_one),
        pytest.raises(px.CheckpointError, match=r"model\.norm\.weight is missing"),
    ):
        px.load_checkpoint(tmp_path, model, optimizer)
    assert all(map(torch.equal, before, model.parameters()))


def test_a_load_holds_few_files_open(tmp_path: Path) -> None:
    with mock.patch.object(stream, "MAX_FILE_BYTES", 500):
        step = _plain_checkpoint(tmp_path)
    assert len(list(step.rglob("*.safetensors"))) > 30
    model, optimizer, scheduler, _ = build(Job(SMALL), seed=2)
    most = 0

    def count_open(*args: Any) -> int:
        nonlocal most
        links = (Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd"))
        most = max(most, sum(str(step) in os.path.realpath(link) for link in links))
        return preadv(*args)

    preadv = os.preadv
    with mock.patch.object(os, "preadv", count_open):
        assert px.load_checkpoint(tmp_path, model, optimizer, scheduler).step == 1
    assert 0 < most <= 3


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
    assert px.verify_checkpoint(step) == 1
    for path in _flips(files, 200):
        with pytest.raises(px.CheckpointError) as raised:
            px.verify_checkpoint(step)
        assert path.name in str(raised.value), path
        assert "bytes [" in str(raised.value) or path.name == "COMMIT"
    for path in _flips([tmp_path / "LATEST"], 40):
        with pytest.raises(px.CheckpointError) as raised:
            px.latest_checkpoint(tmp_path)
        assert path.name in str(raised.value) or "step-" in str(raised.value)
    assert px.verify_checkpoint(px.latest_checkpoint(tmp_path)) == 1


def test_a_flipped_bit_is_found_while_loading(tmp_path: Path) -> None:
    step = _plain_checkpoint(tmp_path)
    job = Job(SMALL)
    model, optimizer, scheduler, _ = build(job)
    files = sorted(path for path in step.rglob("*") if path.is_file())
    for path in _flips(files, 3 * len(files)):
        with pytest.raises(px.CheckpointError) as raised:
            px.load_checkpoint(tmp_path, model, optimizer, scheduler)
        assert path.name in str(raised.value), path
    px.load_checkpoint(tmp_path, model, optimizer, scheduler)


def test_a_damaged_chunk_is_named_with_its_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("parallel_ext.io.hashing._SMALLEST_CHUNK", 1024)
    step = _plain_checkpoint(tmp_path)
    assert px.verify_checkpoint(step) == 1
    path = step / "parallel_state" / "optim-00001-of-00001.safetensors"
    with SafetensorsFile(path) as file:
        name = "exp_avg_sq/lm_head.weight"
        start = file.tensors[name].start
    content = bytearray(path.read_bytes())
    content[start] ^= 4
    path.write_bytes(content)
    with pytest.raises(px.CheckpointError) as raised:
        px.verify_checkpoint(step)
    chunk = start // 1024 * 1024
    assert re.search(
        rf"{path.name}: the bytes \[{chunk}, {chunk + 1024}\) of .*{name}.* are damaged: "
        r"their hash is [0-9a-f]{32}, but [0-9a-f]{32} was written",
        str(raised.value),
    )


def test_a_checkpoint_in_chunks_of_another_size_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("parallel_ext.io.hashing._SMALLEST_CHUNK", 16 << 20)  # as before 1 MiB
        step = _plain_checkpoint(tmp_path)
    assert read_manifest(step).files["config.json"].chunk_bytes == 16 << 20
    model, optimizer, scheduler, _ = build(Job(SMALL), seed=2)
    px.load_checkpoint(tmp_path, model, optimizer, scheduler)
    assert px.verify_checkpoint(step) == 1


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
            px.verify_checkpoint(step)
        assert name in str(raised.value)
        (step / name).write_bytes(content)
    (step / "COMMIT").unlink()
    with pytest.raises(px.CheckpointError, match="has no file COMMIT"):
        px.verify_checkpoint(step)


def test_the_last_complete_step_is_found(tmp_path: Path) -> None:
    assert px.latest_checkpoint(tmp_path) is None
    step = _plain_checkpoint(tmp_path)
    (tmp_path / "step-00000009").mkdir()  # no checkpoint
    assert px.latest_checkpoint(tmp_path) == step
    (tmp_path / "LATEST").unlink()
    assert px.latest_checkpoint(tmp_path) == step


def test_a_rate_below_zero_can_be_resumed_from(tmp_path: Path) -> None:
    """Schedules end there by a rounding error, and no optimizer can be built so."""
    model, optimizer, _, _ = build(Job(Tiny(vocab_size=11, heads=2, key_value_heads=1)))
    optimizer.param_groups[0]["lr"] = -1e-20
    px.save_checkpoint(tmp_path, 1, model, optimizer)
    optimizer.param_groups[0]["lr"] = 1.0
    px.load_checkpoint(tmp_path, model, optimizer)
    assert optimizer.param_groups[0]["lr"] == -1e-20


# Errors.


def _fail_on_one_rank(what: str, name: str, root: Path) -> None:
    """The second rank fails in a save of step 3 or in a load of step 2."""
    model, optimizer, scheduler, mesh = build(Job(layout=Layout(1, 3, 1)))
    px.save_checkpoint(root, 2, model, optimizer, scheduler)

    owner = {"save": disk, "load": SafetensorsFile}[what]
    guilty = 0 if name in ("make_directory", "rename", "write_file") else 1
    fails = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    with mock.patch.object(owner, name, fails if mesh.rank == guilty else getattr(owner, name)):
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
    assert px.verify_checkpoint(px.latest_checkpoint(tmp_path)) == 2


def _lose(root: Path) -> None:
    """The second rank is killed while it writes a file of step 3."""
    mesh = px.init_mesh(tp=3, timeout=4.0)
    model = parallel(LLAMA.model(), mesh)
    px.save_checkpoint(root, 2, model)

    dies = mock.Mock(side_effect=lambda *_: kill())
    with mock.patch.object(disk, "write", dies if mesh.rank == 1 else disk.write):
        px.save_checkpoint(root, 3, model)


def test_a_killed_rank_is_named_and_the_step_before_stays(tmp_path: Path) -> None:
    for survivor in pool(3).run_losing(1, _lose, tmp_path):
        assert isinstance(survivor, Raised), survivor
        assert {"CheckpointError", "CollectiveTimeout"} <= set(survivor.classes), survivor
        assert "save_checkpoint of step 3" in survivor.text
        assert "rank 1" in survivor.text
    assert px.verify_checkpoint(px.latest_checkpoint(tmp_path)) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["LATEST", "step-00000002"]


class _Counting(dict):
    """A scheduler whose state no checkpoint holds."""

    def state_dict(self) -> dict[str, Any]:
        return {"milestones": {30: object}}

    load_state_dict = dict.update


def _refused(case: str, root: Path) -> None:
    job = Job(replace(LLAMA, dtype=torch.float32), Layout(1, 2, 1))
    model, optimizer, scheduler, mesh = build(job)
    train(model, optimizer, scheduler, mesh, range(1))
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
        optimizer.state[next(model.parameters())]["evaluations"] = 3
        save(root, 2, model, optimizer)
    elif case == "closure":
        save(root, 2, model, torch.optim.LBFGS(model.parameters()))
    elif case == "state elsewhere":
        save(root, 2, model, _OwnStateDict(model.parameters(), lr=0.1))
    elif case == "state of no parameter":
        optimizer.state["all"] = {"sum": torch.ones(())}
        save(root, 2, model, optimizer)
    elif case == "numbers of two dtypes":
        for parameter, dtype in zip(optimizer.state, (torch.float64, torch.float32), strict=False):
            optimizer.state[parameter]["step"] = torch.ones((), dtype=dtype)
        save(root, 2, model, optimizer)
    elif case == "complex":
        parameter = next(iter(optimizer.state))
        optimizer.state[parameter]["phase"] = torch.zeros(parameter.shape, dtype=torch.complex64)
        save(root, 2, model, optimizer)
    elif case == "Muon":
        matrices = [p for name, p in model.named_parameters() if "proj" in name]
        vectors = [p for p in model.parameters() if p.dim() == 1]
        muon = torch.optim.Muon(matrices)
        muon.param_groups[0]["params"] += vectors  # as nobody could make it again
        save(root, 2, model, muon)
    elif case == "Adafactor":
        other, ours, *rest = build(replace(job, optimizer="px.Adafactor"))
        train(other, ours, *rest, range(1))
        theirs = optimizer_of(other, "Adafactor")
        theirs.state = ours.state  # load_state_dict refuses it
        save(root, 2, other, theirs)
    elif case == "nothing":
        load(root / "elsewhere", model)
    elif case == "a step":
        load(px.latest_checkpoint(root), model)
    elif case == "step of a load":
        load(root, model, step="1")  # which would be the step 10000000
    elif case == "no scheduler":
        load(root, model, optimizer, scheduler)
    elif case == "class":
        load(root, model, build(replace(job, optimizer="SGD"))[1])
    elif case == "groups":
        load(root, model, torch.optim.AdamW(model.parameters()))
    elif case == "group":
        first, *others = model.parameters()
        load(root, model, torch.optim.AdamW([{"params": [first]}, {"params": others}]))
    elif case == "vocabulary":
        load(root, build(replace(job, tiny=replace(job.tiny, vocab_size=103)))[0])
    elif case == "dtype":
        load(root, build(replace(job, tiny=replace(job.tiny, dtype=torch.bfloat16)))[0])


class _OwnStateDict(torch.optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": 3}


REFUSED = {
    "twice": "step-00000001 is there already",
    "step": "step must be a whole number from 0 to 2**63 - 1, got -1",
    "scheduler": "the state of _Counting['milestones'][30] is a type, ",
    "data": "data_state must be equal on all ranks, but is ",
    "infinite": "['data_state']['loss'][1] is inf, which is no number in JSON",
    "foreign": "a parameter of shape (2, 2) in group 0 does not belong to the model",
    "unknown": "the state 'evaluations' of model.embed_tokens.weight is 3, which is no plain",
    "closure": "missing 1 required positional argument: 'closure'",
    "state elsewhere": "_OwnStateDict has a state_dict of its own; what it keeps elsewhere would",
    "state of no parameter": "AdamW keeps the state 'all', which is of no parameter",
    "numbers of two dtypes": "the state 'step' of some parameters is a number of F32 and of others",
    "complex": "is no plain tensor of a dtype that files know",
    "Muon": "Muon only supports 2D parameters",
    "Adafactor": "is no part of a state of the whole parameter",
    "nothing": "elsewhere holds no training checkpoint",
    "a step": "of a step give the root, ",
    "step of a load": "step must be a whole number from 0 on, got '1'",
    "no scheduler": "was saved without the scheduler's state",
    "class": "the state of AdamW was saved, but the optimizer is SGD",
    "groups": "2 groups of parameters were saved, but the optimizer has 1",
    "group": "group 0 of the optimizer",
    "vocabulary": "by the configuration it must be (103, 72)",
    "dtype": "was saved as torch.float32, but the model has torch.bfloat16",
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_done_is_refused_on_all_ranks(case: str, tmp_path: Path) -> None:
    pool(2).assert_raises(_refused, case, tmp_path, words=REFUSED[case])
    assert px.verify_checkpoint(px.latest_checkpoint(tmp_path)) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["LATEST", "step-00000001"]


def _non_finite(root: Path) -> list[str]:
    model, optimizer, scheduler, _ = build(Job(layout=Layout(1, 2, 1)))
    with torch.no_grad():
        model.model.norm.weight[:3] = float("nan")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        px.save_checkpoint(root, 1, model, optimizer, scheduler)
    return [str(each.message) for each in caught if "NaN" in str(each.message)]


def _non_finite_as_an_error(root: Path) -> None:
    model, *_ = build(Job(layout=Layout(1, 2, 1)))
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        px.save_checkpoint(root, 1, model)


def test_a_warning_that_is_an_error_is_one_on_all_ranks(tmp_path: Path) -> None:
    words = "1 values are NaN or infinite: model.norm.weight (1)"
    pool(2).assert_raises(_non_finite_as_an_error, tmp_path, words=words)


def _with_buffers(root: Path) -> list[bool]:
    """Buffers of other dtypes, and a parameter of one element of a column."""
    model = Tiny(dtype=torch.float32).model()
    model.register_buffer("seen", torch.tensor(7))
    model.model.register_buffer("kept", torch.tensor([True, False]))
    model.model.norm.gate = nn.Parameter(torch.ones(4, 3)[:1, 0])
    model = parallel(model, mesh_of())
    optimizer = torch.optim.AdamW(model.parameters())
    px.save_checkpoint(root / "steps", 1, model, optimizer)
    model.save_pretrained(root / "model")
    with torch.no_grad():
        model.seen.zero_()
        model.model.kept.zero_()
        model.model.norm.gate.zero_()
    px.load_checkpoint(root / "steps", model, optimizer)
    saved = load_file(root / "model" / "model.safetensors")
    return [
        *(model.seen.item() == 7, model.model.kept.tolist() == [True, False]),
        *(model.model.norm.gate.item() == 1, saved["seen"].dtype == torch.int64),
    ]


def test_buffers_of_any_dtype_are_saved_and_loaded(tmp_path: Path) -> None:
    assert pool(1).run(_with_buffers, tmp_path) == [[True] * 4]


@pytest.mark.parametrize(
    ("data_state", "words"),
    [
        ({"order": list(range(2_100_000))}, "holds 2100[0-9]+ values, far more than"),
        ({"text": "x" * 64_000_000}, "more than the 64000000 that a load takes"),
    ],
)
def test_a_data_state_that_no_load_would_take_is_refused(
    data_state: dict[str, Any], words: str, tmp_path: Path
) -> None:
    model = parallel(Tiny(layers=1, dtype=torch.float32).model(), px.init_mesh())
    px.save_checkpoint(tmp_path, 1, model)
    with pytest.raises(
        px.CheckpointError, match=f"data_state with the states of the loop.*{words}"
    ):
        px.save_checkpoint(tmp_path, 2, model, data_state=data_state, keep_last=1)
    assert px.load_checkpoint(tmp_path, model).step == 1


def _empty_shards(root: Path) -> list[bool]:
    """tp=2 shares an MLP of one feature, of which one rank has none."""
    mesh = Layout(2, 2, 1).mesh()
    model = parallel(Tiny(inner=1, dtype=torch.float32).model(), mesh)
    px.data_parallel(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    one = batch(Tiny().vocab_size)
    model(**one).loss.backward()
    optimizer.step()
    px.save_checkpoint(root, 1, model, optimizer)
    before = {p: s["exp_avg"].clone() for p, s in optimizer.state.items()}
    for state in optimizer.state.values():
        state["exp_avg"].zero_()
    px.load_checkpoint(root, model, optimizer)
    after = {p: s["exp_avg"] for p, s in optimizer.state.items()}
    return [torch.equal(local_part(before[p]), local_part(own)) for p, own in after.items()]


def test_states_of_empty_shards_are_saved_and_loaded(tmp_path: Path) -> None:
    assert all(found and all(found) for found in pool(4).run(_empty_shards, tmp_path))


def _nice(root: Path) -> int:
    model, *_ = build(Job(layout=Layout(1, 2, 1)))
    with mock.patch("os.setpriority", side_effect=PermissionError):
        px.save_checkpoint(root, 1, model, asynchronous=True)
        px.wait_for_checkpoint(model)
    return px.load_checkpoint(root, model).step


def test_a_job_that_is_nicer_than_its_saves_saves(tmp_path: Path) -> None:
    assert pool(2).run(_nice, tmp_path) == [1, 1]


def test_values_that_are_not_finite_stand_in_the_manifest(tmp_path: Path) -> None:
    first, second = pool(2).run(_non_finite, tmp_path)
    assert len(first) == 1
    assert second == []
    manifest = read_manifest(tmp_path / "step-00000001")
    assert manifest.non_finite == {"model.norm.weight": 3}
