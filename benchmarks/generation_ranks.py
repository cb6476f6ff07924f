"""What the processes of the generation benchmark run: one model, and the two ways to its tokens."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import harness
import torch
import torch.distributed as dist
from transformers import PreTrainedModel

import parallel_ext as px
from parallel_ext import _C

ON_SHARDS, GATHERED = "px.generate", "model.generate"
PROMPT = 16

Generate = Callable[..., torch.Tensor]


def ways(model: PreTrainedModel, options: Mapping[str, Any]) -> dict[str, Generate]:
    """Competitor -> a function of the prompts and the number of new tokens."""
    common = {**options, "eos_token_id": None, "pad_token_id": 0}

    def on_shards(prompts: torch.Tensor, tokens: int) -> torch.Tensor:
        return px.generate(model, prompts, max_new_tokens=tokens, seed=1, **common)

    def gathered(prompts: torch.Tensor, tokens: int) -> torch.Tensor:
        return model.generate(prompts, max_new_tokens=tokens, **common)

    return {ON_SHARDS: on_shards, GATHERED: gathered}


def timed(generate: Generate, prompts: torch.Tensor, tokens: int) -> list[float]:
    start = time.perf_counter()
    generate(prompts, tokens)
    return [time.perf_counter() - start]


def gathered_bytes(generate: Generate, prompts: torch.Tensor) -> int:
    """What one more token has a rank gather from the others."""
    counts = []
    for tokens in (2, 3):
        _C.reset_collective_counts()
        generate(prompts, tokens)
        counts.append(_C.collective_counts()["all_gather_bytes"])
    return counts[1] - counts[0]


def main() -> None:
    warnings.filterwarnings("ignore")
    request = harness.arguments()
    dist.init_process_group("gloo")
    model = px.from_pretrained(request["weights"], px.init_mesh(tp=2), dtype=torch.float32)
    generator = torch.Generator().manual_seed(3)
    ids = (request["rows"], PROMPT)
    prompts = torch.randint(0, model.config.vocab_size, ids, generator=generator)
    competitors = ways(model, request["options"])
    tokens = request["tokens"]
    runs = {
        name: (lambda generate=generate: timed(generate, prompts, tokens))
        for name, generate in competitors.items()
    }
    rounds = harness.interleaved(runs, request["repetitions"], request["warm_up"])
    answer = {
        "rounds": [asdict(each) for each in rounds],
        "bytes": {name: gathered_bytes(way, prompts) for name, way in competitors.items()},
        "same": len({str(way(prompts, tokens).tolist()) for way in competitors.values()}) == 1,
    }
    harness.finish(answer)


if __name__ == "__main__":
    main()
