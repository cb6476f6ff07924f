"""Many places of a file are read in one pass, by several threads, and every chunk is compared."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import safetensors.torch
import torch

import parallel_ext as px
from parallel_ext.distributed.errors import CheckpointError
from parallel_ext.io import places, reading, safetensors_reader
from parallel_ext.io.hashing import FileRecord, chunk_bytes_for
from parallel_ext.io.reading import Reads, Wanted, num_threads, read_shards
from parallel_ext.io.safetensors_reader import SafetensorsFile
from parallel_ext.sharding.layout import Box, Part, TensorLayout

CHUNK = 4096
_SHAPES = {"a": (7, 300), "b": (5,), "c": (130, 17), "d": (), "e": (3, 5, 70), "f": (900, 2)}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 4 KiB and pieces of 200 bytes, so that small tensors take several."""
    monkeypatch.setattr(safetensors_reader, "_CHUNK_BYTES", CHUNK)
    for module in (places, safetensors_reader):
        monkeypatch.setattr(module, "HOT_BYTES", 200)


@pytest.fixture(params=[0, 3], ids=["no threads", "3 threads"])
def reads(request: pytest.FixtureRequest) -> Iterator[Reads]:
    if not request.param:
        yield Reads(None)
        return
    with ThreadPoolExecutor(request.param) as pool:
        yield Reads(pool)


@pytest.fixture
def tensors(tmp_path: Path) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    tensors = {name: torch.randn(shape) for name, shape in _SHAPES.items()}
    safetensors.torch.save_file(tensors, tmp_path / "x.safetensors")
    return tensors


@contextmanager
def _bytes_read() -> Iterator[list[int]]:
    counts: list[int] = []

    def counting(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        counts.append(original(descriptor, buffers, offset))
        return counts[-1]

    original = os.preadv
    with mock.patch.object(os, "preadv", counting):
        yield counts


def _whole(shape: tuple[int, ...]) -> Box:
    return tuple((0, size) for size in shape)


@pytest.mark.parametrize(
    ("hashed", "gap"), [(False, 1 << 20), (False, 1), (True, 1)], ids=["plain", "gaps", "hashed"]
)
def test_a_pass_fills_boxes_of_any_shape_dtype_and_strides(
    tmp_path: Path,
    tensors: dict[str, torch.Tensor],
    reads: Reads,
    monkeypatch: pytest.MonkeyPatch,
    hashed: bool,
    gap: int,
) -> None:
    monkeypatch.setattr(places, "GAP_BYTES", gap)
    path, dice = tmp_path / "x.safetensors", random.Random(0)
    record = FileRecord.of(path.read_bytes(), CHUNK) if hashed else None
    with SafetensorsFile(path, record) as file:
        in_order = sorted(tensors, key=lambda name: file.tensors[name].start)
        for _ in range(40):
            expected, found = [], []
            for name in in_order:
                for _ in range(dice.randint(0, 2)):  # boxes of one tensor may share elements
                    box = tuple(
                        dice.choice(
                            [(0, n), tuple(sorted((dice.randint(0, n), dice.randint(0, n))))]
                        )
                        for n in _SHAPES[name]
                    )
                    expected.append(tensors[name][tuple(slice(a, b) for a, b in box)])
                    dtype = dice.choice([torch.float32, torch.float64])
                    wider = torch.zeros([n + 1 for n in expected[-1].shape], dtype=dtype)
                    inside = wider[tuple(slice(0, n) for n in expected[-1].shape)]
                    found.append(dice.choice([inside, torch.zeros_like(expected[-1], dtype=dtype)]))
                    file.read_box(name, box, found[-1], lambda each: reads.add(file, each))
                if dice.random() < 0.3:
                    reads.run()
            reads.finish()
            for one, other in zip(expected, found, strict=True):
                assert torch.equal(one.to(other.dtype), other)


def test_a_pass_reads_every_chunk_once(
    tmp_path: Path, tensors: dict[str, torch.Tensor], reads: Reads
) -> None:
    path = tmp_path / "x.safetensors"
    with (
        SafetensorsFile(path, FileRecord.of(path.read_bytes(), CHUNK)) as file,
        _bytes_read() as counts,
    ):
        for name in sorted(tensors, key=lambda name: file.tensors[name].start):
            box = ((1, 2), *_whole(_SHAPES[name][1:])) if _SHAPES[name] else ()  # a row of each
            out = torch.empty([b - a for a, b in box])
            file.read_box(name, box, out, lambda places: reads.add(file, places))
            reads.run()  # keeps the last chunk, of which the next tensor is
        reads.finish()
        touched = {
            at // CHUNK
            for name, entry in file.tensors.items()
            for row in [(entry.stop - entry.start) // (entry.shape or (1,))[0]]
            for first in [entry.start + (row if entry.shape else 0)]
            for at in range(first, first + row, 4)
        }
        size = path.stat().st_size
        assert sum(counts) == sum(min(CHUNK, size - number * CHUNK) for number in touched)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hashed", [False, True])
def test_columns_are_read_alone_where_there_are_no_hashes_and_the_gaps_are_large(
    tmp_path: Path,
    reads: Reads,
    monkeypatch: pytest.MonkeyPatch,
    hashed: bool,
    dtype: torch.dtype,
) -> None:
    monkeypatch.setattr(places, "HOT_BYTES", 8000)
    monkeypatch.setattr(places, "GAP_BYTES", 3000)
    path, tensor = tmp_path / "y.safetensors", torch.randn(37, 15, 70)
    safetensors.torch.save_file({"y": tensor}, path)
    record = FileRecord.of(path.read_bytes(), CHUNK) if hashed else None
    # Of a row of 4200 bytes: 1120; 1400, which leaves too small a gap; not of one piece.
    for box, read in (
        ((3, 7), 37 * 4 * 280),
        ((3, 8), 37 * 4200),
        ((3, 4, 5, 9), 37 * 4200),
    ):
        inside = (box[2:],) if box[2:] else ((0, 70),)
        wanted = ((0, 37), box[:2], *inside)
        expected = tensor[tuple(slice(a, b) for a, b in wanted)]
        out = torch.zeros_like(expected, dtype=dtype)
        with SafetensorsFile(path, record) as file, _bytes_read() as counts:
            file.read_box("y", wanted, out, lambda places: reads.add(file, places))
            reads.finish()
        assert torch.equal(out, expected.to(dtype))
        assert sum(counts) == (path.stat().st_size if hashed else read)


def test_a_damaged_byte_beside_what_is_wanted_is_found(
    tmp_path: Path, tensors: dict[str, torch.Tensor], reads: Reads
) -> None:
    path = tmp_path / "x.safetensors"
    record = FileRecord.of(path.read_bytes(), CHUNK)
    with SafetensorsFile(path, record) as file:
        at, before = file.tensors["c"].start + 5000, path.stat()
        with open(path, "r+b") as other:
            other.seek(at)
            byte = other.read(1)[0]
            other.seek(at)
            other.write(bytes([byte ^ 1]))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # as a damaged disk does it
        start = at // CHUNK * CHUNK
        box = ((0, 130), (0, 1))
        out = torch.empty(130, 1)
        file.read_box("c", box, out, lambda places: reads.add(file, places))
        with pytest.raises(CheckpointError, match=rf"\[{start}, {start + CHUNK}\) of .* damaged"):
            reads.finish()
        with pytest.raises(CheckpointError, match=rf"\[{start}, {start + CHUNK}\) of .* damaged"):
            file.check_all()


def test_steps_of_a_load_read_the_chunk_between_them_once(
    tmp_path: Path, tensors: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_STEP_BYTES", 1)  # a step for each tensor
    path, mesh = tmp_path / "x.safetensors", px.init_mesh()
    found = {name: torch.empty(shape) for name, shape in _SHAPES.items()}
    wanted = []
    for name, shape in _SHAPES.items():
        layout = TensorLayout(name, shape)
        part = Part(name, name, layout.whole, index=False)
        wanted.append((Wanted(name, layout, part), found[name]))
    with (
        SafetensorsFile(path, FileRecord.of(path.read_bytes(), CHUNK)) as file,
        _bytes_read() as counts,
    ):
        read_shards(wanted, dict.fromkeys(_SHAPES, file), mesh, "a test")
    assert sum(counts) == path.stat().st_size
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("size", [0, 1, 1 << 30, (1 << 38) - 1, 1 << 38, 3 << 40])
def test_chunks_are_small_and_their_hashes_few(size: int) -> None:
    chunk = chunk_bytes_for(size)
    assert size <= chunk << 18
    assert chunk == 1 << 20 or size > chunk << 17  # not larger than it must be


def test_a_rank_reads_with_the_cores_that_its_host_leaves_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert [num_threads(ranks) for ranks in (1, 2, 4, 8, 64)] == [4, 4, 2, 1, 1]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert num_threads(64) == 2
