"""Rows of embedding and output head that are trained while all others are frozen."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from parallel_ext import ops
from parallel_ext.ops.group import Range


class TrainedRows(NamedTuple):
    """Values that take the places of some rows of a table [V, H] in a forward.

    Attributes:
        ids: [k] int64, global, ascending: which rows.
        places: [k] int64: where in ``values`` each of them is.
        values: [k, H], which every rank holds whole; a rank computes the part of their gradient
            that comes through its own rows, or its own tokens.
        own: which of ``ids``, as a range of indices, are rows of this rank.
    """

    ids: torch.Tensor
    places: torch.Tensor
    values: torch.Tensor
    own: Range

    def to(self, device: torch.device) -> TrainedRows:
        """Return them with their indices on a device."""
        return self._replace(ids=self.ids.to(device), places=self.places.to(device))

    def in_table(self, shard: torch.Tensor, first: int) -> torch.Tensor:
        """Return this rank's rows [R, H] of the table, which begin at row ``first``, with these."""
        own = slice(*self.own)
        values = self.values.index_select(0, self.places[own]).to(shard.dtype)
        return shard.index_copy(0, self.ids[own] - first, values)

    def in_logits(
        self, logits: torch.Tensor, hidden: torch.Tensor, bias: torch.Tensor | None, first: int
    ) -> torch.Tensor:
        """Return this rank's logits [..., R] of hidden states [..., H], with those of these rows.

        It copies no table, as decoding would for each token. Not for training.
        """
        own = slice(*self.own)
        index = self.ids[own] - first
        values = self.values.index_select(0, self.places[own]).to(hidden.dtype)
        added = functional.linear(hidden, values, None if bias is None else bias[index])
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


def table_of(module: nn.Module, trained: TrainedRows | None) -> torch.Tensor:
    """Return the rows [R, H] of an embedding or head, with those that are trained if there are."""
    if trained is None:
        return module.weight
    return trained.in_table(module.weight, module.vocab_range[0])
