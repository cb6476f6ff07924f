"""Hostile training checkpoints: whoever made them could compute hashes too, so these are in order.

Each is refused in time, with little memory, before anything changes, by an error with the place.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
import xxhash
from ranks import pool
from reference import Tiny, quietly
from reference_memory import needs_peak, peak_growth
from reference_mixtral import Layout
from reference_training import Job, build, train
from test_bad_files import no_waiting

import parallel_ext as px
from parallel_ext.io import stream
from parallel_ext.io.hashing import FileRecord
from parallel_ext.io.schema import to_json

JOB = Job(Tiny(vocab_size=11, heads=2, key_value_heads=1, inner=7, layers=1))
STEP = "step-00000001"
STATE = "parallel_state/"
MANIFEST, LOOP, RNG = f"{STATE}manifest.json", f"{STATE}loop.json", f"{STATE}rng.safetensors"
INDEX, CONFIG = "model.safetensors.index.json", "config.json"
MODEL, OPTIM = "model-00001-of-00002.safetensors", f"{STATE}optim-00001-of-00003.safetensors"
HEAD = "lm_head.weight"
SECONDS, MIB, HUGE = 3.0, 200, 63_900_000  # the most that JSON may take is 64 MB

Spoil = Callable[[Path], Any]  # is given the directory of the step
Case = tuple[Spoil, str]  # and what the error says, beside the directory

# How to spoil -------------------------------------------------------------------------------------


def _seal(step: Path, changes: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Let the commit fit the manifest again."""
    content = (step / MANIFEST).read_bytes()
    commit = json.loads((step / "COMMIT").read_text()) | dict(changes)
    commit["manifest"] = xxhash.xxh3_128_hexdigest(content)
    (step / "COMMIT").write_bytes(to_json(commit, "the commit"))


def _write(name: str, content: bytes) -> Spoil:
    """Another content of a file, with its hashes and the commit."""

    def spoil(step: Path) -> None:
        (step / name).write_bytes(content)
        if name not in (MANIFEST, "COMMIT"):
            manifest = json.loads((step / MANIFEST).read_bytes())
            record = FileRecord.of(content, manifest["chunk_bytes"])
            entry = {"size": record.size, "xxh3_128": list(record.hashes)}
            manifest["files"][name] = entry
            (step / MANIFEST).write_text(json.dumps(manifest))
        if name != "COMMIT":
            _seal(step)

    return spoil


def _json(name: str, change: Callable[[Any], Any]) -> Spoil:
    """Parsed JSON, changed in place."""

    def spoil(step: Path) -> None:
        content = json.loads((step / name).read_bytes())
        change(content)
        _write(name, json.dumps(content).encode())(step)

    return spoil


def _text(name: str, old: str, new: str) -> Spoil:
    """What JSON cannot be made to say: the first ``old`` in its text becomes ``new``."""

    def spoil(step: Path) -> None:
        text = (step / name).read_text()
        assert old in text
        _write(name, text.replace(old, new, 1).encode())(step)

    return spoil


def _header(name: str, change: Callable[[dict[str, Any]], Any]) -> Spoil:
    """The header of a safetensors file, changed in place, or what the change returns as text."""

    def spoil(step: Path) -> None:
        content = (step / name).read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:end])
        text = change(header)
        text = text if isinstance(text, bytes) else json.dumps(header).encode()
        _write(name, len(text).to_bytes(8, "little") + text + content[end:])(step)

    return spoil


def _random(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Spoil:
    """Another state of a generator."""

    def spoil(step: Path) -> None:
        from safetensors import safe_open
        from safetensors.torch import save

        with safe_open(step / RNG, "pt") as file:
            metadata = file.metadata()
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        tensors[name] = change(tensors[name])
        _write(RNG, save(tensors, metadata))(step)

    return spoil


def _instead(name: str, make: Callable[[Path], Any]) -> Spoil:
    """Something else in place of a file or directory, which goes beside the root."""

    def spoil(step: Path) -> None:
        path = step / name
        if os.path.lexists(path):
            path.rename(step.parents[1] / path.name)
        make(path)

    return spoil


def _link_out(path: Path) -> None:
    path.symlink_to(next(p / path.name for p in path.parents if (p / path.name).exists()))


def _manifest(change: Callable[[Any], Any]) -> Spoil:
    return _json(MANIFEST, change)


def _loop(change: Callable[[Any], Any]) -> Spoil:
    return _json(LOOP, change)


def _option(name: str, value: Any) -> Spoil:
    return _loop(lambda loop: loop["optimizer"]["groups"][0]["options"].update({name: value}))


def _rename_file(old: str, new: Any) -> Spoil:
    return _manifest(lambda m: m["files"].update({new: m["files"].pop(old)}))


def _latest(content: bytes) -> Spoil:
    return lambda step: (step.parent / "LATEST").write_bytes(content)


def _mix(name: str) -> Spoil:
    """A file of another save, whose hashes are made to fit."""
    other = "0123456789abcdef" * 2
    return _header(name, lambda header: header["__metadata__"].update(save_id=other))


def _other_step(step: Path) -> None:
    _manifest(lambda m: m.update(step=2))(step)
    _seal(step, {"step": 2})


def _step_instead(make: Callable[[Path], Any]) -> Spoil:
    """Something else in place of the directory of the step."""

    def spoil(step: Path) -> None:
        step.rename(step.parents[1] / step.name)
        make(step)

    return spoil


def _renamed_tensor(header: dict[str, Any]) -> None:
    header["\x1b[31m" + "../" * 40] = header.pop(next(n for n in header if n[0] != "_"))


# The corpus ---------------------------------------------------------------------------------------

NAMES: dict[str, Case] = {
    **{
        f"in the manifest {name[:20]!r}": (_rename_file(CONFIG, name), "no name of a file")
        for name in (
            *("../config.json", "/etc/passwd", "a/b.json", "parallel_state/../../x", "", "."),
            *("x\0.json", "x" * 300, "parallel_state", ".hidden", "COMMIT", MANIFEST, "a\\b", "\n"),
        )
    },
    "of a file of a tensor": (
        _manifest(lambda m: m["tensors"][HEAD].update(file="../x")),
        "file must be one of",
    ),
    "of a file that holds no tensors": (
        _manifest(lambda m: m["tensors"][HEAD].update(file=LOOP)),
        "file must be one of",
    ),
    **{
        f"in the index {str(name)[:20]!r}": (
            _json(INDEX, lambda index, name=name: index["weight_map"].update({HEAD: name})),
            "weight_map is not that of the manifest",
        )
        for name in ("../x.safetensors", "/x.safetensors", "x\0", "x" * 300, 7, None, OPTIM)
    },
    "of a tensor": (_header(MODEL, _renamed_tensor), "in the manifest"),
    "of a tensor, too long": (
        _header(MODEL, lambda header: header.update({"x" * 1025: 1})),
        "1025 characters",
    ),
    "of the latest step": (_latest(b"../../step-00000001 " + b"0" * 32 + b"\n"), "LATEST"),
    "of another step": (_latest(b"step-00000002 " + b"0" * 32 + b"\n"), "no such directory"),
    "of a step without end": (_latest(b"step-" + b"1" * 4000), "LATEST"),
    "of a directory": (_other_step, "holds the step 2"),
}

LINKS: dict[str, Case] = {
    **{
        f"link for {name}": (_instead(name, _link_out), "a symbolic link, which is not followed")
        for name in (MANIFEST, LOOP, RNG, "COMMIT", CONFIG, MODEL, OPTIM, "../LATEST")
    },
    "link inside of the directory": (
        lambda step: (
            (step / MODEL).rename(step / "other"),
            (step / MODEL).symlink_to("other"),
        ),
        "a symbolic link, which is not followed",
    ),
    "link for the folder": (_instead("parallel_state", _link_out), "a symbolic link"),
    "link for the step": (_step_instead(_link_out), "a symbolic link"),
    "link to a device": (
        _instead(MANIFEST, lambda path: path.symlink_to("/dev/zero")),
        "a symbolic link",
    ),
    **{
        f"{kind} for {name}": (_instead(name, make), f"this is a {kind}")
        for kind, make in (("FIFO", os.mkfifo), ("directory", Path.mkdir))
        for name in (MANIFEST, LOOP, RNG, "COMMIT", CONFIG, MODEL, OPTIM, "../LATEST")
    },
    "FIFO for the folder": (_instead("parallel_state", os.mkfifo), "manifest.json"),
    "FIFO for the step": (_step_instead(os.mkfifo), "no such directory"),
}

FILES: dict[str, Case] = {
    "not listed": (_manifest(lambda m: m["files"].pop(CONFIG)), "does not list this file"),
    "state not listed": (_manifest(lambda m: m["files"].pop(LOOP)), "loop.json is not among"),
    "random numbers not listed": (_manifest(lambda m: m["files"].pop(RNG)), "is not among the"),
    **{
        f"one more, {name}": (_instead(name, lambda path: path.write_bytes(b"x")), "does not list")
        for name in ("model.safetensors", "pytorch_model.bin", f"{STATE}more", f"{STATE}optim.pt")
    },
    "listed but missing": (
        _manifest(lambda m: m["files"].update({"more.json": m["files"][CONFIG]})),
        "more.json: no such file",
    ),
    **{f"of another save, {name}": (_mix(name), "two saves were mixed") for name in (MODEL, RNG)},
    **{
        f"pickle as {name}": (
            lambda step, name=name: _write(name, _canary(step.parents[1] / "run"))(step),
            "",
        )
        for name in (MANIFEST, "COMMIT", LOOP, RNG, CONFIG, INDEX, MODEL, OPTIM)
    },
}

TEXTS: dict[str, Case] = {
    **{
        f"twice a key in {name}": (_text(name, "{", '{"a": 1, "a": 2, '), "occurs more than once")
        for name in (MANIFEST, LOOP, CONFIG, INDEX)
    },
    "twice a key in COMMIT": (
        _text("COMMIT", "{", '{"step": 2, '),
        "COMMIT: the key 'step' occurs more than once",
    ),
    "twice a tensor": (
        _header(MODEL, lambda header: b'{"a":1,' + json.dumps({"a": header}).encode()[1:]),
        "occurs more than once",
    ),
    **{
        f"{kind} as {name}": (_write(name, content), words)
        for name in (MANIFEST, LOOP, CONFIG)
        for kind, content, words in (
            ("nothing", b"", "not valid JSON"),
            ("list", b"[]", "expected a JSON object"),
            ("deep lists", b"[" * 100_000, "not valid JSON"),
            ("deep objects", b'{"a":' * 100_000, "not valid JSON"),
            ("long number", b'{"a":' + b"9" * 100_000 + b"}", "not valid JSON"),
            ("infinity", b'{"a": 1e999}', "1e999' is too large a number"),
            ("bytes", b'{"\xff": 1}', "not valid JSON"),
        )
    },
    "COMMIT of 5 kB": (_write("COMMIT", b" " * 5000), "more than the 4096"),
    "COMMIT of lists": (_write("COMMIT", b'{"manifest": ["x"]}'), "is damaged"),
    "LATEST of 5 kB": (_latest(b" " * 5000), "more than the 4096"),
    "sparse manifest": (
        lambda step: os.truncate(step / MANIFEST, 2**40),
        f"has {2**40} bytes, more than",
    ),
    **{
        f"64 MB of {kind} as {name}": (_write(name, content), "manifest.json")
        for name in (MANIFEST,)
        for kind, content in (
            ("spaces", b"{" + b" " * HUGE),
            ("string", b'{"a":"' + b"x" * HUGE + b'"}'),
            ("lists", b'{"a":[' + b"[]," * (HUGE // 3) + b"[]]}"),
            ("name", b'{"' + b"x" * HUGE + b'":1}'),
        )
    },
    "64 MB of one string as header": (
        _header(RNG, lambda _: b'{"a":"' + b"x" * HUGE + b'"}'),
        "rng.safetensors",
    ),
    "99 MB of header": (_header(RNG, lambda _: b" " * 99_000_000), "a header of 99000000 bytes"),
    "as many lists as may be": (_write(LOOP, b'{"a":[' + b"[]," * 990_000 + b"[]]}"), "loop.json"),
}

HEADERS: dict[str, Case] = {
    **{
        f"header of {length} in {name}": (
            _write(name, length.to_bytes(8, "little") + b"{}"),
            Path(name).name,
        )
        for name in (MODEL, OPTIM, RNG)
        for length in (2**63, 2**64 - 1, 100, 0)
    },
    "1 000 001 tensors": (
        _header(RNG, lambda _: b"{" + b'"a":{"data_offsets":1},' * 1_000_001 + b'"b":1}'),
        "describes 1000001 tensors",
    ),
    "overlap": (
        _header(OPTIM, lambda header: _second(header).update(data_offsets=[0, 8], shape=[1])),
        "it overlaps",
    ),
    "hole": (
        _header(OPTIM, lambda header: header.pop(next(n for n in header if n[0] != "_"))),
        "hole",
    ),
    "shape that overflows": (
        _header(OPTIM, lambda header: _second(header).update(shape=[2**62] * 60)),
        "but data_offsets is",
    ),
    "shape of another": (
        _manifest(lambda m: m["tensors"][HEAD].update(shape=[16, 11])),
        "in the manifest",
    ),
    "dtype of another": (
        _manifest(lambda m: m["tensors"][HEAD].update(dtype="F32")),
        "in the manifest",
    ),
    "tensor that is not listed": (
        _manifest(lambda m: m["tensors"].pop(f"exp_avg/{HEAD}")),
        "missing in the manifest",
    ),
    "tensor that is in no file": (
        _manifest(lambda m: m["tensors"].update(ghost=m["tensors"][f"exp_avg/{HEAD}"])),
        "ghost is missing there",
    ),
    "negative sizes": (
        _manifest(lambda m: m["tensors"][HEAD].update(shape=[-11, -16])),
        "whole numbers of at least 0",
    ),
}


def _second(header: dict[str, Any]) -> dict[str, Any]:
    """The entry of the tensor behind the first."""
    names = [name for name in header if name != "__metadata__"]
    return header[sorted(names, key=lambda name: header[name]["data_offsets"])[1]]


def _without(words: str) -> Spoil:
    """The state of an optimizer lacks what these words are in."""

    def spoil(step: Path) -> None:
        from safetensors import safe_open
        from safetensors.torch import save

        for path in sorted((step / STATE).glob("optim-*")):
            with safe_open(path, "pt") as file:
                metadata = file.metadata()
                kept = {n: file.get_tensor(n) for n in file.keys() if words not in n}  # noqa: SIM118
            _write(STATE + path.name, save(kept, metadata))(step)
        _manifest(
            lambda m: m.update(tensors={n: t for n, t in m["tensors"].items() if words not in n})
        )(step)

    return spoil


TRAINING: dict[str, Case] = {
    **{
        f"option {name}={value!r}": (_option(name, value), "group 0 of the saved optimizer")
        for name, value in (
            *(("lr", [0.1]), ("lr", {"a": 1}), ("lr", "0.1"), ("lr", None), ("lr", True)),
            *(("betas", 0.9), ("betas", [0.9]), ("betas", [0.9, "x"]), ("amsgrad", 1)),
            *(("params", []), ("fused", True), ("param_names", ["x"]), ("betas", [0.9, 1.5])),
        )
    },
    "options that want more state": (_option("amsgrad", True), "max_exp_avg_sq"),
    "another class": (
        _loop(lambda loop: loop["optimizer"].update({"class": "SGD"})),
        "the state of SGD was saved",
    ),
    "a class in words": (
        _loop(lambda loop: loop["optimizer"].update({"class": "__import__('os')"})),
        "class must be text like",
    ),
    "no steps": (_loop(lambda loop: loop["optimizer"].update(numbers={})), "the state step of"),
    "no second moments": (_without("exp_avg_sq/"), "the state exp_avg_sq of"),
    "no second moment": (_without(f"exp_avg_sq/{HEAD}"), "the state exp_avg_sq of"),
    "steps below 0": (
        _loop(lambda loop: loop["optimizer"]["numbers"]["step"].update(most=-1.0)),
        "step",
    ),
    "steps of no fp32": (
        _loop(lambda loop: loop["optimizer"]["numbers"]["step"].update(most=0.1)),
        "most must be null or torch.float32",
    ),
    "steps of int8": (
        _loop(lambda loop: loop["optimizer"]["numbers"]["step"].update(dtype="I8", most=1)),
        "was saved as torch.int8 1",
    ),
    "a moment that is one number": (
        _loop(
            lambda loop: loop["optimizer"]["numbers"].update(
                exp_avg={"dtype": "F32", "most": 0.0, "others": {}}
            )
        ),
        "was saved as a number and as a tensor",
    ),
    "steps of a stranger": (
        _loop(lambda loop: loop["optimizer"]["numbers"]["step"]["others"].update(stranger=1.0)),
        "'stranger', which is in none of its groups",
    ),
    "a parameter twice": (
        _loop(lambda loop: loop["optimizer"]["groups"][1]["parameters"].append(HEAD)),
        "more than once",
    ),
    "scheduler with a method": (
        _loop(lambda loop: loop["scheduler"]["state"].update(get_lr=1)),
        "'get_lr' is no state",
    ),
    "scheduler with an optimizer": (
        _loop(lambda loop: loop["scheduler"]["state"].update(optimizer=1)),
        "'optimizer' is no state",
    ),
    "scheduler whose rates are words": (
        _loop(lambda loop: loop["scheduler"]["state"].update(base_lrs=["x", "y"])),
        "'base_lrs' must be a number",
    ),
    "scheduler whose epoch is a list": (
        _loop(lambda loop: loop["scheduler"]["state"].update(last_epoch=[1])),
        "'last_epoch' must be a number",
    ),
    "torch's state of zeros": (_random("torch.00000", torch.zeros_like), "Invalid mt19937 state"),
    "torch's state of a few bytes": (_random("torch.00000", lambda t: t[:7].clone()), "size"),
    "torch's state of floats": (_random("torch.00000", torch.Tensor.float), "is no state"),
    "Python's state of zeros": (_random("python.00000", torch.zeros_like), "version"),
    "Python's state with its end": (
        _random("python.00000", lambda t: torch.where(torch.arange(626) == 625, 999, t)),
        "invalid state",
    ),
    "Python's state of 3": (_random("python.00000", lambda t: t[:3].clone()), "is no state"),
    "NumPy's state far off": (
        _random("numpy.00000", lambda t: torch.where(torch.arange(625) == 624, 10**9, t)),
        "invalid state of NumPy",
    ),
    "NumPy's state below 0": (_random("numpy.00000", lambda t: t - 2**33), "invalid state"),
    "two halves of a pair": (
        _random("numpy_gauss.00000", lambda t: torch.zeros(2, dtype=t.dtype)),
        "is no state",
    ),
    "random numbers of another kind": (
        _header(RNG, lambda header: header.update(x=header.pop("torch.00000"))),
        "is no state of a generator",
    ),
    "random numbers of another rank": (
        _header(RNG, lambda header: header.update({"torch.00001": header.pop("torch.00000")})),
        "torch of rank 0 is missing",
    ),
    "dropout masks of words": (
        _loop(lambda loop: loop.update(dropout_masks={"a": {"key": "x", "forwards": 1}})),
        "key must be a whole number",
    ),
    "another step in the loop": (_loop(lambda loop: loop.update(step=5)), "step is 5, but 1"),
    "one field more in the loop": (_loop(lambda loop: loop.update(more=5)), "expected the fields"),
    "version 2": (_manifest(lambda m: m.update(version=2)), "version 2 of the format"),
    "chunks of another size": (_manifest(lambda m: m.update(chunk_bytes=1)), "chunk_bytes must"),
    "no hashes": (
        _manifest(lambda m: m["files"][CONFIG].update(xxh3_128=[])),
        "one hash for each",
    ),
}

CORPUS = {
    f"{group}: {name}": case
    for group, cases in {
        "name": NAMES,
        "link": LINKS,
        "file": FILES,
        "text": TEXTS,
        "header": HEADERS,
        "training": TRAINING,
    }.items()
    for name, case in cases.items()
}


def _canary(path: Path) -> bytes:
    """A pickle that makes a file when it is loaded."""
    import pickle

    class Canary:
        def __reduce__(self) -> Any:
            return Path.touch, (path,)

    return pickle.dumps(Canary())


# The tests ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with one step of one process, in several files."""
    root = tmp_path_factory.mktemp("good") / "root"
    with mock.patch.object(stream, "MAX_FILE_BYTES", 10_000):
        model, optimizer, scheduler, mesh = build(JOB)
        train(model, optimizer, scheduler, mesh, range(1))
        step = px.save_checkpoint(root, 1, model, optimizer, scheduler, {"samples": 4})
    assert {path.name for path in (step / STATE).iterdir()} >= {Path(OPTIM).name}
    assert (step / MODEL).exists()
    assert px.verify_checkpoint(step) == 1
    return root


@pytest.fixture
def root(good: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy that may be spoiled; some are of 100 MB, so they do not stay."""
    shutil.copytree(good, tmp_path / "root")
    yield tmp_path / "root"
    shutil.rmtree(tmp_path)


@pytest.fixture(scope="module")
def job(good: Path) -> tuple[Any, Any, Any]:
    """What the steps are loaded into; the first time takes longer."""
    model, optimizer, scheduler, mesh = build(JOB, seed=5)
    train(model, optimizer, scheduler, mesh, range(1))
    px.load_checkpoint(good, model, optimizer, scheduler)
    train(model, optimizer, scheduler, mesh, range(1))
    return model, optimizer, scheduler


def _held(model: Any, optimizer: Any, scheduler: Any) -> str:
    """A digest of all that training resumes from."""
    digest = xxhash.xxh3_128()
    for parameter in model.parameters():
        for tensor in (parameter, *optimizer.state[parameter].values()):
            digest.update(tensor.detach().numpy())
    plain = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    digest.update(repr((plain, scheduler.state_dict(), random.getstate())).encode())
    digest.update(torch.get_rng_state().numpy())
    digest.update(numpy.random.get_state()[1])
    return digest.hexdigest()


def _refused(root: Path, job: tuple[Any, Any, Any]) -> tuple[str, float]:
    """The error of loading, after which everything is as it was, and the seconds of CPU."""
    before = _held(*job)
    with no_waiting():
        start = time.process_time()
        with pytest.raises(px.CheckpointError) as raised:
            px.load_checkpoint(root, *job)
        seconds = time.process_time() - start
    assert _held(*job) == before
    assert not (root.parent / "run").exists(), "a pickle was loaded"
    return str(raised.value), seconds


# What only a model and an optimizer can tell; everything else is found without them.
NEEDS_A_MODEL = ("option", "class", "scheduler", "state", "moment", "steps", "random numbers of an")


@pytest.mark.parametrize("name", CORPUS)
def test_it_is_refused_in_time_and_nothing_changes(
    name: str, root: Path, job: tuple[Any, Any, Any]
) -> None:
    """Also without a model, where none is needed to tell."""
    spoil, words = CORPUS[name]
    spoil(root / STEP)
    message, seconds = _refused(root, job)
    assert words in message
    assert str(root) in message or name.startswith("training")
    assert len(message) < 3000
    for _ in range(2):  # others use the caches too
        if seconds >= SECONDS:
            seconds = min(seconds, _refused(root, job)[1])
    assert seconds < SECONDS
    if name.startswith("training") and any(part in name for part in NEEDS_A_MODEL):
        return
    if "MB" not in name:  # whose hashes take long
        with no_waiting(), pytest.raises(px.CheckpointError, match=re.escape(words)):
            px.verify_checkpoint(px.latest_checkpoint(root))


@needs_peak
@pytest.mark.parametrize(
    "name", [n for n in CORPUS if "64 MB" in n or "as many" in n or "1 000" in n]
)
def test_it_is_refused_with_little_memory(name: str, root: Path, job: tuple[Any, Any, Any]) -> None:
    CORPUS[name][0](root / STEP)
    assert peak_growth(lambda: _refused(root, job))[0] < MIB


# On several ranks ---------------------------------------------------------------------------------


def _load_on_all(root: Path) -> None:
    model, optimizer, scheduler, _ = build(replace(JOB, layout=Layout(1, 2, 1)))
    before = _held(model, optimizer, scheduler)
    try:
        px.load_checkpoint(root, model, optimizer, scheduler)
    finally:
        assert _held(model, optimizer, scheduler) == before


@pytest.mark.parametrize(
    "name",
    [
        "name: in the manifest '../config.json'",
        f"link: FIFO for {OPTIM}",
        f"file: pickle as {MODEL}",
        f"text: deep lists as {LOOP}",
        "training: option lr=[0.1]",
        "training: scheduler with a method",
    ],
)
def test_all_ranks_refuse_it(name: str, root: Path) -> None:
    spoil, words = CORPUS[name]
    spoil(root / STEP)
    pool(2).assert_raises(_load_on_all, root, words=words)


def _load_own(folder: Path) -> None:
    before = Path.cwd()
    os.chdir(folder / str(torch.distributed.get_rank()))
    try:
        _load_on_all(Path("root"))
    finally:
        os.chdir(before)


@pytest.mark.parametrize("name", [f"link: FIFO for {LOOP}", f"file: of another save, {MODEL}"])
def test_what_one_rank_refuses_all_refuse(name: str, good: Path, tmp_path: Path) -> None:
    """The second rank sees other files, as on a file system that is not shared."""
    for rank in ("0", "1"):
        shutil.copytree(good, tmp_path / rank / "root")
    spoil, words = CORPUS[name]
    spoil(tmp_path / "1" / "root" / STEP)
    first, second = pool(2).run_raising(_load_own, tmp_path)
    assert words in second.text
    assert f"failed on rank 1: CheckpointError: {second.text}" in first.text


# Every value --------------------------------------------------------------------------------------

OTHERS = (None, True, 0, -1, 1.5, 10**30, "x", [], [1], {}, {"a": 1})
# What may be anything, or any number: nothing is computed from it, or it is what the user wants.
FREE = re.compile(
    r"/(saved_by|data_state|non_finite)(/.*)?|/random/(seed|mesh.*)"
    r"|/optimizer/groups/./options(/[a-z_]+(/.)?)?|/optimizer/numbers/step/(most|others)"
    r"|/scheduler(/state(/[a-zA-Z_]+(/.)?)?)?"
)


def _places(value: Any, path: str = "") -> Iterator[str]:
    yield path
    items = value.items() if isinstance(value, dict) else ()
    for key, inner in enumerate(value) if isinstance(value, list) else items:
        yield from _places(inner, f"{path}/{key}")


def _put(content: Any, path: str, value: Any) -> Any:
    """The content with another value at a place."""
    if not path:
        return value
    first, _, rest = path[1:].partition("/")
    key = int(first) if isinstance(content, list) else first
    while key not in content and isinstance(content, dict):  # a name with a slash
        more, _, rest = rest.partition("/")
        key = f"{key}/{more}"
    content[key] = _put(content[key], rest and f"/{rest}", value)
    return content


def _fuzz(name: str, good: Path, root: Path, job: tuple[Any, Any, Any], share: int) -> list[str]:
    """Places where another value neither is refused nor leaves a job that trains."""
    text = (good / STEP / name).read_text()
    wrong = []
    for number, (path, value) in enumerate(
        (path, value) for path in _places(json.loads(text)) for value in OTHERS
    ):
        if number % share:
            continue
        shutil.copytree(good, root, dirs_exist_ok=True)
        content = _put(json.loads(text), path, value)
        if content == json.loads(text):
            continue
        _write(name, json.dumps(content).encode())(root / STEP)
        before = _held(*job)
        try:
            with quietly():
                px.load_checkpoint(root, *job)
            train(*job, px.init_mesh(), range(1))
            if not FREE.fullmatch(path):
                wrong.append(f"{path} = {value!r} is taken")
        except px.CheckpointError as error:
            if str(root) not in str(error) and "optimizer" not in path:
                wrong.append(f"{path} = {value!r}: {error}")
            if _held(*job) != before:
                wrong.append(f"{path} = {value!r} is refused too late")
        except Exception as error:
            if not path.startswith("/scheduler/"):  # its numbers mean what they mean
                wrong.append(f"{path} = {value!r}: {type(error).__name__}: {error}")
            px.load_checkpoint(good, *job)
    return wrong


@pytest.mark.parametrize("name", [MANIFEST, LOOP])
@pytest.mark.parametrize("share", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_any_other_value_is_refused_or_does_no_harm(
    name: str, share: int, good: Path, root: Path, job: tuple[Any, Any, Any]
) -> None:
    assert _fuzz(name, good, root, job, share) == []
