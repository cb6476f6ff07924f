"""Train a HuggingFace model so that any job, on any number of ranks, can resume it.

    torchrun --nproc_per_node 2 examples/train_resumable.py MODEL CHECKPOINTS --tp 2 --steps 1000

Run the same command again, with as many ranks as there are, to resume after the last checkpoint.
The steps, their batches and the learning rates are those of one uninterrupted job. A SIGTERM makes
all ranks save the step that they are at and leave. With --leaves the bits are the same, too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from finetune_llama import common_parser, default_text, of_all_ranks

import parallel_ext as px


def samples_of(tokenizer: Any, text: str, tokens: int) -> torch.Tensor:
    """The text as [samples, tokens] ids; which sample is which does not depend on the ranks."""
    ids = torch.tensor(tokenizer(text)["input_ids"])
    return ids[: len(ids) // tokens * tokens].view(-1, tokens)


def learning_rates(optimizer: torch.optim.Optimizer, steps: int) -> Any:
    """A short warm-up, then a cosine down to nothing after the last step."""
    return transformers.get_cosine_schedule_with_warmup(optimizer, steps // 10, steps)


def main() -> None:
    parser = common_parser(__doc__.splitlines()[0])
    parser.add_argument("checkpoints", type=Path, help="directory of the checkpoints")
    parser.add_argument("--zero", type=int, choices=(2, 3), default=2, help="stage over dp ranks")
    parser.add_argument("--ep", type=int, default=1, help="ranks that share the experts, if any")
    parser.add_argument("--leaves", type=int, help="of px.Invariant, instead of ZeRO")
    parser.add_argument("--save-every", type=int, default=100, help="steps")
    parser.add_argument("--keep-last", type=int, default=2, help="checkpoints that stay")
    parser.set_defaults(rows=4, steps=1000)
    options = parser.parse_args()

    mesh = px.init_mesh(tp=options.tp, ep=options.ep)
    if not options.leaves and options.rows % mesh.dp_size:
        raise SystemExit(f"--rows {options.rows} must be a multiple of dp = {mesh.dp_size}")
    invariant = px.Invariant(blocks=12, leaves=options.leaves) if options.leaves else None
    dtype = getattr(torch, options.dtype)
    model = px.from_pretrained(options.model, mesh, dtype=dtype, invariant=invariant)
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    text = options.text.read_text() if options.text else default_text()
    samples = samples_of(tokenizer, text, options.tokens).to(mesh.device)
    if mesh.dp_size > 1 and invariant is None:
        px.data_parallel(model, mesh, options.zero)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    scheduler = learning_rates(optimizer, options.steps)

    step, taken = 0, 0
    if px.latest_checkpoint(options.checkpoints):
        resumed = px.load_checkpoint(options.checkpoints, model, optimizer, scheduler)
        step, taken = resumed.step, resumed.data_state["samples"]
        if mesh.rank == 0:
            print(f"resumes after {resumed.path}", flush=True)
    report: dict[str, Any] = {"first": step, "loss": []}
    leave = px.stop_requested(model)  # from here on a SIGTERM is heard, and nothing is lost
    while step < options.steps and not leave:
        rows = samples[torch.arange(taken, taken + options.rows) % len(samples)]
        loss = step_on(model, rows, mesh, invariant is not None)
        px.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        step, taken = step + 1, taken + options.rows
        report["loss"].append(loss)
        leave = px.stop_requested(model)
        if leave or step % options.save_every == 0 or step == options.steps:
            px.save_checkpoint(
                options.checkpoints,
                step,
                model,
                optimizer,
                scheduler,
                {"samples": taken},
                keep_last=options.keep_last,
                asynchronous=True,
            )
        if invariant and step == options.steps:
            report["digest"] = px.digest(model)
        if mesh.rank == 0:
            if options.report:
                beside = options.report.with_suffix(".new")  # the job may be killed here
                beside.write_text(json.dumps(report))
                beside.replace(options.report)
            print(f"step {step} of {options.steps}: loss {report['loss'][-1]:.4f}", flush=True)
    px.wait_for_checkpoint(model)


def step_on(model: Any, rows: torch.Tensor, mesh: px.Mesh, in_leaves: bool) -> float:
    """Forward and backward of a batch that all ranks hold; the loss of all of it."""
    if in_leaves:
        return px.train_leaves(model, {"input_ids": rows, "labels": rows}).item()
    own = rows.chunk(mesh.dp_size)[mesh.dp_rank]  # in order, as masks of dropout count them
    loss = model(input_ids=own, labels=own).loss
    loss.backward()
    return sum(of_all_ranks(loss.item())) / mesh.world_size


if __name__ == "__main__":
    main()
