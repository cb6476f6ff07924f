"""A parallel model is resized as HuggingFace resizes a whole one, and trains on as that does."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import peft
import pytest
import torch
from ranks import Raised, pool
from reference import (
    Tiny,
    assert_within,
    batch,
    difference,
    mesh_of,
    parallel,
    quietly,
    shard_differences,
)
from reference_life import differences_in_life, resized, with_head_bias
from reference_lora import adapted, config
from reference_mixtral import Layout, TinyMixtral
from torch import nn

import parallel_ext as px
from parallel_ext.parallel import resize

TINY = Tiny(layers=1)  # 101 rows of 72: their covariance is positive definite
TIED = replace(TINY, tied=True)
TRAINED = {
    # the model, its mesh, whether the head has a bias, the sizes, the optimizer that goes on
    "tp=2, AdamW": (TINY, Layout(1, 2, 1), True, [131, 67], "AdamW"),
    "tp=3, SGD": (TINY, Layout(1, 3, 1), False, [131, 2, 67], "SGD"),
    "tied, tp=1": (TIED, Layout(1, 1, 1), False, [131, 67], ""),
    "tied, tp=3, AdamW": (TIED, Layout(1, 3, 1), True, [131, 2, 67], "AdamW"),
    "Mixtral, tp=2, ep=2": (
        *(TinyMixtral(num_experts=3, layers=1), Layout(1, 2, 2)),
        *(False, [131, 67], "AdamW"),
    ),
}


@pytest.mark.parametrize("case", TRAINED)
def test_training_goes_on_as_in_one_process(case: str, tmp_path: Path) -> None:
    tiny, layout, *options = TRAINED[case]
    ranks = pool(layout.world)
    assert_within(ranks.run(differences_in_life, tiny, layout, str(tmp_path), *options))


STEPS = [
    {"new_num_tokens": 130},
    {"new_num_tokens": 140, "mean_resizing": False},
    {"pad_to_multiple_of": 64},
    {"new_num_tokens": 192},
    {"new_num_tokens": 150, "pad_to_multiple_of": 16},
    {"new_num_tokens": 5},
    {"new_num_tokens": 7},  # fewer rows than columns: HuggingFace has no covariance to draw with
    {"new_num_tokens": 1},
    {"new_num_tokens": 3, "mean_resizing": False},
]


def _in_bits(tiny: Tiny, layout: Layout, bias: bool, steps: list[dict[str, Any]]) -> list[str]:
    """What differs in a bit, or in a size, from HuggingFace after each of some resizes."""
    reference = with_head_bias(tiny.model()) if bias else tiny.model()
    reference.lm_head.requires_grad_(tiny.tied)
    mesh, wrong = layout.mesh(), []
    model = parallel(reference, mesh, vocab_multiple_of=4)
    for step in steps:
        with mock.patch.object(resize, "STRIPE_BYTES", 3000):  # rows travel in several pieces
            states = [resized(each, **step) for each in (reference, model)]
        full, ours = dict(reference.named_parameters()), dict(model.named_parameters())
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        sizes = (embedding.num_embeddings, head.out_features, model.vocab_size)
        sizes += (model.config.vocab_size, model.model.vocab_size, sum(head.sizes))
        gathered = px.full_state_dict(model, writer_only=False)
        checks = {
            "the random state": torch.equal(*states),
            f"a size of {sizes}": {*sizes} == {reference.config.vocab_size},
            "padding_idx": embedding.padding_idx == reference.get_input_embeddings().padding_idx,
            "the tie": (head.weight is embedding.weight) is tiny.tied,
            "the alignment": embedding.vocab_range[0] % 4 == 0 or not len(embedding.weight),
            "what is trained": all(
                p.requires_grad is full[n].requires_grad for n, p in ours.items()
            ),
            **{n: not d for n, d in shard_differences(model, full, gradients=False).items()},
            **{f"gathered {n}": torch.equal(gathered[n], p) for n, p in full.items()},
        }
        wrong += [f"{step}: {name}" for name, right in checks.items() if not right]
    return wrong


IN_BITS = {
    "tp=3, bias": (TINY, Layout(1, 3, 1), True),
    "dp=2, tp=2, bias, bf16": (replace(TINY, dtype=torch.bfloat16), Layout(2, 2, 1), True),
    "tied, tp=4, bias": (TIED, Layout(1, 4, 1), True),
}


@pytest.mark.parametrize("case", IN_BITS)
def test_rows_are_huggingfaces_bit_for_bit_and_stay_with_their_ids(case: str) -> None:
    tiny, layout, bias = IN_BITS[case]
    assert pool(layout.world).run(_in_bits, tiny, layout, bias, STEPS) == [[]] * layout.world


def _broken(what: str) -> list[str]:
    """What the test above finds when a part of the machinery is taken out."""

    def stay(shard: torch.Tensor, layout: Any, wanted: Any, out: torch.Tensor, mesh: Any) -> None:
        out[: len(shard)] = shard[: len(out)]

    parts = {"travelling rows": ("_fetch", stay), "random state": ("_in_step", nullcontext)}
    with mock.patch.object(resize, *parts[what]):
        return _in_bits(TINY, Layout(1, 2, 1), False, STEPS[:1])


@pytest.mark.parametrize("what", ["travelling rows", "random state"])
def test_the_test_above_notices_missing(what: str) -> None:
    assert any(pool(2).run(_broken, what))


def _beside_an_adapter(folder: str) -> float:
    model = adapted(TINY, target_modules=["q_proj"])
    resized(model, 131)
    model.save_pretrained(folder, save_embedding_layers=False)
    reference = TINY.model()
    resized(reference, 131)
    reference = peft.PeftModel.from_pretrained(reference, folder)
    return difference(*(each(**batch(131)).loss.detach() for each in (model, reference)))


def test_a_model_with_adapters_elsewhere_is_resized(tmp_path: Path) -> None:
    assert max(pool(2).run(_beside_an_adapter, str(tmp_path))) <= 1e-10


def _used_on(root: str) -> tuple[float, bool]:
    """Gradients under dp=2 and a checkpoint, of a model that was resized before."""
    mesh = Layout(2, 2, 1).mesh()
    with quietly():
        model = parallel(TINY.model(), mesh)
        resized(model, 131)
        px.data_parallel(model, mesh)
        other = parallel(replace(TINY, vocab_size=131).model(seed=7), mesh)
    one = batch(131, seed=mesh.dp_rank)
    error = px.check_gradients(model, one).worst[1]
    first, second = (torch.optim.AdamW(each.parameters(), lr=0.1) for each in (model, other))
    model(**one).loss.backward()
    first.step()
    px.save_checkpoint(root, 1, model, first)
    px.load_checkpoint(root, other, second)
    full, loaded = (px.full_state_dict(each, writer_only=False) for each in (model, other))
    return error, all(torch.equal(loaded[name], full[name]) for name in full)


def test_data_parallel_and_checkpoints_know_the_new_size(tmp_path: Path) -> None:
    for error, loaded in pool(4).run(_used_on, str(tmp_path)):
        assert error <= 1e-6
        assert loaded


def _gradient_on_one_rank(model: Any) -> None:
    if mesh_of().rank == 1:
        model.lm_head.weight.grad = torch.ones_like(model.lm_head.weight)
    model.resize_token_embeddings(120)


def _untied(model: Any) -> None:
    model = parallel(TIED.model(), mesh_of())
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    model.resize_token_embeddings(120)


def _data_parallel(model: Any) -> None:
    mesh = mesh_of(tp=1)
    px.data_parallel(parallel(TINY.model(), mesh), mesh).resize_token_embeddings(120)


def _old_optimizer(model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.resize_token_embeddings(102)
    model(**batch(102)).loss.backward()
    optimizer.step()


def _factored_states(model: Any) -> None:
    optimizer = px.Adafactor(model)
    model(**batch(101)).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    model.resize_token_embeddings(120, optimizer=optimizer)


def _other_states(model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(**batch(101)).loss.backward()
    if mesh_of().rank == 0:
        optimizer.step()
    optimizer.zero_grad()
    model.resize_token_embeddings(120, optimizer=optimizer)


def _id_that_is_gone(model: Any) -> None:
    model.resize_token_embeddings(67, allow_fewer_rows=True)
    model(torch.full((1, 3), 67))


REFUSED: dict[str, tuple[Callable[[Any], object], str, str]] = {
    "as many rows as a rank has": (  # the idiom of scripts, by the rows of its shard
        lambda model: model.resize_token_embeddings(51),
        *("ValueError", "tokens would drop 50 of 101 rows; embedding.weight has"),
    ),
    "other sizes": (
        lambda model: model.resize_token_embeddings(120 + mesh_of().rank),
        "DisagreementError",
        "new_num_tokens must be equal on all ranks, but is 120 on rank 0 and 121 on",
    ),
    "no integer": (
        lambda model: model.resize_token_embeddings(0),
        *("ValueError", "new_num_tokens must be an integer of at least 1, got 0"),
    ),
    "no multiple": (
        lambda model: model.resize_token_embeddings(120, pad_to_multiple_of=-8),
        *("ValueError", "pad_to_multiple_of must be an integer of at least 1, got -8"),
    ),
    "optimizer on one rank": (
        lambda model: model.resize_token_embeddings(
            120, optimizer=None if mesh_of().rank else torch.optim.SGD(model.parameters())
        ),
        *("DisagreementError", "but is 'SGD' on rank 0 and None on rank 1"),
    ),
    "factored states": (
        _factored_states,
        *("RuntimeError", "holds col_var of model.embed_tokens.weight in the shape"),
    ),
    "other states": (
        _other_states,
        "DisagreementError",
        "the optimizer's state of lm_head.weight must be equal on all ranks, but is",
    ),
    "gradient on one rank": (
        _gradient_on_one_rank,
        *("RuntimeError", "lm_head.weight has a gradient, which would be lost"),
    ),
    "untied": (
        _untied,
        *("RuntimeError", "embedding and head were tied when the model was made parallel"),
    ),
    "adapter on the head": (
        lambda model: peft.get_peft_model(
            model, config(target_modules=["lm_head"])
        ).resize_token_embeddings(120),
        *("RuntimeError", "lm_head is a LoraVocabHead; resize before an adapter"),
    ),
    "data parallel": (
        _data_parallel,
        *("RuntimeError", "px.data_parallel has sharded the rows over the dp ranks"),
    ),
    "an id that is gone": (
        _id_that_is_gone,
        *("IndexError", "id 67 at position 0 is outside the vocabulary [0, 67)"),
    ),
    "old optimizer": (
        _old_optimizer,
        *("RuntimeError", "was built before resize_token_embeddings and still holds"),
    ),
}


def _refused(case: str) -> tuple[str, str, bool]:
    """The error, and whether the model is as it was."""
    model = parallel(TINY.model(), mesh_of())
    before = model.lm_head.weight, model.model.embed_tokens.weight, model.config.vocab_size
    raised: Raised | None = None
    try:
        REFUSED[case][0](model)
    except Exception as error:
        raised = Raised(error)
    head = getattr(model.lm_head, "base_layer", model.lm_head).weight
    after = head, model.model.embed_tokens.weight, model.config.vocab_size
    same = all(one is other for one, other in zip(before, after, strict=True))
    return raised.type, raised.text, same


@pytest.mark.parametrize("case", REFUSED)
def test_every_rank_raises_why_it_is_refused(case: str) -> None:
    _, kind, words = REFUSED[case]
    for raised, text, same in pool(2).run(_refused, case):
        assert raised == kind
        assert words in text
        assert same or case in ("an id that is gone", "old optimizer")
