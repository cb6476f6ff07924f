"""Peak memory of a step with gradient checkpointing, with and without sequence parallelism.

    python benchmarks/sequence_parallel.py [--malloc default|tuned|all] [--repetitions N]
                                           [--smallest] [--update-docs]

What is measured and how: docs/benchmarks/sequence_parallel.md. It exits with an error when the
competitors' losses differ.
"""

from __future__ import annotations

import itertools
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import harness
from sequence_parallel_ranks import COMPETITORS, DIVIDED, OURS, REPLICATED
from transformers import LlamaConfig, MixtralConfig, PreTrainedConfig

ROWS, TOKENS = harness.size((8, 512), (2, 8))
LAYERS, HIDDEN = harness.size((24, 128), (1, 64))
TP = harness.size((2, 4), (2,))
SIZES = {
    "vocab_size": 512,
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
}
MODELS: dict[str, tuple[PreTrainedConfig, tuple[str, ...]]] = {  # and who runs it
    "Llama": (LlamaConfig(**SIZES), COMPETITORS),
    "Mixtral": (
        MixtralConfig(**{**SIZES, "intermediate_size": HIDDEN // 2}, num_local_experts=8),
        (REPLICATED, OURS),
    ),
}


def measured(weights: str, tp: int, malloc: str, competitor: str, repetitions: int) -> Any:
    """Run one competitor in processes of its own."""
    print(f"# tp = {tp}, {malloc}: {competitor}", file=sys.stderr, flush=True)
    request = {
        "weights": weights,
        "competitor": competitor,
        "rows": ROWS,
        "tokens": TOKENS,
        "repetitions": repetitions,
        "warm_up": harness.size(1, 0),
    }
    script = Path(__file__).with_name("sequence_parallel_ranks.py")
    return harness.run_ranks(script, request, ranks=tp, threads=1, malloc=malloc)


def rows_of(
    case: str, weights: str, tp: int, malloc: str, competitors: tuple[str, ...], repetitions: int
) -> list[list[str]]:
    """Run all competitors of a case, and return their rows of the table."""
    answers = {each: measured(weights, tp, malloc, each, repetitions) for each in competitors}
    expected, rows = answers[REPLICATED]["losses"], []
    for name, answer in answers.items():
        pairs = zip(answer["losses"], expected, strict=True)
        if not all(math.isclose(ours, theirs, rel_tol=1e-4) for ours, theirs in pairs):
            sys.exit(f"{name} has the losses {answer['losses']} instead of {expected}")
        between = LAYERS * ROWS * TOKENS * HIDDEN * 4 / 2**20
        between /= tp if name in DIVIDED else 1
        allocated = [f"{answer[each]:.1f}" for each in ("after_forward", "peak")]
        row = [f"{case}: {name}", f"{between:.0f}"]
        row += allocated if name in (REPLICATED, OURS) else ["", ""]
        rows.append([*row, harness.spread(answer["growths"])])
    return rows


def main() -> None:
    options = harness.parser(__doc__, repetitions=2).parse_args()
    mallocs = harness.chosen(options.malloc, harness.MALLOC_MODES)
    rows = []
    for kind, (config, competitors) in MODELS.items():
        with tempfile.TemporaryDirectory() as weights:
            harness.save_model(weights, config)
            for tp, malloc in itertools.product(TP, mallocs):
                case = f"{kind}, tp = {tp}, {malloc}"
                rows += rows_of(case, weights, tp, malloc, competitors, options.repetitions)
    header = ["MiB of the worst rank", "inputs of layers", "left by forward", "peak"]
    header += ["growth: median (min-max)"]
    table = harness.markdown_table(header, rows)
    harness.publish("sequence_parallel", f"{harness.machine()}.\n\n{table}", options)


if __name__ == "__main__":
    main()
