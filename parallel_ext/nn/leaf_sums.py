"""Gradients of leaves under FSDP: each dp rank sums its rows of them over the tree of leaves."""

from __future__ import annotations

import torch

from parallel_ext.sharding.tree import Node, push


class LeafSums:
    """The sums over the leaves of a batch of what FSDP shards, for the rows of this dp rank.

    FSDP is handed the sums in the last round of leaves; before, it is handed zeros.

    Args:
        dp_size: the ranks that run one leaf each in a round.
    """

    def __init__(self, dp_size: int) -> None:
        self._dp_size = dp_size
        self.reset()

    def reset(self) -> None:
        """Forget all leaves."""
        self._first: int | None = None  # leaf of the round that is running
        self._count = 0
        self._nodes: dict[object, list[Node]] = {}
        self._had: set[object] = set()  # in this round

    def begin_round(self, first: int, count: int) -> None:
        """Let gradients be those of a round of leaves.

        Args:
            first: number of the round's first leaf; each dp rank runs the next one. Those beyond
                the last leaf do not count.
            count: of all leaves.
        """
        self._first, self._count, self._had = first, count, set()

    def check_running(self) -> None:
        """Raise a RuntimeError unless a round is running, before an exchange of gradients."""
        if self._first is None:
            raise RuntimeError(
                "under px.Invariant and px.data_parallel a backward runs in px.train_leaves, or in "
                "px.leaves by its backward(loss)"
            )

    def add(self, key: object, rows: torch.Tensor, total: torch.Tensor) -> None:
        """Add gradients of one backward of each dp rank.

        Args:
            key: of the parameters; each once in a round.
            rows: [dp, n], for this rank's rows, what each dp rank has computed.
            total: [n], receives their sum over all leaves, in the last round.

        Raises:
            RuntimeError: these parameters had their gradients in this round.
        """
        if key in self._had:
            raise RuntimeError(
                "leaves: under px.data_parallel a leaf has one backward, in which FSDP sums each "
                "gradient once; add its losses before, and call gradient_checkpointing_enable("
                '{"use_reentrant": False})'
            )
        self._had.add(key)
        nodes = self._nodes.setdefault(key, [])
        for leaf, gradient in enumerate(rows, self._first):
            if leaf < self._count:  # cloned, so that nothing holds on to ``rows``
                push(nodes, (leaf, 1, gradient.clone()), self._count, torch.Tensor.add_)
        total.zero_()
        if self._first + self._dp_size >= self._count:
            ((_, _, of_all),) = nodes
            total.copy_(of_all)
            del self._nodes[key]
