"""What stands for the logits that a training forward does not make: it says so when touched."""

from __future__ import annotations

from typing import Any, NoReturn

_WHY = (
    "training with labels makes no logits: output head and loss are one op. Evaluate in eval mode, "
    "call the model without labels, or pass training_logits=True to px.parallelize or "
    "px.from_pretrained"
)


class NoLogits:
    """The ``logits`` of a training forward with labels: none, and an error for whoever uses them.

    It is false, and equal to None. It stands beside the items of the output, which have no logits,
    so that what goes through these (accelerate, PEFT) does not meet it. In a tuple it has their
    place.
    """

    def __repr__(self) -> str:
        return f"None ({_WHY})"

    def __bool__(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return other is None or isinstance(other, NoLogits)

    __hash__ = None  # type: ignore[assignment]

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"logits.{name}: {_WHY}")

    def _refuse(self, *_: Any) -> NoReturn:
        raise TypeError(f"logits: {_WHY}")

    __getitem__ = __iter__ = __len__ = __call__ = __float__ = __array__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _refuse
    __matmul__ = __rmatmul__ = __neg__ = __lt__ = __gt__ = __le__ = __ge__ = _refuse

    @classmethod
    def __torch_function__(cls, *_: Any) -> NoReturn:
        raise TypeError(f"logits: {_WHY}")
