"""Plain HuggingFace scripts under ``px.patch`` and ``python -m parallel_ext.run``."""

from __future__ import annotations

import copy
import importlib.util
import io
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import accelerate
import peft
import pytest
import safetensors.torch
import tokenizers
import torch
import torch.distributed as dist
import transformers
from interplay_accelerate import processes
from launch import finished, run_forked
from ranks import Raised, pool
from reference import Tiny
from reference_images import tiny_model
from reference_mixtral import TinyMixtral
from torch.utils.data import DataLoader, DistributedSampler
from versions import needs_trainer

import parallel_ext as px
from parallel_ext.parallel.state import is_parallel

SCRIPT = """
import os
import sys
import accelerate
import torch
import transformers
from torch.utils.data import DataLoader, DistributedSampler

directory, out = sys.argv[1:]
for kind in ("auto", "class"):
    if kind == "auto":
        model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype="float64")
    else:
        model = transformers.LlamaForCausalLM.from_pretrained(
            directory, dtype=torch.float64, device_map=None, low_cpu_mem_usage=True, use_cache=False
        )
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ids = torch.randint(0, 101, (12, 7), generator=torch.Generator().manual_seed(3))
    sampler = DistributedSampler(ids, shuffle=False) if torch.distributed.is_initialized() else None
    size = 4 if sampler is None else 4 // sampler.num_replicas
    for batch in DataLoader(ids, size, sampler=sampler):
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        with open(f"results-{os.environ.get('RANK', 'plain')}", "a") as file:
            print(loss.item(), float(norm), file=file)
    if os.environ.get("RANK", "0") == "0":  # the other waits, or has come to its end
        model.save_pretrained(f"{out}/{kind}")
    if kind == "auto":
        accelerate.PartialState().wait_for_everyone()
"""


LAUNCHER = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
LAUNCHER += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--no-python"]
LAUNCHER += [sys.executable, "-m", "parallel_ext.run"]


def _results(path: Path) -> torch.Tensor:
    """Losses and norms that the script wrote; what two ranks print may be mixed up."""
    return torch.tensor([[float(word) for word in line.split()] for line in path.open()])


def _run(folder: Path, *command: Any) -> None:
    finished(run_forked(command, cwd=folder))


def _weights(directory: Path) -> dict[str, torch.Tensor]:
    return transformers.LlamaForCausalLM.from_pretrained(directory).state_dict()


def test_an_unchanged_script_equals_one_process(tmp_path: Path) -> None:
    """Under torchrun itself: -m would find the sources in the folder of the tests."""
    script, directory = tmp_path / "script.py", tmp_path / "model"
    script.write_text(SCRIPT)
    Tiny(dtype=torch.float32).model().save_pretrained(directory)
    _run(tmp_path, sys.executable, script, directory, "one")
    plain = _results(tmp_path / "results-plain")
    assert len(plain) == 6
    command = [*LAUNCHER, "--tp=2", str(script), str(directory), "two"]
    real = {"capture_output": True, "text": True, "timeout": 240}
    finished(subprocess.run(command, cwd=tmp_path, **real))
    for rank in (0, 1):
        found = _results(tmp_path / f"results-{rank}")
        torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-6)
    for kind in ("auto", "class"):
        saved, files = (_weights(tmp_path / name / kind) for name in ("two", "one"))
        torch.testing.assert_close(saved, files, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("before", [[], ["--"]])
def test_a_script_has_its_own_arguments(tmp_path: Path, before: list[str]) -> None:
    (tmp_path / "script.py").write_text("import sys\nprint('argv', *sys.argv)")
    command = [sys.executable, "-m", "parallel_ext.run", *before, "script.py", "--", "a", "--tp=3"]
    printed = finished(run_forked(command, cwd=tmp_path))
    assert "argv script.py -- a --tp=3" in printed


@pytest.mark.parametrize(("given", "seconds"), [([], 1800.0), (["--timeout", "90"], 90.0)])
def test_ranks_wait_as_long_as_those_of_huggingface(
    tmp_path: Path, given: list[str], seconds: float
) -> None:
    """For example where rank 0 tokenizes and the others wait at a barrier."""
    assert transformers.TrainingArguments(str(tmp_path)).ddp_timeout == 1800
    (tmp_path / "script.py").write_text(
        "from parallel_ext.distributed.mesh import Mesh\nprint('waits', Mesh.last.timeout)"
    )
    command = [sys.executable, "-m", "parallel_ext.run", *given, "script.py"]
    assert f"waits {seconds}" in finished(run_forked(command, cwd=tmp_path))


TRAINED = """
import sys
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

directory, out, rows = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(directory)
ids = torch.randint(0, 101, (12, 7), generator=torch.Generator().manual_seed(3))


class OwnTrainer(Trainer):
    def log(self, logs, *args):
        super().log({**logs, "own": 1.0}, *args)

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        return super().compute_loss(model, inputs, return_outputs, **kwargs)


arguments = TrainingArguments(
    out, per_device_train_batch_size=int(rows), max_grad_norm=0.3, logging_steps=1, max_steps=3,
    per_device_eval_batch_size=int(rows), eval_steps=2, eval_strategy="steps", save_steps=3,
    report_to=[], disable_tqdm=True,
)
data = [{"input_ids": row, "labels": row} for row in ids]
trainer = OwnTrainer(model, arguments, train_dataset=data, eval_dataset=data[:5])
trainer.evaluate()
trainer.train()
trainer.save_model()
"""


def _logged(out: Path) -> list[dict[str, float]]:
    history = json.loads((out / "checkpoint-3" / "trainer_state.json").read_text())["log_history"]
    timed = ("runtime", "per_second", "preparation")
    return [{k: v for k, v in e.items() if not any(t in k for t in timed)} for e in history]


OF_SEQUENCES = {
    "import AutoModelForCausalLM, Trainer, TrainingArguments": (
        "import AutoModelForCausalLM, Seq2SeqTrainer as Trainer\n"
        "from transformers import Seq2SeqTrainingArguments as TrainingArguments"
    ),
    "report_to=[]": "report_to=[], predict_with_generate=True, generation_max_length=9",
    "eval_dataset=data[:5]": (
        "eval_dataset=data[:5], "
        "compute_metrics=lambda found: {'ids': float(found.predictions.sum())}"
    ),
    "ids =": "model.generation_config.pad_token_id = model.config.pad_token_id = 0\nids =",
}


def _logs_of_both(folder: Path, text: str, tp: int) -> list[list[dict[str, float]]]:
    """What a script logs in one process, and on two ranks; it is given model, output and rows."""
    script, directory = folder / "script.py", folder / "model"
    script.write_text(text)
    _run(folder, sys.executable, script, directory, folder / "one", 4)
    _run(folder, *LAUNCHER, f"--tp={tp}", script, directory, folder / "two", 2 * tp)
    return [_logged(folder / out) for out in ("one", "two")]


def _changed(text: str, changes: dict[str, str]) -> str:
    for part, another in changes.items():
        assert part in text
        text = text.replace(part, another)
    return text


@needs_trainer
def test_a_seq2seq_trainer_is_refused_on_dp_ranks(tmp_path: Path) -> None:
    script, directory = tmp_path / "script.py", tmp_path / "model"
    script.write_text(_changed(TRAINED, OF_SEQUENCES))
    Tiny(dtype=torch.float32).model().save_pretrained(directory)
    command = [*LAUNCHER, "--tp=1", script, directory, tmp_path / "out", 2]
    done = run_forked(command, cwd=tmp_path)
    assert "OwnTrainer: transformers' Seq2SeqTrainer is not supported at dp=2" in done.stderr


@needs_trainer
@pytest.mark.parametrize(
    ("tp", "changes"),
    [(1, {}), (2, {}), (2, OF_SEQUENCES)],
    ids=["dp=2", "tp=2", "tp=2, Seq2SeqTrainer"],
)
def test_an_unchanged_script_with_a_trainer_equals_one_process(
    tmp_path: Path, tp: int, changes: dict[str, str]
) -> None:
    Tiny(dtype=torch.float32).model().save_pretrained(tmp_path / "model")
    plain, found = _logs_of_both(tmp_path, _changed(TRAINED, changes), tp)
    assert len(found) == len(plain) == 5
    for entry, of_plain in zip(found, plain, strict=True):
        assert entry["own"] == 1.0
        assert ("eval_ids" in entry) == ("eval_loss" in entry and bool(changes))
        assert entry == pytest.approx(of_plain, rel=1e-5)
    files, saved = _weights(tmp_path / "one"), _weights(tmp_path / "two")
    torch.testing.assert_close(saved, files, rtol=1e-4, atol=1e-5)


def _with_tokenizer(directory: Path) -> None:
    """Save a small model with the tokenizer of words that are numbers."""
    tiny = Tiny(dtype=torch.float32)
    tiny.model().save_pretrained(directory)
    words = {
        "<pad>": 0,
        "<end>": 1,
        **{str(number): number for number in range(2, tiny.vocab_size)},
    }
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    options = {"pad_token": "<pad>", "eos_token": "<end>", "tokenizer_object": tokenizer}
    transformers.PreTrainedTokenizerFast(**options).save_pretrained(directory)


def _pairs(folder: Path) -> None:
    """Write rows of unequal lengths, as TRL's scripts read them."""
    numbers = random.Random(3)

    def words() -> str:
        return " ".join(str(numbers.randrange(2, 101)) for _ in range(numbers.randrange(2, 9)))

    folder.mkdir()
    for split, rows in (("train", 12), ("test", 4)):
        lines = [
            json.dumps({"prompt": f"{words()} ", "chosen": words(), "rejected": words()})
            for _ in range(rows)
        ]
        if folder.name == "sft":
            lines = [line.replace("chosen", "completion") for line in lines]
        (folder / f"{split}.jsonl").write_text("\n".join(lines))


def test_a_script_without_a_parallel_model_is_named(tmp_path: Path) -> None:
    """Such as a command that starts new processes; that of accelerate is refused."""
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit(0)")
    for code, *command in (
        (0, str(script)),
        (1, str(Path(sys.executable).with_name("accelerate")), "launch", "--cpu", str(script)),
    ):
        done = run_forked([*LAUNCHER, "--tp=2", *command], cwd=tmp_path)
        assert done.returncode == code, done.stderr
        assert done.stderr.count("no model has become parallel") == (code == 0)
    assert f"run it by torchrun -m parallel_ext.run {script}" in done.stderr


@needs_trainer
@pytest.mark.parametrize(("name", "tp"), [("sft", 1), ("dpo", 1), ("dpo", 2), ("reward", 1)])
def test_scripts_of_trl_equal_one_process_as_they_are(name: str, tp: int, tmp_path: Path) -> None:
    script = importlib.util.find_spec(f"trl.scripts.{name}").origin
    _with_tokenizer(tmp_path / "model")
    _pairs(tmp_path / name)
    given = {
        **{"model_name_or_path": tmp_path / "model", "dataset_name": tmp_path / name},
        **{"dtype": "float32", "bf16": False, "use_cpu": True, "learning_rate": 1e-3},
        **{"max_steps": 3, "save_steps": 3, "logging_steps": 1, "max_length": 32},
        **{"eval_strategy": "steps", "eval_steps": 2, "report_to": "none", "disable_tqdm": True},
    }
    for out, launcher, rows in (
        ("one", [sys.executable], 4),
        ("two", [*LAUNCHER, f"--tp={tp}"], 2 * tp),
    ):
        own = {"output_dir": tmp_path / out, "per_device_train_batch_size": rows}
        own["per_device_eval_batch_size"] = rows
        options = [f"--{key}={value}" for key, value in {**given, **own}.items()]
        _run(tmp_path, *launcher, script, *options)
    plain, found = _logged(tmp_path / "one"), _logged(tmp_path / "two")
    assert len(found) == len(plain) == 5
    for entry, of_plain in zip(found, plain, strict=True):
        assert entry == pytest.approx(of_plain, rel=1e-4, abs=1e-5)


AFTERWARDS = """
import sys
import datasets
import transformers

directory, out, rows = sys.argv[1:]
model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype="float32")
assert "trl.trainer.utils" not in sys.modules
import trl

data = [{"input_ids": list(range(3 + row, 10 + 2 * row))} for row in range(12)]
args = trl.SFTConfig(
    out,
    max_steps=3,
    logging_steps=1,
    save_steps=3,
    per_device_train_batch_size=int(rows),
    use_cpu=True,
    bf16=False,
    report_to="none",
    disable_tqdm=True,
)
tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
data = datasets.Dataset.from_list(data)
trl.SFTTrainer(model, args, train_dataset=data, processing_class=tokenizer).train()
"""


@needs_trainer
def test_a_trl_that_is_imported_after_the_model_was_loaded_equals_one_process(
    tmp_path: Path,
) -> None:
    """As ``import trl`` at the top of a script does, which imports the rest when it is used."""
    _with_tokenizer(tmp_path / "model")
    plain, found = _logs_of_both(tmp_path, AFTERWARDS, 2)
    assert len(found) == len(plain) == 3
    for entry, of_plain in zip(found, plain, strict=True):
        assert entry == pytest.approx(of_plain, rel=1e-4)


def _step(
    optimizer: torch.optim.Optimizer, loss: torch.Tensor, clipped: Any, most: float
) -> list[float]:
    """Train one step; return the loss, and the norm of some gradients, clipped to ``most``."""
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(clipped, most)
    optimizer.step()
    optimizer.zero_grad()
    return [loss.item(), float(norm)]


def _batches(lowest_id: int, tp: int | None) -> DataLoader:
    """Three batches of four rows, which the dp ranks share."""
    ids = torch.randint(lowest_id, 101, (12, 7), generator=torch.Generator().manual_seed(3))
    sampler = None if tp is None else DistributedSampler(ids, shuffle=False)
    return DataLoader(ids, 4 if tp is None else 4 * tp // dist.get_world_size(), sampler=sampler)


@pytest.fixture
def directory(tmp_path: Path) -> str:
    """Hold a small model in fp32."""
    Tiny(dtype=torch.float32).model().save_pretrained(tmp_path)
    return str(tmp_path)


@contextmanager
def _patched(tp: int | None, **options: Any) -> Iterator[None]:
    """Inside, ``px.patch`` is in force where there is a ``tp``; without one nothing is."""
    if tp is not None:
        px.patch(tp=tp, **options)
    try:
        yield
    finally:
        px.unpatch()


def _loaded_or_made(directory: str, loaded: bool) -> Any:
    """Return a model that a script loads from a directory, or makes itself."""
    if loaded:
        return transformers.LlamaForCausalLM.from_pretrained(directory, dtype=torch.float64)
    return _made("class")


def _train(directory: str, lora: bool, tp: int | None) -> list[list[float]]:
    """Losses and norms of three steps; under ``px.patch`` where there is a ``tp``."""
    with _patched(tp):
        assert tp is None or px.patch(tp=tp) is px.patch(tp=tp)
        model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)
        if lora:
            config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
            model = peft.get_peft_model(model, config)
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.data.fill_(0.02)
        model.train()
        optimizer = torch.optim.SGD([{"params": p} for p in model.parameters()], lr=0.1)
        results = []
        for batch in _batches(0, tp):
            loss = model(input_ids=batch, labels=batch).loss
            results.append(_step(optimizer, loss, model.parameters(), 1.0))
        return results


WITH_ACCELERATE = """
import os
import sys
import torch
import transformers
from accelerate import Accelerator
from torch.utils.data import DataLoader

directory, rows, first = sys.argv[1:]
accelerator = Accelerator()
transformers.set_seed(5)
if first == "loaded model":
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)
else:
    config = transformers.AutoConfig.from_pretrained(directory)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64)
if first != "optimizer":
    model = accelerator.prepare(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
assert accelerator.is_main_process == (os.environ.get("RANK", "0") == "0")
assert accelerator.process_index < accelerator.num_processes == 4 // int(rows)
ids = torch.randint(0, 101, (12, 7), generator=torch.Generator().manual_seed(3))
loader = DataLoader(ids, int(rows), shuffle=True)
scheduler = transformers.get_scheduler(
    "linear",
    optimizer,
    num_warmup_steps=1 * accelerator.num_processes,
    num_training_steps=6 * accelerator.num_processes,
)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
steps = []
for _ in range(2):
    for batch in loader:
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        steps.append([accelerator.reduce(loss.detach(), "mean").item(), float(norm)])
        steps[-1].append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
with open(f"results-{os.environ.get('RANK', 'plain')}", "w") as file:
    for step in steps:
        print(*step, file=file)
"""


@pytest.mark.parametrize(
    ("tp", "first"), [(1, "optimizer"), (2, "loaded model"), (1, "new model"), (2, "new model")]
)
def test_a_script_with_an_accelerator_equals_one_process(
    tmp_path: Path, tp: int, first: str
) -> None:
    """Losses, norms and learning rates, of shuffled rows and a schedule of all processes.

    Args:
        tmp_path: for script and model.
        tp: of two ranks.
        first: what is made, or prepared, first.
    """
    script, directory = tmp_path / "script.py", tmp_path / "model"
    script.write_text(WITH_ACCELERATE)
    Tiny(dtype=torch.float32).model().save_pretrained(directory)
    _run(tmp_path, sys.executable, script, directory, 4, first)
    plain = _results(tmp_path / "results-plain")
    assert len(plain) == 6
    _run(tmp_path, *LAUNCHER, f"--tp={tp}", script, directory, 2 * tp, first)
    for rank in (0, 1):
        found = _results(tmp_path / f"results-{rank}")
        torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-6)


MADE = {
    "from_config": transformers.AutoModelForCausalLM.from_config,
    "class": transformers.LlamaForCausalLM,
    "classifier": transformers.AutoModelForSequenceClassification.from_config,
    "adapter": transformers.AutoModelForSequenceClassification.from_config,
    "PEFT's class": transformers.AutoModelForSequenceClassification.from_config,
    "injected": transformers.LlamaForCausalLM,
    "copy": lambda config: copy.deepcopy(transformers.LlamaForCausalLM(config)),
}


ADDED = {
    "adapter": lambda config, model: peft.get_peft_model(model, config),
    "PEFT's class": lambda config, model: peft.PeftModel(model, config),
    "injected": peft.inject_adapter_in_model,
}


def _made(kind: str) -> Any:
    """Return a model that a script makes itself, from scratch."""
    torch.manual_seed(1)
    model = MADE[kind](Tiny().config()).double().train()
    if kind in ADDED:
        model = ADDED[kind](peft.LoraConfig(r=4, target_modules=["q_proj"]), model)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data.fill_(0.02)
    return model


def _train_made(directory: str, kind: str, tp: int | None) -> list[list[float]]:
    """Losses and norms of three steps of a model that is plain until it has an optimizer."""
    with _patched(tp):
        model = _made(kind)
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()  # a second time, as scripts do
        whole = sum(p.numel() for p in MADE[kind](Tiny().config()).parameters())
        decayed = [p for p in model.parameters() if p.dim() > 1]
        groups = [{"params": decayed, "weight_decay": 0.5}]
        groups += [{"params": [p for p in model.parameters() if p.dim() == 1]}]
        optimizer = torch.optim.SGD(groups, lr=0.1)
        results = []
        for batch in _batches(3, tp):
            classifies = MADE[kind] == MADE["classifier"]
            labels = batch[:, 0] % 2 if classifies else batch
            loss = model(input_ids=batch, labels=labels).loss
            results.append(_step(optimizer, loss, model.parameters(), 1.0))
        if tp is not None:  # each rank has its part
            local = [getattr(p, "to_local", lambda p=p: p)() for p in model.parameters()]
            assert sum(p.numel() for p in local) < 0.7 * whole
        return results


def _train_with_a_list(directory: str, kind: str, tp: int | None) -> list[list[float]]:
    """Losses and norms, where a list that is older than the optimizer is clipped."""
    with _patched(tp):
        model = _made(kind)
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(parameters[:-1], lr=0.1)
        optimizer.add_param_group({"params": parameters[-1]})
        results = []
        for batch in _batches(3, tp):
            loss = model(input_ids=batch, labels=batch).loss
            results.append(_step(optimizer, loss, parameters, 0.1))
        return results


def _train_head_then_body(directory: str, loaded: bool, tp: int | None) -> list[list[float]]:
    """Losses and norms, where parts that are older than the optimizer are frozen in turn."""
    with _patched(tp):
        model = _loaded_or_made(directory, loaded)
        head, body = model.lm_head, list(model.model.parameters())
        optimizer = torch.optim.SGD([{"params": body}, {"params": head.parameters()}], lr=0.1)
        results = []
        for step, batch in enumerate(_batches(3, tp)):
            head.requires_grad_(step > 0)
            for each in body:
                each.requires_grad_(step == 0)
            assert [each.requires_grad for each in (*body[:2], head.weight)] == [
                *[step == 0] * 2,
                step > 0,
            ]
            model(input_ids=batch, labels=batch).loss.backward()
            for each in body[:2]:  # a gradient of one's own is as good
                each.grad = None if each.grad is None else each.grad * 2
            loss = model(input_ids=batch, labels=batch).loss
            results.append(_step(optimizer, loss, model.parameters(), 1.0))
        return results


def _train_in_ddp(directory: str, kind: str, tp: int | None) -> list[list[float]]:
    """Losses and norms of three steps of two backwards each, in DistributedDataParallel."""
    with _patched(tp):
        model = _made(kind)
        if tp is not None:
            model = torch.nn.parallel.DistributedDataParallel(model)
            assert isinstance(model, torch.nn.parallel.DistributedDataParallel)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        results = []
        for batch in _batches(3, tp):
            labels = batch if kind == "class" else batch[:, 0] % 2
            with nullcontext() if tp is None else model.no_sync():
                model(input_ids=batch, labels=labels).loss.backward()
            loss = model(input_ids=batch.flip(1), labels=labels).loss
            results.append(_step(optimizer, loss, model.parameters(), 1.0))
        if tp is not None:
            with pytest.raises(NotImplementedError, match=r"knows neither join\(\) nor hooks"):
                model.join()
        return results


@pytest.mark.parametrize(
    ("loop", "how", "size", "tp"),
    [
        *((_train, False, 2, 1), (_train, True, 4, 2)),
        *((_train_made, "from_config", 2, 2), (_train_made, "class", 2, 1)),
        *((_train_made, "classifier", 4, 2), (_train_made, "adapter", 2, 1)),
        *((_train_made, "PEFT's class", 2, 2), (_train_made, "injected", 4, 2)),
        *((_train_made, "copy", 4, 2), (_train_with_a_list, "class", 4, 2)),
        *((_train_head_then_body, True, 4, 2), (_train_head_then_body, False, 2, 1)),
        *((_train_in_ddp, "class", 2, 1), (_train_in_ddp, "class", 2, 2)),
        (_train_in_ddp, "adapter", 4, 2),
    ],
)
def test_a_loop_equals_one_process(directory: str, loop: Any, how: Any, size: int, tp: int) -> None:
    """In losses and norms; the loss of a dp rank is its share."""
    found = torch.tensor(pool(size).run(loop, directory, how, tp))
    found[:, :, 0] = found[:, :, 0].mean(0)
    plain = torch.tensor(loop(directory, how, None))
    for of_rank in found:
        torch.testing.assert_close(of_rank, plain, rtol=1e-6, atol=1e-8)


class _OwnDDP(torch.nn.parallel.DistributedDataParallel):
    """A class of a user's own, which asks the model for what it has not itself."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.module, name)


def _copied_on_rank_0(directory: str, loaded: bool, tp: int) -> list[float]:
    """The loss of a model of which rank 0 alone has made a copy before the optimizer."""
    with _patched(tp):
        model = _loaded_or_made(directory, loaded)
        best = copy.deepcopy(model) if dist.get_rank() == 0 else None
        ids = torch.arange(8).view(2, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        del best
        wrapped = _OwnDDP(model)
        assert wrapped.config is model.config
        assert tp == 1 or copy.deepcopy(wrapped).module is not model
        return [loss.item()]


@pytest.mark.parametrize(("tp", "loaded"), [(1, True), (1, False), (2, False)])
def test_a_copy_may_be_one_ranks_own(directory: str, tp: int, loaded: bool) -> None:
    losses = pool(2).run(_copied_on_rank_0, directory, loaded, tp)
    assert losses[0] == pytest.approx(losses[1])


def _saved_behind_a_copy_on_rank_0(source: str, out: str) -> None:
    with _patched(2):
        model = transformers.LlamaForCausalLM.from_pretrained(source)
        best = copy.deepcopy(model) if dist.get_rank() == 0 else None
        first, second = (transformers.LlamaForCausalLM.from_pretrained(source) for _ in range(2))
        with torch.no_grad():
            second.lm_head.weight.zero_()
        if dist.get_rank() == 0:
            first.save_pretrained(out)
        dist.barrier()
        del best


def test_behind_a_copy_on_one_rank_the_others_join_the_save_of_the_same_model(
    directory: str, tmp_path: Path
) -> None:
    pool(2).run(_saved_behind_a_copy_on_rank_0, directory, str(tmp_path / "out"), timeout_s=60.0)
    torch.testing.assert_close(_weights(tmp_path / "out"), _weights(Path(directory)))


def _other_weights_on_rank_0(source: str) -> None:
    with _patched(1):
        model = transformers.LlamaForCausalLM.from_pretrained(source)
        model.lm_head.weight.data.mul_(1 + dist.get_rank())
        torch.nn.parallel.DistributedDataParallel(model)


def test_dp_ranks_with_other_weights_are_refused(directory: str) -> None:
    words = ("lm_head.weight differs between ranks 0 and 1",)
    pool(2).assert_raises(_other_weights_on_rank_0, directory, words=words)


def _averaged(directory: str, loaded: bool, how: str, tp: int | None) -> dict[str, torch.Tensor]:
    """Weights of an average that is older than the optimizer, after three steps."""
    with _patched(tp):
        model = _loaded_or_made(directory, loaded)
        if how == "AveragedModel":
            swa = torch.optim.swa_utils
            average = swa.AveragedModel(model, multi_avg_fn=swa.get_ema_multi_avg_fn(0.5))
        else:
            average = copy.deepcopy(copy.deepcopy(model)).requires_grad_(how == "copy")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in _batches(3, tp):
            _step(optimizer, model(input_ids=batch, labels=batch).loss, model.parameters(), 1.0)
            if how == "AveragedModel":
                average.update_parameters(model)
                continue
            with torch.no_grad():
                for ours, new in zip(average.parameters(), model.parameters(), strict=True):
                    ours.mul_(0.5).add_(new, alpha=0.5)
        average = getattr(average, "module", average)
        average(input_ids=batch, labels=batch)
        return average.state_dict() if tp is None else px.full_state_dict(average)


@pytest.mark.parametrize(
    ("how", "loaded", "size", "tp"),
    [
        *(("AveragedModel", False, 2, 1), ("AveragedModel", True, 2, 2)),
        *(("copy", False, 4, 2), ("frozen copy", True, 2, 1)),
    ],
)
def test_an_average_may_be_older_than_the_optimizer(
    directory: str, how: str, loaded: bool, size: int, tp: int
) -> None:
    found, *_ = pool(size).run(_averaged, directory, loaded, how, tp)
    plain = _averaged(directory, loaded, how, None)
    torch.testing.assert_close(found, plain, rtol=1e-6, atol=1e-8)


class _Smoothed(transformers.LlamaForCausalLM):
    """A class whose loss is its own."""

    def forward(self, input_ids: Any = None, labels: Any = None, **options: Any) -> Any:
        output = super().forward(input_ids=input_ids, **options)
        if labels is not None:
            flat = output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
            output.loss = torch.nn.functional.cross_entropy(*flat, label_smoothing=0.3)
        return output


def _hold_parts() -> list[str]:
    """What is said to parts of a model that were taken before its optimizer was made."""
    with _patched(2):
        torch.manual_seed(1)
        model = _Smoothed(Tiny().config()).double().train()
        embedding, head, ids = (
            model.model.embed_tokens,
            model.lm_head.weight,
            torch.tensor([[5, 6]]),
        )
        older = head.pow(2).sum()
        torch.optim.SGD(model.parameters(), lr=0.1)
        other = torch.optim.SGD([head], lr=0.1)
        assert other.param_groups[0]["params"][0] is model.lm_head.weight
        assert repr(head) == "<lm_head.weight, which has been replaced>"
        assert head.shape == (101, 8 * Tiny().heads)
        found = []
        for call in (
            lambda: embedding(ids),
            lambda: head.pow(2).sum().backward(),
            lambda: torch.stack([head]),
            older.backward,
        ):
            with pytest.raises(RuntimeError) as raised:
                call()
            found.append(str(raised.value))
        logits = model(input_ids=ids).logits
        assert logits.shape == (1, 2, 101)
        expected = torch.nn.functional.cross_entropy(logits[:, 0], ids[:, 1], label_smoothing=0.3)
        assert model(input_ids=ids, labels=ids).loss == expected
        return found


def test_parts_that_are_older_than_the_optimizer_are_refused() -> None:
    for found in pool(2).run(_hold_parts):
        assert "this Embedding was built before px.parallelize and still holds" in found[0]
        for text in found[1:3]:
            assert "this lm_head.weight was built before px.parallelize; take it from" in text
        assert "a gradient reaches lm_head.weight as it was before px.parallelize" in found[3]


def _refused_at_its_optimizer() -> list[str]:
    """What models are told that an optimizer cannot make parallel."""
    found: list[str] = []

    def expect(error: type[Exception], function: Any, *args: Any) -> None:
        with pytest.raises(error) as raised:
            function(*args)
        found.append(str(raised.value))

    def optimizer(model: Any) -> Any:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    with _patched(1, plain=["LlamaForSequenceClassification"]):
        expect(RuntimeError, optimizer, _made("classifier"))
        model = _made("class")
        model.lm_head.weight.data.add_(dist.get_rank())
        expect(px.DisagreementError, optimizer, model)
        model = _made("class")
        model(input_ids=torch.tensor([[5, 6]]), labels=torch.tensor([[5, 6]])).loss.backward()
        expect(RuntimeError, optimizer, model)
        inside = torch.nn.ModuleList([_made("class"), torch.nn.Linear(2, 2)])
        inside[1].bias.data.fill_(dist.get_rank())
        expect(px.DisagreementError, torch.nn.parallel.DistributedDataParallel, inside)
        model, teacher = _made("class"), _made("class")
        teacher.model.embed_tokens.weight = model.model.embed_tokens.weight
        expect(RuntimeError, optimizer, model)
        gpt2 = transformers.GPT2Config(vocab_size=9, n_embd=4, n_layer=1, n_head=1)
        expect(ValueError, optimizer, transformers.GPT2LMHeadModel(gpt2))
        compiled = _made("class")
        compiled.model.layers[0] = torch.compile(compiled.model.layers[0])
        expect(ValueError, optimizer, compiled)
        model, hooked = _made("class"), _made("class")
        hooked.lm_head.register_forward_hook(lambda *_: None)
        expect(ValueError, optimizer, model)
        before = _made("class")
    optimizer(before)
    assert "parallel_ext_local_shards" not in dict(before.named_children())
    return found


def test_what_cannot_become_parallel_is_named_at_its_optimizer() -> None:
    for found in pool(2).run(_refused_at_its_optimizer):
        assert "SGD gets parameters of no parallel model" in found[0]
        assert "lm_head.weight" in found[1]
        assert "or seed equally, on every rank" in found[1]
        assert "has a gradient, which would be lost; make the optimizer before" in found[2]
        assert "1.bias differs between ranks 0 and 1" in found[3]
        assert "SGD gets model.embed_tokens.weight, which two models hold" in found[4]
        assert "no spec for model_type 'gpt2' (GPT2LMHeadModel)" in found[5]
        assert "model.layers.0 was compiled by torch.compile before" in found[6]
        assert "a LlamaForCausalLM, of which there is a copy that cannot become" in found[7]


def _saved_on_rank_0(directory: str, tp: int, lora: bool) -> list[float]:
    """Train, and save under the idioms of scripts; return the loss of each saved directory."""
    with _patched(tp):
        model = transformers.AutoModelForCausalLM.from_pretrained(directory)
        if lora:
            model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
        first = dist.get_rank() == 0
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
        ids = torch.randint(0, 101, (4, 7), generator=torch.Generator().manual_seed(3))
        losses = []
        for step in range(3):
            with torch.no_grad():
                losses.append(model.eval()(input_ids=ids, labels=ids).loss.item())
            if first:
                model.save_pretrained(f"{directory}/{step}")
            if step == 2 and tp > 1:  # all dp ranks of a plain generate go their own ways
                model.generate(input_ids=ids, max_new_tokens=2, do_sample=False)
            model.train()(input_ids=ids, labels=ids).loss.backward()
            if first and step == 1:
                model.save_pretrained(f"{directory}/before-the-norm")
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if first:
            end = os.path.relpath(Path(directory, "end"))  # which the others complete
            model.save_pretrained(end, is_main_process=first)
        dist.barrier()
        return losses


@pytest.mark.parametrize(("size", "tp", "lora"), [(2, 1, False), (4, 2, False), (4, 2, True)])
def test_a_save_on_rank_0_alone_is_joined_by_the_others(
    directory: str, size: int, tp: int, lora: bool
) -> None:
    losses = torch.tensor(pool(size).run(_saved_on_rank_0, directory, tp, lora)).mean(0)
    ids = torch.randint(0, 101, (4, 7), generator=torch.Generator().manual_seed(3))
    assert (Path(directory) / "before-the-norm").is_dir()
    assert (Path(directory) / "end").is_dir()
    for step, loss in enumerate(losses):
        folder = directory if lora else Path(directory) / str(step)
        model = transformers.LlamaForCausalLM.from_pretrained(folder)
        if lora:
            model = peft.PeftModel.from_pretrained(model, Path(directory) / str(step))
        torch.testing.assert_close(model(input_ids=ids, labels=ids).loss, loss)


def _saved_before_an_evaluation(directory: str) -> float:
    """The loss of dp ranks whose forward communicates, where rank 0 saves before."""
    torch.manual_seed(1)
    model = transformers.LlamaForSequenceClassification(Tiny(dtype=torch.float32).config()).eval()
    model = px.parallelize(model, px.patch())
    ids = torch.tensor([[5, 6, 7], [8, 9, 10]])
    model.config.pad_token_id = 0
    try:
        if dist.get_rank() == 0:
            model.save_pretrained(directory)
        with torch.no_grad():
            return model(input_ids=ids, labels=torch.tensor([0, 1])).loss.item()
    finally:
        px.unpatch()


def test_a_save_is_joined_where_a_classifier_is_evaluated(tmp_path: Path) -> None:
    first, second = pool(2).run(_saved_before_an_evaluation, str(tmp_path), timeout_s=60.0)
    assert first == second
    assert (tmp_path / "config.json").is_file()


class _SignSGD(torch.optim.Optimizer):
    """An optimizer of a user's own, which looks at single elements."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad.sign(), alpha=group["lr"])


def _step_of_own(directory: str) -> bool:
    with _patched(2):
        model = transformers.AutoModelForCausalLM.from_pretrained(directory)
        optimizer = _SignSGD(model.parameters())
        before = model.lm_head.weight.detach().clone()
        ids = torch.tensor([[5, 6, 7]])
        model.train()(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        return torch.equal(before, model.lm_head.weight)


def test_an_optimizer_of_ones_own_steps_on_shards(directory: str) -> None:
    assert pool(2).run(_step_of_own, directory) == [False, False]


def _generate_on_rank_0(directory: str) -> None:
    with _patched(2):
        model = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()
        if dist.get_rank() == 0:
            model.generate(input_ids=torch.tensor([[5, 6]]), max_new_tokens=1)
        dist.barrier()


def test_ranks_at_other_places_are_told_at_once(directory: str) -> None:
    words = ("rank 0: LlamaForCausalLM.generate; rank 1: barrier", "call it on every rank")
    pool(2).assert_raises(_generate_on_rank_0, directory, words=words)


class _SaveOnFirst(transformers.TrainerCallback):
    """Saves where a step has ended, on one rank."""

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.is_world_process_zero:
            given["model"].save_pretrained(f"{args.output_dir}/{state.global_step}")


def _trained_with_a_callback(directory: str, tp: int) -> None:
    with _patched(tp), processes():
        model = transformers.AutoModelForCausalLM.from_pretrained(directory)
        ids = torch.randint(0, 101, (4, 7), generator=torch.Generator().manual_seed(3))
        arguments = transformers.TrainingArguments(
            directory, use_cpu=True, report_to=[], max_steps=2, logging_steps=1,
            save_strategy="no", disable_tqdm=True, per_device_train_batch_size=1,
        )  # fmt: skip
        data = [{"input_ids": row, "labels": row} for row in ids]
        trainer = transformers.Trainer(
            model, arguments, train_dataset=data, callbacks=[_SaveOnFirst()]
        )
        trainer.train()


@needs_trainer
@pytest.mark.parametrize("tp", [1, 2])
def test_a_callback_saves_on_rank_0(tp: int, directory: str) -> None:
    pool(2).run(_trained_with_a_callback, directory, tp, timeout_s=60)
    assert all((Path(directory) / step / "config.json").exists() for step in ("1", "2"))


def _saved_before_metrics(directory: str) -> list[int]:
    with _patched(2), processes():
        accelerator = accelerate.Accelerator(cpu=True)
        model = transformers.AutoModelForCausalLM.from_pretrained(directory)
        model = accelerator.prepare_model(model, evaluation_mode=True)
        if dist.get_rank() == 0:
            model.save_pretrained(f"{directory}/saved")
        return accelerator.gather(torch.tensor([dist.get_rank()])).tolist()


def test_a_save_is_joined_where_others_gather_metrics(directory: str) -> None:
    assert pool(2).run(_saved_before_metrics, directory) == [[0], [0]]
    assert (Path(directory) / "saved" / "config.json").exists()


def _saved_at_each_place(directory: str) -> None:
    """Rank 0 saves before each call that all ranks make."""
    ids, config = torch.arange(12).view(2, 6), {"r": 2, "target_modules": ["q_proj"]}
    with _patched(2), processes():
        # grouped products, which one process takes by default, want wider experts
        eager = {"experts_implementation": "eager"}
        model = transformers.AutoModelForCausalLM.from_pretrained(directory, **eager)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        accelerator = accelerate.Accelerator(cpu=True)
        accelerator.prepare(model, optimizer)
        with px.RoutingMetrics(model) as metrics:
            model.train()(input_ids=ids, labels=ids).loss.backward()
            root, states = f"{directory}/root", f"{directory}/states"
            for number, call in enumerate(
                (
                    lambda: metrics.step(0),
                    lambda: px.stop_requested(model),
                    lambda: px.full_state_dict(model),
                    lambda: accelerator.get_state_dict(model),
                    lambda: px.save_checkpoint(root, 1, model, asynchronous=True),
                    lambda: px.wait_for_checkpoint(model),
                    lambda: px.load_checkpoint(root, model),
                    lambda: accelerator.save_state(states),
                    lambda: accelerator.load_state(states),
                    lambda: px.check_gradients(model, {"input_ids": ids, "labels": ids}),
                    optimizer.zero_grad,
                    lambda: model.resize_token_embeddings(model.config.vocab_size + 3),
                )
            ):
                if dist.get_rank() == 0:
                    model.save_pretrained(f"{directory}/{number}")
                call()
        adapted = peft.get_peft_model(model, peft.LoraConfig(**config))
        adapted.save_pretrained(f"{directory}/adapter")
        for name, call in {
            "loads": lambda: adapted.load_adapter(f"{directory}/adapter", "second"),
            "merges": adapted.merge_adapter,
            "ends": adapted.merge_and_unload,
        }.items():
            if dist.get_rank() == 0:
                adapted.save_pretrained(f"{directory}/{name}")
            call()


def test_a_save_is_joined_at_each_place_of_all_ranks(tmp_path: Path) -> None:
    tiny = TinyMixtral(num_experts=4, layers=1, dtype=torch.float32)
    tiny.model().save_pretrained(tmp_path)
    pool(2).run(_saved_at_each_place, str(tmp_path), timeout_s=100.0)
    assert all((tmp_path / str(number) / "config.json").exists() for number in range(12))
    for name in ("loads", "merges", "ends"):
        assert (tmp_path / name / "adapter_config.json").exists()


def _saves_a_copy(directory: str) -> None:
    with _patched(2):
        model = transformers.AutoModelForCausalLM.from_pretrained(directory)
        if dist.get_rank() == 0:
            copy.deepcopy(model).save_pretrained(directory + "/out")
        dist.barrier()


def test_a_save_that_others_cannot_join_raises_at_once(directory: str) -> None:
    pool(2).assert_raises(
        _saves_a_copy,
        directory,
        timeout_s=60.0,
        error="NotImplementedError",
        words=("only rank 0 called it", "call it on every rank"),
    )


def _files_of_shards(directory: str, tp: int) -> list[Any]:
    with _patched(tp):
        model = transformers.AutoModelForCausalLM.from_pretrained(directory)
        if tp == 1:  # whole on each rank, until it has an optimizer
            torch.save(model.state_dict(), io.BytesIO())
        optimizer = torch.optim.AdamW(model.parameters())
        ids = torch.arange(8).view(2, 4)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        results: list[Any] = []
        for call in (
            lambda: torch.save({"model": model.state_dict()}, io.BytesIO()),
            lambda: torch.save([optimizer.state_dict()], io.BytesIO()),
            lambda: safetensors.torch.save_file(model.state_dict(), f"{directory}/shards"),
            lambda: torch.save(f=io.BytesIO(), obj=model.state_dict()),
            lambda: safetensors.torch.save_file(
                tensors=model.state_dict(), filename=f"{directory}/shards"
            ),
        ):
            with pytest.raises(NotImplementedError) as raised:
                call()
            results.append(str(raised.value))
        full = px.full_state_dict(model)
        torch.save(full, file := io.BytesIO())
        file.seek(0)
        saved = torch.load(file)
        assert saved.keys() == full.keys()
        if dist.get_rank() == 0:  # which has all of it
            safetensors.torch.save_file(tensors=full, filename=f"{directory}/full")
            assert safetensors.torch.load_file(f"{directory}/full").keys() == full.keys()
    torch.save(model.state_dict(), io.BytesIO())
    return results


@pytest.mark.parametrize("tp", [1, 2])
def test_a_file_of_one_ranks_shards_is_refused(directory: str, tp: int) -> None:
    for found in pool(2).run(_files_of_shards, directory, tp):
        assert all("would hold this rank's shards of the model" in text for text in found)


def _trainer_of(function: Any, folder: str) -> transformers.Trainer:
    arguments = transformers.TrainingArguments(
        f"{folder}/out", use_cpu=True, report_to=[], max_steps=1
    )
    return transformers.Trainer(model_init=function, args=arguments)


@needs_trainer
def test_a_trainer_that_makes_a_parallel_model_itself_is_refused(directory: str) -> None:
    with _patched(1):
        with pytest.raises(NotImplementedError, match=r"Trainer: model_init= .* pass model="):
            _trainer_of(lambda: transformers.LlamaForCausalLM.from_pretrained(directory), directory)
        helper = _trainer_of(lambda: Tiny(dtype=torch.float32).model(), directory).model
    assert "parallel_ext_local_shards" not in dict(helper.named_children())


def _refused(directory: str) -> list[Any]:
    with _patched(2, plain=["GPT2LMHeadModel"]):
        results: list[Any] = []
        for call in (
            lambda: transformers.OPTForCausalLM.from_pretrained(directory),
            lambda: torch.optim.AdamW(torch.nn.Linear(2, 2).parameters()),
            lambda: px.patch(tp=1),
            lambda: transformers.LlamaForCausalLM.from_pretrained(directory, None),
            lambda: transformers.LlamaForCausalLM.from_pretrained(
                directory + "/llama", use_safetensors=False
            ),
        ):
            try:
                results.append(call())
            except Exception as error:
                results.append(Raised(error))
        helper = transformers.GPT2LMHeadModel.from_pretrained(directory + "/gpt2")
        results.append(helper.num_parameters())
        return results


def test_what_is_not_served_is_named_at_its_first_use(tmp_path: Path) -> None:
    opt = transformers.OPTConfig(
        vocab_size=9, hidden_size=4, num_hidden_layers=1, ffn_dim=4, num_attention_heads=1
    )
    transformers.OPTForCausalLM(opt).save_pretrained(tmp_path)
    gpt2 = transformers.GPT2Config(vocab_size=9, n_embd=4, n_layer=1, n_head=1)
    helper = transformers.GPT2LMHeadModel(gpt2)
    helper.save_pretrained(tmp_path / "gpt2")
    Tiny(dtype=torch.float32).model().save_pretrained(tmp_path / "llama")
    for found in pool(2).run(_refused, str(tmp_path)):
        assert "OPTForCausalLM is not served" in found[0].text
        assert "plain=['OPTForCausalLM']" in found[0].text
        assert "AdamW gets parameters of no parallel model" in found[1].text
        assert "px.unpatch() first" in found[2].text
        assert "LlamaForCausalLM.from_pretrained takes options by name" in found[3].text
        assert "does not take use_safetensors: weights are read from" in found[4].text
        assert found[5] == helper.num_parameters()


def test_an_adapter_is_refused_with_the_name_of_its_base(tmp_path: Path) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    Tiny(dtype=torch.float32).model().save_pretrained(base)
    plain = transformers.LlamaForCausalLM.from_pretrained(base)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    peft.get_peft_model(plain, config).save_pretrained(adapter)
    with (
        _patched(1),
        pytest.raises(NotImplementedError, match=f"{adapter} holds an adapter of {base}; load"),
    ):
        transformers.AutoModelForCausalLM.from_pretrained(adapter)


def test_a_model_is_plain_after_unpatch(directory: str) -> None:
    for _ in range(2):
        px.patch()
        model = transformers.LlamaForCausalLM.from_pretrained(directory)
        assert "parallel_ext_local_shards" in dict(model.named_children())
        px.unpatch()
        px.unpatch()
        model = transformers.LlamaForCausalLM.from_pretrained(directory)
        assert "parallel_ext_local_shards" not in dict(model.named_children())


class _Own(transformers.LlamaForCausalLM):
    """A class of a script's own."""


@pytest.mark.parametrize(
    "cls", [transformers.AutoModelForCausalLM, transformers.LlamaForCausalLM, _Own]
)
def test_options_of_the_configuration_count(directory: str, cls: Any) -> None:
    with _patched(1):
        model = cls.from_pretrained(
            directory,
            attention_dropout=0.25,
            attn_implementation="eager",
            device_map=None,
            num_hidden_layers=1,
        )
    assert "parallel_ext_local_shards" in dict(model.named_children())
    assert [each.self_attn.attention_dropout for each in model.model.layers] == [0.25]
    assert model.config._attn_implementation == "eager"
    assert isinstance(model, _Own) == (cls is _Own)


def _step_of_the_text_model(source: str, tp: int | None) -> tuple[str, list[float]]:
    """The class that a script gets out of files with images, and its losses."""
    with _patched(tp):
        model = transformers.AutoModelForCausalLM.from_pretrained(source).train()
        ids, losses = torch.arange(3, 21).view(2, 9), []
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(2):
            losses.append(model(input_ids=ids, labels=ids).loss)
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        assert is_parallel(model) == (tp is not None)
        return type(model).__name__, torch.stack(losses).tolist()


@pytest.mark.parametrize("kind", ["qwen3_5", "llama4"])
def test_the_text_model_in_files_with_images_is_loaded(kind: str, tmp_path: Path) -> None:
    tiny_model(kind).float().save_pretrained(tmp_path)
    expected = _step_of_the_text_model(str(tmp_path), None)
    for name, losses in pool(2).run(_step_of_the_text_model, str(tmp_path), 2):
        assert name == expected[0]
        assert losses == pytest.approx(expected[1], rel=1e-5)
