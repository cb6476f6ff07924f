"""The main job on a real model: `make demo`.

SmolLM2-135M with 49153 tokens, 9 heads and 3 key-value heads is fine-tuned on 2 ranks, which
divide none of the three; saved; read by unpatched transformers; and trained on by 3 ranks. Beside
it a single process does the same with plain transformers, and the table holds both.

    python examples/demo.py [--work FOLDER] [--steps N]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import finetune_llama
import torch
import transformers
from finetune_llama import (
    PROMPT,
    batches,
    continuation,
    default_text,
    last_logits,
    peak_mib,
    train,
)
from jobs import alone, torchrun
from prepare_smollm2 import prepare
from safetensors import safe_open

LEARNING_RATE = 2e-5
MORE_STEPS, TOKENS = 2, 64


def finetune(
    main: Callable[[], None], model: Path, ranks: int, report: Path, *options: Any
) -> tuple[dict[str, Any], float]:
    """A fine-tuning example on some ranks: its report, and the seconds it took."""
    print(f"\n== {ranks} ranks, parallel_ext ==", flush=True)
    seconds = torchrun(main, ranks, model, "--report", report, *options)
    return json.loads(report.read_text()), seconds


def clip(model: Any, max_norm: float) -> torch.Tensor:
    """Of a plain model, as ``px.clip_grad_norm_`` of a parallel one."""
    return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def single_process(model: Any, model_path: Path, steps: int, learning_rate: float) -> dict:
    """The same training with a plain model; what the others are held against."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_path)
    data = batches(tokenizer, default_text(), 1, TOKENS, steps + MORE_STEPS)

    result: dict[str, Any] = {"tokens": continuation(model, tokenizer, PROMPT)}
    result |= train(model, data[:steps], learning_rate, clip, quiet=False)
    result["tokens after"] = continuation(model, tokenizer, PROMPT)
    more = train(model, data[steps:], learning_rate, clip, quiet=False)
    result["more loss"], result["more norm"] = more["loss"], more["norm"]
    result["peak MiB"] = [peak_mib()]
    return result


def relative(ours: list[float], theirs: list[float]) -> float:
    """The largest difference, relative to the largest of ``theirs``."""
    a, b = torch.tensor(ours), torch.tensor(theirs)
    return ((a - b).abs().max() / b.abs().max()).item()


def reload(directory: Path, steps: int, trained: dict[str, Any]) -> dict[str, Any]:
    """Read the saved directory with unpatched transformers, in this process."""
    print("\n== unpatched transformers reads what 2 ranks saved ==", flush=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    ids = batches(tokenizer, default_text(), 1, TOKENS, steps)[0]["input_ids"]
    rows = {}
    for file in directory.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            rows |= {name: opened.get_slice(name).get_shape()[0] for name in opened.keys()}  # noqa: SIM118
    return {
        "logits": relative(trained["logits"], last_logits(model, ids)),
        "rows": rows["model.embed_tokens.weight"],
        "config rows": model.config.vocab_size,
        "tokens": continuation(model, tokenizer, PROMPT),
    }


def loss_lines(single: dict, two: dict, three: dict) -> list[str]:
    """The losses of each step side by side."""
    lines = ["", f"{'step':>6}{'one process':>14}{'parallel_ext':>14}{'difference':>12}  ranks"]
    losses = [*zip(single["loss"], two["loss"], strict=True)]
    more = [*zip(single["more loss"], three["loss"], strict=True)]
    for step, (expected, got) in enumerate([*losses, *more]):
        ranks = 2 if step < len(losses) else 3
        gap = abs(got - expected) / expected
        lines.append(f"{step:>6}{expected:>14.6f}{got:>14.6f}{gap:>12.1e}  {ranks}")
    return lines


def cost_lines(runs: dict[str, tuple[dict, float]]) -> list[str]:
    """The time and memory of each run."""
    lines = ["", f"{'':14}{'s a step':>10}{'s in all':>10}  peak MiB of each process"]
    for title, (result, seconds) in runs.items():
        step = sorted(result["seconds"])[len(result["seconds"]) // 2]
        peaks = ", ".join(f"{peak:.0f}" for peak in result["peak MiB"])
        lines.append(f"{title:14}{step:>10.2f}{seconds:>10.0f}  {peaks}")
    return lines


def result_lines(single: dict, two: dict, reloaded: dict) -> list[str]:
    """What else was compared."""
    name, difference = two["gradients"]
    same = {True: "equal", False: "DIFFERENT"}
    return [
        "",
        f"largest relative gradient difference  {difference:.1e}  ({name})",
        f"rows of the vocabulary on disk        {reloaded['rows']} of {reloaded['config rows']}",
        f"logits after reload, relative         {reloaded['logits']:.1e}",
        "tokens generated before training      "
        f"{same[two['tokens'] == single['tokens']]} to one process",
        "tokens generated after training       "
        f"{same[two['tokens after'] == single['tokens after']]} to one process",
        "tokens generated after reload         "
        f"{same[reloaded['tokens'] == two['tokens after']]} to the 2 ranks",
    ]


def plain(model_path: Path, steps: int) -> dict[str, Any]:
    """The training of a plain model."""
    print("\n== one process, plain transformers ==", flush=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    return single_process(model, model_path, steps, LEARNING_RATE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path(".work"))
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    work, steps = options.work, options.steps
    model = work / "smollm2"
    alone(prepare, model)
    single, single_seconds = alone(plain, model, steps)
    script = finetune_llama.main
    common = ["--tokens", TOKENS, "--learning-rate", LEARNING_RATE]
    first = ["--tp", 2, "--steps", steps, "--out", work / "two", "--check-gradients"]
    two, two_seconds = finetune(script, model, 2, work / "two.json", *common, *first)
    reloaded, _ = alone(reload, work / "two", steps, two)
    more = ["--tp", 3, "--steps", MORE_STEPS, "--first", steps]
    three, three_seconds = finetune(script, work / "two", 3, work / "three.json", *common, *more)
    lines = loss_lines(single, two, three) + result_lines(single, two, reloaded)
    runs = {
        "one process": (single, single_seconds),
        "2 ranks": (two, two_seconds),
        "3 ranks": (three, three_seconds),
    }
    print("\n".join(lines + cost_lines(runs)))


if __name__ == "__main__":
    main()
