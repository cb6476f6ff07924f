"""Merge an adapter into a saved model: file by file and in rows, without the model in memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from peft.utils.other import get_pattern_key
from transformers import CONFIG_MAPPING

from parallel_ext.checkpoint.manifest import COMMIT_NAME
from parallel_ext.checkpoint.source import ADAPTER_NAME
from parallel_ext.distributed.errors import CheckpointError, first_few
from parallel_ext.io.hf_reader import HFDirectory
from parallel_ext.io.publish import Publication
from parallel_ext.io.rewrite import Progress, check_new, copy_beside, nothing, rows_of, write_again
from parallel_ext.io.safetensors_reader import SafetensorsFile
from parallel_ext.io.safetensors_writer import TensorSpec
from parallel_ext.lora.config import LoraConfig, refuse_unsupported

_PREFIX = "base_model.model."
_FACTORS = {  # ends of names in an adapter's file -> what they are of which parameter
    ".lora_A.weight": ("a", ".weight"),
    ".lora_B.weight": ("b", ".weight"),
    ".lora_B.bias": ("bias", ".bias"),
    ".lora_embedding_A": ("embedding a", ".weight"),
    ".lora_embedding_B": ("embedding b", ".weight"),
}


@dataclass(frozen=True)
class Merged:
    """What :func:`merge_files` has written.

    Attributes:
        tensors: of the model.
        merged: of those with an adapter.
        replaced: of those that the adapter holds whole, and nothing is added to.
        num_bytes: of all tensors.
    """

    tensors: int
    merged: int
    replaced: int
    num_bytes: int


class _Adapter:
    """An open adapter: by name of a tensor of the model, what it changes of it."""

    def __init__(self, folder: Path, files: ExitStack) -> None:
        try:
            self.config = LoraConfig.from_pretrained(str(folder))
            refuse_unsupported(self.config, f"merge {folder}")
        except (NotImplementedError, ValueError, TypeError) as error:
            raise CheckpointError(str(error)) from error
        self.file = files.enter_context(SafetensorsFile(folder / ADAPTER_NAME))
        self.factors: dict[str, dict[str, str]] = {}
        self.whole: dict[str, str] = {}
        for name in self.file.tensors:
            inner = name.removeprefix(_PREFIX)
            for end, (kind, attribute) in _FACTORS.items():
                if inner.endswith(end):
                    target = inner.removesuffix(end) + attribute
                    self.factors.setdefault(target, {})[kind] = name
                    break
            else:
                self.whole[inner.replace(".base_layer.", ".")] = name

    def _scale(self, module: str, r: int) -> float:
        """Return what the product of the factors of a module is multiplied by, as PEFT has it."""
        pattern = self.config.alpha_pattern or {}
        alpha = pattern.get(get_pattern_key(pattern.keys(), module), self.config.lora_alpha)
        return alpha / (math.sqrt(r) if self.config.use_rslora else r)

    def rows_added(
        self, target: str, shape: tuple[int, ...], wide: torch.dtype
    ) -> Callable[[int, int], torch.Tensor]:
        """Return a function that computes what is added to some rows of a tensor.

        Args:
            target: name of the tensor.
            shape: of it.
            wide: dtype of the sum.

        Raises:
            CheckpointError: a factor is missing, or does not fit the tensor.
        """
        module = target.rpartition(".")[0]
        found = {kind: self.file.read(name).to(wide) for kind, name in self.factors[target].items()}
        beside = self.factors.get(f"{module}.weight", {})
        if target.endswith(".bias") and "a" in beside:
            rank = self.file.tensors[beside["a"]].shape[0]
            values = found["bias"] * self._scale(module, rank)
            left, right = values.unsqueeze(1), torch.ones(1, 1, dtype=wide)
            expected: tuple[int, ...] = (len(values),)
        elif found.keys() in ({"a", "b"}, {"embedding a", "embedding b"}):
            of_embedding = "embedding a" in found
            left = found["embedding a"].T if of_embedding else found["b"]
            right = found["embedding b"].T if of_embedding else found["a"]
            right = right * self._scale(module, len(right))
            expected = (len(left), right.size(1))
        else:
            raise CheckpointError(
                f"{self.file.path}: the adapter of {module} has {' and '.join(found)} alone"
            )
        if shape != expected or left.size(1) != right.size(0):
            raise CheckpointError(
                f"{self.file.path}: the adapter of {target} is for a tensor of {expected}, but the "
                f"model's is {shape}"
            )
        return lambda start, stop: (left[start:stop] @ right).view(stop - start, *shape[1:])


def merge_files(adapter: Path, base: Path, out: Path, progress: Progress = nothing) -> Merged:
    """Write a HuggingFace model that is another one with an adapter merged into it.

    The result is that of PEFT's ``merge_and_unload`` to rounding: each element is computed in fp32
    (fp64 for fp64) and rounded once. Its files have the names and dtypes of the model's; what else
    lies beside them, such as the tokenizer, is copied. It needs the memory of the factors of one
    layer and some rows.

    Args:
        adapter: folder of a LoRA adapter as PEFT saves it.
        base: folder of the model that it was trained on.
        out: folder that is made.
        progress: called with the bytes of each piece that was written.

    Raises:
        CheckpointError: the adapter cannot be merged so, or does not belong to the model; nothing
            is written.
        OSError: a file cannot be read or written.
    """
    for source in (base, adapter):
        check_new(out, source)
    with ExitStack() as files:
        own = _Adapter(adapter, files)
        model = files.enter_context(HFDirectory(base))
        _check(own, model)
        with Publication(out) as temporary:
            write_again(model, temporary, partial(_rows, own), progress)
            copy_beside(base, temporary, without=(COMMIT_NAME,))
        num_bytes = sum(
            math.prod(model.shapes[name]) * model.dtypes[name].itemsize for name in model.shapes
        )
        replaced = own.whole.keys() - own.factors.keys()
        return Merged(len(model.shapes), len(own.factors), len(replaced), num_bytes)


def _check(own: _Adapter, model: HFDirectory) -> None:
    """Raise unless all that an adapter changes is in the model, and can be changed."""
    if "quantization_config" in model.config:
        raise CheckpointError(f"{model.path} is quantized; merge into the model that it was before")
    missing = sorted({*own.factors, *own.whole} - model.shapes.keys())
    if missing:
        raise CheckpointError(
            f"{own.file.path}: {model.path} has no {first_few(missing)}, which the adapter "
            "changes. It is of another model, or on experts or on tied weights: merge it with PEFT"
        )
    for name, there in own.whole.items():
        shape = own.file.tensors[there].shape
        if shape != model.shapes[name]:
            raise CheckpointError(
                f"{own.file.path}: {name} is of shape {shape} there, but {model.shapes[name]} in "
                f"{model.path}: the vocabulary was resized; merge with PEFT"
            )
        trained = name.rpartition(".")[0].endswith(tuple(own.config.modules_to_save or ()))
        if trained and shape[0] == model.config.get("vocab_size") and _ties(model):
            raise CheckpointError(
                f"{own.file.path}: {name} was trained whole, but {model.path} has one tensor for "
                "embedding and head, and would have both changed; untie them first"
            )
    for name, factors in own.factors.items():
        if "embedding a" in factors and _ties(model):
            raise CheckpointError(
                f"{own.file.path}: {model.path} has one tensor for embedding and head, and merging "
                f"into {name} would change both; untie them first"
            )
        own.rows_added(name, model.shapes[name], torch.float32)
        if not model.dtypes[name].is_floating_point:
            raise CheckpointError(f"{model.path}: {name} is of {model.dtypes[name]}, not floating")


def _ties(model: HFDirectory) -> bool:
    """Return whether the head of a model is its embedding, by its configuration or its class."""
    if "tie_word_embeddings" in model.config:
        return bool(model.config["tie_word_embeddings"])
    kind = model.config.get("model_type")
    return kind in CONFIG_MAPPING and CONFIG_MAPPING[kind]().tie_word_embeddings


def _rows(own: _Adapter, spec: TensorSpec, file: SafetensorsFile) -> Iterator[torch.Tensor]:
    """Compute the rows of a tensor, some at a time."""
    there, name = (own.file, own.whole[spec.name]) if spec.name in own.whole else (file, spec.name)
    wide = torch.promote_types(spec.dtype, torch.float32)
    added = own.rows_added(spec.name, spec.shape, wide) if spec.name in own.factors else None
    start = 0
    for rows in rows_of(there, name, spec.shape):
        if added is not None:
            stop = start + len(rows)
            rows, start = rows.to(wide) + added(start, stop), stop
        yield rows.to(spec.dtype)
