"""The output head around a parallel decoder, as of a model of images, sharded with it."""

from __future__ import annotations

import copy
import gc
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft.utils import set_peft_model_state_dict
from ranks import pool
from reference import Tiny, batch, difference, refusal
from reference_images import decoder_of, image_batch, losses_of, parallel_pair, tiny_model
from reference_mixtral import Layout
from safetensors.torch import load_file
from torch import nn
from torch.nn.utils import clip_grad_norm_
from transformers import LlamaForCausalLM

import parallel_ext as px
from parallel_ext.nn import VocabParallelHead
from parallel_ext.nn.fused_loss import LossCall
from parallel_ext.parallel.state import state_of

LAYOUTS = [Layout(1, 2, 1), Layout(2, 1, 1), Layout(2, 2, 1)]
OF_TEXT = r".*language_model.*\.(q_proj|down_proj)"
LARGEST = 1e-7  # transformers' losses go by fp32


def _largest(full: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert full.keys() == expected.keys()
    return max((full[name] - each).abs().max().item() for name, each in expected.items())


def _held() -> tuple[tuple[int, ...], int, int]:
    """The shape of this rank's head, and how many parameters the model says to have."""
    reference, ours = parallel_pair("llava", LAYOUTS[0].mesh())
    return tuple(ours.lm_head.weight.shape), ours.num_parameters(), reference.num_parameters()


def test_each_rank_holds_its_rows() -> None:
    shapes, counted, expected = zip(*pool(2).run(_held), strict=True)
    assert shapes == ((51, 64), (50, 64))
    assert counted == expected


def _hook(model: nn.Module) -> None:
    model.lm_head.register_forward_hook(lambda module, args, output: 2 * output)


def _gradient_hook(model: nn.Module) -> None:
    model.lm_head.weight.register_hook(lambda gradient: 2 * gradient)


def _used_twice(model: nn.Module) -> None:
    model.second_head = nn.Linear(64, 101, bias=False)
    model.second_head.weight = model.lm_head.weight


def _other_size(model: nn.Module) -> None:
    model.lm_head = nn.Linear(64, 1, bias=False).double()


WHOLE = {each.__name__: each for each in (_hook, _gradient_hook, _used_twice, _other_size)}


def _kept(name: str) -> type:
    model = tiny_model("llava")
    WHOLE[name](model)
    px.parallelize(decoder_of(model), LAYOUTS[0].mesh())
    return type(model.lm_head)


@pytest.mark.parametrize("name", WHOLE)
def test_a_head_with_more_than_rows_of_its_own_stays_whole(name: str) -> None:
    assert pool(2).run(_kept, name) == [nn.Linear] * 2


def _of_other_values() -> None:
    mesh = LAYOUTS[0].mesh()
    model = tiny_model("llava")
    model.lm_head.weight.data += mesh.rank
    px.parallelize(decoder_of(model), mesh)


def test_ranks_with_other_values_of_a_head_raise() -> None:
    pool(2).assert_raises(_of_other_values, words="lm_head.weight must be equal on all ranks")


def _around_a_causal_decoder(layout: Layout) -> float:
    """As of a script that makes the decoder of a causal model parallel, and trains all of it."""
    mesh = layout.mesh()
    torch.manual_seed(2)
    config = Tiny().config()
    reference = LlamaForCausalLM(config).double()
    reference.lm_head = nn.Linear(config.hidden_size, config.vocab_size).double()  # with a bias
    ours = copy.deepcopy(reference)
    px.parallelize(ours.model, mesh)
    px.data_parallel(ours, mesh)
    assert type(ours.lm_head) is VocabParallelHead
    rows = batch(config.vocab_size, rows=2 * mesh.dp_size)
    rows["labels"] = rows["input_ids"]  # as many on each dp rank
    own = {name: each[2 * mesh.dp_rank :][:2] for name, each in rows.items()}
    for model, given in ((reference, rows), (ours, own)):
        model(**given).loss.backward()
        clip_grad_norm_(model.parameters(), 0.1)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    return _largest(px.full_state_dict(ours, writer_only=False), reference.state_dict())


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_it_trains_with_a_bias_as_in_one_process(layout: Layout) -> None:
    assert max(pool(layout.world).run(_around_a_causal_decoder, layout)) <= LARGEST


ADAPTERS = {
    "on the tower": {
        "target_modules": rf"{OF_TEXT}|.*vision_tower.*\.q_proj|.*projector.linear_1",
        "use_dora": True,
    },
    "on the head": {"target_modules": rf"{OF_TEXT}|lm_head"},
    "on all linears": {"target_modules": "all-linear"},
    "rows of tokens": {
        "target_modules": OF_TEXT,
        "trainable_token_indices": {"embed_tokens": [60, 4, 90], "lm_head": [3, 1]},
    },
    "rows of tokens of tied ends": {
        "target_modules": OF_TEXT,
        "trainable_token_indices": [60, 4, 90],
    },
    "a copy of the head": {"target_modules": OF_TEXT, "modules_to_save": ["lm_head"]},
}


def _adapted(folder: str, layout: Layout, name: str) -> tuple[float, float, float]:
    """The largest differences of losses, of an adapter's files, and of the merged model."""
    mesh = layout.mesh()
    kind = "tied llava" if "tied" in name else "llava"
    reference, ours = tiny_model(kind), tiny_model(kind)
    px.parallelize(decoder_of(ours), mesh)
    options = {"r": 3, "lora_alpha": 7, "init_lora_weights": False, **ADAPTERS[name]}
    torch.manual_seed(7)
    ours = peft.get_peft_model(ours, px.LoraConfig(**options))
    px.data_parallel(ours, mesh)
    ours.save_pretrained(f"{folder}/first")
    mesh.control.barrier("saved")
    reference = peft.get_peft_model(reference, peft.LoraConfig(**options))
    set_peft_model_state_dict(reference, load_file(f"{folder}/first/adapter_model.safetensors"))
    models = reference, ours
    optimizers = [
        torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        for model in models
    ]
    of_losses = 0.0
    for step in range(2):
        losses = losses_of("llava", models, mesh, step)
        mean = losses[1].detach().clone()
        torch.distributed.all_reduce(mean)
        of_losses = max(of_losses, difference(mean / mesh.world_size, losses[0]))
        for loss, model, optimizer in zip(losses, models, optimizers, strict=True):
            loss.backward()
            clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    ours.save_pretrained(f"{folder}/last")
    if mesh.rank == 0:
        reference.save_pretrained(f"{folder}/expected")
    mesh.control.barrier("saved")
    files = [load_file(f"{folder}/{n}/adapter_model.safetensors") for n in ("last", "expected")]
    merged = [model.merge_and_unload() for model in models]
    full = px.full_state_dict(merged[1], writer_only=False)
    return of_losses, _largest(*files), _largest(full, merged[0].state_dict())


@pytest.mark.parametrize("name", ADAPTERS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_adapters_of_it_are_those_of_peft(layout: Layout, name: str, tmp_path: Path) -> None:
    for differences in pool(layout.world).run(_adapted, str(tmp_path), layout, name):
        of_losses, *of_weights = differences
        assert of_losses <= 1e-6
        assert max(of_weights) <= LARGEST


def _copied(layout: Layout) -> tuple[float, float]:
    """How a copy differs after a step of its own, and what it is a copy of, which has none."""
    mesh = layout.mesh()
    reference, ours = tiny_model("llava"), tiny_model("llava")
    px.parallelize(decoder_of(ours), mesh)
    before = {name: each.clone() for name, each in reference.state_dict().items()}
    again = copy.deepcopy(ours)
    px.data_parallel(again, mesh)
    for loss, model in zip(
        losses_of("llava", (reference, again), mesh, 0), (reference, again), strict=True
    ):
        loss.backward()
        clip_grad_norm_(model.parameters(), 0.1)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    full = [px.full_state_dict(each, writer_only=False) for each in (again, ours)]
    return _largest(full[0], reference.state_dict()), _largest(full[1], before)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_copy_has_a_head_of_its_own(layout: Layout) -> None:
    for of_copy, of_first in pool(layout.world).run(_copied, layout):
        assert of_copy <= LARGEST
        assert of_first == 0.0


def _resumed(layout: Layout) -> float:
    """Train a step, take the optimizer's state and the model's over into others, train again."""
    mesh = layout.mesh()
    models = reference, ours = parallel_pair("llava", mesh)
    make = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    optimizers = [make(model.parameters()) for model in models]

    def step(number: int) -> None:
        losses = losses_of("llava", models, mesh, number)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    step(0)
    saved = optimizers[1].state_dict()
    weights = px.full_state_dict(ours, writer_only=False)
    again = tiny_model("llava")
    again.load_state_dict(weights)
    px.parallelize(decoder_of(again), mesh)
    px.data_parallel(again, mesh)
    models, optimizers[1] = (reference, again), make(again.parameters())
    optimizers[1].load_state_dict(saved)
    step(1)
    return _largest(px.full_state_dict(again, writer_only=False), reference.state_dict())


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_state_of_an_optimizer_goes_on(layout: Layout) -> None:
    assert max(pool(layout.world).run(_resumed, layout)) <= LARGEST


def _tied_since() -> tuple[str, float]:
    mesh = LAYOUTS[0].mesh()
    reference, ours = tiny_model("llava"), tiny_model("llava")
    px.parallelize(decoder_of(ours), mesh)
    for model in (reference, ours):
        for config in (model.config, model.config.text_config):
            config.tie_word_embeddings = True
        model.tie_weights()
        model(**image_batch(2)).loss.backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    full = px.full_state_dict(ours, writer_only=False)
    return type(ours.lm_head).__name__, _largest(full, reference.state_dict())


def test_it_can_be_tied_later() -> None:
    for name, error in pool(2).run(_tied_since):
        assert name == "TiedHead"
        assert error <= LARGEST


OF_LOGITS = {
    "asked for": ({"training_logits": True}, lambda model: None),
    "not fused": ({"fused_loss": False}, lambda model: None),
    "with a hook": ({}, lambda model: model.lm_head.register_forward_hook(lambda *_: None)),
    "with a loss of its own": ({}, lambda model: setattr(model, "loss_function", _loss)),
}


def _loss(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **_: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _call(model: nn.Module, **options: Any) -> Any:
    return model(**image_batch(2), **options)


def _with_logits(name: str) -> tuple[float, float, str]:
    """How loss and logits differ where logits are made, and what refuses to do without."""
    options, change = OF_LOGITS[name]
    mesh, outputs = LAYOUTS[0].mesh(), []
    for is_parallel in (False, True):
        model = tiny_model("llava")
        if is_parallel:
            px.parallelize(model, mesh, **options)
        change(model)
        outputs.append(_call(model))
    state_of(model).fused_loss = True
    differences = [difference(getattr(outputs[1], n), outputs[0][n]) for n in ("loss", "logits")]
    return *differences, refusal(lambda: _call(model)) if "with" in name else ""


@pytest.mark.parametrize("name", OF_LOGITS)
def test_logits_are_made_where_something_needs_them(name: str) -> None:
    for of_loss, of_logits, refused in pool(2).run(_with_logits, name):
        assert max(of_loss, of_logits) <= 1e-6
        assert ("fused_loss=True, but " in refused) == ("with" in name)


def _calls() -> list[float]:
    """How losses of calls differ, none of which makes logits in training, but some of them do."""
    mesh = LAYOUTS[0].mesh()
    models = tiny_model("llava"), px.parallelize(tiny_model("llava"), mesh)
    shifted = nn.functional.pad(image_batch(2)["labels"], (0, 1), value=-100)[..., 1:].contiguous()
    found = []
    for options in ({}, {"num_items_in_batch": 7}, {"shift_labels": shifted}):
        outputs = [_call(model, **options) for model in models]
        assert "logits" in outputs[0]
        assert "logits" not in outputs[1]
        assert not outputs[1].logits
        found.append(difference(outputs[1].loss, outputs[0].loss))
    plain, ours = (_call(model, return_dict=False) for model in models)  # with logits
    found += [difference(*pair) for pair in zip(ours[:2], plain[:2], strict=True)]
    plain, ours = (_call(model.eval()) for model in models)
    return [*found, difference(ours.loss, plain.loss), difference(ours.logits, plain.logits)]


def test_a_loss_is_that_of_the_class_without_logits() -> None:
    for differences in pool(2).run(_calls):
        assert max(differences) <= 1e-6


def _other_ids() -> str:
    mesh = LAYOUTS[0].mesh()
    model = px.parallelize(tiny_model("llava"), mesh)
    batch = image_batch(2)
    del batch["labels"]
    batch["input_ids"][0, -1] += mesh.rank
    return refusal(lambda: model(**batch))


def test_tp_ranks_with_other_ids_raise() -> None:
    for why in pool(2).run(_other_ids):
        assert "they differ in input_ids of the model around it (other values" in why


def _hooked_on_one_rank() -> str:
    mesh = LAYOUTS[0].mesh()
    model = px.parallelize(tiny_model("llava"), mesh)
    if mesh.rank == 0:
        model.lm_head.register_forward_hook(lambda *_: None)
    return refusal(lambda: _call(model))


def test_ranks_of_which_one_needs_logits_raise() -> None:
    for why in pool(2).run(_hooked_on_one_rank):
        assert "they differ in loss of logits of the model around it" in why


def _calls_kept() -> int:
    """How many calls are kept after a step, with hidden states, until garbage is collected."""
    model = px.parallelize(tiny_model("llava"), LAYOUTS[0].mesh())
    gc.collect()
    gc.disable()
    try:
        _call(model).loss.backward()
        return sum(type(each) is LossCall for each in gc.get_objects())
    finally:
        gc.enable()


def test_a_step_keeps_nothing() -> None:
    assert pool(2).run(_calls_kept) == [0, 0]


def _changed_logits() -> tuple[float, bool]:
    mesh, outputs = LAYOUTS[0].mesh(), []
    for is_parallel in (False, True):
        model = tiny_model("gemma4")
        model.config.get_text_config().final_logit_softcapping = 0.5
        if is_parallel:
            px.parallelize(model, mesh)
        outputs.append(model(**image_batch(2, "gemma4")))
    return difference(outputs[1].loss, outputs[0].loss), "logits" in outputs[1]


def test_a_class_that_changes_logits_gets_them() -> None:
    for of_loss, has_logits in pool(2).run(_changed_logits):
        assert of_loss <= 1e-6
        assert has_logits


def _patched_forward(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return None


def _kept_of_a_patched_class() -> type:
    """Of a class whose forward a kernel library has replaced, which may read the head's weight."""
    model, plain = tiny_model("llava"), type(tiny_model("llava")).forward
    try:
        type(model).forward = _patched_forward
        px.parallelize(model, LAYOUTS[0].mesh())
    finally:
        type(model).forward = plain
    return type(model.lm_head)


def test_a_head_that_a_replaced_forward_may_read_stays_whole() -> None:
    assert pool(2).run(_kept_of_a_patched_class) == [nn.Linear] * 2
