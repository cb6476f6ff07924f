"""The architectures that can be spread over ranks, each a table of module names."""

from parallel_ext.models.llama import LLAMA
from parallel_ext.models.table import ModelTable

TABLES: dict[str, ModelTable] = {LLAMA.model_type: LLAMA}
"""By ``config.model_type``."""
