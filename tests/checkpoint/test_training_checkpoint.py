"""A job that is resumed continues as if it had never stopped, on any layout."""

from __future__ import annotations

import json
import random
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
from ranks import pool
from reference import assert_within, batch, parallel, quietly, shard_differences, worst
from reference_cogagent import batches_of, picture, text, tiny_model
from reference_cogagent import exact as exact_cogagent
from reference_mixtral import Layout
from reference_training import (
    LLAMA,
    MIXTRAL,
    OTHERS,
    TIED,
    Job,
    build,
    one_step,
    optimizer_of,
    scheduler_of,
    train,
)
from torch import nn

import parallel_ext as px
from parallel_ext.checkpoint.rng import seed_of
from parallel_ext.sharding.named_shards import named_shards, to_shards
from parallel_ext.sharding.slices import local_part


def _single_process(job: Job, steps: int) -> nn.Module:
    model = job.tiny.model()
    optimizer = optimizer_of(model, job.optimizer)
    scheduler = scheduler_of(optimizer)
    for step in range(steps):
        whole = batch(model.config.vocab_size, rows=4, tokens=6, seed=step)
        one_step(model, optimizer, scheduler, whole)
    return model


# Training continues.


def _save_after_two_steps(job: Job, root: Path) -> None:
    model, optimizer, scheduler, mesh = build(job)
    train(model, optimizer, scheduler, mesh, range(2))
    path = px.save_checkpoint(root, 2, model, optimizer, scheduler, {"samples": 8})
    assert path == root / "step-00000002"


def _go_on(job: Job, root: Path) -> tuple[float, str]:
    """Two more steps, from other weights than the saved ones; how far this is from one process."""
    model, optimizer, scheduler, mesh = build(job, seed=5)
    with quietly():  # of other random numbers
        resumed = px.load_checkpoint(root, model, optimizer, scheduler)
    assert (resumed.step, resumed.data_state) == (2, {"samples": 8})
    train(model, optimizer, scheduler, mesh, range(2, 4))
    reference = _single_process(job, 4)
    return worst(shard_differences(model, dict(reference.named_parameters()), False))


CHANGES = [
    (Job(layout=Layout(1, 1, 1)), Job(layout=Layout(1, 2, 1))),
    (Job(layout=Layout(1, 2, 1)), Job(layout=Layout(2, 1, 1), zero=3)),
    (Job(layout=Layout(2, 2, 1), zero=3), Job(layout=Layout(1, 3, 1))),
    (Job(TIED, Layout(1, 3, 1)), Job(TIED, Layout(2, 2, 1), zero=2)),
    (Job(TIED, Layout(4, 1, 1), zero=3), Job(TIED, Layout(1, 2, 1))),
    (
        Job(replace(LLAMA, vocab_size=5), Layout(2, 2, 1), 2, vocab_multiple_of=64),
        Job(replace(LLAMA, vocab_size=5), Layout(1, 4, 1)),
    ),
    (Job(layout=Layout(2, 1, 1), zero=2, optimizer="SGD"), Job(layout=Layout(1, 2, 1))),
    (Job(layout=Layout(1, 2, 1), optimizer="amsgrad"), Job(layout=Layout(2, 1, 1), zero=2)),
    (Job(MIXTRAL, Layout(1, 2, 2)), Job(MIXTRAL, Layout(2, 1, 2), zero=3)),
    (Job(MIXTRAL, Layout(2, 2, 4), zero=2), Job(MIXTRAL, Layout(1, 1, 1))),
    (Job(MIXTRAL, Layout(1, 1, 1)), Job(MIXTRAL, Layout(2, 2, 4), zero=3)),
    (Job(MIXTRAL, Layout(1, 3, 3)), Job(MIXTRAL, Layout(2, 1, 1), zero=2)),
    (Job(layout=Layout(1, 2, 1), optimizer="px.Adafactor"), Job(layout=Layout(2, 2, 1), zero=3)),
    (
        Job(replace(TIED, vocab_size=5), Layout(2, 2, 1), 2, "px.Adafactor", vocab_multiple_of=64),
        Job(replace(TIED, vocab_size=5), Layout(1, 3, 1)),
    ),
    (Job(MIXTRAL, Layout(1, 2, 2), None, "px.Adafactor"), Job(MIXTRAL, Layout(2, 1, 2), 2)),
    *(
        (Job(layout=Layout(1, 2, 1), optimizer=name), Job(layout=Layout(2, 1, 1), zero=2))
        for name in (*OTHERS, "Signed", "SignedSGD")
    ),
    (Job(layout=Layout(1, 2, 1), optimizer="Rprop"), Job(layout=Layout(1, 3, 1))),  # FSDP cannot
]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("before", "after"), CHANGES, ids=str)
def test_training_goes_on_as_in_one_process(before: Job, after: Job, tmp_path: Path) -> None:
    pool(before.layout.world).run(_save_after_two_steps, before, tmp_path)
    after = replace(after, optimizer=before.optimizer)
    assert_within(pool(after.layout.world).run(_go_on, after, tmp_path), 1e-9)


def test_torchs_adafactor_goes_on_as_ours_on_shards(tmp_path: Path) -> None:
    pool(1).run(_save_after_two_steps, Job(MIXTRAL, optimizer="Adafactor"), tmp_path)
    after = Job(MIXTRAL, Layout(1, 2, 1), optimizer="px.Adafactor")
    assert_within(pool(2).run(_go_on, after, tmp_path), 1e-9)


def _cogagent(layout: Layout, zero: int | None) -> tuple[Any, Any, px.Mesh]:
    mesh = layout.mesh()
    model = parallel(tiny_model(), mesh).train()
    if zero:
        px.data_parallel(model, mesh, zero)
    return model, optimizer_of(model, "AdamW"), mesh


# The towers see images in the second and the fourth step only, so that their ``step`` is another.
IMAGES = [[[text(9)], [text(7)]], [[picture(6)], [text(9)]]] * 2


def _train_on_images(model: Any, optimizer: Any, dp: int, dp_rank: int, steps: range) -> None:
    for step in steps:
        whole, own = batches_of(IMAGES[step])
        one_step(model, optimizer, mock.Mock(), whole if dp == 1 else own[dp_rank])


def _save_on_images(layout: Layout, zero: int | None, root: Path) -> None:
    model, optimizer, mesh = _cogagent(layout, zero)
    _train_on_images(model, optimizer, mesh.dp_size, mesh.dp_rank, range(2))
    px.save_checkpoint(root, 2, model, optimizer)


def _go_on_on_images(layout: Layout, zero: int | None, root: Path) -> tuple[float, str]:
    model, optimizer, mesh = _cogagent(layout, zero)
    with quietly():
        px.load_checkpoint(root, model, optimizer)
    _train_on_images(model, optimizer, mesh.dp_size, mesh.dp_rank, range(2, 4))
    reference = exact_cogagent(tiny_model()).train()
    _train_on_images(reference, optimizer_of(reference, "AdamW"), 1, 0, range(4))
    return worst(shard_differences(model, dict(reference.named_parameters()), False))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((Layout(1, 2, 1), None), (Layout(2, 1, 1), 3)),
        ((Layout(2, 2, 1), 2), (Layout(1, 1, 1), None)),
    ],
    ids=str,
)
def test_a_cogagent_goes_on_as_in_one_process(before: Any, after: Any, tmp_path: Path) -> None:
    pool(before[0].world).run(_save_on_images, *before, tmp_path)
    loop = json.loads((tmp_path / "step-00000002/parallel_state/loop.json").read_text())
    number = loop["optimizer"]["numbers"]["step"]
    assert {number["most"], *number["others"].values()} >= {1.0, 2.0}
    assert_within(pool(after[0].world).run(_go_on_on_images, *after, tmp_path), 1e-9)


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Copies of all that this rank trains with."""
    to_shards(model)
    kept = {}
    for name, parameter, _ in named_shards(model):
        kept[name] = local_part(parameter.detach()).clone()
        for key, value in optimizer.state[parameter].items():
            kept[f"{key} of {name}"] = local_part(value).clone()
    return kept


def _draw() -> list[float]:
    return [torch.rand(()).item(), random.gauss(0, 1), numpy.random.standard_normal()]


def _on_the_same_mesh(job: Job, root: Path) -> tuple[list[str], bool, bool]:
    """What differs after two steps from before, and whether the same numbers are drawn."""
    model, optimizer, scheduler, mesh = build(job)
    train(model, optimizer, scheduler, mesh, range(2))
    for seed in (torch.manual_seed, random.seed, numpy.random.seed):
        seed(17 + mesh.rank)
    _draw()  # leaves half of a pair of normal numbers in two of the generators
    px.save_checkpoint(root, 2, model, optimizer, scheduler)
    expected = _draw()
    train(model, optimizer, scheduler, mesh, range(2, 4))
    uninterrupted = _state(model, optimizer)
    rates = scheduler.get_last_lr()

    model, optimizer, scheduler, mesh = build(job, seed=5)
    resumed = px.load_checkpoint(root, model, optimizer, scheduler)
    drawn = _draw()
    train(model, optimizer, scheduler, mesh, range(2, 4))
    again = _state(model, optimizer)
    assert again.keys() == uninterrupted.keys()
    differing = [n for n, value in again.items() if not torch.equal(value, uninterrupted[n])]
    differing += [] if rates == scheduler.get_last_lr() else ["learning rates"]
    return differing, drawn == expected, resumed.same_random_numbers


@pytest.mark.parametrize(
    "job",
    [
        Job(),
        Job(layout=Layout(1, 2, 1)),
        Job(TIED, Layout(2, 1, 1), zero=2),
        Job(layout=Layout(2, 2, 1), zero=3),
        Job(MIXTRAL, Layout(2, 1, 2), zero=3),
        Job(MIXTRAL, Layout(2, 1, 2), zero=2, optimizer="SGD"),
        Job(optimizer="Adafactor"),
        Job(layout=Layout(1, 2, 1), optimizer="px.Adafactor"),
    ],
    ids=str,
)
def test_on_the_same_mesh_every_bit_is_that_of_the_uninterrupted_run(
    job: Job, tmp_path: Path
) -> None:
    job = replace(job, tiny=replace(job.tiny, dtype=torch.float32))
    for differing, drawn, said in pool(job.layout.world).run(_on_the_same_mesh, job, tmp_path):
        assert differing == []
        assert drawn
        assert said


def test_the_test_above_notices_state_that_is_lost(tmp_path: Path) -> None:
    for differing, _, _ in pool(2).run(_without_second_moment, tmp_path):
        assert any("exp_avg_sq" in name for name in differing)


def _without_second_moment(root: Path) -> tuple[list[str], bool, bool]:
    from parallel_ext.checkpoint import load

    original = load.read_shards

    def dropping(wanted: Any, *args: Any) -> None:
        lost = [each for each in wanted if "exp_avg_sq" in each[0].name]
        original([each for each in wanted if "exp_avg_sq" not in each[0].name], *args)
        for _, tensor in lost:
            tensor.zero_()

    with mock.patch.object(load, "read_shards", dropping):
        return _on_the_same_mesh(Job(layout=Layout(1, 2, 1)), root)


def _random_numbers_on_another_mesh(root: Path, layout: Layout) -> tuple[list[float], list[str]]:
    model, *_, mesh = build(Job(layout=layout))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resumed = px.load_checkpoint(root, model)
    assert not resumed.same_random_numbers
    drawn = _draw()
    seed = json.loads((resumed.path / "parallel_state" / "loop.json").read_text())["random"]
    for function, bits in ((torch.manual_seed, 64), (random.seed, 64), (numpy.random.seed, 32)):
        function(seed_of(seed, 2, mesh) % 2**bits)
    assert _draw() == drawn, "the rule says what is drawn"
    return drawn, [str(w.message) for w in caught if "random numbers" in str(w.message)]


def test_another_mesh_draws_by_the_rule_and_says_so(tmp_path: Path) -> None:
    pool(2).run(_save_after_two_steps, Job(layout=Layout(1, 2, 1)), tmp_path)
    results = pool(3).run(_random_numbers_on_another_mesh, tmp_path, Layout(3, 1, 1))
    assert len({tuple(drawn) for drawn, _ in results}) == 3
    (message,), *others = (messages for _, messages in results)
    assert "'tp': 2" in message
    assert "'dp': 3" in message
    assert others == [[], []]
    # Where the ranks of a model drew the same numbers, they go on doing so.
    results = pool(3).run(_random_numbers_on_another_mesh, tmp_path, Layout(1, 3, 1))
    assert len({tuple(drawn) for drawn, _ in results}) == 1
