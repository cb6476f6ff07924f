"""TRL's trainers over a parallel model: losses, norms and metrics of one process."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from interplay_accelerate import processes
from peft import (
    LoraConfig,
    get_peft_model,
    get_peft_model_state_dict,
    set_peft_model_state_dict,
)
from ranks import Raised, pool
from reference import Tiny, parallel, quietly
from test_accelerate import ONE, Layout
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaForSequenceClassification, PreTrainedTokenizerFast
from versions import needs_trainer

import parallel_ext as px
from parallel_ext.interplay import accelerate

pytestmark = needs_trainer

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

TINY = Tiny(layers=1)
LAYOUTS = [Layout(tp=2), Layout(dp=2, zero=2)]
CHAT = (
    "{% for m in messages %}{{ m['role'] + ' ' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + ' <e>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + ' ' }}{% endif %}{% endfor %}"
)


class SFT(px.TrainerMixin, trl.SFTTrainer):
    """TRL's trainer of a parallel model."""


class DPO(px.TrainerMixin, trl.DPOTrainer):
    """TRL's trainer of a parallel model."""


class Reward(px.TrainerMixin, trl.RewardTrainer):
    """TRL's trainer of a parallel classifier."""


KINDS = {
    "sft": (SFT, trl.SFTTrainer, trl.SFTConfig),
    "dpo": (DPO, trl.DPOTrainer, trl.DPOConfig),
    "reward": (Reward, trl.RewardTrainer, trl.RewardConfig),
}


@dataclass(frozen=True)
class Case:
    """What is trained, and how."""

    kind: str = "sft"
    rows: str = "completions"
    lora: str = ""
    own_reference: bool = True
    arguments: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        given = "" if self.own_reference else "loads its reference"
        return "-".join(filter(None, (self.kind, self.rows, self.lora, given, *self.arguments)))


CASES = [
    Case(),
    Case(rows="chats", arguments={"assistant_only_loss": True}),
    Case(rows="ids", arguments={"packing": True, "max_length": 24}),
    Case(lora="peft_config"),
    Case(lora="get_peft_model"),
    Case("dpo", "pairs"),
    Case("dpo", "pairs", own_reference=False),
    Case("dpo", "pairs", lora="peft_config"),
    Case("reward", "pairs", arguments={"center_rewards_coefficient": 0.1}),
    Case("reward", "pairs", lora="get_peft_model"),
]


def tokenizer() -> PreTrainedTokenizerFast:
    """One word for each number below the vocabulary's size."""
    words = ["<p>", "<b>", "<e>", "user", "assistant", *map(str, range(5, TINY.vocab_size))]
    inner = Tokenizer(models.WordLevel(dict(zip(words, range(len(words)), strict=True)), "<p>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<p>", "bos_token": "<b>", "eos_token": "<e>"}
    return PreTrainedTokenizerFast(tokenizer_object=inner, chat_template=CHAT, **special)


def samples(case: Case, number: int, seed: int) -> Any:
    """Rows of uneven lengths."""
    generator = torch.Generator().manual_seed(seed)

    def words(length: int) -> str:
        drawn = torch.randint(5, TINY.vocab_size, (length,), generator=generator)
        return " ".join(map(str, drawn.tolist()))

    rows: list[dict[str, Any]] = []
    for row in range(number):
        prompt, chosen, rejected = (words(2 + (row * step) % 7) for step in (1, 3, 5))
        if case.rows == "ids":
            ids = torch.randint(5, TINY.vocab_size, (9 + row % 5,), generator=generator)
            rows.append({"input_ids": ids.tolist()})
        elif case.rows == "chats":
            said = [("user", prompt), ("assistant", chosen), ("user", rejected)]
            rows.append({"messages": [{"role": a, "content": b} for a, b in said]})
        elif case.rows == "pairs":
            pair = {"chosen": " " + chosen, "rejected": " " + rejected}
            rows.append({"prompt": prompt, **pair})
        else:
            rows.append({"prompt": prompt, "completion": " " + chosen})
    return datasets.Dataset.from_list(rows)


LORA = LoraConfig(r=4, target_modules=["q_proj", "o_proj", "down_proj"])


def give_equal_factors(model: Any) -> None:
    """Give an adapter the same full factors on all layouts, none of them zero."""
    config = copy.deepcopy(LORA)
    config.init_lora_weights = False
    drawn = get_peft_model(TINY.model(), config)
    set_peft_model_state_dict(model, get_peft_model_state_dict(drawn))


def scoring_model() -> LlamaForSequenceClassification:
    """A classifier of one label, the same on every rank."""
    torch.manual_seed(1)
    config = TINY.config()
    config.num_labels = 1
    return LlamaForSequenceClassification(config).double().train()


def run(case: Case, layout: Layout, folder: Path, count_tp_ranks: bool = False) -> Any:
    """Train and evaluate; return what was logged."""
    unserved = mock.patch.object(accelerate, "_served", return_value=None)
    with processes(), unserved if count_tp_ranks else nullcontext():
        model = scoring_model() if case.kind == "reward" else TINY.model()
        reference = None
        if case.kind == "dpo" and not case.lora and case.own_reference:
            reference = copy.deepcopy(model)
        elif not case.own_reference:
            model.config._name_or_path = str(folder / "reference")
            model.save_pretrained(folder / "reference")
        if not layout.plain:
            mesh = px.init_mesh(tp=layout.tp, dp=layout.dp, timeout=60.0)
            with quietly():
                model = parallel(model, mesh)
                reference = parallel(reference, mesh) if reference is not None else None
        options: dict[str, Any] = {}
        if case.lora == "peft_config":
            options["peft_config"] = copy.deepcopy(LORA)
        elif case.lora:
            model = get_peft_model(model, copy.deepcopy(LORA))
            give_equal_factors(model)
        if layout.zero and case.lora != "peft_config":
            px.data_parallel(model, mesh, layout.zero)
        if case.kind == "dpo":
            options["ref_model"] = reference
        of_ours, of_plain, make = KINDS[case.kind]
        batch = 4 // layout.dp
        arguments = make(
            str(folder),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=2,
            max_grad_norm=0.3,
            learning_rate=1e-2,
            logging_steps=1,
            num_train_epochs=1,
            eval_strategy="epoch",
            report_to=[],
            disable_tqdm=True,
            **{
                "per_device_eval_batch_size": batch,
                "save_strategy": "no",
                **case.arguments,
            },
        )
        number = 32 if case.arguments.get("packing") else 16
        trainer = (of_plain if layout.plain else of_ours)(
            model,
            args=arguments,
            train_dataset=samples(case, number, 1),
            eval_dataset=samples(case, 8, 2),
            processing_class=tokenizer(),
            **options,
        )
        if case.lora == "peft_config":
            give_equal_factors(trainer.model)
            if layout.zero:
                px.data_parallel(trainer.model, mesh, layout.zero)
        trainer.train()
        return trainer.state.log_history


def differences(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> list[Any]:
    """What was logged otherwise, but for times and operations, which depend on the padding.

    TRL keeps its fields in fp32 where ours are those of the fp64 model.
    """
    assert len(ours) == len(theirs) == 4, "two steps, an evaluation and a summary"
    found = []
    for own, plain in zip(ours, theirs, strict=True):
        assert own.keys() == plain.keys()
        for name in plain:
            if name.endswith(("runtime", "per_second", "total_flos")):
                continue
            if name == "rewards/accuracies" and abs(plain["rewards/margins"]) < 1e-5:
                continue  # of equal rewards
            if own[name] != pytest.approx(plain[name], rel=5e-6, abs=5e-6):
                found.append((plain["epoch"], name, own[name], plain[name]))
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_training_is_that_of_one_process(case: Case, tmp_path: Path) -> None:
    plain = pool(1).run(run, case, ONE, tmp_path / "one")[0]
    for layout in LAYOUTS:
        for ours in pool(layout.world).run(run, case, layout, tmp_path / str(layout.world)):
            assert not differences(ours, plain)


def test_the_comparison_notices_tp_ranks_that_count_as_processes(tmp_path: Path) -> None:
    plain = pool(1).run(run, CASES[0], ONE, tmp_path / "one")[0]
    for ours in pool(2).run_raising(run, CASES[0], LAYOUTS[0], tmp_path / "two", True):
        assert isinstance(ours, Raised) or differences(ours, plain)


REFUSED = {
    "average_tokens_across_devices=False is not served at dp=2": Case(
        arguments={"average_tokens_across_devices": False}
    ),
    "sync_ref_model=True is not served": Case("dpo", "pairs", arguments={"sync_ref_model": True}),
    "precompute_ref_log_probs=True is not served": Case(
        "dpo", "pairs", own_reference=False, arguments={"precompute_ref_log_probs": True}
    ),
    "loss_type='sft' is not served at dp=2": Case(
        "dpo", "pairs", arguments={"loss_type": ["sigmoid", "sft"]}
    ),
    "loss_type='aot_unpaired' is not served at dp=2: TRL sorts": Case(
        "dpo", "pairs", arguments={"loss_type": "aot_unpaired"}
    ),
    "DPO: .* a multiple of 6 rows": Case(
        "dpo", "pairs", arguments={"per_device_eval_batch_size": 3}
    ),
    "Reward: .* a multiple of 6 rows": Case(
        "reward", "pairs", arguments={"per_device_eval_batch_size": 3}
    ),
}


def refuse(layout: Layout, folder: Path) -> None:
    """Check what trainers, arguments and datasets that are not served are told."""
    for words, case in REFUSED.items():
        with pytest.raises(ValueError, match=words):
            run(case, layout, folder)
    with pytest.raises(NotImplementedError, match="trl's KTOTrainer is not supported"):
        type("KTO", (px.TrainerMixin, trl.KTOTrainer), {})(TINY.model())


def test_what_is_not_served_is_refused_by_name(tmp_path: Path) -> None:
    pool(2).run(refuse, Layout(dp=2, zero=2), tmp_path)
