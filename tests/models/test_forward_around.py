"""What a model of images around a parallel decoder does when it is called, and what it refuses."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any
from unittest import mock

import peft
import pytest
import torch
import transformers
from ranks import pool
from reference import difference, refusal
from reference_images import decoder_of, image_batch, tiny_model
from reference_mixtral import Layout
from torch import nn
from transformers import LlavaForConditionalGeneration
from versions import needs_newer

import parallel_ext as px
from parallel_ext.nn.vocab import TiedHead

TP, DP = Layout(1, 2, 1), Layout(2, 1, 1)


def _of_another_class() -> nn.Module:
    """A class whose loss this package does not know; its head is sharded all the same."""
    config = tiny_model("llava").config.to_dict()
    del config["model_type"]
    torch.manual_seed(4)
    model = transformers.LlavaNextForConditionalGeneration(transformers.LlavaNextConfig(**config))
    return model.double().train()


_of_loss_function = needs_newer("the loss_function of Llama 4")
INNER = {"of the same class": lambda: tiny_model("llava"), "of another": _of_another_class}


def _called_inside(name: str, kind: str) -> float:
    """How logits of a model differ that a hook of another calls in a training forward of that."""
    text = {"input_ids": torch.arange(3, 21).view(2, 9)}
    expected = INNER[name]()(**text).logits
    outer, inner = (px.parallelize(each, TP.mesh()) for each in (tiny_model(kind), INNER[name]()))
    found = []
    decoder_of(outer).register_forward_hook(lambda *_: found.append(inner(**text).logits))
    assert not outer(**image_batch(2, kind)).logits
    assert found[0].shape == expected.shape
    return difference(found[0], expected)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, "llava") for name in INNER),
        pytest.param("of another", "llama4", marks=_of_loss_function),
    ],
)
def test_a_model_called_inside_of_another_returns_its_own_logits(name: str, kind: str) -> None:
    assert max(pool(2).run(_called_inside, name, kind)) <= 1e-6


def _of_two_models_around() -> tuple[float, ...]:
    """How losses of both models around Llama 4's decoder differ, of which one runs the other."""
    reference = tiny_model("llama4")
    ours = px.parallelize(tiny_model("llama4"), TP.mesh(), fused_loss=True)
    batch, found = image_batch(2, "llama4"), []
    text = {"input_ids": batch["labels"].clamp(min=3), "labels": batch["labels"]}
    for each in (reference, ours):
        outputs = each(**batch), each.language_model(**text)
        found.append([output.loss for output in outputs])
    assert not any(output.logits for output in outputs)  # there are none
    return tuple(map(difference, *found))


@_of_loss_function
def test_of_a_causal_model_in_a_model_of_images_none_makes_logits() -> None:
    for differences in pool(2).run(_of_two_models_around):
        assert max(differences) <= 1e-6


def _reads_the_weight(model: nn.Module, labels: Any = None, **inputs: Any) -> Any:
    """As the fused losses of kernel libraries, which multiply the head's weight themselves."""
    hidden = model.model(**inputs)[0]
    logits = nn.functional.linear(hidden, model.lm_head.weight)
    kind = transformers.models.llava.modeling_llava.LlavaCausalLMOutputWithPast
    return kind(loss=logits.logsumexp(-1).mean())


def _on_the_instance(model: nn.Module) -> Callable[[], Any]:
    model.forward = MethodType(_reads_the_weight, model)
    return lambda: model(**image_batch(2))


def _on_the_class(model: nn.Module) -> Callable[[], Any]:
    def call() -> Any:
        with mock.patch.object(LlavaForConditionalGeneration, "forward", _reads_the_weight):
            return model(**image_batch(2))

    return call


def _inside_of_peft(model: nn.Module) -> Callable[[], Any]:
    """PEFT calls ``forward`` itself, past the hooks of the model."""
    config = px.LoraConfig(r=2, target_modules=r".*language_model.*\.q_proj")
    adapted = peft.get_peft_model(model, config)
    _on_the_instance(model)
    return lambda: adapted(**image_batch(2))


REPLACED = {each.__name__: each for each in (_on_the_instance, _on_the_class, _inside_of_peft)}


def _replaced(name: str, kind: str, layout: Layout) -> str | float:
    """What is said of a forward that was put in the place of ours, or how its loss differs."""
    ours = px.parallelize(tiny_model(kind), layout.mesh())
    px.data_parallel(ours, layout.mesh())
    call = REPLACED[name](ours)
    if layout.tp == 2:
        return refusal(call)
    return difference(call().loss, _reads_the_weight(tiny_model(kind), **image_batch(2)).loss)


@pytest.mark.parametrize("name", REPLACED)
@pytest.mark.parametrize("kind", ["llava", "tied llava"])
def test_a_forward_that_takes_rows_of_the_head_for_all_is_refused(name: str, kind: str) -> None:
    for why in pool(2).run(_replaced, name, kind, TP):
        assert "rows of the output head for all of it, as TRL's and Liger's fused losses do" in why


@pytest.mark.parametrize("name", [_on_the_instance.__name__, _on_the_class.__name__])
def test_where_a_rank_has_all_rows_such_a_forward_is_exact(name: str) -> None:
    assert max(pool(2).run(_replaced, name, "llava", DP)) <= 1e-10


def _replaced_before() -> str:
    with mock.patch.object(LlavaForConditionalGeneration, "forward", _reads_the_weight):
        return refusal(lambda: px.parallelize(tiny_model("tied llava"), TP.mesh()))


def test_so_it_is_before_a_tied_head_is_sharded() -> None:
    for why in pool(2).run(_replaced_before):
        assert "may take a rank's rows of the tied output head for all of it" in why
        assert "fused_linear_cross_entropy=False" in why


def _wrapped() -> tuple[float, float]:
    """How loss and hidden states differ where a wrapper stands in the place of our forward."""
    plain, ours = tiny_model("llava"), px.parallelize(tiny_model("llava"), TP.mesh())
    inner, text = ours.forward, {"input_ids": torch.arange(3, 21).view(2, 9)}

    @functools.wraps(inner)
    def wrapper(**inputs: Any) -> Any:
        return inner(**inputs)

    ours.forward = wrapper
    hidden = [decoder_of(each)(**text).last_hidden_state for each in (ours, plain)]
    losses = [each(**image_batch(2)).loss for each in (ours, plain)]
    ours.forward = lambda **inputs: inner(**inputs)  # which does not say what it wraps
    assert torch.equal(ours(**image_batch(2)).loss, losses[0])
    return difference(*losses), difference(*hidden)


def test_a_forward_may_be_wrapped() -> None:
    for differences in pool(2).run(_wrapped):
        assert max(differences) <= 1e-6


def _tied_with_bias() -> list[tuple[str, float]]:
    """Names, and how the gradients of a tied head with a bias differ."""
    models = []
    for parallel in (False, True):
        model = tiny_model("tied llava")
        model.lm_head = nn.Linear(64, 101).double()
        model.lm_head.weight = decoder_of(model).embed_tokens.weight
        nn.init.ones_(model.lm_head.bias)
        models.append(px.parallelize(model, TP.mesh()) if parallel else model)
        model(**image_batch(2)).loss.backward()
    plain, ours = models
    assert type(ours.lm_head) is TiedHead
    rows = slice(*decoder_of(ours).embed_tokens.vocab_range)
    table, own = (decoder_of(each).embed_tokens.weight.grad for each in (plain, ours))
    bias = difference(ours.lm_head.bias.grad, plain.lm_head.bias.grad)
    return [("bias", bias), ("weight", difference(own, table[rows]))]


def test_a_tied_head_with_a_bias_is_trained_from_logits() -> None:
    for found in pool(2).run(_tied_with_bias):
        assert all(each <= 1e-6 for _, each in found)


class Scored(nn.Module):
    """A user's own module around a decoder, whose labels may be given by position."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = decoder_of(tiny_model("llava"))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return (self.decoder(ids).last_hidden_state[..., 0] - labels).square().mean()


def _labels_by_position() -> list[str]:
    mesh = TP.mesh()
    ours = px.parallelize(tiny_model("llava"), mesh)
    batch = image_batch(2)
    batch["labels"] = labels = batch["labels"].roll(mesh.rank, 1)
    names = [*inspect.signature(type(ours).forward).parameters][1:]  # without self
    positional = [batch.get(name) for name in names[: names.index("labels") + 1]]
    adapted = peft.get_peft_model(
        px.parallelize(tiny_model("llava"), mesh),
        px.LoraConfig(r=2, target_modules=r".*language_model.*\.q_proj"),
    )
    scored = Scored()
    px.parallelize(scored.decoder, mesh)
    px.data_parallel(scored, mesh)
    return [
        refusal(lambda: ours(*positional)),
        refusal(lambda: adapted(**batch)),
        refusal(lambda: scored(torch.arange(18).view(2, 9), labels)),
    ]


def test_tp_ranks_with_other_labels_raise_however_these_are_given() -> None:
    words = ["they differ in labels of the model around it (other values"] * 3
    pool(2).assert_says(_labels_by_position, words=words)


def _refused() -> list[str]:
    mesh, batch = TP.mesh(), image_batch(2)
    ours = px.parallelize(tiny_model("llava"), mesh)
    fused = px.parallelize(_of_another_class(), mesh, fused_loss=True)
    text = {"input_ids": torch.arange(3, 21).view(2, 9)}
    config = peft.LoraConfig(r=2, target_modules=["lm_head"])
    adapted = peft.get_peft_model(tiny_model("llava"), config)
    return [
        *(
            refusal(lambda name=name: ours(**batch, **{name: 0.1}))
            for name in ("z_loss", "softcap")
        ),
        refusal(lambda: fused(**text, labels=text["input_ids"])),
        refusal(lambda: px.parallelize(adapted, mesh)),
    ]


def test_what_is_not_served_is_refused_by_name() -> None:
    words = [
        "z_loss: no option of LlavaForConditionalGeneration, whose loss is that of its class",
        "softcap: no option of LlavaForConditionalGeneration",
        "LlavaNextForConditionalGeneration is not known to take its loss from what the head",
        "lm_head has an adapter before; add adapters by peft.get_peft_model afterwards",
    ]
    pool(2).assert_says(_refused, words=words)


def _fused_of_gemma4() -> float:
    """Its inner model, too, is given the labels, and has no head."""
    batch = image_batch(2, "gemma4")
    ours = px.parallelize(tiny_model("gemma4"), TP.mesh(), fused_loss=True)
    return difference(ours(**batch).loss, tiny_model("gemma4")(**batch).loss)


def test_a_class_may_hand_its_labels_on() -> None:
    assert max(pool(2).run(_fused_of_gemma4)) <= 1e-6
