"""Private names of PEFT for which it has no public ones; tried with PEFT 0.21.

They stand here and nowhere else in the package; ``docs/internals.md`` says what each is needed for.
"""

from __future__ import annotations

from collections.abc import Mapping

import peft
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn


def register_layers(
    config: peft.LoraConfig, layers: Mapping[type[nn.Module], type[nn.Module]]
) -> None:
    """Let PEFT put a layer of ours around each module of these classes."""
    config._register_custom_module(layers)


def move_to_base(layer: BaseTunerLayer, adapter_name: str) -> None:
    """Move a new adapter to the device of the layer's base, and to its dtype."""
    layer._move_adapter_to_device_of_base_layer(adapter_name)
