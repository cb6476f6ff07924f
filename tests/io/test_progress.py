"""Rank 0 shows how far a save or a load is: on a terminal, where it takes long, or when asked."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from ranks import pool
from reference import Tiny, mesh_of, parallel

import parallel_ext as px
from parallel_ext.io import progress, reading, stream

Shown = dict[str, str]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@contextmanager
def _standard_error(terminal: bool) -> Iterator[io.StringIO]:
    with mock.patch("sys.stderr", Terminal() if terminal else io.StringIO()) as error:
        yield error


def _calls(folder: Path, wanted: bool | None, terminal: bool, wait: float, quiet: bool) -> Shown:
    """What each call shows on this rank."""
    model = parallel(Tiny(dtype=torch.float32).model(), mesh_of())
    optimizer = torch.optim.AdamW(model.parameters())
    root, given = folder / "root", {"progress": wanted}

    def save_behind() -> None:
        px.save_checkpoint(root, 2, model, optimizer, asynchronous=True, **given)
        px.wait_for_checkpoint(model)

    calls = {
        "save": lambda: px.save_checkpoint(root, 1, model, optimizer, **given),
        "load": lambda: px.load_checkpoint(root, model, optimizer, **given),
        "asynchronous": save_behind,
        "save_pretrained": lambda: model.save_pretrained(folder / "model"),
        "from_pretrained": lambda: px.from_pretrained(folder / "model", mesh_of()),
    }
    shown = {}
    if quiet:
        transformers.utils.logging.disable_progress_bar()
    try:
        with (
            mock.patch.object(progress, "_LONG_S", wait),
            mock.patch.object(stream, "STRIPE_BYTES", 4096),
        ):
            for name, call in calls.items():
                with _standard_error(terminal) as error:
                    call()
                # Warnings go there as well.
                bars = re.findall("(?:Saving|Loading shards):[^\r]*", error.getvalue())
                shown[name] = "".join(bars)
    finally:
        transformers.utils.logging.enable_progress_bar()
    return shown


CHECKPOINTS, MODELS = {"save", "load"}, {"save_pretrained", "from_pretrained"}


@pytest.mark.parametrize(
    ("wanted", "terminal", "wait", "quiet", "expected"),
    [
        (None, True, 0.0, False, CHECKPOINTS | MODELS),
        (None, True, 60.0, False, set()),
        (None, False, 0.0, False, set()),
        (True, False, 60.0, False, CHECKPOINTS | {"asynchronous"}),
        (False, True, 0.0, False, MODELS),
        (None, True, 0.0, True, CHECKPOINTS),
    ],
    ids=["terminal", "short", "no terminal", "asked for", "refused", "off in transformers"],
)
def test_rank_0_shows_a_bar(
    tmp_path: Path,
    wanted: bool | None,
    terminal: bool,
    wait: float,
    quiet: bool,
    expected: set[str],
) -> None:
    first, second = pool(2).run(_calls, tmp_path, wanted, terminal, wait, quiet)
    assert set(second.values()) == {""}
    assert {name for name, text in first.items() if text} == expected
    for name in expected:
        what = "Loading shards" if name in ("load", "from_pretrained") else "Saving"
        (of_all,) = set(re.findall(rf"{what}: 100%\|.*?\| (\S+)/\1 ", first[name]))
        assert of_all.endswith("k")  # some hundred thousand bytes


class _Full(Terminal):
    """As a file on a disk without room."""

    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


def _without_room_for_a_bar(folder: Path) -> int:
    model = parallel(Tiny(dtype=torch.float32).model(), mesh_of())
    with mock.patch("sys.stderr", _Full()), mock.patch.object(progress, "_LONG_S", 0.0):
        px.save_checkpoint(folder, 1, model, progress=True)
        return px.load_checkpoint(folder, model, progress=True).step


def test_a_bar_that_cannot_be_shown_stops_no_save(tmp_path: Path) -> None:
    assert pool(2).run(_without_room_for_a_bar, tmp_path) == [1, 1]


def _bytes_of_bars(folder: Path) -> list[int]:
    """The bytes that each call has done, and those of all its calls."""
    model = parallel(Tiny(dtype=torch.float32).model(), mesh_of())
    done: list[list[int]] = []

    @contextmanager
    def counted(what: str, num_bytes: Any, rank: int, wanted: bool | None) -> Iterator[object]:
        done.append([progress._number(num_bytes), 0])

        def add(number: Any) -> None:
            done[-1][1] += progress._number(number)

        yield add

    with (
        mock.patch.object(stream, "progress_bar", counted),
        mock.patch("parallel_ext.io.reading.progress_bar", counted),
        mock.patch.object(stream, "STRIPE_BYTES", 4096),
    ):
        px.save_checkpoint(folder, 1, model)
        px.load_checkpoint(folder, model)
    own = sum(parameter.nbytes for parameter in model.parameters())
    return [*done[0], *done[1], own]


def test_a_bar_ends_at_the_bytes_of_all_files_or_of_the_own_shards(tmp_path: Path) -> None:
    of_model = sum(p.nbytes for p in Tiny(dtype=torch.float32).model().parameters())
    for saved_total, saved, loaded_total, loaded, own in pool(2).run(_bytes_of_bars, tmp_path):
        assert saved_total == saved == of_model
        assert loaded_total == loaded == own


def _times_counted(folder: Path, wanted: bool) -> int:
    """How often this rank finds out how many bytes are done."""
    model = parallel(Tiny(dtype=torch.float32).model(), mesh_of())
    saved = mock.patch.object(stream.TensorStream, "_bytes_of", return_value=1)
    loaded = mock.patch.object(reading, "bytes_here", return_value=1)
    with saved as first, loaded as second, _standard_error(True):
        px.save_checkpoint(folder, 1, model, progress=wanted)
        px.load_checkpoint(folder, model, progress=wanted)
    return first.call_count + second.call_count


def test_bytes_are_counted_where_a_bar_is_shown_alone(tmp_path: Path) -> None:
    first, second = pool(2).run(_times_counted, tmp_path / "shown", True)
    assert first > 2
    assert second == 0
    assert pool(2).run(_times_counted, tmp_path / "not", False) == [0, 0]
