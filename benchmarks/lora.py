"""LoRA: one linear layer beside PEFT's, and a whole training step of a Llama at tp = 2.

    python benchmarks/lora.py [--part linear|dora|step|all] [--dtype float32|bfloat16|all]
                              [--malloc default|tuned|all] [--repetitions N] [--smallest]
                              [--profile] [--update-docs]

What is measured and how: docs/benchmarks/lora.md. It exits with an error when competitors
do not compute the same thing.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import harness
import peft
import torch
import train_step
from lora_ranks import (
    ALPHA,
    COMPETITORS,
    FROZEN,
    OF_DORA,
    OURS_DORA,
    OURS_DROPOUT,
    PEFT,
    PEFT_DORA,
    PEFT_DROPOUT,
    PEFT_TP,
)
from train_step_ranks import OURS
from transformers import LlamaForCausalLM

RANKS = Path(__file__).with_name("lora_ranks.py")
PARTS = ("linear", "dora", "step")
SHAPES = harness.size(  # (K, F), r
    tuple(itertools.product([(1024, 1024), (1024, 4096)], [16, 64])), (((32, 64), 4),)
)
STEP_RANK = 16
ALL_LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

# Time over that of the frozen linear, of the first shape.
TARGETS = {
    OURS: {"float32": 1.10, "bfloat16": 1.12},
    OURS_DROPOUT: {"float32": 1.20, "bfloat16": 1.20},
}
# Relative to the largest element, from fp64; fp32 sums of up to 4096 products, bf16 roundings.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}


@dataclass
class Linear:
    """Everything measured for one shape, dtype and malloc mode."""

    shape: tuple[tuple[int, int], int]
    dtype: str
    malloc: str
    rounds: list[harness.Round]
    growth_mib: dict[str, float]
    profile: dict[str, str]

    @property
    def name(self) -> str:
        (inner, outer), r = self.shape
        return f"{inner} -> {outer}, r={r}, {self.dtype}, {self.malloc}"

    @property
    def seconds(self) -> dict[str, list[float]]:
        return harness.seconds(self.rounds)

    def ratio(self, name: str, other: str) -> float | None:
        """Median time over that of another; None when one of them did not run."""
        if not {name, other} <= self.seconds.keys():
            return None
        return statistics.median(self.seconds[name]) / statistics.median(self.seconds[other])

    def verdict(self, name: str) -> str:
        """What to say of the target of a competitor: nothing where there is none."""
        ratio = self.ratio(name, FROZEN)
        if ratio is None or self.shape != SHAPES[0]:
            return ""
        target = TARGETS[name][self.dtype]
        return f"{target:.2f} {harness.verdict(ratio <= target)}"


def measure_linears(
    part: str, dtype: str, malloc: str, options: argparse.Namespace
) -> list[Linear]:
    """All competitors on all shapes, in one process; exits when they disagree."""
    request = {
        "task": part,
        "shapes": SHAPES,
        "dtype": dtype,
        "repetitions": options.repetitions,
        "profile": options.profile,
    }
    print(f"# {dtype}, {malloc}: {part}", file=sys.stderr, flush=True)
    results = []
    answers = harness.run_ranks(RANKS, request, ranks=1, threads=2, malloc=malloc)
    for shape, answer in zip(SHAPES, answers, strict=True):
        rounds = [harness.Round(**values) for values in answer["rounds"]]
        memory, profile = answer["growth_mib"], answer["profile"]
        results.append(Linear(shape, dtype, malloc, rounds, memory, profile))
        for name, error in answer["errors"].items():
            if not error <= TOLERANCE[dtype]:
                sys.exit(
                    f"{name} does not compute the same layer: {results[-1].name} is off by {error}"
                )
    return results


def _over_competitors(
    results: Sequence[Linear], title: str, cell: Callable[[Linear, str], str]
) -> tuple[list[str], list[list[str]]]:
    """Header and rows with a column for every competitor that ran anywhere."""
    all_names = dict.fromkeys((*COMPETITORS, *OF_DORA))
    names = [n for n in all_names if any(n in result.growth_mib for result in results)]
    rows = [
        [result.name, *(cell(result, name) if name in result.growth_mib else "" for name in names)]
        for result in results
    ]
    return [title, *names], rows


def linear_tables(results: Sequence[Linear]) -> str:
    def ratio(result: Linear, name: str, other: str) -> str:
        value = result.ratio(name, other)
        return "" if value is None else f"{value:.2f}"

    times = _over_competitors(
        results,
        "ms: median (min-max)",
        lambda result, name: harness.spread([1e3 * s for s in result.seconds[name]], 1),
    )
    growth = _over_competitors(
        results, "peak growth, MiB", lambda result, name: f"{result.growth_mib[name]:.0f}"
    )
    header, ratios = _over_competitors(
        results,
        f"time / that of the {FROZEN}",
        lambda result, name: ratio(result, name, FROZEN),
    )
    if OURS_DORA in header:
        header += ["ours / PEFT", "disturbed"]
    else:
        header += ["ours / PEFT", "the same with dropout", "target", "with dropout", "disturbed"]
    for result, row in zip(results, ratios, strict=True):
        if OURS_DORA in header:
            row.append(ratio(result, OURS_DORA, PEFT_DORA))
        else:
            row += [ratio(result, OURS, PEFT), ratio(result, OURS_DROPOUT, PEFT_DROPOUT)]
            row += [result.verdict(OURS), result.verdict(OURS_DROPOUT)]
        row.append(f"{harness.disturbance(result.rounds):.0%}")
    tables = [(header, ratios), times, growth]
    return "\n\n".join(harness.markdown_table(*table) for table in tables)


def run_linear(part: str, options: argparse.Namespace) -> str:
    """Measure all shapes that the options leave, print the profiles if asked, return the tables."""
    dtypes = harness.chosen(options.dtype, TOLERANCE)
    mallocs = harness.chosen(options.malloc, harness.MALLOC_MODES)
    results = list(
        itertools.chain(*(measure_linears(part, d, m, options) for d in dtypes for m in mallocs))
    )
    if options.profile:
        for result in results:
            for name, text in result.profile.items():
                print(f"\n{name}, {result.name}, time of each operator in itself:\n{text}")
    return linear_tables(results)


def save_adapter(weights: str, adapter: str) -> None:
    """Save the adapter that all competitors load, with plain PEFT; no factor of it is zero."""
    torch.manual_seed(2)
    config = peft.LoraConfig(
        r=STEP_RANK, lora_alpha=ALPHA, target_modules=ALL_LINEARS, init_lora_weights=False
    )
    model = LlamaForCausalLM.from_pretrained(weights)
    peft.get_peft_model(model, config).save_pretrained(adapter)


def run_step(_: str, options: argparse.Namespace) -> str:
    with tempfile.TemporaryDirectory() as scratch:
        weights, adapter = str(Path(scratch, "weights")), str(Path(scratch, "adapter"))
        train_step.save_weights(weights)
        save_adapter(weights, adapter)
        contest = train_step.Contest(
            script=RANKS,
            together=((PEFT_TP, OURS),),
            reference=PEFT_TP,
            request={"weights": weights, "adapter": adapter},
        )
        return train_step.run_contest(contest, options)


def main() -> None:
    parser = train_step.parser(__doc__, repetitions=12)
    parser.add_argument("--part", choices=[*PARTS, "all"], default="all")
    options = parser.parse_args()
    for part in harness.chosen(options.part, PARTS):
        tables = (run_step if part == "step" else run_linear)(part, options)
        about = f"{harness.machine()}, peft {peft.__version__}."
        harness.publish(f"lora {part}", f"{about}\n\n{tables}", options)


if __name__ == "__main__":
    main()
