"""The random numbers of the ranks: what draws them now, and what draws them after a resume."""

from __future__ import annotations

import random
import re
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
import xxhash

from parallel_ext.distributed.errors import CheckpointError, warn_user
from parallel_ext.distributed.mesh import Mesh
from parallel_ext.io.hashing import FileRecord
from parallel_ext.io.safetensors_reader import SafetensorsFile
from parallel_ext.io.safetensors_writer import write_tensors

# What the states of the generators look like; NumPy and Python hold 624 words and a position.
_KINDS: dict[str, tuple[torch.dtype, Container[int]]] = {
    "torch": (torch.uint8, range(1, 2**16)),
    "cuda": (torch.uint8, range(1, 2**16)),
    "python": (torch.int64, [626]),  # a version as well
    "python_gauss": (torch.float64, [0, 1]),
    "numpy": (torch.int64, [625]),
    "numpy_gauss": (torch.float64, [0, 1]),
}


def capture(mesh: Mesh) -> dict[str, torch.Tensor]:
    """Return the states of this process's generators of torch, Python and NumPy, as tensors.

    Raises:
        CheckpointError: NumPy uses another generator than its default.
    """
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = numpy.random.get_state()
    if kind != "MT19937":
        raise CheckpointError(f"the state of a {kind} of NumPy is not known; use its default")
    states = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor([version, *words], dtype=torch.int64, device="cpu"),
        "python_gauss": torch.tensor(
            [] if gauss is None else [gauss], dtype=torch.float64, device="cpu"
        ),
        "numpy": torch.tensor([*keys.tolist(), position], dtype=torch.int64, device="cpu"),
        "numpy_gauss": torch.tensor(
            [cached] if has_gauss else [], dtype=torch.float64, device="cpu"
        ),
    }
    if mesh.device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(mesh.device)
    return states


def _python_state(states: Mapping[str, torch.Tensor]) -> tuple[Any, ...]:
    version, *words = states["python"].tolist()
    gauss = states["python_gauss"].tolist()
    return version, tuple(words), gauss[0] if gauss else None


def restore(states: Mapping[str, torch.Tensor], mesh: Mesh) -> None:
    """Let the generators of this process continue where ``states`` were captured."""
    torch.set_rng_state(states["torch"])
    random.setstate(_python_state(states))
    *keys, position = states["numpy"].tolist()
    cached = states["numpy_gauss"].tolist()
    numpy.random.set_state(
        ("MT19937", numpy.array(keys, numpy.uint32), position, len(cached), sum(cached))
    )
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], mesh.device)


def mesh_sizes(mesh: Mesh) -> dict[str, Any]:
    """Return what must be equal for every rank to resume with its own random numbers."""
    sides = {"tp": mesh.tp_size, "ep": mesh.ep_size, "dp": mesh.dp_size}
    return {**sides, "device": mesh.device.type}


def describe(states_of: Sequence[Mapping[str, torch.Tensor]], mesh: Mesh) -> dict[str, Any]:
    """Return the entry of ``loop.json`` on random numbers, given the states of all ranks.

    ``equal_in_tp`` is whether the ranks that share a model draw the same numbers, as router jitter
    needs it; after a resume on another mesh they shall then do so as well.
    """
    equal = all(
        torch.equal(states[name], states_of[rank - rank % mesh.tp_size][name])
        for rank, states in enumerate(states_of)
        for name in ("torch", "cuda")
        if name in states
    )
    return {"mesh": mesh_sizes(mesh), "seed": torch.initial_seed(), "equal_in_tp": equal}


def write(
    path: Path,
    states_of: Sequence[Mapping[str, torch.Tensor]],
    metadata: Mapping[str, str],
    chunk_bytes: int,
) -> FileRecord:
    """Write the states of all ranks into one file, hashed in chunks; on one rank."""
    tensors = {
        f"{name}.{rank:05}": value
        for rank, states in enumerate(states_of)
        for name, value in states.items()
    }
    return write_tensors(path, tensors, metadata, chunk_bytes).record()


def check_kinds(file: SafetensorsFile) -> None:
    """Raise a CheckpointError unless a file's header is that of states of generators."""
    for name, entry in file.tensors.items():
        kind, _, rank = name.partition(".")
        dtype, sizes = _KINDS.get(kind, (None, range(0)))
        fits = entry.dtype == dtype and len(entry.shape) == 1 and entry.shape[0] in sizes
        if not fits or not re.fullmatch("[0-9]{5,}", rank):
            raise CheckpointError(
                f"{file.path}: {name} of {entry.dtype} and shape {entry.shape} is no state of a "
                "generator of random numbers"
            )


def read(file: SafetensorsFile, mesh: Mesh) -> dict[str, torch.Tensor]:
    """Read the states of this rank and check them; its generators do not change.

    Raises:
        CheckpointError: the file does not hold them.
    """
    check_kinds(file)
    rank, states = mesh.rank, {}
    for name in file.tensors:
        kind, _, of = name.partition(".")
        if of == f"{rank:05}":
            states[kind] = file.read(name)
    missing = _KINDS.keys() - states.keys() - ({"cuda"} if mesh.device.type != "cuda" else set())
    if missing:
        raise CheckpointError(
            f"{file.path}: {', '.join(sorted(missing))} of rank {rank} is missing"
        )
    try:
        torch.Generator().set_state(states["torch"])
        random.Random().setstate(_python_state(states))
        *keys, position = states["numpy"].tolist()
        if not (0 <= position <= len(keys) and all(0 <= key < 2**32 for key in keys)):
            raise ValueError("invalid state of NumPy")  # which would not look at it
    except (RuntimeError, ValueError, TypeError, OverflowError) as error:
        raise CheckpointError(f"{file.path}: of rank {rank}: {error}") from error
    return states


def seed_of(saved: Mapping[str, Any], step: int, mesh: Mesh) -> int:
    """Compute the seed of a rank that resumes on another mesh, from (saved seed, step, rank).

    Where the ranks of one model drew the same numbers, the first of them counts.
    """
    rank = mesh.dp_rank * mesh.tp_size if saved["equal_in_tp"] else mesh.rank
    text = f"{saved['seed']} {step} {rank}".encode()
    return xxhash.xxh3_64_intdigest(text) >> 1  # torch takes 63 bits


def reseed(saved: Mapping[str, Any], step: int, mesh: Mesh) -> None:
    """Seed the generators of this process again by :func:`seed_of`, with a warning on rank 0."""
    seed = seed_of(saved, step, mesh)
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    if mesh.rank == 0:
        warn_user(
            f"the checkpoint was saved on {saved['mesh']} and is loaded on {mesh_sizes(mesh)}: "
            "the random numbers cannot be resumed, so every rank was seeded again from the "
            "saved seed, the step and its rank"
        )
