"""Read every byte of a training checkpoint, or every header of a model, and say what is wrong."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from parallel_ext.checkpoint.verify import verify_checkpoint
from parallel_ext.cli.options import existing
from parallel_ext.cli.saved import CHECKPOINT, PATHS, NothingSavedError, open_saved
from parallel_ext.distributed.errors import CheckpointError
from parallel_ext.io.progress import progress_bar


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``verify``."""
    parser.add_argument("path", type=existing, help=PATHS)


def run(options: argparse.Namespace) -> int:
    """Print what was checked, and return 0, or what is wrong, and return 1.

    Raises:
        NothingSavedError: there is nothing that can be checked.
    """
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
        files = {file.path for file in saved.file_of.values()}
        num_bytes = sum(file.stat().st_size for file in files)
        if saved.kind == CHECKPOINT:
            with progress_bar("", num_bytes, 0, False if quiet else None) as done:
                verify_checkpoint(saved.path, done)
            checked = "every byte is that which was written"
        else:
            checked = "the files are whole and fit each other; there are no hashes to compare with"
        found = {"kind": saved.kind, "path": str(saved.path), "bytes": num_bytes}
    return found | {"checked": checked}
