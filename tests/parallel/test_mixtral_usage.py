"""What users of a Mixtral do beside plain training: other seeds, other masks, adapters."""

from __future__ import annotations

import pytest
import torch
from ranks import pool
from reference import (
    assert_within,
    gradient_differences,
    gradients_of,
    parallel,
    shard_differences,
    worst,
)
from reference_mixtral import Layout, TinyMixtral, adapted_pair, batches, own_batch, spread

import parallel_ext as px

LAYOUT = Layout(2, 1, 2)


def _only_padding() -> tuple[float, str]:
    """The balance loss where one dp rank has no valid token."""
    tiny = TinyMixtral(num_experts=5, balance=True, skew="zipf")
    reference, model, mesh = spread(tiny, LAYOUT)
    whole, own = batches(tiny, 2)
    for name, value in (("attention_mask", 0), ("labels", -100)):
        whole[name][2:] = value  # of which ``own`` has views
    return worst(gradient_differences(reference, model, whole, own[mesh.dp_rank]))


def test_a_rank_without_valid_tokens_adds_nothing_to_the_balance_loss() -> None:
    assert_within(pool(2).run(_only_padding))


def _seeded_alike(layout: Layout, reentrant: bool) -> tuple[float, str]:
    """Two forwards from one seed, as for equal dropout in a pair, before one backward."""
    tiny = TinyMixtral(num_experts=5)
    reference, model, mesh = spread(tiny, layout)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    losses = []
    for seed in (3, 4):
        whole, own = own_batch(tiny, mesh, seed)
        reference(**whole).loss.backward()
        torch.manual_seed(17)
        losses.append(model(**own).loss)
    sum(losses).backward()
    return worst(shard_differences(model, gradients_of(reference), True))


@pytest.mark.parametrize(
    ("layout", "reentrant"), [(LAYOUT, False), (Layout(1, 2, 2), False), (Layout(1, 2, 2), True)]
)
def test_forwards_from_one_seed_keep_their_own_choices(layout: Layout, reentrant: bool) -> None:
    assert_within(pool(2).run(_seeded_alike, layout, reentrant))


def test_several_reentrant_forwards_before_a_backward_are_refused_with_fsdp() -> None:
    words = 'gradient_checkpointing_enable({"use_reentrant": False})'
    pool(2).assert_raises(_seeded_alike, LAYOUT, True, words=words)


def _jitter_and_dropout() -> None:
    options = (("router_jitter_noise", 0.1), ("attention_dropout", 0.1))
    parallel(
        TinyMixtral(options=options).model(),
        Layout(1, 2, 1).mesh(),
        allow_different_dropout=True,
    )


def test_jitter_with_other_dropout_under_tp_is_refused() -> None:
    words = "router_jitter_noise and attention_dropout are both set"
    pool(2).assert_raises(_jitter_and_dropout, words=words)


def _adapter(layout: Layout, trained: str) -> dict[str, float]:
    """Gradients of an adapter, and of what else is trained, against PEFT's in one process."""
    tiny, mesh = TinyMixtral(num_experts=5, key_value_heads=1), layout.mesh()
    whole = ["lm_head"] if trained == "the head" else None
    targets = ["q_proj", "v_proj", "o_proj", *(["lm_head"] if trained == "the adapter" else [])]
    plain, model = adapted_pair(
        tiny.model, mesh, r=5, lora_alpha=7, target_modules=targets, modules_to_save=whole
    )
    for each in (model, plain):
        for name, parameter in each.named_parameters():
            if trained == "experts" and "experts" in name:
                parameter.requires_grad_()
            elif trained == "an adapter that was frozen" and each is model and "lora_" in name:
                parameter.requires_grad_(False)
    px.data_parallel(model, mesh)
    if trained == "an adapter that was frozen":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_" in name)
    return gradient_differences(plain, model, *own_batch(tiny, mesh))


@pytest.mark.parametrize(
    ("layout", "trained"),
    [
        *((LAYOUT, "experts"), (LAYOUT, "an adapter that was frozen")),
        *((Layout(2, 2, 4), "the adapter"), (Layout(2, 2, 4), "the head")),
    ],
    ids=str,
)
def test_adapters_on_the_attention(layout: Layout, trained: str) -> None:
    # the factors are fp32, in PEFT's default as well
    assert_within(pool(layout.world).run(_adapter, layout, trained), 1e-5)


def _forward_inside_backward() -> tuple[float, float]:
    """A loss as it is, and as a gradient hook computes it while the model recomputes layers."""
    tiny, inside = TinyMixtral(num_experts=5), []
    model = parallel(tiny.model(), Layout(1, 2, 2).mesh())
    model.gradient_checkpointing_enable({"use_reentrant": False})
    data = batches(tiny, 1)[0]
    loss = model(**data).loss
    loss.register_hook(lambda _: inside.append(model(**data).loss.item()))
    loss.backward()
    return loss.item(), inside[0]


def test_a_forward_inside_a_backward_chooses_its_own_experts() -> None:
    for outside, inside in pool(2).run(_forward_inside_backward):
        assert inside == outside
