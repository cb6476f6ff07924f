"""Read every byte of what is saved, compare it with its hashes, and say what is wrong."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from parallel_ext.checkpoint.verify import verify_checkpoint
from parallel_ext.cli.options import existing
from parallel_ext.cli.saved import CHECKPOINT, PATHS, NothingSavedError, open_saved
from parallel_ext.distributed.errors import CheckpointError
from parallel_ext.io.header_hashes import check_tensors
from parallel_ext.io.progress import progress_bar


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``verify``."""
    parser.add_argument("path", type=existing, help=PATHS)


def run(options: argparse.Namespace) -> int:
    """Print what was checked, and return 0, or what is wrong, and return 1."""
    report: dict[str, Any] = {"path": str(options.path)}
    try:
        report |= _check(options.path, quiet=options.json)
        text = "{kind} {path}: {checked}".format_map(report)
    except NothingSavedError:
        raise
    except CheckpointError as error:
        report["wrong"] = text = str(error)
    print(json.dumps(report) if options.json else text)
    return int("wrong" in report)


def _check(path: Path, quiet: bool) -> dict[str, Any]:
    with open_saved(path) as saved:
        files = dict.fromkeys(saved.file_of.values())
        num_bytes = sum(file.path.stat().st_size for file in files)
        with progress_bar("", num_bytes, 0, False if quiet else None) as done:
            if saved.kind == CHECKPOINT:
                verify_checkpoint(saved.path, done)
                checked = "every byte is that which was written"
            else:
                checked = _words(sum(check_tensors(file, done) for file in files), len(files))
        found = {"kind": saved.kind, "path": str(saved.path), "bytes": num_bytes}
    return found | {"checked": checked}


def _words(compared: int, num_files: int) -> str:
    if compared == num_files:
        return "every byte of its tensors is that which was written"
    found = "the files are whole and fit each other"
    if compared:
        return f"{found}; {compared} of {num_files} hold hashes, and are those that were written"
    return f"{found}; there are no hashes to compare with"
