"""A whole training step at tp = 2: transformers' tensor parallelism, ours, one process.

    python benchmarks/train_step.py [--model llama|llava] [--dtype float32|bfloat16|all]
                                    [--malloc default|tuned|all] [--repetitions N] [--smallest]
                                    [--profile] [--update-docs]

What is measured and how: docs/benchmarks/train_step.md. It exits with an error when the losses of
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
from train_step_ranks import (
    BATCH,
    IMAGE_ID,
    ONE_PROCESS,
    OURS,
    SEQUENCE,
    TRANSFORMERS_TP,
    VOCABULARY,
)
from transformers import AutoModelForImageTextToText, CLIPVisionConfig, LlamaConfig, LlavaConfig

TOKENS = BATCH * SEQUENCE
LARGE_VOCABULARY = 128256  # of Llama 3, where most of a small model's time goes to the head
PHASES = ("forward + backward", "optimizer", "step")
ROUNDS, WARM_UP = harness.size((2, 2), (1, 0))
TARGET = 1.4  # tokens/s of ours over those of the first other competitor

# Relative difference of the losses: ranks add up in another order than one process, and in bf16
# Adam, which divides by the gradient's size, makes a different last bit a different weight.
TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2}


@dataclass(frozen=True)
class Contest:
    """Who trains, and where.

    Attributes:
        script: what the rank processes run; it ends in ``train_step_ranks.answer``.
        together: competitors that take turns in the same processes; ``ONE_PROCESS`` has its own.
            The first of all is the one that ours must beat.
        reference: whose losses all must have.
        request: what the script needs to build the models.
    """

    script: Path
    together: tuple[tuple[str, ...], ...]
    reference: str
    request: Mapping[str, str]

    @property
    def competitors(self) -> tuple[str, ...]:
        return tuple(itertools.chain(*self.together))

    @property
    def others(self) -> tuple[str, ...]:
        return tuple(name for name in self.competitors if name != OURS)


@dataclass
class Result:
    """Everything measured for one dtype and malloc mode."""

    contest: Contest
    dtype: str
    malloc: str
    rounds: list[harness.Round] = field(default_factory=list)
    alone: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.dtype}, {self.malloc}"

    def phase(self, competitor: str, phase: str) -> list[float]:
        return harness.seconds(self.rounds, PHASES.index(phase))[competitor]

    def rates(self, competitor: str) -> list[float]:
        """Tokens/s of every step."""
        return [TOKENS / seconds for seconds in self.phase(competitor, "step")]

    def ratio(self, other: str) -> float:
        """Median tokens/s of ours over those of another."""
        return statistics.median(self.rates(OURS)) / statistics.median(self.rates(other))


def save_weights(directory: str, model: str = "llama") -> None:
    """Save a Llama with random weights, or a LLaVA with a small one and a large vocabulary."""
    sizes = {
        "hidden_size": harness.size(512, 32),
        "intermediate_size": harness.size(1408, 64),
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    }
    if model == "llama":
        layers = harness.size(8, 1)
        harness.save_llama(directory, vocab_size=VOCABULARY, num_hidden_layers=layers, **sizes)
        return
    tower = CLIPVisionConfig(
        **{"hidden_size": 64, "intermediate_size": 128, "projection_dim": 64},
        **{"num_hidden_layers": 2, "num_attention_heads": 2},
        **{"image_size": 28, "patch_size": 14},  # 2 x 2 of them take IMAGE_TOKENS tokens
    )
    ids = harness.size(LARGE_VOCABULARY, VOCABULARY)
    text = LlamaConfig(vocab_size=ids, num_hidden_layers=harness.size(2, 1), **sizes)
    config = LlavaConfig(
        vision_config=tower, text_config=text, image_token_index=IMAGE_ID, vision_feature_layer=-1
    )
    harness.save_model(directory, config, AutoModelForImageTextToText)


def check_losses(runs: Sequence[Mapping[str, list[float]]], reference: str, dtype: str) -> None:
    """Exit unless every step of every run had the loss of the reference's same step."""
    longest = max((run.get(reference, []) for run in runs), key=len)
    for name, losses in itertools.chain(*(run.items() for run in runs)):
        for step, (loss, expected) in enumerate(zip(losses, longest, strict=False)):
            if not abs(loss - expected) <= TOLERANCE[dtype] * abs(expected):
                sys.exit(
                    f"{name} in {dtype} does not compute the same training: its loss at step "
                    f"{step} is {loss}, that of {reference} is {expected}"
                )


def measure(contest: Contest, dtype: str, malloc: str, repetitions: int) -> Result:
    """All runs for one dtype and malloc mode; what cannot share a process takes turns too."""
    result = Result(contest, dtype, malloc)
    losses: list[dict[str, list[float]]] = []

    def run(task: str, competitors: Sequence[str], repetitions: int) -> dict[str, Any]:
        alone = tuple(competitors) == (ONE_PROCESS,)
        request = {
            **contest.request,
            "task": task,
            "competitors": competitors,
            "ranks": 1 if alone else 2,
            "dtype": dtype,
            "repetitions": repetitions,
            "warm_up": WARM_UP,
        }
        print(f"# {result.name}: {task} {', '.join(competitors)}", file=sys.stderr, flush=True)
        threads = 2 if alone else 1
        answer = harness.run_ranks(
            contest.script, request, ranks=request["ranks"], threads=threads, malloc=malloc
        )
        losses.append(answer["losses"])
        return answer

    for _ in range(ROUNDS):
        for together in contest.together:
            answer = run("time", together, -(-repetitions // ROUNDS))
            result.rounds += [harness.Round(**values) for values in answer["rounds"]]
    for name in contest.competitors:
        result.alone[name] = run("alone", (name,), 0)
    check_losses(losses, contest.reference, dtype)
    return result


def speed_table(results: Sequence[Result]) -> str:
    contest = results[0].contest
    header = ["tokens/s: median (min-max)", *contest.competitors]
    header += [*(f"ours / {name}" for name in contest.others), f"target {TARGET} x", "disturbed"]
    rows = []
    for result in results:
        ratios = [result.ratio(name) for name in contest.others]
        row = [result.name, *(harness.spread(result.rates(n)) for n in contest.competitors)]
        row += [*(f"{ratio:.2f}" for ratio in ratios), harness.verdict(ratios[0] >= TARGET)]
        rows.append([*row, f"{harness.disturbance(result.rounds):.0%}"])
    return harness.markdown_table(header, rows)


def phase_table(results: Sequence[Result]) -> str:
    columns = list(itertools.product(results[0].contest.competitors, PHASES[:2]))
    header = ["ms: median (min-max)", *(f"{name}: {phase}" for name, phase in columns)]
    rows = [
        [result.name]
        + [harness.spread([1e3 * s for s in result.phase(*column)]) for column in columns]
        for result in results
    ]
    return harness.markdown_table(header, rows)


def memory_table(results: Sequence[Result]) -> str:
    measures = ("loaded", "trained", "growth")
    columns = list(itertools.product(results[0].contest.competitors, measures))
    header = ["anonymous MiB, worst rank", *(f"{name}: {measure}" for name, measure in columns)]
    rows = [
        [result.name] + [f"{result.alone[name]['mib'][measure]:.0f}" for name, measure in columns]
        for result in results
    ]
    return harness.markdown_table(header, rows)


def collectives_list(result: Result) -> str:
    lines = []
    for name in result.contest.competitors:
        counts = sorted(result.alone[name]["collectives"].items())
        if counts:  # one process has none
            lines.append(f"- {name}: " + ", ".join(f"{kind} {count}" for kind, count in counts))
    return "\n".join(lines)


def print_profiles(results: Sequence[Result]) -> None:
    for result, name in itertools.product(results, results[0].contest.competitors):
        for phase, text in result.alone[name]["profile"].items():
            print(f"\n{name}, {result.name}, {phase}, time of each operator in itself:\n{text}")


def run_contest(contest: Contest, options: argparse.Namespace) -> str:
    """Measure all that the options name, print the profiles if asked, and return the tables."""
    dtypes = harness.chosen(options.dtype, TOLERANCE)
    mallocs = harness.chosen(options.malloc, harness.MALLOC_MODES)
    results = [
        measure(contest, dtype, malloc, options.repetitions)
        for dtype, malloc in itertools.product(dtypes, mallocs)
    ]
    if options.profile:
        print_profiles(results)
    tables = [speed_table(results), phase_table(results), memory_table(results)]
    return "\n\n".join([*tables, "Collectives of one step:\n\n" + collectives_list(results[0])])


def parser(description: str | None, repetitions: int) -> argparse.ArgumentParser:
    """The options of a training benchmark."""
    options = harness.parser(description, repetitions)
    harness.add_dtypes(options, TOLERANCE)
    options.add_argument("--profile", action="store_true", help="print what the operators cost")
    return options


def main() -> None:
    options = parser(__doc__, repetitions=12)
    options.add_argument("--model", choices=("llama", "llava"), default="llama")
    options = options.parse_args()
    with tempfile.TemporaryDirectory() as weights:
        save_weights(weights, options.model)
        contest = Contest(
            script=Path(__file__).with_name("train_step_ranks.py"),
            together=((TRANSFORMERS_TP, OURS), (ONE_PROCESS,)),
            reference=ONE_PROCESS,
            request={"weights": weights, "model": options.model},
        )
        tables = run_contest(contest, options)
    section = {"llama": "train_step", "llava": "train_step of a model of images"}[options.model]
    harness.publish(section, f"{harness.machine()}.\n\n{tables}", options)


if __name__ == "__main__":
    main()
