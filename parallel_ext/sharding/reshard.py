"""From the shards of the ranks to rows of the logical tensors, at the rank that wants them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from parallel_ext.distributed.control import ControlPlane
from parallel_ext.distributed.mesh import Mesh
from parallel_ext.ops.group import Range
from parallel_ext.sharding.layout import Box, Part, TensorLayout
from parallel_ext.sharding.slices import shard_views

STRIPE_BYTES = 8 << 20
"""Size of the pieces in which tensors are read, converted and sent."""


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor, without a copy."""
    if not tensor.is_contiguous():
        raise ValueError(f"a tensor of strides {tensor.stride()} has gaps between its bytes")
    # One element counts as contiguous whatever its stride, which a view as bytes does not take.
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    return memoryview(flat.view(torch.uint8).numpy())


class RowStripe(NamedTuple):
    """Consecutive rows (indices of dimension 0) of a logical tensor; a scalar is one row.

    Attributes:
        layout: of the tensor.
        start, stop: the rows, half-open.
    """

    layout: TensorLayout
    start: int
    stop: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the stripe's rows as a tensor."""
        return (self.stop - self.start, *self.layout.shape[1:]) if self.layout.shape else ()

    def overlap(self, box: Box) -> Range | None:
        """Return the rows that the stripe and a box share; None where they share no element."""
        first, last = box[0] if box else (0, 1)
        rows = max(self.start, first), min(self.stop, last)
        empty = rows[0] >= rows[1] or any(start == stop for start, stop in box[1:])
        return None if empty else rows


def row_ranges(shape: Sequence[int], row_bytes: int, start: int = 0) -> Iterator[Range]:
    """Yield ranges of rows, from ``start`` on, that take at most ``STRIPE_BYTES`` or are one row.

    Args:
        shape: of the tensor; one of a single number has one row.
        row_bytes: memory of a row.
        start: the first row that is wanted.
    """
    num_rows = shape[0] if shape else 1
    at_once = max(1, STRIPE_BYTES // max(1, row_bytes))
    for first in range(start, num_rows, at_once):
        yield first, min(first + at_once, num_rows)


def row_stripes(layout: TensorLayout, itemsize: int) -> list[RowStripe]:
    """Split all rows of a tensor into stripes of at most ``STRIPE_BYTES``, or of one row.

    Returns:
        Stripes in order; none for a tensor without elements.
    """
    if layout.numel == 0:
        return []
    row_bytes = math.prod(layout.shape[1:]) * itemsize
    return [RowStripe(layout, *rows) for rows in row_ranges(layout.shape, row_bytes)]


def part_views(
    shard: torch.Tensor, layout: TensorLayout, part: Part, rank: int
) -> Iterator[tuple[Box, torch.Tensor]]:
    """Yield the boxes that ``rank`` holds of a part, each with its place in the ``shard``."""
    for box, view in shard_views(shard, layout, rank):
        if (overlap := part.overlap(box)) is None:
            continue
        places = (slice(a - c, b - c) for (a, b), (c, _) in zip(overlap, box, strict=True))
        place = view[tuple(places)] if box else view
        yield part.inside(overlap), place[0] if part.index else place


def part_value(shard: torch.Tensor, layout: TensorLayout, part: Part, rank: int) -> torch.Tensor:
    """Return ``rank``'s shard of a part: a view of its ``shard`` of the whole if of one piece."""
    pieces = [view for _, view in part_views(shard, layout, part, rank)]
    if len(pieces) == 1:
        return pieces[0]
    at = part.layout(layout)
    return torch.cat(pieces, at.dim) if pieces else shard.new_empty(at.local_shape(rank))


def _sent(layout: TensorLayout, sender: int, receiver: int) -> list[Box]:
    """Return the boxes that ``sender`` alone sends to ``receiver``, which lacks them."""
    boxes = layout.primary_boxes(sender)
    if not boxes:  # as of most replicas
        return []
    at_receiver = set(layout.boxes(receiver))
    return [box for box in boxes if box not in at_receiver]


def is_needed(layout: TensorLayout, rank: int, receiver: int) -> bool:
    """Return whether a :class:`Swap` to ``receiver`` reads the shard of ``rank``."""
    return rank == receiver or bool(_sent(layout, rank, receiver))


def _place(stripe: RowStripe, box: Box, rows: torch.Tensor) -> torch.Tensor | None:
    """Return the part of the stripe's ``rows`` that ``box`` fills; None if there is none."""
    if (overlap := stripe.overlap(box)) is None:
        return None
    if not box:  # a scalar
        return rows
    columns = (slice(start, stop) for start, stop in box[1:])
    return rows[(slice(overlap[0] - stripe.start, overlap[1] - stripe.start), *columns)]


def _rows_in(stripe: RowStripe, box: Box, view: torch.Tensor) -> torch.Tensor | None:
    """Return the stripe's rows of a box, out of the ``view`` of the box; None if there are none."""
    if (overlap := stripe.overlap(box)) is None:
        return None
    return view[overlap[0] - box[0][0] : overlap[1] - box[0][0]] if box else view


class Swap:
    """An exchange that brings rows of logical tensors to the ranks that want them.

    Making it takes memory and may fail; :meth:`run` communicates. A rank that failed before the
    others run would leave them waiting, so :meth:`ControlPlane.run_on_all` belongs around each
    of the two.

    Every rank of the job makes and runs it with the same ``wanted``. Each element is sent once, or
    not at all where the rank that wants it holds it.

    Args:
        values: this rank's shard of every tensor that is wanted, by name; any device.
        wanted: for each rank its stripes; ranks behind the last want nothing.
        out: contiguous CPU tensors of the shapes of this rank's stripes, to be filled.
    """

    def __init__(
        self,
        values: Mapping[str, torch.Tensor],
        wanted: Sequence[Sequence[RowStripe]],
        out: Sequence[torch.Tensor],
        control: ControlPlane,
    ) -> None:
        self._control = control
        self._outgoing: list[tuple[int, memoryview]] = []
        self._incoming: list[tuple[int, memoryview]] = []
        self._strided: list[tuple[torch.Tensor, torch.Tensor]] = []
        for receiver, stripes in enumerate(wanted):
            for index, stripe in enumerate(stripes):
                shard = values[stripe.layout.name]
                if receiver == control.rank:
                    self._take_own(stripe, shard, out[index])
                    self._expect(stripe, out[index])
                else:
                    self._send(stripe, shard, receiver)

    def _take_own(self, stripe: RowStripe, shard: torch.Tensor, out: torch.Tensor) -> None:
        for box, view in shard_views(shard, stripe.layout, self._control.rank):
            if (rows := _rows_in(stripe, box, view)) is not None:
                _place(stripe, box, out).copy_(rows)

    def _send(self, stripe: RowStripe, shard: torch.Tensor, receiver: int) -> None:
        boxes = _sent(stripe.layout, self._control.rank, receiver)
        if not boxes:
            return
        for box, view in shard_views(shard, stripe.layout, self._control.rank):
            if box in boxes and (rows := _rows_in(stripe, box, view)) is not None:
                self._outgoing.append((receiver, bytes_of(rows.cpu().contiguous())))

    def _expect(self, stripe: RowStripe, out: torch.Tensor) -> None:
        parts = stripe.layout.primary_ranks.items()
        senders = dict.fromkeys(rank for box, rank in parts if stripe.overlap(box) is not None)
        for sender in senders:
            for box in _sent(stripe.layout, sender, self._control.rank):
                if (place := _place(stripe, box, out)) is None:
                    continue
                received = place if place.is_contiguous() else place.new_empty(place.shape)
                self._incoming.append((sender, bytes_of(received)))
                if received is not place:
                    self._strided.append((place, received))

    def run(self) -> None:
        """Exchange the rows; ``out`` is filled afterwards.

        Raises:
            PeerLostError: a rank did not do its part; see :meth:`ControlPlane.all_to_all_bytes`.
        """
        self._control.all_to_all_bytes(self._outgoing, self._incoming)
        for place, received in self._strided:
            place.copy_(received)


def gather_tensor(
    value: torch.Tensor,
    layout: TensorLayout,
    mesh: Mesh,
    receivers: Collection[int],
    out: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Assemble one full tensor on some ranks from the shards.

    Every rank of the job calls it, for the same tensors in the same order. The full tensor is the
    only large memory that a receiver needs.

    Args:
        value: this rank's shard of the logical tensor, of ``layout.local_shape(mesh.rank)``; any
            dtype, the same on all ranks, any device. The parameter, its gradient, or what else has
            an element for each of its.
        layout: where the logical tensor lives.
        out: on a receiver, where to put it: a CPU tensor of ``layout.shape``; a new one when None.

    Returns:
        ``out`` on the receivers; None on the others.
    """
    shard, full = value.detach(), None
    if mesh.rank in receivers:
        full = torch.empty(layout.shape, dtype=shard.dtype, device="cpu") if out is None else out
    for stripe in row_stripes(layout, shard.element_size()):
        wanted = [[stripe] if rank in receivers else [] for rank in range(mesh.world_size)]
        rows = [] if full is None else [full[stripe.start : stripe.stop] if layout.shape else full]
        Swap({layout.name: shard}, wanted, rows, mesh.control).run()
    return full
