"""Count a layer's forwards, and know which one is running, also when backward recomputes it."""

from __future__ import annotations

from collections import OrderedDict

import torch

_REMEMBERED = 128  # forwards of a layer that a backward may still recompute


class ForwardCounter:
    """A counter of the forwards of one layer, from 1 on, that knows one that is recomputed.

    Each forward takes a random number out of torch's generator. Checkpointing puts the generator
    back before it recomputes, so that the same number comes up again and finds its forward; no
    other random number depends on it, and ranks need not have equal seeds.

    Attributes:
        count: of the forwards so far; those of all leaves of a batch are one.
        first_row: of the leaf that is running, in its batch; None outside of leaves.
    """

    def __init__(self) -> None:
        self.count = 0
        self.first_row: int | None = None
        self._number_of: OrderedDict[int, int] = OrderedDict()

    def restart(self, count: int) -> None:
        """Number the next forward ``count + 1``, and forget the forwards that ran before."""
        self.count = count
        self._number_of.clear()

    def number(self, what: str) -> int:
        """Return the number of the forward that is running.

        Args:
            what: what must be the same when it is recomputed, for the error.

        Raises:
            RuntimeError: a backward recomputes a forward whose random state was not kept.
        """
        if self.first_row is not None:
            return self.count
        drawn = int(torch.randint(2**63 - 1, ()))
        if drawn not in self._number_of:
            if torch._C._current_graph_task_id() != -1:
                raise RuntimeError(
                    f"{what}: a layer is recomputed in backward with another random state than in "
                    "its forward, so it could differ; checkpoint with preserve_rng_state=True, "
                    "which is the default"
                )
            self.count += 1
            self._number_of[drawn] = self.count
            if len(self._number_of) > _REMEMBERED:
                self._number_of.popitem(last=False)
        return self._number_of[drawn]
