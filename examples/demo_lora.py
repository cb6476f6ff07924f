"""The LoRA job on a real model: `make demo-lora`.

2 ranks fine-tune an adapter on all linears of SmolLM2-135M (9 heads, 3 key-value heads, which 2
ranks do not divide) and save it; unpatched transformers with plain PEFT reads it and merges it; 3
ranks train it on. Beside them a single process trains the same adapter with plain PEFT. The table
holds both, and a difference above its limit is an error.

    python examples/demo_lora.py [--work FOLDER] [--steps N]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, NamedTuple

import finetune_lora
import peft
import torch
import transformers
from demo import (
    MORE_STEPS,
    PROMPT,
    TOKENS,
    cost_lines,
    finetune,
    loss_lines,
    relative,
    single_process,
)
from finetune_llama import batches, continuation, default_text, last_logits
from jobs import alone
from prepare_smollm2 import prepare

LEARNING_RATE = 1e-3
# Relative to the single process, all in fp32. That process is itself up to 6e-6 (losses, by torch's
# cross entropy over 49153 logits) and 3e-5 (norms) away from the same training in fp64.
LOSS_LIMIT, NORM_LIMIT, LOGITS_LIMIT = 2e-5, 1e-4, 1e-4


def plain(model_path: Path, adapter: Path, trainable: bool) -> peft.PeftModel:
    """The adapter on the unpatched model, by plain PEFT."""
    model = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    return peft.PeftModel.from_pretrained(model, adapter, is_trainable=trainable).eval()


def by_peft(model_path: Path, initial: Path, steps: int) -> dict[str, Any]:
    """The training of the same initial adapter by plain PEFT."""
    print("\n== one process, plain PEFT from the same initial adapter ==", flush=True)
    return single_process(plain(model_path, initial, True), model_path, steps, LEARNING_RATE)


def reload(model_path: Path, adapter: Path, steps: int) -> dict[str, Any]:
    """What plain PEFT makes of the adapter that 2 ranks saved."""
    print("\n== plain PEFT reads what 2 ranks saved ==", flush=True)
    model = plain(model_path, adapter, False)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_path)
    ids = batches(tokenizer, default_text(), 1, TOKENS, steps)[0]["input_ids"]
    result: dict[str, Any] = {"logits": last_logits(model, ids)}
    result["tokens"] = continuation(model, tokenizer, PROMPT)
    with model.disable_adapter():
        result["base logits"] = last_logits(model, ids)
    result["merged logits"] = last_logits(model.merge_and_unload(), ids)
    result["layers"] = model.config.num_hidden_layers
    return result


class Check(NamedTuple):
    """One line of the table: what was found, what it must be, and whether it is."""

    title: str
    found: str
    expected: str
    holds: bool


def at_most(title: str, found: float, limit: float) -> Check:
    """A difference that must not exceed its limit; NaN does."""
    return Check(title, f"{found:.1e}", f"at most {limit:.0e}", found <= limit)


def same_tokens(title: str, ours: list, theirs: list, whose: str) -> Check:
    """Generated tokens, or answers, that must be equal."""
    return Check(title, "equal" if ours == theirs else "DIFFERENT", whose, ours == theirs)


def worst(got: list[float], expected: list[float]) -> float:
    """The largest difference of two numbers, relative to what was expected."""
    a, b = torch.tensor(got), torch.tensor(expected)
    return ((a - b).abs() / b).max().item()  # torch's max keeps NaN, Python's may lose it


def exit_unless_all_hold(found: list[Check]) -> None:
    """End with an error that lists what does not hold."""
    failed = [f"{c.title.strip()} {c.found}, {c.expected}" for c in found if not c.holds]
    if failed:
        sys.exit("wrong: " + "; ".join(failed))


def checks(single: dict, two: dict, reloaded: dict, three: dict) -> list[Check]:
    """All that is compared."""
    logits = reloaded["logits"]
    change = relative(reloaded["base logits"], logits)
    sums = two["collectives of a step"]["all_reduce"]
    # Two in a layer, forward and backward, and that of the head. With an adapter the first layer's
    # input needs no gradient; the sum of all replicated factors takes its place.
    base_sums = 4 * reloaded["layers"] + 1
    return [
        at_most("losses on 2 ranks", worst(two["loss"], single["loss"]), LOSS_LIMIT),
        at_most("losses on 3 ranks", worst(three["loss"], single["more loss"]), LOSS_LIMIT),
        at_most("gradient norms on 2 ranks", worst(two["norm"], single["norm"]), NORM_LIMIT),
        at_most("gradient norms on 3 ranks", worst(three["norm"], single["more norm"]), NORM_LIMIT),
        at_most("logits in plain PEFT", relative(two["logits"], logits), LOGITS_LIMIT),
        at_most("  merged there", relative(reloaded["merged logits"], logits), LOGITS_LIMIT),
        at_most("  merged on 2 ranks", relative(two["merged logits"], logits), LOGITS_LIMIT),
        at_most("  unmerged, from before", relative(two["unmerged logits"], two["logits"]), 0.0),
        # Else the logits would agree whatever became of the adapter.
        Check("  changed by training", f"{change:.1e}", "at least 1e-02", change >= 1e-2),
        Check("all-reduces of a step", f"{sums:g}", f"{base_sums} as the base", sums == base_sums),
        same_tokens("tokens before training", two["tokens"], single["tokens"], "to one process"),
        same_tokens(
            "tokens after training", two["tokens after"], single["tokens after"], "to one process"
        ),
        same_tokens("  in plain PEFT", reloaded["tokens"], two["tokens after"], "to the 2 ranks"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path(".work"))
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    work, steps = options.work, options.steps
    model, initial, adapter = work / "smollm2", work / "lora-initial", work / "lora"
    alone(prepare, model)
    script = finetune_lora.main
    common = ["--tokens", TOKENS, "--learning-rate", LEARNING_RATE]
    first = ["--tp", 2, "--steps", steps, "--initial", initial, "--out", adapter]
    two, two_seconds = finetune(script, model, 2, work / "lora-two.json", *common, *first)
    single, single_seconds = alone(by_peft, model, initial, steps)
    reloaded, _ = alone(reload, model, adapter, steps)
    more = ["--tp", 3, "--steps", MORE_STEPS, "--first", steps, "--adapter", adapter]
    three, three_seconds = finetune(script, model, 3, work / "lora-three.json", *common, *more)

    lines, found = [*loss_lines(single, two, three), ""], checks(single, two, reloaded, three)
    lines += [f"{check.title:28}{check.found:>10}  {check.expected}" for check in found]
    runs = {
        "one process": (single, single_seconds),
        "2 ranks": (two, two_seconds),
        "3 ranks": (three, three_seconds),
    }
    print("\n".join(lines + cost_lines(runs)), flush=True)
    exit_unless_all_hold(found)


if __name__ == "__main__":
    main()
