"""Reading the files of a SwissArmyTransformer checkpoint, by default without running any code."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from parallel_ext.distributed.errors import CheckpointError
from parallel_ext.io.safetensors_reader import SafetensorsFile

FACTOR = re.compile(r"(.+)\.matrix_([AB])\.(\d+)")
"""Name of a factor: the layer, which factor, of which joined matrix."""

Source = str | os.PathLike[str] | Mapping[str, Any] | Sequence[Any]

_RANK_FILE = re.compile(r"mp_rank_(\d+)_model_states\.pt")

# The trainer saves the state of numpy's random numbers too: an array, which runs no code.
_RECONSTRUCT = np.empty(0).__reduce__()[0]
_NUMPY = [
    *((_RECONSTRUCT, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")),
    *(np.ndarray, np.dtype, type(np.dtype(np.uint32))),
]


class SavedRank(NamedTuple):
    """The tensors that one model-parallel rank saved.

    Attributes:
        where: for messages.
        factors: name -> ``matrix_A`` or ``matrix_B``.
        beside: names of everything else.
    """

    where: str
    factors: dict[str, Tensor]
    beside: list[str]


def read_ranks(source: Source, allow_pickle: bool) -> list[SavedRank]:
    """Read what each model-parallel rank saved, by the arguments of ``import_swiss_army_lora``."""
    return [_read(part, where, allow_pickle) for where, part in _parts(source)]


def _parts(source: Any) -> list[tuple[str, Any]]:
    """Return each rank's file or state dict, after its name for a message."""
    if isinstance(source, Mapping):
        return [("the state dict", source)]
    if not isinstance(source, (str, os.PathLike)):
        parts = [_parts(part) for part in source]
        if not parts or any(len(part) != 1 for part in parts):
            raise CheckpointError(
                f"a list must hold one file or state dict for each rank, got {source!r:.200}"
            )
        return [(f"rank {rank}: {part[0][0]}", part[0][1]) for rank, part in enumerate(parts)]
    path = Path(source)
    return [(str(file), file) for file in (_rank_files(path) if path.is_dir() else [path])]


def _rank_files(folder: Path) -> list[Path]:
    if (latest := folder / "latest").is_file():
        folder = folder / latest.read_text().strip()
    found = {int(m[1]): p for p in folder.glob("*") if (m := _RANK_FILE.fullmatch(p.name))}
    if not found and any(folder.glob("z3_rank_*")):
        raise CheckpointError(
            f"{folder} was saved by ZeRO-3, each rank a slice of every tensor, which is not "
            "supported; save it at ZeRO stage 2 or below"
        )
    if sorted(found) != list(range(len(found))) or not found:
        raise CheckpointError(
            f"{folder} must hold mp_rank_00_model_states.pt and those of all further ranks; found "
            f"{[path.name for _, path in sorted(found.items())]}"
        )
    return [found[rank] for rank in sorted(found)]


def _read(part: Any, where: str, allow_pickle: bool) -> SavedRank:
    if isinstance(part, Path) and part.suffix == ".safetensors":
        with SafetensorsFile(part) as file:
            factors = {name: file.read(name) for name in file.tensors if FACTOR.fullmatch(name)}
            return SavedRank(where, factors, sorted(file.tensors.keys() - factors.keys()))
    raw = _unpickled(part, allow_pickle) if isinstance(part, Path) else part
    module = raw.get("module", raw) if isinstance(raw, Mapping) else None
    if not isinstance(module, Mapping) or any(type(name) is not str for name in module):
        raise CheckpointError(f"{where}: expected a dict of tensors by name, or one under 'module'")
    # A tensor may be a view of a buffer with the whole model, which a clone lets go.
    factors = {
        name: value.detach().cpu().clone()
        for name, value in module.items()
        if FACTOR.fullmatch(name) and isinstance(value, Tensor)
    }
    return SavedRank(where, factors, sorted(module.keys() - factors.keys()))


def _unpickled(path: Path, allow_pickle: bool) -> Any:
    """Load what the file holds, without running code of it unless ``allow_pickle``."""
    with open(path, "rb") as file:
        try:
            with torch.serialization.safe_globals(_NUMPY):
                return torch.load(file, "cpu", weights_only=not allow_pickle, mmap=False)
        except pickle.UnpicklingError as error:
            found = re.search(r"GLOBAL (\S+)", str(error))
            what = f"{found[1]}, which is no tensor" if found else "something that is no tensor"
            raise CheckpointError(
                f"{path}: it is damaged, or its pickle holds {what}. If you trust where the file "
                "comes from, allow_pickle=True reads it all the same, running whatever code it "
                "holds"
            ) from error
        except Exception as error:  # a damaged file raises whatever torch stumbles over in it
            raise CheckpointError(
                f"{path}: it is damaged or was not written by torch.save: {error!r:.200}"
            ) from error
