"""The norm of gradients of which some belong to no parallel model, on every rank."""

from __future__ import annotations

import math

import pytest
import torch
from ranks import Raised, pool

import parallel_ext as px
from parallel_ext.training.gradients import total_norm


def _norm(differing: int | None, norm_type: float) -> float:
    mesh = px.init_mesh(tp=2, timeout=60)
    try:
        beside = [torch.tensor([3.0, 4.0 + (mesh.rank == differing)])]
        return total_norm({mesh: []}, beside, norm_type, False, "f").item()
    finally:
        mesh.close()


@pytest.mark.parametrize(("norm_type", "expected"), [(2.0, 5.0), (math.inf, 4.0)])
def test_equal_gradients_count_once(norm_type: float, expected: float) -> None:
    assert pool(4).run(_norm, None, norm_type) == [expected] * 4


def test_all_ranks_of_a_grid_raise_where_one_holds_another_gradient() -> None:
    """Also those of the other dp rank, which would wait for the raising ones."""
    for raised in pool(4).run_raising(_norm, 1, math.inf):
        assert isinstance(raised, Raised), raised
        assert raised.type == "DisagreementError"
        assert "is 4.0 on ranks 0, 2, 3 and 5.0 on rank 1; average these" in raised.text
