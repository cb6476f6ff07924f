"""LoRA on a parallel model: PEFT's configuration, names and files; factors cut like their base.

Importing it lets PEFT's own classes serve parallel models; ``px.parallelize`` does so.
"""

import peft

from parallel_ext.lora.config import LoraConfig
from parallel_ext.lora.extension import extend_peft

extend_peft()
peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType.LORA] = LoraConfig

__all__ = ["LoraConfig"]
