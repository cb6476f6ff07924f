"""Models that classify sequences or tokens: the trunk is sharded, what classifies is replicated."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from ranks import pool
from reference import (
    FLOOR,
    Tiny,
    difference,
    exact_norms,
    gradients_of,
    mesh_of,
    shard_differences,
    worst,
)
from test_specs import OfSpec

import parallel_ext as px

TOLERANCE = FLOOR[torch.float32]  # transformers computes these losses in fp32
AUTO = {
    "sequence": transformers.AutoModelForSequenceClassification,
    "token": transformers.AutoModelForTokenClassification,
}


def _config(kind: str) -> transformers.PreTrainedConfig:
    return Tiny().config() if kind == "llama" else OfSpec(kind).config()


def _model(kind: str, task: str, seed: int = 1, **options: Any) -> Any:
    config = _config(kind)
    for name, value in {"num_labels": 5, "classifier_dropout": 0.0, **options}.items():
        setattr(config, name, value)
    torch.manual_seed(seed)
    return exact_norms(AUTO[task].from_config(config).double().train())


def _batch(task: str, rows: int = 4, seed: int = 3) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 101, (rows, 7), generator=generator)
    mask = torch.ones_like(ids)
    ids[0, 5:], mask[0, 5:] = 0, 0  # padding
    shape = (rows,) if task == "sequence" else (rows, 7)
    labels = torch.randint(0, 5, shape, generator=generator)
    if task == "token":
        labels = labels.masked_fill(mask == 0, -100)
        labels[-1, :3] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def _differences(
    kind: str, task: str, zero: int | None, options: dict[str, Any], own_tokens: bool = False
) -> dict[str, Any]:
    """Of losses, logits, gradients and norms, at tp or at dp, from the plain model."""
    reference = _model(kind, task, **options)
    mesh = mesh_of() if zero is None else mesh_of(tp=1)
    model = px.parallelize(copy.deepcopy(reference), mesh, sequence_parallel=own_tokens)
    if zero is not None:
        px.data_parallel(model, mesh, zero=zero)
    of_batch = _batch(task)
    torch.manual_seed(5)
    theirs = reference(**of_batch)
    theirs.loss.backward()
    own = of_batch
    if zero is not None:  # unequal parts
        first, last = ((0, 3), (3, 4))[mesh.dp_rank]
        own = {name: value[first:last] for name, value in of_batch.items()}
    torch.manual_seed(5)
    ours = model(**own)
    ours.loss.backward()
    loss = ours.loss.detach()
    if zero is not None:
        loss = px.ops.reduce_from_region(loss, mesh.dp) / mesh.dp_size
    norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1e9)
    found = {"loss": difference(loss, theirs.loss.detach())}
    gradients = gradients_of(reference)
    found |= shard_differences(model, gradients, True)
    found["norm"] = difference(px.clip_grad_norm_(model, 1e9), norm)
    if zero is None:
        found["logits"] = difference(ours.logits.detach(), theirs.logits.detach())
    return found


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("task", AUTO)
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen3"])
def test_training_equals_one_process(kind: str, task: str, tp: int) -> None:
    for found in pool(tp).run(_differences, kind, task, None, {}):
        assert worst(found) < (TOLERANCE, "")


def _checked(task: str, tp: int) -> tuple[float, float]:
    mesh = mesh_of(tp)
    model = px.no_data_parallel(px.parallelize(_model("llama", task), mesh))
    own = {name: each.chunk(mesh.dp_size)[mesh.dp_rank] for name, each in _batch(task).items()}
    report = px.check_gradients(model, own)
    return report.worst[1], abs(report.loss / report.single_process_loss - 1)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("task", AUTO)
def test_check_gradients_compares_with_the_loss_of_the_class(task: str, tp: int) -> None:
    for found in pool(2).run(_checked, task, tp):
        assert max(found) < TOLERANCE


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("task", AUTO)
def test_dp_ranks_with_unequal_batches_equal_one_process(task: str, zero: int) -> None:
    for found in pool(2).run(_differences, "llama", task, zero, {}):
        assert worst(found) < (TOLERANCE, "")


@pytest.mark.parametrize("own_tokens", [False, True])
def test_dropout_before_the_classes_is_that_of_one_process(own_tokens: bool) -> None:
    options = {"classifier_dropout": 0.5}
    for found in pool(2).run(_differences, "llama", "token", None, options, own_tokens):
        assert worst(found) < (TOLERANCE, "")


def _dropout_of_other_seeds() -> None:
    model = px.parallelize(_model("llama", "token", classifier_dropout=0.5), mesh_of())
    torch.manual_seed(mesh_of().rank)
    model(**_batch("token"))


def test_other_random_numbers_on_tp_ranks_are_refused() -> None:
    pool(2).assert_raises(_dropout_of_other_seeds, error="DisagreementError", words="random state")


def _files(task: str, folder: Path) -> None:
    reference, mesh = _model("llama", task).float(), mesh_of()
    if mesh.rank == 0:
        reference.save_pretrained(folder / "plain")
    mesh.control.barrier("saved")
    model = px.from_pretrained(folder / "plain", mesh)
    assert type(model) is type(reference)
    of_batch = _batch(task)
    with torch.no_grad():
        logits = model(**of_batch).logits
        torch.testing.assert_close(logits, reference.eval()(**of_batch).logits)
        model.score.weight.mul_(2.0)
    model.save_pretrained(folder / "ours")
    px.save_checkpoint(folder / "steps", 1, model)
    px.load_checkpoint(folder / "steps", model)


@pytest.mark.parametrize("task", AUTO)
def test_files_are_huggingfaces(task: str, tmp_path: Path) -> None:
    pool(2).run(_files, task, tmp_path)
    plain, ours = (AUTO[task].from_pretrained(tmp_path / name) for name in ("plain", "ours"))
    assert type(ours) is type(plain)
    for name, value in plain.state_dict().items():
        expected = 2 * value if name == "score.weight" else value
        assert torch.equal(ours.state_dict()[name], expected), name


def _lora(folder: Path) -> dict[str, Any]:
    config = peft.LoraConfig(r=3, target_modules=["q_proj", "down_proj"], task_type="SEQ_CLS")
    reference, mesh = _model("llama", "sequence").float(), mesh_of()
    model = px.parallelize(copy.deepcopy(reference), mesh)
    theirs = peft.get_peft_model(reference, copy.deepcopy(config))
    ours = peft.get_peft_model(model, config)
    for each in (theirs, ours):
        for name, parameter in each.named_parameters():
            if "lora_" in name:
                parameter.data.fill_(0.02)
    losses = []
    for each in (theirs, ours):
        optimizer = torch.optim.SGD([p for p in each.parameters() if p.requires_grad], lr=0.1)
        for step in range(3):
            loss = each(**_batch("sequence", seed=step)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    ours.save_pretrained(folder)
    return {"loss": difference(losses[1], losses[0])}


def test_lora_trains_the_classes_as_peft_does(tmp_path: Path) -> None:
    for found in pool(2).run(_lora, tmp_path):
        assert worst(found) < (TOLERANCE, "")
    files = peft.PeftModel.from_pretrained(_model("llama", "sequence").float(), tmp_path)
    assert "score" in str(
        [name for name, _ in files.named_parameters() if "modules_to_save" in name]
    )


def _refused() -> list[str]:
    texts = []
    for make in (
        lambda: transformers.LlamaForQuestionAnswering(_config("llama")),
        lambda: transformers.MixtralForSequenceClassification(
            transformers.MixtralConfig(
                vocab_size=31, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                num_attention_heads=2, num_key_value_heads=2,
            )
        ),
    ):  # fmt: skip
        model = make()
        with pytest.raises(ValueError, match="is not served") as raised:
            px.parallelize(model, mesh_of())
        texts.append(str(raised.value))
    model = px.parallelize(_model("llama", "sequence"), mesh_of())
    with pytest.raises(NotImplementedError, match="resize before") as raised:
        model.resize_token_embeddings(200)
    return [*texts, str(raised.value)]


def test_what_is_not_served_is_refused_by_name() -> None:
    for texts in pool(2).run(_refused):
        names = (
            "LlamaForQuestionAnswering",
            "MixtralForSequence",
            "LlamaForSequence",
        )
        for name, text in zip(names, texts, strict=True):
            assert name in text
