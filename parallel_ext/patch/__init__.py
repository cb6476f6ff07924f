"""From HuggingFace models to parallel ones, in memory or from files."""

from parallel_ext.patch.parallelize import parallelize
from parallel_ext.patch.pretrained import from_pretrained, full_state_dict

__all__ = ["from_pretrained", "full_state_dict", "parallelize"]
