"""Training checkpoints of a Llama with AdamW at tp = 2: ours, DCP, torch.save.

    python benchmarks/training_checkpoint.py [--part PART]
        [--malloc default|tuned|all] [--repetitions N] [--smallest] [--update-docs]

What is measured and how: docs/benchmarks/training_checkpoint.md.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import harness
import torch
from training_checkpoint_ranks import (
    BOUND,
    BOUND_READS,
    DCP,
    DCP_HF,
    DCP_UNSYNCED,
    MIB,
    NO_SAVE,
    OURS,
    STEPS,
    TOKENS,
    TORCH_SAVE,
    UNHASHED,
    UNSYNCED,
)
from transformers import AutoModelForCausalLM, MixtralConfig

from parallel_ext.io.safetensors_writer import TensorSpec
from parallel_ext.io.stream import plan_files, plan_turns
from parallel_ext.parallel.plan import layout_of
from parallel_ext.parallel.validate import spec_for
from parallel_ext.sharding.layout import ModelLayout

RANKS = Path(__file__).with_name("training_checkpoint_ranks.py")
SPEED = {  # that of train_step.py
    "vocab_size": harness.size(32000, 509),
    "hidden_size": harness.size(512, 32),
    "intermediate_size": harness.size(1408, 64),
    "num_hidden_layers": harness.size(8, 1),
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
LARGE = SPEED | {  # where what a load does once, however large the model, hardly counts
    "hidden_size": harness.size(1024, 32),
    "intermediate_size": harness.size(2816, 64),
    "num_hidden_layers": harness.size(12, 1),
}
MEMORY = {  # an embedding of 1 GiB, and almost nothing else
    "vocab_size": harness.size(131073, 509),
    "hidden_size": harness.size(2048, 32),
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
}
MAX_SAVE_MIB, MAX_LOAD_MIB, MAX_COMMIT_MS, MAX_PLAN_S = 160, 96, 50, 1.0


def run(part: str, names: Sequence[str], sizes: dict[str, Any], malloc: str, count: int) -> Any:
    """Let competitors save and load a model of some sizes; what they report, and the size."""
    with tempfile.TemporaryDirectory() as scratch:
        source = str(Path(scratch, "source"))
        model = harness.save_llama(source, **sizes)
        size = sum(p.nbytes for p in model.parameters()) / MIB
        del model
        request = {"part": part, "source": source, "scratch": scratch, "names": names}
        request["repetitions"] = count
        return harness.run_ranks(RANKS, request, ranks=2, threads=1, malloc=malloc), 3 * size


def speed_table(kind: str, answers: dict[str, Any], size: float) -> str:
    """One row for each malloc mode and competitor."""
    header = [kind, "s: median (min-max)", "ours / this"]
    if kind == "save":
        header += ["s until durable", "ours / this, durable", "written / logical"]
    rows = []
    for malloc, answer in answers.items():
        rounds = [harness.Round(**values) for values in answer[kind]["rounds"]]
        for name in answer[kind]["growth_mib"]:
            row = [f"{name}, {malloc}"]
            for phase in range(len(rounds[0].seconds[name])):
                seconds = harness.seconds(rounds, phase)
                row += [harness.spread(seconds[name], 2), ratio(seconds[OURS], seconds[name])]
            if kind == "save":
                row.append(f"{answer[kind]['written_mib'][name] / size:.3f}")
            rows.append([*row, f"{harness.disturbance(rounds):.0%}"])
    return harness.markdown_table([*header, "disturbed"], rows)


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Median of the ratios round by round: what a round suffers, both suffer."""
    return f"{statistics.median(a / b for a, b in zip(ours, theirs, strict=True)):.2f}"


def speed(options: Any) -> str:
    names = [OURS, DCP, DCP_HF, TORCH_SAVE, BOUND, BOUND_READS]
    return speed_tables(options, SPEED, [*names, UNHASHED, UNSYNCED, DCP_UNSYNCED])


def large(options: Any) -> str:
    return speed_tables(options, LARGE, [OURS, DCP, BOUND, BOUND_READS])


def speed_tables(options: Any, sizes: dict[str, Any], names: Sequence[str]) -> str:
    answers = {}
    for malloc in harness.chosen(options.malloc, harness.MALLOC_MODES):
        answers[malloc], size = run("speed", names, sizes, malloc, options.repetitions)
    tables = [speed_table(kind, answers, size) for kind in ("save", "load")]
    return "\n\n".join([f"Weights and AdamW's state: {size:.0f} MiB.", *tables])


def memory(options: Any) -> str:
    rows = []
    for names in ([OURS, TORCH_SAVE], [DCP, DCP_HF]):
        answer, size = run("memory", names, MEMORY, "default", 0)
        for name in names:
            save, load = (answer[kind]["growth_mib"][name] for kind in ("save", "load"))
            written = answer["save"]["written_mib"][name]
            row = [name, f"{save:.0f}", f"{load:.0f}", f"{written / size:.3f}"]
            met = save <= MAX_SAVE_MIB and load <= MAX_LOAD_MIB
            rows.append([*row, harness.verdict(met) if name == OURS else ""])
    header = ["peak beyond the shard, MiB", "save", "load", "written / logical"]
    target = f"target: {MAX_SAVE_MIB} and {MAX_LOAD_MIB}"
    about = f"An embedding of 1 GiB; with AdamW's state {size:.0f} MiB."
    return f"{about}\n\n{harness.markdown_table([*header, target], rows)}"


def commit(options: Any) -> str:
    with tempfile.TemporaryDirectory() as scratch:
        request = {"part": "commit", "scratch": scratch, "repetitions": 5 * options.repetitions}
        times = harness.run_ranks(RANKS, request, ranks=2, threads=1, malloc="default")
    met = harness.verdict(statistics.median(times) <= MAX_COMMIT_MS)
    return f"A save of a tiny model, ms: {harness.spread(times)}; target {MAX_COMMIT_MS}: {met}."


def asynchronous(options: Any) -> str:
    answer, size = run("asynchronous", [], SPEED, "default", options.repetitions)
    rounds = [harness.Round(**values) for values in answer["rounds"]]
    calls, cycles = harness.seconds(rounds, 0), harness.seconds(rounds, 1)
    rows = [
        [
            kind,
            "" if kind == NO_SAVE else harness.spread(calls[kind], 2),
            harness.spread(cycles[kind], 2),
            ratio(cycles[kind], cycles[NO_SAVE]),
            f"{harness.disturbance(rounds):.0%}",
        ]
        for kind in cycles
    ]
    header = ["", "the call, s", f"with {STEPS} steps, s", "/ no save", "disturbed"]
    about = f"{size:.0f} MiB; a step is of {TOKENS} tokens."
    return f"{about}\n\n{harness.markdown_table(header, rows)}"


def mixtral_layout(sharded: bool, world_size: int, tp: int = 8, ep: int = 8) -> ModelLayout:
    """Mixtral-8x7B on that many ranks; ``sharded`` over the dp ranks, as ZeRO does, or not."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(MixtralConfig(dtype="bfloat16"))
    layout = layout_of(model, spec_for(model), tp, ep)
    if not sharded:
        return layout
    columns = {
        inner: [list(range(first, world_size, inner)) for first in range(inner)]
        for inner in (tp, ep)
    }
    tensors = {
        name: each.shard_rows_further(columns[ep if name in layout.parts else tp])
        for name, each in layout.items()
    }
    return replace(layout, tensors=tensors)


def plan_seconds(layout: ModelLayout, world_size: int) -> float:
    """How long each rank plans a save of weights in bfloat16 and AdamW's state in float32."""
    start = time.perf_counter()
    of_model = layout.in_files().tensors
    layouts, specs = dict(of_model), []
    for key in ("exp_avg", "exp_avg_sq"):
        for name in layout:
            for part in layout.parts_of(name):
                own = f"{key}/{part.name}"
                layouts[own] = replace(part.layout(layout[name]), name=own)
    for name, each in layouts.items():
        dtype = torch.bfloat16 if name in of_model else torch.float32
        specs.append(TensorSpec(name, dtype, each.shape))
    files = plan_files(specs[: len(of_model)], world_size, 5 * 10**9)
    files += plan_files(specs[len(of_model) :], world_size, 5 * 10**9)
    list(plan_turns(files, layouts, world_size))
    repr(files)  # of which a digest is compared
    return time.perf_counter() - start


def planner(options: Any) -> str:
    world_size, rows = harness.size(1024, 64), []
    for kind, sharded in (("replicated over dp", False), ("ZeRO over dp", True)):
        start = time.perf_counter()
        layout = mixtral_layout(sharded, world_size)
        laid_out = time.perf_counter() - start
        times = [plan_seconds(layout, world_size) for _ in range(options.repetitions)]
        met = harness.verdict(statistics.median(times) <= MAX_PLAN_S)
        rows.append([kind, f"{laid_out:.2f}", harness.spread(times, 2), met])
    header = [
        f"Mixtral-8x7B, {world_size} ranks",
        "layout, s",
        "plan, s",
        f"target {MAX_PLAN_S:g} s",
    ]
    return harness.markdown_table(header, rows)


PARTS = {
    "speed": speed,
    "large": large,
    "memory": memory,
    "commit": commit,
    "asynchronous": asynchronous,
    "planner": planner,
}


def main() -> None:
    parser = harness.parser(__doc__, repetitions=7)
    parser.add_argument("--part", choices=[*PARTS, "all"], default="all")
    options = parser.parse_args()
    for part in harness.chosen(options.part, PARTS):
        text = f"{harness.machine()}\n\n{PARTS[part](options)}"
        harness.publish(f"training_checkpoint {part}", text, options)


if __name__ == "__main__":
    main()
