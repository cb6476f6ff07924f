"""Models of images and text, around a parallel decoder, that get another number of tokens."""

from __future__ import annotations

import pytest
import torch
from ranks import pool
from reference import difference, refusal
from reference_images import decoder_of, losses_of, parallel_pair, tiny_model
from reference_mixtral import Layout
from torch import nn

import parallel_ext as px

RESIZES = [
    {"new_num_tokens": 131},
    {"pad_to_multiple_of": 64, "mean_resizing": False},
    {"new_num_tokens": 80},
    {"new_num_tokens": 110},
]


def _resized(kind: str, layout: Layout) -> tuple[float, float]:
    """As ``_trained``, of a model with another number of tokens; its rows are compared in bits."""
    mesh = layout.mesh()
    models = reference, ours = tiny_model(kind), tiny_model(kind)
    px.parallelize(decoder_of(ours), mesh)
    reference.get_output_embeddings().weight.requires_grad_(kind != "llava")
    ours.get_output_embeddings().weight.requires_grad_(kind != "llava")
    for sizes in RESIZES:
        states = []
        for model in models:
            torch.manual_seed(3)
            model.resize_token_embeddings(**sizes)
            states.append(torch.get_rng_state())
        assert torch.equal(*states)
        rows = reference.config.get_text_config().vocab_size
        head = ours.get_output_embeddings()
        assert {ours.get_input_embeddings().num_embeddings, ours.vocab_size} == {rows}
        assert ours.config.to_dict() == reference.config.to_dict()
        assert getattr(head, "out_features", rows) == rows
        assert head.weight.requires_grad == (kind != "llava")
        assert ours.num_parameters() == reference.num_parameters()
        full = px.full_state_dict(ours, writer_only=False)
        assert all(torch.equal(full[n], each) for n, each in reference.state_dict().items())
    px.data_parallel(ours, mesh)
    losses = losses_of(kind, models, mesh, 0)
    mean = losses[1].detach().clone()
    torch.distributed.all_reduce(mean)
    for loss, model in zip(losses, models, strict=True):
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    full, expected = px.full_state_dict(ours, writer_only=False), reference.state_dict()
    worst = max((full[n] - each).abs().max().item() for n, each in expected.items())
    return difference(mean / mesh.world_size, losses[0]), worst


@pytest.mark.parametrize(
    ("kind", "layout"),
    [("llava", Layout(1, 2, 1)), ("gemma3", Layout(2, 2, 1)), ("qwen2_vl", Layout(2, 1, 1))],
)
def test_another_number_of_tokens_is_that_of_one_process(kind: str, layout: Layout) -> None:
    for of_losses, of_weights in pool(layout.world).run(_resized, kind, layout):
        assert of_losses <= 1e-6
        assert of_weights <= 1e-7


def _not_resized() -> list[str]:
    _, ours = parallel_pair("llava", (mesh := Layout(1, 2, 1).mesh()))
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    two = nn.ModuleList(decoder_of(tiny_model("llava")) for _ in range(2))
    for each in two:
        px.parallelize(each, mesh)
    several = tiny_model("llava")
    px.parallelize(decoder_of(several), mesh)
    several.second = two[0]
    texts = [
        refusal(lambda: ours.resize_token_embeddings(131, optimizer=optimizer)),
        refusal(lambda: ours.resize_token_embeddings(60)),
        refusal(lambda: several.resize_token_embeddings(131)),
        refusal(lambda: decoder_of(ours).resize_token_embeddings(131)),
    ]
    assert ours.lm_head.out_features == ours.get_input_embeddings().num_embeddings == 101
    ours.resize_token_embeddings(131)
    return [*texts, refusal(optimizer.step)]


def test_a_size_that_cannot_be_had_is_refused_by_name() -> None:
    words = [
        "build the optimizer afterwards",
        "60 tokens would drop 41 of 101 rows",
        "holds one parallel decoder, not model.language_model, second",
        "resize before px.parallelize",
        "build the optimizer from the parallel model",
    ]
    pool(2).assert_says(_not_resized, words=words)
