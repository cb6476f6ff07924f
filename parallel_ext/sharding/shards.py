"""The tensors in the ``state_dict()`` of a parallel model: placed shards, and a marker."""

from __future__ import annotations

from typing import Any

import torch

from parallel_ext.sharding._torch_private import tree_leaves
from parallel_ext.sharding.layout import Box, TensorLayout, box_shape
from parallel_ext.sharding.slices import shard_views

# Functions whose result is sharded like their argument; of other results nothing is known.
_COPIES = {
    *(torch.Tensor.cpu, torch.Tensor.cuda, torch.Tensor.to, torch.Tensor.pin_memory),
    *(torch.Tensor.clone, torch.Tensor.detach, torch.Tensor.contiguous, torch.clone),
    *(torch.Tensor.float, torch.Tensor.double, torch.Tensor.half, torch.Tensor.bfloat16),
    *(torch.empty_like, torch.zeros_like),
}
_ELEMENTWISE = {  # as in averages over time; by name, since each has several
    *("add", "sub", "mul", "div", "lerp", "__add__", "__radd__", "__sub__", "__rsub__"),
    *("__mul__", "__rmul__", "__truediv__"),
}


class _InStateDict(torch.Tensor):
    """A tensor with attributes, which its copies have too; files hold it as a plain one."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and type(result) is not cls:
                known = cls._known(func, args)
                if known is not None:
                    result = result.as_subclass(cls)
                    vars(result).update(known)
        return result

    @classmethod
    def _known(cls, func: Any, args: tuple[Any, ...]) -> dict[str, Any] | None:
        """Return the attributes of what a function returns; None where nothing is known of it."""
        if func in _COPIES:
            return vars(args[0]) if args else None  # given by name
        if getattr(func, "__name__", "") not in _ELEMENTWISE:
            return None
        tensors = [each for each in args if isinstance(each, torch.Tensor) and each.dim() > 0]
        if not tensors:
            return None
        first = tensors[0]
        equal = all(isinstance(t, cls) and vars(t) == vars(first) for t in tensors)
        return vars(first) if equal else None

    def plain(self) -> torch.Tensor:
        """Return this tensor as an ordinary one, of the same memory."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return memo.setdefault(id(self), self.clone())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)

    def __repr__(self) -> str:
        return repr(self.plain())


class LocalShard(_InStateDict):
    """The shard that one rank holds of a parameter, or of an optimizer's state of it.

    ``shape`` and values are those of the shard. ``torch.distributed.checkpoint`` writes and reads
    it by its place in the full tensor, so that another layout can load it. Copies, and sums and
    products of shards of one place, know it too; results of other functions and what
    ``torch.save`` has written are plain tensors.

    Attributes:
        place: where the full tensor lies.
        rank: whose shard this is.
    """

    place: TensorLayout
    rank: int

    @staticmethod
    def of(shard: torch.Tensor, place: TensorLayout, rank: int) -> LocalShard:
        """Make a :class:`LocalShard` of a plain tensor, whose memory it shares."""
        made = shard.detach().as_subclass(LocalShard)
        made.place, made.rank = place, rank
        return made

    def size(self, dim: int | None = None) -> torch.Size | int:
        """Return the size of the full tensor, which DCP compares with that of the saved one."""
        full = torch.Size(self.place.shape)
        return full if dim is None else full[dim]

    def _boxes(self) -> list[tuple[Box, torch.Tensor]]:
        """Return the boxes that have elements, each with its part of this shard."""
        views = shard_views(self.plain(), self.place, self.rank)
        return [(box, view) for box, view in views if view.numel() > 0]

    # What torch.distributed._checkpointable asks of a tensor.

    def __create_chunk_list__(self) -> list[Any]:
        return [_chunk(box) for box, _ in self._boxes()]

    def __create_write_items__(self, name: str, _: object) -> list[Any]:
        return [
            _write_item(name, "SHARD", box, view, self.place.shape) for box, view in self._boxes()
        ]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        starts = {tuple(start for start, _ in box): view for box, view in self._boxes()}
        return starts[tuple(index.offset)]


class Unplaced(_InStateDict):
    """A state of an optimizer that has another shape than its parameter's shard."""

    def __create_chunk_list__(self) -> list[Any]:
        raise RuntimeError(
            "torch.distributed.checkpoint: a state of this optimizer has another shape than the "
            "shard of its parameter, so its place in a full tensor is unknown; it would be lost"
        )

    def __create_write_items__(self, name: str, _: object) -> list[Any]:
        return self.__create_chunk_list__()


class Marker(_InStateDict):
    """A tensor of numbers that says whose shards stand beside it; a DCP load leaves it as it is."""

    def is_of_shards(self) -> bool:
        """Return whether the tensors beside it are parts, and not the whole."""
        return int(self.plain()[1::2].max()) > 1  # how many ranks share them over tp, ep, dp

    def __create_chunk_list__(self) -> list[Any]:
        return []

    def __create_write_items__(self, name: str, _: object) -> list[Any]:
        return [_write_item(name, "TENSOR", ((0, len(self)),), self.plain(), self.shape)]

    def __get_tensor_shard__(self, _: Any) -> torch.Tensor:
        return self.plain()


def holds_shards(values: Any) -> bool:
    """Return whether there is the ``state_dict()`` of a model that is in parts, among values."""
    return any(isinstance(each, Marker) and each.is_of_shards() for each in tree_leaves(values))


def _chunk(box: Box) -> Any:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return ChunkStorageMetadata(
        offsets=torch.Size(start for start, _ in box), sizes=torch.Size(box_shape(box))
    )


def _write_item(name: str, kind: str, box: Box, view: torch.Tensor, shape: Any) -> Any:
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    chunk = _chunk(box)
    return WriteItem(
        index=MetadataIndex(name, chunk.offsets),
        type=WriteItemType[kind],
        tensor_data=TensorWriteData(
            chunk=chunk,
            properties=TensorProperties.create_from_tensor(view),
            size=torch.Size(shape),
        ),
    )
