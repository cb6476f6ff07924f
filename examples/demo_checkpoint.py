"""A job that is stopped and killed, and resumes elsewhere: `make demo-checkpoint`.

SmolLM2-135M is trained with plain transformers in one process, without interruption. Beside it a
job of 2 ranks (tp = 2) is sent a SIGTERM and saves; one of 3 ranks (tp = 3) resumes and is killed,
all its processes, in the middle of a save; one of 2 ranks (dp = 2, ZeRO 2) resumes from the last
whole checkpoint to the end. The table holds the losses of both, step by step.

    python examples/demo_checkpoint.py [--work FOLDER]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import train_resumable
import transformers
from demo import clip
from finetune_llama import default_text
from jobs import alone, torchrun
from prepare_smollm2 import prepare
from train_resumable import learning_rates, samples_of

import parallel_ext as px

STEPS, ROWS, TOKENS, RATE, SAVE_EVERY = 5, 2, 32, 2e-5, 5


def single_process(model_path: Path) -> list[float]:
    """The losses of plain transformers, all steps in one go."""
    print("\n== one process, plain transformers, without interruption ==", flush=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_path)
    samples = samples_of(tokenizer, default_text(), TOKENS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    scheduler = learning_rates(optimizer, STEPS)
    model.train()
    losses = []
    for step in range(STEPS):
        rows = samples[step * ROWS : (step + 1) * ROWS]
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        clip(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    return losses


def _with_outputs(out: int, log: int, *job: Any) -> None:
    os.dup2(out, 1)
    os.dup2(log, 2)
    os.close(out)
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = "300"  # s to save in after a SIGTERM; else 30
    torchrun(*job)


class Job:
    """``train_resumable.py`` under torchrun, whose lines are read while it runs."""

    def __init__(self, title: str, ranks: int, model: Path, root: Path, *options: Any) -> None:
        print(f"\n== {title} ==", flush=True)
        self.report = root.with_name(f"{root.name}-{title.split()[0]}.json")
        self._log = root.with_name(f"{root.name}-{title.split()[0]}.log").open("w+")
        sizes = ["--steps", STEPS, "--rows", ROWS, "--tokens", TOKENS, "--learning-rate", RATE]
        arguments = [model, root, "--report", self.report, *sizes, "--save-every", SAVE_EVERY]
        lines, out = os.pipe()
        job = (out, self._log.fileno(), train_resumable.main, ranks, *arguments, *options)
        self.process = get_context("fork").Process(target=_with_outputs, args=job)
        self.process.start()
        os.close(out)
        self._lines = os.fdopen(lines)

    def until(self, step: int) -> None:
        """Print what the job prints until a step is done."""
        for line in self._lines:
            print(line, end="", flush=True)
            if line.startswith(f"step {step} "):
                return
        self.fail()

    def fail(self) -> None:
        """Stop the demo: the job ended before it should have."""
        self.process.join()
        self._log.seek(0)
        raise SystemExit(f"the job ended with {self.process.exitcode}:\n{self._log.read()}")

    def kill(self) -> None:
        """Kill torchrun and its ranks at once; none of them can do anything about it."""
        pid = self.process.pid
        ranks = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for each in (pid, *map(int, ranks)):
            os.kill(each, signal.SIGKILL)

    def finish(self) -> tuple[int, list[float]]:
        """Wait for the end: the first step, and the loss of each."""
        for line in self._lines:
            print(line, end="", flush=True)
        self.process.join()
        report = json.loads(self.report.read_text())
        return report["first"], report["loss"]


def wait_for(condition: Callable[[], bool], job: Job) -> None:
    """Wait until something has happened in the directory of the checkpoints."""
    while not condition():
        if job.process.exitcode is not None:
            job.fail()
        time.sleep(0.01)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path(".work"))
    options = parser.parse_args()
    model, root = options.work / "smollm2", options.work / "checkpoints"
    shutil.rmtree(root, ignore_errors=True)
    alone(prepare, model)
    expected, _ = alone(single_process, model)

    first = Job("first job: 2 ranks, tp = 2; a SIGTERM after step 1", 2, model, root, "--tp", 2)
    first.until(1)
    first.process.terminate()
    runs = [("tp = 2", *first.finish())]
    latest = px.latest_checkpoint(root)
    if latest is None:
        first.fail()
    step, _ = alone(px.verify_checkpoint, latest)
    print(f"it saved step {step} and left")

    torn = (step // SAVE_EVERY + 1) * SAVE_EVERY
    second = Job(
        f"second job: 3 ranks, tp = 3; killed while it saves step {torn}", 3, model, root, "--tp", 3
    )
    wait_for(lambda: any(root.glob(f".tmp-step-{torn:08}-*/*.safetensors")), second)
    second.kill()
    runs.append(("tp = 3", *second.finish()))
    print(f"files it left behind: {', '.join(sorted(p.name for p in root.iterdir()))}")
    if alone(px.verify_checkpoint, px.latest_checkpoint(root))[0] != step:
        raise SystemExit("the last whole checkpoint should be that of the first job")

    third = Job("third job: 2 ranks, dp = 2, ZeRO 2; to the end", 2, model, root)
    runs.append(("dp = 2", *third.finish()))
    if third.process.exitcode != 0:
        third.fail()

    print(f"\n{'step':>6}{'one process':>14}{'parallel_ext':>14}{'difference':>12}  ranks")
    worst = 0.0
    for ranks, start, losses in runs:
        for number, loss in enumerate(losses, start=start + 1):
            gap = abs(loss - expected[number - 1]) / expected[number - 1]
            worst = max(worst, gap)
            print(f"{number:>6}{expected[number - 1]:>14.6f}{loss:>14.6f}{gap:>12.1e}  {ranks}")
    print(f"\nfiles in the end: {', '.join(sorted(p.name for p in root.iterdir()))}")
    again = transformers.AutoModelForCausalLM.from_pretrained(px.latest_checkpoint(root))
    print(f"plain transformers reads the last: {again.num_parameters():,} parameters")
    shutil.rmtree(root)
    if worst > 1e-4:
        raise SystemExit(f"a loss differs by {worst:.1e}; at most 1e-4 was expected")


if __name__ == "__main__":
    main()
