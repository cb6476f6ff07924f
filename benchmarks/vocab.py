"""A sharded vocabulary on 2 ranks: loss, head and embedding beside those of others.

    python benchmarks/vocab.py [--part cross_entropy|linear|embedding|all]
                               [--dtype float32|bfloat16|all] [--malloc default|tuned|all]
                               [--repetitions N] [--smallest] [--update-docs]

What is measured and how: docs/benchmarks/vocab.md. What computes something else is not
timed; when that is ours, the program exits with an error.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import harness
import vocab_peers as peers
import vocab_ranks as ranks
from vocab_ranks import FROZEN, OURS

RANKS = Path(__file__).with_name("vocab_ranks.py")
PARTS = ("cross_entropy", "linear", "embedding")
SIZES = {"cross_entropy": (32000, 65535), "linear": (32000,), "embedding": (32000,)}
if harness.SMALLEST:
    SIZES = {"cross_entropy": (509,), "linear": (508,), "embedding": (508,)}
ROUNDS = harness.size(2, 1)  # of processes that take turns
SLOW = 2  # repetitions of what takes seconds
# Relative to the largest element, from fp64.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}

LOSS_ONE = [ranks.ONE, ranks.ONE_FLOAT]
HEAD_ONE = [ranks.ONE, ranks.ONE_FUSED]
CROSS_ENTROPY = [
    *(OURS, ranks.OURS_IN_PLACE, peers.MEGATRON, peers.MEGATRON_IN_PLACE),
    *(peers.LOSS_PARALLEL, peers.LOSS_PARALLEL_FLOAT, peers.GATHERED, ranks.PASSES, *LOSS_ONE),
]
LINEAR = [
    *(OURS, ranks.OURS_TWO_OPS, peers.MEGATRON, peers.MEGATRON_IN_PLACE, peers.LOSS_PARALLEL),
    *(peers.LOSS_PARALLEL_FLOAT, peers.GATHERED, ranks.PRODUCTS, *HEAD_ONE, ranks.ONE_CHUNKED),
]
EMBEDDING = [OURS, peers.MEGATRON_EMBEDDING, peers.DTENSOR, ranks.ALL_REDUCE]

# Theirs over ours, ours over the floor, growth of memory over one buffer of gradients.
LOSS_TARGETS = {"megatron": 2.0, "loss_parallel": 3.0, "one": 1.0}
OVER_PRODUCTS, FROZEN_OVER_TRAINED = {"float32": 1.05, "bfloat16": 1.10}, 0.75
OVER_ALL_REDUCE, MEGATRON_OVER_EMBEDDING = 1.4, 2.0
GROWTH_SLACK = 0.05  # of what is allowed to grow: pages and the exchange


@dataclass
class Result:
    """Everything measured for one size, dtype and malloc mode; the ranks and one process."""

    size: str
    dtype: str
    malloc: str
    rounds: list[list[harness.Round]] = field(default_factory=list)
    growth_mib: dict[str, float] = field(default_factory=dict)
    wrong: dict[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.size}, {self.dtype}, {self.malloc}"

    def times(self, name: str) -> list[float]:
        return [s for rounds in self.rounds for s in harness.seconds(rounds).get(name, [])]

    def median(self, name: str) -> float:
        times = self.times(name)
        return statistics.median(times) if times else float("nan")

    @property
    def disturbed(self) -> str:
        return f"{max(harness.disturbance(rounds) for rounds in self.rounds):.0%}"

    def add(self, answer: dict[str, Any]) -> None:
        """Take in what one run of processes answered; exit when ours is wrong."""
        self.rounds.append([harness.Round(**values) for values in answer["rounds"]])
        self.growth_mib |= answer["growth_mib"]
        for name, error in answer["errors"].items():
            if not error <= TOLERANCE[self.dtype]:
                self.wrong[name] = error
            if name in self.wrong and name.startswith(OURS):
                sys.exit(f"{name} does not compute the same: {self.name} is off by {error}")


def ask(result: Result, part: str, count: int, repetitions: int, **more: Any) -> Any:
    """One run of ``count`` ranks, or of one process with as many threads as they have."""
    request = {
        "part": part,
        "ranks": count,
        "dtype": result.dtype,
        "repetitions": repetitions,
        "tolerance": TOLERANCE[result.dtype],
        **more,
    }
    print(f"# {part}: {result.name}, {count} ranks", file=sys.stderr, flush=True)
    threads = ranks.RANKS // count
    return harness.run_ranks(RANKS, request, ranks=count, threads=threads, malloc=result.malloc)


def measure(part: str, vocab_size: int, dtype: str, malloc: str, repetitions: int) -> Result:
    """All runs of one row; what cannot share a process takes turns."""
    result = Result(f"V = {vocab_size}", dtype, malloc)

    def run(count: int, repetitions: int, only: Sequence[str] = ()) -> None:
        more = {"vocab_size": vocab_size, "only": list(only)}
        result.add(ask(result, part, count, repetitions, **more))

    for _ in range(ROUNDS):
        run(ranks.RANKS, -(-repetitions // ROUNDS))
        if part == "cross_entropy":
            run(1, -(-repetitions // ROUNDS))
        if part == "linear":
            both = [name + kind for name in HEAD_ONE for kind in ("", FROZEN)]
            run(1, -(-repetitions // ROUNDS), both)
    if part == "linear":
        run(1, SLOW, [ranks.ONE_CHUNKED, ranks.ONE_CHUNKED + FROZEN])
    return result


# Tables.


def by_competitor(
    results: Sequence[Result], title: str, names: Sequence[str], cell: Callable[[Result, str], str]
) -> str:
    """A column for every competitor that ran anywhere."""
    ran = [n for n in names if any(result.times(n) for result in results)]
    rows = [[r.name, *(cell(r, n) if r.times(n) else "" for n in ran)] for r in results]
    return harness.markdown_table([title, *ran], rows)


def times(results: Sequence[Result], names: Sequence[str]) -> str:
    return by_competitor(
        results,
        "ms: median (min-max)",
        names,
        lambda result, name: harness.spread([1e3 * s for s in result.times(name)], 1),
    )


def growth(results: Sequence[Result], names: Sequence[str]) -> str:
    return by_competitor(
        results,
        "peak growth, MiB",
        [name for name in names if any(name in result.growth_mib for result in results)],
        lambda result, name: f"{result.growth_mib[name]:.0f}",
    )


def judged(value: float, limit: float, most: bool) -> str:
    """A number and its target: at most, or at least, ``limit``; nothing where it was not run."""
    if value != value:
        return ""
    met = value <= limit if most else value >= limit
    return f"{value:.2f} ({limit:g} {harness.verdict(met)})"


def tuned(result: Result, results: Sequence[Result]) -> Result:
    """The same row with tuned malloc, where that was run."""
    same = [r for r in results if (r.size, r.dtype) == (result.size, result.dtype)]
    return next((r for r in same if r.malloc == "tuned"), result)


def megatron(result: Result) -> float:
    """Of the form that keeps no copy: in bf16 there is one form."""
    in_place = result.median(peers.MEGATRON_IN_PLACE)
    return in_place if in_place == in_place else result.median(peers.MEGATRON)


def cross_entropy_tables(results: Sequence[Result]) -> str:
    rows = []
    for result, ours in itertools.product(results, (OURS, ranks.OURS_IN_PLACE)):
        if not result.times(ours):
            continue
        at_tuned, own = tuned(result, results), result.median(ours)
        one = min((at_tuned.median(n) for n in LOSS_ONE if at_tuned.times(n)), default=float("nan"))
        most = 0.0 if ours == ranks.OURS_IN_PLACE else 1.0
        item = 4 if result.dtype == "float32" else 2
        vocab_size = int(result.size.removeprefix("V = "))
        local_mib = ranks.TOKENS * -(-vocab_size // ranks.RANKS) * item / 2**20
        parallel = at_tuned.median(peers.LOSS_PARALLEL)
        rows.append(
            [
                f"{ours}: {result.name}",
                judged(megatron(result) / own, LOSS_TARGETS["megatron"], most=False),
                judged(parallel / own, LOSS_TARGETS["loss_parallel"], most=False),
                judged(one / own, LOSS_TARGETS["one"], most=False),
                f"{result.median(peers.GATHERED) / own:.1f}",
                f"{own / result.median(ranks.PASSES):.2f}",
                judged(result.growth_mib[ours] / local_mib, most + GROWTH_SLACK, most=True),
                result.disturbed,
            ]
        )
    head = [
        *("", "megatron-core / ours", "loss_parallel tuned / ours", "one process tuned / ours"),
        *("gathered / ours", "ours / two passes", "growth / local logits", "disturbed"),
    ]
    parts = [times(results, CROSS_ENTROPY), growth(results, CROSS_ENTROPY)]
    return "\n\n".join([harness.markdown_table(head, rows), *parts])


def linear_tables(results: Sequence[Result]) -> str:
    rows = []
    for result in results:
        ours, frozen = result.median(OURS), result.median(OURS + FROZEN)
        over = ours / result.median(ranks.PRODUCTS)
        rows.append(
            [
                result.name,
                judged(over, OVER_PRODUCTS[result.dtype], most=True),
                judged(frozen / ours, FROZEN_OVER_TRAINED, most=True),
                f"{frozen / result.median(ranks.PRODUCTS + FROZEN):.2f}",
                f"{megatron(result) / ours:.2f}",
                f"{result.median(peers.LOSS_PARALLEL) / ours:.2f}",
                f"{result.median(ranks.ONE_CHUNKED) / ours:.2f}",
                result.disturbed,
            ]
        )
    head = [
        *("", "ours / three products", "frozen head / trained", "frozen head / two products"),
        *("megatron-core / ours", "loss_parallel / ours", "chunked / ours", "disturbed"),
    ]
    parts = [harness.markdown_table(head, rows)]
    for names in (LINEAR, [name + FROZEN for name in LINEAR]):
        parts += [times(results, names), growth(results, names)]
    return "\n\n".join(parts)


def embedding_tables(results: Sequence[Result]) -> str:
    rows = []
    for result in results:
        ours, bare = result.median(OURS), result.median(ranks.ALL_REDUCE)
        theirs = result.median(peers.MEGATRON_EMBEDDING)
        over, faster = ours / bare, theirs / ours
        rows.append(
            [
                result.name,
                judged(over, OVER_ALL_REDUCE, most=True)
                if result.malloc == "tuned"
                else f"{over:.2f}",
                judged(faster, MEGATRON_OVER_EMBEDDING, most=False)
                if result.malloc == "default"
                else f"{faster:.2f}",
                f"{result.median(peers.DTENSOR) / ours:.2f}",
                result.disturbed,
            ]
        )
    head = ["", "ours / bare all-reduce", "megatron-core / ours", "DTensor / ours", "disturbed"]
    table = harness.markdown_table(head, rows)
    return "\n\n".join([table, times(results, EMBEDDING), growth(results, EMBEDDING)])


TABLES = {
    "cross_entropy": cross_entropy_tables,
    "linear": linear_tables,
    "embedding": embedding_tables,
}


def run(part: str, options: argparse.Namespace) -> str:
    """Measure all rows that the options leave; the tables, and what is missing from them."""
    modes = list(
        itertools.product(
            harness.chosen(options.dtype, TOLERANCE),
            harness.chosen(options.malloc, harness.MALLOC_MODES),
        )
    )
    rows = [
        measure(part, size, *mode, options.repetitions) for size in SIZES[part] for mode in modes
    ]
    text = [f"On {harness.machine()}.", TABLES[part](rows)]
    if not any(r.times(n) for r in rows for n in MEGATRON_NAMES):
        text.append("megatron-core could not be imported: it was not run.")
    for result in rows:
        text += [f"Not timed, for it is wrong: {result.name}, {n}." for n in result.wrong]
    return "\n\n".join(text)


MEGATRON_NAMES = (peers.MEGATRON, peers.MEGATRON_IN_PLACE, peers.MEGATRON_EMBEDDING)


def main() -> None:
    parser = harness.parser(__doc__, repetitions=8)
    parser.add_argument("--part", choices=[*PARTS, "all"], default="all")
    harness.add_dtypes(parser, TOLERANCE)
    options = parser.parse_args()
    for part in harness.chosen(options.part, PARTS):
        harness.publish(f"vocab {part}", run(part, options), options)


if __name__ == "__main__":
    main()
