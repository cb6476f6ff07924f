"""TRL's fused output head on a parallel model, beside TRL on one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import pool
from reference import (
    Tiny,
    batch,
    difference,
    gradients_of,
    parallel,
    refusal,
    shard_differences,
    worst,
)
from reference_images import image_batch, parallel_pair
from reference_mixtral import Layout, TinyMixtral
from reference_training import full_difference

import parallel_ext as px

trl_utils = pytest.importorskip("trl.trainer.utils")

FIELDS = ("log_probs", "entropy", "mean_logits", "is_top1", "log_sum_sq_probs")
TINY = Tiny(bias=True)


def _differences(tp: int, temperature: float, dft: bool) -> dict[str, float]:
    """The largest differences of the fields and gradients from those of TRL in one process."""
    mesh = px.init_mesh(tp=tp)
    reference = TINY.model()
    model = parallel(reference, mesh)
    if mesh.dp_size > 1:
        px.data_parallel(model, mesh)
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(0, TINY.vocab_size, (4, 9), generator=generator)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.4, -100)
    results = []
    for each in (reference, model):
        trl_utils.add_fused_lm_head(each, temperature, outputs=FIELDS)
        rows = slice(None)
        if each is model:
            rows = slice(mesh.dp_rank, None, mesh.dp_size)
        output = each(input_ids=ids[rows], labels=labels[rows], fused_lm_head=True)
        per_token = output.log_probs * (output.log_probs.exp().detach() if dft else 1.0)
        dp = mesh.dp_size if each is model else 1
        (-per_token.sum() * dp / 17 + output.entropy.sum() * dp / 31).backward()
        results.append(output)
    plain, own = results
    rows = slice(mesh.dp_rank, None, mesh.dp_size)
    differences = {
        name: (getattr(own, name).double() - getattr(plain, name)[rows].double()).abs().max().item()
        for name in (*FIELDS, "label_mask")
    }
    own_loss = -own.log_probs.sum() / own.label_mask.sum()
    differences["loss"] = (own.loss - own_loss).abs().item()
    gradients = shard_differences(model, gradients_of(reference), True)
    return {**differences, "gradients": worst(gradients)[0]}


@pytest.mark.parametrize("dft", [False, True])
@pytest.mark.parametrize(("tp", "temperature"), [(1, 1.0), (2, 1.0), (2, 0.7)])
def test_the_fused_head_equals_trl_in_one_process(tp: int, temperature: float, dft: bool) -> None:
    for differences in pool(2).run(_differences, tp, temperature, dft):
        for name, error in differences.items():
            assert error < 1e-5, (name, error)


def _of_a_mixture(tp: int, count: int | None, shifted: bool, asked: dict[str, bool]) -> list[float]:
    """How far loss, balance loss and gradients are from those of TRL in one process.

    With a ``count``, by which TRL's trainer takes the sum of the dp ranks' losses for their mean.
    """
    tiny = TinyMixtral(balance=not asked)
    reference, mesh = tiny.model(), px.init_mesh(tp=tp)
    model = parallel(reference, mesh)
    if mesh.dp_size > 1:
        px.data_parallel(model, mesh)
    inputs = batch(tiny.vocab_size)
    labels = inputs.pop("labels")
    inputs |= {"shift_labels": labels} if shifted else {"labels": labels}
    own_rows = {name: value[mesh.dp_rank :: mesh.dp_size] for name, value in inputs.items()}
    outputs = []
    for each, given, dp in ((reference, inputs, 1), (model, own_rows, mesh.dp_size)):
        trl_utils.add_fused_lm_head(each)
        divisor = None if count is None else count / dp
        outputs.append(each(**given, **asked, num_items_in_batch=divisor, fused_lm_head=True))
        outputs[-1].loss.backward()
    plain, own = outputs
    found = torch.stack([own.loss.detach(), own.aux_loss.detach()])
    if mesh.dp_size > 1:
        dist.all_reduce(found)
    loss, balance = found / mesh.dp_size
    differences = [difference(loss, plain.loss), difference(balance, plain.aux_loss)]
    gradients = shard_differences(model, gradients_of(reference), True)
    return [*differences, worst(gradients)[0]]


@pytest.mark.parametrize(
    ("tp", "count", "shifted", "asked"),
    [
        (2, None, False, {"output_router_logits": True}),
        (2, 23, True, {}),
        (1, None, True, {}),
        (1, 23, False, {}),
    ],
    ids=["asked for", "by the configuration", "of one rank", "of dp ranks"],
)
def test_a_mixture_adds_its_balance_loss(
    tp: int, count: int | None, shifted: bool, asked: dict[str, bool]
) -> None:
    ranks = 1 if tp == 1 and count is None else 2
    for differences in pool(ranks).run(_of_a_mixture, tp, count, shifted, asked):
        assert max(differences) < 1e-5


def _around(kind: str, layout: Layout, temperature: float) -> dict[str, float]:
    """The largest differences of fields, and of weights after a step, of a model of images."""
    mesh = layout.mesh()
    models = parallel_pair(kind, mesh)
    dp_ranks, results = (1, mesh.dp_size), []
    rows = [slice(None), slice(mesh.dp_rank, None, mesh.dp_size)]
    inputs = image_batch(4, kind, answers=True)
    for each, own, dp in zip(models, rows, dp_ranks, strict=True):
        trl_utils.add_fused_lm_head(each, temperature, outputs=FIELDS)
        given = {name: value[own] for name, value in inputs.items()}
        output = each(**given, fused_lm_head=True)
        (-output.log_probs.sum() * dp / 17 + output.entropy.sum() * dp / 31).backward()
        torch.optim.SGD(each.parameters(), lr=0.1).step()
        results.append(output)
    plain, ours = results
    found = {
        name: difference(getattr(ours, name).double(), getattr(plain, name)[rows[1]].double())
        for name in (*FIELDS, "label_mask")
    }
    of_loss = -ours.log_probs.sum() / ours.label_mask.sum()
    return {
        **found,
        "loss": difference(ours.loss, of_loss),
        "weights": full_difference(*models[::-1]),
    }


@pytest.mark.parametrize(
    ("kind", "layout", "temperature"),
    [
        *(("llava", Layout(1, 2, 1), 0.7), ("llava", Layout(2, 2, 1), 1.0)),
        *(("tied llava", Layout(1, 2, 1), 1.0), ("tied llava", Layout(2, 2, 1), 0.7)),
        ("qwen2_vl", Layout(1, 2, 1), 1.0),
    ],
    ids=str,
)
def test_the_fused_head_of_a_model_of_images(kind: str, layout: Layout, temperature: float) -> None:
    for differences in pool(layout.world).run(_around, kind, layout, temperature):
        for name, error in differences.items():
            assert error < 1e-5, (name, error)


def _refused_around() -> list[str]:
    mesh = Layout(1, 2, 1).mesh()
    found = []
    for kind in ("llava", "qwen3_vl_moe"):
        ours = parallel_pair(kind, mesh)[1]
        trl_utils.add_fused_lm_head(ours)
        inputs = image_batch(2, kind)
        more = {"output_router_logits": True} if kind == "qwen3_vl_moe" else {}
        if kind == "llava":  # tp ranks with other labels
            inputs["labels"][0, -1] = 3 + mesh.tp_rank
        found.append(refusal(lambda: ours(**inputs, **more, fused_lm_head=True)))  # noqa: B023
    capped = parallel_pair("gemma3", mesh)[1]
    capped.config.get_text_config().final_logit_softcapping = 30.0
    return [*found, refusal(lambda: trl_utils.add_fused_lm_head(capped))]


def test_what_is_refused_of_a_model_of_images() -> None:
    words = [
        "labels of the model around it",
        "a load balancing loss is not supported; pass output_router_logits=False",
        "changes its logits, which is not supported",
    ]
    pool(2).assert_says(_refused_around, words=words)
