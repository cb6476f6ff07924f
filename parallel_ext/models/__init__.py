"""The architectures that can be spread over ranks, each a table of module names."""

from parallel_ext.models.llama import LLAMA
from parallel_ext.models.mixtral import MIXTRAL
from parallel_ext.models.qwen3_moe import QWEN3_MOE
from parallel_ext.models.table import ModelTable

TABLES: dict[str, ModelTable] = {table.model_type: table for table in (LLAMA, MIXTRAL, QWEN3_MOE)}
"""By ``config.model_type``."""

ON_DEMAND = {"cogagent": "parallel_ext.models.cogagent"}
"""``config.model_type`` -> what teaches it to transformers, and adds its table, when imported."""
