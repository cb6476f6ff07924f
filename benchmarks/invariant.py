"""A training step with the same bits on any layout, beside the ordinary one: ``px.Invariant``.

    python benchmarks/invariant.py [--dtype float32|bfloat16|all] [--malloc default|tuned|all]
                                   [--tp 1 2] [--repetitions N] [--smallest] [--update-docs]

What is measured and how: docs/benchmarks/invariant.md. It exits with an error when the losses of
the two modes differ by more than rounding.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import harness
from invariant_ranks import MODES, SIZES, TOKENS

RANKS = Path(__file__).with_name("invariant_ranks.py")
TARGET = 1.15  # time of a step over that of the ordinary mode
TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2}  # of a loss, relative


def run_row(dtype: str, malloc: str, tp: int, repetitions: int) -> str:
    """Return a row of the table, measured in new ranks."""
    request = {"dtype": dtype, "repetitions": repetitions}
    answer = harness.run_ranks(RANKS, request, ranks=tp, threads=1, malloc=malloc)
    for ordinary, invariant in zip(*(answer[mode]["losses"] for mode in MODES), strict=True):
        if abs(invariant / ordinary - 1) > TOLERANCE[dtype]:
            raise SystemExit(f"the losses differ: {ordinary} and {invariant}")
    times = {mode: [1e3 * spent for spent in answer[mode]["times"]] for mode in MODES}
    cells = (
        f"{statistics.median(of_mode):.0f} ({min(of_mode):.0f}-{max(of_mode):.0f})"
        for of_mode in times.values()
    )
    ratio = statistics.median(times[MODES[1]]) / statistics.median(times[MODES[0]])
    met = "met" if ratio <= TARGET else "**missed**"
    return f"| {dtype}, {malloc} | {tp} | {' | '.join(cells)} | {ratio:.2f} | {met} |"


def main() -> None:
    parser = harness.parser(__doc__, repetitions=12)
    harness.add_dtypes(parser, TOLERANCE)
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 2], help="ranks")
    options = parser.parse_args()
    rows = [
        run_row(dtype, malloc, tp, options.repetitions)
        for dtype in harness.chosen(options.dtype, TOLERANCE)
        for malloc in harness.chosen(options.malloc, harness.MALLOC_MODES)
        for tp in options.tp
    ]
    head = [
        f"{harness.machine()}. {SIZES['num_hidden_layers']} layers, {TOKENS} tokens.\n",
        f"| ms: median (min-max) | tp | {' | '.join(MODES)} | ratio | target {TARGET} |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    harness.publish("invariant", "\n".join([*head, *rows]), options)


if __name__ == "__main__":
    main()
