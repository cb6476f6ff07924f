"""Fine-tune any HuggingFace Llama on any text file, its layers sharded over tp ranks.

    torchrun --nproc_per_node 2 examples/finetune_llama.py MODEL --tp 2 --out OUT

MODEL is a HuggingFace directory or hub id; OUT becomes a plain HuggingFace directory.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from tqdm import tqdm

import parallel_ext as px

PROMPT = "An assignment statement evaluates"


def default_text() -> str:
    """The language reference that comes with every Python: 460,000 characters of English."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def batches(
    tokenizer: Any,
    text: str,
    rows: int,
    tokens: int,
    steps: int,
    first: int = 0,
    device: torch.device | str = "cpu",
) -> list[dict[str, torch.Tensor]]:
    """``steps`` batches of [rows, tokens] ids from ``text``, from batch number ``first`` on."""
    size, characters = rows * tokens, 8 * rows * tokens * (first + steps)
    ids = torch.tensor(tokenizer(text[:characters])["input_ids"])
    if len(ids) < size * (first + steps):
        raise SystemExit(f"the text has {len(ids)} tokens; {size * (first + steps)} are needed")
    chunks = ids[: size * (first + steps)].view(-1, rows, tokens)[first:].to(device)
    return [{"input_ids": chunk, "labels": chunk} for chunk in chunks]


def train(
    model: Any,
    data: list[dict],
    learning_rate: float,
    clip: Any,
    quiet: bool,
    after_step: Callable[[int], Any] = lambda step: None,
) -> dict:
    """AdamW steps with clipping; losses, gradient norms and seconds of each step."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=learning_rate)
    record: dict[str, list[float]] = {"loss": [], "norm": [], "seconds": []}
    model.train()
    for step, batch in enumerate(bar := tqdm(data, disable=quiet, unit="step")):
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        record["norm"].append(clip(model, 1.0).item())
        optimizer.step()
        record["loss"].append(loss.item())
        record["seconds"].append(time.perf_counter() - start)
        bar.set_postfix(loss=f"{record['loss'][-1]:.4f}")
        after_step(step)
    model.eval()
    return record


def continuation(model: Any, tokenizer: Any, prompt: str) -> list[int]:
    """Greedy tokens after ``prompt``."""
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"].to(model.device)
    mask = torch.ones_like(ids)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)
    return out[0, ids.shape[1] :].tolist()


@torch.no_grad()
def last_logits(model: Any, ids: torch.Tensor) -> list[float]:
    """The logits over the whole vocabulary at the last token of the first sequence."""
    return model(ids).logits[0, -1].tolist()


def peak_mib() -> float:
    """Largest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def common_parser(description: str) -> argparse.ArgumentParser:
    """The options of every training example."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("model", help="HuggingFace directory or hub id")
    parser.add_argument("--tp", type=int, default=1, help="ranks that share one model")
    parser.add_argument("--text", type=Path, help="a text file; Python's reference by default")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rows", type=int, default=1, help="sequences in a batch")
    parser.add_argument("--tokens", type=int, default=128, help="tokens in a sequence")
    parser.add_argument("--learning-rate", type=float, default=2e-5)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--report", type=Path, help="JSON file for what happened")
    return parser


def finetuning_parser(description: str) -> argparse.ArgumentParser:
    """The options of every fine-tuning example."""
    parser = common_parser(description)
    parser.add_argument("--first", type=int, default=0, help="number of the first batch")
    parser.add_argument("--out", type=Path, help="directory to save to")
    parser.add_argument("--prompt", default=PROMPT)
    return parser


def asked_batches(
    options: argparse.Namespace, tokenizer: Any, mesh: px.Mesh
) -> list[dict[str, torch.Tensor]]:
    """The batches that the options ask for, on the device of the mesh."""
    text = options.text.read_text() if options.text else default_text()
    sizes = (options.rows, options.tokens, options.steps, options.first)
    return batches(tokenizer, text, *sizes, mesh.device)


def start(options: argparse.Namespace) -> tuple[px.Mesh, Any, Any, list[dict[str, torch.Tensor]]]:
    """The mesh, the parallel model, its tokenizer and the batches that the options ask for."""
    mesh = px.init_mesh(tp=options.tp, dp=1)
    model = px.from_pretrained(options.model, mesh, dtype=getattr(torch, options.dtype))
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    return mesh, model, tokenizer, asked_batches(options, tokenizer, mesh)


def of_all_ranks(value: Any) -> list[Any]:
    """What every rank gives, in their order; without torchrun there is one."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def made_by_rank_0(make: Callable[[], None], mesh: px.Mesh) -> None:
    """Let rank 0 make files that all ranks read then."""
    if mesh.rank == 0:
        make()
    if dist.is_initialized():
        dist.barrier()


def finish(options: argparse.Namespace, mesh: px.Mesh, report: dict[str, Any]) -> None:
    """Print and write the report."""
    if mesh.rank == 0:
        print(f"loss {report['loss'][0]:.4f} -> {report['loss'][-1]:.4f}")
        if options.report:
            options.report.write_text(json.dumps(report))


def save_and_finish(
    options: argparse.Namespace,
    mesh: px.Mesh,
    model: Any,
    tokenizer: Any,
    ids: torch.Tensor,
    report: dict[str, Any],
) -> None:
    """Write the model to OUT, complete the report with what it makes of ``ids``, end the job."""
    report["tokens after"] = continuation(model, tokenizer, options.prompt)
    if options.out:
        model.save_pretrained(options.out)
        if mesh.rank == 0:
            tokenizer.save_pretrained(options.out)
    report["peak MiB"] = of_all_ranks(peak_mib())
    report["logits"] = last_logits(model, ids)
    finish(options, mesh, report)


def main() -> None:
    parser = finetuning_parser(__doc__.splitlines()[0])
    parser.add_argument("--check-gradients", action="store_true", help="against one process")
    options = parser.parse_args()

    mesh, model, tokenizer, data = start(options)
    report: dict[str, Any] = {"tokens": continuation(model, tokenizer, options.prompt)}
    if options.check_gradients:
        model.train()
        report["gradients"] = px.check_gradients(model, data[0]).worst
    report |= train(model, data, options.learning_rate, px.clip_grad_norm_, quiet=mesh.rank != 0)
    save_and_finish(options, mesh, model, tokenizer, data[0]["input_ids"], report)


if __name__ == "__main__":
    main()
