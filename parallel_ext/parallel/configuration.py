"""Configurations from the JSON of a directory, which is looked at before transformers sees it."""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers
from accelerate import init_empty_weights
from torch.overrides import TorchFunctionMode
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.initialization import no_init_weights

from parallel_ext.distributed.errors import CheckpointError
from parallel_ext.io.hf_reader import CONFIG_NAME, GENERATION_CONFIG_NAME
from parallel_ext.io.safe_open import shown
from parallel_ext.models import OWN, SPECS, own_model_type, spec_of_text, why_unserved
from parallel_ext.models._transformers_private import forget_attention, take_for_unchanged
from parallel_ext.parallel.extending import called_by_this_package

_MAX_SIZE = 2**24  # of a dimension, a head, a number of experts: far more than any model has
_LARGE = 2**24  # elements, more than a buffer has
_MAX_LABELS = 30_000  # ImageNet-21k has 21 841
_SIZE = re.compile(
    r"num_.*|(.*_)?(size|dim|width|heads|layers|experts|positions|channels|grid)|max_window_layers"
)
_AT_LEAST_ONE = {
    *("hidden_size", "intermediate_size", "head_dim"),
    *("num_attention_heads", "num_key_value_heads", "num_local_experts", "num_experts_per_tok"),
}
_LABELS = ("num_labels", "id2label", "label2id")
# Fields, as files spell them, for whose values with a slash transformers loads compiled code from
# the hub.
_IMPLEMENTATIONS = {
    start + name + end
    for name in ("attn_implementation", "experts_implementation")
    for start in ("", "_")
    for end in ("", "_internal")
}
_REFUSED = {
    "quantization_config": "quantized models are not served; save the model dequantized",
    "gradient_checkpointing": (
        "it belongs to training; remove it, and call model.gradient_checkpointing_enable()"
    ),
}
_OF_A_LAYER = ("head_dim", "num_key_value_heads")


class Described(Protocol):
    """What is read of a directory to build its model, as an ``HFDirectory`` has it."""

    path: Path
    config: Any  # the content of config.json
    generation_config: Any
    shapes: Any  # of the tensors, by their names in files


def served() -> list[str]:
    """Return the values of ``config.model_type`` that can be made parallel."""
    return sorted({*SPECS, *OWN})


def type_of_text(config: Any) -> Any:
    """Return the ``model_type`` of the decoder of text in a configuration, None without one."""
    return getattr(getattr(config, "text_config", None), "model_type", None)


def other_class(config: transformers.PreTrainedConfig) -> str | None:
    """Return the class of a model in files if it classifies, or is a decoder without a head."""
    mappings = (
        transformers.MODEL_MAPPING,
        transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
        transformers.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
        transformers.MODEL_FOR_QUESTION_ANSWERING_MAPPING,
    )
    classes = {mapping[type(config)].__name__ for mapping in mappings if type(config) in mapping}
    return next((name for name in config.architectures or () if name in classes), None)


def is_of_images(content: Mapping[str, Any]) -> bool:
    """Return whether the configuration in files is of a model of images and text."""
    known = transformers.models.auto.modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    model_type = content.get("model_type")
    cls = known.get(model_type) if isinstance(model_type, str) else None
    return cls is not None and content.get("architectures") == [cls]


def _of_class(content: Mapping[str, Any]) -> str | None:
    """Return the served ``model_type`` whose class files name; Kimi K2's call theirs otherwise."""
    known = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    named = content.get("architectures")
    return next((each for each in SPECS if [known.get(each)] == named), None)


def configurations(
    directory: Described,
    vocab_size: int | None,
    wants_own_code: bool = False,
    given: transformers.PreTrainedConfig | None = None,
) -> tuple[transformers.PreTrainedConfig, transformers.GenerationConfig]:
    """Make model and generation configuration from what was read when a directory was opened.

    The attention that the file asks for does not count: only the caller chooses code.

    Args:
        directory: of a model that has a spec, or of one of images around such a decoder.
        vocab_size: the true size of the vocabulary; None for that of the file.
        wants_own_code: whether a model with code beside its files is to be made by it.
        given: the caller's own, of the same class, in place of the file's; or of the text model
            alone, where files with images hold one.

    Raises:
        TypeError: the caller's configuration is of another class.
        CheckpointError: a value with which no model can be built, or none in reasonable time and
            memory, or that is not served; names file, field and value.
    """
    path, content = directory.path / CONFIG_NAME, directory.config
    own = own_model_type(content)
    for problem in _problems(content, len(directory.shapes)):
        raise CheckpointError(f"{path}: {problem}")
    model_type, of_images = own or content.get("model_type"), is_of_images(content)
    if not isinstance(model_type, str) or not (model_type in SPECS or of_images):
        spec = spec_of_text(content)
        why = why_unserved(model_type, spec and spec.model_type)
        if "auto_map" in content:
            why = "; custom code that comes with files is not run"
        if model_type not in transformers.CONFIG_MAPPING and (like := _of_class(content)):
            why += f"; architectures has the class of {like!r}, to be written if it is such a model"
        raise CheckpointError(
            f"{path}: model_type is {shown(model_type)}, but served are {', '.join(served())}{why}"
        )
    if wants_own_code and own is None and "auto_map" in content:
        raise CheckpointError(
            f"{path}: trust_remote_code=True asks for the code of auto_map, but code that comes "
            f"with files is never run; pass False for the {model_type} of transformers"
        )
    try:
        kind = transformers.CONFIG_MAPPING[model_type]
        config = kind.from_dict(_without(content, _IMPLEMENTATIONS))
        text = config.get_text_config()
    except Exception as error:
        raise CheckpointError(_refusal(path, content, error)) from error
    if of_images and text.model_type not in SPECS:
        raise CheckpointError(
            f"{path}: model_type is {shown(model_type)}, whose text_config is of "
            f"{text.model_type!r}, but served are {', '.join(served())}"
        )
    if of_images and type(given) is type(text) and SPECS[text.model_type].in_image_files:
        text.dtype = text.dtype or config.dtype
        config = text
    if given is not None:
        if type(given) is not type(config):
            raise TypeError(
                f"from_pretrained: config must be a {type(config).__name__}, as {path} is, got "
                f"{shown(given)}"
            )
        config = copy.deepcopy(given)
        text = config.get_text_config()
    if vocab_size is not None:
        text.vocab_size = vocab_size
    rows, pad = text.vocab_size, text.pad_token_id
    if isinstance(pad, int) and not -rows <= pad < rows:
        raise CheckpointError(f"{path}: pad_token_id is {pad}, outside of the vocabulary of {rows}")
    return config, _generation(directory)


def _generation(directory: Described) -> transformers.GenerationConfig:
    """Return what is to be generated by default; older files say it in ``config.json`` alone."""
    kind, name, content = transformers.GenerationConfig, CONFIG_NAME, directory.config
    if directory.generation_config is not None:
        name, content = GENERATION_CONFIG_NAME, directory.generation_config
    try:
        if name == CONFIG_NAME:
            return kind.from_model_config(dict(content))
        generation = kind.from_dict(dict(content))
        take_for_unchanged(generation)
        return generation
    except Exception as error:
        raise CheckpointError(_refusal(directory.path / name, content, error)) from error


class _EmptyOnMeta(TorchFunctionMode):
    """Make what ``torch.empty`` returns on meta; a layer's experts may exceed a host's memory.

    Also what ``torch.zeros`` returns, where no buffer is so large.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.empty, torch.zeros) and kwargs.get("device") is None:
            on_meta = func(*args, **{**kwargs, "device": "meta"})
            if func is torch.empty or on_meta.numel() >= _LARGE:
                return on_meta
        return func(*args, **kwargs)


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Let models be built with real buffers, and with parameters that take no memory."""
    with no_init_weights(), init_empty_weights(include_buffers=False), _EmptyOnMeta():
        yield


def build_on_meta(
    directory: Described,
    config: transformers.PreTrainedConfig,
    attn_implementation: str | None,
    dtype: torch.dtype | None = None,
) -> transformers.PreTrainedModel:
    """Build the unfilled model: parameters on meta, buffers real, weights tied as configured.

    Args:
        attn_implementation: as in HuggingFace; None for its choice.
        dtype: in which the class makes its buffers; None for that of the configuration.

    Raises:
        CheckpointError: no model can be built from the configuration; names file and value.
        Exception: transformers' own, where only the attention is at fault.
    """
    options = {"attn_implementation": attn_implementation, "dtype": dtype}
    kwargs = {name: value for name, value in options.items() if value is not None}
    try:
        with (
            torch.device("cpu"),
            parameters_on_meta(),
            called_by_this_package(),  # nothing of a new model is another's: nobody need look
        ):
            model = _auto_class(directory, config).from_config(config, **kwargs)
        model.tie_weights()
    except Exception as error:
        if attn_implementation is not None:
            forget_attention(config)
            build_on_meta(directory, config, None, dtype)
            raise  # the model can be built, but not with this attention
        path = directory.path / CONFIG_NAME
        raise CheckpointError(_refusal(path, directory.config, error)) from error
    return model


def names_in_model(model: transformers.PreTrainedModel, in_files: Iterable[str]) -> dict[str, str]:
    """Return, by their names in files, the names of tensors in a plain model of transformers.

    As those of LLaVA's decoder, of which files have older names. A name that transformers does not
    change, or whose tensor it would split or join with others, stays.
    """
    changes, known = get_model_conversion_mapping(model), model.state_dict()
    renamings = [each for each in changes if isinstance(each, WeightRenaming)]
    converters = [each for each in changes if isinstance(each, WeightConverter)]
    names, prefix = {}, model.base_model_prefix
    for name in in_files:
        renamed, converter = rename_source_key(name, renamings, converters, prefix, known)
        names[name] = renamed if converter is None else name
    return names


def names_when_saved(
    model: transformers.PreTrainedModel, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, str]:
    """Return, by their names in a plain model of transformers, those that it saves tensors under.

    A tensor that transformers would split or join with others keeps its name.

    Args:
        shapes: of the full tensors by their names in the model.
    """
    tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    saved = revert_weight_conversion(model, dict(tensors))
    names = {id(tensor): name for name, tensor in saved.items()}
    return {name: names.get(id(tensor), name) for name, tensor in tensors.items()}


def _auto_class(directory: Described, config: transformers.PreTrainedConfig) -> Any:
    """Return the class of transformers that builds what the files say that they hold."""
    if is_of_images(directory.config) and config.get_text_config() is not config:
        return transformers.AutoModelForImageTextToText
    (name, *_) = [*(directory.config.get("architectures") or []), ""]
    for kind in ("SequenceClassification", "TokenClassification"):
        if str(name).endswith(f"For{kind}"):
            return getattr(transformers, f"AutoModelFor{kind}")
    if str(name).endswith("Model"):
        return transformers.AutoModel
    return transformers.AutoModelForCausalLM


def _fields(content: Any, prefix: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yield (name, dotted path, value) of all fields of a JSON value, also of inner ones."""
    if isinstance(content, dict):
        for name, value in content.items():
            yield name, prefix + name, value
            if name not in _LABELS:
                yield from _fields(value, f"{prefix}{name}.")


def _is_of_heads(per_layer_config: Any) -> bool:
    """Return whether layers differ in nothing but their heads, as Gemma 4's."""
    layers = per_layer_config.values() if isinstance(per_layer_config, dict) else [None]
    return all(isinstance(own, dict) and {*own} <= {*_OF_A_LAYER} for own in layers)


def _without(content: Any, names: Collection[str]) -> Any:
    """Return a copy of a JSON value without the fields of some names."""
    if not isinstance(content, dict):
        return content
    return {name: _without(value, names) for name, value in content.items() if name not in names}


def _problems(content: dict[str, Any], num_tensors: int) -> Iterator[str]:
    """Yield what is wrong with fields that decide about time, memory and code, in words."""
    for name, where, value in _fields(content):
        number = value if type(value) is int else None
        if name in _REFUSED and value not in (None, False):
            yield f"{where} is {shown(value)}: {_REFUSED[name]}"
        elif name == "per_layer_config" and value and not _is_of_heads(value):
            yield (
                f"{where} is {shown(value)}: layers may differ in {' and '.join(_OF_A_LAYER)} alone"
            )
        elif name in _IMPLEMENTATIONS and "/" in str(value):
            yield (
                f"{where} is {shown(value)}, code of a repository, which a file cannot choose; "
                "remove it, or pass attn_implementation= to px.from_pretrained"
            )
        elif name in _LABELS:
            sized = isinstance(value, (dict, list, str))
            length = number if name == "num_labels" else len(value) if sized else None
            if length is not None and not 0 <= length <= _MAX_LABELS:
                yield f"{where} asks for {shown(length)} labels, of which {_MAX_LABELS} may be"
        elif name == "vocab_size":
            if number is not None and not 0 < number < 2**31:
                yield f"{where} is {shown(number)}, which no vocabulary has"
        elif name in ("dtype", "torch_dtype"):
            dtype = getattr(torch, value, None) if isinstance(value, str) else None
            known = isinstance(dtype, torch.dtype) and dtype.is_floating_point
            if value is not None and not known:
                yield f"{where} is {shown(value)}, but parameters are floating-point"
        elif number is not None and re.fullmatch("(num_hidden_|num_)?layers", name):
            if number > num_tensors:
                yield f"{where} is {shown(number)}, but there are {num_tensors} tensors"
        elif number is not None and _SIZE.fullmatch(name) and number > _MAX_SIZE:
            yield f"{where} is {shown(number)}, more than the {_MAX_SIZE} that a size may be"
        if name in _AT_LEAST_ONE and number is not None and number < 1:
            yield f"{where} is {shown(number)}, but must be at least 1"


def _refusal(path: Path, content: dict[str, Any], error: Exception) -> str:
    """Return the error text for a file that transformers refuses; it names an unknown value."""
    text = f"{path}: transformers refuses it: {type(error).__name__}: {error}"
    if isinstance(error, KeyError):
        unknown = (where for _, where, value in _fields(content) if [value] == [*error.args])
        text += "".join(f"; it is the value of {where}" for where in unknown)
    return text
