"""What ``RoutingMetrics`` reports is what the single process' routers choose; nothing waits."""

from __future__ import annotations

import copy
import json
import runpy
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import peft
import pytest
import torch
from ranks import pool
from reference import Tiny, mesh_of, parallel
from reference_mixtral import Layout, TinyMixtral, batches, choosing_again
from torch import nn

import parallel_ext as px
from parallel_ext.nn.routing_counter import RoutingCounter
from parallel_ext.sharding.layout import split

TINY = TinyMixtral(num_experts=5, skew="an idle expert")
PLOT = Path(__file__).parents[2] / "examples" / "plot_routing.py"

Choices = list[torch.Tensor]  # of each layer, [T, top_k]


@contextmanager
def _choices_of(reference: nn.Module) -> Iterator[list[Choices]]:
    """Inside, every forward appends what its routers choose."""
    found: list[Choices] = []
    gates = [layer.mlp.gate for layer in reference.model.layers]

    def keep(gate: nn.Module, _: Any, output: Any) -> None:
        if gate is gates[0]:
            found.append([])
        found[-1].append(output[2])

    handles = [gate.register_forward_hook(keep) for gate in gates]
    yield found
    for handle in handles:
        handle.remove()


def _by_expert(choices: Choices, num_experts: int) -> list[list[int]]:
    return [ids.flatten().bincount(minlength=num_experts).tolist() for ids in choices]


def _by_rank(choices: Choices, num_experts: int, layout: Layout) -> list[list[int]]:
    """[layers][ranks]: the rows that the experts on each rank compute."""
    parts, rows = split(num_experts, layout.ep), []
    for ids in choices:
        slices = [
            of_batch[slice(*each)]  # what one rank routes
            for of_batch in ids.chunk(layout.dp)
            for each in split(len(of_batch), layout.tp)
        ]
        rows.append([])
        for rank in range(layout.world):
            start, stop = parts[rank % layout.ep]
            first = rank - rank % layout.ep
            group = torch.cat(slices[first : first + layout.ep])
            rows[-1].append(((group >= start) & (group < stop)).sum().item())
    return rows


def _overloads(loads: list[list[int]]) -> list[float]:
    return [max(parts) * len(parts) / sum(parts) for parts in loads]


def _total(several: list[list[list[int]]]) -> list[list[int]]:
    return torch.tensor(several).sum(0).tolist()


def _by_hand(forwards: list[Choices], layout: Layout) -> tuple[dict[str, float], list[list[int]]]:
    """What a first step must report, but for bytes and time, and the choices in it."""
    choices = _total([_by_expert(one, TINY.num_experts) for one in forwards])
    by_rank = [_by_rank(one, TINY.num_experts, layout) for one in forwards]
    experts, ranks = _overloads(choices), _overloads(_total(by_rank))
    idle = sum(count == 0 for layer in choices for count in layer)
    return {
        "moe/expert_overload_avg": sum(experts) / len(experts),
        "moe/expert_overload_max": max(experts),
        "moe/rank_overload_avg": sum(ranks) / len(ranks),
        "moe/rank_overload_max": max(ranks),
        "moe/rank_overload_peak": max(ranks),
        "moe/rows_peak": max(rows for one in by_rank for layer in one for rows in layer),
        "moe/idle_experts": idle,
        "moe/dead_experts": idle,
    }, choices


def _row_bytes() -> int:
    counts = px._C.collective_counts()
    sent = counts.get("swap_bytes", 0) + counts.get("all_to_all_bytes", 0)
    return sent - sum(counts.get(f"{op}/bytes", 0) for op in ("vocab_embedding", "gather_tokens"))


WITH_EVALUATION, ATEN = "with evaluations", "rows travel in one all-to-all"
CASES = (
    *("accumulated", "recomputed", "recomputed, reentrant", "recomputed and routed again"),
    *("in peft", WITH_EVALUATION, ATEN),
)


def _evaluate(model: Any, batch: dict[str, Any]) -> None:
    """All that must not count."""
    px.check_gradients(model, batch)
    with torch.no_grad():
        model(**batch)
    model.eval()
    model(**batch)
    model.generate(batch["input_ids"], attention_mask=batch["attention_mask"], max_new_tokens=2)
    model.train()


def _reported(layout: Layout, case: str, broken: bool = False) -> tuple[Any, ...]:
    """What a first step reports, what it must, and the bytes that this rank sent meanwhile."""
    reference, mesh = TINY.model(), layout.mesh()
    model = parallel(reference, mesh)
    if case == "in peft":
        model = peft.get_peft_model(model, px.LoraConfig(r=2, target_modules=["q_proj"]))
    px.data_parallel(model, mesh)
    if case.startswith("recomputed"):
        model.gradient_checkpointing_enable({"use_reentrant": case != "recomputed"})
    seeds = (3, 4) if case == "accumulated" else (3,)
    aside = mock.patch.object(RoutingCounter, "aside", nullcontext) if broken else nullcontext()
    px._C.set_aten_path_on_cpu(case == ATEN)
    with _choices_of(reference) as forwards, px.RoutingMetrics(model) as metrics, aside:
        before = _row_bytes()
        for seed in seeds:
            whole, own = batches(TINY, layout.dp, seed=seed)
            reference(**whole)
            with px.no_sync(model) if seed != seeds[-1] else nullcontext():
                loss = model(**own[mesh.dp_rank]).loss
                with choosing_again() if case.endswith("again") else nullcontext():
                    loss.backward()
        sent = _row_bytes() - before
        if case == WITH_EVALUATION:
            _evaluate(model, own[mesh.dp_rank])
        log = metrics.step(0)
    px._C.set_aten_path_on_cpu(False)
    return log, metrics.choices, *_by_hand(forwards, layout), sent


def _check(layout: Layout, case: str) -> None:
    ranks = pool(layout.world).run(_reported, layout, case)
    sent = sum(rank[-1] for rank in ranks)
    assert (sent > 0) == (layout.ep > 1)
    for log, choices, expected, expected_choices, _ in ranks:
        assert choices == expected_choices
        assert {name: log[name] for name in expected} == pytest.approx(expected, rel=1e-12)
        assert set(log) - set(expected) == {
            *("moe/bytes_sent", "moe/exchange_s_min", "moe/exchange_s_max")
        }
        assert log["moe/bytes_sent"] == sent
        assert (log["moe/exchange_s_min"] > 0) == (layout.ep > 1)
        assert log["moe/exchange_s_min"] <= log["moe/exchange_s_max"] < 60
        assert log == ranks[0][0]


@pytest.mark.parametrize(
    "layout",
    [
        *(Layout(1, 1, 1), Layout(2, 1, 1), Layout(2, 1, 2), Layout(1, 2, 2), Layout(1, 3, 3)),
        *(Layout(2, 2, 4), Layout(2, 2, 2), Layout(4, 1, 2)),
    ],
    ids=str,
)
def test_metrics_are_those_of_the_single_process_routers(layout: Layout) -> None:
    _check(layout, "plain")


@pytest.mark.parametrize("layout", [Layout(2, 1, 1), Layout(1, 2, 1)], ids=str)
def test_counts_that_lie_on_a_gpu_are_read_with_the_metrics(layout: Layout) -> None:
    _check(layout, ATEN)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", [Layout(2, 1, 2), Layout(1, 2, 2)], ids=str)
def test_each_choice_counts_once_when(case: str, layout: Layout) -> None:
    _check(layout, case)


def test_the_comparison_notices_an_evaluation_that_counts() -> None:
    log, choices, _, expected_choices, sent = pool(2).run(
        _reported, Layout(2, 1, 2), WITH_EVALUATION, True
    )[0]
    assert choices != expected_choices
    assert log["moe/bytes_sent"] > 2 * sent


def _steps(path: Path) -> tuple[list[dict[str, float]], list[list[list[int]]]]:
    """Three steps into a file, the third by metrics that append to it."""
    mesh, tiny = Layout(2, 1, 2).mesh(), TinyMixtral(num_experts=16, skew="zipf")
    model = px.data_parallel(parallel(tiny.model(), mesh), mesh)
    logs, choices, metrics = [], [], px.RoutingMetrics(model, path)
    for step in range(3):
        if step == 2:
            metrics.close()
            metrics = px.RoutingMetrics(model, path)
        model(**batches(TINY, 2, seed=step)[1][mesh.dp_rank]).loss.backward()
        logs.append(metrics.step(step))
        choices.append(metrics.choices)
    metrics.close()
    return logs, choices


def test_the_file_holds_one_object_a_step_with_what_was_returned(tmp_path: Path) -> None:
    path = tmp_path / "routing.jsonl"
    ranks = pool(2).run(_steps, path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for logs, choices in ranks:
        wanted = zip(range(3), logs, choices, strict=True)
        assert lines == [{"step": s, **log, "choices": c} for s, log, c in wanted]
        overloads = [log["moe/rank_overload_max"] for log in logs]
        peaks = [log["moe/rank_overload_peak"] for log in logs]
        assert peaks == [overloads[0], max(overloads[:2]), overloads[2]]
        both = torch.tensor(choices[:2]).sum(0)
        assert logs[1]["moe/dead_experts"] == (both == 0).sum() < logs[0]["moe/idle_experts"]


def _collectives(layout: Layout, watched: bool) -> list[dict[str, int]]:
    """Of a training step, and of what reports it."""
    mesh = layout.mesh()
    model = parallel(TINY.model(), mesh)
    own = batches(TINY, 1)[1][0]
    model(**own).loss.backward()  # groups find out what memory they share
    with px.RoutingMetrics(model) if watched else nullcontext() as metrics:
        px._C.reset_collective_counts()
        model(**own).loss.backward()
        trained = px._C.collective_counts()
        px._C.reset_collective_counts()
        if watched:
            metrics.step(0)
    return [{k: n for k, n in trained.items() if "/us" not in k}, px._C.collective_counts()]


def test_forward_and_backward_communicate_as_without() -> None:
    for (plain, _), (watched, report) in zip(
        *(pool(2).run(_collectives, Layout(1, 2, 2), on) for on in (False, True)), strict=True
    ):
        assert watched == plain
        assert report["all_gather"] == 2  # the counts, and whether all is well
        assert report["all_gather_bytes"] == (4 + 2 + 2 * 5) * 8 + 1


def test_a_copy_of_a_model_is_not_watched() -> None:
    model = parallel(TINY.model(), px.init_mesh())
    own = batches(TINY, 1)[1][0]
    with px.RoutingMetrics(model) as metrics:
        model(**own)
        metrics.step(0)
        once = metrics.choices
        model(**own)
        copy.deepcopy(model)(**own)
        metrics.step(1)
        assert metrics.choices == once
    model(**own)
    with px.RoutingMetrics(model) as metrics:  # what came before does not count
        model(**own)
        metrics.step(0)
        assert metrics.choices == once


def _watched(path: str | None = None) -> tuple[Any, px.RoutingMetrics, dict[str, Any]]:
    mesh = Layout(1, 2, 2).mesh()
    model = parallel(TINY.model(), mesh)
    return model, px.RoutingMetrics(model, path), batches(TINY, 1)[1][0]


def _twice() -> None:
    px.RoutingMetrics(_watched()[0])


def _nothing_routed() -> None:
    model, metrics, own = _watched()
    model.eval()(**own)
    metrics.step(3)


def _full_disk() -> None:
    model, metrics, own = _watched("/dev/full")
    model(**own)
    metrics.step(3)


def _closed_on_one_rank() -> None:
    model, metrics, own = _watched()
    model(**own)
    if mesh_of().tp_rank == 1:
        metrics.close()
    metrics.step(3)


def _other_steps() -> None:
    model, metrics, own = _watched()
    model(**own)
    metrics.step(mesh_of().tp_rank)


MISUSES = {
    "a model without experts": (
        lambda: px.RoutingMetrics(parallel(Tiny().model(), mesh_of(tp=2))),
        "RoutingMetrics: LlamaForCausalLM has no experts to watch",
    ),
    "a path that cannot be written": (
        lambda: _watched("/nowhere/routing.jsonl"),
        "No such file or directory: '/nowhere/routing.jsonl'",
    ),
    "a number for a path": (lambda: _watched(1), "path must be that of a file, got 1"),
    "a disk that is full": (_full_disk, "No space left on device"),
    "two at a time": (_twice, "the model has one already; call its close() first"),
    "a step without training": (_nothing_routed, "layer 0 has routed nothing since the last step"),
    "a step of what one rank closed": (_closed_on_one_rank, "step(3): closed on rank 1; make a"),
    "unequal steps": (
        _other_steps,
        "rank 0: RoutingMetrics.step(0); rank 1: RoutingMetrics.step(1)",
    ),
}


def _misused(case: str) -> None:
    MISUSES[case][0]()


@pytest.mark.parametrize("case", MISUSES)
def test_misuse_is_one_error_on_all_ranks(case: str) -> None:
    pool(2).assert_raises(_misused, case, words=MISUSES[case][1])


def _alone() -> None:
    mesh = px.init_mesh(tp=2, ep=2, timeout=2.0)
    model = parallel(TINY.model(), mesh)
    metrics = px.RoutingMetrics(model)
    model(**batches(TINY, 1)[1][0])
    if mesh.rank == 0:
        metrics.step(0)


def test_a_step_that_one_rank_leaves_out_names_it() -> None:
    alone, absent = pool(2).run_raising(_alone)
    assert alone.type == "CollectiveTimeout"
    assert "RoutingMetrics.step(0): every rank must call it, but rank 1 did not" in alone.text
    assert absent is None


def _plot(path: Path, before: str = "") -> subprocess.CompletedProcess[str]:
    arguments = [str(PLOT), str(path), "--out", str(path.with_suffix(".png"))]
    code = f"import sys, runpy; sys.argv = {arguments!r}; {before}"
    code += f"runpy.run_path({str(PLOT)!r}, run_name='__main__')"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_the_plot_without_matplotlib_says_what_to_install(tmp_path: Path) -> None:
    result = _plot(tmp_path / "routing.jsonl", before="sys.modules['matplotlib'] = None; ")
    assert result.returncode == 1
    assert "needs matplotlib" in result.stderr
    assert 'pip install "parallel_ext[plot]"' in result.stderr


def _lines(path: Path) -> Path:
    choices = [(5, [9, 9, 9]), (1, [3, 1, 0]), (5, [1, 2, 3])]  # step 5 was trained again
    path.write_text("".join(json.dumps({"step": s, "choices": [c]}) + "\n" for s, c in choices))
    return path


def test_the_plot_shows_choices_over_their_mean(tmp_path: Path) -> None:
    steps, loads = runpy.run_path(str(PLOT))["read"](_lines(tmp_path / "routing.jsonl"))
    assert steps == [1, 5]
    assert loads == [[[2.25, 0.75, 0.0]], [[0.5, 1.0, 1.5]]]


def test_the_plot_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = _lines(tmp_path / "routing.jsonl")
    result = _plot(path)
    assert result.returncode == 0, result.stderr
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
