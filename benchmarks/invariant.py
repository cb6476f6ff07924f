"""A training step with the same bits on any layout, beside the ordinary one: ``px.Invariant``.

    python benchmarks/invariant.py [--part tp|leaves|lora|mixture|all]
                                   [--dtype float32|bfloat16|all] [--malloc default|tuned|all]
                                   [--layout NAME ...] [--repetitions N] [--smallest]
                                   [--update-docs]

What is measured and how: docs/benchmarks/invariant.md. It exits with an error when the losses of
the two modes differ by more than rounding.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import harness
from invariant_ranks import MODES, SIZES, TOKENS

RANKS = Path(__file__).with_name("invariant_ranks.py")
TARGET, TARGET_OF_SHORT_LEAVES = 1.15, 1.3  # time of a step over that of the ordinary mode
NO_TARGET = ("tp=3",)  # of 8 blocks two ranks hold 3, and 3 ranks share 2 cores
TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2}  # of a loss, relative


# By part: name of a layout -> tp and dp, and the leaves of a batch; 0: no px.train_leaves.
PARTS = {
    "tp": {"tp=1": (1, 1, 0), "tp=2": (2, 1, 0), "tp=3": (3, 1, 0)},
    "leaves": {
        **{"1 rank": (1, 1, 2), "dp=2": (1, 2, 2)},
        **{"1 rank, 4 leaves": (1, 1, 4), "dp=2, 4 leaves": (1, 2, 4)},
    },
    "lora": {"tp=1": (1, 1, 0), "tp=2": (2, 1, 0)},
    "mixture": {"tp=1": (1, 1, 0), "tp=ep=2": (2, 1, 0)},
}


def run_row(dtype: str, malloc: str, name: str, part: str, repetitions: int) -> str:
    """Return a row of the table, measured in new ranks."""
    tp, dp, leaves = PARTS[part][name]
    request = {
        **{"dtype": dtype, "repetitions": repetitions, "tp": tp, "leaves": leaves},
        "model": part if part in ("lora", "mixture") else "llama",
    }
    answer = harness.run_ranks(RANKS, request, ranks=tp * dp, threads=1, malloc=malloc)
    for ordinary, invariant in zip(*(answer[mode]["losses"] for mode in MODES), strict=True):
        if abs(invariant / ordinary - 1) > TOLERANCE[dtype]:
            raise SystemExit(f"the losses differ: {ordinary} and {invariant}")
    times = {mode: [1e3 * spent for spent in answer[mode]["times"]] for mode in MODES}
    cells = (
        f"{statistics.median(of_mode):.0f} ({min(of_mode):.0f}-{max(of_mode):.0f})"
        for of_mode in times.values()
    )
    ratio = statistics.median(times[MODES[1]]) / statistics.median(times[MODES[0]])
    target = TARGET if leaves <= 2 else TARGET_OF_SHORT_LEAVES
    met = "none" if name in NO_TARGET else f"{target} {'met' if ratio <= target else '**missed**'}"
    return f"| {dtype}, {malloc} | {name} | {' | '.join(cells)} | {ratio:.2f} | {met} |"


def run_part(part: str, options: argparse.Namespace) -> None:
    """Print the table of a part."""
    rows = [
        run_row(dtype, malloc, name, part, options.repetitions)
        for dtype in harness.chosen(options.dtype, TOLERANCE)
        for malloc in harness.chosen(options.malloc, harness.MALLOC_MODES)
        for name in PARTS[part]
        if name in (options.layout or PARTS[part])
    ]
    head = [
        f"{harness.machine()}. {SIZES['num_hidden_layers']} layers, {TOKENS} tokens.\n",
        f"| ms: median (min-max) | layout | {' | '.join(MODES)} | ratio | target |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    harness.publish(f"invariant {part}", "\n".join([*head, *rows]), options)


def main() -> None:
    parser = harness.parser(__doc__, repetitions=12)
    harness.add_dtypes(parser, TOLERANCE)
    parser.add_argument("--part", choices=[*PARTS, "all"], default="all")
    parser.add_argument("--layout", nargs="+", help="some, by their names in the tables")
    options = parser.parse_args()
    for part in harness.chosen(options.part, PARTS):
        run_part(part, options)


if __name__ == "__main__":
    main()
