"""A layer of experts on 2 ranks, forward and backward, beside transformers' expert parallelism.

    python benchmarks/moe.py [--dtype float32|bfloat16|all] [--routing even|zipf|all]
                             [--malloc default|tuned|all] [--repetitions N] [--profile]
                             [--update-readme]

What is measured and how is in README.md beside this file. It exits with an error when competitors
do not compute the same thing.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import harness
from moe_ranks import COMPETITORS, EAGER, FLOOR, GROUPED, OURS

RANKS = Path(__file__).with_name("moe_ranks.py")
DTYPES, ROUTINGS = ("float32", "bfloat16"), ("even", "zipf")
# Relative to the largest element; bf16 sums in other orders.
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}


@dataclass
class Layer:
    """Everything measured for one dtype, routing and malloc mode."""

    name: str
    rounds: list[harness.Round]
    growth_mib: dict[str, float]
    profile: dict[str, str]

    def times_of(self, name: str) -> list[float]:
        return harness.seconds(self.rounds)[name]

    def ratio(self, name: str, other: str) -> str:
        """Median time of one over that of another."""
        medians = (statistics.median(self.times_of(each)) for each in (name, other))
        return f"{next(medians) / next(medians):.2f}"


def tables(results: list[Layer]) -> str:
    """Times, ratios and memory."""
    times = [
        [r.name, *(harness.spread([1e3 * s for s in r.times_of(n)]) for n in COMPETITORS)]
        for r in results
    ]
    ratios = [
        [
            r.name,
            *(r.ratio(peer, OURS) for peer in (GROUPED, EAGER)),
            r.ratio(OURS, FLOOR),
            f"{harness.disturbance(r.rounds):.0%}",
        ]
        for r in results
    ]
    names = [name for name in COMPETITORS if name != FLOOR]
    growth = [[r.name, *(f"{r.growth_mib[name]:.0f}" for name in names)] for r in results]
    return "\n\n".join(
        (
            harness.markdown_table(
                ["", "grouped_mm / ours", "eager / ours", "ours / floor", "disturbed"], ratios
            ),
            harness.markdown_table(["ms: median (min-max)", *COMPETITORS], times),
            harness.markdown_table(["peak growth, MiB", *names], growth),
        )
    )


def main() -> None:
    parser = harness.parser(__doc__, repetitions=8)
    parser.add_argument("--dtype", choices=[*DTYPES, "all"], default="all")
    parser.add_argument("--routing", choices=[*ROUTINGS, "all"], default="all")
    parser.add_argument("--profile", action="store_true", help="print what the operators cost")
    options = parser.parse_args()
    results = []
    for dtype, routing, malloc in itertools.product(
        harness.chosen(options.dtype, DTYPES),
        harness.chosen(options.routing, ROUTINGS),
        harness.chosen(options.malloc, harness.MALLOC_MODES),
    ):
        name = f"{dtype}, {routing}, {malloc}"
        print(f"# {name}", file=sys.stderr, flush=True)
        request = {
            "dtype": dtype,
            "routing": routing,
            "repetitions": options.repetitions,
            "profile": options.profile,
        }
        answer = harness.run_ranks(RANKS, request, ranks=2, threads=1, malloc=malloc)
        for peer, error in answer["errors"].items():
            if not error <= TOLERANCE[dtype]:
                sys.exit(f"{peer} does not compute the same layer: {name} is off by {error}")
        rounds = [harness.Round(**values) for values in answer["rounds"]]
        results.append(Layer(name, rounds, answer["growth_mib"], answer["profile"]))
        for title, text in answer["profile"].items():
            print(f"\n{name}: {title}\n{text}", file=sys.stderr)
    harness.publish("moe", f"On {harness.machine()}.\n\n{tables(results)}", options)


if __name__ == "__main__":
    main()
