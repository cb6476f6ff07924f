"""Two gloo ranks on the one device: loss, gradients, norms and steps of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from on_device import device_path, placed
from ranks import pool
from reference import FLOOR, Tiny, parallel, worst
from reference_mixtral import TinyMixtral, TinyQwen3Moe, batches, differences_of_steps

import parallel_ext as px
from parallel_ext import _C

CASES = {
    "Llama, tp 2": (Tiny(), {"tp": 2}),
    "Llama, tp 2, a vocabulary of 5": (Tiny(vocab_size=5, tied=True), {"tp": 2}),
    "Mixtral, ep 2": (TinyMixtral(), {"ep": 2}),
    "Qwen3-MoE, tp 2, ep 2": (TinyQwen3Moe(), {"tp": 2, "ep": 2}),
}


def _differences(tiny: Any, sides: dict[str, int], device: torch.device) -> dict[str, float]:
    with device_path(device):
        mesh = px.init_mesh(**sides, timeout=60.0, device=device)
        reference = tiny.model().to(device)
        model = px.data_parallel(parallel(reference, mesh), mesh)
        of_steps = (placed(batches(tiny, mesh.dp_size, seed=step), device) for step in range(2))
        _C.reset_collective_counts()
        differences = differences_of_steps(reference, model, mesh, of_steps)
        assert {each.device for each in model.parameters()} == {mesh.device}
        assert sum(_C.collective_counts().values()) > 0
        mesh.close()
    return differences


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_train_as_one_process(name: str, device: torch.device) -> None:
    for differences in pool(2).run(_differences, *CASES[name], device):
        error, where = worst(differences)
        assert error <= FLOOR[torch.float64], where


def _first_gradient(swapped: bool, device: torch.device) -> float:
    """The largest difference where the ranks' rows of the head are swapped, if asked."""
    with device_path(device):
        mesh = px.init_mesh(tp=2, timeout=60.0, device=device)
        tiny = Tiny(vocab_size=100)
        reference = tiny.model().to(device)
        model = parallel(reference, mesh)
        if swapped:
            with torch.no_grad():
                start = 50 * (1 - mesh.tp_rank)
                model.lm_head.weight.copy_(reference.lm_head.weight[start : start + 50])
        data = placed(batches(tiny, 1), device)
        differences = differences_of_steps(reference, model, mesh, [data])
        mesh.close()
    return worst(differences)[0]


def test_the_comparison_notices_swapped_shards(device: torch.device) -> None:
    for exact, swapped in zip(
        pool(2).run(_first_gradient, False, device),
        pool(2).run(_first_gradient, True, device),
        strict=True,
    ):
        assert exact <= FLOOR[torch.float64]
        assert swapped > 1e-2
