"""Files that are replaced one by one: a kill or an error at any time leaves each of them whole."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from disk_faults import at_operation, broken, in_child, kill

from parallel_ext.distributed.errors import CheckpointError
from parallel_ext.io import disk
from parallel_ext.io.replace_files import replaced_files

NAMES = ("a_config", "weights", "part/a_config", "part/weights")


def _replace(target: Path, content: str) -> None:
    with replaced_files(target, last="a_config") as temporary:
        (temporary / "part").mkdir()
        for name in NAMES:
            (temporary / name).write_text(content)


def test_a_kill_leaves_each_file_old_or_new_and_the_configuration_last(tmp_path: Path) -> None:
    _replace(tmp_path / "counted", "old")
    with at_operation(10**9, broken) as operations:
        _replace(tmp_path / "counted", "new")
    seen = set()
    for at in range(len(operations)):
        target = tmp_path / str(at)
        _replace(target, "old")

        def killed(target: Path = target, at: int = at) -> None:
            with at_operation(at, kill):
                _replace(target, "new")

        assert in_child(killed) is None
        part_weights, part_config, weights, config = (
            (target / name).read_text()
            for name in ("part/weights", "part/a_config", "weights", "a_config")
        )
        for first, last in ((weights, config), (part_weights, part_config)):
            assert (first, last) in {("old", "old"), ("new", "old"), ("new", "new")}
        seen.add((part_weights, part_config, weights, config))
    assert ("old",) * 4 in seen
    assert ("new",) * 4 in seen


def test_an_error_leaves_no_temporary_directory(tmp_path: Path) -> None:
    _replace(tmp_path / "counted", "old")
    with at_operation(10**9, broken) as operations:
        _replace(tmp_path / "counted", "new")
    for at in range(operations.index("remove_tree")):
        target = tmp_path / str(at)
        _replace(target, "old")
        with at_operation(at, broken), suppress(OSError):
            _replace(target, "new")
        assert {path.name for path in target.iterdir()} == {"a_config", "weights", "part"}


def test_what_is_written_is_durable_before_it_takes_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, str]] = []
    for name in ("sync_path", "rename"):
        original = getattr(disk, name)

        def watched(*paths: Path, name: str = name, original: object = original) -> None:
            calls.append((name, paths[0].name))
            original(*paths)

        monkeypatch.setattr(disk, name, watched)
    _replace(tmp_path, "new")
    renames = [at for at, (name, _) in enumerate(calls) if name == "rename"]
    synced = [path for name, path in calls[: renames[0]] if name == "sync_path"]
    assert sorted(synced[-4:]) == ["a_config", "a_config", "weights", "weights"]
    assert [path for name, path in calls if name == "rename"] == ["weights", "a_config"] * 2
    assert [name for name, _ in calls[-2:]] == ["sync_path", "sync_path"]


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("of others")
    with pytest.raises(CheckpointError, match="is a file; a directory is needed"):
        _replace(tmp_path / "file", "new")
