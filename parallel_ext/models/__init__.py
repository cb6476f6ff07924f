"""The architectures that can be spread over ranks, each a table of module names."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from parallel_ext.models.llama import LLAMA
from parallel_ext.models.mixtral import MIXTRAL
from parallel_ext.models.qwen3_moe import QWEN3_MOE
from parallel_ext.models.spec import ModelTable

TABLES: dict[str, ModelTable] = {table.model_type: table for table in (LLAMA, MIXTRAL, QWEN3_MOE)}
"""By ``config.model_type``."""

OWN = {"cogagent": ("CogAgentForCausalLM", "parallel_ext.models.cogagent")}
"""``config.model_type`` -> the class of an architecture whose code is ours, and where it is.

Its table stands in :data:`TABLES` once that is imported.
"""

PUBLISHED: dict[str, ModelTable] = {}
"""By ``model_type`` as well: for classes with a name in :data:`OWN` that others publish."""


def learn(config: Mapping[str, Any]) -> str | None:
    """Import the code for a ``config.json`` whose architecture is implemented in this package.

    Returns:
        Its ``model_type``, which published files do not always name; None if it is not ours.
    """
    for model_type, (architecture, module) in OWN.items():
        nameless = not config.get("model_type")
        if config.get("model_type") == model_type or (
            nameless and architecture in (config.get("architectures") or [])
        ):
            importlib.import_module(module)
            return model_type
    return None
