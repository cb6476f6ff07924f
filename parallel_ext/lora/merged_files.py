"""Merge an adapter into a saved model: file by file and in rows, without the model in memory."""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
import transformers
from peft.utils.other import get_pattern_key
from transformers import CONFIG_MAPPING

from parallel_ext.checkpoint.manifest import COMMIT_NAME, read_manifest
from parallel_ext.checkpoint.source import ADAPTER_NAME
from parallel_ext.distributed.errors import CheckpointError, first_few
from parallel_ext.io.header_hashes import open_compared
from parallel_ext.io.hf_reader import ADAPTER_CONFIG_NAME, ADAPTER_PICKLE_NAME, HFDirectory
from parallel_ext.io.progress import Progress, nothing
from parallel_ext.io.publish import Publication
from parallel_ext.io.rewrite import check_new, copy_beside, rows_of, write_again
from parallel_ext.io.safetensors_reader import SafetensorsFile
from parallel_ext.io.safetensors_writer import TensorSpec
from parallel_ext.lora.config import LoraConfig, refuse_unsupported
from parallel_ext.lora.experts import per_expert
from parallel_ext.models import SPECS, ModelSpec, spec_of_text
from parallel_ext.parallel.configuration import (
    build_on_meta,
    configurations,
    is_of_images,
    names_in_model,
)
from parallel_ext.parallel.plan import layout_of
from parallel_ext.parallel.validate import spec_for
from parallel_ext.sharding.layout import ModelLayout, Part

_PREFIX = "base_model.model."
_FACTORS = {  # ends of names in an adapter's file -> what they are of which parameter
    ".lora_A.weight": ("a", ".weight"),
    ".lora_B.weight": ("b", ".weight"),
    ".lora_B.bias": ("bias", ".bias"),
    ".lora_magnitude_vector": ("lengths", ".weight"),
    ".lora_embedding_A": ("embedding a", ".weight"),
    ".lora_embedding_B": ("embedding b", ".weight"),
}
_TOKENS = ".token_adapter.trainable_tokens_delta"


@dataclass(frozen=True)
class Merged:
    """What :func:`merge_files` has written.

    Attributes:
        tensors: of the model.
        merged: of those with an adapter, or with trained rows of tokens.
        replaced: of those that the adapter holds whole, and nothing is added to.
        num_bytes: of all tensors.
    """

    tensors: int
    merged: int
    replaced: int
    num_bytes: int


class _Adapter:
    """An open adapter: by name of a tensor of the model, what it changes of it.

    Attributes:
        of_text: spec of the text model that was adapted alone, if the files that it is merged into
            are of a model with images; else None.
    """

    def __init__(self, folder: Path, files: ExitStack) -> None:
        if not (folder / ADAPTER_CONFIG_NAME).exists():
            raise CheckpointError(f"{folder} has no {ADAPTER_CONFIG_NAME}, so it is no adapter")
        if (folder / ADAPTER_PICKLE_NAME).exists() and not (folder / ADAPTER_NAME).exists():
            raise CheckpointError(
                f"{folder / ADAPTER_PICKLE_NAME} is a pickle, which is not merged; load the "
                f"adapter with PEFT and save it again, which writes {ADAPTER_NAME}"
            )
        try:
            self.config = LoraConfig.from_pretrained(str(folder))
            refuse_unsupported(self.config, f"merge {folder}")
        except (NotImplementedError, ValueError, TypeError) as error:
            raise CheckpointError(str(error)) from error
        self.file = files.enter_context(_opener(folder)(ADAPTER_NAME))
        self.of_text: ModelSpec | None = None
        self._renamed: dict[str, str] = {}  # names in files -> others in the model
        self.factors: dict[str, dict[str, str]] = {}
        self.experts: dict[str, tuple[Part, int, dict[str, str]]] = {}
        self.changed = ChainMap[str, Any](self.factors, self.experts)  # by name, what gets a sum
        self._read = lru_cache(maxsize=4)(self.file.read)  # the factors of a layer's experts
        self.whole: dict[str, str] = {}
        self.tokens: dict[str, str] = {}  # rows of tokens, which take the places of the model's
        for name in self.file.tensors:
            inner = name.removeprefix(_PREFIX)
            if inner.endswith(_TOKENS):
                self.tokens[inner.removesuffix(_TOKENS) + ".weight"] = name
                continue
            for end, (kind, attribute) in _FACTORS.items():
                if inner.endswith(end):
                    target = inner.removesuffix(end) + attribute
                    self.factors.setdefault(target, {})[kind] = name
                    break
            else:
                inner = inner.replace(".token_adapter.base_layer.", ".")
                self.whole[inner.replace(".base_layer.", ".")] = name

    @property
    def all_names(self) -> set[str]:
        """Return the names of all tensors of the model that the adapter changes."""
        return {*self.changed, *self.whole, *self.tokens}

    def find_text_model(self, model: HFDirectory) -> None:
        """Find out whether the files are of a model with images, and the adapter of its text."""
        text, own = spec_of_text(model.config), self.all_names
        if text is None or not text.in_image_files:
            return
        of_text = {text.from_image_files(name) for name in model.shapes} - model.shapes.keys()
        if own.isdisjoint(model.shapes) or own & of_text:  # a head has one name in both
            self.of_text = text

    def named(self, in_files: str) -> str:
        """Return the name that a tensor has in the model that was adapted."""
        name = in_files if self.of_text is None else self.of_text.from_image_files(in_files)
        return self._renamed.get(name, name)

    def find_names(self, plain: transformers.PreTrainedModel, model: HFDirectory) -> None:
        """Find the tensors that have other names in the model, ``plain``, than in its files."""
        self._renamed = names_in_model(plain, model.shapes)

    def find_in_files(self, layout: ModelLayout) -> None:
        """Find the tensors in files that have other names in the model, and those of experts.

        PEFT names the adapters on the tensors of experts by their module alone, one of them as if
        it were on a module inside. The sizes tell them apart.
        """
        for name in layout:
            parts = layout.parts_of(name)
            if len(parts) == 1 and not parts[0].index:
                self._renamed[parts[0].name] = name
        for target, factors in list(self.factors.items()):
            module = target.removesuffix(".weight").removesuffix(".base_layer")
            shapes = {kind: self.file.tensors[name].shape for kind, name in factors.items()}
            features = (shapes["b"][0], shapes["a"][1]) if shapes.keys() == {"a", "b"} else None
            for name in layout:
                if name.rpartition(".")[0] == module and layout[name].shape[1:] == features:
                    self.factors.pop(target)
                    for part in layout.parts_of(name):
                        in_model = self._renamed.get(part.name, part.name)
                        self.experts[in_model] = part, layout[name].shape[0], factors

    def lengths_of(self, target: str, shape: tuple[int, ...]) -> torch.Tensor | None:
        """Return the lengths that the rows of a tensor get with an adapter of DoRA, else None."""
        if (name := self.factors.get(target, {}).get("lengths")) is None:
            return None
        lengths = self.file.read(name)
        if lengths.shape != shape[:1]:
            raise CheckpointError(
                f"{self.file.path}: {name} is of shape {tuple(lengths.shape)}, but the model's "
                f"tensor of {shape}"
            )
        return lengths

    def rows_of_tokens(
        self, target: str, shape: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the ids [k] and rows [k, H] that take the places of rows of a tensor."""
        given = self.config.trainable_token_indices
        if isinstance(given, dict):
            module = target.removesuffix(".weight")
            given = next((ids for name, ids in given.items() if module.endswith(name)), None)
        rows = self.file.read(self.tokens[target])
        if given is None or rows.shape != (len(given), *shape[1:]) or max(given) >= shape[0]:
            raise CheckpointError(
                f"{self.file.path}: the rows of tokens of {target} are {tuple(rows.shape)}, of "
                f"trainable_token_indices={given}, but the model's tensor is {shape}. Where its "
                "vocabulary was resized, merge with PEFT"
            )
        return torch.tensor(given), rows

    def _scale(self, target: str, r: int) -> float:
        """Return what the product of the factors of a target is multiplied by, as PEFT has it."""
        ranks = self.config.rank_pattern or {}
        if (given := ranks.get(get_pattern_key(ranks.keys(), target), self.config.r)) != r:
            raise CheckpointError(
                f"{self.file.path}: the adapter of {target} is of rank {r}, but by "
                f"adapter_config.json of {given}"
            )
        pattern = self.config.alpha_pattern or {}
        alpha = pattern.get(get_pattern_key(pattern.keys(), target), self.config.lora_alpha)
        return alpha / (math.sqrt(r) if self.config.use_rslora else r)

    def rows_added(
        self, target: str, shape: tuple[int, ...], wide: torch.dtype
    ) -> Callable[[int, int], torch.Tensor]:
        """Return a function that computes what is added to some rows of a tensor."""
        of_expert = target in self.experts
        left, right = (self._of_expert if of_expert else self._of_module)(target, wide)
        expected = (*left.shape[:-1], right.size(-1))
        if target.endswith(".bias"):
            expected = expected[:1]
        if shape != expected or left.size(-1) != right.size(-2):
            raise CheckpointError(
                f"{self.file.path}: the adapter of {target} is for a tensor of {expected}, but the "
                f"model's is {shape}"
            )
        if right.dim() > 2:  # the rows are experts
            return lambda start, stop: left[start:stop] @ right[start:stop]
        return lambda start, stop: (left[start:stop] @ right).view(stop - start, *shape[1:])

    def _of_module(self, target: str, wide: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return two factors whose product is added to a tensor of a module; a bias is a column."""
        module = target.rpartition(".")[0]
        names = self.factors[target].items()
        found = {k: self.file.read(name).to(wide) for k, name in names if k != "lengths"}
        beside = self.factors.get(f"{module}.weight", {})
        if target.endswith(".bias") and "a" in beside:
            rank = self.file.tensors[beside["a"]].shape[0]
            one = torch.ones(1, 1, dtype=wide)
            return found["bias"].unsqueeze(1) * self._scale(module, rank), one
        if found.keys() == {"a", "b"}:
            return found["b"], found["a"] * self._scale(module, len(found["a"]))
        if found.keys() == {"embedding a", "embedding b"}:
            right = found["embedding b"].T
            return found["embedding a"].T, right * self._scale(module, len(right))
        raise CheckpointError(
            f"{self.file.path}: the adapter of {module} has {' and '.join(found)} alone"
        )

    def _of_expert(self, target: str, wide: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return two factors whose product is added to a tensor of one expert, or of all."""
        part, num_experts, names = self.experts[target]
        a, b = (self._read(names[kind]) for kind in "ab")
        right, left = per_expert(a, b, num_experts)
        if part.index:
            (expert, _), (start, stop), _ = part.box
            left, right = left[expert, start:stop], right[expert]
        return left.to(wide), right.to(wide) * self._scale(part.source, right.size(-2))


def merge_files(adapter: Path, base: Path, out: Path, progress: Progress = nothing) -> Merged:
    """Write a HuggingFace model that is another one with an adapter merged into it.

    The result is that of PEFT's ``merge_and_unload`` to rounding: each element is computed in fp32
    (fp64 for fp64) and rounded once. Its files have the names and dtypes of the model's; what else
    lies beside them, such as the tokenizer, is copied. It needs the memory of the factors of one
    layer and some rows.

    Args:
        adapter: folder of a LoRA adapter as PEFT saves it.
        base: folder of the model that it was trained on, or of the one with images around it.

    Raises:
        CheckpointError: the adapter cannot be merged so, or does not belong to the model, or a file
            is not as its hashes say; nothing is written.
    """
    for source in (base, adapter):
        check_new(out, source)
    with ExitStack() as files:
        own = _Adapter(adapter, files)
        model = files.enter_context(HFDirectory(base, _opener(base)))
        _check(own, model)
        with Publication(out) as temporary:
            write_again(model, temporary, partial(_rows, own), progress)
            copy_beside(base, temporary, without=(COMMIT_NAME,))
        num_bytes = sum(
            math.prod(model.shapes[name]) * model.dtypes[name].itemsize for name in model.shapes
        )
        merged = {*own.changed, *own.tokens}
        replaced = own.whole.keys() - merged
        return Merged(len(model.shapes), len(merged), len(replaced), num_bytes)


def _opener(folder: Path) -> Callable[[str], SafetensorsFile]:
    """Return what opens a file of a folder by name, and compares it with hashes where it has any.

    A step of a training checkpoint has them in chunks, compared as they are read; a file that this
    package wrote as a model's has them in its header, and is read for them first.
    """
    if (folder / COMMIT_NAME).exists():
        return partial(read_manifest(folder).open, folder)
    return lambda name: open_compared(folder / name)


def _check(own: _Adapter, model: HFDirectory) -> None:
    """Raise unless all that an adapter changes is in the model, and can be changed."""
    if "quantization_config" in model.config:
        raise CheckpointError(f"{model.path} is quantized; merge into the model that it was before")
    own.find_text_model(model)
    config = model.config
    if own.of_text is not None or is_of_images(config):
        text = config.get("text_config") or {}
        # PaliGemma has a number of rows beside it, which is another one.
        config = text | config | {"vocab_size": _configured(text or config, "vocab_size")}
    served = own.of_text or model.config.get("model_type") in SPECS
    if own.all_names - {own.named(name) for name in model.shapes}:
        if served:
            plain = build_on_meta(model, configurations(model, None)[0].get_text_config(), None)
            own.find_in_files(layout_of(plain, spec_for(plain), tp_size=1))
        elif is_of_images(config):
            own.find_names(build_on_meta(model, configurations(model, None)[0], None), model)
    shapes = {own.named(name): each for name, each in model.shapes.items()}
    dtypes = {own.named(name): each for name, each in model.dtypes.items()}
    missing = sorted(own.all_names - shapes.keys())
    if missing:
        raise CheckpointError(
            f"{own.file.path}: {model.path} has no {first_few(missing)}, which the adapter "
            "changes. It is of another model, on tied weights, or on what has another name in "
            "these files: merge it with PEFT"
        )
    for name, there in own.whole.items():
        shape = own.file.tensors[there].shape
        if shape != shapes[name]:
            raise CheckpointError(
                f"{own.file.path}: {name} is of shape {shape} there, but {shapes[name]} in "
                f"{model.path}: the vocabulary was resized; merge with PEFT"
            )
        trained = name.rpartition(".")[0].endswith(tuple(own.config.modules_to_save or ()))
        if trained and shape[0] == config.get("vocab_size") and _ties(config):
            raise CheckpointError(
                f"{own.file.path}: {name} was trained whole, but {model.path} has one tensor for "
                "embedding and head, and would have both changed; untie them first"
            )
    spec = own.of_text or SPECS.get(config.get("model_type"))
    head = f"{spec.head if spec else 'lm_head'}.weight"
    for name in own.changed:
        of_ids = "embedding a" in own.factors.get(name, ()) and (
            shapes[name][0] == config.get("vocab_size")
            and not (spec and name == f"{spec.layer_embedding}.weight")
        )
        if (of_ids or name == head) and _ties(config):
            raise CheckpointError(
                f"{own.file.path}: {model.path} has one tensor for embedding and head, and merging "
                f"into {name} would change both; untie them first"
            )
        own.rows_added(name, shapes[name], torch.float32)
        own.lengths_of(name, shapes[name])
    for name in own.tokens:
        own.rows_of_tokens(name, shapes[name])
    for name in {*own.changed, *own.tokens}:
        if not dtypes[name].is_floating_point:
            raise CheckpointError(f"{model.path}: {name} is of {dtypes[name]}, not floating")


def _ties(config: dict[str, Any]) -> bool:
    """Return whether the head of a model is its embedding, by its configuration or its class."""
    return bool(_configured(config, "tie_word_embeddings"))


def _configured(config: dict[str, Any], name: str) -> Any:
    """Return a value of a configuration in files, which leave out what its class has by default."""
    kind = config.get("model_type")
    if name in config or kind not in CONFIG_MAPPING:
        return config.get(name)
    return getattr(CONFIG_MAPPING[kind](), name, None)


def _rows(own: _Adapter, spec: TensorSpec, file: SafetensorsFile) -> Iterator[torch.Tensor]:
    """Compute the rows of a tensor, some at a time."""
    named = own.named(spec.name)
    there, name = (own.file, own.whole[named]) if named in own.whole else (file, spec.name)
    wide = torch.promote_types(spec.dtype, torch.float32)
    added = own.rows_added(named, spec.shape, wide) if named in own.changed else None
    lengths = own.lengths_of(named, spec.shape)
    tokens = own.rows_of_tokens(named, spec.shape) if named in own.tokens else None
    start = 0
    for rows in rows_of(there, name, spec.shape):
        stop = start + len(rows)
        if added is not None:
            rows = rows.to(wide) + added(start, stop)
        if lengths is not None:
            rows *= (lengths[start:stop].to(wide) / rows.norm(dim=1)).unsqueeze(1)
        if tokens is not None:
            ids, values = tokens
            here = (ids >= start) & (ids < stop)
            rows = rows.index_copy(0, ids[here] - start, values[here].to(rows.dtype))
        start = stop
        yield rows.to(spec.dtype)
