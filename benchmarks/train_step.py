"""A whole training step of a Llama at tp = 2: transformers' tensor parallelism, ours, one process.

    python benchmarks/train_step.py [--dtype float32|bfloat16|all] [--malloc default|tuned|all]
                                    [--repetitions N] [--profile] [--update-readme]

What is measured and how is in README.md beside this file. It exits with an error when the losses of
the competitors differ, for then they do not compute the same thing.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import harness
import torch
from train_step_ranks import BATCH, ONE_PROCESS, OURS, SEQUENCE, TRANSFORMERS_TP, VOCABULARY
from transformers import LlamaConfig, LlamaForCausalLM

RANKS = Path(__file__).with_name("train_step_ranks.py")
TOKENS = BATCH * SEQUENCE
COMPETITORS = (TRANSFORMERS_TP, OURS, ONE_PROCESS)
PHASES = ("forward + backward", "optimizer", "step")
ROUNDS, WARM_UP = 2, 2
TARGET = 1.4  # tokens/s of ours over those of transformers' tensor parallelism

# Relative difference of the losses: ranks add up in another order than one process, and in bf16
# Adam, which divides by the gradient's size, makes a different last bit a different weight.
TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2}


@dataclass
class Result:
    """Everything measured for one dtype and malloc mode."""

    dtype: str
    malloc: str
    seconds: dict[str, list[list[float]]] = field(default_factory=dict)
    alone: dict[str, dict[str, Any]] = field(default_factory=dict)
    disturbance: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.dtype}, {self.malloc}"

    def rate(self, competitor: str) -> float:
        """Median tokens/s."""
        return TOKENS / statistics.median(self.phase(competitor, "step"))

    def phase(self, competitor: str, phase: str) -> list[float]:
        return [phases[PHASES.index(phase)] for phases in self.seconds[competitor]]

    def ratio(self, other: str) -> float:
        return self.rate(OURS) / self.rate(other)


def save_weights(directory: str) -> None:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=512,
    )
    LlamaForCausalLM(config).save_pretrained(directory)


def check_losses(losses: Mapping[str, Sequence[float]], reference: list[float], dtype: str) -> None:
    """Exit unless every step of every competitor had the loss of the reference's same step."""
    for name, series in losses.items():
        for step, (loss, expected) in enumerate(zip(series, reference, strict=False)):
            if not abs(loss - expected) <= TOLERANCE[dtype] * abs(expected):
                sys.exit(
                    f"{name} in {dtype} does not compute the same training: its loss at step "
                    f"{step} is {loss}, that of {ONE_PROCESS} is {expected}"
                )


def measure(dtype: str, malloc: str, weights: str, repetitions: int) -> Result:
    """All runs for one dtype and malloc mode; the pair and the one process take turns."""
    result = Result(dtype, malloc, {name: [] for name in COMPETITORS})
    losses: list[dict[str, list[float]]] = []

    def run(task: str, competitors: Sequence[str], repetitions: int) -> dict[str, Any]:
        alone = tuple(competitors) == (ONE_PROCESS,)
        request = {
            "task": task,
            "competitors": competitors,
            "ranks": 1 if alone else 2,
            "dtype": dtype,
            "weights": weights,
            "repetitions": repetitions,
            "warm_up": WARM_UP,
        }
        print(f"# {result.name}: {task} {', '.join(competitors)}", file=sys.stderr, flush=True)
        threads = 2 if alone else 1
        answer = harness.run_ranks(
            RANKS, request, ranks=request["ranks"], threads=threads, malloc=malloc
        )
        losses.append(answer["losses"])
        return answer

    for _ in range(ROUNDS):
        for together in ((TRANSFORMERS_TP, OURS), (ONE_PROCESS,)):
            answer = run("time", together, -(-repetitions // ROUNDS))
            for each in (harness.Round(**values) for values in answer["rounds"]):
                result.disturbance = max(result.disturbance, each.disturbance)
                for name, phases in each.seconds.items():
                    result.seconds[name].append(phases)
    for name in COMPETITORS:
        result.alone[name] = run("alone", (name,), 0)
    reference = next(series[ONE_PROCESS] for series in losses if ONE_PROCESS in series)
    for series in losses:
        check_losses(series, reference, dtype)
    return result


def speed_table(results: Sequence[Result]) -> str:
    header = ["tokens/s: median (min-max)", *COMPETITORS]
    header += [
        f"ours / {TRANSFORMERS_TP}",
        f"ours / {ONE_PROCESS}",
        f"target {TARGET} x",
        "disturbed",
    ]
    rows = []
    for result in results:
        rates = [[TOKENS / s for s in result.phase(name, "step")] for name in COMPETITORS]
        ratio = result.ratio(TRANSFORMERS_TP)
        verdict = "met" if ratio >= TARGET else "**missed**"
        rows.append([result.name, *map(harness.spread, rates)])
        rows[-1] += [f"{ratio:.2f}", f"{result.ratio(ONE_PROCESS):.2f}", verdict]
        rows[-1].append(f"{result.disturbance:.0%}")
    return harness.markdown_table(header, rows)


def phase_table(results: Sequence[Result]) -> str:
    header = ["ms: median (min-max)"]
    header += [f"{name}: {phase}" for name in COMPETITORS for phase in PHASES[:2]]
    rows = []
    for result in results:
        cells = [
            harness.spread([1e3 * s for s in result.phase(name, phase)])
            for name in COMPETITORS
            for phase in PHASES[:2]
        ]
        rows.append([result.name, *cells])
    return harness.markdown_table(header, rows)


def memory_table(results: Sequence[Result]) -> str:
    measures = ("loaded", "trained", "growth")
    header = ["anonymous MiB, worst rank"]
    header += [f"{name}: {measure}" for name in COMPETITORS for measure in measures]
    rows = [
        [result.name]
        + [f"{result.alone[name]['mib'][m]:.0f}" for name in COMPETITORS for m in measures]
        for result in results
    ]
    return harness.markdown_table(header, rows)


def collectives_list(result: Result) -> str:
    lines = []
    for name in (TRANSFORMERS_TP, OURS):
        counts = sorted(result.alone[name]["collectives"].items())
        lines.append(f"- {name}: " + ", ".join(f"{kind} {count}" for kind, count in counts))
    return "\n".join(lines)


def print_profiles(results: Sequence[Result]) -> None:
    for result, name in itertools.product(results, COMPETITORS):
        for phase, text in result.alone[name]["profile"].items():
            print(f"\n{name}, {result.name}, {phase}, time of each operator in itself:\n{text}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", choices=[*TOLERANCE, "all"], default="all")
    parser.add_argument("--malloc", choices=[*harness.MALLOC_MODES, "all"], default="all")
    parser.add_argument("--repetitions", type=int, default=12)
    parser.add_argument("--profile", action="store_true", help="print what the operators cost")
    parser.add_argument("--update-readme", action="store_true", help="put the tables into README")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    dtypes = list(TOLERANCE) if options.dtype == "all" else [options.dtype]
    mallocs = list(harness.MALLOC_MODES) if options.malloc == "all" else [options.malloc]
    with tempfile.TemporaryDirectory() as weights:
        save_weights(weights)
        results = [
            measure(dtype, malloc, weights, options.repetitions)
            for dtype, malloc in itertools.product(dtypes, mallocs)
        ]
    tables = [speed_table(results), phase_table(results), memory_table(results)]
    collectives = "Collectives of one step:\n\n" + collectives_list(results[0])
    text = "\n\n".join([f"{harness.machine()}.", *tables, collectives])
    print(text)
    if options.profile:
        print_profiles(results)
    if options.update_readme:
        harness.replace_in_readme("train_step", text)


if __name__ == "__main__":
    main()
