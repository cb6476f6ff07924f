"""What a disk may hold after a loss of power: the operations of a save, and what of them is left.

An fsync makes what a file or the entries of a directory hold durable. Of later operations nothing
is sure: contents may be old, zeros, torn or anything, entries may be there or not.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from parallel_ext.io import disk


class Operation(NamedTuple):
    """One change of the disk, at the time when it was done."""

    time: float
    name: str
    path: Path
    other: Path | None = None
    content: bytes = b""
    offset: int = 0


@contextmanager
def recording() -> Iterator[list[Operation]]:
    """Inside, all that is done through ``disk`` is noted down, and done."""
    log: list[Operation] = []
    opened: dict[int, Path] = {}

    def note(name: str, path: Path, **more: Any) -> None:
        log.append(Operation(time.monotonic(), name, path.absolute(), **more))

    def patched(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*args: Any, **kwargs: Any) -> Any:
            if name == "remove_tree":
                inside = sorted(args[0].rglob("*"), reverse=True)
                result = original(*args)
                for path in [*inside, args[0]]:
                    note("remove", path)
                return result
            is_new = name == "open_or_create" and not args[0].exists()
            result = original(*args, **kwargs)
            if name in ("create", "open_or_create"):
                opened[result.fileno()] = args[0]
                if is_new or name == "create":
                    note("create", args[0])
            elif isinstance(args[0], FileIO):
                path = opened[args[0].fileno()]
                if name == "write":
                    note(name, path, content=bytes(args[1]), offset=args[2])
                else:  # reserve, sync
                    note(name, path, offset=args[1] if len(args) > 1 else 0)
            elif name in ("rename", "exchange", "link"):
                note(name, args[0], other=args[1].absolute())
            else:
                note({"sync_path": "sync"}.get(name, name), args[0])
            return result

        return operation

    with ExitStack() as patches:
        for name in (
            *("make_directory", "create", "open_or_create", "reserve", "write", "sync"),
            *("sync_path", "rename", "exchange", "link", "remove", "remove_tree"),
        ):
            original = getattr(disk, name)
            patches.enter_context(mock.patch.object(disk, name, patched(name, original)))
        yield log


@dataclass(eq=False)
class _File:
    now: bytes = b""
    since_sync: list[bytes] = field(default_factory=list)  # contents; none when durable

    def set(self, content: bytes) -> None:
        self.since_sync = [*(self.since_sync or [self.now]), content]
        self.now = content


@dataclass(eq=False)
class _Directory:
    now: dict[str, Any] = field(default_factory=dict)
    since_sync: dict[str, list[Any]] = field(default_factory=dict)  # by name

    def set(self, name: str, entry: Any) -> None:
        self.since_sync.setdefault(name, [self.now.get(name)]).append(entry)
        if entry is None:
            self.now.pop(name, None)
        else:
            self.now[name] = entry


class Disk:
    """A directory of a disk, to which the operations of a log are applied.

    Args:
        base: the directory; it holds ``entries`` when the log begins, durably.
        entries: names, with bytes for a file and a dictionary for a directory.
    """

    def __init__(self, base: Path, entries: dict[str, Any]) -> None:
        self.base = base.absolute()
        self.root = _loaded(entries)

    def _at(self, path: Path) -> Any:
        node: Any = self.root
        for name in path.relative_to(self.base).parts:
            node = node.now[name]
        return node

    def apply(self, operation: Operation) -> None:
        """Do one operation."""
        name, path = operation.name, operation.path
        if not path.is_relative_to(self.base):
            return
        if name == "make_directory":
            if path.name not in self._at(path.parent).now:
                self._at(path.parent).set(path.name, _Directory())
        elif name == "create":
            self._at(path.parent).set(path.name, _File())
        elif name == "write":
            file, end = self._at(path), operation.offset + len(operation.content)
            before = file.now.ljust(operation.offset, b"\0")
            file.set(before[: operation.offset] + operation.content + before[end:])
        elif name == "reserve":
            file = self._at(path)
            file.set(file.now.ljust(operation.offset, b"\0"))
        elif name == "sync":
            node = self._at(path)
            node.since_sync = type(node.since_sync)()
        elif name in ("rename", "link"):
            entry = self._at(path)
            self._at(operation.other.parent).set(operation.other.name, entry)
            if name == "rename":
                self._at(path.parent).set(path.name, None)
        elif name == "exchange":
            one, other = self._at(path), self._at(operation.other)
            self._at(path.parent).set(path.name, other)
            self._at(operation.other.parent).set(operation.other.name, one)
        elif name == "remove":
            self._at(path.parent).set(path.name, None)
        else:
            raise AssertionError(f"unknown operation {name}")

    def entries(self) -> dict[str, Any]:
        """What it holds as long as the power is on."""
        return _saved(self.root, lambda directory: directory.now, lambda file: file.now)

    def directories(self) -> list[_Directory]:
        """All directories."""
        found = [self.root]
        for directory in found:
            found += [e for e in directory.now.values() if isinstance(e, _Directory)]
        return found

    def lost(self, choose: random.Random | None) -> dict[str, Any]:
        """What it may hold after a loss of power.

        Args:
            choose: takes for every entry and every content one that it has had since it was made
                durable, or garbage; when None, all that is not durable is gone.
        """

        def entries(directory: _Directory) -> dict[str, Any]:
            chosen = dict(directory.now)
            for name, values in directory.since_sync.items():
                chosen[name] = choose.choice(values) if choose else values[0]
            return {name: entry for name, entry in chosen.items() if entry is not None}

        return _saved(self.root, entries, lambda file: _content(file, choose))


def _content(file: _File, choose: random.Random | None) -> bytes:
    if not file.since_sync:
        return file.now
    if choose is None:
        return file.since_sync[0]
    size = len(file.now)
    damaged = [b"", bytes(size), choose.randbytes(size), file.now[: size // 2].ljust(size, b"\0")]
    return choose.choice([*file.since_sync, file.now, *damaged])


def read(folder: Path) -> dict[str, Any]:
    """What a directory holds, as :class:`Disk` takes it."""
    return {
        path.name: read(path) if path.is_dir() else path.read_bytes() for path in folder.iterdir()
    }


def put(folder: Path, entries: dict[str, Any]) -> None:
    """Make a directory that holds this."""
    folder.mkdir()
    for name, entry in entries.items():
        if isinstance(entry, bytes):
            (folder / name).write_bytes(entry)
        else:
            put(folder / name, entry)


def _loaded(entries: dict[str, Any]) -> _Directory:
    return _Directory(
        {name: _File(e) if isinstance(e, bytes) else _loaded(e) for name, e in entries.items()}
    )


def _saved(node: Any, entries: Callable[..., Any], content: Callable[..., Any]) -> Any:
    if isinstance(node, _File):
        return content(node)
    return {name: _saved(entry, entries, content) for name, entry in entries(node).items()}


def states(
    base: Path, before: dict[str, Any], log: Sequence[Operation], seed: int = 3
) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """What the directory ``base`` may hold when the power is lost anywhere in a log.

    Yields:
        after how many operations it is lost, the same in words, and what is there.
    """
    choose, now = random.Random(seed), Disk(base, before)
    at: list[dict[_Directory, dict[str, Any]]] = []  # the entries after so many operations
    begin = 0  # of which a journal has been written, with entries in the order of their changes
    for number in range(len(log) + 1):
        where = f"after operation {number} of {len(log)}"
        if number:
            now.apply(log[number - 1])
            where += f", {log[number - 1].name} {log[number - 1].path}"
            if log[number - 1].name == "sync":
                begin = number
        at.append({directory: dict(directory.now) for directory in now.directories()})
        yield number, f"{where}, with all that is not durable gone", now.lost(None)
        for _ in range(2):
            yield number, f"{where}, in no order", now.lost(choose)
        entries = at[choose.randint(begin, number)]
        yield (
            number,
            f"{where}, in order",
            _saved(now.root, lambda d: entries[d], lambda file: _content(file, choose)),  # noqa: B023
        )
