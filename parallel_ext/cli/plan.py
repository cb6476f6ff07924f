"""Show which layouts a model can be trained in, what memory each takes, and what it sends."""

from __future__ import annotations

import argparse
import gc
import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.filesize import decimal

from parallel_ext.cli.options import number, positive
from parallel_ext.cli.saved import newest_step
from parallel_ext.cli.tables import print_table
from parallel_ext.distributed.errors import CheckpointError

if TYPE_CHECKING:
    from parallel_ext.parallel.estimate import Estimate, Planner, Step

_DTYPES = ("bfloat16", "float16", "float32", "float64")
_OPTIMIZERS = ("adamw", "sgd-momentum", "sgd")
_GROUPS = ("tp", "ep", "dp", "edp")
_MOST_RANKS = 2**20
_COLUMNS = ("weights", "gradients", "optimizer", "gathered", "activations", "peak")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``plan``."""
    parser.add_argument(
        "model", help="a directory with config.json, that file, or a name on the hub"
    )
    parser.add_argument("--world", type=_world, required=True, help="number of ranks")
    parser.add_argument("--tp", type=positive, help="only layouts with this tp")
    parser.add_argument("--ep", type=positive, help="only layouts with this ep")
    parser.add_argument("--dp", type=positive, help="only layouts with this dp, world / tp")
    parser.add_argument("--rows", type=positive, default=1, help="of a dp rank's batch (1)")
    parser.add_argument("--tokens", type=positive, default=2048, help="of a row (2048)")
    parser.add_argument(
        "--dtype", choices=_DTYPES, help="of everything (bfloat16; float32 with --autocast)"
    )
    parser.add_argument(
        "--autocast", choices=_DTYPES[:2], help="dtype of torch.autocast around the forward"
    )
    parser.add_argument("--optimizer", choices=_OPTIMIZERS, default=_OPTIMIZERS[0])
    parser.add_argument("--zero", type=int, choices=(2, 3), default=2, help="where dp > 1 (2)")
    parser.add_argument(
        "--checkpointing", action="store_true", help="layers are recomputed in backward"
    )
    parser.add_argument(
        "--lora-r", type=positive, metavar="R", help="train an adapter of rank R on all-linear"
    )
    parser.add_argument(
        "--sequence-parallel",
        action="store_true",
        help="each tp rank keeps its own tokens between the sublayers",
    )
    gigabytes = number("a number of GB above 0", lambda n: n > 0)
    parser.add_argument(
        "--memory", type=gigabytes, metavar="GB", help="of a rank; 1 if nothing fits"
    )


def run(options: argparse.Namespace) -> int:
    """Print the layouts, the lowest peak first; return 1 where none fits into ``--memory``."""
    import torch  # these take seconds, which the other commands need not
    import transformers

    from parallel_ext.lora import adapt_all_linears
    from parallel_ext.parallel.estimate import Step

    gc.freeze()  # else what was imported is looked through again and again
    transformers.utils.logging.set_verbosity_error()
    planner = _planner(options.model)
    step = Step(
        rows=options.rows,
        tokens=options.tokens,
        dtype=getattr(torch, options.dtype or ("float32" if options.autocast else "bfloat16")),
        autocast=options.autocast and getattr(torch, options.autocast),
        optimizer=options.optimizer,
        zero=options.zero,
        checkpointing=options.checkpointing,
        adapt=options.lora_r and partial(adapt_all_linears, r=options.lora_r),
        sequence_parallel=options.sequence_parallel,
    )
    found, refused = _all(planner, step, options)
    limit = options.memory and options.memory * 1e9
    if options.json:
        layouts = [asdict(one) for one in found]
        if limit is not None:
            layouts = [one | {"fits": one["peak"][0] <= limit} for one in layouts]
        report = {"layouts": layouts, "refused": refused}
        print(json.dumps(report, indent=2))
    else:
        _print(found, refused, limit)
    fits = any(limit is None or one.peak[0] <= limit for one in found)
    return 0 if fits else 1


def _planner(model: str) -> Planner:
    """Read the configuration of a model; of a root of training checkpoints, of its last step."""
    from parallel_ext.parallel.estimate import Planner

    path = Path(model)
    try:
        return Planner.of(str(newest_step(path)) if path.is_dir() else model)
    except CheckpointError as error:
        if path.exists() or not isinstance(error.__cause__, OSError):
            raise
        raise CheckpointError(
            f"there is no directory or file {model}; as a name on the hub: {error}"
        ) from error


def _all(
    planner: Planner, step: Step, options: argparse.Namespace
) -> tuple[list[Estimate], dict[str, str]]:
    """Return the layouts by their peaks, and why others are none."""
    found, refused = [], {}
    for tp, ep in planner.layouts(options.world):
        wanted = (options.tp, tp), (options.ep, ep), (options.dp, options.world // tp)
        if all(asked in (None, side) for asked, side in wanted):
            try:
                found.append(planner.estimate(options.world, tp, ep, step))
            except ValueError as error:
                refused[f"tp={tp} ep={ep}"] = str(error)
    if not found and not refused:
        raise CheckpointError(
            f"plan: --tp, --ep and --dp must divide --world {options.world}, tp times dp is the "
            "world, and a model without experts has ep=1"
        )
    return sorted(found, key=lambda one: one.peak[0]), refused


def _print(found: list[Estimate], refused: dict[str, str], limit: float | None) -> None:
    fits = [] if limit is None else ["fits"]
    rows = []
    for one in found:
        shown = [_shown(getattr(one, name)) for name in _COLUMNS]
        mark = [] if limit is None else ["yes" if one.peak[0] <= limit else "no"]
        rows.append([one.tp, one.ep, one.dp, *shown, *mark])
    if found:
        print_table(["tp", "ep", "dp", *_COLUMNS, *fits], rows)
        print("\nwhat a rank sends in a step, in collectives of its group:")
        groups = [name for name in _GROUPS if any(name in one.sent[0] for one in found)]
        sent = [[one.tp, one.ep, one.dp, *(_sent(one, name) for name in groups)] for one in found]
        print_table(["tp", "ep", "dp", *(f"over {name}" for name in groups)], sent)
        model, checkpoint = found[0].model_on_disk, found[0].checkpoint_on_disk
        written = _shown(found[0].written)
        print(f"\non disk: model {decimal(model)}, training checkpoint {decimal(checkpoint)}")
        print(f"of the checkpoint a rank writes {written}")
    for layout, why in refused.items():
        print(f"{layout}: {why.removeprefix('parallelize: ')}")


def _shown(of_ranks: tuple[int, int]) -> str:
    """Return the largest size of a rank, and the smallest where that is another."""
    if not of_ranks[0]:
        return "-"
    largest, smallest = (decimal(size) for size in of_ranks)
    return largest if largest == smallest else f"{smallest} to {largest}"


def _sent(one: Estimate, group: str) -> str:
    """Return the bytes that ranks send to a group, and in how many collectives rank 0 does."""
    nbytes, numbers = (
        [sum(kind[what] for kind in sent.get(group, {}).values()) for sent in one.sent]
        for what in ("bytes", "collectives")
    )
    return f"{_shown((max(nbytes), min(nbytes)))} in {numbers[0]}" if numbers[0] else "-"


def _world(text: str) -> int:
    number = positive(text)
    if number > _MOST_RANKS:  # of which the ranges of each tensor would be listed
        raise argparse.ArgumentTypeError(f"{text} is more than the {_MOST_RANKS} ranks of a plan")
    return number
