"""The architectures that can be spread over ranks, each a table of module names."""

from parallel_ext.models.llama import LLAMA
from parallel_ext.models.mixtral import MIXTRAL
from parallel_ext.models.table import ModelTable

TABLES: dict[str, ModelTable] = {table.model_type: table for table in (LLAMA, MIXTRAL)}
"""By ``config.model_type``."""
