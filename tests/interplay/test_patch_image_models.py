"""LLaVA under ``px.patch``: a class of transformers around a decoder that becomes parallel."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import accelerate
import peft
import pytest
import torch
import transformers
from interplay_accelerate import processes, sgd_arguments
from ranks import pool
from reference import Tiny
from reference_images import DECODERS, image_batch, tiny_model
from safetensors.torch import load_file, save_file
from torch import nn
from versions import needs_trainer

import parallel_ext as px
from parallel_ext.parallel.state import is_parallel

ROWS, STEPS = 8, 2


class Projected(nn.Module):
    """A causal model behind a projector, whose loss it computes, or the module, by the count."""

    def __init__(self, directory: str, own_loss: bool) -> None:
        super().__init__()
        self.model = transformers.AutoModelForCausalLM.from_pretrained(directory)
        torch.manual_seed(6)
        self.projector = nn.Linear(3 * 8 * 8, self.model.config.hidden_size)
        self.own_loss = own_loss

    def forward(
        self, input_ids: torch.Tensor, pixel_values: torch.Tensor, labels: Any = None, **kwargs: Any
    ) -> Any:
        embeds = self.model.get_input_embeddings()(input_ids)
        embeds = embeds + self.projector(pixel_values.flatten(1).float())[:, None]
        if not self.own_loss:
            return self.model(inputs_embeds=embeds, labels=labels, **kwargs)
        logits = self.model(inputs_embeds=embeds).logits[:, :-1].flatten(0, 1)
        total = nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
        return {"loss": total / kwargs["num_items_in_batch"]}


def _model(directory: str, kind: str) -> nn.Module:
    if kind in ("model's loss", "own loss"):
        return Projected(directory, own_loss=kind == "own loss")
    model = transformers.AutoModelForImageTextToText.from_pretrained(directory)
    if kind == "frozen llava":  # but for its projector, as in the first stage of its training
        model.requires_grad_(False).model.multi_modal_projector.requires_grad_(True)
    return model


def _trained(directory: str, folder: str, tp: int | None, kind: str, how: str) -> list[Any]:
    """Norms, and whether the decoder became parallel; trained weights are written to a file."""
    with processes():
        mesh = None if tp is None else px.patch(tp=tp)
        try:
            model = _model(directory, kind).train()
            ranks = (0, 1) if mesh is None else (mesh.dp_rank, mesh.dp_size)
            norms = (_by_loop if how in ("loop", "prepared") else _by_trainer)(
                model, folder, ranks, kind, how
            )
            return [*norms, is_parallel(model)]
        finally:
            px.unpatch()


def _by_loop(
    model: nn.Module, folder: str, ranks: tuple[int, int], kind: str, how: str
) -> list[float]:
    accelerator = accelerate.Accelerator(cpu=True)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    if how == "prepared":
        model, optimizer = accelerator.prepare(model, optimizer)
    norms = []
    for step in range(STEPS):
        batch = {
            name: each[ranks[0] :: ranks[1]] for name, each in image_batch(ROWS, kind, step).items()
        }
        batch["pixel_values"] = batch["pixel_values"].float()
        model(**batch).loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1e9)))
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    return norms


def _by_trainer(
    model: nn.Module, folder: str, ranks: tuple[int, int], kind: str, how: str
) -> list[float]:
    batch = image_batch(ROWS * STEPS, kind, answers=True)
    batch["pixel_values"] = batch["pixel_values"].float()
    more = {"gradient_accumulation_steps": 2, "max_grad_norm": 1e9}
    if how == "smoothed":
        more["label_smoothing_factor"] = 0.1
    arguments = sgd_arguments(folder, ROWS // 2 // ranks[1], STEPS, **more)
    rows = [{name: each[row] for name, each in batch.items()} for row in range(ROWS * STEPS)]
    trainer = transformers.Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    trainer.save_model(folder)
    evaluated = trainer.evaluate(rows[:5])["eval_loss"]  # some dp rank gets rows a second time
    lost = [{**row, "pixel_values": row["pixel_values"] * float("nan")} for row in rows[:5]]
    assert math.isnan(trainer.evaluate(lost)["eval_loss"])  # the model's own is no zero
    logs = [e[k] for e in trainer.state.log_history if "loss" in e for k in ("grad_norm", "loss")]
    return [evaluated, *logs]


def _compare(tmp_path: Path, size: int, tp: int, kind: str, how: str) -> None:
    model = tiny_model(kind if kind in DECODERS else "llava").float()
    if kind in ("model's loss", "own loss"):
        model = transformers.LlamaForCausalLM(model.config.text_config)
    model.save_pretrained(tmp_path / "model")
    files = [tmp_path / "plain", tmp_path / "ours"]
    directory = str(tmp_path / "model")
    ((*expected, _),) = pool(1).run(_trained, directory, str(files[0]), None, kind, how)
    for *found, became_parallel in pool(size).run(
        _trained, directory, str(files[1]), tp, kind, how
    ):
        assert became_parallel
        assert found == pytest.approx(expected, rel=1e-3)  # as Trainer logs them
    plain, ours = (load_file(each / "model.safetensors") for each in files)
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "how", "size", "tp"),
    [
        *(("llava", "loop", 2, 1), ("llava", "prepared", 4, 2), ("gemma3", "loop", 4, 2)),
        *(("gemma3", "prepared", 2, 1), ("frozen llava", "loop", 4, 2)),
        *(("frozen llava", "prepared", 2, 1), ("qwen2_5_vl", "loop", 4, 2)),
    ],
)
def test_a_loop_trains_it_as_in_one_process(
    tmp_path: Path, kind: str, how: str, size: int, tp: int
) -> None:
    _compare(tmp_path, size, tp, kind, how)


@needs_trainer
@pytest.mark.parametrize(
    ("kind", "size", "tp"),
    [
        *(("llava", 4, 2), ("tied llava", 2, 2), ("frozen llava", 2, 1), ("qwen3_vl", 4, 2)),
        ("gemma3", 2, 1),
        *(("model's loss", 2, 1), ("own loss", 4, 2)),
    ],
)
def test_a_trainer_trains_it_by_the_labels_that_count(
    tmp_path: Path, kind: str, size: int, tp: int
) -> None:
    _compare(tmp_path, size, tp, kind, "trainer")


@needs_trainer
@pytest.mark.parametrize(("kind", "size", "tp"), [("gemma4", 2, 1), ("qwen3_vl", 4, 2)])
def test_a_smoothed_loss_of_a_class_that_takes_no_count_of_labels(
    tmp_path: Path, kind: str, size: int, tp: int
) -> None:
    """Of Gemma 4 the trainer shifts the labels, and of Qwen3-VL it does not."""
    _compare(tmp_path, size, tp, kind, "smoothed")


def _loaded(
    directory: str, plain: tuple[str, ...] = (), **options: Any
) -> tuple[bool, bool, list[str]]:
    """Whether a model is parallel when it is loaded, and once it has an optimizer; and warnings."""
    with processes(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        px.patch(tp=2, plain=plain)
        try:
            model = transformers.AutoModelForImageTextToText.from_pretrained(
                directory, device_map="auto", attn_implementation="eager", **options
            )
            at_once = is_parallel(model)
            if not plain:
                torch.optim.SGD(model.parameters(), lr=0.1)
            return at_once, is_parallel(model), [str(each.message) for each in caught]
        finally:
            px.unpatch()


def test_it_is_parallel_when_it_is_loaded_or_once_it_is_trained(tmp_path: Path) -> None:
    tiny_model("llava").save_pretrained(tmp_path)
    for at_once, trained, _ in pool(2).run(_loaded, str(tmp_path)):
        assert at_once
        assert trained
    plain = ("LlavaForConditionalGeneration",)
    assert not any(at_once for at_once, *_ in pool(2).run(_loaded, str(tmp_path), plain))
    tensors = load_file(tmp_path / "model.safetensors")
    surplus = {**tensors, "vision_tower.of_another.weight": torch.zeros(2)}
    save_file(surplus, tmp_path / "model.safetensors", {"format": "pt"})
    for at_once, trained, warned in pool(2).run(_loaded, str(tmp_path)):
        assert not at_once
        assert trained
        (why,) = (each for each in warned if "px.patch" in each)
        assert "each rank loads LlavaForConditionalGeneration whole" in why
        assert "vision_tower.of_another.weight" in why


def _loaded_with(directory: str) -> list[tuple[bool, bool, list[str]]]:
    return [
        _loaded(directory, revision=None, token=None),
        _loaded(directory, key_mapping={"^of_another": "model"}),
        _loaded(directory, dtype={"text_config": torch.float32, "": torch.float64}),
        _loaded(directory, ignore_mismatched_sizes=True),
    ]


def test_an_option_of_transformers_alone_loads_it_whole_until_it_is_trained(
    tmp_path: Path,
) -> None:
    tiny_model("llava").save_pretrained(tmp_path)
    for served, *others in pool(2).run(_loaded_with, str(tmp_path)):
        assert served[0]
        assert not any("px.patch" in each for each in served[2])
        words = ("key_mapping", "dtype must be", "ignore_mismatched_sizes")
        for (at_once, trained, warned), why in zip(others, words, strict=True):
            assert not at_once
            assert trained
            (warning,) = (each for each in warned if "px.patch" in each)
            assert "each rank loads LlavaForConditionalGeneration whole" in warning
            assert why in warning


def _changed(directory: str, kind: str, tp: int | None) -> list[float]:
    """Losses of a model that gets more tokens, or a tie, before its optimizer; rank 0 saves it."""
    with processes():
        if tp is not None:
            px.patch(tp=tp)
        try:
            model = _model(directory, kind).train()
            if kind == "tied later":
                model.config.tie_word_embeddings = True
                model.config.text_config.tie_word_embeddings = True
                model.tie_weights()
            else:
                torch.manual_seed(3)
                model.resize_token_embeddings(110)
                model.tie_weights()  # once more, where they are tied
            batch = image_batch(4)
            batch["pixel_values"] = batch["pixel_values"].float()
            losses = []
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(STEPS):
                loss = model(**batch).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if torch.distributed.get_rank() == 0:
                    model.save_pretrained(f"{directory}/{tp}")
                losses.append(loss.item())
            torch.distributed.barrier()
            return losses
        finally:
            px.unpatch()


@pytest.mark.parametrize("kind", ["tied llava", "llava", "tied later"])
def test_what_a_script_changes_before_its_optimizer_is_trained_and_saved(
    tmp_path: Path, kind: str
) -> None:
    tiny_model("llava" if kind == "tied later" else kind).float().save_pretrained(tmp_path)
    (expected,) = pool(1).run(_changed, str(tmp_path), kind, None)
    for found in pool(2).run(_changed, str(tmp_path), kind, 2, timeout_s=60.0):
        assert found == pytest.approx(expected, rel=1e-5)
    plain, ours = (load_file(tmp_path / f"{tp}/model.safetensors") for tp in (None, 2))
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)


class Towers(nn.Module):
    """Two frozen decoders, and what is trained on them."""

    def __init__(self, seed: int = 7) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.towers = nn.ModuleList(transformers.LlamaModel(Tiny().config()) for _ in range(2))
        self.head = nn.Linear(self.towers[0].config.hidden_size, 3)
        self.towers.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return sum(self.head(each(input_ids=ids).last_hidden_state) for each in self.towers)


def _towers(tp: int | None) -> list[Any]:
    with processes():
        if tp is not None:
            px.patch(tp=tp)
        try:
            model, helper = Towers(), Towers(seed=8).towers[0]
            optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
            model(torch.arange(8).view(2, 4)).square().mean().backward()
            optimizer.step()
            of_decoders = [is_parallel(each) for each in (*model.towers, helper)]
            return [*of_decoders, model.head.weight.detach()]
        finally:
            px.unpatch()


def test_frozen_decoders_become_parallel_with_what_is_trained_on_them() -> None:
    ((*_, expected),) = pool(1).run(_towers, None)
    for *of_decoders, found in pool(2).run(_towers, 2):
        assert of_decoders == [True, True, False]
        torch.testing.assert_close(found, expected)


def _adapted(directory: str, size: int) -> list[float]:
    """Norms of LoRA on the decoder, with a projector that is trained whole."""
    with processes():
        mesh = px.patch(tp=2)
        try:
            model = _model(directory, "llava").train()
            config = peft.LoraConfig(
                target_modules=r".*language_model.*(q_proj|down_proj)",
                modules_to_save=["multi_modal_projector"],
            )
            model = peft.get_peft_model(model, config)
            assert is_parallel(model)
            ranks = mesh.dp_rank, mesh.dp_size
            return _by_loop(model, f"{directory}/{size}", ranks, "llava", "loop")
        finally:
            px.unpatch()


def test_lora_on_its_decoder(tmp_path: Path) -> None:
    tiny_model("llava").float().save_pretrained(tmp_path)
    two, four = (pool(size).run(_adapted, str(tmp_path), size)[0] for size in (2, 4))
    assert two == pytest.approx(four, rel=1e-4)
    files = [load_file(tmp_path / f"{n}/adapter_model.safetensors") for n in (2, 4)]
    torch.testing.assert_close(files[0], files[1], rtol=1e-4, atol=1e-5)
    assert any("multi_modal_projector" in name for name in files[0])


def _of_two(directory: str, tp: int | None) -> list[torch.Tensor]:
    """The projector of the second of two frozen models, after a step that accelerate prepares."""
    with processes():
        mesh = None if tp is None else px.patch(tp=tp)
        try:
            models = [_model(directory, "frozen llava").train() for _ in range(2)]
            of_projectors = [each.model.multi_modal_projector.parameters() for each in models]
            first, second = (torch.optim.SGD(each, lr=0.1) for each in of_projectors)
            assert all(is_parallel(each) == (tp is not None) for each in models)
            model, optimizer = accelerate.Accelerator(cpu=True).prepare(models[1], second)
            rows = slice(None) if mesh is None else slice(mesh.dp_rank, None, mesh.dp_size)
            batch = {name: each[rows] for name, each in image_batch(4).items()}
            batch["pixel_values"] = batch["pixel_values"].float()
            model(**batch).loss.backward()
            optimizer.step()
            first.step()
            return [each.detach() for each in model.model.multi_modal_projector.parameters()]
        finally:
            px.unpatch()


def test_a_projector_is_trained_with_the_model_that_holds_it(tmp_path: Path) -> None:
    tiny_model("llava").float().save_pretrained(tmp_path)
    (expected,) = pool(1).run(_of_two, str(tmp_path), None)
    for found in pool(2).run(_of_two, str(tmp_path), 1):
        torch.testing.assert_close(found, expected)
