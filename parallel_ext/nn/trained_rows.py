"""Rows of embedding and output head that are trained while all others are frozen."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from parallel_ext import ops
from parallel_ext.ops.group import Range


@dataclass(frozen=True)
class TrainedRows:
    """Values that take the places of some rows of a table [V, H] in a forward.

    Attributes:
        ids: [k] int64, global, ascending: which rows.
        places: [k] int64: where in ``values`` each of them is.
        values: [k, H], which every rank holds whole; a rank computes the part of their gradient
            that comes through its own rows, or its own tokens.
        own: which of ``ids``, as a range of indices, are rows of this rank.
        first: the id of this rank's first row.
    """

    ids: torch.Tensor
    places: torch.Tensor
    values: torch.Tensor
    own: Range
    first: int

    def to(self, device: torch.device) -> TrainedRows:
        """Return them with their indices on a device."""
        return replace(self, ids=self.ids.to(device), places=self.places.to(device))

    def in_table(self, shard: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows [R, H] of the table, with these among them."""
        index, values = self._own_rows()
        return shard.index_copy(0, index, values.to(shard.dtype))

    def _own_rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        own = slice(*self.own)
        return self.ids[own] - self.first, self.values.index_select(0, self.places[own])

    def in_logits(
        self, logits: torch.Tensor, hidden: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return this rank's logits [..., R] of hidden states [..., H], with those of these rows.

        It copies no table, as decoding would for each token. Not for training.
        """
        index, values = self._own_rows()
        bias = None if bias is None else bias[index]
        added = functional.linear(hidden, values.to(hidden.dtype), bias)
        return logits.index_copy(-1, index, added.to(logits.dtype))

    def looked_up(
        self,
        ids: torch.Tensor,
        rows: torch.Tensor,
        vocab_range: Range | None,
        without_gradient: int | None,
    ) -> torch.Tensor:
        """Return rows [..., H] that were looked up in the table, with these among them.

        Args:
            ids: [...] int64, those that were looked up.
            rows: what the table has of them.
            vocab_range: of the ids through which this rank has gradients; None for all of them.
            without_gradient: an id whose row gets none, or None.
        """
        index = torch.searchsorted(self.ids, ids).clamp(max=len(self.ids) - 1)
        found = (self.ids[index] == ids).unsqueeze(-1)
        values = ops.vocab_embedding(self.places[index], self.values, len(self.values), 0)
        values = values.to(rows.dtype)
        trained = found
        if vocab_range is not None:
            start, stop = vocab_range
            trained = trained & ((ids >= start) & (ids < stop)).unsqueeze(-1)
        if without_gradient is not None:
            trained = trained & (ids != without_gradient).unsqueeze(-1)
        if trained is not found:
            values = torch.where(trained, values, values.detach())
        return torch.where(found, values, rows)


def with_rows(shard: torch.Tensor, trained: TrainedRows | None) -> torch.Tensor:
    """Return this rank's rows [R, H] of a table, with those in their places that are trained."""
    return shard if trained is None else trained.in_table(shard)
