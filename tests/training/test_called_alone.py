"""The embedding called by a user's own code, in front of a model at dp > 1, and its head behind."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import peft
import pytest
import torch
from ranks import pool
from reference import FLOOR, Tiny, quietly, refusal
from reference_mixtral import Layout, TinyMixtral
from reference_training import difference_trained, full_difference
from torch import nn

import parallel_ext as px

TINY = Tiny(bias=True)
WIDTH = 8 * TINY.heads
EXACT = FLOOR[torch.float64]
LORA = {"r": 3, "lora_alpha": 5, "init_lora_weights": False}
ADAPTERS = {
    "adapted": peft.LoraConfig(target_modules=["embed_tokens", "lm_head"], **LORA),
    "rows of tokens": peft.LoraConfig(
        target_modules=["q_proj"],
        trainable_token_indices={"embed_tokens": [90, 3], "lm_head": [7, 2]},
        **LORA,
    ),
}


class WithImages(nn.Module):
    """A language model that is given the features of an image in front of a text."""

    def __init__(self, model: nn.Module, calls_head: bool) -> None:
        super().__init__()
        self.model, self.calls_head = model, calls_head
        torch.manual_seed(2)
        self.projector = nn.Linear(5, WIDTH).to(model.dtype)

    def forward(self, ids: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
        embeds = self.model.get_input_embeddings()(ids)
        embeds = torch.cat([self.projector(images), embeds], dim=1)
        labels = torch.cat([ids.new_full(images.shape[:2], -100), ids], dim=1)
        out = self.model(inputs_embeds=embeds, labels=labels, output_hidden_states=self.calls_head)
        if not self.calls_head:
            return out.loss
        logits = self.model.get_output_embeddings()(out.hidden_states[-1])
        return out.loss + 0.1 * logits.logsumexp(-1).mean()


def pair(kind: str, mesh: px.Mesh, zero: int, **options: Any) -> tuple[WithImages, WithImages]:
    """The module in one process, and the same around a parallel model."""
    if kind == "mixtral":
        plain = TinyMixtral(heads=TINY.heads, key_value_heads=3, vocab_size=101).model()
    else:
        plain = replace(TINY, tied=kind == "tied").model()
    reference = WithImages(plain, calls_head=not options)
    ours = copy.deepcopy(reference)
    vars(ours.model).pop("_loss_function", None)  # that of one process, in fp64
    with quietly():
        px.parallelize(ours.model, mesh, **options)
        if kind in ADAPTERS:
            for module in (reference, ours):
                module.model = peft.get_peft_model(module.model, copy.deepcopy(ADAPTERS[kind]))
            drawn = peft.get_peft_model_state_dict(reference.model)
            peft.set_peft_model_state_dict(ours.model, drawn)
        px.data_parallel(ours, mesh, zero)
    return reference, ours


def batches(
    reference: WithImages, ours: WithImages, mesh: px.Mesh, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of twelve rows in one process, and of this dp rank's share of them."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 101, (12, 5), generator=generator)
    images = torch.randn(12, 2, 5, generator=generator).double()
    own = slice(*(12 * rank // mesh.dp_size for rank in (mesh.dp_rank, mesh.dp_rank + 1)))
    return reference(ids, images), ours(ids[own], images[own])


def _trained(kind: str, layout: Layout, zero: int, how: str, **options: Any) -> float:
    mesh = layout.mesh()
    reference, ours = pair(kind, mesh, zero, **options)
    if how == "frozen":
        for module in (reference, ours):
            module.model.requires_grad_(False)

    def losses(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        theirs, own = batches(reference, ours, mesh, number)
        if how == "together":  # a forward has left gathered weights in the model
            further = batches(reference, ours, mesh, 100 + number)
            theirs, own = theirs + further[0], own + further[1]
        return theirs, own

    return difference_trained(reference, ours, losses, how == "accumulated")


@pytest.mark.parametrize(
    ("kind", "layout", "zero"),
    [
        *(("tied", Layout(1, 2, 1), 2), ("tied", Layout(2, 1, 1), 2), ("tied", Layout(3, 1, 1), 3)),
        *(("tied", Layout(2, 2, 1), 3), ("untied", Layout(2, 2, 1), 3)),
        ("mixtral", Layout(2, 2, 2), 2),
    ],
    ids=str,
)
def test_embeddings_in_front_of_the_model(kind: str, layout: Layout, zero: int) -> None:
    assert max(pool(layout.world).run(_trained, kind, layout, zero, "")) <= EXACT


@pytest.mark.parametrize(
    ("kind", "how"),
    [("tied", "frozen"), ("tied", "accumulated"), ("tied", "together"), ("untied", "together")],
)
def test_frozen_models_and_several_batches(kind: str, how: str) -> None:
    assert max(pool(4).run(_trained, kind, Layout(2, 2, 1), 2, how)) <= EXACT


def _adapted(kind: str, layout: Layout, zero: int) -> float:
    """What is merged after three steps of adapters on the embedding and the head."""
    mesh = layout.mesh()
    models = reference, ours = pair(kind, mesh, zero)
    for step in range(3):
        for loss in batches(reference, ours, mesh, step):
            loss.backward()
        for model in models:
            trained = [p for p in model.parameters() if p.requires_grad]
            torch.optim.SGD(trained, lr=0.1).step()
            model.zero_grad()
    return full_difference(*(model.model.merge_and_unload() for model in (ours, reference)))


@pytest.mark.parametrize(("layout", "zero"), [(Layout(2, 1, 1), 2), (Layout(2, 2, 1), 3)], ids=str)
@pytest.mark.parametrize("kind", ADAPTERS)
def test_adapters_of_the_embedding_and_the_head(kind: str, layout: Layout, zero: int) -> None:
    assert max(pool(layout.world).run(_adapted, kind, layout, zero)) <= EXACT


def _backward_twice(layout: Layout, zero: int) -> float:
    """Gradients of two backwards through one graph, of which the second counts double."""
    mesh = layout.mesh()
    models = reference, ours = pair("untied", mesh, zero)
    for loss in batches(reference, ours, mesh, 1):
        loss.backward(retain_graph=True)
        (2 * loss).backward()
    for model in models:
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    return full_difference(ours, reference)


@pytest.mark.parametrize(("layout", "zero"), [(Layout(2, 1, 1), 2), (Layout(2, 2, 1), 2)], ids=str)
def test_a_second_backward_through_one_graph_adds_its_own_gradients(
    layout: Layout, zero: int
) -> None:
    assert max(pool(layout.world).run(_backward_twice, layout, zero)) <= EXACT


def _with_own_tokens() -> float:
    return _trained("untied", Layout(2, 2, 1), 2, "", sequence_parallel=True)


def test_sequence_parallelism() -> None:
    assert max(pool(4).run(_with_own_tokens)) <= EXACT


def _refusals() -> dict[str, Any]:
    mesh = Layout(2, 1, 1).mesh()
    ours = pair("untied", mesh, 2)[1].model
    ids = torch.full((1, 3), 5)
    found = {
        "part": refusal(lambda: ours.model(ids)),
        "forward": refusal(lambda: ours.forward(ids)),
    }
    weight = ours.get_input_embeddings().weight
    handle = weight.register_post_accumulate_grad_hook(lambda parameter: None)
    found["hooks"] = refusal(lambda: ours.get_input_embeddings()(ids))
    handle.remove()
    found["served"] = refusal(lambda: ours(ids, labels=ids).loss.backward())
    invariant = TINY.model()
    del invariant._loss_function
    with quietly():
        px.parallelize(invariant, mesh, invariant=px.Invariant(blocks=3, leaves=2))
    px.data_parallel(invariant, mesh)
    found["invariant"] = refusal(lambda: invariant.get_input_embeddings()(ids))
    return found


def test_what_is_refused() -> None:
    for found in pool(2).run(_refusals):
        for each in ("part", "forward"):
            assert "call the model itself, not model.forward(...) or a part of it" in found[each]
        assert (
            "a weight, of a module called outside of the model, has gradient hooks"
            in found["hooks"]
        )
        assert found["served"] == "nothing was raised"
        assert "px.Invariant with several dp ranks does not serve a call" in found["invariant"]
