"""What ranks send each other comes back as it was, and runs no code."""

from __future__ import annotations

import math
import pickle
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from ranks import pool

import parallel_ext as px
from parallel_ext.distributed import messages


class _Pair(NamedTuple):
    dtype: torch.dtype | None
    value: Any


@dataclass(frozen=True)
class _Record:
    size: int
    hashes: tuple[str, ...]


VALUES = [
    *(None, True, 3, -(2**70), 0.1, -0.0, math.inf, "", "\u00e9\ud800", b"", b"\x00\xff"),
    *([], [1, [2]], (), (1, (2, "x")), {"a": {1: (2,)}}, {(1, 2): {3}}, frozenset({"x"})),
    *(Counter({"x": 2}), torch.bfloat16, _Pair(torch.float32, (1, b"ab")), _Record(3, ("x",))),
    {"bytes": 3, "tensor": [1]},
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    records = (_Pair, _Record)
    read = messages.decode(messages.encode(value, records), records)
    assert type(read) is type(value)
    assert read == value
    assert repr(read) == repr(value)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.bool, torch.uint8, torch.complex64]
)
@pytest.mark.parametrize("shape", [(), (0, 3), (3, 5)])
def test_a_tensor_comes_back_bit_by_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (
        (torch.randn(shape) * 3).to(dtype).transpose(0, -1)
        if shape
        else torch.ones((), dtype=dtype)
    )
    before, read, after = messages.decode(messages.encode([b"x", tensor, b"yz"]))
    assert (before, after) == (b"x", b"yz")
    assert read.dtype == dtype
    assert torch.equal(read, tensor)
    read.fill_(1)  # of memory of its own


def test_other_types_are_refused() -> None:
    for value in (Path("x"), {"x": object()}, _Record(1, ())):
        with pytest.raises(TypeError, match="cannot send each other a "):
            messages.encode(value)


def _message(json: bytes, rest: bytes = b"") -> bytes:
    return len(json).to_bytes(8, "little") + json + rest


@pytest.mark.parametrize(
    "message",
    [
        b"",
        _message(b"{"),
        _message(b"[" * 100_000),
        _message(b"{}"),
        _message(b'{"_Record": [1, []]}'),
        _message(b'{"bytes": 9}', b"x"),
        _message(b'{"bytes": "x"}', b"x"),
        _message(b'{"dtype": "load"}'),
        _message(b'{"tensor": ["float32", -3]}', b"1234"),
        _message(b'{"tensor": ["hub", 1]}', b"1234"),
        _message(b'{"dict": [[[], 1]]}'),
        pickle.dumps(1).ljust(100, b"\0"),
    ],
    ids=range(12),
)
def test_what_was_not_encoded_here_is_refused(message: bytes) -> None:
    with pytest.raises(ValueError, match="what this package does not send"):
        messages.decode(message)


class _Hostile:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple:
        return Path.touch, (self._path,)


def _meet_a_hostile_peer(path: Path) -> None:
    mesh = px.init_mesh(tp=2)
    sent = pickle.dumps(_Hostile(path)) if mesh.rank == 1 else messages.encode(None)
    with mock.patch.object(messages, "encode", return_value=sent):
        mesh.control.all_gather_object(None)


def test_a_peer_runs_nothing_here(tmp_path: Path) -> None:
    words = "what this package does not send"
    pool(2).assert_raises(_meet_a_hostile_peer, tmp_path / "run", words=words)
    assert not (tmp_path / "run").exists()
