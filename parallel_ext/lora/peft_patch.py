"""PEFT's own classes and functions, extended to parallel models."""

from __future__ import annotations

import peft
import peft.optimizers
from peft.tuners.tuners_utils import BaseTuner
from peft.utils import ModulesToSaveWrapper, TrainableTokensWrapper, hotswap, save_and_load
from torch import nn

from parallel_ext.checkpoint.source import register_source
from parallel_ext.interplay.refusals import Refusal, Where, register
from parallel_ext.lora import files, inject, merge, tokens
from parallel_ext.lora.checkpoint_source import adapter_contents
from parallel_ext.lora.config import LoraConfig
from parallel_ext.nn.extended import extend

_SHARDS = "it needs full tensors; use peft on a model in one process"
_LORA = "only LoRA is supported: peft.get_peft_model(model, px.LoraConfig(...))"

_REFUSALS = [
    Refusal("peft:PeftMixedModel.__init__", _LORA, Where.ALWAYS),
    Refusal("peft:AdaptionPromptModel.__init__", _LORA, Where.ALWAYS),
    Refusal(
        "peft:PeftModel.push_to_hub",
        "model.save_pretrained writes PEFT's directory, called by all ranks; upload it from one",
        Where.RANKS,
    ),
    *(
        Refusal(f"peft:{name}", _SHARDS)
        for name in (
            *("convert_to_lora", "save_as_lora", "create_arrow_model", "find_kappa_target_modules"),
            *("get_eva_state_dict", "initialize_lora_eva_weights", "preprocess_loraga"),
            "replace_lora_weights_loftq",
        )
    ),
    Refusal("peft.utils.hotswap:prepare_model_for_compiled_hotswap", _SHARDS),
    Refusal("peft.optimizers:create_riemannian_optimizer", "use torch's AdamW or SGD"),
]


def extend_peft() -> None:
    """Let PEFT's classes serve parallel models too; further calls change nothing."""
    peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType.LORA] = LoraConfig
    extend(peft.get_peft_model, inject.get_peft_model)
    extend(peft.PeftModel.__init__, inject.start_model)
    extend(BaseTuner.__init__, inject.start_tuner)
    extend(peft.LoraModel.inject_adapter, inject.inject_adapter)
    extend(TrainableTokensWrapper.init_modules, tokens.put_inside)
    extend(TrainableTokensWrapper.adapter_state_dict, tokens.rows_to_save)
    extend(TrainableTokensWrapper.adapter_state_dict_load_map, tokens.rows_to_save)
    extend(ModulesToSaveWrapper.update, inject.copy_to_save)
    extend(peft.PeftModel.get_nb_trainable_parameters, inject.count_parameters)
    extend(peft.PeftModel.save_pretrained, files.save_pretrained)
    extend(peft.PeftModel.load_adapter, files.load_adapter)
    extend(save_and_load.has_valid_embedding_base_layer, files.is_embedding)
    extend(save_and_load.set_peft_model_state_dict, files.set_state_dict)
    extend(save_and_load.get_peft_model_state_dict, files.adapter_state_dict)
    extend(hotswap.hotswap_adapter_from_state_dict, files.swap_state_dict)
    extend(peft.LoraModel.merge_adapter, merge.merge_adapter)
    extend(peft.LoraModel.merge_and_unload, merge.merge_and_unload)
    extend(peft.LoraModel.unload, merge.unload)
    extend(peft.LoraModel.add_weighted_adapter, inject.add_weighted_adapter)
    register(_REFUSALS)
    register_source(adapter_contents)


def adapt_all_linears(model: nn.Module, r: int) -> peft.PeftModel:
    """Add an adapter of rank ``r`` on what "all-linear" reaches, in place, and freeze the rest."""
    extend_peft()
    return peft.get_peft_model(model, LoraConfig(r=r, target_modules="all-linear"))
