"""What makes a directory a training checkpoint: its manifest, and the commit that seals it."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import xxhash

from parallel_ext.distributed.errors import CheckpointError
from parallel_ext.io.hashing import FileRecord
from parallel_ext.io.publish import of_a_save
from parallel_ext.io.safe_open import shown
from parallel_ext.io.safetensors_reader import DTYPES, SafetensorsFile
from parallel_ext.io.safetensors_writer import DTYPE_NAMES, TensorSpec
from parallel_ext.io.schema import (
    MAX_OWN_JSON_BYTES,
    Fields,
    parse_json,
    read_content,
    to_json,
    to_own_json,
)
from parallel_ext.parallel.plan import Invariant

STATE_FOLDER = "parallel_state"
MANIFEST_NAME = f"{STATE_FOLDER}/manifest.json"
RNG_NAME = f"{STATE_FOLDER}/rng.safetensors"
COMMIT_NAME = "COMMIT"
_VERSION = 1
LOOP_NAME = f"{STATE_FOLDER}/loop.json"
FILE_NAME = re.compile(rf"({STATE_FOLDER}/)?[A-Za-z0-9_][A-Za-z0-9_.-]{{0,200}}")
_MAX_COMMIT_BYTES = 4096
_MIN_CHUNK, _MAX_CHUNK = 1 << 10, 1 << 30  # bytes
_HEX = re.compile(r"[0-9a-f]{32}")  # of a save's id, or a hash


def holds_tensors(file: str) -> bool:
    """Return whether a file of a checkpoint, by its name, holds tensors of model or optimizer."""
    return file.endswith(".safetensors") and file != RNG_NAME


def is_beside_model(file: str) -> bool:
    """Return whether a file of a checkpoint is no model's: the optimizer's, or of the training."""
    return file.startswith(f"{STATE_FOLDER}/")


@dataclass(frozen=True)
class Manifest:
    """All that a training checkpoint consists of.

    Attributes:
        save_id: of the save; every safetensors file carries it too, so that none of another is
            taken for one of this.
        step: the training step.
        number: of the save: one more than that of any complete one in its root.
        saved_by: versions and sides of the mesh, and what decided the bits, to look at; nothing but
            a warning depends on them.
        files: size and hashes of every file but the manifest and the commit, by relative name.
        tensors: of all safetensors files of model and optimizer, each with the name of its file.
        non_finite: how many values of a tensor are NaN or infinite, where there are any.
    """

    save_id: str
    step: int
    number: int
    saved_by: Mapping[str, Any]
    files: Mapping[str, FileRecord]
    tensors: Mapping[str, tuple[str, TensorSpec]]
    non_finite: Mapping[str, int]

    def to_bytes(self) -> bytes:
        """Return the content of the manifest's file.

        Raises:
            CheckpointError: there are so many tensors that no load would take it.
        """
        (chunk_bytes,) = {record.chunk_bytes for record in self.files.values()}
        return to_own_json(
            {
                "version": _VERSION,
                "save_id": self.save_id,
                "step": self.step,
                "number": self.number,
                "saved_by": dict(self.saved_by),
                "chunk_bytes": chunk_bytes,
                "files": {
                    name: {"size": record.size, "xxh3_128": list(record.hashes)}
                    for name, record in self.files.items()
                },
                "tensors": {
                    name: {
                        "file": file,
                        "dtype": DTYPE_NAMES[spec.dtype],
                        "shape": list(spec.shape),
                    }
                    for name, (file, spec) in self.tensors.items()
                },
                "non_finite": dict(self.non_finite),
            },
            f"a manifest of {len(self.tensors)} tensors",
        )

    @classmethod
    def from_bytes(cls, content: bytes, path: Path) -> Manifest:
        """Parse the content of the manifest's file; an error names the field that is wrong."""
        parsed = parse_json(content, path)
        fields = Fields(parsed, path)
        if parsed.get("version") != _VERSION:
            raise CheckpointError(
                f"{path}: version {shown(parsed.get('version'))} of the format; this version of "
                f"parallel_ext reads version {_VERSION}"
            )
        fields.exactly(
            *("version", "save_id", "step", "number", "saved_by", "chunk_bytes", "files"),
            *("tensors", "non_finite"),
        )
        if not _MIN_CHUNK <= (chunk_bytes := fields.number("chunk_bytes")) <= _MAX_CHUNK:
            raise CheckpointError(
                f"{path}: chunk_bytes must be from {_MIN_CHUNK} to {_MAX_CHUNK}, got {chunk_bytes}"
            )
        files = {}
        for name, value in fields.object("files").items():
            if not FILE_NAME.fullmatch(name) or name in (STATE_FOLDER, MANIFEST_NAME, COMMIT_NAME):
                raise CheckpointError(f"{path}: {shown(name)} is no name of a file of a checkpoint")
            files[name] = _record(Fields(value, f"{path}: {shown(name)}"), chunk_bytes)
        for name in (LOOP_NAME, RNG_NAME):
            if name not in files:
                raise CheckpointError(f"{path}: {name} is not among the files")
        holders = set(filter(holds_tensors, files))
        tensors = {
            name: _tensor(name, Fields(value, f"{path}: {shown(name)}"), holders)
            for name, value in fields.object("tensors").items()
        }
        non_finite = fields.object("non_finite")
        for name in non_finite:
            Fields(non_finite, f"{path}: non_finite").number(name)
        return cls(
            fields.matching("save_id", _HEX),
            fields.number("step"),
            fields.number("number"),
            fields.object("saved_by"),
            files,
            tensors,
            non_finite,
        )

    def open(self, directory: Path, name: str) -> SafetensorsFile:
        """Open a safetensors file of the checkpoint; all that is read of it is checked.

        Raises:
            CheckpointError: it is not listed, damaged, of another save, or holds other tensors than
                it must.
        """
        file = SafetensorsFile(directory / name, self._listed(directory, name))
        try:
            self._check_header(file, name)
        except BaseException:
            file.close()
            raise
        return file

    def _listed(self, directory: Path, name: str) -> FileRecord:
        if name not in self.files:
            raise CheckpointError(
                f"{directory / name}: {directory / MANIFEST_NAME} does not list this file"
            )
        return self.files[name]

    @cached_property
    def _in_files(self) -> dict[str, dict[str, tuple[torch.dtype, tuple[int, ...]]]]:
        """Return for each file the dtype and shape of every tensor that it must hold, by name."""
        held: dict[str, dict[str, tuple[torch.dtype, tuple[int, ...]]]] = {}
        for name, (file, spec) in self.tensors.items():
            held.setdefault(file, {})[name] = spec.dtype, spec.shape
        return held

    def _check_header(self, file: SafetensorsFile, name: str) -> None:
        if (save_id := file.metadata.get("save_id")) != self.save_id:
            raise CheckpointError(
                f"{file.path} is of the save {shown(save_id)}, but the manifest is of "
                f"{self.save_id}; files of two saves were mixed"
            )
        if name == RNG_NAME:  # not of the model, so not listed
            return
        expected = self._in_files.get(name, {})
        found = {tensor: (entry.dtype, entry.shape) for tensor, entry in file.tensors.items()}
        if found != expected:
            tensor = next(t for t in {**expected, **found} if expected.get(t) != found.get(t))
            raise CheckpointError(
                f"{file.path}: {tensor} is {found.get(tensor, 'missing')} there, but "
                f"{expected.get(tensor, 'missing')} in the manifest"
            )

    def read(self, directory: Path, name: str) -> bytes:
        """Read a small file of the checkpoint as a whole; an error if it is not as listed."""
        record = self._listed(directory, name)
        content = read_content(directory / name, MAX_OWN_JSON_BYTES, links=False)
        record.check(content, directory / name)
        return content

    def check_names(self, directory: Path) -> None:
        """Raise a CheckpointError if there is a file beside those listed that somebody could read.

        Others may lie beside a saved model, such as those of its tokenizer.
        """
        known = {*self.files, MANIFEST_NAME}
        try:
            found = [f"{STATE_FOLDER}/{name}" for name in os.listdir(directory / STATE_FOLDER)]
            found += [name for name in os.listdir(directory) if of_a_save(name)]
        except OSError as error:  # somebody may remove it just now
            raise CheckpointError(f"{directory}: cannot be read: {error}") from error
        for name in sorted(found):
            if name not in known:
                self._listed(directory, name)


def bits_of(invariant: Invariant | None, device: torch.device) -> str:
    """Name what decides the bits of a training under ``px.Invariant``; empty without one."""
    if invariant is None:
        return ""
    if device.type == "cuda":
        processor = torch.cuda.get_device_name(device)
    else:
        processor = f"a CPU with {torch.backends.cpu.get_cpu_capability()}"
    return (
        f"px.{invariant}, torch {torch.__version__}, {processor} and float32 products of "
        f"{torch.get_float32_matmul_precision()} precision"
    )


def _record(fields: Fields, chunk_bytes: int) -> FileRecord:
    fields.exactly("size", "xxh3_128")
    hashes = fields.list_of(
        "xxh3_128", lambda h: isinstance(h, str) and bool(_HEX.fullmatch(h)), "hashes"
    )
    record = FileRecord(fields.number("size"), chunk_bytes, tuple(hashes))
    if len(hashes) != -(-record.size // chunk_bytes):
        raise fields.wrong("xxh3_128", f"one hash for each {chunk_bytes} of {record.size} bytes")
    return record


def _tensor(name: str, fields: Fields, files: Collection[str]) -> tuple[str, TensorSpec]:
    fields.exactly("file", "dtype", "shape")
    shape = fields.list_of(
        "shape", lambda n: type(n) is int and 0 <= n < 2**63, "whole numbers of at least 0"
    )
    dtype = DTYPES[fields.one_of("dtype", DTYPES)]
    return fields.one_of("file", files), TensorSpec(name, dtype, tuple(shape))


def commit_of(content: bytes, manifest: Manifest) -> bytes:
    """Return the content of the file that seals a checkpoint, given that of the manifest's file."""
    digest = xxhash.xxh3_128_hexdigest(content)
    named = {"save_id": manifest.save_id, "step": manifest.step, "number": manifest.number}
    return to_json({"manifest": digest, **named}, "the commit")


def number_of_save(directory: Path) -> int:
    """Read the number of the save from a directory's commit, of which nothing else is checked."""
    path = directory / COMMIT_NAME
    content = read_content(path, _MAX_COMMIT_BYTES, links=False)
    return Fields(parse_json(content, path), path).number("number")


def read_manifest(directory: str | os.PathLike[str]) -> Manifest:
    """Read the manifest of a training checkpoint, after a check against its commit.

    Raises:
        CheckpointError: there is no complete checkpoint, or commit or manifest are damaged.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: no such directory")
    for folder in (directory, directory / STATE_FOLDER):
        if folder.is_symlink():
            raise CheckpointError(
                f"{folder}: a symbolic link, which is not followed in a training checkpoint; name "
                "or put the directory itself"
            )
    if not os.path.lexists(directory / COMMIT_NAME):
        raise CheckpointError(
            f"{directory} has no file {COMMIT_NAME}, which a save writes last: it is no training "
            "checkpoint, or not a complete one"
        )
    commit = read_content(directory / COMMIT_NAME, _MAX_COMMIT_BYTES, links=False)
    content = read_content(directory / MANIFEST_NAME, MAX_OWN_JSON_BYTES, links=False)
    sealed = parse_json(commit, directory / COMMIT_NAME)
    found = xxhash.xxh3_128_hexdigest(content)
    if sealed.get("manifest") != found:
        raise CheckpointError(
            f"{directory / MANIFEST_NAME}, bytes [0, {len(content)}), or {COMMIT_NAME} is damaged: "
            f"the manifest's hash is {found}, but {COMMIT_NAME} says "
            f"{shown(sealed.get('manifest'))}"
        )
    manifest = Manifest.from_bytes(content, directory / MANIFEST_NAME)
    if commit_of(content, manifest) != commit:
        raise CheckpointError(
            f"{directory / COMMIT_NAME}, bytes [0, {len(commit)}), is damaged: expected "
            f"{commit_of(content, manifest)!r}, found {shown(commit)}"
        )
    return manifest
