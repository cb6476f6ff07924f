"""Saves that end in the middle: what a test needs to let any operation on the disk go wrong."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from reference import Tiny, parallel

import parallel_ext as px
from parallel_ext.io import disk

# All that change the disk but ``touch``, whose calls depend on the time.
OPERATIONS = (
    *("make_directory", "create", "open_or_create", "reserve", "write", "sync", "sync_path"),
    *("rename", "exchange", "link", "copy_mode", "remove", "remove_tree"),
)
TINY = Tiny(vocab_size=11, heads=2, key_value_heads=2, inner=7, layers=1)
Action = Callable[[], Any]


def kill() -> None:
    """End this process at once."""
    os.kill(os.getpid(), signal.SIGKILL)


def full() -> None:
    """The disk is full."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def broken() -> None:
    """The disk does not work."""
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def _half(name: str, original: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Do a part of an operation, if it has parts."""
    if name == "write":
        file, memory, offset = args
        original(file, memory[: len(memory) // 2], offset)
    elif name == "remove_tree":
        for path in sorted(path for path in args[0].rglob("*") if path.is_file())[::2]:
            path.unlink()


@contextmanager
def at_operation(number: int, action: Action, until_end: bool = False) -> Iterator[list[str]]:
    """Inside, an operation is done by half, and then the action.

    Args:
        number: of the operation, from 0 on.
        action: raises, or ends the process.
        until_end: in all later operations too.

    Yields:
        The names of the operations that were begun.
    """
    begun: list[str] = []

    def patched(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*args: Any, **kwargs: Any) -> Any:
            begun.append(name)
            if len(begun) == number + 1 or (until_end and len(begun) > number):
                _half(name, original, args)
                action()
            return original(*args, **kwargs)

        return operation

    with ExitStack() as patches:
        for name in OPERATIONS:
            original = getattr(disk, name)
            patches.enter_context(mock.patch.object(disk, name, patched(name, original)))
        yield begun


class SmallJob:
    """A model and its optimizer, whose values in a step follow from its number."""

    def __init__(self, mesh: px.Mesh) -> None:
        self.mesh = mesh
        self.model = parallel(TINY.model(), mesh)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.fill(0)

    def _tensors(self) -> list[torch.Tensor]:
        parameters = list(self.model.parameters())
        return parameters + [self.optimizer.state[p]["momentum_buffer"] for p in parameters]

    def fill(self, number: int) -> None:
        """Set all values to those of a step; replicas get the same, all shards a rank's own."""
        for parameter in self.model.parameters():
            self.optimizer.state[parameter].setdefault(
                "momentum_buffer", torch.zeros_like(parameter)
            )
        with torch.no_grad():
            for place, tensor in enumerate(self._tensors()):
                rank = self.mesh.rank if tensor.dim() > 1 else 0  # all ranks hold the norms
                seed = 1000 * number + 100 * rank + place
                tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape).add(seed).sin())

    def save(self, root: Path, step: int, number: int, **options: Any) -> None:
        """Save the values of ``number`` as a step."""
        self.fill(number)
        px.save_checkpoint(root, step, self.model, self.optimizer, data_state=number, **options)

    def load(self, root: Path) -> tuple[int, int]:
        """Step and number of the last checkpoint, once every value has been compared."""
        self.fill(99)
        resumed = px.load_checkpoint(root, self.model, self.optimizer)
        loaded = [tensor.clone() for tensor in self._tensors()]
        self.fill(resumed.data_state)
        for found, expected in zip(loaded, self._tensors(), strict=True):
            assert torch.equal(found, expected), f"{resumed.path} loads as something else"
        return resumed.step, resumed.data_state


def in_child(action: Action) -> int | None:
    """Run the action in a child process; None if it was killed, else its exit status."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            action()
            status = 0
        finally:
            os._exit(status)
    _, code = os.waitpid(child, 0)
    return None if os.WIFSIGNALED(code) else os.WEXITSTATUS(code)


def change_last_byte(file: Path) -> None:
    """Change one bit of a file's last byte."""
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
