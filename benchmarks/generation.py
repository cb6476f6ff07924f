"""Tokens per second of a real model at tp = 2, by logits on shards and by gathered ones.

    SMOLLM2=DIRECTORY python benchmarks/generation.py [--malloc default|tuned|all]
                                                      [--repetitions N] [--smallest]
                                                      [--update-docs]

What is measured and how: docs/benchmarks/generation.md. It exits with an error when greedy search
finds different tokens by the two ways.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import harness
from generation_ranks import GATHERED, ON_SHARDS

TOKENS, WARM_UP = harness.size((32, 1), (4, 0))
ROWS = harness.size((1, 8), (2,))
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "temperature": {"do_sample": True, "top_k": 0, "temperature": 0.8},
    "top_k = 50, top_p = 0.9": {"do_sample": True, "top_k": 50, "top_p": 0.9},
    "top_p = 0.9": {"do_sample": True, "top_k": 0, "top_p": 0.9},
}


if harness.SMALLEST:
    OPTIONS = {"greedy": OPTIONS["greedy"]}


def measured(weights: str, malloc: str, rows: int, name: str, repetitions: int) -> list[str]:
    """The row of the table for one way to choose."""
    request = {
        "weights": weights,
        "rows": rows,
        "options": OPTIONS[name],
        "tokens": TOKENS,
        "repetitions": repetitions,
        "warm_up": WARM_UP,
    }
    print(f"# {malloc}: {name}, {rows} rows", file=sys.stderr, flush=True)
    script = Path(__file__).with_name("generation_ranks.py")
    answer = harness.run_ranks(script, request, ranks=2, threads=1, malloc=malloc)
    if not OPTIONS[name]["do_sample"] and not answer["same"]:
        sys.exit(f"{ON_SHARDS} and {GATHERED} find different tokens for {rows} rows")
    rounds = [harness.Round(**values) for values in answer["rounds"]]
    rates = {
        way: [rows * TOKENS / seconds for seconds in times]
        for way, times in harness.seconds(rounds).items()
    }
    ratio = statistics.median(rates[ON_SHARDS]) / statistics.median(rates[GATHERED])
    return [
        f"{name}, {rows} x, {malloc}",
        *(harness.spread(rates[way], 1) for way in (ON_SHARDS, GATHERED)),
        f"{ratio:.2f}",
        *(str(answer["bytes"][way]) for way in (ON_SHARDS, GATHERED)),
        f"{harness.disturbance(rounds):.0%}",
    ]


def main() -> None:
    options = harness.parser(__doc__, repetitions=8).parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        weights = scratch if harness.SMALLEST else os.environ.get("SMOLLM2")
        if not weights:
            sys.exit("SMOLLM2 must name a directory with SmolLM2; `make test` prepares one")
        if harness.SMALLEST:
            sizes = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
            harness.save_llama(
                weights, vocab_size=509, hidden_size=32, intermediate_size=64, **sizes
            )
        rows = table_rows(weights, options)
    header = ["tokens/s: median (min-max)", ON_SHARDS, GATHERED, "ratio"]
    header += [f"bytes gathered a token: {way}" for way in (ON_SHARDS, GATHERED)]
    table = harness.markdown_table([*header, "disturbed"], rows)
    harness.publish("generation", f"{harness.machine()}.\n\n{table}", options)


def table_rows(weights: str, options: argparse.Namespace) -> list[list[str]]:
    """A row for each malloc mode, number of prompts and way to choose."""
    mallocs = harness.chosen(options.malloc, harness.MALLOC_MODES)
    return [
        measured(weights, malloc, count, name, options.repetitions)
        for malloc, count, name in itertools.product(mallocs, ROWS, OPTIONS)
    ]


if __name__ == "__main__":
    main()
