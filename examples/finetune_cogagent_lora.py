"""Fine-tune CogAgent with LoRA on pictures and questions, its layers cut over tp ranks.

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
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import peft
import tokenizers
import torch
import torch.nn.functional as F  # noqa: N812
import transformers
from finetune_llama import finish, peak_mib, train
from torch.utils.data import DataLoader, RandomSampler

import parallel_ext as px
from parallel_ext.models.cogagent import (
    LANGUAGE,
    VISION,
    CogAgentConfig,
    CogAgentForCausalLM,
)
from parallel_ext.models.cogagent.table import COGAGENT
from parallel_ext.models.table import ModelSizes, plan

# Not EVA2-CLIP-L, the tower of the high-resolution picture, which is whole on every rank.
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


class Example(NamedTuple):
    """A picture, float32 [3, H, W] between 0 and 1, with a question about it and its answer."""

    picture: torch.Tensor
    question: str
    answer: str


# The drawn pictures, and a model for them.

COLOURS = {"red": (0.9, 0.1, 0.1), "green": (0.1, 0.7, 0.2), "blue": (0.1, 0.2, 0.9)}
SHAPES = ("circle", "square", "stripe")
PLACES = {"left": (0.25, 0.5), "right": (0.75, 0.5), "top": (0.5, 0.25), "bottom": (0.5, 0.75)}
PICTURE_SIZE = 84


def draw(colour: str, shape: str, place: str) -> torch.Tensor:
    """A coloured shape at a place of a white picture."""
    lines = (torch.arange(PICTURE_SIZE) + 0.5) / PICTURE_SIZE
    x, y = (lines.expand(PICTURE_SIZE, -1) - PLACES[place][0], lines[:, None] - PLACES[place][1])
    inside = {
        "circle": x**2 + y**2 < 0.2**2,
        "square": (x.abs() < 0.18) & (y.abs() < 0.18),
        "stripe": (x.abs() < 0.24) & (y.abs() < 0.07),
    }[shape]
    return torch.where(inside, torch.tensor(COLOURS[colour])[:, None, None], torch.tensor(1.0))


def drawn_examples() -> list[Example]:
    """Three questions about each of 36 pictures."""
    return [
        Example(draw(colour, shape, place), question, answer)
        for colour in COLOURS
        for shape in SHAPES
        for place in PLACES
        for question, answer in (
            ("What colour is it ?", colour),
            ("Which shape is it ?", f"a {shape}"),
            ("Where is it ?", f"at the {place}"),
        )
    ]


def make_model(out: Path) -> None:
    """Write a tiny random CogAgent with a tokenizer of the words of the drawn examples."""
    texts = [f"[INST] {e.question} [/INST] {e.answer}" for e in drawn_examples()]
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


def examples_in(folder: Path) -> list[Example]:
    """What ``data.jsonl`` in a folder of pictures lists; Pillow reads the pictures."""
    import numpy as np
    from PIL import Image

    found = []
    for line in (folder / "data.jsonl").read_text().splitlines():
        entry = json.loads(line)
        pixels = np.array(Image.open(folder / entry["image"]).convert("RGB"))
        picture = torch.from_numpy(pixels).permute(2, 0, 1).float() / 255
        found.append(Example(picture, entry["question"], entry["answer"]))
    return found


def squeezed(picture: torch.Tensor, size: int) -> torch.Tensor:
    """A picture as a tower reads it: a square, whatever it was, and normalised as CLIP's."""
    pixels = F.interpolate(picture[None], (size, size), mode="bicubic", antialias=True)[0]
    mean = torch.tensor([0.48145466, 0.4578275, 0.40821073])
    std = torch.tensor([0.26862954, 0.26130258, 0.27577711])
    return (pixels.clamp(0, 1) - mean[:, None, None]) / std[:, None, None]


def batch_of(
    examples: Sequence[Example], tokenizer: Any, config: CogAgentConfig, answered: bool = True
) -> dict[str, torch.Tensor]:
    """The inputs of the model: begin, picture, question; and the answers, if it is to learn them.

    Rows are padded on the left, so that generation can go on from them.
    """
    if config.template_version != "chat":
        raise SystemExit(f"template_version is {config.template_version!r}; only 'chat' is known")
    ids, types, labels = [], [], []
    for example in examples:
        text = tokenizer.encode(f" [INST] {example.question} [/INST] ", add_special_tokens=False)
        image = [config.pad_token_id] * config.image_tokens  # which are not read
        prompt = [config.bos_token_id, *image, *text]
        answer = []
        if answered:
            answer = tokenizer.encode(example.answer, add_special_tokens=False)
            answer += [config.eos_token_id]
        ids.append([*prompt, *answer])
        types.append([LANGUAGE, *[VISION] * len(image), *[LANGUAGE] * len(text + answer)])
        labels.append([-100] * len(prompt) + answer)
    length = max(map(len, ids))

    def padded(rows: list[list[int]], fill: int) -> torch.Tensor:
        return torch.tensor([[fill] * (length - len(row)) + row for row in rows])

    low, high = config.vision_config["image_size"], config.cross_image_size
    batch = {
        "input_ids": padded(ids, config.pad_token_id),
        "token_type_ids": padded(types, LANGUAGE),
        "attention_mask": padded([[1] * len(row) for row in ids], 0),
        "images": torch.stack([squeezed(example.picture, low) for example in examples]),
        "cross_images": torch.stack([squeezed(example.picture, high) for example in examples]),
    }
    return {**batch, "labels": padded(labels, -100)} if answered else batch


class Data(NamedTuple):
    """Batches to train on, the same on every rank, and a few questions to ask before and after."""

    batches: DataLoader
    questions: dict[str, torch.Tensor]
    expected: list[str]


def data_for(
    model: Any, tokenizer: Any, examples: list[Example], rows: int, steps: int, seed: int
) -> Data:
    """``steps`` batches of ``rows`` examples in an order drawn by ``seed``; up to 6 questions."""
    config, device = model.config, model.device

    def collated(chosen: Sequence[Example], answered: bool) -> dict[str, torch.Tensor]:
        batch = batch_of(chosen, tokenizer, config, answered)
        return {name: value.to(device) for name, value in batch.items()}

    order = RandomSampler(
        examples, num_samples=rows * steps, generator=torch.Generator().manual_seed(seed)
    )
    batches = DataLoader(examples, rows, sampler=order, collate_fn=partial(collated, answered=True))
    asked = examples[:: max(1, len(examples) // 6) + 1]
    return Data(batches, collated(asked, answered=False), [example.answer for example in asked])


def answers(model: Any, tokenizer: Any, questions: dict[str, torch.Tensor]) -> list[str]:
    """What the model answers, greedily."""
    out = model.generate(**questions, max_new_tokens=16, do_sample=False)
    start = questions["input_ids"].shape[1]
    return tokenizer.batch_decode(out[:, start:], skip_special_tokens=True)


@torch.no_grad()
def last_logits(model: Any, questions: dict[str, torch.Tensor]) -> list[float]:
    """The logits over the whole vocabulary behind each question."""
    return model(**questions).logits[:, -1].flatten().tolist()


# How much a rank holds.


def memory_lines(r: int, targets: Sequence[str]) -> list[str]:
    """GiB that each rank holds of the published model, from its layouts; nothing is allocated."""
    with torch.device("meta"):
        model = CogAgentForCausalLM(CogAgentConfig())
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    heads = {
        path: getattr(model.get_submodule(path), block.heads)
        for path, block in COGAGENT.blocks(shapes).items()
        if block.heads is not None
    }
    sizes = ModelSizes(model.config.vocab_size, heads_of=heads)
    buffers = sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
    adapted = tuple(f".{target}.weight" for target in targets)
    parts = {"EVA2-CLIP-E": "model.vision.", "EVA2-CLIP-L": "model.cross_vision.", "decoder": ""}

    titles = ["tp", *parts, "buffers", f"LoRA r={r}", "in all"]
    lines = ["".join(f"{title:>13}" for title in titles)]
    for tp in (1, 2, 4, 8):
        held, factors = dict.fromkeys(parts, 0), 0
        for name, layout in plan(COGAGENT, shapes, {}, sizes, tp).items():
            local = layout.local_shape(0)
            part = next(part for part, start in parts.items() if name.startswith(start))
            held[part] += 2 * math.prod(local)
            if name.endswith(adapted):  # A is cut like the columns of the weight, B like its rows
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
        if mesh.rank == 0 and options.make and not Path(options.model, "config.json").exists():
            make_model(Path(options.model))

    mesh.together("making the model", make)
    model = px.from_pretrained(options.model, mesh, dtype=getattr(torch, options.dtype))
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.tokenizer or options.model)
    if options.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    examples = examples_in(options.data) if options.data else drawn_examples()
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
    report["peak MiB"] = mesh.gather_objects(peak_mib())
    finish(options, mesh, report)


if __name__ == "__main__":
    main()
