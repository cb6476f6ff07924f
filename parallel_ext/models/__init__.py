"""The architectures that can be spread over ranks, each a spec of module names.

:func:`register` adds one of your own.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from parallel_ext.models.afmoe import AFMOE
from parallel_ext.models.deepseek import DEEPSEEK
from parallel_ext.models.ernie4_5_moe import ERNIE4_5_MOE
from parallel_ext.models.gemma import GEMMAS
from parallel_ext.models.gpt_oss import GPT_OSS
from parallel_ext.models.granite_moe import GRANITE_MOE, GRANITE_MOE_SHARED
from parallel_ext.models.hy_v3 import HUNYUAN_MOE, HY_V3
from parallel_ext.models.llama import DENSE
from parallel_ext.models.llama4 import LLAMA4_TEXT
from parallel_ext.models.minimax_m2 import MINIMAX_M2
from parallel_ext.models.mixtral import MIXTRAL
from parallel_ext.models.mixture_names import MixtureNames
from parallel_ext.models.qwen3_5 import NEWEST_QWEN
from parallel_ext.models.qwen_moe import QWEN_MOE
from parallel_ext.models.spec import ModelSpec
from parallel_ext.models.sublayers import AttentionNames, DeltaNetNames, RegionNames

__all__ = [
    "SPECS",
    "AttentionNames",
    "DeltaNetNames",
    "MixtureNames",
    "ModelSpec",
    "RegionNames",
    "register",
]

SPECS: dict[str, ModelSpec] = {
    spec.model_type: spec
    for spec in (
        *DENSE,
        *GEMMAS,
        *(MIXTRAL, *QWEN_MOE, *DEEPSEEK, HY_V3, HUNYUAN_MOE, AFMOE),
        *(GRANITE_MOE, GRANITE_MOE_SHARED),
        *(ERNIE4_5_MOE, GPT_OSS, LLAMA4_TEXT, MINIMAX_M2, *NEWEST_QWEN),
    )
}
"""The architectures that are served, by ``config.model_type``."""

OWN = {"cogagent": ("CogAgentForCausalLM", "parallel_ext.models.cogagent")}
"""``config.model_type`` -> the class of an architecture whose code is ours, and where it is.

Its spec stands in :data:`SPECS` once that is imported.
"""

PUBLISHED: dict[str, ModelSpec] = {}
"""Specs for the classes of others with a name in :data:`OWN`, by ``model_type``."""


def own_model_type(config: Mapping[str, Any]) -> str | None:
    """Return the ``model_type`` of a ``config.json`` whose architecture this package implements.

    Its code is imported. Published files do not always name the type; None if it is not ours.
    """
    for model_type, (architecture, module) in OWN.items():
        nameless = not config.get("model_type")
        if config.get("model_type") == model_type or (
            nameless and architecture in (config.get("architectures") or [])
        ):
            importlib.import_module(module)
            return model_type
    return None


def spec_of_text(config: Mapping[str, Any]) -> ModelSpec | None:
    """Return the spec of the decoder of text in the configuration of a model with images."""
    text = config.get("text_config")
    model_type = text.get("model_type") if isinstance(text, dict) else None
    return SPECS.get(model_type) if isinstance(model_type, str) else None


def why_unserved(model_type: object, text_type: object = None) -> str:
    """Return what to do about a ``model_type`` without a spec, for errors.

    ``text_type`` is that of the ``text_config`` in a configuration, if there is one.
    """
    if isinstance(text_type, str) and text_type in SPECS:
        return (
            f"; it holds a decoder, {text_type!r}: load the model with transformers, and pass that "
            "decoder, or its causal model, to px.parallelize, as docs/models.md says of images"
        )
    return "; px.register takes a spec of your own"


def register(spec: ModelSpec, *, replace: bool = False) -> None:
    """Let ``parallelize`` and ``from_pretrained`` serve the models that a spec describes.

    Every rank calls it with an equal spec, before the model is made; ``parallelize`` compares the
    specs of the ranks, and looks up all names in the model.

    Args:
        spec: of an architecture, known by its ``model_type``.
        replace: whether it may take the place of a spec with the same ``model_type``.

    Raises:
        TypeError: it is not a spec, or a field of it has a value of another type.
        ValueError: a path is empty, no sublayer says what is sharded, the ``model_type`` is that of
            code in this package, or there is another spec for it and ``replace`` is False.

    Example:
        >>> from dataclasses import replace
        >>> register(replace(SPECS["llama"], model_type="my_llama"))
        >>> del SPECS["my_llama"]
    """
    if not isinstance(spec, ModelSpec):
        raise TypeError(f"register: expected a px.models.ModelSpec, got {type(spec).__name__}")
    spec.check()
    if spec.model_type in OWN:
        raise ValueError(f"register: {spec.model_type!r} is a model of this package")
    known = SPECS.get(spec.model_type)
    if known is not None and known != spec and not replace:
        raise ValueError(
            f"register: there is another spec for model_type {spec.model_type!r}; pass replace=True"
        )
    SPECS[spec.model_type] = spec
