"""Find out from a configuration alone which tensors the files of a model hold, in one process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import transformers

from parallel_ext.distributed.errors import CheckpointError
from parallel_ext.io.hf_reader import HFDirectory
from parallel_ext.parallel.beside import layout_with_beside
from parallel_ext.parallel.configuration import (
    Described,
    build_on_meta,
    configurations,
    is_of_images,
    names_in_model,
    names_when_saved,
)
from parallel_ext.parallel.plan import layout_of
from parallel_ext.parallel.validate import decoder_in, spec_for
from parallel_ext.sharding.layout import ModelLayout


@dataclass(frozen=True)
class NoFiles:
    """The configuration of a model and the shapes of its tensors, whose files are not there yet."""

    path: Path  # of the folder that the configuration was read from, for errors
    config: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    generation_config: None = None


def expected(model: Described, vocab_size: int | None = None) -> tuple[ModelLayout, list[str]]:
    """Return where the tensors of the configured model lie in files, and which are by vocabulary.

    The first of the latter is the embedding. The names are those that ``save_pretrained`` writes.
    """
    plain = build_on_meta(model, configurations(model, vocab_size)[0], None)
    if plain.config.get_text_config() is plain.config:
        spec = spec_for(plain)
        return layout_of(plain, spec, 1).in_files(), spec.vocabulary
    layout, vocabulary = _around_decoder(plain, model.path)
    shapes = {name: each.shape for name, each in layout.tensors.items()}
    shapes |= {alias: layout[alias].shape for alias in layout.tied}
    names = names_when_saved(plain, shapes)
    tied = {names[alias]: names[name] for alias, name in layout.tied.items()}
    in_files = replace(layout.with_names_in_files(names), tied=tied).in_files()
    return in_files, [names.get(name, name) for name in vocabulary]


def check_files(model: HFDirectory) -> None:
    """Raise a CheckpointError unless the files hold exactly the tensors of a model we serve."""
    model.check(*expected(model))


def names_for_files(model: Described) -> dict[str, str]:
    """Return the names that files have for tensors, by those in a model of transformers.

    Only models of images have others there. A name that is one of files already stays.
    """
    if not is_of_images(model.config):
        return {}
    plain = build_on_meta(model, configurations(model, None)[0], None)
    in_model = names_in_model(plain, model.shapes)
    shapes = {name: tuple(each.shape) for name, each in plain.state_dict().items()}
    saved = names_when_saved(plain, shapes)
    return {name: saved[own] for name, own in in_model.items() if own in saved}


def _around_decoder(
    model: transformers.PreTrainedModel, path: Path
) -> tuple[ModelLayout, list[str]]:
    """Return the layout of a model of images by the names in it, and its names by vocabulary."""
    decoder = decoder_in(model)
    if decoder is None:
        text = model.config.get_text_config().model_type
        raise CheckpointError(
            f"{path}: {type(model).__name__} holds a {text!r}, "
            "which is not served inside of another model"
        )
    prefix = next(f"{name}." for name, each in model.named_modules() if each is decoder)
    spec = spec_for(decoder)
    inside = layout_of(decoder, spec, 1)
    return layout_with_beside(model, prefix, inside), [prefix + name for name in spec.vocabulary]
