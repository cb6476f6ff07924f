"""Copies of tensors in host memory, which a GPU fills while the host trains on."""

from __future__ import annotations

from collections.abc import Mapping
from weakref import WeakKeyDictionary, finalize

import torch

from parallel_ext.distributed.mesh import Mesh

_ALIGNMENT = 64  # bytes; of each copy in the slab
_PORTABLE = 1  # page-locked for every GPU


class Cuda:
    """What copies ask of CUDA; a double takes its place where there is no GPU."""

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda

    def lock_pages(self, memory: torch.Tensor) -> None:
        """Let a GPU write to host memory by itself."""
        runtime = torch.cuda.cudart()
        torch.cuda.check_error(
            runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, _PORTABLE)
        )

    def unlock_pages(self, address: int) -> None:
        torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(address))

    def start_copy(self, copy: torch.Tensor, value: torch.Tensor) -> None:
        """Queue a copy to page-locked memory, before whatever changes the value from here on."""
        copy.copy_(value, non_blocking=True)

    def arrival(self, device: torch.device) -> torch.cuda.Event:
        """Return an event behind all that the current stream of a device has to do."""
        event = torch.cuda.Event(blocking=True)  # the thread that waits leaves its core to others
        event.record(torch.cuda.current_stream(device))
        return event


cuda = Cuda()


class _Slab:
    """Page-locked host memory of exactly so many bytes; torch's own would be a power of two."""

    def __init__(self, num_bytes: int) -> None:
        self.memory = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        cuda.lock_pages(self.memory)
        # At the end of the process its pages are unlocked anyway.
        finalize(self, cuda.unlock_pages, self.memory.data_ptr()).atexit = False


def _padded_bytes(value: torch.Tensor) -> int:
    return -(-value.nbytes // _ALIGNMENT) * _ALIGNMENT


class Copies:
    """Host copies of tensors, those of a GPU in one slab that the next copies use again."""

    def __init__(self) -> None:
        self._slab: _Slab | None = None
        self._arrivals: list[torch.cuda.Event] = []

    def take(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return copies of tensors as they are now, which may be read after :meth:`wait`.

        Copies that were taken before are overwritten. The host does not wait for a GPU: its
        current stream copies before it does what is asked of it later.

        Returns:
            The copies by name, contiguous, in host memory.
        """
        self.wait()  # for copies that nobody has read
        remote = [value for value in values.values() if cuda.holds(value)]
        if remote:
            num_bytes = sum(map(_padded_bytes, remote))
            if self._slab is None or self._slab.memory.nbytes < num_bytes:
                self._slab = None  # before there are two
                self._slab = _Slab(max(num_bytes, _ALIGNMENT))
        copies, start = {}, 0
        for name, value in values.items():
            if cuda.holds(value):
                of_slab = self._slab.memory[start : start + value.nbytes]
                copies[name] = of_slab.view(value.dtype).view(value.shape)
                cuda.start_copy(copies[name], value)
                start += _padded_bytes(value)
            else:
                copies[name] = torch.empty(value.shape, dtype=value.dtype, device="cpu")
                copies[name].copy_(value)
        self._arrivals = [cuda.arrival(device) for device in {value.device for value in remote}]
        return copies

    def wait(self) -> None:
        """Wait until the copies that were taken last are there; any thread may call it."""
        arrivals, self._arrivals = self._arrivals, []
        for arrival in arrivals:
            arrival.synchronize()


_copies: WeakKeyDictionary[Mesh, Copies] = WeakKeyDictionary()


def copies_of(mesh: Mesh) -> Copies:
    """Return the copies for the saves of a mesh, of which one is in flight at a time."""
    return _copies.setdefault(mesh, Copies())
