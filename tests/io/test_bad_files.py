"""Damaged and hostile directories: each is refused, in time, by a sentence that says what is wrong.

The corpus is a table: how a good directory is spoiled, and what the sentence must hold beside the
path of the directory.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from ranks import pool
from reference import Tiny, mesh_of
from safetensors.torch import load_file, save_file
from versions import needs_newer

import parallel_ext as px
from parallel_ext.distributed.errors import CheckpointError
from parallel_ext.io.hf_reader import HFDirectory
from parallel_ext.io.safe_open import open_file
from parallel_ext.sharding import reshard

FILE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
TABLE, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
TINY = Tiny(dtype=torch.float32, layers=1)
SHAPES = {name: tuple(p.shape) for name, p in TINY.model().named_parameters()}
SECONDS = 3.0  # of CPU

Spoil = Callable[[Path], list[str] | None]  # the words that only it knows


@dataclass(frozen=True)
class Case:
    """A spoiled directory: what the error says of it, beside its path, and what it does not."""

    spoil: Spoil
    words: tuple[str, ...]  # {parent} stands for the place of the directory
    absent: tuple[str, ...] = ()
    many_files: bool = False
    options: dict[str, Any] = field(default_factory=dict)


# How to spoil -------------------------------------------------------------------------------------


def _file(text: Any, data: int | bytes = b"", length: int | None = None) -> Spoil:
    """Another ``model.safetensors``: its header as JSON or text, and its data or their size."""

    def spoil(folder: Path) -> None:
        header = text if isinstance(text, bytes) else json.dumps(text).encode()
        size = len(header) if length is None else length
        tail = bytes(data) if isinstance(data, int) else data
        (folder / FILE).write_bytes(size.to_bytes(8, "little") + header + tail)

    return spoil


def _entry(start: int, stop: int, dtype: Any = "U8", shape: Any = ...) -> dict[str, Any]:
    shape = [stop - start] if shape is ... else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def _header(change: Callable[[dict[str, Any]], Any]) -> Spoil:
    """The header of the good file, changed."""

    def spoil(folder: Path) -> None:
        content = (folder / FILE).read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:end])
        change(header)
        _file(header, content[end:])(folder)

    return spoil


def _sparse_header(size: int) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / FILE).write_bytes(size.to_bytes(8, "little"))
        os.truncate(folder / FILE, 8 + size)

    return spoil


def _tensors(changes: dict[str, Any]) -> Spoil:
    """Replace tensors by what a function makes of them, or leave them out (None)."""

    def spoil(folder: Path) -> None:
        tensors = load_file(folder / FILE)
        for name, change in changes.items():
            old = tensors.pop(name, None)
            if change is not None:
                tensors[name] = change(old).contiguous()
        save_file(tensors, folder / FILE, {"format": "pt"})

    return spoil


def _json(name: str, change: Callable[[dict[str, Any]], Any]) -> Spoil:
    def spoil(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        change(content)
        (folder / name).write_text(json.dumps(content))

    return spoil


def _config(**changes: Any) -> Spoil:
    return _json(CONFIG, lambda config: config.update(changes))


def _listed(name: str, file: Any) -> Spoil:
    """Another file for a tensor in the index."""
    return _json(INDEX, lambda index: index["weight_map"].update({name: file}))


def _text(name: str, text: str | bytes) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())

    return spoil


def _instead(name: str, make: Callable[[Path], Any]) -> Spoil:
    """Something else in place of a file, which stays beside the directory."""

    def spoil(folder: Path) -> None:
        path = folder / name
        if path.exists():
            path.rename(folder.parent / name)
        make(path)

    return spoil


OUT = "leads out of its directory, to {parent}/"


def _link_out(path: Path) -> None:
    path.symlink_to(Path("..") / path.name)


def _socket(path: Path) -> None:
    os.mknod(path, stat.S_IFSOCK | 0o600)


def _truncate_at(size: int) -> Spoil:
    return lambda folder: os.truncate(folder / FILE, size)


def _truncate_header(before_end: int) -> Spoil:
    def spoil(folder: Path) -> None:
        header = int.from_bytes((folder / FILE).read_bytes()[:8], "little")
        os.truncate(folder / FILE, 8 + header - before_end)

    return spoil


def _truncate_tensor(name: str, at_end: bool) -> Spoil:
    """Cut inside a tensor or behind it; the sentence names the first tensor that lacks bytes."""

    def spoil(folder: Path) -> list[str]:
        content = (folder / FILE).read_bytes()
        data = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:data])
        header.pop("__metadata__", None)
        start, stop = header[name]["data_offsets"]
        size = data + (stop if at_end else (start + stop) // 2)
        if size == len(content):  # the last one
            size -= 1
        os.truncate(folder / FILE, size)
        cut = min(
            (entry["data_offsets"][1], other)
            for other, entry in header.items()
            if data + entry["data_offsets"][1] > size
        )
        return [f"has {len(content)} bytes, but it has {size}", f"truncated, from {cut[1]} on"]

    return spoil


def _move_tensor(remove: bool) -> Spoil:
    """A tensor of the second file into the first as well, or out of the second altogether."""

    def spoil(folder: Path) -> list[str]:
        index = json.loads((folder / INDEX).read_text())["weight_map"]
        (other,) = {file for name, file in index.items() if name == HEAD}
        tensors = load_file(folder / other)
        head = tensors.pop(HEAD)
        if remove:
            save_file({**tensors, "left": torch.ones(1)}, folder / other, {"format": "pt"})
            return [f"{HEAD} is not in {other}", f"left is in {other}, but is listed nowhere"]
        first = index[NORM]
        assert first != other
        save_file({**load_file(folder / first), HEAD: head}, folder / first, {"format": "pt"})
        return [f"{HEAD} is in {first}, but is listed in {other}"]

    return spoil


def _ghost(folder: Path) -> list[str]:
    file = json.loads((folder / INDEX).read_text())["weight_map"][HEAD]
    _listed("ghost", file)(folder)
    return [f"ghost is not in {file}"]


def _remove_listed_file(folder: Path) -> list[str]:
    file = json.loads((folder / INDEX).read_text())["weight_map"][HEAD]
    (folder / file).unlink()
    return [f"{folder / file}: no such file"]


def _pickle_instead(folder: Path) -> None:
    (folder / FILE).rename(folder / "pytorch_model.bin")


def _rows(count: int, value: float = 0.0) -> Callable[[torch.Tensor], torch.Tensor]:
    """A vocabulary tensor of ``count`` rows; the last of the rows behind the 101 holds value."""

    def change(old: torch.Tensor) -> torch.Tensor:
        new = old.new_zeros(count, *old.shape[1:])
        kept = min(count, len(old))
        new[:kept] = old[:kept]
        if count > len(old):
            new[-1, -1] = value
        return new

    return change


def _vocabulary(count: int, table: float = 0.0, head: float = 0.0) -> Spoil:
    return _tensors({TABLE: _rows(count, table), HEAD: _rows(count, head)})


def _no_columns(folder: Path) -> None:
    """A table of more rows than anyone can look at."""
    _tensors({TABLE: lambda _: torch.empty(1, 0)})(folder)
    _header(lambda header: header[TABLE].update(shape=[2**60, 0]))(folder)


def _padded_of_fp64(value: float) -> Spoil:
    def change(old: torch.Tensor) -> torch.Tensor:
        return _rows(128, value)(old.double())

    return _tensors({TABLE: change, HEAD: change})


# The corpus ---------------------------------------------------------------------------------------

HUGE = 99_000_000
ENTRY = b'{"dtype":"U8","shape":[],"data_offsets":[0,0]}'


def _both(rows: int) -> tuple[str, ...]:
    """The shape of the table in the file, and that of the configuration."""
    return (f"{TABLE} in {FILE} has the shape ({rows}, 72)", "it must be (101, 72)")


TRUNCATED = {
    "nothing": Case(_truncate_at(0), (FILE, "the file has 0 bytes", "truncated")),
    "7 bytes": Case(_truncate_at(7), (FILE, "the file has 7 bytes", "truncated")),
    "8 bytes": Case(_truncate_at(8), (FILE, "the file has 8 bytes", "truncated")),
    "in the header": Case(_truncate_header(100), (FILE, "its header alone ends at", "truncated")),
    "1 byte of header": Case(_truncate_header(1), (FILE, "its header alone ends at", "truncated")),
    "behind the header": Case(_truncate_header(0), (FILE, "by its header the file has", "from")),
    **{f"in {name}": Case(_truncate_tensor(name, False), (FILE,)) for name in SHAPES},
    **{f"behind {name}": Case(_truncate_tensor(name, True), (FILE,)) for name in SHAPES},
}

HEADER_LENGTH = {
    **{
        f"header of {length}": Case(
            _file(b"{}", length=length), (FILE, f"a header of {length} bytes")
        )
        for length in (2**63, 2**64 - 1, 100_000_001)
    },
    "header larger than the file": Case(
        _file(b"{}", length=3), (FILE, "its header alone ends at byte 11, but the file has 10")
    ),
    "empty header": Case(_file(b""), (FILE, "not valid JSON")),
}

HEADER_TEXT = {
    "list": Case(_file(b"[1]"), (FILE, "expected a JSON object, got list")),
    "open brace": Case(_file(b"{"), (FILE, "not valid JSON")),
    "no UTF-8": Case(_file(b'{"\xff": 1}'), (FILE, "not valid JSON", "utf-8")),
    "deep lists": Case(_file(b"[" * 100_000), (FILE, "not valid JSON", "recursion")),
    "deep objects": Case(_file(b'{"a":' * 100_000), (FILE, "not valid JSON", "recursion")),
    "long integer": Case(_file(b'{"a":' + b"9" * 100_000 + b"}"), (FILE, "not valid JSON", "4300")),
    "NaN": Case(_file(b'{"a": NaN}'), (FILE, "not valid JSON: NaN is no number")),
    "minus infinity": Case(_file(b'{"a": -Infinity}'), (FILE, "-Infinity is no number")),
    "twice the same tensor": Case(
        _file(b'{"a": 1, "a": 1}'), (FILE, "the key 'a' occurs more than once")
    ),
    "twice the same field": Case(
        _file(b'{"a": {"dtype": "U8", "dtype": "I8"}}'), (FILE, "the key 'dtype' occurs more than")
    ),
    "metadata of numbers": Case(
        _file({"__metadata__": {"format": 1}}), (FILE, "__metadata__ must hold strings: {'format'")
    ),
    "metadata of words": Case(
        _file({"__metadata__": "pt"}), (FILE, "__metadata__ must hold strings: 'pt'")
    ),
    "long name": Case(
        _file({"a" * 1025: _entry(0, 0)}), (FILE, "'aaaa", "1025 characters, more than 1024")
    ),
    "99 MB of zeros": Case(_sparse_header(HUGE), (FILE, "not valid JSON")),
    "99 MB of spaces": Case(_file(b"{" + b" " * HUGE), (FILE, "not valid JSON")),
    "99 MB of one string": Case(
        _file(b'{"a":"' + b"x" * HUGE + b'"}'), (FILE, "a: expected the fields", "'xxx")
    ),
    "99 MB of one name": Case(_file(b'{"' + b"x" * HUGE + b'":1}'), (FILE, f"{HUGE} characters")),
    "99 MB of lists": Case(
        _file(b'{"a":[' + b"[]," * (HUGE // 3) + b"[]]}"), (FILE, "holds 66000003 values")
    ),
    "1 000 001 tensors": Case(
        _file(b"{" + (b'"a":' + ENTRY + b",") * 1_000_001 + b'"b":1}'),
        (FILE, "describes 1000001 tensors, more than 1000000"),
    ),
}

ENTRIES = {
    "hole": Case(
        _file({"a": _entry(0, 4), "b": _entry(6, 8)}, 8),
        (FILE, "b begins at byte", "it leaves a hole behind a"),
    ),
    "hole in front": Case(
        _file({"a": _entry(1, 4)}, 4), (FILE, "a begins", "it leaves a hole behind the header")
    ),
    "overlap": Case(
        _file({"a": _entry(0, 4), "b": _entry(3, 8)}, 8),
        (FILE, "b begins at byte", "it overlaps a"),
    ),
    "twice the same bytes": Case(
        _file({"a": _entry(0, 4), "b": _entry(0, 4)}, 4), (FILE, "b begins", "it overlaps a")
    ),
    "more behind": Case(
        _file({"a": _entry(0, 4)}, 6), (FILE, "but it has", "something is behind a")
    ),
    "offsets behind the end": Case(
        _file({"a": _entry(0, 2**62)}, 6), (FILE, "by its header", "truncated, from a on")
    ),
    "offsets reversed": Case(
        _header(lambda h: h[NORM]["data_offsets"].reverse()), (FILE, NORM, "takes 288 bytes")
    ),
    "three offsets": Case(
        _header(lambda h: h[NORM]["data_offsets"].append(3)), (FILE, NORM, "takes 288 bytes", "3]")
    ),
    "boolean offset": Case(
        _file({"a": {"dtype": "U8", "shape": [1], "data_offsets": [False, 1]}}, 1),
        (FILE, "a: data_offsets must be a list of integers", "[False, 1]"),
    ),
    "too short for its shape": Case(
        _file({"a": _entry(0, 4, "F32", [2])}, 4), (FILE, "a: F32 of shape (2,) takes 8 bytes")
    ),
    "another dtype of another size": Case(
        _header(lambda h: h[NORM].update(dtype="F16")),
        (FILE, f"{NORM}: F16 of shape (72,) takes 144 bytes, but data_offsets is ["),
    ),
    "dtype F33": Case(
        _header(lambda h: h[NORM].update(dtype="F33")), (FILE, f"{NORM}: unknown dtype 'F33'")
    ),
    "dtype f32": Case(
        _header(lambda h: h[NORM].update(dtype="f32")), (FILE, f"{NORM}: unknown dtype 'f32'")
    ),
    "dtype F8_E8M0": Case(
        _file({"a": _entry(0, 4, "F8_E8M0")}, 4), (FILE, "a: unknown dtype 'F8_E8M0'; known are")
    ),
    **{
        f"dtype {dtype}": Case(
            _file({"a": _entry(0, 4, dtype, [8])}, 4),
            (FILE, f"a: elements of dtype {dtype} are smaller than a byte", "BF16"),
        )
        for dtype in ("F4", "F6_E2M3", "F6_E3M2")
    },
    "dtype is a list": Case(
        _file({"a": _entry(0, 4, ["U8"])}, 4), (FILE, "a: unknown dtype ['U8'")
    ),
    "dtype is null": Case(_file({"a": _entry(0, 4, None)}, 4), (FILE, "unknown dtype None")),
    **{
        f"shape {shape}": Case(
            _file({"a": _entry(0, 4, shape=shape)}, 4),
            (FILE, "a: shape must be a list of integers", "got"),
        )
        for shape in ([-4], [True, 4], [2.0, 2], ["4"], "4", None, [2**63], [4] + [1] * 64)
    },
    "shape that overflows": Case(
        _file({"a": _entry(0, 0, "F32", [2**31, 2**31])}), (FILE, "a: F32", f"takes {2**64} bytes")
    ),
    "shape that overflows far": Case(
        _file({"a": _entry(0, 0, "F32", [2**62] * 64)}),
        (FILE, "a: F32", f"...{str(4 * 2 ** (62 * 64))[-99:]} bytes"),
    ),
    "field missing": Case(
        _file({"a": {"dtype": "U8", "shape": [4]}}, 4),
        (FILE, "a: expected the fields data_offsets, dtype, shape, got {'dtype': 'U8'"),
    ),
    "field too many": Case(
        _file({"a": {**_entry(0, 4), "more": 1}}, 4), (FILE, "a: expected the fields", "'more': 1")
    ),
    "number for a tensor": Case(_file({"a": 5}, 4), (FILE, "a: expected the fields", "got 5")),
}

MODEL = {
    "missing and extra tensors": Case(
        _tensors({NORM: None, "surplus": lambda _: torch.ones(3)}),
        (
            f"{NORM} of shape (72,) is missing",
            f"surplus in {FILE} of shape (3,) does not belong to the model. To leave tensors out, "
            "load by transformers and call px.parallelize",
        ),
    ),
    "names of a wrapper": Case(
        _tensors({NORM: None, f"module.{NORM}": lambda _: torch.ones(72)}),
        (f"{NORM} of shape (72,) is missing", "begin with module.: the model was saved with Dist"),
    ),
    "everything of another size": Case(
        _config(hidden_size=36, head_dim=4), ("has the shape", "(101, 72)", "(101, 36)", "more")
    ),
    "integers for weights": Case(
        _tensors({NORM: lambda old: old.int()}), (f"{NORM} in {FILE} is of torch.int32",)
    ),
    "scalar for a vocabulary": Case(
        _tensors({TABLE: lambda _: torch.tensor(1.0)}), (f"{TABLE} in {FILE} has the shape ()",)
    ),
}

VOCABULARY = {
    "larger by the configuration": Case(
        _config(vocab_size=128),
        (f"{HEAD} in {FILE} has the shape (101, 72)", "it must be (128, 72)"),
        absent=("padded", "ColossalAI"),
    ),
    "padded to 128": Case(
        _vocabulary(128),
        (*_both(128), "padded by ColossalAI or Megatron", "pass vocab_size=101 to px.from_pretrai"),
    ),
    "padded to 104": Case(
        _vocabulary(104),
        (*_both(104), "All rows from 101 on are zero", "pass vocab_size=101"),
        absent=("ColossalAI",),
    ),
    "only the table padded": Case(
        _tensors({TABLE: _rows(128)}), (*_both(128), "pass vocab_size=101"), absent=(HEAD,)
    ),
    "128 rows, table not zero": Case(
        _vocabulary(128, table=0.1),
        (*_both(128), f"row 127 of {TABLE} is not zero"),
        absent=("pass vocab_size",),
    ),
    "128 rows, head not zero": Case(
        _vocabulary(128, head=float("nan")),
        (*_both(128), f"row 127 of {HEAD} is not zero"),
        absent=("pass vocab_size",),
    ),
    "wider and longer": Case(
        _tensors({TABLE: lambda _: torch.zeros(128, 80)}),
        (f"{TABLE} in {FILE} has the shape (128, 80)",),
        absent=("padded", "pass vocab_size"),
    ),
    "half of ColossalAI": Case(
        _vocabulary(64), (*_both(64), f"64 of 101 rows of {TABLE}", "ColossalAI before 0.4.8")
    ),
    "too few": Case(_vocabulary(96), _both(96), absent=("ColossalAI", "pass vocab_size")),
    "none": Case(_vocabulary(0), _both(0), absent=("ColossalAI", "pass vocab_size")),
    "cut with a table not zero": Case(
        _vocabulary(128, table=1e-30),
        (FILE, f"{TABLE} has the shape (128, 72), and row 127 is not zero", "vocab_size=101"),
        options={"vocab_size": 101},
    ),
    "cut with a head not zero": Case(
        _vocabulary(128, head=float("nan")),
        (FILE, f"{HEAD} has the shape (128, 72), and row 127 is not zero"),
        options={"vocab_size": 101},
    ),
    "cut with a number that is zero in fp32": Case(
        _padded_of_fp64(1e-300), (FILE, TABLE, "row 127"), options={"vocab_size": 101}
    ),
    "cut too short": Case(
        _vocabulary(128), (FILE, TABLE, "row 100 is not zero"), options={"vocab_size": 100}
    ),
    "cut too long": Case(
        _vocabulary(128),
        (f"{TABLE} in {FILE} has the shape (128, 72)", "must be (200, 72)"),
        options={"vocab_size": 200},
    ),
    "cut a table without columns": Case(
        _no_columns, (f"{TABLE} in {FILE} has the shape (101, 0)",), options={"vocab_size": 101}
    ),
    "cut half of ColossalAI": Case(
        _vocabulary(64), (*_both(64), "ColossalAI before 0.4.8"), options={"vocab_size": 101}
    ),
}

IN_INDEX = {
    "tensor in two files": Case(_move_tensor(False), (INDEX,)),
    "tensor not listed": Case(_move_tensor(True), (INDEX,)),
    "tensor in no file": Case(_ghost, (INDEX,)),
    "file missing": Case(_remove_listed_file, ()),
    **{
        f"in {str(name)[:30]!r}": Case(
            _listed(HEAD, name),
            (INDEX, f"{HEAD} is in ", "which is not the plain name of a safetensors file"),
        )
        for name in (
            "../x.safetensors",
            "/x.safetensors",
            "a/x.safetensors",
            "a\\x.safetensors",
            "x\0.safetensors",
            "..",
            "pytorch_model.bin",
            7,
            None,
            ["x"],
        )
    },
    "in a file with a long name": Case(
        _listed(HEAD, "x" * 300 + ".safetensors"), ("xxx", "cannot be opened")
    ),
    "in a file whose name is no text": Case(
        _listed(HEAD, "\ud800.safetensors"), ("cannot be opened",)
    ),
    "twice the same tensor": Case(
        _text(INDEX, '{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}'),
        (INDEX, "the key 'a' occurs more than once"),
    ),
    "twice a weight map": Case(
        _text(INDEX, '{"weight_map": {}, "weight_map": {}}'),
        (INDEX, "the key 'weight_map' occurs more than once"),
    ),
    **{
        f"weight map {text[:20]}": Case(_text(INDEX, text), (INDEX, "weight_map must be", got))
        for text, got in (
            ("{}", "got None"),
            ('{"weight_map": {}}', "got {}"),
            ('{"weight_map": [1]}', "got [1]"),
            ('{"weight_map": true}', "got True"),
        )
    },
    "no JSON": Case(_text(INDEX, "weights"), (INDEX, "not valid JSON")),
    "deep": Case(_text(INDEX, "[" * 100_000), (INDEX, "not valid JSON", "recursion")),
    "99 MB of objects": Case(
        _text(INDEX, b'{"weight_map":[' + b"{}," * (HUGE // 3) + b"{}]}"), (INDEX, "holds 66")
    ),
    "more than 100 MB": Case(
        lambda folder: os.truncate(folder / INDEX, 2**40), (INDEX, f"has {2**40} bytes, more than")
    ),
}
IN_INDEX = {name: Case(case.spoil, case.words, many_files=True) for name, case in IN_INDEX.items()}

FILES = {
    **{
        f"{name} is a FIFO": Case(
            _instead(name, os.mkfifo), (f"{name}: a regular file is needed, but this is a FIFO",)
        )
        for name in (CONFIG, "generation_config.json", FILE)
    },
    "index is a FIFO": Case(
        _instead(INDEX, os.mkfifo), (f"{INDEX}: a regular", "is a FIFO"), many_files=True
    ),
    "model is a socket": Case(_instead(FILE, _socket), (f"{FILE}: a regular", "is a socket")),
    "model is a directory": Case(_instead(FILE, Path.mkdir), (f"{FILE}: a ", "is a directory")),
    "configuration is a directory": Case(
        _instead(CONFIG, Path.mkdir), (f"{CONFIG}: a ", "is a directory")
    ),
    **{
        f"{name} is a link out": Case(
            _instead(name, _link_out), (f"{name}: this symbolic link", OUT + name)
        )
        for name in (CONFIG, "generation_config.json", FILE)
    },
    "index is a link out": Case(
        _instead(INDEX, _link_out),
        (f"{INDEX}: this symbolic", OUT + INDEX),
        many_files=True,
    ),
    "model is a link to a device": Case(
        _instead(FILE, lambda path: path.symlink_to("/dev/zero")), (f"{FILE}: this", "to /dev/zero")
    ),
    "model is a link to nothing": Case(
        _instead(FILE, lambda path: path.symlink_to("nothing")), (f"{FILE}: no such file",)
    ),
    "model is a link to itself": Case(
        _instead(FILE, lambda path: path.symlink_to(FILE)), (f"{FILE}: cannot be opened", "link")
    ),
    "pickle": Case(_pickle_instead, ("pytorch_model.bin is a pickle", "convert")),
    "no model": Case(lambda folder: (folder / FILE).unlink(), (f"neither {FILE} nor {INDEX}",)),
    "no configuration": Case(
        lambda folder: (folder / CONFIG).unlink(), (f"{CONFIG}: no such file",)
    ),
}

IN_CONFIG = {
    "no JSON": Case(_text(CONFIG, "llama"), (CONFIG, "not valid JSON")),
    "list": Case(_text(CONFIG, "[]"), (CONFIG, "expected a JSON object, got list")),
    "twice a key": Case(
        _text(CONFIG, '{"vocab_size": 1, "vocab_size": 2}'), (CONFIG, "'vocab_size' occurs more")
    ),
    "weights elsewhere": Case(
        _config(transformers_weights="other.safetensors"),
        (CONFIG, "transformers_weights is 'other.safetensors'", "call px.parallelize"),
    ),
    "infinity": Case(_config(rms_norm_eps=float("inf")), (CONFIG, "Infinity is no number")),
    "vocabulary true": Case(_config(vocab_size=True), (CONFIG, "vocab_size", "True")),
    "vocabulary in words": Case(_config(vocab_size="101"), (CONFIG, "vocab_size", "'101'")),
    "vocabulary below 0": Case(_config(vocab_size=-1), (CONFIG, "vocab_size is -1")),
    "vocabulary too large": Case(_config(vocab_size=10**30), (CONFIG, f"vocab_size is {10**30}")),
    "a billion layers": Case(
        _config(num_hidden_layers=10**9), (CONFIG, "num_hidden_layers is 1000000000, but there are")
    ),
    "no heads": Case(
        _config(num_attention_heads=0), (CONFIG, "num_attention_heads is 0, but must")
    ),
    "padding id": Case(_config(pad_token_id=101), (CONFIG, "pad_token_id is 101", "of 101")),
    "dtype float33": Case(_config(dtype="float33"), (CONFIG, "float33")),
    "dtype int8": Case(_config(dtype="int8"), (CONFIG, "dtype is 'int8'", "floating-point")),
    "dtype that is a function": Case(
        _config(torch_dtype="load"), (CONFIG, "torch_dtype is 'load'")
    ),
    "a billion labels": Case(
        _config(num_labels=10**9), (CONFIG, "num_labels asks for 1000000000 labels")
    ),
    **{
        f"200 000 entries of {name}": Case(
            _config(**{name: {str(i): i for i in range(200_000)}}),
            (CONFIG, f"{name} asks for 200000 labels"),
        )
        for name in ("id2label", "label2id")
    },
    **{
        f"{name} of {value}": Case(
            _config(**{name: value}), (CONFIG, f"{name} is {value}, more than the 16777216")
        )
        for name, value in (
            ("hidden_size", 2**50),
            ("intermediate_size", 2**50),
            ("head_dim", 2**40),
        )
    },
    **{
        f"{name} of {value}": Case(
            _config(**{name: value}), (CONFIG, f"{name} is {value}, but must be at least 1")
        )
        for name, value in (("hidden_size", -72), ("intermediate_size", 0), ("head_dim", 0))
    },
    "key-value heads of 0": Case(
        _config(num_key_value_heads=0), (CONFIG, "num_key_value_heads is 0, but must")
    ),
    "activation": Case(
        _config(hidden_act="nope"), (CONFIG, "KeyError: 'nope'; it is the value of hidden_act")
    ),
    "rope": Case(
        _config(rope_parameters={"rope_type": "nope", "rope_theta": 1.0}),
        (CONFIG, "KeyError: 'nope'; it is the value of rope_parameters.rope_type"),
    ),
    "longrope of another length": Case(
        _config(
            rope_parameters={
                **{"rope_type": "longrope", "rope_theta": 1.0, "factor": 2.0},
                **{"short_factor": [1.0] * 3, "long_factor": [1.0] * 3},
                "original_max_position_embeddings": 8,
            }
        ),
        (CONFIG, "transformers refuses it: RuntimeError", "size of tensor"),
    ),
    **{
        f"{name} of a repository": Case(
            _config(**{name: "some/kernel@v1"}),
            (CONFIG, f"{name} is 'some/kernel@v1'", "a file cannot"),
        )
        for name in ("_attn_implementation", "attn_implementation", "_experts_implementation")
    },
    "attention of a part": Case(
        _config(attn_implementation={"": "sdpa", "text_config": "some/kernel"}),
        (CONFIG, "attn_implementation is {'': 'sdpa'", "some/kernel"),
    ),
    "quantized": Case(
        _config(quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True}),
        (CONFIG, "quantization_config is {", "quantized models are not served"),
    ),
    "layers of different widths": Case(
        _config(per_layer_config={"0": {"head_dim": 8, "intermediate_size": 24}}),
        (CONFIG, "per_layer_config is {", "layers may differ in head_dim and num_key_value_heads"),
    ),
    "checkpointing": Case(
        _config(gradient_checkpointing=True), (CONFIG, "gradient_checkpointing is True")
    ),
    "another architecture": Case(
        _config(model_type="gpt2"),
        (CONFIG, "model_type is 'gpt2', but served are afmoe, arcee"),
    ),
    "images": Case(
        _config(model_type="llava", text_config={"model_type": "llama"}),
        (CONFIG, "it holds a decoder, 'llama': load the model with transformers"),
    ),
    "foreign code": Case(
        _config(model_type="lama", auto_map={"AutoConfig": "x.Y"}), (CONFIG, "custom code")
    ),
    "a class by another name": Case(
        _config(model_type="kimi_k2", architectures=["DeepseekV3ForCausalLM"]),
        (CONFIG, "the class of 'deepseek_v3', to be written if it is such a model"),
    ),
    "generation": Case(
        _text("generation_config.json", "[]"), ("generation_config.json", "got list")
    ),
}

CORPUS = {
    f"{group}: {name}": case
    for group, cases in {
        "truncated": TRUNCATED,
        "header length": HEADER_LENGTH,
        "header": HEADER_TEXT,
        "entry": ENTRIES,
        "model": MODEL,
        "vocabulary": VOCABULARY,
        "index": IN_INDEX,
        "file": FILES,
        "config": IN_CONFIG,
    }.items()
    for name, case in cases.items()
}


# The tests ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model in one file and in many, as HuggingFace saves it; loaded once, to warm up."""
    folder = tmp_path_factory.mktemp("good")
    TINY.model().save_pretrained(folder / "one")
    TINY.model().save_pretrained(folder / "many", max_shard_size="50KB")
    for name in ("one", "many"):
        px.from_pretrained(folder / name, px.init_mesh())
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where a spoiled directory goes; some have 100 MB, so they do not stay."""
    yield tmp_path / "spoiled"
    shutil.rmtree(tmp_path)


@contextmanager
def no_waiting() -> Iterator[None]:
    """Wake up whoever has opened a FIFO."""

    def wake(*_: Any) -> None:
        raise TimeoutError("it waited for 30 s")

    before = signal.signal(signal.SIGALRM, wake)
    signal.alarm(30)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _spoil(case: Case, good: Path, folder: Path) -> list[str]:
    """Make the spoiled directory; the words that its error must hold."""
    shutil.copytree(good / ("many" if case.many_files else "one"), folder)
    known = case.spoil(folder)
    parent = os.path.realpath(folder.parent)
    words = [word.replace("{parent}", parent) for word in case.words]
    return [str(folder), *words, *(known if isinstance(known, list) else [])]


def _refused(folder: Path, **options: Any) -> tuple[str, float]:
    """The error of one process, raised before any parameter was filled, and the seconds of CPU."""
    loading = AssertionError("loading began")
    with mock.patch.object(HFDirectory, "load_into", side_effect=loading), no_waiting():
        start = time.process_time()
        with pytest.raises(CheckpointError) as raised:
            px.from_pretrained(folder, px.init_mesh(), **options)
        return str(raised.value), time.process_time() - start


@pytest.mark.parametrize("name", CORPUS)
def test_it_is_refused_in_time_with_file_tensor_and_value(
    name: str, good: Path, folder: Path
) -> None:
    case = CORPUS[name]
    words = _spoil(case, good, folder)
    message, seconds = _refused(folder, **case.options)
    assert [word for word in words if word not in message] == [], message
    assert [word for word in case.absent if word in message] == [], message
    assert len(message) < 3000
    for _ in range(2):  # others use the caches too
        if seconds >= SECONDS:
            seconds = min(seconds, _refused(folder, **case.options)[1])
    assert seconds < SECONDS


def _load(folder: str, options: dict[str, Any]) -> None:
    px.from_pretrained(folder, mesh_of(), **options)


@pytest.mark.parametrize(
    "name",
    [
        f"truncated: behind {NORM}",
        "header: deep lists",
        "model: missing and extra tensors",
        "vocabulary: padded to 128",
        "vocabulary: cut with a head not zero",
        "index: tensor in two files",
        "index: in '../x.safetensors'",
        f"file: {FILE} is a FIFO",
        f"file: {CONFIG} is a link out",
        "config: dtype float33",
    ],
)
def test_all_ranks_refuse_it(name: str, good: Path, folder: Path) -> None:
    words = _spoil(CORPUS[name], good, folder)
    options = CORPUS[name].options
    pool(2).assert_raises(_load, str(folder), options, error="CheckpointError", words=words)


@pytest.mark.parametrize(
    "name",
    [f"truncated: behind {NORM}", "config: dtype float33", "vocabulary: 128 rows, table not zero"],
)
def test_what_one_rank_refuses_all_refuse(name: str, good: Path, folder: Path) -> None:
    shutil.copytree(good / "one", folder / "0")
    words = _spoil(CORPUS[name], good, folder / "1")
    first, second = pool(2).run_raising(_load_own, str(folder))
    assert second.type == "CheckpointError"
    assert [word for word in words if word not in second.text] == []
    assert f"failed on rank 1: CheckpointError: {second.text}" in first.text


def _load_own(folder: str) -> None:
    px.from_pretrained(Path(folder) / str(torch.distributed.get_rank()), mesh_of())


def test_a_missing_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="absent: no such directory"):
        HFDirectory(tmp_path / "absent")


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="holds an adapter of PEFT and no model; load its ba"):
        HFDirectory(tmp_path)


@pytest.mark.parametrize("vocab_size", [0, -1, True, 101.0, "101"])
def test_a_wrong_option_is_refused(good: Path, vocab_size: Any) -> None:
    with pytest.raises(ValueError, match="vocab_size must be an integer of at least 1, got"):
        px.from_pretrained(good / "one", px.init_mesh(), vocab_size=vocab_size)


def _load_with_own_vocabulary(folder: str) -> None:
    vocab_size = None if torch.distributed.get_rank() else 101
    px.from_pretrained(folder, mesh_of(), vocab_size=vocab_size)


def test_different_options_on_the_ranks_are_refused(good: Path, folder: Path) -> None:
    shutil.copytree(good / "one", folder)
    _vocabulary(128)(folder)
    _config(vocab_size=128)(folder)
    pool(2).assert_raises(
        _load_with_own_vocabulary,
        str(folder),
        error="DisagreementError",
        words="config.vocab_size must be equal on all ranks, but is 101 on rank 0 and 128 on",
    )


# What looks bad and is not ------------------------------------------------------------------------


def _cut_and_saved(source: str, target: str, stripe_bytes: int) -> tuple[int, list[str], int]:
    """Load with the true vocabulary; its size, what differs from the good model, saved rows."""
    with mock.patch.object(reshard, "STRIPE_BYTES", stripe_bytes):
        model = px.from_pretrained(source, mesh_of(), vocab_size=101)
    model.save_pretrained(target)
    state = px.full_state_dict(model, writer_only=False)
    good = Tiny(dtype=torch.float32, layers=1, tied=model.config.tie_word_embeddings).model()
    wrong = [n for n, t in good.state_dict().items() if not torch.equal(state[n], t)]
    saved = transformers.AutoModelForCausalLM.from_pretrained(target)
    return model.config.vocab_size, wrong, len(saved.lm_head.weight)


@pytest.mark.parametrize("tied", ["untied", "tied", "tied, head in the file"])
@pytest.mark.parametrize("by_the_configuration", [101, 128])
def test_the_padding_of_a_vocabulary_is_cut_off(
    tmp_path: Path, by_the_configuration: int, tied: str
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    model = Tiny(dtype=torch.float32, layers=1, tied=tied != "untied").model()
    model.save_pretrained(source)
    table, head = model.model.embed_tokens.weight.detach(), model.lm_head.weight.detach()
    padded = {TABLE: lambda _: _rows(128)(table)}
    if tied != "tied":
        padded[HEAD] = lambda _: _rows(128)(head)
    _tensors(padded)(source)
    _config(vocab_size=by_the_configuration)(source)
    for size, wrong, rows in pool(2).run(_cut_and_saved, str(source), str(target), 2000):
        assert (size, wrong, rows) == (101, [], 101)


def test_the_first_row_of_a_tail_that_is_not_zero_is_named_whatever_the_stripes(
    good: Path, folder: Path
) -> None:
    shutil.copytree(good / "one", folder)
    for row in (101, 103, 104, 127):
        rows = load_file(good / "one" / FILE)[TABLE].new_zeros(128, 72)
        rows[row:, row % 72] = -1
        _tensors({TABLE: lambda _, rows=rows: rows})(folder)
        with mock.patch.object(reshard, "STRIPE_BYTES", 3 * 72 * 8):
            assert f"row {row} is not zero" in _refused(folder, vocab_size=101)[0]


def test_the_option_changes_nothing_where_nothing_is_padded(good: Path) -> None:
    model = px.from_pretrained(good / "many", px.init_mesh(), vocab_size=101)
    for name, tensor in TINY.model().state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


def _config_again(path: Path, change: dict[str, Any]) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


def test_the_configurations_are_those_that_were_checked(
    good: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others are put in their place once the directory has been opened."""
    shutil.copytree(good / "one", folder)
    _config_again(folder / "generation_config.json", {"max_new_tokens": 3})
    opened = HFDirectory.__init__

    def open_and_replace(self: HFDirectory, path: Path) -> None:
        opened(self, path)
        _config_again(path / CONFIG, {"rms_norm_eps": 0.5})
        _config_again(path / "generation_config.json", {"max_new_tokens": 4})

    monkeypatch.setattr(HFDirectory, "__init__", open_and_replace)
    model = px.from_pretrained(folder, px.init_mesh())
    assert model.config.rms_norm_eps == TINY.model().config.rms_norm_eps
    assert model.generation_config.max_new_tokens == 3


@needs_newer("a save of such a configuration")
def test_a_published_generation_config_that_is_not_valid_is_saved_again(
    good: Path, folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(good / "one", folder)
    _config_again(folder / "generation_config.json", {"do_sample": False, "temperature": 0.6})
    px.from_pretrained(folder, px.init_mesh()).save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "generation_config.json").read_text())
    assert saved["temperature"] == 0.6


@pytest.mark.parametrize("wanted", [None, "eager"])
def test_the_attention_of_the_file_does_not_count(
    wanted: str | None, good: Path, folder: Path
) -> None:
    shutil.copytree(good / "one", folder)
    _config_again(folder / CONFIG, {"_attn_implementation": "flash_attention_2"})
    model = px.from_pretrained(folder, px.init_mesh(), attn_implementation=wanted)
    assert model.config._attn_implementation == (wanted or "sdpa")
    with pytest.raises(ValueError, match="nope"):  # of the caller, not of the file
        px.from_pretrained(folder, px.init_mesh(), attn_implementation="nope")


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("at", range(6))
def test_a_file_that_is_exchanged_while_it_is_opened_is_refused_or_read(
    at: int, links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link to a file elsewhere is put in its place between any two calls of the system."""
    folder, secret = tmp_path / "model", tmp_path / "secret"
    folder.mkdir()
    secret.write_text("secret")
    (folder / "own").write_text("own")
    path = folder / CONFIG
    if links:
        path.symlink_to("own")
    else:
        path.write_text("own")
    calls = 0

    def with_exchange(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            if calls == at:
                path.unlink()
                path.symlink_to(secret)
            calls += 1
            return call(*args, **kwargs)

        return wrapped

    for name in ("open", "stat", "fstat", "readlink"):
        monkeypatch.setattr(os, name, with_exchange(getattr(os, name)))
    try:
        with open_file(path, links) as file:
            content = file.read()
    except CheckpointError:
        content = b"own"
    monkeypatch.undo()
    assert content == b"own"


def test_an_error_can_be_printed_whatever_a_tensor_is_called(good: Path, folder: Path) -> None:
    shutil.copytree(good / "one", folder)
    _header(lambda header: header.update({"a\ud800": header.pop(NORM)}))(folder)
    message, _ = _refused(folder)
    assert "a\\ud800" in message
    assert message.encode()


def test_links_that_stay_in_the_directory_or_in_the_hub_cache_are_followed(
    good: Path, tmp_path: Path
) -> None:
    inside = tmp_path / "inside"
    shutil.copytree(good / "one", inside)
    (inside / "files").mkdir()
    for name in (FILE, CONFIG):
        (inside / name).rename(inside / "files" / name)
        (inside / name).symlink_to(Path("files") / name)
    (tmp_path / "link").symlink_to(inside)

    repository = tmp_path / "models--some--llama"
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    shutil.copytree(good / "many", repository / "blobs")
    for name in os.listdir(good / "many"):
        (snapshot / name).symlink_to(Path("../../blobs") / name)

    for source in (inside, tmp_path / "link", snapshot):
        px.from_pretrained(source, px.init_mesh())

    elsewhere = tmp_path / "models--other--llama" / "snapshots" / "abc"
    for source in (tmp_path / "plain", elsewhere, repository / "files" / "abc"):
        source.mkdir(parents=True)
        (source / CONFIG).symlink_to(repository / "blobs" / CONFIG)
        message = _refused(source)[0]
        assert f"{source / CONFIG}: this symbolic link leads out of its directory" in message
        assert f"to {os.path.realpath(repository)}/blobs/{CONFIG}" in message
