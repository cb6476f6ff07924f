"""Merge a LoRA adapter into a saved model, within the memory of one matrix."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from parallel_ext.cli.options import existing
from parallel_ext.cli.saved import newest_step
from parallel_ext.io.hf_reader import HFDirectory
from parallel_ext.io.progress import progress_bar


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``merge``."""
    parser.add_argument(
        "adapter", type=existing, help="folder of the adapter, or its training checkpoint"
    )
    parser.add_argument("base", type=existing, help="folder of the model that it was trained on")
    parser.add_argument("out", type=Path, help="a new folder, of the merged model")


def run(options: argparse.Namespace) -> int:
    """Write the merged model, print what was merged, and return 0."""
    from parallel_ext.lora.merged_files import merge_files  # PEFT takes seconds to import

    adapter, base = newest_step(options.adapter), newest_step(options.base)
    with HFDirectory(base) as model:
        files = {file.path for file in model.file_of.values()}
    num_bytes = sum(file.stat().st_size for file in files)
    with progress_bar("", num_bytes, 0, False if options.json else None) as done:
        merged = merge_files(adapter, base, options.out, done)
    if options.json:
        print(json.dumps({"out": str(options.out), **vars(merged)}))
    else:
        print(
            f"{options.out}: {merged.tensors} tensors, of which {merged.merged} have an adapter "
            f"merged into them and {merged.replaced} are the adapter's own"
        )
    return 0
