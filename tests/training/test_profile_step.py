"""``profile_step`` leaves no trace, its parts add up, and its bytes are those that were counted."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import peft
import pytest
import torch
import torch.distributed as dist
from ranks import pool
from reference import Tiny, batch, mesh_of, parallel
from reference_cogagent import batch_of, picture, text, tiny_model
from reference_lora import config
from reference_mixtral import Layout, TinyMixtral
from reference_ops import data_bytes
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

import parallel_ext as px
from parallel_ext import _C
from parallel_ext.sharding.named_shards import to_shards
from parallel_ext.sharding.slices import local_part
from parallel_ext.training.step_events import OTHER, PRODUCTS, Exchanges, covered, sort_events

LLAMA = Tiny(dtype=torch.float32)
MIXTRAL = TinyMixtral(num_experts=5, dtype=torch.float32)


class Counting(nn.Module):
    """A module with a buffer that each forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("forwards", torch.zeros(1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += torch.rand(1) + random.random() + numpy.random.rand()
        return x


def _built(kind: str, layout: Layout, zero: int | None) -> tuple[Any, dict[str, Any]]:
    """A model on a mesh, and its batch."""
    mesh = layout.mesh() if dist.is_initialized() else px.init_mesh()
    if kind == "cogagent":
        model = parallel(tiny_model().float().train(), mesh)
        return model, batch_of([picture(7), text(9)])
    tiny = MIXTRAL if kind == "mixtral" else LLAMA
    plain = tiny.model()
    plain.model.norm = (
        nn.Sequential(plain.model.norm, Counting()) if kind == "buffer" else plain.model.norm
    )
    model = parallel(plain, mesh)
    if kind == "lora":
        model = peft.get_peft_model(model, config(lora_dropout=0.4))
    if kind == "checkpointed":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if zero is not None:
        px.data_parallel(model, mesh, zero)
    return model.train(), batch(tiny.vocab_size, rows=2, tokens=7, seed=3 + mesh.dp_rank)


def _optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(
        [{"params": trained[:3]}, {"params": trained[3:], "lr": 0.02, "amsgrad": True}], lr=0.01
    )


def _tensors(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for key in value:
            yield from _tensors(value[key])
    elif isinstance(value, torch.Tensor):
        yield data_bytes(local_part(value.detach()))
    else:
        yield repr(value)


def _everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What a step may change, as bytes."""
    to_shards(model)
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    return {
        "parameters": [data_bytes(local_part(p.detach())) for p in model.parameters()],
        "gradients": [[*_tensors(p.grad)] for p in model.parameters()],
        "gradients are the same": [id(p.grad) for p in model.parameters()],
        "buffers": [data_bytes(b) for b in model.buffers()],
        "states": [[*_tensors(optimizer.state.get(p))] for p in model.parameters()],
        "number of states": len(optimizer.state),
        "groups": repr(groups),
        "other": repr({k: v for k, v in vars(optimizer).items() if isinstance(v, (int, float))}),
        "torch": data_bytes(torch.get_rng_state()),
        "python": random.getstate(),
        "numpy": repr(numpy.random.get_state()),
    }


def _one_step(model: nn.Module, optimizer: torch.optim.Optimizer, data: dict[str, Any]) -> bytes:
    loss = model(**data).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return data_bytes(loss.detach())


def _traces(
    kind: str, layout: Layout, zero: int | None, stepped: bool, profiled: bool
) -> tuple[list[str], list[Any]]:
    """What the profile changed, and the next steps."""
    random.seed(4)
    numpy.random.seed(4)
    model, data = _built(kind, layout, zero)
    optimizer = _optimizer_of(model)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # which notes in it that there was a step
    if stepped:
        _one_step(model, optimizer, data)
    model(**data).loss.backward()
    if profiled:
        before = _everything(model, optimizer)
        px.profile_step(model, data, optimizer, warmup=1, show=False)
        after = _everything(model, optimizer)
        changed = [name for name in before if before[name] != after[name]]
    else:
        changed = []
    optimizer.step()
    optimizer.zero_grad()
    losses = [_one_step(model, optimizer, data) for _ in range(2)]
    everything = _everything(model, optimizer)
    del everything["gradients are the same"]
    return changed, [losses, everything]


CASES: dict[str, tuple[str, Layout, int | None]] = {
    "Llama, tp": ("llama", Layout(1, 2, 1), None),
    "Llama, ZeRO-3": ("llama", Layout(2, 1, 1), 3),
    "Mixtral, tp and ep": ("mixtral", Layout(1, 2, 2), None),
    "Mixtral, ep over dp, ZeRO-2": ("mixtral", Layout(2, 1, 2), 2),
    "LoRA with dropout": ("lora", Layout(1, 2, 1), None),
    "LoRA with dropout, ZeRO-2": ("lora", Layout(2, 1, 1), 2),
    "CogAgent": ("cogagent", Layout(1, 2, 1), None),
    "buffers, and random numbers": ("buffer", Layout(1, 2, 1), None),
    "checkpointed": ("checkpointed", Layout(1, 2, 1), None),
}


@pytest.mark.parametrize("case", CASES)
def test_it_leaves_no_trace(case: str) -> None:
    kind, layout, zero = CASES[case]
    stepped = kind != "llama"
    profiled, plain = (
        pool(2).run(_traces, kind, layout, zero, stepped, flag) for flag in (True, False)
    )
    for (changed, ours), (_, theirs) in zip(profiled, plain, strict=True):
        assert changed == []
        assert ours == theirs


def test_it_leaves_no_trace_in_one_process() -> None:
    (changed, ours), (_, theirs) = (
        _traces("lora", Layout(1, 1, 1), None, True, flag) for flag in (True, False)
    )
    assert changed == []
    assert ours == theirs


def _failing(at: str) -> tuple[Any, list[str]]:
    model, data = _built("llama", Layout(1, 2, 1), None)
    optimizer = _optimizer_of(model)
    _one_step(model, optimizer, data)
    model(**data).loss.backward()
    before = _everything(model, optimizer)
    steps = iter(range(9))

    def fail(*_: Any) -> None:
        if next(steps) == 1:
            raise ZeroDivisionError(at)

    if at == "forward":
        model.register_forward_pre_hook(fail)
    else:
        optimizer.register_step_post_hook(fail)
    with contextlib.suppress(ZeroDivisionError):
        px.profile_step(model, data, optimizer, show=False)
    after = _everything(model, optimizer)
    return next(steps), [name for name in before if before[name] != after[name]]


@pytest.mark.parametrize("at", ["forward", "optimizer"])
def test_it_leaves_no_trace_where_a_step_fails(at: str) -> None:
    assert pool(2).run(_failing, at) == [(2, []), (2, [])]


def _counted(kind: str, layout: Layout, zero: int | None) -> tuple[px.StepProfile, dict[str, int]]:
    model, data = _built(kind, layout, zero)
    optimizer = _optimizer_of(model)
    found = px.profile_step(model, data, optimizer, warmup=1, show=False)
    _one_step(model, optimizer, data)
    _C.reset_collective_counts()
    _one_step(model, optimizer, data)
    return found, _C.collective_counts()


KINDS = ("all_reduce", "all_gather", "swap", "all_to_all")


@pytest.mark.parametrize(
    ("kind", "layout", "groups"),
    [
        ("llama", Layout(1, 2, 1), {"tp", "tp control"}),
        ("mixtral", Layout(1, 2, 2), {"tp/ep", "tp control"}),
        ("cogagent", Layout(1, 2, 1), {"tp", "tp control"}),
    ],
)
def test_the_exchanges_are_those_that_were_counted(
    kind: str, layout: Layout, groups: set[str]
) -> None:
    results = pool(2).run(_counted, kind, layout, None)
    for rank, (found, counts) in enumerate(results):
        assert found == results[0][0]  # the same on every rank
        exchanges = found.ranks[rank].exchanges
        assert set(exchanges) == groups
        assert sum(each.times for each in exchanges.values()) == sum(
            counts.get(k, 0) for k in KINDS
        )
        num_bytes = sum(counts.get(f"{kind}_bytes", 0) for kind in KINDS)
        assert sum(each.num_bytes for each in exchanges.values()) == num_bytes
        assert exchanges["tp control"] == Exchanges(1, 32)


@pytest.mark.parametrize(
    "case", ["Llama, ZeRO-3", "Mixtral, ep over dp, ZeRO-2", "LoRA with dropout"]
)
def test_the_parts_of_a_step_add_up(case: str) -> None:
    for found, _ in pool(2).run(_counted, *CASES[case]):
        for rank in found.ranks:
            assert sum(rank.parts.values()) == pytest.approx(rank.seconds, rel=1e-9)
            assert all(seconds >= 0 for seconds in rank.parts.values())
            assert set(rank.parts) == {f"exchanges {group}" for group in rank.exchanges} | {
                *("matrix products", "attention", "optimizer", "other")
            }
            assert all(rank.parts[name] > 0 for name in rank.parts)
            assert found.spread("attention")[0] <= rank.parts["attention"] <= rank.seconds


def _memory(checkpointing: bool) -> tuple[Any, list[int]]:
    tiny = replace(LLAMA, layers=6)
    model = parallel(tiny.model(), mesh_of())
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters())
    data = batch(tiny.vocab_size, rows=4, tokens=40)
    found = px.profile_step(model, data, optimizer, show=False)
    parameters = sum(p.nbytes for p in model.parameters())
    steps = 4 * len(list(model.parameters()))
    buffers = sum(b.nbytes for b in model.buffers())
    memory = found.ranks[dist.get_rank()].memory
    return memory, [parameters + buffers, 2 * parameters + steps, parameters]


def test_the_memory_of_parameters_gradients_and_states_is_exact() -> None:
    of_ranks = [pool(2).run(_memory, checkpointing) for checkpointing in (False, True)]
    for (plain, expected), (checkpointed, _) in zip(*of_ranks, strict=True):
        for memory in (plain, checkpointed):
            assert [memory.parameters, memory.optimizer, memory.gradients] == expected
            held = memory.parameters + memory.optimizer
            assert memory.peak >= held + max(memory.gradients, memory.activations)
        kept = 6 * 4 * 40 * 72 * 4  # the input of each layer
        assert kept <= checkpointed.activations < kept + 300_000
        assert plain.activations > 5 * checkpointed.activations
        assert plain.peak > checkpointed.peak


def test_the_peak_and_the_bytes_after_a_range_are_those_that_torch_allocated() -> None:
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, profile_memory=True) as own:
        before = torch.empty(1000)
        with record_function("whole"):
            kept = torch.empty(500)
            with record_function("inner"):
                first = torch.empty(300)
                del first
                second = torch.empty(70)
            del before
            (second.view(7, 10) @ torch.empty(10, 3)).sum()
    seen = sort_events(own.profiler.kineto_results.events(), "whole", ["inner"], "cpu")
    assert seen.peak == 4 * (500 + 300)
    assert seen.after == {"inner": 4 * (500 + 70)}
    assert seen.seconds[PRODUCTS] > 0
    assert seen.seconds[OTHER] > 0
    assert kept.numel() == 500


def test_moments_at_which_several_kernels_run_count_once_and_for_what_computes() -> None:
    kernels = [
        (5, 12, OTHER),
        (10, 30, "exchanges tp"),
        (20, 25, PRODUCTS),
        (24, 27, OTHER),
        (40, 70, "optimizer"),
        (95, 130, PRODUCTS),
    ]
    assert covered(kernels, 10, 100) == {
        OTHER: 2 + 2 + 10 + 25,
        "exchanges tp": 8 + 3,
        PRODUCTS: 5 + 5,
        "optimizer": 30,
    }


def _refused(what: str) -> Any:
    model, data = _built("llama", Layout(1, 2, 1), None)
    call = partial(px.profile_step, model, data)
    if what == "evaluation":
        model.eval()
    elif what == "labels":
        del data["labels"]
    elif what == "warmup":
        return call(warmup=0)
    elif what == "matplotlib":
        with mock.patch.object(importlib.util, "find_spec", return_value=None):
            return call(path="profile.png")
    elif what == "plain":
        return px.profile_step(LLAMA.model(), data)
    return call()


@pytest.mark.parametrize(
    ("what", "kind", "words"),
    [
        ("evaluation", "ValueError", "call model.train() first"),
        ("labels", "ValueError", "the batch has no labels"),
        ("warmup", "ValueError", "warmup must be at least 1, got 0"),
        ("matplotlib", "ImportError", "pip install 'parallel_ext[plot]'"),
        ("plain", "TypeError", "parallelize"),
    ],
)
def test_it_refuses(what: str, kind: str, words: str) -> None:
    pool(2).assert_raises(_refused, what, error=kind, words=words)


def _shown(path: str | None) -> tuple[str, px.StepProfile]:
    model, data = _built("llama", Layout(1, 2, 1), None)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        found = px.profile_step(model, data, path=path)
    return out.getvalue(), found


def test_rank_0_prints_a_table_of_its_step_and_of_all_ranks() -> None:
    (table, found), (nothing, _) = pool(2).run(_shown, None)
    assert nothing == ""
    rows = {row[:20].strip(): row.split() for row in table.splitlines()[1:]}
    first = found.ranks[0]
    for part, seconds in first.parts.items():
        least, most = found.spread(part)
        shown = rows[part][len(part.split()) :]
        assert shown[0] == f"{seconds:.4f}"
        assert shown[3:5] == [f"{least:.4f}", f"{most:.4f}"]
    assert rows["exchanges tp"][7] == str(first.exchanges["tp"].times)
    assert rows["step"][1] == f"{first.seconds:.4f}"
    assert rows["optimizer"][1] == "0.0000"  # which it was not given
    assert any(row.startswith("peak ") for row in rows)


def test_rank_0_draws_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "profile.png"
    pool(2).run(_shown, str(path))
    assert path.read_bytes().startswith(b"\x89PNG\r\n")
