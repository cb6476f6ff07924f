"""Fine-tune a causal language model on a text with HuggingFace's Trainer.

    python examples/finetune_trainer.py MODEL TEXT OUT

Nothing here knows of several ranks. ``-m parallel_ext.run`` runs it on them as it is:

    torchrun --nproc_per_node 2 -m parallel_ext.run --tp 2 \\
        examples/finetune_trainer.py MODEL TEXT OUT
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument("out")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    ids = torch.tensor(tokenizer(options.text.read_text())["input_ids"])
    rows = ids[: len(ids) // options.tokens * options.tokens].view(-1, options.tokens)
    arguments = TrainingArguments(
        options.out,
        max_steps=options.steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-4,
        max_grad_norm=1.0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    data = [{"input_ids": row, "labels": row} for row in rows]
    trainer = Trainer(model, arguments, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    trainer.save_model()
    trainer.save_state()


if __name__ == "__main__":
    main()
