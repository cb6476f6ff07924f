"""Compare the inputs of a model over the ranks that share it, before they compute.

One all-gather of 32 bytes per forward. Different inputs, or a bad id on one rank, then raise the
same error on all of them, instead of training on nonsense, hanging, or aborting inside gloo. In
training a tensor that several ranks hold joins it in turn, so that drift is noticed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
import xxhash
from torch import nn

from parallel_ext.distributed.errors import DisagreementError
from parallel_ext.distributed.mesh import Mesh
from parallel_ext.nn.replicas import ReplicaCycle, ReplicaPiece
from parallel_ext.sharding._torch_private import disable_compiler
from parallel_ext.sharding.digests import content_digest, content_number

_ID_ARGUMENTS = ("input_ids", "labels", "shift_labels")
# Arguments with keys and values of a rank's own heads, which no other rank has.
_OF_THE_RANK = ("past_key_values", "cache")


def _describe(value: Any) -> str:
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if hasattr(value, "get_seq_length"):
        return f"{type(value).__name__} of {value.get_seq_length()} tokens"
    if hasattr(value, "to_diff_dict"):  # a GenerationConfig
        return f"{type(value).__name__} {value.to_diff_dict()}"
    if isinstance(value, (list, tuple)):  # of lists perhaps, which may be empty
        entries = ["a tensor" if isinstance(v, torch.Tensor) else _describe(v) for v in value]
        digest = xxhash.xxh3_64_hexdigest(repr(entries).encode())
        return f"{type(value).__name__} of {len(value)} with digest {digest}"
    return type(value).__name__


def _tensors_in(arguments: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return all tensors of a call by name, with those in lists (images of each row) and dicts."""
    found: dict[str, torch.Tensor] = {}
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            found[name] = value
        elif isinstance(value, (list, tuple)) and name not in _OF_THE_RANK:
            inner = enumerate(value)  # often of a thousand plain values
            kinds = (torch.Tensor, list, tuple)
            found |= _tensors_in({f"{name}[{i}]": v for i, v in inner if isinstance(v, kinds)})
        elif isinstance(value, dict) and name not in _OF_THE_RANK:  # masks of kinds of layers
            found |= _tensors_in({f"{name}[{key}]": each for key, each in value.items()})
    return found


def _outside(name: str, ids: torch.Tensor, vocab_size: int, ignore_index: int) -> torch.Tensor:
    """Return which ids, or labels, are outside the vocabulary, as a mask of their shape."""
    bad = (ids < 0) | (ids >= vocab_size)
    return bad if name == "input_ids" else bad & (ids != ignore_index)


class Agreement:
    """The comparison of what the tp ranks are about to do with a model.

    Args:
        vocab_size: V; ids are checked against it before any collective.
        deferred: leave the values on the device and compare them one call later, so that nothing
            waits for it. Shapes, dtypes and modes are always compared at once.
        buffers: names of the buffers that all ranks hold.
    """

    def __init__(
        self, mesh: Mesh, vocab_size: int, deferred: bool, buffers: Collection[str]
    ) -> None:
        self.mesh, self.vocab_size, self.deferred = mesh, vocab_size, deferred
        self._buffers = buffers
        self._previous: _DeviceContents | None = None
        first = mesh.dp_rank * mesh.tp_size
        ranks = tuple(range(first, first + mesh.tp_size))
        self._replicas = ReplicaCycle(ranks, mesh.world_size, buffers)

    def __deepcopy__(self, memo: object) -> Agreement:
        # Without the call before, whose event of a device has no copy.
        return Agreement(self.mesh, self.vocab_size, self.deferred, self._buffers)

    @disable_compiler
    def check(
        self,
        op_name: str,
        arguments: Mapping[str, Any],
        mode: str,
        trained: nn.Module | None = None,
    ) -> None:
        """Raise the same error on all tp ranks unless they agree and their ids are valid.

        Args:
            arguments: those of the call by name; tensors are compared by dtype, shape and values.
            mode: whatever else must be equal, for example "train, grad".
            trained: a model of whose parameters one more is compared in each call.

        Raises:
            DisagreementError: the ranks' arguments or modes differ, or what they must hold the same
                of a parameter; names which.
            IndexError: an id or a label is outside the vocabulary on some rank.
            CollectiveTimeout: a tp rank did not come.
        """
        if torch.compiler.is_exporting():  # with tensors that have no values
            return
        tensors = _tensors_in(arguments)
        fields = {name: _describe(value) for name, value in {**arguments, **tensors}.items()}
        fields["mode"] = mode
        ignore_index = arguments.get("ignore_index", -100)
        piece = None if trained is None else self._replicas.now(trained)
        if self.deferred:
            now = _DeviceContents(tensors, self.vocab_size, ignore_index, piece)
            contents, error, piece, number = _DeviceContents.settle(self._previous)
            self._previous = now
        else:
            contents = {name: content_digest(tensor) for name, tensor in tensors.items()}
            error = self._out_of_vocabulary(tensors, ignore_index)
            number = 0 if piece is None else piece.number()
        compared = op_name, sorted(fields.items()), sorted(contents.items())  # in any order
        digest = xxhash.xxh3_128_digest(repr(compared).encode())
        record = digest + (b"error" if error else b"").ljust(8, b"\0")
        record_and_number = record + (number % 2**64).to_bytes(8, "little")
        control, tp = self.mesh.control, self.mesh.tp_control
        everyone = control.all_gather_bytes(record_and_number, op_name, tp)
        if error or any(other[:24] != record for other in everyone):
            self._raise(op_name, control.all_gather_object((fields, contents, error), group=tp))
        if trained is not None:
            self._replicas.done()
        if piece is not None:
            piece.check([other[24:] for other in everyone], op_name)

    def _out_of_vocabulary(
        self, tensors: Mapping[str, torch.Tensor], ignore_index: int
    ) -> str | None:
        for name in _ID_ARGUMENTS:
            ids = tensors.get(name)
            if ids is None or ids.numel() == 0:
                continue
            bad = _outside(name, ids, self.vocab_size, ignore_index)
            if bad.any():
                position = bad.flatten().nonzero()[0].item()
                return (
                    f"{name}: id {ids.flatten()[position].item()} at position {position} is "
                    f"outside the vocabulary [0, {self.vocab_size})"
                )
        return None

    @staticmethod
    def _raise(
        op_name: str, ranks: list[tuple[dict[str, str], dict[str, str], str | None]]
    ) -> None:
        errors = [f"tp rank {rank}: {error}" for rank, (_, _, error) in enumerate(ranks) if error]
        if errors:
            raise IndexError(f"{op_name}: " + "; ".join(errors))
        differing = []
        names = {name: None for fields, contents, _ in ranks for name in (*fields, *contents)}
        for name in names:
            seen = [fields.get(name, "absent") for fields, _, _ in ranks]
            if len(set(seen)) > 1:
                words = ", ".join(f"tp rank {rank}: {text}" for rank, text in enumerate(seen))
                differing.append(f"{name} ({words})")
            elif len({contents.get(name) for _, contents, _ in ranks}) > 1:
                differing.append(f"{name} (other values, {seen[0]})")
        raise DisagreementError(
            f"{op_name}: the tp ranks must be given the same batch, but they differ in "
            + "; ".join(differing or ["which call they are at"])
        )


class _DeviceContents:
    """Numbers about a call's tensors, on their way from the device to the host."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        vocab_size: int,
        ignore_index: int,
        piece: ReplicaPiece | None,
    ) -> None:
        self.vocab_size, self.piece = vocab_size, piece
        self.names = list(tensors)
        self.ids = [name for name in _ID_ARGUMENTS if name in tensors]
        numbers = [content_number(tensor) for tensor in tensors.values()]
        for name in self.ids:
            numbers.append(_outside(name, tensors[name], vocab_size, ignore_index).sum())
        if piece is not None:
            numbers.append(content_number(piece.values))
        # Numbers of a tensor that was left on the host, such as a mask, are there already.
        self.numbers = [number.to("cpu", non_blocking=True) for number in numbers]
        self.arrived = None
        if any(number.is_cuda for number in numbers):
            self.arrived = torch.cuda.Event()
            self.arrived.record()

    @staticmethod
    def settle(
        previous: _DeviceContents | None,
    ) -> tuple[dict[str, str], str | None, ReplicaPiece | None, int]:
        """Return the previous call's contents, the error of its ids, its piece and its number."""
        if previous is None:
            return {}, None, None, 0
        if previous.arrived is not None:
            previous.arrived.synchronize()
        values = [number.item() for number in previous.numbers]
        piece, error = previous.piece, None
        number = 0 if piece is None else values.pop()
        contents = {
            f"{name} of the call before": f"{value:x}"
            for name, value in zip(previous.names, values, strict=False)
        }
        for name, count in zip(previous.ids, values[len(previous.names) :], strict=True):
            if count and error is None:
                error = (
                    f"{name} of the call before: {count} ids were outside the vocabulary "
                    f"[0, {previous.vocab_size})"
                )
        return contents, error, piece, number
