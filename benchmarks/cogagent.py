"""CogAgent: decoder layers at tp = 2 beside a port that merges nothing, and what the towers cost.

    python benchmarks/cogagent.py [--part layers|towers|all] [--dtype float32|bfloat16|all]
                                  [--malloc default|tuned|all] [--repetitions N] [--smallest]
                                  [--profile] [--update-docs]

What is measured and how: docs/benchmarks/cogagent.md. It exits with an error when competitors
do not compute the same layers.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import torch
from cogagent_ranks import (
    ADAPTER,
    DECODER,
    HIGH,
    LOW,
    ONE_PROCESS,
    OURS,
    OURS_GLOO,
    PARTS,
    PORT,
    PORT_GLOO,
    TOKENS,
    layers_run,
    one_layer_each,
)
from torch.utils.flop_counter import FlopCounterMode

from parallel_ext.models.cogagent import CogAgentConfig, CogAgentForCausalLM

RANKS = Path(__file__).with_name("cogagent_ranks.py")
TABLES = ("layers", "towers")
COMPETITORS = (OURS, PORT, OURS_GLOO, PORT_GLOO, ONE_PROCESS)
# Relative to the largest element; bf16 sums in other orders.
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}
MOST_SUMS = 3  # over the ranks, in the forward of a layer
HEAD = "embedding and head"
ALL = "all parts"
PARTS_DTYPE, PARTS_MALLOC = "bfloat16", "tuned"


def _run(task: str, ranks: int, dtype: str, malloc: str, repetitions: int, **more: Any) -> Any:
    print(f"# {dtype}, {malloc}: {task}, {ranks} ranks", file=sys.stderr, flush=True)
    request = {"task": task, "ranks": ranks, "dtype": dtype, "repetitions": repetitions, **more}
    return harness.run_ranks(RANKS, request, ranks=ranks, threads=2 // ranks, malloc=malloc)


def _rounds(answers: Iterable[Any]) -> list[harness.Round]:
    return [harness.Round(**values) for answer in answers for values in answer["rounds"]]


# Decoder layers.


@dataclass
class Layers:
    """Everything measured for one dtype and malloc mode."""

    dtype: str
    malloc: str
    rounds: list[harness.Round]
    collectives: dict[str, dict[str, float]]

    @property
    def name(self) -> str:
        return f"{self.dtype}, {self.malloc}"

    def ratio(self, name: str, other: str) -> float:
        """Median time of one over that of another."""
        times = harness.seconds(self.rounds)
        return statistics.median(times[name]) / statistics.median(times[other])


def measure_layers(dtype: str, malloc: str, options: argparse.Namespace) -> Layers:
    """All competitors, the one process before and after the others; exits when they disagree."""
    repetitions = options.repetitions
    before = _run("alone", 1, dtype, malloc, -(-repetitions // 2))
    answer = _run("layers", 2, dtype, malloc, repetitions, profile=options.profile)
    after = _run("alone", 1, dtype, malloc, -(-repetitions // 2))
    result = Layers(dtype, malloc, _rounds([before, answer, after]), answer["collectives"])
    for pair, error in answer["errors"].items():
        if not error <= TOLERANCE[dtype]:
            sys.exit(f"{pair} do not compute the same layers: {result.name} is off by {error}")
    sums = result.collectives[OURS]["forward"]
    if sums > MOST_SUMS:
        sys.exit(f"{OURS} sums {sums:g} times in the forward of a layer, not {MOST_SUMS}")
    for title, text in answer["profile"].items():
        print(f"\n{title}, {result.name}, time of each operator in itself:\n{text}")
    return result


def layers_tables(results: list[Layers]) -> str:
    """Ratios, times and collectives."""
    ratios, times, sums = [], [], []
    for result in results:
        merged = [result.ratio(PORT, OURS), result.ratio(PORT_GLOO, OURS_GLOO)]
        ratios.append(
            [
                result.name,
                *(f"{ratio:.2f}" for ratio in (*merged, result.ratio(ONE_PROCESS, OURS))),
                harness.verdict(min(merged) >= 1),
                f"{harness.disturbance(result.rounds):.0%}",
            ]
        )
        of_all = harness.seconds(result.rounds)
        spreads = (harness.spread([1e3 * s for s in of_all[name]]) for name in COMPETITORS)
        times.append([result.name, *spreads])
    for result in {result.dtype: result for result in results}.values():
        for name, counts in result.collectives.items():
            cells = [f"{counts['forward']:g}", f"{counts['forward_bytes'] / 2**20:.2f}"]
            cells += [f"{counts['backward']:g}", f"{counts['backward_bytes'] / 2**20:.2f}"]
            sums.append([f"{name}, {result.dtype}", *cells])
    heads = [
        *("unmerged port / ours", "the same, gloo only", "one process / ours"),
        *("target 1 x", "disturbed"),
    ]
    of_layer = ["forward", "forward, MiB", "backward", "backward, MiB"]
    return "\n\n".join(
        (
            harness.markdown_table(["", *heads], ratios),
            harness.markdown_table(["ms: median (min-max)", *COMPETITORS], times),
            harness.markdown_table(["all-reduces of a layer", *of_layer], sums),
        )
    )


def run_layers(options: argparse.Namespace) -> str:
    return layers_tables(
        [
            measure_layers(dtype, malloc, options)
            for dtype, malloc in itertools.product(
                harness.chosen(options.dtype, TOLERANCE),
                harness.chosen(options.malloc, harness.MALLOC_MODES),
            )
        ]
    )


# The share of the towers.


def _flops(model: CogAgentForCausalLM, trains_all: bool) -> dict[str, float]:
    """Part -> operations of one step: two for each product and sum of a matrix product.

    Args:
        model: on the meta device.
        trains_all: whether every parameter has a gradient. Otherwise none has, as with LoRA, and
            what the high-resolution tower gives has none either.
    """
    model.requires_grad_(trains_all)
    hidden = torch.empty(1, TOKENS, model.config.hidden_size, device="meta", requires_grad=True)
    forwards = one_layer_each(model.model)
    forwards[HEAD] = (lambda: model.lm_head(hidden), [hidden])
    for of_tower in (forwards[HIGH][1][0], forwards[DECODER][1][1]):
        of_tower.requires_grad_(trains_all)
    numbers = {**layers_run(model.config), HEAD: 1}
    counts = {}
    for part, (forward, _) in forwards.items():
        with FlopCounterMode(display=False) as counter:
            output = forward()
            if output.requires_grad:
                output.backward(torch.ones_like(output))
        counts[part] = float(numbers[part] * counter.get_total_flops())
    return counts


def _shares(values: dict[str, float]) -> dict[str, str]:
    return {part: f"{value / sum(values.values()):.0%}" for part, value in values.items()}


def counted_table() -> str:
    """Parameters and operations of the published model, by part; computed without its weights."""
    with torch.device("meta"):
        model = CogAgentForCausalLM(CogAgentConfig())
    numbers = {
        part: float(sum(p.numel() for p in module.parameters()))
        for part, module in {
            LOW: model.model.vision,
            ADAPTER: model.model.vision.linear_proj,
            HIGH: model.model.cross_vision,
            DECODER: model.model.layers,
            HEAD: model,
        }.items()
    }
    numbers[LOW] -= numbers[ADAPTER]
    numbers[HEAD] -= sum(numbers[part] for part in PARTS)
    full, lora = _flops(model, trains_all=True), _flops(model, trains_all=False)
    columns = [(numbers, 1e9), (full, 1e12), (lora, 1e12)]
    rows = []
    for part in (*PARTS, HEAD):
        cells = [(f"{of[part] / unit:.2f}", _shares(of)[part]) for of, unit in columns]
        rows.append([part, *itertools.chain(*cells)])
    header = ["", "10^9 parameters", "share", "training, TFLOP", "share", "LoRA, TFLOP", "share"]
    return harness.markdown_table(header, rows)


def measured_table(options: argparse.Namespace) -> str:
    """Times of one layer of each part, and what all of its layers take."""
    dtype, malloc, repetitions = PARTS_DTYPE, PARTS_MALLOC, -(-options.repetitions // 2)
    layers = layers_run(CogAgentConfig())
    rounds = [_rounds([_run("parts", n, dtype, malloc, repetitions)]) for n in (1, 2)]
    cells: dict[str, list[str]] = {part: [str(layers[part])] for part in PARTS} | {ALL: [""]}
    for each in rounds:
        times = {part: statistics.median(s) for part, s in harness.seconds(each).items()}
        whole = {part: times[part] * layers[part] for part in PARTS}
        for part, share in _shares(whole).items():
            cells[part] += [harness.spread([1e3 * s for s in harness.seconds(each)[part]])]
            cells[part] += [f"{whole[part]:.1f}", share]
        total = f"{sum(whole.values()):.1f}"
        cells[ALL] += ["", total, ""]
    rows = [[part, *each] for part, each in cells.items()]
    worst = [f"{harness.disturbance(each):.0%}" for each in rounds]
    rows.append(["disturbed", "", worst[0], "", "", worst[1], "", ""])
    header = [f"{dtype}, {malloc}", "layers"]
    for where in (ONE_PROCESS, "tp = 2"):
        header += [f"{where}: one layer, ms: median (min-max)", "all layers, s", "share"]
    return harness.markdown_table(header, rows)


def run_towers(options: argparse.Namespace) -> str:
    return f"{counted_table()}\n\n{measured_table(options)}"


def main() -> None:
    parser = harness.parser(__doc__, repetitions=5)
    harness.add_dtypes(parser, TOLERANCE)
    parser.add_argument("--part", choices=[*TABLES, "all"], default="all")
    parser.add_argument("--profile", action="store_true", help="print what the operators cost")
    options = parser.parse_args()
    for part in harness.chosen(options.part, TABLES):
        tables = {"layers": run_layers, "towers": run_towers}[part](options)
        harness.publish(f"cogagent {part}", f"{harness.machine()}.\n\n{tables}", options)


if __name__ == "__main__":
    main()
