"""Imitate torch.autocast on the meta device, for which torch has none."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_LOWER = frozenset(
    [
        *("linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "baddbmm"),
        *("einsum", "conv1d", "conv2d", "scaled_dot_product_attention"),
        *("column_linear", "column_linears", "row_linear", "lora_linear"),
        *("linear_vocab_cross_entropy", "moe_linear", "moe_linear_on_device", "moe_lora_linear"),
    ]
)
"""Functions of torch, and ops of this package, that run in the lower precision."""

_KEPT = {"lora_linear": (2, 3), "moe_lora_linear": (2, 3)}
"""Positions of arguments of those that are not cast: the factors, which the kernels cast."""

_FP32 = frozenset(["layer_norm", "rms_norm", "pow", "rsqrt", "exp", "softplus"])
"""Functions that run in fp32 on a GPU; the CPU runs some of them in the dtype of the input."""


class MetaAutocast(TorchFunctionMode):
    """Cast the arguments of functions as ``torch.autocast`` does on a GPU.

    Attributes:
        copies: in that dtype, of the weights that are trained, by their ids, in the order in which
            they were needed; each serves until the context ends.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype
        self.copies: dict[int, torch.Tensor] = {}

    def __exit__(self, *error: Any) -> None:
        self.copies.clear()
        super().__exit__(*error)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", None)
        # Models compute the angles of rotary embeddings without gradients, and without autocast.
        if name in _LOWER and torch.is_grad_enabled():
            kept = _KEPT.get(name, ())
            args = tuple(
                arg if place in kept else self._lower(arg) for place, arg in enumerate(args)
            )
            kwargs = {key: self._lower(value) for key, value in kwargs.items()}
        elif name in _FP32:
            args = tuple(arg.float() if _is_cast(arg) else arg for arg in args)
        return func(*args, **kwargs)

    def _lower(self, value: Any) -> Any:
        if not _is_cast(value) or value.dtype == self._dtype:
            return value
        if not (value.is_leaf and value.requires_grad and value.dtype == torch.float32):
            return value.to(self._dtype)
        copy = self.copies.get(id(value))
        if copy is None:
            copy = self.copies[id(value)] = value.to(self._dtype)
        return copy


def _is_cast(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.dtype != torch.float64
    )
