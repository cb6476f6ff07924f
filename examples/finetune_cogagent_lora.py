"""Fine-tune CogAgent with LoRA on pictures and questions, its layers sharded over tp ranks.

    torchrun --nproc_per_node 2 examples/finetune_cogagent_lora.py MODEL --make --tp 2 --out ADAPTER

writes a tiny random CogAgent to MODEL, if nothing is there, and trains it on pictures that it
draws. ADAPTER becomes a plain PEFT directory, which loads at any tp and in plain PEFT; with
``--merged OUT`` the model becomes a plain HuggingFace directory with the adapter in it.

The published model of 18 billion parameters, whose files bring no tokenizer, on own pictures:

    torchrun --nproc_per_node 4 examples/finetune_cogagent_lora.py zai-org/cogagent-chat-hf \\
        --tokenizer lmsys/vicuna-7b-v1.5 --data FOLDER --tp 4 --dtype bfloat16 --checkpointing \\
        --r 16 --rows 1 --steps 1000 --learning-rate 1e-4 --out ADAPTER

FOLDER holds the pictures and ``data.jsonl``, a line for each question:
``{"image": "login.png", "question": "Where do I log in?", "answer": "At the top right."}``.
``python examples/finetune_cogagent_lora.py --memory --r 16`` says how much each rank then holds.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import peft
import tokenizers
import torch
import transformers
from finetune_llama import finish, made_by_rank_0, of_all_ranks, peak_mib, train
from PIL import Image, ImageDraw
from torch.utils.data import DataLoader, RandomSampler

import parallel_ext as px
from parallel_ext.models.cogagent import (
    CogAgentConfig,
    CogAgentForCausalLM,
    CogAgentProcessor,
    Conversation,
)
from parallel_ext.models.cogagent.spec import COGAGENT
from parallel_ext.parallel.plan import layout_of

# Not EVA2-CLIP-L, the tower of the high-resolution picture, where adapters are refused.
TARGETS = (
    *("vision_expert_query_key_value", "vision_expert_dense"),
    *("language_expert_query_key_value", "language_expert_dense"),
    *("cross_attn.query", "cross_attn.key_value", "cross_attn.dense"),
    *("language_mlp.gate_proj", "language_mlp.up_proj", "language_mlp.down_proj"),
    *("vision_mlp.gate_proj", "vision_mlp.up_proj", "vision_mlp.down_proj"),
    # EVA2-CLIP-E, the tower of the low-resolution picture
    *("attention.query_key_value", "attention.dense", "mlp.fc1", "mlp.fc2"),
)
TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "cross_hidden_size": 32,
    "cross_compute_hidden_size": 32,
    "cross_image_size": 84,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
    "vision_config": {
        **{"hidden_size": 48, "intermediate_size": 72, "num_heads": 4, "num_hidden_layers": 2},
        **{"image_size": 42, "num_positions": 10},
    },
    "cross_vision_config": {"layers": 3, "width": 32, "head_width": 8},
}


# The drawn pictures, and a model for them.

COLOURS = {"red": (230, 25, 25), "green": (25, 180, 50), "blue": (25, 50, 230)}
SHAPES = ("circle", "square", "stripe")
PLACES = {"left": (21, 42), "right": (63, 42), "top": (42, 21), "bottom": (42, 63)}
PICTURE_SIZE = 84


def draw(colour: str, shape: str, place: str) -> Image.Image:
    """A coloured shape at a place of a white picture."""
    picture = Image.new("RGB", (PICTURE_SIZE, PICTURE_SIZE), "white")
    x, y = PLACES[place]
    wide, high = {"circle": (17, 17), "square": (15, 15), "stripe": (20, 6)}[shape]
    pen = ImageDraw.Draw(picture)
    outline = pen.ellipse if shape == "circle" else pen.rectangle
    outline((x - wide, y - high, x + wide, y + high), fill=COLOURS[colour])
    return picture


def drawn_examples() -> list[Conversation]:
    """Three questions about each of 36 pictures."""
    return [
        Conversation(question, draw(colour, shape, place), answer=answer)
        for colour in COLOURS
        for shape in SHAPES
        for place in PLACES
        for question, answer in (
            ("What colour is it ?", colour),
            ("Which shape is it ?", f"a {shape}"),
            ("Where is it ?", f"at the {place}"),
        )
    ]


class Folder(Sequence[Conversation]):
    """What ``data.jsonl`` in a folder of pictures lists; a picture is read when it is needed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lines = (path / "data.jsonl").read_text(encoding="utf-8").splitlines()
        self.entries = [json.loads(line) for line in lines]

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: int) -> Conversation:
        entry = self.entries[index]
        with Image.open(self.path / entry["image"]) as picture:
            return Conversation(entry["question"], picture.copy(), answer=entry["answer"])


def make_model(out: Path) -> None:
    """Write a tiny random CogAgent with a tokenizer of the words of the drawn examples."""
    texts = [f"[INST] {each.query} [/INST] {each.answer}" for each in drawn_examples()]
    words = sorted({word for text in texts for word in text.split()})
    vocabulary = {word: number for number, word in enumerate(["<unk>", "<s>", "</s>", *words])}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    named = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<unk>"}
    torch.manual_seed(0)
    model = CogAgentForCausalLM(CogAgentConfig(vocab_size=len(vocabulary), **TINY))
    model.save_pretrained(out)
    transformers.PreTrainedTokenizerFast(tokenizer_object=core, **named).save_pretrained(out)


# Batches.


class Data(NamedTuple):
    """Batches to train on, the same on every rank, and a few questions to ask before and after."""

    batches: DataLoader
    questions: Mapping[str, Any]
    expected: list[str]


def data_for(
    model: Any, tokenizer: Any, examples: Sequence[Conversation], rows: int, steps: int, seed: int
) -> Data:
    """``steps`` batches of ``rows`` examples in an order drawn by ``seed``; up to 6 questions."""
    processor = CogAgentProcessor(tokenizer, model.config)

    def collated(chosen: Sequence[Conversation]) -> Mapping[str, Any]:
        return processor(chosen).to(model.device)

    order = RandomSampler(
        examples, num_samples=rows * steps, generator=torch.Generator().manual_seed(seed)
    )
    batches = DataLoader(examples, rows, sampler=order, collate_fn=collated)
    asked = [examples[i] for i in range(0, len(examples), max(1, len(examples) // 6) + 1)]
    questions = collated([replace(each, answer=None) for each in asked])
    return Data(batches, questions, [each.answer for each in asked])


def answers(model: Any, tokenizer: Any, questions: Mapping[str, Any]) -> list[str]:
    """What the model answers, greedily."""
    out = model.generate(**questions, max_new_tokens=16, do_sample=False)
    start = questions["input_ids"].shape[1]
    return tokenizer.batch_decode(out[:, start:], skip_special_tokens=True)


@torch.no_grad()
def last_logits(model: Any, questions: Mapping[str, Any]) -> list[float]:
    """The logits over the whole vocabulary behind each question."""
    return model(**questions).logits[:, -1].flatten().tolist()


# How much a rank holds.


def memory_lines(r: int, targets: Sequence[str]) -> list[str]:
    """GiB that each rank holds of the published model, from its layouts; nothing is allocated."""
    with torch.device("meta"):
        model = CogAgentForCausalLM(CogAgentConfig())
    buffers = sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
    adapted = tuple(f".{target}.weight" for target in targets)
    parts = {"EVA2-CLIP-E": "model.vision.", "EVA2-CLIP-L": "model.cross_vision.", "decoder": ""}

    titles = ["tp", *parts, "buffers", f"LoRA r={r}", "in all"]
    lines = ["".join(f"{title:>13}" for title in titles)]
    for tp in (1, 2, 4, 8):
        held, factors = dict.fromkeys(parts, 0), 0
        layouts = layout_of(model, COGAGENT, tp)
        for name, layout in layouts.items():
            if name in layouts.buffers:  # of another dtype
                continue
            local = layout.local_shape(0)
            part = next(part for part, start in parts.items() if name.startswith(start))
            held[part] += 2 * math.prod(local)
            if name.endswith(adapted):  # A is sharded as the columns, B as the rows
                factors += r * sum(local)
        gib = [size / 2**30 for size in (*held.values(), buffers, 16 * factors)]
        lines.append(f"{tp:>13}" + "".join(f"{size:>13.2f}" for size in (*gib, sum(gib))))
    return [
        f"{model.num_parameters():,} parameters in bfloat16, frozen; GiB of each rank:",
        *lines,
        "decoder: with embeddings and head. EVA2-CLIP-E: with the GLU between it and the decoder.",
        "LoRA: factors, gradients and both moments of AdamW in float32. Not included: what a",
        "forward keeps for its backward, which grows with the rows and the length of the text.",
    ]


def adapted_model(model: Any, options: argparse.Namespace) -> peft.PeftModel:
    """The parallel model with a new adapter, which does not depend on tp."""
    torch.manual_seed(options.seed)
    config = px.LoraConfig(
        r=options.r,
        lora_alpha=options.alpha,
        target_modules=options.targets.split(","),
        task_type="CAUSAL_LM",
    )
    return peft.get_peft_model(model, config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="HuggingFace directory or hub id")
    parser.add_argument("--make", action="store_true", help="write a tiny one there, if none is")
    parser.add_argument("--tokenizer", help="directory or hub id, if it is not MODEL's own")
    parser.add_argument("--data", type=Path, help="folder of pictures and data.jsonl; else drawn")
    parser.add_argument("--tp", type=int, default=1, help="ranks that share one model")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rows", type=int, default=16, help="questions in a batch")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--checkpointing", action="store_true", help="compute layers twice")
    parser.add_argument("--r", type=int, default=8, help="rank of the adapter")
    parser.add_argument("--alpha", type=int, default=16, help="its scale times r")
    parser.add_argument("--targets", default=",".join(TARGETS), help="modules that it adapts")
    parser.add_argument("--seed", type=int, default=0, help="of adapter and order of the questions")
    parser.add_argument("--initial", type=Path, help="directory for the adapter before training")
    parser.add_argument("--out", type=Path, help="directory for the adapter")
    parser.add_argument("--merged", type=Path, help="directory for the model with the adapter in")
    parser.add_argument("--report", type=Path, help="JSON file for what happened")
    parser.add_argument("--memory", action="store_true", help="only say what the real model needs")
    options = parser.parse_args()
    if options.memory:
        print("\n".join(memory_lines(options.r, options.targets.split(","))))
        return
    if options.model is None:
        parser.error("give a MODEL, or --memory")

    mesh = px.init_mesh(tp=options.tp, dp=1)

    def make() -> None:
        if options.make and not Path(options.model, "config.json").exists():
            make_model(Path(options.model))

    made_by_rank_0(make, mesh)
    model = px.from_pretrained(options.model, mesh, dtype=getattr(torch, options.dtype))
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.tokenizer or options.model)
    if options.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    examples = Folder(options.data) if options.data else drawn_examples()
    data = data_for(model, tokenizer, examples, options.rows, options.steps, options.seed)
    model = adapted_model(model, options)
    if options.initial:
        model.save_pretrained(options.initial)
    report: dict[str, Any] = {"expected": data.expected}
    report["answers"] = answers(model, tokenizer, data.questions)
    quiet = mesh.rank != 0
    report |= train(model, data.batches, options.learning_rate, px.clip_grad_norm_, quiet)
    report["answers after"] = answers(model, tokenizer, data.questions)
    report["logits"] = last_logits(model, data.questions)
    if options.out:
        model.save_pretrained(options.out)
    if options.merged:
        model = model.merge_and_unload()  # in place: no second copy of the weights
        report["merged logits"] = last_logits(model, data.questions)
        report["merged answers"] = answers(model, tokenizer, data.questions)
        model.save_pretrained(options.merged)
        if mesh.rank == 0:
            tokenizer.save_pretrained(options.merged)
    report["peak MiB"] = of_all_ranks(peak_mib())
    finish(options, mesh, report)


if __name__ == "__main__":
    main()
