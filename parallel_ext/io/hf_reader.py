"""Read a HuggingFace directory: what it holds is checked first, then own slices are read."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from parallel_ext.distributed.errors import CheckpointError, first_few
from parallel_ext.distributed.mesh import Mesh
from parallel_ext.io.reading import Wanted, read_shards
from parallel_ext.io.safe_open import shown
from parallel_ext.io.safetensors_reader import SafetensorsFile
from parallel_ext.io.schema import MAX_TENSORS, read_json
from parallel_ext.io.wrapped_names import wrapped_hint
from parallel_ext.sharding.layout import ModelLayout
from parallel_ext.sharding.named_shards import named_shards, persistent_buffers
from parallel_ext.sharding.reshard import row_ranges

CONFIG_NAME = "config.json"
ADAPTER_CONFIG_NAME = "adapter_config.json"  # PEFT's
ADAPTER_PICKLE_NAME = "adapter_model.bin"  # of old releases of PEFT
GENERATION_CONFIG_NAME = "generation_config.json"
INDEX_NAME = "model.safetensors.index.json"
SINGLE_FILE_NAME = "model.safetensors"


def _raise_all(where: Path, problems: list[str], hint: str = "") -> None:
    """Raise one error for all problems, the first of them written out, with a hint; or none."""
    if problems:
        seen = first_few(problems, 8, between="; ")
        raise CheckpointError(f"{where}: {seen}" + (hint and f". {hint}"))


class HFDirectory:
    """A saved model whose files have been opened and found consistent.

    Args:
        path: a local directory with ``config.json`` and safetensors files. They can be read until
            ``close()`` or the end of a ``with`` block. A save that replaces the directory meanwhile
            is not mixed in: a read of a file that is another one now raises.
        open_file: opens a safetensors file of it by name; :class:`SafetensorsFile` when None.

    Attributes:
        file_of: HuggingFace name -> the file that holds the tensor.
        config: what ``config.json`` held when it was opened; nobody reads the file again.
        generation_config: the same of ``generation_config.json``; None if there is none.
        shapes: HuggingFace name -> shape of every tensor in the files.
        dtypes: HuggingFace name -> its dtype.

    Raises:
        CheckpointError: something is missing, truncated, inconsistent, no regular file, or leads
            out of the directory; names the file.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        open_file: Callable[[str], SafetensorsFile] | None = None,
    ) -> None:
        self.path = Path(path)
        self._open_file = open_file or (lambda name: SafetensorsFile(self.path / name))
        if not self.path.is_dir():
            raise CheckpointError(f"{self.path}: no such directory")
        if (self.path / ADAPTER_CONFIG_NAME).exists() and not (self.path / CONFIG_NAME).exists():
            raise CheckpointError(
                f"{self.path} holds an adapter of PEFT and no model; load its base, and then it by "
                "peft.PeftModel.from_pretrained(base, path)"
            )
        self.config = read_json(self.path / CONFIG_NAME)
        generation = self.path / GENERATION_CONFIG_NAME
        self.generation_config = read_json(generation) if os.path.lexists(generation) else None
        self._files: list[SafetensorsFile] = []
        self._transposed: set[str] = set()
        self.file_of: dict[str, SafetensorsFile] = {}
        try:
            self._open()
        except BaseException:
            self.close()
            raise
        entries = {name: file.tensors[name] for name, file in self.file_of.items()}
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
        if os.path.lexists(self.path / SINGLE_FILE_NAME):
            names, weight_map = [SINGLE_FILE_NAME], None
        elif os.path.lexists(self.path / INDEX_NAME):
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
        # transformers reads this file instead of the usual ones.
        other = self.config.get("transformers_weights")
        if other not in (None, SINGLE_FILE_NAME if weight_map is None else INDEX_NAME):
            raise CheckpointError(
                f"{self.path / CONFIG_NAME}: transformers_weights is {shown(other)}, but only "
                f"{SINGLE_FILE_NAME} or {INDEX_NAME} is read here; load the model by transformers "
                "and call px.parallelize"
            )
        for name in names:
            file = self._open_file(name)
            self._files.append(file)
            self.file_of.update(dict.fromkeys(file.tensors, file))
            if (count := sum(len(file.tensors) for file in self._files)) > MAX_TENSORS:
                raise CheckpointError(
                    f"{self.path}: up to {name} there are {count} tensors, more than {MAX_TENSORS}"
                )
        if weight_map is not None:
            self._check_index(weight_map)

    def _weight_map(self) -> Mapping[str, str]:
        """Read tensor -> file from the index; every file is named plainly, so in the directory."""
        index = self.path / INDEX_NAME
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(
                f"{index}: weight_map must be a JSON object of file names, got {shown(weight_map)}"
            )
        problems = [
            f"{tensor} is in {shown(file)}, which is not the plain name of a safetensors file"
            for tensor, file in weight_map.items()
            if not isinstance(file, str)
            or not file.endswith(".safetensors")
            or any(character in file for character in "/\\\0")
        ]
        _raise_all(index, problems)
        return weight_map

    def _check_index(self, weight_map: Mapping[str, str]) -> None:
        held = {(name, file.path.name) for file in self._files for name in file.tensors}
        listed = weight_map.items()
        problems = [f"{name} is not in {file}" for name, file in sorted(listed - held)]
        problems += [
            f"{name} is in {file}, but is listed "
            + (f"in {weight_map[name]}" if name in weight_map else "nowhere")
            for name, file in sorted(held - listed)
        ]
        _raise_all(self.path / INDEX_NAME, problems)

    def check(self, layout: ModelLayout, vocabulary: Collection[str] = ()) -> None:
        """Raise unless the directory holds exactly the tensors of a model, before any is loaded.

        A tied alias may be present if it equals the tensor that it shares.

        Args:
            vocabulary: names of the tensors with a row for each id, to find other numbers of rows
                that other systems are known to write.

        Raises:
            CheckpointError: one error for all tensors that are missing, of another shape (with
                both shapes), not of floating point, or that the model does not have.
        """
        problems, surplus = [], False
        aliases = {a: target for a, target in layout.tied.items() if a in self.shapes}
        for name, tensor in layout.tensors.items():
            if name not in self.shapes and name not in layout.buffers:
                problems.append(f"{name} of shape {tensor.shape} is missing")
        for name, shape in self.shapes.items():
            # Old versions of transformers saved this buffer.
            if name.endswith("rotary_emb.inv_freq") and name not in layout:
                continue
            where = f"{name} in {self.file_of[name].path.name}"
            if name not in layout.tensors and name not in aliases:
                problems.append(f"{where} of shape {shape} does not belong to the model")
                surplus = True
            elif shape != layout[name].shape:
                problems.append(
                    f"{where} has the shape {shape}, but by the configuration it must be "
                    f"{layout[name].shape}"
                )
            elif not (name in layout.buffers or self.dtypes[name].is_floating_point):
                problems.append(f"{where} is of {self.dtypes[name]}, but must be floating-point")
        if problems:
            hint = self._vocabulary_hint(layout, vocabulary)
            if not hint and surplus:
                hint = (
                    wrapped_hint(self.shapes, layout.tensors)
                    or "To leave tensors out, load by transformers and call px.parallelize"
                )
            _raise_all(self.path, problems, hint)
        _raise_all(
            self.path,
            [
                f"{alias} differs from {target}, though they are tied by the configuration"
                for alias, target in aliases.items()
                if not self._equal(alias, target)
            ],
            "To load both, untie them in the configuration: tie_word_embeddings=False",
        )

    def _vocabulary_hint(self, layout: ModelLayout, vocabulary: Collection[str]) -> str:
        """Return what may explain other numbers of vocabulary rows than the model has, in words."""
        hint = ""
        for name in vocabulary:
            shape = self.shapes.get(name, ())
            expected = layout[name].shape if layout.tied.get(name, name) in layout else ()
            if not shape or not expected or shape[1:] != expected[1:]:
                continue
            rows, true_rows = shape[0], expected[0]
            tp = -(-true_rows // max(1, rows))
            if tp > 1 and rows == 64 * -(-true_rows // (64 * tp)):
                return (
                    f"{rows} of {true_rows} rows of {name} is one rank's part of tp={tp}, which "
                    "ColossalAI before 0.4.8 saved instead of the whole; the other rows are in no "
                    "file, so save the model again with a later version"
                )
            if rows <= true_rows:
                continue
            if (filled := self._first_filled_row(name, true_rows)) is not None:
                return (
                    f"The surplus is no padding of zeros, since row {filled} of {name} is not zero"
                )
            by = " by ColossalAI or Megatron" if rows % 64 == 0 else ""
            hint = (
                f"All rows from {true_rows} on are zero, so this looks like a vocabulary padded"
                f"{by}: to drop the padding, pass vocab_size={true_rows} to px.from_pretrained"
            )
        return hint

    def drop_padding_rows(
        self, vocabulary: Iterable[str], vocab_size: int, filled: bool = False
    ) -> None:
        """Leave out the rows behind the true vocabulary, which must be zero.

        Args:
            vocabulary: names of the tensors with a row for each id; those in no file are skipped.
            vocab_size: the true number of rows. Tensors that have no more are left as they are.
            filled: whether the caller knows that the rows are padding, whatever they hold.

        Raises:
            CheckpointError: a row to be left out is not zero; names the first. Nothing is left out.
        """
        longer = {
            name: (vocab_size, *self.shapes[name][1:])
            for name in vocabulary
            if self.shapes.get(name, ())[:1] > (vocab_size,)
        }
        for name in longer:
            row = None if filled else self._first_filled_row(name, vocab_size)
            if row is not None:
                raise CheckpointError(
                    f"{self.file_of[name].path}: {name} has the shape {self.shapes[name]}, and "
                    f"row {row} is not zero, so the rows from vocab_size={vocab_size} on cannot be "
                    "taken for padding. Either vocab_size is too small, or the padding was filled "
                    "at random and trained, as by Megatron; then `parallel-ext convert "
                    "--filled-padding` removes these rows"
                )
        self.shapes.update(longer)

    def rename(self, new: Callable[[str], str]) -> None:
        """Give the tensors other names, but for one whose new name another has."""
        names, taken = {}, {*self.file_of}
        for name in self.file_of:
            other = new(name)
            names[name] = name if other in taken else other
            taken.add(names[name])

        def renamed(tensors: Mapping[str, Any]) -> dict[str, Any]:
            return {names[name]: value for name, value in tensors.items()}

        for file in self._files:
            file.tensors = renamed(file.tensors)
        self.shapes, self.dtypes = renamed(self.shapes), renamed(self.dtypes)
        self.file_of = renamed(self.file_of)
        self._transposed = {names[name] for name in self._transposed}

    def transpose(self, names: Iterable[str], layout: ModelLayout) -> None:
        """Take tensors for transposed ones, as transformers does, where only so they fit a layout.

        Args:
            names: of the tensors, whose last two dimensions may lie in either order.
        """
        for name in names:
            shape = self.shapes.get(name, ())
            other = (*shape[:-2], *shape[:-3:-1])
            if name in layout and shape != layout[name].shape == other:
                self.shapes[name] = other
                self._transposed.add(name)

    def drop_unused(self, patterns: Iterable[str], used: Container[str]) -> list[str]:
        """Leave out, and return, the tensors that match a pattern and are not ``used``."""
        unused = [
            name
            for name in self.shapes
            if name not in used and any(re.search(pattern, name) for pattern in patterns)
        ]
        for name in unused:
            del self.shapes[name]
        return unused

    def drop_layers(self, layers: str, number: int) -> int:
        """Leave out the layers from a number on; return how many the files have.

        Args:
            layers: path of the layers in the model.
            number: of the first layer that is left out.
        """
        of_layer = re.compile(rf"{re.escape(layers)}\.(\d+)\.")
        found = {name: int(match[1]) for name in self.shapes if (match := of_layer.match(name))}
        for name, index in found.items():
            if index >= number:
                del self.shapes[name]
        return 1 + max(found.values(), default=-1)

    def _first_filled_row(self, name: str, start: int) -> int | None:
        """Return the first row from ``start`` on that is not all zeros; None if there is none."""
        shape = self.shapes[name]
        if not (width := math.prod(shape[1:])):
            return None
        for first, last in row_ranges(shape, 8 * width, start):
            # Read as fp64, in which no value of another dtype becomes zero.
            rows = self.file_of[name].read_rows(name, first, last, torch.float64)
            filled = rows.view(last - first, width).ne(0).any(1)
            if filled.any():
                return first + int(filled.nonzero()[0])
        return None

    def _equal(self, first: str, second: str) -> bool:
        """Compare two tensors of one shape by stripes; return whether they hold equal values."""
        shape, dtype = self.shapes[first], self.dtypes[first]
        if self.dtypes[second] != dtype:
            return False
        for rows in row_ranges(shape, math.prod(shape[1:]) * dtype.itemsize):
            one, other = (self.file_of[name].read_rows(name, *rows) for name in (first, second))
            if not torch.equal(one, other):
                return False
        return True

    def load_into(
        self,
        model: nn.Module,
        mesh: Mesh,
        layout: ModelLayout,
        op_name: str,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        in_fp32: Collection[str] = (),
    ) -> None:
        """Give every parameter on ``meta`` this rank's slices, and buffers what the files hold.

        Every rank calls it, after ``check``. The ranks stay in step from tensor to tensor, so that
        one that is killed or stopped is found. All is read before any parameter changes; tied
        parameters stay one object.

        Args:
            model: a parallel model, with parameters on ``meta`` or not; the latter are left alone.
                Its buffers keep their dtypes.
            layout: of the model; says under which names the files hold its tensors.
            dtype: of the floating-point parameters; None keeps that of the file.
            device: of the new parameters; ``mesh.device`` when None.
            in_fp32: parts of the names of parameters that are fp32 in place of ``dtype``.

        Raises:
            CheckpointError: a tensor is missing or cannot be read.
            CollectiveTimeout: a rank was killed or stopped.
        """
        wanted = [
            (parameter, layout[name])
            for name, parameter, _ in named_shards(model)
            if parameter.is_meta
        ]
        buffers = {
            name: buffer
            for name, buffer in persistent_buffers(model)
            if name in layout.buffers
            and all(part.name in self.shapes for part in layout.parts_of(name))
        }
        tensors = [*(whole for _, whole in wanted), *(layout[name] for name in buffers)]
        parts = [
            Wanted(part.name, whole, part, part.name in self._transposed)
            for whole in tensors
            for part in layout.parts_of(whole.name)
        ]

        def make_room() -> dict[str, torch.Tensor]:
            missing = [f"{each.name} is missing" for each in parts if each.name not in self.shapes]
            _raise_all(self.path, missing)
            room: dict[str, torch.Tensor] = {}
            for each in parts:
                if each.whole.name not in room:
                    shape = each.whole.local_shape(mesh.rank)
                    fp32 = any(part in each.whole.name for part in in_fp32)
                    kept = _kept(self.dtypes[each.name], torch.float32 if fp32 else dtype)
                    room[each.whole.name] = torch.empty(
                        shape, dtype=kept, device=device or mesh.device
                    )
            return room

        shards = mesh.control.run_on_all(op_name, make_room)
        read_shards(
            [(each, shards[each.whole.name]) for each in parts],
            self.file_of,
            mesh,
            op_name,
            progress_as_in_transformers(),
        )
        replacements: dict[torch.Tensor, torch.Tensor] = {
            parameter: nn.Parameter(shards[whole.name], parameter.requires_grad)
            for parameter, whole in wanted
        }
        for name, buffer in buffers.items():
            if buffer.is_meta:  # its class makes it by torch.empty
                replacements[buffer] = shards[name].to(buffer.dtype)
            else:
                buffer.copy_(shards[name])
        for module in model.modules():
            own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
            for attribute, tensor in own:
                if tensor in replacements:
                    setattr(module, attribute, replacements[tensor])


def progress_as_in_transformers() -> bool | None:
    """Return what transformers' ``disable_progress_bar`` asks of bars: False or None."""
    from transformers.utils.logging import is_progress_bar_enabled

    return None if is_progress_bar_enabled() else False


def _kept(in_file: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """Return the dtype of a loaded tensor: ``wanted`` if given and the file's is floating-point."""
    return in_file if wanted is None or not in_file.is_floating_point else wanted
