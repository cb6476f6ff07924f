"""Count a layer's forwards, and know which one is running, also when backward recomputes it."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from parallel_ext.nn.recomputation import once, watch_checkpoints
from parallel_ext.sharding._torch_private import disable_compiler, running_backward


class ForwardCounter:
    """A counter of the forwards of one layer, from 1 on, that knows one that is recomputed.

    Attributes:
        count: of the forwards so far; those of all leaves of a batch are one.
        first_row: of the leaf that is running, in its batch; None outside of leaves.
        rows: of that leaf; None where layers read other rows than these, as images or some tokens.
    """

    def __init__(self) -> None:
        watch_checkpoints()
        self.count = 0
        self.first_row: int | None = None
        self.rows: int | None = 0

    @disable_compiler
    def number(self, what: str) -> int:
        """Return the number of the forward that is running.

        Args:
            what: what must be the same when it is recomputed, for the error.

        Raises:
            RuntimeError: it runs in a backward that recomputes no known forward.
        """
        if self.first_row is not None:
            return self.count

        def next_number() -> int:
            if running_backward() != -1:
                raise RuntimeError(
                    f"{what}: a layer runs in backward, but nothing says which forward it "
                    "recomputes, so it could differ; checkpoint with torch.utils.checkpoint, or "
                    "wrap the function that is recomputed in parallel_ext.nn.Recomputable"
                )
            self.count += 1
            return self.count

        return once(self, next_number)


def forward_counters(model: nn.Module) -> Iterator[ForwardCounter]:
    """Yield the counters of all layers of ``model``."""
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, ForwardCounter):
                yield value
