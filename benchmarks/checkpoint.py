"""Saving and loading a Llama of 485 MiB at tp = 2: ours, transformers, DCP.

    python benchmarks/checkpoint.py [--malloc default|tuned|all] [--repetitions N] [--smallest]
                                    [--update-docs]

What is measured and how: docs/benchmarks/checkpoint.md.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

import harness
from checkpoint_ranks import OURS

RANKS = Path(__file__).with_name("checkpoint_ranks.py")


def save_weights(directory: str) -> float:
    """The model that all load and save; returns its size in MiB."""
    model = harness.save_llama(
        directory,
        vocab_size=harness.size(32000, 509),
        hidden_size=harness.size(768, 48),
        intermediate_size=harness.size(2048, 64),
        num_hidden_layers=harness.size(12, 1),
        num_attention_heads=12,
        num_key_value_heads=6,
    )
    return sum(p.nbytes for p in model.parameters()) / 2**20


def table(kind: str, answers: dict[str, Any], size: float) -> str:
    """One row for each malloc mode and competitor."""
    header = [kind, "s: median (min-max)", "ours / this", "peak growth, MiB"]
    header += ["written / model"] * (kind == "save") + ["disturbed"]
    rows = []
    for malloc, answer in answers.items():
        rounds = [harness.Round(**values) for values in answer[kind]["rounds"]]
        seconds, growth = harness.seconds(rounds), answer[kind]["growth_mib"]
        for name in growth:
            values = seconds[name]
            ratio = statistics.median(seconds[OURS]) / statistics.median(values)
            row = [f"{name}, {malloc}", harness.spread(values, 2), f"{ratio:.2f}"]
            row.append(f"{growth[name]:.0f}")
            if kind == "save":
                row.append(f"{answer[kind]['written_mib'][name] / size:.2f}")
            rows.append([*row, f"{harness.disturbance(rounds):.0%}"])
    return harness.markdown_table(header, rows)


def main() -> None:
    options = harness.parser(__doc__, repetitions=9).parse_args()
    answers = {}
    with tempfile.TemporaryDirectory() as scratch:
        source = str(Path(scratch, "source"))
        size = save_weights(source)
        for malloc in harness.chosen(options.malloc, harness.MALLOC_MODES):
            request = {
                "source": source,
                "scratch": scratch,
                "repetitions": options.repetitions,
            }
            answers[malloc] = harness.run_ranks(RANKS, request, ranks=2, threads=1, malloc=malloc)
    shard = next(iter(answers.values()))["shard_mib"]
    about = f"{harness.machine()}. Model {size:.0f} MiB, shard of rank 0 {shard:.0f} MiB."
    text = "\n\n".join([about, table("save", answers, size), table("load", answers, size)])
    harness.publish("checkpoint", text, options)


if __name__ == "__main__":
    main()
