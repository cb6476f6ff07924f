"""Compare two saved models, adapters or training checkpoints, tensor by tensor."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass
from typing import Any

import torch

from parallel_ext.cli.options import existing, number, positive
from parallel_ext.cli.saved import PATHS, Saved, open_saved
from parallel_ext.cli.tables import print_table
from parallel_ext.io.progress import Progress, progress_bar
from parallel_ext.io.safetensors_reader import TensorEntry
from parallel_ext.io.safetensors_writer import DTYPE_NAMES
from parallel_ext.sharding.reshard import row_ranges


@dataclass(frozen=True)
class Difference:
    """How much one tensor differs between two saved models.

    Attributes:
        name: of the tensor.
        difference: the largest of two elements in the same place; infinite where only one is NaN,
            or the tensor is in one of both alone.
        relative: that to the largest element of the first.
        why: what else differs, in words: the shape or the dtype, or that one has it alone.
    """

    name: str
    difference: float
    relative: float
    why: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``diff``."""
    for name in ("first", "second"):
        parser.add_argument(name, type=existing, help=PATHS)
    parser.add_argument("--top", type=positive, default=20, metavar="N", help="tensors to print")
    parser.add_argument(
        "--rtol",
        type=number("a finite number of at least 0", lambda n: n >= 0),
        default=0.0,
        help="relative difference that counts as equal, by the largest element of a tensor",
    )


def run(options: argparse.Namespace) -> int:
    """Print the largest differences; return 0 where none is beyond ``--rtol``, else 1."""
    with open_saved(options.first) as first, open_saved(options.second) as second:
        found = _compare(first, second, quiet=options.json)
    found.sort(key=lambda each: (-each.relative, each.name))
    apart = [each for each in found if each.why or each.relative > options.rtol]
    if options.json:
        print(json.dumps({"tensors": len(found), "different": [_as_json(each) for each in apart]}))
        return int(bool(apart))
    print(f"{len(found) - len(apart)} of {len(found)} tensors are equal", end="")
    print(f" to {options.rtol:g}" if options.rtol else "")
    if apart:
        rows = [
            (each.name, f"{each.difference:.3g}", f"{each.relative:.3g}", each.why)
            for each in apart[: options.top]
        ]
        print_table(["tensor", "difference", "relative", ""], rows)
        if len(apart) > len(rows):
            print(f"and {len(apart) - len(rows)} more")
    return int(bool(apart))


def _as_json(each: Difference) -> dict[str, Any]:
    """Return a difference for JSON, with None for infinity, which JSON has not."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in vars(each).items()
    }


def _compare(first: Saved, second: Saved, quiet: bool) -> list[Difference]:
    ours = {first.shown(name): name for name in first.file_of}
    theirs = {second.shown(name): name for name in second.file_of}
    found = [
        Difference(name, math.inf, math.inf, f"only in {(first if name in ours else second).path}")
        for name in ours.keys() ^ theirs.keys()
    ]
    both = [name for name in ours if name in theirs]
    entries = first.entries
    num_bytes = sum(entries[ours[n]].stop - entries[ours[n]].start for n in both)
    with progress_bar("", num_bytes, 0, False if quiet else None) as done:
        for shown in both:
            found.append(_of_tensor(shown, first, ours[shown], second, theirs[shown], done))
    return found


def _of_tensor(
    shown: str, first: Saved, name: str, second: Saved, other: str, done: Progress
) -> Difference:
    """Compare one tensor in stripes of its elements, whatever its size."""
    sides = [(first.file_of[name], name), (second.file_of[other], other)]
    entries: list[TensorEntry] = [file.tensors[key] for file, key in sides]
    if entries[0].shape != entries[1].shape:
        why = f"{list(entries[0].shape)} against {list(entries[1].shape)}"
        return Difference(shown, math.inf, math.inf, why)
    shape = entries[0].shape
    largest = apart = 0.0
    for start, stop in row_ranges(shape, 8 * math.prod(shape[1:])):
        parts = [file.read_rows(key, start, stop) for file, key in sides]
        floating = any(part.is_floating_point() for part in parts)
        a, b = (part.to(torch.float64 if floating else torch.int64) for part in parts)
        same = (a == b) | (a.isnan() & b.isnan())
        gap = (a - b).abs().double().masked_fill(same, 0.0).nan_to_num(math.inf, math.inf)
        apart = max(apart, gap.max().item() if gap.numel() else 0.0)
        known = a.abs().double().nan_to_num(0.0, 0.0)
        largest = max(largest, known.max().item() if known.numel() else 0.0)
        done(parts[0].nbytes)
    dtypes = [DTYPE_NAMES[entry.dtype] for entry in entries]
    why = "" if dtypes[0] == dtypes[1] else f"{dtypes[0]} against {dtypes[1]}"
    return Difference(shown, apart, apart / largest if largest else math.inf if apart else 0.0, why)
