"""The fused loss: the output head hands over hidden states, and the loss multiplies them itself.

What a forward with labels does, from the ids to the loss::

    forward.forward ── LossCall(fused) ─────────────────────────────┐
      class's own forward, without labels                           │
        VocabParallelHead: hidden [..., H] ── fused ──> LossCall.hand_over: head, hidden
                           │  else, where others see them           │
                           ├─ logits [..., V], of all ranks ────────┤
                           │  else                                  │
                           └─ logits [..., R], this rank's columns ─┤
                                                                    v
                                              LossCall.loss: causal_lm_loss of
                                                fused: hidden, head.weight, head.bias
                                                else:  logits

Fused, no rank ever holds its logits: ``linear_vocab_cross_entropy`` makes them tile by tile.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from parallel_ext import ops
from parallel_ext.distributed.mesh import Mesh
from parallel_ext.nn.loss import causal_lm_loss
from parallel_ext.ops.group import Range
from parallel_ext.sharding._torch_private import has_global_hook, is_compiled, output_hooks

if TYPE_CHECKING:
    from parallel_ext.nn.vocab import TiedHead, VocabParallelHead

_NO_LOGITS = (
    "training with labels makes no logits: output head and loss are one op. Evaluate in eval mode, "
    "call the model without labels, or pass training_logits=True to px.parallelize or "
    "px.from_pretrained"
)

_call: ContextVar[LossCall | None] = ContextVar("parallel_ext_loss_call", default=None)


class LossCall:
    """What the output head returns inside one forward, and the loss of that.

    A property of the call and not of the head, which wrappers copy.

    Args:
        fused: whether a :class:`VocabParallelHead` returns the hidden states that it is called
            with; it returns its own columns of the logits otherwise.
        why_not: why it is not fused although nobody has asked for logits.
        shared: whether forwards without labels inside of it are meant as well.
        changes: what the model's class does to the logits, as options of the loss.
        takes_own_tokens: whether the head may be given the hidden states of its rank's tokens, of
            ranks that keep tokens of their own.
        seen_by: who of others sees the logits, which the head then gathers; None where nobody
            does, as where it is fused.
        model: around a parallel decoder, whose forward it is; None of a parallel model's own.

    Attributes:
        tokens: of a sequence, how many each rank has, if the head is given those of its rank.
        weights: weight and bias of the head that has returned hidden states; None if none has, as
            one with an adapter does not.
    """

    tokens: list[int] | None = None

    def __init__(
        self,
        fused: bool,
        why_not: str | None = None,
        shared: bool = False,
        changes: Mapping[str, float] | None = None,
        takes_own_tokens: bool = False,
        seen_by: str | None = None,
        model: nn.Module | None = None,
    ) -> None:
        self.seen_by, self.model = seen_by, model
        self.fused, self.why_not, self.shared = fused, why_not, shared
        self.takes_own_tokens = fused and takes_own_tokens
        self._changes = changes or {}
        self.weights: tuple[torch.Tensor, torch.Tensor | None] | None = None
        self._hidden: torch.Tensor | None = None
        self._of_head: dict[str, Any] = {}  # options of the loss

    def hand_over(
        self,
        head: VocabParallelHead | TiedHead,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        adapter: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Keep a head and its hidden states for the loss, and return the latter.

        Args:
            head: with blocks where there is an adapter.
            hidden: [..., H].
            weight: [R, H], what the head multiplies by; in ZeRO there for its forward alone.
            adapter: [..., R] and this rank's rows [.., R], whose product is added to the logits.
        """
        self.weights, self._hidden = (weight, head.bias), hidden
        self._of_head = {"blocks": head.blocks, "adapter": adapter}
        return hidden

    def loss(
        self,
        output: torch.Tensor,
        labels: torch.Tensor,
        vocab_size: int,
        vocab_range: Range,
        mesh: Mesh,
        **options: Any,
    ) -> torch.Tensor:
        """Compute :func:`causal_lm_loss` from what a model has returned as its logits.

        Raises:
            RuntimeError: that is not what the head has handed over.
        """
        if self.seen_by is not None:  # all are on every rank
            vocab_range, options["tp"] = (0, vocab_size), ops.ALONE
        if self.weights is not None:
            options |= {**self._of_head, "tokens": self.tokens}
            if self._changes:  # the class has changed the hidden states that it took for logits
                output, options = self._hidden, {**options, **self._changes}
            elif output is not self._hidden:
                raise RuntimeError(
                    "the forward of this model's class changes what the output head returns, which "
                    "in training are hidden states; parallelize(..., fused_loss=False) gives it "
                    "logits"
                )
        inputs = output, labels, vocab_size, vocab_range, mesh
        return causal_lm_loss(*inputs, head=self.weights, **options)


def without_logits(output: Any, fields: Mapping[str, Any]) -> Any:
    """Return an output with other fields, whose ``logits`` raise and say why there are none."""
    trained = type(output)(**fields)
    object.__setattr__(trained, "logits", NoLogits())  # beside the items
    return trained


class NoLogits:
    """The ``logits`` of a training forward with labels: none, and an error for whoever uses them.

    It is false, and equal to None. It stands beside the items of the output, which have no logits,
    so that what goes through these (accelerate, PEFT) does not meet it. In a tuple it has their
    place.
    """

    def __repr__(self) -> str:
        return f"None ({_NO_LOGITS})"

    def __bool__(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return other is None or isinstance(other, NoLogits)

    __hash__ = None  # type: ignore[assignment]

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"logits.{name}: {_NO_LOGITS}")

    def _refuse(self, *_: Any) -> NoReturn:
        raise TypeError(f"logits: {_NO_LOGITS}")

    __getitem__ = __iter__ = __len__ = __call__ = __float__ = __array__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _refuse
    __matmul__ = __rmatmul__ = __neg__ = __lt__ = __gt__ = __le__ = __ge__ = _refuse

    @classmethod
    def __torch_function__(cls, *_: Any) -> NoReturn:
        raise TypeError(f"logits: {_NO_LOGITS}")


@contextmanager
def running(call: LossCall | None) -> Iterator[None]:
    """Let :func:`current_loss_call` return ``call`` inside the context.

    With None an outer call ends here, as of a model whose hook calls another one, unless it is
    ``shared``.
    """
    outer = _call.get()
    if call is None and outer is not None and outer.shared:
        call = outer
    token = _call.set(call)
    try:
        yield
    finally:
        _call.reset(token)


def current_loss_call() -> LossCall | None:
    """Return the :class:`LossCall` of the forward that is running, or None."""
    return _call.get()


def are_listened_to(modules: Iterable[nn.Module]) -> bool:
    """Return whether hooks of others than this package, transformers and PEFT see their outputs."""
    hooks = (hook for module in modules for hook in output_hooks(module))
    return has_global_hook() or any(map(is_of_others, hooks))


def is_of_others(hook: Any) -> bool:
    """Return whether a hook is of others than this package, transformers and PEFT."""
    return _package_of(hook) not in ("parallel_ext", "transformers", "peft")


def _package_of(hook: Any) -> str:
    return (getattr(hook, "__module__", None) or "").partition(".")[0]  # builtins have None


def why_not_fused(head: nn.Module) -> str | None:
    """Return what reads or changes the logits or the weight of an output head, or None."""
    return "there is a hook on all modules" if has_global_hook() else who_sees_logits(head)


def who_sees_logits(head: nn.Module) -> str | None:
    """Return what of others reads or changes what this output head returns, or None.

    The wrappers of torch.compile and PEFT hand on the attributes of what they wrap. Those of others
    would take hidden states for logits.
    """
    if not getattr(head, "makes_logits", False):
        return f"the output head is in a {type(head).__name__}"
    for module in head.modules():
        if any(_package_of(hook) != "parallel_ext" for hook in output_hooks(module)):
            return f"the output head has a hook on a {type(module).__name__}"
        if "forward" in vars(module) and not is_compiled(module):
            return f"the forward of a {type(module).__name__} in the output head was replaced"
    return None
