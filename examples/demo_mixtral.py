"""A mixture of experts on a real model: `make demo-mixtral`.

A Mixtral is made of the first layers of SmolLM2-135M, each MLP copied into 4 experts, so that its
loss is the Llama's. It is trained on 2 ranks with (tp 2, ep 2), on 2 with (dp 2, ep 2), and on 4
with (dp 2, tp 2, ep 4), saved, and read by unpatched transformers. Beside them a single process
trains on the same batches with plain transformers. A difference above its limit is an error.

    python examples/demo_mixtral.py [--work FOLDER] [--steps N]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import finetune_mixtral
import torch
import transformers
from demo import PROMPT, clip, cost_lines, finetune, relative
from demo_lora import Check, at_most, exit_unless_all_hold, same_tokens
from finetune_llama import batches, continuation, default_text, last_logits, peak_mib, train
from finetune_mixtral import mixtral_from_dense
from jobs import alone
from prepare_smollm2 import prepare
from safetensors import safe_open

LAYERS, EXPERTS, ROWS, TOKENS = 2, 4, 4, 32
LEARNING_RATE = 1e-4
LAYOUTS = {
    "tp 2, ep 2": (2, ["--tp", 2, "--ep", 2]),
    "dp 2, ep 2": (2, ["--ep", 2, "--zero", 3]),
    "dp 2, tp 2, ep 4": (4, ["--tp", 2, "--ep", 4]),
}
LOSS_LIMIT, NORM_LIMIT, LOGITS_LIMIT, GRADIENT_LIMIT = 2e-5, 2e-4, 1e-4, 1e-3


def load(path: Path) -> Any:
    """A model by unpatched transformers."""
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


@torch.no_grad()
def dense_loss(path: Path, batch: dict[str, torch.Tensor]) -> float:
    """The loss of the Llama's first layers, of which the Mixtral is made."""
    llama = load(path)
    llama.model.layers = llama.model.layers[:LAYERS]
    llama.config.num_hidden_layers = LAYERS
    return llama(**batch).loss.item()


def single_process(work: Path, steps: int) -> dict[str, Any]:
    """Make the Mixtral; the same training with plain transformers."""
    print("\n== one process, plain transformers ==", flush=True)
    dense, path = work / "smollm2", work / "mixtral"
    mixtral_from_dense(str(dense), path, EXPERTS, 2, LAYERS)
    model, tokenizer = load(path), transformers.AutoTokenizer.from_pretrained(path)
    data = batches(tokenizer, default_text(), ROWS, TOKENS, steps)

    result: dict[str, Any] = {"dense loss": dense_loss(dense, data[0])}
    result["tokens"] = continuation(model, tokenizer, PROMPT)
    result |= train(model, data, LEARNING_RATE, clip, quiet=False)
    result["tokens after"] = continuation(model, tokenizer, PROMPT)
    result["logits"] = last_logits(model, data[0]["input_ids"])
    result["peak MiB"] = [peak_mib()]
    return result


def reload(directory: Path, steps: int) -> dict[str, Any]:
    """What unpatched transformers reads of a directory that parallel ranks saved."""
    print("\n== unpatched transformers reads what 4 ranks saved ==", flush=True)
    model, tokenizer = load(directory), transformers.AutoTokenizer.from_pretrained(directory)
    ids = batches(tokenizer, default_text(), ROWS, TOKENS, steps)[0]["input_ids"]
    experts = []
    for file in directory.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            experts += [name for name in opened.keys() if ".experts." in name]  # noqa: SIM118
    return {
        "logits": last_logits(model, ids),
        "experts": len(experts),
        "tokens": continuation(model, tokenizer, PROMPT),
    }


def checks(single: dict, runs: dict[str, dict], reloaded: dict) -> list[Check]:
    """All that is compared."""
    start = abs(single["loss"][0] / single["dense loss"] - 1)
    found = [at_most("loss of the Llama it is made of", start, LOSS_LIMIT)]
    for title, run_of in runs.items():
        found += [
            at_most(f"{title}: losses", relative(run_of["loss"], single["loss"]), LOSS_LIMIT),
            at_most(
                f"{title}: gradient norms", relative(run_of["norm"], single["norm"]), NORM_LIMIT
            ),
            at_most(f"{title}: gradients", run_of["gradients"][1], GRADIENT_LIMIT),
            at_most(f"{title}: logits", relative(run_of["logits"], single["logits"]), LOGITS_LIMIT),
            same_tokens(
                f"{title}: tokens", run_of["tokens after"], single["tokens after"], "to one process"
            ),
        ]
    last = list(runs.values())[-1]
    expected = 3 * LAYERS * EXPERTS
    return [
        *found,
        at_most("logits after reload", relative(reloaded["logits"], last["logits"]), LOGITS_LIMIT),
        same_tokens("tokens after reload", reloaded["tokens"], last["tokens after"], "to 4 ranks"),
        Check(
            "matrices of experts on disk",
            str(reloaded["experts"]),
            f"{expected}, by the hub's names",
            reloaded["experts"] == expected,
        ),
    ]


def routing_lines(runs: dict[str, dict]) -> list[str]:
    """How the routers spread the tokens in the last step, and what the exchanges took."""
    titles = ("load over mean of", "rank", "expert", "idle experts", "MiB sent", "s exchanging")
    lines = ["", "{:18}{:>6}{:>8}{:>14}{:>10}{:>14}".format(*titles)]
    for title, result in runs.items():
        last = {name.removeprefix("moe/"): value for name, value in result["routing"][-1].items()}
        lines.append(
            f"{title:18}{last['rank_overload_max']:>6.2f}{last['expert_overload_max']:>8.2f}"
            f"{last['idle_experts']:>14}{last['bytes_sent'] / 2**20:>10.1f}"
            f"{last['exchange_s_max']:>14.2f}"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path(".work"))
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    work, steps = options.work, options.steps
    saved = work / "mixtral-trained"
    alone(prepare, work / "smollm2")
    single, seconds_alone = alone(single_process, work, steps)
    runs, seconds = {}, {"one process": seconds_alone}
    common = ["--steps", steps, "--rows", ROWS, "--tokens", TOKENS, "--out", saved]
    common += ["--learning-rate", LEARNING_RATE, "--check-gradients"]
    for number, (title, (ranks, layout)) in enumerate(LAYOUTS.items()):
        routing = work / f"mixtral-{number}-routing.jsonl"
        routing.unlink(missing_ok=True)  # of an earlier demo
        runs[title], seconds[title] = finetune(
            finetune_mixtral.main,
            work / "mixtral",
            ranks,
            work / f"mixtral-{number}.json",
            *layout,
            *common,
            *("--routing", routing),
        )
    found = checks(single, runs, alone(reload, saved, steps)[0])
    lines = ["", f"{'step':>4}{'one process':>14}" + "".join(f"{title:>18}" for title in runs)]
    for step, losses in enumerate(
        zip(single["loss"], *(r["loss"] for r in runs.values()), strict=True)
    ):
        lines.append(f"{step:>4}{losses[0]:>14.6f}" + "".join(f"{x:>18.6f}" for x in losses[1:]))
    lines += ["", *(f"{c.title:34}{c.found:>10}  {c.expected}" for c in found)]
    costs = {
        title: (result, seconds[title]) for title, result in {"one process": single, **runs}.items()
    }
    print("\n".join(lines + routing_lines(runs) + cost_lines(costs)), flush=True)
    exit_unless_all_hold(found)


if __name__ == "__main__":
    main()
