"""Reading a HuggingFace directory: what it holds is checked first, then own slices are read."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

from parallel_ext.checkpoint.gather import shard_views
from parallel_ext.checkpoint.safetensors_file import (
    STRIPE_BYTES,
    CheckpointError,
    SafetensorsFile,
    parse_json,
)
from parallel_ext.layout import ModelLayout, TensorLayout, split
from parallel_ext.mesh import Mesh
from parallel_ext.sharded import named_shards

CONFIG_NAME = "config.json"
INDEX_NAME = "model.safetensors.index.json"
SINGLE_FILE_NAME = "model.safetensors"
_MOST_PROBLEMS_SHOWN = 8
_STEP_BYTES = 128 << 20  # of full tensors that are read before the ranks meet again


def _raise_all(where: Path, problems: list[str]) -> None:
    """One error for all problems, the first of them written out."""
    if problems:
        shown = problems[:_MOST_PROBLEMS_SHOWN]
        if len(problems) > len(shown):
            shown.append(f"and {len(problems) - len(shown)} more")
        raise CheckpointError(f"{where}: " + "; ".join(shown))


class HFDirectory:
    """A saved model whose files have been opened and found consistent.

    Args:
        path: a local directory with ``config.json`` and safetensors files. They stay open until
            ``close()`` or the end of a ``with`` block, so that a save that replaces the directory
            meanwhile is not mixed in.

    Attributes:
        shapes: HuggingFace name -> shape of every tensor in the files.
        dtypes: HuggingFace name -> its dtype.

    Raises:
        CheckpointError: something is missing, truncated or inconsistent; names the file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise CheckpointError(f"{self.path}: no such directory")
        if not (self.path / CONFIG_NAME).is_file():
            raise CheckpointError(f"{self.path}: there is no {CONFIG_NAME}")
        self._files: list[SafetensorsFile] = []
        self._file_of: dict[str, SafetensorsFile] = {}
        try:
            self._open()
        except BaseException:
            self.close()
            raise
        entries = {name: file.tensors[name] for name, file in self._file_of.items()}
        self.shapes = {name: entry.shape for name, entry in entries.items()}
        self.dtypes = {name: entry.dtype for name, entry in entries.items()}

    def __enter__(self) -> HFDirectory:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files; nothing can be read afterwards."""
        for file in self._files:
            file.close()

    def _open(self) -> None:
        if (self.path / SINGLE_FILE_NAME).is_file():
            names, weight_map = [SINGLE_FILE_NAME], None
        elif (self.path / INDEX_NAME).is_file():
            weight_map = self._weight_map()
            names = sorted(set(weight_map.values()))
        else:
            pickled = sorted(path.name for path in self.path.glob("pytorch_model*.bin"))
            hint = (
                f"; {pickled[0]} is a pickle, which can run any code when it is loaded and is "
                "never read here: convert the model to safetensors first"
                if pickled
                else ""
            )
            raise CheckpointError(
                f"{self.path}: there is neither {SINGLE_FILE_NAME} nor {INDEX_NAME}{hint}"
            )
        for name in names:
            file = SafetensorsFile(self.path / name)
            self._files.append(file)
            self._file_of.update(dict.fromkeys(file.tensors, file))
        if weight_map is not None:
            self._check_index(weight_map)

    def _weight_map(self) -> Mapping[str, str]:
        """Tensor -> file by the index; every file is named plainly, so it lies in the directory."""
        index = self.path / INDEX_NAME
        weight_map = parse_json(index.read_bytes(), index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index}: weight_map must be a JSON object of file names")
        problems = [
            f"{tensor} is in {file!r:.200}, which is not the plain name of a safetensors file"
            for tensor, file in weight_map.items()
            if not isinstance(file, str)
            or not file.endswith(".safetensors")
            or any(character in file for character in "/\\\0")
        ]
        _raise_all(index, problems)
        return weight_map

    def _check_index(self, weight_map: Mapping[str, str]) -> None:
        held = [(name, file.path.name) for file in self._files for name in file.tensors]
        listed = weight_map.items()
        problems = [f"{n} is not in {f}" for n, f in sorted(listed - set(held))]
        problems += [f"{n} is in {f}, but is not listed so" for n, f in sorted(set(held) - listed)]
        _raise_all(self.path / INDEX_NAME, problems)

    def check(self, layout: ModelLayout) -> None:
        """See that the directory holds exactly the tensors of a model, before anything is loaded.

        A tied alias may be present if it equals the tensor that it shares.

        Args:
            layout: of the model that shall be loaded.

        Raises:
            CheckpointError: one error for all tensors that are missing, of another shape (with
                both shapes), or that the model does not have.
        """
        problems = []
        aliases = {a: target for a, target in layout.tied.items() if a in self.shapes}
        for name, tensor in layout.tensors.items():
            if name not in self.shapes:
                problems.append(f"{name} of shape {tensor.shape} is missing")
        for name, shape in self.shapes.items():
            if name.endswith("rotary_emb.inv_freq"):  # a buffer that old versions saved
                continue
            if name not in layout.tensors and name not in aliases:
                problems.append(f"{name} of shape {shape} does not belong to the model")
            elif shape != layout[name].shape:
                problems.append(
                    f"{name} has the shape {shape}, but by the configuration it must be "
                    f"{layout[name].shape}"
                )
        _raise_all(self.path, problems)
        _raise_all(
            self.path,
            [
                f"{alias} differs from {target}, though they are tied by the configuration"
                for alias, target in aliases.items()
                if not self._equal(alias, target)
            ],
        )

    def _equal(self, first: str, second: str) -> bool:
        """Whether two tensors of one shape hold the same values; compared by stripes."""
        shape, dtype = self.shapes[first], self.dtypes[first]
        if self.dtypes[second] != dtype:
            return False
        num_bytes = math.prod(shape) * dtype.itemsize
        for rows in split(shape[0], -(-num_bytes // STRIPE_BYTES) or 1):
            box = (rows, *((0, size) for size in shape[1:]))
            one, other = (torch.empty([b - a for a, b in box], dtype=dtype) for _ in range(2))
            self._file_of[first].read_box(first, box, one)
            self._file_of[second].read_box(second, box, other)
            if not torch.equal(one, other):
                return False
        return True

    def load_into(
        self,
        model: nn.Module,
        mesh: Mesh,
        what: str,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        """Give every parameter on ``meta`` this rank's slices, and nothing more.

        Every rank calls it, after ``check``. The ranks stay in step from tensor to tensor, so that
        one that is killed or stopped is found. All is read before any parameter changes; tied
        parameters stay one object.

        Args:
            model: a parallel model, with parameters on ``meta`` or not; the latter are left alone.
            mesh: the ranks; each parameter takes the shape of this rank's shard.
            what: what the ranks are doing, for errors.
            dtype: of the floating-point parameters; None keeps that of the file.
            device: of the new parameters; ``mesh.device`` when None.

        Raises:
            CheckpointError: a tensor is missing or cannot be read.
            CollectiveTimeout: a rank was killed or stopped.
        """
        wanted = [
            (parameter, layout) for _, parameter, layout in named_shards(model) if parameter.is_meta
        ]

        def check_names() -> None:
            names = [layout.name for _, layout in wanted]
            missing = [f"{name} is missing" for name in names if name not in self.shapes]
            _raise_all(self.path, missing)

        mesh.together(what, check_names)
        shards: dict[str, torch.Tensor] = {}
        with tqdm(
            desc="Loading shards",
            unit="B",
            unit_scale=True,
            disable=None if mesh.rank == 0 else True,  # None: shown on a terminal only
            total=sum(self._shard_bytes(layout, mesh) for _, layout in wanted),
        ) as progress:
            for step in self._steps([layout for _, layout in wanted]):
                read = partial(self._read_shards, step, mesh, dtype, device or mesh.device)
                shards |= mesh.together(what, read)
                progress.update(sum(self._shard_bytes(layout, mesh) for layout in step))
        replacements = {
            parameter: nn.Parameter(shards[layout.name], parameter.requires_grad)
            for parameter, layout in wanted
        }
        for module in model.modules():
            for attribute, parameter in list(module._parameters.items()):
                if parameter in replacements:
                    module._parameters[attribute] = replacements[parameter]

    def _shard_bytes(self, layout: TensorLayout, mesh: Mesh) -> int:
        """Bytes of this rank's shard in the file."""
        numel = math.prod(layout.local_shape(mesh.tp_rank))
        return numel * self.dtypes[layout.name].itemsize

    def _steps(self, layouts: Sequence[TensorLayout]) -> Iterator[list[TensorLayout]]:
        """The tensors in steps of some size, the same on every rank, after which the ranks meet."""
        step: list[TensorLayout] = []
        num_bytes = 0
        for layout in layouts:
            step.append(layout)
            num_bytes += layout.numel * self.dtypes[layout.name].itemsize
            if num_bytes >= _STEP_BYTES:
                yield step
                step, num_bytes = [], 0
        if step:
            yield step

    def _read_shards(
        self,
        layouts: Sequence[TensorLayout],
        mesh: Mesh,
        dtype: torch.dtype | None,
        device: torch.device,
    ) -> dict[str, torch.Tensor]:
        return {
            layout.name: self._read_shard(layout, mesh.tp_rank, dtype).to(device)
            for layout in layouts
        }

    def _read_shard(
        self, layout: TensorLayout, tp_rank: int, dtype: torch.dtype | None
    ) -> torch.Tensor:
        file, in_file = self._file_of[layout.name], self.dtypes[layout.name]
        kept = in_file if dtype is None or not in_file.is_floating_point else dtype
        shard = torch.empty(layout.local_shape(tp_rank), dtype=kept)
        for box, view in shard_views(shard, layout, tp_rank):
            file.read_box(layout.name, box, view)
        return shard
