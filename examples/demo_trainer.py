"""An ordinary HuggingFace script on 2 ranks: `make demo-trainer`.

`finetune_trainer.py` fine-tunes SmolLM2-135M with HuggingFace's Trainer. It runs in one process,
and unchanged on 2 ranks through `python -m parallel_ext.run`. The losses and norms of all steps
and the saved weights are compared, and the losses of both are drawn into trainer.png.

    python examples/demo_trainer.py [--work FOLDER] [--steps N]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import finetune_trainer
import matplotlib.pyplot as plt
import transformers
from demo_lora import at_most, exit_unless_all_hold, worst
from finetune_llama import default_text
from jobs import alone, call, torchrun
from prepare_smollm2 import prepare

from parallel_ext import run

TOKENS = 32
LOSS_LIMIT, NORM_LIMIT, WEIGHT_LIMIT = 1e-4, 1e-3, 1e-3


def trained(folder: Path) -> dict[str, list[float]]:
    """What the Trainer has logged of each step."""
    logged = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    steps = [entry for entry in logged if "loss" in entry]
    return {key: [entry[key] for entry in steps] for key in ("loss", "grad_norm")}


def apart(ours: Path, theirs: Path) -> float:
    """The largest difference of a saved weight, relative to the largest of its tensor."""
    models = (transformers.AutoModelForCausalLM.from_pretrained(path) for path in (ours, theirs))
    own, other = (model.state_dict() for model in models)
    return max(
        ((own[name] - tensor).abs().max() / tensor.abs().max()).item()
        for name, tensor in other.items()
    )


def draw(runs: dict[str, dict[str, list[float]]], path: Path) -> None:
    """Draw the losses of several runs over their steps."""
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for (name, run_of), style in zip(runs.items(), ("-", "o"), strict=True):
        steps = range(1, len(run_of["loss"]) + 1)
        axes.plot(steps, run_of["loss"], style, label=name, fillstyle="none")
    axes.set(xlabel="step", ylabel="loss", title="One script with HuggingFace's Trainer, SmolLM2")
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path(".work"))
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    work = options.work.resolve()
    text = work / "trainer.txt"
    model, one, two = work / "smollm2", work / "trainer-one", work / "trainer-two"
    alone(prepare, model)
    text.write_text(default_text()[:60_000])

    def arguments(out: Path) -> list[Any]:
        return [model, text, out, "--steps", options.steps, "--tokens", TOKENS]

    print("\n== one process ==", flush=True)
    _, single_seconds = alone(call, finetune_trainer.main, *arguments(one))
    print("\n== 2 ranks, the same script ==", flush=True)
    script = [finetune_trainer.__file__, *arguments(two)]
    seconds = torchrun(run.main, 2, "--tp", 2, *script)

    runs = {"one process": trained(one), "2 ranks, tp=2": trained(two)}
    plain, ours = runs.values()
    print("\nstep   one process       2 ranks")
    for step, (theirs, own) in enumerate(zip(plain["loss"], ours["loss"], strict=True), 1):
        print(f"{step:4} {theirs:13.6f} {own:13.6f}")
    found = [
        at_most("losses", worst(ours["loss"], plain["loss"]), LOSS_LIMIT),
        at_most("gradient norms", worst(ours["grad_norm"], plain["grad_norm"]), NORM_LIMIT),
        at_most("saved weights", apart(two, one), WEIGHT_LIMIT),
    ]
    print("\n".join(f"{each.title:16}{each.found:>10}  {each.expected}" for each in found))
    draw(runs, work / "trainer.png")
    print(f"{single_seconds:.0f} s and {seconds:.0f} s; {work / 'trainer.png'} shows the losses")
    exit_unless_all_hold(found)


if __name__ == "__main__":
    main()
