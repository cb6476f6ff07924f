"""CogAgent-18B on transformers 5; importing this folder registers it with the Auto classes."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoProcessor

from parallel_ext import models
from parallel_ext.models.cogagent.configuration import CogAgentConfig
from parallel_ext.models.cogagent.modeling import (
    CogAgentForCausalLM,
    CogAgentModel,
    CogAgentPreTrainedModel,
)
from parallel_ext.models.cogagent.processing import CogAgentProcessor, Conversation
from parallel_ext.models.cogagent.published import PUBLISHED_COGAGENT
from parallel_ext.models.cogagent.spec import COGAGENT
from parallel_ext.models.cogagent.tokens import (
    LANGUAGE,
    VISION,
    build_position_ids,
    vision_expert_mask,
)

__all__ = [
    "LANGUAGE",
    "VISION",
    "CogAgentConfig",
    "CogAgentForCausalLM",
    "CogAgentModel",
    "CogAgentPreTrainedModel",
    "CogAgentProcessor",
    "Conversation",
    "build_position_ids",
    "vision_expert_mask",
]

models.SPECS[COGAGENT.model_type] = COGAGENT
models.PUBLISHED[COGAGENT.model_type] = PUBLISHED_COGAGENT
AutoConfig.register("cogagent", CogAgentConfig, exist_ok=True)
AutoModel.register(CogAgentConfig, CogAgentModel, exist_ok=True)
AutoModelForCausalLM.register(CogAgentConfig, CogAgentForCausalLM, exist_ok=True)
AutoProcessor.register(CogAgentConfig, CogAgentProcessor, exist_ok=True)
