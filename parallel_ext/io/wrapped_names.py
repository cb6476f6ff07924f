"""Names of tensors that begin as those of a module around the model, which was saved with it."""

from __future__ import annotations

from collections.abc import Collection

_WRAPPERS = {
    "module.": "was saved with DistributedDataParallel around it; save model.module instead",
    "_orig_mod.": "was saved with torch.compile around it; save model._orig_mod instead",
    "base_model.model.": "was saved with PEFT around it; save what merge_and_unload() returns, or "
    "the adapter by save_pretrained",
}


def wrapped_hint(found: Collection[str], expected: Collection[str]) -> str:
    """Say what was around a model when it was saved, by the names found and expected; or nothing.

    Example:
        >>> wrapped_hint(["module.lm_head.weight"], ["lm_head.weight"])[:40]
        'The names begin with module.: the model '
    """
    for prefix, how in _WRAPPERS.items():
        if {f"{prefix}{name}" for name in expected} & set(found):
            return f"The names begin with {prefix}: the model {how}"
    return ""
