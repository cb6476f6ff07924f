"""The ranks that share a model compare its inputs before they compute.

One all-gather of 32 bytes per forward. Different inputs, or a bad id on one rank, then raise the
same error on all of them, instead of training on nonsense, hanging, or aborting inside gloo.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import xxhash

from parallel_ext.mesh import Mesh
from parallel_ext.ranks import DisagreementError

_ID_ARGUMENTS = ("input_ids", "labels", "shift_labels")
_OF_THE_RANK = ("past_key_values",)  # keys and values of its own heads


def content_number(tensor: torch.Tensor) -> torch.Tensor:
    """A 0-d int64 on the tensor's device that changes with its values and their order.

    The sum of the elements' bits times odd multipliers, modulo 2**64; no synchronisation.
    """
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    flat = tensor.detach().contiguous().view(integers[tensor.element_size()]).flatten()
    position = torch.arange(flat.numel(), device=flat.device)
    return ((flat.long() + 1) * (position * 0x5851F42D4C957F2D + 0x14057B7EF767814F)).sum()


def content_digest(tensor: torch.Tensor) -> str:
    """A digest of the bytes of a tensor; on an accelerator it waits for the device."""
    if tensor.device.type == "cpu":
        data = tensor.detach().contiguous().flatten().view(torch.uint8).numpy()
        return xxhash.xxh3_64_hexdigest(data)
    return f"{content_number(tensor).item():x}"


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
    """All tensors of a call by name, those in lists, as of the images of each row, included."""
    found: dict[str, torch.Tensor] = {}
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            found[name] = value
        elif isinstance(value, (list, tuple)) and name not in _OF_THE_RANK:
            inner = enumerate(value)  # often of a thousand plain values
            kinds = (torch.Tensor, list, tuple)
            found |= _tensors_in({f"{name}[{i}]": v for i, v in inner if isinstance(v, kinds)})
    return found


class Agreement:
    """Compares what the tp ranks are about to do with a model.

    Args:
        mesh: the ranks.
        vocab_size: V; ids are checked against it before any collective.
        deferred: leave the values on the device and compare them one call later, so that nothing
            waits for it. Shapes, dtypes and modes are always compared at once.
    """

    def __init__(self, mesh: Mesh, vocab_size: int, deferred: bool) -> None:
        self.mesh, self.vocab_size, self.deferred = mesh, vocab_size, deferred
        self._previous: _DeviceContents | None = None

    @torch._disable_dynamo  # torch.compiler.disable would import the compiler with this package
    def check(self, what: str, arguments: Mapping[str, Any], mode: str) -> None:
        """Raise the same error on all tp ranks unless they agree and their ids are valid.

        Args:
            what: the call, for messages.
            arguments: its arguments by name; tensors are compared by dtype, shape and values.
            mode: whatever else must be equal, for example "train, grad".

        Raises:
            DisagreementError: the ranks' arguments or modes differ; names which.
            IndexError: an id or a label is outside the vocabulary on some rank.
            CollectiveTimeout: a tp rank did not come.
        """
        tensors = _tensors_in(arguments)
        fields = {name: _describe(value) for name, value in {**arguments, **tensors}.items()}
        fields["mode"] = mode
        ignore_index = arguments.get("ignore_index", -100)
        if self.deferred:
            contents, error = _DeviceContents.settle(self._previous)
            self._previous = _DeviceContents(tensors, self.vocab_size, ignore_index)
        else:
            contents = {name: content_digest(tensor) for name, tensor in tensors.items()}
            error = self._out_of_vocabulary(tensors, ignore_index)
        digest = xxhash.xxh3_128_digest(repr((what, fields, contents)).encode())
        record = (digest + (b"error" if error else b"")).ljust(32, b"\0")
        records = self.mesh.exchange_on_tp(record, what)
        if error or any(other != record for other in records):
            self._raise(what, self.mesh.gather_objects_on_tp((fields, contents, error)))

    def _out_of_vocabulary(
        self, tensors: Mapping[str, torch.Tensor], ignore_index: int
    ) -> str | None:
        for name in _ID_ARGUMENTS:
            ids = tensors.get(name)
            if ids is None or ids.numel() == 0:
                continue
            bad = (ids < 0) | (ids >= self.vocab_size)
            if name != "input_ids":
                bad &= ids != ignore_index
            if bad.any():
                position = bad.flatten().nonzero()[0].item()
                return (
                    f"{name}: id {ids.flatten()[position].item()} at position {position} is "
                    f"outside the vocabulary [0, {self.vocab_size})"
                )
        return None

    @staticmethod
    def _raise(what: str, ranks: list[tuple[dict[str, str], dict[str, str], str | None]]) -> None:
        errors = [f"tp rank {rank}: {error}" for rank, (_, _, error) in enumerate(ranks) if error]
        if errors:
            raise IndexError(f"{what}: " + "; ".join(errors))
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
            f"{what}: the tp ranks must be given the same batch, but they differ in "
            + "; ".join(differing or ["which call they are at"])
        )


class _DeviceContents:
    """Numbers about a call's tensors, on their way from the device to the host."""

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], vocab_size: int, ignore_index: int
    ) -> None:
        self.vocab_size = vocab_size
        self.names = list(tensors)
        self.ids = [name for name in _ID_ARGUMENTS if name in tensors]
        numbers = [content_number(tensor) for tensor in tensors.values()]
        for name in self.ids:
            ids = tensors[name]
            bad = (ids < 0) | (ids >= vocab_size)
            if name != "input_ids":
                bad &= ids != ignore_index
            numbers.append(bad.sum())
        self.numbers = torch.stack(numbers).to("cpu", non_blocking=True) if numbers else None
        self.arrived = None
        if numbers and numbers[0].is_cuda:
            self.arrived = torch.cuda.Event()
            self.arrived.record()

    @staticmethod
    def settle(previous: _DeviceContents | None) -> tuple[dict[str, str], str | None]:
        """The contents of the previous call, and what was wrong with its ids."""
        if previous is None or previous.numbers is None:
            return {}, None
        if previous.arrived is not None:
            previous.arrived.synchronize()
        values = previous.numbers.tolist()
        contents = {
            f"{name} of the call before": f"{value:x}"
            for name, value in zip(previous.names, values, strict=False)
        }
        for name, count in zip(previous.ids, values[len(previous.names) :], strict=True):
            if count:
                return contents, (
                    f"{name} of the call before: {count} ids were outside the vocabulary "
                    f"[0, {previous.vocab_size})"
                )
        return contents, None
