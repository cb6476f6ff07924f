"""Our reader and writer of the safetensors format, judged by the safetensors package."""

from __future__ import annotations

import os
import random
import re
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from parallel_ext.distributed.errors import CheckpointError
from parallel_ext.io import places
from parallel_ext.io.header_hashes import check_tensors
from parallel_ext.io.safetensors_reader import HASHES, SafetensorsFile
from parallel_ext.io.safetensors_writer import SafetensorsWriter, TensorSpec
from parallel_ext.io.schema import to_json
from parallel_ext.sharding.layout import Box, box_shape

DTYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.int64,
    torch.uint16,
    torch.bool,
    torch.float8_e4m3fn,
]


def _tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    values = torch.randint(0, 2 if dtype == torch.bool else 100, shape)
    return values.to(dtype)


def _whole(shape: tuple[int, ...]) -> Box:
    return tuple((0, size) for size in shape)


def _read(path: Path, name: str, box: Box, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(box_shape(box), dtype=dtype)
    with SafetensorsFile(path) as file:
        file.read_box(name, box, out)
    return out


def _write(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    specs = [TensorSpec(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()]
    with SafetensorsWriter(path, specs) as writer:
        for name, tensor in tensors.items():
            writer.append(name, tensor)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bits(a), _bits(b))


@pytest.fixture
def small_stripes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stripes of 96 bytes, so that small tensors take several."""
    monkeypatch.setattr(places, "HOT_BYTES", 96)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reads_what_the_safetensors_package_writes(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {
        "a": _tensor((5, 3), dtype),
        "empty": _tensor((0, 4), dtype),
        "b": _tensor((), dtype),
    }
    safetensors.torch.save_file(tensors, tmp_path / "x.safetensors", {"format": "pt"})
    with SafetensorsFile(tmp_path / "x.safetensors") as file:
        assert file.tensors.keys() == tensors.keys()
        for name, tensor in tensors.items():
            entry = file.tensors[name]
            assert (entry.dtype, entry.shape) == (dtype, tuple(tensor.shape))
            out = torch.empty(tensor.shape, dtype=dtype)
            file.read_box(name, _whole(entry.shape), out)
            assert _same_bits(out, tensor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_safetensors_package_reads_what_we_write(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {
        "a": _tensor((5, 3), dtype),
        "empty": _tensor((0, 4), dtype),
        "ü": _tensor((), dtype),
    }
    _write(tmp_path / "x.safetensors", tensors)
    loaded = safetensors.torch.load_file(tmp_path / "x.safetensors")
    assert loaded.keys() == tensors.keys()
    assert all(_same_bits(loaded[name], tensor) for name, tensor in tensors.items())
    with safetensors.safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert file.metadata().keys() == {"format", HASHES}
        assert file.metadata()["format"] == "pt"


@pytest.mark.parametrize(
    ("shape", "box"),
    [
        ((40, 7), ((11, 33), (0, 7))),
        ((40, 7), ((0, 40), (3, 5))),
        ((40, 7), ((9, 31), (2, 7))),
        ((40, 7), ((12, 12), (0, 7))),
        ((6, 5, 9), ((2, 5), (0, 5), (0, 9))),
        ((6, 5, 9), ((1, 6), (2, 4), (0, 9))),
        ((6, 5, 9), ((0, 6), (0, 5), (3, 8))),
        ((90,), ((20, 85),)),
    ],
)
@pytest.mark.usefixtures("small_stripes")
def test_reads_a_slice_that_crosses_stripes(
    tmp_path: Path, shape: tuple[int, ...], box: Box
) -> None:
    tensor = torch.randn(shape)
    safetensors.torch.save_file({"before": torch.ones(3), "t": tensor}, tmp_path / "x.safetensors")
    expected = tensor[tuple(slice(a, b) for a, b in box)]
    assert _same_bits(_read(tmp_path / "x.safetensors", "t", box, torch.float32), expected)


@pytest.mark.usefixtures("small_stripes")
def test_reads_any_box_in_any_dtype_into_any_strides(tmp_path: Path) -> None:
    dice = random.Random(0)
    for trial in range(200):
        shape = tuple(dice.randint(1, 12) for _ in range(dice.randint(1, 4)))
        box = tuple(
            dice.choice([(0, n), tuple(sorted((dice.randint(0, n), dice.randint(0, n))))])
            for n in shape
        )
        stored, wanted = dice.choice(DTYPES[:4]), dice.choice(DTYPES[:4])
        tensor = torch.randn(shape).to(stored)
        path = tmp_path / f"{trial}.safetensors"
        safetensors.torch.save_file({"t": tensor}, path)
        margin = dice.randint(0, 1)  # without one, out is contiguous
        wider = torch.empty([n + 2 * margin for n in box_shape(box)], dtype=wanted)
        out = wider[tuple(slice(margin, margin + n) for n in box_shape(box))]
        with SafetensorsFile(path) as file:
            file.read_box("t", box, out)
        expected = tensor[tuple(slice(a, b) for a, b in box)].to(wanted)
        assert _same_bits(out, expected), (shape, box, stored, wanted, margin)


def test_reads_into_rows_of_a_larger_tensor_and_leaves_the_others(tmp_path: Path) -> None:
    tensor = torch.randn(10, 4)
    safetensors.torch.save_file({"t": tensor}, tmp_path / "x.safetensors")
    out = torch.zeros(6, 4)
    with SafetensorsFile(tmp_path / "x.safetensors") as file:
        file.read_box("t", ((7, 10), (0, 4)), out[1:4])
    assert torch.equal(out, torch.cat([torch.zeros(1, 4), tensor[7:], torch.zeros(2, 4)]))


def test_refuses_a_box_or_target_that_does_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    safetensors.torch.save_file({"t": torch.randn(10, 4)}, path)
    with SafetensorsFile(path) as file:
        with pytest.raises(CheckpointError, match=r"t: the box .*\(8, 11\).* the shape \(10, 4\)"):
            file.read_box("t", ((8, 11), (0, 4)), torch.empty(3, 4))
        with pytest.raises(CheckpointError, match=r"does not fit a tensor of shape \(4, 4\)"):
            file.read_box("t", ((7, 10), (0, 4)), torch.empty(4, 4))
        with pytest.raises(CheckpointError, match="there is no tensor u"):
            file.read_box("u", ((7, 10), (0, 4)), torch.empty(3, 4))


def test_a_file_cut_while_it_is_open_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    safetensors.torch.save_file({"a": torch.randn(10, 4)}, path)
    with SafetensorsFile(path) as file:
        file.read_rows("a", 0, 1)  # from here on it is open
        with open(path, "r+b") as other:
            other.truncate(path.stat().st_size - 10)
        with pytest.raises(CheckpointError, match="changed while being read"):
            file.read_box("a", ((0, 10), (0, 4)), torch.empty(10, 4))


def test_the_data_begins_at_a_multiple_of_8(tmp_path: Path) -> None:
    for length in range(1, 9):
        path = tmp_path / f"{length}.safetensors"
        _write(path, {"n" * length: torch.ones(3)})
        with SafetensorsFile(path) as file:
            assert file.tensors["n" * length].start % 8 == 0


def test_the_writer_refuses_what_its_header_does_not_say(tmp_path: Path) -> None:
    specs = [TensorSpec("a", torch.float32, (2,)), TensorSpec("b", torch.float32, (2,))]
    for given in (("b", torch.ones(2)), ("a", torch.ones(3)), ("a", torch.ones(2).half())):
        path = tmp_path / f"{given[0]}{given[1].shape}{given[1].dtype}"
        with (
            pytest.raises(CheckpointError, match=r"expected TensorSpec\(name='a'"),
            SafetensorsWriter(path, specs) as writer,
        ):
            writer.append(*given)
    with (
        pytest.raises(CheckpointError, match="closed before b was written"),
        SafetensorsWriter(tmp_path / "short", specs) as writer,
    ):
        writer.append("a", torch.ones(2))
    with pytest.raises(CheckpointError, match="name that occurs twice"):
        SafetensorsWriter(tmp_path / "twice", [specs[0], specs[0]])


def test_a_disk_without_room_is_named_by_the_file(tmp_path: Path) -> None:
    path = tmp_path / "large.safetensors"
    with pytest.raises(OSError, match="large.safetensors"):
        SafetensorsWriter(path, [TensorSpec("w", torch.float32, (1 << 58,))])


def test_every_changed_byte_of_a_file_of_a_model_is_found(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    _write(path, {"a": torch.randn(3, 4), "none": torch.empty(0, 4), "b": torch.ones(3).half()})
    content = path.read_bytes()
    read: list[int] = []
    with SafetensorsFile(path) as file:
        assert check_tensors(file, read.append)
        assert file.metadata == {"format": "pt"}
    assert sum(read) == 48 + 6
    for place in range(len(content)):
        changed = bytearray(content)
        changed[place] ^= 1
        path.write_bytes(changed)
        found = False
        try:
            with SafetensorsFile(path) as file:
                found = check_tensors(file)
        except CheckpointError as error:
            assert str(path) in str(error)  # noqa: PT017
        assert not found, place


def test_hashes_that_another_program_kept_are_told_from_damage(tmp_path: Path) -> None:
    path, other = tmp_path / "x.safetensors", tmp_path / "y.safetensors"
    tensors = {"a": torch.randn(3, 4), "b": torch.randn(3)}
    _write(path, tensors)
    with safetensors.safe_open(path, "pt") as file:
        kept = file.metadata()
    for metadata in (kept, kept | {HASHES: "x"}, kept | {HASHES: '"\n'}):
        safetensors.torch.save_file({**tensors, "c": torch.ones(2)}, other, metadata)
        with (
            SafetensorsFile(other) as file,
            pytest.raises(CheckpointError, match="another program wrote the file and kept them"),
        ):
            check_tensors(file)


def test_another_file_in_the_place_of_one_that_was_closed_is_refused(tmp_path: Path) -> None:
    path, other = tmp_path / "x.safetensors", tmp_path / "y.safetensors"
    for each in (path, other):
        safetensors.torch.save_file({"a": torch.randn(3)}, each)
    with SafetensorsFile(path) as file:
        file.forget()
        other.replace(path)
        with pytest.raises(CheckpointError, match="another file was put there while it was read"):
            file.read_box("a", ((0, 3),), torch.empty(3))


@pytest.mark.parametrize("in_place", [True, False])
def test_a_file_that_is_another_now_is_refused_at_every_read(
    tmp_path: Path, in_place: bool
) -> None:
    path = tmp_path / "a.safetensors"
    _write(path, {"a": torch.zeros(8), "b": torch.ones(8)})
    _write(tmp_path / "other", {"b": torch.ones(8), "a": torch.zeros(8)})
    with SafetensorsFile(path) as file:
        assert torch.equal(file.read("b"), torch.ones(8))
        file.forget()
        if in_place:
            path.write_bytes((tmp_path / "other").read_bytes())
        else:
            (tmp_path / "other").replace(path)
        for _ in range(2):
            with pytest.raises(CheckpointError, match="or it was changed"):
                file.read("b")


def test_a_file_with_another_link_is_the_same(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    _write(path, {"a": torch.ones(8)})
    with SafetensorsFile(path) as file:
        os.link(path, tmp_path / "linked")
        path.chmod(0o600)
        assert torch.equal(file.read("a"), torch.ones(8))


def test_nothing_is_read_after_the_end(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    _write(path, {"a": torch.ones(8)})
    with SafetensorsFile(path) as file:
        file.read("a")
    with pytest.raises(ValueError, match="read after it was closed"):
        file.read("a")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({1: 2}, "x['a'] has the key 1, but in JSON only text is a key"),
        ({"k" * 5000: 2}, "x['a'] has a key of 5000 characters"),
        ([1, float("nan")], "x['a'][1] is nan, which is no number in JSON"),
        ([(1, 2)], "x['a'][0] is a tuple, (1, 2), which JSON cannot hold"),
    ],
)
def test_what_json_would_give_back_otherwise_is_not_written(value: Any, words: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(words)):
        to_json({"a": value}, "x")
