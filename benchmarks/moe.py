"""A layer of experts on 2 ranks, forward and backward, beside transformers' expert parallelism.

    python benchmarks/moe.py [--dtype float32|bfloat16|all] [--routing even|zipf|all]
                             [--malloc default|tuned|all] [--repetitions N] [--smallest] [--profile]
                             [--update-docs]

What is measured and how: docs/benchmarks/moe.md. It exits with an error when competitors
do not compute the same thing.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import harness
from moe_ranks import (
    COMPETITORS,
    EAGER,
    FLOOR,
    GROUPED,
    LOCAL_COMPETITORS,
    LOCAL_EAGER,
    LOCAL_FLOOR,
    LOCAL_GROUPED,
    LOCAL_OURS,
    OURS,
    TITAN,
)

RANKS = Path(__file__).with_name("moe_ranks.py")
DTYPES, ROUTINGS = ("float32", "bfloat16"), ("even", "zipf")
# Relative to the largest element; bf16 sums in other orders.
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}
# At most so many times the floor; at least so much faster than theirs beside the products.
OVER_FLOOR, LOCAL_STEPS, GROWTH = {"float32": 1.3, "bfloat16": 1.6}, 3.0, 0.5


@dataclass
class Layer:
    """Everything measured for one dtype, routing and malloc mode."""

    name: str
    rounds: list[harness.Round]
    growth_mib: dict[str, float]
    profile: dict[str, str]

    def times_of(self, name: str) -> list[float]:
        return harness.seconds(self.rounds).get(name, [])

    def median(self, name: str) -> float:
        times = self.times_of(name)
        return statistics.median(times) if times else float("nan")

    def ratio(self, name: str, other: str) -> float:
        """Median time of one over that of another."""
        return self.median(name) / self.median(other)

    def beside_products(self, peer: str) -> float:
        """The same of what a layer alone takes beside its products."""
        floor = self.median(LOCAL_FLOOR)
        return (self.median(peer) - floor) / (self.median(LOCAL_OURS) - floor)

    def least_growth(self) -> float:
        """Ours over the least of the peers'."""
        return self.growth_mib[OURS] / min(self.growth_mib[name] for name in (GROUPED, EAGER))


def _judged(value: float, limit: float, met: bool) -> str:
    return f"{value:.2f} ({limit:g} {'met' if met else '**missed**'})"


def tables(results: list[Layer]) -> str:
    """Ratios, times and memory."""
    ratios, times, alone, growth = [], [], [], []
    for r in results:
        limit = OVER_FLOOR[r.name.split(",")[0]]
        over, memory = r.ratio(OURS, FLOOR), r.least_growth()
        beside = [r.beside_products(peer) for peer in (LOCAL_GROUPED, LOCAL_EAGER)]
        titan = r.ratio(TITAN, OURS)
        ratios.append(
            [
                r.name,
                *(f"{r.ratio(peer, OURS):.2f}" for peer in (GROUPED, EAGER)),
                "" if titan != titan else f"{titan:.2f}",
                _judged(over, limit, over <= limit),
                *(_judged(value, LOCAL_STEPS, value >= LOCAL_STEPS) for value in beside),
                _judged(memory, GROWTH, memory <= GROWTH),
                f"{harness.disturbance(r.rounds):.0%}",
            ]
        )
        spreads = {
            n: harness.spread([1e3 * s for s in r.times_of(n)]) if r.times_of(n) else ""
            for n in (*COMPETITORS, *LOCAL_COMPETITORS)
        }
        times.append([r.name, *(spreads[name] for name in COMPETITORS)])
        alone.append([r.name, *(spreads[name] for name in LOCAL_COMPETITORS)])
        growth.append([r.name, *(f"{r.growth_mib.get(n, 0):.0f}" for n in COMPETITORS[:-1])])
    heads = [
        *("grouped_mm / ours", "eager / ours", "torchtitan / ours", "ours / floor"),
        *("grouped_mm / ours, local steps", "eager / ours, local steps"),
        *("growth, ours / least of theirs", "disturbed"),
    ]
    return "\n\n".join(
        (
            harness.markdown_table(["", *heads], ratios),
            harness.markdown_table(["ms: median (min-max)", *COMPETITORS], times),
            harness.markdown_table(["ms: median (min-max)", *LOCAL_COMPETITORS], alone),
            harness.markdown_table(["peak growth, MiB", *COMPETITORS[:-1]], growth),
        )
    )


def main() -> None:
    parser = harness.parser(__doc__, repetitions=8)
    harness.add_dtypes(parser, DTYPES)
    of_routing = harness.size("all", "zipf")
    parser.add_argument("--routing", choices=[*ROUTINGS, "all"], default=of_routing)
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
