"""Fine-tune any HuggingFace Llama with LoRA on any text file, its layers sharded over tp ranks.

    torchrun --nproc_per_node 2 examples/finetune_lora.py MODEL --tp 2 --out ADAPTER
    torchrun --nproc_per_node 3 examples/finetune_lora.py MODEL --tp 3 --adapter ADAPTER --out MORE

MODEL is a HuggingFace directory or hub id; ADAPTER becomes a plain PEFT directory, which loads at
any tp and in plain PEFT.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import peft
import torch
from finetune_llama import (
    continuation,
    finetuning_parser,
    finish,
    last_logits,
    of_all_ranks,
    peak_mib,
    start,
    train,
)

import parallel_ext as px
from parallel_ext import _C

ALL_LINEARS = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"


def adapted(model: Any, options: argparse.Namespace) -> peft.PeftModel:
    """The parallel model with a new adapter, or with the one to train further."""
    if options.adapter:
        config = px.LoraConfig.from_pretrained(options.adapter)
        return peft.PeftModel.from_pretrained(
            model, options.adapter, is_trainable=True, config=config
        )
    torch.manual_seed(options.seed)
    config = px.LoraConfig(
        r=options.r,
        lora_alpha=options.alpha,
        lora_dropout=options.dropout,
        target_modules=options.targets.split(","),
        task_type="CAUSAL_LM",
    )
    return peft.get_peft_model(model, config)


def main() -> None:
    parser = finetuning_parser(__doc__.splitlines()[0])
    parser.set_defaults(learning_rate=1e-3)
    parser.add_argument("--adapter", type=Path, help="PEFT directory to train further, as it is")
    parser.add_argument("--r", type=int, default=8, help="rank of a new adapter")
    parser.add_argument("--alpha", type=int, default=16, help="its scale times r")
    parser.add_argument("--dropout", type=float, default=0.0, help="of a new adapter's inputs")
    parser.add_argument("--targets", default=ALL_LINEARS, help="modules that a new one adapts")
    parser.add_argument("--seed", type=int, default=0, help="of its random numbers")
    parser.add_argument("--initial", type=Path, help="directory for the adapter before training")
    options = parser.parse_args()

    mesh, model, tokenizer, data = start(options)
    model = adapted(model, options)
    if options.initial:
        model.save_pretrained(options.initial)
    report: dict[str, Any] = {"tokens": continuation(model, tokenizer, options.prompt)}
    _C.reset_collective_counts()
    report |= train(model, data, options.learning_rate, px.clip_grad_norm_, quiet=mesh.rank != 0)
    counts = _C.collective_counts().items()
    report["collectives of a step"] = {kind: count / len(data) for kind, count in counts}
    report["tokens after"] = continuation(model, tokenizer, options.prompt)
    if options.out:
        model.save_pretrained(options.out)
    report["peak MiB"] = of_all_ranks(peak_mib())

    if options.report:  # what the adapter does, beside the base and merged into it
        ids = data[0]["input_ids"]
        report["logits"] = last_logits(model, ids)
        model.merge_adapter()
        report["merged logits"] = last_logits(model, ids)
        model.unmerge_adapter()
        report["unmerged logits"] = last_logits(model, ids)
    finish(options, mesh, report)


if __name__ == "__main__":
    main()
