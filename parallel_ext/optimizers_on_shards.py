"""Optimizers that look at more than single elements are refused where a parameter is cut."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from parallel_ext.sharded import parameters_cut_over_groups

# By the name of their class, since transformers has an Adafactor, too.
_INSTEAD = {
    "Adafactor": "use px.Adafactor",
    "Muon": "use torch's AdamW or SGD, or px.Adafactor",
    "LBFGS": "use torch's AdamW or SGD, or px.Adafactor",
}


def _refuse(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    names = [cls.__name__ for cls in type(optimizer).__mro__ if cls.__name__ in _INSTEAD]
    if not names or getattr(optimizer, "of_whole_tensors", False):
        return
    layouts = {id(parameter): at for parameter, at in parameters_cut_over_groups()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if (at := layouts.get(id(parameter))) is not None:
                raise RuntimeError(
                    f"{type(optimizer).__name__} takes norms and means of what one rank holds, but "
                    f"{at.name} is cut: rank 0 holds {at.describe(0)}; its steps would not be "
                    f"those of one process; {_INSTEAD[names[0]]}"
                )


register_optimizer_step_pre_hook(_refuse)
