"""Show what a model, an adapter, a training checkpoint or a safetensors file holds."""

from __future__ import annotations

import argparse
import json
import math
import re
from collections import Counter
from typing import Any

from rich.filesize import decimal

from parallel_ext.cli.options import existing
from parallel_ext.cli.saved import OPTIMIZER, PATHS, Saved, open_saved
from parallel_ext.cli.tables import print_table
from parallel_ext.io.safetensors_writer import DTYPE_NAMES

_NUMBER = re.compile(r"(?<![^.])\d+(?=\.)")  # of a layer or an expert


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``inspect``."""
    parser.add_argument("path", type=existing, help=PATHS)
    parser.add_argument(
        "--all", action="store_true", help="each tensor on a line, not those of all layers on one"
    )


def run(options: argparse.Namespace) -> int:
    """Print the contents of what was saved, and return 0."""
    with open_saved(options.path) as saved:
        if options.json:
            print(json.dumps(_as_json(saved), indent=2))
        else:
            _print(saved, options.all)
    return 0


def _as_json(saved: Saved) -> dict[str, Any]:
    tensors = {
        saved.shown(name): {
            "dtype": DTYPE_NAMES[entry.dtype],
            "shape": list(entry.shape),
            "file": saved.file_of[name].path.name,
        }
        for name, entry in saved.entries.items()
    }
    return {"kind": saved.kind, "path": str(saved.path), "facts": saved.facts, "tensors": tensors}


def _print(saved: Saved, each: bool) -> None:
    print(f"{saved.kind} {saved.path}")
    for name, value in saved.facts.items():
        print(f"  {name}: {', '.join(map(str, value)) if isinstance(value, list) else value}")
    lines: Counter[tuple[str, str, tuple[int, ...]]] = Counter()
    sums: dict[str, list[int]] = {}
    for name, entry in saved.entries.items():
        shown, dtype = saved.shown(name), DTYPE_NAMES[entry.dtype]
        lines[shown if each else _NUMBER.sub("*", shown), dtype, entry.shape] += 1
        part = "optimizer" if shown.startswith(OPTIMIZER) else "weights"
        of_part = sums.setdefault(f"{part} {dtype}", [0, 0, 0])
        for index, number in enumerate((1, math.prod(entry.shape), entry.stop - entry.start)):
            of_part[index] += number
    print()
    rows = [(name, count, f"{numbers:,}", decimal(n)) for name, (count, numbers, n) in sums.items()]
    print_table(["part", "tensors", "numbers", "bytes"], rows)
    print()
    table = [(n, dtype, list(shape), count) for (n, dtype, shape), count in lines.items()]
    print_table(["tensor", "dtype", "shape", "times"], table)
