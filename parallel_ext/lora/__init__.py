"""LoRA on a parallel model: PEFT's configuration and files; factors sharded with the base."""

from parallel_ext.lora.config import LoraConfig
from parallel_ext.lora.peft_patch import adapt_all_linears, extend_peft

__all__ = ["LoraConfig", "adapt_all_linears", "extend_peft"]
