"""A profiler shows every exchange, with its kind, its group and its bytes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
import torch.distributed as dist
from ranks import pool
from reference import batch, mesh_of, parallel
from reference_mixtral import Layout, TinyMixtral
from reference_ops import aten_path
from torch.profiler import ProfilerActivity, profile

import parallel_ext as px
from parallel_ext import _C, ops

RANGE = re.compile(r"parallel_ext::(\w+) (.+) ([\d.e+]+ [kMGT]?B)")
COUNTED = {"exchange_bytes": "all_gather", "start_all_reduce": "all_reduce"}
UNITS = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
Shown = list[tuple[str, str, int]]


def _shown_in(function: Callable[[], object]) -> Shown:
    """The kind, group and bytes of each exchange that a profiler shows, in order."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        function()
    shown = []
    for event in profiler.events():
        if found := RANGE.fullmatch(event.name):
            kind, group, size = found.groups()
            number, unit = size.split()
            (num_bytes,) = event.concrete_inputs
            assert float(number) * UNITS[unit] == pytest.approx(num_bytes, rel=5e-3), event.name
            shown.append((kind, group, num_bytes))
    return shown


@contextmanager
def _shared_memory(on: bool) -> Iterator[None]:
    _C.set_shared_memory(on)
    try:
        yield
    finally:
        _C.set_shared_memory(True)


def _of_a_step(layout: Layout, shared: bool, aten: bool) -> tuple[Shown, dict[str, int]]:
    mesh = layout.mesh()
    tiny = TinyMixtral(num_experts=5, layers=1, dtype=torch.float32)
    model = px.data_parallel(parallel(tiny.model(), mesh), mesh)
    data = batch(tiny.vocab_size, rows=2)

    def step() -> None:
        _C.reset_collective_counts()
        model(**data).loss.backward()

    with _shared_memory(shared), aten_path(aten):
        step()
        return _shown_in(step), _C.collective_counts()


@pytest.mark.parametrize("aten", [False, True], ids=["cpu_loops", "aten_path"])
@pytest.mark.parametrize("shared", [True, False], ids=["shared_memory", "process_group"])
@pytest.mark.parametrize("layout", [Layout(1, 2, 2), Layout(2, 1, 2)], ids=str)
def test_the_ranges_of_a_step_are_the_collectives_that_were_counted(
    layout: Layout, shared: bool, aten: bool
) -> None:
    for shown, counts in pool(2).run(_of_a_step, layout, shared, aten):
        number, num_bytes = Counter[str](), Counter[str]()
        kinds = Counter(kind for kind, _, _ in shown)
        assert kinds["finish_all_reduce"] == kinds["start_all_reduce"]
        assert (kinds["start_all_reduce"] > 0) == (layout.tp > 1)
        for kind, _, size in shown:
            if kind == "finish_all_reduce":  # of a sum that was counted where it started
                continue
            number[COUNTED.get(kind, kind)] += 1
            num_bytes[COUNTED.get(kind, kind)] += size
        by_fsdp = {"reduce_scatter"} if layout.dp > 1 else set()
        expected = {kind for kind in counts if f"{kind}_bytes" in counts}
        assert set(number) == expected | by_fsdp
        for kind in expected:
            if kind == "all_gather" and by_fsdp:  # FSDP's are not counted
                assert number[kind] > counts[kind]
            else:
                assert (number[kind], num_bytes[kind]) == (counts[kind], counts[f"{kind}_bytes"])
        assert (counts.get("in_shared_memory", 0) > 0) == shared


def _of_leaves(layout: Layout) -> tuple[int, Shown]:
    """How many experts this rank holds, and its exchanges."""
    tiny = TinyMixtral(num_experts=5, layers=1, dtype=torch.float32)
    mesh = layout.mesh()
    model = px.parallelize(tiny.model(), mesh, invariant=px.Invariant(4, leaves=2))
    held = len(model.model.layers[0].mlp.experts.down_proj)
    px.data_parallel(model, mesh)
    data = batch(tiny.vocab_size, rows=2)
    return held, _shown_in(lambda: px.train_leaves(model, data))


@pytest.mark.parametrize("layout", [Layout(2, 1, 1), Layout(2, 2, 2)], ids=str)
def test_the_gradients_of_experts_are_shown_where_leaves_exchange_them(layout: Layout) -> None:
    for held, shown in pool(layout.world).run(_of_leaves, layout):
        rows = 2 * -(-held // 2)  # of two edp ranks, equally many
        sent = {num_bytes for kind, _, num_bytes in shown if kind == "all_to_all"}
        assert {4 * rows * 26 * 32, 4 * rows * 32 * 13} <= sent  # gate and up; down


def _groups(layout: Layout) -> set[str]:
    mesh = layout.mesh()
    tiny = TinyMixtral(num_experts=5, layers=1, dtype=torch.float32)
    model = px.data_parallel(parallel(tiny.model(), mesh), mesh)
    data = batch(tiny.vocab_size, rows=2)
    return {group for _, group, _ in _shown_in(lambda: model(**data).loss.backward())}


@pytest.mark.parametrize(
    ("layout", "groups"),
    [
        (Layout(1, 2, 1), {"tp", "tp control"}),
        (Layout(1, 2, 2), {"tp/ep", "tp control"}),
        (Layout(2, 1, 2), {"dp/ep"}),
        (Layout(2, 2, 2), {"tp/ep", "dp/edp", "tp control"}),
        (Layout(2, 2, 4), {"tp", "dp", "ep", "tp control"}),
    ],
    ids=lambda value: str(value) if isinstance(value, Layout) else " ".join(sorted(value)),
)
def test_a_group_is_shown_by_its_sides_of_the_mesh(layout: Layout, groups: set[str]) -> None:
    for found in pool(layout.world).run(_groups, layout):
        assert found == groups


def _overlapped() -> Shown:
    input, weight = (torch.ones(4, 3, requires_grad=True) for _ in range(2))
    output = ops.column_linear(input, weight, group=mesh_of().tp)
    return _shown_in(lambda: output.sum().backward())


def test_a_sum_beside_a_product_is_shown_where_it_starts_and_where_it_is_awaited() -> None:
    for shown in pool(2).run(_overlapped):
        assert shown == [("start_all_reduce", "tp", 48), ("finish_all_reduce", "tp", 48)]


def _named(shape: tuple[int, ...]) -> list[Shown]:
    world = ops.Group.of(dist.group.WORLD)
    tensor = torch.ones(shape)
    return [
        _shown_in(partial(ops.reduce_from_region, tensor, group)) for group in (world, ops.ALONE)
    ]


def test_a_group_of_torch_is_shown_by_the_name_that_it_has() -> None:
    for (shown,), alone in pool(2).run(_named, (3, 7)):
        assert shown == ("all_reduce", "default_pg", 84)
        assert alone == []


def _of_the_embedding_alone() -> tuple[Shown, Shown, Shown]:
    mesh = Layout(2, 2, 2).mesh()
    model = parallel(TinyMixtral(layers=1, dtype=torch.float32).model(), mesh).eval()
    ids = torch.full((2, 3), 5)
    model.generation_config.do_sample = True
    generated = _shown_in(lambda: model.generate(ids, max_new_tokens=1))
    px.data_parallel(model, mesh)
    embeds: list[torch.Tensor] = []
    forward = _shown_in(lambda: embeds.append(model.get_input_embeddings()(ids)))
    return generated, forward, _shown_in(lambda: embeds[0].sum().backward())


def test_what_torch_exchanges_is_shown() -> None:
    for generated, forward, backward in pool(4).run(_of_the_embedding_alone):
        assert "broadcast" in {kind for kind, *_ in generated}  # the random state
        assert ("all_gather", "dp/edp") in {(kind, group) for kind, group, _ in forward}
        assert ("reduce_scatter", "dp/edp") in {(kind, group) for kind, group, _ in backward}
